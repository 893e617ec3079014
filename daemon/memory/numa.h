/* SPDX-License-Identifier: Apache-2.0 */
/*
 * numa: which processors are near which memory. A copy is fastest on the node of
 * its destination: stores that cross the link wait for ownership, loads are
 * prefetched.
 */
#ifndef KVD_TRANSPORT_NUMA_H
#define KVD_TRANSPORT_NUMA_H

#include <sched.h>
#include <stdbool.h>

#define NUMA_NODES_MAX 64u

struct numa {
	unsigned int count; /* nodes with processors in the affinity mask */
	struct numa_node {
		int id; /* the kernel's number */
		cpu_set_t cpus;
	} nodes[NUMA_NODES_MAX];
};

/* The nodes listed in `root` (/sys/devices/system/node), within `allowed`. None: count
 * 0. */
void numa_read(const char *root, const cpu_set_t *allowed, struct numa *numa_p);
/* The place in `nodes` of the page that holds the address; -1: not known, or a
 * node without processors. One system call. */
int numa_node_of(const struct numa *numa, const void *address);
/* "0-3,8,10-11" to a set; false: not such a list. */
bool numa_list_parse(const char *text, cpu_set_t *cpus_p);

#endif
