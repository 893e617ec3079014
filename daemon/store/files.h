/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files: parts of chunks in the slab files of a directory (disk.h), where they survive
 * the daemon. Another arena assigns slots to owners; a slab of it is a file.
 *
 * A slot describes itself (seal.h), and is written with its part in one piece. A named
 * file describes a class of parts (files_class.h). So no two writes must agree: a slot
 * that was torn, partly overwritten or forged fails its sums, or names its own class and
 * chunk. All sums are checked at every read, before the part becomes visible.
 *
 * At the start the headers of all slots are read in the background; their chunks can be
 * found from then on.
 */
#ifndef KVD_STORE_FILES_H
#define KVD_STORE_FILES_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"

struct disk;
struct files;
struct store;
struct store_part;

/* So many bytes of files, owned by the store: its files, file_ops and file_arena.
 * files_begin() gives them their directory. */
int files_new(struct store *store, uint64_t bytes);
/* `disk` is the files' from now on; on_open of its disk_args is files_on_open() with
 * the files. */
void files_begin(struct files *files, struct disk *disk);
void files_on_open(void *arg, struct disk *disk, const struct err *why);
/* The store's memory is registered: slots may be read. */
void files_on_memory(struct files *files);
void files_close(struct files *files); /* idempotent; NULL is fine here and below */
bool files_drained(const struct files *files);
/* Drained; parts have no slots any more. Outcome 1: a device does not respond, and the
 * process must exit. */
int files_free(struct files *files);

/* The directory is being read; then store_tidy() is due. */
bool files_scanning(const struct files *files);

/* Its directory is being opened or read: durable puts wait; store_wake() wakes them. */
bool files_opening(const struct files *files);
/* Writes are possible, now or once it is open. ERR_LIMIT: none will be. */
int files_writable(const struct files *files);

/* Write the part, which is ready, some time later; `durable`: also sync it, and schedule
 * the store's moves. False: not done (no space, writing has stopped, too much queued). */
bool files_write(struct files *files, struct store_part *part, bool durable);

struct store_files;
void files_figures(const struct files *files, struct store_files *figures_p);

#endif
