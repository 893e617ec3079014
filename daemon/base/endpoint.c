/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An endpoint is written by people, and by daemons that were given it by people: a host
 * in capitals, a name with the root's dot, [0::1], 127.1. Each of these is one place, and
 * a comparison of endpoints as text would miss that: an allow-list would admit no peer,
 * one daemon would have two peers. So there is one spelling, all comparing is done in it,
 * and this file alone knows it: names in lower case without a dot at the end, numbers as
 * inet_ntop() writes them, an IPv4 address in an IPv6 one as the former, ports without
 * zeros before them. Names are not resolved: two names of one host are two hosts.
 *
 * An IPv6 address needs its brackets: ::1:7400 is an address, too.
 */
#include "daemon/base/endpoint.h"

#include <arpa/inet.h>
#include <ctype.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"

static const char scheme[] = "tcp://";

static bool port_spell(const char *s, char port[ENDPOINT_PORT_MAX])
{
	size_t digits = strspn(s, "0123456789");
	int number = digits <= 5 ? atoi(s) : 0;

	snprintf(port, ENDPOINT_PORT_MAX, "%d", number);
	return s[digits] == '\0' && number >= 1 && number <= 65535;
}

/* The text between the brackets; an IPv4-mapped address becomes the IPv4 address. */
static bool six_spell(const char *s, char host[ENDPOINT_MAX])
{
	char text[ENDPOINT_MAX];
	size_t len = strcspn(s, "%");
	struct in6_addr six;

	for (const char *p = s + len; *p; p++) { /* the zone: an interface's name */
		if (!isalnum((unsigned char)*p) && !strchr("%.-_", *p))
			return false;
	}
	snprintf(text, sizeof(text), "%.*s", (int)len, s);
	if (inet_pton(AF_INET6, text, &six) != 1)
		return false;
	if (IN6_IS_ADDR_V4MAPPED(&six))
		return inet_ntop(AF_INET, &six.s6_addr[12], host, ENDPOINT_MAX);
	inet_ntop(AF_INET6, &six, text, sizeof(text));
	return snprintf(host, ENDPOINT_MAX, "[%s%s]", text, s + len) < ENDPOINT_MAX;
}

/* Text that the resolver accepts as an address, such as 127.1, is not sent to a name
 * server. */
static bool name_spell(const char *s, char host[ENDPOINT_MAX])
{
	size_t len = strlen(s);
	struct in_addr four;

	if (len > 1 && s[len - 1] == '.') /* the root, which needs no word */
		len--;
	for (size_t i = 0; i < len; i++) {
		if (!isalnum((unsigned char)s[i]) && !strchr(".-_", s[i]))
			return false;
		host[i] = (char)tolower((unsigned char)s[i]);
	}
	host[len] = '\0';
	if (len && inet_aton(host, &four))
		inet_ntop(AF_INET, &four, host, ENDPOINT_MAX);
	return len > 0;
}

/* HOST or HOST:PORT; *port "": there is none. */
static bool spell(const char *text, char host[ENDPOINT_MAX], char port[ENDPOINT_PORT_MAX])
{
	char word[ENDPOINT_MAX];
	size_t len = *text == '[' ? strcspn(text, "]") + 1 : strcspn(text, ":");
	const char *rest = text + len;

	*port = '\0';
	if (len >= sizeof(word) || len > strlen(text) ||
	    (*rest && (*rest != ':' || !port_spell(rest + 1, port))))
		return false;
	memcpy(word, text, len);
	word[len] = '\0';
	if (*word != '[')
		return name_spell(word, host);
	word[len - 1] = '\0';
	return six_spell(word + 1, host);
}

int endpoint_host_spell(const char *text, char out[ENDPOINT_MAX])
{
	char host[ENDPOINT_MAX], port[ENDPOINT_PORT_MAX];

	if (spell(text, host, port) && snprintf(out, ENDPOINT_MAX, "%s%s%s", host,
						*port ? ":" : "", port) < ENDPOINT_MAX)
		return 0;
	return err_raise(ERR_CONFIG,
			 "host '%.100s': must be HOST or HOST:PORT, an IPv6 address in "
			 "brackets",
			 text);
}

int endpoint_spell(const char *endpoint, char host[ENDPOINT_MAX],
		   char port[ENDPOINT_PORT_MAX])
{
	if (strlen(endpoint) >= ENDPOINT_MAX)
		return err_raise(ERR_INVAL, "endpoint '%.64s…': over %d bytes", endpoint,
				 ENDPOINT_MAX - 1);
	if (strncmp(endpoint, scheme, sizeof(scheme) - 1) != 0 ||
	    !spell(endpoint + sizeof(scheme) - 1, host, port) || !*port)
		return err_raise(ERR_INVAL,
				 "endpoint '%s': must be tcp://host:port, an IPv6 "
				 "address in brackets",
				 endpoint);
	return 0;
}

int endpoint_check(const char *endpoint)
{
	char host[ENDPOINT_MAX], port[ENDPOINT_PORT_MAX];

	return err_pass(endpoint_spell(endpoint, host, port));
}

int endpoint_canon(const char *endpoint, char out[ENDPOINT_MAX])
{
	char plain[ENDPOINT_MAX], host[ENDPOINT_MAX], port[ENDPOINT_PORT_MAX];
	size_t len = strcspn(endpoint, "#");
	int r;

	snprintf(plain, sizeof(plain), "%.*s", (int)len, endpoint);
	r = endpoint_spell(strlen(endpoint) < sizeof(plain) ? plain : endpoint, host,
			   port);
	if (r < 0)
		return err_pass(r);
	if (snprintf(out, ENDPOINT_MAX, "%s%s:%s%s", scheme, host, port,
		     endpoint + len) >= ENDPOINT_MAX)
		return err_raise(ERR_INVAL,
				 "endpoint '%s': over %d bytes when spelled "
				 "out",
				 endpoint, ENDPOINT_MAX - 1);
	return 0;
}

bool endpoint_same(const char *a, const char *b)
{
	char one[ENDPOINT_MAX], two[ENDPOINT_MAX];
	size_t len;

	if (strcmp(a, b) == 0)
		return true;
	if (endpoint_canon(a, one) < 0 || endpoint_canon(b, two) < 0) {
		err_clear();
		return false;
	}
	if (strchr(one, '#') && strchr(two, '#'))
		return strcmp(one, two) == 0;
	len = strcspn(one, "#");
	return len == strcspn(two, "#") && strncmp(one, two, len) == 0;
}

bool endpoint_is_loopback(const char *endpoint)
{
	char text[ENDPOINT_MAX], host[ENDPOINT_MAX];
	const char *colon = strrchr(endpoint, ':');
	struct in_addr four;

	if (strncmp(endpoint, scheme, sizeof(scheme) - 1) != 0 || !colon)
		return false;
	endpoint += sizeof(scheme) - 1;
	if (colon < endpoint || colon - endpoint >= (ptrdiff_t)sizeof(text))
		return false;
	snprintf(text, sizeof(text), "%.*s", (int)(colon - endpoint), endpoint);
	if (endpoint_host_spell(text, host) < 0) {
		err_clear();
		return false;
	}
	return strcmp(host, "[::1]") == 0 ||
	       (inet_pton(AF_INET, host, &four) == 1 && ntohl(four.s_addr) >> 24 == 127);
}
