/* SPDX-License-Identifier: Apache-2.0 */
/*
 * http: the metrics endpoint (option metrics_listen). GET /metrics, /livez, /readyz, and
 * a page at /; anything else is refused. A thread of libmicrohttpd's serves it. It
 * touches nothing of the loop's: it asks for a copy of the figures and waits for it.
 */
#ifndef KVD_METRICS_HTTP_H
#define KVD_METRICS_HTTP_H

struct http;
struct kvd;

/* *http_p is NULL where the option is empty. ERR_REQUIRE, ERR_IO, ERR_CONFIG. */
int http_new(struct kvd *kvd, struct http **http_p);
/* No request is answered any more. NULL is fine. */
void http_free(struct http *http);

#endif
