/* SPDX-License-Identifier: Apache-2.0 */
/*
 * groups: this daemon's part of the cluster. It owns the directory of option `cluster`
 * (this daemon alone, with a file of members or without; or etcd); publishes this daemon
 * (group kvd.daemons); publishes and withdraws the places of its sessions; and reads
 * groups, each once for all its readers.
 *
 * The cached entries of a group stay valid while its directory is unavailable. Loop
 * thread.
 */
#ifndef KVD_CLUSTER_GROUPS_H
#define KVD_CLUSTER_GROUPS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/cluster/directory.h"
#include "daemon/cluster/roster.h"
#include "daemon/loop/loop.h"
#include "daemon/link/names.h"

struct config;
struct group_cache;
struct groups;
struct kvd;
struct record;

/* as the option cluster_trust */
enum groups_trust { GROUPS_TRUST_LISTED, GROUPS_TRUST_DIRECTORY };

extern const struct module cluster_module;
struct groups *groups_of(const struct kvd *kvd); /* NULL in tests without it */
/* ERR_CONFIG: option `cluster` is invalid. */
int groups_new(struct kvd *kvd, struct groups **groups_p);
/* Would groups_new() accept the options of the cluster? */
int groups_check(const struct config *config);
/* Reads the members file again, if the directory is one; `apply` false: only checks it.
 * ERR_CONFIG: nothing changed. */
int groups_reload(struct groups *groups, bool apply);
/* Ends all waiting calls with this error, accepts no new ones, and withdraws everything
 * published: while peers are still connected. Idempotent. */
void groups_close(struct groups *groups, const struct err *why);
/* Closes first. Before the peers are freed. NULL is fine. */
void groups_free(struct groups *groups);

/* ---- places of sessions ---- */

/* A publication or query that waits; lives in its owner. */
struct groups_call {
	/* Called once, from the loop, never inside the call that made it. `roster`: of a
	 * query, the result, valid during the call; `own` is the same one if it may be
	 * moved away. */
	void (*on_done)(struct groups_call *call, const struct err *err,
			const struct roster *roster);
	struct roster *own;
	/* private */
	struct list link;
	struct groups *groups;
	uint64_t session;
	struct groups_place *place; /* of a publication */
	struct group_cache *cache;  /* of a query: its own */
	char group[PLACE_GROUP_MAX];
	bool waiting, fresh; /* fresh: the query's cache was synced */
	struct err err;
	struct loop_timer timer;
	struct loop_defer done;
};

/*
 * Publishes that a session is at this place, until the session ends; a second call
 * replaces it. The record's name, instance, version, transports and state are filled in
 * here, as are its endpoint and key where it has none, and the figures of its pool when
 * the session has one of that name, now or later. Negative: not started, on_done is not
 * called (ERR_INVAL names the field, ERR_LIMIT, ERR_EXIST, ERR_PERM). The publication
 * remains, too, when the call timed out.
 */
int groups_publish(struct groups *groups, uint64_t session, const struct place *place,
		   struct record *record, struct groups_call *call);
/* All entries of a group in the directory now; ERR_NOTFOUND in on_done if it is empty. If
 * the directory is unavailable: the cached entries, if any. */
int groups_query(struct groups *groups, uint64_t session, const char *group, bool loads,
		 struct groups_call *call);
/* Withdraws its places, and ends its calls with ERR_SESSION. */
void groups_session_gone(struct groups *groups, uint64_t session);
/* The load (directory.h) of a session's places, or (session 0) of the daemon's own
 * entries; text of at most DIRECTORY_LOAD_MAX - 1 bytes. */
int groups_load(struct groups *groups, uint64_t session, const char *text);
/* From now on all records of this daemon and its sessions have the state "draining". */
void groups_drain(struct groups *groups);
/* Its pools have changed: kvd.daemons and the places that name them follow soon. */
void groups_pools_changed(struct groups *groups);

/* It keeps the chunk index: publishes it in kvd.homes. */
void groups_be_home(struct groups *groups);

/* ---- reading ---- */

/* Reads the group from now on, once for all its users. ERR_LIMIT. */
int groups_use(struct groups *groups, const char *group, bool loads,
	       struct names_user *user);
void groups_unuse(struct names_user *user); /* idempotent */
/* Its cached entries; they are kept some time longer for the next user. */
const struct roster *groups_roster(const struct names_user *user);
/* It was synced once, and is up to date. */
bool groups_known(const struct names_user *user);
bool groups_synced(const struct names_user *user);

/* Does every worker have all of its ranks? Each record has the size. */
bool groups_complete(const struct roster *roster);

/* The record there: 0, or outcome 1: none yet (watch on_change). ERR_INVAL: the group has
 * several workers, and none is named. */
int groups_lookup(const struct names_user *user, const struct names_wanted *wanted,
		  struct record *record_p);
/* Its endpoint, as cluster_trust allows. */
void groups_dial(const struct groups *groups, const struct record *record,
		 char endpoint[LINK_ENDPOINT_MAX]);
enum groups_trust groups_trust(const struct groups *groups);

extern const struct names groups_names; /* for kvd->names */

/* ---- for show and health ---- */

struct groups_state {
	const char *kind, *where; /* local, etcd; the option */
	struct directory_state directory;
	uint64_t lease_ns;
	unsigned int places, watches;	 /* of sessions; groups that are read */
	unsigned int keys, keys_unknown; /* trust.h; unknown: of keys, without an entry */
};
void groups_state(const struct groups *groups, struct groups_state *state_p);
/* Each place of sessions and of the daemon itself, with its record; false: stop. */
void groups_each_place(const struct groups *groups,
		       bool (*each)(void *arg, uint64_t session,
				    const struct place *place, const char *record,
				    bool taken),
		       void *arg);
/* Each session that has places; 0 is the daemon itself. */
void groups_each_session(const struct groups *groups,
			 void (*each)(void *arg, uint64_t session), void *arg);
/* Each group that is read. */
void groups_each_watch(const struct groups *groups,
		       bool (*each)(void *arg, const char *group, unsigned int entries,
				    bool synced),
		       void *arg);

#endif
