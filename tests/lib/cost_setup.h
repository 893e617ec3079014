/* SPDX-License-Identifier: Apache-2.0 */
/* Cases for the cost model: a requester and holders on one of the published fabrics. */
#ifndef KVD_TESTS_COST_SETUP_H
#define KVD_TESTS_COST_SETUP_H

#include "daemon/cost/cost.h"

struct cost_setup {
	struct cost_case c;
	struct cost_holder holders[COST_HOLDERS_MAX];
	struct cost_link link;
	struct cost_compute compute;
};

extern const struct cost_shape setup_v2_lite, setup_v3, setup_gqa_8b;

/* One holder of `tokens` on the fabric, one layer, step and query token. */
void setup_make(struct cost_setup *setup, const char *fabric,
		const struct cost_shape *shape, double tokens);
/* The transport of the model, nothing else: no attention, merge or splice. */
void setup_bare(struct cost_setup *setup, const char *fabric,
		const struct cost_shape *shape, double tokens);
/* The context in equal parts at so many holders. */
void setup_spread(struct cost_setup *setup, unsigned int holders);
struct cost_prices setup_prices(const struct cost_setup *setup);

#endif
