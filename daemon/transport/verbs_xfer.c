/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A transfer's life, on the side that asks (an op) and on the side that answers
 * (an inbound). Who asks moves: it writes into the answerer's memory, or reads
 * from it. The answerer's adapter does its part without its daemon.
 *
 *   WRITE  REQUEST -> on_request, land() -> GO -> bytes, MARKs -> DONE
 *   READ   REQUEST -> on_request, land() -> GO -> bytes, FIN -> DONE
 *
 * GO says: my memory is registered and stays so until your last words are here. It
 * names the registrations, by a digest, and the mover compares: an address or a key
 * never comes in it, those are from REGISTER. So a stale key is found before it is
 * used; used, it would cost the connection.
 *
 * Every GO is answered by the mover's last words, however the transfer ends. For a
 * WRITE that is one mark on each queue pair that has bytes of it, behind them: the
 * NIC's own order makes it the proof that they have landed (each mark tells how
 * many there are). For a READ it is FIN, sent when no request is outstanding any
 * more. Then the answerer knows that its memory is still, and DONE is the last word
 * of all. Marks are immediates (a slot and a generation that GO gave); a slot is
 * given only as long as there is a receive for its mark on every queue pair.
 *
 * Stopping takes the same road: no new request is posted, what is posted ends (a
 * bounded amount, verbs_post.c), the last words follow. What is not still by the
 * fence deadline costs the connection (verbs_peer.c).
 */
#include "daemon/transport/verbs_impl.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/mem.h"

static const struct sm_state xfer_states[] = {
	[VERBS_XFER_QUEUED] = {"queued",
			       SM_TO(VERBS_XFER_ASKED) | SM_TO(VERBS_XFER_STOPPING)},
	[VERBS_XFER_ASKED] = {"asked", SM_TO(VERBS_XFER_MOVING) |
					       SM_TO(VERBS_XFER_STOPPING) |
					       SM_TO(VERBS_XFER_OVER)},
	[VERBS_XFER_MOVING] = {"moving",
			       SM_TO(VERBS_XFER_STOPPING) | SM_TO(VERBS_XFER_OVER)},
	[VERBS_XFER_STOPPING] = {"stopping", SM_TO(VERBS_XFER_OVER)},
	[VERBS_XFER_OVER] = {"over", 0},
};

static bool words_came(const struct verbs_xfer *xfer)
{
	return xfer->kind == XP_READ
		       ? xfer->fin_came
		       : xfer->marks_due &&
				 __builtin_popcount(xfer->marks) == xfer->marks_due;
}

static bool xfer_invariant(const struct sm *sm, unsigned int from)
{
	const struct verbs_xfer *xfer = container_of(sm, const struct verbs_xfer, sm);

	(void)from;
	/* the promise "still" */
	return sm_state(sm) != VERBS_XFER_OVER ||
	       (xfer->busy == 0 &&
		(xfer->op || !xfer->go || words_came(xfer) || verbs_peer_quiet(xfer->peer)));
}

static const struct sm_table xfer_table = {
	.name = "verbs transfer",
	.states = xfer_states,
	.count = ARRAY_LEN(xfer_states),
	.invariant = xfer_invariant,
};

static bool is_source(const struct verbs_xfer *xfer)
{
	return (xfer->op != NULL) == (xfer->kind == XP_WRITE);
}

/* ---- made and unmade ---- */

static void slot_free(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;

	if (xfer->op || xfer->slot == VERBS_GRANTS)
		return;
	peer->grants[xfer->slot] = NULL;
	peer->grant_count--;
	xfer->slot = VERBS_GRANTS;
	if (!list_empty(&peer->ungranted))
		verbs_peer_kick(peer);
}

static void xfer_free(struct verbs_xfer *xfer)
{
	if (!xfer)
		return;
	list_remove(&xfer->link);
	list_remove(&xfer->queue_link);
	list_remove(&xfer->mover_link);
	list_remove(&xfer->grant_link);
	slot_free(xfer);
	verbs_places_fini(&xfer->local);
	verbs_places_fini(&xfer->remote);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++)
		mem_free(xfer->spare[i]);
	if (xfer->header)
		xfer->peer->held_bytes -= xfer->in.header_len;
	mem_free(xfer->header);
	mem_free(xfer);
}

static void xfer_freep(struct verbs_xfer **xfer)
{
	xfer_free(*xfer);
}

static int xfer_new(struct verbs_peer *peer, enum xp_kind kind, struct verbs_xfer **xfer_p)
{
	mem_cleanup(xfer_freep) struct verbs_xfer *xfer = mem_zalloc(sizeof(*xfer));

	if (!xfer)
		return err_pass(-ENOMEM);
	xfer->peer = peer;
	xfer->kind = kind;
	xfer->slot = VERBS_GRANTS;
	list_init(&xfer->link);
	list_init(&xfer->queue_link);
	list_init(&xfer->mover_link);
	list_init(&xfer->grant_link);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++) {
		xfer->spare[i] = verbs_out_new();
		if (!xfer->spare[i])
			return err_pass(-ENOMEM);
	}
	*xfer_p = mem_steal(xfer);
	return 0;
}

static int take_sides(struct verbs_xfer *xfer, const struct xp_sides *sides)
{
	bool source = is_source(xfer);
	int r;

	if (!xfer->bytes)
		return 0;
	r = xp_sides_check(sides, source || xfer->op, !source || xfer->op);
	if (r == 0)
		r = verbs_places_init(&xfer->local, sides->plan,
				      source ? sides->src : sides->dst,
				      source ? sides->src_count : sides->dst_count, source,
				      NULL);
	if (r == 0 && xfer->op)
		r = verbs_places_init(&xfer->remote, sides->plan,
				      source ? sides->dst : sides->src,
				      source ? sides->dst_count : sides->src_count, !source,
				      xfer->peer);
	xfer->plan = sides->plan;
	return err_pass(r);
}

static void say(struct verbs_xfer *xfer, enum verbs_spare spare,
		const struct verbs_frame *frame, const struct err *err)
{
	verbs_send(xfer->peer, mem_steal(xfer->spare[spare]), frame, err);
}

/* ---- stop, over, told ---- */

/* The other side must stop too, unless it was the one who said so. */
static void say_stop(struct verbs_xfer *xfer)
{
	struct verbs_frame frame = {.id = xfer->id,
				    .type = xfer->op ? VERBS_CANCEL : VERBS_REVOKE};

	if (xfer->stop_said || (xfer->op ? !xfer->asked || xfer->answered
					 : !xfer->go || words_came(xfer)))
		return;
	xfer->stop_said = true;
	say(xfer, VERBS_SPARE_STOP, &frame, &xfer->err);
}

static void say_fin(struct verbs_xfer *xfer)
{
	struct verbs_frame frame = {.type = VERBS_FIN, .id = xfer->id};

	xfer->ended = true;
	say(xfer, VERBS_SPARE_LAST, &frame, xfer->err.code == ERR_OK ? NULL : &xfer->err);
}

static bool op_is_over(const struct verbs_xfer *xfer)
{
	switch (sm_state(&xfer->sm)) {
	case VERBS_XFER_STOPPING:
		return !xfer->asked || xfer->answered || verbs_peer_quiet(xfer->peer);
	case VERBS_XFER_ASKED:
	case VERBS_XFER_MOVING:
		return xfer->answered;
	default:
		return false;
	}
}

static bool inbound_is_over(const struct verbs_xfer *xfer)
{
	switch (sm_state(&xfer->sm)) {
	case VERBS_XFER_STOPPING:
		return !xfer->go || words_came(xfer) || verbs_peer_quiet(xfer->peer);
	case VERBS_XFER_MOVING:
		return xfer->bytes == 0 || (words_came(xfer) && !xfer->marks_aborted);
	default:
		return false;
	}
}

void verbs_xfer_check(struct verbs_xfer *xfer)
{
	bool stopping = sm_state(&xfer->sm) == VERBS_XFER_STOPPING;
	bool live = verbs_peer_live(xfer->peer);

	if (xfer->finishing)
		return;
	if (stopping && live)
		say_stop(xfer);
	if (live && xfer->op && xfer->kind == XP_READ && xfer->go && !xfer->ended &&
	    xfer->busy == 0 && (stopping || xfer->done_bytes == xfer->bytes))
		say_fin(xfer);
	if (xfer->busy || !(xfer->op ? op_is_over(xfer) : inbound_is_over(xfer)))
		return;
	xfer->finishing = true;
	list_push_back(&xfer->peer->finished, &xfer->queue_link);
	verbs_peer_kick(xfer->peer);
}

void verbs_xfer_stop(struct verbs_xfer *xfer, const struct err *err)
{
	struct verbs_peer *peer = xfer->peer;

	if (xfer->finishing || sm_state(&xfer->sm) >= VERBS_XFER_STOPPING)
		return;
	xfer->err = *err;
	if (xfer->err.code == ERR_OK)
		err_set(&xfer->err, ERR_CANCELED, "canceled");
	list_remove(&xfer->queue_link);
	list_remove(&xfer->grant_link);
	sm_move(&xfer->sm, VERBS_XFER_STOPPING);
	xfer->deadline_ns = loop_now_ns(peer->timer.loop) + peer->transport->fence_ns;
	if (verbs_peer_live(peer))
		verbs_peer_watch(peer, xfer->deadline_ns);
	verbs_peer_kick(peer); /* a mover's last words */
	verbs_xfer_check(xfer);
}

static void stop_last(struct verbs_xfer *xfer)
{
	struct err err;

	err_take(&err);
	verbs_xfer_stop(xfer, &err);
}

static void tell_op(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;
	struct xp_op *op = xfer->op;

	/* What was canceled too late has succeeded, and says so. */
	if (xfer->answered && xfer->verdict.code == ERR_OK &&
	    xfer->done_bytes == xfer->bytes) {
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

static void tell_inbound(struct verbs_xfer *xfer, bool ok)
{
	const struct xp_callbacks *up = &xfer->peer->transport->base.callbacks;
	struct verbs_frame frame = {.type = VERBS_DONE, .id = xfer->id};
	struct err err = xfer->err;

	idmap_remove(&xfer->peer->inbounds, xfer->id);
	if (ok)
		xfer->in.moved = xfer->bytes;
	if (verbs_peer_live(xfer->peer))
		say(xfer, VERBS_SPARE_LAST, &frame, ok ? NULL : &err);
	verbs_places_fini(&xfer->local);
	slot_free(xfer);
	up->on_inbound_done(up->owner, &xfer->in, ok ? NULL : &err);
	xfer_free(xfer);
}

void verbs_xfer_tell(struct verbs_xfer *xfer)
{
	bool ok = sm_state(&xfer->sm) != VERBS_XFER_STOPPING;

	sm_move(&xfer->sm, VERBS_XFER_OVER);
	list_remove(&xfer->link);
	list_remove(&xfer->mover_link);
	if (xfer->op)
		tell_op(xfer);
	else
		tell_inbound(xfer, ok);
}

/* ---- ours ---- */

static int post_check(struct verbs_peer *peer, const struct xp_op *op)
{
	if (!verbs_peer_live(peer))
		return err_raise(ERR_PEER, "verbs: no connection to %s", peer->name);
	if (op->kind != XP_WRITE && op->kind != XP_READ)
		return err_raise(ERR_INVAL, "verbs: ops are WRITE or READ");
	if (op->header_len > XP_HEADER_MAX)
		return err_raise(ERR_TOOBIG, "header: %zu bytes, at most %u",
				 op->header_len, XP_HEADER_MAX);
	return 0;
}

int verbs_post(struct xp_peer *base, struct xp_op *op)
{
	struct verbs_peer *peer = (struct verbs_peer *)base;
	mem_cleanup(xfer_freep) struct verbs_xfer *xfer = NULL;
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
	sm_init(&xfer->sm, &xfer_table, VERBS_XFER_QUEUED);
	list_push_back(&peer->xfers, &xfer->link);
	list_push_back(&peer->queued, &xfer->queue_link);
	op->moved = 0;
	op->impl = mem_steal(xfer);
	verbs_peer_kick(peer);
	return 0;
}

static void ask(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;
	struct verbs_frame frame = {
		.type = VERBS_REQUEST,
		.id = xfer->id,
		.kind = (uint8_t)xfer->kind,
		.bytes = xfer->bytes,
		.digest = xfer->bytes ? xfer->plan->digest : 0,
	};

	list_remove(&xfer->queue_link);
	xfer->asked = true;
	peer->asked++;
	peer->asked_bytes += xfer->op->header_len;
	sm_move(&xfer->sm, VERBS_XFER_ASKED);
	verbs_send_request(peer, mem_steal(xfer->spare[VERBS_SPARE_FIRST]), &frame, xfer);
}

void verbs_xfer_pump(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer;

	while ((xfer = list_first(&peer->queued, struct verbs_xfer, queue_link)) &&
	       peer->asked < XP_INBOUND_MAX &&
	       (peer->asked_bytes == 0 ||
		peer->asked_bytes + xfer->op->header_len <= VERBS_HEADERS_MAX))
		ask(xfer);
}

void verbs_cancel(struct xp_op *op, const struct err *why)
{
	if (op->impl)
		verbs_xfer_stop(op->impl, why);
}

void verbs_xfer_progress(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer;

	list_foreach(xfer, &peer->movers, mover_link) {
		struct verbs_frame frame = {
			.type = VERBS_PROGRESS, .id = xfer->id, .bytes = xfer->done_bytes};
		struct verbs_out *out;

		if (xfer->done_bytes == xfer->said_bytes)
			continue;
		out = verbs_out_new();
		if (!out) {
			err_clear(); /* it is only for the clock of who waits */
			return;
		}
		xfer->said_bytes = xfer->done_bytes;
		verbs_send(peer, out, &frame, NULL);
	}
}

static int take_go(struct verbs_xfer *xfer, const struct verbs_frame *frame)
{
	unsigned int state = sm_state(&xfer->sm);
	struct verbs_mark mark;

	if (xfer->go || xfer->answered || xfer->bytes == 0 ||
	    (state != VERBS_XFER_ASKED && state != VERBS_XFER_STOPPING))
		return err_raise(ERR_PROTO, "verbs: GO for transfer %" PRIu64 " (%s)",
				 xfer->id, sm_name(&xfer->sm));
	verbs_mark_get(frame->slot, &mark);
	xfer->go = true;
	xfer->slot = mark.slot;
	xfer->generation = mark.generation;
	if (state == VERBS_XFER_ASKED) {
		sm_move(&xfer->sm, VERBS_XFER_MOVING);
		if (frame->digest !=
		    verbs_places_digest(&xfer->remote, xfer->plan, !is_source(xfer))) {
			err_raise(ERR_REVOKED, "verbs: the peer's memory is registered "
					       "anew: its old key is of no use");
			stop_last(xfer);
		}
	}
	verbs_move_start(xfer); /* also a stopping one: it owes its last words */
	return 0;
}

static int take_done(struct verbs_xfer *xfer, const struct verbs_frame *frame,
		     const uint8_t *payload)
{
	if (!xfer->asked || xfer->answered || (xfer->go && !xfer->ended) ||
	    (frame->code == ERR_OK && xfer->bytes && !xfer->go))
		return err_raise(ERR_PROTO, "verbs: DONE for transfer %" PRIu64 " (%s)",
				 xfer->id, sm_name(&xfer->sm));
	xfer->answered = true;
	if (frame->code != ERR_OK) {
		verbs_frame_get_err(frame, payload, frame->length, &xfer->verdict);
		verbs_xfer_stop(xfer, &xfer->verdict);
	}
	verbs_xfer_check(xfer);
	return 0;
}

static void take_revoke(struct verbs_xfer *xfer, const struct verbs_frame *frame,
			const uint8_t *payload)
{
	struct err err;

	verbs_frame_get_err(frame, payload, frame->length, &err);
	if (sm_state(&xfer->sm) < VERBS_XFER_STOPPING)
		xfer->stop_said = true; /* who revokes needs no CANCEL */
	verbs_xfer_stop(xfer, &err);
}

static int take_for_op(struct verbs_peer *peer, const struct verbs_frame *frame,
		       const uint8_t *payload)
{
	struct verbs_xfer *xfer = idmap_get(&peer->ops, frame->id);

	if (!xfer)
		return err_raise(ERR_PROTO, "verbs: an answer to transfer %" PRIu64
				 " that is not there", frame->id);
	switch (frame->type) {
	case VERBS_GO:
		return err_pass(take_go(xfer, frame));
	case VERBS_DONE:
		return err_pass(take_done(xfer, frame, payload));
	default:
		take_revoke(xfer, frame, payload);
		return 0;
	}
}

/* ---- theirs ---- */

static int admit_request(struct verbs_peer *peer, const struct verbs_frame *frame)
{
	if (frame->id <= peer->inbound_high || peer->assembling || peer->skip_bytes)
		return err_raise(ERR_PROTO, "verbs: request %" PRIu64 " after %" PRIu64,
				 frame->id, peer->inbound_high);
	if (frame->kind != XP_WRITE && frame->kind != XP_READ)
		return err_raise(ERR_PROTO, "verbs: request of kind %u", frame->kind);
	if (frame->total > XP_HEADER_MAX || frame->length > frame->total)
		return err_raise(ERR_PROTO, "verbs: a header of %u bytes, %u of them here",
				 frame->total, frame->length);
	if (idmap_count(&peer->inbounds) >= XP_INBOUND_MAX ||
	    peer->held_bytes > VERBS_HEADERS_MAX)
		return err_raise(ERR_PROTO, "verbs: over %u unfinished requests, or %u bytes "
					    "of their headers",
				 XP_INBOUND_MAX, VERBS_HEADERS_MAX);
	return 0;
}

/* No memory for it: that costs the request, not the peer, if words still fit. */
static void refuse(struct verbs_peer *peer, uint64_t id)
{
	struct verbs_frame frame = {.type = VERBS_DONE, .id = id};
	struct verbs_out *out;
	struct err err;

	err_take(&err);
	out = verbs_out_new();
	if (out)
		verbs_send(peer, out, &frame, &err);
	else
		verbs_peer_fail_last(peer);
}

static int inbound_new(struct verbs_peer *peer, const struct verbs_frame *frame)
{
	mem_cleanup(xfer_freep) struct verbs_xfer *xfer = NULL;
	int r = xfer_new(peer, (enum xp_kind)frame->kind, &xfer);

	if (r < 0)
		return err_pass(r);
	xfer->header = mem_zalloc((size_t)frame->total + 1);
	if (!xfer->header)
		return err_pass(-ENOMEM);
	peer->held_bytes += frame->total;
	xfer->in = (struct xp_inbound){
		.peer = (struct xp_peer *)peer,
		.kind = (enum xp_kind)frame->kind,
		.header = xfer->header,
		.header_len = frame->total,
		.bytes = frame->bytes,
	};
	xfer->id = frame->id;
	xfer->bytes = frame->bytes;
	xfer->digest = frame->digest;
	r = idmap_put(&peer->inbounds, frame->id, xfer);
	if (r < 0)
		return err_pass(r);
	sm_init(&xfer->sm, &xfer_table, VERBS_XFER_ASKED);
	peer->assembling = mem_steal(xfer);
	return 0;
}

/* The next bytes of its header; whole, it is a request. */
static void assemble(struct verbs_peer *peer, const struct verbs_frame *frame,
		     const uint8_t *payload)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;
	struct verbs_xfer *xfer = peer->assembling;

	memcpy(xfer->header + xfer->header_have, payload, frame->length);
	xfer->header_have += frame->length;
	if (xfer->header_have < xfer->in.header_len)
		return;
	peer->assembling = NULL;
	list_push_back(&peer->xfers, &xfer->link);
	up->on_request(up->owner, &xfer->in);
}

static int take_request(struct verbs_peer *peer, const struct verbs_frame *frame,
			const uint8_t *payload)
{
	int r = admit_request(peer, frame);

	if (r < 0)
		return err_pass(r);
	peer->inbound_high = frame->id;
	if (inbound_new(peer, frame) < 0) {
		peer->skip_bytes = frame->total - frame->length;
		refuse(peer, frame->id);
		return 0;
	}
	assemble(peer, frame, payload);
	return 0;
}

static int take_more(struct verbs_peer *peer, const struct verbs_frame *frame,
		     const uint8_t *payload)
{
	struct verbs_xfer *xfer = peer->assembling;

	if (peer->skip_bytes && frame->length <= peer->skip_bytes) {
		peer->skip_bytes -= frame->length;
		return 0;
	}
	if (!xfer || frame->id != xfer->id || frame->length == 0 ||
	    frame->length > xfer->in.header_len - xfer->header_have)
		return err_raise(ERR_PROTO, "verbs: more of request %" PRIu64
				 " than it has", frame->id);
	assemble(peer, frame, payload);
	return 0;
}

void verbs_xfer_drop_partial(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer = mem_steal(peer->assembling);

	if (xfer)
		idmap_remove(&peer->inbounds, xfer->id);
	xfer_free(xfer);
}

/* ---- answers ---- */

static void say_go(struct verbs_xfer *xfer)
{
	struct verbs_mark mark = {.count = 1, .generation = xfer->generation};
	struct verbs_frame frame = {
		.type = VERBS_GO,
		.id = xfer->id,
		.digest = verbs_places_digest(&xfer->local, xfer->plan, is_source(xfer)),
	};

	if (xfer->slot < VERBS_GRANTS)
		mark.slot = (uint16_t)xfer->slot;
	frame.slot = verbs_mark_put(&mark);
	xfer->go = true;
	say(xfer, VERBS_SPARE_FIRST, &frame, NULL);
}

static void grant_one(struct verbs_peer *peer, struct verbs_xfer *xfer)
{
	uint32_t slot = peer->grant_next;

	while (peer->grants[slot])
		slot = (slot + 1) % VERBS_GRANTS;
	peer->grant_next = (slot + 1) % VERBS_GRANTS;
	peer->grants[slot] = xfer;
	peer->grant_count++;
	xfer->slot = slot;
	xfer->generation = peer->generations[slot];
	peer->generations[slot] = (uint16_t)((xfer->generation + 1) % VERBS_GENERATIONS);
	list_remove(&xfer->grant_link);
	say_go(xfer);
}

void verbs_xfer_grant(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer;

	while (peer->grant_count < VERBS_GRANTS &&
	       (xfer = list_first(&peer->ungranted, struct verbs_xfer, grant_link)))
		grant_one(peer, xfer);
}

static int accept_sides(struct verbs_xfer *xfer, const struct xp_sides *sides)
{
	uint64_t bytes = sides && sides->plan ? sides->plan->bytes : 0;
	int r;

	if (bytes != xfer->bytes)
		return err_raise(ERR_PLAN,
				 "plan of %" PRIu64 " bytes here, %" PRIu64 " there", bytes,
				 xfer->bytes);
	r = take_sides(xfer, sides);
	if (r == 0 && bytes && sides->plan->digest != xfer->digest)
		r = err_raise(ERR_PLAN, "the plan of %" PRIu64
			      " bytes is another one here than there", bytes);
	return err_pass(r);
}

void verbs_land(struct xp_inbound *in, const struct xp_sides *sides,
		const struct err *err)
{
	struct verbs_xfer *xfer = container_of(in, struct verbs_xfer, in);

	if (sm_state(&xfer->sm) != VERBS_XFER_ASKED)
		return; /* stopped meanwhile: its end is on the way */
	if (err) {
		verbs_xfer_stop(xfer, err);
		return;
	}
	if (accept_sides(xfer, sides) < 0) {
		stop_last(xfer);
		return;
	}
	sm_move(&xfer->sm, VERBS_XFER_MOVING);
	if (xfer->bytes && is_source(xfer)) {
		say_go(xfer);
	} else if (xfer->bytes) {
		list_push_back(&xfer->peer->ungranted, &xfer->grant_link);
		verbs_peer_kick(xfer->peer);
	}
	verbs_xfer_check(xfer);
}

void verbs_revoke(struct xp_inbound *in, const struct err *why)
{
	verbs_xfer_stop(container_of(in, struct verbs_xfer, in), why);
}

/* ---- the mover's words ---- */

int verbs_xfer_mark(struct verbs_peer *peer, const struct verbs_qp *qp,
		    const struct verbs_mark *mark)
{
	struct verbs_xfer *xfer = peer->grants[mark->slot];
	uint32_t bit = 1u << qp->index;

	if (!verbs_peer_live(peer))
		return 0;
	if (!xfer || xfer->generation != mark->generation || xfer->marks & bit ||
	    mark->count > peer->qp_count ||
	    (xfer->marks_due && xfer->marks_due != mark->count))
		return err_raise(ERR_PROTO, "verbs: a mark for slot %u, generation %u, on "
					    "queue pair %u, of %u",
				 mark->slot, mark->generation, qp->index, mark->count);
	xfer->marks |= bit;
	xfer->marks_due = mark->count;
	xfer->marks_aborted |= mark->aborted;
	if (words_came(xfer))
		slot_free(xfer);
	verbs_xfer_check(xfer);
	return 0;
}

static int take_fin(struct verbs_xfer *xfer, const struct verbs_frame *frame,
		    const uint8_t *payload)
{
	struct err err;

	if (xfer->kind != XP_READ || !xfer->go || xfer->fin_came)
		return err_raise(ERR_PROTO, "verbs: FIN for transfer %" PRIu64 " (%s)",
				 xfer->id, sm_name(&xfer->sm));
	xfer->fin_came = true;
	if (frame->code != ERR_OK) {
		verbs_frame_get_err(frame, payload, frame->length, &err);
		verbs_xfer_stop(xfer, &err);
	}
	verbs_xfer_check(xfer);
	return 0;
}

static int take_for_inbound(struct verbs_peer *peer, const struct verbs_frame *frame,
			    const uint8_t *payload)
{
	struct verbs_xfer *xfer = idmap_get(&peer->inbounds, frame->id);
	struct err err;

	if (frame->id > peer->inbound_high || (xfer && xfer == peer->assembling))
		return err_raise(ERR_PROTO, "verbs: words on transfer %" PRIu64
				 " that was never asked", frame->id);
	if (!xfer)
		return 0; /* our DONE crosses it */
	switch (frame->type) {
	case VERBS_FIN:
		return err_pass(take_fin(xfer, frame, payload));
	case VERBS_PROGRESS:
		if (frame->bytes > xfer->in.moved && frame->bytes <= xfer->bytes)
			xfer->in.moved = frame->bytes;
		return 0;
	default:
		verbs_frame_get_err(frame, payload, frame->length, &err);
		xfer->stop_said = true;
		verbs_xfer_stop(xfer, &err);
		return 0;
	}
}

int verbs_xfer_frame(struct verbs_peer *peer, const struct verbs_frame *frame,
		     const uint8_t *payload)
{
	struct verbs_mark mark;

	switch (frame->type) {
	case VERBS_REQUEST:
		return err_pass(take_request(peer, frame, payload));
	case VERBS_MORE:
		return err_pass(take_more(peer, frame, payload));
	case VERBS_MARK:
		verbs_mark_get(frame->slot, &mark);
		return err_pass(verbs_xfer_mark(peer, &peer->qps[0], &mark));
	case VERBS_GO:
	case VERBS_DONE:
	case VERBS_REVOKE:
		return err_pass(take_for_op(peer, frame, payload));
	default:
		return err_pass(take_for_inbound(peer, frame, payload));
	}
}
