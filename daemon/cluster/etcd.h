/* SPDX-License-Identifier: Apache-2.0 */
/*
 * etcd: a directory in etcd (3.4 or later), by its JSON gateway over libcurl, which is
 * loaded when the first such directory is made. docs/internals/etcd.md describes keys,
 * lease and watches.
 */
#ifndef KVD_CLUSTER_ETCD_H
#define KVD_CLUSTER_ETCD_H

#include "daemon/cluster/cluster_url.h"
#include "daemon/cluster/directory.h"

struct loop;

#define ETCD_LEASE_MIN_S 2u
#define ETCD_LEASE_MAX_S 3600u

/* Texts and files are read by etcd_new(), and not needed after it. */
struct etcd_args {
	struct loop *loop;
	const struct cluster_url *url;
	/* For etcds://. The CA's certificates, which are required; a certificate and its
	 * key, if etcd requires client certificates. PEM; NULL or "": none. */
	const char *ca, *cert, *key;
	/* A file of one line, USER:PASSWORD; NULL or "": no authentication. */
	const char *user_file;
	/* Stores the lease's number for the next daemon of this name, which revokes it
	 * when it starts: its places are free at once. Only one daemon at a time may use
	 * it (it is next to a lock). NULL or "": none. */
	const char *lease_file;
	unsigned int lease_s; /* ETCD_LEASE_MIN_S … ETCD_LEASE_MAX_S */
};

/* ERR_CONFIG names the option and the remedy; ERR_REQUIRE: no libcurl. Does not wait for
 * etcd. */
int etcd_new(const struct etcd_args *args, struct directory **directory_p);
/* Would etcd_new() accept it? Needs no loop. */
int etcd_check(const struct etcd_args *args);

#endif
