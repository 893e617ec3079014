/* SPDX-License-Identifier: Apache-2.0 */
/*
 * directory: where members of a cluster tell of themselves and read of each other. A
 * member's entry has a place (group, worker, ranks), a record, which seldom changes, and
 * a load, which often does; both are text, and the directory understands neither. An
 * entry lives as long as its member: it is under a lease, which the directory renews.
 *
 * Two kinds: etcd, and local.h, of this daemon alone.
 * A directory that cannot be reached tells so (`on_state`), goes on trying, and keeps
 * what it knows; what was published is published again when it is back. Loop thread.
 */
#ifndef KVD_CLUSTER_DIRECTORY_H
#define KVD_CLUSTER_DIRECTORY_H

#include <stdbool.h>
#include <stddef.h>
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

/* What this daemon says; in its owner. */
struct publication {
	/* Once, from the loop, never inside the call that made it: it is in the directory
	 * (err NULL), or was refused (ERR_EXIST, ERR_LIMIT, ERR_AUTH, …) and is withdrawn
	 * already. Later troubles are the directory's own: it says all again. NULL:
	 * nobody asks. */
	void (*on_done)(struct publication *publication, const struct err *err);
	struct list link; /* the directory's */
	void *impl;	  /* the directory's; NULL: not published */
};

/* Who reads a group; in its owner. */
struct watch {
	/* Once for each entry that is there, then for each change, in the directory's
	 * order of each entry. record NULL: gone. load: NULL when none is known. Valid
	 * during the call, in which watch may be ended. */
	void (*on_entry)(struct watch *watch, const struct place *place,
			 const char *record, const char *load);
	/* All that is there was told (also after a time away, when what has gone
	 * meanwhile was told). NULL: nobody asks. */
	void (*on_synced)(struct watch *watch);
	/* Changes may be missed until on_synced comes again. NULL: nobody asks. */
	void (*on_unsynced)(struct watch *watch);
	struct list link; /* the directory's */
	void *impl;	  /* the directory's; NULL: not watched */
};

struct directory_state {
	bool up;	   /* it answers, and the lease lives */
	uint64_t since_ns; /* loop time of that */
	uint64_t refused;  /* entries of others that were malformed or too long */
	uint64_t puts, events, reconnects;
	struct err why; /* not up: what was tried last and why it failed */
};

struct directory_ops {
	const char *name; /* etcd, local */
	/* What is put again takes the place of what was put before. A negative answer:
	 * not begun. Text is copied. */
	int (*publish)(struct directory *directory, struct publication *publication,
		       const struct place *place, const char *record, const char *load);
	/* Another record, another load; NULL: as it is. ERR_LIMIT, ERR_NOMEM. */
	int (*update)(struct publication *publication, const char *record,
		      const char *load);
	void (*withdraw)(struct publication *publication); /* idempotent */
	/* `loads`: tell of loads, too. */
	int (*watch)(struct directory *directory, struct watch *watch, const char *group,
		     bool loads);
	void (*unwatch)(struct watch *watch); /* idempotent */
	void (*state)(const struct directory *directory, struct directory_state *state_p);
	/* Takes all back that was published, as far as that can be done at once. */
	void (*free)(struct directory *directory);
};

struct directory {
	const struct directory_ops *ops;
	void (*on_state)(void *arg); /* up or not up since now; NULL */
	void *arg;
};

#endif
