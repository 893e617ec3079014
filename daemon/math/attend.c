/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of attention that is common to all kernels: checks, groups, addresses and q.
 *
 * Kernels are fast on many rows that read the same tokens, and masks are a common source
 * of errors: a weight of 0 times a NaN of a page that was never written is a NaN. So rows
 * are first put into groups of equal tokens, and a kernel applies all of a group's tokens
 * to all of its rows. Dense spans of the same [begin, end) make one group for each KV
 * head, from any number of requesters; they differ in delta only, which is applied to q.
 * Requesters that decode over a whole chunk are the usual case, so it is one group.
 * Selections make one group for each query token and KV head.
 *
 * Tokens are passed as addresses in batches: a table look-up and a division a page (a
 * selection: a token), compared with 1 KiB and more to read for each.
 */
#include "daemon/math/attend_impl.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

const char *attend_shape_fault(const struct attend_shape *shape)
{
	if (shape->kind > ATTEND_GQA)
		return "kind: must be MLA or GQA";
	if (shape->q_type >= VALUE_TYPES || shape->kv_type >= VALUE_TYPES)
		return "q_type, kv_type: must be bf16, fp16, fp32 or fp8_e4m3";
	if (!shape->heads || !shape->kv_heads || shape->heads % shape->kv_heads)
		return "heads: must be a multiple of kv_heads";
	if (!shape->dqk || shape->dqk > ATTEND_DIMS_MAX || shape->dqk % ATTEND_DIMS_STEP)
		return "dqk: must be a multiple of 16, at most 1024";
	if (!shape->dv || shape->dv > ATTEND_DIMS_MAX || shape->dv % ATTEND_DIMS_STEP)
		return "dv: must be a multiple of 16, at most 1024";
	if (shape->kind == ATTEND_MLA && (shape->kv_heads != 1 || shape->dv > shape->dqk))
		return "kv_heads, dv: MLA needs one KV head, and dv at most dqk";
	if (!isfinite(shape->scale))
		return "scale: must be finite";
	/* 1 / a subnormal may be infinite */
	if (shape->softcap != 0 && (!isnormal(shape->softcap) || shape->softcap < 0))
		return "softcap: must be 0, or above 1.2e-38 and finite";
	return NULL;
}

static const char *attend_rope_fault(const struct attend_job *job)
{
	const struct rope *rope = job->rope;

	if (!rope)
		return NULL;
	if (rope->dims % 2 || rope->dims / 2 > ROPE_PAIRS_MAX ||
	    rope->first + rope->dims > job->shape->dqk)
		return "rope: must have an even number of values, inside q";
	return rope->pairs > ROPE_INTERLEAVED ? "rope: unknown order of pairs" : NULL;
}

/* The number of query tokens with rows in a span. */
static uint32_t attend_span_tokens(const struct attend_shape *shape,
				   const struct attend_span *span)
{
	uint32_t skipped = span->first % shape->heads;

	return span->rows ? (skipped + span->rows - 1) / shape->heads + 1 : 0;
}

static const char *attend_span_fault(const struct attend_job *job,
				     const struct attend_span *span)
{
	uint64_t i, count;

	if (span->first > UINT32_MAX - ATTEND_ROWS_MAX)
		return "first: too large";
	if (span->delta && !job->rope)
		return "delta: needs a rope in the layout";
	if (!span->select)
		return span->begin > span->end || span->end > job->kv->tokens
			       ? "begin, end: must be in the chunk"
			       : NULL;
	if (span->delta)
		return "delta: must be 0 with a selection (selected tokens keep their "
		       "positions)";
	count = (uint64_t)attend_span_tokens(job->shape, span) * span->per_token;
	for (i = 0; i < count; i++)
		if (span->select[i] >= job->kv->tokens && span->select[i] != ATTEND_NONE)
			return "select: an index outside the chunk";
	return NULL;
}

const char *attend_job_fault(const struct attend_job *job)
{
	const char *fault = attend_shape_fault(job->shape);
	uint64_t rows = 0;
	uint32_t i;

	if (!fault)
		fault = attend_rope_fault(job);
	if (!fault && !job->kv->page_tokens)
		fault = "page_tokens: must not be 0";
	if (!fault && attend_scaled(job->kv) && job->shape->kv_type != VALUE_E4M3)
		fault = "k_scale, v_scale: kv_type must be fp8_e4m3";
	for (i = 0; i < job->span_count && !fault; i++) {
		rows += job->spans[i].rows;
		fault = rows > ATTEND_ROWS_MAX ? "rows: more than 4096"
					       : attend_span_fault(job, &job->spans[i]);
	}
	return fault || job->span_count <= ATTEND_ROWS_MAX ? fault
							   : "spans: more than "
							     "4096";
}

static const uint8_t *attend_at(const struct attend_field *field, uint64_t page,
				uint64_t token, uint32_t head)
{
	return field->base + page * field->page_stride + token * field->token_stride +
	       head * field->head_stride;
}

/* Scales of `count` more tokens of a batch. Not inline: the caller is slower with it. */
static __attribute__((noinline)) void attend_scales(const struct attend_kv *kv,
						    uint64_t page, uint64_t token,
						    uint32_t head, uint32_t count,
						    struct attend_batch *batch)
{
	const struct attend_field *const fields[] = {&kv->k_scale, &kv->v_scale};
	uint32_t i, j;

	for (i = 0; i < 2; i++) {
		float *to = (i ? batch->v_scale : batch->k_scale) + batch->count;

		for (j = 0; fields[i]->base && j < count; j++)
			memcpy(to + j, attend_at(fields[i], page, token + j, head),
			       sizeof(*to));
	}
}

/* Up to `most` tokens from `token` on that lie in one page. */
static void attend_page_run(const struct attend_work *work, uint32_t head, uint32_t token,
			    uint32_t most, struct attend_batch *batch)
{
	const struct attend_kv *kv = work->job->kv;
	const struct attend_field *field =
		work->job->shape->kind == ATTEND_MLA ? &kv->k : &kv->v;
	uint64_t at = (uint64_t)kv->first + token, page = at / kv->page_tokens;
	uint32_t slot = (uint32_t)(at % kv->page_tokens), n = kv->page_tokens - slot, i;
	const uint8_t *k, *v;

	page = kv->pages ? kv->pages[page] : page;
	k = attend_at(&kv->k, page, slot, head);
	v = attend_at(field, page, slot, head);
	for (i = 0; i < n && i < most; i++) {
		batch->k[batch->count + i] = k + i * kv->k.token_stride;
		batch->v[batch->count + i] = v + i * field->token_stride;
	}
	if (attend_scaled(kv))
		attend_scales(kv, page, slot, head, i, batch);
	batch->count += i;
}

bool attend_next(const struct attend_work *work, const struct attend_group *group,
		 struct attend_batch *batch, uint32_t most)
{
	assert(most <= ATTEND_BATCH);
	batch->count = 0;
	while (batch->count < most && batch->next < group->end) {
		uint32_t left = most - batch->count, before = batch->count;

		if (!group->select) {
			left = left < group->end - batch->next ? left
							       : group->end - batch->next;
			attend_page_run(work, group->head, batch->next, left, batch);
			batch->next += batch->count - before;
			continue;
		}
		if (group->select[batch->next] != ATTEND_NONE)
			attend_page_run(work, group->head, group->select[batch->next], 1,
					batch);
		batch->next++;
	}
	return batch->count > 0;
}

void attend_q(struct attend_work *work, const struct attend_row *row, float *q)
{
	const struct attend_shape *shape = work->job->shape;

	value_widen(shape->q_type, q, row->q, shape->dqk);
	if (!row->delta)
		return;
	if (work->turn.delta != -(int64_t)row->delta)
		rope_turn_make(&work->turn, work->job->rope, -(int64_t)row->delta);
	rope_turn_apply(&work->turn, q);
}

/* Rows [from, to) of a span that belong to a KV head; how many `rows` has then. */
static uint32_t attend_collect(const struct attend_work *work,
			       const struct attend_span *span, uint32_t head,
			       uint32_t from, uint32_t to, uint32_t count)
{
	const struct attend_shape *shape = work->job->shape;
	uint32_t per = shape->heads / shape->kv_heads, r;
	uint64_t q_bytes = (uint64_t)shape->dqk * value_bytes(shape->q_type);

	for (r = from; r < to; r++) {
		if ((span->first + r) % shape->heads / per != head)
			continue;
		work->rows[count++] = (struct attend_row){
			.q = (const uint8_t *)span->q + r * q_bytes,
			.o = span->o + (uint64_t)r * shape->dv,
			.m = span->m + r,
			.l = span->l + r,
			.delta = span->delta,
		};
	}
	return count;
}

static bool attend_group(struct attend_work *work, const struct attend_kernel *kernel,
			 struct attend_group *group, uint32_t count)
{
	group->rows = work->rows;
	group->count = count;
	return !count || kernel->group(work, group);
}

/* Each query token's rows by themselves. */
static bool attend_selected(struct attend_work *work, const struct attend_kernel *kernel,
			    const struct attend_span *span)
{
	const struct attend_shape *shape = work->job->shape;
	uint32_t from = 0, to, head;
	struct attend_group group = {.select = span->select, .end = span->per_token};

	for (; from < span->rows; from = to) {
		to = from + shape->heads - (span->first + from) % shape->heads;
		to = to < span->rows ? to : span->rows;
		for (head = 0; head < shape->kv_heads; head++) {
			group.head = head;
			if (attend_stop(work) ||
			    !attend_group(work, kernel, &group,
					  attend_collect(work, span, head, from, to, 0)))
				return false;
		}
		group.select += span->per_token;
	}
	return true;
}

/* Spans order[0 … n) of the same tokens. */
static bool attend_dense(struct attend_work *work, const struct attend_kernel *kernel,
			 const uint32_t *order, uint32_t n)
{
	const struct attend_span *spans = work->job->spans;
	struct attend_group group = {.begin = spans[order[0]].begin,
				     .end = spans[order[0]].end};
	uint32_t count, i;

	for (; group.head < work->job->shape->kv_heads; group.head++) {
		if (attend_stop(work))
			return false;
		for (count = 0, i = 0; i < n; i++)
			count = attend_collect(work, &spans[order[i]], group.head, 0,
					       spans[order[i]].rows, count);
		if (!attend_group(work, kernel, &group, count))
			return false;
	}
	return true;
}

/* Dense before selected, equal tokens adjacent; else in order of arrival. */
static int attend_by_tokens(const void *a, const void *b, void *arg)
{
	uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
	const struct attend_span *x = (const struct attend_span *)arg + i;
	const struct attend_span *y = (const struct attend_span *)arg + j;

	if (!x->select != !y->select)
		return x->select ? 1 : -1;
	if (!x->select && x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	if (!x->select && x->end != y->end)
		return x->end < y->end ? -1 : 1;
	return (i > j) - (i < j);
}

static bool attend_same_tokens(const struct attend_span *a, const struct attend_span *b)
{
	return !a->select && !b->select && a->begin == b->begin && a->end == b->end;
}

size_t attend_scratch_bytes(const struct attend_shape *shape, uint32_t rows)
{
	size_t most = 0, bytes;
	enum pick_isa isa;

	for (isa = PICK_REF; isa < PICK_ISAS; isa++) {
		const struct attend_kernel *kernel = pick_kernel(isa, shape);

		bytes = kernel->scratch_bytes(shape);
		most = bytes > most ? bytes : most;
	}
	return sizeof(struct attend_work) + rows * sizeof(struct attend_row) +
	       ATTEND_ROWS_MAX * sizeof(uint32_t) + 4 * 64 + most;
}

enum attend_outcome attend_run_by(const struct attend_kernel *kernel,
				  const struct attend_job *job, void *scratch)
{
	uint8_t *at = scratch;
	struct attend_work *work = attend_carve(&at, sizeof(*work));
	uint32_t rows = 0, i, n;
	bool going = true;

	assert((uintptr_t)scratch % 64 == 0);
	for (i = 0; i < job->span_count; i++)
		rows += job->spans[i].rows;
	assert(rows <= ATTEND_ROWS_MAX && job->span_count <= ATTEND_ROWS_MAX);
	work->job = job;
	work->turn.delta = 0;
	work->rows = attend_carve(&at, rows * sizeof(*work->rows));
	work->order = attend_carve(&at, ATTEND_ROWS_MAX * sizeof(*work->order));
	work->kernel = at;
	for (i = 0; i < job->span_count; i++)
		work->order[i] = i;
	qsort_r(work->order, job->span_count, sizeof(*work->order), attend_by_tokens,
		(void *)(uintptr_t)job->spans);
	for (i = 0; i < job->span_count && going; i += n) {
		const struct attend_span *span = &job->spans[work->order[i]];

		n = 1;
		if (span->select) {
			going = attend_selected(work, kernel, span);
			continue;
		}
		while (i + n < job->span_count &&
		       attend_same_tokens(span, &job->spans[work->order[i + n]]))
			n++;
		going = attend_dense(work, kernel, work->order + i, n);
	}
	return going ? ATTEND_DONE : ATTEND_STOPPED;
}

enum attend_outcome attend_run(enum pick_isa isa, const struct attend_job *job,
			       void *scratch)
{
	return attend_run_by(pick_kernel(isa, job->shape), job, scratch);
}
