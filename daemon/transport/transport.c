/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/transport/transport.h"

#include <string.h>

#include "daemon/memory/copy.h"

static const struct transport_ops *added[2];

void transport_add(const struct transport_ops *ops)
{
	added[added[0] && added[0] != ops] = ops;
}

const struct transport_ops *transport_find(const char *name)
{
	for (size_t i = 0; i < 2 && added[i]; i++)
		if (!strcmp(added[i]->name, name))
			return added[i];
	for (size_t i = 0; transport_table[i]; i++)
		if (!strcmp(transport_table[i]->name, name))
			return transport_table[i];
	return NULL;
}

/* A local buffer must lie in its memory; how long a peer's memory is, only the
 * backend knows. */
static int buffer_check(const struct xp_buffer *b, const char *end, uint32_t i)
{
	const struct memory *m;

	if (!b->reg)
		return 0;
	m = ((const struct xp_reg_base *)(const void *)b->reg)->memory;
	if (b->offset > m->length || b->length > m->length - b->offset)
		return err_raise(ERR_RANGE,
				 "%s buffer %u: offset %ju + length %ju is beyond its "
				 "memory's %ju bytes",
				 end, i, (uintmax_t)b->offset, (uintmax_t)b->length,
				 (uintmax_t)m->length);
	return 0;
}

static int transport_buffers_check(const struct xp_buffer *buffers, uint32_t count,
				   const char *end)
{
	int r = 0;

	for (uint32_t i = 0; i < count && r == 0; i++)
		r = buffer_check(&buffers[i], end, i);
	return err_pass(r);
}

static int rows_check(const struct plan_run *run, size_t number, uint64_t offset,
		      int64_t stride, uint32_t buffer, const struct xp_buffer *buffers,
		      uint32_t count, const char *end)
{
	if (run->len == 0 || run->count == 0)
		return 0;
	if (buffer >= count)
		return err_raise(ERR_RANGE, "run %zu: %s buffer %u of %u", number, end,
				 buffer, count);
	if (!copy_rows_fit(offset, run->len, run->count, stride, buffers[buffer].length))
		return err_raise(ERR_RANGE,
				 "run %zu: %ju rows of %ju bytes from %ju are outside %s "
				 "buffer %u of %ju bytes",
				 number, (uintmax_t)run->count, (uintmax_t)run->len,
				 (uintmax_t)offset, end, buffer,
				 (uintmax_t)buffers[buffer].length);
	return 0;
}

/* Without checking the runs, of which there may be a million. */
static bool transport_ends_fit(const uint64_t *ends, uint32_t ends_count,
			       const struct xp_buffer *buffers, uint32_t count)
{
	for (uint32_t i = 0; ends && i < ends_count; i++)
		if (ends[i] > 0 && (i >= count || ends[i] > buffers[i].length))
			return false; /* the run that does not fit is named below */
	return ends != NULL;
}

int xp_sides_check(const struct xp_sides *sides, bool check_src, bool check_dst)
{
	const struct plan *plan = sides->plan;
	int r = 0;

	if (!plan)
		return 0;
	if (check_src)
		r = transport_buffers_check(sides->src, sides->src_count, "source");
	if (check_dst && r == 0)
		r = transport_buffers_check(sides->dst, sides->dst_count, "destination");
	if (r == 0 &&
	    (!check_src || transport_ends_fit(plan->src_ends, plan->src_ends_count,
					      sides->src, sides->src_count)) &&
	    (!check_dst || transport_ends_fit(plan->dst_ends, plan->dst_ends_count,
					      sides->dst, sides->dst_count)))
		return 0;
	for (size_t i = 0; i < plan->run_count && r == 0; i++) {
		const struct plan_run *run = &plan->runs[i];

		if (check_src)
			r = rows_check(run, i, run->src, run->src_stride, run->src_buffer,
				       sides->src, sides->src_count, "source");
		if (check_dst && r == 0)
			r = rows_check(run, i, run->dst, run->dst_stride, run->dst_buffer,
				       sides->dst, sides->dst_count, "destination");
	}
	return err_pass(r);
}

int xp_holes_check(const struct plan *plan, const struct xp_buffer *buffers, bool is_src)
{
	const uint64_t *ends = is_src ? plan->src_ends : plan->dst_ends;
	uint32_t ends_count = is_src ? plan->src_ends_count : plan->dst_ends_count;

	for (uint32_t i = 0; ends && i < ends_count; i++)
		if (ends[i] > 0 && !buffers[i].reg)
			return err_raise(ERR_INVAL, "buffer %u is not registered", i);
	for (size_t i = 0; !ends && i < plan->run_count; i++) {
		const struct plan_run *run = &plan->runs[i];
		uint32_t buffer = is_src ? run->src_buffer : run->dst_buffer;

		if (!buffers[buffer].reg)
			return err_raise(ERR_INVAL,
					 "run %zu: buffer %u is not registered", i,
					 buffer);
	}
	return 0;
}
