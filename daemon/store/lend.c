/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What a peer asks for is judged like an engine's: chunks that are there are told, with a
 * lease they are pinned, too, within the half of a user's share that all holds together
 * may take. A leg is an offer of the store's session, with number and ticket of the
 * asker's; so whoever pulls is the one who was told of it, and what it may read is what
 * the leg named.
 *
 * A part that is in a file alone is read when it is held; its leg waits for it.
 */
#include "daemon/store/lend.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/handshake/handshake.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/store/store_impl.h"

#define LENDS_MAX 256u /* of a peer */
#define LEGS_MAX 1024u /* of a peer, at a time */
#define LEASE_MS_MAX (STORE_LEASE_MS_MAX + 120000)

struct store_lend {
	struct list link; /* in store->lends */
	struct store *store;
	struct remote *remote; /* held */
	uint64_t ask;
	struct store_space *space;
	uint64_t first; /* number of the first chunk in its prompt, or in the hold */
	struct store_chunk **chunks;
	uint32_t count;
	struct list legs;
	unsigned int leg_count;
	bool closed;
	struct loop_timer lease;
};

struct lend_leg {
	struct room_leg base;
	struct list link; /* in its lend's */
	struct store_lend *lend;
	struct wire_chunk_leg asked;
	struct loop_defer gone;
};

/* ---- life ---- */

static void lend_step(struct store_lend *lend)
{
	if (!lend->closed || lend->leg_count)
		return;
	while (lend->count > 0) /* the end of the chain first */
		store_chunk_unpin(lend->chunks[--lend->count]);
	list_remove(&lend->link);
	loop_timer_stop(&lend->lease);
	if (--lend->space->handles == 0)
		store_tidy(lend->store);
	handshake_release(lend->store->kvd->handshake, lend->remote);
	mem_free(lend->chunks);
	mem_free(lend);
}

static void lend_leg_free(struct lend_leg *leg)
{
	struct store_lend *lend = leg->lend;

	loop_defer_cancel(&leg->gone);
	list_remove(&leg->link);
	lend->leg_count--;
	mem_free(leg);
	lend_step(lend);
}

/* Legs that are open end first, with `why`; those that wait go. */
static void lend_close(struct store_lend *lend, const struct err *why)
{
	struct lend_leg *leg;

	lend->closed = true;
	loop_timer_stop(&lend->lease);
	lend->leg_count++; /* it stays for the walk */
	list_foreach_safe(leg, &lend->legs, link) {
		if (!leg->base.room)
			lend_leg_free(leg);
		else if (why)
			room_fail(leg->base.room, why, NULL);
	}
	lend->leg_count--;
	lend_step(lend);
}

static void on_lend_lease(struct loop_timer *timer)
{
	lend_close(container_of(timer, struct store_lend, lease), NULL);
}

static struct store_lend *lend_find(const struct store *store,
				    const struct remote *remote, uint64_t ask)
{
	struct store_lend *lend;

	list_foreach(lend, &store->lends, link) {
		if (lend->remote == remote && lend->ask == ask && !lend->closed)
			return lend;
	}
	return NULL;
}

static unsigned int lends_of(const struct store *store, const struct remote *remote)
{
	const struct store_lend *lend;
	unsigned int n = 0;

	list_foreach(lend, &store->lends, link)
		n += lend->remote == remote;
	return n;
}

unsigned int lends_open(const struct store *store)
{
	const struct store_lend *lend;
	unsigned int n = 0;

	list_foreach(lend, &store->lends, link)
		n++;
	return n;
}

/* ---- CHUNK_ASK ---- */

/* What is told of chunks that follow each other. */
struct lend_told {
	uint64_t pools[STORE_CLASSES_MAX];
	unsigned int pool_count;
	unsigned int bit_of[STORE_CLASSES_MAX]; /* of a class; 1 + the bit; 0: none yet */
	struct cursor runs;
	uint32_t chunks, in_run;
	uint64_t tokens, mask;
	uint32_t run_count;
};

/* The chunk's classes as bits of the answer. */
static uint64_t told_mask(struct lend_told *told, const struct store_chunk *chunk)
{
	uint64_t there = chunk->ready | chunk->filed, mask = 0;

	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		struct store_class *class = chunk->space->classes[i];

		if (!(there >> i & 1))
			continue;
		if (!class->pool) { /* known from files alone: told once there is one */
			if (store_class_pool(class) < 0)
				err_clear();
			continue;
		}
		if (!told->bit_of[i]) {
			told->pools[told->pool_count++] = class->pool->id;
			told->bit_of[i] = told->pool_count;
		}
		mask |= UINT64_C(1) << (told->bit_of[i] - 1);
	}
	return mask;
}

static void told_run_end(struct lend_told *told)
{
	if (!told->in_run)
		return;
	cursor_put_u32(&told->runs, told->in_run);
	cursor_put_u64(&told->runs, told->mask);
	told->run_count++;
	told->in_run = 0;
}

static void told_add(struct lend_told *told, const struct store_chunk *chunk,
		     uint64_t mask)
{
	if (mask != told->mask)
		told_run_end(told);
	told->mask = mask;
	told->in_run++;
	told->chunks++;
	told->tokens += chunk->tokens;
}

static void load_parts(struct store_chunk *chunk)
{
	struct store_part *part;

	list_foreach(part, &chunk->parts, link) {
		if (part->filed && !part->slot.slab && store_part_load(part) < 0)
			err_clear(); /* its leg will be refused */
	}
}

static void ask_chunks(struct store_lend *lend, const struct store_space *space,
		       const struct wire_chunk_ask *msg, struct lend_told *told)
{
	uint32_t count = (uint32_t)(msg->ids.len / STORE_ID_BYTES);

	for (uint32_t i = 0; i < count; i++) {
		struct store_chunk *chunk = store_chunk_find(
			space, (const uint8_t *)msg->ids.data + i * STORE_ID_BYTES,
			msg->first & CHUNK_ASK_ANYWHERE ? STORE_ANYWHERE
							: msg->first + i);
		uint64_t mask = chunk ? told_mask(told, chunk) : 0;

		if (!mask)
			break;
		if (lend) {
			store_chunk_pin(chunk);
			lend->chunks[lend->count++] = chunk;
			load_parts(chunk);
		}
		store_chunk_touch(chunk);
		told_add(told, chunk, mask);
		if (chunk->tokens < space->tokens)
			break;
	}
	told_run_end(told);
}

static int ask_answer(struct remote *remote, uint64_t ask, struct lend_told *told)
{
	uint8_t head[8 + 8 * STORE_CLASSES_MAX + 8];
	cleanup_free uint8_t *runs = NULL;
	struct wire_chunk_told msg = {.ask = ask, .tokens = told->tokens};
	struct cursor out;

	cursor_write(&out, head, sizeof(head));
	cursor_put_u32(&out, told->pool_count);
	for (unsigned int i = 0; i < told->pool_count; i++)
		cursor_put_u64(&out, told->pools[i]);
	cursor_put_u32(&out, told->run_count);
	runs = mem_alloc(out.pos + told->runs.pos + 1);
	if (!runs)
		return err_pass(-ENOMEM);
	memcpy(runs, head, out.pos);
	memcpy(runs + out.pos, told->runs.base, told->runs.pos);
	msg.runs.data = runs;
	msg.runs.len = out.pos + told->runs.pos;
	return handshake_tell_chunk_told(remote, &msg);
}

static int lend_check(const struct store *store, const struct store_space *space,
		      const struct remote *remote, uint64_t ask)
{
	const struct arena_owner *owner = space->tenant->owner;

	if (lend_find(store, remote, ask))
		return err_raise(ERR_EXIST, "another hold has this number");
	if (lends_of(store, remote) >= LENDS_MAX)
		return err_raise(ERR_LIMIT, "%u holds of one peer", LENDS_MAX);
	if (arena_owner_pinned(owner) > arena_owner_share(owner) / 2)
		return err_raise(ERR_LIMIT, "half of what this user may keep is held");
	return 0;
}

static int lend_new(struct store *store, struct remote *remote, struct store_space *space,
		    const struct wire_chunk_ask *msg, struct store_lend **lend_p)
{
	uint64_t lease_ms = msg->lease_ms < LEASE_MS_MAX ? msg->lease_ms : LEASE_MS_MAX;
	struct store_lend *lend;
	int r = lend_check(store, space, remote, msg->ask);

	if (r < 0)
		return err_pass(r);
	lend = mem_zalloc(sizeof(*lend));
	if (!lend)
		return err_pass(-ENOMEM);
	lend->chunks =
		mem_calloc(msg->ids.len / STORE_ID_BYTES + 1, sizeof(*lend->chunks));
	if (!lend->chunks) {
		mem_free(lend);
		return err_pass(-ENOMEM);
	}
	lend->store = store;
	lend->remote = remote;
	remote->reaches++;
	lend->ask = msg->ask;
	lend->space = space;
	space->handles++; /* its classes stay */
	lend->first = msg->first & ~CHUNK_ASK_ANYWHERE;
	list_init(&lend->legs);
	loop_timer_init(&lend->lease, store->kvd->loop, on_lend_lease);
	loop_timer_start(&lend->lease, lease_ms * LOOP_NS_PER_MS);
	list_push_back(&store->lends, &lend->link);
	store->lend_count++;
	*lend_p = lend;
	return 0;
}

static int ask_do(struct store *store, struct remote *remote,
		  const struct wire_chunk_ask *msg)
{
	size_t count = msg->ids.len / STORE_ID_BYTES;
	cleanup_free uint8_t *runs = mem_alloc(count * 12 + 12);
	struct store_space *space;
	struct store_lend *lend = NULL;
	struct lend_told told = {.mask = 0};
	int r = store_ready(store);

	if (r >= 0 && !runs)
		r = -ENOMEM;
	if (r >= 0 && (msg->ids.len % STORE_ID_BYTES || count > STORE_IDS_MAX ||
		       (msg->first & ~CHUNK_ASK_ANYWHERE) > UINT32_MAX))
		r = err_raise(ERR_PROTO, "CHUNK_ASK: %zu bytes of ids", msg->ids.len);
	if (r < 0)
		return err_pass(r);
	cursor_write(&told.runs, runs, count * 12 + 12);
	space = store_space_by_digest(store, msg->space);
	if (space && msg->lease_ms)
		r = lend_new(store, remote, space, msg, &lend);
	if (r >= 0 && space)
		ask_chunks(lend, space, msg, &told);
	if (lend && told.chunks == 0) {
		lend_close(lend, NULL);
		lend = NULL;
	}
	if (r >= 0)
		r = ask_answer(remote, msg->ask, &told);
	if (r < 0 && lend)
		lend_close(lend, NULL); /* who is not told of it releases nothing */
	return r < 0 ? err_pass(r) : 0;
}

static int on_ask(struct store *store, struct remote *remote, struct cursor *body)
{
	struct wire_chunk_ask msg;
	struct wire_chunk_told no = {.code = ERR_OK};
	int r = wire_chunk_ask_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (ask_do(store, remote, &msg) >= 0)
		return 0;
	no.ask = msg.ask;
	no.code = err_last()->code;
	snprintf(no.text, sizeof(no.text), "%.300s", err_last()->text);
	err_clear();
	if (handshake_tell_chunk_told(remote, &no) < 0)
		err_clear(); /* it is going down */
	return 0;
}

/* ---- CHUNK_LEG ---- */

static void on_leg_gone(struct loop_defer *defer)
{
	lend_leg_free(container_of(defer, struct lend_leg, gone));
}

static void on_leg_room_end(struct room_leg *base, const struct room *room)
{
	struct lend_leg *leg = container_of(base, struct lend_leg, base);

	loop_defer(rooms_kvd(room->rooms)->loop, &leg->gone);
}

static struct store_class *leg_class(const struct store_space *space, uint64_t pool)
{
	for (unsigned int i = 0; i < STORE_CLASSES_MAX; i++) {
		struct store_class *class = space->classes[i];

		if (class && class->pool && class->pool->id == pool)
			return class;
	}
	return NULL;
}

int lend_chunks(const struct store *store, const struct remote *remote, uint64_t ask,
		uint64_t pool, struct store_chunk *const **chunks_p, uint32_t *count_p,
		struct store_class **class_p)
{
	struct store_lend *lend = lend_find(store, remote, ask);

	if (!lend)
		return err_raise(ERR_LEASE, "the hold's lease has ended");
	*class_p = leg_class(lend->space, pool);
	if (!*class_p)
		return err_raise(ERR_NOTFOUND, "pool: none of the hold's");
	*chunks_p = lend->chunks;
	*count_p = lend->count;
	return 0;
}

/* Outcome 1: its parts are in memory; 0: some are on their way. */
static int leg_parts(const struct lend_leg *leg, const struct store_class *class)
{
	const struct store_lend *lend = leg->lend;
	int there = 1;

	for (uint32_t i = 0; i < leg->asked.count; i++) {
		const struct store_part *part =
			store_part_find(lend->chunks[leg->asked.first + i], class);

		if (!part || !part->slot.slab)
			return err_raise(ERR_NOTFOUND,
					 "a chunk of the hold is not there");
		there &= part->ready;
	}
	return there;
}

static int leg_check(const struct lend_leg *leg)
{
	const struct wire_chunk_leg *m = &leg->asked;
	const struct store_lend *lend = leg->lend;
	uint64_t tokens = lend->space->tokens, from = (lend->first + m->first) * tokens;

	if (m->first >= lend->count || m->count == 0 ||
	    m->count > lend->count - m->first || m->begin >= m->end || m->begin < from ||
	    m->end > from + m->count * tokens)
		return err_raise(ERR_RANGE, "CHUNK_LEG: not of this hold");
	return 0;
}

static int leg_open(struct lend_leg *leg, const struct store_class *class)
{
	const struct wire_chunk_leg *m = &leg->asked;
	struct store_lend *lend = leg->lend;
	struct store *store = lend->store;
	struct room_args args = {.session = store->session,
				 .role = ROOM_OFFER,
				 .number = m->room,
				 .pool = class->pool,
				 .receivers = 1,
				 .leg = &leg->base};
	struct room_maps maps;
	struct room *room;
	int r = store_slots(class, lend->chunks + m->first, m->count,
			    (lend->first + m->first) * lend->space->tokens, m->begin,
			    m->end, &maps);

	if (r < 0)
		return err_pass(r);
	r = rooms_open(store->kvd->rooms, &args, &room);
	if (r < 0) {
		room_maps_fini(&maps);
		return err_pass(r);
	}
	room->maps = maps;
	room->bound = true;
	memcpy(room->admit.ticket, m->ticket, TICKET_BYTES);
	leg->base.room = room;
	leg->base.on_end = on_leg_room_end;
	rooms_begin(room);
	return 0;
}

/* Outcome 1: it waits for a part. */
static int leg_try(struct lend_leg *leg)
{
	const struct store_class *class = leg_class(leg->lend->space, leg->asked.pool);
	int r = leg->lend->store->session
			? leg_check(leg)
			: err_raise(ERR_DRAIN, "the daemon is stopping");

	if (r >= 0 && !class)
		r = err_raise(ERR_NOTFOUND, "no such pool of chunks");
	if (r >= 0)
		r = leg_parts(leg, class);
	if (r == 0)
		return 1;
	return r < 0 ? err_pass(r) : err_pass(leg_open(leg, class));
}

static void leg_refuse(struct remote *remote, const struct wire_chunk_leg *asked)
{
	struct wire_chunk_leg_nak nak = {
		.ask = asked->ask, .room = asked->room, .code = err_last()->code};

	snprintf(nak.text, sizeof(nak.text), "%.300s", err_last()->text);
	err_clear();
	if (handshake_tell_chunk_leg_nak(remote, &nak) < 0)
		err_clear();
}

static void leg_go_on(struct lend_leg *leg)
{
	if (leg_try(leg) >= 0)
		return;
	leg_refuse(leg->lend->remote, &leg->asked);
	lend_leg_free(leg);
}

static unsigned int legs_of(const struct store *store, const struct remote *remote)
{
	const struct store_lend *lend;
	unsigned int n = 0;

	list_foreach(lend, &store->lends, link)
		n += lend->remote == remote ? lend->leg_count : 0;
	return n;
}

static int lend_leg_new(struct store *store, struct remote *remote,
			const struct wire_chunk_leg *asked, struct lend_leg **leg_p)
{
	struct store_lend *lend = store ? lend_find(store, remote, asked->ask) : NULL;
	struct lend_leg *leg;

	if (!lend)
		return err_raise(ERR_LEASE, "there is no such hold (any more)");
	if (legs_of(store, remote) >= LEGS_MAX)
		return err_raise(ERR_LIMIT, "%u legs of one peer", LEGS_MAX);
	leg = mem_zalloc(sizeof(*leg));
	if (!leg)
		return err_pass(-ENOMEM);
	leg->lend = lend;
	leg->asked = *asked;
	loop_defer_init(&leg->gone, on_leg_gone);
	list_push_back(&lend->legs, &leg->link);
	lend->leg_count++;
	*leg_p = leg;
	return 0;
}

static int on_leg(struct store *store, struct remote *remote, struct cursor *body)
{
	struct wire_chunk_leg msg;
	struct lend_leg *leg = NULL;
	int r = wire_chunk_leg_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (lend_leg_new(store, remote, &msg, &leg) < 0)
		leg_refuse(remote, &msg);
	else
		leg_go_on(leg);
	return 0;
}

void lends_kick(struct store *store)
{
	struct store_lend *lend, *next;

	/* a leg that is refused may take its hold with it, and no other */
	for (lend = list_first(&store->lends, struct store_lend, link); lend;
	     lend = next) {
		struct lend_leg *leg;

		next = lend->link.next == &store->lends
			       ? NULL
			       : list_entry(lend->link.next, struct store_lend, link);
		lend->leg_count++;
		list_foreach_safe(leg, &lend->legs, link) {
			if (!leg->base.room && list_empty(&leg->gone.link))
				leg_go_on(leg);
		}
		lend->leg_count--;
		lend_step(lend);
	}
}

/* ---- the end ---- */

static int on_release(struct store *store, const struct remote *remote,
		      struct cursor *body)
{
	struct wire_chunk_release msg;
	struct store_lend *lend;
	int r = wire_chunk_release_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	lend = store ? lend_find(store, remote, msg.ask) : NULL;
	if (lend)
		lend_close(lend, NULL); /* what is being read goes on */
	return 0;
}

int lend_on_message(struct store *store, struct remote *remote,
		    const struct wire_header *h, struct cursor *body)
{
	if (h->type == WIRE_T_CHUNK_ASK)
		return err_pass(on_ask(store, remote, body));
	if (h->type == WIRE_T_CHUNK_LEG)
		return err_pass(on_leg(store, remote, body));
	return err_pass(on_release(store, remote, body));
}

static void lends_end(struct store *store, const struct remote *remote,
		      const struct err *why)
{
	struct store_lend *lend;

	list_foreach_safe(lend, &store->lends, link) {
		if ((!remote || lend->remote == remote) && !lend->closed)
			lend_close(lend, why);
	}
}

void lend_on_down(struct store *store, const struct remote *remote)
{
	struct err why;

	err_set(&why, ERR_PEER, "the daemon that held chunks is gone");
	lends_end(store, remote, &why);
}

void lends_close(struct store *store)
{
	struct err why;

	err_set(&why, ERR_DRAIN, "the daemon is stopping");
	lends_end(store, NULL, &why);
}
