/* SPDX-License-Identifier: Apache-2.0 */
/* room_record: rooms as JSON, for polls, lists and operators. */
#ifndef KVD_ROOM_RECORD_H
#define KVD_ROOM_RECORD_H

#include <cjson/cJSON.h>

#include "daemon/room.h"

/* Fill `obj`. ERR_NOMEM. */
int room_record_brief(const struct room *room, cJSON *obj);
int room_record_full(const struct room *room, cJSON *obj);
/* A polled room that is not there: {room, error}. */
int room_record_missing(const cJSON *asked, const struct err *why, cJSON *obj);

#endif
