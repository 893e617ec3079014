/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool's layout, built field by field and formatted as the JSON that the planner reads
 * (docs/internals/layouts.md). The builder only stores and sorts: fields may be added in
 * any order and are sorted by view and layer when the text is written. Rules of layouts
 * (bytes inside their buffers, no overlap) are checked by the daemon, for all clients;
 * this file refuses only values that JSON cannot represent. The first error is kept until
 * the text is requested, so that forty calls need no forty checks.
 */
#include "lib/client.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUMBER_MAX UINT64_C(9007199254740991) /* of a JSON number: 2^53 - 1 */

struct layout_part {
	uint32_t view, layer, order; /* order: the order of addition */
	char name[32], format[16];
	struct kvd_field field;
};

struct kvd_layout {
	uint32_t rank;
	uint64_t *buffers;
	uint32_t buffer_count;
	struct layout_view_part {
		char name[32];
		uint32_t page_tokens, pages;
		uint32_t shard_size, shard_rank, shard_run;
	} * views;
	uint32_t view_count;
	struct layout_part *parts;
	uint32_t part_count, part_cap;
	struct kvd_error error;
	struct text text;
};

struct kvd_layout *kvd_layout_new(uint32_t rank)
{
	struct kvd_layout *layout = mem_zalloc(sizeof(*layout));

	if (layout)
		layout->rank = rank;
	return layout;
}

void kvd_layout_free(struct kvd_layout *layout)
{
	if (!layout)
		return;
	text_fini(&layout->text);
	mem_free(layout->buffers);
	mem_free(layout->views);
	mem_free(layout->parts);
	mem_free(layout);
}

static void layout_fail(struct kvd_layout *layout, int code, const char *what)
{
	if (!layout->error.code)
		client_error_set(&layout->error, code, "%s", what);
}

static bool name_copy(struct kvd_layout *layout, char out[32], const char *name)
{
	if (!name || !*name || strlen(name) > 31) {
		layout_fail(layout, KVD_E_INVAL, "name: 1 to 31 bytes");
		return false;
	}
	snprintf(out, 32, "%s", name);
	return true;
}

uint32_t kvd_layout_buffer(struct kvd_layout *layout, uint64_t bytes)
{
	uint64_t *buffers =
		mem_regrow(layout->buffers, layout->buffer_count + 1u, sizeof(*buffers));

	if (!buffers) {
		layout_fail(layout, KVD_E_NOMEM, "out of memory");
		return 0;
	}
	if (bytes > NUMBER_MAX)
		layout_fail(layout, KVD_E_RANGE, "buffer: more than 2^53 - 1 bytes");
	layout->buffers = buffers;
	buffers[layout->buffer_count] = bytes;
	return layout->buffer_count++;
}

uint32_t kvd_layout_view(struct kvd_layout *layout, const char *name,
			 uint32_t page_tokens, uint32_t pages)
{
	struct layout_view_part *views =
		mem_regrow(layout->views, layout->view_count + 1u, sizeof(*views));

	if (!views) {
		layout_fail(layout, KVD_E_NOMEM, "out of memory");
		return 0;
	}
	layout->views = views;
	if (!name_copy(layout, views[layout->view_count].name, name))
		return 0;
	views[layout->view_count].shard_size = 0;
	views[layout->view_count].page_tokens = page_tokens;
	views[layout->view_count].pages = pages;
	return layout->view_count++;
}

void kvd_layout_shard(struct kvd_layout *layout, uint32_t view, uint32_t size,
		      uint32_t rank, uint32_t run)
{
	struct layout_view_part *part;

	if (view >= layout->view_count) {
		layout_fail(layout, KVD_E_INVAL, "shard: no such view");
		return;
	}
	part = &layout->views[view];
	part->shard_size = size;
	part->shard_rank = rank;
	part->shard_run = run;
}

void kvd_layout_field(struct kvd_layout *layout, uint32_t view, uint32_t layer,
		      const struct kvd_field *field)
{
	struct layout_part *parts = layout->parts, *part;
	uint32_t cap = layout->part_cap ? layout->part_cap * 2 : 64;

	if (view >= layout->view_count || field->buffer >= layout->buffer_count) {
		layout_fail(layout, KVD_E_INVAL, "field: no such view or buffer");
		return;
	}
	if (field->offset > NUMBER_MAX || field->page_stride > NUMBER_MAX ||
	    field->token_stride > NUMBER_MAX || field->unit_stride > NUMBER_MAX ||
	    field->unit_bytes > NUMBER_MAX) {
		layout_fail(layout, KVD_E_RANGE, "field: a value over 2^53 - 1");
		return;
	}
	if (layout->part_count == layout->part_cap) {
		parts = mem_regrow(parts, cap, sizeof(*parts));
		if (!parts) {
			layout_fail(layout, KVD_E_NOMEM, "out of memory");
			return;
		}
		layout->parts = parts;
		layout->part_cap = cap;
	}
	part = &parts[layout->part_count];
	if (field->format && strlen(field->format) >= sizeof(part->format)) {
		layout_fail(layout, KVD_E_INVAL, "format: longer than 15 bytes");
		return;
	}
	*part = (struct layout_part){.view = view,
				     .layer = layer,
				     .order = layout->part_count,
				     .field = *field};
	snprintf(part->format, sizeof(part->format), "%s",
		 field->format ? field->format : "");
	part->field.name = part->field.format = NULL;
	if (!part->field.total_units)
		part->field.total_units = field->units;
	if (name_copy(layout, part->name, field->name))
		layout->part_count++;
}

void kvd_layout_heads(struct kvd_layout *layout, uint32_t view, uint32_t layer,
		      enum kvd_head_order order, const struct kvd_field *field)
{
	struct kvd_field f = *field;
	uint64_t tokens;

	if (view >= layout->view_count) {
		layout_fail(layout, KVD_E_INVAL, "field: no such view or buffer");
		return;
	}
	tokens = layout->views[view].page_tokens;
	if (f.unit_bytes > NUMBER_MAX / (tokens + 1) / (f.units + 1u)) {
		layout_fail(layout, KVD_E_RANGE,
			    "field: a page of more than 2^53 - 1 bytes");
		return;
	}
	f.token_stride = order == KVD_HND ? f.unit_bytes : f.unit_bytes * f.units;
	f.unit_stride = order == KVD_HND ? f.unit_bytes * tokens : f.unit_bytes;
	if (!f.page_stride)
		f.page_stride = f.unit_bytes * f.units * tokens;
	kvd_layout_field(layout, view, layer, &f);
}

static int part_cmp(const void *a, const void *b)
{
	const struct layout_part *x = a, *y = b;

	if (x->view != y->view)
		return x->view < y->view ? -1 : 1;
	if (x->layer != y->layer)
		return x->layer < y->layer ? -1 : 1;
	return x->order < y->order ? -1 : 1;
}

static void part_text(struct text *t, const struct layout_part *part)
{
	const struct kvd_field *f = &part->field;

	out_object(t, NULL);
	out_text(t, "name", part->name);
	out_number(t, "buffer", f->buffer);
	out_number(t, "offset", f->offset);
	out_number(t, "page_stride", f->page_stride);
	out_number(t, "token_stride", f->token_stride);
	out_number(t, "unit_stride", f->unit_stride);
	out_number(t, "unit_bytes", f->unit_bytes);
	out_number(t, "first_unit", f->first_unit);
	out_number(t, "units", f->units);
	out_number(t, "total_units", f->total_units);
	out_filled(t, "format", part->format);
	out_close(t, '}');
}

static void view_text(struct kvd_layout *layout, uint32_t view)
{
	const struct layout_view_part *v = &layout->views[view];
	const struct layout_part *part, *before = NULL;
	struct text *t = &layout->text;

	out_object(t, v->name);
	out_number(t, "page_tokens", v->page_tokens);
	out_number(t, "pages", v->pages);
	if (v->shard_size) {
		out_object(t, "shard");
		out_number(t, "size", v->shard_size);
		out_number(t, "rank", v->shard_rank);
		out_number(t, "run", v->shard_run);
		out_close(t, '}');
	}
	out_array(t, "layers");
	for (uint32_t i = 0; i < layout->part_count; i++) {
		part = &layout->parts[i];
		if (part->view != view)
			continue;
		if (before && before->layer != part->layer)
			text_puts(t, "]}");
		if (!before || before->layer != part->layer) {
			out_object(t, NULL);
			out_number(t, "layer", part->layer);
			out_array(t, "fields");
		}
		part_text(t, part);
		before = part;
	}
	text_puts(t, before ? "]}]}" : "]}");
}

int kvd_layout_text(struct kvd_layout *layout, const char **text_p)
{
	struct text *t = &layout->text;

	*text_p = NULL;
	t->len = 0;
	if (layout->part_count)
		qsort(layout->parts, layout->part_count, sizeof(*layout->parts),
		      part_cmp);
	out_object(t, NULL);
	out_number(t, "rank", layout->rank);
	out_array(t, "buffers");
	for (uint32_t i = 0; i < layout->buffer_count; i++)
		out_number(t, NULL, layout->buffers[i]);
	out_close(t, ']');
	out_object(t, "views");
	for (uint32_t i = 0; i < layout->view_count; i++)
		view_text(layout, i);
	text_puts(t, "}}");
	if (t->failed)
		layout_fail(layout, KVD_E_NOMEM, "out of memory");
	if (layout->error.code) {
		*client_error_thread() = layout->error;
		return -layout->error.code;
	}
	*text_p = t->data;
	return 0;
}
