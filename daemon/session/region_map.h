/* SPDX-License-Identifier: Apache-2.0 */
/*
 * region_map: a session's regions by the engine's addresses. Regions may overlap and
 * nest: an engine registers an allocation and a part of it. Regions without an address
 * are not in the map. The regions of a peer's session are found in the same way.
 */
#ifndef KVD_REGION_MAP_H
#define KVD_REGION_MAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct region;
struct region_map;

int region_map_new(struct region_map **map_p);
void region_map_free(struct region_map *map); /* NULL is fine */
/* ERR_NOMEM. A region is put once; address + length must not overflow. */
int region_map_put(struct region_map *map, struct region *region);
/* Another owner's, in any order: region_map_sort() when all are added. */
int region_map_add(struct region_map *map, uint64_t address, uint64_t length,
		   void *region);
void region_map_sort(struct region_map *map);
void region_map_remove(struct region_map *map, struct region *region); /* idempotent */
/* The index in the map of the innermost region that holds all of [address, address +
 * len), until the map changes; false: none does. */
bool region_map_index(const struct region_map *map, uint64_t address, uint64_t len,
		      size_t *at_p);
size_t region_map_count(const struct region_map *map);
void *region_map_at(const struct region_map *map, size_t at);
uint64_t region_map_start(const struct region_map *map, size_t at); /* its address */
/* A copy for another thread; the caller must pin the regions. */
int region_map_copy(const struct region_map *map, struct region_map **copy_p);

#endif
