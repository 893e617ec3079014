/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A driver whose devices are shared memory, so that every path of kvd's but the
 * kernels' arithmetic runs where there is no GPU.
 *
 * It is stricter than the real one wherever that finds faults: device addresses
 * are PROT_NONE in every process and never used again, so that a CPU that
 * touches one dies; a call without a context is refused; work is done by a
 * thread a stream, later than the call; memory that goes away under queued work
 * makes that work fail as on a device, with the context.
 *
 * This file: devices, contexts, results and planned faults.
 */
#include "tests/gpu/fake_cuda.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define CALLS_MAX 128
#define FAULTS_MAX 128

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool started;
static int device_count, visible[FAKE_DEVICES];
static struct cu_ctx contexts[FAKE_DEVICES];
static int live;
static struct fake_control *control;
static unsigned int ns_per_kib;
static bool idle;

static struct call {
	const char *name;
	unsigned int count;
} calls[CALLS_MAX];
static struct fault {
	char name[64];
	unsigned int left; /* 0: not in use */
	int code;
} faults[FAULTS_MAX];

static struct {
	char name[64];
	unsigned int ms;
} slow;

static _Thread_local struct cu_ctx *stack[16];
static _Thread_local unsigned int depth;

/* ---- planned faults ---- */

static void fault_add(const char *name, unsigned int n, int code)
{
	for (size_t i = 0; i < FAULTS_MAX; i++) {
		if (faults[i].left)
			continue;
		snprintf(faults[i].name, sizeof(faults[i].name), "%s", name);
		faults[i].left = n;
		faults[i].code = code;
		return;
	}
}

void fake_cuda_fail(const char *name, unsigned int n, int code)
{
	pthread_mutex_lock(&lock);
	if (name) {
		fault_add(name, n, code);
	} else {
		memset(faults, 0, sizeof(faults));
		memset(calls, 0, sizeof(calls));
	}
	pthread_mutex_unlock(&lock);
}

/* "name:n[:code],…" */
static void faults_read(const char *text)
{
	char copy[512], *word, *rest = NULL, name[64];

	snprintf(copy, sizeof(copy), "%s", text);
	for (word = strtok_r(copy, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
		unsigned int n = 1;
		int code = CU_ERROR_OUT_OF_MEMORY;

		if (sscanf(word, "%63[^:]:%u:%d", name, &n, &code) >= 1)
			fault_add(name, n, code);
	}
}

void fake_cuda_slow(const char *name, unsigned int ms)
{
	pthread_mutex_lock(&lock);
	snprintf(slow.name, sizeof(slow.name), "%s", name ? name : "");
	slow.ms = ms;
	pthread_mutex_unlock(&lock);
}

static void slow_read(const char *text)
{
	char name[64];
	unsigned int ms;

	if (text && sscanf(text, "%63[^:]:%u", name, &ms) == 2) {
		memcpy(slow.name, name, sizeof(name));
		slow.ms = ms;
	}
}

unsigned int fake_cuda_calls(const char *name)
{
	unsigned int n = 0;

	pthread_mutex_lock(&lock);
	for (size_t i = 0; i < CALLS_MAX && calls[i].name; i++)
		if (strcmp(calls[i].name, name) == 0)
			n = calls[i].count;
	pthread_mutex_unlock(&lock);
	return n;
}

const char *fake_cuda_called(unsigned int i)
{
	return i < CALLS_MAX ? calls[i].name : NULL;
}

/* Another process's: of all calls the n-th. */
static int strike_controlled(const char *name)
{
	uint32_t left = __atomic_load_n(&control->left, __ATOMIC_ACQUIRE);

	__atomic_add_fetch(&control->calls, 1, __ATOMIC_RELAXED);
	if (!left)
		return 0;
	if (left == 1)
		snprintf(control->struck, sizeof(control->struck), "%s", name);
	__atomic_store_n(&control->left, left - 1, __ATOMIC_RELEASE);
	return left == 1 ? control->code : 0;
}

static int strike_locked(const char *name)
{
	int code = control ? strike_controlled(name) : 0;

	for (size_t i = 0; i < CALLS_MAX; i++) {
		if (!calls[i].name)
			calls[i].name = name;
		if (strcmp(calls[i].name, name) != 0)
			continue;
		calls[i].count++;
		break;
	}
	for (size_t i = 0; i < FAULTS_MAX; i++)
		if (faults[i].left && strcmp(faults[i].name, name) == 0 &&
		    --faults[i].left == 0)
			code = faults[i].code;
	return code;
}

int fake_strike(const char *name)
{
	int code;

	pthread_mutex_lock(&lock);
	code = strike_locked(name);
	pthread_mutex_unlock(&lock);
	return code;
}

/* As cuda.h tells it, not as kvd knows it. */
static bool deadly(int code)
{
	static const int codes[] = {214, 220, 226, 700, 702, 710, 714, 715,
				    716, 717, 718, 719, 721, 810, 911};

	for (size_t i = 0; i < sizeof(codes) / sizeof(codes[0]); i++)
		if (codes[i] == code)
			return true;
	return false;
}

void fake_drag(const char *name)
{
	struct timespec pause = {0};

	pthread_mutex_lock(&lock);
	if (strcmp(slow.name, name) == 0) {
		pause.tv_sec = slow.ms / 1000;
		pause.tv_nsec = slow.ms % 1000 * 1000000L;
	}
	pthread_mutex_unlock(&lock);
	if (pause.tv_sec || pause.tv_nsec)
		(void)nanosleep(&pause, NULL);
}

int fake_enter(const char *name, bool needs_context)
{
	struct cu_ctx *ctx = depth ? stack[depth - 1] : NULL;
	int code = fake_strike(name);

	fake_drag(name);
	pthread_mutex_lock(&lock);
	if (code && ctx && deadly(code))
		ctx->sticky = code;
	if (!code && !started)
		code = CU_ERROR_NOT_INITIALIZED;
	else if (!code && needs_context && (!ctx || !ctx->refs))
		code = CU_ERROR_INVALID_CONTEXT;
	else if (!code && needs_context)
		code = ctx->sticky;
	pthread_mutex_unlock(&lock);
	return code;
}

int fake_sticky(const struct cu_ctx *ctx)
{
	int code;

	pthread_mutex_lock(&lock);
	code = ctx->sticky;
	pthread_mutex_unlock(&lock);
	return code;
}

void fake_break(struct cu_ctx *ctx, int code)
{
	pthread_mutex_lock(&lock);
	/* what fails on a device leaves no context behind */
	if (!ctx->sticky)
		ctx->sticky = deadly(code) ? code : CU_ERROR_LAUNCH_FAILED;
	pthread_mutex_unlock(&lock);
}

/* ---- the process ---- */

int fake_env(const char *name, int otherwise)
{
	const char *text = getenv(name);

	return text && *text ? atoi(text) : otherwise;
}

unsigned int fake_ns_per_kib(void)
{
	return __atomic_load_n(&ns_per_kib, __ATOMIC_RELAXED);
}

void fake_cuda_pace(unsigned int ns)
{
	__atomic_store_n(&ns_per_kib, ns, __ATOMIC_RELAXED);
}

bool fake_idle(void)
{
	return __atomic_load_n(&idle, __ATOMIC_RELAXED);
}

void fake_cuda_idle(bool now)
{
	__atomic_store_n(&idle, now, __ATOMIC_RELAXED);
}

void fake_count(int by)
{
	__atomic_add_fetch(&live, by, __ATOMIC_SEQ_CST);
	if (control)
		__atomic_add_fetch(&control->live, by, __ATOMIC_SEQ_CST);
}

int fake_cuda_live(void)
{
	return __atomic_load_n(&live, __ATOMIC_SEQ_CST);
}

int fake_device_count(void)
{
	return device_count;
}

int fake_physical(int device)
{
	return device >= 0 && device < device_count ? visible[device] : -1;
}

int fake_device_of(int physical)
{
	for (int i = 0; i < device_count; i++)
		if (visible[i] == physical)
			return i;
	return -1;
}

static void control_map(const char *path)
{
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	void *map = MAP_FAILED;

	if (fd >= 0) {
		map = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd,
			   0);
		close(fd);
	}
	if (path && map == MAP_FAILED)
		abort();
	control = path ? map : NULL;
}

static void start(void)
{
	const char *order = getenv("CUDA_VISIBLE_DEVICES"),
		   *planned = getenv("FAKE_CUDA_FAIL");
	int there = fake_env("FAKE_CUDA_DEVICES", 2);

	if (there > FAKE_DEVICES)
		there = FAKE_DEVICES;
	while (order && *order && device_count < there) {
		char *end;
		long n = strtol(order, &end, 10);

		if (end == order || n < 0 || n >= there)
			break;
		visible[device_count++] = (int)n;
		order = *end == ',' ? end + 1 : end;
	}
	if (!getenv("CUDA_VISIBLE_DEVICES"))
		for (; device_count < there; device_count++)
			visible[device_count] = device_count;
	for (int i = 0; i < device_count; i++) {
		contexts[i].device = i;
		list_init(&contexts[i].streams);
	}
	fake_cuda_pace((unsigned int)fake_env("FAKE_CUDA_NS_PER_KIB", 0));
	if (planned)
		faults_read(planned);
	slow_read(getenv("FAKE_CUDA_SLOW"));
	control_map(getenv("FAKE_CUDA_CONTROL"));
	started = true;
}

int cuInit(unsigned int flags)
{
	int code;

	pthread_mutex_lock(&lock);
	if (!started)
		start();
	code = strike_locked("cuInit");
	pthread_mutex_unlock(&lock);
	if (code)
		return code;
	if (flags)
		return CU_ERROR_INVALID_VALUE;
	return device_count ? CU_SUCCESS : CU_ERROR_NO_DEVICE;
}

int cuDriverGetVersion(int *version_p)
{
	int code = fake_strike("cuDriverGetVersion");

	*version_p = 13000;
	return code;
}

/* ---- results ---- */

static const struct {
	int code;
	const char *name, *text;
} results[] = {
	{CU_SUCCESS, "CUDA_SUCCESS", "no error"},
	{CU_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
	{CU_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
	{CU_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
	{CU_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE",
	 "no CUDA-capable device is detected"},
	{CU_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
	{CU_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE",
	 "device kernel image is invalid"},
	{CU_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU",
	 "no kernel image is available for execution on the device"},
	{CU_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT",
	 "invalid device context"},
	{CU_ERROR_MAP_FAILED, "CUDA_ERROR_MAP_FAILED", "mapping of buffer object failed"},
	{CU_ERROR_ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
	{CU_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
	{CU_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
	{CU_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
	 "an illegal memory access was encountered"},
	{CU_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED",
	 "unspecified launch failure"},
	{CU_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
	{CU_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

int cuGetErrorName(int result, const char **name_p)
{
	for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++) {
		if (results[i].code == result) {
			*name_p = results[i].name;
			return CU_SUCCESS;
		}
	}
	return CU_ERROR_INVALID_VALUE;
}

int cuGetErrorString(int result, const char **text_p)
{
	for (size_t i = 0; i < sizeof(results) / sizeof(results[0]); i++) {
		if (results[i].code == result) {
			*text_p = results[i].text;
			return CU_SUCCESS;
		}
	}
	return CU_ERROR_INVALID_VALUE;
}

/* ---- devices ---- */

int cuDeviceGetCount(int *count_p)
{
	ENTER_BARE(cuDeviceGetCount);
	*count_p = device_count;
	return CU_SUCCESS;
}

int cuDeviceGet(int *device_p, int ordinal)
{
	ENTER_BARE(cuDeviceGet);
	if (ordinal < 0 || ordinal >= device_count)
		return CU_ERROR_INVALID_DEVICE;
	*device_p = ordinal;
	return CU_SUCCESS;
}

int cuDeviceGetName(char *name, int len, int device)
{
	ENTER_BARE(cuDeviceGetName);
	snprintf(name, (size_t)len, "Fake GPU %d", fake_physical(device));
	return CU_SUCCESS;
}

int cuDeviceGetUuid_v2(struct cu_uuid *uuid_p, int device)
{
	ENTER_BARE(cuDeviceGetUuid_v2);
	memset(uuid_p, 0xfa, sizeof(*uuid_p));
	uuid_p->bytes[15] = (uint8_t)fake_physical(device);
	return CU_SUCCESS;
}

int cuDeviceGetPCIBusId(char *id, int len, int device)
{
	ENTER_BARE(cuDeviceGetPCIBusId);
	snprintf(id, (size_t)len, "0000:%02X:00.0", 0x3b + fake_physical(device));
	return CU_SUCCESS;
}

int cuDeviceGetAttribute(int *value_p, int which, int device)
{
	ENTER_BARE(cuDeviceGetAttribute);
	(void)device;
	switch (which) {
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*value_p = 9;
		return CU_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
		*value_p = 0;
		return CU_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
		*value_p = 4;
		return CU_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED:
		*value_p = 1;
		return CU_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_MAX_PITCH:
		*value_p = INT32_MAX;
		return CU_SUCCESS;
	case CU_DEVICE_ATTRIBUTE_HOST_POINTER_FOR_REGISTERED:
		*value_p = !fake_env("FAKE_CUDA_NO_HOST_POINTERS", 0);
		return CU_SUCCESS;
	}
	return CU_ERROR_INVALID_VALUE;
}

int cuDeviceTotalMem_v2(size_t *bytes_p, int device)
{
	ENTER_BARE(cuDeviceTotalMem_v2);
	(void)device;
	*bytes_p = (size_t)16 << 30;
	return CU_SUCCESS;
}

int cuDeviceCanAccessPeer(int *possible_p, int device, int other)
{
	ENTER_BARE(cuDeviceCanAccessPeer);
	*possible_p = device != other && !fake_env("FAKE_CUDA_NO_PEER", 0);
	return CU_SUCCESS;
}

/* ---- contexts ---- */

struct cu_ctx *fake_current(void)
{
	return depth ? stack[depth - 1] : NULL;
}

struct cu_ctx *fake_ctx(int device)
{
	return &contexts[device];
}

int cuDevicePrimaryCtxRetain(struct cu_ctx **ctx_p, int device)
{
	ENTER_BARE(cuDevicePrimaryCtxRetain);
	if (device < 0 || device >= device_count)
		return CU_ERROR_INVALID_DEVICE;
	pthread_mutex_lock(&lock);
	contexts[device].refs++;
	pthread_mutex_unlock(&lock);
	fake_count(1);
	*ctx_p = &contexts[device];
	return CU_SUCCESS;
}

/* All work ends, all memory goes, and with it other contexts' way to it: the next
 * context of this device is another one. */
static void ctx_end(struct cu_ctx *ctx)
{
	fake_streams_drain(ctx);
	fake_memory_drop(ctx->device);
	fake_modules_drop(ctx);
	fake_events_drop(ctx);
	pthread_mutex_lock(&lock);
	ctx->sticky = 0;
	for (int i = 0; i < device_count; i++)
		__atomic_and_fetch(&contexts[i].peers, ~(1u << ctx->device),
				   __ATOMIC_SEQ_CST);
	__atomic_store_n(&ctx->peers, 0, __ATOMIC_SEQ_CST);
	pthread_mutex_unlock(&lock);
}

int cuDevicePrimaryCtxRelease_v2(int device)
{
	bool last;

	ENTER_BARE(cuDevicePrimaryCtxRelease_v2);
	if (device < 0 || device >= device_count || !contexts[device].refs)
		return CU_ERROR_INVALID_CONTEXT;
	fake_count(-1);
	pthread_mutex_lock(&lock);
	last = contexts[device].refs == 1;
	pthread_mutex_unlock(&lock);
	if (last)
		ctx_end(&contexts[device]);
	pthread_mutex_lock(&lock);
	contexts[device].refs--;
	pthread_mutex_unlock(&lock);
	return CU_SUCCESS;
}

int cuDevicePrimaryCtxReset_v2(int device)
{
	ENTER_BARE(cuDevicePrimaryCtxReset_v2);
	if (device < 0 || device >= device_count)
		return CU_ERROR_INVALID_DEVICE;
	ctx_end(&contexts[device]);
	return CU_SUCCESS;
}

int cuCtxPushCurrent_v2(struct cu_ctx *ctx)
{
	ENTER_BARE(cuCtxPushCurrent_v2);
	if (!ctx || !ctx->refs || depth == sizeof(stack) / sizeof(stack[0]))
		return CU_ERROR_INVALID_CONTEXT;
	stack[depth++] = ctx;
	return CU_SUCCESS;
}

int cuCtxPopCurrent_v2(struct cu_ctx **ctx_p)
{
	if (!depth)
		return CU_ERROR_INVALID_CONTEXT;
	*ctx_p = stack[--depth];
	return CU_SUCCESS;
}

int cuCtxSetLimit(int limit, size_t value)
{
	ENTER(cuCtxSetLimit);
	return limit == CU_LIMIT_STACK_SIZE && value <= 1024 ? CU_SUCCESS
							     : CU_ERROR_INVALID_VALUE;
}

int cuCtxGetStreamPriorityRange(int *least_p, int *greatest_p)
{
	ENTER(cuCtxGetStreamPriorityRange);
	*least_p = 0;
	*greatest_p = -5;
	return CU_SUCCESS;
}

int cuCtxEnablePeerAccess(struct cu_ctx *other, unsigned int flags)
{
	ENTER(cuCtxEnablePeerAccess);
	if (flags || !other || !other->refs || other == fake_current())
		return CU_ERROR_INVALID_VALUE;
	if (fake_env("FAKE_CUDA_NO_PEER", 0))
		return CU_ERROR_PEER_ACCESS_UNSUPPORTED;
	__atomic_or_fetch(&fake_current()->peers, 1u << other->device, __ATOMIC_SEQ_CST);
	return CU_SUCCESS;
}
