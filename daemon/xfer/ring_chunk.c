/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What is found or held is told in the entry's slot, in the turn that takes the entry, so
 * an engine need not sleep for it. A hold that asks other daemons is told when they have
 * answered: it is the session's from the entry on, so that RELEASE, or the session's end,
 * reaches it while it waits, and the ring goes on meanwhile. Whoever waits for such an
 * answer has slept by then, and is woken.
 */
#include "daemon/xfer/ring_chunk.h"

#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/store/store.h"
#include "daemon/xfer/ring_ops.h"
#include "daemon/xfer/xfer_impl.h"

_Static_assert(KVD_RING_ID_BYTES == STORE_ID_BYTES &&
		       KVD_RING_SECRET_BYTES == STORE_SECRET_BYTES,
	       "ids and secrets have one size");

static void found_tell(struct status_page *page, uint32_t slot,
		       const struct store_found *found, uint64_t first)
{
	const struct status_room figures = {.bytes = found->tokens,
					    .total = found->chunks,
					    .rows = found->far,
					    .first_token = first};

	status_slot_room(page, slot, &figures);
	status_slot_set(page, slot, KVD_SUCCESS, 0, ERR_OK);
}

static int chunk_find(struct ring *ring, const struct kvd_ring_entry *e,
		      struct store_handle *handle, const uint8_t *data)
{
	const struct store_ids ids = {.bytes = data, .count = e->n0, .first = e->c};
	struct store_found found;

	store_find(handle, &ids, &found);
	found_tell(ring->session->status, e->slot, &found, e->c);
	status_slot_release(ring->session->status, e->slot);
	return 0;
}

static void on_hold_done(void *arg, struct store_hold *hold, const struct err *why)
{
	struct store_hold_facts facts;
	struct ring *ring = arg;
	uint32_t slot;

	store_hold_facts(hold, &facts);
	slot = (uint32_t)(facts.id - KVD_RING_IDS);
	if (why) {
		(void)err_reraise(why);
		ring_ops_refuse(ring, slot, facts.id);
	} else {
		found_tell(ring->session->status, slot, &facts.found, facts.first);
	}
	status_slot_call(ring->session->status, slot);
}

static int chunk_hold(struct ring *ring, const struct kvd_ring_entry *e,
		      struct store_handle *handle, const uint8_t *data)
{
	const struct store_ids ids = {
		.bytes = data + STORE_SECRET_BYTES, .count = e->n0, .first = e->c};
	uint32_t far_ms = e->op == KVD_RING_HOLD_FAR ? e->n1 : 0;
	const struct store_hold_args args = {.lease_ns = e->b * LOOP_NS_PER_MS,
					     .far_ns = far_ms * LOOP_NS_PER_MS,
					     .on_done = on_hold_done,
					     .arg = ring,
					     .id = KVD_RING_IDS + e->slot,
					     .secret = e->n0 ? data : NULL};
	struct store_hold_facts facts;
	struct store_hold *hold;
	int r;

	if (e->b == 0 || e->b > STORE_LEASE_MS_MAX)
		return err_raise(ERR_RANGE, "lease_ms: %llu is not in 1 to %lld",
				 (unsigned long long)e->b, (long long)STORE_LEASE_MS_MAX);
	if (far_ms > STORE_FAR_MS_MAX)
		return err_raise(ERR_RANGE, "far_ms: %u is not in 0 to %u", far_ms,
				 STORE_FAR_MS_MAX);
	r = e->n0 ? store_hold_open(handle, &ids, &args, &hold)
		  : store_hold_join(handle, data, &args, &hold);
	if (r < 0)
		return err_pass(r);
	if (r == 1)
		return 0; /* on_hold_done() tells */
	store_hold_facts(hold, &facts);
	found_tell(ring->session->status, e->slot, &facts.found, facts.first);
	return 0;
}

static int ids_do(struct ring *ring, const struct kvd_ring_entry *e,
		  const struct xfer_payload *arena)
{
	struct store_handle *handle = store_handle_find(ring->session, e->a);
	cleanup_free uint8_t *data = mem_alloc((size_t)e->bytes + 1);
	int r = handle ? 0 : -ENOENT;

	if (r >= 0 && e->c > UINT32_MAX)
		r = err_raise(ERR_RANGE, "first: %llu", (unsigned long long)e->c);
	if (r >= 0 && !data)
		r = -ENOMEM;
	if (r >= 0)
		r = payload_read(arena, e->offset, data, e->bytes);
	if (r < 0)
		return err_pass(r);
	return err_pass(e->op == KVD_RING_FIND ? chunk_find(ring, e, handle, data)
					       : chunk_hold(ring, e, handle, data));
}

int ring_chunk_ids(struct ring *ring, const struct kvd_ring_entry *e,
		   const struct xfer_payload *arena)
{
	uint64_t id = KVD_RING_IDS + e->slot;
	uint64_t head = e->op == KVD_RING_FIND ? 0 : KVD_RING_SECRET_BYTES;
	int r;

	if (e->n0 > STORE_IDS_MAX || (e->op == KVD_RING_HOLD_FAR && e->n0 == 0) ||
	    e->bytes != head + e->n0 * KVD_RING_ID_BYTES)
		return err_raise(ERR_PROTO, "op %u: %u ids, %u bytes", e->op, e->n0,
				 e->bytes);
	r = status_slot_claim(ring->session->status, e->slot, e->gen, id);
	if (r < 0)
		return err_pass(r);
	if (ids_do(ring, e, arena) < 0)
		ring_ops_refuse(ring, e->slot, id);
	return 0;
}

bool ring_chunk_cancel(struct ring *ring, uint64_t id)
{
	struct store_move *move = store_move_find(ring->session, id);
	struct err why;

	if (!move) {
		err_clear();
		return false;
	}
	err_set(&why, ERR_ABORTED, "aborted by its engine '%.40s' (pid %d)",
		ring->session->client, (int)ring->session->pid);
	store_move_abort(move, &why);
	return true;
}

bool ring_chunk_release(struct ring *ring, uint64_t id)
{
	struct store_move *move = store_move_find(ring->session, id);
	struct store_hold *hold = move ? NULL : store_hold_find(ring->session, id);

	err_clear();
	if (move)
		store_move_drop(move); /* the slot goes with it */
	if (hold) {
		store_hold_close(hold);
		ring_ops_forget(ring, id);
	}
	return move || hold || store_has(ring->session, id);
}
