/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_map: which pages of which view hold which tokens of a request, on one
 * side. Made from a command's "views" or from a peer's message, checked against
 * a layout, immutable afterwards.
 */
#ifndef KVD_ROOM_MAP_H
#define KVD_ROOM_MAP_H

#include <cjson/cJSON.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/cursor.h"
#include "daemon/plan/layout.h"
#include "daemon/plan/plan.h"

#define ROOM_PAGES_MAX (1u << 20) /* of one view of one message */
#define ROOM_AUX_VIEW "aux"	  /* the view that "aux": slot names */

struct room_map {
	char view[LAYOUT_NAME_MAX];
	uint64_t first_token;		 /* in the first slot of pages[0] */
	uint64_t token_begin, token_end; /* half-open; inside what the pages hold */
	struct plan_layers layers;
	uint32_t *pages;
	size_t page_count;
};

struct room_maps {
	struct room_map *maps;
	size_t count;
};

/* "views" (may be NULL) and "aux" (-1: none) of a command. Errors name the
 * member: "views.kv.pages[3]: 70 is outside the pool's 64 pages". */
int room_maps_parse(const cJSON *views, int64_t aux, const struct layout *layout,
		    struct room_maps *maps);
void room_maps_fini(struct room_maps *maps);
/* A deep copy. */
int room_maps_copy(const struct room_maps *src, struct room_maps *dst);

/* count u32, {str view, u64 first, u64 begin, u64 end, u32 layer begin, u32
 * layer end, u32 runs, {u32 page, u32 count}…} */
size_t room_maps_wire_bytes(const struct room_maps *maps);
void room_maps_put(struct cursor *out, const struct room_maps *maps);
/* Checked against the layout whose pages they name (invariant 6). */
int room_maps_get(struct cursor *in, const struct layout *layout, struct room_maps *maps);

const struct room_map *room_maps_find(const struct room_maps *maps, const char *view);
/* Are all pages of `inner` among those of `outer`, and its tokens at the same
 * places? ERR_RANGE names the first that is not. */
int room_maps_within(const struct room_maps *inner, const struct room_maps *outer,
		     const struct layout *layout);

/* Pair the two sides' maps into plan maps: views on both, token ranges cut to
 * what both hold (empty ones left out). Borrows the pages. *maps_p is heap. */
int room_maps_pair(const struct room_maps *src, const struct room_maps *dst,
		   struct plan_map **maps_p, size_t *count_p);

#endif
