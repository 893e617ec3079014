/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms by entries of the submission ring, given by the socket (xfer.submit) between two
 * daemons in virtual time: what they move, what is refused and where that shows, and that
 * an entry of a room that is gone does nothing. integration/live_ring.c has the ring
 * itself.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/room/rooms.h"
#include "daemon/session/pool.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "daemon/request/ring.h"
#include "proto/kvd_ring.h"
#include "tests/lib/accounts.h"
#include "tests/lib/ring_entries.h"
#include "tests/lib/room_pair.h"

struct until {
	const struct session *session;
	uint32_t slot;
	unsigned int state;
};

static bool is_there(void *arg)
{
	const struct until *u = arg;

	return kvd_word_state(slot_read(u->session, u->slot).word) == u->state;
}

static void until(struct room_pair *p, const struct session *session, uint32_t slot,
		  unsigned int state)
{
	struct until u = {session, slot, state};

	cluster_until(&p->c, is_there, &u, "the slot's state");
}

static void failed_with(struct room_pair *p, const struct session *session, uint32_t slot,
			enum err_code code)
{
	until(p, session, slot, KVD_FAILED);
	assert_int_equal(kvd_word_error(slot_read(session, slot).word), code);
}

#define TX SESSION_SLOTS
#define RX SESSION_SLOTS

static struct kvd_ring_entry entry(enum kvd_ring_op op, uint32_t slot, uint32_t gen)
{
	return (struct kvd_ring_entry){.op = op, .slot = slot, .gen = gen};
}

static void open_tx(struct room_pair *p, uint64_t number, uint32_t slot, uint32_t gen)
{
	struct kvd_ring_entry e = entry(KVD_RING_OPEN, slot, gen);
	struct payload text = {0};

	e.a = number;
	e.b = p->src.pool;
	payload_text(&text, "{'room':'%llu','role':'send','pool':%llu}",
		     (unsigned long long)number, (unsigned long long)p->src.pool);
	entry_give(&p->c, p->prefill, &e, &text);
}

static void open_rx(struct room_pair *p, uint64_t number, uint32_t slot, uint32_t gen)
{
	struct kvd_ring_entry e = entry(KVD_RING_OPEN, slot, gen);
	struct payload text = {0};

	e.a = number;
	e.b = p->dst.pool;
	payload_text(&text, "{'room':'%llu','role':'recv','pool':%llu,'sources':['%s']}",
		     (unsigned long long)number, (unsigned long long)p->dst.pool,
		     p->c.nodes[0].endpoint);
	entry_give(&p->c, p->decode, &e, &text);
}

static void close_tx(struct room_pair *p, uint32_t slot)
{
	struct kvd_ring_entry e = entry(KVD_RING_CLOSE, slot, 1);

	entry_give(&p->c, p->prefill, &e, NULL);
}

static const uint32_t rx_pages[] = {7, 2, 8, 12}, tx_pages[] = {3, 4, 9, 1};

static cJSON *say_bind(struct room_pair *p, uint32_t slot, uint32_t gen)
{
	struct kvd_ring_entry e = entry(KVD_RING_BIND, slot, gen);
	struct payload views = {0};

	payload_view(&views, "kv", rx_pages, 4)->token_end = 14;
	e.flags = KVD_RING_AUX;
	e.c = 2;
	return entry_say(&p->c, p->decode, &e, &views);
}

static void bind_rx(struct room_pair *p, uint32_t slot, uint32_t gen)
{
	cJSON *answer = say_bind(p, slot, gen);

	assert_true(cJSON_HasObjectItem(answer, "ok"));
	cJSON_Delete(answer);
}

static void send_tx(struct room_pair *p, uint32_t slot, uint32_t gen, uint64_t seq)
{
	struct kvd_ring_entry e = entry(KVD_RING_SEND, slot, gen);
	struct payload views = {0};
	struct kvd_ring_view *view = payload_view(&views, "kv", tx_pages + 2 * seq, 2);

	view->first_token = 8 * seq;
	view->token_begin = 8 * seq;
	view->token_end = seq ? 14 : 8;
	e.b = seq;
	e.flags = seq ? KVD_RING_LAST | KVD_RING_AUX : 0;
	e.c = 1;
	entry_give(&p->c, p->prefill, &e, &views);
}

static uint8_t *page_of(struct cache *k, unsigned int layer, unsigned int page)
{
	return cache_at(k, layer, 0, page, 0, 0, 0);
}

/* ---- what moves ---- */

static void room_by_entries_moves_its_bytes(void **state)
{
	struct room_pair *p = *state;

	memset(page_of(&p->src, 1, 9), 77, 32);
	memcpy(cache_aux(&p->src, 1), "aux", 3);
	open_tx(p, 42, TX, 1);
	assert_int_equal(kvd_word_gen(slot_read(p->prefill, TX).word), 1);
	open_rx(p, 42, RX, 1);
	bind_rx(p, RX, 1);
	until(p, p->prefill, TX, KVD_WAITING_FOR_INPUT);
	assert_int_equal(slot_read(p->prefill, TX).object, 42);
	send_tx(p, TX, 1, 0);
	send_tx(p, TX, 1, 0); /* a retry is one chunk */
	send_tx(p, TX, 1, 1);
	until(p, p->decode, RX, KVD_SUCCESS);
	until(p, p->prefill, TX, KVD_SUCCESS);
	assert_memory_equal(page_of(&p->dst, 1, 8), page_of(&p->src, 1, 9), 32);
	assert_memory_equal(cache_aux(&p->dst, 2), "aux", 3);
	assert_int_equal(kvd_more_done(slot_read(p->prefill, TX).more), 2);
	close_tx(p, TX);
	assert_true(kvd_word_flags(slot_read(p->prefill, TX).word) & KVD_FLAG_FREE);
	/* the same slot again, under the next generation */
	open_tx(p, 42, TX, 2);
	assert_int_equal(kvd_word_state(slot_read(p->prefill, TX).word),
			 KVD_BOOTSTRAPPING);
}

/* Rooms of commands are named by their slots, too; and those of entries by number. */
static void entries_and_commands_name_the_same_rooms(void **state)
{
	struct room_pair *p = *state;
	const struct room *tx;

	room_pair_open_send(p, 5);
	tx = rooms_find(rooms_of(&p->c.nodes[0].kvd), p->prefill, ROOM_SEND, 5);
	open_rx(p, 5, RX, 1);
	cluster_ok(&p->c, p->decode,
		   "{'cmd':'room.bind','room':'5','aux':2,'views':{'kv':{'pages':"
		   "[7,2,8,12],'tokens':[0,14]}}}");
	cluster_until_state(&p->c, p->prefill, "send", 5, KVD_WAITING_FOR_INPUT);
	send_tx(p, tx->slot, tx->slot_gen, 0);
	send_tx(p, tx->slot, tx->slot_gen, 1);
	until(p, p->decode, RX, KVD_SUCCESS);
	cluster_until_state(&p->c, p->prefill, "send", 5, KVD_SUCCESS);
	cluster_ok(&p->c, p->decode, "{'cmd':'room.close','room':'5'}");
	assert_true(kvd_word_flags(slot_read(p->decode, RX).word) & KVD_FLAG_FREE);
}

static void offer_and_pull_open_with_views_in_binary(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e = entry(KVD_RING_OPEN, TX, 1);
	struct payload payload = {0};

	memset(page_of(&p->src, 0, 3), 55, 32);
	e.a = 6;
	e.b = p->src.pool;
	payload_view(&payload, "kv", tx_pages, 4);
	payload_text(&payload, "{'room':'6','role':'offer','pool':%llu,'aux':1}",
		     (unsigned long long)p->src.pool);
	entry_give(&p->c, p->prefill, &e, &payload);
	e.b = p->dst.pool;
	payload_view(&payload, "kv", rx_pages, 4);
	payload_text(&payload,
		     "{'room':'6','role':'pull','pool':%llu,'aux':2,'sources':['%s']}",
		     (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
	entry_give(&p->c, p->decode, &e, &payload);
	until(p, p->decode, RX, KVD_SUCCESS);
	until(p, p->prefill, TX, KVD_SUCCESS);
	assert_memory_equal(page_of(&p->dst, 0, 7), page_of(&p->src, 0, 3), 32);
}

/* As a decode engine whose queue is long: the pages come when there is room for them, and
 * the lease is extended meanwhile. */
static void pull_without_pages_is_bound_later(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e = entry(KVD_RING_OPEN, TX, 1);
	struct payload payload = {0};

	memset(page_of(&p->src, 0, 3), 56, 32);
	e.a = 60;
	e.b = p->src.pool;
	payload_view(&payload, "kv", tx_pages, 4);
	payload_text(&payload, "{'room':'60','role':'offer','pool':%llu,'lease_ms':100}",
		     (unsigned long long)p->src.pool);
	entry_give(&p->c, p->prefill, &e, &payload);
	e = entry(KVD_RING_EXTEND, TX, 1);
	e.c = 20000;
	entry_give(&p->c, p->prefill, &e, NULL);
	cluster_run(&p->c, LOOP_NS_PER_S);
	e = entry(KVD_RING_OPEN, RX, 1);
	e.a = 60;
	e.b = p->dst.pool;
	payload_text(&payload, "{'room':'60','role':'pull','pool':%llu,'sources':['%s']}",
		     (unsigned long long)p->dst.pool, p->c.nodes[0].endpoint);
	entry_give(&p->c, p->decode, &e, &payload);
	until(p, p->decode, RX, KVD_WAITING_FOR_INPUT);
	e = entry(KVD_RING_BIND, RX, 1);
	payload_view(&payload, "kv", rx_pages, 4);
	entry_give(&p->c, p->decode, &e, &payload);
	until(p, p->decode, RX, KVD_SUCCESS);
	assert_memory_equal(page_of(&p->dst, 0, 7), page_of(&p->src, 0, 3), 32);
	e = entry(KVD_RING_EXTEND, RX, 1); /* no offer; it is over, and stays so */
	entry_give(&p->c, p->decode, &e, NULL);
	open_tx(p, 61, TX + 1, 1);
	e = entry(KVD_RING_EXTEND, TX + 1, 1);
	e.c = 1000;
	entry_give(&p->c, p->prefill, &e, NULL);
	failed_with(p, p->prefill, TX + 1, ERR_STATE);
}

/* More than a turn's worth is read on a helper; the ring waits for it. */
static void long_list_is_read_on_a_helper(void **state)
{
	struct room_pair *p = *state;
	struct offload *offload = p->c.nodes[1].kvd.offload;
	struct kvd_ring_entry e = entry(KVD_RING_BIND, RX, 1);
	struct payload views = {0};
	uint32_t pages[4096] = {0};

	open_rx(p, 7, RX, 1);
	payload_view(&views, "kv", pages, 4096); /* page 0 again and again */
	offload_hold(offload, true);
	entry_give(&p->c, p->decode, &e, &views);
	assert_non_null(ring_of(p->decode)->work);
	cluster_run(&p->c, LOOP_NS_PER_MS);
	assert_int_not_equal(kvd_word_state(slot_read(p->decode, RX).word), KVD_FAILED);
	offload_hold(offload, false);
	failed_with(p, p->decode, RX, ERR_DUP);
	assert_null(ring_of(p->decode)->work);
}

/* Its session ends while a helper reads: nothing is left (cluster_free() looks). */
static void engine_dead_during_read_leaks_nothing(void **state)
{
	struct room_pair *p = *state;
	struct offload *offload = p->c.nodes[1].kvd.offload;
	struct kvd_ring_entry e = entry(KVD_RING_BIND, RX, 1);
	struct payload payload = {0};
	uint32_t pages[4096] = {0};

	open_rx(p, 8, RX, 1);
	offload_hold(offload, true);
	payload_view(&payload, "kv", pages, 4096);
	entry_give(&p->c, p->decode, &e, &payload);
	cluster_engine_dies(&p->c, p->decode);
	cluster_run(&p->c, LOOP_NS_PER_S);
	offload_hold(offload, false);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(rooms_count(rooms_of(&p->c.nodes[1].kvd)), 0);
	assert_int_equal(p->c.nodes[1].kvd.session_count, 0);
}

/* The same of an opening: no room comes of it. */
static void engine_dead_during_open_leaks_nothing(void **state)
{
	struct room_pair *p = *state;
	struct offload *offload = p->c.nodes[0].kvd.offload;
	struct kvd_ring_entry e = entry(KVD_RING_OPEN, TX, 1);
	struct payload payload = {0};
	uint32_t pages[4096] = {0};

	e.a = 8;
	e.b = p->src.pool;
	payload_view(&payload, "kv", pages, 4096);
	payload_text(&payload, "{'room':'8','role':'offer','pool':%llu}",
		     (unsigned long long)p->src.pool);
	offload_hold(offload, true);
	entry_give(&p->c, p->prefill, &e, &payload);
	cluster_engine_dies(&p->c, p->prefill);
	offload_hold(offload, false);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(rooms_count(rooms_of(&p->c.nodes[0].kvd)), 0);
	assert_int_equal(p->c.nodes[0].kvd.session_count, 0);
}

/* ---- refusals ---- */

static void open_refused_fails_its_slot_with_reason(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e = entry(KVD_RING_OPEN, TX + 1, 1);
	struct payload text = {0};
	cJSON *answer;

	open_tx(p, 9, TX, 1);
	open_tx(p, 9, TX + 1, 1);
	failed_with(p, p->prefill, TX + 1, ERR_EXIST);
	answer = cluster_call(&p->c, p->prefill,
			      "{'cmd':'room.show','room':'9','slot':%u}", TX + 1);
	assert_string_equal(
		cJSON_GetObjectItem(cJSON_GetObjectItem(answer, "error"), "message")
			->valuestring,
		"room 9 (send) is open already");
	cJSON_Delete(answer);
	cluster_ok(&p->c, p->prefill, "{'cmd':'room.show','room':'9','slot':%u}", TX);
	cluster_refused(&p->c, p->prefill, "ENOTFOUND",
			"{'cmd':'room.show','room':'9','slot':%u}", TX + 2);
	/* what waits for it is late */
	send_tx(p, TX + 1, 1, 0);
	close_tx(p, TX + 1);
	assert_true(kvd_word_flags(slot_read(p->prefill, TX + 1).word) & KVD_FLAG_FREE);
	e.gen = 2;
	e.a = 10;
	e.b = p->src.pool + 100;
	payload_text(&text, "{'room':'10','role':'send','pool':%llu}",
		     (unsigned long long)p->src.pool);
	entry_give(&p->c, p->prefill, &e, &text);
	failed_with(p, p->prefill, TX + 1, ERR_NOTFOUND);
	e.slot++;
	e.gen = 1;
	e.b = p->src.pool;
	payload_text(&text, "{'room':'10','role':'send','pool':%llu,'rolle':1}",
		     (unsigned long long)p->src.pool);
	entry_give(&p->c, p->prefill, &e, &text);
	failed_with(p, p->prefill, TX + 2, ERR_INVAL);
	e.slot++;
	payload_text(&text, "[1]");
	entry_give(&p->c, p->prefill, &e, &text);
	failed_with(p, p->prefill, TX + 3, ERR_INVAL);
	e.slot++;
	entry_give(&p->c, p->prefill, &e, NULL);
	failed_with(p, p->prefill, TX + 4, ERR_PROTO); /* no JSON */
	e.slot++;
	payload_text(&text, "{'room':'99','role':'send','pool':%llu}",
		     (unsigned long long)p->src.pool);
	entry_give(&p->c, p->prefill, &e, &text);
	failed_with(p, p->prefill, TX + 5, ERR_INVAL); /* not what the entry says */
	/* an opening that fails after its room is made keeps the slot */
	e.slot++;
	e.a = 11;
	payload_text(&text,
		     "{'room':'11','role':'recv','pool':%llu,'sources':['nowhere']}",
		     (unsigned long long)p->src.pool);
	entry_give(&p->c, p->prefill, &e, &text);
	failed_with(p, p->prefill, TX + 6, ERR_INVAL);
	assert_false(kvd_word_flags(slot_read(p->prefill, TX + 6).word) & KVD_FLAG_FREE);
	entry_give(&p->c, p->prefill,
		   &(struct kvd_ring_entry){.op = KVD_RING_RELEASE,
					    .a = KVD_RING_IDS + TX + 6},
		   NULL);
	assert_true(kvd_word_flags(slot_read(p->prefill, TX + 6).word) & KVD_FLAG_FREE);
	assert_int_equal(rooms_count(rooms_of(&p->c.nodes[0].kvd)), 1);
}

struct wrong {
	const char *name;
	enum err_code code;
	void (*make)(struct payload *p, struct kvd_ring_entry *e);
};

#define MAKE(name)                          \
	static void name(struct payload *p, \
			 struct kvd_ring_entry *e __attribute__((unused)))

MAKE(short_head)
{
	payload_view(p, "kv", rx_pages, 1);
	e->bytes = 64;
	e->n1 = 1;
}
MAKE(pages_beyond)
{
	payload_view(p, "kv", rx_pages, 2)->page_count = 3;
}
MAKE(pages_beyond_all)
{
	payload_view(p, "kv", rx_pages, 2)->page_count = UINT32_MAX;
}
MAKE(bytes_behind)
{
	payload_view(p, "kv", rx_pages, 2);
	payload_view(p, "kv", rx_pages, 2);
	e->n1 = 1;
}
MAKE(twice)
{
	payload_view(p, "kv", rx_pages, 2);
	payload_view(p, "kv", rx_pages + 2, 2);
}
MAKE(unknown_view)
{
	payload_view(p, "kw", rx_pages, 2);
}
MAKE(endless_name)
{
	memset(payload_view(p, "kv", rx_pages, 2)->name, 'k', 32);
}
MAKE(selected)
{
	const uint32_t select[] = {3, 4};

	payload_view(p, "kv", rx_pages, 2)->select_count = 2;
	payload_add(p, select, sizeof(select));
	p->views = p->len;
}
MAKE(selection_cut_off)
{
	payload_view(p, "kv", rx_pages, 2)->select_count = 1;
}
MAKE(selection_endless)
{
	payload_view(p, "kv", rx_pages, 2)->select_count = UINT32_MAX;
}
MAKE(page_outside)
{
	const uint32_t pages[] = {3, 4000000000u};

	payload_view(p, "kv", pages, 2);
}
MAKE(page_twice)
{
	const uint32_t pages[] = {3, 3};

	payload_view(p, "kv", pages, 2);
}
MAKE(tokens_outside)
{
	payload_view(p, "kv", rx_pages, 2)->token_end = 9;
}
MAKE(tokens_past_the_end)
{
	payload_view(p, "kv", rx_pages, 2)->first_token = UINT64_MAX - 3;
}
MAKE(layers_backwards)
{
	payload_view(p, "kv", rx_pages, 2)->layer_begin = 3;
}
MAKE(aux_outside)
{
	payload_view(p, "kv", rx_pages, 2);
	e->flags = KVD_RING_AUX;
	e->c = 1000;
}
MAKE(aux_far_outside)
{
	payload_view(p, "kv", rx_pages, 2);
	e->flags = KVD_RING_AUX;
	e->c = UINT64_C(1) << 33;
}
MAKE(many_views)
{
	payload_view(p, "kv", rx_pages, 2);
	e->n1 = 65;
}
MAKE(wait_of_no_region)
{
	payload_view(p, "kv", rx_pages, 2);
	payload_text(p, "{'kind':'seq','region':999,'offset':0,'value':1}");
}
MAKE(text_of_no_json)
{
	payload_view(p, "kv", rx_pages, 2);
	payload_text(p, "{");
}

static const struct wrong wrongs[] = {
	{"a head that is cut", ERR_RANGE, short_head},
	{"pages behind the end", ERR_RANGE, pages_beyond},
	{"pages without end", ERR_RANGE, pages_beyond_all},
	{"bytes after the last view", ERR_RANGE, bytes_behind},
	{"a view twice", ERR_INVAL, twice},
	{"a view of no pool", ERR_NOTFOUND, unknown_view},
	{"a name without an end", ERR_INVAL, endless_name},
	{"a selection", ERR_INVAL, selected},
	{"a selection that is cut off", ERR_RANGE, selection_cut_off},
	{"a selection without end", ERR_RANGE, selection_endless},
	{"a page outside", ERR_RANGE, page_outside},
	{"a page twice", ERR_DUP, page_twice},
	{"tokens outside", ERR_RANGE, tokens_outside},
	{"tokens past 2^64", ERR_RANGE, tokens_past_the_end},
	{"layers backwards", ERR_INVAL, layers_backwards},
	{"an aux slot outside", ERR_RANGE, aux_outside},
	{"an aux slot far outside", ERR_RANGE, aux_far_outside},
	{"views over the cap", ERR_LIMIT, many_views},
	{"a wait for no region", ERR_NOTFOUND, wait_of_no_region},
	{"a wait of no JSON", ERR_PROTO, text_of_no_json},
};

static void refused_pages_fail_the_room(void **state)
{
	struct room_pair *p = *state;

	for (size_t i = 0; i < ARRAY_LEN(wrongs); i++) {
		uint32_t slot = RX + (uint32_t)i;
		struct kvd_ring_entry e = entry(KVD_RING_BIND, slot, 1);
		struct payload payload = {0};
		uint64_t before;

		print_message("%s\n", wrongs[i].name);
		open_rx(p, 100 + i, slot, 1);
		before = p->decode->account->bytes[ACCOUNT_PAGES];
		wrongs[i].make(&payload, &e);
		entry_give(&p->c, p->decode, &e, &payload);
		failed_with(p, p->decode, slot, wrongs[i].code);
		assert_int_equal(p->decode->account->bytes[ACCOUNT_PAGES], before);
		e = entry(KVD_RING_CLOSE, slot, 1);
		entry_give(&p->c, p->decode, &e, NULL);
	}
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(rooms_count(rooms_of(&p->c.nodes[1].kvd)), 0);
}

static void pages_over_the_account_fail_the_room_unread(void **state)
{
	struct room_pair *p = *state;
	struct charge filler = {0};
	struct kvd_ring_entry e = entry(KVD_RING_BIND, RX, 1);
	struct payload views = {0};

	open_rx(p, 11, RX, 1);
	payload_view(&views, "kv", rx_pages, 4);
	account_leave(p->decode->account, 64, &filler);
	entry_give(&p->c, p->decode, &e, &views);
	charge_drop(&filler);
	failed_with(p, p->decode, RX, ERR_LIMIT);
}

static void entry_for_another_role_fails_the_room(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e = entry(KVD_RING_BIND, TX, 1);
	struct payload views = {0};

	open_tx(p, 12, TX, 1);
	payload_view(&views, "kv", tx_pages, 4);
	entry_give(&p->c, p->prefill, &e, &views);
	failed_with(p, p->prefill, TX, ERR_STATE);
}

static void entries_invalid_violate_the_protocol(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e;
	struct payload text = {0};

	open_tx(p, 13, TX, 1);
	e = entry(KVD_RING_OPEN, TX, 2); /* in use */
	e.b = p->src.pool;
	payload_text(&text, "{}");
	entry_breaks(&p->c, p->prefill, &e, &text);
	e = entry(KVD_RING_OPEN, 5, 1); /* the daemon's */
	entry_breaks(&p->c, p->prefill, &e, NULL);
	e = entry(KVD_RING_OPEN, TX + 1, 3); /* does not follow */
	entry_breaks(&p->c, p->prefill, &e, NULL);
	e = entry(KVD_RING_LIST, TX, 2);
	e.n1 = 2;
	entry_breaks(&p->c, p->prefill, &e, NULL);
	e = entry(KVD_RING_POST, TX, 2); /* a room is no transfer */
	e.a = KVD_RING_IDS + TX;
	entry_breaks(&p->c, p->prefill, &e, NULL);
	e = entry(KVD_RING_SEND, SESSION_SLOTS + SESSION_ENGINE_SLOTS, 1);
	entry_breaks(&p->c, p->prefill, &e, NULL);
	e = entry(KVD_RING_CLOSE, UINT32_MAX, 1);
	entry_breaks(&p->c, p->prefill, &e, NULL);
	e = entry(KVD_RING_SEND, TX, 1);
	e.n2 = 9; /* text beyond its bytes */
	entry_breaks(&p->c, p->prefill, &e, NULL);
	e = entry(KVD_RING_SEND, TX, 1);
	e.bytes = 64; /* outside of the arena */
	entry_breaks(&p->c, p->prefill, &e, NULL);
	e = entry(13, TX, 1);
	entry_breaks(&p->c, p->prefill, &e, NULL);
	assert_int_equal(kvd_word_state(slot_read(p->prefill, TX).word),
			 KVD_BOOTSTRAPPING);
}

/* ---- late ---- */

static void entries_of_closed_room_are_ignored(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e;
	uint64_t word;

	open_tx(p, 14, TX, 1);
	send_tx(p, TX, 7, 0);	  /* of another generation */
	send_tx(p, TX + 9, 1, 0); /* of none */
	send_tx(p, 3, 1, 0);
	e = entry(KVD_RING_ABORT, TX, 7);
	entry_give(&p->c, p->prefill, &e, NULL);
	e = entry(KVD_RING_CLOSE, TX, 7);
	entry_give(&p->c, p->prefill, &e, NULL);
	word = slot_read(p->prefill, TX).word;
	assert_int_equal(kvd_word_state(word), KVD_BOOTSTRAPPING);
	e = entry(KVD_RING_CLOSE, TX, 1);
	entry_give(&p->c, p->prefill, &e, NULL);
	entry_give(&p->c, p->prefill, &e, NULL); /* twice */
	send_tx(p, TX, 1, 0);
	cluster_run(&p->c, LOOP_NS_PER_MS);
	assert_true(kvd_word_flags(slot_read(p->prefill, TX).word) & KVD_FLAG_FREE);
	entry_give(&p->c, p->prefill, &e, NULL); /* and once more */
	e = (struct kvd_ring_entry){.op = KVD_RING_RELEASE, .a = KVD_RING_IDS + TX};
	entry_give(&p->c, p->prefill, &e, NULL);
	assert_int_equal(rooms_count(rooms_of(&p->c.nodes[0].kvd)), 0);
	open_tx(p, 14, TX, 2);
}

/* Slots are a session's own. */
static void room_of_another_session_is_not_reached(void **state)
{
	struct room_pair *p = *state;
	struct session *other = cluster_engine(&p->c, 0, "other");
	struct kvd_ring_entry e = entry(KVD_RING_CLOSE, TX, 1);

	open_tx(p, 15, TX, 1);
	entry_give(&p->c, other, &e, NULL);
	e.op = KVD_RING_ABORT;
	e.a = 15;
	entry_give(&p->c, other, &e, NULL);
	e.gen = 0;
	entry_give(&p->c, other, &e, NULL);
	e = (struct kvd_ring_entry){.op = KVD_RING_RELEASE, .a = KVD_RING_IDS + TX};
	entry_give(&p->c, other, &e, NULL);
	e.op = KVD_RING_CANCEL;
	entry_give(&p->c, other, &e, NULL);
	cluster_run(&p->c, LOOP_NS_PER_MS);
	assert_int_equal(kvd_word_state(slot_read(p->prefill, TX).word),
			 KVD_BOOTSTRAPPING);
}

static void abort_carries_its_reason(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e = entry(KVD_RING_ABORT, TX, 1);
	struct payload why = {0};
	cJSON *answer;

	open_tx(p, 16, TX, 1);
	open_rx(p, 16, RX, 1);
	bind_rx(p, RX, 1);
	until(p, p->prefill, TX, KVD_WAITING_FOR_INPUT);
	payload_add(&why, "the user\nleft", 13);
	e.bytes = 13;
	e.n2 = 1; /* not looked at */
	entry_give(&p->c, p->prefill, &e, &why);
	failed_with(p, p->decode, RX, ERR_ABORTED);
	assert_true(kvd_word_flags(slot_read(p->decode, RX).word) & KVD_FLAG_REMOTE);
	answer = cluster_call(&p->c, p->decode, "{'cmd':'room.show','room':'16'}");
	assert_non_null(strstr(
		cJSON_GetObjectItem(cJSON_GetObjectItem(answer, "error"), "message")
			->valuestring,
		": the user?left"));
	cJSON_Delete(answer);
	e.bytes = 201;
	payload_add(&why, (char[201]){0}, 201);
	entry_breaks(&p->c, p->prefill, &e, &why);
}

/* ---- closing what has not ended ---- */

/* The number is free at once, also while bytes of the first room may still land. */
static void number_of_a_closed_room_opens_again_at_once(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e = entry(KVD_RING_CLOSE, TX, 1);

	memset(page_of(&p->src, 1, 9), 78, 32);
	open_tx(p, 17, TX, 1);
	open_rx(p, 17, RX, 1);
	bind_rx(p, RX, 1);
	until(p, p->prefill, TX, KVD_WAITING_FOR_INPUT);
	cluster_run(&p->c, LOOP_NS_PER_MS); /* each knows the other's generation */
	send_tx(p, TX, 1, 0);
	entry_give(&p->c, p->prefill, &e, NULL);
	open_tx(p, 17, TX + 1, 1);
	e.slot = RX;
	entry_give(&p->c, p->decode, &e, NULL);
	open_rx(p, 17, RX + 1, 1);
	bind_rx(p, RX + 1, 1);
	until(p, p->prefill, TX + 1, KVD_WAITING_FOR_INPUT);
	send_tx(p, TX + 1, 1, 0);
	send_tx(p, TX + 1, 1, 1);
	until(p, p->decode, RX + 1, KVD_SUCCESS);
	until(p, p->prefill, TX + 1, KVD_SUCCESS);
	assert_memory_equal(page_of(&p->dst, 1, 8), page_of(&p->src, 1, 9), 32);
	assert_true(kvd_word_flags(slot_read(p->prefill, TX).word) & KVD_FLAG_FREE);
	assert_true(kvd_word_flags(slot_read(p->decode, RX).word) & KVD_FLAG_FREE);
	assert_int_equal(kvd_word_state(slot_read(p->prefill, TX).word), KVD_FAILED);
	assert_int_equal(rooms_count(rooms_of(&p->c.nodes[0].kvd)), 1);
}

/* An engine that dies behind a close leaves neither of the two. */
static void session_ends_with_closed_unfinished_room(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e = entry(KVD_RING_CLOSE, TX, 1);

	open_tx(p, 18, TX, 1);
	open_rx(p, 18, RX, 1);
	bind_rx(p, RX, 1);
	until(p, p->prefill, TX, KVD_WAITING_FOR_INPUT);
	send_tx(p, TX, 1, 0);
	entry_give(&p->c, p->prefill, &e, NULL);
	open_tx(p, 18, TX + 1, 1);
	cluster_engine_dies(&p->c, p->prefill);
	cluster_run(&p->c, LOOP_NS_PER_S);
	assert_int_equal(rooms_count(rooms_of(&p->c.nodes[0].kvd)), 0);
	assert_int_equal(p->c.nodes[0].kvd.session_count, 0);
	failed_with(p, p->decode, RX, ERR_ABORTED);
}

/* Partners that come for a closed one are told, as of one that was closed at its end. */
static void room_closed_notifies_its_partner(void **state)
{
	struct room_pair *p = *state;
	struct kvd_ring_entry e = entry(KVD_RING_CLOSE, TX, 1);

	open_tx(p, 19, TX, 1);
	entry_give(&p->c, p->prefill, &e, NULL);
	open_rx(p, 19, RX, 1);
	bind_rx(p, RX, 1);
	failed_with(p, p->decode, RX, ERR_ABORTED);
}

static void pool_closing_accepts_bind(void **state)
{
	struct room_pair *p = *state;

	open_rx(p, 20, RX, 1);
	pool_close(pool_find(p->decode, p->dst.pool), NULL, NULL);
	bind_rx(p, RX, 1); /* as room.bind does */
	assert_int_equal(kvd_word_state(slot_read(p->decode, RX).word),
			 KVD_BOOTSTRAPPING);
}

static void allocation_failed_fails_the_room(void **state)
{
	struct room_pair *p = *state;
	uint32_t gen = 1;

	for (uint64_t n = 1; n < 200; n++) {
		struct kvd_ring_entry e = entry(KVD_RING_CLOSE, RX, gen);
		uint64_t used;

		mem_fail_at(0);
		open_rx(p, 21, RX, gen);
		cluster_run(&p->c, LOOP_NS_PER_MS);
		mem_fail_at(n);
		cJSON_Delete(say_bind(p, RX, gen++)); /* the line may find none */
		used = mem_count();
		mem_fail_at(0);
		entry_give(&p->c, p->decode, &e, NULL);
		cluster_run(&p->c, LOOP_NS_PER_MS);
		assert_int_equal(rooms_count(rooms_of(&p->c.nodes[1].kvd)), 0);
		if (used < n)
			return;
	}
	fail_msg("it never got through");
}

static int setup(void **state)
{
	static const struct cache geometry = {.layers = 4,
					      .pages = 16,
					      .page_tokens = 4,
					      .units = 4,
					      .total_units = 4,
					      .unit_bytes = 32,
					      .aux_slots = 4,
					      .aux_bytes = 64};

	*state = room_pair_new(&geometry, 1);
	return 0;
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, room_pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(room_by_entries_moves_its_bytes),
		T(entries_and_commands_name_the_same_rooms),
		T(offer_and_pull_open_with_views_in_binary),
		T(pull_without_pages_is_bound_later),
		T(long_list_is_read_on_a_helper),
		T(engine_dead_during_read_leaks_nothing),
		T(engine_dead_during_open_leaks_nothing),
		T(open_refused_fails_its_slot_with_reason),
		T(refused_pages_fail_the_room),
		T(pages_over_the_account_fail_the_room_unread),
		T(entry_for_another_role_fails_the_room),
		T(entries_invalid_violate_the_protocol),
		T(entries_of_closed_room_are_ignored),
		T(room_of_another_session_is_not_reached),
		T(abort_carries_its_reason),
		T(number_of_a_closed_room_opens_again_at_once),
		T(session_ends_with_closed_unfinished_room),
		T(room_closed_notifies_its_partner),
		T(pool_closing_accepts_bind),
		T(allocation_failed_fails_the_room),
	};

	return cmocka_run_group_tests_name("ring_room", tests, NULL, NULL);
}
