/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake's registrations and keys. A key names a registration; unpacked, it is a
 * reference on that memory, as all nodes of a hub share one process.
 */
#include <errno.h>

#include "daemon/base/mem.h"
#include "tests/sim/fake_impl.h"

#define KEY_MAGIC UINT32_C(0x2079656b) /* "key " */
#define KEY_BYTES 24u

/* ---- registrations ---- */

int fake_mem_reg(struct transport *transport, struct memory *memory,
		 struct xp_reg **reg_p)
{
	struct fake_node *node = fake_node_of(transport);
	struct fake_hub *hub = node->hub;
	struct fake_reg *reg;
	bool fail;

	pthread_mutex_lock(&hub->regs_lock);
	fail = fake_fault_local(hub, FAKE_NOMEM_REG, node);
	pthread_mutex_unlock(&hub->regs_lock);
	if (fail)
		return err_raise(ERR_NOMEM, "fake: no memory to register (scripted)");
	reg = mem_zalloc(sizeof(*reg));
	if (!reg)
		return err_pass(-ENOMEM);
	reg->base.transport = transport;
	reg->base.memory = memory_ref(memory);
	reg->node = node->id;
	pthread_mutex_lock(&hub->regs_lock);
	reg->id = ++hub->next_reg;
	list_push_back(&hub->regs, &reg->link);
	pthread_mutex_unlock(&hub->regs_lock);
	*reg_p = (struct xp_reg *)(void *)reg;
	return 0;
}

void fake_mem_dereg(struct xp_reg *xreg)
{
	struct fake_reg *reg = fake_reg_of(xreg);
	struct fake_hub *hub = fake_node_of(reg->base.transport)->hub;

	pthread_mutex_lock(&hub->regs_lock);
	list_remove(&reg->link);
	pthread_mutex_unlock(&hub->regs_lock);
	memory_unref(reg->base.memory);
	mem_free(reg);
}

/* ---- keys ---- */

int fake_key_pack(struct xp_reg *xreg, struct xp_peer *peer, void *buf, size_t size,
		  size_t *len_p)
{
	struct fake_reg *reg = fake_reg_of(xreg);
	struct fake_node *node = fake_node_of(reg->base.transport);
	struct cursor out;

	(void)peer;
	cursor_write(&out, buf, size);
	cursor_put_u32(&out, KEY_MAGIC);
	cursor_put_u32(&out, node->id);
	cursor_put_u64(&out, node->incarnation);
	cursor_put_u64(&out, reg->id);
	*len_p = out.pos;
	return cursor_check(&out, "fake key");
}

/* The memory of a registration at this node, with a reference, or NULL. */
static struct memory *reg_memory(struct fake_hub *hub, const struct fake_node *node,
				 uint64_t id)
{
	struct memory *memory = NULL;
	struct fake_reg *reg;

	pthread_mutex_lock(&hub->regs_lock);
	list_foreach(reg, &hub->regs, link) {
		if (reg->id == id && reg->node == node->id)
			memory = memory_ref(reg->base.memory);
	}
	pthread_mutex_unlock(&hub->regs_lock);
	return memory;
}

static void on_key_usable(struct fake_event *event, bool dropped)
{
	struct fake_key *key = container_of(event, struct fake_key, usable);
	const struct xp_callbacks *up;

	if (dropped)
		return;
	up = &((struct fake_peer *)key->base.peer)->node->net.base.callbacks;
	key->base.ready = true;
	up->on_key(up->owner, (struct xp_key *)(void *)key, NULL);
}

static int key_new(struct fake_peer *peer, struct memory *memory, void *owner,
		   struct xp_key **key_p)
{
	struct fake_hub *hub = peer->node->hub;
	uint64_t key_ns = hub->profile.key_ns;
	struct fake_key *key = mem_zalloc(sizeof(*key));

	if (!key)
		return err_pass(-ENOMEM);
	key->base = (struct xp_key_base){
		.peer = (struct xp_peer *)peer, .ready = key_ns == 0, .owner = owner};
	key->memory = memory;
	fake_event_init(&key->usable, on_key_usable);
	list_push_back(&peer->keys, &key->link);
	if (key_ns)
		fake_event_at(hub, &key->usable, loop_now_ns(hub->loop) + key_ns, NULL,
			      peer->node);
	*key_p = (struct xp_key *)(void *)key;
	return 0;
}

int fake_key_unpack(struct xp_peer *xpeer, const void *buf, size_t len, void *owner,
		    struct xp_key **key_p)
{
	struct fake_peer *peer = (struct fake_peer *)xpeer;
	struct fake_node *remote;
	struct memory *memory;
	struct cursor in;
	int r;

	if (!fake_peer_works(peer))
		return err_raise(ERR_STATE, "fake key: the peer is not connected");
	if (fake_fault_local(peer->node->hub, FAKE_NOMEM_KEY, peer->node))
		return err_raise(ERR_NOMEM, "fake: no memory for the key (scripted)");
	remote = fake_remote(peer);
	cursor_read(&in, buf, len);
	if (len != KEY_BYTES || cursor_get_u32(&in) != KEY_MAGIC)
		return err_raise(ERR_PROTO, "fake key: %zu bytes that are no key", len);
	if (remote->dead || cursor_get_u32(&in) != remote->id ||
	    cursor_get_u64(&in) != remote->incarnation)
		return err_raise(ERR_PROTO, "fake key: not a key of this peer");
	memory = reg_memory(peer->node->hub, remote, cursor_get_u64(&in));
	if (!memory)
		return err_raise(ERR_REVOKED, "fake key: the memory is not registered");
	r = key_new(peer, memory, owner, key_p);
	if (r < 0)
		memory_unref(memory);
	return err_pass(r);
}

void fake_key_drop(struct xp_key *xkey)
{
	struct fake_key *key = fake_key_of(xkey);

	fake_event_remove(&key->usable);
	list_remove(&key->link);
	memory_unref(key->memory);
	mem_free(key);
}

static struct fake_key *key_waiting(struct fake_peer *peer)
{
	struct fake_key *key;

	list_foreach(key, &peer->keys, link) {
		if (fake_event_queued(&key->usable))
			return key;
	}
	return NULL;
}

void fake_keys_end(struct fake_peer *peer)
{
	const struct xp_callbacks *up = &peer->node->net.base.callbacks;
	struct fake_key *key;

	while ((key = key_waiting(peer))) {
		fake_event_remove(&key->usable);
		up->on_key(up->owner, (struct xp_key *)(void *)key, &peer->net.err);
	}
}

void fake_keys_detach(struct fake_peer *peer)
{
	struct fake_key *key;

	list_foreach_safe(key, &peer->keys, link) {
		fake_event_remove(&key->usable);
		list_remove(&key->link);
		key->base.peer = NULL;
		key->base.ready = false;
	}
}
