/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers, descriptor lists, one-sided transfers and notifications.
 *
 * A transfer is polled like a room, by its slot of the status page, and is in
 * doubt like one when its start was not answered (client_room.c). Bytes that
 * are not text (notifications) travel as base64.
 */
#include "proto/client.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/base64.h"

#define DESCS_IN_LINE 1024u

struct kvd_dlist {
	struct client_object object;
	uint64_t rows;
};

struct kvd_xfer {
	struct client_slot slot;
};

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

/* ---- peers ------------------------------------------------------------------- */

/* The daemon's patience with the peer is the caller's with us. */
static void text_timeout(const struct kvd_client *client, struct client_text *text,
			 const struct kvd_call *call)
{
	int ms = call && call->timeout_ms ? call->timeout_ms : client->timeout_ms;

	client_text_int(text, "timeout_ms", ms > 0 && ms < 600000 ? (uint64_t)ms : 600000);
}

int kvd_peer_connect(struct kvd_client *client, const char *endpoint,
		     const struct kvd_call *call)
{
	struct client_op op;
	int r = client_begin(client, call);

	if (r)
		return r;
	client_op_begin(client, &op, "peer.connect");
	client_text_str(&op.text, "endpoint", endpoint);
	text_timeout(client, &op.text, call);
	return client_op_run(client, &op, call);
}

static int key_told(struct client_request *req, int result, const cJSON *reply)
{
	const cJSON *sessions = cJSON_GetObjectItemCaseSensitive(reply, "sessions"), *s;
	struct kvd_session_key *key = req->out;
	const char *secret;
	uint64_t id;

	if (result || req->late)
		return result;
	cJSON_ArrayForEach(s, sessions) {
		secret = client_get_str(s, "secret");
		if (!client_get_u64(s, "session", &id) ||
		    id != req->client->info.session || !secret ||
		    strlen(secret) >= sizeof(key->secret))
			continue;
		key->epoch = req->client->info.epoch;
		memcpy(key->secret, secret, strlen(secret) + 1);
		return 0;
	}
	return client_fail(req->client, KVD_E_PROTO,
			   "session.list: the reply lacks this session's secret");
}

int kvd_session_key(struct kvd_client *client, int timeout_ms, struct kvd_session_key *key_p)
{
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r = client_begin(client, &call);

	if (r)
		return r;
	client_op_begin(client, &op, "session.list");
	op.finish = key_told;
	op.out = key_p;
	return client_op_run(client, &op, &call);
}

static int attached(struct client_request *req, int result, const cJSON *reply)
{
	if (result || req->late)
		return result;
	if (client_get_u64(reply, "attach", req->out))
		return 0;
	return client_fail(req->client, KVD_E_PROTO, "peer.attach: the reply names no attach");
}

int kvd_peer_attach(struct kvd_client *client, const char *endpoint,
		    const struct kvd_session_key *key, int timeout_ms, uint64_t *attach_p)
{
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r = client_begin(client, &call);

	if (r)
		return r;
	client_op_begin(client, &op, "peer.attach");
	client_text_str(&op.text, "endpoint", endpoint ? endpoint : client->info.endpoint);
	client_text_u64(&op.text, "session", key->epoch);
	client_text_str(&op.text, "secret", key->secret);
	text_timeout(client, &op.text, &call);
	op.finish = attached;
	op.out = attach_p;
	return client_op_run(client, &op, &call);
}

/* ---- descriptor lists -------------------------------------------------------- */

static void dlist_fini(struct client_object *object)
{
	mem_free(container_of(object, struct kvd_dlist, object));
}

static void text_descs(struct client_text *text, const struct kvd_desc *descs, size_t count)
{
	client_text_printf(text, ",\"descs\":[");
	for (size_t i = 0; i < count; i++) {
		client_text_printf(text, "%s[\"%llu\",%llu", i ? "," : "",
				   (unsigned long long)descs[i].address,
				   (unsigned long long)descs[i].bytes);
		if (descs[i].count > 1)
			client_text_printf(text, ",%llu,%llu",
					   (unsigned long long)descs[i].stride,
					   (unsigned long long)descs[i].count);
		client_text_bytes(text, "]", 1);
	}
	client_text_bytes(text, "]", 1);
}

/* A sealed memfd of u64 quads; -1 with errno. */
static int descs_memfd(const struct kvd_desc *descs, size_t count)
{
	cleanup_close int fd = memfd_create("kvd-dlist", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	cleanup_free uint64_t *quads = mem_calloc(count, 4 * sizeof(*quads));
	const char *at = (const char *)quads;
	size_t left = count * 4 * sizeof(*quads);
	ssize_t n;

	if (fd < 0 || !quads)
		return -1;
	for (size_t i = 0; i < count; i++) {
		quads[4 * i] = htole64(descs[i].address);
		quads[4 * i + 1] = htole64(descs[i].bytes);
		quads[4 * i + 2] = htole64(descs[i].stride);
		quads[4 * i + 3] = htole64(descs[i].count ? descs[i].count : 1);
	}
	for (; left; at += n, left -= (size_t)n) {
		n = write(fd, at, left);
		if (n < 0)
			return -1;
	}
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) < 0)
		return -1;
	return mem_steal_fd(&fd);
}

static int dlist_new(struct kvd_client *client, const struct kvd_desc *descs, size_t count,
		     struct kvd_dlist **dlist_p)
{
	struct kvd_dlist *dlist = mem_zalloc(sizeof(*dlist));

	if (!dlist)
		return client_fail_nomem(client);
	client_object_init(client, &dlist->object, CLIENT_DLIST, dlist_fini);
	for (size_t i = 0; i < count; i++)
		dlist->rows += descs[i].count ? descs[i].count : 1;
	*dlist_p = dlist;
	return 0;
}

int kvd_dlist_prep(struct kvd_client *client, uint64_t attach, const struct kvd_desc *descs,
		   size_t count, const struct kvd_call *call, struct kvd_dlist **dlist_p)
{
	cleanup_close int fd = -1;
	struct kvd_dlist *dlist = NULL;
	struct client_op op;
	int r = client_begin(client, call);

	*dlist_p = NULL;
	if (!r && count > DESCS_IN_LINE) {
		fd = descs_memfd(descs, count);
		if (fd < 0)
			r = client_fail(client, KVD_E_NOMEM, "a memfd for %zu descriptors: %s",
					count, strerror(errno));
	}
	if (!r)
		r = dlist_new(client, descs, count, &dlist);
	if (r)
		return r;
	client_op_begin(client, &op, "dlist.prep");
	if (attach)
		client_text_int(&op.text, "peer", attach);
	if (fd >= 0) {
		client_text_int(&op.text, "fd", 0);
		client_text_int(&op.text, "count", count);
		op.fds = &fd;
		op.fd_count = 1;
	} else {
		text_descs(&op.text, descs, count);
	}
	op.object = &dlist->object;
	op.finish = client_object_made;
	*dlist_p = dlist;
	r = client_op_run(client, &op, call);
	if (r) {
		*dlist_p = NULL;
		client_object_unref(&dlist->object);
	}
	return r;
}

int kvd_dlist_free(struct kvd_dlist *dlist, const struct kvd_call *call)
{
	struct client_object *object = &dlist->object;
	int r = client_enter(object->client, client_blocks(call));

	if (r)
		return r;
	/* those of an earlier session went with it */
	if (kvd_lost(object->client) || object->serial != object->client->serial)
		return client_object_forget(object, call);
	return client_object_close(object, call);
}

uint64_t kvd_dlist_count(const struct kvd_dlist *dlist)
{
	return dlist->rows;
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

static int xfer_check(struct kvd_client *client, const struct kvd_xfer_args *a)
{
	if (a->op != KVD_READ && a->op != KVD_WRITE)
		return client_fail(client, KVD_E_INVAL, "op: %d", (int)a->op);
	if (!a->local || !client_object_id(&a->local->object))
		return client_fail(client, KVD_E_STATE, "local: not prepared in this session");
	if (!a->remote || !client_object_id(&a->remote->object))
		return client_fail(client, KVD_E_STATE, "remote: not prepared in this session");
	for (size_t i = 0; i < a->local_index_count; i++)
		if (a->local_index[i] >= a->local->rows)
			return client_fail(client, KVD_E_RANGE,
					   "local_index[%zu]: %u of %llu rows", i,
					   a->local_index[i],
					   (unsigned long long)a->local->rows);
	for (size_t i = 0; i < a->remote_index_count; i++)
		if (a->remote_index[i] >= a->remote->rows)
			return client_fail(client, KVD_E_RANGE,
					   "remote_index[%zu]: %u of %llu rows", i,
					   a->remote_index[i],
					   (unsigned long long)a->remote->rows);
	return 0;
}

int kvd_xfer_start(struct kvd_client *client, const struct kvd_xfer_args *args,
		   const struct kvd_call *call, struct kvd_xfer **xfer_p)
{
	struct kvd_xfer *xfer;
	struct client_op op;
	int r = client_begin(client, call);

	*xfer_p = NULL;
	if (!r)
		r = xfer_check(client, args);
	if (r)
		return r;
	xfer = mem_zalloc(sizeof(*xfer));
	if (!xfer)
		return client_fail_nomem(client);
	client_object_init(client, &xfer->slot.object, CLIENT_XFER, xfer_fini);
	client_slot_init(&xfer->slot, 0, false);
	client_op_begin(client, &op, "xfer.start");
	client_text_str(&op.text, "op", args->op == KVD_READ ? "read" : "write");
	client_text_int(&op.text, "local", client_object_id(&args->local->object));
	client_text_int(&op.text, "remote", client_object_id(&args->remote->object));
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
	if (phase == CLIENT_READY && !kvd_lost(client) && object->serial == client->serial) {
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
		const char *from = client_get_str(n, "from"), *text = client_get_str(n, "data");
		cleanup_free uint8_t *data = text ? mem_zalloc(strlen(text) + 1) : NULL;

		if (!from || !data || !base64_decode(text, strlen(text), data, &bytes))
			return client_fail(req->client, KVD_E_PROTO,
					   "notif.drain: a notification of another form");
		req->client->in_callback = true;
		drain->on_notif(drain->arg, from, data, bytes);
		req->client->in_callback = false;
		drain->count++;
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
