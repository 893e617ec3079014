/* SPDX-License-Identifier: Apache-2.0 */
/*
 * User and password are no part of the URL: it is shown by status commands and seen in
 * `ps`. A file has them (cluster_user_file).
 */
#include "daemon/cluster/cluster_url.h"

#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"

#define ETCD "etcd://"
#define ETCDS "etcds://"
#define PORT_DEFAULT "2379"
#define PREFIX_DEFAULT "/kvd"

bool cluster_url_is_etcd(const char *text)
{
	return strncmp(text, ETCD, strlen(ETCD)) == 0 ||
	       strncmp(text, ETCDS, strlen(ETCDS)) == 0;
}

static int cluster_port(const char *text, size_t len, struct cluster_endpoint *endpoint)
{
	long port;

	if (len == 0 || len >= sizeof(endpoint->port) || strspn(text, "0123456789") < len)
		return err_raise(ERR_CONFIG,
				 "cluster: port '%.*s': must be a number from 1 to "
				 "65535, as in HOST:PORT",
				 (int)(len < 32 ? len : 32), text);
	memcpy(endpoint->port, text, len);
	endpoint->port[len] = '\0';
	port = strtol(endpoint->port, NULL, 10);
	if (port < 1 || port > 65535)
		return err_raise(ERR_CONFIG, "cluster: port %s: must be 1 to 65535",
				 endpoint->port);
	return 0;
}

static bool cluster_host_char(char c)
{
	return (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') ||
	       (c >= 'a' && c <= 'z') || c == '.' || c == '-' || c == '_';
}

static int cluster_host(const char *text, size_t len, bool brackets,
			struct cluster_endpoint *endpoint)
{
	struct in6_addr v6;
	struct in_addr v4;

	if (len == 0 || len >= sizeof(endpoint->host))
		return err_raise(ERR_CONFIG,
				 "cluster: a host of %zu bytes (1 to %zu); separate "
				 "hosts by commas, as in "
				 "etcd://HOST:PORT,HOST:PORT/PREFIX",
				 len, sizeof(endpoint->host) - 1);
	memcpy(endpoint->host, text, len);
	endpoint->host[len] = '\0';
	if (brackets) {
		endpoint->literal = true;
		if (inet_pton(AF_INET6, endpoint->host, &v6) == 1)
			return 0;
		return err_raise(ERR_CONFIG,
				 "cluster: host '[%.64s]': brackets must contain an "
				 "IPv6 address",
				 endpoint->host);
	}
	endpoint->literal = inet_pton(AF_INET, endpoint->host, &v4) == 1;
	for (size_t i = 0; i < len; i++)
		if (!cluster_host_char(text[i]))
			return err_raise(
				ERR_CONFIG,
				"cluster: host '%.64s': use letters, digits, '.', '-' "
				"and '_', or an IPv6 address in brackets%s",
				endpoint->host,
				strchr(endpoint->host, '@')
					? "; put user and password into the file of "
					  "cluster_user_file"
					: "");
	return 0;
}

/* HOST[:PORT] of `len` bytes. */
static int cluster_endpoint(const char *text, size_t len,
			    struct cluster_endpoint *endpoint)
{
	const char *end = text + len, *host = text, *host_end, *port = NULL;
	bool brackets = len && *text == '[';
	int r;

	if (brackets) {
		host++;
		host_end = memchr(host, ']', (size_t)(end - host));
		if (!host_end)
			return err_raise(ERR_CONFIG,
					 "cluster: '%.*s': ']' is missing after the "
					 "IPv6 address",
					 (int)(len < 64 ? len : 64), text);
		if (host_end + 1 < end && host_end[1] != ':')
			return err_raise(ERR_CONFIG,
					 "cluster: '%.*s': only :PORT may follow ']'",
					 (int)(len < 64 ? len : 64), text);
		if (host_end + 1 < end)
			port = host_end + 2;
	} else {
		host_end = len ? memchr(text, ':', len) : NULL;
		if (host_end)
			port = host_end + 1;
		else
			host_end = end;
	}
	r = cluster_host(host, (size_t)(host_end - host), brackets, endpoint);
	if (r < 0)
		return err_pass(r);
	if (!port)
		port = PORT_DEFAULT, end = port + strlen(port);
	return err_pass(cluster_port(port, (size_t)(end - port), endpoint));
}

static int cluster_prefix(const char *text, char prefix[CLUSTER_PREFIX_MAX])
{
	size_t len = strlen(text);

	while (len && text[len - 1] == '/')
		len--;
	if (len == 0) {
		text = PREFIX_DEFAULT;
		len = strlen(text);
	}
	if (len >= CLUSTER_PREFIX_MAX)
		return err_raise(ERR_CONFIG, "cluster: a prefix of %zu bytes (limit %u)",
				 len, CLUSTER_PREFIX_MAX - 1);
	for (size_t i = 0; i < len; i++)
		if (!cluster_host_char(text[i]) && text[i] != '/')
			return err_raise(ERR_CONFIG,
					 "cluster: prefix '%.64s': use letters, digits, "
					 "'.', '-', '_' and '/'",
					 text);
	memcpy(prefix, text, len);
	prefix[len] = '\0';
	return 0;
}

int cluster_url_parse(const char *text, struct cluster_url *url_p)
{
	const char *at = text, *end;
	int r;

	*url_p = (struct cluster_url){.tls = strncmp(text, ETCDS, strlen(ETCDS)) == 0};
	if (!cluster_url_is_etcd(text))
		return err_raise(ERR_CONFIG,
				 "cluster: '%.64s': must be file:/PATH, or "
				 "etcd://HOST:PORT[,HOST:PORT...]/PREFIX, with TLS "
				 "etcds://...",
				 text);
	at += strlen(url_p->tls ? ETCDS : ETCD);
	end = at + strcspn(at, "/");
	for (;;) {
		size_t len = strcspn(at, ",/");

		if (url_p->count == CLUSTER_URL_ENDPOINTS_MAX)
			return err_raise(
				ERR_CONFIG,
				"cluster: more than %u hosts; list fewer: etcd's "
				"members know each other",
				CLUSTER_URL_ENDPOINTS_MAX);
		r = cluster_endpoint(at, len, &url_p->endpoints[url_p->count]);
		if (r < 0)
			return err_pass(r);
		url_p->count++;
		at += len;
		if (at >= end)
			break;
		at++; /* the comma */
	}
	return err_pass(cluster_prefix(end, url_p->prefix));
}
