/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk_rig: a disk of each kind in a directory of its own, and its ops waited for.
 */
#ifndef KVD_TESTS_DISK_RIG_H
#define KVD_TESTS_DISK_RIG_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/store/disk.h"
#include "tests/lib/disk_sim.h"

struct disk_impl {
	const char *name;
	bool cached, simulated;
};
/* Threads past the page cache and by it, and the simulated one. */
#define DISK_IMPLS 3u
extern const struct disk_impl disk_impls[DISK_IMPLS];

#define RIG_CAPACITY (UINT64_C(256) << 20) /* of a simulated disk */

struct disk_rig {
	const struct disk_impl *impl;
	struct loop *loop;
	struct disk_sim *sim; /* NULL: a real one */
	char path[64];
	struct disk_args args;
	struct disk *disk;
	bool opened; /* or failed: */
	struct err why;
	unsigned int dones;
};

struct rig_op {
	struct disk_op op;
	struct disk_rig *rig;
	unsigned int order; /* 1: its `done` was the first of the rig's; 0: not yet */
};

void rig_begin(struct disk_rig *rig, const struct disk_impl *impl);
void rig_begin_at(struct disk_rig *rig, const struct disk_impl *impl, const char *path);
void rig_end(struct disk_rig *rig); /* nothing is left in the directory but files */
/* Opens; rig->why tells of a fault, which is not one of the test's. */
void rig_open(struct disk_rig *rig);
void rig_close(struct disk_rig *rig); /* and frees */
void rig_remove(const char *path);    /* the directory with its files */
void rig_turn(struct disk_rig *rig);
/* Turns until it is no zero. A minute at most. */
void rig_until(struct disk_rig *rig, const unsigned int *flag);
void rig_all(struct disk_rig *rig); /* until nothing is in flight */

/* Its hooks are set before. */
void rig_submit(struct disk_rig *rig, struct rig_op *op);
int rig_do(struct disk_rig *rig, struct rig_op *op);	/* its result */
void rig_good(struct disk_rig *rig, struct rig_op *op); /* must be 0 */
void rig_bad(struct disk_rig *rig, struct rig_op *op, enum err_code code,
	     const char *words);

struct rig_op rig_make(uint32_t number, uint64_t slot_bytes, uint64_t bytes);
struct rig_op rig_file(enum disk_what what, uint32_t number, uint64_t slot_bytes);
/* READ or WRITE: `head` bytes in the first part of the memory, the rest in the second. */
struct rig_op rig_move(enum disk_what what, uint32_t number, uint64_t slot_bytes,
		       uint64_t offset, void *memory, uint64_t bytes, uint64_t head);
struct rig_op rig_named(enum disk_what what, const char *name, void *memory,
			uint64_t bytes);

/* Pages, zeroed. */
void *rig_memory(uint64_t bytes);
void rig_memory_free(void *memory, uint64_t bytes);
/* Content that follows from `id`: 4 KiB blocks tell whose they are and which. */
void rig_fill(void *memory, uint64_t bytes, uint64_t id);
bool rig_is(const void *memory, uint64_t bytes, uint64_t id);

/* Cases to be run, each for each of some kinds, named "case [kind]"; *state is the kind.
 */
struct rig_case {
	const char *name;
	void (*run)(void **state);
};
void rig_add(const struct rig_case *cases, size_t count, const struct disk_impl *impls,
	     size_t impl_count);
int rig_run(void); /* for main() to return */

#endif
