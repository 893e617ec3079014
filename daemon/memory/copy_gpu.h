/* SPDX-License-Identifier: Apache-2.0 */
/*
 * copy_gpu: the part of the copy threads that knows GPUs. copy.c passes jobs here that
 * have device memory on either end; it is the only caller.
 */
#ifndef KVD_TRANSPORT_COPY_GPU_H
#define KVD_TRANSPORT_COPY_GPU_H

#include <stdint.h>

struct copy_gpu;
struct copy_job;
struct gpu_device;
struct loop;

/* The device whose thread does the job: of the destination, else of the source;
 * NULL when the job has no device memory. */
struct gpu_device *copy_gpu_device(const struct copy_job *job);

int copy_gpu_new(struct loop *loop, uint64_t slice_bytes, struct copy_gpu **gpu_p);
/* Remaining jobs are canceled and their on_done is called. NULL is allowed. */
void copy_gpu_free(struct copy_gpu *gpu);

/* As copier_submit() and copier_cancel(); the job is checked and not empty. */
int copy_gpu_submit(struct copy_gpu *gpu, struct copy_job *job);
void copy_gpu_cancel(struct copy_gpu *gpu, struct copy_job *job);

#endif
