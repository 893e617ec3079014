/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.digest: XXH3 of the contents of an open room's pages, to compare the two sides of
 * a transfer when tokens are wrong. No peer is involved: each daemon reads the memory of
 * its own engine, and kvd-ctl compares.
 *
 * Both sides must name the same bytes, independent of their pages, orders and ranks. A
 * digest therefore covers one block: one layer of a view, one field, one unit (a head) by
 * the model's numbering, and the tokens [k * block, (k + 1) * block) of the request that
 * the pages hold. Its bytes are the unit's rows in the order of tokens. Page order, page
 * size and the split over ranks do not affect it.
 *
 * The copy threads gather the rows in slices of 256 KiB, because only they may access
 * memory that its owner can truncate, another process's memory, or a GPU's. A slice is
 * hashed on the loop, which takes a quarter of a turn. Between slices the room is found
 * again; the pool stays in use, so its regions remain. A reply has at most KEYS_MAX
 * blocks and the position of the next one.
 *
 * The pages of a sender are not kept after a chunk has moved, since that would cost
 * memory in every room for a rare command. The caller therefore passes them with the
 * command.
 */
#include <errno.h>
#include <xxhash.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/base/text.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/room/commands_room.h"
#include "daemon/loop/loop.h"
#include "daemon/memory/copy.h"
#include "daemon/room/room.h"
#include "daemon/room/room_cursor.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"

#define SLICE_BYTES (256u << 10)
#define SLICE_ROWS 512u
#define SLICE_BLOCKS 64u /* formatted in one turn */
#define KEYS_MAX 4096u
#define FIELDS_A_TURN 1024u /* skipped before `from` */
#define BLOCK_MAX 65536

struct digest_args {
	struct room_key key;
	const cJSON *views;
	uint64_t generation, from;
	int32_t block;
};
const struct field room_digest_fields[] = {
	F_U64("room", digest_args, key.number, REQUIRED, "Number of the room"),
	F_CHOICE("role", digest_args, key.role, DEFAULT(-1), room_role_names,
		 "send, recv, offer or pull; required if several rooms have this number"),
	F_U64("generation", digest_args, generation, DEFAULT(0),
	      "Generation of the room, in any session (administrators only)"),
	F_OBJECT("views", digest_args, views, OPTIONAL,
		 "Pages, for a sender only: as passed to room.send"),
	F_INT("block", digest_args, block, DEFAULT(64), 1, BLOCK_MAX,
	      "Tokens per block; default 64"),
	F_U64("from", digest_args, from, DEFAULT(0),
	      "`next` of the previous reply; default 0"),
	F_END,
};

/* Position of the next byte. */
struct place {
	size_t map;
	const struct layout_view *view; /* of the block; NULL: not found yet */
	uint32_t layer, field, unit;	/* indexes */
	bool in_unit;			/* `token` is set */
	uint64_t token, byte;
};

/* Position within one row. */
struct piece {
	const struct room_map *map;
	const struct layout_layer *layer;
	const struct layout_field *field;
	uint32_t unit; /* by the model's numbering */
	uint64_t token;
	uint32_t page;
	uint64_t src, len;
	bool begins, ends; /* its block */
};

struct digest {
	struct request *req;
	struct session *session; /* held */
	struct rooms *rooms;
	uint64_t gen;
	struct pool *pool;     /* in use */
	struct room_maps sent; /* of a sender */
	uint64_t block;
	uint64_t skip; /* number of blocks left to skip */
	uint64_t keys; /* in this reply */
	struct place at, slice_at;
	struct copy_buffer *buffers;
	uint8_t *bytes;
	uint64_t slice_bytes;
	struct plan *plan;
	struct copy_job job;
	XXH3_state_t *state;
	struct text text;
	bool in_group;
	uint32_t page; /* where the current block starts */
	struct loop_defer go;
};

static void digest_free(struct digest *d)
{
	text_fini(&d->text);
	XXH3_freeState(d->state);
	plan_free(d->plan);
	mem_free(d->bytes);
	mem_free(d->buffers);
	room_maps_fini(&d->sent);
	mem_free(d);
}

/* Reply with `r` if negative (raised), or with the text. */
static void digest_over(struct digest *d, int r)
{
	struct request *req = d->req;
	struct session *session = d->session;
	struct pool *pool = d->pool;
	struct err why;

	if (r < 0)
		err_take(&why);
	room_session(session)->digesting = false;
	if (!req->session)
		request_drop(req);
	else if (r < 0)
		request_fail(req, &why);
	else if (request_text_reply(req, &d->text) < 0)
		request_fail_last(req);
	digest_free(d);
	pool_unuse(pool);
	session_drain_end(session);
}

/* ---- which bytes, in which order ---- */

/* The next field with rows; false: none. */
static bool place_settle(const struct digest *d, const struct room_maps *maps,
			 struct place *at, struct piece *p)
{
	for (; at->map < maps->count;
	     at->map++, at->view = NULL, at->layer = at->field = at->unit = 0) {
		const struct room_map *map = &maps->maps[at->map];
		const struct layout_view *view = at->view;

		if (!view)
			view = at->view = layout_view_find(d->pool->layout, map->view);
		for (; view && map->token_begin < map->token_end &&
		       at->layer < view->layer_count;
		     at->layer++, at->field = at->unit = 0) {
			const struct layout_layer *layer = &view->layers[at->layer];

			if (layer->layer < map->layers.begin ||
			    layer->layer >= map->layers.end)
				continue;
			for (; at->field < layer->field_count;
			     at->field++, at->unit = 0) {
				const struct layout_field *field =
					&layer->fields[at->field];

				if (at->unit >= field->units)
					continue;
				*p = (struct piece){
					.map = map, .layer = layer, .field = field};
				return true;
			}
		}
	}
	return false;
}

/* At most `most` bytes. */
static bool piece_next(const struct digest *d, const struct room_maps *maps,
		       struct place *at, uint64_t most, struct piece *p)
{
	uint64_t begin, end, slot;
	uint32_t page_tokens;

	if (!place_settle(d, maps, at, p))
		return false;
	begin = p->map->token_begin;
	end = p->map->token_end;
	if (!at->in_unit) {
		at->in_unit = true;
		at->token = begin;
		at->byte = 0;
	}
	page_tokens = at->view->page_tokens;
	slot = at->token - p->map->first_token;
	p->unit = p->field->first_unit + at->unit;
	p->token = at->token;
	p->page = p->map->pages[slot / page_tokens];
	p->src = p->field->offset + p->page * p->field->page_stride +
		 slot % page_tokens * p->field->token_stride +
		 at->unit * p->field->unit_stride + at->byte;
	p->len = p->field->unit_bytes - at->byte;
	p->begins = at->byte == 0 && (at->token == begin || at->token % d->block == 0);
	if (p->len > most) {
		p->len = most;
		at->byte += most;
		return true;
	}
	at->byte = 0;
	at->token++;
	p->ends = at->token == end || at->token % d->block == 0;
	if (at->token == end) {
		at->in_unit = false;
		at->unit++;
	}
	return true;
}

/* Advance to the requested block by whole fields; true: not reached yet. */
static bool skip_some(struct digest *d, const struct room_maps *maps)
{
	struct piece p;

	for (unsigned int i = 0; i < FIELDS_A_TURN && d->skip; i++) {
		uint64_t begin, end, blocks, units;

		if (!place_settle(d, maps, &d->at, &p)) {
			d->skip = 0;
			break;
		}
		begin = p.map->token_begin;
		end = p.map->token_end;
		blocks = (end - 1) / d->block - begin / d->block + 1;
		units = d->skip / blocks;
		if (units >= p.field->units) {
			d->skip -= p.field->units * blocks;
			d->at.field++;
			continue;
		}
		d->at.unit = (uint32_t)units;
		d->at.token = (begin / d->block + d->skip % blocks) * d->block;
		if (d->at.token < begin)
			d->at.token = begin;
		d->at.in_unit = true;
		d->skip = 0;
	}
	return d->skip > 0;
}

/* ---- a slice ---- */

static void group_end(struct digest *d)
{
	if (d->in_group) {
		out_close(&d->text, ']');
		out_close(&d->text, '}');
	}
	d->in_group = false;
}

static void block_begin(struct digest *d, const struct piece *p)
{
	struct text *out = &d->text;

	if (p->token == p->map->token_begin || !d->in_group) {
		group_end(d);
		out_object(out, NULL);
		out_text(out, "view", p->map->view);
		out_number(out, "layer", p->layer->layer);
		out_text(out, "field", p->field->name);
		out_number(out, "unit", p->unit);
		out_array(out, "blocks");
	}
	d->in_group = true;
	out_array(out, NULL);
	out_number(out, NULL, p->token);
	d->page = p->page;
	XXH3_64bits_reset(d->state);
}

static void hash_slice(struct digest *d, const struct room_maps *maps)
{
	uint64_t done = 0;
	struct place at = d->slice_at;
	struct piece p;

	while (done < d->slice_bytes &&
	       piece_next(d, maps, &at, d->slice_bytes - done, &p)) {
		if (p.begins)
			block_begin(d, &p);
		XXH3_64bits_update(d->state, d->bytes + done, p.len);
		done += p.len;
		if (!p.ends)
			continue;
		out_number(&d->text, NULL, p.token + 1);
		out_number(&d->text, NULL, d->page);
		out_digest(&d->text, NULL, XXH3_64bits_digest(d->state));
		out_close(&d->text, ']');
		d->keys++;
	}
}

/* The rows of the next slice, up to the reply's last block. */
static int slice_plan(struct digest *d, const struct room_maps *maps)
{
	struct plan_builder *builder;
	uint64_t keys = 0;
	struct piece p;
	int r = plan_builder_new(&builder);

	if (r < 0)
		return err_pass(r);
	plan_free(d->plan);
	d->plan = NULL;
	d->slice_at = d->at;
	d->slice_bytes = 0;
	for (unsigned int rows = 0;
	     r >= 0 && rows < SLICE_ROWS && keys < SLICE_BLOCKS &&
	     d->keys + keys < KEYS_MAX && d->slice_bytes < SLICE_BYTES;
	     rows++) {
		if (!piece_next(d, maps, &d->at, SLICE_BYTES - d->slice_bytes, &p))
			break;
		r = plan_builder_add(builder, &(struct plan_run){
						      .src = p.src,
						      .dst = d->slice_bytes,
						      .len = p.len,
						      .count = 1,
						      .src_buffer = p.field->buffer,
					      });
		d->slice_bytes += p.len;
		keys += p.ends;
	}
	if (r >= 0)
		r = plan_builder_finish(builder, &d->plan);
	plan_builder_free(builder);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- its turns ---- */

/* NULL: raised. */
static const struct room_maps *maps_of(const struct digest *d)
{
	const struct room *room = rooms_by_gen(d->rooms, d->gen);

	if (!d->req->session) {
		err_raise(ERR_SESSION, "the session has ended");
		return NULL;
	}
	if (!room) {
		err_raise(ERR_NOTFOUND, "room: closed during the command");
		return NULL;
	}
	return room->role == ROOM_SEND ? &d->sent : &room->pages.maps;
}

static void digest_end(struct digest *d, const struct room_maps *maps)
{
	const struct digest_args *args = request_args(d->req);
	struct place at = d->at;
	struct piece p;

	group_end(d);
	out_close(&d->text, ']');
	if (place_settle(d, maps, &at, &p))
		out_id(&d->text, "next", args->from + d->keys);
	digest_over(d, 0);
}

static void digest_on_copied(struct copy_job *job)
{
	struct digest *d = container_of(job, struct digest, job);
	const struct room_maps *maps = maps_of(d);

	if (!maps || job->result < 0) {
		digest_over(d, maps ? err_reraise(&job->err) : -ENOENT);
		return;
	}
	hash_slice(d, maps);
	loop_defer(d->session->kvd->loop, &d->go);
}

static void digest_on_go(struct loop_defer *defer)
{
	struct digest *d = container_of(defer, struct digest, go);
	const struct room_maps *maps = maps_of(d);
	int r;

	if (!maps) {
		digest_over(d, -ENOENT);
		return;
	}
	if (skip_some(d, maps)) {
		loop_defer(d->session->kvd->loop, &d->go);
		return;
	}
	r = slice_plan(d, maps);
	if (r >= 0 && d->slice_bytes == 0) {
		digest_end(d, maps);
		return;
	}
	if (r >= 0) {
		d->job = (struct copy_job){
			.plan = d->plan,
			.end = d->slice_bytes,
			.src = {.buffers = d->buffers,
				.buffer_count = d->pool->layout->buffer_count},
			.dst = {.linear = d->bytes},
			.on_done = digest_on_copied};
		r = copier_submit(d->session->kvd->copier, &d->job);
	}
	if (r < 0)
		digest_over(d, r);
}

/* ---- the command ---- */

/* NULL: raised. */
static struct room *room_of(struct request *req)
{
	const struct digest_args *args = request_args(req);
	struct room *room;

	if (!args->generation)
		return room_asked_any(req, &args->key);
	room = rooms_by_gen(rooms_of(req->kvd), args->generation);
	if (room && room->number == args->key.number &&
	    (room->session == req->session || req->session->admin))
		return room;
	err_raise(ERR_NOTFOUND, "generation: no open room %llu has this generation",
		  (unsigned long long)args->key.number);
	return NULL;
}

static int check_room(const struct request *req, const struct room *room)
{
	const struct digest_args *args = request_args(req);
	unsigned long long number = room->number;

	if (room_session(req->session)->digesting)
		return err_raise(ERR_BUSY,
				 "room.digest: another one is running in this session; "
				 "wait for its reply");
	if (room->role == ROOM_SEND && !args->views)
		return err_raise(ERR_STATE,
				 "room %llu: the pages of a sender are not kept; pass "
				 "them as \"views\", as in room.send",
				 number);
	if (room->role != ROOM_SEND && args->views)
		return err_raise(ERR_INVAL, "views: only for a sender; omit them");
	if (room->role != ROOM_SEND && !room->pages.maps.count)
		return err_raise(ERR_STATE,
				 "room %llu: no pages are bound; use room.bind", number);
	if (room->pool->closing)
		return err_raise(ERR_STATE, "room %llu: its pool is closing", number);
	return 0;
}

static int buffers_fill(struct digest *d)
{
	const struct layout *layout = d->pool->layout;

	for (uint32_t i = 0; i < layout->view_count; i++)
		if (!token_shard_is_all(&layout->views[i].shard))
			return err_raise(ERR_INVAL,
					 "view %s: contains a shard of the tokens; "
					 "digests need whole blocks of tokens",
					 layout->views[i].name);
	d->buffers = mem_calloc(layout->buffer_count, sizeof(*d->buffers));
	d->bytes = mem_alloc(SLICE_BYTES);
	d->state = XXH3_createState();
	if (!d->buffers || !d->bytes || !d->state)
		return err_raise(ERR_NOMEM, "out of memory for a digest");
	for (uint32_t i = 0; i < layout->buffer_count; i++) {
		const struct pool_buffer *b = &d->pool->buffers[i];
		int r = memory_check_copyable(b->region->memory);

		if (r < 0)
			return err_prefix(r, "region %llu",
					  (unsigned long long)b->region->id);
		d->buffers[i] = (struct copy_buffer){b->region->memory, b->offset,
						     layout->buffers[i]};
	}
	return 0;
}

int room_digest_run(struct request *req)
{
	const struct digest_args *args = request_args(req);
	struct room *room = room_of(req);
	struct digest *d;
	int r = room ? check_room(req, room) : -ENOENT;

	if (r < 0)
		return err_pass(r);
	d = mem_zalloc(sizeof(*d));
	if (!d)
		return err_pass(-ENOMEM);
	d->pool = room->pool;
	r = buffers_fill(d);
	if (r >= 0 && args->views)
		r = room_maps_parse(args->views, -1, room->pool->layout,
				    req->session->account, &d->sent);
	if (r < 0) {
		digest_free(d);
		return err_pass(r);
	}
	d->req = req;
	d->session = req->session;
	d->rooms = rooms_of(req->kvd);
	d->gen = room->gen;
	d->block = (uint64_t)args->block;
	d->skip = args->from;
	loop_defer_init(&d->go, digest_on_go);
	pool_use(d->pool);
	room_session(d->session)->digesting = true;
	session_drain_begin(d->session);
	request_text_begin(req, &d->text);
	out_text(&d->text, "role", room_role_names[room->role]);
	out_number(&d->text, "block", d->block);
	out_array(&d->text, "units");
	loop_defer(req->kvd->loop, &d->go);
	return 0;
}
