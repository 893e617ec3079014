/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/gates.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/gate/gate.h"
#include "daemon/gate/sandbox.h"
#include "daemon/gate/warden.h"
#include "daemon/loop/loop.h"
#include "daemon/memory/memory.h"
#include "daemon/memory/vm.h"

static void gates_on_lost(void *arg)
{
	(void)arg;
	fprintf(stderr, "the warden has ended\n");
	abort();
}

void gates_begin(struct loop *loop, struct gates **gates_p)
{
	/* valgrind makes calls of its own in the processes that it watches */
	const char *sandboxed = getenv("KVD_TEST_SANDBOX");
	int socket = -1;
	int r = sandbox_prepare(!sandboxed || strcmp(sandboxed, "no") != 0);

	if (r == 0)
		r = warden_fork(&socket);
	if (r == 0)
		r = gates_new(loop, socket, gates_on_lost, NULL, gates_p);
	if (r < 0) {
		fprintf(stderr, "gates: %s\n", err_last()->text);
		abort();
	}
}

struct warden *test_warden(void)
{
	static struct gates *gates;
	static struct loop *loop;

	if (!gates) {
		if (loop_new(&loop) < 0)
			abort();
		gates_begin(loop, &gates);
	}
	while (loop_turn(loop, 0)) /* processes that have ended */
		;
	return gates_warden(gates);
}

int vm_import_fd(int fd, pid_t pid, uint64_t address, uint64_t length,
		 struct memory **memory_p)
{
	struct memory_owner owner = {
		.warden = test_warden(), .uid = getuid(), .pid = pid};
	int r;

	owner.pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	r = memory_import_vm(&owner, fd, address, length, memory_p);
	mem_closep(&owner.pidfd);
	return r;
}

int vm_import_pid(pid_t pid, uint64_t address, uint64_t length, struct memory **memory_p)
{
	cleanup_close int fd = -1;
	char path[40];

	snprintf(path, sizeof(path), "/proc/%d/mem", (int)pid);
	fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return err_raise(ERR_IMPORT, "%s: %d", path, errno);
	return err_pass(vm_import_fd(fd, pid, address, length, memory_p));
}

ssize_t vm_byte(const struct memory *memory, bool reading, uint8_t *byte,
		uint64_t address)
{
	struct iovec near = {byte, 1}, far = {(void *)(uintptr_t)address, 1};
	struct vm_hand hand = {.uses = 0};
	ssize_t n;

	(void)test_warden();
	n = vm_move(&hand, memory, reading, &near, &far, 1, NULL);
	vm_hand_fini(&hand);
	return n;
}
