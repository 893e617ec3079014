/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The transfer layer on the in-process cluster: how transfers, lists and sessions end, on
 * either side, and which regions are shared with the other daemon.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hex.h"
#include "daemon/request/commands.h"
#include "daemon/session/region.h"
#include "daemon/xfer/xfer_impl.h"
#include "proto/base64.h"
#include "proto/kvd_status.h"
#include "tests/lib/accounts.h"
#include "tests/lib/xfer_pair.h"

static void unregister_in_flight_waits_for_quiet(void **state)
{
	struct pair *p = *state;
	uint8_t *before = malloc(p->yours.bytes);
	uint64_t x;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	cluster_ok(&p->c, p->you, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)p->yours.pool);
	x = pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(pair_state(p, x), KVD_TRANSFERRING);
	cluster_ok(&p->c, p->you, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)p->yours.region);
	memcpy(before, p->yours.base, p->yours.bytes);
	pair_until(p, x, KVD_FAILED);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_memory_equal(before, p->yours.base, p->yours.bytes);
	free(before);
}

static void cancel_and_release_are_fenced(void **state)
{
	struct pair *p = *state;
	uint8_t *before = malloc(p->mine.bytes);
	uint64_t x;

	memset(p->yours.base, 0x5a, p->yours.bytes);
	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	x = pair_start(p, "read", pair_grid(p, true), pair_grid(p, false), NULL);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	pair_give(p, KVD_RING_CANCEL, x);
	assert_int_equal(pair_state(p, x), KVD_TRANSFERRING); /* not quiesced yet */
	pair_until(p, x, KVD_FAILED);
	memcpy(before, p->mine.base, p->mine.bytes);
	pair_give(p, KVD_RING_RELEASE, x);
	cluster_refused(&p->c, p->me, "ENOTFOUND", "{'cmd':'xfer.state','xfer':%llu}",
			(unsigned long long)x);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_memory_equal(before, p->mine.base, p->mine.bytes);
	free(before);
}

static void target_session_end_fails_transfers(void **state)
{
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true), remote = pair_grid(p, false), x;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	x = pair_start(p, "write", local, remote, NULL);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	cluster_engine_dies(&p->c, p->you);
	pair_until(p, x, KVD_FAILED);
	cluster_run(&p->c, LOOP_NS_PER_S);
	pair_fails(p, pair_start(p, "write", local, remote, NULL), "ESESSION", "");
}

static void next_engine(struct pair *p)
{
	cluster_engine_dies(&p->c, p->you);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cache_close(&p->yours);
	p->you = cluster_engine(&p->c, 1, "you");
	cluster_cache(&p->c, p->you, "yours", 0, &p->yours);
	p->attach = pair_attach(p, p->me, p->you, 1);
}

/* An own list is sent to a daemon once, for whichever of its engines it was. */
static void own_list_serves_the_next_engine_there(void **state)
{
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true);

	pair_until(p, pair_start(p, "write", local, pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	next_engine(p);
	pair_until(p, pair_start(p, "write", local, pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void list_lost_on_its_way_is_sent_again(void **state)
{
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true), x;

	fake_hub_profile(p->c.bytes)->delay_min_ns = 20 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	x = pair_start(p, "write", local, pair_grid(p, false), NULL);
	cluster_run(&p->c, 5 * LOOP_NS_PER_MS); /* the list has left, and is not there */
	assert_true(list_empty(&xfers_of(&p->c.nodes[1].kvd)->shadows));
	next_engine(p);
	assert_int_equal(pair_state(p, x), KVD_FAILED);
	assert_true(list_empty(&xfers_of(&p->c.nodes[1].kvd)->shadows));
	pair_until(p, pair_start(p, "write", local, pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

static void initiator_end_leaves_no_lists_there(void **state)
{
	struct pair *p = *state;
	const struct list *kept = &xfers_of(&p->c.nodes[1].kvd)->shadows;

	pair_until(p,
		   pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	assert_false(list_empty(kept));
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_true(list_empty(kept));
}

static void initiator_end_in_flight_leaks_nothing(void **state)
{
	struct pair *p = *state;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL);
	pair_start(p, "read", pair_grid(p, true), pair_grid(p, false), NULL);
	cluster_run(&p->c, 60 * LOOP_NS_PER_MS);
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, 2 * LOOP_NS_PER_S);
	assert_int_equal(p->c.nodes[0].kvd.session_count, 0);
}

/* The last note is still in transit when the session that sent it ends. */
static void end_with_notifications_in_flight_leaks_nothing(void **state)
{
	struct pair *p = *state;
	uint64_t local = pair_grid(p, true), remote = pair_grid(p, false), x;

	x = pair_start(p, "write", local, remote, NULL);
	pair_until(p, x, KVD_SUCCESS);
	fake_hub_profile(p->c.bytes)->delay_min_ns = 50 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 90 * LOOP_NS_PER_MS;
	pair_give(p, KVD_RING_RELEASE, x);
	cluster_ok(&p->c, p->me, "{'cmd':'dlist.free','dlist':%llu}",
		   (unsigned long long)local);
	cluster_ok(&p->c, p->me, "{'cmd':'dlist.free','dlist':%llu}",
		   (unsigned long long)remote);
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(p->c.nodes[0].kvd.session_count, 0);
}

/* ---- long notifications: helpers encode and decode them ---- */

#define LONG_BYTES (300u << 10)
static const size_t note_bytes[] = {4, 40000, 5, LONG_BYTES, 6};

static void notify_all(struct pair *p)
{
	uint8_t *data = malloc(LONG_BYTES);

	for (unsigned int i = 0; i < ARRAY_LEN(note_bytes); i++) {
		memset(data, (int)i + 1, note_bytes[i]);
		pair_notify(p, data, note_bytes[i]);
	}
	free(data);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
}

static void expect_note(const cJSON *note, unsigned int i)
{
	const char *text = cJSON_GetStringValue(cJSON_GetObjectItem(note, "data"));
	uint8_t *data = malloc(strlen(text));
	size_t len;

	assert_true(base64_decode(text, strlen(text), data, &len));
	assert_int_equal(len, note_bytes[i]);
	for (size_t at = 0; at < len; at++)
		assert_int_equal(data[at], i + 1);
	free(data);
}

static void notifications_short_and_long_keep_their_order(void **state)
{
	struct pair *p = *state;
	unsigned int got = 0;
	bool more = true;

	notify_all(p);
	while (more) {
		cJSON *answer = cluster_call(&p->c, p->you, "{'cmd':'notif.drain'}"),
		      *one;

		cJSON_ArrayForEach(one, cJSON_GetObjectItem(answer, "notifs"))
			expect_note(one, got++);
		more = cJSON_IsTrue(cJSON_GetObjectItem(answer, "more"));
		cJSON_Delete(answer);
	}
	assert_int_equal(got, ARRAY_LEN(note_bytes));
}

/* A line whose answer is not waited for. */
static void say(struct session *session, const char *line)
{
	struct request *req = request_new(session, strlen(line), NULL, 0);

	req->line = cJSON_Parse(line);
	assert_non_null(req->line);
	commands_dispatch(req);
}

static void end_while_a_helper_encodes_leaks_nothing(void **state)
{
	struct pair *p = *state;
	struct offload *helpers = p->c.nodes[1].kvd.offload;

	notify_all(p);
	say(p->you, "{\"cmd\":\"notif.drain\"}"); /* the short one */
	offload_hold(helpers, true);
	say(p->you, "{\"cmd\":\"notif.drain\"}");
	cluster_engine_dies(&p->c, p->you);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(p->c.nodes[1].kvd.session_count, 1); /* held */
	offload_hold(helpers, false);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(p->c.nodes[1].kvd.session_count, 0);
}

static char *long_line(const struct pair *p)
{
	const struct kvd_ring_entry e = {
		.op = KVD_RING_NOTIFY, .a = p->attach, .bytes = LONG_BYTES};
	uint8_t *data = calloc(1, LONG_BYTES);
	char *line = pair_line(&e, data, LONG_BYTES);

	free(data);
	return line;
}

static void end_while_a_helper_decodes_leaks_nothing(void **state)
{
	struct pair *p = *state;
	struct offload *helpers = p->c.nodes[0].kvd.offload;
	char *line = long_line(p);

	offload_hold(helpers, true);
	say(p->me, line);
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, LOOP_NS_PER_S);
	offload_hold(helpers, false);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(p->c.nodes[0].kvd.session_count, 0);
	free(line);
}

/* It was decoded, and is with a helper that does not end. */
static void copying_begins(struct pair *p, const char *line)
{
	say(p->me, line);
	loop_turn(p->c.loop, 0);
	offload_hold(p->c.nodes[0].kvd.offload, true);
	assert_non_null(ring_of(p->me)->work);
}

static void end_while_a_helper_copies_leaks_nothing(void **state)
{
	struct pair *p = *state;
	struct offload *helpers = p->c.nodes[0].kvd.offload;
	char *line = long_line(p);

	copying_begins(p, line);
	cluster_engine_dies(&p->c, p->me);
	cluster_run(&p->c, LOOP_NS_PER_S);
	offload_hold(helpers, false);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(p->c.nodes[0].kvd.session_count, 0);
	free(line);
}

/* Only an engine that uses ring and socket at once sends it: entries keep their order. */
static void entry_behind_one_in_work_is_refused(void **state)
{
	struct pair *p = *state;
	struct offload *helpers = p->c.nodes[0].kvd.offload;
	char *line = long_line(p);

	copying_begins(p, line);
	free(line);
	line = pair_line(&(struct kvd_ring_entry){.op = KVD_RING_NOTIFY, .a = p->attach},
			 NULL, 0);
	cluster_refused(&p->c, p->me, "EBUSY", "%s", line);
	offload_hold(helpers, false);
	cluster_run(&p->c, LOOP_NS_PER_S);
	cluster_ok(&p->c, p->me, "%s", line);
	free(line);
}

/* Blocks of memory, on both sides, of a transfer that has been taken there. */
static int64_t blocks_of(struct pair *p, uint64_t local, uint64_t remote,
			 const struct pair_args *args)
{
	struct fake_profile *profile = fake_hub_profile(p->c.bytes), was = *profile;
	int64_t blocks = mem_live();
	uint64_t x;

	profile->delay_min_ns = profile->delay_max_ns = 100 * LOOP_NS_PER_MS;
	x = pair_start(p, "write", local, remote, args);
	cluster_run(&p->c, 150 * LOOP_NS_PER_MS);
	assert_int_equal(pair_state(p, x), KVD_TRANSFERRING);
	assert_false(list_empty(&xfers_of(&p->c.nodes[1].kvd)->serving));
	blocks = mem_live() - blocks;
	*profile = was;
	pair_until(p, x, KVD_SUCCESS);
	pair_give(p, KVD_RING_RELEASE, x);
	cluster_run(&p->c, LOOP_NS_PER_S);
	return blocks;
}

/* Runs of a few bytes, spelled out, are long: the target has them while it plans. */
static void indices_are_kept_by_sender_only(void **state)
{
	static const uint32_t order[] = {0, 1, 0};
	struct pair *p = *state;
	uint64_t local = pair_rows(p, true, 2), remote = pair_rows(p, false, 2);
	struct pair_args args = {.local = order + 1, .remote = order + 1, .count = 2};
	int64_t all, some;

	/* no two alike in a row: the target keeps the last one's plan */
	blocks_of(p, local, remote, &args);
	all = blocks_of(p, local, remote, NULL);
	args.local = args.remote = order;
	some = blocks_of(p, local, remote, &args);
	assert_int_equal(some - all, 2);
}

static bool has_sent_lists(const struct pair *p)
{
	const struct xfer_session *xs = p->me->part[MODULE_XFER];
	const struct prepared *prepared;

	list_foreach(prepared, &xs->prepared, link)
		if (!list_empty(&prepared->sent))
			return true;
	return false;
}

static void lost_peer_fails_transfers(void **state)
{
	struct pair *p = *state;
	uint64_t x;

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->window = 1;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	x = pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL);
	cluster_run(&p->c, 60 * LOOP_NS_PER_MS);
	assert_true(has_sent_lists(p));
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  true);
	pair_until(p, x, KVD_FAILED);
	assert_false(has_sent_lists(p)); /* a returning one has none */
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  false);
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	p->attach = pair_attach(p, p->me, p->you, 1);
	fake_hub_profile(p->c.bytes)->window = 16;
	x = pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL);
	pair_until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
}

/* The target daemon's view of the initiator's session. */
static struct remote_pool *known_there(const struct pair *p)
{
	struct remote *remote = list_first(handshake_remotes(p->c.nodes[1].kvd.handshake),
					   struct remote, link);

	return handshake_pool_by_id(remote, p->me->epoch);
}

static void add_memory(struct pair *p, struct cache *more)
{
	*more = p->mine;
	cluster_cache(&p->c, p->me, "more", 1, more);
}

static void take_memory(struct pair *p, const struct cache *more)
{
	cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
		   (unsigned long long)more->pool);
	cluster_ok(&p->c, p->me, "{'cmd':'region.unregister','region':%llu}",
		   (unsigned long long)more->region);
}

/* So that it is mapped there by the time that a transfer needs it. */
static void region_of_attached_session_is_sent_at_once(void **state)
{
	struct pair *p = *state;
	struct cache more;

	assert_int_equal(known_there(p)->region_count, 1);
	add_memory(p, &more);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(known_there(p)->region_count, 2);
	assert_true(known_there(p)->ready);
	cache_close(&more);
}

static void regions_beyond_a_few_are_sent_when_needed(void **state)
{
	struct cache more[XFER_EAGER_REGIONS];
	struct pair *p = *state;

	for (unsigned int i = 0; i < XFER_EAGER_REGIONS; i++) {
		add_memory(p, &more[i]);
		cluster_ok(&p->c, p->me, "{'cmd':'pool.unregister','pool':%llu}",
			   (unsigned long long)more[i].pool);
		cluster_run(&p->c, 20 * LOOP_NS_PER_MS);
	}
	assert_int_equal(known_there(p)->region_count, XFER_EAGER_REGIONS);
	pair_until(p,
		   pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	assert_int_equal(known_there(p)->region_count, XFER_EAGER_REGIONS + 1);
	for (unsigned int i = 0; i < XFER_EAGER_REGIONS; i++)
		cache_close(&more[i]);
}

/* To make a key usable may mean to map gigabytes. */
static void memory_registered_again_keeps_its_key(void **state)
{
	struct pair *p = *state;
	struct cache more;
	uint64_t x;

	add_memory(p, &more);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 5 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 30 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->key_ns = 3600 * LOOP_NS_PER_S;
	fake_hub_profile(p->c.bytes)->need_keys = true;
	x = pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL);
	cluster_run(&p->c, 100 * LOOP_NS_PER_MS);
	assert_int_equal(pair_state(p, x), KVD_TRANSFERRING);
	take_memory(p, &more); /* the transfer holds the pool of before */
	cluster_run(&p->c, 200 * LOOP_NS_PER_MS);
	assert_int_equal(known_there(p)->region_count, 1);
	assert_true(known_there(p)->ready);
	pair_until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
	memset(p->yours.base, 0, p->yours.bytes);
	pair_again(p, x, NULL);
	pair_until(p, x, KVD_SUCCESS);
	assert_memory_equal(p->mine.base, p->yours.base, p->mine.bytes);
	cache_close(&more);
}

/* The answer goes to the current owner of the key. */
static void key_in_flight_is_used_by_next_list(void **state)
{
	struct pair *p = *state;
	struct cache more, most;

	fake_hub_profile(p->c.bytes)->key_ns = 10 * LOOP_NS_PER_S;
	add_memory(p, &more);
	cluster_run(&p->c, 6 * LOOP_NS_PER_S);
	assert_false(known_there(p)->ready);
	fake_hub_profile(p->c.bytes)->key_ns = LOOP_NS_PER_MS;
	add_memory(p, &most);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(known_there(p)->region_count, 3);
	assert_false(known_there(p)->ready); /* the first one's is still requested */
	cluster_run(&p->c, 4 * LOOP_NS_PER_S);
	assert_true(known_there(p)->ready);
	cache_close(&more);
	cache_close(&most);
}

/* All of the lists are held when the peer is lost. */
static void lists_sharing_keys_end_with_their_peer(void **state)
{
	struct cache more[4];
	struct pair *p = *state;
	uint64_t x[4];

	fake_hub_profile(p->c.bytes)->slice_bytes = 256;
	fake_hub_profile(p->c.bytes)->delay_min_ns = 50 * LOOP_NS_PER_MS;
	fake_hub_profile(p->c.bytes)->delay_max_ns = 90 * LOOP_NS_PER_MS;
	for (unsigned int i = 0; i < 4; i++) {
		x[i] = pair_start(p, "write", pair_grid(p, true), pair_grid(p, false),
				  NULL);
		cluster_run(&p->c, 300 * LOOP_NS_PER_MS);
		add_memory(p, &more[i]);
		cluster_run(&p->c, 300 * LOOP_NS_PER_MS);
	}
	assert_non_null(known_there(p));
	fake_link_cut(p->c.nodes[0].kvd.transports[0], p->c.nodes[1].kvd.transports[0]);
	cluster_run(&p->c, LOOP_NS_PER_S);
	for (unsigned int i = 0; i < 4; i++)
		pair_until(p, x[i], KVD_FAILED);
	for (unsigned int i = 0; i < 4; i++)
		cache_close(&more[i]);
}

/* A helper still searches an old list when all else of that peer was freed: with the
 * list its replacement is freed, and with that the peer. */
static void list_last_sharing_keys_ends_its_peer_once(void **state)
{
	struct pair *p = *state;
	struct remote_pool *list = known_there(p);
	struct remote *remote = list->remote;
	struct cache more;

	handshake_pool_use(list);
	add_memory(p, &more);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_ptr_equal(list->replacement, known_there(p));
	cluster_crash(&p->c, 0, MEM_CRASH_KILLED);
	cluster_run(&p->c, 5 * LOOP_NS_PER_S);
	assert_null(remote->xp);
	assert_int_equal(remote->reaches, 0);
	handshake_pool_unuse(list);
	cache_close(&more);
}

static bool alone(void *arg)
{
	struct pair *p = arg;

	return list_empty(handshake_remotes(p->c.nodes[0].kvd.handshake));
}

/* Its engine may still query the reason; that peer is not dialled any more, once there
 * are no lists of it. */
static void lost_attachment_holds_no_peer(void **state)
{
	struct pair *p = *state;
	uint64_t list = pair_grid(p, false);

	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  true);
	cluster_run(&p->c, 60 * LOOP_NS_PER_S);
	assert_false(alone(p));
	cluster_refused(&p->c, p->me, "EPEER", "{'cmd':'peer.attached','attach':%llu}",
			(unsigned long long)p->attach);
	cluster_ok(&p->c, p->me, "{'cmd':'dlist.free','dlist':%llu}",
		   (unsigned long long)list);
	cluster_until(&p->c, alone, p, "no remote");
	cluster_refused(&p->c, p->me, "EPEER", "{'cmd':'peer.attached','attach':%llu}",
			(unsigned long long)p->attach);
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, p->c.nodes[1].endpoint,
			  false);
	p->attach = pair_attach(p, p->me, p->you, 1);
	pair_until(p,
		   pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL),
		   KVD_SUCCESS);
}

static void attach_without_daemon_ends_after_connect_timeout(void **state)
{
	struct pair *p = *state;
	uint64_t begin_ns = loop_now_ns(p->c.loop);

	p->c.nodes[0].config.connect_timeout_ns = 700 * LOOP_NS_PER_MS;
	mem_hub_partition(p->c.links, p->c.nodes[0].endpoint, "tcp://10.0.0.9:7400",
			  true); /* a listener that sends nothing */
	cluster_refused(&p->c, p->me, "EPEER",
			"{'cmd':'peer.attach','endpoint':'tcp://10.0.0.9:7400',"
			"'session':'1','secret':'%032d','timeout_ms':9000}",
			0);
	assert_in_range(loop_now_ns(p->c.loop) - begin_ns, 700 * LOOP_NS_PER_MS,
			900 * LOOP_NS_PER_MS);
	begin_ns = loop_now_ns(p->c.loop);
	/* sooner, if the command sets it */
	cluster_refused(&p->c, p->me, "ETIMEOUT",
			"{'cmd':'peer.attach','endpoint':'tcp://10.0.0.9:7400',"
			"'session':'1','secret':'%032d','timeout_ms':300}",
			0);
	assert_in_range(loop_now_ns(p->c.loop) - begin_ns, 300 * LOOP_NS_PER_MS,
			500 * LOOP_NS_PER_MS);
}

static void attach_refused(struct pair *p)
{
	char secret[33];

	hex_write(p->you->secret, 16, secret);
	cluster_refused(&p->c, p->me, "ELIMIT",
			"{'cmd':'peer.attach','endpoint':'%s','session':'%llu',"
			"'secret':'%s'}",
			p->c.nodes[1].endpoint, (unsigned long long)p->you->epoch,
			secret);
}

/* Also beyond the number of attachments that a session may have. */
static void session_attached_again_has_one_number(void **state)
{
	struct pair *p = *state;

	for (unsigned int i = 0; i < 2 * XFER_ATTACHES_MAX; i++)
		assert_int_equal(pair_attach(p, p->me, p->you, 1), p->attach);
	pair_until(p,
		   pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL),
		   KVD_SUCCESS);
	next_engine(p);
	assert_int_equal(pair_attach(p, p->me, p->you, 1), p->attach);
	pair_until(p,
		   pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL),
		   KVD_SUCCESS);
}

/* An engine outlives any number of peers. */
static void lost_attachments_make_room_for_others(void **state)
{
	struct session *others[XFER_ATTACHES_MAX];
	struct pair *p = *state;
	uint64_t list = pair_grid(p, false);

	for (unsigned int i = 1; i < XFER_ATTACHES_MAX; i++) {
		others[i] = cluster_engine(&p->c, 1, "other");
		(void)pair_attach(p, p->me, others[i], 1);
	}
	attach_refused(p);
	fake_link_cut(fake_hub_node(p->c.bytes, 0), fake_hub_node(p->c.bytes, 1));
	cluster_run(&p->c, LOOP_NS_PER_S);
	for (unsigned int i = 1; i < XFER_ATTACHES_MAX; i++)
		(void)pair_attach(p, p->me, others[i], 1);
	attach_refused(p);
	/* that of the list stayed, and reports why it is lost */
	cluster_refused(&p->c, p->me, "EPEER", "{'cmd':'peer.attached','attach':%llu}",
			(unsigned long long)p->attach);
	cluster_ok(&p->c, p->me, "{'cmd':'dlist.free','dlist':%llu}",
		   (unsigned long long)list);
	(void)pair_attach(p, p->me, p->you, 1);
}

/* The other side need never take its bytes, and the plan stays until then: the peer that
 * asked is charged, and one that has its share is refused. */
static void plan_is_charged_to_requesting_peer(void **state)
{
	struct pair *p = *state;
	uint64_t x =
		pair_start(p, "write", pair_grid(p, true), pair_grid(p, false), NULL);
	struct charge filler = {0};
	struct remote *remote;

	pair_until(p, x, KVD_SUCCESS);
	remote = list_first(handshake_remotes(p->c.nodes[1].kvd.handshake), struct remote,
			    link);
	assert_true(remote->account->bytes[ACCOUNT_PLANS] > 0); /* kept for a next time */
	account_leave(remote->account, 0, &filler);
	x = pair_start(p, "read", pair_grid(p, true), pair_grid(p, false), NULL);
	pair_until(p, x, KVD_FAILED);
	charge_drop(&filler);
	x = pair_start(p, "read", pair_grid(p, true), pair_grid(p, false), NULL);
	pair_until(p, x, KVD_SUCCESS);
	assert_true(p->me->account->bytes[ACCOUNT_PLANS] > 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(plan_is_charged_to_requesting_peer),
		CASE(unregister_in_flight_waits_for_quiet),
		CASE(cancel_and_release_are_fenced),
		CASE(target_session_end_fails_transfers),
		CASE(own_list_serves_the_next_engine_there),
		CASE(list_lost_on_its_way_is_sent_again),
		CASE(initiator_end_leaves_no_lists_there),
		CASE(initiator_end_in_flight_leaks_nothing),
		CASE(end_with_notifications_in_flight_leaks_nothing),
		CASE(notifications_short_and_long_keep_their_order),
		CASE(end_while_a_helper_encodes_leaks_nothing),
		CASE(end_while_a_helper_decodes_leaks_nothing),
		CASE(end_while_a_helper_copies_leaks_nothing),
		CASE(entry_behind_one_in_work_is_refused),
		CASE(indices_are_kept_by_sender_only),
		CASE(lost_peer_fails_transfers),
		CASE(region_of_attached_session_is_sent_at_once),
		CASE(regions_beyond_a_few_are_sent_when_needed),
		CASE(memory_registered_again_keeps_its_key),
		CASE(key_in_flight_is_used_by_next_list),
		CASE(lists_sharing_keys_end_with_their_peer),
		CASE(list_last_sharing_keys_ends_its_peer_once),
		CASE(lost_attachment_holds_no_peer),
		CASE(attach_without_daemon_ends_after_connect_timeout),
		CASE(session_attached_again_has_one_number),
		CASE(lost_attachments_make_room_for_others),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
