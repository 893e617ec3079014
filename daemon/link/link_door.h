/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_door: the connections of the listening socket. libzmq accepts any number of
 * connections and never closes a silent one. This part limits the number and the lifetime
 * of connections that have not authenticated. It also records failed handshakes with
 * their cause, in the log and in the table that the command `keys` shows.
 */
#ifndef KVD_LINK_DOOR_H
#define KVD_LINK_DOOR_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/link/link_refused.h"

struct link_door;
struct loop;

struct link_door_args {
	struct loop *loop;
	void *context, *router; /* ZeroMQ's */
	bool curve;		/* this daemon has keys */
	uint64_t silent_ns;	/* timeout of a connection without authentication */
	struct link_refusals *refusals;
	bool *unproven; /* updated: is there an unproven connection? */
};

int link_door_new(const struct link_door_args *args, struct link_door **door_p);
/* An authenticated frame was received on that descriptor, from that user ("" without
 * keys). */
void link_door_vouch(struct link_door *door, int fd, const char *user);
/* Close that connection. */
void link_door_cut(struct link_door *door, int fd);
/* A complete message was received on that descriptor. */
void link_door_received(struct link_door *door, int fd);
void link_door_free(struct link_door *door); /* before the socket is closed */

#endif
