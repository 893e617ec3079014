/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What engines call of the driver and the daemon does not: gpu-works, timelines,
 * the tests' driver. cuda_abi.cc holds it against cuda.h.
 */
#ifndef TESTS_GPU_ENGINE_CALLS_H
#define TESTS_GPU_ENGINE_CALLS_H

#include "gpu/cudrv.h"

/* X(function, symbol, (parameters)), as CUDRV_REQUIRED */
#define ENGINE_CALLS(X)                                                              \
	X(ipc_handle, cuIpcGetMemHandle,                                             \
	  (struct cu_ipc_mem * handle_p, uint64_t address))                          \
	X(to_host, cuMemcpyDtoH_v2, (void *dst, uint64_t src, size_t bytes))         \
	X(to_device, cuMemcpyHtoD_v2, (uint64_t dst, const void *src, size_t bytes)) \
	X(host_func, cuLaunchHostFunc,                                               \
	  (struct cu_stream * stream, void (*function)(void *arg), void *arg))       \
	X(fill, cuMemsetD8Async,                                                     \
	  (uint64_t address, unsigned char byte, size_t bytes,                       \
	   struct cu_stream *stream))                                                \
	X(mem_create, cuMemCreate,                                                   \
	  (uint64_t * handle_p, size_t bytes, const struct cu_mem_prop *prop,        \
	   unsigned long long flags))                                                \
	X(mem_export, cuMemExportToShareableHandle,                                  \
	  (void *fd_p, uint64_t handle, int type, unsigned long long flags))         \
	X(host_address, cuMemHostGetDevicePointer_v2,                                \
	  (uint64_t * address_p, void *host, unsigned int flags))                    \
	X(stream_write, cuStreamWriteValue64_v2,                                     \
	  (struct cu_stream * stream, uint64_t address, uint64_t value,              \
	   unsigned int flags))                                                      \
	X(stream_wait, cuStreamWaitValue64_v2,                                       \
	  (struct cu_stream * stream, uint64_t address, uint64_t value,              \
	   unsigned int flags))

#endif
