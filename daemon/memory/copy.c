/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy threads.
 *
 * Jobs wait in one ring. A thread takes the first job, claims its next slice under the
 * lock, puts the job back at the end while it has slices left, and copies without the
 * lock. So jobs share the threads fairly, one job can use them all, and a cancel waits
 * for one slice at most. A job is done when no slice of it is left to claim and none is
 * running; then it moves to the done list and the loop calls on_done. No other path
 * completes a job, which is the whole proof behind "quiesced": after on_done no thread
 * holds its addresses.
 *
 * A short job is not worth a thread: the loop's own copies it in copier_submit(), one
 * such job a turn, and its on_done follows as a deferred call. So a room of one page
 * neither waits behind a large one's slices nor for a core that wakes up. Guarded
 * memory is not for the loop: its owner can make any access a fault or a wait (wait.h
 * keeps the same rule), nor is vm memory, which is another process's.
 *
 * How a slice is copied is copy_hand.c's. Rows of files are not for these threads, which
 * would wait for a disk: copy_file.h.
 */
#include "daemon/memory/copy.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/cpu.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "daemon/loop/loop.h"
#include "daemon/memory/copy_done.h"
#include "daemon/memory/copy_file.h"
#include "daemon/memory/copy_gpu.h"
#include "daemon/memory/copy_hand.h"
#include "daemon/memory/file_rows.h"

#define COPY_STREAM_BYTES (UINT64_C(2) << 20) /* about a core's own cache */
/* The most that the loop's own thread copies in a turn: 5 us, a third of the time to wake
 * another thread and be woken by it. */
#define COPY_AT_ONCE_BYTES (UINT64_C(64) << 10)
#define COPY_AT_ONCE_ROWS 1024u

struct worker {
	struct copier *copier;
	pthread_t thread;
	bool started;
	struct copy_hand *hand;
};

struct copier {
	struct loop *loop;
	uint64_t slice_bytes;
	struct copy_done done; /* its lock is the copier's */
	pthread_cond_t more;
	struct list ready;		    /* jobs with slices to claim */
	uint64_t at_once_ns, at_once_bytes; /* the turn, and the bytes copied in it */
	bool stopping;
	struct copy_gpu *gpu;	/* NULL: no job had device memory yet */
	struct copy_file *file; /* NULL: no job had a file yet */
	unsigned int worker_count;
	struct worker *workers;
};

/* ---- threads ---- */

/* The lock is held on entry and on return. */
static void slice_run(struct worker *worker, struct copy_job *job)
{
	struct copier *copier = worker->copier;
	uint64_t begin = job->next_byte, end = job->end;
	int r;

	if (end - begin > job->slice_bytes)
		end = begin + job->slice_bytes;
	job->next_byte = end;
	list_remove(&job->link);
	if (end < job->end)
		list_push_back(&copier->ready, &job->link);
	/* before the lock is released: a cancel must find this slice running */
	atomic_fetch_add(&job->slices_running, 1);
	pthread_mutex_unlock(&copier->done.lock);

	cpu_breathe();
	r = copy_slice(worker->hand, job, begin, end, job->bounce);
	if (r == 0)
		copy_done_slice(job, end - begin, job->bounce);

	pthread_mutex_lock(&copier->done.lock);
	atomic_fetch_sub(&job->slices_running, 1);
	if (r < 0)
		copy_done_fail(job, r);
	copy_done_settle(&copier->done, job);
}

static void *copy_worker_main(void *arg)
{
	struct worker *worker = arg;
	struct copier *copier = worker->copier;
	struct copy_job *job;

	/* throughput work: never before the loop or an engine in line */
	cpu_bulk();
	pthread_mutex_lock(&copier->done.lock);
	for (;;) {
		job = list_first(&copier->ready, struct copy_job, link);
		if (job)
			slice_run(worker, job);
		else if (copier->stopping)
			break;
		else
			pthread_cond_wait(&copier->more, &copier->done.lock);
	}
	pthread_mutex_unlock(&copier->done.lock);
	return NULL;
}

static int copy_worker_start(struct worker *worker)
{
	int r = copy_hand_new(&worker->hand);

	if (r == 0)
		r = thread_start("kvd-copy", copy_worker_main, worker, &worker->thread);
	worker->started = r == 0;
	return err_pass(r);
}

int copier_new(struct loop *loop, unsigned int threads, uint64_t slice_bytes,
	       struct copier **copier_p)
{
	struct copier *copier;
	int r;

	assert(loop);
	if (threads == 0)
		return err_raise(ERR_INVAL, "copy threads must be 1 or more");
	copier = mem_zalloc(sizeof(*copier));
	if (!copier)
		return err_pass(-ENOMEM);
	copier->loop = loop;
	copier->slice_bytes = slice_bytes ? slice_bytes : COPY_SLICE_BYTES;
	list_init(&copier->ready);
	r = copy_done_init(&copier->done, loop);
	if (r < 0) {
		mem_free(copier);
		return err_pass(r);
	}
	pthread_cond_init(&copier->more, NULL);
	copier->workers = mem_calloc(threads, sizeof(*copier->workers));
	if (!copier->workers)
		r = -ENOMEM;
	for (; r == 0 && copier->worker_count < threads; copier->worker_count++) {
		copier->workers[copier->worker_count].copier = copier;
		r = copy_worker_start(&copier->workers[copier->worker_count]);
	}
	if (r < 0) {
		copier_free(copier);
		return err_pass(r);
	}
	*copier_p = copier;
	return 0;
}

void copier_free(struct copier *copier)
{
	if (!copier)
		return;
	copy_file_free(copier->file);
	copy_gpu_free(copier->gpu);
	pthread_mutex_lock(&copier->done.lock);
	copier->stopping = true;
	copy_done_cancel_all(&copier->done, &copier->ready);
	pthread_cond_broadcast(&copier->more);
	pthread_mutex_unlock(&copier->done.lock);
	for (unsigned int i = 0; i < copier->worker_count; i++) {
		struct worker *worker = &copier->workers[i];

		if (worker->started)
			pthread_join(worker->thread, NULL);
		copy_hand_free(worker->hand);
	}
	copy_done_fini(&copier->done);
	pthread_cond_destroy(&copier->more);
	mem_free(copier->workers);
	mem_free(copier);
}

/* ---- submitting ---- */

/* In vm memory a row costs 0.5 us, however short: this limits a small job's wait for its
 * turn to half a millisecond. */
static uint64_t job_slice(const struct copier *copier, const struct copy_job *job)
{
	uint64_t bytes = copier->slice_bytes, row;

	if (job->begin == job->end ||
	    (!copy_has_vm(&job->src) && !copy_has_vm(&job->dst)))
		return bytes;
	row = job->plan->row_median;
	return row > 0 && row < bytes / IOV_MAX ? row * IOV_MAX : bytes;
}

/* Memory that neither faults nor waits, regardless of its owner. */
static bool is_for_loop(const struct copy_end *end)
{
	for (uint32_t i = 0; end->buffers && i < end->buffer_count; i++) {
		const struct memory *m = end->buffers[i].memory;

		if (m && !memory_is_plain(m))
			return false;
	}
	return true;
}

static bool job_at_once(struct copier *copier, const struct copy_job *job)
{
	uint64_t bytes = job->end - job->begin, now = loop_now_ns(copier->loop);

	if (bytes == 0 || bytes > COPY_AT_ONCE_BYTES || bytes > copier->slice_bytes ||
	    job->plan->rows > COPY_AT_ONCE_ROWS || !is_for_loop(&job->src) ||
	    !is_for_loop(&job->dst))
		return false;
	if (copier->at_once_ns != now)
		copier->at_once_bytes = 0;
	copier->at_once_ns = now;
	if (loop_enough(copier->loop) ||
	    copier->at_once_bytes + bytes > COPY_AT_ONCE_BYTES)
		return false;
	copier->at_once_bytes += bytes;
	return true;
}

static void job_run_at_once(struct copier *copier, struct copy_job *job)
{
	job->result = copy_host(NULL, job); /* no vm: no hand */
	if (job->result < 0)
		err_take(&job->err);
	else
		copy_done_slice(job, job->end - job->begin, false);
	job->next_byte = job->end;
	mailbox_post(&copier->done.jobs, &job->link);
}

int copier_submit(struct copier *copier, struct copy_job *job)
{
	int r = copy_job_check(job);

	assert(job->on_done);
	if (r < 0)
		return err_pass(r);
	list_init(&job->link);
	atomic_store(&job->canceled, false);
	atomic_store(&job->slices_running, 0);
	atomic_store(&job->copied, 0);
	atomic_store(&job->first_ns, 0);
	atomic_store(&job->bounced, 0);
	job->next_byte = job->begin;
	job->bounce = copy_has_vm(&job->src) && copy_has_vm(&job->dst);
	job->pairs = job->bounce && copy_in_pairs(job);
	job->streaming = job->end - job->begin >= COPY_STREAM_BYTES;
	job->result = 0;
	job->on_file = job->begin < job->end && file_rows_of(job);
	job->on_gpu = !job->on_file && job->begin < job->end && copy_gpu_device(job);
	if (job->on_file && !copier->file)
		r = copy_file_new(copier->loop, copier->slice_bytes, &copier->file);
	if (job->on_file)
		return err_pass(r < 0 ? r : copy_file_submit(copier->file, job));
	if (job->on_gpu && !copier->gpu)
		r = copy_gpu_new(copier->loop, copier->slice_bytes, &copier->gpu);
	if (job->on_gpu)
		return err_pass(r < 0 ? r : copy_gpu_submit(copier->gpu, job));
	if (job_at_once(copier, job)) {
		job_run_at_once(copier, job);
		return 0;
	}
	job->slice_bytes = job_slice(copier, job);
	pthread_mutex_lock(&copier->done.lock);
	if (job->begin == job->end) {
		copy_done_settle(&copier->done, job);
	} else {
		list_push_back(&copier->ready, &job->link);
		pthread_cond_signal(&copier->more);
		/* several slices: let every idle thread have one */
		if (job->end - job->begin > job->slice_bytes)
			pthread_cond_broadcast(&copier->more);
	}
	pthread_mutex_unlock(&copier->done.lock);
	return 0;
}

void copier_cancel(struct copier *copier, struct copy_job *job)
{
	if (job->on_file)
		copy_file_cancel(copier->file, job);
	else if (job->on_gpu)
		copy_gpu_cancel(copier->gpu, job);
	else
		copy_done_cancel(&copier->done, job);
}
