/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The publications of this daemon: the places of its sessions, and its own entry in
 * kvd.daemons. The directory knows one publisher, this daemon, so conflicts between its
 * sessions are resolved here.
 *
 * If the directory refuses a place that was never published, the place ends and its
 * caller gets the error. A place that was published stays until its session ends.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/sanitize.h"
#include "daemon/base/context.h"
#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/groups_impl.h"
#include "daemon/cluster/own_groups.h"
#include "daemon/cluster/record.h"
#include "daemon/cluster/trust.h"
#include "daemon/config/config.h"
#include "daemon/peer/peer.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/transport/transport.h"

#define FRESH_NS (200 * LOOP_NS_PER_MS) /* changes of pools together */

/* ---- one of each place ---- */

struct published_key {
	char group[PLACE_GROUP_MAX];
	struct place_key place;
};

static size_t published_key_of(const struct place *place, struct published_key *key)
{
	memset(key, 0, sizeof(*key));
	memcpy(key->group, place->group, strlen(place->group));
	return offsetof(struct published_key, place) + place_key(place, &key->place);
}

static struct groups_place *published_find(const struct groups *groups,
					   const struct place *place)
{
	struct published_key key;
	size_t len = published_key_of(place, &key);

	return strmap_get_bytes(&groups->places_by_key, &key, len);
}

static int session_add(struct groups *groups, struct groups_place *place)
{
	struct groups_session *of = idmap_get(&groups->sessions, place->session);

	if (!of) {
		of = mem_zalloc(sizeof(*of));
		if (!of || idmap_put(&groups->sessions, place->session, of) < 0) {
			mem_free(of);
			return err_pass(-ENOMEM);
		}
		list_init(&of->places);
	}
	list_push_back(&of->places, &place->of_session);
	of->count++;
	return 0;
}

static void session_drop(struct groups *groups, struct groups_place *place)
{
	struct groups_session *of = idmap_get(&groups->sessions, place->session);

	list_remove(&place->of_session);
	if (--of->count > 0)
		return;
	idmap_remove(&groups->sessions, place->session);
	mem_free(of);
}

static struct groups_place *place_next(const struct groups_place *place)
{
	return place->link.next == &place->groups->places
		       ? NULL
		       : list_entry(place->link.next, struct groups_place, link);
}

/* A walk of many turns continues after it. */
static void place_unlink(struct groups_place *place)
{
	struct groups *groups = place->groups;

	if (groups->pools_at == place)
		groups->pools_at = place_next(place);
	list_remove(&place->link);
}

/* Its publication has ended in the directory, or never started. */
static void published_end(struct groups_place *place)
{
	struct groups *groups = place->groups;
	struct published_key key;
	size_t len = published_key_of(&place->place, &key);

	if (place->call) {
		place->call->place = NULL;
		place->call = NULL;
	}
	strmap_remove_bytes(&groups->places_by_key, &key, len);
	place_unlink(place);
	session_drop(groups, place);
	groups->place_count--;
	mem_free(place->record);
	mem_free(place);
}

void groups_place_free(struct groups_place *place)
{
	place->groups->directory->ops->withdraw(&place->publication);
	published_end(place);
}

static void on_published(struct publication *publication, const struct err *err)
{
	struct groups_place *place =
		container_of(publication, struct groups_place, publication);
	struct groups_call *call = place->call;

	place->taken = !err;
	if (call)
		groups_call_later(call, err);
	if (call) {
		call->place = NULL;
		place->call = NULL;
	}
	if (err && place->session == 0) /* the daemon's own */
		loop_timer_start(&place->groups->fresh, place->groups->lease_ns);
	if (err)
		published_end(place);
}

static int published_new(struct groups *groups, uint64_t session, const struct place *at,
			 const char *record, struct groups_place **place_p)
{
	struct groups_place *place = mem_zalloc(sizeof(*place));
	struct published_key key;
	size_t len = published_key_of(at, &key);
	int r;

	if (!place)
		return err_pass(-ENOMEM);
	place->groups = groups;
	place->session = session;
	place->place = *at;
	place->publication.on_done = on_published;
	place->record = mem_strdup(record);
	r = place->record ? session_add(groups, place) : -ENOMEM;
	if (r == 0) {
		r = strmap_put_bytes(&groups->places_by_key, &key, len, place);
		if (r < 0)
			session_drop(groups, place);
	}
	if (r < 0) {
		mem_free(place->record);
		mem_free(place);
		return err_pass(r);
	}
	list_push_back(&groups->places, &place->link);
	groups->place_count++;
	r = groups->directory->ops->publish(groups->directory, &place->publication, at,
					    record, NULL);
	if (r < 0) {
		published_end(place);
		return err_pass(r);
	}
	*place_p = place;
	return 0;
}

/* ---- records ---- */

static void record_fill(const struct groups *groups, struct record *record)
{
	const struct kvd *kvd = groups->kvd;

	hex_write(peers_instance(kvd->peers), 16, record->instance);
	snprintf(record->name, sizeof(record->name), "%s", kvd->config->name);
	snprintf(record->version, sizeof(record->version), "%s", KVD_VERSION);
	record->draining = groups->draining;
	record->transport_count = 0;
	for (unsigned int i = 0; i < kvd->transport_count && i < RECORD_TRANSPORTS_MAX;
	     i++)
		snprintf(record->transports[record->transport_count++],
			 sizeof(record->transports[0]), "%s",
			 kvd->transports[i]->ops->name);
}

static void pool_figures(struct record_pool *into, const struct pool *pool)
{
	into->pages = pool->layout->views[0].pages;
	into->page_tokens = pool->layout->views[0].page_tokens;
	snprintf(into->digest, sizeof(into->digest), "%016llx",
		 (unsigned long long)pool->digest);
}

/* The session's pool of that name; NULL: it has none now. */
static const struct pool *pool_named(const struct kvd *kvd, uint64_t id, const char *name)
{
	const struct session *session = session_by_id(kvd, id);
	struct idmap_cursor at;

	if (!session)
		return NULL;
	idmap_foreach(&session->pools, at) {
		const struct pool *pool = at.value;

		if (!pool->closing && strcmp(pool->name, name) == 0)
			return pool;
	}
	return NULL;
}

static int check_session_places(const struct groups *groups, uint64_t session)
{
	const struct groups_session *of = idmap_get(&groups->sessions, session);

	if (groups->place_count >= GROUPS_PLACES_MAX)
		return err_raise(ERR_LIMIT, "%u ranks are published (limit)",
				 groups->place_count);
	if (of && of->count >= GROUPS_SESSION_PLACES_MAX)
		return err_raise(ERR_LIMIT,
				 "%u ranks are published by this session (limit)",
				 of->count);
	return 0;
}

static int published_text(struct groups_place *said, const char *record)
{
	char *copy;
	int r;

	if (strcmp(said->record, record) == 0)
		return 0;
	copy = mem_strdup(record);
	r = copy ? said->groups->directory->ops->update(&said->publication, record, NULL)
		 : -ENOMEM;
	if (r < 0) {
		mem_free(copy);
		return err_pass(r);
	}
	mem_free(said->record);
	said->record = copy;
	said->read = false;
	return 0;
}

/* Published before: its record is replaced. */
static int published_again(struct groups_place *said, uint64_t session,
			   const char *record, struct groups_call *call)
{
	char text[PLACE_TEXT_MAX];
	struct err err;
	int r;

	if (said->session != session)
		return err_raise(ERR_EXIST,
				 "%s: the rank is published by another session",
				 place_text(&said->place, text));
	r = published_text(said, record);
	if (r < 0)
		return err_pass(r);
	if (!call)
		return 0;
	groups_call_start(said->groups, call, session, said->place.group);
	if (said->call) {
		err_set(&err, ERR_CANCELED, "group '%s': replaced by a later publish",
			said->place.group);
		said->call->place = NULL;
		groups_call_later(said->call, &err);
		said->call = NULL;
	}
	if (said->taken) {
		groups_call_later(call, NULL);
		return 0;
	}
	said->call = call;
	call->place = said;
	return 0;
}

static int publish_text(struct groups *groups, uint64_t session,
			const struct place *place, const char *text,
			struct groups_call *call)
{
	struct groups_place *said = published_find(groups, place);
	int r;

	if (said)
		return err_pass(published_again(said, session, text, call));
	r = check_session_places(groups, session);
	if (r == 0)
		r = published_new(groups, session, place, text, &said);
	if (r < 0)
		return err_pass(r);
	if (!call)
		return 0;
	groups_call_start(groups, call, session, place->group);
	said->call = call;
	call->place = said;
	return 0;
}

int groups_publish(struct groups *groups, uint64_t session, const struct place *place,
		   struct record *record, struct groups_call *call)
{
	char text[DIRECTORY_RECORD_MAX];
	const struct session *owner = session_by_id(groups->kvd, session);
	const struct pool *pool;
	int r = place_check(place);

	if (r == 0 && own_groups_are(place->group))
		r = err_raise(ERR_PERM,
			      "group '%s': names that start with '" OWN_GROUPS_PREFIX
			      "' are reserved for daemons",
			      place->group);
	if (r == 0 && call)
		r = groups_call_check(groups, session);
	if (r == 0 && !*record->endpoint) { /* else it may be another daemon's engine */
		record->session = owner ? owner->epoch : 0;
		r = record_reach(record, groups->endpoint);
	}
	if (r < 0)
		return err_pass(r);
	record_fill(groups, record);
	record->summary[sanitize_text(record->summary, strlen(record->summary))] = '\0';
	pool = record->pool_count
		       ? pool_named(groups->kvd, session, record->pools[0].name)
		       : NULL;
	if (pool)
		pool_figures(&record->pools[0], pool);
	r = record_check(record, place);
	if (r == 0)
		r = record_make(record, text);
	return r < 0 ? err_pass(r)
		     : err_pass(publish_text(groups, session, place, text, call));
}

int groups_load(struct groups *groups, uint64_t session, const char *text)
{
	const struct groups_session *of = idmap_get(&groups->sessions, session);
	struct groups_place *place;
	int r = 0;

	if (!of)
		return 0;
	list_foreach(place, &of->places, of_session) { /* at most 1024: of a session */
		if (r == 0)
			r = groups->directory->ops->update(&place->publication, NULL,
							   text);
	}
	return err_pass(r);
}

/* ---- the daemon's own entry ---- */

static void add_pool(struct record *record, const struct pool *pool)
{
	struct record_pool *into = &record->pools[record->pool_count];

	if (record->pool_count == RECORD_POOLS_MAX || pool->closing)
		return;
	*into = (struct record_pool){.pages = 0};
	snprintf(into->name, sizeof(into->name), "%s", pool->name);
	into->name[sanitize_text(into->name, strlen(into->name))] = '\0';
	pool_figures(into, pool);
	record->pool_count++;
}

static void add_pools(const struct kvd *kvd, struct record *record)
{
	const struct session *session;
	struct idmap_cursor at;

	list_foreach(session, &kvd->sessions, link) {
		if (session->own)
			continue;
		idmap_foreach(&session->pools, at)
			add_pool(record, at.value);
	}
}

static int own_record(const struct groups *groups, bool pools,
		      char text[DIRECTORY_RECORD_MAX], struct place *place)
{
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	int r;

	if (!record)
		return err_pass(-ENOMEM);
	record_init(record);
	r = record_reach(record, groups->endpoint);
	if (r < 0)
		return err_pass(r);
	record_fill(groups, record);
	if (pools)
		add_pools(groups->kvd, record);
	memset(place, 0, sizeof(*place));
	snprintf(place->worker, sizeof(place->worker), "%s", record->instance);
	if (!pools && groups->trust)
		trust_group(record->key, place->group);
	return err_pass(record_make(record, text));
}

/* The groups in which a few bytes of it are enough: of its key, of index nodes. */
static int own_say_more(struct groups *groups)
{
	char text[DIRECTORY_RECORD_MAX];
	struct place place = {.worker = ""};
	int r = groups->trust || groups->is_home ? own_record(groups, false, text, &place)
						 : 0;

	if (r == 0 && groups->trust)
		r = publish_text(groups, 0, &place, text, NULL);
	snprintf(place.group, sizeof(place.group), "%s", NAMES_HOMES);
	if (r == 0 && groups->is_home)
		r = publish_text(groups, 0, &place, text, NULL);
	return err_pass(r);
}

void groups_own_say(struct groups *groups)
{
	char text[DIRECTORY_RECORD_MAX];
	struct place place = {.worker = ""};
	int r = own_record(groups, true, text, &place);

	snprintf(place.group, sizeof(place.group), "%s", OWN_GROUP_DAEMONS);
	if (r == 0)
		r = publish_text(groups, 0, &place, text, NULL);
	if (r == 0)
		r = own_say_more(groups);
	if (r == 0)
		return;
	log_warn("cluster", NULL, "publishing the daemon's own entry failed",
		 "why=\"%s\"", err_last()->text);
	err_clear();
	loop_timer_start(&groups->fresh, groups->lease_ns);
}

void groups_be_home(struct groups *groups)
{
	groups->is_home = true;
	groups_pools_changed(groups);
}

void groups_pools_changed(struct groups *groups)
{
	if (!loop_timer_running(&groups->fresh) && !groups->closing)
		loop_timer_start(&groups->fresh, FRESH_NS);
}

/* ---- the present state of places ---- */

static int published_write(struct groups_place *place, const struct record *record)
{
	char text[DIRECTORY_RECORD_MAX];
	int r = record_make(record, text);

	return r < 0 ? err_pass(r) : err_pass(published_text(place, text));
}

static int published_drain(struct groups_place *place)
{
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	int r = record ? record_read(place->record, record) : -ENOMEM;

	if (r < 0)
		return err_pass(r);
	record->draining = true;
	return err_pass(published_write(place, record));
}

/* The pool that it names is read once from each record. */
static int published_pool_name(struct groups_place *place, struct record *record)
{
	int r = record_read(place->record, record);

	if (r < 0)
		return err_pass(r);
	snprintf(place->pool, sizeof(place->pool), "%s",
		 record->pool_count ? record->pools[0].name : "");
	place->pool_id = 0;
	place->read = true;
	return 0;
}

/* The figures of its pool, if that has changed. */
static void published_pool(struct groups_place *place)
{
	cleanup_free struct record *record = NULL;
	const struct pool *pool = NULL;
	int r = 0;

	if (place->read && !*place->pool)
		return;
	if (place->read)
		pool = pool_named(place->groups->kvd, place->session, place->pool);
	if (place->read && (!pool || pool->id == place->pool_id))
		return;
	record = mem_alloc(sizeof(*record));
	r = record ? published_pool_name(place, record) : -ENOMEM;
	if (r == 0 && *place->pool)
		pool = pool_named(place->groups->kvd, place->session, place->pool);
	if (r == 0 && pool) {
		pool_figures(&record->pools[0], pool);
		r = published_write(place, record);
		place->read = true;
		place->pool_id = r == 0 ? pool->id : 0;
	}
	if (r < 0)
		err_clear(); /* with the next change of pools */
}

static bool pools_step(struct loop_work *work)
{
	struct groups *groups = container_of(work, struct groups, pools);
	struct groups_place *place = groups->pools_at;

	if (!place)
		return false;
	groups->pools_at = place_next(place);
	if (place->session)
		published_pool(place);
	return true;
}

void groups_places_pools(struct groups *groups)
{
	groups->pools_at = list_first(&groups->places, struct groups_place, link);
	loop_work_start(&groups->pools);
}

/* Drained ones are at the list's end, with new ones, which are drained from the start. */
static bool drain_step(struct loop_work *work)
{
	struct groups *groups = container_of(work, struct groups, drain);
	struct groups_place *place =
		list_first(&groups->places, struct groups_place, link);

	if (!place || place->drained)
		return false;
	place->drained = true;
	place_unlink(place);
	list_push_back(&groups->places, &place->link);
	if (published_drain(place) < 0) {
		log_warn("cluster", NULL, "publishing the drain to the directory failed",
			 "group='%s' why=\"%s\"", place->place.group, err_last()->text);
		err_clear();
	}
	return true;
}

void groups_place_init(struct groups *groups)
{
	list_init(&groups->places);
	loop_work_init(&groups->pools, groups->loop, pools_step, NULL);
	loop_work_init(&groups->drain, groups->loop, drain_step, NULL);
}

void groups_drain(struct groups *groups)
{
	if (groups->draining)
		return;
	groups->draining = true;
	loop_work_start(&groups->drain);
}

void groups_each_place(const struct groups *groups,
		       bool (*each)(void *arg, uint64_t session,
				    const struct place *place, const char *record,
				    bool taken),
		       void *arg)
{
	const struct groups_place *place;

	list_foreach(place, &groups->places, link) {
		if (!each(arg, place->session, &place->place, place->record,
			  place->taken))
			return;
	}
}

void groups_each_session(const struct groups *groups,
			 void (*each)(void *arg, uint64_t session), void *arg)
{
	struct idmap_cursor at;

	idmap_foreach(&groups->sessions, at)
		each(arg, at.key);
}

void groups_session_places_end(struct groups *groups, uint64_t session)
{
	const struct groups_session *of;

	while ((of = idmap_get(&groups->sessions, session)))
		groups_place_free(
			list_first(&of->places, struct groups_place, of_session));
}
