/* SPDX-License-Identifier: Apache-2.0 */
/*
 * loop: the daemon's one thread of control: time, timers, fds, random numbers.
 *
 * Only loop.c includes <ev.h>. Timers live in the loop's own heap, so a
 * virtual loop (tests, simulation) runs the same code with a clock that jumps
 * to the next timer and random numbers from a seed; it has no fds.
 * All functions are for the loop's thread, except loop_wake().
 *
 * Watches are embedded in their owners. A callback may stop and restart any watch,
 * including its own; it must not free the loop. To destroy an object from inside its own
 * callback use loop_defer().
 */
#ifndef KVD_LOOP_H
#define KVD_LOOP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/histogram.h"
#include "daemon/base/list.h"

struct loop;

#define LOOP_NS_PER_MS UINT64_C(1000000)
#define LOOP_TICK_NS (200 * LOOP_NS_PER_MS) /* of loop_timer_start_tick() */
#define LOOP_NS_PER_S UINT64_C(1000000000)

int loop_new(struct loop **loop_p);
/* Virtual time from 1 s on, random numbers from the seed, no fds or signals. */
int loop_new_virtual(uint64_t seed, struct loop **loop_p);
bool loop_is_virtual(const struct loop *loop);
void loop_free(struct loop *loop); /* NULL is allowed; all watches must be stopped */

/* Run until loop_stop(). A virtual loop returns also when nothing is left. */
void loop_run(struct loop *loop);
void loop_stop(struct loop *loop);
/* One turn: deferred calls, then events; waits at most max_wait_ns (virtual: advances by
 * at most that). Returns true when something ran. */
bool loop_turn(struct loop *loop, uint64_t max_wait_ns);

/* Monotonic time in ns of the current turn; loop_clock_ns reads the clock. */
uint64_t loop_now_ns(const struct loop *loop);
uint64_t loop_clock_ns(const struct loop *loop);
/* How late this turn started after its earliest timer was due, and the longest time since
 * `since_ns` that the loop did not return to its poll: a busy daemon must not declare
 * healthy peers dead. */
uint64_t loop_lag_ns(const struct loop *loop, uint64_t since_ns);

/* Of each turn since the start: how long the loop did not poll, for how much of that its
 * thread had a core (the machine may be shared), and how late it polled after its
 * earliest timer was due. Virtual loops: empty. */
struct loop_stats {
	struct histogram busy, cpu, late;
	uint64_t over; /* turns with cpu over LOOP_TURN_NS */
};
#define LOOP_TURN_NS UINT64_C(200000) /* the longest intended turn */
const struct loop_stats *loop_stats(const struct loop *loop);

/* Has this part of the turn used up its time? A callback with many small steps checks
 * this after each, and continues in the next turn. On a virtual loop time does not pass
 * in a turn: never, or after that many calls. */
bool loop_enough(struct loop *loop);
void loop_virtual_parts(struct loop *loop, unsigned int asks); /* 0: never */

/* Fill with unpredictable bytes (getrandom); seeded when virtual. */
void loop_random(struct loop *loop, void *buf, size_t len);
uint64_t loop_random_u64(struct loop *loop); /* never 0 */

/* ---- timers: one-shot; restart in the callback for a period ---- */
struct loop_timer {
	void (*on_timer)(struct loop_timer *timer);
	struct loop *loop;
	uint64_t at_ns;
	uint64_t order; /* ties run in start order */
	bool running;
	struct loop_timer *up, *left, *right; /* the heap lies in its timers */
};
void loop_timer_init(struct loop_timer *timer, struct loop *loop,
		     void (*on_timer)(struct loop_timer *timer));
/* (Re)start: due `after_ns` from loop_now_ns(). */
void loop_timer_start(struct loop_timer *timer, uint64_t after_ns);
/* For periodic work: due at the multiple of LOOP_TICK_NS, counted from the loop's start,
 * that is nearest to that time. So such timers are due together, and an idle daemon wakes
 * up once for all of them. after_ns >= LOOP_TICK_NS. */
void loop_timer_start_tick(struct loop_timer *timer, uint64_t after_ns);
void loop_timer_stop(struct loop_timer *timer); /* idempotent */
bool loop_timer_running(const struct loop_timer *timer);

/* ---- file descriptors ---- */
enum { LOOP_READ = 1, LOOP_WRITE = 2 };
struct loop_fd {
	void (*on_ready)(struct loop_fd *watch, int events);
	struct loop *loop;
	int fd;
	int events;
	void *impl; /* the library's watcher, NULL when stopped */
	/* When turns are short of time, the owner served longest ago is first: a variable
	 * shared by all fds of one owner (it outlives this, or is reset with NULL); NULL:
	 * this fd alone. */
	uint64_t *served;
	uint64_t own_served;
};
void loop_fd_init(struct loop_fd *watch, struct loop *loop, int fd,
		  void (*on_ready)(struct loop_fd *watch, int events));
int loop_fd_set(struct loop_fd *watch, int events); /* 0 stops; ERR_NOMEM */
void loop_fd_stop(struct loop_fd *watch);	    /* idempotent; does not close */

/*
 * ---- work after the current callback, before the next wait ----
 * Calls deferred by deferred calls run in the same turn while it is short, by rank: the
 * messages of a turn are written when all of its calls have run, once for each socket,
 * and those to a peer's daemon, for which another engine waits, before those to the own
 * engine. A call that defers itself runs in the next turn: it yields.
 */
enum loop_rank { LOOP_CALL, LOOP_TO_PEER, LOOP_TO_ENGINE, LOOP_RANKS };
struct loop_defer {
	struct list link;    /* list_init()ed when idle */
	enum loop_rank rank; /* LOOP_CALL, unless its owner sets it */
	void (*run)(struct loop_defer *defer);
};
void loop_defer_init(struct loop_defer *defer, void (*run)(struct loop_defer *defer));
void loop_defer(struct loop *loop, struct loop_defer *defer); /* idempotent */
void loop_defer_cancel(struct loop_defer *defer);

/* ---- before sleeping: edge-triggered sources (ZeroMQ, UCX) ---- */
struct loop_prepare {
	struct list link;
	/* Called before each wait. True = there is more to do: do not sleep. */
	bool (*on_prepare)(struct loop_prepare *prepare);
};
void loop_prepare_add(struct loop *loop, struct loop_prepare *prepare);
void loop_prepare_remove(struct loop_prepare *prepare); /* idempotent */

/* ---- signals (SIGTERM, SIGHUP, …); real loops only ---- */
struct loop_signal {
	void (*on_signal)(struct loop_signal *sig);
	struct loop *loop;
	int signum;
	void *impl;
};
int loop_signal_start(struct loop_signal *sig, struct loop *loop, int signum,
		      void (*on_signal)(struct loop_signal *sig));
void loop_signal_stop(struct loop_signal *sig);

/* ---- from other threads ---- */
struct loop_wake {
	struct loop_fd watch; /* of an eventfd */
	void (*on_wake)(struct loop_wake *wake);
	bool pending; /* virtual loops: set, run as a deferred call */
	struct loop_defer defer;
};
int loop_wake_init(struct loop_wake *wake, struct loop *loop,
		   void (*on_wake)(struct loop_wake *wake));
void loop_wake_fini(struct loop_wake *wake);
void loop_wake(struct loop_wake *wake); /* any thread, async-signal-safe */

#endif
