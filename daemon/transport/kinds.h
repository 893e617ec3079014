/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kinds: the requests on a data line, and their handlers.
 */
#ifndef KVD_KINDS_H
#define KVD_KINDS_H

#include "proto/wire.h"

struct err;

/* The first byte of a request's header: R(number, NAME, OWNER), the owner as of wire
 * messages. */
#define REQUESTS(R)                                                   \
	R(1, CHUNK, ROOM) /* a room's sender to its receiver */       \
	R(2, PULL, ROOM)  /* a room's puller to its offerer */        \
	R(3, XFER, XFER)  /* these four: between attached sessions */ \
	R(4, DLIST, XFER)                                             \
	R(5, DLIST_FREE, XFER)                                        \
	R(6, NOTIF, XFER)                                             \
	R(7, MESSAGE, HANDSHAKE) /* a peer message, its frame follows */

#define REQUEST_ENUM(num, NAME, owner) REQUEST_##NAME = (num),
enum request_kind { REQUESTS(REQUEST_ENUM) REQUEST_END };
#undef REQUEST_ENUM

/* WIRE_OWNER_NONE: unknown kind. */
static inline enum wire_owner request_owner(unsigned int kind)
{
#define REQUEST_OWNER(num, NAME, owner) [num] = WIRE_OWNER_##owner,
	static const enum wire_owner owners[REQUEST_END] = {REQUESTS(REQUEST_OWNER)};
#undef REQUEST_OWNER

	return kind < REQUEST_END ? owners[kind] : WIRE_OWNER_NONE;
}

/* The handler of a request stores this in xp_inbound.owner. */
struct inbound_owner {
	void (*on_done)(struct inbound_owner *inbound, const struct err *err);
};

#endif
