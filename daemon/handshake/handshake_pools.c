/* SPDX-License-Identifier: Apache-2.0 */
/*
 * REGISTER: each side tells the other its pools, once a peering. The receiver
 * checks everything (regions, buffers inside them, the layout) and keeps a
 * remote_pool. Keys are made usable only when a reader wants them: mapping a
 * peer's cache costs page tables, and a prefill daemon never reads a decode
 * daemon's pool.
 *
 * Contradicting layouts do not break a peering: two models may share daemons.
 * A pool with the same name here and another shape is answered with REGISTER_NAK
 * and the exact difference; a room that pairs the two fails with the same text.
 *
 * A side whose cap a pool exceeds says so (REGISTER_NAK) and keeps nothing of it; it is
 * announced again when another one has gone. Want of memory for it, on either side,
 * ends the peering, which comes up again and announces all.
 *
 * Withdrawal is a question, UNREGISTER, that the other side answers when no
 * room or op uses the pool any more; a peer that is down has answered. Its rooms fail,
 * which takes no longer than a fence there; who has not answered in twice that time
 * (`fence_timeout` of this side) goes down, because an ended engine's memory waits.
 * Where nobody else reaches that memory (XP_CAP_ALONE), this side's own rooms and
 * transfers are all that it waits for, whatever the peer answers.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/handshake/handshake_impl.h"
#include "daemon/session/session.h"

#define REMOTE_REGIONS_MAX 4096u
#define REMOTE_POOLS_MAX 16384u
/* Of one region besides its record: its key, and its place in the order of addresses. */
#define REGION_KEY_BYTES 320u
enum { OBJECT_POOL = 0, OBJECT_SESSION = 1, OBJECT_OWN_POOL = 2 };

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
		uint32_t i = 0;

		while (i < n && regions[i] != pool->buffers[b].region)
			i++;
		if (i == n)
			regions[n++] = pool->buffers[b].region;
		index_of_buffer[b] = i;
	}
	return n;
}

/* three scratch areas for REGISTER's blobs */
struct body_parts {
	uint8_t *layout, *regions, *buffers;
};

static void parts_fini(struct body_parts *parts)
{
	mem_free(parts->layout);
	mem_free(parts->regions);
	mem_free(parts->buffers);
}

static int parts_init(struct body_parts *parts)
{
	parts->layout = mem_zalloc(WIRE_FRAME_MAX);
	parts->regions = mem_zalloc(WIRE_FRAME_MAX);
	parts->buffers = mem_zalloc(WIRE_FRAME_MAX);
	return parts->layout && parts->regions && parts->buffers ? 0 : err_pass(-ENOMEM);
}

static int handshake_pools_too_large(const struct wire_register *msg)
{
	return err_raise(ERR_TOOBIG, "%s '%.63s' takes more than %zu bytes to describe",
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
	struct body_parts parts = {0};
	cleanup_free struct region **regions = mem_calloc(count, sizeof(*regions));
	cleanup_free uint32_t *index = mem_calloc(count, sizeof(*index));
	struct cursor lay, reg, buf;
	struct wire_register msg = {.object = pool->id,
				    .kind = pool->session->own ? OBJECT_OWN_POOL
							       : OBJECT_POOL,
				    .session = pool->session->epoch};
	int r = regions && index ? parts_init(&parts) : -ENOMEM;

	if (r < 0)
		goto out;
	cursor_write(&lay, parts.layout, WIRE_FRAME_MAX);
	cursor_write(&reg, parts.regions, WIRE_FRAME_MAX);
	cursor_write(&buf, parts.buffers, WIRE_FRAME_MAX);
	snprintf(msg.name, sizeof(msg.name), "%s", pool->name);
	r = layout_encode(pool->layout, &lay);
	n = pool_regions(pool, regions, index);
	cursor_put_u32(&reg, n);
	for (uint32_t i = 0; i < n && r >= 0; i++)
		r = put_region(&reg, regions[i], remote);
	cursor_put_u32(&buf, count);
	for (uint32_t b = 0; b < count; b++) {
		cursor_put_u32(&buf, index[b]);
		cursor_put_u64(&buf, pool->buffers[b].offset);
		cursor_put_u64(&buf, pool->layout->buffers[b]);
	}
	if (r >= 0 && (reg.bad || buf.bad))
		r = handshake_pools_too_large(
			&msg); /* the other side would miss what was announced */
	if (r < 0)
		goto out;
	msg.layout = (struct wire_blob){parts.layout, lay.pos};
	msg.regions = (struct wire_blob){parts.regions, reg.pos};
	msg.buffers = (struct wire_blob){parts.buffers, buf.pos};
	r = send_register(hs, remote, &msg);
out:
	parts_fini(&parts);
	return r;
}

int handshake_share_session(struct handshake *hs, struct remote *remote,
			    struct session *session,
			    bool (*tells)(const struct region *region, const void *arg),
			    const void *arg)
{
	struct body_parts parts = {0};
	struct wire_register msg = {.object = session->epoch,
				    .kind = OBJECT_SESSION,
				    .session = session->epoch};
	struct cursor reg, count;
	struct idmap_cursor at;
	uint32_t n = 0;
	int r = remote->xp ? parts_init(&parts)
			   : err_raise(ERR_PEER, "%s: no data line", remote->label);

	assert(remote->hs == hs);
	if (r < 0)
		goto out;
	snprintf(msg.name, sizeof(msg.name), "%s", session->client);
	cursor_write(&reg, parts.regions, WIRE_FRAME_MAX);
	cursor_put_u32(&reg, 0);
	idmap_foreach(&session->regions, at) {
		struct region *region = at.value;

		if (sm_state(&region->sm) != REGION_READY || !tells(region, arg))
			continue;
		r = put_region(&reg, region, remote);
		if (r >= 0 && (reg.bad || n == REMOTE_REGIONS_MAX))
			r = handshake_pools_too_large(&msg);
		if (r < 0)
			goto out;
		n++;
	}
	cursor_write(&count, parts.regions, sizeof(n));
	cursor_put_u32(&count, n); /* over the placeholder */
	msg.regions = (struct wire_blob){parts.regions, reg.pos};
	r = send_register(hs, remote, &msg);
out:
	parts_fini(&parts);
	return r;
}

void handshake_unshare_session(struct remote *remote, const struct session *session)
{
	struct wire_unregister msg = {.object = session->epoch};

	if (sm_state(&remote->peer->sm) == PEER_UP &&
	    handshake_tell_unregister(remote, &msg) < 0)
		err_clear(); /* a line that is full goes down, and with it the share */
}

/* ---- local pools: the peers that know them ---- */

static struct share *find_share(const struct announcement *pub,
				const struct remote *remote)
{
	return idmap_get(&remote->shares, pub->pool->id);
}

static int share_with(struct announcement *pub, struct remote *remote)
{
	struct share *share = mem_zalloc(sizeof(*share));
	int r = share ? idmap_put(&remote->shares, pub->pool->id, share) : -ENOMEM;

	if (r < 0) {
		mem_free(share);
		return err_pass(r);
	}
	share->pub = pub;
	share->remote = remote;
	r = register_pool(pub->hs, remote, pub->pool);
	if (r < 0) {
		idmap_remove(&remote->shares, pub->pool->id);
		mem_free(share);
		return err_pass(r);
	}
	list_push_back(&pub->shares, &share->link);
	return 0;
}

static void announce_one(struct announcement *pub, struct remote *remote)
{
	struct err why;

	if (pub->going || find_share(pub, remote) || share_with(pub, remote) >= 0)
		return;
	err_take(&why);
	log_warn("peer", remote->peer->shown, "pool not announced", "pool=%s why=\"%s\"",
		 pub->pool->name, why.text);
	if (why.code == ERR_NOMEM)
		peer_end_later(remote->peer, &why);
}

void handshake_announce(struct remote *remote, const struct pool *pool)
{
	if (pool->handshake && remote->announced)
		announce_one(pool->handshake, remote);
}

static void announce_end(struct handshake *hs, struct remote *remote)
{
	struct wire_pools msg = {.pools = (uint32_t)idmap_count(&hs->published)};
	struct cursor out;
	struct err why;

	if (remote->announced_all)
		return;
	remote->announced_all = true;
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
	struct remote *remote = list_first(&hs->behind, struct remote, announcing);
	struct idmap_cursor at;

	if (!remote)
		return false;
	list_remove(&remote->announcing);
	if (idmap_next_above(&hs->published, remote->announced_to, &at)) {
		remote->announced_to = at.key;
		announce_one(at.value, remote);
	}
	if (remote->announced_to < hs->numbers &&
	    idmap_next_above(&hs->published, remote->announced_to, &at)) {
		list_push_back(&hs->behind, &remote->announcing);
	} else {
		list_push_back(&hs->current, &remote->announcing);
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

static void pools_announce(struct remote *remote)
{
	struct handshake *hs = remote->hs;

	assert(remote->announced);
	remote->announced_to = 0;
	list_remove(&remote->announcing);
	list_push_back(&hs->behind, &remote->announcing);
	loop_work_start(&hs->announcing);
}

void pools_begin(struct remote *remote)
{
	assert(sm_state(&remote->peer->sm) == PEER_UP);
	remote->announced_all = remote->refuses = false;
	pools_announce(remote);
}

static void share_end(struct share *share)
{
	struct announcement *pub = share->pub;

	list_remove(&share->link);
	idmap_remove(&share->remote->shares, pub->pool->id);
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

	/* a queue that is full takes the peer down, which ends the share */
	if (handshake_tell_unregister(share->remote, &msg) < 0)
		err_clear();
	if (!share_is_ours(share))
		return;
	share->remote->unanswered++;
	share_end(share);
}

static void share_cut(const struct share *share)
{
	struct announcement *pub = share->pub;
	struct err why;

	err_set(&why, ERR_FENCE, "%.150s: pool '%.63s' is not let go of",
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

int handshake_publish_pool(struct handshake *hs, struct pool *pool)
{
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

void handshake_withdraw_pool(struct handshake *hs, struct pool *pool,
			     void (*on_gone)(void *arg), void *arg)
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
		loop_defer(hs->kvd->loop, &pub->gone);
	loop_work_start(&pub->bringing);
}

const struct xp_buffer *handshake_local_buffers(struct pool *pool,
						const struct remote *remote)
{
	struct announcement *pub = pool->handshake;
	unsigned int t = remote->transport_index;
	struct xp_buffer *table;

	assert(remote->transport_index < TRANSPORTS_MAX);
	if (!pub || !remote->transport) {
		err_raise(ERR_TRANSPORT, "%s: no data line", remote->label);
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

/* ---- remote pools ---- */

/* Out of the table, if no other list has its place there. */
static void pool_unlist(struct remote_pool *pool)
{
	struct idmap *by_id = &pool->remote->pools_by_id;

	if (idmap_get(by_id, pool->id) == pool)
		idmap_remove(by_id, pool->id);
}

static void pool_free(struct remote_pool *pool)
{
	struct remote *remote = pool->remote;
	struct wire_unregister_ack msg = {.object = pool->id};

	list_remove(&pool->link);
	pool_unlist(pool);
	remote->pool_count--;
	charge_drop(&pool->charge);
	if (!pool->dead)
		keys_drop(pool);
	if (pool->going && !pool->dead && !pool->is_session && /* of those nobody waits */
	    handshake_tell_unregister_ack(remote, &msg) < 0)
		err_clear();
	keys_replacement_release(pool);
	for (uint32_t i = 0; i < pool->region_count; i++)
		mem_free(pool->regions[i].packed);
	mem_free(pool->regions);
	mem_free(pool->by_address);
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
	remote->reaches++; /* its replacement may be the last that holds it */
	pool_free(pool);
	remote->reaches--;
	remote_try_free(remote->hs, remote);
}

void pools_down(struct remote *remote)
{
	struct remote_pool *pool;
	struct idmap_cursor at;

	idmap_foreach(&remote->shares, at)
		share_end(at.value);
	remote->unanswered = 0;
	remote->listed = false;
	idmap_fini(&remote->pools_by_id);
	list_foreach_safe(pool, &remote->pools, link) {
		keys_drop(pool);
		pool->dead = true;
		list_remove(&pool->link);
		list_push_back(&remote->dead_pools, &pool->link);
		if (pool->uses == 0)
			pool_free(pool);
	}
}

struct remote_pool *handshake_pool_by_id(struct remote *remote, uint64_t id)
{
	return idmap_get(&remote->pools_by_id, id);
}

bool handshake_pool_is_ours(const struct handshake *hs, uint64_t id)
{
	const struct announcement *pub = idmap_get(&hs->published_by_id, id);

	return pub && !pub->going && !pub->pool->session->ending;
}

/* It is not found any more, and kept for the rooms and ops that use it. */
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

/* The namesakes here that contradict it: say so to the other side, once each. */
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
		log_warn("peer", remote->peer->shown, "pools contradict",
			 "pool=%s why=\"%s\"", pool->name, err_last()->text);
		snprintf(nak.text, sizeof(nak.text), "%s", err_last()->text);
		err_clear();
		if (handshake_tell_register_nak(remote, &nak) < 0)
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
		return handshake_tell_register_ack(remote, &ack);
	nak.code = why->code;
	snprintf(nak.text, sizeof(nak.text), "%s", why->text);
	return handshake_tell_register_nak(remote, &nak);
}

/* Decoded: eight bytes of a message may be eighty here. */
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
	if (remote->pool_count < REMOTE_POOLS_MAX)
		return 0;
	return err_raise(ERR_LIMIT,
			 "REGISTER: %u pools and sessions are kept for a peer; the cap "
			 "is %u",
			 remote->pool_count, REMOTE_POOLS_MAX);
}

/* Kept nowhere: it never was. */
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
		return err_raise(ERR_PROTO, "REGISTER: object %llu twice",
				 (unsigned long long)msg.object);
	if (handshake_pools_check_cap(remote) < 0)
		return refuse_pool(remote, NULL, msg.object);
	pool = mem_zalloc(sizeof(*pool));
	if (!pool)
		return err_pass(-ENOMEM);
	pool->remote = remote;
	remote->pool_count++;
	list_push_back(&remote->pools, &pool->link);
	r = build_pool(pool, &msg);
	if (r >= 0 && charge_pool(pool) < 0)
		return refuse_pool(remote, pool, msg.object);
	/* a session shared again: the new list is found in the place of the old one */
	if (r >= 0 && !idmap_swap(&remote->pools_by_id, pool->id, pool))
		r = idmap_put(&remote->pools_by_id, pool->id, pool);
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
	share = pub ? find_share(pub, remote) : NULL;
	if (share && share->stage != SHARE_ANNOUNCED)
		share_end(share);
	else if (!pub && remote->unanswered)
		remote->unanswered--;
	else
		return 0;
	if (remote->refuses && remote->announced) { /* it may have been at its cap */
		remote->refuses = false;
		pools_announce(remote);
	}
	return 0;
}

/* The other side kept nothing: as if it had never been announced there. */
static void unannounced(struct handshake *hs, struct remote *remote, uint64_t object,
			const struct err *why)
{
	const struct announcement *pub = idmap_get(&hs->published_by_id, object);
	struct share *share = pub ? find_share(pub, remote) : NULL;

	if (share) {
		remote->refuses = true;
		share_end(share);
		return;
	}
	hs->events.on_unshared(hs->events.owner, remote, object, why);
}

static int on_register_nak(struct handshake *hs, struct remote *remote,
			   struct cursor *body)
{
	struct wire_register_nak msg;
	struct err why;
	int r = wire_register_nak_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	peer_told(remote->peer, msg.code, msg.text, &why);
	if (msg.code != ERR_LAYOUT) /* that says which pools contradict: both are kept */
		unannounced(hs, remote, msg.object, &why);
	log_warn("peer", remote->peer->shown, "the peer refuses a pool",
		 "pool=%llu why='%s'", (unsigned long long)msg.object, why.text);
	return 0;
}

/* A pool's share is known from its sending on; a session's waits for this. */
static int on_register_ack(struct handshake *hs, struct remote *remote,
			   struct cursor *body)
{
	struct wire_register_ack msg;
	int r = wire_register_ack_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	hs->events.on_shared(hs->events.owner, remote, msg.object);
	return 0;
}

/* What its rooms wait for may be among them, or not be there: they look now. */
static int on_pools(struct handshake *hs, struct remote *remote, struct cursor *body)
{
	struct wire_pools msg;
	int r = wire_pools_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (remote->listed)
		return err_raise(ERR_PROTO, "POOLS: twice");
	remote->listed = true;
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
