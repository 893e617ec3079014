/* SPDX-License-Identifier: Apache-2.0 */
/*
 * peer against hostile frames and handshakes. Real frames are tapped, replayed and
 * modified; node 2 is raw, a link without peers that sends frames of the test.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "tests/sim/link_mem.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer_impl.h"
#include "tests/lib/peernet.h"

#define MS LOOP_NS_PER_MS

/* ---- hostile frames ---- */

static const struct peernet_tapped *last_of_type(struct peernet_node *node,
						 unsigned int type)
{
	for (unsigned int i = node->tap_count; i-- > 0;) {
		struct wire_header h;
		struct cursor body;

		assert_int_equal(
			wire_frame_get(node->tap[i].data, node->tap[i].len, &h, &body),
			0);
		if (h.type == type)
			return &node->tap[i];
	}
	fail_msg("no %s came", wire_type_name(type));
	return NULL;
}

/* The state is as peernet_join() left it. */
static void assert_unmoved(struct peer *peer, unsigned int messages)
{
	peernet_run(2 * LOOP_NS_PER_S);
	assert_int_equal(net.n[1].messages, messages);
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
	assert_int_equal(peer->epoch, 1);
	assert_int_equal(peernet_lease(peer, 77, true), 0);
	peernet_run(10 * MS);
	assert_int_equal(net.n[1].messages, messages + 1);
	assert_int_equal(net.n[1].numbers[messages], 77);
}

static void frame_cut_or_bent_is_dropped(void **state)
{
	struct peer *peer = peernet_join();
	struct peernet_tapped t;
	uint8_t *copy;

	(void)state;
	peernet_tap(&net.n[1]);
	assert_int_equal(peernet_lease(peer, 1, true), 0);
	peernet_run(1 * MS);
	t = *last_of_type(&net.n[1], WIRE_T_LEASE);
	copy = calloc(1, 2u << 20);
	for (size_t len = 0; len < t.len; len++)
		peernet_inject(&net.n[1], t.data, len, t.user);
	for (size_t bit = 0; bit < 8 * t.len; bit++) {
		memcpy(copy, t.data, t.len);
		copy[bit / 8] ^= (uint8_t)(1u << bit % 8);
		peernet_inject(&net.n[1], copy, t.len, t.user);
	}
	memcpy(copy, t.data, t.len);
	peernet_inject(&net.n[1], copy, t.len + 1, t.user);
	peernet_inject(&net.n[1], copy, (1u << 20) + 1, t.user);
	free(copy);
	assert_int_equal(net.n[1].peers->stats.bad_frames, t.len * 9 + 2);
	assert_unmoved(peer, 1);
}

static void frame_replayed_is_dropped(void **state)
{
	struct peer *peer = peernet_join();
	unsigned int count;

	(void)state;
	peernet_tap(&net.n[1]);
	for (unsigned int i = 0; i < 20; i++)
		assert_int_equal(peernet_lease(peer, i, true), 0);
	peernet_run(LOOP_NS_PER_S);
	count = net.n[1].tap_count;
	assert_true(count > 20);
	for (unsigned int i = count; i-- > 0;)
		peernet_inject(&net.n[1], net.n[1].tap[i].data, net.n[1].tap[i].len,
			       net.n[1].tap[i].user);
	assert_int_equal(net.n[1].peers->stats.replays, count);
	assert_unmoved(peer, 20);
}

/* The LEASE frame's header, changed by the caller, with a right checksum. */
static void inject_changed(const struct peernet_tapped *t, const struct wire_header *h,
			   const char *user)
{
	uint8_t copy[300];

	assert_true(t->len <= sizeof(copy));
	wire_frame_put(copy, h, t->data + WIRE_HEADER_BYTES);
	peernet_inject(&net.n[1], copy, t->len, user);
}

static void frame_of_wrong_header_is_dropped(void **state)
{
	struct peer *peer = peernet_join();
	const struct peers_stats *stats = &net.n[1].peers->stats;
	struct wire_header h, good;
	struct cursor body;
	const struct peernet_tapped *t;

	(void)state;
	peernet_tap(&net.n[1]);
	assert_int_equal(peernet_lease(peer, 1, true), 0);
	peernet_run(1 * MS);
	t = last_of_type(&net.n[1], WIRE_T_LEASE);
	assert_int_equal(wire_frame_get(t->data, t->len, &good, &body), 0);
	good.sequence++;
	h = good;
	h.target[3] ^= 1;
	inject_changed(t, &h, t->user);
	memset(h.target, 0, 16);
	inject_changed(t, &h, t->user);
	h = good;
	h.sender[0] ^= 1;
	inject_changed(t, &h, t->user);
	memcpy(h.sender, h.target, 16); /* in our own name */
	inject_changed(t, &h, t->user);
	h = good;
	h.epoch++;
	inject_changed(t, &h, t->user);
	h.epoch = 0;
	inject_changed(t, &h, t->user);
	assert_int_equal(stats->stale_frames, 6);
	inject_changed(t, &good, "mallory");
	inject_changed(t, &good, "");
	assert_int_equal(stats->foreign_user, 2);
	/* HELLO, WELCOME and BYE do not get around it */
	h = good;
	h.type = WIRE_T_BYE;
	h.epoch ^= 1;
	inject_changed(t, &h, t->user);
	h = good;
	h.type = WIRE_T_BYE;
	inject_changed(t, &h, "mallory");
	h.type = WIRE_T_WELCOME;
	inject_changed(t, &h, t->user);
	h.type = WIRE_T_HELLO;
	inject_changed(t, &h, t->user);
	memset(h.target, 0, 16);
	inject_changed(t, &h, t->user);
	assert_unmoved(peer, 1);
}

static void frame_from_the_future_ends_the_peering(void **state)
{
	struct peer *peer = peernet_join();
	const struct peernet_tapped *t;
	struct wire_header h;
	struct cursor body;

	(void)state;
	peernet_tap(&net.n[1]);
	assert_int_equal(peernet_lease(peer, 1, true), 0);
	peernet_run(1 * MS);
	t = last_of_type(&net.n[1], WIRE_T_LEASE);
	assert_int_equal(wire_frame_get(t->data, t->len, &h, &body), 0);
	h.sequence += 4;
	inject_changed(t, &h, t->user);
	assert_int_equal(net.n[1].downs, 1);
	assert_int_equal(net.n[1].why.code, ERR_TRANSPORT);
	assert_non_null(strstr(net.n[1].why.text, "lost 3 messages"));
	assert_int_equal(net.n[1].messages, 1);
}

/* ---- hostile handshakes: node 2 is raw and sends frames of the test ---- */

static struct link_line *raw_start(void (*on_frame)(void *, const struct link_frame *))
{
	struct link_line *line;
	struct peernet_node *raw = &net.n[2];

	memset(raw, 0, sizeof(*raw));
	assert_int_equal(
		link_mem_new(net.hub, peernet_endpoint(2), "mallory", &raw->link), 0);
	peernet_tap(raw);
	raw->on_frame = on_frame;
	assert_int_equal(raw->link->ops->dial(raw->link, peernet_endpoint(0), raw, &line),
			 0);
	peernet_run(1 * MS);
	return line;
}

struct forged {
	uint8_t instance;
	uint64_t epoch, nonce, features;
	uint16_t version_min, version_max;
	const char *endpoint, *product;
	enum wire_type type;
	struct wire_blob addresses;
};

static void raw_hello(struct link_line *line, struct forged forged)
{
	struct wire_header h = {.version = WIRE_VERSION_MAX,
				.type = (uint16_t)forged.type,
				.epoch = forged.epoch};
	struct wire_hello m = {.version_min = forged.version_min,
			       .version_max = forged.version_max,
			       .features = forged.features,
			       .nonce = forged.nonce,
			       .addresses = forged.addresses};
	uint8_t frame[2048], body[1900];
	struct cursor c;

	memset(h.sender, forged.instance, 16);
	if (forged.type != WIRE_T_HELLO)
		memcpy(h.target, peers_instance(net.n[0].peers), 16);
	strcpy(m.endpoint, forged.endpoint);
	strcpy(m.product, forged.product);
	strcpy(m.name, "mallory");
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_hello_put(&c, &m), 0);
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	assert_int_equal(net.n[2].link->ops->send(line, frame, WIRE_HEADER_BYTES + c.pos),
			 0);
}

/* a valid HELLO except for the fields of the test */
#pragma GCC diagnostic ignored "-Woverride-init"
#pragma GCC diagnostic ignored "-Woverride-init-side-effects"
#define FORGED(...)                                                                   \
	(struct forged)                                                               \
	{                                                                             \
		.instance = 9, .epoch = 5, .nonce = 6, .features = PEER_FEATURE_BASE, \
		.version_min = WIRE_VERSION_MIN, .version_max = WIRE_VERSION_MAX,     \
		.endpoint = peernet_endpoint(2), .product = "kvd 9.9",                \
		.type = WIRE_T_HELLO, __VA_ARGS__                                     \
	}

static void hello_without_proof_changes_nothing(void **state)
{
	struct peer *peer = peernet_join();
	struct link_line *line = raw_start(NULL);

	(void)state;
	/* "I am a new daemon at 1's endpoint" */
	raw_hello(line, FORGED(.endpoint = peernet_endpoint(1)));
	peernet_run(2 * LOOP_NS_PER_S);
	assert_int_equal(net.n[0].downs + net.n[1].downs, 0);
	assert_int_equal(net.n[0].peers->count, 1);
	/* "I am a new daemon at my own endpoint", and silence */
	raw_hello(line, FORGED());
	peernet_run(1 * MS);
	assert_int_equal(net.n[0].peers->count, 2);
	peernet_run(6 * LOOP_NS_PER_S);
	assert_int_equal(net.n[0].peers->count, 1);
	assert_int_equal(net.n[0].ups, 1);
	assert_int_equal(peer->epoch, 1);
	net.n[2].link->ops->hangup(line);
}

static void hello_in_the_name_of_a_peer_is_dropped(void **state)
{
	struct peer *peer = peernet_join();
	struct link_line *line = raw_start(NULL);
	struct wire_header h = {
		.version = WIRE_VERSION_MAX, .type = WIRE_T_HELLO, .epoch = 5};
	struct wire_hello m = {.version_min = WIRE_VERSION_MIN,
			       .version_max = WIRE_VERSION_MAX,
			       .features = 1};
	uint8_t frame[1024], body[900];
	struct cursor c;

	(void)state;
	memcpy(h.sender, peer->instance, 16);
	strcpy(m.endpoint, peernet_endpoint(2));
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_hello_put(&c, &m), 0);
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	/* another key */
	peernet_inject(&net.n[0], frame, WIRE_HEADER_BYTES + c.pos, "mallory");
	assert_int_equal(net.n[0].peers->stats.foreign_user, 1);
	/* without keys: another endpoint */
	peernet_inject(&net.n[0], frame, WIRE_HEADER_BYTES + c.pos, "user1");
	assert_int_equal(net.n[0].peers->stats.forged_hellos, 1);
	/* at our own endpoint */
	raw_hello(line, FORGED(.endpoint = peernet_endpoint(0)));
	peernet_run(LOOP_NS_PER_S);
	assert_int_equal(net.n[0].peers->stats.forged_hellos, 2);
	assert_int_equal(net.n[0].peers->count, 1);
	assert_int_equal(net.n[2].tap_count, 0); /* nothing was sent to it */
	assert_unmoved(peer, 0);
	net.n[2].link->ops->hangup(line);
}

/* A PING, or a LEASE of `number`, from the raw node's attempt `from` to node 0's `to`. */
static void inject_raw(uint64_t from, uint64_t to, uint64_t sequence, uint64_t number)
{
	struct wire_header h = {.version = WIRE_VERSION_MAX,
				.type = number ? WIRE_T_LEASE : WIRE_T_PING,
				.epoch = to,
				.from_epoch = from,
				.sequence = sequence};
	uint8_t frame[WIRE_HEADER_BYTES + 64], body[64];
	struct wire_lease lease = {.room = number};
	struct wire_ping ping = {.stamp = 1};
	struct cursor c;

	memset(h.sender, 9, sizeof(h.sender));
	memcpy(h.target, peers_instance(net.n[0].peers), sizeof(h.target));
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(number ? wire_lease_put(&c, &lease) : wire_ping_put(&c, &ping),
			 0);
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	peernet_inject(&net.n[0], frame, WIRE_HEADER_BYTES + c.pos, "mallory");
}

static uint64_t welcomed_epoch(void)
{
	const struct peernet_tapped *t = last_of_type(&net.n[2], WIRE_T_WELCOME);
	struct wire_header h;
	struct cursor body;

	assert_int_equal(wire_frame_get(t->data, t->len, &h, &body), 0);
	return h.epoch;
}

static void inject_bye(uint64_t from, uint64_t to)
{
	struct wire_header h = {.version = WIRE_VERSION_MAX,
				.type = WIRE_T_BYE,
				.epoch = to,
				.from_epoch = from};
	uint8_t frame[WIRE_HEADER_BYTES + 64], body[64];
	struct wire_bye bye = {.code = ERR_PEER, .text = "gone"};
	struct cursor c;

	memset(h.sender, 9, sizeof(h.sender));
	memcpy(h.target, peers_instance(net.n[0].peers), sizeof(h.target));
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_bye_put(&c, &bye), 0);
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	peernet_inject(&net.n[0], frame, WIRE_HEADER_BYTES + c.pos, "mallory");
}

/* A peer that dials again before the first peering was proven here gets the same
 * epoch. */
static void frame_of_an_earlier_peering_is_none_of_the_next(void **state)
{
	struct link_line *line = raw_start(NULL);
	uint64_t epoch;

	(void)state;
	raw_hello(line, FORGED(.epoch = 5, .nonce = 6));
	peernet_run(1 * MS);
	epoch = welcomed_epoch();
	raw_hello(line, FORGED(.epoch = 8, .nonce = 7));
	peernet_run(1 * MS);
	assert_int_equal(welcomed_epoch(), epoch);
	inject_raw(5, epoch, 1, 0);
	inject_raw(5, epoch, 2, 55);
	assert_int_equal(net.n[0].ups, 0);
	inject_raw(8, epoch, 1, 0);
	assert_int_equal(net.n[0].ups, 1);
	inject_raw(5, epoch, 2, 55);
	inject_raw(8, epoch, 2, 88);
	inject_raw(5, epoch, 3, 56);
	inject_raw(8, epoch, 3, 89);
	assert_int_equal(net.n[0].messages, 2);
	assert_int_equal(net.n[0].numbers[0], 88);
	assert_int_equal(net.n[0].numbers[1], 89);
	assert_int_equal(net.n[0].downs, 0);
	assert_int_equal(net.n[0].peers->stats.stale_frames, 4);
	net.n[2].link->ops->hangup(line);
}

/* It sends BYE in the first, which arrives after the HELLO of the next. */
static void bye_of_an_earlier_peering_does_not_end_the_next(void **state)
{
	struct link_line *line = raw_start(NULL);
	uint64_t epoch;

	(void)state;
	raw_hello(line, FORGED(.epoch = 5, .nonce = 6));
	peernet_run(1 * MS);
	epoch = welcomed_epoch();
	raw_hello(line, FORGED(.epoch = 8, .nonce = 7));
	peernet_run(1 * MS);
	inject_bye(5, epoch); /* before the next is proven */
	inject_raw(8, epoch, 1, 0);
	assert_int_equal(net.n[0].ups, 1);
	inject_bye(5, epoch);
	assert_int_equal(net.n[0].downs, 0);
	inject_bye(8, epoch);
	assert_int_equal(net.n[0].downs, 1);
	net.n[2].link->ops->hangup(line);
}

static void hello_flood_is_bounded(void **state)
{
	struct peer *peer = peernet_join();
	struct link_line *line = raw_start(NULL);
	unsigned int most = 0;

	(void)state;
	mem_hub_set_queue_max(net.hub, 100000);
	for (unsigned int i = 0; i < 20000; i++) {
		char where[LINK_ENDPOINT_MAX];

		snprintf(where, sizeof(where), "tcp://10.1.%u.%u:1", i / 250, i % 250);
		raw_hello(line, FORGED(.endpoint = where, .instance = (uint8_t)(i + 1)));
		if (i % 100 == 0)
			peernet_run(1 * MS);
		if (net.n[0].peers->count > most)
			most = net.n[0].peers->count;
	}
	peernet_run(100 * MS);
	/* no more than a user's share at a time, and those that end with the turn */
	assert_in_range(most, net.options.unauthenticated_user_max,
			1 + 3 * net.options.unauthenticated_user_max);
	assert_int_equal(net.n[0].peers->count - 1, net.options.unauthenticated_user_max);
	/* a second's worth of tokens, and those earned in 300 ms */
	assert_true(net.n[0].peers->stats.hellos_limited > 19000);
	assert_true(net.n[0].peers->stats.unauthenticated_dropped > 150);
	assert_unmoved(peer, 0);
	peernet_run(10 * LOOP_NS_PER_S);
	assert_int_equal(net.n[0].peers->count, 1);
	net.n[2].link->ops->hangup(line);
}

/* Mallory starts one instance after the other, more than a second's worth; this does
 * not use up the limit of another user. */
static void hello_flood_of_one_user_is_hers(void **state)
{
	struct link_line *line = raw_start(NULL);
	struct peer *peer = NULL;
	uint64_t began_ns = 0;

	(void)state;
	mem_hub_set_queue_max(net.hub, 100000);
	for (unsigned int i = 0; i < 1500 && net.n[1].ups == 0; i++) {
		char where[LINK_ENDPOINT_MAX];

		snprintf(where, sizeof(where), "tcp://10.2.%u.%u:1", i / 250, i % 250);
		raw_hello(line, FORGED(.endpoint = where, .instance = (uint8_t)(i + 1)));
		peernet_run(2 * MS);
		if (i < 1000)
			continue;
		if (!peer)
			began_ns = loop_now_ns(net.loop);
		peer = peer ? peer : peernet_dial(1, 0);
	}
	assert_true(net.n[0].peers->stats.hellos_limited > 200);
	assert_int_equal(net.n[1].ups, 1);
	assert_in_range(loop_now_ns(net.loop) - began_ns, 0, 10 * MS);
	net.n[2].link->ops->hangup(line);
}

static void assert_bye(enum err_code code, uint64_t epoch, const char *text)
{
	const struct peernet_tapped *t = last_of_type(&net.n[2], WIRE_T_BYE);
	struct wire_header h;
	struct cursor body;
	struct wire_bye m;

	assert_int_equal(wire_frame_get(t->data, t->len, &h, &body), 0);
	assert_int_equal(wire_bye_get(&body, &m), 0);
	assert_int_equal(m.code, code);
	if (text)
		assert_string_equal(m.text, text);
	assert_int_equal(h.epoch, epoch);
	assert_int_equal(h.target[0], 9);
	assert_memory_equal(h.sender, peers_instance(net.n[0].peers), 16);
}

#define OURS_IS_OLDER                                                                   \
	"no common protocol version: node0 (kvd " KVD_VERSION ") speaks 2 to 2 and is " \
	"older than mallory (kvd 9.9), 3 to 7"

static void hello_of_other_version_is_refused_with_bye(void **state)
{
	struct link_line *line = raw_start(NULL);

	(void)state;
	raw_hello(line, FORGED(.version_min = 3, .version_max = 7, .epoch = 50));
	peernet_run(1 * MS);
	assert_bye(ERR_VERSION, 50, OURS_IS_OLDER);
	raw_hello(line,
		  FORGED(.version_min = 0, .version_max = 0, .epoch = 51, .product = ""));
	peernet_run(1 * MS);
	assert_bye(ERR_VERSION, 51,
		   "no common protocol version: mallory (an older kvd) speaks 0 to 0 and "
		   "is older than node0 (kvd " KVD_VERSION "), 2 to 2");
	raw_hello(line, FORGED(.features = 0, .epoch = 52));
	peernet_run(1 * MS);
	assert_bye(ERR_VERSION, 52, NULL);
	assert_int_equal(net.n[0].peers->count, 0);
	assert_int_equal(net.n[0].peers->stats.refused, 3);
	/* a newer daemon that still supports our version is accepted */
	raw_hello(line, FORGED(.version_min = 1, .version_max = 7, .features = ~0ull));
	peernet_run(1 * MS);
	last_of_type(&net.n[2], WIRE_T_WELCOME);
	net.n[2].link->ops->hangup(line);
}

/* The dialler gets the same text, by WELCOME or by BYE. */
static void welcome_of_other_version_ends_the_dial(void **state)
{
	struct link_line *line = raw_start(NULL);
	struct peer *peer = peernet_dial(0, 2);
	uint8_t frame[600], body[400];
	struct wire_bye bye = {.code = ERR_VERSION, .text = OURS_IS_OLDER};
	struct wire_header h;
	struct wire_hello m;
	struct cursor c;

	(void)state;
	peernet_run(1 * MS);
	assert_int_equal(wire_frame_get(last_of_type(&net.n[2], WIRE_T_HELLO)->data,
					last_of_type(&net.n[2], WIRE_T_HELLO)->len, &h,
					&c),
			 0);
	assert_int_equal(wire_hello_get(&c, &m), 0);
	raw_hello(line, FORGED(.type = WIRE_T_WELCOME, .nonce = m.nonce, .version_min = 3,
			       .version_max = 7));
	peernet_run(1 * MS);
	assert_int_equal(net.n[0].refusals, 1);
	assert_int_equal(peer->why.code, ERR_VERSION);
	assert_false(peer->why.retryable);
	assert_string_equal(peer->why.text, OURS_IS_OLDER);
	peernet_run(LOOP_NS_PER_S); /* dials again */
	assert_int_equal(wire_frame_get(last_of_type(&net.n[2], WIRE_T_HELLO)->data,
					last_of_type(&net.n[2], WIRE_T_HELLO)->len, &h,
					&c),
			 0);
	memcpy(h.target, h.sender, sizeof(h.target));
	memset(h.sender, 9, sizeof(h.sender));
	h.version = WIRE_VERSION_MAX + 1; /* a BYE passes in any */
	h.type = WIRE_T_BYE;
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_bye_put(&c, &bye), 0);
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	assert_int_equal(net.n[2].link->ops->send(line, frame, WIRE_HEADER_BYTES + c.pos),
			 0);
	peernet_run(1 * MS);
	assert_int_equal(peer->why.code, ERR_VERSION);
	assert_string_equal(peer->why.text,
			    "peer tcp://10.0.0.2:7400 reports: \"" OURS_IS_OLDER "\"");
	net.n[2].link->ops->hangup(line);
}

static void hello_with_bad_contents_is_dropped(void **state)
{
	static const uint8_t many[] = {255, 255, 255, 255};
	static const uint8_t liar[] = {1,   0,	 0,   0,   3, 0, 's',
				       'h', 'm', 255, 255, 0, 0, 1};
	struct link_line *line = raw_start(NULL);

	(void)state;
	raw_hello(line, FORGED(.epoch = 0));
	raw_hello(line, FORGED(.endpoint = "tcp://nowhere"));
	raw_hello(line, FORGED(.endpoint = ""));
	raw_hello(line, FORGED(.endpoint = "file:///etc/passwd"));
	peernet_run(1 * MS);
	assert_int_equal(net.n[0].peers->stats.bad_frames, 4);
	assert_int_equal(net.n[0].peers->count, 0);
	raw_hello(line, FORGED(.addresses = {many, sizeof(many)}, .epoch = 60));
	peernet_run(1 * MS);
	assert_bye(ERR_PROTO, 60, NULL);
	raw_hello(line, FORGED(.addresses = {liar, sizeof(liar)}, .epoch = 61));
	peernet_run(1 * MS);
	assert_bye(ERR_PROTO, 61, NULL);
	peernet_run(1);
	assert_int_equal(net.n[0].peers->count, 0);
	net.n[2].link->ops->hangup(line);
}

static void refusals_are_bounded(void **state)
{
	struct link_line *line = raw_start(NULL);

	(void)state;
	for (unsigned int i = 0; i < 200; i++) {
		char where[LINK_ENDPOINT_MAX];

		snprintf(where, sizeof(where), "tcp://10.1.0.%u:1", i);
		raw_hello(line,
			  FORGED(.endpoint = where, .version_min = 9, .version_max = 9));
	}
	peernet_run(100 * MS);
	assert_int_equal(net.n[0].peers->stats.refused, 200);
	peernet_run(3 * LOOP_NS_PER_S);
	/* the lines are closed and new ones possible */
	raw_hello(line, FORGED(.version_min = 9, .version_max = 9, .epoch = 70));
	peernet_run(1 * MS);
	assert_bye(ERR_VERSION, 70, NULL);
	net.n[2].link->ops->hangup(line);
}

/* Mallory's refusals leave lines for the refusals of others. */
static void refusals_of_one_user_leave_lines(void **state)
{
	struct link_line *line = raw_start(NULL);
	unsigned int lines = 0;

	(void)state;
	for (unsigned int i = 0; i < 50; i++) {
		char where[LINK_ENDPOINT_MAX];

		snprintf(where, sizeof(where), "tcp://10.1.0.%u:1", i);
		raw_hello(line,
			  FORGED(.endpoint = where, .version_min = 9, .version_max = 9));
	}
	peernet_run(100 * MS);
	assert_int_equal(net.n[0].peers->stats.refused, 50);
	for (unsigned int i = 0; i < PEER_REFUSALS_MAX; i++)
		lines += net.n[0].peers->refusals[i].line != NULL;
	assert_int_equal(lines, PEER_REFUSALS_USER);
	net.n[2].link->ops->hangup(line);
}

static void welcome_without_nonce_is_ignored(void **state)
{
	struct peer *peer = peernet_dial(0, 3); /* no daemon is there */
	struct link_line *line = raw_start(NULL);
	struct wire_header h = {
		.version = WIRE_VERSION_MAX, .type = WIRE_T_WELCOME, .epoch = 5};
	struct wire_hello m = {.version_min = WIRE_VERSION_MIN,
			       .version_max = WIRE_VERSION_MAX,
			       .features = 1,
			       .nonce = 12};
	uint8_t frame[1024], body[900];
	struct cursor c;

	(void)state;
	memset(h.sender, 9, 16);
	memcpy(h.target, peers_instance(net.n[0].peers), 16);
	strcpy(m.endpoint, peernet_endpoint(3));
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_hello_put(&c, &m), 0);
	h.body_len = (uint32_t)c.pos;
	wire_frame_put(frame, &h, body);
	assert_int_equal(net.n[2].link->ops->send(line, frame, WIRE_HEADER_BYTES + c.pos),
			 0);
	peernet_run(1 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_DIALING);
	assert_int_equal(net.n[0].peers->stats.stale_frames, 1);
	net.n[2].link->ops->hangup(line);
}

static void peers_at_their_cap_are_refused(void **state)
{
	struct peer *peer;

	(void)state;
	net.options.peers_max = 1;
	peernet_start(2);
	peer = peernet_dial(2, 1);
	peernet_run(10 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_true(peers_dial(net.n[2].peers, peernet_endpoint(0), NULL, &peer) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	peer = peernet_dial(0, 2);
	peernet_run(10 * MS);
	assert_int_equal(net.n[0].refusals, 1);
	assert_int_equal(net.n[0].why.code, ERR_LIMIT);
	assert_non_null(strstr(net.n[0].why.text, "reports: \"1 peers are known"));
	assert_int_equal(sm_state(&peer->sm), PEER_DOWN);
	/* it is tried again, and there is room one day */
	peernet_crash(1, MEM_CRASH_KILLED);
	peer_release(peernet_only(2));
	peernet_run(20 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
}

/* For any number of HELLOs, the places are for peers that are up. */
static void unauthenticated_peers_do_not_replace_peers(void **state)
{
	struct link_line *line;
	struct peer *peer;

	(void)state;
	net.options.peers_max = 1;
	net.options.unauthenticated_user_max = net.options.unauthenticated_max = 4;
	peernet_stop(0);
	peernet_start(0);
	line = raw_start(NULL);
	for (unsigned int i = 0; i < 100; i++) {
		char where[LINK_ENDPOINT_MAX];

		snprintf(where, sizeof(where), "tcp://10.1.1.%u:1", i);
		raw_hello(line, FORGED(.endpoint = where, .instance = (uint8_t)(i + 9)));
		peernet_run(1 * MS);
	}
	assert_int_equal(net.n[0].peers->count, 4);
	peer = peernet_dial(1, 0);
	peernet_run(10 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	/* now there is none left, and a HELLO is refused */
	raw_hello(line, FORGED(.endpoint = "tcp://10.1.1.200:1"));
	peernet_run(1 * MS);
	assert_int_equal(net.n[0].peers->stats.refused, 1);
	net.n[2].link->ops->hangup(line);
}

/* Daemons that are not there, dialled by one session, by two of its user, by another. */
static struct err refused;

static unsigned int dial_nobody(uint32_t uid, uint64_t session, unsigned int wanted)
{
	const struct peer_client client = {.uid = uid, .session = session};
	static unsigned int number;
	struct peer *peer;
	unsigned int n = 0;

	for (char where[LINK_ENDPOINT_MAX]; n < wanted; n++) {
		snprintf(where, sizeof(where), "tcp://10.2.%u.%u:1", number / 250,
			 number % 250);
		number++;
		if (peers_dial(net.n[0].peers, where, &client, &peer) < 0) {
			refused = *err_last();
			break;
		}
	}
	peernet_run(2 * LOOP_NS_PER_S); /* new attempts count then */
	return n;
}

static void dials_without_listener_leave_room_for_peers(void **state)
{
	unsigned int first, all = 0;
	struct peer *peer;

	(void)state;
	net.options.peers_max = 64;
	peernet_stop(0);
	peernet_start(0);
	all = dial_nobody(7, 1, 50); /* in one burst */
	assert_int_equal(all, 7);    /* a quarter of its user's half of 56 */
	assert_non_null(strstr(refused.text, "7 for this session (limit 7)"));
	for (uint64_t session = 2; session < 10; session++) {
		while ((first = dial_nobody(7, session, 9)))
			all += first;
	}
	assert_int_equal(all, 28);
	assert_int_equal(dial_nobody(8, 99, 7), 7); /* another user */
	assert_int_equal(dial_nobody(0, 100, 200), 7);
	assert_int_equal(dial_nobody(0, 102, 200), 7);
	assert_int_equal(dial_nobody(9, 101, 7), 2); /* users with few are admitted yet */
	/* an eighth is reserved for incoming peers */
	peer = peernet_dial(1, 0);
	peernet_run(10 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
}

static void dial_forbidden_by_keys_is_reported_and_retried(void **state)
{
	const struct mem_path refuse = {.delay_ns = PEERNET_DELAY_NS, .refuse = true};
	const struct mem_path open = {.delay_ns = PEERNET_DELAY_NS};
	struct peer *peer;

	(void)state;
	assert_int_equal(mem_hub_set_path(net.hub, peernet_endpoint(0),
					  peernet_endpoint(1), &refuse),
			 0);
	peer = peernet_dial(0, 1);
	peernet_run(10 * MS);
	assert_int_equal(net.n[0].refusals, 1);
	assert_int_equal(peer->why.code, ERR_AUTH);
	assert_false(peer->why.retryable);
	assert_string_equal(peer->why.text, "peer tcp://10.0.0.1:7400 refuses our key");
	assert_int_equal(sm_state(&peer->sm), PEER_DOWN);
	peernet_run(10 * LOOP_NS_PER_S);
	assert_in_range(net.n[0].refusals, 5, 20); /* with back-off */
	assert_int_equal(mem_hub_set_path(net.hub, peernet_endpoint(0),
					  peernet_endpoint(1), &open),
			 0);
	peernet_run(3 * LOOP_NS_PER_S);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	assert_int_equal(peer->why.code, ERR_OK);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, peernet_setup, peernet_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(dial_forbidden_by_keys_is_reported_and_retried),
		TEST(frame_cut_or_bent_is_dropped),
		TEST(frame_replayed_is_dropped),
		TEST(frame_of_wrong_header_is_dropped),
		TEST(frame_from_the_future_ends_the_peering),
		TEST(hello_without_proof_changes_nothing),
		TEST(hello_in_the_name_of_a_peer_is_dropped),
		TEST(frame_of_an_earlier_peering_is_none_of_the_next),
		TEST(bye_of_an_earlier_peering_does_not_end_the_next),
		TEST(hello_flood_is_bounded),
		TEST(hello_flood_of_one_user_is_hers),
		TEST(hello_of_other_version_is_refused_with_bye),
		TEST(welcome_of_other_version_ends_the_dial),
		TEST(hello_with_bad_contents_is_dropped),
		TEST(refusals_are_bounded),
		TEST(refusals_of_one_user_leave_lines),
		TEST(welcome_without_nonce_is_ignored),
		TEST(peers_at_their_cap_are_refused),
		TEST(unauthenticated_peers_do_not_replace_peers),
		TEST(dials_without_listener_leave_room_for_peers),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("peer_hostile", tests, NULL, NULL);
}
