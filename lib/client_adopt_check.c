/* SPDX-License-Identifier: Apache-2.0 */
/*
 * May this memory be moved behind a memfd? For its owner, MADV_DONTNEED on a shared
 * mapping does not zero, fork() does not copy it (the child has a view of it,
 * client_adopt_fork.c), mremap() cannot grow it, and holders of its physical pages (DMA)
 * keep the old ones. An allocator that recycles memory relies on the first, so without
 * `vouched` only whole chunks that malloc mapped for one allocation are accepted: free()
 * unmaps those without any other use. glibc maps every allocation of 32 MiB or more
 * (DEFAULT_MMAP_THRESHOLD_MAX); below that it may be an arena or a raised threshold, so
 * the chunk's own header is read: IS_MMAPPED, and a start and an end on page boundaries.
 * Other allocators store other values there, which cannot match by accident for a range
 * of the right length.
 *
 * The caller must guarantee the rest. The kernel does not report what pins pages; the
 * CUDA driver does, if it is in the process, page by page. RDMA registrations of other
 * libraries cannot be detected.
 */
#include "lib/client_adopt.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <link.h>
#include <string.h>
#include <unistd.h>

#include "lib/client.h"

#define CHUNK_BYTES_MIN (UINT64_C(32) << 20)
#define CHUNK_FLAGS UINT64_C(7)
#define CHUNK_IS_MMAPPED UINT64_C(2)

#define ATTRIBUTE_MEMORY_TYPE 2 /* CU_POINTER_ATTRIBUTE_MEMORY_TYPE */
#define CUDA_INVALID_VALUE 1	/* unknown to the driver, as required */
#define CUDA_NOT_INITIALIZED 3	/* nothing can be registered yet */
#define CUDA_DEINITIALIZED 4

static int client_adopt_check_refuse(const char *what, uint64_t at)
{
	client_error_set(client_error_thread(), KVD_E_IMPORT,
			 "adopt: the memory at %#" PRIx64 " %s", at, what);
	return -KVD_E_IMPORT;
}

/* ---- the map ---------------------------------------------------------------- */

struct walk {
	uint64_t at; /* checked up to here, without a gap */
	uint64_t stack;
};

static int area_check(void *arg, const struct maps_area *area)
{
	struct walk *walk = arg;

	if (area->begin > walk->at)
		return client_adopt_check_refuse("is not mapped", walk->at);
	if (area->shared)
		return client_adopt_check_refuse(
			"is shared already: register it directly (memfd, shm)",
			area->begin);
	if (strstr(area->name, "anon_hugepage"))
		return client_adopt_check_refuse(
			"lies in huge TLB pages, which cannot be moved", area->begin);
	if (area->inode)
		return client_adopt_check_refuse("belongs to a file", area->begin);
	if (strcmp(area->name, "[heap]") == 0)
		return client_adopt_check_refuse(
			"is the heap (brk), which malloc moves and trims", area->begin);
	if (strncmp(area->name, "[stack", 6) == 0 ||
	    (walk->stack >= area->begin && walk->stack < area->end &&
	     walk->stack >= walk->at))
		return client_adopt_check_refuse("is a stack", area->begin);
	if (area->name[0] == '[' && strncmp(area->name, "[anon", 5) != 0)
		return client_adopt_check_refuse("belongs to the kernel", area->begin);
	if (!area->readable || !area->writable)
		return client_adopt_check_refuse("cannot be read and written",
						 area->begin);
	if (area->executable)
		return client_adopt_check_refuse("is executable", area->begin);
	walk->at = area->end;
	return 0;
}

/* A thread's stack merges with neighbours in the map: only its current position is
 * known, and only for the calling thread. */
static int client_adopt_check_map(uint64_t begin, uint64_t end)
{
	uint8_t here;
	struct walk walk = {.at = begin, .stack = (uintptr_t)&here};
	int r;

	if (walk.stack < begin || walk.stack >= end)
		walk.stack = 0;
	r = maps_each(begin, end, area_check, &walk);
	if (r == 0 && walk.at < end)
		r = client_adopt_check_refuse("is not mapped", walk.at);
	return r;
}

/* ---- malloc's header ---------------------------------------------------------- */

struct chunk_words {
	uint64_t before; /* bytes from the start of the mapping to this header */
	uint64_t size;	 /* of the chunk, with flags */
};

/* Malloc's header is in memory that sanitizers protect from reading. */
__attribute__((no_sanitize("address", "thread"))) static struct chunk_words
chunk_words_at(uint64_t header)
{
	const volatile uint64_t *w = (const volatile uint64_t *)(uintptr_t)header;

	return (struct chunk_words){w[0], w[1]};
}

static int chunk_check(uint64_t address, uint64_t bytes, uint64_t page, uint64_t *begin_p,
		       uint64_t *end_p)
{
	static const char *const not_its_own =
		"is not a chunk that malloc mapped for one allocation (of 32 MiB or "
		"more, named by the pointer from malloc); set `vouched` if all of its "
		"pages are yours and no code relies on MADV_DONTNEED to zero them";
	struct chunk_words words;
	uint64_t header = address - sizeof(words), begin, end;
	int r;

	if (address % 16 || address < sizeof(words))
		return client_adopt_check_refuse(not_its_own, address);
	r = client_adopt_check_map(header / page * page, address + 1);
	if (r < 0)
		return r;
	words = chunk_words_at(header);
	begin = header - words.before;
	end = header + (words.size & ~CHUNK_FLAGS);
	if ((words.size & CHUNK_FLAGS) != CHUNK_IS_MMAPPED || words.before > header ||
	    begin % page || end % page || end < address || end - address < bytes ||
	    end - begin < CHUNK_BYTES_MIN || end - address - bytes >= bytes)
		return client_adopt_check_refuse(not_its_own, address);
	*begin_p = begin;
	*end_p = end;
	return 0;
}

/* ---- CUDA --------------------------------------------------------------------- */

typedef int cu_pointer_get_attribute(void *data, int attribute, uint64_t pointer);

static int library_find(struct dl_phdr_info *info, size_t size, void *arg)
{
	(void)size;
	(void)arg;
	return strstr(info->dlpi_name, "/libcuda.so") != NULL;
}

/* Only if the driver is loaded already: then its reply counts. (Checked so that the
 * caller's dlerror() is not changed if it is not.) */
static int cuda_check(uint64_t begin, uint64_t end, uint64_t page)
{
	void *lib = dl_iterate_phdr(library_find, NULL)
			    ? dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)
			    : NULL;
	cu_pointer_get_attribute *get = NULL;
	void *symbol = lib ? dlsym(lib, "cuPointerGetAttribute") : NULL;
	int r = 0;

	memcpy(&get, &symbol, sizeof(get)); /* no cast from object to function in C */
	for (uint64_t at = begin; get && r == 0 && at < end; at += page) {
		unsigned int type = 0;
		int answer = get(&type, ATTRIBUTE_MEMORY_TYPE, at);

		if (answer == CUDA_NOT_INITIALIZED || answer == CUDA_DEINITIALIZED)
			break;
		if (answer == 0)
			r = client_adopt_check_refuse(
				"is registered with CUDA (cudaHostRegister, or its own "
				"allocation): unregister it, adopt, register it again",
				at);
		else if (answer != CUDA_INVALID_VALUE)
			r = client_adopt_check_refuse(
				"may be registered with CUDA: the driver did not "
				"answer; call from a thread with a CUDA context",
				at);
	}
	if (lib)
		dlclose(lib);
	return r;
}

int adopt_check(const struct kvd_adopt_args *args, uint64_t *begin_p, uint64_t *end_p)
{
	uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
	uint64_t address = (uintptr_t)args->address, begin, end;
	int r = 0;

	if (!address || !args->bytes || args->bytes > UINT64_MAX - address - page) {
		client_error_set(client_error_thread(), KVD_E_INVAL,
				 "adopt: address %#" PRIx64 ", bytes %zu", address,
				 args->bytes);
		return -KVD_E_INVAL;
	}
	begin = address / page * page;
	end = (address + args->bytes + page - 1) / page * page;
	if (!args->vouched)
		r = chunk_check(address, args->bytes, page, &begin, &end);
	if (r == 0)
		r = client_adopt_check_map(begin, end);
	if (r == 0)
		r = cuda_check(begin, end, page);
	*begin_p = begin;
	*end_p = end;
	return r;
}
