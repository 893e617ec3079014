/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cudrv: the CUDA driver API, loaded when it is first needed.
 *
 * No CUDA header or library takes part in the build: the few types and numbers are
 * declared here (from cuda.h 13.0, whose ABI the versioned symbol names fix), and
 * libcuda.so.1 is opened with dlopen. Symbols are in tiers. Without a required one there
 * is no driver; an optional group that is not complete switches its feature off and
 * nothing else.
 *
 * Every function may block and none is for the loop's thread, except where noted. Results
 * are the driver's own numbers; cudrv_raise() maps them to kvd's codes, with the driver's
 * name for them in the text.
 */
#ifndef KVD_GPU_CUDRV_H
#define KVD_GPU_CUDRV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"

struct cu_ctx;
struct cu_stream;
struct cu_event;
struct cu_module;
struct cu_function;

#define CU_IPC_BYTES 64u
#define CU_UUID_BYTES UUID_BYTES

struct cu_uuid {
	uint8_t bytes[CU_UUID_BYTES];
};
/* Passed by value, as cuda.h does. */
struct cu_ipc_mem {
	uint8_t reserved[CU_IPC_BYTES];
};

/* CUresult: those that kvd distinguishes. */
enum {
	CU_SUCCESS = 0,
	CU_ERROR_INVALID_VALUE = 1,
	CU_ERROR_OUT_OF_MEMORY = 2,
	CU_ERROR_NOT_INITIALIZED = 3,
	CU_ERROR_DEINITIALIZED = 4,
	CU_ERROR_DEVICE_UNAVAILABLE = 46,
	CU_ERROR_NO_DEVICE = 100,
	CU_ERROR_INVALID_DEVICE = 101,
	CU_ERROR_INVALID_IMAGE = 200,
	CU_ERROR_INVALID_CONTEXT = 201,
	CU_ERROR_MAP_FAILED = 205,
	CU_ERROR_ALREADY_MAPPED = 208,
	CU_ERROR_NO_BINARY_FOR_GPU = 209,
	CU_ERROR_ECC_UNCORRECTABLE = 214,
	CU_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
	CU_ERROR_NVLINK_UNCORRECTABLE = 220,
	CU_ERROR_CONTAINED = 226,
	CU_ERROR_OPERATING_SYSTEM = 304,
	CU_ERROR_INVALID_HANDLE = 400,
	CU_ERROR_NOT_FOUND = 500,
	CU_ERROR_NOT_READY = 600,
	CU_ERROR_ILLEGAL_ADDRESS = 700,
	CU_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
	CU_ERROR_CONTEXT_IS_DESTROYED = 709,
	CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
	CU_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
	CU_ERROR_HARDWARE_STACK_ERROR = 714,
	CU_ERROR_INVALID_PC = 718,
	CU_ERROR_LAUNCH_FAILED = 719,
	CU_ERROR_NOT_PERMITTED = 800,
	CU_ERROR_NOT_SUPPORTED = 801,
	CU_ERROR_MPS_CLIENT_TERMINATED = 810,
	CU_ERROR_UNKNOWN = 999,
};

enum {
	CU_LIMIT_STACK_SIZE = 0,
	CU_STREAM_NON_BLOCKING = 1,
	CU_EVENT_BLOCKING_SYNC = 1,
	CU_EVENT_DISABLE_TIMING = 2,
	CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
	CU_MEMHOSTALLOC_PORTABLE = 1,
	CU_MEMHOSTREGISTER_PORTABLE = 1,
	CU_MEMHOSTREGISTER_DEVICEMAP = 2,
	CU_MEMHOSTREGISTER_READ_ONLY = 8,
	CU_MEMORYTYPE_UNIFIED = 4,
	CU_DEVICE_ATTRIBUTE_MAX_PITCH = 11,
	CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
	CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
	CU_DEVICE_ATTRIBUTE_HOST_POINTER_FOR_REGISTERED = 91,
	CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124,
	CU_POINTER_ATTRIBUTE_CONTEXT = 1,
	CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
	CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
	CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
	CU_MEM_HANDLE_TYPE_POSIX_FD = 1,
	CU_MEM_ALLOCATION_TYPE_PINNED = 1,
	CU_MEM_LOCATION_TYPE_DEVICE = 1,
	CU_MEM_ACCESS_READ = 1,
	CU_MEM_ACCESS_READWRITE = 3,
	CU_MEM_GRANULARITY_MINIMUM = 0,
	CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1,
	CU_MEMCPY_SRC_ORDER_STREAM = 1,
	CU_MEMCPY_PREFER_OVERLAP = 1,
};

struct cu_mem_location {
	int type;
	int id;
};
/* CUmemAllocationProp */
struct cu_mem_prop {
	int type;
	int handle_types;
	struct cu_mem_location location;
	void *win32;
	uint8_t compression, rdma;
	uint16_t usage;
	uint8_t reserved[4];
};
struct cu_mem_access {
	struct cu_mem_location location;
	int flags;
};
/* CUmemcpyAttributes */
struct cu_copy_attributes {
	int src_order;
	struct cu_mem_location src_hint, dst_hint;
	unsigned int flags;
};
/* CUDA_MEMCPY2D_v2 */
struct cu_copy2d {
	size_t src_x, src_y;
	int src_type;
	const void *src_host;
	uint64_t src_device;
	void *src_array;
	size_t src_pitch;
	size_t dst_x, dst_y;
	int dst_type;
	void *dst_host;
	uint64_t dst_device;
	void *dst_array;
	size_t dst_pitch;
	size_t width, height;
};

/* CUDA_MEMCPY3D_v2 */
struct cu_copy3d {
	size_t src_x, src_y, src_z, src_lod;
	int src_type;
	const void *src_host;
	uint64_t src_device;
	void *src_array;
	void *reserved0; /* NULL */
	size_t src_pitch, src_height;
	size_t dst_x, dst_y, dst_z, dst_lod;
	int dst_type;
	void *dst_host;
	uint64_t dst_device;
	void *dst_array;
	void *reserved1; /* NULL */
	size_t dst_pitch, dst_height;
	size_t width, height, depth;
};

/* X(function, symbol, (parameters)) */
#define CUDRV_REQUIRED(X)                                                                \
	X(init, cuInit, (unsigned int flags))                                            \
	X(driver_version, cuDriverGetVersion, (int *version_p))                          \
	X(error_name, cuGetErrorName, (int result, const char **name_p))                 \
	X(error_string, cuGetErrorString, (int result, const char **text_p))             \
	X(device_count, cuDeviceGetCount, (int *count_p))                                \
	X(device_get, cuDeviceGet, (int *device_p, int ordinal))                         \
	X(device_name, cuDeviceGetName, (char *name, int len, int device))               \
	X(device_uuid, cuDeviceGetUuid_v2, (struct cu_uuid * uuid_p, int device))        \
	X(device_pci, cuDeviceGetPCIBusId, (char *id, int len, int device))              \
	X(device_attribute, cuDeviceGetAttribute, (int *value_p, int which, int device)) \
	X(device_bytes, cuDeviceTotalMem_v2, (size_t * bytes_p, int device))             \
	X(ctx_limit, cuCtxSetLimit, (int limit, size_t value))                           \
	X(ctx_retain, cuDevicePrimaryCtxRetain, (struct cu_ctx * *ctx_p, int device))    \
	X(ctx_release, cuDevicePrimaryCtxRelease_v2, (int device))                       \
	X(ctx_reset, cuDevicePrimaryCtxReset_v2, (int device))                           \
	X(ctx_push, cuCtxPushCurrent_v2, (struct cu_ctx * ctx))                          \
	X(ctx_pop, cuCtxPopCurrent_v2, (struct cu_ctx * *ctx_p))                         \
	X(ctx_priorities, cuCtxGetStreamPriorityRange, (int *least_p, int *greatest_p))  \
	X(mem_info, cuMemGetInfo_v2, (size_t * free_p, size_t * total_p))                \
	X(mem_range, cuMemGetAddressRange_v2,                                            \
	  (uint64_t * base_p, size_t * bytes_p, uint64_t address))                       \
	X(pointer_attribute, cuPointerGetAttribute,                                      \
	  (void *value_p, int which, uint64_t address))                                  \
	X(host_alloc, cuMemHostAlloc, (void **base_p, size_t bytes, unsigned int flags)) \
	X(host_free, cuMemFreeHost, (void *base))                                        \
	X(host_register, cuMemHostRegister_v2,                                           \
	  (void *base, size_t bytes, unsigned int flags))                                \
	X(host_unregister, cuMemHostUnregister, (void *base))                            \
	X(ipc_open, cuIpcOpenMemHandle_v2,                                               \
	  (uint64_t * address_p, struct cu_ipc_mem handle, unsigned int flags))          \
	X(ipc_close, cuIpcCloseMemHandle, (uint64_t address))                            \
	X(stream_create, cuStreamCreateWithPriority,                                     \
	  (struct cu_stream * *stream_p, unsigned int flags, int priority))              \
	X(stream_destroy, cuStreamDestroy_v2, (struct cu_stream * stream))               \
	X(stream_sync, cuStreamSynchronize, (struct cu_stream * stream))                 \
	X(stream_wait_event, cuStreamWaitEvent,                                          \
	  (struct cu_stream * stream, struct cu_event * event, unsigned int flags))      \
	X(event_create, cuEventCreate, (struct cu_event * *event_p, unsigned int flags)) \
	X(event_destroy, cuEventDestroy_v2, (struct cu_event * event))                   \
	X(event_record, cuEventRecord,                                                   \
	  (struct cu_event * event, struct cu_stream * stream))                          \
	X(event_query, cuEventQuery, (struct cu_event * event))                          \
	X(event_sync, cuEventSynchronize, (struct cu_event * event))                     \
	X(copy, cuMemcpyAsync,                                                           \
	  (uint64_t dst, uint64_t src, size_t bytes, struct cu_stream * stream))         \
	X(copy2d, cuMemcpy2DAsync_v2,                                                    \
	  (const struct cu_copy2d *copy, struct cu_stream *stream))

/* X(group, function, symbol, (parameters)) */
#define CUDRV_OPTIONAL(X)                                                             \
	X(VMM, vmm_import, cuMemImportFromShareableHandle,                            \
	  (uint64_t * handle_p, void *os_handle, int type))                           \
	X(VMM, vmm_reserve, cuMemAddressReserve,                                      \
	  (uint64_t * address_p, size_t bytes, size_t align, uint64_t hint,           \
	   unsigned long long flags))                                                 \
	X(VMM, vmm_unreserve, cuMemAddressFree, (uint64_t address, size_t bytes))     \
	X(VMM, vmm_map, cuMemMap,                                                     \
	  (uint64_t address, size_t bytes, size_t offset, uint64_t handle,            \
	   unsigned long long flags))                                                 \
	X(VMM, vmm_unmap, cuMemUnmap, (uint64_t address, size_t bytes))               \
	X(VMM, vmm_access, cuMemSetAccess,                                            \
	  (uint64_t address, size_t bytes, const struct cu_mem_access *access,        \
	   size_t count))                                                             \
	X(VMM, vmm_release, cuMemRelease, (uint64_t handle))                          \
	X(VMM, vmm_prop, cuMemGetAllocationPropertiesFromHandle,                      \
	  (struct cu_mem_prop * prop_p, uint64_t handle))                             \
	X(VMM, vmm_granularity, cuMemGetAllocationGranularity,                        \
	  (size_t * bytes_p, const struct cu_mem_prop *prop, int which))              \
	X(BATCH, copy_batch, cuMemcpyBatchAsync_v2,                                   \
	  (uint64_t * dsts, uint64_t * srcs, size_t * sizes, size_t count,            \
	   struct cu_copy_attributes * attributes, size_t * indices,                  \
	   size_t attributes_n, struct cu_stream * stream))                           \
	X(COPY3D, copy3d, cuMemcpy3DAsync_v2,                                         \
	  (const struct cu_copy3d *copy, struct cu_stream *stream))                   \
	X(PEER, peer_possible, cuDeviceCanAccessPeer,                                 \
	  (int *possible_p, int device, int other))                                   \
	X(PEER, peer_enable, cuCtxEnablePeerAccess,                                   \
	  (struct cu_ctx * other, unsigned int flags))                                \
	X(DMABUF, range_handle, cuMemGetHandleForAddressRange,                        \
	  (void *handle_p, uint64_t address, size_t bytes, int type,                  \
	   unsigned long long flags))                                                 \
	X(KERNELS, mem_alloc, cuMemAlloc_v2, (uint64_t * address_p, size_t bytes))    \
	X(KERNELS, mem_free, cuMemFree_v2, (uint64_t address))                        \
	X(KERNELS, module_load, cuModuleLoadData,                                     \
	  (struct cu_module * *module_p, const void *image))                          \
	X(KERNELS, module_unload, cuModuleUnload, (struct cu_module * module))        \
	X(KERNELS, module_function, cuModuleGetFunction,                              \
	  (struct cu_function * *function_p, struct cu_module * module,               \
	   const char *name))                                                         \
	X(KERNELS, launch, cuLaunchKernel,                                            \
	  (struct cu_function * function, unsigned int grid_x, unsigned int grid_y,   \
	   unsigned int grid_z, unsigned int block_x, unsigned int block_y,           \
	   unsigned int block_z, unsigned int shared_bytes, struct cu_stream *stream, \
	   void **params, void **extra))

enum cudrv_group {
	CUDRV_VMM,     /* memory by cuMemCreate, as a file descriptor */
	CUDRV_BATCH,   /* many copies in one call, as CUDA 13 has it */
	CUDRV_COPY3D,  /* rows at two levels of strides in one call */
	CUDRV_PEER,    /* copies between two devices without the host */
	CUDRV_DMABUF,  /* memory for RDMA adapters, as a file descriptor */
	CUDRV_KERNELS, /* kvd's code on the device */
	CUDRV_GROUPS,
};

struct cudrv {
	void *library;
	int version;			   /* 13000 is 13.0 */
	bool has[CUDRV_GROUPS];		   /* all symbols of the group exist */
	const char *missing[CUDRV_GROUPS]; /* the first missing one */
#define CUDRV_FIELD(function, symbol, parameters) int(*function) parameters;
#define CUDRV_GROUP_FIELD(group, function, symbol, parameters) int(*function) parameters;
	CUDRV_REQUIRED(CUDRV_FIELD)
	CUDRV_OPTIONAL(CUDRV_GROUP_FIELD)
};

/* Open `path` ("libcuda.so.1") and start the driver (cuInit: tenths of a second on real
 * machines). ERR_REQUIRE: no driver, or one without a required symbol. The library is
 * never closed: the driver leaves threads behind. */
int cudrv_load(const char *path, struct cudrv *drv);
const char *cudrv_group_name(enum cudrv_group group);

/*
 * Raise the driver's error: "<message>: CUDA_ERROR_INVALID_VALUE (invalid argument)". out
 * of memory is ERR_NOMEM, no or another device ERR_REQUIRE, errors that only a new
 * process clears ERR_IO of scope device, all else `code`.
 */
int cudrv_raise(const struct cudrv *drv, int result, enum err_code code, const char *fmt,
		...) __attribute__((format(printf, 4, 5)));
/* After such a result every later call in the context fails: it never recovers. */
bool cudrv_sticky(int result);

/* "GPU-01234567-89ab-…" of the driver's bytes, and back (also without "GPU-"). */
#define CUDRV_UUID_TEXT (sizeof("GPU-") + UUID_CHARS)
void cudrv_uuid_text(const struct cu_uuid *uuid, char text[CUDRV_UUID_TEXT]);
bool cudrv_uuid_parse(const char *text, struct cu_uuid *uuid_p);

#endif
