/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk_dir: the calls on one directory and its files. They block, so they are not for the
 * loop's thread. Any other thread, once it is open.
 */
#ifndef KVD_STORE_DISK_DIR_H
#define KVD_STORE_DISK_DIR_H

#include <pthread.h>

#include "daemon/store/disk.h"
#include "daemon/store/disk_queue.h"

#define DISK_FDS (2 * DISK_ACTIVE + 8) /* each op in progress may hold another */

struct disk_fd { /* an open slab file */
	struct disk_file file;
	uint64_t used; /* of dir->clock */
	int fd;	       /* -1: none */
	unsigned int refs;
	bool gone; /* the file was removed */
};

struct disk_dir {
	char *path;
	int fd, lock_fd;
	bool cached, direct;
	pthread_mutex_t lock;
	struct disk_fd fds[DISK_FDS];
	uint64_t clock, removed; /* counts */
};

int disk_dir_init(struct disk_dir *dir, const char *path, bool cached);
void disk_dir_fini(struct disk_dir *dir);
/* ERR_BUSY: another process holds its lock. ERR_NOTFOUND, ERR_PERM, ERR_IO. */
int disk_dir_open(struct disk_dir *dir);

/* op->own.held: its file, open until disk_dir_let(). */
int disk_dir_hold(struct disk_dir *dir, struct disk_op *op);
void disk_dir_let(struct disk_dir *dir, struct disk_op *op); /* idempotent */
/* All of an op except READ and WRITE. */
int disk_dir_do(struct disk_dir *dir, struct disk_op *op);

#endif
