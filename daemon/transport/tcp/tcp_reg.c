/* SPDX-License-Identifier: Apache-2.0 */
/* Memory needs no registration here, and a peer no key: where bytes land and
 * come from is each side's own plan. A packed key is a number, for the
 * bookkeeping of the daemon above. */
#include <errno.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/transport/tcp/tcp_impl.h"

#define KEY_MAGIC UINT32_C(0x4b54564b) /* "KVTK" */
#define KEY_BYTES 12u

struct tcp_key {
	struct xp_key_base base;
	uint64_t id;
};

int tcp_mem_reg(struct transport *base, struct memory *memory, struct xp_reg **reg_p)
{
	static atomic_uint_fast64_t ids;
	struct tcp_reg *reg;

	if (memory_check_copyable(memory) < 0)
		return err_pass(-ENOTSUP);
	reg = mem_zalloc(sizeof(*reg));
	if (!reg)
		return err_pass(-ENOMEM);
	reg->base.transport = base;
	reg->base.memory = memory_ref(memory);
	reg->id = atomic_fetch_add(&ids, 1) + 1;
	*reg_p = (struct xp_reg *)reg;
	return 0;
}

void tcp_mem_dereg(struct xp_reg *xp_reg)
{
	struct tcp_reg *reg = (struct tcp_reg *)xp_reg;

	memory_unref(reg->base.memory);
	mem_free(reg);
}

int tcp_key_pack(struct xp_reg *xp_reg, struct xp_peer *peer, void *buf, size_t size,
		 size_t *len_p)
{
	struct tcp_reg *reg = (struct tcp_reg *)xp_reg;
	struct cursor c;

	(void)peer;
	if (size < KEY_BYTES)
		return err_raise(ERR_TOOBIG, "tcp key: %u bytes, room for %zu", KEY_BYTES,
				 size);
	cursor_write(&c, buf, size);
	cursor_put_u32(&c, KEY_MAGIC);
	cursor_put_u64(&c, reg->id);
	*len_p = c.pos;
	return 0;
}

int tcp_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
		   struct xp_key **key_p)
{
	struct tcp_key *key;
	struct cursor c;
	uint32_t magic;
	uint64_t id;

	cursor_read(&c, buf, len);
	magic = cursor_get_u32(&c);
	id = cursor_get_u64(&c);
	if (c.bad || magic != KEY_MAGIC || len != KEY_BYTES || id == 0)
		return err_raise(ERR_PROTO, "tcp key: not one");
	key = mem_zalloc(sizeof(*key));
	if (!key)
		return err_pass(-ENOMEM);
	key->base = (struct xp_key_base){.peer = peer, .ready = true, .owner = owner};
	key->id = id;
	*key_p = (struct xp_key *)key;
	return 0;
}

void tcp_key_drop(struct xp_key *key)
{
	mem_free(key);
}
