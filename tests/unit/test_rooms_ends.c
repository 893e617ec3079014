/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every room ends: if a side does not connect, bind, send, take, move or quiesce. Each
 * end has its time, its code, its text (on both sides) and its counter. In-process
 * cluster, virtual time.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/peer/peer.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"
#include "proto/kvd_status.h"
#include "tests/lib/cluster.h"

#define MS LOOP_NS_PER_MS

/* nodes 0 and 2 prefill, node 1 decodes */
struct trio {
	struct cluster c;
	struct session *prefill, *decode, *other;
	struct cache src, dst, third;
};

static int setup(void **state)
{
	struct trio *p = calloc(1, sizeof(*p));

	cluster_new(&p->c, 1, 3);
	p->prefill = cluster_engine(&p->c, 0, "prefill");
	p->decode = cluster_engine(&p->c, 1, "decode");
	p->other = cluster_engine(&p->c, 2, "other");
	p->src = p->dst = p->third = cluster_geometry;
	/* each source holds half of the heads */
	p->src.units = p->third.units = 2;
	p->third.first_unit = 2;
	cluster_cache(&p->c, p->prefill, "kv", 0, &p->src);
	cluster_cache(&p->c, p->decode, "kv", 0, &p->dst);
	cluster_cache(&p->c, p->other, "kv", 1, &p->third);
	memset(p->src.base, 0x11, p->src.bytes);
	memset(p->third.base, 0x33, p->third.bytes);
	*state = p;
	return 0;
}

static int teardown(void **state)
{
	struct trio *p = *state;

	for (unsigned int i = 0; i < 3; i++)
		p->c.nodes[i].kvd.draining = false;
	cluster_free(&p->c);
	cache_close(&p->src);
	cache_close(&p->dst);
	cache_close(&p->third);
	free(p);
	return 0;
}

static void open_send(struct trio *p, uint64_t room, const char *more)
{
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu%s}",
		   (unsigned long long)room, (unsigned long long)p->src.pool, more);
	cluster_ok(&p->c, p->other,
		   "{'cmd':'room.open','room':'%llu','role':'send','pool':%llu%s}",
		   (unsigned long long)room, (unsigned long long)p->third.pool, more);
}

static void open_recv(struct trio *p, uint64_t room, const char *more)
{
	cluster_ok(
		&p->c, p->decode,
		"{'cmd':'room.open','room':'%llu','role':'recv','pool':%llu,'sources':["
		"'%s','%s']%s}",
		(unsigned long long)room, (unsigned long long)p->dst.pool,
		p->c.nodes[0].endpoint, p->c.nodes[2].endpoint, more);
}

static void bind(struct trio *p, uint64_t room)
{
	cluster_ok(
		&p->c, p->decode,
		"{'cmd':'room.bind','room':'%llu','views':{'kv':{'pages':[7,2,8,12]}}}",
		(unsigned long long)room);
}

static void send_from(struct trio *p, struct session *engine, uint64_t room)
{
	cluster_ok(&p->c, engine,
		   "{'cmd':'room.send','room':'%llu','seq':0,'last':true,'views':{'kv':{"
		   "'pages':[3,4,9,1]}}}",
		   (unsigned long long)room);
}

static const struct err *why(struct trio *p, unsigned int node, enum room_role role,
			     uint64_t number)
{
	struct session *const engines[] = {p->prefill, p->decode, p->other};
	struct room *room =
		rooms_find(rooms_of(&p->c.nodes[node].kvd), engines[node], role, number);

	assert_non_null(room);
	return room->error;
}

static void said(const struct err *err, enum err_code code, const char *words)
{
	if (err->code != code || !strstr(err->text, words))
		fail_msg("%s: %s; not %s: %s", err_name(err->code), err->text,
			 err_name(code), words);
}

static uint64_t counted(struct trio *p, unsigned int node, enum metric metric)
{
	return metrics_get(&p->c.nodes[node].kvd.metrics, metric);
}

static void until_failed(struct trio *p, uint64_t room)
{
	cluster_until_state(&p->c, p->decode, "recv", room, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "send", room, KVD_FAILED);
	cluster_until_state(&p->c, p->other, "send", room, KVD_FAILED);
}

static void receiver_never_bound_times_out(void **state)
{
	struct trio *p = *state;

	open_send(p, 1, ",'timeouts':{'bootstrap_ms':900}");
	open_recv(p, 1, ",'timeouts':{'waiting_ms':500}");
	/* a room whose receiver never opens */
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'99','role':'send','pool':%llu,'timeouts':"
		   "{'bootstrap_ms':900}}",
		   (unsigned long long)p->src.pool);
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, 250 * MS);
	assert_int_equal(cluster_state(&p->c, p->decode, "recv", 1),
			 KVD_WAITING_FOR_INPUT);
	until_failed(p, 1);
	said(why(p, 1, ROOM_RECV, 1), ERR_TIMEOUT, "engine 'decode' to bind pages");
	said(why(p, 0, ROOM_SEND, 1), ERR_TIMEOUT, "engine 'decode' to bind pages");
	cluster_until_state(&p->c, p->prefill, "send", 99, KVD_FAILED);
	said(why(p, 0, ROOM_SEND, 99), ERR_TIMEOUT,
	     "900 ms: waits for a receiver to bind its pages (0 of 1)");
	assert_int_equal(counted(p, 1, METRIC_WAITING_TIMEOUTS), 1);
	assert_int_equal(counted(p, 0, METRIC_BOOTSTRAP_TIMEOUTS), 1);
	assert_true(why(p, 1, ROOM_RECV, 1)->retryable);
}

static uint64_t observed(struct trio *p, unsigned int cell)
{
	return p->c.nodes[1].kvd.metrics.histogram[cell].count;
}

/* A room that fails has no size, and its last phase is incomplete. */
static void ends_of_rooms_are_counted_by_phase_size_and_peer(void **state)
{
	struct trio *p = *state;
	const struct metrics *m = &p->c.nodes[1].kvd.metrics;
	const struct remote *remote;
	uint64_t bytes = 0, rooms = 0, failed = 0;

	open_send(p, 1, "");
	open_recv(p, 1, "");
	bind(p, 1);
	cluster_until_state(&p->c, p->prefill, "send", 1, KVD_WAITING_FOR_INPUT);
	send_from(p, p->prefill, 1);
	cluster_until_state(&p->c, p->other, "send", 1, KVD_WAITING_FOR_INPUT);
	send_from(p, p->other, 1);
	cluster_until_state(&p->c, p->decode, "recv", 1, KVD_SUCCESS);
	open_send(p, 2, ",'timeouts':{'waiting_ms':700}");
	open_recv(p, 2, "");
	bind(p, 2);
	cluster_until_state(&p->c, p->other, "send", 2, KVD_WAITING_FOR_INPUT);
	send_from(p, p->other, 2);
	until_failed(p, 2);
	assert_int_equal(observed(p, METRIC_AT(ROOM_SIZE, 0, 0)), 1);
	assert_int_equal(
		observed(p, METRIC_AT(ROOM_PHASE, ROOM_RECV, METRIC_PHASE_WAITING)), 2);
	assert_int_equal(
		observed(p, METRIC_AT(ROOM_PHASE, ROOM_RECV, METRIC_PHASE_TRANSFER)), 1);
	assert_int_equal(
		observed(p, METRIC_AT(ROOM_PHASE, ROOM_RECV, METRIC_PHASE_TOTAL)), 1);
	list_foreach(remote, handshake_remotes(p->c.nodes[1].kvd.handshake), link) {
		bytes += remote->peer->totals.bytes_in;
		rooms += remote->peer->totals.rooms;
		failed += remote->peer->totals.rooms_failed;
	}
	assert_int_equal(rooms, 4);
	assert_int_equal(failed, 2);
	assert_true(bytes > 0);
	assert_int_equal(bytes, METRICS_SUM(m, PEER_BYTES));
	assert_int_equal(bytes, METRICS_SUM(m, TRANSFERRED_BYTES));
}

static void sender_never_sending_times_out_on_all_sides(void **state)
{
	struct trio *p = *state;

	open_send(p, 2, ",'timeouts':{'waiting_ms':700}");
	open_recv(p, 2, "");
	bind(p, 2);
	cluster_until_state(&p->c, p->other, "send", 2, KVD_WAITING_FOR_INPUT);
	send_from(p, p->other, 2);
	until_failed(p, 2);
	said(why(p, 0, ROOM_SEND, 2), ERR_TIMEOUT,
	     "700 ms: waits for engine 'prefill' to send its first chunk");
	/* the receiver names the failed side, the other sender, too */
	said(why(p, 1, ROOM_RECV, 2), ERR_TIMEOUT, "peer tcp://10.0.0.1:7400 instance ");
	said(why(p, 1, ROOM_RECV, 2), ERR_TIMEOUT, "to send its first chunk");
	said(why(p, 2, ROOM_SEND, 2), ERR_TIMEOUT, "to send its first chunk");
	assert_int_equal(counted(p, 0, METRIC_WAITING_TIMEOUTS), 1);
}

static void receiver_names_silent_source(void **state)
{
	struct trio *p = *state;

	open_send(p, 3, "");
	open_recv(p, 3, ",'timeouts':{'waiting_ms':800}");
	bind(p, 3);
	cluster_until_state(&p->c, p->prefill, "send", 3, KVD_WAITING_FOR_INPUT);
	send_from(p, p->prefill, 3);
	until_failed(p, 3);
	said(why(p, 1, ROOM_RECV, 3), ERR_TIMEOUT, "the next chunk of peer n2");
	said(why(p, 0, ROOM_SEND, 3), ERR_TIMEOUT, "the next chunk of peer n2");
}

static void room_without_sender_is_refused_in_time(void **state)
{
	struct trio *p = *state;

	p->c.nodes[0].config.early_request_ttl_ns = 2 * LOOP_NS_PER_S;
	open_recv(p, 4, "");
	bind(p, 4);
	cluster_ok(&p->c, p->other,
		   "{'cmd':'room.open','room':'4','role':'send','pool':%llu}",
		   (unsigned long long)p->third.pool);
	cluster_until_state(&p->c, p->other, "send", 4, KVD_WAITING_FOR_INPUT);
	cluster_until_state(&p->c, p->decode, "recv", 4, KVD_FAILED);
	said(why(p, 1, ROOM_RECV, 4), ERR_TIMEOUT,
	     "no engine opened room 4 within 2000 ms");
	cluster_until_state(&p->c, p->other, "send", 4, KVD_FAILED);
	assert_int_equal(counted(p, 0, METRIC_ORPHANS_EXPIRED), 1);
}

/* Its room there does not know us yet, so only the end of its pool is reported. */
static void source_engine_dead_before_contact_is_retryable(void **state)
{
	struct trio *p = *state;

	open_send(p, 30, "");
	open_recv(p, 30, "");
	cluster_until_state(&p->c, p->decode, "recv", 30, KVD_WAITING_FOR_INPUT);
	cluster_engine_dies(&p->c, p->prefill);
	cluster_until_state(&p->c, p->decode, "recv", 30, KVD_FAILED);
	said(why(p, 1, ROOM_RECV, 30), ERR_SESSION, "peer tcp://10.0.0.1:7400 instance ");
	said(why(p, 1, ROOM_RECV, 30), ERR_SESSION, "withdrew pool 'kv'");
	assert_true(why(p, 1, ROOM_RECV, 30)->retryable);
	cluster_run(&p->c, LOOP_NS_PER_S);
}

static void source_missing_is_named(void **state)
{
	struct trio *p = *state;

	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'5','role':'recv','pool':%llu,'sources':["
		   "'%s','tcp://10.0.0.9:7400'],'timeouts':{'bootstrap_ms':600}}",
		   (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
	cluster_until_state(&p->c, p->decode, "recv", 5, KVD_FAILED);
	said(why(p, 1, ROOM_RECV, 5), ERR_TIMEOUT, "waits for peer tcp://10.0.0.9:7400");
	said(why(p, 1, ROOM_RECV, 5), ERR_TIMEOUT, "cannot be reached");
}

/* Long before bootstrap_timeout, with the link's text; each room has its own time. */
static void source_that_cannot_be_reached_ends_its_rooms_after_connect_timeout(
	void **state)
{
	struct trio *p = *state;
	uint64_t begin_ns = loop_now_ns(p->c.loop);

	p->c.nodes[1].config.connect_timeout_ns = 3 * LOOP_NS_PER_S;
	for (unsigned int room = 5; room < 7; room++) {
		cluster_ok(&p->c, p->decode,
			   "{'cmd':'room.open','room':'%u','role':'recv','pool':%llu,"
			   "'sources':['%s','tcp://10.0.0.9:7400']}",
			   room, (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
		cluster_run(&p->c, LOOP_NS_PER_S);
	}
	cluster_until_state(&p->c, p->decode, "recv", 5, KVD_FAILED);
	assert_in_range(loop_now_ns(p->c.loop) - begin_ns, 3 * LOOP_NS_PER_S,
			LOOP_NS_PER_S * 7 / 2);
	said(why(p, 1, ROOM_RECV, 5), ERR_PEER,
	     "room 5: peer tcp://10.0.0.9:7400 cannot be reached: nobody listens (tried "
	     "for 3000 ms)");
	assert_true(why(p, 1, ROOM_RECV, 5)->retryable);
	cluster_until_state(&p->c, p->decode, "recv", 6, KVD_FAILED);
	assert_in_range(loop_now_ns(p->c.loop) - begin_ns, 4 * LOOP_NS_PER_S,
			LOOP_NS_PER_S * 9 / 2);
}

static void offer_not_pulled_ends_with_its_lease(void **state)
{
	struct trio *p = *state;

	cluster_ok(
		&p->c, p->prefill,
		"{'cmd':'room.open','room':'6','role':'offer','pool':%llu,'lease_ms':600,"
		"'receivers':2,'views':{'kv':{'pages':[3]}}}",
		(unsigned long long)p->src.pool);
	cluster_run(&p->c, 500 * MS);
	assert_int_equal(cluster_state(&p->c, p->prefill, "offer", 6),
			 KVD_WAITING_FOR_INPUT);
	cluster_until_state(&p->c, p->prefill, "offer", 6, KVD_FAILED);
	said(why(p, 0, ROOM_OFFER, 6), ERR_LEASE,
	     "600 ms expired; of 2 pullers 0 joined");
	assert_int_equal(counted(p, 0, METRIC_LEASES_EXPIRED), 1);
	/* a later room is notified at once */
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'6','role':'pull','pool':%llu,'sources':['%"
		   "s'],"
		   "'views':{'kv':{'pages':[7]}}}",
		   (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
	cluster_until_state(&p->c, p->decode, "pull", 6, KVD_FAILED);
	said(why(p, 1, ROOM_PULL, 6), ERR_LEASE, "the lease of 600 ms expired");
}

static void open_offer(struct trio *p, uint64_t number, unsigned int pullers)
{
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'%llu','role':'offer','pool':%llu,"
		   "'receivers':%u,'views':{'kv':{'pages':[3]}}}",
		   (unsigned long long)number, (unsigned long long)p->dst.pool, pullers);
}

static void open_pull(struct trio *p, struct session *engine, const struct cache *cache,
		      uint64_t number, bool held)
{
	char wait[96] = "";

	if (held)
		snprintf(wait, sizeof(wait),
			 ",'wait':{'kind':'seq','region':%llu,'offset':0,'value':'%llu'}",
			 (unsigned long long)cache->region,
			 (unsigned long long)UINT64_MAX);
	cluster_ok(&p->c, engine,
		   "{'cmd':'room.open','room':'%llu','role':'pull','pool':%llu,'sources':"
		   "['%s'],"
		   "'views':{'kv':{'pages':[7]}}%s}",
		   (unsigned long long)number, (unsigned long long)cache->pool,
		   p->c.nodes[1].endpoint, wait);
}

/* It has its bytes and the offer's confirmation: it is not needed any more. */
static void puller_done_may_close(void **state)
{
	struct trio *p = *state;

	open_offer(p, 40, 2);
	open_pull(p, p->prefill, &p->src, 40, false);
	cluster_until_state(&p->c, p->prefill, "pull", 40, KVD_SUCCESS);
	cluster_engine_dies(&p->c, p->prefill);
	cluster_run(&p->c, LOOP_NS_PER_S);
	open_pull(p, p->other, &p->third, 40, false);
	cluster_until_state(&p->c, p->other, "pull", 40, KVD_SUCCESS);
	cluster_until_state(&p->c, p->decode, "offer", 40, KVD_SUCCESS);
}

/* Its source confirms before any byte was read, and then unregisters its pool: the
 * room ends with the first, and nothing is planned with the second. */
static void pull_acknowledged_before_it_read_fails(void **state)
{
	struct trio *p = *state;
	struct wire_pull_ack ack = {.room = 46, .code = ERR_OK};
	struct handshake *hs = p->c.nodes[1].kvd.handshake;
	struct remote *puller;
	struct cursor out;

	open_offer(p, 46, 1);
	open_pull(p, p->prefill, &p->src, 46, true);
	cluster_until_state(&p->c, p->prefill, "pull", 46, KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, LOOP_NS_PER_S);
	ack.pull_gen =
		rooms_find(rooms_of(&p->c.nodes[0].kvd), p->prefill, ROOM_PULL, 46)->gen;
	ack.offer_gen =
		rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_OFFER, 46)->gen;
	assert_int_equal(handshake_reach(hs, p->c.nodes[0].endpoint, NULL, &puller), 0);
	handshake_body(hs, &out);
	wire_pull_ack_put(&out, &ack);
	assert_int_equal(handshake_send(puller, WIRE_T_PULL_ACK, out.base, out.pos), 0);
	cluster_engine_dies(&p->c, p->decode);
	cluster_until_state(&p->c, p->prefill, "pull", 46, KVD_FAILED);
	said(why(p, 0, ROOM_PULL, 46), ERR_PROTO, "PULL_ACK before the end of the read");
	handshake_release(puller);
}

/* Two sources at one daemon have not answered yet, and one of them aborts: its
 * generation does not identify it. Both are notified of the end of the room. */
static void abort_with_two_silent_sources_is_sent_to_both(void **state)
{
	struct trio *p = *state;
	struct wire_abort abort = {
		.room = 47, .from_role = ROOM_SEND, .from_gen = 77, .code = ERR_ABORTED};
	struct session *second = cluster_engine(&p->c, 0, "second");
	struct handshake *hs = p->c.nodes[0].kvd.handshake;
	struct cache half = p->third;
	struct remote *receiver;
	struct cursor out;

	cluster_cache(&p->c, second, "tp", 1, &half);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.open','room':'47','role':'recv','pool':%llu,'sources':["
		   "{'endpoint':'%s','pool':'kv'},{'endpoint':'%s','pool':'tp'}]}",
		   (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint,
		   p->c.nodes[0].endpoint);
	bind(p, 47);
	cluster_run(&p->c, LOOP_NS_PER_S);
	abort.to_gen =
		rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_RECV, 47)->gen;
	assert_int_equal(handshake_reach(hs, p->c.nodes[1].endpoint, NULL, &receiver), 0);
	handshake_body(hs, &out);
	wire_abort_put(&out, &abort);
	assert_int_equal(handshake_send(receiver, WIRE_T_ABORT, out.base, out.pos), 0);
	/* the other opens its room meanwhile: its acknowledgement is sent after that */
	cluster_ok(&p->c, p->prefill,
		   "{'cmd':'room.open','room':'47','role':'send','pool':%llu}",
		   (unsigned long long)p->src.pool);
	cluster_until_state(&p->c, p->decode, "recv", 47, KVD_FAILED);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(cluster_state(&p->c, p->prefill, "send", 47), KVD_FAILED);
	handshake_release(receiver);
	cluster_engine_dies(&p->c, second);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&half);
}

static void puller_giving_up_is_named(void **state)
{
	struct trio *p = *state;

	open_offer(p, 41, 1);
	open_pull(p, p->prefill, &p->src, 41, true);
	cluster_until_state(&p->c, p->prefill, "pull", 41, KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, 100 * MS); /* the offer has answered */
	cluster_engine_dies(&p->c, p->prefill);
	cluster_until_state(&p->c, p->decode, "offer", 41, KVD_FAILED);
	said(why(p, 1, ROOM_OFFER, 41), ERR_SESSION,
	     "peer tcp://10.0.0.1:7400 instance ");
	said(why(p, 1, ROOM_OFFER, 41), ERR_SESSION, "'prefill'");
}

static void pull_without_offer_is_refused_in_time(void **state)
{
	struct trio *p = *state;

	p->c.nodes[1].config.early_request_ttl_ns = 2 * LOOP_NS_PER_S;
	open_pull(p, p->prefill, &p->src, 44, false);
	cluster_until_state(&p->c, p->prefill, "pull", 44, KVD_FAILED);
	said(why(p, 0, ROOM_PULL, 44), ERR_TIMEOUT, "peer tcp://10.0.0.2:7400 instance ");
	said(why(p, 0, ROOM_PULL, 44), ERR_TIMEOUT,
	     "no engine opened room 44 within 2000 ms");
	assert_int_equal(counted(p, 1, METRIC_ORPHANS_EXPIRED), 1);
}

/* Its heartbeats keep the lease up, but not for ever. */
static void pull_with_lost_messages_releases_the_offer(void **state)
{
	struct trio *p = *state;

	memset(p->src.base, 0, 8);
	p->c.nodes[0].config.waiting_timeout_ns = 3 * LOOP_NS_PER_S;
	p->c.nodes[1].config.lease_ns = LOOP_NS_PER_S;
	open_offer(p, 45, 1);
	open_pull(p, p->prefill, &p->src, 45, true);
	cluster_until_state(&p->c, p->prefill, "pull", 45, KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, 2500 * MS);
	assert_int_equal(cluster_state(&p->c, p->decode, "offer", 45),
			 KVD_WAITING_FOR_INPUT);
	cluster_until_state(&p->c, p->prefill, "pull", 45, KVD_FAILED);
	cluster_run(&p->c, 50 * MS);
	assert_int_equal(cluster_state(&p->c, p->decode, "offer", 45), KVD_FAILED);
	said(why(p, 0, ROOM_PULL, 45), ERR_TIMEOUT, "to reach its wait point");
	said(why(p, 1, ROOM_OFFER, 45), ERR_TIMEOUT,
	     "peer tcp://10.0.0.1:7400 instance ");
	said(why(p, 1, ROOM_OFFER, 45), ERR_TIMEOUT, "to reach its wait point");
	assert_int_equal(counted(p, 0, METRIC_WAITING_TIMEOUTS), 1);
	assert_int_equal(counted(p, 1, METRIC_LEASES_EXPIRED), 0);
}

/* A pull held by its word, which its offer has answered. */
static struct room *begin_held_pull(struct trio *p, uint64_t number)
{
	memset(p->src.base, 0, 8); /* the word */
	open_offer(p, number, 1);
	open_pull(p, p->prefill, &p->src, number, true);
	cluster_until_state(&p->c, p->prefill, "pull", number, KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, 100 * MS);
	return rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_OFFER, number);
}

static void nothing_landed(struct trio *p, uint64_t number)
{
	cJSON *record =
		cluster_call(&p->c, p->prefill, "{'cmd':'room.show','room':'%llu'}",
			     (unsigned long long)number);
	const cJSON *landed = cJSON_GetObjectItem(record, "landed");

	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(landed, "kv")),
			    "00");
	cJSON_Delete(record);
}

/* The lease ends while the last messages cross: all bytes were read, but are invalid. */
static void read_ended_after_lease_is_invalid(void **state)
{
	struct trio *p = *state;
	struct room *offer = begin_held_pull(p, 42);
	struct fake_profile *profile = fake_hub_profile(p->c.bytes);
	uint64_t pulls;

	profile->check = true; /* the puller reads by itself, which cannot be refused */
	pulls = counted(p, 0, METRIC_ROOM_RECEIVED_BYTES);
	memset(p->src.base, 0xff, 8);
	while (counted(p, 0, METRIC_ROOM_RECEIVED_BYTES) == pulls)
		assert_true(loop_turn(p->c.loop, LOOP_NS_PER_S));
	offer->offer.lease_epoch++;
	cluster_until_state(&p->c, p->prefill, "pull", 42, KVD_FAILED);
	said(why(p, 0, ROOM_PULL, 42), ERR_LEASE, "peer tcp://10.0.0.2:7400 instance ");
	assert_true(why(p, 0, ROOM_PULL, 42)->retryable);
	nothing_landed(p, 42);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'42'}");
	cluster_until_state(&p->c, p->decode, "offer", 42, KVD_FAILED);
}

/* Its heartbeats do not arrive: the pages are released, and the puller is notified at
 * once. */
static void lease_ended_during_pull_is_sent_to_puller(void **state)
{
	struct trio *p = *state;
	struct room *offer = begin_held_pull(p, 43);

	offer->offer.lease_end_ns = loop_now_ns(p->c.loop);
	offer->ops->on_clock(offer);
	cluster_until_state(&p->c, p->decode, "offer", 43, KVD_FAILED);
	cluster_run(&p->c, 50 * MS);
	assert_int_equal(cluster_state(&p->c, p->prefill, "pull", 43), KVD_FAILED);
	said(why(p, 1, ROOM_OFFER, 43), ERR_LEASE, "of 1 pullers 1 joined and 0");
	said(why(p, 0, ROOM_PULL, 43), ERR_LEASE, "peer tcp://10.0.0.2:7400 instance ");
	said(why(p, 0, ROOM_PULL, 43), ERR_LEASE, "ms expired");
	assert_int_equal(counted(p, 1, METRIC_LEASES_EXPIRED), 1);
	nothing_landed(p, 43);
}

static void sources_owing_nothing_are_notified_before_the_end(void **state)
{
	struct trio *p = *state;

	open_send(p, 60, "");
	open_recv(p, 60, "");
	loop_virtual_parts(p->c.loop, 1);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.bind','room':'60','views':{}}");
	cluster_until_state(&p->c, p->decode, "recv", 60, KVD_SUCCESS);
	loop_virtual_parts(p->c.loop, 0);
	cluster_until_state(&p->c, p->prefill, "send", 60, KVD_WAITING_FOR_INPUT);
	cluster_until_state(&p->c, p->other, "send", 60, KVD_WAITING_FOR_INPUT);
}

/* An offer of this lease, as if the prefill daemon had sent it. */
static void forge_offer(struct room *room, uint64_t lease_ms)
{
	struct party *party = list_first(&room->parties, struct party, link);
	const struct wire_header h = {.type = WIRE_T_OFFER};
	uint8_t views[256], body[512];
	struct cursor out;
	struct wire_offer m = {.room = room->number,
			       .pull_gen = room->gen,
			       .offer_gen = 77,
			       .src_pool = party->pool->id,
			       .lease_epoch = 1,
			       .lease_ms = lease_ms};

	cursor_write(&out, views, sizeof(views));
	room_maps_put(&out, &room->pages.maps);
	m.views = (struct wire_blob){views, out.pos};
	cursor_write(&out, body, sizeof(body));
	assert_int_equal(wire_offer_put(&out, &m), 0);
	cursor_read(&out, body, out.pos);
	assert_int_equal(rooms_on_message(party->remote, &h, &out), 0);
	assert_int_equal(party_state(party), PARTY_ANSWERED);
}

static void offer_with_an_absurd_lease_makes_no_storm_of_beats(void **state)
{
	static const uint64_t leases_ms[] = {0, UINT64_MAX, UINT64_MAX / 1000000 + 2};
	struct trio *p = *state;

	for (uint64_t i = 0; i < 3; i++) {
		const uint64_t number = 20 + i;
		struct peer *peer;
		struct room *room;
		uint64_t before;

		/* it waits for a message, and sends heartbeats meanwhile */
		cluster_ok(&p->c, p->decode,
			   "{'cmd':'room.open','room':'%llu','role':'pull','pool':%llu,"
			   "'sources':['%s'],'views':{'kv':{'pages':[7]}},"
			   "'wait':{'kind':'seq','region':%llu,'offset':0,'value':'9'}}",
			   (unsigned long long)number, (unsigned long long)p->dst.pool,
			   p->c.nodes[0].endpoint, (unsigned long long)p->dst.region);
		cluster_until_state(&p->c, p->decode, "pull", number,
				    KVD_WAITING_FOR_INPUT);
		cluster_run(&p->c, 10 * MS);
		room = rooms_find(rooms_of(&p->c.nodes[1].kvd), p->decode, ROOM_PULL,
				  number);
		peer = list_first(&room->parties, struct party, link)->remote->peer;
		forge_offer(room, leases_ms[i]);
		before = peer->messages_out;
		cluster_run(&p->c, LOOP_NS_PER_S);
		assert_in_range(peer->messages_out - before, 0, 120);
		cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'%llu'}",
			   (unsigned long long)number);
		cluster_until_state(&p->c, p->decode, "pull", number, KVD_FAILED);
	}
}

static void stuck_transfer_is_a_stall_and_a_slow_one_is_not(void **state)
{
	struct trio *p = *state;
	struct fake_rule stuck = {.fault = FAKE_STUCK, .times = 1, .at_bytes = 512};
	struct fake_profile *profile = fake_hub_profile(p->c.bytes);
	uint64_t pace_ns = profile->slice_ns, begin_ns;

	profile->slice_bytes = 256;
	profile->slice_ns = 50 * MS;
	open_send(p, 7, ",'timeouts':{'stall_ms':300}");
	open_recv(p, 7, ",'timeouts':{'stall_ms':300}");
	bind(p, 7);
	begin_ns = loop_now_ns(p->c.loop);
	send_from(p, p->prefill, 7);
	send_from(p, p->other, 7);
	cluster_until_state(&p->c, p->decode, "recv", 7, KVD_SUCCESS);
	assert_true(loop_now_ns(p->c.loop) - begin_ns > 600 * MS); /* it was slow */
	profile->slice_ns = pace_ns;
	assert_int_equal(fake_script(p->c.bytes, &stuck), 0);
	open_send(p, 8, "");
	open_recv(p, 8, ",'timeouts':{'stall_ms':300}");
	bind(p, 8);
	send_from(p, p->prefill, 8);
	until_failed(p, 8);
	said(why(p, 1, ROOM_RECV, 8), ERR_STALL,
	     "no byte moved for 300 ms: waits for bytes from peer n0");
	said(why(p, 0, ROOM_SEND, 8), ERR_STALL, "no byte moved for 300 ms");
	said(why(p, 2, ROOM_SEND, 8), ERR_STALL, "no byte moved for 300 ms");
	assert_int_equal(counted(p, 1, METRIC_STALLS), 1);
	assert_int_equal(counted(p, 1, METRIC_FENCES_WIDENED), 0);
}

/* A chunk after a pause longer than stall_ms is not late from its first slice on. */
static void chunk_after_a_pause_is_no_stall(void **state)
{
	struct trio *p = *state;
	struct session *const senders[] = {p->prefill, p->other};
	struct fake_rule late = {.fault = FAKE_LATE, .times = 2, .extra_ns = 250 * MS};

	open_send(p, 9, ",'timeouts':{'stall_ms':400}");
	open_recv(p, 9, ",'timeouts':{'stall_ms':400}");
	bind(p, 9);
	for (unsigned int chunk = 0; chunk < 2; chunk++) {
		for (unsigned int i = 0; i < 2; i++)
			cluster_ok(&p->c, senders[i],
				   "{'cmd':'room.send','room':'9','seq':%u,'last':%s,"
				   "'views':{'kv':{'pages':%s,'first_token':%u,"
				   "'tokens':[%u,%u]}}}",
				   chunk, chunk ? "true" : "false",
				   chunk ? "[9,1]" : "[3,4]", chunk * 8, chunk * 8,
				   chunk * 8 + 8);
		cluster_run(&p->c, 3 * LOOP_NS_PER_S); /* they compute */
		assert_int_equal(cluster_state(&p->c, p->decode, "recv", 9),
				 chunk ? KVD_SUCCESS : KVD_TRANSFERRING);
		if (chunk == 0)
			assert_int_equal(fake_script(p->c.bytes, &late), 0);
	}
	assert_int_equal(counted(p, 1, METRIC_STALLS), 0);
}

/* A slice is in flight for longer than the fence timeout: the peer is cut, and until
 * then no engine sees an end. */
static void fence_not_proven_in_time_cuts_the_peer(void **state)
{
	struct trio *p = *state;
	struct fake_rule late = {.fault = FAKE_LATE,
				 .times = 1,
				 .at_bytes = 512,
				 .extra_ns = 60 * LOOP_NS_PER_S};
	uint64_t begin_ns;
	uint8_t *before;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	p->c.nodes[1].config.fence_timeout_ns = 2 * LOOP_NS_PER_S;
	assert_int_equal(fake_script(p->c.bytes, &late), 0);
	open_send(p, 9, "");
	open_recv(p, 9, "");
	bind(p, 9);
	open_send(p, 10, ""); /* a neighbour on the same peers */
	open_recv(p, 10, "");
	bind(p, 10);
	cluster_until_state(&p->c, p->prefill, "send", 10, KVD_WAITING_FOR_INPUT);
	send_from(p, p->prefill, 9);
	cluster_run(&p->c, 100 * MS);
	begin_ns = loop_now_ns(p->c.loop);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.abort','room':'9','reason':'enough'}");
	cluster_run(&p->c, 1900 * MS);
	assert_int_equal(cluster_state(&p->c, p->decode, "recv", 9), KVD_TRANSFERRING);
	assert_int_equal(cluster_state(&p->c, p->decode, "recv", 10),
			 KVD_WAITING_FOR_INPUT);
	cluster_until_state(&p->c, p->decode, "recv", 9, KVD_FAILED);
	assert_true(loop_now_ns(p->c.loop) - begin_ns < 3 * LOOP_NS_PER_S);
	before = malloc(p->dst.bytes);
	memcpy(before, p->dst.base, p->dst.bytes);
	assert_int_equal(counted(p, 1, METRIC_FENCES_WIDENED), 1);
	said(why(p, 1, ROOM_RECV, 9), ERR_ABORTED, "enough"); /* the first reason stays */
	/* the neighbour fails, too, with the cause, on both sides */
	cluster_until_state(&p->c, p->decode, "recv", 10, KVD_FAILED);
	cluster_until_state(&p->c, p->prefill, "send", 10, KVD_FAILED);
	said(why(p, 1, ROOM_RECV, 10), ERR_FENCE, "room 9 not quiesced after 2000 ms");
	said(why(p, 0, ROOM_SEND, 10), ERR_FENCE, "room 9 not quiesced after 2000 ms");
	/* the late slice has arrived by now */
	cluster_run(&p->c, 70 * LOOP_NS_PER_S);
	assert_memory_equal(before, p->dst.base, p->dst.bytes);
	free(before);
	fake_script_clear(p->c.bytes);
	open_send(p, 11, "");
	open_recv(p, 11, "");
	bind(p, 11);
	send_from(p, p->prefill, 11);
	send_from(p, p->other, 11);
	cluster_until_state(&p->c, p->decode, "recv", 11, KVD_SUCCESS);
}

/* The reason is passed on: the third machine knows which peer was lost within 1 s. */
static void peer_lost_is_sent_to_other_sources(void **state)
{
	struct trio *p = *state;
	uint64_t begin_ns;

	open_send(p, 12, "");
	open_recv(p, 12, "");
	bind(p, 12);
	cluster_until_state(&p->c, p->prefill, "send", 12, KVD_WAITING_FOR_INPUT);
	cluster_until_state(&p->c, p->other, "send", 12, KVD_WAITING_FOR_INPUT);
	mem_hub_partition(p->c.links, p->c.nodes[1].endpoint, p->c.nodes[2].endpoint,
			  true);
	begin_ns = loop_now_ns(p->c.loop);
	until_failed(p, 12);
	assert_true(loop_now_ns(p->c.loop) - begin_ns <= LOOP_NS_PER_S);
	said(why(p, 1, ROOM_RECV, 12), ERR_PEER, "peer tcp://10.0.0.3:7400 instance ");
	said(why(p, 1, ROOM_RECV, 12), ERR_PEER, "missed 4 pings");
	said(why(p, 2, ROOM_SEND, 12), ERR_PEER, "peer tcp://10.0.0.2:7400 instance ");
	/* the first to report closes the data line, which the other may detect first */
	if (!strstr(why(p, 2, ROOM_SEND, 12)->text, "data connection lost"))
		said(why(p, 2, ROOM_SEND, 12), ERR_PEER, "missed 4 pings");
	said(why(p, 0, ROOM_SEND, 12), ERR_PEER, "tcp://10.0.0.3:7400 instance ");
	said(why(p, 0, ROOM_SEND, 12), ERR_PEER, "missed 4 pings");
	mem_hub_partition(p->c.links, p->c.nodes[1].endpoint, p->c.nodes[2].endpoint,
			  false);
}

static bool peer_has(struct trio *p, enum peer_state state)
{
	const struct remote *remote;

	list_foreach(remote, handshake_remotes(p->c.nodes[1].kvd.handshake), link) {
		if (strcmp(remote->peer->endpoint, p->c.nodes[0].endpoint) == 0)
			return sm_state(&remote->peer->sm) == state;
	}
	return false;
}

static bool peer_is_down(void *arg)
{
	return peer_has(arg, PEER_DOWN);
}

static bool peer_is_up(void *arg)
{
	return peer_has(arg, PEER_UP);
}

/* The peer is back before its old data line was closed: the next room waits for the
 * new line; it does not fail with the reason of the old one's end. */
static void room_between_two_data_lines_waits(void **state)
{
	struct trio *p = *state;
	struct fake_profile *profile = fake_hub_profile(p->c.bytes);
	uint64_t done_max_ns = profile->done_max_ns;

	open_send(p, 50, "");
	open_recv(p, 50, "");
	bind(p, 50);
	cluster_until_state(&p->c, p->prefill, "send", 50, KVD_WAITING_FOR_INPUT);
	profile->done_max_ns = 9 * LOOP_NS_PER_S;
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  true);
	cluster_until(&p->c, peer_is_down, p, "the peer down");
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  false);
	cluster_until(&p->c, peer_is_up, p, "the peer up");
	profile->done_max_ns = done_max_ns;
	open_send(p, 51, "");
	open_recv(p, 51, "");
	bind(p, 51);
	cluster_run(&p->c, 500 * MS);
	assert_int_equal(cluster_state(&p->c, p->decode, "recv", 51), KVD_BOOTSTRAPPING);
	cluster_until_state(&p->c, p->prefill, "send", 51, KVD_WAITING_FOR_INPUT);
	send_from(p, p->prefill, 51);
	send_from(p, p->other, 51);
	cluster_until_state(&p->c, p->decode, "recv", 51, KVD_SUCCESS);
}

static void drain_finishes_rooms_and_refuses_new_ones(void **state)
{
	struct trio *p = *state;

	open_send(p, 13, "");
	open_recv(p, 13, "");
	bind(p, 13);
	open_recv(p, 14, ""); /* waits for a sender that is not opened yet */
	bind(p, 14);
	cluster_until_state(&p->c, p->prefill, "send", 13, KVD_WAITING_FOR_INPUT);
	cluster_until_state(&p->c, p->other, "send", 13, KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, 50 * MS);
	p->c.nodes[0].kvd.draining = true;
	rooms_drain(rooms_of(&p->c.nodes[0].kvd));
	cluster_until_state(&p->c, p->decode, "recv", 14, KVD_FAILED);
	said(why(p, 1, ROOM_RECV, 14), ERR_DRAIN, "the daemon is draining");
	assert_true(why(p, 1, ROOM_RECV, 14)->retryable);
	assert_int_equal(counted(p, 0, METRIC_ORPHANS_REFUSED), 1);
	cluster_refused(&p->c, p->prefill, "EDRAIN",
			"{'cmd':'room.open','room':'15','role':'send','pool':%llu}",
			(unsigned long long)p->src.pool);
	open_recv(p, 15, "");
	bind(p, 15); /* requests at once, is answered at once */
	cluster_until_state(&p->c, p->decode, "recv", 15, KVD_FAILED);
	said(why(p, 1, ROOM_RECV, 15), ERR_DRAIN, "the daemon is draining");
	/* earlier rooms end well */
	send_from(p, p->prefill, 13);
	send_from(p, p->other, 13);
	cluster_until_state(&p->c, p->decode, "recv", 13, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", 13, KVD_SUCCESS);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(receiver_never_bound_times_out),
		CASE(ends_of_rooms_are_counted_by_phase_size_and_peer),
		CASE(sender_never_sending_times_out_on_all_sides),
		CASE(receiver_names_silent_source),
		CASE(room_without_sender_is_refused_in_time),
		CASE(source_engine_dead_before_contact_is_retryable),
		CASE(source_missing_is_named),
		CASE(source_that_cannot_be_reached_ends_its_rooms_after_connect_timeout),
		CASE(offer_not_pulled_ends_with_its_lease),
		CASE(puller_done_may_close),
		CASE(pull_acknowledged_before_it_read_fails),
		CASE(abort_with_two_silent_sources_is_sent_to_both),
		CASE(puller_giving_up_is_named),
		CASE(pull_without_offer_is_refused_in_time),
		CASE(pull_with_lost_messages_releases_the_offer),
		CASE(read_ended_after_lease_is_invalid),
		CASE(lease_ended_during_pull_is_sent_to_puller),
		CASE(sources_owing_nothing_are_notified_before_the_end),
		CASE(offer_with_an_absurd_lease_makes_no_storm_of_beats),
		CASE(stuck_transfer_is_a_stall_and_a_slow_one_is_not),
		CASE(chunk_after_a_pause_is_no_stall),
		CASE(fence_not_proven_in_time_cuts_the_peer),
		CASE(peer_lost_is_sent_to_other_sources),
		CASE(room_between_two_data_lines_waits),
		CASE(drain_finishes_rooms_and_refuses_new_ones),
	};

	int failed = cmocka_run_group_tests_name("rooms_ends", tests, NULL, NULL);

	cluster_short_parts();
	return failed +
	       cmocka_run_group_tests_name("rooms_ends, long lists", tests, NULL, NULL);
}
