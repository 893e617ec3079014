/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Peers and attachments: the sessions of other engines that transfers address. They
 * belong to a session of the daemon and are recorded here, so that they are restored
 * after a restart: lists of own memory at once, attachments as soon as their daemon
 * permits, lists of attached memory after them. This happens after the session is up
 * (client_session.c): rooms do not need it, and the absence of another daemon must not
 * delay the engine of this one. A transfer that names an object not restored yet returns
 * -KVD_E_BUSY.
 *
 * Failures that may pass (a peer that is not connected yet) are retried once a second.
 * Permanent ones (the attached session has ended, and its secret with it) fail the
 * attachment and its lists; the engine needs a new key.
 *
 * The caller's number of an attachment is valid for the life of the client. The daemon's
 * may change with each restart, so the two are kept separately.
 */
#include "daemon/base/clock.h"
#include "lib/client.h"

#include <string.h>

/* Of the client's numbers: the daemon's, of an attachment by kvd_command(), are lower. */
#define OWN_NUMBERS (UINT64_C(1) << 40)

struct client_attach {
	struct client_object object;
	uint64_t number; /* the caller's */
	char *endpoint;	 /* NULL: the local daemon, whichever instance */
	struct kvd_session_key key;
};

static int key_reply(struct client_request *req, const cJSON *reply)
{
	const cJSON *sessions = cJSON_GetObjectItemCaseSensitive(reply, "sessions"), *s;
	struct kvd_session_key *key = req->out;
	const char *secret;
	uint64_t id;

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
	return client_op_ask(client, &op, &call, key_reply, key_p);
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
	return NULL;
}

static void attach_op(struct client_attach *attach, struct client_op *op,
		      const struct kvd_call *call)
{
	struct kvd_client *client = attach->object.client;
	int ms = call && call->timeout_ms ? call->timeout_ms : client->timeout_ms;

	client_op_begin(client, op, "peer.attach");
	out_text(&op->text, "endpoint",
		 attach->endpoint ? attach->endpoint : client->info.endpoint);
	out_id(&op->text, "session", attach->key.epoch);
	out_text(&op->text, "secret", attach->key.secret);
	/* The daemon waits for the peer as long as the caller waits for the daemon. */
	out_number(&op->text, "timeout_ms", ms > 0 && ms < 600000 ? ms : 600000);
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
	bool again = client_object_phase(req->object) == CLIENT_READY;

	if (req->late || (!again && client_object_phase(req->object) != CLIENT_MAKING))
		return result;
	if (!result && !client_get_u64(reply, "attach", &attach->object.id))
		result = client_fail(req->client, KVD_E_PROTO,
				     "peer.attach: the reply names no attach");
	if (!result)
		attach->object.serial = req->client->serial;
	if (!again)
		client_object_enter(req->object, result ? CLIENT_FAILED : CLIENT_READY);
	return result;
}

/* An attachment of the session, which is attached again under its number; or NULL. */
static struct client_attach *attach_same(struct kvd_client *client, const char *endpoint,
					 const struct kvd_session_key *key)
{
	struct client_object *object;

	list_foreach(object, &client->objects[CLIENT_ATTACH], link) {
		struct client_attach *attach = attach_of(object);

		if (client_object_id(object) && attach->key.epoch == key->epoch &&
		    strcmp(attach->key.secret, key->secret) == 0 &&
		    strcmp(attach->endpoint ? attach->endpoint : "",
			   endpoint ? endpoint : "") == 0)
			return attach;
	}
	return NULL;
}

static int attach_new(struct kvd_client *client, const char *endpoint,
		      const struct kvd_session_key *key, struct client_attach **attach_p)
{
	struct client_attach *attach = mem_zalloc(sizeof(*attach));

	if (!attach)
		return client_fail_nomem(client);
	client_object_init(client, &attach->object, CLIENT_ATTACH, attach_fini);
	attach->number = OWN_NUMBERS + client->attaches++;
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
		    const struct kvd_session_key *key, const struct kvd_call *call,
		    uint64_t *attach_p)
{
	struct client_attach *attach = NULL, *same = NULL;
	struct client_op op;
	int r = client_begin(client, call);

	if (!r)
		same = attach = attach_same(client, endpoint, key);
	if (!r && !same)
		r = attach_new(client, endpoint, key, &attach);
	if (r)
		return r;
	*attach_p = attach->number;
	attach_op(attach, &op, call);
	op.finish = attach_made;
	r = client_op_run(client, &op, call);
	if (r && !same)
		client_object_unref(&attach->object);
	return r;
}

/* ---- made again, or not yet ------------------------------------------------------- */

int client_prepared(struct kvd_client *client, const struct client_object *object,
		    const char *what)
{
	enum client_phase phase = client_object_phase(object);

	if (client_object_id(object))
		return 0;
	if (phase == CLIENT_FAILED && object->lost)
		return client_fail(client, KVD_E_STATE,
				   "%s: could not be restored after a restart", what);
	if (phase == CLIENT_READY)
		return client_fail(client, KVD_E_BUSY,
				   "%s: is being restored after a restart", what);
	if (phase == CLIENT_MAKING)
		return client_fail(client, KVD_E_BUSY, "%s: no reply yet", what);
	return client_fail(client, KVD_E_STATE, "%s: not prepared", what);
}

/* A blocking call waits for one that is being restored. */
static void attach_wait(const struct client_attach *attach, const struct kvd_call *call)
{
	const struct client_object *object = &attach->object;
	struct kvd_client *client = object->client;
	uint64_t until = client_until_ns(client, call ? call->timeout_ms : 0);

	while (client_object_phase(object) == CLIENT_READY && !client_object_id(object) &&
	       !kvd_lost(client) && clock_ns() < until)
		client_conn_turn(client, 10);
}

int client_attach_id(struct kvd_client *client, uint64_t *attach_p,
		     const struct kvd_call *call)
{
	struct client_attach *attach = attach_find(client, *attach_p);
	int r;

	if (!attach) /* of kvd_command() */
		return 0;
	if (client_blocks(call))
		attach_wait(attach, call);
	r = client_prepared(client, &attach->object, "attach");
	*attach_p = attach->object.id;
	return r;
}

int client_attach_again_id(struct kvd_client *client, uint64_t number, uint64_t *attach_p)
{
	struct client_attach *attach = attach_find(client, number);

	if (!attach || client_object_phase(&attach->object) == CLIENT_FAILED)
		return client_fail(client, KVD_E_NOTFOUND,
				   "its attachment could not be restored");
	*attach_p = client_object_id(&attach->object);
	return *attach_p ? 0 : 1;
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
	out_number(&op.text, "attach", attach);
	if (fresh)
		out_bool(&op.text, "fresh", true);
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
