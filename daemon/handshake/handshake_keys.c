/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Keys of remote memory: requested when a reader needs them, usable some time later, or
 * refused with a reason.
 *
 * A session sends the list of all its regions again whenever one was added or removed.
 * Its peer then has two pools for a while: the old one, which running transfers hold, and
 * the new one. Memory in both keeps its key, because importing a key may mean mapping
 * gigabytes: the new pool takes the key over, even while it is being imported, and the
 * old pool keeps a borrowed pointer for its users. So the old pool holds the new one: the
 * keys live until both are freed. (Rejected: a count in each key; each transport would
 * have to know of it, or each of its pointers be wrapped.) Same memory means the same
 * region with the same packed key, which has a nonce of its registration; for memory that
 * was registered again the key is requested again.
 */
#include <assert.h>
#include <string.h>

#include "daemon/base/idmap.h"
#include "daemon/handshake/handshake_impl.h"

void keys_drop(struct remote_pool *pool)
{
	if (pool->wanted)
		loop_work_stop(&pool->unpacking);
	for (uint32_t i = 0; i < pool->region_count; i++) {
		if (!pool->regions[i].key)
			continue;
		if (!pool->regions[i].borrowed)
			pool->remote->transport->ops->key_drop(pool->regions[i].key);
		pool->regions[i].key = NULL;
	}
	for (uint32_t b = 0; pool->buffers && b < pool->layout->buffer_count; b++)
		pool->buffers[b].key = NULL;
	pool->ready = false;
}

/* The regions of a list sorted by id, for many look-ups. */
struct finder {
	struct remote_pool *pool;
	uint32_t next; /* a peer that sends its regions again keeps their order: most
			  often this one */
	struct idmap by_id;
	bool mapped;
};

static struct remote_region *handshake_keys_find(struct finder *finder, uint64_t id)
{
	struct remote_pool *pool = finder->pool;
	struct remote_region *it = NULL;

	if (finder->next < pool->region_count)
		it = &pool->regions[finder->next];
	if (!it || it->id != id) {
		for (uint32_t i = 0; !finder->mapped && i < pool->region_count; i++)
			if (idmap_put(&finder->by_id, pool->regions[i].id,
				      &pool->regions[i]) < 0)
				err_clear(); /* then its key is requested again */
		finder->mapped = true;
		it = idmap_get(&finder->by_id, id);
	}
	if (it)
		finder->next = (uint32_t)(it - pool->regions) + 1;
	return it;
}

void keys_carry(struct remote_pool *old, struct remote_pool *pool)
{
	struct finder finder = {.pool = old};

	assert(old != pool && old->remote == pool->remote);
	if (!old->wanted || old->refused.code != ERR_OK)
		return;
	for (uint32_t i = 0; i < pool->region_count; i++) {
		struct remote_region *region = &pool->regions[i];
		struct remote_region *from = handshake_keys_find(&finder, region->id);

		if (!from || !from->key || from->borrowed ||
		    from->packed_len != region->packed_len ||
		    from->length != region->length ||
		    memcmp(from->packed, region->packed, region->packed_len) != 0)
			continue;
		region->key = from->key;
		region->ready = from->ready;
		region->pool = pool;
		((struct xp_key_base *)region->key)->owner = region;
		from->borrowed = true; /* its key stays: a helper may be reading it */
		if (old->replacement)
			continue;
		old->replacement = pool;
		handshake_pool_use(pool);
	}
	idmap_fini(&finder.by_id);
}

void keys_replacement_release(struct remote_pool *pool)
{
	struct remote_pool *replacement = pool->replacement;

	pool->replacement = NULL;
	if (replacement)
		handshake_pool_unuse(replacement);
}

static void keys_settle(struct remote_pool *pool)
{
	struct handshake *hs = pool->remote->kvd->handshake;

	if (pool->refused.code == ERR_OK) {
		if (loop_work_running(&pool->unpacking))
			return;
		for (uint32_t i = 0; i < pool->region_count; i++) {
			if (!pool->regions[i].ready)
				return;
		}
		pool->ready = true;
	}
	hs->events.on_change(hs->events.owner, pool->remote);
}

static int unpack(struct remote_pool *pool, struct remote_region *region)
{
	struct remote *remote = pool->remote;
	int r = region->packed_len
			? 0
			: err_raise(ERR_IMPORT,
				    "region %llu of %s cannot be used with transport %s",
				    (unsigned long long)region->id, remote->label,
				    remote->transport->ops->name);

	if (r >= 0)
		r = remote->transport->ops->key_unpack(remote->xp, region->packed,
						       region->packed_len, region,
						       &region->key);
	if (r < 0)
		return err_pass(r);
	region->pool = pool;
	region->ready = ((struct xp_key_base *)region->key)->ready;
	return 0;
}

/* A key: over shm it is a request to the peer. */
static bool unpack_step(struct loop_work *work)
{
	struct remote_pool *pool = container_of(work, struct remote_pool, unpacking);
	struct remote_region *region = &pool->regions[pool->unpacked];

	if (pool->refused.code != ERR_OK || pool->unpacked == pool->region_count)
		return false;
	pool->unpacked++;
	if (!region->key && unpack(pool, region) < 0) /* else it is carried */
		err_take(&pool->refused);
	return true;
}

static void unpack_done(struct loop_work *work)
{
	struct remote_pool *pool = container_of(work, struct remote_pool, unpacking);

	for (uint32_t b = 0; pool->buffers && b < pool->layout->buffer_count; b++)
		pool->buffers[b].key = pool->regions[pool->buffer_region[b]].key;
	keys_settle(pool);
}

void handshake_want_keys(struct remote_pool *pool)
{
	struct remote *remote = pool->remote;

	/* Lack of memory or descriptors, on either side, is temporary. */
	if (pool->wanted && !pool->dead && pool->uses <= 1 &&
	    (pool->refused.code == ERR_NOMEM || pool->refused.code == ERR_LIMIT)) {
		keys_drop(pool); /* the requester is its only user */
		pool->refused.code = ERR_OK;
		pool->wanted = false;
	}
	if (pool->wanted || pool->dead)
		return;
	pool->want_later = !remote->ready; /* pools_line_ready() asks again */
	if (pool->want_later)
		return;
	pool->wanted = true;
	pool->unpacked = 0;
	loop_work_init(&pool->unpacking, remote->kvd->loop, unpack_step, unpack_done);
	loop_work_start(&pool->unpacking);
}

void pools_line_ready(struct remote *remote)
{
	struct remote_pool *pool;

	list_foreach(pool, &remote->pools.list, link) {
		if (pool->want_later)
			handshake_want_keys(pool);
	}
}

void pools_key_ready(struct xp_key *key, const struct err *err)
{
	struct remote_region *region = ((struct xp_key_base *)key)->owner;
	struct remote_pool *pool = region->pool;

	assert(region->key == key);
	if (!pool || pool->dead)
		return;
	if (err)
		pool->refused = *err;
	else
		region->ready = true;
	keys_settle(pool);
}
