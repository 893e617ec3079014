/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Client sockets are non-blocking; every wait turns the daemon's loop, so one
 * thread plays both sides and a sanitizer sees all of it. Helper threads of the
 * daemon are real.
 */
#include "tests/lib/control_client.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/control/control.h"
#include "daemon/request/commands.h"
#include "daemon/modules.h"
#include "daemon/loop/loop.h"
#include "daemon/gate/gate.h"
#include "daemon/loop/offload.h"
#include "proto/json.h"
#include "tests/lib/gates.h"
#include "tests/lib/tmp.h"

#define WAIT_S 20
#define WAIT_NS (WAIT_S * LOOP_NS_PER_S)

/* ---- the daemon ---- */

int open_fds(void)
{
	DIR *dir = opendir("/proc/self/fd");
	int count = 0;

	assert_non_null(dir);
	while (readdir(dir))
		count++;
	closedir(dir);
	return count - 3; /* . .. and the directory itself */
}

void mini_config(struct mini *mini)
{
	*mini = (struct mini){.fds_before = open_fds()};
	assert_non_null(
		mkdtemp(tmp_path(mini->dir, sizeof(mini->dir), "kvd-test-XXXXXX")));
	mini->config = (struct config){.name = "mini",
				       .socket_mode = 0600,
				       .sessions_max = 64,
				       .session_regions_max = 64,
				       .session_pools_max = 8,
				       .rooms_max = 1024,
				       .client_queue_bytes = 8 << 20};
	snprintf(mini->config.socket_path, sizeof(mini->config.socket_path),
		 "%s/mini.sock", mini->dir);
	mini->kvd.config = &mini->config;
	list_init(&mini->kvd.sessions);
	mini->kvd.modules = modules_built;
}

void mini_start(struct mini *mini)
{
	assert_int_equal(loop_new(&mini->kvd.loop), 0);
	assert_int_equal(mini->inline_helpers
				 ? offload_new_inline(mini->kvd.loop, &mini->kvd.offload)
				 : offload_new(mini->kvd.loop, 2, &mini->kvd.offload),
			 0);
	gates_begin(mini->kvd.loop, &mini->kvd.gates);
	if (request_module.new(&mini->kvd, &mini->kvd.part[MODULE_REQUEST]) < 0 ||
	    control_module.new(&mini->kvd, &mini->kvd.part[MODULE_CONTROL]) < 0)
		fail_msg("%s", err_last()->text);
}

void mini_turn(struct mini *mini)
{
	loop_turn(mini->kvd.loop, 5 * LOOP_NS_PER_MS);
}

void mini_until(struct mini *mini, bool (*holds)(void *arg), void *arg, const char *what)
{
	uint64_t end = loop_clock_ns(mini->kvd.loop) + WAIT_NS;

	while (!holds(arg)) {
		if (loop_clock_ns(mini->kvd.loop) > end)
			fail_msg("not within %d s: %s", WAIT_S, what);
		mini_turn(mini);
	}
}

struct session_goal {
	const struct mini *mini;
	unsigned int count;
};

static bool has_sessions(void *arg)
{
	const struct session_goal *goal = arg;

	return goal->mini->kvd.session_count == goal->count;
}

void mini_until_sessions(struct mini *mini, unsigned int count)
{
	struct session_goal goal = {mini, count};

	mini_until(mini, has_sessions, &goal, "the number of sessions");
}

static bool is_idle(void *arg)
{
	return control_idle(arg);
}

void mini_stop(struct mini *mini)
{
	control_close(control_of(&mini->kvd));
	mini_until(mini, is_idle, control_of(&mini->kvd), "the sessions' end");
	assert_null(mini->kvd.session_clock);
	assert_int_equal(metrics_get(&mini->kvd.metrics, METRIC_SESSIONS), 0);
	assert_int_equal(metrics_get(&mini->kvd.metrics, METRIC_REGIONS), 0);
	assert_int_equal(METRICS_SUM(&mini->kvd.metrics, REGION_BYTES), 0);
	assert_int_equal(metrics_get(&mini->kvd.metrics, METRIC_POOLS), 0);
	assert_true(accounts_idle(&mini->kvd.accounts));
	control_free(control_of(&mini->kvd));
	request_module.free(mini->kvd.part[MODULE_REQUEST]);
	offload_free(mini->kvd.offload);
	gates_free(mini->kvd.gates);
	loop_free(mini->kvd.loop);
	assert_int_not_equal(access(mini->config.socket_path, F_OK), 0);
	assert_int_equal(rmdir(mini->dir), 0);
	assert_int_equal(open_fds(), mini->fds_before);
}

/* ---- clients ---- */

void client_connect(struct client *client, struct mini *mini)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};

	*client = (struct client){.mini = mini};
	client->fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	assert_true(client->fd >= 0);
	assert_true(strlen(mini->config.socket_path) < sizeof(addr.sun_path));
	strcpy(addr.sun_path, mini->config.socket_path);
	assert_int_equal(connect(client->fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
}

void client_open(struct client *client, struct mini *mini)
{
	client_connect(client, mini);
	client_call_ok(client,
		       "{\"id\":0,\"cmd\":\"hello\",\"proto\":1,\"client\":\"test\"}");
	assert_int_equal(client->fd_count, 1);
}

void client_close(struct client *client)
{
	if (!client->mini)
		return;
	close(client->fd);
	for (unsigned int i = 0; i < client->fd_count; i++)
		close(client->fds[i]);
	mem_free(client->buf);
	*client = (struct client){.mini = NULL};
}

size_t client_send(struct client *client, const void *bytes, size_t len)
{
	uint64_t end = loop_clock_ns(client->mini->kvd.loop) + WAIT_NS;
	size_t sent = 0;

	while (sent < len) {
		ssize_t n = send(client->fd, (const char *)bytes + sent, len - sent,
				 MSG_NOSIGNAL);

		if (n > 0)
			sent += (size_t)n;
		else if (errno != EAGAIN)
			break;
		else
			mini_turn(client->mini);
		if (loop_clock_ns(client->mini->kvd.loop) > end)
			fail_msg("the daemon took %zu of %zu bytes", sent, len);
	}
	return sent;
}

void client_send_fds(struct client *client, const char *text, const int *fds,
		     unsigned int fd_count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * 253)];
	} control = {.bytes = {0}};
	struct iovec iov = {.iov_base = (void *)(uintptr_t)text, .iov_len = strlen(text)};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

	if (fd_count) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
		CMSG_FIRSTHDR(&msg)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&msg)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&msg)->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), fds, sizeof(int) * fd_count);
	}
	assert_int_equal(sendmsg(client->fd, &msg, MSG_NOSIGNAL), (ssize_t)strlen(text));
}

/* Read what is there; false when nothing was. */
static bool client_receive(struct client *client)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * CLIENT_FDS_MAX)];
	} control;
	struct iovec iov;
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = control.bytes,
			     .msg_controllen = sizeof(control.bytes)};
	ssize_t n;

	if (client->cap - client->len < 65536) {
		client->cap = client->cap * 2 + 65536;
		client->buf = mem_regrow(client->buf, client->cap, 1);
		assert_non_null(client->buf);
	}
	iov = (struct iovec){client->buf + client->len, client->cap - client->len};
	n = recvmsg(client->fd, &msg, MSG_CMSG_CLOEXEC);
	if (n < 0 && errno == EAGAIN)
		return false;
	if (n <= 0) {
		client->eof = true;
		return true;
	}
	client->len += (size_t)n;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

		assert_true(client->fd_count + count <= CLIENT_FDS_MAX);
		memcpy(client->fds + client->fd_count, CMSG_DATA(c), count * sizeof(int));
		client->fd_count += (unsigned int)count;
	}
	return true;
}

cJSON *client_reply(struct client *client)
{
	uint64_t end = loop_clock_ns(client->mini->kvd.loop) + WAIT_NS;
	char *newline;
	cJSON *json = NULL;

	while (!(newline = client->len ? memchr(client->buf, '\n', client->len) : NULL)) {
		if (client->eof)
			return NULL;
		if (!client_receive(client))
			mini_turn(client->mini);
		if (loop_clock_ns(client->mini->kvd.loop) > end)
			fail_msg("no reply within %d s", WAIT_S);
	}
	if (json_parse(client->buf, (size_t)(newline - client->buf), 16, &json) < 0)
		fail_msg("a reply that is no JSON: %s", err_last()->text);
	client->len -= (size_t)(newline + 1 - client->buf);
	memmove(client->buf, newline + 1, client->len);
	return json;
}

static cJSON *call(struct client *client, int fd, const char *fmt, va_list ap)
{
	char *line = NULL;
	int n = vasprintf(&line, fmt, ap);

	assert_true(n >= 0);
	line = realloc(line, (size_t)n + 2);
	assert_non_null(line);
	memcpy(line + n, "\n", 2);
	if (fd >= 0)
		client_send_fds(client, line, &fd, 1);
	else
		client_send(client, line, (size_t)n + 1);
	free(line);
	return client_reply(client);
}

cJSON *client_call(struct client *client, const char *fmt, ...)
{
	va_list ap;
	cJSON *reply;

	va_start(ap, fmt);
	reply = call(client, -1, fmt, ap);
	va_end(ap);
	return reply;
}

cJSON *client_call_fd(struct client *client, int fd, const char *fmt, ...)
{
	va_list ap;
	cJSON *reply;

	va_start(ap, fmt);
	reply = call(client, fd, fmt, ap);
	va_end(ap);
	return reply;
}

void client_call_ok(struct client *client, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	expect_ok(call(client, -1, fmt, ap));
	va_end(ap);
}

int64_t client_call_int(struct client *client, const char *member, const char *fmt, ...)
{
	va_list ap;
	cJSON *reply;
	int64_t v;

	va_start(ap, fmt);
	reply = call(client, -1, fmt, ap);
	va_end(ap);
	v = reply_int(reply, member);
	cJSON_Delete(reply);
	return v;
}

void client_call_fails(struct client *client, const char *code, const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	expect_code(call(client, -1, fmt, ap), code);
	va_end(ap);
}

/* ---- replies ---- */

static const char *text_of(const cJSON *reply)
{
	static char text[512];

	if (!reply || !cJSON_PrintPreallocated((cJSON *)(uintptr_t)reply, text,
					       sizeof(text), false))
		snprintf(text, sizeof(text), "%s", reply ? "(long)" : "(closed)");
	return text;
}

const char *reply_code(const cJSON *reply)
{
	const cJSON *error = cJSON_GetObjectItemCaseSensitive(reply, "error");
	const char *code = NULL;

	if (!error || json_get_str(error, "code", true, 32, &code) < 0)
		return "";
	return code;
}

int64_t reply_int(const cJSON *reply, const char *member)
{
	int64_t v = 0;

	if (!reply || json_get_int(reply, member, true, INT64_MIN, INT64_MAX, &v) < 0)
		fail_msg("no %s in %s", member, text_of(reply));
	return v;
}

void expect_code(cJSON *reply, const char *code)
{
	if (!reply || strcmp(reply_code(reply), code) != 0)
		fail_msg("%s was expected, not %s", code, text_of(reply));
	cJSON_Delete(reply);
}

void expect_ok(cJSON *reply)
{
	if (!cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(reply, "ok")))
		fail_msg("ok was expected, not %s", text_of(reply));
	cJSON_Delete(reply);
}

int memfd_filled(size_t bytes, int fill)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	void *map;

	assert_true(fd >= 0);
	assert_int_equal(ftruncate(fd, (off_t)bytes), 0);
	map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	assert_ptr_not_equal(map, MAP_FAILED);
	memset(map, fill, bytes);
	munmap(map, bytes);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
	return fd;
}
