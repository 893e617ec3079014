/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into a daemon: what it draws 16 random bytes for, its secrets and tokens, is
 * noted in the file $KVD_DRAWN: how many (8 bytes), and all of them. What libraries draw
 * is not.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define DRAWN_BYTES 16

static struct notes {
	_Atomic uint64_t count;
	uint8_t drawn[][DRAWN_BYTES];
} * notes;
static uint64_t room;

__attribute__((constructor)) static void attach(void)
{
	const char *path = getenv("KVD_DRAWN");
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		abort();
	notes = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (notes == MAP_FAILED)
		abort();
	room = ((uint64_t)st.st_size - sizeof(*notes)) / DRAWN_BYTES;
	close(fd);
}

static void *object_of(void *address)
{
	Dl_info info;

	return dladdr(address, &info) ? info.dli_fbase : NULL;
}

ssize_t getrandom(void *buf, size_t len, unsigned int flags)
{
	ssize_t n = syscall(SYS_getrandom, buf, len, flags);

	if (n == DRAWN_BYTES && object_of(__builtin_return_address(0)) ==
					object_of((void *)getauxval(AT_ENTRY))) {
		uint64_t at = atomic_fetch_add(&notes->count, 1);

		if (at < room)
			memcpy(notes->drawn[at], buf, DRAWN_BYTES);
	}
	return n;
}
