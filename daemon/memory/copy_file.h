/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy_file: the part of the copy threads that waits for disks. copy.c passes jobs here
 * that have rows in files on either end; it is the only caller.
 */
#ifndef KVD_MEMORY_COPY_FILE_H
#define KVD_MEMORY_COPY_FILE_H

#include <stdint.h>

struct copy_file;
struct copy_job;
struct loop;

int copy_file_new(struct loop *loop, uint64_t slice_bytes, struct copy_file **file_p);
/* Remaining jobs are canceled and their on_done is called; waits for disk requests in
 * flight. NULL is allowed. */
void copy_file_free(struct copy_file *file);

/* As copier_submit() and copier_cancel(); the job is checked and not empty. ERR_NOMEM,
 * ERR_LIMIT: no thread could be started for it. */
int copy_file_submit(struct copy_file *file, struct copy_job *job);
void copy_file_cancel(struct copy_file *file, struct copy_job *job);

#endif
