/* SPDX-License-Identifier: Apache-2.0 */
/* Wake-ups from other threads: an eventfd, or a deferred call of a virtual loop. */
#include "daemon/loop/loop.h"

#include <assert.h>
#include <errno.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

/* `pending` saves the system call while one is pending. The exchange on both sides orders
 * the waker's writes before the reads of on_wake. */
static void wake_take(struct loop_wake *wake)
{
	(void)__atomic_exchange_n(&wake->pending, false, __ATOMIC_ACQ_REL);
	wake->on_wake(wake);
}

static void on_wake_ready(struct loop_fd *watch, int events)
{
	uint64_t count;

	(void)events;
	if (read(watch->fd, &count, sizeof(count)) == (ssize_t)sizeof(count))
		wake_take(container_of(watch, struct loop_wake, watch));
}

static void on_wake_defer(struct loop_defer *defer)
{
	wake_take(container_of(defer, struct loop_wake, defer));
}

int loop_wake_init(struct loop_wake *wake, struct loop *loop,
		   void (*on_wake)(struct loop_wake *wake))
{
	int fd = -1, r = 0;

	assert(on_wake);
	*wake = (struct loop_wake){.on_wake = on_wake};
	loop_defer_init(&wake->defer, on_wake_defer);
	if (!loop_is_virtual(loop)) {
		fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
		if (fd < 0)
			r = err_raise_errno(errno, "eventfd");
	}
	loop_fd_init(&wake->watch, loop, fd, on_wake_ready);
	if (fd >= 0)
		r = loop_fd_set(&wake->watch, LOOP_READ);
	if (r < 0)
		loop_wake_fini(wake);
	return r < 0 ? err_pass(r) : 0;
}

void loop_wake_fini(struct loop_wake *wake)
{
	if (!wake->watch.loop)
		return;
	loop_defer_cancel(&wake->defer);
	loop_fd_stop(&wake->watch);
	mem_closep(&wake->watch.fd);
	wake->watch = (struct loop_fd){.fd = -1};
}

void loop_wake(struct loop_wake *wake)
{
	const uint64_t one = 1;
	int saved = errno; /* may run in a signal handler */

	assert(wake->on_wake);
	/* Set already: the loop has not taken it yet, and its exchange (acquire) will
	 * make visible the stores before this one (release). */
	if (__atomic_exchange_n(&wake->pending, true, __ATOMIC_ACQ_REL))
		return;
	if (loop_is_virtual(wake->watch.loop)) {
		loop_defer(wake->watch.loop, &wake->defer);
		return;
	}
	/* a count of 1 always fits: no other thread writes while pending is set */
	if (write(wake->watch.fd, &one, sizeof(one)) != (ssize_t)sizeof(one))
		assert(errno == EAGAIN);
	errno = saved;
}
