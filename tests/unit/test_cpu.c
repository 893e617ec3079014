/* SPDX-License-Identifier: Apache-2.0 */
/* cpu: what the kernel says of a thread after it has said its wish. */
#include "daemon/base/clock.h"
#include "daemon/base/cpu.h"

#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cmocka.h>

struct seen {
	void (*wish)(void);
	int policy, nice, wished_nice;
	uint64_t turn_ns;
};

static void *thread_main(void *arg)
{
	struct seen *seen = arg;
	/* size, policy, flags, nice, priority, runtime, deadline, period */
	uint32_t attr[12] = {0};
	const struct sched_param none = {0};

	/* Only root may go back to a smaller one than it was started with. */
	seen->wished_nice = getpriority(PRIO_PROCESS, 0) + 3;
	if (seen->wished_nice > 19)
		seen->wished_nice = 19;
	(void)setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), seen->wished_nice);
	/* whoever runs the tests may have put them behind all other work */
	(void)sched_setscheduler(0, SCHED_OTHER, &none);
	seen->wish();
	seen->policy = sched_getscheduler(0);
	if (syscall(SYS_sched_getattr, 0, attr, (unsigned int)sizeof(attr), 0u) == 0) {
		seen->nice = (int)attr[4];
		memcpy(&seen->turn_ns, &attr[6], sizeof(seen->turn_ns));
	}
	return NULL;
}

static struct seen seen_after(void (*wish)(void))
{
	struct seen seen = {.wish = wish, .nice = -100};
	pthread_t thread;

	assert_int_equal(pthread_create(&thread, NULL, thread_main, &seen), 0);
	pthread_join(thread, NULL);
	return seen;
}

static void thread_bulk_is_batch_and_keeps_its_nice(void **state)
{
	struct seen seen = seen_after(cpu_bulk);

	(void)state;
	assert_int_equal(seen.policy, SCHED_BATCH);
	assert_int_equal(seen.nice, seen.wished_nice);
}

static void thread_prompt_has_shorter_turns_than_bulk(void **state)
{
	struct seen prompt = seen_after(cpu_prompt), bulk = seen_after(cpu_bulk);

	(void)state;
	assert_int_equal(prompt.policy, SCHED_OTHER);
	assert_int_equal(prompt.nice, prompt.wished_nice);
	if (bulk.turn_ns == prompt.turn_ns) {
		print_message(
			"[  SKIPPED ] needs Linux 6.12, where turns can be chosen\n");
		skip();
	}
	assert_true(prompt.turn_ns < bulk.turn_ns);
}

static void core_kept_grows_with_the_time_it_was_away(void **state)
{
	const uint64_t soon = cpu_keep_ns(0), ms = 1000000;

	(void)state;
	assert_true(soon > 0 && soon < ms); /* well below a tick */
	assert_int_equal(cpu_keep_ns(ms / 10), soon);
	for (uint64_t away = ms; away <= 12 * ms; away += ms)
		assert_true(cpu_keep_ns(away) >= 32 * away);
	assert_true(cpu_keep_ns(UINT64_MAX) <= 1000 * ms); /* and comes to an end */
}

static _Thread_local unsigned int yields;

/* In the libc's place: how often this thread gave its core away. */
int sched_yield(void)
{
	yields++;
	return (int)syscall(SYS_sched_yield);
}

static void thread_with_pauses_yields_periodically(void **state)
{
	const uint64_t keep_ns = cpu_keep_ns(0);
	uint64_t begin_ns = clock_ns(), calls = 0;

	(void)state;
	yields = 0;
	while (yields < 5) { /* times are kept from the first one on */
		cpu_breathe();
		calls++;
		assert_true(clock_ns() - begin_ns < UINT64_C(60000000000));
	}
	assert_true(clock_ns() - begin_ns >= 4 * keep_ns);
	assert_true(calls > 5); /* most calls only look at the clock */
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(thread_bulk_is_batch_and_keeps_its_nice),
		cmocka_unit_test(thread_prompt_has_shorter_turns_than_bulk),
		cmocka_unit_test(core_kept_grows_with_the_time_it_was_away),
		cmocka_unit_test(thread_with_pauses_yields_periodically),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
