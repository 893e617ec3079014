/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench: timed and verified transfers between this session and another. The time is the
 * one that an engine observes: from posting until the polled state is success.
 */
#ifndef KVD_CTL_BENCH_H
#define KVD_CTL_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "lib/kvd.h"

#define BENCH_REPS_MAX 10000u

enum bench_op { BENCH_PUSH, BENCH_PULL, BENCH_OPS }; /* WRITE, READ */

/* Address of the other end's memory, and the key to access it. */
struct bench_ticket {
	char endpoint[128];
	struct kvd_session_key key;
	uint64_t address, bytes;
};

/* Registered memory of one end; bench_memory_free() unregisters and frees it. */
struct bench_memory {
	struct kvd_memory memory;
	struct kvd_region *region;
};

/* Prints the last error of the client; returns CTL_ERROR. */
int bench_report(struct kvd_client *client, const char *what);

/* CTL_OK, or CTL_ERROR after printing the error. */
int bench_memory_new(struct kvd_client *client, uint64_t bytes,
		     struct bench_memory *out_p);
void bench_memory_free(struct bench_memory *memory);

struct bench_case {
	uint64_t size, rows;
	bool flat;   /* contiguous rows instead of scattered ones */
	bool gather; /* ... at the serving end only: writes gather, reads scatter */
	bool ops[BENCH_OPS]; /* timed; the other one runs once, to verify */
	unsigned int reps;
	int timeout_ms; /* without progress */
};

struct bench_times {
	double first_s;
	double s[BENCH_REPS_MAX]; /* sorted, `reps` of them */
};

/*
 * One case against `attach`: push from the first half of `local`, pull into its
 * second half, compare, then repeat alternately. `local` has twice ticket->bytes.
 * CTL_OK, or CTL_ERROR after printing the error.
 */
int bench_run(struct kvd_client *client, uint64_t attach,
	      const struct bench_ticket *ticket, const struct bench_memory *local,
	      const struct bench_case *c, struct bench_times times[BENCH_OPS]);

#endif
