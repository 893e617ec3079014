/* SPDX-License-Identifier: Apache-2.0 */
#include "gpu/kernels_ref.h"

#include <stddef.h>

static void *reached(const struct kernels_reach *reach, uint64_t address, uint64_t bytes,
		     bool writing)
{
	if (!reach)
		return (void *)(uintptr_t)address;
	return reach->at(reach->arg, address, bytes, writing);
}

/* Every lane of a warp in turn: rows that a lane leaves out stay as they were. */
static bool entry_move(const struct kern_rows *rows, const struct kernels_reach *reach)
{
	const uint32_t lanes = kern_lanes(rows->len), total = rows->count * rows->outer;

	for (uint32_t lane = 0; lane < KERN_LANES; lane++) {
		for (uint32_t i = lane / lanes; i < total; i += KERN_LANES / lanes) {
			uint64_t dst, src;
			void *to, *from;

			kern_row_at(rows, i, &dst, &src);
			to = reached(reach, dst, rows->len, true);
			from = reached(reach, src, rows->len, false);
			if (!to || !from)
				return false;
			kern_row(to, from, rows->len, lane % lanes, lanes);
		}
	}
	return true;
}

bool kernels_ref_rows(const struct kern_rows *rows, uint32_t count,
		      const struct kernels_reach *reach)
{
	for (uint32_t i = 0; i < count; i++)
		if (!entry_move(&rows[i], reach))
			return false;
	return true;
}

bool kernels_ref_fill(uint64_t at, uint64_t bytes, uint64_t seed, uint64_t origin,
		      const struct kernels_reach *reach)
{
	uint8_t *to = reached(reach, at, bytes, true);

	for (uint64_t i = 0; to && i < bytes; i++)
		to[i] = kern_byte(seed, origin + i);
	return to != NULL;
}

bool kernels_ref_verify(uint64_t at, uint64_t bytes, uint64_t seed, uint64_t origin,
			uint64_t found[2], const struct kernels_reach *reach)
{
	const uint8_t *from = reached(reach, at, bytes, false);

	for (uint64_t i = 0; from && i < bytes; i++) {
		if (from[i] == kern_byte(seed, origin + i))
			continue;
		found[0]++;
		if (origin + i < found[1])
			found[1] = origin + i;
	}
	return from != NULL;
}
