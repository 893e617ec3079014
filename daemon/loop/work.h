/* SPDX-License-Identifier: Apache-2.0 */
/*
 * work: many small steps on the loop's thread, as many per turn as time allows. Every
 * walk over a count that a peer, an engine or growth decides is one of these. Embedded in
 * its owner. Between two turns the owner's objects change: a step looks up where it
 * continues, or keeps a position that removals adjust.
 */
#ifndef KVD_WORK_H
#define KVD_WORK_H

#include <stdbool.h>

#include "daemon/loop/loop.h"

struct loop_work {
	/* One step. True: there is more. It may start and stop its work, and must not
	 * free it. */
	bool (*step)(struct loop_work *work);
	/* After the last step, never after loop_work_stop(); may free the work and may
	 * restart it. NULL: nothing follows. */
	void (*done)(struct loop_work *work);
	/* private */
	struct loop *loop;
	struct loop_defer defer;
	bool running;  /* started, and neither over nor stopped */
	bool stepping; /* in a step */
	bool again;    /* started in a step: that step is not the last */
};

void loop_work_init(struct loop_work *work, struct loop *loop,
		    bool (*step)(struct loop_work *work),
		    void (*done)(struct loop_work *work));
/* Runs steps at once, the rest in later turns; done() may have run on return. A running
 * one continues, and makes at least one more step. */
void loop_work_start(struct loop_work *work);
/* The same, but the first step is deferred. */
void loop_work_defer(struct loop_work *work);
void loop_work_stop(struct loop_work *work); /* idempotent */
bool loop_work_running(const struct loop_work *work);

#endif
