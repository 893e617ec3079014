/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/cpu.h"

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/clock.h"

/* Since 6.12 a thread chooses how long its turns are, and one that wakes with
 * shorter turns than the one that runs is let in at once. With equal turns
 * (1.4 to 3 ms) it may wait until the other's has ended, at each hop of a request. */
#define PROMPT_NS UINT64_C(100000) /* the shortest that the kernel accepts */
#define BULK_NS UINT64_C(3000000)

/* A waking thread preempts at once only while it has used no more than its share lately;
 * and an engine that polls and yields does not wake. Both then wait for the tick that
 * takes the core from a bulk thread, 4 ms with HZ=250. So a bulk thread yields by itself.
 * A thread that polls and yields, or handles a message and sleeps, gives the core back in
 * microseconds; a thread that computes keeps it until its own tick. Where that happens
 * the core is kept KEEP_TIMES as long as it was away, which bounds the cost of yielding.
 */
#define KEEP_NS UINT64_C(200000)
#define KEEP_MOST_NS UINT64_C(500000000)
#define KEEP_TIMES 32u
#define LONG_NS UINT64_C(1000000) /* away: longer than handling any message */

/* Debian 12's libc has neither the struct nor the calls. */
struct attr {
	uint32_t size, policy;
	uint64_t flags;
	int32_t nice;
	uint32_t priority;
	uint64_t runtime, deadline, period;
};

/* Real-time policies are an administrator's choice, and stay. */
static void turns_set(int policy, uint64_t ns)
{
	struct attr attr = {0};

	if (syscall(SYS_sched_getattr, 0, &attr, (unsigned int)sizeof(attr), 0u) < 0 ||
	    (attr.policy != SCHED_OTHER && attr.policy != SCHED_BATCH))
		return;
	attr.size = sizeof(attr);
	attr.policy = (uint32_t)policy;
	attr.flags = 0;
	attr.runtime = ns;
	(void)syscall(SYS_sched_setattr, 0, &attr, 0u);
}

void cpu_prompt(void)
{
	turns_set(SCHED_OTHER, PROMPT_NS);
}

void cpu_bulk(void)
{
	turns_set(SCHED_BATCH, BULK_NS);
}

uint64_t cpu_keep_ns(uint64_t away_ns)
{
	if (away_ns < LONG_NS)
		return KEEP_NS;
	return away_ns < KEEP_MOST_NS / KEEP_TIMES ? KEEP_TIMES * away_ns : KEEP_MOST_NS;
}

void cpu_breathe(void)
{
	static _Thread_local uint64_t until_ns;
	uint64_t away_ns = clock_ns();

	if (away_ns < until_ns)
		return;
	sched_yield();
	until_ns = clock_ns();
	away_ns = until_ns - away_ns;
	until_ns += cpu_keep_ns(away_ns);
}
