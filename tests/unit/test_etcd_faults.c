/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What happens to an etcd, with a real one: it is stopped and started, loses its disk,
 * does not answer, is cut off, compacts, is full; and daemons that miss their lease. What
 * is known goes on to be known, nobody who is alive is taken for gone without need, and
 * all comes back by itself; how long that took is printed.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/cluster/etcd_impl.h"
#include "tests/lib/directory_tests.h"
#include "tests/lib/etcd_rig.h"

#define LEASE_S 4u
#define RECOVERY_NS (60 * LOOP_NS_PER_S)

/* Member 0 publishes, member 1 reads, member 2 publishes another; all is well. */
struct scene {
	struct etcd_server server;
	struct etcd_rig *rig;
	struct said said, other;
	struct seen *seen;
	struct place place, other_place;
};

static void scene_on(struct scene *s)
{
	s->rig = etcd_rig_on(&s->server, LEASE_S);
	s->place = directory_place("g", "w", 0);
	s->other_place = directory_place("g", "other", 0);
	said_init(&s->said);
	said_init(&s->other);
	s->seen = seen_new(s->rig->rig.member(&s->rig->rig, 1), "g", true);
	assert_int_equal(s->rig->members[1]->ops->publish(
				 s->rig->rig.member(&s->rig->rig, 0),
				 &s->said.publication, &s->place, "r", "l0"),
			 0);
	assert_int_equal(s->rig->members[1]->ops->publish(
				 s->rig->rig.member(&s->rig->rig, 2),
				 &s->other.publication, &s->other_place, "r", NULL),
			 0);
	directory_until(&s->rig->rig, DIRECTORY_SOON_NS,
			seen_has(s->seen, &s->place, "r", "l0") &&
				seen_has(s->seen, &s->other_place, "r", NULL) &&
				s->said.done && s->other.done && s->seen->synced &&
				etcd_rig_up(s->rig, 1));
}

static void scene_new(struct scene *s)
{
	etcd_server_need();
	memset(s, 0, sizeof(*s));
	etcd_server_init(&s->server);
	etcd_server_start(&s->server);
	scene_on(s);
}

static void scene_free(struct scene *s)
{
	s->rig->rig.member(&s->rig->rig, 1)->ops->unwatch(&s->seen->watch);
	seen_free(s->seen);
	etcd_rig_free(s->rig);
	etcd_server_free(&s->server);
}

static bool scene_up(struct scene *s)
{
	return etcd_rig_up(s->rig, 0) && etcd_rig_up(s->rig, 1) && etcd_rig_up(s->rig, 2);
}

static bool scene_down(struct scene *s)
{
	return !etcd_rig_up(s->rig, 0) && !etcd_rig_up(s->rig, 1) &&
	       !etcd_rig_up(s->rig, 2);
}

/* So much time passes. */
static void scene_turns(struct scene *s, uint64_t ns)
{
	uint64_t end_ns = loop_clock_ns(s->rig->loop) + ns;

	directory_until(&s->rig->rig, ns + DIRECTORY_SOON_NS,
			loop_clock_ns(s->rig->loop) >= end_ns);
}

/* A change passes through from member 0 to member 1. */
static void scene_works(struct scene *s, const char *load)
{
	assert_int_equal(
		s->rig->members[0]->ops->update(&s->said.publication, NULL, load), 0);
	directory_until(&s->rig->rig, RECOVERY_NS,
			seen_has(s->seen, &s->place, "r", load) && scene_up(s));
}

static void scene_recovers(struct scene *s, const char *what, const char *load)
{
	uint64_t begin_ns = loop_clock_ns(s->rig->loop), up_ns;

	directory_until(&s->rig->rig, RECOVERY_NS, scene_up(s));
	up_ns = loop_clock_ns(s->rig->loop);
	scene_works(s, load);
	print_message(
		"%s: up after %ju ms, a change told after %ju ms; gone %u\n", what,
		(uintmax_t)((up_ns - begin_ns) / LOOP_NS_PER_MS),
		(uintmax_t)((loop_clock_ns(s->rig->loop) - begin_ns) / LOOP_NS_PER_MS),
		seen_find(s->seen, &s->place)->gone);
}

/* The other member has this too. */
static void scene_said_all_again(struct scene *s)
{
	directory_until(&s->rig->rig, RECOVERY_NS,
			seen_has(s->seen, &s->other_place, "r", NULL));
	assert_int_equal(s->said.done, 1);
	assert_int_equal(s->other.done, 1);
}

static void restart_reports_no_member_gone(void **state)
{
	struct scene s;

	(void)state;
	scene_new(&s);
	etcd_server_stop(&s.server, SIGTERM);
	directory_until(&s.rig->rig, RECOVERY_NS, scene_down(&s));
	assert_int_not_equal(etcd_rig_state(s.rig, 0).why.code, ERR_OK);
	assert_true(seen_has(s.seen, &s.place, "r", "l0"));
	/* said while it is away */
	assert_int_equal(s.rig->members[0]->ops->update(&s.said.publication, NULL, "l1"),
			 0);
	etcd_server_start(&s.server);
	scene_recovers(&s, "restart", "l2");
	scene_said_all_again(&s);
	assert_int_equal(seen_find(s.seen, &s.place)->gone, 0);
	assert_int_equal(seen_find(s.seen, &s.other_place)->gone, 0);
	assert_int_equal(etcd_rig_state(s.rig, 0).reconnects, 1);
	etcd_server_stop(&s.server, SIGKILL);
	etcd_server_start(&s.server);
	scene_recovers(&s, "kill and start", "l3");
	scene_said_all_again(&s);
	scene_free(&s);
}

static void empty_disk_is_filled_again(void **state)
{
	struct scene s;

	(void)state;
	scene_new(&s);
	for (int i = 0; i < 20; i++) /* the old revision is far away */
		assert_int_equal(etcd_ctl(&s.server, NULL, 0, "put x %d", i), 0);
	etcd_server_stop(&s.server, SIGKILL);
	directory_until(&s.rig->rig, RECOVERY_NS, scene_down(&s));
	s.rig->rig.crash(&s.rig->rig, 2); /* one of them does not come back */
	etcd_server_wipe(&s.server);
	etcd_server_start(&s.server);
	directory_until(&s.rig->rig, RECOVERY_NS,
			etcd_rig_up(s.rig, 0) && etcd_rig_up(s.rig, 1));
	scene_recovers(&s, "empty disk", "l1"); /* member 2 is made anew by this */
	assert_int_equal(seen_find(s.seen, &s.place)->gone, 0);
	directory_until(&s.rig->rig, RECOVERY_NS, s.seen->synced == 2);
	assert_int_equal(seen_find(s.seen, &s.other_place)->gone, 1);
	assert_false(seen_find(s.seen, &s.other_place)->there);
	scene_free(&s);
}

static void silent_etcd_is_left_and_found_again(void **state)
{
	struct directory_state now;
	struct scene s;

	(void)state;
	scene_new(&s);
	kill(s.server.pid, SIGSTOP);
	directory_until(&s.rig->rig, RECOVERY_NS, scene_down(&s));
	now = etcd_rig_state(s.rig, 1);
	assert_int_equal(now.why.code, ERR_TIMEOUT);
	scene_turns(&s, 3 * LEASE_S * LOOP_NS_PER_S);
	assert_true(seen_has(s.seen, &s.place, "r", "l0"));
	kill(s.server.pid, SIGCONT);
	scene_recovers(&s, "12 s without an answer", "l1");
	scene_said_all_again(&s);
	scene_free(&s);
}

/* Between the members and etcd, by a network of its own. */
static void partition_heals(void **state)
{
	struct scene s;
	char name[32], here[32], there[32];
	int number = (int)getpid() % 60000;

	(void)state;
	etcd_server_need();
	snprintf(name, sizeof(name), "kvdt%d", number);
	snprintf(here, sizeof(here), "198.18.%d.%d", number / 240, number % 240 + 1);
	snprintf(there, sizeof(there), "198.19.%d.%d", number / 240, number % 240 + 1);
	if (etcd_net_new(name, here, there) != 0) {
		print_message("needs a network namespace and veth (root, ip)\n");
		skip();
	}
	memset(&s, 0, sizeof(s));
	etcd_server_init(&s.server);
	s.server.netns = name;
	s.server.listen = there;
	etcd_server_start(&s.server);
	scene_on(&s);
	assert_int_equal(etcd_net_up(name, false), 0);
	directory_until(&s.rig->rig, RECOVERY_NS, scene_down(&s));
	scene_turns(&s, 10 * LOOP_NS_PER_S);
	assert_true(seen_has(s.seen, &s.place, "r", "l0"));
	assert_int_equal(etcd_net_up(name, true), 0);
	scene_recovers(&s, "partition of 10 s", "l1");
	scene_said_all_again(&s);
	scene_free(&s);
	etcd_net_free(name);
}

/* etcd says it under this lease's number in hexadecimal. */
static void put_under_lease(struct scene *s, const char *key, const char *value)
{
	char out[256], id[32] = "";

	assert_int_equal(etcd_ctl(&s->server, out, sizeof(out), "lease grant 600"), 0);
	assert_int_equal(sscanf(out, "lease %31s granted", id), 1);
	assert_int_equal(
		etcd_ctl(&s->server, NULL, 0, "put --lease=%s '%s' '%s'", id, key, value),
		0);
}

static void compaction_during_a_watch(void **state)
{
	struct place newcomer = directory_place("g", "new", 3);
	char port[8], out[1024];
	unsigned int synced;
	struct scene s;
	long revision;

	(void)state;
	scene_new(&s);
	/* of what was told already: nobody notices */
	assert_int_equal(etcd_ctl(&s.server, NULL, 0, "put x 1"), 0);
	assert_int_equal(
		etcd_ctl(&s.server, out, sizeof(out),
			 "get x -w json | sed 's/.*\"revision\":\\([0-9]*\\).*/\\1/'"),
		0);
	revision = strtol(out, NULL, 10);
	assert_true(revision > 1);
	assert_int_equal(etcd_ctl(&s.server, NULL, 0, "compaction %ld", revision), 0);
	scene_works(&s, "l1");
	/* of what was not told: it changes where the members do not look */
	etcd_server_stop(&s.server, SIGTERM);
	memcpy(port, s.server.port, sizeof(port));
	memcpy(s.server.port, s.server.peer_port, sizeof(port));
	memcpy(s.server.peer_port, port, sizeof(port));
	etcd_server_start(&s.server);
	put_under_lease(&s, "/kvd/groups/g/new/3.0.0.0", "r");
	assert_int_equal(etcd_ctl(&s.server, NULL, 0, "del /kvd/groups/g/other/0.0.0.0"),
			 0);
	assert_int_equal(
		etcd_ctl(&s.server, out, sizeof(out),
			 "get x -w json | sed 's/.*\"revision\":\\([0-9]*\\).*/\\1/'"),
		0);
	assert_int_equal(
		etcd_ctl(&s.server, NULL, 0, "compaction %ld", strtol(out, NULL, 10)), 0);
	etcd_server_stop(&s.server, SIGTERM);
	memcpy(s.server.peer_port, s.server.port, sizeof(port));
	memcpy(s.server.port, port, sizeof(port));
	synced = s.seen->synced;
	s.rig->rig.crash(&s.rig->rig, 2); /* who was deleted does not come again */
	etcd_server_start(&s.server);
	scene_recovers(&s, "compacted meanwhile", "l2");
	directory_until(&s.rig->rig, RECOVERY_NS,
			seen_has(s.seen, &newcomer, "r", NULL) &&
				s.seen->synced > synced &&
				!seen_find(s.seen, &s.other_place)->there);
	assert_int_equal(seen_find(s.seen, &s.place)->gone, 0);
	scene_free(&s);
}

static void etcd_full_is_reported_and_recovers(void **state)
{
	char out[1024];
	struct directory_state now;
	uint64_t begin_ns;
	struct scene s;
	int tries = 0;

	(void)state;
	etcd_server_need();
	memset(&s, 0, sizeof(s));
	etcd_server_init(&s.server);
	s.server.quota = 4 << 20;
	etcd_server_start(&s.server);
	scene_on(&s);
	do
		assert_true(tries++ < 20);
	while (etcd_ctl(
		       &s.server, NULL, 0,
		       "get x >/dev/null; for i in 1 2 3 4 5 6 7 8; do "
		       "head -c 1000000 /dev/zero | tr '\\0' y | ETCDCTL_API=3 etcdctl "
		       "--endpoints=127.0.0.1:%s put filler$i || exit 1; done >/dev/null",
		       s.server.port) == 0);
	assert_int_equal(s.rig->members[0]->ops->update(&s.said.publication, NULL, "l1"),
			 0);
	directory_until(&s.rig->rig, RECOVERY_NS, !etcd_rig_up(s.rig, 0));
	now = etcd_rig_state(s.rig, 0);
	assert_int_equal(now.why.code, ERR_LIMIT);
	assert_non_null(strstr(now.why.text, "etcd is full"));
	scene_turns(&s, 2 * LEASE_S * LOOP_NS_PER_S);
	assert_true(seen_has(s.seen, &s.place, "r", "l0")); /* the lease lives */
	assert_int_equal(seen_find(s.seen, &s.other_place)->gone, 0);
	assert_int_equal(seen_find(s.seen, &s.place)->gone, 0);
	assert_int_equal(etcd_ctl(&s.server, NULL, 0, "del --prefix filler"), 0);
	assert_int_equal(
		etcd_ctl(&s.server, out, sizeof(out),
			 "get x -w json | sed 's/.*\"revision\":\\([0-9]*\\).*/\\1/'"),
		0);
	assert_int_equal(etcd_ctl(&s.server, NULL, 0, "compaction --physical %ld",
				  strtol(out, NULL, 10)),
			 0);
	assert_int_equal(etcd_ctl(&s.server, NULL, 0, "defrag"), 0);
	assert_int_equal(etcd_ctl(&s.server, NULL, 0, "alarm disarm"), 0);
	begin_ns = loop_clock_ns(s.rig->loop);
	directory_until(&s.rig->rig, RECOVERY_NS,
			seen_has(s.seen, &s.place, "r", "l1") && scene_up(&s));
	print_message(
		"full: told after %ju ms\n",
		(uintmax_t)((loop_clock_ns(s.rig->loop) - begin_ns) / LOOP_NS_PER_MS));
	scene_works(&s, "l2");
	scene_free(&s);
}

/* The daemons stand still, etcd does not. */
static void lease_lost_in_a_stop_is_created_again(void **state)
{
	char out[256];
	struct scene s;

	(void)state;
	scene_new(&s);
	do
		assert_int_equal(etcd_ctl(&s.server, out, sizeof(out),
					  "get --keys-only --prefix /kvd/groups/"),
				 0);
	while (out[0]);
	scene_recovers(&s, "lease lost", "l1");
	scene_said_all_again(&s);
	assert_int_equal(seen_find(s.seen, &s.place)->gone, 1); /* so it was */
	scene_free(&s);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(restart_reports_no_member_gone),
		cmocka_unit_test(empty_disk_is_filled_again),
		cmocka_unit_test(silent_etcd_is_left_and_found_again),
		cmocka_unit_test(partition_heals),
		cmocka_unit_test(compaction_during_a_watch),
		cmocka_unit_test(etcd_full_is_reported_and_recovers),
		cmocka_unit_test(lease_lost_in_a_stop_is_created_again),
	};

	return cmocka_run_group_tests_name("etcd faults", tests, NULL, NULL);
}
