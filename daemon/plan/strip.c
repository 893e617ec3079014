/* SPDX-License-Identifier: Apache-2.0 */
/*
 * strip: the intersection of two layouts, by view, layer, field and units.
 *
 * Both layouts have their layers in ascending order, so one merge pass finds the common
 * layers. Wants (computed by the cover) are sorted once and found by binary search: a
 * peer chooses their number and their order.
 */
#include "daemon/plan/strip.h"

#include <stdlib.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout_private.h"
#include "daemon/plan/plan_private.h"

/* A request's wants, sorted; `sorted` NULL when everything is wanted. */
struct wants {
	struct plan_want *sorted;
	size_t count;
};

struct pairing {
	const struct plan_request *req;
	const struct wants *wants;
	struct strips *strips;
	size_t map;
	uint16_t view; /* index in the destination */
	const struct layout_view *src_view, *dst_view;
	const struct layout_layer *src_layer, *dst_layer;
};

int plan_want_compare(const void *a, const void *b)
{
	const struct plan_want *x = a, *y = b;

	if (x->view != y->view)
		return x->view < y->view ? -1 : 1;
	if (x->layer != y->layer)
		return x->layer < y->layer ? -1 : 1;
	if (x->field != y->field)
		return x->field < y->field ? -1 : 1;
	return (x->first_unit > y->first_unit) - (x->first_unit < y->first_unit);
}

/* ---- one strip ---- */

static struct strip_side strip_side_of(const struct layout_view *view,
				       const struct layout_field *f, uint32_t first_unit)
{
	struct strip_side s = {
		.buffer = f->buffer,
		.base = f->offset + (first_unit - f->first_unit) * f->unit_stride,
		.page_stride = f->page_stride,
		.token_stride = f->token_stride,
		.unit_stride = f->unit_stride,
	};
	uint64_t page;

	if (view->page_tokens == 1)
		s.token_stride = s.page_stride; /* a token is a page */
	s.flat = !__builtin_mul_overflow(s.token_stride, view->page_tokens, &page) &&
		 page == s.page_stride;
	return s;
}

static void strip_hull(struct strip *s)
{
	const struct segment_list *l = s->list;
	uint64_t begin = s->dst.base, end = s->dst.base, row;

	if (s->dst.flat) {
		begin += l->slot_min * s->dst.token_stride;
		end += l->slot_max * s->dst.token_stride;
	} else {
		begin += l->page_min * s->dst.page_stride +
			 l->token_min * s->dst.token_stride;
		end += l->page_max * s->dst.page_stride +
		       l->token_max * s->dst.token_stride;
	}
	row = (s->units - 1) * s->dst.unit_stride + s->unit_bytes;
	s->dst_begin = begin;
	s->dst_end = end + row;
	if (s->dst.flat)
		s->ordered = s->dst.token_stride >= row;
	else
		s->ordered = s->dst.page_stride >=
			     row + (l->token_max - l->token_min) * s->dst.token_stride;
}

static int strip_add(const struct pairing *p, const struct layout_field *src,
		     const struct layout_field *dst, uint32_t first, uint32_t units)
{
	struct strips *strips = p->strips;
	struct strip *s;
	int r;

	if (strips->count == strips->cap) {
		size_t cap = strips->cap ? strips->cap * 2 : 32;
		void *items = mem_regrow(strips->items, cap, sizeof(*strips->items));

		if (!items)
			return -err_errno(ERR_NOMEM);
		strips->items = items;
		strips->cap = cap;
	}
	s = &strips->items[strips->count];
	*s = (struct strip){.map = p->map,
			    .layer = p->dst_layer->layer,
			    .field = dst,
			    .first_unit = first,
			    .units = units,
			    .unit_bytes = dst->unit_bytes,
			    .src = strip_side_of(p->src_view, src, first),
			    .dst = strip_side_of(p->dst_view, dst, first)};
	r = segment_map_list(&strips->maps[p->map], s->src.flat, s->dst.flat, &s->list);
	if (r < 0)
		return err_pass(r);
	strip_hull(s);
	strips->count++;
	return 0;
}

/* ---- wants ---- */

static int wants_init(const struct plan_request *req, struct wants *w)
{
	*w = (struct wants){.count = req->want_count};
	if (!req->wants)
		return 0;
	w->sorted = mem_dup(req->wants, req->want_count * sizeof(*req->wants));
	if (!w->sorted)
		return -err_errno(ERR_NOMEM);
	qsort(w->sorted, w->count, sizeof(*w->sorted), plan_want_compare);
	return 0;
}

/* The first of sorted wants that is not before the key. */
static size_t want_find(const struct plan_want *wants, size_t count,
			const struct plan_want *key)
{
	size_t lo = 0, hi = count;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (plan_want_compare(&wants[mid], key) < 0)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

static int want_check(const struct pairing *p, const struct layout_field *f,
		      const struct plan_want *want, uint32_t first, uint64_t end)
{
	if (want->first_unit >= first && (uint64_t)want->first_unit + want->units <= end)
		return 0;
	return err_raise(
		ERR_RANGE,
		"want: view %s layer %u field %s units [%u,%llu): both sides hold "
		"[%u,%llu)",
		p->dst_view->name, p->dst_layer->layer, f->name, want->first_unit,
		(unsigned long long)want->first_unit + want->units, first,
		(unsigned long long)end);
}

/* Wanted intervals of a field of which both hold [first, end). Adjacent intervals
 * become one strip. */
static int pair_wanted(const struct pairing *p, uint16_t field,
		       const struct layout_field *src, const struct layout_field *dst,
		       uint32_t first, uint64_t end)
{
	const struct wants *w = p->wants;
	const struct plan_want key = {
		.view = p->view, .field = field, .layer = p->dst_layer->layer};
	size_t i = want_find(w->sorted, w->count, &key);

	while (i < w->count && w->sorted[i].view == p->view &&
	       w->sorted[i].layer == p->dst_layer->layer && w->sorted[i].field == field) {
		const struct plan_want *want = &w->sorted[i++];
		uint64_t stop = (uint64_t)want->first_unit + want->units;
		int r = want_check(p, dst, want, first, end);

		for (; r == 0 && i < w->count &&
		       plan_want_compare(&w->sorted[i],
					 &(struct plan_want){.view = p->view,
						  .field = field,
						  .layer = want->layer,
						  .first_unit = (uint32_t)stop}) == 0;
		     i++) {
			r = want_check(p, dst, &w->sorted[i], first, end);
			stop += w->sorted[i].units;
		}
		if (r == 0 && stop > want->first_unit)
			r = strip_add(p, src, dst, want->first_unit,
				      (uint32_t)(stop - want->first_unit));
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

/* ---- pairing ---- */

static int pair_field(const struct pairing *p, uint16_t field)
{
	const struct layout_field *dst = &p->dst_layer->fields[field];
	const struct layout_field *src = layout_field_find(p->src_layer, dst->name);
	uint32_t first =
		dst->first_unit > src->first_unit ? dst->first_unit : src->first_unit;
	uint64_t dst_end = (uint64_t)dst->first_unit + dst->units;
	uint64_t src_end = (uint64_t)src->first_unit + src->units;
	uint64_t end = dst_end < src_end ? dst_end : src_end;

	if (p->wants->sorted)
		return pair_wanted(p, field, src, dst, first, end);
	if (end <= first)
		return 0;
	return strip_add(p, src, dst, first, (uint32_t)(end - first));
}

static int pair_layer(const struct pairing *p)
{
	int r = layout_layer_compatible(p->dst_view->name, p->src_layer, p->dst_layer,
					&layout_from_source);

	if (r < 0)
		return err_pass(r);
	if (p->strips->maps[p->map].cuts.count == 0)
		return 0;
	for (uint32_t i = 0; i < p->dst_layer->field_count; i++) {
		r = pair_field(p, (uint16_t)i);
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static bool layer_asked(const struct plan_map *map, uint32_t layer)
{
	if (map->layers.begin == 0 && map->layers.end == 0)
		return true;
	return layer >= map->layers.begin &&
	       (layer < map->layers.end || map->layers.end == UINT32_MAX);
}

static int pair_views(struct pairing *p)
{
	struct layout_layers at = {.one = p->src_view, .other = p->dst_view};

	while (layout_layers_next(&at)) {
		int r = 0;

		p->src_layer = at.a;
		p->dst_layer = at.b;
		if (layer_asked(&p->req->maps[p->map], at.a->layer))
			r = pair_layer(p);
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static int pair_map(struct pairing *p)
{
	const struct plan_map *map = &p->req->maps[p->map];
	int r;

	if (!map->view)
		return err_raise(ERR_INVAL, "map[%zu].view: missing", p->map);
	p->src_view = layout_view_find(p->req->src, map->view);
	p->dst_view = layout_view_find(p->req->dst, map->view);
	if (!p->src_view || !p->dst_view)
		return err_raise(ERR_INVAL, "map[%zu].view: unknown view %.40s in %s",
				 p->map, map->view, p->src_view ? "dst" : "src");
	p->view = (uint16_t)(p->dst_view - p->req->dst->views);
	r = segment_map_init(&p->strips->maps[p->map], map, p->map, p->src_view,
			     p->dst_view);
	if (r == 0)
		r = pair_views(p);
	return r < 0 ? err_pass(r) : 0;
}

int strips_collect(const struct plan_request *req, struct strips *strips)
{
	struct wants wants;
	int r;

	*strips = (struct strips){.map_count = req->map_count};
	if (req->src->unbounded || req->dst->unbounded)
		return err_raise(ERR_INVAL, "%s.buffers: missing",
				 req->src->unbounded ? "src" : "dst");
	strips->maps = mem_calloc(req->map_count, sizeof(*strips->maps));
	if (!strips->maps)
		return -err_errno(ERR_NOMEM);
	r = wants_init(req, &wants);
	for (size_t i = 0; i < req->map_count && r == 0; i++)
		r = pair_map(&(struct pairing){
			.req = req, .wants = &wants, .strips = strips, .map = i});
	mem_free(wants.sorted);
	return r < 0 ? err_pass(r) : 0;
}

void strips_fini(struct strips *strips)
{
	for (size_t i = 0; strips->maps && i < strips->map_count; i++)
		segment_map_fini(&strips->maps[i]);
	mem_free(strips->maps);
	mem_free(strips->items);
	*strips = (struct strips){0};
}

static int strip_by_destination(const void *a, const void *b)
{
	const struct strip *x = a, *y = b;

	if (x->dst.buffer != y->dst.buffer)
		return x->dst.buffer < y->dst.buffer ? -1 : 1;
	if (x->dst_begin != y->dst_begin)
		return x->dst_begin < y->dst_begin ? -1 : 1;
	if (x->map != y->map)
		return x->map < y->map ? -1 : 1;
	if (x->layer != y->layer)
		return x->layer < y->layer ? -1 : 1;
	if (x->field != y->field)
		return x->field < y->field ? -1 : 1;
	return (x->first_unit > y->first_unit) - (x->first_unit < y->first_unit);
}

void strips_sort(struct strips *strips)
{
	for (size_t i = 1; i < strips->count; i++) {
		if (strip_by_destination(&strips->items[i - 1], &strips->items[i]) > 0) {
			qsort(strips->items, strips->count, sizeof(*strips->items),
			      strip_by_destination);
			return;
		}
	}
}

/* ---- boxes ---- */

void strip_box_move(const struct strip *strip, const struct segment *segment,
		    struct nest_box *box)
{
	box->src = strip->src.base + segment->src_page * strip->src.page_stride +
		   segment->src_token * strip->src.token_stride;
	box->dst = strip->dst.base + segment->dst_page * strip->dst.page_stride +
		   segment->dst_token * strip->dst.token_stride;
}

/* Bytes from one block of a segment to the next. */
static uint64_t block_stride(const struct strip_side *side, uint64_t tokens)
{
	return side->flat ? tokens * side->token_stride : side->page_stride;
}

void strip_box(const struct strip *strip, const struct segment *segment, uint32_t tag,
	       struct nest_box *box_p)
{
	*box_p = (struct nest_box){.len = strip->unit_bytes,
				   .src_buffer = strip->src.buffer,
				   .dst_buffer = strip->dst.buffer,
				   .tag = tag};
	nest_box_add(box_p, strip->units, strip->src.unit_stride, strip->dst.unit_stride);
	nest_box_add(box_p, segment->tokens, strip->src.token_stride,
		     strip->dst.token_stride);
	nest_box_add(box_p, segment->blocks, block_stride(&strip->src, segment->tokens),
		     block_stride(&strip->dst, segment->tokens));
	nest_box_collapse(box_p, 0);
	strip_box_move(strip, segment, box_p);
}
