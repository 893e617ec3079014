/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cluster_file: the option `cluster`, if it names a file of members:
 *
 *   file:/PATH
 *
 * with a line for each rank of each worker:
 *
 *   GROUP WORKER TP.PP.DP.CP ENDPOINT[#KEY] [pool=NAME] [model=NAME] [url=URL]
 *       [engine=WORD] [bootstrap=HOST:PORT]
 *
 * GROUP and WORKER are written as in keys of etcd (etcd_key.h). A worker has as many
 * ranks along each axis as its lines have.
 */
#ifndef KVD_CLUSTER_FILE_H
#define KVD_CLUSTER_FILE_H

#include <stdbool.h>

#include "daemon/cluster/directory.h"

#define CLUSTER_FILE_LINES_MAX 4096u

struct cluster_line {
	struct place place;
	unsigned int number; /* in the file */
	char *record;
};

struct cluster_file {
	unsigned int count;
	struct cluster_line *lines;
};

/* Does the option's value name a file (else another kind)? */
bool cluster_file_is(const char *text);
/* The option's value. ERR_CONFIG: "path:line: fact", and the remedy; ERR_NOMEM. */
int cluster_file_load(const char *text, struct cluster_file **file_p);
void cluster_file_free(struct cluster_file *file); /* NULL is fine */

#endif
