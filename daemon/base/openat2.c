/* SPDX-License-Identifier: Apache-2.0 */
/*
 * systemd lets no openat2() pass where RestrictSUIDSGID= is set, since a filter cannot
 * see its flags. There openat() is used and its result checked by mount id; it reaches
 * the root of the other file system at most.
 */
#include "daemon/base/openat2.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#define LOOK (O_PATH | O_NOFOLLOW | O_CLOEXEC)

/* The mount id of a descriptor; -1: unavailable. */
static long mount_of(int fd)
{
	char path[48], text[256], *at;
	cleanup_close int info = -1;
	ssize_t n;

	snprintf(path, sizeof(path), "/proc/self/fdinfo/%d", fd);
	info = open(path, O_RDONLY | O_CLOEXEC);
	n = info < 0 ? -1 : read(info, text, sizeof(text) - 1);
	text[n > 0 ? n : 0] = '\0';
	at = strstr(text, "mnt_id:");
	return at ? strtol(at + strlen("mnt_id:"), NULL, 10) : -1;
}

static int look_at(int dir, const char *name)
{
	cleanup_close int fd = openat(dir, name, LOOK);
	long here = mount_of(dir);

	if (fd < 0)
		return -1;
	if (here < 0 || mount_of(fd) != here) {
		errno = EXDEV;
		return -1;
	}
	return mem_steal_fd(&fd);
}

int openat2_path(const char *dir, const char *name)
{
	const struct open_how how = {.flags = LOOK,
				     .resolve = RESOLVE_BENEATH | RESOLVE_NO_XDEV};
	cleanup_close int parent = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
	int fd;

	if (parent < 0)
		return -1;
	fd = (int)syscall(SYS_openat2, parent, name, &how, sizeof(how));
	return fd < 0 && errno == ENOSYS ? look_at(parent, name) : fd;
}

int openat2_reopen(int path_fd, int flags)
{
	char path[40];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", path_fd);
	return open(path, flags | O_CLOEXEC);
}
