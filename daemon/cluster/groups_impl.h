/* SPDX-License-Identifier: Apache-2.0 */
/* groups_impl: shared by groups.c (the directory, calls), groups_place.c (what is said)
 * and groups_cache.c (what is read). Nobody else includes it. */
#ifndef KVD_CLUSTER_GROUPS_IMPL_H
#define KVD_CLUSTER_GROUPS_IMPL_H

#include "daemon/loop/work.h"
#include "daemon/cluster/groups.h"
#include "daemon/base/idmap.h"
#include "daemon/session/pool.h"

#define GROUPS_PLACES_MAX 65536u
#define GROUPS_SESSION_PLACES_MAX 1024u
#define GROUPS_CALLS_MAX 1024u
#define GROUPS_SESSION_CALLS_MAX 64u
#define GROUPS_CACHES_MAX 4096u

/* Of a session, or the daemon itself (session 0). */
struct groups_session {
	struct list places; /* struct groups_place.of_session */
	unsigned int count;
};

/* What one of them says. */
struct groups_place {
	struct publication publication;
	struct list link;
	struct list of_session;
	struct groups *groups;
	uint64_t session;
	struct place place;
	char *record;
	struct groups_call *call; /* waits for the directory's answer; NULL: none does */
	bool taken;		  /* the directory has it */
	bool read;		  /* pool and pool_id are of this record */
	char pool[POOL_NAME_MAX]; /* that the record names; "" */
	uint64_t pool_id;	  /* whose figures the record has; 0: none */
	bool drained;		  /* it says so */
};

struct group_cache {
	struct list link; /* in groups.caches; not of a query's own */
	struct watch watch;
	struct groups *groups;
	char group[PLACE_GROUP_MAX];
	bool loads;
	bool known;  /* told all once */
	bool synced; /* since it was watched last */
	bool missed; /* there was no memory for an entry: it is to be read again */
	struct roster roster;
	struct list users;
	struct groups_call *call; /* of a query */
	uint64_t used_ns;
};

struct groups {
	struct kvd *kvd;
	struct loop *loop;
	char endpoint[LINK_ENDPOINT_MAX]; /* this daemon's, with its key */
	uint64_t lease_ns;
	struct trust *trust; /* NULL: cluster_trust = listed */
	char where[1024];
	struct directory *directory;
	struct list places;
	struct strmap places_by_key;
	struct idmap sessions; /* struct groups_session by id: those with places */
	struct groups_place *pools_at; /* whose pool is looked at next; NULL: none's */
	struct loop_work pools;
	unsigned int place_count;
	struct list calls;
	unsigned int call_count;
	struct list caches;
	struct strmap caches_by_group;
	unsigned int cache_count;
	struct loop_timer idle;	 /* caches that nobody asks for any more */
	struct loop_timer fresh; /* the own entry is said anew */
	bool is_home;		 /* it is in kvd.homes, too */
	bool draining, closing;
	struct loop_work drain; /* places say so, some a turn */
	uint64_t refused;	/* records that could not be read */
};

/* ---- groups.c ---- */
int groups_call_check(const struct groups *groups, uint64_t session);
void groups_call_start(struct groups *groups, struct groups_call *call, uint64_t session,
		       const char *group);
void groups_call_finish(struct groups_call *call, const struct err *err,
			const struct roster *roster);
/* In the next turn; `err` NULL: good. */
void groups_call_later(struct groups_call *call, const struct err *err);

/* ---- groups_place.c ---- */
void groups_place_free(struct groups_place *place); /* takes it back */
/* The daemon's own entry, as things are now. */
void groups_own_say(struct groups *groups);
/* The figures of the pools that places name. False: there are more to be looked at. */
void groups_places_pools(struct groups *groups); /* some a turn */
void groups_place_init(struct groups *groups);
void groups_session_places_end(struct groups *groups, uint64_t session);

/* ---- groups_cache.c ---- */
int group_cache_new(struct groups *groups, const char *group, bool loads,
		    struct group_cache **cache_p);
void group_cache_free(struct group_cache *cache);
/* One that missed something is read again. */
void group_cache_mend(struct group_cache *cache);
struct group_cache *group_cache_find(const struct groups *groups, const char *group);

#endif
