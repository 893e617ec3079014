/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A request of another daemon is parsed as hostile: each number is checked against its
 * range before anything is computed. It may attend to its own holds, and to nothing else:
 * a result computed from values reveals them, as reading them would. Its rows wait with
 * all others; the number of waiting requests of one daemon is bounded, and so is their
 * time.
 *
 * Each ATTEND has one reply. When a daemon cancels, or is lost, its waiting rows are
 * dropped; those in a kernel are not delivered.
 */
#include <errno.h>
#include <stdio.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/store/store.h"
#include "daemon/attend/devices.h"
#include "daemon/attend/echo.h"
#include "daemon/attend/rows_send.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/peer/peer.h"
#include "daemon/store/remote_hold.h"
#include "daemon/store/store_kv.h"

/* Of a peer, that wait or are computed. */
#define SERVES_MAX (2 * ATTEND_SENT_LEGS)
#define SERVE_ROWS_MAX (2 * ATTEND_SENT_ROWS)

struct serve {
	struct list link; /* attends->serving */
	struct list peer; /* its remote's */
	struct attends *attends;
	struct remote *remote; /* held; NULL: no reply is sent */
	uint64_t attend;
	struct err over; /* code: set if it is canceled */
	struct compute_item item;
	struct charge charge; /* the requester's */
	uint8_t *q;
	uint32_t *select;
	struct rows_made answer; /* with the values */
};

static void serve_bind(struct serve *serve, struct remote *remote)
{
	struct attend_remote *there = attend_remote(remote);

	serve->remote = remote;
	remote->reaches++;
	there->serve_count++;
	there->serve_rows += serve->item.rows;
	list_push_back(&there->serves, &serve->peer);
}

static void serve_unbind(struct serve *serve)
{
	struct remote *remote = mem_steal(serve->remote);

	if (!remote)
		return;
	attend_remote(remote)->serve_count--;
	attend_remote(remote)->serve_rows -= serve->item.rows;
	list_remove(&serve->peer);
	handshake_release(remote);
}

static void serve_free(struct serve *serve)
{
	list_remove(&serve->link);
	serve_unbind(serve);
	rows_made_drop(&serve->answer);
	mem_free(serve->select);
	mem_free(serve->q);
	charge_drop(&serve->charge);
	mem_free(serve);
}

/* ---- answers ---- */

static void answer(struct attends *attends, struct remote *remote,
		   struct wire_attention_result *msg, const struct err *why)
{
	if (why) {
		msg->code = why->code;
		snprintf(msg->text, sizeof(msg->text), "%.300s", why->text);
	}
	if (attends)
		attends_stay_awake(attends);
	if (rows_send_attention_result(remote, msg) < 0)
		err_clear(); /* it is going down */
}

static void serve_refuse(const struct serve *serve, const struct err *why)
{
	struct wire_attention_result no = {.attend = serve->attend};

	if (serve->remote)
		answer(serve->attends, serve->remote, &no, why);
}

/* Ends it: dropped, or when its kernel is done. */
static void serve_stop(struct serve *serve, const struct err *why)
{
	serve->over = *why;
	if (!compute_cancel(&serve->item))
		return; /* serve_on_computed() */
	serve->attends->under_way--;
	serve_refuse(serve, why);
	serve_free(serve);
}

static void serve_tell(struct serve *serve)
{
	const struct compute_item *item = &serve->item;
	const struct wire_attention_result msg = {
		.attend = serve->attend,
		.queue_us = item->queue_us,
		.attend_us = item->attend_us,
		.together = item->together,
		.values = {(const uint8_t *)item->o,
			   form_out_bytes(&item->form, item->rows)}};
	int r = rows_fill_attention_result(&msg, &serve->answer);

	serve->attends->figures.served++;
	serve->attends->figures.served_rows += item->rows;
	attends_stay_awake(serve->attends);
	if (r < 0 || rows_send(serve->remote, &serve->answer) < 0)
		err_clear(); /* it is going down */
}

static void serve_on_computed(struct compute_item *item, const struct err *why)
{
	struct serve *serve = item->owner;

	serve->attends->under_way--;
	if (serve->over.code != ERR_OK)
		why = &serve->over;
	if (why)
		serve_refuse(serve, why);
	else if (serve->remote)
		serve_tell(serve);
	serve_free(serve);
}

/* ---- ATTEND ---- */

static int message_check(const struct attends *attends, const struct wire_attend *msg,
			 const struct form *form)
{
	uint64_t chosen = (uint64_t)(msg->rows / form->shape.heads) * msg->per_token *
			  sizeof(uint32_t);

	if (msg->rows == 0 || msg->rows > ATTEND_ROWS_MAX ||
	    msg->rows % form->shape.heads)
		return err_raise(ERR_RANGE, "rows: %u must be a multiple of heads (%u)",
				 msg->rows, form->shape.heads);
	if (msg->q.len != form_q_bytes(form, msg->rows) ||
	    msg->select.len != (msg->per_token ? chosen : 0))
		return err_raise(ERR_PROTO, "ATTEND: %zu bytes of rows, %zu of tokens",
				 msg->q.len, msg->select.len);
	if (form_out_bytes(form, msg->rows) >
	    attend_message_bytes(attends, WIRE_T_ATTENTION_RESULT))
		return err_raise(ERR_TOOBIG,
				 "rows: %u rows of %u values exceed a "
				 "message",
				 msg->rows, form->shape.dv);
	return 0;
}

/* A peer's share of the queue. */
static int room_check(const struct attends *attends, const struct remote *remote,
		      uint32_t rows)
{
	const struct attend_remote *there = attend_remote(remote);

	if (attends->closed)
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	if (there->serve_count >= SERVES_MAX ||
	    (uint64_t)there->serve_rows + rows > SERVE_ROWS_MAX)
		return err_raise(ERR_BUSY,
				 "%u attention requests are queued in this daemon "
				 "(limit %u, of %u rows)",
				 there->serve_count, SERVES_MAX, SERVE_ROWS_MAX);
	return 0;
}

static int serve_alloc(struct serve *serve, const struct wire_attend *msg)
{
	serve->q = mem_dup(msg->q.data, msg->q.len);
	if (msg->per_token)
		serve->select = mem_dup(msg->select.data, msg->select.len);
	if (!serve->q || (msg->per_token && !serve->select))
		return err_pass(-ENOMEM);
	/* all values are written, unless the item is canceled: then they are not
	 * delivered */
	return err_pass(rows_room_attention_result(
		values_count(msg->rows, serve->item.form.shape.dv), &serve->answer,
		&serve->item.o));
}

static void serve_fill(struct serve *serve, const struct remote *remote,
		       const struct wire_attend *msg)
{
	struct compute_item *item = &serve->item;
	const void *principal =
		remote->account ? (const void *)remote->account : (const void *)remote;

	item->principal = offload_peer(principal);
	item->layer = msg->layer;
	item->q = serve->q;
	item->rows = msg->rows;
	item->tokens = msg->tokens < item->kv->tokens ? msg->tokens : item->kv->tokens;
	item->delta = (int32_t)msg->delta;
	item->select = serve->select;
	item->per_token = msg->per_token;
	item->m = item->o + (size_t)msg->rows * item->form.shape.dv;
	item->l = item->m + msg->rows;
	item->on_done = serve_on_computed;
	item->owner = serve;
}

static int serve_charge(struct serve *serve, const struct remote *remote,
			const struct wire_attend *msg)
{
	uint64_t bytes =
		sizeof(*serve) + msg->q.len + msg->select.len +
		values_count(msg->rows, serve->item.form.shape.dv) * sizeof(float) +
		store_kv_bytes(serve->item.kv);

	return err_pass(
		charge_take(&serve->charge, remote->account, ACCOUNT_ATTENDS, bytes));
}

static int form_of(const struct wire_attend *msg, struct form *form)
{
	struct cursor in;
	int r;

	cursor_read(&in, msg->form.data, msg->form.len);
	r = form_get(&in, form);
	if (r >= 0 && msg->rope.len) {
		cursor_read(&in, msg->rope.data, msg->rope.len);
		r = form_rope_get(&in, &form->rope);
	}
	return r < 0 ? err_pass(r) : err_pass(form_check(form));
}

static int serve_new(struct attends *attends, struct remote *remote,
		     const struct wire_attend *msg)
{
	struct serve *serve = mem_zalloc(sizeof(*serve));
	struct compute_item *item;
	int r;

	if (!serve)
		return err_pass(-ENOMEM);
	item = &serve->item;
	list_init(&serve->link);
	list_init(&serve->peer);
	serve->attends = attends;
	serve->attend = msg->attend;
	r = form_of(msg, &item->form);
	if (r >= 0)
		r = message_check(attends, msg, &item->form);
	if (r >= 0)
		r = remote_hold_kv(remote, msg->ask, msg->pool, msg->first, msg->count,
				   msg->view[0] ? msg->view : NULL, &item->kv);
	if (r >= 0)
		r = serve_charge(serve, remote, msg);
	if (r >= 0)
		r = serve_alloc(serve, msg);
	if (r >= 0) {
		serve_fill(serve, remote, msg);
		r = devices_submit(attends, item);
	}
	if (r < 0) {
		store_kv_free(item->kv);
		serve_free(serve);
		return err_pass(r);
	}
	serve_bind(serve, remote);
	attends->under_way++;
	list_push_back(&attends->serving, &serve->link);
	return 0;
}

static int serve_one(struct attends *attends, struct remote *remote,
		     const struct wire_attend *msg)
{
	int r;

	if (!attends || !store_of(attends->kvd))
		return err_raise(ERR_REQUIRE, "this daemon stores no chunks; set "
					      "chunk_memory");
	if (msg->count == 0)
		return err_pass(echo_serve(attends, remote, msg));
	r = room_check(attends, remote, msg->rows);
	return r < 0 ? err_pass(r) : err_pass(serve_new(attends, remote, msg));
}

int serve_on_attend(struct attends *attends, struct remote *remote, struct cursor *body)
{
	struct wire_attention_result no = {.code = ERR_OK};
	struct wire_attend msg;
	struct err why;
	int r = wire_attend_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	r = serve_one(attends, remote, &msg);
	if (r >= 0)
		return 0;
	if (attends)
		attends->figures.refused++;
	err_take(&why);
	no.attend = msg.attend;
	answer(attends, remote, &no, &why);
	return 0;
}

int serve_on_stop(struct attends *attends, struct remote *remote, struct cursor *body)
{
	struct wire_attention_cancel msg;
	struct serve *serve;
	struct err why;
	int r = wire_attention_cancel_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (!attends)
		return 0;
	err_set(&why, ERR_CANCELED, "canceled by the requester");
	list_foreach_safe(serve, &attend_remote(remote)->serves, peer) {
		if (serve->attend == msg.attend)
			serve_stop(serve, &why);
	}
	return 0;
}

void serve_on_down(const struct remote *remote)
{
	struct serve *serve;
	struct err why;

	err_set(&why, ERR_PEER, "the requester's connection is lost");
	list_foreach_safe(serve, &attend_remote(remote)->serves, peer) {
		serve_unbind(serve); /* no reply is sent */
		serve_stop(serve, &why);
	}
}

void serves_close(struct attends *attends)
{
	struct serve *serve;
	struct err why;

	err_set(&why, ERR_DRAIN, "the daemon is stopping");
	list_foreach_safe(serve, &attends->serving, link)
		serve_stop(serve, &why);
}
