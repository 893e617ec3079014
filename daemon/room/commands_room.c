/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room.open to room.show (room.poll and room.list: commands_room_list.c). The field
 * tables have checked types and limits. room_op.c checks the rest, because the submission
 * ring shares it. Abort and close of a room that has ended are reported as such.
 */
#include <errno.h>

#include "proto/out.h"
#include "daemon/request/commands.h"
#include "daemon/request/ring_ops.h"
#include "daemon/room/commands.h"
#include "daemon/room/commands_room.h"
#include "daemon/base/context.h"
#include "daemon/room/room_record.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "proto/kvd_ring.h"

/* ---- room.open ---- */

static int open_reply(struct request *req, const struct room *room)
{
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	out_id(out, "room", room->number);
	out_id(out, "gen", room->slot_gen);
	out_id(out, "generation", room->gen);
	out_number(out, "slot", room->slot);
	out_number(out, "state", room_poll_state(room));
	return reply_end(&reply);
}

static int run_open(struct request *req)
{
	struct room *room = NULL;
	int r = room_op_open(req->session, req->line, request_args(req), NULL, NULL,
			     &room);

	return r < 0 ? err_pass(r) : open_reply(req, room);
}

/* ---- room.bind, room.send ---- */

/* The room of this number and role, which "role" may select. */
static struct room *find_as(struct request *req, const struct room_key *key,
			    enum room_role role)
{
	struct rooms *rooms = rooms_of(req->kvd);
	struct room *room =
		key->role < 0 ? rooms_find(rooms, req->session, role, key->number) : NULL;

	return room ? room : room_asked(req->session, key, rooms);
}

static int commands_room_reply_state(struct request *req, const struct room *room)
{
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	out_number(out, "state", room_poll_state(room));
	return reply_end(&reply);
}

struct bind_args {
	struct room_key key;
	struct pages_args pages;
};

/* A recv room of this number; otherwise a pull. */
static struct room *find_binding(struct request *req, const struct room_key *key)
{
	struct rooms *rooms = rooms_of(req->kvd);
	struct room *pull =
		key->role < 0 ? rooms_find(rooms, req->session, ROOM_PULL, key->number)
			      : NULL;

	if (pull && !rooms_find(rooms, req->session, ROOM_RECV, key->number))
		return pull;
	return find_as(req, key, ROOM_RECV);
}

static int run_bind(struct request *req)
{
	const struct bind_args *args = request_args(req);
	struct room *room = find_binding(req, &args->key);
	struct room_pages pages;
	int r = room ? room_op_binds(room) : -ENOENT;

	if (r >= 0)
		r = room_pages_parse(req->session, &args->pages, room->pool->layout, true,
				     &pages);
	if (r >= 0)
		r = room_op_bind(room, &pages);
	return r < 0 ? err_pass(r) : commands_room_reply_state(req, room);
}

struct extend_args {
	struct room_key key;
	uint32_t lease_ms;
};

static int run_extend(struct request *req)
{
	const struct extend_args *args = request_args(req);
	struct room *room = find_as(req, &args->key, ROOM_OFFER);
	int r = room ? room_op_extend(room, args->lease_ms) : -ENOENT;

	return r < 0 ? err_pass(r) : commands_room_reply_state(req, room);
}

struct send_args {
	struct room_key key;
	uint64_t seq;
	bool last;
	struct pages_args pages;
};

static int run_send(struct request *req)
{
	const struct send_args *args = request_args(req);
	struct room *room = find_as(req, &args->key, ROOM_SEND);
	struct room_pages pages;
	int r = room ? room_op_want(room, ROOM_SEND) : -ENOENT;

	if (r >= 0)
		r = room_pages_parse(req->session, &args->pages, room->pool->layout,
				     false, &pages);
	if (r >= 0)
		r = room_op_send(room, args->seq, args->last, &pages);
	return r < 0 ? err_pass(r) : commands_room_reply_state(req, room);
}

/* ---- room.abort, room.close ---- */

struct abort_args {
	struct room_key key;
	const char *reason;
};

static int run_abort(struct request *req)
{
	const struct abort_args *args = request_args(req);
	struct room *room = room_asked_any(req, &args->key);

	if (!room)
		return err_pass(-ENOENT);
	room_op_abort(room,
		      room->session == req->session ? "its engine" : "an administrator",
		      req->session, args->reason);
	return commands_room_reply_state(req, room);
}

static int run_close(struct request *req)
{
	const struct room_key_args *args = request_args(req);
	struct room *room = room_asked(req->session, &args->key, rooms_of(req->kvd));
	int r = room ? rooms_close(room) : -ENOENT;

	return r < 0 ? err_pass(r) : request_reply(req);
}

/* ---- room.show, room.list ---- */

struct show_args {
	struct room_key key;
	int64_t slot; /* -1: not given */
};

/* The ring refused to open the room of this slot: the reason, while it is kept. */
static int show_refused(struct request *req, uint32_t slot)
{
	const struct err *why = ring_fault_of(ring_of(req->session), KVD_RING_IDS + slot);
	struct reply reply;
	struct text *out;

	if (!why)
		return err_raise(ERR_NOTFOUND,
				 "room: no room of this session has slot %u", slot);
	out = reply_begin(&reply, req);
	out_number(out, "state", KVD_FAILED);
	out_error(out, why);
	return reply_end(&reply);
}

static struct room *show_slot(struct request *req, uint32_t slot)
{
	struct status_page *page = req->session->status;

	return slot < status_page_slots(page)
		       ? rooms_by_slot(rooms_of(req->kvd), req->session, slot,
				       status_slot_gen(page, slot))
		       : NULL;
}

static int run_show(struct request *req)
{
	const struct show_args *args = request_args(req);
	struct reply reply;
	struct room *room;

	if (args->slot >= 0) {
		room = show_slot(req, (uint32_t)args->slot);
		if (!room)
			return err_pass(show_refused(req, (uint32_t)args->slot));
	} else {
		room = room_asked_any(req, &args->key);
	}
	if (!room)
		return err_pass(-ENOENT);
	room_record_full(room, reply_begin(&reply, req));
	return reply_end(&reply);
}

static const struct field bind_fields[] = {
	F_ROOM(bind_args),
	F_ROLE(bind_args),
	F_VIEWS(bind_args, "Destination pages: {name: {pages, first_token, tokens}}"),
	F_AUX(bind_args, "Slot of view \"aux\" that receives the aux bytes; default: "
			 "none"),
	F_WAIT(bind_args),
	F_END,
};
static const struct field extend_fields[] = {
	F_ROOM(extend_args),
	F_ROLE(extend_args),
	F_INT("lease_ms", extend_args, lease_ms, REQUIRED, 1, ROOM_MS_MAX,
	      "New lease in milliseconds, also used for each extension by a puller"),
	F_END,
};
static const struct field send_fields[] = {
	F_ROOM(send_args),
	F_ROLE(send_args),
	F_ID("seq", send_args, seq, REQUIRED,
	     "Number of the chunk; a chunk sent again under the same number is "
	     "accepted once"),
	F_VIEWS(send_args, "Pages that are ready: {name: {pages, first_token, tokens, "
			   "layers}}"),
	F_BOOL("last", send_args, last, "This is the last chunk"),
	F_AUX(send_args, "Slot of view \"aux\" to send; default: none"),
	F_WAIT(send_args),
	F_END,
};
static const struct field abort_fields[] = {
	F_ROOM(abort_args),
	F_ROLE(abort_args),
	F_STR("reason", abort_args, reason, OPTIONAL, 200,
	      "Reason, reported to the remote side"),
	F_END,
};
static const struct field show_fields[] = {
	F_ROOM(show_args),
	F_ROLE(show_args),
	F_INT("slot", show_args, slot, DEFAULT(-1), 0, UINT32_MAX,
	      "Slot of this session's status page: show its room, even if other rooms "
	      "have the same number; if the ring refused to open a room in it, the "
	      "error"),
	F_END,
};

const struct command room_commands[] = {
	{"room.open", "Open one side of the KV transfer of a request", room_open_fields,
	 0, run_open, "room, gen and slot of the status page, generation, state"},
	{"room.bind", "Bind pages to a recv room, or to a pull opened without pages",
	 bind_fields, 0, run_bind, "state"},
	{"room.extend", "Extend the lease of an offer", extend_fields, 0, run_extend,
	 "state"},
	{"room.send", "Send a chunk in a send room", send_fields, 0, run_send, "state"},
	{"room.poll", "Poll the states of rooms, by list or by changes since a version",
	 room_poll_fields, 0, room_poll_run,
	 "rooms: {room, role, gen, state, flags, bytes, error}; version"},
	{"room.abort", "Abort a room on both sides", abort_fields, 0, run_abort, "state"},
	{"room.close", "Close a room that has ended", room_key_fields, 0, run_close,
	 "nothing"},
	{"room.show", "Show one room in detail", show_fields, 0, run_show,
	 "the record of the room. `ticket`: true if it has a ticket, which is never "
	 "shown; `admits`: its `peers`. `waits_for`, until it has ended: {what, who, "
	 "since_ms, until_ms (timeout)}; `surplus_tokens`: tokens in chunks that no "
	 "receiver had bound. `sent` or `received`, for the room and for each of its "
	 "peers: {bytes, staged_bytes (copied through a buffer of this daemon), "
	 "staged_share, rows, descriptors (iovecs, work requests, messages or copies; "
	 "0: moved by the remote daemon)}; `staged`: true if any bytes were; `path` of "
	 "a peer: the transport path used, \"\": none yet"},
	{"room.list", "List rooms", room_list_fields, 0, room_list_run,
	 "rooms: records; a peer's request for a room that is not open here appears as "
	 "{room, role, state_name: \"unopened\", pool, peers, waits_for}; total: "
	 "number of open rooms"},
	{"room.history", "List rooms that have ended, the latest first",
	 room_history_fields, 0, room_history_run,
	 "rooms: {room, role, state_name, error, opened_ms, started_ms, ended_ms (age "
	 "in milliseconds), timings_ms, bytes, expected_bytes, tokens (bound or "
	 "offered, whether moved or not), surplus_tokens, session, engine, pid, "
	 "peer_count, peer (the first), transport}; next: present if there are more; "
	 "total: rooms ended since the start. The last 4096 are kept"},
	{"room.trace", "Show the events of the rooms of a number, with times",
	 room_trace_fields, 0, room_trace_run,
	 "rooms: {the fields of room.show or room.history; generation, opened_ns "
	 "(CLOCK_MONOTONIC), layout (its digest), open, now_ns (of an open room), "
	 "views: {view, party, first_token, tokens, layers, pages, runs, runs_cut}, "
	 "views_cut: more than 64 views or receivers, events, the latest first: {ns "
	 "(since it was opened), what, party, seq, bytes, generation}, left_out: "
	 "number of events after the first 4096, forgotten: the oldest events have "
	 "been overwritten}; name, instance, boot_id, clock_ns. The latest 65536 "
	 "events of all rooms are kept"},
	{.name = NULL},
};
