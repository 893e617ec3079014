/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Transfers that the peer posts, and this daemon answers.
 *
 * The answer may come in the call of on_request() or any time later; an inbound
 * lives until on_inbound_done(), which peer->finished_ins leads to. in_step()
 * decides when:
 *
 *   WRITE  copied here, COPIED said, CONFIRM heard: only then do the bytes
 *          count, because only then is it sure that the source was live while
 *          our threads read it. Revoked or failed: when our threads have left.
 *   READ   served through the ring: when the last byte is in it. What the peer
 *          does with it no longer depends on the source's memory.
 *   CHECK  with the answer.
 *
 * The peer hears DONE after our own side knows, so a receiver may succeed while
 * its sender fails, never the reverse; and its slot is free before DONE leaves,
 * so that its next request finds room.
 *
 * Numbers of requests rise. A frame for a number that was once open may be late
 * and is ignored; one for a number that never was breaks the protocol.
 */
#include "daemon/transport/shm/shm_private.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"

#define SLOT_MASK (XP_INBOUND_MAX - 1u)

struct shm_in *shm_in_find(struct shm_peer *peer, uint64_t id, bool *late_p)
{
	uint32_t slot = (uint32_t)id & SLOT_MASK;
	struct shm_in *in = slot < peer->in_slots ? peer->ins[slot] : NULL;

	*late_p = id >> SHM_SLOT_BITS <= peer->in_serial;
	return in && in->id == id ? in : NULL;
}

static struct shm_in *in_of(struct xp_inbound *base)
{
	return container_of(base, struct shm_in, base);
}

static void in_free(struct shm_in *in)
{
	list_remove(&in->link);
	shm_flow_fini(&in->flow);
	mem_free_large(in->header_memory, in->base.header_len);
	mem_free(in);
}

/* ---- the step ---- */

static void in_fail(struct shm_in *in, const struct err *why)
{
	if (in->result < 0 || in->finished)
		return;
	in->err = *why;
	in->result = -err_errno(why->code);
}

static void in_fail_last(struct shm_in *in)
{
	struct err err;

	err_take(&err);
	in_fail(in, &err);
}

static void in_finish(struct shm_in *in)
{
	in->finished = true;
	list_push_back(&in->flow.peer->finished_ins, &in->link);
	shm_peer_kick(in->flow.peer);
}

static bool in_succeeded(const struct shm_in *in)
{
	switch (in->base.kind) {
	case XP_CHECK:
		return true;
	case XP_READ:
		return shm_flow_complete(&in->flow);
	case XP_WRITE:
		break;
	}
	return in->base.bytes == 0 || in->confirmed;
}

static void in_step(struct shm_in *in)
{
	struct shm_peer *peer = in->flow.peer;

	if (in->finished || !shm_peer_live(peer))
		return;
	if (in->flow.result < 0)
		in_fail(in, &in->flow.err);
	if (in->result < 0) {
		shm_flow_stop(&in->flow);
		if (!shm_flow_busy(&in->flow))
			in_finish(in);
		return;
	}
	if (!in->answered)
		return;
	if (in->base.kind == XP_WRITE && in->base.bytes > 0 && !in->copied &&
	    shm_flow_complete(&in->flow)) {
		in->copied = true;
		shm_send(peer, &(struct shm_frame){.type = SHM_COPIED, .id = in->id});
	}
	if (in_succeeded(in))
		in_finish(in);
}

static void on_flow(struct shm_flow *flow)
{
	struct shm_in *in = container_of(flow, struct shm_in, flow);

	in->base.moved = shm_flow_moved(flow);
	in_step(in);
	if (!shm_peer_live(flow->peer))
		shm_peer_kick(flow->peer);
}

/* ---- requests ---- */

static int slot_reserve(struct shm_peer *peer, uint32_t slot)
{
	uint32_t size = peer->in_slots ? peer->in_slots : 64;
	struct shm_in **bigger;

	if (slot < peer->in_slots)
		return 0;
	while (size <= slot)
		size *= 2;
	bigger = mem_regrow(peer->ins, size, sizeof(*bigger));
	if (!bigger)
		return err_pass(-ENOMEM);
	memset(bigger + peer->in_slots, 0, (size - peer->in_slots) * sizeof(*bigger));
	peer->ins = bigger;
	peer->in_slots = size;
	return 0;
}

static int request_check(struct shm_peer *peer, uint64_t id, uint8_t kind,
			 size_t header_len)
{
	uint32_t slot = (uint32_t)id & SLOT_MASK;

	if (kind > XP_CHECK)
		return err_raise(ERR_PROTO, "kind %u", kind);
	if (id >> SHM_SLOT_BITS <= peer->in_serial)
		return err_raise(ERR_PROTO, "number %#jx is not after %#jx",
				 (uintmax_t)id,
				 (uintmax_t)peer->in_serial << SHM_SLOT_BITS);
	if (slot < peer->in_slots && peer->ins[slot])
		return err_raise(ERR_PROTO, "slot %u is in use", slot);
	if (peer->in_header_bytes + header_len > SHM_HEADER_BYTES_MAX)
		return err_raise(ERR_PROTO, "over %u bytes of headers at once",
				 SHM_HEADER_BYTES_MAX);
	return 0;
}

static int in_new(struct shm_peer *peer, uint64_t id, size_t body_len, const void *header,
		  size_t header_len, struct shm_in **in_p)
{
	uint32_t slot = (uint32_t)id & SLOT_MASK;
	struct shm_in *in;
	int r = slot_reserve(peer, slot);

	if (r < 0)
		return err_pass(r);
	in = mem_zalloc(sizeof(*in));
	if (!in)
		return err_pass(-ENOMEM);
	in->header_memory = shm_wire_take_frame(peer, body_len);
	in->base.header = header;
	if (!in->header_memory)
		in->base.header = in->header_memory = mem_dup(header, header_len);
	if (!in->header_memory) {
		mem_free(in);
		return err_pass(-ENOMEM);
	}
	in->base.peer = (struct xp_peer *)peer;
	in->base.header_len = header_len;
	in->flow.peer = peer;
	in->id = id;
	list_init(&in->link);
	peer->ins[slot] = in;
	peer->in_count++;
	peer->in_header_bytes += header_len;
	*in_p = in;
	return 0;
}

int shm_on_request(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	uint8_t kind = cursor_get_u8(c);
	uint64_t bytes = cursor_get_u64(c);
	size_t len;
	const void *header = cursor_get_blob(c, XP_HEADER_MAX, &len);
	struct shm_in *in = NULL;
	int r = cursor_check(c, "REQUEST");

	if (r == 0 && cursor_left(c) > 0)
		r = err_raise(ERR_PROTO, "%zu bytes too many", cursor_left(c));
	if (r == 0)
		r = request_check(peer, f->id, kind, len);
	if (r < 0)
		return err_pass(r);
	peer->in_serial = f->id >> SHM_SLOT_BITS;
	if (in_new(peer, f->id, f->body_len, header, len, &in) < 0) {
		struct err err; /* costs this transfer, not the peer */

		err_take(&err);
		shm_send_err(peer, SHM_DONE, f->id, &err);
		return 0;
	}
	in->base.kind = kind;
	in->base.bytes = bytes;
	peer->shm->base.callbacks.on_request(peer->shm->base.callbacks.owner, &in->base);
	return 0;
}

/* ---- answers ---- */

static int sides_check(const struct shm_in *in, const struct xp_sides *sides)
{
	uint64_t bytes = sides && sides->plan ? sides->plan->bytes : 0;

	if (in->base.kind == XP_CHECK && (!sides || !sides->plan))
		return 0;
	if (bytes != in->base.bytes)
		return err_raise(ERR_PLAN, "the initiator's plan has %ju bytes, ours %ju",
				 (uintmax_t)in->base.bytes, (uintmax_t)bytes);
	if (in->base.kind == XP_CHECK || bytes == 0)
		return 0;
	return err_pass(xp_sides_check(sides, true, in->base.kind == XP_WRITE));
}

static int write_begin(struct shm_in *in, const struct xp_sides *sides)
{
	struct shm_peer *peer = in->flow.peer;
	bool direct = shm_sides_direct(peer, sides);
	int r = shm_flow_init(&in->flow, peer, sides, direct, true, on_flow);

	if (r < 0)
		return err_pass(r);
	if (direct)
		return err_pass(shm_flow_direct(&in->flow));
	r = shm_ring_expect(peer);
	if (r < 0)
		return err_pass(r);
	shm_ring_scatter(&in->flow);
	shm_send(peer, &(struct shm_frame){.type = SHM_STAGE, .id = in->id});
	return 0;
}

static int answer_begin(struct shm_in *in, const struct xp_sides *sides)
{
	int r = sides_check(in, sides);

	if (r < 0 || in->base.bytes == 0 || in->base.kind == XP_CHECK)
		return err_pass(r);
	if (in->base.kind == XP_WRITE)
		return err_pass(write_begin(in, sides));
	r = shm_flow_init(&in->flow, in->flow.peer, sides, true, false, on_flow);
	if (r == 0)
		r = shm_ring_gather(&in->flow, in->id, true);
	return err_pass(r);
}

void shm_land(struct xp_inbound *base, const struct xp_sides *sides,
	      const struct err *err)
{
	struct shm_in *in = in_of(base);

	/* canceled or lost meanwhile: on_inbound_done is on its way */
	if (in->answered || in->finished || in->result < 0 ||
	    !shm_peer_live(in->flow.peer))
		return;
	in->answered = true;
	if (err)
		in_fail(in, err);
	else if (answer_begin(in, sides) < 0)
		in_fail_last(in);
	in_step(in);
}

void shm_revoke(struct xp_inbound *base, const struct err *why)
{
	struct shm_in *in = in_of(base);

	in->answered = true;
	in_fail(in, why);
	in_step(in);
}

int shm_on_confirm(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	bool late;
	struct shm_in *in = shm_in_find(peer, f->id, &late);

	(void)c;
	if (!in && late)
		return 0;
	if (!in || !in->copied || in->confirmed)
		return err_raise(ERR_PROTO, "of a transfer that is not copied");
	in->confirmed = true;
	in_step(in);
	return 0;
}

int shm_on_cancel(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_in *in;
	struct err err;
	bool late;
	int r;

	shm_get_err(c, &err);
	r = cursor_check(c, "CANCEL");
	if (r < 0)
		return err_pass(r);
	in = shm_in_find(peer, f->id, &late);
	if (!in && late)
		return 0;
	if (!in || err.code == ERR_OK || in->confirmed)
		return err_raise(ERR_PROTO, "of a transfer that is not open");
	in_fail(in, &err);
	in_step(in);
	return 0;
}

/* ---- the peer's step and end ---- */

static void in_hand_back(struct shm_in *in)
{
	struct shm_peer *peer = in->flow.peer;
	const struct xp_callbacks *cb = &peer->shm->base.callbacks;

	in->base.moved = in->result == 0 ? in->base.bytes : shm_flow_moved(&in->flow);
	in->base.used = in->flow.used;
	if (in->base.kind == XP_CHECK)
		in->base.used.path = "read by the peer";
	shm_flow_fini(&in->flow);
	cb->on_inbound_done(cb->owner, &in->base, in->result < 0 ? &in->err : NULL);
	peer->in_header_bytes -= in->base.header_len;
	peer->in_count--;
}

bool shm_ins_deliver(struct shm_peer *peer)
{
	struct list *n = list_pop_front(&peer->finished_ins);
	struct shm_in *in;

	if (!n)
		return false;
	in = list_entry(n, struct shm_in, link);
	in_hand_back(in);
	peer->ins[in->id & SLOT_MASK] = NULL;
	shm_send_err(peer, SHM_DONE, in->id, in->result < 0 ? &in->err : NULL);
	in_free(in);
	return true;
}

bool shm_ins_stop(struct shm_peer *peer)
{
	bool still = true;

	for (uint32_t i = 0; i < peer->in_slots; i++) {
		if (!peer->ins[i])
			continue;
		shm_flow_stop(&peer->ins[i]->flow);
		still = still && !shm_flow_busy(&peer->ins[i]->flow);
	}
	return still;
}

void shm_ins_end(struct shm_peer *peer)
{
	for (uint32_t i = 0; i < peer->in_slots; i++) {
		struct shm_in *in = peer->ins[i];

		if (!in)
			continue;
		peer->ins[i] = NULL;
		if (!in->finished && in->result == 0) {
			in->err = peer->why;
			in->result = -err_errno(peer->why.code);
		}
		in_hand_back(in);
		in_free(in);
	}
}

void shm_ins_tick(struct shm_peer *peer, bool *wanted_p)
{
	for (uint32_t i = 0; i < peer->in_slots; i++) {
		struct shm_in *in = peer->ins[i];
		uint8_t body[8];
		struct cursor c;
		uint64_t moved;

		if (!in || in->finished || in->flow.mode == SHM_FLOW_NONE)
			continue;
		*wanted_p = true;
		moved = shm_flow_moved(&in->flow);
		if (moved == in->base.moved)
			continue;
		in->base.moved = moved;
		if (in->base.kind != XP_WRITE || shm_unsent(peer) > SHM_OUT_SOFT)
			continue;
		cursor_write(&c, body, sizeof(body));
		cursor_put_u64(&c, moved);
		shm_send(peer, &(struct shm_frame){.type = SHM_PROGRESS,
						   .id = in->id,
						   .body = body,
						   .body_len = sizeof(body)});
	}
}
