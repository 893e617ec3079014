/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A directory holds NUMBER.SLOT_BYTES.slab, NAME.desc, `lock`, and foreign files, which
 * are ignored. A new file is written completely under NAME.tmp, flushed, and renamed;
 * then the directory is flushed. So a name implies all of its content, and leftovers of a
 * crash are recognized by their suffix: they are removed when the directory is opened.
 *
 * A process that can write it can add chunks that pass the checks, and one that can enter
 * it may hold the lock: it must be accessible to this user only, or it is not used.
 *
 * One daemon uses it: it holds an flock(2) on `lock` for life, which the kernel releases
 * however the holder ends. So there are no races for an existing name, and a plain rename
 * is enough. The text in the file is for administrators.
 *
 * Slab files stay open, as many as ops can hold at a time, and the least recently used
 * one is closed first. They are not opened under the mutex: a file system may be slow.
 *
 * O_DIRECT is used if the file system accepts a write of one block with it: some refuse
 * at open(2), some only at the write.
 */
#include "daemon/store/disk_dir.h"

#include <assert.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/store/disk_name.h"

#define LOCK_NAME "lock"
#define LOCK_WORDS "kvd keeps chunks in this directory, process "
#define OUR_MODE 0600
/* A killed holder is exiting. */
#define LOCK_LOOKS 50
#define LOCK_LOOK_MS 10

static int dir_fault(const struct disk_dir *dir, const struct disk_op *op, int no)
{
	return disk_fault(dir->path, op, DISK_NOWHERE, no);
}

/* ---- life ---- */

int disk_dir_init(struct disk_dir *dir, const char *path, bool cached)
{
	*dir = (struct disk_dir){.fd = -1, .lock_fd = -1, .cached = cached};
	for (unsigned int i = 0; i < DISK_FDS; i++)
		dir->fds[i].fd = -1;
	dir->path = mem_strdup(path);
	if (!dir->path)
		return err_pass(-ENOMEM);
	pthread_mutex_init(&dir->lock, NULL);
	return 0;
}

void disk_dir_fini(struct disk_dir *dir)
{
	if (!dir->path)
		return;
	for (unsigned int i = 0; i < DISK_FDS; i++) {
		assert(dir->fds[i].refs == 0);
		mem_closep(&dir->fds[i].fd);
	}
	mem_closep(&dir->lock_fd);
	mem_closep(&dir->fd);
	pthread_mutex_destroy(&dir->lock);
	mem_free(dir->path);
	dir->path = NULL;
}

/* Follows a symbolic link: its target is checked. */
static int dir_is_ours(const struct disk_dir *dir)
{
	const char *path = disk_path_shown(dir->path);
	struct stat st;

	if (fstat(dir->fd, &st) < 0)
		return err_raise_errno(errno, "%s", path);
	if (st.st_uid != geteuid())
		return err_raise(
			ERR_PERM,
			"%s: owned by uid %u, but kvd runs as uid %u; chown it, or use "
			"another directory",
			path, st.st_uid, geteuid());
	if (st.st_mode & 077)
		return err_raise(ERR_PERM,
				 "%s: mode %04o: must not be accessible by others; "
				 "chmod 0700, or use another directory",
				 path, st.st_mode & 07777);
	return 0;
}

/* A block of the lock's file, for administrators only. */
static const char *lock_words(char block[DISK_ALIGN])
{
	memset(block, 0, DISK_ALIGN);
	snprintf(block, DISK_ALIGN, LOCK_WORDS "%d\n", (int)getpid());
	return block;
}

/* The holder's own PID: perhaps in another container. */
static int lock_taken(const struct disk_dir *dir)
{
	char block[128] = "";
	int pid = 0;

	if (pread(dir->lock_fd, block, sizeof(block) - 1, 0) < 0 ||
	    sscanf(block, LOCK_WORDS "%d", &pid) != 1)
		pid = 0;
	return err_raise(ERR_BUSY,
			 "%s: in use by another daemon (process %d); stop it, or set "
			 "another chunk_dir, then restart",
			 disk_path_shown(dir->path), pid);
}

static int dir_lock(struct disk_dir *dir)
{
	char block[DISK_ALIGN];
	int looks = 0;

	dir->lock_fd = openat(dir->fd, LOCK_NAME,
			      O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, OUR_MODE);
	if (dir->lock_fd < 0)
		return err_raise_errno(errno, "%s/" LOCK_NAME,
				       disk_path_shown(dir->path));
	while (flock(dir->lock_fd, LOCK_EX | LOCK_NB) < 0) {
		if (errno != EWOULDBLOCK && errno != EINTR)
			return err_raise_errno(errno, "%s/" LOCK_NAME ": flock",
					       disk_path_shown(dir->path));
		if (++looks == LOCK_LOOKS)
			return err_pass(lock_taken(dir));
		(void)poll(NULL, 0, LOCK_LOOK_MS);
	}
	if (pwrite(dir->lock_fd, lock_words(block), sizeof(block), 0) < 0)
		errno = 0; /* a full file system: optional */
	return 0;
}

static bool dir_takes_direct(const struct disk_dir *dir)
{
	char block[DISK_ALIGN] __attribute__((aligned(DISK_ALIGN)));
	cleanup_close int fd =
		openat(dir->fd, LOCK_NAME, O_RDWR | O_NOFOLLOW | O_CLOEXEC | O_DIRECT);

	return fd >= 0 &&
	       (pwrite(fd, lock_words(block), sizeof(block), 0) >= 0 || errno != EINVAL);
}

static int dir_entries(const struct disk_dir *dir, DIR **entries_p)
{
	int fd = openat(dir->fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	int no;

	*entries_p = fd < 0 ? NULL : fdopendir(fd);
	if (*entries_p)
		return 0;
	no = errno;
	mem_closep(&fd);
	return err_raise_errno(no, "%s", disk_path_shown(dir->path));
}

static int dir_tidy(const struct disk_dir *dir)
{
	const struct dirent *entry;
	DIR *entries;
	int r = dir_entries(dir, &entries);

	if (r < 0)
		return err_pass(r);
	while ((entry = readdir(entries))) /* one that stays does no harm */
		if (disk_is_leftover(entry->d_name))
			(void)unlinkat(dir->fd, entry->d_name, 0);
	closedir(entries);
	return 0;
}

int disk_dir_open(struct disk_dir *dir)
{
	int r;

	dir->fd = open(dir->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (dir->fd < 0)
		return errno == ENOENT
			       ? err_raise(ERR_NOTFOUND, "%s: no such directory",
					   disk_path_shown(dir->path))
			       : err_raise_errno(errno, "%s", disk_path_shown(dir->path));
	r = dir_is_ours(dir);
	if (r == 0)
		r = dir_lock(dir);
	if (r == 0)
		r = dir_tidy(dir);
	if (r < 0)
		return err_pass(r);
	dir->direct = !dir->cached && dir_takes_direct(dir);
	return 0;
}

/* ---- open files ---- */

static int dir_open_slab(const struct disk_dir *dir, const struct disk_op *op, int *fd_p)
{
	char name[DISK_FILE_NAME_BYTES];
	struct stat st;
	int fd = openat(dir->fd, disk_file_name(op, name),
			O_RDWR | O_NOFOLLOW | O_CLOEXEC | (dir->direct ? O_DIRECT : 0));

	if (fd >= 0 && fstat(fd, &st) == 0 && !S_ISREG(st.st_mode)) {
		mem_closep(&fd);
		errno = EINVAL;
	}
	if (fd < 0)
		return dir_fault(dir, op, errno);
	*fd_p = fd;
	return 0;
}

static struct disk_fd *dir_fd_find(struct disk_dir *dir, const struct disk_file *file)
{
	for (unsigned int i = 0; i < DISK_FDS; i++) {
		struct disk_fd *at = &dir->fds[i];

		if (at->fd >= 0 && !at->gone && at->file.number == file->number &&
		    at->file.slot_bytes == file->slot_bytes)
			return at;
	}
	return NULL;
}

/* An idle one: a free one, or the least recently used. */
static struct disk_fd *dir_fd_room(struct disk_dir *dir)
{
	struct disk_fd *room = NULL;

	for (unsigned int i = 0; i < DISK_FDS; i++) {
		struct disk_fd *at = &dir->fds[i];

		if (at->fd < 0)
			return at;
		if (at->refs == 0 && (!room || at->used < room->used))
			room = at;
	}
	return room;
}

/* Its open descriptor; or `*fd` if that is one, which was opened when so many files had
 * been removed: if others were removed since, perhaps this one, it serves this op alone.
 * A descriptor left in *fd must be closed without the lock. */
static struct disk_fd *dir_fd_hold(struct disk_dir *dir, const struct disk_op *op,
				   int *fd, uint64_t *removed)
{
	struct disk_fd *held;
	int old;

	pthread_mutex_lock(&dir->lock);
	held = dir_fd_find(dir, &op->file);
	if (!held && *fd >= 0) {
		held = dir_fd_room(dir);
		assert(held); /* there are more than ops may hold */
		old = held->fd;
		*held = (struct disk_fd){
			.file = op->file, .fd = *fd, .gone = *removed != dir->removed};
		*fd = old;
	}
	if (held) {
		held->refs++;
		held->used = ++dir->clock;
	}
	*removed = dir->removed;
	pthread_mutex_unlock(&dir->lock);
	return held;
}

int disk_dir_hold(struct disk_dir *dir, struct disk_op *op)
{
	cleanup_close int fd = -1;
	uint64_t removed = 0;
	int r;

	op->own.held = dir_fd_hold(dir, op, &fd, &removed);
	if (op->own.held)
		return 0;
	r = dir_open_slab(dir, op, &fd);
	if (r < 0)
		return err_pass(r);
	op->own.held = dir_fd_hold(dir, op, &fd, &removed);
	return 0;
}

void disk_dir_let(struct disk_dir *dir, struct disk_op *op)
{
	struct disk_fd *held = op->own.held;
	int fd = -1;

	if (!held)
		return;
	op->own.held = NULL;
	pthread_mutex_lock(&dir->lock);
	assert(held->refs > 0);
	held->refs--;
	if (held->refs == 0 && held->gone) {
		fd = held->fd;
		held->fd = -1;
	}
	pthread_mutex_unlock(&dir->lock);
	mem_closep(&fd);
}

/* It was removed. An op that holds it keeps it. */
static void dir_fd_forget(struct disk_dir *dir, const struct disk_file *file)
{
	struct disk_fd *at;
	int fd = -1;

	pthread_mutex_lock(&dir->lock);
	dir->removed++;
	at = dir_fd_find(dir, file);
	if (at) {
		at->gone = true;
		if (at->refs == 0) {
			fd = at->fd;
			at->fd = -1;
		}
	}
	pthread_mutex_unlock(&dir->lock);
	mem_closep(&fd);
}

/* ---- making and removing ---- */

/* A new file under its other name. */
static int dir_tmp_open(const struct disk_dir *dir, const struct disk_op *op)
{
	char name[DISK_FILE_NAME_BYTES];

	(void)unlinkat(dir->fd, disk_tmp_name(op, name), 0);
	return openat(dir->fd, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
		      OUR_MODE);
}

static int dir_write_all(int fd, const char *at, size_t left)
{
	ssize_t n;

	for (; left; at += n, left -= (size_t)n) {
		n = write(fd, at, left);
		if (n < 0 && errno == EINTR)
			n = 0;
		if (n < 0)
			return -1;
	}
	return 0;
}

/* Is made, filled and flushed. -1: errno */
static int dir_tmp_fill(const struct disk_dir *dir, const struct disk_op *op)
{
	cleanup_close int fd = dir_tmp_open(dir, op);
	int r, no;

	if (fd < 0)
		return -1;
	do
		r = op->what == DISK_MAKE
			    ? fallocate(fd, 0, 0, (off_t)op->bytes)
			    : dir_write_all(fd, op->iov[0].iov_base, op->iov[0].iov_len);
	while (r < 0 && errno == EINTR);
	if (r == 0)
		r = fdatasync(fd);
	no = errno;
	if (close(mem_steal_fd(&fd)) < 0 && r == 0) /* NFS reports a quota here */
		return -1;
	errno = no;
	return r;
}

/* Some file systems do not support it on directories. */
static int dir_flush(const struct disk_dir *dir)
{
	return fsync(dir->fd) < 0 && errno != EINVAL ? -1 : 0;
}

/* Renames it to its final name. */
static int dir_put(const struct disk_dir *dir, struct disk_op *op)
{
	char tmp[DISK_FILE_NAME_BYTES], name[DISK_FILE_NAME_BYTES];
	int no;

	disk_tmp_name(op, tmp);
	disk_file_name(op, name);
	if (dir_tmp_fill(dir, op) < 0 || renameat(dir->fd, tmp, dir->fd, name) < 0) {
		no = errno;
		(void)unlinkat(dir->fd, tmp, 0);
		return dir_fault(dir, op, no);
	}
	if (dir_flush(dir) == 0)
		return 0;
	no = errno;
	if (op->what == DISK_MAKE)
		(void)unlinkat(dir->fd, name, 0);
	return dir_fault(dir, op, no);
}

static int dir_make(const struct disk_dir *dir, struct disk_op *op)
{
	char name[DISK_FILE_NAME_BYTES];
	struct stat st;

	if (fstatat(dir->fd, disk_file_name(op, name), &st, AT_SYMLINK_NOFOLLOW) == 0)
		return dir_fault(dir, op, EEXIST);
	return err_pass(dir_put(dir, op));
}

static int dir_remove(const struct disk_dir *dir, const struct disk_op *op)
{
	char name[DISK_FILE_NAME_BYTES];

	if (unlinkat(dir->fd, disk_file_name(op, name), 0) < 0 || dir_flush(dir) < 0)
		return dir_fault(dir, op, errno);
	return 0;
}

/* ---- reading ---- */

static int dir_sync(struct disk_dir *dir, struct disk_op *op)
{
	int r = disk_dir_hold(dir, op);

	if (r < 0)
		return err_pass(r);
	if (fdatasync(op->own.held->fd) < 0)
		return dir_fault(dir, op, errno);
	return 0;
}

static int dir_read_all(const struct disk_dir *dir, struct disk_op *op, int fd,
			uint64_t bytes)
{
	ssize_t n;

	for (; op->moved < bytes; op->moved += (size_t)n) {
		n = read(fd, (char *)op->iov[0].iov_base + op->moved, bytes - op->moved);
		if (n == 0)
			return disk_fault(dir->path, op, op->moved, 0);
		if (n < 0 && errno == EINTR)
			n = 0;
		if (n < 0)
			return disk_fault(dir->path, op, op->moved, errno);
	}
	return 0;
}

static int dir_named_read(const struct disk_dir *dir, struct disk_op *op)
{
	char name[DISK_FILE_NAME_BYTES];
	cleanup_close int fd = openat(dir->fd, disk_file_name(op, name),
				      O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
	struct stat st;

	if (fd < 0 || fstat(fd, &st) < 0)
		return dir_fault(dir, op, errno);
	if (!S_ISREG(st.st_mode))
		return dir_fault(dir, op, EINVAL);
	if ((uint64_t)st.st_size > op->iov[0].iov_len)
		return err_raise(ERR_TOOBIG, "%s/%s: %jd bytes (limit %zu)",
				 disk_path_shown(dir->path), name, (intmax_t)st.st_size,
				 op->iov[0].iov_len);
	return err_pass(dir_read_all(dir, op, fd, (uint64_t)st.st_size));
}

/* Room for one more of `size` bytes. */
static int dir_list_more(void *array_p, size_t count, size_t size)
{
	void *old = *(void **)array_p, *more;

	if (count && (count < 16 || (count & (count - 1))))
		return 0;
	more = mem_regrow(old, count ? 2 * count : 16, size);
	if (!more)
		return err_pass(-ENOMEM);
	*(void **)array_p = more;
	return 0;
}

static int dir_list_entry(const struct disk_dir *dir, const char *file_name,
			  struct disk_list *list)
{
	struct disk_slab slab = {0};
	struct disk_named named = {0};
	bool is_slab = disk_slab_parse(file_name, &slab.file);
	struct stat st;
	int r;

	if (!is_slab && !disk_named_parse(file_name, named.name))
		return 0;
	if (fstatat(dir->fd, file_name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
	    !S_ISREG(st.st_mode))
		return 0;
	r = is_slab ? dir_list_more(&list->slabs, list->slab_count, sizeof(slab))
		    : dir_list_more(&list->named, list->named_count, sizeof(named));
	if (r < 0)
		return err_pass(r);
	slab.bytes = named.bytes = (uint64_t)st.st_size;
	if (is_slab)
		list->slabs[list->slab_count++] = slab;
	else
		list->named[list->named_count++] = named;
	return 0;
}

static int dir_list(const struct disk_dir *dir, const struct disk_op *op)
{
	struct disk_list *list = op->list;
	const struct dirent *entry;
	DIR *entries;
	int r = dir_entries(dir, &entries);

	if (r < 0)
		return err_pass(r);
	while (r == 0 && (errno = 0, entry = readdir(entries)))
		r = dir_list_entry(dir, entry->d_name, list);
	if (r == 0 && errno)
		r = dir_fault(dir, op, errno);
	closedir(entries);
	if (r < 0) {
		disk_list_fini(list);
		return err_pass(r);
	}
	disk_list_sort(list);
	return 0;
}

static int dir_space(const struct disk_dir *dir, struct disk_op *op)
{
	struct statvfs fs;

	if (fstatvfs(dir->fd, &fs) < 0)
		return dir_fault(dir, op, errno);
	op->moved = (uint64_t)fs.f_bavail * fs.f_frsize;
	return 0;
}

/* ---- interface ---- */

int disk_dir_do(struct disk_dir *dir, struct disk_op *op)
{
	int r = 0;

	err_clear();
	switch (op->what) {
	case DISK_LIST:
		r = dir_list(dir, op);
		break;
	case DISK_SPACE:
		r = dir_space(dir, op);
		break;
	case DISK_MAKE:
		r = dir_make(dir, op);
		break;
	case DISK_REMOVE:
		r = dir_remove(dir, op);
		dir_fd_forget(dir, &op->file);
		break;
	case DISK_SYNC:
		r = dir_sync(dir, op);
		break;
	case DISK_NAMED_WRITE:
		r = dir_put(dir, op);
		op->moved = r == 0 ? op->iov[0].iov_len : 0;
		break;
	case DISK_NAMED_READ:
		r = dir_named_read(dir, op);
		break;
	case DISK_NAMED_REMOVE:
		r = dir_remove(dir, op);
		break;
	case DISK_READ:
	case DISK_WRITE:
	case DISK_WHATS:
		break; /* these are moved in pieces */
	}
	return r < 0 ? err_pass(r) : 0;
}
