/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Merges the results of a post's legs, in separate memory, and the loop writes the result
 * to the seat: so a post that ends meanwhile has ended for the seat, too. If each row is
 * of one leg there is nothing to merge: the legs' own memory is written, or, of a post
 * that is one message, that message. A seat has megabytes: it is written some rows a
 * turn.
 */
#include <math.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/math/merge.h"
#include "daemon/session/session.h"

#define LOOP_VALUES 196608u /* fewer are merged by the loop itself */
#define PIECE_VALUES 65536u /* written to a seat between checks of the time */

/* Results of all legs, which become one. */
struct post_merge {
	struct offload_job job;
	struct attends *attends;
	struct attend_post *post; /* NULL: it has ended */
	struct list legs;
	struct charge charge;
	uint32_t rows, dv, heads;
	float *values; /* o, m, l; NULL: the legs' own are the result */
	struct loop_defer more;
	uint32_t written; /* rows of the first leg, or of all that was merged */
};

static void gather_free(struct post_merge *merge)
{
	struct leg *leg;

	loop_defer_cancel(&merge->more);
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
		uint32_t heads = leg->item.form.shape.heads, row = leg->row + leg->head;
		uint32_t n = heads == merge->heads ? leg->rows : heads;

		for (uint32_t at = 0; at < leg->rows; at += n, row += merge->heads) {
			const struct merge_part parts[2] = {
				gather_part(merge->values, merge->rows, dv, row),
				gather_part(leg->values, leg->rows, dv, at)};

			merge_rows(merge->values + (size_t)row * dv, m + row, l + row,
				   parts, 2, n, dv);
		}
	}
}

/* Writes some of `rows` rows, from the post's `row` on. True: those were the last. */
static bool gather_write(struct post_merge *merge, const float *values, uint32_t rows,
			 uint32_t row)
{
	const struct attend_post *post = merge->post;
	const struct attend_facts *facts = &post->attend->facts;
	uint32_t dv = merge->dv, from = merge->written, n = PIECE_VALUES / dv;
	const float *m = values + (size_t)rows * dv;

	n = n < rows - from ? n : rows - from;
	row += from;
	memcpy(post_seat(post, facts->o + (uint64_t)row * dv * sizeof(float)),
	       values + (size_t)from * dv, (size_t)n * dv * sizeof(float));
	memcpy(post_seat(post, facts->m + row * sizeof(float)), m + from,
	       n * sizeof(float));
	memcpy(post_seat(post, facts->l + row * sizeof(float)), m + rows + from,
	       n * sizeof(float));
	merge->written += n;
	return merge->written == rows;
}

/* True: all was written. */
static bool gather_step(struct post_merge *merge)
{
	struct leg *leg;

	if (merge->values)
		return gather_write(merge, merge->values, merge->rows, 0);
	leg = list_first(&merge->legs, struct leg, link);
	if (!gather_write(merge, leg->values, leg->rows, leg->row))
		return false;
	merge->written = 0;
	list_remove(&leg->link);
	leg_free(leg);
	return list_empty(&merge->legs);
}

static void gather_more(struct loop_defer *defer)
{
	struct post_merge *merge = container_of(defer, struct post_merge, more);
	struct attend_post *post = merge->post;

	while (post && !gather_step(merge)) {
		if (loop_enough(merge->attends->kvd->loop)) {
			loop_defer(merge->attends->kvd->loop, &merge->more);
			return;
		}
	}
	if (post) {
		post->merge = NULL;
		post_succeed(post);
	}
	merge->attends->under_way--;
	gather_free(merge);
}

static void gather_done(struct offload_job *job)
{
	struct post_merge *merge = container_of(job, struct post_merge, job);

	gather_more(&merge->more);
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

/* Is each row of one leg? Those of a part follow each other. */
static bool gather_is_plain(const struct attend_post *post)
{
	const struct leg *leg;
	uint32_t row = 0;

	list_foreach(leg, &post->legs, link) {
		if (leg->row != row || !leg_has_all_heads(leg))
			return false;
		row += leg->rows;
	}
	return row == post->rows;
}

bool gather_is_of(const struct attend_post *post, const struct leg *leg)
{
	return leg->row == 0 && leg->rows == post->rows && list_empty(&post->sides) &&
	       post->legs.next == &leg->link && leg->link.next == &post->legs;
}

static float *seat_floats(const struct attend_post *post, uint64_t offset)
{
	return (float *)(void *)post_seat(post, offset);
}

static struct post_merge *merge_new(struct attend_post *post)
{
	const struct attend *attend = post->attend;
	struct post_merge *merge = mem_zalloc(sizeof(*merge));

	if (!merge)
		return NULL;
	merge->rows = post->rows;
	merge->dv = attend->form.shape.dv;
	merge->heads = attend->form.shape.heads;
	if (!gather_is_plain(post)) {
		merge->values =
			mem_calloc(values_count(merge->rows, merge->dv), sizeof(float));
		if (!merge->values) {
			mem_free(merge);
			return NULL;
		}
		for (uint32_t i = 0; i < merge->rows; i++) /* l is 0: empty */
			values_m(merge->values, merge->rows, merge->dv)[i] = -INFINITY;
	}
	merge->attends = attend->attends;
	merge->post = post;
	return merge;
}

void post_gather(struct attend_post *post)
{
	const struct attend *attend = post->attend;
	struct attends *attends = attend->attends;
	const struct leg *first = list_first(&post->legs, struct leg, link);
	struct post_merge *merge;
	struct list *link;

	if (first && first->received) {
		form_out_read(&attend->form, first->received, post->rows,
			      seat_floats(post, attend->facts.o),
			      seat_floats(post, attend->facts.m),
			      seat_floats(post, attend->facts.l));
		post_succeed(post);
		return;
	}
	merge = merge_new(post);
	if (!merge) {
		struct err why;

		err_set(&why, ERR_NOMEM, "out of memory for a merge");
		post_fail(post, &why);
		return;
	}
	merge->charge = charge_steal(&post->charge);
	list_init(&merge->legs);
	while ((link = list_pop_front(&post->legs)))
		list_push_back(&merge->legs, link);
	loop_defer_init(&merge->more, gather_more);
	post->merge = merge;
	attends->under_way++;
	if (!merge->values) {
		gather_more(&merge->more);
		return;
	}
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
