/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transport of two daemons' data line: both sides take the one that the dialling side
 * can connect by. In-process cluster.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "lib/kvd.h"
#include "tests/lib/told_pair.h"

/* As shm is: of one host, and it may be that this daemon cannot connect by it. */
static struct transport_ops near;
static bool near_blocked[3]; /* by node */
static bool near_dropped[3]; /* no packet of its reaches the other's data port */
static bool near_broken[3];  /* it can open nothing, as when descriptors run out */
static bool near_holds[3];   /* a closed line of its is not reported yet: */
static void (*near_held)(void *arg);
static void *near_held_arg;

static int near_open(const struct xp_env *env, const struct xp_callbacks *callbacks,
		     struct transport **transport_p)
{
	int r = fake_ops.open(env, callbacks, transport_p);

	assert_int_equal(r, 0);
	(*transport_p)->ops = &near;
	(*transport_p)->caps |= XP_CAP_SAME_HOST;
	return 0;
}

static int near_peer_open(struct transport *transport, const struct xp_peer_args *args,
			  struct xp_peer **peer_p)
{
	unsigned int node = (unsigned int)(transport->env.config->name[1] - '0');

	struct xp_peer_args lost = *args;
	uint8_t nowhere[64];

	if (near_broken[node])
		return err_raise(ERR_IO, "near has no descriptor");
	if (args->dial && near_blocked[node])
		return err_raise(ERR_REQUIRE, "near needs a way that n%u has not", node);
	if (!args->dial || !near_dropped[node])
		return fake_ops.peer_open(transport, args, peer_p);
	assert_in_range(args->address_len, 1, sizeof(nowhere));
	memcpy(nowhere, args->address, args->address_len);
	nowhere[args->address_len - 1] ^= 0x80; /* of an incarnation that is none */
	lost.address = nowhere;
	return fake_ops.peer_open(transport, &lost, peer_p);
}

static void near_on_closed(void *arg)
{
	(void)arg;
}

static void near_peer_close(struct xp_peer *peer, void (*on_closed)(void *arg), void *arg)
{
	const struct transport *transport = ((struct xp_peer_base *)peer)->transport;

	if (!near_holds[transport->env.config->name[1] - '0']) {
		fake_ops.peer_close(peer, on_closed, arg);
		return;
	}
	near_held = on_closed;
	near_held_arg = arg;
	fake_ops.peer_close(peer, near_on_closed, NULL);
}

static int choice_setup(void **state)
{
	struct pair *p = calloc(1, sizeof(*p));

	near = fake_ops;
	near.name = "near";
	near.open = near_open;
	near.peer_open = near_peer_open;
	near.peer_close = near_peer_close;
	memset(near_blocked, 0, sizeof(near_blocked));
	memset(near_dropped, 0, sizeof(near_dropped));
	memset(near_broken, 0, sizeof(near_broken));
	memset(near_holds, 0, sizeof(near_holds));
	cluster_prefer(&near);
	cluster_new(&p->c, 1, 2);
	p->me = cluster_engine(&p->c, 0, "me");
	p->you = cluster_engine(&p->c, 1, "you");
	*state = p;
	return 0;
}

static int choice_teardown(void **state)
{
	struct pair *p = *state;

	cluster_wrap_events(NULL);
	cluster_prefer(NULL);
	cluster_free(&p->c);
	free(p);
	return 0;
}

static void connect_peer(struct pair *p)
{
	cluster_ok(&p->c, p->me, "{'cmd':'peer.connect','endpoint':'%s'}",
		   p->c.nodes[1].endpoint);
}

/* Both daemons have their data line by `transport`, and report the skipped ones. */
static void assert_line(struct pair *p, unsigned int a, unsigned int b,
			const char *transport, const char *passed)
{
	const unsigned int nodes[] = {a, b};

	cluster_run(&p->c, LOOP_NS_PER_S);
	for (unsigned int i = 0; i < 2; i++) {
		const struct remote *remote = remote_at(p, nodes[i]);

		assert_true(remote->ready);
		assert_string_equal(remote->transport->ops->name, transport);
		if (!*passed)
			assert_string_equal(remote->dial.passed, "");
		else if (!strstr(remote->dial.passed, passed))
			fail_msg("passed over: '%s'", remote->dial.passed);
		assert_int_equal(remote->downs, 0);
	}
}

static unsigned int lower_of(struct pair *p)
{
	cluster_run(&p->c, LOOP_NS_PER_S);
	return remote_at(p, 0)->peer->lower ? 0 : 1;
}

static void line_not_connecting_is_followed_by_next(void **state)
{
	struct pair *p = *state;
	cJSON *answer;

	near_blocked[0] = near_blocked[1] = true;
	answer = cluster_call(&p->c, p->me, "{'cmd':'peer.connect','endpoint':'%s'}",
			      p->c.nodes[1].endpoint);
	if (!strstr(cJSON_GetStringValue(cJSON_GetObjectItem(answer, "passed_over")),
		    "near needs a way"))
		fail_msg("%s", cJSON_PrintUnformatted(answer));
	cJSON_Delete(answer);
	assert_line(p, 0, 1, "fake", "near needs a way");
	assert_attaches(p); /* keys of that transport are sent, both ways */
}

static void line_is_chosen_by_dialling_side(void **state)
{
	struct pair *p = *state;
	struct kvd *other;
	struct transport *first;
	unsigned int lower;

	connect_peer(p);
	lower = lower_of(p);
	assert_line(p, 0, 1, "near", "");
	/* whether the other could connect is not asked */
	near_blocked[!lower] = true;
	other = &p->c.nodes[!lower].kvd;
	first = other->transports[0]; /* nor the one that it prefers */
	other->transports[0] = other->transports[1];
	other->transports[1] = first;
	peer_kill(remote_at(p, 0)->peer,
		  &(struct err){.code = ERR_PEER, .text = "for the test"});
	cluster_run(&p->c, LOOP_NS_PER_S);
	connect_peer(p);
	assert_line(p, 0, 1, "near", "");
}

static void line_is_chosen_again_with_each_peering(void **state)
{
	struct pair *p = *state;
	unsigned int again;

	near_blocked[0] = near_blocked[1] = true;
	connect_peer(p);
	assert_line(p, 0, 1, "fake", "near needs a way");
	memset(near_blocked, 0, sizeof(near_blocked));
	cluster_crash(&p->c, 1, MEM_CRASH_KILLED);
	cluster_run(&p->c, 3 * LOOP_NS_PER_S);
	again = cluster_restart(&p->c, 1);
	connect_peer(p);
	assert_line(p, 0, again, "near", "");
}

/* For example `transports = shm`: no other may be used, and both report its
 * requirement. */
static void line_without_another_way_fails_by_name_on_both_sides(void **state)
{
	struct pair *p = *state;

	near_blocked[0] = near_blocked[1] = true;
	for (unsigned int i = 0; i < 2; i++) {
		strcpy(p->c.nodes[i].config.require.word[0], "near");
		p->c.nodes[i].config.require.count = 1;
	}
	cluster_refused(&p->c, p->me, "EREQUIRE",
			"{'cmd':'peer.connect','endpoint':'%s'}", p->c.nodes[1].endpoint);
	cluster_refused(&p->c, p->you, "EREQUIRE",
			"{'cmd':'peer.connect','endpoint':'%s'}", p->c.nodes[0].endpoint);
	for (unsigned int i = 0; i < 2; i++) {
		const struct remote *remote = remote_at(p, i);

		assert_int_equal(remote->why.code, ERR_REQUIRE);
		if (!strstr(remote->why.text, "near needs a way that"))
			fail_msg("%s", remote->why.text);
		assert_false(remote->ready);
		assert_int_equal(remote->downs, 0);
		p->c.nodes[i].config.require.count = 0;
	}
}

static void line_message_invalid_ends_peering_or_line(void **state)
{
	struct pair *p = *state;
	struct wire_line msg = {.transport = "near"};
	unsigned int lower;

	connect_peer(p);
	lower = lower_of(p);
	for (unsigned int from = 0; from < 2; from++) { /* not its turn; twice */
		struct remote *at = remote_at(p, !from);
		const char *words =
			from == lower ? "LINE: sent twice" : "LINE: this side";
		uint64_t downs = at->downs;

		at->reaches++; /* it outlives its peering */
		assert_int_equal(handshake_send_line(remote_at(p, from), &msg), 0);
		cluster_run(&p->c, LOOP_NS_PER_S / 100);
		assert_int_equal(at->downs, downs + 1);
		assert_int_equal(at->down.code, ERR_PROTO);
		if (!strstr(at->down.text, words))
			fail_msg("%s", at->down.text);
		handshake_release(at);
		connect_peer(p);
		cluster_run(&p->c, LOOP_NS_PER_S);
	}
}

static void cut_peering(struct pair *p)
{
	peer_kill(remote_at(p, 0)->peer,
		  &(struct err){.code = ERR_PEER, .text = "for the test"});
	cluster_run(&p->c, LOOP_NS_PER_S);
}

/* For either of the two: the lower id is random. */
static void line_not_dialable_by_one_side_is_dialled_by_other(void **state)
{
	struct pair *p = *state;

	for (unsigned int node = 0; node < 2; node++) {
		near_dropped[node] = true;
		near_dropped[!node] = false;
		cluster_ok(&p->c, p->me,
			   "{'cmd':'peer.connect','endpoint':'%s','timeout_ms':9000}",
			   p->c.nodes[1].endpoint);
		cluster_run(&p->c, LOOP_NS_PER_S);
		assert_true(remote_at(p, 0)->ready && remote_at(p, 1)->ready);
		assert_attaches(p); /* keys were announced once, and serve */
		cut_peering(p);
	}
}

/* Both have the reasons of both, and the peering continues. */
static void line_not_dialable_is_named_on_both_sides(void **state)
{
	struct pair *p = *state;
	char text[ERR_TEXT_MAX];

	near_dropped[0] = near_dropped[1] = true;
	cluster_refused(&p->c, p->me, "ETIMEOUT",
			"{'cmd':'peer.connect','endpoint':'%s','timeout_ms':9000}",
			p->c.nodes[1].endpoint);
	for (unsigned int i = 0; i < 2; i++) {
		const struct remote *remote = remote_at(p, i);

		assert_int_equal(sm_state(&remote->peer->sm), PEER_UP);
		assert_int_equal(remote->downs, 0);
		assert_int_not_equal(remote->dial.down_ns, 0);
		assert_string_equal(
			handshake_why_not(remote, text),
			"fake: nobody answers at the address; reported by the peer: "
			"fake: nobody answers at the address");
	}
	memset(near_dropped, 0, sizeof(near_dropped)); /* the firewall is mended */
	connect_peer(p);
	assert_line(p, 0, 1, "near", "");
	assert_int_equal(remote_at(p, 0)->dial.down_ns, 0);
}

/* If the chooser cannot start a turn, the other side does not learn of it. */
static void line_turn_not_startable_keeps_peering(void **state)
{
	struct pair *p = *state;
	struct remote *remote;
	unsigned int lower;

	near_dropped[0] = near_dropped[1] = true;
	assert_int_equal(handshake_reach(p->c.nodes[0].kvd.handshake,
					 p->c.nodes[1].endpoint, NULL, &remote),
			 0);
	lower = lower_of(p);
	near_broken[lower] = true;
	cluster_run(&p->c, 20 * LOOP_NS_PER_S);
	memset(near_broken, 0, sizeof(near_broken));
	memset(near_dropped, 0, sizeof(near_dropped));
	cluster_run(&p->c, 10 * LOOP_NS_PER_S);
	assert_line(p, 0, 1, "near", "");
	handshake_release(remote);
}

/* The last peering's line may take longer to close than the first turn of this one. */
static void line_started_in_later_turn_announces_pools(void **state)
{
	struct pair *p = *state;
	struct remote *remote;
	unsigned int lower;

	assert_int_equal(handshake_reach(p->c.nodes[0].kvd.handshake,
					 p->c.nodes[1].endpoint, NULL, &remote),
			 0);
	lower = lower_of(p);
	near_holds[!lower] = near_dropped[lower] = true;
	cut_peering(p);
	for (unsigned int s = 0; s < 20 && remote_at(p, !lower)->dial.turn == 0; s++)
		cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(remote_at(p, !lower)->dial.turn, 1);
	near_holds[!lower] = false;
	near_held(near_held_arg);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_true(remote->ready && remote_at(p, 0)->pools.listed &&
		    remote_at(p, 1)->pools.listed);
	assert_attaches(p);
	handshake_release(remote);
}

/* connect_timeout counts from the first loss, for any events of the control line. */
static void line_missing_fails_rooms_after_connect_timeout(void **state)
{
	struct pair *p = *state;
	uint64_t begin_ns = loop_now_ns(p->c.loop);
	const struct room *room;

	p->mine = (struct cache){.layers = 1,
				 .pages = 16,
				 .page_tokens = 1,
				 .units = 1,
				 .total_units = 1,
				 .unit_bytes = 8};
	cluster_cache(&p->c, p->me, "mine", 0, &p->mine);
	near_dropped[0] = near_dropped[1] = true;
	cluster_ok(&p->c, p->me,
		   "{'cmd':'room.open','room':'7','role':'recv','pool':%llu,"
		   "'sources':['%s']}",
		   (unsigned long long)p->mine.pool, p->c.nodes[1].endpoint);
	for (unsigned int i = 0; i < 2; i++) {
		cluster_run(&p->c, 3 * LOOP_NS_PER_S);
		cut_peering(p);
	}
	room = rooms_find(rooms_of(&p->c.nodes[0].kvd), p->me, ROOM_RECV, 7);
	assert_int_equal(cluster_state(&p->c, p->me, "recv", 7), KVD_BOOTSTRAPPING);
	cluster_until_state(&p->c, p->me, "recv", 7, KVD_FAILED);
	assert_in_range(loop_now_ns(p->c.loop) - begin_ns, 10 * LOOP_NS_PER_S,
			11 * LOOP_NS_PER_S);
	room_failed_with(room, ERR_PEER, "room 7: fake: nobody answers at the address");
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&p->mine);
}

#define CHOICE(name) cmocka_unit_test_setup_teardown(name, choice_setup, choice_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CHOICE(line_not_connecting_is_followed_by_next),
		CHOICE(line_is_chosen_by_dialling_side),
		CHOICE(line_is_chosen_again_with_each_peering),
		CHOICE(line_without_another_way_fails_by_name_on_both_sides),
		CHOICE(line_message_invalid_ends_peering_or_line),
		CHOICE(line_not_dialable_by_one_side_is_dialled_by_other),
		CHOICE(line_not_dialable_is_named_on_both_sides),
		CHOICE(line_turn_not_startable_keeps_peering),
		CHOICE(line_started_in_later_turn_announces_pools),
		CHOICE(line_missing_fails_rooms_after_connect_timeout),
	};

	return cmocka_run_group_tests_name("handshake_line", tests, NULL, NULL);
}
