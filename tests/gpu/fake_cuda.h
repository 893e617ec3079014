/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_cuda: a libcuda.so.1 without a GPU. What tests may ask of it beyond the
 * driver API, and what its files share.
 *
 * Environment: FAKE_CUDA_DEVICES=n (2), CUDA_VISIBLE_DEVICES=1,0 (an order),
 * FAKE_CUDA_NS_PER_KIB=n (how long copies take), FAKE_CUDA_NO_PEER=1,
 * FAKE_CUDA_NO_HOST_POINTERS=1 (registered memory has another address for a GPU),
 * FAKE_CUDA_READ_ONLY_HOST=1 (host memory can be registered for reading alone),
 * FAKE_CUDA_MIG=1 (IPC is refused), FAKE_CUDA_NO_BINARY=1 (modules hold no code for
 * the devices), and
 * FAKE_CUDA_FAIL=name:n[:code][,…]: the n-th call of a function fails (1 =
 * the next one; code 2, out of memory, when not told). The name "execute" is a
 * queued copy: it fails where the device does the work, and the context with it.
 * A code after which a context is dead makes it so.
 * FAKE_CUDA_SLOW=name:ms: calls of a function take so long; "attend": kernels of
 * attention, on the device.
 * FAKE_CUDA_CONTROL=path: a file of struct fake_control, through which another
 * process plans faults and sees what this one holds.
 */
#ifndef TESTS_GPU_FAKE_CUDA_H
#define TESTS_GPU_FAKE_CUDA_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/list.h"
#include "gpu/cudrv.h"
#include "tests/gpu/engine_calls.h"

#define FAKE_API __attribute__((visibility("default")))

/* ---- for tests ---- */

struct fake_control {
	uint32_t left; /* the so many-th call from now on fails, whichever; 0: none */
	int32_t code;
	uint32_t calls;
	int32_t live;	 /* as fake_cuda_live() */
	char struck[64]; /* the call that failed */
};

/* As FAKE_CUDA_FAIL; counts from now. NULL: forget all faults. */
FAKE_API void fake_cuda_fail(const char *name, unsigned int n, int code);
/* As FAKE_CUDA_SLOW. NULL: none. */
FAKE_API void fake_cuda_slow(const char *name, unsigned int ms);
/* Calls of a function since the last fake_cuda_fail(NULL). */
FAKE_API unsigned int fake_cuda_calls(const char *name);
/* The i-th function that was called since then, NULL at the end. */
FAKE_API const char *fake_cuda_called(unsigned int i);
/* What the process holds of the driver's: contexts, memory, imports, handles,
 * streams, events, pinned memory, modules. */
FAKE_API int fake_cuda_live(void);
/* The file behind device memory (not to be closed), and where in it. */
FAKE_API int fake_cuda_file(uint64_t address, int *fd_p, uint64_t *offset_p);
/* Copies take so long per KiB from now on. */
FAKE_API void fake_cuda_pace(unsigned int ns_per_kib);
/* Copies and launches are taken and not done: for what they cost the processor. */
FAKE_API void fake_cuda_idle(bool idle);

/* The API, with the parameters that kvd calls it by. */
#define FAKE_DECLARE(function, symbol, parameters) FAKE_API int symbol parameters;
#define FAKE_GROUP_DECLARE(group, function, symbol, parameters) \
	FAKE_API int symbol parameters;
CUDRV_REQUIRED(FAKE_DECLARE)
CUDRV_OPTIONAL(FAKE_GROUP_DECLARE)
ENGINE_CALLS(FAKE_DECLARE)
FAKE_API int cuCtxSynchronize(void);

/* ---- shared by its files ---- */

#define FAKE_DEVICES 8
#ifdef __SANITIZE_THREAD__ /* it leaves 5 TiB for all of a process's mappings */
#define FAKE_ARENA_BYTES (UINT64_C(1) << 37)
#else
#define FAKE_ARENA_BYTES (UINT64_C(1) << 40)
#endif

struct cu_ctx {
	int device; /* the driver's number, in this process */
	unsigned int refs;
	int sticky;	    /* result of every call from now on */
	unsigned int peers; /* bit n: kernels reach device n */
	struct list streams;
};

/* The calls of the API begin with this. */
int fake_enter(const char *name, bool needs_context);
#define ENTER(name)                                     \
	do {                                            \
		int entered_ = fake_enter(#name, true); \
		if (entered_)                           \
			return entered_;                \
	} while (0)
#define ENTER_BARE(name)                                 \
	do {                                             \
		int entered_ = fake_enter(#name, false); \
		if (entered_)                            \
			return entered_;                 \
	} while (0)
/* Does a planned fault strike now? Its code or 0. */
int fake_strike(const char *name);

/* Sleeps as long as FAKE_CUDA_SLOW says of this name. */
void fake_drag(const char *name);

struct cu_ctx *fake_current(void);
struct cu_ctx *fake_ctx(int device);
int fake_sticky(const struct cu_ctx *ctx);
void fake_break(struct cu_ctx *ctx, int code);
void fake_count(int by);       /* of fake_cuda_live() */
int fake_physical(int device); /* what a number means, whatever is visible */
int fake_device_of(int physical);
int fake_device_count(void);
int fake_env(const char *name, int otherwise);
unsigned int fake_ns_per_kib(void);
bool fake_idle(void);

/* fake_memory.c */
bool fake_is_device(uint64_t address);
/* May a kernel in the context load and store there? The lock is held. */
bool fake_open_to(const struct cu_ctx *ctx, uint64_t address);
/* The alias of device memory, or the host address itself. NULL: device memory
 * that is not there (any more), or not to be written. The lock for reading must
 * be held until the bytes have moved. */
uint8_t *fake_reach(uint64_t address, uint64_t bytes, bool writing);
void fake_memory_lock(void);
void fake_memory_lock_all(void); /* for writing */
void fake_memory_unlock(void);
void fake_memory_drop(int device); /* a context's end */
/* fd of a file of another process, by /proc; -1: it is gone, or out of sight. */
int fake_foreign_open(pid_t pid, uint64_t started, int fd);
uint64_t fake_started(pid_t pid); /* of /proc/<pid>/stat; 0: gone */

/* fake_host.c; the lock is held */
/* Is this host memory registered or pinned, all of it? */
bool fake_is_pinned(uint64_t address, uint64_t bytes);
/* May a kernel reach it? */
bool fake_is_mapped(uint64_t address, uint64_t bytes, bool writing);
bool fake_is_read_only(uint64_t address);
void fake_host_drop(int device); /* for writing; a context's end */

/* fake_stream.c */
void fake_streams_drain(struct cu_ctx *ctx);
/* call(arg) when its turn comes; its result breaks the context. Frees arg. */
int fake_queue_call(struct cu_stream *stream, int (*call)(void *arg), void *arg);
void fake_pace(uint64_t bytes);
void fake_events_drop(struct cu_ctx *ctx); /* a context's end */

/* fake_module.c */
void fake_modules_drop(struct cu_ctx *ctx); /* a context's end */

#endif
