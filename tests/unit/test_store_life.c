/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store's beginning and end.
 *
 * Its memory is there before its files are known: what is to last waits for them.
 *
 * A fetch that its engine ends says nothing of who held the chunks. A put of an id that
 * stands elsewhere leaves it out.
 *
 * The store's session ends while threads are at its memory: the disk's read and write it
 * and make its sums, a kernel reads it. It stays mapped until the last of them is done,
 * and is unmapped then.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/attend/attend.h"
#include "daemon/base/log.h"
#include "daemon/loop/offload.h"
#include "daemon/session/region.h"
#include "daemon/store/files_impl.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/attend_world.h"
#include "tests/lib/disk_sim.h"
#include "tests/lib/log_lines.h"

#define DISK_BYTES (UINT64_C(64) << 20)
#define SLOW (5 * LOOP_NS_PER_S) /* what the device takes for a piece */
#define SOON (10 * LOOP_NS_PER_MS)
#define ZEROS "00000000000000000000000000000000000000000000000000000000000000"

struct world {
	struct cluster c;
	struct disk_sim *disk;
	struct session *engine;
	struct cache cache;
	uint64_t space;
};

static struct store *node_store(struct cluster *c)
{
	return store_of(&c->nodes[0].kvd);
}

static bool has_memory(void *arg)
{
	const struct world *w = arg;

	return store_of(&w->c.nodes[0].kvd)->region != NULL;
}

/* What files there are is not known yet, if the disk is slow. */
static void world_new(struct world *w, uint64_t delay_ns, enum disk_what fault)
{
	const struct disk_sim_fault eio = {.trouble = DISK_SIM_EIO, .what = fault};
	struct cluster_store_args args = {.memory_bytes = 4 << 20,
					  .file_bytes = DISK_BYTES / 2};

	memset(w, 0, sizeof(*w));
	assert_int_equal(disk_sim_new(1, DISK_BYTES, &w->disk), 0);
	disk_sim_delays(w->disk, delay_ns, delay_ns);
	if (fault != DISK_WHATS)
		disk_sim_fault(w->disk, &eio);
	args.disk = w->disk;
	cluster_new(&w->c, 1, 1);
	cluster_store_begin(&w->c, 0, &args);
	cluster_until(&w->c, has_memory, w, "the store's memory");
	w->engine = cluster_engine(&w->c, 0, "engine");
	w->cache = cluster_geometry;
	cluster_cache(&w->c, w->engine, "kv", 0, &w->cache);
	w->space = cluster_space(&w->c, w->engine, w->cache.pool, 16);
}

static void world_free(struct world *w)
{
	cluster_free(&w->c);
	cache_close(&w->cache);
	disk_sim_free(w->disk);
}

/* To last: it is in memory, and then begins to be written. */
static uint64_t put(struct world *w, unsigned int chunk)
{
	return cluster_number(
		cluster_call(&w->c, w->engine,
			     "{'cmd':'chunk.put','space':%llu,'ids':['" ZEROS "%02u'],"
			     "'pool':%llu,'durable':true,"
			     "'views':{'kv':{'pages':[0,1,2,3],'tokens':[0,16]}}}",
			     (unsigned long long)w->space, chunk,
			     (unsigned long long)w->cache.pool),
		"move");
}

static unsigned int state_of(struct world *w, uint64_t move)
{
	return (unsigned int)cluster_number(
		cluster_call(&w->c, w->engine, "{'cmd':'chunk.move','move':%llu}",
			     (unsigned long long)move),
		"state");
}

static bool files_scanned(void *arg)
{
	return node_store(arg)->files->scanned;
}

/* It has moved all of its bytes before anybody knows what the files are. */
static void durable_put_during_the_scan_waits_for_it(void **state)
{
	struct world w;
	uint64_t move;

	(void)state;
	world_new(&w, SLOW, DISK_WHATS);
	move = put(&w, 1);
	cluster_run(&w.c, LOOP_NS_PER_S);
	assert_false(node_store(&w.c)->files->open);
	assert_int_equal(state_of(&w, move), KVD_TRANSFERRING);
	cluster_run(&w.c, SLOW);
	assert_true(node_store(&w.c)->files->open && !node_store(&w.c)->files->scanned);
	assert_int_equal(state_of(&w, move), KVD_TRANSFERRING);
	cluster_until(&w.c, files_scanned, &w.c, "the scan");
	disk_sim_delays(w.disk, LOOP_NS_PER_MS, LOOP_NS_PER_MS);
	cluster_run(&w.c, 10 * SLOW);
	assert_int_equal(state_of(&w, move), KVD_SUCCESS);
	world_free(&w);
}

static void durable_put_fails_with_the_scan_and_is_refused_after_it(void **state)
{
	struct world w;
	uint64_t move;

	(void)state;
	world_new(&w, SLOW, DISK_LIST);
	move = put(&w, 1);
	cluster_run(&w.c, LOOP_NS_PER_S);
	assert_int_equal(state_of(&w, move), KVD_TRANSFERRING);
	cluster_run(&w.c, 3 * SLOW);
	assert_true(node_store(&w.c)->files->readonly);
	assert_int_equal(state_of(&w, move), KVD_FAILED);
	cluster_refused(&w.c, w.engine, "ELIMIT",
			"{'cmd':'chunk.put','space':%llu,'ids':['" ZEROS "02'],"
			"'pool':%llu,'durable':true,"
			"'views':{'kv':{'pages':[0,1,2,3],'tokens':[0,16]}}}",
			(unsigned long long)w.space, (unsigned long long)w.cache.pool);
	world_free(&w);
}

static bool has_ended(void *arg)
{
	const struct node *node = arg;

	return node->kvd.session_count == 0;
}

/* The store's session ends as all do at a stop, the engine's with it. */
static void stops_behind(struct cluster *c, unsigned int node)
{
	struct kvd *kvd = &c->nodes[node].kvd;
	struct region *region = store_of(kvd)->region;
	struct session *session;

	assert_true(region->pins > 0);
	list_foreach_safe(session, &kvd->sessions, link)
		session_end(session, "the daemon is stopping");
	cluster_run(c, SOON);
	assert_false(store_drained(store_of(kvd)) && attends_drained(attends_of(kvd)));
	assert_int_equal(sm_state(&region->sm), REGION_CLOSING);
	assert_true(region->pins > 0);
	assert_non_null(region->memory);
	assert_true(kvd->session_count > 0);
}

static void memory_stays_until_a_load_is_done(void **state)
{
	struct world w;

	(void)state;
	world_new(&w, LOOP_NS_PER_MS, DISK_WHATS);
	put(&w, 1);
	cluster_run(&w.c, LOOP_NS_PER_S);
	for (uint64_t i = 0; i <= node_store(&w.c)->bucket_mask; i++) {
		struct store_chunk *chunk = node_store(&w.c)->buckets[i];

		if (chunk) {
			assert_true(chunk->filed && !chunk->item.pins);
			store_on_evict(node_store(&w.c), &chunk->item);
		}
	}
	disk_sim_delays(w.disk, SLOW, SLOW);
	cluster_ok(&w.c, w.engine,
		   "{'cmd':'chunk.hold','space':%llu,'ids':['" ZEROS "01']}",
		   (unsigned long long)w.space);
	cluster_run(&w.c, SOON);
	assert_int_equal(node_store(&w.c)->files->jobs, 1);
	stops_behind(&w.c, 0);
	cluster_until(&w.c, has_ended, &w.c.nodes[0], "the stop");
	world_free(&w);
}

static void memory_stays_until_a_write_is_done(void **state)
{
	struct world w;

	(void)state;
	world_new(&w, LOOP_NS_PER_MS, DISK_WHATS);
	put(&w, 1); /* makes the file */
	cluster_run(&w.c, LOOP_NS_PER_S);
	put(&w, 2);
	disk_sim_delays(w.disk, SLOW, SLOW);
	cluster_run(&w.c, LOOP_NS_PER_S);
	assert_true(node_store(&w.c)->files->flying_bytes > 0);
	stops_behind(&w.c, 0);
	cluster_until(&w.c, has_ended, &w.c.nodes[0], "the stop");
	world_free(&w);
}

static void memory_stays_until_a_kernel_is_done(void **state)
{
	struct attend_world w;
	struct kvd_ring_part part;

	(void)state;
	attend_world_new(&w, 1);
	part = attend_world_part(w.hold);
	offload_hold(w.c.nodes[AW_HOLDER].kvd.offload, true);
	attend_world_rows(&w, 0, 1);
	attend_world_post(&w, 0, 0, &part, 1, NULL, 0);
	cluster_run(&w.c, SOON);
	attends_close(attends_of(&w.c.nodes[AW_HOLDER].kvd));
	stops_behind(&w.c, AW_HOLDER);
	offload_hold(w.c.nodes[AW_HOLDER].kvd.offload, false);
	cluster_until(&w.c, has_ended, &w.c.nodes[AW_HOLDER], "the stop");
	attend_world_free(&w);
}

/* A stop between the two is not a fault that an operator could mend. */
static void pool_that_a_stop_ends_is_no_warning(void **state)
{
	const char *lines;
	struct world w;
	struct session *session;

	(void)state;
	world_new(&w, LOOP_NS_PER_MS, DISK_WHATS);
	cluster_run(&w.c, LOOP_NS_PER_S);
	log_set_level(LOG_LEVEL_WARN);
	log_lines_begin();
	offload_hold(w.c.nodes[0].kvd.offload, true);
	put(&w, 1);
	cluster_run(&w.c, SOON);
	list_foreach_safe(session, &w.c.nodes[0].kvd.sessions, link)
		session_end(session, "the daemon is stopping");
	offload_hold(w.c.nodes[0].kvd.offload, false);
	cluster_until(&w.c, has_ended, &w.c.nodes[0], "the stop");
	lines = log_lines_end();
	assert_int_equal(log_lines_with(lines, "could not be registered"), 0);
	world_free(&w);
}

/* ---- moves ---- */

static uint64_t fetch_far(struct attend_world *w)
{
	return cluster_number(
		cluster_call(&w->c, w->engine[AW_REQUESTER],
			     "{'cmd':'chunk.fetch','hold':%llu,'pool':%llu,"
			     "'views':{'kv':{'pages':[0,1,2,3],'tokens':[0,16]}}}",
			     (unsigned long long)w->hold,
			     (unsigned long long)w->cache[AW_REQUESTER].pool),
		"move");
}

static unsigned int far_state(struct attend_world *w, uint64_t move)
{
	return (unsigned int)cluster_number(
		cluster_call(&w->c, w->engine[AW_REQUESTER],
			     "{'cmd':'chunk.move','move':%llu}",
			     (unsigned long long)move),
		"state");
}

static void holder_serves_on_after_an_abort(void **state)
{
	struct attend_world w;
	uint64_t move;

	(void)state;
	attend_world_new(&w, 1);
	mem_hub_partition(w.c.links, w.c.nodes[0].endpoint, w.c.nodes[1].endpoint, true);
	move = fetch_far(&w);
	cluster_run(&w.c, LOOP_NS_PER_MS);
	assert_int_equal(far_state(&w, move), KVD_TRANSFERRING);
	cJSON_Delete(cluster_call(&w.c, w.engine[AW_REQUESTER],
				  "{'cmd':'chunk.abort','move':%llu}",
				  (unsigned long long)move));
	cluster_run(&w.c, LOOP_NS_PER_MS);
	mem_hub_partition(w.c.links, w.c.nodes[0].endpoint, w.c.nodes[1].endpoint, false);
	cluster_run(&w.c, LOOP_NS_PER_S);
	assert_int_equal(far_state(&w, move), KVD_FAILED);
	move = fetch_far(&w);
	cluster_run(&w.c, LOOP_NS_PER_S);
	assert_int_equal(far_state(&w, move), KVD_SUCCESS);
	attend_world_free(&w);
}

/* Two chunks from chunk `first` of a prompt on. */
static uint64_t put_two(struct world *w, unsigned int a, unsigned int b,
			unsigned int first)
{
	return cluster_number(
		cluster_call(&w->c, w->engine,
			     "{'cmd':'chunk.put','space':%llu,'ids':['" ZEROS
			     "%02u','" ZEROS
			     "%02u'],'first':%u,'pool':%llu,'views':{'kv':{'pages':"
			     "[0,1,2,3,4,5,6,7],'first_token':%u,'tokens':[%u,%u]}}}",
			     (unsigned long long)w->space, a, b, first,
			     (unsigned long long)w->cache.pool, 16 * first, 16 * first,
			     16 * first + 32),
		"move");
}

static uint64_t fact(struct world *w, uint64_t move, const char *name)
{
	return cluster_number(cluster_call(&w->c, w->engine,
					   "{'cmd':'chunk.move','move':%llu}",
					   (unsigned long long)move),
			      name);
}

static void id_of_another_place_is_left_out(void **state)
{
	struct world w;
	uint64_t move;

	(void)state;
	world_new(&w, LOOP_NS_PER_MS, DISK_WHATS);
	put_two(&w, 1, 2, 0);
	move = put_two(&w, 3, 1, 4); /* 1 stands at 0, and here it is chunk 5 */
	cluster_run(&w.c, LOOP_NS_PER_S);
	assert_int_equal(state_of(&w, move), KVD_SUCCESS);
	assert_int_equal(fact(&w, move, "chunks"), 1);
	assert_int_equal(fact(&w, move, "left_out"), 1);
	move = put_two(&w, 4, 4, 8); /* not what an engine means */
	cluster_run(&w.c, LOOP_NS_PER_S);
	assert_int_equal(state_of(&w, move), KVD_FAILED);
	world_free(&w);
}

/* What is written is let go of from the last chunk to the first, and queued so. */
static void last_chunk_of_a_hold_leaves_first(void **state)
{
	struct store_chunk *chunks[2] = {NULL};
	struct world w;
	uint64_t hold;

	(void)state;
	world_new(&w, LOOP_NS_PER_MS, DISK_WHATS);
	put_two(&w, 1, 2, 0);
	cluster_run(&w.c, LOOP_NS_PER_S);
	hold = cluster_number(
		cluster_call(&w.c, w.engine,
			     "{'cmd':'chunk.hold','space':%llu,'ids':['" ZEROS
			     "01','" ZEROS "02']}",
			     (unsigned long long)w.space),
		"hold");
	cluster_ok(&w.c, w.engine, "{'cmd':'chunk.release','hold':%llu}",
		   (unsigned long long)hold);
	cluster_run(&w.c, LOOP_NS_PER_S);
	for (uint64_t i = 0; i <= node_store(&w.c)->bucket_mask; i++) {
		struct store_chunk *chunk = node_store(&w.c)->buckets[i];

		for (; chunk; chunk = chunk->next)
			chunks[chunk->first] = chunk;
	}
	assert_true(chunks[0]->filed && chunks[1]->filed);
	assert_true(chunks[0]->item.tick > chunks[1]->item.tick);
	assert_true(chunks[0]->file_item.tick > chunks[1]->file_item.tick);
	world_free(&w);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(durable_put_during_the_scan_waits_for_it),
		cmocka_unit_test(durable_put_fails_with_the_scan_and_is_refused_after_it),
		cmocka_unit_test(holder_serves_on_after_an_abort),
		cmocka_unit_test(id_of_another_place_is_left_out),
		cmocka_unit_test(last_chunk_of_a_hold_leaves_first),
		cmocka_unit_test(memory_stays_until_a_load_is_done),
		cmocka_unit_test(memory_stays_until_a_write_is_done),
		cmocka_unit_test(memory_stays_until_a_kernel_is_done),
		cmocka_unit_test(pool_that_a_stop_ends_is_no_warning),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("store_life", tests, NULL, NULL);
}
