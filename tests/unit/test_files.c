/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Parts of chunks in files, over a simulated disk: what is written, read, dropped and
 * evicted, beside each other; and what faults of the disk cost.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/store/files_class.h"
#include "tests/lib/files_world.h"

static const struct fw_args plain = {.seed = 1};

static void begin(struct files_world *w, const struct fw_args *args)
{
	fw_begin(w, args);
	fw_start(w);
	fw_scanned(w);
}

/* What is on the disk is opened anew. */
static void restart(struct files_world *w)
{
	fw_stop(w);
	fw_start(w);
	fw_scanned(w);
}

static void put_durable(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	fw_put(w, kind, id);
	assert_int_equal(fw_lasts(w, kind, id), MOVE_GOOD);
}

static void file_it(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	fw_find(w, kind, id);
	fw_quiet(w);
}

static bool is_filed(struct files_world *w, enum fw_kind kind, uint32_t id)
{
	const struct store_part *part = fw_part(w, kind, id);

	return part && part->file != PART_UNFILED;
}

/* ---- writing, reading ---- */

static void part_evicted_from_memory_is_read_from_file(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
		for (uint32_t id = 0; id < 8; id++) {
			fw_put(&w, kind, id);
			assert_false(is_filed(&w, kind, id));
			file_it(&w, kind, id);
			assert_true(is_filed(&w, kind, id));
			assert_true(fw_forget(&w, kind, id));
			assert_true(fw_part(&w, kind, id)->memory != PART_READY);
		}
	}
	for (unsigned int round = 0; round < 3; round++) {
		for (enum fw_kind kind = 0; kind < FW_KINDS; kind++) {
			for (uint32_t id = 0; id < 8; id++)
				assert_int_equal(fw_loads(&w, kind, id), MOVE_GOOD);
		}
		if (round == 1)
			restart(&w);
	}
	assert_int_equal(fw_figures(&w).bad, 0);
	fw_end(&w);
}

static void part_requested_by_many_is_read_once(void **state)
{
	struct fw_move *moves[5];
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	put_durable(&w, KIND_A, 1);
	put_durable(&w, KIND_A_RANK, 1);
	assert_true(fw_forget(&w, KIND_A, 1));
	for (unsigned int i = 0; i < ARRAY_LEN(moves); i++) {
		moves[i] = fw_fetch(&w, i == 3 ? KIND_A_RANK : KIND_A, 1);
		assert_non_null(moves[i]);
		assert_int_equal(moves[i]->state, MOVE_WAITS);
	}
	for (unsigned int i = 0; i < ARRAY_LEN(moves); i++)
		assert_int_equal(fw_await(&w, moves[i]), MOVE_GOOD);
	assert_int_equal(fw_figures(&w).read, 2);
	fw_end(&w);
}

/* Of a prompt: each is let go of, and queued to leave, when it is written. */
static void chunk_found_last_is_evicted_first(void **state)
{
	enum { CHUNKS = 6 };
	uint8_t ids[CHUNKS * STORE_ID_BYTES];
	struct store_handle handle = {0};
	struct store_found found;
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	disk_sim_delays(w.sim, LOOP_NS_PER_MS, LOOP_NS_PER_MS);
	for (uint32_t id = 0; id < CHUNKS; id++) {
		fw_put(&w, KIND_A, id);
		fw_id(id, ids + id * STORE_ID_BYTES);
	}
	handle.space = fw_chunk(&w, KIND_A, 0)->space;
	handle.canon = w.canons[KIND_A];
	store_find(&handle, &(struct store_ids){ids, CHUNKS, 0}, &found);
	assert_int_equal(found.chunks, CHUNKS);
	fw_quiet(&w);
	for (uint32_t id = 1; id < CHUNKS; id++) {
		const struct store_chunk *a = fw_chunk(&w, KIND_A, id - 1);
		const struct store_chunk *b = fw_chunk(&w, KIND_A, id);

		assert_true(is_filed(&w, KIND_A, id));
		assert_true(a->item.tick > b->item.tick);
		assert_true(a->file_item.tick > b->file_item.tick);
	}
	fw_end(&w);
}

static void part_is_written_once(void **state)
{
	struct fw_move *moves[3];
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	fw_put(&w, KIND_A, 1);
	for (unsigned int i = 0; i < 4; i++)
		fw_find(&w, KIND_A, 1);
	assert_int_equal(fw_figures(&w).queued, 1);
	for (unsigned int i = 0; i < ARRAY_LEN(moves); i++)
		moves[i] = fw_durable(&w, KIND_A, 1);
	for (unsigned int i = 0; i < ARRAY_LEN(moves); i++)
		assert_int_equal(fw_await(&w, moves[i]), MOVE_GOOD);
	fw_find(&w, KIND_A, 1);
	assert_int_equal(fw_lasts(&w, KIND_A, 1), MOVE_GOOD);
	fw_quiet(&w);
	assert_int_equal(fw_figures(&w).written, 1);
	fw_end(&w);
}

/* It was kept without a promise, and is told to last later. */
static void part_in_file_can_be_made_durable(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	fw_put(&w, KIND_B, 1);
	file_it(&w, KIND_B, 1);
	assert_true(fw_part(&w, KIND_B, 1)->file != PART_LASTS);
	assert_true(fw_forget(&w, KIND_B, 1));
	assert_int_equal(fw_lasts(&w, KIND_B, 1), MOVE_GOOD);
	assert_int_equal(fw_figures(&w).written, 1);
	fw_power_loss(&w);
	fw_start(&w);
	fw_scanned(&w);
	assert_int_equal(fw_loads(&w, KIND_B, 1), MOVE_GOOD);
	fw_end(&w);
}

static void part_being_read_can_be_made_durable(void **state)
{
	struct fw_move *fetch, *durable;
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	put_durable(&w, KIND_A, 1);
	restart(&w);
	fetch = fw_fetch(&w, KIND_A, 1);
	durable = fw_durable(&w, KIND_A, 1);
	assert_int_equal(durable->state, MOVE_WAITS);
	assert_int_equal(fw_await(&w, fetch), MOVE_GOOD);
	assert_int_equal(fw_await(&w, durable), MOVE_GOOD);
	fw_end(&w);
}

/* More than memory and files hold, of two users. */
static void more_chunks_than_slots_replace_each_other(void **state)
{
	const struct fw_args args = {.seed = 2, .memory_slabs = 8, .file_slabs = 12};
	enum { ROUNDS = 1500 };
	struct files_world w;
	unsigned int kept = 0;

	(void)state;
	begin(&w, &args);
	for (uint32_t i = 0; i < ROUNDS; i++) {
		enum fw_kind kind = (enum fw_kind)(i * 7 / 5 % FW_KINDS);

		if (fw_part(&w, kind, i / 3))
			continue;
		fw_put(&w, kind, i / 3);
		kept += fw_lasts(&w, kind, i / 3) == MOVE_GOOD;
		if (i % 3 == 0)
			fw_loads(&w, kind, i / 5);
	}
	assert_true(kept > ROUNDS / 2);
	assert_true(fw_figures(&w).evicted > kept / 2);
	assert_int_equal(fw_figures(&w).bad + fw_figures(&w).faults, 0);
	assert_in_range(arena_slabs_used(w.store->file_arena), 8, 12);
	restart(&w);
	kept = 0;
	for (uint32_t i = 0; i < ROUNDS / 3; i++) {
		for (enum fw_kind kind = 0; kind < FW_KINDS; kind++)
			kept += fw_loads(&w, kind, i) == MOVE_GOOD;
	}
	assert_true(kept > 12);
	assert_int_equal(fw_figures(&w).bad, 0);
	fw_end(&w);
}

/* A write that waits keeps a block for its header, which small parts are less than. */
static void queue_is_bounded_with_its_headers(void **state)
{
	struct files_world w;
	uint64_t bytes = fw_part_bytes(KIND_A) + SEAL_HEADER_BYTES + DISK_ALIGN;
	const struct files *files;
	uint64_t most;

	(void)state;
	begin(&w, &plain);
	files = w.store->files;
	most = w.store->memory_bytes / 16 / bytes;
	assert_in_range(most, 5, 40);
	for (uint32_t id = 1; id <= 60; id++) {
		fw_put(&w, KIND_A, id);
		fw_find(&w, KIND_A, id);
		assert_int_equal(files->queued, id < most ? id : most);
	}
	fw_quiet(&w);
	assert_int_equal(files->queued_bytes, 0);
	fw_end(&w);
}

/* ---- dropping ---- */

enum { DROP_QUEUED, DROP_WRITTEN, DROP_SYNCED, DROP_READ, DROP_REST, DROPS };

/* At what moment of its life in the files? */
static void drop_at(struct files_world *w, unsigned int when, uint32_t id)
{
	struct fw_move *move = NULL;
	struct files *files = w->store->files;

	fw_put(w, KIND_A, id);
	if (when == DROP_SYNCED || when == DROP_QUEUED)
		move = fw_durable(w, KIND_A, id);
	else
		fw_find(w, KIND_A, id);
	if (when == DROP_WRITTEN) {
		while (files->queued)
			fw_turn(w);
		assert_non_null(fw_part(w, KIND_A, id)->job);
	}
	if (when == DROP_SYNCED) {
		while (fw_part(w, KIND_A, id)->file == PART_UNFILED)
			fw_turn(w);
	}
	if (when == DROP_READ || when == DROP_REST)
		fw_quiet(w);
	if (when == DROP_READ) {
		assert_true(fw_forget(w, KIND_A, id));
		move = fw_fetch(w, KIND_A, id);
	}
	assert_int_equal(fw_drop(w, KIND_A, id), 1);
	if (move)
		fw_move_end(move);
}

/* Whatever is being done with it: it is gone at once, and at the next start. */
static void chunk_dropped_stays_dropped(void **state)
{
	struct files_world w;

	(void)state;
	for (unsigned int when = 0; when < DROPS; when++) {
		begin(&w, &plain);
		put_durable(&w, KIND_A, 100);
		drop_at(&w, when, 1);
		assert_null(fw_chunk(&w, KIND_A, 1));
		fw_quiet(&w);
		assert_int_equal(w.store->chunk_count, 1);
		if (when % 2)
			fw_power_loss(&w);
		else
			fw_stop(&w);
		fw_start(&w);
		fw_scanned(&w);
		assert_null(fw_chunk(&w, KIND_A, 1));
		assert_int_equal(fw_loads(&w, KIND_A, 100), MOVE_GOOD);
		fw_end(&w);
	}
}

static void dropped_chunk_can_be_put_again_at_once(void **state)
{
	struct files_world w;

	(void)state;
	for (unsigned int when = 0; when < DROPS; when++) {
		begin(&w, &plain);
		drop_at(&w, when, 1);
		put_durable(&w, KIND_A, 1);
		fw_quiet(&w);
		assert_int_equal(w.store->chunk_count, 1);
		fw_power_loss(&w);
		fw_start(&w);
		fw_scanned(&w);
		assert_int_equal(fw_loads(&w, KIND_A, 1), MOVE_GOOD);
		fw_end(&w);
	}
}

/* ---- the start ---- */

/* It is found as soon as its header was read, and reading it stops nothing. */
static void part_is_readable_during_scan(void **state)
{
	struct files_world w;
	bool early = false;

	(void)state;
	begin(&w, &plain);
	for (uint32_t id = 0; id < 60; id++)
		put_durable(&w, id % 2 ? KIND_B : KIND_LARGE, id);
	fw_stop(&w);
	disk_sim_delays(w.sim, 1000, 3 * LOOP_NS_PER_MS);
	fw_start(&w);
	while (!w.store->files->scanned) {
		for (uint32_t id = 0; id < 60; id++) {
			enum fw_kind kind = id % 2 ? KIND_B : KIND_LARGE;
			const struct store_part *part = fw_part(&w, kind, id);

			if (part && !part->slot.slab)
				early |= fw_loads(&w, kind, id) == MOVE_GOOD &&
					 !w.store->files->scanned;
		}
		fw_turn(&w);
	}
	assert_true(early);
	for (uint32_t id = 0; id < 60; id++)
		assert_int_equal(fw_loads(&w, id % 2 ? KIND_B : KIND_LARGE, id),
				 MOVE_GOOD);
	fw_end(&w);
}

/* What is put before its header was read has its place in the files even so. */
static void part_put_during_scan_replaces_file(void **state)
{
	struct store_part *half;
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	put_durable(&w, KIND_A, 1);
	put_durable(&w, KIND_A, 2);
	fw_stop(&w);
	fw_start(&w);
	fw_put(&w, KIND_A, 1);
	assert_int_equal(fw_put_begin(&w, KIND_A, 2, &half), 0);
	fw_scanned(&w);
	assert_true(is_filed(&w, KIND_A, 1));
	fw_put_fail(half);
	assert_true(fw_forget(&w, KIND_A, 1));
	for (uint32_t id = 1; id <= 2; id++)
		assert_int_equal(fw_loads(&w, KIND_A, id), MOVE_GOOD);
	fw_end(&w);
}

/* ---- a full file system ---- */

static uint32_t slabs_used(const struct files_world *w)
{
	return arena_slabs_used(w->store->file_arena);
}

/* Content is replaced within the files that are there; after a minute another is tried.
 */
static void full_file_system_is_no_fault(void **state)
{
	struct files_world w;
	uint32_t kept = 0;

	(void)state;
	begin(&w, &plain);
	for (uint32_t id = 0; id < 10; id++)
		put_durable(&w, KIND_A, id);
	assert_int_equal(slabs_used(&w), 2);
	fw_fault(&w, DISK_SIM_FULL, DISK_MAKE, 0);
	for (uint32_t id = 10; id < 14; id++) { /* they wait for one file */
		fw_put(&w, KIND_A, id);
		fw_find(&w, KIND_A, id);
	}
	fw_quiet(&w);
	assert_int_equal(slabs_used(&w), 2);
	assert_int_equal(disk_sim_struck(w.sim), 1);
	for (uint32_t id = 20; id < 40; id++)
		put_durable(&w, KIND_A, id);
	for (uint32_t id = 0; id < 40; id++)
		kept += is_filed(&w, KIND_A, id);
	assert_int_equal(kept, 10);
	assert_int_equal(slabs_used(&w), 2);
	assert_int_equal(disk_sim_struck(w.sim), 1);
	assert_int_equal(fw_figures(&w).faults, 0);
	assert_false(fw_figures(&w).readonly);
	assert_true(fw_figures(&w).full);
	disk_sim_heal(w.sim);
	fw_wait(&w, 61 * LOOP_NS_PER_S);
	put_durable(&w, KIND_A, 50);
	assert_int_equal(slabs_used(&w), 3);
	assert_false(fw_figures(&w).full);
	fw_end(&w);
}

static void full_file_system_without_a_file_keeps_nothing(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	fw_fault(&w, DISK_SIM_FULL, DISK_NAMED_WRITE, 0);
	fw_fault(&w, DISK_SIM_FULL, DISK_MAKE, 0);
	for (uint32_t id = 0; id < 10; id++) {
		fw_put(&w, KIND_A, id);
		assert_int_equal(fw_lasts(&w, KIND_A, id), MOVE_NOT);
	}
	fw_wait(&w, 61 * LOOP_NS_PER_S);
	assert_int_equal(fw_lasts(&w, KIND_A, 1), MOVE_NOT);
	disk_sim_heal(w.sim);
	fw_wait(&w, 61 * LOOP_NS_PER_S);
	assert_int_equal(fw_lasts(&w, KIND_A, 1), MOVE_GOOD);
	assert_int_equal(fw_figures(&w).faults, 0);
	fw_end(&w);
}

/* ---- another size of the memory ---- */

/* ---- faults ---- */

static void is_readonly(struct files_world *w)
{
	struct store_files figures = fw_figures(w);

	assert_true(figures.readonly);
	assert_int_equal(figures.why->code, ERR_IO);
	assert_int_equal(figures.faults, 2);
	disk_sim_heal(w->sim);
	fw_put(w, KIND_A, 900);
	assert_int_equal(fw_lasts(w, KIND_A, 900), MOVE_NOT);
	fw_find(w, KIND_A, 900);
	fw_quiet(w);
	assert_int_equal(fw_figures(w).written, figures.written);
	assert_int_equal(fw_loads(w, KIND_A, 1), MOVE_GOOD);
}

/* The first is made good; the second ends all writing until the next start, and what is
 * there can be read. */
static void second_fault_of_a_write_ends_all_writing(void **state)
{
	static const enum disk_what whats[] = {DISK_WRITE, DISK_SYNC};
	struct files_world w;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_LEN(whats); i++) {
		begin(&w, &plain);
		put_durable(&w, KIND_A, 1);
		assert_true(fw_forget(&w, KIND_A, 1));
		fw_fault(&w, DISK_SIM_EIO, whats[i], 1);
		put_durable(&w, KIND_A, 2);
		assert_int_equal(fw_figures(&w).faults, 1);
		assert_false(fw_figures(&w).readonly);
		fw_fault(&w, DISK_SIM_EIO, whats[i], 1);
		fw_put(&w, KIND_A, 3);
		assert_int_equal(fw_lasts(&w, KIND_A, 3), MOVE_NOT);
		is_readonly(&w);
		restart(&w);
		assert_int_equal(fw_loads(&w, KIND_A, 1), MOVE_GOOD);
		assert_int_equal(fw_loads(&w, KIND_A, 2), MOVE_GOOD);
		put_durable(&w, KIND_A, 4);
		fw_end(&w);
	}
}

static void second_fault_of_making_a_file_ends_all_writing(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	put_durable(&w, KIND_A, 1);
	assert_true(fw_forget(&w, KIND_A, 1));
	fw_fault(&w, DISK_SIM_EIO, DISK_MAKE, 2);
	for (uint32_t id = 2; id < 4; id++) {
		fw_put(&w, KIND_B, id);
		assert_int_equal(fw_lasts(&w, KIND_B, id), MOVE_NOT);
	}
	is_readonly(&w);
	fw_end(&w);
}

/* A class whose description is not there is not written; another one is. */
static void class_without_description_is_not_written(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	put_durable(&w, KIND_A, 1);
	assert_true(fw_forget(&w, KIND_A, 1));
	fw_fault(&w, DISK_SIM_EIO, DISK_NAMED_WRITE, 2);
	fw_put(&w, KIND_B, 1);
	assert_int_equal(fw_lasts(&w, KIND_B, 1), MOVE_NOT);
	fw_put(&w, KIND_B, 2);
	assert_int_equal(fw_lasts(&w, KIND_B, 2), MOVE_NOT);
	put_durable(&w, KIND_A, 2);
	assert_int_equal(fw_figures(&w).faults, 1);
	fw_wait(&w, 61 * LOOP_NS_PER_S);
	assert_int_equal(fw_lasts(&w, KIND_B, 2), MOVE_NOT);
	is_readonly(&w);
	fw_end(&w);
}

static void second_fault_of_a_read_ends_all_writing(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	for (uint32_t id = 1; id < 5; id++) {
		put_durable(&w, KIND_A, id);
		assert_true(fw_forget(&w, KIND_A, id));
	}
	fw_fault(&w, DISK_SIM_EIO, DISK_READ, 2);
	for (uint32_t id = 3; id < 5; id++) {
		assert_int_equal(fw_loads(&w, KIND_A, id), MOVE_NOT);
		assert_null(fw_chunk(&w, KIND_A, id));
	}
	is_readonly(&w);
	assert_int_equal(fw_loads(&w, KIND_A, 2), MOVE_GOOD);
	fw_end(&w);
}

/* A file that cannot be removed is there: no other one takes its number, for the next
 * start would believe the old one. */
static void file_not_removable_keeps_its_number(void **state)
{
	struct files_world w;

	(void)state;
	for (unsigned int faults = 1; faults <= 2; faults++) {
		begin(&w, &(struct fw_args){.seed = faults, .file_slabs = 1});
		put_durable(&w, KIND_A, 1);
		fw_fault(&w, DISK_SIM_EIO, DISK_REMOVE, faults);
		assert_true(fw_unfile(&w, KIND_A, 1));
		fw_put(&w, KIND_B, 2);
		fw_put(&w, KIND_B, 3);
		(void)fw_lasts(&w, KIND_B, 2);
		if (faults == 2) {
			assert_int_equal(fw_lasts(&w, KIND_B, 3), MOVE_NOT);
			assert_true(fw_figures(&w).readonly);
			fw_end(&w);
			continue;
		}
		assert_int_equal(fw_lasts(&w, KIND_B, 3), MOVE_GOOD);
		fw_power_loss(&w);
		fw_start(&w);
		fw_scanned(&w);
		assert_int_equal(fw_loads(&w, KIND_B, 3), MOVE_GOOD);
		fw_end(&w);
	}
}

/* A sync with a fault has lost what was written before it: none of that is told to last
 * by the next one, which is without fault. */
static void failed_sync_is_not_made_good_by_the_next(void **state)
{
	struct files_world w;
	unsigned int told = 0;

	(void)state;
	for (uint64_t seed = 1; seed <= 60; seed++) {
		struct fw_move *moves[6];

		begin(&w, &(struct fw_args){.seed = seed});
		fw_put(&w, KIND_A, 0);
		file_it(&w, KIND_A, 0);
		fw_fault(&w, DISK_SIM_EIO, DISK_SYNC, 1);
		fw_fault(&w, DISK_SIM_SHORT, DISK_WRITE, 0); /* in several pieces */
		for (uint32_t id = 1; id < 6; id++) {
			fw_put(&w, KIND_A, id);
			moves[id] = fw_durable(&w, KIND_A, id);
			if (id % 2)
				fw_wait(&w, LOOP_NS_PER_MS);
		}
		for (uint32_t id = 1; id < 6; id++)
			(void)fw_await(&w, moves[id]);
		for (uint32_t id = 0; id < 6; id++) {
			assert_int_equal(fw_lasts(&w, KIND_A, id), MOVE_GOOD);
			told++;
		}
		assert_int_equal(fw_figures(&w).faults, 1);
		fw_power_loss(&w);
		fw_start(&w);
		fw_scanned(&w);
		for (uint32_t id = 0; id < 6; id++)
			assert_int_equal(fw_loads(&w, KIND_A, id), MOVE_GOOD);
		fw_end(&w);
	}
	assert_int_equal(told, 360);
}

/* A slab that another user has by now is another file, though its slots are as large: an
 * old header of the first user's would give it the slab at the next start. */
static void slab_reassigned_gets_another_file(void **state)
{
	struct files_world w;

	(void)state;
	for (uint64_t seed = 1; seed <= 60; seed++) {
		begin(&w, &(struct fw_args){.seed = seed, .file_slabs = 1});
		for (uint32_t id = 0; id < 5; id++)
			put_durable(&w, KIND_A, id);
		for (uint32_t id = 0; id < 5; id++)
			assert_true(fw_unfile(&w, KIND_A, id));
		fw_put(&w, KIND_OTHER, 1);
		fw_put(&w, KIND_OTHER, 2);
		fw_find(&w, KIND_OTHER, 1); /* the first slot, which is not synced */
		assert_int_equal(fw_lasts(&w, KIND_OTHER, 2), MOVE_GOOD);
		fw_power_loss(&w);
		fw_start(&w);
		fw_scanned(&w);
		assert_int_equal(fw_loads(&w, KIND_OTHER, 2), MOVE_GOOD);
		fw_end(&w);
	}
}

/* It is read, and written again. */
static void part_of_failed_sync_can_be_made_durable(void **state)
{
	struct files_world w;

	(void)state;
	begin(&w, &plain);
	fw_put(&w, KIND_A, 1);
	file_it(&w, KIND_A, 1);
	fw_fault(&w, DISK_SIM_EIO, DISK_SYNC, 1);
	put_durable(&w, KIND_A, 2);
	assert_true(fw_forget(&w, KIND_A, 1));
	assert_int_equal(fw_lasts(&w, KIND_A, 1), MOVE_GOOD);
	assert_int_equal(fw_figures(&w).read, 1);
	assert_int_equal(fw_figures(&w).written, 4);
	fw_end(&w);
}

/* A description that no part is of. */
static void left_over(struct files_world *w)
{
	char name[DISK_NAME_MAX + 1];
	struct disk_op op = {
		.what = DISK_NAMED_WRITE, .name = name, .iov = {{name, sizeof(name)}}};

	class_words_name((uint8_t[SEAL_DIGEST_BYTES]){1}, name);
	fw_raw_begin(w);
	assert_int_equal(fw_raw(w, &op), 0);
	fw_raw_end(w);
}

static void fault_during_scan_loses_hidden_parts(void **state)
{
	static const struct {
		enum disk_what what;
		bool found; /* by this start; by the next it is */
		bool writes;
	} rows[] = {{DISK_LIST, false, false},
		    {DISK_NAMED_READ, false, false},
		    {DISK_NAMED_REMOVE, true, true}};
	struct files_world w;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_LEN(rows); i++) {
		begin(&w, &plain);
		put_durable(&w, KIND_A, 1);
		fw_stop(&w);
		if (rows[i].what == DISK_NAMED_REMOVE)
			left_over(&w);
		fw_fault(&w, DISK_SIM_EIO, rows[i].what, 1);
		fw_start(&w);
		fw_wait(&w, LOOP_NS_PER_S);
		assert_int_equal(disk_sim_struck(w.sim), 1);
		assert_int_equal(fw_part(&w, KIND_A, 1) != NULL, rows[i].found);
		fw_put(&w, KIND_B, 5);
		assert_int_equal(fw_lasts(&w, KIND_B, 5),
				 rows[i].writes ? MOVE_GOOD : MOVE_NOT);
		assert_int_equal(fw_figures(&w).readonly, !rows[i].writes);
		assert_int_equal(fw_drop(&w, KIND_B, 5), 1);
		fw_wait(&w, LOOP_NS_PER_S);
		assert_null(rows[i].found ? NULL
					  : list_first(&w.store->spaces,
						       struct store_space, link));
		restart(&w);
		assert_int_equal(fw_loads(&w, KIND_A, 1), MOVE_GOOD);
		fw_end(&w);
	}
}

static void header_unreadable_loses_its_part(void **state)
{
	struct files_world w;
	unsigned int found = 0;

	(void)state;
	begin(&w, &plain);
	for (uint32_t id = 0; id < 5; id++)
		put_durable(&w, KIND_A, id);
	fw_stop(&w);
	fw_fault(&w, DISK_SIM_EIO, DISK_READ, 1);
	fw_start(&w);
	fw_scanned(&w);
	for (uint32_t id = 0; id < 5; id++)
		found += fw_loads(&w, KIND_A, id) == MOVE_GOOD;
	assert_int_equal(found, 4);
	put_durable(&w, KIND_A, 10);
	fw_end(&w);
}

/* ---- the end ---- */

static void hang(struct files_world *w, enum disk_what what)
{
	fw_fault(w, DISK_SIM_HANG, what, 1);
	fw_put(w, KIND_A, 2);
	fw_put(w, KIND_A, 3);
	switch (what) {
	case DISK_READ:
		assert_true(fw_forget(w, KIND_A, 1));
		fw_fetch(w, KIND_A, 1);
		break;
	case DISK_REMOVE:
		assert_true(fw_unfile(w, KIND_A, 1));
		fw_put(w, KIND_OTHER, 4);
		fw_durable(w, KIND_OTHER, 4);
		break;
	case DISK_MAKE:
	case DISK_NAMED_WRITE:
		fw_put(w, KIND_B, 4);
		fw_durable(w, KIND_B, 4);
		break;
	default:
		break;
	}
	fw_durable(w, KIND_A, 2);
	fw_wait(w, LOOP_NS_PER_S);
	fw_durable(w, KIND_A, 3);
}

/* Told after ten seconds without an answer, and only then. */
static void disk_hanging_is_reported(void **state)
{
	struct files_world w;
	struct err why;

	(void)state;
	begin(&w, &plain);
	put_durable(&w, KIND_A, 1);
	fw_wait(&w, 25 * LOOP_NS_PER_S); /* nothing to do is no hang */
	assert_true(store_module.health(w.store, &why));
	hang(&w, DISK_WRITE);
	assert_true(store_module.health(w.store, &why));
	fw_wait(&w, 25 * LOOP_NS_PER_S);
	assert_false(store_module.health(w.store, &why));
	assert_string_equal(why.text, "chunk_dir: its disk does not respond");
	assert_true(fw_figures(&w).stands);
	assert_false(store_module.drained(w.store, &why));
	assert_non_null(strstr(why.text, "chunk_dir"));
	assert_false(fw_close(&w));
	fw_abandon(&w);
	fw_end(&w);
}

/* All that can end does, once; the rest is told to be abandoned. */
static void op_hanging_outlives_store(void **state)
{
	static const enum disk_what whats[] = {DISK_WRITE, DISK_SYNC,	DISK_READ,
					       DISK_MAKE,  DISK_REMOVE, DISK_NAMED_WRITE};
	struct files_world w;

	(void)state;
	for (unsigned int i = 0; i < ARRAY_LEN(whats); i++) {
		begin(&w, &plain);
		put_durable(&w, KIND_A, 1);
		hang(&w, whats[i]);
		assert_int_equal(disk_sim_struck(w.sim), 1);
		assert_false(fw_close(&w));
		assert_true(list_empty(&w.store->files->queue));
		fw_abandon(&w);
		fw_start(&w);
		fw_scanned(&w);
		if (whats[i] != DISK_REMOVE)
			assert_int_equal(fw_loads(&w, KIND_A, 1), MOVE_GOOD);
		fw_end(&w);
	}
}

/* At each moment of a life; whatever is under way comes to its end. */
static void store_can_be_closed_at_any_moment(void **state)
{
	struct files_world w;
	bool over = false;

	(void)state;
	for (unsigned int turns = 0; !over; turns++) {
		fw_begin(&w, &(struct fw_args){.seed = turns, .file_slabs = 2});
		fw_start(&w);
		for (unsigned int i = 0; i < turns; i++) {
			if (i == 4) {
				fw_put(&w, KIND_A, 1);
				fw_put(&w, KIND_OTHER, 2);
			}
			if (i > 4 && i < 50) {
				fw_durable(&w, KIND_A, 1);
				fw_find(&w, KIND_OTHER, 2);
			}
			if (i == 50) {
				fw_unfile(&w, KIND_A, 1);
				fw_put(&w, KIND_B, 3);
				fw_durable(&w, KIND_B, 3);
			}
			if (i == 60)
				fw_drop(&w, KIND_B, 3);
			fw_turn(&w);
			over = i > 60 && !w.store->files->jobs;
		}
		assert_true(turns < 1000);
		fw_stop(&w);
		fw_end(&w);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(part_evicted_from_memory_is_read_from_file),
		cmocka_unit_test(part_requested_by_many_is_read_once),
		cmocka_unit_test(part_is_written_once),
		cmocka_unit_test(chunk_found_last_is_evicted_first),
		cmocka_unit_test(part_in_file_can_be_made_durable),
		cmocka_unit_test(part_being_read_can_be_made_durable),
		cmocka_unit_test(more_chunks_than_slots_replace_each_other),
		cmocka_unit_test(queue_is_bounded_with_its_headers),
		cmocka_unit_test(chunk_dropped_stays_dropped),
		cmocka_unit_test(dropped_chunk_can_be_put_again_at_once),
		cmocka_unit_test(part_is_readable_during_scan),
		cmocka_unit_test(part_put_during_scan_replaces_file),
		cmocka_unit_test(full_file_system_is_no_fault),
		cmocka_unit_test(full_file_system_without_a_file_keeps_nothing),
		cmocka_unit_test(second_fault_of_a_write_ends_all_writing),
		cmocka_unit_test(second_fault_of_making_a_file_ends_all_writing),
		cmocka_unit_test(class_without_description_is_not_written),
		cmocka_unit_test(second_fault_of_a_read_ends_all_writing),
		cmocka_unit_test(file_not_removable_keeps_its_number),
		cmocka_unit_test(failed_sync_is_not_made_good_by_the_next),
		cmocka_unit_test(disk_hanging_is_reported),
		cmocka_unit_test(slab_reassigned_gets_another_file),
		cmocka_unit_test(part_of_failed_sync_can_be_made_durable),
		cmocka_unit_test(fault_during_scan_loses_hidden_parts),
		cmocka_unit_test(header_unreadable_loses_its_part),
		cmocka_unit_test(op_hanging_outlives_store),
		cmocka_unit_test(store_can_be_closed_at_any_moment),
	};

	log_set_level(getenv("KVD_TEST_LOG") ? LOG_LEVEL_DEBUG : LOG_LEVEL_ERROR);
	cmocka_set_test_filter(getenv("KVD_TEST_FILTER"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
