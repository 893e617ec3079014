/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trace in Chrome's format. Its spans: a room's states on each daemon, and each chunk
 * from its first to its last event.
 */
#include "ctl/trace.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "daemon/base/mem.h"

struct span {
	unsigned int lane;
	char name[64];
	int64_t begin_ns, end_ns;
	const struct trace_step *chunk; /* its first step; NULL: a state */
};

static bool is_state(const char *what)
{
	static const char *const states[] = {"opened", "waiting_for_input", "aborting",
					     "transferring"};

	for (size_t i = 0; i < ARRAY_LEN(states); i++) {
		if (!strcmp(what, states[i]))
			return true;
	}
	return false;
}

static int64_t lane_end(const struct trace *t, unsigned int lane)
{
	int64_t end = t->lanes[lane].opened_ns;

	for (size_t i = 0; i < t->step_count; i++) {
		if (t->steps[i].lane == lane)
			end = t->steps[i].at_ns;
	}
	return end;
}

/* From this state's step to that of the next state. */
static struct span state_span(const struct trace *t, size_t at)
{
	const struct trace_step *step = &t->steps[at];
	struct span span = {.lane = step->lane,
			    .begin_ns = step->at_ns,
			    .end_ns = lane_end(t, step->lane)};

	snprintf(span.name, sizeof(span.name), "%s",
		 strcmp(step->what, "opened") ? step->what : "bootstrapping");
	for (size_t i = at + 1; i < t->step_count; i++) {
		const struct trace_step *next = &t->steps[i];

		if (next->lane == step->lane &&
		    (is_state(next->what) || !strcmp(next->what, "failed") ||
		     !strcmp(next->what, "success"))) {
			span.end_ns = next->at_ns;
			break;
		}
	}
	return span;
}

static bool same_chunk(const struct trace_step *a, const struct trace_step *b)
{
	return a->lane == b->lane && b->is_chunk && a->seq == b->seq;
}

/* False: an earlier step is the chunk's first. */
static bool chunk_span(const struct trace *t, size_t at, struct span *span)
{
	const struct trace_step *step = &t->steps[at];

	for (size_t i = 0; i < at; i++) {
		if (same_chunk(step, &t->steps[i]))
			return false;
	}
	*span = (struct span){.lane = step->lane,
			      .begin_ns = step->at_ns,
			      .end_ns = step->at_ns,
			      .chunk = step};
	snprintf(span->name, sizeof(span->name), "chunk %" PRIu64, step->seq);
	for (size_t i = at + 1; i < t->step_count; i++) {
		if (same_chunk(step, &t->steps[i]))
			span->end_ns = t->steps[i].at_ns;
	}
	return true;
}

/* The span that starts at step `at`; false: none. */
static bool span_at(const struct trace *t, size_t at, struct span *span)
{
	if (t->steps[at].is_chunk)
		return chunk_span(t, at, span);
	if (!is_state(t->steps[at].what))
		return false;
	*span = state_span(t, at);
	return true;
}

static const char *lane_str(const struct trace *t, unsigned int lane, const char *name)
{
	return ctl_str(t->lanes[lane].room, name, "");
}

static cJSON *chrome_event(cJSON *events, const struct trace *t, unsigned int lane,
			   const char *ph, const char *name, int64_t at_ns)
{
	cJSON *event = cJSON_CreateObject();

	cJSON_AddItemToArray(events, event);
	cJSON_AddStringToObject(event, "ph", ph);
	cJSON_AddStringToObject(event, "name", name);
	cJSON_AddStringToObject(event, "cat", "kvd");
	cJSON_AddNumberToObject(event, "pid",
				(double)(t->lanes[lane].side - t->sides) + 1);
	cJSON_AddNumberToObject(event, "tid", lane + 1);
	cJSON_AddNumberToObject(event, "ts", (double)at_ns / 1e3);
	return event;
}

static void chrome_name(cJSON *events, const struct trace *t, unsigned int lane,
			const char *what, const char *name)
{
	cJSON *event = chrome_event(events, t, lane, "M", what, 0);

	cJSON_AddStringToObject(cJSON_AddObjectToObject(event, "args"), "name", name);
}

static void chrome_lane(cJSON *events, const struct trace *t, unsigned int lane)
{
	char name[160];

	snprintf(name, sizeof(name), "kvd %s", t->lanes[lane].side->name);
	chrome_name(events, t, lane, "process_name", name);
	snprintf(name, sizeof(name), "room %.24s %.16s %.100s", t->number,
		 lane_str(t, lane, "role"), lane_str(t, lane, "request_id"));
	chrome_name(events, t, lane, "thread_name", name);
}

/* Chunks overlap, so their events are asynchronous. */
static void chrome_span(cJSON *events, const struct trace *t, const struct span *span)
{
	char id[48];
	cJSON *event;

	if (!span->chunk) {
		event = chrome_event(events, t, span->lane, "X", span->name,
				     span->begin_ns);
		cJSON_AddNumberToObject(event, "dur",
					(double)(span->end_ns - span->begin_ns) / 1e3);
		return;
	}
	snprintf(id, sizeof(id), "%u-%" PRIu64, span->lane, span->chunk->seq);
	event = chrome_event(events, t, span->lane, "b", span->name, span->begin_ns);
	cJSON_AddStringToObject(event, "id", id);
	event = chrome_event(events, t, span->lane, "e", span->name, span->end_ns);
	cJSON_AddStringToObject(event, "id", id);
}

static void chrome_step(cJSON *events, const struct trace *t,
			const struct trace_step *step)
{
	cJSON *event = chrome_event(events, t, step->lane, "i", step->what, step->at_ns),
	      *args = cJSON_AddObjectToObject(event, "args");

	cJSON_AddStringToObject(event, "s", "t");
	if (step->party >= 0)
		cJSON_AddNumberToObject(args, "party", step->party);
	if (step->is_chunk) {
		cJSON_AddNumberToObject(args, "chunk", (double)step->seq);
		cJSON_AddNumberToObject(args, "bytes", (double)step->bytes);
	}
}

cJSON *trace_perfetto(const struct trace *t)
{
	cJSON *root = cJSON_CreateObject(), *events;

	cJSON_AddStringToObject(root, "displayTimeUnit", "ms");
	events = cJSON_AddArrayToObject(root, "traceEvents");
	for (unsigned int i = 0; i < t->lane_count; i++) {
		if (t->lanes[i].shown)
			chrome_lane(events, t, i);
	}
	for (size_t i = 0; i < t->step_count; i++) {
		struct span span;

		if (span_at(t, i, &span))
			chrome_span(events, t, &span);
		chrome_step(events, t, &t->steps[i]);
	}
	return root;
}
