/* SPDX-License-Identifier: Apache-2.0 */
/*
 * handshake: what two daemons know of each other's memory. Chooses the
 * transport of a peer, opens it, sends REGISTER for every local pool once per
 * peering, keeps the remote pools with usable keys, and takes all of it back
 * on UNREGISTER or when the peer goes down.
 */
#ifndef KVD_HANDSHAKE_H
#define KVD_HANDSHAKE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/peer.h"
#include "daemon/plan/layout.h"
#include "daemon/pool.h"
#include "daemon/transport/transport.h"

struct kvd;
struct handshake;

struct remote_region {
	uint64_t id, address, length;
	uint8_t kind; /* enum region_kind: for records */
	struct xp_key *key;
	bool ready;
};

struct remote_pool {
	struct list link; /* in remote.pools */
	struct remote *remote;
	uint64_t id;	  /* the owner's pool id (kind pool) or session epoch (kind session) */
	uint64_t session; /* the owner's session epoch */
	bool is_session;
	char name[POOL_NAME_MAX];
	uint32_t tp_size;
	struct layout *layout;	   /* pools only */
	struct remote_region *regions;
	uint32_t region_count;
	struct xp_buffer *buffers; /* pools: layout->buffer_count, .key and .offset set */
	bool ready;		   /* every key is usable */
	struct err refused;	   /* code != OK: cannot be used, with the difference */
	unsigned int uses;	   /* rooms and ops that hold it */
	bool going;		   /* UNREGISTER came: acked at zero uses */
};

/* A peer as the upper layers see it: the control line and the data line. */
struct remote {
	struct peer *peer;
	struct transport *transport; /* chosen; NULL until chosen */
	unsigned int transport_index;
	struct xp_peer *xp;
	bool ready;	  /* data line usable */
	struct err why;	  /* code != OK: no transport / down */
	struct list pools;
	struct list link;
};

struct handshake_events {
	void *owner;
	/* A remote pool became ready or was refused; a data line became ready or
	 * was lost (all its ops are done by then): rooms that wait look again. */
	void (*on_change)(void *owner, struct remote *remote);
	/* The peer is down: everything of it is invalid after this call. */
	void (*on_down)(void *owner, struct remote *remote, const struct err *why);
	/* The owner withdraws the pool: stop using it (drop `uses`). */
	void (*on_pool_going)(void *owner, struct remote_pool *pool);
	/* A room's, attach's or lease's message. */
	int (*on_message)(void *owner, struct remote *remote, const struct wire_header *h,
			  struct cursor *body);
	void (*on_request)(void *owner, struct remote *remote, struct xp_inbound *in);
	void (*on_inbound_done)(void *owner, struct xp_inbound *in, const struct err *err);
};

int handshake_new(struct kvd *kvd, const struct handshake_events *events,
		  struct handshake **hs_p);
void handshake_close(struct handshake *hs);
void handshake_free(struct handshake *hs);

/* Dial and hold. Never blocks; watch on_change. */
int handshake_reach(struct handshake *hs, const char *endpoint, struct remote **remote_p);
void handshake_release(struct handshake *hs, struct remote *remote);

/* Announce / withdraw a local pool; on_gone when no peer can use it any more. */
int handshake_publish_pool(struct handshake *hs, struct pool *pool);
void handshake_withdraw_pool(struct handshake *hs, struct pool *pool,
			     void (*on_gone)(void *arg), void *arg);

/* The remote's pool by id, or by name (NULL: its only one). Outcome 1: none
 * yet; negative: ambiguous or refused (ERR_LAYOUT with the difference). */
int handshake_pool(struct remote *remote, const char *name, const struct pool *local,
		   struct remote_pool **pool_p);
struct remote_pool *handshake_pool_by_id(struct remote *remote, uint64_t id);

/* Buffer tables for transports: local sides of a pool, remote sides of a peer's
 * pool. Arrays of layout->buffer_count, valid as long as the pool. */
const struct xp_buffer *handshake_local_buffers(struct pool *pool, struct remote *remote);

#endif
