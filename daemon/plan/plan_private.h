/* SPDX-License-Identifier: Apache-2.0 */
/* plan_private: a plan with what only the planner's own files see. */
#ifndef KVD_PLAN_PRIVATE_H
#define KVD_PLAN_PRIVATE_H

#include "daemon/plan/plan.h"

struct plan_full {
	struct plan plan; /* first: a struct plan * is a struct plan_full * */
	uint64_t *ends;	  /* stream position after each run, bytes */
};

/*
 * When packing pays. A row posted by itself costs about 0.3 µs of descriptor
 * (RC work request with its completion share; NIXL measured 0.6 to 13 µs); a
 * packed row costs about 10 ns of loop on each side plus a copy of its bytes
 * at about 10 GB/s on each side. Equal at 0.3 µs = 2 * (10 ns + bytes / 10 GB/s),
 * that is 1400 bytes; below 1 KiB the gain is clear. Few rows are never worth
 * the two extra hand-overs.
 */
#define PLAN_PACK_ROW_BYTES 1024u
#define PLAN_PACK_ROWS_MIN 16u

/* By view, layer, field, first unit. */
int plan_want_compare(const void *a, const void *b);

#endif
