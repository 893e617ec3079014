/* SPDX-License-Identifier: Apache-2.0 */
/* module_wait: until it is known whether a device has kernels. It has a user. */
#ifndef KVD_TESTS_MODULE_WAIT_H
#define KVD_TESTS_MODULE_WAIT_H

#include <time.h>

#include "gpu/module.h"

static inline bool gpu_module_wait(struct gpu_device *device)
{
	const struct timespec pause = {.tv_nsec = 1000000};

	gpu_module_want(device);
	while (atomic_load(&device->module.state) == GPU_MODULE_LOADING)
		(void)nanosleep(&pause, NULL);
	gpu_module_fini(device); /* a test may end without gpu_free() */
	return gpu_module_ready(device);
}

#endif
