/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two ZMTP sides send their greetings in turns: the signature, then the version, then,
 * after the other's version, the rest. So signature and version are enough to receive the
 * other side's mechanism, while it waits for ours. Sent back when it differs, ours makes
 * the listener log the cause; a listener that only sees the end of the connection does
 * not know it.
 */
#include "daemon/link/link_probe.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/link/link.h"
#include "daemon/loop/loop.h"

#define PROBE_NS (800 * LOOP_NS_PER_MS)
/* Signature 10, version 2, mechanism 20, as-server 1, filler 31. All of it is read:
 * closing a socket with unread bytes resets the connection, and our bytes are lost. */
#define GREETING_BYTES 64u
#define MECHANISM_AT 12u

/* Signature and version 3.0: the other side then sends the rest of its greeting. */
static const uint8_t hello[MECHANISM_AT] = {0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 3, 0};
static const uint8_t plain_rest[GREETING_BYTES - MECHANISM_AT] = "NULL";
static const uint8_t curve_rest[GREETING_BYTES - MECHANISM_AT] = "CURVE";

struct link_probe {
	struct loop_fd fd;
	struct loop_timer timer;
	struct loop_defer failed; /* failed before it was started */
	int socket, no;
	bool connected, curve;
	uint8_t greeting[GREETING_BYTES];
	size_t got;
	void (*on_found)(void *owner, enum probe_found found, int no);
	void *owner;
};

static void probe_tell(struct link_probe *probe, enum probe_found found, int no)
{
	loop_timer_stop(&probe->timer);
	loop_fd_stop(&probe->fd);
	probe->on_found(probe->owner, found, no);
}

static enum probe_found probe_judge(const struct link_probe *probe)
{
	const char *mechanism = (const char *)probe->greeting + MECHANISM_AT;

	if (probe->greeting[0] != 0xff || probe->greeting[9] != 0x7f)
		return PROBE_NOT_ZMTP;
	if (memcmp(mechanism, "NULL", sizeof("NULL")) == 0)
		return PROBE_PLAIN;
	if (memcmp(mechanism, "CURVE", sizeof("CURVE")) == 0)
		return PROBE_CURVE;
	return PROBE_NOT_ZMTP;
}

static void probe_greeted(struct link_probe *probe)
{
	enum probe_found found = probe_judge(probe);
	const uint8_t *rest = probe->curve ? curve_rest : plain_rest;

	if (found != PROBE_NOT_ZMTP && (found == PROBE_CURVE) != probe->curve)
		(void)!send(probe->socket, rest, sizeof(plain_rest), MSG_NOSIGNAL);
	probe_tell(probe, found, 0);
}

static void probe_read(struct link_probe *probe)
{
	ssize_t n = recv(probe->socket, probe->greeting + probe->got,
			 GREETING_BYTES - probe->got, 0);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n > 0)
		probe->got += (size_t)n;
	if (probe->got && probe->greeting[0] != 0xff)
		probe_tell(probe, PROBE_NOT_ZMTP, 0);
	else if (n <= 0)
		probe_tell(probe, PROBE_CLOSED, 0);
	else if (probe->got == GREETING_BYTES)
		probe_greeted(probe);
}

static void on_probe_ready(struct loop_fd *watch, int events)
{
	struct link_probe *probe = container_of(watch, struct link_probe, fd);
	socklen_t len = sizeof(probe->no);

	(void)events;
	if (probe->connected) {
		probe_read(probe);
		return;
	}
	if (getsockopt(probe->socket, SOL_SOCKET, SO_ERROR, &probe->no, &len) != 0)
		probe->no = errno;
	if (!probe->no &&
	    send(probe->socket, hello, sizeof(hello), MSG_NOSIGNAL) != sizeof(hello))
		probe->no = errno;
	if (!probe->no && loop_fd_set(&probe->fd, LOOP_READ) < 0) {
		err_clear();
		probe->no = ENOMEM;
	}
	probe->connected = !probe->no;
	if (probe->no)
		probe_tell(probe, PROBE_ERRNO, probe->no);
}

static void on_probe_timer(struct loop_timer *timer)
{
	struct link_probe *probe = container_of(timer, struct link_probe, timer);

	if (probe->connected)
		probe_tell(probe, PROBE_SILENT, 0);
	else
		probe_tell(probe, PROBE_ERRNO, ETIMEDOUT);
}

static void on_probe_failed(struct loop_defer *defer)
{
	struct link_probe *probe = container_of(defer, struct link_probe, failed);

	probe_tell(probe, PROBE_ERRNO, probe->no);
}

/* A numeric address, so the resolver is not used. */
static int probe_connect(struct link_probe *probe, const char *address)
{
	const struct addrinfo hints = {.ai_socktype = SOCK_STREAM,
				       .ai_flags = AI_NUMERICHOST | AI_NUMERICSERV};
	char host[LINK_ENDPOINT_MAX];
	struct addrinfo *list;
	char *colon, *name = host;
	int no = 0;

	snprintf(host, sizeof(host), "%s", address + strlen("tcp://"));
	colon = strrchr(host, ':');
	if (!colon)
		return EINVAL;
	*colon = '\0';
	if (*name == '[') {
		name++;
		name[strcspn(name, "]")] = '\0';
	}
	if (getaddrinfo(name, colon + 1, &hints, &list) != 0)
		return EINVAL;
	probe->socket = socket(list->ai_family,
			       SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP);
	if (probe->socket < 0 ||
	    connect(probe->socket, list->ai_addr, list->ai_addrlen) != 0)
		no = errno;
	freeaddrinfo(list);
	return no == EINPROGRESS ? 0 : no;
}

int link_probe_new(struct loop *loop, const char *address, bool curve,
		   void (*on_found)(void *owner, enum probe_found found, int no),
		   void *owner, struct link_probe **probe_p)
{
	struct link_probe *probe = mem_zalloc(sizeof(*probe));
	int r = 0;

	if (!probe)
		return err_pass(-ENOMEM);
	probe->socket = -1;
	probe->curve = curve;
	probe->on_found = on_found;
	probe->owner = owner;
	loop_timer_init(&probe->timer, loop, on_probe_timer);
	loop_defer_init(&probe->failed, on_probe_failed);
	probe->no = probe_connect(probe, address);
	loop_fd_init(&probe->fd, loop, probe->socket, on_probe_ready);
	if (probe->no)
		loop_defer(loop, &probe->failed);
	else
		r = loop_fd_set(&probe->fd, LOOP_WRITE);
	if (r < 0) {
		link_probe_free(probe);
		return err_pass(r);
	}
	loop_timer_start(&probe->timer, PROBE_NS);
	*probe_p = probe;
	return 0;
}

void link_probe_free(struct link_probe *probe)
{
	if (!probe)
		return;
	loop_timer_stop(&probe->timer);
	loop_defer_cancel(&probe->failed);
	loop_fd_stop(&probe->fd);
	if (probe->socket >= 0)
		close(probe->socket);
	mem_free(probe);
}
