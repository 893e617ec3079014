/* SPDX-License-Identifier: Apache-2.0 */
/* events: the switchboard between the handshake layer and the two that stand
 * on it, rooms and transfers. */
#ifndef KVD_EVENTS_H
#define KVD_EVENTS_H

#include "daemon/handshake/handshake.h"

struct kvd;

/* For handshake_new(); kvd->rooms and kvd->xfers must be there when it fires. */
struct handshake_events events_of(struct kvd *kvd);

#endif
