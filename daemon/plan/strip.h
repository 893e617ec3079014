/* SPDX-License-Identifier: Apache-2.0 */
/*
 * strip: one field's unit interval in one map: the element of a plan.
 */
#ifndef KVD_PLAN_STRIP_H
#define KVD_PLAN_STRIP_H

#include "daemon/plan/nest.h"
#include "daemon/plan/plan.h"
#include "daemon/plan/segment.h"

struct strip_side {
	uint32_t buffer;
	bool flat;     /* pages follow each other as tokens do */
	uint64_t base; /* of page 0, token 0, the strip's first unit */
	uint64_t page_stride, token_stride, unit_stride;
};

struct strip {
	size_t map;
	uint32_t layer;
	const struct layout_field *field; /* the destination's, for error texts */
	uint32_t first_unit, units;
	uint64_t unit_bytes;
	struct strip_side src, dst;
	const struct segment_list *list;
	uint64_t dst_begin, dst_end; /* hull of all destination bytes */
	bool ordered;		     /* later segments are after earlier ones */
};

struct strips {
	struct strip *items;
	size_t count, cap;
	struct segment_map *maps; /* one per map of the request */
	size_t map_count;
};

/* Intersect the request's layouts, wants and maps. Strips without tokens or units are
 * omitted. Errors are plan_make()'s. */
int strips_collect(const struct plan_request *req, struct strips *strips);
void strips_fini(struct strips *strips);
/* Ascending by destination. */
void strips_sort(struct strips *strips);

/* The rows of one segment, collapsed; `tag` is the caller's. */
void strip_box(const struct strip *strip, const struct segment *segment, uint32_t tag,
	       struct nest_box *box_p);
/* Move *box to a segment with the same tokens and blocks. */
void strip_box_move(const struct strip *strip, const struct segment *segment,
		    struct nest_box *box);

#endif
