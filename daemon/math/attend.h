/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend: attention of query rows to the tokens of one chunk, in one layer, in place.
 *
 *   logit = cap(scale * q . k)    m = max logit    l = sum exp(logit - m)
 *   o = sum exp(logit - m) * v / l
 *
 * Two shapes. MLA: all heads share one row of dqk values a token, and v is its first dv
 * (DeepSeek: 576 and 512; q has absorbed the up-projection). GQA: kv_heads heads of K and
 * of V, each for heads / kv_heads query heads. A row is one head of one query token: row
 * = token * heads + head.
 *
 * Scales of an fp8 cache: those of a token and KV head are read here (attend_kv), and
 * multiply k and v. One of a tensor or of a KV head is the requester's: q is multiplied
 * by that of K, and o by that of V.
 *
 * One call takes rows of several requesters, in spans that each have their tokens, delta
 * and buffers. Tokens outside a row's range are not multiplied, not even by 0, and
 * nothing after the last token is read: a NaN there changes no bit. A row without tokens:
 * l = 0, m = -inf, o = 0. A token whose logit is -inf has weight 0: an infinity or a NaN
 * in its v may nevertheless be a NaN in o (not with ref). A NaN in a row of q stays in
 * that row.
 *
 * A kernel for each instruction set (pick.h): sums are fp32 (ref: fp64), and AMX rounds
 * the weights to bf16 before they are multiplied by v, but not those of l. Pure: no
 * allocation, clock or thread; any thread, with a scratch of its own.
 */
#ifndef KVD_MATH_ATTEND_H
#define KVD_MATH_ATTEND_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/math/pick.h"
#include "daemon/math/splice.h"

#define ATTEND_ROWS_MAX 4096u /* of a call */
#define ATTEND_DIMS_MAX 1024u /* dqk, dv: multiples of ATTEND_DIMS_STEP */
#define ATTEND_DIMS_STEP 16u
#define ATTEND_NONE UINT32_MAX /* in a selection: no token */

enum attend_kind { ATTEND_MLA, ATTEND_GQA };

struct attend_shape {
	uint8_t kind;	 /* enum attend_kind */
	uint8_t q_type;	 /* enum value_type */
	uint8_t kv_type; /* enum value_type */
	uint16_t heads, kv_heads;
	uint16_t dqk, dv;
	float scale;   /* the model's (YaRN: with mscale squared) */
	float softcap; /* cap * tanh(logit / cap); 0: none */
};

/* Token t is number first + t of the paged tokens; its page is that / page_tokens, looked
 * up in `pages`, and in the page it is that % page_tokens:
 * base + page * page_stride + token * token_stride + kv head * head_stride. */
struct attend_field {
	const uint8_t *base;
	uint64_t page_stride, token_stride, head_stride; /* bytes */
};

struct attend_kv {
	struct attend_field k, v; /* MLA: v is not read */
	/* An fp32 each, at any address; base NULL: 1. MLA: v's is of the row as v. Of
	 * fp8_e4m3 alone. */
	struct attend_field k_scale, v_scale;
	const uint32_t *pages; /* NULL: page n is the n-th */
	uint32_t page_tokens;
	uint32_t first;
	uint32_t tokens; /* of the chunk */
};

/*
 * Consecutive rows of one requester. Dense: tokens [begin, end). Selected: for each query
 * token the `per_token` indices of tokens at select, shared by its heads, in any order;
 * ATTEND_NONE is none. `first` is the number of the first row among the requester's,
 * which determines its head; `select` starts with the indices of that row's query token.
 */
struct attend_span {
	const void *q;	  /* [rows][dqk], of q_type, at any address */
	float *o, *m, *l; /* [rows][dv], [rows], [rows] */
	uint32_t rows, first;
	uint32_t begin, end;
	/* The chunk is used so many positions later: q's rope values are rotated by
	 * -delta in fp32. Not with a selection, whose tokens keep their positions. */
	int32_t delta;
	const uint32_t *select; /* NULL: dense */
	uint32_t per_token;
};

struct attend_job {
	const struct attend_shape *shape;
	const struct attend_kv *kv;
	const struct rope *rope; /* NULL: every delta is 0 */
	const struct attend_span *spans;
	uint32_t span_count;
	/* Called after every 200 us of work or less; true ends the call. NULL: never. */
	bool (*stop)(void *arg);
	void *stop_arg;
};

enum attend_outcome {
	ATTEND_DONE = 0,
	ATTEND_STOPPED = 1, /* some rows may be done, some not, some partly */
};

/* Its fault, in a text that names the member; NULL: none. Checks every index, but no q
 * and no page. */
const char *attend_shape_fault(const struct attend_shape *shape);
const char *attend_job_fault(const struct attend_job *job);

/* The size for a call of at most so many rows, for any kernel; 64-byte aligned. */
size_t attend_scratch_bytes(const struct attend_shape *shape, uint32_t rows);

/* The job must be without fault. PICK_AUTO: the fastest that takes the shape; a kernel
 * that does not take the shape, or that this machine lacks, leaves it to the next slower
 * one. With one kernel a row's bits do not depend on the call's other rows, but for AMX
 * where a rope value of K is infinite and another row has a delta (attend_amx.c). */
enum attend_outcome attend_run(enum pick_isa isa, const struct attend_job *job,
			       void *scratch);

#endif
