/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists, transfers and notifications by the submission ring are ops (xfer_op.h). The
 * number of notifications being sent is limited, and beyond the limit the ring waits
 * until some have been sent.
 */
#include "daemon/base/context.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/xfer/xfer_op.h"

/* ---- lists and transfers ---- */

static void ring_xfer_on_done(struct xfer_op *op, int r)
{
	struct ring *ring = op->owner;
	struct err why;

	if (r < 0 && op->transfer) {
		err_take(&why);
		transfer_refuse(op->transfer, &why);
	} else if (r < 0) {
		ring_refuse(ring, op->slot, op->id);
	} else if (op->list) {
		status_slot_set(ring->session->status, op->slot, KVD_SUCCESS, 0, ERR_OK);
	}
	if (op->later)
		ring_work_end(ring, !op->payload.data);
}

/* Claim a slot, and make the op for it; 1: no memory, the op is refused. */
static int op_new(struct ring *ring, const struct kvd_ring_entry *e,
		  struct ring_payload *arena, struct xfer_op **op_p)
{
	uint64_t id = KVD_RING_IDS + e->slot;
	struct xfer_session *xs;
	struct xfer_op *op = NULL;
	int r = status_slot_claim(ring->session->status, e->slot, e->gen, id);

	if (r < 0)
		return err_pass(r);
	xs = xfer_session_of(ring->session);
	if (xs)
		op = xfer_op_new(xs, e->op == KVD_RING_LIST ? XFER_OP_LIST : XFER_OP_MOVE,
				 ring_xfer_on_done, ring);
	if (!op) {
		ring_refuse(ring, e->slot, id);
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
	return xfer_op_run(op) == XFER_OP_LATER ? ring_work_begin(ring, op) : 0;
}

static int op_list(struct ring *ring, const struct kvd_ring_entry *e,
		   struct ring_payload *arena)
{
	struct xfer_op *op;
	int r = e->n1 >= 2 ? op_new(ring, e, arena, &op)
			   : err_raise(ERR_PROTO, "a list of %u columns", e->n1);

	if (r != 0)
		return r < 0 ? err_pass(r) : 0;
	op->attach = e->a;
	op->rows = e->n0;
	op->columns = e->n1;
	return op_run(ring, op);
}

static int op_xfer(struct ring *ring, const struct kvd_ring_entry *e,
		   struct ring_payload *arena)
{
	struct xfer_op *op;
	int r = op_new(ring, e, arena, &op);

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

static struct transfer *ring_transfer(const struct session *session, uint64_t id)
{
	const struct xfer_session *xs = session->part[MODULE_XFER];

	return xs ? idmap_get(&xs->transfers, id) : NULL;
}

/* A post of a transfer that was refused when it was made: it fails again, in the next
 * generation. */
static int post_refused(struct ring *ring, const struct kvd_ring_entry *e)
{
	struct status_page *page = ring->session->status;
	const struct err *err = ring_fault_of(ring, e->a);
	uint32_t slot = (uint32_t)(e->a - KVD_RING_IDS);

	if (e->a - KVD_RING_IDS > UINT32_MAX || !status_slot_claimed(page, slot) ||
	    ring_has(ring, e->a))
		return err_raise(ERR_PROTO,
				 "post: xfer %llu does not belong to this session",
				 (unsigned long long)e->a);
	if (e->gen != kvd_ring_next_gen(status_slot_gen(page, slot)))
		return err_raise(ERR_PROTO, "post: generation %u does not follow",
				 e->gen);
	(void)status_slot_renew(page, slot);
	status_slot_set(page, slot, KVD_FAILED, 0, err ? err->code : ERR_NOTFOUND);
	return 0;
}

static int op_post(struct ring *ring, const struct kvd_ring_entry *e,
		   struct ring_payload *arena)
{
	struct transfer *t = ring_transfer(ring->session, e->a);
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

/* Errors have no receiver: they are counted. */
static void note_dropped(struct ring *ring)
{
	metrics_add(&ring->session->kvd->metrics,
		    METRIC_AT(NOTIFS, METRIC_OUT, METRIC_NOTIF_DROPPED), 1);
	err_clear();
}

static void ring_note_on_done(struct xfer_op *op, int r)
{
	if (r < 0)
		note_dropped(op->owner);
	if (op->later)
		ring_work_end(op->owner, !op->payload.data);
}

/* Beyond the limit the ring waits; xfer.submit returns an error. */
static int op_notify(struct ring *ring, const struct kvd_ring_entry *e,
		     struct ring_payload *arena)
{
	struct xfer_session *xs = ring->session->part[MODULE_XFER];
	struct xfer_op *op = NULL;

	if (xs &&
	    (xs->notes >= XFER_NOTES_MAX || xs->note_bytes >= XFER_NOTE_BYTES_MAX)) {
		if (arena->data)
			return err_raise(ERR_BUSY,
					 "%u requests of this session are queued (limit)",
					 xs->notes);
		xs->ring_waits = true;
		return RING_OP_LATER;
	}
	if (xs)
		op = xfer_op_new(xs, XFER_OP_NOTE, ring_note_on_done, ring);
	if (!op) {
		note_dropped(ring);
		return 0;
	}
	op->attach = e->a;
	op->notif_len = e->bytes;
	op->payload = *arena;
	op->offset = e->offset;
	arena->data = NULL;
	return op_run(ring, op);
}

const struct ring_verb xfer_verbs[] = {
	{KVD_RING_LIST, op_list},
	{KVD_RING_XFER, op_xfer},
	{KVD_RING_POST, op_post},
	{KVD_RING_NOTIFY, op_notify},
	{0, NULL},
};

/* ---- by number ---- */

bool xfers_ring_has(const struct session *session, uint64_t id)
{
	const struct xfer_session *xs = session->part[MODULE_XFER];

	return xs && (idmap_get(&xs->transfers, id) || idmap_get(&xs->dlists, id));
}

bool xfers_ring_cancel(struct session *session, uint64_t id)
{
	struct transfer *t = ring_transfer(session, id);

	if (t)
		transfer_cancel_asked(t);
	return t;
}

bool xfers_ring_release(struct session *session, uint64_t id)
{
	const struct xfer_session *xs = session->part[MODULE_XFER];
	struct transfer *t = ring_transfer(session, id);
	struct prepared *prepared = xs && !t ? idmap_get(&xs->dlists, id) : NULL;

	if (t && !t->release)
		transfer_release(t);
	else if (prepared)
		prepared_release(prepared);
	return t || prepared;
}
