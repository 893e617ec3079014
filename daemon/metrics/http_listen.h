/* SPDX-License-Identifier: Apache-2.0 */
/* http_listen: the endpoint's socket. */
#ifndef KVD_METRICS_HTTP_LISTEN_H
#define KVD_METRICS_HTTP_LISTEN_H

#include "daemon/loop/lock.h"

struct config;

struct http_listen {
	int fd;
	struct lock_socket name; /* of a Unix socket */
};

/* According to config->metrics_listen, which config.c has checked. A Unix socket gets
 * the control socket's group and mode. ERR_CONFIG: the address is in use. */
int http_listen_open(const struct config *config, struct http_listen *l);
void http_listen_close(struct http_listen *l); /* idempotent */

#endif
