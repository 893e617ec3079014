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
 * overlap. A group is converted to runs in one of three forms:
 *   alone      A group of one strip, the usual case where every layer has its
 *              own buffer or part of one, is streamed: its segments are in
 *              order of the destination already, so each box is converted to
 *              runs and forgotten. Strips that differ only in their place
 *              (layer after layer) are streamed once and then moved.
 *   by page    Strips whose pages move together (one tensor for all layers)
 *              are solved for one page and then moved from page to page.
 *   solved     Everything else is passed to nest_solve() as a whole.
 * The first two accept only provable cases: rows must ascend, and a seam that
 * runs_append() could not merge (the end of a two-dimensional box) is left to the third,
 * which decides exactly and finds bytes that are reached twice.
 *
 * The order of everything is fixed by the inputs alone (no pointers, no hash
 * order), so that two daemons get the same runs and the same digest.
 */
#include "daemon/plan/plan.h"

#include "daemon/base/err.h"
#include "daemon/plan/nest.h"
#include "daemon/plan/runs.h"
#include "daemon/plan/strip.h"

/* Positive outcome of the fast paths: not for these strips. */
#define IRREGULAR 2

#define BOXES_MIN 65536u

struct planner {
	const struct plan_request *req;
	struct strips strips;
	struct runs runs;
	/* the runs of the last streamed strip, to be moved for similar ones */
	struct runs cast;
	const struct strip *cast_of;
};

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

/* The two inner loops: the one with more rows becomes the run. The outermost of three
 * never does: its rows are pages apart, which defeats the cache. */
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
	struct nest_box b = *box;
	const struct nest_dim *d = b.dim;

	/* also keeps the loops below short: lines that fold into one run would never
	 * reach the limit on runs */
	nest_box_unroll(&b);
	if (b.dims <= 1)
		return append_line(runs, &b, b.src, b.dst, b.dims ? d : NULL);
	if (b.dims == 2)
		return append_plane(runs, &b, b.src, b.dst);
	for (uint64_t i = 0; i < d->count; i++) {
		int r = append_plane(runs, &b, b.src + i * d->src, b.dst + i * d->dst);

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

static int stream(const struct strip *strip, struct runs *runs)
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
			strip_box(strip, s, 0, &box);
			if (nest_box_shape(&box, 0) != NEST_CLEAN)
				return IRREGULAR;
			src_span = nest_box_src_end(&box) - box.src;
			dst_span = nest_box_dst_end(&box) - box.dst;
			made_for = s;
		}
		if (i > 0 && !seam_holds(&seam, &box))
			return IRREGULAR;
		r = append_box(runs, &box);
		if (r < 0)
			return err_pass(r);
		seam = (struct seam){.src_end = box.src + src_span,
				     .dst_end = box.dst + dst_span,
				     .plane = box.dims > 1};
	}
	return 0;
}

static bool side_alike(const struct strip_side *a, const struct strip_side *b)
{
	return a->flat == b->flat && a->page_stride == b->page_stride &&
	       a->token_stride == b->token_stride && a->unit_stride == b->unit_stride;
}

static int make_single(struct planner *p, const struct strip *strip)
{
	const struct strip *of = p->cast_of;
	struct runs_shift shift;

	/* unless the two strips differ only in their position */
	if (!of || of->list != strip->list || of->units != strip->units ||
	    of->unit_bytes != strip->unit_bytes || !side_alike(&of->src, &strip->src) ||
	    !side_alike(&of->dst, &strip->dst)) {
		int r;

		p->cast.count = 0;
		p->cast_of = NULL;
		r = stream(strip, &p->cast);
		if (r != 0)
			return r < 0 ? err_pass(r) : r;
		p->cast_of = strip;
	}
	shift = (struct runs_shift){
		.src = strip->src.base - p->cast_of->src.base,
		.dst = strip->dst.base - p->cast_of->dst.base,
		.src_buffer = strip->src.buffer - p->cast_of->src.buffer,
		.dst_buffer = strip->dst.buffer - p->cast_of->dst.buffer};
	return runs_append_all(&p->runs, &p->cast, &shift);
}

/* ---- several strips, page by page ---- */

/* One segment of all strips of a group, solved. */
struct page {
	const struct segment *segment; /* that it was made for */
	struct runs runs;
	struct nest_boxes boxes;
};

static int raise_twice(const struct planner *p, const struct nest_clash *clash)
{
	const struct strip *a = &p->strips.items[clash->tag[0]];
	const struct strip *b = &p->strips.items[clash->tag[1]];

	return err_raise(
		ERR_DUP,
		"dst buffer %u bytes [%llu,%llu) are reached twice: by map[%zu] "
		"view %s layer %u field %s and by map[%zu] view %s layer %u field "
		"%s; dst_pages or fields overlap",
		clash->dst_buffer, (unsigned long long)clash->dst,
		(unsigned long long)(clash->dst + clash->len), a->map,
		p->req->maps[a->map].view, a->layer, a->field->name, b->map,
		p->req->maps[b->map].view, b->layer, b->field->name);
}

/* A number of boxes in proportion to the allowed rows: a peer whose layouts interleave
 * at random is refused before it costs much. */
static size_t boxes_limit(const struct plan_request *req)
{
	if (req->max_rows == 0 || req->max_rows >= NEST_BOXES_MAX / 4)
		return NEST_BOXES_MAX;
	return req->max_rows < BOXES_MIN / 4 ? BOXES_MIN : req->max_rows * 4;
}

/* Solve the boxes of strips [begin, end) and segments [first, last) of each. */
static int plan_solve(const struct planner *p, size_t begin, size_t end, size_t first,
		      size_t last, struct nest_boxes *out)
{
	struct nest_boxes in = {.limit = boxes_limit(p->req)};
	struct nest_clash clash = {0};
	struct nest_box box;
	int r = 0;

	for (size_t i = begin; i < end && r == 0; i++) {
		const struct strip *strip = &p->strips.items[i];

		for (size_t j = first; j < last && j < strip->list->count && r == 0;
		     j++) {
			strip_box(strip, &strip->list->segments[j], (uint32_t)i, &box);
			r = nest_boxes_add(&in, &box);
		}
	}
	if (r == 0)
		r = nest_solve(&in, out, &clash);
	if (r == NEST_TWICE)
		r = raise_twice(p, &clash);
	nest_boxes_fini(&in);
	return r < 0 ? err_pass(r) : 0;
}

static int append_boxes(struct runs *runs, const struct nest_boxes *boxes)
{
	for (size_t i = 0; i < boxes->count; i++) {
		int r = append_box(runs, &boxes->items[i]);

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

/* Does every segment move all strips of the group by the same distance? */
static bool moves_as_one(const struct strip *s, size_t count)
{
	for (size_t i = 1; i < count; i++)
		if (s[i].list != s[0].list ||
		    s[i].src.page_stride != s[0].src.page_stride ||
		    s[i].dst.page_stride != s[0].dst.page_stride ||
		    s[i].src.token_stride != s[0].src.token_stride ||
		    s[i].dst.token_stride != s[0].dst.token_stride)
			return false;
	return true;
}

static int page_make(const struct planner *p, size_t begin, size_t end, size_t segment,
		     struct page *page)
{
	int r;

	page->runs.count = 0;
	page->boxes.count = 0;
	page->segment = &p->strips.items[begin].list->segments[segment];
	r = plan_solve(p, begin, end, segment, segment + 1, &page->boxes);
	if (r == 0)
		r = append_boxes(&page->runs, &page->boxes);
	if (r < 0)
		return err_pass(r);
	runs_sort(&page->runs);
	return 0;
}

/* Page after page: IRREGULAR when pages interleave, or are adjacent where
 * runs_append() would not detect it. */
static int pages_append(struct planner *p, size_t begin, size_t end, struct page *page,
			struct runs *out)
{
	const struct strip *s = &p->strips.items[begin];
	struct seam seam = {0};

	for (size_t i = 0; i < s->list->count; i++) {
		const struct segment *seg = &s->list->segments[i];
		struct nest_box first, last, from, to;
		struct runs_shift shift;
		int r = 0;

		if (!page->segment || page->segment->tokens != seg->tokens ||
		    page->segment->blocks != seg->blocks)
			r = page_make(p, begin, end, i, page);
		if (r < 0)
			return err_pass(r);
		strip_box_move(s, page->segment, &from);
		strip_box_move(s, seg, &to);
		shift = (struct runs_shift){.src = to.src - from.src,
					    .dst = to.dst - from.dst};
		first = page->boxes.items[0];
		last = page->boxes.items[page->boxes.count - 1];
		first.src += shift.src;
		first.dst += shift.dst;
		seam.plane = seam.plane || first.dims > 1;
		if (i > 0 && !seam_holds(&seam, &first))
			return IRREGULAR;
		r = runs_append_all(out, &page->runs, &shift);
		if (r < 0)
			return err_pass(r);
		seam.src_end = nest_box_src_end(&last) + shift.src;
		seam.dst_end = nest_box_dst_end(&last) + shift.dst;
		seam.plane = page->boxes.count > 1 || last.dims > 1;
	}
	return 0;
}

static uint64_t runs_limit(const struct plan_request *req)
{
	uint64_t most = runs_in(req->max_bytes);

	return most && (!req->max_rows || most < req->max_rows) ? most : req->max_rows;
}

static int make_pages(struct planner *p, size_t begin, size_t end)
{
	struct page page = {0};
	struct runs out = {.limit = runs_limit(p->req)};
	int r = pages_append(p, begin, end, &page, &out);

	if (r == 0)
		r = runs_append_all(&p->runs, &out, &(struct runs_shift){0});
	runs_fini(&page.runs);
	nest_boxes_fini(&page.boxes);
	runs_fini(&out);
	return r < 0 ? err_pass(r) : r;
}

/* ---- groups ---- */

/* Does strip b, which starts at the end of a's hull, start at the end of a on both
 * sides? True when that is not obvious. */
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

/* The end of the group that starts at `begin`. */
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

static int make_group(struct planner *p, size_t begin, size_t end)
{
	const struct strip *first = &p->strips.items[begin];
	struct nest_boxes boxes = {0};
	int r = IRREGULAR;

	if (end == begin + 1)
		r = make_single(p, first);
	else if (first->list->count > 1 && moves_as_one(first, end - begin))
		r = make_pages(p, begin, end);
	if (r != IRREGULAR)
		return r < 0 ? err_pass(r) : 0;
	r = plan_solve(p, begin, end, 0, SIZE_MAX, &boxes);
	if (r == 0)
		r = append_boxes(&p->runs, &boxes);
	nest_boxes_fini(&boxes);
	return r < 0 ? err_pass(r) : 0;
}

static int make_runs(struct planner *p)
{
	size_t begin = 0;

	strips_sort(&p->strips);
	while (begin < p->strips.count) {
		size_t end = group_end(&p->strips, begin);
		int r = make_group(p, begin, end);

		if (r < 0)
			return err_pass(r);
		begin = end;
	}
	runs_sort(&p->runs);
	return 0;
}

int plan_make(const struct plan_request *req, struct plan **plan_p)
{
	struct planner p = {.req = req,
			    .runs = {.limit = runs_limit(req)},
			    .cast = {.limit = runs_limit(req)}};
	int r;

	*plan_p = NULL;
	r = strips_collect(req, &p.strips);
	if (r == 0)
		r = make_runs(&p);
	if (r == 0)
		r = runs_finish(&p.runs, plan_p);
	if (r == 0 && req->max_rows && (*plan_p)->rows > req->max_rows) {
		r = err_raise(ERR_LIMIT, "plan: %llu rows, max_rows is %llu",
			      (unsigned long long)(*plan_p)->rows,
			      (unsigned long long)req->max_rows);
		plan_free(*plan_p);
		*plan_p = NULL;
	}
	runs_fini(&p.runs);
	runs_fini(&p.cast);
	strips_fini(&p.strips);
	return r < 0 ? err_pass(r) : 0;
}
