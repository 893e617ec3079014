/* SPDX-License-Identifier: Apache-2.0 */
/* plan_random: pairs of small layouts, page lists and token ranges by seed. */
#ifndef KVD_TESTS_PLAN_RANDOM_H
#define KVD_TESTS_PLAN_RANDOM_H

#include "daemon/plan/plan.h"

#define RANDOM_MAPS 3
#define RANDOM_PAGES 24

struct plan_random {
	uint64_t state; /* of the generator */
	struct layout *src, *dst;
	struct plan_map maps[RANDOM_MAPS];
	uint32_t pages[2][RANDOM_MAPS][RANDOM_PAGES];
	struct plan_request req;
};

uint64_t random_next(uint64_t *state);
/* 0 … n - 1 */
uint32_t random_below(uint64_t *state, uint32_t n);

/* Same seed, same pair. Every layout passes layout_check(). */
void plan_random_init(struct plan_random *pr, uint64_t seed);
void plan_random_fini(struct plan_random *pr);
/* The request from the destination back to the source. */
void plan_random_reverse(const struct plan_random *pr, struct plan_map *maps,
			 struct plan_request *req_p);

#endif
