/* SPDX-License-Identifier: Apache-2.0 */
/*
 * homes_group: chunk_index = cluster. The index nodes are the daemons of group kvd.homes
 * of the cluster's directory that are not draining. If there are more than MEMBERS_MAX,
 * those with the alphabetically first endpoints are used, so that all daemons choose
 * alike.
 */
#ifndef KVD_STORE_HOMES_GROUP_H
#define KVD_STORE_HOMES_GROUP_H

#include "daemon/link/names.h"
#include "daemon/loop/loop.h"

#define HOMES_OF_CLUSTER "cluster" /* of the option chunk_index */

struct kvd;
struct members;

struct homes_group {
	const struct names *names; /* NULL: not in use */
	struct names_user user;
	struct members *members;
	struct loop_timer timer; /* changes are batched */
};

/* members_set() from now on. */
int homes_group_open(struct homes_group *group, const struct kvd *kvd,
		     struct members *members);
void homes_group_close(struct homes_group *group); /* idempotent */

#endif
