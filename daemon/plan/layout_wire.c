/* SPDX-License-Identifier: Apache-2.0 */
/*
 * layout_wire: the binary form of a layout that REGISTER carries.
 *
 *   u8 form (2) · u32 rank · u32 n, n x u64 buffer lengths · u32 n views:
 *   str name · u32 page_tokens · u32 pages · u32 size, rank, run of the shard ·
 *   u32 n layers:
 *   u32 layer · u8 same · [u32 n fields: field …]
 *   field: str name · str format · u32 buffer · u64 offset, page_stride, token_stride,
 *          unit_stride, unit_bytes · u32 first_unit, units, total_units
 *
 * Layers of a model are nearly always alike. `same` = 1 says that the layer has
 * the fields of the layer before it, and only buffer and offset of each follow:
 * 12 bytes a field instead of about 70, so a pool of 80 layers is 2 KiB.
 *
 * Decoding does not trust its input: counts are checked against the remaining bytes
 * before memory is allocated, and the finished layout passes layout_check(). A `same`
 * layer costs memory of the field structs from 17 bytes on the wire; the ratio is bounded
 * by sizeof(struct layout_field) / 12.
 */
#include <string.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout.h"

#define WIRE_FORM 2
#define FIELD_FIXED (4 + 5 * 8 + 3 * 4)
#define FIELD_MIN (2 + 1 + 2 + FIELD_FIXED)
#define FIELD_SAME (4 + 8)
#define VIEW_MIN (2 + 1 + 6 * 4)
#define LAYER_MIN (4 + 1)
/* clang-format off */
#define FIELD(F) \
	F(32, buffer) F(64, offset) F(64, page_stride) F(64, token_stride) \
	F(64, unit_stride) F(64, unit_bytes) F(32, first_unit) F(32, units) \
	F(32, total_units)
/* clang-format on */

/* Equal in everything but the position. */
static bool layers_same(const struct layout_layer *a, const struct layout_layer *b)
{
	if (a->field_count != b->field_count)
		return false;
	for (uint32_t i = 0; i < a->field_count; i++) {
		const struct layout_field *f = &a->fields[i], *g = &b->fields[i];

		if (strcmp(f->name, g->name) != 0 || f->page_stride != g->page_stride ||
		    f->token_stride != g->token_stride ||
		    f->unit_stride != g->unit_stride || f->unit_bytes != g->unit_bytes ||
		    f->first_unit != g->first_unit || f->units != g->units ||
		    f->total_units != g->total_units || strcmp(f->format, g->format) != 0)
			return false;
	}
	return true;
}

static void field_encode(struct cursor *c, const struct layout_field *m)
{
	cursor_put_str(c, m->name);
	cursor_put_str(c, m->format);
	FIELD(CURSOR_PUT);
}

static void put_layer(struct cursor *out, const struct layout_view *view, uint32_t i)
{
	const struct layout_layer *layer = &view->layers[i];
	bool same = i > 0 && layers_same(layer, layer - 1);

	cursor_put_u32(out, layer->layer);
	cursor_put_u8(out, same);
	if (!same)
		cursor_put_u32(out, layer->field_count);
	for (uint32_t j = 0; j < layer->field_count; j++) {
		if (same) {
			cursor_put_u32(out, layer->fields[j].buffer);
			cursor_put_u64(out, layer->fields[j].offset);
		} else {
			field_encode(out, &layer->fields[j]);
		}
	}
}

int layout_encode(const struct layout *layout, struct cursor *out)
{
	if (layout->unbounded)
		return err_raise(ERR_INVAL, "layout: has no buffers, cannot be sent");
	cursor_put_u8(out, WIRE_FORM);
	cursor_put_u32(out, layout->rank);
	cursor_put_u32(out, layout->buffer_count);
	for (uint32_t i = 0; i < layout->buffer_count; i++)
		cursor_put_u64(out, layout->buffers[i]);
	cursor_put_u32(out, layout->view_count);
	for (uint32_t i = 0; i < layout->view_count; i++) {
		const struct layout_view *view = &layout->views[i];

		cursor_put_str(out, view->name);
		cursor_put_u32(out, view->page_tokens);
		cursor_put_u32(out, view->pages);
		cursor_put_u32(out, view->shard.size);
		cursor_put_u32(out, view->shard.rank);
		cursor_put_u32(out, view->shard.run);
		cursor_put_u32(out, view->layer_count);
		for (uint32_t j = 0; j < view->layer_count; j++)
			put_layer(out, view, j);
	}
	if (out->bad)
		return err_raise(ERR_TOOBIG, "layout: does not fit in %zu bytes",
				 out->size);
	return 0;
}

static void get_field(struct cursor *c, struct layout_field *m)
{
	cursor_get_str(c, m->name, sizeof(m->name));
	cursor_get_str(c, m->format, sizeof(m->format));
	FIELD(CURSOR_GET);
}

static int get_layer(struct cursor *in, const struct layout_view *view, uint32_t index)
{
	struct layout_layer *layer = &view->layers[index];
	uint32_t count;
	uint8_t same;

	layer->layer = cursor_get_u32(in);
	same = cursor_get_u8(in);
	if (same > 1 || (same && index == 0))
		return err_raise(ERR_PROTO, "views.%s.layers[%u]: bad form %u",
				 view->name, index, same);
	if (same) {
		count = view->layers[index - 1].field_count;
		if (cursor_left(in) / FIELD_SAME < count)
			in->bad = true;
	} else {
		count = cursor_get_count(in, LAYOUT_FIELDS_MAX, FIELD_MIN);
	}
	if (in->bad)
		return cursor_check(in, "layout");
	layer->fields = mem_calloc(count, sizeof(*layer->fields));
	if (!layer->fields)
		return -err_errno(ERR_NOMEM);
	layer->field_count = count;
	for (uint32_t i = 0; i < count; i++) {
		if (same) {
			layer->fields[i] = view->layers[index - 1].fields[i];
			layer->fields[i].buffer = cursor_get_u32(in);
			layer->fields[i].offset = cursor_get_u64(in);
		} else {
			get_field(in, &layer->fields[i]);
		}
	}
	return 0;
}

static int get_view(struct cursor *in, struct layout_view *view)
{
	uint32_t count;

	cursor_get_str(in, view->name, sizeof(view->name));
	view->page_tokens = cursor_get_u32(in);
	view->pages = cursor_get_u32(in);
	view->shard.size = cursor_get_u32(in);
	view->shard.rank = cursor_get_u32(in);
	view->shard.run = cursor_get_u32(in);
	count = cursor_get_count(in, LAYOUT_LAYERS_MAX, LAYER_MIN);
	if (in->bad)
		return cursor_check(in, "layout");
	view->layers = mem_calloc(count, sizeof(*view->layers));
	if (!view->layers)
		return -err_errno(ERR_NOMEM);
	view->layer_count = count;
	for (uint32_t i = 0; i < count; i++) {
		int r = get_layer(in, view, i);

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static int get_layout(struct cursor *in, struct layout *layout)
{
	uint8_t form = cursor_get_u8(in);
	uint32_t count;

	if (!in->bad && form != WIRE_FORM)
		return err_raise(ERR_PROTO, "layout: form %u is unknown (supported: %u)",
				 form, WIRE_FORM);
	layout->rank = cursor_get_u32(in);
	count = cursor_get_count(in, LAYOUT_BUFFERS_MAX, 8);
	layout->buffers = mem_calloc(count, sizeof(*layout->buffers));
	if (!layout->buffers)
		return -err_errno(ERR_NOMEM);
	layout->buffer_count = count;
	for (uint32_t i = 0; i < count; i++)
		layout->buffers[i] = cursor_get_u64(in);
	count = cursor_get_count(in, LAYOUT_VIEWS_MAX, VIEW_MIN);
	layout->views = mem_calloc(count, sizeof(*layout->views));
	if (!layout->views)
		return -err_errno(ERR_NOMEM);
	layout->view_count = count;
	for (uint32_t i = 0; i < count; i++) {
		int r = get_view(in, &layout->views[i]);

		if (r < 0)
			return err_pass(r);
	}
	return cursor_check(in, "layout");
}

int layout_decode(struct cursor *in, struct layout **layout_p)
{
	struct layout *layout mem_cleanup(layout_freep) = mem_zalloc(sizeof(*layout));
	int r;

	*layout_p = NULL;
	if (!layout)
		return -err_errno(ERR_NOMEM);
	r = get_layout(in, layout);
	if (r == 0)
		r = layout_check(layout);
	if (r < 0)
		return err_pass(r);
	*layout_p = mem_steal(layout);
	return 0;
}
