/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control of bench_turns.py: a thread that only sleeps for 20 us and computes for 20.
 * A turn of it over 200 us of its own CPU time is the machine's: interrupts, and pauses
 * of a virtual machine by its host, count as time of the thread that they hit. A turn is
 * measured as those of a daemon's loop: what the thread had a core for since the last
 * one, at most the time since it woke.
 *
 * machine_turns SECONDS: prints its turns, those over the limit, and the CPU time, of as
 * many seconds of CPU time.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

#include "daemon/base/clock.h"

#define PAUSE_NS 20000
#define LIMIT_NS 200000u

static void compute(void)
{
	uint64_t end_ns = clock_ns() + PAUSE_NS;

	while (clock_ns() < end_ns)
		;
}

int main(int argc, char **argv)
{
	const uint64_t most_ns =
		(uint64_t)((argc > 1 ? atof(argv[1]) : 1) * (double)CLOCK_NS_PER_S);
	uint64_t begun_ns = clock_of(CLOCK_THREAD_CPUTIME_ID), cpu_ns = begun_ns;
	unsigned long turns = 0, over = 0;

	prctl(PR_SET_TIMERSLACK, 1);
	while (cpu_ns - begun_ns < most_ns) {
		uint64_t before_ns = cpu_ns, woke_ns, had_ns;

		nanosleep(&(struct timespec){.tv_nsec = PAUSE_NS}, NULL);
		woke_ns = clock_ns();
		compute();
		cpu_ns = clock_of(CLOCK_THREAD_CPUTIME_ID);
		had_ns = cpu_ns - before_ns;
		turns++;
		over += had_ns > LIMIT_NS && clock_ns() - woke_ns > LIMIT_NS;
	}
	printf("%lu %lu %.3f\n", turns, over,
	       (double)(cpu_ns - begun_ns) / (double)CLOCK_NS_PER_S);
	return 0;
}
