/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy_done: the end of a copy job. The copy threads and the GPU's threads have one each:
 * the lock of their jobs, and the queue back to the loop.
 */
#ifndef KVD_TRANSPORT_COPY_DONE_H
#define KVD_TRANSPORT_COPY_DONE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/mailbox.h"

struct copy_job;

struct copy_done {
	struct mailbox jobs;  /* for on_done */
	pthread_mutex_t lock; /* of all shared state of the threads */
};

int copy_done_init(struct copy_done *done, struct loop *loop);
/* Calls on_done of the finished jobs; no thread is left. */
void copy_done_fini(struct copy_done *done);

/* Both with the lock held. If no slice of the job is left to start and none is running,
 * it is passed to the loop; as canceled, if bytes are missing. */
void copy_done_settle(struct copy_done *done, struct copy_job *job);
/* A slice failed, with this thread's error: no further slice starts. */
void copy_done_fail(struct copy_job *job, int r);

/* A slice is copied. Any thread. */
void copy_done_slice(struct copy_job *job, uint64_t bytes, bool bounced);

/* As copier_cancel(). */
void copy_done_cancel(struct copy_done *done, struct copy_job *job);
/* All jobs of a list of ready ones, because the threads end. The lock is held. */
void copy_done_cancel_all(struct copy_done *done, struct list *ready);

#endif
