/* SPDX-License-Identifier: Apache-2.0 */
/* pick_sim: workers that compute prompts in turn, in virtual time, and who hands requests
 * to them. */
#ifndef KVD_TESTS_PICK_SIM_H
#define KVD_TESTS_PICK_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/kvd_pick.h"

#define SIM_WORKERS_MAX 1024u
#define SIM_ROUTERS_MAX 32u

enum sim_policy { SIM_ORACLE, SIM_RANDOM, SIM_ROUND_ROBIN, SIM_PICK };

struct sim_case {
	const char *name;
	unsigned int workers, routers;
	double speed;  /* tokens a second of the slowest */
	bool unequal;  /* a half is as fast, a quarter twice, a quarter four times */
	double prompt; /* mean tokens */
	double spread; /* sigma of the logarithm of prompts; 0: all are the same */
	double doubt;  /* sigma of how long a prompt takes beside what is told */
	double use;    /* share of what the workers can do */
	bool bursty;   /* MMPP of two states */
	double period, delay; /* of loads: between samples, until they arrive */
	double seconds;
	/* trouble; negative: nobody */
	int liar, dies;
	double dies_at, gone_after; /* when; the directory tells so much later */
	bool answers_failures;	    /* one that is dead is told of at once */
	bool no_results;	    /* outcomes are not told to the picker */
	unsigned int sample;
	struct kvd_pick_load lie;
};

struct sim_result {
	double wait_mean, wait_p99, ttft_mean, ttft_p99; /* seconds */
	double share; /* of requests that the liar had */
	double wait_most;
	unsigned long requests;
	unsigned long lost;    /* to the one that died, after that */
	unsigned long to_gone; /* and of them after it was told gone */
};

void sim_play(const struct sim_case *c, enum sim_policy policy, uint64_t seed,
	      struct sim_result *result);

#endif
