/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Notifications: sent through the ring, fetched over the socket (as base64). The daemon
 * delivers each one once. Notifications that arrive after their caller's timeout, or
 * cannot be reported for lack of memory, are therefore kept and reported by the next call
 * with a reply.
 */
#include "lib/client.h"

#include <string.h>

#include "proto/base64.h"
#include "proto/kvd_ring.h"

/* limit of the daemon: 1 MiB plus its header */
#define NOTIF_MAX ((1u << 20) + (64u << 10) + 16u)

int client_notif_check(struct kvd_client *client, size_t bytes)
{
	if (bytes <= NOTIF_MAX)
		return 0;
	return client_fail(client, KVD_E_TOOBIG, "notification: %zu bytes; at most %u",
			   bytes, NOTIF_MAX);
}

int kvd_notif_send(struct kvd_client *client, uint64_t attach, const void *data,
		   size_t bytes)
{
	struct kvd_ring_entry entry = {.op = KVD_RING_NOTIFY, .bytes = (uint32_t)bytes};
	struct client_part part = {data, bytes};
	int r = client_ring_begin(client);

	if (!r)
		r = client_notif_check(client, bytes);
	if (!r)
		r = client_attach_id(client, &attach, &client_never_waits);
	if (r)
		return r;
	entry.a = attach;
	return client_ring_put(client, &entry, &part, 1, NULL);
}

uint64_t kvd_notif_waiting(const struct kvd_client *client)
{
	if (!client->map)
		return 0;
	return __atomic_load_n(&client->map->header->notifs, __ATOMIC_ACQUIRE) -
	       client->notifs_taken + client->notifs_waiting;
}

struct drain {
	void (*on_notif)(void *arg, const char *from, const void *data, size_t bytes);
	void *arg;
	int count;
};

/* The delivered notifications are owned here: move them from the reply to the list. */
static int client_notif_keep(struct kvd_client *client, const cJSON *reply)
{
	cJSON *notifs =
		(cJSON *)(uintptr_t)cJSON_GetObjectItemCaseSensitive(reply, "notifs");

	if (!client->notifs_kept)
		client->notifs_kept = cJSON_CreateArray();
	if (!client->notifs_kept)
		return client_fail_nomem(client);
	while (notifs && notifs->child) {
		cJSON_AddItemToArray(client->notifs_kept,
				     cJSON_DetachItemViaPointer(notifs, notifs->child));
		client->notifs_taken++;
		client->notifs_waiting++;
	}
	return 0;
}

static int tell_first(struct kvd_client *client, struct drain *drain)
{
	cJSON *notif = client->notifs_kept->child;
	const char *from = client_get_str(notif, "from"),
		   *text = client_get_str(notif, "data");
	cleanup_free uint8_t *data = text ? mem_zalloc(strlen(text) + 1) : NULL;
	bool good;
	size_t bytes;

	if (text && !data)
		return client_fail_nomem(client); /* it stays */
	good = from && text && base64_decode(text, strlen(text), data, &bytes);
	if (!good && drain->count)
		return 1; /* reported by the next call: these come first */
	client->notifs_waiting--;
	if (good) {
		client->in_callback = true;
		drain->on_notif(drain->arg, from, data, bytes);
		client->in_callback = false;
		drain->count++;
	}
	cJSON_Delete(cJSON_DetachItemViaPointer(client->notifs_kept, notif));
	return good ? 0
		    : client_fail(client, KVD_E_PROTO,
				  "notif.drain: a notification has an unknown form");
}

static int drained(struct client_request *req, int result, const cJSON *reply)
{
	struct kvd_client *client = req->client;
	int r = result ? result : client_notif_keep(client, reply);

	while (!r && !req->late && client->notifs_kept->child)
		r = tell_first(client, req->out);
	return r < 0 ? r : 0;
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
	return drain.count ? drain.count : r;
}
