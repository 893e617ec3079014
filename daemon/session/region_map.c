/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An array sorted by start address; of equal starts the longer one first. The innermost
 * region around an address is then the nearest one to the left that reaches far enough.
 * The scan to the left is bounded by `reach`: the largest end among all entries up to
 * that place; where even that is too short, no entry further left can hold the span.
 *
 * There are look-ups for each descriptor of a transfer, and changes when an engine
 * registers memory; so a binary search over one flat array and a memmove per change, not
 * a balanced tree. Nested registrations cost a step each.
 */
#include "daemon/session/region_map.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/session/region.h"

struct span {
	uint64_t start, end, reach;
	void *region;
};

struct region_map {
	struct span *spans;
	size_t count, cap;
};

int region_map_new(struct region_map **map_p)
{
	*map_p = mem_zalloc(sizeof(**map_p));
	return *map_p ? 0 : err_pass(-ENOMEM);
}

void region_map_free(struct region_map *map)
{
	if (!map)
		return;
	mem_free(map->spans);
	mem_free(map);
}

/* Number of spans that start at or before `start`; those that start there and are
 * shorter than `end` are not counted (UINT64_MAX: none is counted; 0: all are). */
static size_t spans_before(const struct region_map *map, uint64_t start, uint64_t end)
{
	size_t low = 0, high = map->count;

	while (low < high) {
		size_t mid = low + (high - low) / 2;
		const struct span *s = &map->spans[mid];

		if (s->start < start || (s->start == start && s->end >= end))
			low = mid + 1;
		else
			high = mid;
	}
	return low;
}

static void reach_renew(struct region_map *map, size_t from)
{
	uint64_t reach = from ? map->spans[from - 1].reach : 0;

	for (size_t i = from; i < map->count; i++) {
		if (map->spans[i].end > reach)
			reach = map->spans[i].end;
		map->spans[i].reach = reach;
	}
}

int region_map_add(struct region_map *map, uint64_t address, uint64_t length,
		   void *region)
{
	size_t cap = map->cap ? 2 * map->cap : 16;

	assert(length > 0 && map->count <= map->cap);
	if (map->count == map->cap) {
		struct span *spans = mem_regrow(map->spans, cap, sizeof(*spans));

		if (!spans)
			return err_pass(-ENOMEM);
		map->spans = spans;
		map->cap = cap;
	}
	map->spans[map->count++] = (struct span){
		.start = address, .end = address + length, .region = region};
	return 0;
}

static int spans_compare(const void *a, const void *b)
{
	const struct span *x = a, *y = b;

	if (x->start != y->start)
		return x->start < y->start ? -1 : 1;
	return x->end == y->end ? 0 : x->end > y->end ? -1 : 1;
}

void region_map_sort(struct region_map *map)
{
	if (map->count)
		qsort(map->spans, map->count, sizeof(*map->spans), spans_compare);
	reach_renew(map, 0);
}

int region_map_put(struct region_map *map, struct region *region)
{
	size_t at = spans_before(map, region->address, region->address + region->length);
	int r = region_map_add(map, region->address, region->length, region);
	struct span span;

	if (r < 0)
		return err_pass(r);
	span = map->spans[map->count - 1];
	memmove(map->spans + at + 1, map->spans + at,
		(map->count - 1 - at) * sizeof(span));
	map->spans[at] = span;
	reach_renew(map, at);
	return 0;
}

void region_map_remove(struct region_map *map, struct region *region)
{
	size_t at = spans_before(map, region->address, UINT64_MAX);

	assert(map->count <= map->cap);
	while (at < map->count && map->spans[at].region != region)
		at++;
	if (at == map->count)
		return;
	map->count--;
	memmove(map->spans + at, map->spans + at + 1,
		(map->count - at) * sizeof(map->spans[0]));
	reach_renew(map, at);
}

bool region_map_index(const struct region_map *map, uint64_t address, uint64_t len,
		      size_t *at_p)
{
	uint64_t end;

	if (__builtin_add_overflow(address, len, &end))
		return false;
	for (size_t i = spans_before(map, address, 0); i-- > 0;) {
		const struct span *s = &map->spans[i];

		if (s->reach < end)
			break;
		if (s->end >= end) {
			*at_p = i;
			return true;
		}
	}
	return false;
}

size_t region_map_count(const struct region_map *map)
{
	return map->count;
}

void *region_map_at(const struct region_map *map, size_t at)
{
	assert(at < map->count);
	return map->spans[at].region;
}

uint64_t region_map_start(const struct region_map *map, size_t at)
{
	assert(at < map->count);
	return map->spans[at].start;
}

int region_map_copy(const struct region_map *map, struct region_map **copy_p)
{
	struct region_map *copy = mem_zalloc(sizeof(*copy));

	if (!copy)
		return err_pass(-ENOMEM);
	copy->spans = mem_calloc(map->count, sizeof(*copy->spans));
	if (!copy->spans) {
		mem_free(copy);
		return err_pass(-ENOMEM);
	}
	if (map->count)
		memcpy(copy->spans, map->spans, map->count * sizeof(*copy->spans));
	copy->count = copy->cap = map->count;
	*copy_p = copy;
	return 0;
}
