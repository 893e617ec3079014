/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/attend/ring_attend.h"

#include <errno.h>

#include "daemon/attend/attend.h"
#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"

#define DEADLINE_US_MAX 60000000u
#define DEADLINE_US_PRESET 1000000u

static void on_failed(struct session *session, uint32_t slot, uint64_t id,
		      const struct err *why)
{
	(void)err_reraise(why);
	ring_refuse(ring_of(session), slot, id);
}

static int attend_do(struct ring *ring, const struct kvd_ring_entry *e,
		     const struct ring_payload *arena)
{
	struct attend *attend = attend_find(ring->session, e->a);
	cleanup_free uint8_t *data = NULL;
	size_t head = e->n1 * sizeof(struct kvd_ring_part);
	struct attend_post_args args = {.id = KVD_RING_IDS + e->slot,
					.slot = e->slot,
					.seat = e->n0,
					.layer = (uint32_t)e->b,
					.deadline_ns =
						(e->c ? e->c : DEADLINE_US_PRESET) * 1000,
					.own = e->flags & KVD_RING_OWN,
					.part_count = e->n1,
					.on_failed = on_failed};
	int r = attend ? 0 : -ENOENT;

	if (r >= 0 && (e->b > UINT32_MAX || e->c > DEADLINE_US_MAX))
		r = err_raise(ERR_RANGE, "layer %llu, deadline_us %llu (at most %u)",
			      (unsigned long long)e->b, (unsigned long long)e->c,
			      DEADLINE_US_MAX);
	if (r >= 0)
		r = ring_payload_copy(arena, e->offset, e->bytes, &data);
	if (r < 0)
		return err_pass(r);
	args.parts = (const struct kvd_ring_part *)(void *)data;
	args.select = (const uint32_t *)(void *)(data + head);
	args.select_count = (uint32_t)((e->bytes - head) / sizeof(uint32_t));
	return err_pass(attend_post(attend, &args));
}

static int op_attend(struct ring *ring, const struct kvd_ring_entry *e,
		     struct ring_payload *arena)
{
	uint64_t id = KVD_RING_IDS + e->slot;
	int r;

	if (e->n1 > ATTEND_PARTS_MAX || e->bytes < e->n1 * sizeof(struct kvd_ring_part))
		return err_raise(ERR_PROTO, "op %u: %u parts in %u bytes", e->op, e->n1,
				 e->bytes);
	if (e->bytes >
	    e->n1 * sizeof(struct kvd_ring_part) + ATTEND_SELECT_MAX * sizeof(uint32_t))
		return err_raise(ERR_PROTO, "op %u: %u bytes", e->op, e->bytes);
	r = status_slot_claim(ring->session->status, e->slot, e->gen, id);
	if (r < 0)
		return err_pass(r);
	if (attend_do(ring, e, arena) < 0) {
		ring_refuse(ring, e->slot, id);
		status_slot_release(ring->session->status, e->slot);
	}
	return 0;
}

const struct ring_verb attend_verbs[] = {{KVD_RING_ATTEND, op_attend}, {0, NULL}};
