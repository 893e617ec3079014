/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/link/link.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"

static const char scheme[] = "tcp://";

static bool port_ok(const char *s)
{
	size_t digits = strspn(s, "0123456789");

	return digits > 0 && digits <= 5 && s[digits] == '\0' && atoi(s) >= 1 &&
	       atoi(s) <= 65535;
}

static bool host_ok(const char *s, size_t len)
{
	const char *extra = ".-_";

	if (len >= 2 && s[0] == '[' && s[len - 1] == ']') {
		s++;
		len -= 2;
		extra = ":.%";
	}
	for (size_t i = 0; i < len; i++) {
		if (!isalnum((unsigned char)s[i]) && !strchr(extra, s[i]))
			return false;
	}
	return len > 0;
}

int link_endpoint_check(const char *endpoint)
{
	const char *host = endpoint + sizeof(scheme) - 1;
	const char *colon = strrchr(endpoint, ':');

	if (strlen(endpoint) >= LINK_ENDPOINT_MAX)
		return err_raise(ERR_INVAL, "endpoint '%.64s…': over %d bytes", endpoint,
				 LINK_ENDPOINT_MAX - 1);
	if (strncmp(endpoint, scheme, sizeof(scheme) - 1) != 0 || colon < host ||
	    !host_ok(host, (size_t)(colon - host)) || !port_ok(colon + 1))
		return err_raise(ERR_INVAL, "endpoint '%s': must be tcp://host:port",
				 endpoint);
	return 0;
}
