/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directory: members of a cluster publish themselves here and read each other's entries.
 * A member's entry has a place (group, worker, ranks), a record, which seldom changes,
 * and a load, which often does; both are text, which the directory does not interpret. An
 * entry lives as long as its member: it is under a lease, which the directory renews.
 *
 * Two kinds: etcd, and local.h, of this daemon alone. A directory that is unreachable
 * reports so (`on_state`), retries, and keeps its cached entries; everything published is
 * published again once it is reachable. Loop thread.
 */
#ifndef KVD_CLUSTER_DIRECTORY_H
#define KVD_CLUSTER_DIRECTORY_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/link/names.h"

#define DIRECTORY_RECORD_MAX 4096u
#define DIRECTORY_LOAD_MAX 1024u

/* One rank of one worker of a group. A worker is an engine: all ranks that serve a
 * request together. Held by one member at a time; another's claim is ERR_EXIST. */
struct place {
	char group[PLACE_GROUP_MAX];
	char worker[PLACE_WORKER_MAX]; /* "": the group's only one */
	uint32_t rank[PLACE_AXES];
};

struct directory;

/* A publication of this daemon; embedded in its owner. */
struct publication {
	/* Called once, from the loop, never inside the call that made it: it is in the
	 * directory (err NULL), or was refused (ERR_EXIST, ERR_LIMIT, ERR_AUTH, …) and is
	 * withdrawn already. Later faults are the directory's own: it publishes all
	 * again. May be NULL. */
	void (*on_done)(struct publication *publication, const struct err *err);
	struct list link; /* the directory's */
	void *impl;	  /* the directory's; NULL: not published */
};

/* A reader of a group; embedded in its owner. */
struct watch {
	/* Called once for each present entry, then for each change, in the directory's
	 * order of each entry. record NULL: removed. load: NULL if unknown. Valid during
	 * the call, in which watch may be ended. */
	void (*on_entry)(struct watch *watch, const struct place *place,
			 const char *record, const char *load);
	/* All present entries were reported (also after a disconnect, including removals
	 * during it). May be NULL. */
	void (*on_synced)(struct watch *watch);
	/* Changes may be missed until on_synced is called again. May be NULL. */
	void (*on_unsynced)(struct watch *watch);
	struct list link; /* the directory's */
	void *impl;	  /* the directory's; NULL: not watched */
};

struct directory_state {
	bool up;	   /* it responds, and the lease is alive */
	uint64_t since_ns; /* loop time of that */
	uint64_t refused;  /* entries of others that were malformed or too long */
	uint64_t puts, events, reconnects;
	struct err why; /* not up: the last attempt and its error */
};

struct directory_ops {
	const char *name; /* etcd, local */
	/* A second put replaces the first. A negative result: not started. Text is
	 * copied. */
	int (*publish)(struct directory *directory, struct publication *publication,
		       const struct place *place, const char *record, const char *load);
	/* Another record, another load; NULL: unchanged. ERR_LIMIT, ERR_NOMEM. */
	int (*update)(struct publication *publication, const char *record,
		      const char *load);
	void (*withdraw)(struct publication *publication); /* idempotent */
	/* `loads`: report loads, too. */
	int (*watch)(struct directory *directory, struct watch *watch, const char *group,
		     bool loads);
	void (*unwatch)(struct watch *watch); /* idempotent */
	void (*state)(const struct directory *directory, struct directory_state *state_p);
	/* Withdraws everything published, as far as that can be done at once. */
	void (*free)(struct directory *directory);
};

struct directory {
	const struct directory_ops *ops;
	void (*on_state)(void *arg); /* up or not up since now; NULL */
	void *arg;
};

#endif
