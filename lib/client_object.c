/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Handles: the common part of regions, pools, rooms, dlists and transfers.
 *
 * A handle has two kinds of owners: the caller, until its closing function has succeeded,
 * and every request that refers to it. So a reply that follows after the caller's timeout
 * can still write to memory, and the last owner frees it. Phases only move forward:
 * MAKING, then READY or FAILED (or DOUBT, if bytes may be moving), then CLOSED if the
 * daemon closed it while its caller received "no answer". An object created after its
 * caller's timeout is undone by the closing command, which libkvd sends itself.
 */
#include "lib/client.h"

void client_object_init(struct kvd_client *client, struct client_object *object,
			enum client_kind kind, void (*fini)(struct client_object *))
{
	object->client = client;
	object->kind = kind;
	object->refs = 1;
	object->serial = client->serial;
	object->fini = fini;
	list_push_back(&client->objects[kind], &object->link);
}

void client_object_ref(struct client_object *object)
{
	object->refs++;
}

void client_object_unref(struct client_object *object)
{
	if (--object->refs)
		return;
	list_remove(&object->link);
	object->fini(object); /* frees the whole handle */
}

enum client_phase client_object_phase(const struct client_object *object)
{
	return (enum client_phase)atomic_load_explicit(&object->phase,
						       memory_order_acquire);
}

void client_object_enter(struct client_object *object, enum client_phase phase)
{
	atomic_store_explicit(&object->phase, (uint32_t)phase, memory_order_release);
}

bool client_object_current(const struct client_object *object)
{
	return !kvd_lost(object->client) && object->serial == object->client->serial;
}

int client_object_usable(struct client_object *object, const char *what)
{
	struct kvd_client *client = object->client;

	switch (client_object_phase(object)) {
	case CLIENT_READY:
		break;
	case CLIENT_MAKING:
	case CLIENT_DOUBT:
		return client_fail(client, KVD_E_STATE, "%s: no reply yet", what);
	default:
		return client_fail(client, KVD_E_STATE, "%s: unknown to the daemon",
				   what);
	}
	if (object->serial != client->serial && object->kind > CLIENT_POOL)
		return client_fail(client, KVD_E_STATE,
				   "%s: belongs to a session that has ended", what);
	return 0;
}

/* Their names in the protocol. */
static const struct {
	const char *noun, *make, *close;
} kinds[] = {
	[CLIENT_REGION] = {"region", "region.register", "region.unregister"},
	[CLIENT_POOL] = {"pool", "pool.register", "pool.unregister"},
	[CLIENT_ATTACH] = {"attach", "peer.attach", NULL}, /* ends with the session */
	[CLIENT_ROOM] = {"room", "room.open", "room.close"},
	[CLIENT_DLIST] = {"dlist", "dlist.prep", "dlist.free"},
	[CLIENT_SPACE] = {"space", "space.open", "space.close"},
	[CLIENT_MOVE] = {"move", "chunk.put", "chunk.close"},
	[CLIENT_ATTEND] = {"attend", "attention.open", "attention.close"},
};

/* The daemon registered it after the caller's timeout: unregister it. */
static void object_undo(struct client_object *object, uint64_t id)
{
	struct client_op op;

	client_op_begin(object->client, &op, kinds[object->kind].close);
	out_number(&op.text, kinds[object->kind].noun, id);
	op.forced = true;
	client_op_run(object->client, &op, NULL);
}

int client_object_made(struct client_request *req, int result, const cJSON *reply)
{
	struct client_object *object = req->object;
	uint64_t id = 0;

	if (!result && !client_get_u64(reply, kinds[object->kind].noun, &id))
		result =
			client_fail(req->client, KVD_E_PROTO, "%s: the reply names no %s",
				    kinds[object->kind].make, kinds[object->kind].noun);
	if (req->late || object->refs == 1) { /* its caller has timed out, or has
					       * released it */
		if (!result)
			object_undo(object, id);
		return result;
	}
	if (!result) {
		object->id = id;
		object->serial = req->client->serial;
	}
	client_object_enter(object, result ? CLIENT_FAILED : CLIENT_READY);
	return result;
}

int client_object_again(struct client_request *req, int result, const cJSON *reply)
{
	struct client_object *object = req->object;
	const char *noun = kinds[object->kind].noun;
	uint64_t id = 0;

	if (req->late) { /* its session has been abandoned, or it was requested again */
		if (!result && client_get_u64(reply, noun, &id) &&
		    kinds[object->kind].close)
			object_undo(object, id);
		return result;
	}
	if (!result && !client_get_u64(reply, noun, &id))
		result =
			client_fail(req->client, KVD_E_PROTO, "%s: the reply names no %s",
				    kinds[object->kind].make, noun);
	if (!result) {
		object->id = id;
		object->serial = req->client->serial;
	}
	if (!result && object->refs == 1 && kinds[object->kind].close)
		object_undo(object, id); /* its caller has released it meanwhile */
	client_session_answered(object, result);
	return result;
}

int client_object_gone(struct client_request *req, int result, const cJSON *reply)
{
	struct client_object *object = req->object;

	(void)reply;
	if (result || client_object_phase(object) == CLIENT_CLOSED)
		return result;
	client_object_enter(object, CLIENT_CLOSED);
	/* in time: the caller's reference is dropped with the reply */
	if (!req->late)
		client_object_unref(object);
	return 0;
}

int client_object_forget(struct client_object *object, const struct kvd_call *call)
{
	int r = client_op_local(object->client, call);

	if (!r)
		client_object_unref(object);
	return r;
}

int client_object_close(struct client_object *object, const struct kvd_call *call)
{
	struct kvd_client *client = object->client;
	enum client_phase phase = client_object_phase(object);
	struct client_op op;
	int r;

	r = phase == CLIENT_READY ? client_begin(client, call)
				  : client_enter(client, client_blocks(call));
	if (r)
		return r;
	if (phase == CLIENT_FAILED || phase == CLIENT_CLOSED)
		return client_object_forget(object, call);
	r = client_object_usable(object, kinds[object->kind].noun);
	if (r)
		return r;
	client_op_begin(client, &op, kinds[object->kind].close);
	out_number(&op.text, kinds[object->kind].noun, object->id);
	op.object = object;
	op.finish = client_object_gone;
	return client_op_run(client, &op, call);
}

uint64_t client_object_id(const struct client_object *object)
{
	if (client_object_phase(object) != CLIENT_READY ||
	    object->serial != object->client->serial ||
	    object->client->again.stage < CLIENT_REGISTERING)
		return 0;
	return object->id;
}
