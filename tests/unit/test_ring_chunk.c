/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks by entries of the submission ring (FIND, HOLD, FETCH, PUT), given by the socket
 * to one daemon in virtual time: what they move, and what an engine that means ill cannot
 * do with them: slots of holds and moves are theirs until their end, and nothing is
 * found, read or freed that is not the session's.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/loop/offload.h"
#include "daemon/room/rooms.h"
#include "daemon/session/session.h"
#include "daemon/store/store.h"
#include "daemon/store/store_figures.h"
#include "daemon/request/ring.h"
#include "daemon/request/ring_ops.h"
#include "tests/lib/cluster_store.h"
#include "tests/lib/ring_entries.h"

#define T 16u /* tokens of a chunk: four pages */
#define SLOT SESSION_SLOTS
#define LEASE_MS 1000u

struct world {
	struct cluster c;
	struct session *me, *other;
	struct cache mine, theirs;
	uint64_t space, other_space;
};

/* ---- entries ---- */

static struct kvd_ring_entry entry(enum kvd_ring_op op, uint32_t slot, uint64_t a)
{
	return (struct kvd_ring_entry){.op = op, .slot = slot, .gen = 1, .a = a};
}

static void add_ids(struct payload *p, uint8_t from, uint32_t count)
{
	uint8_t id[KVD_RING_ID_BYTES] = {0};

	for (uint32_t i = 0; i < count; i++) {
		id[0] = (uint8_t)(from + i);
		payload_add(p, id, sizeof(id));
	}
	p->views = p->len;
}

static void add_secret(struct payload *p, uint8_t first)
{
	const uint8_t secret[KVD_RING_SECRET_BYTES] = {first, 1};

	payload_add(p, secret, sizeof(secret));
}

static const uint32_t pages[] = {3, 4, 9, 1, 7, 2, 8, 12};

static void add_pages(struct payload *p, uint32_t count)
{
	payload_view(p, "kv", pages, count);
}

/* Of a word that does not come. */
static void add_wait(const struct world *w, struct payload *p)
{
	payload_text(p, "{'kind':'seq','region':%llu,'offset':0,'value':'9'}",
		     (unsigned long long)w->mine.region);
}

static struct kvd_ring_entry put_entry(const struct world *w, uint32_t slot,
				       uint32_t count)
{
	struct kvd_ring_entry e = entry(KVD_RING_PUT, slot, w->space);

	e.b = w->mine.pool;
	e.n0 = count;
	return e;
}

static struct kvd_ring_entry fetch_entry(const struct world *w, uint32_t slot,
					 uint64_t hold)
{
	struct kvd_ring_entry e = entry(KVD_RING_FETCH, slot, hold);

	e.b = w->mine.pool;
	return e;
}

static void give(struct world *w, struct kvd_ring_entry e, struct payload *p)
{
	entry_give(&w->c, w->me, &e, p);
}

static void breaks(struct world *w, struct kvd_ring_entry e, struct payload *p)
{
	entry_breaks(&w->c, w->me, &e, p);
}

static void put(struct world *w, uint32_t slot, uint32_t count)
{
	struct payload p = {0};

	add_ids(&p, 1, count);
	add_pages(&p, 4 * count);
	give(w, put_entry(w, slot, count), &p);
}

static void hold(struct world *w, uint32_t slot, uint8_t secret, uint32_t count)
{
	struct kvd_ring_entry e = entry(KVD_RING_HOLD, slot, w->space);
	struct payload p = {0};

	add_secret(&p, secret);
	add_ids(&p, 1, count);
	e.n0 = count;
	e.b = LEASE_MS;
	give(w, e, &p);
}

static void release(struct world *w, uint32_t slot)
{
	give(w, entry(KVD_RING_RELEASE, 0, KVD_RING_IDS + slot), NULL);
}

/* ---- what came of them ---- */

static unsigned int state_of(const struct world *w, uint32_t slot)
{
	return kvd_word_state(slot_read(w->me, slot).word);
}

static bool is_free(const struct world *w, uint32_t slot)
{
	return kvd_word_flags(slot_read(w->me, slot).word) & KVD_FLAG_FREE;
}

static void failed_with(struct world *w, uint32_t slot, enum err_code code)
{
	cluster_run(&w->c, 50 * LOOP_NS_PER_MS);
	assert_int_equal(state_of(w, slot), KVD_FAILED);
	assert_int_equal(kvd_word_error(slot_read(w->me, slot).word), code);
	release(w, slot);
	cluster_run(&w->c, LOOP_NS_PER_MS);
	assert_true(is_free(w, slot));
}

static void succeeds(struct world *w, uint32_t slot)
{
	cluster_run(&w->c, 50 * LOOP_NS_PER_MS);
	assert_int_equal(state_of(w, slot), KVD_SUCCESS);
}

static struct store_figures figures(const struct world *w)
{
	struct store_figures f;

	store_figures(store_of(&w->c.nodes[0].kvd), &f);
	return f;
}

/* ---- the world ---- */

static uint64_t open_space(struct world *w, struct session *session,
			   const struct cache *cache, const char *model)
{
	return cluster_number(cluster_call(&w->c, session,
					   "{'cmd':'space.open','pool':%llu,'model':'%s',"
					   "'scheme':'s','tokens':%u}",
					   (unsigned long long)cache->pool, model, T),
			      "space");
}

static int setup(void **state)
{
	struct world *w = calloc(1, sizeof(*w));

	assert_non_null(w);
	cluster_new(&w->c, 1, 1);
	cluster_store(&w->c, 0, &(struct cluster_store_args){.memory_bytes = 4 << 20});
	w->me = cluster_engine(&w->c, 0, "me");
	w->other = cluster_engine(&w->c, 0, "other");
	w->other->next_id = 1000; /* numbers that `me` does not have */
	w->mine = w->theirs = cluster_geometry;
	cluster_cache(&w->c, w->me, "kv", 0, &w->mine);
	cluster_cache(&w->c, w->other, "kv", 0, &w->theirs);
	w->other_space = open_space(w, w->other, &w->theirs, "m");
	w->space = open_space(w, w->me, &w->mine, "m");
	*state = w;
	return 0;
}

static int teardown(void **state)
{
	struct world *w = *state;

	cluster_free(&w->c);
	cache_close(&w->mine);
	cache_close(&w->theirs);
	free(w);
	return 0;
}

/* ---- what moves ---- */

static void chunks_put_by_entries_are_fetched(void **state)
{
	struct world *w = *state;
	struct kvd_ring_entry e = entry(KVD_RING_FIND, SLOT + 1, w->space);
	struct payload p = {0};

	memset(w->mine.base, 0x5a, w->mine.bytes);
	put(w, SLOT, 2);
	succeeds(w, SLOT);
	add_ids(&p, 1, 3);
	e.n0 = 3;
	give(w, e, &p);
	assert_int_equal(slot_read(w->me, SLOT + 1).total, 2);
	assert_int_equal(slot_read(w->me, SLOT + 1).bytes, 2 * T);
	assert_true(is_free(w, SLOT + 1));
	hold(w, SLOT + 2, 7, 2);
	assert_int_equal(state_of(w, SLOT + 2), KVD_SUCCESS);
	memset(w->mine.base, 0, w->mine.bytes);
	add_pages(&p, 8);
	give(w, fetch_entry(w, SLOT + 3, KVD_RING_IDS + SLOT + 2), &p);
	succeeds(w, SLOT + 3);
	assert_int_equal(*cache_at(&w->mine, 1, 1, 12, 3, 2, 5), 0x5a);
	assert_int_equal(*cache_at(&w->mine, 1, 1, 0, 3, 2, 5), 0);
	for (uint32_t i = 0; i < 4; i++)
		release(w, SLOT + i);
	cluster_run(&w->c, LOOP_NS_PER_MS);
	assert_int_equal(figures(w).holds + figures(w).moves, 0);
	for (uint32_t i = 0; i < 4; i++)
		assert_true(is_free(w, SLOT + i));
}

/* ---- whose a slot is ---- */

/* Released, and its rooms still run: the next entry in this slot would be another's. */
static void slot_is_a_moves_until_its_end(void **state)
{
	struct world *w = *state;
	struct kvd_ring_entry find = entry(KVD_RING_FIND, SLOT, w->space);

	put(w, SLOT, 2);
	cluster_run(&w->c, 1);
	release(w, SLOT);
	assert_int_equal(figures(w).moves, 1);
	release(w, SLOT);
	give(w, entry(KVD_RING_CLOSE, SLOT, 0), NULL);
	give(w, entry(KVD_RING_CANCEL, 0, KVD_RING_IDS + SLOT), NULL);
	assert_int_equal(figures(w).moves, 1);
	assert_false(is_free(w, SLOT));
	find.gen = 2;
	breaks(w, find, NULL);
	cluster_run(&w->c, 50 * LOOP_NS_PER_MS);
	assert_int_equal(figures(w).moves, 0);
	assert_true(is_free(w, SLOT));
	give(w, find, NULL);
}

/* The same where the socket closed it. */
static void move_closed_by_socket_keeps_its_slot(void **state)
{
	struct world *w = *state;

	put(w, SLOT, 2);
	cluster_run(&w->c, 1);
	cluster_ok(&w->c, w->me, "{'cmd':'chunk.close','move':%llu}",
		   (unsigned long long)KVD_RING_IDS + SLOT);
	release(w, SLOT);
	assert_int_equal(figures(w).moves, 1);
	assert_false(is_free(w, SLOT));
	cluster_run(&w->c, 50 * LOOP_NS_PER_MS);
	assert_true(is_free(w, SLOT));
}

/* Closing is of rooms, posting of transfers. */
static void slot_of_a_move_or_hold_is_no_rooms_and_no_transfers(void **state)
{
	struct world *w = *state;
	struct payload p = {0};
	struct kvd_ring_entry post = entry(KVD_RING_POST, 0, KVD_RING_IDS + SLOT);

	add_ids(&p, 1, 1);
	add_pages(&p, 4);
	add_wait(w, &p);
	give(w, put_entry(w, SLOT, 1), &p);
	hold(w, SLOT + 1, 7, 1);
	post.gen = 2;
	for (uint32_t slot = SLOT; slot < SLOT + 2; slot++) {
		uint64_t word = slot_read(w->me, slot).word;

		post.a = KVD_RING_IDS + slot;
		breaks(w, post, NULL);
		give(w, entry(KVD_RING_CLOSE, slot, 0), NULL);
		cluster_run(&w->c, LOOP_NS_PER_MS);
		assert_int_equal(slot_read(w->me, slot).word, word);
	}
	assert_int_equal(figures(w).holds, 1);
	assert_int_equal(figures(w).moves, 1);
	release(w, SLOT + 1);
	release(w, SLOT);
	cluster_run(&w->c, 50 * LOOP_NS_PER_MS);
	assert_int_equal(figures(w).holds + figures(w).moves, 0);
	assert_true(is_free(w, SLOT) && is_free(w, SLOT + 1));
}

/* A post of attention gives its slot back when it fails, and the text of its error is
 * kept: the object that has the slot next is released with it, once. */
static void hold_in_the_slot_of_a_failed_post_is_released(void **state)
{
	struct world *w = *state;
	struct ring *ring;

	hold(w, SLOT, 7, 1);
	ring = ring_of(w->me);
	(void)err_raise(ERR_REQUIRE, "of the post");
	ring_refuse(ring, SLOT, KVD_RING_IDS + SLOT);
	assert_non_null(ring_fault_of(ring, KVD_RING_IDS + SLOT));
	release(w, SLOT);
	cluster_run(&w->c, LOOP_NS_PER_MS);
	assert_null(ring_fault_of(ring, KVD_RING_IDS + SLOT));
	assert_int_equal(figures(w).holds, 0);
	assert_true(is_free(w, SLOT));
	ring_faults_free(ring); /* nothing that is freed is in the list */
}

/* ---- what no engine sends by mistake ---- */

struct forged {
	const char *name;
	enum kvd_ring_op op;
	uint32_t n0, bytes, n2, len;
	uint64_t offset;
};

static const struct forged forgeries[] = {
	{"ids over the cap", KVD_RING_FIND, 4097, 4097 * 32, 0, 4097 * 32, 0},
	{"ids times 32 past 2^32", KVD_RING_FIND, 1u << 27, 0, 0, 0, 0},
	{"ids times 32 past 2^32 and one", KVD_RING_FIND, (1u << 27) + 1, 32, 0, 32, 0},
	{"an id that is cut", KVD_RING_FIND, 2, 63, 0, 64, 0},
	{"a byte too many", KVD_RING_FIND, 2, 65, 0, 96, 0},
	{"more ids than said", KVD_RING_FIND, 1, 64, 0, 64, 0},
	{"behind the arena", KVD_RING_FIND, 1, 32, 0, 32, 1},
	{"far behind the arena", KVD_RING_FIND, 1, 32, 0, 32, UINT64_MAX - 31},
	{"a hold without a secret", KVD_RING_HOLD, 2, 64, 0, 64, 0},
	{"half a secret", KVD_RING_HOLD, 0, 8, 0, 16, 0},
	{"a hold past 2^32", KVD_RING_HOLD, 1u << 27, 16, 0, 16, 0},
	{"a hold of an id that is cut", KVD_RING_HOLD, 1, 47, 0, 48, 0},
	{"a put of more ids than bytes", KVD_RING_PUT, 3, 64, 0, 64, 0},
	{"a put of ids in its text", KVD_RING_PUT, 2, 64, 1, 64, 0},
	{"a put of text beyond it", KVD_RING_PUT, 1, 64, 65, 64, 0},
	{"a put of ids over the cap", KVD_RING_PUT, 4097, 4097 * 32, 0, 4097 * 32, 0},
	{"a put past 2^32", KVD_RING_PUT, 1u << 27, 32, 0, 32, 0},
	{"a put behind the arena", KVD_RING_PUT, 1, 64, 0, 64, 64},
	{"a fetch of text beyond it", KVD_RING_FETCH, 0, 64, UINT32_MAX, 64, 0},
	{"a fetch behind the arena", KVD_RING_FETCH, 0, 1 << 20, 0, 64, 0},
};

static void forged_lengths_break_the_protocol(void **state)
{
	struct world *w = *state;

	for (size_t i = 0; i < ARRAY_LEN(forgeries); i++) {
		const struct forged *f = &forgeries[i];
		struct kvd_ring_entry e = entry(f->op, SLOT, w->space);
		struct payload p = {0};
		uint8_t *bytes = calloc(1, f->len + 1);

		print_message("%s\n", f->name);
		payload_add(&p, bytes, f->len);
		free(bytes);
		p.views = p.len;
		e.b = f->op == KVD_RING_HOLD ? LEASE_MS : w->mine.pool;
		e.n0 = f->n0;
		e.n2 = f->n2;
		e.offset = f->offset;
		e.bytes = f->bytes;
		if (e.bytes == 0) { /* else the payload's length is taken */
			free(p.bytes);
			p = (struct payload){0};
		}
		breaks(w, e, &p);
	}
	/* nothing was claimed */
	give(w, entry(KVD_RING_FIND, SLOT, w->space), NULL);
}

static void slots_of_others_violate_the_protocol(void **state)
{
	struct world *w = *state;
	static const enum kvd_ring_op ops[] = {KVD_RING_FIND, KVD_RING_PUT,
					       KVD_RING_FETCH};

	hold(w, SLOT, 7, 1);
	for (size_t i = 0; i < ARRAY_LEN(ops); i++) {
		struct kvd_ring_entry e = entry(ops[i], SLOT, w->space);

		e.gen = 2; /* in use */
		breaks(w, e, NULL);
		e.slot = SLOT + 1; /* does not follow */
		breaks(w, e, NULL);
		e.gen = 1;
		e.slot = 5; /* the daemon's */
		breaks(w, e, NULL);
		e.slot = SESSION_SLOTS + SESSION_ENGINE_SLOTS;
		breaks(w, e, NULL);
		e.slot = UINT32_MAX;
		breaks(w, e, NULL);
	}
	assert_int_equal(figures(w).holds, 1);
}

/* ---- what is refused ---- */

static void find_is_refused(struct world *w, uint64_t space, uint64_t first,
			    uint32_t slot, enum err_code code)
{
	struct kvd_ring_entry e = entry(KVD_RING_FIND, slot, space);
	struct payload p = {0};

	add_ids(&p, 1, 2);
	e.n0 = 2;
	e.c = first;
	give(w, e, &p);
	failed_with(w, slot, code);
}

static void object_of_other_session_is_not_found(void **state)
{
	struct world *w = *state;
	struct kvd_ring_entry e = put_entry(w, SLOT + 1, 1);
	struct payload p = {0};

	find_is_refused(w, w->other_space, 0, SLOT, ERR_NOTFOUND);
	e.a = w->other_space;
	add_ids(&p, 1, 1);
	add_pages(&p, 4);
	give(w, e, &p);
	failed_with(w, SLOT + 1, ERR_NOTFOUND);
	e = put_entry(w, SLOT + 2, 1);
	e.b = w->theirs.pool;
	add_ids(&p, 1, 1);
	add_pages(&p, 4);
	give(w, e, &p);
	failed_with(w, SLOT + 2, ERR_NOTFOUND);
	/* a hold of the other's, by its number */
	put(w, SLOT + 3, 1);
	succeeds(w, SLOT + 3);
	hold(w, SLOT + 4, 7, 1);
	e = fetch_entry(w, SLOT + 4, KVD_RING_IDS + SLOT + 4);
	e.b = w->theirs.pool;
	add_pages(&p, 4);
	entry_give(&w->c, w->other, &e, &p);
	assert_int_equal(kvd_word_error(slot_read(w->other, SLOT + 4).word),
			 ERR_NOTFOUND);
	e = entry(KVD_RING_RELEASE, 0, KVD_RING_IDS + SLOT + 4);
	entry_give(&w->c, w->other, &e, NULL);
	assert_int_equal(figures(w).holds, 1);
	assert_false(is_free(w, SLOT + 4));
}

static void hold_is_refused(struct world *w, uint32_t slot, uint64_t lease_ms,
			    uint8_t secret, uint32_t count, enum err_code code)
{
	struct kvd_ring_entry e = entry(KVD_RING_HOLD, slot, w->space);
	struct payload p = {0};

	add_secret(&p, secret);
	add_ids(&p, 1, count);
	e.n0 = count;
	e.b = lease_ms;
	give(w, e, &p);
	failed_with(w, slot, code);
}

static void holds_invalid_are_refused(void **state)
{
	struct world *w = *state;

	hold(w, SLOT, 7, 1);
	hold_is_refused(w, SLOT + 1, LEASE_MS, 7, 1, ERR_EXIST);
	hold_is_refused(w, SLOT + 2, LEASE_MS, 8, 0, ERR_NOTFOUND);
	hold_is_refused(w, SLOT + 3, 0, 9, 1, ERR_RANGE);
	hold_is_refused(w, SLOT + 4, STORE_LEASE_MS_MAX + 1, 9, 1, ERR_RANGE);
	hold_is_refused(w, SLOT + 5, UINT64_MAX / LOOP_NS_PER_MS + 2, 9, 1, ERR_RANGE);
	hold(w, SLOT + 6, 7, 0); /* joins */
	assert_int_equal(figures(w).holds, 2);
	cluster_run(&w->c, 2 * LEASE_MS * LOOP_NS_PER_MS);
	hold_is_refused(w, SLOT + 7, LEASE_MS, 7, 0, ERR_LEASE);
	release(w, SLOT);
	release(w, SLOT + 6);
	assert_int_equal(figures(w).holds, 0);
}

static void numbers_past_all_prompts_are_refused(void **state)
{
	struct world *w = *state;
	static const uint64_t firsts[] = {UINT64_C(1) << 32, UINT64_MAX,
					  UINT64_MAX / T + 1};
	struct kvd_ring_entry e;
	struct payload p = {0};

	for (uint32_t i = 0; i < ARRAY_LEN(firsts); i++) {
		find_is_refused(w, w->space, firsts[i], SLOT + 2 * i, ERR_RANGE);
		e = put_entry(w, SLOT + 2 * i + 1, 1);
		e.c = firsts[i];
		add_ids(&p, 1, 1);
		payload_view(&p, "kv", pages, 4)->first_token = firsts[i] * T;
		give(w, e, &p);
		failed_with(w, SLOT + 2 * i + 1, ERR_RANGE);
	}
	put(w, SLOT + 8, 1);
	succeeds(w, SLOT + 8);
	hold(w, SLOT + 9, 7, 1);
	e = fetch_entry(w, SLOT + 10, KVD_RING_IDS + SLOT + 9);
	e.c = UINT64_C(1) << 32;
	add_pages(&p, 4);
	give(w, e, &p);
	failed_with(w, SLOT + 10, ERR_RANGE);
	e.slot = SLOT + 11;
	e.c = 0;
	payload_view(&p, "kv", pages, 4)->first_token = UINT64_MAX - 15;
	give(w, e, &p);
	failed_with(w, SLOT + 11, ERR_RANGE);
	e.slot = SLOT + 12; /* more than is held */
	add_pages(&p, 5);
	give(w, e, &p);
	failed_with(w, SLOT + 12, ERR_RANGE);
}

/* An id twice; ids of another place; none; what the daemon does not have. */
static void puts_invalid_are_refused(void **state)
{
	struct world *w = *state;
	struct kvd_ring_entry e = put_entry(w, SLOT, 2);
	struct payload p = {0};

	add_ids(&p, 1, 1);
	add_ids(&p, 1, 1);
	add_pages(&p, 8);
	give(w, e, &p);
	failed_with(w, SLOT, ERR_EXIST);
	e = put_entry(w, SLOT + 1, 0);
	add_pages(&p, 4);
	give(w, e, &p);
	failed_with(w, SLOT + 1, ERR_RANGE);
	e = put_entry(w, SLOT + 2, 2); /* tokens of one */
	add_ids(&p, 1, 2);
	add_pages(&p, 4);
	give(w, e, &p);
	failed_with(w, SLOT + 2, ERR_RANGE);
	e = put_entry(w, SLOT + 3, 1);
	e.flags = KVD_RING_DURABLE;
	add_ids(&p, 1, 1);
	add_pages(&p, 4);
	give(w, e, &p);
	failed_with(w, SLOT + 3, ERR_STATE);
	e = put_entry(w, SLOT + 4, 1);
	add_ids(&p, 1, 1);
	payload_view(&p, "kv", pages, 4)->layer_end = 1;
	give(w, e, &p);
	failed_with(w, SLOT + 4, ERR_INVAL);
	e = put_entry(w, SLOT + 5, 1);
	add_ids(&p, 1, 1);
	payload_view(&p, "kv", pages, 4)->page_count = UINT32_MAX;
	give(w, e, &p);
	failed_with(w, SLOT + 5, ERR_RANGE);
	assert_int_equal(figures(w).chunks, 0);
	assert_int_equal(figures(w).moves, 0);
}

/* ---- while a helper reads ---- */

#define MANY 300u /* ids: more than a turn reads */

/* A put, and a fetch of a hold that is in SLOT, both long, then `what`. */
static void while_a_helper_reads(struct world *w, const char *what, uint64_t number)
{
	struct offload *offload = w->c.nodes[0].kvd.offload;
	uint32_t long_list[4 * MANY] = {0};
	struct payload p = {0};

	offload_hold(offload, true);
	add_ids(&p, 1, MANY);
	payload_view(&p, "kv", long_list, 4 * MANY);
	give(w, put_entry(w, SLOT + 2, MANY), &p);
	assert_non_null(ring_of(w->me)->work);
	if (what)
		cluster_ok(&w->c, w->me, what, (unsigned long long)number);
	else
		cluster_engine_dies(&w->c, w->me);
	offload_hold(offload, false);
	cluster_run(&w->c, LOOP_NS_PER_S);
}

static void space_closed_during_read_is_not_found(void **state)
{
	struct world *w = *state;

	while_a_helper_reads(w, "{'cmd':'space.close','space':%llu}", w->space);
	failed_with(w, SLOT + 2, ERR_NOTFOUND);
	assert_int_equal(figures(w).chunks, 0);
}

static void engine_dead_during_read_leaks_nothing(void **state)
{
	struct world *w = *state;

	while_a_helper_reads(w, NULL, 0);
	assert_int_equal(figures(w).chunks + figures(w).moves, 0);
	w->me = cluster_engine(&w->c, 0, "me");
}

/* ---- an engine that ends ---- */

static void session_end_frees_everything(void **state)
{
	struct world *w = *state;
	struct payload p = {0};

	put(w, SLOT, 1);
	succeeds(w, SLOT);
	hold(w, SLOT + 1, 7, 1);
	add_pages(&p, 4);
	give(w, fetch_entry(w, SLOT + 2, KVD_RING_IDS + SLOT + 1), &p);
	add_ids(&p, 5, 1);
	add_pages(&p, 4);
	add_wait(w, &p);
	give(w, put_entry(w, SLOT + 3, 1), &p);
	release(w, SLOT + 1); /* under the fetch */
	release(w, SLOT + 2);
	cluster_engine_dies(&w->c, w->me);
	cluster_run(&w->c, LOOP_NS_PER_S);
	assert_int_equal(figures(w).holds + figures(w).moves, 0);
	assert_int_equal(figures(w).chunks, 1);
	w->me = cluster_engine(&w->c, 0, "me");
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(chunks_put_by_entries_are_fetched),
		CASE(slot_is_a_moves_until_its_end),
		CASE(move_closed_by_socket_keeps_its_slot),
		CASE(slot_of_a_move_or_hold_is_no_rooms_and_no_transfers),
		CASE(hold_in_the_slot_of_a_failed_post_is_released),
		CASE(forged_lengths_break_the_protocol),
		CASE(slots_of_others_violate_the_protocol),
		CASE(object_of_other_session_is_not_found),
		CASE(holds_invalid_are_refused),
		CASE(numbers_past_all_prompts_are_refused),
		CASE(puts_invalid_are_refused),
		CASE(space_closed_during_read_is_not_found),
		CASE(engine_dead_during_read_leaks_nothing),
		CASE(session_end_frees_everything),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("ring_chunk", tests, NULL, NULL);
}
