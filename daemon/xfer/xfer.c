/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sessions of the transfer layer: their attachments to each other, and the regions that
 * each daemon knows.
 *
 * An attach is a session's right to another daemon's session: it presented the secret.
 * Both sides then register their session's regions with the other (xfer_share.c).
 */
#include "daemon/xfer/xfer.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/xfer/commands_xfer.h"
#include "daemon/xfer/xfer_impl.h"
#include "proto/base64.h"

static const struct sm_state attach_states[] = {
	[ATTACH_REACHING] = {"reaching", SM_TO(ATTACH_ASKED) | SM_TO(ATTACH_LOST)},
	[ATTACH_ASKED] = {"asked", SM_TO(ATTACH_READY) | SM_TO(ATTACH_LOST)},
	[ATTACH_READY] = {"ready", SM_TO(ATTACH_LOST)},
	[ATTACH_LOST] = {"lost", 0},
};
static const struct sm_table attach_table = {
	.name = "attach", .states = attach_states, .count = ARRAY_LEN(attach_states)};

static int xfers_new(struct kvd *kvd, void **part_p)
{
	struct xfers *xfers = mem_zalloc(sizeof(*xfers));

	if (!xfers)
		return err_pass(-ENOMEM);
	xfers->kvd = kvd;
	list_init(&xfers->sessions);
	list_init(&xfers->shadows);
	list_init(&xfers->serving);
	list_init(&xfers->kept);
	strmap_init(&xfers->shadow_by_key);
	idmap_init(&xfers->attach_by_cookie);
	*part_p = xfers;
	return 0;
}

static void xfers_free(void *part)
{
	struct xfers *xfers = part;

	assert(list_empty(&xfers->sessions) && list_empty(&xfers->serving));
	strmap_fini(&xfers->shadow_by_key);
	idmap_fini(&xfers->attach_by_cookie);
	mem_free(xfers);
}

unsigned int xfers_live(const struct xfers *xfers)
{
	return xfers->live;
}

/* ---- sessions ---- */

struct xfer_session *xfer_session_of(struct session *session)
{
	struct xfer_session *xs = session->part[MODULE_XFER];

	assert(!session->ending);
	if (xs)
		return xs;
	xs = mem_zalloc(sizeof(*xs));
	if (!xs)
		return NULL;
	xs->xfers = xfers_of(session->kvd);
	xs->session = session;
	idmap_init(&xs->attaches);
	idmap_init(&xs->dlists);
	idmap_init(&xs->transfers);
	list_init(&xs->prepared);
	list_init(&xs->shares);
	list_init(&xs->notifs);
	list_init(&xs->grants);
	list_push_back(&xs->xfers->sessions, &xs->link);
	session->part[MODULE_XFER] = xs;
	return xs;
}

struct session *xfer_session_by_epoch(struct xfers *xfers, uint64_t epoch)
{
	struct session *session;

	list_foreach(session, &xfers->kvd->sessions, link) {
		if (session->epoch == epoch && session->greeted && !session->ending)
			return session;
	}
	return NULL;
}

void xfer_plan_lacks(struct account *account, uint64_t most, struct err *err_p)
{
	if (most >= PLAN_RUNS_MAX * (sizeof(struct plan_run) + sizeof(uint64_t)))
		return; /* it was too large for any */
	/* not checked against the account: others may have freed their memory
	 * meanwhile */
	account_refuse(account, ACCOUNT_PLANS, most + 1);
	err_take(err_p);
}

/* The existence of a session is only revealed with its secret. */
struct session *xfer_admit(struct xfers *xfers, const struct remote *remote,
			   uint64_t epoch, const uint8_t secret[16],
			   struct grant **grant_p)
{
	struct session *session = xfer_session_by_epoch(xfers, epoch);
	struct xfer_session *xs;

	*grant_p = NULL;
	if (!session || !secret) {
		err_raise(ERR_AUTH, "no session %llu with this secret",
			  (unsigned long long)epoch);
		return NULL;
	}
	xs = xfer_session_of(session);
	return xs && grant_check(xs, remote->peer, secret, grant_p) >= 0 ? session : NULL;
}

/* ---- notifications for our engines ---- */

size_t notif_answer_bytes(const char *from, size_t len)
{
	return BASE64_CHARS(len) + 6 * strlen(from) +
	       sizeof("{\"from\":\"\",\"data\":\"\"},");
}

/* Maximum bytes of an answer: requests are served while half of client_queue is in use.
 */
static size_t notif_answer_max(const struct xfers *xfers)
{
	return xfers->kvd->config->client_queue_bytes / 2 - NOTIF_ANSWER_FRAME;
}

int notif_new(const struct remote *remote, struct session *session, const char *from,
	      const void *data, size_t len, uint8_t **owned_p, struct notif **notif_p)
{
	const bool take = owned_p && *owned_p && len > NOTIF_COPY_MAX;
	struct xfer_session *xs = xfer_session_of(session);
	struct xfers *xfers = xs ? xs->xfers : NULL;
	struct notif *notif;

	if (!xs)
		return err_pass(-ENOMEM);
	if (notif_answer_bytes(from, len) > notif_answer_max(xfers)) {
		metrics_add(&xfers->kvd->metrics,
			    METRIC_AT(NOTIFS, METRIC_IN, METRIC_NOTIF_DROPPED), 1);
		return err_raise(ERR_LIMIT,
				 "notification of %zu bytes exceeds the reply that "
				 "would deliver it (client_queue)",
				 len);
	}
	if (xs->notif_bytes + len + sizeof(*notif) > XFER_NOTIFS_BYTES_MAX) {
		metrics_add(&xfers->kvd->metrics,
			    METRIC_AT(NOTIFS, METRIC_IN, METRIC_NOTIF_DROPPED), 1);
		return err_raise(
			ERR_LIMIT,
			"session '%.40s' has %zu bytes of unread notifications (limit "
			"%u)",
			session->client, xs->notif_bytes, XFER_NOTIFS_BYTES_MAX);
	}
	notif = mem_zalloc(sizeof(*notif) + (take ? 0 : len));
	if (!notif)
		return err_pass(-ENOMEM);
	if (charge_take(&notif->charge, remote->account, ACCOUNT_NOTIFS,
			sizeof(*notif) + len) < 0) {
		metrics_add(&xfers->kvd->metrics,
			    METRIC_AT(NOTIFS, METRIC_IN, METRIC_NOTIF_DROPPED), 1);
		mem_free(notif);
		return err_pass(-err_errno(err_last()->code));
	}
	snprintf(notif->from, sizeof(notif->from), "%s", from);
	notif->len = len;
	notif->data = take ? data : notif->bytes;
	if (take)
		notif->owned = mem_steal(*owned_p);
	else
		memcpy(notif->bytes, data, len);
	xs->notif_bytes += len + sizeof(*notif);
	*notif_p = notif;
	return 0;
}

void notif_queue(struct xfers *xfers, struct session *session, struct notif *notif)
{
	struct xfer_session *xs = session->part[MODULE_XFER];

	assert(xs && session->greeted);
	list_push_back(&xs->notifs, &notif->link);
	status_page_notified(session->status);
	metrics_add(&xfers->kvd->metrics,
		    METRIC_AT(NOTIFS, METRIC_IN, METRIC_NOTIF_PASSED), 1);
}

void notif_drop(struct session *session, struct notif *notif)
{
	if (session)
		((struct xfer_session *)session->part[MODULE_XFER])->notif_bytes -=
			notif->len + sizeof(*notif);
	notif_free(notif);
}

void notif_free(struct notif *notif)
{
	charge_drop(&notif->charge);
	/* whatever its length: the last of many returns the memory of all */
	mem_free_large(notif->owned, MEM_LARGE_BYTES);
	mem_free(notif);
}

/* ---- attaching ---- */

/* It is only for queries of its engine: the peer is not dialled again for it. */
static void attach_let_go(struct attach *attach)
{
	struct remote *remote = attach->remote;

	if (!remote || attach->users > 0 || sm_state(&attach->sm) != ATTACH_LOST)
		return;
	list_remove(&attach->at_remote);
	attach->remote = NULL;
	handshake_release(remote);
}

void attach_unuse(struct attach *attach)
{
	assert(attach->users > 0);
	attach->users--;
	attach_let_go(attach);
}

static void attach_answer(struct attach *attach, const struct err *why, uint64_t id)
{
	if (!attach->waiter.on_end)
		return;
	loop_timer_stop(&attach->timer);
	xfer_waiter_end(&attach->waiter, why, id);
}

/* An earlier one to the same session; NULL: none. */
static const struct attach *attach_earlier(const struct attach *attach)
{
	struct idmap_cursor at;

	idmap_foreach(&attach->xs->attaches, at) { /* at most 1024: XFER_ATTACHES_MAX */
		const struct attach *other = at.value;

		if (other != attach && other->remote == attach->remote &&
		    other->epoch == attach->epoch && other->pool == attach->pool &&
		    sm_state(&other->sm) == ATTACH_READY && !other->waiter.on_end &&
		    memcmp(other->secret, attach->secret, sizeof(other->secret)) == 0)
			return other;
	}
	return NULL;
}

static void attach_free(struct attach *attach)
{
	struct xfer_session *xs = attach->xs;

	assert(list_empty(&attach->waiting));
	loop_timer_stop(&attach->timer);
	idmap_remove(&xs->attaches, attach->id);
	idmap_remove(&xs->xfers->attach_by_cookie, attach->cookie);
	list_remove(&attach->at_remote);
	if (attach->pool)
		handshake_pool_unuse(attach->pool);
	if (attach->remote)
		handshake_release(attach->remote);
	charge_drop(&attach->charge);
	explicit_bzero(attach->secret, sizeof(attach->secret));
	mem_free(attach);
}

/* It will never be usable (again): its waiters get the reason. */
static void attach_lost(struct attach *attach, const struct err *why)
{
	struct err e = *why;
	struct idmap_cursor at;
	struct xfer_session *xs = attach->xs;

	if (sm_state(&attach->sm) == ATTACH_LOST)
		return;
	sm_move(&attach->sm, ATTACH_LOST);
	attach->why = e;
	attach->share = NULL;
	if (attach->pool)
		handshake_pool_unuse(attach->pool);
	attach->pool = NULL;
	idmap_foreach(&xs->transfers, at) {
		struct transfer *transfer = at.value;

		if (transfer->attach == attach)
			transfer_cancel(transfer, &e);
	}
	if (attach->waiter.on_end) {
		attach_answer(attach, &e, 0);
		attach_free(attach); /* its number was never used */
	} else {
		attach_let_go(attach);
	}
}

static int xfer_ask(struct attach *attach)
{
	struct wire_attach msg = {.cookie = attach->cookie, .session = attach->epoch};
	int r;

	memcpy(msg.secret, attach->secret, sizeof(msg.secret));
	r = share_open(attach->xs, attach->remote, NULL, &attach->share);
	if (r < 0)
		return err_pass(r);
	r = share_update(attach->xs, attach->share);
	if (r < 0)
		return err_pass(r);
	sm_move(&attach->sm, ATTACH_ASKED);
	return handshake_send_attach(attach->remote, &msg);
}

static void attach_look(struct attach *attach)
{
	struct remote *remote = attach->remote;
	struct err why;

	if (sm_state(&attach->sm) == ATTACH_REACHING &&
	    (sm_state(&remote->peer->sm) == PEER_UP || remote->refused)) {
		int r = 0;

		if (remote->why.code != ERR_OK)
			r = err_reraise(&remote->why);
		else if (remote->ready)
			r = xfer_ask(attach);
		if (r < 0) {
			err_take(&why);
			attach_lost(attach, &why);
		}
		return;
	}
	if (sm_state(&attach->sm) != ATTACH_READY || !attach->waiter.on_end ||
	    !attach->pool)
		return;
	if (attach->pool->refused.code != ERR_OK) {
		why = attach->pool->refused;
		attach_lost(attach, &why);
	} else if (attach->pool->ready) {
		/* the owner has sent its current regions before its answer; a second
		 * number is of no use */
		const struct attach *same = attach_earlier(attach);

		attach_answer(attach, NULL, same ? same->id : attach->id);
		if (same)
			attach_free(attach);
	}
}

static void on_attach_timer(struct loop_timer *timer)
{
	struct attach *attach = container_of(timer, struct attach, timer);
	const struct remote *remote = attach->remote;
	uint64_t now_ns = loop_now_ns(timer->loop);
	char text[ERR_TEXT_MAX];
	struct err why;

	if (remote->ready && now_ns < attach->until_ns) {
		loop_timer_start(timer, attach->until_ns - now_ns);
		return;
	}
	if (remote->ready)
		err_set(&why, ERR_TIMEOUT, "%.150s: not attached in time", remote->label);
	else
		err_set(&why, now_ns < attach->until_ns ? ERR_PEER : ERR_TIMEOUT,
			"not attached in time: %s", handshake_why_not(remote, text));
	attach_lost(attach, &why);
}

struct attach *attach_find(struct xfer_session *xs, uint64_t id)
{
	struct attach *attach = idmap_get(&xs->attaches, id);

	if (!attach || attach->waiter.on_end)
		return session_found(NULL, "attach", id);
	if (sm_state(&attach->sm) == ATTACH_LOST) {
		err_reraise(&attach->why);
		return NULL;
	}
	return attach;
}

/* The oldest lost one without lists is replaced. */
static int attach_place(struct xfer_session *xs)
{
	struct idmap_cursor at;

	if (idmap_count(&xs->attaches) < XFER_ATTACHES_MAX)
		return 0;
	idmap_foreach(&xs->attaches, at) {
		struct attach *attach = at.value;

		if (attach->remote)
			continue;
		attach_free(attach);
		return 0;
	}
	return err_raise(ERR_LIMIT, "%u attached sessions (limit of a session)",
			 XFER_ATTACHES_MAX);
}

int attach_open(struct xfer_session *xs, const char *endpoint, uint64_t epoch,
		const uint8_t secret[16], uint64_t timeout_ns, struct xfer_waiter waiter)
{
	const struct peer_client client = {.uid = xs->session->uid,
					   .session = xs->session->id};
	struct kvd *kvd = xs->xfers->kvd;
	uint64_t now_ns = loop_now_ns(kvd->loop), look_ns;
	struct attach *attach;
	int r = attach_place(xs);

	if (r < 0)
		return err_pass(r);
	attach = mem_zalloc(sizeof(*attach));
	if (!attach)
		return err_pass(-ENOMEM);
	r = charge_take(&attach->charge, xs->session->account, ACCOUNT_ATTACHES,
			sizeof(*attach));
	if (r < 0) {
		mem_free(attach);
		return err_pass(r);
	}
	sm_init(&attach->sm, &attach_table, ATTACH_REACHING);
	attach->id = ++xs->session->next_id;
	list_init(&attach->at_remote);
	do
		attach->cookie = loop_random_u64(kvd->loop);
	while (idmap_get(&xs->xfers->attach_by_cookie, attach->cookie));
	attach->xs = xs;
	attach->epoch = epoch;
	memcpy(attach->secret, secret, sizeof(attach->secret));
	list_init(&attach->waiting);
	loop_timer_init(&attach->timer, kvd->loop, on_attach_timer);
	r = idmap_put(&xs->attaches, attach->id, attach);
	if (r >= 0)
		r = idmap_put(&xs->xfers->attach_by_cookie, attach->cookie, attach);
	if (r >= 0)
		r = handshake_reach(kvd->handshake, endpoint, &client, &attach->remote);
	if (r < 0) {
		idmap_remove(&xs->xfers->attach_by_cookie, attach->cookie);
		idmap_remove(&xs->attaches, attach->id);
		charge_drop(&attach->charge);
		mem_free(attach);
		return err_pass(r);
	}
	attach->until_ns = now_ns + timeout_ns;
	look_ns = handshake_patience(attach->remote, now_ns);
	loop_timer_start(&attach->timer,
			 look_ns - now_ns < timeout_ns ? look_ns - now_ns : timeout_ns);
	list_push_back(&xfer_remote(attach->remote)->attaches, &attach->at_remote);
	sched_flow_init(&attach->flow, &attach->remote->line, xs->session->id);
	attach->waiter = waiter;
	attach_look(attach);
	return 0;
}

/* ---- messages ---- */

static int attach_refuse(struct remote *remote, const struct wire_attach *m)
{
	struct wire_attach_nak nak = {.cookie = m->cookie, .session = m->session};
	struct err why;

	err_take(&why);
	nak.code = why.code;
	snprintf(nak.text, sizeof(nak.text), "%.*s", (int)sizeof(nak.text) - 1, why.text);
	return handshake_send_attach_nak(remote, &nak);
}

static int attach_admit(struct xfers *xfers, struct remote *remote,
			const struct wire_attach *m)
{
	struct grant *grant;
	struct session *session =
		xfer_admit(xfers, remote, m->session, m->secret, &grant);
	struct xfer_session *xs = session ? session->part[MODULE_XFER] : NULL;
	struct share *share;
	int r;

	if (!session)
		return err_pass(-err_errno(err_last()->code));
	r = share_open(xs, remote, grant, &share);
	return err_pass(r < 0 ? r : share_update(xs, share));
}

static int on_attach(struct xfers *xfers, struct remote *remote, struct cursor *body)
{
	struct wire_attach_ack ack;
	struct wire_attach m;
	int r = wire_attach_get(body, &m);

	if (r < 0)
		return err_pass(r);
	if (attach_admit(xfers, remote, &m) < 0)
		return attach_refuse(remote, &m);
	ack = (struct wire_attach_ack){.cookie = m.cookie, .session = m.session};
	return handshake_send_attach_ack(remote, &ack);
}

static struct attach *by_cookie(struct xfers *xfers, const struct remote *remote,
				uint64_t cookie)
{
	struct attach *attach = idmap_get(&xfers->attach_by_cookie, cookie);

	return attach && attach->remote == remote && sm_state(&attach->sm) == ATTACH_ASKED
		       ? attach
		       : NULL;
}

static void take_pool(struct attach *attach)
{
	attach->pool = handshake_pool_by_id(attach->remote, attach->epoch);
	if (attach->pool && !attach->pool->is_session)
		attach->pool = NULL;
	if (attach->pool)
		handshake_pool_use(attach->pool);
}

static int on_attach_ack(struct xfers *xfers, struct remote *remote, struct cursor *body)
{
	struct wire_attach_ack m;
	struct attach *attach;
	struct err why;
	int r = wire_attach_ack_get(body, &m);

	if (r < 0)
		return err_pass(r);
	attach = by_cookie(xfers, remote, m.cookie);
	if (!attach)
		return 0; /* given up meanwhile */
	take_pool(attach);
	if (!attach->pool) { /* REGISTER arrived earlier, and found no memory here */
		err_set(&why, ERR_NOMEM,
			"%.150s: no memory for the regions of its session",
			attach->remote->label);
		attach_lost(attach, &why);
		return 0;
	}
	sm_move(&attach->sm, ATTACH_READY);
	attach_look(attach);
	return 0;
}

static int on_attach_nak(struct xfers *xfers, struct remote *remote, struct cursor *body)
{
	struct wire_attach_nak m;
	struct attach *attach;
	struct err why;
	int r = wire_attach_nak_get(body, &m);

	if (r < 0)
		return err_pass(r);
	attach = by_cookie(xfers, remote, m.cookie);
	if (!attach)
		return 0;
	peer_report(remote->peer, m.code, m.text, &why);
	attach_lost(attach, &why);
	return 0;
}

static int xfers_on_message(struct remote *remote, const struct wire_header *h,
			    struct cursor *body)
{
	struct xfers *xfers = xfers_of(remote->kvd);

	switch (h->type) {
	case WIRE_T_ATTACH:
		return on_attach(xfers, remote, body);
	case WIRE_T_ATTACH_ACK:
		return on_attach_ack(xfers, remote, body);
	default:
		return on_attach_nak(xfers, remote, body);
	}
}

/* ---- events ---- */

static void each_attach(struct remote *remote,
			void (*fn)(struct attach *attach, const void *arg),
			const void *arg)
{
	struct attach *attach;

	remote->reaches++; /* the last attach may end */
	list_foreach_safe(attach, &xfer_remote(remote)->attaches, at_remote)
		fn(attach, arg);
	handshake_release(remote);
}

static void xfer_look(struct attach *attach, const void *arg)
{
	(void)arg;
	attach_look(attach);
}

static void xfer_lose(struct attach *attach, const void *arg)
{
	attach_lost(attach, arg);
}

/* The owner has shared its regions again: this list is freed, the new one is used. */
static void change_pool(struct attach *attach, const void *arg)
{
	struct remote_pool *old = attach->pool;
	struct err why;

	if (old != arg)
		return;
	take_pool(attach);
	handshake_pool_unuse(old);
	if (attach->pool)
		return;
	err_set(&why, ERR_SESSION, "%.150s: its session has ended",
		attach->remote->label);
	attach_lost(attach, &why);
}

static void xfers_on_change(struct remote *remote)
{
	each_attach(remote, xfer_look, NULL);
	serve_on_change(xfers_of(remote->kvd), remote);
}

static void xfers_on_pool_going(struct remote_pool *pool)
{
	struct xfers *xfers = xfers_of(pool->remote->kvd);
	struct xfer_session *xs;
	struct idmap_cursor at;

	if (!pool->is_session)
		return;
	each_attach(pool->remote, change_pool, pool);
	list_foreach(xs, &xfers->sessions, link) {
		idmap_foreach(&xs->dlists, at) {
			struct prepared *prepared = at.value;
			struct places *places = prepared->dlist->places;

			if (!places || places->pool != pool)
				continue;
			prepared->dlist->places = NULL; /* resolved again when used */
			places_unref(places);
		}
	}
	serve_pool_going(xfers, pool);
}

static void xfers_on_down(struct remote *remote, const struct err *why)
{
	struct xfers *xfers = xfers_of(remote->kvd);
	struct share *share;

	assert(why->code != ERR_OK);
	each_attach(remote, xfer_lose, why);
	remote->reaches++; /* the last share may end */
	lists_forget_remote(remote);
	list_foreach_safe(share, &xfer_remote(remote)->shares, at_remote)
		share_free(share);
	handshake_release(remote);
	serve_remote_down(xfers, remote);
}

/* ---- the end of regions and sessions ---- */

/* A remote list has none of our regions; one of files has. */
static bool places_have(const struct places *places, const struct region *region)
{
	for (uint32_t i = 0; places && places->regions && i < places->buffer_count; i++)
		if (places->regions[i] == region)
			return true;
	return false;
}

static void xfers_region_going(struct region *region)
{
	struct session *session = region->session;
	struct xfer_session *xs = session->part[MODULE_XFER];
	struct idmap_cursor at;
	struct err why;

	if (!xs)
		return;
	err_set(&why, ERR_REVOKED, "region %llu was unregistered",
		(unsigned long long)region->id);
	idmap_foreach(&xs->transfers, at) {
		struct transfer *transfer = at.value;

		if (places_have(transfer->at[LOCAL].places, region) ||
		    places_have(transfer->at[REMOTE].places, region))
			transfer_cancel(transfer, &why);
	}
	idmap_foreach(&xs->dlists, at) {
		struct prepared *prepared = at.value;
		struct places *places = prepared->dlist->places;

		if (!places || places->pool)
			continue;
		prepared->dlist->places = NULL;
		places_unref(places);
	}
	serve_region_going(xs->xfers, region);
	shares_without(xs);
}

static void drop_queues(struct xfer_session *xs)
{
	struct notif *notif;
	struct share *share;

	list_foreach_safe(notif, &xs->notifs, link) {
		list_remove(&notif->link);
		notif_free(notif);
	}
	list_foreach_safe(share, &xs->shares, link) {
		handshake_unshare_session(share->remote, xs->session);
		share_free(share);
	}
}

void xfer_session_try_free(struct xfer_session *xs)
{
	struct session *session = xs->session;
	struct idmap_cursor at;
	struct grant *grant;

	assert(session->part[MODULE_XFER] == xs);
	if (!xs->draining || xs->notes > 0 || idmap_count(&xs->transfers) > 0)
		return;
	idmap_foreach(&xs->dlists, at)
		prepared_unref(at.value);
	idmap_foreach(&xs->attaches, at)
		attach_free(at.value);
	drop_queues(xs);
	list_foreach_safe(grant, &xs->grants, link)
		grant_revoke(grant);
	idmap_fini(&xs->attaches);
	idmap_fini(&xs->dlists);
	idmap_fini(&xs->transfers);
	list_remove(&xs->link);
	session->part[MODULE_XFER] = NULL;
	mem_free(xs);
	session_drain_end(session);
}

static int xfers_session_end(struct session *session)
{
	struct xfers *xfers = xfers_of(session->kvd);
	struct xfer_session *xs = session->part[MODULE_XFER];
	struct idmap_cursor at;
	struct err why;

	assert(session->ending);
	if (xfers)
		serve_session_end(xfers, session);
	if (!xs || xs->draining)
		return 0;
	session_drain_begin(session);
	err_set(&why, ERR_SESSION, "engine '%.40s' (pid %d) has ended", session->client,
		(int)session->pid);
	idmap_foreach(&xs->attaches, at) {
		struct attach *attach = at.value;

		attach_lost(attach, &why);
	}
	idmap_foreach(&xs->transfers, at) {
		struct transfer *transfer = at.value;

		if (sm_state(&transfer->sm) == XFER_ENDED) {
			transfer_free(transfer);
			continue;
		}
		transfer->release = true; /* frees itself when it ends */
		transfer_cancel(transfer, &why);
	}
	xs->draining = true; /* from here on the last transfer frees xs */
	xfer_session_try_free(xs);
	return 0;
}

static unsigned int xfers_live_now(const void *part)
{
	return xfers_live(part);
}

static void xfers_remote_init(struct remote *remote)
{
	list_init(&xfer_remote(remote)->attaches);
	list_init(&xfer_remote(remote)->shares);
	list_init(&xfer_remote(remote)->sent);
	list_init(&xfer_remote(remote)->shadows);
}

static bool xfers_remote_idle(const struct remote *remote)
{
	return list_empty(&xfer_remote(remote)->attaches) &&
	       list_empty(&xfer_remote(remote)->shadows);
}

static const struct command *const xfers_commands[] = {xfer_commands, secret_commands,
						       NULL};

const struct module xfer_module = {
	.id = MODULE_XFER,
	.name = "xfer",
	.owner = WIRE_OWNER_XFER,
	.commands = xfers_commands,
	.verbs = xfer_verbs,
	.new = xfers_new,
	.live = xfers_live_now,
	.free = xfers_free,
	.session_end = xfers_session_end,
	.ring_has = xfers_ring_has,
	.ring_cancel = xfers_ring_cancel,
	.ring_release = xfers_ring_release,
	.region_coming = xfers_region_coming,
	.region_going = xfers_region_going,
	.remote_bytes = sizeof(struct xfer_remote),
	.remote_init = xfers_remote_init,
	.remote_idle = xfers_remote_idle,
	.remote_change = xfers_on_change,
	.remote_down = xfers_on_down,
	.remote_pool_going = xfers_on_pool_going,
	.remote_shared = xfers_on_shared,
	.message = xfers_on_message,
	.request = xfers_on_request,
};
