/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/copy_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "daemon/loop/loop.h"

#define WAIT_NS (20 * LOOP_NS_PER_S)

void copy_rig_on_done(struct copy_job *job)
{
	struct copy_rig_job *of = container_of(job, struct copy_rig_job, job);

	of->calls++;
	of->order = ++of->rig->done;
}

void copy_rig_setup(struct copy_rig *rig, unsigned int threads, uint64_t slice)
{
	*rig = (struct copy_rig){0};
	assert_int_equal(memory_guard_install(), 0); /* cmocka has its own handler */
	assert_int_equal(loop_new(&rig->loop), 0);
	assert_int_equal(copier_new(rig->loop, threads, slice, &rig->copier), 0);
}

void copy_rig_teardown(struct copy_rig *rig)
{
	copier_free(rig->copier);
	loop_free(rig->loop);
}

void copy_rig_wait(struct copy_rig *rig, unsigned int count)
{
	uint64_t end = loop_clock_ns(rig->loop) + WAIT_NS;

	while (rig->done < count) {
		assert_true(loop_clock_ns(rig->loop) < end);
		loop_turn(rig->loop, 100 * LOOP_NS_PER_MS);
	}
}

struct plan *copy_rig_plan(const struct plan_run *runs, size_t count)
{
	struct plan_builder *builder = NULL;
	struct plan *plan = NULL;

	assert_int_equal(plan_builder_new(&builder), 0);
	for (size_t i = 0; i < count; i++)
		assert_int_equal(plan_builder_add(builder, &runs[i]), 0);
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

uint8_t copy_rig_pattern(uint64_t i)
{
	return (uint8_t)((i * UINT64_C(0x9e3779b97f4a7c15)) >> 56);
}
