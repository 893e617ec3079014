/* SPDX-License-Identifier: Apache-2.0 */
/* Look-ups in the tables of rooms, which rooms.c fills. */
#include "daemon/room/rooms_set.h"

#include "daemon/session/session.h"

struct room *rooms_find(struct rooms *rooms, const struct session *session,
			enum room_role role, uint64_t number)
{
	struct number_key key = {session->id, role, number};

	return strmap_get_bytes(&rooms->by_key, &key, sizeof(key));
}

bool rooms_has_slot(struct rooms *rooms, const struct session *session, uint32_t slot)
{
	struct slot_key key = {session->id, slot};

	return strmap_get_bytes(&rooms->by_slot, &key, sizeof(key)) != NULL;
}

struct room *rooms_by_slot(struct rooms *rooms, const struct session *session,
			   uint32_t slot, uint32_t gen)
{
	struct slot_key key = {session->id, slot};
	struct room *room = strmap_get_bytes(&rooms->by_slot, &key, sizeof(key));

	return room && room->slot_gen == gen ? room : NULL;
}

struct room *rooms_by_gen(struct rooms *rooms, uint64_t gen)
{
	return idmap_get(&rooms->by_gen, gen);
}

struct room *rooms_by_pool(struct rooms *rooms, uint64_t pool, enum room_role role,
			   uint64_t number)
{
	struct number_key key = {pool, role, number};

	return strmap_get_bytes(&rooms->by_pool, &key, sizeof(key));
}

unsigned int rooms_count(const struct rooms *rooms)
{
	return (unsigned int)idmap_count(&rooms->by_gen);
}

unsigned int rooms_live(const struct rooms *rooms)
{
	return rooms->live;
}

struct waits *rooms_waits(const struct rooms *rooms)
{
	return rooms->waits;
}
