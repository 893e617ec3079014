/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/copy_done.h"

#include <assert.h>

#include "daemon/base/clock.h"
#include "daemon/memory/copy.h"

static void copy_done_on_wake(struct loop_wake *wake)
{
	copy_done_deliver(container_of(wake, struct copy_done, wake));
}

int copy_done_init(struct copy_done *done, struct loop *loop)
{
	int r = loop_wake_init(&done->wake, loop, copy_done_on_wake);

	if (r < 0)
		return err_pass(r);
	pthread_mutex_init(&done->lock, NULL);
	list_init(&done->jobs);
	return 0;
}

void copy_done_fini(struct copy_done *done)
{
	loop_wake_fini(&done->wake);
	pthread_mutex_destroy(&done->lock);
}

/*
 * The lock is held. Called by each slice's end and by a cancel: only the call that finds
 * no slice running, and none left, queues the job, so it is queued once. A job that
 * failed or was canceled is in no queue of ready ones, so no thread starts another slice
 * of it: after on_done no thread has its addresses.
 */
void copy_done_settle(struct copy_done *done, struct copy_job *job)
{
	bool stop = job->result < 0 || atomic_load(&job->canceled);

	assert(atomic_load(&job->slices_running) >= 0);
	assert(job->next_byte <= job->end);
	if (atomic_load(&job->slices_running) > 0)
		return;
	if (!stop && job->next_byte < job->end)
		return;
	if (job->result == 0 && job->next_byte < job->end) {
		err_set(&job->err, ERR_CANCELED, "the copy was canceled");
		job->result = -err_errno(ERR_CANCELED);
	}
	list_remove(&job->link);
	list_push_back(&done->jobs, &job->link);
	loop_wake(&done->wake);
}

void copy_done_fail(struct copy_job *job, int r)
{
	assert(r < 0);
	if (job->result == 0) {
		job->result = r;
		err_take(&job->err);
	}
	err_clear();
	list_remove(&job->link);
}

void copy_done_slice(struct copy_job *job, uint64_t bytes, bool bounced)
{
	if (atomic_fetch_add(&job->copied, bytes) == 0)
		atomic_store(&job->first_ns, clock_ns());
	atomic_fetch_add(&job->bounced, bounced ? bytes : 0);
}

void copy_done_deliver(struct copy_done *done)
{
	for (;;) {
		struct copy_job *job;
		struct list *n;

		pthread_mutex_lock(&done->lock);
		n = list_pop_front(&done->jobs);
		pthread_mutex_unlock(&done->lock);
		if (!n)
			return;
		/* without the lock: it may free the job, submit or cancel */
		job = list_entry(n, struct copy_job, link);
		job->on_done(job);
	}
}
