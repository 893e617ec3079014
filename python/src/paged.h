/* SPDX-License-Identifier: Apache-2.0 */
/*
 * paged: attention of a batch of requests to one cache in place, by the kernels of
 * daemon/math. Each request has its own pages of the cache, and each query token attends
 * to the first `end` tokens of them. No Python in it; any thread.
 */
#ifndef KVD_PYTHON_PAGED_H
#define KVD_PYTHON_PAGED_H

#include <stdint.h>

#include "daemon/math/attend.h"

#define PAGED_THREADS_MAX 64u

struct paged {
	struct attend_shape shape;
	struct attend_field k, v;	      /* MLA: v is not read */
	struct attend_field k_scale, v_scale; /* as in attend_kv */
	uint64_t pages;			      /* of the cache */
	uint32_t page_tokens;
	const uint8_t *q;  /* of shape.q_type; the heads of a query token: adjacent */
	uint64_t q_stride; /* bytes from query token to query token */
	float *o, *lse;	   /* [tokens][heads][dv], [tokens][heads] */
	uint32_t tokens;   /* query tokens */
	/* Of each request: query tokens, and pages. They, and its numbers in `table` and
	 * `ends`, are behind those of the request before. */
	const uint32_t *queries, *counts;
	uint32_t request_count;
	const uint32_t *table; /* page numbers */
	uint32_t table_count;
	const uint32_t *ends; /* [tokens] */
	enum pick_isa isa;
	unsigned int threads; /* at most; 1 to PAGED_THREADS_MAX */
};

/* ERR_INVAL, which names the member and the limit. Checks every number, but no value of
 * q or of the cache. */
int paged_check(const struct paged *paged);

/* It was checked. -ENOMEM. lse: the natural logarithm of the sum of exp(logit); a
 * query token without tokens has -inf, and o = 0. */
int paged_run(const struct paged *paged);

#endif
