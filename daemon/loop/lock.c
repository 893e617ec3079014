/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One daemon per name. The kernel drops a flock with its holder, so a crash leaves
 * nothing to clean up; only the file, which is taken over.
 *
 * A killed daemon with gigabytes mapped takes up to some seconds to exit, and its lock
 * lasts as long as it does. An immediate restart must not be refused for that: a holder
 * whose address space is already freed (`statm` reads 0) is waited for. Under the unit
 * /proc hides it; there systemd starts none before the last has ended.
 *
 * The lock belongs to the name; a daemon's sockets may lie anywhere, so that two names
 * can mean one socket. A connection attempt shows whether a process listens there.
 */
#include "daemon/loop/lock.h"

#include <errno.h>
#include <stdbool.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

/* positive outcome of try_take(): the file was removed under us, try again */
#define TRY_AGAIN 1
#define TRIES 100
#define PAUSE_NS 20000000L
#define DYING_TRIES 1500 /* pauses: 30 s */

void lock_init(struct lock *lock)
{
	*lock = (struct lock){.fd = -1};
}

static void pause_a_moment(void)
{
	nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
}

/* Killed, its memory freed, and about to close its descriptors? */
static bool process_is_dying(const char *pid)
{
	cleanup_close int statm = -1;
	char path[64], text[8];

	if (!*pid || strspn(pid, "0123456789") != strlen(pid))
		return false;
	snprintf(path, sizeof(path), "/proc/%.20s/statm", pid);
	statm = open(path, O_RDONLY | O_CLOEXEC);
	return statm >= 0 && read(statm, text, sizeof(text)) >= 2 && text[0] == '0' &&
	       text[1] == ' ';
}

static void holder_read(int fd, char text[32])
{
	ssize_t n = pread(fd, text, 31, 0);

	text[n > 0 ? n : 0] = '\0';
	text[strcspn(text, "\n")] = '\0';
}

static bool holder_is_dying(int fd)
{
	char pid[32];

	holder_read(fd, pid);
	return process_is_dying(pid);
}

/* Does the path name the locked file? */
static int check_same(int fd, const char *path)
{
	struct stat by_fd, by_path;

	if (fstat(fd, &by_fd) < 0)
		return err_raise_errno(errno, "%s", path);
	if (!S_ISREG(by_fd.st_mode))
		return err_raise(ERR_IO, "%s: not a regular file", path);
	if (stat(path, &by_path) < 0 || by_path.st_ino != by_fd.st_ino ||
	    by_path.st_dev != by_fd.st_dev)
		return TRY_AGAIN;
	return 0;
}

/* Without `patient` a holder that is dying is busy. */
static int try_take(const char *path, bool patient, int *fd_p)
{
	cleanup_close int fd = -1;
	int r, tries = 0;
	char pid[32];

	fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
	if (fd < 0 && errno == ENOENT)
		return err_raise(ERR_CONFIG,
				 "%s: run_dir does not exist: systemd-tmpfiles --create "
				 "makes /run/kvd; or set run_dir",
				 path);
	if (fd < 0 && (errno == EACCES || errno == EROFS))
		return err_raise(ERR_CONFIG,
				 "%s: %s: run_dir must be writable for this user", path,
				 strerror(errno));
	if (fd < 0)
		return err_raise_errno(errno, "%s", path);
	while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
		if (errno != EWOULDBLOCK)
			return err_raise_errno(errno, "flock %s", path);
		if (!patient || tries++ >= DYING_TRIES || !holder_is_dying(fd)) {
			holder_read(fd, pid);
			return err_raise(ERR_BUSY,
					 "%s: held by the kvd of this name, pid %s", path,
					 *pid ? pid : "unknown");
		}
		pause_a_moment();
	}
	r = check_same(fd, path);
	if (r == 0)
		*fd_p = mem_steal_fd(&fd);
	return r;
}

static int holder_write(int fd, const char *path)
{
	if (ftruncate(fd, 0) < 0 || dprintf(fd, "%d\n", getpid()) < 0)
		return err_raise_errno(errno, "%s", path);
	return 0;
}

int lock_take(struct lock *lock, const char *run_dir, const char *name)
{
	int r = TRY_AGAIN;

	lock_init(lock);
	if ((size_t)snprintf(lock->path, sizeof(lock->path), "%s/%s.lock", run_dir,
			     name) >= sizeof(lock->path))
		return err_raise(ERR_INVAL, "%s: the path is too long", run_dir);
	for (int i = 0; i < TRIES && r == TRY_AGAIN; i++)
		r = try_take(lock->path, true, &lock->fd);
	if (r == TRY_AGAIN)
		return err_raise(ERR_BUSY,
				 "%s: removed repeatedly while kvd tried to lock it",
				 lock->path);
	if (r < 0)
		return err_pass(r);
	r = holder_write(lock->fd, lock->path);
	if (r < 0)
		lock_drop(lock);
	return err_pass(r);
}

int lock_look(struct lock *lock)
{
	cleanup_close int fd = -1;
	int r = lock->fd < 0 ? 0 : check_same(lock->fd, lock->path);

	if (r == TRY_AGAIN)
		r = try_take(lock->path, false, &fd);
	if (r == TRY_AGAIN) /* the next check finds out */
		return 0;
	if (r < 0 || fd < 0)
		return err_pass(r);
	r = holder_write(fd, lock->path);
	if (r < 0)
		return err_pass(r);
	close(lock->fd);
	lock->fd = mem_steal_fd(&fd);
	return LOCK_MADE_AGAIN;
}

void lock_drop(struct lock *lock)
{
	if (lock->fd < 0)
		return;
	/* while it is ours; a successor's is removed only by the successor */
	if (check_same(lock->fd, lock->path) == 0)
		unlink(lock->path);
	close(lock->fd);
	lock_init(lock);
}

/* ---- a socket's name ---- */

/* The pid of the process that listens at `path`; 0: its pid is unknown; -1: no listener.
 * A full backlog and a socket of another type count as listeners. */
static int socket_listener(const char *option, const char *path, pid_t *pid_p)
{
	cleanup_close int fd =
		socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct ucred cred = {.pid = 0};
	socklen_t len = sizeof(cred);

	if (fd < 0)
		return err_raise_errno(errno, "a Unix socket");
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	*pid_p = 0;
	if (connect(fd, (const struct sockaddr *)&addr, sizeof(addr)) == 0) {
		if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &len) == 0)
			*pid_p = cred.pid;
	} else if (errno == ECONNREFUSED || errno == ENOENT) {
		*pid_p = -1;
	} else if (errno != EAGAIN && errno != EPROTOTYPE) {
		return err_raise(ERR_CONFIG, "%s = %s: cannot check for a listener: %s",
				 option, path, strerror(errno));
	}
	return 0;
}

/* 0, or TRY_AGAIN while the listener is exiting. */
static int socket_unused(const char *option, const char *path)
{
	char text[32] = "unknown";
	pid_t pid = -1;
	int r = socket_listener(option, path, &pid);

	if (r < 0)
		return err_pass(r);
	if (pid < 0)
		return 0;
	if (pid > 0)
		snprintf(text, sizeof(text), "%d", (int)pid);
	if (process_is_dying(text))
		return TRY_AGAIN;
	return err_raise(ERR_CONFIG,
			 "%s = %s: pid %s listens there; give each daemon its own",
			 option, path, text);
}

static int socket_clear(const char *option, const char *path)
{
	struct stat looked, now;
	int r = TRY_AGAIN;

	if (lstat(path, &looked) < 0)
		return errno == ENOENT ? 0 : err_raise_errno(errno, "%s", path);
	if (!S_ISSOCK(looked.st_mode))
		return err_raise(ERR_CONFIG, "%s: exists and is no socket", path);
	for (int tries = 0; tries < DYING_TRIES; tries++) {
		r = socket_unused(option, path);
		if (r != TRY_AGAIN)
			break;
		pause_a_moment();
	}
	if (r == TRY_AGAIN)
		return err_raise(
			ERR_BUSY,
			"%s: the process listening there is exiting but has not ended",
			path);
	if (r < 0)
		return err_pass(r);
	if (lstat(path, &now) < 0)
		return errno == ENOENT ? 0 : err_raise_errno(errno, "%s", path);
	if (now.st_ino != looked.st_ino || now.st_dev != looked.st_dev)
		return err_raise(ERR_BUSY, "%s: another daemon is starting there", path);
	if (unlink(path) < 0)
		return err_raise_errno(errno, "removing the old %s", path);
	return 0;
}

int lock_socket_bind(struct lock_socket *made, int fd, const char *option,
		     const char *path, mode_t mode, int backlog)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	mode_t mask;
	int r;

	made->path[0] = '\0';
	if (snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path) >=
	    (int)sizeof(addr.sun_path))
		return err_raise(ERR_CONFIG,
				 "%s = %s: socket path too long (limit %zu bytes)",
				 option, path, sizeof(addr.sun_path) - 1);
	r = socket_clear(option, path);
	if (r < 0)
		return err_pass(r);
	mask = umask(0); /* the file has the mode of the socket, less that */
	r = fchmod(fd, mode) < 0 ? -1
				 : bind(fd, (const struct sockaddr *)&addr, sizeof(addr));
	(void)umask(mask);
	if (r < 0 || lstat(path, &made->made) < 0)
		return err_raise_errno(errno, "%s = %s", option, path);
	memcpy(made->path, addr.sun_path, sizeof(made->path));
	/* at once: a name without a listener is treated as stale */
	if (listen(fd, backlog) < 0)
		return err_raise_errno(errno, "%s = %s", option, path);
	return 0;
}

int lock_socket_look(const struct lock_socket *made)
{
	struct stat st;

	if (!made->path[0])
		return 0;
	if (lstat(made->path, &st) < 0)
		return errno == ENOENT ? LOCK_SOCKET_GONE
				       : err_raise_errno(errno, "%s", made->path);
	if (st.st_ino == made->made.st_ino && st.st_dev == made->made.st_dev)
		return 0;
	return err_raise(
		ERR_BUSY,
		"%s: another process replaced this daemon's socket; stop one of the two",
		made->path);
}

void lock_socket_drop(struct lock_socket *made)
{
	struct stat st;

	if (made->path[0] && lstat(made->path, &st) == 0 &&
	    st.st_ino == made->made.st_ino && st.st_dev == made->made.st_dev)
		unlink(made->path);
	made->path[0] = '\0';
}
