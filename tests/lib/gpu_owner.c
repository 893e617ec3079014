/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The process is this very program, started anew: the driver, fake or not, does
 * not survive a fork. It says over a socket what its memory is, with the file
 * behind it, which only the fake has, and lives until the socket closes.
 */
#include "tests/lib/gpu_owner.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gpu/kernels_image.h"
#include "tests/gpu/fake_cuda.h"

struct introduction {
	uint64_t address;
	struct gpu_handle handle;
};

const char *gpu_fake_path(const char *variant, char path[256])
{
	char self[200] = "";
	char *slash;

	if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0)
		abort();
	/* build/CFG/unit/test_x and build/CFG/conform */
	slash = strrchr(self, '/');
	*slash = '\0';
	snprintf(path, 256, "%s/fakegpu/%slibcuda.so.1", self, variant);
	if (access(path, R_OK) < 0)
		snprintf(path, 256, "%s/../fakegpu/%slibcuda.so.1", self, variant);
	return path;
}

const char *gpu_fake_kernels(void)
{
	static const char words[] = "kvd fake kernels\n";
	static char path[64];
	size_t bytes;
	int fd;

	if (kernels_image(&bytes))
		return "auto";
	if (!path[0]) {
		fd = memfd_create("kernels", MFD_CLOEXEC);
		if (write(fd, words, sizeof(words)) != (ssize_t)sizeof(words))
			abort();
		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	}
	return path;
}

void *gpu_fake_symbol(const char *name)
{
	char path[256];
	void *library = dlopen(gpu_fake_path("", path), RTLD_NOW), *symbol;

	symbol = library ? dlsym(library, name) : NULL;
	if (!symbol) {
		fprintf(stderr, "%s: no %s\n", path, name);
		abort();
	}
	return symbol;
}

/* ---- the process ---- */

#define CALL(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

static bool alloc_ipc(struct introduction *in, uint64_t bytes)
{
	return CALL(cuMemAlloc_v2)(&in->address, bytes) == 0 &&
	       CALL(cuIpcGetMemHandle)(&in->handle.ipc, in->address) == 0;
}

static bool alloc_vmm(struct introduction *in, int device, uint64_t bytes)
{
	const struct cu_mem_prop prop = {
		.type = CU_MEM_ALLOCATION_TYPE_PINNED,
		.handle_types = CU_MEM_HANDLE_TYPE_POSIX_FD,
		.location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
	const struct cu_mem_access access = {.location = prop.location,
					     .flags = CU_MEM_ACCESS_READWRITE};
	uint64_t memory;

	in->handle.bytes = bytes;
	return CALL(cuMemCreate)(&memory, bytes, &prop, 0) == 0 &&
	       CALL(cuMemAddressReserve)(&in->address, bytes, 0, 0, 0) == 0 &&
	       CALL(cuMemMap)(in->address, bytes, 0, memory, 0) == 0 &&
	       CALL(cuMemSetAccess)(in->address, bytes, &access, 1) == 0 &&
	       CALL(cuMemExportToShareableHandle)(&in->handle.fd, memory,
						  CU_MEM_HANDLE_TYPE_POSIX_FD, 0) == 0;
}

static bool introduce(int sock, const struct introduction *in, int file)
{
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control = {0};
	struct iovec iov = {(void *)in, sizeof(*in)};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = &control,
			     .msg_controllen = sizeof(control)};
	int fds[2] = {file, in->handle.kind == GPU_HANDLE_VMM ? in->handle.fd : file};

	control.head.cmsg_level = SOL_SOCKET;
	control.head.cmsg_type = SCM_RIGHTS;
	control.head.cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(&control.head), fds, sizeof(fds));
	return sendmsg(sock, &msg, MSG_NOSIGNAL) == sizeof(*in);
}

static int owner_run(int sock, enum gpu_handle_kind kind, int device, uint64_t bytes)
{
	struct introduction in = {.handle = {.kind = kind, .fd = -1}};
	struct cu_ctx *ctx = NULL;
	struct cu_uuid uuid;
	uint64_t offset;
	int file = -1;
	char byte;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (CALL(cuInit)(0) || CALL(cuDevicePrimaryCtxRetain)(&ctx, device) ||
	    CALL(cuCtxPushCurrent_v2)(ctx) || CALL(cuDeviceGetUuid_v2)(&uuid, device))
		return 2;
	cudrv_uuid_text(&uuid, in.handle.device);
	if (!(kind == GPU_HANDLE_IPC ? alloc_ipc(&in, bytes)
				     : alloc_vmm(&in, device, bytes)) ||
	    CALL(fake_cuda_file)(in.address, &file, &offset) ||
	    !introduce(sock, &in, file))
		return 3;
	while (read(sock, &byte, 1) > 0)
		continue;
	return 0;
}

void gpu_owner_main(int argc, char **argv)
{
	if (argc != 6 || strcmp(argv[1], "--gpu-owner") != 0)
		return;
	_exit(owner_run(atoi(argv[2]), (enum gpu_handle_kind)atoi(argv[3]), atoi(argv[4]),
			strtoull(argv[5], NULL, 10)));
}

/* ---- the test ---- */

static bool owner_hear(struct gpu_owner *owner)
{
	struct introduction in;
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(2 * sizeof(int))];
	} control;
	struct iovec iov = {&in, sizeof(in)};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = &control,
			     .msg_controllen = sizeof(control)};
	int fds[2];

	if (recvmsg(owner->sock, &msg, MSG_CMSG_CLOEXEC) != sizeof(in) ||
	    msg.msg_controllen < CMSG_LEN(sizeof(fds)))
		return false;
	memcpy(fds, CMSG_DATA(&control.head), sizeof(fds));
	owner->file = fds[0];
	owner->handle = in.handle;
	owner->handle.fd = fds[1];
	owner->address = in.address;
	owner->view = mmap(NULL, owner->bytes, PROT_READ | PROT_WRITE, MAP_SHARED,
			   owner->file, 0);
	return owner->view != MAP_FAILED;
}

bool gpu_owner_start(struct gpu_owner *owner, enum gpu_handle_kind kind,
		     unsigned int device, uint64_t bytes)
{
	char words[4][24];
	int pair[2];

	*owner = (struct gpu_owner){.file = -1, .sock = -1, .bytes = bytes};
	owner->handle.fd = -1;
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return false;
	snprintf(words[0], sizeof(words[0]), "%d", pair[1]);
	snprintf(words[1], sizeof(words[1]), "%d", (int)kind);
	snprintf(words[2], sizeof(words[2]), "%u", device);
	snprintf(words[3], sizeof(words[3]), "%llu", (unsigned long long)bytes);
	owner->pid = fork();
	if (owner->pid == 0) {
		fcntl(pair[1], F_SETFD, 0);
		execl("/proc/self/exe", "owner", "--gpu-owner", words[0], words[1],
		      words[2], words[3], NULL);
		_exit(127);
	}
	close(pair[1]);
	owner->sock = pair[0];
	if (owner->pid > 0 && owner_hear(owner))
		return true;
	gpu_owner_end(owner);
	return false;
}

void gpu_owner_kill(struct gpu_owner *owner)
{
	if (owner->pid <= 0)
		return;
	kill(owner->pid, SIGKILL);
	waitpid(owner->pid, NULL, 0);
	owner->pid = -1;
}

void gpu_owner_end(struct gpu_owner *owner)
{
	if (owner->sock >= 0)
		close(owner->sock);
	if (owner->pid > 0)
		waitpid(owner->pid, NULL, 0);
	if (owner->view && owner->view != MAP_FAILED)
		munmap(owner->view, owner->bytes);
	if (owner->file >= 0)
		close(owner->file);
	if (owner->handle.fd >= 0)
		close(owner->handle.fd);
	*owner = (struct gpu_owner){.pid = -1, .sock = -1, .file = -1};
	owner->handle.fd = -1;
}
