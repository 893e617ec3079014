/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk_impl: the interface between disk.c and its backends. disk.c is the public
 * interface, disk_queue.c the order of pieces, disk_dir.c the calls on a directory,
 * disk_name.c its names, disk_real.c its threads. A simulated disk (tests) uses the
 * interface and the order.
 */
#ifndef KVD_STORE_DISK_IMPL_H
#define KVD_STORE_DISK_IMPL_H

#include "daemon/loop/mailbox.h"
#include "daemon/store/disk.h"

struct disk_ops {
	void (*submit)(struct disk *disk, struct disk_op *op); /* it is open */
	void (*close)(struct disk *disk);
	bool (*idle)(const struct disk *disk); /* no thread is left */
	int (*free)(struct disk *disk);	       /* is closed */
};

enum disk_state { DISK_STATE_OPENING, DISK_STATE_OPEN, DISK_STATE_FAILED };

struct disk { /* the first member of an implementation's */
	const struct disk_ops *ops;
	struct mailbox box; /* ops that have ended, and `opened` */
	struct list opened;
	struct err why; /* opening failed */
	enum disk_state state;
	bool closing, direct;
	void (*on_open)(void *arg, struct disk *disk, const struct err *why);
	void *arg;
	struct disk_figures figures;
};

int disk_init(struct disk *disk, struct loop *loop, const struct disk_ops *ops,
	      const struct disk_args *args);
void disk_fini(struct disk *disk); /* a zeroed one is fine */
/* Calls the `done`s of ended ops. Loop thread. */
void disk_deliver(struct disk *disk);

/* Any thread: opening has ended, with `why` and `direct` set; an op has. */
void disk_opened(struct disk *disk);
void disk_ended(struct disk *disk, struct disk_op *op);

#endif
