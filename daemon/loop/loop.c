/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop is a thin layer over libev that handles three aspects itself.
 *
 * Time. `now_ns` is read once when the poll returns (libev's acquire hook, so that it is
 * right before the first callback) and holds for the whole turn. Every timer lies in one
 * binary heap ordered by (due, start order); libev only sees one ev_timer, armed for the
 * earliest. The heap makes a virtual loop possible: the same code with a clock that jumps
 * to the heap's root. The heap's links lie in the timers, so starting one cannot fail. It
 * also gives ties a fixed order, which ev_timer does not, and a seed replays.
 *
 * Order. A turn is: deferred calls, fds that were left, prepare hooks, wait, fds, timers.
 * Hooks are last before the wait: they tell whether it may be long. Fds precede timers so
 * that an answer that waits in a socket is seen before the timer that would declare its
 * sender dead. Timers run in batches: those added during a batch belong to the next turn,
 * which then does not wait. Deferred calls run until none is left, by rank, so that their
 * messages are written once, at the end; a number and a time limit them, and a call that
 * defers itself waits for the next turn. So nothing in one turn can starve the poll.
 *
 * Time. Each part of a turn (calls, fds, timers) may take PART_NS, less the time by which
 * earlier parts exceeded theirs; the rest runs first in the next turn, after a poll that
 * does not wait. Each part runs one callback at least, so none can starve another. Ready
 * fds that were not served are queued: libev's order must not decide which are served. A
 * callback with many small steps calls loop_enough() between them. A callback may still
 * take long. When half of a turn's time is over, the turn ends before its next part, with
 * a poll that does not wait, and the next turn continues with that part. So a turn is at
 * most one long callback longer than that.
 *
 * Lag. A daemon that was kept from its poll (a long callback, a stopped
 * process, a starved core) must not declare its peers dead. Two kinds of stall are
 * noted: time between poll return and the next poll, and lateness of the poll
 * after the earliest timer was due. loop_lag_ns() wants the longest one since
 * some moment, so the notes form a monotonic stack: from oldest to newest the
 * lengths fall, and the first note that ended after that moment is the answer.
 *
 * libev aborts the process when it cannot grow its fd table; a loop_fd costs it 16 bytes
 * of array, our own allocations fail long before and return ERR_NOMEM.
 */
#include "daemon/loop/loop.h"

#include <assert.h>
#include <errno.h>
#include <ev.h>
#include <signal.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define NEVER UINT64_MAX
#define DEFERS_A_TURN 64u /* then the poll, also if they defer each other forever */
#define STALL_NOTES 64u
#define STALL_MIN_NS LOOP_NS_PER_MS /* epoll's own granularity */
/* libev keeps time as a double: aim a little late rather than wake twice */
#define ALARM_SLACK_NS UINT64_C(2000)
/* a third of a turn's time is left for the last callback and for interrupts */
#define PART_NS (LOOP_TURN_NS / 8)
#define RANDOM_WORDS 64u
#define CPU_SHORT_NS (LOOP_TURN_NS / 8)
#define CPU_CALM 4u
#define CPU_WATCHED 256u

struct stall {
	uint64_t end_ns, len_ns;
};

/* of a turn, in their order */
enum part { PART_NONE, PART_FDS, PART_TIMERS, PART_CALLS, PART_LATE, PART_HOOKS };

struct loop {
	struct ev_loop *ev; /* NULL when virtual */
	ev_timer alarm;
	uint64_t alarm_ns; /* the time it is armed for, NEVER when stopped */
	bool stop;
	uint64_t now_ns, began_ns;
	uint64_t ran; /* callbacks until now */

	struct loop_timer *root; /* of the heap: the earliest */
	size_t heap_count;
	uint64_t order;

	struct list defers[LOOP_RANKS];
	struct list yielded; /* deferred by themselves: for the next turn */
	struct loop_defer *running;
	struct list prepares;
	struct list late;     /* struct io.late: ready, not served yet */
	uint64_t part_end_ns; /* of the part of the turn that runs; NEVER: virtual */
	enum part cut;	      /* the last turn ended before it */
	unsigned int part_asks, asks_left; /* loop_virtual_parts() */

	uint64_t polled_ns; /* the poll last returned */
	uint64_t turn_ns;   /* the same, later by the time outside of loop_turn() */
	uint64_t left_ns;   /* loop_turn() last returned */
	uint64_t due_ns;    /* earliest timer when the poll started */
	struct stall stalls[STALL_NOTES];
	size_t stall_count;
	uint64_t cpu_ns; /* of this thread, when it was last read; 0: never */
	unsigned int cpu_calm, cpu_watched; /* turns: cpu_note() */
	struct loop_stats stats;

	uint64_t seed;
	uint64_t random[RANDOM_WORDS];
	unsigned int random_left;
};

/* a loop_fd's watcher */
struct io {
	ev_io ev;
	struct loop_fd *watch;
	struct list late;
	int late_events;
};

static uint64_t add_sat(uint64_t a, uint64_t b)
{
	return a + b < a ? NEVER : a + b;
}

static uint64_t sub_sat(uint64_t a, uint64_t b)
{
	return a > b ? a - b : 0;
}

/* ---- lag ---- */

static void stall_note(struct loop *loop, uint64_t end_ns, uint64_t len_ns)
{
	if (len_ns < STALL_MIN_NS)
		return;
	while (loop->stall_count && loop->stalls[loop->stall_count - 1].len_ns <= len_ns)
		loop->stall_count--;
	if (loop->stall_count == STALL_NOTES) {
		/* let the newest note cover this one: too long, never too short */
		loop->stalls[STALL_NOTES - 1].end_ns = end_ns;
		return;
	}
	loop->stalls[loop->stall_count++] =
		(struct stall){.end_ns = end_ns, .len_ns = len_ns};
}

uint64_t loop_lag_ns(const struct loop *loop, uint64_t since_ns)
{
	uint64_t lag = 0;

	if (!loop->ev)
		return 0; /* virtual time does not advance in callbacks */
	for (size_t i = 0; i < loop->stall_count; i++) {
		if (loop->stalls[i].end_ns > since_ns) {
			lag = loop->stalls[i].len_ns;
			break;
		}
	}
	uint64_t busy = sub_sat(loop_clock_ns(loop), loop->polled_ns);

	return busy > lag ? busy : lag;
}

/* ---- parts of a turn ---- */

/* False: it belongs to the next turn, or ran in the last one. `work`: it has some. */
static bool part_begin(struct loop *loop, enum part part, bool work)
{
	loop->asks_left = loop->part_asks;
	if (!loop->ev)
		return true;
	uint64_t now_ns = loop_clock_ns(loop), end_ns = now_ns + PART_NS;
	uint64_t due_ns = loop->turn_ns + part * PART_NS;

	loop->part_end_ns = end_ns < due_ns ? end_ns : due_ns;
	if (loop->cut == part)
		loop->cut = PART_NONE;
	else if (!loop->cut && work && now_ns - loop->turn_ns > LOOP_TURN_NS / 2)
		loop->cut = part;
	return !loop->cut;
}

bool loop_enough(struct loop *loop)
{
	if (loop->part_end_ns != NEVER)
		return loop_clock_ns(loop) >= loop->part_end_ns;
	if (loop->asks_left > 0)
		loop->asks_left--;
	return loop->part_asks > 0 && loop->asks_left == 0;
}

void loop_virtual_parts(struct loop *loop, unsigned int asks)
{
	assert(!loop->ev);
	loop->part_asks = loop->asks_left = asks;
}

/* ---- the timer heap ---- */

static bool timer_before(const struct loop_timer *a, const struct loop_timer *b)
{
	return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

/* Where the n-th timer of the heap hangs: the bits of n below the highest mean left or
 * right, from the root down. */
static struct loop_timer **heap_slot(struct loop *loop, size_t n,
				     struct loop_timer **up_p)
{
	struct loop_timer **slot = &loop->root;
	unsigned int bit = 63 - (unsigned int)__builtin_clzl(n);

	*up_p = NULL;
	while (bit-- > 0) {
		*up_p = *slot;
		slot = n >> bit & 1 ? &(*slot)->right : &(*slot)->left;
	}
	return slot;
}

static struct loop_timer **link_to(struct loop *loop, const struct loop_timer *timer)
{
	if (!timer->up)
		return &loop->root;
	return timer->up->left == timer ? &timer->up->left : &timer->up->right;
}

static void children_adopt(struct loop_timer *timer)
{
	if (timer->left)
		timer->left->up = timer;
	if (timer->right)
		timer->right->up = timer;
}

/* It changes places with the one above it. */
static void heap_lift(struct loop *loop, struct loop_timer *timer)
{
	struct loop_timer *above = timer->up, old = *timer;

	*link_to(loop, above) = timer;
	timer->up = above->up;
	if (above->left == timer) {
		timer->left = above;
		timer->right = above->right;
	} else {
		timer->left = above->left;
		timer->right = above;
	}
	above->left = old.left;
	above->right = old.right;
	children_adopt(timer);
	children_adopt(above);
}

static void heap_sift(struct loop *loop, struct loop_timer *timer)
{
	while (timer->up && timer_before(timer, timer->up))
		heap_lift(loop, timer);
	for (;;) {
		struct loop_timer *child = timer->left;

		if (child && timer->right && timer_before(timer->right, child))
			child = timer->right;
		if (!child || !timer_before(child, timer))
			return;
		heap_lift(loop, child);
	}
}

void loop_timer_init(struct loop_timer *timer, struct loop *loop,
		     void (*on_timer)(struct loop_timer *timer))
{
	*timer = (struct loop_timer){.on_timer = on_timer, .loop = loop};
}

void loop_timer_start(struct loop_timer *timer, uint64_t after_ns)
{
	struct loop *loop = timer->loop;

	assert(loop && timer->on_timer);
	if (!timer->running) {
		*heap_slot(loop, ++loop->heap_count, &timer->up) = timer;
		timer->left = timer->right = NULL;
		timer->running = true;
	}
	timer->at_ns = add_sat(loop->now_ns, after_ns);
	timer->order = ++loop->order;
	heap_sift(loop, timer);
}

void loop_timer_start_tick(struct loop_timer *timer, uint64_t after_ns)
{
	const struct loop *loop = timer->loop;
	uint64_t until_ns = add_sat(loop->now_ns - loop->began_ns, after_ns);
	uint64_t beyond_ns = until_ns % LOOP_TICK_NS;

	assert(after_ns >= LOOP_TICK_NS);
	after_ns -= beyond_ns;
	if (beyond_ns >= LOOP_TICK_NS / 2)
		after_ns = add_sat(after_ns, LOOP_TICK_NS);
	loop_timer_start(timer, after_ns);
}

void loop_timer_stop(struct loop_timer *timer)
{
	struct loop *loop = timer->loop;
	struct loop_timer **slot, *last, *up;

	if (!timer->running)
		return;
	slot = heap_slot(loop, loop->heap_count--, &up);
	last = *slot;
	*slot = NULL;
	timer->running = false;
	if (last == timer)
		return;
	*link_to(loop, timer) = last;
	last->up = timer->up;
	last->left = timer->left;
	last->right = timer->right;
	children_adopt(last);
	heap_sift(loop, last);
}

bool loop_timer_running(const struct loop_timer *timer)
{
	return timer->running;
}

static void run_timers(struct loop *loop)
{
	uint64_t batch = loop->order;
	bool due = loop->root && loop->root->at_ns <= loop->now_ns;

	if (!part_begin(loop, PART_TIMERS, due))
		return;
	while (loop->root) {
		struct loop_timer *timer = loop->root;

		/* one that was started in this batch can only be due now, so all older
		 * ones precede it */
		if (timer->at_ns > loop->now_ns || timer->order > batch)
			return;
		loop_timer_stop(timer);
		loop->ran++;
		timer->on_timer(timer);
		if (loop_enough(loop))
			return;
	}
}

/* ---- deferred calls and prepare hooks ---- */

void loop_defer_init(struct loop_defer *defer, void (*run)(struct loop_defer *defer))
{
	list_init(&defer->link);
	defer->rank = LOOP_CALL;
	defer->run = run;
}

void loop_defer(struct loop *loop, struct loop_defer *defer)
{
	assert(defer->run);
	if (list_empty(&defer->link))
		list_push_back(defer == loop->running ? &loop->yielded
						      : &loop->defers[defer->rank],
			       &defer->link);
}

void loop_defer_cancel(struct loop_defer *defer)
{
	list_remove(&defer->link);
}

static bool defers_wait(const struct loop *loop)
{
	for (unsigned int rank = 0; rank < LOOP_RANKS; rank++)
		if (!list_empty(&loop->defers[rank]))
			return true;
	return false;
}

/* The lowest rank first. When the time is over, one call of each rank that is left. */
static void run_defers(struct loop *loop)
{
	unsigned int rank = 0, ran = 0;
	struct list *link;

	if (!part_begin(loop, PART_CALLS, defers_wait(loop)))
		return;
	while (rank < LOOP_RANKS) {
		link = list_pop_front(&loop->defers[rank]);
		if (!link) {
			rank++;
			continue;
		}
		loop->running = list_entry(link, struct loop_defer, link);
		loop->running->run(loop->running);
		loop->running = NULL;
		if (++ran >= DEFERS_A_TURN || loop_enough(loop))
			rank++;
		else
			rank = 0;
	}
	loop->ran += ran;
	while ((link = list_pop_front(&loop->yielded)))
		loop_defer(loop, list_entry(link, struct loop_defer, link));
}

void loop_prepare_add(struct loop *loop, struct loop_prepare *prepare)
{
	assert(prepare->on_prepare);
	loop_prepare_remove(prepare);
	list_push_back(&loop->prepares, &prepare->link);
}

void loop_prepare_remove(struct loop_prepare *prepare)
{
	if (!prepare->link.next) /* zeroed, never added */
		list_init(&prepare->link);
	list_remove(&prepare->link);
}

/* Each hook once, even if hooks add or remove others. True: do not sleep. */
static bool run_prepares(struct loop *loop)
{
	struct list batch, *link;
	bool more = false;

	if (!part_begin(loop, PART_HOOKS, true))
		return false;
	list_init(&batch);
	list_append(&batch, &loop->prepares);
	while ((link = list_pop_front(&batch))) {
		struct loop_prepare *prepare =
			list_entry(link, struct loop_prepare, link);

		list_push_back(&loop->prepares, link);
		if (prepare->on_prepare(prepare)) {
			loop->ran++;
			more = true;
		}
	}
	return more;
}

/* ---- file descriptors that are ready ---- */

static uint64_t *served_of(struct loop_fd *watch)
{
	return watch->served ? watch->served : &watch->own_served;
}

static void io_serve(struct loop *loop, struct loop_fd *watch, int events)
{
	*served_of(watch) = ++loop->ran;
	watch->on_ready(watch, events);
}

static void on_io(struct ev_loop *ev, ev_io *impl, int revents)
{
	struct loop *loop = ev_userdata(ev);
	struct io *io = container_of(impl, struct io, ev);
	int events = 0;

	/* libev gives EV_ERROR (a bad fd) with both bits: the owner's next read or write
	 * then returns it */
	if (revents & EV_READ)
		events |= LOOP_READ;
	if (revents & EV_WRITE)
		events |= LOOP_WRITE;
	if (list_empty(&loop->late) && !loop->cut && !loop_enough(loop)) {
		io_serve(loop, io->watch, events);
		return;
	}
	io->late_events |= events;
	if (list_empty(&io->late))
		list_push_back(&loop->late, &io->late);
}

/* By owner: many fds of one do not keep another's waiting. */
static struct io *late_next(struct loop *loop)
{
	struct io *io, *next = NULL;

	list_foreach(io, &loop->late, late)
		if (!next || *served_of(io->watch) < *served_of(next->watch))
			next = io;
	return next;
}

/* Fds that were ready but not served. */
static void run_late(struct loop *loop)
{
	struct io *io;

	if (!part_begin(loop, PART_LATE, !list_empty(&loop->late)))
		return;
	while ((io = late_next(loop))) {
		int events = io->late_events & io->watch->events;

		list_remove(&io->late);
		io->late_events = 0;
		if (events)
			io_serve(loop, io->watch, events);
		if (loop_enough(loop))
			break;
	}
}

/* ---- the loop ---- */

static void on_alarm(struct ev_loop *ev, ev_timer *alarm, int events)
{
	(void)ev;
	(void)alarm;
	(void)events; /* it only ends the wait; run_timers() does the rest */
}

/*
 * A turn's CPU time is at most its duration, and short turns do not matter. So the
 * thread's CPU clock, a system call, is read for one turn of CPU_CALM, for turns over
 * CPU_SHORT_NS, and for each of the CPU_WATCHED that follow a long one: the core is
 * shared, or the loop has much work. Turns without a reading are counted with the next
 * one, which a few short ones make little longer.
 */
static void cpu_note(struct loop *loop, uint64_t busy_ns)
{
	uint64_t was_ns = loop->cpu_ns, cpu_ns = busy_ns;

	if (busy_ns > LOOP_TURN_NS)
		loop->cpu_watched = CPU_WATCHED;
	else if (loop->cpu_watched > 0)
		loop->cpu_watched--;
	if (busy_ns > CPU_SHORT_NS || loop->cpu_watched > 0 || !was_ns ||
	    ++loop->cpu_calm == CPU_CALM) {
		loop->cpu_calm = 0;
		loop->cpu_ns = clock_of(CLOCK_THREAD_CPUTIME_ID);
		cpu_ns = loop->cpu_ns - was_ns;
		if (cpu_ns > busy_ns) /* of turns before it, and the poll's */
			cpu_ns = busy_ns;
	}
	if (!was_ns) /* the start: reading files, making everything */
		return;
	histogram_add(&loop->stats.busy, busy_ns);
	histogram_add(&loop->stats.cpu, cpu_ns);
	if (cpu_ns > LOOP_TURN_NS)
		loop->stats.over++;
}

static void on_poll_begin(struct ev_loop *ev) EV_NOEXCEPT
{
	struct loop *loop = ev_userdata(ev);
	uint64_t clock_ns = loop_clock_ns(loop),
		 busy_ns = sub_sat(clock_ns, loop->polled_ns);

	stall_note(loop, clock_ns, busy_ns);
	cpu_note(loop, busy_ns);
}

static void on_poll_end(struct ev_loop *ev) EV_NOEXCEPT
{
	struct loop *loop = ev_userdata(ev);

	loop->now_ns = loop_clock_ns(loop);
	loop->polled_ns = loop->turn_ns = loop->now_ns;
	part_begin(loop, PART_FDS, false);
	stall_note(loop, loop->now_ns, sub_sat(loop->now_ns, loop->due_ns));
	if (loop->now_ns >= loop->due_ns)
		histogram_add(&loop->stats.late, loop->now_ns - loop->due_ns);
}

const struct loop_stats *loop_stats(const struct loop *loop)
{
	return &loop->stats;
}

static int loop_alloc(struct loop **loop_p)
{
	struct loop *loop = mem_zalloc(sizeof(*loop));

	if (!loop)
		return err_pass(-ENOMEM);
	for (unsigned int rank = 0; rank < LOOP_RANKS; rank++)
		list_init(&loop->defers[rank]);
	list_init(&loop->yielded);
	list_init(&loop->prepares);
	list_init(&loop->late);
	loop->alarm_ns = NEVER;
	loop->part_end_ns = NEVER;
	*loop_p = loop;
	return 0;
}

int loop_new(struct loop **loop_p)
{
	struct loop *loop;
	int r = loop_alloc(&loop);

	if (r < 0)
		return err_pass(r);
	loop->ev = ev_loop_new(EVFLAG_NOENV | EVBACKEND_EPOLL);
	if (!loop->ev) {
		mem_free(loop);
		return err_raise_errno(errno, "epoll for the event loop");
	}
	ev_ref(loop->ev); /* a loop without watches waits, it does not spin */
	ev_set_userdata(loop->ev, loop);
	ev_set_loop_release_cb(loop->ev, on_poll_begin, on_poll_end);
	ev_timer_init(&loop->alarm, on_alarm, 0., 0.);
	loop->now_ns = loop_clock_ns(loop);
	loop->polled_ns = loop->turn_ns = loop->left_ns = loop->began_ns = loop->now_ns;
	*loop_p = loop;
	return 0;
}

int loop_new_virtual(uint64_t seed, struct loop **loop_p)
{
	int r = loop_alloc(loop_p);

	if (r < 0)
		return err_pass(r);
	(*loop_p)->seed = seed;
	(*loop_p)->now_ns = LOOP_NS_PER_S;
	return 0;
}

void loop_free(struct loop *loop)
{
	bool waiting = loop && defers_wait(loop);

	if (!loop)
		return;
	assert(loop->heap_count == 0);
	assert(!waiting && list_empty(&loop->prepares) && list_empty(&loop->late));
	if (loop->ev) {
		ev_timer_stop(loop->ev, &loop->alarm);
		ev_unref(loop->ev);
		ev_loop_destroy(loop->ev);
	}
	mem_free(loop);
}

bool loop_is_virtual(const struct loop *loop)
{
	return !loop->ev;
}

uint64_t loop_now_ns(const struct loop *loop)
{
	return loop->now_ns;
}

uint64_t loop_clock_ns(const struct loop *loop)
{
	return loop->ev ? clock_ns() : loop->now_ns;
}

/* End the coming wait at `at_ns`. */
static void alarm_arm(struct loop *loop, uint64_t at_ns, uint64_t clock_ns)
{
	if (loop->alarm_ns == at_ns && ev_is_active(&loop->alarm))
		return;
	ev_timer_stop(loop->ev, &loop->alarm);
	loop->alarm_ns = at_ns;
	if (at_ns == NEVER)
		return;
	ev_now_update(loop->ev); /* libev counts from its last clock read */
	ev_timer_set(&loop->alarm, (double)(at_ns - clock_ns + ALARM_SLACK_NS) * 1e-9,
		     0.);
	ev_timer_start(loop->ev, &loop->alarm);
}

static void poll_real(struct loop *loop, uint64_t max_wait_ns)
{
	uint64_t clock_ns = loop_clock_ns(loop);
	uint64_t end_ns = add_sat(clock_ns, max_wait_ns);

	loop->due_ns = loop->root ? loop->root->at_ns : NEVER;
	if (loop->due_ns < end_ns)
		end_ns = loop->due_ns;
	if (end_ns <= clock_ns) {
		ev_run(loop->ev, EVRUN_NOWAIT);
		return;
	}
	alarm_arm(loop, end_ns, clock_ns);
	ev_run(loop->ev, EVRUN_ONCE);
}

static void poll_virtual(struct loop *loop, uint64_t max_wait_ns)
{
	uint64_t end_ns = add_sat(loop->now_ns, max_wait_ns);

	if (loop->root && loop->root->at_ns < end_ns)
		end_ns = loop->root->at_ns;
	if (end_ns != NEVER && end_ns > loop->now_ns)
		loop->now_ns = end_ns;
}

bool loop_turn(struct loop *loop, uint64_t max_wait_ns)
{
	uint64_t ran = loop->ran;

	if (loop->ev)
		loop->now_ns = loop_clock_ns(loop);
	loop->turn_ns += loop->now_ns - loop->left_ns;
	run_defers(loop);
	run_late(loop);
	if (run_prepares(loop))
		max_wait_ns = 0;
	if (defers_wait(loop) || !list_empty(&loop->late) || loop->cut || loop->stop)
		max_wait_ns = 0;
	if (loop->ev)
		poll_real(loop, max_wait_ns);
	else
		poll_virtual(loop, max_wait_ns);
	run_timers(loop);
	loop->left_ns = loop_clock_ns(loop);
	return loop->ran != ran || loop->cut;
}

void loop_run(struct loop *loop)
{
	while (!loop->stop) {
		bool ran = loop_turn(loop, NEVER);

		if (!loop->ev && !ran && !defers_wait(loop))
			break;
	}
	loop->stop = false;
}

void loop_stop(struct loop *loop)
{
	loop->stop = true;
}

/* ---- random ---- */

/* splitmix64: any seed, also 0, gives a full-period stream */
static uint64_t seeded_next(struct loop *loop)
{
	uint64_t z = (loop->seed += UINT64_C(0x9e3779b97f4a7c15));

	z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
	return z ^ (z >> 31);
}

void loop_random(struct loop *loop, void *buf, size_t len)
{
	uint8_t *p = buf;

	while (len) {
		if (loop->ev) {
			ssize_t n = getrandom(p, len, 0);

			/* fails only without a kernel that has it */
			assert(n > 0 || errno == EINTR);
			if (n > 0) {
				p += n;
				len -= (size_t)n;
			}
			continue;
		}
		uint64_t word = seeded_next(loop);
		size_t n = len < sizeof(word) ? len : sizeof(word);

		memcpy(p, &word, n);
		p += n;
		len -= n;
	}
}

uint64_t loop_random_u64(struct loop *loop)
{
	uint64_t word;

	do {
		if (!loop->ev) {
			word = seeded_next(loop);
			continue;
		}
		if (!loop->random_left) { /* a system call for many */
			loop_random(loop, loop->random, sizeof(loop->random));
			loop->random_left = RANDOM_WORDS;
		}
		word = loop->random[--loop->random_left];
	} while (!word);
	return word;
}

/* ---- file descriptors ---- */

void loop_fd_init(struct loop_fd *watch, struct loop *loop, int fd,
		  void (*on_ready)(struct loop_fd *watch, int events))
{
	assert(on_ready);
	*watch = (struct loop_fd){.on_ready = on_ready, .loop = loop, .fd = fd};
}

int loop_fd_set(struct loop_fd *watch, int events)
{
	struct ev_loop *ev = watch->loop->ev;
	struct io *io = watch->impl;

	assert(ev && watch->fd >= 0);
	if (!events) {
		loop_fd_stop(watch);
		return 0;
	}
	if (io && watch->events == events)
		return 0;
	if (!io) {
		io = mem_zalloc(sizeof(*io));
		if (!io)
			return err_pass(-ENOMEM);
		ev_init(&io->ev, on_io);
		list_init(&io->late);
		io->watch = watch;
		watch->impl = io;
	}
	ev_io_stop(ev, &io->ev);
	ev_io_set(&io->ev, watch->fd,
		  (events & LOOP_READ ? EV_READ : 0) |
			  (events & LOOP_WRITE ? EV_WRITE : 0));
	ev_io_start(ev, &io->ev);
	watch->events = events;
	return 0;
}

void loop_fd_stop(struct loop_fd *watch)
{
	struct io *io = watch->impl;

	if (!io)
		return;
	ev_io_stop(watch->loop->ev, &io->ev);
	list_remove(&io->late);
	mem_free(io);
	watch->impl = NULL;
	watch->events = 0;
}

/* ---- signals ---- */

static void on_ev_signal(struct ev_loop *ev, ev_signal *impl, int revents)
{
	struct loop *loop = ev_userdata(ev);
	struct loop_signal *sig = impl->data;

	(void)revents;
	loop->ran++;
	sig->on_signal(sig);
}

int loop_signal_start(struct loop_signal *sig, struct loop *loop, int signum,
		      void (*on_signal)(struct loop_signal *sig))
{
	ev_signal *impl;
	sigset_t set;

	assert(loop->ev);
	*sig = (struct loop_signal){
		.on_signal = on_signal, .loop = loop, .signum = signum};
	impl = mem_zalloc(sizeof(*impl));
	if (!impl)
		return err_pass(-ENOMEM);
	ev_signal_init(impl, on_ev_signal, signum);
	impl->data = sig;
	ev_signal_start(loop->ev, impl);
	sig->impl = impl;
	/* a thread that blocks it may have started this process, and a mask is inherited
	 */
	sigemptyset(&set);
	sigaddset(&set, signum);
	pthread_sigmask(SIG_UNBLOCK, &set, NULL);
	return 0;
}

void loop_signal_stop(struct loop_signal *sig)
{
	if (!sig->impl)
		return;
	ev_signal_stop(sig->loop->ev, sig->impl);
	mem_free(sig->impl);
	sig->impl = NULL;
}
