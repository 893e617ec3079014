/* SPDX-License-Identifier: Apache-2.0 */
/* Moves pieces by blocking calls, on several threads. */
#include <errno.h>

#include "daemon/base/cpu.h"
#include "daemon/store/disk_impl.h"

#define THREADS 4u

static int threads_make(struct disk_real *real)
{
	(void)real;
	return 0;
}

static void threads_unmake(struct disk_real *real)
{
	(void)real;
}

static void threads_kick(struct disk_real *real)
{
	pthread_cond_signal(&real->pieces_more);
}

void disk_threads_move(struct disk_real *real, struct disk_piece *piece)
{
	const struct disk_op *op = piece->op;
	ssize_t moved;

	do {
		int fd = op->own.held->fd;
		off_t at = (off_t)(op->offset + piece->at);

		moved = op->what == DISK_READ
				? preadv2(fd, piece->iov, piece->iov_count, at, 0)
				: pwritev2(fd, piece->iov, piece->iov_count, at, 0);
	} while (disk_real_back(real, piece, moved < 0 ? -errno : moved));
}

void disk_threads_work(struct disk_real *real)
{
	struct disk_piece piece;

	pthread_mutex_lock(&real->lock);
	for (;;) {
		if (disk_real_next(real, &piece)) {
			pthread_mutex_unlock(&real->lock);
			disk_threads_move(real, &piece);
			pthread_mutex_lock(&real->lock);
		} else if (!real->closing) {
			pthread_cond_wait(&real->pieces_more, &real->lock);
		} else {
			break;
		}
	}
	pthread_mutex_unlock(&real->lock);
}

static void *threads_run(void *arg)
{
	cpu_bulk();
	disk_threads_work(arg);
	return disk_real_leave(arg);
}

const struct disk_engine disk_engine_threads = {
	.kind = "threads",
	.threads = THREADS,
	.writes_most = THREADS - 1, /* one is there for READs at once */
	.make = threads_make,
	.run = threads_run,
	.kick = threads_kick,
	.unmake = threads_unmake,
};
