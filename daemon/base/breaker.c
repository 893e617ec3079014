/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/breaker.h"

enum breaker_state breaker_state(const struct breaker *breaker, uint64_t now_ns)
{
	if (!breaker->open)
		return BREAKER_CLOSED;
	return now_ns < breaker->until_ns ? BREAKER_OPEN : BREAKER_TRIAL;
}

void breaker_trip(struct breaker *breaker, uint64_t now_ns)
{
	uint64_t ns = BREAKER_FIRST_NS;

	if (breaker_state(breaker, now_ns) == BREAKER_OPEN)
		return; /* of the same trouble */
	for (uint32_t i = 0; i < breaker->trips && ns < BREAKER_MOST_NS; i++)
		ns *= 2;
	breaker->until_ns = now_ns + (ns < BREAKER_MOST_NS ? ns : BREAKER_MOST_NS);
	breaker->trips += breaker->trips < UINT32_MAX;
	breaker->open = true;
}

void breaker_close(struct breaker *breaker)
{
	breaker->open = false;
}
