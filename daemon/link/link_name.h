/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_name: the current address of a line to a host name.
 *
 * libzmq resolves names on its I/O thread, which all lines share: one name server that
 * does not answer would block every peer for seconds, and all others would declare this
 * daemon dead. So lines are only given numeric addresses. A name is resolved in the
 * background, its addresses are tried in turn, and when none connects it is resolved
 * again: a host that has moved is found at its new address.
 */
#ifndef KVD_LINK_NAME_H
#define KVD_LINK_NAME_H

#include <stdbool.h>

struct link_name;
struct loop;

/* Is it a numeric address (IPv4, or IPv6 in brackets)? */
bool link_name_is_number(const char *host);
/* Starts resolving at once. on_address(): the line should connect to `address`,
 * tcp://NUMBER:PORT, instead of the previous one; called on the loop, never from
 * inside the functions here; the text is valid during the call. `host` is at most 127
 * characters, `port` 5. on_none(), as on_address(): the name has no address at
 * present, with the resolver's error. */
int link_name_new(struct loop *loop, const char *host, const char *port,
		  void (*on_address)(void *owner, const char *address),
		  void (*on_none)(void *owner, const char *host, const char *why),
		  void *owner, struct link_name **name_p);
void link_name_free(struct link_name *name);
/* The line has connected, or is broken or full. An address gets two seconds to
 * connect, a lost one ten seconds to recover; then the next one is tried. */
void link_name_line(struct link_name *name, bool connected);

#endif
