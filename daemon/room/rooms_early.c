/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Receivers that end before their TRANSFER_INFO.
 *
 * A sending room learns its receivers by their TRANSFER_INFOs. One that cannot start (no
 * source covers its pages, its engine has ended) sends an ABORT instead, by the room's
 * number and the source's pool, or by the number alone (pool 0) when it does not know the
 * pool yet. It counts as its TRANSFER_INFO and its ABORT would together: a room that
 * waits for receivers fails, one that has them all does not.
 *
 * It is kept as long as an orphan is, for a room that opens later, and because the same
 * one may come again. Rules that keep it from other rooms of the same number:
 *
 *   - the same generation and pool again changes nothing;
 *   - nothing is kept for a number whose room has failed here, which was its partner,
 *     unless that had another one (rooms_generation.c);
 *   - one that has contacted the number's last room does not affect the next;
 *   - a number that is opened again only gets those that arrived after the end of its
 *     room;
 *   - a receiver that opens the number again revokes its last ABORT (code 0);
 *   - one that names an engine does not affect another engine's room;
 *   - one that the room does not admit (room_admit.h) does not affect it.
 */
#include <assert.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/room/rooms_set.h"
#include "daemon/base/share.h"
#include "daemon/session/session.h"

struct early {
	struct list link;      /* in rooms->early, oldest first */
	struct list at_remote; /* in its remote\'s */
	struct list same;      /* a ring of those of one key */
	struct remote *remote;
	struct number_key key; /* owner: the source's pool, or 0 */
	uint64_t gen;
	uint64_t pool;	  /* pool of the receiver; 0: not given */
	uint64_t session; /* session of the engine whose rooms are meant; 0: any */
	uint8_t ticket[TICKET_BYTES];
	uint64_t since_ns;
	struct err why;
	struct charge charge;
};

static struct early *early_at(const struct rooms *rooms, uint64_t pool, uint64_t number)
{
	struct number_key key = {pool, ROOM_SEND, number};

	return strmap_get_bytes(&rooms->early_by_key, &key, sizeof(key));
}

/* The map has the latest of a key; `same` links to the earlier ones. */
static void early_free(struct rooms *rooms, struct early *early)
{
	struct early *before = list_entry(early->same.next, struct early, same);

	if (early_at(rooms, early->key.owner, early->key.number) == early) {
		strmap_remove_bytes(&rooms->early_by_key, &early->key,
				    sizeof(early->key));
		if (before != early && strmap_put_bytes(&rooms->early_by_key, &early->key,
							sizeof(early->key), before) < 0)
			err_clear(); /* a sender waits for its timeout instead */
	}
	list_remove(&early->same);
	list_remove(&early->link);
	list_remove(&early->at_remote);
	rooms->early_count--;
	charge_drop(&early->charge);
	mem_free(early);
}

static void early_expire(struct rooms *rooms)
{
	struct loop *loop = rooms->kvd->loop;
	uint64_t now = loop_now_ns(loop), ttl = rooms->kvd->config->early_request_ttl_ns;
	struct early *early;

	while ((early = list_first(&rooms->early, struct early, link)) &&
	       now - early->since_ns >= ttl) {
		early_free(rooms, early);
		if (loop_enough(loop))
			break;
	}
	early = list_first(&rooms->early, struct early, link);
	if (!early)
		loop_timer_stop(&rooms->early_timer);
	else
		loop_timer_start(&rooms->early_timer,
				 early->since_ns + ttl > now ? early->since_ns + ttl - now
							     : 0);
}

static void on_early_timer(struct loop_timer *timer)
{
	early_expire(container_of(timer, struct rooms, early_timer));
}

static bool early_known(const struct remote *remote, const struct wire_abort *m)
{
	const struct early *early;

	list_foreach(early, &room_remote(remote)->early, at_remote) {
		if (early->gen == m->from_gen && early->key.owner == m->pool)
			return true;
	}
	return false;
}

/* False: it is not kept, and does not affect rooms that open later. */
static bool early_keep(struct rooms *rooms, struct remote *remote,
		       const struct wire_abort *m, const struct err *why)
{
	struct number_key key = {m->pool, ROOM_SEND, m->room};
	struct early *early, *before;

	const uint64_t own =
		remote->account ? remote->account->objects[ACCOUNT_ORPHANS] : 0;

	early = share_allows(rooms->kvd->config->early_requests_max, rooms->early_count,
			     own)
			? mem_zalloc(sizeof(*early))
			: NULL;
	if (early && charge_take(&early->charge, remote->account, ACCOUNT_ORPHANS,
				 sizeof(*early)) < 0) {
		mem_free(early);
		early = NULL;
	}
	if (!early) {
		metrics_add(&rooms->kvd->metrics, METRIC_ORPHANS_REFUSED, 1);
		err_clear();
		return false;
	}
	early->remote = remote;
	early->key = key;
	early->gen = m->from_gen;
	early->pool = m->from_pool;
	early->session = m->session;
	memcpy(early->ticket, m->ticket, sizeof(early->ticket));
	early->since_ns = loop_now_ns(rooms->kvd->loop);
	early->why = *why;
	list_push_back(&rooms->early, &early->link);
	list_push_back(&room_remote(remote)->early, &early->at_remote);
	rooms->early_count++;
	list_init(&early->same);
	before = strmap_remove_bytes(&rooms->early_by_key, &key, sizeof(key));
	if (before)
		list_push_back(&before->same, &early->same);
	if (strmap_put_bytes(&rooms->early_by_key, &key, sizeof(key), early) < 0) {
		early_free(rooms, early);
		err_clear();
		return false;
	}
	if (!loop_timer_running(&rooms->early_timer))
		early_expire(rooms);
	return true;
}

/* Does it wait for receivers whose TRANSFER_INFO is missing? */
static bool early_concerns(const struct room *room)
{
	return room->role == ROOM_SEND && sm_state(&room->sm) == ROOM_BOOT &&
	       (room->receivers == 0 || room->party_count < room->receivers);
}

/* Does it belong to a receiver of this room, not of the one before or after? */
static bool early_is_of(const struct early *early, const struct room *room,
			const struct tombstone *before, uint64_t since_ns)
{
	const struct receiver_generation one =
		receiver_generation(early->remote, early->pool, early->gen);

	if (early->session && early->session != room->session->epoch)
		return false; /* it means another engine's room */
	if (room_is_before(room, one) ||
	    (before && room_generations_has(&before->known, one)))
		return false;
	return early->since_ns >= since_ns ||
	       (before && room_generations_before(&before->known, one));
}

static void early_fail(struct room *room, struct receiver_generation one,
		       const struct err *why)
{
	room_generations_add(&room->send.early, one);
	room_fail_remote(room, why, NULL);
}

/* Does any receiver that contacted us since then, this one or others of its key, take
 * part in the room? */
static void early_judge(struct room *room, const struct early *latest,
			const struct tombstone *before, uint64_t since_ns)
{
	const struct early *early = latest;

	if (!early || !early_concerns(room))
		return;
	do {
		if (early_is_of(early, room, before, since_ns) &&
		    room_admit_check(&room->admit, room->number, early->remote->peer,
				     early->ticket) >= 0) {
			early_fail(room,
				   receiver_generation(early->remote, early->pool,
						       early->gen),
				   &early->why);
			return;
		}
		err_clear();
		early = list_entry(early->same.next, struct early, same);
	} while (early != latest);
}

void early_take(struct rooms *rooms, struct room *room, const struct tombstone *before)
{
	const uint64_t pools[] = {room->pool->id, 0};
	const uint64_t since_ns = before ? before->ended_ns + 1 : 0;

	assert(room->role == ROOM_SEND);
	for (size_t i = 0; i < ARRAY_LEN(pools) && rooms->early_count > 0; i++)
		early_judge(room, early_at(rooms, pools[i], room->number), before,
			    since_ns);
}

/* Those of pool 0 may be for any room of their number. */
static void on_early_room(struct room_sweep *sweep, struct room *room)
{
	struct number_key key = {room->pool->id, ROOM_SEND, room->number};

	if (!early_concerns(room))
		return;
	rooms_catch_up(room);
	early_judge(room, early_at(sweep->rooms, 0, room->number),
		    tomb_find(sweep->rooms, &key), room->opened_ns);
}

/* The room of the number has ended here, too: a later one of that receiver is not its
 * partner. */
static void early_note(struct room *room, struct tombstone *tomb,
		       const struct remote *remote, const struct wire_abort *m)
{
	const struct receiver_generation one =
		receiver_generation(remote, m->from_pool, m->from_gen);

	if (room && !room_live(room) &&
	    room_admit_check(&room->admit, room->number, remote->peer, m->ticket) >= 0)
		room_generations_add(&room->send.early, one);
	if (!room && tomb && tomb_admits(tomb, remote->peer, m->ticket))
		room_generations_add(&tomb->known, one);
	err_clear();
}

bool early_abort(struct rooms *rooms, struct remote *remote, struct room *room,
		 const struct wire_abort *m, const struct err *why)
{
	struct number_key key = {m->pool, ROOM_SEND, m->room};
	struct tombstone *tomb = tomb_find(rooms, &key);
	const struct receiver_generation one =
		receiver_generation(remote, m->from_pool, m->from_gen);
	bool later = room ? room_is_before(room, one)
			  : tomb && room_generations_before(&tomb->known, one);
	bool concerns = room && !later && early_concerns(room);

	assert(m->from_role == ROOM_RECV && why->code != ERR_OK);
	if (early_known(remote, m))
		return false;
	if (concerns && tomb && room_generations_has(&tomb->known, one))
		return false; /* it was in transit when the number was opened again */
	if (concerns && answer_admit(room, remote, m->ticket) < 0) {
		err_clear();
		return false;
	}
	if (!concerns && !later && (room || tomb)) {
		early_note(room, tomb, remote, m);
		return false;
	}
	if (!concerns &&
	    (rooms->kvd->draining ||
	     (m->pool && !handshake_pool_is_ours(rooms->kvd->handshake, m->pool))))
		return false;
	if (early_keep(rooms, remote, m, why) && !m->pool) {
		rooms->early_sweep.visit = on_early_room;
		room_sweep_begin(rooms, &rooms->early_sweep);
	}
	if (concerns)
		early_fail(room, one, why);
	return true;
}

void early_drop(struct rooms *rooms, struct remote *remote, uint64_t gen)
{
	struct early *early;

	list_foreach_safe(early, &room_remote(remote)->early, at_remote) {
		if (!gen || early->gen == gen)
			early_free(rooms, early);
	}
}

void early_init(struct rooms *rooms)
{
	list_init(&rooms->early);
	strmap_init(&rooms->early_by_key);
	loop_timer_init(&rooms->early_timer, rooms->kvd->loop, on_early_timer);
}

void early_fini(struct rooms *rooms)
{
	struct early *early;

	room_sweep_stop(&rooms->early_sweep);
	list_foreach_safe(early, &rooms->early, link)
		early_free(rooms, early);
	loop_timer_stop(&rooms->early_timer);
	strmap_fini(&rooms->early_by_key);
}
