/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trust: cluster_trust = directory. A daemon publishes its CURVE key in a group of the
 * key's own, so that a peer that sees the key needs one entry, not those of all daemons.
 * A key that has an entry may connect, and be answered at the entry's endpoint and
 * nowhere else. A key in an entry of a group may be dialled at its endpoint, and may
 * connect from there.
 *
 * With cluster_trust = listed none of this is active: entries admit no one.
 */
#ifndef KVD_CLUSTER_TRUST_H
#define KVD_CLUSTER_TRUST_H

#include "daemon/cluster/directory.h"
#include "daemon/link/link.h"

struct groups;
struct record;
struct trust;

/* on_change(arg): a key became trusted, or lost trust. */
int trust_new(struct groups *groups, void (*on_change)(void *arg), void *arg,
	      struct trust **trust_p);
/* For link_zmq_vouch(); until trust_free(). */
const struct link_vouch *trust_vouch(const struct trust *trust);
void trust_free(struct trust *trust); /* NULL is fine */
/* An entry names this key at this endpoint: it is about to be dialled. ERR_NOMEM. */
int trust_dial(struct trust *trust, const struct record *record);
/* Keys that are known or looked up; those of them without an entry. */
void trust_counts(const struct trust *trust, unsigned int *keys_p,
		  unsigned int *unknown_p);
/* The group of a key. */
void trust_group(const char *key, char group[PLACE_GROUP_MAX]);

#endif
