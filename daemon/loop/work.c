/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/loop/work.h"

#include <assert.h>

static bool work_step(struct loop_work *work)
{
	bool more;

	work->again = false;
	work->stepping = true;
	more = work->step(work);
	work->stepping = false;
	return more || work->again;
}

static void work_run(struct loop_work *work)
{
	while (work_step(work)) {
		if (!work->running)
			return;
		if (loop_enough(work->loop)) {
			loop_defer(work->loop, &work->defer);
			return;
		}
	}
	if (!work->running)
		return;
	work->running = false;
	if (work->done)
		work->done(work);
}

static void work_on_defer(struct loop_defer *defer)
{
	work_run(container_of(defer, struct loop_work, defer));
}

void loop_work_init(struct loop_work *work, struct loop *loop,
		    bool (*step)(struct loop_work *work),
		    void (*done)(struct loop_work *work))
{
	*work = (struct loop_work){.step = step, .done = done, .loop = loop};
	loop_defer_init(&work->defer, work_on_defer);
}

/* False: it runs already, and will make another step. */
static bool work_begin(struct loop_work *work)
{
	bool begins = !work->running && !work->stepping;

	assert(work->loop && work->step);
	work->running = true;
	work->again = true;
	return begins;
}

void loop_work_start(struct loop_work *work)
{
	if (work_begin(work))
		work_run(work);
}

void loop_work_defer(struct loop_work *work)
{
	if (work_begin(work))
		loop_defer(work->loop, &work->defer);
}

void loop_work_stop(struct loop_work *work)
{
	work->running = false;
	loop_defer_cancel(&work->defer);
}

bool loop_work_running(const struct loop_work *work)
{
	return work->running;
}
