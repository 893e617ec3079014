/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libzmq says that a handshake failed, and not whose. The failure is followed by
 * DISCONNECTED, with the descriptor, which ACCEPTED has told before; what it was
 * connected to is asked then. One I/O thread makes the events, so the two belong
 * together. A connection that is over by the time that its ACCEPTED is read may have
 * left its descriptor to another: in a flood an address may be that of a neighbour.
 *
 * What ends without a cause (a port scan, our own probe, a daemon that dies) is no
 * refusal.
 */
#include "daemon/link/link_door.h"

#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link_monitor.h"
#include "daemon/loop/loop.h"

#define EVENTS                                                      \
	(ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL | \
	 ZMQ_EVENT_DISCONNECTED)
#define CALLERS 64u

struct caller {
	uint32_t fd;
	char address[64];
};

struct link_door {
	struct loop *loop;
	struct link_monitor *monitor;
	struct link_refusals *table;
	bool curve;
	const char *why; /* of the connection that ends next */
	struct caller callers[CALLERS];
};

static void on_accepted(struct link_door *door, uint32_t fd)
{
	struct caller *caller = &door->callers[fd % CALLERS];
	struct sockaddr_storage address;
	socklen_t len = sizeof(address);

	*caller = (struct caller){.fd = fd};
	if (getpeername((int)fd, (struct sockaddr *)&address, &len) != 0 ||
	    getnameinfo((struct sockaddr *)&address, len, caller->address,
			sizeof(caller->address), NULL, 0, NI_NUMERICHOST) != 0)
		caller->address[0] = '\0';
}

static const char *words_of(const struct link_door *door, uint32_t value)
{
	if (value == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
		return door->curve ? "it has no CURVE keys, and this daemon has"
				   : "it has CURVE keys, and this daemon has none";
	if (value == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
		return "it expects another CURVE key than this daemon's";
	return NULL; /* noise of others */
}

static void on_disconnected(struct link_door *door, uint32_t fd)
{
	const struct caller *caller = &door->callers[fd % CALLERS];
	const char *address = caller->fd == fd ? caller->address : "";
	const char *why = door->why;
	struct link_refused *entry;
	bool log;

	door->why = NULL;
	if (!why)
		return;
	entry = link_refused_note(door->table, loop_now_ns(door->loop), "", address, why,
				  &log);
	if (log)
		log_warn("link", *address ? address : NULL, "connection refused",
			 "why=\"%s\" count=%llu", why, (unsigned long long)entry->count);
}

static void door_on_event(void *owner, int event, uint32_t value)
{
	struct link_door *door = owner;

	if (event == ZMQ_EVENT_ACCEPTED)
		on_accepted(door, value);
	else if (event == ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL)
		door->why = words_of(door, value);
	else if (event == ZMQ_EVENT_DISCONNECTED)
		on_disconnected(door, value);
}

int link_door_new(struct loop *loop, void *context, void *router, bool curve,
		  struct link_refusals *table, struct link_door **door_p)
{
	struct link_door *door = mem_zalloc(sizeof(*door));
	int r;

	if (!door)
		return err_pass(-ENOMEM);
	door->loop = loop;
	door->curve = curve;
	door->table = table;
	r = link_monitor_new(loop, context, router, EVENTS, door_on_event, door,
			     &door->monitor);
	if (r < 0) {
		mem_free(door);
		return err_pass(r);
	}
	*door_p = door;
	return 0;
}

void link_door_free(struct link_door *door)
{
	if (!door)
		return;
	link_monitor_free(door->monitor);
	mem_free(door);
}
