/* SPDX-License-Identifier: Apache-2.0 */
/* stuck: memory at whose first touch the kernel sleeps, its own accesses included, as at
 * a disk that does not answer. */
#ifndef KVD_TESTS_STUCK_H
#define KVD_TESTS_STUCK_H

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Of pages that are not there yet. -1: this user may not (vm.unprivileged_userfaultfd).
 */
static inline int stuck_begin(void *base, size_t len)
{
	struct uffdio_api api = {.api = UFFD_API};
	struct uffdio_register range = {.range = {.start = (uintptr_t)base, .len = len},
					.mode = UFFDIO_REGISTER_MODE_MISSING};
	int fd = (int)syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	if (fd < 0)
		return -1;
	if (ioctl(fd, UFFDIO_API, &api) == 0 && ioctl(fd, UFFDIO_REGISTER, &range) == 0)
		return fd;
	close(fd);
	return -1;
}

/* Until somebody sleeps there; 0: not in that time. */
static inline int stuck_wait(int fd, int ms)
{
	struct pollfd waits = {.fd = fd, .events = POLLIN};

	return poll(&waits, 1, ms);
}

/* All go on. */
static inline int stuck_end(int fd, void *base, size_t len)
{
	struct uffdio_range range = {.start = (uintptr_t)base, .len = len};
	int r = ioctl(fd, UFFDIO_UNREGISTER, &range);

	close(fd);
	return r;
}

#endif
