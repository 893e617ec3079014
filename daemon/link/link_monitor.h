/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_monitor: what libzmq does on its threads for one socket: connections that
 * come, handshakes that fail, and why.
 *
 * libzmq queues events for us and blocks its I/O thread, with all lines, when that
 * queue is full. So the queue has no limit, and this has one: whoever makes more
 * events than hundreds of turns of the loop read ends them for a second.
 */
#ifndef KVD_LINK_MONITOR_H
#define KVD_LINK_MONITOR_H

#include <stdint.h>

struct link_monitor;
struct loop;

/* Watch `socket` for `events` (ZMQ_EVENT_…). on_event() is called on the loop, never
 * from inside the functions here, and must not free the monitor. */
int link_monitor_new(struct loop *loop, void *context, void *socket, int events,
		     void (*on_event)(void *owner, int event, uint32_t value),
		     void *owner, struct link_monitor **monitor_p);
/* Before the socket is closed. NULL is fine. */
void link_monitor_free(struct link_monitor *monitor);

#endif
