/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packing and unpacking run in the caller's thread, by the copy threads' inner loops
 * (copy_now): a sender that has just packed rows finds them in its cache.
 *
 * Rows are named run by run. A run whose rows touch each other on this side is one
 * stretch of memory however many rows it has, and rows of different runs that happen to
 * be neighbours are joined, so an iovec is as long as it can be.
 */
#include "daemon/memory/stage.h"

#include <assert.h>

#include "daemon/base/err.h"
#include "daemon/plan/pack.h"

/* Rows of one run, seen from this side. */
struct piece {
	uint8_t *at;
	uint64_t len, count;
	int64_t stride;
};

static int copy(struct copy_hand *hand, const struct stage_side *side, uint64_t begin,
		uint64_t end, uint8_t *linear)
{
	const struct copy_end table = {.buffers = side->buffers,
				       .buffer_count = side->count};
	const struct copy_end line = {.linear = linear};
	struct copy_job job = {
		.plan = side->plan,
		.begin = begin,
		.end = end,
		.src = side->is_src ? table : line,
		.dst = side->is_src ? line : table,
		.streaming = side->streaming,
	};

	return err_pass(copy_now(hand, &job));
}

/* The next rows of one run, at most `most` bytes. False at the plan's end. */
static bool piece_next(const struct stage_side *side, struct plan_walk *at, uint64_t most,
		       struct piece *piece_p)
{
	const struct copy_buffer *b;
	struct plan_block rows;

	if (!plan_walk_settle(at))
		return false;
	rows = plan_walk_rows(at, most, UINT64_MAX);
	b = &side->buffers[side->is_src ? rows.run->src_buffer : rows.run->dst_buffer];
	*piece_p = (struct piece){
		.at = b->memory->base + b->offset + (side->is_src ? rows.src : rows.dst),
		.len = rows.len,
		.count = rows.count,
		.stride = side->is_src ? rows.run->src_stride : rows.run->dst_stride,
	};
	if (piece_p->count > 1 && (uint64_t)piece_p->stride == piece_p->len) {
		piece_p->len *= piece_p->count;
		piece_p->count = 1;
	}
	return true;
}

int stage_pack(struct copy_hand *hand, const struct stage_side *side, uint64_t begin,
	       uint64_t end, void *to)
{
	assert(begin <= end);
	assert(side->is_src);
	return err_pass(copy(hand, side, begin, end, to));
}

int stage_unpack(struct copy_hand *hand, const struct stage_side *side, uint64_t begin,
		 uint64_t end, const void *from)
{
	assert(begin <= end);
	assert(!side->is_src);
	/* a copy's linear end is not const; as a source it is only read */
	return err_pass(copy(hand, side, begin, end, (uint8_t *)(uintptr_t)from));
}

bool stage_mapped(const struct stage_side *side)
{
	for (uint32_t i = 0; i < side->count; i++)
		if (side->buffers[i].memory && !side->buffers[i].memory->base)
			return false;
	return true;
}

bool stage_few_rows(const struct stage_side *side, uint64_t begin, uint64_t end,
		    unsigned int rows_max)
{
	return pack_few_rows(side->plan, side->is_src, begin, end, rows_max);
}

uint64_t stage_iov(const struct stage_side *side, uint64_t begin, uint64_t end,
		   struct iovec *iov, unsigned int max, unsigned int *count_p)
{
	uint64_t named = 0, want;
	unsigned int n = 0;
	struct plan_walk at;
	struct piece p;

	assert(begin <= end && max > 0);
	*count_p = 0;
	if (plan_walk_seek(&at, side->plan, begin) < 0) {
		err_clear();
		return 0;
	}
	while (begin + named < end) {
		want = end - begin - named;
		if (!piece_next(side, &at, want, &p))
			break;
		for (uint64_t i = 0; i < p.count; i++) {
			uint8_t *row = p.at + i * (uint64_t)p.stride;

			if (n > 0 &&
			    (uint8_t *)iov[n - 1].iov_base + iov[n - 1].iov_len == row) {
				iov[n - 1].iov_len += p.len;
			} else if (n == max) {
				*count_p = n;
				return named;
			} else {
				iov[n++] = (struct iovec){row, p.len};
			}
			named += p.len;
		}
	}
	*count_p = n;
	return named;
}
