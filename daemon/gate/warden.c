/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The daemon forks through a separate process, because it has threads, drivers and
 * hundreds of gigabytes mapped, none of which a fork() would survive well, and it has no
 * right to execute anything. The warden is the daemon as it was before all that.
 *
 * Orders are one record each on a SOCK_SEQPACKET pair, so that none is half read and a
 * descriptor belongs to its record. The warden replies with the id of each process that
 * has ended. It ends at end of file, with SIGKILL for its children: they serve no one
 * after that. SIGTERM and its like are the daemon's to interpret: systemd sends them to
 * all processes of the service, and the daemon drains.
 */
#include "daemon/gate/warden.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/gate/gate_child.h"
#include "daemon/gate/open_child.h"
#include "daemon/gate/record.h"
#include "daemon/gate/sandbox.h"
#include "daemon/gate/vet.h"
#include "daemon/gate/vm_child.h"
#include "daemon/loop/loop.h"

enum order_op { ORDER_SPAWN = 1, ORDER_KILL, ORDER_KEEP };

#define HANGING_OF_USER_MAX 4u
#define HANGING_MAX 256u
#define PENALTY_NS (30 * LOOP_NS_PER_S)
#define ENDING_NS (2 * LOOP_NS_PER_S)

struct order {
	uint32_t op;
	uint32_t kind; /* enum warden_kind */
	uint32_t uid;
	uint64_t id;
};

/* ---- the warden's process ---- */

struct child {
	uint64_t id;
	pid_t pid;
};

#define CHILDREN_MAX 1024u /* a user has five at most */

struct keeper {
	int socket, signals;
	struct child children[CHILDREN_MAX];
	size_t count;
};

static void keeper_no_output(void)
{
	int null = open("/dev/null", O_RDWR | O_CLOEXEC);

	for (int fd = 0; null >= 0 && fd <= 2; fd++)
		(void)dup2(null, fd);
}

/* All of the daemon's descriptors are closed but these two: its sockets, its lock and
 * descriptors from a service manager would outlive it here. */
static void keeper_close_rest(int socket, int other)
{
	int one = other < 0 ? socket : other; /* there may be no other */
	unsigned int low = (unsigned int)(one < socket ? one : socket);
	unsigned int high = (unsigned int)(one < socket ? socket : one);

	if (low > 3)
		(void)close_range(3, low - 1, 0);
	if (high > low + 1)
		(void)close_range(low + 1, high - 1, 0);
	(void)close_range(high + 1, ~0u, 0);
}

static void keeper_signals(void)
{
	static const int ignored[] = {SIGTERM, SIGINT,	SIGHUP, SIGQUIT,
				      SIGPIPE, SIGUSR1, SIGUSR2};
	sigset_t none;

	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	for (size_t i = 0; i < ARRAY_LEN(ignored); i++)
		signal(ignored[i], SIG_IGN);
	signal(SIGBUS, SIG_DFL);
}

static _Noreturn void child_run(int socket, const struct order *order)
{
	static const struct {
		const char *name;
		enum sandbox_kind sandbox;
		void (*serve)(int socket);
	} kinds[] = {
		[WARDEN_GATE] = {"gate", SANDBOX_GATE, gate_child_serve},
		[WARDEN_VM] = {"vm", SANDBOX_VM, vm_child_serve},
		[WARDEN_OPEN] = {"open", SANDBOX_OPEN, open_child_serve},
	};
	sigset_t none;
	char name[16];

	if (order->kind >= ARRAY_LEN(kinds))
		_exit(1);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	keeper_close_rest(socket, vet_descriptor());
	snprintf(name, sizeof(name), "kvd-%s:%u", kinds[order->kind].name, order->uid);
	prctl(PR_SET_NAME, name);
	if (sandbox_enter(kinds[order->kind].sandbox) < 0)
		_exit(1);
	kinds[order->kind].serve(socket);
	_exit(0);
}

static void keeper_gone(const struct keeper *keeper, uint64_t id)
{
	/* the daemon reads them all: a full queue means that it hangs */
	(void)send(keeper->socket, &id, sizeof(id), MSG_NOSIGNAL);
}

static void keeper_spawn(struct keeper *keeper, const struct order *order, int socket)
{
	pid_t pid = keeper->count < CHILDREN_MAX ? fork() : -1;

	if (pid == 0)
		child_run(socket, order);
	if (pid < 0)
		keeper_gone(keeper, order->id);
	else
		keeper->children[keeper->count++] = (struct child){order->id, pid};
}

static void keeper_reap(struct keeper *keeper)
{
	pid_t pid;

	while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) {
		for (size_t i = 0; i < keeper->count; i++) {
			if (keeper->children[i].pid != pid)
				continue;
			keeper_gone(keeper, keeper->children[i].id);
			keeper->children[i] = keeper->children[--keeper->count];
			break;
		}
	}
}

static void keeper_kill(struct keeper *keeper, uint64_t id)
{
	for (size_t i = 0; i < keeper->count; i++) {
		if (keeper->children[i].id != id)
			continue;
		kill(keeper->children[i].pid, SIGKILL);
		return;
	}
	keeper_gone(keeper, id); /* it was before */
}

static void keeper_obey(struct keeper *keeper)
{
	struct order order;
	int fd = -1;
	ssize_t n = record_receive(keeper->socket, &order, sizeof(order), &fd, 1, NULL);

	if (n != sizeof(order)) {
		for (size_t i = 0; i < keeper->count; i++)
			kill(keeper->children[i].pid, SIGKILL);
		_exit(0);
	}
	if (order.op == ORDER_KEEP)
		return; /* until the end */
	if (order.op == ORDER_SPAWN && fd >= 0)
		keeper_spawn(keeper, &order, fd);
	if (order.op == ORDER_KILL)
		keeper_kill(keeper, order.id);
	mem_closep(&fd); /* the child has its own */
}

static _Noreturn void keeper_run(int socket)
{
	struct keeper keeper = {.socket = socket};
	struct signalfd_siginfo info;
	sigset_t child;

	prctl(PR_SET_NAME, "kvd-warden");
	keeper_signals();
	keeper_no_output();
	vet_prepare();
	keeper_close_rest(socket, vet_descriptor());
	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child, NULL);
	keeper.signals = signalfd(-1, &child, SFD_CLOEXEC);
	if (sandbox_enter(SANDBOX_WARDEN) < 0)
		_exit(1);
	for (;;) {
		struct pollfd watched[] = {{.fd = socket, .events = POLLIN},
					   {.fd = keeper.signals, .events = POLLIN}};

		if (poll(watched, 2, -1) < 0)
			continue;
		if (watched[1].revents &&
		    read(keeper.signals, &info, sizeof(info)) == sizeof(info))
			keeper_reap(&keeper);
		if (watched[0].revents)
			keeper_obey(&keeper);
	}
}

int warden_fork(int *socket_p)
{
	int pair[2];
	pid_t pid;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return err_raise_errno(errno, "a socket to the warden");
	pid = fork();
	if (pid == 0) {
		close(pair[0]);
		keeper_run(pair[1]);
	}
	close(pair[1]);
	if (pid < 0) {
		close(pair[0]);
		return err_raise_errno(errno, "forking the warden");
	}
	*socket_p = pair[0];
	return 0;
}

/* ---- the daemon's side ---- */

/* Killed. */
struct hanging {
	uint64_t id; /* 0: it has ended */
	uid_t uid;
	uint64_t from_ns;  /* counts from then on, until it has ended */
	uint64_t until_ns; /* and until then at least */
};

struct warden {
	struct loop_fd watch;
	struct warden_events events;
	atomic_uint_least64_t last_id;
	pthread_mutex_t lock;
	struct hanging hanging[HANGING_MAX];
	unsigned int hanging_count;
};

static void warden_gone(struct warden *warden, uint64_t id)
{
	bool freed = false;

	pthread_mutex_lock(&warden->lock);
	for (unsigned int i = 0; i < warden->hanging_count && !freed; i++) {
		freed = warden->hanging[i].id == id;
		if (freed)
			warden->hanging[i].id = 0;
	}
	pthread_mutex_unlock(&warden->lock);
	if (freed)
		warden->events.on_freed(warden->events.arg);
}

static void warden_on_ready(struct loop_fd *watch, int events)
{
	struct warden *warden = container_of(watch, struct warden, watch);
	uint64_t id;
	ssize_t n;

	(void)events;
	n = recv(watch->fd, &id, sizeof(id), MSG_DONTWAIT);
	if (n == sizeof(id)) {
		warden_gone(warden, id);
		return;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	loop_fd_stop(watch);
	warden->events.on_lost(warden->events.arg);
}

int warden_new(struct loop *loop, int socket, const struct warden_events *events,
	       struct warden **warden_p)
{
	struct warden *warden = mem_zalloc(sizeof(*warden));
	int r;

	if (!warden) {
		close(socket);
		return err_pass(-ENOMEM);
	}
	warden->events = *events;
	pthread_mutex_init(&warden->lock, NULL);
	loop_fd_init(&warden->watch, loop, socket, warden_on_ready);
	r = loop_fd_set(&warden->watch, LOOP_READ);
	if (r < 0) {
		warden_free(warden);
		return err_pass(r);
	}
	*warden_p = warden;
	return 0;
}

void warden_free(struct warden *warden)
{
	if (!warden)
		return;
	loop_fd_stop(&warden->watch);
	mem_closep(&warden->watch.fd);
	pthread_mutex_destroy(&warden->lock);
	mem_free(warden);
}

static int warden_order(struct warden *warden, const struct order *order, int fd)
{
	if (record_send(warden->watch.fd, order, sizeof(*order), NULL, 0, &fd, fd >= 0) ==
	    sizeof(*order))
		return 0;
	return err_raise_errno(errno, "the warden's socket");
}

static int warden_check(struct warden *warden, uid_t uid)
{
	unsigned int count = 0, all = 0;
	uint64_t now = clock_ns();

	pthread_mutex_lock(&warden->lock);
	for (unsigned int i = 0; i < warden->hanging_count; i++) {
		struct hanging *h = &warden->hanging[i];

		if (!h->id && now >= h->until_ns)
			continue;
		count += h->uid == uid && now >= h->from_ns;
		warden->hanging[all++] = *h;
	}
	warden->hanging_count = all;
	pthread_mutex_unlock(&warden->lock);
	if (count < HANGING_OF_USER_MAX)
		return 0;
	return err_raise(
		ERR_LIMIT,
		"user %u: %u processes hang, or hung a moment ago, on files or memory "
		"this user's processes sent or registered; end the process that serves "
		"them",
		uid, count);
}

int warden_start(struct warden *warden, enum warden_kind kind, uid_t uid, uint64_t *id_p,
		 int *socket_p)
{
	struct order order = {.op = ORDER_SPAWN, .kind = kind, .uid = uid};
	int pair[2], r = warden_check(warden, uid);

	if (r < 0)
		return err_pass(r);
	order.id = atomic_fetch_add(&warden->last_id, 1) + 1;
	if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
		return err_raise_errno(errno, "a socket to a gate");
	r = warden_order(warden, &order, pair[1]);
	close(pair[1]);
	if (r < 0) {
		close(pair[0]);
		return err_pass(r);
	}
	*id_p = order.id;
	*socket_p = pair[0];
	return 0;
}

void warden_abandon(struct warden *warden, uint64_t id, uid_t uid, bool hung)
{
	uint64_t now = clock_ns();
	struct hanging entry = {id, uid, hung ? now : now + ENDING_NS,
				hung ? now + PENALTY_NS : 0};
	struct order order = {.op = ORDER_KILL, .id = id};

	pthread_mutex_lock(&warden->lock);
	if (warden->hanging_count < HANGING_MAX)
		warden->hanging[warden->hanging_count++] = entry;
	pthread_mutex_unlock(&warden->lock);
	if (warden_order(warden, &order, -1) < 0)
		err_clear(); /* it ends with the daemon */
}

void warden_keep(struct warden *warden, int fd)
{
	struct order order = {.op = ORDER_KEEP};

	if (warden_order(warden, &order, fd) < 0)
		err_clear();
}
