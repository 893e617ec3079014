/* SPDX-License-Identifier: Apache-2.0 */
/* room_record: rooms as JSON, for polls, lists and operators. */
#ifndef KVD_ROOM_RECORD_H
#define KVD_ROOM_RECORD_H

#include <cjson/cJSON.h>

#include "daemon/base/text.h"
#include "daemon/room/room.h"

struct room_request;

/* The complete record, into `obj`. ERR_NOMEM. */
int room_record_full(const struct room *room, cJSON *obj);
/* A peer's request for a room that is not open here. */
int room_record_request(const struct room_request *asked, uint64_t now_ns, cJSON *obj);
/* The record that a poll returns, as text, because a poll covers thousands of rooms.
 * ERR_NOMEM. */
int room_record_text(const struct room *room, struct text *out);
/* Add the names that an engine gave; NULL: nothing. False: no memory. */
bool room_record_names(cJSON *obj, const struct room_names *names);
/* Answer for a polled room that does not exist: {room, error}. */
int room_record_missing(const cJSON *asked, const struct err *why, struct text *out);

#endif
