/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A trace for other tools. Both formats have the same spans: a room on each daemon,
 * within it its states, and each chunk from its first to its last event.
 */
#include "ctl/trace.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include <xxhash.h>

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

/* ---- Chrome's trace format ---- */

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

/* ---- OpenTelemetry ---- */

#define SPAN_CHARS 17
#define TRACE_CHARS 33

static void attribute(cJSON *attributes, const char *key, const char *text)
{
	cJSON *item;

	if (!*text)
		return;
	item = cJSON_CreateObject();
	cJSON_AddItemToArray(attributes, item);
	cJSON_AddStringToObject(item, "key", key);
	cJSON_AddStringToObject(cJSON_AddObjectToObject(item, "value"), "stringValue",
				text);
}

static void attribute_int(cJSON *attributes, const char *key, uint64_t value)
{
	cJSON *item = cJSON_CreateObject();
	char text[24];

	snprintf(text, sizeof(text), "%" PRIu64, value);
	cJSON_AddItemToArray(attributes, item);
	cJSON_AddStringToObject(item, "key", key);
	cJSON_AddStringToObject(cJSON_AddObjectToObject(item, "value"), "intValue", text);
}

static void unix_time(cJSON *obj, const char *name, const struct trace *t, int64_t at_ns)
{
	char text[24];

	snprintf(text, sizeof(text), "%" PRId64, t->unix_ns + at_ns);
	cJSON_AddStringToObject(obj, name, text);
}

/* W3C Trace Context: version (not ff), trace and parent (not zero), flags. */
static bool is_traceparent(const char *text)
{
	static const char form[] =
		"00-00000000000000000000000000000000-0000000000000000-00";

	if (strlen(text) != sizeof(form) - 1 || strncmp(text, "ff", 2) == 0 ||
	    strspn(text + 3, "0") >= 32 || strspn(text + 36, "0") >= 16)
		return false;
	for (size_t i = 0; form[i]; i++) {
		if (form[i] == '-' ? text[i] != '-'
				   : !strchr("0123456789abcdef", text[i]))
			return false;
	}
	return true;
}

/* The traceparent of the engine, from the daemon or from a file; "" = none. */
static const char *traceparent(const struct trace *t, unsigned int lane)
{
	const char *text = lane_str(t, lane, "traceparent");

	return is_traceparent(text) ? text : "";
}

/* The engine's trace ID, or one derived from the rooms, the same on every host. */
static void trace_id(const struct trace *t, char id[TRACE_CHARS])
{
	uint64_t least = UINT64_MAX;
	XXH128_hash_t hash;

	for (unsigned int i = 0; i < t->lane_count; i++) {
		const char *given = traceparent(t, i);

		if (t->lanes[i].shown && *given) {
			snprintf(id, TRACE_CHARS, "%.32s", given + 3);
			return;
		}
		if (t->lanes[i].shown && t->lanes[i].generation < least)
			least = t->lanes[i].generation;
	}
	hash = XXH3_128bits(&least, sizeof(least));
	snprintf(id, TRACE_CHARS, "%016" PRIx64 "%016" PRIx64, (uint64_t)hash.high64,
		 (uint64_t)hash.low64);
}

static void span_id(const struct trace *t, unsigned int lane, const char *name,
		    char id[SPAN_CHARS])
{
	snprintf(id, SPAN_CHARS, "%016" PRIx64,
		 (uint64_t)XXH3_64bits_withSeed(name, strlen(name),
						t->lanes[lane].generation));
}

static cJSON *otlp_span(cJSON *spans, const struct trace *t, const struct span *span,
			const char *name)
{
	cJSON *obj = cJSON_CreateObject();
	char trace[TRACE_CHARS], id[SPAN_CHARS];

	trace_id(t, trace);
	span_id(t, span->lane, span->name, id);
	cJSON_AddItemToArray(spans, obj);
	cJSON_AddStringToObject(obj, "traceId", trace);
	cJSON_AddStringToObject(obj, "spanId", id);
	cJSON_AddStringToObject(obj, "name", name);
	cJSON_AddNumberToObject(obj, "kind", 1); /* internal */
	unix_time(obj, "startTimeUnixNano", t, span->begin_ns);
	unix_time(obj, "endTimeUnixNano", t, span->end_ns);
	return obj;
}

/* Of a room, or of one of its chunks. */
static void otlp_events(cJSON *obj, const struct trace *t, unsigned int lane,
			const struct trace_step *chunk)
{
	cJSON *events = cJSON_AddArrayToObject(obj, "events");

	for (size_t i = 0; i < t->step_count; i++) {
		const struct trace_step *step = &t->steps[i];
		cJSON *event;

		if (step->lane != lane || is_state(step->what) ||
		    !strcmp(step->what, "now") ||
		    (chunk ? !same_chunk(chunk, step) : step->is_chunk))
			continue;
		event = cJSON_CreateObject();
		cJSON_AddItemToArray(events, event);
		cJSON_AddStringToObject(event, "name", step->what);
		unix_time(event, "timeUnixNano", t, step->at_ns);
	}
}

static void otlp_status(cJSON *obj, const cJSON *room)
{
	const cJSON *error = ctl_list(room, "error");
	cJSON *status = cJSON_AddObjectToObject(obj, "status");
	const char *state = ctl_str(room, "state_name", "");

	if (error) {
		cJSON_AddNumberToObject(status, "code", 2);
		cJSON_AddStringToObject(status, "message", ctl_str(error, "message", ""));
	} else if (!strcmp(state, "success")) {
		cJSON_AddNumberToObject(status, "code", 1);
	}
}

/* The parent span of all others of this daemon. */
static void otlp_room(cJSON *spans, const struct trace *t, unsigned int lane)
{
	const cJSON *room = t->lanes[lane].room;
	struct span span = {.lane = lane,
			    .name = "room",
			    .begin_ns = t->lanes[lane].opened_ns,
			    .end_ns = lane_end(t, lane)};
	const char *parent = traceparent(t, lane);
	char name[32], id[SPAN_CHARS];
	cJSON *obj, *attributes;

	snprintf(name, sizeof(name), "kvd.room.%.16s", lane_str(t, lane, "role"));
	obj = otlp_span(spans, t, &span, name);
	if (*parent) {
		snprintf(id, sizeof(id), "%.16s", parent + 36);
		cJSON_AddStringToObject(obj, "parentSpanId", id);
	}
	attributes = cJSON_AddArrayToObject(obj, "attributes");
	attribute(attributes, "kvd.room", t->number);
	attribute(attributes, "kvd.role", lane_str(t, lane, "role"));
	attribute(attributes, "kvd.state", lane_str(t, lane, "state_name"));
	attribute(attributes, "kvd.engine", lane_str(t, lane, "engine"));
	attribute(attributes, "kvd.request_id", lane_str(t, lane, "request_id"));
	attribute(attributes, "kvd.layout", lane_str(t, lane, "layout"));
	attribute_int(attributes, "kvd.bytes", t->lanes[lane].bytes);
	otlp_events(obj, t, lane, NULL);
	otlp_status(obj, room);
}

static void otlp_parts(cJSON *spans, const struct trace *t, unsigned int lane)
{
	char parent[SPAN_CHARS];

	span_id(t, lane, "room", parent);
	for (size_t i = 0; i < t->step_count; i++) {
		struct span span;
		cJSON *obj, *attributes;

		if (t->steps[i].lane != lane || !span_at(t, i, &span))
			continue;
		obj = otlp_span(spans, t, &span, span.chunk ? "kvd.chunk" : span.name);
		cJSON_AddStringToObject(obj, "parentSpanId", parent);
		attributes = cJSON_AddArrayToObject(obj, "attributes");
		if (!span.chunk)
			continue;
		attribute_int(attributes, "kvd.chunk", span.chunk->seq);
		otlp_events(obj, t, lane, span.chunk);
	}
}

static void otlp_side(cJSON *resources, const struct trace *t, unsigned int side)
{
	cJSON *item = cJSON_CreateObject(), *attributes, *scope, *spans;

	cJSON_AddItemToArray(resources, item);
	attributes = cJSON_AddArrayToObject(cJSON_AddObjectToObject(item, "resource"),
					    "attributes");
	attribute(attributes, "service.name", "kvd");
	attribute(attributes, "service.instance.id", t->sides[side].name);
	scope = cJSON_CreateObject();
	cJSON_AddItemToArray(cJSON_AddArrayToObject(item, "scopeSpans"), scope);
	cJSON_AddStringToObject(cJSON_AddObjectToObject(scope, "scope"), "name", "kvd");
	spans = cJSON_AddArrayToObject(scope, "spans");
	for (unsigned int i = 0; i < t->lane_count; i++) {
		if (!t->lanes[i].shown || t->lanes[i].side != &t->sides[side])
			continue;
		otlp_room(spans, t, i);
		otlp_parts(spans, t, i);
	}
}

cJSON *trace_otlp(const struct trace *t)
{
	cJSON *root = cJSON_CreateObject();
	cJSON *resources = cJSON_AddArrayToObject(root, "resourceSpans");

	for (unsigned int i = 0; i < t->side_count; i++) {
		bool any = false;

		for (unsigned int j = 0; j < t->lane_count; j++)
			any = any ||
			      (t->lanes[j].shown && t->lanes[j].side == &t->sides[i]);
		if (any)
			otlp_side(resources, t, i);
	}
	return root;
}
