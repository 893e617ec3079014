/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ucx_pool: bounce buffers of one slice each, made and registered once, filled at the
 * first peer.
 *
 * Sending and receiving have separate pools: were they shared, two daemons whose buffers
 * are all full of bytes for the other could deadlock. A receive buffer is always freed by
 * local copy threads.
 */
#ifndef KVD_TRANSPORT_UCX_POOL_H
#define KVD_TRANSPORT_UCX_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/transport/ucx/ucx_lib.h"

struct gpu;
struct memory;
struct offload;
struct ucx_pool;

struct ucx_buffer {
	struct list link; /* in pool->free, or in none */
	struct ucx_pool *pool;
	uint8_t *base; /* pool->slice_bytes long */
};

struct ucx_pool {
	const struct ucx_lib *lib;
	ucp_context_h context;
	struct memory *memory; /* of all buffers */
	ucp_mem_h memh;	       /* NULL: libucp registers as needed */
	struct ucx_buffer *buffers;
	struct list free;
	uint64_t slice_bytes;
	unsigned int count;
	bool filled;
};

int ucx_pool_init(struct ucx_pool *pool, const struct ucx_lib *lib, ucp_context_h context,
		  struct gpu *gpu, uint64_t slice_bytes, uint64_t total_bytes);
/* Allocates its pages, which a daemon without such a peer does not need. Idempotent. */
void ucx_pool_fill(struct ucx_pool *pool, struct offload *offload);
void ucx_pool_fini(struct ucx_pool *pool); /* all are free; a zeroed one is allowed */
struct ucx_buffer *ucx_pool_take(struct ucx_pool *pool); /* NULL: none is free */
void ucx_pool_give(struct ucx_buffer *buffer);

#endif
