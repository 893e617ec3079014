/* SPDX-License-Identifier: Apache-2.0 */
/*
 * merge: combines partial attention over parts of the tokens into attention over all of
 * them.
 *
 * A partial of one row is o (normalised by its own l), m (the maximum of its scaled,
 * capped logits) and l (the sum of exp(logit - m)). An empty one has l = 0: its o and m
 * are not read and may be anything. All of it is fp32.
 *
 *   m = max m_i    w_i = l_i * exp(m_i - m)    l = sum w_i    o = sum (w_i / l) * o_i
 *
 * Two partials give the same bits in both orders, and one with empty ones its own bits.
 * Up to seven in another order differ by at most 2^-21 * sum w_i |o_i| / l: shares are
 * computed in fp64. exp is this file's own and nothing is contracted (mk/math.mk), so
 * every machine, and a GPU, gives the same bits. A NaN stays in its row. Pure; any
 * thread.
 */
#ifndef KVD_MATH_MERGE_H
#define KVD_MATH_MERGE_H

#include <stdint.h>

#define MERGE_PARTS_MAX 64u

struct merge_part {
	const float *o;	    /* [rows][dv] */
	const float *m, *l; /* [rows] */
};

/* o, m and l are the result's: separate from the parts', or one part's own. At most
 * MERGE_PARTS_MAX parts. If all are empty: o = 0, m = -inf, l = 0. */
void merge_rows(float *o, float *m, float *l, const struct merge_part *parts,
		uint32_t part_count, uint32_t rows, uint32_t dv);

#endif
