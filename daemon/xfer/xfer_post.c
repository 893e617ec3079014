/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Local engines: prepared lists and transfers.
 *
 * A transfer is checked (indices, lengths, ranges on both sides), planned, and posted
 * after the lists that it names: everything of one attach uses one flow, and requests of
 * a peer arrive in the order of their posts, so the other daemon has the lists when the
 * transfer arrives. An ended transfer can be posted again.
 */
#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/xfer/xfer_op.h"

static const struct sm_state xfer_states[] = {
	[XFER_PLANNING] = {"planning",
			   SM_TO(XFER_SHARING) | SM_TO(XFER_POSTED) | SM_TO(XFER_ENDED)},
	[XFER_SHARING] = {"sharing",
			  SM_TO(XFER_SHARING) | SM_TO(XFER_POSTED) | SM_TO(XFER_ENDED)},
	[XFER_POSTED] = {"posted", SM_TO(XFER_ENDED)},
	[XFER_ENDED] = {"ended", SM_TO(XFER_PLANNING)},
};
static const struct sm_table xfer_table = {
	.name = "xfer", .states = xfer_states, .count = ARRAY_LEN(xfer_states)};

/* ---- transfers ---- */

static void set_status(struct transfer *t)
{
	struct status_page *page = t->xs->session->status;
	unsigned int state = KVD_TRANSFERRING;

	if (sm_state(&t->sm) == XFER_ENDED)
		state = t->failed ? KVD_FAILED : KVD_SUCCESS;
	status_slot_progress(page, t->slot, t->bytes, t->plan ? t->plan->bytes : 0);
	status_slot_set(page, t->slot, state,
			t->failed && sm_state(&t->sm) != XFER_ENDED ? KVD_FLAG_ABORTING
								    : 0,
			t->err.code);
}

static void drop_places(struct transfer *t)
{
	for (int i = LOCAL; i <= REMOTE; i++) {
		locate_drop(&t->at[i]);
		parts_free(&t->parts[i]);
	}
}

static void drop_plan(struct transfer *t)
{
	charge_drop(&t->plan_charge);
	plan_free(t->plan);
	mem_free(t->picks);
	t->plan = NULL;
	t->picks = NULL;
}

void transfer_free(struct transfer *t)
{
	struct xfer_session *xs = t->xs;

	assert(sm_state(&t->sm) == XFER_ENDED);
	idmap_remove(&xs->transfers, t->id);
	status_slot_release(xs->session->status, t->slot);
	for (int i = LOCAL; i <= REMOTE; i++) {
		prepared_unref(t->lists[i]);
		mem_free(t->index[i]);
	}
	drop_plan(t);
	charge_drop(&t->charge);
	mem_free(t->header);
	mem_free(t->notif);
	mem_free(t);
	if (xs->draining)
		xfer_session_try_free(xs);
}

static void xfer_post_count_end(const struct transfer *t)
{
	enum metric_xfer_end end = !t->failed			 ? METRIC_XFER_SUCCESS
				   : t->err.code == ERR_CANCELED ? METRIC_XFER_CANCELED
								 : METRIC_XFER_FAILED;

	metrics_add(&t->xs->xfers->kvd->metrics, METRIC_AT(XFERS, t->kind, end), 1);
}

static void xfer_post_end(struct transfer *t)
{
	sm_move(&t->sm, XFER_ENDED);
	t->xs->xfers->live--;
	drop_places(t);
	xfer_post_count_end(t);
	set_status(t);
	if (t->release)
		transfer_free(t);
}

static void xfer_post_fail(struct transfer *t, const struct err *why)
{
	if (!t->failed) {
		t->failed = true;
		t->err = *why;
	}
}

void transfer_done(struct transfer *t, int result, const struct err *why)
{
	if (result < 0) {
		xfer_post_fail(t, why);
	} else if (!t->failed) {
		t->bytes = t->plan->bytes;
		metrics_add(&t->xs->xfers->kvd->metrics,
			    t->kind == XP_WRITE ? METRIC_XFER_OUT_BYTES
						: METRIC_XFER_IN_BYTES,
			    t->bytes);
		if (t->attach->remote)
			handshake_moved(t->attach->remote,
					t->kind == XP_WRITE ? METRIC_OUT : METRIC_IN,
					t->bytes);
		/* no request carried it */
		if (t->has_notif && (t->kind == XP_READ || t->files) &&
		    notif_post(t->attach, t->notif, t->notif_len) < 0)
			err_take(&t->err), t->failed = true;
	}
	xfer_post_end(t);
}

static void xfer_post_on_done(struct sched_op *op)
{
	transfer_done(op->owner, op->xp.result, &op->xp.err);
}

static void pick(const struct transfer *t, struct dlist_pick *src, struct dlist_pick *dst)
{
	struct dlist_pick picks[2];

	for (int i = LOCAL; i <= REMOTE; i++)
		picks[i] =
			(struct dlist_pick){t->lists[i]->dlist, locate_found(&t->at[i]),
					    t->index[i], t->count};
	*src = picks[t->kind == XP_WRITE ? LOCAL : REMOTE];
	*dst = picks[t->kind == XP_WRITE ? REMOTE : LOCAL];
}

/* The index lists in wire form: with the plan, and with its lifetime. */
static int make_picks(struct transfer *t, const struct dlist_pick *src,
		      const struct dlist_pick *dst)
{
	struct cursor out;

	t->picks_bytes = dlist_index_bytes(src) + dlist_index_bytes(dst);
	t->picks = mem_zalloc(t->picks_bytes);
	if (!t->picks)
		return err_pass(-ENOMEM);
	cursor_write(&out, t->picks, t->picks_bytes);
	dlist_index_put(&out, src);
	dlist_index_put(&out, dst);
	return 0;
}

static int xfer_post_make_header(struct transfer *t)
{
	bool carries = t->has_notif && t->kind == XP_WRITE;
	struct session *session = t->xs->session;
	struct cursor out;
	size_t size;

	size = 128 + sizeof(session->client) + t->picks_bytes +
	       (carries ? t->notif_len : 0);
	if (size > XP_HEADER_MAX)
		return err_raise(ERR_TOOBIG,
				 "index lists and notification take %zu bytes (limit "
				 "%u); use several transfers",
				 size, XP_HEADER_MAX);
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
	cursor_put_u64(&out, t->lists[LOCAL]->dlist->gid);
	cursor_put_u64(&out, t->lists[REMOTE]->dlist->gid);
	cursor_put_u64(&out, t->plan->digest);
	cursor_put_u64(&out, t->plan->bytes);
	cursor_put_bytes(&out, t->picks, t->picks_bytes);
	cursor_put_u8(&out, carries);
	cursor_put_str(&out, session->client);
	cursor_put_blob(&out, t->notif, carries ? t->notif_len : 0);
	t->op.xp.header = t->header;
	t->op.xp.header_len = out.pos;
	return 0;
}

static int xfer_post_submit(struct transfer *t)
{
	struct xp_sides *sides = &t->op.xp.sides;
	bool writes = t->kind == XP_WRITE;
	const struct places *src = t->at[writes ? LOCAL : REMOTE].places;
	const struct places *dst = t->at[writes ? REMOTE : LOCAL].places;
	int r = 0;

	for (int i = LOCAL; i <= REMOTE && r >= 0; i++)
		r = list_send(t->lists[i], t->attach, &t->parts[i]);
	if (r >= 0)
		r = xfer_post_make_header(t);
	if (r < 0)
		return err_pass(r);
	*sides = (struct xp_sides){t->plan, src->buffers, dst->buffers, src->buffer_count,
				   dst->buffer_count};
	t->op.xp.kind = t->kind;
	t->op.owner = t;
	t->op.on_done = xfer_post_on_done;
	sm_move(&t->sm, XFER_POSTED);
	sched_submit(&t->attach->flow, &t->op);
	if (t->has_notif && writes)
		metrics_add(&t->xs->xfers->kvd->metrics,
			    METRIC_AT(NOTIFS, METRIC_OUT, METRIC_NOTIF_PASSED), 1);
	return 0;
}

/* Planned: post it when the other side knows our regions. */
static void go(struct transfer *t)
{
	struct err why;
	int r = t->failed ? -1 : t->files ? 0 : share_update(t->xs, t->attach->share);

	if (r == 1) {
		sm_move(&t->sm, XFER_SHARING);
		list_push_back(&t->attach->waiting, &t->link);
		return;
	}
	if (r == 0)
		r = t->files ? xfer_file_post(t) : xfer_post_submit(t);
	if (r < 0) {
		if (!t->failed) {
			err_take(&why);
			xfer_post_fail(t, &why);
		}
		xfer_post_end(t);
	}
}

void transfers_go(struct attach *attach)
{
	struct list ready;
	struct list *at;

	assert(!attach->share || attach->share->acked <= attach->share->sent);
	if (!attach->share || attach->share->sent != attach->share->acked)
		return;
	list_init(&ready);
	while ((at = list_pop_front(&attach->waiting)))
		list_push_back(&ready, at);
	while ((at = list_pop_front(&ready)))
		go(list_entry(at, struct transfer, link));
}

static int xfer_post_work(struct transfer *t)
{
	struct dlist_pick src, dst;
	int r = 0;

	for (int i = LOCAL; i <= REMOTE && r >= 0; i++)
		r = locate_run(&t->at[i]);
	if (r < 0)
		return err_pass(r);
	pick(t, &src, &dst);
	r = dlist_plan(&src, &dst, t->plan_most, &t->plan);
	t->plan_lacks = r < 0 && err_last()->code == ERR_LIMIT;
	if (r >= 0 && !t->files)
		r = make_picks(t, &src, &dst);
	for (int i = LOCAL; i <= REMOTE && r >= 0; i++)
		if (t->parts_wanted[i])
			r = list_parts(t->lists[i], t->attach, &t->parts[i]);
	return r < 0 ? err_pass(r) : 0;
}

static void xfer_post_plan_work(struct offload_job *job)
{
	struct transfer *t = container_of(job, struct transfer, job);

	job->result = xfer_post_work(t);
	if (job->result < 0)
		err_take(&job->err);
}

static void xfer_post_plan_done(struct offload_job *job)
{
	struct transfer *t = container_of(job, struct transfer, job);

	for (int i = LOCAL; i <= REMOTE && job->result >= 0; i++) {
		job->result = locate_end(&t->at[i]);
		if (job->result < 0)
			err_take(&job->err);
		else
			t->plan_of[i] = t->at[i].places->serial;
	}
	if (job->result >= 0) {
		job->result =
			charge_take(&t->plan_charge, t->xs->session->account,
				    ACCOUNT_PLANS, plan_memory(t->plan) + t->picks_bytes);
		if (job->result < 0)
			err_take(&job->err);
	}
	if (t->plan_lacks)
		xfer_plan_lacks(t->xs->session->account, t->plan_most, &job->err);
	if (job->result < 0) {
		xfer_post_fail(t, &job->err);
		drop_plan(t);
	}
	go(t);
}

/* It is posted again, and the memory of both sides is unchanged. */
static bool plan_still_holds(const struct transfer *t)
{
	bool holds = t->plan != NULL;

	for (int i = LOCAL; i <= REMOTE; i++)
		holds = holds && t->at[i].places && !t->parts_wanted[i] &&
			t->plan_of[i] == t->at[i].places->serial;
	return holds;
}

/* The location of the rows: known, found now, or (long lists) to be searched. */
static int xfer_post_look(struct transfer *t)
{
	struct attach *attach = t->attach;
	int r;

	if (sm_state(&attach->sm) != ATTACH_READY || !attach->pool)
		return sm_state(&attach->sm) == ATTACH_LOST
			       ? err_reraise(&attach->why)
			       : err_raise(ERR_PEER,
					   "the remote session is currently not "
					   "reachable");
	for (int i = LOCAL; i <= REMOTE; i++)
		t->at[i].dlist = t->lists[i]->dlist;
	if (t->files)
		return err_pass(xfer_file_look(t));
	r = locate_local(&t->at[LOCAL], t->xs->session, attach->remote->transport_index);
	if (r >= 0)
		r = locate_remote(&t->at[REMOTE], attach->pool);
	if (r < 0)
		drop_places(t);
	return r < 0 ? err_pass(r) : 0;
}

/* Each post has its own generation: values of the last one can never be taken for
 * those of this one. */
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
	assert(sm_state(&t->sm) == XFER_ENDED && why->code != ERR_OK);
	renew(t);
	xfer_post_fail(t, why);
	xfer_post_count_end(t);
	set_status(t);
}

int transfer_post(struct transfer *t)
{
	bool late = t->count > XFER_PLAN_INLINE;
	int r;

	assert(sm_state(&t->sm) == XFER_ENDED);
	if (t->xs->xfers->kvd->draining)
		return err_raise(ERR_DRAIN, "no new transfers: the daemon is draining");
	r = xfer_post_look(t);
	if (r < 0)
		return err_pass(r);
	for (int i = LOCAL; i <= REMOTE; i++) {
		t->parts_wanted[i] = !t->files &&
				     t->lists[i]->dlist->entry_count > SEARCH_INLINE &&
				     !list_is_sent(t->lists[i], t->attach);
		late = late || t->parts_wanted[i] || t->at[i].search;
	}
	renew(t);
	sm_move(&t->sm, XFER_PLANNING);
	t->xs->xfers->live++;
	metrics_add(&t->xs->xfers->kvd->metrics, METRIC_XFERS_STARTED, 1);
	t->job = (struct offload_job){.work = xfer_post_plan_work,
				      .done = xfer_post_plan_done,
				      .principal = session_principal(t->xs->session)};
	list_init(&t->job.link);
	t->plan_most = account_room(t->xs->session->account);
	t->plan_lacks = false;
	set_status(t);
	if (plan_still_holds(t)) {
		go(t);
		return 0;
	}
	drop_plan(t);
	if (late) {
		offload_submit(t->xs->xfers->kvd->offload, &t->job);
		return 0;
	}
	xfer_post_plan_work(&t->job);
	xfer_post_plan_done(&t->job);
	return 0;
}

static int set_notif(struct transfer *t, uint8_t **notif_p, size_t len)
{
	int r = len > t->notif_len ? charge_more(&t->charge, len - t->notif_len) : 0;

	if (r < 0)
		return err_pass(r);
	if (len < t->notif_len)
		charge_less(&t->charge, t->notif_len - len);
	mem_free(t->notif);
	t->notif = mem_steal(*notif_p);
	t->notif_len = len;
	t->has_notif = true;
	return 0;
}

int transfer_again(struct transfer *t, uint8_t *notif, size_t len)
{
	int r = notif ? set_notif(t, &notif, len) : 0;

	mem_free(notif); /* not taken: the post is refused */
	return r < 0 ? err_pass(r) : err_pass(transfer_post(t));
}

static void transfer_take(struct transfer *t, struct xfer_op *op)
{
	t->attach = op->sides[REMOTE]->attach;
	t->kind = op->moves;
	t->count = op->count[LOCAL];
	t->files = dlist_of_files(op->sides[LOCAL]->dlist) ||
		   dlist_of_files(op->sides[REMOTE]->dlist);
	for (int i = LOCAL; i <= REMOTE; i++) {
		t->lists[i] = mem_steal(op->sides[i]);
		t->index[i] = mem_steal(op->index[i]);
	}
	t->has_notif = op->has_notif;
	t->notif = mem_steal(op->notif);
	t->notif_len = op->notif_len;
}

int transfer_new(struct xfer_op *op, struct transfer **transfer_p)
{
	struct xfer_session *xs = op->xs;
	uint64_t bytes = sizeof(struct transfer) + op->notif_len;
	struct charge charge = {0};
	struct transfer *t;
	int r;

	assert(op->id && op->sides[LOCAL] && op->sides[REMOTE]);
	for (int i = LOCAL; i <= REMOTE; i++)
		bytes += op->index[i] ? sizeof(*op->index[i]) * op->count[i] : 0;
	r = charge_take(&charge, xs->session->account, ACCOUNT_LISTS, bytes);
	t = r < 0 ? NULL : mem_zalloc(sizeof(*t));
	if (!t) {
		charge_drop(&charge);
		return err_pass(r < 0 ? r : -ENOMEM);
	}
	t->xs = xs;
	sm_init(&t->sm, &xfer_table, XFER_ENDED);
	list_init(&t->link);
	list_init(&t->parts[LOCAL]);
	list_init(&t->parts[REMOTE]);
	t->fresh = op->posts; /* the slot's first generation belongs to the first post */
	t->id = op->id;
	t->slot = op->slot;
	t->slot_gen = op->gen;
	r = idmap_put(&xs->transfers, t->id, t);
	if (r < 0) {
		charge_drop(&charge);
		mem_free(t);
		return err_pass(r);
	}
	t->charge = charge_steal(&charge);
	transfer_take(t, op);
	*transfer_p = t;
	return 0;
}

struct transfer *transfer_find(struct xfer_session *xs, uint64_t id)
{
	struct transfer *t = idmap_get(&xs->transfers, id);

	return session_found(t && !t->release ? t : NULL, "transfer", id);
}

void transfer_cancel(struct transfer *t, const struct err *why)
{
	assert(why->code != ERR_OK);
	if (sm_state(&t->sm) == XFER_ENDED || t->failed)
		return;
	xfer_post_fail(t, why);
	set_status(t);
	if (sm_state(&t->sm) == XFER_POSTED && t->files) {
		xfer_file_cancel(t);
	} else if (sm_state(&t->sm) == XFER_POSTED) {
		sched_cancel(&t->op, why);
	} else if (sm_state(&t->sm) == XFER_SHARING ||
		   offload_cancel(t->xs->xfers->kvd->offload, &t->job)) {
		list_remove(&t->link);
		xfer_post_end(t);
	} /* else xfer_post_plan_done() ends it */
}

void transfer_cancel_asked(struct transfer *t)
{
	struct err why;

	err_set(&why, ERR_CANCELED, "canceled by its engine '%.40s'",
		t->xs->session->client);
	transfer_cancel(t, &why);
}

void transfer_release(struct transfer *t)
{
	assert(!t->release);
	t->release = true;
	if (sm_state(&t->sm) == XFER_ENDED)
		transfer_free(t);
	else
		transfer_cancel_asked(t); /* and it frees itself */
}
