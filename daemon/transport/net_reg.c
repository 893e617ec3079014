/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/transport/net_reg.h"

#include <errno.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/memory/memory.h"
#include "daemon/transport/net.h"

#define KEY_BYTES 12u

struct net_key {
	struct xp_key_base base;
	uint64_t id;
};

static struct net_transport *net_of(const struct net_reg *reg)
{
	return container_of(reg->base.transport, struct net_transport, base);
}

/* Any thread. */
static void net_reg_release(struct net_reg *reg)
{
	if (net_of(reg)->ops->reg_release)
		net_of(reg)->ops->reg_release(reg);
	memory_unref(reg->base.memory);
}

static void net_reg_release_work(struct offload_job *job)
{
	struct net_reg *reg = container_of(job, struct net_reg, job);
	struct net_transport *net = net_of(reg);

	net_reg_release(reg);
	atomic_fetch_sub(&net->releasing, 1); /* it may close now */
}

static void net_reg_release_done(struct offload_job *job)
{
	mem_free(container_of(job, struct net_reg, job));
}

int net_reg_new(struct transport *base, struct memory *memory, size_t size, void *reg_p)
{
	static atomic_uint_fast64_t ids;
	struct net_reg *reg = mem_zalloc(size);

	if (!reg)
		return err_pass(-ENOMEM);
	reg->base.transport = base;
	reg->base.memory = memory_ref(memory);
	atomic_init(&reg->refs, 1);
	reg->id = atomic_fetch_add(&ids, 1) + 1;
	reg->job.work = net_reg_release_work;
	reg->job.done = net_reg_release_done;
	*(struct net_reg **)reg_p = reg;
	return 0;
}

int net_mem_reg(struct transport *base, struct memory *memory, struct xp_reg **reg_p)
{
	int r = memory_check_copyable(memory);

	if (r == 0)
		r = net_reg_new(base, memory, sizeof(struct net_reg), reg_p);
	return err_pass(r);
}

void net_reg_put(struct net_reg *reg)
{
	if (atomic_fetch_sub(&reg->refs, 1) != 1)
		return;
	atomic_fetch_add(&net_of(reg)->releasing, 1);
	offload_submit(net_of(reg)->base.env.offload, &reg->job);
}

void net_mem_dereg(struct xp_reg *xp_reg)
{
	struct net_reg *reg = (struct net_reg *)xp_reg;

	if (atomic_fetch_sub(&reg->refs, 1) != 1)
		return;
	net_reg_release(reg);
	mem_free(reg);
}

int net_key_pack(struct xp_reg *xp_reg, struct xp_peer *peer, void *buf, size_t size,
		 size_t *len_p)
{
	const struct net_reg *reg = (const struct net_reg *)xp_reg;
	struct cursor c;

	(void)peer;
	if (size < KEY_BYTES)
		return err_raise(ERR_TOOBIG, "%s key: %u bytes, buffer of %zu",
				 net_of(reg)->base.ops->name, KEY_BYTES, size);
	cursor_write(&c, buf, size);
	cursor_put_u32(&c, net_of(reg)->ops->key_magic);
	cursor_put_u64(&c, reg->id);
	*len_p = c.pos;
	return 0;
}

int net_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
		   struct xp_key **key_p)
{
	const struct net_peer *net = (const struct net_peer *)peer;
	struct net_key *key;
	struct cursor c;
	uint32_t magic;
	uint64_t id;

	cursor_read(&c, buf, len);
	magic = cursor_get_u32(&c);
	id = cursor_get_u64(&c);
	if (c.bad || magic != net->transport->ops->key_magic || len != KEY_BYTES ||
	    id == 0)
		return err_raise(ERR_PROTO, "%s key: malformed", net_name(net));
	key = mem_zalloc(sizeof(*key));
	if (!key)
		return err_pass(-ENOMEM);
	key->base = (struct xp_key_base){.peer = peer, .ready = true, .owner = owner};
	key->id = id;
	*key_p = (struct xp_key *)key;
	return 0;
}

void net_key_drop(struct xp_key *key)
{
	mem_free(key);
}
