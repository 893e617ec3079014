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

struct heard_one heard_one(const struct remote *remote, uint64_t pool, uint64_t gen)
{
	struct heard_one one = {.gen = gen};

	if (!pool)
		return one;
	memcpy(&one.who, remote->peer->instance, sizeof(one.who));
	one.who ^= pool; /* instances are random */
	return one;
}

static uint64_t heard_gen(const struct room_heard *heard, uint64_t who)
{
	for (unsigned int i = 0; i < ROOM_HEARD_MAX && i < heard->count; i++) {
		if (heard->by[i].who == who)
			return heard->by[i].gen;
	}
	return 0;
}

void heard_add(struct room_heard *heard, struct heard_one one)
{
	if (!one.who || heard_gen(heard, one.who) || heard->count > ROOM_HEARD_MAX)
		return;
	if (heard->count < ROOM_HEARD_MAX) {
		heard->by[heard->count].who = one.who;
		heard->by[heard->count].gen = one.gen;
	}
	heard->count++;
}

static struct heard_one heard_party(const struct party *party)
{
	return heard_one(party->remote, party->pool_id, party->gen);
}

void heard_of_room(const struct room *room, struct room_heard *heard_p)
{
	const struct party *party;

	*heard_p = room->send.early;
	list_foreach(party, &room->parties, link)
		heard_add(heard_p, heard_party(party));
}

bool heard_has(const struct room_heard *heard, struct heard_one one)
{
	return one.who && heard_gen(heard, one.who) == one.gen;
}

bool heard_before(const struct room_heard *heard, struct heard_one one)
{
	uint64_t gen = heard_gen(heard, one.who);

	if (!one.who)
		return false;
	if (!gen) /* beyond the remembered ones it may be any */
		return heard->count > ROOM_HEARD_MAX;
	return gen != one.gen;
}

bool room_is_before(const struct room *room, struct heard_one one)
{
	const struct party *party;

	if (room->role != ROOM_SEND || !one.who)
		return false;
	list_foreach(party, &room->parties, link) {
		if (heard_party(party).who == one.who)
			return party->gen != one.gen;
	}
	if (sm_state(&room->sm) == ROOM_SUCCESS)
		return true;
	return heard_before(&room->send.early, one);
}
