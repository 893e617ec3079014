/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control socket against hostile clients: each gets an error or is closed with a
 * reason, a well-behaved neighbour is served meanwhile, and no descriptor is left
 * (mini_stop counts them).
 */
#include "daemon/control/control.h"
#include "daemon/request/commands.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/modules.h"
#include "daemon/session/session.h"
#include "proto/json.h"
#include "tests/lib/control_client.h"
#include "tests/lib/limits.h"

#define HELLO "{\"id\":0,\"cmd\":\"hello\",\"proto\":1,\"client\":\"test\"}\n"

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

/* The daemon has closed the connection, after this error. */
static void expect_closed(struct client *client, const char *code)
{
	expect_code(client_reply(client), code);
	assert_null(client_reply(client));
}

/* ---- the socket ---- */

static void socket_has_configured_mode(void **state)
{
	struct mini *mini = *state;
	struct stat st;

	assert_int_equal(stat(mini->config.socket_path, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0600);
}

static void socket_path_unusable_refused(void **state)
{
	struct control *control = NULL;
	struct mini *mini = *state;
	struct config config = mini->config;
	struct kvd kvd = mini->kvd;
	int fd;

	kvd.config = &config;
	list_init(&kvd.sessions);
	kvd.modules = modules_built;
	snprintf(config.socket_path, sizeof(config.socket_path), "%s/%0120d", mini->dir,
		 1);
	assert_int_equal(control_new(&kvd, -1, &control), -EDOM);
	snprintf(config.socket_path, sizeof(config.socket_path), "%s/none/x", mini->dir);
	assert_true(control_new(&kvd, -1, &control) < 0);
	/* a file that is no socket is not removed */
	snprintf(config.socket_path, sizeof(config.socket_path), "%s/file", mini->dir);
	fd = open(config.socket_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	close(fd);
	assert_int_equal(control_new(&kvd, -1, &control), -EDOM);
	assert_int_equal(unlink(config.socket_path), 0);
	strcpy(config.socket_group, "no-such-group-here");
	assert_int_equal(control_new(&kvd, -1, &control), -EDOM);
	assert_null(control);
}

static void socket_stale_replaced(void **state)
{
	struct control *control = NULL;
	struct mini *mini = *state;
	struct config config = mini->config;
	struct kvd kvd = mini->kvd;
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct stat st;
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	kvd.config = &config;
	list_init(&kvd.sessions);
	kvd.modules = modules_built;
	snprintf(config.socket_path, sizeof(config.socket_path), "%s/old.sock",
		 mini->dir);
	strcpy(addr.sun_path, config.socket_path);
	assert_int_equal(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	close(fd);
	config.socket_mode = 0640;
	snprintf(config.socket_group, sizeof(config.socket_group), "%u",
		 (unsigned int)getgid());
	assert_int_equal(control_new(&kvd, -1, &control), 0);
	assert_int_equal(stat(config.socket_path, &st), 0);
	assert_int_equal(st.st_mode & 07777, 0640);
	control_free(control);
	assert_int_not_equal(access(config.socket_path, F_OK), 0);
}

/* Another name, the same socket_path: the first one keeps its name, its clients and,
 * after a third has taken the path by force, does not remove that one's socket. */
static void socket_of_a_living_daemon_refused(void **state)
{
	struct control *control = NULL;
	struct mini *mini = *state;
	struct kvd kvd = mini->kvd;
	struct client client;
	char pid[32];
	int fd;

	list_init(&kvd.sessions);
	kvd.modules = modules_built;
	assert_int_equal(control_new(&kvd, -1, &control), -EDOM);
	assert_null(control);
	snprintf(pid, sizeof(pid), "pid %d", (int)getpid());
	assert_non_null(strstr(err_last()->text, pid));
	assert_non_null(strstr(err_last()->text, "socket_path"));
	client_open(&client, mini);
	client_call_ok(&client, "{\"cmd\":\"ping\"}");
	client_close(&client);
	assert_int_equal(unlink(mini->config.socket_path), 0);
	fd = open(mini->config.socket_path, O_CREAT | O_RDWR | O_CLOEXEC, 0600);
	assert_true(fd >= 0);
	close(fd);
	control_close(control_of(&mini->kvd));
	assert_int_equal(unlink(mini->config.socket_path), 0);
}

static void socket_inherited_serves(void **state)
{
	struct mini *mini = *state;
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM, 0), wrong = socket(AF_UNIX, SOCK_STREAM, 0);
	struct control *control = NULL;
	struct client client;

	/* the daemon is started again on an inherited socket */
	control_free(control_of(&mini->kvd));
	strcpy(addr.sun_path, mini->config.socket_path);
	assert_int_equal(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	assert_int_equal(listen(fd, 8), 0);
	assert_int_equal(control_new(&mini->kvd, wrong, &control), -EDOM);
	assert_int_equal(control_new(&mini->kvd, fd, &control), 0);
	mini->kvd.part[MODULE_CONTROL] = control;
	client_open(&client, mini);
	client_call_ok(&client, "{\"cmd\":\"ping\"}");
	client_close(&client);
	control_close(control_of(&mini->kvd));
	/* its name is not ours to remove */
	assert_int_equal(unlink(mini->config.socket_path), 0);
}

/* ---- admission ---- */

/* Runs as uid 65534 in a child: the daemon's answers to it. */
static void nobody_main(const struct mini *mini)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	char text[4096];
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	ssize_t n;

	strcpy(addr.sun_path, mini->config.socket_path);
	if (setgid(65534) < 0 || setuid(65534) < 0 ||
	    connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
		_exit(1);
	/* a daemon that refuses may have closed already: read why */
	(void)!send(fd, HELLO, sizeof(HELLO) - 1, MSG_NOSIGNAL);
	n = read(fd, text, sizeof(text) - 1);
	if (n <= 0)
		_exit(3);
	text[n] = '\0';
	_exit(strstr(text, "\"ok\":true") ? 10 : strstr(text, "EPERM") ? 11 : 4);
}

struct child {
	pid_t pid;
	int status;
};

static bool child_ended(void *arg)
{
	struct child *child = arg;

	return waitpid(child->pid, &child->status, WNOHANG) == child->pid;
}

static int nobody_tries(struct mini *mini)
{
	struct child child = {.pid = fork()};

	if (child.pid == 0)
		nobody_main(mini);
	mini_until(mini, child_ended, &child, "the child's end");
	assert_true(WIFEXITED(child.status));
	return WEXITSTATUS(child.status);
}

static void foreign_uid_admitted_only_by_configuration(void **state)
{
	struct mini *mini = *state;

	need_to_become(65534);
	assert_int_equal(chmod(mini->dir, 0755), 0);
	assert_int_equal(chmod(mini->config.socket_path, 0666), 0);
	assert_int_equal(nobody_tries(mini), 10); /* the mode lets everyone in */
	mini->config.allow_uids.id[0] = 1;
	mini->config.allow_uids.count = 1;
	assert_int_equal(nobody_tries(mini), 11);
	mini->config.allow_uids.id[0] = 65534;
	assert_int_equal(nobody_tries(mini), 10);
	mini->config.allow_uids.count = 0;
	mini->config.allow_gids.id[0] = 65534;
	mini->config.allow_gids.count = 1;
	assert_int_equal(nobody_tries(mini), 10);
	mini->config.allow_gids.id[0] = 1;
	assert_int_equal(nobody_tries(mini), 11);
	mini->config.allow_gids.count = 0;
	assert_int_equal(metrics_get(&mini->kvd.metrics, METRIC_SESSIONS_REFUSED), 2);
	mini_until_sessions(mini, 0);
}

/* Connects until it is refused for its rate. */
static void nobody_hurries(const struct mini *mini)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	char text[4096];

	strcpy(addr.sun_path, mini->config.socket_path);
	if (setgid(65534) < 0 || setuid(65534) < 0)
		_exit(1);
	for (unsigned int i = 0; i < 20000; i++) {
		int fd = socket(AF_UNIX, SOCK_STREAM, 0);
		ssize_t n = 0;

		if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
			_exit(2);
		(void)!send(fd, HELLO, sizeof(HELLO) - 1, MSG_NOSIGNAL);
		if (i >= 256)
			n = read(fd, text, sizeof(text) - 1);
		close(fd);
		text[n > 0 ? n : 0] = '\0';
		if (n > 0 && strstr(text, "ELIMIT") && strstr(text, "250 a second"))
			_exit(12);
	}
	_exit(3);
}

static void sessions_of_a_user_are_paced(void **state)
{
	struct mini *mini = *state;
	struct child child = {0};
	struct client admin;

	need_to_become(65534);
	assert_int_equal(chmod(mini->dir, 0755), 0);
	assert_int_equal(chmod(mini->config.socket_path, 0666), 0);
	child.pid = fork();
	if (child.pid == 0)
		nobody_hurries(mini);
	mini_until(mini, child_ended, &child, "the child's end");
	assert_true(WIFEXITED(child.status));
	assert_int_equal(WEXITSTATUS(child.status), 12);
	assert_true(metrics_get(&mini->kvd.metrics, METRIC_SESSIONS_REFUSED) > 0);
	/* one user's use does not count for others */
	client_open(&admin, mini);
	client_call_ok(&admin, "{\"cmd\":\"ping\"}");
	client_close(&admin);
	mini_until_sessions(mini, 0);
}

static void session_over_cap_refused(void **state)
{
	struct mini *mini = *state;
	struct client first, second, third;

	mini->config.sessions_max = 2;
	client_open(&first, mini);
	client_open(&second, mini);
	client_connect(&third, mini);
	expect_closed(&third, "ELIMIT");
	client_call_ok(&first, "{\"cmd\":\"ping\"}");
	client_close(&second);
	mini_until_sessions(mini, 1);
	client_close(&third);
	client_open(&third, mini);
	client_close(&third);
	client_close(&first);
}

/* ---- lines ---- */

static void lines_unsound_answered_and_survived(void **state)
{
	static const struct {
		const char *line, *code;
	} lines[] = {
		{"{\"cmd\":\"ping\"", "EPROTO"},
		{"", "EPROTO"},
		{"   ", "EPROTO"},
		{"nonsense", "EPROTO"},
		{"{\"cmd\":\"ping\"}}", "EPROTO"},
		{"{\"cmd\":\"ping\",\"cmd\":\"ping\"}", "EPROTO"},
		{"{\"cmd\":\"pi\xffng\"}", "EPROTO"},
		{"{\"cmd\":\"ping\",\"id\":\"\xed\xa0\x80\"}", "EPROTO"},
		{"{\"cmd\":\"pi\\u0000ng\"}", "EPROTO"},
		{"{\"cmd\":\"ping\",\"x\":1e999}", "EPROTO"},
		{"[1,2]", "EPROTO"},
		{"[{\"id\":7,\"cmd\":\"ping\"}]", "EPROTO"},
		{"17", "EPROTO"},
		{"null", "EPROTO"},
		{"{}", "EINVAL"},
		{"{\"cmd\":7}", "EINVAL"},
		{"{\"cmd\":null}", "EINVAL"},
		{"{\"cmd\":\"ping\",\"id\":1.5}", "EINVAL"},
		{"{\"cmd\":\"ping\",\"id\":1e308}", "EINVAL"},
		{"{\"cmd\":\"ping\",\"id\":{}}", "EINVAL"},
		{"{\"cmd\":\"ping\",\"id\":null}", "EINVAL"},
		{"{\"cmd\":\"ping\",\"id\":9007199254740993}", "EINVAL"},
		{"{\"CMD\":\"ping\"}", "EINVAL"},
		{"{\"cmd\":\"ping\",\"extra\":1}", "EINVAL"},
		{"{\"cmd\":\"pong\"}", "ENOCMD"},
		{"{\"cmd\":\"\"}", "ENOCMD"},
	};
	struct client client;

	client_open(&client, *state);
	for (size_t i = 0; i < ARRAY_LEN(lines); i++)
		client_call_fails(&client, lines[i].code, "%s", lines[i].line);
	client_call_ok(&client, "{\"cmd\":\"ping\"}");
	client_close(&client);
}

static void line_with_nul_answered(void **state)
{
	static const char line[] = "{\"cmd\":\"ping\0\"}\n";
	struct client client;

	client_open(&client, *state);
	client_send(&client, line, sizeof(line) - 1);
	expect_code(client_reply(&client), "EPROTO");
	client_close(&client);
}

/* Deep nesting costs an error reply, short or long (the long one is parsed by a
 * helper). */
static void line_of_brackets_answered(void **state)
{
	static const size_t sizes[] = {100, 4000, 200000};
	struct client client;
	char *bomb = mem_zalloc(200001);

	client_open(&client, *state);
	memset(bomb, '[', 200000);
	for (size_t i = 0; i < ARRAY_LEN(sizes); i++) {
		client_send(&client, bomb, sizes[i]);
		client_send(&client, "\n", 1);
		expect_code(client_reply(&client), "EPROTO");
	}
	mem_free(bomb);
	client_close(&client);
}

static void replies_carry_the_id(void **state)
{
	static const char *const ids[] = {
		"7",	       "-1",	"0",	"9007199254740991",
		"-4294967297", "\"a\"", "\"\"", "\"\\u00e9\\\"\\\\ \\ud83d\\ude00\""};
	struct client client;
	cJSON *reply, *sent;
	const cJSON *back;

	client_open(&client, *state);
	for (size_t i = 0; i < ARRAY_LEN(ids); i++) {
		for (int fails = 0; fails < 2; fails++) {
			reply = client_call(&client, "{\"id\":%s,\"cmd\":\"%s\"}", ids[i],
					    fails ? "nope" : "ping");
			sent = cJSON_Parse(ids[i]);
			back = cJSON_GetObjectItemCaseSensitive(reply, "id");
			assert_true(cJSON_Compare(back, sent, true));
			/* cJSON_Compare() takes neighbours for equals */
			assert_true(back->valuedouble == sent->valuedouble);
			cJSON_Delete(sent);
			cJSON_Delete(reply);
		}
	}
	reply = client_call(&client, "{\"cmd\":\"ping\"}");
	assert_true(cJSON_IsNull(cJSON_GetObjectItemCaseSensitive(reply, "id")));
	cJSON_Delete(reply);
	client_close(&client);
}

/* The longest id, each byte escaped in the reply, with the longest message. */
static void error_reply_of_any_size_is_whole(void **state)
{
	struct client client;
	char id[REQUEST_ID_MAX * 6 + 1], name[400];

	client_open(&client, *state);
	for (size_t i = 0; i < REQUEST_ID_MAX; i++)
		memcpy(id + 6 * i, "\\u0001", 7);
	memset(name, '\x7f', sizeof(name));
	memcpy(name, "\xe2\x82\xac", 3);
	name[60] = '\0';
	client_call_fails(&client, "ENOCMD", "{\"id\":\"%s\",\"cmd\":\"%s\"}", id, name);
	client_call_fails(&client, "EINVAL", "{\"id\":\"%sx\",\"cmd\":\"%s\"}", id, name);
	client_close(&client);
}

static void line_over_the_cap_closes(void **state)
{
	struct client client, other;
	struct mini *mini = *state;
	char *line = mem_zalloc(2 << 20);

	client_open(&client, mini);
	client_open(&other, mini);
	memset(line, ' ', 2 << 20);
	assert_true(client_send(&client, line, 2 << 20) < 2 << 20);
	expect_closed(&client, "ETOOBIG");
	client_call_ok(&other, "{\"cmd\":\"ping\"}");
	mini_until_sessions(mini, 1);
	client_close(&client);
	/* exactly at the cap is a line */
	client_open(&client, mini);
	memcpy(line, "{\"cmd\":\"ping\"", 13);
	line[(1 << 20) - 1] = '}';
	line[1 << 20] = '\n';
	client_send(&client, line, (1 << 20) + 1);
	expect_ok(client_reply(&client));
	line[(1 << 20) - 1] = ' ';
	line[1 << 20] = '}';
	line[(1 << 20) + 1] = '\n';
	client_send(&client, line, (1 << 20) + 2);
	expect_closed(&client, "ETOOBIG");
	mem_free(line);
	client_close(&client);
	client_close(&other);
}

static void line_in_pieces_is_served(void **state)
{
	static const char line[] =
		"{\"id\":5,\"cmd\":\"ping\"}\n{\"id\":6,\"cmd\":\"ping\"}\n";
	struct client client;
	cJSON *reply;

	client_open(&client, *state);
	for (size_t i = 0; i < sizeof(line) - 1; i++) {
		client_send(&client, line + i, 1);
		mini_turn(*state);
	}
	for (int id = 5; id <= 6; id++) {
		reply = client_reply(&client);
		assert_int_equal(reply_int(reply, "id"), id);
		expect_ok(reply);
	}
	client_close(&client);
}

/* Long lines are parsed by helpers, short ones are not: answers keep the order. */
static void commands_keep_their_order(void **state)
{
	enum { COUNT = 60 };
	struct client client;
	char *text = mem_zalloc(COUNT * 9000), *p = text;

	client_open(&client, *state);
	for (int i = 0; i < COUNT; i++)
		p += sprintf(p, "{\"id\":%d,\"cmd\":\"ping\"%*s}\n", i,
			     i % 3 == 0	  ? 8000
			     : i % 3 == 1 ? 1
					  : 4080,
			     "");
	client_send(&client, text, (size_t)(p - text));
	for (int i = 0; i < COUNT; i++) {
		cJSON *reply = client_reply(&client);

		assert_int_equal(reply_int(reply, "id"), i);
		expect_ok(reply);
	}
	mem_free(text);
	client_close(&client);
}

/* A client that disconnects while a helper has its line: no answer is sent. */
static void client_gone_during_parse_is_freed(void **state)
{
	struct mini *mini = *state;
	struct client client;
	char *line = mem_zalloc(600000);

	memset(line, ' ', 600000);
	memcpy(line, "{\"cmd\":\"ping\",\"x\":[0", 20);
	for (size_t i = 20; i + 2 < 599990; i += 2)
		memcpy(line + i, ",0", 2);
	memcpy(line + 599990, "]}       \n", 10);
	for (int i = 0; i < 5; i++) {
		client_open(&client, mini);
		client_send(&client, line, 600000);
		for (int turn = 0; turn < i; turn++)
			mini_turn(mini);
		client_close(&client);
	}
	mini_until_sessions(mini, 0);
	mem_free(line);
}

/* ---- floods ---- */

/* Turns in which this process kept its core, of about a hundred at most: a turn that
 * is preempted finds its time over, and serves fewer clients. */
static void turns_had(struct mini *mini, int count)
{
	for (int all = 0; count > 0 && all < 200; all++) {
		uint64_t begin_ns = loop_clock_ns(mini->kvd.loop);

		mini_turn(mini);
		count -= loop_clock_ns(mini->kvd.loop) - begin_ns < LOOP_NS_PER_MS;
	}
}

static void lines_ten_thousand_at_once_share_the_loop(void **state)
{
	enum { COUNT = 10000 };
	struct mini *mini = *state;
	struct client flood, other;
	char *text = mem_zalloc(COUNT * 32), *p = text;
	int done = 0;

	client_open(&flood, mini);
	client_open(&other, mini);
	for (int i = 0; i < COUNT; i++)
		p += sprintf(p, "{\"id\":%d,\"cmd\":\"ping\"}\n", i);
	for (size_t sent = 0; done < COUNT;) {
		ssize_t n = send(flood.fd, text + sent, (size_t)(p - text) - sent,
				 MSG_NOSIGNAL);

		sent += n > 0 ? (size_t)n : 0;
		/* while thousands wait, the neighbour's one command is next */
		if (done < COUNT / 2) {
			assert_int_equal(send(other.fd, "{\"cmd\":\"ping\"}\n", 15, 0),
					 15);
			turns_had(mini, 3);
			assert_int_equal(
				poll(&(struct pollfd){.fd = other.fd, .events = POLLIN},
				     1, 0),
				1);
			expect_ok(client_reply(&other));
		}
		for (int i = 0; i < 100 && done < COUNT; i++, done++) {
			cJSON *reply = client_reply(&flood);

			assert_int_equal(reply_int(reply, "id"), done);
			cJSON_Delete(reply);
		}
	}
	mem_free(text);
	client_close(&flood);
	client_close(&other);
}

/* Its requests are not taken, its queue is limited, and when it reads again (a stopped
 * process continues) nothing is missing. */
static void client_not_reading_is_paused(void **state)
{
	struct mini *mini = *state;
	struct client deaf, other;
	unsigned int sent = 0, got = 0;

	mini->config.client_queue_bytes = 64 << 10;
	client_open(&deaf, mini);
	client_open(&other, mini);
	for (int full = 0; full < 200;) { /* for as long as its socket takes lines */
		/* help is a long answer to a short question */
		if (send(deaf.fd, "{\"cmd\":\"help\"}\n", 15, MSG_NOSIGNAL) == 15)
			sent++;
		else if (errno == EAGAIN)
			full++;
		else
			fail_msg("its connection was closed");
		mini_turn(mini);
		if (sent % 50 == 0)
			client_call_ok(&other, "{\"cmd\":\"ping\"}");
	}
	assert_int_equal(mini->kvd.session_count, 2);
	assert_true(sent > 200);
	client_call_ok(&other, "{\"cmd\":\"ping\"}");
	for (cJSON *reply; got < sent && (reply = client_reply(&deaf)); got++)
		cJSON_Delete(reply);
	assert_int_equal(got, sent);
	assert_int_equal(metrics_get(&mini->kvd.metrics, METRIC_SESSIONS_KILLED), 0);
	client_close(&deaf);
	client_close(&other);
}

/* ---- time ---- */

static void line_half_sent_times_out(void **state)
{
	struct mini *mini = *state;
	struct client client;

	client_open(&client, mini);
	control_set_timeout(control_of(&mini->kvd), 50 * LOOP_NS_PER_MS);
	client_send(&client, "{\"cmd\":", 7);
	expect_closed(&client, "ETIMEOUT");
	client_close(&client);
	/* idle between lines is no fault: outlive another client's timeout */
	control_set_timeout(control_of(&mini->kvd), 20 * LOOP_NS_PER_S);
	client_open(&client, mini);
	struct client silent;

	control_set_timeout(control_of(&mini->kvd), 50 * LOOP_NS_PER_MS);
	client_connect(&silent, mini);
	expect_closed(&silent, "ETIMEOUT"); /* no hello */
	client_close(&silent);
	control_set_timeout(control_of(&mini->kvd), 20 * LOOP_NS_PER_S);
	client_call_ok(&client, "{\"cmd\":\"ping\"}");
	client_close(&client);
}

/* The last line is not read: the connection is closed nevertheless. */
static void last_message_unread_times_out(void **state)
{
	struct mini *mini = *state;
	struct client deaf;
	char *line = mem_zalloc(2 << 20);

	client_open(&deaf, mini);
	control_set_timeout(control_of(&mini->kvd), 50 * LOOP_NS_PER_MS);
	for (int i = 0; i < 40; i++) { /* fills the socket's buffer */
		assert_int_equal(send(deaf.fd, "{\"cmd\":\"help\"}\n", 15, 0), 15);
		mini_turn(mini);
	}
	memset(line, ' ', 2 << 20);
	client_send(&deaf, line, 2 << 20);
	mem_free(line);
	mini_until_sessions(mini, 0);
	client_close(&deaf);
}

/* A client that sends, shuts its side and reads (nc -N) gets its answers. */
static void client_half_closed_gets_its_answers(void **state)
{
	struct mini *mini = *state;
	struct client client;

	client_connect(&client, mini);
	client_send(&client, HELLO "{\"id\":1,\"cmd\":\"ping\"}\n{\"id\":2,\"cm",
		    sizeof(HELLO "{\"id\":1,\"cmd\":\"ping\"}\n{\"id\":2,\"cm") - 1);
	shutdown(client.fd, SHUT_WR);
	expect_ok(client_reply(&client));
	expect_ok(client_reply(&client));
	assert_null(client_reply(&client));
	mini_until_sessions(mini, 0);
	client_close(&client);
}

/* ---- descriptors ---- */

static void descriptors_unasked_refused_and_closed(void **state)
{
	struct mini *mini = *state;
	struct client client;
	int fds[40], before, memfd = memfd_filled(4096, 1);

	client_open(&client, mini);
	before = open_fds();
	for (size_t i = 0; i < ARRAY_LEN(fds); i++)
		fds[i] = dup(memfd);
	/* a command that takes none */
	client_send_fds(&client, "{\"id\":1,\"cmd\":\"ping\"}\n", fds, 1);
	expect_code(client_reply(&client), "EINVAL");
	/* one that takes some, but these are not named */
	client_send_fds(
		&client,
		"{\"cmd\":\"region.register\",\"kind\":\"vm\",\"address\":\"4096\","
		"\"length\":4096}\n",
		fds, 1);
	expect_code(client_reply(&client), "EINVAL");
	client_send_fds(&client,
			"{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":1,"
			"\"length\":4096}\n",
			fds, 2);
	expect_code(client_reply(&client), "EINVAL");
	/* out of range, and none there */
	client_send_fds(&client,
			"{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":1,"
			"\"length\":4096}\n",
			fds, 1);
	expect_code(client_reply(&client), "ERANGE");
	client_call_fails(&client, "EINVAL",
			  "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			  "\"length\":4096}");
	/* more than a line may have; the id is still reported */
	client_send_fds(&client, "{\"id\":5,\"cmd\":\"ping\"}\n", fds, ARRAY_LEN(fds));
	cJSON *reply = client_reply(&client);

	assert_int_equal(reply_int(reply, "id"), 5);
	expect_code(reply, "ELIMIT");
	/* with bytes that are no line yet, in several messages */
	client_send_fds(&client, "{\"id\":6,", fds, 9);
	client_send_fds(&client, "\"cmd\":\"ping\"}", fds, 9);
	client_send_fds(&client, "\n", fds, 1);
	expect_code(client_reply(&client), "ELIMIT");
	/* with a line that is no JSON */
	client_send_fds(&client, "}{\n", fds, 3);
	expect_code(client_reply(&client), "EPROTO");
	/* half a line, and disconnected */
	client_send_fds(&client, "{\"cmd\"", fds, 4);
	mini_turn(mini);
	for (size_t i = 0; i < ARRAY_LEN(fds); i++)
		close(fds[i]);
	assert_true(open_fds() <= before + 4);
	close(memfd);
	client_close(&client);
	mini_until_sessions(mini, 0);
}

/* Descriptors whose close may block are refused, and the reply names the one. */
static void descriptors_that_may_block_are_named(void **state)
{
	struct mini *mini = *state;
	struct client client;
	const char *message = NULL;
	const cJSON *error;
	int pair[2];

	client_open(&client, mini);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	client_send_fds(&client,
			"{\"id\":7,\"cmd\":\"region.register\",\"kind\":\"memfd\","
			"\"fd\":0,\"length\":4096}\n{\"id\":8,\"cmd\":\"ping\"}\n",
			pair, 1);
	cJSON *reply = client_reply(&client);

	assert_int_equal(reply_int(reply, "id"), 7);
	error = cJSON_GetObjectItem(reply, "error");
	assert_int_equal(json_get_str(error, "message", true, 1000, &message), 0);
	assert_non_null(strstr(message, "descriptor 0 is a socket"));
	expect_code(reply, "EIMPORT");
	expect_ok(client_reply(&client));
	close(pair[0]);
	close(pair[1]);
	client_close(&client);
}

/* Descriptors belong to the line they were sent with, also when the daemon
 * finds many lines at once in the socket. */
static void descriptors_stay_with_their_line(void **state)
{
	struct mini *mini = *state;
	struct client client;
	int fd = memfd_filled(8192, 1);

	client_open(&client, mini);
	client_send(&client, "{\"id\":1,\"cmd\":\"ping\"}\n{\"id\":2,\"cmd\":\"ping\"}\n",
		    44);
	client_send_fds(
		&client,
		"{\"id\":3,\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
		"\"length\":8192}\n{\"id\":4,\"cmd\":\"ping\"}\n",
		&fd, 1);
	client_send(&client, "{\"id\":5,\"cmd\":\"ping\"}\n", 22);
	for (int seen = 0; seen < 5; seen++)
		expect_ok(client_reply(&client));
	close(fd);
	client_close(&client);
}

/* ---- the daemon runs out ---- */

static void daemon_without_descriptors_recovers(void **state)
{
	struct mini *mini = *state;
	struct client client, late;
	struct rlimit old, low;
	int fds[20];

	client_open(&client, mini);
	client_connect(&late, mini);
	for (size_t i = 0; i < ARRAY_LEN(fds); i++)
		fds[i] = memfd_filled(4096, 1);
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	low = (struct rlimit){.rlim_cur = (rlim_t)fds[0], .rlim_max = old.rlim_max};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &low), 0);
	for (int i = 0; i < 5; i++)
		mini_turn(mini); /* accept fails: pauses, does not spin or die */
	client_send_fds(&client, "{\"cmd\":\"ping\"}\n", fds, 2);
	cJSON *reply = client_reply(&client);

	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	expect_code(reply, "ELIMIT"); /* its descriptors were lost */
	client_call_ok(&late, "{\"cmd\":\"hello\",\"proto\":1,\"client\":\"late\"}");
	for (size_t i = 0; i < ARRAY_LEN(fds); i++)
		close(fds[i]);
	client_close(&late);
	client_close(&client);
}

static void daemon_closing_sends_reason(void **state)
{
	struct mini *mini = *state;
	struct client client;

	client_open(&client, mini);
	control_close(control_of(&mini->kvd));
	expect_closed(&client, "ESESSION");
	mini_until_sessions(mini, 0);
	assert_true(control_idle(control_of(&mini->kvd)));
	client_close(&client);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(socket_has_configured_mode),
		CASE(socket_path_unusable_refused),
		CASE(socket_of_a_living_daemon_refused),
		CASE(socket_stale_replaced),
		CASE(socket_inherited_serves),
		CASE(foreign_uid_admitted_only_by_configuration),
		CASE(sessions_of_a_user_are_paced),
		CASE(session_over_cap_refused),
		CASE(lines_unsound_answered_and_survived),
		CASE(line_with_nul_answered),
		CASE(line_of_brackets_answered),
		CASE(replies_carry_the_id),
		CASE(error_reply_of_any_size_is_whole),
		CASE(line_over_the_cap_closes),
		CASE(line_in_pieces_is_served),
		CASE(commands_keep_their_order),
		CASE(client_gone_during_parse_is_freed),
		CASE(lines_ten_thousand_at_once_share_the_loop),
		CASE(client_not_reading_is_paused),
		CASE(line_half_sent_times_out),
		CASE(last_message_unread_times_out),
		CASE(client_half_closed_gets_its_answers),
		CASE(descriptors_unasked_refused_and_closed),
		CASE(descriptors_that_may_block_are_named),
		CASE(descriptors_stay_with_their_line),
		CASE(daemon_without_descriptors_recovers),
		CASE(daemon_closing_sends_reason),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
