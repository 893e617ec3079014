/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runs: a growing list of strided runs. An appended row is merged with the last one when
 * they are adjacent on both sides, and folded into the last run when it continues its
 * strides. The order is that of appending.
 */
#ifndef KVD_PLAN_RUNS_H
#define KVD_PLAN_RUNS_H

#include "daemon/plan/plan.h"

struct runs {
	struct plan_run *items;
	size_t count, cap;
	uint64_t limit; /* of runs: ERR_LIMIT above it; 0 is PLAN_RUNS_MAX */
};

/* The limit of runs for plans of at most so many bytes; 0 is 0. */
uint64_t runs_in(uint64_t max_bytes);
void runs_fini(struct runs *runs);
/* The caller has made the checks of plan_builder_add(). */
int runs_append(struct runs *runs, const struct plan_run *run);

/*
 * Append all runs of `from`, shifted. Only the first is merged and folded: the others
 * were when `from` was made. Differences wrap, so a shift may be negative.
 */
struct runs_shift {
	uint64_t src, dst;
	uint32_t src_buffer, dst_buffer;
};
int runs_append_all(struct runs *runs, const struct runs *from,
		    const struct runs_shift *shift);

/* Sort by the destination of the first row, if necessary. */
void runs_sort(struct runs *runs);

/* Make a plan of the runs, which are taken. */
int runs_finish(struct runs *runs, struct plan **plan_p);

#endif
