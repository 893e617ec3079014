/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_oracle: what a plan must do, byte by byte, straight from the definition
 * (docs/internals/layouts.md). It shares no code with the planner: for every token,
 * unit and byte it works out both addresses and writes them down.
 */
#ifndef KVD_TESTS_PLAN_ORACLE_H
#define KVD_TESTS_PLAN_ORACLE_H

#include "daemon/plan/plan.h"

#define ORACLE_NOWHERE UINT64_MAX

struct plan_oracle {
	const struct plan_request *req;
	/* from[b][i]: where byte i of destination buffer b comes from, as
	 * source buffer << 32 | offset */
	uint64_t **from;
	bool twice;	      /* some byte is reached twice */
	uint64_t bytes, rows; /* moved; the fewest rows that can do it */
};

void plan_oracle_init(struct plan_oracle *oracle, const struct plan_request *req);
void plan_oracle_fini(struct plan_oracle *oracle);

/* NULL, or what is wrong with the plan. `rows_p`: the plan's rows, counted. */
const char *plan_oracle_check(const struct plan_oracle *oracle, const struct plan *plan);

#endif
