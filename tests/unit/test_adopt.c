/* SPDX-License-Identifier: Apache-2.0 */
/*
 * adopt: memory moved behind a memfd in place. No store of a concurrent writer is
 * lost; what must not be moved is refused by name; one registry for all copies of
 * libkvd in the process; what failed in the middle is whole and goes on later.
 *
 * Rights are taken from single threads by seccomp filters, so that what a process
 * without userfaultfd sees is tested by root too.
 */
#include "lib/kvd.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/lib/client_fixture.h"

#define MIB ((size_t)1 << 20)
#define PAGE 4096u
#define SLICE (2 * MIB)
#define WRITERS 3u
#define ROUNDS 12u

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define GLIBC_MALLOC 0
#else
#define GLIBC_MALLOC 1
#endif

/* ---- memory --------------------------------------------------------------------- */

static uint8_t *private_map(size_t bytes)
{
	uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	assert_ptr_not_equal(p, MAP_FAILED);
	return p;
}

static void fill(uint8_t *p, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 8)
		*(uint64_t *)(void *)(p + i) = i * 0x9e3779b97f4a7c15;
}

static void assert_filled(const uint8_t *p, size_t bytes)
{
	for (size_t i = 0; i < bytes; i += 8)
		if (*(const uint64_t *)(const void *)(p + i) != i * 0x9e3779b97f4a7c15)
			fail_msg("byte %zu changed", i);
}

static struct kvd_adopt_args vouched(void *p, size_t bytes)
{
	return (struct kvd_adopt_args){.address = p, .bytes = bytes, .vouched = true};
}

/* By the system call, or by the device that an administrator may open for it. */
static bool userfaultfd_is_there(void)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);

	if (fd < 0)
		fd = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
	if (fd >= 0)
		close(fd);
	return fd >= 0;
}

static void need_userfaultfd(void)
{
	if (userfaultfd_is_there())
		return;
	print_message("[  SKIPPED ] needs a userfaultfd\n");
	skip();
}

static void assert_adopted(const struct kvd_adopt_args *args, struct kvd_adopted *a)
{
	int r = kvd_adopt(args, a);

	if (r == -KVD_E_PERM && !args->quiet)
		need_userfaultfd(); /* a container may not have it */
	if (r)
		fail_msg("kvd_adopt: %d: %s", r, kvd_last_error(NULL)->message);
}

static void assert_refused(const struct kvd_adopt_args *args, int code, const char *words)
{
	struct kvd_adopted a;

	assert_int_equal(kvd_adopt(args, &a), -code);
	assert_int_equal(a.fd, -1);
	if (!strstr(kvd_last_error(NULL)->message, words))
		fail_msg("'%s' is not in: %s", words, kvd_last_error(NULL)->message);
}

/* Both ways of looking at it show the same bytes, and stores go through. */
static void assert_same_memory(const struct kvd_adopted *a)
{
	uint64_t skip = a->offset % PAGE;
	volatile uint8_t *here = a->address;
	uint8_t *there = mmap(NULL, a->bytes + skip, PROT_READ, MAP_SHARED, a->fd,
			      (off_t)(a->offset - skip));

	assert_ptr_not_equal(there, MAP_FAILED);
	assert_memory_equal(there + skip, a->address, a->bytes);
	for (size_t i = 0; i < a->bytes; i += a->bytes / 7) {
		here[i] ^= 0x5a;
		assert_int_equal(*(volatile uint8_t *)(there + skip + i), here[i]);
		here[i] ^= 0x5a;
	}
	munmap(there, a->bytes + skip);
}

static bool is_open(int fd, uint64_t inode)
{
	struct stat st;

	return fstat(fd, &st) == 0 && st.st_ino == inode;
}

/* ---- the move --------------------------------------------------------------------- */

static void range_vouched_is_inside_memfd(void **state)
{
	/* neither end on a slice, the first page not the caller's alone to name */
	uint8_t *p = private_map(9 * MIB), *from = p + 3 * PAGE + 64;
	size_t bytes = 7 * MIB + 1000;
	struct kvd_adopt_args args = vouched(from, bytes);
	struct kvd_adopted a;
	int seals;

	(void)state;
	fill(p, 9 * MIB);
	assert_adopted(&args, &a);
	assert_true(a.moved);
	assert_ptr_equal(a.address, from);
	assert_int_equal(a.bytes, bytes);
	assert_filled(p, 9 * MIB);
	assert_same_memory(&a);
	seals = fcntl(a.fd, F_GET_SEALS);
	assert_int_equal(seals & (F_SEAL_SHRINK | F_SEAL_GROW),
			 F_SEAL_SHRINK | F_SEAL_GROW);
	assert_true((fcntl(a.fd, F_GETFD) & FD_CLOEXEC) != 0);
	munmap(p, 9 * MIB);
}

static void chunk_of_malloc_needs_no_flag(void **state)
{
	struct kvd_adopt_args args = {.bytes = 40 * MIB};
	struct kvd_adopted a;
	uint64_t inode;
	void *aligned = NULL;
	int fd;

	(void)state;
	if (!GLIBC_MALLOC) {
		print_message("[  SKIPPED ] needs glibc's malloc, not a sanitizer's\n");
		skip();
	}
	args.address = malloc(args.bytes);
	fill(args.address, args.bytes);
	assert_adopted(&args, &a);
	assert_filled(args.address, args.bytes);
	assert_same_memory(&a);
	fd = a.fd;
	inode = a.id;
	free(args.address);
	assert_int_equal(posix_memalign(&aligned, 4096, args.bytes), 0);
	args.address = aligned;
	fill(aligned, args.bytes);
	assert_adopted(&args, &a); /* and the freed one is forgotten */
	assert_false(is_open(fd, inode) && fd != a.fd);
	assert_filled(aligned, args.bytes);
	free(aligned);
}

/* ---- concurrent writers ------------------------------------------------------------ */

struct writer {
	uint8_t *base;
	size_t bytes;
	unsigned int number;
	uint64_t *counts; /* what this writer's slots must hold */
	int file;	  /* of the writer that stores by system calls; -1 */
	_Atomic uint64_t laps;
	atomic_bool *stop;
	pthread_t thread;
};

/* One slot a page and writer, 64 bytes apart. */
static _Atomic uint64_t *slot_of(const struct writer *w, size_t page)
{
	return (_Atomic uint64_t *)(void *)(w->base + page * PAGE + 64 * w->number);
}

static void *writer_main(void *arg)
{
	struct writer *w = arg;
	size_t pages = w->bytes / PAGE;

	while (!atomic_load(w->stop)) {
		for (size_t i = 0; i < pages; i++) {
			_Atomic uint64_t *slot = slot_of(w, i);
			uint64_t next = ++w->counts[i];

			if (w->file < 0)
				/* load, add, store: not one locked instruction */
				atomic_store_explicit(
					slot,
					atomic_load_explicit(slot, memory_order_relaxed) +
						1,
					memory_order_relaxed);
			else if (pwrite(w->file, &next, 8, 0) != 8 ||
				 pread(w->file, (void *)slot, 8, 0) != 8)
				w->counts[i] = UINT64_MAX; /* cannot be equal */
		}
		atomic_fetch_add(&w->laps, 1);
	}
	return NULL;
}

static uint64_t lost_stores(const struct writer *w)
{
	uint64_t lost = 0;

	for (size_t i = 0; i < w->bytes / PAGE; i++)
		if (atomic_load(slot_of(w, i)) != w->counts[i])
			lost++;
	return lost;
}

static void wait_laps(struct writer *writers, uint64_t more)
{
	uint64_t from[WRITERS];

	for (unsigned int i = 0; i < WRITERS; i++)
		from[i] = atomic_load(&writers[i].laps);
	for (unsigned int i = 0; i < WRITERS; i++)
		while (atomic_load(&writers[i].laps) < from[i] + more)
			sched_yield();
}

/* One memory, adopted while all write to it; slots that differ in the end. */
static uint64_t round_run(size_t bytes, bool by_kernel, bool quiet)
{
	uint8_t *p = private_map(bytes);
	struct kvd_adopt_args args = vouched(p, bytes);
	struct writer writers[WRITERS];
	struct kvd_adopted a;
	atomic_bool stop = false;
	uint64_t lost = 0;

	args.quiet = quiet;
	for (unsigned int i = 0; i < WRITERS; i++) {
		bool file = by_kernel && i == 0;

		writers[i] = (struct writer){
			.base = p,
			.bytes = bytes,
			.number = i,
			.counts = calloc(bytes / PAGE, sizeof(uint64_t)),
			.file = file ? memfd_create("test", MFD_CLOEXEC) : -1,
			.stop = &stop};
		assert_int_equal(pthread_create(&writers[i].thread, NULL, writer_main,
						&writers[i]),
				 0);
	}
	wait_laps(writers, 1);
	assert_adopted(&args, &a);
	assert_int_equal(a.waited, !quiet);
	wait_laps(writers, 1);
	atomic_store(&stop, true);
	for (unsigned int i = 0; i < WRITERS; i++) {
		pthread_join(writers[i].thread, NULL);
		lost += lost_stores(&writers[i]);
		free(writers[i].counts);
		if (writers[i].file >= 0)
			close(writers[i].file);
	}
	assert_same_memory(&a);
	munmap(p, bytes);
	return lost;
}

static void writers_concurrent_lose_no_store(void **state)
{
	(void)state;
	need_userfaultfd();
	for (unsigned int i = 0; i < ROUNDS; i++)
		assert_int_equal(round_run(16 * MIB + i * 3 * PAGE, false, false), 0);
}

/* The full userfaultfd makes system calls wait, too. */
static void writers_by_system_calls_lose_no_store(void **state)
{
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);

	(void)state;
	if (fd < 0) {
		print_message("[  SKIPPED ] needs a userfaultfd for kernel faults\n");
		skip();
	}
	close(fd);
	for (unsigned int i = 0; i < ROUNDS / 3; i++)
		assert_int_equal(round_run(8 * MIB, true, false), 0);
}

/* Proof that the writers do write in the moment that counts: without protection
 * stores are lost. If no try of many loses one, the tests above show nothing. */
static void writers_of_quiet_memory_lose_stores(void **state)
{
	uint64_t lost = 0;

	(void)state;
	for (unsigned int i = 0; i < 200 && lost == 0; i++)
		lost = round_run(16 * MIB, false, true);
	assert_true(lost > 0);
}

/* ---- with fewer rights --------------------------------------------------------------
 */

#define LOAD(field) \
	BPF_STMT(BPF_LD | BPF_W | BPF_ABS, (uint32_t)offsetof(struct seccomp_data, field))
#define EQUAL(value, yes, no) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), (yes), (no))
#define ANSWER(value) BPF_STMT(BPF_RET | BPF_K, (value))
#define DENY(no) ANSWER(SECCOMP_RET_ERRNO | (no))
#define ALLOW ANSWER(SECCOMP_RET_ALLOW)

/* For the calling thread, for good. */
static void thread_filter(struct sock_filter *filter, unsigned short count)
{
	struct sock_fprog prog = {.len = count, .filter = filter};

	assert_int_equal(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
	assert_int_equal(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog), 0);
}

static void in_thread(void *(*run)(void *), void *arg)
{
	pthread_t thread;

	assert_int_equal(pthread_create(&thread, NULL, run, arg), 0);
	pthread_join(thread, NULL);
}

/* No userfaultfd at all, by either way. */
static void *try_without_userfaultfd(void *arg)
{
	struct sock_filter filter[] = {
		LOAD(nr),      EQUAL(SYS_userfaultfd, 3, 0), EQUAL(SYS_ioctl, 0, 3),
		LOAD(args[1]), EQUAL(0xAA00u, 0, 1),	     DENY(EPERM),
		ALLOW,
	};
	struct kvd_adopt_args *args = arg;

	thread_filter(filter, sizeof(filter) / sizeof(filter[0]));
	assert_refused(args, KVD_E_PERM, "userfaultfd");
	assert_filled(args->address, args->bytes);
	args->quiet = true;
	return NULL;
}

static void *adopt_quiet(void *arg)
{
	struct kvd_adopted a;

	try_without_userfaultfd(arg);
	assert_adopted(arg, &a);
	assert_false(a.waited);
	assert_same_memory(&a);
	return NULL;
}

static void right_to_userfaultfd_missing_needs_quiet(void **state)
{
	uint8_t *p = private_map(5 * MIB);
	struct kvd_adopt_args args = vouched(p, 5 * MIB);

	(void)state;
	fill(p, 5 * MIB);
	in_thread(adopt_quiet, &args);
	assert_filled(p, 5 * MIB);
	munmap(p, 5 * MIB);
}

/* Only UFFD_USER_MODE_ONLY, as any process may have it. */
static void *adopt_as_anyone(void *arg)
{
	struct sock_filter filter[] = {
		LOAD(nr),      EQUAL(SYS_userfaultfd, 0, 3),
		LOAD(args[0]), BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, 1, 4, 0),
		DENY(EPERM),   EQUAL(SYS_ioctl, 0, 2),
		LOAD(args[1]), EQUAL(0xAA00u, 1, 0),
		ALLOW,	       DENY(EPERM),
	};
	uint64_t *lost_p = arg;

	thread_filter(filter, sizeof(filter) / sizeof(filter[0]));
	for (unsigned int i = 0; i < ROUNDS / 2; i++)
		*lost_p += round_run(8 * MIB, false, false);
	return NULL;
}

static void writers_lose_no_store_with_user_mode_only(void **state)
{
	uint64_t lost = 0;

	(void)state;
	need_userfaultfd();
	in_thread(adopt_as_anyone, &lost);
	assert_int_equal(lost, 0);
}

/* The third slice cannot be replaced. */
static void *adopt_until_third_slice(void *arg)
{
	struct kvd_adopt_args *args = arg;
	uint32_t slice = (uint32_t)(uintptr_t)args->address + 2 * SLICE;
	struct sock_filter filter[] = {
		LOAD(nr),	    EQUAL(SYS_mmap, 0, 3), LOAD(args[0]),
		EQUAL(slice, 0, 1), DENY(ENOMEM),	   ALLOW,
	};

	thread_filter(filter, sizeof(filter) / sizeof(filter[0]));
	assert_refused(args, KVD_E_NOMEM, "mmap");
	return NULL;
}

static void move_failed_midway_resumes(void **state)
{
	uint8_t *p = private_map(12 * MIB);
	uint8_t *at = p + (SLICE - (uintptr_t)p % SLICE);
	struct kvd_adopt_args args = vouched(at, 5 * SLICE);
	struct kvd_adopted a;

	(void)state;
	fill(p, 12 * MIB);
	in_thread(adopt_until_third_slice, &args);
	assert_filled(p, 12 * MIB);
	fill(p, 12 * MIB); /* nothing of it waits for ever */
	assert_adopted(&args, &a);
	assert_true(a.moved);
	assert_filled(p, 12 * MIB);
	assert_same_memory(&a);
	munmap(p, 12 * MIB);
}

/* ---- what is refused ------------------------------------------------------------------
 */

static void memory_not_of_its_own_is_refused_by_name(void **state)
{
	cleanup_close int fd = memfd_create("test", MFD_CLOEXEC);
	uint8_t *p = private_map(64 * MIB), here;
	void *shared = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE,
			    MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	void *file, *brk = sbrk(0);
	struct kvd_adopt_args args = vouched(shared, 4 * MIB);

	(void)state;
	assert_refused(&args, KVD_E_IMPORT, "is shared already");
	assert_int_equal(ftruncate(fd, 4 * (off_t)MIB), 0);
	file = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
	args = vouched(file, 4 * MIB);
	assert_refused(&args, KVD_E_IMPORT, "belongs to a file");
	args = vouched(&here, 1);
	assert_refused(&args, KVD_E_IMPORT, "stack");
	assert_ptr_not_equal(sbrk(2 * PAGE), (void *)-1);
	args = vouched((uint8_t *)brk + 100, PAGE);
	assert_refused(&args, KVD_E_IMPORT, "heap");
	args = (struct kvd_adopt_args){.address = p + 64, .bytes = 40 * MIB};
	assert_refused(&args, KVD_E_IMPORT, "set `vouched`");
	args.address = p + 8;
	assert_refused(&args, KVD_E_IMPORT, "set `vouched`");
	mprotect(p + 8 * MIB, PAGE, PROT_READ);
	args = vouched(p, 16 * MIB);
	assert_refused(&args, KVD_E_IMPORT, "cannot be read and written");
	munmap(p + 8 * MIB, PAGE);
	assert_refused(&args, KVD_E_IMPORT, "is not mapped");
	args = vouched(NULL, 16);
	assert_refused(&args, KVD_E_INVAL, "address");
	args = vouched(p, 0);
	assert_refused(&args, KVD_E_INVAL, "bytes 0");
	munmap(shared, 4 * MIB);
	munmap(file, 4 * MIB);
	munmap(p, 64 * MIB);
}

static void memory_watched_by_another_userfaultfd_is_refused(void **state)
{
	uint8_t *p = private_map(4 * MIB);
	struct kvd_adopt_args args = vouched(p, 4 * MIB);
	cleanup_close int fd =
		(int)syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register reg = {.range = {.start = (uintptr_t)p + MIB, .len = PAGE},
				      .mode = UFFDIO_REGISTER_MODE_MISSING};

	(void)state;
	if (fd < 0)
		need_userfaultfd();
	fill(p, 4 * MIB);
	assert_int_equal(ioctl(fd, UFFDIO_API, &api), 0);
	assert_int_equal(ioctl(fd, UFFDIO_REGISTER, &reg), 0);
	assert_refused(&args, KVD_E_IMPORT, "another userfaultfd");
	munmap(p, 4 * MIB);
}

static void memory_registered_with_cuda_is_refused(void **state)
{
	const char *build = getenv("KVD_BUILD");
	uint8_t *p = private_map(4 * MIB);
	struct kvd_adopt_args args = vouched(p, 4 * MIB);
	struct kvd_adopted a;
	uint64_t *begin, *end;
	char path[512];
	int *answer;
	void *lib;

	(void)state;
	snprintf(path, sizeof(path), "%s/adopt/libcuda.so.1",
		 build ? build : "build/rel");
	lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib)
		fail_msg("%s", dlerror());
	begin = dlsym(lib, "fake_cuda_begin");
	end = dlsym(lib, "fake_cuda_end");
	answer = dlsym(lib, "fake_cuda_answer");
	*begin = (uintptr_t)p + 3 * MIB + 5 * PAGE;
	*end = *begin + PAGE;
	assert_refused(&args, KVD_E_IMPORT, "registered with CUDA");
	*end = *begin;
	*answer = 201; /* CUDA_ERROR_INVALID_CONTEXT: it cannot know */
	assert_refused(&args, KVD_E_IMPORT, "may be registered with CUDA");
	*answer = 1;
	assert_adopted(&args, &a);
	dlclose(lib);
	munmap(p, 4 * MIB);
}

/* ---- one registry
 * ---------------------------------------------------------------------- */

static void range_adopted_twice_is_moved_once(void **state)
{
	uint8_t *p = private_map(8 * MIB);
	struct kvd_adopt_args all = vouched(p, 6 * MIB),
			      part = vouched(p + MIB + 5, 1000);
	struct kvd_adopt_args over = vouched(p + 5 * MIB, 2 * MIB);
	struct kvd_adopted a, b;

	(void)state;
	fill(p, 8 * MIB);
	assert_adopted(&all, &a);
	assert_adopted(&part, &b);
	assert_false(b.moved);
	assert_int_equal(a.fd, b.fd);
	assert_int_equal(b.offset, a.offset + MIB + 5);
	assert_same_memory(&b);
	assert_refused(&over, KVD_E_EXIST, "adopted already");
	assert_true(is_open(a.fd, a.id));
	munmap(p, 8 * MIB);
	assert_refused(&over, KVD_E_IMPORT, "not mapped");
	assert_false(is_open(a.fd, a.id));
}

static void address_used_again_is_other_memory(void **state)
{
	uint8_t *p = private_map(4 * MIB), *again;
	struct kvd_adopt_args args = vouched(p, 4 * MIB);
	struct kvd_adopted a, b;

	(void)state;
	fill(p, 4 * MIB);
	assert_adopted(&args, &a);
	munmap(p, 4 * MIB);
	again = mmap(p, 4 * MIB, PROT_READ | PROT_WRITE,
		     MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	assert_ptr_equal(again, p);
	memset(again, 7, 4 * MIB);
	assert_adopted(&args, &b);
	assert_true(b.moved);
	assert_int_not_equal(a.id, b.id);
	assert_int_equal(again[MIB], 7);
	assert_same_memory(&b);
	munmap(p, 4 * MIB);
}

typedef int adopt_fn(const struct kvd_adopt_args *args, struct kvd_adopted *adopted_p);

/* The shared library is another copy than the one in this program. */
static void range_of_another_copy_is_known(void **state)
{
	const char *build = getenv("KVD_BUILD");
	uint8_t *p = private_map(4 * MIB), *q = private_map(4 * MIB);
	struct kvd_adopt_args args = vouched(p, 4 * MIB);
	struct kvd_adopted here, there;
	adopt_fn *adopt;
	char path[512];
	void *lib;

	(void)state;
	snprintf(path, sizeof(path), "%s/libkvd.so", build ? build : "build/rel");
	lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib)
		fail_msg("%s", dlerror());
	adopt = (adopt_fn *)(uintptr_t)dlsym(lib, "kvd_adopt");
	assert_true(adopt && adopt != kvd_adopt);
	assert_adopted(&args, &here);
	assert_int_equal(adopt(&args, &there), 0);
	assert_false(there.moved);
	assert_int_equal(there.id, here.id);
	assert_int_equal(there.fd, here.fd);
	args = vouched(q, 4 * MIB);
	assert_int_equal(adopt(&args, &there), 0);
	assert_true(there.moved);
	assert_adopted(&args, &here);
	assert_false(here.moved);
	munmap(p, 4 * MIB);
	munmap(q, 4 * MIB);
	dlclose(lib);
}

/* In the child: its own registry, and a view of the parent's memory. */
static int child_main(const struct kvd_adopted *parents)
{
	struct kvd_adopted mine;
	uint8_t *at = parents->address, *p;
	struct kvd_adopt_args args;

	for (size_t i = 0; i < parents->bytes; i += PAGE) {
		if (at[i] != 7)
			return 1;
		at[i] = 8;
	}
	p = mmap(NULL, 4 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
		 0);
	memset(p, 3, 4 * MIB);
	args = vouched(p, 4 * MIB);
	return kvd_adopt(&args, &mine) == 0 && mine.moved && p[5] == 3 ? 0 : 2;
}

static void child_of_fork_has_a_view_and_no_entry(void **state)
{
	uint8_t *p = private_map(4 * MIB);
	struct kvd_adopt_args args = vouched(p, 4 * MIB);
	struct kvd_adopted a;
	int status = -1;
	pid_t child;

	(void)state;
	memset(p, 7, 4 * MIB);
	assert_adopted(&args, &a);
	child = fork();
	if (child == 0)
		_exit(child_main(&a));
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	for (size_t i = 0; i < 4 * MIB; i++)
		assert_int_equal(p[i], 7);
	munmap(p, 4 * MIB);
}

/* The words in front of a chunk tell its allocator how to give it back. */
static void fork_child_frees_adopted_memory(void **state)
{
	struct kvd_adopt_args args = {.bytes = 40 * MIB};
	struct kvd_adopted a;
	uint8_t *chunk;
	int status = -1;
	pid_t child;

	(void)state;
	if (!GLIBC_MALLOC) {
		print_message("[  SKIPPED ] needs glibc's malloc, not a sanitizer's\n");
		skip();
	}
	args.address = chunk = malloc(40 * MIB);
	assert_non_null(chunk);
	memset(chunk, 7, 40 * MIB);
	assert_adopted(&args, &a);
	child = fork();
	if (child == 0) {
		free(chunk);
		_exit(0);
	}
	assert_int_equal(waitpid(child, &status, 0), child);
	assert_true(WIFEXITED(status));
	assert_int_equal(WEXITSTATUS(status), 0);
	assert_int_equal(chunk[5 * MIB], 7);
	free(chunk);
}

/* ---- regions
 * ----------------------------------------------------------------------------- */

static void region_of_adopted_memory_is_sent_as_memfd(void **state)
{
	struct client_fixture *f = *state;
	uint8_t *p = private_map(8 * MIB), *at = p + (SLICE - (uintptr_t)p % SLICE);
	struct kvd_adopt_args args = vouched(at, 4 * MIB);
	struct kvd_region_args part = {
		.kind = KVD_REGION_VM, .address = at + MIB, .bytes = 2 * MIB};
	struct kvd_region_args more = {
		.kind = KVD_REGION_VM, .address = at, .bytes = 4 * MIB + 1};
	struct kvd_region *region;
	struct kvd_adopted a;
	unsigned int fds = 0;
	char wanted[256];

	assert_adopted(&args, &a);
	fake_kvd_answer(f->fake, OK ",\"region\":3}");
	assert_int_equal(kvd_region_register(f->client, &part, NULL, &region), 0);
	snprintf(wanted, sizeof(wanted),
		 "\"cmd\":\"region.register\",\"kind\":\"memfd\",\"length\":\"%zu\","
		 "\"fd\":0,\"statm\":1,"
		 "\"offset\":%zu,\"address\":\"%llu\"}",
		 2 * MIB, MIB, (unsigned long long)(uintptr_t)(at + MIB));
	assert_string_equal(client_line_args(f, 1), wanted);
	fake_kvd_line(f->fake, 1, &fds);
	assert_int_equal(fds, 2);
	fake_kvd_answer(f->fake, OK ",\"region\":4}");
	assert_int_equal(kvd_region_register(f->client, &more, NULL, &region), 0);
	assert_non_null(strstr(client_line_args(f, 2), "\"kind\":\"vm\""));
	munmap(p, 8 * MIB);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(range_vouched_is_inside_memfd),
		cmocka_unit_test(chunk_of_malloc_needs_no_flag),
		cmocka_unit_test(writers_concurrent_lose_no_store),
		cmocka_unit_test(writers_by_system_calls_lose_no_store),
		cmocka_unit_test(writers_lose_no_store_with_user_mode_only),
		cmocka_unit_test(writers_of_quiet_memory_lose_stores),
		cmocka_unit_test(right_to_userfaultfd_missing_needs_quiet),
		cmocka_unit_test(move_failed_midway_resumes),
		cmocka_unit_test(memory_not_of_its_own_is_refused_by_name),
		cmocka_unit_test(memory_watched_by_another_userfaultfd_is_refused),
		cmocka_unit_test(memory_registered_with_cuda_is_refused),
		cmocka_unit_test(range_adopted_twice_is_moved_once),
		cmocka_unit_test(address_used_again_is_other_memory),
		cmocka_unit_test(range_of_another_copy_is_known),
		cmocka_unit_test(child_of_fork_has_a_view_and_no_entry),
		cmocka_unit_test(fork_child_frees_adopted_memory),
		cmocka_unit_test_setup_teardown(region_of_adopted_memory_is_sent_as_memfd,
						client_fixture_setup,
						client_fixture_teardown),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests(tests, NULL, NULL);
}
