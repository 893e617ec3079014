/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The file system is checked first, since its number cannot be chosen by the process that
 * opened the file, and a file of a file system that others serve (FUSE, NFS) is none of
 * these. Of file systems on disks, those are accepted that only the host's administrator
 * can mount and that use only disks: an overlay may have FUSE beneath it, and any user
 * can mount one. A pipe, a socket or a terminal may sleep when it is closed, and nothing
 * of kvd needs one.
 */
#include "daemon/gate/vet.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#ifndef PID_FS_MAGIC
#define PID_FS_MAGIC 0x50494446
#endif

/* linux/magic.h has these in part. Nodes of block devices lie in a devtmpfs, which has
 * tmpfs's number. */
static const uint32_t disk_file_systems[] = {
	TMPFS_MAGIC,	 EXT4_SUPER_MAGIC, /* 2 and 3, too */
	XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC, F2FS_SUPER_MAGIC, 0xca451a4e, /* bcachefs */
	0x2fc12fc1,							  /* ZFS */
};

/* Read again each time: a driver may be loaded later. Opened while this process may. */
static int devices = -1;

void vet_prepare(void)
{
	devices = open("/proc/devices", O_RDONLY | O_CLOEXEC);
}

int vet_descriptor(void)
{
	return devices;
}

/* Drivers that kvd has business with, as that file names them: lines "195 nvidia" under
 * "Character devices:". */
static int is_nvidia(dev_t device)
{
	char text[4096], name[64], *line, *rest = text;
	unsigned int number;
	ssize_t n = pread(devices, text, sizeof(text) - 1, 0);

	text[n > 0 ? n : 0] = '\0';
	while ((line = strsep(&rest, "\n")) && !strstr(line, "Block devices"))
		if (sscanf(line, "%u %63s", &number, name) == 2 &&
		    number == major(device) && strncmp(name, "nvidia", 6) == 0)
			return 1;
	return 0;
}

static const char *fd_link(int fd, char *link, size_t size)
{
	char path[40];
	ssize_t n;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	n = readlink(path, link, size - 1);
	link[n > 0 ? n : 0] = '\0';
	return link;
}

/* Of no other file of /proc is nothing at 0. */
static int is_process_memory(int fd)
{
	char byte;

	ssize_t n = pread(fd, &byte, 1, 0);

	return n == 0 || (n < 0 && errno == EIO); /* 0: it has ended */
}

/* Files of /proc have the names that the kernel gave them. A user namespace can mount
 * another file of it over one: that is the root of a mount then. */
bool vet_is_statm(int fd)
{
	static const char name[] = "/statm";
	char link[PATH_MAX];
	struct statfs fs;
	struct statx sx;
	size_t len;

	if (fstatfs(fd, &fs) < 0 || fs.f_type != PROC_SUPER_MAGIC ||
	    statx(fd, "", AT_EMPTY_PATH, STATX_TYPE, &sx) < 0 || !S_ISREG(sx.stx_mode) ||
	    !(sx.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT) ||
	    sx.stx_attributes & STATX_ATTR_MOUNT_ROOT)
		return false;
	len = strlen(fd_link(fd, link, sizeof(link)));
	return len >= sizeof(name) && len < sizeof(link) - 1 /* whole */ &&
	       strcmp(link + len - strlen(name), name) == 0;
}

static const char *type_word(mode_t mode)
{
	return S_ISSOCK(mode)	? "a socket"
	       : S_ISFIFO(mode) ? "a pipe"
	       : S_ISDIR(mode)	? "a directory"
	       : S_ISCHR(mode)	? "a device"
	       : S_ISBLK(mode)	? "a block device"
	       : S_ISLNK(mode)	? "a symbolic link"
				: "";
}

static void vet_say(char *what, size_t size, const struct statfs *fs, mode_t mode)
{
	if (*type_word(mode))
		snprintf(what, size, "%s", type_word(mode));
	else
		snprintf(what, size, "a file of a file system of type %#lx",
			 (unsigned long)fs->f_type);
}

static bool is_disk(const struct statfs *fs, mode_t mode)
{
	if (S_ISBLK(mode))
		return fs->f_type == TMPFS_MAGIC;
	for (size_t i = 0; i < ARRAY_LEN(disk_file_systems); i++)
		if (S_ISREG(mode) && (uint32_t)fs->f_type == disk_file_systems[i])
			return true;
	return false;
}

bool vet_is_disk(int fd, char *what, size_t size)
{
	struct statfs fs;
	struct stat st;

	if (fstatfs(fd, &fs) < 0 || fstat(fd, &st) < 0) {
		snprintf(what, size, "not readable (%s)", strerror(errno));
		return false;
	}
	vet_say(what, size, &fs, st.st_mode);
	return is_disk(&fs, st.st_mode);
}

int vet_fd(int fd, char *what, size_t size)
{
	int flags = fcntl(fd, F_GETFL);
	char link[128];
	struct statfs fs;
	struct stat st;

	if (flags < 0 || (flags & O_PATH)) {
		snprintf(what, size, "opened with O_PATH");
		return -1;
	}
	if (fstatfs(fd, &fs) < 0 || fstat(fd, &st) < 0) {
		snprintf(what, size, "not readable (%s)", strerror(errno));
		return -1;
	}
	if ((S_ISREG(st.st_mode) && fs.f_type == HUGETLBFS_MAGIC) ||
	    is_disk(&fs, st.st_mode))
		return 0;
	if (fs.f_type == DMA_BUF_MAGIC || fs.f_type == PID_FS_MAGIC)
		return 0;
	if (fs.f_type == ANON_INODE_FS_MAGIC &&
	    strcmp(fd_link(fd, link, sizeof(link)), "anon_inode:[pidfd]") == 0)
		return 0;
	if (fs.f_type == PROC_SUPER_MAGIC && (vet_is_statm(fd) || is_process_memory(fd)))
		return 0;
	if (S_ISCHR(st.st_mode) && is_nvidia(st.st_rdev))
		return 0;
	vet_say(what, size, &fs, st.st_mode);
	return -1;
}
