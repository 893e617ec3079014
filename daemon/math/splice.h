/* SPDX-License-Identifier: Apache-2.0 */
/*
 * splice: keys for other positions. Rotary position embedding (RoPE) rotates each pair of
 * a head's rope values by position * inv_freq[pair]; so a chunk whose tokens are used
 * `delta` positions later is rotated by delta * inv_freq[pair], one angle a pair for all
 * tokens, layers and heads. The other values (MLA's latent, V) have no position.
 *
 * inv_freq is as the model applies it: of scaled forms (linear, YaRN, Llama 3) the scaled
 * frequencies. A factor on the rotated values (YaRN's mscale) is in the cached keys
 * already, and a rotation preserves lengths: it is not applied again.
 *
 * Values are rotated in fp32 and rounded once. The source is the canonical bytes, as
 * computed by the model: rotating rotated values would round twice. Pure; any thread.
 */
#ifndef KVD_MATH_SPLICE_H
#define KVD_MATH_SPLICE_H

#include <stdint.h>

#include "daemon/math/value.h"

#define ROPE_PAIRS_MAX 256u

/* Which values form a pair; i of n pairs. The layout states it: models of one name are
 * cached in both orders. */
enum rope_pairs {
	ROPE_HALVES,	  /* i and i + n */
	ROPE_INTERLEAVED, /* 2i and 2i + 1 */
};

struct rope {
	uint16_t first;		/* of a head's values (MLA: of the row's) */
	uint16_t dims;		/* even, at most 2 * ROPE_PAIRS_MAX */
	uint8_t pairs;		/* enum rope_pairs */
	const double *inv_freq; /* [dims / 2]; radians a position */
};

/* A rotation by one delta. */
struct rope_turn {
	int64_t delta;
	uint16_t first, dims;
	uint8_t pairs;
	float cos[ROPE_PAIRS_MAX], sin[ROPE_PAIRS_MAX];
};

/* By -delta for a query whose keys stay in place. Angles are fp64: fp32 has an error of
 * 1e-3 at a delta of 131072. */
void rope_turn_make(struct rope_turn *turn, const struct rope *rope, int64_t delta);
/* The rope values among a head's values, in place. */
void rope_turn_apply(const struct rope_turn *turn, float *values);

/* One kind of head rows: `count` of them, `values` values each, from src to dst, which
 * are separate or the same. With delta 0 the bytes are copied without interpretation. */
struct splice {
	const struct rope_turn *turn;
	enum value_type type;
	uint32_t values;
	uint64_t dst_stride, src_stride; /* bytes from row to row */
};

void splice_rows(const struct splice *splice, void *dst, const void *src, uint64_t count);

#endif
