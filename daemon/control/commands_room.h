/* SPDX-License-Identifier: Apache-2.0 */
/* commands_room: what the rooms' commands share. */
#ifndef KVD_COMMANDS_ROOM_H
#define KVD_COMMANDS_ROOM_H

#include <cjson/cJSON.h>

struct request;
struct room;
struct rooms;
struct session;

#define ROOM_LIST_MAX 65536 /* rooms of one command */

/* The session's room by "room" and "role"; without a role the only one. NULL: raised. */
struct room *room_asked(struct session *session, const cJSON *args, struct rooms *rooms);

int room_poll_run(struct request *req);
int room_list_run(struct request *req);

#endif
