/* SPDX-License-Identifier: Apache-2.0 */
/*
 * trace: a room's events of all daemons that told theirs, on one clock: that of the
 * daemon that was asked first.
 */
#ifndef KVD_CTL_TRACE_H
#define KVD_CTL_TRACE_H

#include <cjson/cJSON.h>
#include <stdbool.h>
#include <stdint.h>

struct ctl;
struct kvd_client;

/* One daemon's answer. */
struct trace_side {
	const cJSON *reply;
	char name[64];
	/* its clock's figure plus this is the first side's; and how that is known */
	int64_t shift_ns, error_ns;
	int64_t ahead_ns; /* what the wall clock shows more than it */
	char clock[96];
};

struct trace_step {
	int64_t at_ns; /* by the first side's clock, since the first opening */
	size_t order;  /* of those of one moment */
	unsigned int lane;
	const char *what;
	int party;     /* -1: none */
	bool is_chunk; /* then these are of it: */
	uint64_t seq, bytes;
	uint64_t generation; /* of the party; 0: not told */
};

/* One room of one daemon; its steps lie in trace.steps. */
struct trace_lane {
	const cJSON *room;
	struct trace_side *side;
	uint64_t generation, bytes;
	int64_t opened_ns, now_ns; /* as trace_step.at_ns; now 0: it has ended */
	bool shown;		   /* it belongs to the room that was asked for */
};

struct trace {
	const char *number;
	struct trace_side *sides;
	struct trace_lane *lanes;
	struct trace_step *steps; /* in order of time */
	unsigned int side_count, lane_count;
	size_t step_count;
	int64_t unix_ns; /* of the time 0 */
	char bad[160];	 /* the first figure that is none; "" */
};

/* What all daemons that may be asked say of the rooms of a number, and what --join has:
 * {"sides": […]}, the caller's in any case. `more` (may be NULL) asks each for more and
 * adds it to its reply. */
typedef void trace_more(const struct ctl *ctl, struct kvd_client *client, cJSON *reply);
int trace_gather(struct ctl *ctl, trace_more *more, cJSON **result_p);
/* The whole of it, from malloc(); NULL: errno. */
char *trace_read_file(const char *path);

/* For ui.perfetto.dev and chrome://tracing. NULL: no memory. */
cJSON *trace_perfetto(const struct trace *trace);
/* An ExportTraceServiceRequest. NULL: no memory. */
cJSON *trace_otlp(const struct trace *trace);

#endif
