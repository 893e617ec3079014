/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rooms by the submission ring on the real daemon, through libkvd's posted calls: a
 * prompt's worth of scattered pages, refusals and their words, more than the ring holds.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "lib/kvd.h"
#include "tests/lib/live_daemon.h"

#define WAIT_MS 60000
#define MANY 131072u /* pages of a room; a pool has twice as many */
#define PAGE 64u

static const struct kvd_call posted = {.post = true};

struct room_side {
	struct kvd_client *client;
	struct kvd_memory memory;
	struct kvd_region *region;
	struct kvd_pool *pool;
	uint32_t *pages; /* scattered: no two lie side by side */
};

static void room_side_open(const struct live_daemon *daemon, struct room_side *s,
			   const char *name)
{
	struct kvd_layout *layout = kvd_layout_new(0);
	struct kvd_field field = {.name = "k", .unit_bytes = PAGE, .units = 1};
	struct kvd_pool_args args = {.region_count = 1};
	const char *text = NULL;

	s->client = live_daemon_client(daemon, name, WAIT_MS);
	live_well(NULL, kvd_memory_alloc(2ul * MANY * PAGE, name, &s->memory));
	live_well(s->client, kvd_region_memory(s->client, &s->memory, NULL, &s->region));
	field.buffer = kvd_layout_buffer(layout, 2ul * MANY * PAGE);
	kvd_layout_heads(layout, kvd_layout_view(layout, "kv", 1, 2 * MANY), 0, KVD_NHD,
			 &field);
	live_well(NULL, kvd_layout_text(layout, &text));
	args.layout = text;
	args.regions = &s->region;
	live_well(s->client, kvd_pool_register(s->client, &args, NULL, &s->pool));
	kvd_layout_free(layout);
	s->pages = calloc(MANY, sizeof(*s->pages));
}

static void room_side_close(struct room_side *s)
{
	kvd_close(s->client);
	kvd_memory_free(&s->memory);
	free(s->pages);
}

/* What both call for `pages` of their pages; the states are the caller's to see. */
static void rooms_post(struct room_side *a, struct room_side *b, uint64_t number,
		       size_t pages, bool last, struct kvd_room **tx_p,
		       struct kvd_room **rx_p)
{
	const struct kvd_source source = {0}; /* the daemon of both */
	struct kvd_view view = {.page_count = pages};
	struct kvd_room_args tx = {.room = number, .role = KVD_SEND, .pool = a->pool};
	struct kvd_room_args rx = {.room = number,
				   .role = KVD_RECV,
				   .pool = b->pool,
				   .sources = &source,
				   .source_count = 1};
	struct kvd_room_pages bind = {.views = &view, .view_count = 1};
	struct kvd_room_pages send = {.views = &view, .view_count = 1};

	live_well(a->client, kvd_room_open(a->client, &tx, &posted, tx_p));
	live_well(b->client, kvd_room_open(b->client, &rx, &posted, rx_p));
	view.pages = b->pages;
	live_well(b->client, kvd_room_bind(*rx_p, &bind, &posted));
	view.pages = a->pages;
	view.page_count -= !last; /* something is left to wait for */
	send.last = last;
	live_well(a->client, kvd_room_send(*tx_p, &send, &posted));
}

/* 128 Ki scattered pages in one bind and one chunk; then the number again at once. */
static void posted_rooms_move_scattered_pages(void **state)
{
	const struct live_daemon *daemon = *state;
	struct room_side a, b;
	struct kvd_room *tx, *rx;
	struct kvd_room_status st;

	room_side_open(daemon, &a, "a");
	room_side_open(daemon, &b, "b");
	for (uint32_t i = 0; i < MANY; i++) {
		a.pages[i] = 2 * i;
		b.pages[i] = 2 * (i * 5u % MANY) + 1;
		memset((uint8_t *)a.memory.address + (size_t)a.pages[i] * PAGE,
		       (int)(i % 251 + 1), PAGE);
	}
	for (int round = 0; round < 2; round++) {
		memset(b.memory.address, 0, 2ul * MANY * PAGE);
		rooms_post(&a, &b, 7, MANY, true, &tx, &rx);
		if (kvd_room_wait(rx, KVD_SUCCESS, WAIT_MS) != KVD_SUCCESS)
			fail_msg("%s", kvd_room_why(rx, WAIT_MS)->message);
		assert_int_equal(kvd_room_wait(tx, KVD_SUCCESS, WAIT_MS), KVD_SUCCESS);
		for (uint32_t i = 0; i < MANY; i++)
			assert_int_equal(
				((uint8_t *)b.memory.address)[(size_t)b.pages[i] * PAGE],
				i % 251 + 1);
		live_well(a.client, kvd_room_read(tx, &st));
		assert_int_equal(st.first_token, 0);
		assert_int_equal(st.done, 1);
		assert_int_equal(st.bytes, (uint64_t)MANY * PAGE);
		assert_true(st.rows > 0);
		live_well(a.client, kvd_room_close(tx, &posted));
		live_well(b.client, kvd_room_close(rx, &posted));
	}
	room_side_close(&a);
	room_side_close(&b);
}

static void posted_room_says_why_it_was_refused(void **state)
{
	const struct live_daemon *daemon = *state;
	struct room_side a, b;
	struct kvd_room *tx, *rx, *again = NULL;
	struct kvd_room_args args = {.room = 8, .role = KVD_SEND};
	struct kvd_view view = {.name = "no such view"};
	struct kvd_room_pages bind = {.views = &view, .view_count = 1};
	int r;

	room_side_open(daemon, &a, "a");
	room_side_open(daemon, &b, "b");
	args.pool = a.pool;
	b.pages[1] = 1;
	rooms_post(&a, &b, 8, 2, false, &tx, &rx);
	live_well(a.client, kvd_room_open(a.client, &args, &posted, &again));
	assert_int_equal(kvd_room_wait(again, KVD_SUCCESS, WAIT_MS), KVD_FAILED);
	assert_int_equal(kvd_room_why(again, WAIT_MS)->code, KVD_E_EXIST);
	assert_non_null(
		strstr(kvd_room_why(again, WAIT_MS)->message, "room 8 (send) is open"));
	assert_int_equal(kvd_room_wait(tx, KVD_TRANSFERRING, WAIT_MS), KVD_TRANSFERRING);
	/* what is said to it by the socket is not said to the room that has its number */
	live_well(a.client, kvd_room_abort(again, "not you", NULL));
	assert_int_equal(kvd_room_state(tx), KVD_TRANSFERRING);
	live_well(a.client, kvd_room_close(again, NULL));
	live_well(a.client, kvd_room_open(a.client, &args, &posted, &again));
	r = kvd_room_send(again, &(struct kvd_room_pages){.last = true}, NULL);
	assert_true(r == -KVD_E_EXIST || r == -KVD_E_STATE); /* is it refused already? */
	live_well(a.client, kvd_room_abort(again, "not you", NULL));
	assert_int_equal(kvd_room_wait(again, KVD_SUCCESS, WAIT_MS), KVD_FAILED);
	live_well(a.client, kvd_room_close(again, &posted));
	assert_int_equal(kvd_room_state(tx), KVD_TRANSFERRING);
	/* a name that no view can have is found here */
	view.name = "a name of more than thirty-one characters";
	assert_int_equal(kvd_room_bind(rx, &bind, &posted), -KVD_E_INVAL);
	assert_int_equal(kvd_region_unregister(a.region, &posted), -KVD_E_INVAL);
	live_well(a.client, kvd_room_abort(tx, "the user left", &posted));
	assert_int_equal(kvd_room_wait(rx, KVD_SUCCESS, WAIT_MS), KVD_FAILED);
	assert_non_null(strstr(kvd_room_why(rx, WAIT_MS)->message, "the user left"));
	live_well(a.client, kvd_room_close(tx, &posted));
	live_well(b.client, kvd_room_close(rx, &posted));
	room_side_close(&a);
	room_side_close(&b);
}

/* More than the ring has entries, and slots are used again. */
static void posted_rooms_by_thousands(void **state)
{
	const struct live_daemon *daemon = *state;
	struct room_side a;
	struct kvd_room *room;

	room_side_open(daemon, &a, "a");
	for (uint64_t i = 0; i < 20000; i++) {
		struct kvd_room_args args = {
			.room = i % 64, .role = KVD_SEND, .pool = a.pool};
		int r;

		do {
			r = kvd_room_open(a.client, &args, &posted, &room);
			if (r == -KVD_E_FULL)
				kvd_poll(a.client, 1);
		} while (r == -KVD_E_FULL);
		live_well(a.client, r);
		do {
			r = kvd_room_close(room, &posted);
			if (r == -KVD_E_FULL)
				kvd_poll(a.client, 1);
		} while (r == -KVD_E_FULL);
		live_well(a.client, r);
	}
	room_side_close(&a);
}

static int setup(void **state)
{
	struct live_daemon *daemon = calloc(1, sizeof(*daemon));

	live_daemon_init(daemon);
	*state = daemon;
	return 0;
}

static int teardown(void **state)
{
	live_daemon_fini(*state);
	free(*state);
	return 0;
}

#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		T(posted_rooms_move_scattered_pages),
		T(posted_room_says_why_it_was_refused),
		T(posted_rooms_by_thousands),
	};

	return cmocka_run_group_tests_name("live_ring_rooms", tests, NULL, NULL);
}
