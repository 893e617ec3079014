/* SPDX-License-Identifier: Apache-2.0 */
/*
 * names: members of a cluster by group and place, for the parts that connect to them:
 * sources of rooms, index nodes of chunks. Provided by the module cluster (kvd->names);
 * NULL: not built in. Loop thread.
 */
#ifndef KVD_NAMES_H
#define KVD_NAMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/link/link.h"

struct kvd;

#define PLACE_GROUP_MAX 128u /* bytes with the NUL */
#define PLACE_WORKER_MAX 64u
#define PLACE_SIZE_MAX 65536u	/* ranks along one axis */
#define NAMES_HOMES "kvd.homes" /* group of the index nodes of chunks */

enum place_axis { PLACE_TP, PLACE_PP, PLACE_DP, PLACE_CP, PLACE_AXES };

/* A reader of a group; embedded in its owner. */
struct names_user {
	/* An entry of the group changed, or the group is now complete. NULL: no call. */
	void (*on_change)(struct names_user *user);
	/* private */
	struct list link;
	struct group_cache *cache; /* NULL: it reads none */
};

/* The wanted place; worker NULL: the only worker of the group. */
struct names_wanted {
	const char *worker;
	uint32_t rank[PLACE_AXES];
};

struct names_member {
	char endpoint[LINK_ENDPOINT_MAX]; /* to connect to, with its key */
	char pool[64];			  /* its only pool; "": it has none, or several */
	uint64_t session;		  /* its engine's epoch; 0: not known */
};

struct names {
	/* Read the group from now on, once for all its users. ERR_INVAL, ERR_LIMIT. */
	int (*use)(const struct kvd *kvd, const char *group, struct names_user *user);
	void (*unuse)(struct names_user *user); /* idempotent */
	/* 0; outcome 1: not found yet (on_change follows). ERR_INVAL: the group has
	 * several workers, and none is named. */
	int (*find)(const struct names_user *user, const struct names_wanted *wanted,
		    struct names_member *member_p);
	/* Each member that is not draining. Outcome 1: the group is not known yet. */
	int (*each)(const struct names_user *user,
		    void (*each)(void *arg, const char *endpoint), void *arg);
	/* The names are unavailable; returns why. */
	bool (*away)(const struct kvd *kvd, char *why, size_t size);
	/* This daemon is an index node of chunks: publish it. */
	void (*be_home)(const struct kvd *kvd);
};

/* kvd->names; ERR_STATE: none. */
int names_get(const struct kvd *kvd, const struct names **names_p);

#endif
