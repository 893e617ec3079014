/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool: regions + layout. Announced to every peer (handshake.c), used by rooms.
 */
#ifndef KVD_POOL_H
#define KVD_POOL_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/plan/layout.h"
#include "daemon/session/region.h"

struct session;

#define POOL_NAME_MAX 64

/* layout buffer i */
struct pool_buffer {
	struct region *region; /* pinned */
	uint64_t offset;
	bool first; /* the first of this pool in that region */
};

/* Current and past work of its rooms: room_counts.c. */
struct pool_work {
	uint32_t waiting, running; /* before and in transfer */
	uint64_t moved;		   /* bytes */
	uint64_t failed;	   /* rooms */
	uint64_t firsts, first_ns; /* rooms of which a byte has moved; the times from
				      their opening to that, added up */
};

struct pool {
	uint64_t id; /* unique in this daemon: its name on the wire */
	struct session *session;
	char name[POOL_NAME_MAX]; /* pools with one name are expected to match */
	struct layout *layout;
	uint64_t digest; /* of layout_pack(), */
	uint8_t *packed; /* which REGISTER carries */
	size_t packed_bytes;
	struct err *no_target; /* why no bytes may be written to it; NULL: they may */
	struct pool_buffer *buffers; /* layout->buffer_count of them */
	unsigned int rooms;	     /* that use it: pool_use(), pool_unuse() */
	bool closing;
	struct pool_work work;
	void *handshake; /* handshake.c's: the peers that know it */
	/* used by handshake.c: its buffers in the form of each transport, made on
	 * demand; transfers use them until the pool is freed */
	struct xp_buffer *tables[TRANSPORTS_MAX];
};

struct pool_args {
	const char *name;
	const cJSON *layout;  /* read on a helper until on_done */
	const cJSON *regions; /* array of {"region":id,"offset":n}, one a buffer */
};

/* Pins the regions, parses the layout on a helper, announces the pool. on_done:
 * the pool, or NULL and the fault; exactly once after a return of 0. */
int pool_register(struct session *session, const struct pool_args *args,
		  void (*on_done)(void *arg, struct pool *pool, const struct err *err),
		  void *arg);
/* The session ends: close all of its pools; each drains by itself. */
void pools_close(struct session *session);

/* A room starts and ends its use of the pool. The pool must not be closing. */
void pool_use(struct pool *pool);
/* Use of a pool that is in use already, and may be closing. */
void pool_use_again(struct pool *pool);
void pool_unuse(struct pool *pool);

/* Bytes are written to this pool: fields of a view must not overlap. ERR_LAYOUT. */
int pool_check_target(struct pool *pool);

struct pool *pool_find(struct session *session, uint64_t id); /* or NULL + ERR_NOTFOUND */
/* Notify peers, wait until it is unused, unpin, free, then on_closed (may be NULL).
 * Look-ups no longer find it. */
void pool_close(struct pool *pool, void (*on_closed)(void *arg), void *arg);

/* Announces pools to peers: the handshake's, in kvd->publisher. */
struct pool_publisher {
	/* It was registered: announce it to peers. Negative: this is not possible. */
	int (*publish)(struct pool *pool);
	/* It is closing: on_gone(arg) when no peer can use it any more; at once if no
	 * peer can know it. */
	void (*withdraw)(struct pool *pool, void (*on_gone)(void *arg), void *arg);
};

#endif
