/* SPDX-License-Identifier: Apache-2.0 */
/*
 * board_directory: a directory (directory.h) on the boards of one to three daemons, the
 * own one among them or not. What is published is said at each; groups are read at one,
 * and at another when that goes. Without a peering to any it is not up.
 *
 * The owner of the peers' callbacks hands peer events and the BOARD messages on.
 */
#ifndef KVD_CLUSTER_BOARD_DIRECTORY_H
#define KVD_CLUSTER_BOARD_DIRECTORY_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/cluster/directory.h"
#include "daemon/peer/peer.h"

#define BOARD_SITES_MAX 3u

struct board;
struct board_directory;

struct board_directory_args {
	struct loop *loop;
	struct peers *peers;
	struct board *board; /* the own daemon's */
	const char *own;     /* its endpoint, as others dial it */
	/* "" is the own daemon */
	const char *endpoints[BOARD_SITES_MAX];
	unsigned int count;
	uint64_t lease_ns; /* how long entries stay there without this daemon */
	/* on_state, which may be NULL */
	void (*on_state)(void *arg);
	void *arg;
};

/* ERR_INVAL names the endpoint that is none. */
int board_directory_new(const struct board_directory_args *args,
			struct directory **directory_p);

/* From the owner of the peers' callbacks. */
void board_directory_peer_up(struct directory *directory, struct peer *peer);
void board_directory_peer_down(struct directory *directory, const struct peer *peer);
void board_directory_peer_refused(struct directory *directory, const struct peer *peer);
static inline bool board_directory_handles(unsigned int type)
{
	return type == WIRE_T_BOARD_ACK || type == WIRE_T_BOARD_TOLD;
}
/* What it did not ask for is ignored. Negative: the peer broke the protocol. */
int board_directory_on_message(struct directory *directory, const struct peer *peer,
			       unsigned int type, struct cursor *body);

#endif
