/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_control: an engine that says what the input says, to a daemon that has a peer, a
 * room and a cache of it. Every command of the control socket is reached, with
 * descriptors of kinds that a gate lets through and of some that it does not. Answers are
 * JSON, whatever was said; the end of both engines leaves nothing behind.
 *
 * Input: lines; the first character of each is [kind of descriptor], '0': none, and the
 * rest is the line. "@" alone: time goes by.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/fuzz/lib/fuzz.h"
#include "tests/fuzz/lib/world.h"

#define LINES_MAX 32u
#define MEMORY_BYTES 65536

static int memory(unsigned int flags, off_t bytes, int seals)
{
	int fd = memfd_create("fuzz", MFD_CLOEXEC | flags);

	if (fd < 0) /* no huge pages here */
		return -1;
	if (ftruncate(fd, bytes) < 0 || (seals && fcntl(fd, F_ADD_SEALS, seals) < 0))
		abort();
	return fd;
}

static int descriptor(char kind)
{
	int pair[2];

	switch (kind) {
	case '1':
		return memory(MFD_ALLOW_SEALING, MEMORY_BYTES, F_SEAL_SHRINK);
	case '2':
		return memory(0, MEMORY_BYTES, 0);
	case '3':
		return memory(MFD_ALLOW_SEALING, 100, F_SEAL_SHRINK | F_SEAL_GROW);
	case '4':
		return memory(MFD_ALLOW_SEALING, 0, 0);
	case '5':
		return memory(MFD_HUGETLB | MFD_ALLOW_SEALING, 2 << 20, F_SEAL_SHRINK);
	case '6':
		return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	case '7':
		if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
			abort();
		close(pair[1]);
		return pair[0];
	case '8':
		return open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	case '9':
		return open("/dev/null", O_RDWR | O_CLOEXEC);
	case 'a':
		return open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
	default:
		return -1;
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct world w;
	const char *at = (const char *)data, *end = at + size;

	world_begin(&w);
	for (unsigned int i = 0; i < LINES_MAX && at < end; i++) {
		const char *newline = memchr(at, '\n', (size_t)(end - at));
		size_t len = (size_t)((newline ? newline : end) - at);

		if (len == 1 && *at == '@')
			cluster_run(&w.c, LOOP_NS_PER_S);
		else if (len > 1)
			world_say(&w, 0, at + 1, len - 1, descriptor(*at));
		cluster_run(&w.c, LOOP_NS_PER_MS);
		at += len + 1;
	}
	world_end(&w);
	return 0;
}
