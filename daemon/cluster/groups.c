/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The directory and calls.
 *
 * A call waits for the directory, up to the caller's timeout; the error then includes the
 * reason why the directory was not reached.
 */
#include "daemon/cluster/groups_impl.h"
#include "daemon/cluster/etcd.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/cluster_file.h"
#include "daemon/cluster/local.h"
#include "daemon/cluster/trust.h"
#include "daemon/config/config.h"

#define CALL_NS (10 * LOOP_NS_PER_S)
#define IDLE_LOOK_NS (15 * LOOP_NS_PER_S)
#define IDLE_NS (60 * LOOP_NS_PER_S) /* an unused group is not read any more */

/* ---- the directory ---- */

static void on_state(void *arg)
{
	const struct groups *groups = arg;
	struct directory_state state;

	if (!groups->directory || groups->closing)
		return; /* it is being made */
	groups->directory->ops->state(groups->directory, &state);
	if (state.up)
		log_info("cluster", NULL, "the directory is up", "kind=%s where='%s'",
			 groups->directory->ops->name, groups->where);
	else
		log_warn("cluster", NULL, "directory unavailable; using cached entries",
			 "kind=%s where='%s' why='%s'", groups->directory->ops->name,
			 groups->where, state.why.text);
}

struct etcd_words {
	struct etcd_args args; /* points into the others */
	struct cluster_url url;
	char lease_file[CONFIG_PATH_BYTES + CONFIG_NAME_BYTES + 8];
};

static int etcd_words_read(const struct config *config, const char *words,
			   struct etcd_words *etcd_p)
{
	int r = cluster_url_parse(words, &etcd_p->url);

	if (r < 0)
		return err_pass(r);
	snprintf(etcd_p->lease_file, sizeof(etcd_p->lease_file), "%s/%s.lease",
		 config->run_dir, config->name);
	etcd_p->args = (struct etcd_args){
		.url = &etcd_p->url,
		.ca = config->cluster_tls_ca,
		.cert = config->cluster_tls_cert,
		.key = config->cluster_tls_key,
		.user_file = config->cluster_user_file,
		.lease_file = etcd_p->lease_file,
		.lease_s = (unsigned int)(config->cluster_lease_ns / LOOP_NS_PER_S),
	};
	return 0;
}

static int etcd_open(struct groups *groups)
{
	struct etcd_words etcd;
	int r = etcd_words_read(groups->kvd->config, groups->where, &etcd);

	etcd.args.loop = groups->loop;
	return r < 0 ? err_pass(r) : err_pass(etcd_new(&etcd.args, &groups->directory));
}

/* `directory` NULL: only checks the file. */
static int file_read(const char *words, struct directory *directory)
{
	struct cluster_file *file;
	int r = cluster_file_load(words, &file);

	if (r < 0)
		return err_pass(r);
	r = directory ? local_lines(directory, file) : 0;
	cluster_file_free(file);
	return err_pass(r);
}

int groups_reload(struct groups *groups, bool apply)
{
	if (!cluster_file_is(groups->where))
		return 0;
	return err_pass(file_read(groups->where, apply ? groups->directory : NULL));
}

/* Configurations that no file of this host can satisfy: they need the daemons'
 * publications. */
static int check_etcd_is_there(const struct config *config)
{
	if (cluster_url_is_etcd(config->cluster))
		return 0;
	if (config->cluster_trust == GROUPS_TRUST_DIRECTORY)
		return err_raise(
			ERR_CONFIG,
			"cluster_trust = directory: daemons publish their keys in etcd "
			"only; set cluster = etcd://..., or list them in "
			"curve_allow_file");
	if (strcmp(config->chunk_index, "cluster") == 0)
		return err_raise(ERR_CONFIG,
				 "chunk_index = cluster: daemons publish themselves in "
				 "etcd only; set cluster = etcd://..., or list their "
				 "endpoints in chunk_index");
	return 0;
}

int groups_check(const struct config *config)
{
	struct etcd_words etcd;
	int r = check_etcd_is_there(config);

	if (r < 0)
		return err_pass(r);
	if (!*config->cluster)
		return 0;
	if (cluster_file_is(config->cluster))
		return err_pass(file_read(config->cluster, NULL));
	r = etcd_words_read(config, config->cluster, &etcd);
	return r < 0 ? err_pass(r) : err_pass(etcd_check(&etcd.args));
}

/* The one place that knows the kinds. */
static int directory_open(struct groups *groups)
{
	int r = check_etcd_is_there(groups->kvd->config);

	if (r < 0)
		return err_pass(r);
	if (*groups->where && !cluster_file_is(groups->where))
		return err_pass(etcd_open(groups));
	r = local_new(groups->loop, groups->kvd->offload, groups->endpoint,
		      &groups->directory);
	if (r == 0 && *groups->where)
		r = file_read(groups->where, groups->directory);
	return err_pass(r);
}

/* ---- calls ---- */

/* Idempotent on a finished call. */
static void call_leave(struct groups_call *call)
{
	if (!call->waiting)
		return;
	call->waiting = false;
	list_remove(&call->link);
	call->groups->call_count--;
	loop_timer_stop(&call->timer);
	loop_defer_cancel(&call->done);
	if (call->place)
		call->place->call = NULL;
	call->place = NULL;
	if (call->cache) {
		call->cache->call = NULL;
		group_cache_free(call->cache);
	}
	call->cache = NULL;
}

/* A query's cache outlives the reply that is made from it. */
void groups_call_finish(struct groups_call *call, const struct err *err,
			const struct roster *roster)
{
	struct group_cache *cache = call->cache;

	if (cache)
		cache->call = NULL;
	call->cache = NULL;
	call->own = cache && roster == &cache->roster ? &cache->roster : NULL;
	call_leave(call);
	call->on_done(call, err, err ? NULL : roster);
	if (cache)
		group_cache_free(cache);
}

static const struct roster *call_roster(const struct groups_call *call)
{
	const struct group_cache *shared = group_cache_find(call->groups, call->group);

	return !call->fresh && shared && shared->known ? &shared->roster
						       : &call->cache->roster;
}

static void on_call_done(struct loop_defer *defer)
{
	struct groups_call *call = container_of(defer, struct groups_call, done);
	const struct roster *roster = call->cache ? call_roster(call) : NULL;
	struct err err = call->err;

	if (err.code == ERR_OK && roster && !roster->count)
		err_set(&err, ERR_NOTFOUND, "group '%s': no rank is published",
			call->group);
	groups_call_finish(call, err.code != ERR_OK ? &err : NULL, roster);
}

void groups_call_later(struct groups_call *call, const struct err *err)
{
	if (err)
		call->err = *err;
	loop_timer_stop(&call->timer);
	loop_defer(call->groups->loop, &call->done);
}

static void on_call_timer(struct loop_timer *timer)
{
	struct groups_call *call = container_of(timer, struct groups_call, timer);
	struct directory_state state;
	struct err err;

	call->groups->directory->ops->state(call->groups->directory, &state);
	err_set(&err, ERR_TIMEOUT, "group '%s': the directory did not respond%s%s",
		call->group, state.why.code && !state.up ? ": " : "",
		state.why.code && !state.up ? state.why.text : "");
	groups_call_finish(call, &err, NULL);
}

int groups_call_check(const struct groups *groups, uint64_t session)
{
	const struct groups_call *call;
	unsigned int own = 0;

	if (groups->closing)
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	list_foreach(call, &groups->calls, link) /* at most 1024: GROUPS_CALLS_MAX */
		own += call->session == session;
	if (own >= GROUPS_SESSION_CALLS_MAX || groups->call_count >= GROUPS_CALLS_MAX)
		return err_raise(ERR_LIMIT,
				 "%u publish and query calls are waiting "
				 "(limit)",
				 own >= GROUPS_SESSION_CALLS_MAX ? own
								 : groups->call_count);
	return 0;
}

void groups_call_start(struct groups *groups, struct groups_call *call, uint64_t session,
		       const char *group)
{
	call->groups = groups;
	call->session = session;
	call->place = NULL;
	call->cache = NULL;
	call->fresh = false;
	snprintf(call->group, sizeof(call->group), "%s", group);
	call->err = (struct err){.code = ERR_OK};
	loop_timer_init(&call->timer, groups->loop, on_call_timer);
	loop_defer_init(&call->done, on_call_done);
	loop_timer_start(&call->timer, CALL_NS);
	call->waiting = true;
	groups->call_count++;
	list_push_back(&groups->calls, &call->link);
}

void groups_session_gone(struct groups *groups, uint64_t session)
{
	struct groups_call *call;
	struct err err;

	err_set(&err, ERR_SESSION, "the session has ended");
	list_foreach(call, &groups->calls, link) { /* at most 1024: GROUPS_CALLS_MAX */
		if (call->session == session)
			groups_call_later(call, &err);
	}
	groups_session_places_end(groups, session);
}

/* ---- for show and health ---- */

void groups_state(const struct groups *groups, struct groups_state *state_p)
{
	*state_p = (struct groups_state){
		.kind = groups->directory->ops->name,
		.where = groups->where,
		.lease_ns = groups->lease_ns,
		.places = groups->place_count,
		.watches = groups->cache_count,
	};
	groups->directory->ops->state(groups->directory, &state_p->directory);
	state_p->directory.refused += groups->refused;
	if (groups->trust)
		trust_counts(groups->trust, &state_p->keys, &state_p->keys_unknown);
}

enum groups_trust groups_trust(const struct groups *groups)
{
	return groups->trust ? GROUPS_TRUST_DIRECTORY : GROUPS_TRUST_LISTED;
}

/* ---- the whole ---- */

static void on_idle(struct loop_timer *timer)
{
	struct groups *groups = container_of(timer, struct groups, idle);
	uint64_t now_ns = loop_now_ns(groups->loop);
	struct group_cache *cache;

	list_foreach_safe(cache, &groups->caches, link) {
		if (list_empty(&cache->users) && now_ns - cache->used_ns >= IDLE_NS)
			group_cache_free(cache);
		else
			group_cache_mend(cache);
	}
	loop_timer_start(timer, IDLE_LOOK_NS);
}

static void on_fresh(struct loop_timer *timer)
{
	struct groups *groups = container_of(timer, struct groups, fresh);

	groups_own_say(groups);
	groups_places_pools(groups);
}

static void on_trust(void *arg)
{
	link_zmq_look(arg);
}

static int groups_trust_new(struct groups *groups, struct link *link)
{
	int r = trust_new(groups, on_trust, link, &groups->trust);

	if (r < 0)
		return err_pass(r);
	link_zmq_vouch(link, trust_vouch(groups->trust));
	return 0;
}

int groups_new(struct kvd *kvd, struct groups **groups_p)
{
	struct groups *groups = mem_zalloc(sizeof(*groups));
	int r = 0;

	*groups_p = groups;
	if (!groups)
		return err_pass(-ENOMEM);
	groups->kvd = kvd;
	groups->loop = kvd->loop;
	groups->lease_ns = kvd->config->cluster_lease_ns;
	snprintf(groups->endpoint, sizeof(groups->endpoint), "%s", kvd->link->endpoint);
	snprintf(groups->where, sizeof(groups->where), "%s", kvd->config->cluster);
	groups_place_init(groups);
	list_init(&groups->calls);
	list_init(&groups->caches);
	strmap_init(&groups->places_by_key);
	loop_timer_init(&groups->idle, kvd->loop, on_idle);
	loop_timer_init(&groups->fresh, kvd->loop, on_fresh);
	groups->directory = kvd->directory;
	if (!groups->directory)
		r = directory_open(groups);
	if (r == 0) {
		groups->directory->on_state = on_state;
		groups->directory->arg = groups;
	}
	if (r == 0 && kvd->config->cluster_trust == GROUPS_TRUST_DIRECTORY &&
	    strchr(groups->endpoint, '#'))
		r = groups_trust_new(groups, kvd->link);
	if (r < 0)
		return err_pass(r); /* groups_free() is the caller's */
	loop_timer_start(&groups->idle, IDLE_LOOK_NS);
	loop_timer_start(&groups->fresh, LOOP_NS_PER_MS);
	return 0;
}

void groups_close(struct groups *groups, const struct err *why)
{
	struct groups_place *place;
	struct groups_call *call;

	groups->closing = true;
	loop_work_stop(&groups->drain);
	loop_work_stop(&groups->pools);
	while ((call = list_first(&groups->calls, struct groups_call, link)))
		groups_call_finish(call, why, NULL);
	list_foreach_safe(place, &groups->places, link)
		groups_place_free(place);
	loop_timer_stop(&groups->fresh);
}

void groups_free(struct groups *groups)
{
	struct group_cache *cache;
	struct err err;

	if (!groups)
		return;
	err_set(&err, ERR_DRAIN, "the daemon is stopping");
	groups_close(groups, &err);
	if (groups->trust)
		link_zmq_vouch(groups->kvd->link, NULL);
	trust_free(groups->trust);
	list_foreach_safe(cache, &groups->caches, link)
		group_cache_free(cache);
	if (groups->directory)
		groups->directory->ops->free(groups->directory);
	strmap_fini(&groups->places_by_key);
	strmap_fini(&groups->caches_by_group);
	idmap_fini(&groups->sessions);
	loop_timer_stop(&groups->idle);
	loop_timer_stop(&groups->fresh);
	mem_free(groups);
}
