/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A subtransfer ("leg") is a transfer of this daemon with itself: an offer of each
 * source's pages and one pull of them all. One of the two is in the engine's session, so
 * that it ends with the engine and is charged to it; the other is in the store's own. No
 * other peer can take part: number and ticket are random and secret. If another daemon
 * holds the chunks, its store makes the offers (remote_hold.c), and both are sent to it.
 *
 * A subtransfer is small, because a failure repeats all of it, and progress is shown per
 * subtransfer.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/cost/live.h"
#include "daemon/handshake/handshake.h"
#include "daemon/link/link.h"
#include "daemon/peer/peer.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/store/far.h"
#include "daemon/store/store_impl.h"
#include "daemon/transport/transport.h"

/* A hedge that was refused may start later: there is space, or its holder is paused. */
#define LATE_AGAIN_NS (100 * LOOP_NS_PER_MS)

struct store_leg_room {
	struct room_leg base;
	struct store_leg *leg;
	struct store_reading reading; /* offers of an engine's pages */
	uint64_t number;
	uint64_t pool; /* offers */
};

static struct kvd *leg_kvd(const struct store_leg *leg)
{
	return leg->move->store->kvd;
}

/* ---- its end ---- */

static void store_leg_free(struct store_leg *leg)
{
	for (unsigned int i = 0; i < leg->room_count; i++) {
		store_reading_end(&leg->rooms[i].reading);
		if (leg->far)
			idmap_remove(&leg->move->store->far_rooms, leg->rooms[i].number);
	}
	loop_defer_cancel(&leg->step);
	loop_timer_stop(&leg->late);
	list_remove(&leg->link);
	mem_free(leg->rooms);
	mem_free(leg);
}

static void leg_stop_rooms(struct store_leg *leg)
{
	for (unsigned int i = 0; i < leg->room_count; i++) {
		struct room *room = leg->rooms[i].base.room;

		if (room)
			room_fail(room, &leg->error, NULL);
	}
}

/* The duration of a pull from another daemon. Subtransfers overlap: each one's time is
 * that since the previous one from there ended. */
static void leg_price(const struct store_leg *leg)
{
	const struct store *store = leg->move->store;
	uint64_t now_ns = loop_clock_ns(store->kvd->loop), begin_ns = leg->began_ns;
	struct remote *remote = leg->far ? far_hold_remote(leg->far) : NULL;
	struct store_remote *there;

	if (!remote)
		return;
	there = store_remote(remote);
	/* else it ended when we chose; short rows tell nothing about whole chunks */
	if (leg->pulled_ns && leg->error.code == ERR_OK && !leg->move->token_bytes)
		pace_add(&there->pace, leg->seen, now_ns - leg->pulled_ns);
	if (leg->pulled_ns)
		pace_end(&there->pace, leg->asked);
	if (there->pull_ended_ns > begin_ns)
		begin_ns = there->pull_ended_ns;
	there->pull_ended_ns = now_ns;
	if (leg->error.code == ERR_OK && leg->bytes && !leg->move->token_bytes &&
	    remote->ready && store->costs) {
		const struct live_way way = {.key = remote->peer->instance,
					     .transport = remote->transport->ops->name,
					     .now_s = (uint32_t)(now_ns / LOOP_NS_PER_S)};

		live_pull(store->costs, &way, (double)leg->bytes,
			  (double)(now_ns - begin_ns) / 1e3);
	}
}

static void on_leg_step(struct loop_defer *defer)
{
	struct store_leg *leg = container_of(defer, struct store_leg, step);

	if (leg->error.code != ERR_OK)
		leg_stop_rooms(leg); /* an offer would wait for another puller */
	if (leg->open)
		return;
	leg_price(leg);
	list_remove(&leg->link);
	store_move_leg_ended(leg->move, leg);
	store_leg_free(leg);
}

static void on_room_end(struct room_leg *base, const struct room *room)
{
	struct store_leg_room *own = container_of(base, struct store_leg_room, base);
	struct store_leg *leg = own->leg;

	assert(leg->open > 0);
	leg->open--;
	leg->left |= store_reading_left(&own->reading);
	store_reading_end(&own->reading);
	if (room->error->code != ERR_OK && leg->error.code == ERR_OK)
		leg->error = *room->error;
	if (room->role == ROOM_PULL)
		leg->bytes = room->bytes;
	loop_defer(leg_kvd(leg)->loop, &leg->step);
}

void store_leg_abort(struct store_leg *leg, const struct err *why)
{
	if (leg->error.code == ERR_OK)
		leg->error = *why;
	loop_defer(leg_kvd(leg)->loop, &leg->step);
}

/* ---- pages ---- */

int store_slots(const struct store_class *class, struct store_chunk *const *chunks,
		uint32_t count, uint64_t first_token, uint64_t begin, uint64_t end,
		struct room_maps *maps)
{
	const struct canon *canon = class->canon;
	int r = room_maps_begin(maps, canon->layout->view_count);

	for (uint32_t v = 0; v < canon->layout->view_count && r >= 0; v++) {
		struct room_map *map = &maps->maps[maps->count++];
		uint32_t pages = class->published ? store_pages_of_view(class, v)
						  : canon->views[v].pages;

		memcpy(map->view, canon->layout->views[v].name, sizeof(map->view));
		map->first_token = first_token;
		map->token_begin = begin;
		map->token_end = end;
		map->layers = (struct plan_layers){0, UINT32_MAX};
		map->page_count = (size_t)pages * count;
		map->pages = mem_calloc(map->page_count, sizeof(*map->pages));
		if (!map->pages)
			r = -ENOMEM;
		for (uint32_t i = 0; i < count && r >= 0; i++) {
			const struct store_part *part = store_part_find(chunks[i], class);
			uint32_t *at = map->pages + (size_t)i * pages;

			if (part->pages)
				store_pages_copy(part, v, at);
			else
				canon_pages(canon, v, arena_offset(&part->slot), at);
		}
	}
	if (r >= 0)
		return 0;
	room_maps_fini(maps);
	return err_pass(r);
}

/* One side of the subtransfer: its session, and its pages. */
struct leg_side {
	struct session *session;
	struct pool *pool;
	struct room_maps maps; /* taken */
};

/* The slots of a class's parts of the leg's chunks, as one side. `own`: that offers them;
 * or NULL. */
static int leg_slots(const struct store_leg *leg, struct store_leg_room *own,
		     struct store_class *class, uint64_t begin, uint64_t end,
		     struct leg_side *side)
{
	const struct store_move *move = leg->move;
	cleanup_free struct store_chunk **chunks =
		mem_calloc(leg->count, sizeof(*chunks));
	int r;

	if (!chunks)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < leg->count; i++)
		chunks[i] = move->entries[leg->first + i].chunk;
	side->session = class->pool->session;
	side->pool = class->pool;
	r = store_slots(class, chunks, leg->count,
			(move->first + leg->first) * class->space->tokens, begin, end,
			&side->maps);
	if (r >= 0 && own)
		r = store_reading_begin(&own->reading, class, chunks, leg->count,
					&own->base);
	if (r < 0)
		room_maps_fini(&side->maps);
	return err_pass(r);
}

/* ---- its rooms ---- */

static int leg_room(struct store_leg *leg, unsigned int index, enum room_role role,
		    struct leg_side *side, const uint8_t ticket[TICKET_BYTES],
		    struct room **room_p)
{
	struct store_leg_room *own = &leg->rooms[index];
	struct room_args args = {.session = side->session,
				 .role = role,
				 .number = loop_random_u64(leg_kvd(leg)->loop),
				 .pool = side->pool,
				 .receivers = 1,
				 .leg = &own->base};
	struct room *room;
	int r = rooms_open(rooms_of(leg_kvd(leg)), &args, &room);

	if (r < 0) {
		room_maps_fini(&side->maps);
		return err_pass(r);
	}
	room_bind_pages(room, &side->maps, &(struct wait_spec){0});
	memcpy(room->admit.ticket, ticket, TICKET_BYTES);
	own->base.on_end = on_room_end;
	own->leg = leg;
	own->number = args.number;
	own->pool = side->pool->id;
	*room_p = room;
	return 0;
}

static void leg_room_begin(struct store_leg *leg, unsigned int index, struct room *room)
{
	leg->rooms[index].base.room = room;
	leg->open++;
	rooms_begin(room);
}

static int leg_offer(struct store_leg *leg, unsigned int index, struct leg_side *side,
		     const uint8_t ticket[TICKET_BYTES])
{
	struct room *room;
	int r = leg_room(leg, index, ROOM_OFFER, side, ticket, &room);

	if (r < 0)
		return err_pass(r);
	leg_room_begin(leg, index, room);
	return 0;
}

static int add_source(struct room *room, struct remote *remote,
		      const struct store_leg_room *offer)
{
	struct party *party = room_party_add(room, remote);

	if (!party)
		return err_pass(-ENOMEM);
	party->pool_asked = offer->pool;
	party->named = POOL_BY_ID;
	party->room_there = offer->number;
	return 0;
}

/* The offering daemon: this one, or the holder of the chunks. *remote_p is connected
 * again. */
static int leg_source(struct store_leg *leg, const struct room *room,
		      struct remote **remote_p)
{
	struct kvd *kvd = leg_kvd(leg);
	const struct peer_client client = {.uid = room->session->uid,
					   .session = room->session->id};

	if (!leg->far)
		return err_pass(handshake_reach(kvd->handshake, kvd->link->endpoint,
						&client, remote_p));
	*remote_p = far_hold_remote(leg->far);
	(*remote_p)->reaches++;
	return 0;
}

/* Of all the leg's open offers. */
static int leg_pull(struct store_leg *leg, struct leg_side *side,
		    const uint8_t ticket[TICKET_BYTES])
{
	struct remote *remote;
	struct room *room;
	int r = leg_room(leg, 0, ROOM_PULL, side, ticket, &room);

	if (r < 0)
		return err_pass(r);
	r = leg_source(leg, room, &remote);
	for (unsigned int i = 1; i < leg->room_count && r >= 0; i++)
		r = add_source(room, remote, &leg->rooms[i]);
	if (r >= 0) /* the parties hold it */
		handshake_release(remote);
	if (r < 0) {
		rooms_discard(room);
		return err_pass(r);
	}
	leg->pulled_ns = loop_clock_ns(leg_kvd(leg)->loop);
	if (leg->far)
		leg->seen = pace_begin(&store_remote(remote)->pace, leg->asked);
	leg_room_begin(leg, 0, room);
	return 0;
}

/* ---- its beginning ---- */

static int leg_put(struct store_leg *leg, uint64_t begin, uint64_t end,
		   const uint8_t ticket[TICKET_BYTES])
{
	struct store_move *move = leg->move;
	struct leg_side engine = {.session = move->session, .pool = move->pool};
	struct leg_side store = {.session = NULL};
	int r = room_maps_cut(&move->maps, move->pool->layout, begin, end, &engine.maps);

	if (r >= 0)
		r = leg_offer(leg, 1, &engine, ticket);
	if (r >= 0)
		r = leg_slots(leg, NULL, move->class, begin, end, &store);
	return r < 0 ? err_pass(r) : err_pass(leg_pull(leg, &store, ticket));
}

static int leg_fetch(struct store_leg *leg, uint64_t begin, uint64_t end, uint64_t used,
		     const uint8_t ticket[TICKET_BYTES])
{
	struct store_move *move = leg->move;
	const struct store_space *space = move->handle->space;
	struct leg_side engine = {.session = move->session, .pool = move->pool};
	unsigned int index = 1;
	int r = 0;

	for (unsigned int i = 0; i < STORE_CLASSES_MAX && r >= 0; i++) {
		struct leg_side store = {.session = NULL};

		if (!(used >> i & 1))
			continue;
		r = leg_slots(leg, &leg->rooms[index], space->classes[i], begin, end,
			      &store);
		if (r >= 0)
			r = leg_offer(leg, index++, &store, ticket);
	}
	if (r >= 0)
		r = room_maps_cut(&move->maps, move->pool->layout, begin, end,
				  &engine.maps);
	return r < 0 ? err_pass(r) : err_pass(leg_pull(leg, &engine, ticket));
}

/* The holder opens the offers with our numbers. */
static int leg_ask(struct store_leg *leg, uint64_t begin, uint64_t end, uint64_t used,
		   const uint8_t ticket[TICKET_BYTES])
{
	const struct store_move *move = leg->move;
	struct remote *remote = far_hold_remote(leg->far);
	struct wire_chunk_offer msg = {.ask = far_hold_ask(leg->far),
				       .first = store_entry_place(move, leg->first) -
						far_hold_first(leg->far),
				       .count = leg->count,
				       .begin = begin,
				       .end = end};
	unsigned int index = 1;
	int r = 0;

	memcpy(msg.ticket, ticket, TICKET_BYTES);
	for (unsigned int i = 0; i < STORE_CLASSES_MAX && r >= 0; i++) {
		struct store_leg_room *own = &leg->rooms[index];

		if (!(used >> i & 1))
			continue;
		index++;
		own->number = msg.room = loop_random_u64(leg_kvd(leg)->loop);
		own->leg = leg;
		own->pool = msg.pool = far_hold_pool(leg->far, i);
		r = idmap_put(&move->store->far_rooms, own->number, own);
		if (r >= 0)
			r = handshake_send_chunk_offer(remote, &msg);
	}
	explicit_bzero(msg.ticket, TICKET_BYTES);
	return r < 0 ? err_pass(r) : 0;
}

/* The same into slots of the memory. */
static int leg_hedge(struct store_leg *leg, uint64_t begin, uint64_t end, uint64_t used,
		     const uint8_t ticket[TICKET_BYTES])
{
	const struct store_move *move = leg->move;
	struct leg_side store = {.session = NULL};
	int r = leg_ask(leg, begin, end, used, ticket);

	if (r >= 0)
		r = leg_slots(leg, NULL, move->class, begin, end, &store);
	return r < 0 ? err_pass(r) : err_pass(leg_pull(leg, &store, ticket));
}

/* It is late; subtransfers started since then postpone that. */
static void on_leg_late(struct loop_timer *timer)
{
	struct store_leg *leg = container_of(timer, struct store_leg, late);
	uint64_t now_ns = loop_clock_ns(leg_kvd(leg)->loop);
	uint64_t late_ns =
		leg->pulled_ns +
		pace_late_ns(&store_remote(far_hold_remote(leg->far))->pace, leg->seen);

	if (now_ns >= late_ns) {
		store_hedge(leg);
		late_ns = now_ns + LATE_AGAIN_NS;
	}
	if (!leg->hedged)
		loop_timer_start(timer, late_ns - now_ns);
}

static int leg_far(struct store_leg *leg, uint64_t begin, uint64_t end, uint64_t used,
		   const uint8_t ticket[TICKET_BYTES])
{
	struct store_move *move = leg->move;
	struct leg_side engine = {.session = move->session, .pool = move->pool};
	int r = leg_ask(leg, begin, end, used, ticket);

	if (r >= 0)
		r = room_maps_cut(&move->maps, move->pool->layout, begin, end,
				  &engine.maps);
	if (r >= 0)
		r = leg_pull(leg, &engine, ticket);
	if (r < 0)
		return err_pass(r);
	if (move->token_bytes) /* a hedge would load whole chunks */
		return 0;
	pace_budget_earn(&move->store->hedging);
	on_leg_late(&leg->late);
	return 0;
}

int store_leg_on_nak(struct store *store, struct remote *remote, struct cursor *body)
{
	const struct store_leg_room *own;
	struct wire_chunk_offer_nak msg;
	struct err why;
	int r = wire_chunk_offer_nak_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	own = idmap_get(&store->far_rooms, msg.room);
	peer_report(remote->peer, (enum err_code)msg.code, msg.text, &why);
	if (own && far_hold_remote(own->leg->far) == remote)
		store_leg_abort(own->leg, &why);
	return 0;
}

/* The tokens of the entries, of those that move. */
static void leg_range(const struct store_leg *leg, uint64_t *begin_p, uint64_t *end_p)
{
	const struct store_move *move = leg->move;
	uint64_t tokens = move->handle->space->tokens;

	*begin_p = (move->first + leg->first) * tokens;
	*end_p = *begin_p + leg->count * tokens;
	if (*begin_p < move->begin)
		*begin_p = move->begin;
	if (*end_p > move->end)
		*end_p = move->end;
}

static int store_leg_new(struct store_move *move, unsigned int sources,
			 struct store_leg **leg_p)
{
	struct store_leg *leg = mem_zalloc(sizeof(*leg));

	if (!leg)
		return err_pass(-ENOMEM);
	leg->room_count = 1 + sources;
	leg->rooms = mem_calloc(leg->room_count, sizeof(*leg->rooms));
	if (!leg->rooms) {
		mem_free(leg);
		return err_pass(-ENOMEM);
	}
	leg->move = move;
	leg->began_ns = loop_clock_ns(move->store->kvd->loop);
	loop_defer_init(&leg->step, on_leg_step);
	loop_timer_init(&leg->late, move->store->kvd->loop, on_leg_late);
	list_push_back(&move->legs, &leg->link);
	*leg_p = leg;
	return 0;
}

int store_leg_start(struct store_move *move, uint32_t first, uint32_t count,
		    const struct store_sources *sources)
{
	bool put = move->kind == STORE_PUT;
	uint8_t ticket[TICKET_BYTES];
	struct store_leg *leg = NULL;
	uint64_t begin, end;
	int r = move->store->session ? store_leg_new(move,
						     put ? 1u
							 : (unsigned)__builtin_popcountll(
								   sources->used),
						     &leg)
				     : err_raise(ERR_DRAIN, "the daemon is stopping");

	if (r < 0)
		return err_pass(r);
	leg->far = sources->far;
	leg->first = first;
	leg->count = count;
	for (uint32_t i = first; i < first + count; i++)
		leg->asked += store_entry_bytes(move, i);
	leg_range(leg, &begin, &end);
	loop_random(move->store->kvd->loop, ticket, sizeof(ticket));
	if (put)
		r = leg_put(leg, begin, end, ticket);
	else if (!leg->far)
		r = leg_fetch(leg, begin, end, sources->used, ticket);
	else if (move->kind == STORE_FETCH)
		r = leg_far(leg, begin, end, sources->used, ticket);
	else
		r = leg_hedge(leg, begin, end, sources->used, ticket);
	explicit_bzero(ticket, sizeof(ticket));
	if (r >= 0)
		return 0;
	if (!leg->open && !leg->far) {
		store_leg_free(leg);
		return err_pass(r);
	}
	err_take(&leg->error); /* open rooms end first; then others may serve */
	loop_defer(move->store->kvd->loop, &leg->step);
	return 0;
}
