/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/math/merge.h"

#include <assert.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "daemon/math/value.h"

/* exp(x) = 2^n * exp(r), |r| <= ln 2 / 2: n * ln 2 is taken away in two steps, the first
 * of them exact. The polynomial is the Taylor series to r^7: its remainder is below
 * 0.35^8 / 8! = 5.6e-9. Separate products and sums: see the header. */
float merge_exp(float x)
{
	float n, r, p;
	int32_t k;

	if (x != x)
		return x;
	if (!(x > -87.3f))
		return 0;
	n = x * 1.44269504f;
	k = (int32_t)(n - 0.5f); /* x <= 0: to nearest */
	n = (float)k;
	r = x - n * 0.693359375f;
	r = r - n * -2.12194440e-4f;
	p = 1.98412698e-4f;
	p = p * r + 1.38888889e-3f;
	p = p * r + 8.33333333e-3f;
	p = p * r + 4.16666667e-2f;
	p = p * r + 1.66666667e-1f;
	p = p * r + 0.5f;
	p = p * r + 1.0f;
	p = p * r + 1.0f;
	return p * value_of_bits((uint32_t)(k + 127) << 23);
}

/* Which parts of a row are not empty, how many, and their shares; the result's m and l.
 * One whose share underflowed stays: a NaN in it is the row's. */
static uint32_t merge_weights(const struct merge_part *parts, uint32_t part_count,
			      uint32_t row, uint32_t *used, float *weights, float *m_p,
			      float *l_p)
{
	double exact[MERGE_PARTS_MAX], l = 0; /* of any order, almost */
	uint32_t i, count = 0;
	float m = -INFINITY;
	bool nan = false;

	for (i = 0; i < part_count; i++) {
		float mi = parts[i].m[row];

		if (parts[i].l[row] == 0)
			continue;
		used[count++] = i;
		nan = nan || mi != mi;
		m = mi > m ? mi : m;
	}
	if (nan)
		m = NAN;
	for (i = 0; i < count; i++) {
		float mi = parts[used[i]].m[row];

		/* equal infinities: their difference would be a NaN */
		exact[i] = (double)parts[used[i]].l[row] *
			   (double)(mi == m ? 1 : merge_exp(mi - m));
		l += exact[i];
	}
	for (i = 0; i < count; i++)
		weights[i] = (float)(exact[i] / l);
	m_p[row] = m;
	l_p[row] = (float)l;
	return count;
}

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
	uint32_t row, used[MERGE_PARTS_MAX], count;
	float weights[MERGE_PARTS_MAX];

	assert(part_count <= MERGE_PARTS_MAX);
	for (row = 0; row < rows; row++) {
		size_t at = (size_t)row * dv;

		count = merge_weights(parts, part_count, row, used, weights, m, l);
		if (count)
			merge_values(o, parts, used, weights, count, at, dv);
		else
			memset(o + at, 0, dv * sizeof(*o));
	}
}
