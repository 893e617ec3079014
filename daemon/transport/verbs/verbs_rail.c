/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Loss of one of several rails.
 *
 * A rail is lost when a queue pair on it has no path to the peer any more: its retries
 * are used up, its port is down, the other side has taken it down. Then this side's queue
 * pairs on it are put into ERR and, when all requests posted on them have been flushed,
 * destroyed; only then RAIL ("mine are dead") is sent over queue pair 0. A side that
 * receives it for a rail that it has in use gives it up as well. A rail is settled when
 * both sides' queue pairs are dead.
 *
 * Until then no transfer with bytes on it succeeds or ends, and none of these bytes are
 * posted again: the responder's adapter might accept packets of the old queue pair, and
 * write old bytes over another transfer's. Transfers without bytes there continue.
 *
 * A mover then posts again, over the queue pairs that are left, from the first byte that
 * the lost rail did not confirm: the same bytes of the same transfer to the same places,
 * some of them a second time. Confirmed bytes have landed: the responder's queue pair
 * died in good order, its flushed receives behind the last write. A transfer that stops
 * posts no bytes, only its last messages.
 *
 * Marks. Those on the lost queue pairs will not arrive, so those of all writes that were
 * granted and not answered are sent again, in another generation: one more for each RAIL.
 * The receiver increments it when it sends RAIL, the mover when it receives it; both
 * messages, and GO and DONE, use queue pair 0 in order, so they mean the same transfers.
 * Marks of the previous generation may arrive over other queue pairs: they are ignored
 * (verbs_xfer.c), and receives for them are there (verbs_qp.c).
 *
 * Where any of that is in doubt the connection ends as if there were no other rail, and
 * its rooms fail as retryable: a rail that carries queue pair 0, faults other than of the
 * path, an adapter that flushes nothing, more lost rails than spare receives,
 * `fence_timeout` without both sides' end.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <inttypes.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

static uint32_t qps_on(const struct verbs_peer *peer, uint32_t rails)
{
	uint32_t bits = 0;

	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (rails & 1u << peer->qps[i].rail->index)
			bits |= 1u << i;
	return bits;
}

static uint32_t unsettled(const struct verbs_peer *peer)
{
	return peer->rails_lost & ~(peer->rails_dead & peer->rails_reported);
}

uint32_t verbs_rail_open(const struct verbs_peer *peer)
{
	return peer->rails_lost ? qps_on(peer, unsettled(peer)) : 0;
}

/* ---- lost ---- */

/* Is there a path without it, and are there receives for another round of marks? */
static bool can_do_without(const struct verbs_peer *peer, uint32_t rail)
{
	uint32_t lost = peer->rails_lost | 1u << rail;
	uint32_t rounds = 1 + (uint32_t)__builtin_popcount(lost);

	if (sm_state(&peer->net.sm) != NET_PEER_READY || !net_peer_live(&peer->net) ||
	    peer->qps[0].rail->index == rail)
		return false;
	for (uint32_t i = 1; i < peer->qp_count; i++)
		if (!(lost & 1u << peer->qps[i].rail->index) &&
		    peer->qps[i].rq_depth < rounds * VERBS_GRANTS)
			return false;
	return true;
}

static void verbs_rail_lose(struct verbs_peer *peer, const struct verbs_rail *rail,
			    const struct err *why)
{
	uint64_t now = loop_now_ns(peer->net.timer.loop);

	log_info("verbs", peer->net.name, "rail lost", "rail=%s why=\"%s\"", rail->name,
		 why->text);
	peer->rails_lost |= 1u << rail->index;
	peer->rails_busy = true;
	peer->rails_deadline_ns = now + peer->net.transport->fence_ns;
	net_peer_watch(&peer->net, peer->rails_deadline_ns);
	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (peer->qps[i].rail == rail)
			verbs_qp_kill(&peer->qps[i]);
	net_peer_kick(&peer->net);
}

bool verbs_rail_fail(struct verbs_qp *qp, const struct err *err)
{
	struct verbs_peer *peer = qp->peer;
	uint32_t rail = qp->rail->index;
	struct verbs_out *out;

	if (peer->rails_lost & 1u << rail)
		return true;
	out = can_do_without(peer, rail) ? verbs_out_new() : NULL;
	if (!out) {
		err_clear();
		net_peer_fail(&peer->net, err);
		return false;
	}
	peer->rail_out[rail] = out;
	verbs_rail_lose(peer, qp->rail, err);
	return true;
}

void verbs_rails_forget(struct verbs_peer *peer)
{
	for (uint32_t i = 0; i < VERBS_RAILS_MAX; i++)
		mem_free(mem_steal(peer->rail_out[i]));
}

void verbs_rail_watch(struct verbs_peer *peer, uint64_t now)
{
	struct err err;

	if (!unsettled(peer))
		return;
	if (now < peer->rails_deadline_ns) {
		net_peer_watch(&peer->net, peer->rails_deadline_ns);
		return;
	}
	err_set(&err, ERR_FENCE,
		"verbs: queue pairs to %s on a lost rail were not reset after %" PRIu64
		" ms; closing the connection",
		peer->net.name, peer->net.transport->fence_ns / LOOP_NS_PER_MS);
	net_peer_fail(&peer->net, &err);
}

/* ---- the local ones are dead ---- */

static bool all_dead(const struct verbs_peer *peer, uint32_t rail)
{
	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (peer->qps[i].rail->index == rail &&
		    sm_state(&peer->qps[i].sm) != VERBS_QP_DEAD)
			return false;
	return true;
}

/* Transfers with unanswered last messages send them again. */
static void next_round(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;

	xfer->generation = (uint16_t)((xfer->generation + 1) % VERBS_GENERATIONS);
	peer->generations[xfer->slot] =
		(uint16_t)((xfer->generation + 1) % VERBS_GENERATIONS);
	xfer->rounds++;
	xfer->marks = 0;
	xfer->marks_due = 0;
	xfer->marks_aborted = false;
}

static void say_dead(struct verbs_peer *peer, uint32_t rail)
{
	struct verbs_frame frame = {.type = VERBS_RAIL, .slot = rail};
	struct net_xfer *net;

	list_foreach(net, &peer->net.xfers, link) {
		struct verbs_xfer *xfer = container_of(net, struct verbs_xfer, net);

		if (!net->ours && xfer->slot < VERBS_GRANTS)
			next_round(xfer);
	}
	peer->rails_dead |= 1u << rail;
	verbs_send(peer, mem_steal(peer->rail_out[rail]), &frame, NULL);
	verbs_peer_path(peer);
}

/* ---- the peer's are ---- */

static void mark_again(struct verbs_xfer *xfer)
{
	if (!xfer->go || xfer->net.answered)
		return;
	if (xfer->net.kind == XP_WRITE) {
		xfer->generation = (uint16_t)((xfer->generation + 1) % VERBS_GENERATIONS);
		xfer->ended = false;
		xfer->again = true;
	} else if (!xfer->ended && !xfer->pack) { /* packed: over queue pair 0 */
		xfer->again = true;
	}
}

int verbs_rail_reported(struct verbs_peer *peer, const struct verbs_frame *frame)
{
	uint32_t rail = frame->slot, bit = 1u << (rail % 32);
	struct verbs_qp *qp = NULL;
	struct net_xfer *net;
	struct err err;

	for (uint32_t i = 1; i < peer->qp_count; i++)
		if (peer->qps[i].rail->index == rail)
			qp = &peer->qps[i];
	if (!qp || qp->rail == peer->qps[0].rail || peer->rails_reported & bit)
		return err_raise(ERR_PROTO, "verbs: the loss of rail %u", rail);
	err_set(&err, ERR_PEER, "verbs: closed by %s", peer->net.name);
	if (!verbs_rail_fail(qp, &err))
		return 0;
	peer->rails_reported |= bit;
	list_foreach(net, &peer->net.xfers, link)
		if (net->ours)
			mark_again(container_of(net, struct verbs_xfer, net));
	net_peer_kick(&peer->net);
	return 0;
}

/* ---- both are ---- */

/* True: nothing of it is left to do. */
static bool verbs_rail_settle(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;
	uint32_t lost = qps_on(peer, peer->rails_lost);

	if (xfer->again && xfer->used & verbs_rail_open(peer))
		return false;
	/* requests counted from the start must have ended */
	if (xfer->again && xfer->rewind != UINT64_MAX && xfer->busy)
		return false;
	if (xfer->again && verbs_move_again(xfer, lost) < 0)
		net_peer_fail_last(&peer->net);
	net_xfer_check(&xfer->net);
	return true;
}

void verbs_rail_step(struct verbs_peer *peer)
{
	struct net_xfer *net;
	bool busy = false;

	if (!peer->rails_busy)
		return;
	/* finished transfers are reported first */
	for (uint32_t i = 0; i < VERBS_RAILS_MAX && list_empty(&peer->net.finished); i++)
		if (peer->rails_lost & ~peer->rails_dead & 1u << i && all_dead(peer, i))
			say_dead(peer, i);
	list_foreach(net, &peer->net.xfers, link)
		busy |= !verbs_rail_settle(container_of(net, struct verbs_xfer, net));
	peer->rails_busy = busy || unsettled(peer);
	if (!peer->rails_busy)
		log_warn("verbs", peer->net.name, "continuing without a lost rail",
			 "path=\"%s\"", peer->net.base.path);
}
