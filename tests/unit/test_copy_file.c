/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy_file: bytes between files and every kind of memory, judged; files that end too
 * early, that may not be read or written, or are none; and a job that the kernel does not
 * finish (its memory is userfaultfd's) beside others, and under a cancel.
 */
#include "daemon/memory/copy_file.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "daemon/memory/copy.h"
#include "tests/lib/copy_rig.h"
#include "tests/lib/file.h"
#include "tests/lib/gates.h"
#include "tests/lib/stuck.h"
#include "tests/lib/tmp.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define WAIT_NS (20 * LOOP_NS_PER_S)
#define SLICE (64 * KIB) /* of files, 256 KiB */
#define AT 4096u	 /* where a region begins in its file */
#define BYTES (3 * MIB)
#define STUCK_BYTES (6 * MIB) /* more slices than a job has under way */

enum kind { FILE_KIND, LINEAR_KIND, VM_KIND, SHM_KIND, KINDS };

static struct plan *plan_all(uint64_t bytes)
{
	const struct plan_run run = {.len = bytes, .count = 1};

	return copy_rig_plan(&run, 1);
}

/* ---- ends ---- */

/* A file that nobody else has. */
static int file_new(int flags)
{
	char path[64];
	int fd, made = mkstemp(tmp_path(path, sizeof(path), "kvd-file-XXXXXX"));

	assert_true(made >= 0);
	fd = open(path, flags | O_CLOEXEC);
	assert_true(fd >= 0);
	unlink(path);
	close(made);
	return fd;
}

static struct memory *file_of(int fd, uint64_t offset, uint64_t length)
{
	struct memory *m = NULL;

	assert_int_equal(memory_import_file(fd, offset, length, getuid(), &m), 0);
	return m;
}

struct thing {
	enum kind kind;
	struct copy_buffer buffer;
	uint8_t *heap;
	int fd;
};

static void thing_new(struct thing *thing, enum kind kind)
{
	struct memory **m = &thing->buffer.memory;
	char name[40];

	*thing = (struct thing){.kind = kind, .buffer.length = BYTES, .fd = -1};
	switch (kind) {
	case FILE_KIND:
		thing->fd = file_new(O_RDWR);
		*m = file_of(thing->fd, AT, BYTES);
		break;
	case LINEAR_KIND:
		assert_int_equal(memory_new_linear(BYTES, m), 0);
		break;
	case VM_KIND:
		thing->heap = test_malloc(BYTES);
		assert_int_equal(
			vm_import_pid(getpid(), (uintptr_t)thing->heap, BYTES, m), 0);
		break;
	default:
		tmp_name(name, sizeof(name), "/kvd-copy-file");
		thing->fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
		assert_true(thing->fd >= 0);
		shm_unlink(name);
		assert_int_equal(file_fill(thing->fd, BYTES), 0);
		assert_int_equal(memory_import_shm_fd(thing->fd, 0, BYTES, true, m), 0);
	}
}

static void thing_free(struct thing *thing)
{
	memory_unref(thing->buffer.memory);
	test_free(thing->heap);
	mem_closep(&thing->fd);
}

static uint8_t *thing_mapped(struct thing *thing)
{
	return thing->heap ? thing->heap : thing->buffer.memory->base;
}

static void thing_write(struct thing *thing, const uint8_t *bytes)
{
	if (thing->kind == FILE_KIND)
		assert_int_equal(pwrite(thing->fd, bytes, BYTES, AT), BYTES);
	else
		memcpy(thing_mapped(thing), bytes, BYTES);
}

static void thing_expect(struct thing *thing, const uint8_t *bytes)
{
	uint8_t *got = test_malloc(BYTES);

	if (thing->kind == FILE_KIND)
		assert_int_equal(pread(thing->fd, got, BYTES, AT), BYTES);
	else
		memcpy(got, thing_mapped(thing), BYTES);
	assert_memory_equal(got, bytes, BYTES);
	test_free(got);
}

static void job_of(struct copy_rig_job *tj, struct copy_rig *t, const struct plan *plan,
		   struct copy_buffer *src, struct copy_buffer *dst)
{
	*tj = (struct copy_rig_job){.rig = t,
				    .job = {.plan = plan,
					    .end = plan->bytes,
					    .src = {.buffers = src, .buffer_count = 1},
					    .dst = {.buffers = dst, .buffer_count = 1},
					    .on_done = copy_rig_on_done}};
}

/* Small pages that are neighbours in the file, large ones, odd ones backwards. */
static const struct plan_run runs[] = {
	{.src = 0,
	 .dst = 4 * KIB,
	 .len = 4 * KIB,
	 .count = 100,
	 .src_stride = 8 * KIB,
	 .dst_stride = 4 * KIB},
	{.src = MIB, .dst = MIB, .len = 700001, .count = 1},
	{.src = 2 * MIB,
	 .dst = 2 * MIB + 300 * KIB,
	 .len = 333,
	 .count = 500,
	 .src_stride = 400,
	 .dst_stride = -333},
	{.src = 2 * MIB + 512 * KIB, .dst = 2 * MIB + 512 * KIB, .len = 5, .count = 1},
};

/* ---- bytes ---- */

static void move_and_check(enum kind from, enum kind to)
{
	struct plan *plan = copy_rig_plan(runs, ARRAY_LEN(runs));
	uint8_t *bytes = test_malloc(BYTES), *want = test_malloc(BYTES);
	struct thing src, dst;
	struct plan_walk walk;
	struct plan_span span;
	struct copy_rig_job tj;
	struct copy_rig t;

	copy_rig_setup(&t, 1, SLICE);
	thing_new(&src, from);
	thing_new(&dst, to);
	for (uint64_t i = 0; i < BYTES; i++)
		bytes[i] = copy_rig_pattern(i);
	memset(want, 0xee, BYTES);
	thing_write(&src, bytes);
	thing_write(&dst, want);
	job_of(&tj, &t, plan, &src.buffer, &dst.buffer);
	assert_int_equal(copier_submit(t.copier, &tj.job), 0);
	copy_rig_wait(&t, 1);
	assert_int_equal(tj.job.result, 0);
	assert_int_equal(atomic_load(&tj.job.copied), plan->bytes);
	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, UINT64_MAX, &span))
		memcpy(want + span.dst, bytes + span.src, span.len);
	thing_expect(&dst, want);
	copy_rig_teardown(&t);
	thing_free(&src);
	thing_free(&dst);
	plan_free(plan);
	test_free(bytes);
	test_free(want);
}

static void file_to_and_from_each_kind_is_exact(void **state)
{
	(void)state;
	for (int kind = 0; kind < KINDS; kind++) {
		move_and_check(FILE_KIND, (enum kind)kind);
		move_and_check((enum kind)kind, FILE_KIND);
	}
}

/* A table with files and memory: each row goes its own way. */
static void table_of_file_and_memory_is_exact(void **state)
{
	const struct plan_run mixed[] = {
		{.len = 4096, .count = 3, .src_stride = 4096, .dst_stride = 4096},
		{.src_buffer = 1, .dst = 16384, .len = 70000, .count = 1},
		{.src = 40000, .dst = 100000, .len = 1000, .count = 1},
	};
	struct plan *plan = copy_rig_plan(mixed, ARRAY_LEN(mixed));
	struct copy_buffer table[2];
	struct thing file, memory, dst;
	struct copy_rig_job tj;
	struct copy_rig t;
	uint8_t *bytes = test_malloc(BYTES);
	const uint8_t *got;

	(void)state;
	copy_rig_setup(&t, 1, SLICE);
	thing_new(&file, FILE_KIND);
	thing_new(&memory, LINEAR_KIND);
	thing_new(&dst, LINEAR_KIND);
	for (uint64_t i = 0; i < BYTES; i++)
		bytes[i] = copy_rig_pattern(i);
	thing_write(&file, bytes);
	thing_write(&memory, bytes);
	memset(memory.buffer.memory->base, 0xdd, BYTES);
	table[0] = file.buffer;
	table[1] = memory.buffer;
	job_of(&tj, &t, plan, table, &dst.buffer);
	tj.job.src.buffer_count = 2;
	assert_int_equal(copier_submit(t.copier, &tj.job), 0);
	copy_rig_wait(&t, 1);
	assert_int_equal(tj.job.result, 0);
	got = dst.buffer.memory->base;
	assert_memory_equal(got, bytes, 12288);
	for (uint64_t i = 0; i < 70000; i++)
		assert_int_equal(got[16384 + i], 0xdd);
	assert_memory_equal(got + 100000, bytes + 40000, 1000);
	copy_rig_teardown(&t);
	thing_free(&file);
	thing_free(&memory);
	thing_free(&dst);
	plan_free(plan);
	test_free(bytes);
}

/* Straight, where rows are whole blocks; the message says why where they are not. */
static void file_past_the_page_cache_moves_whole_blocks(void **state)
{
	struct plan *whole = plan_all(MIB), *odd = plan_all(1000);
	struct thing dst;
	struct copy_buffer src = {.length = MIB};
	struct copy_rig_job tj;
	struct copy_rig t;
	uint8_t *bytes = test_malloc(MIB);
	int fd = file_new(O_RDWR), direct;
	char path[40];

	(void)state;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	for (uint64_t i = 0; i < MIB; i++)
		bytes[i] = copy_rig_pattern(i);
	assert_int_equal(pwrite(fd, bytes, MIB, 0), MIB);
	assert_int_equal(fsync(fd), 0);
	direct = open(path, O_RDWR | O_DIRECT | O_CLOEXEC);
	if (direct < 0)
		skip(); /* a file system without */
	copy_rig_setup(&t, 1, SLICE);
	thing_new(&dst, LINEAR_KIND);
	src.memory = file_of(direct, 0, MIB);
	job_of(&tj, &t, whole, &src, &dst.buffer);
	assert_int_equal(copier_submit(t.copier, &tj.job), 0);
	copy_rig_wait(&t, 1);
	assert_int_equal(tj.job.result, 0);
	assert_memory_equal(dst.buffer.memory->base, bytes, MIB);
	job_of(&tj, &t, odd, &src, &dst.buffer);
	assert_int_equal(copier_submit(t.copier, &tj.job), 0);
	copy_rig_wait(&t, 2);
	assert_int_equal(tj.job.err.code, ERR_IO);
	assert_non_null(strstr(tj.job.err.text, "O_DIRECT"));
	copy_rig_teardown(&t);
	memory_unref(src.memory);
	thing_free(&dst);
	close(fd);
	close(direct);
	plan_free(whole);
	plan_free(odd);
	test_free(bytes);
}

/* ---- faults ---- */

static struct err fault_of(struct copy_buffer *src, struct copy_buffer *dst,
			   uint64_t bytes)
{
	struct plan *plan = plan_all(bytes);
	struct copy_rig_job tj;
	struct copy_rig t;
	struct err err = {0};

	copy_rig_setup(&t, 1, SLICE);
	job_of(&tj, &t, plan, src, dst);
	if (copier_submit(t.copier, &tj.job) < 0) {
		err_take(&err);
	} else {
		copy_rig_wait(&t, 1);
		assert_int_equal(tj.calls, 1);
		assert_true(tj.job.result < 0);
		err = tj.job.err;
	}
	copy_rig_teardown(&t);
	plan_free(plan);
	return err;
}

static void file_short_is_never_done(void **state)
{
	struct thing src, dst;
	uint8_t *bytes = test_calloc(1, BYTES);

	(void)state;
	thing_new(&src, FILE_KIND);
	for (int kind = LINEAR_KIND; kind < KINDS; kind++) {
		struct err err;

		thing_new(&dst, (enum kind)kind);
		thing_write(&src, bytes);
		assert_int_equal(ftruncate(src.fd, AT + BYTES - 1), 0);
		err = fault_of(&src.buffer, &dst.buffer, BYTES);
		assert_int_equal(err.code, ERR_IO);
		assert_non_null(strstr(err.text, "ends at"));
		assert_int_equal(ftruncate(src.fd, 0), 0);
		assert_int_equal(fault_of(&src.buffer, &dst.buffer, 1).code, ERR_IO);
		thing_free(&dst);
	}
	thing_free(&src);
	test_free(bytes);
}

static void file_of_other_rights_is_refused(void **state)
{
	struct thing memory;
	struct copy_buffer b = {.length = BYTES};
	int fd = file_new(O_WRONLY);

	(void)state;
	thing_new(&memory, LINEAR_KIND);
	b.memory = file_of(fd, 0, BYTES);
	assert_int_equal(fault_of(&b, &memory.buffer, 1).code, ERR_PERM);
	memory_unref(b.memory);
	close(fd);
	fd = file_new(O_RDONLY);
	b.memory = file_of(fd, 0, BYTES);
	assert_int_equal(fault_of(&memory.buffer, &b, 1).code, ERR_PERM);
	memory_unref(b.memory);
	close(fd);
	/* it may no longer */
	fd = memfd_create("sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	b.memory = file_of(fd, 0, BYTES);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE), 0);
	assert_int_equal(fault_of(&memory.buffer, &b, 1).code, ERR_PERM);
	memory_unref(b.memory);
	close(fd);
	thing_free(&memory);
}

/* What a disk that is full says, by a file system's own limit. */
static void file_without_room_is_a_limit(void **state)
{
	struct copy_buffer b = {.length = MIB};
	struct thing memory;
	int fd = memfd_create("grown", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	int disk = file_new(O_RDWR);

	(void)state;
	thing_new(&memory, LINEAR_KIND);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_GROW), 0);
	b.memory = file_of(fd, 0, MIB);
	assert_int_equal(fault_of(&memory.buffer, &b, MIB).code, ERR_PERM);
	memory_unref(b.memory);
	b.memory = file_of(disk, INT64_MAX - MIB, MIB);
	assert_int_equal(fault_of(&memory.buffer, &b, MIB).code, ERR_LIMIT);
	memory_unref(b.memory);
	close(fd);
	close(disk);
	thing_free(&memory);
}

static void refused(int fd, uint64_t offset, uint64_t length, enum err_code code)
{
	struct memory *m = NULL;

	assert_true(memory_import_file(fd, offset, length, getuid(), &m) < 0);
	assert_int_equal(err_last()->code, code);
	assert_null(m);
	err_clear();
}

static void file_of_wrong_type_is_refused(void **state)
{
	int fd, pair[2];

	(void)state;
	assert_int_equal(pipe2(pair, O_CLOEXEC), 0);
	refused(pair[0], 0, 1, ERR_IMPORT);
	close(pair[0]);
	close(pair[1]);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	refused(pair[0], 0, 1, ERR_IMPORT);
	close(pair[0]);
	close(pair[1]);
	fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	refused(fd, 0, 1, ERR_IMPORT);
	close(fd);
	fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	refused(fd, 0, 1, ERR_IMPORT);
	close(fd);
	fd = open("/dev/zero", O_RDWR | O_CLOEXEC);
	refused(fd, 0, 1, ERR_IMPORT);
	close(fd);
	fd = open("/tmp", O_PATH | O_CLOEXEC);
	refused(fd, 0, 1, ERR_IMPORT);
	close(fd);
	fd = file_new(O_RDWR | O_APPEND);
	refused(fd, 0, 1, ERR_IMPORT);
	close(fd);
	fd = file_new(O_RDWR);
	refused(fd, 0, 0, ERR_RANGE);
	refused(fd, INT64_MAX, 1, ERR_RANGE);
	refused(fd, UINT64_MAX, 1, ERR_RANGE);
	refused(fd, 1, UINT64_MAX, ERR_RANGE);
	close(fd);
	refused(-1, 0, 1, ERR_IMPORT);
}

static void no_memory_for_a_job_fails_it_alone(void **state)
{
	struct plan *plan = plan_all(BYTES);
	struct thing src, dst;
	struct copy_rig_job tj;
	struct copy_rig t;
	uint8_t *bytes = test_calloc(1, BYTES);
	unsigned int refusals = 0;

	(void)state;
	copy_rig_setup(&t, 1, SLICE);
	thing_new(&src, FILE_KIND);
	thing_new(&dst, LINEAR_KIND);
	thing_write(&src, bytes);
	for (uint64_t n = 1;; n++) {
		int r;

		job_of(&tj, &t, plan, &src.buffer, &dst.buffer);
		mem_fail_at(n);
		r = copier_submit(t.copier, &tj.job);
		mem_fail_at(0);
		if (r == 0)
			break;
		assert_int_equal(err_last()->code, ERR_NOMEM);
		assert_int_equal(tj.calls, 0);
		err_clear();
		refusals++;
	}
	assert_true(refusals >= 5); /* the threads, a user, the first thread's parts */
	copy_rig_wait(&t, 1);
	assert_int_equal(tj.job.result, 0);
	copy_rig_teardown(&t);
	thing_free(&src);
	thing_free(&dst);
	plan_free(plan);
	test_free(bytes);
}

/* ---- what does not end by itself ---- */

static void stuck_job_holds_up_itself_alone_and_is_not_canceled_before(void **state)
{
	struct plan *plan = plan_all(STUCK_BYTES), *small = plan_all(MIB);
	struct copy_buffer from = {.length = STUCK_BYTES}, to = from;
	struct copy_rig_job stuck, other;
	struct thing src, dst;
	struct copy_rig t;
	uint8_t *bytes = test_calloc(1, BYTES);
	int uffd, fd;

	(void)state;
	assert_int_equal(memory_new_empty(STUCK_BYTES, &to.memory), 0);
	uffd = stuck_begin(to.memory->base, STUCK_BYTES);
	if (uffd < 0) {
		memory_unref(to.memory);
		test_free(bytes);
		plan_free(plan);
		plan_free(small);
		skip(); /* userfaultfd that waits for the kernel's own accesses */
	}
	copy_rig_setup(&t, 1, SLICE);
	thing_new(&src, FILE_KIND);
	thing_new(&dst, LINEAR_KIND);
	thing_write(&src, bytes);
	fd = file_new(O_RDWR);
	assert_int_equal(ftruncate(fd, STUCK_BYTES), 0);
	from.memory = file_of(fd, 0, STUCK_BYTES);
	job_of(&stuck, &t, plan, &from, &to);
	assert_int_equal(copier_submit(t.copier, &stuck.job), 0);
	assert_int_equal(stuck_wait(uffd, (int)(WAIT_NS / LOOP_NS_PER_MS)), 1);
	for (unsigned int i = 1; i <= 8; i++) {
		job_of(&other, &t, small, &src.buffer, &dst.buffer);
		assert_int_equal(copier_submit(t.copier, &other.job), 0);
		copy_rig_wait(&t, i);
		assert_int_equal(other.job.result, 0);
	}
	copier_cancel(t.copier, &stuck.job);
	copier_cancel(t.copier, &stuck.job);
	loop_turn(t.loop, 50 * LOOP_NS_PER_MS);
	assert_int_equal(stuck.calls, 0); /* the kernel may still write there */
	assert_int_equal(stuck_end(uffd, to.memory->base, STUCK_BYTES), 0);
	copy_rig_wait(&t, 9);
	assert_int_equal(stuck.calls, 1);
	assert_int_equal(stuck.job.err.code, ERR_CANCELED);
	copy_rig_teardown(&t);
	memory_unref(from.memory);
	memory_unref(to.memory);
	close(fd);
	plan_free(small);
	thing_free(&src);
	thing_free(&dst);
	plan_free(plan);
	test_free(bytes);
}

/* Many at once: each is told once, whatever became of it. */
static void cancels_at_any_time_complete_once(void **state)
{
	struct plan *plan = plan_all(BYTES);
	static struct copy_rig_job jobs[64];
	struct thing src, dst;
	struct copy_rig t;
	uint8_t *bytes = test_calloc(1, BYTES);

	(void)state;
	copy_rig_setup(&t, 1, SLICE);
	thing_new(&src, FILE_KIND);
	thing_new(&dst, VM_KIND);
	thing_write(&src, bytes);
	for (unsigned int i = 0; i < ARRAY_LEN(jobs); i++) {
		job_of(&jobs[i], &t, plan, &src.buffer, &dst.buffer);
		assert_int_equal(copier_submit(t.copier, &jobs[i].job), 0);
		if (i % 3)
			copier_cancel(t.copier, &jobs[i - i % 2].job);
	}
	copy_rig_wait(&t, ARRAY_LEN(jobs));
	for (unsigned int i = 0; i < ARRAY_LEN(jobs); i++) {
		assert_int_equal(jobs[i].calls, 1);
		assert_true(jobs[i].job.result == 0 ||
			    jobs[i].job.err.code == ERR_CANCELED);
	}
	/* and those that are there at the end */
	for (unsigned int i = 0; i < ARRAY_LEN(jobs); i++) {
		job_of(&jobs[i], &t, plan, &src.buffer, &dst.buffer);
		assert_int_equal(copier_submit(t.copier, &jobs[i].job), 0);
	}
	copy_rig_teardown(&t);
	for (unsigned int i = 0; i < ARRAY_LEN(jobs); i++)
		assert_int_equal(jobs[i].calls, 1);
	thing_free(&src);
	thing_free(&dst);
	plan_free(plan);
	test_free(bytes);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(file_to_and_from_each_kind_is_exact),
		cmocka_unit_test(table_of_file_and_memory_is_exact),
		cmocka_unit_test(file_past_the_page_cache_moves_whole_blocks),
		cmocka_unit_test(file_short_is_never_done),
		cmocka_unit_test(file_of_other_rights_is_refused),
		cmocka_unit_test(file_without_room_is_a_limit),
		cmocka_unit_test(file_of_wrong_type_is_refused),
		cmocka_unit_test(no_memory_for_a_job_fails_it_alone),
		cmocka_unit_test(
			stuck_job_holds_up_itself_alone_and_is_not_canceled_before),
		cmocka_unit_test(cancels_at_any_time_complete_once),
	};

	(void)test_warden(); /* before threads */
	return cmocka_run_group_tests(tests, NULL, NULL);
}
