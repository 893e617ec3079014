/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk_queue: which piece of which READ or WRITE is submitted next. Pure; its owner
 * locks.
 *
 * Reads are scheduled before writes, but one piece in DISK_READS_RUN + 1 is a write's. Of
 * each kind, ops take turns of DISK_TURN pieces, DISK_ACTIVE of them at a time, so a
 * short op does not wait for the end of a long one.
 */
#ifndef KVD_STORE_DISK_QUEUE_H
#define KVD_STORE_DISK_QUEUE_H

#include "daemon/store/disk.h"

#define DISK_ACTIVE 128u
#define DISK_TURN 4u
#define DISK_READS_RUN 15u
#define DISK_TRIES 100u /* tries without progress */

struct disk_piece {
	struct disk_op *op;
	uint64_t at, bytes; /* of the op's memory; bytes 0: the op is to be started */
	struct iovec iov[2];
	int iov_count;
	unsigned int tries;
};

struct disk_side {
	struct list active, waiting;
	unsigned int begun;  /* in progress, or in `active` */
	unsigned int flying; /* pieces, and ops being started */
};

struct disk_queue {
	struct disk_side reads, writes;
	unsigned int writes_most; /* flying */
	unsigned int reads_run;	  /* pieces since the last one of a write */
};

void disk_queue_init(struct disk_queue *queue, unsigned int writes_most);
void disk_queue_put(struct disk_queue *queue, struct disk_op *op);
/* False: nothing can be submitted now. A piece of 0 bytes: its op is out of the queue and
 * starts: disk_queue_begun(), or if that failed, disk_queue_drop(). */
bool disk_queue_next(struct disk_queue *queue, struct disk_piece *piece);
void disk_queue_begun(struct disk_queue *queue, struct disk_op *op);
void disk_queue_drop(struct disk_queue *queue, struct disk_op *op);

enum disk_back {
	DISK_BACK_AGAIN, /* submit the piece again, from its current position */
	DISK_BACK_PIECE, /* it has ended */
	DISK_BACK_OP,	 /* and its op with it */
	DISK_BACK_FAULT, /* `no`: call disk_op_fail(), then disk_queue_fault() */
};
/* `moved`: bytes, or a negative errno. *no_p: 0: the file ends here. */
enum disk_back disk_queue_back(struct disk_queue *queue, struct disk_piece *piece,
			       int64_t moved, int *no_p);
/* The op gets no more pieces, and this one has ended. True: the op has ended, too. */
bool disk_queue_fault(struct disk_queue *queue, struct disk_piece *piece);
/* Removes an op without pieces in flight from the queue: to be ended. NULL: no more; ops
 * with pieces in flight get no more of them. */
struct disk_op *disk_queue_cancel(struct disk_queue *queue);

/* Keeps the op's first fault: `r`, just raised, or the close. */
void disk_op_fail(struct disk_op *op, int r);
void disk_op_cancel(struct disk_op *op);
/* `before` or `after`, unless the op has failed. */
void disk_op_hook(struct disk_op *op, void (*hook)(struct disk_op *op));
static inline uint64_t disk_op_bytes(const struct disk_op *op)
{
	return op->iov[0].iov_len + op->iov[1].iov_len;
}

#endif
