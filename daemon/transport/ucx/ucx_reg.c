/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory of the ucx backend, and its keys.
 *
 * The hooks that libucp's registration cache needs are off, so every region is
 * registered by ucp_mem_map() once and the handle goes with each operation.
 * That runs on helper threads beside the worker: the context is made with its
 * own lock (mt_workers_shared). A library built without threads gets no
 * handles; libucp then registers per operation, by itself.
 *
 * Only memory that cannot vanish is given to libucp: a guarded or vm region has
 * no handle and passes through bounce buffers.
 *
 * A registration lives while its owner or a transfer holds it. Unmapping may
 * block, so when a transfer's end drops the last reference, a helper does it.
 *
 * Active messages need no remote key: the landing address is always the
 * receiver's. A packed key is a number, for the bookkeeping of the daemon above.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <errno.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define KEY_MAGIC UINT32_C(0x4b44564b) /* "KVDK" */
#define KEY_BYTES 12u

struct ucx_key {
	struct xp_key_base base;
	uint64_t id;
};

static bool may_touch(const struct memory *memory)
{
	return memory->kind == MEMORY_SEALED || memory->kind == MEMORY_LINEAR;
}

static struct ucx_transport *transport_of(struct ucx_reg *reg)
{
	return container_of(reg->base.transport, struct ucx_transport, net.base);
}

/* Any thread. */
static void release(struct ucx_reg *reg)
{
	struct ucx_transport *transport = transport_of(reg);

	if (reg->memh)
		transport->lib->ucp_mem_unmap(transport->context, reg->memh);
	memory_unref(reg->base.memory);
	reg->base.memory = NULL;
}

static void ucx_reg_release_work(struct offload_job *job)
{
	struct ucx_reg *reg = container_of(job, struct ucx_reg, job);
	struct ucx_transport *transport = transport_of(reg);

	release(reg);
	atomic_fetch_sub(&transport->releasing, 1); /* it may close now */
}

static void ucx_reg_release_done(struct offload_job *job)
{
	mem_free(container_of(job, struct ucx_reg, job));
}

static int map(struct ucx_reg *reg)
{
	struct ucx_transport *transport = transport_of(reg);
	struct memory *memory = reg->base.memory;
	ucp_mem_map_params_t params = {
		.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS |
			      UCP_MEM_MAP_PARAM_FIELD_LENGTH |
			      UCP_MEM_MAP_PARAM_FIELD_PROT,
		.address = memory->base,
		.length = memory->length,
		.prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ,
	};
	ucs_status_t status;

	if (!transport->lib->threads || !may_touch(memory) || memory->length == 0)
		return 0;
	if (memory->writable)
		params.prot |= UCP_MEM_MAP_PROT_LOCAL_WRITE;
	status = transport->lib->ucp_mem_map(transport->context, &params, &reg->memh);
	if (status != UCS_OK)
		return err_raise(ERR_TRANSPORT, "ucx: register %llu bytes: %s",
				 (unsigned long long)memory->length,
				 transport->lib->ucs_status_string(status));
	return 0;
}

int ucx_mem_reg(struct transport *base, struct memory *memory, struct xp_reg **reg_p)
{
	static atomic_uint_fast64_t ids;
	struct ucx_reg *reg;
	int r = memory_check_copyable(memory);

	if (r < 0)
		return err_pass(r);
	reg = mem_zalloc(sizeof(*reg));
	if (!reg)
		return err_pass(-ENOMEM);
	reg->base.transport = base;
	reg->base.memory = memory_ref(memory);
	atomic_init(&reg->refs, 1);
	reg->id = atomic_fetch_add(&ids, 1) + 1;
	reg->job.work = ucx_reg_release_work;
	reg->job.done = ucx_reg_release_done;
	r = map(reg);
	if (r < 0) {
		release(reg);
		mem_free(reg);
		return err_pass(r);
	}
	*reg_p = (struct xp_reg *)reg;
	return 0;
}

void ucx_mem_dereg(struct xp_reg *xp_reg)
{
	struct ucx_reg *reg = (struct ucx_reg *)xp_reg;

	if (atomic_fetch_sub(&reg->refs, 1) != 1)
		return;
	release(reg);
	mem_free(reg);
}

/* Loop's thread. */
static void reg_put(struct ucx_reg *reg)
{
	if (atomic_fetch_sub(&reg->refs, 1) != 1)
		return;
	atomic_fetch_add(&transport_of(reg)->releasing, 1);
	offload_submit(transport_of(reg)->net.base.env.offload, &reg->job);
}

int ucx_key_pack(struct xp_reg *xp_reg, struct xp_peer *peer, void *buf, size_t size,
		 size_t *len_p)
{
	struct ucx_reg *reg = (struct ucx_reg *)xp_reg;
	struct cursor c;

	(void)peer;
	if (size < KEY_BYTES)
		return err_raise(ERR_TOOBIG, "ucx key: %u bytes, room for %zu", KEY_BYTES,
				 size);
	cursor_write(&c, buf, size);
	cursor_put_u32(&c, KEY_MAGIC);
	cursor_put_u64(&c, reg->id);
	*len_p = c.pos;
	return 0;
}

int ucx_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
		   struct xp_key **key_p)
{
	struct ucx_key *key;
	struct cursor c;
	uint32_t magic;
	uint64_t id;

	cursor_read(&c, buf, len);
	magic = cursor_get_u32(&c);
	id = cursor_get_u64(&c);
	if (c.bad || magic != KEY_MAGIC || len != KEY_BYTES || id == 0)
		return err_raise(ERR_PROTO, "ucx key: not one");
	key = mem_zalloc(sizeof(*key));
	if (!key)
		return err_pass(-ENOMEM);
	key->base = (struct xp_key_base){.peer = peer, .ready = true, .owner = owner};
	key->id = id;
	*key_p = (struct xp_key *)key;
	return 0;
}

void ucx_key_drop(struct xp_key *key)
{
	mem_free(key);
}

/* ---- a transfer's side ---- */

/* A table may have holes where this plan has no rows. */
static int holes_check(const struct plan *plan, const struct xp_buffer *buffers,
		       bool is_src)
{
	for (size_t i = 0; i < plan->run_count; i++) {
		const struct plan_run *run = &plan->runs[i];
		uint32_t buffer = is_src ? run->src_buffer : run->dst_buffer;

		if (!buffers[buffer].reg)
			return err_raise(ERR_INVAL,
					 "run %zu: buffer %u is not registered", i,
					 buffer);
	}
	return 0;
}

int ucx_side_init(struct ucx_side *side, const struct plan *plan,
		  const struct xp_buffer *buffers, uint32_t count, bool is_src)
{
	int r;

	*side = (struct ucx_side){.plan = plan};
	r = holes_check(plan, buffers, is_src);
	if (r < 0)
		return err_pass(r);
	side->buffers = mem_calloc(count, sizeof(*side->buffers));
	side->regs = mem_calloc(count, sizeof(struct ucx_reg *));
	if (!side->buffers || !side->regs) {
		ucx_side_fini(side);
		return err_pass(-ENOMEM);
	}
	for (; side->count < count; side->count++) {
		const struct xp_buffer *buffer = &buffers[side->count];
		struct ucx_reg *reg = (struct ucx_reg *)buffer->reg;

		side->buffers[side->count] = (struct copy_buffer){
			.memory = reg ? reg->base.memory : NULL,
			.offset = buffer->offset,
			.length = buffer->length,
		};
		if (reg)
			atomic_fetch_add(&reg->refs, 1);
		side->regs[side->count] = reg;
	}
	return 0;
}

void ucx_side_fini(struct ucx_side *side)
{
	for (uint32_t i = 0; i < side->count; i++)
		if (side->regs[i])
			reg_put(side->regs[i]);
	mem_free(side->buffers);
	mem_free(side->regs);
	*side = (struct ucx_side){0};
}

uint8_t *ucx_side_direct(const struct ucx_side *side, uint32_t buffer, uint64_t offset,
			 ucp_mem_h *memh_p)
{
	const struct copy_buffer *at = &side->buffers[buffer];

	if (!may_touch(at->memory) || atomic_load(&at->memory->dead))
		return NULL;
	*memh_p = side->regs[buffer]->memh;
	return at->memory->base + at->offset + offset;
}
