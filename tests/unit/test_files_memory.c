/* SPDX-License-Identifier: Apache-2.0 */
/* Files without memory: each allocation of a write, a read, a start, a drop fails in
 * turn. It costs an op, and nothing that was told. And a start with less of it. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "tests/lib/files_world.h"

static const enum fw_kind kinds[] = {KIND_A, KIND_A_RANK, KIND_OTHER, KIND_LARGE};

static void begin(struct files_world *w)
{
	fw_begin(w, &(struct fw_args){.seed = 5});
	fw_start(w);
	fw_scanned(w);
}

static void restart(struct files_world *w)
{
	fw_stop(w);
	fw_start(w);
	fw_scanned(w);
}

/* The n-th fails, or (all) all from the n-th on. */
static void starve(uint64_t n, bool all)
{
	if (all && n)
		mem_fail_from(n);
	else
		mem_fail_at(n);
}

/* How many there are. */
static uint64_t starve_end(void)
{
	uint64_t count = mem_count();

	mem_fail_at(0);
	err_clear();
	return count;
}

static bool put_lasts(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	struct store_part *part;
	int r = fw_put_begin(w, kind, id, &part);

	if (r == 0)
		fw_put_end(part);
	return r == 0 && fw_lasts(w, kind, id) == MOVE_GOOD;
}

static uint64_t sweep_write(uint64_t n, bool all)
{
	bool told[ARRAY_LEN(kinds)];
	struct files_world w;
	uint64_t count;

	begin(&w);
	assert_true(put_lasts(&w, KIND_B, 9));
	starve(n, all);
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++)
		told[i] = put_lasts(&w, kinds[i], 1);
	count = starve_end();
	fw_quiet(&w);
	assert_false(fw_figures(&w).readonly);
	assert_int_equal(fw_figures(&w).faults, 0);
	fw_power_loss(&w);
	fw_start(&w);
	fw_scanned(&w);
	assert_int_equal(fw_loads(&w, KIND_B, 9), MOVE_GOOD);
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++) {
		if (told[i])
			assert_int_equal(fw_loads(&w, kinds[i], 1), MOVE_GOOD);
		else
			assert_true(n > 0);
	}
	fw_end(&w);
	return count;
}

static uint64_t sweep_read(uint64_t n, bool all)
{
	struct files_world w;
	uint64_t count;

	begin(&w);
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++) {
		assert_true(put_lasts(&w, kinds[i], 1));
		assert_true(fw_forget(&w, kinds[i], 1));
	}
	starve(n, all);
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++)
		fw_loads(&w, kinds[i], 1);
	count = starve_end();
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++)
		assert_int_equal(fw_loads(&w, kinds[i], 1), MOVE_GOOD);
	fw_end(&w);
	return count;
}

/* What one start cannot take in the next one can. */
static uint64_t sweep_start(uint64_t n, bool all)
{
	struct files_world w;
	unsigned int found = 0;
	uint64_t count;

	begin(&w);
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++)
		assert_true(put_lasts(&w, kinds[i], 1));
	fw_stop(&w);
	fw_start(&w);
	starve(n, all);
	fw_wait(&w, LOOP_NS_PER_S);
	count = starve_end();
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++)
		found += fw_loads(&w, kinds[i], 1) == MOVE_GOOD;
	assert_true(n || found == ARRAY_LEN(kinds));
	if (!fw_figures(&w).readonly)
		assert_true(put_lasts(&w, KIND_B, 2));
	restart(&w);
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++)
		assert_true(fw_loads(&w, kinds[i], 1) == MOVE_GOOD ||
			    found < ARRAY_LEN(kinds));
	fw_end(&w);
	return count;
}

static uint64_t sweep_drop(uint64_t n, bool all)
{
	struct files_world w;
	uint64_t count;

	begin(&w);
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++)
		assert_true(put_lasts(&w, kinds[i], 1));
	fw_forget(&w, KIND_OTHER, 1);
	fw_fetch(&w, KIND_OTHER, 1);
	starve(n, all);
	assert_int_equal(fw_drop(&w, KIND_A, 1), 1);
	assert_int_equal(fw_drop(&w, KIND_OTHER, 1), 1);
	for (unsigned int i = 0; i < 100; i++)
		fw_turn(&w);
	count = starve_end();
	fw_quiet(&w);
	assert_null(fw_chunk(&w, KIND_A, 1));
	assert_int_equal(w.store->chunk_count, 1);
	restart(&w);
	assert_int_equal(fw_loads(&w, KIND_LARGE, 1), MOVE_GOOD);
	assert_true(n || !fw_chunk(&w, KIND_A, 1));
	fw_end(&w);
	return count;
}

static void sweep(uint64_t (*one)(uint64_t n, bool all), uint64_t least)
{
	uint64_t count = one(0, false);

	assert_true(count > least);
	for (uint64_t n = 1; n <= count; n++) {
		one(n, false);
		one(n, true);
	}
}

static void write_without_memory_fails_an_op(void **state)
{
	(void)state;
	sweep(sweep_write, 60);
}

static void read_without_memory_fails_an_op(void **state)
{
	(void)state;
	sweep(sweep_read, 8);
}

static void scan_without_memory_loses_hidden_parts(void **state)
{
	(void)state;
	sweep(sweep_start, 60);
}

static void drop_without_memory_fails_an_op(void **state)
{
	(void)state;
	sweep(sweep_drop, 4);
}

/* ---- less memory than before ---- */

static void restart_with(struct files_world *w, uint64_t memory_slab)
{
	fw_stop(w);
	w->config.chunk_memory_bytes = memory_slab * ARENA_SLABS;
	fw_start(w);
	fw_scanned(w);
}

/* The memory has no room for the large ones: they stay, whatever the others do. */
static void scan_with_less_memory_keeps_unused_parts(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w);
	assert_true(put_lasts(&w, KIND_A, 1));
	assert_true(put_lasts(&w, KIND_LARGE, 1));
	for (unsigned int i = 0; i < 2; i++) {
		restart_with(&w, 8 * KIB);
		assert_true(fw_figures(&w).readonly);
		assert_int_equal(fw_figures(&w).why->code, ERR_TOOBIG);
		assert_non_null(strstr(fw_figures(&w).why->text, "kept"));
		assert_int_equal(fw_loads(&w, KIND_A, 1), MOVE_GOOD);
		fw_put(&w, KIND_A, 2 + i);
		assert_int_equal(fw_lasts(&w, KIND_A, 2 + i), MOVE_NOT);
	}
	restart_with(&w, 16 * KIB);
	assert_false(fw_figures(&w).readonly);
	assert_int_equal(fw_loads(&w, KIND_LARGE, 1), MOVE_GOOD);
	assert_true(put_lasts(&w, KIND_A, 4));
	fw_end(&w);
}

/* Of a class that no slot is of there is nothing to keep. */
static void start_with_less_memory_writes_where_nothing_is_lost(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w);
	assert_true(put_lasts(&w, KIND_LARGE, 1));
	assert_int_equal(fw_drop(&w, KIND_LARGE, 1), 1);
	fw_quiet(&w);
	restart_with(&w, 8 * KIB);
	assert_false(fw_figures(&w).readonly);
	assert_true(put_lasts(&w, KIND_A, 1));
	fw_end(&w);
}
/* What the files may have and the disk has not is not free. */
static void free_bytes_match_file_system(void **state)
{
	const uint64_t slab = 40 * KIB, rest = 10 * KIB;
	struct store_files figures;
	struct files_world w;

	(void)state;
	fw_begin(&w, &(struct fw_args){.seed = 1, .capacity = 4 * slab + rest});
	fw_start(&w);
	fw_scanned(&w);
	fw_wait(&w, LOOP_NS_PER_S);
	figures = fw_figures(&w);
	assert_int_equal(figures.disk_free_bytes, 4 * slab + rest);
	assert_int_equal(figures.free_bytes, 4 * slab + rest);
	assert_false(figures.full);
	for (uint32_t id = 0; id < 20; id++) { /* five a file, and a description */
		fw_put(&w, KIND_A, id);
		fw_find(&w, KIND_A, id);
		fw_quiet(&w);
	}
	fw_wait(&w, 11 * LOOP_NS_PER_S);
	figures = fw_figures(&w);
	assert_true(figures.disk_free_bytes < rest);
	assert_int_equal(figures.free_bytes, figures.disk_free_bytes);
	assert_true(figures.full);
	assert_false(figures.readonly);
	fw_end(&w);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(free_bytes_match_file_system),
		cmocka_unit_test(write_without_memory_fails_an_op),
		cmocka_unit_test(read_without_memory_fails_an_op),
		cmocka_unit_test(scan_without_memory_loses_hidden_parts),
		cmocka_unit_test(drop_without_memory_fails_an_op),
		cmocka_unit_test(scan_with_less_memory_keeps_unused_parts),
		cmocka_unit_test(start_with_less_memory_writes_where_nothing_is_lost),
	};

	log_threshold = getenv("KVD_TEST_LOG") ? LOG_LEVEL_DEBUG : -1;
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
