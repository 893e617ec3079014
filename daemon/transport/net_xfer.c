/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A transfer's life cycle (net.h).
 *
 * Invariants: an op is in peer->xfers from its post to its end and in peer->ops as long
 * as an answer may name it; an inbound in peer->inbounds until its DONE is sent. An op
 * that is over before its answer arrived (the backend knows that none of its bytes can
 * count any more) is reported at once; the rest of it waits only for the answer, without
 * memory of the engine's.
 */
#include "daemon/transport/net.h"

#include <assert.h>
#include <inttypes.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

const struct sm_state net_xfer_states[NET_XFER_STATES] = {
	[NET_XFER_QUEUED] = {"queued", SM_TO(NET_XFER_ASKED) | SM_TO(NET_XFER_STOPPING)},
	[NET_XFER_ASKED] = {"asked", SM_TO(NET_XFER_MOVING) | SM_TO(NET_XFER_STOPPING) |
					     SM_TO(NET_XFER_OVER)},
	[NET_XFER_MOVING] = {"moving", SM_TO(NET_XFER_STOPPING) | SM_TO(NET_XFER_OVER)},
	[NET_XFER_STOPPING] = {"stopping", SM_TO(NET_XFER_OVER)},
	[NET_XFER_OVER] = {"over", 0},
};

static const struct net_ops *ops_of(const struct net_xfer *xfer)
{
	return xfer->peer->transport->ops;
}

/* ---- made and unmade ---- */

void net_xfer_free(struct net_xfer *xfer)
{
	if (!xfer)
		return;
	list_remove(&xfer->link);
	list_remove(&xfer->queue_link);
	ops_of(xfer)->drop_sides(xfer);
	ops_of(xfer)->xfer_free(xfer);
}

static void xfer_freep(struct net_xfer **xfer)
{
	net_xfer_free(*xfer);
}

static int net_xfer_new(struct net_peer *peer, enum xp_kind kind,
			struct net_xfer **xfer_p)
{
	int r = peer->transport->ops->xfer_new(peer, xfer_p);

	if (r < 0)
		return err_pass(r);
	(*xfer_p)->peer = peer;
	(*xfer_p)->kind = kind;
	list_init(&(*xfer_p)->link);
	list_init(&(*xfer_p)->queue_link);
	return 0;
}

/* ---- progress ---- */

bool net_xfer_moved(struct net_xfer *xfer, uint64_t moved, uint64_t first_ns)
{
	uint64_t *moved_p = !xfer->ours ? &xfer->in.moved
			    : xfer->op	? &xfer->op->moved
					: NULL;
	bool first;

	if (!moved_p || moved <= *moved_p)
		return false;
	first = !*moved_p;
	*moved_p = moved;
	if (first && !first_ns)
		first_ns = loop_clock_ns(xfer->peer->timer.loop);
	if (first && xfer->ours && xfer->op->on_first)
		xfer->op->on_first(xfer->op, first_ns);
	else if (first && !xfer->ours && xfer->in.on_first)
		xfer->in.on_first(&xfer->in, first_ns);
	return true;
}

/* ---- stop, over, reported ---- */

void net_xfer_check(struct net_xfer *xfer)
{
	struct net_peer *peer = xfer->peer;

	if (xfer->finishing)
		return;
	if (net_peer_live(peer))
		ops_of(xfer)->speak(xfer);
	if (!ops_of(xfer)->is_over(xfer))
		return;
	xfer->finishing = true;
	list_push_back(&peer->finished, &xfer->queue_link);
	net_peer_kick(peer);
}

void net_xfer_stop(struct net_xfer *xfer, const struct err *err)
{
	struct net_peer *peer = xfer->peer;

	if (xfer->finishing || sm_state(&xfer->sm) >= NET_XFER_STOPPING)
		return;
	xfer->err = *err;
	if (xfer->err.code == ERR_OK)
		err_set(&xfer->err, ERR_CANCELED, "canceled");
	list_remove(&xfer->queue_link);
	sm_move(&xfer->sm, NET_XFER_STOPPING);
	xfer->deadline_ns = loop_now_ns(peer->timer.loop) + peer->transport->fence_ns;
	if (net_peer_live(peer))
		net_peer_watch(peer, xfer->deadline_ns);
	ops_of(xfer)->halt(xfer);
	net_xfer_check(xfer);
}

void net_xfer_stop_last(struct net_xfer *xfer)
{
	struct err err;

	err_take(&err);
	net_xfer_stop(xfer, &err);
}

void net_xfers_stop(struct net_peer *peer)
{
	struct net_xfer *xfer;

	list_foreach_safe(xfer, &peer->xfers, link)
		net_xfer_stop(xfer, &peer->err);
	/* stopped transfers no longer wait for an answer */
	list_foreach_safe(xfer, &peer->xfers, link)
		net_xfer_check(xfer);
}

/* The request's place in the peer's limits is free again. */
static void unask(struct net_xfer *xfer)
{
	if (!xfer->asked || xfer->answered)
		return;
	xfer->answered = true;
	xfer->peer->asked--;
	xfer->peer->asked_bytes -= xfer->asked_bytes;
}

static void forget_op(struct net_xfer *xfer)
{
	unask(xfer);
	idmap_remove(&xfer->peer->ops, xfer->id);
	net_xfer_free(xfer);
}

static void tell_op(struct net_xfer *xfer)
{
	struct xp_op *op = xfer->op;

	/* A transfer that was canceled too late has succeeded, and reports that. */
	if (xfer->answered && !xfer->refused && ops_of(xfer)->is_whole(xfer)) {
		op->result = 0;
		op->err = (struct err){0};
		net_xfer_moved(xfer, xfer->bytes, 0);
	} else {
		op->err = xfer->err;
		op->result = -err_errno(xfer->err.code);
	}
	op->used = xfer->used;
	/* Both pointers, before on_done: the op belongs to its owner again. If an answer
	 * is outstanding, the transfer stays for it, without the memory: its id counts
	 * against the peer's limits until then. */
	op->impl = NULL;
	xfer->op = NULL;
	if (xfer->asked && !xfer->answered && net_peer_live(xfer->peer)) {
		xfer->told = true;
		ops_of(xfer)->drop_sides(xfer);
		list_push_back(&xfer->peer->xfers, &xfer->link);
	} else {
		forget_op(xfer);
	}
	op->on_done(op);
}

static void tell_inbound(struct net_xfer *xfer, bool ok)
{
	const struct xp_callbacks *up = &xfer->peer->transport->base.callbacks;
	bool live = net_peer_live(xfer->peer);
	struct err err = xfer->err;

	idmap_remove(&xfer->peer->inbounds, xfer->id);
	/* DONE is sent before the layer above is notified: messages sent in the callback
	 * must not overtake it. A success that cannot be sent is a failure on both
	 * sides. */
	if (ok && live && ops_of(xfer)->say_done(xfer, NULL) < 0) {
		err_take(&err);
		ok = false;
	}
	if (!ok && live)
		ops_of(xfer)->say_done(xfer, &err);
	if (ok)
		net_xfer_moved(xfer, xfer->bytes, 0);
	xfer->in.used = xfer->used;
	ops_of(xfer)->drop_sides(xfer);
	up->on_inbound_done(up->owner, &xfer->in, ok ? NULL : &err);
	net_xfer_free(xfer);
}

static void net_xfer_tell(struct net_xfer *xfer)
{
	bool ok = sm_state(&xfer->sm) != NET_XFER_STOPPING;

	sm_move(&xfer->sm, NET_XFER_OVER);
	list_remove(&xfer->link);
	if (xfer->ours)
		tell_op(xfer);
	else
		tell_inbound(xfer, ok);
}

void net_peer_tell(struct net_peer *peer)
{
	struct list *link;

	while ((link = list_pop_front(&peer->finished))) {
		net_xfer_tell(list_entry(link, struct net_xfer, queue_link));
		if (list_empty(&peer->finished) || !loop_enough(peer->timer.loop))
			continue;
		net_peer_kick(peer);
		return;
	}
}

void net_xfers_drop(struct net_peer *peer)
{
	struct net_xfer *xfer;

	list_foreach_safe(xfer, &peer->xfers, link)
		if (xfer->told)
			forget_op(xfer);
}

/* ---- ours ---- */

static int post_check(const struct net_peer *peer, const struct xp_op *op)
{
	const char *name = net_name(peer);

	if (!net_peer_live(peer) || !peer->base.ready)
		return err_raise(ERR_PEER, "%s: no connection to %s", name, peer->name);
	if (op->kind != XP_WRITE && op->kind != XP_READ)
		return err_raise(ERR_INVAL, "%s: operation must be WRITE or READ", name);
	if (op->header_len > XP_HEADER_MAX)
		return err_raise(ERR_TOOBIG, "header: %zu bytes (limit %u)",
				 op->header_len, XP_HEADER_MAX);
	return 0;
}

int net_post(struct xp_peer *base, struct xp_op *op)
{
	struct net_peer *peer = (struct net_peer *)base;
	mem_cleanup(xfer_freep) struct net_xfer *xfer = NULL;
	int r;

	r = post_check(peer, op);
	if (r == 0)
		r = net_xfer_new(peer, op->kind, &xfer);
	if (r < 0)
		return err_pass(r);
	xfer->op = op;
	xfer->ours = true;
	xfer->bytes = op->sides.plan ? op->sides.plan->bytes : 0;
	xfer->id = peer->next_id;
	op->way = (struct xp_way){0};
	if (xfer->bytes)
		r = ops_of(xfer)->take_sides(xfer, &op->sides);
	if (r == 0)
		r = idmap_put(&peer->ops, xfer->id, xfer);
	if (r < 0)
		return err_pass(r);
	peer->next_id++;
	sm_init(&xfer->sm, ops_of(xfer)->xfer_table, NET_XFER_QUEUED);
	list_push_back(&peer->xfers, &xfer->link);
	list_push_back(&peer->queued, &xfer->queue_link);
	op->moved = 0;
	op->impl = xfer;
	if (xfer->bytes && ops_of(xfer)->prepare && ops_of(xfer)->prepare(xfer) < 0)
		net_xfer_stop_last(xfer);
	(void)mem_steal(xfer);
	net_peer_kick(peer); /* after its deferred calls */
	return 0;
}

static void net_xfer_ask(struct net_xfer *xfer, size_t bytes)
{
	struct net_peer *peer = xfer->peer;
	int r;

	list_remove(&xfer->queue_link);
	xfer->asked_bytes = bytes;
	r = ops_of(xfer)->ask(xfer);
	if (r < 0) {
		net_xfer_stop_last(xfer);
		return;
	}
	xfer->asked = true;
	peer->asked++;
	peer->asked_bytes += bytes;
	sm_move(&xfer->sm, NET_XFER_ASKED);
	if (r > 0)
		sm_move(&xfer->sm, NET_XFER_MOVING);
}

/* Limits on unanswered requests, and on the bytes that the peer holds for them; a single
 * one may have any size. */
void net_xfer_pump(struct net_peer *peer)
{
	const struct net_ops *ops = peer->transport->ops;
	struct net_xfer *xfer;

	while ((xfer = list_first(&peer->queued, struct net_xfer, queue_link)) &&
	       peer->asked < XP_INBOUND_MAX && (!ops->may_ask || ops->may_ask(xfer))) {
		size_t bytes = ops->request_bytes ? ops->request_bytes(xfer)
						  : xfer->op->header_len;

		if (peer->asked_bytes && peer->asked_bytes + bytes > NET_HEADERS_MAX)
			return;
		net_xfer_ask(xfer, bytes);
		if (!list_empty(&peer->queued) && loop_enough(peer->timer.loop)) {
			net_peer_kick(peer);
			return;
		}
	}
}

void net_cancel(struct xp_op *op, const struct err *why)
{
	assert(!op->impl || ((struct net_xfer *)op->impl)->ours);
	if (op->impl)
		net_xfer_stop(op->impl, why);
}

int net_proto(const struct net_xfer *xfer, const char *word)
{
	return err_raise(ERR_PROTO, "%s: %s for transfer %" PRIu64 " (%s)",
			 net_name(xfer->peer), word, xfer->id, sm_name(&xfer->sm));
}

int net_op_find(struct net_peer *peer, uint64_t id, struct net_xfer **xfer_p)
{
	*xfer_p = idmap_get(&peer->ops, id);
	if (!*xfer_p)
		return err_raise(ERR_PROTO, "%s: answer to unknown transfer %" PRIu64,
				 net_name(peer), id);
	return 0;
}

int net_xfer_done(struct net_xfer *xfer, const struct err *err)
{
	assert(xfer->ours);
	if (!xfer->asked || xfer->answered)
		return net_proto(xfer, "DONE");
	unask(xfer);
	if (xfer->told) {
		forget_op(xfer);
		return 0;
	}
	if (err) {
		xfer->refused = true;
		net_xfer_stop(xfer, err);
	}
	net_xfer_check(xfer);
	return 0;
}

/* ---- theirs ---- */

static int net_xfer_admit(const struct net_peer *peer, uint64_t id, unsigned int kind)
{
	const char *name = net_name(peer);

	if (id <= peer->inbound_high)
		return err_raise(ERR_PROTO, "%s: request %" PRIu64 " after %" PRIu64,
				 name, id, peer->inbound_high);
	if (kind != XP_WRITE && kind != XP_READ &&
	    (kind != XP_CHECK || !peer->transport->ops->checks))
		return err_raise(ERR_PROTO, "%s: request of kind %u", name, kind);
	if (idmap_count(&peer->inbounds) >= XP_INBOUND_MAX)
		return err_raise(ERR_PROTO, "%s: over %u unfinished requests", name,
				 XP_INBOUND_MAX);
	return 0;
}

/* No memory for it: that costs the request, not the peer, if a message fits. */
static void net_xfer_refuse(struct net_peer *peer, uint64_t id)
{
	struct err err;

	err_take(&err);
	if (err.code == ERR_OK)
		err_set(&err, ERR_NOMEM, "%s: no memory for a request", net_name(peer));
	if (peer->transport->ops->refuse(peer, id, &err) < 0)
		net_peer_fail_last(peer);
}

int net_inbound_new(struct net_peer *peer, uint64_t id, unsigned int kind, uint64_t bytes,
		    bool no_memory, struct net_xfer **xfer_p)
{
	mem_cleanup(xfer_freep) struct net_xfer *xfer = NULL;
	int r = net_xfer_admit(peer, id, kind);

	*xfer_p = NULL;
	if (r < 0)
		return err_pass(r);
	peer->inbound_high = id;
	if (no_memory || net_xfer_new(peer, (enum xp_kind)kind, &xfer) < 0 ||
	    idmap_put(&peer->inbounds, id, xfer) < 0) {
		net_xfer_refuse(peer, id);
		return 0;
	}
	xfer->id = id;
	xfer->bytes = bytes;
	sm_init(&xfer->sm, ops_of(xfer)->xfer_table, NET_XFER_ASKED);
	*xfer_p = mem_steal(xfer);
	return 0;
}

void net_request(struct net_xfer *xfer, const void *header, size_t header_len)
{
	const struct xp_callbacks *up = &xfer->peer->transport->base.callbacks;

	assert(!xfer->ours && sm_state(&xfer->sm) == NET_XFER_ASKED);
	list_push_back(&xfer->peer->xfers, &xfer->link);
	xfer->in = (struct xp_inbound){
		.peer = (struct xp_peer *)xfer->peer,
		.kind = xfer->kind,
		.header = header,
		.header_len = header_len,
		.owned = xfer->in.owned,
		.bytes = xfer->bytes,
	};
	up->on_request(up->owner, &xfer->in);
}

int net_inbound_find(struct net_peer *peer, uint64_t id, struct net_xfer **xfer_p)
{
	*xfer_p = idmap_get(&peer->inbounds, id);
	if (id > peer->inbound_high)
		return err_raise(ERR_PROTO,
				 "%s: message for transfer %" PRIu64
				 ", which was never requested",
				 net_name(peer), id);
	return 0;
}

static int accept_sides(struct net_xfer *xfer, const struct xp_sides *sides)
{
	uint64_t bytes = sides && sides->plan ? sides->plan->bytes : 0;
	int r = 0;

	if (xfer->kind == XP_CHECK && !bytes)
		return 0; /* confirms the bytes that were read */
	if (bytes != xfer->bytes)
		return err_raise(ERR_PLAN,
				 "%" PRIu64 " bytes planned by the requester, %" PRIu64
				 " by this daemon",
				 xfer->bytes, bytes);
	if (bytes && xfer->kind != XP_CHECK)
		r = ops_of(xfer)->take_sides(xfer, sides);
	return err_pass(r);
}

void net_land(struct xp_inbound *in, const struct xp_sides *sides, const struct err *err)
{
	struct net_xfer *xfer = container_of(in, struct net_xfer, in);
	int r;

	assert(!xfer->ours);
	if (sm_state(&xfer->sm) != NET_XFER_ASKED)
		return; /* stopped meanwhile: its end is pending */
	if (err) {
		net_xfer_stop(xfer, err);
		return;
	}
	r = accept_sides(xfer, sides);
	if (r == 0) {
		sm_move(&xfer->sm, NET_XFER_MOVING);
		if (xfer->bytes && xfer->kind != XP_CHECK)
			r = ops_of(xfer)->begin(xfer);
	}
	if (r < 0)
		net_xfer_stop_last(xfer);
	net_xfer_check(xfer);
}

void net_revoke(struct xp_inbound *in, const struct err *why)
{
	net_xfer_stop(container_of(in, struct net_xfer, in), why);
}
