/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sweep: a part of the cases that are too many for each run. KVD_SWEEP is the number
 * that chooses the part; without it all cases run. `make test` takes the number from
 * the commit, `make nightly` and a program started by hand run all.
 */
#ifndef KVD_TESTS_SWEEP_H
#define KVD_TESTS_SWEEP_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>

static inline const char *sweep_number(void)
{
	const char *number = getenv("KVD_SWEEP");

	return number && *number ? number : NULL;
}

/* Of each `every` cases in a row all but one are left out. */
static inline bool sweep_leaves_out(uint64_t number, uint64_t every)
{
	const char *sweep = sweep_number();

	return sweep && (number + strtoull(sweep, NULL, 10)) % every != 0;
}

/* `count` seeds from *first_p become one of `parts` parts of them. The length of it. */
static inline uint64_t sweep_part(uint64_t *first_p, uint64_t count, uint64_t parts)
{
	const char *sweep = sweep_number();

	if (!sweep)
		return count;
	*first_p += count / parts * (strtoull(sweep, NULL, 10) % parts);
	return count / parts;
}

#endif
