/* SPDX-License-Identifier: Apache-2.0 */
/* clock: the kernel's clocks in ns. CLOCK_MONOTONIC where none is named. */
#ifndef KVD_BASE_CLOCK_H
#define KVD_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define CLOCK_NS_PER_S UINT64_C(1000000000)

static inline uint64_t clock_of(clockid_t id)
{
	struct timespec ts;

	clock_gettime(id, &ts);
	return (uint64_t)ts.tv_sec * CLOCK_NS_PER_S + (uint64_t)ts.tv_nsec;
}

static inline uint64_t clock_ns(void)
{
	return clock_of(CLOCK_MONOTONIC);
}

static inline double clock_s_of(clockid_t id)
{
	return 1e-9 * (double)clock_of(id);
}

static inline double clock_us(void)
{
	return 1e-3 * (double)clock_ns();
}

static inline double clock_s(void)
{
	return clock_s_of(CLOCK_MONOTONIC);
}

/* The moment `after_ns` from now, for pthread_cond_clockwait(). */
static inline struct timespec clock_after(uint64_t after_ns)
{
	uint64_t at_ns = clock_ns() + after_ns;

	return (struct timespec){.tv_sec = (time_t)(at_ns / CLOCK_NS_PER_S),
				 .tv_nsec = (long)(at_ns % CLOCK_NS_PER_S)};
}

#endif
