/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An entry is processed in the three steps of a list (xfer_op.c). Begin, on the loop: its
 * slot is claimed or its room found, memory for reading is charged, and the pool, whose
 * layout is read, is held, and with it the session. Work: payload and text are copied out
 * of the arena, then the copy is checked; for more than RING_PAGES_INLINE bytes a helper
 * does it while the ring waits, since a page list of a long prompt is half a megabyte.
 * End, on the loop: the room is found again (it may have ended meanwhile), and the op is
 * executed. An error fails the room or the slot, because there is no other receiver for
 * it.
 *
 * A room is named by slot and generation, so an entry for a removed room can never mean
 * the next one of its number. It is late, and has no effect.
 */
#include "daemon/room/ring_pages.h"

#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "proto/json.h"

#define PAYLOAD_MAX (64u << 20)

struct room *ring_pages_room(const struct ring *ring, const struct kvd_ring_entry *e)
{
	struct rooms *rooms = rooms_of(ring->session->kvd);
	struct room *room =
		rooms ? rooms_by_slot(rooms, ring->session, e->slot, e->gen) : NULL;

	return room && room->hold != ROOM_DROPPED ? room : NULL;
}

/* ---- reading, on any thread ---- */

static int text_read(struct ring_pages *pages, const char *text)
{
	int r = 0;

	if (pages->e.n2 > 0 || pages->kind->read)
		r = json_parse(text, pages->e.n2, JSON_DEPTH_MAX, &pages->text);
	if (r >= 0 && pages->text && !cJSON_IsObject(pages->text))
		r = err_raise(ERR_INVAL, "the text of the entry must be an object");
	if (r >= 0 && pages->kind->read)
		r = pages->kind->read(pages);
	return err_pass(r);
}

static int pages_read(struct ring_pages *pages)
{
	const struct kvd_ring_entry *e = &pages->e;
	size_t head = pages->head_bytes, views = e->bytes - e->n2 - head;
	cleanup_free uint8_t *data = NULL;
	int r = ring_payload_copy(&pages->payload, e->offset, e->bytes, &data);

	if (r >= 0)
		r = text_read(pages, (const char *)data + head + views);
	if (r >= 0 && head) {
		pages->head = mem_dup(data, head);
		r = pages->head ? 0 : -ENOMEM;
	}
	/* an OPEN without binary views may have them in its text: not both */
	if (r >= 0)
		r = room_maps_read(data + head, views, e->n1, pages->aux,
				   pages->pool->layout, &pages->maps);
	if (r >= 0 && !pages->kind->selects && room_maps_selection(&pages->maps))
		r = err_raise(ERR_INVAL, "views: only a fetch has a selection");
	if (r >= 0 && pages->lands)
		r = room_maps_check_once(&pages->maps);
	return err_pass(r);
}

static void ring_pages_on_work(struct offload_job *job)
{
	struct ring_pages *pages = container_of(job, struct ring_pages, job);

	job->result = pages_read(pages);
	if (job->result < 0)
		err_take(&job->err);
}

/* ---- the end, on the loop ---- */

static void pages_refuse(struct ring *ring, const struct kvd_ring_entry *e,
			 struct room *room)
{
	if (room)
		room_fail_last(room);
	else
		ring_refuse(ring, e->slot, KVD_RING_IDS + e->slot);
}

static int pages_end(struct ring_pages *pages, struct room *room)
{
	int r;

	if (pages->job.result < 0)
		return err_reraise(&pages->job.err);
	charge_drop(&pages->charge); /* kept memory has its own charge */
	r = room_maps_charge(&pages->maps, pages->ring->session->account);
	return r < 0 ? err_pass(r) : err_pass(pages->kind->end(pages, room));
}

/* Done, refused, or too late. */
static void pages_finish(struct ring_pages *pages)
{
	struct ring *ring = pages->ring;
	bool claims = pages->kind->claims;
	struct room *room = claims ? NULL : ring_pages_room(ring, &pages->e);

	if (ring->session->ending || (!claims && !room))
		return;
	if (pages_end(pages, room) < 0)
		pages_refuse(ring, &pages->e, room);
}

static void pages_drop(struct ring_pages *pages)
{
	charge_drop(&pages->charge);
	room_maps_fini(&pages->maps);
	cJSON_Delete(pages->text);
	mem_free(pages->head);
	mem_free(pages->payload.data);
	if (pages->pool)
		pool_unuse(pages->pool);
	mem_free(pages);
}

static void ring_pages_on_tree(struct offload_job *job)
{
	struct ring_pages *pages = container_of(job, struct ring_pages, job);

	cJSON_Delete(pages->text);
	pages->text = NULL;
}

static void ring_pages_on_freed(struct offload_job *job)
{
	pages_drop(container_of(job, struct ring_pages, job));
}

static void ring_pages_on_worked(struct offload_job *job)
{
	struct ring_pages *pages = container_of(job, struct ring_pages, job);
	struct ring *ring = pages->ring;

	pages_finish(pages);
	ring_work_end(ring, !pages->payload.data);
	if (pages->e.n2 > RING_PAGES_INLINE) { /* a long tree: not on the loop */
		pages->job.work = ring_pages_on_tree;
		pages->job.done = ring_pages_on_freed;
		offload_submit(ring->session->kvd->offload, &pages->job);
		return;
	}
	pages_drop(pages); /* may free the session */
}

/* ---- the beginning ---- */

static int begin_check(const struct kvd_ring_entry *e)
{
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

/* Named objects are found and held, memory for reading is charged. */
static int pages_begin(struct ring_pages *pages, const struct room *room)
{
	const struct kvd_ring_entry *e = &pages->e;
	struct session *session = pages->ring->session;
	uint64_t bytes = e->bytes + (e->n1 + UINT64_C(1)) * sizeof(struct room_map);
	struct pool *pool = room ? room->pool : NULL;
	int r = begin_check(e);

	if (r >= 0 && !rooms_of(session->kvd))
		r = err_raise(ERR_STATE, "this daemon has no rooms");
	if (r >= 0 && !room) {
		pool = pool_find(session, e->b);
		r = pool ? 0 : -ENOENT;
	}
	if (r >= 0)
		r = charge_take(&pages->charge, session->account, ACCOUNT_PAGES, bytes);
	if (r < 0)
		return err_pass(r);
	pages->lands = room ? room->role == ROOM_RECV || room->role == ROOM_PULL
			    : pages->kind->lands;
	pages->aux = e->flags & KVD_RING_AUX ? (int64_t)e->c : -1;
	pages->pool = pool;
	if (room)
		pool_use_again(pool);
	else
		pool_use(pool);
	return 0;
}

static struct ring_pages *ring_pages_new(struct ring *ring,
					 const struct kvd_ring_entry *e,
					 struct ring_payload *arena,
					 const struct ring_pages_kind *kind,
					 size_t head_bytes)
{
	struct ring_pages *pages = mem_zalloc(sizeof(*pages) + kind->bytes);

	if (!pages)
		return NULL;
	pages->kind = kind;
	pages->ring = ring;
	pages->e = *e;
	pages->head_bytes = head_bytes;
	pages->payload = *arena;
	arena->data = NULL;
	pages->job = (struct offload_job){.work = ring_pages_on_work,
					  .done = ring_pages_on_worked,
					  .principal = session_principal(ring->session)};
	list_init(&pages->job.link);
	return pages;
}

int ring_pages_run(struct ring *ring, const struct kvd_ring_entry *e,
		   struct ring_payload *arena, const struct ring_pages_kind *kind,
		   size_t head_bytes)
{
	struct room *room = kind->claims ? NULL : ring_pages_room(ring, e);
	struct ring_pages *pages;
	int r = 0;

	if (e->n2 > e->bytes || head_bytes > e->bytes - e->n2 ||
	    (!kind->claims && e->slot >= status_page_slots(ring->session->status)))
		return err_raise(ERR_PROTO, "op %u: slot %u, %u bytes of text in %u",
				 e->op, e->slot, e->n2, e->bytes);
	if (kind->claims)
		r = status_slot_claim(ring->session->status, e->slot, e->gen, e->a);
	if (r < 0)
		return err_pass(r);
	if (!kind->claims && !room)
		return 0;
	pages = ring_pages_new(ring, e, arena, kind, head_bytes);
	r = pages ? pages_begin(pages, room) : -ENOMEM;
	if (r < 0) {
		pages_refuse(ring, e, room);
		if (pages)
			pages_drop(pages);
		return 0;
	}
	if (e->bytes > RING_PAGES_INLINE) {
		offload_submit(ring->session->kvd->offload, &pages->job);
		return ring_work_begin(ring, pages);
	}
	ring_pages_on_work(&pages->job);
	pages_finish(pages);
	pages_drop(pages);
	return 0;
}
