/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moving memory behind a memfd while other threads use it.
 *
 * Copying a range and mapping the copy over it loses every store in between (38 237 in
 * one trial). So the range is moved in slices of 2 MiB, and for each:
 *
 *   fill     allocate the pages of the memfd's slice, huge ones where possible
 *   present  make every page of the old slice present: only present pages can be
 *            write-protected
 *   protect  userfaultfd write-protect: from here on a store waits in the kernel,
 *            loads continue
 *   copy     no store can change the slice
 *   replace  mmap(MAP_FIXED) of the memfd's slice: a load always finds memory,
 *            faults wait for the map's lock
 *   wake     a waiting thread faults again, now in the new slice, and stores there
 *
 * The messages of the userfaultfd are not read: a fault is resolved by the wake, which
 * always follows. A slice that cannot be replaced is unprotected, which wakes too. The
 * moving thread never stores to the range between protect and wake (its stack is refused,
 * the registry is its own mapping), so it cannot wait for itself.
 *
 * The kernel's own stores (a read() into the range) wait as well if the process may have
 * a full userfaultfd: as root, by vm.unprivileged_userfaultfd, or by rights on
 * /dev/userfaultfd. With UFFD_USER_MODE_ONLY, which needs no privilege, they fail with
 * EFAULT while a slice is moved.
 *
 * The registry's lock is held throughout, so no other thread adopts at the same time.
 */
#include "lib/client_adopt.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/userfaultfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "lib/client.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef UFFD_USER_MODE_ONLY
#define UFFD_USER_MODE_ONLY 1
#endif
#ifndef USERFAULTFD_IOC_NEW
#define USERFAULTFD_IOC_NEW _IO(0xAA, 0x00)
#endif

struct mover {
	struct adopt_range *range;
	int uffd;	 /* -1: quiet, without userfaultfd */
	uint8_t *window; /* the whole memfd, to be filled */
	size_t window_bytes;
};

static int client_adopt_failed(int code, const char *what)
{
	int no = errno;

	if (no == ENOMEM || no == ENOSPC || no == EMFILE || no == ENFILE)
		code = KVD_E_NOMEM;
	client_error_set(client_error_thread(), code, "adopt: %s: %s", what,
			 strerror(no));
	return -code;
}

/* ---- userfaultfd ------------------------------------------------------------- */

/* The full kind if permitted, else the kind for stores of user mode; -1 with errno. */
static int uffd_open(void)
{
	struct uffdio_api api = {.api = UFFD_API,
				 .features = UFFD_FEATURE_PAGEFAULT_FLAG_WP};
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);

	if (fd < 0) {
		cleanup_close int dev = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);

		if (dev >= 0)
			fd = ioctl(dev, USERFAULTFD_IOC_NEW, O_CLOEXEC);
	}
	if (fd < 0)
		fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	if (fd >= 0 && ioctl(fd, UFFDIO_API, &api) < 0) {
		close(fd);
		errno = ENOSYS;
		fd = -1;
	}
	return fd;
}

static int uffd_begin(struct mover *m, uint64_t begin, uint64_t end)
{
	struct uffdio_register reg = {.range = {.start = begin, .len = end - begin},
				      .mode = UFFDIO_REGISTER_MODE_WP};

	m->uffd = uffd_open();
	if (m->uffd < 0)
		return client_adopt_failed(
			KVD_E_PERM,
			"this process may not use userfaultfd with write-protect, "
			"without which stores of other threads could be lost; allow "
			"it, or set `quiet` if there are none");
	if (ioctl(m->uffd, UFFDIO_REGISTER, &reg) < 0)
		return client_adopt_failed(
			KVD_E_IMPORT, errno == EBUSY
					      ? "another userfaultfd watches the memory"
					      : "userfaultfd refuses the memory");
	if (!(reg.ioctls & (UINT64_C(1) << _UFFDIO_WRITEPROTECT))) {
		errno = ENOSYS;
		return client_adopt_failed(KVD_E_PERM,
					   "userfaultfd cannot write-protect the memory");
	}
	return 0;
}

static int uffd_protect(const struct mover *m, uint64_t begin, uint64_t bytes, bool on)
{
	struct uffdio_writeprotect wp = {.range = {.start = begin, .len = bytes},
					 .mode = on ? UFFDIO_WRITEPROTECT_MODE_WP : 0};
	int r;

	do /* EAGAIN: the map of the process was changing */
		r = ioctl(m->uffd, UFFDIO_WRITEPROTECT, &wp);
	while (r < 0 && errno == EAGAIN);
	return r;
}

/* ---- one slice ----------------------------------------------------------------- */

/* Other threads may store to it now (their loads are not affected by adding 0). */
static int old_present(uint64_t begin, uint64_t bytes)
{
	long page = sysconf(_SC_PAGESIZE);
	int r;

	do
		r = madvise((void *)(uintptr_t)begin, bytes, MADV_POPULATE_WRITE);
	while (r < 0 && (errno == EINTR || errno == EAGAIN));
	if (r == 0 || errno != EINVAL)
		return r;
	for (uint64_t at = begin; at < begin + bytes; at += (uint64_t)page)
		__atomic_fetch_add((uint8_t *)(uintptr_t)at, 0, __ATOMIC_RELAXED);
	return 0;
}

/* Not memcpy: the kernel orders stores of other threads before the protection, which
 * sanitizers cannot see. */
__attribute__((no_sanitize("thread", "address"))) static void slice_copy(
	uint8_t *to, const uint8_t *from, uint64_t bytes)
{
#ifdef __x86_64__
	__asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
	for (uint64_t i = 0; i < bytes; i += sizeof(uint64_t))
		*(volatile uint64_t *)(void *)(to + i) =
			*(const volatile uint64_t *)(const void *)(from + i);
#endif
}

/* The raw system call, for the same reason: a sanitizer treats a mapping over memory
 * as a store to all of it. */
static int slice_replace(const struct mover *m, uint64_t begin, uint64_t bytes,
			 uint64_t offset)
{
	long at = syscall(SYS_mmap, begin, bytes, PROT_READ | PROT_WRITE,
			  MAP_SHARED | MAP_FIXED, m->range->fd, offset);

	return at == -1 ? -1 : 0;
}

/* [begin, begin + bytes) within 2 MiB of the memfd, from `offset` on. */
static int slice_move(struct mover *m, uint64_t begin, uint64_t bytes, uint64_t offset)
{
	uint64_t block = offset / ADOPT_HUGE_BYTES * ADOPT_HUGE_BYTES;
	struct uffdio_range moved = {.start = begin, .len = bytes};
	size_t huge = 0;
	int r = client_memory_fill(m->window + block, ADOPT_HUGE_BYTES, &huge);

	if (r < 0)
		return client_adopt_failed(-r, "pages for the memfd");
	if (m->uffd >= 0 && old_present(begin, bytes) < 0)
		return client_adopt_failed(KVD_E_IO, "MADV_POPULATE_WRITE");
	if (m->uffd >= 0 && uffd_protect(m, begin, bytes, true) < 0)
		return client_adopt_failed(KVD_E_IO, "UFFDIO_WRITEPROTECT");
	slice_copy(m->window + offset, (const uint8_t *)(uintptr_t)begin, bytes);
	r = slice_replace(m, begin, bytes, offset);
	if (r < 0) {
		r = client_adopt_failed(KVD_E_IO, "mmap");
		if (m->uffd >= 0)
			(void)uffd_protect(m, begin, bytes, false);
		return r;
	}
	m->range->done += bytes;
	if (m->uffd >= 0)
		(void)ioctl(m->uffd, UFFDIO_WAKE, &moved);
	m->range->huge += huge > 0;
	/* a child would share it, and write to its parent's cache */
	(void)madvise((void *)(uintptr_t)begin, bytes, MADV_DONTFORK);
	(void)madvise((void *)(uintptr_t)begin, bytes, MADV_POPULATE_WRITE);
	return 0;
}

/* ---- a range ------------------------------------------------------------------- */

static uint64_t file_bytes(uint64_t file_begin, uint64_t bytes)
{
	uint64_t end = file_begin + bytes;

	return (end + ADOPT_HUGE_BYTES - 1) / ADOPT_HUGE_BYTES * ADOPT_HUGE_BYTES;
}

static int range_move(struct adopt_range *range, bool quiet)
{
	uint64_t end = range->begin + range->bytes;
	struct mover m = {.range = range,
			  .uffd = -1,
			  .window_bytes = file_bytes(range->file_begin, range->bytes)};
	int r = 0;

	m.window = client_memory_map(range->fd, m.window_bytes);
	if (!m.window)
		return client_adopt_failed(KVD_E_IO, "mapping the memfd");
	(void)madvise(m.window, m.window_bytes, MADV_DONTFORK);
	if (!quiet)
		r = uffd_begin(&m, range->begin + range->done, end);
	while (r == 0 && range->done < range->bytes) {
		uint64_t offset = range->file_begin + range->done;
		uint64_t n = ADOPT_HUGE_BYTES - offset % ADOPT_HUGE_BYTES;

		if (n > range->bytes - range->done)
			n = range->bytes - range->done;
		r = slice_move(&m, range->begin + range->done, n, offset);
	}
	mem_closep(&m.uffd); /* releases the ranges that it watches */
	munmap(m.window, m.window_bytes);
	return r;
}

/* Address and file agree modulo 2 MiB, for huge pages. */
static struct adopt_range *range_new(struct adopt_registry *registry, uint64_t begin,
				     uint64_t end)
{
	uint64_t file_begin = begin % ADOPT_HUGE_BYTES;
	struct adopt_range *range;
	cleanup_close int fd = -1;
	char name[64];

	snprintf(name, sizeof(name), "kvd-adopt-%d-%" PRIx64, (int)getpid(), begin);
	fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0 || ftruncate(fd, (off_t)file_bytes(file_begin, end - begin)) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) {
		client_adopt_failed(KVD_E_IO, "memfd");
		return NULL;
	}
	adopt_fork_watch();
	range = adopt_registry_add(registry, fd, begin, end - begin, file_begin);
	if (range)
		mem_steal_fd(&fd);
	return range;
}

static void adopted_fill(const struct adopt_range *range,
			 const struct kvd_adopt_args *args, struct kvd_adopted *out)
{
	uint64_t address = (uintptr_t)args->address;

	out->fd = range->fd;
	out->offset = range->file_begin + (address - range->begin);
	out->address = args->address;
	out->bytes = args->bytes;
	out->huge_bytes = (size_t)range->huge * ADOPT_HUGE_BYTES;
	out->id = range->inode;
}

/* New memory, or the remainder of an earlier call. */
static int adopt_fresh(struct adopt_registry *registry, const struct kvd_adopt_args *args,
		       struct adopt_range *range, struct kvd_adopted *out)
{
	struct kvd_adopt_args rest = *args;
	uint64_t begin, end;
	int r;

	if (range) { /* the first check covered all of it */
		rest.address = (void *)(uintptr_t)(range->begin + range->done);
		rest.bytes = range->bytes - range->done;
		rest.vouched = true;
	}
	r = adopt_check(&rest, &begin, &end);
	if (r < 0)
		return r;
	if (!range)
		range = range_new(registry, begin, end);
	if (!range)
		return -client_error_thread()->code;
	r = range_move(range, args->quiet);
	if (r < 0) { /* moved ranges stay on record at the same address */
		adopt_registry_settle(registry);
		return r;
	}
	adopted_fill(range, args, out);
	out->moved = true;
	out->waited = !args->quiet;
	return 0;
}

static int adopt_locked(struct adopt_registry *registry,
			const struct kvd_adopt_args *args, struct kvd_adopted *out)
{
	uint64_t begin = (uintptr_t)args->address, end = begin + args->bytes;
	struct adopt_range *range = NULL;

	if (end > begin)
		range = adopt_registry_find(registry, begin, end);
	if (!range)
		return adopt_fresh(registry, args, NULL, out);
	if (begin < range->begin || end > range->begin + range->bytes) {
		client_error_set(client_error_thread(), KVD_E_EXIST,
				 "adopt: [%#" PRIx64 ", %#" PRIx64
				 ") of this memory is adopted already, the rest is not",
				 range->begin, range->begin + range->bytes);
		return -KVD_E_EXIST;
	}
	if (range->done < range->bytes)
		return adopt_fresh(registry, args, range, out);
	adopted_fill(range, args, out);
	return 0;
}

int kvd_adopt(const struct kvd_adopt_args *args, struct kvd_adopted *adopted_p)
{
	struct adopt_registry *registry = adopt_registry_lock(true);
	int r;

	*adopted_p = (struct kvd_adopted){.fd = -1};
	if (!registry)
		return -KVD_E_IO;
	r = adopt_locked(registry, args, adopted_p);
	adopt_registry_unlock(registry);
	return r;
}
