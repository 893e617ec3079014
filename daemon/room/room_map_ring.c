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

/* The range starts with the first one. */
static int select_read(const uint8_t *data, const struct kvd_ring_view *head,
		       const struct layout_view *view, const char *where,
		       struct room_map *map)
{
	bool all_layers = !head->layer_begin && !head->layer_end;

	if (head->first_token || head->token_begin || head->token_end)
		return err_raise(ERR_INVAL,
				 "%s: a selection excludes first_token and tokens",
				 where);
	map->select = mem_dup(data, head->select_count * sizeof(*map->select));
	if (!map->select)
		return err_pass(-ENOMEM);
	map->select_count = head->select_count;
	map->token_begin = map->select[0];
	map->token_end = (uint64_t)map->select[map->select_count - 1] + 1;
	map->layers = (struct plan_layers){head->layer_begin,
					   all_layers ? UINT32_MAX : head->layer_end};
	for (uint32_t i = 0; i < head->select_count; i++)
		map->select[i] -= (uint32_t)map->token_begin; /* wraps: not ascending */
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
	*len_p = (size_t)kvd_ring_view_bytes(head.page_count, head.select_count);
	if (!memchr(head.name, 0, sizeof(head.name)))
		return err_raise(ERR_INVAL,
				 "views[%u]: the name must have at most %zu bytes", index,
				 sizeof(head.name) - 1);
	if (head.page_count > ROOM_PAGES_MAX || head.select_count > ROOM_SELECT_MAX ||
	    *len_p > len)
		return err_raise(
			ERR_RANGE,
			"views[%u]: %u pages, %u selected tokens, %zu bytes left "
			"in the entry (limits %u, %u)",
			index, head.page_count, head.select_count, len, ROOM_PAGES_MAX,
			ROOM_SELECT_MAX);
	if (room_maps_find(maps, head.name))
		return err_raise(ERR_INVAL, "views.%s: named twice", head.name);
	r = room_map_name(&maps->maps[maps->count], head.name, layout, &view);
	if (r < 0)
		return err_pass(r);
	snprintf(where, sizeof(where), "views.%s", head.name);
	r = pages_read(data + sizeof(head), head.page_count, view, where,
		       &maps->maps[maps->count++]);
	if (r >= 0 && head.select_count)
		r = select_read(data + kvd_ring_view_bytes(head.page_count, 0), &head,
				view, where, &maps->maps[maps->count - 1]);
	else if (r >= 0)
		r = ranges_read(&head, view, where, &maps->maps[maps->count - 1]);
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
