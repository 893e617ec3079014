/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory of the ucx backend.
 *
 * The hooks that libucp's registration cache needs are off, so every region is registered
 * by ucp_mem_map() once and the handle is passed with each operation. That runs on helper
 * threads, concurrently with the worker: the context is made with its own lock
 * (mt_workers_shared). A library built without threads gets no handles; libucp then
 * registers per operation, by itself.
 *
 * Only memory that cannot vanish is given to libucp: a guarded or vm region has
 * no handle and passes through bounce buffers.
 *
 * Active messages need no remote key: the landing address is always the
 * receiver's.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static struct ucx_transport *ucx_reg_transport_of(struct net_reg *reg)
{
	return container_of(reg->base.transport, struct ucx_transport, net.base);
}

void ucx_reg_release(struct net_reg *net)
{
	struct ucx_transport *transport = ucx_reg_transport_of(net);
	struct ucx_reg *reg = container_of(net, struct ucx_reg, net);

	if (reg->memh)
		transport->lib->ucp_mem_unmap(transport->context, reg->memh);
}

static int ucx_reg_map(struct ucx_reg *reg)
{
	struct ucx_transport *transport = ucx_reg_transport_of(&reg->net);
	struct memory *memory = reg->net.base.memory;
	ucp_mem_map_params_t params = {
		.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS |
			      UCP_MEM_MAP_PARAM_FIELD_LENGTH |
			      UCP_MEM_MAP_PARAM_FIELD_PROT,
		.address = memory->base,
		.length = memory->length,
		.prot = UCP_MEM_MAP_PROT_LOCAL_READ | UCP_MEM_MAP_PROT_REMOTE_READ,
	};
	ucs_status_t status;

	if (!transport->lib->threads || !memory_is_plain(memory) || memory->length == 0)
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
	struct ucx_reg *reg = NULL;
	int r = memory_check_copyable(memory);

	if (r == 0)
		r = net_reg_new(base, memory, sizeof(*reg), &reg);
	if (r < 0)
		return err_pass(r);
	r = ucx_reg_map(reg);
	if (r < 0) {
		net_mem_dereg((struct xp_reg *)reg);
		return err_pass(r);
	}
	*reg_p = (struct xp_reg *)reg;
	return 0;
}

/* ---- a transfer's side ---- */

int ucx_side_init(struct ucx_side *side, const struct plan *plan,
		  const struct xp_buffer *buffers, uint32_t count, bool is_src)
{
	int r;

	*side = (struct ucx_side){.plan = plan};
	r = xp_holes_check(plan, buffers, is_src);
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
			.memory = reg ? reg->net.base.memory : NULL,
			.offset = buffer->offset,
			.length = buffer->length,
		};
		if (reg)
			net_reg_ref(&reg->net);
		side->regs[side->count] = reg;
	}
	return 0;
}

void ucx_side_fini(struct ucx_side *side)
{
	for (uint32_t i = 0; i < side->count; i++)
		if (side->regs[i])
			net_reg_put(&side->regs[i]->net);
	mem_free(side->buffers);
	mem_free(side->regs);
	*side = (struct ucx_side){0};
}

static uint8_t *address_of(const struct ucx_side *side, uint32_t buffer, uint64_t offset)
{
	const struct copy_buffer *at = &side->buffers[buffer];

	if (!memory_is_plain(at->memory) || atomic_load(&at->memory->dead))
		return NULL;
	return at->memory->base + at->offset + offset;
}

void ucx_side_rows(const struct ucx_side *side, bool is_src, uint64_t offset,
		   uint64_t length, unsigned int rows_max, struct ucx_rows *rows)
{
	uint32_t buffer, last = UINT32_MAX;
	struct plan_span span;
	struct plan_walk walk;
	uint8_t *at, *end = NULL;

	rows->count = 0;
	if (!pack_few_rows(side->plan, is_src, offset, offset + length, rows_max))
		return;
	plan_walk_seek(&walk, side->plan, offset);
	for (; length > 0 && plan_walk_next(&walk, length, &span); length -= span.len) {
		buffer = is_src ? span.src_buffer : span.dst_buffer;
		at = address_of(side, buffer, is_src ? span.src : span.dst);
		if (!at) {
			rows->count = 0;
			return;
		}
		if (buffer != last || at != end)
			rows->at[rows->count++] = (ucp_dt_iov_t){.buffer = at};
		rows->at[rows->count - 1].length += span.len;
		rows->memh = side->regs[buffer]->memh;
		last = buffer;
		end = at + span.len;
	}
}
