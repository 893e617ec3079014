/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kinds: what travels as a request on a data line, and what answers it here.
 */
#ifndef KVD_KINDS_H
#define KVD_KINDS_H

struct err;

/* The first byte of a request's header. */
enum request_kind {
	REQUEST_CHUNK = 1, /* a room's sender to its receiver */
	REQUEST_PULL = 2,  /* a room's puller to its offerer */
	REQUEST_XFER = 3,  /* these four: between attached sessions */
	REQUEST_DLIST = 4,
	REQUEST_DLIST_FREE = 5,
	REQUEST_NOTIF = 6,
	REQUEST_MESSAGE = 7, /* a peer message, its frame follows */
};

/* Whoever answers a request puts this into xp_inbound.owner. */
struct inbound_owner {
	void (*on_done)(struct inbound_owner *inbound, const struct err *err);
};

#endif
