/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_probe: finds out why a line does not connect. libzmq does not report the cause: a
 * refused connection and a missing route look alike, and of two daemons, one with CURVE
 * keys and one without, only the one that reads first learns the cause. So after a
 * failure the daemon opens one connection of its own. It yields the error of the socket,
 * or the mechanism in the other side's first bytes (ZMTP 3.0, RFC 23). If the mechanism
 * differs, the probe sends its own, so that the other side learns the cause, too; then it
 * closes.
 */
#ifndef KVD_LINK_PROBE_H
#define KVD_LINK_PROBE_H

#include <stdbool.h>

struct link_probe;
struct loop;

enum probe_found {
	PROBE_ERRNO,	/* not connected: `no` */
	PROBE_CLOSED,	/* connected, and closed by the other side */
	PROBE_SILENT,	/* connected; nothing received in time */
	PROBE_NOT_ZMTP, /* another service listens there */
	PROBE_PLAIN,	/* ZeroMQ without keys */
	PROBE_CURVE,
};

/* `address` is tcp://NUMBER:PORT; `curve`: this daemon has keys. on_found() is called
 * once, on the loop, within a second, never from inside the functions here; it may free
 * the probe. */
int link_probe_new(struct loop *loop, const char *address, bool curve,
		   void (*on_found)(void *owner, enum probe_found found, int no),
		   void *owner, struct link_probe **probe_p);
void link_probe_free(struct link_probe *probe); /* NULL is fine */

#endif
