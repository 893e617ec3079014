/* SPDX-License-Identifier: Apache-2.0 */
/* Finds the room that a command names. */
#include "daemon/base/context.h"
#include "daemon/request/commands.h"
#include "daemon/room/commands_room.h"
#include "daemon/room/rooms_set.h"
#include "daemon/session/session.h"

const struct field room_key_fields[] = {
	F_ROOM(room_key_args),
	F_ROLE(room_key_args),
	F_END,
};

struct room *room_asked(struct session *session, const struct room_key *key,
			struct rooms *rooms)
{
	uint64_t number = key->number;
	struct room *found = NULL;

	if (key->role >= 0)
		found = rooms_find(rooms, session, (enum room_role)key->role, number);
	for (unsigned int i = 0; i < ROOM_ROLES && key->role < 0; i++) {
		struct room *room = rooms_find(rooms, session, (enum room_role)i, number);

		if (room && found) {
			err_raise(ERR_INVAL,
				  "role: room %llu is open as both %s and %s; set role",
				  (unsigned long long)number,
				  room_role_names[found->role], room_role_names[i]);
			return NULL;
		}
		found = room ? room : found;
	}
	if (!found)
		err_raise(ERR_NOTFOUND, "room: no %s room %llu in this session",
			  key->role >= 0 ? room_role_names[key->role] : "open",
			  (unsigned long long)number);
	return found;
}

/* An administrator's tool has no rooms, and may name those of any engine. An engine
 * may name its own only, also when it is root's: another engine may have a room of
 * that number. */
struct room *room_asked_any(struct request *req, const struct room_key *key)
{
	struct room *room = room_asked(req->session, key, rooms_of(req->kvd)), *it;

	if (room || !req->session->admin || req->session->announced)
		return room;
	list_foreach(it, &rooms_of(req->kvd)->all, all_link) {
		if (it->number == key->number &&
		    (key->role < 0 || (enum room_role)key->role == it->role)) {
			err_clear();
			return it;
		}
	}
	err_raise(ERR_NOTFOUND, "room: no %s room %llu in any session",
		  key->role >= 0 ? room_role_names[key->role] : "open",
		  (unsigned long long)key->number);
	return NULL;
}
