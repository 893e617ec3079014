/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan: from two layouts and page lists to strided runs.
 *
 *   strip    one field's common units            (strip.c: the intersection)
 *   segment  tokens without a page end between   (segment.c: the page lists)
 *   box      strip x segment: rows in up to three loops  (nest.c)
 *   run      rows at one stride                  (runs.c: merge, fold)
 *
 * Strips are sorted by destination and cut into groups whose hulls do not
 * overlap. A group of one strip, the usual case where every layer has its own
 * buffer or its own part of one, is streamed: its segments are in order of the
 * destination already, so each box is turned into runs and forgotten. What
 * cannot be streamed, because rows of several fields lie between each other or
 * a field's own loops do, goes through nest_solve(), which decides exactly and
 * finds bytes that are reached twice. Streaming never accepts what it cannot
 * prove: rows must ascend, and a seam that runs_append() could not merge (the
 * end of a two-dimensional box) is left to nest_solve() as well.
 *
 * The order of everything is fixed by the inputs alone (no pointers, no hash
 * order), so that two daemons get the same runs and the same digest.
 */
#include "daemon/plan/plan.h"

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/nest.h"
#include "daemon/plan/runs.h"
#include "daemon/plan/strip.h"

/* Positive outcome of streaming: not for this strip. */
#define STREAM_IRREGULAR 2

/* ---- boxes to runs ---- */

static int append_line(struct runs *runs, const struct nest_box *box, uint64_t src,
		       uint64_t dst, const struct nest_dim *dim)
{
	struct plan_run run = {.src = src,
			       .dst = dst,
			       .len = box->len,
			       .count = 1,
			       .src_buffer = box->src_buffer,
			       .dst_buffer = box->dst_buffer};

	if (dim) {
		run.count = dim->count;
		run.src_stride = (int64_t)dim->src;
		run.dst_stride = (int64_t)dim->dst;
	}
	return runs_append(runs, &run);
}

/* The two inner loops: the one with more rows becomes the run. The outermost
 * of three never does: its rows are pages apart, which suits no cache. */
static int append_plane(struct runs *runs, const struct nest_box *box, uint64_t src,
			uint64_t dst)
{
	const struct nest_dim *inner = &box->dim[box->dims - 1];
	const struct nest_dim *outer = inner - 1;
	const struct nest_dim *run = inner, *loop = outer;

	if (outer->count > inner->count) {
		run = outer;
		loop = inner;
	}
	for (uint64_t i = 0; i < loop->count; i++) {
		int r = append_line(runs, box, src + i * loop->src, dst + i * loop->dst,
				    run);

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static int append_box(struct runs *runs, const struct nest_box *box)
{
	const struct nest_dim *d = box->dim;

	if (box->dims == 0)
		return append_line(runs, box, box->src, box->dst, NULL);
	if (box->dims == 1)
		return append_line(runs, box, box->src, box->dst, d);
	if (box->dims == 2)
		return append_plane(runs, box, box->src, box->dst);
	for (uint64_t i = 0; i < d->count; i++) {
		int r = append_plane(runs, box, box->src + i * d->src,
				     box->dst + i * d->dst);

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

/* ---- one strip, streamed ---- */

struct seam {
	uint64_t src_end, dst_end; /* of the box before */
	bool plane;		   /* it had more than one loop */
};

/* May `box` follow? Rows ascend and runs_append() sees every neighbour. */
static bool seam_holds(const struct seam *seam, const struct nest_box *box)
{
	if (box->dst != seam->dst_end)
		return box->dst > seam->dst_end;
	return box->src != seam->src_end || (!seam->plane && box->dims <= 1);
}

static int stream(struct runs *runs, const struct strip *strip, uint32_t tag)
{
	const struct segment_list *list = strip->list;
	const struct segment *made_for = NULL;
	struct seam seam = {0};
	struct nest_box box;
	uint64_t src_span = 0, dst_span = 0;

	for (size_t i = 0; i < list->count; i++) {
		const struct segment *s = &list->segments[i];
		int r;

		if (made_for && s->tokens == made_for->tokens &&
		    s->blocks == made_for->blocks) {
			strip_box_move(strip, s, &box);
		} else {
			strip_box(strip, s, tag, &box);
			if (nest_box_shape(&box) != NEST_CLEAN)
				return STREAM_IRREGULAR;
			src_span = nest_box_src_end(&box) - box.src;
			dst_span = nest_box_dst_end(&box) - box.dst;
			made_for = s;
		}
		if (i > 0 && !seam_holds(&seam, &box))
			return STREAM_IRREGULAR;
		r = append_box(runs, &box);
		if (r < 0)
			return err_pass(r);
		seam = (struct seam){.src_end = box.src + src_span,
				     .dst_end = box.dst + dst_span,
				     .plane = box.dims > 1};
	}
	return 0;
}

/* ---- groups ---- */

static int raise_twice(const struct plan_request *req, const struct strips *strips,
		       const struct nest_clash *clash)
{
	const struct strip *a = &strips->items[clash->tag[0]];
	const struct strip *b = &strips->items[clash->tag[1]];

	return err_raise(ERR_DUP,
			 "dst buffer %u bytes [%llu,%llu) are reached twice: by map[%zu] "
			 "view %s layer %u field %s and by map[%zu] view %s layer %u field "
			 "%s; dst_pages or fields overlap",
			 clash->dst_buffer, (unsigned long long)clash->dst,
			 (unsigned long long)(clash->dst + clash->len), a->map,
			 req->maps[a->map].view, a->layer, a->field->name, b->map,
			 req->maps[b->map].view, b->layer, b->field->name);
}

static int solve_group(const struct plan_request *req, const struct strips *strips,
		       size_t begin, size_t end, struct runs *runs)
{
	struct nest_boxes in = {0}, out = {0};
	struct nest_clash clash;
	struct nest_box box;
	int r = 0;

	for (size_t i = begin; i < end && r == 0; i++) {
		const struct segment_list *list = strips->items[i].list;

		for (size_t j = 0; j < list->count && r == 0; j++) {
			strip_box(&strips->items[i], &list->segments[j], (uint32_t)i,
				  &box);
			r = nest_boxes_add(&in, &box);
		}
	}
	if (r == 0)
		r = nest_solve(&in, &out, &clash);
	if (r == NEST_TWICE)
		r = raise_twice(req, strips, &clash);
	for (size_t i = 0; i < out.count && r == 0; i++)
		r = append_box(runs, &out.items[i]);
	nest_boxes_fini(&in);
	nest_boxes_fini(&out);
	return r < 0 ? err_pass(r) : 0;
}

/* Does strip b, which begins where a's hull ends, begin where a ends on both
 * sides? True when that is not plain to see. */
static bool strips_meet(const struct strip *a, const struct strip *b)
{
	struct nest_box x, y;

	if (!a->ordered || !b->ordered)
		return true;
	strip_box(a, &a->list->segments[a->list->count - 1], 0, &x);
	strip_box(b, &b->list->segments[0], 0, &y);
	return a->src.buffer == b->src.buffer && nest_box_src_end(&x) == y.src &&
	       nest_box_dst_end(&x) == y.dst;
}

/* The end of the group that begins at `begin`. */
static size_t group_end(const struct strips *strips, size_t begin)
{
	const struct strip *s = strips->items;
	uint64_t hull = s[begin].dst_end;
	size_t i = begin + 1;

	while (i < strips->count && s[i].dst.buffer == s[begin].dst.buffer &&
	       (s[i].dst_begin < hull ||
		(s[i].dst_begin == hull &&
		 (i > begin + 1 || strips_meet(&s[i - 1], &s[i]))))) {
		if (s[i].dst_end > hull)
			hull = s[i].dst_end;
		i++;
	}
	return i;
}

static int make_group(const struct plan_request *req, const struct strips *strips,
		      size_t begin, size_t end, struct runs *runs)
{
	struct runs_mark mark;
	int r = STREAM_IRREGULAR;

	if (end == begin + 1) {
		runs_mark(runs, &mark);
		r = stream(runs, &strips->items[begin], (uint32_t)begin);
		if (r == STREAM_IRREGULAR)
			runs_rewind(runs, &mark);
	}
	if (r == STREAM_IRREGULAR)
		r = solve_group(req, strips, begin, end, runs);
	return r < 0 ? err_pass(r) : 0;
}

static int make_runs(const struct plan_request *req, struct strips *strips,
		     struct runs *runs)
{
	size_t begin = 0;

	strips_sort(strips);
	while (begin < strips->count) {
		size_t end = group_end(strips, begin);
		int r = make_group(req, strips, begin, end, runs);

		if (r < 0)
			return err_pass(r);
		begin = end;
	}
	runs_sort(runs);
	return 0;
}

int plan_make(const struct plan_request *req, struct plan **plan_p)
{
	struct runs runs = {.limit = req->max_rows};
	struct strips strips;
	int r;

	*plan_p = NULL;
	r = strips_collect(req, &strips);
	if (r == 0)
		r = make_runs(req, &strips, &runs);
	if (r == 0)
		r = runs_finish(&runs, plan_p);
	if (r == 0 && req->max_rows && (*plan_p)->rows > req->max_rows) {
		r = err_raise(ERR_LIMIT, "plan: %llu rows, max_rows is %llu",
			      (unsigned long long)(*plan_p)->rows,
			      (unsigned long long)req->max_rows);
		plan_free(*plan_p);
		*plan_p = NULL;
	}
	runs_fini(&runs);
	strips_fini(&strips);
	return r < 0 ? err_pass(r) : 0;
}
