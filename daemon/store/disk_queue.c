/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An op is in `waiting`, then in `active` until its last piece is cut, then in no list
 * until its last piece has completed. Its first turn starts it (its file is opened, a
 * WRITE's sums are computed), so a hundred WRITEs do not compute all of their sums before
 * the device gets a byte; and a turn is several pieces, so that the device has work while
 * the next op's sums are computed.
 *
 * WRITEs may not occupy all pieces in flight, nor all threads for their sums: a READ
 * queued after them starts at once, and waits for the device alone.
 */
#include "daemon/store/disk_queue.h"

#include <assert.h>
#include <errno.h>

void disk_op_fail(struct disk_op *op, int r)
{
	assert(r < 0);
	if (op->err.code == ERR_OK) {
		op->result = r;
		err_take(&op->err);
	}
	if (op->err.code == ERR_OK) /* a hook that set no error */
		err_set(&op->err, ERR_INTERNAL, "a disk hook failed");
	err_clear();
}

void disk_op_cancel(struct disk_op *op)
{
	if (op->err.code != ERR_OK)
		return;
	op->result = -err_errno(ERR_CANCELED);
	err_set(&op->err, ERR_CANCELED, "the disk was closed");
}

void disk_op_hook(struct disk_op *op, void (*hook)(struct disk_op *op))
{
	if (!hook || op->result < 0)
		return;
	err_clear();
	hook(op);
	if (op->result < 0)
		disk_op_fail(op, op->result);
}

static struct disk_side *queue_side(struct disk_queue *queue, const struct disk_op *op)
{
	return op->what == DISK_READ ? &queue->reads : &queue->writes;
}

static void queue_side_init(struct disk_side *side)
{
	list_init(&side->active);
	list_init(&side->waiting);
	side->begun = 0;
	side->flying = 0;
}

void disk_queue_init(struct disk_queue *queue, unsigned int writes_most)
{
	queue_side_init(&queue->reads);
	queue_side_init(&queue->writes);
	queue->writes_most = writes_most;
	queue->reads_run = 0;
}

void disk_queue_put(struct disk_queue *queue, struct disk_op *op)
{
	list_push_back(&queue_side(queue, op)->waiting, &op->link);
}

/* The memory of the piece, of the two parts of its op's. */
static void queue_piece_map(struct disk_piece *piece)
{
	uint64_t at = piece->at, left = piece->bytes;

	piece->iov_count = 0;
	for (unsigned int i = 0; i < 2 && left; i++) {
		const struct iovec *iov = &piece->op->iov[i];
		uint64_t len = iov->iov_len;

		if (at >= len) {
			at -= len;
			continue;
		}
		len = len - at < left ? len - at : left;
		piece->iov[piece->iov_count++] = (struct iovec){
			.iov_base = (char *)iov->iov_base + at, .iov_len = len};
		left -= len;
		at = 0;
	}
}

static struct disk_op *queue_side_first(struct disk_side *side)
{
	while (side->begun < DISK_ACTIVE && !list_empty(&side->waiting)) {
		list_push_back(&side->active, list_pop_front(&side->waiting));
		side->begun++;
	}
	return list_first(&side->active, struct disk_op, link);
}

static struct disk_op *queue_choose(struct disk_queue *queue)
{
	struct disk_op *read = queue_side_first(&queue->reads), *write = NULL;

	if (queue->writes.flying < queue->writes_most)
		write = queue_side_first(&queue->writes);
	if (!read || (write && queue->reads_run >= DISK_READS_RUN))
		return write;
	return read;
}

static void queue_cut(struct disk_queue *queue, struct disk_op *op,
		      struct disk_piece *piece)
{
	uint64_t left = disk_op_bytes(op) - op->own.cut;
	struct disk_side *side = queue_side(queue, op);

	piece->at = op->own.cut;
	piece->bytes = left < DISK_PIECE_BYTES ? left : DISK_PIECE_BYTES;
	piece->tries = 0;
	queue_piece_map(piece);
	op->own.cut += piece->bytes;
	op->own.flying++;
	side->flying++;
	queue->reads_run = op->what == DISK_READ ? queue->reads_run + 1 : 0;
	if (piece->bytes == left) {
		list_remove(&op->link);
	} else if (++op->own.turn == DISK_TURN) {
		op->own.turn = 0;
		list_remove(&op->link);
		list_push_back(&side->active, &op->link);
	}
}

bool disk_queue_next(struct disk_queue *queue, struct disk_piece *piece)
{
	struct disk_op *op = queue_choose(queue);

	if (!op)
		return false;
	piece->op = op;
	piece->bytes = 0;
	if (op->own.begun) {
		queue_cut(queue, op, piece);
		return true;
	}
	list_remove(&op->link);
	op->own.flying++; /* a thread has it */
	queue_side(queue, op)->flying++;
	return true;
}

static void queue_landed(struct disk_queue *queue, struct disk_op *op)
{
	op->own.flying--;
	queue_side(queue, op)->flying--;
}

void disk_queue_begun(struct disk_queue *queue, struct disk_op *op)
{
	queue_landed(queue, op);
	op->own.begun = true;
	list_push_front(&queue_side(queue, op)->active, &op->link);
}

static void queue_leave(struct disk_queue *queue, struct disk_op *op)
{
	struct disk_side *side = queue_side(queue, op);

	assert(side->begun > 0 && op->own.flying == 0);
	list_remove(&op->link);
	side->begun--;
}

void disk_queue_drop(struct disk_queue *queue, struct disk_op *op)
{
	queue_landed(queue, op);
	queue_leave(queue, op);
}

/* True: its op has ended, too. */
static bool queue_piece_end(struct disk_queue *queue, struct disk_piece *piece)
{
	struct disk_op *op = piece->op;

	queue_landed(queue, op);
	if (op->own.flying > 0 || op->own.cut < disk_op_bytes(op))
		return false;
	queue_leave(queue, op);
	return true;
}

enum disk_back disk_queue_back(struct disk_queue *queue, struct disk_piece *piece,
			       int64_t moved, int *no_p)
{
	struct disk_op *op = piece->op;
	uint64_t whole;

	*no_p = moved < 0 ? (int)-moved : 0;
	if (moved < 0 && *no_p != EINTR && *no_p != EAGAIN)
		return DISK_BACK_FAULT;
	/* the moved part of a last, incomplete block is moved again: O_DIRECT can
	 * continue at whole blocks only */
	whole = moved < 0 ? 0 : (uint64_t)moved / DISK_ALIGN * DISK_ALIGN;
	assert(whole <= piece->bytes);
	if (whole == 0) {
		if (moved >= 0 && op->what == DISK_READ)
			return DISK_BACK_FAULT;
		if (++piece->tries < DISK_TRIES)
			return DISK_BACK_AGAIN;
		*no_p = *no_p ? *no_p : EIO;
		return DISK_BACK_FAULT;
	}
	piece->at += whole;
	piece->bytes -= whole;
	piece->tries = 0;
	op->moved += whole;
	queue_piece_map(piece);
	if (piece->bytes)
		return DISK_BACK_AGAIN;
	return queue_piece_end(queue, piece) ? DISK_BACK_OP : DISK_BACK_PIECE;
}

/* No piece of it is cut any more. */
static void queue_stop(struct disk_op *op)
{
	list_remove(&op->link);
	op->own.cut = disk_op_bytes(op);
}

bool disk_queue_fault(struct disk_queue *queue, struct disk_piece *piece)
{
	queue_stop(piece->op);
	return queue_piece_end(queue, piece);
}

static struct disk_op *queue_side_cancel(struct disk_queue *queue, struct disk_side *side)
{
	struct disk_op *op;
	struct list *link;

	while ((op = list_first(&side->active, struct disk_op, link))) {
		disk_op_cancel(op);
		if (op->own.flying == 0) {
			queue_leave(queue, op);
			return op;
		}
		queue_stop(op);
	}
	link = list_pop_front(&side->waiting);
	if (!link)
		return NULL;
	op = list_entry(link, struct disk_op, link);
	disk_op_cancel(op);
	return op;
}

struct disk_op *disk_queue_cancel(struct disk_queue *queue)
{
	struct disk_op *op = queue_side_cancel(queue, &queue->reads);

	return op ? op : queue_side_cancel(queue, &queue->writes);
}
