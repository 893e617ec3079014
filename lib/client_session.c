/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Sessions: the first one, and those after a restart of the daemon.
 *
 * The reply to hello provides three values for later calls: the session's status page,
 * the daemon's pid, and its limits. The pid is the one that the kernel attached to the
 * reply (SCM_CREDENTIALS of the writing process), so neither a forged message nor socket
 * activation can refer to another process. Since Linux 6.5 the kernel attaches a pidfd,
 * too, which identifies the process in any PID namespace, even one that is not visible
 * here (a side car). Otherwise the pidfd is opened before the connection is checked once
 * more: if that is alive, the daemon had not ended, so its number cannot have been
 * reused, and the pidfd is the daemon's.
 *
 *   DOWN ──connect──▶ GREETING ──hello──▶ REGISTERING ──all answered──▶ UP
 *    ▲                    │                    │                         │
 *    └───── back-off ─────┴──── any refusal ───┴──── connection lost ────┘
 *
 * All callers use the same steps: kvd_open() and kvd_reconnect() wait for the last one,
 * kvd_poll() takes the due steps and never waits. Every step is an ordinary request with
 * a deadline, so none can block an event loop. The handles are the record of
 * registrations: regions first (each keeps a duplicate of its fd), then their pools. A
 * session is UP with all of them or not at all, so an engine never has half of its pools.
 * The daemon may refuse a registration permanently (a smaller daemon, another version);
 * it is then retried at the slowest pace, and every call returns the reason.
 *
 * Registrations are sent within a window: each carries a descriptor, and a thousand
 * regions must not need a thousand more descriptors.
 *
 * Handles keep their addresses; rooms and transfers of the old session keep its page and
 * end there (client_status.c): they fail when the old daemon's process has exited, not
 * because a new one answers.
 */
#include "daemon/base/clock.h"
#include "lib/client.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define CLOCK_SLACK_NS 1000000u
#define WINDOW 16u /* registrations in progress */
#define RETRY_NS UINT64_C(10000000)
#define RETRY_MAX_NS UINT64_C(1000000000)

/* ---- connect and greet ------------------------------------------------------ */

static int connect_failed(struct kvd_client *client, int no)
{
	switch (no) {
	case ENOENT:
		return client_fail(
			client, KVD_E_NODAEMON,
			"no daemon: %s does not exist; start kvd, or check the name",
			client->path);
	case ECONNREFUSED:
		return client_fail(
			client, KVD_E_NODAEMON,
			"no daemon: no process listens on %s (left by one that exited?)",
			client->path);
	case EACCES:
	case EPERM:
		return client_fail(
			client, KVD_E_PERM,
			"%s: permission denied for uid %u; be in the socket's group",
			client->path, (unsigned int)geteuid());
	case ETIMEDOUT:
		return client_fail(client, KVD_E_NOREPLY,
				   "%s: the daemon accepts no connections", client->path);
	default:
		return client_fail(client, KVD_E_NODAEMON, "%s: %s", client->path,
				   strerror(no));
	}
}

/* Never waits. -KVD_E_NOREPLY: the backlog is full, and no event signals its end. */
static int conn_connect(struct kvd_client *client)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	cleanup_close int fd = -1;
	int one = 1, r;

	memcpy(addr.sun_path, client->path, strlen(client->path) + 1);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return client_fail(client, KVD_E_IO, "socket: %s", strerror(errno));
	/* before connect: the kernel then attaches the writer to every message */
	if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &one, sizeof(one)) < 0)
		return client_fail(client, KVD_E_IO, "SO_PASSCRED: %s", strerror(errno));
	setsockopt(fd, SOL_SOCKET, CLIENT_SO_PASSPIDFD, &one, sizeof(one));
	do
		r = connect(fd, (struct sockaddr *)&addr, sizeof(addr));
	while (r < 0 && errno == EINTR);
	if (r < 0)
		return connect_failed(client, errno == EAGAIN ? ETIMEDOUT : errno);
	client->conn.fd = mem_steal_fd(&fd);
	client->conn.sender = 0;
	return 0;
}

static void info_str(const cJSON *reply, const char *name, char *out, size_t bytes)
{
	const char *s = client_get_str(reply, name);

	snprintf(out, bytes, "%s", s ? s : "");
}

/* A pidfd of the daemon, or -1 if the kernel cannot provide one. */
static int daemon_pidfd(struct kvd_client *client)
{
	struct pollfd p = {.fd = client->conn.fd, .events = POLLRDHUP};
	pid_t pid = client->conn.sender;
	cleanup_close int pidfd = -1;

	if (client->conn.sender_pidfd >= 0)
		return mem_steal_fd(&client->conn.sender_pidfd);
	if (pid <= 0)
		return -1;
	pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (pidfd < 0 || (poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP)))
		return -1;
	return mem_steal_fd(&pidfd);
}

/* The times of the status page are the daemon's clock, which a time namespace shifts:
 * a healthy daemon would be taken for dead, or a frozen one for healthy. The reply has
 * its time between hello and now. */
static int clock_check(struct kvd_client *client, uint64_t theirs)
{
	uint64_t from = client->again.hello_ns, to = clock_ns();
	bool behind = theirs < from;
	uint64_t off = behind ? from - theirs : theirs > to ? theirs - to : 0;

	if (off <= CLOCK_SLACK_NS)
		return 0;
	return client_fail(
		client, KVD_E_STATE,
		"the daemon's clock is %.1f s %s this process's: one of the two is in "
		"another time namespace; run both in the same",
		1e-9 * (double)off, behind ? "behind" : "ahead of");
}

static int hello_take(struct client_request *req, const cJSON *reply)
{
	struct kvd_client *client = req->client;
	struct client_conn *conn = &client->conn;
	struct kvd_daemon_info *info = &client->info;
	const cJSON *status = cJSON_GetObjectItemCaseSensitive(reply, "status");
	uint64_t slots = 0, bytes = 0, time_ns = 0;
	const char *why = NULL;
	int r, pidfd;

	info_str(reply, "daemon", info->daemon, sizeof(info->daemon));
	info_str(reply, "name", info->name, sizeof(info->name));
	info_str(reply, "instance", info->instance, sizeof(info->instance));
	info_str(reply, "endpoint", info->endpoint, sizeof(info->endpoint));
	info->pid = conn->sender;
	if (!client_get_u64(reply, "session", &info->session) ||
	    !client_get_u64(reply, "epoch", &info->epoch) ||
	    !client_get_u64(reply, "time_ns", &time_ns) ||
	    !client_get_u64(status, "slots", &slots) || slots > UINT32_MAX ||
	    !client_get_u64(status, "bytes", &bytes))
		return client_fail(client, KVD_E_PROTO,
				   "the hello reply lacks session, epoch, time or status "
				   "page");
	r = clock_check(client, time_ns);
	if (r)
		return r;
	if (!conn->in_fd_count) /* the kernel drops descriptors when the table is full */
		return client_fail(client, KVD_E_LIMIT,
				   "the hello reply has no status page: file "
				   "descriptors exhausted (RLIMIT_NOFILE)?");
	pidfd = daemon_pidfd(client);
	r = client_map_new(conn->in_fds[0], (size_t)bytes, (uint32_t)slots, pidfd,
			   &client->map, &why);
	if (r) {
		mem_closep(&pidfd);
		return client_fail(client, -r, "the status page: %s",
				   why ? why : "out of memory");
	}
	info->slots = (uint32_t)slots;
	client->notifs_taken = 0;
	client->serial++;
	return 0;
}

/* A step of this attempt failed; client_session_step() ends it. */
static void attempt_failed(struct kvd_client *client)
{
	if (!client->again.failed)
		client->again.why = client->error;
	client->again.failed = true;
}

static int hello_finish(struct client_request *req, int result, const cJSON *reply)
{
	struct kvd_client *client = req->client;
	int off = 0, r = result;

	if (req->late)
		return result;
	if (!r)
		r = hello_take(req, reply);
	if (r) {
		attempt_failed(client);
		return r;
	}
	setsockopt(client->conn.fd, SOL_SOCKET, SO_PASSCRED, &off, sizeof(off));
	setsockopt(client->conn.fd, SOL_SOCKET, CLIENT_SO_PASSPIDFD, &off, sizeof(off));
	client->again.stage = CLIENT_REGISTERING;
	return 0;
}

/* For each request of this attempt. */
static int timeout_of(const struct kvd_client *client)
{
	uint64_t now = clock_ns(), until = client->again.until_ns;

	if (!until)
		return client->timeout_ms;
	return until > now ? (int)((until - now) / 1000000u) + 1 : 1;
}

static int session_hello(struct kvd_client *client)
{
	struct kvd_call call = {.timeout_ms = timeout_of(client)};
	struct client_op op;

	client->again.hello_ns = clock_ns();
	client_op_begin(client, &op, "hello");
	out_number(&op.text, "proto", 1);
	out_text(&op.text, "client", client->name);
	out_filled(&op.text, "role", client->role);
	op.finish = hello_finish;
	op.forced = true;
	return client_op_run(client, &op, &call);
}

/* The old page's reference is dropped: rooms of it have their own. */
static int session_begin(struct kvd_client *client)
{
	int r;

	client_map_unref(client->map);
	client->map = NULL;
	r = conn_connect(client);
	if (r) {
		client->again.why = client->error;
		client_session_lost(client);
		return r;
	}
	client->again.stage = CLIENT_GREETING;
	client->again.failed = false;
	r = session_hello(client);
	if (r) {
		attempt_failed(client);
		client_conn_lost(client, false, "hello could not be sent");
		client->error = client->again.why;
	}
	return r;
}

/* ---- registering again -------------------------------------------------------- */

int client_session_again(struct client_op *op)
{
	struct kvd_client *client = op->object->client;
	struct kvd_call call = {.timeout_ms = timeout_of(client)};
	int r;

	op->finish = client_object_again;
	op->forced = true;
	op->object->asked = client->serial;
	r = client_op_run(client, op, &call);
	if (!r)
		client->again.open++;
	return r;
}

/* Failures of objects restored after the session: retry later, or never. */
static void redo_failed(struct client_object *object)
{
	struct kvd_client *client = object->client;

	if (client->error.retryable) {
		object->asked = 0;
		client->again.redo_ns = clock_ns() + RETRY_MAX_NS;
		return;
	}
	object->lost = true;
	client_object_enter(object, CLIENT_FAILED);
}

void client_session_answered(struct client_object *object, int result)
{
	struct kvd_client *client = object->client;

	client->again.open--;
	if (result && client->again.stage == CLIENT_UP)
		redo_failed(object);
	else if (result)
		attempt_failed(client);
}

static int object_again(struct client_object *object)
{
	switch (object->kind) {
	case CLIENT_REGION:
		return client_region_again((struct kvd_region *)(void *)object);
	case CLIENT_POOL:
		return client_pool_again((struct kvd_pool *)(void *)object);
	case CLIENT_ATTACH:
		return client_attach_again(object);
	default:
		return client_dlist_again(object);
	}
}

/* On record, but not registered in this session. */
static bool is_due(const struct client_object *object)
{
	return client_object_phase(object) == CLIENT_READY &&
	       object->serial != object->client->serial &&
	       object->asked != object->client->serial;
}

/* Objects that transfers need; rooms do not wait for them. */
static void redo_more(struct kvd_client *client)
{
	static const enum client_kind kinds[] = {CLIENT_ATTACH, CLIENT_DLIST};
	struct client_object *object;
	int r;

	if (client->again.redo_ns && clock_ns() < client->again.redo_ns)
		return;
	client->again.redo_ns = 0;
	for (size_t i = 0; i < ARRAY_LEN(kinds); i++)
		list_foreach(object, &client->objects[kinds[i]], link) {
			if (!is_due(object))
				continue;
			if (client->again.open >= WINDOW)
				return;
			r = object_again(object);
			if (r < 0)
				redo_failed(object);
		}
}

/* The next one of this kind, if the window permits. 1: none is left. */
static int register_kind(struct kvd_client *client, enum client_kind kind)
{
	struct client_object *object;
	int r;

	list_foreach(object, &client->objects[kind], link) {
		if (!is_due(object))
			continue;
		if (client->again.open >= WINDOW)
			return 0;
		r = object_again(object);
		if (r)
			return r;
	}
	return client->again.open ? 0 : 1;
}

static void register_more(struct kvd_client *client)
{
	int r = register_kind(client, CLIENT_REGION);

	if (r == 1)
		r = register_kind(client, CLIENT_POOL);
	if (r < 0)
		attempt_failed(client);
	if (r != 1)
		return;
	client->again.stage = CLIENT_UP;
	client->again.up_ns = clock_ns();
	client->again.until_ns = 0;
	client->again.why.code = 0;
}

/* ---- connecting ------------------------------------------------------------------ */

void client_session_lost(struct kvd_client *client)
{
	struct client_again *again = &client->again;
	uint64_t now = clock_ns(), pause = RETRY_NS;
	bool was_up = again->stage == CLIENT_UP;

	if (was_up)
		again->why = client->error;
	/* a daemon that accepts and then drops the session is no reason to hurry */
	if (was_up && now - again->up_ns >= RETRY_MAX_NS)
		again->tries = 0;
	for (unsigned int i = 1; i < again->tries && pause < RETRY_MAX_NS; i++)
		pause *= 2;
	if (pause > RETRY_MAX_NS)
		pause = RETRY_MAX_NS;
	/* many engines lose the same daemon at the same time */
	pause += now % (pause / 4);
	again->retry_ns = was_up && !again->tries ? now : now + pause;
	again->tries++;
	client_ring_lost(client);
	client_attends_lost(client);
	again->stage = CLIENT_DOWN;
	again->failed = false;
	again->open = 0;
	again->redo_ns = 0;
	again->until_ns = 0;
}

void client_session_step(struct kvd_client *client)
{
	struct client_again *again = &client->again;

	if (again->stage == CLIENT_REGISTERING && !again->failed)
		register_more(client);
	if (again->failed) {
		client_conn_lost(client, false, again->why.message);
		client->error = again->why;
	}
	if (again->stage == CLIENT_UP)
		redo_more(client);
	if (again->stage == CLIENT_DOWN && !again->manual &&
	    clock_ns() >= again->retry_ns)
		session_begin(client);
}

bool client_session_due(const struct kvd_client *client, uint64_t *due_p)
{
	const struct client_again *again = &client->again;

	*due_p = again->stage == CLIENT_UP ? again->redo_ns : again->retry_ns;
	return again->stage == CLIENT_UP ? again->redo_ns != 0
					 : again->stage == CLIENT_DOWN && !again->manual;
}

/* One attempt, or the one in progress, to its end. */
static int session_wait(struct kvd_client *client, uint64_t until)
{
	const struct timespec pause = {.tv_nsec = 1000000};
	struct client_again *again = &client->again;
	uint64_t now;
	int r, first, left;

	while (again->stage != CLIENT_UP) {
		now = clock_ns();
		if (now >= until)
			return client_fail(
				client, KVD_E_NOREPLY,
				"%s: the daemon did not accept this session in time",
				client->path);
		if (again->stage == CLIENT_DOWN) {
			r = session_begin(client);
			if (r == -KVD_E_NOREPLY)
				nanosleep(&pause, NULL);
			else if (r)
				return r;
			continue;
		}
		left = until - now > UINT64_C(3600000000000)
			       ? 3600000
			       : (int)((until - now) / 1000000u) + 1;
		first = kvd_timeout_ms(client);
		client_conn_turn(client, first >= 0 && first < left ? first : left);
		if (again->stage == CLIENT_DOWN) {
			client->error = again->why;
			return -again->why.code;
		}
	}
	return 0;
}

int client_session_open(struct kvd_client *client, int timeout_ms)
{
	struct kvd_error error;
	uint64_t until = clock_ns() + (uint64_t)timeout_ms * 1000000u;
	int r;

	if (client->conn.fd >= 0)
		client_conn_lost(client, false,
				 "a new session was requested by kvd_reconnect()");
	client->again.until_ns = until;
	r = session_wait(client, until);
	if (r && client->conn.fd >= 0) {
		error = client->error;
		client_conn_lost(client, false, error.message);
		client->error = error;
	}
	return r;
}

int kvd_reconnect(struct kvd_client *client, int timeout_ms)
{
	int r = client_enter(client, true);

	if (r)
		return r;
	return client_session_open(client,
				   timeout_ms > 0 ? timeout_ms : client->timeout_ms);
}

bool kvd_lost(const struct kvd_client *client)
{
	return client->again.stage != CLIENT_UP;
}

int client_session_check(struct kvd_client *client)
{
	const struct kvd_error *why = &client->again.why;

	if (!kvd_lost(client) && client->conn.fd >= 0)
		return 0;
	return client_fail(client, KVD_E_LOST, "no connection to %s%s%.200s",
			   client->path, why->code ? ": " : "",
			   why->code ? why->message : "");
}

int client_session_need(struct kvd_client *client)
{
	/* without a session only libkvd's own requests are pending: no callback runs
	 * in this turn */
	if (kvd_lost(client) && !client->in_callback && list_empty(&client->conn.ready))
		client_conn_turn(client, 0);
	return client_session_check(client);
}

int client_begin(struct kvd_client *client, const struct kvd_call *call)
{
	struct pollfd socket = {.fd = client->conn.fd, .events = POLLRDHUP};
	int r = client_enter(client, client_blocks(call));
	struct kvd_error why;

	if (r)
		return r;
	if (!client_blocks(call) || client->again.manual)
		return client_session_need(client);
	/* has it ended since the last check? Only the socket shows it */
	if (socket.fd >= 0 && poll(&socket, 1, 0) > 0 && socket.revents)
		client_conn_turn(client, 0);
	if (!kvd_lost(client))
		return 0;
	r = session_wait(client, client_until_ns(client, call ? call->timeout_ms : 0));
	if (!r)
		return 0;
	why = client->error;
	return client_fail(client, KVD_E_LOST, "no connection: %.290s", why.message);
}
