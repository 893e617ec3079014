/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Numbers and structures are written down here: libc has no functions for it, and headers
 * of Debian 12 know a part. A version of the kernel's that is newer has more rights,
 * which are not requested; rights unknown to an older one are not requested.
 *
 * The main process keeps read access: memory that an engine opened in another mount
 * namespace is opened again for reading (shm_reg.c), and below no directory of ours.
 */
#include "daemon/gate/landlock.h"

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#define CREATE_VERSION 1u
#define RULE_PATH_BENEATH 1

struct ruleset {
	uint64_t fs;
	uint64_t net;	 /* version 4 */
	uint64_t scoped; /* version 6 */
};

struct path_beneath {
	uint64_t access;
	int32_t parent_fd;
} __attribute__((packed));

#define FS_WRITE_FILE (1u << 1)
#define FS_REMOVE_DIR (1u << 4)
#define FS_REMOVE_FILE (1u << 5)
#define FS_MAKE_DIR (1u << 7)
#define FS_MAKE_REG (1u << 8)
#define FS_MAKE_SOCK (1u << 9)
#define FS_MAKE_FIFO (1u << 10)
#define FS_MAKE_SYM (1u << 12)
#define FS_TRUNCATE (1u << 14)	/* version 3 */
#define FS_IOCTL_DEV (1u << 15) /* version 5 */
#define NET_ALL 3u		/* bind and connect by TCP */
#define SCOPE_SIGNAL 2u
#define SCOPE_ALL 3u /* abstract sockets, signals */

/* All that changes a file; nodes of devices cannot be made (seccomp). */
#define FS_CHANGE                                                                     \
	(FS_WRITE_FILE | FS_REMOVE_DIR | FS_REMOVE_FILE | FS_MAKE_DIR | FS_MAKE_REG | \
	 FS_MAKE_SOCK | FS_MAKE_FIFO | FS_MAKE_SYM | FS_TRUNCATE | FS_IOCTL_DEV)

int landlock_version(void)
{
	long version = syscall(SYS_landlock_create_ruleset, NULL, 0, CREATE_VERSION);

	return version > 0 ? (int)version : 0;
}

static uint64_t known_rights(int version)
{
	unsigned int count = version >= 5   ? 16
			     : version >= 3 ? 15
			     : version >= 2 ? 14
					    : 13;

	return (UINT64_C(1) << count) - 1;
}

static int ruleset_new(struct ruleset rules)
{
	int version = landlock_version();
	size_t size = version >= 6   ? sizeof(rules)
		      : version >= 4 ? offsetof(struct ruleset, scoped)
				     : offsetof(struct ruleset, net);

	rules.fs &= known_rights(version);
	return (int)syscall(SYS_landlock_create_ruleset, &rules, size, 0);
}

static int ruleset_enter(int owned_fd)
{
	long r = syscall(SYS_landlock_restrict_self, owned_fd, 0);
	int no = errno;

	close(owned_fd);
	errno = no;
	return r == 0 ? 0 : -1;
}

static int allow(int ruleset, const char *path, uint64_t access)
{
	cleanup_close int fd = open(path, O_PATH | O_CLOEXEC);
	struct path_beneath rule = {access & known_rights(landlock_version()), fd};

	if (fd < 0)
		return 0;
	return (int)syscall(SYS_landlock_add_rule, ruleset, RULE_PATH_BENEATH, &rule, 0);
}

int landlock_nothing(void)
{
	int ruleset = ruleset_new(
		(struct ruleset){.fs = UINT64_MAX, .net = NET_ALL, .scoped = SCOPE_ALL});

	return ruleset < 0 ? -1 : ruleset_enter(ruleset);
}

int landlock_no_change(const char *const *directories, const char *const *devices)
{
	int ruleset =
		ruleset_new((struct ruleset){.fs = FS_CHANGE, .scoped = SCOPE_SIGNAL});
	int r = 0, no;

	if (ruleset < 0)
		return -1;
	for (; r == 0 && *directories; directories++)
		r = allow(ruleset, *directories, FS_CHANGE);
	for (; r == 0 && *devices; devices++)
		r = allow(ruleset, *devices, FS_WRITE_FILE | FS_TRUNCATE | FS_IOCTL_DEV);
	if (r == 0)
		return ruleset_enter(ruleset);
	no = errno;
	close(ruleset);
	errno = no;
	return -1;
}
