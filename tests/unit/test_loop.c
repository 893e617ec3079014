/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The loop, real and virtual. Cases on real time wait for a condition through
 * the loop itself and bound it with a timer that fails the case.
 */
#include "daemon/loop/loop.h"

#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define MS LOOP_NS_PER_MS

struct note_timer {
	struct loop_timer timer;
	char *log; /* appended to */
	char name;
	unsigned int repeat;
	uint64_t every_ns;
	struct note_timer *stops;
};

static void note(char *log, char name)
{
	size_t n = strlen(log);

	log[n] = name;
	log[n + 1] = '\0';
}

static void on_note_timer(struct loop_timer *timer)
{
	struct note_timer *t = container_of(timer, struct note_timer, timer);

	note(t->log, t->name);
	if (t->stops)
		loop_timer_stop(&t->stops->timer);
	if (t->repeat) {
		t->repeat--;
		loop_timer_start(timer, t->every_ns);
	}
}

static void note_timer_start(struct note_timer *t, struct loop *loop, char *log,
			     char name, uint64_t after_ns)
{
	*t = (struct note_timer){.log = log, .name = name};
	loop_timer_init(&t->timer, loop, on_note_timer);
	loop_timer_start(&t->timer, after_ns);
}

static void timer_virtual_runs_in_due_then_start_order(void **state)
{
	struct loop *loop;
	struct note_timer a, b, c, d;
	char log[16] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	assert_int_equal(loop_now_ns(loop), LOOP_NS_PER_S);
	note_timer_start(&a, loop, log, 'a', 20 * MS);
	note_timer_start(&b, loop, log, 'b', 10 * MS);
	note_timer_start(&c, loop, log, 'c', 20 * MS);
	note_timer_start(&d, loop, log, 'd', 0);
	loop_run(loop);
	assert_string_equal(log, "dbac");
	assert_int_equal(loop_now_ns(loop), LOOP_NS_PER_S + 20 * MS);
	assert_false(loop_timer_running(&a.timer));
	loop_free(loop);
}

static void timer_restarted_moves_and_keeps_one_entry(void **state)
{
	struct loop *loop;
	struct note_timer a, b;
	char log[16] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	note_timer_start(&a, loop, log, 'a', 10 * MS);
	note_timer_start(&b, loop, log, 'b', 15 * MS);
	mem_fail_at(1); /* a restart allocates nothing */
	loop_timer_start(&a.timer, 30 * MS);
	mem_fail_at(0);
	loop_run(loop);
	assert_string_equal(log, "ba");
	loop_free(loop);
}

/* Periodic timers of different starts and periods are due in the same turns. */
static void timers_started_for_a_tick_are_due_together(void **state)
{
	struct note_timer a, b, c;
	struct loop *loop;
	char log[16] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	note_timer_start(&a, loop, log, 'a', 90 * MS);
	note_timer_start(&b, loop, log, 'b', 110 * MS);
	note_timer_start(&c, loop, log, 'c', 0);
	loop_run(loop);
	assert_int_equal(loop_now_ns(loop), LOOP_NS_PER_S + 110 * MS);
	loop_timer_start_tick(&a.timer, LOOP_TICK_NS); /* 310 */
	loop_timer_start_tick(&b.timer, LOOP_TICK_NS + 89 * MS);
	loop_timer_start_tick(&c.timer, LOOP_TICK_NS + 90 * MS);
	assert_int_equal(a.timer.at_ns, LOOP_NS_PER_S + 400 * MS);
	assert_int_equal(b.timer.at_ns, a.timer.at_ns);
	assert_int_equal(c.timer.at_ns, a.timer.at_ns);
	loop_timer_start_tick(&b.timer, LOOP_TICK_NS + 190 * MS);
	assert_int_equal(b.timer.at_ns, LOOP_NS_PER_S + 600 * MS);
	loop_run(loop);
	loop_timer_start_tick(&a.timer, UINT64_MAX);
	assert_true(a.timer.at_ns > UINT64_MAX - LOOP_TICK_NS);
	loop_timer_stop(&a.timer);
	loop_free(loop);
}

static void timer_stopped_by_another_in_the_batch_does_not_run(void **state)
{
	struct loop *loop;
	struct note_timer a, b;
	char log[16] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	note_timer_start(&a, loop, log, 'a', 10 * MS);
	note_timer_start(&b, loop, log, 'b', 10 * MS);
	a.stops = &b;
	loop_timer_stop(&b.timer);
	loop_timer_stop(&b.timer);
	loop_timer_start(&b.timer, 10 * MS);
	loop_run(loop);
	assert_string_equal(log, "a");
	loop_free(loop);
}

static void timer_restarted_at_zero_runs_in_the_next_turn(void **state)
{
	struct loop *loop;
	struct note_timer a;
	char log[16] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	note_timer_start(&a, loop, log, 'a', 0);
	a.repeat = 3;
	assert_true(loop_turn(loop, 0));
	assert_string_equal(log, "a");
	assert_true(loop_turn(loop, 0));
	assert_string_equal(log, "aa");
	loop_run(loop);
	assert_string_equal(log, "aaaa");
	loop_free(loop);
}

static void timer_in_distant_future_saturates(void **state)
{
	struct loop *loop;
	struct note_timer a;
	char log[16] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	note_timer_start(&a, loop, log, 'a', UINT64_MAX);
	assert_false(loop_turn(loop, 1000 * MS));
	assert_true(loop_timer_running(&a.timer));
	loop_timer_stop(&a.timer);
	loop_free(loop);
}

/* Against a plain model: 2 000 timers, random starts, restarts and stops. */
static void timer_heap_random_matches_a_model(void **state)
{
	enum { N = 2000 };
	static struct note_timer t[N];
	static char log[N + 1];
	struct loop *loop;
	uint64_t last = 0, seen = 0;

	(void)state;
	assert_int_equal(loop_new_virtual(7, &loop), 0);
	for (int i = 0; i < N; i++)
		note_timer_start(&t[i], loop, log, 'x',
				 loop_random_u64(loop) % (1000 * MS));
	for (int i = 0; i < 3 * N; i++) {
		struct note_timer *one = &t[loop_random_u64(loop) % N];

		if (i % 3 == 0)
			loop_timer_stop(&one->timer);
		else
			loop_timer_start(&one->timer,
					 loop_random_u64(loop) % (1000 * MS));
	}
	uint64_t running = 0;

	for (int i = 0; i < N; i++)
		running += loop_timer_running(&t[i].timer);
	assert_true(running > 0 && running < N);
	while (loop_turn(loop, UINT64_MAX)) {
		uint64_t left = 0, next = UINT64_MAX;

		for (int i = 0; i < N; i++) {
			if (!loop_timer_running(&t[i].timer))
				continue;
			left++;
			if (t[i].timer.at_ns < next)
				next = t[i].timer.at_ns;
		}
		assert_true(loop_now_ns(loop) >= last);
		assert_true(next > loop_now_ns(loop)); /* nothing due is left */
		last = loop_now_ns(loop);
		seen = running - left;
	}
	assert_int_equal(seen, running);
	assert_int_equal(strlen(log), running);
	loop_free(loop);
}

static void timer_starts_without_memory(void **state)
{
	enum { N = 100 };
	struct note_timer t[N];
	struct loop *loop;
	char log[N + 2] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	mem_fail_at(1);
	for (int i = 0; i < N; i++)
		note_timer_start(&t[i], loop, log, 'x', MS);
	mem_fail_at(0);
	loop_run(loop);
	assert_int_equal(strlen(log), N);
	loop_free(loop);
}
static void turn_virtual_advances_at_most_to_limit(void **state)
{
	struct loop *loop;
	struct note_timer a;
	char log[16] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	note_timer_start(&a, loop, log, 'a', 10 * MS);
	assert_false(loop_turn(loop, 4 * MS));
	assert_int_equal(loop_now_ns(loop), LOOP_NS_PER_S + 4 * MS);
	assert_true(loop_turn(loop, 100 * MS));
	assert_int_equal(loop_now_ns(loop), LOOP_NS_PER_S + 10 * MS);
	assert_false(loop_turn(loop, UINT64_MAX)); /* nothing to wait for */
	assert_int_equal(loop_now_ns(loop), LOOP_NS_PER_S + 10 * MS);
	assert_int_equal(loop_lag_ns(loop, 0), 0);
	loop_free(loop);
}

static void random_virtual_repeats_by_seed(void **state)
{
	uint8_t a[37], b[37], c[37];
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new_virtual(42, &loop), 0);
	loop_random(loop, a, sizeof(a));
	loop_free(loop);
	assert_int_equal(loop_new_virtual(42, &loop), 0);
	loop_random(loop, b, sizeof(b));
	loop_free(loop);
	assert_int_equal(loop_new_virtual(43, &loop), 0);
	loop_random(loop, c, sizeof(c));
	loop_free(loop);
	assert_memory_equal(a, b, sizeof(a));
	assert_memory_not_equal(a, c, sizeof(a));
	assert_int_equal(loop_new(&loop), 0);
	loop_random(loop, b, sizeof(b));
	loop_random(loop, c, sizeof(c));
	assert_memory_not_equal(b, c, sizeof(b));
	assert_true(loop_random_u64(loop) != 0);
	loop_free(loop);
}

/* ---- prepare hooks ---- */

struct note_prepare {
	struct loop_prepare prepare;
	unsigned int left, calls;
	struct note_prepare *removes;
};

static bool on_note_prepare(struct loop_prepare *prepare)
{
	struct note_prepare *p = container_of(prepare, struct note_prepare, prepare);

	p->calls++;
	if (p->removes)
		loop_prepare_remove(&p->removes->prepare);
	return p->left && p->left--;
}

static void prepare_with_more_keeps_the_loop_from_waiting(void **state)
{
	struct note_prepare p = {.prepare = {.on_prepare = on_note_prepare}, .left = 3};
	struct note_timer a;
	struct loop *loop;
	char log[16] = "";

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	loop_prepare_add(loop, &p.prepare);
	note_timer_start(&a, loop, log, 'a', 10 * MS);
	for (int i = 0; i < 3; i++) {
		assert_true(loop_turn(loop, UINT64_MAX));
		assert_int_equal(loop_now_ns(loop), LOOP_NS_PER_S);
	}
	assert_true(loop_turn(loop, UINT64_MAX));
	assert_string_equal(log, "a");
	assert_int_equal(p.calls, 4);
	loop_prepare_remove(&p.prepare);
	loop_prepare_remove(&p.prepare);
	loop_free(loop);
}

static void prepare_removed_by_a_sibling_is_not_called(void **state)
{
	struct note_prepare b = {.prepare = {.on_prepare = on_note_prepare}};
	struct note_prepare a = {.prepare = {.on_prepare = on_note_prepare},
				 .removes = &b};
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new_virtual(1, &loop), 0);
	loop_prepare_add(loop, &a.prepare);
	loop_prepare_add(loop, &b.prepare);
	loop_turn(loop, 0);
	assert_int_equal(a.calls, 1);
	assert_int_equal(b.calls, 0);
	loop_prepare_remove(&a.prepare);
	loop_free(loop);
}

/* ---- the real loop ---- */

static void on_stop_timer(struct loop_timer *timer)
{
	loop_stop(timer->loop);
}

static void timer_real_is_never_early(void **state)
{
	struct loop_timer timer;
	struct loop *loop;
	uint64_t due;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	loop_timer_init(&timer, loop, on_stop_timer);
	for (int i = 0; i < 5; i++) {
		loop_turn(loop, 0);
		loop_timer_start(&timer, 3 * MS);
		due = timer.at_ns;
		loop_run(loop);
		assert_true(loop_now_ns(loop) >= due);
	}
	loop_free(loop);
}

/* An idle loop with a far timer sleeps through: one turn, nothing ran. */
static void turn_real_idle_waits_for_timeout(void **state)
{
	struct note_timer far;
	struct loop *loop;
	char log[4] = "";
	uint64_t t0;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	note_timer_start(&far, loop, log, 'f', 3600 * LOOP_NS_PER_S);
	t0 = loop_clock_ns(loop);
	assert_false(loop_turn(loop, 20 * MS));
	assert_true(loop_clock_ns(loop) - t0 >= 20 * MS);
	loop_timer_stop(&far.timer);
	t0 = loop_clock_ns(loop);
	assert_false(loop_turn(loop, 5 * MS)); /* no watch at all: no spin */
	assert_true(loop_clock_ns(loop) - t0 >= 5 * MS);
	loop_free(loop);
}

/* ---- signals and wake-ups ---- */

static void on_term(struct loop_signal *sig)
{
	loop_stop(sig->loop);
}

static void signal_sent_reaches_the_loop(void **state)
{
	struct loop_signal sig;
	struct loop *loop;
	sigset_t set;

	(void)state;
	sigemptyset(&set);
	sigaddset(&set, SIGUSR2);
	assert_int_equal(pthread_sigmask(SIG_BLOCK, &set, NULL), 0); /* inherited, say */
	alarm(60); /* without the signal it would run for ever */
	assert_int_equal(loop_new(&loop), 0);
	assert_int_equal(loop_signal_start(&sig, loop, SIGUSR2, on_term), 0);
	assert_int_equal(kill(getpid(), SIGUSR2), 0);
	loop_run(loop);
	alarm(0);
	loop_signal_stop(&sig);
	loop_signal_stop(&sig);
	loop_free(loop);
}

struct waker {
	struct loop_wake wake;
	struct loop *loop;
	unsigned int sent; /* atomic */
	unsigned int seen;
};

enum { WAKE_THREADS = 4, WAKES = 5000 };

static void on_waker(struct loop_wake *wake)
{
	struct waker *w = container_of(wake, struct waker, wake);

	w->seen = __atomic_load_n(&w->sent, __ATOMIC_RELAXED);
	if (w->seen == WAKE_THREADS * WAKES)
		loop_stop(w->loop);
}

static void *waker_main(void *arg)
{
	struct waker *w = arg;

	for (int i = 0; i < WAKES; i++) {
		__atomic_fetch_add(&w->sent, 1, __ATOMIC_RELAXED);
		loop_wake(&w->wake);
	}
	return NULL;
}

/* The last wake of all threads is never lost: the loop would not end. */
static void wake_from_threads_is_never_lost(void **state)
{
	pthread_t tids[WAKE_THREADS];
	struct waker w = {0};

	(void)state;
	assert_int_equal(loop_new(&w.loop), 0);
	assert_int_equal(loop_wake_init(&w.wake, w.loop, on_waker), 0);
	for (int i = 0; i < WAKE_THREADS; i++)
		assert_int_equal(pthread_create(&tids[i], NULL, waker_main, &w), 0);
	loop_run(w.loop);
	assert_int_equal(w.seen, WAKE_THREADS * WAKES);
	for (int i = 0; i < WAKE_THREADS; i++)
		pthread_join(tids[i], NULL);
	loop_wake_fini(&w.wake);
	loop_wake_fini(&w.wake);
	loop_free(w.loop);
}

static void wake_virtual_is_a_deferred_call(void **state)
{
	struct waker w = {0};

	(void)state;
	assert_int_equal(loop_new_virtual(1, &w.loop), 0);
	assert_int_equal(loop_wake_init(&w.wake, w.loop, on_waker), 0);
	w.sent = 3;
	loop_wake(&w.wake);
	loop_wake(&w.wake);
	assert_int_equal(w.seen, 0);
	loop_run(w.loop);
	assert_int_equal(w.seen, 3);
	w.sent = 4;
	loop_wake(&w.wake);
	loop_run(w.loop);
	assert_int_equal(w.seen, 4);
	loop_wake_fini(&w.wake);
	loop_free(w.loop);
}

/* ---- lag ---- */

static void burn(const struct loop *loop, uint64_t ns)
{
	uint64_t end = loop_clock_ns(loop) + ns;

	while (loop_clock_ns(loop) < end)
		;
}

static void on_burn(struct loop_timer *timer)
{
	burn(timer->loop, 30 * MS);
	assert_true(loop_lag_ns(timer->loop, loop_clock_ns(timer->loop)) >= 30 * MS);
}

static void lag_after_long_callback_is_reported_until_past(void **state)
{
	struct loop_timer timer;
	struct loop *loop;
	uint64_t before, after;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	loop_turn(loop, 0);
	before = loop_now_ns(loop);
	loop_timer_init(&timer, loop, on_burn);
	loop_timer_start(&timer, 0);
	loop_turn(loop, 0);
	loop_turn(loop, 0);
	after = loop_now_ns(loop);
	assert_true(loop_lag_ns(loop, before) >= 30 * MS);
	assert_true(loop_lag_ns(loop, before) < 10 * LOOP_NS_PER_S);
	/* what was before `after` no longer counts; the machine itself may be
	 * slow, so only what is surely shorter is compared */
	loop_turn(loop, 0);
	assert_true(loop_lag_ns(loop, after) <= loop_lag_ns(loop, before));
	loop_free(loop);
}

static void on_spin(struct loop_timer *timer)
{
	uint64_t now, until = 0;

	(void)timer;
	do { /* of a core, however many others want it */
		now = clock_of(CLOCK_THREAD_CPUTIME_ID);
		until = until ? until : now + 5 * MS;
	} while (now < until);
}

static void stats_of_a_long_turn_have_its_length(void **state)
{
	const struct loop_stats *stats;
	struct loop_timer timer;
	struct loop *loop;
	uint64_t slow;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	stats = loop_stats(loop);
	assert_int_equal(stats->busy.count, 0);
	for (int i = 0; i < 10; i++)
		loop_turn(loop, 0);
	assert_int_equal(stats->busy.count, stats->cpu.count);
	assert_true(stats->cpu.count >= 9); /* the first only begins the count */
	slow = stats->over;
	loop_timer_init(&timer, loop, on_spin);
	loop_timer_start(&timer, 0);
	loop_turn(loop, 0);
	loop_turn(loop, 0);
	assert_true(stats->over > slow);
	assert_true(stats->cpu.max >= 5 * MS && stats->busy.max >= 5 * MS);
	assert_true(stats->late.count >= 1);
	loop_free(loop);
}

struct busy_fd {
	struct loop_fd watch;
	int pipe[2];
	unsigned int served;
};

static void on_busy(struct loop_fd *watch, int events)
{
	(void)events;
	container_of(watch, struct busy_fd, watch)->served++;
	burn(watch->loop, MS); /* longer than its part of a turn */
}

/* Always ready, all of them: the others wait for one of the owner's, not for all. */
static void many_fds_of_one_owner_are_served_as_one(void **state)
{
	struct busy_fd fds[18];
	unsigned int many = 0, alone;
	uint64_t owner = 0;
	struct loop *loop;

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	for (size_t i = 0; i < ARRAY_LEN(fds); i++) {
		fds[i].served = 0;
		assert_int_equal(pipe(fds[i].pipe), 0);
		assert_int_equal(write(fds[i].pipe[1], "x", 1), 1);
		loop_fd_init(&fds[i].watch, loop, fds[i].pipe[0], on_busy);
		fds[i].watch.served = i < 16 ? &owner : NULL;
		assert_int_equal(loop_fd_set(&fds[i].watch, LOOP_READ), 0);
	}
	for (int turn = 0; turn < 60; turn++)
		loop_turn(loop, 0);
	for (size_t i = 0; i < 16; i++)
		many += fds[i].served;
	alone = fds[16].served < fds[17].served ? fds[16].served : fds[17].served;
	assert_true(many > 0 && alone > 0);
	assert_true(many <= 2 * alone);
	for (size_t i = 0; i < ARRAY_LEN(fds); i++) {
		loop_fd_stop(&fds[i].watch);
		close(fds[i].pipe[0]);
		close(fds[i].pipe[1]);
	}
	loop_free(loop);
}

static void lag_of_a_late_turn_counts_from_the_due_time(void **state)
{
	struct note_timer a;
	struct loop *loop;
	uint64_t before;
	char log[4] = "";

	(void)state;
	assert_int_equal(loop_new(&loop), 0);
	loop_turn(loop, 0);
	before = loop_now_ns(loop);
	note_timer_start(&a, loop, log, 'a', 5 * MS);
	burn(loop, 40 * MS); /* outside: as if the process was stopped */
	assert_true(loop_turn(loop, LOOP_NS_PER_S));
	assert_string_equal(log, "a"); /* it does not count as the turn's own time */
	assert_true(loop_lag_ns(loop, before) >= 35 * MS);
	loop_free(loop);
}

static void loop_without_memory_is_not_made(void **state)
{
	struct waker w = {0};
	struct loop_fd watch;
	struct loop *loop;

	(void)state;
	mem_fail_at(1);
	assert_int_equal(loop_new(&loop), -ENOMEM);
	mem_fail_at(1);
	assert_int_equal(loop_new_virtual(1, &loop), -ENOMEM);
	mem_fail_at(0);
	assert_int_equal(loop_new(&loop), 0);
	mem_fail_at(1);
	assert_int_equal(loop_wake_init(&w.wake, loop, on_waker), -ENOMEM);
	loop_fd_init(&watch, loop, 0, on_busy);
	mem_fail_at(1);
	assert_int_equal(loop_fd_set(&watch, LOOP_READ), -ENOMEM);
	mem_fail_at(0);
	loop_free(loop);
	loop_free(NULL);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(timer_virtual_runs_in_due_then_start_order),
		cmocka_unit_test(timer_restarted_moves_and_keeps_one_entry),
		cmocka_unit_test(timers_started_for_a_tick_are_due_together),
		cmocka_unit_test(timer_stopped_by_another_in_the_batch_does_not_run),
		cmocka_unit_test(timer_restarted_at_zero_runs_in_the_next_turn),
		cmocka_unit_test(timer_in_distant_future_saturates),
		cmocka_unit_test(timer_heap_random_matches_a_model),
		cmocka_unit_test(timer_starts_without_memory),
		cmocka_unit_test(turn_virtual_advances_at_most_to_limit),
		cmocka_unit_test(random_virtual_repeats_by_seed),
		cmocka_unit_test(prepare_with_more_keeps_the_loop_from_waiting),
		cmocka_unit_test(prepare_removed_by_a_sibling_is_not_called),
		cmocka_unit_test(timer_real_is_never_early),
		cmocka_unit_test(turn_real_idle_waits_for_timeout),
		cmocka_unit_test(signal_sent_reaches_the_loop),
		cmocka_unit_test(wake_from_threads_is_never_lost),
		cmocka_unit_test(wake_virtual_is_a_deferred_call),
		cmocka_unit_test(lag_after_long_callback_is_reported_until_past),
		cmocka_unit_test(many_fds_of_one_owner_are_served_as_one),
		cmocka_unit_test(lag_of_a_late_turn_counts_from_the_due_time),
		cmocka_unit_test(stats_of_a_long_turn_have_its_length),
		cmocka_unit_test(loop_without_memory_is_not_made),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
