/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A call is refused here when its end depends on somebody else: the server of a file
 * system, the reader of a socket, the holder of a lease. What is in no row of these
 * tables is refused, too, so that a new kind of object or a new call is judged by a
 * person first.
 *
 * Nothing here touches the objects themselves, since that could sleep as well: kinds are
 * read from /proc/PID/fd and /proc/PID/fdinfo. Sockets are the exception: their options
 * are asked through a duplicate, which never sleeps.
 */
#include "tests/still/rules.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <linux/sockios.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#define F_OFD_SETLKW_NR 38

/* ---- the tables ---- */

enum group {
	READS = 1 << 0,
	WRITES = 1 << 1,
	LOOKS = 1 << 2, /* what it is */
	SEEKS = 1 << 3,
	MAPS = 1 << 4,
	CLOSES = 1 << 5,
	SOCKETS = 1 << 6, /* receive, send, accept, connect */
	CHANGES = 1 << 7, /* size, seals, mode, to the disk */
	LISTS = 1 << 8,
	POPULATES = 1 << 9,
	ALL = (1 << 10) - 1,
};

enum kind {
	EVENT,
	PIDFD,
	OWN_MEMORY,
	MEMORY,
	PROCESS_MEMORY,
	DMABUF,
	DEVICE,
	SYSTEM,
	OWN,
	STANDARD,
	SOCKET,
	OWN_PIPE,
	PUBLIC,
	FOREIGN,
	KINDS
};

/* On which kind which calls: by the loop's thread, by others. */
static const struct {
	const char *is;
	unsigned int loop, others;
	const char *why; /* not the rest */
} kinds[KINDS] = {
	[EVENT] = {"an event's descriptor", ALL, ALL, ""},
	[PIDFD] = {"a pidfd", LOOKS | CLOSES, LOOKS | SEEKS | CLOSES,
		   "nothing else is needed"},
	[OWN_MEMORY] = {"memory that kvd made", ALL, ALL, ""},
	[MEMORY] = {"a stranger's memory", READS | LOOKS | MAPS | CLOSES, ALL,
		    "it fills pages, or waits for a lock of the file, which is held as "
		    "long as others fill or punch it; helpers do it"},
	[PROCESS_MEMORY] = {"a process's memory", LOOKS | CLOSES, LOOKS | SEEKS | CLOSES,
			    "its pages may be of a file that does not answer; "
			    "processes of the warden's do it"},
	[DMABUF] = {"a dma-buf", LOOKS | MAPS | SEEKS | CLOSES, ALL, "helpers do it"},
	[DEVICE] = {"a device", ALL, ALL, ""},
	[SYSTEM] = {"the kernel's", ALL, ALL, ""},
	[OWN] = {"the daemon's own file", ALL, ALL, ""},
	[STANDARD] = {"standard output", ALL, ALL, ""},
	[SOCKET] = {"a socket", ALL, ALL, ""}, /* judge_socket() */
	[OWN_PIPE] = {"a pipe of its own", ALL, ALL, ""},
	[PUBLIC] = {"a name in a directory that all may write", 0, 0,
		    "only openat2() with RESOLVE_NO_XDEV, O_NONBLOCK and O_NOFOLLOW "
		    "never waits for who owns that name"},
	[FOREIGN] = {"of a kind that no gate passes on", 0, 0,
		     "a gate's to receive, "
		     "look at and close"},
};

/* Memory that the daemon makes, by its name. */
static const char *const own_memory[] = {"kvd-status", "kvd-probe",  "kvd-vm", "kvd-ring",
					 "kvd-arena",  "kvd-filter", "kvd"};

/* Whose files are the administrator's. */
static const char *const system_roots[] = {"/proc", "/sys",	"/etc",
					   "/usr",  "/lib",	"/lib64",
					   "/dev",  "/run/kvd", "/var/lib"};
static const char *const public_roots[] = {"/dev/shm", "/tmp", "/var/tmp"};

enum shape {
	FD,	     /* the first argument is a descriptor */
	FD_SOCKET_2, /* its flags are argument 2, or 3 */
	FD_SOCKET_3,
	CONNECT,
	MAP,
	NAME_AT, /* descriptor of a directory, name */
	NAME,
	OPEN_AT,
	OPEN_AT2,
	CONTROL, /* fcntl */
	LOCK,
	WAIT_CHILD,
	SLEEP,
	POLL_MS,
	ADVISE,
	OTHERS_MEMORY,
	NEVER,
};

static const struct {
	int nr;
	const char *name;
	enum shape shape;
	unsigned int group;
} calls[] = {
#define CALL(name, shape, group)                \
	{                                       \
		SYS_##name, #name, shape, group \
	}
	CALL(read, FD, READS),
	CALL(readv, FD, READS),
	CALL(pread64, FD, READS),
	CALL(preadv, FD, READS),
	CALL(preadv2, FD, READS),
	CALL(write, FD, WRITES),
	CALL(writev, FD, WRITES),
	CALL(pwrite64, FD, WRITES),
	CALL(pwritev, FD, WRITES),
	CALL(pwritev2, FD, WRITES),
	CALL(sendfile, FD, WRITES),
	CALL(splice, FD, READS | WRITES),
	CALL(copy_file_range, FD, READS),
	CALL(recvfrom, FD_SOCKET_3, READS | SOCKETS),
	CALL(recvmsg, FD_SOCKET_2, READS | SOCKETS),
	CALL(recvmmsg, FD_SOCKET_3, READS | SOCKETS),
	CALL(sendto, FD_SOCKET_3, SOCKETS),
	CALL(sendmsg, FD_SOCKET_2, SOCKETS),
	CALL(sendmmsg, FD_SOCKET_3, SOCKETS),
	CALL(accept, FD, SOCKETS),
	CALL(accept4, FD, SOCKETS),
	CALL(connect, CONNECT, SOCKETS),
	CALL(close, FD, CLOSES),
	CALL(fstat, FD, LOOKS),
	CALL(fstatfs, FD, LOOKS),
	CALL(fcntl, CONTROL, LOOKS),
	CALL(lseek, FD, SEEKS),
	CALL(mmap, MAP, MAPS),
	CALL(getdents64, FD, LISTS),
	CALL(ftruncate, FD, CHANGES),
	CALL(fallocate, FD, CHANGES),
	CALL(fsync, FD, CHANGES),
	CALL(fdatasync, FD, CHANGES),
	CALL(syncfs, FD, CHANGES),
	CALL(fchmod, FD, CHANGES),
	CALL(fchown, FD, CHANGES),
	CALL(flock, LOCK, CHANGES),
	CALL(madvise, ADVISE, POPULATES),
	CALL(openat, OPEN_AT, 0),
	CALL(openat2, OPEN_AT2, 0),
	CALL(newfstatat, NAME_AT, LOOKS),
	CALL(statx, NAME_AT, LOOKS),
	CALL(faccessat, NAME_AT, LOOKS),
	CALL(readlinkat, NAME_AT, LOOKS),
	CALL(statfs, NAME, LOOKS),
	CALL(truncate, NAME, CHANGES),
	CALL(getxattr, NAME, LOOKS),
#ifdef SYS_open
	CALL(open, NAME, CHANGES),
	CALL(stat, NAME, LOOKS),
	CALL(lstat, NAME, LOOKS),
	CALL(access, NAME, LOOKS),
	CALL(readlink, NAME, LOOKS),
	CALL(poll, POLL_MS, 0),
#endif
	CALL(wait4, WAIT_CHILD, 0),
	CALL(waitid, WAIT_CHILD, 0),
	CALL(nanosleep, SLEEP, 0),
	CALL(clock_nanosleep, SLEEP, 0),
	CALL(process_vm_readv, OTHERS_MEMORY, 0),
	CALL(process_vm_writev, OTHERS_MEMORY, 0),
	CALL(ptrace, NEVER, 0),
	CALL(sync, NEVER, 0),
	CALL(mount, NEVER, 0),
	CALL(umount2, NEVER, 0),
#undef CALL
};

const int *rules_calls(void)
{
	static int numbers[ARRAY_LEN(calls) + 1];

	for (size_t i = 0; i < ARRAY_LEN(calls); i++)
		numbers[i] = calls[i].nr;
	numbers[ARRAY_LEN(calls)] = -1;
	return numbers;
}

/* ---- what a descriptor is ---- */

struct object {
	char link[256];
	unsigned int flags; /* O_* */
	long mount;
	long rights; /* descriptors in its queue; -1: no Unix socket */
};

static bool object_read(pid_t pid, int fd, struct object *object)
{
	char path[64], line[128];
	FILE *info;
	ssize_t n;

	*object = (struct object){.rights = -1};
	snprintf(path, sizeof(path), "/proc/%d/fd/%d", (int)pid, fd);
	n = readlink(path, object->link, sizeof(object->link) - 1);
	if (n < 0)
		return false;
	object->link[n] = '\0';
	snprintf(path, sizeof(path), "/proc/%d/fdinfo/%d", (int)pid, fd);
	info = fopen(path, "re");
	while (info && fgets(line, sizeof(line), info)) {
		if (strncmp(line, "flags:", 6) == 0)
			object->flags = (unsigned int)strtoul(line + 6, NULL, 8);
		if (strncmp(line, "mnt_id:", 7) == 0)
			object->mount = strtol(line + 7, NULL, 10);
		if (strncmp(line, "scm_fds:", 8) == 0)
			object->rights = strtol(line + 8, NULL, 10);
	}
	if (info)
		fclose(info);
	return true;
}

/* "" for mounts of the kernel's own. */
static void mount_type(pid_t pid, long mount, char type[32])
{
	char path[64], line[1024];
	FILE *mounts;

	*type = '\0';
	snprintf(path, sizeof(path), "/proc/%d/mountinfo", (int)pid);
	mounts = fopen(path, "re");
	while (mounts && fgets(line, sizeof(line), mounts)) {
		const char *dash = strstr(line, " - ");

		if (strtol(line, NULL, 10) == mount && dash)
			sscanf(dash + 3, "%31s", type);
	}
	if (mounts)
		fclose(mounts);
}

static bool is_under(const char *path, const char *root)
{
	size_t len = strlen(root);

	return strncmp(path, root, len) == 0 && (!path[len] || path[len] == '/');
}

static bool is_own(const struct watched *watched, const char *path)
{
	for (unsigned int i = 0; i < watched->own_count; i++)
		if (is_under(path, watched->own[i]))
			return true;
	return false;
}

static bool is_own_memory(const char *link)
{
	size_t len = strcspn(link + 7, " ");

	for (size_t i = 0; i < ARRAY_LEN(own_memory); i++)
		if (strlen(own_memory[i]) == len &&
		    strncmp(link + 7, own_memory[i], len) == 0)
			return true;
	return false;
}

static bool is_process_memory(const char *link)
{
	size_t len = strlen(link);

	return is_under(link, "/proc") && len > 4 && strcmp(link + len - 4, "/mem") == 0;
}

static enum kind kind_of_path(const struct watched *watched, const char *path)
{
	if (is_own(watched, path))
		return OWN;
	for (size_t i = 0; i < ARRAY_LEN(public_roots); i++)
		if (is_under(path, public_roots[i]) && strcmp(path, public_roots[i]) != 0)
			return PUBLIC;
	if (is_process_memory(path))
		return PROCESS_MEMORY;
	for (size_t i = 0; i < ARRAY_LEN(system_roots); i++)
		if (is_under(path, system_roots[i]))
			return SYSTEM;
	return strcmp(path, "/tmp") == 0 || strcmp(path, "/") == 0 || *path != '/'
		       ? SYSTEM
		       : FOREIGN;
}

/* /dev/shm/kvd-keys-UID, once it is open and judged: its user's alone. */
static bool is_keys(const char *link)
{
	return strncmp(link, "/dev/shm/kvd-keys-", 18) == 0;
}

static enum kind kind_of_file(const struct watched *watched, const struct object *object)
{
	static const char *const slept[] = {"fuse", "nfs", "cifs", "9p", "ceph"};
	const char *link = object->link;
	char type[32];

	if (is_own(watched, link) || is_keys(link))
		return OWN;
	mount_type(watched->pid, object->mount, type);
	for (size_t i = 0; i < ARRAY_LEN(slept); i++)
		if (strncmp(type, slept[i], strlen(slept[i])) == 0)
			return FOREIGN;
	if (is_process_memory(link))
		return PROCESS_MEMORY;
	if ((object->flags & O_PATH) == O_PATH)
		return SYSTEM;
	if (strncmp(link, "/dev/shm/", 9) == 0 || strcmp(type, "hugetlbfs") == 0)
		return MEMORY;
	if (is_under(link, "/dev") && strcmp(type, "devtmpfs") != 0 &&
	    strcmp(type, "tmpfs") != 0)
		return FOREIGN;
	if (is_under(link, "/dev"))
		return DEVICE;
	return kind_of_path(watched, link) == SYSTEM ? SYSTEM : FOREIGN;
}

static enum kind kind_of_fd(const struct watched *watched, int fd,
			    const struct object *object)
{
	static const char *const events[] = {
		"[eventfd]", "[eventpoll]",  "[timerfd]",	   "[signalfd]",
		"inotify",   "[perf_event]", "[landlock-ruleset]",
	};
	const char *link = object->link;

	if (fd <= 2)
		return STANDARD;
	if (strncmp(link, "anon_inode:", 11) == 0) {
		for (size_t i = 0; i < ARRAY_LEN(events); i++)
			if (strcmp(link + 11, events[i]) == 0)
				return EVENT;
		return strcmp(link + 11, "[pidfd]") == 0       ? PIDFD
		       : strncmp(link + 11, "[infini", 7) == 0 ? DEVICE
							       : FOREIGN;
	}
	if (strncmp(link, "pidfd:", 6) == 0)
		return PIDFD;
	if (strncmp(link, "socket:", 7) == 0)
		return SOCKET;
	if (strncmp(link, "pipe:", 5) == 0)
		return OWN_PIPE;
	if (strncmp(link, "/dmabuf:", 8) == 0)
		return DMABUF;
	if (strncmp(link, "/memfd:", 7) == 0)
		return is_own_memory(link) ? OWN_MEMORY : MEMORY;
	if (strncmp(link, "/anon_hugepage", 14) == 0)
		return MEMORY;
	return kind_of_file(watched, object);
}

/* ---- judging ---- */

struct judged {
	const struct watched *watched;
	const struct call *call;
	const char *name;
	unsigned int group;
	char *text;
};

static bool on_loop(const struct judged *j)
{
	return j->call->tid == j->watched->pid;
}

static const char *thread_name(const struct judged *j, char comm[32])
{
	char path[64];
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/comm", (int)j->watched->pid,
		 (int)j->call->tid);
	file = fopen(path, "re");
	if (!file || !fgets(comm, 32, file))
		strcpy(comm, "?");
	comm[strcspn(comm, "\n")] = '\0';
	if (file)
		fclose(file);
	return comm;
}

static bool refuse(const struct judged *j, const char *what, const char *why)
{
	char comm[32];

	snprintf(j->text, TEXT_BYTES, "%s(%.200s) by %s \"%s\": %s", j->name, what,
		 on_loop(j) ? "the loop" : "a thread", thread_name(j, comm), why);
	return true;
}

static bool judge_kind(const struct judged *j, enum kind kind, const char *what)
{
	char text[400];

	if (((on_loop(j) ? kinds[kind].loop : kinds[kind].others) & j->group) == j->group)
		return false;
	snprintf(text, sizeof(text), "%.300s, %s", what, kinds[kind].is);
	return refuse(j, text, kinds[kind].why);
}

static int socket_option(const struct judged *j, int fd, int option, void *value,
			 socklen_t size)
{
	int copy = (int)syscall(SYS_pidfd_getfd, j->watched->pidfd, fd, 0);
	int r = copy < 0 ? -1 : getsockopt(copy, SOL_SOCKET, option, value, &size);

	mem_closep(&copy);
	return r;
}

/* The other end is this process's, or a process of its warden's. */
static bool is_pair(const struct judged *j, int fd)
{
	struct ucred cred = {.pid = 0};

	return socket_option(j, fd, SO_PEERCRED, &cred, sizeof(cred)) == 0 &&
	       cred.pid == j->watched->pid;
}

static bool holds(pid_t pid, const char *link)
{
	struct object object;

	for (int fd = 0; fd < 4096; fd++)
		if (object_read(pid, fd, &object) && strcmp(object.link, link) == 0)
			return true;
	return false;
}

static bool holds_below(pid_t pid, const char *link, unsigned int depth)
{
	char path[64];
	FILE *children;
	int child;
	bool found = false;

	snprintf(path, sizeof(path), "/proc/%d/task/%d/children", (int)pid, (int)pid);
	children = fopen(path, "re");
	while (children && !found && fscanf(children, "%d", &child) == 1)
		found = holds(child, link) ||
			(depth && holds_below(child, link, depth - 1));
	if (children)
		fclose(children);
	return found;
}

static bool socket_is_kernels(const struct judged *j, int fd)
{
	int domain = 0;

	return socket_option(j, fd, SO_DOMAIN, &domain, sizeof(domain)) == 0 &&
	       domain == AF_NETLINK;
}

/* A connection stays in the queue until it is accepted, also one that was reset. */
static bool accept_is_ready(const struct judged *j, int fd)
{
	struct pollfd one = {.events = POLLIN};
	bool ready;

	if (j->call->nr != SYS_accept && j->call->nr != SYS_accept4)
		return false;
	one.fd = (int)syscall(SYS_pidfd_getfd, j->watched->pidfd, fd, 0);
	ready = one.fd >= 0 && poll(&one, 1, 0) == 1 && one.revents & POLLIN;
	mem_closep(&one.fd);
	return ready;
}

/* Bytes that lay in a Unix socket's queue, without descriptors, when they were looked
 * at: these may be read, whatever came behind them. */
static struct {
	char link[64];
	uint64_t bytes;
} looked[32];
static unsigned int looked_next;

static uint64_t *looked_at(const char *link)
{
	for (size_t i = 0; i < ARRAY_LEN(looked); i++)
		if (strcmp(looked[i].link, link) == 0)
			return &looked[i].bytes;
	looked_next = (looked_next + 1) % ARRAY_LEN(looked);
	snprintf(looked[looked_next].link, sizeof(looked[0].link), "%.63s", link);
	looked[looked_next].bytes = 0;
	return &looked[looked_next].bytes;
}

static bool receive_is_seen(const struct judged *j, int fd, const struct object *object,
			    uint64_t flags)
{
	uint64_t *seen = looked_at(object->link), wanted;
	int copy, there = 0;

	if (flags & MSG_PEEK) {
		copy = (int)syscall(SYS_pidfd_getfd, j->watched->pidfd, fd, 0);
		if (object->rights == 0 && ioctl(copy, SIOCINQ, &there) == 0)
			*seen = (uint64_t)there;
		mem_closep(&copy);
		return true;
	}
	wanted = j->call->nr == SYS_recvfrom ? j->call->args[2] : UINT64_MAX;
	if (object->rights > 0 && wanted > *seen)
		return false;
	*seen -= wanted < *seen ? wanted : *seen;
	return true;
}

static bool judge_socket(const struct judged *j, int fd, const struct object *object,
			 uint64_t flags)
{
	struct linger linger = {0};

	if (socket_is_kernels(j, fd) || accept_is_ready(j, fd))
		return false;
	if (j->group & (READS | WRITES | SOCKETS) &&
	    !(object->flags & O_NONBLOCK || flags & MSG_DONTWAIT) &&
	    (on_loop(j) || !is_pair(j, fd)))
		return refuse(j, object->link, "it blocks; O_NONBLOCK or MSG_DONTWAIT");
	if (j->group & READS && object->rights >= 0 &&
	    !receive_is_seen(j, fd, object, flags) && !is_pair(j, fd))
		return refuse(j, object->link,
			      "descriptors lie in its queue, and are closed or taken by "
			      "this call; its gate receives them");
	if (!(j->group & CLOSES))
		return false;
	if (object->rights > 0 && !is_pair(j, fd) &&
	    !holds_below(j->watched->pid, object->link, 1))
		return refuse(j, object->link,
			      "descriptors lie in its queue, and are closed with it; "
			      "a gate closes it");
	if (object->rights < 0 &&
	    socket_option(j, fd, SO_LINGER, &linger, sizeof(linger)) == 0 &&
	    linger.l_onoff && linger.l_linger)
		return refuse(j, object->link, "it lingers");
	return false;
}

static bool judge_fd(const struct judged *j, int fd, uint64_t flags)
{
	struct object object;
	enum kind kind;
	char what[320];

	if (!object_read(j->watched->pid, fd, &object))
		return false; /* EBADF */
	kind = kind_of_fd(j->watched, fd, &object);
	snprintf(what, sizeof(what), "%d <%s>", fd, object.link);
	if (judge_kind(j, kind, what))
		return true;
	return kind == SOCKET && judge_socket(j, fd, &object, flags);
}

static bool memory_read(const struct judged *j, uint64_t at, void *to, size_t bytes)
{
	struct iovec near = {to, bytes}, far = {(void *)(uintptr_t)at, bytes};

	return process_vm_readv(j->call->tid, &near, 1, &far, 1, 0) == (ssize_t)bytes;
}

static bool name_read(const struct judged *j, uint64_t at, char name[256])
{
	struct iovec near = {name, 255}, far = {(void *)(uintptr_t)at, 255};
	ssize_t n = process_vm_readv(j->call->tid, &near, 1, &far, 1, 0);

	if (n < 0) { /* the name ends before a page that is not there */
		near.iov_len = far.iov_len = 4096 - at % 4096;
		if (near.iov_len < 255)
			n = process_vm_readv(j->call->tid, &near, 1, &far, 1, 0);
	}
	name[n < 0 ? 0 : n] = '\0';
	return n >= 0;
}

/* open() through /proc/self/fd: the object's owner may have a lease on it. */
static bool judge_reopen(const struct judged *j, int fd, uint64_t flags, const char *name)
{
	struct object object;

	if (!(j->group & CHANGES) || !object_read(j->watched->pid, fd, &object) ||
	    kind_of_fd(j->watched, fd, &object) != MEMORY || flags & O_NONBLOCK)
		return false;
	return refuse(j, name,
		      "a stranger's memory, on which he may have a lease; "
		      "O_NONBLOCK");
}

static bool judge_name(const struct judged *j, int dir, const char *name, uint64_t flags,
		       uint64_t resolve)
{
	const uint64_t wanted = O_NONBLOCK | O_NOFOLLOW;
	char path[600];
	struct object object = {.link = ""};
	enum kind kind;
	int fd;

	if (!*name) /* AT_EMPTY_PATH */
		return judge_fd(j, dir, 0);
	if (sscanf(name, "/proc/self/fd/%d", &fd) == 1)
		return judge_reopen(j, fd, flags, name);
	if (*name != '/' && dir != AT_FDCWD &&
	    object_read(j->watched->pid, dir, &object)) {
		if (is_keys(object.link))
			return false;
		snprintf(path, sizeof(path), "%s/%s", object.link, name);
	} else {
		snprintf(path, sizeof(path), "%s", name);
	}
	kind = kind_of_path(j->watched, path);
	if (kind == PUBLIC && resolve & RESOLVE_NO_XDEV &&
	    (flags & O_PATH || (flags & wanted) == wanted))
		return false;
	/* what a name of another kind leads to, its descriptor's calls tell */
	return (kind == PUBLIC || kind == FOREIGN) && judge_kind(j, kind, path);
}

static bool judge_open_at2(const struct judged *j, const char *name)
{
	struct open_how how = {0};

	return memory_read(j, j->call->args[2], &how, sizeof(how)) &&
	       judge_name(j, (int)j->call->args[0], name, how.flags, how.resolve);
}

static bool judge_control(struct judged *j)
{
	switch ((int)j->call->args[1]) {
	case F_SETLKW:
	case F_OFD_SETLKW_NR:
		return refuse(j, "F_SETLKW", "it waits for who has the lock");
	case F_ADD_SEALS:
		j->group = CHANGES;
		break;
	default:
		break;
	}
	return judge_fd(j, (int)j->call->args[0], 0);
}

static bool judge_map(struct judged *j)
{
	int flags = (int)j->call->args[3];

	if (flags & MAP_ANONYMOUS)
		return false;
	if (flags & MAP_POPULATE)
		j->group |= POPULATES;
	return judge_fd(j, (int)j->call->args[4], 0);
}

static bool judge_sleep(const struct judged *j, bool sleeps, const char *why)
{
	return sleeps && on_loop(j) && refuse(j, "", why);
}

/* The loop may wait for its own threads, as at its end for libzmq's. */
static bool judge_poll(const struct judged *j)
{
	struct pollfd polled[8];
	struct object object;
	size_t bytes = j->call->args[1] * sizeof(polled[0]);
	bool own = bytes <= sizeof(polled);

	if ((int)j->call->args[2] == 0 || !on_loop(j))
		return false;
	if (own && !memory_read(j, j->call->args[0], polled, bytes))
		return false;
	for (uint64_t i = 0; own && i < j->call->args[1]; i++)
		own = object_read(j->watched->pid, polled[i].fd, &object) &&
		      kind_of_fd(j->watched, polled[i].fd, &object) == EVENT;
	return !own && refuse(j, "", "the loop sleeps in its own poll only");
}

/* To a service of the host's, whose socket lies in a directory of root's. */
static bool connects_to_system(const struct judged *j)
{
	struct sockaddr_un name = {.sun_family = AF_UNSPEC};
	size_t bytes = j->call->args[2];

	if (bytes >= sizeof(name) || !memory_read(j, j->call->args[1], &name, bytes))
		return false;
	return name.sun_family == AF_UNIX &&
	       (is_under(name.sun_path, "/run") || is_under(name.sun_path, "/var/run"));
}

/* Near the top of the stack is an address of that library's. */
static bool is_called_by(const struct judged *j, const char *library)
{
	uint64_t words[16] = {0}, from, to, sp = 0;
	char path[64], line[512];
	bool found = false;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/syscall", (int)j->call->tid);
	file = fopen(path, "re");
	if (file && fgets(line, sizeof(line), file)) /* "... SP PC" */
		sscanf(line, "%*s %*s %*s %*s %*s %*s %*s %lx", &sp);
	if (file)
		fclose(file);
	if (!memory_read(j, sp, words, sizeof(words)))
		return false;
	snprintf(path, sizeof(path), "/proc/%d/maps", (int)j->watched->pid);
	file = fopen(path, "re");
	while (file && !found && fgets(line, sizeof(line), file)) {
		if (!strstr(line, library) || sscanf(line, "%lx-%lx", &from, &to) != 2)
			continue;
		for (size_t i = 0; i < ARRAY_LEN(words); i++)
			found = found || (words[i] >= from && words[i] < to);
	}
	if (file)
		fclose(file);
	return found;
}

/* libucp connects a worker's TCP endpoints with sockets that block (uct_tcp_ep_create of
 * 1.13): at start to the worker itself, later by the thread that is there for it. */
static bool is_libucps(const struct judged *j)
{
	return is_called_by(j, "/libucs.so");
}

static bool judge(struct judged *j, enum shape shape)
{
	const uint64_t *args = j->call->args;
	char name[256];

	switch (shape) {
	case FD:
		return judge_fd(j, (int)args[0], 0);
	case FD_SOCKET_2:
		return judge_fd(j, (int)args[0], args[2]);
	case FD_SOCKET_3:
		return judge_fd(j, (int)args[0], args[3]);
	case MAP:
		return judge_map(j);
	case CONTROL:
		return judge_control(j);
	case NAME_AT:
		return name_read(j, args[1], name) &&
		       judge_name(j, (int)args[0], name, 0, 0);
	case OPEN_AT:
		j->group = CHANGES;
		return name_read(j, args[1], name) &&
		       judge_name(j, (int)args[0], name, args[2], 0);
	case OPEN_AT2:
		j->group = CHANGES;
		return name_read(j, args[1], name) && judge_open_at2(j, name);
	case NAME:
		return name_read(j, args[0], name) && judge_name(j, AT_FDCWD, name, 0, 0);
	case LOCK:
		if (!(args[1] & 4 /* LOCK_NB */) && !(args[1] & 8 /* LOCK_UN */))
			return refuse(j, "", "it waits for who has the lock; LOCK_NB");
		return judge_fd(j, (int)args[0], 0);
	case WAIT_CHILD:
		return judge_sleep(
			j, !((j->call->nr == SYS_wait4 ? args[2] : args[3]) & WNOHANG),
			"it waits for another process");
	case SLEEP:
		return judge_sleep(j, true, "the loop sleeps in its own poll only");
	case POLL_MS:
		return judge_poll(j);
	case ADVISE:
		return judge_sleep(j,
				   args[2] == MADV_POPULATE_READ ||
					   args[2] == MADV_POPULATE_WRITE,
				   "filling pages takes as long as they are many");
	case CONNECT:
		return !connects_to_system(j) && !is_libucps(j) &&
		       judge_fd(j, (int)args[0], 0);
	case OTHERS_MEMORY: /* UCX tries it on itself */
		return (pid_t)args[0] != j->watched->pid &&
		       refuse(j, "", kinds[PROCESS_MEMORY].why);
	case NEVER:
		return refuse(j, "", "never in this process");
	}
	return false;
}

bool rules_judge(const struct watched *watched, const struct call *call,
		 char text[TEXT_BYTES])
{
	for (size_t i = 0; i < ARRAY_LEN(calls); i++)
		if (calls[i].nr == call->nr) {
			struct judged j = {watched, call, calls[i].name, calls[i].group,
					   text};

			return judge(&j, calls[i].shape);
		}
	return false;
}
