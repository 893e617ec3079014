/* SPDX-License-Identifier: Apache-2.0 */
/*
 * events: the switchboard: what peers and sessions do, told to the parts that stand on
 * them. The order in which the parts hear of an end is the order of their calls here.
 */
#ifndef KVD_EVENTS_H
#define KVD_EVENTS_H

#include "daemon/handshake/handshake.h"
#include "daemon/session/session.h"

struct kvd;

/* For handshake_new(); kvd->rooms and kvd->xfers must be there when it fires. */
struct handshake_events events_of(struct kvd *kvd);
/* For kvd->session_events. */
extern const struct session_events session_events;

#endif
