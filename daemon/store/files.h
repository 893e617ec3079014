/* SPDX-License-Identifier: Apache-2.0 */
/*
 * files: parts of chunks in the slab files of a directory (disk.h), where they outlive
 * the daemon. Another arena says which slots are whose; a slab of it is a file.
 *
 * A slot describes itself (seal.h), and is written with its part in one piece. What a
 * class of parts is stands in a named file (files_class.h). So there is nothing that two
 * writes must agree on: a slot that was torn, overwritten in part or made on purpose
 * fails its sums, or says of what class and chunk it is. All sums are checked at every
 * read, before anybody sees the part.
 *
 * At the start the headers of all slots are read in the background; what they describe is
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

/* So many bytes of files, which are the store's: its files, file_ops and file_arena.
 * files_begin() gives them their directory. */
int files_new(struct store *store, uint64_t bytes);
/* `disk` is the files' from now on; on_open of its disk_args is files_on_open() with
 * the files. */
void files_begin(struct files *files, struct disk *disk);
void files_on_open(void *arg, struct disk *disk, const struct err *why);
/* The store's memory is there: slots may be read. */
void files_on_memory(struct files *files);
void files_close(struct files *files); /* idempotent; NULL is fine here and below */
bool files_drained(const struct files *files);
/* Drained; parts have no places any more. Outcome 1: a device does not come back, and
 * the process is to end. */
int files_free(struct files *files);

/* What the directory holds is being read; then store_tidy() is due. */
bool files_scanning(const struct files *files);

/* Its directory is being opened or read: what is to last waits, store_wake() tells
 * when to ask again. */
bool files_opening(const struct files *files);
/* Something may be written, now or when it is open. ERR_LIMIT: nothing will be. */
int files_writable(const struct files *files);

/* Keep the part, which is ready, some time; `durable`: and sync it, and kick the store's
 * moves. False: it is not done (no room, no writing any more, too much to do). */
bool files_write(struct files *files, struct store_part *part, bool durable);

struct store_files;
void files_figures(const struct files *files, struct store_files *figures_p);

#endif
