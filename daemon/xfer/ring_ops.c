/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An entry names everything by number and finds it again each time: between two
 * entries anything may have gone. Three kinds of wrong are kept apart. What no
 * engine sends by mistake (numbers that its own slots contradict, bytes outside
 * the arena) breaks the protocol. What can go wrong in honest use (memory not
 * registered, a peer lost, a cap) fails the slot, with a code there and words
 * here, for xfer.state. What is late (cancel, release of what has ended) is fine.
 *
 * Small lists are read and checked at once, large ones by a helper, with the ring
 * standing still meanwhile: an engine that prepares a list and posts on it need
 * not wait in between, and no order has to be explained.
 *
 * Bounds: what lists, indices and notifications of a session take is charged to
 * it (xfer_impl.h); notifications on their way out are capped, and past the cap
 * the ring waits until some have left.
 */
#include "daemon/xfer/ring_ops.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/xfer/xfer_impl.h"

#define INLINE_ROWS 1024u /* of a list or a transfer, read and checked on the loop */
#define INLINE_BYTES (32u << 10) /* of a payload */
#define FAULTS_MAX 256u

struct ring_fault {
	struct list link;
	uint64_t id;
	struct err err;
};

/* LIST and XFER, here or at a helper */
struct ring_work {
	struct offload_job job;
	struct ring *ring;
	struct xfer_session *xs; /* held */
	struct kvd_ring_entry e;
	struct ring_source source;
	uint64_t id;
	uint64_t gid;
	struct dlist *dlist;
	struct search *search;		 /* of it */
	struct prepared *local, *remote; /* held */
	uint32_t *index[2];
	uint8_t *notif;
};

/* ---- words of refusals ---- */

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

/* The newest are kept; without memory for words the code has to do. */
static void fault_put(struct ring *ring, uint64_t id, const struct err *err)
{
	struct ring_fault *fault = mem_zalloc(sizeof(*fault));

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

/* Its slot fails, for err_last(). */
static void refuse(struct ring *ring, uint32_t slot, uint64_t id)
{
	struct err why;

	err_take(&why);
	status_slot_set(ring->session->status, slot, KVD_FAILED, 0, why.code);
	fault_put(ring, id, &why);
}

/* ---- payloads ---- */

static int source_read(const struct ring_source *source, uint64_t offset, void *to,
		       size_t len)
{
	size_t got = 0;

	if (source->data) {
		memcpy(to, source->data + offset, len);
		return 0;
	}
	while (got < len) {
		ssize_t n = pread(source->fd, (char *)to + got, len - got,
				  (off_t)(offset + got));

		if (n < 0 && errno == EINTR)
			continue;
		if (n <= 0)
			return err_raise_errno(n ? errno : EIO, "reading the arena");
		got += (size_t)n;
	}
	return 0;
}

static int read_notif(const struct kvd_ring_entry *e, const struct ring_source *source,
		      uint64_t offset, uint8_t **notif_p)
{
	uint8_t *notif;
	int r;

	if (e->bytes > XFER_NOTIF_MAX)
		return err_raise(ERR_TOOBIG, "a notification of %u bytes, at most %u",
				 e->bytes, XFER_NOTIF_MAX);
	notif = mem_zalloc((size_t)e->bytes + 1);
	if (!notif)
		return err_pass(-ENOMEM);
	r = source_read(source, offset, notif, e->bytes);
	if (r < 0) {
		mem_free(notif);
		return err_pass(r);
	}
	*notif_p = notif;
	return 0;
}

/* ---- lists and transfers: work that a helper may do ---- */

static int read_rows(const struct ring_work *w, struct dlist_entry *entries)
{
	uint32_t columns = w->e.n1, done = 0;
	uint64_t raw[2048];

	while (done < w->e.n0) {
		uint32_t n = ARRAY_LEN(raw) / columns;
		int r;

		n = n < w->e.n0 - done ? n : w->e.n0 - done;
		r = source_read(&w->source, w->e.offset + (uint64_t)done * columns * 8,
				raw, (size_t)n * columns * 8);
		if (r < 0)
			return err_pass(r);
		for (uint32_t i = 0; i < n; i++) {
			const uint64_t *row = &raw[(size_t)i * columns];

			entries[done + i] = (struct dlist_entry){
				.address = row[0],
				.bytes = row[1],
				.stride = columns == 4 ? row[2] : 0,
				.count = columns == 4 && row[3] ? row[3] : 1,
			};
		}
		done += n;
	}
	return 0;
}

/* The arena may say something else when it is read again; that is the engine's own
 * affair, everything is checked each time. */
static int list_try(struct ring_work *w, bool squeezed)
{
	struct dlist_entry *entries = mem_calloc(w->e.n0, sizeof(*entries));
	uint32_t count = w->e.n0;
	int r = entries ? read_rows(w, entries) : -ENOMEM;

	if (r < 0) {
		mem_free(entries);
		return err_pass(r);
	}
	if (squeezed)
		count = dlist_squeeze(entries, count);
	r = dlist_new(entries, count, w->gid, &w->dlist);
	return r < 0 ? err_pass(r) : search_run(w->search, w->dlist);
}

/* Engines give rows where they mean grids: all blocks of a layer. One entry then does
 * for thousands, here, on the wire and there. A grid that goes over from one region
 * into the next is none: then row by row. */
static int list_work(struct ring_work *w)
{
	int r = list_try(w, true);

	if (r >= 0 || err_last()->code != ERR_NOTFOUND)
		return r < 0 ? err_pass(r) : 0;
	dlist_free(w->dlist);
	w->dlist = NULL;
	err_clear();
	return list_try(w, false);
}

static int read_index(const struct ring_work *w, uint64_t offset, uint32_t count,
		      uint32_t **index_p)
{
	if (!count)
		return 0;
	*index_p = mem_calloc(count, sizeof(**index_p));
	return *index_p ? source_read(&w->source, offset, *index_p, (size_t)count * 4)
			: err_pass(-ENOMEM);
}

static int xfer_work(struct ring_work *w)
{
	const struct dlist *local = w->local->dlist, *remote = w->remote->dlist;
	uint64_t at = w->e.offset, n0 = w->e.n0, n1 = w->e.n1;
	struct dlist_pick a, b;
	int r = read_index(w, at, w->e.n0, &w->index[0]);

	if (r >= 0)
		r = read_index(w, at + n0 * 4, w->e.n1, &w->index[1]);
	if (r >= 0 && w->e.flags & KVD_RING_NOTIFIES)
		r = read_notif(&w->e, &w->source, at + (n0 + n1) * 4, &w->notif);
	if (r < 0)
		return err_pass(r);
	a = (struct dlist_pick){local, NULL, w->index[0], n0 ? n0 : local->descs};
	b = (struct dlist_pick){remote, NULL, w->index[1], n1 ? n1 : remote->descs};
	return dlist_check_picks(&a, &b);
}

static void work_work(struct offload_job *job)
{
	struct ring_work *w = container_of(job, struct ring_work, job);

	job->result = w->e.op == KVD_RING_LIST ? list_work(w) : xfer_work(w);
	if (job->result < 0)
		err_take(&job->err);
}

static int list_done(struct ring_work *w)
{
	struct attach *attach = NULL;
	struct prepared *prepared;
	int r;

	if (w->e.a) {
		attach = attach_find(w->xs, w->e.a);
		if (!attach)
			return err_pass(-ENOENT);
	}
	r = prepared_add(w->xs, attach, mem_steal(w->dlist), w->id, &w->search,
			 &prepared);
	if (r < 0)
		return err_pass(r);
	status_slot_set(w->ring->session->status, w->e.slot, KVD_SUCCESS, 0, ERR_OK);
	return 0;
}

static int xfer_done(struct ring_work *w)
{
	struct transfer_args args = {
		.kind = w->e.flags & KVD_RING_WRITES ? XP_WRITE : XP_READ,
		.local = w->local,
		.remote = w->remote,
		.local_index = w->index[0],
		.remote_index = w->index[1],
		.local_count = w->e.n0 ? w->e.n0 : w->local->dlist->descs,
		.remote_count = w->e.n1 ? w->e.n1 : w->remote->dlist->descs,
		.notif = w->notif,
		.notif_len = w->e.bytes,
		.has_notif = w->notif != NULL,
		.id = w->id,
		.slot = w->e.slot,
		.gen = w->e.gen,
	};
	struct transfer *t;
	struct err why;
	int r = transfer_new(w->xs, &args, &t);

	w->index[0] = args.local_index; /* NULL once taken */
	w->index[1] = args.remote_index;
	if (r < 0)
		return err_pass(r);
	if (!(w->e.flags & KVD_RING_POSTS)) {
		t->fresh = false;
		return 0;
	}
	if (transfer_post(t) < 0) {
		err_take(&why);
		transfer_refuse(t, &why);
	}
	return 0;
}

static void work_free(struct ring_work *w)
{
	struct xfer_session *xs = w->xs;

	if (w->local)
		prepared_unref(w->local);
	if (w->remote)
		prepared_unref(w->remote);
	search_free(w->search);
	dlist_free(w->dlist);
	mem_free(w->index[0]);
	mem_free(w->index[1]);
	mem_free(w->notif);
	mem_free(w->source.data);
	mem_free(w);
	xs->notes--;
	if (xs->draining)
		xfer_session_try_free(xs);
}

static void work_end(struct ring_work *w)
{
	struct ring *ring = w->ring;
	int r = w->job.result;

	if (ring->stopped)
		r = err_raise(ERR_SESSION, "the session has ended");
	else if (r < 0)
		r = err_reraise(&w->job.err);
	else
		r = w->e.op == KVD_RING_LIST ? list_done(w) : xfer_done(w);
	if (r < 0)
		refuse(ring, w->e.slot, w->id);
}

static void work_done(struct offload_job *job)
{
	struct ring_work *w = container_of(job, struct ring_work, job);
	struct ring *ring = w->ring;

	work_end(w);
	ring->work = NULL;
	if (!ring->stopped) {
		if (!w->source.data) /* it lies in the shared ring */
			ring_entry_done(ring);
		ring_resume(ring);
	}
	work_free(w); /* perhaps the session goes with it, later */
}

static uint64_t rows_of(const struct ring_work *w)
{
	if (w->e.op == KVD_RING_LIST || w->e.n0)
		return w->e.n0;
	return w->local->dlist->descs;
}

static int work_go(struct ring_work *w)
{
	struct ring *ring = w->ring;

	if (rows_of(w) > INLINE_ROWS || kvd_ring_payload(&w->e) > INLINE_BYTES) {
		w->job = (struct offload_job){.work = work_work, .done = work_done};
		list_init(&w->job.link);
		ring->work = w;
		offload_submit(ring->session->kvd->offload, &w->job);
		return RING_OP_LATER;
	}
	work_work(&w->job);
	work_end(w);
	work_free(w);
	return 0;
}

static struct ring_work *work_new(struct ring *ring, struct xfer_session *xs,
				  const struct kvd_ring_entry *e,
				  struct ring_source *source)
{
	struct ring_work *w = mem_zalloc(sizeof(*w));

	if (!w)
		return NULL;
	w->ring = ring;
	w->xs = xs;
	xs->notes++;
	w->e = *e;
	w->id = KVD_RING_IDS + e->slot;
	w->source = *source;
	source->data = NULL;
	return w;
}

/* ---- ops ---- */

/* What the session exports now, or the attached one. */
static int search_begin(struct xfer_session *xs, uint64_t attach_id,
			struct search **search_p)
{
	struct attach *attach;

	if (!attach_id)
		return search_begin_local(xs->session, 0, search_p);
	attach = attach_find(xs, attach_id);
	if (!attach)
		return err_pass(-ENOENT);
	if (!attach->pool)
		return err_raise(ERR_PEER, "the remote session is not reachable now");
	return search_begin_remote(attach->pool, search_p);
}

static int op_list(struct ring *ring, struct xfer_session *xs,
		   const struct kvd_ring_entry *e, struct ring_source *source)
{
	uint64_t id = KVD_RING_IDS + e->slot;
	struct search *search = NULL;
	struct ring_work *w = NULL;
	int r = e->n1 >= 2 ? 0 : err_raise(ERR_PROTO, "a list of %u columns", e->n1);

	if (r >= 0)
		r = status_slot_claim(ring->session->status, e->slot, e->gen, id);
	if (r < 0)
		return err_pass(r);
	if (e->n0 == 0 || e->n0 > DLIST_ENTRIES_MAX)
		r = err_raise(e->n0 ? ERR_LIMIT : ERR_INVAL, "a list of %u rows, 1 … %u",
			      e->n0, DLIST_ENTRIES_MAX);
	if (r >= 0)
		r = search_begin(xs, e->a, &search);
	if (r >= 0)
		w = work_new(ring, xs, e, source);
	if (!w) {
		search_free(search);
		refuse(ring, e->slot, id);
		return 0;
	}
	w->search = search;
	w->gid = loop_random_u64(ring->session->kvd->loop);
	return work_go(w);
}

static int find_lists(struct xfer_session *xs, const struct kvd_ring_entry *e,
		      struct prepared **local_p, struct prepared **remote_p)
{
	*local_p = prepared_find(xs, e->a);
	*remote_p = *local_p ? prepared_find(xs, e->b) : NULL;
	if (!*remote_p)
		return err_prefix(-ENOENT, *local_p ? "remote" : "local");
	return lists_fit(*local_p, *remote_p);
}

static int op_xfer(struct ring *ring, struct xfer_session *xs,
		   const struct kvd_ring_entry *e, struct ring_source *source)
{
	uint64_t id = KVD_RING_IDS + e->slot;
	struct prepared *local, *remote;
	struct ring_work *w = NULL;
	int r = status_slot_claim(ring->session->status, e->slot, e->gen, id);

	if (r < 0)
		return err_pass(r);
	if (find_lists(xs, e, &local, &remote) >= 0)
		w = work_new(ring, xs, e, source);
	if (!w) {
		refuse(ring, e->slot, id);
		return 0;
	}
	w->local = local;
	w->remote = remote;
	local->refs++;
	remote->refs++;
	return work_go(w);
}

/* Of what was refused when it was made: it fails again, in the next generation. */
static int post_refused(struct ring *ring, const struct kvd_ring_entry *e)
{
	struct status_page *page = ring->session->status;
	const struct err *err = ring_fault_of(ring, e->a);
	uint32_t slot = (uint32_t)(e->a - KVD_RING_IDS);

	if (e->a - KVD_RING_IDS > UINT32_MAX || !status_slot_claimed(page, slot))
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
		   const struct kvd_ring_entry *e, const struct ring_source *source)
{
	struct transfer *t = idmap_get(&xs->transfers, e->a);
	uint8_t *notif = NULL;
	struct err why;
	int r = 0;

	if (!t)
		return post_refused(ring, e);
	if (t->release || t->phase != XFER_ENDED ||
	    e->gen != kvd_ring_next_gen(status_slot_gen(ring->session->status, t->slot)))
		return err_raise(ERR_PROTO,
				 "post: xfer %llu is released, under way, or of "
				 "another generation than %u",
				 (unsigned long long)e->a, e->gen);
	if (e->flags & KVD_RING_NOTIFIES)
		r = read_notif(e, source, e->offset, &notif);
	if (r >= 0 && notif)
		transfer_notif(t, notif, e->bytes);
	if (r >= 0)
		r = transfer_post(t);
	if (r < 0) {
		err_take(&why);
		transfer_refuse(t, &why);
	}
	return 0;
}

static void cancel(const struct ring *ring, struct transfer *t)
{
	struct err why;

	err_set(&why, ERR_CANCELED, "canceled by its engine '%.40s'",
		ring->session->client);
	transfer_cancel(t, &why);
}

static int op_release(struct ring *ring, struct xfer_session *xs,
		      const struct kvd_ring_entry *e)
{
	struct transfer *t = idmap_get(&xs->transfers, e->a);
	struct prepared *prepared = t ? NULL : idmap_get(&xs->dlists, e->a);
	struct ring_fault *fault = fault_find(ring, e->a);
	uint64_t slot = e->a - KVD_RING_IDS;

	if (fault)
		fault_drop(ring, fault);
	if (t && !t->release) {
		t->release = true;
		if (t->phase == XFER_ENDED)
			transfer_free(t);
		else
			cancel(ring, t); /* and it frees itself */
	} else if (prepared) {
		prepared_release(prepared);
	} else if (!t && slot <= UINT32_MAX &&
		   status_slot_claimed(ring->session->status, (uint32_t)slot)) {
		status_slot_release(ring->session->status, (uint32_t)slot);
	}
	return 0;
}

/* Past the cap the ring waits; xfer.submit says so. */
static int op_notify(struct ring *ring, struct xfer_session *xs,
		     const struct kvd_ring_entry *e, const struct ring_source *source)
{
	struct attach *attach = NULL;
	uint8_t *data = NULL;
	int r;

	if (xs->notes >= XFER_NOTES_MAX || xs->note_bytes >= XFER_NOTE_BYTES_MAX) {
		if (source->data)
			return err_raise(ERR_BUSY,
					 "%u requests of this session wait to be sent",
					 xs->notes);
		xs->ring_waits = true;
		return RING_OP_LATER;
	}
	r = read_notif(e, source, e->offset, &data);
	if (r >= 0)
		attach = attach_find(xs, e->a);
	if (attach)
		r = notif_post(attach, data, e->bytes, (struct xfer_waiter){NULL, NULL});
	if (r < 0 || !attach) { /* nobody is there to be told: it is counted */
		metrics_add(&ring->session->kvd->metrics, METRIC_NOTIFS_DROPPED, 1);
		err_clear();
	}
	mem_free(data);
	return 0;
}

static int op_abort(struct ring *ring, const struct kvd_ring_entry *e)
{
	struct session *session = ring->session;
	struct room *room;
	struct err why;

	if (e->n0 >= ROOM_ROLES)
		return err_raise(ERR_PROTO, "abort: role %u", e->n0);
	room = session->kvd->rooms ? rooms_find(session->kvd->rooms, session,
						(enum room_role)e->n0, e->a)
				   : NULL;
	if (!room) {
		err_clear(); /* closed meanwhile */
		return 0;
	}
	err_set(&why, ERR_ABORTED, "aborted by its engine '%.40s' (pid %d)",
		session->client, (int)session->pid);
	room_fail(room, &why, NULL);
	return 0;
}

int ring_op(struct ring *ring, const struct kvd_ring_entry *e, struct ring_source *source)
{
	struct xfer_session *xs = ring->session->xfers; /* ring_of() made it */
	uint64_t bytes = kvd_ring_payload(e);
	struct transfer *t;

	if (bytes > source->bytes || e->offset > source->bytes - bytes)
		return err_raise(ERR_PROTO,
				 "entry of op %u: its payload is outside the arena",
				 e->op);
	metrics_add(&ring->session->kvd->metrics, METRIC_RING_ENTRIES, 1);
	switch (e->op) {
	case KVD_RING_LIST:
		return op_list(ring, xs, e, source);
	case KVD_RING_XFER:
		return op_xfer(ring, xs, e, source);
	case KVD_RING_POST:
		return op_post(ring, xs, e, source);
	case KVD_RING_CANCEL:
		t = idmap_get(&xs->transfers, e->a);
		if (t)
			cancel(ring, t);
		return 0;
	case KVD_RING_RELEASE:
		return op_release(ring, xs, e);
	case KVD_RING_NOTIFY:
		return op_notify(ring, xs, e, source);
	case KVD_RING_ABORT:
		return op_abort(ring, e);
	default:
		return err_raise(ERR_PROTO, "entry of an unknown op %u", e->op);
	}
}
