/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Pools of the other side, and its answers to ours (handshake_announce.c). The receiver
 * of a REGISTER checks everything (regions, buffers inside them, the layout) and keeps a
 * remote_pool. Keys are imported only when a reader needs them: mapping a peer's cache
 * costs page tables, and a prefill daemon never reads a decode daemon's pool.
 *
 * Incompatible layouts do not end a peering: two models may share daemons. A pool with
 * the same name here and another shape is answered with REGISTER_NAK and the exact
 * difference; a room that pairs the two fails with the same text.
 *
 * A side that cannot keep another pool within its limit answers with REGISTER_NAK and
 * keeps nothing of it; the pool is announced again after another one was removed. Lack of
 * memory for it, on either side, ends the peering, which comes up again and announces all
 * pools.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake_impl.h"
#include "daemon/session/region_map.h"
#include "daemon/session/session.h"

#define REMOTE_POOLS_MAX 16384u
/* Memory of one region in addition to its record: its key, and its index in address
 * order. */
#define REGION_KEY_BYTES 320u

/* ---- remote pools ---- */

/* Remove it from the table, unless another list has replaced it there. */
static void pool_unlist(struct remote_pool *pool)
{
	struct idmap *by_id = &pool->remote->pools.by_id;

	if (idmap_get(by_id, pool->id) == pool)
		idmap_remove(by_id, pool->id);
}

static void pool_free(struct remote_pool *pool)
{
	struct remote *remote = pool->remote;
	struct wire_unregister_ack msg = {.object = pool->id};

	list_remove(&pool->link);
	pool_unlist(pool);
	remote->pools.count--;
	charge_drop(&pool->charge);
	if (!pool->dead)
		keys_drop(pool);
	if (pool->going && !pool->dead &&
	    !pool->is_session && /* no room waits for these */
	    handshake_send_unregister_ack(remote, &msg) < 0)
		err_clear();
	keys_replacement_release(pool);
	for (uint32_t i = 0; i < pool->region_count; i++)
		mem_free(pool->regions[i].packed);
	mem_free(pool->regions);
	region_map_free(pool->by_address);
	mem_free(pool->buffers);
	mem_free(pool->buffer_region);
	layout_free(pool->layout);
	mem_free(pool);
}

void handshake_pool_use(struct remote_pool *pool)
{
	assert(!pool->dead);
	pool->uses++;
}

void handshake_pool_unuse(struct remote_pool *pool)
{
	struct remote *remote = pool->remote;

	assert(pool->uses > 0);
	if (--pool->uses > 0 || (!pool->going && !pool->dead))
		return;
	remote->reaches++; /* its replacement may have the last hold */
	pool_free(pool);
	remote->reaches--;
	remote_try_free(remote);
}

void pools_down(struct remote *remote)
{
	struct remote_pool *pool;
	struct idmap_cursor at;

	idmap_foreach(&remote->announce.shares, at)
		share_end(at.value);
	remote->announce.unanswered = 0;
	remote->pools.listed = false;
	idmap_fini(&remote->pools.by_id);
	list_foreach_safe(pool, &remote->pools.list, link) {
		keys_drop(pool);
		pool->dead = true;
		list_remove(&pool->link);
		list_push_back(&remote->pools.dead, &pool->link);
		if (pool->uses == 0)
			pool_free(pool);
	}
}

struct remote_pool *handshake_pool_by_id(struct remote *remote, uint64_t id)
{
	return idmap_get(&remote->pools.by_id, id);
}

bool handshake_pool_is_ours(const struct handshake *hs, uint64_t id)
{
	const struct announcement *pub = idmap_get(&hs->published_by_id, id);

	return pub && !pub->going && !pub->pool->session->ending;
}

/* It is no longer found, but kept for the rooms and ops that use it. */
static void pool_going(struct handshake *hs, struct remote_pool *pool)
{
	pool_unlist(pool);
	pool->going = true;
	pool->uses++;
	hs->events.on_pool_going(hs->events.owner, pool);
	handshake_pool_unuse(pool);
}

/* ---- receiving ---- */

static int get_regions(struct remote_pool *pool, const struct wire_blob *blob)
{
	struct cursor in;
	uint32_t n;

	cursor_read(&in, blob->data, blob->len);
	n = cursor_get_count(&in, REMOTE_REGIONS_MAX, 29);
	pool->regions = mem_calloc(n, sizeof(*pool->regions));
	if (!pool->regions)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < n; i++) {
		struct remote_region *region = &pool->regions[pool->region_count++];
		const void *key;

		region->id = cursor_get_u64(&in);
		region->address = cursor_get_u64(&in);
		region->length = cursor_get_u64(&in);
		region->kind = cursor_get_u8(&in);
		key = cursor_get_blob(&in, XP_KEY_MAX, &region->packed_len);
		if (in.bad)
			break;
		region->packed = mem_dup(key, region->packed_len);
		if (!region->packed)
			return err_pass(-ENOMEM);
	}
	return cursor_check(&in, "REGISTER.regions");
}

static int get_buffers(struct remote_pool *pool, const struct wire_blob *blob)
{
	const struct layout *layout = pool->layout;
	struct cursor in;
	uint32_t n;

	cursor_read(&in, blob->data, blob->len);
	n = cursor_get_count(&in, LAYOUT_BUFFERS_MAX, 20);
	if (n != layout->buffer_count)
		return err_raise(ERR_PROTO, "REGISTER.buffers: %u for %u of the layout",
				 n, layout->buffer_count);
	pool->buffers = mem_calloc(n, sizeof(*pool->buffers));
	pool->buffer_region = mem_calloc(n, sizeof(*pool->buffer_region));
	if (!pool->buffers || !pool->buffer_region)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < n; i++) {
		uint32_t index = cursor_get_u32(&in);
		uint64_t end;

		pool->buffers[i].offset = cursor_get_u64(&in);
		pool->buffers[i].length = cursor_get_u64(&in);
		pool->buffer_region[i] = index;
		if (in.bad || index >= pool->region_count ||
		    pool->buffers[i].length != layout->buffers[i] ||
		    __builtin_add_overflow(pool->buffers[i].offset,
					   pool->buffers[i].length, &end) ||
		    end > pool->regions[index].length)
			return err_raise(ERR_PROTO,
					 "REGISTER.buffers[%u]: not inside its region",
					 i);
	}
	return cursor_check(&in, "REGISTER.buffers");
}

/* Report each incompatible pool of the same name to the other side, once. */
static void handshake_pools_compare(struct handshake *hs, struct remote *remote,
				    const struct remote_pool *pool)
{
	struct idmap_cursor at;

	idmap_foreach(&hs->published, at) {
		const struct announcement *pub = at.value;
		struct wire_register_nak nak = {.object = pool->id,
						.local_object = pub->pool->id,
						.code = ERR_LAYOUT};

		if (pool->own || pub->pool->session->own ||
		    strcmp(pub->pool->name, pool->name) != 0 ||
		    (remote->peer->self && pub->pool->id == pool->id) ||
		    layout_compatible(pub->pool->layout, pool->layout, &layout_from_us) >=
			    0)
			continue;
		log_warn("peer", remote->peer->shown, "incompatible pools",
			 "pool=%s why=\"%s\"", pool->name, err_last()->text);
		snprintf(nak.text, sizeof(nak.text), "%s", err_last()->text);
		err_clear();
		if (handshake_send_register_nak(remote, &nak) < 0)
			err_clear();
	}
}

static int build_pool(struct remote_pool *pool, const struct wire_register *msg)
{
	struct cursor in;
	int r;

	pool->id = msg->object;
	pool->session = msg->session;
	pool->is_session = msg->kind == OBJECT_SESSION;
	pool->own = msg->kind == OBJECT_OWN_POOL;
	if (msg->kind > OBJECT_OWN_POOL || strlen(msg->name) >= sizeof(pool->name))
		return err_raise(ERR_PROTO, "REGISTER: kind %u or name too long",
				 msg->kind);
	memcpy(pool->name, msg->name, strlen(msg->name) + 1);
	r = get_regions(pool, &msg->regions);
	if (r < 0 || pool->is_session)
		return r;
	cursor_read(&in, msg->layout.data, msg->layout.len);
	r = layout_decode(&in, &pool->layout);
	if (r < 0)
		return err_pass(r);
	return get_buffers(pool, &msg->buffers);
}

/* `why` NULL: taken. */
static int answer(struct remote *remote, uint64_t object, const struct err *why)
{
	struct wire_register_nak nak = {.object = object};
	struct wire_register_ack ack = {.object = object};

	if (!why)
		return handshake_send_register_ack(remote, &ack);
	nak.code = why->code;
	snprintf(nak.text, sizeof(nak.text), "%s", why->text);
	return handshake_send_register_nak(remote, &nak);
}

/* In decoded form: eight bytes of a message may take eighty here. */
static int charge_pool(struct remote_pool *pool)
{
	uint64_t bytes = sizeof(*pool);

	for (uint32_t i = 0; i < pool->region_count; i++)
		bytes += sizeof(pool->regions[i]) + pool->regions[i].packed_len +
			 REGION_KEY_BYTES;
	if (pool->layout)
		bytes += layout_memory(pool->layout) +
			 pool->layout->buffer_count *
				 (sizeof(*pool->buffers) + sizeof(*pool->buffer_region));
	return err_pass(charge_take(&pool->charge, pool->remote->account, ACCOUNT_LAYOUTS,
				    bytes));
}

static int handshake_pools_check_cap(const struct remote *remote)
{
	if (remote->pools.count < REMOTE_POOLS_MAX)
		return 0;
	return err_raise(ERR_LIMIT,
			 "REGISTER: too many pools and sessions of one peer: %u (limit "
			 "%u)",
			 remote->pools.count, REMOTE_POOLS_MAX);
}

/* It was never stored. */
static int refuse_pool(struct remote *remote, struct remote_pool *pool, uint64_t object)
{
	struct err why;

	err_take(&why);
	if (pool)
		pool_free(pool);
	return answer(remote, object, &why);
}

static int on_register(struct handshake *hs, struct remote *remote, struct cursor *body)
{
	struct wire_register msg;
	const struct transport *transport = handshake_transport(remote);
	struct remote_pool *pool, *old;
	int r = wire_register_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (!transport || strcmp(msg.transport, transport->ops->name) != 0)
		return err_raise(
			ERR_PROTO, "REGISTER: keys for transport '%.32s', ours is %s",
			msg.transport, transport ? transport->ops->name : "none");
	old = handshake_pool_by_id(remote, msg.object);
	if (old && !old->is_session)
		return err_raise(ERR_PROTO, "REGISTER: object %llu sent twice",
				 (unsigned long long)msg.object);
	if (handshake_pools_check_cap(remote) < 0)
		return refuse_pool(remote, NULL, msg.object);
	pool = mem_zalloc(sizeof(*pool));
	if (!pool)
		return err_pass(-ENOMEM);
	pool->remote = remote;
	remote->pools.count++;
	list_push_back(&remote->pools.list, &pool->link);
	r = build_pool(pool, &msg);
	if (r >= 0 && charge_pool(pool) < 0)
		return refuse_pool(remote, pool, msg.object);
	/* a session shared again: the new list replaces the old one */
	if (r >= 0 && !idmap_swap(&remote->pools.by_id, pool->id, pool))
		r = idmap_put(&remote->pools.by_id, pool->id, pool);
	if (r < 0) {
		r = err_prefix(r, "REGISTER '%.63s'", msg.name);
		pool_free(pool);
		return err_pass(r);
	}
	if (old) {
		keys_carry(old, pool);
		pool_going(hs, old);
	}
	if (pool->layout)
		handshake_pools_compare(hs, remote, pool);
	if (pool->is_session || (transport->caps & XP_CAP_RDMA))
		handshake_want_keys(pool);
	r = answer(remote, msg.object, NULL);
	if (r >= 0)
		hs->events.on_change(hs->events.owner, remote);
	return r;
}

static int on_unregister(struct handshake *hs, struct remote *remote, struct cursor *body)
{
	struct wire_unregister msg;
	struct remote_pool *pool;
	int r = wire_unregister_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	pool = handshake_pool_by_id(remote, msg.object);
	if (!pool)
		return 0; /* twice, or from the past */
	pool_going(hs, pool);
	return 0;
}

static int on_unregister_ack(struct handshake *hs, struct remote *remote,
			     struct cursor *body)
{
	struct wire_unregister_ack msg;
	struct announcement *pub;
	struct share *share;
	int r = wire_unregister_ack_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	pub = idmap_get(&hs->published_by_id, msg.object);
	share = pub ? share_find(pub, remote) : NULL;
	if (share && share->stage != SHARE_ANNOUNCED)
		share_end(share);
	else if (!pub && remote->announce.unanswered)
		remote->announce.unanswered--;
	else
		return 0;
	if (remote->announce.refuses &&
	    remote->announce.begun) { /* it may have been at its limit */
		remote->announce.refuses = false;
		pools_announce(remote);
	}
	return 0;
}

/* The other side kept nothing: as if it had never been announced there. */
static void unannounced(struct handshake *hs, struct remote *remote, uint64_t object,
			const struct err *why)
{
	const struct announcement *pub = idmap_get(&hs->published_by_id, object);
	struct share *share = pub ? share_find(pub, remote) : NULL;

	if (share) {
		remote->announce.refuses = true;
		share_end(share);
		return;
	}
	hs->events.on_shared(hs->events.owner, remote, object, why);
}

static int on_register_nak(struct handshake *hs, struct remote *remote,
			   struct cursor *body)
{
	struct wire_register_nak msg;
	struct err why;
	int r = wire_register_nak_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	peer_report(remote->peer, msg.code, msg.text, &why);
	if (msg.code != ERR_LAYOUT) /* both pools of that report are kept */
		unannounced(hs, remote, msg.object, &why);
	log_warn("peer", remote->peer->shown, "the peer refused a pool",
		 "pool=%llu why='%s'", (unsigned long long)msg.object, why.text);
	return 0;
}

/* A pool's share is in use once it is sent; a session's waits for this. */
static int on_register_ack(struct handshake *hs, struct remote *remote,
			   struct cursor *body)
{
	struct wire_register_ack msg;
	int r = wire_register_ack_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	hs->events.on_shared(hs->events.owner, remote, msg.object, NULL);
	return 0;
}

/* The pools that its rooms wait for may be among them, or missing: they check now. */
static int on_pools(struct handshake *hs, struct remote *remote, struct cursor *body)
{
	struct wire_pools msg;
	int r = wire_pools_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (remote->pools.listed)
		return err_raise(ERR_PROTO, "POOLS: sent twice");
	remote->pools.listed = true;
	hs->events.on_change(hs->events.owner, remote);
	return 0;
}

int pools_message(struct handshake *hs, struct remote *remote,
		  const struct wire_header *h, struct cursor *body)
{
	switch (h->type) {
	case WIRE_T_REGISTER:
		return on_register(hs, remote, body);
	case WIRE_T_REGISTER_NAK:
		return on_register_nak(hs, remote, body);
	case WIRE_T_UNREGISTER:
		return on_unregister(hs, remote, body);
	case WIRE_T_UNREGISTER_ACK:
		return on_unregister_ack(hs, remote, body);
	case WIRE_T_POOLS:
		return on_pools(hs, remote, body);
	default:
		return on_register_ack(hs, remote, body);
	}
}
