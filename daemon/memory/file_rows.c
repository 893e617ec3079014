/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rows between files and memory.
 *
 * A stretch is cut where the path of its bytes changes. Between a file and memory that is
 * mapped here and cannot be truncated, the kernel moves them: rows that are neighbours in
 * the file are one call, with as many pieces of memory as one call takes, so small pages
 * that are contiguous in a file cost one system call for many. All else (memory of other
 * processes, of a GPU, that its owner may truncate, another file) passes through a buffer
 * of the thread: one half is such calls, the other copy_now(). The buffer is
 * page-aligned, as O_DIRECT requires; the engine must meet the other requirements of
 * O_DIRECT.
 *
 * A partial transfer continues where it stopped; a call that moves nothing ends the job.
 * So does a file that ends before the requested bytes: no byte is invented, and no
 * incomplete part is reported as done. A write past the end makes the file longer, as
 * pwrite(2) does.
 *
 * Nothing here guarantees that a byte is on the disk: that needs the engine's fsync()
 * (the descriptor is one open file for both), or its O_DSYNC.
 */
#include "daemon/memory/file_rows.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/uio.h>

#include "daemon/base/mem.h"
#include "daemon/memory/copy_hand.h"

#define BOUNCE_BYTES (UINT64_C(256) << 10)
#define BOUNCE_ALIGN 4096u
#define PIECES 256u

struct file_hand {
	struct copy_hand *copy;
	void *block;
	uint8_t *bounce; /* in it */
	struct iovec iov[PIECES];
};

/* One call: a stretch of one file, and the memory for it. */
struct extent {
	struct file_hand *hand;
	const struct copy_job *job;
	bool reading; /* of the file */
	struct memory *file;
	uint64_t at, bytes; /* in the file */
	unsigned int pieces;
};

/* ---- ends and stretches ---- */

static bool is_file(const struct memory *m)
{
	return m && m->kind == MEMORY_FILE;
}

const struct memory *file_rows_of(const struct copy_job *job)
{
	const struct memory *file = copy_end_find(&job->src, MEMORY_FILE);

	return file ? file : copy_end_find(&job->dst, MEMORY_FILE);
}

int file_hand_new(struct file_hand **hand_p)
{
	struct file_hand *hand = mem_zalloc(sizeof(*hand));
	int r;

	if (!hand)
		return err_pass(-ENOMEM);
	r = copy_hand_new(&hand->copy);
	if (r == 0) {
		hand->block = mem_alloc(BOUNCE_BYTES + BOUNCE_ALIGN);
		r = hand->block ? 0 : -ENOMEM;
	}
	if (r < 0) {
		file_hand_free(hand);
		return err_pass(r);
	}
	hand->bounce = (uint8_t *)hand->block +
		       (BOUNCE_ALIGN - (uintptr_t)hand->block % BOUNCE_ALIGN);
	*hand_p = hand;
	return 0;
}

void file_hand_free(struct file_hand *hand)
{
	if (!hand)
		return;
	copy_hand_free(hand->copy);
	mem_free(hand->block);
	mem_free(hand);
}

/* ---- calls ---- */

static int extent_fault(const struct extent *x, int no)
{
	const char *what = x->reading ? "read" : "written";
	enum err_code code = no == ENOSPC || no == EDQUOT || no == EFBIG  ? ERR_LIMIT
			     : no == EPERM || no == EBADF || no == EACCES ? ERR_PERM
			     : no == EFAULT				  ? ERR_FAULT
									  : ERR_IO;

	if (no == EINVAL && fcntl(x->file->mem_fd, F_GETFL) & O_DIRECT)
		return err_raise(
			ERR_IO,
			"%ju bytes at %ju cannot be %s with O_DIRECT: offsets, lengths "
			"and addresses must be multiples "
			"of the device's block",
			(uintmax_t)x->bytes, (uintmax_t)x->at, what);
	return err_raise(code, "%ju bytes at %ju of the file were not %s: %s",
			 (uintmax_t)x->bytes, (uintmax_t)x->at, what, strerror(no));
}

/* This many bytes of the extent are done. */
static void extent_skip(struct extent *x, struct iovec **iov, unsigned int *count,
			uint64_t n)
{
	x->at += n;
	x->bytes -= n;
	for (; *count > 0 && n >= (*iov)->iov_len; (*iov)++, (*count)--)
		n -= (*iov)->iov_len;
	if (*count > 0) {
		(*iov)->iov_base = (uint8_t *)(*iov)->iov_base + n;
		(*iov)->iov_len -= n;
	}
}

static int extent_move(struct extent *x)
{
	struct iovec *iov = x->hand->iov;
	unsigned int count = x->pieces;

	x->pieces = 0;
	while (x->bytes > 0) {
		ssize_t n;

		if (atomic_load(&x->job->canceled))
			return err_raise(ERR_CANCELED, "the copy was canceled");
		n = x->reading ? preadv(x->file->mem_fd, iov, (int)count, (off_t)x->at)
			       : pwritev(x->file->mem_fd, iov, (int)count, (off_t)x->at);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return extent_fault(x, errno);
		if (n == 0)
			return err_raise(
				ERR_IO,
				"the file ends at or before %ju; %ju more bytes were to "
				"be %s",
				(uintmax_t)x->at, (uintmax_t)x->bytes,
				x->reading ? "read" : "written");
		extent_skip(x, &iov, &count, (uint64_t)n);
	}
	return 0;
}

/* Add a piece, or submit the current extent and start the next with this one. */
static int extent_add(struct extent *x, struct memory *file, uint64_t at, uint8_t *memory,
		      uint64_t len)
{
	struct iovec *last = x->pieces ? &x->hand->iov[x->pieces - 1] : NULL;
	int r = 0;

	if (last && x->file == file && x->at + x->bytes == at) {
		if ((uint8_t *)last->iov_base + last->iov_len == memory) {
			last->iov_len += len;
			x->bytes += len;
			return 0;
		}
	} else if (last) {
		r = extent_move(x);
	}
	if (r == 0 && x->pieces == PIECES)
		r = extent_move(x);
	if (r < 0)
		return err_pass(r);
	if (x->pieces == 0) {
		x->file = file;
		x->at = at;
		x->bytes = 0;
	}
	x->hand->iov[x->pieces++] = (struct iovec){memory, len};
	x->bytes += len;
	return 0;
}

/* ---- stretches ---- */

/* The address of a byte of an end; of a linear one, whose byte 0 is `origin` of the
 * stream.
 */
struct spot {
	struct memory *memory; /* NULL: linear */
	uint64_t offset;       /* in it, or address here */
};

static struct spot spot_of(const struct copy_end *end, uint64_t origin, uint32_t buffer,
			   uint64_t offset, uint64_t pos)
{
	const struct copy_buffer *b;

	if (!end->buffers)
		return (struct spot){NULL, (uintptr_t)end->linear + (pos - origin)};
	b = &end->buffers[buffer];
	return (struct spot){b->memory, b->offset + offset};
}

/* Between files of the one end and plain memory of the other; `origin` as for spot_of().
 */
static int stretch_direct(struct file_hand *hand, const struct copy_job *job,
			  bool reading, uint64_t origin, uint64_t begin, uint64_t end)
{
	struct extent x = {.hand = hand, .job = job, .reading = reading};
	struct plan_walk walk;
	struct plan_span span;
	int r = plan_walk_seek(&walk, job->plan, begin);

	for (uint64_t pos = begin; r == 0 && pos < end; pos += span.len) {
		struct spot src, dst, file, memory;

		if (!plan_walk_next(&walk, end - pos, &span))
			return err_raise(ERR_INTERNAL, "the plan ends at %ju",
					 (uintmax_t)pos);
		src = spot_of(&job->src, origin, span.src_buffer, span.src, pos);
		dst = spot_of(&job->dst, origin, span.dst_buffer, span.dst, pos);
		file = reading ? src : dst;
		memory = reading ? dst : src;
		assert(file.memory && file.memory->kind == MEMORY_FILE);
		r = extent_add(&x, file.memory, file.memory->address + file.offset,
			       memory.memory ? memory.memory->base + memory.offset
					     : (uint8_t *)(uintptr_t)memory.offset,
			       span.len);
	}
	if (r == 0 && x.pieces > 0)
		r = extent_move(&x);
	return err_pass(r);
}

/* The path of a stretch. */
struct way {
	bool src_file, dst_file;
	bool plain; /* the end that is no file: any thread may touch it, without a guard
		     */
};

static struct way way_of(const struct copy_job *job, const struct plan_span *span)
{
	const struct memory *src = copy_end_memory(&job->src, span->src_buffer);
	const struct memory *dst = copy_end_memory(&job->dst, span->dst_buffer);
	const struct memory *other = is_file(src) ? dst : src;

	return (struct way){.src_file = is_file(src),
			    .dst_file = is_file(dst),
			    .plain = !other || memory_is_plain(other)};
}

/* One half of a path through the buffer, whose first byte is `begin` of the stream. */
static int stretch_half(struct file_hand *hand, const struct copy_job *job, bool in,
			bool file, uint64_t begin, uint64_t end)
{
	struct copy_job half = {.plan = job->plan, .begin = begin, .end = end};
	struct copy_end bounce = {.linear = hand->bounce};

	half.src = in ? job->src : bounce;
	half.dst = in ? bounce : job->dst;
	atomic_init(&half.canceled, atomic_load(&job->canceled));
	if (file)
		return err_pass(stretch_direct(hand, &half, in, begin, begin, end));
	return err_pass(copy_now(hand->copy, &half));
}

static int stretch_bounce(struct file_hand *hand, const struct copy_job *job,
			  const struct way *way, uint64_t begin, uint64_t end)
{
	int r = 0;

	for (uint64_t pos = begin, to; r == 0 && pos < end; pos = to) {
		to = end - pos < BOUNCE_BYTES ? end : pos + BOUNCE_BYTES;
		r = stretch_half(hand, job, true, way->src_file, pos, to);
		if (r == 0)
			r = stretch_half(hand, job, false, way->dst_file, pos, to);
	}
	return err_pass(r);
}

/* Rows in memory only, next to file rows of the same job. */
static int stretch_memory(struct file_hand *hand, const struct copy_job *job,
			  uint64_t begin, uint64_t end)
{
	struct copy_job part = {.plan = job->plan, .begin = begin, .end = end};

	assert(job->src.buffers && job->dst.buffers); /* else it has no file at all */
	part.src = job->src;
	part.dst = job->dst;
	atomic_init(&part.canceled, atomic_load(&job->canceled));
	return err_pass(copy_now(hand->copy, &part));
}

static int stretch_move(struct file_hand *hand, const struct copy_job *job,
			const struct way *way, uint64_t begin, uint64_t end,
			uint64_t *bounced_p)
{
	if (!way->src_file && !way->dst_file)
		return err_pass(stretch_memory(hand, job, begin, end));
	if (way->src_file != way->dst_file && way->plain)
		return err_pass(
			stretch_direct(hand, job, way->src_file, job->begin, begin, end));
	*bounced_p += end - begin;
	return err_pass(stretch_bounce(hand, job, way, begin, end));
}

int file_rows_move(struct file_hand *hand, const struct copy_job *job, uint64_t begin,
		   uint64_t end, uint64_t *bounced_p)
{
	struct plan_walk walk;
	struct plan_span span;
	struct way way = {0}, next;
	uint64_t from = begin;
	int r = plan_walk_seek(&walk, job->plan, begin);

	*bounced_p = 0;
	for (uint64_t pos = begin; r == 0 && pos < end; pos += span.len) {
		if (!plan_walk_next(&walk, end - pos, &span))
			return err_raise(ERR_INTERNAL, "the plan ends at %ju",
					 (uintmax_t)pos);
		next = way_of(job, &span);
		if (from < pos &&
		    (way.src_file != next.src_file || way.dst_file != next.dst_file ||
		     way.plain != next.plain)) {
			r = stretch_move(hand, job, &way, from, pos, bounced_p);
			from = pos;
		}
		way = next;
	}
	if (r == 0 && from < end)
		r = stretch_move(hand, job, &way, from, end, bounced_p);
	return err_pass(r);
}
