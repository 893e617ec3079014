/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows become groups of equal tokens and KV head as for every kernel of a CPU (attend.c),
 * by a kernel that only records its input: 16 rows of a group are a tile. So a tile needs
 * no mask of rows, and tokens that a row may not see are in none of its tiles.
 *
 * Places are counted from sizes that are enough for any order of rows: a tile a row, a
 * turn a span.
 */
#include "gpu/attend_plan.h"

#include <assert.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/math/attend_impl.h"

#define ALIGN 64u

/* Offsets in the image. */
struct places {
	size_t tiles, turn_of, turns, select, q, all;
};

struct maker {
	struct attend_job job; /* first: the scratch that attend.c passes */
	struct attend_plan *plan;
	uint8_t *image;
	uint64_t image_at;
	struct places at;
	struct attend_row *rows;
	const uint32_t *select; /* of the group before, so many … */
	uint32_t select_count;
	uint64_t select_at; /* … which are there */
	uint32_t selected, turns;
	int32_t deltas[ATTEND_ROWS_MAX];
};

static size_t align(size_t bytes)
{
	return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

static const char *kernel_of(const struct attend_shape *shape)
{
	if (shape->kind == ATTEND_MLA)
		return shape->dqk == 576 && shape->dv == 512 ? "kvd_attend_mla" : NULL;
	if (shape->dqk != shape->dv)
		return NULL;
	return shape->dqk == 64	   ? "kvd_attend_gqa64"
	       : shape->dqk == 128 ? "kvd_attend_gqa128"
				   : NULL;
}

static bool field_aligned(const struct attend_field *field)
{
	return ((uintptr_t)field->base | field->page_stride | field->token_stride |
		field->head_stride) %
		       sizeof(KERN_V16) ==
	       0;
}

const char *attend_plan_fault(const struct attend_job *job)
{
	const struct attend_shape *shape = job->shape;

	if (shape->q_type != VALUE_BF16 || shape->kv_type != VALUE_BF16)
		return "q_type, kv_type: must be bf16 on a GPU";
	if (!kernel_of(shape))
		return "dqk, dv: must be 576 and 512 (MLA), or 64 or 128 (GQA), on a GPU";
	if (!field_aligned(&job->kv->k) ||
	    (shape->kind == ATTEND_GQA && !field_aligned(&job->kv->v)))
		return "kv: addresses and strides must be multiples of 16";
	if (job->rope && shape->kind == ATTEND_MLA &&
	    job->rope->first + ATTEND_KERN_TURN_DIMS < shape->dqk)
		return "rope: must be the last 64 values on a GPU";
	return NULL;
}

static uint32_t rows_of(const struct attend_job *job)
{
	uint32_t i, rows = 0;

	for (i = 0; i < job->span_count; i++)
		rows += job->spans[i].rows;
	return rows;
}

/* Indices of all spans; a query token more than there may be, each. */
static size_t selections_of(const struct attend_job *job)
{
	size_t count = 0;
	uint32_t i;

	for (i = 0; i < job->span_count; i++)
		if (job->spans[i].select)
			count += (size_t)(job->spans[i].rows / job->shape->heads + 2) *
				 job->spans[i].per_token;
	return count;
}

static struct places places_of(const struct attend_job *job)
{
	const size_t rows = rows_of(job);
	struct places at = {0};

	at.turn_of = align(rows * sizeof(struct attend_kern_tile));
	at.turns = at.turn_of + align(rows * sizeof(uint32_t));
	at.select =
		at.turns +
		align(job->rope ? job->span_count * job->rope->dims * sizeof(float) : 0);
	at.q = at.select + align(selections_of(job) * sizeof(uint32_t));
	at.all = at.q + align(rows * job->shape->dqk * sizeof(uint16_t));
	return at;
}

static size_t plane_bytes(const struct attend_job *job, uint32_t rows)
{
	return align((size_t)rows * (job->shape->dv + 2u) * sizeof(float));
}

struct attend_plan_bytes attend_plan_size(const struct attend_job *job, uint32_t splits)
{
	const uint32_t rows = rows_of(job);

	assert(splits >= 1 && splits <= MERGE_PARTS_MAX);
	return (struct attend_plan_bytes){
		.image = places_of(job).all,
		.planes = plane_bytes(job, rows) * (splits > 1 ? splits + 1 : 1),
		.scratch = align(sizeof(struct maker)) +
			   align(rows * sizeof(struct attend_row)) +
			   attend_scratch_bytes(job->shape, rows)};
}

/* ---- tiles ---- */

/* The number of a turn by -delta. */
static uint32_t turn_find(struct maker *m, int32_t delta)
{
	const struct rope *rope = m->job.rope;
	struct rope_turn turn;
	uint32_t i, n;
	uint8_t *to;

	if (!delta)
		return ATTEND_KERN_NONE;
	for (i = m->turns; i-- > 0;)
		if (m->deltas[i] == delta)
			return i;
	n = rope->dims / 2;
	rope_turn_make(&turn, rope, -(int64_t)delta);
	to = m->image + m->at.turns + (size_t)m->turns * 2 * n * sizeof(float);
	memcpy(to, turn.cos, n * sizeof(float));
	memcpy(to + n * sizeof(float), turn.sin, n * sizeof(float));
	m->deltas[m->turns] = delta;
	return m->turns++;
}

/* Where the group's selection is for the device: heads of a query token share one. */
static uint64_t select_find(struct maker *m, const struct attend_group *group)
{
	const size_t bytes = group->end * sizeof(uint32_t);
	const size_t at = m->at.select + m->selected * sizeof(uint32_t);

	if (!group->select)
		return 0;
	if (m->select == group->select && m->select_count == group->end)
		return m->select_at;
	memcpy(m->image + at, group->select, bytes);
	m->selected += group->end;
	m->select = group->select;
	m->select_count = group->end;
	m->select_at = m->image_at + at;
	return m->select_at;
}

static void tile_add(struct maker *m, const struct attend_group *group, uint32_t first,
		     uint32_t count)
{
	const size_t q_bytes = m->job.shape->dqk * sizeof(uint16_t);
	struct attend_kern_tile tile = {.select = select_find(m, group),
					.begin = group->begin,
					.end = group->end,
					.head = group->head,
					.first = m->plan->rows,
					.rows = count};
	uint32_t i, turn;

	for (i = 0; i < count; i++) {
		const struct attend_row *row = &group->rows[first + i];
		const uint32_t number = m->plan->rows++;

		turn = turn_find(m, row->delta);
		tile.turned |= turn != ATTEND_KERN_NONE;
		m->rows[number] = *row;
		memcpy(m->image + m->at.turn_of + number * sizeof(turn), &turn,
		       sizeof(turn));
		memcpy(m->image + m->at.q + number * q_bytes, row->q, q_bytes);
	}
	memcpy(m->image + m->plan->tiles++ * sizeof(tile), &tile, sizeof(tile));
}

static bool on_group(struct attend_work *work, const struct attend_group *group)
{
	struct maker *m = container_of(work->job, struct maker, job);
	uint32_t i, left;

	for (i = 0; i < group->count; i += ATTEND_KERN_ROWS) {
		left = group->count - i;
		tile_add(m, group, i, left < ATTEND_KERN_ROWS ? left : ATTEND_KERN_ROWS);
	}
	return true;
}

static const struct attend_kernel writer = {.name = "gpu", .group = on_group};

/* ---- arguments of kernels ---- */

static struct attend_kern_field plan_field(const struct attend_field *field)
{
	return (struct attend_kern_field){(uintptr_t)field->base, field->page_stride,
					  field->token_stride, field->head_stride};
}

static void kern_fill(const struct maker *m, uint64_t planes_at)
{
	const struct attend_job *job = &m->job;
	struct attend_plan *plan = m->plan;
	const size_t o_bytes = (size_t)plan->rows * job->shape->dv * sizeof(float);
	const size_t m_bytes = plan->rows * sizeof(float);
	const size_t plane = plane_bytes(job, plan->rows);
	const uint64_t last = planes_at + plan->splits * plane;

	plan->kern = (struct attend_kern){
		.k = plan_field(&job->kv->k),
		.in = {(uintptr_t)job->kv->pages, job->kv->page_tokens, job->kv->first,
		       job->kv->tokens, 0},
		.tiles = m->image_at,
		.q = m->image_at + m->at.q,
		.turn_of = m->image_at + m->at.turn_of,
		.o = planes_at,
		.m = planes_at + o_bytes,
		.l = planes_at + o_bytes + m_bytes,
		.plane = plane,
		.scale = job->shape->scale,
		.softcap = job->shape->softcap,
	};
	if (job->shape->kind == ATTEND_GQA)
		plan->kern.v = plan_field(&job->kv->v);
	if (job->rope)
		plan->kern.turns = (struct attend_kern_turns){
			m->image_at + m->at.turns, job->rope->first, job->rope->dims,
			job->rope->pairs, 0};
	plan->merge = (struct attend_kern_merge){
		.o = plan->kern.o,
		.m = plan->kern.m,
		.l = plan->kern.l,
		.part_plane = plane,
		.out_o = last,
		.out_m = last + o_bytes,
		.out_l = last + o_bytes + m_bytes,
		.parts = plan->splits,
		.rows = plan->rows,
		.dv = job->shape->dv,
	};
}

void attend_plan_make(struct attend_plan *plan, const struct attend_job *job,
		      uint32_t splits, void *image, uint64_t image_at, uint64_t planes_at,
		      void *scratch)
{
	const uint32_t rows = rows_of(job);
	uint8_t *at = scratch;
	struct maker *m = attend_carve(&at, sizeof(*m));

	assert(splits >= 1 && splits <= MERGE_PARTS_MAX);
	assert(((uintptr_t)image | (uintptr_t)scratch | image_at | planes_at) % ALIGN ==
	       0);
	*plan = (struct attend_plan){
		.job = job, .splits = splits, .kernel = kernel_of(job->shape)};
	m->job = *job;
	m->job.stop = NULL;
	m->plan = plan;
	m->image = image;
	m->image_at = image_at;
	m->at = places_of(job);
	m->select = NULL;
	m->selected = m->turns = 0;
	m->rows = attend_carve(&at, rows * sizeof(*m->rows));
	plan->taken = m->rows;
	(void)attend_run_by(&writer, &m->job, at);
	assert(plan->tiles <= plan->rows && plan->rows == rows);
	kern_fill(m, planes_at);
}

size_t attend_plan_result(const struct attend_plan *plan, size_t *bytes_p)
{
	*bytes_p = plane_bytes(plan->job, plan->rows);
	return plan->splits > 1 ? plan->splits * *bytes_p : 0;
}

void attend_plan_take(const struct attend_plan *plan, const void *result)
{
	const uint32_t dv = plan->job->shape->dv;
	const float *o = result, *m = o + (size_t)plan->rows * dv, *l = m + plan->rows;
	uint32_t i;

	for (i = 0; i < plan->rows; i++) {
		memcpy(plan->taken[i].o, o + (size_t)i * dv, dv * sizeof(*o));
		*plan->taken[i].m = m[i];
		*plan->taken[i].l = l[i];
	}
}
