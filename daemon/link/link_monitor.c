/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libzmq writes events into a PAIR socket, and blocks when that is full; the blocked
 * thread holds the lock that is needed to end the monitor. So the queue is unlimited,
 * libzmq's side is closed first, and when many consecutive turns cannot read all events
 * the monitor is closed for a while.
 */
#include "daemon/link/link_monitor.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <zmq.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/link/link_again.h"
#include "daemon/loop/loop.h"

#define BUDGET 64u /* events a turn */
#define FULL_TURNS 256u
#define PAUSE_NS LOOP_NS_PER_S
#define EVENT_BYTES 6u /* u16 event, u32 value */

struct link_monitor {
	struct loop *loop;
	struct loop_fd fd;
	struct loop_defer first; /* events before the fd was watched, or unread */
	struct loop_timer pause;
	void *context, *socket, *pair;
	int events;
	unsigned int full; /* consecutive turns that left events */
	void (*on_event)(void *owner, int event, uint32_t value);
	void *owner;
};

/* libzmq's side is closed first: it would wait for a closed reader. */
static void monitor_end(struct link_monitor *monitor)
{
	loop_defer_cancel(&monitor->first);
	loop_fd_stop(&monitor->fd);
	if (!monitor->pair)
		return;
	zmq_socket_monitor(monitor->socket, NULL, 0);
	zmq_close(monitor->pair);
	monitor->pair = NULL;
}

/* False when none is queued. */
static bool monitor_receive(struct link_monitor *monitor, int *event_p, uint32_t *value_p)
{
	uint8_t frame[EVENT_BYTES];
	uint16_t event;
	char endpoint; /* of the socket: unused */
	int n = zmq_recv(monitor->pair, frame, sizeof(frame), ZMQ_DONTWAIT);

	if (n < 0)
		return false;
	zmq_recv(monitor->pair, &endpoint, sizeof(endpoint), ZMQ_DONTWAIT);
	memcpy(&event, frame, sizeof(event));
	memcpy(value_p, frame + sizeof(event), sizeof(*value_p));
	*event_p = n == (int)EVENT_BYTES ? event : 0;
	return true;
}

static void monitor_drain(struct link_monitor *monitor)
{
	uint32_t value;
	int event;

	for (unsigned int i = 0; i < BUDGET; i++) {
		if (!monitor_receive(monitor, &event, &value)) {
			monitor->full = 0;
			return;
		}
		monitor->on_event(monitor->owner, event, value);
	}
	if (++monitor->full < FULL_TURNS) {
		loop_defer(monitor->loop, &monitor->first);
		return;
	}
	monitor->full = 0;
	monitor_end(monitor);
	loop_timer_start(&monitor->pause, PAUSE_NS);
}

static void on_monitor_ready(struct loop_fd *watch, int events)
{
	(void)events;
	monitor_drain(container_of(watch, struct link_monitor, fd));
}

static void on_monitor_first(struct loop_defer *defer)
{
	monitor_drain(container_of(defer, struct link_monitor, first));
}

static int monitor_begin(struct link_monitor *monitor)
{
	static unsigned int made;
	char endpoint[40];
	int zero = 0, fd = -1;
	size_t size = sizeof(fd);
	int r;

	snprintf(endpoint, sizeof(endpoint), "inproc://kvd-monitor-%u", made++);
	monitor->pair = zmq_socket(monitor->context, ZMQ_PAIR);
	if (!monitor->pair)
		return err_raise(ERR_LIMIT, "a monitor of a ZeroMQ socket: %s",
				 zmq_strerror(errno));
	if (zmq_setsockopt(monitor->pair, ZMQ_LINGER, &zero, sizeof(zero)) ||
	    zmq_setsockopt(monitor->pair, ZMQ_RCVHWM, &zero, sizeof(zero)) ||
	    LINK_AGAIN(zmq_socket_monitor(monitor->socket, endpoint, monitor->events)) ||
	    zmq_connect(monitor->pair, endpoint) ||
	    zmq_getsockopt(monitor->pair, ZMQ_FD, &fd, &size)) {
		r = err_raise(ERR_IO, "a monitor of a ZeroMQ socket: %s",
			      zmq_strerror(errno));
		monitor_end(monitor);
		return err_pass(r);
	}
	loop_fd_init(&monitor->fd, monitor->loop, fd, on_monitor_ready);
	r = loop_fd_set(&monitor->fd, LOOP_READ);
	if (r < 0)
		monitor_end(monitor);
	else
		loop_defer(monitor->loop, &monitor->first);
	return err_pass(r);
}

static void on_monitor_pause(struct loop_timer *timer)
{
	if (monitor_begin(container_of(timer, struct link_monitor, pause)) < 0) {
		err_clear();
		loop_timer_start(timer, PAUSE_NS);
	}
}

int link_monitor_new(struct loop *loop, void *context, void *socket, int events,
		     void (*on_event)(void *owner, int event, uint32_t value),
		     void *owner, struct link_monitor **monitor_p)
{
	struct link_monitor *monitor = mem_zalloc(sizeof(*monitor));
	int r;

	if (!monitor)
		return err_pass(-ENOMEM);
	monitor->loop = loop;
	monitor->context = context;
	monitor->socket = socket;
	monitor->events = events;
	monitor->on_event = on_event;
	monitor->owner = owner;
	loop_defer_init(&monitor->first, on_monitor_first);
	loop_timer_init(&monitor->pause, loop, on_monitor_pause);
	loop_fd_init(&monitor->fd, loop, -1, on_monitor_ready);
	r = monitor_begin(monitor);
	if (r < 0) {
		mem_free(monitor);
		return err_pass(r);
	}
	*monitor_p = monitor;
	return 0;
}

void link_monitor_free(struct link_monitor *monitor)
{
	if (!monitor)
		return;
	loop_timer_stop(&monitor->pause);
	monitor_end(monitor);
	mem_free(monitor);
}
