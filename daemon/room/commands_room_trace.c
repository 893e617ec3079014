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
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/request/commands.h"
#include "daemon/room/commands_room.h"
#include "daemon/request/reply_walk.h"
#include "daemon/room/room_cursor.h"
#include "daemon/room/room_record.h"
#include "daemon/room/rooms.h"
#include "daemon/room/rooms_history.h"
#include "daemon/session/session.h"
#include "proto/json.h"

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
	bool any_event;
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

static bool add_layout(cJSON *obj, uint64_t digest)
{
	uint8_t bytes[8];

	for (unsigned int i = 0; i < 8; i++)
		bytes[i] = (uint8_t)(digest >> (56 - 8 * i));
	return result_add_hex(obj, "layout", bytes, sizeof(bytes));
}

static bool add_common(cJSON *head, const struct trace_walk *walk, uint64_t layout,
		       bool open)
{
	return json_add_u64(head, "opened_ns", walk->opened_ns) >= 0 &&
	       add_layout(head, layout) && cJSON_AddBoolToObject(head, "open", open);
}

/* ---- its views, as text: a tree of so many numbers would take more than a turn ---- */

static void trace_put_number(struct text *out, const char *name, uint64_t value)
{
	text_puts(out, name);
	text_u64(out, value);
}

/* Remaining limits of a room. */
struct views_left {
	size_t views;
	size_t runs, pages;
	bool with_pages;
	bool any, cut; /* views have been written, have been omitted */
};

/* As [[first page, count]…]. */
static void put_runs(struct text *out, const struct room_map *map,
		     struct views_left *left)
{
	size_t at = 0, end;

	text_puts(out, ",\"runs\":[");
	for (; at < map->page_count && left->runs && left->pages; at = end) {
		for (end = at + 1; end < map->page_count && --left->pages > 0 &&
				   map->pages[end] == map->pages[end - 1] + 1;)
			end++;
		left->runs--;
		trace_put_number(out, at ? ",[" : "[", map->pages[at]);
		trace_put_number(out, ",", end - at);
		text_puts(out, "]");
	}
	text_puts(out, at == map->page_count ? "]" : "],\"runs_cut\":true");
}

static void put_view(struct text *out, const struct room_map *map,
		     struct views_left *left, int party)
{
	text_puts(out, left->any ? ",{\"view\":" : "{\"view\":");
	left->any = true;
	text_json(out, map->view);
	if (party >= 0)
		trace_put_number(out, ",\"party\":", (uint64_t)party);
	trace_put_number(out, ",\"first_token\":", map->first_token);
	trace_put_number(out, ",\"pages\":", map->page_count);
	trace_put_number(out, ",\"tokens\":[", map->token_begin);
	trace_put_number(out, ",", map->token_end);
	if (map->layers.end < UINT32_MAX) {
		trace_put_number(out, "],\"layers\":[", map->layers.begin);
		trace_put_number(out, ",", map->layers.end);
		text_puts(out, "]");
	} else { /* all */
		text_puts(out, "],\"layers\":null");
	}
	if (left->with_pages)
		put_runs(out, map, left);
	text_puts(out, "}");
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

	text_puts(out, ",\"views\":[");
	if (room->role != ROOM_SEND)
		put_maps(out, &room->pages.maps, &left, -1);
	list_foreach(party, &room->parties, link) {
		if (room->role != ROOM_SEND || left.cut)
			break;
		left.cut = shown++ == PARTIES_SHOWN;
		if (!left.cut)
			put_maps(out, &party->theirs, &left, party->index);
	}
	text_puts(out, left.cut ? "],\"views_cut\":true" : "]");
}

/* ---- rooms ---- */

/* The record of room.show, with details for operators. */
static cJSON *head_of_open(struct trace_walk *walk, const struct room *room)
{
	uint64_t now = loop_clock_ns(rooms_kvd(walk->rooms)->loop);
	cJSON *head = cJSON_CreateObject();

	walk->opened_ns = room->opened_ns;
	if (room_record_full(room, head) >= 0 &&
	    add_common(head, walk, room->pool->digest, true) &&
	    (room_terminal(room) ||
	     cJSON_AddNumberToObject(head, "now_ns", (double)(now - room->opened_ns))))
		return head;
	cJSON_Delete(head);
	return NULL;
}

static cJSON *head_of_ended(struct trace_walk *walk, const struct ended_room *e)
{
	uint64_t now = loop_now_ns(rooms_kvd(walk->rooms)->loop);
	cJSON *head = cJSON_CreateObject();

	walk->opened_ns = e->opened_ns;
	if (head && room_history_fill(head, e, now) &&
	    json_add_u64(head, "generation", e->gen) >= 0 &&
	    add_common(head, walk, e->layout, false))
		return head;
	cJSON_Delete(head);
	return NULL;
}

/* ---- events ---- */

/* `room`: it is open. */
static int room_begin(struct trace_walk *walk, cJSON *head, const struct room *room,
		      uint64_t gen, const struct room_trace *trace)
{
	const struct trace_args *args = request_args(walk->reply.req);
	struct text *out = &walk->reply.text;
	char *text = head ? cJSON_PrintUnformatted(head) : NULL;

	cJSON_Delete(head);
	if (!text)
		return err_raise(ERR_NOMEM, "out of memory for a room's trace");
	text[strlen(text) - 1] = '\0'; /* its end follows the events */
	text_puts(out, walk->shown ? "," : ",\"rooms\":[");
	walk->gens[walk->shown++] = gen;
	text_puts(out, text);
	cJSON_free(text);
	if (room)
		put_views(out, room, args->pages);
	text_puts(out, ",\"events\":[");
	walk->under_way = true;
	walk->any_event = false;
	walk->next = trace->last;
	walk->events = trace->events;
	return 1;
}

static void put_event(struct trace_walk *walk, const struct trace_event *event)
{
	struct text *out = &walk->reply.text;
	enum trace_what what = event->what;
	uint64_t at = event->at_ns > walk->opened_ns ? event->at_ns : walk->opened_ns;

	trace_put_number(
		out, walk->any_event ? ",{\"ns\":" : "{\"ns\":", at - walk->opened_ns);
	text_puts(out, ",\"what\":\"");
	text_puts(out, what == TRACE_STATE ? room_state_names[event->value]
					   : trace_names[what]);
	text_puts(out, "\"");
	if (event->has_party)
		trace_put_number(out, ",\"party\":", event->party);
	if (trace_is_chunk(what)) {
		trace_put_number(out, ",\"seq\":", event->seq);
		trace_put_number(out, ",\"bytes\":", event->value);
	} else if (what != TRACE_STATE && event->value) {
		trace_put_number(out, ",\"generation\":\"", event->value);
		text_puts(out, "\"");
	}
	text_puts(out, "}");
	walk->any_event = true;
}

/* The latest first. */
static int events_piece(struct trace_walk *walk)
{
	const struct trace_ring *ring = rooms_trace(walk->rooms);
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
	trace_put_number(
		out, "],\"left_out\":",
		walk->events > TRACE_ROOM_EVENTS ? walk->events - TRACE_ROOM_EVENTS : 0);
	text_puts(out, forgotten ? ",\"forgotten\":true}" : ",\"forgotten\":false}");
	walk->under_way = false;
	return 1;
}

/* ---- which rooms ---- */

static void put_hex(struct text *out, const char *name, const uint8_t id[16])
{
	char hex[33];

	hex_write(id, 16, hex);
	text_puts(out, name);
	text_json(out, hex);
}

static int trace_over(struct trace_walk *walk)
{
	const struct kvd *kvd = rooms_kvd(walk->rooms);
	struct text *out = &walk->reply.text;

	text_puts(out, walk->shown ? "]" : ",\"rooms\":[]");
	text_puts(out, ",\"name\":");
	text_json(out, kvd->config->name);
	put_hex(out, ",\"instance\":", peers_instance(kvd->peers));
	put_hex(out, ",\"boot_id\":", kvd->boot_id);
	trace_put_number(out, ",\"clock_ns\":\"", loop_clock_ns(kvd->loop));
	text_puts(out, "\"");
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
	const struct history *history = rooms_history(walk->rooms);

	for (unsigned int i = 0; i < ENDED_A_PIECE; i++) {
		const struct ended_room *e =
			walk->ended ? history_at(history, walk->ended - 1) : NULL;

		if (!e || walk->shown == ROOMS_SHOWN)
			return trace_over(walk);
		walk->ended--;
		/* a room that is not closed was among the open ones */
		if (is_asked(walk, e->number, e->role, e->session) &&
		    !rooms_by_gen(walk->rooms, e->gen) && !is_reported(walk, e->gen))
			return room_begin(walk, head_of_ended(walk, e), NULL, e->gen,
					  &e->trace);
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
	if (walk->cursor.at == rooms_all(walk->rooms) || walk->shown == ROOMS_SHOWN) {
		room_cursor_end(&walk->cursor);
		walk->cursor.at = NULL;
		walk->ended = rooms_history(walk->rooms)->count;
		return 1;
	}
	room = list_entry(walk->cursor.at, struct room, all_link);
	walk->cursor.at = room->all_link.next;
	if (!is_asked(walk, room->number, room->role, room->session->id))
		return 1;
	return room_begin(walk, head_of_open(walk, room), room, room->gen, &room->trace);
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
	room_cursor_begin(walk->rooms, &walk->cursor, rooms_all(walk->rooms)->next,
			  false);
	reply_walk_begin(&walk->reply, req);
	return 0;
}
