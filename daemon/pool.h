/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pool: regions + layout. Announced to every peer (handshake.c), used by rooms.
 */
#ifndef KVD_POOL_H
#define KVD_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/plan/layout.h"
#include "daemon/region.h"

struct session;

#define POOL_NAME_MAX 64

struct pool_buffer { /* layout buffer i */
	struct region *region; /* pinned */
	uint64_t offset;
};

struct pool {
	uint64_t id; /* unique in this daemon: it names the pool on the wire */
	struct session *session;
	char name[POOL_NAME_MAX]; /* pools of one name are meant to match */
	uint32_t tp_size;	  /* 0 = not given */
	struct layout *layout;
	struct pool_buffer *buffers; /* layout->buffer_count of them */
	unsigned int rooms;	     /* rooms that use it */
	bool closing;
	void *handshake; /* handshake.c's: who knows it */
};

struct pool *pool_find(struct session *session, uint64_t id); /* or NULL + ERR_NOTFOUND */
/* Tell peers, wait until none uses it, unpin, free, then on_closed. */
void pool_close(struct pool *pool, void (*on_closed)(void *arg), void *arg);

#endif
