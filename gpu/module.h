/* SPDX-License-Identifier: Apache-2.0 */
/*
 * module: the kernels on one device: loaded when first needed, by a separate thread, and
 * unloaded with the context.
 *
 * No copy waits for them: until they are loaded, and if they never are, copy engines do
 * the copies. The reason for missing kernels (no nvcc at build time, a device or driver
 * that cannot use the image, a fault) is logged once per context and returned by
 * gpu_module_text().
 */
#ifndef KVD_GPU_MODULE_H
#define KVD_GPU_MODULE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cu_function;
struct cu_module;
struct cu_stream;
struct gpu;
struct gpu_device;

enum gpu_module_state {
	GPU_MODULE_NONE,
	GPU_MODULE_LOADING,
	GPU_MODULE_READY,
	GPU_MODULE_OFF
};

/* in struct gpu_device */
struct gpu_module {
	atomic_int state;
	pthread_t thread;
	bool started; /* a thread not joined yet */
	struct cu_module *handle;
	struct cu_function *rows;
	char why[160]; /* OFF: under the device's lock */
};

/* Start to load, unless that was done in this context. Does not block; the device has a
 * user. */
void gpu_module_want(struct gpu_device *device);
bool gpu_module_ready(const struct gpu_device *device);
/* No more launches in this context: "<why>", or with this thread's error. */
void gpu_module_off(struct gpu_device *device);

/* ERR_REQUIRE: there is no image: off, or `built` is NULL. */
int gpu_module_check(const struct gpu *gpu, const void *built);
/* Load an image: the program's own (NULL: built without nvcc), or that of the file that
 * an administrator names. The context is current. ERR_REQUIRE. */
int gpu_module_load(struct gpu_device *device, const void *built,
		    struct cu_module **module_p);
/* Launch kvd_rows on a list that the device can read until the stream is past it.
 * `host`: some of its rows have an end in host memory. The driver's result. The context
 * is current; the kernels are ready. */
int gpu_module_rows(struct gpu_device *device, uint64_t entries, uint64_t places,
		    uint32_t count, bool host, struct cu_stream *stream);
/* "yes", or "no: …". The driver is started. Any thread. */
void gpu_module_text(struct gpu *gpu, char *text, size_t size);

/* For gpu.c: the context is being released (the device's lock is held, nothing is in
 * flight); and the last thread's end. */
void gpu_module_drop(struct gpu_device *device);
void gpu_module_fini(struct gpu_device *device);

#endif
