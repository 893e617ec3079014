/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_object: a finished plan's memory, its walk, and the builder of plans
 * from explicit rows.
 */

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/plan.h"
#include "daemon/plan/plan_private.h"
#include "daemon/plan/runs.h"

void plan_free(struct plan *plan)
{
	struct plan_full *full = (struct plan_full *)plan;

	if (!plan)
		return;
	mem_free_large((void *)plan->runs, plan->run_count * sizeof(*plan->runs));
	mem_free_large(full->ends, plan->run_count * sizeof(*full->ends));
	mem_free((void *)plan->src_ends);
	mem_free((void *)plan->dst_ends);
	mem_free(full);
}

void plan_freep(struct plan **plan_p)
{
	plan_free(*plan_p);
}

size_t plan_memory(const struct plan *plan)
{
	return sizeof(struct plan_full) +
	       sizeof(uint64_t) * ((size_t)plan->src_ends_count + plan->dst_ends_count) +
	       plan->run_count * (sizeof(*plan->runs) + sizeof(uint64_t));
}

/* ---- walk ---- */

void plan_walk_begin(struct plan_walk *walk, const struct plan *plan)
{
	*walk = (struct plan_walk){.plan = plan};
}

int plan_walk_seek(struct plan_walk *walk, const struct plan *plan, uint64_t byte)
{
	const uint64_t *ends = ((const struct plan_full *)plan)->ends;
	size_t lo = 0, hi = plan->run_count;
	uint64_t in_run;

	if (byte > plan->bytes)
		return err_raise(ERR_RANGE, "plan: byte %llu of a stream of %llu",
				 (unsigned long long)byte,
				 (unsigned long long)plan->bytes);
	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (ends[mid] <= byte)
			lo = mid + 1;
		else
			hi = mid;
	}
	*walk = (struct plan_walk){.plan = plan, .run = lo};
	if (lo == plan->run_count)
		return 0;
	in_run = byte - (lo ? ends[lo - 1] : 0);
	walk->row = in_run / plan->runs[lo].len;
	walk->row_offset = in_run % plan->runs[lo].len;
	return 0;
}

bool plan_walk_next(struct plan_walk *walk, uint64_t max_bytes, struct plan_span *span_p)
{
	const struct plan_run *run;
	uint64_t left;

	if (walk->run >= walk->plan->run_count || max_bytes == 0)
		return false;
	run = &walk->plan->runs[walk->run];
	left = run->len - walk->row_offset;
	span_p->src = run->src + walk->row * (uint64_t)run->src_stride + walk->row_offset;
	span_p->dst = run->dst + walk->row * (uint64_t)run->dst_stride + walk->row_offset;
	span_p->len = left < max_bytes ? left : max_bytes;
	span_p->src_buffer = run->src_buffer;
	span_p->dst_buffer = run->dst_buffer;
	walk->row_offset += span_p->len;
	if (walk->row_offset < run->len)
		return true;
	walk->row_offset = 0;
	if (++walk->row == run->count) {
		walk->row = 0;
		walk->run++;
	}
	return true;
}

/* ---- builder ---- */

struct plan_builder {
	struct runs runs;
};

int plan_builder_new(struct plan_builder **builder_p)
{
	*builder_p = mem_zalloc(sizeof(**builder_p));
	return *builder_p ? 0 : -err_errno(ERR_NOMEM);
}

void plan_builder_limit(struct plan_builder *builder, uint64_t max_bytes)
{
	builder->runs.limit = runs_in(max_bytes);
}

void plan_builder_free(struct plan_builder *builder)
{
	if (!builder)
		return;
	runs_fini(&builder->runs);
	mem_free(builder);
}

/* Check that every row of one side is within 64 bits, for either sign of the stride. */
static int plan_object_side_check(const char *name, uint64_t base, int64_t stride,
				  uint64_t count, uint64_t len)
{
	uint64_t step = stride < 0 ? -(uint64_t)stride : (uint64_t)stride;
	uint64_t span, low = base, high = base;
	bool bad = __builtin_mul_overflow(count - 1, step, &span);

	if (!bad && stride < 0)
		bad = __builtin_sub_overflow(base, span, &low);
	else if (!bad)
		bad = __builtin_add_overflow(base, span, &high);
	if (bad || __builtin_add_overflow(high, len, &high))
		return err_raise(ERR_RANGE,
				 "row: %s %llu with %llu rows of %llu bytes at stride "
				 "%lld overflows",
				 name, (unsigned long long)base,
				 (unsigned long long)count, (unsigned long long)len,
				 (long long)stride);
	return 0;
}

int plan_builder_add(struct plan_builder *builder, const struct plan_run *run)
{
	struct plan_run own = *run;
	uint64_t bytes;
	int r;

	if (own.len == 0 || own.count == 0)
		return err_raise(ERR_INVAL, "row: %s is 0",
				 own.len == 0 ? "len" : "count");
	if (own.count == 1)
		own.src_stride = own.dst_stride = 0;
	if ((r = plan_object_side_check("src", own.src, own.src_stride, own.count,
					own.len)) < 0 ||
	    (r = plan_object_side_check("dst", own.dst, own.dst_stride, own.count,
					own.len)) < 0)
		return err_pass(r);
	if (own.count > 1 && (uint64_t)own.src_stride == own.len &&
	    (uint64_t)own.dst_stride == own.len) {
		if (__builtin_mul_overflow(own.len, own.count, &bytes))
			return err_raise(ERR_RANGE, "row: its bytes overflow");
		own.len = bytes;
		own.count = 1;
		own.src_stride = own.dst_stride = 0;
	}
	r = runs_append(&builder->runs, &own);
	return r < 0 ? err_pass(r) : 0;
}

int plan_builder_finish(struct plan_builder *builder, struct plan **plan_p)
{
	int r = runs_finish(&builder->runs, plan_p);

	return r < 0 ? err_pass(r) : 0;
}

int plan_check(const struct plan *plan, uint64_t digest, uint64_t bytes, uint64_t asked)
{
	if (plan->digest == digest && plan->bytes == bytes && asked == bytes)
		return 0;
	return err_raise(ERR_PLAN,
			 "%llu bytes planned by the requesting daemon, %llu by the other",
			 (unsigned long long)bytes, (unsigned long long)plan->bytes);
}
