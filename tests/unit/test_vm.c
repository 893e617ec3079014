/* SPDX-License-Identifier: Apache-2.0 */
/* Private memory of other processes: that it is exact, and that no owner holds us up. */
#include "daemon/memory/vm.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "daemon/gate/vm_child.h"
#include "daemon/memory/memory.h"
#include "tests/lib/gates.h"

#define PAGE 4096u

/* A process with a copy of our memory. */
static pid_t owner_begin(void)
{
	pid_t pid = fork();

	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (;;)
			pause();
	}
	assert_true(pid > 0);
	return pid;
}

static void owner_end(pid_t pid)
{
	kill(pid, SIGKILL);
	assert_int_equal(waitpid(pid, NULL, 0), pid);
}

/* Rows of all lengths, more of them and more bytes than a window has. */
static void rows_beyond_a_window_are_exact(void **state)
{
	const unsigned int rows = VM_WINDOW_ROWS + 500;
	uint8_t *theirs = mmap(NULL, 64 * PAGE, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *ours = test_calloc(64, PAGE);
	struct iovec *near = test_calloc(rows, sizeof(*near));
	struct iovec *far = test_calloc(rows, sizeof(*far));
	struct vm_hand hand = {.uses = 0};
	struct memory *m = NULL;
	size_t at = 0, done = 0;
	unsigned int from = 0;
	pid_t pid;

	(void)state;
	for (size_t i = 0; i < 64 * (size_t)PAGE; i++)
		theirs[i] = (uint8_t)(i * 2654435761u >> 13);
	for (unsigned int i = 0; i < rows; i++) {
		near[i] = (struct iovec){ours + at, i % 301};
		far[i] = (struct iovec){theirs + at, i % 301};
		at += i % 301;
	}
	assert_true(at < 64 * (size_t)PAGE);
	pid = owner_begin();
	assert_int_equal(vm_import_pid(pid, (uintptr_t)theirs, 64 * PAGE, &m), 0);
	while (from < rows) {
		ssize_t n = vm_move(&hand, m, true, near + from, far + from, rows - from,
				    NULL);

		assert_true(n > 0);
		done += (size_t)n;
		while (from < rows && (size_t)n >= near[from].iov_len)
			n -= (ssize_t)near[from++].iov_len;
		if (from < rows) {
			near[from].iov_base = (uint8_t *)near[from].iov_base + n;
			near[from].iov_len -= (size_t)n;
			far[from].iov_base = (uint8_t *)far[from].iov_base + n;
			far[from].iov_len -= (size_t)n;
		}
	}
	assert_int_equal(done, at);
	assert_memory_equal(ours, theirs, at);
	vm_hand_fini(&hand);
	memory_unref(m);
	owner_end(pid);
	munmap(theirs, 64 * PAGE);
	test_free(ours);
	test_free(near);
	test_free(far);
}

/* A set-user-ID program, too: what was opened before is of the old address space. */
static void process_after_exec_is_not_reached(void **state)
{
	static uint8_t bytes[PAGE] = {5};
	struct memory *m = NULL;
	int go[2];
	uint8_t byte = 0;
	pid_t pid;

	(void)state;
	assert_int_equal(pipe2(go, O_CLOEXEC), 0);
	pid = fork();
	if (pid == 0) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		if (read(go[0], &byte, 1) == 1)
			execl("/bin/sleep", "sleep", "60", (char *)NULL);
		_exit(1);
	}
	assert_int_equal(vm_import_pid(pid, (uintptr_t)bytes, sizeof(bytes), &m), 0);
	assert_int_equal(vm_byte(m, true, &byte, (uintptr_t)bytes), 1);
	assert_int_equal(byte, 5);
	assert_int_equal(write(go[1], "x", 1), 1);
	for (uint64_t end = clock_ns() + 10 * CLOCK_NS_PER_S;;) {
		ssize_t n = vm_byte(m, true, &byte, (uintptr_t)bytes);

		if (n < 0)
			break;
		assert_true(clock_ns() < end);
	}
	assert_int_equal(errno, ESRCH);
	assert_int_equal(kill(pid, 0), 0); /* it lives, with another memory */
	memory_unref(m);
	owner_end(pid);
	close(go[0]);
	close(go[1]);
}

/* ---- pairs ---- */

static void pair_ask(struct vm_hand *hand, const struct memory *m, const void *from,
		     void *to, uint64_t bytes)
{
	struct vm_pair *pair = vm_pair_of(hand, m);
	/* the same bytes in rows of other lengths */
	const uint64_t cut[2] = {bytes / 3, bytes / 7};
	const uintptr_t at[2] = {(uintptr_t)from, (uintptr_t)to};

	assert_non_null(pair);
	for (unsigned int i = 0; i < 2; i++) {
		pair->rows[i][0] = (struct vm_row){at[i], cut[i]};
		pair->rows[i][1] = (struct vm_row){at[i] + cut[i], bytes - cut[i]};
	}
	assert_int_equal(vm_pair_ask(hand, m, m, (uint32_t[]){2, 2}, bytes), 0);
}

static int pair_end(struct vm_hand *hand, const struct memory *m, bool *writing_p)
{
	return vm_pair_end(hand, m, NULL, writing_p);
}

/* ---- what hangs ---- */

/* The last process that a warden of ours has forked. */
static pid_t ward_of(pid_t parent)
{
	char path[64], text[4096] = "", *at = text;
	cleanup_close int fd = -1;
	pid_t last = 0, next;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)parent,
		 (int)parent);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, text, sizeof(text) - 1) < 0)
		return 0;
	while ((next = (pid_t)strtol(at, &at, 10)) > 0)
		last = next;
	return last;
}

/* Stands in for a page that nobody serves: the process stops before it answers. */
static void process_hanging_is_abandoned(void **state)
{
	static uint8_t bytes[PAGE] = {7};
	struct vm_hand hand = {.uses = 0};
	struct memory *m = NULL;
	atomic_bool canceled = true;
	uint8_t byte;
	struct iovec near = {&byte, 1}, far = {bytes, 1};
	uint64_t begun;
	pid_t warden;

	(void)state;
	assert_int_equal(vm_import_pid(getpid(), (uintptr_t)bytes, PAGE, &m), 0);
	warden = ward_of(getpid());
	assert_true(warden > 0);
	for (int i = 0; i < 4; i++) {
		pid_t child;

		(void)test_warden(); /* hears of those that ended */
		assert_int_equal(vm_move(&hand, m, true, &near, &far, 1, NULL), 1);
		child = ward_of(warden);
		assert_true(child > 0);
		assert_int_equal(kill(child, SIGSTOP), 0);
		begun = clock_ns();
		if (i == 3) {
			bool writing = true;

			pair_ask(&hand, m, bytes, bytes, PAGE);
			pair_ask(&hand, m, bytes, bytes, PAGE);
			assert_int_equal(vm_pair_end(&hand, m, &canceled, &writing), -1);
			assert_false(writing);
			assert_int_equal(vm_pairs_open(&hand, m), 0);
		} else {
			assert_int_equal(vm_move(&hand, m, i != 2, &near, &far, 1,
						 i ? &canceled : NULL),
					 -1);
		}
		/* what may still be written is no cancel */
		assert_int_equal(errno, i == 1 || i == 3 ? ECANCELED : ETIMEDOUT);
		assert_true(clock_ns() - begun < 10 * CLOCK_NS_PER_S);
	}
	/* nobody waits for that user's memory for a while */
	assert_int_equal(vm_move(&hand, m, true, &near, &far, 1, NULL), -1);
	assert_int_equal(errno, EUSERS);
	vm_hand_fini(&hand);
	memory_unref(m);
}

static void pairs_are_exact_with_two_in_flight(void **state)
{
	enum { PAIRS = 9, BYTES = VM_PAIR_BYTES };
	uint8_t *from = test_calloc(PAIRS, BYTES), *to = test_calloc(PAIRS, BYTES);
	struct vm_hand hand = {.uses = 0};
	struct memory *m = NULL;
	bool writing;

	(void)state;
	for (size_t i = 0; i < (size_t)PAIRS * BYTES; i++)
		from[i] = (uint8_t)(i * 2654435761u >> 13);
	assert_int_equal(vm_import_pid(getpid(), (uintptr_t)from, BYTES, &m), 0);
	assert_true(vm_can_pair(m, m));
	for (unsigned int i = 0; i < PAIRS; i++) {
		pair_ask(&hand, m, from + i * BYTES, to + i * BYTES, BYTES);
		if (i > 0)
			assert_int_equal(pair_end(&hand, m, &writing), 0);
	}
	assert_int_equal(pair_end(&hand, m, &writing), 0);
	assert_memory_equal(from, to, (size_t)PAIRS * BYTES);
	vm_hand_fini(&hand);
	memory_unref(m);
	test_free(from);
	test_free(to);
}

/* Side 0 is read, 1 is written; the second pair is not of the first's fault. */
static void pair_that_fails_names_its_side(void **state)
{
	uint8_t *pages = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	static uint8_t from[PAGE] = {1, 2, 3}, to[PAGE];
	struct vm_hand hand = {.uses = 0};
	struct memory *m = NULL;
	bool writing;
	uint8_t byte = 0;

	(void)state;
	munmap(pages + PAGE, PAGE);
	assert_int_equal(vm_import_pid(getpid(), (uintptr_t)from, PAGE, &m), 0);
	for (unsigned int side = 0; side < 2; side++) {
		memset(to, 0, sizeof(to));
		pair_ask(&hand, m, side ? from : pages + PAGE, side ? pages + PAGE : to,
			 PAGE);
		pair_ask(&hand, m, from, to, PAGE);
		assert_int_equal(pair_end(&hand, m, &writing), -1);
		assert_int_equal(errno, EFAULT);
		assert_int_equal(writing, side);
		assert_int_equal(vm_pairs_open(&hand, m), 1);
		assert_int_equal(pair_end(&hand, m, &writing), 0);
		assert_int_equal(vm_move(&hand, m, true, &(struct iovec){&byte, 1},
					 &(struct iovec){from + 2, 1}, 1, NULL),
				 1);
		assert_int_equal(byte, 3);
		pair_ask(&hand, m, from, to, PAGE);
		assert_int_equal(pair_end(&hand, m, &writing), 0);
		assert_memory_equal(from, to, PAGE);
	}
	vm_hand_fini(&hand);
	memory_unref(m);
	munmap(pages, PAGE);
}

/* The question or the answer fails, which is not known before. */
static void pair_of_a_killed_process_fails_and_the_next_works(void **state)
{
	static uint8_t from[PAGE] = {1, 2, 3}, to[PAGE];
	struct vm_hand hand = {.uses = 0};
	struct memory *m = NULL;
	bool writing;

	(void)state;
	assert_int_equal(vm_import_pid(getpid(), (uintptr_t)from, PAGE, &m), 0);
	for (unsigned int i = 0; i < 8; i++) {
		(void)test_warden(); /* hears of those that ended */
		memset(to, 0, sizeof(to));
		pair_ask(&hand, m, from, to, PAGE);
		assert_int_equal(pair_end(&hand, m, &writing), 0);
		assert_memory_equal(from, to, PAGE);
		assert_int_equal(kill(ward_of(ward_of(getpid())), SIGKILL), 0);
		if (vm_pair_ask(&hand, m, m, (uint32_t[]){0, 0}, 0) == 0)
			assert_int_equal(pair_end(&hand, m, &writing), -1);
		assert_int_equal(vm_pairs_open(&hand, m), 0);
	}
	vm_hand_fini(&hand);
	memory_unref(m);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rows_beyond_a_window_are_exact),
		cmocka_unit_test(pairs_are_exact_with_two_in_flight),
		cmocka_unit_test(pair_that_fails_names_its_side),
		cmocka_unit_test(pair_of_a_killed_process_fails_and_the_next_works),
		cmocka_unit_test(process_after_exec_is_not_reached),
		cmocka_unit_test(process_hanging_is_abandoned),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
