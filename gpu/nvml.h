/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvml: a GPU's utilisation and memory use, from NVIDIA's management library. It is
 * loaded on first use, from the directory of the driver's library; the build needs no
 * header of it. Helper threads only, one at a time.
 */
#ifndef KVD_GPU_NVML_H
#define KVD_GPU_NVML_H

#include <stdint.h>

#include "gpu/cudrv.h"

#define NVML_LIBRARY "libnvidia-ml.so.1"

struct nvml_use {
	double busy; /* 0 to 1: the part of the last second in which kernels ran; below 0:
			the device does not report it (a part of a GPU, MIG) */
	uint64_t used, total; /* bytes of its memory */
};

struct nvml {
	void *library; /* NULL: not loaded */
	const char *(*error_string)(int result);
	int (*shutdown)(void);
	int (*by_uuid)(const char *uuid, void **device_p);
	int (*rates)(void *device, unsigned int rates_p[2]);
	int (*memory)(void *device, unsigned long long bytes_p[3]);
};

/* `driver`: the driver's library; where it is a path, nvml is searched in its directory.
 * ERR_REQUIRE: there is none. */
int nvml_load(const char *driver, struct nvml *nvml);
void nvml_unload(struct nvml *nvml); /* a zeroed one is allowed */
/* Of the device of this UUID ("GPU-…"). ERR_IO. */
int nvml_read(const struct nvml *nvml, const char *uuid, struct nvml_use *use_p);

#endif
