/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench: transfers between this session and another, timed and verified. What is
 * measured is what an engine gets: from posting to the state that it polls.
 */
#ifndef KVD_CTL_BENCH_H
#define KVD_CTL_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/kvd.h"

#define BENCH_REPS_MAX 10000u

enum bench_op { BENCH_PUSH, BENCH_PULL, BENCH_OPS }; /* WRITE, READ */

/* Where the other end's memory is, and what opens it. */
struct bench_ticket {
	char endpoint[128];
	struct kvd_session_key key;
	uint64_t address, bytes;
};

/* Memory of one end, registered; both are undone by bench_memory_free(). */
struct bench_memory {
	struct kvd_memory memory;
	struct kvd_region *region;
};

/* 0, or -1 after telling why. */
int bench_memory_new(struct kvd_client *client, uint64_t bytes,
		     struct bench_memory *out_p);
void bench_memory_free(struct bench_memory *memory);

struct bench_case {
	uint64_t size, rows;
	bool flat;   /* rows one behind the other instead of anywhere */
	bool gather; /* ... at the serving end only: writes gather, reads scatter */
	bool ops[BENCH_OPS]; /* to be timed; the other runs once, to verify */
	unsigned int reps;
	int timeout_ms; /* without one more byte */
};

struct bench_times {
	double first_s;
	double s[BENCH_REPS_MAX]; /* sorted, `reps` of them */
};

/*
 * One case against `attach`: push from the first half of `local`, pull into its
 * second half, compare, then repeat in turn. `local` has twice ticket->bytes.
 * 0, or -1 after telling why.
 */
int bench_run(struct kvd_client *client, uint64_t attach,
	      const struct bench_ticket *ticket, const struct bench_memory *local,
	      const struct bench_case *c, struct bench_times times[BENCH_OPS]);

#endif
