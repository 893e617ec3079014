/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nest: the merge of boxes that interleave.
 *
 * The problem. Fields of one page interleave in most layouts: K next to V in each token,
 * layers next to each other in each page, state next to attention in one tensor. Rows are
 * neighbours "by address", so whether row i of one field meets row j of another decides
 * both the merge and whether a byte is reached twice. Writing all rows out and sorting
 * them is exact and costs O(rows log rows); a plan of a long context has millions of rows
 * and a few hundred strides.
 *
 * The method. Boxes are sorted by destination and cut into clusters whose hulls
 * (first byte to last byte) overlap. Boxes of different clusters can only touch
 * at their ends. A cluster of one box is finished when its loops nest properly.
 * A cluster of several is
 *   - periodic, when all share the outermost loop (count and destination
 *     stride) and one period holds all of one turn: then the turn is solved
 *     once and holds for all, or
 *   - split: the boxes with the longest outermost strides are divided into
 *     their elements, and the result is solved again.
 * Splitting ends at single rows, where the answer is exact by sorting; regular layouts
 * never reach that. Strides at least halve from round to round, so hostile layouts cost
 * O(n log n) per round and at most some 200 rounds, and a limit on the number of boxes
 * ends growth.
 *
 * A solution for one turn must hold in every turn: rows merge only if the *source*
 * strides of the shared outer loops are equal too. Otherwise rows may be adjacent in one
 * turn and not in the next; the frame of that loop is then split (`conflict`).
 *
 * `depth` below is the number of outer loops that the current boxes share;
 * dim[depth] is the outermost loop that is not shared.
 */
#include "daemon/plan/nest.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define NO_CONFLICT UINT32_MAX

struct nest {
	struct nest_boxes *out;
	struct nest_clash *clash;
	uint32_t conflict; /* outermost loop whose source strides differed */
	size_t alive;	   /* boxes in lists made by splitting */
	size_t limit;	   /* for them */
};

/* ---- one box ---- */

void nest_box_add(struct nest_box *box, uint64_t count, uint64_t src, uint64_t dst)
{
	uint32_t i = box->dims;

	if (count <= 1)
		return;
	while (i > 0 && box->dim[i - 1].dst < dst) {
		box->dim[i] = box->dim[i - 1];
		i--;
	}
	box->dim[i] = (struct nest_dim){.count = count, .src = src, .dst = dst};
	box->dims++;
}

void nest_box_collapse(struct nest_box *box, uint32_t depth)
{
	while (box->dims > depth) {
		const struct nest_dim *d = &box->dim[box->dims - 1];

		if (d->dst != box->len || d->src != box->len)
			return;
		box->len *= d->count;
		box->dims--;
	}
}

void nest_box_unroll(struct nest_box *box)
{
	uint32_t i = box->dims;

	while (i-- > 1) {
		struct nest_dim *outer = &box->dim[i - 1], *inner = &box->dim[i];
		uint64_t count;

		if (outer->dst != inner->count * inner->dst ||
		    outer->src != inner->count * inner->src ||
		    __builtin_mul_overflow(outer->count, inner->count, &count))
			continue;
		outer->count = count;
		outer->src = inner->src;
		outer->dst = inner->dst;
		memmove(inner, inner + 1, (box->dims - i - 1) * sizeof(*inner));
		box->dims--;
	}
}

/* Bytes from the first row's start to the last row's end, loops from `depth`. */
static uint64_t dst_span(const struct nest_box *box, uint32_t depth)
{
	uint64_t span = box->len;

	for (uint32_t i = depth; i < box->dims; i++)
		span += (box->dim[i].count - 1) * box->dim[i].dst;
	return span;
}

static uint64_t src_span(const struct nest_box *box, uint32_t depth)
{
	uint64_t span = box->len;

	for (uint32_t i = depth; i < box->dims; i++)
		span += (box->dim[i].count - 1) * box->dim[i].src;
	return span;
}

uint64_t nest_box_dst_end(const struct nest_box *box)
{
	return box->dst + dst_span(box, 0);
}

uint64_t nest_box_src_end(const struct nest_box *box)
{
	return box->src + src_span(box, 0);
}

enum nest_shape nest_box_shape(const struct nest_box *box, uint32_t depth)
{
	uint64_t dst = box->len, src = box->len;

	for (uint32_t i = box->dims; i-- > depth;) {
		const struct nest_dim *d = &box->dim[i];

		if (d->dst < dst || (d->dst == dst && d->src == src))
			return NEST_IRREGULAR;
		dst += (d->count - 1) * d->dst;
		src += (d->count - 1) * d->src;
	}
	return NEST_CLEAN;
}

/* ---- lists ---- */

void nest_boxes_fini(struct nest_boxes *boxes)
{
	mem_free(boxes->items);
	*boxes = (struct nest_boxes){0};
}

static size_t limit_of(const struct nest_boxes *boxes)
{
	return boxes->limit ? boxes->limit : NEST_BOXES_MAX;
}

static int too_many(size_t limit)
{
	return err_raise(ERR_LIMIT,
			 "plan: pages and fields interleave in more than %zu pieces; "
			 "request fewer pages at a time",
			 limit);
}

int nest_boxes_add(struct nest_boxes *boxes, const struct nest_box *box)
{
	if (boxes->count == boxes->cap) {
		size_t cap = boxes->cap ? boxes->cap * 2 : 32;
		void *items;

		if (boxes->count >= limit_of(boxes))
			return too_many(limit_of(boxes));
		items = mem_regrow(boxes->items, cap, sizeof(*boxes->items));
		if (!items)
			return -err_errno(ERR_NOMEM);
		boxes->items = items;
		boxes->cap = cap;
	}
	boxes->items[boxes->count++] = *box;
	return 0;
}

static int nest_by_destination(const void *a, const void *b)
{
	const struct nest_box *x = a, *y = b;

	if (x->dst_buffer != y->dst_buffer)
		return x->dst_buffer < y->dst_buffer ? -1 : 1;
	if (x->dst != y->dst)
		return x->dst < y->dst ? -1 : 1;
	return (x->tag > y->tag) - (x->tag < y->tag);
}

static void nest_sort(struct nest_box *boxes, size_t count)
{
	for (size_t i = 1; i < count; i++) {
		if (nest_by_destination(&boxes[i - 1], &boxes[i]) > 0) {
			qsort(boxes, count, sizeof(*boxes), nest_by_destination);
			return;
		}
	}
}

/* ---- appending a finished box ---- */

/* The parts of a box without its last (or first) row, outermost loop first; the
 * row itself is left in *box. Shared loops below `depth` stay whole. */
static int peel(struct nest *nest, struct nest_box *box, uint32_t depth, bool last)
{
	uint32_t i = depth;

	while (box->dims > depth) {
		struct nest_dim d = box->dim[i];
		struct nest_box rest = *box;
		int r;

		rest.dim[i].count--;
		if (last) {
			box->src += (d.count - 1) * d.src;
			box->dst += (d.count - 1) * d.dst;
		} else {
			rest.src += d.src;
			rest.dst += d.dst;
		}
		if (rest.dim[i].count == 1) {
			memmove(&rest.dim[i], &rest.dim[i + 1],
				(rest.dims - i - 1) * sizeof(rest.dim[0]));
			rest.dims--;
		}
		memmove(&box->dim[i], &box->dim[i + 1],
			(box->dims - i - 1) * sizeof(box->dim[0]));
		box->dims--;
		r = nest_boxes_add(nest->out, &rest);
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

/* Put the parts that were appended after `at` into ascending order: the inner parts of
 * a first row were appended before the outer ones. */
static void reverse(struct nest_boxes *boxes, size_t at)
{
	size_t n = boxes->count - at;

	for (size_t i = 0; i < n / 2; i++) {
		struct nest_box tmp = boxes->items[at + i];

		boxes->items[at + i] = boxes->items[boxes->count - 1 - i];
		boxes->items[boxes->count - 1 - i] = tmp;
	}
}

/*
 * In the destination box b starts at the end of a, in every turn of the `loops` outer
 * loops that they share. Are their sources adjacent too, with a gap of `gap` bytes in the
 * first turn? If only in some turns, the loop to be split is recorded.
 */
enum meet { MEET_NEVER, MEET_ALWAYS, MEET_SOME };

static enum meet meet(struct nest *nest, const struct nest_box *a,
		      const struct nest_box *b, uint32_t loops, int64_t gap)
{
	uint32_t odd = NO_CONFLICT, odd_count = 0;
	int64_t step;

	if (a->dst_buffer != b->dst_buffer || a->src_buffer != b->src_buffer)
		return MEET_NEVER;
	for (uint32_t i = loops; i-- > 0;) {
		if (a->dim[i].src != b->dim[i].src) {
			odd = i;
			odd_count++;
		}
	}
	if (odd_count == 0)
		return gap == 0 ? MEET_ALWAYS : MEET_NEVER;
	step = (int64_t)(a->dim[odd].src - b->dim[odd].src);
	if (odd_count == 1 && (gap % step != 0 || gap / step < 0 ||
			       (uint64_t)(gap / step) >= a->dim[odd].count))
		return MEET_NEVER;
	if (odd < nest->conflict)
		nest->conflict = odd;
	return MEET_SOME;
}

/* Bytes of source between the end of a and the start of b, loops from `depth`. */
static int64_t gap_between(const struct nest_box *a, const struct nest_box *b,
			   uint32_t depth)
{
	return (int64_t)(b->src - a->src - src_span(a, depth));
}

/* Append after the boxes of this frame, which start at `floor`. */
static int append(struct nest *nest, size_t floor, const struct nest_box *box,
		  uint32_t depth)
{
	struct nest_boxes *out = nest->out;
	struct nest_box a, b = *box;
	size_t at;
	int r;

	if (out->count == floor)
		return nest_boxes_add(out, box);
	a = out->items[out->count - 1];
	if (a.dst + dst_span(&a, depth) != b.dst ||
	    meet(nest, &a, &b, depth, gap_between(&a, &b, depth)) != MEET_ALWAYS)
		return nest_boxes_add(out, box);
	out->count--;
	r = peel(nest, &a, depth, true);
	if (r < 0)
		return err_pass(r);
	a.len += b.len;
	r = nest_boxes_add(out, &a);
	if (r < 0)
		return err_pass(r);
	at = out->count;
	r = peel(nest, &b, depth, false);
	if (r < 0)
		return err_pass(r);
	reverse(out, at);
	return 0;
}

/* ---- clusters ---- */

static int nest_do_solve(struct nest *nest, size_t floor, struct nest_box *boxes,
			 size_t count, uint32_t depth);

static int twice(struct nest *nest, const struct nest_box *a, const struct nest_box *b)
{
	uint64_t a_end = a->dst + a->len, b_end = b->dst + b->len;
	uint64_t end = a_end < b_end ? a_end : b_end;

	nest->clash->tag[0] = a->tag;
	nest->clash->tag[1] = b->tag;
	nest->clash->dst_buffer = b->dst_buffer;
	nest->clash->dst = b->dst;
	nest->clash->len = end > b->dst ? end - b->dst : 0;
	return NEST_TWICE;
}

/* All elements of the loop at `depth` as separate boxes. */
static int split_box(struct nest_boxes *list, const struct nest_box *box, uint32_t depth)
{
	struct nest_dim d = box->dim[depth];
	struct nest_box one = *box;

	memmove(&one.dim[depth], &one.dim[depth + 1],
		(one.dims - depth - 1) * sizeof(one.dim[0]));
	one.dims--;
	if (d.count > limit_of(list) - list->count)
		return too_many(limit_of(list));
	for (uint64_t i = 0; i < d.count; i++) {
		int r = nest_boxes_add(list, &one);

		if (r < 0)
			return err_pass(r);
		one.src += d.src;
		one.dst += d.dst;
	}
	return 0;
}

/* Split those with the longest outermost strides, keep the others, and solve again. */
static int nest_split(struct nest *nest, size_t floor, const struct nest_box *boxes,
		      size_t count, uint32_t depth)
{
	struct nest_boxes list = {.limit = nest->limit};
	uint64_t longest = 0;
	int r = 0;

	for (size_t i = 0; i < count; i++)
		if (boxes[i].dims > depth && boxes[i].dim[depth].dst > longest)
			longest = boxes[i].dim[depth].dst;
	for (size_t i = 0; i < count && r == 0; i++) {
		if (boxes[i].dims > depth && boxes[i].dim[depth].dst >= longest / 2)
			r = split_box(&list, &boxes[i], depth);
		else
			r = nest_boxes_add(&list, &boxes[i]);
	}
	nest->alive += list.count;
	if (r == 0 && nest->alive > nest->limit)
		r = too_many(nest->limit);
	if (r == 0)
		r = nest_do_solve(nest, floor, list.items, list.count, depth);
	nest->alive -= list.count;
	nest_boxes_fini(&list);
	return r;
}

static bool periodic(const struct nest_box *boxes, size_t count, uint32_t depth)
{
	uint64_t end = 0;

	for (size_t i = 0; i < count; i++) {
		uint64_t e;

		if (boxes[i].dims <= depth ||
		    boxes[i].dim[depth].count != boxes[0].dim[depth].count ||
		    boxes[i].dim[depth].dst != boxes[0].dim[depth].dst)
			return false;
		e = boxes[i].dst + dst_span(&boxes[i], depth + 1);
		if (e > end)
			end = e;
	}
	return end - boxes[0].dst <= boxes[0].dim[depth].dst;
}

/* Can the end of a turn meet the start of the next on both sides? */
static bool turn_wraps(struct nest *nest, const struct nest_box *first,
		       const struct nest_box *last, uint32_t depth)
{
	int64_t gap =
		gap_between(last, first, depth + 1) + (int64_t)first->dim[depth].src;

	return last->dst + dst_span(last, depth + 1) ==
		       first->dst + first->dim[depth].dst &&
	       meet(nest, last, first, depth + 1, gap) == MEET_ALWAYS;
}

/* Are the boxes from `at` on, one solved turn, final for all turns? */
static bool turn_holds(struct nest *nest, size_t floor, size_t at, uint32_t depth)
{
	const struct nest_box *first = &nest->out->items[at];
	const struct nest_box *last = &nest->out->items[nest->out->count - 1];
	const struct nest_box *before = first - 1;

	if (turn_wraps(nest, first, last, depth) || nest->conflict == depth)
		return false;
	return at == floor || before->dst + dst_span(before, depth) != first->dst ||
	       meet(nest, before, first, depth, gap_between(before, first, depth)) !=
		       MEET_ALWAYS;
}

static int solve_periodic(struct nest *nest, size_t floor, struct nest_box *boxes,
			  size_t count, uint32_t depth)
{
	struct nest_boxes *out = nest->out;
	size_t at = out->count;
	uint32_t conflict = nest->conflict;
	int r;

	nest->conflict = NO_CONFLICT;
	r = nest_do_solve(nest, at, boxes, count, depth + 1);
	if (r != 0)
		return r;
	if (nest->conflict != depth && out->count == at + 1) {
		struct nest_box one = out->items[at];

		nest_box_collapse(&one, depth);
		if (nest_box_shape(&one, depth) == NEST_CLEAN) {
			out->count = at;
			r = append(nest, floor, &one, depth);
			goto out;
		}
	}
	if (!turn_holds(nest, floor, at, depth)) {
		out->count = at;
		nest->conflict = conflict;
		return nest_split(nest, floor, boxes, count, depth);
	}
out:
	if (conflict < nest->conflict)
		nest->conflict = conflict;
	return r;
}

/* Boxes whose hulls overlap, or one box. */
static int solve_cluster(struct nest *nest, size_t floor, struct nest_box *boxes,
			 size_t count, uint32_t depth)
{
	if (count == 1) {
		nest_box_collapse(boxes, depth);
		if (nest_box_shape(boxes, depth) == NEST_CLEAN)
			return append(nest, floor, boxes, depth);
		for (uint32_t i = depth; i < boxes->dims; i++)
			if (boxes->dim[i].dst < boxes->len)
				return twice(nest, boxes, boxes);
	}
	for (size_t i = 1; i < count; i++)
		if (boxes[i - 1].dst + boxes[i - 1].len > boxes[i].dst)
			return twice(nest, &boxes[i - 1], &boxes[i]);
	if (count > 1 && periodic(boxes, count, depth))
		return solve_periodic(nest, floor, boxes, count, depth);
	return nest_split(nest, floor, boxes, count, depth);
}

/* Boxes that share `depth` outer loops; sorts them in place. `floor` is the start of
 * this frame's results: earlier boxes are not neighbours at this depth. */
static int nest_do_solve(struct nest *nest, size_t floor, struct nest_box *boxes,
			 size_t count, uint32_t depth)
{
	size_t i = 0, j;

	nest_sort(boxes, count);
	for (; i < count; i = j) {
		uint64_t end = boxes[i].dst + dst_span(&boxes[i], depth);
		int r;

		for (j = i + 1; j < count && boxes[j].dst_buffer == boxes[i].dst_buffer &&
				boxes[j].dst < end;
		     j++) {
			uint64_t e = boxes[j].dst + dst_span(&boxes[j], depth);

			if (e > end)
				end = e;
		}
		r = solve_cluster(nest, floor, &boxes[i], j - i, depth);
		if (r != 0)
			return r;
	}
	return 0;
}

int nest_solve(struct nest_boxes *in, struct nest_boxes *out, struct nest_clash *clash_p)
{
	struct nest nest = {.out = out,
			    .clash = clash_p,
			    .conflict = NO_CONFLICT,
			    .limit = limit_of(in)};

	return nest_do_solve(&nest, 0, in->items, in->count, 0);
}
