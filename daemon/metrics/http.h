/* SPDX-License-Identifier: Apache-2.0 */
/*
 * http: the metrics endpoint (option metrics_listen). GET /metrics, /livez, /readyz, and
 * a page at /; other requests are refused. It is served by a thread of libmicrohttpd,
 * which accesses nothing of the loop: it requests a copy of the metrics and waits for it.
 */
#ifndef KVD_METRICS_HTTP_H
#define KVD_METRICS_HTTP_H

struct http;
struct kvd;

/* *http_p is NULL if the option is empty. ERR_REQUIRE, ERR_IO, ERR_CONFIG. */
int http_new(struct kvd *kvd, struct http **http_p);
/* No further request is answered. NULL is allowed. */
void http_free(struct http *http);

#endif
