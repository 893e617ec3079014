/* SPDX-License-Identifier: Apache-2.0 */
/* bootstrap over peers over link_mem in virtual time: node 0 is the meeting
 * point, nodes 1 and 2 publish and ask. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/peer/peer_impl.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/bootstrap/bootstrap_impl.h"
#include "tests/sim/link_mem.h"
#include "tests/lib/peer_at.h"

#define MS LOOP_NS_PER_MS
#define NODES 3

struct node {
	struct link *link;
	struct peers *peers;
	struct bootstrap *bootstrap;
	unsigned int downs;
	struct err why;
};

struct asked {
	struct bootstrap_call call;
	unsigned int done, count;
	struct err err;
	struct bootstrap_rank ranks[64];
};

static struct fixture {
	struct loop *loop;
	struct mem_hub *hub;
	struct bootstrap_options options;
	struct peers_options peers_options;
	struct node n[NODES];
} f;

/* ---- nodes ---- */

static void on_up(void *owner, struct peer *peer)
{
	struct node *node = owner;

	bootstrap_peer_up(node->bootstrap, peer);
}

static void on_down(void *owner, struct peer *peer)
{
	struct node *node = owner;

	node->downs++;
	node->why = peer->why;
	bootstrap_peer_down(node->bootstrap, peer);
}

static void on_refused(void *owner, struct peer *peer)
{
	struct node *node = owner;

	bootstrap_peer_refused(node->bootstrap, peer);
}

static int on_message(void *owner, struct peer *peer, const struct wire_header *h,
		      struct cursor *body)
{
	struct node *node = owner;

	assert_true(bootstrap_handles(h->type));
	return bootstrap_on_message(node->bootstrap, peer, h, body);
}

static const char *endpoint(unsigned int i)
{
	static char text[NODES][32];

	snprintf(text[i], sizeof(text[i]), "tcp://10.0.0.%u:7400", i);
	return text[i];
}

static void node_start(unsigned int i)
{
	struct node *node = &f.n[i];
	struct peers_callbacks callbacks = {.owner = node,
					    .on_up = on_up,
					    .on_down = on_down,
					    .on_refused = on_refused,
					    .on_message = on_message};
	struct peers_args args = {.loop = f.loop,
				  .callbacks = &callbacks,
				  .options = &f.peers_options,
				  .name = "node"};
	struct bootstrap_args boot = {
		.loop = f.loop, .endpoint = endpoint(i), .options = &f.options};

	memset(node, 0, sizeof(*node));
	assert_int_equal(link_mem_new(f.hub, endpoint(i), "", &node->link), 0);
	args.link = node->link;
	assert_int_equal(peers_new(&args, &node->peers), 0);
	boot.peers = node->peers;
	assert_int_equal(bootstrap_new(&boot, &node->bootstrap), 0);
}

static void node_stop(unsigned int i)
{
	struct node *node = &f.n[i];

	if (!node->link)
		return;
	bootstrap_free(node->bootstrap);
	peers_free(node->peers);
	node->link->ops->free(node->link);
	node->link = NULL;
}

static void run_for(uint64_t ns)
{
	uint64_t end_ns = loop_now_ns(f.loop) + ns;

	while (loop_now_ns(f.loop) < end_ns)
		loop_turn(f.loop, end_ns - loop_now_ns(f.loop));
	for (int i = 0; i < 100 && loop_turn(f.loop, 0); i++)
		;
}

static int setup(void **state)
{
	(void)state;
	memset(&f, 0, sizeof(f));
	bootstrap_options_default(&f.options);
	peers_options_default(&f.peers_options);
	assert_int_equal(loop_new_virtual(1, &f.loop), 0);
	assert_int_equal(mem_hub_new(f.loop, &f.hub), 0);
	mem_hub_set_default(f.hub, &(struct mem_path){.delay_ns = 50000});
	for (unsigned int i = 0; i < NODES; i++)
		node_start(i);
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < NODES; i++)
		node_stop(i);
	mem_hub_free(f.hub);
	loop_free(f.loop);
	return 0;
}

/* ---- asking ---- */

static void on_done(struct bootstrap_call *call, const struct err *err,
		    const struct bootstrap_rank *ranks, unsigned int count)
{
	struct asked *asked = container_of(call, struct asked, call);

	asked->done++;
	asked->count = count;
	asked->err = err ? *err : (struct err){.code = ERR_OK};
	for (unsigned int i = 0; i < count && i < ARRAY_LEN(asked->ranks); i++)
		asked->ranks[i] = ranks[i];
}

static void asked_init(struct asked *asked)
{
	memset(asked, 0, sizeof(*asked));
	asked->call.on_done = on_done;
}

static struct bootstrap_rank rank_of(uint32_t tp, uint32_t tp_size)
{
	struct bootstrap_rank rank = {.rank = {tp}, .size = {tp_size, 1, 1, 1}};

	snprintf(rank.pool, sizeof(rank.pool), "kv%u", tp);
	snprintf(rank.summary, sizeof(rank.summary), "{\"page_tokens\":16,\"rank\":%u}",
		 tp);
	return rank;
}

static int publish(unsigned int node, uint64_t session, const char *at,
		   struct bootstrap_rank rank, struct asked *asked)
{
	if (asked)
		asked_init(asked);
	return bootstrap_publish(f.n[node].bootstrap, session, "prefill", at, &rank,
				 asked ? &asked->call : NULL);
}

static void query(unsigned int node, uint64_t session, const char *at,
		  struct asked *asked)
{
	asked_init(asked);
	assert_int_equal(bootstrap_query(f.n[node].bootstrap, session, "prefill", at,
					 &asked->call),
			 0);
	assert_int_equal(asked->done, 0);
}

static unsigned int known(void)
{
	struct asked asked;

	query(0, 99, NULL, &asked);
	run_for(1);
	assert_int_equal(asked.done, 1);
	return asked.count;
}

static const struct bootstrap_rank *place(const struct asked *asked, uint32_t tp)
{
	for (unsigned int i = 0; i < asked->count; i++) {
		if (asked->ranks[i].rank[BOOTSTRAP_TP] == tp)
			return &asked->ranks[i];
	}
	fail_msg("tp rank %u is not in the answer", tp);
	return NULL;
}

/* ---- cases ---- */

static void ranks_published_anywhere_are_found_by_asking_one(void **state)
{
	struct asked one, two, three, found;

	(void)state;
	assert_int_equal(publish(0, 7, NULL, rank_of(0, 3), &one), 0);
	assert_int_equal(publish(1, 7, endpoint(0), rank_of(1, 3), &two), 0);
	assert_int_equal(one.done + two.done, 0);
	run_for(10 * MS);
	assert_int_equal(one.done, 1);
	assert_int_equal(one.err.code, ERR_OK);
	assert_int_equal(two.done, 1);
	assert_int_equal(two.err.code, ERR_OK);
	query(2, 1, endpoint(0), &found);
	run_for(10 * MS);
	assert_int_equal(found.done, 1);
	assert_int_equal(found.count, 2);
	assert_false(bootstrap_complete(found.ranks, found.count));
	assert_string_equal(place(&found, 0)->endpoint, endpoint(0));
	assert_string_equal(place(&found, 1)->endpoint, endpoint(1));
	assert_string_equal(place(&found, 1)->pool, "kv1");
	assert_string_equal(place(&found, 1)->summary, "{\"page_tokens\":16,\"rank\":1}");
	assert_int_equal(place(&found, 1)->size[BOOTSTRAP_TP], 3);
	assert_int_equal(publish(2, 7, endpoint(0), rank_of(2, 3), &three), 0);
	run_for(10 * MS);
	/* the meeting point asks itself, by name or not */
	query(0, 1, endpoint(0), &found);
	run_for(10 * MS);
	assert_int_equal(found.count, 3);
	assert_true(bootstrap_complete(found.ranks, found.count));
	/* another axis */
	struct bootstrap_rank rank = rank_of(0, 3);

	rank.size[BOOTSTRAP_PP] = 2;
	assert_true(publish(0, 7, NULL, rank, NULL) < 0);
	assert_non_null(strstr(err_last()->text, "pp_size: 2, and group 'prefill'"));
}

static void query_of_unknown_group_is_not_found(void **state)
{
	struct asked here, there;

	(void)state;
	query(0, 1, NULL, &here);
	query(1, 1, endpoint(0), &there);
	run_for(10 * MS);
	assert_int_equal(here.done, 1);
	assert_int_equal(here.err.code, ERR_NOTFOUND);
	assert_int_equal(there.done, 1);
	assert_int_equal(there.err.code, ERR_NOTFOUND);
	assert_non_null(strstr(there.err.text, "meeting point tcp://10.0.0.0:7400"));
}

static void query_waits_for_the_meeting_point(void **state)
{
	struct asked late, never;

	(void)state;
	node_stop(0);
	query(1, 1, endpoint(0), &late);
	run_for(3 * LOOP_NS_PER_S);
	assert_int_equal(late.done, 0);
	node_start(0);
	assert_int_equal(publish(0, 7, NULL, rank_of(0, 1), NULL), 0);
	run_for(3 * LOOP_NS_PER_S);
	assert_int_equal(late.done, 1);
	assert_int_equal(late.count, 1);
	node_stop(0);
	run_for(2 * LOOP_NS_PER_S);
	query(1, 1, endpoint(0), &never);
	run_for(11 * LOOP_NS_PER_S);
	assert_int_equal(never.done, 1);
	assert_int_equal(never.err.code, ERR_TIMEOUT);
	assert_non_null(strstr(never.err.text, "tcp://10.0.0.0:7400 cannot be reached"));
	/* nothing is held any more */
	run_for(60 * LOOP_NS_PER_S);
	assert_int_equal(f.n[1].peers->count, 0);
	node_start(0);
}

static void key_that_the_meeting_point_refuses_ends_calls_at_once(void **state)
{
	const struct mem_path refuse = {.delay_ns = MS, .refuse = true};
	const struct mem_path good = {.delay_ns = MS};
	struct asked asked, told;

	(void)state;
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(1), endpoint(0), &refuse), 0);
	query(1, 1, endpoint(0), &asked);
	assert_int_equal(publish(1, 1, endpoint(0), rank_of(0, 1), &told), 0);
	run_for(100 * MS);
	for (struct asked *one = &asked;; one = &told) {
		assert_int_equal(one->done, 1);
		assert_int_equal(one->err.code, ERR_AUTH);
		assert_false(one->err.retryable);
		assert_string_equal(one->err.text,
				    "peer tcp://10.0.0.0:7400 refuses our key");
		if (one == &told)
			break;
	}
	assert_int_equal(mem_hub_set_path(f.hub, endpoint(1), endpoint(0), &good), 0);
	run_for(60 * LOOP_NS_PER_S);
	assert_int_equal(f.n[1].peers->count, 0); /* nothing is held any more */
	assert_int_equal(known(), 0);
}

static void refusal_that_may_pass_is_waited_out(void **state)
{
	struct asked there, asked;

	(void)state;
	node_stop(0);
	f.peers_options.peers_max = 1;
	node_start(0);
	assert_int_equal(publish(2, 7, endpoint(0), rank_of(0, 1), &there), 0);
	run_for(10 * MS);
	assert_int_equal(there.done, 1);
	query(1, 1, endpoint(0), &asked);
	run_for(LOOP_NS_PER_S);
	assert_true(f.n[0].peers->stats.refused > 0);
	assert_int_equal(asked.done, 0);
	run_for(10 * LOOP_NS_PER_S);
	assert_int_equal(asked.done, 1);
	assert_int_equal(asked.err.code, ERR_TIMEOUT);
	assert_non_null(strstr(asked.err.text, "says: \"1 peers are known"));
}

static void publish_of_bad_rank_is_refused(void **state)
{
	struct bootstrap_rank rank;
	char name[BOOTSTRAP_GROUP_MAX + 1];

	(void)state;
	rank = rank_of(3, 3);
	assert_true(publish(0, 1, NULL, rank, NULL) < 0);
	assert_non_null(strstr(err_last()->text, "tp_rank: 3, must be under tp_size 3"));
	rank = rank_of(0, 1);
	rank.size[BOOTSTRAP_CP] = 0;
	assert_true(publish(0, 1, NULL, rank, NULL) < 0);
	assert_non_null(strstr(err_last()->text, "cp_size: 0"));
	rank.size[BOOTSTRAP_CP] = BOOTSTRAP_SIZE_MAX + 1;
	assert_true(publish(0, 1, NULL, rank, NULL) < 0);
	rank = rank_of(0, 1);
	strcpy(rank.endpoint, "10.0.0.1");
	assert_true(publish(0, 1, NULL, rank, NULL) < 0);
	assert_int_equal(err_last()->code, ERR_INVAL);
	rank = rank_of(0, 1);
	memset(name, 'x', sizeof(name));
	name[sizeof(name) - 1] = '\0';
	assert_true(bootstrap_publish(f.n[0].bootstrap, 1, name, NULL, &rank, NULL) < 0);
	assert_true(bootstrap_publish(f.n[0].bootstrap, 1, "", NULL, &rank, NULL) < 0);
	assert_true(publish(0, 1, "nowhere", rank, NULL) < 0);
	assert_int_equal(err_last()->code, ERR_INVAL);
	assert_int_equal(f.n[0].bootstrap->board.count, 0);
}

static void place_of_another_owner_is_refused(void **state)
{
	struct asked mine, theirs, again;
	struct bootstrap_rank rank = rank_of(0, 2);

	(void)state;
	assert_int_equal(publish(1, 7, endpoint(0), rank, &mine), 0);
	run_for(10 * MS);
	/* the same owner may change it */
	strcpy(rank.summary, "new");
	assert_int_equal(publish(1, 7, endpoint(0), rank, &again), 0);
	run_for(10 * MS);
	assert_int_equal(again.err.code, ERR_OK);
	assert_int_equal(publish(2, 7, endpoint(0), rank, &theirs), 0);
	run_for(10 * MS);
	assert_int_equal(theirs.done, 1);
	assert_int_equal(theirs.err.code, ERR_EXIST);
	assert_non_null(strstr(theirs.err.text, "published by tcp://10.0.0.1:7400"));
	assert_true(publish(0, 7, NULL, rank, NULL) < 0);
	assert_int_equal(err_last()->code, ERR_EXIST);
	/* the refused one is not tried again behind its caller's back */
	bootstrap_session_gone(f.n[1].bootstrap, 7);
	run_for(120 * LOOP_NS_PER_S);
	assert_int_equal(known(), 0);
}

static void ranks_go_with_their_session(void **state)
{
	(void)state;
	for (uint32_t i = 0; i < 4; i++) {
		assert_int_equal(publish(0, i, NULL, rank_of(i, 8), NULL), 0);
		assert_int_equal(publish(1, i, endpoint(0), rank_of(4 + i, 8), NULL), 0);
	}
	run_for(10 * MS);
	assert_int_equal(known(), 8);
	bootstrap_session_gone(f.n[0].bootstrap, 2);
	assert_int_equal(known(), 7);
	bootstrap_session_gone(f.n[1].bootstrap, 3);
	run_for(10 * MS);
	assert_int_equal(known(), 6);
	bootstrap_session_gone(f.n[0].bootstrap, 55);
	assert_int_equal(known(), 6);
}

static void ranks_go_with_their_daemon(void **state)
{
	struct asked asked;

	(void)state;
	assert_int_equal(publish(1, 1, endpoint(0), rank_of(0, 2), &asked), 0);
	assert_int_equal(publish(2, 1, endpoint(0), rank_of(1, 2), NULL), 0);
	run_for(10 * MS);
	assert_int_equal(known(), 2);
	link_mem_crash(f.n[1].link, MEM_CRASH_POWER);
	node_stop(1);
	run_for(LOOP_NS_PER_S);
	assert_int_equal(known(), 1);
	/* its successor takes the place */
	node_start(1);
	assert_int_equal(publish(1, 1, endpoint(0), rank_of(0, 2), &asked), 0);
	run_for(10 * MS);
	assert_int_equal(asked.err.code, ERR_OK);
	assert_int_equal(known(), 2);
}

static void ranks_come_back_to_a_restarted_meeting_point(void **state)
{
	(void)state;
	assert_int_equal(publish(1, 1, endpoint(0), rank_of(0, 2), NULL), 0);
	assert_int_equal(publish(2, 1, endpoint(0), rank_of(1, 2), NULL), 0);
	run_for(10 * MS);
	node_stop(0);
	run_for(5 * LOOP_NS_PER_S);
	node_start(0);
	run_for(5 * LOOP_NS_PER_S);
	assert_int_equal(known(), 2);
	/* and stay: they are renewed */
	run_for(300 * LOOP_NS_PER_S);
	assert_int_equal(known(), 2);
	assert_int_equal(f.n[0].bootstrap->board.count, 2);
}

static int raw_send(unsigned int type, const uint8_t *body, size_t len)
{
	struct peer *peer = peer_at(f.n[1].peers, endpoint(0));

	return peer_send_reliable(peer, type, body, len);
}

static void raw_publish(const char *group, uint64_t ttl_ms, const struct wire_blob *rank)
{
	struct wire_route_publish m = {.cookie = 5, .ttl_ms = ttl_ms, .rank = *rank};
	uint8_t body[4096];
	struct cursor c;

	strcpy(m.group, group);
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_route_publish_put(&c, &m), 0);
	assert_int_equal(raw_send(WIRE_T_ROUTE_PUBLISH, body, c.pos), 0);
	run_for(10 * MS);
}

/* A record as bootstrap_board.c writes it, for hostile variations. */
static struct wire_blob record(uint8_t *buf, size_t size,
			       const struct bootstrap_rank *rank, size_t extra)
{
	struct cursor c;

	cursor_write(&c, buf, size);
	cursor_put_u16(&c,
		       (uint16_t)(32 + 6 + strlen(rank->endpoint) + strlen(rank->pool) +
				  strlen(rank->summary) + extra));
	for (unsigned int i = 0; i < BOOTSTRAP_AXES; i++) {
		cursor_put_u32(&c, rank->rank[i]);
		cursor_put_u32(&c, rank->size[i]);
	}
	cursor_put_str(&c, rank->endpoint);
	cursor_put_str(&c, rank->pool);
	cursor_put_str(&c, rank->summary);
	for (size_t i = 0; i < extra; i++)
		cursor_put_u8(&c, 7);
	assert_false(c.bad);
	return (struct wire_blob){buf, c.pos};
}

static struct peer *join(void)
{
	struct peer *peer;

	assert_int_equal(peers_dial(f.n[1].peers, endpoint(0), &peer), 0);
	run_for(10 * MS);
	assert_int_equal(sm_state(&peer->sm), PEER_UP);
	return peer;
}

static void rank_not_renewed_expires(void **state)
{
	struct bootstrap_rank rank = rank_of(0, 1);
	struct wire_blob blob;
	uint8_t buf[512];

	(void)state;
	join();
	strcpy(rank.endpoint, endpoint(1));
	blob = record(buf, sizeof(buf), &rank, 3); /* a newer daemon's: longer */
	raw_publish("prefill", 5000, &blob);
	assert_int_equal(known(), 1);
	run_for(40 * LOOP_NS_PER_S);
	assert_int_equal(known(), 0);
	assert_int_equal(f.n[0].downs, 0);
	/* nobody may stay for ever by asking so */
	raw_publish("prefill", UINT64_MAX, &blob);
	run_for(81 * LOOP_NS_PER_S);
	assert_int_equal(known(), 0);
}

static void hostile_publications_are_refused(void **state)
{
	struct bootstrap_rank rank = rank_of(0, 1);
	struct wire_blob blob;
	uint8_t buf[512];

	(void)state;
	join();
	blob = record(buf, sizeof(buf), &rank, 0); /* no endpoint */
	raw_publish("prefill", 5000, &blob);
	strcpy(rank.endpoint, "file:///etc/passwd");
	blob = record(buf, sizeof(buf), &rank, 0);
	raw_publish("prefill", 5000, &blob);
	strcpy(rank.endpoint, endpoint(1));
	rank.rank[BOOTSTRAP_DP] = 1;
	blob = record(buf, sizeof(buf), &rank, 0);
	raw_publish("prefill", 5000, &blob);
	raw_publish("", 5000, &blob);
	assert_int_equal(f.n[0].bootstrap->board.count, 0);
	assert_int_equal(f.n[0].downs, 0);
	/* cut short: that is no daemon's doing */
	for (size_t len = 0; len < blob.len; len++) {
		struct wire_blob cut = {blob.data, len};

		raw_publish("prefill", 5000, &cut);
		assert_int_equal(f.n[0].downs, len + 1);
		assert_int_equal(f.n[0].why.code, ERR_PROTO);
		run_for(10 * LOOP_NS_PER_S);
	}
}

static void owner_over_its_cap_is_refused(void **state)
{
	struct asked asked;
	uint32_t i;

	(void)state;
	node_stop(0);
	node_stop(1);
	f.options.owner_ranks_max = 10;
	f.options.ranks_max = 25;
	node_start(0);
	node_start(1);
	for (i = 0; i < 10; i++)
		assert_int_equal(publish(0, 1, NULL, rank_of(i, 100), NULL), 0);
	assert_true(publish(0, 1, NULL, rank_of(i, 100), NULL) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_int_equal(publish(0, 1, NULL, rank_of(3, 100), NULL),
			 0); /* not a new one */
	for (; i < 20; i++)
		assert_int_equal(publish(1, 1, endpoint(0), rank_of(i, 100), NULL), 0);
	assert_true(publish(1, 1, endpoint(0), rank_of(i, 100), NULL) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	/* another session of the same daemon is the same owner there */
	assert_int_equal(publish(1, 2, endpoint(0), rank_of(i, 100), &asked), 0);
	run_for(10 * MS);
	assert_int_equal(asked.err.code, ERR_LIMIT);
	assert_int_equal(f.n[0].bootstrap->board.count, 20);
	for (; i < 25; i++)
		assert_int_equal(publish(0, i, NULL, rank_of(i, 100), NULL), 0);
	assert_true(publish(0, i, NULL, rank_of(i, 100), NULL) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
}

static void group_that_cannot_be_told_is_refused(void **state)
{
	struct bootstrap_rank rank;
	struct asked asked;
	uint32_t i;
	int r = 0;

	(void)state;
	node_stop(0);
	node_stop(1);
	f.options.message_bytes = f.peers_options.message_bytes = 65536;
	node_start(0);
	node_start(1);
	for (i = 0; r == 0; i++) {
		rank = rank_of(i, 1000);
		memset(rank.summary, 's', sizeof(rank.summary) - 1);
		r = publish(0, 1, NULL, rank, NULL);
	}
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_in_range(i, 55, 64);
	/* and what was taken can be told */
	query(1, 1, endpoint(0), &asked);
	run_for(10 * MS);
	assert_int_equal(asked.done, 1);
	assert_int_equal(asked.count, i - 1);
	assert_string_equal(place(&asked, 5)->endpoint, endpoint(0));
	assert_int_equal(strlen(place(&asked, 5)->summary), BOOTSTRAP_SUMMARY_MAX - 1);
}

static void calls_over_their_cap_are_refused(void **state)
{
	static struct asked asked[65];
	unsigned int i;

	(void)state;
	node_stop(0);
	for (i = 0; i < 64; i++)
		query(1, 1, endpoint(0), &asked[i]);
	asked_init(&asked[64]);
	assert_true(bootstrap_query(f.n[1].bootstrap, 1, "prefill", endpoint(0),
				    &asked[64].call) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	query(1, 2, endpoint(0), &asked[64]); /* another session may */
	/* the end of a session ends its calls */
	bootstrap_session_gone(f.n[1].bootstrap, 1);
	assert_int_equal(asked[0].done, 0);
	run_for(1);
	for (i = 0; i < 64; i++) {
		assert_int_equal(asked[i].done, 1);
		assert_int_equal(asked[i].err.code, ERR_SESSION);
	}
	assert_int_equal(asked[64].done, 0);
	/* cancelled: never called */
	bootstrap_cancel(&asked[64].call);
	bootstrap_cancel(&asked[64].call);
	run_for(60 * LOOP_NS_PER_S);
	assert_int_equal(asked[64].done, 0);
	/* the end of the daemon */
	query(1, 3, endpoint(0), &asked[0]);
	bootstrap_free(f.n[1].bootstrap);
	assert_int_equal(asked[0].done, 1);
	assert_int_equal(asked[0].err.code, ERR_DRAIN);
	f.n[1].bootstrap = NULL;
	node_stop(1);
}

static void publish_twice_answers_both(void **state)
{
	struct asked one, two;

	(void)state;
	assert_int_equal(publish(1, 1, endpoint(0), rank_of(0, 1), &one), 0);
	assert_int_equal(publish(1, 1, endpoint(0), rank_of(0, 1), &two), 0);
	run_for(10 * MS);
	assert_int_equal(one.done, 1);
	assert_int_equal(one.err.code, ERR_CANCELED);
	assert_int_equal(two.done, 1);
	assert_int_equal(two.err.code, ERR_OK);
	assert_int_equal(known(), 1);
}

static void answer_that_was_not_asked_for_is_ignored(void **state)
{
	struct wire_route m = {.cookie = 12345};
	struct asked asked;
	uint8_t body[1024];
	struct cursor c;

	(void)state;
	join();
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_route_put(&c, &m), 0);
	assert_int_equal(raw_send(WIRE_T_ROUTE, body, c.pos), 0);
	run_for(10 * MS);
	assert_int_equal(f.n[0].downs, 0);
	/* an answer that is asked for, but broken, fails the call and the peer */
	node_stop(2);
	query(0, 1, endpoint(1), &asked);
	uint8_t many[] = {255, 255, 255, 255};

	m.cookie = asked.call.cookie;
	m.ranks = (struct wire_blob){many, sizeof(many)};
	cursor_write(&c, body, sizeof(body));
	assert_int_equal(wire_route_put(&c, &m), 0);
	assert_int_equal(raw_send(WIRE_T_ROUTE, body, c.pos), 0);
	run_for(60000); /* before the true answer can come */
	assert_int_equal(asked.done, 1);
	assert_int_equal(asked.err.code, ERR_PROTO);
	assert_int_equal(f.n[0].downs, 1);
}

static void allocation_failures_cost_the_call_only(void **state)
{
	(void)state;
	teardown(NULL);
	for (uint64_t n = 1; n < 500; n++) {
		struct asked put, get;
		bool reached;

		setup(NULL);
		mem_fail_at(n);
		if (publish(1, 1, endpoint(0), rank_of(0, 1), &put) < 0) {
			assert_int_equal(err_last()->code, ERR_NOMEM);
			put.done = 1;
		}
		run_for(12 * LOOP_NS_PER_S);
		assert_int_equal(put.done, 1);
		asked_init(&get);
		if (bootstrap_query(f.n[2].bootstrap, 1, "prefill", endpoint(0),
				    &get.call) < 0)
			get.done = 1;
		run_for(12 * LOOP_NS_PER_S);
		assert_int_equal(get.done, 1);
		reached = mem_count() >= n;
		mem_fail_at(0);
		/* afterwards all is as ever */
		assert_int_equal(publish(1, 1, endpoint(0), rank_of(0, 1), &put), 0);
		run_for(5 * LOOP_NS_PER_S);
		assert_int_equal(put.err.code, ERR_OK);
		query(2, 1, endpoint(0), &get);
		run_for(5 * LOOP_NS_PER_S);
		assert_int_equal(get.count, 1);
		teardown(NULL);
		if (!reached)
			break;
	}
	setup(NULL);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(ranks_published_anywhere_are_found_by_asking_one),
		TEST(query_of_unknown_group_is_not_found),
		TEST(query_waits_for_the_meeting_point),
		TEST(refusal_that_may_pass_is_waited_out),
		TEST(key_that_the_meeting_point_refuses_ends_calls_at_once),
		TEST(publish_of_bad_rank_is_refused),
		TEST(place_of_another_owner_is_refused),
		TEST(ranks_go_with_their_session),
		TEST(ranks_go_with_their_daemon),
		TEST(ranks_come_back_to_a_restarted_meeting_point),
		TEST(rank_not_renewed_expires),
		TEST(hostile_publications_are_refused),
		TEST(owner_over_its_cap_is_refused),
		TEST(group_that_cannot_be_told_is_refused),
		TEST(calls_over_their_cap_are_refused),
		TEST(publish_twice_answers_both),
		TEST(answer_that_was_not_asked_for_is_ignored),
		TEST(allocation_failures_cost_the_call_only),
	};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("bootstrap", tests, NULL, NULL);
}
