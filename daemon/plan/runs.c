/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runs: merging and folding of appended runs, and the finished plan.
 *
 * Merging (fewer rows) is decided before folding (fewer runs): the last row of the list
 * and the first new row are compared first, and when they are neighbours on both sides
 * the last row is removed from its run again. So a fold made too early never costs a row.
 *
 * Folding is greedy with one step of hindsight. Any two rows of one length make a run of
 * two, which is right for a list of pairs but spoils A, B C D E: (A B) (C D) E. When a
 * third row shows that the stride B-C-D is the regular one, B is moved back: A, (B C D).
 *
 * A run whose count is 1 has strides 0, so that equal plans are equal bytes and the
 * digest may hash them in place.
 */
#include "daemon/plan/runs.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <xxhash.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/plan_private.h"

#define RUNS_FIRST 64

uint64_t runs_in(uint64_t max_bytes)
{
	return max_bytes ? max_bytes / (sizeof(struct plan_run) + sizeof(uint64_t)) + 1
			 : 0;
}

void runs_fini(struct runs *runs)
{
	mem_free(runs->items);
	*runs = (struct runs){0};
}

static inline uint64_t last_src(const struct plan_run *r)
{
	return r->src + (r->count - 1) * (uint64_t)r->src_stride;
}

static inline uint64_t last_dst(const struct plan_run *r)
{
	return r->dst + (r->count - 1) * (uint64_t)r->dst_stride;
}

static inline bool same_buffers(const struct plan_run *a, const struct plan_run *b)
{
	return a->src_buffer == b->src_buffer && a->dst_buffer == b->dst_buffer;
}

/* Room for `more` runs. */
static int runs_reserve(struct runs *runs, size_t more)
{
	size_t need = runs->count + more, cap = runs->cap ? runs->cap : RUNS_FIRST;
	void *items;

	if (need <= runs->cap)
		return 0;
	if (need > PLAN_RUNS_MAX)
		return err_raise(ERR_LIMIT, "plan: more than %u runs", PLAN_RUNS_MAX);
	if (runs->limit && need > runs->limit && need - runs->limit > 1 + more)
		return err_raise(ERR_LIMIT,
				 "plan: more than %llu runs (limit: max_rows, or free "
				 "memory)",
				 (unsigned long long)runs->limit);
	while (cap < need)
		cap *= 2;
	items = mem_regrow(runs->items, cap, sizeof(*runs->items));
	if (!items)
		return -err_errno(ERR_NOMEM);
	runs->items = items;
	runs->cap = cap;
	return 0;
}

/* Does `b` continue `a` at one stride? Then `a` takes its rows. */
static bool fold(struct plan_run *a, const struct plan_run *b)
{
	int64_t src_step = (int64_t)(b->src - last_src(a));
	int64_t dst_step = (int64_t)(b->dst - last_dst(a));

	if (a->len != b->len || !same_buffers(a, b))
		return false;
	if (a->count > 1 && (a->src_stride != src_step || a->dst_stride != dst_step))
		return false;
	if (b->count > 1 && (b->src_stride != src_step || b->dst_stride != dst_step))
		return false;
	a->src_stride = src_step;
	a->dst_stride = dst_step;
	a->count += b->count;
	return true;
}

/* (A B) C + D with B, C, D regular: A (B C D). */
static bool refold(struct runs *runs, const struct plan_run *d)
{
	struct plan_run *ab, *c, bcd;

	if (runs->count < 2)
		return false;
	c = &runs->items[runs->count - 1];
	ab = c - 1;
	if (c->count != 1 || ab->count != 2)
		return false;
	bcd = *ab;
	bcd.src = last_src(ab);
	bcd.dst = last_dst(ab);
	bcd.count = 1;
	if (!fold(&bcd, c) || !fold(&bcd, d))
		return false;
	ab->count = 1;
	ab->src_stride = ab->dst_stride = 0;
	*c = bcd;
	return true;
}

static int append_folding(struct runs *runs, const struct plan_run *run)
{
	int r;

	if (runs->count > 0 &&
	    (refold(runs, run) || fold(&runs->items[runs->count - 1], run)))
		return 0;
	r = runs_reserve(runs, 1);
	if (r < 0)
		return err_pass(r);
	runs->items[runs->count++] = *run;
	return 0;
}

static int append_merging(struct runs *runs, const struct plan_run *run)
{
	struct plan_run *a = &runs->items[runs->count - 1];
	struct plan_run row = *run, rest = *run;
	int r;

	row.src = last_src(a);
	row.dst = last_dst(a);
	row.len += a->len;
	row.count = 1;
	row.src_stride = row.dst_stride = 0;
	if (--a->count == 0)
		runs->count--;
	else if (a->count == 1)
		a->src_stride = a->dst_stride = 0;
	r = append_folding(runs, &row);
	if (r < 0 || rest.count == 1)
		return r < 0 ? err_pass(r) : 0;
	rest.src += (uint64_t)rest.src_stride;
	rest.dst += (uint64_t)rest.dst_stride;
	if (--rest.count == 1)
		rest.src_stride = rest.dst_stride = 0;
	r = append_folding(runs, &rest);
	return r < 0 ? err_pass(r) : 0;
}

int runs_append(struct runs *runs, const struct plan_run *run)
{
	if (runs->count > 0) {
		const struct plan_run *a = &runs->items[runs->count - 1];

		if (run->dst == last_dst(a) + a->len &&
		    run->src == last_src(a) + a->len && same_buffers(a, run))
			return append_merging(runs, run);
	}
	return append_folding(runs, run);
}

int runs_append_all(struct runs *runs, const struct runs *from,
		    const struct runs_shift *shift)
{
	struct plan_run *out;
	int r;

	for (size_t i = 0; i < from->count; i++) {
		struct plan_run run = from->items[i];

		run.src += shift->src;
		run.dst += shift->dst;
		run.src_buffer += shift->src_buffer;
		run.dst_buffer += shift->dst_buffer;
		if (i == 0) {
			r = runs_append(runs, &run);
			if (r == 0)
				r = runs_reserve(runs, from->count);
			if (r < 0)
				return err_pass(r);
			out = runs->items + runs->count - 1;
			runs->count += from->count - 1;
			continue;
		}
		out[i] = run;
	}
	return 0;
}

static int runs_by_destination(const void *a, const void *b)
{
	const struct plan_run *x = a, *y = b;

	if (x->dst_buffer != y->dst_buffer)
		return x->dst_buffer < y->dst_buffer ? -1 : 1;
	return (x->dst > y->dst) - (x->dst < y->dst);
}

void runs_sort(struct runs *runs)
{
	for (size_t i = 1; i < runs->count; i++) {
		if (runs_by_destination(&runs->items[i - 1], &runs->items[i]) > 0) {
			qsort(runs->items, runs->count, sizeof(*runs->items),
			      runs_by_destination);
			return;
		}
	}
}

/* ---- the finished plan ---- */

struct length {
	uint64_t len, rows;
};

static int length_compare(const void *a, const void *b)
{
	uint64_t x = ((const struct length *)a)->len, y = ((const struct length *)b)->len;

	return (x > y) - (x < y);
}

/* Plans of real engines have a handful of row lengths: they are counted in a
 * small table. When it overflows, every run gets an entry. */
#define LENGTHS_TABLE 16

static bool lengths_count(const struct plan *plan, struct length *table, size_t *n_p)
{
	size_t n = 0, at = 0;

	for (size_t i = 0; i < plan->run_count; i++) {
		const struct plan_run *run = &plan->runs[i];

		if (n == 0 || table[at].len != run->len) {
			for (at = 0; at < n && table[at].len != run->len;)
				at++;
			if (at == LENGTHS_TABLE)
				return false;
			if (at == n)
				table[n++] = (struct length){.len = run->len};
		}
		table[at].rows += run->count;
	}
	*n_p = n;
	return true;
}

static void lengths_apply(struct plan *plan, struct length *lengths, size_t n)
{
	uint64_t seen = 0;
	size_t i = 0;

	qsort(lengths, n, sizeof(*lengths), length_compare);
	while (seen + lengths[i].rows <= (plan->rows - 1) / 2)
		seen += lengths[i++].rows;
	plan->row_median = lengths[i].len;
}

static int fill_lengths(struct plan *plan)
{
	struct length table[LENGTHS_TABLE];
	struct length *lengths;
	size_t n;

	if (lengths_count(plan, table, &n)) {
		lengths_apply(plan, table, n);
		return 0;
	}
	lengths = mem_regrow(NULL, plan->run_count, sizeof(*lengths));
	if (!lengths)
		return -err_errno(ERR_NOMEM);
	for (size_t i = 0; i < plan->run_count; i++)
		lengths[i] = (struct length){.len = plan->runs[i].len,
					     .rows = plan->runs[i].count};
	lengths_apply(plan, lengths, plan->run_count);
	mem_free(lengths);
	return 0;
}

static int fill_totals(struct plan_full *full)
{
	struct plan *plan = &full->plan;
	uint64_t bytes, rows = 0, total = 0;

	for (size_t i = 0; i < plan->run_count; i++) {
		const struct plan_run *run = &plan->runs[i];

		if (__builtin_mul_overflow(run->len, run->count, &bytes) ||
		    __builtin_add_overflow(total, bytes, &total) ||
		    __builtin_add_overflow(rows, run->count, &rows))
			return err_raise(ERR_RANGE, "plan: its bytes overflow 64 bits");
		full->ends[i] = total;
	}
	plan->bytes = total;
	plan->rows = rows;
	return 0;
}

/* False: one of its rows is outside the range of 64 bits. */
static bool end_raise(uint64_t *end, uint64_t offset, const struct plan_run *run,
		      int64_t stride)
{
	__int128 first = offset, last = offset, top;

	if (run->len == 0 || run->count == 0)
		return true;
	last += (__int128)(run->count - 1) * (run->count > 1 ? stride : 0);
	top = (first < last ? last : first) + run->len;
	if (first < 0 || last < 0 || top > UINT64_MAX)
		return false;
	if ((uint64_t)top > *end)
		*end = (uint64_t)top;
	return true;
}

static void ends_drop(struct plan *plan)
{
	mem_free((void *)plan->src_ends);
	mem_free((void *)plan->dst_ends);
	plan->src_ends = NULL;
	plan->dst_ends = NULL;
	plan->src_ends_count = 0;
	plan->dst_ends_count = 0;
}

static int fill_ends(struct plan *plan)
{
	uint32_t src_count = 0, dst_count = 0;
	uint64_t *src, *dst;

	for (size_t i = 0; i < plan->run_count; i++) {
		const struct plan_run *run = &plan->runs[i];

		if (run->src_buffer >= PLAN_ENDS_MAX || run->dst_buffer >= PLAN_ENDS_MAX)
			return 0;
		if (run->src_buffer >= src_count)
			src_count = run->src_buffer + 1;
		if (run->dst_buffer >= dst_count)
			dst_count = run->dst_buffer + 1;
	}
	plan->src_ends = src = mem_calloc(src_count, sizeof(*src));
	plan->dst_ends = dst = mem_calloc(dst_count, sizeof(*dst));
	if (!src || !dst)
		return -err_errno(ERR_NOMEM);
	plan->src_ends_count = src_count;
	plan->dst_ends_count = dst_count;
	for (size_t i = 0; i < plan->run_count; i++) {
		const struct plan_run *run = &plan->runs[i];

		if (!end_raise(&src[run->src_buffer], run->src, run, run->src_stride) ||
		    !end_raise(&dst[run->dst_buffer], run->dst, run, run->dst_stride)) {
			ends_drop(plan);
			return 0;
		}
	}
	return 0;
}

/* XXH3 over the runs' members in declaration order, little-endian. A run has
 * no padding, so on a little-endian machine these are its bytes. */
static uint64_t digest(const struct plan *plan)
{
	_Static_assert(sizeof(struct plan_run) == 56, "a run has no padding");
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the digest hashes runs as they lie: add the conversion for this machine"
#endif
	return XXH3_64bits(plan->runs, plan->run_count * sizeof(*plan->runs));
}

static uint64_t serial_next(void)
{
	static _Atomic uint64_t last;

	return atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1;
}

int runs_finish(struct runs *runs, struct plan **plan_p)
{
	struct plan_full *full;
	struct plan *plan;
	void *items;
	int r = 0;

	*plan_p = NULL;
	full = mem_zalloc(sizeof(*full));
	if (!full)
		return -err_errno(ERR_NOMEM);
	plan = &full->plan;
	full->ends = mem_regrow(NULL, runs->count, sizeof(*full->ends));
	items = full->ends ? mem_regrow(runs->items, runs->count, sizeof(*runs->items))
			   : NULL;
	if (!items) {
		plan_free(plan);
		return -err_errno(ERR_NOMEM);
	}
	plan->runs = items;
	plan->run_count = runs->count;
	*runs = (struct runs){0};
	r = fill_totals(full);
	if (r == 0 && plan->run_count > 0)
		r = fill_lengths(plan);
	if (r == 0 && plan->run_count > 0)
		r = fill_ends(plan);
	if (r < 0) {
		plan_free(plan);
		return err_pass(r);
	}
	plan->digest = digest(plan);
	plan->serial = serial_next();
	*plan_p = plan;
	return 0;
}
