/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Assigns receivers to the rooms of a number.
 *
 * A number may be used again, and either side may be first: a receiver that requests a
 * number whose last room has ended here is a late partner of that room, which must be
 * notified of its end, or the partner of a room that opens soon. A pool has one receiver
 * of a number at a time, and its messages arrive in order. So a room that has been
 * contacted by one of a pool has none of its later ones, and one that succeeded had all
 * of its own. These contacts stay with the room's tombstone, which stays while the number
 * is open again: they distinguish an old message that names only the number from one to
 * the current room.
 *
 * A limit of numbers: a sender that opens one again before its receiver does, and before
 * the receiver's last ABORT is revoked, fails by it. Its receiver then waits for another
 * sender until its own timeout. With a ticket for each request the two are distinct.
 */
#include <string.h>

#include "daemon/room/rooms_set.h"

struct receiver_generation receiver_generation(const struct remote *remote, uint64_t pool,
					       uint64_t gen)
{
	struct receiver_generation one = {.gen = gen};

	if (!pool)
		return one;
	memcpy(&one.who, remote->peer->instance, sizeof(one.who));
	one.who ^= pool; /* instances are random */
	return one;
}

static uint64_t room_generations_find(const struct room_generations *known, uint64_t who)
{
	for (unsigned int i = 0; i < ROOM_GENERATIONS_MAX && i < known->count; i++) {
		if (known->by[i].who == who)
			return known->by[i].gen;
	}
	return 0;
}

void room_generations_add(struct room_generations *known, struct receiver_generation one)
{
	if (!one.who || room_generations_find(known, one.who) ||
	    known->count > ROOM_GENERATIONS_MAX)
		return;
	if (known->count < ROOM_GENERATIONS_MAX) {
		known->by[known->count].who = one.who;
		known->by[known->count].gen = one.gen;
	}
	known->count++;
}

static struct receiver_generation party_generation(const struct party *party)
{
	return receiver_generation(party->remote, party->pool_id, party->gen);
}

void room_generations_get(const struct room *room, struct room_generations *known_p)
{
	const struct party *party;

	*known_p = room->send.early;
	list_foreach(party, &room->parties, link)
		room_generations_add(known_p, party_generation(party));
}

bool room_generations_has(const struct room_generations *known,
			  struct receiver_generation one)
{
	return one.who && room_generations_find(known, one.who) == one.gen;
}

bool room_generations_before(const struct room_generations *known,
			     struct receiver_generation one)
{
	uint64_t gen = room_generations_find(known, one.who);

	if (!one.who)
		return false;
	if (!gen) /* beyond the remembered ones it may be any */
		return known->count > ROOM_GENERATIONS_MAX;
	return gen != one.gen;
}

bool room_is_before(const struct room *room, struct receiver_generation one)
{
	const struct party *party;

	if (room->role != ROOM_SEND || !one.who)
		return false;
	list_foreach(party, &room->parties, link) {
		if (party_generation(party).who == one.who)
			return party->gen != one.gen;
	}
	if (sm_state(&room->sm) == ROOM_SUCCESS)
		return true;
	return room_generations_before(&room->send.early, one);
}
