/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Messages that arrive before their room, and after it.
 *
 * A TRANSFER_INFO or OFFER_QUERY may arrive before the engine here has opened the room:
 * it is kept, limited in number and time, and refused after its timeout, so the partner
 * never waits in vain. Any number of peers may request one room: when it opens, the
 * admitted ones are taken and the others refused. When all places are in use, the peer
 * that has most loses its oldest request, so that many requests of one peer do not
 * displace those of another. A closed room leaves a tombstone in a ring, so that a late
 * partner learns the reason at once; that of a receiver records the ABORTs to revoke when
 * its number is opened again (rooms_early.c). It stays while the number is open again,
 * and identifies messages of the earlier room. Tombstones only save waiting: correctness
 * is based on generations.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/room/room_mail.h"
#include "daemon/room/rooms_set.h"
#include "daemon/base/share.h"

/* orphans of one room */
struct group {
	struct number_key key;
	struct list orphans; /* struct orphan.in_group */
};

struct orphan {
	struct list link, in_group, at_remote;
	struct group *group; /* NULL: its room has opened, and is for others */
	struct number_key key;
	struct remote *remote;
	uint8_t ticket[TICKET_BYTES]; /* zeroes: none */
	enum wire_type type;
	uint64_t gen;
	uint64_t kept_ns; /* since then */
	struct charge charge;
	struct room_message msg; /* its body is `owned`, or follows */
	uint8_t body[];
};

static void group_leave(struct rooms *rooms, struct orphan *orphan)
{
	struct group *group = orphan->group;

	orphan->group = NULL;
	list_remove(&orphan->in_group);
	if (!group || !list_empty(&group->orphans))
		return;
	strmap_remove_bytes(&rooms->orphan_groups, &group->key, sizeof(group->key));
	mem_free(group);
}

static void orphan_free(struct rooms *rooms, struct orphan *orphan)
{
	room_cursors_pass(rooms, &orphan->link);
	list_remove(&orphan->link);
	list_remove(&orphan->at_remote);
	rooms->orphan_count--;
	room_remote(orphan->remote)->orphan_count--;
	charge_drop(&orphan->charge);
	group_leave(rooms, orphan);
	mem_free(orphan->msg.owned);
	explicit_bzero(orphan->ticket, sizeof(orphan->ticket));
	mem_free(orphan);
}

static uint64_t expires_ns(const struct rooms *rooms, const struct orphan *orphan)
{
	return orphan->group ? orphan->kept_ns + rooms->kvd->config->early_request_ttl_ns
			     : 0;
}

static void restart_timer(struct rooms *rooms)
{
	const struct orphan *oldest = list_first(&rooms->orphans, struct orphan, link);
	uint64_t now = loop_now_ns(rooms->kvd->loop);
	uint64_t then = oldest ? expires_ns(rooms, oldest) : 0;

	if (!oldest)
		loop_timer_stop(&rooms->orphan_timer);
	else
		loop_timer_start(&rooms->orphan_timer, then > now ? then - now : 0);
}

static void on_orphan_timer(struct loop_timer *timer)
{
	struct rooms *rooms = container_of(timer, struct rooms, orphan_timer);
	uint64_t now = loop_now_ns(timer->loop);
	struct orphan *orphan;
	struct err why;

	while ((orphan = list_first(&rooms->orphans, struct orphan, link)) &&
	       expires_ns(rooms, orphan) <= now) {
		unsigned long long number = orphan->key.number;

		if (orphan->group)
			err_set(&why, ERR_TIMEOUT,
				"no engine opened room %llu within %llu ms", number,
				(unsigned long long)(rooms->kvd->config
							     ->early_request_ttl_ns /
						     LOOP_NS_PER_MS));
		else
			err_set(&why, ERR_AUTH,
				"ticket: room %llu does not admit this daemon; pass the "
				"same ticket to room.open on both sides, and name this "
				"daemon in its peers if it has any",
				number);
		metrics_add(&rooms->kvd->metrics,
			    orphan->group ? METRIC_ORPHANS_EXPIRED : METRIC_ROOM_REFUSED,
			    1);
		answer_refuse(orphan->remote, orphan->type, &orphan->msg, &why);
		orphan_free(rooms, orphan);
		if (loop_enough(timer->loop))
			break;
	}
	restart_timer(rooms);
}

void orphans_refuse(struct rooms *rooms, const struct err *why)
{
	struct orphan *orphan;

	assert(why->code != ERR_OK);
	while ((orphan = list_first(&rooms->orphans, struct orphan, link))) {
		metrics_add(&rooms->kvd->metrics, METRIC_ORPHANS_REFUSED, 1);
		answer_refuse(orphan->remote, orphan->type, &orphan->msg, why);
		orphan_free(rooms, orphan);
	}
	restart_timer(rooms);
}

static struct group *rooms_late_group_get(struct rooms *rooms,
					  const struct number_key *key)
{
	struct group *group = strmap_get_bytes(&rooms->orphan_groups, key, sizeof(*key));

	if (group)
		return group;
	group = mem_zalloc(sizeof(*group));
	if (!group)
		return NULL;
	group->key = *key;
	list_init(&group->orphans);
	if (strmap_put_bytes(&rooms->orphan_groups, key, sizeof(*key), group) < 0) {
		mem_free(group);
		return NULL;
	}
	return group;
}

/* The peer that has most. */
static struct remote *heaviest(const struct rooms *rooms)
{
	struct remote *remote, *found = NULL;
	unsigned int most = 0;

	list_foreach(remote, handshake_remotes(rooms->kvd->handshake), link) {
		if (room_remote(remote)->orphan_count <= most)
			continue;
		most = room_remote(remote)->orphan_count;
		found = remote;
	}
	return found;
}

/* Drop the oldest request of a peer. */
static void give_way(struct rooms *rooms, struct remote *remote)
{
	struct orphan *oldest =
		list_first(&room_remote(remote)->orphans, struct orphan, at_remote);
	struct err why;

	err_set(&why, ERR_LIMIT,
		"too many early requests: %u, %u of them from this daemon (limits: "
		"early_requests %u, a share of memory_limit)",
		rooms->orphan_count, room_remote(remote)->orphan_count,
		rooms->kvd->config->early_requests_max);
	metrics_add(&rooms->kvd->metrics, METRIC_ORPHANS_REFUSED, 1);
	answer_refuse(remote, oldest->type, &oldest->msg, &why);
	orphan_free(rooms, oldest);
}

/* Requests of one principal do not displace those of others: daemon/base/share.h. */
static int late_make_room(struct rooms *rooms, struct remote *remote, size_t bytes,
			  struct charge *charge)
{
	const uint32_t cap = rooms->kvd->config->early_requests_max;
	int r;

	while (!share_allows(cap, rooms->orphan_count, room_remote(remote)->orphan_count))
		give_way(rooms, heaviest(rooms));
	for (;;) {
		r = charge_take(charge, remote->account, ACCOUNT_ORPHANS, bytes);
		if (r == 0 || !room_remote(remote)->orphan_count)
			return err_pass(r);
		err_clear();
		give_way(rooms, remote);
	}
}

int orphan_keep(struct rooms *rooms, struct remote *remote, enum wire_type type,
		const struct number_key *key, uint64_t gen,
		const uint8_t ticket[TICKET_BYTES], struct room_message *msg)
{
	struct orphan *orphan = NULL;
	struct group *group = NULL;
	struct charge charge = {0};
	int r;

	assert(type == WIRE_T_TRANSFER_INFO || type == WIRE_T_OFFER_QUERY);
	r = late_make_room(rooms, remote, sizeof(*orphan) + sizeof(*group) + msg->len,
			   &charge);
	if (r < 0) {
		metrics_add(&rooms->kvd->metrics, METRIC_ORPHANS_REFUSED, 1);
		return err_pass(r);
	}
	orphan = mem_zalloc(sizeof(*orphan) + (msg->owned ? 0 : msg->len));
	group = orphan ? rooms_late_group_get(rooms, key) : NULL;
	if (!group) {
		charge_drop(&charge);
		mem_free(orphan);
		return err_pass(-ENOMEM);
	}
	orphan->charge = charge_steal(&charge);
	orphan->group = group;
	orphan->key = *key;
	memcpy(orphan->ticket, ticket, TICKET_BYTES);
	orphan->remote = remote;
	orphan->type = type;
	orphan->gen = gen;
	orphan->kept_ns = loop_now_ns(rooms->kvd->loop);
	orphan->msg = *msg;
	msg->owned = NULL;
	if (!orphan->msg.owned) {
		memcpy(orphan->body, msg->body, msg->len);
		orphan->msg.body = orphan->body;
	}
	list_push_back(&group->orphans, &orphan->in_group);
	list_push_back(&rooms->orphans, &orphan->link);
	list_push_back(&room_remote(remote)->orphans, &orphan->at_remote);
	rooms->orphan_count++;
	room_remote(remote)->orphan_count++;
	metrics_add(&rooms->kvd->metrics, METRIC_ORPHANS_KEPT, 1);
	if (!loop_timer_running(&rooms->orphan_timer)) /* also when it found no memory */
		restart_timer(rooms);
	return 0;
}

/* Move unauthorized requests to the head of all, where they are refused in later
 * turns. False: none is left. */
static bool part_unauthorized(struct rooms *rooms, const struct room *room,
			      struct group *group)
{
	struct orphan *orphan, *first = NULL;
	unsigned int unauthorized = 0, authorized = 0;
	struct list *at = group->orphans.next, *next;
	char number[24];

	for (; at != &group->orphans; at = next) {
		next = at->next;
		orphan = list_entry(at, struct orphan, in_group);
		if (room_admit_check(&room->admit, room->number, orphan->remote->peer,
				     orphan->ticket) >= 0) {
			authorized++;
			continue;
		}
		err_clear();
		first = first ? first : orphan;
		unauthorized++;
		list_remove(&orphan->in_group);
		orphan->group = NULL;
		room_cursors_pass(rooms, &orphan->link);
		list_remove(&orphan->link);
		list_push_front(&rooms->orphans, &orphan->link);
	}
	if (unauthorized > 0) {
		room_count(room, METRIC_ROOM_UNAUTHORIZED, unauthorized);
		snprintf(number, sizeof(number), "%llu",
			 (unsigned long long)room->number);
		log_warn("room", number, "early requests of unauthorized peers refused",
			 "requests=%u peer='%s'", unauthorized, first->remote->label);
	}
	if (authorized > 0)
		return true;
	strmap_remove_bytes(&rooms->orphan_groups, &group->key, sizeof(group->key));
	mem_free(group);
	return false;
}

void orphans_take(struct rooms *rooms, struct room *room)
{
	struct number_key key = {room->pool->id, room->role, room->number};
	struct group *group = strmap_get_bytes(&rooms->orphan_groups, &key, sizeof(key));
	struct orphan *orphan;

	assert(sm_state(&room->sm) == ROOM_BOOT);
	if (!group)
		return;
	if (!part_unauthorized(rooms, room, group)) {
		restart_timer(rooms);
		return;
	}
	/* a delivery may fail the room, but never opens or closes one */
	while ((group = strmap_get_bytes(&rooms->orphan_groups, &key, sizeof(key)))) {
		orphan = list_entry(group->orphans.next, struct orphan, in_group);
		rooms->deliver(rooms, room, orphan->remote, orphan->type, &orphan->msg);
		orphan_free(rooms, orphan);
	}
	restart_timer(rooms);
}

void orphans_drop(struct rooms *rooms, const struct remote *remote, uint64_t gen)
{
	struct orphan *orphan;

	list_foreach_safe(orphan, &rooms->orphans, link) {
		if (orphan->remote == remote && (!gen || orphan->gen == gen))
			orphan_free(rooms, orphan);
	}
	restart_timer(rooms);
}

struct room_request rooms_request_at(const struct rooms *rooms, const struct list *at)
{
	const struct orphan *orphan = list_entry(at, struct orphan, link);

	assert(at != &rooms->orphans);
	return (struct room_request){.remote = orphan->remote,
				     .number = orphan->key.number,
				     .pool = orphan->key.owner,
				     .role = (enum room_role)orphan->key.role,
				     .since_ns = orphan->kept_ns,
				     .until_ns = expires_ns(rooms, orphan)};
}

/* ---- tombstones ---- */

void tomb_remove(struct rooms *rooms, const struct number_key *key)
{
	struct tombstone *tomb =
		strmap_remove_bytes(&rooms->tomb_by_pool, key, sizeof(*key));

	if (tomb)
		tomb->used = false;
}

void tomb_put(struct rooms *rooms, const struct room *room)
{
	struct number_key key = {room->pool->id, room->role, room->number};
	struct tombstone *tomb;

	assert(room_terminal(room) || room->hold == ROOM_DROPPED);
	if (rooms->tomb_cap == 0)
		return;
	tomb_remove(rooms, &key);
	tomb = &rooms->tombs[rooms->tomb_next];
	if (tomb->used)
		tomb_remove(rooms, &tomb->key);
	rooms->tomb_next = (rooms->tomb_next + 1) % rooms->tomb_cap;
	if (strmap_put_bytes(&rooms->tomb_by_pool, &key, sizeof(key), tomb) < 0) {
		err_clear(); /* a late partner will wait for its timeout instead */
		return;
	}
	tomb->used = true;
	tomb->key = key;
	tomb->ended_ns =
		room_terminal(room) ? room->ended_ns : loop_now_ns(rooms->kvd->loop);
	tomb->gen = room->gen;
	tomb->code = room->error->code;
	tomb->open = room_admit_is_open(&room->admit);
	memcpy(tomb->ticket, room->admit.ticket, sizeof(tomb->ticket));
	snprintf(tomb->text, sizeof(tomb->text), "%.110s", room->error->text);
	tomb->known = (struct room_generations){0};
	if (room->role == ROOM_SEND)
		room_generations_get(room, &tomb->known);
}

bool tomb_admits(const struct tombstone *tomb, const struct peer *peer,
		 const uint8_t ticket[TICKET_BYTES])
{
	if (tomb->open)
		return peer->same_user;
	return ticket_given(tomb->ticket) &&
	       mem_equal(tomb->ticket, ticket, TICKET_BYTES);
}

struct tombstone *tomb_find(const struct rooms *rooms, const struct number_key *key)
{
	return strmap_get_bytes(&rooms->tomb_by_pool, key, sizeof(*key));
}

int late_init(struct rooms *rooms)
{
	list_init(&rooms->orphans);
	strmap_init(&rooms->orphan_groups);
	strmap_init(&rooms->tomb_by_pool);
	loop_timer_init(&rooms->orphan_timer, rooms->kvd->loop, on_orphan_timer);
	rooms->tomb_cap = rooms->kvd->config->tombstones_max;
	rooms->tombs = mem_calloc(rooms->tomb_cap, sizeof(*rooms->tombs));
	return rooms->tombs ? 0 : err_pass(-ENOMEM);
}

void late_fini(struct rooms *rooms)
{
	struct orphan *orphan;

	list_foreach_safe(orphan, &rooms->orphans, link)
		orphan_free(rooms, orphan);
	loop_timer_stop(&rooms->orphan_timer);
	strmap_fini(&rooms->orphan_groups);
	strmap_fini(&rooms->tomb_by_pool);
	mem_free(rooms->tombs);
}
