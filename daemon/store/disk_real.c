/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend with a real disk: a thread for ops except READ and WRITE ("kvd-disk"), one
 * after another, and IO_THREADS of them for pieces, which they move by blocking calls. So
 * listing a directory, reserving a file or flushing a cache delays no READ. io_uring is
 * no faster for slots of a MiB and more, and its thread would compute all checksums
 * alone.
 *
 * One lock covers lists, queue and flags. It is released around calls and hooks. An op
 * belongs to a thread from its removal from a list, and to the loop once it is in the
 * mailbox.
 *
 * A hanging device keeps threads in the kernel, where they cannot be stopped. disk_free()
 * waits for them for a time, then marks the disk `abandoned`: a thread that returns later
 * puts nothing into the mailbox, which is freed, and the last thread frees the disk. The
 * memory of such an op cannot be freed: the device may write to it at any time.
 */
#include <assert.h>
#include <errno.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/cpu.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "daemon/store/disk_dir.h"
#include "daemon/store/disk_impl.h"
#include "daemon/store/disk_name.h"
#include "daemon/store/disk_queue.h"

#define IO_THREADS 8u

struct disk_real {
	struct disk base;
	struct disk_dir dir;
	uint64_t stop_ns;

	pthread_mutex_t lock; /* all below */
	pthread_cond_t jobs_more, pieces_more, gone;
	struct list jobs;	 /* ops that are not READ or WRITE, in order */
	struct disk_queue queue; /* those that are */
	bool closing, abandoned;
	unsigned int alive; /* threads */
	unsigned int thread_count;
	pthread_t threads[IO_THREADS + 1];
};

static struct disk_real *real_of(struct disk *disk)
{
	return container_of(disk, struct disk_real, base);
}

static void real_destroy(struct disk_real *real)
{
	disk_dir_fini(&real->dir);
	disk_fini(&real->base);
	pthread_cond_destroy(&real->gone);
	pthread_cond_destroy(&real->pieces_more);
	pthread_cond_destroy(&real->jobs_more);
	pthread_mutex_destroy(&real->lock);
	mem_free(real);
}

/* ---- ops that end ---- */

/* Without the lock. */
static void real_finish(struct disk_real *real, struct disk_op *op)
{
	disk_dir_let(&real->dir, op);
	disk_op_hook(op, op->after);
	pthread_mutex_lock(&real->lock);
	if (!real->abandoned)
		disk_ended(&real->base, op);
	pthread_mutex_unlock(&real->lock);
}

/* ---- pieces ---- */

static void real_begin(struct disk_real *real, struct disk_op *op)
{
	int r = disk_dir_hold(&real->dir, op);

	if (r < 0)
		disk_op_fail(op, r);
	disk_op_hook(op, op->before);
}

/* Under the lock, which it may release meanwhile: the next piece; its file is open and
 * its op's `before` has run. False: none now. */
static bool real_next(struct disk_real *real, struct disk_piece *piece)
{
	while (disk_queue_next(&real->queue, piece)) {
		struct disk_op *op = piece->op;

		if (piece->bytes) { /* another piece may be ready for another thread */
			pthread_cond_signal(&real->pieces_more);
			return true;
		}
		pthread_mutex_unlock(&real->lock);
		real_begin(real, op);
		pthread_mutex_lock(&real->lock);
		if (real->closing)
			disk_op_cancel(op);
		if (op->result >= 0) {
			disk_queue_begun(&real->queue, op);
			continue;
		}
		disk_queue_drop(&real->queue, op);
		pthread_mutex_unlock(&real->lock);
		real_finish(real, op);
		pthread_mutex_lock(&real->lock);
	}
	return false;
}

/* This many bytes of the piece were moved, or a negative errno. True: the piece, changed,
 * continues. */
static bool real_back(struct disk_real *real, struct disk_piece *piece, int64_t moved)
{
	struct disk_op *op = piece->op;
	enum disk_back back;
	bool ended;
	int no;

	pthread_mutex_lock(&real->lock);
	back = disk_queue_back(&real->queue, piece, moved, &no);
	ended = back == DISK_BACK_OP;
	if (back == DISK_BACK_FAULT) {
		disk_op_fail(op,
			     disk_fault(real->dir.path, op, op->offset + piece->at, no));
		ended = disk_queue_fault(&real->queue, piece);
	}
	pthread_mutex_unlock(&real->lock);
	if (ended)
		real_finish(real, op);
	return back == DISK_BACK_AGAIN;
}

static void real_move(struct disk_real *real, struct disk_piece *piece)
{
	const struct disk_op *op = piece->op;
	ssize_t moved;

	do {
		int fd = op->own.held->fd;
		off_t at = (off_t)(op->offset + piece->at);

		moved = op->what == DISK_READ
				? preadv2(fd, piece->iov, piece->iov_count, at, 0)
				: pwritev2(fd, piece->iov, piece->iov_count, at, 0);
	} while (real_back(real, piece, moved < 0 ? -errno : moved));
}

/* The thread's last call. */
static void *real_leave(struct disk_real *real)
{
	bool last;

	pthread_mutex_lock(&real->lock);
	last = --real->alive == 0 && real->abandoned;
	pthread_cond_broadcast(&real->gone);
	pthread_mutex_unlock(&real->lock);
	if (last)
		real_destroy(real);
	return NULL;
}

static void *real_run_pieces(void *arg)
{
	struct disk_real *real = arg;
	struct disk_piece piece;

	cpu_bulk();
	pthread_mutex_lock(&real->lock);
	for (;;) {
		if (real_next(real, &piece)) {
			pthread_mutex_unlock(&real->lock);
			real_move(real, &piece);
			pthread_mutex_lock(&real->lock);
		} else if (!real->closing) {
			pthread_cond_wait(&real->pieces_more, &real->lock);
		} else {
			break;
		}
	}
	pthread_mutex_unlock(&real->lock);
	return real_leave(real);
}

/* ---- the other ops ---- */

static void real_open_dir(struct disk_real *real)
{
	err_clear();
	if (disk_dir_open(&real->dir) < 0)
		err_take(&real->base.why);
	pthread_mutex_lock(&real->lock);
	real->base.direct = real->dir.direct;
	if (!real->abandoned)
		disk_opened(&real->base);
	pthread_mutex_unlock(&real->lock);
}

static struct disk_op *real_job(struct disk_real *real)
{
	struct list *link;

	pthread_mutex_lock(&real->lock);
	while (!(link = list_pop_front(&real->jobs)) && !real->closing)
		pthread_cond_wait(&real->jobs_more, &real->lock);
	pthread_mutex_unlock(&real->lock);
	return link ? list_entry(link, struct disk_op, link) : NULL;
}

static void *real_run_jobs(void *arg)
{
	struct disk_real *real = arg;
	struct disk_op *op;
	int r;

	cpu_bulk();
	real_open_dir(real);
	while ((op = real_job(real))) {
		disk_op_hook(op, op->before);
		r = op->result < 0 ? 0 : disk_dir_do(&real->dir, op);
		if (r < 0)
			disk_op_fail(op, r);
		real_finish(real, op);
	}
	return real_leave(real);
}

/* ---- the loop's side ---- */

static void real_submit(struct disk *disk, struct disk_op *op)
{
	struct disk_real *real = real_of(disk);

	pthread_mutex_lock(&real->lock);
	if (op->what == DISK_READ || op->what == DISK_WRITE) {
		disk_queue_put(&real->queue, op);
		pthread_cond_signal(&real->pieces_more);
	} else {
		list_push_back(&real->jobs, &op->link);
		pthread_cond_signal(&real->jobs_more);
	}
	pthread_mutex_unlock(&real->lock);
}

static void real_close(struct disk *disk)
{
	struct disk_real *real = real_of(disk);
	struct disk_op *op;
	struct list *link;

	pthread_mutex_lock(&real->lock);
	real->closing = true;
	while ((link = list_pop_front(&real->jobs))) {
		op = list_entry(link, struct disk_op, link);
		disk_op_cancel(op);
		disk_ended(disk, op);
	}
	while ((op = disk_queue_cancel(&real->queue))) {
		disk_dir_let(&real->dir, op);
		disk_ended(disk, op);
	}
	pthread_cond_broadcast(&real->jobs_more);
	pthread_cond_broadcast(&real->pieces_more);
	pthread_mutex_unlock(&real->lock);
}

static bool real_idle(const struct disk *disk)
{
	struct disk_real *real = real_of((struct disk *)disk);
	bool idle;

	pthread_mutex_lock(&real->lock);
	idle = real->alive == 0;
	pthread_mutex_unlock(&real->lock);
	return idle;
}

/* True: all threads have ended. False: it is abandoned, and the caller counts as one of
 * them. */
static bool real_wait(struct disk_real *real)
{
	struct timespec at = clock_after(real->stop_ns);
	int no = 0;

	pthread_mutex_lock(&real->lock);
	while (real->alive && no == 0)
		no = pthread_cond_clockwait(&real->gone, &real->lock, CLOCK_MONOTONIC,
					    &at);
	real->abandoned = real->alive > 0;
	real->alive += real->abandoned;
	pthread_mutex_unlock(&real->lock);
	return !real->abandoned;
}

static int real_free(struct disk *disk)
{
	struct disk_real *real = real_of(disk);
	bool all = real_wait(real);

	for (unsigned int i = 0; i < real->thread_count; i++) {
		if (all)
			pthread_join(real->threads[i], NULL);
		else
			pthread_detach(real->threads[i]);
	}
	disk_deliver(disk);
	if (all) {
		assert(disk->figures.in_flight == 0);
		real_destroy(real);
		return 0;
	}
	log_error("store", real->dir.path, "no response; abandoned", "ops=%u",
		  disk->figures.in_flight);
	disk_fini(disk);
	(void)real_leave(real);
	return DISK_ABANDONED;
}

static const struct disk_ops real_ops = {
	.submit = real_submit,
	.close = real_close,
	.idle = real_idle,
	.free = real_free,
};

/* ---- opening ---- */

static int real_thread(struct disk_real *real, const char *name, void *(*run)(void *arg))
{
	pthread_t *thread = &real->threads[real->thread_count];
	int r;

	assert(real->thread_count < ARRAY_LEN(real->threads));
	pthread_mutex_lock(&real->lock);
	real->alive++;
	pthread_mutex_unlock(&real->lock);
	r = thread_start(name, run, real, thread);
	if (r == 0) {
		real->thread_count++;
		return 0;
	}
	pthread_mutex_lock(&real->lock);
	real->alive--;
	pthread_mutex_unlock(&real->lock);
	return err_pass(r);
}

static int real_start(struct disk_real *real, struct loop *loop,
		      const struct disk_args *args)
{
	int r = disk_init(&real->base, loop, &real_ops, args);

	if (r == 0)
		r = disk_dir_init(&real->dir, args->path, args->cached);
	for (unsigned int i = 0; r == 0 && i < IO_THREADS; i++)
		r = real_thread(real, "kvd-disk-io", real_run_pieces);
	if (r == 0)
		r = real_thread(real, "kvd-disk", real_run_jobs);
	return r < 0 ? err_pass(r) : 0;
}

int disk_open(struct loop *loop, const struct disk_args *args, struct disk **disk_p)
{
	struct disk_real *real = mem_zalloc(sizeof(*real));
	struct err why;
	int r;

	if (!real)
		return err_pass(-ENOMEM);
	real->stop_ns = args->stop_ns ? args->stop_ns : DISK_STOP_NS;
	real->dir.fd = real->dir.lock_fd = -1;
	list_init(&real->jobs);
	disk_queue_init(&real->queue, IO_THREADS - 1); /* one is there for READs */
	pthread_mutex_init(&real->lock, NULL);
	pthread_cond_init(&real->jobs_more, NULL);
	pthread_cond_init(&real->pieces_more, NULL);
	pthread_cond_init(&real->gone, NULL);
	r = real_start(real, loop, args);
	if (r < 0) {
		err_take(&why);
		real->base.ops = &real_ops;
		disk_close(&real->base);
		(void)real_free(&real->base);
		return err_reraise(&why);
	}
	*disk_p = &real->base;
	return 0;
}
