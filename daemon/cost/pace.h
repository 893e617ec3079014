/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pace: the recent speed of pulls from one peer, which decides when a pull is late, and
 * how many late ones may be hedged, that is, pulled a second time from another peer.
 * Pure.
 */
#ifndef KVD_COST_PACE_H
#define KVD_COST_PACE_H

#include <stdbool.h>
#include <stdint.h>

#define PACE_PULLS 64u /* in the history */

struct pace {
	uint32_t us[PACE_PULLS]; /* of each, per MiB of the bytes in flight */
	uint32_t count, next;
	uint64_t flying; /* bytes of pulls in flight */
};

/*
 * Pulls share the capacity of the peer, so the time of one depends on all that are in
 * flight with it: `seen` at its start, or the present sum, if that is more.
 */
uint64_t pace_begin(struct pace *pace, uint64_t bytes); /* seen */
void pace_end(struct pace *pace, uint64_t bytes);
/* Before its pace_end(): its duration. An abandoned pull must not be recorded: its
 * duration is our own limit, and each would make the next limit longer. */
void pace_add(struct pace *pace, uint64_t seen, uint64_t ns);
/* A pull in flight for longer than this is late. */
uint64_t pace_late_ns(const struct pace *pace, uint64_t seen);

#define PACE_BURST 8u  /* hedges, once enough pulls have refilled the budget */
#define PACE_SHARE 20u /* pulls to one hedge */

/* All zeros: PACE_BURST hedges may start. */
struct pace_budget {
	uint32_t spent; /* pulls until it is full again */
};

void pace_budget_earn(struct pace_budget *budget); /* a pull starts */
bool pace_budget_spend(struct pace_budget *budget);

#endif
