/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pace: what pulls from one peer have taken lately, when one of them is late, and how
 * many late ones may be hedged: pulled a second time, from another peer. Pure.
 */
#ifndef KVD_COST_PACE_H
#define KVD_COST_PACE_H

#include <stdbool.h>
#include <stdint.h>

#define PACE_PULLS 64u /* that are remembered */

struct pace {
	uint32_t us[PACE_PULLS]; /* a MiB of what was under way, of each */
	uint32_t count, next;
	uint64_t flying; /* bytes of pulls that are under way */
};

/*
 * Pulls share what the peer can do, so what one takes is told by all that is under way
 * with it: `seen` when it began, or what there is now, if that is more.
 */
uint64_t pace_begin(struct pace *pace, uint64_t bytes); /* seen */
void pace_end(struct pace *pace, uint64_t bytes);
/* Before its pace_end(): it has taken so long. One that was given up says nothing: that
 * was after a time of our choice, and each would make the next one wait longer. */
void pace_add(struct pace *pace, uint64_t seen, uint64_t ns);
/* One that is under way for longer than this is late. */
uint64_t pace_late_ns(const struct pace *pace, uint64_t seen);

#define PACE_BURST 8u  /* hedges, after as many pulls as it takes */
#define PACE_SHARE 20u /* pulls to one hedge */

/* All zeros: PACE_BURST hedges may begin. */
struct pace_budget {
	uint32_t spent; /* pulls that have to come until it is whole again */
};

void pace_budget_earn(struct pace_budget *budget); /* a pull begins */
bool pace_budget_spend(struct pace_budget *budget);

#endif
