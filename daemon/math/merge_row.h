/* SPDX-License-Identifier: Apache-2.0 */
/*
 * merge_row: the scalar arithmetic of merge.h, shared by merge.c and the GPU's kernel
 * (gpu/attend.cu). Separate products and sums: compile without contraction.
 */
#ifndef KVD_MATH_MERGE_ROW_H
#define KVD_MATH_MERGE_ROW_H

#include <math.h>
#include <stdbool.h>

#include "daemon/math/merge.h"
#include "daemon/math/value.h"

/* exp(x) = 2^n * exp(r), |r| <= ln 2 / 2: n * ln 2 is subtracted in two steps, the first
 * of them exact. The polynomial is the Taylor series to r^7: its remainder is below
 * 0.35^8 / 8! = 5.6e-9. Separate products and sums: see the header. */
VALUE_FN float merge_exp_of(float x)
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
 * `m` and `l` are the parts'. One whose share underflowed stays: a NaN in it is the
 * row's. `exact` has room for each part: a kernel has no stack. */
VALUE_FN uint32_t merge_weights(const float *m, const float *l, uint32_t part_count,
				uint32_t *used, double *exact, float *weights, float *m_p,
				float *l_p)
{
	double sum = 0; /* in any order, almost */
	uint32_t i, count = 0;
	float most = -INFINITY;
	bool nan = false;

	for (i = 0; i < part_count; i++) {
		if (l[i] == 0)
			continue;
		used[count++] = i;
		nan = nan || m[i] != m[i];
		most = m[i] > most ? m[i] : most;
	}
	if (nan)
		most = NAN;
	for (i = 0; i < count; i++) {
		float own = m[used[i]];

		/* equal infinities: their difference would be a NaN */
		exact[i] = (double)l[used[i]] *
			   (double)(own == most ? 1 : merge_exp_of(own - most));
		sum += exact[i];
	}
	for (i = 0; i < count; i++)
		weights[i] = (float)(exact[i] / sum);
	*m_p = most;
	*l_p = (float)sum;
	return count;
}

#endif
