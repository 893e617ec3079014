/* SPDX-License-Identifier: Apache-2.0 */
/* commands_ring: session.share, the command of the submission ring. */
#include <errno.h>

#include "daemon/request/commands.h"
#include "proto/out.h"
#include "daemon/request/ring.h"
#include "daemon/session/session.h"

struct share_args {
	uint32_t entries;
	uint64_t arena_bytes;
};

/* An entry with an unknown op ends the session, so an engine needs this list. */
static void put_ops(struct text *out, const struct ring *ring)
{
	out_array(out, "ops");
	for (unsigned int op = 1; op < RING_OPS_MAX; op++) {
		if (ring->verbs[op])
			out_number(out, NULL, op);
	}
	out_close(out, ']');
}

/* A repeated call returns the same memory and ignores the size. */
static int session_share_run(struct request *req)
{
	const struct share_args *args = request_args(req);
	struct reply reply;
	struct ring *ring;
	struct text *out;
	int r;

	if (args->entries & (args->entries - 1))
		return err_raise(ERR_INVAL, "entries: %u is not a power of two",
				 args->entries);
	ring = ring_need(req->session);
	if (!ring)
		return err_pass(-ENOMEM);
	r = ring->shared ? 0 : ring_share(ring, args->entries, args->arena_bytes);
	if (r < 0)
		return err_pass(r);
	out = reply_begin(&reply, req);
	out_number(out, "version", KVD_RING_VERSION);
	out_number(out, "entries", ring->entries);
	out_number(out, "arena_bytes", ring->arena_bytes);
	out_number(out, "first_slot", SESSION_SLOTS);
	out_number(out, "slots", SESSION_ENGINE_SLOTS);
	put_ops(out, ring);
	return reply_end_fds(&reply, ring->fds, RING_FDS);
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
