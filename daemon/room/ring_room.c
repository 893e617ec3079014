/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms by the submission ring: the same functions that the commands call (room_op.h),
 * with pages in binary instead of JSON (ring_pages.h), and without an answer.
 */
#include "daemon/base/context.h"
#include "daemon/room/ring_pages.h"
#include "daemon/room/room_op.h"
#include "daemon/room/rooms_set.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "proto/json.h"

#define REASON_MAX 200u

/* ---- open, bind, send ---- */

static int open_read(struct ring_pages *pages)
{
	struct room_open_args *open = (void *)pages->own;
	int r;

	if (pages->e.n2 > RING_PAGES_INLINE)
		json_pack_lists(pages->text);
	r = fields_read_all(room_open_fields, pages->text, open);
	pages->aux = open->pages.aux;
	pages->lands = open->key.role == ROOM_PULL;
	return err_pass(r);
}

static int open_end(struct ring_pages *pages, struct room *none)
{
	const struct kvd_ring_entry *e = &pages->e;
	const struct room_open_args *open = (const void *)pages->own;
	const struct room_slot slot = {e->slot, e->gen};
	struct room *room;

	(void)none;
	if (open->key.number != e->a || open->pool != e->b)
		return err_raise(
			ERR_INVAL,
			"room %llu, pool %llu in the text, %llu, %llu in the entry",
			(unsigned long long)open->key.number,
			(unsigned long long)open->pool, (unsigned long long)e->a,
			(unsigned long long)e->b);
	return err_pass(room_op_open(pages->ring->session, pages->text, open,
				     e->n1 > 0 ? &pages->maps : NULL, &slot, &room));
}

static const struct ring_pages_kind open_kind = {.claims = true,
						 .bytes = sizeof(struct room_open_args),
						 .read = open_read,
						 .end = open_end};

static int more_end(struct ring_pages *pages, struct room *room)
{
	const struct kvd_ring_entry *e = &pages->e;
	struct room_pages more = {.maps = room_maps_steal(&pages->maps)};
	int r = wait_spec_parse(pages->text, pages->ring->session, &more.wait);

	if (r < 0) {
		room_pages_fini(&more);
		return err_pass(r);
	}
	if (e->op == KVD_RING_BIND)
		return err_pass(room_op_bind(room, &more));
	return err_pass(room_op_send(room, e->b, e->flags & KVD_RING_LAST, &more));
}

static const struct ring_pages_kind more_kind = {.end = more_end};

static int op_open(struct ring *ring, const struct kvd_ring_entry *e,
		   struct ring_payload *arena)
{
	return err_pass(ring_pages_run(ring, e, arena, &open_kind, 0));
}

/* BIND, SEND */
static int op_more(struct ring *ring, const struct kvd_ring_entry *e,
		   struct ring_payload *arena)
{
	return err_pass(ring_pages_run(ring, e, arena, &more_kind, 0));
}

/* ---- abort, close ---- */

static int op_abort(struct ring *ring, const struct kvd_ring_entry *e,
		    struct ring_payload *arena)
{
	struct session *session = ring->session;
	char reason[REASON_MAX + 1] = "";
	struct room *room = NULL;
	int r;

	if (e->n0 >= ROOM_ROLES || e->bytes > REASON_MAX)
		return err_raise(ERR_PROTO, "abort: role %u, %u bytes of reason", e->n0,
				 e->bytes);
	r = ring_payload_read(arena, e->offset, reason, e->bytes);
	if (r < 0)
		return err_pass(r);
	json_sanitize(reason);
	if (e->gen)
		room = ring_pages_room(ring, e);
	else if (rooms_of(ring->session->kvd))
		room = rooms_find(rooms_of(ring->session->kvd), session,
				  (enum room_role)e->n0, e->a);
	if (room)
		room_op_abort(room, "its engine", session, *reason ? reason : NULL);
	err_clear(); /* closed meanwhile */
	return 0;
}

static int op_extend(struct ring *ring, const struct kvd_ring_entry *e,
		     struct ring_payload *arena)
{
	struct room *room = ring_pages_room(ring, e);

	(void)arena;
	if (room && room_op_extend(room, e->c) < 0)
		room_fail_last(room);
	return 0;
}

/* A refused opening has the slot, and no other object has this generation. */
static bool was_refused(const struct ring *ring, const struct kvd_ring_entry *e)
{
	const struct status_page *page = ring->session->status;

	return status_slot_claimed(page, e->slot) &&
	       status_slot_gen(page, e->slot) == e->gen &&
	       !ring_has(ring, KVD_RING_IDS + e->slot);
}

static int op_close(struct ring *ring, const struct kvd_ring_entry *e,
		    struct ring_payload *arena)
{
	struct room *room = ring_pages_room(ring, e);
	struct status_page *page = ring->session->status;

	(void)arena;
	if (e->slot >= status_page_slots(page))
		return err_raise(ERR_PROTO, "close: slot %u", e->slot);
	if (room)
		rooms_drop(room);
	else if (was_refused(ring, e))
		ring_forget(ring, KVD_RING_IDS + e->slot);
	return 0;
}

const struct ring_verb room_verbs[] = {
	{KVD_RING_OPEN, op_open},
	{KVD_RING_BIND, op_more},
	{KVD_RING_SEND, op_more},
	{KVD_RING_ABORT, op_abort},
	{KVD_RING_EXTEND, op_extend},
	{KVD_RING_CLOSE, op_close},
	{0, NULL},
};

/* ---- by number ---- */

static struct room *room_of_id(const struct session *session, uint64_t id)
{
	struct rooms *rooms = rooms_of(session->kvd);
	uint64_t slot = id - KVD_RING_IDS;

	if (!rooms || slot >= status_page_slots(session->status))
		return NULL;
	return rooms_by_slot(rooms, session, (uint32_t)slot,
			     status_slot_gen(session->status, (uint32_t)slot));
}

bool rooms_ring_has(const struct session *session, uint64_t id)
{
	struct rooms *rooms = rooms_of(session->kvd);
	uint64_t slot = id - KVD_RING_IDS;

	return rooms && slot <= UINT32_MAX &&
	       rooms_has_slot(rooms, session, (uint32_t)slot);
}

bool rooms_ring_cancel(struct session *session, uint64_t id)
{
	struct room *room = room_of_id(session, id);

	if (room && room->hold != ROOM_DROPPED)
		room_op_abort(room, "its engine", session, NULL);
	return room;
}

bool rooms_ring_release(struct session *session, uint64_t id)
{
	struct room *room = room_of_id(session, id);

	if (room)
		rooms_drop(room);
	return room;
}
