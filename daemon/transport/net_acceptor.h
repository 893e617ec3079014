/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net_acceptor: the listening sockets on which other daemons connect (shm, tcp), and the
 * connections whose hello has not identified their peer yet.
 */
#ifndef KVD_TRANSPORT_NET_ACCEPTOR_H
#define KVD_TRANSPORT_NET_ACCEPTOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/transport/net.h"

#define NET_HELLO_MAX 96u
#define NET_LISTENERS 2u

struct net_acceptor;

struct net_pending {
	struct list link; /* acceptor->pendings, oldest first */
	struct net_acceptor *acceptor;
	struct loop_fd watch;
	int fd;
	uint8_t hello[NET_HELLO_MAX];
	size_t got;
	bool complete;
	bool unread; /* this user may not connect yet */
	uint64_t deadline_ns;
};

struct net_listener {
	struct net_acceptor *acceptor;
	struct loop_fd watch;
	int fd;	      /* -1: none */
	bool resting; /* out of fds: accepts again at the next tick */
};

enum { NET_PENDING_WAITS = 1 }; /* its peer is unknown yet */

struct net_acceptor {
	struct net_transport *net;
	/* Its hello has arrived. 0: its fd was taken. Negative: refuse it. */
	int (*meet)(struct net_pending *pending);
	void (*want_tick)(
		struct net_acceptor *acceptor); /* call net_acceptor_tick() soon */
	/* For Unix sockets: which users may connect, checked before a byte is read. Else
	 * NULL. */
	bool (*admits)(struct net_acceptor *acceptor, int fd);
	size_t hello_bytes;
	uint64_t wait_ns; /* tests make it short */
	struct list pendings;
	unsigned int counts[2], max; /* [1]: complete */
	struct net_listener listeners[NET_LISTENERS];
};

/* Before anything can fail; the owner sets the other members. */
void net_acceptor_init(struct net_acceptor *acceptor, struct net_transport *net);
void net_acceptor_close(struct net_acceptor *acceptor); /* idempotent */
/* Takes `owned_fd`, which listens. */
int net_acceptor_listen(struct net_acceptor *acceptor, unsigned int at, int owned_fd);
void net_acceptor_tick(struct net_acceptor *acceptor, bool *wanted_p);
/* There is a new peer: connections that it permits are read now. */
void net_acceptor_look(struct net_acceptor *acceptor);
int net_pending_take(struct net_pending *pending); /* its fd; the pending is freed */

#endif
