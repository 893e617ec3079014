/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copying short rows together costs a pass over the bytes at each end; addressing each
 * row costs the transport some work for it, and its peer, too. The break-even point
 * depends on the cost of a row: tcp passes rows to the kernel in one call per frame,
 * libucp iterates over them while it copies, an adapter takes a request or an entry of
 * one. So each has its own rule here, by the lengths and number of rows in one frame,
 * slice or request.
 */
#include "daemon/plan/pack.h"

#include "daemon/base/err.h"

#define REQUESTS_BYTES_MIN (32u << 10)
#define REQUESTS_MIN 64u
#define REQUEST_MAX (16u << 10)
#define SAMPLE 1024u /* rows that are examined */

/* Rows `row` … of a run, `count` of them, or a part of one: the start of the first and
 * the end of the last on one side, and the number of contiguous ranges. */
struct stretch {
	uint64_t begin, end, rows;
	uint32_t buffer;
};

static struct stretch stretch_of(const struct plan_run *run, bool is_src, uint64_t row,
				 uint64_t count, uint64_t offset, uint64_t len)
{
	uint64_t stride = (uint64_t)(is_src ? run->src_stride : run->dst_stride);
	struct stretch s = {.rows = count,
			    .buffer = is_src ? run->src_buffer : run->dst_buffer};

	s.begin = (is_src ? run->src : run->dst) + row * stride + offset;
	s.end = s.begin + (count - 1) * stride + len;
	if (stride == len)
		s.rows = 1;
	return s;
}

bool pack_few_rows(const struct plan *plan, bool is_src, uint64_t begin, uint64_t end,
		   unsigned int rows_max)
{
	uint64_t rows = 0, last = 0, left = end - begin;
	uint32_t buffer = UINT32_MAX;
	struct plan_walk at;

	if (plan_walk_seek(&at, plan, begin) < 0) {
		err_clear();
		return false;
	}
	while (left > 0 && rows <= rows_max && at.run < plan->run_count) {
		const struct plan_run *run = &plan->runs[at.run];
		uint64_t offset = at.row_offset, len = run->len - offset, count = 1;
		struct stretch s;

		if (at.row == run->count || run->len == 0) {
			at = (struct plan_walk){.plan = plan, .run = at.run + 1};
			continue;
		}
		if (offset == 0 && left >= run->len) {
			count = left / run->len;
			if (count > run->count - at.row)
				count = run->count - at.row;
		}
		if (len > left)
			len = left;
		s = stretch_of(run, is_src, at.row, count, offset, len);
		rows += s.rows - (s.buffer == buffer && s.begin == last);
		buffer = s.buffer;
		last = s.end;
		left -= len * count;
		at.row += count;
		at.row_offset = 0;
	}
	return rows <= rows_max;
}

/* Complete rows that are long enough, and the available part of the first. */
static void slice_in_place(struct plan_walk *walk, struct plan_span last, uint64_t most,
			   unsigned int rows_max, uint64_t *length_p)
{
	struct plan_span span;
	unsigned int rows = 1;

	while (*length_p < most && plan_walk_next(walk, most - *length_p, &span)) {
		bool next = span.src_buffer == last.src_buffer &&
			    span.src == last.src + last.len;

		if (span.len < PACK_DIRECT_MIN || walk->row_offset ||
		    (!next && rows == rows_max))
			return;
		rows += !next;
		*length_p += span.len;
		last = span;
	}
}

/* Short rows, up to the next long one. True: they are neighbours. */
static bool slice_gathered(struct plan_walk *walk, struct plan_span first, uint64_t most,
			   uint64_t *length_p)
{
	struct plan_span span;
	bool one = true;

	while (*length_p < most && plan_walk_next(walk, most - *length_p, &span) &&
	       span.len < PACK_DIRECT_MIN) {
		one = one && span.src_buffer == first.src_buffer &&
		      span.src == first.src + *length_p;
		*length_p += span.len;
	}
	return one;
}

bool pack_slice(const struct plan *plan, uint64_t at, uint64_t most,
		unsigned int rows_max, uint64_t *length_p)
{
	struct plan_span first;
	struct plan_walk walk;

	*length_p = most;
	if (plan_walk_seek(&walk, plan, at) < 0) {
		err_clear();
		return false;
	}
	if (!plan_walk_next(&walk, most, &first))
		return false;
	*length_p = first.len;
	if (first.len < PACK_DIRECT_MIN)
		return slice_gathered(&walk, first, most, length_p);
	slice_in_place(&walk, first, most, rows_max, length_p);
	return true;
}

uint32_t pack_request_bytes(const struct plan *plan, bool write, uint32_t sge_max)
{
	uint64_t bytes = 0, count = 0, far_end = 0, near_end = 0;
	uint32_t buffer = UINT32_MAX, sges = 0;
	struct plan_walk walk;
	struct plan_span span;

	plan_walk_begin(&walk, plan);
	for (unsigned int i = 0; i < SAMPLE && plan_walk_next(&walk, UINT64_MAX, &span);
	     i++) {
		uint64_t far = write ? span.dst : span.src;
		uint64_t near = write ? span.src : span.dst;
		uint32_t at = write ? span.dst_buffer : span.src_buffer;
		bool joins = buffer == at && far_end == far;

		if (!joins || (near_end != near && sges == sge_max)) {
			count++;
			sges = 1;
		} else if (near_end != near) {
			sges++;
		}
		buffer = at;
		far_end = far + span.len;
		near_end = near + span.len;
		bytes += span.len;
	}
	if (!count)
		return 0;
	return bytes / count < UINT32_MAX ? (uint32_t)(bytes / count) : UINT32_MAX;
}

bool pack_requests(uint64_t bytes, uint32_t request_bytes)
{
	return bytes >= REQUESTS_BYTES_MIN && request_bytes > 0 &&
	       request_bytes <= REQUEST_MAX && bytes / request_bytes >= REQUESTS_MIN;
}
