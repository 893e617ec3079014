/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu: the GPUs of this machine, as this daemon uses them.
 *
 * Nothing touches the driver before the first engine registers GPU memory: a daemon
 * without one pays nothing. Devices have names, never numbers: a number means another
 * device in each process (CUDA_VISIBLE_DEVICES). The name is the UUID or the PCI id.
 *
 * A device's primary context is retained with its first user and released with its last
 * one: it costs hundreds of MiB of the device's memory. After a fault that the driver
 * does not recover from the device is broken: all memory on it counts as lost, and when
 * the last user has left, the context is reset and the device can be used again.
 *
 * All functions but those marked may block: helper and copy threads only.
 */
#ifndef KVD_GPU_GPU_H
#define KVD_GPU_GPU_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "gpu/cudrv.h"
#include "gpu/keep.h"
#include "gpu/module.h"

#define GPU_DEVICES_MAX 32u
#define GPU_LIBRARY "libcuda.so.1"
#define GPU_ALLOWED_MAX 4096u
#define GPU_STREAMS_MAX 8u
/* From this size on a copy engine's overhead is a small part of its time for a row within
 * the device. */
#define GPU_KERNEL_ROW_BYTES (UINT64_C(32) << 20)
/* The same of rows with an end in host memory, by the bytes of a call. It is the less for
 * another reason: while a kernel waits for the bus, the kernels of an engine, of another
 * context, wait for it; copy engines take nothing of theirs. */
#define GPU_KERNEL_HOST_BYTES (UINT64_C(64) << 10)
#define GPU_STREAMS 4u

#define GPU_ATTEND_KERNELS 4u

/* attend_run.c's */
struct gpu_attend {
	atomic_int state; /* enum gpu_module_state; NONE: no image, or not wanted */
	struct cu_function *kernels[GPU_ATTEND_KERNELS];
	int processors;
	char why[160]; /* OFF: set before `state` is */
};

struct gpu;

struct gpu_device {
	struct gpu *gpu;
	/* constant once the driver is loaded */
	unsigned int number; /* in gpu->devices, not the engine's */
	int handle;	     /* the driver's CUdevice */
	struct cu_uuid uuid;
	char id[CUDRV_UUID_TEXT];
	char pci[32]; /* domains of virtual machines are longer than four digits */
	char name[64];
	uint64_t bytes;
	int compute; /* 90 is 9.0 */
	size_t max_pitch;
	bool host_pointers; /* registered host memory has one address for CPU and GPU */
	bool allowed;	    /* by the option `gpus` */
	/* under lock */
	pthread_mutex_t lock;
	unsigned int users;
	bool held;	   /* the context was not released with its last user */
	struct list lanes; /* idle ones */
	uint32_t peers;	   /* bit n: there is peer access to device n, … */
	unsigned int
		peer_turns[GPU_DEVICES_MAX]; /* … in this context of it; 0: untried */
	/* import.c's: held while the driver opens and closes; before `lock` */
	pthread_mutex_t imports_lock;
	struct list imports;
	/* while there are users */
	struct cu_ctx *ctx;
	atomic_uint turn; /* which context this is, from 1 */
	int priority;	  /* of streams: the lowest there is */
	atomic_bool broken;
	struct err why; /* set before `broken` is */
	struct gpu_module module;
	struct gpu_attend attend;
	struct gpu_keep keep;
};

struct gpu {
	char library[256];
	char allowed[GPU_ALLOWED_MAX];
	char kernels[256];	   /* "auto", "off", or a file */
	uint64_t kernel_row_bytes; /* the kernel copies shorter rows; 0: none */
	unsigned int streams;	   /* active on one device at once */
	/* attend_run.c's: loads its kernels behind the others; NULL: not wanted.
	 * `entered`: the context is current; else there are none, for this thread's
	 * error. */
	void (*attends)(struct gpu_device *device, bool entered);
	pthread_mutex_t pins_lock;
	struct list pins;     /* pin.c's */
	pthread_mutex_t lock; /* of the following fields */
	bool started;
	atomic_bool ready; /* devices may be read without the lock */
	struct cudrv drv;
	unsigned int device_count;
	struct gpu_device devices[GPU_DEVICES_MAX];
};

/* Touches no driver. `library`: GPU_LIBRARY or a path. `allowed`: "auto" (all),
 * "off", or names of devices, separated by spaces. Any thread. */
int gpu_new(const char *library, const char *allowed, struct gpu **gpu_p);
/* Before the first device is used: which kernels ("auto": this program's own, "off",
 * or the path of an image), the rows they move, and how many streams a device gets,
 * 1 to GPU_STREAMS_MAX. Without it: auto and the defaults above. */
int gpu_tune(struct gpu *gpu, const char *kernels, uint64_t kernel_row_bytes,
	     unsigned int streams);
/* No device has a user any more, no pin is left. */
void gpu_free(struct gpu *gpu);

/* Load the driver and list its devices, once. ERR_REQUIRE when there is none; the next
 * call tries again. */
int gpu_start(struct gpu *gpu);
/* Already loaded: gpu_device_find() does not block. Any thread. */
bool gpu_started(const struct gpu *gpu);
/* By UUID or PCI id; starts. ERR_IMPORT lists the available devices. */
int gpu_device_find(struct gpu *gpu, const char *name, struct gpu_device **device_p);

/* Use the device: its context lives until as many _put()s. ERR_IO: broken. */
int gpu_device_get(struct gpu_device *device);
void gpu_device_put(struct gpu_device *device);

/* Has it a user? */
bool gpu_device_used(struct gpu_device *device);

/* The context is current in this thread between these; a user is needed. */
int gpu_enter(struct gpu_device *device);
void gpu_leave(struct gpu_device *device);

/* Raise a driver's result of a call on this device; marks it broken if it is. */
int gpu_raise(struct gpu_device *device, int result, enum err_code code, const char *fmt,
	      ...) __attribute__((format(printf, 4, 5)));
/* The device is broken, with this thread's error; nothing new starts on it. */
void gpu_device_break(struct gpu_device *device);
/* Any thread. */
bool gpu_device_broken(const struct gpu_device *device);
/* May copies in this device's context reach memory that the other's context has opened or
 * allocated (not mapped memory: gpu_import_reach()) directly? Queried, and enabled, when
 * first needed; else the driver takes them through host memory. Both have a user. */
bool gpu_device_pair(struct gpu_device *device, const struct gpu_device *other);

#endif
