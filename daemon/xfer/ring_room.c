/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms, puts and fetches by the submission ring: the same functions that the commands
 * call (room_op.h, store.h), with pages in binary instead of JSON, and without an answer.
 * What is refused fails the room or move, for there is nobody else to tell.
 *
 * An entry is done in the three steps of a list (xfer_op.c). Begin, on the loop: its slot
 * is claimed or its room found, what reading takes is charged, and the pool, whose layout
 * is read, is held. Work: payload and text are copied out of the arena, then checked in
 * the copy; of more than INLINE_BYTES a helper does it while the ring waits, since a page
 * list of a long prompt is half a megabyte. End, on the loop: the room is found again (it
 * may have ended meanwhile), and the op is done.
 *
 * A room is named by slot and generation, so an entry of a room that is gone can never
 * mean the next one of its number. It is late, and nothing happens.
 */
#include "daemon/xfer/ring_room.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/attend/attend.h"
#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/room/room_op.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/store/store.h"
#include "daemon/xfer/ring_ops.h"
#include "daemon/xfer/xfer_impl.h"
#include "proto/json.h"

#define INLINE_BYTES 8192u /* of a payload, read and checked on the loop */
#define PAYLOAD_MAX (64u << 20)
#define REASON_MAX 200u

struct ring_room {
	struct ring *ring;
	struct xfer_session *xs; /* held by its notes */
	struct kvd_ring_entry e;
	struct xfer_payload payload; /* taken */
	struct pool *pool;	     /* in use */
	enum room_role role;
	struct charge charge; /* while it is read */
	struct offload_job job;
	/* read */
	uint8_t *ids; /* PUT's */
	cJSON *text;  /* NULL: none */
	struct room_open_args open;
	struct room_maps maps;
};

/* A put or a fetch. */
static bool ring_room_moves(const struct kvd_ring_entry *e)
{
	return e->op == KVD_RING_FETCH || e->op == KVD_RING_PUT;
}

/* It claims a slot. */
static bool ring_room_opens(const struct kvd_ring_entry *e)
{
	return e->op == KVD_RING_OPEN || ring_room_moves(e);
}

/* What is before the views. */
static size_t ids_bytes(const struct kvd_ring_entry *e)
{
	return e->op == KVD_RING_PUT ? (size_t)e->n0 * KVD_RING_ID_BYTES : 0;
}

/* By slot and generation, and not closed; NULL: it is late. */
static struct room *room_named(struct ring *ring, const struct kvd_ring_entry *e)
{
	struct room *room = rooms_of(ring->session->kvd)
				    ? rooms_by_slot(rooms_of(ring->session->kvd),
						    ring->session, e->slot, e->gen)
				    : NULL;

	return room && room->hold != ROOM_DROPPED ? room : NULL;
}

/* ---- reading, on any thread ---- */

/* The text's members; an OPEN's fill its args. */
static int text_read(struct ring_room *op, const char *text)
{
	int r;

	if (op->e.n2 == 0 && op->e.op != KVD_RING_OPEN)
		return 0;
	r = json_parse(text, op->e.n2, JSON_DEPTH_MAX, &op->text);
	if (r >= 0 && !cJSON_IsObject(op->text))
		r = err_raise(ERR_INVAL, "the text of the entry: an object is wanted");
	if (r < 0 || op->e.op != KVD_RING_OPEN)
		return r < 0 ? err_pass(r) : 0;
	if (op->e.n2 > INLINE_BYTES)
		json_pack_pages(op->text);
	return err_pass(fields_read_all(room_open_fields, op->text, &op->open));
}

static int room_work(struct ring_room *op)
{
	const struct kvd_ring_entry *e = &op->e;
	size_t ids = ids_bytes(e), views = e->bytes - e->n2 - ids;
	bool lands =
		op->role == ROOM_RECV || op->role == ROOM_PULL || e->op == KVD_RING_FETCH;
	int64_t aux = e->flags & KVD_RING_AUX ? (int64_t)e->c : -1;
	cleanup_free uint8_t *data = mem_alloc((size_t)e->bytes + 1);
	int r = data ? payload_read(&op->payload, e->offset, data, e->bytes) : -ENOMEM;

	if (r >= 0)
		r = text_read(op, (const char *)data + ids + views);
	if (r >= 0 && ids) {
		op->ids = mem_dup(data, ids);
		r = op->ids ? 0 : -ENOMEM;
	}
	if (r >= 0 && e->op == KVD_RING_OPEN) {
		aux = op->open.pages.aux;
		lands = op->open.key.role == ROOM_PULL;
	}
	/* an OPEN without views in binary may have them in its text: not both */
	if (r >= 0)
		r = room_maps_read(data + ids, views, e->n1, aux, op->pool->layout,
				   &op->maps);
	if (r >= 0 && lands)
		r = room_maps_check_once(&op->maps);
	return r < 0 ? err_pass(r) : 0;
}

static void ring_room_on_work(struct offload_job *job)
{
	struct ring_room *op = container_of(job, struct ring_room, job);

	job->result = room_work(op);
	if (job->result < 0)
		err_take(&job->err);
}

/* ---- the end, on the loop ---- */

static int end_open(struct ring_room *op)
{
	const struct kvd_ring_entry *e = &op->e;
	const struct room_slot slot = {e->slot, e->gen};
	bool binary = e->n1 > 0;
	struct room *room;

	if (op->open.key.number != e->a || op->open.pool != e->b)
		return err_raise(
			ERR_INVAL,
			"room %llu, pool %llu in the text, %llu, %llu in the entry",
			(unsigned long long)op->open.key.number,
			(unsigned long long)op->open.pool, (unsigned long long)e->a,
			(unsigned long long)e->b);
	return err_pass(room_op_open(op->ring->session, op->text, &op->open,
				     binary ? &op->maps : NULL, &slot, &room));
}

static int end_pages(struct ring_room *op, struct room *room)
{
	const struct kvd_ring_entry *e = &op->e;
	struct room_pages pages = {.maps = room_maps_steal(&op->maps)};
	int r = wait_spec_parse(rooms_waits(rooms_of(op->ring->session->kvd)), op->text,
				op->ring->session, &pages.wait);

	if (r < 0) {
		room_pages_fini(&pages);
		return err_pass(r);
	}
	if (e->op == KVD_RING_BIND)
		return err_pass(room_op_bind(room, &pages));
	return err_pass(room_op_send(room, e->b, e->flags & KVD_RING_LAST, &pages));
}

static int end_move(struct ring_room *op)
{
	const struct kvd_ring_entry *e = &op->e;
	struct session *session = op->ring->session;
	const struct store_ids ids = {.bytes = op->ids, .count = e->n0, .first = e->c};
	struct store_move_args args = {.pool = op->pool,
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

	if (e->op == KVD_RING_PUT)
		handle = store_handle_find(session, e->a);
	else
		hold = store_hold_find(session, e->a);
	r = handle || hold ? 0 : -ENOENT;
	if (r >= 0 && hold)
		r = pool_check_target(op->pool);
	if (r >= 0 && hold && e->c > UINT32_MAX)
		r = err_raise(ERR_RANGE, "deadline_ms: %llu", (unsigned long long)e->c);
	if (r >= 0)
		r = wait_spec_parse(rooms_waits(rooms_of(op->ring->session->kvd)),
				    op->text, session, &args.wait);
	if (r < 0)
		return err_pass(r);
	args.maps = room_maps_steal(&op->maps);
	if (handle) { /* what it takes later shows in its slot */
		r = store_put(handle, &ids, &args, &move);
		return r < 0 ? err_pass(r) : 0;
	}
	args.deadline_ns = e->c * LOOP_NS_PER_MS;
	return err_pass(store_fetch(hold, &args, &move));
}

static int room_end(struct ring_room *op, struct room *room)
{
	struct session *session = op->ring->session;
	int r = 0;

	if (op->job.result < 0)
		return err_reraise(&op->job.err);
	charge_drop(&op->charge); /* what stays charges itself */
	r = room_maps_charge(&op->maps, session->account);
	if (r < 0)
		return err_pass(r);
	if (ring_room_moves(&op->e))
		return err_pass(end_move(op));
	return err_pass(room ? end_pages(op, room) : end_open(op));
}

/* Done, or refused, or too late for either. */
static void room_finish(struct ring_room *op)
{
	struct ring *ring = op->ring;
	bool opens = ring_room_opens(&op->e);
	struct room *room = opens ? NULL : room_named(ring, &op->e);

	if (op->xs->draining || ring->session->ending || (!opens && !room))
		return;
	if (room_end(op, room) >= 0)
		return;
	if (opens)
		ring_ops_refuse(ring, op->e.slot, KVD_RING_IDS + op->e.slot);
	else
		room_fail_last(room, NULL);
}

static void room_op_drop(struct ring_room *op)
{
	struct xfer_session *xs = op->xs;

	charge_drop(&op->charge);
	room_maps_fini(&op->maps);
	cJSON_Delete(op->text);
	mem_free(op->ids);
	mem_free(op->payload.data);
	if (op->pool)
		pool_unuse(op->pool);
	mem_free(op);
	xs->notes--;
	if (xs->draining)
		xfer_session_try_free(xs);
}

static void ring_room_on_tree(struct offload_job *job)
{
	struct ring_room *op = container_of(job, struct ring_room, job);

	cJSON_Delete(op->text);
	op->text = NULL;
}

static void ring_room_on_freed(struct offload_job *job)
{
	room_op_drop(container_of(job, struct ring_room, job));
}

static void ring_room_on_worked(struct offload_job *job)
{
	struct ring_room *op = container_of(job, struct ring_room, job);
	struct ring *ring = op->ring;
	bool shared = !op->payload.data;

	room_finish(op);
	ring->work = NULL;
	if (!ring->stopped) {
		if (shared)
			ring_entry_done(ring);
		ring_resume(ring);
	}
	if (op->e.n2 > INLINE_BYTES) { /* a long tree is not freed on the loop either */
		op->job.work = ring_room_on_tree;
		op->job.done = ring_room_on_freed;
		offload_submit(ring->session->kvd->offload, &op->job);
		return;
	}
	room_op_drop(op); /* perhaps the session goes with it */
}

/* ---- the beginning ---- */

static int begin_check(const struct ring_room *op)
{
	const struct kvd_ring_entry *e = &op->e;

	if (e->bytes > PAYLOAD_MAX || e->n2 > SESSION_LINE_MAX)
		return err_raise(ERR_TOOBIG,
				 "%u bytes of views and text, at most %u; of text %u, at "
				 "most %u",
				 e->bytes, PAYLOAD_MAX, e->n2, SESSION_LINE_MAX);
	if (e->n1 > LAYOUT_VIEWS_MAX)
		return err_raise(ERR_LIMIT, "views: %u, at most %u", e->n1,
				 LAYOUT_VIEWS_MAX);
	if (e->flags & KVD_RING_AUX && e->c > INT32_MAX)
		return err_raise(ERR_RANGE, "aux: %llu is not in 0 to %d",
				 (unsigned long long)e->c, INT32_MAX);
	return 0;
}

/* What it names is found and held, what it reads charged. */
static int ring_room_begin(struct ring_room *op, const struct room *room)
{
	struct session *session = op->ring->session;
	uint64_t bytes = op->e.bytes + (op->e.n1 + UINT64_C(1)) * sizeof(struct room_map);
	struct pool *pool = room ? room->pool : NULL;
	int r = begin_check(op);

	if (r >= 0 && !rooms_of(session->kvd))
		r = err_raise(ERR_STATE, "this daemon has no rooms");
	if (r >= 0 && !room) {
		pool = pool_find(session, op->e.b);
		r = pool ? 0 : -ENOENT;
	}
	if (r >= 0)
		r = charge_take(&op->charge, session->account, ACCOUNT_PAGES, bytes);
	if (r < 0)
		return err_pass(r);
	op->role = room ? room->role : ROOM_SEND;
	op->pool = pool;
	if (room)
		pool_use_again(pool);
	else
		pool_use(pool);
	return 0;
}

static struct ring_room *room_op_new(struct ring *ring, const struct kvd_ring_entry *e,
				     struct xfer_payload *arena)
{
	struct ring_room *op = mem_zalloc(sizeof(*op));

	if (!op)
		return NULL;
	op->ring = ring;
	op->xs = ring->session->part[MODULE_XFER];
	op->xs->notes++;
	op->e = *e;
	op->payload = *arena;
	arena->data = NULL;
	op->job = (struct offload_job){.work = ring_room_on_work,
				       .done = ring_room_on_worked,
				       .principal = session_principal(ring->session)};
	list_init(&op->job.link);
	return op;
}

static void refuse_early(struct ring *ring, const struct kvd_ring_entry *e,
			 struct room *room)
{
	if (room)
		room_fail_last(room, NULL);
	else
		ring_ops_refuse(ring, e->slot, KVD_RING_IDS + e->slot);
}

int ring_room_pages(struct ring *ring, const struct kvd_ring_entry *e,
		    struct xfer_payload *arena)
{
	bool opens = ring_room_opens(e);
	struct room *room = opens ? NULL : room_named(ring, e);
	struct ring_room *op;
	int r = 0;

	if (e->n2 > e->bytes || ids_bytes(e) > e->bytes - e->n2 ||
	    (e->op == KVD_RING_PUT && e->n0 > STORE_IDS_MAX) ||
	    (!opens && e->slot >= status_page_slots(ring->session->status)))
		return err_raise(ERR_PROTO, "op %u: slot %u, %u bytes of text in %u",
				 e->op, e->slot, e->n2, e->bytes);
	if (opens)
		r = status_slot_claim(ring->session->status, e->slot, e->gen, e->a);
	if (r < 0)
		return err_pass(r);
	if (!opens && !room)
		return 0;
	op = room_op_new(ring, e, arena);
	r = op ? ring_room_begin(op, room) : -ENOMEM;
	if (r < 0) {
		refuse_early(ring, e, room);
		if (op)
			room_op_drop(op);
		return 0;
	}
	if (e->bytes > INLINE_BYTES) {
		ring->work = op;
		offload_submit(ring->session->kvd->offload, &op->job);
		return RING_OP_LATER;
	}
	ring_room_on_work(&op->job);
	room_finish(op);
	room_op_drop(op);
	return 0;
}

/* ---- abort, close ---- */

int ring_room_abort(struct ring *ring, const struct kvd_ring_entry *e,
		    const struct xfer_payload *arena)
{
	struct session *session = ring->session;
	char reason[REASON_MAX + 1] = "";
	struct room *room = NULL;
	int r;

	if (e->n0 >= ROOM_ROLES || e->bytes > REASON_MAX)
		return err_raise(ERR_PROTO, "abort: role %u, %u bytes of reason", e->n0,
				 e->bytes);
	r = payload_read(arena, e->offset, reason, e->bytes);
	if (r < 0)
		return err_pass(r);
	json_sanitize(reason);
	if (e->gen)
		room = room_named(ring, e);
	else if (rooms_of(ring->session->kvd))
		room = rooms_find(rooms_of(ring->session->kvd), session,
				  (enum room_role)e->n0, e->a);
	if (room)
		room_op_abort(room, "its engine", session, *reason ? reason : NULL);
	err_clear(); /* closed meanwhile */
	return 0;
}

int ring_room_extend(struct ring *ring, const struct kvd_ring_entry *e)
{
	struct room *room = room_named(ring, e);

	if (room && room_op_extend(room, e->c) < 0)
		room_fail_last(room, NULL);
	return 0;
}

/* An opening that was refused has the slot, and nothing else of this generation does. */
static bool was_refused(struct ring *ring, const struct kvd_ring_entry *e)
{
	const struct xfer_session *xs = ring->session->part[MODULE_XFER];
	uint64_t id = KVD_RING_IDS + e->slot;

	return status_slot_claimed(ring->session->status, e->slot) &&
	       status_slot_gen(ring->session->status, e->slot) == e->gen &&
	       !idmap_get(&xs->transfers, id) && !idmap_get(&xs->dlists, id) &&
	       !store_has(ring->session, id) && !attend_posted(ring->session, id) &&
	       !(rooms_of(ring->session->kvd) &&
		 rooms_has_slot(rooms_of(ring->session->kvd), ring->session, e->slot));
}

int ring_room_close(struct ring *ring, const struct kvd_ring_entry *e)
{
	struct room *room = room_named(ring, e);
	struct status_page *page = ring->session->status;

	if (e->slot >= status_page_slots(page))
		return err_raise(ERR_PROTO, "close: slot %u", e->slot);
	if (room)
		rooms_drop(room);
	else if (was_refused(ring, e))
		ring_ops_forget(ring, KVD_RING_IDS + e->slot);
	return 0;
}

static struct room *room_of_id(struct ring *ring, uint64_t id)
{
	uint64_t slot = id - KVD_RING_IDS;
	struct status_page *page = ring->session->status;

	if (!rooms_of(ring->session->kvd) || slot >= status_page_slots(page))
		return NULL;
	return rooms_by_slot(rooms_of(ring->session->kvd), ring->session, (uint32_t)slot,
			     status_slot_gen(page, (uint32_t)slot));
}

bool ring_room_cancel(struct ring *ring, uint64_t id)
{
	struct room *room = room_of_id(ring, id);

	if (room && room->hold != ROOM_DROPPED)
		room_op_abort(room, "its engine", ring->session, NULL);
	return room != NULL;
}

bool ring_room_release(struct ring *ring, uint64_t id)
{
	struct room *room = room_of_id(ring, id);

	if (room)
		rooms_drop(room);
	return room != NULL;
}
