/* SPDX-License-Identifier: Apache-2.0 */
/* Two paths to a peer and one order: link_mem is the control line, and a queue of this
 * test, which it empties at will, the data line. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/peer/peer.h"
#include "tests/lib/peernet.h"

#define MS LOOP_NS_PER_MS
#define LINE_MAX 128u

/* Frames on the data line from node 0 to node 1. */
struct carried {
	struct peer_express_in in;
	size_t len;
	bool taken, refused;
	uint8_t frame[WIRE_HEADER_BYTES + 256];
};

static struct carried carried[LINE_MAX];
static unsigned int sent, arrived, made_count;
static size_t made_len[LINE_MAX];
static uint8_t zeros[PEER_EXPRESS_ROWS_BYTES];
static bool no_room;
static struct peer *a, *b;

static int carry(void *owner, const void *frame, size_t len)
{
	struct carried *c = &carried[sent];

	assert_ptr_equal(owner, carried);
	assert_true(len <= sizeof(c->frame));
	if (no_room || sent == LINE_MAX)
		return err_raise(ERR_LIMIT, "no room");
	memcpy(c->frame, frame, len);
	c->len = len;
	sent++;
	return 0;
}

static void on_taken(struct peer_express_in *in)
{
	struct carried *c = container_of(in, struct carried, in);

	assert_false(c->taken);
	c->taken = true;
	peer_express_done(a, c->len, NULL);
}

static int arrive_as(struct carried *c, const uint8_t *frame, size_t len)
{
	list_init(&c->in.link);
	c->in.on_taken = on_taken;
	return peer_express_arrived(b, &c->in, frame, len);
}

/* Deliver the next `n` frames. */
static void arrive(unsigned int n)
{
	for (; n > 0; n--, arrived++)
		assert_int_equal(arrive_as(&carried[arrived], carried[arrived].frame,
					   carried[arrived].len),
				 0);
}

static int setup(void **state)
{
	struct peer_express way = {.owner = carried, .send = carry};

	peernet_setup(state);
	memset(carried, 0, sizeof(carried));
	sent = arrived = 0;
	no_room = false;
	a = peernet_join();
	b = peernet_only(1);
	peer_express_open(a, &way);
	return 0;
}

static int express(uint64_t number)
{
	struct wire_lease m = {.room = number};
	uint8_t buf[64];
	struct cursor c;

	cursor_write(&c, buf, sizeof(buf));
	assert_int_equal(wire_lease_put(&c, &m), 0);
	return peer_send_express(a, WIRE_T_LEASE, buf, c.pos);
}

static void came(unsigned int n)
{
	assert_int_equal(net.n[1].messages, n);
	for (unsigned int i = 0; i < n; i++)
		assert_int_equal(net.n[1].numbers[i], i + 1);
	assert_int_equal(net.n[1].downs, 0);
}

/* ---- one order ---- */

static void express_ahead_of_control_line_waits(void **state)
{
	(void)state;
	assert_int_equal(peernet_lease(a, 1, true), 0);
	assert_int_equal(express(2), 0);
	assert_int_equal(express(3), 0);
	assert_int_equal(peernet_lease(a, 4, true), 0);
	assert_int_equal(sent, 2);
	arrive(2);
	came(0);
	assert_false(carried[0].taken || peer_express_quiet(a));
	peernet_run(MS);
	came(4);
	assert_true(carried[0].taken && carried[1].taken && peer_express_quiet(a));
	peernet_run(LOOP_NS_PER_S); /* PINGs fill in */
	assert_int_equal(express(5), 0);
	arrive(1);
	came(5);
}

static void control_line_ahead_of_express_waits(void **state)
{
	uint64_t missed;

	(void)state;
	assert_int_equal(express(1), 0);
	assert_int_equal(peernet_lease(a, 2, true), 0);
	assert_int_equal(peernet_lease(a, 3, false), 0);
	missed = a->missed_pings;
	peernet_run(3 * LOOP_NS_PER_S); /* PINGs are answered all the time */
	came(0);
	assert_int_equal(sm_state(&a->sm), PEER_UP);
	assert_int_equal(a->missed_pings, missed);
	arrive(1);
	came(3);
	assert_int_equal(peernet_lease(a, 4, true), 0);
	peernet_run(MS);
	came(4);
}

static void message_mixed_at_random_keeps_the_order(void **state)
{
	unsigned int n = 0;

	(void)state;
	for (unsigned int i = 0; i < 4000 && sent < LINE_MAX; i++) {
		switch (loop_random_u64(net.loop) % 4) {
		case 0:
			assert_int_equal(express(++n), 0);
			break;
		case 1:
			assert_int_equal(peernet_lease(a, ++n, true), 0);
			break;
		case 2:
			if (arrived < sent)
				arrive(1);
			break;
		default:
			peernet_run(loop_random_u64(net.loop) % (PEERNET_DELAY_NS * 2));
		}
	}
	arrive(sent - arrived);
	peernet_run(MS);
	came(n);
	assert_true(n > 100);
}

static void express_without_space_uses_control_line(void **state)
{
	(void)state;
	no_room = true;
	assert_int_equal(express(1), 0);
	no_room = false;
	assert_int_equal(sent, 0);
	assert_int_equal(express(2), 0);
	assert_int_equal(sent, 1);
	arrive(1);
	peernet_run(MS);
	came(2);
}

/* One that found no memory at the receiver arrives again, after later ones. */
static void express_out_of_order_is_refused(void **state)
{
	(void)state;
	for (unsigned int i = 1; i <= 3; i++)
		assert_int_equal(express(i), 0);
	arrived = 1;
	arrive(2);
	came(0);
	assert_true(arrive_as(&carried[0], carried[0].frame, carried[0].len) < 0);
	err_clear();
	came(0);
}

/* ---- bounds ---- */

static void express_not_taken_is_bounded_and_stops_control_line(void **state)
{
	unsigned int n = 0, queued = 0;

	(void)state;
	while (n < PEER_EXPRESS_MAX + 3)
		assert_int_equal(express(++n), 0);
	assert_int_equal(sent, PEER_EXPRESS_MAX); /* the rest used the other path */
	for (; queued == 0 && n < 2000; n += queued == 0)
		queued = peernet_lease(a, n + 1, false) < 0;
	assert_true(queued && n < 1000);
	assert_int_equal(peernet_lease(a, ++n, true), 0); /* waits here */
	peernet_run(LOOP_NS_PER_S);
	came(0);
	arrive(PEER_EXPRESS_MAX);
	peernet_run(100 * MS);
	came(n);
}

static int carry_on(void *owner, const void *frame, size_t len)
{
	(void)owner;
	(void)frame;
	(void)len;
	sent++;
	return 0;
}

static void express_taken_in_part_continues(void **state)
{
	struct peer_express way = {.owner = carried, .send = carry_on};

	(void)state;
	peer_express_open(a, &way);
	assert_int_equal(express(1), 0);
	for (unsigned int i = 2; i < 2000; i++) {
		assert_int_equal(express(i), 0);
		assert_int_equal(sent, i); /* none by the control line */
		peer_express_done(a, 0, NULL);
	}
	assert_false(peer_express_quiet(a));
}

static void control_frames_without_end_before_an_early_one_end_the_peering(void **state)
{
	/* not sent by any honest sender: none of it is ever acknowledged */
	(void)state;
	assert_int_equal(express(1), 0);
	for (unsigned int i = 0; i < 5000 && !net.n[1].downs; i++) {
		carried[0].taken = false;
		peer_express_done(a, 0, NULL); /* a lie: so the sender sends on */
		(void)peernet_lease(a, i + 2, true);
		if (i % 100 == 0)
			peernet_run(MS);
	}
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[1].messages, 0);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[1].why.code, ERR_PROTO);
}

/* ---- rows ---- */

/* ATTENTION_RESULT with `bytes` of values, made where the line takes it from. */
static int express_rows(uint64_t number, size_t bytes)
{
	size_t room = bytes + 512;
	uint8_t *made = mem_zalloc(PEER_EXPRESS_HEAD + room);
	struct wire_attention_result m = {.attend = number, .values = {zeros, bytes}};
	struct cursor c;

	assert_non_null(made);
	cursor_write(&c, made + PEER_EXPRESS_HEAD, room);
	assert_int_equal(wire_attention_result_put(&c, &m), 0);
	return peer_send_express_made(a, WIRE_T_ATTENTION_RESULT, made, c.pos);
}

static int carry_made(void *owner, uint8_t *made, size_t len)
{
	struct wire_header h;
	struct cursor body;

	assert_ptr_equal(owner, carried);
	if (no_room)
		return err_raise(ERR_LIMIT, "no room");
	assert_int_equal(wire_frame_get(made + PEER_EXPRESS_LINE + 1, len, &h, &body), 0);
	assert_int_equal(h.type, WIRE_T_ATTENTION_RESULT);
	assert_true(h.flags & WIRE_FLAG_ROWS);
	made_len[made_count++] = len;
	mem_free(made);
	return 0;
}

static void on_rows(struct peernet_node *node, struct peer *peer,
		    const struct wire_header *h, struct cursor *body)
{
	(void)peer;
	(void)body;
	assert_int_equal(h->type, WIRE_T_ATTENTION_RESULT);
	node->messages++;
}

static void rows_begin(void)
{
	struct peer_express way = {
		.owner = carried, .send = carry, .send_made = carry_made};

	made_count = 0;
	net.n[1].on_other = on_rows;
	peer_express_open(a, &way);
}

static void express_rows_are_large_and_bounded_by_a_window(void **state)
{
	unsigned int n = 0;

	(void)state;
	rows_begin();
	while (made_count == n && n < LINE_MAX) {
		assert_int_equal(express_rows(++n, 500 << 10), 0);
		if (made_count < n)
			break; /* that one waits for the control line */
	}
	assert_int_equal(made_count, PEER_EXPRESS_WINDOW / ((500 << 10) + 512));
	/* acknowledged frames free space */
	peer_express_done(a, made_len[0], NULL);
	assert_int_equal(net.n[0].downs, 0);
}

static void express_rows_refused_use_control_line(void **state)
{
	(void)state;
	rows_begin();
	no_room = true;
	assert_int_equal(express_rows(1, 1000), 0);
	no_room = false;
	assert_int_equal(made_count, 0);
	assert_int_equal(express_rows(2, PEER_EXPRESS_ROWS_BYTES), 0); /* too large */
	assert_int_equal(made_count, 0);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[1].messages, 2);
}

static void express_line_with_copies_leaves_rows_to_control_line(void **state)
{
	(void)state;
	net.n[1].on_other = on_rows;
	assert_int_equal(express_rows(1, 1000), 0);
	assert_int_equal(sent, 0);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[1].messages, 1);
}

/* ---- faults ---- */

static void control_line_losing_frames_is_detected_with_express(void **state)
{
	(void)state;
	assert_int_equal(peernet_lease(a, 1, true), 0);
	assert_int_equal(express(2), 0);
	mem_hub_break(net.hub, peernet_endpoint(0), peernet_endpoint(1));
	arrive(1);
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[1].messages, 0);
	assert_int_equal(net.n[1].downs, 1);
	assert_false(carried[0].taken); /* the data line's owner ends it */
}

static void express_lost_ends_the_peering(void **state)
{
	struct err why;

	(void)state;
	assert_int_equal(express(1), 0);
	err_set(&why, ERR_TRANSPORT, "it broke");
	peer_express_done(a, 0, &why);
	assert_int_equal(sm_state(&a->sm), PEER_UP); /* not inside the call */
	peernet_run(MS);
	assert_int_equal(net.n[0].downs, 1);
	assert_non_null(strstr(net.n[0].why.text, "it broke"));
}

static void express_of_another_peering_or_kind_is_refused(void **state)
{
	static const enum wire_type never[] = {WIRE_T_HELLO, WIRE_T_WELCOME, WIRE_T_PING,
					       WIRE_T_PONG, WIRE_T_BYE};
	uint8_t frame[WIRE_HEADER_BYTES + 256];
	struct wire_header good, h;
	struct carried forged = {0};
	struct cursor body;

	(void)state;
	assert_int_equal(express(1), 0);
	assert_int_equal(wire_frame_get(carried[0].frame, carried[0].len, &good, &body),
			 0);
	for (unsigned int i = 0; i < ARRAY_LEN(never) + 5; i++) {
		h = good;
		if (i < ARRAY_LEN(never))
			h.type = (uint16_t)never[i];
		else if (i == ARRAY_LEN(never))
			h.epoch++;
		else if (i == ARRAY_LEN(never) + 1)
			h.sender[3] ^= 1;
		else if (i == ARRAY_LEN(never) + 2)
			h.target[3] ^= 1;
		else if (i == ARRAY_LEN(never) + 3)
			h.sequence--; /* one that was delivered before */
		wire_frame_put(frame, &h, body.base + body.pos);
		if (i == ARRAY_LEN(never) + 4)
			frame[carried[0].len - 1] ^= 1;
		assert_true(arrive_as(&forged, frame, carried[0].len) < 0);
		assert_false(forged.taken);
	}
	assert_true(arrive_as(&forged, carried[0].frame, 3) < 0);
	came(0);
	assert_int_equal(express(2), 0);
	arrive(1);
	assert_true(arrive_as(&forged, carried[0].frame, carried[0].len) < 0); /* twice */
	arrive(1);
	came(2);
	assert_true(arrive_as(&forged, carried[1].frame, carried[1].len) < 0);
	came(2);
	assert_int_equal(sm_state(&b->sm), PEER_UP);
}

static void peering_end_drops_early_messages(void **state)
{
	(void)state;
	assert_int_equal(express(1), 0);
	assert_int_equal(express(2), 0);
	assert_int_equal(peernet_lease(a, 3, true), 0);
	arrived = 1;
	arrive(1);
	peernet_run(MS);
	peer_kill(b, &(struct err){.code = ERR_PEER, .text = "x"});
	assert_false(carried[1].taken);
	assert_true(list_empty(&carried[1].in.link));
	peernet_run(3 * LOOP_NS_PER_S); /* and comes up again, clean */
	assert_int_equal(sm_state(&a->sm), PEER_UP);
	b = peernet_only(1);
	assert_true(arrive_as(&carried[0], carried[0].frame, carried[0].len) < 0);
	assert_int_equal(express(1), 0); /* closed: the control line has it */
	assert_int_equal(sent, 2);
	peernet_run(MS);
	assert_int_equal(net.n[1].messages, 1);
	assert_int_equal(net.n[1].numbers[0], 1);
}

/* ---- want of memory ---- */

enum { LONG = 2000 };

/* The next frame of node 0 on the control line, in its name. */
static void inject(struct wire_header *h, enum wire_type type, uint32_t skipped,
		   const void *body, size_t len)
{
	uint8_t frame[WIRE_HEADER_BYTES + 2 * LONG];

	assert_true(len <= 2 * LONG);
	h->type = (uint16_t)type;
	h->flags = skipped;
	h->sequence += 1 + skipped;
	h->body_len = (uint32_t)len;
	wire_frame_put(frame, h, body);
	peernet_inject(&net.n[1], frame, WIRE_HEADER_BYTES + len,
		       net.n[1].tap[net.n[1].tap_count - 1].user);
}

/* LEASE 1 has arrived; 2 will, by the other path, and injected frames wait for it. */
static struct wire_header hold_up(void)
{
	struct wire_header h;
	struct cursor body;

	peernet_tap(&net.n[1]);
	assert_int_equal(peernet_lease(a, 1, true), 0);
	peernet_run(MS);
	assert_int_equal(express(2), 0);
	assert_true(net.n[1].tap_count > 0);
	assert_int_equal(wire_frame_get(net.n[1].tap[net.n[1].tap_count - 1].data,
					net.n[1].tap[net.n[1].tap_count - 1].len, &h,
					&body),
			 0);
	return h;
}

static void early_frame_without_memory_ends_the_peering(void **state)
{
	static const uint8_t body[LONG];
	struct wire_header h = hold_up();

	(void)state;
	mem_fail_at(1);
	inject(&h, WIRE_T_REGISTER, 1, body, LONG);
	mem_fail_at(0);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[1].why.code, ERR_NOMEM);
}

/* Nothing is missing any more, but turns have time for one message. */
static void control_frames_behind_due_ones_do_not_end_the_peering(void **state)
{
	enum { MANY = 3000 };
	struct wire_header h = hold_up();
	uint8_t body[64];
	struct cursor c;

	(void)state;
	for (unsigned int i = 0; i < MANY; i++) {
		struct wire_lease m = {.room = i + 3};

		cursor_write(&c, body, sizeof(body));
		assert_int_equal(wire_lease_put(&c, &m), 0);
		inject(&h, WIRE_T_LEASE, i == 0, body, c.pos);
		if (i != 100)
			continue;
		loop_virtual_parts(net.loop, 1);
		arrive(1);
		came(2);
	}
	assert_true(net.n[1].messages < MANY);
	loop_virtual_parts(net.loop, 0);
	peernet_run(MS);
	came(MANY + 2);
}

static unsigned int larges;

static void on_large(struct peernet_node *node, struct peer *peer,
		     const struct wire_header *h, struct cursor *body)
{
	(void)node;
	(void)peer;
	(void)h;
	(void)body;
	larges++;
}

/* As before, by bytes: the small ones that are due make room for large ones. */
static void large_frames_behind_due_ones_do_not_end_the_peering(void **state)
{
	enum { SMALL = 900, LARGE = 299, BYTES = 2 * LONG };
	struct accounts accounts = {.limit = 16u << 20};
	struct account *account = account_get(&accounts, "peer", "fleet");
	struct wire_header h = hold_up();
	uint8_t *body = mem_zalloc(BYTES);
	struct cursor c;

	(void)state;
	net.n[1].account = account;
	net.n[1].on_other = on_large;
	larges = 0;
	for (unsigned int i = 0; i <= SMALL + LARGE; i++) {
		struct wire_lease m = {.room = i + 3};

		cursor_write(&c, body, BYTES);
		assert_int_equal(wire_lease_put(&c, &m), 0);
		inject(&h, i <= SMALL ? WIRE_T_LEASE : WIRE_T_TRANSFER_INFO, i == 0, body,
		       i <= SMALL ? c.pos : BYTES);
		if (i != SMALL)
			continue;
		loop_virtual_parts(net.loop, 1);
		arrive(1);
		came(2);
	}
	loop_virtual_parts(net.loop, 0);
	peernet_run(MS);
	came(SMALL + 3);
	assert_int_equal(larges, LARGE);
	mem_free(body);
	peernet_crash(0, MEM_CRASH_POWER);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(account->bytes[ACCOUNT_PARTS], 0);
	net.n[1].account = NULL;
	account_unref(account);
	assert_true(accounts_idle(&accounts));
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, peernet_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(express_ahead_of_control_line_waits),
		TEST(control_line_ahead_of_express_waits),
		TEST(message_mixed_at_random_keeps_the_order),
		TEST(express_without_space_uses_control_line),
		TEST(express_out_of_order_is_refused),
		TEST(express_not_taken_is_bounded_and_stops_control_line),
		TEST(control_frames_without_end_before_an_early_one_end_the_peering),
		TEST(express_taken_in_part_continues),
		TEST(express_rows_are_large_and_bounded_by_a_window),
		TEST(express_rows_refused_use_control_line),
		TEST(express_line_with_copies_leaves_rows_to_control_line),
		TEST(control_line_losing_frames_is_detected_with_express),
		TEST(express_lost_ends_the_peering),
		TEST(express_of_another_peering_or_kind_is_refused),
		TEST(peering_end_drops_early_messages),
		TEST(early_frame_without_memory_ends_the_peering),
		TEST(control_frames_behind_due_ones_do_not_end_the_peering),
		TEST(large_frames_behind_due_ones_do_not_end_the_peering),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
