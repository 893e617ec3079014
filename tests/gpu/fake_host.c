/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The fake driver's host memory: what it allocated itself, and what was registered.
 *
 * Registering is as cuda.h has it, on a machine as most are (x86, no tables of pages
 * shared with the processor): a kernel reaches what was registered with _DEVICEMAP and
 * nothing else; memory mapped for reading alone is refused, and _READ_ONLY, which would
 * take it, is not supported (FAKE_CUDA_READ_ONLY_HOST=1: it is); no byte is registered
 * twice. The lock is that of fake_memory.c.
 */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/gpu/fake_cuda.h"

#define ALLOC_FLAGS 7u /* portable, devicemap, writecombined */

struct host {
	struct list link;
	uint64_t address, bytes;
	int device;
	bool own;	    /* of cuMemHostAlloc */
	unsigned int flags; /* of cuMemHostRegister */
};

static struct list hosts = {&hosts, &hosts};

static bool holds(const struct host *h, uint64_t address, uint64_t bytes)
{
	return address >= h->address && address - h->address < h->bytes &&
	       bytes <= h->bytes - (address - h->address);
}

bool fake_is_pinned(uint64_t address, uint64_t bytes)
{
	struct host *h;

	list_foreach(h, &hosts, link)
		if (holds(h, address, bytes))
			return true;
	return false;
}

bool fake_is_mapped(uint64_t address, uint64_t bytes, bool writing)
{
	struct host *h;

	list_foreach(h, &hosts, link)
		if (holds(h, address, bytes) &&
		    (h->own || (h->flags & CU_MEMHOSTREGISTER_DEVICEMAP)))
			return !writing || !(h->flags & CU_MEMHOSTREGISTER_READ_ONLY);
	return false;
}

bool fake_is_read_only(uint64_t address)
{
	struct host *h;

	list_foreach(h, &hosts, link)
		if (holds(h, address, 1))
			return (h->flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
	return false;
}

static bool overlaps(uint64_t address, uint64_t bytes)
{
	struct host *h;

	list_foreach(h, &hosts, link)
		if (address < h->address + h->bytes && h->address < address + bytes)
			return true;
	return false;
}

/* The lock is held for writing. */
static void host_drop(struct host *h)
{
	list_remove(&h->link);
	if (h->own)
		munmap((void *)(uintptr_t)h->address, h->bytes);
	free(h);
	fake_count(-1);
}

void fake_host_drop(int device)
{
	struct host *h;

	list_foreach_safe(h, &hosts, link)
		if (h->device == device)
			host_drop(h);
}

static int host_note(uint64_t address, uint64_t bytes, bool own, unsigned int flags)
{
	struct host *h = calloc(1, sizeof(*h));
	int result = CU_SUCCESS;

	if (!h)
		return CU_ERROR_OUT_OF_MEMORY;
	*h = (struct host){.address = address,
			   .bytes = bytes,
			   .device = fake_current()->device,
			   .own = own,
			   .flags = flags};
	fake_memory_lock_all();
	if (overlaps(address, bytes))
		result = CU_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
	else
		list_push_back(&hosts, &h->link);
	fake_memory_unlock();
	if (result != CU_SUCCESS)
		free(h);
	else
		fake_count(1);
	return result;
}

static int host_forget(uint64_t address, bool own)
{
	int result = CU_ERROR_HOST_MEMORY_NOT_REGISTERED;
	struct host *h;

	fake_memory_lock_all();
	list_foreach_safe(h, &hosts, link) {
		if (h->own != own || h->address != address)
			continue;
		host_drop(h);
		result = CU_SUCCESS;
		break;
	}
	fake_memory_unlock();
	return result;
}

int cuMemHostAlloc(void **base_p, size_t bytes, unsigned int flags)
{
	void *map;
	int result;

	ENTER(cuMemHostAlloc);
	if (!bytes || (flags & ~ALLOC_FLAGS))
		return CU_ERROR_INVALID_VALUE;
	map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		   0);
	if (map == MAP_FAILED)
		return CU_ERROR_OUT_OF_MEMORY;
	result = host_note((uintptr_t)map, bytes, true, 0);
	if (result == CU_SUCCESS)
		*base_p = map;
	else
		munmap(map, bytes);
	return result;
}

int cuMemFreeHost(void *base)
{
	ENTER(cuMemFreeHost);
	return host_forget((uintptr_t)base, true);
}

/* Every page of it is there, for reading or for writing. */
static bool pages_are(uint64_t address, uint64_t bytes, bool writable)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t begin = address / page * page;
	uint64_t end = (address + bytes + page - 1) / page * page;

	return madvise((void *)(uintptr_t)begin, end - begin,
		       writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0;
}

int cuMemHostRegister_v2(void *base, size_t bytes, unsigned int flags)
{
	bool read_only = flags & CU_MEMHOSTREGISTER_READ_ONLY;

	ENTER(cuMemHostRegister_v2);
	if (!base || !bytes ||
	    (flags &
	     ~(unsigned int)(CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP |
			     CU_MEMHOSTREGISTER_READ_ONLY)))
		return CU_ERROR_INVALID_VALUE;
	if (read_only && !fake_env("FAKE_CUDA_READ_ONLY_HOST", 0))
		return CU_ERROR_NOT_SUPPORTED;
	if (!pages_are((uintptr_t)base, bytes, !read_only))
		return CU_ERROR_INVALID_VALUE;
	return host_note((uintptr_t)base, bytes, false, flags);
}

int cuMemHostGetDevicePointer_v2(uint64_t *address_p, void *host, unsigned int flags)
{
	bool mapped;

	ENTER(cuMemHostGetDevicePointer_v2);
	fake_memory_lock();
	mapped = fake_is_mapped((uintptr_t)host, 1, false);
	fake_memory_unlock();
	if (!mapped || flags)
		return CU_ERROR_INVALID_VALUE;
	*address_p = (uintptr_t)host;
	return CU_SUCCESS;
}

int cuMemHostUnregister(void *base)
{
	ENTER(cuMemHostUnregister);
	return host_forget((uintptr_t)base, false);
}
