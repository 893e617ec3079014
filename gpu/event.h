/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event: points in the streams of engines, told apart from here.
 *
 * An engine records an event that it made for other processes and hands its 64
 * bytes over; a thread of kvd's, one a device, opens it and asks the driver, again and
 * again, whether the GPU has got there. Asking is all that is done with it: no stream of
 * kvd's waits on an event of an engine's, so an event that never comes holds
 * nothing up but its own watch, which its owner may let go of at any time.
 *
 * The driver looks at the newest record of an event. So the engine records before
 * it hands the event over, and not again until what waits has begun; an event that
 * was never recorded counts as reached (cuEventQuery), which cannot be told from
 * the outside.
 *
 * Functions are for the loop's thread; none blocks but gpu_events_free().
 */
#ifndef KVD_GPU_EVENT_H
#define KVD_GPU_EVENT_H

#include <stdint.h>

#include "gpu/cudrv.h"

struct gpu;
struct gpu_event;
struct gpu_events;
struct loop;

#define GPU_EVENTS_MAX 4096u	   /* watched at a time */
#define GPU_EVENTS_OWNER_MAX 1024u /* of one owner */

/* on_change: in the loop, when the state of any event is another. */
int gpu_events_new(struct gpu *gpu, struct loop *loop, void (*on_change)(void *arg),
		   void *arg, struct gpu_events **events_p);
/* All are let go of. Waits for the driver to close them. NULL is fine. */
void gpu_events_free(struct gpu_events *events);

/* Begin to watch. ERR_LIMIT, ERR_NOMEM; what is wrong with the handle shows in the
 * state. `device`: UUID or PCI id, under 64 bytes. */
int gpu_event_watch(struct gpu_events *events, uint64_t owner, const char *device,
		    const struct cu_ipc_event *handle, struct gpu_event **event_p);
/* 1: the GPU was there; 0: not yet; negative: it cannot be told, and why. */
int gpu_event_state(const struct gpu_event *event);
void gpu_event_drop(struct gpu_event *event); /* NULL is fine */

#endif
