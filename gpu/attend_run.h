/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend_run: an attention job (daemon/math/attend.h) on the device that has its KV.
 */
#ifndef KVD_GPU_ATTEND_RUN_H
#define KVD_GPU_ATTEND_RUN_H

#include <stddef.h>

struct attend_job;
struct gpu_device;

size_t gpu_attend_scratch(const struct attend_job *job);
/* As attend_run(), but that kv's bases are addresses of the device, `stop` is not called,
 * and the scratch (64-byte aligned) has gpu_attend_scratch() bytes. The pages and all
 * else are host memory. Blocks; the device has a user meanwhile. ERR_REQUIRE: the device
 * has no kernels for such a job, or none at all. */
int gpu_attend_run(struct gpu_device *device, const struct attend_job *job,
		   void *scratch);

#endif
