/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/gpu/kernels_ref.h"

#include <stddef.h>

static void *reached(const struct kernels_reach *reach, uint64_t address, uint64_t bytes,
		     bool writing)
{
	if (!reach)
		return (void *)(uintptr_t)address;
	return reach->at(reach->arg, address, bytes, writing);
}

/* a row, for this CPU */
struct found {
	uint8_t *to;
	const uint8_t *from;
};

/* As kernels.cu's, whose lanes hand the places round. */
static bool row_find(const struct kern_rows *rows, const struct kern_place *places,
		     uint32_t i, const struct kernels_reach *reach, struct found *found_p)
{
	uint64_t dst, src;

	if (places) {
		dst = places[i].dst;
		src = places[i].src;
	} else {
		kern_row_at(rows, i, &dst, &src);
	}
	found_p->to = reached(reach, dst, rows->len, true);
	found_p->from = reached(reach, src, rows->len, false);
	return found_p->to && found_p->from;
}

static bool lane_short(const struct kern_rows *rows, const struct kern_place *places,
		       uint32_t lane, const struct kernels_reach *reach)
{
	const uint32_t lanes = kern_lanes(rows->len), total = rows->count * rows->outer;
	const uint32_t groups = KERN_LANES / lanes;

	for (uint32_t i = 0; i < total; i += KERN_AT_ONCE * groups) {
		uint8_t *to[KERN_AT_ONCE] = {NULL};
		const uint8_t *from[KERN_AT_ONCE] = {NULL};

		for (uint32_t k = 0; k < KERN_AT_ONCE; k++) {
			const uint32_t row = i + k * groups + lane / lanes;
			struct found found;

			if (row >= total)
				break;
			if (!row_find(rows, places, row, reach, &found))
				return false;
			to[k] = found.to;
			from[k] = found.from;
		}
		kern_rows_short(to, from, rows->len, lane % lanes);
	}
	return true;
}

static bool lane_long(const struct kern_rows *rows, const struct kern_place *places,
		      uint32_t lane, const struct kernels_reach *reach)
{
	const uint32_t lanes = kern_lanes(rows->len), total = rows->count * rows->outer;

	for (uint32_t i = lane / lanes; i < total; i += KERN_LANES / lanes) {
		struct found found;

		if (!row_find(rows, places, i, reach, &found))
			return false;
		kern_row(found.to, found.from, rows->len, lane % lanes, lanes);
	}
	return true;
}

/* Every lane of a warp in turn: rows that a lane leaves out stay as they were. */
bool kernels_ref_entry(const struct kern_rows *entry, uint64_t all_places,
		       const struct kernels_reach *reach)
{
	const struct kern_place *places = NULL;
	bool done = true;

	if (kern_has_places(entry)) {
		if (entry->count > KERN_PLACES_MAX || entry->outer != 1)
			return false;
		places = reached(reach, all_places + entry->dst * sizeof(*places),
				 entry->count * sizeof(*places), false);
		if (!places)
			return false;
	}
	for (uint32_t lane = 0; lane < KERN_LANES && done; lane++)
		done = kern_short(entry) ? lane_short(entry, places, lane, reach)
					 : lane_long(entry, places, lane, reach);
	return done;
}

bool kernels_ref_rows(const struct kern_rows *rows, const struct kern_place *places,
		      uint32_t count, const struct kernels_reach *reach)
{
	for (uint32_t i = 0; i < count; i++)
		if (!kernels_ref_entry(&rows[i], (uintptr_t)places, reach))
			return false;
	return true;
}
