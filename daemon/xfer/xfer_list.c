/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Prepared lists of local engines, and notes: requests without bytes, which take lists to
 * the daemons that need them and carry bare notifications.
 *
 * A list is sent to another daemon once, for all sessions there, in parts: each is
 * processed there in one turn of the loop, so a part is small. A long list is divided
 * into its parts by the helper that plans the first transfer that needs it there.
 */
#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/request/ring.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/xfer/xfer_impl.h"

#define PART_ENTRIES 4096u

/* ---- notes: requests without bytes ---- */

static void sent_free(struct sent_list *sent)
{
	list_remove(&sent->link);
	list_remove(&sent->at_remote);
	mem_free(sent);
}

/* A part was refused, so the list does not exist there: the next transfer sends it
 * again. */
static void list_unsent(struct xfer_session *xs, const struct note *note)
{
	struct prepared *prepared = idmap_get(&xs->dlists, note->dlist);
	struct sent_list *sent;

	if (!prepared)
		return;
	list_foreach_safe(sent, &prepared->sent, link) {
		if (sent->serial == note->serial)
			sent_free(sent);
	}
}

static void on_note_done(struct sched_op *op)
{
	struct note *note = op->owner;
	struct xfer_session *xs = note->xs;
	struct attach *attach = note->attach;

	if (note->dlist && op->xp.result < 0)
		list_unsent(xs, note);
	if (note->notif && op->xp.result >= 0)
		metrics_add(&xs->xfers->kvd->metrics,
			    METRIC_AT(NOTIFS, METRIC_OUT, METRIC_NOTIF_PASSED), 1);
	xs->note_bytes -= note->bytes;
	note_free(note);
	attach_unuse(attach);
	xs->notes--;
	if (xs->ring_waits && !xs->draining) {
		xs->ring_waits = false;
		ring_resume(ring_of(xs->session));
	}
	if (xs->draining)
		xfer_session_try_free(xs);
}

void note_free(struct note *note)
{
	if (note)
		mem_free_large(note->op.xp.owned, note->bytes);
	mem_free(note);
}

static struct note *note_new(size_t header_len, struct cursor *out)
{
	struct note *note = mem_zalloc(sizeof(*note));
	uint8_t *header = note ? mem_alloc(header_len) : NULL;

	if (!header) {
		mem_free(note);
		return NULL;
	}
	list_init(&note->link);
	list_init(&note->op.link);
	note->op.xp.header = note->op.xp.owned = header;
	cursor_write(out, header, header_len);
	return note;
}

void note_post(struct note *note, struct attach *attach)
{
	note->xs = attach->xs;
	note->xs->notes++;
	note->attach = attach; /* its flow lives there */
	attach_use(attach);
	note->xs->note_bytes += note->bytes;
	note->op.xp.kind = XP_WRITE;
	note->op.xp.header_len = note->bytes;
	note->op.owner = note;
	note->op.on_done = on_note_done;
	sched_submit(&attach->flow, &note->op);
}

int note_begin(struct attach *attach, size_t len, struct note **note_p)
{
	struct session *session = attach->xs->session;
	struct cursor out;
	struct note *note;

	if (len > XFER_NOTIF_MAX)
		return err_raise(ERR_TOOBIG, "notification of %zu bytes (limit %u)", len,
				 XFER_NOTIF_MAX);
	note = note_new(len + 128 + sizeof(session->client), &out);
	if (!note)
		return err_pass(-ENOMEM);
	cursor_put_u8(&out, REQUEST_NOTIF);
	cursor_put_u64(&out, attach->epoch);
	cursor_put_bytes(&out, attach->secret, sizeof(attach->secret));
	cursor_put_str(&out, session->client);
	cursor_put_u32(&out, (uint32_t)len);
	note->tail = note->op.xp.owned + out.pos;
	note->bytes = out.pos + len;
	note->notif = true;
	*note_p = note;
	return 0;
}

int notif_post(struct attach *attach, const void *data, size_t len)
{
	struct note *note;
	int r = note_begin(attach, len, &note);

	assert(data || len == 0);
	if (r < 0)
		return err_pass(r);
	if (len)
		memcpy(note->tail, data, len);
	note_post(note, attach);
	return 0;
}

/* ---- prepared lists ---- */

uint64_t xfer_list_bytes(uint64_t entries)
{
	return sizeof(struct prepared) + sizeof(struct dlist) +
	       entries * (sizeof(struct dlist_entry) + sizeof(uint64_t) +
			  sizeof(struct search_place));
}

int prepared_add(struct xfer_session *xs, struct attach *attach, struct dlist *dlist,
		 uint64_t id, struct search **search_p, struct prepared **prepared_p)
{
	struct prepared *prepared = NULL;
	struct charge charge = {0};
	struct places *places;
	int r = charge_take(&charge, xs->session->account, ACCOUNT_LISTS,
			    xfer_list_bytes(dlist->entry_count));

	assert(search_p);
	if (r >= 0 && idmap_count(&xs->dlists) >= XFER_DLISTS_MAX)
		r = err_raise(ERR_LIMIT, "%u prepared lists (limit of a session)",
			      XFER_DLISTS_MAX);
	if (r >= 0) {
		prepared = mem_zalloc(sizeof(*prepared));
		r = prepared ? 0 : -ENOMEM;
	}
	if (r < 0) {
		charge_drop(&charge);
		dlist_free(dlist);
		return err_pass(r);
	}
	prepared->xs = xs;
	prepared->attach = attach;
	prepared->dlist = dlist;
	prepared->refs = 1;
	list_init(&prepared->sent);
	r = search_end(mem_steal(*search_p), dlist, &places);
	if (r >= 0) {
		places_unref(places); /* the list keeps them */
		prepared->id = id ? id : ++xs->session->next_id;
		r = idmap_put(&xs->dlists, prepared->id, prepared);
	}
	if (r < 0) {
		charge_drop(&charge);
		dlist_free(dlist);
		mem_free(prepared);
		return err_pass(r);
	}
	prepared->charge = charge_steal(&charge);
	list_push_back(&xs->prepared, &prepared->link);
	if (attach)
		attach_use(attach);
	*prepared_p = prepared;
	return 0;
}

struct prepared *prepared_find(struct xfer_session *xs, uint64_t id)
{
	return session_found(idmap_get(&xs->dlists, id), "dlist", id);
}

static void tell_free(struct prepared *prepared, struct remote *remote)
{
	struct xfer_session *xs = prepared->xs;
	struct idmap_cursor at;

	idmap_foreach(&xs->attaches, at) {
		struct attach *attach = at.value;
		struct cursor out;
		struct note *note;

		if (attach->remote != remote || sm_state(&attach->sm) != ATTACH_READY)
			continue;
		note = note_new(16, &out);
		if (!note) {
			err_clear(); /* it exists there until the session ends */
			return;
		}
		cursor_put_u8(&out, REQUEST_DLIST_FREE);
		cursor_put_u64(&out, prepared->dlist->gid);
		note->bytes = out.pos;
		note_post(note, attach);
		return;
	}
}

void prepared_unref(struct prepared *prepared)
{
	struct sent_list *sent;

	assert(prepared->refs > 0);
	if (--prepared->refs > 0)
		return;
	list_foreach_safe(sent, &prepared->sent, link) {
		if (sent->remote->peer->epoch == sent->peer_epoch &&
		    !prepared->xs->draining)
			tell_free(prepared, sent->remote);
		sent_free(sent);
	}
	if (idmap_get(&prepared->xs->dlists, prepared->id) == prepared)
		idmap_remove(&prepared->xs->dlists, prepared->id);
	charge_drop(&prepared->charge);
	dlist_free(prepared->dlist);
	list_remove(&prepared->link);
	if (prepared->attach)
		attach_unuse(prepared->attach);
	mem_free(prepared);
}

void prepared_release(struct prepared *prepared)
{
	assert(prepared->refs > 0);
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
	return err_raise(ERR_INVAL, "%s: must be a list of the %s side",
			 local->attach ? "local" : "remote",
			 local->attach ? "own" : "remote");
}

void lists_forget_remote(const struct remote *remote)
{
	struct sent_list *sent;

	list_foreach_safe(sent, &xfer_remote(remote)->sent, at_remote)
		sent_free(sent);
}

/* Any thread: its input does not change any more. */
static int part_new(const struct prepared *prepared, const struct attach *attach,
		    uint32_t begin, uint32_t n, struct list *parts)
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
	note->bytes = out.pos;
	list_push_back(parts, &note->link);
	return 0;
}

bool list_is_sent(const struct prepared *prepared, const struct attach *attach)
{
	const struct remote *remote = attach->remote;
	const struct sent_list *sent;

	list_foreach(sent, &prepared->sent, link) {
		if (sent->remote == remote && sent->peer_epoch == remote->peer->epoch)
			return true;
	}
	return false;
}

int list_parts(const struct prepared *prepared, const struct attach *attach,
	       struct list *parts)
{
	uint32_t n = prepared->dlist->entry_count;
	int r = 0;

	assert(attach->remote);
	for (uint32_t begin = 0; r >= 0 && begin < n; begin += PART_ENTRIES)
		r = part_new(prepared, attach, begin,
			     n - begin < PART_ENTRIES ? n - begin : PART_ENTRIES, parts);
	if (r < 0)
		parts_free(parts);
	return r < 0 ? err_pass(r) : 0;
}

void parts_free(struct list *parts)
{
	struct note *note;

	list_foreach_safe(note, parts, link) {
		list_remove(&note->link);
		note_free(note);
	}
}

/* All or nothing: a list with a missing part there could never be sent again. */
int list_send(struct prepared *prepared, struct attach *attach, struct list *parts)
{
	struct sent_list *sent;
	struct list *link;
	int r = 0;

	assert(attach->remote && prepared->refs > 0);
	if (list_is_sent(prepared, attach)) {
		parts_free(parts); /* another transfer was first */
		return 0;
	}
	if (list_empty(parts))
		r = list_parts(prepared, attach, parts);
	sent = r < 0 ? NULL : mem_zalloc(sizeof(*sent));
	if (!sent) {
		parts_free(parts);
		return err_pass(r < 0 ? r : -ENOMEM);
	}
	sent->remote = attach->remote;
	sent->peer_epoch = attach->remote->peer->epoch;
	sent->serial = ++prepared->xs->sendings;
	list_push_back(&prepared->sent, &sent->link);
	list_push_back(&xfer_remote(attach->remote)->sent, &sent->at_remote);
	while ((link = list_pop_front(parts))) {
		struct note *note = list_entry(link, struct note, link);

		note->dlist = prepared->id;
		note->serial = prepared->xs->sendings;
		note_post(note, attach);
	}
	return 0;
}
