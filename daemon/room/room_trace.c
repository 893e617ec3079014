/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One ring for all rooms, instead of a list in each: open rooms cost nothing extra, ended
 * rooms need no rule for forgetting, and the limit is one number. The price is that busy
 * rooms displace the events of quiet ones; a room's share is bounded, so that neither a
 * room of many chunks nor a peer that repeats messages can fill the ring alone.
 *
 * Names are given by engines and peers, and are written to log lines, records and files
 * of other tools. So a name must be unambiguous there; an invalid name of a peer is
 * ignored, because its request is valid without.
 */
#include "daemon/room/room_trace.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/room/room.h"
#include "daemon/session/session.h"

const char *const trace_names[TRACE_WHAT_END] = {
#define TRACE_NAME(name, record, words) record,
	TRACE_WHATS(TRACE_NAME)
#undef TRACE_NAME
};
static const char *const words_of[TRACE_WHAT_END] = {
#define TRACE_WORDS(name, record, words) words,
	TRACE_WHATS(TRACE_WORDS)
#undef TRACE_WORDS
};
_Static_assert(sizeof(struct trace_event) == 32, "TRACE_EVENTS does not match the size "
						 "of a record");

/* ---- the ring ---- */

int trace_ring_init(struct trace_ring *ring)
{
	*ring = (struct trace_ring){
		.events = mem_calloc(TRACE_EVENTS, sizeof(*ring->events))};
	return ring->events ? 0 : err_pass(-ENOMEM);
}

void trace_ring_fini(struct trace_ring *ring)
{
	mem_free(ring->events);
	*ring = (struct trace_ring){0};
}

const struct trace_event *trace_at(const struct trace_ring *ring, uint64_t place)
{
	if (place >= ring->count || ring->count - place > TRACE_EVENTS)
		return NULL;
	return &ring->events[place % TRACE_EVENTS];
}

bool trace_is_chunk(enum trace_what what)
{
	return what >= TRACE_GIVEN;
}

static void put_event(struct room *room, const struct trace_event *event)
{
	struct trace_ring *ring = room->trace.ring;
	uint64_t back = room->trace.last ? ring->count - (room->trace.last - 1) : 0;
	struct trace_event *at = &ring->events[ring->count % TRACE_EVENTS];

	*at = *event;
	at->back = back < TRACE_EVENTS ? (uint32_t)back : TRACE_EVENTS;
	room->trace.last = ++ring->count;
}

static struct trace_event event_of(const struct room *room, enum trace_what what,
				   const struct party *party)
{
	return (struct trace_event){.at_ns = loop_clock_ns(room->session->kvd->loop),
				    .what = (uint8_t)what,
				    .has_party = party,
				    .party = party ? party->index : 0};
}

void room_trace(struct room *room, enum trace_what what, const struct party *party,
		uint64_t value)
{
	struct trace_event event = event_of(room, what, party);
	char object[24];

	assert(what < TRACE_GIVEN);
	event.value = value;
	if (what == TRACE_STATE || room->trace.events++ < TRACE_ROOM_EVENTS)
		put_event(room, &event);
	if (log_threshold < LOG_LEVEL_TRACE)
		return;
	snprintf(object, sizeof(object), "%ju", (uintmax_t)room->number);
	log_trace("room", object, words_of[what], "role=%s state=%s peer=%s",
		  room_role_names[room->role], room_state_names[sm_state(&room->sm)],
		  party ? party->remote->label : "none");
}

void room_trace_chunk(struct room *room, enum trace_what what, const struct party *party,
		      const struct trace_chunk *chunk)
{
	struct trace_event event;
	char object[24];

	assert(what >= TRACE_GIVEN && what < TRACE_WHAT_END);
	if (room->trace.events++ < TRACE_ROOM_EVENTS) {
		event = event_of(room, what, party);
		event.value = chunk->bytes;
		event.at_ns = chunk->at_ns ? chunk->at_ns : event.at_ns;
		event.seq = chunk->seq < UINT32_MAX ? (uint32_t)chunk->seq : UINT32_MAX;
		put_event(room, &event);
	}
	if (log_threshold < LOG_LEVEL_TRACE)
		return;
	snprintf(object, sizeof(object), "%ju", (uintmax_t)room->number);
	log_trace("room", object, words_of[what],
		  "role=%s seq=%ju bytes=%ju rows=%ju peer=%s",
		  room_role_names[room->role], (uintmax_t)chunk->seq,
		  (uintmax_t)chunk->bytes, (uintmax_t)chunk->rows,
		  party ? party->remote->label : "none");
}

/* ---- names ---- */

/* They are quoted in log lines. */
static int check_request_id(const char *id)
{
	size_t len = strlen(id);

	if (len == 0 || len > REQUEST_ID_MAX)
		return err_raise(ERR_RANGE,
				 "request_id: %zu bytes (allowed: 1 to %u); omit it, or "
				 "pass its hash",
				 len, REQUEST_ID_MAX);
	for (size_t i = 0; i < len; i++) {
		unsigned char c = (unsigned char)id[i];

		if (c <= 0x20 || c >= 0x7f || c == '"' || c == '\\')
			return err_raise(ERR_INVAL,
					 "request_id: byte %zu is 0x%02x (allowed: "
					 "visible ASCII without \" and \\); omit it, or "
					 "pass its hash",
					 i, c);
	}
	return 0;
}

static bool all_zero(const char *text, size_t len)
{
	return strspn(text, "0") >= len;
}

/* W3C Trace Context: version, trace, parent, flags. */
static int check_traceparent(const char *text)
{
	static const char form[] =
		"00-00000000000000000000000000000000-0000000000000000-00";
	size_t len = strlen(text);

	_Static_assert(sizeof(form) == TRACEPARENT_CHARS + 1,
		       "a form has a fixed length");
	if (len != TRACEPARENT_CHARS)
		return err_raise(ERR_RANGE,
				 "traceparent: %zu characters instead of %u; pass "
				 "00-TRACE-PARENT-FLAGS of W3C Trace Context",
				 len, TRACEPARENT_CHARS);
	for (size_t i = 0; i < len; i++) {
		bool ok = form[i] == '-' ? text[i] == '-'
					 : text[i] && strchr("0123456789abcdef", text[i]);

		if (!ok)
			return err_raise(ERR_INVAL,
					 "traceparent: character %zu is 0x%02x: %s", i,
					 (unsigned char)text[i],
					 form[i] == '-' ? "expected a hyphen"
							: "expected lower-case hex");
	}
	if (strncmp(text, "ff", 2) == 0)
		return err_raise(ERR_INVAL, "traceparent: version ff is not allowed: 00");
	if (all_zero(text + 3, 32) || all_zero(text + 36, 16))
		return err_raise(ERR_INVAL,
				 "traceparent: its %s is all zeroes; omit it when there "
				 "is no trace",
				 all_zero(text + 3, 32) ? "trace" : "parent");
	return 0;
}

static struct room_names *names_new(const char *request_id, const char *traceparent)
{
	struct room_names *names = mem_zalloc(sizeof(*names));

	if (!names)
		return NULL;
	if (request_id)
		snprintf(names->request_id, sizeof(names->request_id), "%s", request_id);
	if (traceparent)
		snprintf(names->traceparent, sizeof(names->traceparent), "%s",
			 traceparent);
	return names;
}

int room_names_make(const char *request_id, const char *traceparent,
		    struct room_names **names_p)
{
	int r = request_id ? check_request_id(request_id) : 0;

	*names_p = NULL;
	if (r >= 0 && traceparent)
		r = check_traceparent(traceparent);
	if (r < 0)
		return err_pass(r);
	if (!request_id && !traceparent)
		return 0;
	*names_p = names_new(request_id, traceparent);
	return *names_p ? 0 : err_pass(-ENOMEM);
}

void room_names_tell(const struct room_names *names, char request_id[WIRE_STR_MAX],
		     char traceparent[WIRE_STR_MAX])
{
	snprintf(request_id, WIRE_STR_MAX, "%s", names ? names->request_id : "");
	snprintf(traceparent, WIRE_STR_MAX, "%s", names ? names->traceparent : "");
}

void room_names_hear(struct room *room, const char *request_id, const char *traceparent)
{
	if (room->names)
		return;
	if (*request_id && check_request_id(request_id) < 0) {
		err_clear();
		request_id = "";
	}
	if (*traceparent && check_traceparent(traceparent) < 0) {
		err_clear();
		traceparent = "";
	}
	if (!*request_id && !*traceparent)
		return;
	room->names = names_new(request_id, traceparent);
	if (room->names)
		room->names->from_peer = true;
	else
		err_clear(); /* continues without */
}
