/* SPDX-License-Identifier: Apache-2.0 */
/*
 * endpoint: a daemon's address, as text: tcp://HOST:PORT, with keys tcp://HOST:PORT#KEY.
 * One spelling for each, in which all are compared.
 */
#ifndef KVD_BASE_ENDPOINT_H
#define KVD_BASE_ENDPOINT_H

#include <stdbool.h>

#define ENDPOINT_MAX 128 /* bytes, NUL included: "tcp://10.0.0.2:7400" */
#define ENDPOINT_PORT_MAX 8

/* ERR_INVAL unless of the form tcp://host:port, port 1 to 65535, with a host of
 * letters, digits, '.', '-', '_' or an IPv6 address in brackets. */
int endpoint_check(const char *endpoint);
/* The same; host and port in the one spelling in which they are compared: names in lower
 * case without a dot at the end, numbers as inet_ntop() writes them. */
int endpoint_spell(const char *endpoint, char host[ENDPOINT_MAX],
		   char port[ENDPOINT_PORT_MAX]);
/* The whole in that spelling, "#KEY" unchanged. */
int endpoint_canon(const char *endpoint, char out[ENDPOINT_MAX]);
/* Do both name the same address, and the same key if both have one? */
bool endpoint_same(const char *a, const char *b);
/* The same of HOST or HOST:PORT. ERR_CONFIG. */
int endpoint_host_spell(const char *text, char out[ENDPOINT_MAX]);
/* tcp://HOST:PORT with a host that is an address of loopback; the port may be any. */
bool endpoint_is_loopback(const char *endpoint);

#endif
