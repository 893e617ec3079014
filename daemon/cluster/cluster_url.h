/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cluster_url: the option `cluster`, if it names an etcd:
 *
 *   etcd://HOST[:PORT][,HOST[:PORT]...][/PREFIX]     HTTP
 *   etcds://...                                      HTTPS
 *
 * HOST is a name, an IPv4 address or an IPv6 address in brackets; PORT defaults to 2379,
 * as in etcd's own tools; PREFIX, default /kvd, is the start of every key.
 */
#ifndef KVD_CLUSTER_URL_H
#define KVD_CLUSTER_URL_H

#include <stdbool.h>

#define CLUSTER_URL_ENDPOINTS_MAX 16u
#define CLUSTER_HOST_MAX 256u	/* bytes with the NUL */
#define CLUSTER_PREFIX_MAX 128u /* bytes with the NUL */

struct cluster_endpoint {
	char host[CLUSTER_HOST_MAX]; /* without brackets */
	char port[6];
	bool literal; /* an address, not a name */
};

struct cluster_url {
	bool tls;
	unsigned int count; /* >= 1 */
	struct cluster_endpoint endpoints[CLUSTER_URL_ENDPOINTS_MAX];
	char prefix[CLUSTER_PREFIX_MAX]; /* "/kvd": starts with '/', not ending in it */
};

/* Does the option's value name an etcd (else another kind)? */
bool cluster_url_is_etcd(const char *text);
/* ERR_CONFIG, which names the part and its allowed values. */
int cluster_url_parse(const char *text, struct cluster_url *url_p);

#endif
