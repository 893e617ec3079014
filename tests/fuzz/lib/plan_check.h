/* SPDX-License-Identifier: Apache-2.0 */
/* plan_check: what a plan that was made of hostile input must still be. */
#ifndef KVD_TESTS_FUZZ_LIB_PLAN_CHECK_H
#define KVD_TESTS_FUZZ_LIB_PLAN_CHECK_H

#include "daemon/plan/plan.h"

/* Rows of a fuzzed plan: enough to be interesting, few enough to be checked. */
#define FUZZ_ROWS_MAX 2000u

/* Aborts unless every row lies inside its buffers, no destination byte is
 * reached twice, totals agree and the walk ends where the bytes end. */
void fuzz_plan_check(const struct layout *src, const struct layout *dst,
		     const struct plan *plan);

#endif
