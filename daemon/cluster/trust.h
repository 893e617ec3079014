/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trust: cluster_trust = directory. A daemon says which CURVE key it has in a group of
 * the key's own, so that whoever meets the key can look for one entry, not for all
 * daemons. A key that has an entry may connect, and be answered at the entry's endpoint
 * and nowhere else. A key that an entry of a group names may be dialled there, and come
 * back.
 *
 * With cluster_trust = listed nothing of this exists: no entry lets anybody in.
 */
#ifndef KVD_CLUSTER_TRUST_H
#define KVD_CLUSTER_TRUST_H

#include "daemon/cluster/directory.h"
#include "daemon/link/link.h"

struct groups;
struct record;
struct trust;

/* on_change(arg): a key is trusted, or is no more. */
int trust_new(struct groups *groups, void (*on_change)(void *arg), void *arg,
	      struct trust **trust_p);
/* For link_zmq_vouch(); until trust_free(). */
const struct link_vouch *trust_vouch(const struct trust *trust);
void trust_free(struct trust *trust); /* NULL is fine */
/* An entry names this key at this endpoint: it is about to be dialled. ERR_NOMEM. */
int trust_dial(struct trust *trust, const struct record *record);
/* The group of a key. */
void trust_group(const char *key, char group[PLACE_GROUP_MAX]);

#endif
