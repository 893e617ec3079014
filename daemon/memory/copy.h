/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy: the copy threads. The only code of the daemon that moves engine bytes
 * by CPU, and the only code that knows how each kind of memory is touched.
 *
 * A job copies a byte range of a plan's stream from one end to the other. An end is
 * either a table of buffers (as the plan's src_buffer / dst_buffer numbers name them) or
 * one linear stretch of memory (pack: dst is linear; unpack: src is linear). Threads take
 * jobs in turn, one slice at a time, so a large job does not starve a small one and a
 * cancel is seen within a slice. Jobs with bytes of a GPU or of files have separate
 * threads; a cancel of these waits for the operations that the device has started.
 */
#ifndef KVD_TRANSPORT_COPY_H
#define KVD_TRANSPORT_COPY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/plan/plan.h"
#include "daemon/memory/memory.h"

struct loop;
struct copier;
struct file_user;

/* A plan buffer's place: byte 0 of the buffer is memory byte `offset`. */
struct copy_buffer {
	struct memory *memory; /* NULL with length 0: no run names it */
	uint64_t offset;
	uint64_t length; /* nothing of the buffer reaches past it */
};

struct copy_end {
	const struct copy_buffer *buffers; /* NULL: linear */
	uint32_t buffer_count;
	uint8_t *linear; /* stream byte `begin` of the job is here */
};

struct copy_job {
	/* set by the submitter; must stay valid until on_done */
	const struct plan *plan; /* must lie inside the buffers: checked at submit */
	uint64_t begin, end;	 /* bytes of the plan's stream */
	struct copy_end src, dst;
	void (*on_done)(struct copy_job *job); /* loop thread, exactly once */
	/* results, valid in on_done */
	int result; /* 0, or negative with `err` set (ERR_CANCELED, ERR_FAULT) */
	struct err err;
	_Atomic uint64_t copied;   /* progress, any time */
	_Atomic uint64_t first_ns; /* when its first slice was copied; 0: not yet */
	_Atomic uint64_t bounced;  /* of them, by a buffer between the two ends */
	/* private to copy.c */
	struct list link;
	atomic_bool canceled;
	atomic_int slices_running;
	uint64_t next_byte; /* not yet taken by a thread */
	uint64_t slice_bytes;
	bool bounce;		     /* both ends are memory of other processes */
	bool pairs;		     /* of one user's, alone */
	bool streaming;		     /* past the caches */
	bool on_gpu;		     /* copy_gpu.c has it */
	bool on_file;		     /* copy_file.c has it */
	struct file_user *file_user; /* its user; NULL: it has ended */
	bool seen;		     /* its plan was used before: for copy_pipe.c */
};

/* Are `count` rows of `len` bytes from `offset` on, `stride` apart, inside `limit`
 * bytes? No sum or product of these can overflow 128 bits. */
static inline bool copy_rows_fit(uint64_t offset, uint64_t len, uint64_t count,
				 int64_t stride, uint64_t limit)
{
	__int128 first = offset, last = offset;

	if (len == 0 || count == 0)
		return true;
	if (count > 1)
		last += (__int128)(count - 1) * stride;
	return (first < last ? first : last) >= 0 &&
	       (first < last ? last : first) + len <= limit;
}

/* slice_bytes 0: the default, COPY_SLICE_BYTES. */
#define COPY_SLICE_BYTES (UINT64_C(256) << 10)
int copier_new(struct loop *loop, unsigned int threads, uint64_t slice_bytes,
	       struct copier **copier_p);
/* Remaining jobs are canceled and their on_done is called. */
void copier_free(struct copier *copier);

/* Is every run of [begin, end) inside both ends' buffers? ERR_RANGE. */
int copy_job_check(const struct copy_job *job);
/* Checks the job and queues it, or copies it at once if it is short. When this fails,
 * on_done is not called. A job of zero bytes is done at the next turn of the loop. */
int copier_submit(struct copier *copier, struct copy_job *job);
/* Idempotent. on_done follows when no thread touches the job's memory any more:
 * with ERR_CANCELED unless the last byte was already copied. */
void copier_cancel(struct copier *copier, struct copy_job *job);

/* State for a caller's thread that copies by itself: one each. */
struct copy_hand;
int copy_hand_new(struct copy_hand **hand_p);
void copy_hand_free(struct copy_hand *hand); /* NULL is allowed */

/*
 * Copy [begin, end) of the job here and now, in the calling thread, which must
 * have SIGBUS unblocked when guarded memory takes part. The caller has checked
 * the plan against the buffers. Of the job, plan, begin, end, src, dst and
 * `streaming` are read; `canceled` must be initialised and may be set meanwhile.
 */
int copy_now(struct copy_hand *hand, struct copy_job *job);
/* The same, where the range has no device memory, even if the tables have other kinds. */
int copy_host(struct copy_hand *hand, const struct copy_job *job);

#endif
