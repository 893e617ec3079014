/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies that a GPU does, in slices, one thread a device.
 *
 * The thread keeps up to PIPE_DEPTH slices queued, so that the device does not
 * wait for it, and no more, so that a cancel waits for a few hundred
 * microseconds of copies. A slice is bounded in bytes and in rows: the driver
 * takes about as long for a short row as for 100 KiB.
 *
 * What the two ends are decides how a slice goes. Device memory and memory that
 * is mapped here (memfds, bounce slots; pinned or not) the driver copies by
 * itself. Memory that only process_vm_readv reaches, or that its owner may cut,
 * must not be given to a driver: it passes through a pinned buffer, filled or
 * emptied by the CPU under the same guards as ever. Rows between two such ends
 * (a table may mix kinds) are the CPU's alone. A slice is cut where that changes.
 *
 * A job is done when none of its slices is queued, and a slice is over when its
 * mark was waited for, or, after any fault, when the whole lane is drained. So
 * what copy.c promises of "still" holds here too.
 *
 * While the thread has work it is a user of its device and holds a lane; when it
 * has none, it holds nothing: the context may go with the last engine.
 */
#include "daemon/transport/copy_gpu.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "daemon/base/cpu.h"
#include "daemon/base/mem.h"
#include "daemon/loop.h"
#include "daemon/transport/copy.h"
#include "gpu/gpu.h"
#include "gpu/import.h"
#include "gpu/lane.h"

#define PIPE_DEPTH 4u
#define SLICE_FACTOR 64u /* a slice of the CPU's is too short for a GPU */
#define SLICE_ROWS 8192u

enum way { WAY_NONE, WAY_DIRECT, WAY_CPU, WAY_IN, WAY_OUT };

/* A slice that is queued on the lane. */
struct flight {
	struct copy_job *job; /* NULL in copy_gpu_now() */
	uint64_t begin, end;
	uint64_t mark;
	enum way way;
};

/* A lane, and what is queued on it. */
struct pipe {
	struct gpu_device *device;
	struct gpu_lane *lane; /* NULL: closed */
	struct copy_hand *hand;
	struct flight flights[PIPE_DEPTH];
	unsigned int first, count;
};

struct gpu_worker {
	struct list link; /* gpu->workers */
	struct copy_gpu *gpu;
	pthread_t thread;
	pthread_cond_t more;
	struct list ready; /* jobs with bytes to queue */
	struct pipe pipe;
};

struct copy_gpu {
	struct loop_wake wake;
	uint64_t slice_bytes;
	pthread_mutex_t lock;
	struct list workers; /* the loop's thread alone changes it */
	struct list done;
	bool stopping;
};

/* ---- where the bytes are ---- */

static bool of_device(const struct memory *m)
{
	return m && m->kind == MEMORY_DEVICE;
}

/* May the driver be given addresses of it? NULL: a linear end. */
static bool of_driver(const struct memory *m)
{
	return !m || m->kind == MEMORY_DEVICE || m->kind == MEMORY_SEALED ||
	       m->kind == MEMORY_LINEAR;
}

static struct gpu_device *end_device(const struct copy_end *end)
{
	for (uint32_t i = 0; end->buffers && i < end->buffer_count; i++)
		if (of_device(end->buffers[i].memory))
			return end->buffers[i].memory->gpu->device;
	return NULL;
}

struct gpu_device *copy_gpu_device(const struct copy_job *job)
{
	struct gpu_device *device = end_device(&job->dst);

	return device ? device : end_device(&job->src);
}

static struct memory *end_memory(const struct copy_end *end, uint32_t buffer)
{
	return end->buffers ? end->buffers[buffer].memory : NULL;
}

static uint64_t end_address(const struct copy_end *end, uint32_t buffer, uint64_t offset,
			    uint64_t skipped)
{
	const struct copy_buffer *b;

	if (!end->buffers)
		return (uintptr_t)end->linear + skipped;
	b = &end->buffers[buffer];
	return (b->memory->base ? (uintptr_t)b->memory->base : b->memory->address) +
	       b->offset + offset;
}

static enum way way_of(const struct memory *src, const struct memory *dst)
{
	if (!of_device(src) && !of_device(dst))
		return WAY_CPU;
	if (of_driver(src) && of_driver(dst))
		return WAY_DIRECT;
	return of_device(dst) ? WAY_IN : WAY_OUT;
}

static int memory_check(struct memory *m)
{
	if (!m || memory_owner_alive(m))
		return 0;
	if (of_device(m))
		return err_raise(ERR_FAULT, "the memory on %s is lost: %.200s",
				 m->gpu->device->id, m->gpu->device->why.text);
	return err_raise(ERR_FAULT, "the memory is gone");
}

/* ---- one slice ---- */

struct slice {
	struct pipe *pipe;
	const struct copy_job *job;
	struct plan_walk at;
	uint64_t begin, pos, most; /* stream bytes; at most so many */
	uint64_t rows;
	enum way way;
	const struct memory *src, *dst; /* last looked at */
	bool flat;
};

/* Like piece_take() in copy.c: the rest of a row, whole rows, or a row's begin. */
static uint64_t rows_take(struct slice *s, uint64_t most, struct gpu_rows *rows_p)
{
	const struct plan_run *run = &s->at.plan->runs[s->at.run];
	const struct copy_job *job = s->job;
	uint64_t off = s->at.row_offset, row = s->at.row;
	uint64_t rows = off ? 0 : run->count - row, len = run->len, taken;

	if (rows > most / len)
		rows = most / len;
	if (rows > SLICE_ROWS)
		rows = SLICE_ROWS;
	if (rows > 0) {
		s->at.row += rows;
	} else {
		len = run->len - off < most ? run->len - off : most;
		rows = 1;
		s->at.row_offset += len;
		if (s->at.row_offset == run->len) {
			s->at.row_offset = 0;
			s->at.row++;
		}
	}
	taken = rows * len;
	*rows_p = (struct gpu_rows){
		.src = end_address(&job->src, run->src_buffer,
				   run->src + row * (uint64_t)run->src_stride + off,
				   s->pos - job->begin),
		.dst = end_address(&job->dst, run->dst_buffer,
				   run->dst + row * (uint64_t)run->dst_stride + off,
				   s->pos - job->begin),
		.len = len,
		.count = rows,
		.src_stride = job->src.buffers ? run->src_stride : (int64_t)run->len,
		.dst_stride = job->dst.buffers ? run->dst_stride : (int64_t)run->len,
		.flat = s->flat,
	};
	return taken;
}

static bool slice_settle(struct slice *s)
{
	const struct plan *plan = s->at.plan;

	while (s->at.run < plan->run_count) {
		const struct plan_run *run = &plan->runs[s->at.run];

		if (run->len > 0 && s->at.row < run->count)
			return true;
		s->at.run++;
		s->at.row = 0;
		s->at.row_offset = 0;
	}
	return false;
}

/* Look at the memory of the run at hand. 0; 1: it goes another way than the
 * slice so far. */
static int slice_look(struct slice *s)
{
	const struct plan_run *run = &s->at.plan->runs[s->at.run];
	struct memory *src = end_memory(&s->job->src, run->src_buffer);
	struct memory *dst = end_memory(&s->job->dst, run->dst_buffer);
	enum way way;
	int r;

	if (s->way != WAY_NONE && src == s->src && dst == s->dst)
		return 0;
	way = way_of(src, dst);
	if (s->way != WAY_NONE && way != s->way)
		return 1;
	r = memory_check(src);
	if (r == 0)
		r = memory_check(dst);
	if (r < 0)
		return err_pass(r);
	s->way = way;
	s->src = src;
	s->dst = dst;
	s->flat = of_device(src) && of_device(dst) &&
		  src->gpu->device != dst->gpu->device;
	if (s->flat)
		(void)gpu_device_pair(s->pipe->device,
				      s->pipe->device == dst->gpu->device
					      ? src->gpu->device
					      : dst->gpu->device);
	if ((way == WAY_IN || way == WAY_OUT) && s->most > GPU_LANE_BOUNCE_BYTES)
		s->most = GPU_LANE_BOUNCE_BYTES;
	return 0;
}

/* A part of a job, with a linear end in the place of one of its own. */
static struct copy_job part_of(const struct copy_job *job, uint64_t begin, uint64_t end)
{
	struct copy_job part = {.plan = job->plan,
				.begin = begin,
				.end = end,
				.src = job->src,
				.dst = job->dst};

	if (!part.src.buffers)
		part.src.linear += begin - job->begin;
	if (!part.dst.buffers)
		part.dst.linear += begin - job->begin;
	return part;
}

static int bounce_take(struct pipe *pipe, unsigned int index, struct copy_end *end_p)
{
	void *bounce = NULL;
	int r = gpu_lane_bounce(pipe->lane, index, &bounce);

	*end_p = (struct copy_end){.linear = bounce};
	return err_pass(r);
}

/* Queue what can be queued of [begin, end): how far that is in flight->end. */
static int slice_rows(struct slice *s, uint64_t end)
{
	struct gpu_rows rows;
	int r = plan_walk_seek(&s->at, s->job->plan, s->begin);

	while (r == 0 && s->pos < end && s->pos - s->begin < s->most &&
	       s->rows < SLICE_ROWS && slice_settle(s)) {
		uint64_t most;

		r = slice_look(s);
		if (r != 0)
			break;
		most = s->most - (s->pos - s->begin);
		if (most > end - s->pos)
			most = end - s->pos;
		s->pos += rows_take(s, most, &rows);
		s->rows += rows.count;
		if (s->way == WAY_DIRECT)
			r = gpu_lane_copy(s->pipe->lane, &rows);
	}
	return r < 0 ? err_pass(r) : 0;
}

/* Device memory on one end, a bounce buffer on the other: all of it linear. */
static int bounce_rows(struct pipe *pipe, const struct copy_job *part)
{
	struct slice s = {.pipe = pipe,
			  .job = part,
			  .begin = part->begin,
			  .pos = part->begin,
			  .most = part->end - part->begin};
	int r = 0;

	while (r == 0 && s.pos < part->end) {
		s.begin = s.pos;
		s.most = part->end - s.pos;
		s.rows = 0;
		r = slice_rows(&s, part->end);
	}
	return err_pass(r);
}

static int slice_in(struct pipe *pipe, const struct slice *s, unsigned int index)
{
	struct copy_job part = part_of(s->job, s->begin, s->pos), half;
	struct copy_end bounce;
	int r = bounce_take(pipe, index, &bounce);

	if (r < 0)
		return err_pass(r);
	half = part;
	half.dst = bounce;
	r = copy_host(pipe->hand, &half);
	part.src = bounce;
	if (r == 0)
		r = bounce_rows(pipe, &part);
	return err_pass(r);
}

static int slice_out(struct pipe *pipe, const struct slice *s, unsigned int index)
{
	struct copy_job part = part_of(s->job, s->begin, s->pos);
	int r = bounce_take(pipe, index, &part.dst);

	if (r == 0)
		r = bounce_rows(pipe, &part);
	return err_pass(r);
}

/* After a fault: what was queued without a mark must be still, too. */
static int pipe_fault(struct pipe *pipe)
{
	struct err why;

	err_take(&why);
	gpu_lane_drain(pipe->lane);
	return err_reraise(&why);
}

/* Queue a slice of [begin, end), at most `most` bytes of it. */
static int slice_begin(struct pipe *pipe, struct copy_job *job, uint64_t begin,
		       uint64_t end, uint64_t most)
{
	unsigned int index = (pipe->first + pipe->count) % PIPE_DEPTH;
	struct flight *flight = &pipe->flights[index];
	struct slice s = {
		.pipe = pipe, .job = job, .begin = begin, .pos = begin, .most = most};
	int r = slice_rows(&s, end);

	assert(pipe->count < PIPE_DEPTH);
	if (r == 0 && s.way == WAY_CPU) {
		const struct copy_job part = part_of(job, begin, s.pos);

		r = copy_host(pipe->hand, &part);
	} else if (r == 0 && s.way == WAY_IN) {
		r = slice_in(pipe, &s, index);
	} else if (r == 0 && s.way == WAY_OUT) {
		r = slice_out(pipe, &s, index);
	}
	*flight = (struct flight){.job = job, .begin = begin, .end = s.pos, .way = s.way};
	if (r == 0)
		r = gpu_lane_mark(pipe->lane, &flight->mark);
	if (r < 0)
		return err_pass(pipe_fault(pipe));
	pipe->count++;
	return 0;
}

/* Wait for the oldest slice. It has left the pipe also when this fails. */
static int slice_end(struct pipe *pipe, struct flight *flight_p)
{
	unsigned int index = pipe->first;
	int r;

	*flight_p = pipe->flights[index];
	r = gpu_lane_wait(pipe->lane, flight_p->mark);
	if (r < 0)
		r = pipe_fault(pipe);
	if (r == 0 && flight_p->way == WAY_OUT) {
		struct copy_job part =
			part_of(flight_p->job, flight_p->begin, flight_p->end);

		r = bounce_take(pipe, index, &part.src);
		if (r == 0)
			r = copy_host(pipe->hand, &part);
	}
	pipe->first = (index + 1) % PIPE_DEPTH;
	pipe->count--;
	return err_pass(r);
}

static int pipe_open(struct pipe *pipe)
{
	int r = gpu_device_get(pipe->device);

	if (r < 0)
		return err_pass(r);
	r = gpu_enter(pipe->device);
	if (r == 0) {
		r = gpu_lane_take(pipe->device, &pipe->lane);
		if (r < 0)
			gpu_leave(pipe->device);
	}
	if (r < 0) {
		struct err why;

		err_take(&why);
		gpu_device_put(pipe->device);
		return err_reraise(&why);
	}
	return 0;
}

static void pipe_close(struct pipe *pipe)
{
	gpu_lane_give(pipe->lane);
	pipe->lane = NULL;
	gpu_leave(pipe->device);
	gpu_device_put(pipe->device);
}

int copy_gpu_now(struct copy_hand *hand, const struct copy_job *job)
{
	struct pipe pipe = {.device = copy_gpu_device(job), .hand = hand};
	struct copy_job whole = part_of(job, job->begin, job->end);
	uint64_t pos = job->begin;
	struct err why;
	int r = pipe_open(&pipe);

	if (r < 0)
		return err_pass(r);
	while (r == 0 && (pos < job->end || pipe.count > 0)) {
		struct flight flight;

		if (pos < job->end && pipe.count < PIPE_DEPTH) {
			r = slice_begin(&pipe, &whole, pos, job->end, UINT64_MAX);
			if (r == 0)
				pos = pipe.flights[(pipe.first + pipe.count - 1) %
						   PIPE_DEPTH]
					      .end;
		} else {
			r = slice_end(&pipe, &flight);
		}
	}
	if (r < 0) { /* drained: the slices behind it do not count */
		err_take(&why);
		pipe_close(&pipe);
		return err_reraise(&why);
	}
	pipe_close(&pipe);
	return 0;
}

/* ---- jobs ---- */

/* The lock is held. */
static void job_settle(struct copy_gpu *gpu, struct copy_job *job)
{
	bool stop = job->result < 0 || atomic_load(&job->canceled);

	if (atomic_load(&job->slices_running) > 0)
		return;
	if (!stop && job->next_byte < job->end)
		return;
	if (job->result == 0 && job->next_byte < job->end) {
		err_set(&job->err, ERR_CANCELED, "the copy was canceled");
		job->result = -err_errno(ERR_CANCELED);
	}
	list_remove(&job->link);
	list_push_back(&gpu->done, &job->link);
	loop_wake(&gpu->wake);
}

/* With this thread's error; the lock is held. */
static void job_fail(struct copy_job *job, int r)
{
	if (job->result == 0) {
		job->result = r;
		err_take(&job->err);
	}
	err_clear();
	list_remove(&job->link);
}

/* The lock is held on entry and on return. */
static void job_begin(struct gpu_worker *worker, struct copy_job *job)
{
	struct copy_gpu *gpu = worker->gpu;
	struct pipe *pipe = &worker->pipe;
	uint64_t begin = job->next_byte;
	int r = 0;

	list_remove(&job->link);
	atomic_fetch_add(&job->slices_running, 1);
	pthread_mutex_unlock(&gpu->lock);
	if (!pipe->lane)
		r = pipe_open(pipe);
	if (r == 0)
		r = slice_begin(pipe, job, begin, job->end, gpu->slice_bytes);
	pthread_mutex_lock(&gpu->lock);
	if (r < 0) {
		atomic_fetch_sub(&job->slices_running, 1);
		job_fail(job, r);
	} else {
		job->next_byte =
			pipe->flights[(pipe->first + pipe->count - 1) % PIPE_DEPTH].end;
		if (job->next_byte < job->end && job->result == 0 &&
		    !atomic_load(&job->canceled))
			list_push_back(&worker->ready, &job->link);
	}
	job_settle(gpu, job);
}

/* The lock is held on entry and on return. */
static void flight_end(struct gpu_worker *worker)
{
	struct copy_gpu *gpu = worker->gpu;
	struct flight flight;
	int r;

	pthread_mutex_unlock(&gpu->lock);
	r = slice_end(&worker->pipe, &flight);
	if (r == 0)
		atomic_fetch_add(&flight.job->copied, flight.end - flight.begin);
	pthread_mutex_lock(&gpu->lock);
	atomic_fetch_sub(&flight.job->slices_running, 1);
	if (r < 0)
		job_fail(flight.job, r);
	job_settle(gpu, flight.job);
}

static void *worker_main(void *arg)
{
	struct gpu_worker *worker = arg;
	struct copy_gpu *gpu = worker->gpu;
	struct pipe *pipe = &worker->pipe;

	cpu_bulk();
	pthread_mutex_lock(&gpu->lock);
	for (;;) {
		struct copy_job *job = list_first(&worker->ready, struct copy_job, link);

		if (job && pipe->count < PIPE_DEPTH) {
			job_begin(worker, job);
		} else if (pipe->count > 0) {
			flight_end(worker);
		} else if (pipe->lane) {
			pthread_mutex_unlock(&gpu->lock);
			pipe_close(pipe);
			pthread_mutex_lock(&gpu->lock);
		} else if (gpu->stopping) {
			break;
		} else {
			pthread_cond_wait(&worker->more, &gpu->lock);
		}
	}
	pthread_mutex_unlock(&gpu->lock);
	return NULL;
}

/* ---- threads ---- */

static void deliver(struct copy_gpu *gpu)
{
	for (;;) {
		struct copy_job *job;
		struct list *n;

		pthread_mutex_lock(&gpu->lock);
		n = list_pop_front(&gpu->done);
		pthread_mutex_unlock(&gpu->lock);
		if (!n)
			return;
		job = list_entry(n, struct copy_job, link);
		job->on_done(job);
	}
}

static void on_wake(struct loop_wake *wake)
{
	deliver(container_of(wake, struct copy_gpu, wake));
}

int copy_gpu_new(struct loop *loop, uint64_t slice_bytes, struct copy_gpu **gpu_p)
{
	struct copy_gpu *gpu = mem_zalloc(sizeof(*gpu));
	int r;

	if (!gpu)
		return err_pass(-ENOMEM);
	gpu->slice_bytes = slice_bytes * SLICE_FACTOR;
	list_init(&gpu->workers);
	list_init(&gpu->done);
	r = loop_wake_init(&gpu->wake, loop, on_wake);
	if (r < 0) {
		mem_free(gpu);
		return err_pass(r);
	}
	pthread_mutex_init(&gpu->lock, NULL);
	*gpu_p = gpu;
	return 0;
}

static void worker_free(struct gpu_worker *worker)
{
	copy_hand_free(worker->pipe.hand);
	pthread_cond_destroy(&worker->more);
	mem_free(worker);
}

/* Only faults of the thread's own may reach it: signals belong to the loop. */
static int worker_start(struct gpu_worker *worker)
{
	sigset_t all, old;
	int no, r = copy_hand_new(&worker->pipe.hand);

	if (r < 0)
		return err_pass(r);
	sigfillset(&all);
	sigdelset(&all, SIGBUS);
	sigdelset(&all, SIGSEGV);
	sigdelset(&all, SIGILL);
	sigdelset(&all, SIGFPE);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	no = pthread_create(&worker->thread, NULL, worker_main, worker);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (no)
		return err_raise_errno(no, "starting a copy thread");
	(void)pthread_setname_np(worker->thread, "kvd-gpu");
	return 0;
}

static int worker_find(struct copy_gpu *gpu, struct gpu_device *device,
		       struct gpu_worker **worker_p)
{
	struct gpu_worker *worker;
	int r;

	list_foreach (worker, &gpu->workers, link) {
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
	r = worker_start(worker);
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
	pthread_mutex_lock(&gpu->lock);
	gpu->stopping = true;
	list_foreach (worker, &gpu->workers, link) {
		struct copy_job *job;

		while ((job = list_first(&worker->ready, struct copy_job, link))) {
			atomic_store(&job->canceled, true);
			list_remove(&job->link);
			job_settle(gpu, job);
		}
		pthread_cond_signal(&worker->more);
	}
	pthread_mutex_unlock(&gpu->lock);
	list_foreach_safe (worker, &gpu->workers, link) {
		pthread_join(worker->thread, NULL);
		list_remove(&worker->link);
		worker_free(worker);
	}
	deliver(gpu);
	loop_wake_fini(&gpu->wake);
	pthread_mutex_destroy(&gpu->lock);
	mem_free(gpu);
}

int copy_gpu_submit(struct copy_gpu *gpu, struct copy_job *job)
{
	struct gpu_worker *worker = NULL;
	int r = worker_find(gpu, copy_gpu_device(job), &worker);

	if (r < 0)
		return err_pass(r);
	pthread_mutex_lock(&gpu->lock);
	list_push_back(&worker->ready, &job->link);
	pthread_cond_signal(&worker->more);
	pthread_mutex_unlock(&gpu->lock);
	return 0;
}

void copy_gpu_cancel(struct copy_gpu *gpu, struct copy_job *job)
{
	pthread_mutex_lock(&gpu->lock);
	/* its slices are waited for; a job that is being begun settles after that */
	if (!atomic_exchange(&job->canceled, true) && job->next_byte < job->end) {
		list_remove(&job->link);
		job_settle(gpu, job);
	}
	pthread_mutex_unlock(&gpu->lock);
}
