/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The bytes of one transfer, on one side of it: which memory they are in (with
 * a reference on each), and what moves them: a direct copy, when this daemon
 * can read the source and write the destination; else one half of the ring.
 *
 * A flow tells its owner of every change through on_change; "not busy" is the
 * only state in which its memory is given back, so a transfer that waits for it
 * is still when it says so.
 */
#include "daemon/transport/shm/shm_private.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"

static struct memory *buffer_memory(const struct xp_buffer *b)
{
	if (b->reg)
		return ((struct xp_reg_base *)(void *)b->reg)->memory;
	if (b->key)
		return ((struct shm_key *)(void *)b->key)->memory;
	return NULL;
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

/* By what the destination's daemon reaches the source: of the first buffer with rows. */
static const char *path_of(const struct shm_flow *flow)
{
	uint32_t buffer = flow->plan->runs[0].src_buffer;
	const struct memory *memory =
		buffer < flow->src_count ? flow->buffers[buffer].memory : NULL;

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

int shm_flow_init(struct shm_flow *flow, struct shm_peer *peer,
		  const struct xp_sides *sides, bool use_src, bool use_dst,
		  void (*on_change)(struct shm_flow *flow))
{
	uint32_t src_count = use_src ? sides->src_count : 0;
	uint32_t dst_count = use_dst ? sides->dst_count : 0;
	int r = 0;

	*flow = (struct shm_flow){
		.peer = peer, .plan = sides->plan, .on_change = on_change};
	list_init(&flow->link);
	list_init(&flow->slots);
	if (!sides->plan || sides->plan->bytes == 0)
		return 0;
	flow->buffers = mem_calloc((size_t)src_count + dst_count, sizeof(*flow->buffers));
	if (!flow->buffers)
		return err_pass(-ENOMEM);
	flow->src_count = src_count;
	flow->dst_count = dst_count;
	for (uint32_t i = 0; i < src_count && r == 0; i++)
		r = buffer_take(&sides->src[i], &flow->buffers[i]);
	for (uint32_t i = 0; i < dst_count && r == 0; i++)
		r = buffer_take(&sides->dst[i], &flow->buffers[src_count + i]);
	flow->used.path = path_of(flow);
	if (r < 0)
		shm_flow_fini(flow);
	return err_pass(r);
}

void shm_flow_fini(struct shm_flow *flow)
{
	uint32_t count = flow->src_count + flow->dst_count;

	for (uint32_t i = 0; flow->buffers && i < count; i++)
		if (flow->buffers[i].memory)
			memory_release(flow->peer->shm->base.env.offload,
				       flow->buffers[i].memory);
	mem_free(flow->buffers);
	flow->buffers = NULL;
	flow->src_count = 0;
	flow->dst_count = 0;
}

static bool key_direct(const struct shm_peer *peer, const struct xp_sides *sides,
		       uint32_t buffer)
{
	const struct shm_key *key;

	if (buffer >= sides->src_count)
		return false;
	key = (const struct shm_key *)(const void *)sides->src[buffer].key;
	return key && key->peer == peer && key->state == SHM_KEY_READY && key->memory;
}

bool shm_sides_direct(const struct shm_peer *peer, const struct xp_sides *sides)
{
	const struct plan *plan = sides->plan;

	if (!plan || plan->bytes == 0)
		return true;
	for (uint32_t b = 0; b < plan->src_ends_count; b++)
		if (plan->src_ends[b] > 0 && !key_direct(peer, sides, b))
			return false;
	for (size_t i = 0; !plan->src_ends && i < plan->run_count; i++)
		if (!key_direct(peer, sides, plan->runs[i].src_buffer))
			return false;
	return true;
}

static void on_copied(struct copy_job *job)
{
	struct shm_flow *flow = container_of(job, struct shm_flow, job);

	flow->job_running = false;
	if (job->result < 0 && flow->result == 0) {
		flow->result = job->result;
		flow->err = job->err;
	}
	flow->landed = atomic_load(&job->copied);
	flow->used.staged = atomic_load(&job->bounced);
	flow->used.descriptors = flow->plan->rows;
	flow->on_change(flow);
}

int shm_flow_direct(struct shm_flow *flow)
{
	int r;

	flow->mode = SHM_FLOW_DIRECT;
	if (!flow->plan || flow->plan->bytes == 0)
		return 0;
	flow->job = (struct copy_job){
		.plan = flow->plan,
		.end = flow->plan->bytes,
		.src = {.buffers = flow->buffers, .buffer_count = flow->src_count},
		.dst = {.buffers = flow->buffers + flow->src_count,
			.buffer_count = flow->dst_count},
		.on_done = on_copied,
	};
	r = copier_submit(flow->peer->shm->base.env.copier, &flow->job);
	if (r < 0)
		return err_pass(r);
	flow->job_running = true;
	shm_tick_want(flow->peer->shm);
	return 0;
}

void shm_flow_stop(struct shm_flow *flow)
{
	if (flow->stopping)
		return;
	flow->stopping = true;
	if (flow->job_running)
		copier_cancel(flow->peer->shm->base.env.copier, &flow->job);
	if (flow->mode == SHM_FLOW_GATHER || flow->mode == SHM_FLOW_SCATTER)
		shm_ring_leave(flow);
}

void shm_flow_fail(struct shm_flow *flow)
{
	if (flow->result == 0) {
		err_take(&flow->err);
		flow->result = -err_errno(flow->err.code);
	}
	shm_flow_stop(flow);
}

uint64_t shm_flow_moved(const struct shm_flow *flow)
{
	return flow->job_running ? atomic_load(&flow->job.copied) : flow->landed;
}

bool shm_flow_complete(const struct shm_flow *flow)
{
	uint64_t bytes = flow->plan ? flow->plan->bytes : 0;

	return flow->result == 0 && !shm_flow_busy(flow) && flow->landed == bytes;
}
