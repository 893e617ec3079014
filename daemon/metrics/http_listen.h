/* SPDX-License-Identifier: Apache-2.0 */
/* http_listen: the endpoint's socket. */
#ifndef KVD_METRICS_HTTP_LISTEN_H
#define KVD_METRICS_HTTP_LISTEN_H

#include <sys/un.h>

struct config;

struct http_listen {
	int fd;
	char path[sizeof(((struct sockaddr_un *)0)->sun_path)]; /* "" = tcp */
};

/* As config->metrics_listen says, which config.c has checked. A Unix socket gets the
 * control socket's group and mode. ERR_BUSY: somebody listens there. */
int http_listen_open(const struct config *config, struct http_listen *l);
void http_listen_close(struct http_listen *l); /* idempotent */

#endif
