/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>

#include "daemon/memory/copy.h"

static int copy_check_buffers(const struct copy_end *end, bool writing)
{
	for (uint32_t i = 0; end->buffers && i < end->buffer_count; i++) {
		const struct copy_buffer *b = &end->buffers[i];

		if (!b->memory && b->length == 0)
			continue; /* a place in the table that no run may name */
		if (!b->memory)
			return err_raise(ERR_INVAL, "buffer %u has no memory", i);
		if (b->offset > b->memory->length ||
		    b->length > b->memory->length - b->offset)
			return err_raise(ERR_RANGE, "buffer %u reaches past its memory",
					 i);
		if (memory_check_copyable(b->memory) < 0)
			return err_pass(-ENOTSUP);
		if (!writing && b->memory->write_only)
			return err_raise(ERR_PERM,
					 "buffer %u is a file that was opened for "
					 "writing only",
					 i);
		if (writing && !b->memory->writable)
			return err_raise(ERR_PERM, "buffer %u is read-only", i);
	}
	if (!end->buffers && !end->linear)
		return err_raise(ERR_INVAL, "the copy has no source or destination");
	return 0;
}

static bool run_fits(const struct copy_end *end, uint32_t buffer, uint64_t offset,
		     const struct plan_run *run, int64_t stride)
{
	if (!end->buffers)
		return true;
	return buffer < end->buffer_count &&
	       copy_rows_fit(offset, run->len, run->count, stride,
			     end->buffers[buffer].length);
}

static bool copy_check_ends_fit(const uint64_t *ends, uint32_t ends_count,
				const struct copy_end *end)
{
	if (!end->buffers)
		return true;
	for (uint32_t i = 0; ends && i < ends_count; i++)
		if (ends[i] > 0 &&
		    (i >= end->buffer_count || ends[i] > end->buffers[i].length))
			return false;
	return ends != NULL;
}

static int runs_check(const struct copy_job *job)
{
	uint64_t left = job->end - job->begin, part;
	struct plan_walk at;
	int r;

	if (copy_check_ends_fit(job->plan->src_ends, job->plan->src_ends_count,
				&job->src) &&
	    copy_check_ends_fit(job->plan->dst_ends, job->plan->dst_ends_count,
				&job->dst))
		return 0; /* the whole plan does: no need to check its runs */
	r = plan_walk_seek(&at, job->plan, job->begin);
	if (r < 0)
		return err_pass(r);
	for (part = at.row_offset; left > 0 && at.run < job->plan->run_count; at.run++) {
		const struct plan_run *run = &job->plan->runs[at.run];

		if (!run_fits(&job->src, run->src_buffer, run->src, run,
			      run->src_stride) ||
		    !run_fits(&job->dst, run->dst_buffer, run->dst, run, run->dst_stride))
			return err_raise(ERR_RANGE,
					 "run %zu of the plan is outside its buffer",
					 at.run);
		part = (run->count - at.row) * run->len - part;
		left -= part < left ? part : left;
		at.row = 0;
		part = 0;
	}
	if (left > 0)
		return err_raise(ERR_RANGE, "the plan ends before byte %ju",
				 (uintmax_t)job->end);
	return 0;
}

int copy_job_check(const struct copy_job *job)
{
	int r;

	if (job->begin > job->end || (job->plan ? job->plan->bytes : 0) < job->end)
		return err_raise(ERR_RANGE, "bytes %ju to %ju are outside the plan",
				 (uintmax_t)job->begin, (uintmax_t)job->end);
	if (job->begin == job->end)
		return 0;
	r = copy_check_buffers(&job->src, false);
	if (r == 0)
		r = copy_check_buffers(&job->dst, true);
	if (r == 0)
		r = runs_check(job);
	return err_pass(r);
}
