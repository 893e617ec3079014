/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests of a peer that measures attention here. An echo returns its bytes at once, in
 * the loop: no kernel and no thread is involved, and no more is sent than was received.
 * Each peer has a share of bytes per time, so that echoes cannot occupy the loop. A speed
 * is measured by one of attention_threads, once for a geometry; a peer waits for one of
 * them at a time, and has a share of new measurements, too. It reveals nothing about the
 * stored KV: the measurement uses scratch memory.
 */
#include "daemon/attend/echo.h"

#include <errno.h>
#include <stdio.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/attend/rows_send.h"
#include "daemon/attend/speed.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"

/* The remaining echo bytes of a peer that has sent one. */
struct echo_share {
	struct list link; /* attends->echo_shares */
	const struct remote *remote;
	uint64_t bytes, at_ns;
	unsigned int speeds; /* that it may have measured */
	uint64_t speed_ns;   /* it was given the last of them */
};

/* A peer that waits for a measurement. */
struct echo_wait {
	struct speed_wait wait;
	struct list link; /* attends->echo_waits */
	struct attends *attends;
	struct remote *remote; /* held */
	uint64_t attend;
};

/* ---- bytes ---- */

static struct echo_share *echo_share_of(struct attends *attends,
					const struct remote *remote)
{
	struct echo_share *share;

	list_foreach(share, &attends->echo_shares, link) {
		if (share->remote == remote)
			return share;
	}
	share = mem_zalloc(sizeof(*share));
	if (!share)
		return NULL;
	share->remote = remote;
	share->bytes = ECHO_BYTES;
	share->speeds = ECHO_SPEEDS;
	share->at_ns = share->speed_ns = loop_now_ns(attends->kvd->loop);
	list_push_back(&attends->echo_shares, &share->link);
	return share;
}

static int echo_take(struct attends *attends, const struct remote *remote, size_t bytes)
{
	struct echo_share *share = echo_share_of(attends, remote);
	uint64_t now = loop_now_ns(attends->kvd->loop), us;

	if (!share)
		return err_pass(-ENOMEM);
	us = (now - share->at_ns) / 1000;
	share->at_ns = now;
	us = us < 1000000 ? us : 1000000;
	share->bytes += us * ECHO_BYTES_A_S / 1000000;
	if (share->bytes > ECHO_BYTES)
		share->bytes = ECHO_BYTES;
	if (bytes > share->bytes)
		return err_raise(ERR_BUSY,
				 "echoes: limit of this daemon is %u bytes per "
				 "second",
				 ECHO_BYTES_A_S);
	share->bytes -= bytes;
	return 0;
}

/* ---- speeds ---- */

static void echo_wait_end(struct echo_wait *wait)
{
	speed_forget(&wait->wait);
	list_remove(&wait->link);
	handshake_release(wait->remote);
	mem_free(wait);
}

static void echo_on_reported(struct speed_wait *base, const struct cost_compute *compute,
			     const struct err *why)
{
	struct echo_wait *wait = container_of(base, struct echo_wait, wait);
	struct wire_attention_result msg = {.attend = wait->attend};
	uint8_t bytes[SPEED_BYTES];
	struct cursor out;

	cursor_write(&out, bytes, sizeof(bytes));
	if (why) {
		msg.code = why->code;
		snprintf(msg.text, sizeof(msg.text), "%.300s", why->text);
	} else {
		speed_put(compute, &out);
		msg.values.data = bytes;
		msg.values.len = out.pos;
	}
	if (rows_send_attention_result(wait->remote, &msg) < 0)
		err_clear(); /* it is going down */
	echo_wait_end(wait);
}

static int echo_take_speed(struct attends *attends, const struct remote *remote)
{
	struct echo_share *share = echo_share_of(attends, remote);
	uint64_t now = loop_now_ns(attends->kvd->loop), due;

	if (!share)
		return err_pass(-ENOMEM);
	due = (now - share->speed_ns) / ECHO_SPEED_NS;
	share->speed_ns += due * ECHO_SPEED_NS;
	share->speeds = due < ECHO_SPEEDS - share->speeds
				? share->speeds + (unsigned int)due
				: ECHO_SPEEDS;
	if (!share->speeds)
		return err_raise(ERR_BUSY,
				 "speeds: limit of this daemon is %u, then "
				 "one per minute",
				 ECHO_SPEEDS);
	share->speeds--;
	return 0;
}

static int echo_speed(struct attends *attends, struct remote *remote,
		      const struct wire_attend *msg)
{
	struct echo_wait *wait;
	struct form form = {.view = ""};
	bool gpu = msg->pool == ECHO_SPEED_GPU;
	struct cursor in;
	int r;

	list_foreach(wait, &attends->echo_waits, link) {
		if (wait->remote == remote)
			return err_raise(ERR_BUSY, "a speed is being measured for this "
						   "daemon");
	}
	cursor_read(&in, msg->form.data, msg->form.len);
	r = form_get(&in, &form);
	if (r >= 0)
		r = form_check(&form);
	if (r >= 0)
		r = speed_check(attends, &form, gpu);
	if (r >= 0 && !speed_is_known(attends, &form, gpu))
		r = echo_take_speed(attends, remote);
	if (r < 0)
		return err_pass(r);
	wait = mem_zalloc(sizeof(*wait));
	if (!wait)
		return err_pass(-ENOMEM);
	list_init(&wait->wait.link);
	wait->wait.on_reported = echo_on_reported;
	wait->attends = attends;
	wait->remote = remote;
	wait->attend = msg->attend;
	remote->reaches++;
	list_push_back(&attends->echo_waits, &wait->link);
	r = speed_ask(attends, &form, gpu, &wait->wait);
	if (r < 0) {
		echo_wait_end(wait);
		return err_pass(r);
	}
	return 0;
}

/* ---- the messages ---- */

int echo_serve(struct attends *attends, struct remote *remote,
	       const struct wire_attend *msg)
{
	struct wire_attention_result answer = {.attend = msg->attend, .values = msg->q};
	int r = attends->closed ? err_raise(ERR_DRAIN, "the daemon is stopping")
				: echo_take(attends, remote, msg->q.len + 1024);

	if (r < 0)
		return err_pass(r);
	if (msg->form.len)
		return err_pass(echo_speed(attends, remote, msg));
	attends->figures.echoes++;
	attends_stay_awake(attends);
	return err_pass(rows_send_attention_result(remote, &answer));
}

void echo_on_down(struct attends *attends, const struct remote *remote)
{
	struct echo_share *share;
	struct echo_wait *wait;

	list_foreach_safe(wait, &attends->echo_waits, link) {
		if (wait->remote == remote)
			echo_wait_end(wait);
	}
	list_foreach_safe(share, &attends->echo_shares, link) {
		if (share->remote == remote) {
			list_remove(&share->link);
			mem_free(share);
		}
	}
}

void echoes_close(struct attends *attends)
{
	struct echo_share *share;
	struct echo_wait *wait;

	list_foreach_safe(wait, &attends->echo_waits, link)
		echo_wait_end(wait);
	list_foreach_safe(share, &attends->echo_shares, link) {
		list_remove(&share->link);
		mem_free(share);
	}
}
