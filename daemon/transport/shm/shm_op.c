/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfers that this daemon posts.
 *
 * A posted op waits in peer->waiting, in order, until its REQUEST may go: the
 * peer has room for it, and, where it is a READ of memory that we mapped, its
 * bytes are here (they travel before the request that asks whether they count;
 * later posts wait behind it, because requests keep the order of posts).
 *
 * Whatever happens then ends in op_step(): it looks at what is known (answered,
 * failed, still busy) and moves the op to peer->finished_ops when, and only
 * when, on_done's promises hold:
 *
 *   WRITE  nothing read from the source counts after on_done. The peer counts
 *          bytes after our CONFIRM only. Before it, a cancel is done as soon as
 *          our own threads have left the source (they read it only for the
 *          ring); the peer may read on in its mapping, in vain. After CONFIRM a
 *          cancel comes too late and the peer's last word decides.
 *   READ   no byte is written after on_done: it is our threads that write.
 *
 * An op that is done before the peer had its last word stays in its slot
 * without its caller's part, so that late frames find their number, and so that
 * the peer's limit of unfinished requests is never passed.
 */
#include "daemon/transport/shm/shm_private.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"

#define SLOT_MASK (XP_INBOUND_MAX - 1u)

/* ---- slots ---- */

struct shm_op *shm_op_find(struct shm_peer *peer, uint64_t id)
{
	uint32_t slot = (uint32_t)id & SLOT_MASK;
	struct shm_op *so = slot < peer->op_slots ? peer->ops[slot] : NULL;

	return so && so->id == id ? so : NULL;
}

static int slots_grow(struct shm_peer *peer)
{
	uint32_t size = peer->op_slots ? 2 * peer->op_slots : 64;
	struct shm_op **bigger = mem_regrow(peer->ops, size, sizeof(*bigger));

	if (!bigger)
		return err_pass(-ENOMEM);
	memset(bigger + peer->op_slots, 0, (size - peer->op_slots) * sizeof(*bigger));
	peer->ops = bigger;
	peer->op_slots = size;
	return 0;
}

/* Slots are taken in turn, so the search is short. */
static int slot_take(struct shm_peer *peer, struct shm_op *so)
{
	uint32_t slot;

	if (peer->op_count == peer->op_slots) {
		int r = slots_grow(peer);

		if (r < 0)
			return err_pass(r);
	}
	slot = (uint32_t)peer->op_serial & (peer->op_slots - 1);
	while (peer->ops[slot])
		slot = (slot + 1) & (peer->op_slots - 1);
	peer->op_serial++;
	so->id = peer->op_serial << SHM_SLOT_BITS | slot;
	peer->ops[slot] = so;
	peer->op_count++;
	so->header_len = so->op->header_len;
	peer->op_header_bytes += so->header_len;
	return 0;
}

static void slot_leave(struct shm_peer *peer, struct shm_op *so)
{
	peer->ops[so->id & SLOT_MASK] = NULL;
	peer->op_count--;
	peer->op_header_bytes -= so->header_len;
	if (!list_empty(&peer->waiting))
		shm_peer_kick(peer);
}

static void op_free(struct shm_op *so)
{
	list_remove(&so->link);
	shm_flow_fini(&so->flow);
	mem_free(so);
}

/* ---- the step ---- */

static void op_finish(struct shm_op *so)
{
	struct shm_peer *peer = so->flow.peer;

	so->finished = true;
	list_remove(&so->link);
	list_push_back(&peer->finished_ops, &so->link);
	shm_peer_kick(peer);
}

static void op_failing(struct shm_op *so)
{
	struct shm_peer *peer = so->flow.peer;

	shm_flow_stop(&so->flow);
	if (so->id == 0) { /* never asked: others need not wait for it */
		list_remove(&so->link);
		list_push_back(&peer->draining, &so->link);
		shm_peer_kick(peer);
	}
	if (so->id != 0 && !so->answered && !so->canceled) {
		so->canceled = true;
		shm_send_err(peer, SHM_CANCEL, so->id, &so->err);
	}
	if (!shm_flow_busy(&so->flow))
		op_finish(so);
}

static void op_step(struct shm_op *so)
{
	struct shm_peer *peer = so->flow.peer;

	if (so->finished || !shm_peer_live(peer))
		return;
	if (so->result == 0 && so->flow.result < 0) {
		so->result = so->flow.result;
		so->err = so->flow.err;
	}
	if (so->result < 0 && !(so->copied && !so->answered)) {
		op_failing(so);
		return;
	}
	if (so->id == 0) {
		if (so->reads_itself && shm_flow_complete(&so->flow))
			shm_peer_kick(peer); /* its request may go */
		return;
	}
	if (!so->answered || shm_flow_busy(&so->flow))
		return;
	if (so->op->kind == XP_READ && !shm_flow_complete(&so->flow))
		return;
	so->result = 0;
	op_finish(so);
}

static void on_flow(struct shm_flow *flow)
{
	struct shm_op *so = container_of(flow, struct shm_op, flow);

	op_step(so);
	if (!shm_peer_live(flow->peer))
		shm_peer_kick(flow->peer);
}

static void op_fail(struct shm_op *so, const struct err *why)
{
	if (so->result < 0 || so->finished)
		return;
	so->err = *why;
	so->result = -err_errno(why->code);
}

/* ---- posting ---- */

static int op_check(const struct shm_peer *peer, const struct xp_op *op)
{
	if (!shm_peer_live(peer))
		return err_raise(ERR_PEER, "shm: the peer is not connected");
	if (op->kind != XP_WRITE && op->kind != XP_READ)
		return err_raise(ERR_INVAL, "shm: an op is a WRITE or a READ");
	if (op->header_len > XP_HEADER_MAX)
		return err_raise(ERR_TOOBIG, "shm: a header of %zu bytes, %u are allowed",
				 op->header_len, XP_HEADER_MAX);
	return err_pass(
		xp_sides_check(&op->sides, op->kind == XP_WRITE, op->kind == XP_READ));
}

/* A READ copies by itself where it can; else the source will be asked to. */
static int read_begin(struct shm_op *so)
{
	struct xp_op *op = so->op;
	bool direct = shm_sides_direct(so->flow.peer, &op->sides);
	int r = 0;

	if (direct)
		r = xp_sides_check(&op->sides, true, true);
	if (r == 0)
		r = shm_flow_init(&so->flow, so->flow.peer, &op->sides, direct, true,
				  on_flow);
	if (r == 0)
		r = direct ? shm_flow_direct(&so->flow) : shm_ring_expect(so->flow.peer);
	so->reads_itself = direct;
	return err_pass(r);
}

int shm_post(struct xp_peer *xpeer, struct xp_op *op)
{
	struct shm_peer *peer = (struct shm_peer *)(void *)xpeer;
	struct shm_op *so;
	int r = op_check(peer, op);

	if (r < 0)
		return err_pass(r);
	so = mem_zalloc(sizeof(*so));
	if (!so)
		return err_pass(-ENOMEM);
	list_init(&so->link);
	so->op = op;
	so->bytes = op->sides.plan ? op->sides.plan->bytes : 0;
	so->flow.peer = peer;
	if (op->kind == XP_READ)
		r = read_begin(so);
	else
		r = shm_flow_init(&so->flow, peer, &op->sides, true, false, on_flow);
	if (r < 0) {
		op_free(so);
		return err_pass(r);
	}
	op->impl = so;
	op->result = 0;
	op->moved = 0;
	list_push_back(&peer->waiting, &so->link);
	shm_peer_kick(peer);
	return 0;
}

static bool op_may_go(const struct shm_peer *peer, const struct shm_op *so)
{
	if (so->reads_itself && !shm_flow_complete(&so->flow))
		return false;
	return peer->op_count < XP_INBOUND_MAX &&
	       peer->op_header_bytes + so->op->header_len <= SHM_HEADER_BYTES_MAX &&
	       shm_unsent(peer) < SHM_OUT_SOFT;
}

static void op_request(struct shm_op *so)
{
	enum xp_kind kind = so->reads_itself ? XP_CHECK : so->op->kind;
	uint8_t body[SHM_REQUEST_BYTES], *owned = NULL;
	struct cursor c;

	if (so->op->header_len > SHM_TAIL_MIN)
		owned = mem_steal(so->op->owned);
	cursor_write(&c, body, sizeof(body));
	cursor_put_u8(&c, (uint8_t)kind);
	cursor_put_u64(&c, so->bytes);
	cursor_put_u32(&c, (uint32_t)so->op->header_len);
	if (kind == XP_READ)
		shm_ring_scatter(&so->flow);
	shm_send(so->flow.peer, &(struct shm_frame){.type = SHM_REQUEST,
						    .id = so->id,
						    .body = body,
						    .body_len = sizeof(body),
						    .tail = so->op->header,
						    .tail_len = so->op->header_len,
						    .owned = owned});
}

void shm_ops_pump(struct shm_peer *peer)
{
	struct shm_op *so;

	while ((so = list_first(&peer->waiting, struct shm_op, link)) &&
	       op_may_go(peer, so)) {
		list_remove(&so->link);
		if (slot_take(peer, so) < 0) {
			struct err err;

			err_take(&err);
			op_fail(so, &err);
			op_step(so);
			continue;
		}
		op_request(so);
	}
}

void shm_cancel(struct xp_op *op, const struct err *why)
{
	struct shm_op *so = op->impl;

	if (!so || so->finished || so->copied)
		return;
	op_fail(so, why);
	op_step(so);
}

/* ---- the peer's answers ---- */

static int op_of(struct shm_peer *peer, const struct shm_frame *f, struct shm_op **so_p)
{
	*so_p = shm_op_find(peer, f->id);
	if (!*so_p)
		return err_raise(ERR_PROTO, "no request %#jx is open", (uintmax_t)f->id);
	return 0;
}

static bool op_is_write(const struct shm_op *so)
{
	return so->flow.mode != SHM_FLOW_SCATTER && !so->reads_itself;
}

int shm_on_stage(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_op *so;
	int r = op_of(peer, f, &so);

	(void)c;
	if (r < 0)
		return err_pass(r);
	if (!op_is_write(so) || so->bytes == 0 || so->copied ||
	    so->flow.mode != SHM_FLOW_NONE)
		return err_raise(ERR_PROTO, "not possible for this request");
	if (so->finished || so->result < 0)
		return 0; /* our CANCEL is under way */
	if (shm_ring_gather(&so->flow, so->id, false) < 0) {
		shm_flow_fail(&so->flow);
		op_step(so);
	}
	return 0;
}

int shm_on_progress(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	uint64_t bytes = cursor_get_u64(c);
	struct shm_op *so;
	int r = op_of(peer, f, &so);

	if (r < 0)
		return err_pass(r);
	if (!op_is_write(so) || bytes > so->bytes)
		return err_raise(ERR_PROTO, "%ju bytes of %ju", (uintmax_t)bytes,
				 (uintmax_t)so->bytes);
	if (bytes > so->progress)
		so->progress = bytes;
	if (so->op && so->progress > so->op->moved)
		so->op->moved = so->progress;
	return 0;
}

int shm_on_copied(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_op *so;
	int r = op_of(peer, f, &so);

	(void)c;
	if (r < 0)
		return err_pass(r);
	if (!op_is_write(so) || so->bytes == 0 || so->copied)
		return err_raise(ERR_PROTO, "not possible for this request");
	if (so->flow.mode == SHM_FLOW_GATHER && so->result == 0 &&
	    !shm_flow_complete(&so->flow))
		return err_raise(ERR_PROTO, "before all bytes were sent");
	if (so->finished || so->result < 0)
		return 0; /* it must not count: our CANCEL is under way */
	so->copied = true;
	shm_send(peer, &(struct shm_frame){.type = SHM_CONFIRM, .id = so->id});
	return 0;
}

int shm_on_done(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_op *so;
	struct err err;
	int r = op_of(peer, f, &so);

	if (r < 0)
		return err_pass(r);
	shm_get_err(c, &err);
	r = cursor_check(c, "DONE");
	if (r < 0)
		return err_pass(r);
	if (so->answered)
		return err_raise(ERR_PROTO, "twice");
	if (err.code == ERR_OK && op_is_write(so) && so->bytes > 0 && !so->copied)
		return err_raise(ERR_PROTO, "success of bytes that we did not confirm");
	so->answered = true;
	if (!so->op) { /* the caller has had on_done */
		slot_leave(peer, so);
		op_free(so);
		return 0;
	}
	if (err.code != ERR_OK)
		op_fail(so, &err);
	op_step(so);
	return 0;
}

/* ---- the peer's step and end ---- */

static void op_hand_back(struct shm_op *so)
{
	struct xp_op *op = so->op;

	so->op = NULL;
	op->impl = NULL;
	op->result = so->result;
	op->err = so->err;
	op->used = so->flow.used;
	if (so->result == 0)
		op->moved = so->bytes;
	else if (shm_flow_moved(&so->flow) > op->moved)
		op->moved = shm_flow_moved(&so->flow);
	shm_flow_fini(&so->flow); /* its memory is the caller's again */
	op->on_done(op);
}

bool shm_ops_deliver(struct shm_peer *peer)
{
	struct list *n = list_pop_front(&peer->finished_ops);
	struct shm_op *so;

	if (!n)
		return false;
	so = list_entry(n, struct shm_op, link);
	if (so->id && !so->answered) { /* keeps its slot until DONE */
		op_hand_back(so);
		return true;
	}
	if (so->id)
		slot_leave(peer, so);
	op_hand_back(so);
	op_free(so);
	return true;
}

static bool op_still(struct shm_op *so)
{
	shm_flow_stop(&so->flow);
	return !shm_flow_busy(&so->flow);
}

bool shm_ops_stop(struct shm_peer *peer)
{
	struct shm_op *so;
	bool still = true;

	list_foreach(so, &peer->waiting, link)
		still = op_still(so) && still;
	list_foreach(so, &peer->draining, link)
		still = op_still(so) && still;
	for (uint32_t i = 0; i < peer->op_slots; i++)
		if (peer->ops[i])
			still = op_still(peer->ops[i]) && still;
	return still;
}

static void op_end(struct shm_op *so)
{
	if (so->op) {
		if (!so->finished || (so->result == 0 && !so->answered)) {
			so->err = so->result < 0 ? so->err : so->flow.peer->why;
			so->result = -err_errno(so->err.code);
		}
		op_hand_back(so);
	}
	op_free(so);
}

void shm_ops_end(struct shm_peer *peer)
{
	struct list *n;

	for (uint32_t i = 0; i < peer->op_slots; i++) {
		struct shm_op *so = peer->ops[i];

		peer->ops[i] = NULL;
		if (so)
			op_end(so);
	}
	peer->op_count = 0;
	while ((n = list_pop_front(&peer->finished_ops)))
		op_end(list_entry(n, struct shm_op, link));
	while ((n = list_pop_front(&peer->draining)))
		op_end(list_entry(n, struct shm_op, link));
	while ((n = list_pop_front(&peer->waiting)))
		op_end(list_entry(n, struct shm_op, link));
}

void shm_ops_tick(struct shm_peer *peer, bool *wanted_p)
{
	struct shm_op *so;

	list_foreach(so, &peer->waiting, link) {
		so->op->moved = shm_flow_moved(&so->flow);
		*wanted_p |= so->flow.mode != SHM_FLOW_NONE;
	}
	for (uint32_t i = 0; i < peer->op_slots; i++) {
		so = peer->ops[i];
		if (!so || !so->op || so->flow.mode == SHM_FLOW_NONE)
			continue;
		if (shm_flow_moved(&so->flow) > so->op->moved)
			so->op->moved = shm_flow_moved(&so->flow);
		*wanted_p |= so->flow.mode != SHM_FLOW_NONE;
	}
}
