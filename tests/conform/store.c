/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Where the bytes are that transfers are judged by. A memfd or a POSIX shm object is
 * read and written by its descriptor, never by a map: what was cut must answer with
 * an error and not with a signal. Private memory belongs to a process of its own,
 * which does nothing but have it, and can be killed.
 */
#include "tests/conform/store.h"
#include "tests/lib/file.h"
#include "tests/lib/tmp.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- the view ---- */

static bool vm_move(const struct store *store, uint64_t offset, void *buf, size_t len,
		    bool write)
{
	struct iovec local = {buf, len};
	struct iovec remote = {(void *)(uintptr_t)(store->address + offset), len};
	ssize_t n = write ? process_vm_writev(store->owner, &local, 1, &remote, 1, 0)
			  : process_vm_readv(store->owner, &local, 1, &remote, 1, 0);

	return n == (ssize_t)len;
}

bool store_read(const struct store *store, uint64_t offset, void *buf, size_t len)
{
	uint8_t *at = buf;

	if (store->kind == MEMORY_VM)
		return vm_move(store, offset, buf, len, false);
	while (len) {
		ssize_t n = pread(store->fd, at, len, (off_t)offset);

		if (n <= 0)
			return false;
		at += n;
		offset += (uint64_t)n;
		len -= (size_t)n;
	}
	return true;
}

bool store_write(struct store *store, uint64_t offset, const void *buf, size_t len)
{
	const uint8_t *at = buf;

	if (store->kind == MEMORY_VM)
		return vm_move(store, offset, (void *)(uintptr_t)buf, len, true);
	while (len) {
		ssize_t n = pwrite(store->fd, at, len, (off_t)offset);

		if (n <= 0)
			return false;
		at += n;
		offset += (uint64_t)n;
		len -= (size_t)n;
	}
	return true;
}

bool store_cut(struct store *store, uint64_t length)
{
	return ftruncate(store->fd, (off_t)length) == 0;
}

/* ---- making ---- */

static int make_memfd(struct store *store)
{
	store->fd = memfd_create("conform", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (store->fd < 0 || file_fill(store->fd, store->length) < 0 ||
	    fcntl(store->fd, F_ADD_SEALS, F_SEAL_SHRINK) < 0)
		return -errno;
	return 0;
}

static int make_shm(struct store *store)
{
	char name[64];

	store->fd = shm_open(tmp_name(name, sizeof(name), "/conform"),
			     O_RDWR | O_CREAT | O_EXCL, 0600);
	if (store->fd < 0)
		return -errno;
	shm_unlink(name);
	return file_fill(store->fd, store->length) < 0 ? -errno : 0;
}

int owner_main(int sock, uint64_t length)
{
	uint64_t address;
	char byte;
	void *base = mmap(NULL, length, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (base == MAP_FAILED)
		return 1;
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	address = (uint64_t)(uintptr_t)base;
	if (write(sock, &address, sizeof(address)) != sizeof(address))
		return 1;
	while (read(sock, &byte, 1) > 0)
		continue; /* until the driver lets go */
	return 0;
}

static int make_owner(struct store *store)
{
	int pair[2];
	char fd_word[16], length_word[32];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -errno;
	snprintf(fd_word, sizeof(fd_word), "%d", pair[1]);
	snprintf(length_word, sizeof(length_word), "%llu",
		 (unsigned long long)store->length);
	store->owner = fork();
	if (store->owner == 0) {
		fcntl(pair[1], F_SETFD, 0);
		execl("/proc/self/exe", "conform", "--owner", fd_word, length_word, NULL);
		_exit(127);
	}
	close(pair[1]);
	store->owner_sock = pair[0];
	if (store->owner < 0 || read(pair[0], &store->address, sizeof(store->address)) !=
					sizeof(store->address))
		return -ECHILD;
	return 0;
}

int store_init(struct store *store, enum memory_kind kind, uint64_t length)
{
	*store = (struct store){
		.kind = kind, .length = length, .fd = -1, .owner_sock = -1};
	if (kind == MEMORY_SEALED)
		return make_memfd(store);
	if (kind == MEMORY_GUARDED)
		return make_shm(store);
	return kind == MEMORY_VM ? make_owner(store) : 0;
}

static void owner_end(struct store *store)
{
	if (store->owner_sock < 0)
		return;
	close(store->owner_sock);
	store->owner_sock = -1;
	if (store->owner > 0)
		waitpid(store->owner, NULL, 0);
}

void store_owner_kill(struct store *store)
{
	kill(store->owner, SIGKILL);
	owner_end(store);
}

void store_fini(struct store *store)
{
	owner_end(store);
	if (store->fd >= 0)
		close(store->fd);
	store->fd = -1;
}
