/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Long messages of peers: they are sent in parts and delivered whole, in order, or not at
 * all; and invalid parts end the peering. Node 1's frames are tapped, so that its next
 * expected frame can be forged in its sender's name.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/account.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/peer/peer.h"
#include "tests/lib/peernet.h"

#define MS LOOP_NS_PER_MS
#define PART 64u
#define BODY 1000u
#define QUEUE 20000u

static struct peer *a;
static unsigned int came, lease_before;
static uint8_t *kept;

/* A message arrived: whole, and after the LEASEs that were sent before it. */
static void on_other(struct peernet_node *node, struct peer *peer,
		     const struct wire_header *h, struct cursor *body)
{
	assert_int_equal(h->type, WIRE_T_TRANSFER_INFO);
	assert_int_equal(h->body_len, cursor_left(body));
	for (size_t i = 0; i < h->body_len; i++)
		assert_int_equal(body->base[i], (uint8_t)(i * 7 + h->body_len));
	lease_before = node->messages;
	mem_free(mem_steal(kept));
	if (came++ % 2)
		kept = peer_body_take(peer); /* and the other half it frees itself */
}

static uint8_t *body_new(size_t len)
{
	uint8_t *body = mem_alloc(len);

	for (size_t i = 0; i < len; i++)
		body[i] = (uint8_t)(i * 7 + len);
	return body;
}

static int send_long(size_t len)
{
	return peer_send_owned(a, WIRE_T_TRANSFER_INFO, body_new(len), len);
}

static int setup(void **state)
{
	peernet_open(1, 0);
	net.options.part_bytes = PART;
	net.options.queue_bytes = QUEUE;
	peernet_start(0);
	peernet_start(1);
	net.n[0].on_other = net.n[1].on_other = on_other;
	a = peernet_join();
	came = lease_before = 0;
	kept = NULL;
	(void)state;
	return 0;
}

static int teardown(void **state)
{
	mem_free(kept);
	return peernet_teardown(state);
}

/* ---- parts that are right ---- */

static void message_of_any_length_arrives_whole(void **state)
{
	static const size_t lens[] = {1, PART, PART + 1, 2 * PART, BODY, QUEUE - 500};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(lens); i++) {
		assert_int_equal(send_long(lens[i]), 0);
		peernet_run(500 * MS);
		assert_int_equal(came, i + 1);
	}
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
}

static void message_keeps_its_place_among_others(void **state)
{
	(void)state;
	assert_int_equal(peernet_lease(a, 1, true), 0);
	assert_int_equal(send_long(BODY), 0);
	assert_int_equal(peernet_lease(a, 2, true), 0);
	assert_int_equal(send_long(BODY), 0);
	assert_int_equal(peernet_lease(a, 3, true), 0);
	peernet_run(10 * MS);
	assert_int_equal(came, 2);
	assert_int_equal(lease_before, 2);
	assert_int_equal(net.n[1].messages, 3);
	for (unsigned int i = 0; i < 3; i++)
		assert_int_equal(net.n[1].numbers[i], i + 1);
}

static void message_to_self_arrives_whole(void **state)
{
	(void)state;
	a = peernet_dial(0, 0);
	peernet_run(10 * MS);
	assert_int_equal(sm_state(&a->sm), PEER_UP);
	for (unsigned int i = 0; i < 2; i++)
		assert_int_equal(send_long(BODY), 0);
	peernet_run(10 * MS);
	assert_int_equal(came, 2);
	peer_release(a);
}

/* Rooms of one daemon send in the same turn: their memory was allocated before. */
static void messages_to_self_beyond_the_queue_all_arrive(void **state)
{
	struct peer *self = peernet_dial(0, 0);

	(void)state;
	peernet_run(MS);
	for (unsigned int i = 0; i < 2 * QUEUE / BODY; i++)
		assert_int_equal(
			peer_send_owned(self, WIRE_T_TRANSFER_INFO, body_new(BODY), BODY),
			0);
	peernet_run(MS);
	assert_int_equal(came, 2 * QUEUE / BODY);
	assert_int_equal(sm_state(&self->sm), PEER_UP);
	peer_release(self);
}

/* Parts wait for turns; waiting ones must not end the peering while the line is free. */
static void messages_beyond_the_queue_are_sent_at_once(void **state)
{
	const size_t len = 4 * BODY;
	const unsigned int n = 2 * QUEUE / (4 * BODY);

	(void)state;
	for (unsigned int i = 0; i < n; i++)
		assert_int_equal(send_long(len), 0);
	for (unsigned int i = 0; came < n; i++) {
		assert_true(i < 1000);
		peernet_run(100 * MS);
	}
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
}

/* Nothing of it is handed up, and on neither side anything of it is left. */
static void peer_dead_during_message_leaks_nothing(void **state)
{
	int64_t live = mem_live();
	unsigned int parts = 0;

	setup(state);
	peernet_tap(&net.n[1]);
	mem_hub_set_queue_max(net.hub, 4); /* so that it takes its time */
	assert_int_equal(send_long(QUEUE - 500), 0);
	peernet_run(20 * MS);
	peernet_crash(0, MEM_CRASH_POWER);
	peernet_run(3 * LOOP_NS_PER_S);
	for (unsigned int i = 0; i < net.n[1].tap_count; i++) {
		struct wire_header h;
		struct cursor body;

		assert_int_equal(wire_frame_get(net.n[1].tap[i].data, net.n[1].tap[i].len,
						&h, &body),
				 0);
		parts += h.type == WIRE_T_PART;
	}
	assert_in_range(parts, 2, QUEUE / PART / 2);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(came, 0);
	teardown(state);
	assert_int_equal(mem_live(), live);
}

static void sender_of_lost_peer_frees_the_rest(void **state)
{
	struct err why;

	(void)state;
	assert_int_equal(send_long(QUEUE - 500), 0);
	err_set(&why, ERR_CANCELED, "the test wants it so");
	peer_kill(a, &why);
	peernet_run(10 * MS);
	assert_int_equal(came, 0);
	assert_true(send_long(BODY) < 0); /* it is freed all the same */
	err_clear();
}

/* ---- parts that are wrong ---- */

struct forged {
	uint16_t type;
	uint32_t total, at, len;
};

static struct wire_header last_header(void)
{
	struct peernet_node *node = &net.n[1];
	struct wire_header h;
	struct cursor body;

	assert_true(node->tap_count > 0);
	assert_int_equal(wire_frame_get(node->tap[node->tap_count - 1].data,
					node->tap[node->tap_count - 1].len, &h, &body),
			 0);
	return h;
}

static void inject(struct wire_header *h, const struct forged *f)
{
	static const uint8_t bytes[2 * PART];
	struct wire_part part = {.type = f->type,
				 .total = f->total,
				 .at = f->at,
				 .bytes = {bytes, f->len}};
	uint8_t frame[WIRE_HEADER_BYTES + 4 * PART];
	struct cursor out;

	cursor_write(&out, frame + WIRE_HEADER_BYTES, sizeof(frame) - WIRE_HEADER_BYTES);
	assert_int_equal(wire_part_put(&out, &part), 0);
	h->type = WIRE_T_PART;
	h->flags = 0;
	h->sequence++;
	h->body_len = (uint32_t)out.pos;
	wire_frame_put(frame, h, frame + WIRE_HEADER_BYTES);
	peernet_inject(&net.n[1], frame, WIRE_HEADER_BYTES + out.pos,
		       net.n[1].tap[net.n[1].tap_count - 1].user);
}

/* After a first part that is right, unless `first`. */
static void assert_ends(struct forged f, bool first)
{
	struct forged good = {WIRE_T_TRANSFER_INFO, BODY, 0, PART};
	int64_t live = mem_live();
	struct wire_header h;

	setup(NULL);
	peernet_tap(&net.n[1]);
	assert_int_equal(peernet_lease(a, 1, true), 0);
	peernet_run(MS);
	h = last_header();
	if (!first)
		inject(&h, &good);
	assert_int_equal(net.n[1].downs, 0);
	inject(&h, &f);
	if (net.n[1].downs != 1 || net.n[1].why.code != ERR_PROTO || came)
		fail_msg("%u bytes at %u of %u of a %u: down %u times, came %u", f.len,
			 f.at, f.total, f.type, net.n[1].downs, came);
	teardown(NULL);
	assert_int_equal(mem_live(), live);
}

static void part_invalid_ends_the_peering(void **state)
{
	static const struct {
		struct forged f;
		bool first;
	} wrong[] = {
		{{WIRE_T_TRANSFER_INFO, BODY, PART, PART}, true}, /* a middle first */
		{{WIRE_T_TRANSFER_INFO, 0, 0, 0}, true},	  /* of nothing */
		{{WIRE_T_TRANSFER_INFO, BODY, 0, 0}, true},	  /* nothing of it */
		{{WIRE_T_TRANSFER_INFO, 1 << 21, 0, PART},
		 true}, /* over the type's cap */
		{{WIRE_T_TRANSFER_INFO, PART - 1, 0, PART}, true}, /* more than all */
		{{WIRE_T_LEASE, BODY, 0, PART}, true},		   /* LEASEs are short */
		{{WIRE_T_PART, BODY, 0, PART}, true},		   /* a part of parts */
		{{WIRE_T_HELLO, BODY, 0, PART}, true}, /* past the handshake */
		{{WIRE_T_BYE, PART, 0, PART}, true},
		{{0, BODY, 0, PART}, true},
		{{WIRE_T_END, BODY, 0, PART}, true},
		{{0xffff, BODY, 0, PART}, true},
		{{WIRE_T_TRANSFER_INFO, BODY, 0, PART}, false}, /* the first again */
		{{WIRE_T_TRANSFER_INFO, BODY, 2 * PART, PART},
		 false}, /* one is left out */
		{{WIRE_T_TRANSFER_INFO, BODY, PART - 1, PART}, false}, /* it overlaps */
		{{WIRE_T_TRANSFER_INFO, BODY, PART, 0}, false},
		{{WIRE_T_TRANSFER_INFO, BODY + 1, PART, PART}, false}, /* another's */
		{{WIRE_T_OFFER, BODY, PART, PART}, false},
		{{WIRE_T_OFFER, BODY, 0, PART}, false}, /* two at a time */
		{{WIRE_T_TRANSFER_INFO, BODY, UINT32_MAX, PART}, false},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(wrong); i++)
		assert_ends(wrong[i].f, wrong[i].first);
}

/* Incomplete messages are charged to their principal, for any number of daemons. */
/* A query that finds the account full is counted, and the peering stays up. */
static void query_in_parts_ends_no_peering(void **state)
{
	const struct forged fills = {WIRE_T_TRANSFER_INFO, 600u << 10, 0, PART},
			    asks = {WIRE_T_CHUNK_LOOKUP, 100u << 10, 0, PART};
	struct accounts accounts = {.limit = 8u << 20};
	struct account *account = account_get(&accounts, "peer", "fleet");
	struct charge others = {0};
	struct wire_header h;
	struct peer *c;

	(void)state;
	net.n[1].account = account;
	peernet_start(2);
	c = peernet_dial(2, 1);
	peernet_run(100 * MS);
	peernet_tap(&net.n[1]);
	assert_int_equal(peernet_lease(a, 1, true), 0);
	peernet_run(MS);
	h = last_header();
	inject(&h, &fills);
	charge_force(&others, account, ACCOUNT_PARTS, 1u << 20);
	assert_int_equal(peernet_lease(c, 2, true), 0);
	peernet_run(MS);
	h = last_header();
	inject(&h, &asks);
	peernet_run(MS);
	assert_int_equal(net.n[1].downs, 0);
	assert_int_equal(account->bytes[ACCOUNT_PARTS],
			 (1u << 20) + fills.total + asks.total);
	peer_release(c);
	peernet_crash(2, MEM_CRASH_POWER);
	peernet_crash(0, MEM_CRASH_POWER);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(account->bytes[ACCOUNT_PARTS], 1u << 20);
	charge_drop(&others);
	net.n[1].account = NULL;
	account_unref(account);
	assert_true(accounts_idle(&accounts));
}

static void message_in_parts_is_charged(void **state)
{
	const struct forged begins = {WIRE_T_TRANSFER_INFO, 600u << 10, 0, PART};
	struct accounts accounts = {.limit = 16u << 20};
	struct account *account = account_get(&accounts, "peer", "fleet");
	struct wire_header h;
	struct peer *c;

	(void)state;
	assert_true(net.options.message_bytes <= accounts.limit / 16);
	net.n[1].account = account;
	peernet_start(2);
	c = peernet_dial(2, 1);
	peernet_run(100 * MS);
	assert_int_equal(sm_state(&c->sm), PEER_UP);
	peernet_tap(&net.n[1]);

	assert_int_equal(peernet_lease(a, 1, true), 0);
	peernet_run(MS);
	h = last_header();
	inject(&h, &begins);
	peernet_run(MS);
	assert_int_equal(account->bytes[ACCOUNT_PARTS], begins.total);

	assert_int_equal(peernet_lease(c, 2, true), 0);
	peernet_run(MS);
	h = last_header();
	inject(&h, &begins);
	peernet_run(MS);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[1].why.code, ERR_LIMIT);
	assert_non_null(strstr(net.n[1].why.text, "peer:fleet: parts: "));
	assert_int_equal(account->bytes[ACCOUNT_PARTS], begins.total);
	assert_int_equal(account->refused, 1);
	assert_int_equal(sm_state(&a->sm), PEER_UP);

	peer_release(c);
	peernet_crash(2, MEM_CRASH_POWER);
	peernet_crash(0, MEM_CRASH_POWER);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(account->bytes[ACCOUNT_PARTS], 0);
	net.n[1].account = NULL;
	account_unref(account);
	assert_true(accounts_idle(&accounts));
}

static void part_replayed_changes_nothing(void **state)
{
	(void)state;
	peernet_tap(&net.n[1]);
	assert_int_equal(send_long(BODY), 0);
	peernet_run(10 * MS);
	assert_int_equal(came, 1);
	for (unsigned int i = net.n[1].tap_count; i-- > 0;)
		peernet_inject(&net.n[1], net.n[1].tap[i].data, net.n[1].tap[i].len,
			       net.n[1].tap[i].user);
	assert_int_equal(send_long(BODY), 0);
	peernet_run(10 * MS);
	assert_int_equal(came, 2);
	assert_int_equal(net.n[1].downs, 0);
}

static void long_message_without_memory_ends_the_peering(void **state)
{
	struct forged part = {WIRE_T_TRANSFER_INFO, BODY, 0, PART};
	struct wire_header h;

	(void)state;
	peernet_tap(&net.n[1]);
	assert_int_equal(peernet_lease(a, 1, true), 0);
	peernet_run(MS);
	h = last_header();
	mem_fail_at(1);
	inject(&h, &part);
	mem_fail_at(0);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[1].why.code, ERR_NOMEM);
	assert_int_equal(came, 0);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(message_of_any_length_arrives_whole,
						setup, teardown),
		cmocka_unit_test_setup_teardown(message_keeps_its_place_among_others,
						setup, teardown),
		cmocka_unit_test_setup_teardown(message_to_self_arrives_whole, setup,
						teardown),
		cmocka_unit_test_setup_teardown(
			messages_to_self_beyond_the_queue_all_arrive, setup, teardown),
		cmocka_unit_test_setup_teardown(
			messages_beyond_the_queue_are_sent_at_once, setup, teardown),
		cmocka_unit_test(peer_dead_during_message_leaks_nothing),
		cmocka_unit_test_setup_teardown(sender_of_lost_peer_frees_the_rest, setup,
						teardown),
		cmocka_unit_test(part_invalid_ends_the_peering),
		cmocka_unit_test_setup_teardown(query_in_parts_ends_no_peering, setup,
						teardown),
		cmocka_unit_test_setup_teardown(message_in_parts_is_charged, setup,
						teardown),
		cmocka_unit_test_setup_teardown(part_replayed_changes_nothing, setup,
						teardown),
		cmocka_unit_test_setup_teardown(
			long_message_without_memory_ends_the_peering, setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
