/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One-sided transfers and notifications.
 *
 * A transfer is polled like a room, by its slot of the status page, and is in
 * doubt like one when its start was not answered (client_room.c). Bytes that
 * are not text (notifications) travel as base64.
 */
#include "lib/client.h"

#include <string.h>

#include "proto/base64.h"

static void text_base64(struct client_text *text, const char *name, const void *data,
			size_t bytes)
{
	cleanup_free char *chars = mem_zalloc(BASE64_CHARS(bytes) + 1);

	if (!chars) {
		text->failed = true;
		return;
	}
	base64_encode(data, bytes, chars);
	client_text_str(text, name, chars);
}

/* ---- transfers --------------------------------------------------------------- */

static void xfer_fini(struct client_object *object)
{
	struct kvd_xfer *xfer = container_of(object, struct kvd_xfer, slot.object);

	client_slot_fini(&xfer->slot);
	mem_free(xfer);
}

static void xfer_begin(struct kvd_xfer *xfer, struct client_op *op, const char *cmd)
{
	client_op_begin(xfer->slot.object.client, op, cmd);
	client_text_int(&op->text, "xfer", xfer->slot.object.id);
	op->object = &xfer->slot.object;
}

static int xfer_started(struct client_request *req, int result, const cJSON *reply)
{
	struct client_object *object = req->object;
	struct kvd_xfer *xfer = container_of(object, struct kvd_xfer, slot.object);
	struct client_op op;

	if (!result && client_get_u64(reply, "xfer", &object->id) &&
	    client_slot_attach(&xfer->slot, reply)) {
		client_object_enter(object, CLIENT_READY);
		if (req->late) {
			xfer_begin(xfer, &op, "xfer.cancel");
			op.forced = true;
			client_op_run(req->client, &op, NULL);
		}
		return 0;
	}
	if (!result)
		result = client_fail(req->client, KVD_E_PROTO,
				     "xfer.start: the reply names no slot of the page");
	if (result == -KVD_E_NOREPLY || result == -KVD_E_LOST || result == -KVD_E_PROTO) {
		client_object_enter(object, CLIENT_DOUBT);
		return result;
	}
	xfer->slot.error = -result;
	/* posting again was refused: the ended one is there still */
	client_object_enter(object, object->id ? CLIENT_READY : CLIENT_FAILED);
	return result;
}

int client_xfer_check(struct kvd_client *client, const struct kvd_xfer_args *a)
{
	if (a->op != KVD_READ && a->op != KVD_WRITE)
		return client_fail(client, KVD_E_INVAL, "op: %d", (int)a->op);
	if (!a->local || !a->remote)
		return client_fail(client, KVD_E_INVAL, "local and remote: required");
	for (size_t i = 0; i < a->local_index_count; i++)
		if (a->local_index[i] >= a->local->rows)
			return client_fail(
				client, KVD_E_RANGE, "local_index[%zu]: %u of %llu rows",
				i, a->local_index[i], (unsigned long long)a->local->rows);
	for (size_t i = 0; i < a->remote_index_count; i++)
		if (a->remote_index[i] >= a->remote->rows)
			return client_fail(client, KVD_E_RANGE,
					   "remote_index[%zu]: %u of %llu rows", i,
					   a->remote_index[i],
					   (unsigned long long)a->remote->rows);
	return 0;
}

int client_xfer_new(struct kvd_client *client, struct kvd_xfer **xfer_p)
{
	struct kvd_xfer *xfer = mem_zalloc(sizeof(*xfer));

	if (!xfer)
		return client_fail_nomem(client);
	client_object_init(client, &xfer->slot.object, CLIENT_XFER, xfer_fini);
	client_slot_init(&xfer->slot, 0, false);
	*xfer_p = xfer;
	return 0;
}

int kvd_xfer_start(struct kvd_client *client, const struct kvd_xfer_args *args,
		   const struct kvd_call *call, struct kvd_xfer **xfer_p)
{
	struct kvd_xfer *xfer = NULL;
	struct client_op op;
	int r = client_begin(client, call);

	*xfer_p = NULL;
	if (!r)
		r = client_xfer_check(client, args);
	if (!r)
		r = client_prepared(client, &args->local->slot.object, "local", call);
	if (!r)
		r = client_prepared(client, &args->remote->slot.object, "remote", call);
	if (!r)
		r = client_xfer_new(client, &xfer);
	if (r)
		return r;
	client_op_begin(client, &op, "xfer.start");
	client_text_str(&op.text, "op", args->op == KVD_READ ? "read" : "write");
	client_text_int(&op.text, "local", client_object_id(&args->local->slot.object));
	client_text_int(&op.text, "remote", client_object_id(&args->remote->slot.object));
	if (args->local_index)
		client_text_indices(&op.text, "local_index", args->local_index,
				    args->local_index_count);
	if (args->remote_index)
		client_text_indices(&op.text, "remote_index", args->remote_index,
				    args->remote_index_count);
	if (args->notif)
		text_base64(&op.text, "notif", args->notif, args->notif_bytes);
	op.object = &xfer->slot.object;
	op.finish = xfer_started;
	*xfer_p = xfer;
	r = client_op_run(client, &op, call);
	if (r && client_object_phase(&xfer->slot.object) != CLIENT_DOUBT) {
		*xfer_p = NULL;
		client_object_unref(&xfer->slot.object);
	}
	return r;
}

/* The rows, lists and notification of before; the slot gets a new generation. */
int kvd_xfer_again(struct kvd_xfer *xfer, const struct kvd_call *call)
{
	struct client_object *object = &xfer->slot.object;
	struct kvd_client *client = object->client;
	int r = client_enter(client, client_blocks(call)), state;
	struct client_op op;

	if (!r)
		r = client_object_usable(object, "xfer");
	if (r)
		return r;
	state = client_slot_state(&xfer->slot);
	if (state != KVD_FAILED && state != KVD_SUCCESS)
		return client_fail(client, KVD_E_STATE, "xfer: not ended yet");
	xfer_begin(xfer, &op, "xfer.start");
	op.finish = xfer_started;
	client_object_enter(object, CLIENT_MAKING);
	r = client_op_run(client, &op, call);
	/* never asked: it is what it was */
	if (r && client_object_phase(object) == CLIENT_MAKING)
		client_object_enter(object, CLIENT_READY);
	return r;
}

int kvd_xfer_cancel(struct kvd_xfer *xfer, const struct kvd_call *call)
{
	struct client_object *object = &xfer->slot.object;
	struct client_op op;
	int r = client_enter(object->client, client_blocks(call));

	if (!r)
		r = client_object_usable(object, "xfer");
	if (r)
		return r;
	xfer_begin(xfer, &op, "xfer.cancel");
	return client_op_run(object->client, &op, call);
}

int kvd_xfer_release(struct kvd_xfer *xfer, const struct kvd_call *call)
{
	struct client_object *object = &xfer->slot.object;
	struct kvd_client *client = object->client;
	enum client_phase phase = client_object_phase(object);
	int r = client_enter(client, client_blocks(call)), state;
	struct client_op op;

	if (r)
		return r;
	if (phase == CLIENT_READY && !kvd_lost(client) &&
	    object->serial == client->serial) {
		xfer_begin(xfer, &op, "xfer.release");
		client_text_printf(&op.text, ",\"wait\":true");
		op.finish = client_object_gone;
		return client_op_run(client, &op, call);
	}
	state = client_slot_state(&xfer->slot);
	if (state > KVD_FAILED && state != KVD_SUCCESS)
		return client_fail(client, KVD_E_BUSY, "the transfer is not still yet");
	return client_object_forget(object, call);
}

int kvd_xfer_state(const struct kvd_xfer *xfer)
{
	return client_slot_state(&xfer->slot);
}

int kvd_xfer_read(const struct kvd_xfer *xfer, struct kvd_room_status *status_p)
{
	return client_slot_read(&xfer->slot, status_p);
}

int kvd_xfer_wait(struct kvd_xfer *xfer, int timeout_ms)
{
	return client_slot_wait(&xfer->slot, KVD_SUCCESS, timeout_ms);
}

/* ---- notifications ----------------------------------------------------------- */

int kvd_notif_send(struct kvd_client *client, uint64_t attach, const void *data,
		   size_t bytes, const struct kvd_call *call)
{
	struct client_op op;
	int r = client_begin(client, call);

	if (!r)
		r = client_attach_id(client, &attach, call);
	if (r)
		return r;
	client_op_begin(client, &op, "notif.send");
	client_text_int(&op.text, "attach", attach);
	text_base64(&op.text, "data", data, bytes);
	return client_op_run(client, &op, call);
}

struct drain {
	void (*on_notif)(void *arg, const char *from, const void *data, size_t bytes);
	void *arg;
	int count;
};

static int drained(struct client_request *req, int result, const cJSON *reply)
{
	const cJSON *notifs = cJSON_GetObjectItemCaseSensitive(reply, "notifs"), *n;
	struct drain *drain = req->out;
	size_t bytes;

	if (result || req->late)
		return result;
	cJSON_ArrayForEach(n, notifs) {
		const char *from = client_get_str(n, "from"),
			   *text = client_get_str(n, "data");
		cleanup_free uint8_t *data = text ? mem_zalloc(strlen(text) + 1) : NULL;

		if (!from || !data || !base64_decode(text, strlen(text), data, &bytes))
			return client_fail(req->client, KVD_E_PROTO,
					   "notif.drain: a notification of another form");
		req->client->in_callback = true;
		drain->on_notif(drain->arg, from, data, bytes);
		req->client->in_callback = false;
		drain->count++;
		req->client->notifs_taken++;
	}
	return 0;
}

int kvd_notif_drain(struct kvd_client *client, int timeout_ms,
		    void (*on_notif)(void *arg, const char *from, const void *data,
				     size_t bytes),
		    void *arg)
{
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct drain drain = {on_notif, arg, 0};
	struct client_op op;
	int r = client_begin(client, &call);

	if (r)
		return r;
	client_op_begin(client, &op, "notif.drain");
	op.finish = drained;
	op.out = &drain;
	r = client_op_run(client, &op, &call);
	return r ? r : drain.count;
}
