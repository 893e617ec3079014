/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptor lists: rows of memory that transfers name. A list is sent by the
 * submission ring in its memory layout, and later entries of the ring can name it at
 * once. A list that does not fit (too long for the arena, all numbers in use) is sent
 * over the socket, in a memfd; the daemon numbers it, so transfers can name it after the
 * reply. The rows are kept here, so that the list can be prepared again in the next
 * session (client_peer.c decides when).
 */
#include "lib/client.h"

#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "proto/kvd_ring.h"

_Static_assert(sizeof(struct kvd_desc) == 4 * sizeof(uint64_t), "a row of four");

static void dlist_fini(struct client_object *object)
{
	struct kvd_dlist *dlist = container_of(object, struct kvd_dlist, slot.object);

	client_slot_fini(&dlist->slot);
	mem_free(dlist->table);
	mem_free(dlist);
}

/* A sealed memfd of u64 quads; -1 with errno. */
static int descs_memfd(const struct kvd_dlist *dlist)
{
	cleanup_close int fd = memfd_create("kvd-dlist", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	cleanup_free uint64_t *quads = mem_calloc(dlist->count, 4 * sizeof(*quads));
	const char *at = (const char *)quads;
	size_t left = dlist->count * 4 * sizeof(*quads);
	bool strided = dlist->columns == 4;
	ssize_t n;

	if (fd < 0 || !quads)
		return -1;
	for (size_t i = 0; i < dlist->count; i++) {
		const uint64_t *row = &dlist->table[i * dlist->columns];
		uint64_t *quad = &quads[4 * i];

		quad[0] = htole64(row[0]);
		quad[1] = htole64(row[1]);
		quad[2] = htole64(strided ? row[2] : 0);
		quad[3] = htole64(strided && row[3] ? row[3] : 1);
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

static int dlist_new(struct kvd_client *client, uint64_t attach, const uint64_t *rows,
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
	client_slot_init(&dlist->slot, 0);
	dlist->attach = attach;
	dlist->count = dlist->rows = count;
	dlist->columns = columns;
	if (columns == 4)
		for (size_t i = 0; i < count; i++)
			dlist->rows += rows[4 * i + 3] ? rows[4 * i + 3] - 1 : 0;
	*dlist_p = dlist;
	return 0;
}

/* *fd_p: closed by the caller after the request is queued. */
static int dlist_op(struct kvd_dlist *dlist, uint64_t attach, struct client_op *op,
		    int *fd_p)
{
	struct kvd_client *client = dlist->slot.object.client;

	*fd_p = descs_memfd(dlist);
	if (*fd_p < 0)
		return client_fail(client, KVD_E_NOMEM, "a memfd for %zu descriptors: %s",
				   dlist->count, strerror(errno));
	client_op_begin(client, op, "dlist.prep");
	out_some(&op->text, "peer", attach);
	out_number(&op->text, "fd", 0);
	out_number(&op->text, "count", dlist->count);
	op->fds = fd_p;
	op->fd_count = 1;
	op->object = &dlist->slot.object;
	return 0;
}

/* 1: its attachment is not available yet. */
int client_dlist_again(struct client_object *object)
{
	struct kvd_dlist *dlist = container_of(object, struct kvd_dlist, slot.object);
	cleanup_close int fd = -1;
	struct client_op op;
	uint64_t id = 0;
	int r = 0;

	if (dlist->attach)
		r = client_attach_again_id(object->client, dlist->attach, &id);
	if (!r)
		r = dlist_op(dlist, id, &op, &fd);
	return r ? r : client_session_again(&op);
}

/* ---- preparing ---------------------------------------------------------------- */

static int client_dlist_ring_put(struct kvd_dlist *dlist, uint64_t attach)
{
	struct client_slot *slot = &dlist->slot;
	struct client_part part = {dlist->table,
				   dlist->count * dlist->columns * sizeof(uint64_t)};
	struct kvd_ring_entry entry = {.op = KVD_RING_LIST,
				       .a = attach,
				       .n0 = (uint32_t)dlist->count,
				       .n1 = (uint32_t)dlist->columns};

	return client_slot_make(slot, &entry, &part, 1, &slot->object);
}

static int list_made(struct client_request *req, int result, const cJSON *reply)
{
	struct client_object *object = req->object;

	if (result == -KVD_E_LOST) { /* prepared in the next session */
		object->serial = 0;
		client_object_enter(object, CLIENT_READY);
		return result;
	}
	result = client_object_made(req, result, reply);
	if (result)
		client_slot_refused(container_of(object, struct client_slot, object));
	return result;
}

static int client_dlist_socket_put(struct kvd_dlist *dlist, uint64_t attach)
{
	struct kvd_call call = client_never_waits;
	cleanup_close int fd = -1;
	struct client_op op;
	int r;

	client_object_enter(&dlist->slot.object, CLIENT_MAKING);
	call.timeout_ms = -1;
	r = dlist_op(dlist, attach, &op, &fd);
	if (r)
		return r;
	op.finish = list_made;
	return client_op_run(dlist->slot.object.client, &op, &call);
}

int kvd_dlist_prep(struct kvd_client *client, uint64_t attach, const void *rows,
		   size_t count, size_t columns, struct kvd_dlist **dlist_p)
{
	struct kvd_dlist *dlist = NULL;
	uint64_t id = attach;
	int r = client_ring_begin(client);

	*dlist_p = NULL;
	if (!r && (columns < 2 || columns > 4 || !count || count > UINT32_MAX))
		r = client_fail(client, KVD_E_INVAL,
				"rows: %zu with %zu columns; 2 to 4 columns", count,
				columns);
	if (!r && attach)
		r = client_attach_id(client, &id, &client_never_waits);
	if (!r)
		r = dlist_new(client, attach, rows, count, columns, &dlist);
	if (r)
		return r;
	r = client_dlist_ring_put(dlist, id);
	if (r == -KVD_E_TOOBIG || r == -KVD_E_LIMIT)
		r = client_dlist_socket_put(dlist, id);
	if (r) {
		client_object_unref(&dlist->slot.object);
		return r;
	}
	*dlist_p = dlist;
	return 0;
}

int kvd_dlist_release(struct kvd_dlist *dlist)
{
	return client_slot_release(&dlist->slot);
}

/* ---- state and errors ---------------------------------------------------------- */

int kvd_dlist_state(const struct kvd_dlist *dlist)
{
	const struct client_object *object = &dlist->slot.object;
	struct kvd_room_status st;

	if (client_object_phase(object) == CLIENT_FAILED)
		return dlist->slot.error ? -dlist->slot.error : -KVD_E_STATE;
	if (!client_object_id(object))
		return -KVD_E_BUSY;
	if (!dlist->slot.numbered || dlist->slot.map != object->client->map)
		return 1;
	if (client_slot_read(&dlist->slot, &st))
		return -KVD_E_STATE;
	if (st.state == KVD_FAILED)
		return st.error ? -st.error : -KVD_E_STATE;
	return st.state == KVD_SUCCESS;
}

int kvd_dlist_error(const struct kvd_dlist *dlist, int timeout_ms,
		    struct kvd_error *error_p)
{
	return client_slot_error(&dlist->slot, timeout_ms, error_p);
}

/* The refusal of a list, with its text in kvd_last_error(). */
static int client_dlist_refused(const struct kvd_dlist *dlist, int code, int timeout_ms)
{
	struct kvd_client *client = dlist->slot.object.client;
	struct kvd_error error;

	if (kvd_dlist_error(dlist, timeout_ms, &error) || error.code != -code)
		return client_fail(client, -code, "the list was not prepared");
	client->error = error;
	return code;
}

int kvd_dlist_wait(struct kvd_dlist *dlist, int timeout_ms)
{
	struct kvd_client *client = dlist->slot.object.client;
	uint64_t until = client_until_ns(client, timeout_ms), pause_ns = 0;
	struct kvd_call call = {.timeout_ms = timeout_ms};
	int r = client_begin(client, &call);

	while (!r) {
		r = kvd_dlist_state(dlist);
		if (r == 1)
			return 0;
		if (r && r != -KVD_E_BUSY)
			return client_dlist_refused(dlist, r, timeout_ms);
		if (clock_ns() >= until)
			return client_fail(client, KVD_E_NOREPLY,
					   "the list is not prepared yet");
		if (r) /* restored objects are created in turns */
			client_conn_turn(client, 0);
		r = kvd_lost(client) ? client_fail(client, KVD_E_LOST,
						   "no connection to %s", client->path)
				     : 0;
		client_pause(client, &pause_ns);
	}
	return r;
}
