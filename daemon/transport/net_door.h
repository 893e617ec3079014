/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net_door: where daemons connect to this one (shm, tcp): its listening sockets, and who
 * came in and has not shown whose he is.
 */
#ifndef KVD_TRANSPORT_NET_DOOR_H
#define KVD_TRANSPORT_NET_DOOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/transport/net.h"

#define NET_HELLO_BYTES 40u
#define NET_LISTENERS 2u

struct net_door;

struct net_guest {
	struct list link; /* door->guests, oldest first */
	struct net_door *door;
	struct loop_fd watch;
	int fd;
	uint8_t hello[NET_HELLO_BYTES];
	size_t got;
	bool complete;
	uint64_t deadline_ns;
};

struct net_listener {
	struct net_door *door;
	struct loop_fd watch;
	int fd;	      /* -1: none */
	bool resting; /* out of fds: accepts again at the next tick */
};

enum { NET_GUEST_WAITS = 1 }; /* nobody knows it yet */

struct net_door {
	struct net_transport *net;
	/* Its hello is there. 0: its fd was taken. Negative: refuse it. */
	int (*meet)(struct net_guest *guest);
	void (*want_tick)(struct net_door *door); /* call net_door_tick() soon */
	uint64_t wait_ns;			  /* tests make it short */
	struct list guests;
	unsigned int counts[2], max; /* [1]: complete */
	struct net_listener listeners[NET_LISTENERS];
};

/* Before anything can fail; the rest of the members is the owner's to set. */
void net_door_init(struct net_door *door, struct net_transport *net);
void net_door_close(struct net_door *door); /* idempotent */
/* Takes `owned_fd`, which listens. */
int net_door_listen(struct net_door *door, unsigned int at, int owned_fd);
void net_door_tick(struct net_door *door, bool *wanted_p);
int net_guest_take(struct net_guest *guest); /* its fd; the guest is freed */

#endif
