/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvd against a scripted daemon (tests/lib/fake_kvd.h). What is sent is
 * compared as text, so that a change of the protocol shows here; what is read
 * from the status page is written by the test, word by word.
 */
#include "proto/kvd.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "proto/client.h"
#include "tests/lib/fake_kvd.h"

#define OK "{\"id\":%ID%,\"ok\":true"

struct fixture {
	struct fake_kvd *fake;
	struct kvd_client *client;
	unsigned int done;
	int result;
	struct kvd_error error;
};

static int setup(void **state)
{
	struct fixture *f = calloc(1, sizeof(*f));
	struct kvd_options o = {.client = "test", .timeout_ms = 20000};

	fake_kvd_start(&f->fake);
	o.socket = fake_kvd_path(f->fake);
	assert_int_equal(kvd_open(&o, &f->client), 0);
	*state = f;
	return 0;
}

static int teardown(void **state)
{
	struct fixture *f = *state;

	assert_int_equal(kvd_close(f->client), 0);
	fake_kvd_free(f->fake);
	free(f);
	return 0;
}

static void on_done(void *arg, int result, const struct kvd_reply *reply)
{
	struct fixture *f = arg;

	f->done++;
	f->result = result;
	if (reply->error)
		f->error = *reply->error;
}

/* The last line that came in, without its id; waits for `n` lines in all. */
static const char *line_args(struct fixture *f, unsigned int n)
{
	return strstr(fake_kvd_line(f->fake, n, NULL), "\"cmd\"");
}

static void poll_until(struct fixture *f, unsigned int done)
{
	for (unsigned int i = 0; f->done < done && i < 2000; i++)
		kvd_poll(f->client, 10);
	assert_int_equal(f->done, done);
}

static struct kvd_region *region_make(struct fixture *f)
{
	int fd = memfd_create("region", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	struct kvd_region_args args = {.fd = fd, .bytes = 4096};
	struct kvd_region *region;

	fake_kvd_answer(f->fake, OK ",\"region\":3,\"bytes\":4096}");
	assert_int_equal(kvd_region_register(f->client, &args, NULL, &region), 0);
	close(fd);
	return region;
}

static struct kvd_pool *pool_make(struct fixture *f)
{
	struct kvd_region *region = region_make(f);
	struct kvd_pool_args args = {.layout = "{\"rank\":0}", .regions = &region,
				     .region_count = 1};
	struct kvd_pool *pool;

	fake_kvd_answer(f->fake, OK ",\"pool\":4,\"bytes\":4096}");
	assert_int_equal(kvd_pool_register(f->client, &args, NULL, &pool), 0);
	return pool;
}

/* hello, region.register, pool.register and room.open are lines 0 … 3. */
static struct kvd_room *room_make(struct fixture *f, unsigned int slot, uint32_t gen)
{
	struct kvd_room_args args = {.room = 77, .role = KVD_SEND, .pool = pool_make(f)};
	struct kvd_room *room;
	char answer[128];

	snprintf(answer, sizeof(answer),
		 "{\"id\":%%ID%%,\"ok\":true,\"room\":\"77\",\"slot\":%u,\"gen\":\"%u\"}",
		 slot, gen);
	fake_kvd_word(f->fake, slot, gen, KVD_BOOTSTRAPPING, 0, 0);
	fake_kvd_answer(f->fake, answer);
	assert_int_equal(kvd_room_open(f->client, &args, NULL, &room), 0);
	return room;
}

/* ---- errors, names ------------------------------------------------------------ */

static void codes_public_match_daemon(void **state)
{
	(void)state;
#define CHECK(num, name, no, scope, retry, text)                                   \
	assert_int_equal(KVD_E_##name, num);                                       \
	assert_string_equal(kvd_code_name(-KVD_E_##name), err_name(ERR_##name));
	ERR_CODES(CHECK)
#undef CHECK
	assert_int_equal(ERR_CODE_END, KVD_E_INTERNAL + 1);
	assert_string_equal(kvd_code_name(KVD_E_GONE), "EGONE");
	assert_string_equal(kvd_code_name(4711), "EUNKNOWN");
	assert_string_equal(kvd_state_name(KVD_WAITING_FOR_INPUT), "waiting_for_input");
	assert_string_equal(kvd_state_name(9), "unknown");
}

static void error_answer_is_told_whole(void **state)
{
	struct fixture *f = *state;
	char *reply;

	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"ELIMIT\",\"message\":"
				 "\"rooms: 5 of 5\",\"retryable\":false,\"scope\":\"peer\"}}");
	assert_int_equal(kvd_command(f->client, "x.y", NULL, 0, &reply), -KVD_E_LIMIT);
	assert_non_null(strstr(reply, "rooms: 5 of 5"));
	kvd_string_free(reply);
	assert_string_equal(kvd_last_error(f->client)->message, "rooms: 5 of 5");
	assert_string_equal(kvd_last_error(f->client)->scope, "peer");
	assert_false(kvd_last_error(f->client)->retryable);
}

/* ---- opening ------------------------------------------------------------------- */

static void open_tells_what_hello_said(void **state)
{
	struct fixture *f = *state;
	const struct kvd_daemon_info *info = kvd_daemon(f->client);

	assert_string_equal(line_args(f, 0), "\"cmd\":\"hello\",\"proto\":1,\"client\":\"test\"}");
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
	struct fixture *f = *state;
	struct kvd_options o = {.socket = "/nonexistent/kvd.sock"};
	struct kvd_client *client;

	assert_int_equal(kvd_open(&o, &client), -KVD_E_NODAEMON);
	assert_null(client);
	assert_non_null(strstr(kvd_last_error(NULL)->message, "/nonexistent/kvd.sock"));
	o.socket = fake_kvd_path(f->fake);
	fake_kvd_kill(f->fake);
	assert_int_equal(kvd_open(&o, &client), -KVD_E_NODAEMON);
	assert_non_null(strstr(kvd_last_error(NULL)->message, "nobody listens"));
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
	struct fixture *f = *state;
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

static void open_with_bad_page_is_refused(void **state)
{
	struct fixture *f = *state;
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

static void socket_find_prefers_environment_then_name_then_only_one(void **state)
{
	char dir[] = "/tmp/kvd-find-XXXXXX", path[200], want[200];
	struct kvd_error why;

	(void)state;
	assert_non_null(mkdtemp(dir));
	setenv("KVD_RUN_DIR", dir, 1);
	assert_int_equal(kvd_socket_find(NULL, path, sizeof(path), &why), -KVD_E_NODAEMON);
	assert_non_null(strstr(why.message, dir));
	assert_int_equal(kvd_socket_find("gpu3", path, sizeof(path), &why), 0);
	snprintf(want, sizeof(want), "%s/gpu3.sock", dir);
	assert_string_equal(path, want);
	close(open(want, O_CREAT | O_RDWR, 0600));
	assert_int_equal(kvd_socket_find(NULL, path, sizeof(path), &why), 0);
	assert_string_equal(path, want);
	snprintf(path, sizeof(path), "%s/gpu4.sock", dir);
	close(open(path, O_CREAT | O_RDWR, 0600));
	assert_int_equal(kvd_socket_find(NULL, want, sizeof(want), &why), -KVD_E_NODAEMON);
	assert_non_null(strstr(why.message, "2 sockets"));
	setenv("KVD_SOCKET", "/x/y.sock", 1);
	assert_int_equal(kvd_socket_find("gpu3", want, sizeof(want), &why), 0);
	assert_string_equal(want, "/x/y.sock");
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
	struct fixture *f = *state;
	struct kvd_call call = {.on_done = on_done, .arg = f};

	for (int i = 0; i < 100; i++)
		assert_int_equal(kvd_submit(f->client, "ping", "{ \"a\" : [1,\n2] }", NULL, 0,
					    &call, NULL), 0);
	assert_int_equal(f->done, 0);
	poll_until(f, 100);
	assert_int_equal(kvd_pending(f->client), 0);
	assert_string_equal(line_args(f, 100), "\"cmd\":\"ping\",\"a\":[1,2]}");
}

static void submit_over_cap_is_full(void **state)
{
	struct fixture *f = *state;
	struct kvd_call call = {.on_done = on_done, .arg = f};

	f->client->max_pending = 2;
	fake_kvd_answer(f->fake, "");
	fake_kvd_answer(f->fake, "");
	assert_int_equal(kvd_submit(f->client, "a", NULL, NULL, 0, &call, NULL), 0);
	assert_int_equal(kvd_submit(f->client, "b", NULL, NULL, 0, &call, NULL), 0);
	assert_int_equal(kvd_submit(f->client, "c", NULL, NULL, 0, &call, NULL), -KVD_E_FULL);
	assert_true(kvd_last_error(f->client)->retryable);
}

static void submit_to_a_reader_that_sleeps_is_bounded(void **state)
{
	struct fixture *f = *state;
	struct kvd_call call = {.on_done = on_done, .arg = f};
	char *big = calloc(1, 100001);
	char *args = calloc(1, 100100);
	int r = 0;

	memset(big, 'x', 100000);
	snprintf(args, 100100, "{\"a\":\"%s\"}", big);
	kill(fake_kvd_pid(f->fake), SIGSTOP);
	for (int i = 0; i < 1000 && !r; i++)
		r = kvd_submit(f->client, "a", args, NULL, 0, &call, NULL);
	assert_int_equal(r, -KVD_E_FULL);
	assert_true(f->client->conn.queued_bytes <= f->client->max_queued_bytes);
	assert_true(kvd_events(f->client) & POLLOUT);
	fake_kvd_kill(f->fake);
	poll_until(f, kvd_pending(f->client) + f->done);
	assert_int_equal(f->result, -KVD_E_LOST);
	free(big);
	free(args);
}

static void submit_with_bad_args_is_refused(void **state)
{
	static const char *const bad[] = {"[1]", "{", "", "{\"cmd\":\"x\"}", "{\"id\":3}", "1"};
	struct fixture *f = *state;
	struct kvd_call call = {.on_done = on_done, .arg = f};
	char *huge = malloc((1 << 20) + 10);

	for (size_t i = 0; i < ARRAY_LEN(bad); i++)
		assert_int_equal(kvd_submit(f->client, "a", bad[i], NULL, 0, &call, NULL),
				 -KVD_E_INVAL);
	memset(huge, ' ', 1 << 20);
	memcpy(huge, "{\"a\":\"", 6);
	memcpy(huge + (1 << 20), "\"}", 3);
	assert_int_equal(kvd_submit(f->client, "a", huge, NULL, 0, &call, NULL), -KVD_E_TOOBIG);
	free(huge);
	assert_int_equal(kvd_pending(f->client), 0);
	assert_int_equal(fake_kvd_lines(f->fake), 1);
}

static void submit_cancelled_stays_silent(void **state)
{
	struct fixture *f = *state;
	struct kvd_call call = {.on_done = on_done, .arg = f};
	uint64_t id;
	char *reply;

	assert_int_equal(kvd_submit(f->client, "a", NULL, NULL, 0, &call, &id), 0);
	assert_int_equal(kvd_cancel(f->client, id), 0);
	assert_int_equal(kvd_cancel(f->client, id), -KVD_E_NOTFOUND);
	assert_int_equal(kvd_command(f->client, "b", NULL, 0, &reply), 0);
	kvd_string_free(reply);
	assert_int_equal(f->done, 0);
	assert_int_equal(kvd_pending(f->client), 0);
}

static void deadline_ends_a_submit(void **state)
{
	struct fixture *f = *state;
	struct kvd_call call = {.on_done = on_done, .arg = f, .timeout_ms = 30};
	char *reply;

	fake_kvd_answer(f->fake, "");
	assert_int_equal(kvd_submit(f->client, "a", NULL, NULL, 0, &call, NULL), 0);
	assert_in_range(kvd_timeout_ms(f->client), 0, 31);
	poll_until(f, 1);
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
	struct fixture *f = arg;
	struct kvd_call call = {.on_done = on_done, .arg = f};
	char *text;

	assert_int_equal(result, 0);
	assert_non_null(reply->json);
	assert_int_equal(kvd_command(f->client, "b", NULL, 0, &text), -KVD_E_STATE);
	assert_int_equal(kvd_poll(f->client, 0), -KVD_E_STATE);
	assert_int_equal(kvd_close(f->client), -KVD_E_STATE);
	assert_int_equal(kvd_reconnect(f->client, 0), -KVD_E_STATE);
	assert_int_equal(kvd_submit(f->client, "c", NULL, NULL, 0, &call, NULL), 0);
}

static void callback_may_submit_but_not_block(void **state)
{
	struct fixture *f = *state;
	struct kvd_call call = {.on_done = on_done_nested, .arg = f};

	assert_int_equal(kvd_submit(f->client, "a", NULL, NULL, 0, &call, NULL), 0);
	poll_until(f, 1);
	assert_int_equal(f->result, 0);
}

static unsigned int open_fds(void)
{
	unsigned int n = 0;

	for (int fd = 0; fd < 1024; fd++)
		n += fcntl(fd, F_GETFD) >= 0;
	return n;
}

static void fds_nobody_asked_for_are_closed(void **state)
{
	struct fixture *f = *state;
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
	struct fixture *f = *state;
	char *reply;

	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"ok\":tru");
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), -KVD_E_LOST);
	assert_null(reply);
	assert_true(kvd_lost(f->client));
	assert_int_equal(kvd_fd(f->client), -1);
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), -KVD_E_LOST);
}

static void reason_for_closing_is_told(void **state)
{
	struct fixture *f = *state;
	char *reply;

	fake_kvd_answer(f->fake, "{\"id\":null,\"error\":{\"code\":\"EPROTO\",\"message\":"
				 "\"line over 1 MiB\"}}");
	assert_int_equal(kvd_command(f->client, "a", NULL, 0, &reply), -KVD_E_LOST);
	assert_non_null(strstr(kvd_last_error(f->client)->message, "line over 1 MiB"));
}

/* ---- regions and pools ------------------------------------------------------------ */

static void region_memfd_sends_its_fd(void **state)
{
	struct fixture *f = *state;
	int fd = memfd_create("region", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	struct kvd_region_args args = {.fd = fd, .bytes = 8192, .offset = 4096,
				       .address = (void *)0x7f0000000000, .name = "ca\"che"};
	struct kvd_region *region;
	unsigned int fds;

	fake_kvd_answer(f->fake, OK ",\"region\":11}");
	assert_int_equal(kvd_region_register(f->client, &args, NULL, &region), 0);
	close(fd);
	assert_int_equal(kvd_region_id(region), 11);
	assert_string_equal(line_args(f, 1),
			    "\"cmd\":\"region.register\",\"kind\":\"memfd\",\"length\":\"8192\","
			    "\"fd\":0,\"offset\":4096,\"address\":\"139637976727552\","
			    "\"name\":\"ca\\u0022che\"}");
	fake_kvd_line(f->fake, 1, &fds);
	assert_int_equal(fds, 1);
	assert_int_equal(kvd_region_unregister(region, NULL), 0);
	assert_string_equal(line_args(f, 2), "\"cmd\":\"region.unregister\",\"region\":11}");
}

static void region_with_bad_args_is_refused_here(void **state)
{
	static const struct kvd_region_args bad[] = {
		{.fd = -1, .bytes = 1},
		{.fd = 0, .bytes = 0},
		{.fd = 999, .bytes = 1},
		{.kind = KVD_REGION_SHM, .bytes = 1},
		{.kind = KVD_REGION_VM, .bytes = 1},
		{.kind = (enum kvd_region_kind)7, .bytes = 1},
	};
	struct fixture *f = *state;
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
	struct fixture *f = *state;
	struct kvd_region_args args = {.kind = KVD_REGION_SHM, .shm_name = "/x", .bytes = 4096};
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
	assert_string_equal(line_args(f, 3), "\"cmd\":\"region.unregister\",\"region\":9}");
}

static void region_busy_keeps_its_handle(void **state)
{
	struct fixture *f = *state;
	struct kvd_region *region = region_make(f);

	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"EBUSY\",\"message\":\"p\"}}");
	assert_int_equal(kvd_region_unregister(region, NULL), -KVD_E_BUSY);
	assert_true(kvd_last_error(f->client)->retryable);
	assert_int_equal(kvd_region_id(region), 3);
	assert_int_equal(kvd_region_unregister(region, NULL), 0);
}

static void region_async_failure_leaves_a_handle_to_free(void **state)
{
	struct fixture *f = *state;
	struct kvd_region_args args = {.kind = KVD_REGION_SHM, .shm_name = "/x", .bytes = 4096};
	struct kvd_call call = {.on_done = on_done, .arg = f};
	struct kvd_region *region;

	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"EIMPORT\",\"message\":\"\"}}");
	assert_int_equal(kvd_region_register(f->client, &args, &call, &region), 0);
	assert_int_equal(kvd_region_id(region), 0);
	assert_int_equal(kvd_region_unregister(region, NULL), -KVD_E_STATE);
	poll_until(f, 1);
	assert_int_equal(f->result, -KVD_E_IMPORT);
	assert_int_equal(kvd_region_id(region), 0);
	/* nothing to ask the daemon: told in the next turn */
	assert_int_equal(kvd_region_unregister(region, &call), 0);
	assert_int_equal(f->done, 1);
	poll_until(f, 2);
	assert_int_equal(f->result, 0);
	assert_int_equal(fake_kvd_lines(f->fake), 2);
}

static void pool_line_names_regions_and_layout(void **state)
{
	struct fixture *f = *state;
	struct kvd_region *regions[2] = {region_make(f), region_make(f)};
	uint64_t offsets[2] = {0, 512};
	struct kvd_pool_args args = {.name = "kv8", .layout = "{ \"rank\" : 1,\n\"buffers\":[1,2] }",
				     .regions = regions, .offsets = offsets, .region_count = 2,
				     .tp_size = 8};
	struct kvd_pool *pool;

	fake_kvd_answer(f->fake, OK ",\"pool\":21}");
	assert_int_equal(kvd_pool_register(f->client, &args, NULL, &pool), 0);
	assert_int_equal(kvd_pool_id(pool), 21);
	assert_string_equal(line_args(f, 3),
			    "\"cmd\":\"pool.register\",\"name\":\"kv8\",\"layout\":{\"rank\":1,"
			    "\"buffers\":[1,2]},\"regions\":[{\"region\":3},{\"region\":3,"
			    "\"offset\":512}],\"tp_size\":8}");
	args.layout = "[]";
	assert_int_equal(kvd_pool_register(f->client, &args, NULL, &pool), -KVD_E_INVAL);
	assert_null(pool);
}

/* ---- rooms ------------------------------------------------------------------------- */

static void room_lines_say_all(void **state)
{
	static const uint32_t scattered[] = {3, 4, 9}, run[] = {5, 6, 7, 8};
	struct fixture *f = *state;
	struct kvd_pool *pool = pool_make(f);
	struct kvd_region *region = region_make(f);
	struct kvd_source sources[2] = {{.endpoint = "tcp://a:1"},
					{.pool = "q", .another_room = true, .room = 5}};
	struct kvd_room_args open = {.room = UINT64_MAX, .role = KVD_RECV, .pool = pool,
				     .sources = sources, .source_count = 2, .receivers = 2,
				     .waiting_ms = 50, .stall_ms = 60};
	struct kvd_view views[2] = {{.pages = scattered, .page_count = 3, .first_token = 16,
				     .token_begin = 16, .token_end = 60},
				    {.name = "state", .pages = run, .page_count = 4,
				     .layer_begin = 2, .layer_end = 4}};
	struct kvd_bind_args bind = {.views = views, .view_count = 2, .has_aux = true, .aux = 9,
				     .wait = {region, 64, UINT64_MAX}};
	struct kvd_send_args send = {.seq = 3, .views = views, .view_count = 1, .last = true};
	struct kvd_room *room;

	fake_kvd_answer(f->fake, OK ",\"slot\":1,\"gen\":\"5\"}");
	assert_int_equal(kvd_room_open(f->client, &open, NULL, &room), 0);
	assert_string_equal(line_args(f, 4),
			    "\"cmd\":\"room.open\",\"room\":\"18446744073709551615\","
			    "\"role\":\"recv\",\"pool\":4,\"sources\":[{\"endpoint\":\"tcp://a:1\"},"
			    "{\"endpoint\":\"tcp://[::1]:1\",\"pool\":\"q\",\"room\":\"5\"}],"
			    "\"receivers\":2,\"timeouts\":{\"waiting_ms\":50,\"stall_ms\":60}}");
	assert_int_equal(kvd_room_bind(room, &bind, NULL), 0);
	assert_string_equal(line_args(f, 5),
			    "\"cmd\":\"room.bind\",\"room\":\"18446744073709551615\","
			    "\"role\":\"recv\",\"views\":{\"kv\":{\"pages\":[3,4,9],"
			    "\"first_token\":16,\"tokens\":[16,60]},\"state\":{\"pages\":[[5,4]],"
			    "\"layers\":[2,4]}},\"aux\":9,\"wait\":{\"kind\":\"seq\",\"region\":3,"
			    "\"offset\":64,\"value\":\"18446744073709551615\"}}");
	assert_int_equal(kvd_room_send(room, &send, NULL), 0);
	assert_string_equal(line_args(f, 6),
			    "\"cmd\":\"room.send\",\"room\":\"18446744073709551615\","
			    "\"role\":\"recv\",\"seq\":3,\"views\":{\"kv\":{\"pages\":[3,4,9],\"first_token\":16,"
			    "\"tokens\":[16,60]}},\"last\":true}");
	assert_int_equal(kvd_room_abort(room, "over", NULL), 0);
	assert_string_equal(line_args(f, 7),
			    "\"cmd\":\"room.abort\",\"room\":\"18446744073709551615\","
			    "\"role\":\"recv\",\"reason\":\"over\"}");
}

static void room_pull_names_both_sides(void **state)
{
	static const uint32_t here[] = {1}, there[] = {2};
	struct fixture *f = *state;
	struct kvd_view local = {.pages = here, .page_count = 1};
	struct kvd_view remote = {.pages = there, .page_count = 1};
	struct kvd_source source = {.views = &remote, .view_count = 1};
	struct kvd_room_args open = {.room = 1, .role = KVD_PULL, .sources = &source,
				     .source_count = 1, .views = &local, .view_count = 1};
	struct kvd_room *room;

	assert_int_equal(kvd_room_open(f->client, &open, NULL, &room), -KVD_E_STATE);
	open.pool = pool_make(f);
	fake_kvd_answer(f->fake, OK ",\"slot\":1,\"gen\":\"5\"}");
	assert_int_equal(kvd_room_open(f->client, &open, NULL, &room), 0);
	assert_string_equal(line_args(f, 3),
			    "\"cmd\":\"room.open\",\"room\":\"1\",\"role\":\"pull\",\"pool\":4,"
			    "\"sources\":[{\"endpoint\":\"tcp://[::1]:1\"}],"
			    "\"remote\":[{\"views\":{\"kv\":{\"pages\":[2]}}}],"
			    "\"views\":{\"kv\":{\"pages\":[1]}}}");
}

static void room_tells_first_token_and_landed_pages(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
	uint8_t bitmap[4] = {9, 9, 9, 9};
	uint64_t token;

	fake_kvd_answer(f->fake, OK ",\"rooms\":[{\"room\":\"77\"}]}");
	assert_int_equal(kvd_room_first_token(room, 0, &token), -KVD_E_STATE);
	fake_kvd_answer(f->fake, OK ",\"rooms\":[{\"room\":\"77\",\"first_token\":48}]}");
	assert_int_equal(kvd_room_first_token(room, 0, &token), 0);
	assert_int_equal(token, 48);
	assert_string_equal(line_args(f, 5), "\"cmd\":\"room.poll\",\"rooms\":[{\"room\":\"77\","
					     "\"role\":\"send\"}]}");
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
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
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
	assert_string_equal(line_args(f, 4),
			    "\"cmd\":\"room.close\",\"room\":\"77\",\"role\":\"send\"}");
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
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
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

static void room_of_another_generation_is_gone(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
	struct kvd_room_status st;

	fake_kvd_word(f->fake, 2, 41, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_room_state(room), -KVD_E_GONE);
	assert_int_equal(kvd_room_read(room, &st), -KVD_E_GONE);
	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, 10), -KVD_E_GONE);
}

static void room_figures_that_never_settle_cost_only_themselves(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
	struct kvd_room_status st;

	fake_kvd_slot(f->fake, 2)->sequence = 7;
	fake_kvd_slot(f->fake, 2)->bytes = 5;
	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_TRANSFERRING);
	assert_int_equal(st.bytes, 0);
}

static void room_waits_no_longer_than_told(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);

	assert_int_equal(kvd_room_wait(room, KVD_SUCCESS, 20), -KVD_E_NOREPLY);
	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	assert_int_equal(kvd_room_wait(room, KVD_WAITING_FOR_INPUT, 20), KVD_TRANSFERRING);
}

static void room_of_a_frozen_daemon_is_aborting(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
	struct kvd_room_status st;

	kill(fake_kvd_pid(f->fake), SIGSTOP);
	fake_kvd_beat(f->fake, false);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_TRANSFERRING);
	assert_true(st.flags & KVD_FLAG_ABORTING);
	fake_kvd_word(f->fake, 2, 40, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_room_state(room), KVD_SUCCESS);
	fake_kvd_word(f->fake, 2, 40, KVD_WAITING_FOR_INPUT, 0, 0);
	fake_kvd_beat(f->fake, true);
	kill(fake_kvd_pid(f->fake), SIGCONT);
	assert_int_equal(kvd_room_state(room), KVD_WAITING_FOR_INPUT);
}

static void room_of_a_dead_daemon_is_failed_retryable(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
	const struct timespec pause = {.tv_nsec = 1000000};
	struct kvd_room_status st;

	fake_kvd_word(f->fake, 2, 40, KVD_TRANSFERRING, 0, 0);
	fake_kvd_kill(f->fake);
	fake_kvd_beat(f->fake, false);
	/* the pidfd is asked at most every 10 ms */
	for (int i = 0; i < 10000 && kvd_room_state(room) != KVD_FAILED; i++)
		nanosleep(&pause, NULL);
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
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);

	fake_kvd_kill(f->fake); /* the beat is fresh for ever */
	while (kvd_poll(f->client, 100) >= 0)
		;
	assert_true(kvd_lost(f->client));
	assert_int_equal(kvd_room_state(room), KVD_FAILED);
	assert_int_equal(kvd_room_close(room, NULL), 0);
}

static void room_open_refused_is_failed(void **state)
{
	struct fixture *f = *state;
	struct kvd_room_args args = {.room = 1, .pool = pool_make(f)};
	struct kvd_call call = {.on_done = on_done, .arg = f};
	struct kvd_room_status st;
	struct kvd_room *room;

	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"EDRAIN\",\"message\":\"\"}}");
	assert_int_equal(kvd_room_open(f->client, &args, NULL, &room), -KVD_E_DRAIN);
	assert_null(room);
	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"EDRAIN\",\"message\":\"\"}}");
	assert_int_equal(kvd_room_open(f->client, &args, &call, &room), 0);
	assert_int_equal(kvd_room_state(room), KVD_BOOTSTRAPPING);
	poll_until(f, 1);
	assert_int_equal(kvd_room_read(room, &st), 0);
	assert_int_equal(st.state, KVD_FAILED);
	assert_int_equal(st.error, KVD_E_DRAIN);
	assert_int_equal(kvd_room_close(room, NULL), 0);
	assert_int_equal(fake_kvd_lines(f->fake), 5);
}

static void room_chunks_may_follow_an_unanswered_open(void **state)
{
	static const uint32_t pages[] = {1};
	struct fixture *f = *state;
	struct kvd_view view = {.pages = pages, .page_count = 1};
	struct kvd_room_args args = {.room = 1, .pool = pool_make(f)};
	struct kvd_send_args send = {.views = &view, .view_count = 1};
	struct kvd_call call = {.on_done = on_done, .arg = f};
	struct kvd_room *room;

	fake_kvd_answer(f->fake, OK ",\"slot\":1,\"gen\":\"5\"}");
	assert_int_equal(kvd_room_open(f->client, &args, &call, &room), 0);
	assert_int_equal(kvd_room_send(room, &send, &call), 0);
	poll_until(f, 2);
	assert_int_equal(f->result, 0);
}

static void room_in_doubt_is_aborting_until_it_is_known(void **state)
{
	struct fixture *f = *state;
	struct kvd_room_args args = {.room = 9, .role = KVD_PULL, .pool = pool_make(f)};
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
	fake_kvd_answer(f->fake, "{\"id\":%PREV%,\"ok\":true,\"slot\":6,\"gen\":\"3\"}\n" OK "}");
	assert_int_equal(kvd_command(f->client, "ping", NULL, 0, &reply), 0);
	kvd_string_free(reply);
	assert_non_null(strstr(line_args(f, 5), "room.abort"));
	assert_int_equal(kvd_room_state(room), KVD_TRANSFERRING);
	fake_kvd_word(f->fake, 6, 3, KVD_FAILED, 0, KVD_E_ABORTED);
	assert_int_equal(kvd_room_state(room), KVD_FAILED);
	assert_int_equal(kvd_room_close(room, NULL), 0);
}

static void room_in_doubt_of_an_ended_session_asks_the_page(void **state)
{
	struct fixture *f = *state;
	struct kvd_room_args args = {.room = 9, .role = KVD_PULL, .pool = pool_make(f)};
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
	struct fixture *f = *state;
	struct kvd_call call = {.on_done = on_done, .arg = f};

	for (int i = 0; i < 10; i++)
		fake_kvd_answer(f->fake, i < 9 ? "" : "!close");
	for (int i = 0; i < 10; i++)
		assert_int_equal(kvd_submit(f->client, "a", NULL, NULL, 0, &call, NULL), 0);
	poll_until(f, 10);
	assert_int_equal(f->result, -KVD_E_LOST);
	assert_int_equal(kvd_poll(f->client, 10), -KVD_E_LOST);
	assert_int_equal(f->done, 10);
	assert_int_equal(kvd_submit(f->client, "a", NULL, NULL, 0, &call, NULL), -KVD_E_LOST);
}

static void reconnect_registers_again_under_old_handles(void **state)
{
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
	struct kvd_region *region;
	struct kvd_pool *pool;
	unsigned int fds, n;

	region = (struct kvd_region *)(void *)list_first(&f->client->objects[CLIENT_REGION],
							 struct client_object, link);
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
	assert_non_null(strstr(line_args(f, n + 1), "region.register"));
	fake_kvd_line(f->fake, n + 1, &fds);
	assert_int_equal(fds, 1);
	assert_non_null(strstr(line_args(f, n + 2), "\"regions\":[{\"region\":103}]"));
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
	struct fixture *f = *state;
	struct kvd_pool *pool = pool_make(f);

	fake_kvd_answer(f->fake, "{\"id\":%ID%,\"error\":{\"code\":\"ELIMIT\",\"message\":\"r\"}}");
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
	struct fixture *f = *state;
	struct kvd_room *room = room_make(f, 2, 40);
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

/* ---- memory, layouts, transfers ---------------------------------------------------- */

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

static void layout_text_is_what_was_built(void **state)
{
	struct kvd_layout *l = kvd_layout_new(1);
	struct kvd_field k = {.name = "k", .unit_bytes = 256, .first_unit = 4, .units = 4,
			      .total_units = 8};
	struct kvd_field v = {.name = "v", .offset = 16384, .unit_bytes = 256, .units = 4,
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
		"\"pages\":2,\"layers\":[{\"layer\":0,\"fields\":[{\"name\":\"k\",\"buffer\":0,"
		"\"offset\":0,\"page_stride\":32768,\"token_stride\":1024,\"unit_stride\":256,"
		"\"unit_bytes\":256,\"first_unit\":4,\"units\":4,\"total_units\":8},"
		"{\"name\":\"v\",\"buffer\":0,\"offset\":16384,\"page_stride\":32768,"
		"\"token_stride\":1024,\"unit_stride\":256,\"unit_bytes\":256,\"first_unit\":0,"
		"\"units\":4,\"total_units\":4}]},{\"layer\":1,\"fields\":[{\"name\":\"k\","
		"\"buffer\":0,\"offset\":0,\"page_stride\":32768,\"token_stride\":256,"
		"\"unit_stride\":4096,\"unit_bytes\":256,\"first_unit\":4,\"units\":4,"
		"\"total_units\":8}]}]}}}");
	kvd_layout_free(l);
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

static struct kvd_dlist *dlist_make(struct fixture *f, size_t count)
{
	struct kvd_desc *descs = calloc(count, sizeof(*descs));
	struct kvd_dlist *dlist;

	for (size_t i = 0; i < count; i++)
		descs[i] = (struct kvd_desc){4096 * i, 64, 128, i == 1 ? 3 : 0};
	fake_kvd_answer(f->fake, OK ",\"dlist\":31}");
	assert_int_equal(kvd_dlist_prep(f->client, 0, descs, count, NULL, &dlist), 0);
	free(descs);
	return dlist;
}

static void dlist_long_ones_travel_in_a_memfd(void **state)
{
	struct fixture *f = *state;
	struct kvd_dlist *small = dlist_make(f, 2), *big = dlist_make(f, 1025);
	unsigned int fds;

	assert_int_equal(kvd_dlist_count(small), 4);
	assert_string_equal(line_args(f, 1), "\"cmd\":\"dlist.prep\",\"descs\":[[\"0\",64],"
					     "[\"4096\",64,128,3]]}");
	assert_string_equal(line_args(f, 2), "\"cmd\":\"dlist.prep\",\"fd\":0,\"count\":1025}");
	fake_kvd_line(f->fake, 2, &fds);
	assert_int_equal(fds, 1);
	assert_int_equal(kvd_dlist_count(big), 1027);
	assert_int_equal(kvd_dlist_free(big, NULL), 0);
	assert_string_equal(line_args(f, 3), "\"cmd\":\"dlist.free\",\"dlist\":31}");
}

static void xfer_starts_polls_and_is_released(void **state)
{
	static const uint32_t index[] = {1, 0}, outside[] = {4};
	struct fixture *f = *state;
	struct kvd_dlist *d = dlist_make(f, 2);
	struct kvd_xfer_args args = {.op = KVD_WRITE, .local = d, .remote = d,
				     .local_index = outside, .local_index_count = 1,
				     .remote_index = index, .remote_index_count = 2,
				     .notif = "hi\0!", .notif_bytes = 4};
	struct kvd_xfer *xfer;

	assert_int_equal(kvd_xfer_start(f->client, &args, NULL, &xfer), -KVD_E_RANGE);
	args.local_index = index;
	args.local_index_count = 2;
	fake_kvd_word(f->fake, 5, 8, KVD_TRANSFERRING, 0, 0);
	fake_kvd_answer(f->fake, OK ",\"xfer\":55,\"slot\":5,\"gen\":\"8\"}");
	assert_int_equal(kvd_xfer_start(f->client, &args, NULL, &xfer), 0);
	assert_string_equal(line_args(f, 2),
			    "\"cmd\":\"xfer.start\",\"op\":\"write\",\"local\":31,\"remote\":31,"
			    "\"local_index\":[1,0],\"remote_index\":[1,0],\"notif\":\"aGkAIQ==\"}");
	assert_int_equal(kvd_xfer_state(xfer), KVD_TRANSFERRING);
	assert_int_equal(kvd_xfer_cancel(xfer, NULL), 0);
	fake_kvd_word(f->fake, 5, 8, KVD_FAILED, 0, KVD_E_CANCELED);
	assert_int_equal(kvd_xfer_wait(xfer, 100), KVD_FAILED);
	fake_kvd_answer(f->fake, OK ",\"xfer\":55,\"slot\":5,\"gen\":\"9\"}");
	assert_int_equal(kvd_xfer_again(xfer, NULL), 0);
	assert_string_equal(line_args(f, 4), "\"cmd\":\"xfer.start\",\"xfer\":55}");
	assert_int_equal(kvd_xfer_state(xfer), -KVD_E_GONE);
	fake_kvd_word(f->fake, 5, 9, KVD_SUCCESS, 0, 0);
	assert_int_equal(kvd_xfer_state(xfer), KVD_SUCCESS);
	assert_int_equal(kvd_xfer_release(xfer, NULL), 0);
	assert_string_equal(line_args(f, 5), "\"cmd\":\"xfer.release\",\"xfer\":55,\"wait\":true}");
}

static void on_notif(void *arg, const char *from, const void *data, size_t bytes)
{
	struct fixture *f = arg;

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
	struct fixture *f = *state;

	assert_int_equal(kvd_notif_send(f->client, 2, "abc", 3, NULL), 0);
	assert_string_equal(line_args(f, 1),
			    "\"cmd\":\"notif.send\",\"attach\":2,\"data\":\"YWJj\"}");
	fake_kvd_answer(f->fake, OK ",\"notifs\":[{\"from\":\"12\",\"data\":\"aGkAIQ==\"},"
				    "{\"from\":\"12\",\"data\":\"\"}]}");
	assert_int_equal(kvd_notif_drain(f->client, 0, on_notif, f), 2);
	assert_int_equal(f->done, 2);
	fake_kvd_answer(f->fake, OK ",\"notifs\":[{\"from\":\"12\",\"data\":\"=a==\"}]}");
	assert_int_equal(kvd_notif_drain(f->client, 0, on_notif, f), -KVD_E_PROTO);
}

/* Every allocation fails once: an error, never a leak or a crash. */
static void out_of_memory_costs_one_call(void **state)
{
	static const uint32_t pages[] = {1, 2, 3};
	struct fixture *f = *state;
	struct kvd_pool *pool = pool_make(f);
	struct kvd_view view = {.pages = pages, .page_count = 3};
	struct kvd_room_args args = {.room = 1, .pool = pool, .views = &view, .view_count = 1};
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
#define T(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(codes_public_match_daemon),
		T(error_answer_is_told_whole),
		T(open_tells_what_hello_said),
		T(open_without_daemon_names_path),
		cmocka_unit_test(open_with_long_path_is_refused),
		T(open_with_bad_hello_is_refused),
		T(open_with_bad_page_is_refused),
		cmocka_unit_test(socket_find_prefers_environment_then_name_then_only_one),
		T(submit_runs_callbacks_once_each),
		T(submit_over_cap_is_full),
		T(submit_to_a_reader_that_sleeps_is_bounded),
		T(submit_with_bad_args_is_refused),
		T(submit_cancelled_stays_silent),
		T(deadline_ends_a_submit),
		T(callback_may_submit_but_not_block),
		T(fds_nobody_asked_for_are_closed),
		T(junk_from_the_daemon_ends_the_connection),
		T(reason_for_closing_is_told),
		T(region_memfd_sends_its_fd),
		T(region_with_bad_args_is_refused_here),
		T(region_answered_late_is_undone),
		T(region_busy_keeps_its_handle),
		T(region_async_failure_leaves_a_handle_to_free),
		T(pool_line_names_regions_and_layout),
		T(room_lines_say_all),
		T(room_pull_names_both_sides),
		T(room_tells_first_token_and_landed_pages),
		T(room_state_follows_its_word),
		T(room_polls_make_no_system_call),
		T(room_of_another_generation_is_gone),
		T(room_figures_that_never_settle_cost_only_themselves),
		T(room_waits_no_longer_than_told),
		T(room_of_a_frozen_daemon_is_aborting),
		T(room_of_a_dead_daemon_is_failed_retryable),
		T(room_sees_death_by_the_socket_before_the_beat_is_old),
		T(room_open_refused_is_failed),
		T(room_chunks_may_follow_an_unanswered_open),
		T(room_in_doubt_is_aborting_until_it_is_known),
		T(room_in_doubt_of_an_ended_session_asks_the_page),
		T(lost_connection_ends_every_request_once),
		T(reconnect_registers_again_under_old_handles),
		T(reconnect_refused_half_way_is_lost_again),
		T(client_in_a_forked_child_is_refused),
		cmocka_unit_test(memory_is_sealed_aligned_and_writable),
		cmocka_unit_test(layout_text_is_what_was_built),
		cmocka_unit_test(layout_keeps_its_first_error),
		T(dlist_long_ones_travel_in_a_memfd),
		T(xfer_starts_polls_and_is_released),
		T(notifs_are_bytes),
		T(out_of_memory_costs_one_call),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
