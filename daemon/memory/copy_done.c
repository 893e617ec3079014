/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/copy_done.h"

#include <assert.h>

#include "daemon/base/clock.h"
#include "daemon/memory/copy.h"

static void copy_done_on_item(struct mailbox *jobs, struct list *item)
{
	struct copy_job *job = list_entry(item, struct copy_job, link);

	(void)jobs;
	job->on_done(job); /* it may free the job, submit or cancel */
}

int copy_done_init(struct copy_done *done, struct loop *loop)
{
	int r = mailbox_init(&done->jobs, loop, copy_done_on_item);

	if (r < 0)
		return err_pass(r);
	pthread_mutex_init(&done->lock, NULL);
	return 0;
}

void copy_done_fini(struct copy_done *done)
{
	while (!list_empty(&done->jobs.items))
		mailbox_deliver(&done->jobs);
	mailbox_fini(&done->jobs);
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
	mailbox_put(&done->jobs, &job->link);
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

void copy_done_cancel(struct copy_done *done, struct copy_job *job)
{
	pthread_mutex_lock(&done->lock);
	/* With all slices taken the job is in no queue, or in that of finished ones: the
	 * last slice settles it, or on_done is pending. */
	if (!atomic_exchange(&job->canceled, true) && job->next_byte < job->end) {
		list_remove(&job->link);
		copy_done_settle(done, job);
	}
	pthread_mutex_unlock(&done->lock);
}

void copy_done_cancel_all(struct copy_done *done, struct list *ready)
{
	struct copy_job *job;

	while ((job = list_first(ready, struct copy_job, link))) {
		atomic_store(&job->canceled, true);
		list_remove(&job->link);
		copy_done_settle(done, job);
	}
}
