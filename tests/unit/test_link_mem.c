/* SPDX-License-Identifier: Apache-2.0 */
/* link_mem keeps the link's contract: order, loss only with the line, full
 * queues answered, late frames of the dead, and the same run for a seed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "tests/sim/link_mem.h"
#include "daemon/loop/loop.h"

#define A "tcp://a:1"
#define B "tcp://b:1"
#define FRAMES_MAX 5000

struct node {
	struct link *link;
	struct link_line *line; /* to the other one */
	unsigned int got, ups, downs;
	uint32_t numbers[FRAMES_MAX];
	uint64_t at_ns[FRAMES_MAX];
	char user[LINK_USER_MAX];
	bool hangup_on_frame;
};

static struct fixture {
	struct loop *loop;
	struct mem_hub *hub;
	struct node a, b;
} f;

static void on_frame(void *owner, const struct link_frame *frame)
{
	struct node *node = owner;

	assert_true(node->got < FRAMES_MAX);
	assert_int_equal(frame->len, 4);
	memcpy(&node->numbers[node->got], frame->data, 4);
	node->at_ns[node->got++] = loop_now_ns(f.loop);
	memcpy(node->user, frame->user, sizeof(node->user));
	if (node->hangup_on_frame && node->line) {
		node->link->ops->hangup(node->line);
		node->line = NULL;
	}
}

static void on_line(void *owner, void *line_owner, bool connected)
{
	struct node *node = owner;

	assert_ptr_equal(line_owner, node);
	if (connected)
		node->ups++;
	else
		node->downs++;
}

static void node_start(struct node *node, const char *endpoint, const char *user)
{
	assert_int_equal(link_mem_new(f.hub, endpoint, user, &node->link), 0);
	node->link->owner = node;
	node->link->on_frame = on_frame;
	node->link->on_line = on_line;
}

static void run_for(uint64_t ns)
{
	uint64_t end_ns = loop_now_ns(f.loop) + ns;

	while (loop_now_ns(f.loop) < end_ns)
		loop_turn(f.loop, end_ns - loop_now_ns(f.loop));
	while (loop_turn(f.loop, 0))
		;
}

static int setup_seed(uint64_t seed)
{
	memset(&f, 0, sizeof(f));
	assert_int_equal(loop_new_virtual(seed, &f.loop), 0);
	assert_int_equal(mem_hub_new(f.loop, &f.hub), 0);
	mem_hub_set_default(f.hub, &(struct mem_path){.delay_ns = 1000});
	node_start(&f.a, A, "alice");
	node_start(&f.b, B, "bob");
	assert_int_equal(f.a.link->ops->dial(f.a.link, B, &f.a, &f.a.line), 0);
	run_for(10000);
	return 0;
}

static int setup(void **state)
{
	(void)state;
	return setup_seed(1);
}

static int teardown(void **state)
{
	(void)state;
	if (f.a.link)
		f.a.link->ops->free(f.a.link);
	if (f.b.link)
		f.b.link->ops->free(f.b.link);
	mem_hub_free(f.hub);
	loop_free(f.loop);
	return 0;
}

static int send_number(struct node *node, uint32_t number)
{
	return node->link->ops->send(node->line, &number, sizeof(number));
}

static void send_numbers(struct node *node, uint32_t first, uint32_t count)
{
	for (uint32_t i = 0; i < count; i++)
		assert_int_equal(send_number(node, first + i), 0);
}

static void frames_keep_order_and_delay(void **state)
{
	uint64_t sent_ns = loop_now_ns(f.loop);

	(void)state;
	assert_int_equal(f.a.ups, 1);
	mem_hub_set_default(f.hub,
			    &(struct mem_path){.delay_ns = 5000, .jitter_ns = 9000});
	send_numbers(&f.a, 0, 100);
	assert_int_equal(f.b.got, 0);
	run_for(20000);
	assert_int_equal(f.b.got, 100);
	for (uint32_t i = 0; i < 100; i++) {
		assert_int_equal(f.b.numbers[i], i);
		assert_true(f.b.at_ns[i] >= sent_ns + 5000);
		assert_true(f.b.at_ns[i] <= sent_ns + 14000);
		assert_true(!i || f.b.at_ns[i] >= f.b.at_ns[i - 1]);
	}
	assert_true(f.b.at_ns[99] > f.b.at_ns[0]);
	assert_string_equal(f.b.user, "alice");
}

static void send_before_connected_refused(void **state)
{
	struct node c = {0};

	(void)state;
	assert_int_equal(f.a.link->ops->dial(f.a.link, "tcp://c:1", &f.a, &c.line), 0);
	c.link = f.a.link;
	run_for(100000);
	assert_true(send_number(&c, 1) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	node_start(&c, "tcp://c:1", "");
	run_for(1999); /* a round trip */
	assert_int_equal(f.a.ups, 1);
	run_for(1);
	assert_int_equal(f.a.ups, 2);
	assert_int_equal(f.a.link->ops->send(c.line, "abcd", 4), 0);
	run_for(1000);
	assert_int_equal(c.got, 1);
	c.link->ops->free(c.link);
}

static void queue_full_refused(void **state)
{
	(void)state;
	mem_hub_set_queue_max(f.hub, 10);
	send_numbers(&f.a, 0, 10);
	assert_true(send_number(&f.a, 10) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	run_for(1000);
	assert_int_equal(f.b.got, 10);
	send_numbers(&f.a, 10, 1);
}

static void break_loses_a_tail_only(void **state)
{
	unsigned int lost = 0, kept = 0;

	(void)state;
	for (uint32_t round = 0; round < 50; round++) {
		f.b.got = 0;
		send_numbers(&f.a, 0, 20);
		mem_hub_break(f.hub, A, B);
		assert_true(send_number(&f.a, 99) < 0); /* not connected */
		run_for(100000);
		for (uint32_t i = 0; i < f.b.got; i++)
			assert_int_equal(f.b.numbers[i], i);
		kept += f.b.got;
		lost += 20 - f.b.got;
	}
	assert_int_equal(f.a.downs, 50);
	assert_int_equal(f.a.ups, 51);
	assert_true(lost > 100 && kept > 100);
	assert_int_equal(mem_hub_stats(f.hub)->lost, lost);
}

static void break_chance_breaks(void **state)
{
	unsigned int sent = 0;

	(void)state;
	mem_hub_set_default(f.hub,
			    &(struct mem_path){.delay_ns = 100, .break_ppm = 100000});
	for (unsigned int i = 0; i < 2000; i++) {
		sent += send_number(&f.a, i) == 0;
		run_for(50);
	}
	run_for(1000);
	assert_in_range(f.a.downs, 100, 250);
	assert_true(f.b.got < sent);
	assert_int_equal(f.b.got + mem_hub_stats(f.hub)->lost, sent);
}

static void partition_holds_frames_until_healed(void **state)
{
	(void)state;
	assert_int_equal(mem_hub_partition(f.hub, A, B, true), 0);
	send_numbers(&f.a, 0, 5);
	run_for(1000000);
	assert_int_equal(f.b.got, 0);
	assert_int_equal(mem_hub_partition(f.hub, A, B, false), 0);
	run_for(0);
	assert_int_equal(f.b.got, 5);
	assert_int_equal(f.a.downs, 0);
}

static void frames_of_killed_node_still_arrive(void **state)
{
	(void)state;
	send_numbers(&f.a, 0, 5);
	link_mem_crash(f.a.link, MEM_CRASH_KILLED);
	assert_true(send_number(&f.a, 5) < 0);
	run_for(1000000);
	assert_int_equal(f.b.got, 5);
	assert_int_equal(f.a.downs, 0); /* no callback is left */
}

static void kill_breaks_lines_power_loss_does_not(void **state)
{
	struct node next = {0};

	(void)state;
	send_numbers(&f.a, 0, 1);
	link_mem_crash(f.b.link, MEM_CRASH_POWER);
	run_for(100000);
	assert_int_equal(f.a.downs, 0);
	assert_int_equal(send_number(&f.a, 1), 0); /* into the void */
	/* freed or not, the machine stays silent until another answers there */
	f.b.link->ops->free(f.b.link);
	f.b.link = NULL;
	run_for(100000);
	assert_int_equal(f.a.downs, 0);
	assert_int_equal(f.b.got, 0);
	node_start(&next, B, "");
	run_for(100000);
	assert_int_equal(f.a.downs, 1);
	assert_int_equal(f.a.ups, 2);
	send_numbers(&f.a, 2, 1);
	run_for(1000);
	assert_int_equal(next.got, 1);
	assert_int_equal(next.numbers[0], 2);
	link_mem_crash(next.link, MEM_CRASH_KILLED);
	run_for(0);
	assert_int_equal(f.a.downs, 2);
	next.link->ops->free(next.link);
}

static void endpoint_taken_refused(void **state)
{
	struct link *link;

	(void)state;
	assert_true(link_mem_new(f.hub, A, "", &link) < 0);
	assert_int_equal(err_last()->code, ERR_EXIST);
}

static void frozen_node_gets_frames_late(void **state)
{
	(void)state;
	link_mem_freeze(f.b.link, true);
	send_numbers(&f.a, 0, 3);
	run_for(1000000);
	assert_int_equal(f.b.got, 0);
	link_mem_freeze(f.b.link, false);
	run_for(0);
	assert_int_equal(f.b.got, 3);
	link_mem_freeze(f.a.link, true);
	assert_true(send_number(&f.a, 4) < 0);
}

static void line_hung_up_in_its_frame_is_safe(void **state)
{
	(void)state;
	assert_int_equal(f.b.link->ops->dial(f.b.link, A, &f.b, &f.b.line), 0);
	run_for(10000);
	f.b.hangup_on_frame = true;
	send_numbers(&f.b, 100, 2);
	send_numbers(&f.a, 0, 2);
	f.a.link->ops->hangup(f.a.line); /* both frames are in transit */
	f.a.line = NULL;
	run_for(10000);
	assert_int_equal(f.b.got, 2);
	assert_null(f.b.line);
	assert_int_equal(f.a.got, 2);
}

static uint64_t trace_of(uint64_t seed)
{
	uint64_t hash = 0;

	setup_seed(seed);
	mem_hub_set_default(f.hub, &(struct mem_path){.delay_ns = 100,
						      .jitter_ns = 500,
						      .break_ppm = 50000});
	for (uint32_t i = 0; i < 500; i++) {
		if (send_number(&f.a, i) < 0)
			err_clear();
		run_for(100);
	}
	for (unsigned int i = 0; i < f.b.got; i++)
		hash = hash * 31 + f.b.numbers[i] + f.b.at_ns[i] * 1000003;
	teardown(NULL);
	return hash;
}

static void seed_replays_exactly(void **state)
{
	(void)state;
	assert_int_equal(trace_of(7), trace_of(7));
	assert_int_not_equal(trace_of(7), trace_of(8));
}

static void endpoint_form_is_checked(void **state)
{
	static const char *const good[] = {
		"tcp://10.0.0.2:7400", "tcp://a:1", "tcp://node-3.rack_1.example:65535",
		"tcp://[::1]:7400", "tcp://[fe80::1%25eth0]:7"};
	/* one spelling of each, and those that are the same */
	static const char *const same[][2] = {
		{"tcp://host.example:7400", "tcp://HOST.Example.:07400"},
		{"tcp://127.0.0.1:7400", "tcp://127.1:7400"},
		{"tcp://127.0.0.1:7400", "tcp://[::ffff:127.0.0.1]:7400"},
		{"tcp://127.0.0.1:7400", "tcp://0x7f.0.0.1:7400"},
		{"tcp://[::1]:7400", "tcp://[0:0:0:0:0:0:0:1]:7400"},
		{"tcp://[::1]:7400", "tcp://[0::1]:7400"},
		{"tcp://[fe80::ab%eth0]:7", "tcp://[FE80:0::AB%eth0]:7"},
		{"tcp://[::1]:7400#KEY", "tcp://[0::1]:7400#KEY"},
	};
	static const char *const hosts[][2] = {
		{"[::1]:7400", "[::1]:7400"},
		{"[0::1]", "[::1]"},
		{"A.b", "a.b"},
		{"10.0.0.2:7400", "10.0.0.2:7400"},
		{"::1", NULL},
		{"::1:7400", NULL},
		{"tcp://a:1", NULL},
		{"a:0", NULL},
		{"a#KEY", NULL},
		{"[::1]7400", NULL},
		{"a:", NULL},
		{"[a]", NULL},
	};
	char spelled[LINK_ENDPOINT_MAX];
	static const char *const bad[] = {"",
					  "tcp://",
					  "tcp://a",
					  "a:1",
					  "tcp://:1",
					  "tcp://a:",
					  "tcp://a:0",
					  "tcp://a:65536",
					  "tcp://a:1x",
					  "tcp://a b:1",
					  "tcp://a;b:1",
					  "ipc:///tmp/x:1",
					  "tcp://::1:7",
					  "tcp://[::1:7",
					  "tcp://[]:7",
					  "tcp://a:-1",
					  "tcp://a:+1",
					  "tcp://*:7400",
					  "udp://10.0.0.2:1",
					  "tcp://a/b:1",
					  "tcp://a:123456789012345678901"};
	char longest[LINK_ENDPOINT_MAX + 1];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(good); i++)
		assert_int_equal(endpoint_check(good[i]), 0);
	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		assert_true(endpoint_check(bad[i]) < 0);
		assert_int_equal(err_last()->code, ERR_INVAL);
	}
	for (size_t i = 0; i < ARRAY_LEN(same); i++) {
		assert_int_equal(endpoint_canon(same[i][1], spelled), 0);
		assert_string_equal(spelled, same[i][0]);
		assert_true(endpoint_same(same[i][0], same[i][1]));
	}
	assert_true(endpoint_same("tcp://a:1#KEY", "tcp://A:1"));
	assert_false(endpoint_same("tcp://a:1#KEY", "tcp://a:1#key"));
	assert_false(endpoint_same("tcp://a:1", "tcp://a:11"));
	assert_false(endpoint_same("tcp://a:1", "a name"));
	for (size_t i = 0; i < ARRAY_LEN(hosts); i++) {
		assert_int_equal(endpoint_host_spell(hosts[i][0], spelled) < 0,
				 !hosts[i][1]);
		if (hosts[i][1])
			assert_string_equal(spelled, hosts[i][1]);
		else
			assert_int_equal(err_last()->code, ERR_CONFIG);
	}
	memset(longest, 'a', sizeof(longest));
	memcpy(longest, "tcp://", 6);
	memcpy(longest + LINK_ENDPOINT_MAX - 2, ":1", 3);
	assert_true(endpoint_check(longest) < 0);
	memcpy(longest + LINK_ENDPOINT_MAX - 3, ":1", 3);
	assert_int_equal(endpoint_check(longest), 0);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(frames_keep_order_and_delay),
		TEST(send_before_connected_refused),
		TEST(queue_full_refused),
		TEST(break_loses_a_tail_only),
		TEST(break_chance_breaks),
		TEST(partition_holds_frames_until_healed),
		TEST(frames_of_killed_node_still_arrive),
		TEST(kill_breaks_lines_power_loss_does_not),
		TEST(endpoint_taken_refused),
		TEST(frozen_node_gets_frames_late),
		TEST(line_hung_up_in_its_frame_is_safe),
		cmocka_unit_test(seed_replays_exactly),
		cmocka_unit_test(endpoint_form_is_checked),
	};

	return cmocka_run_group_tests_name("link_mem", tests, NULL, NULL);
}
