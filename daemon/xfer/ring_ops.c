/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An entry names everything by number and finds it again each time: between two
 * entries anything may have gone. Three kinds of wrong are kept apart. What no
 * engine sends by mistake (numbers that its own slots contradict, bytes outside
 * the arena) breaks the protocol. What can go wrong in correct use (memory not
 * registered, a peer lost, a cap) fails the slot, with a code there and a text
 * here, for xfer.state. What is late (cancel, release of what has ended) is fine.
 *
 * Rooms: ring_room.c. Lists and transfers are ops (xfer_op.h); while a helper has one,
 * the ring stands quiesced, and no order has to be explained. Notifications on their way
 * out are capped, and past the cap the ring waits until some have left.
 */
#include "daemon/xfer/ring_ops.h"

#include <assert.h>
#include <unistd.h>

#include "daemon/attend/attend.h"
#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/store/store.h"
#include "daemon/xfer/ring_attend.h"
#include "daemon/xfer/ring_chunk.h"
#include "daemon/xfer/ring_room.h"
#include "daemon/xfer/xfer_impl.h"

#define FAULTS_MAX 256u

struct ring_fault {
	struct list link;
	uint64_t id;
	struct err err;
};

/* ---- texts of refusals ---- */

static struct ring_fault *fault_find(const struct ring *ring, uint64_t id)
{
	struct ring_fault *fault;

	list_foreach(fault, &ring->faults, link) {
		if (fault->id == id)
			return fault;
	}
	return NULL;
}

const struct err *ring_fault_of(const struct ring *ring, uint64_t id)
{
	const struct ring_fault *fault = ring ? fault_find(ring, id) : NULL;

	return fault ? &fault->err : NULL;
}

static void fault_drop(struct ring *ring, struct ring_fault *fault)
{
	list_remove(&fault->link);
	ring->fault_count--;
	mem_free(fault);
}

void ring_faults_free(struct ring *ring)
{
	struct ring_fault *fault;

	list_foreach_safe(fault, &ring->faults, link)
		fault_drop(ring, fault);
}

/* The newest are kept; without memory for the text the code must do. */
static void fault_put(struct ring *ring, uint64_t id, const struct err *err)
{
	struct ring_fault *fault = fault_find(ring, id);

	if (fault) /* of whoever had the slot before */
		fault_drop(ring, fault);
	fault = mem_zalloc(sizeof(*fault));
	if (!fault) {
		err_clear();
		return;
	}
	fault->id = id;
	fault->err = *err;
	list_push_back(&ring->faults, &fault->link);
	if (++ring->fault_count > FAULTS_MAX)
		fault_drop(ring, list_first(&ring->faults, struct ring_fault, link));
}

void ring_ops_refuse(struct ring *ring, uint32_t slot, uint64_t id)
{
	struct err why;

	err_take(&why);
	status_slot_set(ring->session->status, slot, KVD_FAILED, 0, why.code);
	fault_put(ring, id, &why);
}

/* ---- lists and transfers ---- */

static void ring_ops_on_done(struct xfer_op *op, int r)
{
	struct ring *ring = op->owner;
	struct err why;

	if (r < 0 && op->transfer) {
		err_take(&why);
		transfer_refuse(op->transfer, &why);
	} else if (r < 0) {
		ring_ops_refuse(ring, op->slot, op->id);
	} else if (op->list) {
		status_slot_set(ring->session->status, op->slot, KVD_SUCCESS, 0, ERR_OK);
	}
	if (!op->later)
		return;
	ring->work = NULL;
	if (ring->stopped)
		return;
	if (!op->payload.data) /* it lies in the shared ring */
		ring_entry_done(ring);
	ring_resume(ring);
}

/* A claimed slot, and the op that is to fill it; 1: no memory for one, it is refused. */
static int op_new(struct ring *ring, struct xfer_session *xs,
		  const struct kvd_ring_entry *e, struct xfer_payload *arena,
		  struct xfer_op **op_p)
{
	uint64_t id = KVD_RING_IDS + e->slot;
	struct xfer_op *op;
	int r = status_slot_claim(ring->session->status, e->slot, e->gen, id);

	if (r < 0)
		return err_pass(r);
	op = xfer_op_new(xs, e->op == KVD_RING_LIST ? XFER_OP_LIST : XFER_OP_MOVE,
			 ring_ops_on_done, ring);
	if (!op) {
		ring_ops_refuse(ring, e->slot, id);
		return 1;
	}
	op->id = id;
	op->slot = e->slot;
	op->gen = e->gen;
	op->payload = *arena;
	op->offset = e->offset;
	arena->data = NULL;
	*op_p = op;
	return 0;
}

static int op_run(struct ring *ring, struct xfer_op *op)
{
	if (xfer_op_run(op) != XFER_OP_LATER)
		return 0;
	ring->work = op;
	return RING_OP_LATER;
}

static int op_list(struct ring *ring, struct xfer_session *xs,
		   const struct kvd_ring_entry *e, struct xfer_payload *arena)
{
	struct xfer_op *op;
	int r = e->n1 >= 2 ? op_new(ring, xs, e, arena, &op)
			   : err_raise(ERR_PROTO, "a list of %u columns", e->n1);

	if (r != 0)
		return r < 0 ? err_pass(r) : 0;
	op->attach = e->a;
	op->rows = e->n0;
	op->columns = e->n1;
	return op_run(ring, op);
}

static int op_xfer(struct ring *ring, struct xfer_session *xs,
		   const struct kvd_ring_entry *e, struct xfer_payload *arena)
{
	struct xfer_op *op;
	int r = op_new(ring, xs, e, arena, &op);

	if (r != 0)
		return r < 0 ? err_pass(r) : 0;
	op->moves = e->flags & KVD_RING_WRITES ? XP_WRITE : XP_READ;
	op->lists[LOCAL] = e->a;
	op->lists[REMOTE] = e->b;
	op->reads[LOCAL] = e->n0;
	op->reads[REMOTE] = e->n1;
	op->posts = e->flags & KVD_RING_POSTS;
	op->has_notif = e->flags & KVD_RING_NOTIFIES;
	op->notif_len = op->has_notif ? e->bytes : 0;
	return op_run(ring, op);
}

/* ---- the others ---- */

/* Of what was refused when it was made: it fails again, in the next generation. */
static int post_refused(struct ring *ring, const struct kvd_ring_entry *e)
{
	struct status_page *page = ring->session->status;
	const struct err *err = ring_fault_of(ring, e->a);
	uint32_t slot = (uint32_t)(e->a - KVD_RING_IDS);

	if (e->a - KVD_RING_IDS > UINT32_MAX || !status_slot_claimed(page, slot) ||
	    store_has(ring->session, e->a) || attend_posted(ring->session, e->a) ||
	    (rooms_of(ring->session->kvd) &&
	     rooms_has_slot(rooms_of(ring->session->kvd), ring->session, slot)))
		return err_raise(ERR_PROTO, "post: xfer %llu is none of this session",
				 (unsigned long long)e->a);
	if (e->gen != kvd_ring_next_gen(status_slot_gen(page, slot)))
		return err_raise(ERR_PROTO, "post: generation %u does not follow",
				 e->gen);
	(void)status_slot_renew(page, slot);
	status_slot_set(page, slot, KVD_FAILED, 0, err ? err->code : ERR_NOTFOUND);
	return 0;
}

static int op_post(struct ring *ring, struct xfer_session *xs,
		   const struct kvd_ring_entry *e, const struct xfer_payload *arena)
{
	struct transfer *t = idmap_get(&xs->transfers, e->a);
	uint8_t *notif = NULL;
	struct err why;
	int r = 0;

	if (!t)
		return post_refused(ring, e);
	if (t->release || sm_state(&t->sm) != XFER_ENDED ||
	    e->gen != kvd_ring_next_gen(status_slot_gen(ring->session->status, t->slot)))
		return err_raise(ERR_PROTO,
				 "post: xfer %llu is released, under way, or of "
				 "another generation than %u",
				 (unsigned long long)e->a, e->gen);
	if (e->flags & KVD_RING_NOTIFIES)
		r = payload_notif(arena, e->offset, e->bytes, &notif);
	if (r >= 0)
		r = transfer_again(t, notif, e->bytes);
	if (r < 0) {
		err_take(&why);
		transfer_refuse(t, &why);
	}
	return 0;
}

void ring_ops_forget(struct ring *ring, uint64_t id)
{
	struct ring_fault *fault = fault_find(ring, id);
	uint64_t slot = id - KVD_RING_IDS;

	if (fault)
		fault_drop(ring, fault);
	if (slot <= UINT32_MAX &&
	    status_slot_claimed(ring->session->status, (uint32_t)slot))
		status_slot_release(ring->session->status, (uint32_t)slot);
}

static int op_release(struct ring *ring, struct xfer_session *xs,
		      const struct kvd_ring_entry *e)
{
	struct transfer *t = idmap_get(&xs->transfers, e->a);
	struct prepared *prepared = t ? NULL : idmap_get(&xs->dlists, e->a);
	struct ring_fault *fault = fault_find(ring, e->a);

	if (t || prepared) {
		if (fault)
			fault_drop(ring, fault);
		if (t && !t->release)
			transfer_release(t);
		else if (prepared)
			prepared_release(prepared);
	} else if (!ring_room_release(ring, e->a) && !ring_chunk_release(ring, e->a) &&
		   !attend_posted(ring->session, e->a)) {
		ring_ops_forget(ring, e->a);
	}
	return 0;
}

/* Past the cap the ring waits; xfer.submit says so. */
static int op_notify(struct ring *ring, struct xfer_session *xs,
		     const struct kvd_ring_entry *e, const struct xfer_payload *arena)
{
	struct attach *attach = NULL;
	uint8_t *data = NULL;
	int r;

	if (xs->notes >= XFER_NOTES_MAX || xs->note_bytes >= XFER_NOTE_BYTES_MAX) {
		if (arena->data)
			return err_raise(ERR_BUSY,
					 "%u requests of this session wait to be sent",
					 xs->notes);
		xs->ring_waits = true;
		return RING_OP_LATER;
	}
	r = payload_notif(arena, e->offset, e->bytes, &data);
	if (r >= 0)
		attach = attach_find(xs, e->a);
	if (attach)
		r = notif_post(attach, data, e->bytes);
	if (r < 0 || !attach) { /* nobody is there to be told: it is counted */
		metrics_add(&ring->session->kvd->metrics,
			    METRIC_AT(NOTIFS, METRIC_OUT, METRIC_NOTIF_DROPPED), 1);
		err_clear();
	}
	mem_free(data);
	return 0;
}

int ring_op(struct ring *ring, const struct kvd_ring_entry *e, struct xfer_payload *arena)
{
	struct xfer_session *xs =
		ring->session->part[MODULE_XFER]; /* ring_of() made it */
	uint64_t bytes = kvd_ring_payload(e);
	struct transfer *t;

	assert(xs && !ring->stopped);
	if (bytes > arena->bytes || e->offset > arena->bytes - bytes)
		return err_raise(ERR_PROTO,
				 "entry of op %u: its payload is outside the arena",
				 e->op);
	metrics_add(&ring->session->kvd->metrics, METRIC_RING_ENTRIES, 1);
	switch (e->op) {
	case KVD_RING_LIST:
		return op_list(ring, xs, e, arena);
	case KVD_RING_XFER:
		return op_xfer(ring, xs, e, arena);
	case KVD_RING_POST:
		return op_post(ring, xs, e, arena);
	case KVD_RING_CANCEL:
		t = idmap_get(&xs->transfers, e->a);
		if (t)
			transfer_cancel_asked(t);
		else if (!ring_room_cancel(ring, e->a) && !ring_chunk_cancel(ring, e->a))
			(void)attend_cancel(ring->session, e->a);
		return 0;
	case KVD_RING_RELEASE:
		return op_release(ring, xs, e);
	case KVD_RING_NOTIFY:
		return op_notify(ring, xs, e, arena);
	case KVD_RING_ABORT:
		return ring_room_abort(ring, e, arena);
	case KVD_RING_FIND:
	case KVD_RING_HOLD:
	case KVD_RING_HOLD_FAR:
		return ring_chunk_ids(ring, e, arena);
	case KVD_RING_ATTEND:
		return ring_attend(ring, e, arena);
	case KVD_RING_OPEN:
	case KVD_RING_BIND:
	case KVD_RING_SEND:
	case KVD_RING_FETCH:
	case KVD_RING_PUT:
		return ring_room_pages(ring, e, arena);
	case KVD_RING_EXTEND:
		return ring_room_extend(ring, e);
	case KVD_RING_CLOSE:
		return ring_room_close(ring, e);
	default:
		return err_raise(ERR_PROTO, "entry of an unknown op %u", e->op);
	}
}
