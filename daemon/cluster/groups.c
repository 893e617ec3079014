/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Directories and calls.
 *
 * The configured directory is there from the start to the end. One that a command names
 * by `at` is the board of that daemon; it is there while a place, a query or a reader
 * uses it.
 *
 * A call waits for its directory; the time that it may take is the caller's to wait, and
 * the answer then says why the directory was not reached. What cannot come good (a
 * refused key) ends the calls at once.
 */
#include "daemon/cluster/groups_impl.h"
#include "daemon/cluster/etcd.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/board_directory.h"
#include "daemon/cluster/cluster_file.h"
#include "daemon/cluster/local.h"
#include "daemon/cluster/trust.h"
#include "daemon/config/config.h"

#define CALL_NS (10 * LOOP_NS_PER_S)
#define IDLE_LOOK_NS (15 * LOOP_NS_PER_S)
#define IDLE_NS (60 * LOOP_NS_PER_S) /* a group that nobody asked for is read no more */

/* ---- directories ---- */

static void on_state(void *arg)
{
	struct groups_directory *from = arg;
	struct directory_state state;

	if (!from->directory)
		return; /* it is being made */
	from->directory->ops->state(from->directory, &state);
	if (*from->at || !*from->groups->where || from->groups->closing)
		return;
	if (state.up)
		log_info("cluster", NULL, "the directory is up", "kind=%s where='%s'",
			 from->directory->ops->name, from->groups->where);
	else
		log_warn("cluster", NULL,
			 "the directory is away: what is known goes on working",
			 "kind=%s where='%s' why='%s'", from->directory->ops->name,
			 from->groups->where, state.why.text);
}

/* kvd://HOST:PORT#KEY is tcp://HOST:PORT#KEY. */
static int board_endpoints(const char *words, char (*endpoints)[LINK_ENDPOINT_MAX],
			   unsigned int *count_p)
{
	*count_p = 0;
	for (words += strspn(words, " ,"); *words; words += strspn(words, " ,")) {
		size_t len = strcspn(words, " ,");
		const char *rest = words + 6;

		if (*count_p == BOARD_SITES_MAX)
			return err_raise(ERR_CONFIG, "cluster: more than %u daemons",
					 BOARD_SITES_MAX);
		if ((strncmp(words, "kvd://", 6) != 0 &&
		     strncmp(words, "tcp://", 6) != 0) ||
		    len >= LINK_ENDPOINT_MAX)
			return err_raise(ERR_CONFIG,
					 "cluster: '%.*s': must be file:/PATH, "
					 "etcd://HOST:PORT/PREFIX or kvd://HOST:PORT#KEY",
					 (int)(len < 100 ? len : 100), words);
		snprintf(endpoints[(*count_p)++], LINK_ENDPOINT_MAX, "tcp://%.*s",
			 (int)len - 6, rest);
		words += len;
	}
	return 0;
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

static int etcd_open(struct groups_directory *from, const char *words)
{
	struct etcd_words etcd;
	int r = etcd_words_read(from->groups->kvd->config, words, &etcd);

	etcd.args.loop = from->groups->loop;
	if (r == 0)
		r = etcd_new(&etcd.args, &from->directory);
	if (r < 0)
		return err_pass(r);
	from->directory->on_state = on_state;
	from->directory->arg = from;
	return 0;
}

/* `directory` NULL: only whether the file is good. */
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

static int file_open(struct groups_directory *from, const char *words)
{
	int r = local_new(from->groups->loop, from->groups->endpoint, &from->directory);

	return r < 0 ? err_pass(r) : err_pass(file_read(words, from->directory));
}

int groups_reload(struct groups *groups, bool apply)
{
	if (!cluster_file_is(groups->where))
		return 0;
	return err_pass(
		file_read(groups->where, apply ? groups_main(groups)->directory : NULL));
}

int groups_check(const struct config *config)
{
	char endpoints[BOARD_SITES_MAX][LINK_ENDPOINT_MAX];
	struct etcd_words etcd;
	unsigned int count;
	int r;

	if (cluster_file_is(config->cluster))
		return err_pass(file_read(config->cluster, NULL));
	if (!cluster_url_is_etcd(config->cluster))
		return err_pass(board_endpoints(config->cluster, endpoints, &count));
	r = etcd_words_read(config, config->cluster, &etcd);
	return r < 0 ? err_pass(r) : err_pass(etcd_check(&etcd.args));
}

/* Which directory the words stand for: the one place that knows the kinds. */
static int directory_open(struct groups_directory *from, const char *words)
{
	char endpoints[BOARD_SITES_MAX][LINK_ENDPOINT_MAX];
	struct groups *groups = from->groups;
	struct board_directory_args args = {
		.loop = groups->loop,
		.peers = groups->kvd->peers,
		.board = groups->board,
		.own = groups->endpoint,
		.endpoints = {""},
		.count = 1,
		.lease_ns = groups->lease_ns,
		.on_state = on_state,
		.arg = from,
	};
	unsigned int count = 0;
	int r;

	if (cluster_url_is_etcd(words))
		return err_pass(etcd_open(from, words));
	if (cluster_file_is(words))
		return err_pass(file_open(from, words));
	r = board_endpoints(words, endpoints, &count);
	if (r < 0)
		return err_pass(r);
	for (unsigned int i = 0; i < count; i++)
		args.endpoints[i] = endpoints[i];
	if (count)
		args.count = count;
	from->board = true;
	return err_pass(board_directory_new(&args, &from->directory));
}

static void groups_directory_free(struct groups_directory *from)
{
	if (from->directory)
		from->directory->ops->free(from->directory);
	list_remove(&from->link);
	loop_defer_cancel(&from->unused);
	from->groups->directory_count--;
	mem_free(from);
}

static void on_unused(struct loop_defer *defer)
{
	struct groups_directory *from =
		container_of(defer, struct groups_directory, unused);

	if (!from->uses)
		groups_directory_free(from);
}

static int groups_directory_new(struct groups *groups, const char *at, const char *words,
				struct groups_directory **from_p)
{
	struct groups_directory *from = mem_zalloc(sizeof(*from));
	int r;

	if (!from)
		return err_pass(-ENOMEM);
	from->groups = groups;
	from->uses = 1;
	loop_defer_init(&from->unused, on_unused);
	snprintf(from->at, sizeof(from->at), "%s", at);
	list_push_back(&groups->directories, &from->link);
	groups->directory_count++;
	r = directory_open(from, words);
	if (r < 0) {
		groups_directory_free(from);
		return err_pass(r);
	}
	*from_p = from;
	return 0;
}

int groups_directory_get(struct groups *groups, const char *at,
			 struct groups_directory **from_p)
{
	struct groups_directory *from;

	if (!at || !*at || (endpoint_same(at, groups->endpoint) && !*groups->where)) {
		*from_p = groups_main(groups);
		(*from_p)->uses++;
		return 0;
	}
	list_foreach(from, &groups->directories, link) {
		if (endpoint_same(from->at, at)) {
			from->uses++;
			*from_p = from;
			return 0;
		}
	}
	if (groups->directory_count > GROUPS_DIRECTORIES_MAX)
		return err_raise(ERR_LIMIT, "at: boards of %u other daemons are in use",
				 groups->directory_count - 1);
	if (strlen(at) >= sizeof(from->at))
		return err_raise(ERR_INVAL, "at: at most %zu bytes",
				 sizeof(from->at) - 1);
	if (strncmp(at, "tcp://", 6) != 0 || strpbrk(at, " ,"))
		return err_raise(ERR_INVAL,
				 "at: endpoint '%.100s': must be "
				 "tcp://host:port",
				 at);
	return err_pass(groups_directory_new(groups, at, at, from_p));
}

/* It goes in a later turn: it may be calling. */
void groups_directory_put(struct groups_directory *from)
{
	assert(from->uses > 0);
	if (--from->uses == 0)
		loop_defer(from->groups->loop, &from->unused);
}

/* ---- calls ---- */

void groups_cancel(struct groups_call *call)
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

/* A query's cache outlives the answer that is made of it. */
void groups_call_finish(struct groups_call *call, const struct err *err,
			const struct roster *roster)
{
	struct group_cache *cache = call->cache;

	if (cache)
		cache->call = NULL;
	call->cache = NULL;
	groups_cancel(call);
	call->on_done(call, err, err ? NULL : roster);
	if (cache)
		group_cache_free(cache);
}

static const struct roster *call_roster(const struct groups_call *call)
{
	const struct group_cache *shared =
		group_cache_find(call->groups, call->cache->from, call->group);

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

	call->directory->ops->state(call->directory, &state);
	err_set(&err, ERR_TIMEOUT, "group '%s': no answer from the directory%s%s",
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
	list_foreach(call, &groups->calls, link)
		own += call->session == session;
	if (own >= GROUPS_SESSION_CALLS_MAX || groups->call_count >= GROUPS_CALLS_MAX)
		return err_raise(ERR_LIMIT, "%u publish and query calls wait, the cap",
				 own >= GROUPS_SESSION_CALLS_MAX ? own
								 : groups->call_count);
	return 0;
}

void groups_call_start(struct groups *groups, struct groups_call *call, uint64_t session,
		       const char *group, struct groups_directory *from)
{
	call->groups = groups;
	call->session = session;
	call->directory = from->directory;
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

/* Directories that cannot be reached as things are: who waits for them hears why. */
static void calls_hopeless(struct groups *groups)
{
	struct directory_state state;
	struct groups_call *call;

	list_foreach(call, &groups->calls, link) {
		if (!loop_timer_running(&call->timer))
			continue; /* it has its answer */
		call->directory->ops->state(call->directory, &state);
		if (state.up || state.why.code == ERR_OK || state.why.retryable)
			continue;
		groups_call_later(call, &state.why);
		if (call->place)
			groups_place_free(call->place);
	}
}

/* ---- sessions and peers come and go ---- */

void groups_session_gone(struct groups *groups, uint64_t session)
{
	struct groups_call *call;
	struct groups_place *place;
	struct err err;

	err_set(&err, ERR_SESSION, "the session has ended");
	list_foreach(call, &groups->calls, link) {
		if (call->session == session)
			groups_call_later(call, &err);
	}
	list_foreach_safe(place, &groups->places, link) {
		if (place->session == session)
			groups_place_free(place);
	}
}

void groups_peer_up(struct groups *groups, struct peer *peer)
{
	struct groups_directory *from;

	list_foreach_safe(from, &groups->directories, link) {
		if (from->board)
			board_directory_peer_up(from->directory, peer);
	}
	calls_hopeless(groups); /* one that is too old */
}

void groups_peer_down(struct groups *groups, struct peer *peer)
{
	struct groups_directory *from;

	board_peer_down(groups->board, peer);
	list_foreach_safe(from, &groups->directories, link) {
		if (from->board)
			board_directory_peer_down(from->directory, peer);
	}
}

void groups_peer_refused(struct groups *groups, struct peer *peer)
{
	struct groups_directory *from;

	list_foreach_safe(from, &groups->directories, link) {
		if (from->board)
			board_directory_peer_refused(from->directory, peer);
	}
	calls_hopeless(groups);
}

bool groups_handles(unsigned int type)
{
	return board_handles(type) || board_directory_handles(type);
}

int groups_on_message(struct groups *groups, struct peer *peer,
		      const struct wire_header *header, struct cursor *body)
{
	struct groups_directory *from;
	int r = 0;

	if (board_handles(header->type))
		return err_pass(
			board_on_message(groups->board, peer, header->type, body));
	list_foreach_safe(from, &groups->directories, link) {
		struct cursor copy = *body;

		if (from->board && r == 0)
			r = board_directory_on_message(from->directory, peer,
						       header->type, &copy);
	}
	return err_pass(r);
}

/* ---- for show and health ---- */

void groups_state(const struct groups *groups, struct groups_state *state_p)
{
	const struct groups_directory *main = groups_main(groups);

	*state_p = (struct groups_state){
		.kind = main->directory->ops->name,
		.where = groups->where,
		.lease_ns = groups->lease_ns,
		.places = groups->place_count,
		.watches = groups->cache_count,
		.board_entries = board_count(groups->board),
		.board_watches = board_watches(groups->board),
	};
	main->directory->ops->state(main->directory, &state_p->directory);
	state_p->directory.refused += groups->refused;
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
	if (!groups_places_pools(groups))
		groups_pools_changed(groups);
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

static int groups_board(struct groups *groups)
{
	struct board_options options;

	board_options_default(&options);
	options.young_ns = groups->lease_ns;
	if (groups->kvd->config->peer_message_bytes < options.message_bytes)
		options.message_bytes = groups->kvd->config->peer_message_bytes;
	return err_pass(board_new(groups->loop, &options, &groups->board));
}

int groups_new(struct kvd *kvd, struct groups **groups_p)
{
	struct groups *groups = mem_zalloc(sizeof(*groups));
	struct groups_directory *main;
	int r;

	*groups_p = groups;
	if (!groups)
		return err_pass(-ENOMEM);
	groups->kvd = kvd;
	groups->loop = kvd->loop;
	groups->lease_ns = kvd->config->cluster_lease_ns;
	snprintf(groups->endpoint, sizeof(groups->endpoint), "%s", kvd->link->endpoint);
	snprintf(groups->where, sizeof(groups->where), "%s", kvd->config->cluster);
	list_init(&groups->directories);
	list_init(&groups->places);
	list_init(&groups->calls);
	list_init(&groups->caches);
	strmap_init(&groups->places_by_key);
	loop_timer_init(&groups->idle, kvd->loop, on_idle);
	loop_timer_init(&groups->fresh, kvd->loop, on_fresh);
	r = groups_board(groups);
	if (r == 0)
		r = groups_directory_new(groups, "", groups->where, &main);
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
	while ((call = list_first(&groups->calls, struct groups_call, link)))
		groups_call_finish(call, why, NULL);
	list_foreach_safe(place, &groups->places, link)
		groups_place_free(place);
	loop_timer_stop(&groups->fresh);
}

void groups_free(struct groups *groups)
{
	struct groups_directory *from;
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
	list_foreach_safe(from, &groups->directories, link)
		groups_directory_free(from);
	board_free(groups->board);
	strmap_fini(&groups->places_by_key);
	loop_timer_stop(&groups->idle);
	loop_timer_stop(&groups->fresh);
	mem_free(groups);
}
