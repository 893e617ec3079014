/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake driver's memory.
 *
 * An allocation is a memfd. Its device address lies in one reserved stretch of
 * addresses without access, of which no byte is handed out twice; the fake
 * itself goes through a second mapping, the alias. So memory that was freed,
 * closed or unmapped can be told from any other for good.
 *
 * A handle of CUDA IPC names the exporter's process, when it began and the memfd
 * in it; opening goes through /proc, so it fails for the reasons for which the
 * real one fails: the exporter is gone, or in another PID namespace. The file's
 * name tells the device. A mapping outlives its exporter: that is what the
 * driver is expected to do, and what hardware has to show.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/gpu/fake_cuda.h"

#define UNIT (UINT64_C(2) << 20)
#define HANDLE_MAGIC 0x43445546u

enum kind { MEM_OWN, MEM_IPC, MEM_VMM, MEM_RESERVED };

struct mem {
	struct list link;
	enum kind kind;
	uint64_t address, bytes;
	uint8_t *alias;
	int fd;
	int device;
	bool writable;
	unsigned int open_to; /* VMM: bit n: device n, by cuMemSetAccess */
	pid_t pid;	      /* IPC: whose */
	uint64_t started;
	int foreign_fd;
	unsigned int opens; /* IPC: to be closed as often */
};

struct handle {
	uint32_t magic;
	int32_t fd;
	int64_t pid;
	uint64_t started;
	uint64_t bytes;
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct list mems = {&mems, &mems};
static uint64_t arena, arena_used;

void fake_memory_lock(void)
{
	pthread_rwlock_rdlock(&lock);
}

void fake_memory_lock_all(void)
{
	pthread_rwlock_wrlock(&lock);
}

void fake_memory_unlock(void)
{
	pthread_rwlock_unlock(&lock);
}

/* ---- addresses ---- */

/* The lock is held for writing. 0: none left. */
static uint64_t arena_take(uint64_t bytes)
{
	uint64_t at;

	if (!arena) {
		void *map = mmap(NULL, FAKE_ARENA_BYTES, PROT_NONE,
				 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

		if (map == MAP_FAILED)
			return 0;
		arena = ((uintptr_t)map + UNIT - 1) & ~(UNIT - 1);
	}
	at = arena + arena_used;
	bytes = (bytes + UNIT - 1) & ~(UNIT - 1);
	if (bytes > FAKE_ARENA_BYTES - UNIT - arena_used)
		return 0;
	arena_used += bytes + UNIT; /* never two that touch */
	return at;
}

bool fake_is_device(uint64_t address)
{
	return arena && address >= arena && address - arena < FAKE_ARENA_BYTES;
}

static struct mem *mem_find(uint64_t address)
{
	struct mem *m;

	list_foreach(m, &mems, link)
		if (address >= m->address && address - m->address < m->bytes)
			return m;
	return NULL;
}

/* The peer access of contexts is for memory of cuMemAlloc; what cuMemCreate made has
 * its own, by device (cuda.h: CUDA_UNIFIED_autopeerregister, cuMemSetAccess). */
bool fake_open_to(const struct cu_ctx *ctx, uint64_t address)
{
	const struct mem *m = mem_find(address);
	unsigned int peers = __atomic_load_n(&ctx->peers, __ATOMIC_SEQ_CST);

	if (!m)
		return false;
	if (m->kind == MEM_VMM)
		return m->open_to & 1u << ctx->device;
	return m->device == ctx->device || peers & 1u << m->device;
}

uint8_t *fake_reach(uint64_t address, uint64_t bytes, bool writing)
{
	struct mem *m;

	if (!fake_is_device(address))
		return writing && fake_is_read_only(address)
			       ? NULL
			       : (uint8_t *)(uintptr_t)address;
	m = mem_find(address);
	if (!m || !m->alias || bytes > m->bytes - (address - m->address) ||
	    (writing && !m->writable))
		return NULL;
	return m->alias + (address - m->address);
}

int fake_cuda_file(uint64_t address, int *fd_p, uint64_t *offset_p)
{
	struct mem *m;

	fake_memory_lock();
	m = mem_find(address);
	if (m && m->fd >= 0) {
		*fd_p = m->fd;
		*offset_p = address - m->address;
	}
	fake_memory_unlock();
	return m && m->fd >= 0 ? CU_SUCCESS : CU_ERROR_INVALID_VALUE;
}

/* ---- files ---- */

static int file_new(int device, uint64_t bytes)
{
	char name[32];
	int fd;

	snprintf(name, sizeof(name), "fakecuda-%d", fake_physical(device));
	fd = memfd_create(name, MFD_CLOEXEC);
	if (fd >= 0 && ftruncate(fd, (off_t)bytes) < 0) {
		close(fd);
		return -1;
	}
	return fd;
}

/* The device and size of a fake's file; false for any other file. */
static bool file_look(int fd, int *device_p, uint64_t *bytes_p)
{
	char path[64], name[128];
	struct stat st;
	int physical;
	ssize_t n;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	n = readlink(path, name, sizeof(name) - 1);
	if (n <= 0 || fstat(fd, &st) < 0)
		return false;
	name[n] = '\0';
	if (sscanf(name, "/memfd:fakecuda-%d", &physical) != 1)
		return false;
	*device_p = fake_device_of(physical);
	*bytes_p = (uint64_t)st.st_size;
	return true;
}

uint64_t fake_started(pid_t pid)
{
	char path[64], text[512], *at;
	unsigned long long started = 0;
	size_t n;
	FILE *f;

	snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
	f = fopen(path, "re");
	if (!f)
		return 0;
	n = fread(text, 1, sizeof(text) - 1, f);
	fclose(f);
	text[n] = '\0';
	at = strrchr(text, ')');
	for (int field = 2; at && field < 22; field++)
		at = strchr(at + 1, ' ');
	if (at)
		sscanf(at, " %llu", &started);
	return started;
}

int fake_foreign_open(pid_t pid, uint64_t began, int fd)
{
	char path[64];

	if (fake_started(pid) != began)
		return -1;
	snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)pid, fd);
	return open(path, O_RDWR | O_CLOEXEC);
}

/* ---- mappings ---- */

/* Takes the fd. The lock is held for writing. */
static int mem_new(enum kind kind, int device, int fd, uint64_t bytes, uint64_t address,
		   bool writable, struct mem **mem_p)
{
	struct mem *m = calloc(1, sizeof(*m));
	void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (!m || map == MAP_FAILED || !address) {
		if (map != MAP_FAILED)
			munmap(map, bytes);
		free(m);
		close(fd);
		return CU_ERROR_OUT_OF_MEMORY;
	}
	*m = (struct mem){.kind = kind,
			  .address = address,
			  .bytes = bytes,
			  .alias = map,
			  .fd = fd,
			  .device = device,
			  .writable = writable};
	list_push_back(&mems, &m->link);
	fake_count(1);
	*mem_p = m;
	return CU_SUCCESS;
}

static void mem_drop(struct mem *m)
{
	list_remove(&m->link);
	if (m->alias)
		munmap(m->alias, m->bytes);
	if (m->fd >= 0)
		close(m->fd);
	free(m);
	fake_count(-1);
}

void fake_memory_drop(int device)
{
	struct mem *m;

	pthread_rwlock_wrlock(&lock);
	list_foreach_safe(m, &mems, link)
		if (m->device == device && m->kind != MEM_RESERVED)
			mem_drop(m);
	fake_host_drop(device);
	pthread_rwlock_unlock(&lock);
}

/* ---- plain memory and IPC ---- */

int cuMemAlloc_v2(uint64_t *address_p, size_t bytes)
{
	struct mem *m = NULL;
	int fd, result;

	ENTER(cuMemAlloc_v2);
	if (!bytes)
		return CU_ERROR_INVALID_VALUE;
	fd = file_new(fake_current()->device, bytes);
	if (fd < 0)
		return CU_ERROR_OUT_OF_MEMORY;
	pthread_rwlock_wrlock(&lock);
	result = mem_new(MEM_OWN, fake_current()->device, fd, bytes, arena_take(bytes),
			 true, &m);
	pthread_rwlock_unlock(&lock);
	if (result == CU_SUCCESS)
		*address_p = m->address;
	return result;
}

static int mem_end(uint64_t address, enum kind kind)
{
	struct mem *m;
	int result = CU_ERROR_INVALID_VALUE;

	fake_streams_drain(fake_current());
	pthread_rwlock_wrlock(&lock);
	m = mem_find(address);
	if (m && m->kind == kind && m->address == address) {
		mem_drop(m);
		result = CU_SUCCESS;
	}
	pthread_rwlock_unlock(&lock);
	return result;
}

int cuMemFree_v2(uint64_t address)
{
	ENTER(cuMemFree_v2);
	return mem_end(address, MEM_OWN);
}

int cuIpcGetMemHandle(struct cu_ipc_mem *handle_p, uint64_t address)
{
	struct handle handle = {.magic = HANDLE_MAGIC, .pid = getpid()};
	struct mem *m;

	ENTER(cuIpcGetMemHandle);
	if (fake_env("FAKE_CUDA_MIG", 0))
		return CU_ERROR_NOT_SUPPORTED;
	fake_memory_lock();
	m = mem_find(address);
	if (m && m->kind == MEM_OWN && m->address == address) {
		handle.fd = m->fd;
		handle.bytes = m->bytes;
	}
	fake_memory_unlock();
	if (!handle.bytes) /* none of memory of cuMemCreate; and not "base" */
		return CU_ERROR_INVALID_VALUE;
	handle.started = fake_started(getpid());
	memset(handle_p, 0, sizeof(*handle_p));
	memcpy(handle_p, &handle, sizeof(handle));
	return CU_SUCCESS;
}

static struct mem *ipc_find(const struct handle *handle)
{
	struct mem *m;

	list_foreach(m, &mems, link)
		if (m->kind == MEM_IPC && m->pid == handle->pid &&
		    m->started == handle->started && m->foreign_fd == handle->fd)
			return m;
	return NULL;
}

/* Once more: counted, at the same address; drivers of before CUDA 11 refused it. Takes
 * the fd. The lock is held for writing. */
static int ipc_map(const struct handle *handle, int device, int fd, uint64_t *address_p)
{
	struct mem *m = ipc_find(handle);
	int result = CU_SUCCESS;

	if (m) {
		close(fd);
#ifdef FAKE_CUDA_OLD
		return CU_ERROR_ALREADY_MAPPED;
#endif
	} else {
		result = mem_new(MEM_IPC, device, fd, handle->bytes,
				 arena_take(handle->bytes), true, &m);
	}
	if (result != CU_SUCCESS)
		return result;
	m->pid = (pid_t)handle->pid;
	m->started = handle->started;
	m->foreign_fd = handle->fd;
	m->opens++;
	*address_p = m->address;
	return CU_SUCCESS;
}

int cuIpcOpenMemHandle_v2(uint64_t *address_p, struct cu_ipc_mem opaque,
			  unsigned int flags)
{
	struct handle handle;
	uint64_t bytes = 0;
	int fd, device = -1, result;

	ENTER(cuIpcOpenMemHandle_v2);
	memcpy(&handle, &opaque, sizeof(handle));
	if (fake_env("FAKE_CUDA_MIG", 0))
		return CU_ERROR_NOT_SUPPORTED;
	if (handle.magic != HANDLE_MAGIC || flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
		return CU_ERROR_INVALID_VALUE;
	if (handle.pid == getpid())
		return CU_ERROR_INVALID_CONTEXT;
	fd = fake_foreign_open((pid_t)handle.pid, handle.started, handle.fd);
	if (fd < 0)
		return CU_ERROR_INVALID_VALUE;
	if (!file_look(fd, &device, &bytes) || bytes != handle.bytes || device < 0) {
		close(fd);
		return CU_ERROR_INVALID_VALUE;
	}
	pthread_rwlock_wrlock(&lock);
	result = ipc_map(&handle, device, fd, address_p);
	pthread_rwlock_unlock(&lock);
	return result;
}

int cuIpcCloseMemHandle(uint64_t address)
{
	bool more = false;
	struct mem *m;

	ENTER(cuIpcCloseMemHandle);
	pthread_rwlock_wrlock(&lock);
	m = mem_find(address);
	if (m && m->kind == MEM_IPC && m->address == address && m->opens > 1) {
		m->opens--;
		more = true;
	}
	pthread_rwlock_unlock(&lock);
	return more ? CU_SUCCESS : mem_end(address, MEM_IPC);
}

int cuMemGetAddressRange_v2(uint64_t *base_p, size_t *bytes_p, uint64_t address)
{
	struct mem *m;

	ENTER(cuMemGetAddressRange_v2);
	fake_memory_lock();
	m = mem_find(address);
	if (m) {
		*base_p = m->address;
		*bytes_p = m->bytes;
	}
	fake_memory_unlock();
	return m ? CU_SUCCESS : CU_ERROR_NOT_FOUND;
}

/* Needs no context, unlike cuMemGetAddressRange(). */
int cuPointerGetAttribute(void *value_p, int which, uint64_t address)
{
	struct mem *m;
	bool known = true;

	ENTER_BARE(cuPointerGetAttribute);
	fake_memory_lock();
	m = mem_find(address);
	if (m && m->kind != MEM_VMM && which == CU_POINTER_ATTRIBUTE_CONTEXT)
		*(struct cu_ctx **)value_p = fake_ctx(m->device);
	else if (m && which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
		*(int *)value_p = m->device;
	else if (m && which == CU_POINTER_ATTRIBUTE_RANGE_START_ADDR)
		*(uint64_t *)value_p = m->address;
	else if (m && which == CU_POINTER_ATTRIBUTE_RANGE_SIZE)
		*(size_t *)value_p = m->bytes;
	else
		known = false;
	fake_memory_unlock();
	return known ? CU_SUCCESS : CU_ERROR_INVALID_VALUE;
}

int cuMemGetInfo_v2(size_t *free_p, size_t *total_p)
{
	ENTER(cuMemGetInfo_v2);
	*total_p = (size_t)16 << 30;
	*free_p = (size_t)15 << 30;
	return CU_SUCCESS;
}

/* ---- VMM ---- */

#ifndef FAKE_CUDA_OLD
/* what cuMemCreate and an import give */
struct vmm {
	struct list link;
	uint64_t id;
	int fd;
	int device;
	uint64_t bytes;
	unsigned int maps;
	bool released;
};

static struct list vmms = {&vmms, &vmms};
static uint64_t next_vmm = 0x1000;

static struct vmm *vmm_find(uint64_t id)
{
	struct vmm *v;

	list_foreach(v, &vmms, link)
		if (v->id == id && !v->released)
			return v;
	return NULL;
}

static void vmm_settle(struct vmm *v)
{
	if (!v->released || v->maps)
		return;
	list_remove(&v->link);
	close(v->fd);
	free(v);
}

/* Takes the fd. */
static int vmm_new(int fd, int device, uint64_t bytes, uint64_t *handle_p)
{
	struct vmm *v = calloc(1, sizeof(*v));

	if (!v) {
		close(fd);
		return CU_ERROR_OUT_OF_MEMORY;
	}
	pthread_rwlock_wrlock(&lock);
	*v = (struct vmm){.id = next_vmm++, .fd = fd, .device = device, .bytes = bytes};
	list_push_back(&vmms, &v->link);
	*handle_p = v->id;
	pthread_rwlock_unlock(&lock);
	fake_count(1);
	return CU_SUCCESS;
}

int cuMemCreate(uint64_t *handle_p, size_t bytes, const struct cu_mem_prop *prop,
		unsigned long long flags)
{
	int fd;

	ENTER_BARE(cuMemCreate);
	(void)flags;
	if (!bytes || bytes % UNIT || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CU_ERROR_INVALID_VALUE;
	fd = file_new(prop->location.id, bytes);
	if (fd < 0)
		return CU_ERROR_OUT_OF_MEMORY;
	return vmm_new(fd, prop->location.id, bytes, handle_p);
}

int cuMemExportToShareableHandle(void *fd_p, uint64_t handle, int type,
				 unsigned long long flags)
{
	struct vmm *v;
	int fd = -1;

	ENTER_BARE(cuMemExportToShareableHandle);
	(void)flags;
	fake_memory_lock();
	v = vmm_find(handle);
	if (v && type == CU_MEM_HANDLE_TYPE_POSIX_FD)
		fd = fcntl(v->fd, F_DUPFD_CLOEXEC, 3);
	fake_memory_unlock();
	if (fd < 0)
		return CU_ERROR_INVALID_VALUE;
	*(int *)fd_p = fd;
	return CU_SUCCESS;
}

int cuMemImportFromShareableHandle(uint64_t *handle_p, void *os_handle, int type)
{
	int device = -1, fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 3);
	uint64_t bytes = 0;
	int result = fake_enter("cuMemImportFromShareableHandle", false);

	if (!result && (fd < 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FD ||
			!file_look(fd, &device, &bytes) || device < 0))
		result = CU_ERROR_INVALID_VALUE;
	if (result) {
		if (fd >= 0)
			close(fd);
		return result;
	}
	return vmm_new(fd, device, bytes, handle_p);
}

int cuMemRelease(uint64_t handle)
{
	struct vmm *v;

	ENTER_BARE(cuMemRelease);
	pthread_rwlock_wrlock(&lock);
	v = vmm_find(handle);
	if (v) {
		v->released = true;
		vmm_settle(v);
		fake_count(-1);
	}
	pthread_rwlock_unlock(&lock);
	return v ? CU_SUCCESS : CU_ERROR_INVALID_VALUE;
}

int cuMemGetAllocationPropertiesFromHandle(struct cu_mem_prop *prop_p, uint64_t handle)
{
	struct vmm *v;

	ENTER_BARE(cuMemGetAllocationPropertiesFromHandle);
	fake_memory_lock();
	v = vmm_find(handle);
	if (v)
		*prop_p = (struct cu_mem_prop){
			.type = CU_MEM_ALLOCATION_TYPE_PINNED,
			.handle_types = CU_MEM_HANDLE_TYPE_POSIX_FD,
			.location = {CU_MEM_LOCATION_TYPE_DEVICE, v->device}};
	fake_memory_unlock();
	return v ? CU_SUCCESS : CU_ERROR_INVALID_VALUE;
}

int cuMemGetAllocationGranularity(size_t *bytes_p, const struct cu_mem_prop *prop,
				  int which)
{
	ENTER_BARE(cuMemGetAllocationGranularity);
	(void)prop;
	(void)which;
	*bytes_p = UNIT;
	return CU_SUCCESS;
}

int cuMemAddressReserve(uint64_t *address_p, size_t bytes, size_t align, uint64_t hint,
			unsigned long long flags)
{
	struct mem *m = calloc(1, sizeof(*m));
	int result = fake_enter("cuMemAddressReserve", false);

	(void)align;
	(void)hint;
	if (!result && (!m || !bytes || bytes % UNIT || flags))
		result = CU_ERROR_INVALID_VALUE;
	if (result) {
		free(m);
		return result;
	}
	pthread_rwlock_wrlock(&lock);
	*m = (struct mem){.kind = MEM_RESERVED,
			  .address = arena_take(bytes),
			  .bytes = bytes,
			  .fd = -1,
			  .device = -1};
	list_push_back(&mems, &m->link);
	*address_p = m->address;
	pthread_rwlock_unlock(&lock);
	fake_count(1);
	return CU_SUCCESS;
}

static struct mem *mem_exact(uint64_t address, uint64_t bytes, enum kind kind)
{
	struct mem *m;

	list_foreach(m, &mems, link)
		if (m->kind == kind && m->address == address && m->bytes == bytes)
			return m;
	return NULL;
}

int cuMemAddressFree(uint64_t address, size_t bytes)
{
	struct mem *m;

	ENTER_BARE(cuMemAddressFree);
	pthread_rwlock_wrlock(&lock);
	m = mem_exact(address, bytes, MEM_RESERVED);
	if (m)
		mem_drop(m);
	pthread_rwlock_unlock(&lock);
	return m ? CU_SUCCESS : CU_ERROR_INVALID_VALUE;
}

int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle,
	     unsigned long long flags)
{
	int result = CU_ERROR_INVALID_VALUE;
	struct mem *m = NULL, *reserved;
	struct vmm *v;

	ENTER_BARE(cuMemMap);
	pthread_rwlock_wrlock(&lock);
	v = vmm_find(handle);
	reserved = mem_exact(address, bytes, MEM_RESERVED);
	if (v && reserved && v->bytes == bytes && !offset && !flags)
		result = mem_new(MEM_VMM, v->device, fcntl(v->fd, F_DUPFD_CLOEXEC, 3),
				 bytes, address, false, &m);
	if (result == CU_SUCCESS) { /* found before its reservation */
		list_remove(&m->link);
		list_push_front(&mems, &m->link);
		munmap(m->alias, m->bytes);
		m->alias = NULL; /* until cuMemSetAccess */
	}
	pthread_rwlock_unlock(&lock);
	return result;
}

int cuMemUnmap(uint64_t address, size_t bytes)
{
	struct mem *m;

	ENTER_BARE(cuMemUnmap);
	for (int i = 0; i < fake_device_count(); i++)
		fake_streams_drain(fake_ctx(i));
	pthread_rwlock_wrlock(&lock);
	m = mem_exact(address, bytes, MEM_VMM);
	if (m)
		mem_drop(m);
	pthread_rwlock_unlock(&lock);
	return m ? CU_SUCCESS : CU_ERROR_INVALID_VALUE;
}

static int access_set(struct mem *m, const struct cu_mem_access *access)
{
	int device = access->location.id;

	if (access->location.type != CU_MEM_LOCATION_TYPE_DEVICE || device < 0 ||
	    device >= fake_device_count() ||
	    (device != m->device && fake_env("FAKE_CUDA_NO_PEER", 0)))
		return CU_ERROR_INVALID_DEVICE;
	if (!m->alias) {
		void *map = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
				 m->fd, 0);

		if (map == MAP_FAILED)
			return CU_ERROR_OUT_OF_MEMORY;
		m->alias = map;
	}
	m->open_to |= 1u << device;
	m->writable = access->flags == CU_MEM_ACCESS_READWRITE;
	return CU_SUCCESS;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const struct cu_mem_access *access,
		   size_t count)
{
	int result = CU_ERROR_INVALID_VALUE;
	struct mem *m;

	ENTER_BARE(cuMemSetAccess);
	pthread_rwlock_wrlock(&lock);
	m = mem_exact(address, bytes, MEM_VMM);
	if (m && count == 1)
		result = access_set(m, access);
	pthread_rwlock_unlock(&lock);
	return result;
}

/* What this process has mapped itself; memory that came by CUDA IPC has none. */
int cuMemGetHandleForAddressRange(void *handle_p, uint64_t address, size_t bytes,
				  int type, unsigned long long flags)
{
	int result = CU_ERROR_INVALID_VALUE, fd = -1;
	struct mem *m;

	ENTER(cuMemGetHandleForAddressRange);
	if (type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags || address % 4096 ||
	    bytes % 4096)
		return CU_ERROR_INVALID_VALUE;
	fake_memory_lock();
	m = mem_find(address);
	if (m && m->kind == MEM_IPC)
		result = CU_ERROR_NOT_SUPPORTED;
	else if (m && m->address == address && m->bytes == bytes)
		fd = fcntl(m->fd, F_DUPFD_CLOEXEC, 3);
	fake_memory_unlock();
	if (fd < 0)
		return result;
	*(int *)handle_p = fd;
	return CU_SUCCESS;
}
#endif
