/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/cost/pace.h"

#define PACE_MIB (UINT64_C(1) << 20)
#define PACE_BYTES_MIN (4 * PACE_MIB)	 /* smaller pulls do not predict larger ones */
#define PACE_KNOWN 8u			 /* pulls; with fewer a peer is not known */
#define PACE_FLOOR_NS UINT64_C(20000000) /* a busy host takes that for nothing */
#define PACE_UNKNOWN_NS UINT64_C(1000000000) /* the floor of a peer that is not known */
#define PACE_MOST_NS UINT64_C(3600000000000)
#define PACE_FACTOR 3u /* times the p95 */
#define PACE_ABOVE 20u /* one of so many lies above the p95 */

static double pace_mib(const struct pace *pace, uint64_t seen)
{
	uint64_t bytes = seen > pace->flying ? seen : pace->flying;

	return (double)(bytes > PACE_BYTES_MIN ? bytes : PACE_BYTES_MIN) /
	       (double)PACE_MIB;
}

uint64_t pace_begin(struct pace *pace, uint64_t bytes)
{
	pace->flying += bytes;
	return pace->flying;
}

void pace_end(struct pace *pace, uint64_t bytes)
{
	pace->flying -= bytes;
}

void pace_add(struct pace *pace, uint64_t seen, uint64_t ns)
{
	double us = (double)ns / 1e3 / pace_mib(pace, seen);

	pace->us[pace->next] = us < UINT32_MAX ? (uint32_t)us + 1 : UINT32_MAX;
	pace->next = (pace->next + 1) % PACE_PULLS;
	pace->count += pace->count < PACE_PULLS;
}

static uint32_t pace_p95(const struct pace *pace)
{
	uint32_t most[PACE_PULLS / PACE_ABOVE + 1] = {0}; /* the largest ones, falling */

	for (uint32_t i = 0; i < pace->count; i++) {
		uint32_t us = pace->us[i];

		for (uint32_t k = 0; k <= pace->count / PACE_ABOVE; k++) {
			uint32_t less = most[k];

			if (us <= less)
				continue;
			most[k] = us;
			us = less;
		}
	}
	return most[pace->count / PACE_ABOVE];
}

uint64_t pace_late_ns(const struct pace *pace, uint64_t seen)
{
	uint64_t floor = pace->count < PACE_KNOWN ? PACE_UNKNOWN_NS : PACE_FLOOR_NS;
	double ns = 1e3 * PACE_FACTOR * pace_p95(pace) * pace_mib(pace, seen);

	if (ns > (double)PACE_MOST_NS)
		return PACE_MOST_NS;
	return ns > (double)floor ? (uint64_t)ns : floor;
}

void pace_budget_earn(struct pace_budget *budget)
{
	budget->spent -= budget->spent > 0;
}

bool pace_budget_spend(struct pace_budget *budget)
{
	if (budget->spent + PACE_SHARE > PACE_BURST * PACE_SHARE)
		return false;
	budget->spent += PACE_SHARE;
	return true;
}
