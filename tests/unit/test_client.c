/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvd against a scripted daemon (tests/lib/fake_kvd.h): opening, calls and
 * callbacks, regions, pools, memory, layouts. What is sent is compared as text,
 * so that a change of the protocol shows here.
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
#include <sys/mman.h>
#include <sys/stat.h>
#include <poll.h>
#include <sched.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "lib/client.h"
#include "tests/lib/client_fixture.h"
#include "tests/lib/tmp.h"

/* ---- errors, names ------------------------------------------------------------ */

static void codes_public_match_daemon(void **state)
{
	(void)state;
#define CHECK(num, name, no, scope, retry, text, remedy) \
	assert_int_equal(KVD_E_##name, num);             \
	assert_string_equal(kvd_code_name(-KVD_E_##name), err_name(ERR_##name));
	ERR_CODES(CHECK)
#undef CHECK
	assert_int_equal(ERR_CODE_END, KVD_E_INTERNAL + 1);
	assert_string_equal(kvd_code_name(KVD_E_GONE), "EGONE");
	assert_string_equal(kvd_code_name(4711), "EUNKNOWN");
	assert_string_equal(kvd_state_name(KVD_WAITING_FOR_INPUT), "waiting_for_input");
	assert_string_equal(kvd_state_name(9), "unknown");
}

static void error_reply_is_complete(void **state)
{
	struct client_fixture *f = *state;
	char *reply;

	fake_kvd_answer(f->fake,
			"{\"id\":%ID%,\"error\":{\"code\":\"ELIMIT\",\"message\":"
			"\"rooms: 5 of 5\",\"retryable\":false,\"scope\":\"peer\"}}");
	assert_int_equal(kvd_command(f->client, "x.y", NULL, 0, &reply), -KVD_E_LIMIT);
	assert_non_null(strstr(reply, "rooms: 5 of 5"));
	kvd_string_free(reply);
	assert_string_equal(kvd_last_error(f->client)->message, "rooms: 5 of 5");
	assert_string_equal(kvd_last_error(f->client)->scope, "peer");
	assert_false(kvd_last_error(f->client)->retryable);
}

/* ---- opening ------------------------------------------------------------------- */

static void open_reports_hello_reply(void **state)
{
	struct client_fixture *f = *state;
	const struct kvd_daemon_info *info = kvd_daemon(f->client);

	assert_string_equal(client_line_args(f, 0),
			    "\"cmd\":\"hello\",\"proto\":1,\"client\":\"test\"}");
	assert_string_equal(info->daemon, "kvd 9.9");
	assert_string_equal(info->name, "fake");
	assert_string_equal(info->endpoint, "tcp://[::1]:1");
	assert_int_equal(info->session, 7);
	assert_int_equal(info->epoch, 77);
	assert_int_equal(info->slots, FAKE_KVD_SLOTS);
	assert_int_equal(info->pid, fake_kvd_pid(f->fake));
}

static void open_without_daemon_names_path(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_options o = {.socket = "/nonexistent/kvd.sock"};
	struct kvd_client *client;

	assert_int_equal(kvd_open(&o, &client), -KVD_E_NODAEMON);
	assert_null(client);
	assert_non_null(strstr(kvd_last_error(NULL)->message, "/nonexistent/kvd.sock"));
	o.socket = fake_kvd_path(f->fake);
	fake_kvd_kill(f->fake);
	assert_int_equal(kvd_open(&o, &client), -KVD_E_NODAEMON);
	assert_non_null(strstr(kvd_last_error(NULL)->message, "no process listens"));
}

static void open_with_long_path_is_refused(void **state)
{
	char path[200];
	struct kvd_options o = {.socket = path};
	struct kvd_client *client;

	(void)state;
	memset(path, 'a', sizeof(path) - 1);
	path[sizeof(path) - 1] = '\0';
	assert_int_equal(kvd_open(&o, &client), -KVD_E_TOOBIG);
}

static void open_with_bad_hello_is_refused(void **state)
{
	static const char *const hellos[] = {
		"{\"id\":%ID%,\"ok\":true}",
		"{\"id\":%ID%,\"ok\":true,\"session\":1,\"epoch\":\"x\"}",
		"{\"id\":%ID%,\"error\":{\"code\":\"EPERM\",\"message\":\"uid 5\"}}",
		"{\"id\":99999,\"ok\":true}",
		"nonsense",
		"!close",
	};
	static const int results[] = {KVD_E_PROTO, KVD_E_PROTO, KVD_E_PERM,
				      KVD_E_LOST,  KVD_E_LOST,	KVD_E_LOST};
	struct client_fixture *f = *state;
	struct kvd_options o = {.socket = fake_kvd_path(f->fake)};
	struct kvd_client *client;

	kvd_close(f->client);
	for (size_t i = 0; i < ARRAY_LEN(hellos); i++) {
		fake_kvd_hello(f->fake, hellos[i]);
		assert_int_equal(kvd_open(&o, &client), -results[i]);
		assert_null(client);
	}
	assert_int_equal(kvd_open(&o, &f->client), 0);
}

/* As in a time namespace, or beside a daemon in one. */
static void open_with_another_clock_is_refused(void **state)
{
	static const struct {
		int64_t shift_s;
		const char *words;
	} cases[] = {{5, " s ahead of"}, {-10, " s behind"}};
	struct client_fixture *f = *state;
	struct kvd_options o = {.socket = fake_kvd_path(f->fake)};
	struct kvd_client *client;

	kvd_close(f->client);
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		fake_kvd_shift(f->fake, cases[i].shift_s * 1000000000);
		assert_int_equal(kvd_open(&o, &client), -KVD_E_STATE);
		assert_non_null(strstr(kvd_last_error(NULL)->message, cases[i].words));
		assert_non_null(strstr(kvd_last_error(NULL)->message, "time namespace"));
	}
	fake_kvd_shift(f->fake, 0);
	assert_int_equal(kvd_open(&o, &f->client), 0);
}

static void open_with_bad_page_is_refused(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_options o = {.socket = fake_kvd_path(f->fake)};
	struct kvd_client *client;

	kvd_close(f->client);
	f->client = NULL;
	fake_kvd_page(f->fake)->slots = FAKE_KVD_SLOTS + 1;
	assert_int_equal(kvd_open(&o, &client), -KVD_E_PROTO);
	fake_kvd_page(f->fake)->slots = FAKE_KVD_SLOTS;
	fake_kvd_page(f->fake)->magic++;
	assert_int_equal(kvd_open(&o, &client), -KVD_E_PROTO);
	assert_non_null(strstr(kvd_last_error(NULL)->message, "magic"));
}

static void socket_find_prefers_name_then_environment_then_only_one(void **state)
{
	char dir[64], path[200], want[200];
	struct kvd_error why;

	(void)state;
	assert_non_null(mkdtemp(tmp_path(dir, sizeof(dir), "kvd-find-XXXXXX")));
	setenv("KVD_RUN_DIR", dir, 1);
	assert_int_equal(kvd_socket_find(NULL, path, sizeof(path), &why),
			 -KVD_E_NODAEMON);
	assert_non_null(strstr(why.message, dir));
	assert_int_equal(kvd_socket_find("gpu3", path, sizeof(path), &why), 0);
	snprintf(want, sizeof(want), "%s/gpu3.sock", dir);
	assert_string_equal(path, want);
	close(open(want, O_CREAT | O_RDWR, 0600));
	assert_int_equal(kvd_socket_find(NULL, path, sizeof(path), &why), 0);
	assert_string_equal(path, want);
	snprintf(path, sizeof(path), "%s/gpu4.sock", dir);
	close(open(path, O_CREAT | O_RDWR, 0600));
	assert_int_equal(kvd_socket_find(NULL, want, sizeof(want), &why),
			 -KVD_E_NODAEMON);
	assert_non_null(strstr(why.message, "2 sockets"));
	setenv("KVD_SOCKET", "/x/y.sock", 1);
	assert_int_equal(kvd_socket_find(NULL, want, sizeof(want), &why), 0);
	assert_string_equal(want, "/x/y.sock");
	assert_int_equal(kvd_socket_find("gpu4", want, sizeof(want), &why), 0);
	assert_string_equal(want, path);
	unsetenv("KVD_SOCKET");
	unsetenv("KVD_RUN_DIR");
	unlink(path);
	snprintf(path, sizeof(path), "%s/gpu3.sock", dir);
	unlink(path);
	rmdir(dir);
}

/* ---- calls ----------------------------------------------------------------------- */

static void submit_runs_callbacks_once_each(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = client_on_done, .arg = f};

	for (int i = 0; i < 100; i++)
		assert_int_equal(
			kvd_submit(f->client, "ping", "{ \"a\" : [1,\n2] }", &call), 0);
	assert_int_equal(f->done, 0);
	client_poll_until(f, 100);
	assert_int_equal(kvd_pending(f->client), 0);
	assert_string_equal(client_line_args(f, 100), "\"cmd\":\"ping\",\"a\":[1,2]}");
}

/* As the daemon writes them, and as JSON may be written, too. */
static void command_returns_the_text_of_a_success(void **state)
{
	static const char *const answers[][2] = {
		{"{\"id\":%ID%,\"ok\":true,\"n\":1}", "\"n\":1}"},
		{"{\"ok\":true,\"n\":2,\"id\":%ID%}", "\"n\":2"},
		{"{ \"id\":%ID%, \"ok\":true,\"n\":3}", "\"n\":3}"},
		{"{\"id\":%ID%,\"ok\":false,\"error\":{\"code\":\"EPERM\"}}", NULL},
		{"{\"id\":%ID%,\"error\":{\"code\":\"EPERM\"}}", NULL},
	};
	struct client_fixture *f = *state;
	char *reply;

	for (size_t i = 0; i < ARRAY_LEN(answers); i++) {
		fake_kvd_answer(f->fake, answers[i][0]);
		assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply),
				 answers[i][1] ? 0 : -KVD_E_PERM);
		if (answers[i][1])
			assert_non_null(strstr(reply, answers[i][1]));
		kvd_string_free(reply);
	}
	assert_int_equal(kvd_pending(f->client), 0);
}

static void submit_over_cap_is_full(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = client_on_done, .arg = f};

	f->client->max_pending = 2;
	fake_kvd_answer(f->fake, "");
	fake_kvd_answer(f->fake, "");
	assert_int_equal(kvd_submit(f->client, "a", NULL, &call), 0);
	assert_int_equal(kvd_submit(f->client, "b", NULL, &call), 0);
	assert_int_equal(kvd_submit(f->client, "c", NULL, &call), -KVD_E_FULL);
	assert_true(kvd_last_error(f->client)->retryable);
}

static void submit_to_sleeping_reader_is_bounded(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	char *big = calloc(1, 100001);
	char *args = calloc(1, 100100);
	int r = 0;

	memset(big, 'x', 100000);
	snprintf(args, 100100, "{\"a\":\"%s\"}", big);
	kill(fake_kvd_pid(f->fake), SIGSTOP);
	for (int i = 0; i < 1000 && !r; i++)
		r = kvd_submit(f->client, "a", args, &call);
	assert_int_equal(r, -KVD_E_FULL);
	assert_true(f->client->conn.queued_bytes <= f->client->max_queued_bytes);
	assert_true(kvd_events(f->client) & POLLOUT);
	fake_kvd_kill(f->fake);
	client_poll_until(f, kvd_pending(f->client) + f->done);
	assert_int_equal(f->result, -KVD_E_LOST);
	free(big);
	free(args);
}

static void submit_with_bad_args_is_refused(void **state)
{
	static const char *const bad[] = {"[1]",	"{", "", "{\"cmd\":\"x\"}",
					  "{\"id\":3}", "1"};
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	char *huge = malloc((1 << 20) + 10);

	for (size_t i = 0; i < ARRAY_LEN(bad); i++)
		assert_int_equal(kvd_submit(f->client, "a", bad[i], &call), -KVD_E_INVAL);
	memset(huge, ' ', 1 << 20);
	memcpy(huge, "{\"a\":\"", 6);
	memcpy(huge + (1 << 20), "\"}", 3);
	assert_int_equal(kvd_submit(f->client, "a", huge, &call), -KVD_E_TOOBIG);
	free(huge);
	assert_int_equal(kvd_pending(f->client), 0);
	assert_int_equal(fake_kvd_lines(f->fake), 1);
}

static void deadline_ends_a_submit(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = client_on_done, .arg = f, .timeout_ms = 30};
	char *reply;

	fake_kvd_answer(f->fake, "");
	assert_int_equal(kvd_submit(f->client, "a", NULL, &call), 0);
	assert_in_range(kvd_timeout_ms(f->client), 0, 31);
	client_poll_until(f, 1);
	assert_int_equal(f->result, -KVD_E_NOREPLY);
	/* the late answer meets nobody */
	fake_kvd_answer(f->fake, "{\"id\":%PREV%,\"ok\":true}\n" OK "}");
	assert_int_equal(kvd_command(f->client, "b", NULL, 0, &reply), 0);
	kvd_string_free(reply);
	assert_int_equal(f->done, 1);
	assert_int_equal(kvd_pending(f->client), 0);
	assert_int_equal(kvd_timeout_ms(f->client), -1);
}

static void on_done_nested(void *arg, int result, const struct kvd_reply *reply)
{
	struct client_fixture *f = arg;
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	char *text;

	assert_int_equal(result, 0);
	assert_non_null(reply->json);
	assert_int_equal(kvd_command(f->client, "b", NULL, 0, &text), -KVD_E_STATE);
	assert_int_equal(kvd_poll(f->client, 0), -KVD_E_STATE);
	assert_int_equal(kvd_close(f->client), -KVD_E_STATE);
	assert_int_equal(kvd_reconnect(f->client, 0), -KVD_E_STATE);
	assert_int_equal(kvd_submit(f->client, "c", NULL, &call), 0);
}

static void callback_may_submit_but_not_block(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_call call = {.on_done = on_done_nested, .arg = f};

	assert_int_equal(kvd_submit(f->client, "a", NULL, &call), 0);
	client_poll_until(f, 1);
	assert_int_equal(f->result, 0);
}

static unsigned int open_fds(void)
{
	unsigned int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void fds_unexpected_are_closed(void **state)
{
	struct client_fixture *f = *state;
	unsigned int before = open_fds();
	char *reply;

	for (int i = 0; i < 20; i++) {
		fake_kvd_answer(f->fake, "!fds");
		assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), 0);
		kvd_string_free(reply);
	}
	assert_int_equal(open_fds(), before);
}

static void junk_from_the_daemon_ends_the_connection(void **state)
{
	struct client_fixture *f = *state;
	char *reply;

	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"ok\":tru");
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), -KVD_E_LOST);
	assert_null(reply);
	assert_true(kvd_lost(f->client));
	assert_int_equal(kvd_fd(f->client), -1);
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), -KVD_E_LOST);
}

static void close_reason_is_reported(void **state)
{
	struct client_fixture *f = *state;
	char *reply;

	fake_kvd_answer(f->fake,
			"{\"id\":null,\"error\":{\"code\":\"EPROTO\",\"message\":"
			"\"line over 1 MiB\"}}");
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), -KVD_E_LOST);
	assert_non_null(strstr(kvd_last_error(f->client)->message, "line over 1 MiB"));
}

/* ---- regions and pools ------------------------------------------------------------ */

static void region_memfd_sends_its_fd_and_statm(void **state)
{
	struct client_fixture *f = *state;
	int fd = memfd_create("region", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	struct kvd_region_args args = {.fd = fd,
				       .bytes = 8192,
				       .offset = 4096,
				       .address = (void *)0x7f0000000000,
				       .name = "ca\"che"};
	struct kvd_region *region;
	unsigned int fds;

	fake_kvd_answer(f->fake, OK ",\"region\":11}");
	assert_int_equal(kvd_region_register(f->client, &args, NULL, &region), 0);
	close(fd);
	assert_int_equal(kvd_region_id(region), 11);
	assert_string_equal(
		client_line_args(f, 1),
		"\"cmd\":\"region.register\",\"kind\":\"memfd\",\"length\":\"8192\","
		"\"fd\":0,\"statm\":1,\"offset\":4096,\"address\":\"139637976727552\","
		"\"name\":\"ca\\u0022che\"}");
	fake_kvd_line(f->fake, 1, &fds);
	assert_int_equal(fds, 2);
	assert_int_equal(kvd_region_unregister(region, NULL), 0);
	assert_string_equal(client_line_args(f, 2),
			    "\"cmd\":\"region.unregister\",\"region\":11}");
}

static void region_with_bad_args_is_refused_here(void **state)
{
	static const struct kvd_region_args bad[] = {
		{.fd = -1, .bytes = 1},
		{.fd = 0, .bytes = 0},
		{.fd = 999, .bytes = 1},
		{.kind = KVD_REGION_SHM, .fd = -1, .bytes = 1},
		{.kind = KVD_REGION_SHM, .shm_name = "", .bytes = 1},
		{.kind = KVD_REGION_VM, .bytes = 1},
		{.kind = (enum kvd_region_kind)7, .bytes = 1},
	};
	struct client_fixture *f = *state;
	struct kvd_region *region;

	for (size_t i = 0; i < ARRAY_LEN(bad); i++) {
		assert_int_equal(kvd_region_register(f->client, &bad[i], NULL, &region),
				 -KVD_E_INVAL);
		assert_null(region);
	}
	assert_int_equal(fake_kvd_lines(f->fake), 1);
}

static void region_answered_late_is_undone(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_region_args args = {
		.kind = KVD_REGION_SHM, .shm_name = "/x", .bytes = 4096};
	struct kvd_call call = {.timeout_ms = 20};
	struct kvd_region *region;
	char *reply;

	fake_kvd_answer(f->fake, "");
	assert_int_equal(kvd_region_register(f->client, &args, &call, &region),
			 -KVD_E_NOREPLY);
	assert_null(region);
	fake_kvd_answer(f->fake, "{\"id\":%PREV%,\"ok\":true,\"region\":9}\n" OK "}");
	assert_int_equal(kvd_command(f->client, "ping", NULL, 0, &reply), 0);
	kvd_string_free(reply);
	assert_string_equal(client_line_args(f, 3),
			    "\"cmd\":\"region.unregister\",\"region\":9}");
}

static void region_busy_keeps_its_handle(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_region *region = client_region_make(f);

	fake_kvd_answer(f->fake,
			"{\"id\":%ID%,\"error\":{\"code\":\"EBUSY\",\"message\":\"p\"}}");
	assert_int_equal(kvd_region_unregister(region, NULL), -KVD_E_BUSY);
	assert_true(kvd_last_error(f->client)->retryable);
	assert_int_equal(kvd_region_id(region), 3);
	assert_int_equal(kvd_region_unregister(region, NULL), 0);
}

static void region_async_failure_leaves_a_handle_to_free(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_region_args args = {
		.kind = KVD_REGION_SHM, .shm_name = "/x", .bytes = 4096};
	struct kvd_call call = {.on_done = client_on_done, .arg = f};
	struct kvd_region *region;

	fake_kvd_answer(
		f->fake,
		"{\"id\":%ID%,\"error\":{\"code\":\"EIMPORT\",\"message\":\"\"}}");
	assert_int_equal(kvd_region_register(f->client, &args, &call, &region), 0);
	assert_int_equal(kvd_region_id(region), 0);
	assert_int_equal(kvd_region_unregister(region, NULL), -KVD_E_STATE);
	client_poll_until(f, 1);
	assert_int_equal(f->result, -KVD_E_IMPORT);
	assert_int_equal(kvd_region_id(region), 0);
	/* nothing to ask the daemon: told in the next turn */
	assert_int_equal(kvd_region_unregister(region, &call), 0);
	assert_int_equal(f->done, 1);
	client_poll_until(f, 2);
	assert_int_equal(f->result, 0);
	assert_int_equal(fake_kvd_lines(f->fake), 2);
}

static void pool_line_names_regions_and_layout(void **state)
{
	struct client_fixture *f = *state;
	struct kvd_region *regions[2] = {client_region_make(f), client_region_make(f)};
	uint64_t offsets[2] = {0, 512};
	struct kvd_pool_args args = {.name = "kv8",
				     .layout = "{ \"rank\" : 1,\n\"buffers\":[1,2] }",
				     .regions = regions,
				     .offsets = offsets,
				     .region_count = 2};
	struct kvd_pool *pool;

	fake_kvd_answer(f->fake, OK ",\"pool\":21}");
	assert_int_equal(kvd_pool_register(f->client, &args, NULL, &pool), 0);
	assert_int_equal(kvd_pool_id(pool), 21);
	assert_string_equal(
		client_line_args(f, 3),
		"\"cmd\":\"pool.register\",\"name\":\"kv8\",\"layout\":{\"rank\":1,"
		"\"buffers\":[1,2]},\"regions\":[{\"region\":3},{\"region\":3,"
		"\"offset\":512}]}");
	args.layout = "[]";
	assert_int_equal(kvd_pool_register(f->client, &args, NULL, &pool), -KVD_E_INVAL);
	assert_null(pool);
}

/* ---- memory, layouts, transfers ---------------------------------------------------- */

/* A daemon takes no memory with holes: what its engine has not touched is made by it. */
static void region_with_holes_is_populated_by_its_engine(void **state)
{
	const size_t bytes = 256 << 10, half = bytes / 2;
	int fd = memfd_create("sparse", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	char word[4] = "kvd";

	(void)state;
	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	assert_int_equal(pwrite(fd, word, sizeof(word), (off_t)half + 100), sizeof(word));
	assert_int_equal(client_memory_present(fd, half + 10, half - 10), 0);
	assert_int_equal(lseek(fd, 0, SEEK_DATA), half);
	assert_int_equal(lseek(fd, (off_t)half, SEEK_HOLE), bytes);
	assert_int_equal(client_memory_present(fd, 0, bytes), 0);
	assert_int_equal(lseek(fd, 0, SEEK_HOLE), bytes);
	assert_int_equal(pread(fd, word, sizeof(word), (off_t)half + 100), sizeof(word));
	assert_string_equal(word, "kvd");
	close(fd);
	assert_int_equal(client_memory_present(-1, 0, bytes),
			 0); /* the daemon's to say */
}

static void memory_is_sealed_aligned_and_writable(void **state)
{
	struct kvd_memory m;
	struct stat st;

	(void)state;
	assert_int_equal(kvd_memory_alloc(3 << 20, "test", &m), 0);
	assert_int_equal(m.bytes, 4 << 20);
	assert_int_equal((uintptr_t)m.address % (2 << 20), 0);
	assert_true(m.huge_bytes <= m.bytes);
	assert_int_equal(fstat(m.fd, &st), 0);
	assert_int_equal(st.st_size, m.bytes);
	assert_true((size_t)st.st_blocks * 512 >= m.bytes); /* populated */
	assert_int_equal(ftruncate(m.fd, 0), -1);
	assert_int_equal(errno, EPERM);
	memset(m.address, 0x5a, m.bytes);
	kvd_memory_free(&m);
	assert_int_equal(m.fd, -1);
	assert_int_equal(kvd_memory_alloc(0, NULL, &m), -KVD_E_INVAL);
	assert_int_equal(kvd_memory_alloc(SIZE_MAX / 2 - 1, NULL, &m), -KVD_E_IO);
}

/* What the kernel says of the mapping at `address`: bytes in huge pages. */
static size_t huge_bytes_of(const void *address)
{
	FILE *smaps = fopen("/proc/self/smaps", "r");
	char line[512], begin[32];
	unsigned long kib = 0;
	bool here = false;

	assert_non_null(smaps);
	snprintf(begin, sizeof(begin), "%lx-", (unsigned long)(uintptr_t)address);
	while (fgets(line, sizeof(line), smaps)) {
		if (strchr("0123456789abcdef", line[0]))
			here = strncmp(line, begin, strlen(begin)) == 0;
		if (here && sscanf(line, "ShmemPmdMapped: %lu", &kib) == 1)
			break;
	}
	fclose(smaps);
	return kib << 10;
}

/* None, as anybody's would have: no kernel for it, no free ones. */
static bool huge_pages_are_not_to_be_had(void)
{
	struct kvd_memory probe;
	int r;

	assert_int_equal(kvd_memory_alloc(2 << 20, "probe", &probe), 0);
	r = madvise(probe.address, probe.bytes, 25 /* MADV_COLLAPSE */);
	kvd_memory_free(&probe);
	return r < 0;
}

/* The kernel may give none now and some a moment later, and take one apart that it
 * has just made: what holds in one of many tries is looked for. */
static void memory_has_reported_huge_pages(void **state)
{
	bool told = false;

	(void)state;
	for (unsigned int tries = 0; !told && tries < 20; tries++) {
		struct kvd_memory m;

		assert_int_equal(kvd_memory_alloc(8 << 20, "test", &m), 0);
		told = huge_bytes_of(m.address) == m.huge_bytes &&
		       (m.huge_bytes > 0 || huge_pages_are_not_to_be_had());
		kvd_memory_free(&m);
	}
	assert_true(told);
}

static unsigned int collapses;

/* As on a machine whose cores are all busy. */
static int collapse_slowly(void *at, size_t bytes)
{
	uint64_t until = clock_ns() + 250000000;

	(void)at;
	(void)bytes;
	collapses++;
	while (clock_ns() < until)
		sched_yield();
	return 0;
}

static void memory_with_slow_collapse_returns_in_time(void **state)
{
	struct kvd_memory m;
	struct stat st;
	uint64_t begin = clock_ns();

	(void)state;
	client_memory_with(collapse_slowly);
	assert_int_equal(kvd_memory_alloc(128 << 20, "slow", &m), 0);
	client_memory_with(NULL);
	/* 64 pieces: 16 s, had each been waited for */
	assert_in_range(collapses, 1, 8);
	assert_true(clock_ns() - begin < UINT64_C(10000000000));
	assert_int_equal(m.huge_bytes, (size_t)collapses << 21);
	assert_int_equal(fstat(m.fd, &st), 0);
	assert_true((size_t)st.st_blocks * 512 >= m.bytes - m.huge_bytes);
	kvd_memory_free(&m);
}

static void layout_text_matches_builder(void **state)
{
	struct kvd_layout *l = kvd_layout_new(1);
	struct kvd_field k = {.name = "k",
			      .unit_bytes = 256,
			      .first_unit = 4,
			      .units = 4,
			      .total_units = 8};
	struct kvd_field v = {.name = "v",
			      .offset = 16384,
			      .unit_bytes = 256,
			      .units = 4,
			      .page_stride = 32768};
	const char *text;
	uint32_t view;

	(void)state;
	k.buffer = v.buffer = kvd_layout_buffer(l, 65536);
	view = kvd_layout_view(l, "kv", 16, 2);
	k.page_stride = 32768;
	kvd_layout_heads(l, view, 1, KVD_HND, &k);
	kvd_layout_heads(l, view, 0, KVD_NHD, &k);
	kvd_layout_heads(l, view, 0, KVD_NHD, &v);
	assert_int_equal(kvd_layout_text(l, &text), 0);
	assert_string_equal(
		text,
		"{\"rank\":1,\"buffers\":[65536],\"views\":{\"kv\":{\"page_tokens\":16,"
		"\"pages\":2,\"layers\":[{\"layer\":0,\"fields\":[{\"name\":\"k\","
		"\"buffer\":0,"
		"\"offset\":0,\"page_stride\":32768,\"token_stride\":1024,\"unit_"
		"stride\":256,"
		"\"unit_bytes\":256,\"first_unit\":4,\"units\":4,\"total_units\":8},"
		"{\"name\":\"v\",\"buffer\":0,\"offset\":16384,\"page_stride\":32768,"
		"\"token_stride\":1024,\"unit_stride\":256,\"unit_bytes\":256,\"first_"
		"unit\":0,"
		"\"units\":4,\"total_units\":4}]},{\"layer\":1,\"fields\":[{\"name\":"
		"\"k\","
		"\"buffer\":0,\"offset\":0,\"page_stride\":32768,\"token_stride\":256,"
		"\"unit_stride\":4096,\"unit_bytes\":256,\"first_unit\":4,\"units\":4,"
		"\"total_units\":8}]}]}}}");
	kvd_layout_free(l);
}

static void layout_has_shards_and_formats(void **state)
{
	struct kvd_layout *l = kvd_layout_new(0);
	struct kvd_field k = {.name = "k", .unit_bytes = 2, .units = 1, .format = "bf16"};
	const char *text;
	uint32_t view;

	(void)state;
	k.buffer = kvd_layout_buffer(l, 64);
	view = kvd_layout_view(l, "kv", 16, 2);
	kvd_layout_shard(l, view, 4, 3, 16);
	kvd_layout_heads(l, view, 0, KVD_NHD, &k);
	assert_int_equal(kvd_layout_text(l, &text), 0);
	assert_non_null(strstr(text,
			       "\"pages\":2,\"shard\":{\"size\":4,\"rank\":3,\"run\":"
			       "16},\"layers\":["));
	assert_non_null(strstr(text, "\"total_units\":1,\"format\":\"bf16\"}"));
	kvd_layout_shard(l, 1, 2, 0, 1);
	assert_int_equal(kvd_layout_text(l, &text), -KVD_E_INVAL);
	kvd_layout_free(l);
	l = kvd_layout_new(0);
	k.buffer = kvd_layout_buffer(l, 64);
	k.format = "sixteen_letters_";
	kvd_layout_heads(l, kvd_layout_view(l, "kv", 16, 2), 0, KVD_NHD, &k);
	assert_int_equal(kvd_layout_text(l, &text), -KVD_E_INVAL);
	kvd_layout_free(l);
}

/* Who waits looks again after a small part of what it has waited, and not at every turn
 * of a core. */
static void pauses_of_a_wait_are_a_part_of_it(void **state)
{
	struct client_fixture *f = *state;
	uint64_t pause_ns = 0, waited_ns = 0;

	for (unsigned int i = 0; i < 40; i++) {
		client_pause(f->client, &pause_ns);
		assert_true(pause_ns <= 25000 + waited_ns / 8);
		assert_true(pause_ns >= 20000);
		waited_ns += pause_ns;
	}
	assert_true(pause_ns > 150000);
}

static void layout_keeps_its_first_error(void **state)
{
	struct kvd_layout *l = kvd_layout_new(0);
	struct kvd_field field = {.name = "k", .buffer = 3, .unit_bytes = 1, .units = 1};
	const char *text;

	(void)state;
	kvd_layout_field(l, kvd_layout_view(l, "kv", 16, 1), 0, &field);
	kvd_layout_view(l, "a name that is longer than thirty-one bytes", 1, 1);
	assert_int_equal(kvd_layout_text(l, &text), -KVD_E_INVAL);
	assert_null(text);
	assert_non_null(strstr(kvd_last_error(NULL)->message, "no such view or buffer"));
	kvd_layout_free(l);
	l = kvd_layout_new(0);
	field.buffer = kvd_layout_buffer(l, 1);
	field.unit_bytes = UINT64_MAX;
	kvd_layout_heads(l, kvd_layout_view(l, "kv", 16, 1), 0, KVD_NHD, &field);
	assert_int_equal(kvd_layout_text(l, &text), -KVD_E_RANGE);
	kvd_layout_free(l);
}

int main(void)
{
#define T(name)                                                     \
	cmocka_unit_test_setup_teardown(name, client_fixture_setup, \
					client_fixture_teardown)
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(codes_public_match_daemon),
		T(error_reply_is_complete),
		T(open_reports_hello_reply),
		T(pauses_of_a_wait_are_a_part_of_it),
		T(open_without_daemon_names_path),
		cmocka_unit_test(open_with_long_path_is_refused),
		T(open_with_bad_hello_is_refused),
		T(open_with_another_clock_is_refused),
		T(open_with_bad_page_is_refused),
		cmocka_unit_test(socket_find_prefers_name_then_environment_then_only_one),
		T(submit_runs_callbacks_once_each),
		T(command_returns_the_text_of_a_success),
		T(submit_over_cap_is_full),
		T(submit_to_sleeping_reader_is_bounded),
		T(submit_with_bad_args_is_refused),
		T(deadline_ends_a_submit),
		T(callback_may_submit_but_not_block),
		T(fds_unexpected_are_closed),
		T(junk_from_the_daemon_ends_the_connection),
		T(close_reason_is_reported),
		T(region_memfd_sends_its_fd_and_statm),
		T(region_with_bad_args_is_refused_here),
		T(region_answered_late_is_undone),
		T(region_busy_keeps_its_handle),
		T(region_async_failure_leaves_a_handle_to_free),
		T(pool_line_names_regions_and_layout),
		cmocka_unit_test(region_with_holes_is_populated_by_its_engine),
		cmocka_unit_test(memory_is_sealed_aligned_and_writable),
		cmocka_unit_test(memory_has_reported_huge_pages),
		cmocka_unit_test(memory_with_slow_collapse_returns_in_time),
		cmocka_unit_test(layout_text_matches_builder),
		cmocka_unit_test(layout_has_shards_and_formats),
		cmocka_unit_test(layout_keeps_its_first_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
