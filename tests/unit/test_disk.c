/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One suite over every disk that there is here: threads past and by the page cache, and
 * the simulated one. What only one kind can be asked is in
 * test_disk_real.c and test_disk_sim.c.
 */
#include "daemon/store/disk.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "tests/lib/disk_rig.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)

static struct disk_figures figures_of(const struct disk_rig *rig)
{
	struct disk_figures figures;

	disk_figures(rig->disk, &figures);
	return figures;
}

/* ---- slab files ---- */

static void slab_written_reads_back(void **state)
{
	const uint64_t slot = 6 * MIB + 20 * KIB, at = 3 * slot;
	struct rig_op op;
	struct disk_rig rig;
	uint8_t *w, *r;

	rig_begin(&rig, *state);
	w = rig_memory(slot);
	r = rig_memory(slot);
	op = rig_make(17, slot, 4 * slot);
	rig_good(&rig, &op);
	rig_fill(w, slot, 1);
	op = rig_move(DISK_WRITE, 17, slot, at, w, slot, 4 * KIB);
	rig_good(&rig, &op);
	assert_int_equal(op.op.moved, slot);
	op = rig_file(DISK_SYNC, 17, slot);
	rig_good(&rig, &op);
	op = rig_move(DISK_READ, 17, slot, at, r, slot, 5 * MIB + 12 * KIB);
	rig_good(&rig, &op);
	assert_int_equal(op.op.moved, slot);
	assert_true(rig_is(r, slot, 1));
	/* beside it nothing was written */
	memset(r, 1, 8 * KIB);
	op = rig_move(DISK_READ, 17, slot, at - 8 * KIB, r, 8 * KIB, 8 * KIB);
	rig_good(&rig, &op);
	assert_true(r[0] == 0 && memcmp(r, r + 1, 8 * KIB - 1) == 0);
	assert_int_equal(figures_of(&rig).reads, 2);
	assert_int_equal(figures_of(&rig).writes, 1);
	assert_int_equal(figures_of(&rig).read_bytes, slot + 8 * KIB);
	assert_int_equal(figures_of(&rig).written_bytes, slot);
	assert_int_equal(figures_of(&rig).errors, 0);
	rig_end(&rig);
	rig_memory_free(w, slot);
	rig_memory_free(r, slot);
}

static void slabs_survive_reopen(void **state)
{
	struct rig_op op;
	struct disk_rig rig;
	uint8_t *m = rig_memory(64 * KIB);

	rig_begin(&rig, *state);
	op = rig_make(1, 64 * KIB, MIB);
	rig_good(&rig, &op);
	rig_fill(m, 64 * KIB, 9);
	op = rig_move(DISK_WRITE, 1, 64 * KIB, 0, m, 64 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	op = rig_file(DISK_SYNC, 1, 64 * KIB);
	rig_good(&rig, &op);
	rig_close(&rig);
	rig_open(&rig);
	memset(m, 0, 64 * KIB);
	op = rig_move(DISK_READ, 1, 64 * KIB, 0, m, 64 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	assert_true(rig_is(m, 64 * KIB, 9));
	rig_end(&rig);
	rig_memory_free(m, 64 * KIB);
}

static void slab_made_twice_or_missing_is_refused(void **state)
{
	struct rig_op op;
	struct disk_rig rig;
	uint8_t *m = rig_memory(4 * KIB);

	rig_begin(&rig, *state);
	op = rig_make(5, 4 * KIB, MIB);
	rig_good(&rig, &op);
	rig_bad(&rig, &op, ERR_EXIST, "00005.4096.slab");
	op = rig_make(5, 8 * KIB, MIB); /* another one */
	rig_good(&rig, &op);
	op = rig_file(DISK_REMOVE, 5, 8 * KIB);
	rig_good(&rig, &op);
	rig_bad(&rig, &op, ERR_NOTFOUND, "00005.8192.slab");
	op = rig_file(DISK_SYNC, 5, 8 * KIB);
	rig_bad(&rig, &op, ERR_NOTFOUND, "00005.8192.slab");
	op = rig_move(DISK_READ, 5, 8 * KIB, 0, m, 4 * KIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_NOTFOUND, "00005.8192.slab");
	op = rig_move(DISK_WRITE, 123456, 8 * KIB, 0, m, 4 * KIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_NOTFOUND, "123456.8192.slab");
	assert_int_equal(figures_of(&rig).errors, 0); /* not the device's */
	rig_end(&rig);
	rig_memory_free(m, 4 * KIB);
}

static void read_past_the_end_is_a_fault(void **state)
{
	struct rig_op op;
	struct disk_rig rig;
	uint8_t *m = rig_memory(4 * MIB);

	rig_begin(&rig, *state);
	op = rig_make(2, MIB, 3 * MIB);
	rig_good(&rig, &op);
	op = rig_move(DISK_READ, 2, MIB, 0, m, 4 * MIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_IO, "00002.1048576.slab is shorter than expected");
	op = rig_move(DISK_READ, 2, MIB, 8 * MIB, m, 4 * KIB, 4 * KIB);
	rig_bad(&rig, &op, ERR_IO, "at offset 8388608");
	assert_int_equal(figures_of(&rig).errors, 2);
	assert_int_equal(figures_of(&rig).reads, 0);
	rig_end(&rig);
	rig_memory_free(m, 4 * MIB);
}

#define FILES 4u
#define SLOTS 48u
#define SLOT (36 * KIB)

/* All slots of some files written beside each other, in any order, and read so. */
static void many_ops_in_flight_keep_apart(void **state)
{
	static struct rig_op ops[FILES * SLOTS];
	const uint64_t all = FILES * SLOTS * SLOT;
	struct disk_rig rig;
	struct rig_op op;
	uint8_t *m;

	rig_begin(&rig, *state);
	m = rig_memory(all);
	for (uint32_t f = 0; f < FILES; f++) {
		op = rig_make(f, SLOT, SLOTS * SLOT);
		rig_good(&rig, &op);
	}
	for (unsigned int round = 0; round < 2; round++) {
		for (uint64_t i = 0; i < FILES * SLOTS; i++) {
			uint64_t n = i * 77 % (FILES * SLOTS); /* coprime */
			uint8_t *at = m + n * SLOT;

			if (round == 0)
				rig_fill(at, SLOT, n);
			ops[n] = rig_move(round ? DISK_READ : DISK_WRITE,
					  (uint32_t)(n % FILES), SLOT, n / FILES * SLOT,
					  at, SLOT, 4 * KIB);
			rig_submit(&rig, &ops[n]);
		}
		assert_int_equal(figures_of(&rig).in_flight, FILES * SLOTS);
		rig_all(&rig);
		for (uint64_t n = 0; n < FILES * SLOTS; n++) {
			assert_true(ops[n].order > 0);
			assert_int_equal(ops[n].op.result, 0);
			assert_true(rig_is(m + n * SLOT, SLOT, n));
			memset(m + n * SLOT, 0, SLOT);
		}
	}
	rig_end(&rig);
	rig_memory_free(m, all);
}

/* Made by hand, for a MAKE flushes its file and the directory. */
static void make_quickly(struct disk_rig *rig, uint32_t number)
{
	struct rig_op op = rig_make(number, 4 * KIB, 4 * KIB);
	char path[128];
	int fd;

	if (rig->sim) {
		rig_good(rig, &op);
		return;
	}
	snprintf(path, sizeof(path), "%s/%05u.4096.slab", rig->path, number);
	fd = open(path, O_RDWR | O_CREAT | O_EXCL, 0600);
	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, 4 * KIB), 0);
	close(fd);
}

/* More files than stay open. */
static void more_files_than_descriptors_are_served(void **state)
{
	enum { COUNT = 300 };
	static struct rig_op ops[COUNT];
	uint8_t *m = rig_memory(COUNT * 4 * KIB);
	struct disk_rig rig;

	rig_begin(&rig, *state);
	for (uint32_t i = 0; i < COUNT; i++) {
		make_quickly(&rig, i);
		rig_fill(m + i * 4 * KIB, 4 * KIB, i);
	}
	for (uint32_t round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < COUNT; i++) {
			ops[i] = rig_move(round ? DISK_READ : DISK_WRITE, i, 4 * KIB, 0,
					  m + i * 4 * KIB, 4 * KIB, 4 * KIB);
			rig_submit(&rig, &ops[i]);
		}
		rig_all(&rig);
		for (uint32_t i = 0; i < COUNT; i++) {
			assert_int_equal(ops[i].op.result, 0);
			assert_true(rig_is(m + i * 4 * KIB, 4 * KIB, i));
			memset(m + i * 4 * KIB, 0, 4 * KIB);
		}
	}
	rig_end(&rig);
	rig_memory_free(m, COUNT * 4 * KIB);
}

/* ---- order ---- */

/* Holds the disk's thread at an op's beginning until it is posted; a simulated disk has
 * no thread to hold. */
static sem_t gate;
static unsigned int at_gates, begun_before; /* ops; and before the one looked at */

static void at_door(struct disk_op *op)
{
	(void)op;
	__atomic_add_fetch(&at_gates, 1, __ATOMIC_RELEASE);
}

static void looks_at_gates(struct disk_op *op)
{
	(void)op;
	begun_before = __atomic_load_n(&at_gates, __ATOMIC_ACQUIRE);
}

static void at_gate(struct disk_op *op)
{
	at_door(op);
	while (sem_wait(&gate) < 0)
		assert_int_equal(errno, EINTR);
	sem_post(&gate);
}

static void gate_op(struct disk_rig *rig, struct rig_op *op)
{
	op->op.before = rig->sim ? at_door : at_gate;
}

static void reads_precede_writes(void **state)
{
	enum { WRITES = 40 };
	static struct rig_op writes[WRITES];
	const uint64_t slot = 2 * MIB;
	uint8_t *m = rig_memory(slot), *r = rig_memory(4 * KIB);
	struct disk_rig rig;
	struct rig_op op, read;

	rig_begin(&rig, *state);
	assert_int_equal(sem_init(&gate, 0, 0), 0);
	op = rig_make(1, slot, WRITES * slot);
	rig_good(&rig, &op);
	at_gates = 0;
	for (unsigned int i = 0; i < WRITES; i++) {
		writes[i] = rig_move(DISK_WRITE, 1, slot, i * slot, m, slot, 4 * KIB);
		gate_op(&rig, &writes[i]);
		rig_submit(&rig, &writes[i]);
	}
	read = rig_move(DISK_READ, 1, slot, 0, r, 4 * KIB, 4 * KIB);
	read.op.before = looks_at_gates;
	rig_submit(&rig, &read);
	sem_post(&gate);
	rig_all(&rig);
	assert_true(begun_before < WRITES / 2);
	assert_int_equal(read.op.result, 0);
	rig_end(&rig);
	sem_destroy(&gate);
	rig_memory_free(m, slot);
	rig_memory_free(r, 4 * KIB);
}

static void write_starts_during_reads(void **state)
{
	enum { READS = 200 };
	static struct rig_op reads[READS];
	uint8_t *m = rig_memory(MIB), *r = rig_memory(MIB);
	struct disk_rig rig;
	struct rig_op op, write;

	rig_begin(&rig, *state);
	assert_int_equal(sem_init(&gate, 0, 0), 0);
	op = rig_make(1, MIB, 4 * MIB);
	rig_good(&rig, &op);
	at_gates = 0;
	for (unsigned int i = 0; i < READS; i++) {
		reads[i] = rig_move(DISK_READ, 1, MIB, 0, r, MIB, MIB);
		gate_op(&rig, &reads[i]);
		rig_submit(&rig, &reads[i]);
	}
	write = rig_move(DISK_WRITE, 1, MIB, 2 * MIB, m, MIB, 4 * KIB);
	write.op.before = looks_at_gates;
	rig_submit(&rig, &write);
	sem_post(&gate);
	rig_all(&rig);
	assert_true(begun_before < READS / 2);
	assert_int_equal(write.op.result, 0);
	rig_end(&rig);
	sem_destroy(&gate);
	rig_memory_free(m, MIB);
	rig_memory_free(r, MIB);
}

static void read_under_way_outlives_the_removal(void **state)
{
	const uint64_t bytes = 8 * MIB;
	uint8_t *m = rig_memory(bytes);
	struct rig_op op, read, removal;
	struct disk_rig rig;

	rig_begin(&rig, *state);
	assert_int_equal(sem_init(&gate, 0, 0), 0);
	op = rig_make(1, bytes, bytes);
	rig_good(&rig, &op);
	rig_fill(m, bytes, 3);
	op = rig_move(DISK_WRITE, 1, bytes, 0, m, bytes, 4 * KIB);
	rig_good(&rig, &op);
	memset(m, 0, bytes);
	at_gates = 0;
	read = rig_move(DISK_READ, 1, bytes, 0, m, bytes, 4 * KIB);
	gate_op(&rig, &read);
	rig_submit(&rig, &read);
	if (!rig.sim)
		rig_until(&rig, &at_gates);
	removal = rig_file(DISK_REMOVE, 1, bytes);
	rig_good(&rig, &removal);
	sem_post(&gate);
	rig_until(&rig, &read.order);
	assert_int_equal(read.op.result, 0);
	assert_true(rig_is(m, bytes, 3));
	op = rig_move(DISK_READ, 1, bytes, 0, m, bytes, 4 * KIB);
	rig_bad(&rig, &op, ERR_NOTFOUND, "slab");
	/* the number may be had again, and is another file */
	op = rig_make(1, bytes, bytes);
	rig_good(&rig, &op);
	op = rig_move(DISK_READ, 1, bytes, 0, m, 4 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	assert_true(m[0] == 0 && memcmp(m, m + 1, 4 * KIB - 1) == 0);
	rig_end(&rig);
	sem_destroy(&gate);
	rig_memory_free(m, bytes);
}

/* ---- named files and lists ---- */

static void named_is_written_and_read_whole(void **state)
{
	uint8_t *m = rig_memory(2 * MIB), *r = rig_memory(2 * MIB);
	char name[DISK_NAME_MAX + 2];
	struct rig_op op;
	struct disk_rig rig;

	rig_begin(&rig, *state);
	memset(name, 'n', DISK_NAME_MAX);
	name[DISK_NAME_MAX] = '\0';
	for (uint64_t bytes = 0; bytes <= MIB; bytes = bytes ? bytes * 32 : 1) {
		rig_fill(m, MIB, bytes);
		op = rig_named(DISK_NAMED_WRITE, name, m, bytes);
		rig_good(&rig, &op);
		assert_int_equal(op.op.moved, bytes);
		memset(r, 0, MIB);
		op = rig_named(DISK_NAMED_READ, name, r, MIB);
		rig_good(&rig, &op);
		assert_int_equal(op.op.moved, bytes);
		assert_memory_equal(r, m, bytes);
	}
	op = rig_named(DISK_NAMED_READ, name, r, MIB - 1);
	rig_bad(&rig, &op, ERR_TOOBIG, "1048576 bytes");
	op = rig_named(DISK_NAMED_READ, "other", r, MIB);
	rig_bad(&rig, &op, ERR_NOTFOUND, "other");
	op = rig_named(DISK_NAMED_REMOVE, name, NULL, 0);
	rig_good(&rig, &op);
	rig_bad(&rig, &op, ERR_NOTFOUND, "nnn");
	op = rig_named(DISK_NAMED_READ, name, r, MIB);
	rig_bad(&rig, &op, ERR_NOTFOUND, "nnn");
	name[DISK_NAME_MAX] = 'n';
	name[DISK_NAME_MAX + 1] = '\0';
	assert_false(disk_name_ok(name));
	assert_false(disk_name_ok(""));
	assert_false(disk_name_ok("../x"));
	assert_false(disk_name_ok("a.b"));
	assert_false(disk_name_ok("a/b"));
	assert_true(disk_name_ok("Class_07-a"));
	rig_end(&rig);
	rig_memory_free(m, 2 * MIB);
	rig_memory_free(r, 2 * MIB);
}

static void list_has_all_entries(void **state)
{
	enum { COUNT = 40 };
	char names[COUNT][16];
	struct disk_list list;
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	for (unsigned int round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < COUNT; i++) {
			uint32_t n = i * 7 % COUNT;

			snprintf(names[n], sizeof(names[n]), "class-%02u", n);
			op = round ? rig_named(DISK_NAMED_WRITE, names[n], names, n)
				   : rig_make(n * 5000, 4 * KIB, (n + 1) * 4 * KIB);
			rig_good(&rig, &op);
		}
	}
	op = rig_file(DISK_LIST, 0, 0);
	op.op.list = &list;
	rig_good(&rig, &op);
	assert_int_equal(list.slab_count, COUNT);
	assert_int_equal(list.named_count, COUNT);
	for (uint32_t n = 0; n < COUNT; n++) {
		assert_int_equal(list.slabs[n].file.number, n * 5000);
		assert_int_equal(list.slabs[n].file.slot_bytes, 4 * KIB);
		assert_int_equal(list.slabs[n].bytes, (n + 1) * 4 * KIB);
		assert_string_equal(list.named[n].name, names[n]);
		assert_int_equal(list.named[n].bytes, n);
	}
	disk_list_fini(&list);
	disk_list_fini(&list);
	rig_end(&rig);
}

/* ---- hooks ---- */

static pthread_t hook_thread;
static unsigned int hooks;

static void hook_fills(struct disk_op *op)
{
	hook_thread = pthread_self();
	rig_fill(op->iov[0].iov_base, op->iov[0].iov_len, 5);
	hooks++;
}

static void hook_judges(struct disk_op *op)
{
	if (!rig_is(op->iov[0].iov_base, op->iov[0].iov_len, 5))
		op->result = err_raise(ERR_FAULT, "sums differ");
	hooks++;
}

static void hook_refuses(struct disk_op *op)
{
	op->result = err_raise(ERR_INVAL, "not this one");
	hooks++;
}

static void hooks_run_off_the_loop_and_may_fail(void **state)
{
	uint8_t *m = rig_memory(MIB);
	struct rig_op op;
	struct disk_rig rig;

	rig_begin(&rig, *state);
	hooks = 0;
	op = rig_make(1, MIB, MIB);
	rig_good(&rig, &op);
	op = rig_move(DISK_WRITE, 1, MIB, 0, m, MIB, 4 * KIB);
	op.op.before = hook_fills;
	rig_good(&rig, &op);
	assert_int_equal(pthread_equal(hook_thread, pthread_self()), rig.sim != NULL);
	op = rig_move(DISK_READ, 1, MIB, 0, m, 4 * KIB, 4 * KIB);
	op.op.after = hook_judges;
	rig_good(&rig, &op);
	assert_int_equal(hooks, 2);
	op = rig_move(DISK_READ, 1, MIB, 4 * KIB, m, 4 * KIB, 4 * KIB);
	op.op.after = hook_judges;
	rig_bad(&rig, &op, ERR_FAULT, "sums differ");
	assert_int_equal(hooks, 3);
	rig_fill(m, MIB, 6);
	op = rig_move(DISK_WRITE, 1, MIB, 0, m, MIB, 4 * KIB);
	op.op.before = hook_refuses;
	op.op.after = hook_judges; /* not after a fault */
	rig_bad(&rig, &op, ERR_INVAL, "not this one");
	assert_int_equal(hooks, 4);
	op = rig_move(DISK_READ, 1, MIB, 0, m, 4 * KIB, 4 * KIB);
	rig_good(&rig, &op);
	assert_true(rig_is(m, 4 * KIB, 5));
	op = rig_file(DISK_SYNC, 1, MIB);
	op.op.before = hook_refuses;
	rig_bad(&rig, &op, ERR_INVAL, "not this one");
	rig_end(&rig);
	rig_memory_free(m, MIB);
}

/* ---- closing ---- */

enum { ENDS = 120 };
static struct rig_op ends[ENDS];

static void submit_ends(struct disk_rig *rig, uint8_t *m, struct disk_list *list)
{
	for (unsigned int i = 0; i < ENDS; i++) {
		uint8_t *at = m + i * 2 * MIB;

		ends[i] = i % 10 == 0	? rig_file(DISK_SYNC, 1, MIB)
			  : i % 10 == 1 ? rig_named(DISK_NAMED_WRITE, "x", at, MIB)
					: rig_move(i % 2 ? DISK_WRITE : DISK_READ, 1, MIB,
						   i % 2 * 2 * MIB, at, 2 * MIB, 4 * KIB);
		if (i % 10 == 2) {
			ends[i] = rig_file(DISK_LIST, 0, 0);
			ends[i].op.list = &list[i];
		}
		rig_submit(rig, &ends[i]);
	}
}

static void judge_ends(struct disk_list *list)
{
	for (unsigned int i = 0; i < ENDS; i++) {
		assert_true(ends[i].order > 0);
		if (ends[i].op.result < 0)
			assert_int_equal(ends[i].op.err.code, ERR_CANCELED);
		if (ends[i].op.what == DISK_LIST && ends[i].op.result == 0)
			disk_list_fini(&list[i]);
	}
}

static void ops_in_flight_end_when_it_closes(void **state)
{
	static struct disk_list list[ENDS];
	uint8_t *m = rig_memory(ENDS * 2 * MIB);
	struct disk_figures figures;
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	for (unsigned int round = 0; round < 6; round++) {
		op = rig_make(1, MIB, 4 * MIB);
		if (round == 0)
			rig_good(&rig, &op);
		submit_ends(&rig, m, list);
		for (unsigned int turns = 0; turns < round / 2; turns++)
			loop_turn(rig.loop, 0);
		assert_false(disk_drained(rig.disk));
		if (round % 2) { /* the loop turns until all have ended */
			disk_close(rig.disk);
			disk_close(rig.disk);
			op = rig_file(DISK_SYNC, 1, MIB);
			rig_bad(&rig, &op, ERR_STATE, "not open");
			rig_all(&rig);
			while (!disk_drained(rig.disk))
				rig_turn(&rig);
			disk_figures(rig.disk, &figures);
			assert_int_equal(figures.in_flight, 0);
		}
		rig_close(&rig);
		judge_ends(list);
		rig_open(&rig);
	}
	rig_end(&rig);
	rig_memory_free(m, ENDS * 2 * MIB);
}

static void second_opener_is_refused(void **state)
{
	struct disk_rig rig, other;
	struct rig_op op;

	rig_begin(&rig, *state);
	other = rig;
	other.args.arg = &other;
	other.args.path = rig.path;
	rig_open(&other);
	assert_int_equal(other.why.code, ERR_BUSY);
	assert_non_null(strstr(other.why.text, rig.sim ? "sim" : rig.path));
	assert_non_null(strstr(other.why.text, "in use by another daemon"));
	op = rig_make(1, MIB, MIB);
	rig_bad(&other, &op, ERR_STATE, "not open");
	rig_good(&rig, &op); /* the first one does not mind */
	rig_close(&rig);
	rig_close(&other);
	rig_open(&rig);
	assert_int_equal(rig.why.code, ERR_OK);
	rig_end(&rig);
}

static void on_never(void *arg, struct disk *disk, const struct err *why)
{
	(void)arg;
	(void)disk;
	(void)why;
	fail();
}

static void disk_freed_during_open_makes_no_callback(void **state)
{
	struct disk_rig rig;

	rig_begin(&rig, *state);
	rig_close(&rig);
	rig.args.on_open = on_never;
	for (unsigned int round = 0; round < 8; round++) {
		if (rig.sim)
			assert_int_equal(
				disk_sim_open(rig.sim, rig.loop, &rig.args, &rig.disk),
				0);
		else
			assert_int_equal(disk_open(rig.loop, &rig.args, &rig.disk), 0);
		assert_int_equal(disk_free(rig.disk), 0);
		rig.disk = NULL;
		loop_turn(rig.loop, 0);
	}
	assert_int_equal(disk_free(NULL), 0);
	rig_end(&rig);
}

/* ---- against a model ---- */

#define MODEL_FILES 3u
#define MODEL_SLOTS 16u
#define MODEL_SLOT (20 * KIB)

struct model {
	bool there[MODEL_FILES];
	uint64_t id[MODEL_FILES][MODEL_SLOTS]; /* 0: zeros */
};

static void model_step(struct disk_rig *rig, struct model *model, uint8_t *m, uint64_t x,
		       uint64_t id)
{
	uint32_t f = (uint32_t)(x % MODEL_FILES), s = (uint32_t)(x >> 8) % MODEL_SLOTS;
	struct rig_op op;

	if (!model->there[f] || x >> 40 & 1) {
		bool reading = !model->there[f] || x >> 41 & 1;

		memset(m, 1, MODEL_SLOT);
		if (!reading)
			rig_fill(m, MODEL_SLOT, id);
		op = rig_move(reading ? DISK_READ : DISK_WRITE, f, MODEL_SLOT,
			      s * MODEL_SLOT, m, MODEL_SLOT, 4 * KIB);
		rig_do(rig, &op);
		assert_int_equal(op.op.err.code, model->there[f] ? ERR_OK : ERR_NOTFOUND);
		if (!model->there[f])
			return;
		if (!reading)
			model->id[f][s] = id;
		else if (model->id[f][s])
			assert_true(rig_is(m, MODEL_SLOT, model->id[f][s]));
		else
			assert_true(m[0] == 0 && memcmp(m, m + 1, MODEL_SLOT - 1) == 0);
	} else if ((x >> 42 & 15) == 0) {
		op = rig_file(DISK_REMOVE, f, MODEL_SLOT);
		rig_good(rig, &op);
		model->there[f] = false;
	}
}

static void random_ops_match_a_model(void **state)
{
	struct model model = {0};
	uint8_t *m = rig_memory(MODEL_SLOT);
	uint64_t x = 88172645463325252u;
	struct disk_rig rig;
	struct rig_op op;

	rig_begin(&rig, *state);
	for (uint64_t i = 1; i <= 1500; i++) {
		uint32_t f;

		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		f = (uint32_t)(x >> 50) % MODEL_FILES;
		if (!model.there[f] && (x & 3) == 0) {
			op = rig_make(f, MODEL_SLOT, MODEL_SLOTS * MODEL_SLOT);
			rig_good(&rig, &op);
			model.there[f] = true;
			memset(model.id[f], 0, sizeof(model.id[f]));
		}
		model_step(&rig, &model, m, x, i);
		if (i % 500 == 0) {
			rig_close(&rig);
			rig_open(&rig);
		}
	}
	rig_end(&rig);
	rig_memory_free(m, MODEL_SLOT);
}

/* ---- all at once ---- */

#define CROWD 400u

static struct rig_op crowd_op(uint64_t x, uint8_t *m, struct disk_list *list)
{
	static const char *const names[] = {"a", "b", "c"};
	uint32_t file = (uint32_t)(x >> 20) % 4;
	const char *name = names[(x >> 24) % ARRAY_LEN(names)];
	struct rig_op op;

	switch (x % 16) {
	case 0:
		return rig_make(file, 64 * KIB, 2 * MIB);
	case 1:
		return rig_file(DISK_REMOVE, file, 64 * KIB);
	case 2:
		return rig_file(DISK_SYNC, file, 64 * KIB);
	case 3:
		return rig_named(DISK_NAMED_WRITE, name, m, (x >> 30) % MIB);
	case 4:
		return rig_named(DISK_NAMED_READ, name, m, MIB);
	case 5:
		return rig_named(DISK_NAMED_REMOVE, name, NULL, 0);
	case 6:
		op = rig_file(DISK_LIST, 0, 0);
		op.op.list = list;
		return op;
	default:
		return rig_move(x & 16 ? DISK_READ : DISK_WRITE, file, 64 * KIB,
				(x >> 32) % 8 * 64 * KIB, m,
				(1 + (x >> 40) % 16) * 64 * KIB, 4 * KIB);
	}
}

/* Files come and go under what is read and written: each op ends, well or for want of
 * its file. */
static void ops_of_all_kinds_at_once_end(void **state)
{
	static struct rig_op ops[CROWD];
	static struct disk_list lists[CROWD];
	uint8_t *m = rig_memory(CROWD * MIB);
	uint64_t x = 88172645463325252u;
	unsigned int good = 0;
	struct disk_rig rig;

	rig_begin(&rig, *state);
	for (unsigned int i = 0; i < CROWD; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		ops[i] = crowd_op(x >> 3, m + i * MIB, &lists[i]);
		rig_submit(&rig, &ops[i]);
		if (i % 64 == 0)
			loop_turn(rig.loop, 0);
	}
	rig_all(&rig);
	for (unsigned int i = 0; i < CROWD; i++) {
		enum err_code code = ops[i].op.err.code;

		assert_true(ops[i].order > 0);
		assert_true(code == ERR_OK || code == ERR_NOTFOUND || code == ERR_EXIST);
		good += code == ERR_OK;
		disk_list_fini(&lists[i]);
	}
	assert_true(good > CROWD / 8);
	rig_end(&rig);
	rig_memory_free(m, CROWD * MIB);
}

int main(void)
{
	static const struct rig_case cases[] = {
#define CASE(fn) {#fn, fn}
		CASE(slab_written_reads_back),
		CASE(slabs_survive_reopen),
		CASE(slab_made_twice_or_missing_is_refused),
		CASE(read_past_the_end_is_a_fault),
		CASE(many_ops_in_flight_keep_apart),
		CASE(more_files_than_descriptors_are_served),
		CASE(reads_precede_writes),
		CASE(write_starts_during_reads),
		CASE(read_under_way_outlives_the_removal),
		CASE(named_is_written_and_read_whole),
		CASE(list_has_all_entries),
		CASE(hooks_run_off_the_loop_and_may_fail),
		CASE(ops_in_flight_end_when_it_closes),
		CASE(second_opener_is_refused),
		CASE(disk_freed_during_open_makes_no_callback),
		CASE(random_ops_match_a_model),
		CASE(ops_of_all_kinds_at_once_end),
#undef CASE
	};

	rig_add(cases, ARRAY_LEN(cases), disk_impls, DISK_IMPLS);
	return rig_run();
}
