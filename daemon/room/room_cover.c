/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A receiving room's view of its sources: when their pools can be used, which units each
 * must send, and the sum of their bytes.
 *
 * The bytes due are counted from the wants and the bound tokens, not from plans: plans
 * are made chunk by chunk, and "complete" must not depend on the sender's chunks. A
 * source with nothing due is idle.
 */
#include "daemon/room/room_cover.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/room/room_source.h"
#include "daemon/session/session.h"

/* ---- fields of recv and pull ---- */

void bind_init(struct room *room)
{
	list_init(&room->bind.sources);
}

void bind_fini(struct room *room)
{
	room_sources_free(room);
	cover_end(room->bind.covering);
	room_maps_fini(&room->pages.maps);
	wait_spec_fini(&room->pages.wait);
}

void bind_party_fini(struct party *party)
{
	struct party_due *due = &party->due;

	for (size_t i = 0; due->coverage && i < party->room->pages.maps.count; i++)
		coverage_fini(&due->coverage[i]);
	mem_free(due->coverage);
	cJSON_Delete(due->theirs_json);
	charge_less(&party->room->charge, due->json_bytes);
}

/* ---- sources ---- */

static int source_pool(struct party *party, struct remote_pool **pool_p)
{
	const struct pool_wanted wanted = {
		.name = party->pool_name[0] ? party->pool_name : NULL,
		.rank = party->rank,
		.session = party->session,
	};

	if (party->pool_asked) { /* outcome 1: it is not known yet */
		*pool_p = handshake_pool_by_id(party->remote, party->pool_asked);
		return !*pool_p || (*pool_p)->is_session || (*pool_p)->going;
	}
	return err_pass(
		handshake_pool(party->remote, &wanted, party->room->pool, pool_p));
}

static int source_ready(struct room *room, struct party *party)
{
	struct remote *remote = party->remote;
	struct remote_pool *pool = NULL;
	char text[ERR_TEXT_MAX];
	int r;

	if (sm_state(&remote->peer->sm) != PEER_UP && !remote->refused)
		return !party->pool_asked || !remote->peer->totals.away
			       ? 1
			       : err_raise(ERR_PEER, "%s",
					   handshake_why_not(remote, text));
	if (remote->why.code != ERR_OK)
		return err_reraise(&remote->why);
	r = room_admit_source(&room->admit, remote->peer);
	if (r < 0)
		return err_pass(r);
	if (party->pool_id &&
	    memcmp(party->instance, remote->peer->instance, sizeof(party->instance)) != 0)
		return err_raise(ERR_RESTART,
				 "sources: %.150s was restarted, and its engines with it",
				 remote->label);
	if (!party->pool) {
		r = source_pool(party, &pool);
		if (r != 0)
			return r < 0 ? err_pass(r) : 1;
		party_use_pool(party, pool);
		handshake_want_keys(pool);
	}
	if (party->pool->refused.code != ERR_OK)
		return err_reraise(&party->pool->refused);
	return remote->ready && party->pool->ready ? 0 : 1;
}

/* Different names may select one pool twice: then neither its offers nor its chunks
 * could be assigned to a source. */
static int sources_differ(struct room *room)
{
	struct idmap pools mem_cleanup(idmap_fini) = {0};
	struct party *party;
	char label[300];

	if (room->party_count < 2)
		return 0;
	list_foreach(party, &room->parties, link) {
		int r = party_asked(party)
				? 0
				: idmap_put(&pools, (uintptr_t)party->pool, party);

		if (r == -err_errno(ERR_EXIST))
			return err_raise(ERR_DUP,
					 "sources: %.200s is named twice; name "
					 "each pool once",
					 party_label(party, label, sizeof(label)));
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

bool room_booted(struct room *room)
{
	struct party *party;
	int all = 0;

	assert(room->role == ROOM_RECV || room->role == ROOM_PULL);
	if (sm_state(&room->sm) != ROOM_BOOT)
		return true;
	if (!list_empty(&room->bind.sources)) {
		unsigned int parties = room->party_count;
		bool found = room_sources_find(room);

		if (room_live(room) && room->party_count != parties)
			room_clock_set(room);
		if (!found)
			return false;
	}
	list_foreach(party, &room->parties, link) {
		int r = source_ready(room, party);

		if (r < 0) {
			room_fail_last(room);
			return false;
		}
		all |= r;
	}
	if (all == 0 && sources_differ(room) < 0) {
		room_fail_last(room);
		return false;
	}
	if (all == 0 && (room->role == ROOM_RECV || room_bound(room)))
		room_move(room, ROOM_WAITING); /* else it requests the offers first */
	return all == 0;
}

bool room_source_lost(struct party *party)
{
	assert(party->room->role == ROOM_RECV || party->room->role == ROOM_PULL);
	if (party_asked(party))
		return party_state(party) == PARTY_DONE ||
		       party->due.got == party->due.expected;
	if (party->line == PARTY_POOL_GOING)
		return false;	/* another engine's pool is no substitute */
	party->line = PARTY_UP; /* it has no message from this room: it may come back */
	if (party->pool)
		handshake_pool_unuse(party->pool);
	party->pool = NULL;
	/* A restart of the daemon invalidates the request: a pool by its id; an offer,
	 * when the process is known to have ended. */
	if (party->remote->down_dead || party->pool_asked ||
	    (party->room->role == ROOM_PULL && party->remote->down.code == ERR_RESTART))
		return false;
	/* else the engine was notified that all sources are ready */
	return sm_state(&party->room->sm) == ROOM_BOOT;
}

/* ---- the cover ---- */

static int begin_cover(struct room *room)
{
	cleanup_free struct cover_source *sources =
		mem_calloc(room->party_count, sizeof(*sources));
	cleanup_free const char **views =
		mem_calloc(room->pages.maps.count, sizeof(*views));
	const struct party *party;
	size_t n = 0;

	if (!sources || !views)
		return err_pass(-ENOMEM);
	list_foreach(party, &room->parties, link) {
		assert(party->index == n);
		sources[n++].layout = party->pool->layout;
	}
	for (size_t i = 0; i < room->pages.maps.count; i++)
		views[i] = room->pages.maps.maps[i].view;
	room->expected = 0;
	return cover_begin(sources, n, room->pool->layout, views, room->pages.maps.count,
			   room->number, &room->bind.covering);
}

/* The bound tokens of a view that the source holds, too. */
struct due {
	const struct layout_view *view;
	const struct room_map *map;
	uint64_t tokens;
};

static uint64_t selected_tokens(const struct room_map *map,
				const struct token_shard *theirs)
{
	const struct token_shard all = {0};
	uint64_t tokens = 0;

	if (token_shard_is_all(theirs))
		return map->select_count;
	for (size_t i = 0; i < map->select_count; i++) { /* at most 65536: a selection */
		uint64_t t = map->token_begin + map->select[i];

		tokens += token_shard_common(&all, theirs, t, t + 1);
	}
	return tokens;
}

static void due_tokens(const struct room *room, const struct party *party, uint32_t view,
		       struct due *due)
{
	const struct layout_view *ours = &room->pool->layout->views[view], *theirs;

	if (due->view == ours)
		return;
	*due = (struct due){.view = ours,
			    .map = room_maps_find(&room->pages.maps, ours->name)};
	theirs = layout_view_find(party->pool->layout, ours->name);
	if (due->map && theirs && due->map->select)
		due->tokens = selected_tokens(due->map, &theirs->shard);
	else if (due->map && theirs)
		due->tokens =
			token_shard_common(&ours->shard, &theirs->shard,
					   due->map->token_begin, due->map->token_end);
}

/* Bytes of one want over these tokens. */
static int want_bytes(const struct room *room, const struct plan_want *want,
		      const struct due *due, uint64_t *bytes_p)
{
	const struct room_map *map = due->map;
	const struct layout_layer *layer = layout_layer_find(due->view, want->layer);
	uint64_t bytes;

	*bytes_p = 0;
	if (!map || !layer || want->layer < map->layers.begin ||
	    want->layer >= map->layers.end)
		return 0;
	if (__builtin_mul_overflow(layer->fields[want->field].unit_bytes,
				   (uint64_t)want->units, &bytes) ||
	    __builtin_mul_overflow(bytes, due->tokens, &bytes))
		return err_raise(ERR_RANGE, "room %llu: more than 2^64 bytes",
				 (unsigned long long)room->number);
	*bytes_p = bytes;
	return 0;
}

static int room_cover_expect(struct room *room, struct party *party)
{
	struct due due = {0};

	party->due.expected = 0;
	for (size_t i = 0; i < party->want_count; i++) {
		uint64_t bytes;
		int r;

		due_tokens(room, party, party->wants[i].view, &due);
		r = want_bytes(room, &party->wants[i], &due, &bytes);
		if (r < 0)
			return err_pass(r);
		party->due.expected += bytes;
	}
	if (party->due.expected == 0)
		party->want_count = 0; /* idle: nothing is bound that it holds */
	room->expected += party->due.expected;
	return 0;
}

/* The distinct layers of one view among the wants, ascending. */
static uint32_t wanted_layers(const struct party *party, uint32_t view, uint32_t *layers)
{
	uint32_t n = 0;

	for (size_t i = 0; i < party->want_count; i++) {
		uint32_t layer = party->wants[i].layer, k = n;

		if (party->wants[i].view != view)
			continue;
		while (k > 0 && layers[k - 1] > layer)
			k--;
		if (k > 0 && layers[k - 1] == layer)
			continue;
		memmove(&layers[k + 1], &layers[k], (n - k) * sizeof(*layers));
		layers[k] = layer;
		n++;
	}
	return n;
}

static int make_coverage(struct room *room, struct party *party)
{
	const struct layout *layout = room->pool->layout;
	cleanup_free uint32_t *layers =
		mem_calloc(party->want_count + 1, sizeof(*layers));

	party->due.coverage =
		mem_calloc(room->pages.maps.count, sizeof(*party->due.coverage));
	if (!layers || !party->due.coverage)
		return err_pass(-ENOMEM);
	for (size_t i = 0; i < room->pages.maps.count; i++) {
		const struct layout_view *view =
			layout_view_find(layout, room->pages.maps.maps[i].view);
		uint32_t n =
			wanted_layers(party, (uint32_t)(view - layout->views), layers);
		const struct layout_view *theirs =
			layout_view_find(party->pool->layout, view->name);
		int r = coverage_init(&party->due.coverage[i], layers, n);

		if (theirs)
			party->due.coverage[i].shard = theirs->shard;
		/* its source determines the number of pieces */
		if (r >= 0)
			r = coverage_charge(&party->due.coverage[i],
					    party->remote->account, ACCOUNT_PAGES);
		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static bool has_no_wants(const struct party *party)
{
	return !party->wants;
}

static int take_wants(struct party *party)
{
	__auto_type per = &cover_of(party->room->bind.covering)->per_source[party->index];
	int r;

	party->wants = mem_dup(per->wants, per->count * sizeof(*party->wants));
	if (!party->wants)
		return err_pass(-ENOMEM);
	party->want_count = per->count;
	r = room_cover_expect(party->room, party);
	return r < 0 ? err_pass(r) : make_coverage(party->room, party);
}

int room_cover(struct room *room)
{
	int r = room->bind.covering ? 0 : begin_cover(room);

	assert(room->pages.phase == PAGES_BOUND);
	while (r >= 0 && (r = cover_step(room->bind.covering)) > 0) {
		if (!loop_enough(room->session->kvd->loop))
			continue;
		room_kick(room);
		return 1;
	}
	if (r == 0)
		r = room_parties_act(room, has_no_wants, take_wants);
	if (r == 0)
		cover_end(mem_steal(room->bind.covering));
	return err_pass(r);
}

/* ---- complete pages ---- */

void room_cover_landed(struct party *party)
{
	const struct room_maps *maps = &party->room->pages.maps;

	for (size_t i = 0; i < maps->count && party->due.coverage; i++) {
		const struct room_map *map = &maps->maps[i];

		if (coverage_add(&party->due.coverage[i], map->layers, map->token_begin,
				 map->token_end) < 0)
			err_clear(); /* no memory: its pages are reported as missing */
	}
}

/* Chunks in flight are reserved, but not written: call only when terminal. */
int room_landed_pages(const struct room *room, size_t map, uint8_t **bits_p)
{
	const struct room_map *m = &room->pages.maps.maps[map];
	const struct layout_view *view = layout_view_find(room->pool->layout, m->view);
	uint8_t *bits = mem_zalloc((m->page_count + 7) / 8);

	assert(map < room->pages.maps.count);
	if (!bits)
		return err_pass(-ENOMEM);
	for (size_t p = 0; p < m->page_count; p++) {
		uint64_t slot = p * view->page_tokens, begin = 0, end = 0;
		const struct party *party;
		bool whole = room_planned(room);

		/* checked when they were bound */
		token_shard_at(&view->shard, slot, &begin);
		token_shard_at(&view->shard, slot + view->page_tokens - 1, &end);
		begin += m->first_token;
		end += m->first_token + 1;
		begin = begin < m->token_begin ? m->token_begin : begin;
		end = end > m->token_end ? m->token_end : end;
		list_foreach(party, &room->parties, link)
			whole = whole && party->due.coverage && begin < end &&
				coverage_whole(&party->due.coverage[map], begin, end);
		if (whole)
			bits[p / 8] |= (uint8_t)(1u << (p % 8));
	}
	*bits_p = bits;
	return 0;
}
