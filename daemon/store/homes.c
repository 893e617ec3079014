/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An index node knows of us only the notes sent over its peering: first all chunks, by a
 * walk over the index in slices, then changes. During the walk, changes of chunks that it
 * has not reached are not sent, because the walk will read their later state; so each
 * chunk is sent once, and both sides can add up the notes. Every SUMS_NS the sums are
 * compared, and on a difference all is sent again. Index nodes at the same position share
 * a walk, because all of them connect about when this daemon starts: the ones furthest
 * behind are next.
 *
 * Notes are batched for FLUSH_NS. An index node whose connection accepts none, for so
 * long that its queue is full, is resynchronized later: dropped notes are not lost, and
 * need no more memory than the queue. Notes are sent by peer_send(), which refuses
 * instead of queueing.
 */
#include "daemon/store/homes.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/store/homes_impl.h"
#include "daemon/store/store_impl.h"

#define FLUSH_NS (250 * LOOP_NS_PER_MS)
#define SUMS_NS DIAL_AGAIN_NS
#define SLICE 512u /* buckets, and chunks about */
#define NO_HOME "is not used as an index node"

static bool homes_up(const struct remote *remote)
{
	return remote && sm_state(&remote->peer->sm) == PEER_UP &&
	       (remote->peer->features & PEER_FEATURE_CHUNKS);
}

/* ---- notes ---- */

static void one_begin(struct homes *homes, struct homes_one *one)
{
	one->up = one->anew = true;
	one->asked = false;
	one->walk_at = one->count = one->sum = 0;
	one->note_count = 0;
	homes->figures.resyncs++;
	loop_defer(homes->store->kvd->loop, &homes->walk);
}

static bool one_resyncs(const struct homes *homes, const struct homes_one *one)
{
	return one->up && one->walk_at <= homes->store->bucket_mask;
}

static int notes_send(struct homes_one *one, unsigned int from, unsigned int count)
{
	uint8_t notes[HOMES_NOTES_MAX * 16], body[sizeof(notes) + 16];
	struct wire_index_update msg = {.anew = one->anew};
	struct cursor out;
	int r;

	cursor_write(&out, notes, sizeof(notes));
	for (unsigned int i = from; i < from + count; i++) {
		cursor_put_u64(&out, one->notes[i].id);
		cursor_put_u64(&out, one->notes[i].space);
	}
	msg.notes.data = notes;
	msg.notes.len = out.pos;
	cursor_write(&out, body, sizeof(body));
	r = wire_index_update_put(&out, &msg);
	return r < 0 ? err_pass(r)
		     : err_pass(peer_send(one->dial.remote->peer, WIRE_T_INDEX_UPDATE,
					  body, out.pos));
}

/* False: some are left, because its connection accepts no more. */
static bool one_flush(struct homes *homes, struct homes_one *one)
{
	unsigned int sent = 0;

	while (sent < one->note_count || one->anew) {
		unsigned int n = one->note_count - sent;

		n = n < HOMES_NOTES_MAX ? n : HOMES_NOTES_MAX;
		if (notes_send(one, sent, n) < 0) {
			err_clear();
			break;
		}
		one->anew = false;
		sent += n;
	}
	homes->figures.notes += sent;
	one->note_count -= sent;
	memmove(one->notes, one->notes + sent, one->note_count * sizeof(*one->notes));
	return one->note_count == 0 && !one->anew;
}

/* False: its queue is full. */
static bool one_note(struct homes_one *one, const struct home_key *key, bool put)
{
	if (one->note_count == HOMES_QUEUE_MAX)
		return false;
	one->notes[one->note_count++] = (struct home_key){
		.id = key->id, .space = key->space | (put ? HOMES_PUT : 0)};
	one->count += put ? 1 : UINT64_MAX;
	one->sum ^= home_key_mix(key);
	return true;
}

static void flush_later(struct homes *homes)
{
	if (!loop_timer_running(&homes->flush))
		loop_timer_start(&homes->flush, FLUSH_NS);
}

void homes_tell(struct homes *homes, const struct store_chunk *chunk, bool put)
{
	struct home_key key;
	struct homes_one *one;

	if (!homes->count)
		return;
	key = home_key_make(home_key_space(chunk->space->digest), chunk->id);
	one = &homes->ones[members_home(homes->members, &key)];
	if (!one->up || (chunk->item.key & homes->store->bucket_mask) >= one->walk_at)
		return;
	if (!one_note(one, &key, put)) {
		one_flush(homes, one);
		if (!one_note(one, &key, put)) {
			one_begin(homes, one);
			return;
		}
	}
	flush_later(homes);
}

static void on_flush(struct loop_timer *timer)
{
	struct homes *homes = container_of(timer, struct homes, flush);
	bool left = false;

	for (unsigned int i = 0; i < homes->count; i++) {
		struct homes_one *one = &homes->ones[i];

		if (!one->up)
			continue;
		left |= !one_flush(homes, one);
		if (one_resyncs(homes, one)) /* it stopped at the full line */
			loop_defer(homes->store->kvd->loop, &homes->walk);
	}
	if (left)
		flush_later(homes);
}

/* ---- the walk ---- */

/* Index nodes, as bits, that are furthest behind and have queue space; they continue from
 * *at_p to *end_p, where others wait. *full_p: some have none. */
static uint32_t walk_set(struct homes *homes, uint64_t *at_p, uint64_t *end_p,
			 bool *full_p)
{
	uint64_t at = UINT64_MAX, end = homes->store->bucket_mask + 1;
	uint32_t set = 0;

	for (unsigned int i = 0; i < homes->count; i++) {
		struct homes_one *one = &homes->ones[i];

		if (!one_resyncs(homes, one))
			continue;
		if (one->note_count >= HOMES_QUEUE_MAX / 2 && !one_flush(homes, one)) {
			*full_p = true;
			continue;
		}
		if (one->walk_at < at) {
			end = set ? at : end;
			at = one->walk_at;
			set = 0;
		}
		if (one->walk_at == at)
			set |= UINT32_C(1) << i;
		else if (one->walk_at < end)
			end = one->walk_at;
	}
	*at_p = at;
	*end_p = end;
	return set;
}

/* Returns the chunks in it. *set_p: without those that must start again. */
static unsigned int walk_bucket(struct homes *homes, uint64_t at, uint32_t *set_p)
{
	const struct store_chunk *chunk = homes->store->buckets[at];
	unsigned int seen = 0;

	for (; chunk; chunk = chunk->next, seen++) {
		struct home_key key;
		unsigned int home;

		if (!chunk->shown)
			continue;
		key = home_key_make(home_key_space(chunk->space->digest), chunk->id);
		home = members_home(homes->members, &key);
		if (!(*set_p >> home & 1) || one_note(&homes->ones[home], &key, true))
			continue;
		*set_p &= ~(UINT32_C(1) << home); /* a bucket of half a queue */
		one_begin(homes, &homes->ones[home]);
	}
	return seen;
}

/* False: one of the set has enough to send. */
static bool walk_step(struct homes *homes, uint64_t at, uint32_t set)
{
	bool room = true;

	for (; set; set &= set - 1) {
		struct homes_one *one = &homes->ones[__builtin_ctz(set)];

		one->walk_at = at;
		room &= one->note_count < HOMES_QUEUE_MAX / 2;
	}
	return room;
}

/* A slice of the index. */
static void on_walk(struct loop_defer *defer)
{
	struct homes *homes = container_of(defer, struct homes, walk);
	unsigned int buckets = 0, seen = 0;
	uint64_t at, end;
	bool full = false;
	uint32_t set = walk_set(homes, &at, &end, &full);

	while (set && at < end && buckets++ < SLICE && seen < SLICE) {
		seen += walk_bucket(homes, at++, &set);
		if (!walk_step(homes, at, set))
			break;
	}
	if (buckets)
		loop_defer(homes->store->kvd->loop, &homes->walk);
	if (full || buckets)
		flush_later(homes); /* and continues then where it is full */
}

/* ---- sums ---- */

static struct homes_one *one_of(struct homes *homes, const struct remote *remote)
{
	for (unsigned int i = 0; i < homes->count; i++) {
		if (homes->ones[i].dial.remote == remote)
			return &homes->ones[i];
	}
	return NULL;
}

static void one_dial(struct homes *homes, unsigned int i)
{
	const char *endpoint = members_endpoint(homes->members, i);
	struct homes_one *one = &homes->ones[i];

	if (!dial_reach(homes->store, &one->dial, endpoint, NO_HOME))
		return;
	if (one_of(homes, one->dial.remote) != one) {
		err_raise(ERR_EXIST, "duplicate in chunk_index");
		dial_refuse(&one->dial, endpoint, NO_HOME);
	} else if (homes_up(one->dial.remote)) {
		one_begin(homes, one);
	}
}

static void on_sums(struct loop_timer *timer)
{
	struct homes *homes = container_of(timer, struct homes, sums);

	for (unsigned int i = 0; i < homes->count; i++) {
		struct homes_one *one = &homes->ones[i];
		const struct wire_index_digest msg = {.count = one->count,
						      .sum = one->sum};

		if (one->dial.later)
			one_dial(homes, i);
		if (!one->up || one_resyncs(homes, one) || !one_flush(homes, one))
			continue;
		one->asked = handshake_send_index_digest(one->dial.remote, &msg) >= 0;
		if (!one->asked)
			err_clear();
	}
	loop_timer_start(&homes->sums, SUMS_NS);
}

void homes_absent(struct homes *homes, const struct remote *remote)
{
	struct homes_one *one = one_of(homes, remote);

	if (!one || !one->up)
		return;
	one->up = false;
	log_warn("store", remote->peer->endpoint, "keeps no chunk index",
		 "check=\"its chunk_memory and chunk_index_memory\"");
}

void homes_answers(struct homes *homes, const struct remote *remote)
{
	struct homes_one *one = one_of(homes, remote);

	if (one)
		one->breaker = (struct breaker){0};
}

static int on_sum_ack(struct homes *homes, const struct remote *remote,
		      struct cursor *body)
{
	struct homes_one *one = one_of(homes, remote);
	struct wire_index_digest_ack msg;
	int r = wire_index_digest_ack_get(body, &msg);

	if (r < 0)
		return err_pass(r);
	if (!one || !one->up || !one->asked)
		return 0;
	one->asked = false;
	if (msg.again == HOMES_NO_INDEX)
		homes_absent(homes, remote);
	else if (msg.again)
		one_begin(homes, one);
	return 0;
}

/* ---- life ---- */

static void on_members(void *arg)
{
	struct homes *homes = arg;
	struct dial before[MEMBERS_MAX];
	unsigned int count = homes->count;

	/* one that stays is never missing in between */
	for (unsigned int i = 0; i < count; i++) {
		before[i] = homes->ones[i].dial;
		homes->ones[i].dial = (struct dial){.remote = NULL};
		homes->ones[i].breaker = (struct breaker){0};
		homes->ones[i].up = false;
	}
	homes->count = members_count(homes->members);
	for (unsigned int i = 0; i < homes->count; i++)
		one_dial(homes, i);
	for (unsigned int i = 0; i < count; i++)
		dial_end(&before[i]);
}

int homes_new(struct store *store, struct homes **homes_p)
{
	struct homes *homes;
	bool of_cluster;
	int r;

	*homes_p = NULL;
	if (!*store->kvd->config->chunk_index)
		return 0;
	homes = mem_zalloc(sizeof(*homes));
	if (!homes)
		return err_pass(-ENOMEM);
	homes->store = store;
	idmap_init(&homes->asks);
	loop_defer_init(&homes->walk, on_walk);
	loop_timer_init(&homes->flush, store->kvd->loop, on_flush);
	loop_timer_init(&homes->sums, store->kvd->loop, on_sums);
	of_cluster = strcmp(store->kvd->config->chunk_index, HOMES_OF_CLUSTER) == 0;
	r = members_new(of_cluster ? "" : store->kvd->config->chunk_index, on_members,
			homes, &homes->members);
	if (r == 0 && of_cluster)
		r = homes_group_open(&homes->group, store->kvd, homes->members);
	if (r < 0) {
		homes_free(homes);
		return err_pass(r);
	}
	homes->count = members_count(homes->members);
	for (unsigned int i = 0; i < homes->count; i++)
		one_dial(homes, i);
	loop_timer_start(&homes->sums, SUMS_NS);
	*homes_p = homes;
	return 0;
}

void homes_close(struct homes *homes)
{
	if (!homes)
		return;
	homes_group_close(&homes->group);
	loop_defer_cancel(&homes->walk);
	loop_timer_stop(&homes->flush);
	loop_timer_stop(&homes->sums);
	while (homes->count > 0) {
		struct homes_one *one = &homes->ones[--homes->count];

		one->up = false;
		dial_end(&one->dial);
	}
}

void homes_free(struct homes *homes)
{
	if (!homes)
		return;
	homes_close(homes);
	members_free(homes->members);
	idmap_fini(&homes->asks);
	mem_free(homes);
}

struct members *homes_members(struct homes *homes)
{
	return homes->members;
}

void homes_on_up(struct homes *homes, const struct remote *remote)
{
	struct homes_one *one = one_of(homes, remote);

	if (one && homes_up(remote))
		one_begin(homes, one);
}

void homes_on_down(struct homes *homes, const struct remote *remote)
{
	struct homes_one *one = one_of(homes, remote);

	if (one) {
		one->up = false;
		one->note_count = 0;
	}
	homes_asks_on_down(homes, remote);
}

int homes_on_message(struct homes *homes, const struct remote *remote,
		     const struct wire_header *h, struct cursor *body)
{
	return err_pass(h->type == WIRE_T_INDEX_REPLY
				? homes_on_found(homes, remote, body)
				: on_sum_ack(homes, remote, body));
}

void homes_figures(const struct homes *homes, struct store_homes *figures_p)
{
	*figures_p = (struct store_homes){0};
	if (!homes)
		return;
	*figures_p = homes->figures;
	figures_p->homes = homes->count;
	for (unsigned int i = 0; i < homes->count; i++)
		figures_p->up += homes->ones[i].up;
}
