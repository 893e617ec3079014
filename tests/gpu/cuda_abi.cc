/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cudrv.h beside the real cuda.h: compiled, never run (tests/integration/
 * test_cuda_abi.sh). kvd declares the driver's functions, structs and numbers itself,
 * and the tests' driver is made from the same declarations, so a mistake in them would
 * be seen on hardware only. Here the compiler compares: of each function that cuda.h
 * has under the symbol's name the number, sizes and kinds of its parameters; of each
 * struct its size and the places of its members; of each number its value.
 */
#include <cstddef>
#include <cstdint>
#include <type_traits>

#define _Noreturn [[noreturn]]
namespace own {
#include "tests/gpu/engine_calls.h"
}

/* ---- kept from before cuda.h defines the same names as macros ---- */

#define NUMBERS(X)                                      \
	X(CU_STREAM_NON_BLOCKING)                       \
	X(CU_EVENT_BLOCKING_SYNC)                       \
	X(CU_EVENT_DISABLE_TIMING)                      \
	X(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)           \
	X(CU_MEMHOSTALLOC_PORTABLE)                     \
	X(CU_MEMHOSTREGISTER_PORTABLE)                  \
	X(CU_MEMHOSTREGISTER_DEVICEMAP)                 \
	X(CU_MEMHOSTREGISTER_READ_ONLY)                 \
	X(CU_MEMORYTYPE_UNIFIED)                        \
	X(CU_DEVICE_ATTRIBUTE_MAX_PITCH)                \
	X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) \
	X(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) \
	X(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)        \
	X(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD)          \
	X(CU_POINTER_ATTRIBUTE_CONTEXT)                 \
	X(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)          \
	X(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)        \
	X(CU_POINTER_ATTRIBUTE_RANGE_SIZE)              \
	X(CU_MEM_ALLOCATION_TYPE_PINNED)                \
	X(CU_MEM_LOCATION_TYPE_DEVICE)
/* X(own name, cuda.h's) */
#define RENAMED(X)                                                                \
	X(CU_DEVICE_ATTRIBUTE_HOST_POINTER_FOR_REGISTERED,                        \
	  CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM)            \
	X(CU_MEM_HANDLE_TYPE_POSIX_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)  \
	X(CU_MEM_ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ)                      \
	X(CU_MEM_ACCESS_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE)            \
	X(CU_MEM_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM)           \
	X(CU_MEMCPY_SRC_ORDER_STREAM, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)          \
	X(CU_MEMCPY_PREFER_OVERLAP, CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE)   \
	X(CU_SUCCESS, CUDA_SUCCESS)                                               \
	X(CU_ERROR_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE)                       \
	X(CU_ERROR_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY)                       \
	X(CU_ERROR_NOT_INITIALIZED, CUDA_ERROR_NOT_INITIALIZED)                   \
	X(CU_ERROR_DEINITIALIZED, CUDA_ERROR_DEINITIALIZED)                       \
	X(CU_ERROR_DEVICE_UNAVAILABLE, CUDA_ERROR_DEVICE_UNAVAILABLE)             \
	X(CU_ERROR_NO_DEVICE, CUDA_ERROR_NO_DEVICE)                               \
	X(CU_ERROR_INVALID_DEVICE, CUDA_ERROR_INVALID_DEVICE)                     \
	X(CU_ERROR_INVALID_IMAGE, CUDA_ERROR_INVALID_IMAGE)                       \
	X(CU_ERROR_INVALID_CONTEXT, CUDA_ERROR_INVALID_CONTEXT)                   \
	X(CU_ERROR_MAP_FAILED, CUDA_ERROR_MAP_FAILED)                             \
	X(CU_ERROR_ALREADY_MAPPED, CUDA_ERROR_ALREADY_MAPPED)                     \
	X(CU_ERROR_NO_BINARY_FOR_GPU, CUDA_ERROR_NO_BINARY_FOR_GPU)               \
	X(CU_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_ECC_UNCORRECTABLE)               \
	X(CU_ERROR_PEER_ACCESS_UNSUPPORTED, CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)   \
	X(CU_ERROR_NVLINK_UNCORRECTABLE, CUDA_ERROR_NVLINK_UNCORRECTABLE)         \
	X(CU_ERROR_CONTAINED, CUDA_ERROR_CONTAINED)                               \
	X(CU_ERROR_OPERATING_SYSTEM, CUDA_ERROR_OPERATING_SYSTEM)                 \
	X(CU_ERROR_INVALID_HANDLE, CUDA_ERROR_INVALID_HANDLE)                     \
	X(CU_ERROR_NOT_FOUND, CUDA_ERROR_NOT_FOUND)                               \
	X(CU_ERROR_NOT_READY, CUDA_ERROR_NOT_READY)                               \
	X(CU_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_ILLEGAL_ADDRESS)                   \
	X(CU_ERROR_PEER_ACCESS_ALREADY_ENABLED, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) \
	X(CU_ERROR_CONTEXT_IS_DESTROYED, CUDA_ERROR_CONTEXT_IS_DESTROYED)         \
	X(CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED,                                \
	  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)                              \
	X(CU_ERROR_HOST_MEMORY_NOT_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) \
	X(CU_ERROR_HARDWARE_STACK_ERROR, CUDA_ERROR_HARDWARE_STACK_ERROR)         \
	X(CU_ERROR_INVALID_PC, CUDA_ERROR_INVALID_PC)                             \
	X(CU_ERROR_LAUNCH_FAILED, CUDA_ERROR_LAUNCH_FAILED)                       \
	X(CU_ERROR_NOT_PERMITTED, CUDA_ERROR_NOT_PERMITTED)                       \
	X(CU_ERROR_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED)                       \
	X(CU_ERROR_MPS_CLIENT_TERMINATED, CUDA_ERROR_MPS_CLIENT_TERMINATED)       \
	X(CU_ERROR_UNKNOWN, CUDA_ERROR_UNKNOWN)

#define KEEP(name) constexpr long kept_##name = own::name;
#define KEEP_RENAMED(name, theirs) KEEP(name)
NUMBERS(KEEP)
RENAMED(KEEP_RENAMED)
constexpr long kept_ipc_bytes = CU_IPC_BYTES;

/* The functions, by type: own_cuInit, … */
#define KEEP_FUNCTION(function, symbol, parameters) using own_##symbol = int(*) parameters;
#define KEEP_GROUP_FUNCTION(group, function, symbol, parameters) \
	KEEP_FUNCTION(function, symbol, parameters)
namespace own {
CUDRV_REQUIRED(KEEP_FUNCTION)
CUDRV_OPTIONAL(KEEP_GROUP_FUNCTION)
ENGINE_CALLS(KEEP_FUNCTION)
}

#include <cuda.h>

/* ---- numbers ---- */

#define SAME(name) static_assert(kept_##name == static_cast<long>(name), #name);
#define SAME_RENAMED(name, theirs) \
	static_assert(kept_##name == static_cast<long>(theirs), #name);
NUMBERS(SAME)
RENAMED(SAME_RENAMED)
static_assert(kept_ipc_bytes == CU_IPC_HANDLE_SIZE, "IPC handles");

/* ---- structs ---- */

#define SIZE(ours, theirs) static_assert(sizeof(own::ours) == sizeof(theirs), #ours);
#define PLACE(ours, member, theirs, member_there)                                     \
	static_assert(offsetof(own::ours, member) == offsetof(theirs, member_there) && \
			      sizeof(own::ours::member) == sizeof(theirs::member_there), \
		      #ours "." #member);
SIZE(cu_uuid, CUuuid)
SIZE(cu_ipc_mem, CUipcMemHandle)
SIZE(cu_mem_location, CUmemLocation)
PLACE(cu_mem_location, id, CUmemLocation, id)
SIZE(cu_mem_prop, CUmemAllocationProp)
PLACE(cu_mem_prop, type, CUmemAllocationProp, type)
PLACE(cu_mem_prop, handle_types, CUmemAllocationProp, requestedHandleTypes)
PLACE(cu_mem_prop, location, CUmemAllocationProp, location)
PLACE(cu_mem_prop, win32, CUmemAllocationProp, win32HandleMetaData)
SIZE(cu_mem_access, CUmemAccessDesc)
PLACE(cu_mem_access, flags, CUmemAccessDesc, flags)
SIZE(cu_copy_attributes, CUmemcpyAttributes)
PLACE(cu_copy_attributes, src_order, CUmemcpyAttributes, srcAccessOrder)
PLACE(cu_copy_attributes, src_hint, CUmemcpyAttributes, srcLocHint)
PLACE(cu_copy_attributes, dst_hint, CUmemcpyAttributes, dstLocHint)
PLACE(cu_copy_attributes, flags, CUmemcpyAttributes, flags)
SIZE(cu_copy2d, CUDA_MEMCPY2D)
PLACE(cu_copy2d, src_type, CUDA_MEMCPY2D, srcMemoryType)
PLACE(cu_copy2d, src_device, CUDA_MEMCPY2D, srcDevice)
PLACE(cu_copy2d, src_pitch, CUDA_MEMCPY2D, srcPitch)
PLACE(cu_copy2d, dst_type, CUDA_MEMCPY2D, dstMemoryType)
PLACE(cu_copy2d, dst_device, CUDA_MEMCPY2D, dstDevice)
PLACE(cu_copy2d, dst_pitch, CUDA_MEMCPY2D, dstPitch)
PLACE(cu_copy2d, width, CUDA_MEMCPY2D, WidthInBytes)
PLACE(cu_copy2d, height, CUDA_MEMCPY2D, Height)
SIZE(cu_copy3d, CUDA_MEMCPY3D)
PLACE(cu_copy3d, src_type, CUDA_MEMCPY3D, srcMemoryType)
PLACE(cu_copy3d, src_device, CUDA_MEMCPY3D, srcDevice)
PLACE(cu_copy3d, src_pitch, CUDA_MEMCPY3D, srcPitch)
PLACE(cu_copy3d, src_height, CUDA_MEMCPY3D, srcHeight)
PLACE(cu_copy3d, dst_type, CUDA_MEMCPY3D, dstMemoryType)
PLACE(cu_copy3d, dst_device, CUDA_MEMCPY3D, dstDevice)
PLACE(cu_copy3d, dst_pitch, CUDA_MEMCPY3D, dstPitch)
PLACE(cu_copy3d, dst_height, CUDA_MEMCPY3D, dstHeight)
PLACE(cu_copy3d, width, CUDA_MEMCPY3D, WidthInBytes)
PLACE(cu_copy3d, height, CUDA_MEMCPY3D, Height)
PLACE(cu_copy3d, depth, CUDA_MEMCPY3D, Depth)

/* ---- functions ---- */

/* 0: none; else what a register or the stack holds of it, by kind and size. Pointers
 * to const and to others are told apart only where the driver promises not to write. */
template <typename T> constexpr int shape()
{
	return std::is_pointer<T>::value ? 1000
	       : std::is_class<T>::value ? 2000 + int(sizeof(T))
					 : int(sizeof(T));
}
template <typename A, typename B> struct same_call : std::false_type {};
template <typename A, typename... As, typename B, typename... Bs>
struct same_call<A (*)(As...), B (*)(Bs...)> {
	template <bool...> struct all;
	template <typename, typename, typename = void> struct each : std::false_type {};
	template <typename... X, typename... Y>
	struct each<void(X...), void(Y...),
		    typename std::enable_if<sizeof...(X) == sizeof...(Y)>::type>
		: std::is_same<all<true, (shape<X>() == shape<Y>())...>,
			       all<(shape<X>() == shape<Y>())..., true>> {};
	static constexpr bool value =
		shape<A>() == shape<B>() && each<void(As...), void(Bs...)>::value;
};
/* cuda.h names the newest version plainly and defines it as symbol_vN: taken as a
 * declaration by that macro. */
#define SAME_FUNCTION(function, symbol, parameters)                        \
	static_assert(same_call<own::own_##symbol, decltype(&::symbol)>::value, \
		      #symbol);
#define SAME_GROUP_FUNCTION(group, function, symbol, parameters) \
	SAME_FUNCTION(function, symbol, parameters)
CUDRV_REQUIRED(SAME_FUNCTION)
CUDRV_OPTIONAL(SAME_GROUP_FUNCTION)
ENGINE_CALLS(SAME_FUNCTION)
