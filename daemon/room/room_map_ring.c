/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pages in an entry of the submission ring (proto/kvd_ring.h). The bytes are a copy,
 * which the engine cannot change any more; every length in it may be wrong.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/room/room_map.h"
#include "proto/kvd_ring.h"

_Static_assert(sizeof(struct kvd_ring_view) == 72, "no padding, a multiple of 8");

static int pages_read(const uint8_t *data, uint32_t count, const struct layout_view *view,
		      const char *where, struct room_map *map)
{
	map->pages = mem_alloc((size_t)count * sizeof(*map->pages) + 1);
	if (!map->pages)
		return err_pass(-ENOMEM);
	map->page_count = count;
	memcpy(map->pages, data, (size_t)count * sizeof(*map->pages));
	for (uint32_t i = 0; i < count; i++) {
		int r = room_map_check_page(view, where, i, map->pages[i]);

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static int ranges_read(const struct kvd_ring_view *head, const struct layout_view *view,
		       const char *where, struct room_map *map)
{
	bool all = !head->token_begin && !head->token_end;
	bool all_layers = !head->layer_begin && !head->layer_end;
	uint64_t held = (uint64_t)head->page_count * view->page_tokens; /* < 2^32 each */

	if (all && !token_shard_is_all(&view->shard))
		return err_raise(ERR_INVAL,
				 "%s.tokens: missing; required for a view that holds a "
				 "shard of the tokens",
				 where);

	map->first_token = head->first_token;
	map->token_begin = all ? head->first_token : head->token_begin;
	map->token_end = head->token_end;
	if (all && __builtin_add_overflow(head->first_token, held, &map->token_end))
		return err_raise(ERR_RANGE, "%s.first_token: beyond 2^64", where);
	map->layers = (struct plan_layers){head->layer_begin,
					   all_layers ? UINT32_MAX : head->layer_end};
	return err_pass(room_map_check_ranges(map, view, where));
}

/* len_p: the bytes it takes. A map that was started must be freed by the caller in any
 * case. */
static int view_read(const uint8_t *data, size_t len, unsigned int index,
		     const struct layout *layout, struct room_maps *maps, size_t *len_p)
{
	const struct layout_view *view;
	struct kvd_ring_view head;
	char where[64];
	int r;

	if (len < sizeof(head))
		return err_raise(ERR_RANGE,
				 "views[%u]: %zu bytes left in the entry, a view needs "
				 "%zu",
				 index, len, sizeof(head));
	memcpy(&head, data, sizeof(head));
	if (!memchr(head.name, 0, sizeof(head.name)) || head.zero)
		return err_raise(ERR_INVAL,
				 "views[%u]: the name must have at most %zu bytes, and "
				 "the word after page_count must be 0",
				 index, sizeof(head.name) - 1);
	if (head.page_count > ROOM_PAGES_MAX ||
	    kvd_ring_view_bytes(head.page_count) > len)
		return err_raise(ERR_RANGE,
				 "views[%u]: %u pages, %zu bytes left in the entry "
				 "(limit %u pages)",
				 index, head.page_count, len, ROOM_PAGES_MAX);
	if (room_maps_find(maps, head.name))
		return err_raise(ERR_INVAL, "views.%s: named twice", head.name);
	r = room_map_name(&maps->maps[maps->count], head.name, layout, &view);
	if (r < 0)
		return err_pass(r);
	snprintf(where, sizeof(where), "views.%s", head.name);
	r = pages_read(data + sizeof(head), head.page_count, view, where,
		       &maps->maps[maps->count++]);
	if (r >= 0)
		r = ranges_read(&head, view, where, &maps->maps[maps->count - 1]);
	*len_p = (size_t)kvd_ring_view_bytes(head.page_count);
	return r < 0 ? err_pass(r) : 0;
}

int room_maps_read(const uint8_t *data, size_t len, uint32_t count, int64_t aux,
		   const struct layout *layout, struct room_maps *maps)
{
	size_t at = 0, taken = 0;
	int r = room_maps_begin(maps, count);

	for (uint32_t i = 0; r >= 0 && i < count; i++, at += taken)
		r = view_read(data + at, len - at, i, layout, maps, &taken);
	if (r >= 0 && at != len)
		r = err_raise(ERR_RANGE, "views: %zu bytes after the last view",
			      len - at);
	if (r >= 0)
		r = room_maps_aux(maps, aux, layout);
	if (r < 0)
		room_maps_fini(maps);
	return r < 0 ? err_pass(r) : 0;
}
