/* SPDX-License-Identifier: Apache-2.0 */
/*
 * import: an allocation of an engine on a GPU, opened once in this process.
 *
 * An engine's tensors are pieces of a few large allocations, and a handle names the
 * allocation. So regions share one import of it, by reference; the import closes with the
 * last of them. Shared only among one owner's regions: numbers in handles are reused by
 * later processes.
 *
 * Opening and the last unref block (helper threads). Both are done when they
 * return: the engine may free its memory after that.
 */
#ifndef KVD_GPU_IMPORT_H
#define KVD_GPU_IMPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "gpu/cudrv.h"

struct gpu;
struct gpu_device;

enum gpu_handle_kind {
	GPU_HANDLE_IPC, /* of cuIpcGetMemHandle: memory of cuMemAlloc */
	GPU_HANDLE_VMM, /* of cuMemExportToShareableHandle: memory of cuMemCreate */
};

struct gpu_handle {
	enum gpu_handle_kind kind;
	char device[64];       /* UUID or PCI id */
	struct cu_ipc_mem ipc; /* IPC */
	int fd;		       /* VMM; borrowed, duplicated where it is kept */
	uint64_t bytes;	       /* VMM: of the whole allocation */
};

struct gpu_import {
	struct list link; /* device->imports */
	struct gpu_device *device;
	uint64_t owner;
	struct gpu_handle handle; /* a copy; also of the fd */
	bool writable;
	uint64_t address, bytes; /* of the allocation in this process */
	uint64_t vmm;		 /* the driver's handle */
	int access;		 /* VMM: the device's address */
	unsigned int refs;	 /* under device->imports_lock */
	/* under device->lock */
	uint32_t asked, open; /* VMM: bit n: device n was tried, has access too */
};

/* ERR_IMPORT has the reason and the remedy. The hardware enforces `writable` for VMM
 * memory, the callers for IPC memory. */
int gpu_import(struct gpu *gpu, uint64_t owner, const struct gpu_handle *handle,
	       bool writable, struct gpu_import **import_p);
/* A dma-buf of the whole allocation, for adapters; the caller closes it. ERR_IMPORT: this
 * driver cannot export one, or not of such memory. */
int gpu_import_dmabuf(struct gpu_import *import, int *fd_p);
/* May kernels and copies of `device` load and store there directly? Enabled when first
 * needed. `device` has a user. */
bool gpu_import_reach(struct gpu_import *import, struct gpu_device *device);
void gpu_import_unref(struct gpu_import *import); /* NULL is allowed */

#endif
