/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The driver gives little detail on why a handle cannot be opened ("invalid argument"),
 * and an engineer needs the cause. Conditions that can be known are checked first (the
 * device, MIG, sizes); for the rest the refusal lists the causes that lead to this very
 * result, with the remedy of each.
 *
 * Opening the same IPC handle again gives the same address with a count in newer drivers
 * and an error in older ones; sharing hides that except for two owners. A new handle also
 * gives an error while earlier memory at its address is open. A second opener waits for
 * the first: a lock of the device's is held meanwhile, which copies do not need. That
 * keeps "closed" simple, too: the handle is closed before the lock is released, so no
 * thread can find an import that is about to be freed.
 *
 * VMM memory is mapped whole, at one address, read-only unless it is to be written,
 * enforced by the hardware. IPC memory is always open for writing; copier_submit() checks
 * that a peer's memory is not written.
 *
 * Another device reaches memory of cuMemAlloc when its context was given access to the
 * context that opened it, all at once (gpu_device_pair()). Memory of cuMemCreate works
 * differently: each mapping is opened to each device by itself.
 *
 * The device of an IPC handle's memory is queried after opening: an engine that numbers
 * devices differently from kvd (CUDA_VISIBLE_DEVICES) would otherwise have its memory
 * reached across the wrong GPU, slowly and silently.
 */
#include "gpu/import.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "gpu/gpu.h"

/* ---- CUDA IPC ---- */

static const char *ipc_cause(int result)
{
	switch (result) {
	case CU_ERROR_INVALID_CONTEXT:
		return "the handle was exported by kvd itself";
	case CU_ERROR_PEER_ACCESS_UNSUPPORTED:
		return "the memory is on a GPU that this one cannot reach: name the GPU "
		       "it is on";
	case CU_ERROR_NOT_PERMITTED:
	case CU_ERROR_NOT_SUPPORTED:
		return "CUDA IPC is not available here (MIG, WSL, some virtual GPUs): "
		       "use cuda_vmm or a host memory pool";
	case CU_ERROR_OUT_OF_MEMORY:
		return "no room for the mapping";
	case CU_ERROR_ALREADY_MAPPED:
		return "memory of the same process at this address is already open: "
		       "another session has it, or it was freed before it was "
		       "unregistered";
	default:
		return "the exporting process has exited or is in another PID or IPC "
		       "namespace (--pid=host --ipc=host), or the memory is from "
		       "cuMemCreate (PyTorch's expandable_segments), which needs kind "
		       "cuda_vmm";
	}
}

static int ipc_refused(struct gpu_device *device, int result)
{
	int r;

	if (cudrv_sticky(result))
		return gpu_raise(device, result, ERR_IMPORT, "cuIpcOpenMemHandle");
	r = cudrv_raise(&device->gpu->drv, result, ERR_IMPORT, "cuIpcOpenMemHandle");
	return err_prefix(r, "%s", ipc_cause(result));
}

static int ipc_check_device(const struct gpu_import *im)
{
	const struct gpu *gpu = im->device->gpu;
	int ordinal = -1;
	int result = gpu->drv.pointer_attribute(
		&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, im->address);

	if (result != CU_SUCCESS)
		return gpu_raise(im->device, result, ERR_IMPORT, "cuPointerGetAttribute");
	if (ordinal == (int)im->device->number)
		return 0;
	return err_raise(
		ERR_IMPORT,
		"the memory is on %s, not on %s: name the GPU by the UUID that the "
		"engine's process sees (CUDA_VISIBLE_DEVICES changes numbers, not UUIDs)",
		ordinal >= 0 && ordinal < (int)gpu->device_count
			? gpu->devices[ordinal].id
			: "another device",
		im->device->id);
}

/* The allocation of an address. Documented for memory of this process only, like the
 * other query; a driver that answers neither cannot be trusted with offsets that an
 * engine gives. */
static int ipc_range(const struct gpu_import *im, uint64_t *base_p, size_t *bytes_p)
{
	const struct cudrv *drv = &im->device->gpu->drv;
	int result = drv->mem_range(base_p, bytes_p, im->address);

	if (result == CU_SUCCESS || cudrv_sticky(result))
		return result;
	if (drv->pointer_attribute(base_p, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
				   im->address) != CU_SUCCESS ||
	    drv->pointer_attribute(bytes_p, CU_POINTER_ATTRIBUTE_RANGE_SIZE,
				   im->address) != CU_SUCCESS ||
	    *base_p > im->address || im->address - *base_p >= *bytes_p)
		return result;
	return CU_SUCCESS;
}

static int ipc_open(struct gpu_import *im)
{
	const struct cudrv *drv = &im->device->gpu->drv;
	uint64_t base = 0;
	size_t bytes = 0;
	int result = drv->ipc_open(&im->address, im->handle.ipc,
				   CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
	int r;

	if (result != CU_SUCCESS) {
		im->address = 0;
		return err_pass(ipc_refused(im->device, result));
	}
	r = ipc_check_device(im);
	if (r < 0)
		return err_pass(r);
	result = ipc_range(im, &base, &bytes);
	if (result != CU_SUCCESS)
		return gpu_raise(im->device, result, ERR_IMPORT, "cuMemGetAddressRange");
	im->bytes = bytes - (im->address - base);
	return 0;
}

/* ---- VMM ---- */

static int vmm_refused(struct gpu_device *device, int result, const char *what)
{
	int r = gpu_raise(device, result, ERR_IMPORT, "%s", what);

	if (result == CU_ERROR_OUT_OF_MEMORY || cudrv_sticky(result))
		return err_pass(r);
	return err_prefix(
		r, "the fd is not a handle from cuMemExportToShareableHandle, or its "
		   "allocation has another size or GPU");
}

static int vmm_check(struct gpu_import *im)
{
	const struct gpu_device *device = im->device;
	const struct cudrv *drv = &device->gpu->drv;
	struct cu_mem_prop prop = {0};
	size_t unit = 0;
	int result = drv->vmm_prop(&prop, im->vmm);

	if (result == CU_SUCCESS)
		result = drv->vmm_granularity(&unit, &prop, CU_MEM_GRANULARITY_MINIMUM);
	if (result != CU_SUCCESS)
		return err_pass(vmm_refused(im->device, result, "querying a VMM handle"));
	if (prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
	    prop.location.id != (int)device->number)
		return err_raise(ERR_IMPORT,
				 "the memory is not on %s: name the GPU it was made on",
				 device->id);
	if (unit == 0 || im->handle.bytes % unit != 0)
		return err_raise(
			ERR_IMPORT,
			"allocation: %ju bytes is not a multiple of %zu; pass the size "
			"that was passed to cuMemCreate",
			(uintmax_t)im->handle.bytes, unit);
	return 0;
}

static int access_set(const struct gpu_import *im, const struct gpu_device *device)
{
	const struct cu_mem_access access = {
		.location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)device->number},
		.flags = im->access};

	return im->device->gpu->drv.vmm_access(im->address, im->handle.bytes, &access, 1);
}

static int vmm_map(struct gpu_import *im)
{
	const struct cudrv *drv = &im->device->gpu->drv;
	int result = drv->vmm_reserve(&im->address, im->handle.bytes, 0, 0, 0);

	if (result != CU_SUCCESS) {
		im->address = 0;
		return err_pass(vmm_refused(im->device, result, "cuMemAddressReserve"));
	}
	result = drv->vmm_map(im->address, im->handle.bytes, 0, im->vmm, 0);
	if (result != CU_SUCCESS)
		return err_pass(vmm_refused(im->device, result, "cuMemMap"));
	im->bytes = im->handle.bytes; /* from here on the mapping must be undone */
	im->access = im->writable ? CU_MEM_ACCESS_READWRITE : CU_MEM_ACCESS_READ;
	result = access_set(im, im->device);
	if (!im->writable &&
	    (result == CU_ERROR_NOT_SUPPORTED || result == CU_ERROR_INVALID_VALUE)) {
		im->access = CU_MEM_ACCESS_READWRITE; /* all that the device has */
		result = access_set(im, im->device);
	}
	if (result != CU_SUCCESS)
		return err_pass(vmm_refused(im->device, result, "cuMemSetAccess"));
	return 0;
}

static int vmm_open(struct gpu_import *im)
{
	const struct cudrv *drv = &im->device->gpu->drv;
	int result, r;

	result = drv->vmm_import(&im->vmm, (void *)(intptr_t)im->handle.fd,
				 CU_MEM_HANDLE_TYPE_POSIX_FD);
	if (result != CU_SUCCESS) {
		im->vmm = 0;
		return err_pass(vmm_refused(im->device, result,
					    "cuMemImportFromShareableHandle"));
	}
	r = vmm_check(im);
	if (r == 0)
		r = vmm_map(im);
	return err_pass(r);
}

/* ---- imports ---- */

static int step_close(const struct gpu_import *im)
{
	return im->device->gpu->drv.ipc_close(im->address);
}

static int step_unmap(const struct gpu_import *im)
{
	return im->device->gpu->drv.vmm_unmap(im->address, im->bytes);
}

static int step_unreserve(const struct gpu_import *im)
{
	return im->device->gpu->drv.vmm_unreserve(im->address, im->handle.bytes);
}

static int step_release(const struct gpu_import *im)
{
	return im->device->gpu->drv.vmm_release(im->vmm);
}

/* Once more if it fails: addresses and handles of VMM memory are the process's and
 * would outlive the context. */
static void import_close_step(const struct gpu_import *im, const char *what,
			      int (*step)(const struct gpu_import *im))
{
	int result = step(im);

	if (result == CU_SUCCESS || gpu_device_broken(im->device))
		return; /* with a broken context everything is already freed */
	(void)gpu_raise(im->device, result, ERR_IO, "%s", what);
	log_warn("gpu", im->device->id, "closing an import", "why=\"%s\"",
		 err_last()->text);
	err_clear();
	(void)step(im);
}

/* Undo the steps done, in reverse; the context is current. Remaining memory of the driver
 * is freed with the context. */
static void import_close(struct gpu_import *im)
{
	if (im->handle.kind == GPU_HANDLE_IPC) {
		if (im->address)
			import_close_step(im, "cuIpcCloseMemHandle", step_close);
		return;
	}
	if (im->bytes)
		import_close_step(im, "cuMemUnmap", step_unmap);
	if (im->address)
		import_close_step(im, "cuMemAddressFree", step_unreserve);
	if (im->vmm)
		import_close_step(im, "cuMemRelease", step_release);
}

static int import_open(struct gpu_import *im)
{
	int r = gpu_enter(im->device);

	if (r < 0)
		return err_pass(r);
	if (im->handle.kind == GPU_HANDLE_IPC)
		r = ipc_open(im);
	else
		r = vmm_open(im);
	if (r < 0) {
		struct err why;

		err_take(&why); /* before the clean-up can disturb it */
		import_close(im);
		r = err_reraise(&why);
	}
	gpu_leave(im->device);
	return err_pass(r);
}

static int import_new(struct gpu_device *device, uint64_t owner,
		      const struct gpu_handle *handle, bool writable,
		      struct gpu_import **im_p)
{
	struct gpu_import *im = mem_zalloc(sizeof(*im));

	if (!im)
		return err_pass(-ENOMEM);
	list_init(&im->link);
	im->device = device;
	im->owner = owner;
	im->handle = *handle;
	im->handle.fd = -1;
	im->writable = writable;
	im->refs = 1;
	if (handle->kind == GPU_HANDLE_VMM) {
		im->handle.fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 3);
		if (im->handle.fd < 0) {
			mem_free(im);
			return err_raise_errno(errno, "duplicating the memory's fd");
		}
	}
	*im_p = im;
	return 0;
}

static void import_free(struct gpu_import *im)
{
	mem_closep(&im->handle.fd);
	mem_free(im);
}

static struct gpu_import *import_find(struct gpu_device *device, uint64_t owner,
				      const struct gpu_handle *handle, bool writable)
{
	struct gpu_import *im;

	if (handle->kind != GPU_HANDLE_IPC)
		return NULL; /* an fd does not identify its allocation */
	list_foreach(im, &device->imports, link)
		if (im->handle.kind == GPU_HANDLE_IPC && im->owner == owner &&
		    im->writable == writable &&
		    memcmp(&im->handle.ipc, &handle->ipc, sizeof(handle->ipc)) == 0)
			return im;
	return NULL;
}

static int handle_check(struct gpu *gpu, const struct gpu_handle *handle)
{
	if (handle->kind == GPU_HANDLE_IPC)
		return 0;
	if (!gpu->drv.has[CUDRV_VMM])
		return err_raise(ERR_IMPORT,
				 "kind cuda_vmm: this driver has no %s (CUDA %d.%d)",
				 gpu->drv.missing[CUDRV_VMM], gpu->drv.version / 1000,
				 gpu->drv.version % 1000 / 10);
	if (handle->bytes == 0 || handle->bytes > INT64_MAX)
		return err_raise(ERR_RANGE, "allocation: %ju bytes",
				 (uintmax_t)handle->bytes);
	return 0;
}

int gpu_import(struct gpu *gpu, uint64_t owner, const struct gpu_handle *handle,
	       bool writable, struct gpu_import **import_p)
{
	struct gpu_device *device = NULL;
	struct gpu_import *im = NULL;
	int r = gpu_device_find(gpu, handle->device, &device);

	assert(handle->kind <= GPU_HANDLE_VMM);
	if (r == 0)
		r = handle_check(gpu, handle);
	if (r == 0)
		r = gpu_device_get(device); /* kvd's; closed with the import */
	if (r < 0)
		return err_pass(r);
	pthread_mutex_lock(&device->imports_lock);
	im = import_find(device, owner, handle, writable);
	if (im) {
		im->refs++;
		pthread_mutex_unlock(&device->imports_lock);
		gpu_device_put(device); /* it has one */
		*import_p = im;
		return 0;
	}
	r = import_new(device, owner, handle, writable, &im);
	if (r == 0) {
		r = import_open(im);
		if (r == 0)
			list_push_back(&device->imports, &im->link);
		else
			import_free(im);
	}
	pthread_mutex_unlock(&device->imports_lock);
	if (r < 0) {
		gpu_device_put(device);
		return err_pass(r);
	}
	*import_p = im;
	if (gpu->attends) /* else copies do, when they need them */
		gpu_module_want(device);
	return 0;
}

int gpu_import_dmabuf(struct gpu_import *import, int *fd_p)
{
	struct gpu_device *device = import->device;
	const struct cudrv *drv = &device->gpu->drv;
	int fd = -1, possible = 0, result, r;

	if (!drv->has[CUDRV_DMABUF])
		return err_raise(ERR_IMPORT, "the driver has no %s",
				 drv->missing[CUDRV_DMABUF]);
	result = drv->device_attribute(&possible, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED,
				       device->handle);
	if (result != CU_SUCCESS || !possible)
		return err_raise(ERR_IMPORT, "%s: the driver cannot export dma-bufs here",
				 device->id);
	r = gpu_enter(device);
	if (r < 0)
		return err_pass(r);
	result = drv->range_handle(&fd, import->address, import->bytes,
				   CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0);
	if (result != CU_SUCCESS)
		r = gpu_raise(device, result, ERR_IMPORT, "a dma-buf of %ju bytes of %s",
			      (uintmax_t)import->bytes, device->id);
	else
		*fd_p = fd;
	gpu_leave(device);
	return err_pass(r);
}

static bool vmm_open_to(struct gpu_import *im, const struct gpu_device *device)
{
	const struct cudrv *drv = &device->gpu->drv;
	int possible = 0;

	return drv->has[CUDRV_PEER] &&
	       drv->peer_possible(&possible, device->handle, im->device->handle) ==
		       CU_SUCCESS &&
	       possible && access_set(im, device) == CU_SUCCESS;
}

bool gpu_import_reach(struct gpu_import *im, struct gpu_device *device)
{
	uint32_t bit = UINT32_C(1) << device->number;
	bool open;

	if (im->handle.kind != GPU_HANDLE_VMM || device == im->device)
		return gpu_device_pair(device, im->device);
	pthread_mutex_lock(&im->device->lock);
	if (!(im->asked & bit)) {
		im->asked |= bit;
		if (vmm_open_to(im, device))
			im->open |= bit;
		else
			log_info("gpu", device->id,
				 "copies pass through host memory: no access", "other=%s",
				 im->device->id);
	}
	open = im->open & bit;
	pthread_mutex_unlock(&im->device->lock);
	return open;
}

void gpu_import_unref(struct gpu_import *import)
{
	struct gpu_device *device;
	bool last, entered;

	if (!import)
		return;
	device = import->device;
	pthread_mutex_lock(&device->imports_lock);
	assert(import->refs > 0);
	last = --import->refs == 0;
	if (last) {
		list_remove(&import->link);
		entered = gpu_enter(device) == 0;
		/* VMM needs none; of IPC's the context's own end unmaps it */
		if (entered || import->handle.kind == GPU_HANDLE_VMM)
			import_close(import);
		if (entered)
			gpu_leave(device);
		else
			err_clear();
	}
	pthread_mutex_unlock(&device->imports_lock);
	if (last) {
		import_free(import);
		gpu_device_put(device);
	}
}
