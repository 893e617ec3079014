/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection of the verbs backend: queue pairs to one peer, on one or several
 * rails.
 *
 * It is ready when every queue pair is up. It ends in three steps. FLUSHING: the BYE with
 * its reason is sent, if queue pair 0 still accepts it. ENDING: every queue pair is put
 * into ERR and dies (verbs_qp.c); until the last one is dead no transfer may be reported,
 * because until then the peer's adapter may write memory that it has keys for. Only then
 * the transfers end, and the daemon is notified. A fence that is not proven in time takes
 * this path too: the owner of the written memory ends its own queue pairs and needs no
 * message for it.
 *
 * One of several rails may be lost before the connection: verbs_rail.c.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <errno.h>
#include <stdio.h>

#include "daemon/base/mem.h"

#define DIAL_NS (10 * LOOP_NS_PER_S)
#define FLUSH_NS (200 * LOOP_NS_PER_MS)
#define PROGRESS_NS (100 * LOOP_NS_PER_MS)
#define KNOCK_NS (250 * LOOP_NS_PER_MS)
#define WINDOW_START (8u << 20)
#define BUFFERS_BYTES ((size_t)(VERBS_DEPTH + VERBS_SEND_BUFFERS) * VERBS_MSG_BYTES)
#define LOOK_NS (500 * LOOP_NS_PER_MS) /* at connections that take their time */

bool verbs_peer_quiet(const struct verbs_peer *peer)
{
	if (sm_state(&peer->net.sm) < NET_PEER_ENDING)
		return false;
	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (sm_state(&peer->qps[i].sm) != VERBS_QP_DEAD)
			return false;
	return true;
}

static bool verbs_peer_invariant(const struct sm *sm, unsigned int from)
{
	const struct verbs_peer *peer = container_of(sm, const struct verbs_peer, net.sm);

	(void)from;
	return sm_state(sm) != NET_PEER_ENDED ||
	       (verbs_peer_quiet(peer) && list_empty(&peer->net.xfers) &&
		peer->inflight_bytes == 0);
}

const struct sm_table verbs_peer_table = {
	.name = "verbs peer",
	.states = net_peer_states,
	.count = NET_PEER_STATES,
	.invariant = verbs_peer_invariant,
};

static struct verbs_peer *verbs_peer_of(struct net_peer *net)
{
	return container_of(net, struct verbs_peer, net);
}

void verbs_peer_bye(struct verbs_peer *peer, const struct err *err)
{
	peer->net.bye_came = true;
	net_peer_fail(&peer->net, err);
}

/* ---- ready ---- */

void verbs_peer_path(struct verbs_peer *peer)
{
	char *path = peer->net.base.path;
	size_t size = sizeof(peer->net.base.path), n;
	uint32_t rails = peer->qp_count < peer->transport->rail_count
				 ? peer->qp_count
				 : peer->transport->rail_count;

	n = (size_t)snprintf(path, size, "verbs");
	for (uint32_t i = 0; i < rails && n < size; i++) {
		uint32_t count = 0;

		for (uint32_t j = 0; j < peer->qp_count; j++)
			count += peer->qps[j].rail == &peer->transport->rails[i] &&
				 sm_state(&peer->qps[j].sm) == VERBS_QP_UP;
		if (count)
			n += (size_t)snprintf(path + n, size - n, " %s x%u",
					      peer->transport->rails[i].name, count);
	}
}

static void forget_token(struct verbs_peer *peer)
{
	if (peer->waiting)
		strmap_remove_bytes(&peer->transport->tokens, peer->net.token_in,
				    sizeof(peer->net.token_in));
	peer->waiting = false;
}

static void become_ready(struct verbs_peer *peer)
{
	forget_token(peer); /* it serves no second connection */
	verbs_peer_path(peer);
	sm_move(&peer->net.sm, NET_PEER_READY);
	for (uint32_t i = 0; i < peer->qp_count; i++)
		verbs_qp_activate(&peer->qps[i]); /* early frames were left there */
	net_peer_ready(&peer->net);
}

/* ---- deadlines ---- */

static void watch_dial(struct verbs_peer *peer, uint64_t now)
{
	char place[64];
	struct err err;

	if (!peer->net.dial || sm_state(&peer->net.sm) != NET_PEER_OPENING)
		return;
	if (now < peer->dial_deadline_ns) {
		verbs_dial_elsewhere(peer, now);
		if (peer->dial_again_ns && now >= peer->dial_again_ns) {
			peer->dial_again_ns = 0;
			verbs_dial(peer);
		}
		net_peer_watch(&peer->net, peer->dial_again_ns ? peer->dial_again_ns
					   : peer->dial_deadline_ns < now + LOOK_NS
						   ? peer->dial_deadline_ns
						   : now + LOOK_NS);
		return;
	}
	verbs_address_text(&peer->address.rail[0], place, sizeof(place));
	err_set(&err, ERR_TIMEOUT, "no data connection to %s (verbs_rails): %s", place,
		peer->dial_err.code == ERR_OK ? "timed out" : peer->dial_err.text);
	net_peer_fail(&peer->net, &err);
}

/* A side that only receives does not notice when the other end has ended: while there are
 * transfers, probe it. */
static void watch_alive(struct verbs_peer *peer, uint64_t now)
{
	if (sm_state(&peer->net.sm) != NET_PEER_READY || list_empty(&peer->net.xfers)) {
		peer->knock_ns = 0;
		return;
	}
	if (now >= peer->knock_ns) {
		for (uint32_t i = 0; i < peer->qp_count && peer->knock_ns; i++)
			verbs_qp_knock(&peer->qps[i]);
		peer->knock_ns = now + KNOCK_NS;
	}
	net_peer_watch(&peer->net, peer->knock_ns);
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
	net_peer_watch(&peer->net, peer->progress_ns);
}

static void watch_dying(struct verbs_peer *peer, uint64_t now)
{
	for (uint32_t i = 0; i < peer->qp_count; i++) {
		struct verbs_qp *qp = &peer->qps[i];

		if (sm_state(&qp->sm) != VERBS_QP_DYING)
			continue;
		if (qp->die_deadline_ns <= now)
			verbs_qp_reap(qp);
		else
			net_peer_watch(&peer->net, qp->die_deadline_ns);
	}
}

static void verbs_peer_on_timer(struct loop_timer *timer)
{
	struct verbs_peer *peer = container_of(timer, struct verbs_peer, net.timer);
	uint64_t now = loop_now_ns(timer->loop);

	if (net_peer_live(&peer->net)) {
		watch_dial(peer, now);
		net_peer_watch_fences(&peer->net, now);
		watch_progress(peer, now);
		watch_alive(peer, now);
		verbs_rail_watch(peer, now);
	} else if (sm_state(&peer->net.sm) == NET_PEER_FLUSHING) {
		if (now < peer->net.flush_deadline_ns)
			net_peer_watch(&peer->net, peer->net.flush_deadline_ns);
		net_peer_kick(&peer->net);
	} else if (sm_state(&peer->net.sm) == NET_PEER_ENDING) {
		watch_dying(peer, now);
	}
}

/* ---- the end ---- */

static void verbs_peer_begin_end(struct verbs_peer *peer)
{
	forget_token(peer);
	net_peer_end(&peer->net);
	verbs_frames_drop(peer);
	verbs_xfer_drop_partial(peer);
	for (uint32_t i = 0; i < peer->qp_count; i++)
		verbs_qp_kill(&peer->qps[i]);
	net_peer_kick(&peer->net);
}

static void verbs_peer_begin_flush(struct verbs_peer *peer)
{
	struct verbs_frame frame = {.type = VERBS_BYE};
	cleanup_free struct verbs_out *out = verbs_out_new();
	struct err err;

	net_peer_flush(&peer->net, FLUSH_NS, &err);
	if (out && !peer->net.bye_came)
		verbs_send(peer, mem_steal(out), &frame, &err);
	else
		peer->bye_out = true;
	net_peer_kick(&peer->net);
}

void verbs_peer_free(struct net_peer *net)
{
	struct verbs_peer *peer = verbs_peer_of(net);

	net_peer_fini(net);
	forget_token(peer);
	for (uint32_t i = 0; i < peer->qp_count; i++)
		verbs_qp_kill(&peer->qps[i]); /* of one that was never opened */
	verbs_pack_peer_free(peer);
	verbs_rails_forget(peer);
	if (peer->buffer_mr)
		peer->transport->lib->dereg_mr(peer->buffer_mr);
	mem_free(peer->buffers);
	mem_free(peer->qps);
	mem_free(peer);
}

/* ---- the step ---- */

static void end_quiet(struct verbs_peer *peer)
{
	struct net_xfer *xfer;

	if (sm_state(&peer->net.sm) != NET_PEER_ENDING || !verbs_peer_quiet(peer))
		return;
	list_foreach_safe(xfer, &peer->net.xfers, link)
		net_xfer_check(xfer);
}

static void pump(struct verbs_peer *peer)
{
	uint64_t now = loop_now_ns(peer->net.timer.loop);

	verbs_rail_step(peer);
	verbs_xfer_grant(peer);
	verbs_pack_feed(peer);
	net_xfer_pump(&peer->net);
	verbs_frame_pump(peer);
	verbs_move_pump(peer);
	verbs_frame_pump(peer); /* the marks of the bytes just moved */
	if (!peer->progress_ns && !list_empty(&peer->movers))
		watch_progress(peer, now);
	if (!peer->knock_ns && !list_empty(&peer->net.xfers))
		watch_alive(peer, now);
}

void verbs_peer_step(struct net_peer *net)
{
	struct verbs_peer *peer = verbs_peer_of(net);

	if (sm_state(&net->sm) == NET_PEER_OPENING && peer->qp_count &&
	    peer->qps_up == peer->qp_count && !net->failed)
		become_ready(peer);
	if (net->failed && sm_state(&net->sm) == NET_PEER_READY)
		verbs_peer_begin_flush(peer);
	else if (net->failed && sm_state(&net->sm) == NET_PEER_OPENING)
		verbs_peer_begin_end(peer);
	end_quiet(peer);
	net_peer_tell(net);
	if (net_peer_live(net) && sm_state(&net->sm) == NET_PEER_READY)
		pump(peer);
	else if (sm_state(&net->sm) == NET_PEER_FLUSHING)
		verbs_frame_pump(peer);
	/* BYE has left when its buffer is back: the peer's adapter has it. */
	if (sm_state(&net->sm) == NET_PEER_FLUSHING &&
	    ((peer->bye_out && peer->qps[0].sent_count == 0) ||
	     loop_now_ns(net->timer.loop) >= net->flush_deadline_ns ||
	     sm_state(&peer->qps[0].sm) != VERBS_QP_UP)) {
		verbs_peer_begin_end(peer);
		return;
	}
	if (sm_state(&net->sm) == NET_PEER_ENDING && verbs_peer_quiet(peer) &&
	    list_empty(&net->xfers)) {
		loop_timer_stop(&net->timer);
		sm_move(&net->sm, NET_PEER_ENDED);
	}
	net_peer_settle(net);
}

/* ---- open and close ---- */

static void verbs_peer_init(struct verbs_peer *peer, struct verbs_transport *transport,
			    const struct xp_peer_args *args)
{
	net_peer_init(&peer->net, &transport->net, args, verbs_peer_on_timer);
	peer->transport = transport;
	peer->send_free = UINT32_MAX >> (32 - VERBS_SEND_BUFFERS);
	peer->window_bytes = WINDOW_START < transport->window_max ? WINDOW_START
								  : transport->window_max;
	/* the clock, not the turn: opening may have taken a good part of it */
	peer->dial_deadline_ns = loop_clock_ns(transport->net.base.env.loop) +
				 net_connect_ns(transport->net.base.env.config, DIAL_NS);
	list_init(&peer->out);
	list_init(&peer->movers);
	list_init(&peer->ungranted);
	list_init(&peer->unslotted);
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
	each = address->qps < VERBS_RAIL_QPS ? address->qps : VERBS_RAIL_QPS;
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
	int r = strmap_put_bytes(&peer->transport->tokens, peer->net.token_in,
				 sizeof(peer->net.token_in), peer);

	peer->waiting = r == 0;
	return err_pass(r);
}

int verbs_peer_open(struct transport *base, const struct xp_peer_args *args,
		    struct xp_peer **peer_p)
{
	struct verbs_transport *transport =
		container_of(base, struct verbs_transport, net.base);
	struct verbs_peer *peer;
	int r;

	if (args->self)
		return err_raise(ERR_REQUIRE,
				 "verbs: no connection to this daemon itself");
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	verbs_peer_init(peer, transport, args);
	peer->buffers = mem_zalloc(BUFFERS_BYTES);
	r = peer->buffers ? 0 : -ENOMEM;
	if (r == 0)
		r = args->dial ? plan_dial(peer, args) : wait_for_dial(peer);
	if (r < 0) {
		verbs_peer_free(&peer->net);
		return err_pass(r);
	}
	list_push_back(&transport->net.peers, &peer->net.link);
	if (peer->net.dial) {
		verbs_dial(peer);
		net_peer_watch(&peer->net,
			       loop_now_ns(transport->net.base.env.loop) + LOOK_NS);
	}
	*peer_p = (struct xp_peer *)peer;
	return 0;
}

void verbs_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg)
{
	struct verbs_peer *peer = (struct verbs_peer *)base;

	net_peer_close_ask(&peer->net, on_closed, arg);
	if (sm_state(&peer->net.sm) == NET_PEER_READY)
		verbs_peer_begin_flush(peer);
	else if (sm_state(&peer->net.sm) == NET_PEER_OPENING)
		verbs_peer_begin_end(peer);
}
