/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A peer's query is checked like an engine's: the present chunks are reported, and with a
 * lease they are pinned, too, within the half of a user's share that all holds together
 * may pin. A subtransfer is an offer of the store's session, with the requester's number
 * and ticket; so only the requester can pull it, and it can read only the chunks of its
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
#define LEASE_MS_MAX \
	(STORE_LEASE_MS_MAX + FAR_LEASE_MORE_MS) /* the requesters' maximum */

struct remote_hold {
	struct list link; /* in its remote's */
	struct store *store;
	struct remote *remote; /* held */
	uint64_t ask;
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

static void remote_step(struct store_remote *there)
{
	if (there->hold_count)
		return;
	idmap_fini(&there->asks);
	idmap_init(&there->asks);
}

static void remote_hold_step(struct remote_hold *hold)
{
	if (!hold->closed || hold->leg_count)
		return;
	store_pins_end(hold->store, hold->chunks, hold->count);
	list_remove(&hold->link);
	loop_timer_stop(&hold->lease);
	store_space_let_go(hold->space);
	hold->store->remote_holds--;
	store_remote(hold->remote)->hold_count--;
	remote_step(store_remote(hold->remote));
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

/* Waiting subtransfers are refused with `why`; open ones continue, or (`all`) end. */
static void remote_hold_close(struct remote_hold *hold, const struct err *why, bool all)
{
	struct remote_leg *leg;

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

/* ---- CHUNK_LOOKUP ---- */

/* The report of chunks that follow each other. */
struct remote_hold_report {
	const struct pool *pools[STORE_CLASSES_MAX];
	unsigned int pool_count;
	unsigned int bit_of[STORE_CLASSES_MAX]; /* of a class; 1 + the bit; 0: none yet */
	struct cursor runs;
	uint32_t chunks, in_run;
	uint64_t tokens, mask;
	uint32_t run_count;
};

static unsigned int report_bit(struct remote_hold_report *report,
			       const struct store_class *class)
{
	if (!report->bit_of[class->index]) {
		report->pools[report->pool_count++] = class->pool;
		report->bit_of[class->index] = report->pool_count;
	}
	return report->bit_of[class->index] - 1;
}

/* A requester takes the first of several: never an engine's pages, which may be withdrawn
 * and do not serve attention. */
static void report_order(struct remote_hold_report *report,
			 const struct store_space *space)
{
	for (unsigned int i = 0; i < STORE_CLASSES_MAX && space->published; i++) {
		const struct store_class *class = space->classes[i];

		if (class && class->parts && class->pool && !class->published)
			report_bit(report, class);
	}
}

/* These classes of the chunk's as bits of the reply; *there_p: without those that have no
 * pool. */
static uint64_t report_mask(struct remote_hold_report *report,
			    const struct store_chunk *chunk, uint64_t *there_p)
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
		mask |= UINT64_C(1) << report_bit(report, class);
	}
	return mask;
}

static void report_run_end(struct remote_hold_report *report)
{
	if (!report->in_run)
		return;
	cursor_put_u32(&report->runs, report->in_run);
	cursor_put_u64(&report->runs, report->mask);
	report->run_count++;
	report->in_run = 0;
}

static void report_add(struct remote_hold_report *report, const struct store_chunk *chunk,
		       uint64_t mask)
{
	if (mask != report->mask)
		report_run_end(report);
	report->mask = mask;
	report->in_run++;
	report->chunks++;
	report->tokens += chunk->tokens;
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

static void ask_chunks(struct remote_hold *hold, const struct store_space *space,
		       const struct wire_chunk_lookup *msg,
		       struct remote_hold_report *report)
{
	uint32_t count = (uint32_t)(msg->ids.len / STORE_ID_BYTES);

	report_order(report, space);
	for (uint32_t i = 0; i < count; i++) {
		struct store_chunk *chunk = store_chunk_find(
			space, (const uint8_t *)msg->ids.data + i * STORE_ID_BYTES,
			msg->first & CHUNK_LOOKUP_ANYWHERE ? STORE_ANYWHERE
							   : msg->first + i);
		uint64_t there = chunk ? store_chunk_ready(chunk) | chunk->filed : 0;
		uint64_t mask;

		if (there && hold)
			there = remote_hold_pin(hold, chunk);
		if (!there)
			break;
		mask = report_mask(report, chunk, &there);
		if (hold && mask) {
			hold->reported[hold->count] = there;
			hold->reported_any |= there;
			hold->chunks[hold->count++] = chunk;
		} else if (hold) {
			store_chunk_unpin(chunk);
		}
		if (!mask)
			break;
		store_chunk_touch(chunk);
		report_add(report, chunk, mask);
		if (chunk->tokens < space->tokens)
			break;
	}
	report_run_end(report);
}

static int ask_answer(struct remote *remote, uint64_t ask,
		      struct remote_hold_report *report)
{
	uint8_t head[8 + 8 * STORE_CLASSES_MAX + 8];
	cleanup_free uint8_t *runs = NULL;
	struct wire_chunk_lookup_ack msg = {.ask = ask, .tokens = report->tokens};
	struct cursor out;

	cursor_write(&out, head, sizeof(head));
	cursor_put_u32(&out, report->pool_count);
	for (unsigned int i = 0; i < report->pool_count; i++) {
		handshake_announce(remote, report->pools[i]);
		cursor_put_u64(&out, report->pools[i]->id);
	}
	cursor_put_u32(&out, report->run_count);
	runs = mem_alloc(out.pos + report->runs.pos + 1);
	if (!runs)
		return err_pass(-ENOMEM);
	memcpy(runs, head, out.pos);
	memcpy(runs + out.pos, report->runs.base, report->runs.pos);
	msg.runs.data = runs;
	msg.runs.len = out.pos + report->runs.pos;
	return handshake_send_chunk_lookup_ack(remote, &msg);
}

static int remote_hold_check(const struct store_remote *there,
			     const struct store_space *space, uint64_t ask)
{
	if (idmap_get(&there->asks, ask))
		return err_raise(ERR_EXIST, "duplicate hold number");
	if (there->hold_count >= REMOTE_HOLDS_MAX)
		return err_raise(ERR_LIMIT, "%u holds of one peer (limit)",
				 REMOTE_HOLDS_MAX);
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

static int remote_hold_alloc(struct store *store, struct remote *remote, uint64_t ask,
			     uint32_t most, struct remote_hold **hold_p)
{
	struct remote_hold *hold = mem_zalloc(sizeof(*hold));
	int r = 0;

	if (!hold)
		return err_pass(-ENOMEM);
	hold->chunks = store_pins_new(most);
	hold->reported = mem_calloc((size_t)most + 1, sizeof(*hold->reported));
	if (!hold->chunks || !hold->reported)
		r = -ENOMEM;
	if (r >= 0)
		r = idmap_put(&store_remote(remote)->asks, ask, hold);
	if (r < 0) {
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
		r = remote_hold_alloc(store, remote, msg->ask,
				      (uint32_t)(msg->ids.len / STORE_ID_BYTES), &hold);
	if (r < 0)
		return err_pass(r);
	hold->store = store;
	hold->remote = remote;
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
	store->remote_holds++;
	store->remote_hold_count++;
	*hold_p = hold;
	return 0;
}

/* Extends the lease of the hold with this number. */
static void remote_hold_renew(const struct remote *remote,
			      const struct wire_chunk_lookup *msg)
{
	struct remote_hold *hold = remote_hold_find(remote, msg->ask);

	if (hold)
		lease_set(hold, msg->lease_ms);
}

static int ask_do(struct store *store, struct remote *remote,
		  const struct wire_chunk_lookup *msg)
{
	size_t count = msg->ids.len / STORE_ID_BYTES;
	cleanup_free uint8_t *runs = mem_alloc(count * 12 + 12);
	struct store_space *space;
	struct remote_hold *hold = NULL;
	struct remote_hold_report report = {.mask = 0};
	int r = store_ready(store);

	if (r >= 0 && !runs)
		r = -ENOMEM;
	if (r >= 0 && (msg->ids.len % STORE_ID_BYTES || count > STORE_IDS_MAX ||
		       (msg->first & ~CHUNK_LOOKUP_ANYWHERE) > UINT32_MAX))
		r = err_raise(ERR_PROTO, "CHUNK_LOOKUP: %zu bytes of ids", msg->ids.len);
	if (r < 0)
		return err_pass(r);
	cursor_write(&report.runs, runs, count * 12 + 12);
	space = store_space_by_digest(store, msg->space);
	if (space && msg->lease_ms)
		r = remote_hold_open(store, remote, space, msg, &hold);
	if (r >= 0 && space)
		ask_chunks(hold, space, msg, &report);
	if (hold && report.chunks == 0) {
		remote_hold_close(hold, NULL, false); /* it has no legs */
		hold = NULL;
	}
	if (r >= 0)
		r = ask_answer(remote, msg->ask, &report);
	if (r < 0 && hold)
		remote_hold_close(hold, NULL, false); /* a requester that does not know of
						  it cannot release it */
	return r < 0 ? err_pass(r) : 0;
}

static int on_ask(struct store *store, struct remote *remote, struct cursor *body)
{
	struct wire_chunk_lookup msg;
	struct wire_chunk_lookup_ack no = {.code = ERR_OK};
	int r = wire_chunk_lookup_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (store && !msg.ids.len) {
		remote_hold_renew(remote, &msg);
		return 0;
	}
	if (ask_do(store, remote, &msg) >= 0)
		return 0;
	no.ask = msg.ask;
	no.code = err_last()->code;
	snprintf(no.text, sizeof(no.text), "%.300s", err_last()->text);
	err_clear();
	if (handshake_send_chunk_lookup_ack(remote, &no) < 0)
		err_clear(); /* it is going down */
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
	loop_defer(rooms_kvd(room->rooms)->loop, &leg->gone);
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

int remote_hold_chunks(const struct remote *remote, uint64_t ask, uint64_t pool,
		       struct store_chunk *const **chunks_p, uint32_t *count_p,
		       struct store_class **class_p)
{
	struct remote_hold *hold = remote_hold_find(remote, ask);

	if (!hold)
		return store_lease_over();
	*class_p = remote_hold_class(hold, pool);
	if (!*class_p)
		return err_raise(ERR_NOTFOUND, "pool: not in this hold");
	*chunks_p = hold->chunks;
	*count_p = hold->count;
	return 0;
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
	struct remote_hold *hold = remote_hold_find(remote, asked->ask);
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
