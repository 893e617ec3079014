/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into a daemon: who connects to a port of $KVD_DETOUR ("7001=8001 7002=8002")
 * gets to the one behind it, where a test sits in between.
 */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static in_port_t detour(in_port_t port)
{
	const char *at = getenv("KVD_DETOUR");
	char *end;

	while (at && *at) {
		unsigned long from = strtoul(at, &end, 10),
			      to = strtoul(end + 1, &end, 10);

		if (from == ntohs(port))
			return htons((uint16_t)to);
		at = end + strspn(end, " ");
	}
	return port;
}

int connect(int fd, const struct sockaddr *addr, socklen_t len)
{
	union {
		struct sockaddr any;
		struct sockaddr_in v4;
		struct sockaddr_in6 v6; /* libzmq's, mapped */
	} there;

	if (len <= sizeof(there)) {
		memcpy(&there, addr, len);
		if (addr->sa_family == AF_INET && len >= sizeof(there.v4))
			there.v4.sin_port = detour(there.v4.sin_port);
		if (addr->sa_family == AF_INET6 && len >= sizeof(there.v6))
			there.v6.sin6_port = detour(there.v6.sin6_port);
		addr = &there.any;
	}
	return (int)syscall(SYS_connect, fd, addr, len);
}
