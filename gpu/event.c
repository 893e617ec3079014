/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Threads for events, because the driver's calls may block the loop: opening takes a lock
 * that a call of another thread may hold for long, and cuEventQuery may take long, too. A
 * thread a device: the first event on an unused one makes a context, which takes tenths
 * of a second, and an engine that causes this repeatedly must not delay the events of
 * others. Names become devices at once where the driver has been started; else one more
 * thread starts it, and passes events on.
 *
 * Polling, not cuEventSynchronize (a thread an event, and none of them can be
 * called back) and not cuStreamWaitEvent (a stream that waits for a dead engine's
 * event cannot be drained, so a fence would wait for it, too). A host function on
 * a stream behind the event has the same fault.
 *
 * Watches are shared with the loop and opens are not: an event opened by a handle of one
 * owner is shared by all that watch it meanwhile, since the driver does not document
 * whether a process may open a handle twice. A watch queries for itself, though: that
 * another one found the event reached may have been before the engine recorded it again.
 * Without a watch, the event is closed at once and not kept for the next time: cuda.h
 * calls any use of an imported event undefined after the engine has destroyed it, and an
 * engine that was notified of the end may do that.
 *
 * An engine that dies leaves its events behind without that order. Its session closes,
 * which drops the watches; a query in between is refused or answered, in both cases for a
 * room that is being aborted.
 */
#include "gpu/event.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "daemon/loop/loop.h"
#include "gpu/gpu.h"

/* An engine's step takes milliseconds, so a delay of 50 µs does not matter; long waits
 * poll less often. */
#define PAUSE_MIN_NS UINT64_C(50000)
#define PAUSE_MAX_NS UINT64_C(1000000)

enum { STATE_PENDING, STATE_REACHED, STATE_FAILED };

/* a thread's alone */
struct opened {
	struct list link;
	struct gpu_device *device;
	struct cu_event *event;
	uint64_t owner;
	char name[64];
	struct cu_ipc_event handle;
	unsigned int watches;
};

struct gpu_event {
	struct list link; /* watcher->fresh, ->watched */
	struct gpu_events *events;
	struct watcher *watcher; /* under the lock */
	uint64_t owner;
	char device[64];
	struct cu_ipc_event handle;
	atomic_bool dropped;
	atomic_int state;
	struct err why;	       /* before `state` becomes failed */
	struct opened *opened; /* the thread's */
};

struct watcher {
	struct gpu_events *events;
	pthread_t thread;
	pthread_cond_t more;
	/* under the lock */
	bool running;
	struct list fresh;
	bool look; /* something was dropped */
	/* the thread's */
	struct list watched, opens;
};

struct gpu_events {
	struct gpu *gpu;
	struct loop_wake wake;
	void (*on_change)(void *arg);
	void *arg;
	unsigned int count;   /* the loop's: not dropped */
	struct list live;     /* owners of those, for their cap: the loop's */
	pthread_mutex_t lock; /* of all watchers */
	bool stopping;
	struct watcher watchers[GPU_DEVICES_MAX]; /* by the device's number */
	struct watcher finder;			  /* of devices */
};

/* how many events one has: its cap */
struct owner {
	struct list link;
	uint64_t id;
	unsigned int count;
};

/* ---- opening and closing: the thread ---- */

static int event_refused(struct gpu_device *device, int result)
{
	int r = gpu_raise(device, result, ERR_IMPORT, "cuIpcOpenEventHandle");

	if (cudrv_sticky(result) || result == CU_ERROR_OUT_OF_MEMORY)
		return err_pass(r);
	if (result == CU_ERROR_INVALID_CONTEXT)
		return err_prefix(r, "the event is of kvd's own process");
	if (result == CU_ERROR_NOT_SUPPORTED || result == CU_ERROR_NOT_PERMITTED)
		return err_prefix(r, "CUDA IPC is not available here (MIG, WSL, some "
				     "virtual GPUs): wait for a memory word instead");
	return err_prefix(
		r, "the event's process has exited or is in another PID or IPC namespace "
		   "(--pid=host --ipc=host), or the event was not created with "
		   "CU_EVENT_INTERPROCESS");
}

static int opened_new(struct gpu_device *device, const struct gpu_event *event,
		      struct opened **opened_p)
{
	struct opened *o = mem_zalloc(sizeof(*o));
	int result, r;

	if (!o)
		return err_pass(-ENOMEM);
	r = gpu_enter(device);
	if (r < 0) {
		mem_free(o);
		return err_pass(r);
	}
	result = device->gpu->drv.ipc_open_event(&o->event, event->handle);
	if (result != CU_SUCCESS)
		r = event_refused(device, result);
	gpu_leave(device);
	if (r < 0) {
		mem_free(o);
		return err_pass(r);
	}
	o->device = device;
	o->owner = event->owner;
	o->handle = event->handle;
	memcpy(o->name, event->device, sizeof(o->name));
	*opened_p = o;
	return 0;
}

static struct opened *opened_find(struct watcher *watcher, const struct gpu_event *event)
{
	struct opened *o;

	list_foreach(o, &watcher->opens, link)
		if (o->owner == event->owner &&
		    memcmp(&o->handle, &event->handle, sizeof(o->handle)) == 0 &&
		    strcmp(o->name, event->device) == 0)
			return o;
	return NULL;
}

static int event_open(struct watcher *watcher, struct gpu_event *event)
{
	struct opened *o = opened_find(watcher, event);
	struct gpu_device *device = NULL;
	struct err why;
	int r;

	if (o) {
		event->opened = o;
		o->watches++;
		return 0;
	}
	r = gpu_device_find(watcher->events->gpu, event->device, &device);
	if (r == 0)
		r = gpu_device_get(device);
	if (r < 0)
		return err_pass(r);
	r = opened_new(device, event, &o);
	if (r < 0) {
		err_take(&why);
		gpu_device_put(device);
		return err_reraise(&why);
	}
	list_push_back(&watcher->opens, &o->link);
	event->opened = o;
	o->watches = 1;
	return 0;
}

/* An error when destroying an event is from earlier work, or from a broken context: the
 * event is destroyed in both cases. */
static void event_close(struct gpu_event *event)
{
	struct opened *o = mem_steal(event->opened);
	struct gpu_device *device;
	bool entered;

	if (!o || --o->watches > 0)
		return;
	device = o->device;
	entered = gpu_enter(device) == 0;
	if (!entered)
		err_clear(); /* tried anyway; else it is freed with the context */
	(void)device->gpu->drv.event_destroy(o->event);
	if (entered)
		gpu_leave(device);
	list_remove(&o->link);
	mem_free(o);
	gpu_device_put(device);
}

/* ---- polling: the thread ---- */

static void event_settle(struct gpu_event *event, int state)
{
	if (state == STATE_FAILED)
		err_take(&event->why);
	event_close(event);
	atomic_store(&event->state, state);
	loop_wake(&event->events->wake);
}

static int query_raise(struct gpu_device *device, int result)
{
	int r = gpu_raise(device, result, ERR_FAULT, "cuEventQuery");

	return err_prefix(r, "waiting for the event");
}

static void event_query(struct gpu_event *event)
{
	struct gpu_device *device = event->opened->device;
	int result;

	if (gpu_enter(device) < 0) {
		event_settle(event, STATE_FAILED);
		return;
	}
	result = device->gpu->drv.event_query(event->opened->event);
	gpu_leave(device);
	if (result == CU_ERROR_NOT_READY)
		return;
	if (result != CU_SUCCESS)
		(void)query_raise(device, result);
	event_settle(event, result == CU_SUCCESS ? STATE_REACHED : STATE_FAILED);
}

static void event_free(struct gpu_event *event)
{
	event_close(event);
	list_remove(&event->link);
	mem_free(event);
}

static int watcher_hand(struct watcher *watcher, struct gpu_event *event);

/* The finder's part: the target device. */
static int event_find(struct gpu_events *events, struct gpu_event *event)
{
	struct gpu_device *device = NULL;
	int r = gpu_device_find(events->gpu, event->device, &device);

	if (r < 0)
		return err_pass(r);
	pthread_mutex_lock(&events->lock);
	if (!atomic_load(&event->dropped)) { /* else the finder frees it */
		list_remove(&event->link);
		r = watcher_hand(&events->watchers[device->number], event);
		if (r < 0)
			list_push_back(&events->finder.watched, &event->link);
	}
	pthread_mutex_unlock(&events->lock);
	return err_pass(r);
}

/* Is it pending on this thread? */
static bool event_look(struct watcher *watcher, struct gpu_event *event)
{
	struct gpu_events *events = watcher->events;

	if (watcher == &events->finder) {
		if (event_find(events, event) < 0)
			event_settle(event, STATE_FAILED);
		return false; /* dropped, or another's: not to be touched */
	}
	if (!event->opened && event_open(watcher, event) < 0)
		event_settle(event, STATE_FAILED);
	else
		event_query(event);
	return atomic_load(&event->state) == STATE_PENDING;
}

/* How many are pending. */
static unsigned int look_at_all(struct watcher *watcher)
{
	struct gpu_event *event;
	unsigned int pending = 0;

	list_foreach_safe(event, &watcher->watched, link) {
		if (atomic_load(&event->dropped))
			event_free(event);
		else if (atomic_load(&event->state) == STATE_PENDING)
			pending += event_look(watcher, event);
	}
	return pending;
}

static void pause_until(struct watcher *watcher, uint64_t pause_ns)
{
	const struct timespec until = clock_after(pause_ns);

	(void)pthread_cond_clockwait(&watcher->more, &watcher->events->lock,
				     CLOCK_MONOTONIC, &until);
}

static void *watcher_main(void *arg)
{
	struct watcher *watcher = arg;
	struct gpu_events *events = watcher->events;
	uint64_t pause_ns = PAUSE_MIN_NS;

	pthread_mutex_lock(&events->lock);
	for (;;) {
		bool fresh = !list_empty(&watcher->fresh);
		unsigned int pending;
		struct list *n;

		while ((n = list_pop_front(&watcher->fresh)))
			list_push_back(&watcher->watched, n);
		watcher->look = false;
		/* `watched` is this thread's alone: no lock over calls of the driver */
		pthread_mutex_unlock(&events->lock);
		pending = look_at_all(watcher);
		pthread_mutex_lock(&events->lock);
		pause_ns = fresh ? PAUSE_MIN_NS : pause_ns + pause_ns / 16;
		if (pause_ns > PAUSE_MAX_NS)
			pause_ns = PAUSE_MAX_NS;
		/* events added while the lock was free were signalled to no thread */
		if (!list_empty(&watcher->fresh) || watcher->look)
			continue;
		if (pending > 0)
			pause_until(watcher, pause_ns);
		else if (events->stopping)
			break;
		else
			pthread_cond_wait(&watcher->more, &events->lock);
	}
	pthread_mutex_unlock(&events->lock);
	return NULL;
}

/* Its thread is started with its first event. The lock is held. */
static int watcher_hand(struct watcher *watcher, struct gpu_event *event)
{
	int r = 0;

	if (!watcher->running)
		r = thread_start("kvd-gpu-event", watcher_main, watcher,
				 &watcher->thread);
	if (r < 0)
		return err_pass(r);
	watcher->running = true;
	event->watcher = watcher;
	list_push_back(&watcher->fresh, &event->link);
	pthread_cond_signal(&watcher->more);
	return 0;
}

static void watcher_init(struct watcher *watcher, struct gpu_events *events)
{
	watcher->events = events;
	list_init(&watcher->fresh);
	list_init(&watcher->watched);
	list_init(&watcher->opens);
	pthread_cond_init(&watcher->more, NULL);
}

/* After `stopping` was set, and with no event left but dropped ones. */
static void watcher_fini(struct watcher *watcher)
{
	if (watcher->running)
		pthread_join(watcher->thread, NULL);
	assert(list_empty(&watcher->fresh) && list_empty(&watcher->watched) &&
	       list_empty(&watcher->opens));
	pthread_cond_destroy(&watcher->more);
}

/* ---- the loop ---- */

static void event_on_wake(struct loop_wake *wake)
{
	struct gpu_events *events = container_of(wake, struct gpu_events, wake);

	events->on_change(events->arg);
}

int gpu_events_new(struct gpu *gpu, struct loop *loop, void (*on_change)(void *arg),
		   void *arg, struct gpu_events **events_p)
{
	struct gpu_events *events = mem_zalloc(sizeof(*events));
	int r;

	if (!events)
		return err_pass(-ENOMEM);
	*events = (struct gpu_events){.gpu = gpu, .on_change = on_change, .arg = arg};
	list_init(&events->live);
	r = loop_wake_init(&events->wake, loop, event_on_wake);
	if (r < 0) {
		mem_free(events);
		return err_pass(r);
	}
	pthread_mutex_init(&events->lock, NULL);
	watcher_init(&events->finder, events);
	for (unsigned int i = 0; i < GPU_DEVICES_MAX; i++)
		watcher_init(&events->watchers[i], events);
	*events_p = events;
	return 0;
}

void gpu_events_free(struct gpu_events *events)
{
	if (!events)
		return;
	assert(events->count == 0);
	pthread_mutex_lock(&events->lock);
	events->stopping = true;
	pthread_cond_signal(&events->finder.more);
	for (unsigned int i = 0; i < GPU_DEVICES_MAX; i++)
		pthread_cond_signal(&events->watchers[i].more);
	pthread_mutex_unlock(&events->lock);
	watcher_fini(&events->finder);
	for (unsigned int i = 0; i < GPU_DEVICES_MAX; i++)
		watcher_fini(&events->watchers[i]);
	loop_wake_fini(&events->wake);
	pthread_mutex_destroy(&events->lock);
	mem_free(events);
}

static struct owner *event_owner_find(struct gpu_events *events, uint64_t id)
{
	struct owner *owner;

	list_foreach(owner, &events->live, link)
		if (owner->id == id)
			return owner;
	return NULL;
}

static int owner_charge(struct gpu_events *events, uint64_t id)
{
	struct owner *owner = event_owner_find(events, id);

	if (events->count >= GPU_EVENTS_MAX)
		return err_raise(ERR_LIMIT, "too many events pending (limit %u)",
				 GPU_EVENTS_MAX);
	if (owner && owner->count >= GPU_EVENTS_OWNER_MAX)
		return err_raise(ERR_LIMIT,
				 "too many events pending in this session (limit %u)",
				 GPU_EVENTS_OWNER_MAX);
	if (!owner) {
		owner = mem_zalloc(sizeof(*owner));
		if (!owner)
			return err_pass(-ENOMEM);
		owner->id = id;
		list_init(&owner->link);
		list_push_back(&events->live, &owner->link);
	}
	owner->count++;
	events->count++;
	return 0;
}

static void owner_discharge(struct gpu_events *events, uint64_t id)
{
	struct owner *owner = event_owner_find(events, id);

	events->count--;
	if (--owner->count > 0)
		return;
	list_remove(&owner->link);
	mem_free(owner);
}

/* The watcher of a device's events; the finder reports a wrong name. */
static struct watcher *watcher_of(struct gpu_events *events, const char *name)
{
	struct gpu_device *device = NULL;

	if (!gpu_started(events->gpu))
		return &events->finder;
	if (gpu_device_find(events->gpu, name, &device) == 0)
		return &events->watchers[device->number];
	err_clear();
	return &events->finder;
}

int gpu_event_watch(struct gpu_events *events, uint64_t owner, const char *device,
		    const struct cu_ipc_event *handle, struct gpu_event **event_p)
{
	struct gpu_event *event;
	int r;

	if (strlen(device) >= sizeof(event->device))
		return err_raise(ERR_INVAL, "device: over %zu bytes",
				 sizeof(event->device) - 1);
	event = mem_zalloc(sizeof(*event));
	if (!event)
		return err_pass(-ENOMEM);
	r = owner_charge(events, owner);
	if (r < 0) {
		mem_free(event);
		return err_pass(r);
	}
	list_init(&event->link);
	event->events = events;
	event->owner = owner;
	event->handle = *handle;
	memcpy(event->device, device, strlen(device) + 1);
	pthread_mutex_lock(&events->lock);
	r = watcher_hand(watcher_of(events, device), event);
	pthread_mutex_unlock(&events->lock);
	if (r < 0) {
		owner_discharge(events, owner);
		mem_free(event);
		return err_pass(r);
	}
	*event_p = event;
	return 0;
}

int gpu_event_state(const struct gpu_event *event)
{
	int state = atomic_load(&event->state);

	if (state == STATE_FAILED)
		return err_reraise(&event->why);
	return state == STATE_REACHED;
}

void gpu_event_drop(struct gpu_event *event)
{
	struct gpu_events *events;

	if (!event)
		return;
	events = event->events;
	owner_discharge(events, event->owner);
	pthread_mutex_lock(&events->lock);
	event->watcher->look = true;
	pthread_cond_signal(&event->watcher->more);
	atomic_store(&event->dropped, true); /* its thread may free it from now on */
	pthread_mutex_unlock(&events->lock);
}
