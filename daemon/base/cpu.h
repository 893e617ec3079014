/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cpu: how a thread shares its core with others. These are requests: if the kernel
 * rejects one, the thread runs unchanged.
 */
#ifndef KVD_BASE_CPU_H
#define KVD_BASE_CPU_H

#include <stdint.h>

/* The calling thread, and those that it starts: short time slices, so it is scheduled as
 * soon as it wakes, also before a thread that uses its core fully. */
void cpu_prompt(void);
/* The calling thread: throughput work (SCHED_BATCH) in long time slices, behind waking
 * threads. */
void cpu_bulk(void);
/* That thread, between two pieces of its work: gives its core away for a moment, now and
 * then, and rarely where it is not returned soon. Costs one clock read. */
void cpu_breathe(void);
/* How long the core is kept after it was away for this long. */
uint64_t cpu_keep_ns(uint64_t away_ns);

#endif
