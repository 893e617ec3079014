/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy_done: how a copy job ends, whoever copied it. The copy threads and the
 * GPU's have one each: the lock of their jobs, and the way back to the loop.
 */
#ifndef KVD_TRANSPORT_COPY_DONE_H
#define KVD_TRANSPORT_COPY_DONE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"

struct copy_job;

struct copy_done {
	struct loop_wake wake;
	pthread_mutex_t lock; /* of all that the threads share */
	struct list jobs;     /* for on_done */
};

int copy_done_init(struct copy_done *done, struct loop *loop);
void copy_done_fini(struct copy_done *done); /* everything is delivered */

/* Both with the lock held. If nothing of the job is left to begin and nothing is
 * running, it goes to the loop; canceled, if bytes are missing. */
void copy_done_settle(struct copy_done *done, struct copy_job *job);
/* A slice failed, with this thread's error: no more of them begin. */
void copy_done_fail(struct copy_job *job, int r);

/* A slice is copied. Any thread. */
void copy_done_slice(struct copy_job *job, uint64_t bytes, bool bounced);

/* Call on_done of what is there. The loop's thread, without the lock. */
void copy_done_deliver(struct copy_done *done);

#endif
