/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvd against a scripted daemon (tests/lib/fake_kvd.h): rooms, the ends of
 * connections and daemons. What is read from the status page is
 * written by the test, word by word.
 */
#include "lib/kvd.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "tests/lib/client_fixture.h"

/* ---- rooms ------------------------------------------------------------------------- */

static void room_lines_are_complete(void **state)
{
	static const uint32_t scattered[] = {3, 4, 9}, run[] = {5, 6, 7, 8};
	struct client_fixture *f = *state;
	struct kvd_pool *pool = client_pool_make(f);
	struct kvd_region *region = client_region_make(f);
	struct kvd_source sources[2] = {{.endpoint = "tcp://a:1"},
					{.pool = "q", .another_room = true, .room = 5}};
	struct kvd_room_args open = {.room = UINT64_MAX,
				     .role = KVD_RECV,
				     .pool = pool,
				     .sources = sources,
				     .source_count = 2,
				     .receivers = 2,
				     .waiting_ms = 50,
				     .stall_ms = 60};
	struct kvd_view views[2] = {{.pages = scattered,
				     .page_count = 3,
				     .first_token = 16,
				     .token_begin = 16,
				     .token_end = 60},
				    {.name = "state",
				     .pages = run,
				     .page_count = 4,
				     .layer_begin = 2,
				     .layer_end = 4}};
	struct kvd_room_pages bind = {.views = views,
				      .view_count = 2,
				      .has_aux = true,
				      .aux = 9,
				      .wait = {region, 64, UINT64_MAX}};
	struct kvd_room_pages send = {
		.seq = 3, .views = views, .view_count = 1, .last = true};
	struct kvd_room *room;

	fake_kvd_answer(f->fake, OK ",\"slot\":1,\"gen\":\"5\"}");
	assert_int_equal(kvd_room_open(f->client, &open, NULL, &room), 0);
	assert_string_equal(
		client_line_args(f, 4),
		"\"cmd\":\"room.open\",\"room\":\"18446744073709551615\","
		"\"role\":\"recv\",\"pool\":4,\"sources\":[{\"endpoint\":\"tcp://a:1\"},"
		"{\"endpoint\":\"tcp://[::1]:1\",\"pool\":\"q\",\"room\":\"5\"}],"
		"\"receivers\":2,\"timeouts\":{\"waiting_ms\":50,\"stall_ms\":60}}");
	assert_int_equal(kvd_room_bind(room, &bind, NULL), 0);
	assert_string_equal(
		client_line_args(f, 5),
		"\"cmd\":\"room.bind\",\"room\":\"18446744073709551615\","
		"\"role\":\"recv\",\"views\":{\"kv\":{\"pages\":[3,4,9],"
		"\"first_token\":16,\"tokens\":[16,60]},\"state\":{\"pages\":[[5,4]],"
		"\"layers\":[2,4]}},\"aux\":9,\"wait\":{\"kind\":\"seq\",\"region\":3,"
		"\"offset\":64,\"value\":\"18446744073709551615\"}}");
	assert_int_equal(kvd_room_send(room, &send, NULL), 0);
	assert_string_equal(client_line_args(f, 6),
			    "\"cmd\":\"room.send\",\"room\":\"18446744073709551615\","
			    "\"role\":\"recv\",\"seq\":3,\"views\":{\"kv\":{\"pages\":[3,"
			    "4,9],\"first_token\":16,"
			    "\"tokens\":[16,60]}},\"last\":true}");
	assert_int_equal(kvd_room_abort(room, "over", NULL), 0);
	assert_string_equal(client_line_args(f, 7),
			    "\"cmd\":\"room.abort\",\"room\":\"18446744073709551615\","
			    "\"role\":\"recv\",\"reason\":\"over\"}");
}

static void room_pull_names_both_sides(void **state)
{
	static const uint32_t here[] = {1}, there[] = {2};
	struct client_fixture *f = *state;
	struct kvd_view local = {.pages = here, .page_count = 1};
	struct kvd_view remote = {.pages = there, .page_count = 1};
	struct kvd_source source = {.views = &remote, .view_count = 1};
	struct kvd_room_args open = {.room = 1,
				     .role = KVD_PULL,
				     .sources = &source,
				     .source_count = 1,
				     .views = &local,
				     .view_count = 1};
	struct kvd_room *room;

	assert_int_equal(kvd_room_open(f->client, &open, NULL, &room), -KVD_E_STATE);
	open.pool = client_pool_make(f);
	fake_kvd_answer(f->fake, OK ",\"slot\":1,\"gen\":\"5\"}");
	assert_int_equal(kvd_room_open(f->client, &open, NULL, &room), 0);
	assert_string_equal(
		client_line_args(f, 3),
		"\"cmd\":\"room.open\",\"room\":\"1\",\"role\":\"pull\",\"pool\":4,"
		"\"sources\":[{\"endpoint\":\"tcp://[::1]:1\"}],"
		"\"remote\":[{\"views\":{\"kv\":{\"pages\":[2]}}}],"
		"\"views\":{\"kv\":{\"pages\":[1]}}}");
}

/* A daemon from before rooms were posted tells no ops, and must not be given one: an
 * unknown one would end the session. */
static void room_without_ring_op_is_not_posted(void **state)
{
	static const struct kvd_call post = {.post = true};
	struct client_fixture *f = *state;
	struct kvd_room_args open = {.room = 1, .role = KVD_SEND};
	struct kvd_room *room;

	open.pool = client_pool_make(f);
	fake_kvd_answer(f->fake, "!ring");
	assert_int_equal(kvd_room_open(f->client, &open, &post, &room), -KVD_E_NOCMD);
	assert_non_null(strstr(kvd_last_error(f->client)->message, "op 8"));
	assert_null(room);
	assert_int_equal(fake_kvd_ring(f->fake)->tail, 0);
}

static void room_is_not_posted_without_a_ring(void **state)
{
	static const struct kvd_call post = {.post = true};
	struct client_fixture *f = *state;
	struct kvd_room_args open = {.room = 1, .role = KVD_SEND};
	struct kvd_room *room;

	open.pool = client_pool_make(f);
	fake_kvd_answer(f->fake, OK "}");
	assert_int_equal(kvd_room_open(f->client, &open, &post, &room), -KVD_E_REQUIRE);
	assert_null(room);
}

static void room_shows_landed_pages(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	uint8_t bitmap[4] = {9, 9, 9, 9};

	fake_kvd_answer(f->fake, OK "}");
	assert_int_equal(kvd_room_landed(room, NULL, 0, bitmap, 4), -KVD_E_STATE);
	fake_kvd_answer(f->fake, OK ",\"landed\":{\"kv\":\"ff0301\"}}");
	assert_int_equal(kvd_room_landed(room, NULL, 0, bitmap, 2), -KVD_E_TOOBIG);
	fake_kvd_answer(f->fake, OK ",\"landed\":{\"kv\":\"ff0301\"}}");
	assert_int_equal(kvd_room_landed(room, NULL, 0, bitmap, 4), 0);
	assert_memory_equal(bitmap, "\xff\x03\x01\0", 4);
	fake_kvd_answer(f->fake, OK ",\"landed\":{\"kv\":\"fx\"}}");
	assert_int_equal(kvd_room_landed(room, NULL, 0, bitmap, 4), -KVD_E_PROTO);
	fake_kvd_answer(f->fake, OK ",\"landed\":{\"kv\":\"\"}}");
	assert_int_equal(kvd_room_landed(room, "state", 0, bitmap, 4), -KVD_E_NOTFOUND);
}

static void room_state_follows_its_word(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	const struct kvd_room *rooms[2] = {room, room};
	struct kvd_room_status st;
	int states[2];

	for (unsigned int s = KVD_BOOTSTRAPPING; s <= KVD_TRANSFERRING; s++) {
		fake_kvd_word(f->fake, 2, 40, s, 0, 0);
		assert_int_equal(kvd_room_state(room), s);
		assert_int_equal(kvd_room_states(rooms, 2, states), 0);
		assert_int_equal(states[1], s);
	}
	assert_int_equal(kvd_room_close(room, NULL), -KVD_E_STATE);
	fake_kvd_slot(f->fake, 2)->bytes = 123;
	fake_kvd_slot(f->fake, 2)->total = 456;
	fake_kvd_word(f->fake, 2, 40, KVD_FAILED, KVD_FLAG_STAGED, KVD_E_PEER);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_FAILED);
	assert_int_equal(st.flags, KVD_FLAG_STAGED);
	assert_int_equal(st.error, KVD_E_PEER);
	assert_true(st.retryable);
	assert_int_equal(st.bytes, 123);
	assert_int_equal(st.total, 456);
	fake_kvd_word(f->fake, 2, 40, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_room_states(rooms, 2, states), 2);
	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, 0), KVD_SUCCESS);
	assert_int_equal(kvd_room_close(room, NULL), 0);
	assert_string_equal(client_line_args(f, 4),
			    "\"cmd\":\"room.close\",\"room\":\"77\",\"role\":\"send\"}");
}

static void room_failed_has_reason(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	const struct kvd_error *why;
	unsigned int n;

	fake_kvd_word(f->fake, 2, 40, KVD_WAITING_FOR_INPUT, 0, 0);
	assert_null(kvd_room_why(room, 0));
	fake_kvd_word(f->fake, 2, 40, KVD_FAILED, 0, KVD_E_REQUIRE);
	/* no answer in time: the code is known all the same */
	fake_kvd_answer(f->fake, "");
	why = kvd_room_why(room, 20);
	assert_int_equal(why->code, KVD_E_REQUIRE);
	assert_string_equal(why->message, "no allowed transport");
	client_error_set(&f->client->error, KVD_E_INVAL, "of another call");
	fake_kvd_answer(f->fake, OK ",\"error\":{\"code\":\"EREQUIRE\",\"message\":"
				    "\"no transport: tcp is off\",\"scope\":\"peer\","
				    "\"retryable\":true}}");
	why = kvd_room_why(room, 0);
	assert_int_equal(why->code, KVD_E_REQUIRE);
	assert_string_equal(why->message, "no transport: tcp is off");
	assert_string_equal(why->scope, "peer");
	assert_true(why->retryable);
	assert_string_equal(kvd_last_error(f->client)->message, "of another call");
	n = fake_kvd_lines(f->fake);
	assert_ptr_equal(kvd_room_why(room, 0), why); /* asked once */
	assert_int_equal(fake_kvd_lines(f->fake), n);
}

static void room_of_ended_session_has_reason(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);

	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	fake_kvd_kill(f->fake);
	while (kvd_poll(f->client, 100) >= 0)
		;
	assert_int_equal(kvd_room_why(room, 0)->code, KVD_E_DEAD);
	assert_string_equal(kvd_room_why(room, 0)->message,
			    "the daemon's process has ended");
	assert_true(kvd_room_why(room, 0)->retryable);
}

static bool child_is_well(pid_t pid)
{
	int status;

	assert_int_equal(waitpid(pid, &status, 0), pid);
	return status == 0;
}

/* From here on any system call but exit_group kills. (Not strict mode, which also
 * forbids the vDSO's clock its time stamp counter.) */
static void forbid_system_calls(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};
	struct sock_fprog filter = {ARRAY_LEN(code), code};

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
	    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
		_exit(2);
}

static void room_polls_make_no_system_call(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	const struct kvd_room *rooms[100];
	struct timespec ts;
	int states[100];
	pid_t pid;

	for (size_t i = 0; i < 100; i++)
		rooms[i] = room;
	pid = fork();
	if (!pid) {
		forbid_system_calls();
		clock_gettime(CLOCK_MONOTONIC, &ts);
		syscall(SYS_exit_group, 0);
	}
	if (!child_is_well(pid))
		skip(); /* needs a clock in the vDSO */
	pid = fork();
	if (!pid) {
		forbid_system_calls();
		for (int i = 0; i < 1000; i++)
			kvd_room_states(rooms, 100, states);
		syscall(SYS_exit_group, states[99] == KVD_BOOTSTRAPPING ? 0 : 1);
	}
	assert_true(child_is_well(pid));
}

static void room_of_other_generation_is_refused(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	struct kvd_room_status st;

	fake_kvd_word(f->fake, 2, 41, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_room_state(room), -KVD_E_GONE);
	assert_int_equal(kvd_room_read(room, &st), -KVD_E_GONE);
	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, 10), -KVD_E_GONE);
}

static void room_figures_unsettled_do_not_block(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	struct kvd_room_status st;

	fake_kvd_slot(f->fake, 2)->sequence = 7;
	fake_kvd_slot(f->fake, 2)->bytes = 5;
	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_TRANSFERRING);
	assert_int_equal(st.bytes, 0);
}

static void room_wait_keeps_timeout(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);

	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, 20), -KVD_E_NOREPLY);
	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	assert_int_equal(kvd_room_wait(room, KVD_WAITING_FOR_INPUT, 20),
			 KVD_TRANSFERRING);
}

static void room_of_a_frozen_daemon_is_aborting(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	const struct kvd_error *why;
	struct kvd_room_status st;

	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, 1), -KVD_E_NOREPLY);
	assert_null(strstr(kvd_last_error(f->client)->message, "own daemon"));
	kill(fake_kvd_pid(f->fake), SIGSTOP);
	fake_kvd_heartbeat(f->fake, false);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_TRANSFERRING);
	assert_true(st.flags & KVD_FLAG_ABORTING);
	/* and that it is the own daemon */
	assert_int_equal(st.error, KVD_E_NOREPLY);
	why = kvd_room_why(room, 60000); /* nobody is asked */
	assert_int_equal(why->code, KVD_E_NOREPLY);
	assert_non_null(strstr(why->message, "does not respond (no heartbeat"));
	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, 1), -KVD_E_NOREPLY);
	assert_non_null(strstr(kvd_last_error(f->client)->message,
			       "still transferring: the local daemon does not"));
	assert_int_equal(kvd_room_abort(room, NULL, &(struct kvd_call){.timeout_ms = 1}),
			 -KVD_E_NOREPLY);
	assert_non_null(
		strstr(kvd_last_error(f->client)->message, "local daemon does not"));
	fake_kvd_word(f->fake, 2, 40, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_room_state(room), KVD_SUCCESS);
	fake_kvd_word(f->fake, 2, 40, KVD_WAITING_FOR_INPUT, 0, 0);
	fake_kvd_heartbeat(f->fake, true);
	kill(fake_kvd_pid(f->fake), SIGCONT);
	assert_int_equal(kvd_room_state(room), KVD_WAITING_FOR_INPUT);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.error, 0);
	assert_null(kvd_room_why(room, 0));
}

static void room_of_a_dead_daemon_is_failed_retryable(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	struct kvd_room_status st;

	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	fake_kvd_kill(f->fake);
	fake_kvd_heartbeat(f->fake, false);
	/* the pidfd is asked at most every 10 ms */
	for (int i = 0; i < 10000 && kvd_room_state(room) != KVD_FAILED; i++)
		poll(NULL, 0, 1);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_FAILED);
	assert_int_equal(st.error, KVD_E_DEAD);
	assert_true(st.retryable);
	/* what it finished before its end stays finished */
	fake_kvd_word(f->fake, 2, 40, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_room_state(room), KVD_SUCCESS);
}

static void room_sees_death_by_the_socket_before_the_beat_is_old(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);

	fake_kvd_kill(f->fake); /* the heartbeat is fresh for ever */
	while (kvd_poll(f->client, 100) >= 0)
		;
	assert_true(kvd_lost(f->client));
	assert_int_equal(kvd_room_state(room), KVD_FAILED);
	assert_int_equal(kvd_room_close(room, NULL), 0);
}

static void room_open_refused_is_failed(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room_args args = {.room = 1, .pool = client_pool_make(f)};
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	struct kvd_room_status st;
	struct kvd_room *room;

	fake_kvd_answer(f->fake,
			"{\"id\":%ID%,\"error\":{\"code\":\"EDRAIN\",\"message\":\"\"}}");
	assert_int_equal(kvd_room_open(f->client, &args, NULL, &room), -KVD_E_DRAIN);
	assert_null(room);
	fake_kvd_answer(f->fake,
			"{\"id\":%ID%,\"error\":{\"code\":\"EDRAIN\",\"message\":\"\"}}");
	assert_int_equal(kvd_room_open(f->client, &args, &call, &room), 0);
	assert_int_equal(kvd_room_state(room), KVD_BOOTSTRAPPING);
	client_poll_until(f, 1);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_FAILED);
	assert_int_equal(st.error, KVD_E_DRAIN);
	assert_int_equal(kvd_room_close(room, NULL), 0);
	assert_int_equal(fake_kvd_lines(f->fake), 5);
}

static void room_chunks_may_follow_an_unanswered_open(void **state)
{
	static const uint32_t pages[] = {1};
	struct client_fixture *f = *state;
	struct kvd_view view = {.pages = pages, .page_count = 1};
	struct kvd_room_args args = {.room = 1, .pool = client_pool_make(f)};
	struct kvd_room_pages send = {.views = &view, .view_count = 1};
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	struct kvd_room *room;

	fake_kvd_answer(f->fake, OK ",\"slot\":1,\"gen\":\"5\"}");
	assert_int_equal(kvd_room_open(f->client, &args, &call, &room), 0);
	assert_int_equal(kvd_room_send(room, &send, &call), 0);
	client_poll_until(f, 2);
	assert_int_equal(f->result, 0);
}

static void room_in_doubt_is_aborting_until_it_is_known(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room_args args = {
		.room = 9, .role = KVD_PULL, .pool = client_pool_make(f)};
	struct kvd_call call = {.timeout_ms = 20};
	struct kvd_room_status st;
	struct kvd_room *room;
	char *reply;

	fake_kvd_answer(f->fake, "");
	assert_int_equal(kvd_room_open(f->client, &args, &call, &room), -KVD_E_NOREPLY);
	assert_non_null(room);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_TRANSFERRING);
	assert_true(st.flags & KVD_FLAG_ABORTING);
	assert_int_equal(kvd_room_close(room, NULL), -KVD_E_STATE);
	fake_kvd_word(f->fake, 6, 3, KVD_TRANSFERRING, KVD_FLAG_ABORTING, 0);
	fake_kvd_answer(f->fake,
			"{\"id\":%PREV%,\"ok\":true,\"slot\":6,\"gen\":\"3\"}\n" OK "}");
	assert_int_equal(kvd_command(f->client, "ping", NULL, 0, &reply), 0);
	kvd_string_free(reply);
	assert_non_null(strstr(client_line_args(f, 5), "room.abort"));
	assert_int_equal(kvd_room_state(room), KVD_TRANSFERRING);
	fake_kvd_word(f->fake, 6, 3, KVD_FAILED, 0, KVD_E_ABORTED);
	assert_int_equal(kvd_room_state(room), KVD_FAILED);
	assert_int_equal(kvd_room_close(room, NULL), 0);
}

static void room_uncertain_after_session_end_reads_page(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room_args args = {
		.room = 9, .role = KVD_PULL, .pool = client_pool_make(f)};
	struct kvd_room *room;

	/* the daemon made the room, then closed the connection */
	fake_kvd_slot(f->fake, 6)->object = 9;
	fake_kvd_word(f->fake, 6, 3, KVD_TRANSFERRING, 0, 0);
	fake_kvd_answer(f->fake, "!close");
	assert_int_equal(kvd_room_open(f->client, &args, NULL, &room), -KVD_E_LOST);
	assert_int_equal(kvd_room_state(room), KVD_TRANSFERRING);
	fake_kvd_word(f->fake, 6, 3, KVD_FAILED, 0, KVD_E_SESSION);
	assert_int_equal(kvd_room_state(room), KVD_FAILED);
	assert_int_equal(kvd_room_close(room, NULL), 0);
}

/* ---- the end of a connection ----------------------------------------------------- */

static void lost_connection_ends_every_request_once(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = client_on_done, .arg = f};

	for (int i = 0; i < 10; i++)
		fake_kvd_answer(f->fake, i < 9 ? "" : "!close");
	for (int i = 0; i < 10; i++)
		assert_int_equal(kvd_submit(f->client, "a", NULL, &call), 0);
	client_poll_until(f, 10);
	assert_int_equal(f->result, -KVD_E_LOST);
	assert_int_equal(kvd_poll(f->client, 10), -KVD_E_LOST);
	assert_int_equal(f->done, 10);
	assert_int_equal(kvd_submit(f->client, "a", NULL, &call), -KVD_E_LOST);
}

static void reconnect_registers_again_under_old_handles(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	struct kvd_region *region;
	struct kvd_pool *pool;
	unsigned int fds, n;

	region = (struct kvd_region *)(void *)list_first(
		&f->client->objects[CLIENT_REGION], struct client_object, link);
	pool = (struct kvd_pool *)(void *)list_first(&f->client->objects[CLIENT_POOL],
						     struct client_object, link);
	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	fake_kvd_kill(f->fake);
	while (kvd_poll(f->client, 100) >= 0)
		;
	assert_int_equal(kvd_region_id(region), 0);
	assert_int_equal(kvd_region_unregister(region, NULL), -KVD_E_LOST);
	assert_int_equal(kvd_reconnect(f->client, 1000), -KVD_E_NODAEMON);
	n = fake_kvd_lines(f->fake);
	fake_kvd_restart(f->fake);
	fake_kvd_answer(f->fake, OK ",\"region\":103}");
	fake_kvd_answer(f->fake, OK ",\"pool\":104}");
	assert_int_equal(kvd_reconnect(f->client, 0), 0);
	assert_int_equal(kvd_daemon(f->client)->pid, fake_kvd_pid(f->fake));
	assert_int_equal(kvd_region_id(region), 103);
	assert_int_equal(kvd_pool_id(pool), 104);
	assert_non_null(strstr(client_line_args(f, n + 1), "region.register"));
	fake_kvd_line(f->fake, n + 1, &fds);
	assert_int_equal(fds, 2); /* and statm */
	assert_non_null(
		strstr(client_line_args(f, n + 2), "\"regions\":[{\"region\":103}]"));
	/* the old room reads its old page, whose daemon is gone; the new page's
	 * slot of the same number and generation is another room's */
	fake_kvd_word(f->fake, 2, 40, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_room_state(room), KVD_FAILED);
	assert_int_equal(kvd_room_abort(room, NULL, NULL), 0);
	assert_int_equal(kvd_room_close(room, NULL), 0);
	assert_int_equal(fake_kvd_lines(f->fake), n + 3);
}

static void reconnect_refused_half_way_is_lost_again(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_pool *pool = client_pool_make(f);

	fake_kvd_answer(
		f->fake,
		"{\"id\":%ID%,\"error\":{\"code\":\"ELIMIT\",\"message\":\"r\"}}");
	assert_int_equal(kvd_reconnect(f->client, 0), -KVD_E_LIMIT);
	assert_string_equal(kvd_last_error(f->client)->message, "r");
	assert_true(kvd_lost(f->client));
	assert_int_equal(kvd_pool_id(pool), 0);
	fake_kvd_answer(f->fake, OK ",\"region\":1}");
	fake_kvd_answer(f->fake, OK ",\"pool\":2}");
	assert_int_equal(kvd_reconnect(f->client, 0), 0);
	assert_int_equal(kvd_pool_id(pool), 2);
}

static void client_in_a_forked_child_is_refused(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_room *room = client_room_make(f, 2, 40);
	int status;
	char *reply;
	pid_t pid = fork();

	if (!pid) {
		int bad = kvd_command(f->client, "a", NULL, 0, &reply) != -KVD_E_FORKED;

		bad |= kvd_poll(f->client, 0) != -KVD_E_FORKED;
		bad |= kvd_room_state(room) != KVD_BOOTSTRAPPING;
		bad |= kvd_close(f->client) != 0;
		_exit(bad);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), 0);
	kvd_string_free(reply);
}

/* Every allocation fails once: an error, never a leak or a crash. */
static void out_of_memory_fails_one_call(void **state)
{
	static const uint32_t pages[] = {1, 2, 3};
	struct client_fixture *f = *state;
	struct kvd_pool *pool = client_pool_make(f);
	struct kvd_view view = {.pages = pages, .page_count = 3};
	struct kvd_room_args args = {
		.room = 1, .pool = pool, .views = &view, .view_count = 1};
	struct kvd_room *room = NULL;
	uint64_t n = 1;
	int r;

	for (;; n++) {
		mem_fail_at(n);
		r = kvd_room_open(f->client, &args, NULL, &room);
		mem_fail_at(0);
		if (r != -KVD_E_NOMEM)
			break;
		assert_null(room);
		assert_false(kvd_lost(f->client));
	}
	assert_true(n >= 4);
	/* the answer above named no slot */
	assert_int_equal(r, -KVD_E_PROTO);
}

int main(void)
{
#define T(name)                                                     \
	cmocka_unit_test_setup_teardown(name, client_fixture_setup, \
					client_fixture_teardown)
	const struct CMUnitTest tests[] = {
		T(room_lines_are_complete),
		T(room_pull_names_both_sides),
		T(room_shows_landed_pages),
		T(room_without_ring_op_is_not_posted),
		T(room_is_not_posted_without_a_ring),
		T(room_state_follows_its_word),
		T(room_failed_has_reason),
		T(room_of_ended_session_has_reason),
		T(room_polls_make_no_system_call),
		T(room_of_other_generation_is_refused),
		T(room_figures_unsettled_do_not_block),
		T(room_wait_keeps_timeout),
		T(room_of_a_frozen_daemon_is_aborting),
		T(room_of_a_dead_daemon_is_failed_retryable),
		T(room_sees_death_by_the_socket_before_the_beat_is_old),
		T(room_open_refused_is_failed),
		T(room_chunks_may_follow_an_unanswered_open),
		T(room_in_doubt_is_aborting_until_it_is_known),
		T(room_uncertain_after_session_end_reads_page),
		T(lost_connection_ends_every_request_once),
		T(reconnect_registers_again_under_old_handles),
		T(reconnect_refused_half_way_is_lost_again),
		T(client_in_a_forked_child_is_refused),
		T(out_of_memory_fails_one_call),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
