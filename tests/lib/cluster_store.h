/* SPDX-License-Identifier: Apache-2.0 */
/* cluster_store: a node of a cluster that keeps chunks, as kvd.c makes the store. Its end
 * is the cluster's (cluster_free). */
#ifndef KVD_TESTS_CLUSTER_STORE_H
#define KVD_TESTS_CLUSTER_STORE_H

#include "tests/lib/cluster.h"

struct disk_sim;
struct offload;

struct cluster_store_args {
	uint64_t memory_bytes; /* MiBs */
	struct disk_sim
		*disk; /* NULL: no files. The caller's, until the cluster is free */
	uint64_t file_bytes;
	uint64_t lack_nth;  /* the allocation of its start that fails; 0: none */
	const char *stores; /* chunk_peers; NULL: none */
	unsigned int attention_threads; /* 0: query rows are refused */
	struct offload *kernels;	/* where they are attended; NULL: the node's */
};
/* Its memory is being made. */
void cluster_store_begin(struct cluster *c, unsigned int node,
			 const struct cluster_store_args *args);
/* Before engines use it; it is ready when this returns, and its files are read. Where
 * memory failed it may be neither. True: all allocations were had. */
bool cluster_store(struct cluster *c, unsigned int node,
		   const struct cluster_store_args *args);

#endif
