/* SPDX-License-Identifier: Apache-2.0 */
/* files_impl: shared by files.c (writing, reading), files_room.c (free space),
 * files_scan.c (the start) and files_class.c (descriptions of classes). */
#ifndef KVD_STORE_FILES_IMPL_H
#define KVD_STORE_FILES_IMPL_H

#include "daemon/base/idmap.h"
#include "daemon/loop/loop.h"
#include "daemon/store/arena.h"
#include "daemon/store/disk.h"
#include "daemon/store/files.h"
#include "daemon/store/seal.h"
#include "daemon/store/store_figures.h"

struct files_scan;
struct region;

#define FILES_RETRY_NS (60 * LOOP_NS_PER_S) /* after "no space left" and the like */
#define FILES_LOOK_NS (10 * LOOP_NS_PER_S)  /* interval of checks of the free space */

/* A slab's file. */
struct slab_file {
	struct files *files;
	uint32_t number;
	uint64_t actual;       /* slot bytes of the present file; 0: none */
	uint64_t owner;	       /* arena_slab_owner() when it was made */
	uint32_t syncs_failed; /* of that file */
	bool busy;	       /* made or removed */
	struct list waiting;   /* jobs, until it is there */
	struct list unsynced;  /* durable jobs: written, no sync has started since */
	struct list syncing;   /* of which one has */
	struct disk_op op, sync;
};

struct files {
	struct store *store;
	struct disk *disk;
	struct arena *arena;
	uint64_t bytes;
	bool open, memory, closed, scanned, readonly;
	struct err why;
	struct slab_file slabs[ARENA_SLABS];
	struct list queue; /* jobs that are to be written */
	unsigned int queued, jobs;
	uint64_t queued_bytes, flying_bytes;
	uint64_t generation;  /* of the newest part that was written, or found */
	struct strmap words;  /* struct class_words, by their names */
	struct disk_op space; /* queries the file system's free space */
	bool space_asked;
	uint64_t room;	    /* its result; UINT64_MAX: not known yet */
	bool full;	    /* no space for another file, */
	uint64_t full_room; /* and this many bytes free then */
	struct loop_timer look;
	uint64_t looks, ended_before; /* replies to `space`; others then */
	bool flying_before, stands;   /* in flight then; none ended since */
	struct files_scan *scan;
	struct loop_timer retry; /* the file system was full */
	struct loop_defer go;
	struct store_files figures; /* counters; files_figures() adds the others */
};

enum files_kind { FILES_WRITE, FILES_LOAD, FILES_ERASE };

/* A job on a part's slot. It keeps its chunk. */
struct files_job {
	struct list link;
	struct files *files;
	struct store_part *part;
	struct region *memory; /* pinned: the disk's threads read and write it */
	enum files_kind kind;
	bool durable;
	uint32_t syncs_failed; /* of its file, when it was written */
	uint64_t bytes;
	uint8_t *header; /* SEAL_HEADER_BYTES, aligned, in the block */
	void *block;
	struct seal_facts facts;
	struct disk_op op;
};

/* A fault of the device: the second ends all writing. */
void files_note_fault(struct files *files, const struct err *why);
void files_end_writing(struct files *files, const struct err *why); /* until a restart */
void files_go_on(struct files *files); /* check the queue again, in the next turn */
uint64_t files_slab_bytes(const struct files *files);
/* Aligned, in *block_p, which is to be freed; NULL + ERR_NOMEM. */
uint8_t *files_header_new(void **block_p);

/* ---- files_room.c ---- */
void files_room_init(struct files *files);
/* The free space of the file system: now and every FILES_LOOK_NS. */
void files_look(struct files *files);
void files_room_out(struct files *files); /* no space for a file */

/* ---- files_scan.c ---- */
void files_scan_begin(struct files *files);
void files_scan_go_on(struct files *files);    /* a job has ended */
void files_scan_free(struct files_scan *scan); /* NULL is fine */

#endif
