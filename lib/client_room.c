/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms, on the engine's side. A room's handle exists before the daemon has replied, so
 * that binds and chunks can follow its opening at once (the daemon processes a session's
 * lines in order), and a poll loop needs no separate state for "requested".
 *
 * The difficult case is an opening without a reply: a pull may already be writing bytes.
 * Such a room is in doubt. It shows as aborting, with its pages in use, until the late
 * reply (libkvd then aborts it, and its slot shows when its I/O has stopped), or the
 * daemon's end of the connection and a page without an unfinished slot for it, or the end
 * of the daemon's process. It is never reported as failed for lack of a reply alone
 * (invariant 1).
 */
#include "lib/client.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "proto/kvd_ring.h"

static const char *const role_names[] = {"send", "recv", "offer", "pull"};

static void room_fini(struct client_object *object)
{
	struct kvd_room *room = container_of(object, struct kvd_room, slot.object);

	client_slot_fini(&room->slot);
	mem_free(room);
}

static void text_name(struct text *text, const struct kvd_room *room)
{
	out_id(text, "room", room->slot.number);
	out_text(text, "role", role_names[room->role]);
}

static void room_begin(struct kvd_room *room, struct client_op *op, const char *cmd)
{
	client_op_begin(room->slot.object.client, op, cmd);
	text_name(&op->text, room);
	op->object = &room->slot.object;
}

/* The slot of a posted room has the reason: it may have been refused because another
 * one has its number. */
static void show_begin(struct kvd_room *room, struct client_op *op)
{
	room_begin(room, op, "room.show");
	if (room->slot.numbered)
		out_number(&op->text, "slot", room->slot.slot);
}

/* ---- opening --------------------------------------------------------------- */

void client_text_wait(struct text *text, const char *name, const struct kvd_wait *wait)
{
	if (!wait->region)
		return;
	out_object(text, name);
	out_text(text, "kind", "seq");
	out_number(text, "region", kvd_region_id(wait->region));
	out_number(text, "offset", wait->offset);
	out_id(text, "value", wait->value);
	out_close(text, '}');
}

static void text_source(struct text *text, const struct kvd_client *client,
			const struct kvd_source *source)
{
	out_object(text, NULL);
	out_text(text, "group", source->group);
	if (!source->group && !source->endpoint)
		out_text(text, "endpoint", client->info.endpoint);
	out_text(text, "endpoint",
		 source->endpoint); /* beside a group: refused by name */
	out_text(text, "worker", source->worker);
	out_some(text, "tp_rank", source->tp_rank);
	out_some(text, "pp_rank", source->pp_rank);
	out_some(text, "dp_rank", source->dp_rank);
	out_some(text, "cp_rank", source->cp_rank);
	out_text(text, "pool", source->pool);
	if (source->session)
		out_id(text, "session", source->session);
	if (source->has_rank)
		out_number(text, "rank", source->rank);
	if (source->another_room)
		out_id(text, "room", source->room);
	out_close(text, '}');
}

static void text_sources(struct text *text, const struct kvd_client *client,
			 const struct kvd_room_args *a)
{
	if (!a->source_count)
		return;
	out_array(text, "sources");
	for (size_t i = 0; i < a->source_count; i++)
		text_source(text, client, &a->sources[i]);
	out_close(text, ']');
	if (a->role != KVD_PULL)
		return;
	/* the engine knows the pages, or uses those of the offer */
	if (!a->sources[0].view_count)
		return;
	out_array(text, "remote");
	for (size_t i = 0; i < a->source_count; i++) {
		out_object(text, NULL);
		client_text_views(text, a->sources[i].views, a->sources[i].view_count);
		out_close(text, '}');
	}
	out_close(text, ']');
}

static void text_timeouts(struct text *text, const struct kvd_room_args *a)
{
	if (!a->bootstrap_ms && !a->waiting_ms && !a->stall_ms)
		return;
	out_object(text, "timeouts");
	out_some(text, "bootstrap_ms", a->bootstrap_ms);
	out_some(text, "waiting_ms", a->waiting_ms);
	out_some(text, "stall_ms", a->stall_ms);
	out_close(text, '}');
}

/* Members of room.open after room and role; includes its views unless they are passed
 * separately. */
static void text_open(struct text *text, const struct kvd_room *room,
		      const struct kvd_room_args *a, bool with_views)
{
	out_number(text, "pool", kvd_pool_id(a->pool));
	text_sources(text, room->slot.object.client, a);
	out_some(text, "receivers", a->receivers);
	if (a->receivers_from_pullers)
		out_bool(text, "receivers_from_pullers", true);
	if (a->view_count && with_views)
		client_text_views(text, a->views, a->view_count);
	if (a->has_aux)
		out_number(text, "aux", a->aux);
	client_text_wait(text, "wait", &a->wait);
	out_some(text, "lease_ms", a->lease_ms);
	text_timeouts(text, a);
	out_text(text, "request_id", a->request_id);
	out_text(text, "traceparent", a->traceparent);
	out_text(text, "ticket", a->ticket);
	if (a->peer_count)
		client_text_names(text, "peers", a->peers, a->peer_count);
}

static void room_undo(struct client_slot *slot)
{
	struct kvd_room *room = container_of(slot, struct kvd_room, slot);
	struct client_op op;

	room_begin(room, &op, "room.abort");
	out_text(&op.text, "reason", "its opening was canceled");
	op.forced = true;
	client_op_run(slot->object.client, &op, NULL);
}

static int room_opened(struct client_request *req, int result, const cJSON *reply)
{
	return client_slot_made(req, result, reply, room_undo);
}

int client_wait_check(struct kvd_client *client, const struct kvd_wait *wait)
{
	if (wait->region && !kvd_region_id(wait->region))
		return client_fail(client, KVD_E_STATE,
				   "wait: its region is not registered");
	return 0;
}

static int open_check(struct kvd_client *client, const struct kvd_room_args *a)
{
	if ((unsigned int)a->role >= ARRAY_LEN(role_names))
		return client_fail(client, KVD_E_INVAL, "role: %d", (int)a->role);
	if (!a->pool || !kvd_pool_id(a->pool))
		return client_fail(client, KVD_E_STATE, "pool: not registered");
	return client_wait_check(client, &a->wait);
}

static struct kvd_room *room_new(struct kvd_client *client,
				 const struct kvd_room_args *args)
{
	struct kvd_room *room = mem_zalloc(sizeof(*room));

	if (!room)
		return NULL;
	client_object_init(client, &room->slot.object, CLIENT_ROOM, room_fini);
	client_slot_init(&room->slot, args->room);
	room->role = args->role;
	return room;
}

static int open_post(struct kvd_room *room, const struct kvd_room_args *args)
{
	struct kvd_ring_entry entry = {.op = KVD_RING_OPEN,
				       .a = args->room,
				       .b = (uint64_t)kvd_pool_id(args->pool)};
	struct text text = {0};

	out_object(&text, NULL);
	text_name(&text, room);
	text_open(&text, room, args, false);
	out_close(&text, '}');
	return client_post_pages(room, &entry, args->views, args->view_count, &text);
}

static int open_ask(struct kvd_room *room, const struct kvd_room_args *args,
		    const struct kvd_call *call)
{
	struct client_op op;

	room_begin(room, &op, "room.open");
	text_open(&op.text, room, args, true);
	op.finish = room_opened;
	return client_op_run(room->slot.object.client, &op, call);
}

int kvd_room_open(struct kvd_client *client, const struct kvd_room_args *args,
		  const struct kvd_call *call, struct kvd_room **room_p)
{
	bool post = call && call->post;
	struct kvd_room *room;
	int r = post ? client_post_begin(client, KVD_RING_OPEN)
		     : client_begin(client, call);

	*room_p = NULL;
	if (!r)
		r = open_check(client, args);
	if (r)
		return r;
	room = room_new(client, args);
	if (!room)
		return client_fail_nomem(client);
	*room_p = room; /* before its reply, which may arrive during the call */
	r = post ? open_post(room, args) : open_ask(room, args, call);
	if (r && client_object_phase(&room->slot.object) != CLIENT_DOUBT) {
		*room_p = NULL;
		client_object_unref(&room->slot.object);
	}
	return r;
}

/* ---- the room's commands ----------------------------------------------------- */

/* The local knowledge of its end: the refusal of its opening, the end of its session. */
static void room_fault(const struct kvd_room *room, int code, struct kvd_error *error)
{
	char silence[CLIENT_SILENCE_MAX];

	if (room->slot.fault && (!room->asked || room->told)) {
		*error = *room->slot.fault;
		return;
	}
	if (code == KVD_E_NOREPLY) { /* the reply may have arrived meanwhile */
		client_map_silence(room->slot.map, silence);
		client_error_set(error, code, "%s",
				 *silence ? silence : "the local daemon did not respond");
		return;
	}
	client_error_set(error, code, "%s",
			 code == KVD_E_DEAD   ? "the daemon's process has ended"
			 : code == KVD_E_LOST ? "its session has ended"
					      : err_meaning((enum err_code)code));
}

/* The daemon refuses calls on a failed room of this session, with the room's error. */
static int room_failed(struct kvd_room *room)
{
	struct kvd_client *client = room->slot.object.client;
	struct kvd_room_status st;
	struct kvd_error why;

	if (client_slot_read(&room->slot, &st) < 0 || st.state != KVD_FAILED)
		return 0;
	room_fault(room, st.error, &why);
	client->error = why;
	snprintf(client->error.message, sizeof(client->error.message),
		 "room %llu failed: %s: %.250s", (unsigned long long)room->slot.number,
		 kvd_code_name(why.code), why.message);
	return -why.code;
}

/* An opening without a reply yet is allowed: lines are processed in order. */
static int room_enter(struct kvd_room *room, const struct kvd_call *call)
{
	struct client_object *object = &room->slot.object;
	struct kvd_client *client = object->client;
	enum client_phase phase = client_object_phase(object);
	int r = client_enter(client, client_blocks(call));

	if (!r && (phase == CLIENT_FAILED || !client_object_current(object)))
		r = room_failed(room);
	if (!r)
		r = client_session_need(client);
	if (!r && phase != CLIENT_MAKING)
		r = client_object_usable(object, "room");
	return r;
}

/* The failure of a posted room has not been reported to the caller. A line names a
 * room by its number, which is another room's if the posted opening was refused for
 * that: so lines that change something are not sent for such a room. */
static int pages_enter(struct kvd_room *room, const struct kvd_wait *wait,
		       const struct kvd_call *call)
{
	int r = room_enter(room, call);

	if (!r && room->slot.numbered)
		r = room_failed(room);
	if (!r && room->slot.numbered && !(call && call->post))
		r = client_fail(room->slot.object.client, KVD_E_STATE,
				"room %llu: was posted; use posted calls (call->post)",
				(unsigned long long)room->slot.number);
	return r ? r : client_wait_check(room->slot.object.client, wait);
}

/* BIND, SEND, EXTEND */
static int pages_post(struct kvd_room *room, struct kvd_ring_entry *entry,
		      const struct kvd_room_pages *args)
{
	struct text text = {0};
	int r = client_post_begin(room->slot.object.client, entry->op);

	if (r)
		return r;
	client_text_wait(&text, NULL, &args->wait);
	return client_post_pages(room, entry, args->views, args->view_count, &text);
}

int kvd_room_extend(struct kvd_room *room, uint32_t lease_ms, const struct kvd_call *call)
{
	static const struct kvd_room_pages none;
	struct kvd_ring_entry entry = {.op = KVD_RING_EXTEND, .c = lease_ms};
	struct client_op op;
	int r = pages_enter(room, &none.wait, call);

	if (r)
		return r;
	if (call && call->post)
		return pages_post(room, &entry, &none);
	room_begin(room, &op, "room.extend");
	out_number(&op.text, "lease_ms", lease_ms);
	return client_op_run(room->slot.object.client, &op, call);
}

static int pages_send(struct kvd_room *room, bool binds,
		      const struct kvd_room_pages *args, const struct kvd_call *call)
{
	struct kvd_ring_entry entry = {.op = binds ? KVD_RING_BIND : KVD_RING_SEND,
				       .flags = (args->has_aux ? KVD_RING_AUX : 0) |
						(args->last ? KVD_RING_LAST : 0),
				       .b = args->seq,
				       .c = args->has_aux ? args->aux : 0};
	struct client_op op;
	int r = pages_enter(room, &args->wait, call);

	if (r)
		return r;
	if (call && call->post)
		return pages_post(room, &entry, args);
	room_begin(room, &op, binds ? "room.bind" : "room.send");
	if (!binds)
		out_number(&op.text, "seq", args->seq);
	client_text_views(&op.text, args->views, args->view_count);
	if (args->last)
		out_bool(&op.text, "last", true);
	if (args->has_aux)
		out_number(&op.text, "aux", args->aux);
	client_text_wait(&op.text, "wait", &args->wait);
	return client_op_run(room->slot.object.client, &op, call);
}

int kvd_room_bind(struct kvd_room *room, const struct kvd_room_pages *args,
		  const struct kvd_call *call)
{
	struct kvd_room_pages pages = *args;

	pages.seq = 0;
	pages.last = false;
	return pages_send(room, true, &pages, call);
}

int kvd_room_send(struct kvd_room *room, const struct kvd_room_pages *args,
		  const struct kvd_call *call)
{
	return pages_send(room, false, args, call);
}

int kvd_room_abort(struct kvd_room *room, const char *reason, const struct kvd_call *call)
{
	struct client_object *object = &room->slot.object;
	enum client_phase phase = client_object_phase(object);
	struct client_op op;
	int r = client_enter(object->client, client_blocks(call));
	bool lives = phase == CLIENT_MAKING || phase == CLIENT_READY;

	if (!r && lives && object->serial == object->client->serial)
		r = client_session_need(object->client);
	if (r)
		return r;
	/* failed, or in doubt and about to be aborted, or ended with its session */
	if (!lives || object->serial != object->client->serial)
		return call && call->post ? 0 : client_op_local(object->client, call);
	if (call && call->post)
		return client_post_abort(room, reason);
	if (room->slot.numbered) {
		r = client_post_abort(room, reason);
		return r ? r : client_op_local(object->client, call);
	}
	room_begin(room, &op, "room.abort");
	out_text(&op.text, "reason", reason);
	return client_op_run(object->client, &op, call);
}

/* It was terminal: if the session ends during the request, it counts as closed. */
static int room_closed(struct client_request *req, int result, const cJSON *reply)
{
	return client_object_gone(req, result == -KVD_E_LOST ? 0 : result, reply);
}

int kvd_room_close(struct kvd_room *room, const struct kvd_call *call)
{
	struct client_object *object = &room->slot.object;
	struct kvd_client *client = object->client;
	enum client_phase phase = client_object_phase(object);
	int r = client_enter(client, client_blocks(call)), state;
	struct client_op op;

	if (r)
		return r;
	if (call && call->post)
		return client_post_close(room);
	state = client_slot_state(&room->slot);
	if (state > KVD_FAILED && state != KVD_SUCCESS)
		return client_fail(client, KVD_E_STATE, "the room is %s, not terminal",
				   kvd_state_name(state));
	if (phase != CLIENT_READY || !client_object_current(object))
		return client_object_forget(object, call);
	if (room->slot.numbered) {
		r = client_post_close_entry(room);
		return r ? r : client_object_forget(object, call);
	}
	room_begin(room, &op, "room.close");
	op.finish = room_closed;
	return client_op_run(client, &op, call);
}

int kvd_room_show(struct kvd_room *room, int timeout_ms, char **json_p)
{
	struct client_op op;
	int r = room_enter(room, NULL);

	*json_p = NULL;
	if (r)
		return r;
	show_begin(room, &op);
	return client_op_json(room->slot.object.client, &op, timeout_ms, json_p);
}

static int why_reply(struct client_request *req, const cJSON *reply)
{
	if (cJSON_GetObjectItemCaseSensitive(reply, "error"))
		client_error_parse(req->out, reply);
	return 0;
}

/* The daemon's record has the text; the status page has only the code. 1: no record
 * exists any more. */
static int why_ask(struct kvd_room *room, int timeout_ms)
{
	struct kvd_client *client = room->slot.object.client;
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;

	if (client->owner != getpid() || !client_object_current(&room->slot.object) ||
	    client_object_phase(&room->slot.object) != CLIENT_READY)
		return 1;
	if (client->in_callback)
		return -KVD_E_STATE;
	show_begin(room, &op);
	return client_op_ask(client, &op, &call, why_reply, room->slot.fault);
}

const struct kvd_error *kvd_room_why(struct kvd_room *room, int timeout_ms)
{
	struct kvd_client *client = room->slot.object.client;
	struct kvd_error error = client->error, why;
	struct kvd_room_status st;

	if (room->told)
		return room->slot.fault;
	if (client_slot_read(&room->slot, &st) < 0 || !st.error)
		return NULL;
	room_fault(room, st.error, &why);
	if (!room->slot.fault)
		room->slot.fault = mem_dup(&why, sizeof(why));
	if (!room->slot.fault) { /* only the code is known */
		*client_error_thread() = why;
		return client_error_thread();
	}
	*room->slot.fault = why;
	room->asked = true;
	room->told = st.error != KVD_E_NOREPLY && why_ask(room, timeout_ms) >= 0;
	client->error = error;
	return room->slot.fault;
}

struct landed {
	const char *view;
	uint8_t *bitmap;
	size_t bytes;
};

static int landed_reply(struct client_request *req, const cJSON *reply)
{
	const cJSON *landed = cJSON_GetObjectItemCaseSensitive(reply, "landed");
	struct landed *out = req->out;
	const char *hex = client_get_str(landed, out->view);
	size_t n;

	if (!hex)
		return client_fail(
			req->client, landed ? KVD_E_NOTFOUND : KVD_E_STATE,
			landed ? "view: %s is not bound"
			       : "view %s: the room has not failed; only failed rooms "
				 "have this",
			out->view);
	n = strlen(hex) / 2;
	if (n > out->bytes)
		return client_fail(req->client, KVD_E_TOOBIG,
				   "bitmap: %zu bytes; at least %zu", out->bytes, n);
	memset(out->bitmap, 0, out->bytes);
	return hex_read(hex, out->bitmap, n) ? 0
					     : client_fail(req->client, KVD_E_PROTO,
							   "landed: the reply has no "
							   "hex digits");
}

int kvd_room_landed(struct kvd_room *room, const char *view, int timeout_ms,
		    uint8_t *bitmap, size_t bitmap_bytes)
{
	struct landed landed = {view ? view : "kv", bitmap, bitmap_bytes};
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r = room_enter(room, &call);

	if (r)
		return r;
	show_begin(room, &op);
	return client_op_ask(room->slot.object.client, &op, &call, landed_reply, &landed);
}

/* ---- reads -------------------------------------------------------------------- */

int kvd_room_state(const struct kvd_room *room)
{
	return client_slot_state(&room->slot);
}

static const struct client_slot *room_slot(const void *of, size_t i)
{
	const struct kvd_room *const *rooms = of;

	return &rooms[i]->slot;
}

size_t kvd_room_states(const struct kvd_room *const *rooms, size_t count, int *states)
{
	return client_slot_states(room_slot, rooms, count, states);
}

int kvd_room_read(const struct kvd_room *room, struct kvd_room_status *status_p)
{
	return client_slot_read(&room->slot, status_p);
}

int kvd_room_wait(struct kvd_room *room, int state, int timeout_ms)
{
	return client_slot_wait(&room->slot, state, timeout_ms);
}
