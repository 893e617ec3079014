/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The objects of a session are removed in the order of use: rooms and transfers abort
 * first, then pools, then regions. This code does not wait in between: every object is
 * told to close at once and waits itself for its pins, so the order of the ends follows
 * from the pins. Each remaining object is counted in objects_draining; the last one frees
 * the session.
 *
 * The status page lives until then, with its heartbeat: an engine that is alive after the
 * end of its session (a forked child kept the socket, the client violated the protocol)
 * reads the terminal words of its rooms there.
 */
#include "daemon/session/session.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/loop/offload.h"
#include "daemon/peer/peer.h"
#include "daemon/session/pool.h"
#include "daemon/session/region.h"
#include "daemon/session/region_map.h"
#include "daemon/session/session_watch.h"
#include "daemon/session/status.h"
#include "proto/json.h"

/* Approximately, with its connection's buffers and the head of its status page. */
#define SESSION_BYTES (UINT64_C(64) << 10)
#define SESSION_FDS 8u /* connection, process, status page, ring */

static void session_free(struct session *session)
{
	session_watch_free(session->watch);
	offload_discard(session->kvd->offload, status_page_free, session->status);
	region_map_free(session->region_map);
	idmap_fini(&session->regions);
	idmap_fini(&session->pools);
	charge_drop(&session->charge);
	account_unref(session->account);
	explicit_bzero(session->secret, sizeof(session->secret));
	mem_free(session);
}

static void on_drained(struct loop_defer *defer)
{
	struct session *session = container_of(defer, struct session, free_defer);
	struct kvd *kvd = session->kvd;

	assert(session->objects_draining == 0);
	assert(!idmap_count(&session->regions) && !idmap_count(&session->pools));
	log_debug("session", NULL, "drained", "session=%ju", (uintmax_t)session->id);
	list_remove(&session->link);
	if (!session->own)
		metrics_sub(&kvd->metrics, METRIC_SESSIONS, 1);
	if (--kvd->session_count == 0)
		session_clock_stop(kvd);
	MODULES_EACH(kvd, m)
	{
		if (m->session_gone)
			m->session_gone(session);
	}
	session_free(session);
}

static int session_init(struct session *session, const struct session_peer *peer)
{
	struct loop *loop = session->kvd->loop;
	char uid[16];
	int r;

	snprintf(uid, sizeof(uid), "%u", peer->uid);
	session->account = account_get(&session->kvd->accounts, "uid", uid);
	if (!session->account)
		return err_pass(-ENOMEM);

	session->pid = peer->pid;
	session->uid = peer->uid;
	session->gid = peer->gid;
	session->admin = config_is_admin(session->kvd->config, peer->uid);
	session->started_ns = loop_now_ns(loop);
	session->epoch = loop_random_u64(loop);
	loop_random(loop, session->secret, sizeof(session->secret));
	charge_force(&session->charge, session->account, ACCOUNT_SESSIONS, SESSION_BYTES);
	if (session->admin)
		charge_fds_force(&session->charge, SESSION_FDS);
	else if (charge_fds(&session->charge, SESSION_FDS) < 0)
		return err_pass(-ENOMEM);
	r = region_map_new(&session->region_map);
	if (r == 0)
		r = session_watch_new(session, peer, &session->watch);
	if (r == 0)
		r = session_clock_start(session->kvd);
	return err_pass(r);
}

static int session_make(struct kvd *kvd, const struct session_peer *peer, void *conn,
			struct session **session_p)
{
	const size_t member = offsetof(struct module, session_bytes);
	struct {
		struct session session;
		max_align_t parts[];
	} *whole = mem_zalloc(sizeof(*whole) + modules_part_bytes(kvd, member));
	struct session *session;
	int r;

	assert(kvd->config);
	if (!whole)
		return err_pass(-ENOMEM);
	session = &whole->session;
	session->kvd = kvd;
	modules_part_place(kvd, member, whole->parts, session->part);
	idmap_init(&session->regions);
	idmap_init(&session->pools);
	list_init(&session->waiting);
	list_init(&session->words_link);
	list_init(&session->requests);
	loop_defer_init(&session->free_defer, on_drained);
	r = session_init(session, peer);
	if (r < 0) {
		session_free(session);
		return err_pass(r);
	}
	MODULES_EACH(kvd, m)
	{
		if (m->session_init)
			m->session_init(session);
	}
	session->conn = conn;
	session->id = ++kvd->next_session_id;
	list_push_back(&kvd->sessions, &session->link);
	kvd->session_count++;
	*session_p = session;
	return 0;
}

int session_new(struct kvd *kvd, const struct session_peer *peer, void *conn,
		struct session **session_p)
{
	int r = session_make(kvd, peer, conn, session_p);

	if (r < 0)
		return err_pass(r);
	metrics_add(&kvd->metrics, METRIC_SESSIONS, 1);
	metrics_add(&kvd->metrics, METRIC_SESSIONS_OPENED, 1);
	return 0;
}

int session_new_own(struct kvd *kvd, const char *name, struct session **session_p)
{
	const struct session_peer self = {.uid = geteuid(), .gid = getegid(), .fd = -1};
	int r = session_make(kvd, &self, NULL, session_p);

	if (r < 0)
		return err_pass(r);
	(*session_p)->own = true;
	(*session_p)->admin = true;
	(*session_p)->announced = true; /* no hello was received */
	snprintf((*session_p)->client, sizeof((*session_p)->client), "%s", name);
	return 0;
}

uint64_t session_principal(const struct session *session)
{
	return session->own ? 0 : offload_uid(session->uid);
}

const uint8_t *session_instance(const struct session *session)
{
	static const uint8_t nobody[16];
	const struct peers *peers = session->kvd->peers;

	return peers ? peers_instance(peers) : nobody;
}

int session_greet(struct session *session, const char *client, const char *role)
{
	int r = status_page_new(SESSION_SLOTS + SESSION_ENGINE_SLOTS,
				session_instance(session), &session->status);

	assert(!session->greeted && !session->ending);
	if (r < 0)
		return err_pass(r);
	status_page_divide(session->status, SESSION_SLOTS);
	status_page_charge(session->status, &session->charge);
	status_page_silence(session->status, session->kvd->config->dead_after_ns);
	snprintf(session->client, sizeof(session->client), "%s", client);
	json_sanitize(session->client);
	snprintf(session->role, sizeof(session->role), "%s", role ? role : "");
	session->greeted = true;
	log_debug("session", session->client, "begins", "session=%ju pid=%d uid=%u",
		  (uintmax_t)session->id, (int)session->pid, session->uid);
	return 0;
}

pid_t session_pid(const struct session *session)
{
	return session->own ? getpid() : session->pid;
}

struct session *session_by_id(const struct kvd *kvd, uint64_t id)
{
	struct session *session;

	list_foreach(session, &kvd->sessions, link) {
		if (session->id == id)
			return session;
	}
	return NULL;
}

void session_announce(struct session *session)
{
	if (session->announced)
		return;
	session->announced = true;
	log_info("session", session->client, "has memory", "session=%ju pid=%d uid=%u",
		 (uintmax_t)session->id, (int)session->pid, session->uid);
}

void *session_found(void *object, const char *kind, uint64_t id)
{
	if (!object)
		err_raise(ERR_NOTFOUND, "%s %ju: no such %s in this session", kind,
			  (uintmax_t)id, kind);
	return object;
}

void session_drain_begin(struct session *session)
{
	session->objects_draining++;
}

void session_drain_end(struct session *session)
{
	assert(session->objects_draining > 0);
	if (--session->objects_draining == 0 && session->ending)
		loop_defer(session->kvd->loop, &session->free_defer);
}

/* From this one on; one that needs time continues by session_end_next(). */
static void end_modules(struct session *session, const struct module *const *at)
{
	for (; at && *at; at++) {
		if ((*at)->session_end && (*at)->session_end(session) > 0)
			return;
	}
	/* the users of its pools and regions have ended */
	assert(session->ending && session->objects_draining > 0);
	pools_close(session);
	regions_close(session);
	session_drain_end(session);
}

void session_end_next(struct session *session, enum module_id ended)
{
	const struct module *const *at = session->kvd->modules;

	while ((*at)->id != ended)
		at++;
	end_modules(session, at + 1);
}

void session_end(struct session *session, const char *why)
{
	void *conn = mem_steal(session->conn);
	struct err err;

	assert(why);
	if (session->ending)
		return;
	session->ending = true;
	session_drain_begin(session); /* not freed before this returns */
	if (session->announced)
		log_info("session", session->client, "ends",
			 "session=%ju pid=%d why=\"%s\"", (uintmax_t)session->id,
			 (int)session->pid, why);
	else if (session->greeted)
		log_debug("session", session->client, "ends",
			  "session=%ju pid=%d why=\"%s\"", (uintmax_t)session->id,
			  (int)session->pid, why);
	if (session->status)
		status_page_ended(session->status);
	session_watch_stop(session->watch);
	err_set(&err, ERR_SESSION, "the session has ended: %s", why);
	MODULES_EACH(session->kvd, m)
	{
		if (m->session_closing)
			m->session_closing(session);
	}
	if (conn)
		session->conn_ops->hangup(conn, &err);
	end_modules(session, session->kvd->modules);
}
