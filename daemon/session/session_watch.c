/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pid of SO_PEERCRED is the process that connected; by now it may be another one's.
 * SO_PEERPIDFD (Linux 6.5) gives the right process by construction, or none when it has
 * ended. Without that option: open the pidfd, then check whether the process belongs to
 * the peer's uid. That leaves a pid reused by the same user between connect() and
 * accept(), or by another where /proc is hidden (ProtectProc=).
 *
 * statm is passed with the first region, since processes of other users may be hidden
 * from us. The open file stays bound to that process; a later reuse of the pid does not
 * revive it. An engine that passes the file of another process harms only itself. We open
 * our own file description: the kernel reads such a file under a lock of the description,
 * and an engine can hold that lock in a page fault for as long as it likes.
 *
 * statm is read, not watched: there is no event for a freed address space. A read is one
 * short system call; every 200 ms, only for sessions that own objects, from the timer of
 * the status pages' heartbeats.
 */
#include "daemon/session/session_watch.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/base/context.h"
#include "daemon/gate/vet.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

struct session_watch {
	struct session *session;
	struct loop_fd pidfd;
	int statm_fd; /* -1: not passed */
};

struct session_clock {
	struct kvd *kvd;
	struct loop_timer timer;
};

/* ---- one session ---- */

/* A process without a number in our PID namespace (a side car's engine) may still have
 * a pidfd. */
static bool has_peer_pidfd(const struct session_peer *peer)
{
	cleanup_close int fd = -1;
	socklen_t len = sizeof(fd);

	return getsockopt(peer->fd, SOL_SOCKET, SO_PEERPIDFD, &fd, &len) == 0;
}

static int pidfd_checked(const struct session_peer *peer, int *fd_p)
{
	socklen_t len = sizeof(*fd_p);
	struct stat st;
	char path[32];

	*fd_p = -1;
	if (getsockopt(peer->fd, SOL_SOCKET, SO_PEERPIDFD, fd_p, &len) == 0)
		return 0;
	if (errno == ENOPROTOOPT)
		*fd_p = (int)syscall(SYS_pidfd_open, peer->pid, 0);
	if (*fd_p < 0 && (errno == ESRCH || errno == EINVAL))
		return err_raise(ERR_SESSION, "process %d, which connected, has ended",
				 (int)peer->pid);
	if (*fd_p < 0)
		return err_raise_errno(errno, "pidfd of process %d", (int)peer->pid);
	snprintf(path, sizeof(path), "/proc/%d", (int)peer->pid);
	if (stat(path, &st) == 0 && st.st_uid != peer->uid && st.st_uid != 0)
		return err_raise(ERR_SESSION, "process %d is not the one that connected",
				 (int)peer->pid);
	return 0;
}

static bool process_lives(int pidfd)
{
	struct pollfd p = {.fd = pidfd, .events = POLLIN};

	return poll(&p, 1, 0) <= 0; /* -1: a signal came meanwhile */
}

static bool memory_lives(int statm_fd)
{
	char text[16];
	ssize_t n;

	if (statm_fd < 0)
		return true;
	n = pread(statm_fd, text, sizeof(text), 0);
	return n >= 2 && text[0] >= '1' && text[0] <= '9';
}

bool session_watch_alive(const struct session_watch *watch)
{
	return !watch ||
	       (process_lives(watch->pidfd.fd) && memory_lives(watch->statm_fd));
}

int session_watch_pidfd(const struct session_watch *watch)
{
	return watch ? fcntl(watch->pidfd.fd, F_DUPFD_CLOEXEC, 3) : -1;
}

static void on_exit_seen(struct loop_fd *fd, int events)
{
	struct session_watch *watch = container_of(fd, struct session_watch, pidfd);

	(void)events;
	session_end(watch->session, "its process has ended");
}

int session_watch_new(struct session *session, const struct session_peer *peer,
		      struct session_watch **watch_p)
{
	struct session_watch *watch;
	int r;

	assert(!session->watch);
	*watch_p = NULL;
	if (peer->pid <= 0 && !has_peer_pidfd(peer))
		return 0;
	watch = mem_zalloc(sizeof(*watch));
	if (!watch)
		return err_pass(-ENOMEM);
	watch->session = session;
	watch->statm_fd = -1;
	loop_fd_init(&watch->pidfd, session->kvd->loop, -1, on_exit_seen);
	r = pidfd_checked(peer, &watch->pidfd.fd);
	if (r == 0 && !process_lives(watch->pidfd.fd))
		r = err_raise(ERR_SESSION, "process %d, which connected, has ended",
			      (int)peer->pid);
	if (r == 0)
		r = loop_fd_set(&watch->pidfd, LOOP_READ);
	if (r < 0) {
		session_watch_free(watch);
		return err_pass(r);
	}
	*watch_p = watch;
	return 0;
}

int session_watch_memory(struct session_watch *watch, int statm_fd)
{
	cleanup_close int fd = -1;
	char path[40];

	if (!vet_is_statm(statm_fd))
		return err_raise(ERR_IMPORT, "statm: not the client's /proc/self/statm");
	if (!watch || watch->statm_fd >= 0)
		return 0;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", statm_fd);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return err_raise_errno(errno, "statm");
	if (!memory_lives(fd))
		return err_raise(ERR_SESSION, "statm: of no running process");
	watch->statm_fd = mem_steal_fd(&fd);
	return 0;
}

void session_watch_stop(struct session_watch *watch)
{
	if (watch)
		loop_fd_stop(&watch->pidfd);
}

void session_watch_free(struct session_watch *watch)
{
	if (!watch)
		return;
	loop_fd_stop(&watch->pidfd);
	mem_closep(&watch->pidfd.fd);
	mem_closep(&watch->statm_fd);
	mem_free(watch);
}

/* ---- the shared timer ---- */

static void look_at(struct session *session, uint64_t now_ns)
{
	if (session->status)
		status_page_heartbeat(session->status, now_ns);
	if (session->ending || !session->watch || !idmap_count(&session->regions))
		return;
	if (!memory_lives(session->watch->statm_fd))
		session_end(session, "its memory was freed");
}

static void on_clock(struct loop_timer *timer)
{
	struct session_clock *clock = container_of(timer, struct session_clock, timer);
	uint64_t now_ns = loop_now_ns(timer->loop);
	struct session *session;

	loop_timer_start_tick(timer, STATUS_HEARTBEAT_NS);
	list_foreach_safe(session, &clock->kvd->sessions, link)
		look_at(session, now_ns);
}

int session_clock_start(struct kvd *kvd)
{
	struct session_clock *clock = kvd->session_clock;

	if (clock)
		return 0;
	clock = mem_zalloc(sizeof(*clock));
	if (!clock)
		return err_pass(-ENOMEM);
	clock->kvd = kvd;
	loop_timer_init(&clock->timer, kvd->loop, on_clock);
	loop_timer_start(&clock->timer, STATUS_HEARTBEAT_NS);
	kvd->session_clock = clock;
	return 0;
}

void session_clock_stop(struct kvd *kvd)
{
	if (!kvd->session_clock)
		return;
	loop_timer_stop(&kvd->session_clock->timer);
	mem_free(kvd->session_clock);
	kvd->session_clock = NULL;
}
