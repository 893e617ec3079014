/* SPDX-License-Identifier: Apache-2.0 */
/* commands_ring: session.share, the command of the submission ring. */
#include <errno.h>

#include "daemon/request/commands.h"
#include "daemon/request/ring.h"
#include "daemon/session/session.h"

struct share_args {
	uint32_t entries;
	uint64_t arena_bytes;
};

/* An entry with an unknown op ends the session, so an engine needs this list. */
static bool add_ops(cJSON *result, const struct ring *ring)
{
	cJSON *ops = cJSON_AddArrayToObject(result, "ops");

	for (unsigned int op = 1; ops && op < RING_OPS_MAX; op++) {
		cJSON *number = ring->verbs[op] ? cJSON_CreateNumber(op) : NULL;

		if (ring->verbs[op] && (!number || !cJSON_AddItemToArray(ops, number))) {
			cJSON_Delete(number);
			return false;
		}
	}
	return ops;
}

static bool add_ring(cJSON *result, const struct ring *ring)
{
	return cJSON_AddNumberToObject(result, "version", KVD_RING_VERSION) &&
	       cJSON_AddNumberToObject(result, "entries", ring->entries) &&
	       cJSON_AddNumberToObject(result, "arena_bytes",
				       (double)ring->arena_bytes) &&
	       cJSON_AddNumberToObject(result, "first_slot", SESSION_SLOTS) &&
	       cJSON_AddNumberToObject(result, "slots", SESSION_ENGINE_SLOTS) &&
	       add_ops(result, ring);
}

/* A repeated call returns the same memory and ignores the size. */
static int session_share_run(struct request *req)
{
	const struct share_args *args = request_args(req);
	struct ring *ring;
	cJSON *result;
	int r;

	if (args->entries & (args->entries - 1))
		return err_raise(ERR_INVAL, "entries: %u is not a power of two",
				 args->entries);
	ring = ring_need(req->session);
	if (!ring)
		return err_pass(-ENOMEM);
	r = ring->shared ? 0 : ring_share(ring, args->entries, args->arena_bytes);
	result = r < 0 ? NULL : request_result();
	if (!result)
		return err_pass(r < 0 ? r : -ENOMEM);
	if (!add_ring(result, ring))
		return request_finish(req, result, false);
	request_reply_fds(req, result, ring->fds, RING_FDS);
	return 0;
}

static const struct field session_share_fields[] = {
	F_INT("entries", share_args, entries, DEFAULT(RING_ENTRIES_DEFAULT), 2,
	      RING_ENTRIES_MAX, "Entries of the ring; a power of two; default 512."),
	F_INT("arena_bytes", share_args, arena_bytes, DEFAULT(RING_ARENA_DEFAULT), 4096,
	      RING_ARENA_MAX,
	      "Bytes of the arena for lists and notifications; default 64 MiB. Memory "
	      "is charged when pages are written."),
	F_END,
};

const struct command ring_commands[] = {
	{"session.share", "Create the submission ring of this session (proto/kvd_ring.h)",
	 session_share_fields, 0, session_share_run,
	 "version, entries, arena_bytes, first_slot, slots, ops (numbers of the known "
	 "ops; an entry with another op ends the session); with three descriptors: "
	 "ring, arena, eventfd"},
	{.name = NULL},
};
