/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool.layout: a pool's layout as pool.register took it, so that it can be compared with
 * another, and given to kvd-ctl plan. It may be long: it is written a layer at a time, as
 * text. Nothing holds the pool meanwhile, an engine may unregister it at any time; each
 * piece looks it up anew, and when it is gone the command fails.
 */
#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "daemon/control/commands_pool.h"
#include "daemon/request/reply_walk.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"

struct layout_args {
	uint64_t pool;
};
const struct field pool_layout_fields[] = {
	F_ID("pool", layout_args, pool, REQUIRED,
	     "of this session; an administrator may ask for any"),
	F_END,
};

struct layout_walk {
	struct reply_walk reply;
	uint64_t pool;
	struct layout_writer writer;
};

static struct layout_walk *layout_walk_of(struct reply_walk *reply)
{
	return container_of(reply, struct layout_walk, reply);
}

static void layout_walk_end(struct reply_walk *reply)
{
	mem_free(layout_walk_of(reply));
}

static const struct pool *find_any(const struct session *asking, uint64_t id)
{
	const struct session *session;
	const struct pool *pool;

	list_foreach(session, &asking->kvd->sessions, link) {
		if (session != asking && !asking->admin)
			continue;
		pool = idmap_get(&session->pools, id);
		if (pool && !pool->closing)
			return pool;
	}
	err_raise(ERR_NOTFOUND, "pool: no pool %ju%s", (uintmax_t)id,
		  asking->admin ? "" : " in this session");
	return NULL;
}

static void layout_put_head(struct text *out, const struct pool *pool)
{
	static const char digits[] = "0123456789abcdef";

	text_number(out, ",\"pool\":", pool->id);
	text_puts(out, ",\"name\":");
	text_json(out, pool->name);
	text_number(out, ",\"session\":", pool->session->id);
	text_puts(out, ",\"digest\":\"");
	for (int shift = 60; shift >= 0; shift -= 4)
		text_put(out, &digits[pool->digest >> shift & 15], 1);
	text_puts(out, "\",\"layout\":");
}

static void layout_put_field(struct text *out, const struct layout_field *f)
{
	text_puts(out, "{\"name\":");
	text_json(out, f->name);
	text_number(out, ",\"buffer\":", f->buffer);
	text_number(out, ",\"offset\":", f->offset);
	text_number(out, ",\"page_stride\":", f->page_stride);
	text_number(out, ",\"token_stride\":", f->token_stride);
	text_number(out, ",\"unit_stride\":", f->unit_stride);
	text_number(out, ",\"unit_bytes\":", f->unit_bytes);
	text_number(out, ",\"first_unit\":", f->first_unit);
	text_number(out, ",\"units\":", f->units);
	text_number(out, ",\"total_units\":", f->total_units);
	if (f->format[0]) {
		text_puts(out, ",\"format\":");
		text_json(out, f->format);
	}
	text_puts(out, "}");
}

static void put_layer(struct text *out, const struct layout_layer *layer, bool first)
{
	text_number(out, first ? "{\"layer\":" : ",{\"layer\":", layer->layer);
	text_puts(out, ",\"fields\":[");
	for (uint32_t i = 0; i < layer->field_count; i++) {
		text_puts(out, i ? "," : "");
		layout_put_field(out, &layer->fields[i]);
	}
	text_puts(out, "]}");
}

static void put_view(struct text *out, const struct layout_view *view, bool first)
{
	text_puts(out, first ? "" : ",");
	text_json(out, view->name);
	text_number(out, ":{\"page_tokens\":", view->page_tokens);
	text_number(out, ",\"pages\":", view->pages);
	if (!token_shard_is_all(&view->shard)) {
		text_number(out, ",\"shard\":{\"size\":", view->shard.size);
		text_number(out, ",\"rank\":", view->shard.rank);
		text_number(out, ",\"run\":", view->shard.run);
		text_puts(out, "}");
	}
	text_puts(out, ",\"layers\":[");
}

static void put_layout_head(struct text *out, const struct layout *layout)
{
	text_number(out, "{\"rank\":", layout->rank);
	text_puts(out, ",\"buffers\":[");
	for (uint32_t i = 0; i < layout->buffer_count; i++)
		text_number(out, i ? "," : "", layout->buffers[i]);
	text_puts(out, "],\"views\":{");
}

bool layout_write_some(struct layout_writer *writer, const struct layout *layout,
		       struct text *out)
{
	const struct layout_view *view;

	if (!writer->begun) {
		writer->begun = true;
		put_layout_head(out, layout);
		return true;
	}
	if (writer->view >= layout->view_count) {
		text_puts(out, "}}");
		return false;
	}
	view = &layout->views[writer->view];
	if (writer->layer == 0)
		put_view(out, view, writer->view == 0);
	if (writer->layer < view->layer_count) {
		put_layer(out, &view->layers[writer->layer], writer->layer == 0);
		writer->layer++;
	}
	if (writer->layer >= view->layer_count) {
		text_puts(out, "]}");
		writer->view++;
		writer->layer = 0;
	}
	return true;
}

static int layout_piece(struct reply_walk *reply)
{
	struct layout_walk *walk = layout_walk_of(reply);
	struct text *out = &walk->reply.text;
	const struct pool *pool = find_any(reply->req->session, walk->pool);

	if (!pool)
		return err_pass(-ENOENT);
	if (!walk->writer.begun)
		layout_put_head(out, pool);
	return layout_write_some(&walk->writer, pool->layout, out);
}

int pool_layout_run(struct request *req)
{
	const struct layout_args *args = request_args(req);
	struct layout_walk *walk;

	if (!find_any(req->session, args->pool))
		return err_pass(-ENOENT);
	walk = mem_zalloc(sizeof(*walk));
	if (!walk)
		return err_pass(-ENOMEM);
	walk->pool = args->pool;
	walk->reply.piece = layout_piece;
	walk->reply.end = layout_walk_end;
	reply_walk_begin(&walk->reply, req);
	return 0;
}
