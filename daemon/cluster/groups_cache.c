/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The groups that this daemon reads. A group in use is watched once, and kept in a roster
 * of checked records, which serves all queries, also for changes since a revision. It
 * stays watched for a while after its last user, for repeated queries.
 *
 * A query for the present state has a watch of its own, until it is synced.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/groups_impl.h"
#include "daemon/cluster/own_groups.h"
#include "daemon/cluster/record.h"
#include "daemon/cluster/trust.h"

static void cache_tell(struct group_cache *cache)
{
	struct names_user *user;

	/* a user may end itself in its call */
	list_foreach_safe(user, &cache->users, link) {
		if (user->on_change)
			user->on_change(user);
	}
}

/* Ranks of its worker that are known to be missing, times the worker's number: the size
 * in its first record, less itself. The sum over a group is 0 only if no worker lacks
 * one, as ranks of different workers do not cancel. */
static uint64_t missing_of(const struct place *place, const struct record *record)
{
	uint64_t worker = XXH3_64bits(place->worker, strlen(place->worker)) | 1;
	uint64_t ranks = 1;

	for (unsigned int i = 0; i < PLACE_AXES; i++)
		ranks *= place->rank[i] ? 0 : record->size[i];
	return worker * (ranks - 1);
}

bool groups_complete(const struct roster *roster)
{
	return roster->count && !roster->missing;
}

/* May a daemon publish it there? */
static bool cache_check(struct group_cache *cache, const struct place *place,
			const char *text, uint64_t *missing_p)
{
	static struct record record; /* loop's thread */
	int r = record_read(text, &record);

	if (r == 0)
		r = record_check(&record, place);
	if (r == 0 && own_groups_are(place->group) &&
	    strcmp(record.instance, place->worker) != 0)
		r = err_raise(ERR_PERM, "instance: differs from its key");
	*missing_p = missing_of(place, &record);
	if (r == 0)
		return true;
	if (err_last()->code == ERR_NOMEM) {
		err_clear();
		cache->missed = true;
		return false;
	}
	cache->groups->refused++;
	log_warn("cluster", NULL, "ignored a directory entry",
		 "group='%s' worker='%s' why=\"%s\"", place->group, place->worker,
		 err_last()->text);
	err_clear();
	return false;
}

static void cache_on_entry(struct watch *watch, const struct place *place,
			   const char *record, const char *load)
{
	struct group_cache *cache = container_of(watch, struct group_cache, watch);
	struct roster_entry *entry = roster_find(&cache->roster, place);
	uint64_t missing = entry ? entry->missing : 0;
	int r;

	if (record && (!entry || strcmp(entry->record, record) != 0) &&
	    !cache_check(cache, place, record, &missing))
		record = NULL; /* it has no endpoint to be reached at */
	if (!record) {
		if (entry)
			roster_drop(&cache->roster, entry);
	} else {
		r = roster_put(&cache->roster, place, record, load, &entry);
		if (r < 0) {
			log_warn("cluster", NULL, "out of memory for an entry",
				 "group='%s' worker='%s'", place->group, place->worker);
			err_clear();
			cache->missed = true;
			return;
		}
		if (r == 0)
			return;
		roster_missing(&cache->roster, entry, missing);
	}
	cache_tell(cache);
}

static void cache_on_synced(struct watch *watch)
{
	struct group_cache *cache = container_of(watch, struct group_cache, watch);
	struct groups_call *call = cache->call;
	struct err err;

	if (cache->missed) {
		err_set(&err, ERR_NOMEM, "group '%s': out of memory", cache->group);
		if (call)
			groups_call_later(call, &err);
		return;
	}
	cache->known = cache->synced = true;
	roster_sweep(&cache->roster, NULL, NULL);
	if (call) {
		call->fresh = true;
		groups_call_later(call, NULL);
	}
	cache_tell(cache);
}

static void cache_on_unsynced(struct watch *watch)
{
	container_of(watch, struct group_cache, watch)->synced = false;
}

static int cache_watch(struct group_cache *cache, bool loads)
{
	struct directory *directory = cache->groups->directory;

	cache->loads = loads;
	cache->synced = cache->missed = false;
	return err_pass(
		directory->ops->watch(directory, &cache->watch, cache->group, loads));
}

void group_cache_mend(struct group_cache *cache)
{
	if (!cache->missed && cache->watch.impl)
		return;
	cache->groups->directory->ops->unwatch(&cache->watch);
	roster_mark(&cache->roster);
	if (cache_watch(cache, cache->loads) < 0)
		err_clear(); /* once more, later */
}

int group_cache_new(struct groups *groups, const char *group, bool loads,
		    struct group_cache **cache_p)
{
	struct group_cache *cache = mem_zalloc(sizeof(*cache));
	int r;

	if (!cache)
		return err_pass(-ENOMEM);
	cache->groups = groups;
	cache->watch.on_entry = cache_on_entry;
	cache->watch.on_synced = cache_on_synced;
	cache->watch.on_unsynced = cache_on_unsynced;
	snprintf(cache->group, sizeof(cache->group), "%s", group);
	list_init(&cache->users);
	list_init(&cache->link);
	/* a query with a revision of another time gets all */
	roster_init(&cache->roster, (loop_random_u64(groups->loop) >> 16) + 1);
	r = cache_watch(cache, loads);
	if (r < 0) {
		group_cache_free(cache);
		return err_pass(r);
	}
	*cache_p = cache;
	return 0;
}

void group_cache_free(struct group_cache *cache)
{
	struct names_user *user;

	list_foreach_safe(user, &cache->users, link) {
		list_remove(&user->link);
		user->cache = NULL;
	}
	if (!list_empty(&cache->link)) {
		strmap_remove(&cache->groups->caches_by_group, cache->group);
		cache->groups->cache_count--;
	}
	cache->groups->directory->ops->unwatch(&cache->watch);
	list_remove(&cache->link);
	roster_discard(&cache->roster, cache->groups->kvd->offload);
	mem_free(cache);
}

struct group_cache *group_cache_find(const struct groups *groups, const char *group)
{
	return strmap_get(&groups->caches_by_group, group);
}

/* ---- users ---- */

/* Space for one more: frees the unused one that was queried longest ago. */
static void cache_make_room(struct groups *groups)
{
	struct group_cache *cache, *oldest = NULL;

	if (groups->cache_count < GROUPS_CACHES_MAX)
		return;
	list_foreach(cache, &groups->caches, link) { /* at most 4096: GROUPS_CACHES_MAX */
		if (list_empty(&cache->users) &&
		    (!oldest || cache->used_ns < oldest->used_ns))
			oldest = cache;
	}
	if (oldest)
		group_cache_free(oldest);
}

static int cache_get(struct groups *groups, const char *group, bool loads,
		     struct group_cache **cache_p)
{
	struct group_cache *cache = group_cache_find(groups, group);
	int r;

	if (!cache) {
		cache_make_room(groups);
		if (groups->cache_count >= GROUPS_CACHES_MAX)
			return err_raise(ERR_LIMIT,
					 "group '%s': %u groups are being read (limit)",
					 group, groups->cache_count);
		r = group_cache_new(groups, group, loads, &cache);
		if (r < 0)
			return err_pass(r);
		r = strmap_put(&groups->caches_by_group, group, cache);
		if (r < 0) {
			group_cache_free(cache);
			return err_pass(r);
		}
		list_push_back(&groups->caches, &cache->link);
		groups->cache_count++;
		*cache_p = cache;
		return 0;
	}
	*cache_p = cache;
	if (!loads || cache->loads)
		return 0;
	groups->directory->ops->unwatch(&cache->watch);
	roster_mark(&cache->roster);
	return err_pass(cache_watch(cache, true));
}

int groups_use(struct groups *groups, const char *group, bool loads,
	       struct names_user *user)
{
	struct group_cache *cache = NULL;
	int r;

	assert(!user->cache);
	if (groups->closing)
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	r = group_check(group);
	if (r == 0)
		r = cache_get(groups, group, loads, &cache);
	if (r < 0)
		return err_pass(r);
	cache->used_ns = loop_now_ns(groups->loop);
	user->cache = cache;
	list_push_back(&cache->users, &user->link);
	return 0;
}

void groups_unuse(struct names_user *user)
{
	if (!user->cache)
		return;
	user->cache->used_ns = loop_now_ns(user->cache->groups->loop);
	user->cache = NULL;
	list_remove(&user->link);
}

const struct roster *groups_roster(const struct names_user *user)
{
	return &user->cache->roster;
}

bool groups_known(const struct names_user *user)
{
	return user->cache->known;
}

static bool cache_synced(const struct group_cache *cache)
{
	const struct directory *directory = cache->groups->directory;
	struct directory_state state;

	directory->ops->state(directory, &state);
	return state.up && cache->synced;
}

bool groups_synced(const struct names_user *user)
{
	return cache_synced(user->cache);
}

/* The only worker of the group: 0; outcome 1: it has none. */
static int only_worker(const struct group_cache *cache, const char **worker_p)
{
	*worker_p = roster_only_worker(&cache->roster);
	if (*worker_p)
		return 0;
	if (cache->roster.count == 0)
		return 1;
	return err_raise(ERR_INVAL,
			 "group '%s' has several workers; name one in `worker` (kvd-ctl "
			 "group %s lists them, pick chooses one)",
			 cache->group, cache->group);
}

int groups_lookup(const struct names_user *user, const struct names_wanted *wanted,
		  struct record *record_p)
{
	const struct group_cache *cache = user->cache;
	const struct roster_entry *entry;
	const char *worker = wanted->worker;
	struct place place = {.worker = ""};
	int r = 0;

	if (!cache || !cache->known)
		return 1;
	if (!worker)
		r = only_worker(cache, &worker);
	if (r != 0)
		return r < 0 ? err_pass(r) : 1;
	snprintf(place.group, sizeof(place.group), "%s", cache->group);
	snprintf(place.worker, sizeof(place.worker), "%s", worker);
	memcpy(place.rank, wanted->rank, sizeof(place.rank));
	entry = roster_find(&cache->roster, &place);
	if (!entry)
		return 1;
	return err_pass(record_read(entry->record, record_p));
}

void groups_dial(const struct groups *groups, const struct record *record,
		 char endpoint[LINK_ENDPOINT_MAX])
{
	record_dial(record, endpoint);
	if (groups->trust && trust_dial(groups->trust, record) < 0)
		err_clear(); /* dialled as if it were not trusted: the refusal has the
				reason */
}

/* ---- for those that connect ---- */

static int names_use(const struct kvd *kvd, const char *group, struct names_user *user)
{
	return err_pass(groups_use(groups_of(kvd), group, false, user));
}

static int names_find(const struct names_user *user, const struct names_wanted *wanted,
		      struct names_member *member_p)
{
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	int r = record ? groups_lookup(user, wanted, record) : -ENOMEM;

	if (r != 0)
		return r < 0 ? err_pass(r) : 1;
	*member_p = (struct names_member){.session = record->session};
	groups_dial(user->cache->groups, record, member_p->endpoint);
	if (record->pool_count == 1)
		snprintf(member_p->pool, sizeof(member_p->pool), "%s",
			 record->pools[0].name);
	return 0;
}

static int names_each(const struct names_user *user,
		      void (*each)(void *arg, const char *endpoint), void *arg)
{
	cleanup_free struct record *record = mem_alloc(sizeof(*record));
	char endpoint[LINK_ENDPOINT_MAX];
	const struct roster_entry *entry;

	if (!record)
		return err_pass(-ENOMEM);
	if (!groups_known(user))
		return 1;
	list_foreach(entry, &groups_roster(user)->order, link) {
		if (!entry->record || record_read(entry->record, record) < 0 ||
		    record->draining)
			continue;
		groups_dial(user->cache->groups, record, endpoint);
		each(arg, endpoint);
	}
	err_clear();
	return 0;
}

static bool names_away(const struct kvd *kvd, char *why, size_t size)
{
	struct groups_state state;

	groups_state(groups_of(kvd), &state);
	snprintf(why, size, "%s", state.directory.why.text);
	return !state.directory.up;
}

static void names_be_home(const struct kvd *kvd)
{
	groups_be_home(groups_of(kvd));
}

const struct names groups_names = {
	.use = names_use,
	.unuse = groups_unuse,
	.find = names_find,
	.each = names_each,
	.away = names_away,
	.be_home = names_be_home,
};

/* ---- queries ---- */

int groups_query(struct groups *groups, uint64_t session, const char *group, bool loads,
		 struct groups_call *call)
{
	const struct group_cache *shared;
	struct directory_state state;
	struct group_cache *cache;
	int r = groups_call_check(groups, session);

	if (r == 0)
		r = group_check(group);
	if (r == 0)
		r = group_cache_new(groups, group, loads, &cache);
	if (r != 0)
		return err_pass(r);
	groups_call_start(groups, call, session, group);
	call->cache = cache;
	cache->call = call;
	/* unavailable: the cached entries, if any */
	shared = group_cache_find(groups, group);
	groups->directory->ops->state(groups->directory, &state);
	if (!state.up && shared && shared->known)
		groups_call_later(call, NULL);
	return 0;
}

void groups_each_watch(const struct groups *groups,
		       bool (*each)(void *arg, const char *group, unsigned int entries,
				    bool synced),
		       void *arg)
{
	const struct group_cache *cache;

	list_foreach(cache, &groups->caches, link) {
		if (!each(arg, cache->group, cache->roster.count, cache_synced(cache)))
			return;
	}
}
