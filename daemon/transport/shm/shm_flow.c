/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of one transfer, on one side: their memories (with a reference on each), and
 * the mover: a direct copy, when this daemon can read the source and write the
 * destination; else one half of the ring.
 *
 * The mover calls shm_xfer_changed(). Memory is given back only when nothing is busy with
 * it, so a transfer that waits for that is quiesced when it reports it.
 */
#include "daemon/transport/shm/shm_private.h"

#include <errno.h>

#include "daemon/base/mem.h"

/* A key's memory is a helper's until the key is ready. */
static struct memory *buffer_memory(const struct xp_buffer *b)
{
	const struct shm_key *key = (const struct shm_key *)(const void *)b->key;

	if (b->reg)
		return ((struct xp_reg_base *)(void *)b->reg)->memory;
	return key && sm_state(&key->sm) == SHM_KEY_READY ? key->memory : NULL;
}

/* A buffer without memory has no length: a plan that names it is refused. */
static int buffer_take(const struct xp_buffer *from, struct copy_buffer *to)
{
	struct memory *m = buffer_memory(from);

	if (!m)
		return 0;
	if (from->offset > m->length || from->length > m->length - from->offset)
		return err_raise(ERR_RANGE,
				 "a buffer reaches past its memory's %ju bytes",
				 (uintmax_t)m->length);
	to->memory = memory_ref(m);
	to->offset = from->offset;
	to->length = from->length;
	return 0;
}

/* How the destination's daemon reaches the source: of the first buffer with rows. */
static const char *path_of(const struct shm_xfer *xfer)
{
	uint32_t buffer = xfer->plan->runs[0].src_buffer;
	const struct memory *memory =
		buffer < xfer->src_count ? xfer->buffers[buffer].memory : NULL;

	if (!memory) /* refused, or the ring's */
		return NULL;
	switch (memory->kind) {
	case MEMORY_VM:
		return "vm";
	case MEMORY_DEVICE:
		return "device";
	case MEMORY_GUARDED:
		return "shared file";
	default:
		return "memfd";
	}
}

static bool key_direct(const struct shm_peer *peer, const struct xp_sides *sides,
		       uint32_t buffer)
{
	const struct shm_key *key;

	if (buffer >= sides->src_count)
		return false;
	key = (const struct shm_key *)(const void *)sides->src[buffer].key;
	return key && key->peer == peer && sm_state(&key->sm) == SHM_KEY_READY &&
	       key->memory;
}

/* Can this daemon read every source byte of the plan by itself? */
static bool sides_direct(const struct shm_peer *peer, const struct xp_sides *sides)
{
	const struct plan *plan = sides->plan;

	for (uint32_t b = 0; b < plan->src_ends_count; b++)
		if (plan->src_ends[b] > 0 && !key_direct(peer, sides, b))
			return false;
	for (size_t i = 0; !plan->src_ends && i < plan->run_count; i++)
		if (!key_direct(peer, sides, plan->runs[i].src_buffer))
			return false;
	return true;
}

int shm_flow_take(struct shm_xfer *xfer, const struct xp_sides *sides)
{
	bool source = net_is_source(&xfer->net);
	bool direct = !source && sides_direct(xfer->peer, sides);
	uint32_t src_count = source || direct ? sides->src_count : 0;
	uint32_t dst_count = source ? 0 : sides->dst_count;
	/* an answer has both tables, and is checked for all that it has */
	int r = xp_sides_check(sides, source || direct || !xfer->net.ours, !source);

	if (r < 0)
		return err_pass(r);
	xfer->buffers = mem_calloc((size_t)src_count + dst_count, sizeof(*xfer->buffers));
	if (!xfer->buffers)
		return err_pass(-ENOMEM);
	xfer->plan = sides->plan;
	xfer->way = direct ? SHM_WAY_DIRECT : SHM_WAY_NONE;
	xfer->src_count = src_count;
	xfer->dst_count = dst_count;
	for (uint32_t i = 0; i < src_count && r == 0; i++)
		r = buffer_take(&sides->src[i], &xfer->buffers[i]);
	for (uint32_t i = 0; i < dst_count && r == 0; i++)
		r = buffer_take(&sides->dst[i], &xfer->buffers[src_count + i]);
	xfer->net.used.path = path_of(xfer);
	return err_pass(r);
}

void shm_flow_drop(struct shm_xfer *xfer)
{
	uint32_t count = xfer->src_count + xfer->dst_count;

	for (uint32_t i = 0; xfer->buffers && i < count; i++)
		if (xfer->buffers[i].memory)
			memory_release(xfer->peer->shm->net.base.env.offload,
				       xfer->buffers[i].memory);
	mem_free(xfer->buffers);
	xfer->buffers = NULL;
}

static void on_direct(struct copy_job *job)
{
	struct shm_xfer *xfer = container_of(job, struct shm_xfer, job);

	xfer->copying = false;
	xfer->landed = atomic_load(&job->copied);
	xfer->net.used.staged = atomic_load(&job->bounced);
	xfer->net.used.descriptors = xfer->plan->rows;
	if (job->result < 0)
		net_xfer_stop(&xfer->net, &job->err);
	shm_xfer_changed(xfer);
}

int shm_flow_direct(struct shm_xfer *xfer)
{
	struct shm *shm = xfer->peer->shm;
	int r;

	xfer->job = (struct copy_job){
		.plan = xfer->plan,
		.end = xfer->plan->bytes,
		.src = {.buffers = xfer->buffers, .buffer_count = xfer->src_count},
		.dst = {.buffers = xfer->buffers + xfer->src_count,
			.buffer_count = xfer->dst_count},
		.on_done = on_direct,
	};
	r = copier_submit(shm->net.base.env.copier, &xfer->job);
	xfer->copying = r == 0;
	shm_tick_want(shm);
	return err_pass(r);
}

uint64_t shm_flow_moved(const struct shm_xfer *xfer)
{
	return xfer->copying ? atomic_load(&xfer->job.copied) : xfer->landed;
}
