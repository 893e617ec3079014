/* SPDX-License-Identifier: Apache-2.0 */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/sim.h"

/* Without events [from, from + n); their time passes all the same. */
static void without(const struct sim_script *s, unsigned int from, unsigned int n,
		    struct sim_script *less)
{
	uint64_t gap = 0;

	*less = *s;
	less->count = 0;
	for (unsigned int i = 0; i < s->count; i++) {
		if (i >= from && i < from + n) {
			gap += s->events[i].after_us;
			continue;
		}
		less->events[less->count] = s->events[i];
		less->events[less->count++].after_us += (uint32_t)gap;
		gap = 0;
	}
}

void sim_shrink(struct sim_script *script, bool (*fails)(const struct sim_script *script),
		unsigned int tries)
{
	struct sim_script *less = malloc(sizeof(*less));
	unsigned int size = script->count;

	if (!less)
		return;
	while (size > 0 && tries > 0) {
		bool any = false;

		for (unsigned int from = 0; from < script->count && tries > 0;) {
			without(script, from, size, less);
			tries--;
			if (less->count < script->count && fails(less)) {
				*script = *less;
				any = true;
			} else {
				from += size;
			}
		}
		if (!any || size > script->count)
			size = size / 2 < script->count ? size / 2 : script->count / 2;
	}
	free(less);
}
