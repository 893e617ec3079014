/* SPDX-License-Identifier: Apache-2.0 */
/*
 * This side's engines: prepared lists and transfers.
 *
 * A transfer is checked while the engine waits for the answer (indices, lengths,
 * ranges on both sides), planned, and posted behind the lists that it names:
 * everything of one attach goes through one flow, and requests of a peer arrive
 * in the order of their posts, so the other daemon has the lists when the
 * transfer comes. An ended transfer can be posted again.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/commands.h"
#include "daemon/kvd.h"
#include "daemon/region.h"
#include "daemon/ring.h"
#include "daemon/session.h"
#include "daemon/status.h"
#include "daemon/xfer_impl.h"

#define PART_ENTRIES 60000u /* of a list in one request: below XP_HEADER_MAX */

/* ---- notes: requests without bytes ---- */

static void on_note_done(struct sched_op *op)
{
	struct note *note = op->owner;
	struct xfer_session *xs = note->xs;

	if (note->notif && op->xp.result >= 0)
		metrics_add(&xs->xfers->kvd->metrics, METRIC_NOTIFS_OUT, 1);
	if (note->req && op->xp.result < 0)
		request_fail(note->req, &op->xp.err);
	else if (note->req)
		request_reply(note->req, NULL);
	xs->note_bytes -= note->bytes;
	mem_free(note);
	xs->notes--;
	if (xs->ring_waits && !xs->draining) {
		xs->ring_waits = false;
		ring_resume(xs->session->ring);
	}
	if (xs->draining)
		xfer_session_try_free(xs);
}

static struct note *note_new(size_t header_len, struct cursor *out)
{
	struct note *note = mem_zalloc(sizeof(*note) + header_len);

	if (!note)
		return NULL;
	list_init(&note->op.link);
	cursor_write(out, note->header, header_len);
	return note;
}

static void note_post(struct note *note, struct attach *attach, size_t len)
{
	note->xs = attach->xs;
	note->xs->notes++; /* its flow lives in the attach */
	note->bytes = len;
	note->xs->note_bytes += len;
	note->op.xp.kind = XP_WRITE;
	note->op.xp.header = note->header;
	note->op.xp.header_len = len;
	note->op.owner = note;
	note->op.on_done = on_note_done;
	sched_submit(&attach->flow, &note->op);
}

int notif_post(struct attach *attach, const void *data, size_t len, struct request *req)
{
	struct session *session = attach->xs->session;
	struct cursor out;
	struct note *note;

	if (len > XFER_NOTIF_MAX)
		return err_raise(ERR_TOOBIG, "a notification of %zu bytes, at most %u", len,
				 XFER_NOTIF_MAX);
	note = note_new(len + 128 + sizeof(session->client), &out);
	if (!note)
		return err_pass(-ENOMEM);
	cursor_put_u8(&out, REQUEST_NOTIF);
	cursor_put_u64(&out, attach->epoch);
	cursor_put_bytes(&out, attach->secret, sizeof(attach->secret));
	cursor_put_str(&out, session->client);
	cursor_put_blob(&out, data, len);
	note->req = req;
	note->notif = true;
	note_post(note, attach, out.pos);
	return 0;
}

/* ---- prepared lists ---- */

static int check_resolves(struct prepared *prepared, unsigned int transport)
{
	struct session *session = prepared->xs->session;
	struct places *places = NULL;
	int r;

	if (prepared->attach)
		r = dlist_resolve_remote(prepared->dlist, prepared->attach->pool, &places);
	else
		r = dlist_resolve_local(prepared->dlist, session, session->regions_version,
					transport, &places);
	if (r >= 0)
		places_unref(places);
	return r < 0 ? err_pass(r) : 0;
}

static uint64_t list_memory(const struct dlist *dlist)
{
	return (uint64_t)dlist->entry_count * (sizeof(*dlist->entries) + sizeof(*dlist->first));
}

static int check_charge(const struct xfer_session *xs, uint64_t bytes)
{
	if (bytes <= XFER_LISTS_BYTES_MAX - xs->list_bytes)
		return 0;
	return err_raise(ERR_LIMIT, "lists and indices of this session take %llu bytes, %llu "
			 "more are over the cap of %llu", (unsigned long long)xs->list_bytes,
			 (unsigned long long)bytes, (unsigned long long)XFER_LISTS_BYTES_MAX);
}

int prepared_new(struct xfer_session *xs, struct attach *attach,
		 struct dlist_entry *entries, uint32_t count, struct prepared **prepared_p)
{
	struct dlist *dlist = NULL;
	int r = dlist_new(entries, count, loop_random_u64(xs->xfers->kvd->loop), &dlist);

	return r < 0 ? err_pass(r) : prepared_add(xs, attach, dlist, 0, prepared_p);
}

int prepared_add(struct xfer_session *xs, struct attach *attach, struct dlist *dlist,
		 uint64_t id, struct prepared **prepared_p)
{
	struct prepared *prepared = NULL;
	int r = check_charge(xs, list_memory(dlist));

	if (r >= 0 && idmap_count(&xs->dlists) >= XFER_DLISTS_MAX)
		r = err_raise(ERR_LIMIT, "%u prepared lists: the cap of a session",
			      XFER_DLISTS_MAX);
	if (r >= 0) {
		prepared = mem_zalloc(sizeof(*prepared));
		r = prepared ? 0 : -ENOMEM;
	}
	if (r < 0) {
		dlist_free(dlist);
		return err_pass(r);
	}
	prepared->xs = xs;
	prepared->attach = attach;
	prepared->dlist = dlist;
	prepared->refs = 1;
	list_init(&prepared->sent);
	r = check_resolves(prepared, 0);
	if (r >= 0) {
		prepared->id = id ? id : ++xs->session->next_id;
		r = idmap_put(&xs->dlists, prepared->id, prepared);
	}
	if (r < 0) {
		dlist_free(dlist);
		mem_free(prepared);
		return err_pass(r);
	}
	xs->list_bytes += list_memory(dlist);
	*prepared_p = prepared;
	return 0;
}

struct prepared *prepared_find(struct xfer_session *xs, uint64_t id)
{
	struct prepared *prepared = idmap_get(&xs->dlists, id);

	if (!prepared)
		err_raise(ERR_NOTFOUND, "dlist %llu: none of this session",
			  (unsigned long long)id);
	return prepared;
}

static void tell_free(struct prepared *prepared, struct remote *remote)
{
	struct xfer_session *xs = prepared->xs;
	struct idmap_cursor at;

	idmap_foreach(&xs->attaches, at) {
		struct attach *attach = at.value;
		struct cursor out;
		struct note *note;

		if (attach->remote != remote || attach->state != ATTACH_READY)
			continue;
		note = note_new(16, &out);
		if (!note) {
			err_clear(); /* it stays there until the session ends */
			return;
		}
		cursor_put_u8(&out, REQUEST_DLIST_FREE);
		cursor_put_u64(&out, prepared->dlist->gid);
		note_post(note, attach, out.pos);
		return;
	}
}

void prepared_unref(struct prepared *prepared)
{
	struct sent_list *sent;

	if (--prepared->refs > 0)
		return;
	list_foreach_safe(sent, &prepared->sent, link) {
		if (sent->remote->peer->epoch == sent->peer_epoch && !prepared->xs->draining)
			tell_free(prepared, sent->remote);
		list_remove(&sent->link);
		mem_free(sent);
	}
	if (idmap_get(&prepared->xs->dlists, prepared->id) == prepared)
		idmap_remove(&prepared->xs->dlists, prepared->id);
	prepared->xs->list_bytes -= list_memory(prepared->dlist);
	dlist_free(prepared->dlist);
	mem_free(prepared);
}

void prepared_release(struct prepared *prepared)
{
	idmap_remove(&prepared->xs->dlists, prepared->id);
	if (prepared->id >= KVD_RING_IDS)
		status_slot_release(prepared->xs->session->status,
				    (uint32_t)(prepared->id - KVD_RING_IDS));
	prepared_unref(prepared);
}

int lists_fit(const struct prepared *local, const struct prepared *remote)
{
	if (!local->attach && remote->attach)
		return 0;
	return err_raise(ERR_INVAL, "%s: a list of the %s side is wanted",
			 local->attach ? "local" : "remote", local->attach ? "own" : "remote");
}

void lists_forget_remote(struct xfer_session *xs, const struct remote *remote)
{
	struct idmap_cursor at;
	struct sent_list *sent;

	idmap_foreach(&xs->dlists, at) {
		struct prepared *prepared = at.value;

		list_foreach_safe(sent, &prepared->sent, link) {
			if (sent->remote != remote)
				continue;
			list_remove(&sent->link);
			mem_free(sent);
		}
	}
}

static int send_part(struct prepared *prepared, struct attach *attach, uint32_t begin,
		     uint32_t n)
{
	const struct dlist *dlist = prepared->dlist;
	struct cursor out;
	struct note *note = note_new(80 + (size_t)n * DLIST_ENTRY_BYTES, &out);

	if (!note)
		return err_pass(-ENOMEM);
	cursor_put_u8(&out, REQUEST_DLIST);
	cursor_put_u64(&out, dlist->gid);
	cursor_put_u8(&out, prepared->attach != NULL); /* 1: of your session */
	cursor_put_u64(&out, prepared->xs->session->epoch);
	cursor_put_u64(&out, attach->epoch);
	cursor_put_bytes(&out, attach->secret, sizeof(attach->secret));
	cursor_put_u32(&out, dlist->entry_count);
	cursor_put_u32(&out, begin);
	cursor_put_u32(&out, n);
	for (uint32_t i = begin; i < begin + n; i++) {
		cursor_put_u64(&out, dlist->entries[i].address);
		cursor_put_u64(&out, dlist->entries[i].bytes);
		cursor_put_u64(&out, dlist->entries[i].stride);
		cursor_put_u64(&out, dlist->entries[i].count);
	}
	note_post(note, attach, out.pos);
	return 0;
}

/* The other daemon shall know this list; once a peering. */
static int send_list(struct prepared *prepared, struct attach *attach)
{
	struct remote *remote = attach->remote;
	uint32_t n = prepared->dlist->entry_count;
	struct sent_list *sent;

	list_foreach(sent, &prepared->sent, link) {
		if (sent->remote == remote && sent->peer_epoch == remote->peer->epoch)
			return 0;
	}
	sent = mem_zalloc(sizeof(*sent));
	if (!sent)
		return err_pass(-ENOMEM);
	for (uint32_t begin = 0; begin < n; begin += PART_ENTRIES) {
		uint32_t part = n - begin < PART_ENTRIES ? n - begin : PART_ENTRIES;
		int r = send_part(prepared, attach, begin, part);

		if (r < 0) {
			mem_free(sent);
			return err_pass(r);
		}
	}
	sent->remote = remote;
	sent->peer_epoch = remote->peer->epoch;
	list_push_back(&prepared->sent, &sent->link);
	return 0;
}

/* ---- transfers ---- */

static void set_status(struct transfer *t)
{
	struct status_page *page = t->xs->session->status;
	unsigned int state = KVD_TRANSFERRING;

	if (t->phase == XFER_ENDED)
		state = t->failed ? KVD_FAILED : KVD_SUCCESS;
	status_slot_progress(page, t->slot, t->bytes, t->plan ? t->plan->bytes : 0);
	status_slot_set(page, t->slot, state,
			t->failed && t->phase != XFER_ENDED ? KVD_FLAG_ABORTING : 0,
			t->err.code);
}

static void drop_places(struct transfer *t)
{
	if (t->local_places)
		places_unref(t->local_places);
	if (t->remote_places)
		places_unref(t->remote_places);
	t->local_places = t->remote_places = NULL;
}

void transfer_free(struct transfer *t)
{
	struct xfer_session *xs = t->xs;
	struct request *req = t->release_req;

	assert(t->phase == XFER_ENDED);
	idmap_remove(&xs->transfers, t->id);
	status_slot_release(xs->session->status, t->slot);
	prepared_unref(t->local);
	prepared_unref(t->remote);
	plan_free(t->plan);
	xs->list_bytes -= t->charged;
	mem_free(t->header);
	mem_free(t->notif);
	mem_free(t->local_index);
	mem_free(t->remote_index);
	mem_free(t);
	if (req)
		request_reply(req, NULL);
	if (xs->draining)
		xfer_session_try_free(xs);
}

static void end(struct transfer *t)
{
	struct metrics *metrics = &t->xs->xfers->kvd->metrics;

	t->phase = XFER_ENDED;
	t->xs->xfers->live--;
	drop_places(t);
	if (!t->failed)
		metrics_add(metrics, METRIC_XFERS_SUCCEEDED, 1);
	else if (t->err.code == ERR_CANCELED)
		metrics_add(metrics, METRIC_XFERS_CANCELED, 1);
	else
		metrics_add(metrics, METRIC_XFERS_FAILED, 1);
	set_status(t);
	if (t->release)
		transfer_free(t);
}

static void fail(struct transfer *t, const struct err *why)
{
	if (!t->failed) {
		t->failed = true;
		t->err = *why;
	}
}

static void on_done(struct sched_op *op)
{
	struct transfer *t = op->owner;

	if (op->xp.result < 0) {
		fail(t, &op->xp.err);
	} else if (!t->failed) {
		t->bytes = t->plan->bytes;
		metrics_add(&t->xs->xfers->kvd->metrics,
			    t->kind == XP_WRITE ? METRIC_XFER_OUT_BYTES
						: METRIC_XFER_IN_BYTES,
			    t->bytes);
		if (t->has_notif && t->kind == XP_READ &&
		    notif_post(t->attach, t->notif, t->notif_len, NULL) < 0)
			err_take(&t->err), t->failed = true;
	}
	end(t);
}

static void pick(const struct transfer *t, struct dlist_pick *src, struct dlist_pick *dst)
{
	struct dlist_pick local = {t->local->dlist, t->local_places, t->local_index, t->count};
	struct dlist_pick remote = {t->remote->dlist, t->remote_places, t->remote_index,
				    t->count};

	*src = t->kind == XP_WRITE ? local : remote;
	*dst = t->kind == XP_WRITE ? remote : local;
}

static int make_header(struct transfer *t)
{
	bool carries = t->has_notif && t->kind == XP_WRITE;
	struct dlist_pick src, dst;
	struct session *session = t->xs->session;
	struct cursor out;
	size_t size;

	pick(t, &src, &dst);
	size = 128 + sizeof(session->client) + dlist_index_bytes(&src) +
	       dlist_index_bytes(&dst) + (carries ? t->notif_len : 0);
	if (size > XP_HEADER_MAX)
		return err_raise(ERR_TOOBIG, "index lists and notification take %zu bytes, at "
				 "most %u: use several transfers", size, XP_HEADER_MAX);
	mem_free(t->header);
	t->header = mem_zalloc(size);
	if (!t->header)
		return err_pass(-ENOMEM);
	cursor_write(&out, t->header, size);
	cursor_put_u8(&out, REQUEST_XFER);
	cursor_put_u8(&out, (uint8_t)t->kind);
	cursor_put_u64(&out, session->epoch);
	cursor_put_u64(&out, t->attach->epoch);
	cursor_put_bytes(&out, t->attach->secret, sizeof(t->attach->secret));
	cursor_put_u64(&out, t->local->dlist->gid);
	cursor_put_u64(&out, t->remote->dlist->gid);
	cursor_put_u64(&out, t->plan->digest);
	cursor_put_u64(&out, t->plan->bytes);
	dlist_index_put(&out, &src);
	dlist_index_put(&out, &dst);
	cursor_put_u8(&out, carries);
	cursor_put_str(&out, session->client);
	cursor_put_blob(&out, t->notif, carries ? t->notif_len : 0);
	t->op.xp.header = t->header;
	t->op.xp.header_len = out.pos;
	return 0;
}

static int submit(struct transfer *t)
{
	struct xp_sides *sides = &t->op.xp.sides;
	const struct places *src = t->kind == XP_WRITE ? t->local_places : t->remote_places;
	const struct places *dst = t->kind == XP_WRITE ? t->remote_places : t->local_places;
	int r = send_list(t->local, t->attach);

	if (r >= 0)
		r = send_list(t->remote, t->attach);
	if (r >= 0)
		r = make_header(t);
	if (r < 0)
		return err_pass(r);
	*sides = (struct xp_sides){t->plan, src->buffers, dst->buffers, src->buffer_count,
				   dst->buffer_count};
	t->op.xp.kind = t->kind;
	t->op.owner = t;
	t->op.on_done = on_done;
	t->phase = XFER_POSTED;
	sched_submit(&t->attach->flow, &t->op);
	if (t->has_notif && t->kind == XP_WRITE)
		metrics_add(&t->xs->xfers->kvd->metrics, METRIC_NOTIFS_OUT, 1);
	return 0;
}

/* Planned: post it when the other side knows our regions. */
static void go(struct transfer *t)
{
	struct err why;
	int r = t->failed ? -1 : share_update(t->xs, t->attach->share);

	if (r == 1) {
		t->phase = XFER_SHARING;
		list_push_back(&t->attach->waiting, &t->link);
		return;
	}
	if (r == 0)
		r = submit(t);
	if (r < 0) {
		if (!t->failed) {
			err_take(&why);
			fail(t, &why);
		}
		end(t);
	}
}

void transfers_go(struct attach *attach)
{
	struct list ready;
	struct list *at;

	if (!attach->share || attach->share->sent != attach->share->acked)
		return;
	list_init(&ready);
	while ((at = list_pop_front(&attach->waiting)))
		list_push_back(&ready, at);
	while ((at = list_pop_front(&ready)))
		go(list_entry(at, struct transfer, link));
}

static void plan_work(struct offload_job *job)
{
	struct transfer *t = container_of(job, struct transfer, job);
	struct dlist_pick src, dst;

	pick(t, &src, &dst);
	job->result = dlist_plan(&src, &dst, &t->plan);
	if (job->result < 0)
		err_take(&job->err);
}

static void plan_done(struct offload_job *job)
{
	struct transfer *t = container_of(job, struct transfer, job);

	if (job->result < 0) {
		fail(t, &job->err);
	} else {
		t->plan_local = t->local_places->serial;
		t->plan_remote = t->remote_places->serial;
	}
	go(t);
}

/* Posted again, and both sides' memory lies where it lay. */
static bool plan_still_holds(const struct transfer *t)
{
	return t->plan && t->plan_local == t->local_places->serial &&
	       t->plan_remote == t->remote_places->serial;
}

static int resolve(struct transfer *t)
{
	struct session *session = t->xs->session;
	int r;

	if (t->attach->state != ATTACH_READY || !t->attach->pool)
		return t->attach->state == ATTACH_LOST
			       ? err_reraise(&t->attach->why)
			       : err_raise(ERR_PEER, "the remote session is not reachable now");
	r = dlist_resolve_local(t->local->dlist, session, session->regions_version,
				t->attach->remote->transport_index, &t->local_places);
	if (r >= 0)
		r = dlist_resolve_remote(t->remote->dlist, t->attach->pool,
					 &t->remote_places);
	if (r < 0)
		drop_places(t);
	return r < 0 ? err_pass(r) : 0;
}

/* Each post has a generation of its own: what is read of the last one can never
 * be taken for this one's. */
static void renew(struct transfer *t)
{
	if (!t->fresh)
		t->slot_gen = status_slot_renew(t->xs->session->status, t->slot);
	t->fresh = false;
	t->posted = true;
	t->failed = false;
	t->err.code = ERR_OK;
	t->bytes = 0;
}

void transfer_refuse(struct transfer *t, const struct err *why)
{
	renew(t);
	fail(t, why);
	metrics_add(&t->xs->xfers->kvd->metrics, METRIC_XFERS_FAILED, 1);
	set_status(t);
}

void transfer_notif(struct transfer *t, uint8_t *notif, size_t len)
{
	assert(t->phase == XFER_ENDED);
	mem_free(t->notif);
	t->xs->list_bytes += len;
	t->xs->list_bytes -= t->notif_len;
	t->charged += len;
	t->charged -= t->notif_len;
	t->notif = notif;
	t->notif_len = len;
	t->has_notif = true;
}

int transfer_post(struct transfer *t)
{
	int r;

	if (t->xs->xfers->kvd->draining)
		return err_raise(ERR_DRAIN, "no new transfers: the daemon is draining");
	if (t->phase != XFER_ENDED)
		return err_raise(ERR_BUSY, "xfer %llu is under way",
				 (unsigned long long)t->id);
	r = resolve(t);
	if (r < 0)
		return err_pass(r);
	renew(t);
	t->phase = XFER_PLANNING;
	t->xs->xfers->live++;
	metrics_add(&t->xs->xfers->kvd->metrics, METRIC_XFERS_STARTED, 1);
	t->job = (struct offload_job){.work = plan_work, .done = plan_done};
	list_init(&t->job.link);
	set_status(t);
	if (plan_still_holds(t)) {
		go(t);
		return 0;
	}
	plan_free(t->plan);
	t->plan = NULL;
	if (t->count > XFER_PLAN_INLINE) {
		offload_submit(t->xs->xfers->kvd->offload, &t->job);
		return 0;
	}
	plan_work(&t->job);
	plan_done(&t->job);
	return 0;
}

int transfer_new(struct xfer_session *xs, struct transfer_args *args,
		 struct transfer **transfer_p)
{
	struct dlist_pick a = {args->local->dlist, NULL, args->local_index,
			       args->local_count};
	struct dlist_pick b = {args->remote->dlist, NULL, args->remote_index,
			       args->remote_count};
	uint64_t charge = sizeof(*a.index) * ((a.index ? a.count : 0) + (b.index ? b.count : 0)) +
			  args->notif_len;
	struct transfer *t;
	int r = args->id ? 0 : dlist_check_picks(&a, &b);

	if (r >= 0)
		r = check_charge(xs, charge);
	if (r >= 0 && idmap_count(&xs->transfers) >= XFER_LIVE_MAX)
		r = err_raise(ERR_LIMIT, "%u transfers: the cap of a session", XFER_LIVE_MAX);
	if (r < 0)
		return err_pass(r);
	t = mem_zalloc(sizeof(*t));
	if (!t)
		return err_pass(-ENOMEM);
	t->xs = xs;
	t->attach = args->remote->attach;
	t->kind = args->kind;
	t->count = args->local_count;
	t->has_notif = args->has_notif;
	t->notif_len = args->notif_len;
	t->notif = mem_dup(args->notif, args->notif_len);
	t->phase = XFER_ENDED;
	list_init(&t->link);
	t->fresh = true;
	t->id = args->id ? args->id : ++xs->session->next_id;
	t->slot = args->slot;
	t->slot_gen = args->gen;
	r = t->notif ? idmap_put(&xs->transfers, t->id, t) : -ENOMEM;
	if (r >= 0 && !args->id) {
		r = status_slot_take(xs->session->status, t->id, &t->slot, &t->slot_gen);
		if (r < 0)
			idmap_remove(&xs->transfers, t->id);
	}
	if (r < 0) {
		mem_free(t->notif);
		mem_free(t);
		return err_pass(r);
	}
	t->charged = charge;
	xs->list_bytes += charge;
	t->local = args->local;
	t->remote = args->remote;
	t->local->refs++;
	t->remote->refs++;
	t->local_index = args->local_index;
	t->remote_index = args->remote_index;
	args->local_index = args->remote_index = NULL;
	*transfer_p = t;
	return 0;
}

struct transfer *transfer_find(struct xfer_session *xs, uint64_t id)
{
	struct transfer *t = idmap_get(&xs->transfers, id);

	if (!t || t->release) {
		err_raise(ERR_NOTFOUND, "xfer %llu: none of this session",
			  (unsigned long long)id);
		return NULL;
	}
	return t;
}

void transfer_cancel(struct transfer *t, const struct err *why)
{
	if (t->phase == XFER_ENDED || t->failed)
		return;
	fail(t, why);
	set_status(t);
	if (t->phase == XFER_POSTED) {
		sched_cancel(&t->op, why);
	} else if (t->phase == XFER_SHARING ||
		   offload_cancel(t->xs->xfers->kvd->offload, &t->job)) {
		list_remove(&t->link);
		end(t);
	} /* else plan_done() ends it */
}
