/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools of slots, created and freed on helpers: registering and releasing memory takes an
 * adapter's driver too long for the loop.
 *
 * A pool may be closed while a helper makes it. The second of the two releases it: the
 * helper, when it finds at its end that the pool is no longer wanted; else the closer
 * does. The transport stays open until no helper uses it (`releasing`), so neither meets
 * a freed protection domain; after that only the struct is left, for `done`.
 */
#include "daemon/transport/verbs/verbs_pool.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

enum { PHASE_MAKING, PHASE_MADE, PHASE_UNWANTED };

#define ALL_SLOTS ((1u << VERBS_SLOTS) - 1)

/* ---- any thread ---- */

static void verbs_pool_unmake(struct verbs_pool *pool)
{
	if (pool->reg)
		net_mem_dereg(pool->reg);
	memory_unref(pool->memory);
	pool->reg = NULL;
	pool->memory = NULL;
}

static int make(struct verbs_pool *pool)
{
	struct verbs_transport *transport = pool->transport;
	int r = memory_new_linear(VERBS_POOL_BYTES, &pool->memory);

	if (r < 0)
		return err_pass(r);
	/* GPUs pack into it, and scatter out of it, by themselves */
	memory_offer(pool->memory, transport->net.base.env.gpu);
	r = verbs_mem_reg(&transport->net.base, pool->memory, &pool->reg);
	if (r < 0)
		pool->reg = NULL;
	return err_pass(r);
}

static void open_work(struct offload_job *job)
{
	struct verbs_pool *pool = container_of(job, struct verbs_pool, open);
	struct verbs_transport *transport = pool->transport;
	int making = PHASE_MAKING;

	job->result = make(pool);
	if (job->result < 0) {
		err_take(&job->err);
		verbs_pool_unmake(pool);
	}
	if (!atomic_compare_exchange_strong(&pool->phase, &making, PHASE_MADE))
		verbs_pool_unmake(pool);
	atomic_fetch_sub(&transport->net.releasing, 1); /* it may close now */
}

static void verbs_pool_close_work(struct offload_job *job)
{
	struct verbs_pool *pool = container_of(job, struct verbs_pool, close);
	struct verbs_transport *transport = pool->transport;

	verbs_pool_unmake(pool);
	atomic_fetch_sub(&transport->net.releasing, 1);
}

/* ---- the loop's ---- */

static void verbs_pool_fail(struct verbs_pool *pool, const struct err *err)
{
	struct verbs_peer *peer = pool->peer;

	log_warn("verbs", peer->net.name, "no slots", "why=\"%s\"", err->text);
	peer->pack_pool = NULL;
	verbs_pack_no_slots(peer, pool, err);
	net_peer_kick(&peer->net);
	mem_free(pool);
}

static void open_done(struct offload_job *job)
{
	struct verbs_pool *pool = container_of(job, struct verbs_pool, open);

	if (pool->close.submitted)
		return;
	if (!pool->peer) { /* closed meanwhile; a helper has released it */
		mem_free(pool);
	} else if (job->result < 0) {
		verbs_pool_fail(pool, &job->err);
	} else {
		pool->ready = true;
		net_peer_kick(&pool->peer->net);
	}
}

/* The helper that made it may be finishing, and its end is reported later. */
static void verbs_pool_close_done(struct offload_job *job)
{
	struct verbs_pool *pool = container_of(job, struct verbs_pool, close);

	if (!pool->open.submitted)
		mem_free(pool);
}

static int verbs_pool_new(struct verbs_transport *transport, struct verbs_pool **pool_p)
{
	struct verbs_pool *pool = mem_zalloc(sizeof(*pool));

	if (!pool)
		return err_pass(-ENOMEM);
	pool->transport = transport;
	pool->free = ALL_SLOTS;
	pool->open = (struct offload_job){.work = open_work, .done = open_done};
	pool->close = (struct offload_job){.work = verbs_pool_close_work,
					   .done = verbs_pool_close_done};
	atomic_init(&pool->phase, PHASE_MAKING);
	list_init(&pool->waiting);
	for (uint32_t i = 0; i < VERBS_SLOTS; i++) {
		pool->slices[i].index = i;
		list_init(&pool->slices[i].link);
	}
	*pool_p = pool;
	return 0;
}

int verbs_pool_open(struct verbs_transport *transport, struct verbs_pool **pool_p)
{
	struct verbs_pool *pool;
	int r = verbs_pool_new(transport, &pool);

	if (r < 0)
		return err_pass(r);
	r = make(pool);
	if (r < 0) {
		verbs_pool_unmake(pool);
		mem_free(pool);
		return err_pass(r);
	}
	pool->ready = true;
	*pool_p = pool;
	return 0;
}

int verbs_pool_order(struct verbs_peer *peer)
{
	struct verbs_transport *transport = peer->transport;
	struct verbs_pool *pool;
	int r = verbs_pool_new(transport, &pool);

	if (r < 0)
		return err_pass(r);
	pool->peer = peer;
	peer->pack_pool = pool;
	atomic_fetch_add(&transport->net.releasing, 1);
	offload_submit(transport->net.base.env.offload, &pool->open);
	return 0;
}

void verbs_pool_close(struct verbs_pool *pool)
{
	struct offload *offload;
	int making = PHASE_MAKING;

	if (!pool)
		return;
	assert(pool->free == ALL_SLOTS && list_empty(&pool->waiting));
	offload = pool->transport->net.base.env.offload;
	pool->peer = NULL;
	if (pool->open.submitted) {
		if (offload_cancel(offload, &pool->open)) {
			atomic_fetch_sub(&pool->transport->net.releasing, 1);
			mem_free(pool);
			return;
		}
		if (atomic_compare_exchange_strong(&pool->phase, &making, PHASE_UNWANTED))
			return;
	}
	atomic_fetch_add(&pool->transport->net.releasing, 1);
	offload_submit(offload, &pool->close);
}

uint8_t *verbs_pool_at(const struct verbs_pool *pool, uint32_t index)
{
	return pool->memory->base + index * VERBS_SLOT_BYTES;
}

void verbs_pool_free(struct verbs_pool *pool, struct slice *slice)
{
	assert(!slice->copying);
	list_remove(&slice->link);
	slice->xfer = NULL;
	slice->packed = slice->posted = false;
	pool->free |= 1u << slice->index;
}
