/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The result of a find or a hold is written into the entry's slot, in the turn that takes
 * the entry, so an engine need not sleep for it. A hold that queries other daemons is
 * completed when they have replied: it is the session's from the entry on, so that
 * RELEASE, or the session's end, reaches it while it waits, and the ring continues
 * meanwhile. An engine that waits for such a reply has slept by then, and is woken.
 */
#include "daemon/store/ring_chunk.h"

#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/room/ring_pages.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/store/store.h"

_Static_assert(KVD_RING_ID_BYTES == STORE_ID_BYTES &&
		       KVD_RING_SECRET_BYTES == STORE_SECRET_BYTES,
	       "ids and secrets have one size");

static void found_tell(struct status_page *page, uint32_t slot,
		       const struct store_found *found, uint64_t first)
{
	const struct status_room figures = {.bytes = found->tokens,
					    .total = found->chunks,
					    .rows = found->remote,
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
		ring_refuse(ring, slot, facts.id);
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
	uint32_t remote_ms = e->op == KVD_RING_HOLD_REMOTE ? e->n1 : 0;
	const struct store_hold_args args = {.lease_ns = e->b * LOOP_NS_PER_MS,
					     .far_ns = remote_ms * LOOP_NS_PER_MS,
					     .on_done = on_hold_done,
					     .arg = ring,
					     .id = KVD_RING_IDS + e->slot,
					     .secret = e->n0 ? data : NULL};
	struct store_hold_facts facts;
	struct store_hold *hold;
	int r;

	if (e->b == 0 || e->b > STORE_LEASE_MS_MAX)
		return err_raise(ERR_RANGE, "lease_ms: %llu is out of range (1 to %lld)",
				 (unsigned long long)e->b, (long long)STORE_LEASE_MS_MAX);
	if (remote_ms > STORE_REMOTE_MS_MAX)
		return err_raise(ERR_RANGE, "remote_ms: %u is out of range (0 to %u)",
				 remote_ms, STORE_REMOTE_MS_MAX);
	r = e->n0 ? store_hold_open(handle, &ids, &args, &hold)
		  : store_hold_join(handle, data, &args, &hold);
	if (r < 0)
		return err_pass(r);
	if (r == 1)
		return 0; /* on_hold_done() completes it */
	store_hold_facts(hold, &facts);
	found_tell(ring->session->status, e->slot, &facts.found, facts.first);
	return 0;
}

static int ids_do(struct ring *ring, const struct kvd_ring_entry *e,
		  const struct ring_payload *arena)
{
	struct store_handle *handle = store_handle_find(ring->session, e->a);
	cleanup_free uint8_t *data = NULL;
	int r = handle ? 0 : -ENOENT;

	if (r >= 0 && e->c > UINT32_MAX)
		r = err_raise(ERR_RANGE, "first: %llu is out of range",
			      (unsigned long long)e->c);
	if (r >= 0)
		r = ring_payload_copy(arena, e->offset, e->bytes, &data);
	if (r < 0)
		return err_pass(r);
	return err_pass(e->op == KVD_RING_FIND ? chunk_find(ring, e, handle, data)
					       : chunk_hold(ring, e, handle, data));
}

/* FIND, HOLD, HOLD_REMOTE */
static int op_ids(struct ring *ring, const struct kvd_ring_entry *e,
		  struct ring_payload *arena)
{
	uint64_t id = KVD_RING_IDS + e->slot;
	uint64_t head = e->op == KVD_RING_FIND ? 0 : KVD_RING_SECRET_BYTES;
	int r;

	if (e->n0 > STORE_IDS_MAX || (e->op == KVD_RING_HOLD_REMOTE && e->n0 == 0) ||
	    e->bytes != head + e->n0 * KVD_RING_ID_BYTES)
		return err_raise(ERR_PROTO, "op %u: %u ids do not fit in %u bytes", e->op,
				 e->n0, e->bytes);
	r = status_slot_claim(ring->session->status, e->slot, e->gen, id);
	if (r < 0)
		return err_pass(r);
	if (ids_do(ring, e, arena) < 0)
		ring_refuse(ring, e->slot, id);
	return 0;
}

/* ---- pages ---- */

static int chunk_move_end(struct ring_pages *pages, struct room *none)
{
	const struct kvd_ring_entry *e = &pages->e;
	struct session *session = pages->ring->session;
	const struct store_ids ids = {
		.bytes = pages->head, .count = e->n0, .first = e->c};
	struct store_move_args args = {.pool = pages->pool,
				       .slotted = true,
				       .slot = e->slot,
				       .slot_gen = e->gen,
				       .id = KVD_RING_IDS + e->slot,
				       .durable = e->flags & KVD_RING_DURABLE,
				       .publish = e->op == KVD_RING_PUT &&
						  e->flags & KVD_RING_PUBLISH};
	struct store_handle *handle = NULL;
	struct store_hold *hold = NULL;
	struct store_move *move;
	int r;

	(void)none;
	if (e->op == KVD_RING_PUT)
		handle = store_handle_find(session, e->a);
	else
		hold = store_hold_find(session, e->a);
	r = handle || hold ? 0 : -ENOENT;
	if (r >= 0 && hold)
		r = pool_check_target(pages->pool);
	if (r >= 0 && hold && e->c > UINT32_MAX)
		r = err_raise(ERR_RANGE, "deadline_ms: %llu is out of range",
			      (unsigned long long)e->c);
	if (r >= 0)
		r = wait_spec_parse(pages->text, session, &args.wait);
	if (r < 0)
		return err_pass(r);
	args.maps = room_maps_steal(&pages->maps);
	if (handle) { /* later results are in its slot */
		r = store_put(handle, &ids, &args, &move);
		return r < 0 ? err_pass(r) : 0;
	}
	args.deadline_ns = e->c * LOOP_NS_PER_MS;
	return err_pass(store_fetch(hold, &args, &move));
}

static const struct ring_pages_kind fetch_kind = {
	.selects = true, .claims = true, .lands = true, .end = chunk_move_end};
static const struct ring_pages_kind put_kind = {.claims = true, .end = chunk_move_end};

static int op_fetch(struct ring *ring, const struct kvd_ring_entry *e,
		    struct ring_payload *arena)
{
	return err_pass(ring_pages_run(ring, e, arena, &fetch_kind, 0));
}

static int op_put(struct ring *ring, const struct kvd_ring_entry *e,
		  struct ring_payload *arena)
{
	if (e->n0 > STORE_IDS_MAX)
		return err_raise(ERR_PROTO, "op %u: %u ids", e->op, e->n0);
	return err_pass(ring_pages_run(ring, e, arena, &put_kind,
				       (size_t)e->n0 * KVD_RING_ID_BYTES));
}

const struct ring_verb store_verbs[] = {
	{KVD_RING_FIND, op_ids},	{KVD_RING_HOLD, op_ids},
	{KVD_RING_HOLD_REMOTE, op_ids}, {KVD_RING_FETCH, op_fetch},
	{KVD_RING_PUT, op_put},		{0, NULL},
};

/* ---- by number ---- */

bool store_ring_cancel(struct session *session, uint64_t id)
{
	struct store_move *move = store_move_find(session, id);
	struct err why;

	if (!move) {
		err_clear();
		return false;
	}
	err_set(&why, ERR_ABORTED, "aborted by its engine '%.40s' (pid %d)",
		session->client, (int)session->pid);
	store_move_abort(move, &why);
	return true;
}

/* A released move keeps its slot until it has ended. */
bool store_ring_release(struct session *session, uint64_t id)
{
	struct store_move *move = store_move_find(session, id);
	struct store_hold *hold = move ? NULL : store_hold_find(session, id);

	err_clear();
	if (move)
		store_move_drop(move); /* the slot is freed with it */
	if (hold) {
		store_hold_close(hold);
		ring_forget(ring_of(session), id);
	}
	return move || hold || store_has(session, id);
}
