/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The only place where page lists and token ranges enter the daemon. From any source (an
 * engine's JSON here, a peer's bytes in room_map_wire.c) they pass the same checks, so
 * that every later user may rely on them: the view exists, pages are inside it, and
 * [token_begin, token_end) is within the tokens of the pages.
 */
#include "daemon/room/room_map.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "proto/json.h"

int room_map_check_page(const struct layout_view *view, const char *where, size_t at,
			uint64_t page)
{
	if (page < view->pages)
		return 0;
	return err_raise(ERR_RANGE, "%s.pages[%zu]: %llu is outside the view's %u pages",
			 where, at, (unsigned long long)page, view->pages);
}

/* `held`: places of the pages. */
static int select_check(const struct room_map *map, const struct layout_view *view,
			uint64_t held, const char *where)
{
	uint64_t tokens =
		map->token_begin < map->token_end ? map->token_end - map->token_begin : 0;

	if (!token_shard_is_all(&view->shard))
		return err_raise(ERR_REQUIRE,
				 "%s.select: the view holds a shard of the tokens",
				 where);
	if (map->layers.begin > map->layers.end)
		return err_raise(ERR_INVAL, "%s.layers: begin %u is after end %u", where,
				 map->layers.begin, map->layers.end);
	if (map->select_count > held || map->first_token > held - map->select_count)
		return err_raise(ERR_RANGE,
				 "%s.select: %zu tokens, the pages have %llu places",
				 where, map->select_count, (unsigned long long)held);
	for (size_t i = 0; i < map->select_count;
	     i++) /* at most 65536: ROOM_SELECT_MAX */
		if (map->select[i] >= tokens ||
		    (i > 0 && map->select[i] <= map->select[i - 1]))
			return err_raise(ERR_RANGE,
					 "%s.select[%zu]: not ascending, or out of range",
					 where, i);
	return 0;
}

int room_map_check_ranges(const struct room_map *map, const struct layout_view *view,
			  const char *where)
{
	uint64_t held, last, turn = token_shard_turn(&view->shard);

	held = (uint64_t)map->page_count * view->page_tokens; /* both below 2^32 */
	if (map->select)
		return err_pass(select_check(map, view, held, where));
	if (!token_shard_at(&view->shard, held, &last) ||
	    __builtin_add_overflow(map->first_token, last, &last))
		return err_raise(ERR_RANGE, "%s.first_token: beyond 2^64", where);
	if (map->first_token % turn)
		return err_raise(ERR_RANGE,
				 "%s.first_token: %llu, must be a multiple of %llu, the "
				 "size x run of the view's shard",
				 where, (unsigned long long)map->first_token,
				 (unsigned long long)turn);
	if (map->token_begin > map->token_end)
		return err_raise(ERR_INVAL, "%s.tokens: begin %llu is after end %llu",
				 where, (unsigned long long)map->token_begin,
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

/* The first page of a list that must include the slot. */
static size_t cut_first(const struct layout_view *view, uint64_t slot, uint64_t *token_p)
{
	size_t page = (size_t)(slot / view->page_tokens);

	while (!token_shard_at(&view->shard, (uint64_t)page * view->page_tokens,
			       token_p) ||
	       *token_p % token_shard_turn(&view->shard))
		page--;
	return page;
}

static int map_cut(const struct room_map *map, const struct layout_view *view,
		   uint64_t begin, uint64_t end, struct room_map *cut)
{
	uint64_t from = token_shard_slot(&view->shard, begin - map->first_token);
	uint64_t to = token_shard_slot(&view->shard, end - map->first_token), token = 0;
	size_t first = cut_first(view, from, &token);
	size_t last = (size_t)((to + view->page_tokens - 1) / view->page_tokens);

	assert(map->token_begin <= begin && begin <= end && end <= map->token_end);
	*cut = *map;
	cut->first_token = map->first_token + token;
	cut->token_begin = begin;
	cut->token_end = end;
	cut->page_count = last > first ? last - first : 0;
	cut->repeat = 0;
	cut->pages = mem_dup(map->pages + first, cut->page_count * sizeof(*cut->pages));
	return cut->pages ? 0 : err_pass(-ENOMEM);
}

size_t room_map_select_from(const struct room_map *map, uint64_t token)
{
	size_t from = 0, to = map->select_count;

	while (from < to) { /* at most 16: of 65536 */
		size_t at = from + (to - from) / 2;

		if (map->token_begin + map->select[at] < token)
			from = at + 1;
		else
			to = at;
	}
	return from;
}

/* There are some. */
static int select_cut(const struct room_map *map, const struct layout_view *view,
		      uint64_t begin, uint64_t end, struct room_map *cut)
{
	size_t from = room_map_select_from(map, begin);
	size_t count = room_map_select_from(map, end) - from;
	uint64_t place = map->first_token + from;
	size_t first = (size_t)(place / view->page_tokens);
	size_t last = (size_t)((place + count - 1) / view->page_tokens);
	uint32_t base = map->select[from];

	assert(count > 0);
	*cut = *map;
	cut->first_token = place % view->page_tokens;
	cut->token_begin = map->token_begin + base;
	cut->token_end = map->token_begin + map->select[from + count - 1] + 1;
	cut->page_count = last - first + 1;
	cut->repeat = 0;
	cut->select_count = count;
	cut->pages = mem_dup(map->pages + first, cut->page_count * sizeof(*cut->pages));
	cut->select = mem_dup(map->select + from, count * sizeof(*cut->select));
	for (size_t i = 0; cut->select && i < count; i++) /* at most 65536: select */
		cut->select[i] -= base;
	return cut->pages && cut->select ? 0 : err_pass(-ENOMEM);
}

uint64_t room_map_token_bytes(const struct room_map *map, const struct layout_view *view)
{
	uint64_t bytes = 0;

	for (uint32_t i = 0; i < view->layer_count; i++) {
		const struct layout_layer *layer = &view->layers[i];

		for (uint32_t k = 0; k < layer->field_count; k++)
			if (layer->layer >= map->layers.begin &&
			    layer->layer < map->layers.end)
				bytes += layer->fields[k].unit_bytes *
					 layer->fields[k].units;
	}
	return bytes;
}

const struct room_map *room_maps_selection(const struct room_maps *maps)
{
	for (size_t i = 0; i < maps->count; i++)
		if (maps->maps[i].select)
			return &maps->maps[i];
	return NULL;
}

int room_maps_cut(const struct room_maps *maps, const struct layout *layout,
		  uint64_t begin, uint64_t end, struct room_maps *cut)
{
	int r = room_maps_begin(cut, maps->count);

	for (size_t i = 0; i < maps->count && r >= 0; i++) {
		const struct room_map *map = &maps->maps[i];

		r = (map->select ? select_cut
				 : map_cut)(map, layout_view_find(layout, map->view),
					    begin, end, &cut->maps[cut->count++]);
	}
	if (r >= 0)
		return 0;
	room_maps_fini(cut);
	return err_pass(r);
}

static int parse_pair(const cJSON *obj, const char *name, const char *where,
		      uint64_t *a_p, uint64_t *b_p, bool *there_p)
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
					 "%s.%s: must be [begin, end], two integers",
					 where, name);
	}
	*a_p = (uint64_t)v[0];
	*b_p = (uint64_t)v[1];
	*there_p = true;
	return 0;
}

static int parse_ranges(const cJSON *obj, const char *where,
			const struct layout_view *view, struct room_map *map)
{
	uint64_t held = (uint64_t)map->page_count * view->page_tokens;
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
	if (!there && !token_shard_is_all(&view->shard))
		return err_raise(ERR_INVAL,
				 "%s.tokens: missing; required for a view that holds a "
				 "shard of the tokens",
				 where);
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

int room_map_name(struct room_map *map, const char *name, const struct layout *layout,
		  const struct layout_view **view_p)
{
	*view_p =
		strlen(name) < sizeof(map->view) ? layout_view_find(layout, name) : NULL;
	if (!*view_p)
		return err_raise(ERR_NOTFOUND, "views.%.31s: the pool has no such view",
				 name);
	memcpy(map->view, name, strlen(name) + 1);
	return 0;
}

static int room_map_parse_view(const cJSON *obj, const struct layout *layout,
			       struct room_map *map)
{
	static const char *const names[] = {"pages", "first_token", "tokens", "layers",
					    NULL};
	const struct layout_view *view;
	char where[64];
	int r = room_map_name(map, obj->string, layout, &view);

	if (r < 0)
		return err_pass(r);
	snprintf(where, sizeof(where), "views.%.31s", obj->string);
	if (!cJSON_IsObject(obj))
		return err_raise(ERR_INVAL, "%s: must be an object", where);
	r = json_only(obj, names);
	if (r < 0)
		return err_prefix(r, "%s", where);
	map->repeat = json_packed_repeat(obj, "pages");
	r = json_get_pages(obj, "pages", view->pages, ROOM_PAGES_MAX, &map->pages,
			   &map->page_count);
	if (r < 0)
		return err_prefix(r, "%s", where);
	r = parse_ranges(obj, where, view, map);
	if (r < 0)
		return r;
	return err_pass(
		room_map_check_ranges(map, view, where)); /* pages: they are read */
}

static int parse_aux(int64_t aux, const struct layout *layout, struct room_map *map)
{
	const struct layout_view *view = layout_view_find(layout, ROOM_AUX_VIEW);

	if (!view)
		return err_raise(ERR_INVAL,
				 "aux: the pool has no view '" ROOM_AUX_VIEW "'");
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
	return err_pass(room_map_check_ranges(map, view, "aux"));
}

int room_maps_begin(struct room_maps *maps, size_t views)
{
	*maps = (struct room_maps){0};
	if (views > LAYOUT_VIEWS_MAX)
		return err_raise(ERR_LIMIT, "views: %zu, at most %u", views,
				 LAYOUT_VIEWS_MAX);
	maps->maps = mem_calloc(views + 1, sizeof(*maps->maps)); /* and aux */
	return maps->maps ? 0 : err_pass(-ENOMEM);
}

int room_maps_aux(struct room_maps *maps, int64_t aux, const struct layout *layout)
{
	if (aux < 0)
		return 0;
	if (room_maps_find(maps, ROOM_AUX_VIEW))
		return err_raise(ERR_INVAL, "views.aux: conflicts with \"aux\"; give "
					    "one of them");
	return err_pass(parse_aux(aux, layout, &maps->maps[maps->count++]));
}

int room_maps_charge(struct room_maps *maps, struct account *account)
{
	uint64_t bytes = maps->count * sizeof(*maps->maps);

	if (!maps->count)
		return 0;
	for (size_t i = 0; i < maps->count; i++)
		bytes += (maps->maps[i].page_count + maps->maps[i].select_count) *
			 sizeof(*maps->maps[i].pages);
	return err_pass(charge_take(&maps->charge, account, ACCOUNT_PAGES, bytes));
}

int room_maps_parse(const cJSON *views, int64_t aux, const struct layout *layout,
		    struct account *account, struct room_maps *maps)
{
	const cJSON *it = NULL;
	int r = room_maps_begin(maps, views ? (size_t)cJSON_GetArraySize(views) : 0);

	cJSON_ArrayForEach(it, views) {
		if (r >= 0)
			r = room_map_parse_view(it, layout, &maps->maps[maps->count++]);
	}
	if (r >= 0)
		r = room_maps_aux(maps, aux, layout);
	if (r >= 0)
		r = room_maps_charge(maps, account);
	if (r < 0)
		room_maps_fini(maps);
	return r < 0 ? err_pass(r) : 0;
}

void room_maps_fini(struct room_maps *maps)
{
	for (size_t i = 0; i < maps->count; i++) {
		const struct room_map *map = &maps->maps[i];

		mem_free_large(map->pages, map->page_count * sizeof(*map->pages));
		mem_free(map->select);
	}
	charge_drop(&maps->charge);
	mem_free(maps->maps);
	*maps = (struct room_maps){0};
}

const struct room_map *room_maps_find(const struct room_maps *maps, const char *view)
{
	for (size_t i = 0; i < maps->count; i++) {
		if (strcmp(maps->maps[i].view, view) == 0)
			return &maps->maps[i];
	}
	return NULL;
}

/* The position of a token in a map's pages, existing or not. */
static uint64_t map_slot(const struct room_map *map, const struct layout_view *view,
			 uint64_t token)
{
	return token_shard_slot(&view->shard, token - map->first_token);
}

int room_map_same_begin(const struct room_map *in, const struct room_maps *outer,
			const struct layout_view *view, struct pages_same *same_p)
{
	const struct room_map *out = room_maps_find(outer, in->view);
	uint64_t a, b, end;

	*same_p = (struct pages_same){0};
	if (!out)
		return err_raise(ERR_RANGE, "views.%s: not offered", in->view);
	if (in->token_begin < out->token_begin || in->token_end > out->token_end)
		return err_raise(ERR_RANGE,
				 "views.%s.tokens: outside the offered [%llu, %llu)",
				 in->view, (unsigned long long)out->token_begin,
				 (unsigned long long)out->token_end);
	a = map_slot(in, view, in->token_begin);
	b = map_slot(out, view, in->token_begin);
	end = map_slot(in, view, in->token_end);
	if (a == end)
		return 0;
	if (a % view->page_tokens != b % view->page_tokens)
		return err_raise(
			ERR_RANGE,
			"views.%s.first_token: its tokens are at other places of "
			"their pages than the offered ones",
			in->view);
	same_p->page = out->pages + b / view->page_tokens;
	same_p->at = a / view->page_tokens;
	same_p->end = (end - 1) / view->page_tokens + 1;
	return 0;
}

int room_map_same_check(const struct room_map *in, size_t known, struct pages_same *same)
{
	size_t end = known < same->end ? known : same->end;

	for (; same->at < end; same->at++, same->page++)
		if (in->pages[same->at] != *same->page)
			return err_raise(ERR_RANGE,
					 "views.%s.pages[%zu]: page %u is not the one "
					 "offered for its tokens",
					 in->view, same->at, in->pages[same->at]);
	return 0;
}

int room_maps_within(const struct room_maps *inner, const struct room_maps *outer,
		     const struct layout *layout)
{
	for (size_t i = 0; i < inner->count; i++) {
		const struct room_map *in = &inner->maps[i];
		struct pages_same same;
		int r = room_map_same_begin(in, outer, layout_view_find(layout, in->view),
					    &same);

		if (r >= 0)
			r = room_map_same_check(in, in->page_count, &same);
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

int room_maps_check_once(const struct room_maps *maps)
{
	for (size_t m = 0; m < maps->count; m++) {
		const struct room_map *map = &maps->maps[m];
		size_t at = map->repeat;
		int r = at ? 0 : json_pages_repeat(map->pages, map->page_count, &at);

		if (r < 0)
			return err_pass(r);
		if (at < map->page_count)
			return err_raise(ERR_DUP,
					 "views.%s.pages[%zu]: page %u is bound twice; "
					 "name each page once",
					 map->view, at, map->pages[at]);
	}
	return 0;
}

uint64_t room_maps_surplus(const struct room_maps *src, const struct room_maps *dst)
{
	uint64_t most = 0;

	for (size_t i = 0; i < src->count; i++) {
		const struct room_map *s = &src->maps[i];
		const struct room_map *d = room_maps_find(dst, s->view);
		uint64_t tokens = s->token_end - s->token_begin;
		uint64_t begin = d && d->token_begin > s->token_begin ? d->token_begin
								      : s->token_begin;
		uint64_t end =
			d && d->token_end < s->token_end ? d->token_end : s->token_end;

		if (d && begin < end)
			tokens -= end - begin;
		most = tokens > most ? tokens : most;
	}
	return most;
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
			.token_end =
				s->token_end < d->token_end ? s->token_end : d->token_end,
			.layers = {s->layers.begin > d->layers.begin ? s->layers.begin
								     : d->layers.begin,
				   s->layers.end < d->layers.end ? s->layers.end
								 : d->layers.end},
		};
		if (d->select) {
			m.select = d->select;
			m.select_count = d->select_count;
			if (m.token_begin != d->token_begin ||
			    m.token_end != d->token_end)
				continue; /* its numbers are of its own range */
		}
		if (m.token_begin < m.token_end && m.layers.begin < m.layers.end)
			maps[n++] = m;
	}
	*maps_p = maps;
	*count_p = n;
	return 0;
}
