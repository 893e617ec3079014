/* SPDX-License-Identifier: Apache-2.0 */
/* groups_impl: shared by groups.c (the directory, calls), groups_place.c (publications)
 * and groups_cache.c (readers), and private to them. */
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

/* A publication of one of them. */
struct groups_place {
	struct publication publication;
	struct list link;
	struct list of_session;
	struct groups *groups;
	uint64_t session;
	struct place place;
	char *record;
	struct groups_call *call; /* waits for the directory's result; or NULL */
	bool taken;		  /* it is in the directory */
	bool read;		  /* pool and pool_id are of this record */
	char pool[POOL_NAME_MAX]; /* the one that the record names; "" */
	uint64_t pool_id;	  /* the pool of the record's figures; 0: none */
	bool drained;		  /* its record has that state */
};

struct group_cache {
	struct list link; /* in groups.caches; not of a query's own */
	struct watch watch;
	struct groups *groups;
	char group[PLACE_GROUP_MAX];
	bool loads;
	bool known;  /* synced once */
	bool synced; /* since the last watch */
	bool missed; /* memory was short for an entry: it is read again */
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
	struct groups_place *pools_at; /* the next one to be checked; NULL: none */
	struct loop_work pools;
	unsigned int place_count;
	struct list calls;
	unsigned int call_count;
	struct list caches;
	struct strmap caches_by_group;
	unsigned int cache_count;
	struct loop_timer idle;	 /* caches without users */
	struct loop_timer fresh; /* the own entry is published again */
	bool is_home;		 /* it is in kvd.homes, too */
	bool draining, closing;
	struct loop_work drain; /* publishes it, some places a turn */
	uint64_t refused;	/* records that could not be parsed */
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
/* The daemon's own entry, in its present state. */
void groups_own_say(struct groups *groups);
/* The figures of the pools that places name. False: more are to be checked. */
void groups_places_pools(struct groups *groups); /* some a turn */
void groups_place_init(struct groups *groups);
void groups_session_places_end(struct groups *groups, uint64_t session);

/* ---- groups_cache.c ---- */
int group_cache_new(struct groups *groups, const char *group, bool loads,
		    struct group_cache **cache_p);
void group_cache_free(struct group_cache *cache);
/* One that missed an entry is read again. */
void group_cache_mend(struct group_cache *cache);
struct group_cache *group_cache_find(const struct groups *groups, const char *group);

#endif
