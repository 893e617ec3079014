/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/release.h"

#include <assert.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/memory/memory.h"

struct release {
	struct offload_job job;
	struct memory *memory;
};

static void release_work(struct offload_job *job)
{
	memory_unref(container_of(job, struct release, job)->memory);
}

static void release_fill_work(struct offload_job *job)
{
	if (memory_populate(container_of(job, struct release, job)->memory) < 0)
		err_clear(); /* pages are allocated on use, slower */
	release_work(job);
}

static void release_done(struct offload_job *job)
{
	mem_free(container_of(job, struct release, job));
}

void memory_release(struct offload *offload, struct memory *memory)
{
	int refs = atomic_load(&memory->refs);
	struct release *release;

	assert(refs > 0);
	/* Not a plain subtraction: the last reference must not be dropped here, on the
	 * loop, and whether it is the last may change until the exchange succeeds. */
	while (refs > 1)
		if (atomic_compare_exchange_weak(&memory->refs, &refs, refs - 1))
			return;
	release = mem_zalloc(sizeof(*release));
	if (!release) { /* late is worse than slow */
		err_clear();
		memory_unref(memory);
		return;
	}
	release->memory = memory;
	release->job.work = release_work;
	release->job.done = release_done;
	offload_submit(offload, &release->job);
}

void memory_fill(struct offload *offload, struct memory *memory)
{
	struct release *fill = mem_zalloc(sizeof(*fill));

	if (!fill) {
		err_clear();
		return;
	}
	fill->memory = memory_ref(memory);
	fill->job.work = release_fill_work;
	fill->job.done = release_done;
	offload_submit(offload, &fill->job);
}
