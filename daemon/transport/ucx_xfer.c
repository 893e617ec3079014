/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A transfer's life, on the side that asks (an op) and on the side that answers
 * (an inbound).
 *
 *   WRITE  REQUEST -> on_request, land() -> GO -> DATA … -> DONE
 *   READ   REQUEST -> on_request, land() -> SERVE … -> DONE
 *
 * GO keeps bytes from arriving before their place is known: nothing of a peer's
 * is held unasked. Every request that left is answered by exactly one DONE, and
 * with it the id is dead on both sides; bytes that come later find no transfer
 * and are dropped. So the destination's DONE is the word that nothing more can
 * land, and at a READ the source's DONE that nothing more will be sent.
 *
 * Stopping (cancel, revoke, refusal, a fault, a lost peer) takes one path: no
 * new slice is sent or accepted, copies are cancelled, and when the last piece
 * inside libucp and the copy threads is back the side is quiet. The asker says
 * CANCEL at once and waits for the DONE too. What is not quiet by the fence
 * deadline costs the connection (ucx_peer.c).
 *
 * Done callbacks are only called from ucx_peer_step(): a transfer that is over
 * waits in peer->finished.
 */
#include "daemon/transport/ucx_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static const struct sm_state xfer_states[] = {
	[UCX_XFER_QUEUED] = {"queued", SM_TO(UCX_XFER_ASKED) | SM_TO(UCX_XFER_STOPPING)},
	[UCX_XFER_ASKED] = {"asked", SM_TO(UCX_XFER_MOVING) | SM_TO(UCX_XFER_STOPPING) |
					     SM_TO(UCX_XFER_OVER)},
	[UCX_XFER_MOVING] = {"moving", SM_TO(UCX_XFER_STOPPING) | SM_TO(UCX_XFER_OVER)},
	[UCX_XFER_STOPPING] = {"stopping", SM_TO(UCX_XFER_OVER)},
	[UCX_XFER_OVER] = {"over", 0},
};

static bool xfer_invariant(const struct sm *sm, unsigned int from)
{
	const struct ucx_xfer *xfer = container_of(sm, const struct ucx_xfer, sm);

	(void)from;
	/* the promise "still" */
	return sm_state(sm) != UCX_XFER_OVER ||
	       (xfer->busy == 0 && list_empty(&xfer->pieces));
}

static const struct sm_table xfer_table = {
	.name = "ucx transfer",
	.states = xfer_states,
	.count = ARRAY_LEN(xfer_states),
	.invariant = xfer_invariant,
};

static bool is_source(const struct ucx_xfer *xfer)
{
	return (xfer->op != NULL) == (xfer->kind == XP_WRITE);
}

/* ---- made and unmade ---- */

static void xfer_free(struct ucx_xfer *xfer)
{
	if (!xfer)
		return;
	list_remove(&xfer->link);
	list_remove(&xfer->queue_link);
	list_remove(&xfer->source_link);
	ucx_side_fini(&xfer->side);
	spans_fini(&xfer->spans);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++)
		mem_free(xfer->spare[i]);
	ucx_entry_free(xfer->entry);
	mem_free(xfer);
}

static void xfer_freep(struct ucx_xfer **xfer)
{
	xfer_free(*xfer);
}

static int xfer_new(struct ucx_peer *peer, enum xp_kind kind, struct ucx_xfer **xfer_p)
{
	mem_cleanup(xfer_freep) struct ucx_xfer *xfer = mem_zalloc(sizeof(*xfer));

	if (!xfer)
		return err_pass(-ENOMEM);
	xfer->peer = peer;
	xfer->kind = kind;
	list_init(&xfer->link);
	list_init(&xfer->queue_link);
	list_init(&xfer->source_link);
	list_init(&xfer->pieces);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++) {
		xfer->spare[i] = ucx_send_new(peer);
		if (!xfer->spare[i])
			return err_pass(-ENOMEM);
	}
	*xfer_p = mem_steal(xfer);
	return 0;
}

static int take_sides(struct ucx_xfer *xfer, const struct xp_sides *sides)
{
	bool source = is_source(xfer);
	int r;

	if (!xfer->bytes)
		return 0;
	r = xp_sides_check(sides, source, !source);
	if (r < 0)
		return err_pass(r);
	return err_pass(ucx_side_init(&xfer->side, sides->plan,
				      source ? sides->src : sides->dst,
				      source ? sides->src_count : sides->dst_count,
				      source));
}

/* ---- stop, over, told ---- */

static void send_cancel(struct ucx_xfer *xfer)
{
	struct ucx_frame frame = {.type = UCX_CANCEL, .id = xfer->id};

	xfer->cancel_sent = true;
	ucx_send_frame(mem_steal(xfer->spare[1]), &frame, &xfer->err, NULL, NULL, 0);
}

static bool is_over(const struct ucx_xfer *xfer)
{
	switch (sm_state(&xfer->sm)) {
	case UCX_XFER_STOPPING:
		return !xfer->op || !xfer->asked || xfer->answered ||
		       !ucx_peer_live(xfer->peer);
	case UCX_XFER_ASKED:
		return xfer->op && xfer->answered;
	case UCX_XFER_MOVING:
		if (xfer->op && !xfer->answered)
			return false;
		return is_source(xfer) ? ucx_source_complete(xfer) :
					 ucx_sink_complete(xfer);
	default:
		return false;
	}
}

void ucx_xfer_check(struct ucx_xfer *xfer)
{
	if (xfer->finishing)
		return;
	if (sm_state(&xfer->sm) == UCX_XFER_STOPPING && xfer->asked && !xfer->answered &&
	    !xfer->cancel_sent && ucx_peer_live(xfer->peer))
		send_cancel(xfer);
	if (xfer->busy || !is_over(xfer))
		return;
	xfer->finishing = true;
	list_push_back(&xfer->peer->finished, &xfer->queue_link);
	ucx_peer_kick(xfer->peer);
}

void ucx_xfer_stop(struct ucx_xfer *xfer, const struct err *err)
{
	struct ucx_peer *peer = xfer->peer;

	if (xfer->finishing || sm_state(&xfer->sm) >= UCX_XFER_STOPPING)
		return;
	xfer->err = *err;
	if (xfer->err.code == ERR_OK)
		err_set(&xfer->err, ERR_CANCELED, "canceled");
	list_remove(&xfer->queue_link);
	sm_move(&xfer->sm, UCX_XFER_STOPPING);
	xfer->deadline_ns = loop_now_ns(peer->timer.loop) + peer->transport->fence_ns;
	if (ucx_peer_live(peer))
		ucx_peer_watch(peer, xfer->deadline_ns);
	ucx_source_stop(xfer);
	ucx_sink_stop(xfer);
	ucx_xfer_check(xfer);
}

void ucx_xfer_stop_last(struct ucx_xfer *xfer)
{
	struct err err;

	err_take(&err);
	ucx_xfer_stop(xfer, &err);
}

static void tell_op(struct ucx_xfer *xfer)
{
	struct ucx_peer *peer = xfer->peer;
	struct xp_op *op = xfer->op;
	bool all = is_source(xfer) ? xfer->next_byte == xfer->bytes :
				     ucx_sink_complete(xfer);

	/* A WRITE that was canceled too late has succeeded, and says so. */
	if (xfer->answered && xfer->verdict.code == ERR_OK && all) {
		op->result = 0;
		op->err = (struct err){0};
	} else {
		op->err = xfer->err;
		op->result = -err_errno(xfer->err.code);
	}
	if (xfer->asked) {
		peer->asked--;
		peer->asked_bytes -= op->header_len;
	}
	op->impl = NULL;
	idmap_remove(&peer->ops, xfer->id);
	xfer_free(xfer);
	op->on_done(op);
}

static void tell_inbound(struct ucx_xfer *xfer, bool ok)
{
	const struct xp_callbacks *up = &xfer->peer->transport->base.callbacks;
	struct ucx_frame frame = {.type = UCX_DONE, .id = xfer->id};
	struct err err = xfer->err;

	idmap_remove(&xfer->peer->inbounds, xfer->id);
	if (ucx_peer_live(xfer->peer))
		ucx_send_frame(mem_steal(xfer->spare[1]), &frame, ok ? NULL : &err, NULL,
			       NULL, 0);
	ucx_side_fini(&xfer->side);
	up->on_inbound_done(up->owner, &xfer->in, ok ? NULL : &err);
	xfer_free(xfer);
}

void ucx_xfer_tell(struct ucx_xfer *xfer)
{
	bool ok = sm_state(&xfer->sm) != UCX_XFER_STOPPING;

	sm_move(&xfer->sm, UCX_XFER_OVER);
	list_remove(&xfer->link);
	if (xfer->op)
		tell_op(xfer);
	else
		tell_inbound(xfer, ok);
}

/* ---- ours ---- */

static int post_check(struct ucx_peer *peer, const struct xp_op *op)
{
	if (!ucx_peer_live(peer))
		return err_raise(ERR_PEER, "ucx: no connection to %s", peer->name);
	if (op->kind != XP_WRITE && op->kind != XP_READ)
		return err_raise(ERR_INVAL, "ucx: ops are WRITE or READ");
	if (op->header_len > XP_HEADER_MAX)
		return err_raise(ERR_TOOBIG, "header: %zu bytes, at most %u",
				 op->header_len, XP_HEADER_MAX);
	return 0;
}

int ucx_post(struct xp_peer *base, struct xp_op *op)
{
	struct ucx_peer *peer = (struct ucx_peer *)base;
	mem_cleanup(xfer_freep) struct ucx_xfer *xfer = NULL;
	int r;

	r = post_check(peer, op);
	if (r == 0)
		r = xfer_new(peer, op->kind, &xfer);
	if (r < 0)
		return err_pass(r);
	xfer->op = op;
	xfer->bytes = op->sides.plan ? op->sides.plan->bytes : 0;
	xfer->id = peer->next_id;
	r = take_sides(xfer, &op->sides);
	if (r == 0)
		r = idmap_put(&peer->ops, xfer->id, xfer);
	if (r < 0)
		return err_pass(r);
	peer->next_id++;
	sm_init(&xfer->sm, &xfer_table, UCX_XFER_QUEUED);
	list_push_back(&peer->xfers, &xfer->link);
	list_push_back(&peer->queued, &xfer->queue_link);
	op->moved = 0;
	op->impl = mem_steal(xfer);
	ucx_peer_kick(peer);
	return 0;
}

static void ask(struct ucx_xfer *xfer)
{
	struct ucx_peer *peer = xfer->peer;
	struct ucx_frame frame = {
		.type = UCX_REQUEST,
		.id = xfer->id,
		.code = xfer->kind,
		.length = xfer->bytes,
	};

	list_remove(&xfer->queue_link);
	xfer->asked = true;
	peer->asked++;
	peer->asked_bytes += xfer->op->header_len;
	sm_move(&xfer->sm, UCX_XFER_ASKED);
	if (xfer->kind == XP_READ)
		sm_move(&xfer->sm, UCX_XFER_MOVING); /* bytes may come at once */
	ucx_send_frame(mem_steal(xfer->spare[0]), &frame, NULL, xfer, xfer->op->header,
		       xfer->op->header_len);
}

void ucx_xfer_pump(struct ucx_peer *peer)
{
	struct ucx_xfer *xfer;

	while ((xfer = list_first(&peer->queued, struct ucx_xfer, queue_link)) &&
	       peer->asked < XP_INBOUND_MAX &&
	       (peer->asked_bytes == 0 ||
		peer->asked_bytes + xfer->op->header_len <= UCX_HEADERS_MAX))
		ask(xfer);
}

void ucx_cancel(struct xp_op *op, const struct err *why)
{
	if (op->impl)
		ucx_xfer_stop(op->impl, why);
}

static int take_go(struct ucx_xfer *xfer)
{
	unsigned int state = sm_state(&xfer->sm);

	if (state == UCX_XFER_STOPPING && xfer->asked)
		return 0; /* our CANCEL crosses it */
	if (xfer->kind != XP_WRITE || state != UCX_XFER_ASKED || xfer->answered ||
	    xfer->bytes == 0)
		return err_raise(ERR_PROTO, "ucx: GO for transfer %" PRIu64 " (%s)",
				 xfer->id, sm_name(&xfer->sm));
	sm_move(&xfer->sm, UCX_XFER_MOVING);
	ucx_source_start(xfer);
	return 0;
}

static int take_done(struct ucx_xfer *xfer, const struct ucx_entry *entry)
{
	bool early = is_source(xfer) && xfer->next_byte < xfer->bytes;

	if (!xfer->asked || xfer->answered)
		return err_raise(ERR_PROTO, "ucx: DONE for transfer %" PRIu64 " (%s)",
				 xfer->id, sm_name(&xfer->sm));
	if (entry->frame.code == ERR_OK && early &&
	    sm_state(&xfer->sm) != UCX_XFER_STOPPING)
		return err_raise(ERR_PROTO, "ucx: DONE before the last byte was sent");
	xfer->answered = true;
	if (entry->frame.code != ERR_OK) {
		ucx_frame_get_err(&entry->frame, entry->payload, entry->len,
				  &xfer->verdict);
		ucx_xfer_stop(xfer, &xfer->verdict);
	}
	ucx_xfer_check(xfer);
	return 0;
}

/* ---- theirs ---- */

static int admit_request(struct ucx_peer *peer, const struct ucx_frame *frame)
{
	if (frame->id <= peer->inbound_high)
		return err_raise(ERR_PROTO, "ucx: request %" PRIu64 " after %" PRIu64,
				 frame->id, peer->inbound_high);
	if (frame->code != XP_WRITE && frame->code != XP_READ)
		return err_raise(ERR_PROTO, "ucx: request of kind %u", frame->code);
	if (idmap_count(&peer->inbounds) >= XP_INBOUND_MAX)
		return err_raise(ERR_PROTO, "ucx: over %u unfinished requests",
				 XP_INBOUND_MAX);
	return 0;
}

/* No memory for it: that costs the request, not the peer, if words still fit. */
static void refuse(struct ucx_peer *peer, uint64_t id)
{
	struct ucx_frame frame = {.type = UCX_DONE, .id = id};
	struct ucx_send *send;
	struct err err;

	err_take(&err);
	send = ucx_send_new(peer);
	if (send)
		ucx_send_frame(send, &frame, &err, NULL, NULL, 0);
	else
		ucx_peer_fail_last(peer);
}

static int take_request(struct ucx_peer *peer, struct ucx_entry **entry_p)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;
	mem_cleanup(xfer_freep) struct ucx_xfer *xfer = NULL;
	struct ucx_entry *entry = *entry_p;
	struct xp_inbound *in;
	int r = admit_request(peer, &entry->frame);

	if (r < 0)
		return err_pass(r);
	peer->inbound_high = entry->frame.id;
	if (entry->starved)
		err_raise(ERR_NOMEM, "ucx: no memory for a request");
	if (entry->starved ||
	    xfer_new(peer, (enum xp_kind)entry->frame.code, &xfer) < 0 ||
	    idmap_put(&peer->inbounds, entry->frame.id, xfer) < 0) {
		refuse(peer, entry->frame.id);
		return 0;
	}
	xfer->id = entry->frame.id;
	xfer->bytes = entry->frame.length;
	xfer->entry = mem_steal(*entry_p);
	sm_init(&xfer->sm, &xfer_table, UCX_XFER_ASKED);
	list_push_back(&peer->xfers, &xfer->link);
	in = &mem_steal(xfer)->in;
	*in = (struct xp_inbound){
		.peer = (struct xp_peer *)peer,
		.kind = (enum xp_kind)entry->frame.code,
		.header = entry->payload,
		.header_len = entry->len,
		.bytes = entry->frame.length,
	};
	up->on_request(up->owner, in);
	return 0;
}

static void send_go(struct ucx_xfer *xfer)
{
	struct ucx_frame frame = {.type = UCX_GO, .id = xfer->id};

	ucx_send_frame(mem_steal(xfer->spare[0]), &frame, NULL, NULL, NULL, 0);
}

void ucx_land(struct xp_inbound *in, const struct xp_sides *sides, const struct err *err)
{
	struct ucx_xfer *xfer = container_of(in, struct ucx_xfer, in);
	uint64_t bytes = sides && sides->plan ? sides->plan->bytes : 0;
	int r = 0;

	if (sm_state(&xfer->sm) != UCX_XFER_ASKED)
		return; /* stopped meanwhile: its end is on the way */
	if (err) {
		ucx_xfer_stop(xfer, err);
		return;
	}
	if (bytes != xfer->bytes)
		r = err_raise(ERR_PLAN, "plan of %" PRIu64 " bytes here, %" PRIu64 " there",
			      bytes, xfer->bytes);
	if (r == 0)
		r = take_sides(xfer, sides);
	if (r < 0) {
		ucx_xfer_stop_last(xfer);
		return;
	}
	sm_move(&xfer->sm, UCX_XFER_MOVING);
	if (is_source(xfer))
		ucx_source_start(xfer);
	else if (bytes)
		send_go(xfer);
	ucx_xfer_check(xfer);
}

void ucx_revoke(struct xp_inbound *in, const struct err *why)
{
	ucx_xfer_stop(container_of(in, struct ucx_xfer, in), why);
}

static int take_cancel(struct ucx_peer *peer, const struct ucx_entry *entry)
{
	struct ucx_xfer *xfer = idmap_get(&peer->inbounds, entry->frame.id);
	struct err err;

	if (entry->frame.id > peer->inbound_high)
		return err_raise(ERR_PROTO, "ucx: CANCEL of transfer %" PRIu64
				 " that was never asked", entry->frame.id);
	if (!xfer)
		return 0; /* our DONE crosses it */
	ucx_frame_get_err(&entry->frame, entry->payload, entry->len, &err);
	ucx_xfer_stop(xfer, &err);
	return 0;
}

static int take_answer(struct ucx_peer *peer, const struct ucx_entry *entry)
{
	struct ucx_xfer *xfer = idmap_get(&peer->ops, entry->frame.id);

	if (!xfer)
		return err_raise(ERR_PROTO, "ucx: an answer to transfer %" PRIu64
				 " that is not there", entry->frame.id);
	return err_pass(entry->frame.type == UCX_GO ? take_go(xfer) :
						      take_done(xfer, entry));
}

void ucx_xfer_entry(struct ucx_peer *peer, struct ucx_entry *entry)
{
	int r;

	switch (entry->frame.type) {
	case UCX_REQUEST:
		r = take_request(peer, &entry);
		break;
	case UCX_CANCEL:
		r = take_cancel(peer, entry);
		break;
	default:
		r = take_answer(peer, entry);
	}
	ucx_entry_free(entry);
	if (r < 0)
		ucx_peer_fail_last(peer);
}
