/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/cpu.h"

#include <sched.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Since 6.12 a thread chooses how long its turns are, and one that wakes with
 * shorter turns than the one that runs is let in at once. With equal turns
 * (1.4 to 3 ms) it may wait until the other's has ended, at each hop of a request. */
#define PROMPT_NS UINT64_C(100000) /* the shortest that the kernel takes */
#define BULK_NS UINT64_C(10000000)

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
