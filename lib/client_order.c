/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A GPU's stream that waits for a word in memory cannot be interrupted. The daemon stores
 * the word at each end of a request. If it cannot, this thread does (a context's guard):
 * when the daemon's process has ended, and some time after the deadline. It sleeps until
 * then, and without requests until there is one, so an engine with requests in each step
 * wakes it once a deadline.
 *
 * A daemon that only hung may still write results while the stream reads them. So `lost`
 * is set before the word: an engine that reads the state after its stream has passed
 * finds a failure, whatever the daemon does later.
 */
#include "lib/client.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"

#define GRACE_NS UINT64_C(500000000) /* a daemon's timer may be late */

struct client_guard {
	pthread_t thread;
	bool running;
	pid_t owner; /* a forked child has neither the thread nor the requests */
	_Atomic bool ending;
	int wake_fd, pidfd;
	_Atomic uint64_t sleeps_until_ns; /* UINT64_MAX: without an end */
	struct client_order *orders;
	uint32_t count;
};

/* Unless the daemon ends it now, or has ended a later one. */
static void order_lose(struct client_order *order, uint64_t value, uint64_t done)
{
	atomic_store(&order->lost, value);
	atomic_compare_exchange_strong(order->done, &done, value);
}

/* When the next one has to end; UINT64_MAX: none is open. `all`: now. */
static uint64_t orders_look(struct client_guard *guard, bool all)
{
	uint64_t now = clock_ns(), next = UINT64_MAX;

	for (uint32_t i = 0; i < guard->count; i++) {
		struct client_order *order = &guard->orders[i];
		/* the time of this value, or of a later one */
		uint64_t value = atomic_load(&order->value);
		uint64_t until = atomic_load(&order->until_ns) + GRACE_NS;
		uint64_t done = atomic_load(order->done);

		if (done >= value)
			continue;
		if (all || until <= now)
			order_lose(order, value, done);
		else if (until < next)
			next = until;
	}
	return next;
}

void client_guard_lose(struct client_guard *guard)
{
	if (guard)
		orders_look(guard, true);
}

/* Until then, a new request, or the end of the daemon: true. */
static bool guard_sleep(struct client_guard *guard, uint64_t until_ns)
{
	struct pollfd fds[2] = {{.fd = guard->wake_fd, .events = POLLIN},
				{.fd = guard->pidfd, .events = POLLIN}};
	uint64_t now = clock_ns(), ns = until_ns > now ? until_ns - now : 0, count;
	const struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u),
				   .tv_nsec = (long)(ns % 1000000000u)};

	if (ppoll(fds, 2, until_ns == UINT64_MAX ? NULL : &t, NULL) <= 0)
		return false;
	if (fds[0].revents && read(guard->wake_fd, &count, sizeof(count)) < 0)
		return false;
	return fds[1].revents != 0;
}

static void *guard_main(void *arg)
{
	struct client_guard *guard = arg;
	bool ended = false;

	while (!atomic_load(&guard->ending)) {
		uint64_t until;

		/* a request of the meantime wakes this thread, or is seen here */
		atomic_store(&guard->sleeps_until_ns, UINT64_MAX);
		until = orders_look(guard, ended);
		atomic_store(&guard->sleeps_until_ns, until);
		if (!guard_sleep(guard, until) || ended)
			continue;
		ended = true;
		mem_closep(&guard->pidfd);
	}
	return NULL;
}

static void guard_wake(const struct client_guard *guard)
{
	const uint64_t one = 1;

	if (write(guard->wake_fd, &one, sizeof(one)) < 0)
		return; /* it is full: the thread is awake */
}

/* No signal of the engine is for this thread. */
static bool guard_start(struct client_guard *guard)
{
	sigset_t all, old;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	guard->running = !pthread_create(&guard->thread, NULL, guard_main, guard);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return guard->running;
}

int client_guard_new(struct client_order *orders, uint32_t count, int pidfd,
		     struct client_guard **guard_p)
{
	struct client_guard *guard = mem_zalloc(sizeof(*guard));

	*guard_p = NULL;
	if (!guard) {
		mem_free(orders);
		return -KVD_E_NOMEM;
	}
	guard->orders = orders;
	guard->count = count;
	guard->owner = getpid();
	guard->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	guard->pidfd = pidfd < 0 ? -1 : fcntl(pidfd, F_DUPFD_CLOEXEC, 0);
	if (guard->wake_fd < 0 || (pidfd >= 0 && guard->pidfd < 0) ||
	    !guard_start(guard)) {
		client_guard_free(guard);
		return -KVD_E_NOMEM;
	}
	*guard_p = guard;
	return 0;
}

void client_guard_free(struct client_guard *guard)
{
	if (!guard)
		return;
	if (guard->running && guard->owner == getpid()) {
		atomic_store(&guard->ending, true);
		guard_wake(guard);
		pthread_join(guard->thread, NULL);
		orders_look(guard, true);
	}
	mem_closep(&guard->wake_fd);
	mem_closep(&guard->pidfd);
	mem_free(guard->orders);
	mem_free(guard);
}

/* The seat's request has ended, as its status word shows; the daemon's store of `done`
 * follows, unless it dies in between. */
static void order_settle(struct client_order *order)
{
	uint64_t value = atomic_load(&order->value), done = atomic_load(order->done);

	if (done < value)
		atomic_compare_exchange_strong(order->done, &done, value);
}

uint64_t client_order_next(struct client_guard *guard, uint32_t seat, uint64_t until_ns)
{
	struct client_order *order = &guard->orders[seat];

	order_settle(order);
	atomic_store(&order->until_ns, until_ns);
	atomic_store(&order->value, ++order->last);
	if (atomic_load(&guard->sleeps_until_ns) > until_ns + GRACE_NS)
		guard_wake(guard);
	return order->last;
}

void client_order_none(struct client_guard *guard, uint32_t seat)
{
	order_settle(&guard->orders[seat]);
	atomic_store(&guard->orders[seat].value, 0);
}

bool client_order_lost(const struct client_guard *guard, uint32_t seat)
{
	const struct client_order *order = &guard->orders[seat];

	return seat < guard->count && atomic_load(&order->value) &&
	       atomic_load(&order->lost) == order->last;
}
