/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roster: the entries of one group, in the order in which they changed, so that whoever
 * knows it as of a revision is told what is new and nothing else. What has gone is
 * remembered, up to a number; who is further behind begins anew.
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

struct roster_worker;

struct roster_entry {
	struct list link;      /* in roster.order: what changed last is at the end */
	struct list gone_link; /* in roster.gone */
	struct place place;
	uint64_t changed;    /* the revision of its last change, */
	uint64_t record_rev; /* and of the record's: it came, is another, or went */
	uint64_t load_rev;   /* 0: the load never changed */
	char *record;	     /* NULL: it has gone */
	char *load;	     /* NULL: none is known */
	void *user;	     /* the owner's */
	uint64_t missing;    /* roster_missing() */
	bool stale;	     /* roster_mark() */
	struct roster_worker *worker; /* NULL: it has gone */
};

struct roster {
	struct strmap places;
	struct strmap workers; /* of those that are there, by name */
	struct list order, gone;
	unsigned int count, gone_count; /* that are there; that have gone */
	uint64_t missing;		/* of those that are there, added up */
	uint64_t rev;			/* of the last change */
	uint64_t forgotten; /* what had gone up to here is not known any more */
};

/* `first`: a revision that no earlier roster of this group has had. */
void roster_init(struct roster *roster, uint64_t first);
void roster_fini(struct roster *roster);
/* NULL: it is not there. */
struct roster_entry *roster_find(const struct roster *roster, const struct place *place);
/* NULL: as it is. 1: it changed; 0: it is as it was. ERR_NOMEM: nothing changed. A new
 * entry has a record. */
int roster_put(struct roster *roster, const struct place *place, const char *record,
	       const char *load, struct roster_entry **entry_p);
/* Its texts are freed; it is remembered as gone. */
void roster_drop(struct roster *roster, struct roster_entry *entry);
/* Is `since` a revision from which on all is known? */
static inline bool roster_knows(const struct roster *roster, uint64_t since)
{
	return since >= roster->forgotten && since <= roster->rev;
}
/* The name of the only worker; NULL: there are none, or several. */
const char *roster_only_worker(const struct roster *roster);
/* The first that changed after `since`, in the order of change; NULL: none. */
struct roster_entry *roster_after(const struct roster *roster, uint64_t since);
/* The same at once, if `last` is still the one that changed at `since`. */
struct roster_entry *roster_behind(const struct roster *roster, uint64_t since,
				   const struct place *last);
struct roster_entry *roster_next(const struct roster *roster,
				 const struct roster_entry *entry);
/* A number of the entry's that is added up, and taken off when it goes. */
void roster_missing(struct roster *roster, struct roster_entry *entry, uint64_t missing);
/* Of one that is told anew: all is stale, but for what is put from here on; then what is
 * stale is dropped, and on_gone(arg) told of each, which must not free the roster; NULL:
 * nobody asks. */
void roster_mark(struct roster *roster);
void roster_sweep(struct roster *roster,
		  void (*on_gone)(void *arg, const struct place *place), void *arg);

/* What tells places of one group apart, as a key of a strmap: its bytes. */
struct place_key {
	uint32_t rank[PLACE_AXES];
	char worker[PLACE_WORKER_MAX];
};
size_t place_key(const struct place *place, struct place_key *key_p);
bool place_equal(const struct place *a, const struct place *b);
/* ERR_INVAL names the field: group and worker are text of so many bytes without control
 * characters, ranks are under PLACE_SIZE_MAX, worker is not "-". */
int place_check(const struct place *place);
#define PLACE_TEXT_MAX (PLACE_GROUP_MAX + PLACE_WORKER_MAX + 64u)
/* "group 'g' worker 'w' rank 0.0.0.0", for messages. */
const char *place_text(const struct place *place, char text[PLACE_TEXT_MAX]);
extern const char *const place_axis_names[PLACE_AXES]; /* tp, … */

#endif
