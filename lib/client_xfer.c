/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One-sided transfers: calls that never wait, through the submission ring
 * (client_ring.c). Errors that need no daemon are returned by the call: a row index
 * outside its list, rows of different number or length, a list of the wrong side. Errors
 * that only the daemon can detect (unregistered memory, a lost peer) show in the state. A
 * handle is usable at once, because its entry precedes those that use it in the ring. It
 * is polled like a room, by its slot of the status page.
 */
#include "lib/client.h"

#include "proto/kvd_ring.h"

int kvd_xfer_prepare(struct kvd_client *client)
{
	return client_ring_begin(client);
}

/* ---- making ------------------------------------------------------------------- */

static int check_index(struct kvd_client *client, const char *what, const uint32_t *index,
		       size_t count, const struct kvd_dlist *dlist)
{
	for (size_t i = 0; index && i < count; i++)
		if (index[i] >= dlist->rows)
			return client_fail(client, KVD_E_RANGE, "%s[%zu]: row %u of %llu",
					   what, i, index[i],
					   (unsigned long long)dlist->rows);
	return 0;
}

/* Length of a row, if equal for all entries of the list; 0: the daemon checks. */
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

static int check_args(struct kvd_client *client, const struct kvd_xfer_args *a)
{
	int r;

	if (a->op != KVD_READ && a->op != KVD_WRITE)
		return client_fail(client, KVD_E_INVAL, "op: %d", (int)a->op);
	if (!a->local || !a->remote)
		return client_fail(client, KVD_E_INVAL, "local and remote: required");
	if (a->local->attach || !a->remote->attach)
		return client_fail(client, KVD_E_INVAL,
				   "%s: must be a list of the %s side",
				   a->local->attach ? "local" : "remote",
				   a->local->attach ? "own" : "remote");
	r = check_index(client, "local_index", a->local_index, a->local_index_count,
			a->local);
	if (!r)
		r = check_index(client, "remote_index", a->remote_index,
				a->remote_index_count, a->remote);
	if (!r && a->notif)
		r = client_notif_check(client, a->notif_bytes);
	if (!r)
		r = check_rows(client, a);
	if (!r)
		r = client_prepared(client, &a->local->slot.object, "local");
	return r ? r : client_prepared(client, &a->remote->slot.object, "remote");
}

static int make_put(const struct kvd_xfer_args *a, struct kvd_xfer *xfer)
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

	return client_slot_make(&xfer->slot, &entry, parts, ARRAY_LEN(parts),
				&xfer->slot.object);
}

static void xfer_fini(struct client_object *object)
{
	struct kvd_xfer *xfer = container_of(object, struct kvd_xfer, slot.object);

	client_slot_fini(&xfer->slot);
	mem_free(xfer);
}

int kvd_xfer_make(struct kvd_client *client, const struct kvd_xfer_args *args,
		  struct kvd_xfer **xfer_p)
{
	struct kvd_xfer *xfer;
	int r = client_ring_begin(client);

	*xfer_p = NULL;
	if (!r)
		r = check_args(client, args);
	if (r)
		return r;
	xfer = mem_zalloc(sizeof(*xfer));
	if (!xfer)
		return client_fail_nomem(client);
	client_object_init(client, &xfer->slot.object, CLIENT_XFER, xfer_fini);
	client_slot_init(&xfer->slot, 0);
	r = make_put(args, xfer);
	if (r) {
		client_object_unref(&xfer->slot.object);
		return r;
	}
	*xfer_p = xfer;
	return 0;
}

/* ---- their life --------------------------------------------------------------- */

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
	if (!r)
		r = client_notif_check(client, part.bytes);
	if (r)
		return r;
	state = client_slot_state(slot);
	posted = atomic_load(&slot->posted);
	if (state != KVD_FAILED && state != KVD_SUCCESS && posted)
		return client_fail(client, KVD_E_STATE, "xfer: not ended yet");
	entry.a = slot->object.id;
	/* first, for readers: the daemon's word follows it */
	atomic_store(&slot->posted, true);
	atomic_store(&slot->gen, entry.gen);
	r = client_ring_put(client, &entry, &part, 1, &slot->object);
	if (r) { /* never submitted: unchanged; undone in reverse order */
		atomic_store(&slot->gen, gen);
		atomic_store(&slot->posted, posted);
	}
	return r;
}

int kvd_xfer_cancel(struct kvd_xfer *xfer)
{
	struct client_object *object = &xfer->slot.object;
	struct kvd_client *client = object->client;
	struct kvd_ring_entry entry = {.op = KVD_RING_CANCEL, .a = object->id};
	int r = client_ring_begin(client);

	if (!r)
		r = client_object_usable(object, "xfer");
	return r ? r : client_ring_put(client, &entry, NULL, 0, NULL);
}

int kvd_xfer_release(struct kvd_xfer *xfer)
{
	return client_slot_release(&xfer->slot);
}

/* ---- state and errors ---------------------------------------------------------- */

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
	/* a transfer that was never posted ends only by a refusal */
	if (!atomic_load(&xfer->slot.posted))
		return client_slot_state(&xfer->slot);
	return client_slot_wait(&xfer->slot, KVD_SUCCESS, timeout_ms);
}

int kvd_xfer_error(const struct kvd_xfer *xfer, int timeout_ms, struct kvd_error *error_p)
{
	return client_slot_error(&xfer->slot, timeout_ms, error_p);
}
