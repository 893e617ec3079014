/* SPDX-License-Identifier: Apache-2.0 */
/* board_impl: shared by board.c (entries), board_tell.c (who watches), board_route.c
 * (daemons of before) and board_local.c. Nobody else includes it. */
#ifndef KVD_CLUSTER_BOARD_IMPL_H
#define KVD_CLUSTER_BOARD_IMPL_H

#include "daemon/base/account.h"
#include "daemon/base/idmap.h"
#include "daemon/cluster/board.h"
#include "daemon/cluster/roster.h"

/* A daemon: connected, or away for the time of its lease. */
struct board_owner {
	struct list link;  /* in board.owners */
	struct list away;  /* in board.away, while it is */
	struct peer *peer; /* NULL: away, or it is a local one's */
	struct board_local *local;
	uint8_t instance[16];
	char instance_text[33];
	char endpoint[LINK_ENDPOINT_MAX], known_as[LINK_USER_MAX];
	struct list items, watchers;
	unsigned int item_count, watch_count;
	uint64_t lease_ns; /* the longest of its entries */
	uint64_t until_ns; /* what it left when it was away last goes then; 0: nothing */
};

struct board_item {
	struct list link; /* in owner.items */
	struct board_owner *owner;
	struct board_group *group;
	struct roster_entry *entry;
	struct charge charge;
	bool left; /* its owner was away, and has not put it again */
};

struct board_group {
	char *name;
	struct roster roster;
	struct list watchers;
	struct list due_link; /* in board.due: it changed */
};

struct board_watcher {
	struct list of_owner, of_group;
	struct list link; /* in board.telling or board.blocked */
	struct board_owner *owner;
	struct board_group *group;
	uint64_t cookie;
	uint64_t sent;	   /* the place in the order of change up to which it is told, */
	struct place last; /* and who is there */
	/* and the revision from which on, until it is told the last; of one that is told
	 * all: when that began */
	uint64_t base;
	bool loads;
	bool fresh;  /* it is told all, as one that knows nothing */
	bool begun;  /* of that, a part is out */
	bool synced; /* it has been told all once */
};

struct board {
	struct loop *loop;
	struct board_options options;
	struct strmap groups;
	struct list owners, away, locals;
	struct idmap of_peer; /* struct board_owner, of those that are connected */
	unsigned int count, watch_count;
	uint64_t next_rev; /* of groups that begin */
	uint64_t young_until_ns;
	struct list due, telling, blocked;
	struct loop_timer tell_timer, away_timer;
	struct loop_defer tell;
};

/* ---- board.c ---- */
/* Made when need be; NULL: no memory. */
struct board_owner *board_owner_of(struct board *board, struct peer *peer,
				   struct board_local *local);
void board_owner_idle(struct board *board, struct board_owner *owner); /* may free it */
void board_owner_gone(struct board *board, struct board_owner *owner); /* frees it */
struct board_group *board_group_find(const struct board *board, const char *name);
struct board_group *board_group_get(struct board *board, const char *name);
void board_group_idle(struct board *board, struct board_group *group); /* may free it */
/* ERR_INVAL, ERR_EXIST, ERR_LIMIT, ERR_NOTFOUND (no record, and none is there). */
int board_put(struct board *board, struct board_owner *owner, const struct place *place,
	      const char *record, const char *load, uint64_t lease_ns);
void board_take(struct board *board, struct board_owner *owner,
		const struct place *place);
int board_hear(struct board *board, struct board_owner *owner, unsigned int type,
	       struct cursor *body);
/* To its daemon, without a promise. */
int board_say(struct board_owner *owner, unsigned int type, const void *body, size_t len);

/* ---- board_tell.c ---- */
void board_tell_init(struct board *board);
void board_tell_fini(struct board *board);
void board_group_changed(struct board *board, struct board_group *group);
int board_on_watch(struct board *board, struct board_owner *owner, struct cursor *body);
int board_on_unwatch(struct board *board, struct board_owner *owner, struct cursor *body);
void board_watcher_free(struct board *board, struct board_watcher *watcher);

/* ---- board_route.c ---- */
int board_on_route(struct board *board, struct board_owner *owner, unsigned int type,
		   struct cursor *body);

/* ---- board_local.c ---- */
int board_local_tell(struct board_local *local, unsigned int type, const void *body,
		     size_t len);

#endif
