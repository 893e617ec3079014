/* SPDX-License-Identifier: Apache-2.0 */
/* etcd_rig: members of a cluster on one loop, and the real etcd that they share. */
#ifndef KVD_TESTS_ETCD_RIG_H
#define KVD_TESTS_ETCD_RIG_H

#include "daemon/cluster/etcd.h"
#include "tests/lib/directory_tests.h"
#include "tests/lib/etcd_server.h"

struct etcd_rig {
	struct directory_rig rig;
	struct loop *loop;
	struct etcd_server *server;
	struct cluster_url url;
	struct etcd_args args;
	struct directory *members[DIRECTORY_MEMBERS];
	unsigned int states[DIRECTORY_MEMBERS]; /* calls of on_state */
};

/* Of a group of tests: one etcd for all, or none, and each test is skipped. */
int etcd_rig_begin(void **state);
int etcd_rig_end(void **state);
/* In a child of the test: what fails in it does not end the group's etcd. */
void etcd_rig_disown(void);
/* On the group's etcd, emptied; skips without one. */
struct etcd_rig *etcd_rig_new(unsigned int lease_s);
/* On that one, which runs and stays its owner's. */
struct etcd_rig *etcd_rig_on(struct etcd_server *server, unsigned int lease_s);
void etcd_rig_free(struct etcd_rig *rig);
bool etcd_rig_up(struct etcd_rig *rig, unsigned int member);
struct directory_state etcd_rig_state(struct etcd_rig *rig, unsigned int member);

#endif
