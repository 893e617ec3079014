/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files_world: a store whose files lie on a simulated disk, and nothing else of a daemon.
 *
 * Instead of rooms the test fills parts, and judges them: what a part holds follows from
 * its kind and its id. Kinds are the classes that there are: of which user, of which
 * space, how large, which rank's.
 */
#ifndef KVD_TESTS_FILES_FW_H
#define KVD_TESTS_FILES_FW_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/session/region.h"
#include "daemon/store/files_impl.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "tests/lib/disk_sim.h"

#define FW_KINDS 5u
#define FW_TOKENS 16u
#define KIB UINT64_C(1024)
#define MIB (KIB * KIB)

/* Of 4, 4, 8, 4, 16 KiB. The first two are two ranks of one space; the third another
 * space of the same user, the rest another user's. */
enum fw_kind { KIND_A, KIND_A_RANK, KIND_B, KIND_OTHER, KIND_LARGE };

struct fw_args {
	uint64_t seed;
	uint64_t memory_slab, file_slab;   /* bytes, of ARENA_SLABS; 0: 16 and 40 KiB */
	uint32_t memory_slabs, file_slabs; /* that may be in use; 0: all */
	uint64_t capacity;		   /* of the disk; 0: there is enough */
};

struct files_world {
	struct fw_args args;
	struct kvd kvd;
	struct config config;
	struct loop *loop;
	struct disk_sim *sim;
	struct store *store; /* NULL: it does not run */
	struct disk *disk;   /* the store's files' */
	uint8_t *memory;
	struct region region; /* which is that memory: who pins it? */
	struct canon *canons[FW_KINDS];
	struct list moves; /* struct fw_move.link */
	struct disk *raw;
	int64_t live; /* mem_live() before */
};

/* A put or a fetch, as far as files see it: woken by store_wake() alone. */
enum fw_state { MOVE_WAITS, MOVE_GOOD, MOVE_NOT };
struct fw_move {
	struct list link;
	struct store_waiter wait; /* in store->waiters */
	struct loop_defer step;
	struct files_world *world;
	struct store_chunk *chunk; /* pinned until it ends */
	enum fw_kind kind;
	uint32_t id;
	bool fetch;
	enum fw_state state;
};

/* ---- life ---- */

void fw_begin(struct files_world *w, const struct fw_args *args);
void fw_end(struct files_world *w); /* stops it, and nothing is left over */
/* The store as its module makes it, over what the disk has. */
void fw_start(struct files_world *w);
/* As its session's end and the daemon's do. False: it does not come to an end; then
 * fw_abandon(). */
bool fw_close(struct files_world *w);
void fw_stop(struct files_world *w); /* closed, and freed */
/* Closed with ops that hang: they are ended by hand, as nobody writes memory any more. */
void fw_abandon(struct files_world *w);
void fw_power_loss(struct files_world *w); /* and the daemon is gone with it */
void fw_scanned(struct files_world *w);	   /* turns until it is */
void fw_turn(struct files_world *w);
void fw_quiet(struct files_world *w); /* turns until no job is left */
void fw_wait(struct files_world *w, uint64_t ns);
struct store_files fw_figures(const struct files_world *w);
void fw_fault(struct files_world *w, enum disk_sim_trouble trouble, enum disk_what what,
	      uint64_t count);

/* What somebody else does to the directory while the store does not run. */
void fw_raw_begin(struct files_world *w);
void fw_raw_end(struct files_world *w);
int fw_raw(struct files_world *w, struct disk_op *op); /* waited for: its result */

/* ---- content ---- */

uint64_t fw_part_bytes(enum fw_kind kind);
uint64_t fw_slot_bytes(enum fw_kind kind); /* in a file */
void fw_fill(void *memory, enum fw_kind kind, uint32_t id);
bool fw_is(const void *memory, enum fw_kind kind, uint32_t id);
void fw_id(uint32_t id, uint8_t bytes[STORE_ID_BYTES]);
uint32_t fw_id_of(const struct store_chunk *chunk);
enum fw_kind fw_kind_of(const struct store_class *class);
uint32_t fw_tokens(uint32_t id); /* each seventh chunk is a short one */

/* ---- chunks ---- */

int fw_class(struct files_world *w, enum fw_kind kind, struct store_class **class_p);
/* NULL: it is not in the index, or has no such part. */
struct store_chunk *fw_chunk(struct files_world *w, enum fw_kind kind, uint32_t id);
struct store_part *fw_part(struct files_world *w, enum fw_kind kind, uint32_t id);
struct store_part *fw_part_of(const struct store_chunk *chunk, enum fw_kind kind);
/* Begins to fill a part, which is pinned by that. Outcome 1: it is there already. */
int fw_put_begin(struct files_world *w, enum fw_kind kind, uint32_t id,
		 struct store_part **part_p);
void fw_put_end(struct store_part *part);  /* it is full */
void fw_put_fail(struct store_part *part); /* it will not be */
/* Both at once; the part must not be there. */
void fw_put(struct files_world *w, enum fw_kind kind, uint32_t id);
void fw_find(struct files_world *w, enum fw_kind kind, uint32_t id); /* a hit */
uint32_t fw_drop(struct files_world *w, enum fw_kind kind, uint32_t id);
/* Leaves the memory, or the files. False: it is in use. */
bool fw_forget(struct files_world *w, enum fw_kind kind, uint32_t id);
bool fw_unfile(struct files_world *w, enum fw_kind kind, uint32_t id);

/* ---- moves ---- */

/* What is there is to last; NULL: nothing is there. */
struct fw_move *fw_durable(struct files_world *w, enum fw_kind kind, uint32_t id);
/* What is there is to be in memory, and is judged when it is; NULL: nothing is there, or
 * no room for it. */
struct fw_move *fw_fetch(struct files_world *w, enum fw_kind kind, uint32_t id);
void fw_move_end(struct fw_move *move); /* whatever its state */
/* Turns until it is over, and ends it. */
enum fw_state fw_await(struct files_world *w, struct fw_move *move);
/* Both in one; of what is not there MOVE_NOT. */
enum fw_state fw_lasts(struct files_world *w, enum fw_kind kind, uint32_t id);
enum fw_state fw_loads(struct files_world *w, enum fw_kind kind, uint32_t id);

#endif
