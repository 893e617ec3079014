/* SPDX-License-Identifier: Apache-2.0 */
/* directory_hub: a directory that daemons of one process share, as an etcd is shared, in
 * virtual time. */
#ifndef KVD_TESTS_DIRECTORY_HUB_H
#define KVD_TESTS_DIRECTORY_HUB_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/cluster/directory.h"

struct directory_hub;
struct loop;

/* For clusters made from now on (cluster.h); 0: none. */
void directory_hub_share(uint64_t lease_ns);
struct directory_hub *directory_hub_new(struct loop *loop, uint64_t lease_ns);
/* Its members must be freed before. */
void directory_hub_free(struct directory_hub *hub);
/* A daemon's; freed as any directory is. */
struct directory *directory_hub_member(struct directory_hub *hub);
/* The member's daemon dies: what it published stays for the time of a lease. */
void directory_hub_crash(struct directory *directory);
/* No member reaches it; places that are claimed wait. Or all do again. */
void directory_hub_away(struct directory_hub *hub, bool away);

#endif
