/* SPDX-License-Identifier: Apache-2.0 */
/* Real disks have a real loop, simulated ones a virtual loop; cases see no difference. */
#include "tests/lib/disk_rig.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "tests/lib/tmp.h"

#define PATIENCE_NS (UINT64_C(60) * LOOP_NS_PER_S)
#define CASES_MAX 256u

const struct disk_impl disk_impls[DISK_IMPLS] = {
	{.name = "threads"},
	{.name = "threads, cached", .cached = true},
	{.name = "simulated", .simulated = true},
};

/* ---- life ---- */

static void on_open(void *arg, struct disk *disk, const struct err *why)
{
	struct disk_rig *rig = arg;

	assert_ptr_equal(disk, rig->disk);
	assert_false(rig->opened);
	rig->opened = true;
	rig->why.code = ERR_OK;
	if (why)
		rig->why = *why;
}

void rig_open(struct disk_rig *rig)
{
	uint64_t until = clock_ns() + PATIENCE_NS;
	int r;

	rig->opened = false;
	r = rig->sim ? disk_sim_open(rig->sim, rig->loop, &rig->args, &rig->disk)
		     : disk_open(rig->loop, &rig->args, &rig->disk);
	assert_int_equal(r, 0);
	while (!rig->opened) {
		rig_turn(rig);
		assert_true(clock_ns() < until);
	}
}

void rig_begin_at(struct disk_rig *rig, const struct disk_impl *impl, const char *path)
{
	*rig = (struct disk_rig){
		.impl = impl,
		.args = {.cached = impl->cached, .on_open = on_open, .arg = rig}};
	snprintf(rig->path, sizeof(rig->path), "%s", path);
	rig->args.path = rig->path;
	if (impl->simulated) {
		assert_int_equal(loop_new_virtual(1, &rig->loop), 0);
		assert_int_equal(disk_sim_new(7, RIG_CAPACITY, &rig->sim), 0);
	} else {
		assert_int_equal(loop_new(&rig->loop), 0);
	}
	rig_open(rig);
	assert_string_equal(rig->why.code ? rig->why.text : "", "");
}

void rig_begin(struct disk_rig *rig, const struct disk_impl *impl)
{
	char path[64];

	assert_non_null(mkdtemp(tmp_path(path, sizeof(path), "disk-XXXXXX")));
	rig_begin_at(rig, impl, path);
}

void rig_close(struct disk_rig *rig)
{
	assert_int_equal(disk_free(rig->disk), 0);
	rig->disk = NULL;
}

void rig_remove(const char *path)
{
	DIR *dir = opendir(path);
	struct dirent *entry;

	if (!dir)
		return;
	while ((entry = readdir(dir)))
		(void)unlinkat(dirfd(dir), entry->d_name, 0);
	closedir(dir);
	(void)rmdir(path);
}

void rig_end(struct disk_rig *rig)
{
	if (rig->disk)
		rig_close(rig);
	disk_sim_free(rig->sim);
	loop_free(rig->loop);
	rig_remove(rig->path);
}

/* ---- waiting ---- */

void rig_turn(struct disk_rig *rig)
{
	loop_turn(rig->loop, 10 * LOOP_NS_PER_MS);
}

void rig_until(struct disk_rig *rig, const unsigned int *flag)
{
	uint64_t until = clock_ns() + PATIENCE_NS;

	while (!__atomic_load_n(flag, __ATOMIC_ACQUIRE)) {
		rig_turn(rig);
		assert_true(clock_ns() < until);
	}
}

void rig_all(struct disk_rig *rig)
{
	uint64_t until = clock_ns() + PATIENCE_NS;
	struct disk_figures figures;

	for (;;) {
		disk_figures(rig->disk, &figures);
		if (figures.in_flight == 0)
			return;
		rig_turn(rig);
		assert_true(clock_ns() < until);
	}
}

static void on_done(struct disk_op *op)
{
	struct rig_op *rop = container_of(op, struct rig_op, op);

	assert_int_equal(rop->order, 0);
	assert_int_equal(op->result < 0, op->err.code != ERR_OK);
	rop->order = ++rop->rig->dones;
}

void rig_submit(struct disk_rig *rig, struct rig_op *op)
{
	op->rig = rig;
	op->order = 0;
	op->op.done = on_done;
	disk_submit(rig->disk, &op->op);
	assert_int_equal(op->order, 0); /* never from inside */
}

int rig_do(struct disk_rig *rig, struct rig_op *op)
{
	rig_submit(rig, op);
	rig_until(rig, &op->order);
	return op->op.result;
}

void rig_good(struct disk_rig *rig, struct rig_op *op)
{
	if (rig_do(rig, op) < 0)
		fail_msg("%s", op->op.err.text);
}

void rig_bad(struct disk_rig *rig, struct rig_op *op, enum err_code code,
	     const char *words)
{
	assert_true(rig_do(rig, op) < 0);
	if (op->op.err.code != code || !strstr(op->op.err.text, words))
		fail_msg("%s: %s", err_name(op->op.err.code), op->op.err.text);
}

/* ---- ops ---- */

struct rig_op rig_file(enum disk_what what, uint32_t number, uint64_t slot_bytes)
{
	return (struct rig_op){
		.op = {.what = what,
		       .file = {.slot_bytes = slot_bytes, .number = number}}};
}

struct rig_op rig_make(uint32_t number, uint64_t slot_bytes, uint64_t bytes)
{
	struct rig_op op = rig_file(DISK_MAKE, number, slot_bytes);

	op.op.bytes = bytes;
	return op;
}

struct rig_op rig_move(enum disk_what what, uint32_t number, uint64_t slot_bytes,
		       uint64_t offset, void *memory, uint64_t bytes, uint64_t head)
{
	struct rig_op op = rig_file(what, number, slot_bytes);

	op.op.offset = offset;
	op.op.iov[0] = (struct iovec){memory, head < bytes ? head : bytes};
	if (head < bytes)
		op.op.iov[1] = (struct iovec){(char *)memory + head, bytes - head};
	return op;
}

struct rig_op rig_named(enum disk_what what, const char *name, void *memory,
			uint64_t bytes)
{
	return (struct rig_op){
		.op = {.what = what, .name = name, .iov = {{memory, bytes}}}};
}

/* ---- content ---- */

void *rig_memory(uint64_t bytes)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	assert_true(memory != MAP_FAILED);
	return memory;
}

void rig_memory_free(void *memory, uint64_t bytes)
{
	munmap(memory, bytes);
}

static uint64_t word_of(uint64_t id, uint64_t i)
{
	uint64_t x = (id + 1) * UINT64_C(0x9e3779b97f4a7c15) + i;

	x ^= x >> 32;
	x *= UINT64_C(0xd6e8feb86659fd93);
	return x ^ x >> 29;
}

void rig_fill(void *memory, uint64_t bytes, uint64_t id)
{
	uint64_t *words = memory;

	for (uint64_t i = 0; i < bytes / sizeof(*words); i++)
		words[i] = word_of(id, i);
}

bool rig_is(const void *memory, uint64_t bytes, uint64_t id)
{
	const uint64_t *words = memory;

	for (uint64_t i = 0; i < bytes / sizeof(*words); i++)
		if (words[i] != word_of(id, i))
			return false;
	return true;
}

/* ---- cases ---- */

static struct CMUnitTest tests[CASES_MAX];
static char names[CASES_MAX][96];
static size_t test_count;

void rig_add(const struct rig_case *cases, size_t count, const struct disk_impl *impls,
	     size_t impl_count)
{
	assert(test_count + count * impl_count <= CASES_MAX);
	for (size_t i = 0; i < impl_count; i++) {
		for (size_t j = 0; j < count; j++, test_count++) {
			char *name = names[test_count];

			snprintf(name, sizeof(names[0]), "%s [%s]", cases[j].name,
				 impls[i].name);
			tests[test_count] =
				(struct CMUnitTest){.name = name,
						    .test_func = cases[j].run,
						    .initial_state = (void *)&impls[i]};
		}
	}
}

int rig_run(void)
{
	return _cmocka_run_group_tests("disk", tests, test_count, NULL, NULL);
}
