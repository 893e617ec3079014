/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net_reg: registered memory, common to backends (tcp, ucx, verbs), and keys for backends
 * whose peers need none: each side's own plan gives the addresses, and a packed key is a
 * number, for the bookkeeping of the daemon above.
 *
 * A registration lives while its owner or a transfer holds it. net_ops.reg_release
 * releases the fabric's part, on any thread; that may block, so when a transfer's end
 * drops the last reference, a helper does it.
 */
#ifndef KVD_TRANSPORT_NET_REG_H
#define KVD_TRANSPORT_NET_REG_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/loop/offload.h"
#include "daemon/transport/transport.h"

/* A backend's struct starts with it. */
struct net_reg {
	struct xp_reg_base base;
	atomic_int refs; /* the owner's, and one for each table that names it */
	uint64_t id;
	struct offload_job job; /* the last reference was dropped on the loop */
};

/* Zeroed, `size` bytes; ends by net_mem_dereg(). */
int net_reg_new(struct transport *base, struct memory *memory, size_t size, void *reg_p);
static inline void net_reg_ref(struct net_reg *reg)
{
	atomic_fetch_add(&reg->refs, 1);
}
void net_reg_put(struct net_reg *reg); /* loop's thread */

/* ---- transport_ops ---- */
/* For fabrics that need no registration. */
int net_mem_reg(struct transport *base, struct memory *memory, struct xp_reg **reg_p);
void net_mem_dereg(struct xp_reg *reg);
int net_key_pack(struct xp_reg *reg, struct xp_peer *peer, void *buf, size_t size,
		 size_t *len_p);
int net_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
		   struct xp_key **key_p);
void net_key_drop(struct xp_key *key);

#endif
