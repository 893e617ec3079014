/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Input from systemd is in environment variables, which are checked like any other input:
 * numbers must be whole, the pid must be ours, the fd must be a valid control socket.
 * Each message is one datagram, sent from a new socket: messages are rare, and an fd that
 * is kept would have to be guarded over a fork.
 */
#include "daemon/loop/notify.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define LISTEN_FDS_START 3
#define NS_PER_US UINT64_C(1000)
#define KEPT_MAX 8u
#define FDS_MAX 64u
#define KEPT_PREFIX "kvd-"

static struct {
	char name[64]; /* "": none */
	int fd;
} kept[KEPT_MAX];

/* A whole decimal number from the environment; 0 when absent or malformed. */
static uint64_t env_number(const char *name)
{
	const char *text = getenv(name);
	unsigned long long value;
	char *end;

	if (!text || *text < '0' || *text > '9')
		return 0;
	errno = 0;
	value = strtoull(text, &end, 10);
	return errno || *end ? 0 : value;
}

/* With an fd (-1: none). */
static void send_text(const char *text, size_t len, int with)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	const char *path = getenv("NOTIFY_SOCKET");
	char control[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec iov = {(void *)(uintptr_t)text, len};
	struct msghdr msg = {.msg_name = &addr, .msg_iov = &iov, .msg_iovlen = 1};
	cleanup_close int fd = -1;
	size_t path_len;

	if (!notify_keeps())
		return;
	path_len = strlen(path);
	if (path_len >= sizeof(addr.sun_path))
		return;
	memcpy(addr.sun_path, path, path_len);
	if (*path == '@') /* an abstract name */
		addr.sun_path[0] = '\0';
	fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return;
	msg.msg_namelen = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + path_len);
	if (with >= 0) {
		struct cmsghdr *head = (struct cmsghdr *)(void *)control;

		*head = (struct cmsghdr){.cmsg_level = SOL_SOCKET,
					 .cmsg_type = SCM_RIGHTS,
					 .cmsg_len = CMSG_LEN(sizeof(int))};
		memcpy(CMSG_DATA(head), &with, sizeof(with));
		msg.msg_control = control;
		msg.msg_controllen = sizeof(control);
	}
	/* lost without a receiver; see the header */
	(void)sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static void notify_send(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

/* "NAME=value" lines. */
static void notify_send(const char *fmt, ...)
{
	char text[512];
	va_list ap;
	int r;

	va_start(ap, fmt);
	r = vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	if (r >= 0)
		send_text(text, strlen(text), -1);
}

bool notify_keeps(void)
{
	const char *path = getenv("NOTIFY_SOCKET");

	return path && (*path == '/' || *path == '@');
}

void notify_keep_fd(const char *name, int fd)
{
	char text[128];

	snprintf(text, sizeof(text), "FDSTORE=1\nFDNAME=%s", name);
	send_text(text, strlen(text), fd);
}

void notify_forget_fd(const char *name)
{
	notify_send("FDSTOREREMOVE=1\nFDNAME=%s", name);
}

int notify_kept_fd(const char *name)
{
	for (unsigned int i = 0; i < KEPT_MAX; i++) {
		if (kept[i].name[0] && strcmp(kept[i].name, name) == 0) {
			kept[i].name[0] = '\0';
			return kept[i].fd;
		}
	}
	return -1;
}

void notify_ready(const char *status)
{
	notify_send("READY=1\nSTATUS=%s", status);
}

void notify_reloading(uint64_t now_ns)
{
	notify_send("RELOADING=1\nMONOTONIC_USEC=%llu",
		    (unsigned long long)(now_ns / NS_PER_US));
}

void notify_stopping(const char *status)
{
	notify_send("STOPPING=1\nSTATUS=%s", status);
}

void notify_status(const char *status)
{
	notify_send("STATUS=%s", status);
}

void notify_watchdog(void)
{
	notify_send("WATCHDOG=1");
}

uint64_t notify_watchdog_ns(void)
{
	uint64_t pid = env_number("WATCHDOG_PID");
	uint64_t us = env_number("WATCHDOG_USEC");

	if ((pid && pid != (uint64_t)getpid()) || us > UINT64_MAX / NS_PER_US)
		return 0;
	return us * NS_PER_US;
}

static int notify_option_of(int fd, int name, int *value_p)
{
	socklen_t len = sizeof(*value_p);

	*value_p = -1;
	return getsockopt(fd, SOL_SOCKET, name, value_p, &len);
}

static int check_listening(int fd)
{
	int domain, type, listening;

	if (notify_option_of(fd, SO_DOMAIN, &domain) < 0 ||
	    notify_option_of(fd, SO_TYPE, &type) < 0 ||
	    notify_option_of(fd, SO_ACCEPTCONN, &listening) < 0 || domain != AF_UNIX ||
	    type != SOCK_STREAM || listening != 1)
		return err_raise(ERR_CONFIG,
				 "fd %d from systemd: not a listening Unix stream socket",
				 fd);
	if (fcntl(fd, F_SETFD, FD_CLOEXEC) < 0 || fcntl(fd, F_SETFL, O_NONBLOCK) < 0)
		return err_raise_errno(errno, "fd %d from systemd", fd);
	return 0;
}

static void kept_add(const char *name, size_t len, int fd)
{
	for (unsigned int i = 0; i < KEPT_MAX; i++) {
		if (kept[i].name[0] || len >= sizeof(kept[i].name))
			continue;
		memcpy(kept[i].name, name, len);
		kept[i].name[len] = '\0';
		kept[i].fd = fd;
		return;
	}
	close(fd);
}

/* Stores kept descriptors separately. Returns the number of others; *fd_p: the first. */
static uint64_t take_fds(uint64_t count, const char *names, int *fd_p)
{
	uint64_t others = 0;

	for (uint64_t i = 0; i < count && i < FDS_MAX; i++) {
		size_t len = strcspn(names, ":");
		int fd = LISTEN_FDS_START + (int)i;

		if (len > strlen(KEPT_PREFIX) &&
		    strncmp(names, KEPT_PREFIX, strlen(KEPT_PREFIX)) == 0) {
			(void)fcntl(fd, F_SETFD, FD_CLOEXEC);
			kept_add(names, len, fd);
		} else if (++others == 1) {
			*fd_p = fd;
		}
		names += len + (names[len] == ':');
	}
	return others;
}

int notify_listen_fd(int *fd_p)
{
	uint64_t pid = env_number("LISTEN_PID"), count = env_number("LISTEN_FDS");
	const char *told = getenv("LISTEN_FDNAMES");
	cleanup_free char *names = mem_strdup(told ? told : "");
	int fd = -1, r;

	*fd_p = -1;
	unsetenv("LISTEN_PID");
	unsetenv("LISTEN_FDS");
	unsetenv("LISTEN_FDNAMES");
	if (pid != (uint64_t)getpid() || count == 0)
		return 0;
	count = take_fds(count, names ? names : "", &fd);
	if (count == 0)
		return 0;
	if (count != 1)
		return err_raise(
			ERR_CONFIG,
			"%llu sockets passed by systemd; kvd accepts one, the control "
			"socket",
			(unsigned long long)count);
	r = check_listening(fd);
	if (r < 0)
		return err_pass(r);
	*fd_p = fd;
	return 0;
}
