/* SPDX-License-Identifier: Apache-2.0 */
/*
 * local: a directory (directory.h) of this daemon alone: the places of its own sessions,
 * and the lines of a members file (cluster_file.h), if there is one. It is always up.
 *
 * A place that a session publishes hides the file's line of it, if the line names this
 * daemon; a line of another daemon keeps its place.
 */
#ifndef KVD_CLUSTER_LOCAL_H
#define KVD_CLUSTER_LOCAL_H

#include "daemon/cluster/directory.h"

struct cluster_file;
struct loop;
struct offload;

/* `own`: this daemon's endpoint, with its key if it has one; of the length of
 * LINK_ENDPOINT_MAX at most. offload NULL: all is freed on the loop. */
int local_new(struct loop *loop, struct offload *offload, const char *own,
	      struct directory **directory_p);
/* Replaces the lines of an earlier file. ERR_NOMEM: some are unchanged; another call
 * repairs that. */
int local_lines(struct directory *directory, const struct cluster_file *file);

#endif
