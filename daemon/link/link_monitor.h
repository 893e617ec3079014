/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link_monitor: the events of libzmq's threads for one socket: new connections, failed
 * handshakes and their cause.
 *
 * libzmq queues events, and when that queue is full it blocks its I/O thread and with it
 * all lines. So the queue is unlimited, and the monitor has a limit instead: a source
 * that creates more events than hundreds of turns of the loop can read suspends the
 * events for a second.
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
