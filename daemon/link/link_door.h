/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_door: the listening socket's side of failed handshakes: who came, and what was
 * wrong, in the log and in the table that `keys` shows.
 */
#ifndef KVD_LINK_DOOR_H
#define KVD_LINK_DOOR_H

#include <stdbool.h>

#include "daemon/link/link_refused.h"

struct link_door;
struct loop;

/* `table` is borrowed. `curve`: this daemon has keys. */
int link_door_new(struct loop *loop, void *context, void *router, bool curve,
		  struct link_refusals *table, struct link_door **door_p);
void link_door_free(struct link_door *door); /* before the socket is closed */

#endif
