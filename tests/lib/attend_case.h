/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend_case: a chunk in a pool, query rows over it, and what they are to give, computed
 * another way than by any kernel: softmax in two passes in fp64, from addresses of its
 * own. Every byte of the pool that is not a token's is 0xff, a NaN of each type, and
 * behind the pool begins memory that cannot be read.
 */
#ifndef KVD_TESTS_ATTEND_CASE_H
#define KVD_TESTS_ATTEND_CASE_H

#include "daemon/math/attend.h"

#define CASE_SPANS 32u
/* The bits of an fp32 that nobody computes: what o, m and l hold before a call. */
#define CASE_UNTOUCHED 0x7fdeadbeu

struct attend_case {
	struct attend_shape shape;
	struct attend_kv kv;
	struct rope rope;
	double inv_freq[ROPE_PAIRS_MAX];
	struct attend_span spans[CASE_SPANS];
	uint32_t span_count;
	bool heads_first; /* a page's tokens lie head by head */
	uint64_t seed;
	uint8_t *memory;
	size_t memory_bytes;
	uint32_t *pages;
	void *scratch;
	size_t scratch_bytes;
};

struct case_pool {
	uint32_t tokens, page_tokens, first;
	bool scattered; /* pages in any order, among as many others */
	bool heads_first;
	/* a token's k and v have scales, of an fp8 cache: of both signs, powers of two
	 * and others; MLA: one */
	bool k_scaled, v_scaled;
};

struct case_error {
	double worst, most; /* |difference| of o, and |o| */
	double rms;	    /* of the difference, relative to o's */
	double m, l;	    /* |difference|, and relative */
};

uint64_t case_random(uint64_t *seed, uint64_t below);
double case_normal(uint64_t *seed);

/* DeepSeek's MLA with so many heads, and GQA. bf16; the scale keeps logits near 1. */
struct attend_shape case_mla(uint16_t heads);
struct attend_shape case_gqa(uint16_t heads, uint16_t kv_heads, uint16_t d);

/* k is normal, and v too; rope has the last 64 values (MLA) or all of a head. */
void case_make(struct attend_case *c, const struct attend_shape *shape,
	       const struct case_pool *pool, uint64_t seed);
void case_free(struct attend_case *c);
/* Tokens [begin, end) for rows numbered from `first` on. */
struct attend_span *case_span(struct attend_case *c, uint32_t rows, uint32_t first,
			      uint32_t begin, uint32_t end);
/* A new span of whole query tokens with selections, about an eighth of them none. */
struct attend_span *case_selected(struct attend_case *c, uint32_t query_tokens,
				  uint32_t per_token);

/* The address of a token's k or v. */
uint8_t *case_at(const struct attend_case *c, bool v, uint32_t token, uint32_t head);
/* And of its scale, an fp32; NULL: it has none. */
uint8_t *case_scale_at(const struct attend_case *c, bool v, uint32_t token,
		       uint32_t head);
double case_value(enum value_type type, const void *src, uint32_t i);
void case_put(enum value_type type, void *dst, uint32_t i, double x);

/* The kernel under test; of one that this machine lacks the test is skipped by name. */
enum pick_isa case_isa(void **state);
extern enum pick_isa case_isas[PICK_ISAS];
#define CASE_PER_ISA(f)                                                      \
	{#f " (ref)", f, NULL, NULL, &case_isas[PICK_REF]},                  \
		{#f " (vector)", f, NULL, NULL, &case_isas[PICK_VECTOR]},    \
		{#f " (avx2)", f, NULL, NULL, &case_isas[PICK_AVX2]},        \
		{#f " (avx512)", f, NULL, NULL, &case_isas[PICK_AVX512]},    \
		{#f " (avx512_bf16)", f, NULL, NULL, &case_isas[PICK_BF16]}, \
		{#f " (amx)", f, NULL, NULL, &case_isas[PICK_AMX]},

void case_poison_outputs(struct attend_case *c);
/* Asserts that it is done. */
void case_run(struct attend_case *c, enum pick_isa isa);
/* All spans by themselves, a call each. */
void case_run_each(struct attend_case *c, enum pick_isa isa);
/* Of one row; o[dv]. */
void case_oracle(const struct attend_case *c, const struct attend_span *span,
		 uint32_t row, double *o, double *m, double *l);
/* Of all rows; asserts that empty rows are as they should be. */
struct case_error case_compare(const struct attend_case *c);

#endif
