/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory: what is refused and why, that pages are there after an import, and
 * that a cut mapping kills itself only.
 */
#include "daemon/memory/memory.h"

#include <errno.h>
#include <fcntl.h>
#include <semaphore.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/memory/settle.h"
#include "tests/lib/file.h"
#include "tests/lib/gates.h"
#include "tests/lib/limits.h"
#include "tests/lib/tmp.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)

static int memfd(uint64_t bytes, unsigned int flags)
{
	int fd = flags ? memfd_create("test", MFD_CLOEXEC | flags) : memfd_unsealable();

	assert_true(fd >= 0);
	assert_int_equal(file_fill(fd, bytes), 0);
	return fd;
}

static void assert_refused(int r, enum err_code code, const char *words)
{
	assert_int_equal(r, -err_errno(code));
	assert_int_equal(err_last()->code, code);
	if (!strstr(err_last()->text, words))
		fail_msg("\"%s\" is not in \"%s\"", words, err_last()->text);
	err_clear();
}

static int fd_count(void)
{
	int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void memfd_unsealed_is_sealed_and_shared(void **state)
{
	int fd = memfd(64 * KIB, MFD_ALLOW_SEALING), before = fd_count();
	struct memory *m = NULL;
	uint8_t *own;

	(void)state;
	assert_int_equal(memory_import_memfd(fd, 0, 64 * KIB, true, &m), 0);
	assert_int_equal(m->kind, MEMORY_SEALED);
	assert_int_equal(fcntl(fd, F_GET_SEALS) & (F_SEAL_SHRINK | F_SEAL_GROW),
			 F_SEAL_SHRINK | F_SEAL_GROW);
	assert_int_equal(fcntl(fd, F_GET_SEALS) & F_SEAL_FUTURE_WRITE, 0);
	own = mmap(NULL, 64 * KIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	own[5000] = 77;
	assert_int_equal(m->base[5000], 77);
	munmap(own, 64 * KIB);
	memory_unref(m);
	assert_int_equal(fd_count(), before);
	close(fd);
}

static void memfd_without_sealing_is_refused_with_remedy(void **state)
{
	int fd = memfd(64 * KIB, 0), before = fd_count();
	struct memory *m = NULL;

	(void)state;
	assert_refused(memory_import_memfd(fd, 0, 64 * KIB, true, &m), ERR_IMPORT,
		       "MFD_ALLOW_SEALING");
	assert_null(m);
	assert_int_equal(fd_count(), before);
	close(fd);
}

static void memfd_sealed_read_only_fd_imports_read_only(void **state)
{
	int fd = memfd(64 * KIB, MFD_ALLOW_SEALING), ro;
	struct memory *m = NULL;
	char path[64];

	(void)state;
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	ro = open(path, O_RDONLY | O_CLOEXEC);
	assert_true(ro >= 0);
	assert_refused(memory_import_memfd(ro, 0, 64 * KIB, true, &m), ERR_IMPORT,
		       "cannot be mapped for writing");
	assert_int_equal(memory_import_memfd(ro, 0, 64 * KIB, false, &m), 0);
	assert_false(m->writable);
	memory_unref(m);
	close(ro);
	close(fd);
}

static void memfd_future_write_is_refused_for_writing(void **state)
{
	int fd = memfd(64 * KIB, MFD_ALLOW_SEALING);
	struct memory *m = NULL;

	(void)state;
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_FUTURE_WRITE), 0);
	assert_refused(memory_import_memfd(fd, 0, 64 * KIB, true, &m), ERR_IMPORT,
		       "F_SEAL_FUTURE_WRITE");
	close(fd);
}

static void memfd_range_beyond_the_object_is_refused(void **state)
{
	static const uint64_t ranges[][2] = {
		{0, 64 * KIB + 1},
		{64 * KIB, 1},
		{UINT64_MAX, 2},
		{1, UINT64_MAX},
		{UINT64_MAX - 1, UINT64_MAX - 1},
		{UINT64_C(1) << 63, 4096},
		{0, 0},
	};
	int fd = memfd(64 * KIB, MFD_ALLOW_SEALING);
	struct memory *m = NULL;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ranges); i++)
		assert_refused(
			memory_import_memfd(fd, ranges[i][0], ranges[i][1], true, &m),
			ERR_RANGE, "");
	close(fd);
}

static void memfd_odd_offset_maps_the_page_below(void **state)
{
	int fd = memfd(64 * KIB, MFD_ALLOW_SEALING);
	struct memory *m = NULL;

	(void)state;
	assert_int_equal(pwrite(fd, "kvd", 3, 5001), 3);
	assert_int_equal(memory_import_memfd(fd, 5001, 64 * KIB - 5001, true, &m), 0);
	assert_memory_equal(m->base, "kvd", 3);
	assert_int_equal(m->fd_offset, 5001);
	m->base[64 * KIB - 5001 - 1] = 9;
	memory_unref(m);
	close(fd);
}

/* All of it is mapped, and aligned for huge pages, after the import. */
static void memfd_is_mapped_whole(void **state)
{
	int fd = memfd(6 * MIB, MFD_ALLOW_SEALING);
	struct memory *m = NULL;
	unsigned char present[6 * MIB / 4096];

	(void)state;
	assert_int_equal(memory_import_memfd(fd, 4096, 5 * MIB, true, &m), 0);
	assert_int_equal((uintptr_t)m->base % (2 * MIB), 4096);
	assert_int_equal(mincore(m->base, 5 * MIB, present), 0);
	for (size_t i = 0; i < 5 * MIB / 4096; i++)
		assert_true(present[i] & 1);
	memory_unref(m);
	close(fd);
}

static void fd_without_memory_is_refused(void **state)
{
	struct memory *m = NULL;
	int p[2];

	(void)state;
	assert_int_equal(pipe(p), 0);
	assert_refused(memory_import_memfd(p[0], 0, 1, false, &m), ERR_IMPORT,
		       "not a memfd");
	assert_refused(memory_import_memfd(-1, 0, 1, false, &m), ERR_IMPORT, "");
	assert_refused(memory_import_shm_fd(p[0], 0, 1, false, &m), ERR_IMPORT, "tmpfs");
	close(p[0]);
	close(p[1]);
}

static uint64_t blocks_of(int fd)
{
	struct stat st;

	assert_int_equal(fstat(fd, &st), 0);
	return (uint64_t)st.st_blocks * 512;
}

/* Pages that are made are charged to who makes them, and that is not the daemon: not one
 * is, whether nobody made it yet or fallocate() has only set it aside. */
static void memory_with_holes_is_refused_and_stays_empty(void **state)
{
	int fd = memfd_create("holes", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	struct memory *m = NULL;

	(void)state;
	assert_int_equal(file_fill(fd, MIB), 0);
	assert_int_equal(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
				   512 * KIB, 64 * KIB),
			 0);
	assert_int_equal(lseek(fd, 77, SEEK_SET), 77);
	assert_refused(memory_import_memfd(fd, 0, MIB, true, &m), ERR_IMPORT,
		       "holes: byte 524288 has no page");
	assert_refused(memory_import_shm_fd(fd, 4096, MIB - 4096, false, &m), ERR_IMPORT,
		       "holes");
	assert_refused(memory_import_memfd(fd, 0, 512 * KIB + 1, true, &m), ERR_IMPORT,
		       "holes");
	assert_int_equal(blocks_of(fd), MIB - 64 * KIB);
	assert_int_equal(lseek(fd, 0, SEEK_CUR), 77); /* its owner's position */
	assert_int_equal(memory_import_memfd(fd, 0, 512 * KIB, true, &m), 0);
	memory_unref(m);
	assert_int_equal(memory_import_memfd(fd, 576 * KIB, 448 * KIB, true, &m), 0);
	memory_unref(m);
	assert_int_equal(blocks_of(fd), MIB - 64 * KIB);
	close(fd);
}

static void shm_is_imported_guarded(void **state)
{
	struct memory *m = NULL;
	char name[64];
	int fd;

	(void)state;
	fd = shm_open(tmp_name(name, sizeof(name), "/kvd-test"),
		      O_RDWR | O_CREAT | O_EXCL, 0600);
	assert_true(fd >= 0);
	assert_int_equal(file_fill(fd, 8192), 0);
	assert_int_equal(memory_import_shm_fd(fd, 100, 8000, true, &m), 0);
	assert_int_equal(m->kind, MEMORY_GUARDED);
	memory_unref(m);
	assert_int_equal(shm_unlink(name), 0);
	close(fd);
}

struct poke {
	volatile uint8_t *at;
	bool after;
};

static void poke(void *arg)
{
	struct poke *p = arg;

	*p->at = 1;
	p->after = true;
}

static struct memory *guarded(uint64_t bytes, int *fd_p)
{
	struct memory *m = NULL;

	*fd_p = memfd(bytes, MFD_ALLOW_SEALING); /* as tmpfs as /dev/shm, unsealed */
	assert_int_equal(memory_import_shm_fd(*fd_p, 0, bytes, true, &m), 0);
	return m;
}

static void guard_of_truncated_memory_fails_alone(void **state)
{
	struct memory *cut, *whole;
	struct poke p = {0};
	int cut_fd, whole_fd;

	(void)state;
	assert_int_equal(memory_guard_install(), 0); /* cmocka has its own handler */
	cut = guarded(64 * KIB, &cut_fd);
	whole = guarded(64 * KIB, &whole_fd);
	assert_int_equal(ftruncate(cut_fd, 4096), 0);
	p.at = cut->base + 8192;
	assert_false(memory_guard_run(poke, &p, whole, cut));
	assert_false(p.after);
	assert_true(atomic_load(&cut->dead));
	assert_false(atomic_load(&whole->dead));
	/* zero pages took its place: touching it again kills nobody ... */
	assert_int_equal(cut->base[8192], 0);
	assert_int_equal(cut->base[60 * KIB], 0);
	/* ... and is still reported */
	assert_false(memory_guard_run(poke, &p, cut, NULL));
	p = (struct poke){.at = whole->base + 8192};
	assert_true(memory_guard_run(poke, &p, NULL, whole));
	assert_true(p.after);
	assert_false(memory_owner_alive(cut));
	memory_unref(cut);
	memory_unref(whole);
	close(cut_fd);
	close(whole_fd);
}

/* The child's death is its parent's evidence: default action, no core. */
static int status_of(void (*fn)(void))
{
	int status = 0;
	pid_t pid = fork();

	if (pid == 0) {
		if (memory_guard_install() == 0)
			fn();
		_exit(0);
	}
	assert_true(pid > 0);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	return status;
}

static void fault_without_guard(void)
{
	int fd;
	struct memory *m = guarded(64 * KIB, &fd);

	(void)!ftruncate(fd, 0);
	*(volatile uint8_t *)(m->base + 8192) = 1;
}

static void fault_beside_guarded(void *arg)
{
	(void)arg;
	fault_without_guard();
}

static void fault_in_other_memory(void)
{
	int fd;
	struct memory *m = guarded(64 * KIB, &fd);

	memory_guard_run(fault_beside_guarded, NULL, m, NULL);
}

static void sigbus_sent(void)
{
	raise(SIGBUS);
}

static void guard_foreign_sigbus_keeps_default_action(void **state)
{
	void (*const faults[])(void) = {fault_without_guard, fault_in_other_memory,
					sigbus_sent};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(faults); i++) {
		int status = status_of(faults[i]);

#ifdef __SANITIZE_THREAD__ /* it reports a fault and exits, and holds raise() back */
		if (faults[i] != sigbus_sent)
			assert_int_not_equal(status, 0);
#else
		assert_true(WIFSIGNALED(status));
		assert_int_equal(WTERMSIG(status), SIGBUS);
#endif
	}
}

static void linear_memory_is_writable_and_sealed(void **state)
{
	struct memory *m = NULL;

	(void)state;
	assert_int_equal(memory_new_linear(3 * MIB + 5, &m), 0);
	m->base[3 * MIB + 4] = 1;
	assert_int_equal(ftruncate(m->fd, 0), -1);
	assert_int_equal(memory_ref(m) == m, 1);
	memory_unref(m);
	assert_int_equal(m->base[3 * MIB + 4], 1);
	memory_unref(m);
	assert_refused(memory_new_linear(0, &m), ERR_RANGE, "");
}

/* A process like this one that lives until p[1] is closed. */
static pid_t child_until(int p[2])
{
	pid_t pid;
	char c;

	assert_int_equal(pipe(p), 0);
	pid = fork();
	if (pid == 0) {
		close(p[1]);
		(void)!read(p[0], &c, 1);
		_exit(0);
	}
	return pid;
}

static void vm_process_exit_is_detected(void **state)
{
	static uint8_t bytes[8192];
	struct memory *m = NULL;
	int p[2], status;
	uint8_t byte;
	pid_t pid;

	(void)state;
	pid = child_until(p);
	assert_int_equal(vm_import_pid(pid, (uintptr_t)bytes, sizeof(bytes), &m), 0);
	assert_int_equal(m->kind, MEMORY_VM);
	assert_int_equal(vm_byte(m, true, &byte, (uintptr_t)bytes), 1);
	close(p[1]);
	/* dead but not reaped: the pid still exists, the memory does not */
	siginfo_t info;
	assert_int_equal(waitid(P_PID, (id_t)pid, &info, WEXITED | WNOWAIT), 0);
	assert_int_equal(vm_byte(m, true, &byte, (uintptr_t)bytes), -1);
	assert_int_equal(errno, ESRCH);
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(vm_byte(m, true, &byte, (uintptr_t)bytes), -1);
	memory_unref(m);
	assert_refused(vm_import_pid(pid, (uintptr_t)bytes, 1, &m), ERR_IMPORT, "");
	close(p[0]);
}

static void mem_of_a_process_is_read_until_its_end(void **state)
{
	static uint8_t bytes[8192] = {[4096] = 7};
	struct memory *m = NULL;
	char path[64];
	uint8_t byte;
	int p[2], fd;
	pid_t pid;

	(void)state;
	pid = child_until(p);
	snprintf(path, sizeof(path), "/proc/%d/mem", (int)pid);
	fd = open(path, O_RDWR | O_CLOEXEC);
	assert_true(fd >= 0);
	assert_int_equal(vm_import_fd(fd, pid, (uintptr_t)bytes, sizeof(bytes), &m), 0);
	close(fd);
	assert_int_equal(m->kind, MEMORY_VM);
	assert_true(memory_owner_alive(m));
	assert_int_equal(vm_byte(m, true, &byte, (uintptr_t)bytes + 4096), 1);
	assert_int_equal(byte, 7);
	byte = 9;
	assert_int_equal(vm_byte(m, false, &byte, (uintptr_t)bytes + 4096), 1);
	assert_int_equal(bytes[4096], 7); /* the child's, not ours */
	close(p[1]);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	assert_int_equal(vm_byte(m, true, &byte, (uintptr_t)bytes), -1);
	assert_int_equal(errno, ESRCH);
	memory_unref(m);
	close(p[0]);
}

/* What gates let in (test_gate), looked at once more. */
static void fd_of_another_file_is_no_mem(void **state)
{
	static const struct {
		const char *path;
		int flags;
	} others[] = {
		{"/proc/self/mem", O_WRONLY},
		{"/proc/self/statm", O_RDONLY},
		{"/dev/null", O_RDWR},
	};
	static uint8_t bytes[4096];
	struct warden *warden = test_warden();
	int before = fd_count(), fd;
	struct memory *m = NULL;

	(void)state;
	(void)warden;
	for (size_t i = 0; i < ARRAY_LEN(others); i++) {
		fd = open(others[i].path, others[i].flags | O_CLOEXEC);
		if (fd < 0) /* not of every user, or kernel */
			continue;
		assert_refused(
			vm_import_fd(fd, getpid(), (uintptr_t)bytes, sizeof(bytes), &m),
			ERR_IMPORT, "/proc/self/mem");
		close(fd);
	}
	fd = memfd(4096, 0);
	assert_refused(vm_import_fd(fd, getpid(), (uintptr_t)bytes, sizeof(bytes), &m),
		       ERR_IMPORT, "/proc/self/mem");
	close(fd);
	fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	assert_refused(vm_import_fd(fd, getpid(), 4096, 4096, &m), ERR_RANGE, "mapped");
	assert_refused(vm_import_fd(fd, getpid(), 0, 4096, &m), ERR_RANGE, "");
	assert_refused(vm_import_fd(fd, getpid(), 4096, INT64_MAX, &m), ERR_RANGE, "");
	mem_fail_at(1);
	assert_int_equal(vm_import_fd(fd, getpid(), (uintptr_t)bytes, sizeof(bytes), &m),
			 -ENOMEM);
	mem_fail_at(0);
	close(fd);
	assert_int_equal(fd_count(), before);
}

static void vm_unmapped_or_overflowing_range_is_refused(void **state)
{
	uint8_t *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct memory *m = NULL;

	(void)state;
	munmap(pages + 4096, 4096);
	assert_refused(vm_import_pid(getpid(), (uintptr_t)pages, 8192, &m), ERR_RANGE,
		       "nothing mapped");
	assert_refused(vm_import_pid(getpid(), (uintptr_t)pages, UINT64_MAX, &m),
		       ERR_RANGE, "");
	assert_refused(vm_import_pid(getpid(), 0, 1, &m), ERR_RANGE, "");
	munmap(pages, 4096);
}

static void import_out_of_memory_leaks_nothing(void **state)
{
	int fd = memfd(64 * KIB, MFD_ALLOW_SEALING), before = fd_count();
	struct memory *m = NULL;

	(void)state;
	mem_fail_at(1);
	assert_int_equal(memory_import_memfd(fd, 0, 4096, true, &m), -ENOMEM);
	mem_fail_at(1);
	assert_int_equal(memory_new_linear(4096, &m), -ENOMEM);
	mem_fail_at(1);
	assert_int_equal(vm_import_pid(getpid(), (uintptr_t)&fd, 4, &m), -ENOMEM);
	mem_fail_at(0);
	assert_int_equal(fd_count(), before);
	close(fd);
}

static sem_t collapse_may, collapsed;

static void collapse_slowly(void *first, size_t bytes)
{
	assert_int_equal((uintptr_t)first % (2 * MIB), 0);
	assert_true(bytes >= 2 * MIB);
	while (sem_wait(&collapse_may) < 0)
		;
	sem_post(&collapsed);
}

/* The kernel visits all cores before it collapses; some of them may be busy. */
static void import_does_not_wait_for_huge_pages(void **state)
{
	struct memory *m[3] = {NULL};
	int fd = memfd(8 * MIB, MFD_ALLOW_SEALING), ended;

	(void)state;
	sem_init(&collapse_may, 0, 1);
	sem_init(&collapsed, 0, 0);
	settle_with(collapse_slowly);
	assert_int_equal(memory_import_memfd(fd, 0, 8 * MIB, true, &m[0]), 0);
	while (sem_wait(&collapsed) < 0) /* usually it was waited for */
		;
	for (int i = 1; i < 3; i++)
		assert_int_equal(memory_import_memfd(fd, 0, 8 * MIB, true, &m[i]), 0);
	assert_int_equal(sem_getvalue(&collapsed, &ended), 0);
	assert_int_equal(ended, 0);
	memset(m[2]->base, 1, 8 * MIB);
	for (int i = 0; i < 3; i++)
		memory_unref(m[i]);
	for (int i = 1; i < 3; i++) {
		sem_post(&collapse_may);
		while (sem_wait(&collapsed) < 0)
			;
	}
	settle_with(NULL);
	close(fd);
}

static size_t largest_piece, pieces_bytes;

static void collapse_counts(void *first, size_t bytes)
{
	(void)first;
	largest_piece = bytes > largest_piece ? bytes : largest_piece;
	pieces_bytes += bytes;
	if (pieces_bytes == bytes) /* the process is to end while this one runs */
		memory_hurry(true);
}

static void memory_large_is_freed_when_the_process_ends(void **state)
{
	int fd = memfd(160 * MIB, MFD_ALLOW_SEALING);
	struct memory *m = NULL;

	(void)state;
	settle_with(collapse_counts);
	assert_refused(memory_import_memfd(fd, 0, 160 * MIB, true, &m), ERR_IO,
		       "populating");
	assert_in_range(largest_piece, 2 * MIB, 64 * MIB);
	assert_int_equal(pieces_bytes, largest_piece); /* the rest is left as it is */
	assert_refused(memory_import_memfd(fd, 0, 160 * MIB, true, &m), ERR_IO,
		       "populating");
	memory_hurry(false);
	settle_with(NULL);
	close(fd);
}

static size_t present_bytes;

static void collapse_looks(void *first, size_t bytes)
{
	unsigned char in[64 * MIB / 4096];

	assert_true(bytes <= 64 * MIB);
	assert_int_equal(mincore(first, bytes, in), 0);
	for (size_t i = 0; i < bytes / 4096; i++) {
		if (in[i] & 1)
			present_bytes += 4096;
		assert_true(i % 512 || in[i] & 1); /* the kernel refuses empty ones */
	}
}

/* Small pages made first would each be copied into a huge one. */
static void new_memory_is_collapsed_before_it_is_filled(void **state)
{
	struct memory *m = NULL;
	struct stat st;

	(void)state;
	present_bytes = 0;
	settle_with(collapse_looks);
	assert_int_equal(memory_new_linear(160 * MIB, &m), 0);
	assert_int_equal(present_bytes, 80 * 4096);
	assert_int_equal(fstat(m->fd, &st), 0);
	assert_int_equal(st.st_blocks * 512, 160 * MIB); /* filled, collapsed or not */
	settle_with(NULL);
	memory_unref(m);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(memfd_unsealed_is_sealed_and_shared),
		cmocka_unit_test(memfd_without_sealing_is_refused_with_remedy),
		cmocka_unit_test(memfd_sealed_read_only_fd_imports_read_only),
		cmocka_unit_test(memfd_future_write_is_refused_for_writing),
		cmocka_unit_test(memfd_range_beyond_the_object_is_refused),
		cmocka_unit_test(memfd_odd_offset_maps_the_page_below),
		cmocka_unit_test(memfd_is_mapped_whole),
		cmocka_unit_test(fd_without_memory_is_refused),
		cmocka_unit_test(memory_with_holes_is_refused_and_stays_empty),
		cmocka_unit_test(shm_is_imported_guarded),
		cmocka_unit_test(guard_of_truncated_memory_fails_alone),
		cmocka_unit_test(guard_foreign_sigbus_keeps_default_action),
		cmocka_unit_test(linear_memory_is_writable_and_sealed),
		cmocka_unit_test(vm_process_exit_is_detected),
		cmocka_unit_test(mem_of_a_process_is_read_until_its_end),
		cmocka_unit_test(fd_of_another_file_is_no_mem),
		cmocka_unit_test(vm_unmapped_or_overflowing_range_is_refused),
		cmocka_unit_test(import_does_not_wait_for_huge_pages),
		cmocka_unit_test(import_out_of_memory_leaks_nothing),
		cmocka_unit_test(memory_large_is_freed_when_the_process_ends),
		cmocka_unit_test(new_memory_is_collapsed_before_it_is_filled),
	};

	return cmocka_run_group_tests_name("memory", tests, NULL, NULL);
}
