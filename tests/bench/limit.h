/* SPDX-License-Identifier: Apache-2.0 */
/*
 * limit: the same rows, moved between two memories of one process with nothing
 * around it, by as many threads as kvd has; compiled with kvd's flags.
 */
#ifndef KVD_BENCH_LIMIT_H
#define KVD_BENCH_LIMIT_H

#include "tests/bench/rows.h"

#define LIMIT_THREADS_MAX 64u

struct limit_took {
	double s;     /* by the clock */
	double cpu_s; /* of all threads */
};

/* memcpy, row by row. */
struct limit_took limit_memcpy(const struct rows *rows, const uint8_t *src, uint8_t *dst,
			       unsigned int threads);
/* pread() and pwrite() of /proc/PID/mem by another process, a row at a time, through a
 * bounce buffer of a cache's size: so do the daemons with memory that they cannot map.
 * process_vm_readv() copies once less, but takes a pid, which may be reused. */
struct limit_took limit_vm(const struct rows *rows, const uint8_t *src, uint8_t *dst,
			   unsigned int threads);

#endif
