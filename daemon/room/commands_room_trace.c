/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.trace: the events of the rooms of a number, open or ended. A session sees its own
 * rooms, an administrator all of them; peers have no access. Each daemon knows only its
 * side: kvd-ctl queries both and joins them by generation.
 *
 * The reply is written in steps. A room may be removed between two steps; its events
 * remain in the ring of all rooms.
 */
#include <errno.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/room/commands_room.h"
#include "daemon/request/reply_walk.h"
#include "daemon/room/room_record.h"
#include "daemon/room/rooms_set.h"
#include "daemon/session/session.h"

#define ROOMS_SHOWN 16u /* of one number */
#define EVENTS_A_PIECE 64u
#define ENDED_A_PIECE 256u
#define RUNS_SHOWN 512u /* of a room's pages, formatted in one turn */
#define PAGES_SEEN 65536u
#define PARTIES_SHOWN 64u
#define VIEWS_SHOWN 64u /* of a room and all parties, formatted in one turn */

struct trace_args {
	bool all, pages;
	struct room_key key;
};
const struct field room_trace_fields[] = {
	F_U64("room", trace_args, key.number, REQUIRED, "Number of the room"),
	F_CHOICE("role", trace_args, key.role, DEFAULT(-1), room_role_names,
		 "Only rooms of this role: send, recv, offer or pull"),
	F_BOOL("all", trace_args, all,
	       "Include the rooms of all sessions (administrators only)"),
	F_BOOL("pages", trace_args, pages, "Include the page lists of open rooms"),
	F_END,
};

struct trace_walk {
	struct reply_walk reply;
	struct rooms *rooms;
	struct room_cursor cursor; /* of the open rooms; its `at` NULL: finished */
	uint64_t ended;		   /* of the history: the record before it is next */
	unsigned int shown;
	uint64_t gens[ROOMS_SHOWN]; /* of the rooms shown */
	/* the current room */
	bool under_way;
	uint64_t next; /* place of its next event, plus one */
	uint64_t opened_ns;
	uint32_t events;
};

static struct trace_walk *trace_walk_of(struct reply_walk *reply)
{
	return container_of(reply, struct trace_walk, reply);
}

static void trace_walk_end(struct reply_walk *reply)
{
	struct trace_walk *walk = trace_walk_of(reply);

	if (walk->cursor.at)
		room_cursor_end(&walk->cursor);
	mem_free(walk);
}

/* ---- a room's head ---- */

/* ---- a room's views ---- */

/* Remaining limits of a room. */
struct views_left {
	size_t views;
	size_t runs, pages;
	bool with_pages;
	bool cut; /* views have been omitted */
};

/* As [[first page, count]…]. */
static void put_runs(struct text *out, const struct room_map *map,
		     struct views_left *left)
{
	size_t at = 0, end;

	out_array(out, "runs");
	for (; at < map->page_count && left->runs && left->pages; at = end) {
		for (end = at + 1; end < map->page_count && --left->pages > 0 &&
				   map->pages[end] == map->pages[end - 1] + 1;)
			end++;
		left->runs--;
		out_pair(out, NULL, map->pages[at], end - at);
	}
	out_close(out, ']');
	if (at < map->page_count)
		out_bool(out, "runs_cut", true);
}

static void put_view(struct text *out, const struct room_map *map,
		     struct views_left *left, int party)
{
	out_object(out, NULL);
	out_text(out, "view", map->view);
	if (party >= 0)
		out_number(out, "party", party);
	if (map->select)
		out_number(out, "selected", map->select_count);
	else
		out_number(out, "first_token", map->first_token);
	out_number(out, "pages", map->page_count);
	out_pair(out, "tokens", map->token_begin, map->token_end);
	if (map->layers.end < UINT32_MAX)
		out_pair(out, "layers", map->layers.begin, map->layers.end);
	else /* all */
		out_null(out, "layers");
	if (left->with_pages)
		put_runs(out, map, left);
	out_close(out, '}');
}

static void put_maps(struct text *out, const struct room_maps *maps,
		     struct views_left *left, int party)
{
	for (size_t i = 0; i < maps->count; i++) {
		left->cut = left->views == 0;
		if (left->cut)
			return;
		left->views--;
		put_view(out, &maps->maps[i], left, party);
	}
}

/* The local bindings; for a sender, those of its receivers. */
static void put_views(struct text *out, const struct room *room, bool pages)
{
	struct views_left left = {.views = VIEWS_SHOWN,
				  .runs = RUNS_SHOWN,
				  .pages = PAGES_SEEN,
				  .with_pages = pages};
	const struct party *party;
	unsigned int shown = 0;

	out_array(out, "views");
	if (room->role != ROOM_SEND)
		put_maps(out, &room->pages.maps, &left, -1);
	list_foreach(party, &room->parties, link) {
		if (room->role != ROOM_SEND || left.cut)
			break;
		left.cut = shown++ == PARTIES_SHOWN;
		if (!left.cut)
			put_maps(out, &party->theirs, &left, party->index);
	}
	out_close(out, ']');
	if (left.cut)
		out_bool(out, "views_cut", true);
}

/* ---- rooms ---- */

/* Opens its object, which the last of its events ends. */
static struct text *room_begin(struct trace_walk *walk, uint64_t gen, uint64_t opened_ns,
			       const struct room_trace *trace)
{
	walk->gens[walk->shown++] = gen;
	walk->opened_ns = opened_ns;
	walk->under_way = true;
	walk->next = trace->last;
	walk->events = trace->events;
	out_object(&walk->reply.text, NULL);
	return &walk->reply.text;
}

static void put_common(struct text *out, uint64_t opened_ns, uint64_t digest, bool open)
{
	out_id(out, "opened_ns", opened_ns);
	out_digest(out, "layout", digest);
	out_bool(out, "open", open);
}

/* The record of room.show, with details for operators. */
static int open_begin(struct trace_walk *walk, const struct room *room)
{
	const struct trace_args *args = request_args(walk->reply.req);
	uint64_t now = loop_clock_ns(walk->rooms->kvd->loop);
	struct text *out = room_begin(walk, room->gen, room->opened_ns, &room->trace);

	room_record_full(room, out);
	put_common(out, room->opened_ns, room->pool->digest, true);
	if (!room_terminal(room))
		out_number(out, "now_ns", now - room->opened_ns);
	put_views(out, room, args->pages);
	out_array(out, "events");
	return 1;
}

static int ended_begin(struct trace_walk *walk, const struct ended_room *e)
{
	uint64_t now = loop_now_ns(walk->rooms->kvd->loop);
	struct text *out = room_begin(walk, e->gen, e->opened_ns, &e->trace);

	room_history_put(e, now, out);
	out_id(out, "generation", e->gen);
	put_common(out, e->opened_ns, e->layout, false);
	out_array(out, "events");
	return 1;
}

/* ---- events ---- */

static void put_event(struct trace_walk *walk, const struct trace_event *event)
{
	struct text *out = &walk->reply.text;
	enum trace_what what = event->what;
	uint64_t at = event->at_ns > walk->opened_ns ? event->at_ns : walk->opened_ns;

	out_object(out, NULL);
	out_number(out, "ns", at - walk->opened_ns);
	out_text(out, "what",
		 what == TRACE_STATE ? room_state_names[event->value]
				     : trace_names[what]);
	if (event->has_party)
		out_number(out, "party", event->party);
	if (trace_is_chunk(what)) {
		out_number(out, "seq", event->seq);
		out_number(out, "bytes", event->value);
	} else if (what != TRACE_STATE && event->value) {
		out_id(out, "generation", event->value);
	}
	out_close(out, '}');
}

/* The latest first. */
static int events_piece(struct trace_walk *walk)
{
	const struct trace_ring *ring = &walk->rooms->trace;
	struct text *out = &walk->reply.text;
	bool forgotten = false;

	for (unsigned int i = 0; i < EVENTS_A_PIECE && walk->next; i++) {
		const struct trace_event *event = trace_at(ring, walk->next - 1);

		forgotten = !event;
		if (event)
			put_event(walk, event);
		walk->next = event && event->back ? walk->next - event->back : 0;
	}
	if (walk->next)
		return 1;
	out_close(out, ']');
	out_number(out, "left_out",
		   walk->events > TRACE_ROOM_EVENTS ? walk->events - TRACE_ROOM_EVENTS
						    : 0);
	out_bool(out, "forgotten", forgotten);
	out_close(out, '}');
	walk->under_way = false;
	return 1;
}

/* ---- which rooms ---- */

static int trace_over(struct trace_walk *walk)
{
	const struct kvd *kvd = walk->rooms->kvd;
	struct text *out = &walk->reply.text;

	out_close(out, ']');
	out_text(out, "name", kvd->config->name);
	out_hex(out, "instance", peers_instance(kvd->peers), 16);
	out_hex(out, "boot_id", kvd->boot_id, 16);
	out_id(out, "clock_ns", loop_clock_ns(kvd->loop));
	return 0;
}

static bool is_asked(const struct trace_walk *walk, uint64_t number, enum room_role role,
		     uint64_t session)
{
	const struct trace_args *args = request_args(walk->reply.req);

	return number == args->key.number &&
	       (args->key.role < 0 || args->key.role == (int)role) &&
	       (args->all || session == walk->reply.req->session->id);
}

/* Open when it was written, it may have ended and been closed since. */
static bool is_reported(const struct trace_walk *walk, uint64_t gen)
{
	for (unsigned int i = 0; i < walk->shown; i++) {
		if (walk->gens[i] == gen)
			return true;
	}
	return false;
}

static int ended_piece(struct trace_walk *walk)
{
	const struct history *history = &walk->rooms->history;

	for (unsigned int i = 0; i < ENDED_A_PIECE; i++) {
		const struct ended_room *e =
			walk->ended ? history_at(history, walk->ended - 1) : NULL;

		if (!e || walk->shown == ROOMS_SHOWN)
			return trace_over(walk);
		walk->ended--;
		/* a room that is not closed was among the open ones */
		if (is_asked(walk, e->number, e->role, e->session) &&
		    !rooms_by_gen(walk->rooms, e->gen) && !is_reported(walk, e->gen))
			return ended_begin(walk, e);
	}
	return 1;
}

static int trace_piece(struct reply_walk *reply)
{
	struct trace_walk *walk = trace_walk_of(reply);
	const struct room *room;

	if (walk->under_way)
		return events_piece(walk);
	if (!walk->cursor.at)
		return ended_piece(walk);
	if (walk->cursor.at == &walk->rooms->all || walk->shown == ROOMS_SHOWN) {
		room_cursor_end(&walk->cursor);
		walk->cursor.at = NULL;
		walk->ended = walk->rooms->history.count;
		return 1;
	}
	room = list_entry(walk->cursor.at, struct room, all_link);
	walk->cursor.at = room->all_link.next;
	if (!is_asked(walk, room->number, room->role, room->session->id))
		return 1;
	return open_begin(walk, room);
}

int room_trace_run(struct request *req)
{
	const struct trace_args *args = request_args(req);
	struct trace_walk *walk;

	if (request_all(req, args->all) < 0)
		return err_pass(-EPERM);
	walk = mem_zalloc(sizeof(*walk));
	if (!walk)
		return err_pass(-ENOMEM);
	walk->rooms = rooms_of(req->kvd);
	walk->reply.piece = trace_piece;
	walk->reply.end = trace_walk_end;
	walk->reply.list = "rooms";
	room_cursor_begin(walk->rooms, &walk->cursor, walk->rooms->all.next, false);
	reply_walk_begin(&walk->reply, req);
	return 0;
}
