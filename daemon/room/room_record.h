/* SPDX-License-Identifier: Apache-2.0 */
/* room_record: rooms as JSON, for polls, lists and operators. */
#ifndef KVD_ROOM_RECORD_H
#define KVD_ROOM_RECORD_H

#include "daemon/base/text.h"
#include "daemon/room/room.h"

struct cJSON;
struct room_request;

/* The members of the complete record. */
void room_record_full(const struct room *room, struct text *out);
/* A peer's request for a room that is not open here, as an object. */
void room_record_request(const struct room_request *asked, uint64_t now_ns,
			 struct text *out);
/* The members of the record that a poll returns. */
void room_record_brief(const struct room *room, struct text *out);
/* "timings_ms": the length of each phase; 0: it had not begun. */
void room_record_timings(struct text *out, uint64_t opened_ns, uint64_t waiting_ns,
			 uint64_t moving_ns, uint64_t end_ns);
/* The names that an engine gave; NULL: nothing. */
void room_record_names(const struct room_names *names, struct text *out);
/* Answer for a polled room that does not exist: {room, error}. */
void room_record_missing(const struct cJSON *asked, const struct err *why,
			 struct text *out);

#endif
