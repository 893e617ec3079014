/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moves pieces by io_uring: one thread owns the ring, keeps DISK_PIECES of them in flight
 * and waits for the first event, a completion or a write to its eventfd, which the ring
 * polls.
 *
 * seccomp filters do not apply to operations of a ring. So it is created and restricted
 * before the sandbox is entered: it may read, write and poll files that are open already
 * and nothing else, and the restriction is permanent. After that, io_uring_enter(2) is
 * the only call.
 *
 * liburing is loaded if it is installed (as libmicrohttpd is). Only its functions that
 * create a ring and enter the kernel are used; the rest are inline.
 *
 * If entering starts to fail (a sandbox that does not allow it), the thread waits for the
 * kernel's completions (the ring's descriptor can be polled), and continues as one of the
 * other engine.
 */
#include "daemon/store/disk_impl.h"

#include "daemon/base/err.h"

#if __has_include(<liburing.h>)

#include <assert.h>
#include <errno.h>
#include <liburing.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/cpu.h"
#include "daemon/base/library.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define LIBRARY "liburing.so.2"
#define ENTRIES 64u
#define WRITES_MOST 24u
#define REAP 4u

_Static_assert(ENTRIES > DISK_PIECES, "each piece and the wake-up have an entry");

#define URING_FUNCTIONS(X)          \
	X(io_uring_queue_init)      \
	X(io_uring_submit_and_wait) \
	X(io_uring_queue_exit)

struct uring_lib {
#define URING_MEMBER(fn) __typeof__(&(fn)) fn;
	URING_FUNCTIONS(URING_MEMBER)
#undef URING_MEMBER
};

struct uring_slot {
	struct list link;
	struct disk_piece piece;
	unsigned int entry; /* how many were prepared before it */
};

struct uring {
	struct uring_lib lib;
	struct io_uring ring;
	bool ring_made;
	int wake_fd;
	bool kicked; /* any thread: a wake-up is pending */
	bool polled; /* wake_fd, by the ring */
	bool broken; /* the kernel is not entered any more */
	unsigned int prepared, flying;
	struct list idle, busy, left; /* slots; left: busy, not with the kernel */
	struct uring_slot slots[DISK_PIECES];
};

/* ---- making one ---- */

static int uring_load(struct uring_lib *lib)
{
#define URING_FUNCTION(fn) {#fn, &lib->fn, false},
	const struct library_function functions[] = {URING_FUNCTIONS(URING_FUNCTION)};

	return err_prefix(library_load(LIBRARY, functions, ARRAY_LEN(functions)),
			  "io_uring");
}

/* liburing 2.3 has functions for these, but does not export them. */
static int uring_register(const struct uring *u, unsigned int what, void *arg,
			  unsigned int count)
{
	long r = syscall(SYS_io_uring_register, u->ring.ring_fd, what, arg, count);

	return r < 0 ? -errno : 0;
}

static int uring_bind(struct uring *u)
{
	static const uint8_t may[] = {IORING_OP_READV, IORING_OP_WRITEV,
				      IORING_OP_POLL_ADD};
	struct io_uring_restriction bounds[ARRAY_LEN(may)] = {0};
	int r;

	for (unsigned int i = 0; i < ARRAY_LEN(may); i++) {
		bounds[i].opcode = IORING_RESTRICTION_SQE_OP;
		bounds[i].sqe_op = may[i];
	}
	r = uring_register(u, IORING_REGISTER_RESTRICTIONS, bounds, ARRAY_LEN(bounds));
	if (r == 0)
		r = uring_register(u, IORING_REGISTER_ENABLE_RINGS, NULL, 0);
	return r;
}

static int uring_ring(struct uring *u)
{
	int r = u->lib.io_uring_queue_init(ENTRIES, &u->ring, IORING_SETUP_R_DISABLED);

	u->ring_made = r == 0;
	if (r == 0)
		r = uring_bind(u);
	if (r == -ENOMEM)
		return err_raise(ERR_NOMEM, "io_uring: %s", strerror(-r));
	if (r < 0)
		return err_raise(ERR_REQUIRE, "io_uring: %s", strerror(-r));
	return 0;
}

static void uring_unmake(struct disk_real *real)
{
	struct uring *u = real->impl;

	assert(u->flying == 0);
	if (u->ring_made)
		u->lib.io_uring_queue_exit(&u->ring);
	mem_closep(&u->wake_fd);
	mem_free(u);
	real->impl = NULL;
}

static int uring_make(struct disk_real *real)
{
	struct uring *u = mem_zalloc(sizeof(*u));
	int r;

	if (!u)
		return err_pass(-ENOMEM);
	list_init(&u->idle);
	list_init(&u->busy);
	list_init(&u->left);
	for (unsigned int i = 0; i < DISK_PIECES; i++)
		list_push_back(&u->idle, &u->slots[i].link);
	real->impl = u;
	u->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	r = u->wake_fd < 0 ? err_raise_errno(errno, "eventfd") : uring_load(&u->lib);
	if (r == 0)
		r = uring_ring(u);
	if (r < 0)
		uring_unmake(real);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- its thread ---- */

/* Both waits: the ring's, and the other engine's if it continues as one. */
static void uring_kick(struct disk_real *real)
{
	struct uring *u = real->impl;
	const uint64_t one = 1;

	pthread_cond_signal(&real->pieces_more);
	if (!__atomic_exchange_n(&u->kicked, true, __ATOMIC_ACQ_REL) &&
	    write(u->wake_fd, &one, sizeof(one)) != (ssize_t)sizeof(one))
		assert(errno == EAGAIN);
}

static struct io_uring_sqe *uring_entry(struct uring *u)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&u->ring);

	assert(sqe);
	u->prepared++;
	return sqe;
}

static void uring_prepare(struct uring *u, struct uring_slot *slot)
{
	const struct disk_piece *piece = &slot->piece;
	const struct disk_op *op = piece->op;
	unsigned int count = (unsigned int)piece->iov_count;
	uint64_t at = op->offset + piece->at;
	struct io_uring_sqe *sqe;

	slot->entry = u->prepared;
	sqe = uring_entry(u);
	if (op->what == DISK_READ)
		io_uring_prep_readv(sqe, op->own.held->fd, piece->iov, count, at);
	else
		io_uring_prep_writev(sqe, op->own.held->fd, piece->iov, count, at);
	io_uring_sqe_set_data(sqe, slot);
}

static void uring_poll(struct uring *u)
{
	struct io_uring_sqe *sqe;

	if (u->polled)
		return;
	sqe = uring_entry(u);
	io_uring_prep_poll_add(sqe, u->wake_fd, POLLIN);
	io_uring_sqe_set_data(sqe, NULL);
	u->polled = true;
}

enum uring_filled {
	URING_SOME, /* there may be more, with sums to compute: submit these first */
	URING_ALL,
	URING_END, /* the disk is closing, and the kernel has no pieces */
};

static enum uring_filled uring_fill(struct disk_real *real, struct uring *u)
{
	enum uring_filled filled = URING_SOME;
	struct uring_slot *slot;

	uring_poll(u);
	pthread_mutex_lock(&real->lock);
	for (unsigned int i = 0; i < DISK_TURN; i++) {
		slot = list_first(&u->idle, struct uring_slot, link);
		if (!slot || !disk_real_next(real, &slot->piece)) {
			filled = real->closing && !u->flying ? URING_END : URING_ALL;
			break;
		}
		list_remove(&slot->link);
		list_push_back(&u->busy, &slot->link);
		u->flying++;
		uring_prepare(u, slot);
	}
	pthread_mutex_unlock(&real->lock);
	return filled;
}

static void uring_woken(struct uring *u)
{
	uint64_t words;

	u->polled = false;
	if (read(u->wake_fd, &words, sizeof(words)) < 0)
		assert(errno == EAGAIN);
	/* from here on a wake-up is written again: the queue is checked after this */
	__atomic_store_n(&u->kicked, false, __ATOMIC_SEQ_CST);
}

static void uring_idle(struct uring *u, struct uring_slot *slot)
{
	list_remove(&slot->link);
	list_push_back(&u->idle, &slot->link);
	u->flying--;
}

/* Some completions only: sums take long, and the device needs its next pieces. */
static void uring_reap(struct disk_real *real, struct uring *u)
{
	struct io_uring_cqe *cqe;
	unsigned int head, count = 0;

	io_uring_for_each_cqe(&u->ring, head, cqe)
	{
		struct uring_slot *slot = io_uring_cqe_get_data(cqe);
		int moved = cqe->res;

		io_uring_cq_advance(&u->ring, 1);
		if (!slot) {
			uring_woken(u);
		} else if (!disk_real_back(real, &slot->piece, moved)) {
			uring_idle(u, slot);
		} else if (u->broken) {
			list_remove(&slot->link);
			list_push_back(&u->left, &slot->link);
		} else {
			uring_prepare(u, slot);
		}
		if (++count == REAP)
			return;
	}
}

/* Stops entering the kernel. Pieces in flight complete without that. */
static void uring_give_up(struct disk_real *real, struct uring *u, int no)
{
	unsigned int taken = u->prepared - io_uring_sq_ready(&u->ring);
	struct pollfd ring = {.fd = u->ring.ring_fd, .events = POLLIN};
	struct uring_slot *slot;

	log_warn("store", real->dir.path, "io_uring failed; using one thread",
		 "why=\"%s\"", strerror(no));
	__atomic_store_n(&real->base.kind, disk_engine_threads.kind, __ATOMIC_RELAXED);
	u->broken = true;
	list_foreach_safe(slot, &u->busy, link) {
		if ((int)(slot->entry - taken) < 0)
			continue;
		list_remove(&slot->link);
		list_push_back(&u->left, &slot->link);
	}
	while (!list_empty(&u->busy)) {
		(void)poll(&ring, 1, -1);
		uring_reap(real, u);
	}
	while ((slot = list_first(&u->left, struct uring_slot, link))) {
		disk_threads_move(real, &slot->piece);
		uring_idle(u, slot);
	}
}

static void *uring_run(void *arg)
{
	struct disk_real *real = arg;
	struct uring *u = real->impl;
	enum uring_filled filled;

	cpu_bulk();
	while ((filled = uring_fill(real, u)) != URING_END) {
		bool wait = filled == URING_ALL && !io_uring_cq_ready(&u->ring);
		int r = u->lib.io_uring_submit_and_wait(&u->ring, wait);

		if (r < 0 && r != -EINTR && r != -EAGAIN && r != -EBUSY) {
			uring_give_up(real, u, -r);
			disk_threads_work(real);
			break;
		}
		if (r == -EAGAIN) /* no memory in the kernel */
			(void)poll(NULL, 0, 1);
		uring_reap(real, u);
	}
	return disk_real_leave(real);
}

#else /* no header of liburing's */

static int uring_make(struct disk_real *real)
{
	(void)real;
	return err_raise(ERR_REQUIRE, "io_uring: kvd was built without liburing");
}

static void *uring_run(void *arg)
{
	return disk_real_leave(arg);
}

static void uring_kick(struct disk_real *real)
{
	(void)real;
}

static void uring_unmake(struct disk_real *real)
{
	(void)real;
}

#define WRITES_MOST 1u

#endif

const struct disk_engine disk_engine_uring = {
	.kind = "io_uring",
	.threads = 1,
	.writes_most = WRITES_MOST,
	.make = uring_make,
	.run = uring_run,
	.kick = uring_kick,
	.unmake = uring_unmake,
};
