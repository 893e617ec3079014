/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying a range of a job in the calling thread.
 *
 * A slice is found in the plan by a seek, then walked run by run, not row by row: a run's
 * head (a row started in the previous slice), its whole rows, its tail. Whole rows are
 * one call into rows.c. A job larger than a core's cache bypasses it (non-temporal
 * stores), a small one stays where the engine's next read finds it; linear ends (bounce
 * slots, a sender's frame) are read again at once.
 *
 * Slices are cut into stretches, during which neither end's memory changes: a stretch
 * runs under one SIGBUS guard, and for vm memory the content of one iovec list. Where
 * both ends are memory of one user's other processes, the process that reaches it reads
 * and writes the rows by itself; of two users', a bounce buffer per thread, small enough
 * for its cache, is between them.
 *
 * Rows may overlap where an engine asked for it (the xfer layer allows that);
 * such bytes are then undefined, but never a fault: hence memmove.
 */
#include "daemon/memory/copy_hand.h"

#include <assert.h>
#include <errno.h>
#include <limits.h>
#include <string.h>
#include <sys/uio.h>

#include "daemon/base/mem.h"
#include "daemon/gate/vm_child.h"
#include "daemon/memory/rows.h"
#include "daemon/memory/vm.h"

#define COPY_BOUNCE_BYTES (128u << 10)

struct copy_hand {
	uint8_t *bounce;
	struct iovec *near, *far; /* IOV_MAX each */
	struct vm_hand vm;
};

/* ---- one stretch of one slice ---- */

/* An end of the current copy; `origin` is the stream byte at linear[0]. */
struct side {
	const struct copy_end *end;
	uint64_t origin;
};

/* A thread's position in the plan, and the memory that it may touch until `end`. */
struct stretch {
	struct copy_hand *hand;
	const struct plan *plan;
	const atomic_bool *canceled;
	bool fetching; /* rows may be cold, and wait in `lanes` */
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

static uint64_t side_address(const struct side *side, uint32_t buffer, uint64_t offset,
			     uint64_t pos)
{
	return copy_end_address(side->end, buffer, offset, pos - side->origin);
}

/* The next piece of the current run, at most `most` bytes. */
static uint64_t piece_take(struct stretch *st, uint64_t most, struct piece *piece_p)
{
	const struct plan_block rows = plan_walk_rows(&st->at, most, UINT64_MAX);
	const struct plan_run *run = rows.run;

	*piece_p = (struct piece){
		.src = side_address(&st->src, run->src_buffer, rows.src, st->pos),
		.dst = side_address(&st->dst, run->dst_buffer, rows.dst, st->pos),
		.len = rows.len,
		.count = rows.count,
		.src_stride = st->src.end->buffers ? run->src_stride : (int64_t)run->len,
		.dst_stride = st->dst.end->buffers ? run->dst_stride : (int64_t)run->len,
	};
	return rows.len * rows.count;
}

static bool stretch_same_memory(const struct stretch *st)
{
	const struct plan_run *run = &st->plan->runs[st->at.run];

	return copy_end_memory(st->src.end, run->src_buffer) == st->src_memory &&
	       copy_end_memory(st->dst.end, run->dst_buffer) == st->dst_memory;
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
		/* a part: continue after it, the next call returns the reason */
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

	if (st->fetching)
		rows_put(&rows, &st->lanes);
	else
		rows_copy(&rows);
}

/* Runs under the guard: may be left at any access to guarded memory. */
static void stretch_copy(void *arg)
{
	struct stretch *st = arg;
	bool vm = is_vm(st->src_memory) || is_vm(st->dst_memory);
	struct piece p;

	while (st->pos < st->end && !st->error && plan_walk_settle(&st->at) &&
	       stretch_same_memory(st)) {
		st->pos += piece_take(st, st->end - st->pos, &p);
		if (vm)
			piece_to_iov(st, &p);
		else
			piece_copy(st, &p);
	}
	if (st->iov_count)
		iov_flush(st);
	rows_end(&st->lanes);
	if (st->lanes.streaming)
		rows_fence();
}

/* ---- slices ---- */

static int memory_gone(struct memory *m)
{
	if (m->kind == MEMORY_VM)
		return err_raise(ERR_FAULT, "process %d, the memory's owner, has exited",
				 (int)m->owner.pid);
	return err_raise(ERR_FAULT, "the memory was truncated by its owner");
}

static int vm_fault(int error, bool reading, struct memory *vm)
{
	if (error == ECANCELED)
		return err_raise(ERR_CANCELED, "the copy was canceled");
	if (error == ESRCH || error == ETIMEDOUT) /* exited, or it hangs */
		atomic_store(&vm->dead, true);
	if (error == ESRCH)
		return err_pass(memory_gone(vm));
	return err_raise(ERR_FAULT, "%s process %d's memory: %s",
			 reading ? "reading" : "writing", (int)vm->owner.pid,
			 error == EUSERS ? "too many helper processes hang"
					 : strerror(error));
}

static int stretch_fault(const struct stretch *st)
{
	bool reading = is_vm(st->src_memory);

	return err_pass(
		vm_fault(st->error, reading, reading ? st->src_memory : st->dst_memory));
}

/* The memories of a walk's next stretch. */
static int stretch_begin(struct stretch *st)
{
	const struct plan_run *run = &st->plan->runs[st->at.run];

	st->src_memory = copy_end_memory(st->src.end, run->src_buffer);
	st->dst_memory = copy_end_memory(st->dst.end, run->dst_buffer);
	if (st->src_memory && !memory_owner_alive(st->src_memory))
		return err_pass(memory_gone(st->src_memory));
	if (st->dst_memory && !memory_owner_alive(st->dst_memory))
		return err_pass(memory_gone(st->dst_memory));
	return 0;
}

/* Copy [begin, end) of the stream. */
static int range_copy(struct copy_hand *hand, const struct copy_job *job, struct side src,
		      struct side dst, uint64_t begin, uint64_t end)
{
	const struct plan *plan = job->plan;
	struct stretch st = {.hand = hand,
			     .plan = plan,
			     .canceled = &job->canceled,
			     .fetching = job->streaming || !dst.end->buffers,
			     .lanes.streaming = job->streaming && dst.end->buffers,
			     .src = src,
			     .dst = dst,
			     .pos = begin,
			     .end = end};
	int r = plan_walk_seek(&st.at, plan, begin);

	if (r < 0)
		return err_pass(r);
	while (st.pos < end && plan_walk_settle(&st.at)) {
		r = stretch_begin(&st);
		if (r < 0)
			return err_pass(r);
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

const struct memory *copy_end_find(const struct copy_end *end, enum memory_kind kind)
{
	for (uint32_t i = 0; end->buffers && i < end->buffer_count; i++)
		if (end->buffers[i].memory && end->buffers[i].memory->kind == kind)
			return end->buffers[i].memory;
	return NULL;
}

/* Neither end may be an iovec of ours: chunks pass through the thread's bounce buffer. */
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

/* ---- between memories of one user's processes ---- */

static uint32_t pair_add(struct vm_row *rows, uint32_t count, uint64_t address,
			 uint64_t len)
{
	struct vm_row *last = count ? &rows[count - 1] : NULL;

	if (last && last->address + last->bytes == address) {
		last->bytes += len;
		return count;
	}
	rows[count] = (struct vm_row){address, len};
	return count + 1;
}

/* The next rows of the stretch; their bytes. */
static uint64_t pair_fill(struct stretch *st, struct vm_pair *pair, uint32_t count[2])
{
	uint64_t most = VM_PAIR_BYTES, len;
	struct piece p;

	count[0] = count[1] = 0;
	while (st->pos < st->end && most && plan_walk_settle(&st->at) &&
	       stretch_same_memory(st)) {
		uint32_t used = count[0] > count[1] ? count[0] : count[1];

		if (used == VM_PAIR_ROWS)
			break;
		len = (VM_PAIR_ROWS - used) * st->plan->runs[st->at.run].len;
		len = len < most ? len : most;
		len = piece_take(st, len < st->end - st->pos ? len : st->end - st->pos,
				 &p);
		st->pos += len;
		most -= len;
		for (uint64_t i = 0; i < p.count; i++) { /* at most VM_PAIR_ROWS */
			count[0] = pair_add(pair->rows[0], count[0], p.src, p.len);
			count[1] = pair_add(pair->rows[1], count[1], p.dst, p.len);
			p.src += (uint64_t)p.src_stride;
			p.dst += (uint64_t)p.dst_stride;
		}
	}
	return VM_PAIR_BYTES - most;
}

/* Asked of the helper process, oldest first. */
struct pairs_open {
	unsigned int count;
	struct memory *src[VM_PAIRS], *dst[VM_PAIRS];
};

static int pairs_end_one(struct stretch *st, struct pairs_open *open)
{
	struct memory *src = open->src[0], *dst = open->dst[0];
	bool writing = false;
	int r;

	open->count--;
	open->src[0] = open->src[1];
	open->dst[0] = open->dst[1];
	if (vm_pair_end(&st->hand->vm, src, st->canceled, &writing) == 0)
		return 0;
	r = vm_fault(errno, !writing, writing ? dst : src);
	open->count = vm_pairs_open(&st->hand->vm, src);
	return err_pass(r);
}

static int pairs_ask(struct stretch *st, struct pairs_open *open)
{
	struct vm_pair *pair = vm_pair_of(&st->hand->vm, st->src_memory);
	uint64_t bytes = 0;
	uint32_t count[2];

	if (pair) {
		bytes = pair_fill(st, pair, count);
		open->src[open->count] = st->src_memory;
		open->dst[open->count] = st->dst_memory;
	}
	if (!pair ||
	    vm_pair_ask(&st->hand->vm, st->src_memory, st->dst_memory, count, bytes) < 0)
		return err_pass(vm_fault(errno, true, st->src_memory));
	open->count++;
	return 0;
}

static int pairs_copy(struct copy_hand *hand, const struct copy_job *job, uint64_t begin,
		      uint64_t end)
{
	struct stretch st = {.hand = hand,
			     .plan = job->plan,
			     .canceled = &job->canceled,
			     .src = {&job->src, job->begin},
			     .dst = {&job->dst, job->begin},
			     .pos = begin,
			     .end = end};
	struct pairs_open open = {.count = 0};
	int r = plan_walk_seek(&st.at, job->plan, begin);

	while (r == 0 && st.pos < end && plan_walk_settle(&st.at)) {
		if (atomic_load(st.canceled))
			r = vm_fault(ECANCELED, true, NULL);
		if (r == 0)
			r = stretch_begin(&st);
		if (r == 0)
			r = pairs_ask(&st, &open);
		if (r == 0 && open.count == VM_PAIRS)
			r = pairs_end_one(&st, &open);
	}
	while (open.count) {
		struct err err;
		int left;

		if (r < 0)
			err_take(&err);
		left = pairs_end_one(&st, &open);
		if (r < 0) {
			err_clear();
			r = err_reraise(&err);
		} else {
			r = left;
		}
	}
	assert(r < 0 || st.pos == end);
	return err_pass(r);
}

bool copy_in_pairs(const struct copy_job *job)
{
	const struct copy_end *src = &job->src, *dst = &job->dst;

	if (!src->buffers || !dst->buffers)
		return false;
	for (uint32_t i = 0; i < src->buffer_count; i++)
		if (!vm_can_pair(src->buffers[i].memory, dst->buffers[0].memory))
			return false;
	for (uint32_t i = 1; i < dst->buffer_count; i++)
		if (!vm_can_pair(src->buffers[0].memory, dst->buffers[i].memory))
			return false;
	return true;
}

int copy_slice(struct copy_hand *hand, const struct copy_job *job, uint64_t begin,
	       uint64_t end, bool bounce)
{
	struct side src = {&job->src, job->begin}, dst = {&job->dst, job->begin};
	int r = 0;

	if (!bounce)
		return err_pass(range_copy(hand, job, src, dst, begin, end));
	if (job->pairs)
		return err_pass(pairs_copy(hand, job, begin, end));
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
	return err_pass(copy_slice(hand, job, job->begin, job->end,
				   copy_has_vm(&job->src) && copy_has_vm(&job->dst)));
}
