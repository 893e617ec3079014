/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_look: the machine's RDMA hardware, whether or not the verbs backend uses it, and
 * why not. For operators (`kvd-ctl devices`); the backend itself does not depend on it.
 */
#ifndef KVD_TRANSPORT_VERBS_LOOK_H
#define KVD_TRANSPORT_VERBS_LOOK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/err.h"

struct config;
struct transport;

#define VERBS_LOOK_PORTS 32u
#define VERBS_LOOK_GIDS 8u

struct verbs_look_gid {
	int index;
	char gid[40], type[16]; /* "::ffff:10.0.0.1", "RoCE v2" */
};

struct verbs_look_port {
	char device[32];
	uint8_t port;
	char state[16], link[16],
		rate[40]; /* "active", "Ethernet", "100 Gb/sec (4X EDR)" */
	unsigned int mtu;
	int node;			 /* NUMA; -1: not known */
	char interface[20], address[48]; /* by which it is found; "" */
	uint32_t gid_count;		 /* those that are set; at most VERBS_LOOK_GIDS */
	struct verbs_look_gid gids[VERBS_LOOK_GIDS];
};

struct verbs_look {
	uint32_t count;
	struct verbs_look_port ports[VERBS_LOOK_PORTS];
	struct err err; /* why there is none, or why some are missing */
};

/* Opens each device for a moment, which takes milliseconds: helper thread. */
void verbs_look(struct verbs_look *look_p);
/* Loop's thread: how `transport` (the open backend, or NULL) uses the port, or why not,
 * as text. True: it does. */
bool verbs_look_use(const struct verbs_look_port *port, const struct config *config,
		    const struct transport *transport, char *why, size_t size);

#endif
