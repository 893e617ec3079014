/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A disk that is open on an image has the daemon's own queue of pieces; a piece in flight
 * is a timer, and its bytes move when that fires. The other ops go one after another, as
 * on the thread of a real disk. A SYNC takes what there is when it begins or when it
 * ends, which is tossed: who takes more for kept than was promised is found by some
 * seeds.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "daemon/store/disk_impl.h"
#include "daemon/store/disk_name.h"
#include "daemon/store/disk_queue.h"
#include "tests/lib/disk_sim_impl.h"

#define SIM_PIECES 32u /* in flight */

struct sim_slot {
	struct loop_timer timer;
	struct disk_piece piece;
	struct sim_disk *disk;
	bool busy, hangs;
};

struct sim_disk {
	struct disk base;
	struct disk_sim *sim; /* NULL: no power */
	struct loop *loop;
	struct disk_queue queue;
	struct list jobs;
	struct disk_op *job; /* under way */
	bool job_hangs, job_flushed;
	struct loop_timer opening, job_timer;
	struct sim_slot slots[SIM_PIECES];
};

static int job_sync(struct sim_disk *disk, const struct disk_op *op)
{
	struct sim_file *file = file_find(disk->sim, op);

	if (!file)
		return -ENOENT;
	if (!disk->job_flushed)
		file_flush(file);
	return 0;
}

static int job_do(struct sim_disk *disk, struct disk_op *op)
{
	return op->what == DISK_SYNC ? job_sync(disk, op) : image_do(disk->sim, op);
}

/* Has it changed what is on the medium by the time of a fault, or of a loss of power? */
static void job_perhaps(struct sim_disk *disk, struct disk_op *op)
{
	switch (op->what) {
	case DISK_REMOVE:
	case DISK_NAMED_REMOVE:
	case DISK_NAMED_WRITE:
		if (sim_toss(disk->sim))
			(void)job_do(disk, op);
		op->moved = 0;
		break;
	default:
		break;
	}
}

static int job_end(struct sim_disk *disk, struct disk_op *op)
{
	if (sim_strikes(disk->sim, DISK_SIM_FULL, op->what))
		return -ENOSPC;
	if (sim_strikes(disk->sim, DISK_SIM_EIO, op->what)) {
		struct sim_file *file = file_find(disk->sim, op);

		job_perhaps(disk, op);
		if (op->what == DISK_SYNC && file)
			file_settle(disk->sim, file, false);
		return -EIO;
	}
	return job_do(disk, op);
}

static void job_next(struct sim_disk *disk);

static void sim_ended(struct sim_disk *disk, struct disk_op *op, int r)
{
	if (r < 0 && err_last()->code == ERR_OK)
		r = disk_fault("sim", op, DISK_NOWHERE, -r);
	if (r < 0)
		disk_op_fail(op, r);
	disk_op_hook(op, op->after);
	disk_ended(&disk->base, op);
}

static void on_job_timer(struct loop_timer *timer)
{
	struct sim_disk *disk = container_of(timer, struct sim_disk, job_timer);
	struct disk_op *op = disk->job;

	err_clear();
	disk->job = NULL;
	sim_ended(disk, op, job_end(disk, op));
	job_next(disk);
}

static void job_next(struct sim_disk *disk)
{
	struct sim_file *file;
	struct list *link;

	if (disk->job || !(link = list_pop_front(&disk->jobs)))
		return;
	disk->job = list_entry(link, struct disk_op, link);
	disk_op_hook(disk->job, disk->job->before);
	if (disk->job->result < 0) {
		struct disk_op *op = disk->job;

		disk->job = NULL;
		disk_ended(&disk->base, op);
		job_next(disk);
		return;
	}
	file = disk->job->what == DISK_SYNC ? file_find(disk->sim, disk->job) : NULL;
	disk->job_flushed = file && sim_toss(disk->sim);
	if (disk->job_flushed)
		file_flush(file);
	disk->job_hangs = sim_strikes(disk->sim, DISK_SIM_HANG, disk->job->what);
	if (!disk->job_hangs)
		loop_timer_start(&disk->job_timer, sim_delay(disk->sim));
}

/* ---- pieces ---- */

/* The address of a byte of the op's memory; whole sectors lie in one part. */
static uint8_t *op_at(const struct disk_op *op, uint64_t at)
{
	uint64_t first = op->iov[0].iov_len;

	return at < first ? (uint8_t *)op->iov[0].iov_base + at
			  : (uint8_t *)op->iov[1].iov_base + (at - first);
}

static void flip(struct disk_sim *sim, uint8_t *bytes)
{
	uint64_t bit = sim_random(sim) % (SECTOR * 8);

	bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
}

static int piece_sector(struct disk_sim *sim, const struct disk_op *op, uint64_t at,
			bool flips)
{
	struct sim_file *file = op->own.file;
	uint64_t number = (op->offset + at) / SECTOR;
	uint8_t bytes[SECTOR];

	if (op->what == DISK_READ) {
		sector_read(file, number, op_at(op, at));
		if (flips)
			flip(sim, op_at(op, at));
		return 0;
	}
	memcpy(bytes, op_at(op, at), SECTOR);
	if (flips)
		flip(sim, bytes);
	return sector_write(sim, file, number, bytes);
}

static int64_t piece_move(struct disk_sim *sim, const struct disk_piece *piece)
{
	const struct disk_op *op = piece->op;
	const struct sim_file *file = op->own.file;
	uint64_t from = op->offset + piece->at, bytes = piece->bytes, flips = UINT64_MAX;
	int r = 0;

	if (sim_strikes(sim, DISK_SIM_EIO, op->what))
		return -EIO;
	if (sim_strikes(sim, DISK_SIM_FULL, op->what))
		return -ENOSPC;
	if (op->what == DISK_READ)
		bytes = from >= file->bytes	     ? 0
			: bytes > file->bytes - from ? file->bytes - from
						     : bytes;
	assert(bytes == 0 || from + bytes <= file->bytes); /* a WRITE, too */
	if (bytes > SECTOR && sim_strikes(sim, DISK_SIM_SHORT, op->what))
		bytes = SECTOR + sim_random(sim) % (bytes - SECTOR);
	if (bytes >= SECTOR && sim_strikes(sim, DISK_SIM_FLIP, op->what))
		flips = sim_random(sim) % (bytes / SECTOR);
	for (uint64_t i = 0; r == 0 && i < bytes / SECTOR; i++)
		r = piece_sector(sim, op, piece->at + i * SECTOR, i == flips);
	return r < 0 ? r : (int64_t)bytes;
}

static void op_let(struct sim_disk *disk, struct disk_op *op)
{
	if (op->own.file && disk->sim)
		file_let(disk->sim, op->own.file);
	op->own.file = NULL;
}

static void sim_fill(struct sim_disk *disk);

static void on_slot_timer(struct loop_timer *timer)
{
	struct sim_slot *slot = container_of(timer, struct sim_slot, timer);
	struct disk_piece *piece = &slot->piece;
	struct sim_disk *disk = slot->disk;
	struct disk_op *op = piece->op;
	enum disk_back back;
	bool ended;
	int no;

	err_clear();
	back = disk_queue_back(&disk->queue, piece, piece_move(disk->sim, piece), &no);
	ended = back == DISK_BACK_OP;
	if (back == DISK_BACK_AGAIN) {
		loop_timer_start(timer, sim_delay(disk->sim));
		return;
	}
	if (back == DISK_BACK_FAULT) {
		disk_op_fail(op, disk_fault("sim", op, op->offset + piece->at, no));
		ended = disk_queue_fault(&disk->queue, piece);
	}
	slot->busy = false;
	if (ended) {
		op_let(disk, op);
		sim_ended(disk, op, 0);
	}
	sim_fill(disk);
}

static void sim_begin(struct sim_disk *disk, struct disk_op *op)
{
	struct sim_file *file = file_find(disk->sim, op);

	if (file) {
		op->own.file = file;
		file->refs++;
	} else {
		disk_op_fail(op, disk_fault("sim", op, DISK_NOWHERE, ENOENT));
	}
	disk_op_hook(op, op->before);
	if (op->result >= 0) {
		disk_queue_begun(&disk->queue, op);
		return;
	}
	disk_queue_drop(&disk->queue, op);
	op_let(disk, op);
	disk_ended(&disk->base, op);
}

static void sim_fill(struct sim_disk *disk)
{
	for (unsigned int i = 0; i < SIM_PIECES; i++) {
		struct sim_slot *slot = &disk->slots[i];

		while (!slot->busy && disk_queue_next(&disk->queue, &slot->piece)) {
			if (slot->piece.bytes == 0) {
				sim_begin(disk, slot->piece.op);
				continue;
			}
			slot->busy = true;
			slot->hangs = sim_strikes(disk->sim, DISK_SIM_HANG,
						  slot->piece.op->what);
			if (!slot->hangs)
				loop_timer_start(&slot->timer, sim_delay(disk->sim));
		}
	}
}

/* ---- the door ---- */

static struct sim_disk *disk_of(struct disk *disk)
{
	return container_of(disk, struct sim_disk, base);
}

static void no_power(struct sim_disk *disk, struct disk_op *op)
{
	disk_op_fail(op, err_raise(ERR_IO, "sim: no power"));
	op->own.file = NULL;
	disk_ended(&disk->base, op);
}

static void sim_submit(struct disk *base, struct disk_op *op)
{
	struct sim_disk *disk = disk_of(base);

	if (!disk->sim) {
		no_power(disk, op);
	} else if (op->what == DISK_READ || op->what == DISK_WRITE) {
		disk_queue_put(&disk->queue, op);
		sim_fill(disk);
	} else {
		list_push_back(&disk->jobs, &op->link);
		job_next(disk);
	}
}

static void sim_close(struct disk *base)
{
	struct sim_disk *disk = disk_of(base);
	struct disk_op *op;
	struct list *link;

	loop_timer_stop(&disk->opening);
	while ((link = list_pop_front(&disk->jobs))) {
		op = list_entry(link, struct disk_op, link);
		disk_op_cancel(op);
		disk_ended(base, op);
	}
	while ((op = disk_queue_cancel(&disk->queue))) {
		op_let(disk, op);
		disk_ended(base, op);
	}
}

static bool sim_idle(const struct disk *base)
{
	const struct sim_disk *disk = disk_of((struct disk *)base);
	bool idle = !disk->job;

	for (unsigned int i = 0; i < SIM_PIECES; i++)
		idle = idle && !disk->slots[i].busy;
	return idle;
}

/* What does not hang ends now: time may not pass here. */
static int sim_free(struct disk *base)
{
	struct sim_disk *disk = disk_of(base);
	bool idle;

	for (unsigned int i = 0; i < SIM_PIECES; i++) {
		struct sim_slot *slot = &disk->slots[i];

		while (slot->busy && !slot->hangs) {
			loop_timer_stop(&slot->timer);
			on_slot_timer(&slot->timer);
		}
	}
	if (disk->job && !disk->job_hangs) {
		loop_timer_stop(&disk->job_timer);
		on_job_timer(&disk->job_timer);
	}
	disk_deliver(base);
	idle = sim_idle(base);
	if (disk->sim && disk->sim->disk == disk)
		disk->sim->disk = NULL;
	disk_fini(base);
	mem_free(disk);
	return idle ? 0 : DISK_ABANDONED;
}

static const struct disk_ops sim_ops = {
	.submit = sim_submit,
	.close = sim_close,
	.idle = sim_idle,
	.free = sim_free,
};

static void on_opening(struct loop_timer *timer)
{
	struct sim_disk *disk = container_of(timer, struct sim_disk, opening);

	if (!disk->sim)
		err_set(&disk->base.why, ERR_IO, "sim: no power");
	else if (disk->sim->disk)
		err_set(&disk->base.why, ERR_BUSY, "sim: in use by another daemon");
	else
		disk->sim->disk = disk;
	disk->base.direct = true;
	disk_opened(&disk->base);
}

int disk_sim_open(struct disk_sim *sim, struct loop *loop, const struct disk_args *args,
		  struct disk **disk_p)
{
	struct sim_disk *disk = mem_zalloc(sizeof(*disk));
	bool is_virtual = loop_is_virtual(loop);
	int r;

	assert(is_virtual);
	if (!disk)
		return err_pass(-ENOMEM);
	r = disk_init(&disk->base, loop, &sim_ops, args);
	if (r < 0) {
		mem_free(disk);
		return err_pass(r);
	}
	disk->sim = sim;
	disk->loop = loop;
	disk_queue_init(&disk->queue, SIM_PIECES * 3 / 4);
	list_init(&disk->jobs);
	loop_timer_init(&disk->opening, loop, on_opening);
	loop_timer_init(&disk->job_timer, loop, on_job_timer);
	for (unsigned int i = 0; i < SIM_PIECES; i++) {
		disk->slots[i].disk = disk;
		loop_timer_init(&disk->slots[i].timer, loop, on_slot_timer);
	}
	loop_timer_start(&disk->opening, sim_delay(sim));
	*disk_p = &disk->base;
	return 0;
}

/* ---- a loss of power ---- */

/* What was in flight has been written, or not, sector by sector. */
static void lose_slot(struct sim_disk *disk, struct sim_slot *slot)
{
	const struct disk_piece *piece = &slot->piece;

	if (!slot->busy || piece->op->what != DISK_WRITE)
		return;
	for (uint64_t at = piece->at; at < piece->at + piece->bytes; at += SECTOR)
		if (sim_toss(disk->sim))
			(void)piece_sector(disk->sim, piece->op, at, false);
}

static void lose_list(struct list *ops)
{
	struct disk_op *op;

	list_foreach(op, ops, link)
		disk_op_fail(op, err_raise(ERR_IO, "sim: no power"));
}

/* Ops with pieces in flight end with their last one. */
static void lose_ops(struct sim_disk *disk)
{
	struct disk_op *op;
	struct list *link;

	for (unsigned int i = 0; i < SIM_PIECES; i++) {
		struct sim_slot *slot = &disk->slots[i];

		loop_timer_stop(&slot->timer);
		if (!slot->busy)
			continue;
		slot->busy = false;
		op = slot->piece.op;
		disk_op_fail(op, err_raise(ERR_IO, "sim: no power"));
		if (disk_queue_fault(&disk->queue, &slot->piece)) {
			op_let(disk, op);
			no_power(disk, op);
		}
	}
	lose_list(&disk->queue.reads.active);
	lose_list(&disk->queue.reads.waiting);
	lose_list(&disk->queue.writes.active);
	lose_list(&disk->queue.writes.waiting);
	while ((op = disk_queue_cancel(&disk->queue))) {
		op_let(disk, op);
		no_power(disk, op);
	}
	while ((link = list_pop_front(&disk->jobs)))
		no_power(disk, list_entry(link, struct disk_op, link));
}

void disk_sim_power_loss(struct disk_sim *sim)
{
	struct sim_disk *disk = sim->disk;
	struct sim_file *file;

	for (unsigned int i = 0; disk && i < SIM_PIECES; i++)
		lose_slot(disk, &disk->slots[i]);
	if (disk && disk->job) {
		loop_timer_stop(&disk->job_timer);
		job_perhaps(disk, disk->job);
		if (disk->job->what == DISK_MAKE && sim_toss(sim))
			(void)image_do(sim, disk->job);
		no_power(disk, disk->job);
		disk->job = NULL;
	}
	list_foreach(file, &sim->files, link)
		file_settle(sim, file, true);
	if (!disk)
		return;
	lose_ops(disk);
	disk->sim = NULL;
	sim->disk = NULL;
}
