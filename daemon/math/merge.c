/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/math/merge.h"

#include <assert.h>
#include <string.h>

#include "daemon/math/merge_row.h"

/* Lanes of a sum: the same operations as one by one, on several values at a time. */
typedef float merge_lanes __attribute__((vector_size(64)));
#define LANES (sizeof(merge_lanes) / sizeof(float))

static void merge_values(float *o, const struct merge_part *parts, const uint32_t *used,
			 const float *weights, uint32_t count, size_t at, uint32_t dv)
{
	merge_lanes sum, x;
	uint32_t d, i;
	float one;

	for (d = 0; d + LANES <= dv; d += LANES) {
		memcpy(&x, parts[used[0]].o + at + d, sizeof(x));
		sum = x * weights[0];
		for (i = 1; i < count; i++) {
			memcpy(&x, parts[used[i]].o + at + d, sizeof(x));
			sum = sum + x * weights[i];
		}
		memcpy(o + at + d, &sum, sizeof(sum));
	}
	for (; d < dv; d++) {
		one = parts[used[0]].o[at + d] * weights[0];
		for (i = 1; i < count; i++)
			one = one + parts[used[i]].o[at + d] * weights[i];
		o[at + d] = one;
	}
}

void merge_rows(float *o, float *m, float *l, const struct merge_part *parts,
		uint32_t part_count, uint32_t rows, uint32_t dv)
{
	uint32_t row, used[MERGE_PARTS_MAX], count, i;
	double exact[MERGE_PARTS_MAX];
	float weights[MERGE_PARTS_MAX], ms[MERGE_PARTS_MAX], ls[MERGE_PARTS_MAX];

	assert(part_count <= MERGE_PARTS_MAX);
	for (row = 0; row < rows; row++) {
		size_t at = (size_t)row * dv;

		for (i = 0; i < part_count; i++) {
			ms[i] = parts[i].m[row];
			ls[i] = parts[i].l[row];
		}
		count = merge_weights(ms, ls, part_count, used, exact, weights, m + row,
				      l + row);
		if (count)
			merge_values(o, parts, used, weights, count, at, dv);
		else
			memset(o + at, 0, dv * sizeof(*o));
	}
}
