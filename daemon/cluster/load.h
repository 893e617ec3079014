/* SPDX-License-Identifier: Apache-2.0 */
/*
 * load: the load that a member publishes, from its counters. Pure: the counts and the
 * time are arguments. A meter turns counts, taken each second, into rates; a gate passes
 * a load that differs by a step from the last published one, if the budget has time for
 * it: for any number of sessions that share one budget, and any changes of their loads,
 * loads are published once in five seconds, and LOAD_BURST times more.
 */
#ifndef KVD_CLUSTER_LOAD_H
#define KVD_CLUSTER_LOAD_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/text.h"
#include "daemon/cluster/engine_load.h"

#define LOAD_MINUTE 60u
#define LOAD_PEERS_MAX 4u /* named in a load: those with most recent bytes */

/* Of one pool or of the daemon, counted from its start, except waiting, running, queued,
 * moving. */
struct load_counts {
	uint32_t waiting, running; /* rooms before and in transfer */
	uint64_t queued, moving;   /* bytes not yet posted; posted and not yet done */
	uint64_t moved;		   /* bytes */
	uint64_t failed;	   /* rooms */
	uint64_t firsts, first_ns; /* rooms of which a byte has moved; the sum of their
				      times from the opening to it */
};

struct load_peer {
	char instance[17]; /* the first half of it, hex */
	double gbps;	   /* 10^9 bytes a second, both ways */
};

struct load {
	uint32_t waiting, running;
	uint64_t queued, moving;
	double gbps;
	uint64_t ttfb_us; /* 0: not known */
	uint64_t failed;  /* rooms, in the last minute */
	struct engine_load engine;
	struct load_peer peers[LOAD_PEERS_MAX];
	unsigned int peer_count;
};

struct load_meter {
	bool begun;
	uint64_t at_ns;
	struct load_counts last;
	double gbps, ttfb_us;
	uint32_t failed[LOAD_MINUTE]; /* by second */
	uint64_t second;	      /* the newest one of them */
};

/* The counted part of *load_p; engine and peers are unchanged. Counts from before the
 * first call of a zeroed meter do not count; counts that decrease start again. */
void load_meter_take(struct load_meter *meter, const struct load_counts *counts,
		     uint64_t now_ns, struct load *load_p);

/* The rate of published loads: once in five seconds, and some saved up. */
struct load_budget {
	bool begun;
	uint64_t tokens_ns; /* time saved up */
	uint64_t at_ns;
};
#define LOAD_EVERY_NS UINT64_C(5000000000)
#define LOAD_BURST 3u
void load_budget_fill(struct load_budget *budget, uint64_t now_ns);

struct load_gate {
	bool told;
	struct load last;
};
/* Is it to be published? Then it counts as published, and is taken from the budget. */
bool load_gate_pass(struct load_gate *gate, struct load_budget *budget,
		    const struct load *load);

/* One JSON object; under DIRECTORY_LOAD_MAX bytes. */
void load_text(const struct load *load, uint64_t seq, struct text *out);

#endif
