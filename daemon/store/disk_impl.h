/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk_impl: the interface between disk.c and its backends. disk.c is the public
 * interface, disk_queue.c the order of pieces, disk_dir.c the calls on a directory,
 * disk_name.c its names, disk_real.c its threads; disk_uring.c and disk_threads.c move
 * pieces. A simulated disk (tests) uses the interface and the order.
 */
#ifndef KVD_STORE_DISK_IMPL_H
#define KVD_STORE_DISK_IMPL_H

#include <pthread.h>

#include "daemon/loop/mailbox.h"
#include "daemon/store/disk.h"
#include "daemon/store/disk_dir.h"
#include "daemon/store/disk_name.h"
#include "daemon/store/disk_queue.h"

/* ---- the public interface ---- */

struct disk_ops {
	void (*submit)(struct disk *disk, struct disk_op *op); /* it is open */
	void (*close)(struct disk *disk);
	bool (*idle)(const struct disk *disk); /* no thread is left */
	int (*free)(struct disk *disk);	       /* is closed */
};

enum disk_state { DISK_STATE_OPENING, DISK_STATE_OPEN, DISK_STATE_FAILED };

struct disk { /* the first member of an implementation's */
	const struct disk_ops *ops;
	const char *kind;
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

/* ---- threads over a directory ---- */

struct disk_real;

struct disk_engine {
	const char *kind;
	unsigned int threads;	  /* that run `run` */
	unsigned int writes_most; /* pieces of WRITEs in flight */
	/* Loop thread, before the threads. ERR_REQUIRE: not here. */
	int (*make)(struct disk_real *real);
	void *(*run)(void *real);	      /* ends with disk_real_leave() */
	void (*kick)(struct disk_real *real); /* a piece was queued; under the lock */
	void (*unmake)(struct disk_real *real);
};
extern const struct disk_engine disk_engine_uring, disk_engine_threads;

#define DISK_THREADS_MAX 5u

struct disk_real {
	struct disk base;
	struct disk_dir dir;
	const struct disk_engine *engine;
	void *impl; /* the backend's */
	uint64_t stop_ns;

	pthread_mutex_t lock; /* all below */
	pthread_cond_t jobs_more, pieces_more, gone;
	struct list jobs;	 /* ops that are not READ or WRITE, in order */
	struct disk_queue queue; /* those that are */
	bool closing, abandoned;
	unsigned int alive; /* threads */
	unsigned int thread_count;
	pthread_t threads[DISK_THREADS_MAX];
};

/* Under the lock, which it may release meanwhile: the next piece; its file is open and
 * its op's `before` has run. False: none now. */
bool disk_real_next(struct disk_real *real, struct disk_piece *piece);
/* Without the lock: this many bytes of the piece were moved, or a negative errno. True:
 * the piece, changed, continues. */
bool disk_real_back(struct disk_real *real, struct disk_piece *piece, int64_t moved);
/* The thread's last call. */
void *disk_real_leave(struct disk_real *real);
/* Moves a piece completely, by blocking calls. */
void disk_threads_move(struct disk_real *real, struct disk_piece *piece);
/* The main function of a thread of that backend. */
void disk_threads_work(struct disk_real *real);

#endif
