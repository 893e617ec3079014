/* SPDX-License-Identifier: Apache-2.0 */
/*
 * board: what this daemon keeps of a directory for others and for itself: entries by
 * group, each its publisher's, and who watches a group. Any daemon has one.
 *
 * An entry belongs to the daemon that published it. It stays for the lease that came with
 * it once that daemon is not connected any more, so a line that breaks for a second takes
 * nobody's workers away; a daemon that comes back, or another at its endpoint, has its
 * places at once. A place that somebody holds is refused to others with ERR_EXIST; while
 * its holder is not connected they wait.
 *
 * Who watches a group is told all that is there, then what changed, some milliseconds of
 * changes together. What is told is never kept: a watcher has a revision, and what
 * changed after it is read off the group when its line has room. So one that reads late
 * is told the latest and costs no memory.
 *
 * All that comes is claimed by others: places are checked, texts are bounded, and each
 * daemon has caps, and its account is charged.
 */
#ifndef KVD_CLUSTER_BOARD_H
#define KVD_CLUSTER_BOARD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"
#include "daemon/peer/peer.h"
#include "proto/wire.h"

struct board;
struct board_owner;

struct board_options {
	unsigned int entries_max;	/* of all groups */
	unsigned int owner_entries_max; /* of one daemon; the own one has all */
	unsigned int group_entries_max;
	unsigned int watches_max, owner_watches_max;
	size_t message_bytes;	/* what a peer message may be */
	uint64_t lease_max_ns;	/* no entry stays longer without its daemon */
	uint64_t tell_after_ns; /* changes of so long go in one message */
	uint64_t young_ns;	/* from its beginning: publishers may still come back */
};
void board_options_default(struct board_options *options);

int board_new(struct loop *loop, const struct board_options *options,
	      struct board **board_p);
void board_free(struct board *board); /* NULL is fine; all locals are closed */
unsigned int board_count(const struct board *board);   /* entries */
unsigned int board_watches(const struct board *board); /* of all daemons */

/* From the owner of the peers' callbacks. */
void board_peer_down(struct board *board, const struct peer *peer);
static inline bool board_handles(unsigned int type)
{
	return type == WIRE_T_BOARD_PUT || type == WIRE_T_BOARD_DROP ||
	       type == WIRE_T_BOARD_WATCH || type == WIRE_T_BOARD_UNWATCH ||
	       type == WIRE_T_ROUTE_QUERY || type == WIRE_T_ROUTE ||
	       (type >= WIRE_T_ROUTE_PUBLISH && type <= WIRE_T_ROUTE_WITHDRAW);
}
/* Negative: the peer broke the protocol. */
int board_on_message(struct board *board, struct peer *peer, unsigned int type,
		     struct cursor *body);

/* This daemon's own line to its board: the same messages, handed over in later turns.
 * Embedded in its owner. */
struct board_local {
	/* A message of the board's. */
	void (*hear)(struct board_local *local, unsigned int type, struct cursor *body);
	/* private */
	struct board *board;
	struct board_owner *owner; /* NULL: it has said nothing yet */
	struct list link;	   /* in board.locals */
	struct list said, heard;   /* struct board_letter */
	unsigned int heard_count;
	struct loop_defer deliver;
};
void board_local_open(struct board_local *local, struct board *board,
		      void (*hear)(struct board_local *local, unsigned int type,
				   struct cursor *body));
int board_local_say(struct board_local *local, unsigned int type, const void *body,
		    size_t len);
/* What it published goes. Idempotent. */
void board_local_close(struct board_local *local);

#endif
