/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The calls that never wait: lists, transfers and notifications through the
 * submission ring (client_ring.c).
 *
 * Everything that can be said without the daemon is said in the call: a row index
 * outside its list, rows of unequal number or length, a list of the wrong side.
 * What only the daemon knows (memory that is not registered, a peer that is gone)
 * shows in the state. A handle is usable at once: what it makes stands in the ring
 * before what uses it.
 */
#include "lib/client.h"

#include <string.h>

#include "proto/kvd_ring.h"

/* as the daemon: 1 MiB and what is written in front of it */
#define NOTIF_MAX ((1u << 20) + (64u << 10) + 16u)

static void ignore(void *arg, int result, const struct kvd_reply *reply)
{
	(void)arg;
	(void)result;
	(void)reply;
}

static const struct kvd_call never_waits = {.on_done = ignore};

int kvd_xfer_prepare(struct kvd_client *client)
{
	return client_ring_begin(client);
}

/* ---- lists -------------------------------------------------------------------- */

int kvd_dlist_rows(struct kvd_client *client, uint64_t attach, const uint64_t *rows,
		   size_t count, size_t columns, struct kvd_dlist **dlist_p)
{
	struct kvd_ring_entry entry = {.op = KVD_RING_LIST, .n1 = (uint32_t)columns};
	struct client_part part = {rows, count * columns * sizeof(*rows)};
	struct kvd_dlist *dlist = NULL;
	uint64_t id = attach;
	int r;

	*dlist_p = NULL;
	r = client_ring_begin(client);
	if (!r && (columns < 2 || columns > 4 || !count || count > UINT32_MAX))
		r = client_fail(client, KVD_E_INVAL, "%zu rows of %zu columns", count,
				columns);
	if (!r && attach)
		r = client_attach_id(client, &id, &never_waits);
	if (!r)
		r = client_dlist_new(client, attach, rows, count, columns, &dlist);
	if (!r)
		client_slot_init(&dlist->slot, 0, false);
	if (!r)
		r = client_ring_slot(client, &dlist->slot);
	if (!r) {
		entry.slot = dlist->slot.slot;
		entry.gen = atomic_load(&dlist->slot.gen);
		entry.a = id;
		entry.n0 = (uint32_t)count;
		client_object_enter(&dlist->slot.object, CLIENT_READY);
		r = client_ring_put(client, &entry, &part, 1, &dlist->slot.object);
	}
	if (r) {
		if (dlist)
			client_ring_unmade(&dlist->slot);
		return r;
	}
	*dlist_p = dlist;
	return 0;
}

int kvd_dlist_state(const struct kvd_dlist *dlist)
{
	const struct client_object *object = &dlist->slot.object;
	struct kvd_room_status st;

	if (client_object_phase(object) == CLIENT_FAILED)
		return dlist->slot.error ? -dlist->slot.error : -KVD_E_STATE;
	if (!dlist->slot.numbered || dlist->slot.map != object->client->map)
		return client_object_id(object) ? 1 : 0;
	if (client_slot_read(&dlist->slot, &st))
		return -KVD_E_STATE;
	if (st.state == KVD_FAILED)
		return st.error ? -st.error : -KVD_E_STATE;
	return st.state == KVD_SUCCESS;
}

/* An entry that ends the handle. */
static int drop(struct client_slot *slot)
{
	struct client_object *object = &slot->object;
	struct kvd_client *client = object->client;
	struct kvd_ring_entry entry = {.op = KVD_RING_RELEASE, .a = object->id};
	int r = client_enter(client, false);

	if (r)
		return r;
	if (client_object_phase(object) == CLIENT_READY && !kvd_lost(client) &&
	    object->serial == client->serial) {
		r = client_ring_begin(client);
		if (!r)
			r = client_ring_put(client, &entry, NULL, 0, NULL);
		if (r && r != -KVD_E_LOST)
			return r;
	}
	client_object_unref(object);
	return 0;
}

int kvd_dlist_drop(struct kvd_dlist *dlist)
{
	return drop(&dlist->slot);
}

/* ---- transfers ------------------------------------------------------------------ */

/* Length of a row, where every entry of the list is one; 0: the daemon looks. */
static uint64_t row_bytes(const struct kvd_dlist *dlist, uint64_t row)
{
	return dlist->rows == dlist->count ? dlist->table[row * dlist->columns + 1] : 0;
}

static int check_rows(struct kvd_client *client, const struct kvd_xfer_args *a)
{
	uint64_t n = a->local_index ? a->local_index_count : a->local->rows;
	uint64_t m = a->remote_index ? a->remote_index_count : a->remote->rows;

	if (!n || n != m)
		return client_fail(client, KVD_E_INVAL,
				   "%llu local rows for %llu remote ones",
				   (unsigned long long)n, (unsigned long long)m);
	for (uint64_t i = 0; i < n; i++) {
		uint64_t x = row_bytes(a->local, a->local_index ? a->local_index[i] : i);
		uint64_t y =
			row_bytes(a->remote, a->remote_index ? a->remote_index[i] : i);

		if (x && y && x != y)
			return client_fail(client, KVD_E_INVAL,
					   "row %llu: %llu bytes here, %llu there",
					   (unsigned long long)i, (unsigned long long)x,
					   (unsigned long long)y);
	}
	return 0;
}

static int make_check(struct kvd_client *client, const struct kvd_xfer_args *a)
{
	int r = client_xfer_check(client, a);

	if (!r && (a->local->attach || !a->remote->attach))
		r = client_fail(client, KVD_E_INVAL,
				"%s: a list of the %s side is wanted",
				a->local->attach ? "local" : "remote",
				a->local->attach ? "own" : "remote");
	if (!r && a->notif && a->notif_bytes > NOTIF_MAX)
		r = client_fail(client, KVD_E_TOOBIG,
				"a notification of %zu bytes, at most %u", a->notif_bytes,
				NOTIF_MAX);
	if (!r)
		r = check_rows(client, a);
	if (!r)
		r = client_prepared(client, &a->local->slot.object, "local",
				    &never_waits);
	return r ? r
		 : client_prepared(client, &a->remote->slot.object, "remote",
				   &never_waits);
}

static int make_put(struct kvd_client *client, const struct kvd_xfer_args *a,
		    struct kvd_xfer *xfer)
{
	const struct client_part parts[] = {
		{a->local_index, a->local_index ? a->local_index_count * 4 : 0},
		{a->remote_index, a->remote_index ? a->remote_index_count * 4 : 0},
		{a->notif, a->notif ? a->notif_bytes : 0},
	};
	struct kvd_ring_entry entry = {
		.op = KVD_RING_XFER,
		.flags = (a->op == KVD_WRITE ? KVD_RING_WRITES : 0) |
			 (a->notif ? KVD_RING_NOTIFIES : 0),
		.a = client_object_id(&a->local->slot.object),
		.b = client_object_id(&a->remote->slot.object),
		.n0 = (uint32_t)(parts[0].bytes / 4),
		.n1 = (uint32_t)(parts[1].bytes / 4),
		.bytes = (uint32_t)parts[2].bytes,
	};
	int r = client_ring_slot(client, &xfer->slot);

	if (r)
		return r;
	entry.slot = xfer->slot.slot;
	entry.gen = atomic_load(&xfer->slot.gen);
	client_object_enter(&xfer->slot.object, CLIENT_READY);
	return client_ring_put(client, &entry, parts, ARRAY_LEN(parts),
			       &xfer->slot.object);
}

int kvd_xfer_make(struct kvd_client *client, const struct kvd_xfer_args *args,
		  struct kvd_xfer **xfer_p)
{
	struct kvd_xfer *xfer = NULL;
	int r = client_ring_begin(client);

	*xfer_p = NULL;
	if (!r)
		r = make_check(client, args);
	if (!r)
		r = client_xfer_new(client, &xfer);
	if (!r)
		r = make_put(client, args, xfer);
	if (r) {
		if (xfer)
			client_ring_unmade(&xfer->slot);
		return r;
	}
	*xfer_p = xfer;
	return 0;
}

int kvd_xfer_post(struct kvd_xfer *xfer, const void *notif, size_t notif_bytes)
{
	struct client_slot *slot = &xfer->slot;
	struct kvd_client *client = slot->object.client;
	struct client_part part = {notif, notif ? notif_bytes : 0};
	uint32_t gen = atomic_load(&slot->gen);
	struct kvd_ring_entry entry = {.op = KVD_RING_POST,
				       .flags = notif ? KVD_RING_NOTIFIES : 0,
				       .bytes = (uint32_t)part.bytes,
				       .gen = kvd_ring_next_gen(gen)};
	int r = client_ring_begin(client), state;
	bool posted;

	if (!r)
		r = client_object_usable(&slot->object, "xfer");
	if (!r && part.bytes > NOTIF_MAX)
		r = client_fail(client, KVD_E_TOOBIG,
				"a notification of %zu bytes, at most %u", part.bytes,
				NOTIF_MAX);
	if (r)
		return r;
	state = client_slot_state(slot);
	posted = atomic_load(&slot->posted);
	if (state != KVD_FAILED && state != KVD_SUCCESS && posted)
		return client_fail(client, KVD_E_STATE, "xfer: not ended yet");
	entry.a = slot->object.id;
	/* first, for readers: the daemon's word comes after it */
	atomic_store(&slot->posted, true);
	atomic_store(&slot->gen, entry.gen);
	r = client_ring_put(client, &entry, &part, 1, &slot->object);
	if (r) { /* never asked: it is what it was; undone in the other order */
		atomic_store(&slot->gen, gen);
		atomic_store(&slot->posted, posted);
	}
	return r;
}

int kvd_xfer_stop(struct kvd_xfer *xfer)
{
	struct client_object *object = &xfer->slot.object;
	struct kvd_client *client = object->client;
	struct kvd_ring_entry entry = {.op = KVD_RING_CANCEL, .a = object->id};
	int r = client_ring_begin(client);

	if (!r)
		r = client_object_usable(object, "xfer");
	return r ? r : client_ring_put(client, &entry, NULL, 0, NULL);
}

int kvd_xfer_drop(struct kvd_xfer *xfer)
{
	return drop(&xfer->slot);
}

/* ---- notifications ---------------------------------------------------------------- */

int kvd_notif_post(struct kvd_client *client, uint64_t attach, const void *data,
		   size_t bytes)
{
	struct kvd_ring_entry entry = {.op = KVD_RING_NOTIFY, .bytes = (uint32_t)bytes};
	struct client_part part = {data, bytes};
	int r = client_ring_begin(client);

	if (!r && bytes > NOTIF_MAX)
		r = client_fail(client, KVD_E_TOOBIG,
				"a notification of %zu bytes, at most %u", bytes,
				NOTIF_MAX);
	if (!r)
		r = client_attach_id(client, &attach, &never_waits);
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

/* ---- why ----------------------------------------------------------------------------
 */

static int why_told(struct client_request *req, int result, const cJSON *reply)
{
	struct kvd_error *why = req->out;

	if (result || req->late)
		return result;
	if (cJSON_GetObjectItemCaseSensitive(reply, "error"))
		client_error_parse(why, reply);
	else
		*why = (struct kvd_error){0};
	return 0;
}

static int ask_why(const struct client_slot *slot, int timeout_ms,
		   struct kvd_error *why_p)
{
	struct kvd_client *client = slot->object.client;
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r = client_begin(client, &call);

	if (!r && (slot->object.serial != client->serial || !slot->object.id))
		r = client_fail(client, KVD_E_STATE, "of a session that has ended");
	if (r)
		return r;
	client_op_begin(client, &op, "xfer.state");
	client_text_int(&op.text, "xfer", slot->object.id);
	op.finish = why_told;
	op.out = why_p;
	return client_op_run(client, &op, &call);
}

int kvd_xfer_why(const struct kvd_xfer *xfer, int timeout_ms, struct kvd_error *why_p)
{
	return ask_why(&xfer->slot, timeout_ms, why_p);
}

int kvd_dlist_why(const struct kvd_dlist *dlist, int timeout_ms, struct kvd_error *why_p)
{
	return ask_why(&dlist->slot, timeout_ms, why_p);
}
