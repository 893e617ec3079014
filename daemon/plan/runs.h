/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runs: a growing list of strided runs. What is appended merges with the last
 * row when bytes are neighbours on both sides, and folds into the last run
 * when it continues its strides. Order is the order of appending.
 */
#ifndef KVD_PLAN_RUNS_H
#define KVD_PLAN_RUNS_H

#include "daemon/plan/plan.h"

struct runs {
	struct plan_run *items;
	size_t count, cap;
	uint64_t limit; /* of runs: ERR_LIMIT above it; 0 is PLAN_RUNS_MAX */
};

void runs_fini(struct runs *runs);
/* The caller has checked what plan_builder_add() checks. */
int runs_append(struct runs *runs, const struct plan_run *run);

/* Undo: everything after runs_mark() goes away by runs_rewind(). */
struct runs_mark {
	size_t count;
	struct plan_run last[4]; /* appending may rewrite the last few */
};
void runs_mark(const struct runs *runs, struct runs_mark *mark_p);
void runs_rewind(struct runs *runs, const struct runs_mark *mark);

/* Order by the destination of the first row, if they are not in that order. */
void runs_sort(struct runs *runs);

/* Make a plan of the runs (which are taken). */
int runs_finish(struct runs *runs, struct plan **plan_p);

#endif
