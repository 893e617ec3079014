/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend_run: an attention job (daemon/math/attend.h) on the device that has its KV.
 */
#ifndef KVD_GPU_ATTEND_RUN_H
#define KVD_GPU_ATTEND_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct attend_job;
struct gpu;
struct gpu_device;

/* Before a device is used: kernels of attention are loaded when memory is imported. */
void gpu_attends(struct gpu *gpu);
/* The device has a user, from here until the end of gpu_attend_run(). Waits for the load,
 * for a second at most; stop(arg) ends that. ERR_REQUIRE: there are no kernels; ERR_BUSY:
 * not yet; ERR_CANCELED: stopped. */
int gpu_attend_ready(struct gpu_device *device, bool (*stop)(void *arg), void *arg);
size_t gpu_attend_scratch(const struct attend_job *job);
/* As attend_run(), but that kv's bases are addresses of the device, `stop` is not called,
 * and the scratch (64-byte aligned) has gpu_attend_scratch() bytes. The pages and all
 * else are host memory. Blocks; gpu_attend_ready() was 0. ERR_REQUIRE: there is no kernel
 * for such a job. */
int gpu_attend_run(struct gpu_device *device, const struct attend_job *job,
		   void *scratch);

/* A device in use whose kernels are loaded, or are being loaded; NULL: none. Any thread;
 * it may be released meanwhile. */
struct gpu_device *gpu_attend_device(struct gpu *gpu);
/* Memory of the device. It has a user. */
int gpu_attend_memory(struct gpu_device *device, size_t bytes, uint64_t *address_p);
void gpu_attend_memory_free(struct gpu_device *device, uint64_t address);

#endif
