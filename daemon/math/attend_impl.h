/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Shared by attend.c and the kernels. A call is cut into groups: rows of one KV head that
 * attend to the same tokens, from any spans. A kernel processes one group at a time, and
 * gets the group's tokens as addresses, a batch at a time, whether paged or selected; so
 * it needs neither masks nor pages.
 */
#ifndef KVD_MATH_ATTEND_IMPL_H
#define KVD_MATH_ATTEND_IMPL_H

#include <math.h>

#include "daemon/math/attend.h"

#define ATTEND_BATCH 256u /* tokens of a batch of addresses */

struct attend_row {
	const uint8_t *q;
	float *o, *m, *l;
	int32_t delta;
};

struct attend_work {
	const struct attend_job *job;
	struct rope_turn turn; /* of the last delta */
	struct attend_row *rows;
	uint32_t *order; /* numbers of spans */
	uint8_t *kernel; /* the kernel's own part of the scratch */
};

struct attend_group {
	const struct attend_row *rows;
	uint32_t count;
	uint32_t head;		/* of K and V */
	const uint32_t *select; /* NULL: the tokens themselves */
	uint32_t begin, end;	/* tokens, or places in select */
};

/* The next batch of a group's tokens. */
struct attend_batch {
	uint32_t next; /* its start; initially group->begin */
	uint32_t count;
	const uint8_t *k[ATTEND_BATCH], *v[ATTEND_BATCH];
	float k_scale[ATTEND_BATCH], v_scale[ATTEND_BATCH]; /* if the kv has them */
};

struct attend_kernel {
	const char *name;
	bool (*takes)(const struct attend_shape *shape);
	size_t (*scratch_bytes)(const struct attend_shape *shape);
	/* false: stopped */
	bool (*group)(struct attend_work *work, const struct attend_group *group);
};

/* NULL: not in this build. */
extern const struct attend_kernel attend_ref, attend_vector;
extern const struct attend_kernel *const attend_avx2,
	*const attend_avx512, *const attend_bf16, *const attend_amx;
/* Does the processor have the features of attend_amx, and does the operating system
 * permit their use? */
bool attend_amx_ready(void);

/* attend_run() by a kernel that pick.h does not list; its scratch_bytes are at most
 * attend_scratch_bytes(). */
enum attend_outcome attend_run_by(const struct attend_kernel *kernel,
				  const struct attend_job *job, void *scratch);
/* At most `most` tokens; false: none are left. */
bool attend_next(const struct attend_work *work, const struct attend_group *group,
		 struct attend_batch *batch, uint32_t most);
/* A row's q as fp32, rotated by its -delta. */
void attend_q(struct attend_work *work, const struct attend_row *row, float *q);

static inline bool attend_scaled(const struct attend_kv *kv)
{
	return kv->k_scale.base || kv->v_scale.base;
}

static inline bool attend_stop(const struct attend_work *work)
{
	return work->job->stop && work->job->stop(work->job->stop_arg);
}

/* The next piece of a scratch. */
static inline void *attend_carve(uint8_t **at, size_t bytes)
{
	void *piece = *at;

	*at += (bytes + 63) / 64 * 64;
	return piece;
}

#endif
