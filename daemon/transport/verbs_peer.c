/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection of the verbs backend: queue pairs to one peer, on one or several
 * rails.
 *
 * It is ready when every queue pair is up. It ends in three steps. FLUSHING: the
 * farewell with its reason leaves, if queue pair 0 still takes it. ENDING: every
 * queue pair is put into ERR and dies (verbs_qp.c); until the last one is dead
 * nothing may be said of any transfer, because until then the peer's adapter may
 * write what it was given keys for. Only then the transfers end, and the daemon is
 * told. A fence that is not proven in time takes this way too: the owner of the
 * written memory ends its own queue pairs and needs nobody's word for it.
 */
#include "daemon/transport/verbs_impl.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define DIAL_NS (10 * LOOP_NS_PER_S)
#define FLUSH_NS (200 * LOOP_NS_PER_MS)
#define PROGRESS_NS (100 * LOOP_NS_PER_MS)
#define KNOCK_NS (250 * LOOP_NS_PER_MS)
#define WINDOW_START (8u << 20)
#define BUFFERS_BYTES ((size_t)(VERBS_DEPTH + VERBS_SEND_BUFFERS) * VERBS_MSG_BYTES)
#define LOOK_NS (500 * LOOP_NS_PER_MS) /* at connections that take their time */

static const struct sm_state peer_states[] = {
	[VERBS_PEER_OPENING] = {"opening",
				SM_TO(VERBS_PEER_READY) | SM_TO(VERBS_PEER_ENDING)},
	[VERBS_PEER_READY] = {"ready",
			      SM_TO(VERBS_PEER_FLUSHING) | SM_TO(VERBS_PEER_ENDING)},
	[VERBS_PEER_FLUSHING] = {"flushing", SM_TO(VERBS_PEER_ENDING)},
	[VERBS_PEER_ENDING] = {"ending", SM_TO(VERBS_PEER_ENDED)},
	[VERBS_PEER_ENDED] = {"ended", 0},
};

bool verbs_peer_quiet(const struct verbs_peer *peer)
{
	if (sm_state(&peer->sm) < VERBS_PEER_ENDING)
		return false;
	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (sm_state(&peer->qps[i].sm) != VERBS_QP_DEAD)
			return false;
	return true;
}

static bool peer_invariant(const struct sm *sm, unsigned int from)
{
	const struct verbs_peer *peer = container_of(sm, const struct verbs_peer, sm);

	(void)from;
	return sm_state(sm) != VERBS_PEER_ENDED ||
	       (verbs_peer_quiet(peer) && list_empty(&peer->xfers) &&
		peer->inflight_bytes == 0);
}

static const struct sm_table peer_table = {
	.name = "verbs peer",
	.states = peer_states,
	.count = ARRAY_LEN(peer_states),
	.invariant = peer_invariant,
};

void verbs_peer_kick(struct verbs_peer *peer)
{
	struct verbs_transport *transport = peer->transport;

	if (list_empty(&peer->ready_link))
		list_push_back(&transport->ready, &peer->ready_link);
	loop_defer(transport->base.env.loop, &transport->run);
}

void verbs_peer_fail(struct verbs_peer *peer, const struct err *err)
{
	if (!peer->failed) {
		peer->failed = true;
		peer->err = *err;
	}
	verbs_peer_kick(peer);
}

void verbs_peer_fail_last(struct verbs_peer *peer)
{
	struct err err;

	err_take(&err);
	verbs_peer_fail(peer, &err);
}

void verbs_peer_bye(struct verbs_peer *peer, const struct err *err)
{
	peer->deaf = true;
	verbs_peer_fail(peer, err);
}

/* ---- ready ---- */

static void find_path(struct verbs_peer *peer)
{
	char *path = peer->base.path;
	size_t size = sizeof(peer->base.path), n;
	uint32_t rails = peer->qp_count < peer->transport->rail_count
				 ? peer->qp_count
				 : peer->transport->rail_count;

	n = (size_t)snprintf(path, size, "verbs");
	for (uint32_t i = 0; i < rails && n < size; i++) {
		uint32_t count = 0;

		for (uint32_t j = 0; j < peer->qp_count; j++)
			count += peer->qps[j].rail == &peer->transport->rails[i];
		if (count)
			n += (size_t)snprintf(path + n, size - n, " %s x%u",
					      peer->transport->rails[i].name, count);
	}
}

static void forget_token(struct verbs_peer *peer)
{
	if (peer->waiting)
		strmap_remove_bytes(&peer->transport->tokens, peer->token_in,
				    sizeof(peer->token_in));
	peer->waiting = false;
}

static void become_ready(struct verbs_peer *peer)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;

	forget_token(peer); /* it lets nobody in twice */
	find_path(peer);
	sm_move(&peer->sm, VERBS_PEER_READY);
	peer->base.ready = true;
	for (uint32_t i = 0; i < peer->qp_count; i++)
		verbs_qp_activate(&peer->qps[i]); /* what came early was left there */
	log_debug("verbs", peer->name, "peer ready", "path=\"%s\"", peer->base.path);
	up->on_peer_ready(up->owner, (struct xp_peer *)peer);
}

/* ---- deadlines ---- */

void verbs_peer_watch(struct verbs_peer *peer, uint64_t deadline_ns)
{
	uint64_t now = loop_now_ns(peer->timer.loop);

	if (loop_timer_running(&peer->timer) && peer->timer.at_ns <= deadline_ns)
		return;
	if (loop_timer_start(&peer->timer, deadline_ns > now ? deadline_ns - now : 0) < 0)
		verbs_peer_fail_last(peer); /* no fence without its clock */
}

static void watch_dial(struct verbs_peer *peer, uint64_t now)
{
	struct err err;

	if (!peer->dial || sm_state(&peer->sm) != VERBS_PEER_OPENING)
		return;
	if (now < peer->dial_deadline_ns) {
		verbs_dial_elsewhere(peer, now);
		if (peer->dial_again_ns && now >= peer->dial_again_ns) {
			peer->dial_again_ns = 0;
			verbs_dial(peer);
		}
		verbs_peer_watch(peer, peer->dial_again_ns ? peer->dial_again_ns
				       : peer->dial_deadline_ns < now + LOOK_NS
					       ? peer->dial_deadline_ns
					       : now + LOOK_NS);
		return;
	}
	if (peer->dial_err.code == ERR_OK)
		err_set(&err, ERR_TIMEOUT, "verbs: no connection to %s in time",
			peer->name);
	else
		err = peer->dial_err;
	verbs_peer_fail(peer, &err);
}

static void watch_transfers(struct verbs_peer *peer, uint64_t now)
{
	uint64_t next = UINT64_MAX;
	struct verbs_xfer *xfer;
	struct err err;

	list_foreach(xfer, &peer->xfers, link) {
		if (sm_state(&xfer->sm) != VERBS_XFER_STOPPING || xfer->finishing)
			continue;
		if (xfer->deadline_ns <= now) {
			err_set(&err, ERR_FENCE,
				"verbs: a stopped transfer with %s was not still after %" PRIu64
				" ms: its queue pairs are reset",
				peer->name, peer->transport->fence_ns / LOOP_NS_PER_MS);
			verbs_peer_fail(peer, &err);
			return;
		}
		if (xfer->deadline_ns < next)
			next = xfer->deadline_ns;
	}
	if (next != UINT64_MAX)
		verbs_peer_watch(peer, next);
}

/* Who only receives hears nothing when the other end is gone: while there are
 * transfers, knock. */
static void watch_alive(struct verbs_peer *peer, uint64_t now)
{
	if (sm_state(&peer->sm) != VERBS_PEER_READY || list_empty(&peer->xfers)) {
		peer->knock_ns = 0;
		return;
	}
	if (now >= peer->knock_ns) {
		for (uint32_t i = 0; i < peer->qp_count && peer->knock_ns; i++)
			verbs_qp_knock(&peer->qps[i]);
		peer->knock_ns = now + KNOCK_NS;
	}
	verbs_peer_watch(peer, peer->knock_ns);
}

static void watch_progress(struct verbs_peer *peer, uint64_t now)
{
	if (list_empty(&peer->movers)) {
		peer->progress_ns = 0;
		return;
	}
	if (now >= peer->progress_ns) {
		if (peer->progress_ns)
			verbs_xfer_progress(peer);
		peer->progress_ns = now + PROGRESS_NS;
	}
	verbs_peer_watch(peer, peer->progress_ns);
}

static void watch_dying(struct verbs_peer *peer, uint64_t now)
{
	for (uint32_t i = 0; i < peer->qp_count; i++) {
		struct verbs_qp *qp = &peer->qps[i];

		if (sm_state(&qp->sm) != VERBS_QP_DYING)
			continue;
		if (qp->die_deadline_ns <= now)
			verbs_qp_bury(qp);
		else
			verbs_peer_watch(peer, qp->die_deadline_ns);
	}
}

static void on_timer(struct loop_timer *timer)
{
	struct verbs_peer *peer = container_of(timer, struct verbs_peer, timer);
	uint64_t now = loop_now_ns(timer->loop);

	if (verbs_peer_live(peer)) {
		watch_dial(peer, now);
		watch_transfers(peer, now);
		watch_progress(peer, now);
		watch_alive(peer, now);
	} else if (sm_state(&peer->sm) == VERBS_PEER_FLUSHING) {
		if (now < peer->flush_deadline_ns)
			verbs_peer_watch(peer, peer->flush_deadline_ns);
		verbs_peer_kick(peer);
	} else if (sm_state(&peer->sm) == VERBS_PEER_ENDING) {
		watch_dying(peer, now);
	}
}

/* ---- the end ---- */

/* Closed in peace, unless it failed before. */
static void set_closed(struct verbs_peer *peer)
{
	if (!peer->failed)
		err_set(&peer->err, ERR_PEER, "verbs: connection to %s closed", peer->name);
	peer->failed = true;
	peer->base.ready = false;
}

static void stop_transfers(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer;

	list_foreach_safe(xfer, &peer->xfers, link)
		verbs_xfer_stop(xfer, &peer->err);
}

static void begin_end(struct verbs_peer *peer)
{
	set_closed(peer);
	sm_move(&peer->sm, VERBS_PEER_ENDING);
	forget_token(peer);
	if (!peer->close_asked)
		log_debug("verbs", peer->name, "peer lost", "why=\"%s\"", peer->err.text);
	loop_timer_stop(&peer->timer); /* fences are decided */
	stop_transfers(peer);
	verbs_frames_drop(peer);
	verbs_xfer_drop_partial(peer);
	for (uint32_t i = 0; i < peer->qp_count; i++)
		verbs_qp_kill(&peer->qps[i]);
	verbs_peer_kick(peer);
}

static void begin_flush(struct verbs_peer *peer)
{
	struct verbs_frame frame = {.type = VERBS_BYE};
	cleanup_free struct verbs_out *out = verbs_out_new();
	struct err err;

	err_set(&err, ERR_PEER, "verbs: the remote daemon closed the connection%s%.200s",
		peer->failed ? ": " : "", peer->failed ? peer->err.text : "");
	set_closed(peer);
	sm_move(&peer->sm, VERBS_PEER_FLUSHING);
	stop_transfers(peer);
	if (out && !peer->deaf)
		verbs_send(peer, mem_steal(out), &frame, &err);
	else
		peer->bye_out = true;
	peer->flush_deadline_ns = loop_now_ns(peer->timer.loop) + FLUSH_NS;
	verbs_peer_watch(peer, peer->flush_deadline_ns);
	verbs_peer_kick(peer);
}

static void peer_free(struct verbs_peer *peer)
{
	loop_timer_stop(&peer->timer);
	forget_token(peer);
	list_remove(&peer->ready_link);
	list_remove(&peer->link);
	for (uint32_t i = 0; i < peer->qp_count; i++)
		verbs_qp_kill(&peer->qps[i]); /* of one that was never opened */
	if (peer->buffer_mr)
		peer->transport->lib->dereg_mr(peer->buffer_mr);
	mem_free(peer->buffers);
	mem_free(peer->qps);
	idmap_fini(&peer->ops);
	idmap_fini(&peer->inbounds);
	mem_free(peer);
}

/* The farewell has left when its buffer is back: the peer's adapter has it. */
static bool is_flushed(const struct verbs_peer *peer)
{
	return peer->bye_out && peer->qps[0].sent_count == 0;
}

/* May free the peer. */
static void settle(struct verbs_peer *peer)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;
	void (*on_closed)(void *arg) = peer->on_closed;
	void *arg = peer->on_closed_arg;

	if (sm_state(&peer->sm) == VERBS_PEER_FLUSHING &&
	    (is_flushed(peer) || loop_now_ns(peer->timer.loop) >= peer->flush_deadline_ns ||
	     sm_state(&peer->qps[0].sm) != VERBS_QP_UP)) {
		begin_end(peer);
		return;
	}
	if (sm_state(&peer->sm) == VERBS_PEER_ENDING && verbs_peer_quiet(peer) &&
	    list_empty(&peer->xfers)) {
		loop_timer_stop(&peer->timer);
		sm_move(&peer->sm, VERBS_PEER_ENDED);
	}
	if (sm_state(&peer->sm) != VERBS_PEER_ENDED)
		return;
	if (peer->close_asked) {
		peer_free(peer);
		on_closed(arg);
	} else if (!peer->told) {
		peer->told = true;
		up->on_peer_lost(up->owner, (struct xp_peer *)peer, &peer->err);
	}
}

/* ---- the step ---- */

static void end_quiet(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer;

	if (sm_state(&peer->sm) != VERBS_PEER_ENDING || !verbs_peer_quiet(peer))
		return;
	list_foreach_safe(xfer, &peer->xfers, link)
		verbs_xfer_check(xfer);
}

void verbs_peer_step(struct verbs_peer *peer)
{
	struct list *link;

	if (sm_state(&peer->sm) == VERBS_PEER_OPENING && peer->qp_count &&
	    peer->qps_up == peer->qp_count && !peer->failed)
		become_ready(peer);
	if (peer->failed && sm_state(&peer->sm) == VERBS_PEER_READY)
		begin_flush(peer);
	else if (peer->failed && sm_state(&peer->sm) == VERBS_PEER_OPENING)
		begin_end(peer);
	end_quiet(peer);
	while ((link = list_pop_front(&peer->finished)))
		verbs_xfer_tell(list_entry(link, struct verbs_xfer, queue_link));
	if (verbs_peer_live(peer) && sm_state(&peer->sm) == VERBS_PEER_READY) {
		verbs_xfer_grant(peer);
		verbs_xfer_pump(peer);
		verbs_frame_pump(peer);
		verbs_move_pump(peer);
		verbs_frame_pump(peer); /* the marks of what was just moved */
		if (!peer->progress_ns && !list_empty(&peer->movers))
			watch_progress(peer, loop_now_ns(peer->timer.loop));
		if (!peer->knock_ns && !list_empty(&peer->xfers))
			watch_alive(peer, loop_now_ns(peer->timer.loop));
	} else if (sm_state(&peer->sm) == VERBS_PEER_FLUSHING) {
		verbs_frame_pump(peer);
	}
	settle(peer);
}

/* ---- open and close ---- */

static void lists_init(struct verbs_peer *peer)
{
	list_init(&peer->link);
	list_init(&peer->ready_link);
	list_init(&peer->out);
	list_init(&peer->xfers);
	list_init(&peer->queued);
	list_init(&peer->finished);
	list_init(&peer->movers);
	list_init(&peer->ungranted);
	idmap_init(&peer->ops);
	idmap_init(&peer->inbounds);
}

static void peer_init(struct verbs_peer *peer, struct verbs_transport *transport,
		      const struct xp_peer_args *args)
{
	peer->base.transport = &transport->base;
	peer->base.owner = args->owner;
	peer->transport = transport;
	memcpy(peer->token_in, args->token_in, sizeof(peer->token_in));
	memcpy(peer->token_out, args->token_out, sizeof(peer->token_out));
	for (int i = 0; i < 8; i++)
		snprintf(peer->name + 2 * i, 3, "%02x", args->instance[i]);
	peer->dial = args->dial;
	peer->send_free = UINT32_MAX >> (32 - VERBS_SEND_BUFFERS);
	peer->next_id = 1;
	peer->window_bytes = WINDOW_START < transport->window_max ? WINDOW_START
								   : transport->window_max;
	/* the clock, not the turn: opening may have taken a good part of it */
	peer->dial_deadline_ns = loop_clock_ns(transport->base.env.loop) + DIAL_NS;
	lists_init(peer);
	loop_timer_init(&peer->timer, transport->base.env.loop, on_timer);
	sm_init(&peer->sm, &peer_table, VERBS_PEER_OPENING);
}

int verbs_peer_buffers(struct verbs_peer *peer, const struct verbs_device *device)
{
	const struct verbs_lib *lib = peer->transport->lib;

	if (peer->buffer_mr && peer->buffer_mr->pd != device->pd) {
		lib->dereg_mr(peer->buffer_mr); /* it dials over another rail now */
		peer->buffer_mr = NULL;
	}
	if (!peer->buffer_mr)
		peer->buffer_mr = lib->reg_mr(device->pd, peer->buffers, BUFFERS_BYTES,
					      IBV_ACCESS_LOCAL_WRITE);
	if (!peer->buffer_mr)
		return err_raise_errno(errno, "verbs: register the frames' memory");
	return 0;
}

static int plan_dial(struct verbs_peer *peer, const struct xp_peer_args *args)
{
	struct verbs_transport *transport = peer->transport;
	struct verbs_address *address = &peer->address;
	uint32_t rails, each;
	int r = verbs_address_get(args->address, args->address_len, address);

	if (r < 0)
		return err_pass(r);
	rails = address->rails < transport->rail_count ? address->rails
						       : transport->rail_count;
	each = address->qps < transport->qps ? address->qps : transport->qps;
	while (each > 1 && each * rails > VERBS_QPS_MAX)
		each--;
	peer->qps = mem_calloc((size_t)rails * each, sizeof(*peer->qps));
	if (!peer->qps)
		return err_pass(-ENOMEM);
	peer->qp_count = rails * each;
	peer->rails = rails;
	for (uint32_t i = 0; i < peer->qp_count; i++) {
		verbs_qp_init(&peer->qps[i], peer, i);
		peer->qps[i].rail = &transport->rails[i % rails];
	}
	return 0;
}

static int wait_for_dial(struct verbs_peer *peer)
{
	int r = strmap_put_bytes(&peer->transport->tokens, peer->token_in,
				 sizeof(peer->token_in), peer);

	peer->waiting = r == 0;
	return err_pass(r);
}

int verbs_peer_open(struct transport *base, const struct xp_peer_args *args,
		    struct xp_peer **peer_p)
{
	struct verbs_transport *transport = container_of(base, struct verbs_transport, base);
	struct verbs_peer *peer;
	int r;

	if (args->self)
		return err_raise(ERR_REQUIRE, "verbs: no connection to this daemon itself");
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	peer_init(peer, transport, args);
	peer->buffers = mem_zalloc(BUFFERS_BYTES);
	r = peer->buffers ? 0 : -ENOMEM;
	if (r == 0)
		r = args->dial ? plan_dial(peer, args) : wait_for_dial(peer);
	if (r < 0) {
		peer_free(peer);
		return err_pass(r);
	}
	list_push_back(&transport->peers, &peer->link);
	if (peer->dial) {
		verbs_dial(peer);
		verbs_peer_watch(peer, loop_now_ns(transport->base.env.loop) + LOOK_NS);
	}
	*peer_p = (struct xp_peer *)peer;
	return 0;
}

void verbs_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg)
{
	struct verbs_peer *peer = (struct verbs_peer *)base;

	assert(!peer->close_asked);
	peer->close_asked = true;
	peer->on_closed = on_closed;
	peer->on_closed_arg = arg;
	if (sm_state(&peer->sm) == VERBS_PEER_READY)
		begin_flush(peer);
	else if (sm_state(&peer->sm) == VERBS_PEER_OPENING)
		begin_end(peer);
	verbs_peer_kick(peer);
}
