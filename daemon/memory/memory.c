/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Engine memory, imported once and then trusted only to the extent that its kind allows.
 *
 * The danger is SIGBUS: a page of a file mapping that cannot be provided, because the
 * file was truncated or its file system is full, kills the process that touches it. Four
 * answers, one for each kind:
 *
 *   - A memfd of ordinary pages must be sealed against shrinking, by its owner or by the
 *     daemon, so that it cannot be truncated. (Not F_SEAL_FUTURE_WRITE: a daemon that was
 *     restarted could not map it again.) Every page is mapped at import, by
 *     MADV_POPULATE_*, which reports the error that a touch would have died of. A hole
 *     that is punched later is filled by the next touch.
 *   - A memfd of huge pages (MFD_HUGETLB) does not fill it: punching gives the page and
 *     its reservation back to a pool of fixed size, and a touch that finds the pool empty
 *     is SIGBUS. It is guarded as shm is. Adapters may use it: their pages are pinned.
 *   - POSIX shm cannot be sealed. It is touched only inside memory_guard_run(): a jump
 *     out of the SIGBUS handler, with per-thread state, so that two copy threads may
 *     fault at once. The handler marks the memory dead and puts zero pages in the place
 *     of its mapping, because another thread may be about to touch the next cut page.
 *     `dead` is set before the zero pages appear: a reader of zeros finds `dead` when it
 *     checks afterwards. A SIGBUS that belongs to no guard keeps its default action.
 *   - Another process's private memory is never mapped, nor touched by this process
 *     (vm.h).
 *
 * Huge pages: first touch of a 4 KiB-page memfd costs 1 us a page, so a mapping is placed
 * such that it and its file agree modulo 2 MiB, and collapsed before it is populated:
 * that makes a huge page of the existing content, and copies it, so the daemon's own
 * memory is made huge at once. Collapsing an empty range is EINVAL (6.18), so it gets one
 * page first; it is cheap when the owner did it before. Collapsing is an attempt
 * (settle.c): without huge pages everything works, slower.
 */
#include "daemon/memory/memory.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/gate/vet.h"
#include "daemon/memory/settle.h"
#include "daemon/memory/vm.h"
#include "gpu/gpu.h"
#include "gpu/import.h"
#include "gpu/pin.h"

#define HUGE_BYTES (UINT64_C(2) << 20)
#define POPULATE_BYTES ((size_t)16 << 20)

/* The public struct, and the mapping behind it: `base` may lie inside the first page,
 * hugetlb rounds lengths up. */
struct import {
	struct memory memory;
	void *map;
	size_t map_bytes;
};

static int memory_import_new(enum memory_kind kind, struct import **import_p)
{
	struct import *im = mem_zalloc(sizeof(*im));

	if (!im)
		return err_pass(-ENOMEM);
	im->memory.kind = kind;
	im->memory.fd = -1;
	im->memory.mem_fd = -1;
	im->memory.owner.pidfd = -1;
	im->memory.dmabuf_fd = -1;
	atomic_init(&im->memory.dead, false);
	atomic_init(&im->memory.refs, 1);
	*import_p = im;
	return 0;
}

static void memory_import_free(struct import *im)
{
	gpu_pin_free(im->memory.pin);
	if (im->map)
		munmap(im->map, im->map_bytes);
	mem_closep(&im->memory.fd);
	mem_closep(&im->memory.owner.pidfd);
	mem_closep(&im->memory.mem_fd);
	mem_closep(&im->memory.dmabuf_fd);
	gpu_import_unref(im->memory.gpu);
	mem_free(im);
}

/* ---- the guard ---- */

struct guard {
	sigjmp_buf env;
	struct memory *a, *b;
};

static _Thread_local struct guard *volatile guard_now;

static bool memory_holds(const struct memory *m, uintptr_t addr)
{
	uintptr_t base = m ? (uintptr_t)m->base : 0;

	return base && addr >= base && addr - base < m->length;
}

/* In signal context: atomics, mmap, the mask and the jump only. */
static void memory_replace_by_zeros(struct memory *m)
{
	struct import *im = container_of(m, struct import, memory);

	atomic_store(&m->dead, true);
	(void)mmap(im->map, im->map_bytes, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

static void on_sigbus(int signum, siginfo_t *info, void *context)
{
	struct guard *guard = guard_now;
	uintptr_t addr = (uintptr_t)info->si_addr;
	struct sigaction dfl = {.sa_handler = SIG_DFL};
	const ucontext_t *interrupted = context;

	/* si_code above 0: raised by the kernel for an access, not by kill() */
	if (guard && info->si_code > 0) {
		struct memory *hit = memory_holds(guard->a, addr)   ? guard->a
				     : memory_holds(guard->b, addr) ? guard->b
								    : NULL;
		if (hit) {
			memory_replace_by_zeros(hit);
			/* the jump leaves the handler: its mask must not stay */
			pthread_sigmask(SIG_SETMASK, &interrupted->uc_sigmask, NULL);
			siglongjmp(guard->env, 1);
		}
	}
	sigaction(signum, &dfl, NULL);
	/* an access is retried and dies; a signal from kill() must be raised again */
	if (info->si_code <= 0)
		raise(signum);
}

int memory_guard_install(void)
{
	/* saving the mask in each sigsetjmp would be a system call a slice */
	struct sigaction sa = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};

	sigemptyset(&sa.sa_mask);
	if (sigaction(SIGBUS, &sa, NULL) < 0)
		return err_raise_errno(errno, "sigaction(SIGBUS)");
	return 0;
}

bool memory_guard_run(void (*fn)(void *arg), void *arg, struct memory *a,
		      struct memory *b)
{
	struct guard guard = {.a = a, .b = b};

	assert(!guard_now);
	if (sigsetjmp(guard.env, 0) == 0) {
		guard_now = &guard;
		fn(arg);
	}
	guard_now = NULL;
	return !(a && atomic_load(&a->dead)) && !(b && atomic_load(&b->dead));
}

/* ---- mapping ---- */

/* Page size of the file's mappings: hugetlbfs maps whole huge pages only. */
static int file_page_bytes(int fd, uint64_t *page_p, bool *huge_p)
{
	struct statfs fs;

	if (fstatfs(fd, &fs) < 0)
		return err_raise_errno(errno, "fstatfs of the memory's fd");
	*huge_p = fs.f_type == HUGETLBFS_MAGIC;
	*page_p = *huge_p ? (uint64_t)fs.f_bsize : (uint64_t)sysconf(_SC_PAGESIZE);
	return 0;
}

/* Is it memory, and [offset, offset + length) inside? Lengths that off_t could
 * not carry are out of range too. */
static int file_check_range(int fd, uint64_t offset, uint64_t length)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return err_raise_errno(errno, "fstat of the memory's fd");
	if (!S_ISREG(st.st_mode))
		return err_raise(ERR_IMPORT, "the fd is not memory: pass a memfd");
	if (length == 0)
		return err_raise(ERR_RANGE, "length is 0");
	if (offset > (uint64_t)st.st_size || length > (uint64_t)st.st_size - offset)
		return err_raise(
			ERR_RANGE,
			"offset %ju + length %ju is beyond the object's %ju bytes",
			(uintmax_t)offset, (uintmax_t)length, (uintmax_t)st.st_size);
	return 0;
}

/* Bytes of [offset, end) without a page, counted up to over `most`. */
static uint64_t file_holes(int fd, uint64_t offset, uint64_t end, uint64_t most,
			   uint64_t *first_p)
{
	uint64_t holes = 0;

	while (offset < end && holes <= most) {
		off_t hole = lseek(fd, (off_t)offset, SEEK_HOLE);
		off_t data;

		if (hole < 0 || (uint64_t)hole >= end)
			break;
		if (holes == 0)
			*first_p = (uint64_t)hole;
		data = lseek(fd, hole, SEEK_DATA);
		offset = data < 0 || (uint64_t)data > end ? end : (uint64_t)data;
		holes += offset - (uint64_t)hole;
	}
	return holes;
}

/*
 * A page that is made here is charged to this process's control group, for as long as the
 * file has it, regardless of the requester: so its owner must have made them, but for
 * *fill_p bytes (in: the most; out: how many; NULL: none). SEEK_HOLE of shared memory
 * finds pages that were never touched, also where fallocate() set it aside (mm/filemap.c,
 * mapping_seek_hole_data). hugetlbfs has no SEEK_HOLE: its blocks are counted.
 */
static int file_check_holes(int fd, uint64_t offset, uint64_t length, uint64_t *fill_p)
{
	uint64_t most = fill_p ? *fill_p : 0, first = offset, holes;
	char path[32];
	cleanup_close int own = -1;
	struct stat st;
	struct statfs fs;

	if (fstatfs(fd, &fs) < 0 || fstat(fd, &st) < 0)
		return err_raise_errno(errno, "fstatfs of the memory's fd");
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	/* a separate file position; does not wait for a lease holder */
	own = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
	if (fs.f_type == HUGETLBFS_MAGIC)
		holes = (uint64_t)st.st_blocks * 512 < length
				? length - (uint64_t)st.st_blocks * 512
				: 0;
	else
		holes = file_holes(own >= 0 ? own : fd, offset, offset + length, most,
				   &first);
	if (fill_p)
		*fill_p = holes;
	if (holes <= most)
		return 0;
	return err_raise(
		ERR_IMPORT,
		"the memory has holes: byte %ju has no page, and kvd fills at most %ju "
		"more bytes for this user; touch every page, or use MADV_POPULATE_WRITE "
		"(Linux 5.14), before registering it, or allocate it with "
		"kvd_memory_alloc()",
		(uintmax_t)first, (uintmax_t)most);
}

/* Map so that address and file offset agree modulo 2 MiB where that can pay. */
static void *map_aligned(int fd, uint64_t offset, size_t bytes, int prot)
{
	uint8_t *room, *at;
	void *map;

	if (bytes < HUGE_BYTES)
		return mmap(NULL, bytes, prot, MAP_SHARED, fd, (off_t)offset);
	room = mmap(NULL, bytes + HUGE_BYTES, PROT_NONE,
		    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (room == MAP_FAILED)
		return room;
	at = room + ((offset - (uintptr_t)room) & (HUGE_BYTES - 1));
	map = mmap(at, bytes, prot, MAP_SHARED | MAP_FIXED, fd, (off_t)offset);
	if (map == MAP_FAILED) {
		int no = errno;

		munmap(room, bytes + HUGE_BYTES);
		errno = no;
		return map;
	}
	if (at > room)
		munmap(room, (size_t)(at - room));
	munmap(at + bytes, (size_t)(room + HUGE_BYTES - at));
	return map;
}

struct touch {
	volatile uint8_t *base;
	size_t bytes, step;
	bool write;
};

static void touch_pages(void *arg)
{
	const struct touch *t = arg;

	for (size_t i = 0; i < t->bytes; i += t->step) {
		/* an atomic add of 0: the owner may be writing the page */
		if (t->write)
			__atomic_fetch_add(&t->base[i], 0, __ATOMIC_RELAXED);
		else
			(void)t->base[i];
	}
}

/* Kernels before 5.14 have no MADV_POPULATE_*. */
static int import_touch(struct import *im, uint64_t page)
{
	struct touch t = {.base = im->map,
			  .bytes = im->map_bytes,
			  .step = page,
			  .write = im->memory.writable};

	if (!memory_guard_run(touch_pages, &t, &im->memory, NULL))
		return err_raise(ERR_IMPORT, "some pages cannot be allocated: its file "
					     "system or memory limit is full");
	return 0;
}

static atomic_bool hurry;

void memory_hurry(bool on)
{
	atomic_store(&hurry, on);
	settle_hurry(on);
}

/* In slices: the kernel holds the address space's lock all through one, and every mmap()
 * waits for it, then all page faults behind that. */
static int import_advise(const struct import *im, int advice)
{
	size_t at = 0;

	while (at < im->map_bytes && !atomic_load(&hurry)) {
		size_t left = im->map_bytes - at;
		size_t bytes = left < POPULATE_BYTES ? left : POPULATE_BYTES;

		if (madvise((uint8_t *)im->map + at, bytes, advice) == 0)
			at += bytes;
		else if (errno != EINTR && errno != EAGAIN)
			return -1;
	}
	errno = ECANCELED;
	return at < im->map_bytes ? -1 : 0;
}

/* Populating reports errors of this. */
static void import_collapse(const struct import *im, uint64_t page, int advice)
{
	uintptr_t first = ((uintptr_t)im->map + HUGE_BYTES - 1) & ~(HUGE_BYTES - 1);
	uintptr_t last = ((uintptr_t)im->map + im->map_bytes) & ~(HUGE_BYTES - 1);

	if (page >= HUGE_BYTES || first >= last)
		return;
	for (uintptr_t at = first; at < last && !atomic_load(&hurry); at += HUGE_BYTES)
		if (madvise((void *)at, page, advice) < 0 && errno != EINTR &&
		    errno != EAGAIN)
			return;
	settle((void *)first, last - first);
}

static int import_populate(struct import *im, uint64_t page)
{
	int advice = im->memory.writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ;
	int r;

	import_collapse(im, page, advice);
	r = import_advise(im, advice);
	if (r < 0 && errno == EINVAL) {
		r = import_touch(im, page);
		if (r < 0)
			return err_pass(r);
	} else if (r < 0 && (errno == EFAULT || errno == ENOSPC || errno == EHWPOISON)) {
		return err_raise(ERR_IMPORT,
				 "some pages cannot be allocated (%s): its file "
				 "system or memory limit is full, or it was truncated",
				 strerror(errno));
	} else if (r < 0) {
		return err_raise_errno(errno, "populating %zu bytes", im->map_bytes);
	}
	return 0;
}

/* Common to all file-backed kinds; takes the fd. Not populated yet. */
static int import_map(enum memory_kind kind, int owned_fd, uint64_t offset,
		      uint64_t length, bool writable, struct memory **memory_p)
{
	int prot = writable ? PROT_READ | PROT_WRITE : PROT_READ;
	struct import *im = NULL;
	uint64_t page = 0, skip;
	bool huge = false;
	int r;

	r = memory_import_new(kind, &im);
	if (r < 0) {
		close(owned_fd);
		return err_pass(r);
	}
	im->memory.fd = owned_fd;
	im->memory.fd_offset = offset;
	im->memory.length = length;
	im->memory.writable = writable;
	r = file_page_bytes(owned_fd, &page, &huge);
	if (r < 0)
		goto out;
	im->memory.sealed = kind == MEMORY_SEALED;
	if (huge && kind == MEMORY_SEALED)
		im->memory.kind = MEMORY_GUARDED;
	skip = offset % page;
	im->map_bytes = (size_t)((skip + length + page - 1) / page * page);
	im->map = map_aligned(owned_fd, offset - skip, im->map_bytes, prot);
	if (im->map == MAP_FAILED) {
		im->map = NULL;
		if (errno == EPERM || errno == EACCES)
			r = err_raise(
				ERR_IMPORT,
				"the memory cannot be mapped for %s: its open mode or "
				"seals (F_SEAL_WRITE, F_SEAL_FUTURE_WRITE) forbid it",
				writable ? "writing" : "reading");
		else
			r = err_raise_errno(errno, "mapping %ju bytes",
					    (uintmax_t)length);
		goto out;
	}
	im->memory.base = (uint8_t *)im->map + skip;
out:
	if (r < 0) {
		memory_import_free(im);
		return err_pass(r);
	}
	*memory_p = &im->memory;
	return 0;
}

int memory_populate(struct memory *memory)
{
	uint64_t page = 0;
	bool huge = false;
	int r = file_page_bytes(memory->fd, &page, &huge);

	if (r == 0)
		r = import_populate(container_of(memory, struct import, memory), page);
	if (r == 0 && atomic_load(&memory->dead))
		r = err_raise(ERR_FAULT,
			      "the memory was truncated while it was imported");
	return err_pass(r);
}

/* `r`: the result of mapping it. */
static int import_filled(int r, struct memory *memory, struct memory **memory_p)
{
	if (r == 0)
		r = memory_populate(memory);
	if (r < 0 && memory)
		memory_unref(memory);
	else if (r == 0)
		*memory_p = memory;
	return err_pass(r);
}

/* Negative: raised. */
static int fd_own(int fd)
{
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);

	return own < 0 ? err_raise_errno(errno, "duplicating the memory's fd") : own;
}

static int memfd_seal(int fd)
{
	int seals = fcntl(fd, F_GET_SEALS);

	if (seals < 0)
		return err_raise(ERR_IMPORT,
				 "the fd is not a memfd: it has no seals (%s)",
				 strerror(errno));
	if (!(seals & F_SEAL_GROW)) /* wanted, not needed */
		(void)fcntl(fd, F_ADD_SEALS, F_SEAL_GROW);
	if (seals & F_SEAL_SHRINK)
		return 0;
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
		return err_raise(
			ERR_IMPORT,
			"memfd carries no F_SEAL_SHRINK and refuses to be sealed "
			"(%s): create it with MFD_ALLOW_SEALING",
			strerror(errno));
	return 0;
}

/* The file is proven to be of that kind. */
static int import_checked(enum memory_kind kind, int fd, uint64_t offset, uint64_t length,
			  bool writable, uint64_t *fill_p, struct memory **memory_p)
{
	struct memory *memory = NULL;
	int r = file_check_range(fd, offset, length);

	if (r == 0)
		r = file_check_holes(fd, offset, length, fill_p);
	if (r == 0)
		r = fd_own(fd);
	if (r >= 0)
		r = import_map(kind, r, offset, length, writable, &memory);
	return err_pass(import_filled(r, memory, memory_p));
}

int memory_import_sparse(int fd, uint64_t offset, uint64_t length, bool writable,
			 uint64_t *fill_p, struct memory **memory_p)
{
	/* sealed first: a file could be truncated after its size is read and before the
	 * seal */
	int r = memfd_seal(fd);

	return err_pass(r < 0 ? r
			      : import_checked(MEMORY_SEALED, fd, offset, length,
					       writable, fill_p, memory_p));
}

int memory_import_memfd(int fd, uint64_t offset, uint64_t length, bool writable,
			struct memory **memory_p)
{
	return err_pass(
		memory_import_sparse(fd, offset, length, writable, NULL, memory_p));
}

int memory_import_shm_fd(int fd, uint64_t offset, uint64_t length, bool writable,
			 struct memory **memory_p)
{
	return err_pass(
		memory_import_sparse_shm(fd, offset, length, writable, NULL, memory_p));
}

int memory_import_sparse_shm(int fd, uint64_t offset, uint64_t length, bool writable,
			     uint64_t *fill_p, struct memory **memory_p)
{
	struct statfs fs;

	if (fstatfs(fd, &fs) < 0)
		return err_raise_errno(errno, "fstatfs of the memory's fd");
	if (fs.f_type != TMPFS_MAGIC && fs.f_type != HUGETLBFS_MAGIC)
		return err_raise(ERR_IMPORT,
				 "the fd is not shared memory: it is not on tmpfs");
	return err_pass(import_checked(MEMORY_GUARDED, fd, offset, length, writable,
				       fill_p, memory_p));
}

int memory_new_empty(uint64_t length, struct memory **memory_p)
{
	cleanup_close int fd = memfd_create("kvd", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return err_raise_errno(errno, "memfd_create");
	if (length == 0 || length > INT64_MAX)
		return err_raise(ERR_RANGE, "length %ju", (uintmax_t)length);
	if (ftruncate(fd, (off_t)length) < 0)
		return err_raise_errno(errno, "ftruncate to %ju bytes",
				       (uintmax_t)length);
	if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
		return err_raise_errno(errno, "sealing a memfd");
	return err_pass(
		import_map(MEMORY_LINEAR, mem_steal_fd(&fd), 0, length, true, memory_p));
}

int memory_new_linear(uint64_t length, struct memory **memory_p)
{
	struct memory *memory = NULL;
	int r = memory_new_empty(length, &memory);

	return err_pass(import_filled(r, memory, memory_p));
}

struct gpu_device *memory_device(const struct memory *memory)
{
	return memory->kind == MEMORY_DEVICE && memory->gpu && memory->address
		       ? memory->gpu->device
		       : NULL;
}

/* ---- another process's memory ---- */

bool memory_owner_alive(struct memory *memory)
{
	if (memory->kind == MEMORY_DEVICE && memory->gpu &&
	    gpu_device_broken(memory->gpu->device))
		atomic_store(&memory->dead, true); /* also after it is reset */
	return !atomic_load(&memory->dead);
}

static int vm_refused(int no, const struct memory *memory, uint64_t address)
{
	if (no == ESRCH)
		return err_raise(ERR_IMPORT, "process %d has exited",
				 (int)memory->owner.pid);
	if (no == EFAULT)
		return err_raise(ERR_RANGE, "process %d has nothing mapped at %#jx",
				 (int)memory->owner.pid, (uintmax_t)address);
	return err_raise(no == EUSERS ? ERR_LIMIT : ERR_IMPORT,
			 "reading process %d's memory: %s", (int)memory->owner.pid,
			 no == EUSERS ? "too many helper processes hang" : strerror(no));
}

/* One byte at each end. */
static int vm_probe(const struct memory *memory)
{
	uint64_t last = memory->address + memory->length - 1;
	uint8_t bytes[2];
	struct iovec near[] = {{&bytes[0], 1}, {&bytes[1], 1}};
	struct iovec far[] = {{(void *)(uintptr_t)memory->address, 1},
			      {(void *)(uintptr_t)last, 1}};
	struct vm_hand hand = {.uses = 0};
	ssize_t n = vm_move(&hand, memory, true, near, far, 2, NULL);
	int r = 0;

	if (n != 2)
		r = vm_refused(n < 0 ? errno : EFAULT, memory,
			       n < 0 ? memory->address : last);
	vm_hand_fini(&hand);
	return r;
}

/* A /proc file from a gate or vm_open() is a process's memory or its statm.
 */
static int mem_check(int fd)
{
	struct statfs fs;
	int flags = fcntl(fd, F_GETFL);

	if (fstatfs(fd, &fs) == 0 && fs.f_type == PROC_SUPER_MAGIC && flags >= 0 &&
	    (flags & O_ACCMODE) != O_WRONLY && !vet_is_statm(fd))
		return 0;
	return err_raise(ERR_IMPORT, "the fd is not the client's /proc/self/mem, opened "
				     "for reading and writing");
}

int memory_import_vm(const struct memory_owner *owner, int mem_fd, uint64_t address,
		     uint64_t length, struct memory **memory_p)
{
	struct import *im = NULL;
	int r = mem_check(mem_fd);

	if (r == 0 && (address == 0 || length == 0 || length > INT64_MAX - address))
		r = err_raise(ERR_RANGE, "address %#jx + length %ju", (uintmax_t)address,
			      (uintmax_t)length);
	if (r == 0)
		r = memory_import_new(MEMORY_VM, &im);
	if (r < 0)
		return err_pass(r);
	im->memory.owner = *owner;
	im->memory.owner.pidfd = -1;
	im->memory.address = address;
	im->memory.length = length;
	im->memory.writable = (fcntl(mem_fd, F_GETFL) & O_ACCMODE) == O_RDWR;
	im->memory.mem_fd = r = fd_own(mem_fd);
	if (r >= 0 && owner->pidfd >= 0)
		im->memory.owner.pidfd = r = fd_own(owner->pidfd);
	if (r >= 0)
		r = vm_probe(&im->memory);
	if (r < 0) {
		memory_import_free(im);
		return err_pass(r);
	}
	*memory_p = &im->memory;
	return 0;
}

/* ---- memory of GPUs ---- */

int memory_import_device(struct gpu *gpu, uint64_t owner, const struct gpu_handle *handle,
			 uint64_t offset, uint64_t length, bool writable,
			 struct memory **memory_p)
{
	struct gpu_import *allocation;
	struct import *im = NULL;
	int r = memory_import_new(MEMORY_DEVICE, &im);

	if (r < 0)
		return err_pass(r);
	r = gpu_import(gpu, owner, handle, writable, &im->memory.gpu);
	if (r < 0) {
		memory_import_free(im);
		return err_pass(r);
	}
	allocation = im->memory.gpu;
	if (length == 0 || offset > allocation->bytes ||
	    length > allocation->bytes - offset) {
		r = err_raise(ERR_RANGE,
			      "offset %ju + length %ju is beyond the allocation's %ju "
			      "bytes",
			      (uintmax_t)offset, (uintmax_t)length,
			      (uintmax_t)allocation->bytes);
		memory_import_free(im);
		return err_pass(r);
	}
	im->memory.address = allocation->address + offset;
	im->memory.length = length;
	im->memory.writable = writable;
	*memory_p = &im->memory;
	return 0;
}

int memory_import_dmabuf(int fd, uint64_t offset, uint64_t length,
			 struct memory **memory_p)
{
	off_t end = lseek(fd, 0, SEEK_END); /* the only query that a dma-buf supports */
	struct import *im = NULL;
	int r;

	if (end < 0)
		return err_raise(ERR_IMPORT, "the fd is not a dma-buf: %s",
				 strerror(errno));
	if (length == 0 || offset > (uint64_t)end || length > (uint64_t)end - offset)
		return err_raise(
			ERR_RANGE,
			"offset %ju + length %ju is beyond the dma-buf's %ju bytes",
			(uintmax_t)offset, (uintmax_t)length, (uintmax_t)end);
	r = memory_import_new(MEMORY_DEVICE, &im);
	if (r < 0)
		return err_pass(r);
	im->memory.dmabuf_fd = fd_own(fd);
	if (im->memory.dmabuf_fd < 0) {
		memory_import_free(im);
		return err_pass(-EIO);
	}
	im->memory.dmabuf_offset = offset;
	im->memory.length = length;
	im->memory.writable = true;
	*memory_p = &im->memory;
	return 0;
}

int memory_check_copyable(const struct memory *memory)
{
	if (memory->kind != MEMORY_DEVICE || memory->gpu)
		return 0;
	return err_raise(
		ERR_IMPORT,
		"only RDMA adapters can reach a dma-buf; register the memory as cuda_ipc "
		"or cuda_vmm");
}

/* ---- files ---- */

/* Kind and rights of the descriptor, however it was obtained. */
static int file_check(int fd, int *flags_p)
{
	char what[128];

	*flags_p = fcntl(fd, F_GETFL);
	if (*flags_p < 0 || (*flags_p & O_PATH))
		return err_raise(ERR_IMPORT, "the fd was opened with O_PATH");
	if (!vet_is_disk(fd, what, sizeof(what)))
		return err_raise(
			ERR_IMPORT,
			"the fd is %s; it must be a regular file of a local file system, "
			"or a block device",
			what);
	/* Linux appends regardless of the offset: pwrite(2), BUGS */
	if ((*flags_p & O_APPEND) && (*flags_p & O_ACCMODE) != O_RDONLY)
		return err_raise(
			ERR_IMPORT,
			"the file was opened with O_APPEND: writes would ignore the "
			"offset");
	return 0;
}

int memory_import_file(int fd, uint64_t offset, uint64_t length, uid_t uid,
		       struct memory **memory_p)
{
	struct import *im = NULL;
	int flags = 0;
	int r = file_check(fd, &flags);

	if (r == 0 && (length == 0 || offset > INT64_MAX || length > INT64_MAX - offset))
		r = err_raise(ERR_RANGE, "offset %ju + length %ju", (uintmax_t)offset,
			      (uintmax_t)length);
	if (r == 0)
		r = memory_import_new(MEMORY_FILE, &im);
	if (r < 0)
		return err_pass(r);
	im->memory.owner.uid = uid;
	im->memory.address = offset;
	im->memory.length = length;
	im->memory.writable = (flags & O_ACCMODE) != O_RDONLY;
	im->memory.write_only = (flags & O_ACCMODE) == O_WRONLY;
	im->memory.mem_fd = r = fd_own(fd);
	if (r < 0) {
		memory_import_free(im);
		return err_pass(r);
	}
	*memory_p = &im->memory;
	return 0;
}

/* ---- references ---- */

void memory_offer(struct memory *memory, struct gpu *gpu)
{
	const struct import *im = container_of(memory, struct import, memory);

	assert(memory->base && !memory->pin);
	if (memory->kind ==
	    MEMORY_GUARDED) /* a memfd of huge pages, which are taken back */
		return;
	if (gpu_pin_new(gpu, im->map, im->map_bytes, !memory->writable, &memory->pin) < 0)
		err_clear();
}

struct memory *memory_ref(struct memory *memory)
{
	assert(atomic_load_explicit(&memory->refs, memory_order_relaxed) > 0);
	/* relaxed: a caller that takes a reference has one, which orders it against the
	 * last unref */
	atomic_fetch_add_explicit(&memory->refs, 1, memory_order_relaxed);
	return memory;
}

void memory_unref(struct memory *memory)
{
	if (!memory)
		return;
	/* release: earlier accesses to the memory stay before this; acquire: the last one
	 * unmaps after the accesses of all others */
	if (atomic_fetch_sub_explicit(&memory->refs, 1, memory_order_acq_rel) == 1)
		memory_import_free(container_of(memory, struct import, memory));
}
