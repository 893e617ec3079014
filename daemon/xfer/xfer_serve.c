/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Requests of other daemons' engines for sessions of this one.
 *
 * Every request names its session and presents the secret. The lists that it refers to
 * were sent before it, on the same line (shadows). A transfer resolves them against the
 * current exports of the session, so unregistered memory is refused. The plan is made
 * again here, from this side's own resolution.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/xfer/xfer_impl.h"

/*
 * A list that another daemon prepared. One of our session's memory ends with that
 * session; one of the initiator's own memory ends with the initiator, because it was sent
 * here once for all of our sessions.
 */
struct shadow {
	struct list link;
	struct list at_remote; /* in its remote's */
	struct remote *remote;
	uint64_t gid;
	uint64_t initiator; /* epoch of the remote's session */
	uint64_t target; /* epoch of our session; of an own list: the session it was sent
			    to */
	bool ours;	 /* it names our session's memory, else the initiator's */
	uint32_t total, got;
	struct dlist *coming; /* until complete */
	struct dlist *dlist;  /* complete */
	struct kept_plan *kept;
	unsigned int refs;
	bool gone;
	struct charge charge; /* to the peer */
};

/*
 * The last plan of a shadow, for a transfer that is posted again: an engine posts the
 * same one for every layer or step. Planning costs more than copying where rows are
 * short. Owned here; removed while a transfer uses it.
 */
struct kept_plan {
	struct list link; /* xfers->kept */
	struct shadow *mine;
	struct plan *plan;
	size_t bytes;
	bool write;
	uint64_t theirs_gid, serial[2];
	uint8_t *picks; /* the index lists as received */
	size_t picks_bytes;
	struct charge charge; /* on the peer that it was made for */
};

struct shadow_key {
	const struct remote *remote;
	uint64_t gid;
};

enum serve_state { SERVE_KEYS, SERVE_PLANNING, SERVE_LANDED };
static const struct sm_state serve_states[] = {
	[SERVE_KEYS] = {"keys", SM_TO(SERVE_PLANNING) | SM_TO(SERVE_LANDED)},
	[SERVE_PLANNING] = {"planning", SM_TO(SERVE_LANDED)},
	[SERVE_LANDED] = {"landed", 0},
};
static const struct sm_table serve_table = {
	.name = "serve", .states = serve_states, .count = ARRAY_LEN(serve_states)};

enum { FROM, TO };

/* one REQUEST_XFER */
struct serve {
	struct list link;
	struct inbound_owner inbound;
	struct xfers *xfers;
	struct remote *remote;
	struct xp_inbound *in; /* NULL once it is done */
	uint64_t initiator, target, digest, bytes;
	bool write;
	struct grant *grant;	 /* that allows it; NULL: by the session's own secret */
	struct shadow *lists[2]; /* FROM, TO; so are all pairs here */
	uint8_t *picks;		 /* the index lists as received: a copy for the helper */
	size_t picks_bytes;
	uint32_t *index[2]; /* made of them; NULL: all, or planned */
	uint64_t count[2];
	struct located at[2];
	uint64_t rows; /* of the lists: few are planned on the loop */
	bool check;    /* nothing moves, XP_CHECK */
	struct plan *plan;
	uint64_t plan_most; /* bytes: rest of the peer's account */
	bool plan_lacks;    /* more of them */
	struct offload_job job;
	struct sm sm;	     /* enum serve_state */
	struct err why;	     /* to be refused with */
	struct notif *notif; /* for its end, or NULL */
	/* to the peer: the request; its plan, which may be kept */
	struct charge charge, plan_charge;
	struct charge index_charge; /* while a helper has them expanded */
};

/* Which of the lists names memory of our session, and which the initiator's. */
static int mine_of(const struct serve *s)
{
	return s->write ? TO : FROM;
}

static int theirs_of(const struct serve *s)
{
	return s->write ? FROM : TO;
}

/* ---- shadows ---- */

static struct shadow *shadow_find(struct xfers *xfers, const struct remote *remote,
				  uint64_t gid)
{
	struct shadow_key key = {remote, gid};

	return strmap_get_bytes(&xfers->shadow_by_key, &key, sizeof(key));
}

static void xfer_serve_kept_free(struct xfers *xfers, struct kept_plan *kept)
{
	kept->mine->kept = NULL;
	list_remove(&kept->link);
	xfers->kept_bytes -= kept->bytes;
	charge_drop(&kept->charge);
	plan_free(kept->plan);
	mem_free(kept->picks);
	mem_free(kept);
}

static void shadow_unref(struct shadow *shadow)
{
	if (--shadow->refs > 0)
		return;
	charge_drop(&shadow->charge);
	dlist_free(shadow->dlist);
	dlist_free(shadow->coming);
	mem_free(shadow);
}

static void shadow_remove(struct xfers *xfers, struct shadow *shadow)
{
	struct shadow_key key = {shadow->remote, shadow->gid};

	strmap_remove_bytes(&xfers->shadow_by_key, &key, sizeof(key));
	list_remove(&shadow->link);
	list_remove(&shadow->at_remote);
	shadow->gone = true;
	if (shadow->kept)
		xfer_serve_kept_free(xfers, shadow->kept);
	if (shadow->dlist && shadow->dlist->places) {
		places_unref(shadow->dlist->places);
		shadow->dlist->places = NULL;
	}
	shadow_unref(shadow);
}

static int shadow_new(struct xfers *xfers, struct remote *remote, uint64_t gid,
		      uint32_t total, struct shadow **shadow_p)
{
	struct shadow_key key = {remote, gid};
	struct shadow *shadow;
	int r;

	if (total > DLIST_ENTRIES_MAX)
		return err_raise(ERR_LIMIT, "list of %u entries (limit %u)", total,
				 DLIST_ENTRIES_MAX);
	shadow = mem_zalloc(sizeof(*shadow));
	if (!shadow)
		return err_pass(-ENOMEM);
	r = charge_take(&shadow->charge, remote->account, ACCOUNT_LISTS,
			xfer_list_bytes(total));
	if (r < 0) {
		mem_free(shadow);
		return err_pass(r);
	}
	shadow->remote = remote;
	shadow->gid = gid;
	shadow->total = total;
	shadow->refs = 1;
	r = dlist_begin(total, gid, &shadow->coming);
	if (r >= 0)
		r = strmap_put_bytes(&xfers->shadow_by_key, &key, sizeof(key), shadow);
	if (r < 0) {
		charge_drop(&shadow->charge);
		dlist_free(shadow->coming);
		mem_free(shadow);
		return err_pass(r);
	}
	list_push_back(&xfers->shadows, &shadow->link);
	list_push_back(&xfer_remote(remote)->shadows, &shadow->at_remote);
	*shadow_p = shadow;
	return 0;
}

static int xfer_serve_take_entries(struct shadow *shadow, struct cursor *in,
				   uint32_t begin, uint32_t n)
{
	struct dlist_entry e;
	int r = 0;

	if (shadow->dlist || begin != shadow->got || n > shadow->total - shadow->got ||
	    cursor_left(in) / DLIST_ENTRY_BYTES < n)
		return err_raise(ERR_PROTO,
				 "part [%u, +%u) of a list does not follow %u of %u",
				 begin, n, shadow->got, shadow->total);
	for (uint32_t i = 0; r >= 0 && i < n; i++) {
		e.address = cursor_get_u64(in);
		e.bytes = cursor_get_u64(in);
		e.stride = cursor_get_u64(in);
		e.count = cursor_get_u64(in);
		r = dlist_put(shadow->coming, begin + i, &e);
	}
	if (r < 0)
		return err_pass(r);
	shadow->got += n;
	if (shadow->got == shadow->total)
		shadow->dlist = mem_steal(shadow->coming);
	return 0;
}

static int on_dlist(struct xfers *xfers, struct remote *remote, struct cursor *in)
{
	uint64_t gid = cursor_get_u64(in);
	uint8_t ours = cursor_get_u8(in);
	uint64_t initiator = cursor_get_u64(in), target = cursor_get_u64(in);
	const uint8_t *secret = cursor_get_bytes(in, 16);
	uint32_t total = cursor_get_u32(in), begin = cursor_get_u32(in);
	uint32_t n = cursor_get_u32(in);
	struct shadow *shadow = shadow_find(xfers, remote, gid);
	struct grant *grant;
	int r = cursor_check(in, "DLIST");

	if (r < 0 || !xfer_admit(xfers, remote, target, secret, &grant))
		return err_pass(r < 0 ? r : -err_errno(err_last()->code));
	if (shadow && begin == 0 && shadow->initiator == initiator) {
		shadow_remove(xfers,
			      shadow); /* sent again, because one of its parts was lost */
		shadow = NULL;
	}
	if (!shadow && begin == 0) {
		r = shadow_new(xfers, remote, gid, total, &shadow);
		if (r < 0)
			return err_pass(r);
		shadow->initiator = initiator;
		shadow->target = target;
		shadow->ours = ours != 0;
	}
	if (!shadow || shadow->target != target || shadow->total != total)
		return err_raise(ERR_PROTO, "a part of a list that does not exist");
	r = xfer_serve_take_entries(shadow, in, begin, n);
	if (r < 0)
		shadow_remove(xfers, shadow);
	return r < 0 ? err_pass(r) : 0;
}

static int on_dlist_free(struct xfers *xfers, struct remote *remote, struct cursor *in)
{
	struct shadow *shadow = shadow_find(xfers, remote, cursor_get_u64(in));

	if (shadow)
		shadow_remove(xfers, shadow);
	return cursor_check(in, "DLIST_FREE");
}

static int on_notif(struct xfers *xfers, struct remote *remote,
		    struct xp_inbound *inbound, struct cursor *in)
{
	uint64_t target = cursor_get_u64(in);
	const uint8_t *secret = cursor_get_bytes(in, 16);
	char from[POOL_NAME_MAX];
	const void *data;
	size_t len;
	struct session *session;
	struct notif *notif;
	struct grant *grant;
	bool whole;
	int r;

	cursor_get_str(in, from, sizeof(from));
	data = cursor_get_blob(in, XFER_NOTIF_MAX, &len);
	whole = cursor_left(in) == 0;
	r = cursor_check(in, "NOTIF");
	if (r < 0)
		return err_pass(r);
	session = xfer_admit(xfers, remote, target, secret, &grant);
	if (!session)
		return err_pass(-err_errno(err_last()->code));
	/* a frame with more bytes than the notification's would be kept uncharged */
	r = notif_new(remote, session, from, data, len, whole ? &inbound->owned : NULL,
		      &notif);
	if (r < 0)
		return err_pass(r);
	notif_queue(xfers, session, notif);
	return 0;
}

/* ---- transfers ---- */

/* The plan that was made from the same lists, indices and resolutions. */
static struct plan *kept_take(struct serve *s)
{
	struct kept_plan *kept = s->lists[mine_of(s)]->kept;
	const struct places *from = s->at[FROM].places, *to = s->at[TO].places;
	struct plan *plan;

	if (!kept || !from || !to || kept->write != s->write ||
	    kept->theirs_gid != s->lists[theirs_of(s)]->gid ||
	    kept->serial[FROM] != from->serial || kept->serial[TO] != to->serial ||
	    kept->picks_bytes != s->picks_bytes ||
	    memcmp(kept->picks, s->picks, s->picks_bytes) != 0)
		return NULL;
	plan = kept->plan;
	kept->plan = NULL;
	s->plan_charge = charge_steal(&kept->charge);
	xfer_serve_kept_free(s->xfers, kept);
	return plan;
}

/* Takes plan and indices from an ending transfer, as far as they fit in. */
static void kept_put(struct serve *s)
{
	struct xfers *xfers = s->xfers;
	struct shadow *mine = s->lists[mine_of(s)];
	size_t bytes = plan_memory(s->plan) + s->picks_bytes;
	struct kept_plan *kept;

	if (mine->gone || bytes > XFER_KEPT_BYTES_MAX / 2)
		return;
	kept = mem_zalloc(sizeof(*kept));
	if (!kept) {
		err_clear();
		return;
	}
	*kept = (struct kept_plan){
		.mine = mine,
		.bytes = bytes,
		.write = s->write,
		.theirs_gid = s->lists[theirs_of(s)]->gid,
		.serial = {s->at[FROM].places->serial, s->at[TO].places->serial},
		.picks_bytes = s->picks_bytes};
	kept->plan = mem_steal(s->plan);
	kept->picks = mem_steal(s->picks);
	kept->charge = charge_steal(&s->plan_charge);
	if (mine->kept)
		xfer_serve_kept_free(xfers, mine->kept);
	mine->kept = kept;
	list_init(&kept->link);
	list_push_back(&xfers->kept, &kept->link);
	xfers->kept_bytes += bytes;
	while (xfers->kept_bytes > XFER_KEPT_BYTES_MAX)
		xfer_serve_kept_free(xfers,
				     list_first(&xfers->kept, struct kept_plan, link));
}

static void serve_free(struct serve *s)
{
	list_remove(&s->link);
	if (s->notif)
		notif_drop(xfer_session_by_epoch(s->xfers, s->target), s->notif);
	if (s->plan && s->at[FROM].places && s->at[TO].places)
		kept_put(s);
	for (int i = FROM; i <= TO; i++) {
		locate_drop(&s->at[i]);
		if (s->lists[i])
			shadow_unref(s->lists[i]);
	}
	charge_drop(&s->charge);
	charge_drop(&s->plan_charge);
	charge_drop(&s->index_charge);
	plan_free(s->plan);
	grant_unref(s->grant);
	mem_free(s->picks);
	mem_free(s);
}

static void xfer_serve_on_served(struct inbound_owner *inbound, const struct err *err)
{
	struct serve *s = container_of(inbound, struct serve, inbound);
	struct session *session;

	if (!err) {
		metrics_add(&s->xfers->kvd->metrics,
			    s->write ? METRIC_XFER_IN_BYTES : METRIC_XFER_OUT_BYTES,
			    s->bytes);
		handshake_moved(s->remote, s->write ? METRIC_IN : METRIC_OUT, s->bytes);
		session = xfer_session_by_epoch(s->xfers, s->target);
		if (s->notif && session)
			notif_queue(s->xfers, session, mem_steal(s->notif));
	}
	if (sm_state(&s->sm) == SERVE_PLANNING) {
		s->in = NULL; /* lost while a helper plans: it is freed there */
		return;
	}
	serve_free(s);
}

static void xfer_serve_land(struct serve *s, const struct xp_sides *sides,
			    const struct err *why)
{
	sm_move(&s->sm, SERVE_LANDED);
	if (why)
		metrics_add(&s->xfers->kvd->metrics, METRIC_XFER_REFUSED, 1);
	s->remote->transport->ops->land(s->in, sides, why);
}

static int get_indices(struct serve *s)
{
	struct cursor in;
	int r = 0;

	cursor_read(&in, s->picks, s->picks_bytes);
	for (int i = FROM; i <= TO && r >= 0; i++) {
		r = dlist_index_get(&in, DLIST_DESCS_MAX, &s->index[i], &s->count[i]);
		if (r >= 0 && !s->index[i])
			s->count[i] = s->lists[i]->dlist->descs;
	}
	return r < 0 ? err_pass(r) : 0;
}

static int xfer_serve_work(struct serve *s)
{
	struct dlist_pick picks[2];
	int r = get_indices(s);

	for (int i = FROM; i <= TO && r >= 0; i++) {
		r = locate_run(&s->at[i]);
		picks[i] =
			(struct dlist_pick){s->lists[i]->dlist, locate_found(&s->at[i]),
					    s->index[i], s->count[i]};
	}
	if (r < 0 || s->check)
		return r < 0 ? err_pass(r) : 0;
	r = dlist_plan(&picks[FROM], &picks[TO], s->plan_most, &s->plan);
	s->plan_lacks = r < 0 && err_last()->code == ERR_LIMIT;
	return r < 0 ? err_pass(r) : 0;
}

/* Bytes of both lists in expanded form. */
static uint64_t index_bytes(const struct serve *s)
{
	struct cursor in;
	uint64_t bytes = 0;

	cursor_read(&in, s->picks, s->picks_bytes);
	for (int i = FROM; i <= TO; i++) {
		const uint8_t *raw;
		uint64_t rows = 0;
		size_t len;

		if (dlist_index_skip(&in, &raw, &len, &rows) >= 0)
			bytes += rows * sizeof(**s->index);
	}
	return bytes;
}

static void xfer_serve_plan_work(struct offload_job *job)
{
	struct serve *s = container_of(job, struct serve, job);

	job->result = xfer_serve_work(s);
	if (job->result < 0)
		err_take(&job->err);
	/* a small list may expand to 256 MiB: kept no longer than planning takes */
	for (int i = FROM; i <= TO; i++)
		mem_free(mem_steal(s->index[i]));
}

/* It lives until the other side has taken its bytes, which may never happen. */
static int charge_plan(struct serve *s)
{
	if (s->plan_charge.account) /* a kept one */
		return 0;
	return err_pass(charge_take(&s->plan_charge, s->remote->account, ACCOUNT_PLANS,
				    plan_memory(s->plan) + s->picks_bytes));
}

/* Of a list that names memory of several regions each must be allowed. */
static int check_grant(const struct serve *s)
{
	const struct places *p = s->at[mine_of(s)].places;
	int r = 0;

	for (uint32_t i = 0; s->grant && r >= 0 && i < p->buffer_count; i++)
		r = grant_allows(s->grant, p->regions[i]->id, s->write);
	return err_pass(r);
}

static void xfer_serve_plan_done(struct offload_job *job)
{
	struct serve *s = container_of(job, struct serve, job);
	const struct places *src, *dst;
	struct xp_sides sides = {0};

	if (!s->in) {
		serve_free(s);
		return;
	}
	if (s->plan_lacks)
		xfer_plan_lacks(s->remote->account, s->plan_most, &job->err);
	if (s->why.code == ERR_OK && job->result < 0)
		s->why = job->err;
	charge_drop(&s->index_charge);
	for (int i = FROM; i <= TO; i++)
		if (s->why.code == ERR_OK && locate_end(&s->at[i]) < 0)
			err_take(&s->why);
	if (s->why.code == ERR_OK && check_grant(s) < 0)
		err_take(&s->why);
	if (s->why.code == ERR_OK && s->plan && charge_plan(s) < 0)
		err_take(&s->why);
	if (s->why.code == ERR_OK && !s->check &&
	    plan_check(s->plan, s->digest, s->bytes, s->in->bytes) < 0)
		err_take(&s->why);
	if (s->why.code != ERR_OK) {
		struct err why = s->why;

		xfer_serve_land(s, NULL, &why);
		return;
	}
	src = s->at[FROM].places;
	dst = s->at[TO].places;
	if (!s->check) /* else it was read: it was, and is, exported */
		sides = (struct xp_sides){s->plan, src->buffers, dst->buffers,
					  src->buffer_count, dst->buffer_count};
	xfer_serve_land(s, &sides, NULL);
}

/* The location of both lists: known, found now, or (long ones) to be searched; 1:
 * their keys are not usable yet. */
static int xfer_serve_look(struct serve *s)
{
	struct session *session = xfer_session_by_epoch(s->xfers, s->target);
	struct remote_pool *pool = handshake_pool_by_id(s->remote, s->initiator);
	int r;

	if (!session)
		return err_raise(ERR_SESSION, "the session has ended");
	if (!pool || !pool->is_session)
		return err_raise(ERR_NOTFOUND,
				 "the initiator's session is not registered");
	if (pool->refused.code != ERR_OK)
		return err_reraise(&pool->refused);
	if (!pool->ready)
		return 1;
	for (int i = FROM; i <= TO; i++)
		s->at[i].dlist = s->lists[i]->dlist;
	r = locate_local(&s->at[mine_of(s)], session, s->remote->transport_index);
	if (r >= 0)
		r = locate_remote(&s->at[theirs_of(s)], pool);
	return r < 0 ? err_pass(r) : 0;
}

static void serve_go(struct serve *s)
{
	int r = xfer_serve_look(s);
	struct err why;

	if (r == 1)
		return; /* serve_on_change() checks again */
	if (r < 0) {
		err_take(&why);
		xfer_serve_land(s, NULL, &why);
		return;
	}
	s->check = s->in->kind == XP_CHECK;
	sm_move(&s->sm, SERVE_PLANNING);
	s->job = (struct offload_job){.work = xfer_serve_plan_work,
				      .done = xfer_serve_plan_done,
				      .principal = offload_peer(s->remote)};
	list_init(&s->job.link);
	s->plan = s->check ? NULL : kept_take(s);
	if (s->plan) {
		xfer_serve_plan_done(&s->job);
		return;
	}
	r = charge_take(&s->index_charge, s->remote->account, ACCOUNT_PLANS,
			index_bytes(s));
	if (r < 0) {
		s->job.result = r;
		err_take(&s->job.err);
		xfer_serve_plan_done(&s->job);
		return;
	}
	s->plan_most = account_room(s->remote->account);
	if (s->rows > XFER_PLAN_INLINE || s->at[FROM].search || s->at[TO].search) {
		offload_submit(s->xfers->kvd->offload, &s->job);
		return;
	}
	xfer_serve_plan_work(&s->job);
	xfer_serve_plan_done(&s->job);
}

static int find_lists(struct serve *s, uint64_t local_gid, uint64_t remote_gid)
{
	struct shadow *theirs = shadow_find(s->xfers, s->remote, local_gid);
	struct shadow *mine = shadow_find(s->xfers, s->remote, remote_gid);

	if (!theirs || !mine || !theirs->dlist || !mine->dlist || theirs->ours ||
	    !mine->ours || mine->target != s->target || theirs->initiator != s->initiator)
		return err_raise(ERR_NOTFOUND, "the lists of the transfer are unknown");
	s->lists[theirs_of(s)] = theirs;
	s->lists[mine_of(s)] = mine;
	theirs->refs++;
	mine->refs++;
	return 0;
}

static int take_picks(struct serve *s, struct cursor *in)
{
	const uint8_t *src = NULL, *dst = NULL;
	size_t src_len = 0, dst_len = 0;
	uint64_t src_rows = s->lists[FROM]->dlist->descs;
	uint64_t dst_rows = s->lists[TO]->dlist->descs;
	int r = dlist_index_skip(in, &src, &src_len, &src_rows);

	if (r >= 0)
		r = dlist_index_skip(in, &dst, &dst_len, &dst_rows);
	if (r < 0)
		return err_pass(r);
	if (src_rows != dst_rows)
		return err_raise(ERR_INVAL,
				 "%llu descriptors of the source for %llu of the "
				 "destination",
				 (unsigned long long)src_rows,
				 (unsigned long long)dst_rows);
	s->picks_bytes = src_len + dst_len;
	r = charge_more(&s->charge, s->picks_bytes);
	if (r < 0)
		return err_pass(r);
	s->picks = mem_dup(src, s->picks_bytes); /* one follows the other */
	if (!s->picks)
		return err_pass(-ENOMEM);
	s->rows = src_rows;
	return 0;
}

/* Its place is reserved before a byte moves: success includes its delivery. */
static int take_notif(struct serve *s, struct cursor *in)
{
	bool given = cursor_get_u8(in) != 0;
	char from[POOL_NAME_MAX];
	const void *data;
	size_t len;
	int r;

	cursor_get_str(in, from, sizeof(from));
	data = cursor_get_blob(in, XFER_NOTIF_MAX, &len);
	r = cursor_check(in, "XFER");
	if (r >= 0 && given)
		r = notif_new(s->remote, xfer_session_by_epoch(s->xfers, s->target), from,
			      data, len, NULL, &s->notif);
	return r < 0 ? err_pass(r) : 0;
}

static int xfer_serve_parse(struct serve *s, struct cursor *in)
{
	uint8_t kind = cursor_get_u8(in);
	const uint8_t *secret;
	uint64_t local_gid, remote_gid;
	int r;

	s->write = kind == XP_WRITE;
	s->initiator = cursor_get_u64(in);
	s->target = cursor_get_u64(in);
	secret = cursor_get_bytes(in, 16);
	local_gid = cursor_get_u64(in);
	remote_gid = cursor_get_u64(in);
	s->digest = cursor_get_u64(in);
	s->bytes = cursor_get_u64(in);
	r = cursor_check(in, "XFER");
	if (r < 0)
		return err_pass(r);
	if (kind > XP_READ || s->write != (s->in->kind == XP_WRITE))
		return err_raise(ERR_PROTO,
				 "XFER: kind of request does not match its header");
	if (!xfer_admit(s->xfers, s->remote, s->target, secret, &s->grant))
		return err_pass(-err_errno(err_last()->code));
	grant_ref(s->grant);
	r = find_lists(s, local_gid, remote_gid);
	if (r >= 0)
		r = take_picks(s, in);
	if (r < 0)
		return err_pass(r);
	return take_notif(s, in);
}

static int on_xfer(struct xfers *xfers, struct remote *remote, struct xp_inbound *in,
		   struct cursor *header)
{
	struct serve *s = mem_zalloc(sizeof(*s));
	int r;

	if (!s)
		return err_pass(-ENOMEM);
	s->xfers = xfers;
	s->remote = remote;
	s->in = in;
	sm_init(&s->sm, &serve_table, SERVE_KEYS);
	list_init(&s->link);
	list_init(&s->job.link);
	r = charge_take(&s->charge, remote->account, ACCOUNT_PLANS, sizeof(*s));
	if (r == 0)
		r = xfer_serve_parse(s, header);
	if (r < 0) {
		serve_free(s);
		return err_pass(r);
	}
	s->inbound.on_done = xfer_serve_on_served;
	in->owner = &s->inbound;
	list_push_back(&xfers->serving, &s->link);
	serve_go(s);
	return 0;
}

void xfers_on_request(struct remote *remote, struct xp_inbound *in, unsigned int kind,
		      struct cursor *header)
{
	struct xfers *xfers = xfers_of(remote->kvd);
	struct err why;
	int r;

	if (kind == REQUEST_XFER) {
		r = on_xfer(xfers, remote, in, header);
		if (r >= 0)
			return;
	} else if (in->bytes != 0 || in->kind != XP_WRITE) {
		r = err_raise(ERR_PROTO, "a request without payload has %llu bytes",
			      (unsigned long long)in->bytes);
	} else if (kind == REQUEST_DLIST) {
		r = on_dlist(xfers, remote, header);
	} else if (kind == REQUEST_DLIST_FREE) {
		r = on_dlist_free(xfers, remote, header);
	} else {
		r = on_notif(xfers, remote, in, header);
	}
	if (r >= 0) {
		remote->transport->ops->land(in, &(struct xp_sides){0}, NULL);
		return;
	}
	err_take(&why);
	metrics_add(&xfers->kvd->metrics, METRIC_XFER_REFUSED, 1);
	remote->transport->ops->land(in, NULL, &why);
}

/* ---- events ---- */

void serve_on_change(struct xfers *xfers, struct remote *remote)
{
	struct serve *s;

	list_foreach_safe(s, &xfers->serving, link) {
		if (s->remote == remote && sm_state(&s->sm) == SERVE_KEYS)
			serve_go(s);
	}
}

/* Stop serving it; it ends by xfer_serve_on_served(). */
static void serve_stop(struct serve *s, const struct err *why)
{
	if (sm_state(&s->sm) == SERVE_LANDED && s->in) {
		s->remote->transport->ops->revoke(s->in, why);
	} else if (sm_state(&s->sm) == SERVE_KEYS) {
		struct err e = *why;

		xfer_serve_land(s, NULL, &e);
	} else if (s->why.code == ERR_OK) {
		s->why = *why; /* xfer_serve_plan_done() refuses it */
	}
}

void serve_remote_down(struct xfers *xfers, struct remote *remote)
{
	struct shadow *shadow;

	list_foreach_safe(shadow, &xfer_remote(remote)->shadows, at_remote)
		shadow_remove(xfers, shadow);
}

void serve_session_end(struct xfers *xfers, struct session *session)
{
	struct shadow *shadow;
	struct serve *s;
	struct err why;

	assert(session->ending);
	err_set(&why, ERR_SESSION, "engine '%.40s' has ended", session->client);
	list_foreach_safe(s, &xfers->serving, link) {
		if (s->target == session->epoch)
			serve_stop(s, &why);
	}
	list_foreach_safe(shadow, &xfers->shadows, link) {
		if (shadow->target == session->epoch && (shadow->ours || !shadow->dlist))
			shadow_remove(xfers, shadow);
	}
}

static void drop_cached(struct shadow *shadow)
{
	struct places *places = shadow->dlist ? shadow->dlist->places : NULL;

	if (!places)
		return;
	shadow->dlist->places = NULL;
	places_unref(places);
}

void serve_region_going(struct xfers *xfers, struct region *region)
{
	struct shadow *shadow;
	struct serve *s;
	struct err why;

	err_set(&why, ERR_REVOKED, "the memory was unregistered by its engine");
	list_foreach_safe(s, &xfers->serving, link) {
		const struct places *p = s->at[mine_of(s)].places;

		for (uint32_t i = 0; p && i < p->buffer_count; i++) {
			if (p->regions[i] == region) {
				serve_stop(s, &why);
				break;
			}
		}
	}
	list_foreach(shadow, &xfers->shadows, link) {
		if (shadow->ours && shadow->target == region->session->epoch)
			drop_cached(shadow);
	}
}

void serve_pool_going(struct xfers *xfers, struct remote_pool *pool)
{
	assert(pool->remote);
	/* not replaced: that session has ended */
	bool ended = pool->is_session && !handshake_pool_by_id(pool->remote, pool->id);
	struct shadow *shadow;

	list_foreach_safe(shadow, &xfer_remote(pool->remote)->shadows, at_remote) {
		if (shadow->dlist && shadow->dlist->places &&
		    shadow->dlist->places->pool == pool)
			drop_cached(shadow);
		if (ended && shadow->initiator == pool->session)
			shadow_remove(xfers, shadow);
	}
}
