/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated disk keeps what disk.h promises and no more: what a loss of power leaves,
 * over many seeds, each of which must be possible and all of which must be found; and its
 * faults.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "tests/lib/disk_rig.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)
#define SECTOR (4 * KIB)
#define SEEDS 40u

static const struct disk_impl simulated = {.name = "simulated", .simulated = true};

static void begin(struct disk_rig *rig, uint64_t seed)
{
	rig_begin(rig, &simulated);
	rig_close(rig);
	disk_sim_free(rig->sim);
	assert_int_equal(disk_sim_new(seed, RIG_CAPACITY, &rig->sim), 0);
	rig_open(rig);
}

/* Now, and what survived is opened. */
static void lose_power(struct disk_rig *rig)
{
	disk_sim_power_loss(rig->sim);
	rig_close(rig);
	rig_open(rig);
	assert_int_equal(rig->why.code, ERR_OK);
}

static void write_as(struct disk_rig *rig, uint8_t *m, uint64_t bytes, uint64_t id)
{
	struct rig_op op = rig_move(DISK_WRITE, 1, MIB, 0, m, bytes, 4 * KIB);

	rig_fill(m, bytes, id);
	rig_good(rig, &op);
}

static void read_back(struct disk_rig *rig, uint8_t *m, uint64_t bytes)
{
	struct rig_op op = rig_move(DISK_READ, 1, MIB, 0, m, bytes, bytes);

	memset(m, 0xee, bytes);
	rig_good(rig, &op);
}

static void do_file(struct disk_rig *rig, enum disk_what what, uint32_t number)
{
	struct rig_op op = rig_file(what, number, MIB);

	rig_good(rig, &op);
}

static void do_make(struct disk_rig *rig, uint32_t number)
{
	struct rig_op op = rig_make(number, MIB, MIB);

	rig_good(rig, &op);
}

/* Of which of the contents 0, 1, … (their bits) may these 512 bytes at `at` be? */
static unsigned int block_of(const uint8_t *bytes, uint64_t at,
			     const uint8_t *const contents[], unsigned int count)
{
	unsigned int bits = 0;

	for (unsigned int i = 0; i < count; i++)
		if (memcmp(bytes + at, contents[i] + at, 512) == 0)
			bits |= 1u << i;
	return bits;
}

/* ---- what a loss of power leaves of WRITEs ---- */

static void synced_write_survives(void **state)
{
	uint8_t *m = rig_memory(MIB);
	struct disk_rig rig;

	(void)state;
	for (uint64_t seed = 1; seed <= SEEDS; seed++) {
		begin(&rig, seed);
		do_make(&rig, 1);
		write_as(&rig, m, MIB, 1);
		write_as(&rig, m, MIB, 2);
		do_file(&rig, DISK_SYNC, 1);
		lose_power(&rig);
		read_back(&rig, m, MIB);
		assert_true(rig_is(m, MIB, 2));
		rig_end(&rig);
	}
	rig_memory_free(m, MIB);
}

/* Zeros were synced, then 1 and 2 were written: each block of 512 bytes is one of the
 * three, a sector is torn at most once a write, and all of that happens. */
static void unsynced_write_is_kept_lost_or_torn_by_the_sector(void **state)
{
	const uint64_t bytes = 64 * SECTOR;
	uint8_t *m = rig_memory(bytes), *zero = rig_memory(bytes),
		*one = rig_memory(bytes), *two = rig_memory(bytes);
	const uint8_t *const contents[] = {zero, one, two};
	unsigned int whole[3] = {0}, torn = 0, sectors = 0;
	struct disk_rig rig;

	(void)state;
	rig_fill(one, bytes, 1);
	rig_fill(two, bytes, 2);
	for (uint64_t seed = 1; seed <= SEEDS; seed++) {
		begin(&rig, seed);
		do_make(&rig, 1);
		write_as(&rig, m, bytes, 1);
		write_as(&rig, m, bytes, 2);
		read_back(&rig, m, bytes);
		assert_true(rig_is(m, bytes, 2)); /* until then */
		lose_power(&rig);
		read_back(&rig, m, bytes);
		for (uint64_t at = 0; at < bytes; at += SECTOR, sectors++) {
			unsigned int first = block_of(m, at, contents, 3), same = first;

			for (uint64_t b = 0; b < SECTOR; b += 512) {
				unsigned int which = block_of(m, at + b, contents, 3);

				assert_true(which == 1 || which == 2 || which == 4);
				same &= which;
			}
			torn += !same;
			for (unsigned int i = 0; i < 3; i++)
				whole[i] += same == 1u << i;
		}
		rig_end(&rig);
	}
	assert_true(torn > sectors / 8);
	for (unsigned int i = 0; i < 3; i++)
		assert_true(whole[i] > sectors / 32);
	rig_memory_free(m, bytes);
	rig_memory_free(zero, bytes);
	rig_memory_free(one, bytes);
	rig_memory_free(two, bytes);
}

/* A WRITE that is in flight when the power goes; and one that came behind a SYNC that was
 * under way already. Both may be there or not. */
static void write_during_sync_is_not_covered(void **state)
{
	uint8_t *m = rig_memory(MIB), *w = rig_memory(SECTOR);
	unsigned int kept = 0, lost = 0, cut = 0;
	struct rig_op sync, late;
	struct disk_rig rig;

	(void)state;
	for (uint64_t seed = 1; seed <= 4 * SEEDS; seed++) {
		begin(&rig, seed);
		do_make(&rig, 1);
		write_as(&rig, m, SECTOR, 1);
		sync = rig_file(DISK_SYNC, 1, MIB);
		late = rig_move(DISK_WRITE, 1, MIB, 0, w, SECTOR, SECTOR);
		rig_fill(w, SECTOR, 2);
		rig_submit(&rig, &sync);
		rig_submit(&rig, &late);
		rig_until(&rig, &sync.order);
		cut += !late.order; /* in flight */
		lose_power(&rig);
		assert_int_equal(late.op.result < 0, late.op.err.code == ERR_IO);
		read_back(&rig, m, SECTOR);
		kept += rig_is(m, SECTOR, 2);
		lost += rig_is(m, SECTOR, 1);
		rig_end(&rig);
	}
	assert_true(kept > SEEDS / 2 && lost > SEEDS / 2 && cut > SEEDS / 2);
	rig_memory_free(m, MIB);
	rig_memory_free(w, SECTOR);
}

/* What a SYNC with a fault has lost is not brought back by the next one. */
static void sync_failed_loses_writes(void **state)
{
	static const struct disk_sim_fault fault = {
		.trouble = DISK_SIM_EIO, .what = DISK_SYNC, .count = 1};
	uint8_t *m = rig_memory(MIB);
	unsigned int whole = 0, less = 0;
	struct disk_rig rig;
	struct rig_op op;

	(void)state;
	for (uint64_t seed = 1; seed <= SEEDS; seed++) {
		begin(&rig, seed);
		do_make(&rig, 1);
		write_as(&rig, m, SECTOR, 1);
		disk_sim_fault(rig.sim, &fault);
		op = rig_file(DISK_SYNC, 1, MIB);
		rig_bad(&rig, &op, ERR_IO, "00001.1048576.slab");
		read_back(&rig, m, SECTOR);
		assert_true(rig_is(m, SECTOR, 1)); /* still in the cache */
		do_file(&rig, DISK_SYNC, 1);
		lose_power(&rig);
		read_back(&rig, m, SECTOR);
		whole += rig_is(m, SECTOR, 1);
		less += !rig_is(m, SECTOR, 1);
		rig_end(&rig);
	}
	assert_true(whole > 0 && less > 0);
	rig_memory_free(m, MIB);
}

/* ---- and of names ---- */

static bool lists(struct disk_rig *rig, uint32_t slab, const char *name)
{
	struct rig_op op = rig_file(DISK_LIST, 0, 0);
	struct disk_list list;
	bool found = false;

	op.op.list = &list;
	rig_good(rig, &op);
	for (size_t i = 0; !name && i < list.slab_count; i++) {
		assert_int_equal(list.slabs[i].bytes, MIB); /* or it is not there */
		found = found || list.slabs[i].file.number == slab;
	}
	for (size_t i = 0; name && i < list.named_count; i++)
		found = found || strcmp(list.named[i].name, name) == 0;
	disk_list_fini(&list);
	return found;
}

static void names_completed_survive(void **state)
{
	char old[] = "old", new[] = "newer", read[8];
	struct disk_rig rig;
	struct rig_op op;

	(void)state;
	for (uint64_t seed = 1; seed <= SEEDS; seed++) {
		begin(&rig, seed);
		do_make(&rig, 1);
		do_make(&rig, 2);
		do_file(&rig, DISK_REMOVE, 1);
		op = rig_named(DISK_NAMED_WRITE, "c", old, sizeof(old));
		rig_good(&rig, &op);
		op = rig_named(DISK_NAMED_WRITE, "gone", old, sizeof(old));
		rig_good(&rig, &op);
		op = rig_named(DISK_NAMED_WRITE, "c", new, sizeof(new));
		rig_good(&rig, &op);
		op = rig_named(DISK_NAMED_REMOVE, "gone", NULL, 0);
		rig_good(&rig, &op);
		lose_power(&rig);
		assert_false(lists(&rig, 1, NULL));
		assert_true(lists(&rig, 2, NULL));
		assert_false(lists(&rig, 0, "gone"));
		op = rig_named(DISK_NAMED_READ, "c", read, sizeof(read));
		rig_good(&rig, &op);
		assert_string_equal(read, new);
		rig_end(&rig);
	}
}

static void names_in_flight_are_or_are_not(void **state)
{
	char old[] = "old", new[] = "newer", read[8];
	unsigned int made = 0, removed = 0, renewed = 0;
	struct rig_op op, late;
	struct disk_rig rig;

	(void)state;
	for (uint64_t seed = 1; seed <= 3 * SEEDS; seed++) {
		begin(&rig, seed);
		do_make(&rig, 1);
		op = rig_named(DISK_NAMED_WRITE, "c", old, sizeof(old));
		rig_good(&rig, &op);
		late = seed % 3 == 0 ? rig_make(2, MIB, MIB)
		       : seed % 3 == 1
			       ? rig_file(DISK_REMOVE, 1, MIB)
			       : rig_named(DISK_NAMED_WRITE, "c", new, sizeof(new));
		rig_submit(&rig, &late);
		lose_power(&rig);
		assert_int_equal(late.op.err.code, ERR_IO);
		made += lists(&rig, 2, NULL);
		removed += !lists(&rig, 1, NULL);
		op = rig_named(DISK_NAMED_READ, "c", read, sizeof(read));
		rig_good(&rig, &op);
		assert_true(strcmp(read, old) == 0 || strcmp(read, new) == 0);
		renewed += strcmp(read, new) == 0;
		rig_end(&rig);
	}
	assert_in_range(made, 1, SEEDS - 1);
	assert_in_range(removed, 1, SEEDS - 1);
	assert_in_range(renewed, 1, SEEDS - 1);
}

static void disk_without_power_fails_all_and_another_opens(void **state)
{
	enum { OPS = 90 };
	static struct rig_op ops[OPS];
	uint8_t *m = rig_memory(4 * MIB);
	struct disk_rig rig, next;
	struct rig_op op;

	(void)state;
	begin(&rig, 3);
	op = rig_make(1, 4 * MIB, 4 * MIB);
	rig_good(&rig, &op);
	for (unsigned int i = 0; i < OPS; i++) {
		ops[i] = i % 3 == 0 ? rig_file(DISK_SYNC, 1, 4 * MIB)
				    : rig_move(i % 3 == 1 ? DISK_READ : DISK_WRITE, 1,
					       4 * MIB, 0, m, 4 * MIB, 4 * KIB);
		rig_submit(&rig, &ops[i]);
	}
	for (unsigned int i = 0; i < 5; i++)
		rig_turn(&rig);
	disk_sim_power_loss(rig.sim);
	next = rig;
	next.args.arg = &next;
	rig_open(&next);
	assert_int_equal(next.why.code, ERR_OK);
	rig_all(&rig);
	for (unsigned int i = 0; i < OPS; i++) {
		assert_true(ops[i].order > 0);
		if (ops[i].op.result < 0)
			assert_string_equal(ops[i].op.err.text, "sim: no power");
	}
	op = rig_file(DISK_SYNC, 1, 4 * MIB);
	rig_bad(&rig, &op, ERR_IO, "no power");
	op = rig_file(DISK_SYNC, 1, 4 * MIB);
	rig_good(&next, &op);
	rig_close(&rig);
	rig.disk = next.disk;
	rig_end(&rig);
	rig_memory_free(m, 4 * MIB);
}

/* ---- faults ---- */

static void pieces_short_are_continued(void **state)
{
	static const struct disk_sim_fault faults[] = {
		{.trouble = DISK_SIM_SHORT, .what = DISK_READ, .one_in = 2},
		{.trouble = DISK_SIM_SHORT, .what = DISK_WRITE, .one_in = 2},
	};
	uint8_t *m = rig_memory(MIB);
	struct disk_rig rig;

	(void)state;
	begin(&rig, 5);
	do_make(&rig, 1);
	disk_sim_fault(rig.sim, &faults[0]);
	disk_sim_fault(rig.sim, &faults[1]);
	for (uint64_t i = 0; i < 20; i++) {
		write_as(&rig, m, MIB, i);
		read_back(&rig, m, MIB);
		assert_true(rig_is(m, MIB, i));
	}
	assert_true(disk_sim_struck(rig.sim) > 20);
	rig_end(&rig);
	rig_memory_free(m, MIB);
}

static unsigned int bits_apart(const uint8_t *a, const uint8_t *b, uint64_t bytes)
{
	unsigned int bits = 0;

	for (uint64_t i = 0; i < bytes; i++)
		bits += (unsigned int)__builtin_popcount((unsigned int)(a[i] ^ b[i]));
	return bits;
}

static void bit_flip_changes_one_bit_read_or_stored(void **state)
{
	uint8_t *m = rig_memory(MIB), *good = rig_memory(MIB);
	struct disk_sim_fault fault = {
		.trouble = DISK_SIM_FLIP, .what = DISK_READ, .skip = 1, .count = 1};
	struct disk_rig rig;

	(void)state;
	begin(&rig, 6);
	do_make(&rig, 1);
	write_as(&rig, good, MIB, 1);
	disk_sim_fault(rig.sim, &fault);
	for (unsigned int i = 0; i < 3; i++) {
		read_back(&rig, m, MIB);
		assert_int_equal(bits_apart(m, good, MIB), i == 1);
	}
	disk_sim_heal(rig.sim);
	fault = (struct disk_sim_fault){.trouble = DISK_SIM_FLIP, .what = DISK_WRITE};
	disk_sim_fault(rig.sim, &fault);
	write_as(&rig, good, MIB, 2);
	disk_sim_heal(rig.sim);
	for (unsigned int i = 0; i < 2; i++) {
		read_back(&rig, m, MIB);
		assert_int_equal(bits_apart(m, good, MIB), 1);
	}
	assert_int_equal(disk_sim_struck(rig.sim), 2);
	rig_end(&rig);
	rig_memory_free(m, MIB);
	rig_memory_free(good, MIB);
}

static void errors_and_full_occur_as_configured(void **state)
{
	static const struct {
		struct disk_sim_fault fault;
		enum err_code code;
	} plan[] = {
		{{.trouble = DISK_SIM_EIO, .what = DISK_READ, .count = 1}, ERR_IO},
		{{.trouble = DISK_SIM_EIO, .what = DISK_WRITE, .count = 1}, ERR_IO},
		{{.trouble = DISK_SIM_FULL, .what = DISK_WRITE, .count = 1}, ERR_LIMIT},
		{{.trouble = DISK_SIM_FULL, .what = DISK_MAKE, .count = 1}, ERR_LIMIT},
		{{.trouble = DISK_SIM_EIO, .what = DISK_MAKE, .count = 1}, ERR_IO},
		{{.trouble = DISK_SIM_EIO, .what = DISK_LIST, .count = 1}, ERR_IO},
		{{.trouble = DISK_SIM_FULL, .what = DISK_NAMED_WRITE, .count = 1},
		 ERR_LIMIT},
	};
	uint8_t *m = rig_memory(3 * MIB);
	struct disk_list list = {0};
	struct disk_rig rig;
	struct rig_op op;

	(void)state;
	begin(&rig, 7);
	do_make(&rig, 1);
	for (uint32_t i = 0; i < ARRAY_LEN(plan); i++) {
		enum disk_what what = plan[i].fault.what;

		disk_sim_fault(rig.sim, &plan[i].fault);
		op = what == DISK_MAKE		? rig_make(10 + i, MIB, MIB)
		     : what == DISK_LIST	? rig_file(DISK_LIST, 0, 0)
		     : what == DISK_NAMED_WRITE ? rig_named(what, "c", m, MIB)
						: rig_move(what, 1, MIB, 0, m, MIB, MIB);
		op.op.list = &list;
		rig_bad(&rig, &op, plan[i].code, "sim/");
		rig_good(&rig, &op);
		disk_list_fini(&list);
	}
	op = rig_make(50, MIB, RIG_CAPACITY);
	rig_bad(&rig, &op, ERR_LIMIT, "No space left");
	rig_end(&rig);
	rig_memory_free(m, 3 * MIB);
}

static void op_hanging_is_abandoned(void **state)
{
	static const struct disk_sim_fault fault = {
		.trouble = DISK_SIM_HANG, .what = DISK_READ, .skip = 1, .count = 1};
	static struct rig_op reads[3], sync;
	uint8_t *m = rig_memory(MIB);
	struct disk_rig rig;

	(void)state;
	begin(&rig, 8);
	do_make(&rig, 1);
	disk_sim_fault(rig.sim, &fault);
	for (unsigned int i = 0; i < 3; i++) {
		reads[i] = rig_move(DISK_READ, 1, MIB, 0, m, MIB, MIB);
		rig_submit(&rig, &reads[i]);
	}
	sync = rig_file(DISK_SYNC, 1, MIB);
	rig_submit(&rig, &sync);
	for (unsigned int i = 0; i < 50; i++)
		rig_turn(&rig);
	assert_true(reads[0].order && !reads[1].order && reads[2].order && sync.order);
	disk_close(rig.disk);
	assert_false(disk_drained(rig.disk));
	assert_int_equal(disk_free(rig.disk), DISK_ABANDONED);
	rig.disk = NULL;
	rig_end(&rig);
	rig_memory_free(m, MIB);
}

/* ---- no memory, one seed ---- */

static void scenario(struct disk_rig *rig, uint8_t *m, char *text)
{
	char name[] = "c";
	struct rig_op ops[] = {
		rig_make(1, MIB, 4 * MIB),
		rig_move(DISK_WRITE, 1, MIB, 0, m, MIB, 4 * KIB),
		rig_named(DISK_NAMED_WRITE, name, m, 100),
		rig_file(DISK_SYNC, 1, MIB),
		rig_file(DISK_LIST, 0, 0),
		rig_move(DISK_READ, 1, MIB, 0, m, MIB, 4 * KIB),
		rig_file(DISK_REMOVE, 1, MIB),
	};
	struct disk_list list = {0};

	for (size_t i = 0; i < ARRAY_LEN(ops); i++) {
		ops[i].op.list = &list;
		rig_do(rig, &ops[i]);
		if (ops[i].op.result < 0)
			assert_true(ops[i].op.err.code == ERR_NOMEM ||
				    ops[i].op.err.code == ERR_NOTFOUND);
		disk_list_fini(&list);
		text += sprintf(text, "%s %ju;", err_name(ops[i].op.err.code),
				(uintmax_t)loop_now_ns(rig->loop));
	}
}

/* One after another, each allocation fails (those of sectors are alike): it costs an op.
 */
static void allocation_failed_fails_one_op(void **state)
{
	uint8_t *m = rig_memory(MIB);
	uint64_t count = 0;
	struct disk_rig rig;
	char text[512];

	(void)state;
	for (uint64_t n = 0; n <= count; n += n < 40 || n + 40 > count ? 1 : 17) {
		begin(&rig, 9);
		mem_fail_at(n);
		scenario(&rig, m, text);
		if (n == 0)
			count = mem_count();
		mem_fail_at(0);
		assert_int_equal(strstr(text, "ENOMEM") != NULL, n > 0);
		rig_end(&rig);
	}
	assert_true(count > 200);
	rig_memory_free(m, MIB);
}

static void short_read_does_not_wait_for_long_ones(void **state)
{
	enum { LONG = 3 };
	const uint64_t bytes = 24 * MIB;
	uint8_t *m = rig_memory(bytes), *r = rig_memory(SECTOR);
	struct rig_op longs[LONG], op, brief;
	struct disk_rig rig;

	(void)state;
	begin(&rig, 10);
	op = rig_make(1, bytes, bytes);
	rig_good(&rig, &op);
	rig.dones = 0;
	for (unsigned int i = 0; i < LONG; i++) {
		longs[i] = rig_move(DISK_READ, 1, bytes, 0, m, bytes, 4 * KIB);
		rig_submit(&rig, &longs[i]);
	}
	brief = rig_move(DISK_READ, 1, bytes, 8 * KIB, r, SECTOR, SECTOR);
	rig_submit(&rig, &brief);
	rig_all(&rig);
	assert_int_equal(brief.order, 1);
	rig_end(&rig);
	rig_memory_free(m, bytes);
	rig_memory_free(r, SECTOR);
}

static void same_seed_is_the_same_run(void **state)
{
	uint8_t *m = rig_memory(MIB), *first = rig_memory(MIB);
	char texts[3][512];
	struct disk_rig rig;

	(void)state;
	for (unsigned int i = 0; i < 3; i++) {
		begin(&rig, i == 2 ? 12 : 11);
		scenario(&rig, m, texts[i]);
		do_make(&rig, 1);
		write_as(&rig, m, MIB, 1);
		lose_power(&rig);
		read_back(&rig, m, MIB);
		if (i == 0)
			memcpy(first, m, MIB);
		assert_int_equal(memcmp(first, m, MIB) == 0, i < 2);
		rig_end(&rig);
	}
	assert_string_equal(texts[0], texts[1]);
	assert_string_not_equal(texts[0], texts[2]);
	rig_memory_free(m, MIB);
	rig_memory_free(first, MIB);
}

int main(void)
{
	static const struct rig_case cases[] = {
#define CASE(fn) {#fn, fn}
		CASE(synced_write_survives),
		CASE(unsynced_write_is_kept_lost_or_torn_by_the_sector),
		CASE(write_during_sync_is_not_covered),
		CASE(sync_failed_loses_writes),
		CASE(names_completed_survive),
		CASE(names_in_flight_are_or_are_not),
		CASE(disk_without_power_fails_all_and_another_opens),
		CASE(pieces_short_are_continued),
		CASE(bit_flip_changes_one_bit_read_or_stored),
		CASE(errors_and_full_occur_as_configured),
		CASE(op_hanging_is_abandoned),
		CASE(short_read_does_not_wait_for_long_ones),
		CASE(allocation_failed_fails_one_op),
		CASE(same_seed_is_the_same_run),
#undef CASE
	};

	rig_add(cases, ARRAY_LEN(cases), &simulated, 1);
	return rig_run();
}
