/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/fuzz/lib/plan_check.h"

#include <stdlib.h>

#define require(x)               \
	do {                     \
		if (!(x))        \
			abort(); \
	} while (0)

static int by_destination(const void *a, const void *b)
{
	const struct plan_span *x = a, *y = b;

	if (x->dst_buffer != y->dst_buffer)
		return x->dst_buffer < y->dst_buffer ? -1 : 1;
	return (x->dst > y->dst) - (x->dst < y->dst);
}

static void check_disjoint(struct plan_span *rows, size_t count)
{
	if (count > 1)
		qsort(rows, count, sizeof(*rows), by_destination);
	for (size_t i = 1; i < count; i++) {
		const struct plan_span *a = &rows[i - 1], *b = &rows[i];

		if (a->dst_buffer != b->dst_buffer)
			continue;
		require(a->dst + a->len <= b->dst);
		/* neighbours on both sides would be one row */
		require(a->dst + a->len != b->dst || a->src_buffer != b->src_buffer ||
			a->src + a->len != b->src);
	}
}

void fuzz_plan_check(const struct layout *src, const struct layout *dst,
		     const struct plan *plan)
{
	static struct plan_span rows[FUZZ_ROWS_MAX];
	struct plan_walk walk;
	uint64_t bytes = 0;
	size_t n = 0;

	require(plan->rows <= FUZZ_ROWS_MAX);
	plan_walk_begin(&walk, plan);
	while (n < plan->rows && plan_walk_next(&walk, UINT64_MAX, &rows[n])) {
		const struct plan_span *s = &rows[n++];

		require(s->len > 0);
		require(s->src_buffer < src->buffer_count);
		require(s->dst_buffer < dst->buffer_count);
		require(s->src <= src->buffers[s->src_buffer]);
		require(s->len <= src->buffers[s->src_buffer] - s->src);
		require(s->dst <= dst->buffers[s->dst_buffer]);
		require(s->len <= dst->buffers[s->dst_buffer] - s->dst);
		bytes += s->len;
	}
	require(n == plan->rows && bytes == plan->bytes);
	check_disjoint(rows, n);
	require(plan_walk_seek(&walk, plan, plan->bytes) == 0);
	require(!plan_walk_next(&walk, 1, &rows[0]));
}
