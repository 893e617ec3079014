/* SPDX-License-Identifier: Apache-2.0 */
/* libkvd comes back by itself, and never half: against a scripted daemon that is
 * killed, silent, refuses, or throws the engine out again and again. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "tests/lib/client_fixture.h"

#define ROOM_ANSWER OK ",\"room\":\"78\",\"slot\":5,\"gen\":\"9\"}"

static uint64_t now_ms(void)
{
	return clock_ns() / 1000000u;
}

/* Turn without waiting until there is no session. */
static void until_lost(struct client_fixture *f)
{
	for (uint64_t end = now_ms() + 10000; !kvd_lost(f->client) && now_ms() < end;)
		kvd_poll(f->client, 1);
	assert_true(kvd_lost(f->client));
}

static void until_up(struct client_fixture *f)
{
	for (uint64_t end = now_ms() + 10000; kvd_lost(f->client) && now_ms() < end;)
		kvd_poll(f->client, 5);
	assert_false(kvd_lost(f->client));
}

static struct kvd_pool *first_pool(struct client_fixture *f)
{
	return (struct kvd_pool *)(void *)list_first(&f->client->objects[CLIENT_POOL],
						     struct client_object, link);
}

static unsigned int lines_of(struct client_fixture *f, unsigned int from, const char *cmd)
{
	unsigned int n = 0;

	for (unsigned int i = from; i < fake_kvd_lines(f->fake); i++)
		n += strstr(fake_kvd_line(f->fake, i, NULL), cmd) != NULL;
	return n;
}

static void daemon_restarted_next_open_works(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *old = client_room_make(f, 2, 40), *room;
	struct kvd_room_args args = {.room = 78, .pool = first_pool(f)};
	struct kvd_room_status st;
	unsigned int n, fds;

	fake_kvd_kill(f->fake);
	n = fake_kvd_lines(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, OK ",\"region\":103}");
	fake_kvd_answer(f->fake, OK ",\"pool\":104}");
	fake_kvd_answer(f->fake, ROOM_ANSWER);
	fake_kvd_word(f->fake, 5, 9, KVD_BOOTSTRAPPING, 0, 0);
	/* the engine does nothing but its next request */
	assert_int_equal(kvd_room_open(f->client, &args, NULL, &room), 0);
	assert_int_equal(kvd_room_state(room), KVD_BOOTSTRAPPING);
	assert_non_null(strstr(client_line_args(f, n), "hello"));
	fake_kvd_line(f->fake, n + 1, &fds);
	assert_int_equal(fds, 2); /* and statm */
	assert_non_null(
		strstr(client_line_args(f, n + 2), "\"regions\":[{\"region\":103}]"));
	assert_non_null(strstr(client_line_args(f, n + 3), "\"pool\":104"));
	assert_int_equal(kvd_daemon(f->client)->pid, fake_kvd_pid(f->fake));
	/* the old one reads its own page and daemon, not the new ones */
	assert_int_equal(kvd_room_read(old, &st), 0);
	assert_int_equal(st.state, KVD_FAILED);
	assert_int_equal(st.error, KVD_E_DEAD);
	assert_true(st.retryable);
	assert_int_equal(kvd_room_close(old, NULL), 0);
}

/* What an engine may call with callbacks: how many are not told to try again. */
static int calls_not_lost(struct client_fixture *f, struct kvd_room *old)
{
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	struct kvd_region *region = (struct kvd_region *)(void *)list_first(
		&f->client->objects[CLIENT_REGION], struct client_object, link);
	struct kvd_pool_args pool = {
		.layout = "{}", .regions = &region, .region_count = 1};
	struct kvd_room_args open = {.room = 78, .pool = first_pool(f)};
	struct kvd_session_key key = {.epoch = 1};
	struct kvd_wait wait = {.region = region};
	struct kvd_room_pages bind = {.wait = wait};
	struct kvd_room_pages send = {.wait = wait};
	struct kvd_pool *pool_made;
	struct kvd_room *room;
	uint64_t attach;
	int results[] = {
		kvd_room_open(f->client, &open, &call, &room),
		kvd_pool_register(f->client, &pool, &call, &pool_made),
		kvd_pool_unregister(first_pool(f), &call),
		kvd_room_bind(old, &bind, &call),
		kvd_room_send(old, &send, &call),
		kvd_room_abort(old, NULL, &call),
		kvd_submit(f->client, "a", NULL, &call),
		kvd_peer_attach(f->client, NULL, &key, &call, &attach),
	};
	int others = 0;

	for (size_t i = 0; i < ARRAY_LEN(results); i++)
		others += results[i] != -KVD_E_LOST && results[i] != -KVD_E_DEAD;
	return others;
}

static void calls_without_a_session_are_lost_and_make_one(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	struct kvd_room *old = client_room_make(f, 2, 40), *room;
	struct kvd_room_args args = {.room = 78, .pool = first_pool(f)};
	uint64_t end;
	int r;

	fake_kvd_word(f->fake, 2, 40, KVD_WAITING_FOR_INPUT, 0, 0);
	fake_kvd_kill(f->fake);
	until_lost(f);
	assert_int_equal(calls_not_lost(f, old), 0);
	assert_true(kvd_last_error(f->client)->retryable);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, OK ",\"region\":103}");
	fake_kvd_answer(f->fake, OK ",\"pool\":104}");
	fake_kvd_answer(f->fake, ROOM_ANSWER);
	/* an engine that does nothing but repeat its call */
	for (end = now_ms() + 10000;;) {
		r = kvd_room_open(f->client, &args, &call, &room);
		if (r != -KVD_E_LOST || now_ms() >= end)
			break;
		assert_true(kvd_last_error(f->client)->retryable);
		assert_null(room);
	}
	assert_int_equal(r, 0);
	client_poll_until(f, 1);
	assert_int_equal(f->result, 0);
	/* what was of the old session says how that ended */
	assert_int_equal(kvd_room_bind(old, &(struct kvd_room_pages){0}, NULL),
			 -KVD_E_DEAD);
	assert_string_equal(kvd_last_error(f->client)->message,
			    "room 77 failed: EDEAD: the daemon's process has ended");
}

static void rooms_of_a_living_daemon_do_not_fail_with_the_connection(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	struct kvd_room_status st;
	char *reply;

	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	fake_kvd_answer(f->fake, "!close");
	fake_kvd_answer(f->fake, OK ",\"region\":103}");
	fake_kvd_answer(f->fake, OK ",\"pool\":104}");
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), -KVD_E_LOST);
	until_up(f);
	assert_int_equal(kvd_pool_id(first_pool(f)), 104);
	/* a new session is no proof that the old one is still */
	assert_int_equal(kvd_room_state(room), KVD_TRANSFERRING);
	assert_int_equal(kvd_room_close(room, NULL), -KVD_E_STATE);
	fake_kvd_kill(f->fake);
	until_lost(f);
	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, 0), KVD_FAILED);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.error, KVD_E_DEAD);
}

static void poll_never_waits_for_the_daemon(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_pool *pool = client_pool_make(f);
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	uint64_t begin, worst = 0;
	char *reply;

	fake_kvd_kill(f->fake);
	until_lost(f);
	/* longer where this process is kept from its core: the second attempt is looked
	 * at */
	for (begin = now_ms(); now_ms() - begin < 300 || (f->client->again.tries < 2 &&
							  now_ms() - begin < 10000);) {
		uint64_t at = clock_ns();

		assert_int_equal(kvd_poll(f->client, 0), -KVD_E_LOST);
		at = clock_ns() - at;
		worst = at > worst ? at : worst;
		assert_in_range(kvd_timeout_ms(f->client), 0, 1300);
		assert_int_equal(kvd_submit(f->client, "a", NULL, &call), -KVD_E_LOST);
		assert_true(kvd_last_error(f->client)->retryable);
	}
	/* 10 + 20 + 40 … ms between attempts, and it is not asked more often */
	assert_in_range(f->client->again.tries, 2, 12);
	/* a daemon that takes the connection and says nothing */
	fake_kvd_restart(f->fake);
	fake_kvd_hello(f->fake, "");
	while (f->client->again.stage != CLIENT_GREETING)
		kvd_poll(f->client, 5);
	for (begin = now_ms(); now_ms() - begin < 50;)
		assert_int_equal(kvd_poll(f->client, 0), -KVD_E_LOST);
	begin = now_ms();
	assert_int_equal(kvd_command(f->client, "a", NULL, 60, &reply), -KVD_E_LOST);
	assert_in_range(now_ms() - begin, 50, 5000);
	assert_int_equal(kvd_pool_id(pool), 0);
	assert_int_equal(f->done, 0);
	(void)worst; /* told, not judged: the machine may be busy */
	print_message("worst kvd_poll(0): %llu us\n", (unsigned long long)worst / 1000u);
}

static void registration_refused_leaks_nothing(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_pool *pool = client_pool_make(f);
	struct kvd_room_args args = {.room = 78, .pool = pool};
	struct kvd_room *room;

	fake_kvd_kill(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, OK ",\"region\":103}");
	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"ELIMIT\","
				 "\"message\":\"no pool for you\"}}");
	assert_int_equal(kvd_room_open(f->client, &args, NULL, &room), -KVD_E_LOST);
	assert_non_null(strstr(kvd_last_error(f->client)->message, "no pool for you"));
	assert_null(room);
	assert_true(kvd_lost(f->client));
	assert_int_equal(kvd_pool_id(pool), 0);
	fake_kvd_answer(f->fake, OK ",\"region\":203}");
	fake_kvd_answer(f->fake, OK ",\"pool\":204}");
	until_up(f);
	assert_int_equal(kvd_pool_id(pool), 204);
}

static void regions_many_are_sent_in_a_window(void **state)
{
	struct client_fixture *f = *state;
	char answer[64];
	unsigned int n;

	for (int i = 0; i < 40; i++)
		client_region_make(f);
	fake_kvd_kill(f->fake);
	n = fake_kvd_lines(f->fake);
	fake_kvd_restart(f->fake);
	for (int i = 0; i < 16; i++)
		fake_kvd_answer(f->fake, "");
	fake_kvd_line(f->fake, n - 1, NULL);
	until_lost(f);
	while (fake_kvd_lines(f->fake) < n + 17)
		kvd_poll(f->client, 1);
	for (int i = 0; i < 50; i++)
		kvd_poll(f->client, 1);
	assert_int_equal(fake_kvd_lines(f->fake), n + 17);
	assert_int_equal(f->client->conn.pending, 16);
	/* cut in the middle; the next daemon answers */
	fake_kvd_kill(f->fake);
	fake_kvd_restart(f->fake);
	for (int i = 0; i < 40; i++) {
		snprintf(answer, sizeof(answer), "%s,\"region\":%d}", OK, 100 + i);
		fake_kvd_answer(f->fake, answer);
	}
	until_up(f);
	assert_int_equal(lines_of(f, n + 17, "region.register"), 40);
	assert_int_equal(f->client->conn.pending, 0);
}

/* A session that does not last is no reason to come back at once. */
static void daemon_rejecting_is_retried_with_pauses(void **state)
{
	struct client_fixture *f = *state;
	unsigned int n = fake_kvd_lines(f->fake), hellos;
	uint64_t begin = now_ms();
	char *reply;

	do {
		fake_kvd_answer(f->fake, "!close");
		until_up(f);
		assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply),
				 -KVD_E_LOST);
		while (kvd_lost(f->client) && now_ms() - begin < 400)
			kvd_poll(f->client, 5);
		hellos = lines_of(f, n, "hello");
		/* who had no core for so long has hardly asked */
	} while (now_ms() - begin < 400 || hellos < 2);
	/* 10, 20, 40, 80, 160, 320 ms, each up to a quarter longer */
	assert_in_range(hellos, 2, 7);
}

static void callbacks_of_the_lost_session_run_once(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = client_on_done, .arg = f};

	client_pool_make(f);
	for (int i = 0; i < 5; i++)
		fake_kvd_answer(f->fake, "");
	for (int i = 0; i < 5; i++)
		assert_int_equal(kvd_submit(f->client, "a", NULL, &call), 0);
	fake_kvd_line(f->fake, 7, NULL);
	fake_kvd_kill(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, OK ",\"region\":103}");
	fake_kvd_answer(f->fake, OK ",\"pool\":104}");
	until_lost(f);
	assert_int_equal(f->done, 5);
	assert_int_equal(f->result, -KVD_E_LOST);
	until_up(f);
	assert_int_equal(f->done, 5);
	assert_int_equal(kvd_pending(f->client), 0);
}

/* ---- attachments and descriptor lists ---- */

static int lists_use(struct client_fixture *f, const struct client_lists *l)
{
	const struct kvd_xfer_args args = {
		.op = KVD_WRITE, .local = l->local, .remote = l->remote};
	struct kvd_xfer *xfer;

	return kvd_xfer_make(f->client, &args, &xfer);
}

static void lists_are_made_again_behind_the_session(void **state)
{
	struct client_fixture *f = *state;
	const struct kvd_desc desc = {.address = 8192, .bytes = 64};
	struct kvd_ring_entry e;
	struct kvd_dlist *third;
	struct client_lists l;
	unsigned int n;

	client_lists_make(f, 1, &l);
	fake_kvd_kill(f->fake);
	n = fake_kvd_lines(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, OK ",\"attach\":7}");
	fake_kvd_answer(f->fake, OK ",\"dlist\":20}");
	fake_kvd_answer(f->fake, OK ",\"dlist\":21}");
	assert_int_equal(kvd_dlist_wait(l.local, 0), 0);
	assert_int_equal(kvd_dlist_wait(l.remote, 0), 0);
	assert_int_equal(lists_use(f, &l), 0);
	assert_non_null(strstr(client_line_args(f, n + 1),
			       "peer.attach\",\"endpoint\":"
			       "\"tcp://h:1\",\"session\":\"5\""));
	assert_null(strstr(client_line_args(f, n + 2), "\"peer\""));
	assert_non_null(strstr(client_line_args(f, n + 3), "\"peer\":7"));
	client_submitted(f, n + 5, &e, NULL, 0); /* behind session.share */
	assert_int_equal(e.a, 20);
	assert_int_equal(e.b, 21);
	/* the caller's number still is the one it was given */
	assert_int_equal(kvd_dlist_prep(f->client, l.attach, &desc, 1, 4, &third), 0);
	client_submitted(f, n + 6, &e, (uint8_t[32]){0}, 32);
	assert_int_equal(e.a, 7);
}

/* An engine that loads another's metadata again and again keeps one record of it. */
static void session_attached_again_has_one_number(void **state)
{
	struct client_fixture *f = *state;
	const struct kvd_session_key key = {.epoch = 5}, other = {.epoch = 6};
	uint64_t first, again, third;

	fake_kvd_answer(f->fake, OK ",\"attach\":7}");
	assert_int_equal(kvd_peer_attach(f->client, "tcp://h:1", &key, NULL, &first), 0);
	fake_kvd_answer(f->fake, OK ",\"attach\":7}");
	assert_int_equal(kvd_peer_attach(f->client, "tcp://h:1", &key, NULL, &again), 0);
	assert_int_equal(again, first);
	fake_kvd_answer(f->fake, OK ",\"attach\":8}");
	assert_int_equal(kvd_peer_attach(f->client, "tcp://h:1", &other, NULL, &third),
			 0);
	assert_int_not_equal(third, first);
	fake_kvd_answer(f->fake, OK ",\"attach\":9}");
	assert_int_equal(kvd_peer_attach(f->client, "tcp://h:2", &key, NULL, &third), 0);
	assert_int_not_equal(third, first);
}

static void attachment_gone_removes_its_lists(void **state)
{
	struct client_fixture *f = *state;
	struct client_lists l;

	client_lists_make(f, 1, &l);
	fake_kvd_kill(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"ENOTFOUND\","
				 "\"message\":\"no such session\"}}");
	fake_kvd_answer(f->fake, OK ",\"dlist\":20}");
	assert_int_equal(kvd_dlist_wait(l.remote, 0), -KVD_E_STATE);
	assert_non_null(strstr(kvd_last_error(f->client)->message, "not restored"));
	assert_int_equal(kvd_dlist_wait(l.local, 0), 0);
	assert_int_equal(lists_use(f, &l), -KVD_E_STATE);
	assert_non_null(
		strstr(kvd_last_error(f->client)->message, "could not be restored"));
	assert_int_equal(client_object_id(&l.local->slot.object), 20);
	assert_false(kvd_lost(f->client)); /* nobody else pays */
	assert_int_equal(kvd_dlist_release(l.remote), 0);
}

static void attachment_of_absent_peer_is_retried(void **state)
{
	struct client_fixture *f = *state;
	struct client_lists l;

	client_lists_make(f, 1, &l);
	fake_kvd_kill(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"EPEER\",\"message\":"
				 "\"away\",\"retryable\":true}}");
	fake_kvd_answer(f->fake, OK ",\"dlist\":20}");
	fake_kvd_answer(f->fake, OK "}"); /* session.share */
	fake_kvd_answer(f->fake, OK ",\"attach\":7}");
	fake_kvd_answer(f->fake, OK ",\"dlist\":21}");
	until_lost(f);
	until_up(f);
	assert_int_equal(kvd_dlist_wait(l.local, 0), 0);
	assert_int_equal(lists_use(f, &l), -KVD_E_BUSY);
	assert_true(kvd_last_error(f->client)->retryable);
	assert_int_equal(kvd_dlist_state(l.remote), -KVD_E_BUSY);
	assert_in_range(kvd_timeout_ms(f->client), 0, 1001);
	assert_int_equal(kvd_dlist_wait(l.remote, 0), 0);
	assert_int_equal(lists_use(f, &l), 0);
}

/* Released while it is on its way: the daemon is told to forget it. */
static void list_released_meanwhile_is_withdrawn(void **state)
{
	struct client_fixture *f = *state;
	struct client_lists l;
	unsigned int n;
	char *reply;

	client_lists_make(f, 1, &l);
	fake_kvd_kill(f->fake);
	n = fake_kvd_lines(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, "");
	fake_kvd_answer(f->fake, ""); /* of the list; answered with the next line */
	fake_kvd_answer(f->fake, "{\"id\":%PREV%,\"ok\":true,\"dlist\":20}\n" OK "}");
	until_lost(f);
	while (fake_kvd_lines(f->fake) < n + 3)
		kvd_poll(f->client, 5);
	assert_int_equal(kvd_dlist_release(l.local), 0);
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), 0);
	kvd_string_free(reply);
	assert_non_null(strstr(client_line_args(f, n + 4), "dlist.free\",\"dlist\":20"));
}

/* Too long for a line, and unanswered when the daemon went. */
static void list_lost_on_its_way_is_made_with_the_next_session(void **state)
{
	const size_t rows = 30000;
	struct kvd_desc *descs = calloc(rows, sizeof(*descs));
	struct client_fixture *f = *state;
	struct kvd_dlist *dlist;

	for (size_t i = 0; i < rows; i++)
		descs[i] = (struct kvd_desc){.address = 4096 * i, .bytes = 64};
	fake_kvd_answer(f->fake, OK "}"); /* session.share */
	fake_kvd_answer(f->fake, "");
	assert_int_equal(kvd_dlist_prep(f->client, 0, descs, rows, 4, &dlist), 0);
	free(descs);
	fake_kvd_line(f->fake, 2, NULL);
	fake_kvd_kill(f->fake);
	until_lost(f);
	assert_int_equal(kvd_dlist_state(dlist), -KVD_E_BUSY);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, OK ",\"dlist\":20}");
	assert_int_equal(kvd_dlist_wait(dlist, 0), 0);
	assert_int_equal(client_object_id(&dlist->slot.object), 20);
	assert_int_equal(kvd_dlist_release(dlist), 0);
}

static void daemon_anew(struct client_fixture *f)
{
	fake_kvd_kill(f->fake);
	until_lost(f);
	fake_kvd_drop_answers(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, OK ",\"region\":103}");
	fake_kvd_answer(f->fake, OK ",\"pool\":104}");
	f->client->again.retry_ns = 0;
}

/* Out of memory at every allocation of the way up: lost, never half. */
static void no_memory_on_the_way_up_tries_again(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_pool *pool = client_pool_make(f);
	unsigned int tries;
	bool failed = true;
	uint64_t n;

	for (n = 1; failed; n++) {
		daemon_anew(f);
		tries = f->client->again.tries;
		mem_fail_at(n);
		while (kvd_lost(f->client) && f->client->again.tries == tries)
			kvd_poll(f->client, 2);
		mem_fail_at(0);
		failed = kvd_lost(f->client);
		if (failed) {
			assert_int_equal(kvd_pool_id(pool), 0);
			/* on a slow machine the next try may have begun */
			if (f->client->again.stage == CLIENT_DOWN)
				assert_int_equal(kvd_pending(f->client), 0);
			daemon_anew(f);
			until_up(f);
		}
		assert_int_equal(kvd_pool_id(pool), 104);
	}
	assert_true(n > 8);
}

int main(void)
{
#define T(name)                                                          \
	cmocka_unit_test_setup_teardown(name, client_fixture_setup_auto, \
					client_fixture_teardown)
	static const struct CMUnitTest tests[] = {
		T(daemon_restarted_next_open_works),
		T(calls_without_a_session_are_lost_and_make_one),
		T(rooms_of_a_living_daemon_do_not_fail_with_the_connection),
		T(poll_never_waits_for_the_daemon),
		T(registration_refused_leaks_nothing),
		T(regions_many_are_sent_in_a_window),
		T(daemon_rejecting_is_retried_with_pauses),
		T(callbacks_of_the_lost_session_run_once),
		T(lists_are_made_again_behind_the_session),
		T(session_attached_again_has_one_number),
		T(attachment_gone_removes_its_lists),
		T(attachment_of_absent_peer_is_retried),
		T(list_released_meanwhile_is_withdrawn),
		T(list_lost_on_its_way_is_made_with_the_next_session),
		T(no_memory_on_the_way_up_tries_again),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
