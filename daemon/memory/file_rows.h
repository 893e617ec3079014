/* SPDX-License-Identifier: Apache-2.0 */
/*
 * file_rows: a stretch of a plan where an end has rows in files, moved in the calling
 * thread. For copy_file.c.
 */
#ifndef KVD_MEMORY_FILE_ROWS_H
#define KVD_MEMORY_FILE_ROWS_H

#include <stdint.h>

#include "daemon/memory/copy.h"

/* The user whose threads move it: that of the first file in the tables; NULL: no file. */
const struct memory *file_rows_of(const struct copy_job *job);

/* A thread's state for it. */
struct file_hand;
int file_hand_new(struct file_hand **hand_p);
void file_hand_free(struct file_hand *hand); /* NULL is allowed */

/*
 * Move [begin, end) of the job, which was checked. *bounced_p: bytes that passed through
 * the hand's buffer. ERR_IO: the device's fault, or the file ends before the requested
 * bytes; ERR_LIMIT: no space left, a quota; ERR_PERM: it may not be written; ERR_FAULT:
 * the memory was lost; ERR_CANCELED. May take as long as the device likes.
 */
int file_rows_move(struct file_hand *hand, const struct copy_job *job, uint64_t begin,
		   uint64_t end, uint64_t *bounced_p);

#endif
