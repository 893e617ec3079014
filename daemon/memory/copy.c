/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The copy threads.
 *
 * Jobs wait in one ring. A thread takes the first job, claims its next slice
 * under the lock, puts the job back at the end while it has slices left, and
 * copies without the lock. So jobs share the threads fairly, one job can use
 * them all, and a cancel waits for one slice at most. A job is done when no
 * slice of it is left to claim and none is running; then it moves to the done
 * list and the loop calls on_done. Nothing else hands a job back, which is the
 * whole proof behind "quiesced": after on_done no thread holds its addresses.
 *
 * A short job is not worth a thread: the loop's own copies it in copier_submit(), one
 * such job a turn, and its on_done follows as a deferred call. So a room of one page
 * neither waits behind a large one's slices nor for a core that wakes up. Guarded
 * memory is not for the loop: its owner can make any access a fault or a wait (wait.h
 * keeps the same rule), nor is vm memory, which is another process's.
 *
 * A slice is found in the plan by a seek, then walked run by run, not row by
 * row: a run's head (a row that began in the slice before), its whole rows, its
 * tail. Whole rows are one call into rows.c. A job larger than a core's cache
 * goes past it (non-temporal stores), a small one stays where the engine's next
 * read finds it; linear ends (bounce slots) are read again at once.
 *
 * Where there are several memory nodes, threads are spread over them and take
 * near jobs first (numa.h). A thread that finds work asks the tokens whether one
 * more may run: daemons of one host share its cores (tokens.h).
 *
 * Slices are cut into stretches, during which neither end's memory changes: a
 * stretch is what runs under one SIGBUS guard, and for vm memory what goes into
 * one list of iovecs. Where both ends are other processes' memory, a bounce
 * buffer of the thread's own, small enough for its cache, stands between.
 *
 * Rows of files are not for these threads, which would wait for a disk: copy_file.h.
 *
 * Rows may overlap where an engine asked for it (the xfer layer allows that);
 * such bytes are then undefined, but never a fault: hence memmove.
 */
#include "daemon/memory/copy.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/cpu.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "daemon/loop/loop.h"
#include "daemon/memory/copy_done.h"
#include "daemon/memory/copy_file.h"
#include "daemon/memory/copy_gpu.h"
#include "daemon/memory/file_rows.h"
#include "daemon/memory/numa.h"
#include "daemon/memory/rows.h"
#include "daemon/memory/tokens.h"
#include "daemon/memory/vm.h"

#define COPY_BOUNCE_BYTES (128u << 10)
#define COPY_STREAM_BYTES (UINT64_C(2) << 20) /* about a core's own cache */
/* What the loop's own thread copies, a turn: 5 us, a third of what it takes to wake
 * another thread and to be woken by it. */
#define COPY_AT_ONCE_BYTES (UINT64_C(64) << 10)
#define COPY_AT_ONCE_ROWS 1024u

struct copy_hand {
	uint8_t *bounce;
	struct iovec *near, *far; /* IOV_MAX each */
	struct vm_hand vm;
};

struct worker {
	struct copier *copier;
	pthread_t thread;
	bool started;
	int node; /* of its processors; -1: any */
	struct copy_hand *hand;
};

struct copier {
	struct loop *loop;
	uint64_t slice_bytes;
	struct copy_done done; /* its lock is the copier's */
	pthread_cond_t more;
	struct list ready;		    /* jobs with slices to claim */
	struct loop_defer deliver;	    /* those of the loop's own */
	uint64_t at_once_ns, at_once_bytes; /* the turn, and what was copied in it */
	bool stopping;
	struct tokens *tokens;	/* NULL: as many threads as there are */
	unsigned int running;	/* threads in a slice */
	struct numa *numa;	/* NULL: one node */
	struct copy_gpu *gpu;	/* NULL: no job had device memory so far */
	struct copy_file *file; /* NULL: no job had a file so far */
	unsigned int worker_count;
	struct worker *workers;
};

/* ---- one stretch of one slice ---- */

/* An end of the copy at hand; `origin` is the stream byte at linear[0]. */
struct side {
	const struct copy_end *end;
	uint64_t origin;
};

/* Where a thread is in the plan, and what it may touch until `end`. */
struct stretch {
	struct copy_hand *hand;
	const struct plan *plan;
	const atomic_bool *canceled;
	bool streaming;
	struct side src, dst;
	struct plan_walk at;
	uint64_t pos, end;			/* stream bytes */
	struct memory *src_memory, *dst_memory; /* NULL: linear */
	unsigned int iov_count;
	struct rows_lanes lanes; /* rows that wait for more of their length */
	int error;		 /* errno of vm_move(), ECANCELED, 0 */
};

/* Rows of one run, all of them inside the slice. Addresses are this process's,
 * or the owner's where the memory is vm. */
struct piece {
	uint64_t src, dst, len, count;
	int64_t src_stride, dst_stride;
};

static bool is_vm(const struct memory *m)
{
	return m && m->kind == MEMORY_VM;
}

static struct memory *side_memory(const struct side *side, uint32_t buffer)
{
	return side->end->buffers ? side->end->buffers[buffer].memory : NULL;
}

static uint64_t side_address(const struct side *side, uint32_t buffer, uint64_t offset,
			     uint64_t pos)
{
	const struct copy_buffer *b;

	if (!side->end->buffers)
		return (uintptr_t)side->end->linear + (pos - side->origin);
	b = &side->end->buffers[buffer];
	assert(b->memory->kind != MEMORY_FILE); /* file_rows.c's */
	return (is_vm(b->memory) ? b->memory->address : (uintptr_t)b->memory->base) +
	       b->offset + offset;
}

/* The next piece of the current run, at most `most` bytes: the rest of a row
 * that was begun, or whole rows, or the beginning of a row. */
static uint64_t piece_take(struct stretch *st, uint64_t most, struct piece *piece_p)
{
	const struct plan_run *run = &st->plan->runs[st->at.run];
	uint64_t off = st->at.row_offset, row = st->at.row;
	uint64_t rows = off ? 0 : run->count - row, taken;

	/* a division costs as much as a short row: only where rows are left out */
	if (rows * run->len > most)
		rows = most / run->len;
	if (rows > 0) {
		*piece_p = (struct piece){.len = run->len, .count = rows};
		taken = rows * run->len;
		st->at.row += rows;
	} else {
		taken = run->len - off < most ? run->len - off : most;
		*piece_p = (struct piece){.len = taken, .count = 1};
		st->at.row_offset += taken;
		if (st->at.row_offset == run->len) {
			st->at.row_offset = 0;
			st->at.row++;
		}
	}
	piece_p->src =
		side_address(&st->src, run->src_buffer,
			     run->src + row * (uint64_t)run->src_stride + off, st->pos);
	piece_p->dst =
		side_address(&st->dst, run->dst_buffer,
			     run->dst + row * (uint64_t)run->dst_stride + off, st->pos);
	piece_p->src_stride = st->src.end->buffers ? run->src_stride : (int64_t)run->len;
	piece_p->dst_stride = st->dst.end->buffers ? run->dst_stride : (int64_t)run->len;
	return taken;
}

/* Steps over finished and empty runs; false at the plan's end. */
static bool stretch_settle(struct stretch *st)
{
	while (st->at.run < st->plan->run_count) {
		const struct plan_run *run = &st->plan->runs[st->at.run];

		if (run->len > 0 && st->at.row < run->count)
			return true;
		st->at.run++;
		st->at.row = 0;
		st->at.row_offset = 0;
	}
	return false;
}

static bool stretch_same_memory(const struct stretch *st)
{
	const struct plan_run *run = &st->plan->runs[st->at.run];

	return side_memory(&st->src, run->src_buffer) == st->src_memory &&
	       side_memory(&st->dst, run->dst_buffer) == st->dst_memory;
}

static void iov_flush(struct stretch *st)
{
	struct copy_hand *w = st->hand;
	struct memory *vm = is_vm(st->src_memory) ? st->src_memory : st->dst_memory;
	struct iovec *near = w->near, *far = w->far;
	unsigned int count = st->iov_count;

	st->iov_count = 0;
	/* a row costs a system call: a slice of 1-byte rows would keep a cancel waiting
	 * for 0.1 s */
	if (atomic_load(st->canceled))
		st->error = ECANCELED;
	while (count > 0 && !st->error) {
		ssize_t n = vm_move(&w->vm, vm, vm == st->src_memory, near, far, count,
				    st->canceled);

		if (n <= 0) {
			st->error = n < 0 ? errno : EFAULT;
			return;
		}
		/* a part: go on after it, the next call says why it stopped */
		while (count > 0 && (size_t)n >= near->iov_len) {
			n -= (ssize_t)near->iov_len;
			near++;
			far++;
			count--;
		}
		if (count > 0) {
			near->iov_base = (uint8_t *)near->iov_base + n;
			near->iov_len -= (size_t)n;
			far->iov_base = (uint8_t *)far->iov_base + n;
			far->iov_len -= (size_t)n;
		}
	}
}

static void iov_add(struct stretch *st, uint64_t near, uint64_t far, uint64_t len)
{
	struct copy_hand *w = st->hand;
	unsigned int i = st->iov_count;

	if (i > 0 &&
	    (uintptr_t)w->near[i - 1].iov_base + w->near[i - 1].iov_len == near &&
	    (uintptr_t)w->far[i - 1].iov_base + w->far[i - 1].iov_len == far) {
		w->near[i - 1].iov_len += len;
		w->far[i - 1].iov_len += len;
		return;
	}
	if (i == IOV_MAX) {
		iov_flush(st);
		i = 0;
	}
	w->near[i] = (struct iovec){(void *)(uintptr_t)near, len};
	w->far[i] = (struct iovec){(void *)(uintptr_t)far, len};
	st->iov_count = i + 1;
}

static void piece_to_iov(struct stretch *st, const struct piece *p)
{
	uint64_t src = p->src, dst = p->dst;
	bool reading = is_vm(st->src_memory);

	for (uint64_t i = 0; i < p->count && !st->error; i++) {
		iov_add(st, reading ? dst : src, reading ? src : dst, p->len);
		src += (uint64_t)p->src_stride;
		dst += (uint64_t)p->dst_stride;
	}
}

static void piece_copy(struct stretch *st, const struct piece *p)
{
	struct rows rows = {.dst = (uint8_t *)(uintptr_t)p->dst,
			    .src = (const uint8_t *)(uintptr_t)p->src,
			    .dst_stride = p->dst_stride,
			    .src_stride = p->src_stride,
			    .len = p->len,
			    .count = p->count};

	if (st->streaming)
		rows_stream(&rows, &st->lanes);
	else
		rows_copy(&rows, false);
}

/* Runs under the guard: may be left at any access to guarded memory. */
static void stretch_copy(void *arg)
{
	struct stretch *st = arg;
	bool vm = is_vm(st->src_memory) || is_vm(st->dst_memory);
	struct piece p;

	while (st->pos < st->end && !st->error && stretch_settle(st) &&
	       stretch_same_memory(st)) {
		st->pos += piece_take(st, st->end - st->pos, &p);
		if (vm)
			piece_to_iov(st, &p);
		else
			piece_copy(st, &p);
	}
	if (st->iov_count)
		iov_flush(st);
	if (st->streaming) {
		rows_stream_end(&st->lanes);
		rows_fence();
	}
}

/* ---- slices ---- */

static int memory_gone(struct memory *m)
{
	if (m->kind == MEMORY_VM)
		return err_raise(ERR_FAULT, "process %d, which owns the memory, is gone",
				 (int)m->owner.pid);
	return err_raise(ERR_FAULT, "the memory was truncated by its owner");
}

static int stretch_fault(const struct stretch *st)
{
	struct memory *vm = is_vm(st->src_memory) ? st->src_memory : st->dst_memory;

	if (st->error == ECANCELED)
		return err_raise(ERR_CANCELED, "the copy was canceled");
	if (st->error != EFAULT) /* gone, or it hangs */
		atomic_store(&vm->dead, true);
	if (st->error == ESRCH)
		return err_pass(memory_gone(vm));
	return err_raise(ERR_FAULT, "%s process %d's memory: %s",
			 vm == st->src_memory ? "reading" : "writing", (int)vm->owner.pid,
			 st->error == EUSERS ? "too many processes that do so hang"
					     : strerror(st->error));
}

/* Copy [begin, end) of the stream. */
static int range_copy(struct copy_hand *hand, const struct copy_job *job, struct side src,
		      struct side dst, uint64_t begin, uint64_t end)
{
	const struct plan *plan = job->plan;
	struct stretch st = {.hand = hand,
			     .plan = plan,
			     .canceled = &job->canceled,
			     .streaming = job->streaming && dst.end->buffers,
			     .src = src,
			     .dst = dst,
			     .pos = begin,
			     .end = end};
	int r = plan_walk_seek(&st.at, plan, begin);

	if (r < 0)
		return err_pass(r);
	while (st.pos < end && stretch_settle(&st)) {
		const struct plan_run *run = &plan->runs[st.at.run];

		st.src_memory = side_memory(&src, run->src_buffer);
		st.dst_memory = side_memory(&dst, run->dst_buffer);
		if (st.src_memory && !memory_owner_alive(st.src_memory))
			return err_pass(memory_gone(st.src_memory));
		if (st.dst_memory && !memory_owner_alive(st.dst_memory))
			return err_pass(memory_gone(st.dst_memory));
		if (!memory_guard_run(stretch_copy, &st, st.src_memory, st.dst_memory))
			return err_pass(memory_gone(
				st.src_memory && atomic_load(&st.src_memory->dead)
					? st.src_memory
					: st.dst_memory));
		if (st.error)
			return err_pass(stretch_fault(&st));
	}
	assert(st.pos == end);
	return 0;
}

static bool has_vm(const struct copy_end *end)
{
	if (!end->buffers)
		return false;
	for (uint32_t i = 0; i < end->buffer_count; i++)
		if (is_vm(end->buffers[i].memory))
			return true;
	return false;
}

/* Memory that neither faults nor waits, whatever its owner does. */
static bool is_for_loop(const struct copy_end *end)
{
	for (uint32_t i = 0; end->buffers && i < end->buffer_count; i++) {
		const struct memory *m = end->buffers[i].memory;

		if (m && m->kind != MEMORY_SEALED && m->kind != MEMORY_LINEAR)
			return false;
	}
	return true;
}

/* Neither end may be an iovec of ours: chunks go through the thread's bounce. */
static int bounce_copy(struct copy_hand *hand, const struct copy_job *job, uint64_t begin,
		       uint64_t end)
{
	struct copy_end bounce = {.linear = hand->bounce};
	struct side src = {&job->src, job->begin}, dst = {&job->dst, job->begin};
	struct side mid = {&bounce, begin};
	int r = range_copy(hand, job, src, mid, begin, end);

	if (r == 0)
		r = range_copy(hand, job, mid, dst, begin, end);
	return err_pass(r);
}

static int slice_copy(struct copy_hand *hand, const struct copy_job *job, uint64_t begin,
		      uint64_t end, bool bounce)
{
	struct side src = {&job->src, job->begin}, dst = {&job->dst, job->begin};
	int r = 0;

	if (!bounce)
		return err_pass(range_copy(hand, job, src, dst, begin, end));
	while (begin < end && r == 0) {
		uint64_t n = end - begin;

		if (n > COPY_BOUNCE_BYTES)
			n = COPY_BOUNCE_BYTES;
		r = bounce_copy(hand, job, begin, begin + n);
		begin += n;
	}
	return err_pass(r);
}

/* ---- hands ---- */

int copy_hand_new(struct copy_hand **hand_p)
{
	struct copy_hand *hand = mem_zalloc(sizeof(*hand));

	if (!hand)
		return err_pass(-ENOMEM);
	hand->bounce = mem_zalloc(COPY_BOUNCE_BYTES);
	hand->near = mem_calloc(IOV_MAX, sizeof(*hand->near));
	hand->far = mem_calloc(IOV_MAX, sizeof(*hand->far));
	if (!hand->bounce || !hand->near || !hand->far) {
		copy_hand_free(hand);
		return err_pass(-ENOMEM);
	}
	*hand_p = hand;
	return 0;
}

void copy_hand_free(struct copy_hand *hand)
{
	if (!hand)
		return;
	vm_hand_fini(&hand->vm);
	mem_free(hand->bounce);
	mem_free(hand->near);
	mem_free(hand->far);
	mem_free(hand);
}

int copy_host(struct copy_hand *hand, const struct copy_job *job)
{
	assert(job->begin <= job->end);
	return err_pass(slice_copy(hand, job, job->begin, job->end,
				   has_vm(&job->src) && has_vm(&job->dst)));
}

int copy_now(struct copy_hand *hand, struct copy_job *job)
{
	if (job->begin < job->end && copy_gpu_device(job))
		return err_pass(copy_gpu_now(hand, job));
	return err_pass(copy_host(hand, job));
}

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
	/* before the lock goes: a cancel must find this slice under way */
	atomic_fetch_add(&job->slices_running, 1);
	copier->running++;
	pthread_mutex_unlock(&copier->done.lock);

	cpu_breathe();
	r = slice_copy(worker->hand, job, begin, end, job->bounce);
	if (r == 0)
		copy_done_slice(job, end - begin, job->bounce);

	pthread_mutex_lock(&copier->done.lock);
	copier->running--;
	atomic_fetch_sub(&job->slices_running, 1);
	if (r < 0)
		copy_done_fail(job, r);
	copy_done_settle(&copier->done, job);
}

/* There is work, but other daemons have the tokens for it. The lock is held. */
static void worker_wait_token(struct copier *copier)
{
	const struct timespec until = clock_after(TOKENS_RETRY_NS);

	(void)pthread_cond_clockwait(&copier->more, &copier->done.lock, CLOCK_MONOTONIC,
				     &until);
}

/* The first job, or one that is near if the first is not. The lock is held. */
static struct copy_job *worker_pick(const struct worker *worker)
{
	const struct copier *copier = worker->copier;
	struct copy_job *job, *first;

	first = list_first(&copier->ready, struct copy_job, link);
	if (!first || !copier->numa)
		return first;
	list_foreach(job, &copier->ready, link)
		if (job->node < 0 || job->node == worker->node)
			return job;
	return first; /* better from afar than not at all */
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
		job = worker_pick(worker);
		if (copier->tokens)
			tokens_settle(copier->tokens, copier->running, job != NULL,
				      clock_ns());
		if (job && !tokens_may_run(copier->tokens, copier->running,
					   copier->tokens ? clock_ns() : 0))
			worker_wait_token(copier);
		else if (job)
			slice_run(worker, job);
		else if (copier->stopping)
			break;
		else
			pthread_cond_wait(&copier->more, &copier->done.lock);
	}
	pthread_mutex_unlock(&copier->done.lock);
	return NULL;
}

static void copy_on_deliver(struct loop_defer *defer)
{
	copy_done_deliver(&container_of(defer, struct copier, deliver)->done);
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
	loop_defer_init(&copier->deliver, copy_on_deliver);
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

void copier_share(struct copier *copier, struct tokens *tokens)
{
	assert(!copier->gpu);
	pthread_mutex_lock(&copier->done.lock);
	tokens_free(copier->tokens);
	copier->tokens = tokens;
	pthread_mutex_unlock(&copier->done.lock);
}

void copier_place(struct copier *copier, const struct numa *numa)
{
	struct numa *own = numa->count > 1 ? mem_dup(numa, sizeof(*numa)) : NULL;

	if (!own) {
		err_clear(); /* slower, no fault */
		return;
	}
	pthread_mutex_lock(&copier->done.lock);
	mem_free(copier->numa);
	copier->numa = own;
	for (unsigned int i = 0; i < copier->worker_count; i++) {
		struct worker *worker = &copier->workers[i];

		worker->node = (int)(i % own->count);
		(void)pthread_setaffinity_np(worker->thread, sizeof(cpu_set_t),
					     &own->nodes[worker->node].cpus);
	}
	pthread_mutex_unlock(&copier->done.lock);
}

void copier_free(struct copier *copier)
{
	struct copy_job *job;

	if (!copier)
		return;
	copy_file_free(copier->file);
	copy_gpu_free(copier->gpu);
	pthread_mutex_lock(&copier->done.lock);
	copier->stopping = true;
	while ((job = list_first(&copier->ready, struct copy_job, link))) {
		atomic_store(&job->canceled, true);
		list_remove(&job->link);
		copy_done_settle(&copier->done, job);
	}
	pthread_cond_broadcast(&copier->more);
	pthread_mutex_unlock(&copier->done.lock);
	for (unsigned int i = 0; i < copier->worker_count; i++) {
		struct worker *worker = &copier->workers[i];

		if (worker->started)
			pthread_join(worker->thread, NULL);
		copy_hand_free(worker->hand);
	}
	copy_done_deliver(&copier->done);
	loop_defer_cancel(&copier->deliver);
	tokens_free(copier->tokens);
	mem_free(copier->numa);
	copy_done_fini(&copier->done);
	pthread_cond_destroy(&copier->more);
	mem_free(copier->workers);
	mem_free(copier);
}

/* ---- submitting ---- */

/* By its first byte: engines bind a cache to one node. */
static int job_node(const struct copier *copier, const struct copy_job *job)
{
	const struct copy_buffer *b;
	const struct plan_run *run;
	struct plan_walk at;

	if (!copier->numa || job->begin == job->end)
		return -1;
	if (!job->dst.buffers)
		return numa_node_of(copier->numa, job->dst.linear);
	if (plan_walk_seek(&at, job->plan, job->begin) < 0) {
		err_clear();
		return -1;
	}
	run = &job->plan->runs[at.run];
	b = &job->dst.buffers[run->dst_buffer];
	if (is_vm(b->memory))
		return -1;
	return numa_node_of(copier->numa, b->memory->base + b->offset + run->dst);
}

/* In vm memory a row costs 0.5 us, however short: a small job that waits for its turn
 * shall wait for half a millisecond. */
static uint64_t job_slice(const struct copier *copier, const struct copy_job *job)
{
	uint64_t bytes = copier->slice_bytes, row;

	if (job->begin == job->end || (!has_vm(&job->src) && !has_vm(&job->dst)))
		return bytes;
	row = job->plan->row_median;
	return row > 0 && row < bytes / IOV_MAX ? row * IOV_MAX : bytes;
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
	pthread_mutex_lock(&copier->done.lock);
	list_push_back(&copier->done.jobs, &job->link);
	pthread_mutex_unlock(&copier->done.lock);
	loop_defer(copier->loop, &copier->deliver);
}

static int submit_to_files(struct copier *copier, struct copy_job *job)
{
	int r = 0;

	if (!copier->file)
		r = copy_file_new(copier->loop, copier->slice_bytes, &copier->file);
	return err_pass(r < 0 ? r : copy_file_submit(copier->file, job));
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
	job->bounce = has_vm(&job->src) && has_vm(&job->dst);
	job->streaming = job->end - job->begin >= COPY_STREAM_BYTES;
	job->result = 0;
	job->on_file = job->begin < job->end && file_rows_of(job);
	job->on_gpu = !job->on_file && job->begin < job->end && copy_gpu_device(job);
	if (job->on_file)
		return err_pass(submit_to_files(copier, job));
	if (job->on_gpu && !copier->gpu)
		r = copy_gpu_new(copier->loop, copier->slice_bytes, &copier->gpu);
	if (job->on_gpu)
		return err_pass(r < 0 ? r : copy_gpu_submit(copier->gpu, job));
	if (job_at_once(copier, job)) {
		job_run_at_once(copier, job);
		return 0;
	}
	job->slice_bytes = job_slice(copier, job);
	job->node = job_node(copier, job);
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
	if (job->on_file) {
		copy_file_cancel(copier->file, job);
		return;
	}
	if (job->on_gpu) {
		copy_gpu_cancel(copier->gpu, job);
		return;
	}
	pthread_mutex_lock(&copier->done.lock);
	/* With all slices taken the job is in no queue, or in that of finished ones: the
	 * last slice settles it, or on_done is on its way. */
	if (!atomic_exchange(&job->canceled, true) && job->next_byte < job->end) {
		list_remove(&job->link);
		copy_done_settle(&copier->done, job);
	}
	pthread_mutex_unlock(&copier->done.lock);
}
