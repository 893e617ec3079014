/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu_copy: a copier, the tests' driver with two GPUs, and engine memory of every kind
 * at either end; for the tests of copies with GPUs in them.
 */
#ifndef KVD_TESTS_GPU_COPY_H
#define KVD_TESTS_GPU_COPY_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/loop/loop.h"
#include "daemon/memory/copy.h"
#include "gpu/gpu.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"

#define GC_BYTES (UINT64_C(2) << 20)
#define GC_FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

/* The kinds of memory that an engine may have. */
enum place {
	PLACE_GPU0,
	PLACE_GPU1,
	PLACE_VMM,
	PLACE_MEMFD,
	PLACE_SHM,
	PLACE_VM,
	PLACES
};

/* engine memory, and the test's way to see it */
struct gc_spot {
	struct gpu_owner owner;
	uint8_t *view;
	int fd;
};

struct gc {
	struct gpu *gpu;
	struct loop *loop;
	struct copier *copier;
	struct gc_spot spots[2][PLACES]; /* source and destination of each kind */
	struct copy_job job;
	bool done;
	bool kernels;
	int image; /* what the fake driver takes for kernels */
};

/* Imports, as the buffers of a job. */
struct gc_tables {
	struct memory *memories[2][PLACES];
	struct copy_buffer buffers[2][PLACES];
};

int gc_start(void **state);	    /* copy engines alone */
int gc_start_kernels(void **state); /* kernels for the short rows */
int gc_stop(void **state);
/* No thread has one of the devices any more: its context goes with its last memory. */
void gc_settle(struct gc *t);
void gc_settle_device(struct gc *t, unsigned int device);
int gc_spot_import(struct gc *t, struct gc_spot *spot, enum place place, bool writable,
		   struct memory **memory_p);
/* Rows in many forms, each buffer of the tables in turn. */
struct plan *gc_plan_mixed(uint32_t buffers);
/* `all`: each kind is a buffer; else these two are the only ones. */
int gc_tables_make(struct gc *t, const enum place places[2], bool all,
		   struct gc_tables *tables);
void gc_tables_free(struct gc_tables *tables);
void gc_on_done(struct copy_job *job); /* sets gc.done, of gc.job */
int gc_job_run(struct gc *t, const struct plan *plan, struct gc_tables *tables,
	       uint32_t buffers);
void gc_wipe(struct gc *t); /* every destination */
void gc_assert_moved(struct gc *t, const struct plan *plan, const enum place places[2],
		     bool all);

#endif
