/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/transport/ucx/ucx_pool.h"

#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/memory/memory.h"
#include "daemon/memory/release.h"

#define BUFFERS_MIN 4u

int ucx_pool_init(struct ucx_pool *pool, const struct ucx_lib *lib, ucp_context_h context,
		  struct gpu *gpu, uint64_t slice_bytes, uint64_t total_bytes)
{
	uint64_t count = total_bytes / slice_bytes;
	ucp_mem_map_params_t params;
	ucs_status_t status;
	int r;

	if (count < BUFFERS_MIN)
		count = BUFFERS_MIN;
	*pool = (struct ucx_pool){
		.lib = lib, .context = context, .slice_bytes = slice_bytes};
	list_init(&pool->free);
	r = memory_new_empty(count * slice_bytes, &pool->memory);
	if (r < 0)
		return err_pass(r);
	memory_offer(pool->memory, gpu);
	pool->buffers = mem_calloc(count, sizeof(*pool->buffers));
	if (!pool->buffers)
		return err_pass(-ENOMEM);
	for (; pool->count < count; pool->count++) {
		struct ucx_buffer *buffer = &pool->buffers[pool->count];

		buffer->pool = pool;
		buffer->base = pool->memory->base + pool->count * slice_bytes;
		list_push_back(&pool->free, &buffer->link);
	}
	if (!lib->threads)
		return 0; /* as the regions: nothing is registered (ucx_reg.c) */
	params = (ucp_mem_map_params_t){
		.field_mask =
			UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH,
		.address = pool->memory->base,
		.length = count * slice_bytes,
	};
	status = lib->ucp_mem_map(context, &params, &pool->memh);
	if (status != UCS_OK)
		return err_raise(ERR_TRANSPORT, "ucx: register %llu bytes of buffers: %s",
				 (unsigned long long)params.length,
				 lib->ucs_status_string(status));
	return 0;
}

void ucx_pool_fill(struct ucx_pool *pool, struct offload *offload)
{
	if (!pool->filled)
		memory_fill(offload, pool->memory);
	pool->filled = true;
}

void ucx_pool_fini(struct ucx_pool *pool)
{
	if (pool->memh)
		pool->lib->ucp_mem_unmap(pool->context, pool->memh);
	mem_free(pool->buffers);
	if (pool->memory)
		memory_unref(pool->memory);
	*pool = (struct ucx_pool){0};
}

struct ucx_buffer *ucx_pool_take(struct ucx_pool *pool)
{
	return list_empty(&pool->free)
		       ? NULL
		       : list_entry(list_pop_front(&pool->free), struct ucx_buffer, link);
}

void ucx_pool_give(struct ucx_buffer *buffer)
{
	/* last in, first out: its pages are warm in the cache */
	list_push_front(&buffer->pool->free, &buffer->link);
}
