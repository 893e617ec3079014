/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roster: the entries of one group, in the order in which they changed, so that a reader
 * that knows it as of a revision gets the changes and nothing else. Removed entries are
 * remembered, up to a number; a reader with an older revision starts from scratch.
 */
#ifndef KVD_CLUSTER_ROSTER_H
#define KVD_CLUSTER_ROSTER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/idmap.h"
#include "daemon/base/list.h"
#include "daemon/cluster/directory.h"

#define ROSTER_GONE_MAX 256u

struct offload;
struct roster_worker;

struct roster_entry {
	struct list link;      /* in roster.order: the last change is at the end */
	struct list gone_link; /* in roster.gone */
	struct place place;
	uint64_t changed;    /* the revision of its last change, */
	uint64_t record_rev; /* and of the record's: added, changed, or removed */
	uint64_t load_rev;   /* 0: the load never changed */
	char *record;	     /* NULL: removed */
	char *load;	     /* NULL: unknown */
	void *user;	     /* the owner's */
	uint64_t missing;    /* roster_missing() */
	bool stale;	     /* roster_mark() */
	struct roster_worker *worker; /* NULL: removed */
};

struct roster {
	struct strmap places;
	struct strmap workers; /* of present entries, by name */
	struct list order, gone;
	unsigned int count, gone_count; /* present; removed */
	uint64_t missing;		/* sum over the present entries */
	uint64_t rev;			/* of the last change */
	uint64_t forgotten;		/* removals up to here are no longer known */
};

/* `first`: a revision that no earlier roster of this group has had. */
void roster_init(struct roster *roster, uint64_t first);
void roster_fini(struct roster *roster);
/* Into an uninitialised one; `from` is empty afterwards. */
void roster_move(struct roster *roster, struct roster *from);
/* roster_fini() on a helper, which a thousand entries need; offload NULL: here. */
void roster_discard(struct roster *roster, struct offload *offload);
/* NULL: not present. */
struct roster_entry *roster_find(const struct roster *roster, const struct place *place);
/* NULL: unchanged. 1: it changed; 0: it did not. ERR_NOMEM: nothing changed. A new entry
 * has a record. */
int roster_put(struct roster *roster, const struct place *place, const char *record,
	       const char *load, struct roster_entry **entry_p);
/* Frees its texts; it is remembered as removed. */
void roster_drop(struct roster *roster, struct roster_entry *entry);
/* Is `since` a revision from which on all changes are known? */
static inline bool roster_knows(const struct roster *roster, uint64_t since)
{
	return since >= roster->forgotten && since <= roster->rev;
}
/* The name of the only worker; NULL: there are none, or several. */
const char *roster_only_worker(const struct roster *roster);
/* The first that changed after `since`, in the order of change; NULL: none. */
struct roster_entry *roster_after(const struct roster *roster, uint64_t since);
/* The same without a search, if `last` is still the one that changed at `since`. */
struct roster_entry *roster_behind(const struct roster *roster, uint64_t since,
				   const struct place *last);
struct roster_entry *roster_next(const struct roster *roster,
				 const struct roster_entry *entry);
/* A number of the entry's that is added up, and subtracted at its removal. */
void roster_missing(struct roster *roster, struct roster_entry *entry, uint64_t missing);
/* For a full reload: marks all entries stale, except those put from here on; then drops
 * the stale ones, and calls on_gone(arg) for each, which must not free the roster; may be
 * NULL. */
void roster_mark(struct roster *roster);
void roster_sweep(struct roster *roster,
		  void (*on_gone)(void *arg, const struct place *place), void *arg);

/* The identity of a place within a group, as a key of a strmap: its bytes. */
struct place_key {
	uint32_t rank[PLACE_AXES];
	char worker[PLACE_WORKER_MAX];
};
size_t place_key(const struct place *place, struct place_key *key_p);
/* ERR_INVAL names the field: group and worker are text of so many bytes without control
 * characters, ranks are under PLACE_SIZE_MAX, worker is not "-". */
int group_check(const char *group); /* its length */
int place_check(const struct place *place);
/* ERR_LIMIT: longer than a directory takes; NULL: none. */
int place_texts_check(const char *record, const char *load);
#define PLACE_TEXT_MAX (PLACE_GROUP_MAX + PLACE_WORKER_MAX + 64u)
/* "group 'g' worker 'w' rank 0.0.0.0", for messages. */
const char *place_text(const struct place *place, char text[PLACE_TEXT_MAX]);
extern const char *const place_axis_names[PLACE_AXES]; /* tp, … */

#endif
