/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A post is cut into legs: a part's rows with the chunks that this daemon has of its
 * hold, and with those that another one has. Legs here go into the compute queue with a
 * copy of their rows; legs there are a message, which holds them. So the query rows are
 * the engine's again as soon as the entry was taken.
 *
 * Rows of a message are bounded (leg_rows()); a part of more is several legs. A leg is
 * answered once, with all of its rows or with a reason, and one reason fails the post:
 * partial results of fewer chunks would be plausible, and wrong.
 *
 * A post that fails ends at once. Legs under way elsewhere are told to stop, and what
 * they answer finds no leg; a leg in a kernel here keeps its own memory until it is done.
 * Merging takes what legs left in a job of its own, and the seat is written when that is
 * done, by the loop: nobody else ever writes to it.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/math/merge.h"
#include "daemon/memory/memory.h"
#include "daemon/peer/peer.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/store/far.h"
#include "daemon/store/store.h"
#include "daemon/store/store_kv.h"
#include "proto/kvd_ring.h"
#include "proto/wire.h"

#define LEG_BYTES (256u << 10)	 /* of a message, if it is not one query token's */
#define POSTS_MAX 1024u		 /* of a session */
#define LEGS_MAX 4096u		 /* of a daemon, elsewhere */
#define MERGE_LOOP_VALUES 65536u /* fewer are merged by the loop itself */

/* A copy of a seat's rows, of all legs here: they may outlive the post. */
struct post_rows {
	unsigned int refs;
	struct charge charge;
	uint8_t bytes[];
};

struct leg {
	struct list link; /* post->legs, then its merge's */
	struct attends *attends;
	struct attend_post *post; /* NULL: it has ended */
	uint32_t row, rows;	  /* of the post */
	float *values;		  /* o, m, l */
	bool in;
	/* here */
	struct compute_item item;
	bool at_compute;
	struct post_rows *q;
	/* elsewhere */
	struct remote *remote; /* NULL: here */
	uint64_t number;
	/* both: per_token for each query token */
	uint32_t *select;
	struct charge charge;
};

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

static float *values_m(float *values, uint32_t rows, uint32_t dv)
{
	return values + (size_t)rows * dv;
}

static size_t values_count(uint32_t rows, uint32_t dv)
{
	return (size_t)rows * (dv + 2u);
}

/* ---- ends ---- */

static void rows_unref(struct post_rows *rows)
{
	if (!rows || --rows->refs > 0)
		return;
	charge_drop(&rows->charge);
	mem_free(rows);
}

static void leg_free(struct leg *leg)
{
	assert(!leg->at_compute);
	list_remove(&leg->link);
	if (leg->remote) {
		if (leg->number)
			idmap_remove(&leg->attends->legs, leg->number);
		handshake_release(leg->attends->kvd->handshake, leg->remote);
	}
	mem_free(leg->values);
	mem_free(leg->select);
	rows_unref(leg->q);
	charge_drop(&leg->charge);
	mem_free(leg);
}

/* Its post has ended. */
static void leg_drop(struct leg *leg)
{
	const struct wire_attend_stop stop = {.attend = leg->number};

	leg->post = NULL;
	if (leg->at_compute) {
		if (!compute_cancel(leg->attends->compute, &leg->item)) {
			list_remove(&leg->link);
			return; /* leg_on_computed() frees it */
		}
		leg->at_compute = false;
		leg->attends->under_way--;
	}
	if (leg->remote && !leg->in && handshake_tell_attend_stop(leg->remote, &stop) < 0)
		err_clear(); /* it is going down */
	leg_free(leg);
}

static void merge_free(struct post_merge *merge)
{
	struct leg *leg;

	list_foreach_safe(leg, &merge->legs, link)
		leg_free(leg);
	mem_free(merge->values);
	charge_drop(&merge->charge);
	mem_free(merge);
}

/* Nothing of it is under way any more that could touch the seat. */
static void post_end(struct attend_post *post, unsigned int state, enum err_code code)
{
	struct attend *attend = post->attend;
	struct attend_session *part = attend->session->attend_part;
	struct status_page *page = attend->session->status;
	const struct status_room figures = {.done = post->queue_us,
					    .moved_us = post->attend_us,
					    .rows = post->remotes,
					    .first_token = UINT64_MAX};
	struct leg *leg;

	list_foreach_safe(leg, &post->legs, link)
		leg_drop(leg);
	if (post->merge) {
		post->merge->post = NULL; /* merge_done() frees it */
		post->merge = NULL;
	}
	loop_timer_stop(&post->deadline);
	region_unpin(post->region);
	attend->taken[post->seat] = NULL;
	idmap_remove(&part->posts, post->id);
	list_remove(&post->link);
	attend->attends->post_count--;
	status_slot_room(page, post->slot, &figures);
	status_slot_set(page, post->slot, state, 0, code);
	status_slot_release(page, post->slot);
	charge_drop(&post->charge);
	rows_unref(post->q);
	mem_free(post);
}

void post_fail(struct attend_post *post, const struct err *why)
{
	const struct err kept = *why; /* it may lie in what goes */

	if (post->on_failed)
		post->on_failed(post->attend->session, post->slot, post->id, &kept);
	post_end(post, KVD_FAILED, kept.code);
}

static void on_deadline(struct loop_timer *timer)
{
	struct attend_post *post = container_of(timer, struct attend_post, deadline);
	struct err why;

	err_set(&why, ERR_TIMEOUT, "not attended in time: %u of its legs are not in",
		post->open);
	post_fail(post, &why);
}

bool attend_posted(const struct session *session, uint64_t id)
{
	const struct attend_session *part = session->attend_part;

	return part && idmap_get(&part->posts, id);
}

bool attend_cancel(struct session *session, uint64_t id)
{
	const struct attend_session *part = session->attend_part;
	struct attend_post *post = part ? idmap_get(&part->posts, id) : NULL;
	struct err why;

	if (!post)
		return false;
	err_set(&why, ERR_CANCELED, "canceled by its engine");
	post_fail(post, &why);
	return true;
}

/* ---- merging ---- */

static struct merge_part part_of(float *values, uint32_t rows, uint32_t dv, uint32_t at)
{
	float *m = values_m(values, rows, dv);

	return (struct merge_part){
		.o = values + (size_t)at * dv, .m = m + at, .l = m + rows + at};
}

static void merge_work(struct offload_job *job)
{
	struct post_merge *merge = container_of(job, struct post_merge, job);
	uint32_t dv = merge->dv;
	float *m = values_m(merge->values, merge->rows, dv), *l = m + merge->rows;
	struct leg *leg;

	list_foreach(leg, &merge->legs, link) {
		const struct merge_part parts[2] = {
			part_of(merge->values, merge->rows, dv, leg->row),
			part_of(leg->values, leg->rows, dv, 0)};

		merge_rows(merge->values + (size_t)leg->row * dv, m + leg->row,
			   l + leg->row, parts, 2, leg->rows, dv);
	}
}

static uint8_t *seat_at(const struct attend_post *post, uint64_t offset)
{
	const struct attend *attend = post->attend;

	return post->region->memory->base + attend->offset +
	       post->seat * attend->facts.seat_bytes + offset;
}

static void merge_done(struct offload_job *job)
{
	struct post_merge *merge = container_of(job, struct post_merge, job);
	struct attend_post *post = merge->post;

	if (post) {
		const struct attend_facts *facts = &post->attend->facts;
		const float *m = values_m(merge->values, merge->rows, merge->dv);

		memcpy(seat_at(post, facts->o), merge->values,
		       (size_t)merge->rows * merge->dv * sizeof(float));
		memcpy(seat_at(post, facts->m), m, merge->rows * sizeof(float));
		memcpy(seat_at(post, facts->l), m + merge->rows,
		       merge->rows * sizeof(float));
		post->merge = NULL;
		post_end(post, KVD_SUCCESS, ERR_OK);
	}
	merge->attends->under_way--;
	merge_free(merge);
}

/* The engine's own part, or an empty one. */
static void merge_begin(struct post_merge *merge, const struct attend_post *post)
{
	const struct attend_facts *f = &post->attend->facts;
	float *m = values_m(merge->values, merge->rows, merge->dv);

	if (!merge->own)
		return; /* zeros: l says that it is empty */
	memcpy(merge->values, seat_at(post, f->o),
	       (size_t)merge->rows * merge->dv * sizeof(float));
	memcpy(m, seat_at(post, f->m), merge->rows * sizeof(float));
	memcpy(m + merge->rows, seat_at(post, f->l), merge->rows * sizeof(float));
}

static void post_merge(struct attend_post *post)
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
	merge_begin(merge, post);
	attends->under_way++;
	merge->job =
		(struct offload_job){.work = merge_work,
				     .done = merge_done,
				     .principal = session_principal(attend->session)};
	if (values_count(rows, dv) <= MERGE_LOOP_VALUES) {
		merge_work(&merge->job);
		merge_done(&merge->job);
		return;
	}
	offload_submit(attends->kvd->offload, &merge->job);
}

/* A leg is in. None is before attend_post() has returned: what it is told, and what is
 * computed, comes in a later turn. */
static void post_step(struct attend_post *post, const struct leg *leg, uint32_t queue_us,
		      uint32_t attend_us)
{
	assert(leg->in && post->open > 0);
	post->open--;
	if (queue_us > post->queue_us)
		post->queue_us = queue_us;
	if (attend_us > post->attend_us)
		post->attend_us = attend_us;
	if (post->open == 0)
		post_merge(post);
}

/* ---- legs here ---- */

static void leg_on_computed(struct compute_item *item, const struct err *why)
{
	struct leg *leg = item->owner;
	struct attend_post *post = leg->post;

	leg->at_compute = false;
	leg->attends->under_way--;
	if (!post) {
		leg_free(leg);
	} else if (why) {
		post_fail(post, why);
	} else {
		leg->in = true;
		post_step(post, leg, item->queue_us, item->attend_us);
	}
}

/* The post's, made with the first. */
static int leg_rows_take(struct leg *leg)
{
	struct attend_post *post = leg->post;
	const struct attend *attend = post->attend;
	uint64_t bytes = form_q_bytes(&attend->form, attend->rows);
	struct post_rows *q = post->q;
	int r;

	if (!q) {
		q = mem_alloc(sizeof(*q) + bytes);
		if (!q)
			return err_pass(-ENOMEM);
		*q = (struct post_rows){.refs = 1};
		r = charge_take(&q->charge, attend->session->account, ACCOUNT_ATTENDS,
				bytes);
		if (r < 0) {
			mem_free(q);
			return err_pass(r);
		}
		memcpy(q->bytes, seat_at(post, attend->facts.q), bytes);
		post->q = q;
	}
	q->refs++;
	leg->q = q;
	return 0;
}

static int leg_here(struct leg *leg, const struct store_hold *hold,
		    const struct kvd_ring_part *part, uint64_t tokens, uint32_t count)
{
	const struct attend_post *post = leg->post;
	const struct attend *attend = post->attend;
	const struct form *f = &attend->form;
	struct store_kv *kv = NULL;
	int r = leg_rows_take(leg);

	if (r >= 0)
		r = store_kv_of_hold(hold, part->first, count,
				     f->view[0] ? f->view : NULL, &kv);
	if (r >= 0)
		r = charge_more(&leg->charge, store_kv_bytes(kv));
	if (r < 0) {
		store_kv_free(kv);
		return err_pass(r);
	}
	leg->item = (struct compute_item){
		.kv = kv,
		.form = *f,
		.layer = post->layer,
		.q = leg->q->bytes + form_q_bytes(f, leg->row),
		.rows = leg->rows,
		.principal = session_principal(attend->session),
		.tokens = tokens < kv->tokens ? tokens : kv->tokens,
		.delta = part->delta,
		.select = leg->select,
		.per_token = part->per_token,
		.o = leg->values,
		.m = values_m(leg->values, leg->rows, f->shape.dv),
		.l = values_m(leg->values, leg->rows, f->shape.dv) + leg->rows,
		.on_done = leg_on_computed,
		.owner = leg};
	r = compute_submit(leg->attends->compute, &leg->item);
	if (r < 0) {
		store_kv_free(kv);
		return err_pass(r);
	}
	leg->at_compute = true;
	leg->attends->under_way++;
	return 0;
}

/* ---- legs elsewhere ---- */

/* The one pool of the holder's that serves all these chunks. */
static int far_pool(const struct far_hold *far, uint32_t first, uint32_t count,
		    uint64_t *pool_p)
{
	uint64_t used = ~UINT64_C(0);

	for (uint32_t i = first; i < first + count; i++)
		used &= far_hold_sources(far, i);
	if (!used || (used & (used - 1)))
		return err_raise(
			ERR_REQUIRE,
			"the chunks are in parts of several ranks there: fetch them");
	*pool_p = far_hold_pool(far, (unsigned int)__builtin_ctzll(used));
	return 0;
}

static int leg_send(struct leg *leg, const struct far_hold *far,
		    const struct wire_attend *head, const struct kvd_ring_part *part)
{
	const struct attend_post *post = leg->post;
	const struct form *f = &post->attend->form;
	uint8_t form[160], rope[16 + FORM_ROPE_MAX / 2 * sizeof(double)];
	struct wire_attend msg = *head;
	struct cursor out;
	int r;

	msg.attend = leg->number;
	msg.ask = far_hold_ask(far);
	msg.layer = post->layer;
	msg.rows = leg->rows;
	msg.delta = (uint32_t)part->delta;
	msg.per_token = part->per_token;
	snprintf(msg.view, sizeof(msg.view), "%s", f->view);
	cursor_write(&out, form, sizeof(form));
	r = form_put(f, &out);
	msg.form.data = form;
	msg.form.len = out.pos;
	if (part->delta && r >= 0) {
		cursor_write(&out, rope, sizeof(rope));
		r = form_rope_put(&f->rope, &out);
		msg.rope.data = rope;
		msg.rope.len = out.pos;
	}
	msg.select.data = leg->select;
	msg.select.len = leg->select ? (size_t)leg->rows / f->shape.heads *
					       part->per_token * sizeof(uint32_t)
				     : 0;
	msg.q.data = seat_at(post, form_q_bytes(f, leg->row));
	msg.q.len = form_q_bytes(f, leg->rows);
	if (r >= 0)
		r = handshake_tell_attend(leg->remote, &msg);
	return r < 0 ? err_pass(r) : 0;
}

static int leg_there(struct leg *leg, struct far_hold *far,
		     const struct wire_attend *head, const struct kvd_ring_part *part)
{
	struct attends *attends = leg->attends;
	struct remote *remote = far_hold_remote(far);
	int r;

	if (!remote->peer || sm_state(&remote->peer->sm) != PEER_UP)
		return err_raise(ERR_PEER, "%s: it is not up", remote->label);
	if (!(remote->peer->features & PEER_FEATURE_ATTEND))
		return err_raise(ERR_REQUIRE, "%s: its kvd does not attend: fetch",
				 remote->label);
	if (idmap_count(&attends->legs) >= LEGS_MAX)
		return err_raise(ERR_BUSY, "%u legs are under way", LEGS_MAX);
	leg->number = ++attends->next_leg;
	r = idmap_put(&attends->legs, leg->number, leg);
	if (r < 0) {
		leg->number = 0;
		return err_pass(r);
	}
	leg->remote = remote;
	remote->reaches++;
	leg->post->remotes++;
	return err_pass(leg_send(leg, far, head, part));
}

int ask_on_attended(struct attends *attends, struct remote *remote, struct cursor *body)
{
	struct wire_attended msg;
	struct leg *leg;
	struct err why;
	int r = wire_attended_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	leg = attends ? idmap_get(&attends->legs, msg.attend) : NULL;
	if (!leg || leg->remote != remote || leg->in || !leg->post)
		return 0; /* late */
	if (msg.code == ERR_OK &&
	    msg.values.len != values_count(leg->rows, leg->post->attend->form.shape.dv) *
				      sizeof(float))
		return err_raise(ERR_PROTO, "ATTENDED: %zu bytes for %u rows",
				 msg.values.len, leg->rows);
	leg->in = true;
	if (msg.code != ERR_OK) {
		err_set(&why, err_from_wire(msg.code), "%.60s: %.200s", remote->label,
			msg.text);
		post_fail(leg->post, &why);
		return 0;
	}
	memcpy(leg->values, msg.values.data, msg.values.len);
	post_step(leg->post, leg, msg.queue_us, msg.attend_us);
	return 0;
}

void ask_on_down(struct attends *attends, const struct remote *remote,
		 const struct err *why)
{
	struct idmap_cursor it;
	struct err told;

	err_set(&told, ERR_PEER, "%.60s is lost: %.200s", remote->label, why->text);
	idmap_foreach(&attends->legs, it) {
		const struct leg *leg = it.value;

		if (leg->remote == remote && !leg->in && leg->post) {
			post_fail(leg->post, &told);
			it = (struct idmap_cursor){0}; /* other legs of it went, too */
		}
	}
}

/* ---- a post ---- */

/* Tokens that a leg has, whose chunks begin `skip` tokens behind the part's: numbers of
 * others become ~0. */
static int leg_select(struct leg *leg, const uint32_t *select, uint32_t heads,
		      uint32_t per_token, uint64_t skip, uint64_t tokens)
{
	size_t count = (size_t)leg->rows / heads * per_token;

	if (!per_token)
		return 0;
	leg->select = mem_calloc(count, sizeof(*leg->select));
	if (!leg->select)
		return err_pass(-ENOMEM);
	for (size_t i = 0; i < count; i++) {
		uint64_t at = select[i] - skip; /* wraps below: not of this leg */

		leg->select[i] = select[i] != UINT32_MAX && at < tokens ? (uint32_t)at
									: UINT32_MAX;
	}
	return 0;
}

/* What all legs of a part at one daemon have in common. */
struct side {
	const struct store_hold *hold;
	const struct kvd_ring_part *part;
	const uint32_t *select;
	struct far_hold *far; /* NULL: here */
	struct wire_attend head;
	uint64_t skip, tokens;
	uint32_t count;
};

static int leg_new(struct attend_post *post, const struct side *side, uint32_t row,
		   uint32_t rows)
{
	const struct form *f = &post->attend->form;
	struct leg *leg = mem_zalloc(sizeof(*leg));
	int r;

	if (!leg)
		return err_pass(-ENOMEM);
	leg->attends = post->attend->attends;
	leg->post = post;
	leg->row = row;
	leg->rows = rows;
	list_push_back(&post->legs, &leg->link);
	post->open++;
	r = charge_take(&leg->charge, post->attend->session->account, ACCOUNT_ATTENDS,
			sizeof(*leg) + values_count(rows, f->shape.dv) * sizeof(float) +
				(uint64_t)rows / f->shape.heads * side->part->per_token *
					sizeof(uint32_t));
	if (r < 0)
		return err_pass(r);
	leg->values = mem_calloc(values_count(rows, f->shape.dv), sizeof(float));
	r = leg->values ? leg_select(leg,
				     side->select + (size_t)(row - side->part->row) /
							    f->shape.heads *
							    side->part->per_token,
				     f->shape.heads, side->part->per_token, side->skip,
				     side->tokens)
			: -ENOMEM;
	if (r < 0)
		return err_pass(r);
	if (side->far)
		return err_pass(leg_there(leg, side->far, &side->head, side->part));
	return err_pass(leg_here(leg, side->hold, side->part, side->tokens, side->count));
}

/* Of query tokens with that many tokens: not more than a thread shall compute at once. */
static uint64_t tokens_here(const struct side *side, uint32_t heads)
{
	uint64_t each = side->part->per_token ? side->part->per_token : side->tokens;
	uint64_t most = COMPUTE_WORK / ((each + 1) * heads);

	return most ? most : 1;
}

/* Rows of a leg. There, what is asked and what is told are one message each. */
static int leg_rows(const struct attend *attend, const struct side *side,
		    uint32_t *rows_p)
{
	const struct form *f = &attend->form;
	uint64_t ask = attend_message_bytes(attend->attends, WIRE_T_ATTEND);
	uint64_t tell = attend_message_bytes(attend->attends, WIRE_T_ATTENDED);
	uint32_t heads = f->shape.heads;
	uint64_t asked =
		form_q_bytes(f, heads) + side->part->per_token * sizeof(uint32_t);
	uint64_t told = values_count(heads, f->shape.dv) * sizeof(float);
	uint64_t tokens = side->part->rows / heads;

	if (!side->far) {
		if (tokens > tokens_here(side, heads))
			tokens = tokens_here(side, heads);
		*rows_p = (uint32_t)tokens * heads;
		return 0;
	}
	if (asked > ask || told > tell)
		return err_raise(
			ERR_TOOBIG,
			"a query token of %llu bytes, whose answer has %llu, is no "
			"message to another daemon: fetch",
			(unsigned long long)asked, (unsigned long long)told);
	ask = ask < LEG_BYTES ? ask : LEG_BYTES;
	if (tokens * asked > ask)
		tokens = asked > ask ? 1 : ask / asked;
	if (tokens * told > tell)
		tokens = tell / told;
	*rows_p = (uint32_t)tokens * heads;
	return 0;
}

static int side_legs(struct attend_post *post, const struct side *side)
{
	uint32_t most = 0, row = side->part->row, left = side->part->rows;
	int r = leg_rows(post->attend, side, &most);

	while (left > 0 && r >= 0) {
		uint32_t rows = left < most ? left : most;

		r = leg_new(post, side, row, rows);
		row += rows;
		left -= rows;
	}
	return r < 0 ? err_pass(r) : 0;
}

static int part_check(const struct attend *attend, const struct kvd_ring_part *part)
{
	uint32_t heads = attend->form.shape.heads;

	if (part->rows == 0 || part->row % heads || part->rows % heads ||
	    part->row > attend->rows || part->rows > attend->rows - part->row)
		return err_raise(ERR_RANGE,
				 "part: rows [%u, +%u) are not whole query tokens of the "
				 "seat's %u",
				 part->row, part->rows, attend->rows);
	if (part->delta && part->per_token)
		return err_raise(ERR_INVAL,
				 "part: a selection with a delta: tokens that were "
				 "chosen are attended where they are");
	if (part->delta == INT32_MIN)
		return err_raise(ERR_RANGE, "part: delta %d", part->delta);
	if (part->delta && attend->form.rope.dims == 0)
		return err_raise(ERR_INVAL, "part: a delta, and attend.open had no rope");
	return 0;
}

/* Which daemon a token is at is decided by its number; here it must be of the part. */
static int select_check(const struct kvd_ring_part *part, uint32_t heads,
			const uint32_t *select, uint64_t tokens)
{
	uint64_t count = (uint64_t)(part->rows / heads) * part->per_token;

	for (uint64_t i = 0; i < count; i++) {
		if (select[i] >= tokens && select[i] != UINT32_MAX)
			return err_raise(ERR_RANGE, "select: token %u of %llu", select[i],
					 (unsigned long long)tokens);
	}
	return 0;
}

/* Chunks that are here, then those that follow elsewhere. */
static int part_legs(struct attend_post *post, const struct kvd_ring_part *part,
		     const uint32_t *select)
{
	struct attend *attend = post->attend;
	const struct store_hold *hold = store_hold_find(attend->session, part->hold);
	struct side side = {.hold = hold, .part = part, .select = select};
	uint32_t here, begin = part->first, end, chunk;
	uint64_t tokens = part->tokens ? part->tokens : UINT64_MAX;
	int r = hold ? part_check(attend, part) : -ENOENT;

	if (r < 0)
		return err_pass(r);
	here = store_hold_here(hold);
	chunk = store_hold_chunk_tokens(hold);
	end = here + far_hold_chunks(store_hold_far(hold));
	if (part->count == 0 || begin > end || part->count > end - begin)
		return err_raise(ERR_RANGE, "part: chunks [%u, +%u) of a hold of %u",
				 part->first, part->count, end);
	end = begin + part->count;
	if (tokens > (uint64_t)part->count * chunk)
		tokens = (uint64_t)part->count * chunk;
	r = select_check(part, attend->form.shape.heads, select, tokens);
	if (r < 0)
		return err_pass(r);
	if (begin < here) {
		side.count = (end < here ? end : here) - begin;
		side.tokens = (uint64_t)side.count * chunk;
		if (tokens < side.tokens)
			side.tokens = tokens;
		r = side_legs(post, &side);
	}
	side.skip = begin < here ? (uint64_t)(here - begin) * chunk : 0;
	if (r < 0 || end <= here || tokens <= side.skip)
		return r < 0 ? err_pass(r) : 0;
	if (begin < here)
		begin = here;
	side.head.first = begin - here;
	side.head.count = end - begin;
	side.head.tokens = side.tokens = tokens - side.skip;
	side.far = far_hold_at(store_hold_far(hold), side.head.first);
	if (!side.far)
		return err_raise(ERR_PEER, "the hold's other daemon is lost");
	r = far_pool(side.far, side.head.first, side.head.count, &side.head.pool);
	return r < 0 ? err_pass(r) : err_pass(side_legs(post, &side));
}

static int parts_legs(struct attend_post *post, const struct attend_post_args *args)
{
	uint32_t heads = post->attend->form.shape.heads;
	uint64_t at = 0;
	int r = 0;

	for (uint32_t i = 0; i < args->part_count && r >= 0; i++) {
		const struct kvd_ring_part *part = &args->parts[i];
		uint64_t count = (uint64_t)(part->rows / heads) * part->per_token;

		if (count > args->select_count - at)
			return err_raise(ERR_INVAL,
					 "parts[%u]: its selection is not all "
					 "there",
					 i);
		r = part_legs(post, part, args->select + at);
		if (r < 0)
			return err_prefix(r, "parts[%u]", i);
		at += count;
	}
	return r < 0 ? err_pass(r) : 0;
}

static int post_new(struct attend *attend, const struct attend_post_args *args,
		    struct attend_post **post_p)
{
	struct session *session = attend->session;
	struct attend_session *part = session->attend_part;
	struct region *region = region_find(session, attend->region);
	uint64_t values =
		values_count(attend->rows, attend->form.shape.dv) * sizeof(float);
	struct attend_post *post;
	int r;

	if (!region)
		return err_pass(-ENOENT);
	post = mem_zalloc(sizeof(*post));
	if (!post)
		return err_pass(-ENOMEM);
	*post = (struct attend_post){.attend = attend,
				     .id = args->id,
				     .slot = args->slot,
				     .gen = args->gen,
				     .seat = args->seat,
				     .layer = args->layer,
				     .own = args->own,
				     .region = region};
	list_init(&post->legs);
	loop_timer_init(&post->deadline, session->kvd->loop, on_deadline);
	/* and of what merges it */
	r = charge_take(&post->charge, session->account, ACCOUNT_ATTENDS,
			sizeof(*post) + values);
	if (r >= 0)
		r = idmap_put(&part->posts, post->id, post);
	if (r < 0) {
		charge_drop(&post->charge);
		mem_free(post);
		return err_pass(r);
	}
	region_pin(region);
	attend->taken[args->seat] = post;
	list_push_back(&attend->attends->posts, &post->link);
	attend->attends->post_count++;
	*post_p = post;
	return 0;
}

int attend_post(struct attend *attend, const struct attend_post_args *args)
{
	struct attends *attends = attend->attends;
	const struct attend_session *part = attend->session->attend_part;
	struct attend_post *post = NULL;
	struct err why;
	int r = 0;

	if (attends->closed)
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	if (args->seat >= attend->seats)
		return err_raise(ERR_RANGE, "seat: %u of %u", args->seat, attend->seats);
	if (attend->taken[args->seat])
		return err_raise(ERR_BUSY, "seat %u: a post has it", args->seat);
	if (args->part_count == 0 || args->part_count > ATTEND_PARTS_MAX)
		return err_raise(ERR_RANGE, "parts: %u are not 1 to %u", args->part_count,
				 ATTEND_PARTS_MAX);
	if (idmap_count(&part->posts) >= POSTS_MAX)
		return err_raise(ERR_LIMIT, "%u posts: the limit of a session",
				 POSTS_MAX);
	r = post_new(attend, args, &post);
	if (r < 0)
		return err_pass(r);
	attends->posted++;
	attends->posted_rows += attend->rows;
	post->on_failed = args->on_failed;
	if (args->deadline_ns)
		loop_timer_start(&post->deadline, args->deadline_ns);
	r = parts_legs(post, args);
	if (r < 0) {
		err_take(&why);
		post_fail(post, &why);
		return 0;
	}
	/* all of q was read */
	status_slot_set(attend->session->status, post->slot, KVD_TRANSFERRING, 0, ERR_OK);
	return 0;
}
