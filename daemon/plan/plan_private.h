/* SPDX-License-Identifier: Apache-2.0 */
/* plan_private: the parts of a plan that are private to the planner's files. */
#ifndef KVD_PLAN_PRIVATE_H
#define KVD_PLAN_PRIVATE_H

#include "daemon/plan/plan.h"

struct plan_full {
	struct plan plan; /* first: a struct plan * is a struct plan_full * */
	uint64_t *ends;	  /* stream position after each run, bytes */
};

/* By view, layer, field, first unit. */
int plan_want_compare(const void *a, const void *b);

#endif
