/* SPDX-License-Identifier: Apache-2.0 */
/* own_groups: the groups in which daemons publish themselves; engines cannot publish
 * there. A worker in them is an instance, as 32 hex digits. */
#ifndef KVD_CLUSTER_OWN_GROUPS_H
#define KVD_CLUSTER_OWN_GROUPS_H

#include <stdbool.h>
#include <string.h>

#define OWN_GROUPS_PREFIX "kvd."
#define OWN_GROUP_DAEMONS "kvd.daemons" /* every daemon */
#define OWN_GROUP_KEY \
	"kvd.key." /* and 80 hex digits, of a CURVE key's characters: its owner */

static inline bool own_groups_are(const char *group)
{
	return strncmp(group, OWN_GROUPS_PREFIX, sizeof(OWN_GROUPS_PREFIX) - 1) == 0;
}

#endif
