/* SPDX-License-Identifier: Apache-2.0 */
/*
 * etcd_key: a place as a key of etcd, and back.
 *
 *   PREFIX/groups/GROUP/WORKER/TP.PP.DP.CP    its record
 *   PREFIX/load/GROUP/WORKER/TP.PP.DP.CP      its load
 *   PREFIX/store                              random, made by the first daemon:
 *                                             a store that was reset has another
 *
 * GROUP and WORKER are percent-encoded except [A-Za-z0-9._-]; "-" is not a valid worker:
 * it stands for the empty one.
 */
#ifndef KVD_CLUSTER_ETCD_KEY_H
#define KVD_CLUSTER_ETCD_KEY_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/cluster/cluster_url.h"
#include "daemon/cluster/directory.h"

enum etcd_side { ETCD_RECORDS, ETCD_LOADS, ETCD_SIDES };

#define ETCD_TAIL_MAX (3 * PLACE_WORKER_MAX + 4 * 6 + 4) /* WORKER/TP.PP.DP.CP */
#define ETCD_NAME_MAX (CLUSTER_PREFIX_MAX + 3 * PLACE_GROUP_MAX + ETCD_TAIL_MAX + 16)

/* Text with its NUL; of a group: up to and with the '/' after GROUP. */
void etcd_group_key(const char *prefix, enum etcd_side side, const char *group,
		    char key[ETCD_NAME_MAX]);
void etcd_place_key(const char *prefix, enum etcd_side side, const struct place *place,
		    char key[ETCD_NAME_MAX]);
/* Of a key of `len` bytes, exactly as etcd_place_key() writes it. False: another form. */
bool etcd_key_read(const char *prefix, const char *key, size_t len,
		   enum etcd_side *side_p, struct place *place_p);

#endif
