/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/math/splice.h"

#include <assert.h>
#include <math.h>

void rope_turn_make(struct rope_turn *turn, const struct rope *rope, int64_t delta)
{
	uint32_t i;

	assert(rope->dims % 2 == 0 && rope->dims / 2 <= ROPE_PAIRS_MAX);
	turn->delta = delta;
	turn->first = rope->first;
	turn->dims = rope->dims;
	turn->pairs = rope->pairs;
	for (i = 0; i < rope->dims / 2; i++) {
		double angle = (double)delta * rope->inv_freq[i];

		turn->cos[i] = (float)cos(angle);
		turn->sin[i] = (float)sin(angle);
	}
}

void rope_turn_apply(const struct rope_turn *turn, float *values)
{
	uint32_t i, n = turn->dims / 2, step = 1, other = n;
	float *x = values + turn->first;

	if (turn->pairs == ROPE_INTERLEAVED) {
		step = 2;
		other = 1;
	}
	for (i = 0; i < n; i++) {
		float a = x[step * i], b = x[step * i + other];

		x[step * i] = a * turn->cos[i] - b * turn->sin[i];
		x[step * i + other] = b * turn->cos[i] + a * turn->sin[i];
	}
}

void splice_rows(const struct splice *splice, void *dst, const void *src, uint64_t count)
{
	const struct rope_turn *turn = splice->turn;
	uint32_t bytes = value_bytes(splice->type), row = splice->values * bytes;
	uint32_t begin = turn->first * bytes;
	float wide[2 * ROPE_PAIRS_MAX];
	struct rope_turn here = *turn; /* `wide` starts with the rope values */
	uint64_t i;

	assert(turn->first + turn->dims <= splice->values);
	here.first = 0;
	for (i = 0; i < count; i++) {
		uint8_t *to = (uint8_t *)dst + i * splice->dst_stride;
		const uint8_t *from = (const uint8_t *)src + i * splice->src_stride;

		if (turn->delta) /* before the copy: they may be one */
			value_widen(splice->type, wide, from + begin, turn->dims);
		if (to != from)
			memcpy(to, from, row);
		if (turn->delta) {
			rope_turn_apply(&here, wide);
			value_narrow(splice->type, to + begin, wide, turn->dims);
		}
	}
}
