/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/metrics/http_listen.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"

#define BACKLOG 32

static int socket_open(int family, int *fd_p)
{
	*fd_p = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	return *fd_p < 0 ? err_raise_errno(errno, "metrics_listen: a socket") : 0;
}

static int tcp_open(const char *endpoint, int *fd_p)
{
	const char *host = endpoint + strlen("tcp://"), *colon = strrchr(host, ':');
	struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
				 .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
	char address[CONFIG_ENDPOINT_BYTES];
	struct addrinfo *info;
	int r, yes = 1;

	if (*host == '[')
		snprintf(address, sizeof(address), "%.*s", (int)(colon - host) - 2,
			 host + 1);
	else
		snprintf(address, sizeof(address), "%.*s", (int)(colon - host), host);
	r = getaddrinfo(address, colon + 1, &hints, &info);
	if (r != 0)
		return err_raise(ERR_CONFIG, "metrics_listen = %s: %s", endpoint,
				 gai_strerror(r));
	r = socket_open(info->ai_family, fd_p);
	if (r == 0 &&
	    (setsockopt(*fd_p, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes)) < 0 ||
	     bind(*fd_p, info->ai_addr, info->ai_addrlen) < 0 ||
	     listen(*fd_p, BACKLOG) < 0))
		r = err_raise_errno(errno, "metrics_listen = %s", endpoint);
	freeaddrinfo(info);
	return err_pass(r);
}

/* Every user of the control socket may read. */
static int path_own(const char *path, const struct config *config)
{
	struct stat st;

	if (stat(config->socket_path, &st) < 0 ||
	    lchown(path, (uid_t)-1, st.st_gid) < 0 ||
	    chmod(path, config->socket_mode) < 0)
		return err_raise_errno(errno, "group and mode of %s", path);
	return 0;
}

static int unix_open(const struct config *config, struct http_listen *l)
{
	int r = socket_open(AF_UNIX, &l->fd);

	if (r == 0)
		r = lock_socket_bind(&l->name, l->fd, "metrics_listen",
				     config->metrics_listen + strlen("unix:"), 0600,
				     BACKLOG);
	if (r < 0)
		return err_pass(r);
	return err_pass(path_own(l->name.path, config));
}

int http_listen_open(const struct config *config, struct http_listen *l)
{
	int r;

	*l = (struct http_listen){.fd = -1};
	r = strncmp(config->metrics_listen, "unix:", 5) == 0
		    ? unix_open(config, l)
		    : tcp_open(config->metrics_listen, &l->fd);
	if (r < 0)
		http_listen_close(l);
	return err_pass(r);
}

void http_listen_close(struct http_listen *l)
{
	lock_socket_drop(&l->name);
	mem_closep(&l->fd);
}
