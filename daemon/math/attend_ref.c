/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The reference: no vectors, no significant blocking, sums in fp64, libm's exp. Softmax
 * is online, too, because a group's logits fit nowhere; in fp64 that has no effect that
 * fp32 results could show. It is also the kernel of shapes that no other supports.
 */
#include <string.h>

#include "daemon/math/attend_impl.h"

#define TOKENS 8u /* between two checks of stop: a row and token of MLA is about 2 us */

struct ref_row {
	double o[ATTEND_DIMS_MAX], m, l;
	float q[ATTEND_DIMS_MAX];
};

static double ref_logit(const struct attend_shape *shape, const float *q,
			const uint8_t *k, double by)
{
	float wide[ATTEND_DIMS_MAX];
	double sum = 0;
	uint32_t d;

	value_widen(shape->kv_type, wide, k, shape->dqk);
	for (d = 0; d < shape->dqk; d++)
		sum += (double)q[d] * wide[d];
	sum *= shape->scale * by;
	if (shape->softcap != 0)
		sum = shape->softcap * tanh(sum / shape->softcap);
	return sum;
}

static void ref_token(const struct attend_job *job, struct ref_row *row,
		      const struct attend_batch *batch, uint32_t token)
{
	const struct attend_shape *shape = job->shape;
	double by = job->kv->k_scale.base ? batch->k_scale[token] : 1;
	double logit = ref_logit(shape, row->q, batch->k[token], by), p, again;
	float wide[ATTEND_DIMS_MAX];
	uint32_t d;

	if (logit == -INFINITY)
		return;
	if (logit > row->m) {
		again = exp(row->m - logit);
		row->m = logit;
		row->l *= again;
		for (d = 0; d < shape->dv; d++)
			row->o[d] *= again;
	}
	p = exp(logit - row->m);
	row->l += p;
	p *= job->kv->v_scale.base ? batch->v_scale[token] : 1;
	value_widen(shape->kv_type, wide, batch->v[token], shape->dv);
	for (d = 0; d < shape->dv; d++)
		row->o[d] += p * wide[d];
}

static bool ref_one(struct attend_work *work, const struct attend_group *group,
		    const struct attend_row *out)
{
	const struct attend_shape *shape = work->job->shape;
	struct ref_row *row = (struct ref_row *)(void *)work->kernel;
	struct attend_batch batch;
	uint32_t i, d;

	memset(row->o, 0, sizeof(row->o));
	row->m = -INFINITY;
	row->l = 0;
	attend_q(work, out, row->q);
	batch.next = group->begin;
	while (attend_next(work, group, &batch, TOKENS)) {
		if (attend_stop(work))
			return false;
		for (i = 0; i < batch.count; i++)
			ref_token(work->job, row, &batch, i);
	}
	for (d = 0; d < shape->dv; d++)
		out->o[d] = row->l == 0 ? 0 : (float)(row->o[d] / row->l);
	*out->m = (float)row->m;
	/* l belongs to the returned m, which was rounded: if by so much that exp might
	 * overflow, fp32 cannot distinguish logits anyway */
	if (fabs(row->m) < 0x1p24)
		row->l *= exp(row->m - *out->m);
	*out->l = (float)row->l;
	return true;
}

static bool ref_group(struct attend_work *work, const struct attend_group *group)
{
	uint32_t i;

	for (i = 0; i < group->count; i++)
		if (!ref_one(work, group, &group->rows[i]))
			return false;
	return true;
}

static bool ref_takes(const struct attend_shape *shape)
{
	(void)shape;
	return true;
}

static size_t ref_scratch_bytes(const struct attend_shape *shape)
{
	(void)shape;
	return sizeof(struct ref_row);
}

const struct attend_kernel attend_ref = {
	.name = "ref",
	.takes = ref_takes,
	.scratch_bytes = ref_scratch_bytes,
	.group = ref_group,
};
