/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Read-only memory is registered where the driver can do that
 * (CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED).
 *
 * A registration belongs to a context. So a pin has one owner at most, the first device;
 * contexts are released (with the last engine), and their pins become offers again.
 *
 * The list's lock is held for a look-up only: registering pins pages, which takes
 * milliseconds, and the loop makes and frees pins. A pin is not freed
 * while a copy uses its memory, so its finder may use it without the list.
 *
 * Memory for which a copy would have to wait is registered by a thread, a user of the
 * device; copies take the extra step until that is done.
 */
#include "gpu/pin.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>

#include "daemon/base/cpu.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/thread.h"
#include "gpu/gpu.h"

#define INLINE_BYTES (UINT64_C(64) << 20) /* more is a thread's work */

struct gpu_pin {
	struct list link; /* gpu->pins */
	struct gpu *gpu;
	uint8_t *base;
	uint64_t bytes;
	bool read_only;
	pthread_mutex_t lock;
	struct gpu_device *owner;   /* registered in its context */
	struct gpu_device *refused; /* its context did not take it */
	bool busy;		    /* a thread is at it, for `device` */
	struct gpu_device *device;
	bool started; /* the thread is to be joined */
	pthread_t thread;
};

int gpu_pin_new(struct gpu *gpu, void *base, uint64_t bytes, bool read_only,
		struct gpu_pin **pin_p)
{
	struct gpu_pin *pin;

	assert(!gpu || (base && bytes > 0));
	*pin_p = NULL;
	if (!gpu)
		return 0;
	pin = mem_zalloc(sizeof(*pin));
	if (!pin)
		return err_pass(-ENOMEM);
	pin->gpu = gpu;
	pin->base = base;
	pin->bytes = bytes;
	pin->read_only = read_only;
	pthread_mutex_init(&pin->lock, NULL);
	pthread_mutex_lock(&gpu->pins_lock);
	list_push_front(&gpu->pins, &pin->link);
	pthread_mutex_unlock(&gpu->pins_lock);
	*pin_p = pin;
	return 0;
}

/* The pin's lock is held, and the owner's context exists. */
static void unregister(struct gpu_pin *pin)
{
	struct gpu_device *device = pin->owner;

	pin->owner = NULL;
	if (gpu_enter(device) == 0) {
		(void)device->gpu->drv.host_unregister(pin->base);
		gpu_leave(device);
	} else {
		err_clear();
	}
}

void gpu_pin_free(struct gpu_pin *pin)
{
	if (!pin)
		return;
	if (pin->started)
		pthread_join(pin->thread, NULL);
	pthread_mutex_lock(&pin->lock);
	if (pin->owner) /* its context stays: gpu_pins_drop() waits for this lock */
		unregister(pin);
	pthread_mutex_unlock(&pin->lock);
	pthread_mutex_lock(&pin->gpu->pins_lock);
	list_remove(&pin->link);
	pthread_mutex_unlock(&pin->gpu->pins_lock);
	pthread_mutex_destroy(&pin->lock);
	mem_free(pin);
}

static struct gpu_pin *pin_find(struct gpu *gpu, const uint8_t *at, uint64_t bytes)
{
	struct gpu_pin *pin, *found = NULL;

	pthread_mutex_lock(&gpu->pins_lock);
	list_foreach(pin, &gpu->pins, link) {
		if (at < pin->base || at + bytes > pin->base + pin->bytes)
			continue;
		found = pin;
		break;
	}
	pthread_mutex_unlock(&gpu->pins_lock);
	return found;
}

/* The context is current. pin_registered() takes the result. */
static int pin_register(const struct gpu_pin *pin, struct gpu_device *device)
{
	unsigned int flags = CU_MEMHOSTREGISTER_DEVICEMAP; /* kernels reach it, too */
	int result;

	if (pin->read_only)
		flags |= CU_MEMHOSTREGISTER_READ_ONLY;
	result = device->gpu->drv.host_register(pin->base, pin->bytes, flags);
	if (result == CU_SUCCESS)
		return 0;
	return gpu_raise(device, result, ERR_NOMEM, "cuMemHostRegister");
}

/* The pin's lock is held; `r` < 0: raised. */
static void pin_registered(struct gpu_pin *pin, struct gpu_device *device, int r)
{
	if (r == 0) {
		pin->owner = device;
		return;
	}
	pin->refused = device;
	log_info("gpu", device->id, "memory is not pinned: copies take an extra step",
		 "bytes=%llu why=\"%s\"", (unsigned long long)pin->bytes,
		 err_last()->text);
	err_clear();
}

static void *pin_main(void *arg)
{
	struct gpu_pin *pin = arg;
	struct gpu_device *device = pin->device;
	int r = gpu_enter(device);

	cpu_bulk();
	if (r == 0) {
		r = pin_register(pin, device);
		gpu_leave(device);
	}
	pthread_mutex_lock(&pin->lock);
	pin_registered(pin, device, r);
	pin->busy = false;
	pthread_mutex_unlock(&pin->lock);
	gpu_device_put(device); /* the last touch: it may release the context */
	return NULL;
}

/* No lock is held, because a context being released takes the pin's under the device's;
 * `busy` excludes others. */
static void pin_start(struct gpu_pin *pin, struct gpu_device *device)
{
	int r = gpu_device_get(device);
	struct err why;

	if (pin->started) /* of a context before: it has put the device, or is about to */
		pthread_join(pin->thread, NULL);
	pin->device = device;
	pin->started = false;
	if (r == 0) {
		r = thread_start("kvd-pin", pin_main, pin, &pin->thread);
		pin->started = r == 0;
		if (r < 0) {
			err_take(&why);
			gpu_device_put(device);
			r = err_reraise(&why);
		}
	}
	if (r == 0)
		return;
	pthread_mutex_lock(&pin->lock);
	pin_registered(pin, device, r);
	pin->busy = false;
	pthread_mutex_unlock(&pin->lock);
}

bool gpu_pin_here(struct gpu_pin *pin, struct gpu_device *device)
{
	bool ready, start = false;

	if (!device->host_pointers)
		return false;
	/* A context being released waits for this lock in gpu_pins_drop(). */
	pthread_mutex_lock(&pin->lock);
	if (!pin->owner && pin->refused != device && !pin->busy) {
		if (pin->bytes <= INLINE_BYTES)
			pin_registered(pin, device, pin_register(pin, device));
		else
			start = pin->busy = true;
	}
	ready = pin->owner == device;
	pthread_mutex_unlock(&pin->lock);
	if (start)
		pin_start(pin, device);
	return ready;
}

bool gpu_pin_ready(struct gpu_device *device, const void *at, uint64_t bytes)
{
	/* The list's lock is free again: the caller's use of the memory keeps the pin. */
	struct gpu_pin *pin = pin_find(device->gpu, at, bytes);

	return pin && gpu_pin_here(pin, device);
}

void gpu_pins_drop(struct gpu_device *device)
{
	struct gpu_pin *pin;

	pthread_mutex_lock(&device->gpu->pins_lock);
	list_foreach(pin, &device->gpu->pins, link) {
		pthread_mutex_lock(&pin->lock);
		if (pin->owner == device)
			unregister(pin);
		if (pin->refused == device)
			pin->refused = NULL;
		pthread_mutex_unlock(&pin->lock);
	}
	pthread_mutex_unlock(&device->gpu->pins_lock);
}
