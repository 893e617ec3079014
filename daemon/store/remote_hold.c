/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer's query is checked like an engine's: the present chunks are pinned and reported,
 * within the half of a user's share that all holds together may pin. Thousands are looked
 * up some a turn; until the reply is sent, messages that name the hold only extend or end
 * it. A subtransfer is an offer of the store's session, with the requester's number and
 * ticket; so only the requester can pull it, and it can read only the chunks of its
 * request.
 *
 * A part that is only in a file is loaded when it is held; its subtransfer waits for it,
 * and for nothing else: it names a pool that was reported for each of its chunks, and
 * only parts in memory or being loaded are reported. So no subtransfer waits for a part
 * that an engine fills. Waiting ones are checked once in each turn in which parts were
 * loaded, from the first missing part on.
 */
#include "daemon/store/remote_hold.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/store/far.h"
#include "daemon/store/store_impl.h"

#define REMOTE_HOLDS_MAX 256u /* of a peer */
#define REMOTE_LEGS_MAX 1024u /* of a peer, at a time */
#define LOOKUPS_MAX 64u /* of a peer, in progress: as many as its queue has space for */
#define STEP 16u	/* chunks between checks of the time */
#define RUN_BYTES 12u	/* of a report */
#define LEASE_MS_MAX \
	(STORE_LEASE_MS_MAX + FAR_LEASE_MORE_MS) /* the requesters' maximum */

/* A CHUNK_LOOKUP, until its reply is sent. */
struct remote_lookup {
	struct loop_work work;
	struct remote_hold *hold;
	uint8_t *ids;
	uint32_t count, next;
	bool anywhere;
	/* the report: runs of chunks with the same pools */
	uint64_t pools[STORE_CLASSES_MAX];
	unsigned int pool_count;
	unsigned int bit_of[STORE_CLASSES_MAX]; /* of a class; 1 + the bit; 0: none yet */
	uint8_t *run_bytes;
	struct cursor runs;
	uint32_t in_run, run_count;
	uint64_t tokens, mask;
};

struct remote_hold {
	struct list link; /* in its remote's */
	struct store *store;
	struct remote *remote; /* held */
	uint64_t ask;
	struct remote_lookup *lookup; /* in progress; or NULL */
	struct store_space *space;
	uint64_t first; /* number of the first chunk in its prompt, or in the hold */
	struct store_chunk **chunks;
	uint64_t *reported; /* of each: classes, as bits of the space's */
	uint64_t reported_any;
	uint32_t count;
	struct list legs;
	unsigned int leg_count;
	bool closed;
	struct loop_timer lease;
	uint64_t until_ns; /* it ends */
};

struct remote_leg {
	struct room_leg base;
	struct store_reading reading; /* of an engine's pages */
	struct list link;	      /* in its remote hold's */
	struct store_waiter wait;     /* for a part */
	struct remote_hold *hold;
	struct wire_chunk_offer asked;
	uint32_t there; /* its first parts, that are in memory */
	bool checked;
	struct loop_defer gone;
};

static void leg_refuse(struct remote *remote, const struct wire_chunk_offer *asked,
		       const struct err *why)
{
	struct wire_chunk_offer_nak nak = {
		.ask = asked->ask, .room = asked->room, .code = why->code};

	snprintf(nak.text, sizeof(nak.text), "%.300s", why->text);
	if (handshake_send_chunk_offer_nak(remote, &nak) < 0)
		err_clear();
}

/* ---- life ---- */

static void remote_hold_step(struct remote_hold *hold)
{
	if (!hold->closed || hold->leg_count)
		return;
	store_pins_end(hold->store, hold->chunks, hold->count);
	list_remove(&hold->link);
	loop_timer_stop(&hold->lease);
	store_space_let_go(hold->space);
	hold->store->figures.remote.holds--;
	store_remote(hold->remote)->hold_count--;
	if (!store_remote(hold->remote)->hold_count) {
		idmap_fini(&store_remote(hold->remote)->asks);
		idmap_init(&store_remote(hold->remote)->asks);
	}
	handshake_release(hold->remote);
	mem_free(hold->reported);
	mem_free(hold);
}

static void remote_leg_free(struct remote_leg *leg)
{
	struct remote_hold *hold = leg->hold;

	store_reading_end(&leg->reading);
	loop_defer_cancel(&leg->gone);
	list_remove(&leg->link);
	list_remove(&leg->wait.link);
	hold->leg_count--;
	store_remote(hold->remote)->legs--;
	mem_free(leg);
	remote_hold_step(hold);
}

static void lookup_free(struct remote_lookup *lookup)
{
	if (!lookup)
		return;
	store_remote(lookup->hold->remote)->lookups--;
	loop_work_stop(&lookup->work);
	mem_free(lookup->ids);
	mem_free(lookup->run_bytes);
	mem_free(lookup);
}

static void lookup_refuse(struct remote *remote, uint64_t ask, const struct err *why)
{
	struct wire_chunk_lookup_ack no = {.ask = ask, .code = why->code};

	snprintf(no.text, sizeof(no.text), "%.300s", why->text);
	if (handshake_send_chunk_lookup_ack(remote, &no) < 0)
		err_clear(); /* it is going down */
}

/* Its lookup, and waiting subtransfers, are refused with `why`; open ones continue, or
 * (`all`) end. */
static void remote_hold_close(struct remote_hold *hold, const struct err *why, bool all)
{
	struct remote_leg *leg;

	if (hold->lookup)
		lookup_refuse(hold->remote, hold->ask, why);
	lookup_free(mem_steal(hold->lookup));
	hold->closed = true;
	idmap_remove(&store_remote(hold->remote)->asks, hold->ask);
	loop_timer_stop(&hold->lease);
	hold->leg_count++; /* it stays for the walk */
	list_foreach_safe(leg, &hold->legs, link) {
		if (!list_empty(&leg->wait.link)) {
			leg_refuse(hold->remote, &leg->asked, why);
			remote_leg_free(leg);
		} else if (all && leg->base.room) {
			room_fail(leg->base.room, why, NULL);
		}
	}
	hold->leg_count--;
	remote_hold_step(hold);
}

static void on_remote_hold_lease(struct loop_timer *timer)
{
	struct err why;

	store_lease_over();
	err_take(&why);
	remote_hold_close(container_of(timer, struct remote_hold, lease), &why, false);
}

static struct remote_hold *remote_hold_find(const struct remote *remote, uint64_t ask)
{
	return idmap_get(&store_remote(remote)->asks, ask);
}

/* One whose chunks were reported. */
static struct remote_hold *remote_hold_reported(const struct remote *remote, uint64_t ask)
{
	struct remote_hold *hold = remote_hold_find(remote, ask);

	return hold && !hold->lookup ? hold : NULL;
}

/* ---- CHUNK_LOOKUP ---- */

/* Has the class's pool a bit? In a later turn it may be another pool, or class. */
static bool lookup_names(const struct remote_lookup *lookup,
			 const struct store_class *class)
{
	unsigned int bit = lookup->bit_of[class->index];

	return bit && lookup->pools[bit - 1] == class->pool->id;
}

static unsigned int lookup_bit(struct remote_lookup *lookup,
			       const struct store_class *class)
{
	if (!lookup_names(lookup, class)) {
		assert(lookup->pool_count < STORE_CLASSES_MAX);
		handshake_announce(lookup->hold->remote, class->pool);
		lookup->pools[lookup->pool_count++] = class->pool->id;
		lookup->bit_of[class->index] = lookup->pool_count;
	}
	return lookup->bit_of[class->index] - 1;
}

/* A requester takes the first of several: not an engine's pages, which may be withdrawn,
 * if there are copies. */
static void lookup_order(struct remote_lookup *lookup, const struct store_space *space)
{
	for (unsigned int i = 0; i < STORE_CLASSES_MAX && space->published; i++) {
		const struct store_class *class = space->classes[i];

		if (class && class->parts && class->pool && !class->published)
			lookup_bit(lookup, class);
	}
}

/* These classes of the chunk's as bits of the reply; *there_p: without those that have no
 * pool. */
static uint64_t lookup_mask(struct remote_lookup *lookup, const struct store_chunk *chunk,
			    uint64_t *there_p)
{
	uint64_t mask = 0;

	for (uint64_t left = *there_p; left; left &= left - 1) {
		unsigned int i = (unsigned int)__builtin_ctzll(left);
		struct store_class *class = chunk->space->classes[i];

		if (!class->pool) { /* known from files alone: not reported yet */
			if (store_class_pool(class) < 0)
				err_clear();
			*there_p &= ~(UINT64_C(1) << i);
			continue;
		}
		if (lookup->pool_count < STORE_CLASSES_MAX || lookup_names(lookup, class))
			mask |= UINT64_C(1) << lookup_bit(lookup, class);
	}
	return mask;
}

static void lookup_run_end(struct remote_lookup *lookup)
{
	if (!lookup->in_run)
		return;
	cursor_put_u32(&lookup->runs, lookup->in_run);
	cursor_put_u64(&lookup->runs, lookup->mask);
	lookup->run_count++;
	lookup->in_run = 0;
}

/* Loads its parts in files. Returns those in memory, or being loaded. */
static uint64_t load_parts(struct store_chunk *chunk)
{
	struct store_part *part;
	uint64_t there = 0;

	list_foreach(part, &chunk->parts, link) {
		if (part->memory != PART_READY && part->file == PART_UNFILED)
			continue; /* an engine fills it */
		if (part->memory == PART_READY || store_part_load(part) >= 0)
			there |= UINT64_C(1) << part->class->index;
		else
			err_clear();
	}
	return there & ~chunk->space->leaving;
}

static bool half_is_pinned(const struct arena_owner *owner)
{
	return arena_owner_pinned(owner) > arena_owner_share(owner) / 2;
}

/* Pins the chunk: with these classes; 0: it cannot be, or exceeds the limit. */
static uint64_t remote_hold_pin(struct remote_hold *hold, struct store_chunk *chunk)
{
	const struct arena_owner *owner = hold->space->tenant->owner;
	uint64_t there;

	store_chunk_pin(chunk);
	there = half_is_pinned(owner) ? 0 : load_parts(chunk);
	if (there && !half_is_pinned(owner))
		return there;
	store_chunk_unpin(chunk);
	return 0;
}

/* The next chunk. False: it ends the report. */
static bool lookup_chunk(struct remote_lookup *lookup)
{
	struct remote_hold *hold = lookup->hold;
	uint32_t i = lookup->next++;
	struct store_chunk *chunk =
		store_chunk_find(hold->space, lookup->ids + (size_t)i * STORE_ID_BYTES,
				 lookup->anywhere ? STORE_ANYWHERE : hold->first + i);
	uint64_t there = chunk ? store_chunk_ready(chunk) | chunk->filed : 0;
	uint64_t mask;

	if (there)
		there = remote_hold_pin(hold, chunk);
	if (!there)
		return false;
	mask = lookup_mask(lookup, chunk, &there);
	if (!mask) {
		store_chunk_unpin(chunk);
		return false;
	}
	hold->reported[hold->count] = there;
	hold->reported_any |= there;
	hold->chunks[hold->count++] = chunk;
	store_chunk_touch(chunk);
	if (mask != lookup->mask)
		lookup_run_end(lookup);
	lookup->mask = mask;
	lookup->in_run++;
	lookup->tokens += chunk->tokens;
	return chunk->tokens == hold->space->tokens;
}

static bool lookup_step(struct loop_work *work)
{
	struct remote_lookup *lookup = container_of(work, struct remote_lookup, work);

	for (unsigned int n = 0; n < STEP; n++)
		if (lookup->next == lookup->count || !lookup_chunk(lookup))
			return false;
	return true;
}

static int lookup_answer(struct remote_lookup *lookup)
{
	uint8_t head[8 + 8 * STORE_CLASSES_MAX + 8];
	cleanup_free uint8_t *runs = NULL;
	struct wire_chunk_lookup_ack msg = {.ask = lookup->hold->ask,
					    .tokens = lookup->tokens};
	struct cursor out;

	lookup_run_end(lookup);
	cursor_write(&out, head, sizeof(head));
	cursor_put_u32(&out, lookup->pool_count);
	for (unsigned int i = 0; i < lookup->pool_count; i++)
		cursor_put_u64(&out, lookup->pools[i]);
	cursor_put_u32(&out, lookup->run_count);
	runs = mem_alloc(out.pos + lookup->runs.pos + 1);
	if (!runs)
		return err_pass(-ENOMEM);
	memcpy(runs, head, out.pos);
	memcpy(runs + out.pos, lookup->runs.base, lookup->runs.pos);
	msg.runs.data = runs;
	msg.runs.len = out.pos + lookup->runs.pos;
	return err_pass(handshake_send_chunk_lookup_ack(lookup->hold->remote, &msg));
}

static void lookup_done(struct loop_work *work)
{
	struct remote_lookup *lookup = container_of(work, struct remote_lookup, work);
	struct remote_hold *hold = lookup->hold;
	struct err why;

	if (lookup_answer(lookup) < 0) {
		err_take(&why);
		remote_hold_close(hold, &why, false);
		return;
	}
	lookup_free(mem_steal(hold->lookup));
	if (hold->count == 0)
		remote_hold_close(hold, NULL, false); /* it has no legs */
}

static int remote_hold_check(const struct store_remote *there,
			     const struct store_space *space, uint64_t ask)
{
	if (idmap_get(&there->asks, ask))
		return err_raise(ERR_EXIST, "duplicate hold number");
	if (there->hold_count >= REMOTE_HOLDS_MAX)
		return err_raise(ERR_LIMIT, "%u holds of one peer (limit)",
				 REMOTE_HOLDS_MAX);
	if (there->lookups >= LOOKUPS_MAX)
		return err_raise(ERR_BUSY, "%u queries of one peer in progress (limit)",
				 LOOKUPS_MAX);
	if (half_is_pinned(space->tenant->owner))
		return err_raise(ERR_LIMIT, "pinned bytes exceed half of this user's "
					    "quota");
	return 0;
}

/* It is never shorter than it was. */
static void lease_set(struct remote_hold *hold, uint64_t lease_ms)
{
	uint64_t ns =
		(lease_ms < LEASE_MS_MAX ? lease_ms : LEASE_MS_MAX) * LOOP_NS_PER_MS;
	uint64_t until_ns = loop_now_ns(hold->store->kvd->loop) + ns;

	if (until_ns <= hold->until_ns)
		return;
	hold->until_ns = until_ns;
	loop_timer_start(&hold->lease, ns);
}

static int lookup_new(struct remote_hold *hold, const struct wire_chunk_lookup *msg)
{
	struct remote_lookup *lookup = mem_zalloc(sizeof(*lookup));

	hold->lookup = lookup;
	if (!lookup)
		return err_pass(-ENOMEM);
	lookup->hold = hold;
	store_remote(hold->remote)->lookups++;
	lookup->count = (uint32_t)(msg->ids.len / STORE_ID_BYTES);
	lookup->anywhere = msg->first & CHUNK_LOOKUP_ANYWHERE;
	lookup->ids = mem_dup(msg->ids.data, msg->ids.len);
	lookup->run_bytes = mem_alloc(lookup->count * RUN_BYTES);
	cursor_write(&lookup->runs, lookup->run_bytes, lookup->count * RUN_BYTES);
	loop_work_init(&lookup->work, hold->store->kvd->loop, lookup_step, lookup_done);
	return lookup->ids && lookup->run_bytes ? 0 : err_pass(-ENOMEM);
}

static int remote_hold_alloc(struct store *store, struct remote *remote,
			     const struct wire_chunk_lookup *msg,
			     struct remote_hold **hold_p)
{
	struct remote_hold *hold = mem_zalloc(sizeof(*hold));
	uint32_t most = (uint32_t)(msg->ids.len / STORE_ID_BYTES);
	int r;

	if (!hold)
		return err_pass(-ENOMEM);
	hold->store = store;
	hold->remote = remote;
	hold->chunks = store_pins_new(most);
	hold->reported = mem_calloc((size_t)most + 1, sizeof(*hold->reported));
	r = hold->chunks && hold->reported ? lookup_new(hold, msg) : -ENOMEM;
	if (r >= 0)
		r = idmap_put(&store_remote(remote)->asks, msg->ask, hold);
	if (r < 0) {
		lookup_free(hold->lookup);
		store_pins_end(store, hold->chunks, 0);
		mem_free(hold->reported);
		mem_free(hold);
		return err_pass(r);
	}
	*hold_p = hold;
	return 0;
}

static int remote_hold_open(struct store *store, struct remote *remote,
			    struct store_space *space,
			    const struct wire_chunk_lookup *msg,
			    struct remote_hold **hold_p)
{
	struct store_remote *there = store_remote(remote);
	struct remote_hold *hold;
	int r = remote_hold_check(there, space, msg->ask);

	if (r >= 0)
		r = remote_hold_alloc(store, remote, msg, &hold);
	if (r < 0)
		return err_pass(r);
	remote->reaches++;
	hold->ask = msg->ask;
	hold->space = space;
	space->handles++; /* its classes stay */
	hold->first = msg->first & ~CHUNK_LOOKUP_ANYWHERE;
	list_init(&hold->legs);
	loop_timer_init(&hold->lease, store->kvd->loop, on_remote_hold_lease);
	lease_set(hold, msg->lease_ms);
	list_push_back(&there->holds, &hold->link);
	there->hold_count++;
	store->figures.remote.holds++;
	store->figures.remote.holds_total++;
	*hold_p = hold;
	return 0;
}

static int ask_do(struct store *store, struct remote *remote,
		  const struct wire_chunk_lookup *msg)
{
	static const uint8_t none[8]; /* pools, runs */
	const struct wire_chunk_lookup_ack nothing = {.ask = msg->ask,
						      .runs = {none, sizeof(none)}};
	size_t count = msg->ids.len / STORE_ID_BYTES;
	struct store_space *space;
	struct remote_hold *hold;
	int r = store_ready(store);

	if (r >= 0 && (msg->ids.len % STORE_ID_BYTES || count > STORE_IDS_MAX ||
		       (msg->first & ~CHUNK_LOOKUP_ANYWHERE) > UINT32_MAX))
		r = err_raise(ERR_PROTO, "CHUNK_LOOKUP: %zu bytes of ids", msg->ids.len);
	if (r < 0)
		return err_pass(r);
	space = store_space_by_digest(store, msg->space);
	if (!space)
		return err_pass(handshake_send_chunk_lookup_ack(remote, &nothing));
	r = remote_hold_open(store, remote, space, msg, &hold);
	if (r < 0)
		return err_pass(r);
	lookup_order(hold->lookup, space);
	loop_work_start(&hold->lookup->work);
	return 0;
}

static int on_ask(struct store *store, struct remote *remote, struct cursor *body)
{
	struct wire_chunk_lookup msg;
	struct err why;
	int r = wire_chunk_lookup_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (store && !msg.ids.len) {
		struct remote_hold *hold = remote_hold_find(remote, msg.ask);

		if (hold)
			lease_set(hold, msg.lease_ms);
		return 0;
	}
	if (ask_do(store, remote, &msg) < 0) {
		err_take(&why);
		lookup_refuse(remote, msg.ask, &why);
	}
	return 0;
}

/* ---- CHUNK_OFFER ---- */

static void on_leg_gone(struct loop_defer *defer)
{
	remote_leg_free(container_of(defer, struct remote_leg, gone));
}

static void on_leg_room_end(struct room_leg *base, const struct room *room)
{
	struct remote_leg *leg = container_of(base, struct remote_leg, base);

	store_reading_end(&leg->reading);
	if (room->error->code != ERR_OK) /* its puller may not be connected yet */
		leg_refuse(leg->hold->remote, &leg->asked, room->error);
	loop_defer(room->session->kvd->loop, &leg->gone);
}

/* Of a reported pool. */
static struct store_class *remote_hold_class(const struct remote_hold *hold,
					     uint64_t pool)
{
	for (uint64_t left = hold->reported_any; left; left &= left - 1) {
		struct store_class *class = hold->space->classes[__builtin_ctzll(left)];

		if (class && class->pool && class->pool->id == pool)
			return class;
	}
	return NULL;
}

int remote_hold_kv(const struct remote *remote, uint64_t ask, uint64_t pool,
		   uint32_t first, uint32_t count, const char *view,
		   struct store_kv **kv_p)
{
	struct remote_hold *hold = remote_hold_reported(remote, ask);
	struct store_class *class;

	if (!hold)
		return store_lease_over();
	class = remote_hold_class(hold, pool);
	if (!class)
		return err_raise(ERR_NOTFOUND, "pool: not in this hold");
	return err_pass(store_kv_of_chunks(class, hold->chunks, hold->count, first, count,
					   view, kv_p));
}

/* Outcome 1: its parts are in memory, or still in their engine's pages; 0: one is being
 * loaded. */
static int leg_parts(struct remote_leg *leg, const struct store_class *class)
{
	const struct remote_hold *hold = leg->hold;

	if (class->published)
		leg->there = 0; /* nothing keeps them */
	for (; leg->there < leg->asked.count; leg->there++) {
		const struct store_part *part = store_part_find(
			hold->chunks[leg->asked.first + leg->there], class);

		hold->store->remote_leg_checks++;
		if (!part || !store_part_placed(part))
			return err_raise(ERR_NOTFOUND, "a chunk of the hold is missing");
		if (part->memory != PART_READY)
			return 0;
	}
	return 1;
}

static int leg_check(const struct remote_leg *leg, const struct store_class *class)
{
	const struct wire_chunk_offer *m = &leg->asked;
	const struct remote_hold *hold = leg->hold;
	uint64_t tokens = hold->space->tokens, from = (hold->first + m->first) * tokens;

	if (!class)
		return err_raise(ERR_NOTFOUND, "unknown pool of chunks");
	if (m->first >= hold->count || m->count == 0 ||
	    m->count > hold->count - m->first || m->begin >= m->end || m->begin < from ||
	    m->end > from + m->count * tokens)
		return err_raise(ERR_RANGE, "CHUNK_OFFER: outside this hold");
	for (uint32_t i = m->first; i < m->first + m->count; i++) {
		if (!(hold->reported[i] >> class->index & 1))
			return err_raise(ERR_NOTFOUND,
					 "CHUNK_OFFER: chunk not reported in this pool");
	}
	return 0;
}

static int leg_open(struct remote_leg *leg, struct store_class *class)
{
	const struct wire_chunk_offer *m = &leg->asked;
	struct remote_hold *hold = leg->hold;
	struct store *store = hold->store;
	struct room_args args = {.session = class->pool->session,
				 .role = ROOM_OFFER,
				 .number = m->room,
				 .pool = class->pool,
				 .receivers = 1,
				 .leg = &leg->base};
	struct room_maps maps;
	struct room *room;
	int r = store_slots(class, hold->chunks + m->first, m->count,
			    (hold->first + m->first) * hold->space->tokens, m->begin,
			    m->end, &maps);

	if (r < 0)
		return err_pass(r);
	r = store_reading_begin(&leg->reading, class, hold->chunks + m->first, m->count,
				&leg->base);
	if (r >= 0)
		r = rooms_open(rooms_of(store->kvd), &args, &room);
	if (r < 0) {
		room_maps_fini(&maps);
		return err_pass(r);
	}
	room_bind_pages(room, &maps, &(struct wait_spec){0});
	memcpy(room->admit.ticket, m->ticket, TICKET_BYTES);
	leg->base.room = room;
	leg->base.on_end = on_leg_room_end;
	rooms_begin(room);
	return 0;
}

/* Outcome 1: it waits for a part. */
static int leg_try(struct remote_leg *leg)
{
	struct store_class *class = remote_hold_class(leg->hold, leg->asked.pool);
	int r = leg->hold->store->session
			? 0
			: err_raise(ERR_DRAIN, "the daemon is stopping");

	if (r >= 0 && !leg->checked)
		r = leg_check(leg, class);
	leg->checked = true;
	if (r >= 0)
		r = leg_parts(leg, class);
	if (r == 0)
		return 1;
	return r < 0 ? err_pass(r) : err_pass(leg_open(leg, class));
}

static void leg_go_on(struct remote_leg *leg)
{
	struct err why;
	int r = leg_try(leg);

	if (r > 0)
		list_push_back(&leg->hold->store->waiters, &leg->wait.link);
	if (r >= 0)
		return;
	err_take(&why);
	leg_refuse(leg->hold->remote, &leg->asked, &why);
	remote_leg_free(leg);
}

/* It may be freed, and others with it. */
static void on_leg_part(struct store_waiter *waiter, const struct err *why)
{
	(void)why;
	leg_go_on(container_of(waiter, struct remote_leg, wait));
}

static int remote_leg_new(const struct remote *remote,
			  const struct wire_chunk_offer *asked, struct remote_leg **leg_p)
{
	struct remote_hold *hold = remote_hold_reported(remote, asked->ask);
	struct remote_leg *leg;

	if (!hold)
		return err_raise(ERR_LEASE, "unknown or expired hold");
	if (store_remote(remote)->legs >= REMOTE_LEGS_MAX)
		return err_raise(ERR_LIMIT, "%u subtransfers of one peer (limit)",
				 REMOTE_LEGS_MAX);
	leg = mem_zalloc(sizeof(*leg));
	if (!leg)
		return err_pass(-ENOMEM);
	leg->hold = hold;
	leg->asked = *asked;
	list_init(&leg->wait.link);
	leg->wait.wake = on_leg_part;
	loop_defer_init(&leg->gone, on_leg_gone);
	list_push_back(&hold->legs, &leg->link);
	hold->leg_count++;
	store_remote(remote)->legs++;
	*leg_p = leg;
	return 0;
}

static int on_leg(struct remote *remote, struct cursor *body)
{
	struct wire_chunk_offer msg;
	struct remote_leg *leg = NULL;
	struct err why;
	int r = wire_chunk_offer_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (remote_leg_new(remote, &msg, &leg) < 0) {
		err_take(&why);
		leg_refuse(remote, &msg, &why);
	} else {
		leg_go_on(leg);
	}
	return 0;
}

/* ---- the end ---- */

static int on_release(const struct remote *remote, struct cursor *body)
{
	struct wire_chunk_release msg;
	struct remote_hold *hold;
	struct err why;
	int r = wire_chunk_release_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	hold = remote_hold_find(remote, msg.ask);
	err_set(&why, ERR_LEASE, "the hold was released");
	if (hold)
		remote_hold_close(hold, &why, true); /* that daemon does not wait for its
						 subtransfers any more */
	return 0;
}

int remote_hold_on_message(struct store *store, struct remote *remote,
			   const struct wire_header *h, struct cursor *body)
{
	if (h->type == WIRE_T_CHUNK_LOOKUP)
		return err_pass(on_ask(store, remote, body));
	if (h->type == WIRE_T_CHUNK_OFFER)
		return err_pass(on_leg(remote, body));
	return err_pass(on_release(remote, body));
}

static void remote_end(struct remote *remote, const struct err *why)
{
	struct remote_hold *hold;

	if (!store_remote(remote)->hold_count)
		return;
	remote->reaches++; /* it stays for the walk */
	list_foreach_safe(hold, &store_remote(remote)->holds, link) {
		if (!hold->closed)
			remote_hold_close(hold, why, true);
	}
	handshake_release(remote);
}

void remote_holds_on_down(struct remote *remote)
{
	struct err why;

	err_set(&why, ERR_PEER, "the requester's connection is lost");
	remote_end(remote, &why);
}

void remote_holds_close(struct store *store)
{
	struct remote *remote;
	struct err why;

	err_set(&why, ERR_DRAIN, "the daemon is stopping");
	list_foreach_safe(remote, handshake_remotes(store->kvd->handshake), link)
		remote_end(remote, &why);
}
