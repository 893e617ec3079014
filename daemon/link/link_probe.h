/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_probe: why does a line not connect? libzmq does not tell: a connection that is
 * refused and one that has no route look alike, and of two daemons one with CURVE keys
 * and one without, only the one that reads first learns the cause. So a failed line is
 * followed by one connection of our own, which brings the socket's error, or what the
 * other side's first bytes (ZMTP 3.0, RFC 23) say of its mechanism. If ours is another it
 * says that, so that the other side learns the cause, too; then it ends.
 */
#ifndef KVD_LINK_PROBE_H
#define KVD_LINK_PROBE_H

#include <stdbool.h>

struct link_probe;
struct loop;

enum probe_found {
	PROBE_ERRNO,	/* not connected: `no` */
	PROBE_CLOSED,	/* connected, and closed by the other side */
	PROBE_SILENT,	/* connected; nothing came in time */
	PROBE_NOT_ZMTP, /* something else listens there */
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
