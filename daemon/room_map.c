/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The one place where page lists and token ranges enter the daemon. Whatever
 * made them (an engine's JSON, a peer's bytes) they pass map_check(), so that
 * every later user may rely on: the view exists, pages are inside it, and
 * [token_begin, token_end) lies in what the pages hold.
 *
 * On the wire pages travel as runs: a prefill's pages are mostly ascending.
 */
#include "daemon/room_map.h"

#include <endian.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "proto/json.h"

static int map_check(const struct room_map *map, const struct layout *layout,
		     const char *where)
{
	const struct layout_view *view = layout_view_find(layout, map->view);
	uint64_t held, last;

	if (!view)
		return err_raise(ERR_NOTFOUND, "%s: the pool has no view '%s'", where,
				 map->view);
	for (size_t i = 0; i < map->page_count; i++) {
		if (map->pages[i] >= view->pages)
			return err_raise(ERR_RANGE,
					 "%s.pages[%zu]: %u is outside the view's %u pages",
					 where, i, map->pages[i], view->pages);
	}
	held = (uint64_t)map->page_count * view->page_tokens; /* both below 2^32 */
	if (__builtin_add_overflow(map->first_token, held, &last))
		return err_raise(ERR_RANGE, "%s.first_token: beyond 2^64", where);
	if (map->token_begin > map->token_end)
		return err_raise(ERR_INVAL, "%s.tokens: begin %llu is after end %llu", where,
				 (unsigned long long)map->token_begin,
				 (unsigned long long)map->token_end);
	if (map->token_begin < map->first_token || map->token_end > last)
		return err_raise(ERR_RANGE,
				 "%s.tokens: [%llu, %llu) is not inside the pages' "
				 "[%llu, %llu)",
				 where, (unsigned long long)map->token_begin,
				 (unsigned long long)map->token_end,
				 (unsigned long long)map->first_token,
				 (unsigned long long)last);
	if (map->layers.begin > map->layers.end)
		return err_raise(ERR_INVAL, "%s.layers: begin %u is after end %u", where,
				 map->layers.begin, map->layers.end);
	return 0;
}

static int parse_pair(const cJSON *obj, const char *name, const char *where, uint64_t *a_p,
		      uint64_t *b_p, bool *there_p)
{
	const cJSON *arr = NULL;
	int64_t v[2];
	int r = json_get_array(obj, name, false, 2, &arr);

	*there_p = false;
	if (r < 0 || !arr)
		return r < 0 ? err_prefix(r, "%s", where) : 0;
	for (int i = 0; i < 2; i++) {
		const cJSON *n = cJSON_GetArrayItem(arr, i);

		if (!n || !json_number_is_int(n, &v[i]) || v[i] < 0)
			return err_raise(ERR_INVAL,
					 "%s.%s: two whole numbers [begin, end] are wanted",
					 where, name);
	}
	*a_p = (uint64_t)v[0];
	*b_p = (uint64_t)v[1];
	*there_p = true;
	return 0;
}

static int parse_ranges(const cJSON *obj, const char *where, uint64_t held,
			struct room_map *map)
{
	uint64_t begin = 0, end = 0;
	int64_t first = 0;
	bool there;
	int r;

	r = json_get_int(obj, "first_token", false, 0, JSON_INT_MAX, &first);
	if (r < 0)
		return err_prefix(r, "%s", where);
	map->first_token = (uint64_t)first;
	map->token_begin = map->first_token;
	map->token_end = map->first_token + held;
	r = parse_pair(obj, "tokens", where, &begin, &end, &there);
	if (r < 0)
		return r;
	if (there) {
		map->token_begin = begin;
		map->token_end = end;
	}
	map->layers = (struct plan_layers){0, UINT32_MAX};
	r = parse_pair(obj, "layers", where, &begin, &end, &there);
	if (r < 0)
		return r;
	if (there && (begin > UINT32_MAX || end > UINT32_MAX))
		return err_raise(ERR_RANGE, "%s.layers: beyond %u", where, UINT32_MAX);
	if (there)
		map->layers = (struct plan_layers){(uint32_t)begin, (uint32_t)end};
	return 0;
}

static int parse_view(const cJSON *obj, const struct layout *layout, struct room_map *map)
{
	static const char *const names[] = {"pages", "first_token", "tokens", "layers",
					    NULL};
	const struct layout_view *view;
	char where[64];
	int r;

	snprintf(where, sizeof(where), "views.%.31s", obj->string);
	if (strlen(obj->string) >= sizeof(map->view))
		return err_raise(ERR_NOTFOUND, "%s: the pool has no such view", where);
	memcpy(map->view, obj->string, strlen(obj->string) + 1);
	if (!cJSON_IsObject(obj))
		return err_raise(ERR_INVAL, "%s: an object is wanted", where);
	r = json_only(obj, names);
	if (r < 0)
		return err_prefix(r, "%s", where);
	view = layout_view_find(layout, map->view);
	if (!view)
		return err_raise(ERR_NOTFOUND, "%s: the pool has no such view", where);
	r = json_get_pages(obj, "pages", true, view->pages, ROOM_PAGES_MAX, &map->pages,
			   &map->page_count);
	if (r < 0)
		return err_prefix(r, "%s", where);
	r = parse_ranges(obj, where, (uint64_t)map->page_count * view->page_tokens, map);
	if (r < 0)
		return r;
	return map_check(map, layout, where);
}

static int parse_aux(int64_t aux, const struct layout *layout, struct room_map *map)
{
	const struct layout_view *view = layout_view_find(layout, ROOM_AUX_VIEW);

	if (!view)
		return err_raise(ERR_INVAL, "aux: the pool has no view '" ROOM_AUX_VIEW "'");
	if (aux >= view->pages)
		return err_raise(ERR_RANGE, "aux: slot %lld is outside the view's %u",
				 (long long)aux, view->pages);
	strcpy(map->view, ROOM_AUX_VIEW);
	map->pages = mem_zalloc(sizeof(*map->pages));
	if (!map->pages)
		return err_pass(-ENOMEM);
	map->pages[0] = (uint32_t)aux;
	map->page_count = 1;
	map->token_end = view->page_tokens;
	map->layers = (struct plan_layers){0, UINT32_MAX};
	return 0;
}

int room_maps_parse(const cJSON *views, int64_t aux, const struct layout *layout,
		    struct room_maps *maps)
{
	size_t n = views ? (size_t)cJSON_GetArraySize(views) : 0;
	const cJSON *it = NULL;
	int r = 0;

	*maps = (struct room_maps){0};
	if (n > LAYOUT_VIEWS_MAX)
		return err_raise(ERR_LIMIT, "views: %zu, at most %u", n, LAYOUT_VIEWS_MAX);
	maps->maps = mem_calloc(n + 1, sizeof(*maps->maps));
	if (!maps->maps)
		return err_pass(-ENOMEM);
	cJSON_ArrayForEach(it, views) {
		if (aux >= 0 && strcmp(it->string, ROOM_AUX_VIEW) == 0) {
			r = err_raise(ERR_INVAL, "views.aux: given beside \"aux\"");
			goto out;
		}
		r = parse_view(it, layout, &maps->maps[maps->count++]);
		if (r < 0)
			goto out;
	}
	if (aux >= 0)
		r = parse_aux(aux, layout, &maps->maps[maps->count++]);
out:
	if (r < 0)
		room_maps_fini(maps);
	return r;
}

void room_maps_fini(struct room_maps *maps)
{
	for (size_t i = 0; i < maps->count; i++)
		mem_free(maps->maps[i].pages);
	mem_free(maps->maps);
	*maps = (struct room_maps){0};
}

int room_maps_copy(const struct room_maps *src, struct room_maps *dst)
{
	*dst = (struct room_maps){0};
	dst->maps = mem_calloc(src->count, sizeof(*dst->maps));
	if (!dst->maps)
		return err_pass(-ENOMEM);
	for (size_t i = 0; i < src->count; i++) {
		dst->maps[i] = src->maps[i];
		dst->maps[i].pages = mem_dup(src->maps[i].pages,
					     src->maps[i].page_count * sizeof(uint32_t));
		dst->count = i + 1;
		if (!dst->maps[i].pages) {
			room_maps_fini(dst);
			return err_pass(-ENOMEM);
		}
	}
	return 0;
}

static uint32_t runs_of(const struct room_map *map)
{
	uint32_t runs = map->page_count > 0;

	for (size_t i = 1; i < map->page_count; i++)
		runs += map->pages[i] != map->pages[i - 1] + 1;
	return runs;
}

size_t room_maps_wire_bytes(const struct room_maps *maps)
{
	size_t bytes = 4;

	for (size_t i = 0; i < maps->count; i++)
		bytes += 2 + strlen(maps->maps[i].view) + 3 * 8 + 3 * 4 +
			 8 * (size_t)runs_of(&maps->maps[i]);
	return bytes;
}

static inline uint8_t *put_le32(uint8_t *at, uint32_t v)
{
	v = htole32(v);
	memcpy(at, &v, sizeof(v));
	return at + sizeof(v);
}

/* The loop does this for a whole room's pages: one pass, and no check a number. */
static void put_pages(struct cursor *out, const struct room_map *map)
{
	const uint32_t runs = runs_of(map);
	const uint32_t *page = map->pages, *end = page + map->page_count;
	uint8_t *at;

	cursor_put_u32(out, runs);
	at = cursor_put_room(out, 8 * (size_t)runs);
	while (at && page < end) {
		const uint32_t *first = page++;

		while (page < end && *page == page[-1] + 1)
			page++;
		at = put_le32(at, *first);
		at = put_le32(at, (uint32_t)(page - first));
	}
}

void room_maps_put(struct cursor *out, const struct room_maps *maps)
{
	cursor_put_u32(out, (uint32_t)maps->count);
	for (size_t i = 0; i < maps->count; i++) {
		const struct room_map *map = &maps->maps[i];

		cursor_put_str(out, map->view);
		cursor_put_u64(out, map->first_token);
		cursor_put_u64(out, map->token_begin);
		cursor_put_u64(out, map->token_end);
		cursor_put_u32(out, map->layers.begin);
		cursor_put_u32(out, map->layers.end);
		put_pages(out, map);
	}
}

static inline uint32_t le32(const uint8_t *p)
{
	uint32_t v;

	memcpy(&v, p, sizeof(v));
	return le32toh(v);
}

/* Runs are summed under the cap before anything is allocated. On the loop, and a
 * room of gigabytes has 65 536 of them: no cursor's call for each word. */
static int get_pages(struct cursor *in, const char *view, uint64_t *budget,
		     struct room_map *map)
{
	uint32_t runs = cursor_get_count(in, ROOM_PAGES_MAX, 8);
	const uint8_t *at = cursor_get_bytes(in, (size_t)runs * 8);
	uint64_t total = 0;
	uint32_t *pages;

	if (!at)
		return err_raise(ERR_PROTO, "views.%s.pages: cut off", view);
	for (uint32_t i = 0; i < runs; i++) {
		uint64_t page = le32(at + 8 * (size_t)i), n = le32(at + 8 * (size_t)i + 4);

		total += n;
		if (n == 0 || page + n > UINT32_MAX || total > *budget)
			return err_raise(ERR_PROTO, "views.%s.pages: run %u is empty, wraps "
					 "or exceeds %u pages", view, i, ROOM_PAGES_MAX);
	}
	*budget -= total;
	map->pages = pages = mem_regrow(NULL, total, sizeof(*map->pages));
	if (!map->pages)
		return err_pass(-ENOMEM);
	map->page_count = total;
	for (uint32_t i = 0; i < runs; i++, at += 8) {
		uint32_t page = le32(at), n = le32(at + 4);

		while (n--)
			*pages++ = page++;
	}
	return 0;
}

int room_maps_get(struct cursor *in, const struct layout *layout, struct room_maps *maps)
{
	uint32_t n = cursor_get_count(in, LAYOUT_VIEWS_MAX + 1, 2 + 3 * 8 + 3 * 4);
	uint64_t budget = ROOM_PAGES_MAX; /* over all views */
	char where[64];
	int r = 0;

	*maps = (struct room_maps){0};
	maps->maps = mem_calloc(n, sizeof(*maps->maps));
	if (!maps->maps)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < n && r >= 0; i++) {
		struct room_map *map = &maps->maps[maps->count++];

		cursor_get_str(in, map->view, sizeof(map->view));
		map->first_token = cursor_get_u64(in);
		map->token_begin = cursor_get_u64(in);
		map->token_end = cursor_get_u64(in);
		map->layers.begin = cursor_get_u32(in);
		map->layers.end = cursor_get_u32(in);
		snprintf(where, sizeof(where), "views.%.31s", map->view);
		r = get_pages(in, map->view, &budget, map);
		if (r >= 0)
			r = map_check(map, layout, where);
		for (uint32_t k = 0; k < i && r >= 0; k++) {
			if (strcmp(maps->maps[k].view, map->view) == 0)
				r = err_raise(ERR_PROTO, "%s: named twice", where);
		}
	}
	if (r >= 0)
		r = cursor_check(in, "views");
	if (r < 0)
		room_maps_fini(maps);
	return r;
}

const struct room_map *room_maps_find(const struct room_maps *maps, const char *view)
{
	for (size_t i = 0; i < maps->count; i++) {
		if (strcmp(maps->maps[i].view, view) == 0)
			return &maps->maps[i];
	}
	return NULL;
}

int room_maps_within(const struct room_maps *inner, const struct room_maps *outer,
		     const struct layout *layout)
{
	for (size_t i = 0; i < inner->count; i++) {
		const struct room_map *in = &inner->maps[i];
		const struct room_map *out = room_maps_find(outer, in->view);
		const struct layout_view *view = layout_view_find(layout, in->view);
		uint64_t t;

		if (!out || !view)
			return err_raise(ERR_RANGE, "views.%s: not offered", in->view);
		if (in->token_begin < out->token_begin || in->token_end > out->token_end)
			return err_raise(ERR_RANGE,
					 "views.%s.tokens: outside the offered [%llu, %llu)",
					 in->view, (unsigned long long)out->token_begin,
					 (unsigned long long)out->token_end);
		for (t = in->token_begin; t < in->token_end;) {
			uint64_t a = t - in->first_token, b = t - out->first_token;

			if (in->pages[a / view->page_tokens] !=
				    out->pages[b / view->page_tokens] ||
			    a % view->page_tokens != b % view->page_tokens)
				return err_raise(
					ERR_RANGE, "views.%s.pages[%llu]: page %u is not "
					"the one offered for token %llu", in->view,
					(unsigned long long)(a / view->page_tokens),
					in->pages[a / view->page_tokens],
					(unsigned long long)t);
			t += view->page_tokens - a % view->page_tokens;
		}
	}
	return 0;
}

int room_maps_pair(const struct room_maps *src, const struct room_maps *dst,
		   struct plan_map **maps_p, size_t *count_p)
{
	struct plan_map *maps = mem_calloc(src->count, sizeof(*maps));
	size_t n = 0;

	if (!maps)
		return err_pass(-ENOMEM);
	for (size_t i = 0; i < src->count; i++) {
		const struct room_map *s = &src->maps[i];
		const struct room_map *d = room_maps_find(dst, s->view);
		struct plan_map m;

		if (!d)
			continue;
		m = (struct plan_map){
			.view = s->view,
			.src_pages = s->pages,
			.src_page_count = s->page_count,
			.src_first_token = s->first_token,
			.dst_pages = d->pages,
			.dst_page_count = d->page_count,
			.dst_first_token = d->first_token,
			.token_begin = s->token_begin > d->token_begin ? s->token_begin
								       : d->token_begin,
			.token_end = s->token_end < d->token_end ? s->token_end
								 : d->token_end,
			.layers = {s->layers.begin > d->layers.begin ? s->layers.begin
								     : d->layers.begin,
				   s->layers.end < d->layers.end ? s->layers.end
								 : d->layers.end},
		};
		if (m.token_begin < m.token_end && m.layers.begin < m.layers.end)
			maps[n++] = m;
	}
	*maps_p = maps;
	*count_p = n;
	return 0;
}
