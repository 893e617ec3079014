/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk in a process that has given up system calls, each in a child: the daemon's
 * sandbox, entered behind the opening as kvd does, or before.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/gate/sandbox.h"
#include "daemon/loop/loop.h"
#include "tests/lib/disk_rig.h"
#include "tests/lib/tmp.h"

#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)

enum bar { BAR_SANDBOX_LATER, BAR_SANDBOX_FIRST };

static int bar_now(enum bar bar, const char *path, bool opened)
{
	const char *const places[] = {path, NULL};

	switch (bar) {
	case BAR_SANDBOX_LATER:
		return opened ? sandbox_enter(SANDBOX_MAIN) : sandbox_files(places);
	case BAR_SANDBOX_FIRST:
		return opened			   ? 0
		       : sandbox_files(places) < 0 ? -1
						   : sandbox_enter(SANDBOX_MAIN);
	}
	return -1;
}

#define CHILD_OPS 64u
#define CHILD_SLOT (3 * MIB)

static bool child_moves(struct disk_rig *rig, enum disk_what what, uint8_t *m)
{
	static struct rig_op ops[CHILD_OPS];

	for (unsigned int i = 0; i < CHILD_OPS; i++) {
		ops[i] = rig_move(what, 1, CHILD_SLOT, i % 8 * CHILD_SLOT,
				  m + i % 8 * CHILD_SLOT, CHILD_SLOT, 4 * KIB);
		rig_submit(rig, &ops[i]);
	}
	rig_all(rig);
	for (unsigned int i = 0; i < CHILD_OPS; i++) {
		if (ops[i].op.result < 0) {
			fprintf(stderr, "%s\n", ops[i].op.err.text);
			return false;
		}
	}
	return true;
}

static bool child_does(struct disk_rig *rig, struct rig_op op)
{
	bool good = rig_do(rig, &op) == 0;

	if (!good)
		fprintf(stderr, "%u: %s\n", op.op.what, op.op.err.text);
	return good;
}

static bool child_all(struct disk_rig *rig)
{
	uint8_t *m = rig_memory(8 * CHILD_SLOT);
	struct disk_list list;
	struct rig_op listing = rig_file(DISK_LIST, 0, 0);
	bool good;

	listing.op.list = &list;
	good = child_does(rig, rig_make(1, CHILD_SLOT, 8 * CHILD_SLOT));
	for (unsigned int i = 0; i < 8; i++)
		rig_fill(m + i * CHILD_SLOT, CHILD_SLOT, i);
	good = good && child_moves(rig, DISK_WRITE, m) &&
	       child_does(rig, rig_file(DISK_SYNC, 1, CHILD_SLOT)) &&
	       child_does(rig, rig_named(DISK_NAMED_WRITE, "c", m, MIB)) &&
	       child_does(rig, rig_named(DISK_NAMED_READ, "c", m, MIB)) &&
	       child_does(rig, listing) &&
	       child_does(rig, rig_named(DISK_NAMED_REMOVE, "c", NULL, 0));
	memset(m, 0, 8 * CHILD_SLOT);
	good = good && child_moves(rig, DISK_READ, m);
	for (unsigned int i = 0; i < 8; i++)
		good = good && rig_is(m + i * CHILD_SLOT, CHILD_SLOT, i);
	good = good && child_does(rig, rig_file(DISK_REMOVE, 1, CHILD_SLOT));
	if (good)
		disk_list_fini(&list);
	rig_memory_free(m, 8 * CHILD_SLOT);
	return good;
}

/* 0: all is well; 77: has no sandbox */
static int child_run(enum bar bar, const char *path)
{
	struct disk_rig rig;
	bool good;

	if (sandbox_prepare(true) < 0)
		return 2;
	if (!*sandbox_words())
		return 77;
	if (bar_now(bar, path, false) < 0)
		return 3;
	rig_begin_at(&rig, &disk_impls[0], path);
	if (bar_now(bar, path, true) < 0)
		return 4;
	good = child_all(&rig);
	return good && disk_free(rig.disk) == 0 ? 0 : 5;
}

static void judge_child(enum bar bar)
{
	char path[64];
	int status = -1;
	pid_t pid;

	assert_non_null(mkdtemp(tmp_path(path, sizeof(path), "disk-XXXXXX")));
	pid = fork();
	if (pid == 0)
		_exit(child_run(bar, path));
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_true(WIFEXITED(status));
	rig_remove(path);
	if (WEXITSTATUS(status) == 77) {
		print_message("needs a sandbox: seccomp, and no sanitizer\n");
		skip();
	}
	assert_int_equal(WEXITSTATUS(status), 0);
}

static void disk_serves_in_the_sandbox(void **state)
{
	(void)state;
	judge_child(BAR_SANDBOX_LATER);
}

static void disk_opened_in_the_sandbox_serves(void **state)
{
	(void)state;
	judge_child(BAR_SANDBOX_FIRST);
}

int main(void)
{
	static const struct rig_case cases[] = {
#define CASE(fn) {#fn, fn}
		CASE(disk_serves_in_the_sandbox),
		CASE(disk_opened_in_the_sandbox_serves),
#undef CASE
	};

	rig_add(cases, ARRAY_LEN(cases), disk_impls, 1);
	return rig_run();
}
