/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies that a GPU does, one thread a device.
 *
 * The thread keeps its pipe (copy_pipe.h) full, so that the device does not wait
 * for it: jobs take turns, a slice each. A job is done when none of its slices is
 * queued.
 *
 * While the thread has work it is a user of its device and holds lanes; when it has none,
 * it holds nothing: the context may be released with the last engine.
 *
 * tcp's I/O threads copy a frame at a time (copy_now()), on their own lane each; the
 * kernel's socket buffers hide a frame's waiting time from the wire.
 */
#include "daemon/memory/copy_gpu.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>

#include "daemon/base/cpu.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "daemon/memory/copy_done.h"
#include "daemon/memory/copy_hand.h"
#include "daemon/memory/copy_pipe.h"
#include "gpu/gpu.h"
#include "gpu/import.h"

/* Of the CPU's slices, which are too short for a GPU. */
#define SLICE_FACTOR 16u

struct gpu_worker {
	struct list link; /* gpu->workers */
	struct copy_gpu *gpu;
	pthread_t thread;
	pthread_cond_t more;
	struct list ready; /* jobs with bytes to queue */
	struct copy_pipe pipe;
};

struct copy_gpu {
	struct copy_done done; /* its lock is that of all workers */
	uint64_t slice_bytes;
	struct list workers; /* the loop's thread alone changes it */
	bool stopping;
};

struct gpu_device *copy_gpu_device(const struct copy_job *job)
{
	const struct memory *m = copy_end_find(&job->dst, MEMORY_DEVICE);

	if (!m)
		m = copy_end_find(&job->src, MEMORY_DEVICE);
	return m ? m->gpu->device : NULL;
}

static int gpu_now(struct copy_hand *hand, const struct copy_job *job)
{
	struct copy_pipe pipe = {.device = copy_gpu_device(job), .hand = hand};
	struct copy_job whole = {.plan = job->plan,
				 .begin = job->begin,
				 .end = job->end,
				 .src = job->src,
				 .dst = job->dst};
	uint64_t pos = job->begin;
	struct copy_flight flight;
	struct err why;
	int r = copy_pipe_open(&pipe, 1);

	assert(pipe.device && job->begin < job->end);
	if (r < 0)
		return err_pass(r);
	while (r == 0 && (pos < job->end || pipe.count > 0)) {
		if (pos < job->end && !copy_pipe_full(&pipe))
			r = copy_pipe_begin(&pipe, &whole, pos, job->end, UINT64_MAX,
					    &pos);
		else
			r = copy_pipe_end(&pipe, &flight);
	}
	if (r < 0) /* drained: the slices behind it do not count */
		err_take(&why);
	copy_pipe_close(&pipe);
	return r < 0 ? err_reraise(&why) : 0;
}

int copy_now(struct copy_hand *hand, struct copy_job *job)
{
	if (job->begin < job->end && copy_gpu_device(job))
		return err_pass(gpu_now(hand, job));
	return err_pass(copy_host(hand, job));
}

/* ---- jobs ---- */

/* The lock is held on entry and on return. */
static void job_begin(struct gpu_worker *worker, struct copy_job *job)
{
	struct copy_gpu *gpu = worker->gpu;
	struct copy_pipe *pipe = &worker->pipe;
	uint64_t begin = job->next_byte, reached = begin;
	int r = 0;

	list_remove(&job->link);
	atomic_fetch_add(&job->slices_running, 1);
	pthread_mutex_unlock(&gpu->done.lock);
	if (pipe->lane_count == 0)
		r = copy_pipe_open(pipe, pipe->device->gpu->streams);
	if (r == 0)
		r = copy_pipe_begin(pipe, job, begin, job->end, gpu->slice_bytes,
				    &reached);
	pthread_mutex_lock(&gpu->done.lock);
	if (r < 0) {
		atomic_fetch_sub(&job->slices_running, 1);
		copy_done_fail(job, r);
	} else {
		job->next_byte = reached;
		if (job->next_byte < job->end && job->result == 0 &&
		    !atomic_load(&job->canceled))
			list_push_back(&worker->ready, &job->link);
	}
	copy_done_settle(&gpu->done, job);
}

/* The lock is held on entry and on return. */
static void flight_end(struct gpu_worker *worker)
{
	struct copy_gpu *gpu = worker->gpu;
	struct copy_flight flight;
	int r;

	pthread_mutex_unlock(&gpu->done.lock);
	r = copy_pipe_end(&worker->pipe, &flight);
	if (r == 0)
		copy_done_slice(flight.job, flight.end - flight.begin,
				flight.way == COPY_WAY_IN || flight.way == COPY_WAY_OUT);
	pthread_mutex_lock(&gpu->done.lock);
	atomic_fetch_sub(&flight.job->slices_running, 1);
	if (r < 0)
		copy_done_fail(flight.job, r);
	copy_done_settle(&gpu->done, flight.job);
}

static void *copy_gpu_worker_main(void *arg)
{
	struct gpu_worker *worker = arg;
	struct copy_gpu *gpu = worker->gpu;
	struct copy_pipe *pipe = &worker->pipe;

	cpu_prompt(); /* a device waits for it; it computes little and waits much */
	pthread_mutex_lock(&gpu->done.lock);
	for (;;) {
		struct copy_job *job = list_first(&worker->ready, struct copy_job, link);

		if (job && (pipe->lane_count == 0 || !copy_pipe_full(pipe))) {
			job_begin(worker, job);
		} else if (pipe->count > 0) {
			flight_end(worker);
		} else if (pipe->lane_count > 0) {
			pthread_mutex_unlock(&gpu->done.lock);
			copy_pipe_close(pipe);
			pthread_mutex_lock(&gpu->done.lock);
		} else if (gpu->stopping) {
			break;
		} else {
			pthread_cond_wait(&worker->more, &gpu->done.lock);
		}
	}
	pthread_mutex_unlock(&gpu->done.lock);
	return NULL;
}

/* ---- threads ---- */

int copy_gpu_new(struct loop *loop, uint64_t slice_bytes, struct copy_gpu **gpu_p)
{
	struct copy_gpu *gpu = mem_zalloc(sizeof(*gpu));
	int r;

	if (!gpu)
		return err_pass(-ENOMEM);
	gpu->slice_bytes = slice_bytes * SLICE_FACTOR;
	list_init(&gpu->workers);
	r = copy_done_init(&gpu->done, loop);
	if (r < 0) {
		mem_free(gpu);
		return err_pass(r);
	}
	*gpu_p = gpu;
	return 0;
}

static void worker_free(struct gpu_worker *worker)
{
	copy_hand_free(worker->pipe.hand);
	mem_free(worker->pipe.bases);
	pthread_cond_destroy(&worker->more);
	mem_free(worker);
}

static int copy_gpu_worker_start(struct gpu_worker *worker)
{
	int r = copy_hand_new(&worker->pipe.hand);

	if (r < 0)
		return err_pass(r);
	worker->pipe.bases = mem_calloc(GPU_KEEP_BASES, sizeof(*worker->pipe.bases));
	if (!worker->pipe.bases)
		r = -ENOMEM;
	if (r == 0)
		r = thread_start("kvd-gpu", copy_gpu_worker_main, worker,
				 &worker->thread);
	return err_pass(r);
}

static int worker_find(struct copy_gpu *gpu, struct gpu_device *device,
		       struct gpu_worker **worker_p)
{
	struct gpu_worker *worker;
	int r;

	list_foreach(worker, &gpu->workers, link) {
		if (worker->pipe.device == device) {
			*worker_p = worker;
			return 0;
		}
	}
	worker = mem_zalloc(sizeof(*worker));
	if (!worker)
		return err_pass(-ENOMEM);
	worker->gpu = gpu;
	worker->pipe.device = device;
	list_init(&worker->ready);
	list_init(&worker->link);
	pthread_cond_init(&worker->more, NULL);
	r = copy_gpu_worker_start(worker);
	if (r < 0) {
		worker_free(worker);
		return err_pass(r);
	}
	list_push_back(&gpu->workers, &worker->link);
	*worker_p = worker;
	return 0;
}

void copy_gpu_free(struct copy_gpu *gpu)
{
	struct gpu_worker *worker;

	if (!gpu)
		return;
	pthread_mutex_lock(&gpu->done.lock);
	gpu->stopping = true;
	list_foreach(worker, &gpu->workers, link) {
		copy_done_cancel_all(&gpu->done, &worker->ready);
		pthread_cond_signal(&worker->more);
	}
	pthread_mutex_unlock(&gpu->done.lock);
	list_foreach_safe(worker, &gpu->workers, link) {
		pthread_join(worker->thread, NULL);
		list_remove(&worker->link);
		worker_free(worker);
	}
	copy_done_fini(&gpu->done);
	mem_free(gpu);
}

int copy_gpu_submit(struct copy_gpu *gpu, struct copy_job *job)
{
	struct gpu_worker *worker = NULL;
	int r = worker_find(gpu, copy_gpu_device(job), &worker);

	assert(job->on_done && copy_gpu_device(job));
	if (r < 0)
		return err_pass(r);
	pthread_mutex_lock(&gpu->done.lock);
	list_push_back(&worker->ready, &job->link);
	pthread_cond_signal(&worker->more);
	pthread_mutex_unlock(&gpu->done.lock);
	return 0;
}

/* Its slices are waited for; a job that is being started settles after that. */
void copy_gpu_cancel(struct copy_gpu *gpu, struct copy_job *job)
{
	copy_done_cancel(&gpu->done, job);
}
