/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvd against a scripted daemon (tests/lib/fake_kvd.h): lists, transfers,
 * notifications. It makes no ring, so what would stand there comes as a line and can
 * be looked at; what the daemon would write into the status page the test writes.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "tests/lib/client_fixture.h"

#define FIRST (FAKE_KVD_SLOTS / 2) /* of the slots that the engine numbers */
#define ROWS_OF_A_LINE 22400u	   /* of four columns: what a line still takes */

static struct kvd_xfer *make(struct client_fixture *f, const struct client_lists *l)
{
	const struct kvd_xfer_args args = {
		.op = KVD_WRITE, .local = l->local, .remote = l->remote};
	struct kvd_xfer *xfer;

	assert_int_equal(kvd_xfer_make(f->client, &args, &xfer), 0);
	return xfer;
}

/* hello, peer.attach, session.share are lines 0 … 2 */
static void lists_are_sent_in_memory_order(void **state)
{
	const uint64_t nixl[] = {4096, 64, 7, 8192, 64, 7};
	struct client_fixture *f = *state;
	struct kvd_ring_entry e;
	struct client_lists l;
	struct kvd_dlist *own;
	uint64_t rows[8];

	client_lists_make(f, 2, &l);
	assert_non_null(strstr(client_line_args(f, 2), "session.share"));
	assert_int_equal(client_submitted(f, 3, &e, (uint8_t *)rows, sizeof(rows)), 64);
	assert_int_equal(e.op, KVD_RING_LIST);
	assert_int_equal(e.slot, FIRST);
	assert_int_equal(e.gen, 1);
	assert_int_equal(e.a, 0);
	assert_int_equal(e.n0, 2);
	assert_int_equal(e.n1, 4);
	assert_int_equal(rows[4], 8192);
	client_submitted(f, 4, &e, (uint8_t *)rows, sizeof(rows));
	assert_int_equal(e.slot, FIRST + 1);
	assert_int_equal(e.a, 2);
	assert_int_equal(kvd_dlist_prep(f->client, 0, nixl, 2, 3, &own), 0);
	assert_int_equal(client_submitted(f, 5, &e, (uint8_t *)rows, sizeof(rows)), 48);
	assert_memory_equal(rows, nixl, sizeof(nixl));
	assert_int_equal(kvd_dlist_state(own), 0);
	fake_kvd_word(f->fake, FIRST + 2, 1, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_dlist_state(own), 1);
	assert_int_equal(kvd_dlist_wait(own, 100), 0);
	assert_int_equal(kvd_dlist_release(own), 0);
	client_submitted(f, 6, &e, (uint8_t *)rows, sizeof(rows));
	assert_int_equal(e.op, KVD_RING_RELEASE);
	assert_int_equal(e.a, KVD_RING_IDS + FIRST + 2);
	assert_int_equal(kvd_dlist_prep(f->client, 0, nixl, 2, 5, &own), -KVD_E_INVAL);
	assert_int_equal(kvd_dlist_prep(f->client, 0, nixl, 0, 3, &own), -KVD_E_INVAL);
	assert_null(own);
}

/* Any command: what came before it is read with its answer. */
static void command_works(struct client_fixture *f)
{
	char *reply;

	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), 0);
	kvd_string_free(reply);
}

static struct kvd_dlist *long_list(struct client_fixture *f)
{
	const size_t rows = ROWS_OF_A_LINE + 1;
	struct kvd_desc *descs = calloc(rows, sizeof(*descs));
	struct kvd_dlist *dlist;

	for (size_t i = 0; i < rows; i++)
		descs[i] = (struct kvd_desc){4096 * i, 64, 128, i == 1 ? 3 : 0};
	assert_int_equal(kvd_dlist_prep(f->client, 0, descs, rows, 4, &dlist), 0);
	free(descs);
	return dlist;
}

/* hello and session.share are lines 0 and 1 */
static void list_without_arena_space_is_sent_as_memfd(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_xfer_args args = {.op = KVD_WRITE};
	struct kvd_ring_entry e;
	struct kvd_dlist *dlist;
	struct client_lists l;
	struct kvd_xfer *xfer;
	unsigned int fds;

	fake_kvd_answer(f->fake, OK "}"); /* session.share */
	fake_kvd_answer(f->fake, "");
	fake_kvd_answer(f->fake, OK ",\"attach\":2}\n{\"id\":%PREV%,\"ok\":true,"
				    "\"dlist\":31}");
	dlist = long_list(f);
	assert_string_equal(client_line_args(f, 2),
			    "\"cmd\":\"dlist.prep\",\"fd\":0,\"count\":22401}");
	fake_kvd_line(f->fake, 2, &fds);
	assert_int_equal(fds, 1);
	assert_int_equal(kvd_dlist_state(dlist), -KVD_E_BUSY);
	assert_int_equal(kvd_dlist_wait(dlist, 1), -KVD_E_NOREPLY);
	client_lists_make(f, 1, &l); /* a line more: the answer comes with its own */
	args.local = dlist;
	args.remote = l.remote;
	assert_int_equal(kvd_dlist_wait(dlist, 0), 0);
	assert_int_equal(kvd_dlist_state(dlist), 1);
	args.local_index = args.remote_index = &(uint32_t){0};
	args.local_index_count = args.remote_index_count = 1;
	assert_int_equal(kvd_xfer_make(f->client, &args, &xfer), 0);
	client_submitted(f, 6, &e, (uint8_t[8]){0}, 8);
	assert_int_equal(e.a, 31);
	assert_int_equal(kvd_dlist_release(dlist), 0);
	client_submitted(f, 7, &e, NULL, 0);
	assert_int_equal(e.op, KVD_RING_RELEASE);
	assert_int_equal(e.a, 31);
}

static void list_in_flight_is_busy_then_refused_with_text(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_xfer_args args = {.op = KVD_WRITE};
	struct kvd_error error;
	struct client_lists l;
	struct kvd_xfer *xfer;

	client_lists_make(f, 1, &l);
	fake_kvd_answer(f->fake, "");
	fake_kvd_answer(f->fake, "{\"id\":%PREV%,\"error\":{\"code\":\"ENOTFOUND\","
				 "\"message\":\"row 7 is nowhere\"}}\n" OK "}");
	args.local = long_list(f);
	args.remote = l.remote;
	args.local_index = args.remote_index = &(uint32_t){0};
	args.local_index_count = args.remote_index_count = 1;
	assert_int_equal(kvd_xfer_make(f->client, &args, &xfer), -KVD_E_BUSY);
	assert_true(kvd_last_error(f->client)->retryable);
	assert_int_equal(kvd_notif_send(f->client, 2, "x", 1), 0); /* a line more */
	assert_int_equal(kvd_dlist_wait((struct kvd_dlist *)args.local, 0),
			 -KVD_E_NOTFOUND);
	assert_string_equal(kvd_last_error(f->client)->message, "row 7 is nowhere");
	assert_int_equal(kvd_dlist_state(args.local), -KVD_E_NOTFOUND);
	assert_int_equal(kvd_dlist_error(args.local, 0, &error), 0);
	assert_int_equal(error.code, KVD_E_NOTFOUND);
	assert_string_equal(error.message, "row 7 is nowhere");
	assert_int_equal(kvd_xfer_make(f->client, &args, &xfer), -KVD_E_STATE);
	assert_int_equal(kvd_dlist_release((struct kvd_dlist *)args.local), 0);
}

static void list_released_in_flight_is_withdrawn(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_dlist *dlist;

	fake_kvd_answer(f->fake, OK "}");
	fake_kvd_answer(f->fake, "");
	fake_kvd_answer(f->fake, OK "}\n{\"id\":%PREV%,\"ok\":true,\"dlist\":31}");
	dlist = long_list(f);
	assert_int_equal(kvd_dlist_release(dlist), 0);
	command_works(f);
	assert_string_equal(client_line_args(f, 4),
			    "\"cmd\":\"dlist.free\",\"dlist\":31}");
}

static void indices_and_notification_are_sent_with_transfer(void **state)
{
	static const uint32_t index[] = {1, 0}, outside[] = {2};
	struct client_fixture *f = *state;
	struct kvd_xfer_args args = {.op = KVD_READ,
				     .local_index = outside,
				     .local_index_count = 1,
				     .remote_index = index,
				     .remote_index_count = 2,
				     .notif = "hi\0!",
				     .notif_bytes = 4};
	struct kvd_ring_entry e;
	struct client_lists l;
	struct kvd_xfer *xfer;
	uint8_t data[32];

	client_lists_make(f, 2, &l);
	args.local = l.local;
	args.remote = l.remote;
	assert_int_equal(kvd_xfer_make(f->client, &args, &xfer), -KVD_E_RANGE);
	args.local_index = index;
	assert_int_equal(kvd_xfer_make(f->client, &args, &xfer), -KVD_E_INVAL);
	args.local_index_count = 2;
	args.remote = l.local;
	assert_int_equal(kvd_xfer_make(f->client, &args, &xfer), -KVD_E_INVAL);
	assert_null(xfer);
	args.remote = l.remote;
	assert_int_equal(kvd_xfer_make(f->client, &args, &xfer), 0);
	assert_int_equal(client_submitted(f, 5, &e, data, sizeof(data)), 20);
	assert_int_equal(e.op, KVD_RING_XFER);
	assert_int_equal(e.flags, KVD_RING_NOTIFIES);
	assert_int_equal(e.a, KVD_RING_IDS + FIRST);
	assert_int_equal(e.b, KVD_RING_IDS + FIRST + 1);
	assert_int_equal(e.n0, 2);
	assert_int_equal(e.n1, 2);
	assert_memory_equal(data, index, 8);
	assert_memory_equal(data + 8, index, 8);
	assert_memory_equal(data + 16, "hi\0!", 4);
}

/* hello, peer.attach, session.share and the lists are lines 0 … 4 */
static void transfer_is_posted_canceled_and_posted_again(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_ring_entry e;
	struct client_lists l;
	struct kvd_xfer *xfer;
	uint8_t data[8];

	client_lists_make(f, 1, &l);
	xfer = make(f, &l);
	assert_int_equal(kvd_xfer_state(xfer), KVD_BOOTSTRAPPING);
	assert_int_equal(kvd_xfer_wait(xfer, 0), KVD_BOOTSTRAPPING); /* never posted */
	assert_int_equal(kvd_xfer_post(xfer, "go", 2), 0);
	assert_int_equal(client_submitted(f, 6, &e, data, sizeof(data)), 2);
	assert_int_equal(e.op, KVD_RING_POST);
	assert_int_equal(e.flags, KVD_RING_NOTIFIES);
	assert_int_equal(e.a, KVD_RING_IDS + FIRST + 2);
	assert_int_equal(e.gen, 2);
	assert_int_equal(kvd_xfer_state(xfer), KVD_TRANSFERRING);
	assert_int_equal(kvd_xfer_post(xfer, NULL, 0), -KVD_E_STATE);
	assert_int_equal(kvd_xfer_wait(xfer, 1), -KVD_E_NOREPLY);
	assert_int_equal(kvd_xfer_cancel(xfer), 0);
	client_submitted(f, 7, &e, data, sizeof(data));
	assert_int_equal(e.op, KVD_RING_CANCEL);
	fake_kvd_word(f->fake, FIRST + 2, 2, KVD_FAILED, 0, KVD_E_CANCELED);
	assert_int_equal(kvd_xfer_wait(xfer, 100), KVD_FAILED);
	assert_int_equal(kvd_xfer_post(xfer, NULL, 0), 0);
	assert_int_equal(client_submitted(f, 8, &e, data, sizeof(data)), 0);
	assert_int_equal(e.flags, 0);
	assert_int_equal(e.gen, 3);
	assert_int_equal(kvd_xfer_state(xfer), KVD_TRANSFERRING);
	fake_kvd_word(f->fake, FIRST + 2, 3, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_xfer_state(xfer), KVD_SUCCESS);
	assert_int_equal(kvd_xfer_release(xfer), 0);
	client_submitted(f, 9, &e, data, sizeof(data));
	assert_int_equal(e.op, KVD_RING_RELEASE);
}

static void post_refused_for_now_may_be_posted_again(void **state)
{
	struct client_fixture *f = *state;
	unsigned int cap = f->client->max_pending;
	struct client_lists l;
	struct kvd_xfer *xfer;
	uint32_t gen;

	client_lists_make(f, 1, &l);
	xfer = make(f, &l);
	gen = xfer->slot.gen;
	fake_kvd_word(f->fake, xfer->slot.slot, gen, KVD_BOOTSTRAPPING, 0, 0);
	for (int i = 0; i < 2; i++) {
		f->client->max_pending = 0;
		assert_int_equal(kvd_xfer_post(xfer, NULL, 0), -KVD_E_FULL);
		assert_true(kvd_last_error(f->client)->retryable);
		assert_int_equal(kvd_xfer_state(xfer), KVD_BOOTSTRAPPING);
	}
	f->client->max_pending = cap;
	assert_int_equal(kvd_xfer_post(xfer, NULL, 0), 0);
	assert_int_equal(kvd_xfer_state(xfer), KVD_TRANSFERRING);
	fake_kvd_word(f->fake, xfer->slot.slot, gen + 1, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_xfer_state(xfer), KVD_SUCCESS);
	/* of one that was posted before, too */
	f->client->max_pending = 0;
	assert_int_equal(kvd_xfer_post(xfer, NULL, 0), -KVD_E_FULL);
	assert_int_equal(kvd_xfer_state(xfer), KVD_SUCCESS);
	assert_int_equal(kvd_xfer_release(xfer), -KVD_E_FULL); /* the handle stays */
	f->client->max_pending = cap;
	assert_int_equal(kvd_xfer_post(xfer, NULL, 0), 0);
	assert_int_equal(kvd_xfer_state(xfer), KVD_TRANSFERRING);
}

/* What no slot can show is kept at the handle: the code, and the words. */
static void entry_refused_by_the_socket_fails_with_text(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room_status st;
	struct kvd_ring_entry e;
	struct kvd_error error;
	struct client_lists l;
	struct kvd_xfer *xfer;

	client_lists_make(f, 1, &l);
	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"ENOMEM\","
				 "\"message\":\"no memory for it\"}}");
	xfer = make(f, &l);
	client_poll_answered(f);
	assert_int_equal(kvd_xfer_state(xfer), KVD_FAILED);
	assert_int_equal(kvd_xfer_wait(xfer, 0), KVD_FAILED);
	assert_int_equal(kvd_xfer_read(xfer, &st), 0);
	assert_int_equal(st.error, KVD_E_NOMEM);
	assert_int_equal(kvd_xfer_error(xfer, 0, &error), 0);
	assert_int_equal(error.code, KVD_E_NOMEM);
	assert_string_equal(error.message, "no memory for it");
	assert_int_equal(kvd_xfer_post(xfer, NULL, 0), -KVD_E_STATE);
	assert_int_equal(kvd_xfer_release(xfer), 0);
	client_submitted(f, 6, &e, NULL, 0); /* the daemon may have its slot */
	assert_int_equal(e.op, KVD_RING_RELEASE);
}

static void failure_in_page_fetches_its_text(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_error error;
	struct client_lists l;
	struct kvd_xfer *xfer;

	client_lists_make(f, 1, &l);
	xfer = make(f, &l);
	assert_int_equal(kvd_xfer_post(xfer, NULL, 0), 0);
	fake_kvd_word(f->fake, FIRST + 2, 2, KVD_FAILED, 0, KVD_E_PEER);
	client_poll_answered(f);
	fake_kvd_answer(f->fake, OK ",\"state\":\"failed\",\"error\":{\"code\":\"EPEER\","
				    "\"message\":\"it went away\"}}");
	assert_int_equal(kvd_xfer_error(xfer, 0, &error), 0);
	assert_int_equal(error.code, KVD_E_PEER);
	assert_string_equal(error.message, "it went away");
	assert_string_equal(client_line_args(f, 7),
			    "\"cmd\":\"xfer.state\",\"xfer\":281474976710690}");
}

static void on_notif(void *arg, const char *from, const void *data, size_t bytes)
{
	struct client_fixture *f = arg;

	f->done++;
	assert_string_equal(from, "12");
	if (f->done == 1) {
		assert_int_equal(bytes, 4);
		assert_memory_equal(data, "hi\0!", 4);
	} else {
		assert_int_equal(bytes, 0);
	}
}

static void notifs_are_bytes(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_ring_entry e;
	uint8_t data[8];

	assert_int_equal(kvd_notif_send(f->client, 2, "abc", 3), 0);
	assert_int_equal(client_submitted(f, 2, &e, data, sizeof(data)), 3);
	assert_memory_equal(data, "abc", 3);
	assert_int_equal(e.op, KVD_RING_NOTIFY);
	assert_int_equal(e.a, 2);
	assert_int_equal(e.bytes, 3);
	client_poll_answered(f);
	fake_kvd_page(f->fake)->notifs = 2;
	assert_int_equal(kvd_notif_waiting(f->client), 2);
	fake_kvd_answer(f->fake,
			OK ",\"notifs\":[{\"from\":\"12\",\"data\":\"aGkAIQ==\"},"
			   "{\"from\":\"12\",\"data\":\"\"}]}");
	assert_int_equal(kvd_notif_drain(f->client, 0, on_notif, f), 2);
	assert_int_equal(f->done, 2);
	assert_int_equal(kvd_notif_waiting(f->client), 0);
	fake_kvd_answer(f->fake, OK ",\"notifs\":[{\"from\":\"12\",\"data\":\"=a==\"}]}");
	assert_int_equal(kvd_notif_drain(f->client, 0, on_notif, f), -KVD_E_PROTO);
}

static void on_word(void *arg, const char *from, const void *data, size_t bytes)
{
	strncat(arg, from, 8);
	strncat(arg, data, bytes);
}

/* The daemon has given them away: an answer that comes too late loses none. */
static void notifs_of_late_reply_arrive_with_next(void **state)
{
	struct client_fixture *f = *state;
	char words[64] = "";

	fake_kvd_page(f->fake)->notifs = 3;
	fake_kvd_answer(f->fake, "");
	assert_int_equal(kvd_notif_drain(f->client, 20, on_word, words), -KVD_E_NOREPLY);
	fake_kvd_answer(f->fake, "{\"id\":%PREV%,\"ok\":true,\"notifs\":["
				 "{\"from\":\"1\",\"data\":\"aGkA\"},"
				 "{\"from\":\"2\",\"data\":\"aG8A\"}]}\n" OK "}");
	command_works(f);
	assert_int_equal(kvd_notif_waiting(f->client), 3);
	fake_kvd_answer(f->fake, OK ",\"notifs\":[{\"from\":\"3\",\"data\":\"aGEA\"}]}");
	assert_int_equal(kvd_notif_drain(f->client, 0, on_word, words), 3);
	assert_string_equal(words, "1hi2ho3ha");
	assert_int_equal(kvd_notif_waiting(f->client), 0);
}

static void notifs_before_fault_are_delivered(void **state)
{
	struct client_fixture *f = *state;
	char words[64] = "";

	fake_kvd_answer(f->fake, OK ",\"notifs\":[{\"from\":\"1\",\"data\":\"aGkA\"},"
				    "{\"from\":\"2\",\"data\":\"=a==\"},"
				    "{\"from\":\"3\",\"data\":\"aGEA\"}]}");
	assert_int_equal(kvd_notif_drain(f->client, 0, on_word, words), 1);
	assert_int_equal(kvd_notif_drain(f->client, 0, on_word, words), -KVD_E_PROTO);
	assert_int_equal(kvd_notif_drain(f->client, 0, on_word, words), 1);
	assert_string_equal(words, "1hi3ha");
}

static void notify(struct client_fixture *f, char fill, size_t bytes)
{
	char data[FAKE_KVD_ARENA_BYTES];

	memset(data, fill, bytes);
	assert_int_equal(kvd_notif_send(f->client, 2, data, bytes), 0);
}

/* A daemon that takes nothing keeps what was put: where the arena began at the front
 * again, too, though its head stays where the round before had ended. */
static void arena_of_a_slow_daemon_is_not_written_twice(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_ring_header *ring = fake_kvd_ring(f->fake);
	const uint8_t *arena = fake_kvd_arena(f->fake);
	struct kvd_ring_entry e;
	uint8_t data[1200];

	fake_kvd_answer(f->fake, "!ring");
	notify(f, '0', 2400);
	assert_int_equal(ring->tail, 1);
	ring->head = 1;
	notify(f, 'a', 2000);
	notify(f, 'b', 1200);
	assert_int_equal(ring->tail, 3);
	notify(f, 'c', 1200); /* no room: by the socket */
	assert_int_equal(ring->tail, 3);
	for (size_t i = 0; i < 3200; i++)
		assert_int_equal(arena[i], i < 2000 ? 'a' : 'b');
	assert_int_equal(client_submitted(f, 2, &e, data, sizeof(data)), 1200);
	assert_int_equal(data[0], 'c');
	client_poll_answered(f);
	ring->head = 2;
	notify(f, 'd', 1200); /* where 'a' was */
	assert_int_equal(ring->tail, 4);
	assert_int_equal(arena[0], 'd');
	assert_int_equal(arena[2000], 'b');
}

/* Every allocation fails once: an error, no handle, and the slot is given again. */
static void out_of_memory_fails_one_call(void **state)
{
	struct client_fixture *f = *state;
	const struct kvd_desc desc = {.address = 4096, .bytes = 64};
	struct kvd_xfer_args args = {.op = KVD_WRITE};
	struct kvd_dlist *dlist;
	struct client_lists l;
	struct kvd_xfer *xfer;
	uint64_t n;
	int r;

	client_lists_make(f, 1, &l);
	args.local = l.local;
	args.remote = l.remote;
	for (n = 1, r = -KVD_E_NOMEM; r; n++) {
		mem_fail_at(n);
		r = kvd_dlist_prep(f->client, 0, &desc, 1, 4, &dlist);
		mem_fail_at(0);
		assert_true(r == 0 || (r == -KVD_E_NOMEM && !dlist));
	}
	assert_true(n > 4);
	assert_int_equal(dlist->slot.slot, FIRST + 2);
	client_poll_answered(f);
	for (n = 1, r = -KVD_E_NOMEM; r; n++) {
		mem_fail_at(n);
		r = kvd_xfer_make(f->client, &args, &xfer);
		mem_fail_at(0);
		assert_true(r == 0 || (r == -KVD_E_NOMEM && !xfer));
	}
	assert_true(n > 3);
	assert_int_equal(xfer->slot.slot, FIRST + 3);
	assert_false(kvd_lost(f->client));
}

int main(void)
{
#define T(name)                                                     \
	cmocka_unit_test_setup_teardown(name, client_fixture_setup, \
					client_fixture_teardown)
	const struct CMUnitTest tests[] = {
		T(lists_are_sent_in_memory_order),
		T(list_without_arena_space_is_sent_as_memfd),
		T(list_in_flight_is_busy_then_refused_with_text),
		T(list_released_in_flight_is_withdrawn),
		T(indices_and_notification_are_sent_with_transfer),
		T(transfer_is_posted_canceled_and_posted_again),
		T(post_refused_for_now_may_be_posted_again),
		T(entry_refused_by_the_socket_fails_with_text),
		T(failure_in_page_fetches_its_text),
		T(notifs_are_bytes),
		T(notifs_of_late_reply_arrive_with_next),
		T(notifs_before_fault_are_delivered),
		T(arena_of_a_slow_daemon_is_not_written_twice),
		T(out_of_memory_fails_one_call),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
