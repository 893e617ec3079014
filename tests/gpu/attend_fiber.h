/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend_fiber: gpu/attend.cu itself on a CPU, each thread of a block a fiber: what tests
 * run, and the fake driver in the place of a device.
 *
 * Warps go on in an order that is another one each time, each as far as it can by itself;
 * shared memory begins as NaNs. A thread that leaves before a barrier, shuffle or product
 * that others wait at, an address that `reach` does not have, and one that is not aligned
 * end the launch. What that cannot show: speed, the order of sums within a product, and
 * what only threads at the same instant do to each other.
 */
#ifndef KVD_TESTS_GPU_ATTEND_FIBER_H
#define KVD_TESTS_GPU_ATTEND_FIBER_H

#include "gpu/attend_kern.h"
#include "tests/gpu/kernels_ref.h"

/* Is there such a kernel, and how many bytes has its argument? 0: none. */
uint32_t attend_fiber_arg(const char *kernel);
/* A launch of x by y blocks. NULL: done; else what was wrong. `reach` NULL: addresses are
 * this process's. One launch at a time, in whichever thread. */
const char *attend_fiber_run(const char *kernel, uint32_t x, uint32_t y, const void *arg,
			     const struct kernels_reach *reach);

#endif
