/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.plan: the planner's input for an open room, in the form that the command plan and
 * kvd-ctl plan read: the layouts of both sides, the pages, and the wants of one party.
 * Questions such as "why so many rows" can then be analysed outside the daemon. A puller
 * knows the pages of both sides. In a push the source's pages arrive with each chunk and
 * are not kept, so the maps have no src_pages.
 *
 * The reply may be long. It is written in steps, and each step finds the room and the
 * party again, because either may be removed in between.
 */
#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "daemon/request/out.h"
#include "daemon/plan/layout_text.h"
#include "daemon/room/commands_room.h"
#include "daemon/request/reply_walk.h"
#include "daemon/room/room.h"
#include "daemon/room/rooms.h"

#define PAGES_A_PIECE 256u
#define WANTS_A_PIECE 64u

struct plan_args {
	struct room_key key;
	int32_t party;
};
const struct field room_plan_fields[] = {
	F_U64("room", plan_args, key.number, REQUIRED, "Number of the room"),
	F_CHOICE("role", plan_args, key.role, DEFAULT(-1), room_role_names,
		 "send, recv or pull; for an offer, ask the puller's daemon"),
	F_INT("party", plan_args, party, DEFAULT(-1), 0, ROOM_PARTIES_MAX - 1,
	      "Index in `parties`; default: the first"),
	F_END,
};

enum stage { STAGE_HEAD, STAGE_SRC, STAGE_DST, STAGE_MAP, STAGE_WANTS, STAGES };

struct room_plan_walk {
	struct reply_walk reply;
	struct rooms *rooms;
	uint64_t gen;	/* of the room */
	uint16_t party; /* its index */
	uint64_t pool;	/* the party's */
	enum stage stage;
	struct layout_writer layout;
	size_t map, page, want; /* next */
	bool map_begun, of_src;
};

/* Valid in this turn only. */
struct planned {
	const struct room *room;
	const struct party *party;
	const struct layout *src, *dst;
	const struct room_maps *src_maps; /* NULL: not known here */
	const struct room_maps *dst_maps;
};

static struct room_plan_walk *plan_walk_of(struct reply_walk *reply)
{
	return container_of(reply, struct room_plan_walk, reply);
}

static void room_plan_walk_end(struct reply_walk *reply)
{
	mem_free(plan_walk_of(reply));
}

/* ---- lookup ---- */

static const struct party *party_at(const struct room *room, int32_t index)
{
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		if (index < 0 || party->index == index)
			return party;
	}
	if (index >= 0)
		err_raise(ERR_NOTFOUND, "party: room %llu has no party %d",
			  (unsigned long long)room->number, (int)index);
	else
		err_raise(ERR_STATE,
			  "room %llu: no peer has sent its pages and layout yet",
			  (unsigned long long)room->number);
	return NULL;
}

/* A room that has ended does not reference a peer's pool, so it is found by id. NULL:
 * removed, or never found. */
static const struct remote_pool *pool_of(const struct party *party)
{
	const struct remote_pool *pool = party->pool;

	if (!pool && party->pool_id)
		pool = handshake_pool_by_id(party->remote, party->pool_id);
	return pool && pool->layout && !strcmp(pool->name, party->pool_name) ? pool
									     : NULL;
}

/* Are both layouts known, and all pages that can be known? */
static int check_known(const struct room *room, const struct party *party)
{
	unsigned long long number = room->number;
	const char *peer = party->remote->label;

	if (room->role == ROOM_OFFER)
		return err_raise(ERR_STATE,
				 "room %llu: an offer; only the puller knows the pages "
				 "of both sides: ask the daemon of %.100s",
				 number, peer);
	if (room->role == ROOM_SEND && party_state(party) == PARTY_READING)
		return err_raise(ERR_STATE,
				 "room %llu: the pages of %.100s have not been received "
				 "yet",
				 number, peer);
	if (!pool_of(party))
		return err_raise(ERR_STATE,
				 "room %llu: the layout of %.100s is not known: its "
				 "pool is %s",
				 number, peer, party->pool_id ? "gone" : "not known yet");
	if (room->role != ROOM_SEND && !room_bound(room))
		return err_raise(ERR_STATE,
				 "room %llu: no pages are bound; use room.bind", number);
	if (room->role != ROOM_SEND && !room_planned(room))
		return err_raise(ERR_STATE,
				 "room %llu: not planned yet: the shards of some "
				 "sources are unknown",
				 number);
	return 0;
}

static int refuse_other_pool(const struct party *party)
{
	return err_raise(ERR_STATE,
			 "room %llu: the pool of %.100s was replaced; the layout of the "
			 "plan no longer exists",
			 (unsigned long long)party->room->number, party->remote->label);
}

static int planned_of(const struct room_plan_walk *walk, struct planned *p)
{
	const struct room *room = rooms_by_gen(walk->rooms, walk->gen);
	const struct party *party = room ? party_at(room, walk->party) : NULL;
	bool sends = room && room->role == ROOM_SEND;
	const struct remote_pool *pool;
	int r;

	if (!room)
		return err_raise(ERR_NOTFOUND, "room: closed during the command");
	if (!party)
		return err_pass(-ENOENT);
	r = check_known(room, party);
	if (r < 0)
		return err_pass(r);
	pool = pool_of(party);
	if (pool->id != walk->pool)
		return err_pass(refuse_other_pool(party));
	*p = (struct planned){
		.room = room,
		.party = party,
		.src = sends ? room->pool->layout : pool->layout,
		.dst = sends ? pool->layout : room->pool->layout,
		.src_maps = room->role == ROOM_PULL ? &party->theirs : NULL,
		.dst_maps = sends ? &party->theirs : &room->pages.maps,
	};
	return 0;
}

/* ---- its pieces: 1, there is more of the stage; 0, no more; negative, raised ---- */

static int plan_put_head(struct room_plan_walk *walk, const struct planned *p,
			 struct text *out)
{
	const struct party *party;

	out_text(out, "role", room_role_names[p->room->role]);
	out_number(out, "party", p->party->index);
	out_text(out, "peer", p->party->remote->label);
	out_text(out, "pool", p->party->pool_name);
	out_array(out, "parties");
	list_foreach(party, &p->room->parties, link)
		out_number(out, NULL, party->index);
	out_close(out, ']');
	text_puts(out, ",\"src\":");
	walk->layout = (struct layout_writer){0};
	return 0;
}

static int put_src(struct room_plan_walk *walk, const struct planned *p, struct text *out)
{
	if (layout_write_some(&walk->layout, p->src, out))
		return 1;
	text_puts(out, ",\"dst\":");
	walk->layout = (struct layout_writer){0};
	return 0;
}

static int put_dst(struct room_plan_walk *walk, const struct planned *p, struct text *out)
{
	if (layout_write_some(&walk->layout, p->dst, out))
		return 1;
	out_array(out, "map");
	return 0;
}

/* Some of the pages, as runs; false: no more. */
static bool put_pages(struct room_plan_walk *walk, const struct room_map *map,
		      struct text *out)
{
	size_t end = map->page_count - walk->page < PAGES_A_PIECE
			     ? map->page_count
			     : walk->page + PAGES_A_PIECE;

	while (walk->page < end) {
		size_t first = walk->page++;

		while (walk->page < end &&
		       map->pages[walk->page] == map->pages[walk->page - 1] + 1)
			walk->page++;
		out_pair(out, NULL, map->pages[first], walk->page - first);
	}
	if (walk->page < map->page_count)
		return true;
	out_close(out, ']');
	walk->page = 0;
	return false;
}

static void map_begin(struct room_plan_walk *walk, const struct room_map *dst,
		      const struct room_map *src, struct text *out)
{
	uint64_t begin = dst->token_begin, end = dst->token_end;
	struct plan_layers layers = dst->layers;

	if (src) { /* present on both sides */
		begin = begin > src->token_begin ? begin : src->token_begin;
		end = end < src->token_end ? end : src->token_end;
		layers.begin = layers.begin > src->layers.begin ? layers.begin
								: src->layers.begin;
		layers.end = layers.end < src->layers.end ? layers.end : src->layers.end;
	}
	out_object(out, NULL);
	out_text(out, "view", dst->view);
	out_pair(out, "tokens", begin, end > begin ? end : begin);
	out_pair(out, "layers", layers.begin,
		 layers.end > layers.begin ? layers.end : layers.begin);
	out_number(out, "dst_first_token", dst->first_token);
	if (src)
		out_number(out, "src_first_token", src->first_token);
	out_array(out, "dst_pages");
	walk->map_begun = true;
	walk->of_src = false;
	walk->page = 0;
}

static int put_map(struct room_plan_walk *walk, const struct planned *p, struct text *out)
{
	const struct room_map *dst, *src = NULL;

	if (walk->map >= p->dst_maps->count) {
		out_close(out, ']');
		out_array(out, "wants");
		return 0;
	}
	dst = &p->dst_maps->maps[walk->map];
	if (p->src_maps)
		src = room_maps_find(p->src_maps, dst->view);
	if (!layout_view_find(p->src, dst->view) || (p->src_maps && !src)) {
		walk->map++; /* of another source */
		return 1;
	}
	if (!walk->map_begun)
		map_begin(walk, dst, src, out);
	if (put_pages(walk, walk->of_src ? src : dst, out))
		return 1;
	if (src && !walk->of_src) {
		walk->of_src = true;
		out_array(out, "src_pages");
		return 1;
	}
	out_close(out, '}');
	walk->map_begun = false;
	walk->map++;
	return 1;
}

/* False: the layout is not the one that they were checked against. */
static bool put_want(const struct plan_want *want, const struct layout *dst,
		     struct text *out)
{
	const struct layout_view *view =
		want->view < dst->view_count ? &dst->views[want->view] : NULL;
	const struct layout_layer *layer =
		view ? layout_layer_find(view, want->layer) : NULL;

	if (!layer || want->field >= layer->field_count)
		return false;
	out_object(out, NULL);
	out_text(out, "view", view->name);
	out_number(out, "layer", want->layer);
	out_text(out, "field", layer->fields[want->field].name);
	out_number(out, "first_unit", want->first_unit);
	out_number(out, "units", want->units);
	out_close(out, '}');
	return true;
}

static int put_wants(struct room_plan_walk *walk, const struct planned *p,
		     struct text *out)
{
	size_t left = p->party->want_count - walk->want;

	for (size_t n = left < WANTS_A_PIECE ? left : WANTS_A_PIECE; n > 0; n--) {
		if (!put_want(&p->party->wants[walk->want], p->dst, out))
			return err_pass(refuse_other_pool(p->party));
		walk->want++;
	}
	if (walk->want < p->party->want_count)
		return 1;
	out_close(out, ']');
	return 0;
}

static int plan_piece(struct reply_walk *reply)
{
	static int (*const stages[STAGES])(struct room_plan_walk *,
					   const struct planned *, struct text *) = {
		[STAGE_HEAD] = plan_put_head, [STAGE_SRC] = put_src,
		[STAGE_DST] = put_dst,	      [STAGE_MAP] = put_map,
		[STAGE_WANTS] = put_wants,
	};
	struct room_plan_walk *walk = plan_walk_of(reply);
	struct planned p;
	int r = planned_of(walk, &p);

	if (r < 0)
		return err_pass(r);
	r = stages[walk->stage](walk, &p, &reply->text);
	if (r < 0)
		return err_pass(r);
	walk->stage += r == 0;
	return walk->stage < STAGES;
}

int room_plan_run(struct request *req)
{
	const struct plan_args *args = request_args(req);
	const struct room *room = room_asked_any(req, &args->key);
	const struct party *party = room ? party_at(room, args->party) : NULL;
	struct room_plan_walk *walk;
	int r;

	if (!party)
		return err_pass(-err_errno(err_last()->code));
	r = check_known(room, party);
	if (r < 0)
		return err_pass(r);
	walk = mem_zalloc(sizeof(*walk));
	if (!walk)
		return err_pass(-ENOMEM);
	walk->rooms = rooms_of(req->kvd);
	walk->gen = room->gen;
	walk->party = party->index;
	walk->pool = pool_of(party)->id;
	walk->reply.piece = plan_piece;
	walk->reply.end = room_plan_walk_end;
	reply_walk_begin(&walk->reply, req);
	return 0;
}
