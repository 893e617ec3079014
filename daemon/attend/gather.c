/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results of a post's legs become one, in memory of their own, and the loop writes that
 * to the seat: so a post that ends meanwhile has ended for the seat, too.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/math/merge.h"
#include "daemon/session/session.h"

#define LOOP_VALUES 196608u /* fewer are merged by the loop itself */

/* Results of all legs, which become one. */
struct post_merge {
	struct offload_job job;
	struct attends *attends;
	struct attend_post *post; /* NULL: it has ended */
	struct list legs;
	struct charge charge;
	uint32_t rows, dv;
	bool own;      /* the result begins with the engine's own part */
	float *values; /* o, m, l */
};

static void gather_free(struct post_merge *merge)
{
	struct leg *leg;

	list_foreach_safe(leg, &merge->legs, link)
		leg_free(leg);
	mem_free(merge->values);
	charge_drop(&merge->charge);
	mem_free(merge);
}

void gather_forget(struct post_merge *merge)
{
	merge->post = NULL; /* gather_done() frees it */
}

static struct merge_part gather_part(float *values, uint32_t rows, uint32_t dv,
				     uint32_t at)
{
	float *m = values_m(values, rows, dv);

	return (struct merge_part){
		.o = values + (size_t)at * dv, .m = m + at, .l = m + rows + at};
}

static void gather_work(struct offload_job *job)
{
	struct post_merge *merge = container_of(job, struct post_merge, job);
	uint32_t dv = merge->dv;
	float *m = values_m(merge->values, merge->rows, dv), *l = m + merge->rows;
	struct leg *leg;

	list_foreach(leg, &merge->legs, link) {
		const struct merge_part parts[2] = {
			gather_part(merge->values, merge->rows, dv, leg->row),
			gather_part(leg->values, leg->rows, dv, 0)};

		merge_rows(merge->values + (size_t)leg->row * dv, m + leg->row,
			   l + leg->row, parts, 2, leg->rows, dv);
	}
}

static void gather_done(struct offload_job *job)
{
	struct post_merge *merge = container_of(job, struct post_merge, job);
	struct attend_post *post = merge->post;

	if (post) {
		const struct attend_facts *facts = &post->attend->facts;
		const float *m = values_m(merge->values, merge->rows, merge->dv);

		memcpy(post_seat(post, facts->o), merge->values,
		       (size_t)merge->rows * merge->dv * sizeof(float));
		memcpy(post_seat(post, facts->m), m, merge->rows * sizeof(float));
		memcpy(post_seat(post, facts->l), m + merge->rows,
		       merge->rows * sizeof(float));
		post->merge = NULL;
		post_succeed(post);
	}
	merge->attends->under_way--;
	gather_free(merge);
}

/* The engine's own part, or an empty one. */
static void gather_begin(struct post_merge *merge, const struct attend_post *post)
{
	const struct attend_facts *f = &post->attend->facts;
	float *m = values_m(merge->values, merge->rows, merge->dv);

	if (!merge->own)
		return; /* zeros: l says that it is empty */
	memcpy(merge->values, post_seat(post, f->o),
	       (size_t)merge->rows * merge->dv * sizeof(float));
	memcpy(m, post_seat(post, f->m), merge->rows * sizeof(float));
	memcpy(m + merge->rows, post_seat(post, f->l), merge->rows * sizeof(float));
}

/* How much there is to do. */
static size_t gather_values(const struct post_merge *merge)
{
	size_t values = values_count(merge->rows, merge->dv);
	const struct leg *leg;

	list_foreach(leg, &merge->legs, link)
		values += values_count(leg->rows, merge->dv);
	return values;
}

void post_gather(struct attend_post *post)
{
	const struct attend *attend = post->attend;
	struct attends *attends = attend->attends;
	uint32_t rows = attend->rows, dv = attend->form.shape.dv;
	struct post_merge *merge = mem_zalloc(sizeof(*merge));
	struct list *link;

	if (merge)
		merge->values = mem_calloc(values_count(rows, dv), sizeof(float));
	if (!merge || !merge->values) {
		struct err why;

		mem_free(merge);
		err_set(&why, ERR_NOMEM, "no memory to merge");
		post_fail(post, &why);
		return;
	}
	merge->attends = attends;
	merge->post = post;
	merge->rows = rows;
	merge->dv = dv;
	merge->own = post->own;
	merge->charge = charge_steal(&post->charge);
	list_init(&merge->legs);
	while ((link = list_pop_front(&post->legs)))
		list_push_back(&merge->legs, link);
	post->merge = merge;
	gather_begin(merge, post);
	attends->under_way++;
	merge->job =
		(struct offload_job){.work = gather_work,
				     .done = gather_done,
				     .principal = session_principal(attend->session)};
	if (gather_values(merge) <= LOOP_VALUES) {
		gather_work(&merge->job);
		gather_done(&merge->job);
		return;
	}
	offload_submit(attends->offload ? attends->offload : attends->kvd->offload,
		       &merge->job);
}
