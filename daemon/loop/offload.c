/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A fixed pool of helper threads, one input queue per principal and one output queue.
 *
 * `queue` holds the first job of each principal that has any; the others lie behind it,
 * in the job, so submitting allocates nothing. A served principal moves to the end. A
 * principal that occupies half of the helpers is skipped until one finishes, which then
 * checks again itself.
 *
 * The lock covers only the lists and `started`; a job's own fields belong
 * to the helper between the moment it is taken and the moment it lies in the
 * finished list, and to the loop otherwise. Finished jobs reach the loop
 * through one loop_wake, so any number of them cost one wake-up. Jobs of a principal
 * start in the order of submission; with more than one helper they may end in
 * another.
 *
 * The inline kind has no threads: work runs in offload_submit() and `done` uses the same
 * loop_wake, which a virtual loop runs as a deferred call.
 */
#include "daemon/loop/offload.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>

#include "daemon/base/cpu.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "daemon/loop/loop.h"

#define THREADS_MAX 256u

struct offload {
	struct loop *loop;
	struct loop_wake wake;
	pthread_mutex_t lock;
	pthread_cond_t more;
	struct list queue;    /* not started: the first of each principal */
	struct list finished; /* by helpers */
	struct list due;      /* loop thread only: `done` is called next */
	struct loop_defer rest;
	bool stopping;
	bool held;	      /* inline only */
	unsigned int pending; /* loop thread only */
	unsigned int threads;
	struct helper {
		struct offload *offload;
		pthread_t tid;
		bool working;
		uint64_t principal; /* of the job that it works at */
	} helpers[];
};

static void job_work(struct offload_job *job)
{
	err_clear();
	job->result = 0;
	job->work(job);
	if (job->result < 0 && job->err.code == ERR_OK)
		err_take(&job->err);
}

/* ---- the queue, under the lock ---- */

static void queue_put(struct offload *o, struct offload_job *job)
{
	struct offload_job *first;

	list_init(&job->behind);
	list_foreach(first, &o->queue, link) {
		if (first->principal == job->principal) {
			list_push_back(&first->behind, &job->link);
			return;
		}
	}
	list_push_back(&o->queue, &job->link);
}

/* The job behind it replaces the first one, at the end of the queue. */
static void queue_remove(struct offload *o, struct offload_job *job)
{
	struct list *link = list_pop_front(&job->behind);
	struct offload_job *next;

	list_remove(&job->link);
	if (!link)
		return;
	next = list_entry(link, struct offload_job, link);
	list_push_back(&job->behind, &next->behind);
	list_remove(&job->behind); /* the ring has its new head */
	list_push_back(&o->queue, &next->link);
}

static bool has_its_share(const struct offload *o, uint64_t principal)
{
	unsigned int working = 0;

	for (unsigned int i = 0; i < o->threads; i++)
		working += o->helpers[i].working && o->helpers[i].principal == principal;
	return working > 0 && working >= o->threads / 2;
}

static struct offload_job *queue_pick(struct offload *o)
{
	struct offload_job *job;

	list_foreach(job, &o->queue, link) {
		if (!o->stopping && has_its_share(o, job->principal))
			continue;
		queue_remove(o, job);
		return job;
	}
	return NULL;
}

/* The next job, or NULL when the pool stops and nothing is left. */
static struct offload_job *take_job(struct offload *o)
{
	struct offload_job *job;

	while (!(job = queue_pick(o)) && !o->stopping)
		pthread_cond_wait(&o->more, &o->lock);
	if (job)
		job->started = true;
	return job;
}

static void *helper_main(void *arg)
{
	struct helper *helper = arg;
	struct offload *o = helper->offload;
	struct offload_job *job;

	/* plans and page faults by the thousand: the loop's thread has priority */
	cpu_bulk();
	pthread_mutex_lock(&o->lock);
	while ((job = take_job(o))) {
		helper->principal = job->principal;
		helper->working = true;
		pthread_mutex_unlock(&o->lock);
		job_work(job);
		pthread_mutex_lock(&o->lock);
		helper->working = false;
		list_push_back(&o->finished, &job->link);
		/* not under the lock, or the woken thread would wait for it */
		pthread_mutex_unlock(&o->lock);
		loop_wake(&o->wake);
		pthread_mutex_lock(&o->lock);
	}
	pthread_mutex_unlock(&o->lock);
	return NULL;
}

/* Call `done` of jobs that had finished when this was called: of all, or in as many turns
 * as they take. A `done` that submits again meets no list of ours under the lock, and
 * jobs that finish meanwhile wait for the next turn. */
static void run_finished(struct offload *o, bool all)
{
	struct offload_job *job;
	struct list *link;

	pthread_mutex_lock(&o->lock);
	list_append(&o->due, &o->finished);
	pthread_mutex_unlock(&o->lock);
	while ((link = list_pop_front(&o->due))) {
		job = list_entry(link, struct offload_job, link);
		job->submitted = false;
		o->pending--;
		job->done(job);
		if (!all && !list_empty(&o->due) && loop_enough(o->loop)) {
			loop_defer(o->loop, &o->rest);
			return;
		}
	}
}

static void offload_on_wake(struct loop_wake *wake)
{
	struct offload *o = container_of(wake, struct offload, wake);

	if (!o->held)
		run_finished(o, false);
}

static void offload_on_rest(struct loop_defer *rest)
{
	struct offload *o = container_of(rest, struct offload, rest);

	if (!o->held)
		run_finished(o, false);
}

static int start_threads(struct offload *o, unsigned int threads)
{
	int r = 0;

	pthread_mutex_lock(&o->lock); /* they read how many they are */
	while (r == 0 && o->threads < threads) {
		struct helper *helper = &o->helpers[o->threads];

		helper->offload = o;
		r = thread_start("kvd-offload", helper_main, helper, &helper->tid);
		o->threads += r == 0;
	}
	pthread_mutex_unlock(&o->lock);
	return err_pass(r);
}

static int offload_make(struct loop *loop, unsigned int threads,
			struct offload **offload_p)
{
	struct offload *o = mem_zalloc(sizeof(*o) + threads * sizeof(o->helpers[0]));
	int r;

	if (!o)
		return err_pass(-ENOMEM);
	pthread_mutex_init(&o->lock, NULL);
	pthread_cond_init(&o->more, NULL);
	list_init(&o->queue);
	list_init(&o->finished);
	list_init(&o->due);
	o->loop = loop;
	loop_defer_init(&o->rest, offload_on_rest);
	r = loop_wake_init(&o->wake, loop, offload_on_wake);
	if (r == 0)
		r = start_threads(o, threads);
	if (r < 0) {
		offload_free(o);
		return err_pass(r);
	}
	*offload_p = o;
	return 0;
}

int offload_new(struct loop *loop, unsigned int threads, struct offload **offload_p)
{
	assert(threads >= 1 && threads <= THREADS_MAX);
	return offload_make(loop, threads, offload_p);
}

int offload_new_inline(struct loop *loop, struct offload **offload_p)
{
	return offload_make(loop, 0, offload_p);
}

static void finish_inline(struct offload *o, struct offload_job *job)
{
	struct err kept;

	err_take(&kept); /* work must not disturb the submitter's record */
	job->started = true;
	job_work(job);
	list_push_back(&o->finished, &job->link);
	if (kept.code != ERR_OK)
		(void)err_reraise(&kept);
	else
		err_clear();
}

void offload_hold(struct offload *o, bool hold)
{
	assert(!o->threads);
	o->held = hold;
	if (!hold)
		loop_wake(&o->wake);
}

void offload_free(struct offload *o)
{
	struct offload_job *job;

	if (!o)
		return;
	pthread_mutex_lock(&o->lock);
	o->stopping = true;
	pthread_cond_broadcast(&o->more);
	pthread_mutex_unlock(&o->lock);
	for (unsigned int i = 0; i < o->threads; i++)
		pthread_join(o->helpers[i].tid, NULL);
	o->threads = 0; /* jobs submitted by `done` now run here */
	loop_defer_cancel(&o->rest);
	run_finished(o, true);
	while (o->pending) {
		while ((job = queue_pick(o)))
			finish_inline(o, job);
		run_finished(o, true);
	}
	loop_wake_fini(&o->wake);
	pthread_cond_destroy(&o->more);
	pthread_mutex_destroy(&o->lock);
	mem_free(o);
}

void offload_submit(struct offload *o, struct offload_job *job)
{
	assert(job->work && job->done);
	assert(!job->submitted);
	job->submitted = true;
	job->started = false;
	job->err = (struct err){.code = ERR_OK};
	list_init(&job->link);
	o->pending++;
	if (!o->threads) {
		finish_inline(o, job);
		loop_wake(&o->wake);
		return;
	}
	pthread_mutex_lock(&o->lock);
	queue_put(o, job);
	pthread_mutex_unlock(&o->lock);
	pthread_cond_signal(&o->more);
}

bool offload_cancel(struct offload *o, struct offload_job *job)
{
	bool canceled = false;

	pthread_mutex_lock(&o->lock);
	if (job->submitted && !job->started) {
		queue_remove(o, job);
		canceled = true;
	}
	pthread_mutex_unlock(&o->lock);
	if (canceled) {
		job->submitted = false;
		o->pending--;
	}
	return canceled;
}

struct discard {
	struct offload_job job;
	void (*free)(void *owned);
	void *owned;
};

static void discard_work(struct offload_job *job)
{
	struct discard *discard = container_of(job, struct discard, job);

	discard->free(discard->owned);
}

static void discard_done(struct offload_job *job)
{
	mem_free(container_of(job, struct discard, job));
}

void offload_discard(struct offload *offload, void (*free)(void *owned), void *owned)
{
	struct discard *discard = mem_zalloc_quiet(sizeof(*discard));

	if (!discard) {
		free(owned);
		return;
	}
	discard->job = (struct offload_job){.work = discard_work, .done = discard_done};
	discard->free = free;
	discard->owned = owned;
	offload_submit(offload, &discard->job);
}

void offload_discard_block(void *arg, void *owned)
{
	offload_discard(arg, mem_free, owned);
}

unsigned int offload_pending(const struct offload *o)
{
	return o->pending;
}
