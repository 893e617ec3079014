/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_name: where a line to a host's name should go just now.
 *
 * libzmq looks names up on its I/O thread, which all lines share: one name server
 * that does not answer would silence every peer for seconds, and a daemon be
 * declared dead by all others. So lines are only ever given numbers. A name is asked
 * for in the background, its addresses are tried one after the other, and when none
 * answers it is asked for anew: a host that has moved is found where it is now.
 */
#ifndef KVD_LINK_NAME_H
#define KVD_LINK_NAME_H

#include <stdbool.h>

struct link_name;
struct loop;

/* Is it an address as it stands (IPv4, or IPv6 in brackets)? */
bool link_name_is_number(const char *host);
/* Asks at once. on_address(): the line should go to `address`, tcp://NUMBER:PORT, instead
 * of where it went before; on the loop, never from inside the functions here; the
 * text is valid during the call. `host` is at most 127 characters, `port` 5. on_none(),
 * as on_address(): it has no address now, in the resolver's words. */
int link_name_new(struct loop *loop, const char *host, const char *port,
		  void (*on_address)(void *owner, const char *address),
		  void (*on_none)(void *owner, const char *host, const char *why),
		  void *owner, struct link_name **name_p);
void link_name_free(struct link_name *name);
/* The line has connected, or is broken or full. An address gets two seconds to connect,
 * one that was lost ten to come back; then it is the next one's turn. */
void link_name_line(struct link_name *name, bool connected);

#endif
