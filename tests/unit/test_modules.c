/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The order of hooks. Spies are modules of a node's list, first and last, around those of
 * the daemon; each notes its calls. So a hook comes to all in the order of the list, one
 * that needs time holds up those behind it alone, and parts are freed in reverse.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/config/config.h"
#include "daemon/control/control.h"
#include "daemon/control/health.h"
#include "daemon/modules.h"
#include "daemon/request/ring_ops.h"
#include "daemon/room/rooms.h"
#include "daemon/session/status.h"
#include "daemon/transport/transport.h"
#include "tests/lib/cluster.h"
#include "tests/lib/tmp.h"
#include "tests/lib/xfer_pair.h"

static char noted[4096];

static void note(char spy, const char *hook)
{
	size_t len = strlen(noted);

	snprintf(noted + len, sizeof(noted) - len, "%c.%s ", spy, hook);
}

static void assert_noted(const char *text)
{
	assert_string_equal(noted, text);
	noted[0] = 0;
}

/* clang-format off */
#define SPY(c)                                                                          \
	static int c##_session_end(struct session *session)                             \
	{                                                                               \
		(void)session;                                                          \
		note(#c[0], "end");                                                     \
		return 0;                                                               \
	}                                                                               \
	static void c##_session_closing(struct session *session)                        \
	{                                                                               \
		(void)session;                                                          \
		note(#c[0], "closing");                                                 \
	}                                                                               \
	static void c##_session_gone(struct session *session)                           \
	{                                                                               \
		assert_true(session->ending);                                           \
		note(#c[0], "gone");                                                    \
	}                                                                               \
	static void c##_region_coming(struct session *session)                          \
	{                                                                               \
		(void)session;                                                          \
		note(#c[0], "region");                                                  \
	}                                                                               \
	static void c##_region_going(struct region *region)                             \
	{                                                                               \
		(void)region;                                                           \
		note(#c[0], "no_region");                                               \
	}                                                                               \
	static void c##_pool_coming(struct pool *pool)                                  \
	{                                                                               \
		assert_null(pool->handshake); /* no peer knows it yet */                \
		note(#c[0], "pool");                                                    \
	}                                                                               \
	static void c##_pool_going(struct pool *pool)                                   \
	{                                                                               \
		assert_non_null(pool->handshake); /* peers have it still */             \
		note(#c[0], "no_pool");                                                 \
	}                                                                               \
	static void c##_remote_up(struct remote *remote)                                \
	{                                                                               \
		(void)remote;                                                           \
		note(#c[0], "up");                                                      \
	}                                                                               \
	static void c##_remote_down(struct remote *remote, const struct err *why)       \
	{                                                                               \
		assert_ptr_not_equal(remote, NULL);                                     \
		assert_int_not_equal(why->code, ERR_OK);                                \
		note(#c[0], "down");                                                    \
	}                                                                               \
	static struct module c = {                                                      \
		.id = MODULES,                                                          \
		.session_end = c##_session_end,                                         \
		.session_closing = c##_session_closing,                                 \
		.session_gone = c##_session_gone,                                       \
		.region_coming = c##_region_coming,                                     \
		.region_going = c##_region_going,                                       \
		.pool_coming = c##_pool_coming,                                         \
		.pool_going = c##_pool_going,                                           \
		.remote_up = c##_remote_up,                                             \
		.remote_down = c##_remote_down,                                         \
	};
SPY(a)
SPY(z)
/* clang-format on */

/* One whose end takes time, when it is told so. */
#define SLOW ((enum module_id)(MODULES + 1))
static bool slow;

static int slow_session_end(struct session *session)
{
	(void)session;
	if (!slow)
		return 0;
	note('s', "end");
	return 1;
}

static const struct module slow_module = {.id = SLOW, .session_end = slow_session_end};

/* ---- entries of the ring ---- */

#define SPIED_OP 30u

static int spied_op(struct ring *ring, const struct kvd_ring_entry *entry,
		    struct ring_payload *arena)
{
	assert_ptr_equal(ring_of(ring->session), ring);
	assert_int_equal(arena->bytes, entry->bytes);
	note('a', "op");
	return 0;
}

static const struct ring_verb spied_verbs[] = {{SPIED_OP, spied_op}, {0, NULL}};

static bool a_ring_cancel(struct session *session, uint64_t id)
{
	(void)session;
	note('a', "cancel");
	return id == KVD_RING_IDS + 1;
}

static bool z_ring_cancel(struct session *session, uint64_t id)
{
	(void)session;
	(void)id;
	note('z', "cancel");
	return true;
}

static bool z_ring_release(struct session *session, uint64_t id)
{
	(void)session;
	(void)id;
	note('z', "release");
	return false;
}

static bool z_ring_has(const struct session *session, uint64_t id)
{
	(void)session;
	return id == KVD_RING_IDS + SESSION_SLOTS;
}

static const struct module *spied[MODULES + 4];
static struct module control; /* without a socket */
static struct cluster c;

static int setup(void **state)
{
	size_t n = 0;

	(void)state;
	control = (struct module){.id = MODULE_CONTROL,
				  .commands = control_module.commands,
				  .remote_change = control_module.remote_change};
	spied[n++] = &a;
	for (size_t i = 0; modules_built[i]; i++)
		spied[n++] =
			modules_built[i] == &control_module ? &control : modules_built[i];
	spied[n++] = &slow_module;
	spied[n++] = &z;
	slow = false;
	spied[n] = NULL;
	a.verbs = spied_verbs;
	a.ring_cancel = a_ring_cancel;
	z.ring_cancel = z_ring_cancel;
	z.ring_release = z_ring_release;
	z.ring_has = z_ring_has;
	noted[0] = 0;
	cluster_modules(spied);
	cluster_new(&c, 1, 2);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	cluster_free(&c);
	cluster_modules(NULL);
	return 0;
}

static void list_is_in_the_order_of_its_numbers(void **state)
{
	(void)state;
	for (unsigned int i = 0; modules_built[i]; i++) {
		assert_in_range(modules_built[i]->id, i, MODULES - 1);
		assert_true(i == 0 || modules_built[i]->id > modules_built[i - 1]->id);
	}
}

static void session_end_reaches_modules_in_order(void **state)
{
	struct session *engine = cluster_engine(&c, 0, "engine");
	struct cache cache = cluster_geometry;

	(void)state;
	cluster_cache(&c, engine, "kv", 0, &cache);
	assert_noted("a.region z.region a.pool z.pool ");
	cluster_engine_dies(&c, engine);
	cluster_run(&c, LOOP_NS_PER_S);
	assert_noted("a.closing z.closing a.end z.end a.no_pool z.no_pool "
		     "a.no_region z.no_region a.gone z.gone ");
	cache_close(&cache);
}

/* One that needs time holds up those behind it, and the session's pools and regions;
 * those before it have ended, and pages and seats were the engine's at once. */
static void end_of_a_session_waits_for_a_module(void **state)
{
	struct session *engine = cluster_engine(&c, 0, "engine");
	struct cache cache = cluster_geometry;

	(void)state;
	cluster_cache(&c, engine, "kv", 0, &cache);
	cluster_ok(&c, engine, "{'cmd':'room.open','role':'send','room':1,'pool':%llu}",
		   (unsigned long long)cache.pool);
	noted[0] = 0;
	slow = true;
	cluster_engine_dies(&c, engine);
	cluster_run(&c, LOOP_NS_PER_S);
	assert_noted("a.closing z.closing a.end s.end ");
	/* the rooms are before it in the list */
	assert_int_equal(rooms_count(rooms_of(&c.nodes[0].kvd)), 0);
	assert_int_equal(idmap_count(&engine->pools), 1);
	session_end_next(engine, SLOW);
	cluster_run(&c, LOOP_NS_PER_S);
	assert_noted("z.end a.no_pool z.no_pool a.no_region z.no_region a.gone z.gone ");
	cache_close(&cache);
}

static void peer_up_and_down_reach_modules_in_order(void **state)
{
	struct session *engine = cluster_engine(&c, 0, "engine");
	struct remote *remote;

	(void)state;
	cluster_ok(&c, engine, "{'cmd':'peer.connect','endpoint':'%s'}",
		   c.nodes[1].endpoint);
	cluster_run(&c, LOOP_NS_PER_S);
	assert_noted("a.up z.up a.up z.up "); /* on both nodes */
	remote = list_first(handshake_remotes(c.nodes[0].kvd.handshake), struct remote,
			    link);
	peer_kill(remote->peer, &(struct err){.code = ERR_PEER, .text = "for the test"});
	cluster_run(&c, LOOP_NS_PER_S);
	assert_non_null(strstr(noted, "a.down z.down a.down z.down "));
	noted[0] = 0;
}

/* ---- parts ---- */

static int spy_new(struct kvd *kvd, void **part_p)
{
	(void)kvd;
	note('n', "new");
	*part_p = noted;
	return 0;
}

static void submit(struct session *session, struct kvd_ring_entry entry, bool good)
{
	char *line = pair_line(&entry, "", 0);

	if (good)
		cluster_ok(&c, session, "%s", line);
	else
		cluster_refused(&c, session, "EPROTO", "%s", line);
	free(line);
}

static void entries_reach_the_module_of_the_op_or_number(void **state)
{
	struct session *engine = cluster_engine(&c, 0, "engine");

	(void)state;
	submit(engine, (struct kvd_ring_entry){.op = SPIED_OP}, true);
	assert_noted("a.op ");
	submit(engine, (struct kvd_ring_entry){.op = SPIED_OP + 1}, false);
	submit(engine, (struct kvd_ring_entry){.op = SPIED_OP + 64}, false);
	assert_noted("");
	/* who has it is the last that is asked */
	submit(engine,
	       (struct kvd_ring_entry){.op = KVD_RING_CANCEL, .a = KVD_RING_IDS + 1},
	       true);
	assert_noted("a.cancel ");
	submit(engine,
	       (struct kvd_ring_entry){.op = KVD_RING_CANCEL, .a = KVD_RING_IDS + 2},
	       true);
	assert_noted("a.cancel z.cancel ");
	/* a post on an object of another module breaks the protocol */
	assert_int_equal(
		status_slot_claim(engine->status, SESSION_SLOTS, 1, KVD_RING_IDS), 0);
	submit(engine,
	       (struct kvd_ring_entry){.op = KVD_RING_POST,
				       .a = KVD_RING_IDS + SESSION_SLOTS,
				       .gen = kvd_ring_next_gen(1)},
	       false);
	/* nobody has it: its slot is free again */
	submit(engine,
	       (struct kvd_ring_entry){.op = KVD_RING_RELEASE,
				       .a = KVD_RING_IDS + SESSION_SLOTS},
	       true);
	assert_noted("z.release ");
	assert_false(status_slot_claimed(engine->status, SESSION_SLOTS));
	cluster_engine_dies(&c, engine);
	noted[0] = 0;
}

static int spy_fails(struct kvd *kvd, void **part_p)
{
	(void)kvd;
	(void)part_p;
	note('f', "new");
	return err_raise(ERR_CONFIG, "for the test");
}

static void store_is_freed(void *part)
{
	assert_ptr_equal(part, noted);
	note('s', "free");
}

static void room_is_freed(void *part)
{
	assert_ptr_equal(part, noted);
	note('r', "free");
}

/* What was made is freed, in reverse; what was not is left alone. */
static void module_failed_stops_the_list(void **state)
{
	static const struct module room = {
		.id = MODULE_ROOM, .new = spy_new, .free = room_is_freed};
	static const struct module store = {
		.id = MODULE_STORE, .new = spy_new, .free = store_is_freed};
	static const struct module failing = {.id = MODULE_ATTEND, .new = spy_fails};
	static const struct module last = {.id = MODULE_CONTROL, .new = spy_new};
	static const struct module *const list[] = {&room, &store, &failing, &last, NULL};
	struct kvd kvd = {.modules = list};

	(void)state;
	noted[0] = 0;
	assert_true(modules_new(&kvd) < 0);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	assert_noted("n.new n.new f.new ");
	modules_free(&kvd);
	assert_noted("s.free r.free ");
	for (unsigned int i = 0; i < MODULES; i++)
		assert_null(kvd.part[i]);
	modules_free(&kvd);
	assert_noted("");
}

static bool spy_is_ill(const void *part, struct err *why_p)
{
	assert_ptr_equal(part, noted);
	err_set(why_p, ERR_IO, "for the test");
	return false;
}

static void module_unhealthy_degrades_the_daemon(void **state)
{
	static const struct module ill = {.id = MODULE_STORE, .health = spy_is_ill};
	static const struct module *const list[] = {&ill, NULL};
	struct kvd kvd = {.modules = list};
	struct err why = {.code = ERR_OK};

	(void)state;
	assert_int_equal(health_of(&kvd, &why), HEALTH_SERVING); /* switched off */
	kvd.part[MODULE_STORE] = noted;
	assert_int_equal(health_of(&kvd, &why), HEALTH_DEGRADED);
	assert_string_equal(why.text, "for the test");
}

static bool is_built(enum module_id id)
{
	for (unsigned int i = 0; modules_built[i]; i++) {
		if (modules_built[i]->id == id)
			return true;
	}
	return false;
}

static void option_is_refused_unless(bool built, const char *text, const char *name,
				     const char *words)
{
	static const char *const transports[] = {"shm", NULL};
	struct config_source source = {.transports = transports};
	char path[128];
	const char *option;
	static struct config config;
	int fd = mkstemp(tmp_path(path, sizeof(path), "kvd-modules-XXXXXX"));

	assert_int_equal(write(fd, text, strlen(text)), strlen(text));
	close(fd);
	source.path = path;
	assert_int_equal(config_load(&config, &source), 0);
	unlink(path);
	if (built) {
		assert_int_equal(modules_check_options(&config, &option), 0);
		return;
	}
	assert_true(modules_check_options(&config, &option) < 0);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	assert_string_equal(option, name);
	assert_non_null(strstr(err_last()->text, words));
	err_clear();
}

/* make core-test has it without the modules. */
static void option_of_a_missing_module_is_refused_by_name(void **state)
{
	(void)state;
	option_is_refused_unless(is_built(MODULE_STORE),
				 "[chunks]\nchunk_memory = 1 MiB\n", "chunk_memory",
				 "without the module store");
	option_is_refused_unless(transport_find("ucx") != NULL,
				 "[transport]\nucx_library = /x\n", "ucx_library",
				 "without the module ucx");
}

static void source_by_group_wants_the_module_cluster(void **state)
{
	struct session *engine = cluster_engine(&c, 0, "engine");
	struct cache cache = cluster_geometry;
	const char *const open =
		"{'cmd':'room.open','room':'1','role':'recv','pool':%llu,"
		"'sources':[{'group':'g','worker':'w'}]}";

	(void)state;
	cluster_cache(&c, engine, "kv", 0, &cache);
	if (is_built(MODULE_CLUSTER))
		cluster_ok(&c, engine, open, (unsigned long long)cache.pool);
	else
		cluster_refused(&c, engine, "ESTATE", open,
				(unsigned long long)cache.pool);
	cluster_engine_dies(&c, engine);
	cluster_run(&c, LOOP_NS_PER_S);
	cache_close(&cache);
	noted[0] = 0;
}

static void no_list_is_no_modules(void **state)
{
	struct kvd kvd = {.modules = NULL};
	struct err why;

	(void)state;
	assert_int_equal(modules_new(&kvd), 0);
	assert_int_equal(modules_live(&kvd), 0);
	assert_true(modules_drained(&kvd, &why));
	modules_free(&kvd);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(list_is_in_the_order_of_its_numbers),
		cmocka_unit_test_setup_teardown(session_end_reaches_modules_in_order,
						setup, teardown),
		cmocka_unit_test_setup_teardown(end_of_a_session_waits_for_a_module,
						setup, teardown),
		cmocka_unit_test_setup_teardown(peer_up_and_down_reach_modules_in_order,
						setup, teardown),
		cmocka_unit_test_setup_teardown(
			entries_reach_the_module_of_the_op_or_number, setup, teardown),
		cmocka_unit_test(module_failed_stops_the_list),
		cmocka_unit_test(option_of_a_missing_module_is_refused_by_name),
		cmocka_unit_test_setup_teardown(source_by_group_wants_the_module_cluster,
						setup, teardown),
		cmocka_unit_test(module_unhealthy_degrades_the_daemon),
		cmocka_unit_test(no_list_is_no_modules),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
