/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What engines can make the store do at once: ask for covers of as many sets of classes
 * as there are chunks, end with holds of millions of chunks, be one user more than it has
 * shares for. And daemons of chunk_peers that cannot be reached at the start.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/store/dial.h"
#include "daemon/store/far.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/disk_sim.h"

#define TOKENS 16u
#define MEMORY_BYTES (UINT64_C(16) << 20)
#define FILE_BYTES (UINT64_C(32) << 20)
#define PIECES 9u    /* kinds of parts, of some of the heads each */
#define WITHOUT_3 6u /* of them, the first: these do not have the last head */

struct world {
	struct cluster c;
	struct session *engine;
	struct cache cache, pieces[PIECES];
	struct disk_sim *disk; /* or NULL */
	struct store_handle *handle, *piece[PIECES];
	unsigned int piece_count;
};

static struct store *node_store(struct world *w)
{
	return store_of(&w->c.nodes[0].kvd);
}

static struct store_handle *handle_open(struct world *w, uint64_t pool)
{
	return store_handle_find(w->engine,
				 cluster_space(&w->c, w->engine, pool, TOKENS));
}

static int setup_with(void **state, bool files)
{
	struct world *w = calloc(1, sizeof(*w));
	struct cluster_store_args args = {.memory_bytes = MEMORY_BYTES,
					  .file_bytes = FILE_BYTES};

	assert_non_null(w);
	if (files)
		assert_int_equal(disk_sim_new(1, 2 * FILE_BYTES, &w->disk), 0);
	args.disk = w->disk;
	cluster_new(&w->c, 5, 2);
	assert_true(cluster_store(&w->c, 0, &args));
	w->engine = cluster_engine(&w->c, 0, "e");
	w->cache = cluster_geometry;
	cluster_cache(&w->c, w->engine, "kv", 0, &w->cache);
	w->handle = handle_open(w, w->cache.pool);
	*state = w;
	return 0;
}

static int setup(void **state)
{
	return setup_with(state, false);
}

static int setup_files(void **state)
{
	return setup_with(state, true);
}

static int teardown(void **state)
{
	struct world *w = *state;

	cache_close(&w->cache);
	for (unsigned int i = 0; i < w->piece_count; i++)
		cache_close(&w->pieces[i]);
	cluster_free(&w->c);
	disk_sim_free(w->disk);
	free(w);
	return 0;
}

/* ---- covers ---- */

static void pieces_open(struct world *w)
{
	static const struct {
		unsigned int first, count;
	} heads[PIECES] = {{0, 2}, {0, 3}, {0, 1}, {1, 1}, {2, 1},
			   {1, 2}, {2, 2}, {1, 3}, {3, 1}};

	for (unsigned int i = 0; i < PIECES; i++) {
		char name[16];

		snprintf(name, sizeof(name), "p%u", i);
		w->pieces[i] = cluster_geometry;
		w->pieces[i].units = heads[i].count;
		w->pieces[i].first_unit = heads[i].first;
		cluster_cache(&w->c, w->engine, name, i, &w->pieces[i]);
		w->piece_count++;
		w->piece[i] = handle_open(w, w->pieces[i].pool);
	}
}

static void id_of(uint32_t n, uint8_t id[STORE_ID_BYTES])
{
	memset(id, 0, STORE_ID_BYTES);
	memcpy(id, &n, sizeof(n));
}

static struct store_chunk *chunk_get(struct world *w, uint32_t n)
{
	struct store_chunk *chunk;
	uint8_t id[STORE_ID_BYTES];

	id_of(n, id);
	assert_int_equal(store_chunk_get(w->handle->space, id, n, TOKENS, &chunk), 0);
	return chunk;
}

static struct store_class *class_of(struct store_handle *handle)
{
	struct store_class *class;

	assert_true(store_class_of(handle, &class) >= 0);
	return class;
}

static void part_put(struct store_chunk *chunk, struct store_class *class)
{
	struct store_part *part;

	if (store_part_find(chunk, class))
		return;
	assert_int_equal(store_part_new(chunk, class, PART_FILLING, &part), 0);
	store_part_ready(part);
}

static struct store_found found(struct world *w, uint32_t count)
{
	uint8_t *ids = calloc(count, STORE_ID_BYTES);
	const struct store_ids asked = {.bytes = ids, .count = count, .first = 0};
	struct store_found f;

	for (uint32_t n = 0; n < count; n++)
		id_of(n, ids + (size_t)n * STORE_ID_BYTES);
	store_find(w->handle, &asked, &f);
	free(ids);
	return f;
}

static void find_checks_few_sets_of_classes(void **state)
{
	struct world *w = *state;
	struct store *store = node_store(w);
	const uint32_t chunks = 32;
	uint64_t before;

	pieces_open(w);
	for (uint32_t n = 0; n < chunks; n++) { /* each of another set of classes */
		struct store_chunk *chunk = chunk_get(w, n);

		part_put(chunk, class_of(w->piece[0]));
		part_put(chunk, class_of(w->piece[6])); /* the two halves */
		for (unsigned int bit = 0; bit < 5; bit++) {
			if (n >> bit & 1)
				part_put(chunk, class_of(w->piece[1 + bit]));
		}
		store_chunk_unpin(chunk);
	}
	cluster_run(&w->c, LOOP_NS_PER_S);
	before = store->covers;
	assert_int_equal(found(w, chunks).chunks, chunks); /* two halves serve in each */
	assert_in_range(store->covers - before, 1, PIECES + 1);
	before = store->covers;
	assert_int_equal(found(w, chunks).chunks, chunks);
	assert_int_equal(store->covers, before);
}

/* What a call may ask about is bounded, and what it learned stays. */
static void cover_of_many_sets_is_learned_call_by_call(void **state)
{
	struct world *w = *state;
	struct store *store = node_store(w);
	uint64_t bits[WITHOUT_3], made = 0, before;

	pieces_open(w);
	for (unsigned int i = 0; i < WITHOUT_3; i++)
		bits[i] = UINT64_C(1) << class_of(w->piece[i])->index;
	for (unsigned int call = 0; call < 6; call++) {
		unsigned int left = STORE_COVERS_NEW;

		before = store->covers;
		for (unsigned int n = 1; n < 1u << WITHOUT_3; n++) {
			uint64_t mask = 0;

			for (unsigned int i = 0; i < WITHOUT_3; i++)
				mask |= n >> i & 1 ? bits[i] : 0;
			assert_int_equal(store_cover_some(w->handle, mask, &left), 0);
		}
		made = store->covers - before;
		assert_in_range(made, 0, STORE_COVERS_NEW + (call ? 0 : WITHOUT_3));
	}
	assert_int_equal(made, 0);
}

/* ---- durable puts ---- */

#define MANY ((1u << WITHOUT_3) - 1) /* chunks, each with another set of classes */

/* Of chunk n those of the first kinds that are bits of n + 1. */
static uint64_t mask_of(const uint64_t bits[WITHOUT_3], uint32_t n)
{
	uint64_t mask = 0;

	for (unsigned int i = 0; i < WITHOUT_3; i++)
		mask |= (n + 1) >> i & 1 ? bits[i] : 0;
	return mask;
}

static uint64_t put_durable(struct world *w, uint32_t count)
{
	char *ids = malloc((size_t)count * 70), *pages = malloc((size_t)count * 32);
	char *at = ids;
	uint64_t move;

	for (uint32_t n = 0; n < count; n++) {
		uint8_t id[STORE_ID_BYTES];

		id_of(n, id);
		at += sprintf(at, "%s\"", n ? "," : "");
		for (unsigned int i = 0; i < STORE_ID_BYTES; i++)
			at += sprintf(at, "%02x", id[i]);
		at += sprintf(at, "\"");
	}
	at = pages;
	for (uint32_t n = 0; n < count * TOKENS / w->cache.page_tokens; n++)
		at += sprintf(at, "%s%u", n ? "," : "", n % w->cache.pages);
	move = cluster_number(
		cluster_call(&w->c, w->engine,
			     "{\"cmd\":\"chunk.put\",\"space\":%llu,\"pool\":%llu,"
			     "\"durable\":true,\"ids\":[%s],\"views\":{\"kv\":{"
			     "\"pages\":[%s]}}}",
			     (unsigned long long)w->handle->id,
			     (unsigned long long)w->cache.pool, ids, pages),
		"move");
	free(ids);
	free(pages);
	return move;
}

/* One more chunk: two halves, which last. */
static struct store_chunk *halves_last(struct world *w)
{
	const struct store_handle *halves[] = {w->piece[0], w->piece[6]};
	struct store_chunk *chunk = chunk_get(w, MANY);
	struct store_part *part;

	for (unsigned int i = 0; i < 2; i++) {
		struct store_class *class = class_of((struct store_handle *)halves[i]);

		part_put(chunk, class);
		part = store_part_find(chunk, class);
		part->file = PART_LASTS;
		chunk->lasts |= UINT64_C(1) << class->index;
	}
	store_chunk_unpin(chunk);
	return chunk;
}

/* While its own parts are being written, what others' files have of its chunks is asked
 * about: a few sets of classes a turn, and no write need tell it to go on. */
static void put_durable_checks_few_sets_of_classes_a_turn(void **state)
{
	struct world *w = *state;
	struct store *store = node_store(w);
	struct store_move *move;
	uint64_t bits[WITHOUT_3], before;

	pieces_open(w);
	for (unsigned int i = 0; i < WITHOUT_3; i++)
		bits[i] = UINT64_C(1) << class_of(w->piece[i])->index;
	for (uint32_t n = 0; n < MANY; n++) {
		struct store_chunk *chunk = chunk_get(w, n);

		part_put(chunk, class_of(w->handle));
		for (unsigned int i = 0; i < WITHOUT_3; i++) {
			if ((n + 1) >> i & 1)
				part_put(chunk, class_of(w->piece[i]));
		}
		chunk->lasts = mask_of(bits, n);
		store_chunk_unpin(chunk);
	}
	halves_last(w);
	cluster_run(&w->c, LOOP_NS_PER_S);
	disk_sim_delays(w->disk, LOOP_NS_PER_S, LOOP_NS_PER_S);
	move = store_move_find(w->engine, put_durable(w, MANY + 1));
	assert_non_null(move);
	assert_int_equal(move->there, MANY + 1);
	w->handle->covers = (struct store_covers){.changes = 0}; /* all anew */
	for (uint32_t n = 0; n <= MANY; n++)
		move->entries[n].lasts = false;
	move->asked = 0;
	before = store->covers;
	move->step.run(&move->step);
	assert_in_range(store->covers - before, STORE_COVERS_NEW,
			STORE_COVERS_NEW + PIECES);
	assert_false(move->entries[MANY].lasts);
	cluster_run(&w->c, LOOP_NS_PER_MS); /* no write ends */
	assert_true(move->entries[MANY].lasts);
	assert_int_equal(store_move_state(move), STORE_MOVE_RUNNING);
	before = store->covers;
	move->step.run(&move->step);
	assert_int_equal(store->covers, before); /* each was asked about */
	for (uint32_t n = 0; n < MANY; n++)
		move->entries[n].chunk->lasts = 0;
	cluster_run(&w->c, 99 * LOOP_NS_PER_S);
	assert_int_equal(store_move_state(move), STORE_MOVE_SUCCESS);
}

static void class_removed_drops_its_statistics(void **state)
{
	struct world *w = *state;
	struct store_handle *handle = w->handle;
	struct store *store = node_store(w);
	struct store_class *class;
	uint64_t bit;

	/* its pool cannot be made: the class goes, while the handle is open */
	assert_int_equal(store_class_get(handle->space, handle->canon, STORE_NOW, &class),
			 0);
	bit = UINT64_C(1) << class->index;
	assert_int_equal(store_cover(handle, bit), bit);
	err_set(&store->failed, ERR_NOMEM, "of the test");
	assert_true(store_class_of(handle, &class) < 0);
	err_clear();
	store->failed.code = ERR_OK;
	assert_int_equal(handle->space->class_count, 0);
	pieces_open(w); /* the number is another's now, which does not serve */
	assert_int_equal(UINT64_C(1) << class_of(w->piece[0])->index, bit);
	assert_int_equal(store_cover(handle, bit), 0);
}

/* ---- pins ---- */

static void holds_ending_together_are_freed_in_slices(void **state)
{
	struct world *w = *state;
	struct store *store = node_store(w);
	struct store_chunk *chunk = chunk_get(w, 1);
	struct store_chunk **holds[3];
	uint32_t left, turns = 0;

	for (unsigned int i = 0; i < 3; i++) {
		holds[i] = store_pins_new(STORE_IDS_MAX);
		for (uint32_t n = 0; n < STORE_IDS_MAX; n++) {
			store_chunk_pin(chunk);
			holds[i][n] = chunk;
		}
	}
	loop_virtual_parts(w->c.loop, 1);
	for (unsigned int i = 0; i < 3; i++)
		store_pins_end(store, holds[i], STORE_IDS_MAX);
	for (left = 3 * STORE_IDS_MAX; chunk->item.pins > 1; turns++) {
		assert_in_range(left - (chunk->item.pins - 1), 0, 8);
		left = chunk->item.pins - 1;
		loop_turn(w->c.loop, 0);
	}
	loop_virtual_parts(w->c.loop, 0);
	assert_true(turns >= 3 * STORE_IDS_MAX / 8 - 1);
	assert_true(list_empty(&store->pins));
	store_chunk_unpin(chunk);
}

/* ---- users ---- */

static void user_without_a_share_is_refused_by_name(void **state)
{
	struct world *w = *state;
	struct store *store = node_store(w);
	struct kvd *kvd = &w->c.nodes[0].kvd;
	struct account *accounts[ARENA_SLABS];
	struct store_tenant *tenant;
	char name[16];

	for (unsigned int i = 0; i < ARENA_SLABS; i++) {
		snprintf(name, sizeof(name), "%u", 5000 + i);
		accounts[i] = account_get(&kvd->accounts, "uid", name);
		if (i < ARENA_SLABS - 1)
			assert_int_equal(
				store_tenant_of(store, accounts[i], STORE_NOW, &tenant),
				0);
	}
	assert_int_equal(store->tenant_count, ARENA_SLABS);
	assert_true(arena_owner_share(w->handle->space->tenant->owner) > 0);
	assert_true(store_tenant_of(store, accounts[ARENA_SLABS - 1], STORE_NOW,
				    &tenant) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_non_null(strstr(err_last()->text, "128 users"));
	err_clear();
	cluster_run(&w->c, LOOP_NS_PER_S); /* none has a space */
	assert_int_equal(store->tenant_count, 1);
	assert_int_equal(
		store_tenant_of(store, accounts[ARENA_SLABS - 1], STORE_NOW, &tenant), 0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	for (unsigned int i = 0; i < ARENA_SLABS; i++)
		account_unref(accounts[i]);
}

/* ---- chunk_peers ---- */

static void store_not_dialable_is_dialled_later(void **state)
{
	struct world *w = *state;
	struct store *store = node_store(w);
	struct config *config = &w->c.nodes[0].config;
	struct store_remote_figures f = {0};

	snprintf(config->chunk_peers, sizeof(config->chunk_peers), "%s not-one",
		 w->c.nodes[1].endpoint);
	assert_null(store->far);
	mem_fail_at(2); /* the first is its own */
	assert_true(far_new(store, &store->far) >= 0);
	assert_true(mem_count() >= 2);
	mem_fail_at(0);
	far_count(store->far, &f);
	assert_int_equal(f.stores, 1); /* what is no endpoint never will be one */
	assert_int_equal(f.up, 0);
	cluster_run(&w->c, LOOP_NS_PER_S);
	f = (struct store_remote_figures){0};
	far_count(store->far, &f);
	assert_int_equal(f.up, 0);
	cluster_run(&w->c, DIAL_AGAIN_NS);
	f = (struct store_remote_figures){0};
	far_count(store->far, &f);
	assert_int_equal(f.stores, 1);
	assert_int_equal(f.up, 1);
}

/* ---- its start ---- */

static void store_without_one_allocation_is_none(void **state)
{
	struct world *w = *state;
	struct store *store = NULL;
	unsigned int refused = 0;
	int64_t live = mem_live();

	w->c.nodes[1].config.chunk_memory_bytes = MEMORY_BYTES;
	while (!store) {
		mem_fail_at(refused + 1);
		if (store_make(&w->c.nodes[1].kvd, &store) >= 0)
			break;
		mem_fail_at(0);
		assert_int_equal(err_last()->code, ERR_NOMEM);
		err_clear();
		assert_null(store);
		assert_int_equal(mem_live(), live);
		refused++;
	}
	mem_fail_at(0);
	assert_in_range(refused, 3, 10);
	store_free(store);
	assert_int_equal(mem_live(), live);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(find_checks_few_sets_of_classes),
		CASE(cover_of_many_sets_is_learned_call_by_call),
		CASE(class_removed_drops_its_statistics),
		cmocka_unit_test_setup_teardown(
			put_durable_checks_few_sets_of_classes_a_turn, setup_files,
			teardown),
		CASE(holds_ending_together_are_freed_in_slices),
		CASE(user_without_a_share_is_refused_by_name),
		CASE(store_not_dialable_is_dialled_later),
		CASE(store_without_one_allocation_is_none),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("store", tests, NULL, NULL);
}
