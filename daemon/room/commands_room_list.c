/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.poll and room.list: over all rooms of an engine, up to 65 536. Both replies are
 * written in steps, and rooms change in between: each record shows the moment when it was
 * written. A poll by version walks from the latest change backwards. A room that changes
 * meanwhile moves to the front and may be missing from this reply, but its version is
 * higher than the reply's, so the next poll returns it.
 */
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/room/commands_room.h"
#include "daemon/base/context.h"
#include "daemon/request/reply_walk.h"
#include "daemon/room/room_record.h"
#include "daemon/room/room_waits.h"
#include "daemon/room/rooms_set.h"
#include "daemon/session/session.h"

struct room_walk {
	struct reply_walk reply;
	struct rooms *rooms;
	uint64_t version;	   /* of the rooms at the start */
	const cJSON *item;	   /* by list: next index */
	struct room_cursor cursor; /* by version */
	uint64_t since;
	int64_t left; /* room.list: remaining limit */
};

static struct room_walk *room_walk_of(struct reply_walk *reply)
{
	return container_of(reply, struct room_walk, reply);
}

static void walk_end(struct reply_walk *reply)
{
	struct room_walk *walk = room_walk_of(reply);

	if (walk->cursor.at)
		room_cursor_end(&walk->cursor);
	mem_free(walk);
}

static struct room_walk *walk_new(struct request *req,
				  int (*piece)(struct reply_walk *reply))
{
	struct room_walk *walk = mem_zalloc(sizeof(*walk));

	if (!walk)
		return NULL;
	walk->reply.piece = piece;
	walk->reply.end = walk_end;
	walk->reply.list = "rooms";
	walk->rooms = rooms_of(req->kvd);
	walk->version = walk->rooms->version;
	return walk;
}

/* ---- room.poll ---- */

static int poll_end(struct room_walk *walk)
{
	out_close(&walk->reply.text, ']');
	out_id(&walk->reply.text, "version", walk->version);
	return 0;
}

static void put_polled(struct room_walk *walk, const struct room *room)
{
	out_object(&walk->reply.text, NULL);
	room_record_brief(room, &walk->reply.text);
	out_close(&walk->reply.text, '}');
}

/* {room, role}, or only the number. */
static struct room *find_listed(const struct request *req, const cJSON *item)
{
	cJSON number = *item, alone = {.type = cJSON_Object, .child = &number};
	struct room_key_args args;
	char name[] = "room";

	number.next = number.prev = NULL;
	number.string = name;
	if (fields_read(room_key_fields, cJSON_IsObject(item) ? item : &alone, &args) < 0)
		return NULL;
	return room_asked(req->session, &args.key, rooms_of(req->kvd));
}

static int poll_listed(struct reply_walk *reply)
{
	struct room_walk *walk = room_walk_of(reply);
	const cJSON *item = walk->item;
	struct room *room;
	struct err why;

	if (!item)
		return poll_end(walk);
	walk->item = item->next;
	room = find_listed(reply->req, item);
	if (room) {
		put_polled(walk, room);
	} else { /* a missing room does not fail the others */
		err_take(&why);
		room_record_missing(item, &why, &reply->text);
	}
	return 1;
}

static int poll_changed(struct reply_walk *reply)
{
	struct room_walk *walk = room_walk_of(reply);
	const struct room *room;

	if (walk->cursor.at == &room_session(reply->req->session)->rooms)
		return poll_end(walk);
	room = list_entry(walk->cursor.at, struct room, session_link);
	if (room->version <= walk->since)
		return poll_end(walk);
	walk->cursor.at = room->session_link.prev;
	if (!room->leg)
		put_polled(walk, room);
	return 1;
}

struct poll_args {
	const cJSON *rooms;
	uint64_t since; /* UINT64_MAX: not given */
};
const struct field room_poll_fields[] = {
	F_ARRAY("rooms", poll_args, rooms, OPTIONAL, ROOM_LIST_MAX,
		"Numbers of rooms, or {room, role}"),
	F_U64("since", poll_args, since, DEFAULT(-1),
	      "`version` of an earlier reply: only rooms that changed since then"),
	F_END,
};

int room_poll_run(struct request *req)
{
	const struct poll_args *args = request_args(req);
	struct list *rooms = &room_session(req->session)->rooms;
	const cJSON *list = args->rooms;
	struct room_walk *walk;

	if (!list == (args->since == UINT64_MAX))
		return err_raise(ERR_INVAL, "rooms, since: give exactly one of them");
	walk = walk_new(req, list ? poll_listed : poll_changed);
	if (!walk)
		return err_pass(-ENOMEM);
	walk->since = args->since;
	walk->item = list ? list->child : NULL;
	if (!list)
		room_cursor_begin(walk->rooms, &walk->cursor, rooms->prev, true);
	reply_walk_begin(&walk->reply, req);
	return 0;
}

/* ---- room.list ---- */

/* It shows rooms, then peers' requests for rooms that are not open here. */
enum { LIST_ANY = -1, LIST_UNOPENED = ROOM_STATES };
static const char *const list_states[] = {
	"bootstrapping", "waiting_for_input", "transferring", "aborting",
	"failed",	 "success",	      "unopened",     NULL};
_Static_assert(ARRAY_LEN(list_states) == LIST_UNOPENED + 2, "a state has no name");

struct list_args {
	bool all, failed, live;
	uint32_t limit;
	uint32_t stuck_ms;
	int state;
	const char *peer;
	uint64_t room; /* UINT64_MAX: not given */
};
const struct field room_list_fields[] = {
	F_BOOL("all", list_args, all,
	       "Include the rooms of all sessions (administrators only)"),
	F_INT("limit", list_args, limit, DEFAULT(1000), 1, ROOM_LIST_MAX,
	      "Maximum number of records; default 1000"),
	F_U64("room", list_args, room, DEFAULT(-1), "Only rooms of this number"),
	F_CHOICE("state", list_args, state, DEFAULT(LIST_ANY), list_states,
		 "Only rooms in this state; unopened: requested by peers but not "
		 "opened by an engine here"),
	F_BOOL("failed", list_args, failed, "Only aborting and failed rooms"),
	F_BOOL("live", list_args, live, "Only rooms that have not ended"),
	F_INT("stuck_ms", list_args, stuck_ms, OPTIONAL, 0, INT32_MAX,
	      "Only rooms that have been waiting for at least this many milliseconds"),
	F_STR("peer", list_args, peer, OPTIONAL, LINK_ENDPOINT_MAX - 1,
	      "Only rooms with a peer of this name, endpoint or instance (or its first "
	      "digits)"),
	F_END,
};

static bool is_peer(const struct remote *remote, const char *asked)
{
	const struct peer *peer = remote->peer;
	size_t len = strlen(asked);

	return strcmp(peer->name, asked) == 0 ||
	       strncmp(peer->instance_text, asked, len) == 0 ||
	       endpoint_same(peer->endpoint, asked);
}

static bool has_peer(const struct room *room, const char *asked)
{
	const struct party *party;

	list_foreach(party, &room->parties, link) {
		if (is_peer(party->remote, asked))
			return true;
	}
	return false;
}

static bool is_stuck(const struct room *room, uint64_t stuck_ns)
{
	struct room_waits waits;

	return room_waits(room, &waits) &&
	       loop_now_ns(room->session->kvd->loop) - waits.since_ns >= stuck_ns;
}

static bool is_listed(const struct room *room, const struct request *req)
{
	const struct list_args *args = request_args(req);
	int state = (int)sm_state(&room->sm);

	return !room->leg && (args->all || room->session == req->session) &&
	       (args->room == UINT64_MAX || args->room == room->number) &&
	       (args->state == LIST_ANY || args->state == state) &&
	       (!args->failed || state == ROOM_FAILED || state == ROOM_ABORTING) &&
	       (!args->live || !room_terminal(room)) &&
	       (!args->peer || has_peer(room, args->peer)) &&
	       (!args->stuck_ms || is_stuck(room, args->stuck_ms * LOOP_NS_PER_MS));
}

static bool is_request_listed(const struct room_request *asked, const struct request *req)
{
	const struct list_args *args = request_args(req);
	uint64_t now = loop_now_ns(req->kvd->loop);

	return (args->all || idmap_get(&req->session->pools, asked->pool)) &&
	       (args->room == UINT64_MAX || args->room == asked->number) &&
	       (args->state == LIST_ANY || args->state == LIST_UNOPENED) &&
	       !args->failed && (!args->peer || is_peer(asked->remote, args->peer)) &&
	       now - asked->since_ns >= args->stuck_ms * LOOP_NS_PER_MS;
}

static int commands_room_list_end(struct room_walk *walk)
{
	out_close(&walk->reply.text, ']');
	out_number(&walk->reply.text, "total", rooms_count(walk->rooms));
	return 0;
}

static int request_piece(struct reply_walk *reply)
{
	struct room_walk *walk = room_walk_of(reply);
	struct room_request asked;

	if (walk->cursor.at == &walk->rooms->orphans || walk->left == 0)
		return commands_room_list_end(walk);
	asked = rooms_request_at(walk->rooms, walk->cursor.at);
	walk->cursor.at = walk->cursor.at->next;
	if (!is_request_listed(&asked, reply->req))
		return 1;
	walk->left--;
	room_record_request(&asked, loop_now_ns(reply->req->kvd->loop), &reply->text);
	return 1;
}

static int list_piece(struct reply_walk *reply)
{
	struct room_walk *walk = room_walk_of(reply);
	const struct room *room;

	if (walk->left == 0)
		return commands_room_list_end(walk);
	if (walk->cursor.at == &walk->rooms->all) {
		room_cursor_end(&walk->cursor);
		room_cursor_begin(walk->rooms, &walk->cursor, walk->rooms->orphans.next,
				  false);
		reply->piece = request_piece;
		return 1;
	}
	room = list_entry(walk->cursor.at, struct room, all_link);
	walk->cursor.at = room->all_link.next;
	if (!is_listed(room, reply->req))
		return 1;
	walk->left--;
	out_object(&reply->text, NULL);
	room_record_full(room, &reply->text);
	out_close(&reply->text, '}');
	return 1;
}

int room_list_run(struct request *req)
{
	const struct list_args *args = request_args(req);
	struct list *rooms = &rooms_of(req->kvd)->all;
	struct room_walk *walk;

	if (request_all(req, args->all) < 0)
		return err_pass(-EPERM);
	walk = walk_new(req, list_piece);
	if (!walk)
		return err_pass(-ENOMEM);
	walk->left = args->limit;
	room_cursor_begin(walk->rooms, &walk->cursor, rooms->next, false);
	reply_walk_begin(&walk->reply, req);
	return 0;
}
