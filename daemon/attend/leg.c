/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A leg: a part's rows with the chunks that one daemon has. A local one is an item of the
 * compute queue, a remote one a message and its reply.
 *
 * Each ATTEND has one reply, with any result, even if it was canceled. So the rows
 * and bytes in flight at one daemon are known, and bounded: otherwise an engine's large
 * post would fill the connection to a daemon, which fails all other engines' requests
 * there. Legs over the bound wait, with a copy of their rows; those of the session with
 * the fewest in flight are next.
 *
 * Rows have megabytes, and so have selections: a leg copies its own when it starts, and
 * rows for a local kernel are copied by Q_PIECE, so that the post ends its turn between
 * them (ask.c).
 *
 * A leg whose post has ended is kept until its reply arrives, without its data.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/store/store.h"
#include "daemon/attend/calibrate.h"
#include "daemon/attend/devices.h"
#include "daemon/attend/rows_send.h"
#include "daemon/attend/speed.h"
#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cost/live.h"
#include "daemon/handshake/handshake.h"
#include "daemon/peer/peer.h"
#include "daemon/session/session.h"
#include "daemon/store/far.h"
#include "daemon/store/store_kv.h"
#include "daemon/transport/transport.h"
#include "proto/kvd_ring.h"

#define Q_PIECE (128u << 10)

/* ---- life ---- */

static struct attend_session *leg_session(const struct leg *leg)
{
	return attend_session(leg->post->attend->session);
}

/* Of a session, the legs that wait to be sent to one remote. */
struct leg_line {
	struct list link; /* in attend_remote.lines */
	const struct session *session;
	struct list legs; /* struct leg.wait */
};

static struct leg_line *line_of(struct attend_remote *there,
				const struct session *session)
{
	struct leg_line *line;

	list_foreach(line, &there->lines, link) {
		if (line->session == session)
			return line;
	}
	line = mem_zalloc(sizeof(*line));
	if (!line)
		return NULL;
	line->session = session;
	list_init(&line->legs);
	list_push_back(&there->lines, &line->link);
	return line;
}

static int leg_wait(struct leg *leg)
{
	struct leg_line *line =
		line_of(attend_remote(leg->remote), leg->post->attend->session);

	if (!line)
		return err_pass(-ENOMEM);
	leg->line = line;
	list_push_back(&line->legs, &leg->wait);
	return 0;
}

static void leg_wait_ends(struct leg *leg)
{
	struct leg_line *line = leg->line;

	if (!line)
		return;
	leg->line = NULL;
	list_remove(&leg->wait);
	if (!list_empty(&line->legs))
		return;
	list_remove(&line->link);
	mem_free(line);
	if (list_empty(&attend_remote(leg->remote)->lines))
		loop_work_stop(&attend_remote(leg->remote)->sending);
}

/* Frees all except the record that a reply is due. */
static void leg_empty(struct leg *leg)
{
	list_remove(&leg->link);
	mem_free(mem_steal(leg->values));
	mem_free(mem_steal(leg->select));
	mem_free(mem_steal(leg->q));
	charge_drop(&leg->charge);
	leg->post = NULL;
}

void leg_free(struct leg *leg)
{
	assert(!leg->at_compute && !leg->sent);
	leg_empty(leg);
	leg_wait_ends(leg);
	list_remove(&leg->at_remote);
	if (leg->number)
		idmap_remove(&leg->attends->legs, leg->number);
	if (leg->remote)
		handshake_release(leg->remote);
	store_kv_free(leg->item.kv);
	mem_free(leg);
}

/* It was answered, or never will be. */
static void leg_unsend(struct leg *leg)
{
	struct attend_remote *there = attend_remote(leg->remote);

	assert(leg->sent && there->sent > 0);
	leg->sent = false;
	there->sent--;
	there->sent_rows -= leg->rows;
	there->sent_bytes -= leg->bytes;
	if (leg->post)
		leg_session(leg)->legs_sent--;
}

static void leg_stop(struct leg *leg)
{
	const struct wire_attention_cancel stop = {.attend = leg->number};

	if (handshake_send_attention_cancel(leg->remote, &stop) < 0)
		err_clear(); /* it is going down */
	leg_session(leg)->legs_sent--;
	leg_empty(leg); /* legs_on_result() frees it */
}

void leg_drop(struct leg *leg)
{
	if (leg->at_compute) {
		if (!compute_cancel(&leg->item)) {
			list_remove(&leg->link);
			leg->post = NULL;
			return; /* leg_on_computed() frees it */
		}
		leg->at_compute = false;
		leg->attends->under_way--;
	}
	if (leg->sent && !leg->attends->closed) {
		leg_stop(leg);
		return;
	}
	if (leg->sent)
		leg_unsend(leg);
	leg_free(leg);
}

void legs_close(struct attends *attends)
{
	struct idmap_cursor it;

	idmap_foreach(&attends->legs, it) {
		struct leg *leg = it.value;

		if (!leg->sent)
			continue; /* it is in, and being gathered */
		assert(!leg->post);
		leg_unsend(leg);
		leg_free(leg);
	}
}

/* ---- here ---- */

/* Of rows that were their whole post. */
static void leg_price_here(const struct leg *leg)
{
	const struct compute_item *item = &leg->item;
	struct attends *attends = leg->attends;
	const struct live_round round = {
		.shape = speed_shape(&item->form),
		.query = (double)leg->rows / item->form.shape.heads,
		.tokens = (double)(item->select ? item->per_token : item->tokens),
		.selected = item->select,
		.attend_us = item->attend_us,
		.requesters = item->together,
		.kind = item->gpu ? COST_GPU : COST_HOST};

	if (store_costs(attends->kvd) && !leg->among)
		live_home_round(
			store_costs(attends->kvd), &round,
			(uint32_t)(loop_now_ns(attends->kvd->loop) / LOOP_NS_PER_S));
}

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
		leg_price_here(leg);
		post_step(post, leg,
			  &(struct post_figures){item->queue_us, item->attend_us,
						 item->together});
	}
}

bool leg_has_all_heads(const struct leg *leg)
{
	return leg->item.form.shape.heads == leg->post->attend->form.shape.heads;
}

static const uint8_t *leg_seat_q(const struct leg *leg)
{
	const struct attend *attend = leg->post->attend;

	return post_seat(leg->post, attend->facts.q + form_q_bytes(&attend->form,
								   leg->row + leg->head));
}

/* LEG_AGAIN: not all. */
static int leg_rows_take(struct leg *leg)
{
	const struct form *f = &leg->item.form;
	uint64_t bytes = form_q_bytes(f, leg->rows), n = bytes - leg->q_taken;
	uint64_t one = form_q_bytes(f, f->shape.heads); /* of a query token */
	uint64_t all = form_q_bytes(f, leg->post->attend->form.shape.heads);
	uint64_t piece = Q_PIECE > one ? Q_PIECE / one * one : one;
	const uint8_t *from = leg_seat_q(leg);
	int r;

	if (!leg->q) {
		r = charge_more(&leg->charge, bytes);
		if (r < 0)
			return err_pass(r);
		leg->q = mem_alloc(bytes);
		if (!leg->q)
			return err_pass(-ENOMEM);
	}
	n = leg->q_taken + (n < piece ? n : piece);
	for (; leg->q_taken < n; leg->q_taken += one)
		memcpy(leg->q + leg->q_taken, from + leg->q_taken / one * all, one);
	return leg->q_taken < bytes ? LEG_AGAIN : 0;
}

int leg_here(struct leg *leg, struct store_kv *kv, const struct kvd_ring_part *part,
	     uint64_t tokens)
{
	const struct attend_post *post = leg->post;
	const struct attend *attend = post->attend;

	leg->item =
		(struct compute_item){.kv = store_kv_ref(kv),
				      .form = leg->item.form,
				      .layer = post->layer,
				      .rows = leg->rows,
				      .principal = session_principal(attend->session),
				      .tokens = tokens < kv->tokens ? tokens : kv->tokens,
				      .delta = part->delta,
				      .per_token = part->per_token,
				      .on_done = leg_on_computed,
				      .owner = leg};
	leg->item.form.out_bf16 = false; /* it crosses no wire */
	return 0;
}

static int leg_begin_here(struct leg *leg)
{
	uint32_t dv = leg->item.form.shape.dv;
	int r = leg_rows_take(leg);

	if (r)
		return r < 0 ? err_pass(r) : LEG_AGAIN;
	leg->values = mem_alloc(values_count(leg->rows, dv) * sizeof(float));
	if (!leg->values)
		return err_pass(-ENOMEM);
	leg->item.o = leg->values;
	leg->item.m = values_m(leg->values, leg->rows, dv);
	leg->item.l = leg->item.m + leg->rows;
	leg->item.q = leg->q;
	r = devices_submit(leg->attends, &leg->item);
	if (r < 0)
		return err_pass(r);
	leg->at_compute = true;
	leg->attends->under_way++;
	return 0;
}

/* ---- elsewhere ---- */

static int leg_send(struct leg *leg, const uint8_t *q)
{
	struct attend_remote *there = attend_remote(leg->remote);
	const struct form *f = &leg->item.form;
	uint8_t form[160], rope[16 + FORM_ROPE_MAX / 2 * sizeof(double)];
	struct wire_attend msg = leg->msg;
	struct cursor out;
	int r;

	snprintf(msg.view, sizeof(msg.view), "%s", f->view);
	cursor_write(&out, form, sizeof(form));
	r = form_put(f, &out);
	msg.form.data = form;
	msg.form.len = out.pos;
	if (msg.delta && r >= 0) {
		cursor_write(&out, rope, sizeof(rope));
		r = form_rope_put(&f->rope, &out);
		msg.rope.data = rope;
		msg.rope.len = out.pos;
	}
	msg.select.data = leg->select;
	msg.select.len = leg->select ? (size_t)leg->rows / f->shape.heads *
					       msg.per_token * sizeof(uint32_t)
				     : 0;
	msg.q.data = q;
	msg.q.len = form_q_bytes(f, leg->rows);
	attends_stay_awake(leg->attends);
	leg->sent_ns = loop_clock_ns(leg->attends->kvd->loop);
	if (r >= 0)
		r = rows_send_attend(leg->remote, &msg);
	if (r < 0)
		return err_pass(r);
	leg->sent = true;
	there->sent++;
	there->sent_rows += leg->rows;
	there->sent_bytes += leg->bytes;
	leg->attends->figures.bytes += leg->bytes;
	leg_session(leg)->legs_sent++;
	return 0;
}

static bool leg_has_room(const struct leg *leg)
{
	const struct attend_remote *there = attend_remote(leg->remote);

	return there->sent == 0 || (there->sent < ATTEND_SENT_LEGS &&
				    there->sent_rows + leg->rows <= ATTEND_SENT_ROWS &&
				    there->sent_bytes + leg->bytes <= ATTEND_SENT_BYTES);
}

/* Of the waiting ones, of the session with the fewest in flight; NULL: none. */
static struct leg *leg_next(const struct attend_remote *there)
{
	struct leg_line *line, *least = NULL;

	list_foreach(line, &there->lines, link) {
		if (!least || attend_session(line->session)->legs_sent <
				      attend_session(least->session)->legs_sent)
			least = line;
	}
	return least ? list_first(&least->legs, struct leg, wait) : NULL;
}

/* One of those that wait: its message is up to 160 KiB. */
static bool send_step(struct loop_work *work)
{
	struct leg *leg = leg_next(container_of(work, struct attend_remote, sending));
	struct err why;

	if (!leg || !leg_has_room(leg))
		return false;
	leg_wait_ends(leg);
	if (leg_send(leg, leg->q) >= 0) {
		mem_free(mem_steal(leg->q));
		return true;
	}
	err_take(&why);
	post_fail(leg->post, &why);
	return true;
}

void legs_init(struct remote *remote)
{
	struct attend_remote *there = attend_remote(remote);

	list_init(&there->legs);
	list_init(&there->lines);
	loop_work_init(&there->sending, remote->kvd->loop, send_step, NULL);
}

int legs_there(const struct attend_post *post, const struct far_hold *far,
	       struct wire_attend *head)
{
	const struct remote *remote = far_hold_remote(far);

	if (!remote->peer || sm_state(&remote->peer->sm) != PEER_UP)
		return err_raise(ERR_PEER, "%s: the connection is down", remote->label);
	if (!(remote->peer->features & PEER_FEATURE_ATTEND))
		return err_raise(ERR_REQUIRE,
				 "%s: its kvd does not compute attention; "
				 "use fetch",
				 remote->label);
	head->ask = far_hold_ask(far);
	head->layer = post->layer;
	return 0;
}

int leg_there(struct leg *leg, struct remote *remote, const struct wire_attend *head)
{
	struct attends *attends = leg->attends;
	const struct form *f = &leg->item.form;
	int r;

	leg->msg = *head;
	leg->msg.attend = attends->next_leg + 1;
	leg->msg.rows = leg->rows;
	leg->bytes =
		form_q_bytes(f, leg->rows) + form_out_bytes(f, leg->rows) +
		(uint64_t)leg->rows / f->shape.heads * head->per_token * sizeof(uint32_t);
	r = idmap_put(&attends->legs, leg->msg.attend, leg);
	if (r < 0)
		return err_pass(r);
	leg->number = ++attends->next_leg;
	leg->remote = remote;
	leg->gpu = handshake_pool_in_gpu(handshake_pool_by_id(remote, head->pool));
	list_push_back(&attend_remote(remote)->legs, &leg->at_remote);
	remote->reaches++;
	return 0;
}

static int leg_begin_there(struct leg *leg)
{
	const struct attend_remote *there = attend_remote(leg->remote);
	bool now = list_empty(&there->lines) && leg_has_room(leg);
	int r;

	if (now && !leg->q && leg_has_all_heads(leg))
		return err_pass(leg_send(leg, leg_seat_q(leg)));
	r = leg_rows_take(leg);
	if (r)
		return r < 0 ? err_pass(r) : LEG_AGAIN;
	if (!now)
		return err_pass(leg_wait(leg));
	r = leg_send(leg, leg->q);
	mem_free(mem_steal(leg->q));
	return err_pass(r);
}

/* Numbers of others become ~0. */
static int leg_select(struct leg *leg)
{
	leg->select = mem_alloc((size_t)leg->cut_count * sizeof(*leg->select));
	if (!leg->select)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < leg->cut_count; i++) { /* at most 2^20: most are 16384 */
		uint64_t at = leg->cut_from[i] - leg->skip; /* wraps below: not its own */

		leg->select[i] = leg->cut_from[i] != UINT32_MAX && at < leg->tokens
					 ? (uint32_t)at
					 : UINT32_MAX;
	}
	leg->item.select = leg->select;
	leg->cut_from = NULL;
	return 0;
}

int leg_begin(struct leg *leg)
{
	if (leg->cut_from) {
		int r = leg_select(leg);

		return r < 0 ? err_pass(r) : LEG_AGAIN;
	}
	return leg->remote ? leg_begin_there(leg) : leg_begin_here(leg);
}

/* ---- answers ---- */

/* The data of the round at its reply, except its time. */
static struct live_round leg_round(const struct leg *leg,
				   const struct wire_attention_result *msg)
{
	const struct form *form = &leg->item.form;

	return (struct live_round){
		.shape = speed_shape(form),
		.query = (double)leg->rows / form->shape.heads,
		.tokens = (double)(leg->msg.per_token ? leg->msg.per_token
						      : leg->msg.tokens),
		.selected = leg->select,
		.bytes = (double)leg->bytes,
		.queue_us = msg->queue_us,
		.attend_us = msg->attend_us,
		.requesters = msg->together > 1 ? (double)msg->together : 1,
		.kind = leg->gpu ? COST_GPU : COST_HOST};
}

/* Compares the time of the round with its prediction. */
static void leg_price(struct attends *attends, struct remote *remote,
		      struct live_round *round, uint64_t since_ns)
{
	uint64_t now_ns = loop_clock_ns(attends->kvd->loop);
	const struct live_way way = {.key = remote->peer->instance,
				     .transport = remote->transport->ops->name,
				     .now_s = (uint32_t)(now_ns / LOOP_NS_PER_S)};

	round->us = (double)(now_ns - since_ns) / 1e3;
	if (live_round(store_costs(attends->kvd), &way, round)) {
		attends->figures.stale++;
		log_info("cost", remote->label, "the cost model is stale", "us=%.0f",
			 round->us);
	}
	if (live_stale(store_costs(attends->kvd), way.key))
		calibrate_soon(attends, remote);
}

static void leg_answered(struct leg *leg, const struct wire_attention_result *msg)
{
	const struct post_figures figures = {msg->queue_us, msg->attend_us,
					     msg->together};
	const struct form *form = &leg->item.form;
	struct attends *attends = leg->attends;
	struct remote *remote = leg->remote;
	uint32_t dv = form->shape.dv;
	struct live_round round;
	bool told, priced;
	uint64_t since_ns;
	struct err why;

	leg->in = true;
	if (msg->code != ERR_OK) {
		err_set(&why, err_from_wire(msg->code), "%.60s: %s", remote->label,
			msg->text);
		post_fail(leg->post, &why);
		return;
	}
	far_attends(attends->kvd, remote);
	told = gather_is_of(leg->post, leg);
	if (told) {
		leg->received = msg->values.data;
	} else {
		leg->values = mem_alloc(values_count(leg->rows, dv) * sizeof(float));
		if (!leg->values) {
			err_set(&why, ERR_NOMEM, "out of memory for results");
			post_fail(leg->post, &why);
			return;
		}
		form_out_read(form, msg->values.data, leg->rows, leg->values,
			      values_m(leg->values, leg->rows, dv),
			      values_m(leg->values, leg->rows, dv) + leg->rows);
	}
	/* Legs of a post at the same daemon wait for each other's bytes and kernels:
	 * their times are valid for this post only. */
	priced = store_costs(leg->attends->kvd) && leg->remote->ready && !leg->among;
	round = leg_round(leg, msg);
	/* For a post of one message: all of its time here, from reading the seat to
	 * writing it. A leg that waited for others' replies, or is merged with others,
	 * counts from its sending. */
	since_ns =
		leg->received && leg->q_taken == 0 ? leg->post->began_ns : leg->sent_ns;
	if (priced && !told)
		leg_price(attends, remote, &round, since_ns);
	post_step(leg->post, leg, &figures); /* which may end the leg */
	if (priced && told)
		leg_price(attends, remote, &round, since_ns);
}

int legs_on_result(struct attends *attends, struct remote *remote, struct cursor *body)
{
	struct wire_attention_result msg;
	struct leg *leg;
	int r = wire_attention_result_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (attends && msg.attend >= CALIBRATE_FIRST)
		return err_pass(calibrate_on_result(attends, remote, &msg));
	leg = attends ? idmap_get(&attends->legs, msg.attend) : NULL;
	if (!leg || leg->remote != remote || !leg->sent)
		return 0; /* late */
	if (leg->post && msg.code == ERR_OK &&
	    msg.values.len != form_out_bytes(&leg->item.form, leg->rows))
		return err_raise(ERR_PROTO, "ATTENTION_RESULT: %zu bytes for %u rows",
				 msg.values.len, leg->rows);
	leg_unsend(leg);
	if (leg->post)
		leg_answered(leg, &msg);
	else
		leg_free(leg);
	if (!list_empty(&attend_remote(remote)->lines))
		loop_work_start(&attend_remote(remote)->sending);
	return 0;
}

void legs_on_down(const struct remote *remote, const struct err *why)
{
	struct list *at;
	struct err told;

	err_set(&told, ERR_PEER, "%.60s: connection lost: %s", remote->label, why->text);
	while ((at = list_pop_front(&attend_remote(remote)->legs))) {
		struct leg *leg = list_entry(at, struct leg, at_remote);

		if (leg->in)
			continue; /* its bytes are here */
		if (leg->sent)
			leg_unsend(leg);
		if (leg->post)
			post_fail(leg->post, &told); /* others of it are met here later */
		else
			leg_free(leg);
	}
}
