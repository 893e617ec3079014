/* SPDX-License-Identifier: Apache-2.0 */
/* kernel: rows of a batch as daemon/math computes them. */
#ifndef KVD_ATTEND_KERNEL_H
#define KVD_ATTEND_KERNEL_H

#include <stdint.h>

struct attend_job;
struct gpu_device;
struct kernel;
struct list;
struct store_kv_read;

/* `isa`: "auto", or the required one. ERR_INVAL; ERR_REQUIRE: not on this machine. */
int kernel_new(const char *isa, struct kernel **kernel_p);
void kernel_free(struct kernel *kernel);
const char *kernel_isa(const struct kernel *kernel);

/* Before kernel_run(): a device's kernels are loaded. Any thread; blocks for a second, at
 * most. ERR_BUSY, ERR_REQUIRE, ERR_CANCELED. */
int kernel_ready(const struct store_kv_read *read, const struct list *items);
/* One call, of at most so many rows; `device`: that has the KV, NULL: the host.
 * ERR_RANGE: the job has a fault. Any thread. */
int kernel_job(struct kernel *kernel, struct gpu_device *device,
	       const struct attend_job *job, uint32_t rows);
/* Items (struct compute_item.link) of one layer of the same chunks. Any thread. Items
 * canceled meanwhile may be skipped, and all of them if the chunks are withdrawn. */
int kernel_run(struct kernel *kernel, const struct store_kv_read *read,
	       const struct list *items, uint32_t count);

#endif
