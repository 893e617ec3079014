/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Cache memory in huge pages, with any shmem_enabled of the machine. The first touch of
 * a memfd by another process costs 1 µs per 4 KiB page, so the pages are created here,
 * where they are charged to the engine that needs them.
 *
 * MADV_COLLAPSE (Linux 6.1) makes a huge page of a range on request, even with
 * transparent huge pages for shared memory switched off, if map and file are 2
 * MiB-aligned and the range has at least one page. So one page is populated, then the
 * range collapsed, which allocates the huge page without the other 511 small ones: a
 * third of the time (docs/runs). If that is refused, the range is populated page by page.
 * Each collapse starts with a visit to every core, which can take seconds when all are
 * busy, so all collapses share a time limit; after it pages stay small.
 * MADV_POPULATE_WRITE (5.14) instead of a loop of writes: a full tmpfs or memory group is
 * then an error and not a SIGBUS.
 */
#include "daemon/base/clock.h"
#include "lib/client.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define HUGE_BYTES ((size_t)2 << 20)
#define COLLAPSE_NS UINT64_C(300000000)
#define COLLAPSE_NS_PER_BYTE 2u /* 2 s per GiB; several times the usual time */

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif

void *client_memory_map(int fd, size_t bytes)
{
	char *room = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	size_t skip;
	void *at;

	if (room == MAP_FAILED)
		return NULL;
	skip = (HUGE_BYTES - (uintptr_t)room % HUGE_BYTES) % HUGE_BYTES;
	at = mmap(room + skip, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd,
		  0);
	if (at == MAP_FAILED) {
		munmap(room, bytes + HUGE_BYTES);
		return NULL;
	}
	if (skip)
		munmap(room, skip);
	if (skip < HUGE_BYTES)
		munmap(room + skip + bytes, HUGE_BYTES - skip);
	return at;
}

/* EFAULT means a fault that would have been SIGBUS. */
static int populate(void *at, size_t bytes)
{
	while (madvise(at, bytes, MADV_POPULATE_WRITE) < 0) {
		if (errno == EFAULT || errno == ENOMEM || errno == ENOSPC)
			return -KVD_E_NOMEM;
		if (errno != EINTR && errno != EAGAIN)
			return -KVD_E_IO;
	}
	return 0;
}

static int (*collapse_by)(void *at, size_t bytes); /* set by tests */

void client_memory_with(int (*collapse)(void *at, size_t bytes))
{
	collapse_by = collapse;
}

static int collapse(void *at, size_t bytes)
{
	return collapse_by ? collapse_by(at, bytes) : madvise(at, bytes, MADV_COLLAPSE);
}

int client_memory_fill(void *at, size_t bytes, size_t *huge_bytes_p)
{
	uint64_t until = clock_ns() + COLLAPSE_NS + bytes * COLLAPSE_NS_PER_BYTE;
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	for (char *p = at; p < (char *)at + bytes; p += HUGE_BYTES) {
		bool in_time = clock_ns() < until;
		int r = in_time ? populate(p, page) : 0;

		if (r)
			return r;
		if (in_time && !collapse(p, HUGE_BYTES)) {
			*huge_bytes_p += HUGE_BYTES;
			continue;
		}
		r = populate(p, HUGE_BYTES);
		if (r)
			return r;
	}
	return 0;
}

int client_memory_present(int fd, uint64_t offset, size_t bytes)
{
	const uint64_t skip = offset % (uint64_t)sysconf(_SC_PAGESIZE);
	char path[32];
	cleanup_close int own = -1; /* a separate file position */
	int advice = MADV_POPULATE_WRITE, prot = PROT_READ | PROT_WRITE, r = 0;
	off_t hole;
	char *at;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	own = open(path, O_RDONLY | O_CLOEXEC);
	hole = lseek(own, (off_t)offset, SEEK_HOLE);
	if (own < 0 || hole < 0 || (uint64_t)hole >= offset + bytes)
		return 0;
	at = mmap(NULL, bytes + skip, prot, MAP_SHARED, fd, (off_t)(offset - skip));
	if (at == MAP_FAILED) { /* sealed, or opened read-only */
		advice = MADV_POPULATE_READ;
		prot = PROT_READ;
		at = mmap(NULL, bytes + skip, prot, MAP_SHARED, fd,
			  (off_t)(offset - skip));
	}
	if (at == MAP_FAILED)
		return 0;
	while (madvise(at, bytes + skip, advice) < 0) {
		if (errno == EINTR || errno == EAGAIN)
			continue;
		r = errno == EFAULT || errno == ENOMEM || errno == ENOSPC ? -KVD_E_NOMEM
									  : 0;
		break;
	}
	munmap(at, bytes + skip);
	return r;
}

static int memory_failed(struct kvd_memory *m, int r, const char *what)
{
	int no = errno;

	kvd_memory_free(m);
	if (!r)
		r = no == ENOMEM || no == ENOSPC || no == EMFILE ? -KVD_E_NOMEM
								 : -KVD_E_IO;
	client_error_set(client_error_thread(), -r, "%s: %s", what, strerror(no));
	return r;
}

int kvd_memory_alloc(size_t bytes, const char *name, struct kvd_memory *memory_p)
{
	struct kvd_memory m = {.fd = -1};
	int r;

	*memory_p = m;
	if (!bytes || bytes > SIZE_MAX / 2) {
		client_error_set(client_error_thread(), KVD_E_INVAL,
				 "bytes: must be 1 to %zu", (size_t)SIZE_MAX / 2);
		return -KVD_E_INVAL;
	}
	m.bytes = (bytes + HUGE_BYTES - 1) / HUGE_BYTES * HUGE_BYTES;
	m.fd = memfd_create(name ? name : "kvd", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	if (m.fd < 0)
		return memory_failed(&m, 0, "memfd_create");
	if (ftruncate(m.fd, (off_t)m.bytes) < 0 ||
	    fcntl(m.fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
		return memory_failed(&m, 0, "size and seals of the memfd");
	m.address = client_memory_map(m.fd, m.bytes);
	if (!m.address)
		return memory_failed(&m, 0, "mmap");
	r = client_memory_fill(m.address, m.bytes, &m.huge_bytes);
	if (r)
		return memory_failed(&m, r, "populate");
	*memory_p = m;
	return 0;
}

void kvd_memory_free(struct kvd_memory *memory)
{
	if (memory->address)
		munmap(memory->address, memory->bytes);
	mem_closep(&memory->fd);
	*memory = (struct kvd_memory){.fd = -1};
}
