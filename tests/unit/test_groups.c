/* SPDX-License-Identifier: Apache-2.0 */
/* Groups of a cluster that shares a directory, through the public commands:
 * places, queries by revision, sources by name, what goes and what stays. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/groups_impl.h"
#include "daemon/cluster/record.h"
#include "daemon/cluster/trust.h"
#include "daemon/peer/peer.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "daemon/store/homes.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/members.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/directory_hub.h"

#define S LOOP_NS_PER_S
#define MS LOOP_NS_PER_MS
#define NODES 3

static struct cluster c;
static struct session *engine[NODES];

static void with_directory(struct config *config)
{
	strcpy(config->cluster, "etcd://10.0.0.9");
	config->cluster_lease_ns = 2 * S;
}

static int setup(void **state)
{
	(void)state;
	cluster_configure(with_directory);
	directory_hub_share(2 * S);
	cluster_new(&c, 1, NODES);
	cluster_configure(NULL);
	directory_hub_share(0);
	cluster_run(&c, S);
	for (unsigned int i = 0; i < NODES; i++)
		engine[i] = cluster_engine(&c, i, "engine");
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	cluster_free(&c);
	return 0;
}

/* ---- answers ---- */

static unsigned int ranks_in(const cJSON *answer)
{
	return (unsigned int)cJSON_GetArraySize(
		cJSON_GetObjectItemCaseSensitive(answer, "ranks"));
}

static unsigned int gone_in(const cJSON *answer)
{
	return (unsigned int)cJSON_GetArraySize(
		cJSON_GetObjectItemCaseSensitive(answer, "gone"));
}

static const char *text_in(const cJSON *json, const char *name)
{
	const char *text =
		cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(json, name));

	return text ? text : "none";
}

static bool flag_in(const cJSON *answer, const char *name)
{
	return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(answer, name));
}

static const cJSON *rank_of(const cJSON *answer, const char *worker)
{
	const cJSON *rank;

	cJSON_ArrayForEach(rank, cJSON_GetObjectItemCaseSensitive(answer, "ranks")) {
		if (strcmp(text_in(rank, "worker"), worker) == 0)
			return rank;
	}
	return NULL;
}

static double revision_of(const cJSON *answer)
{
	return cJSON_GetObjectItemCaseSensitive(answer, "revision")->valuedouble;
}

static cJSON *since(unsigned int node, double revision)
{
	return cluster_call(&c, engine[node],
			    "{'cmd':'group.query','group':'g','loads':true,'since':%.0f}",
			    revision);
}

/* ---- cases ---- */

static void query_since_revision_has_changes(void **state)
{
	cJSON *answer;
	double revision;

	(void)state;
	cluster_ok(&c, engine[1],
		   "{'cmd':'group.publish','group':'g','worker':'a','pool':'kv',"
		   "'url':'http://h:1','engine':'vllm','model':'m'}");
	answer = since(2, 0);
	assert_true(flag_in(answer, "whole"));
	assert_int_equal(ranks_in(answer), 1);
	assert_string_equal(text_in(rank_of(answer, "a"), "url"), "http://h:1");
	assert_string_equal(text_in(rank_of(answer, "a"), "pool"), "kv");
	assert_string_equal(text_in(rank_of(answer, "a"), "state"), "serving");
	cJSON_Delete(answer);
	cluster_run(&c, 100 * MS);
	answer = since(2, 0);
	revision = revision_of(answer);
	assert_true(flag_in(answer, "synced") && flag_in(answer, "complete"));
	cJSON_Delete(answer);
	/* nothing new */
	answer = since(2, revision);
	assert_false(flag_in(answer, "whole"));
	assert_int_equal(ranks_in(answer) + gone_in(answer), 0);
	assert_true(revision_of(answer) == revision);
	cJSON_Delete(answer);
	/* one comes, one changes, a load does */
	cluster_ok(&c, engine[0],
		   "{'cmd':'group.publish','group':'g','worker':'b','tp_size':2}");
	assert_int_equal(groups_load(groups_of(&c.nodes[1].kvd), engine[1]->id,
				     "{\"v\":1,\"seq\":3}"),
			 0);
	cluster_run(&c, 100 * MS);
	answer = since(2, revision);
	assert_int_equal(ranks_in(answer), 2);
	assert_false(flag_in(answer, "complete")); /* b has one rank of two */
	assert_non_null(cJSON_GetObjectItemCaseSensitive(rank_of(answer, "a"), "load"));
	assert_null(cJSON_GetObjectItemCaseSensitive(rank_of(answer, "b"), "load"));
	revision = revision_of(answer);
	cJSON_Delete(answer);
	/* the end of a session is the end of its ranks */
	cluster_engine_dies(&c, engine[1]);
	cluster_run(&c, 100 * MS);
	answer = since(2, revision);
	assert_int_equal(ranks_in(answer), 0);
	assert_int_equal(gone_in(answer), 1);
	cJSON_Delete(answer);
	/* of another time: all anew */
	answer = since(2, 1);
	assert_true(flag_in(answer, "whole"));
	assert_int_equal(ranks_in(answer), 1);
	cJSON_Delete(answer);
	engine[1] = cluster_engine(&c, 1, "engine");
}

static bool is_complete(void)
{
	cJSON *answer = cluster_call(&c, engine[2], "{'cmd':'group.query','group':'g'}");
	bool complete = flag_in(answer, "complete");

	cJSON_Delete(answer);
	return complete;
}

static void group_is_complete_when_each_worker_is(void **state)
{
	static const char rank[] =
		"{'cmd':'group.publish','group':'g','worker':'%s','tp_rank':%u,"
		"'tp_size':2,'dp_size':%u}";

	(void)state;
	/* as many as two whole ones have, but none is */
	cluster_ok(&c, engine[0], rank, "a", 0, 1);
	assert_false(is_complete());
	cluster_ok(&c, engine[1], rank, "b", 1, 1);
	assert_false(is_complete());
	cluster_ok(&c, engine[0], rank, "a", 1, 1);
	assert_false(is_complete());
	cluster_ok(&c, engine[1], rank, "b", 0, 1);
	assert_true(is_complete());
	/* more than it has, and then as it was */
	cluster_ok(&c, engine[1], rank, "b", 0, 2);
	assert_false(is_complete());
	cluster_ok(&c, engine[1], rank, "b", 0, 1);
	assert_true(is_complete());
	cluster_engine_dies(&c, engine[1]);
	cluster_run(&c, 100 * MS);
	assert_true(is_complete()); /* what is left */
	engine[1] = cluster_engine(&c, 1, "engine");
}

static void places_are_checked(void **state)
{
	(void)state;
	cluster_refused(&c, engine[0], "EPERM",
			"{'cmd':'group.publish','group':'kvd.daemons'}");
	cluster_refused(&c, engine[0], "EINVAL",
			"{'cmd':'group.publish','group':'g','worker':'-'}");
	cluster_refused(&c, engine[0], "EINVAL",
			"{'cmd':'group.publish','group':'g','url':'ftp://x'}");
	cluster_refused(&c, engine[0], "EINVAL",
			"{'cmd':'group.publish','group':'g','tp_rank':2,'tp_size':2}");
	cluster_ok(&c, engine[0], "{'cmd':'group.publish','group':'g'}");
	/* of two sessions of a daemon, and of two daemons */
	struct session *other = cluster_engine(&c, 0, "other");

	cluster_refused(&c, other, "EEXIST", "{'cmd':'group.publish','group':'g'}");
	cluster_refused(&c, engine[1], "EEXIST", "{'cmd':'group.publish','group':'g'}");
	cluster_ok(&c, engine[0],
		   "{'cmd':'group.publish','group':'g','summary':'again'}");
	cluster_engine_dies(&c, engine[0]);
	cluster_ok(&c, engine[1], "{'cmd':'group.publish','group':'g'}");
	engine[0] = cluster_engine(&c, 0, "engine");
}

static void many_places_of_one_session_are_bounded(void **state)
{
	struct session *other = cluster_engine(&c, 1, "other");

	(void)state;
	for (unsigned int i = 0; i < GROUPS_SESSION_PLACES_MAX; i++)
		cluster_ok(&c, engine[1],
			   "{'cmd':'group.publish','group':'g','tp_rank':%u,"
			   "'tp_size':2000}",
			   i);
	cluster_refused(
		&c, engine[1], "ELIMIT",
		"{'cmd':'group.publish','group':'g','tp_rank':1999,'tp_size':2000}");
	cluster_ok(&c, other,
		   "{'cmd':'group.publish','group':'g','tp_rank':1999,'tp_size':2000}");
	cJSON *answer = cluster_call(&c, engine[2], "{'cmd':'group.query','group':'g'}");

	assert_int_equal(ranks_in(answer), GROUPS_SESSION_PLACES_MAX + 1);
	cJSON_Delete(answer);
}

static unsigned int draining_in(const char *group)
{
	cJSON *answer =
		cluster_call(&c, engine[2], "{'cmd':'group.query','group':'%s'}", group);
	unsigned int draining = 0;
	const cJSON *rank;

	cJSON_ArrayForEach(rank, cJSON_GetObjectItemCaseSensitive(answer, "ranks"))
		draining += strcmp(text_in(rank, "state"), "draining") == 0;
	cJSON_Delete(answer);
	return draining;
}

static void every_daemon_has_an_entry(void **state)
{
	cJSON *answer = cluster_call(&c, engine[2],
				     "{'cmd':'group.query','group':'kvd.daemons'}");
	const cJSON *rank;

	(void)state;
	assert_int_equal(ranks_in(answer), NODES);
	cJSON_ArrayForEach(rank, cJSON_GetObjectItemCaseSensitive(answer, "ranks")) {
		assert_string_equal(text_in(rank, "worker"), text_in(rank, "instance"));
		assert_string_equal(text_in(rank, "state"), "serving");
	}
	cJSON_Delete(answer);
	for (unsigned int i = 0; i < 3; i++)
		cluster_ok(&c, engine[1],
			   "{'cmd':'group.publish','group':'g','worker':'%c'}", 'a' + i);
	loop_virtual_parts(c.loop, 1);
	groups_drain(groups_of(&c.nodes[1].kvd));
	cluster_run(&c, 100 * MS);
	loop_virtual_parts(c.loop, 0);
	assert_int_equal(draining_in("kvd.daemons"), 1);
	assert_int_equal(draining_in("g"), 3);
}

static void directory_unavailable_keeps_cached_entries(void **state)
{
	cJSON *answer;
	double revision;

	(void)state;
	cluster_ok(&c, engine[1], "{'cmd':'group.publish','group':'g','worker':'a'}");
	cJSON_Delete(since(2, 0));
	cluster_run(&c, 3 * S); /* its load has been told, too */
	answer = since(2, 0);
	revision = revision_of(answer);
	cJSON_Delete(answer);
	directory_hub_away(c.directory, true);
	cluster_run(&c, 10 * S);
	answer = since(2, revision);
	assert_false(flag_in(answer, "synced"));
	assert_false(flag_in(answer, "whole"));
	assert_int_equal(gone_in(answer), 0);
	cJSON_Delete(answer);
	answer = cluster_call(&c, engine[2], "{'cmd':'group.query','group':'g'}");
	assert_int_equal(ranks_in(answer), 1);
	assert_false(flag_in(answer, "synced"));
	cJSON_Delete(answer);
	answer = cluster_call(&c, engine[2], "{'cmd':'health'}");
	assert_string_equal(text_in(answer, "state"), "degraded");
	assert_non_null(strstr(text_in(answer, "why"), "directory unavailable"));
	cJSON_Delete(answer);
	directory_hub_away(c.directory, false);
	cluster_run(&c, S);
	answer = since(2, revision);
	assert_true(flag_in(answer, "synced"));
	assert_int_equal(ranks_in(answer) + gone_in(answer), 0);
	cJSON_Delete(answer);
	answer = cluster_call(&c, engine[2], "{'cmd':'health'}");
	assert_string_equal(text_in(answer, "state"), "serving");
	cJSON_Delete(answer);
}

/* ---- sources by name ---- */

static struct cache caches[2];

static void make_caches(void)
{
	caches[0] = caches[1] = cluster_geometry;
	cluster_cache(&c, engine[1], "kv", 0, &caches[0]);
	cluster_cache(&c, engine[2], "kv", 0, &caches[1]);
}

static void open_recv(unsigned long long room, const char *source)
{
	cluster_ok(&c, engine[2],
		   "{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,"
		   "'sources':[%s],'timeouts':{'bootstrap_ms':20000}}",
		   room, (unsigned long long)caches[1].pool, source);
	cluster_ok(&c, engine[2],
		   "{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[3,4]}}}",
		   room);
}

static void send_it(unsigned long long room)
{
	cluster_ok(&c, engine[1],
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu}", room,
		   (unsigned long long)caches[0].pool);
	cluster_ok(&c, engine[1],
		   "{'cmd':'room.send','room':'%llu','seq':0,'last':true,'views':{'kv':{"
		   "'pages':[1,2]}}}",
		   room);
}

static void pool_in_answer(const char *group, const char *worker, unsigned int pages,
			   unsigned int page_tokens)
{
	cJSON *answer =
		cluster_call(&c, engine[2], "{'cmd':'group.query','group':'%s'}", group);
	const cJSON *pool = cJSON_GetArrayItem(
		cJSON_GetObjectItemCaseSensitive(rank_of(answer, worker), "pools"), 0);

	assert_non_null(pool);
	assert_int_equal(cJSON_GetObjectItemCaseSensitive(pool, "pages")->valuedouble,
			 pages);
	assert_int_equal(
		cJSON_GetObjectItemCaseSensitive(pool, "page_tokens")->valuedouble,
		page_tokens);
	assert_int_equal(strlen(text_in(pool, "digest")), pages ? 16 : 4); /* none */
	assert_string_equal(text_in(pool, "model"), "m");
	cJSON_Delete(answer);
}

static void place_has_the_figures_of_its_pool(void **state)
{
	const unsigned int pages = cluster_geometry.pages;
	const unsigned int tokens = cluster_geometry.page_tokens;

	(void)state;
	/* before its pool, and more than are looked at in a turn */
	for (unsigned int i = 0; i < 40; i++)
		cluster_ok(
			&c, engine[1],
			"{'cmd':'group.publish','group':'g','worker':'w%u','pool':'kv',"
			"'model':'m'}",
			i);
	cluster_ok(&c, engine[1],
		   "{'cmd':'group.publish','group':'g','worker':'other','pool':'no',"
		   "'model':'m'}");
	pool_in_answer("g", "w0", 0, 0);
	make_caches();
	cluster_run(&c, 2 * S);
	pool_in_answer("g", "w0", pages, tokens);
	pool_in_answer("g", "w39", pages, tokens);
	pool_in_answer("g", "other", 0, 0);
	/* after it; another session's pool is not its own */
	cluster_ok(&c, engine[1],
		   "{'cmd':'group.publish','group':'h','worker':'w','pool':'kv',"
		   "'model':'m'}");
	pool_in_answer("h", "w", pages, tokens);
	cluster_ok(&c, engine[0],
		   "{'cmd':'group.publish','group':'h','worker':'x','pool':'kv',"
		   "'model':'m'}");
	cluster_run(&c, 2 * S);
	pool_in_answer("h", "x", 0, 0);
	/* again with another name */
	cluster_ok(&c, engine[1],
		   "{'cmd':'group.publish','group':'g','worker':'w0','pool':'no',"
		   "'model':'m'}");
	cluster_run(&c, 2 * S);
	pool_in_answer("g", "w0", 0, 0);
	cache_close(&caches[0]);
	cache_close(&caches[1]);
}

static void room_finds_source_published_later(void **state)
{
	cJSON *answer;

	(void)state;
	make_caches();
	open_recv(1, "{'group':'prefill'}");
	/* longer than connect_timeout: nobody is named yet who could be late */
	cluster_run(&c, 15 * S);
	assert_int_equal(cluster_state(&c, engine[2], "recv", 1), 1);
	answer = cluster_call(&c, engine[2], "{'cmd':'room.show','room':'1'}");
	assert_non_null(strstr(
		text_in(cJSON_GetObjectItemCaseSensitive(answer, "waits_for"), "what"),
		"group 'prefill' rank 0.0.0.0: not in the directory"));
	cJSON_Delete(answer);
	cluster_ok(&c, engine[1],
		   "{'cmd':'group.publish','group':'prefill','worker':'w','pool':'kv'}");
	send_it(1);
	cluster_until_state(&c, engine[2], "recv", 1, 4);
	/* found at once, and what changes afterwards does not touch it */
	open_recv(2, "{'group':'prefill','worker':'w'}");
	cluster_run(&c, S);
	groups_drain(groups_of(&c.nodes[1].kvd));
	open_recv(3, "{'group':'prefill'}"); /* draining ones are found, too */
	cluster_run(&c, S);
	groups_session_gone(groups_of(&c.nodes[1].kvd), engine[1]->id);
	cluster_run(&c, S);
	send_it(2);
	send_it(3);
	cluster_until_state(&c, engine[2], "recv", 2, 4);
	cluster_until_state(&c, engine[2], "recv", 3, 4);
	cache_close(&caches[0]);
	cache_close(&caches[1]);
}

static void source_never_published_is_named(void **state)
{
	(void)state;
	make_caches();
	open_recv(5, "{'group':'prefill','worker':'w','tp_rank':1}");
	cluster_run(&c, 25 * S);
	room_failed_with(rooms_find(rooms_of(&c.nodes[2].kvd), engine[2], ROOM_RECV, 5),
			 ERR_TIMEOUT, "group 'prefill' worker 'w' rank 1.0.0.0");
	cache_close(&caches[0]);
	cache_close(&caches[1]);
}

static void group_of_several_workers_wants_one_named(void **state)
{
	(void)state;
	make_caches();
	cluster_ok(&c, engine[1],
		   "{'cmd':'group.publish','group':'prefill','worker':'v'}");
	cluster_ok(&c, engine[1],
		   "{'cmd':'group.publish','group':'prefill','worker':'w'}");
	open_recv(1, "{'group':'prefill'}"); /* not known here yet */
	cluster_run(&c, S);
	room_failed_with(rooms_find(rooms_of(&c.nodes[2].kvd), engine[2], ROOM_RECV, 1),
			 ERR_INVAL, "several workers; name one in `worker`");
	cluster_refused(
		&c, engine[2], "EINVAL",
		"{'cmd':'room.open','room':'2','role':'recv','pool':%llu,'sources':["
		"{'group':'prefill'}]}",
		(unsigned long long)caches[1].pool);
	cluster_refused(
		&c, engine[2], "EINVAL",
		"{'cmd':'room.open','room':'2','role':'recv','pool':%llu,'sources':["
		"{'group':'prefill','endpoint':'tcp://10.0.0.2:7400'}]}",
		(unsigned long long)caches[1].pool);
	cluster_refused(
		&c, engine[2], "EINVAL",
		"{'cmd':'room.open','room':'2','role':'recv','pool':%llu,'sources':["
		"{'worker':'w','endpoint':'tcp://10.0.0.2:7400'}]}",
		(unsigned long long)caches[1].pool);
	cluster_refused(
		&c, engine[2], "EINVAL",
		"{'cmd':'room.open','room':'2','role':'recv','pool':%llu,'sources':["
		"{'pool':'kv'}]}",
		(unsigned long long)caches[1].pool);
	open_recv(3, "{'group':'prefill','worker':'w'}");
	send_it(3);
	cluster_until_state(&c, engine[2], "recv", 3, 4);
	cache_close(&caches[0]);
	cache_close(&caches[1]);
}

/* ---- homes ---- */

static unsigned int homes_of(unsigned int node)
{
	return members_count(homes_members(store_of(&c.nodes[node].kvd)->homes));
}

static void homes_of_chunks_follow_the_directory(void **state)
{
	const struct cluster_store_args args = {.memory_bytes = 1 << 20};

	(void)state;
	for (unsigned int i = 0; i < NODES; i++) {
		strcpy(c.nodes[i].config.chunk_index, "cluster");
		assert_true(cluster_store(&c, i, &args));
	}
	cluster_run(&c, 3 * S);
	for (unsigned int i = 0; i < NODES; i++)
		assert_int_equal(homes_of(i), NODES);
	/* in one order everywhere */
	for (unsigned int i = 0; i < NODES; i++)
		assert_string_equal(
			members_endpoint(homes_members(store_of(&c.nodes[i].kvd)->homes),
					 1),
			c.nodes[1].endpoint);
	/* without memory for them they are what they were */
	for (unsigned int i = 1; i < 10; i++) {
		struct loop_timer *timer = &store_of(&c.nodes[2].kvd)->homes->group.timer;

		mem_fail_at(i);
		timer->on_timer(timer);
		mem_fail_at(0);
		assert_int_equal(homes_of(2), NODES);
	}
	/* one that drains, and one that dies when its lease is over */
	groups_drain(groups_of(&c.nodes[1].kvd));
	cluster_run(&c, 3 * S);
	assert_int_equal(homes_of(2), 2);
	cluster_crash(&c, 1, MEM_CRASH_KILLED);
	cluster_run(&c, 10 * S);
	assert_int_equal(homes_of(2), 2);
	/* the directory's end leaves them */
	directory_hub_away(c.directory, true);
	cluster_run(&c, 10 * S);
	assert_int_equal(homes_of(2), 2);
}

static void groups_unused_are_evicted(void **state)
{
	struct groups *groups = groups_of(&c.nodes[2].kvd);
	static struct names_user user[GROUPS_CACHES_MAX + 1];
	char name[32];

	(void)state;
	memset(user, 0, sizeof(user));
	for (unsigned int i = 0; i < GROUPS_CACHES_MAX + 100; i++) {
		struct names_user once = {.on_change = NULL};

		snprintf(name, sizeof(name), "asked once %u", i);
		assert_int_equal(groups_use(groups, name, false, &once), 0);
		groups_unuse(&once);
	}
	/* those in use stay, and then it is enough */
	for (unsigned int i = 0; i < GROUPS_CACHES_MAX; i++) {
		snprintf(name, sizeof(name), "used %u", i);
		assert_int_equal(groups_use(groups, name, false, &user[i]), 0);
	}
	assert_true(groups_use(groups, "one more", false, &user[GROUPS_CACHES_MAX]) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	groups_unuse(&user[7]);
	assert_int_equal(groups_use(groups, "one more", false, &user[GROUPS_CACHES_MAX]),
			 0);
	for (unsigned int i = 0; i <= GROUPS_CACHES_MAX; i++)
		groups_unuse(&user[i]);
	cluster_run(&c, 2 * S);
}

static void entry_refused_is_published_again(void **state)
{
	struct directory *directory = groups_of(&c.nodes[0].kvd)->directory;
	struct publication squat = {.on_done = NULL};
	struct place place = {.group = "kvd.homes"};
	struct names_user user = {.on_change = NULL};

	(void)state;
	hex_write(peers_instance(c.nodes[1].kvd.peers), 16, place.worker);
	assert_int_equal(directory->ops->publish(directory, &squat, &place, "{}", NULL),
			 0);
	cluster_run(&c, 100 * MS);
	groups_be_home(groups_of(&c.nodes[1].kvd));
	cluster_run(&c, 5 * S);
	directory->ops->withdraw(&squat);
	cluster_run(&c, 5 * S);
	assert_int_equal(
		groups_use(groups_of(&c.nodes[2].kvd), place.group, false, &user), 0);
	cluster_run(&c, S);
	assert_non_null(roster_find(groups_roster(&user), &place));
	groups_unuse(&user);
}

/* ---- forged entries ---- */

static void forged(const char *group, const char *worker, const char *record)
{
	struct groups *groups = groups_of(&c.nodes[1].kvd);
	struct directory *directory = groups->directory;
	static struct publication publication[16];
	static unsigned int used;
	struct place place = {.worker = ""};

	assert_in_range(used, 0, 15);
	strcpy(place.group, group);
	strcpy(place.worker, worker);
	memset(&publication[used], 0, sizeof(publication[used]));
	assert_int_equal(directory->ops->publish(directory, &publication[used++], &place,
						 record, NULL),
			 0);
	cluster_run(&c, 100 * MS);
}

#define HEAD "{\"v\":1,\"instance\":\"00112233445566778899aabbccddeeff\","
#define AT "\"endpoint\":\"tcp://10.0.0.3:1\""

static void forged_records_are_not_used(void **state)
{
	static char deep[3000], wide[4000];
	cJSON *answer;

	(void)state;
	for (unsigned int i = 0; i < 500; i++)
		strcat(deep, "[");
	snprintf(wide, sizeof(wide), HEAD AT ",\"url\":\"http://%03000d\"}", 0);
	forged("g", "no-json", "}{");
	forged("g", "deep", deep);
	forged("g", "wide", wide);
	forged("g", "later", "{\"v\":2," AT "}");
	forged("g", "nowhere", HEAD "\"endpoint\":\"file:///etc/passwd\"}");
	forged("g", "key", HEAD AT ",\"key\":\"short\"}");
	forged("g", "escape", HEAD AT ",\"name\":\"a\\u001b[2J\"}");
	forged("g", "type", HEAD AT ",\"pools\":7}");
	forged("g", "twice", HEAD AT "," AT "}");
	forged("g", "size", HEAD AT ",\"size\":{\"tp\":0}}");
	forged("g", "good", HEAD AT ",\"of a later release\":[1,{\"x\":2}]}");
	answer = cluster_call(&c, engine[2], "{'cmd':'group.query','group':'g'}");
	assert_int_equal(ranks_in(answer), 1);
	assert_non_null(rank_of(answer, "good"));
	cJSON_Delete(answer);
	answer = cluster_call(&c, engine[2], "{'cmd':'cluster.show'}");
	assert_true(strtoul(text_in(answer, "refused"), NULL, 10) >= 10);
	cJSON_Delete(answer);
}

/* ---- cluster_trust = directory ---- */

#define TRUSTED 300u

static struct trust_test {
	struct trust *trust;
	const struct link_vouch *vouch;
	unsigned int changes;
	struct publication said[TRUSTED + 1];
} tt;

static void on_trust(void *arg)
{
	((struct trust_test *)arg)->changes++;
}

static void trust_begin(void)
{
	tt = (struct trust_test){.trust = NULL};
	assert_int_equal(trust_new(groups_of(&c.nodes[1].kvd), on_trust, &tt, &tt.trust),
			 0);
	tt.vouch = trust_vouch(tt.trust);
}

static const char *key_of(unsigned int i)
{
	static char key[RECORD_KEY_CHARS + 1];

	snprintf(key, sizeof(key), "%040u", i);
	return key;
}

/* A node says that the key is its own, at an endpoint. */
static void key_sent(unsigned int node, struct publication *said, const char *key,
		     const char *endpoint)
{
	const struct kvd *kvd = &c.nodes[node].kvd;
	struct directory *directory = groups_of(kvd)->directory;
	struct place place = {.worker = ""};
	char record[DIRECTORY_RECORD_MAX];

	trust_group(key, place.group);
	hex_write(peers_instance(kvd->peers), 16, place.worker);
	snprintf(record, sizeof(record),
		 "{\"v\":1,\"instance\":\"%s\",\"endpoint\":\"%s\",\"key\":\"%s\"}",
		 place.worker, endpoint, key);
	assert_int_equal(directory->ops->publish(directory, said, &place, record, NULL),
			 0);
}

static bool trust_asked(unsigned int i)
{
	bool looked = tt.vouch->ask(tt.vouch->owner, key_of(i));

	cluster_run(&c, 50 * MS);
	return looked && tt.vouch->knows(tt.vouch->owner, key_of(i));
}

static void keys_removed_free_space(void **state)
{
	struct directory *directory = groups_of(&c.nodes[1].kvd)->directory;
	struct record *record = calloc(1, sizeof(*record));

	(void)state;
	trust_begin();
	record_init(record);
	strcpy(record->endpoint, "tcp://10.0.0.9:1");
	for (unsigned int i = 0; i < TRUSTED; i++) {
		key_sent(1, &tt.said[i], key_of(i), "tcp://10.0.0.9:1");
		assert_true(trust_asked(i));
		/* some are dialled, too */
		strcpy(record->key, key_of(i));
		if (i % 2)
			assert_int_equal(trust_dial(tt.trust, record), 0);
	}
	cluster_run(&c, 30 * S);
	assert_true(tt.vouch->knows(tt.vouch->owner, key_of(0)));
	for (unsigned int i = 0; i < TRUSTED; i++)
		directory->ops->withdraw(&tt.said[i]);
	cluster_run(&c, 100 * MS);
	assert_false(tt.vouch->knows(tt.vouch->owner, key_of(0)));
	assert_true(tt.vouch->knows(tt.vouch->owner, key_of(1)));
	assert_true(tt.vouch->at(tt.vouch->owner, key_of(1), "tcp://10.0.0.9:1"));
	assert_false(tt.vouch->at(tt.vouch->owner, key_of(1), "tcp://10.0.0.8:1"));
	cluster_run(&c, 30 * S);
	key_sent(1, &tt.said[TRUSTED], key_of(TRUSTED), "tcp://10.0.0.9:1");
	assert_true(trust_asked(TRUSTED));
	trust_free(tt.trust);
	free(record);
}

static void lookups_of_unknown_keys_are_bounded(void **state)
{
	unsigned int looked = 0;

	(void)state;
	trust_begin();
	for (unsigned int i = 0; i < 1000; i++)
		looked += tt.vouch->ask(tt.vouch->owner, key_of(i));
	assert_in_range(looked, 1, 256);
	cluster_run(&c, 30 * S);
	assert_true(tt.vouch->ask(tt.vouch->owner, key_of(1000)));
	cluster_run(&c, S);
	for (unsigned int i = 0; i <= 1000; i++)
		assert_false(tt.vouch->knows(tt.vouch->owner, key_of(i)));
	trust_free(tt.trust);
}

static void key_of_cached_group_is_answered_at_once(void **state)
{
	struct names_user user = {.on_change = NULL};
	char group[PLACE_GROUP_MAX];

	(void)state;
	trust_begin();
	key_sent(1, &tt.said[0], key_of(3), "tcp://10.0.0.9:1");
	trust_group(key_of(3), group);
	assert_int_equal(groups_use(groups_of(&c.nodes[1].kvd), group, false, &user), 0);
	cluster_run(&c, S);
	assert_false(tt.vouch->knows(tt.vouch->owner, key_of(3)));
	assert_false(tt.vouch->ask(tt.vouch->owner, key_of(3)));
	assert_true(tt.vouch->knows(tt.vouch->owner, key_of(3)));
	groups_unuse(&user);
	trust_free(tt.trust);
}

static void key_of_a_daemon_started_again_has_two_entries(void **state)
{
	const char *key = key_of(7);

	(void)state;
	trust_begin();
	key_sent(1, &tt.said[0], key, "tcp://10.0.0.9:1");
	cluster_run(&c, 100 * MS);
	key_sent(2, &tt.said[1], key, "tcp://10.0.0.9:2");
	cluster_run(&c, 100 * MS);
	assert_true(trust_asked(7));
	assert_true(tt.vouch->at(tt.vouch->owner, key, "tcp://10.0.0.9:1"));
	assert_true(tt.vouch->at(tt.vouch->owner, key, "tcp://10.0.0.9:2"));
	assert_false(tt.vouch->at(tt.vouch->owner, key, "tcp://10.0.0.9:3"));
	trust_free(tt.trust);
}

static void loads_with_line_breaks_stay_out_of_answers(void **state)
{
	static const char *const loads[] = {"{\"v\":1,\"x\":\n{\"id\":9,\"ok\":true}\n}",
					    "{\"v\":1}\r\n", "\n{}", "{\"v\":\t1}"};
	cJSON *answer;

	(void)state;
	cluster_ok(&c, engine[1], "{'cmd':'group.publish','group':'g','worker':'a'}");
	for (size_t i = 0; i < ARRAY_LEN(loads); i++) {
		assert_int_equal(
			groups_load(groups_of(&c.nodes[1].kvd), engine[1]->id, loads[i]),
			0);
		cluster_run(&c, 100 * MS);
		answer = cluster_call(&c, engine[2],
				      "{'cmd':'group.query','group':'g','loads':true}");
		assert_int_equal(ranks_in(answer), 1);
		assert_null(
			cJSON_GetObjectItemCaseSensitive(rank_of(answer, "a"), "load"));
		cJSON_Delete(answer);
	}
}

static void record_roundtrip_is_equal(void **state)
{
	struct record *a = calloc(1, sizeof(*a)), *b = calloc(1, sizeof(*b));
	char text[DIRECTORY_RECORD_MAX], cut[DIRECTORY_RECORD_MAX];

	(void)state;
	record_init(a);
	strcpy(a->instance, "00112233445566778899aabbccddeeff");
	strcpy(a->endpoint, "tcp://[fe80::1]:7400");
	strcpy(a->key, "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7");
	strcpy(a->summary, "\"quoted\" \\ and \xc3\xa9");
	strcpy(a->transports[a->transport_count++], "tcp");
	a->size[PLACE_CP] = 4;
	a->draining = true;
	for (a->pool_count = 0; a->pool_count < RECORD_POOLS_MAX; a->pool_count++) {
		snprintf(a->pools[a->pool_count].name, 64, "pool %u", a->pool_count);
		strcpy(a->pools[a->pool_count].digest, "0123456789abcdef");
		a->pools[a->pool_count].pages = UINT64_C(1) << 40;
	}
	assert_int_equal(record_make(a, text), 0);
	assert_int_equal(record_read(text, b), 0);
	assert_string_equal(a->summary, b->summary);
	assert_string_equal(a->key, b->key);
	assert_true(b->draining);
	assert_int_equal(b->size[PLACE_CP], 4);
	assert_int_equal(b->pool_count, RECORD_POOLS_MAX);
	assert_true(b->pools[7].pages == UINT64_C(1) << 40);
	/* cut anywhere it is none */
	for (size_t len = 0; text[len]; len++) {
		memcpy(cut, text, len);
		cut[len] = '\0';
		assert_true(record_read(cut, b) < 0);
		assert_int_equal(err_last()->code, ERR_PROTO);
	}
	/* what is too much is left out at the end, or refused */
	memset(a->summary, 's', sizeof(a->summary) - 1);
	for (unsigned int i = 0; i < RECORD_POOLS_MAX; i++)
		memset(a->pools[i].model, 'm', sizeof(a->pools[i].model) - 1);
	assert_int_equal(record_make(a, text), 0);
	assert_int_equal(record_read(text, b), 0);
	assert_in_range(b->pool_count, 1, RECORD_POOLS_MAX - 1);
	free(a);
	free(b);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(query_since_revision_has_changes),
		TEST(group_is_complete_when_each_worker_is),
		TEST(places_are_checked),
		TEST(many_places_of_one_session_are_bounded),
		TEST(every_daemon_has_an_entry),
		TEST(directory_unavailable_keeps_cached_entries),
		TEST(place_has_the_figures_of_its_pool),
		TEST(room_finds_source_published_later),
		TEST(source_never_published_is_named),
		TEST(group_of_several_workers_wants_one_named),
		TEST(homes_of_chunks_follow_the_directory),
		TEST(groups_unused_are_evicted),
		TEST(entry_refused_is_published_again),
		TEST(forged_records_are_not_used),
		TEST(loads_with_line_breaks_stay_out_of_answers),
		TEST(keys_removed_free_space),
		TEST(lookups_of_unknown_keys_are_bounded),
		TEST(key_of_cached_group_is_answered_at_once),
		TEST(key_of_a_daemon_started_again_has_two_entries),
		cmocka_unit_test(record_roundtrip_is_equal),
	};

	return cmocka_run_group_tests_name("groups", tests, NULL, NULL);
}
