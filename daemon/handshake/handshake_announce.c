/* SPDX-License-Identifier: Apache-2.0 */
/*
 * REGISTER: each side announces its pools to the other, once per peering. Engines
 * determine the number of pools, and peers the number of announcements, so one work item
 * does them all: one pool to one peer per step, and the peers take turns. A message that
 * names a pool announces it to its receiver first (handshake_announce).
 *
 * A withdrawal is a request, UNREGISTER. The other side acknowledges it when no room or
 * op uses the pool any more; a peer that is down counts as acknowledged. Its rooms fail,
 * which takes no longer than a fence there. A peer that has not acknowledged in twice
 * that time (`fence_timeout` of this side) is disconnected, because the memory of an
 * ended engine waits for it. Where only this side accesses that memory (XP_CAP_ALONE), it
 * waits for its own rooms and transfers only, regardless of the peer's answer.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake_impl.h"
#include "daemon/session/session.h"

/* ---- sending ---- */

static int put_region(struct cursor *out, const struct region *region,
		      const struct remote *remote)
{
	struct xp_reg *reg = region->regs[remote->transport_index];
	uint8_t key[XP_KEY_MAX];
	size_t len = 0;
	int r;

	if (reg) {
		r = remote->transport->ops->key_pack(reg, remote->xp, key, sizeof(key),
						     &len);
		if (r < 0)
			return err_pass(r);
	}
	cursor_put_u64(out, region->id);
	cursor_put_u64(out, region->address);
	cursor_put_u64(out, region->length);
	cursor_put_u8(out, (uint8_t)region->kind);
	cursor_put_blob(out, key, len);
	return 0;
}

/* Distinct regions of a pool, in order of first use. */
static uint32_t pool_regions(const struct pool *pool, struct region **regions,
			     uint32_t *index_of_buffer)
{
	uint32_t n = 0;

	for (uint32_t b = 0; b < pool->layout->buffer_count; b++) {
		struct region *region = pool->buffers[b].region;

		if (pool->buffers[b].first) {
			region->listed = n;
			regions[n++] = region;
		}
		index_of_buffer[b] = region->listed;
	}
	return n;
}

/* What lies in the blob scratch from `at` on. */
static struct wire_blob blob_from(const struct cursor *blobs, size_t at)
{
	return (struct wire_blob){blobs->base + at, blobs->pos - at};
}

static int handshake_pools_too_large(const struct wire_register *msg)
{
	return err_raise(ERR_TOOBIG,
			 "%s '%.63s' needs more than %zu bytes of description",
			 msg->kind == OBJECT_SESSION ? "session" : "pool", msg->name,
			 wire_body_cap(WIRE_T_REGISTER));
}

static int send_register(struct handshake *hs, struct remote *remote,
			 struct wire_register *msg)
{
	struct cursor out;
	int r;

	snprintf(msg->transport, sizeof(msg->transport), "%s",
		 remote->transport->ops->name);
	handshake_body(hs, &out);
	r = wire_register_put(&out, msg);
	if (r < 0 || out.pos > wire_body_cap(WIRE_T_REGISTER))
		return err_pass(handshake_pools_too_large(msg));
	return peer_send_express(remote->peer, WIRE_T_REGISTER, hs->scratch, out.pos);
}

static int register_pool(struct handshake *hs, struct remote *remote,
			 const struct pool *pool)
{
	uint32_t count = pool->layout->buffer_count, n;
	cleanup_free struct region **regions = mem_calloc(count, sizeof(*regions));
	cleanup_free uint32_t *index = mem_calloc(count, sizeof(*index));
	struct wire_register msg = {.object = pool->id,
				    .kind = pool->session->own ? OBJECT_OWN_POOL
							       : OBJECT_POOL,
				    .session = pool->session->epoch};
	struct cursor blobs;
	size_t at;
	int r = 0;

	if (!regions || !index)
		return err_pass(-ENOMEM);
	snprintf(msg.name, sizeof(msg.name), "%s", pool->name);
	handshake_blob(hs, &blobs);
	msg.layout = (struct wire_blob){pool->packed, pool->packed_bytes};
	at = blobs.pos;
	n = pool_regions(pool, regions, index);
	cursor_put_u32(&blobs, n);
	for (uint32_t i = 0; i < n && r >= 0; i++)
		r = put_region(&blobs, regions[i], remote);
	msg.regions = blob_from(&blobs, at);
	at = blobs.pos;
	cursor_put_u32(&blobs, count);
	for (uint32_t b = 0; b < count; b++) {
		cursor_put_u32(&blobs, index[b]);
		cursor_put_u64(&blobs, pool->buffers[b].offset);
		cursor_put_u64(&blobs, pool->layout->buffers[b]);
	}
	msg.buffers = blob_from(&blobs, at);
	if (r >= 0 && blobs.bad) /* the other side would miss the announcement */
		r = handshake_pools_too_large(&msg);
	return r < 0 ? err_pass(r) : send_register(hs, remote, &msg);
}

int handshake_share_session(struct handshake *hs, struct remote *remote,
			    struct session *session,
			    bool (*tells)(const struct region *region, const void *arg),
			    const void *arg)
{
	struct wire_register msg = {.object = session->epoch,
				    .kind = OBJECT_SESSION,
				    .session = session->epoch};
	struct cursor blobs, count;
	struct idmap_cursor at;
	uint32_t n = 0;
	int r;

	assert(remote->kvd == hs->kvd);
	if (!remote->xp)
		return err_raise(ERR_PEER, "%s: no data connection", remote->label);
	snprintf(msg.name, sizeof(msg.name), "%s", session->client);
	handshake_blob(hs, &blobs);
	cursor_put_u32(&blobs, 0);
	idmap_foreach(&session->regions, at) {
		struct region *region = at.value;

		if (sm_state(&region->sm) != REGION_READY || !tells(region, arg))
			continue;
		r = put_region(&blobs, region, remote);
		if (r >= 0 && (blobs.bad || n == REMOTE_REGIONS_MAX))
			r = handshake_pools_too_large(&msg);
		if (r < 0)
			return err_pass(r);
		n++;
	}
	cursor_write(&count, blobs.base, sizeof(n));
	cursor_put_u32(&count, n); /* over the placeholder */
	msg.regions = blob_from(&blobs, 0);
	return err_pass(send_register(hs, remote, &msg));
}

void handshake_unshare_session(struct remote *remote, const struct session *session)
{
	struct wire_unregister msg = {.object = session->epoch};

	if (sm_state(&remote->peer->sm) == PEER_UP &&
	    handshake_send_unregister(remote, &msg) < 0)
		err_clear(); /* a full line takes the peer down, and the share with it */
}

/* ---- local pools: the peers that know them ---- */

struct share *share_find(const struct announcement *pub, const struct remote *remote)
{
	return idmap_get(&remote->announce.shares, pub->pool->id);
}

static int share_with(struct announcement *pub, struct remote *remote)
{
	struct share *share = mem_zalloc(sizeof(*share));
	int r = share ? idmap_put(&remote->announce.shares, pub->pool->id, share)
		      : -ENOMEM;

	if (r < 0) {
		mem_free(share);
		return err_pass(r);
	}
	share->pub = pub;
	share->remote = remote;
	r = register_pool(pub->hs, remote, pub->pool);
	if (r < 0) {
		idmap_remove(&remote->announce.shares, pub->pool->id);
		mem_free(share);
		return err_pass(r);
	}
	list_push_back(&pub->shares, &share->link);
	return 0;
}

static void announce_one(struct announcement *pub, struct remote *remote)
{
	struct err why;

	if (pub->going || share_find(pub, remote) || share_with(pub, remote) >= 0)
		return;
	err_take(&why);
	log_warn("peer", remote->peer->shown, "pool not announced", "pool=%s why=\"%s\"",
		 pub->pool->name, why.text);
	if (why.code == ERR_NOMEM)
		peer_end_later(remote->peer, &why);
}

void handshake_announce(struct remote *remote, const struct pool *pool)
{
	if (pool->handshake && remote->announce.begun)
		announce_one(pool->handshake, remote);
}

static void announce_end(struct handshake *hs, struct remote *remote)
{
	struct wire_pools msg = {.pools = (uint32_t)idmap_count(&hs->published)};
	struct cursor out;
	struct err why;

	if (remote->announce.all)
		return;
	remote->announce.all = true;
	handshake_body(hs, &out);
	if (wire_pools_put(&out, &msg) >= 0 &&
	    peer_send_express(remote->peer, WIRE_T_POOLS, hs->scratch, out.pos) >= 0)
		return;
	err_take(&why);
	peer_end_later(remote->peer, &why);
}

/* One pool to one remote; the remotes take turns. */
static bool announce_step(struct loop_work *work)
{
	struct handshake *hs = container_of(work, struct handshake, announcing);
	struct remote *remote = list_first(&hs->behind, struct remote, announce.link);
	struct idmap_cursor at;

	if (!remote)
		return false;
	list_remove(&remote->announce.link);
	if (idmap_next_above(&hs->published, remote->announce.number, &at)) {
		remote->announce.number = at.key;
		announce_one(at.value, remote);
	}
	if (remote->announce.number < hs->numbers &&
	    idmap_next_above(&hs->published, remote->announce.number, &at)) {
		list_push_back(&hs->behind, &remote->announce.link);
	} else {
		list_push_back(&hs->current, &remote->announce.link);
		announce_end(hs, remote);
	}
	return !list_empty(&hs->behind);
}

void pools_init(struct handshake *hs)
{
	list_init(&hs->current);
	list_init(&hs->behind);
	loop_work_init(&hs->announcing, hs->kvd->loop, announce_step, NULL);
}

void pools_announce(struct remote *remote)
{
	struct handshake *hs = remote->kvd->handshake;

	assert(remote->announce.begun);
	remote->announce.number = 0;
	list_remove(&remote->announce.link);
	list_push_back(&hs->behind, &remote->announce.link);
	loop_work_defer(&hs->announcing); /* the turn that connected has done enough */
}

void pools_begin(struct remote *remote)
{
	assert(sm_state(&remote->peer->sm) == PEER_UP);
	remote->announce.all = remote->announce.refuses = false;
	pools_announce(remote);
}

void share_end(struct share *share)
{
	struct announcement *pub = share->pub;

	list_remove(&share->link);
	idmap_remove(&share->remote->announce.shares, pub->pool->id);
	mem_free(share);
	if (pub->going && list_empty(&pub->shares))
		loop_defer(pub->hs->kvd->loop, &pub->gone);
}

static bool share_is_ours(const struct share *share)
{
	const struct pool *pool = share->pub->pool;
	const struct transport *transport = share->remote->transport;

	if (!transport || !(transport->caps & XP_CAP_ALONE))
		return false;
	for (uint32_t b = 0; b < pool->layout->buffer_count; b++)
		if (pool->buffers[b].region->memory->gpu)
			return false;
	return true;
}

static void share_withdraw(struct share *share)
{
	struct wire_unregister msg = {.object = share->pub->pool->id};

	/* a full queue takes the peer down, which ends the share */
	if (handshake_send_unregister(share->remote, &msg) < 0)
		err_clear();
	if (!share_is_ours(share))
		return;
	share->remote->announce.unanswered++;
	share_end(share);
}

static void share_cut(const struct share *share)
{
	struct announcement *pub = share->pub;
	struct err why;

	err_set(&why, ERR_FENCE, "%.150s: pool '%.63s' is not released",
		share->remote->label, pub->pool->name);
	metrics_add(&pub->hs->kvd->metrics, METRIC_FENCES_WIDENED, 1);
	peer_end_later(share->remote->peer, &why);
}

static bool bring_step(struct loop_work *work)
{
	struct announcement *pub = container_of(work, struct announcement, bringing);
	struct share *share = list_first(&pub->shares, struct share, link);

	if (!share || share->stage == pub->stage)
		return false;
	share->stage = pub->stage;
	list_remove(&share->link);
	list_push_back(&pub->shares, &share->link);
	if (pub->stage == SHARE_CUT)
		share_cut(share);
	else
		share_withdraw(share);
	return true;
}

static void bring_done(struct loop_work *work)
{
	struct announcement *pub = container_of(work, struct announcement, bringing);

	if (pub->stage == SHARE_WITHDRAWN && !list_empty(&pub->shares))
		loop_timer_start(&pub->patience,
				 2 * pub->hs->kvd->config->fence_timeout_ns);
}

static void handshake_pools_on_patience(struct loop_timer *timer)
{
	struct announcement *pub = container_of(timer, struct announcement, patience);

	pub->stage = SHARE_CUT;
	loop_work_start(&pub->bringing);
}

static void on_pub_gone(struct loop_defer *defer)
{
	struct announcement *pub = container_of(defer, struct announcement, gone);
	void (*on_gone)(void *arg) = pub->on_gone;
	void *arg = pub->arg;

	loop_timer_stop(&pub->patience);
	loop_work_stop(&pub->bringing);
	idmap_remove(&pub->hs->published, pub->number);
	idmap_remove(&pub->hs->published_by_id, pub->pool->id);
	pub->pool->handshake = NULL;
	mem_free(pub);
	on_gone(arg);
}

static int pools_publish(struct pool *pool)
{
	struct handshake *hs = pool->session->kvd->handshake;
	struct announcement *pub = mem_zalloc(sizeof(*pub));
	int r = pub ? idmap_put(&hs->published_by_id, pool->id, pub) : -ENOMEM;

	assert(!pool->handshake && !pool->closing);
	if (r >= 0) {
		r = idmap_put(&hs->published, hs->numbers + 1, pub);
		if (r < 0)
			idmap_remove(&hs->published_by_id, pool->id);
	}
	if (r < 0) {
		mem_free(pub);
		return err_pass(r);
	}
	pub->number = ++hs->numbers;
	pub->hs = hs;
	pub->pool = pool;
	list_init(&pub->shares);
	loop_timer_init(&pub->patience, hs->kvd->loop, handshake_pools_on_patience);
	loop_work_init(&pub->bringing, hs->kvd->loop, bring_step, bring_done);
	loop_defer_init(&pub->gone, on_pub_gone);
	choice_add(pub);
	pool->handshake = pub;
	list_append(&hs->behind, &hs->current);
	loop_work_start(&hs->announcing);
	return 0;
}

static void pools_withdraw(struct pool *pool, void (*on_gone)(void *arg), void *arg)
{
	struct announcement *pub = pool->handshake;

	assert(on_gone);
	if (!pub) {
		on_gone(arg);
		return;
	}
	choice_remove(pub);
	pub->going = true;
	pub->on_gone = on_gone;
	pub->arg = arg;
	pub->stage = SHARE_WITHDRAWN;
	if (list_empty(&pub->shares))
		loop_defer(pool->session->kvd->loop, &pub->gone);
	loop_work_start(&pub->bringing);
}

const struct pool_publisher pools_publisher = {
	.publish = pools_publish,
	.withdraw = pools_withdraw,
};

const struct xp_buffer *handshake_local_buffers(struct pool *pool,
						const struct remote *remote)
{
	struct announcement *pub = pool->handshake;
	unsigned int t = remote->transport_index;
	struct xp_buffer *table;

	assert(remote->transport_index < TRANSPORTS_MAX);
	if (!pub || !remote->transport) {
		err_raise(ERR_TRANSPORT, "%s: no data connection", remote->label);
		return NULL;
	}
	if (pool->tables[t])
		return pool->tables[t];
	table = mem_calloc(pool->layout->buffer_count, sizeof(*table));
	for (uint32_t b = 0; table && b < pool->layout->buffer_count; b++) {
		table[b].reg = pool->buffers[b].region->regs[t];
		table[b].offset = pool->buffers[b].offset;
		table[b].length = pool->layout->buffers[b];
		if (table[b].reg)
			continue;
		err_raise(ERR_IMPORT, "region %llu (%s) cannot be used with transport %s",
			  (unsigned long long)pool->buffers[b].region->id,
			  region_kind_name(pool->buffers[b].region->kind),
			  remote->transport->ops->name);
		mem_free(table);
		return NULL;
	}
	pool->tables[t] = table;
	return table;
}
