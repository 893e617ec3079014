/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's transfers as the caller sees them: post, land, cancel, revoke, and
 * the end of all at a peer. What happens in between is fake_move.c's.
 *
 * post() makes everything that the transfer will ever need, so that nothing
 * after it can run out of memory, except the answerer's table of buffers in
 * land(), whose failure refuses the request. Each half holds references on the
 * memory it touches until its done callback; the header is copied, because the
 * initiator may be done (lost, canceled) while the answerer still reads it.
 */
#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

/* ---- post ---- */

static int x_slices(struct fake_xfer *x)
{
	uint64_t slice_bytes = x->profile.slice_bytes;
	uint64_t wanted = (x->bytes + slice_bytes - 1) / slice_bytes;
	unsigned int window =
		x->profile.window > FAKE_WINDOW_MAX ? FAKE_WINDOW_MAX : x->profile.window;

	if (wanted > window)
		wanted = window;
	if (wanted == 0)
		return 0;
	x->slices = mem_calloc(wanted, sizeof(*x->slices));
	if (!x->slices)
		return err_pass(-ENOMEM);
	for (; x->slice_count < wanted; x->slice_count++) {
		struct fake_slice *slice = &x->slices[x->slice_count];

		fake_slice_init(x, slice);
		slice->bytes =
			mem_zalloc(slice_bytes < x->bytes ? slice_bytes : x->bytes);
		if (!slice->bytes)
			return err_pass(-ENOMEM);
	}
	return 0;
}

/* The initiator's copies of what the op names. */
static int x_sides(struct fake_xfer *x, const struct xp_sides *sides)
{
	bool write = x->kind == XP_WRITE;
	int r;

	if (x->bytes == 0)
		return 0;
	if (!write && x->profile.need_keys &&
	    !fake_keys_usable(sides->src, sides->src_count))
		return err_raise(ERR_INVAL, "fake: a key of the source is missing");
	r = xp_sides_check(sides, write || x->check, !write);
	if (r == 0 && (write || x->check)) {
		x->src_plan = sides->plan;
		r = fake_table_make(&x->src, sides->src, sides->src_count, x->check);
		if (r == 0)
			r = fake_plan_keep(x, &x->src_plan);
	}
	if (r == 0 && !write) {
		x->dst_plan = sides->plan;
		r = fake_table_make(&x->dst, sides->dst, sides->dst_count, false);
		if (r == 0)
			r = fake_plan_keep(x, &x->dst_plan);
	}
	return err_pass(r);
}

static int post_allowed(struct fake_peer *peer, const struct xp_op *op)
{
	if (peer->state == FAKE_LOST || peer->node->dead)
		return err_raise(ERR_PEER, "fake: the peer is lost");
	if (peer->state != FAKE_READY || peer->closing)
		return err_raise(ERR_STATE, "fake: the peer is not connected");
	if (op->kind != XP_WRITE && op->kind != XP_READ)
		return err_raise(ERR_INVAL, "fake: an op is a WRITE or a READ");
	if (op->header_len > XP_HEADER_MAX)
		return err_raise(ERR_TOOBIG, "fake: header of %zu bytes, at most %u",
				 op->header_len, XP_HEADER_MAX);
	if (peer->unfinished >= XP_INBOUND_MAX)
		return err_raise(ERR_LIMIT, "fake: %u unfinished transfers to this peer",
				 XP_INBOUND_MAX);
	return 0;
}

static int x_fill(struct fake_xfer *x, const struct xp_op *op)
{
	int r;

	x->header_len = op->header_len;
	if (op->header_len) {
		x->header = mem_dup(op->header, op->header_len);
		if (!x->header)
			return err_pass(-ENOMEM);
	}
	r = x_sides(x, &op->sides);
	return err_pass(r < 0 ? r : x_slices(x));
}

static int x_new(struct fake_peer *peer, const struct xp_op *op,
		 const struct fake_rule *fault, struct fake_xfer **x_p)
{
	struct fake_hub *hub = peer->node->hub;
	struct fake_xfer *x = mem_zalloc(sizeof(*x));
	int r;

	if (!x)
		return err_pass(-ENOMEM);
	x->hub = hub;
	x->conn = peer->conn;
	x->conn->refs++;
	x->refs = 1; /* the initiator's half */
	x->id = ++hub->next_xfer;
	hub->xfers++;
	list_push_back(&x->conn->xfers, &x->link);
	x->kind = op->kind;
	x->init = peer->self ? 0 : peer->end;
	x->profile = *fake_profile_of(hub, fake_node_at(x, x->init),
				      fake_node_at(x, !x->init));
	if (x->profile.slice_bytes == 0)
		x->profile.slice_bytes = 1;
	x->check = op->kind == XP_READ && x->profile.check;
	x->fault = *fault;
	x->keep = hub->bug != FAKE_BUG_NONE;
	x->bytes = op->sides.plan ? op->sides.plan->bytes : 0;
	fake_x_init(x);
	r = x_fill(x, op);
	if (r < 0) {
		fake_x_unref(x);
		return err_pass(r);
	}
	*x_p = x;
	return 0;
}

int fake_post(struct xp_peer *xpeer, struct xp_op *op)
{
	struct fake_peer *peer = fake_peer_of(xpeer);
	struct fake_hub *hub = peer->node->hub;
	struct fake_rule fault = {0};
	struct fake_xfer *x = NULL;
	int r = post_allowed(peer, op);

	if (r == 0) {
		fake_fault_draw(hub, peer->node,
				peer->conn->node[peer->self || !peer->end], op, &fault);
		if (fault.fault == FAKE_REFUSE)
			r = err_raise(ERR_TRANSPORT, "fake: refused (scripted)");
		else if (fault.fault == FAKE_NOMEM)
			r = err_raise(ERR_NOMEM, "fake: no memory (scripted)");
	}
	if (r == 0)
		r = x_new(peer, op, &fault, &x);
	if (r < 0) {
		hub->stats.refused_posts++;
		return err_pass(r);
	}
	hub->stats.posts++;
	peer->unfinished++;
	x->op = op;
	op->impl = x;
	op->moved = 0;
	op->result = 0;
	x->landing = x->kind == XP_READ;
	fake_trace(hub, peer->node, fake_node_at(x, !x->init), x->id, "post", x->bytes);
	if (!x->check) {
		fake_frame_send(x, FAKE_FRAME_REQUEST, NULL);
	} else if (x->bytes == 0) {
		fake_landed_all(x);
	} else {
		x->reading = true;
		fake_pump_wake(x, 0);
	}
	return 0;
}

/* ---- the answer ---- */

static int land_accept(struct fake_xfer *x, const struct xp_sides *sides)
{
	const struct plan *plan = sides ? sides->plan : NULL;
	uint64_t bytes = plan ? plan->bytes : 0;
	bool write = x->kind == XP_WRITE;
	int r;

	if (x->check)
		return 0;
	if (bytes != x->bytes && !(x->hub->bug == FAKE_BUG_PLAN_UNCHECKED && plan)) {
		return err_raise(ERR_PLAN,
				 "fake: the peer announced %llu bytes, the plan has %llu",
				 (unsigned long long)x->bytes, (unsigned long long)bytes);
	}
	if (x->bytes > bytes)
		x->bytes = bytes;
	if (x->bytes == 0)
		return 0;
	if (write && x->profile.need_keys &&
	    !fake_keys_usable(sides->src, sides->src_count))
		return err_raise(ERR_INVAL, "fake: a key of the source is missing");
	r = xp_sides_check(sides, !write, write);
	if (r < 0)
		return err_pass(r);
	if (write) {
		x->dst_plan = plan;
		r = fake_table_make(&x->dst, sides->dst, sides->dst_count, false);
		return err_pass(r < 0 ? r : fake_plan_keep(x, &x->dst_plan));
	}
	x->src_plan = plan;
	r = fake_table_make(&x->src, sides->src, sides->src_count, false);
	return err_pass(r < 0 ? r : fake_plan_keep(x, &x->src_plan));
}

void fake_land(struct xp_inbound *in, const struct xp_sides *sides,
	       const struct err *refusal)
{
	struct fake_xfer *x = container_of(in, struct fake_xfer, in);
	struct err err;

	if (x->in_state != FAKE_IN_ASKED)
		return; /* canceled or revoked before the answer */
	if (!refusal && land_accept(x, sides) < 0) {
		err_take(&err);
		refusal = &err;
	}
	if (refusal) {
		fake_in_end(x, refusal);
		return;
	}
	x->in_state = FAKE_IN_RUNNING;
	if (x->check || (x->kind == XP_WRITE && x->bytes == 0)) {
		fake_in_end(x, NULL);
		return;
	}
	fake_frame_send(x, FAKE_FRAME_ACCEPT, NULL);
	if (x->kind == XP_WRITE) {
		x->landing = true;
	} else {
		x->reading = true;
		fake_pump_wake(x, 0);
	}
}

void fake_revoke(struct xp_inbound *in, const struct err *why)
{
	struct fake_xfer *x = container_of(in, struct fake_xfer, in);

	fake_trace(x->hub, fake_node_at(x, !x->init), NULL, x->id, "revoke", why->code);
	if (x->in_state == FAKE_IN_RUNNING && x->kind == XP_WRITE) {
		fake_lander_stop(x, why);
		return;
	}
	if (x->kind == XP_READ && !x->check)
		x->reading = false;
	fake_in_end(x, why);
}

/* ---- cancel and loss ---- */

static void cancel_write(struct fake_xfer *x, const struct err *why)
{
	if (x->hub->bug == FAKE_BUG_SOURCE_STALE) {
		fake_op_end(x, why); /* the destination hears nothing and reads on */
		return;
	}
	x->reading = false;
	fake_frame_send(x, FAKE_FRAME_CANCEL, why);
}

static void cancel_read(struct fake_xfer *x, const struct err *why)
{
	if (x->check && !x->landing) { /* all is here, the check is under way */
		fake_frame_send(x, FAKE_FRAME_CANCEL, why);
		fake_op_end(x, why);
		return;
	}
	if (x->check)
		x->reading = false;
	else
		fake_frame_send(x, FAKE_FRAME_CANCEL, why);
	fake_lander_stop(x, why);
}

void fake_cancel(struct xp_op *op, const struct err *why)
{
	struct fake_xfer *x = op->impl;
	struct err none;

	if (!x || x->op != op || x->op_canceled || x->op_ending)
		return;
	if (!why) {
		err_set(&none, ERR_CANCELED, "canceled");
		why = &none;
	}
	fake_trace(x->hub, fake_node_at(x, x->init), NULL, x->id, "cancel", why->code);
	x->op_canceled = true;
	if (x->kind == XP_WRITE)
		cancel_write(x, why);
	else
		cancel_read(x, why);
	if (fake_bug_once(x->hub, FAKE_BUG_DONE_INSIDE)) {
		x->op_bad = true;
		x->op_err = *why;
		fake_op_finish(x);
	}
}

static void lander_kill(struct fake_xfer *x)
{
	if (x->hub->bug == FAKE_BUG_LOST_WRITES)
		return;
	x->landing = false;
	fake_slices_doom(x);
}

/* Give up a queued event and the reference it held. */
static void x_event_remove(struct fake_xfer *x, struct fake_event *event)
{
	if (fake_event_remove(event))
		fake_x_unref(x);
}

static void op_lose(struct fake_xfer *x, const struct err *why)
{
	if (x->kind == XP_READ)
		lander_kill(x);
	if (!x->op_ending) {
		x->op_ending = true;
		x->op_bad = true;
		x->op_err = *why;
	}
	x_event_remove(x, &x->op_done);
	fake_op_finish(x);
}

static void in_lose(struct fake_xfer *x, const struct err *why)
{
	if (x->kind == XP_WRITE)
		lander_kill(x);
	if (x->in_state != FAKE_IN_ENDING) {
		x->in_state = FAKE_IN_ENDING;
		x->in_bad = true;
		x->in_err = *why;
	}
	x_event_remove(x, &x->in_done);
	fake_in_finish(x);
}

/* One half that lives at this peer ends; false when there is none. */
static bool peer_end_one(struct fake_peer *peer, const struct err *why)
{
	struct fake_conn *conn = peer->conn;
	struct fake_xfer *x;

	list_foreach(x, &conn->xfers, link) {
		if (x->op && conn->peer[x->init] == peer) {
			op_lose(x, why);
			return true;
		}
		if (fake_in_live(x) && conn->peer[!x->init] == peer) {
			in_lose(x, why);
			return true;
		}
	}
	return false;
}

void fake_peer_end(struct fake_peer *peer, const struct err *why)
{
	peer->state = FAKE_LOST;
	peer->base.ready = false;
	/* callbacks may do anything but post here: start over after each */
	while (peer->conn && peer_end_one(peer, why))
		continue;
}
