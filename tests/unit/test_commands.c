/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command tables: the schema check, permissions, help;
 * and a sweep in which, command by command, each allocation fails once: every
 * request is answered or its connection closed, and nothing is left behind.
 */
#include "daemon/request/commands.h"

#include <errno.h>
#include <math.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/hex.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "proto/out.h"
#include "daemon/control/control.h"
#include "daemon/modules.h"
#include "daemon/session/session.h"
#include "proto/json.h"
#include "tests/lib/control_client.h"

static int start(void **state)
{
	struct mini *mini = mem_zalloc(sizeof(*mini));

	mini_config(mini);
	mini_start(mini);
	*state = mini;
	return 0;
}

static int stop(void **state)
{
	mini_stop(*state);
	mem_free(*state);
	return 0;
}

/* ---- the schema ---- */

struct all_args {
	const char *s;
	int64_t i, free;
	uint64_t u;
	bool b;
	const cJSON *a, *o;
	int fd;
};
static const struct field all_fields[] = {
	F_STR("s", all_args, s, REQUIRED, 4, "."),
	F_INT("i", all_args, i, DEFAULT(7), -2, 9, "."),
	F_ID("free", all_args, free, DEFAULT(-1), "."),
	F_U64("u", all_args, u, OPTIONAL, "."),
	F_BOOL("b", all_args, b, "."),
	F_ARRAY("a", all_args, a, OPTIONAL, 2, "."),
	F_OBJECT("o", all_args, o, OPTIONAL, "."),
	F_FD("fd", all_args, fd, "."),
	F_END,
};

static int check(const char *text, unsigned int fd_count, unsigned int flags)
{
	struct command cmd = {.name = "test", .fields = all_fields, .flags = flags};
	struct request req = {.fd_count = fd_count};
	int r;

	assert_int_equal(json_parse(text, strlen(text), 8, &req.line), 0);
	r = commands_check(&req, &cmd);
	cJSON_Delete(req.line);
	return r;
}

static void schema_accepts_documented_values(void **state)
{
	static const char *const good[] = {
		"{\"id\":1,\"cmd\":\"test\",\"s\":\"abcd\"}",
		"{\"s\":\"\",\"i\":-2,\"u\":\"18446744073709551615\",\"b\":true}",
		"{\"s\":\"a\",\"i\":9,\"free\":9007199254740991,\"u\":0,\"a\":[1,2],"
		"\"o\":{}}",
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(good); i++)
		assert_int_equal(check(good[i], 0, 0), 0);
	assert_int_equal(check("{\"s\":\"a\",\"fd\":0}", 1, COMMAND_FDS), 0);
}

static void schema_refuses_the_rest_by_name(void **state)
{
	static const struct {
		const char *text;
		unsigned int fd_count;
		int r;
		const char *fault;
	} wrong[] = {
		{"{}", 0, -EINVAL, "s: missing"},
		{"{\"S\":\"a\"}", 0, -EINVAL, "S: unknown field of test"},
		{"{\"s\":\"abcde\"}", 0, -ERANGE, "s: 5 bytes, limit 4"},
		{"{\"s\":1}", 0, -EINVAL, "s: a string"},
		{"{\"s\":null}", 0, -EINVAL, "s: a string"},
		{"{\"s\":\"a\",\"i\":10}", 0, -ERANGE, "i: 10 is not in -2 … 9"},
		{"{\"s\":\"a\",\"i\":-3}", 0, -ERANGE, "i: -3"},
		{"{\"s\":\"a\",\"i\":1.5}", 0, -EINVAL, "i: an integer"},
		{"{\"s\":\"a\",\"i\":1e308}", 0, -EINVAL, "i: an integer"},
		{"{\"s\":\"a\",\"i\":\"1\"}", 0, -EINVAL, "i: an integer"},
		{"{\"s\":\"a\",\"free\":-1}", 0, -ERANGE, "free: -1"},
		{"{\"s\":\"a\",\"free\":9007199254740992}", 0, -EINVAL,
		 "free: an integer"},
		{"{\"s\":\"a\",\"u\":\"-1\"}", 0, -EINVAL, "u: a decimal"},
		{"{\"s\":\"a\",\"u\":-1}", 0, -EINVAL, "u: a decimal"},
		{"{\"s\":\"a\",\"b\":0}", 0, -EINVAL, "b: true or false"},
		{"{\"s\":\"a\",\"a\":{}}", 0, -EINVAL, "a: an array"},
		{"{\"s\":\"a\",\"a\":[1,2,3]}", 0, -ERANGE, "a: 3 entries, limit 2"},
		{"{\"s\":\"a\",\"o\":[]}", 0, -EINVAL, "o: an object"},
		{"{\"s\":\"a\",\"fd\":0}", 0, -EINVAL, "fd: the line has no descriptor"},
		{"{\"s\":\"a\",\"fd\":1}", 1, -ERANGE, "fd: 1 is not in 0 … 0"},
		{"{\"s\":\"a\"}", 1, -EINVAL,
		 "the line has 1 descriptors, but its fields name 0"},
		{"{\"s\":\"a\",\"fd\":0}", 2, -EINVAL,
		 "the line has 2 descriptors, but its fields name 1"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
		int r = check(wrong[i].text, wrong[i].fd_count, COMMAND_FDS);

		if (r != wrong[i].r || !strstr(err_last()->text, wrong[i].fault))
			fail_msg("%s: %d %s", wrong[i].text, r, err_last()->text);
	}
	assert_int_equal(check("{\"s\":\"a\",\"fd\":0}", 1, 0), -EINVAL);
	assert_string_equal(err_last()->text,
			    "test: takes no descriptors, but the line has 1");
}

/* What every table must hold: the check trusts it. */
static void tables_are_sound(void **state)
{
	const struct command *cmd;

	(void)state;
	for (unsigned int i = 0; (cmd = commands_at(modules_built, i)); i++) {
		bool takes_fds = false;
		unsigned int number;

		assert_ptr_equal(commands_find(modules_built, cmd->name, &number),
				 cmd); /* no name twice */
		assert_int_equal(number, i + 1);
		assert_non_null(cmd->run);
		assert_true(cmd->summary && *cmd->summary);
		assert_true(cmd->reply && *cmd->reply);
		for (const struct field *f = cmd->fields; f && f->name; f++) {
			assert_true(strcmp(f->name, "id") != 0 &&
				    strcmp(f->name, "cmd") != 0);
			assert_true(f->help && *f->help);
			assert_true(f->min <= f->max);
			takes_fds |= f->type == FIELD_FD;
			for (const struct field *g = f + 1; g->name; g++)
				assert_string_not_equal(f->name, g->name);
		}
		assert_int_equal(takes_fds, (cmd->flags & COMMAND_FDS) != 0);
	}
	assert_null(commands_find(modules_built, "no.such", NULL));
}

/* ---- commands of the daemon itself ---- */

static void help_describes_every_command(void **state)
{
	const struct command *cmd;
	struct client client;
	cJSON *reply, *entry;

	client_open(&client, *state);
	reply = client_call(&client, "{\"cmd\":\"help\"}");
	entry = cJSON_GetObjectItem(reply, "commands")->child;
	for (unsigned int i = 0; (cmd = commands_at(modules_built, i));
	     i++, entry = entry->next) {
		const cJSON *field = cJSON_GetObjectItem(entry, "fields")->child;

		assert_string_equal(cJSON_GetObjectItem(entry, "name")->valuestring,
				    cmd->name);
		for (const struct field *f = cmd->fields; f && f->name; f++) {
			assert_string_equal(
				cJSON_GetObjectItem(field, "name")->valuestring, f->name);
			field = field->next;
		}
		assert_null(field);
	}
	assert_null(entry);
	cJSON_Delete(reply);
	reply = client_call(&client, "{\"cmd\":\"help\",\"command\":\"ping\"}");
	assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(reply, "commands")), 1);
	cJSON_Delete(reply);
	client_call_fails(&client, "ENOCMD", "{\"cmd\":\"help\",\"command\":\"nope\"}");
	client_close(&client);
}

static void admin_commands_need_an_admin(void **state)
{
	struct mini *mini = *state;
	struct client client;
	struct session *session;
	int was = log_threshold;

	client_open(&client, mini);
	session = list_first(&mini->kvd.sessions, struct session, link);
	session->admin = false;
	client_call_fails(&client, "EPERM",
			  "{\"cmd\":\"log.level\",\"level\":\"error\"}");
	client_call_fails(&client, "EPERM", "{\"cmd\":\"drain\"}");
	assert_int_equal(log_threshold, was);
	assert_false(mini->kvd.stopping || mini->kvd.draining);
	session->admin = true;
	client_call_fails(&client, "EINVAL",
			  "{\"cmd\":\"log.level\",\"level\":\"loud\"}");
	client_call_ok(&client, "{\"cmd\":\"log.level\",\"level\":\"warn\"}");
	assert_int_equal(log_threshold, LOG_LEVEL_WARN);
	log_threshold = was;
	client_call_fails(&client, "ERANGE", "{\"cmd\":\"drain\",\"timeout_ms\":-1}");
	client_close(&client);
}

static void daemon_shows_figures_and_settings(void **state)
{
	struct mini *mini = *state;
	struct client client;
	cJSON *reply, *list;

	client_open(&client, mini);
	reply = client_call(&client, "{\"cmd\":\"stats\"}");
	list = cJSON_GetObjectItem(reply, "metrics");
	assert_true(cJSON_GetArraySize(list) >= (int)METRIC_ROWS); /* and modules' */
	assert_string_equal(cJSON_GetObjectItem(list->child, "name")->valuestring,
			    "sessions");
	assert_int_equal(reply_int(list->child, "value"), 1);
	cJSON_Delete(reply);
	reply = client_call(&client, "{\"cmd\":\"health\"}");
	assert_string_equal(cJSON_GetObjectItem(reply, "state")->valuestring, "serving");
	assert_int_equal(reply_int(reply, "sessions"), 1);
	cJSON_Delete(reply);
	reply = client_call(&client, "{\"cmd\":\"config.show\"}");
	cJSON *setting;
	bool found = false;

	cJSON_ArrayForEach(setting, cJSON_GetObjectItem(reply, "settings")) {
		if (strcmp(cJSON_GetObjectItem(setting, "name")->valuestring, "sessions"))
			continue;
		assert_string_equal(cJSON_GetObjectItem(setting, "value")->valuestring,
				    "64");
		found = true;
	}
	assert_true(found);
	cJSON_Delete(reply);
	client_close(&client);
}

static void reply_members_are_read_back(void **state)
{
	static const double doubles[] = {0, 0.5, -2.25, 1.0 / 3, 1e300, 0.1};
	static const uint8_t bytes[40] = {0xab, [39] = 0x0c};
	char space[64], digits[2 * sizeof(bytes) + 1];
	struct text out = text_on(space, sizeof(space));
	const cJSON *list;
	cJSON *json;

	(void)state;
	out_object(&out, NULL);
	out_text(&out, "te\"xt", "a\nb");
	out_number(&out, "low", INT64_MIN);
	out_number(&out, "high", INT64_C(9007199254740993));
	out_id(&out, "id", UINT64_MAX);
	out_bool(&out, "yes", true);
	out_hex(&out, "hex", bytes, sizeof(bytes));
	out_double(&out, "none", HUGE_VAL);
	out_array(&out, "list");
	for (size_t i = 0; i < ARRAY_LEN(doubles); i++)
		out_double(&out, NULL, doubles[i]);
	out_object(&out, NULL);
	out_close(&out, '}');
	out_close(&out, ']');
	out_close(&out, '}');
	assert_false(out.failed || out.borrowed);
	assert_non_null(strstr(out.data, "\"low\":-9223372036854775808,"));
	assert_non_null(strstr(out.data, "\"high\":9007199254740993,"));
	json = cJSON_Parse(out.data);
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(json, "te\"xt")),
			    "a\nb");
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(json, "id")),
			    "18446744073709551615");
	assert_true(cJSON_IsTrue(cJSON_GetObjectItem(json, "yes")));
	hex_write(bytes, sizeof(bytes), digits);
	assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(json, "hex")),
			    digits);
	assert_true(cJSON_IsNull(cJSON_GetObjectItem(json, "none")));
	list = cJSON_GetObjectItem(json, "list");
	assert_int_equal(cJSON_GetArraySize(list), ARRAY_LEN(doubles) + 1);
	for (size_t i = 0; i < ARRAY_LEN(doubles); i++)
		assert_memory_equal(&cJSON_GetArrayItem(list, (int)i)->valuedouble,
				    &doubles[i], sizeof(doubles[i]));
	cJSON_Delete(json);
	text_fini(&out);
}

static void short_text_needs_no_memory(void **state)
{
	char space[32];
	struct text out = text_on(space, sizeof(space));

	(void)state;
	mem_fail_at(1);
	out_text(&out, NULL, "0123456789");
	assert_false(out.failed);
	assert_string_equal(out.data, "\"0123456789\"");
	out_text(&out, NULL, "012345678901234567890123456789");
	mem_fail_at(0);
	assert_true(out.failed);
	text_fini(&out);
}

/* A reply that would not fit the client's queue is an error, not a hang-up. */
static void reply_over_the_queue_is_an_error(void **state)
{
	struct mini *mini = *state;
	struct client client;

	mini->config.client_queue_bytes = 2048;
	client_open(&client, mini);
	client_call_fails(&client, "ETOOBIG", "{\"cmd\":\"help\"}");
	client_call_ok(&client, "{\"cmd\":\"ping\"}");
	client_close(&client);
}

/* ---- each allocation fails once ---- */

static void *hooked_malloc(size_t size)
{
	return mem_zalloc(size);
}

struct sweep {
	struct mini mini;
	struct client client;
	int fd; /* goes with the line; -1 */
	int64_t region;
};

static void sweep_prepare(struct sweep *s, bool connected)
{
	mini_config(&s->mini);
	s->mini.inline_helpers = true;
	mini_start(&s->mini);
	if (connected)
		client_open(&s->client, &s->mini);
}

/* A reply, or the end. It may come by another process: a descriptor's line does. */
static void sweep_wait(struct sweep *s)
{
	struct pollfd p = {.fd = s->client.fd, .events = POLLIN};
	uint64_t end = loop_clock_ns(s->mini.kvd.loop) + 30 * LOOP_NS_PER_S;

	while (poll(&p, 1, 0) == 0 && loop_clock_ns(s->mini.kvd.loop) < end)
		loop_turn(s->mini.kvd.loop, LOOP_NS_PER_MS);
}

/* Turn until the client has something to read or nothing more happens. */
static void sweep_settle(struct sweep *s)
{
	struct pollfd p = {.fd = s->client.fd, .events = POLLIN};

	for (int idle = 0; idle < 3 && poll(&p, 1, 0) == 0;)
		idle = loop_turn(s->mini.kvd.loop, LOOP_NS_PER_MS) ? 0 : idle + 1;
}

/* True while there was an allocation to fail. */
static bool sweep_once(struct sweep *s, const char *line, uint64_t n)
{
	bool hit;
	char c;
	cJSON *reply;

	mem_fail_at(n);
	client_send_fds(&s->client, line, &s->fd, s->fd >= 0);
	sweep_wait(s);
	hit = mem_count() >= n;
	mem_fail_at(0);
	reply = client_reply(&s->client);
	sweep_settle(s); /* a connection marked for close is closed after its reply */
	if (reply && !cJSON_IsTrue(cJSON_GetObjectItem(reply, "ok"))) {
		/* a region can be refused in words of its own, but only when hit */
		if (!hit)
			fail_msg("%s %s", line, reply_code(reply));
		if (strcmp(reply_code(reply), "ENOMEM") != 0)
			fail_msg("allocation %ju of %s: %s", (uintmax_t)n, line,
				 reply_code(reply));
	}
	/* closed, perhaps after an error: only a lost allocation may do that */
	if (!reply || recv(s->client.fd, &c, 1, MSG_PEEK | MSG_DONTWAIT) == 0 ||
	    errno != EAGAIN) {
		assert_true(hit);
		client_close(&s->client);
		client_open(&s->client, &s->mini);
	}
	cJSON_Delete(reply);
	return hit;
}

static void sweep_line(struct sweep *s, const char *line)
{
	uint64_t n = 1;

	while (sweep_once(s, line, n))
		n++;
	assert_true(n > 3); /* the hooks do count */
}

static void every_command_survives_lost_allocations(void **state)
{
	static const char *const lines[] = {
		"{\"id\":\"a\",\"cmd\":\"ping\"}\n",
		"{\"cmd\":\"help\",\"command\":\"region.register\"}\n",
		"{\"cmd\":\"session.list\",\"all\":true}\n",
		"{\"cmd\":\"stats\"}\n",
		"{\"cmd\":\"health\"}\n",
		"{\"cmd\":\"config.show\"}\n",
		"{\"cmd\":\"log.level\"}\n",
		"{\"cmd\":\"hello\",\"proto\":1,\"client\":\"again\"}\n",
		"{\"cmd\":\"region.list\"}\n",
		"{\"cmd\":\"pool.list\"}\n",
	};
	struct sweep s = {.fd = -1};

	(void)state;
	sweep_prepare(&s, true);
	for (size_t i = 0; i < ARRAY_LEN(lines); i++)
		sweep_line(&s, lines[i]);
	client_close(&s.client);
	mini_stop(&s.mini);
}

/* A region, and a pool on it, made and taken back under lost allocations. */
static void regions_and_pools_survive_lost_allocations(void **state)
{
	static const char pool[] =
		"{\"cmd\":\"pool.register\",\"layout\":{\"rank\":0,\"buffers\":[4096],"
		"\"views\":{\"kv\":{\"page_tokens\":1,\"pages\":1,\"layers\":[{\"layer\":"
		"0,"
		"\"fields\":[{\"name\":\"k\",\"buffer\":0,\"offset\":0,\"page_stride\":"
		"4096,"
		"\"token_stride\":4096,\"unit_stride\":4096,\"unit_bytes\":4096,"
		"\"first_unit\":0,\"units\":1,\"total_units\":1}]}]}}},"
		"\"regions\":[{\"region\":%ju}]}\n";
	struct sweep s = {.fd = memfd_filled(8192, 1)};
	char line[1024];

	(void)state;
	s.mini.fds_before = 0;
	sweep_prepare(&s, true);
	sweep_line(&s, "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
		       "\"length\":8192,\"address\":\"4096\",\"name\":\"cache\"}\n");
	struct session *session =
		list_entry(s.mini.kvd.sessions.prev, struct session, link);
	struct idmap_cursor it = {0};

	assert_true(idmap_next(&session->regions, &it));
	close(s.fd);
	s.mini.fds_before--;
	s.fd = -1;
	s.mini.config.session_pools_max = 10000;
	snprintf(line, sizeof(line), pool, (uintmax_t)it.key);
	sweep_line(&s, line);
	client_close(&s.client);
	mini_stop(&s.mini);
}

/* From the connection's arrival to its greeting. */
static void connecting_survives_lost_allocations(void **state)
{
	struct sweep s = {.fd = -1};
	bool hit = true;

	(void)state;
	sweep_prepare(&s, false);
	for (uint64_t n = 1; hit; n++) {
		cJSON *reply;

		client_connect(&s.client, &s.mini);
		mem_fail_at(n);
		client_send_fds(&s.client,
				"{\"cmd\":\"hello\",\"proto\":1,\"client\":\"x\"}\n",
				NULL, 0);
		sweep_settle(&s);
		hit = mem_count() >= n;
		mem_fail_at(0);
		reply = client_reply(&s.client);
		assert_true(hit || cJSON_IsTrue(cJSON_GetObjectItem(reply, "ok")));
		if (reply && !cJSON_IsTrue(cJSON_GetObjectItem(reply, "ok")))
			assert_string_equal(reply_code(reply), "ENOMEM");
		cJSON_Delete(reply);
		client_close(&s.client);
		mini_until_sessions(&s.mini, 0);
	}
	mini_stop(&s.mini);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(schema_accepts_documented_values),
		cmocka_unit_test(schema_refuses_the_rest_by_name),
		cmocka_unit_test(tables_are_sound),
		CASE(help_describes_every_command),
		CASE(admin_commands_need_an_admin),
		CASE(daemon_shows_figures_and_settings),
		cmocka_unit_test(reply_members_are_read_back),
		cmocka_unit_test(short_text_needs_no_memory),
		CASE(reply_over_the_queue_is_an_error),
		cmocka_unit_test(every_command_survives_lost_allocations),
		cmocka_unit_test(regions_and_pools_survive_lost_allocations),
		cmocka_unit_test(connecting_survives_lost_allocations),
	};

	cJSON_InitHooks(&(cJSON_Hooks){.malloc_fn = hooked_malloc, .free_fn = mem_free});
	return cmocka_run_group_tests(tests, NULL, NULL);
}
