/* SPDX-License-Identifier: Apache-2.0 */
/* Notifications: sent through the ring, taken by the socket (as base64). */
#include "lib/client.h"

#include <string.h>

#include "proto/base64.h"
#include "proto/kvd_ring.h"

/* as the daemon: 1 MiB and what is written in front of it */
#define NOTIF_MAX ((1u << 20) + (64u << 10) + 16u)

int client_notif_check(struct kvd_client *client, size_t bytes)
{
	if (bytes <= NOTIF_MAX)
		return 0;
	return client_fail(client, KVD_E_TOOBIG,
			   "a notification of %zu bytes, at most %u", bytes, NOTIF_MAX);
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
	       client->notifs_taken;
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
