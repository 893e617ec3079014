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
	     bind(*fd_p, info->ai_addr, info->ai_addrlen) < 0))
		r = err_raise_errno(errno, "metrics_listen = %s", endpoint);
	freeaddrinfo(info);
	return err_pass(r);
}

/* A name that is left of a daemon that was killed goes; one that somebody listens at,
 * and what is no socket, does not. */
static int path_clear(const struct sockaddr_un *addr)
{
	cleanup_close int fd = -1;
	struct stat st;
	int r;

	if (lstat(addr->sun_path, &st) < 0)
		return errno == ENOENT ? 0 : err_raise_errno(errno, "%s", addr->sun_path);
	if (!S_ISSOCK(st.st_mode))
		return err_raise(ERR_CONFIG, "%s: exists and is no socket",
				 addr->sun_path);
	r = socket_open(AF_UNIX, &fd);
	if (r < 0)
		return err_pass(r);
	if (connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) == 0 ||
	    errno == EAGAIN)
		return err_raise(ERR_BUSY, "%s: somebody listens there already",
				 addr->sun_path);
	if (unlink(addr->sun_path) < 0)
		return err_raise_errno(errno, "removing the old %s", addr->sun_path);
	return 0;
}

/* Whoever may talk to the control socket may read. */
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
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int r;

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s",
		 config->metrics_listen + strlen("unix:"));
	r = path_clear(&addr);
	if (r == 0)
		r = socket_open(AF_UNIX, &l->fd);
	if (r < 0)
		return err_pass(r);
	if (fchmod(l->fd, 0600) < 0 ||
	    bind(l->fd, (const struct sockaddr *)&addr, sizeof(addr)) < 0)
		return err_raise_errno(errno, "metrics_listen = %s",
				       config->metrics_listen);
	memcpy(l->path, addr.sun_path, sizeof(l->path));
	return err_pass(path_own(l->path, config));
}

int http_listen_open(const struct config *config, struct http_listen *l)
{
	int r;

	*l = (struct http_listen){.fd = -1};
	r = strncmp(config->metrics_listen, "unix:", 5) == 0
		    ? unix_open(config, l)
		    : tcp_open(config->metrics_listen, &l->fd);
	if (r == 0 && listen(l->fd, BACKLOG) < 0)
		r = err_raise_errno(errno, "metrics_listen = %s", config->metrics_listen);
	if (r < 0)
		http_listen_close(l);
	return err_pass(r);
}

void http_listen_close(struct http_listen *l)
{
	mem_closep(&l->fd);
	l->fd = -1;
	if (l->path[0])
		unlink(l->path);
	l->path[0] = '\0';
}
