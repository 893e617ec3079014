/* SPDX-License-Identifier: Apache-2.0 */
/*
 * segment: the tokens of a map that both sides hold, cut at the page ends of either side
 * and at the run ends of its shard.
 *
 * Within a segment tokens follow each other at a constant stride on both sides. A field
 * whose pages follow each other like tokens do (page_stride == page_tokens *
 * token_stride) is *flat* on that side: page ends do not cut it. So there are up to four
 * lists of one map, by (source flat, destination flat), each made on first use by a
 * field.
 */
#ifndef KVD_PLAN_SEGMENT_H
#define KVD_PLAN_SEGMENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct plan_map;
struct layout_view;

/* `blocks` > 1: the same again at the next page on each side that is not flat,
 * and `tokens` later on each side that is. */
struct segment {
	uint32_t src_page, src_token;
	uint32_t dst_page, dst_token;
	uint64_t tokens;
	uint64_t blocks;
};

struct segment_list {
	struct segment *segments; /* ascending by destination page and token */
	size_t count;
	bool made;
	/* the destination's extent: tokens counted over pages for a flat list,
	 * else pages and, within them, tokens */
	uint64_t slot_min, slot_max;
	uint64_t page_min, page_max;
	uint64_t token_min, token_max;
};

struct segment_map {
	uint32_t src_page_tokens, dst_page_tokens;
	struct segment_list cuts; /* at every page end */
	struct segment_list lists[2][2];
};

/*
 * Check a map's lists and token range against the two views and cut it.
 * ERR_RANGE names "maps[index]", the list and the entry; ERR_LIMIT: shards of short
 * runs cut it into too many pieces.
 */
int segment_map_init(struct segment_map *sm, const struct plan_map *map, size_t index,
		     const struct layout_view *src, const struct layout_view *dst);
void segment_map_fini(struct segment_map *sm);
int segment_map_list(struct segment_map *sm, bool src_flat, bool dst_flat,
		     const struct segment_list **list_p);

#endif
