/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace: a room's events from all daemons that reported theirs, on one clock: that of the
 * daemon that was queried first.
 */
#ifndef KVD_CTL_TRACE_H
#define KVD_CTL_TRACE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

#define FILE_MAX_BYTES (256u << 20) /* of --join, --views */

struct ctl;
struct kvd_client;

/* One daemon's reply. */
struct trace_side {
	const cJSON *reply;
	char name[64];
	/* added to its clock to get the first side's, and the error bound */
	int64_t shift_ns, error_ns;
	int64_t ahead_ns; /* wall clock minus its clock */
	char clock[96];	  /* how the shift was determined */
};

struct trace_step {
	int64_t at_ns; /* by the first side's clock, since the first opening */
	size_t order;  /* among steps with equal at_ns */
	unsigned int lane;
	const char *what;
	int party;     /* -1: none */
	bool is_chunk; /* then seq and bytes are set */
	uint64_t seq, bytes;
	uint64_t generation; /* of the party; 0: not known */
};

/* One room of one daemon; its steps are in trace.steps. */
struct trace_lane {
	const cJSON *room;
	struct trace_side *side;
	uint64_t generation;
	int64_t opened_ns, now_ns; /* as trace_step.at_ns; now 0: it has ended */
	bool shown;		   /* part of the requested room */
};

struct trace {
	const char *number;
	struct trace_side *sides;
	struct trace_lane *lanes;
	struct trace_step *steps; /* in order of time */
	unsigned int side_count, lane_count;
	size_t step_count;
	char bad[160]; /* the first invalid number; "" */
};

/* Replies about the rooms of a number, from all accessible daemons and --join:
 * {"sides": […]}, owned by the caller in any case. `more` (may be NULL) sends further
 * queries to each daemon and adds their results to its reply. */
typedef void trace_more(const struct ctl *ctl, struct kvd_client *client, cJSON *reply);
int trace_gather(struct ctl *ctl, trace_more *more, cJSON **result_p);

/* For ui.perfetto.dev and chrome://tracing. NULL: no memory. */
cJSON *trace_perfetto(const struct trace *trace);

#endif
