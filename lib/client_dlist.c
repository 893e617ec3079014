/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers, attachments and descriptor lists: what transfers stand on.
 *
 * All of it belongs to a session of the daemon, and is on record here, so that
 * after a restart it is made again: lists of own memory at once, attachments as
 * soon as their daemon lets, lists of attached memory after them. That goes on
 * behind the session (client_session.c): rooms need none of it, and another
 * daemon's absence shall not keep this one's engine waiting. A transfer that
 * names what is not there yet waits, when it may block, or gets -KVD_E_BUSY.
 *
 * What may work later (a peer that is not there yet) is tried again once a
 * second. What never will (the attached session itself is gone: its secret died
 * with it) fails for good, and its lists with it; the engine must get a new key.
 *
 * The number of an attachment is the caller's for as long as the client lives;
 * the daemon's may be another one after each restart, so the two are kept apart.
 */
#include "lib/client.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define DESCS_IN_LINE 1024u
_Static_assert(sizeof(struct kvd_desc) == 4 * sizeof(uint64_t), "a row of four");
/* Numbers of our own, for when the daemon's is another attachment's already. */
#define OWN_NUMBERS (UINT64_C(1) << 40)

struct client_attach {
	struct client_object object;
	uint64_t number; /* the caller's */
	char *endpoint;	 /* NULL: our own daemon, whichever it is */
	struct kvd_session_key key;
};

/* The daemon's patience with the peer is the caller's with us. */
static void text_timeout(const struct kvd_client *client, struct client_text *text,
			 const struct kvd_call *call)
{
	int ms = call && call->timeout_ms ? call->timeout_ms : client->timeout_ms;

	client_text_int(text, "timeout_ms",
			ms > 0 && ms < 600000 ? (uint64_t)ms : 600000);
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

int kvd_session_key(struct kvd_client *client, int timeout_ms,
		    struct kvd_session_key *key_p)
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

/* ---- attachments --------------------------------------------------------------- */

static struct client_attach *attach_of(struct client_object *object)
{
	return container_of(object, struct client_attach, object);
}

static void attach_fini(struct client_object *object)
{
	struct client_attach *attach = attach_of(object);

	mem_free(attach->endpoint);
	mem_free(attach);
}

static struct client_attach *attach_find(struct kvd_client *client, uint64_t number)
{
	struct client_object *object;

	list_foreach(object, &client->objects[CLIENT_ATTACH], link) {
		if (attach_of(object)->number == number)
			return attach_of(object);
	}
	return NULL; /* 0 is the number of those that have none yet, and own memory */
}

/* The daemon's own number where that is free: whoever speaks the protocol himself
 * (kvd_command) can use it until the daemon is restarted. */
static uint64_t number_new(struct kvd_client *client, uint64_t id)
{
	uint64_t number = id;

	for (uint64_t own = OWN_NUMBERS; attach_find(client, number); own++)
		number = own;
	return number;
}

static void attach_op(struct client_attach *attach, struct client_op *op,
		      const struct kvd_call *call)
{
	struct kvd_client *client = attach->object.client;

	client_op_begin(client, op, "peer.attach");
	client_text_str(&op->text, "endpoint",
			attach->endpoint ? attach->endpoint : client->info.endpoint);
	client_text_u64(&op->text, "session", attach->key.epoch);
	client_text_str(&op->text, "secret", attach->key.secret);
	text_timeout(client, &op->text, call);
	op->object = &attach->object;
}

int client_attach_again(struct client_object *object)
{
	struct client_op op;

	attach_op(attach_of(object), &op, NULL);
	return client_session_again(&op);
}

static int attach_made(struct client_request *req, int result, const cJSON *reply)
{
	struct client_attach *attach = attach_of(req->object);
	uint64_t *number_p = req->out;

	if (req->late || client_object_phase(req->object) != CLIENT_MAKING)
		return result;
	if (!result && !client_get_u64(reply, "attach", &attach->object.id))
		result = client_fail(req->client, KVD_E_PROTO,
				     "peer.attach: the reply names no attach");
	if (!result) {
		attach->object.serial = req->client->serial;
		if (!attach->number)
			attach->number = number_new(req->client, attach->object.id);
		if (number_p)
			*number_p = attach->number;
	}
	client_object_enter(req->object, result ? CLIENT_FAILED : CLIENT_READY);
	return result;
}

static int attach_new(struct kvd_client *client, const char *endpoint,
		      const struct kvd_session_key *key, struct client_attach **attach_p)
{
	struct client_attach *attach = mem_zalloc(sizeof(*attach));

	if (!attach)
		return client_fail_nomem(client);
	client_object_init(client, &attach->object, CLIENT_ATTACH, attach_fini);
	attach->key = *key;
	attach->key.secret[sizeof(attach->key.secret) - 1] = '\0';
	attach->endpoint = endpoint ? mem_strdup(endpoint) : NULL;
	if (endpoint && !attach->endpoint) {
		client_object_unref(&attach->object);
		return client_fail_nomem(client);
	}
	*attach_p = attach;
	return 0;
}

int kvd_peer_attach(struct kvd_client *client, const char *endpoint,
		    const struct kvd_session_key *key, int timeout_ms, uint64_t *attach_p)
{
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_attach *attach = NULL;
	struct client_op op;
	int r = client_begin(client, &call);

	if (!r)
		r = attach_new(client, endpoint, key, &attach);
	if (r)
		return r;
	attach_op(attach, &op, &call);
	op.finish = attach_made;
	op.out = attach_p;
	r = client_op_run(client, &op, &call);
	if (r)
		client_object_unref(&attach->object);
	return r;
}

int kvd_peer_attach_begin(struct kvd_client *client, const char *endpoint,
			  const struct kvd_session_key *key, const struct kvd_call *call,
			  uint64_t *attach_p)
{
	struct client_attach *attach = NULL;
	struct client_op op;
	int r = client_enter(client, false);

	if (!r && client_blocks(call))
		r = client_fail(client, KVD_E_INVAL,
				"kvd_peer_attach_begin: on_done is "
				"required");
	if (!r)
		r = attach_new(client, endpoint, key, &attach);
	if (r)
		return r;
	attach->number = number_new(client, OWN_NUMBERS);
	*attach_p = attach->number;
	attach_op(attach, &op, call);
	op.finish = attach_made;
	r = client_op_run(client, &op, call);
	if (r)
		client_object_unref(&attach->object);
	return r;
}

/* ---- made again, or not yet ------------------------------------------------------- */

int client_prepared(struct kvd_client *client, const struct client_object *object,
		    const char *what, const struct kvd_call *call)
{
	int ms = call && call->timeout_ms ? call->timeout_ms : client->timeout_ms;
	uint64_t until = client_now_ns() + (uint64_t)(ms < 0 ? 0 : ms) * 1000000u;

	if (client_object_phase(object) == CLIENT_FAILED && object->lost)
		return client_fail(client, KVD_E_STATE,
				   "%s: could not be made again after a restart", what);
	while (client_object_phase(object) == CLIENT_READY && !client_object_id(object) &&
	       !kvd_lost(client) && client_blocks(call) &&
	       (ms < 0 || client_now_ns() < until))
		client_conn_turn(client, 10);
	if (client_object_id(object))
		return 0;
	if (client_object_phase(object) == CLIENT_READY)
		return client_fail(client, KVD_E_BUSY,
				   "%s: is being made again after a restart", what);
	return client_fail(client, KVD_E_STATE, "%s: not prepared", what);
}

int client_attach_id(struct kvd_client *client, uint64_t *attach_p,
		     const struct kvd_call *call)
{
	struct client_attach *attach = attach_find(client, *attach_p);
	int r;

	if (!attach) /* of kvd_command() */
		return 0;
	if (client_object_phase(&attach->object) == CLIENT_MAKING)
		return client_fail(client, KVD_E_BUSY, "attach: not answered yet");
	r = client_prepared(client, &attach->object, "attach", call);
	*attach_p = attach->object.id;
	return r;
}

static int attached(struct kvd_client *client, uint64_t attach, bool fresh,
		    const struct kvd_call *call)
{
	struct client_op op;
	int r = client_begin(client, call);

	if (!r)
		r = client_attach_id(client, &attach, call);
	if (r)
		return r;
	client_op_begin(client, &op, "peer.attached");
	client_text_int(&op.text, "attach", attach);
	if (fresh)
		client_text_printf(&op.text, ",\"fresh\":true");
	return client_op_run(client, &op, call);
}

int kvd_peer_attached(struct kvd_client *client, uint64_t attach,
		      const struct kvd_call *call)
{
	return attached(client, attach, false, call);
}

int kvd_peer_refresh(struct kvd_client *client, uint64_t attach,
		     const struct kvd_call *call)
{
	return attached(client, attach, true, call);
}

/* ---- descriptor lists -------------------------------------------------------- */

static void dlist_fini(struct client_object *object)
{
	struct kvd_dlist *dlist = container_of(object, struct kvd_dlist, slot.object);

	client_slot_fini(&dlist->slot);
	mem_free(dlist->table);
	mem_free(dlist);
}

static void row_desc(const struct kvd_dlist *dlist, size_t i, struct kvd_desc *desc)
{
	const uint64_t *row = &dlist->table[i * dlist->columns];

	*desc = (struct kvd_desc){.address = row[0], .bytes = row[1], .count = 1};
	if (dlist->columns < 4)
		return;
	desc->stride = row[2];
	desc->count = row[3] ? row[3] : 1;
}

static void text_descs(struct client_text *text, const struct kvd_dlist *dlist)
{
	struct kvd_desc d;

	client_text_printf(text, ",\"descs\":[");
	for (size_t i = 0; i < dlist->count; i++) {
		row_desc(dlist, i, &d);
		client_text_printf(text, "%s[\"%llu\",%llu", i ? "," : "",
				   (unsigned long long)d.address,
				   (unsigned long long)d.bytes);
		if (d.count > 1)
			client_text_printf(text, ",%llu,%llu",
					   (unsigned long long)d.stride,
					   (unsigned long long)d.count);
		client_text_bytes(text, "]", 1);
	}
	client_text_bytes(text, "]", 1);
}

/* A sealed memfd of u64 quads; -1 with errno. */
static int descs_memfd(const struct kvd_dlist *dlist)
{
	cleanup_close int fd = memfd_create("kvd-dlist", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	cleanup_free uint64_t *quads = mem_calloc(dlist->count, 4 * sizeof(*quads));
	const char *at = (const char *)quads;
	size_t left = dlist->count * 4 * sizeof(*quads);
	struct kvd_desc d;
	ssize_t n;

	if (fd < 0 || !quads)
		return -1;
	for (size_t i = 0; i < dlist->count; i++) {
		row_desc(dlist, i, &d);
		quads[4 * i] = htole64(d.address);
		quads[4 * i + 1] = htole64(d.bytes);
		quads[4 * i + 2] = htole64(d.stride);
		quads[4 * i + 3] = htole64(d.count);
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

int client_dlist_new(struct kvd_client *client, uint64_t attach, const uint64_t *rows,
		     size_t count, size_t columns, struct kvd_dlist **dlist_p)
{
	struct kvd_dlist *dlist = mem_zalloc(sizeof(*dlist));
	size_t bytes;

	if (!dlist)
		return client_fail_nomem(client);
	client_object_init(client, &dlist->slot.object, CLIENT_DLIST, dlist_fini);
	if (!__builtin_mul_overflow(count, columns * sizeof(*rows), &bytes))
		dlist->table = mem_dup(rows, bytes);
	if (!dlist->table) {
		client_object_unref(&dlist->slot.object);
		return client_fail_nomem(client);
	}
	dlist->attach = attach;
	dlist->count = dlist->rows = count;
	dlist->columns = columns;
	if (columns == 4)
		for (size_t i = 0; i < count; i++)
			dlist->rows += rows[4 * i + 3] ? rows[4 * i + 3] - 1 : 0;
	*dlist_p = dlist;
	return 0;
}

/* *fd_p: the caller's to close once the request is queued. */
static int dlist_op(struct kvd_dlist *dlist, uint64_t attach, struct client_op *op,
		    int *fd_p)
{
	struct kvd_client *client = dlist->slot.object.client;

	if (dlist->count > DESCS_IN_LINE) {
		*fd_p = descs_memfd(dlist);
		if (*fd_p < 0)
			return client_fail(client, KVD_E_NOMEM,
					   "a memfd for %zu descriptors: %s",
					   dlist->count, strerror(errno));
	}
	client_op_begin(client, op, "dlist.prep");
	if (attach)
		client_text_int(&op->text, "peer", attach);
	if (*fd_p >= 0) {
		client_text_int(&op->text, "fd", 0);
		client_text_int(&op->text, "count", dlist->count);
		op->fds = fd_p;
		op->fd_count = 1;
	} else {
		text_descs(&op->text, dlist);
	}
	op->object = &dlist->slot.object;
	return 0;
}

/* 1: its attachment is not there yet. */
int client_dlist_again(struct client_object *object)
{
	struct kvd_dlist *dlist = container_of(object, struct kvd_dlist, slot.object);
	struct client_attach *attach =
		dlist->attach ? attach_find(object->client, dlist->attach) : NULL;
	cleanup_close int fd = -1;
	struct client_op op;
	int r;

	if (dlist->attach &&
	    (!attach || client_object_phase(&attach->object) == CLIENT_FAILED))
		return client_fail(object->client, KVD_E_NOTFOUND,
				   "its attachment could not be made again");
	if (attach && !client_object_id(&attach->object))
		return 1;
	r = dlist_op(dlist, attach ? attach->object.id : 0, &op, &fd);
	return r ? r : client_session_again(&op);
}

int kvd_dlist_prep(struct kvd_client *client, uint64_t attach,
		   const struct kvd_desc *descs, size_t count,
		   const struct kvd_call *call, struct kvd_dlist **dlist_p)
{
	cleanup_close int fd = -1;
	struct kvd_dlist *dlist = NULL;
	struct client_op op;
	uint64_t id = attach;
	int r = client_begin(client, call);

	*dlist_p = NULL;
	if (!r && attach)
		r = client_attach_id(client, &id, call);
	if (!r)
		/* a kvd_desc is a row of four */
		r = client_dlist_new(client, attach,
				     (const uint64_t *)(const void *)descs, count, 4,
				     &dlist);
	if (r)
		return r;
	*dlist_p = dlist;
	r = dlist_op(dlist, id, &op, &fd);
	op.finish = client_object_made;
	if (!r)
		r = client_op_run(client, &op, call);
	if (r) {
		*dlist_p = NULL;
		client_object_unref(&dlist->slot.object);
	}
	return r;
}

int kvd_dlist_free(struct kvd_dlist *dlist, const struct kvd_call *call)
{
	struct client_object *object = &dlist->slot.object;
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
