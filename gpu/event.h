/* SPDX-License-Identifier: Apache-2.0 */
/*
 * event: points in the streams of engines, watched from here.
 *
 * An engine records an interprocess event and passes its 64-byte handle; a thread of kvd,
 * one per device, opens it and queries the driver periodically whether the GPU has
 * reached it. The event is only queried: no stream of kvd's waits on an event of an
 * engine's, so an event that is never reached delays only its own watch, which its owner
 * may release at any time.
 *
 * The driver queries the newest record of an event. So the engine records before it
 * passes the event, and not again until the waiting work has started; an event that was
 * never recorded counts as reached (cuEventQuery), which cannot be distinguished from the
 * outside.
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
/* Releases all. Waits for the driver to close them. NULL is allowed. */
void gpu_events_free(struct gpu_events *events);

/* Start to watch. ERR_LIMIT, ERR_NOMEM; errors of the handle show in the state. `device`:
 * UUID or PCI id, under 64 bytes. */
int gpu_event_watch(struct gpu_events *events, uint64_t owner, const char *device,
		    const struct cu_ipc_event *handle, struct gpu_event **event_p);
/* 1: the GPU has reached it; 0: not yet; negative: unknown, with the reason. */
int gpu_event_state(const struct gpu_event *event);
void gpu_event_drop(struct gpu_event *event); /* NULL is allowed */

#endif
