/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The connection: one non-blocking stream socket, a queue of unsent frames, and a list of
 * requests without a reply. Every command is a request with an id (client_call.c).
 *
 * A turn is send, receive, expire, in that order. Callbacks of ended requests run in it,
 * and it never blocks for longer than the given time. A deadline ends the caller's wait,
 * not the request: the daemon may complete the work later, which must then be undone. So
 * an expired request stays in the list without its caller, marked late, and its `finish`
 * runs a second time when the reply is received. A lost connection ends all requests at
 * once.
 *
 * Limits: requests by max_pending, unsent bytes by max_queued_bytes, a line by the
 * daemon's 1 MiB, a reply by 8 MiB, fds of one message by 16. Replies are a stream, cut
 * at newlines; fds arrive with the message of their bytes, and only `hello` uses any:
 * others are closed at once, so that the fd table cannot be filled.
 *
 * The sender's pid is from SCM_CREDENTIALS, which the kernel fills in for the writing
 * process, in this PID namespace. SO_PEERCRED would name the process that called
 * listen(): systemd, under socket activation.
 */
#include "daemon/base/clock.h"
#include "lib/client.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define READ_CHUNK 65536u
#define READS_A_TURN 16u

void client_conn_init(struct client_conn *conn)
{
	conn->fd = -1;
	conn->sender_pidfd = -1;
	list_init(&conn->frames);
	list_init(&conn->requests);
	list_init(&conn->ready);
}

void client_frame_free(struct client_conn *conn, struct client_frame *frame)
{
	list_remove(&frame->link);
	conn->queued_bytes -= frame->len - frame->sent;
	for (unsigned int i = 0; i < frame->fd_count; i++)
		mem_closep(&frame->fds[i]);
	mem_free(frame->data);
	mem_free(frame);
}

static void client_conn_request_free(struct client_request *req)
{
	list_remove(&req->link);
	if (req->object)
		client_object_unref(req->object);
	mem_free(req);
}

static void conn_drop_input(struct client_conn *conn)
{
	struct client_frame *frame;

	list_foreach_safe(frame, &conn->frames, link)
		client_frame_free(conn, frame);
	for (unsigned int i = 0; i < conn->in_fd_count; i++)
		mem_closep(&conn->in_fds[i]);
	conn->in_fd_count = 0;
	conn->in_len = 0;
	conn->in_scanned = 0;
	mem_closep(&conn->fd);
	mem_closep(&conn->sender_pidfd);
}

void client_conn_fini(struct kvd_client *client)
{
	struct client_conn *conn = &client->conn;
	struct client_request *req;

	conn_drop_input(conn);
	list_foreach_safe(req, &conn->requests, link)
		client_conn_request_free(req);
	list_foreach_safe(req, &conn->ready, link)
		client_conn_request_free(req);
	mem_free(conn->in);
	conn->in = NULL;
	conn->in_cap = 0;
	conn->pending = 0;
}

/* Complete the request: waiter or callback. The error record is the client's. */
static void request_tell(struct client_request *req, int result, const char *line,
			 size_t len)
{
	struct kvd_client *client = req->client;
	struct client_waiter *waiter = req->waiter;
	struct kvd_error error = client->error;
	struct kvd_reply reply = {.json = line, .error = result ? &error : NULL};

	req->waiter = NULL;
	if (waiter) {
		waiter->done = true;
		waiter->result = result;
		waiter->error = error;
		if (waiter->want_json && line)
			waiter->json = mem_dup(line, len + 1);
	}
	if (req->on_done) {
		client->in_callback = true;
		req->on_done(req->arg, result, &reply);
		client->in_callback = false;
		req->on_done = NULL;
	}
}

static void request_end(struct client_request *req, int result, const cJSON *json,
			const char *line, size_t len)
{
	struct kvd_error error;
	int r = result;

	list_remove(&req->link);
	req->client->conn.pending--;
	if (list_empty(&req->client->conn.requests))
		req->client->conn.next_deadline_ns = 0;
	if (req->finish) {
		error = req->client->error;
		r = req->finish(req, result, json);
		if (result)
			req->client->error = error;
	}
	if (req->take && !result && !req->late)
		r = req->take(req, json);
	if (!req->late)
		request_tell(req, r, line, len);
	client_conn_request_free(req);
}

static void request_expire(struct client_request *req)
{
	char silence[CLIENT_SILENCE_MAX];
	bool silent = client_map_silence(req->client->map, silence);
	int r = client_fail(req->client, KVD_E_NOREPLY,
			    "no reply from the daemon in time%s%s", silent ? ": " : "",
			    silence);

	req->deadline_ns = 0;
	if (req->finish)
		req->finish(req, r, NULL);
	request_tell(req, r, NULL, 0);
	req->late = true;
	req->out = NULL;
}

void client_conn_lost(struct kvd_client *client, bool by_daemon, const char *why)
{
	struct client_conn *conn = &client->conn;
	struct client_request *req;
	struct list ending = LIST_INIT(ending);

	conn_drop_input(conn);
	if (client->map) {
		if (by_daemon)
			atomic_store(&client->map->ended, true);
		atomic_store(&client->map->suspect, true);
	}
	/* requests that callbacks submit from here on fail at once: the list is finite */
	while ((req = list_first(&conn->requests, struct client_request, link))) {
		list_remove(&req->link);
		list_push_back(&ending, &req->link);
	}
	while ((req = list_first(&ending, struct client_request, link)))
		request_end(req,
			    client_fail(client, KVD_E_LOST,
					"the connection to %s ended: %s", client->path,
					why),
			    NULL, NULL, 0);
	client_fail(client, KVD_E_LOST, "the connection to %s ended: %s", client->path,
		    why);
	client_session_lost(client);
}

/* ---- sending ------------------------------------------------------------- */

static ssize_t frame_write(int fd, const struct client_frame *frame)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * CLIENT_FDS_MAX)];
	} control;
	struct iovec iov = {.iov_base = frame->data + frame->sent,
			    .iov_len = frame->len - frame->sent};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *c;

	if (!frame->sent && frame->fd_count) {
		memset(&control, 0, sizeof(control));
		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * frame->fd_count);
		c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(sizeof(int) * frame->fd_count);
		memcpy(CMSG_DATA(c), frame->fds, sizeof(int) * frame->fd_count);
	}
	return sendmsg(fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
}

bool client_conn_flush(struct client_conn *conn)
{
	struct client_frame *frame;
	ssize_t n;

	while ((frame = list_first(&conn->frames, struct client_frame, link))) {
		n = frame_write(conn->fd, frame);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return errno == EAGAIN || errno == ENOBUFS ||
			       errno == ETOOMANYREFS;
		frame->sent += (size_t)n;
		conn->queued_bytes -= (size_t)n;
		if (frame->sent < frame->len)
			return true;
		client_frame_free(conn, frame);
	}
	return true;
}

/* ---- receiving ----------------------------------------------------------- */

static void conn_take_pidfd(struct client_conn *conn, const struct cmsghdr *c)
{
	int fd;

	memcpy(&fd, CMSG_DATA(c), sizeof(fd));
	mem_closep(&conn->sender_pidfd);
	conn->sender_pidfd = fd < 0 ? -1 : fd;
}

static void conn_take_control(struct client_conn *conn, struct msghdr *msg)
{
	struct cmsghdr *c;
	struct ucred cred;
	int fds[CLIENT_FDS_MAX];
	size_t count;

	for (c = CMSG_FIRSTHDR(msg); c; c = CMSG_NXTHDR(msg, c)) {
		if (c->cmsg_level != SOL_SOCKET)
			continue;
		if (c->cmsg_type == SCM_CREDENTIALS) {
			memcpy(&cred, CMSG_DATA(c), sizeof(cred));
			conn->sender = cred.pid;
		} else if (c->cmsg_type == CLIENT_SCM_PIDFD) {
			conn_take_pidfd(conn, c);
		} else if (c->cmsg_type == SCM_RIGHTS) {
			count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
			if (count > CLIENT_FDS_MAX)
				count = CLIENT_FDS_MAX; /* the buffer is full */
			memcpy(fds, CMSG_DATA(c), count * sizeof(int));
			for (size_t i = 0; i < count; i++)
				if (conn->in_fd_count < CLIENT_FDS_MAX)
					conn->in_fds[conn->in_fd_count++] = fds[i];
				else
					mem_closep(&fds[i]);
		}
	}
}

/* Bytes read; 0: none now; -1: ended, with errno (0: EOF). */
static ssize_t client_conn_read(struct client_conn *conn)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * CLIENT_FDS_MAX) +
			   CMSG_SPACE(sizeof(struct ucred)) + CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov;
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t n;

	if (conn->in_cap - conn->in_len < READ_CHUNK) {
		size_t cap = conn->in_cap ? conn->in_cap * 2 : 2 * READ_CHUNK;
		char *in = mem_regrow(conn->in, cap, 1);

		if (!in) {
			errno = ENOMEM;
			return -1;
		}
		conn->in = in;
		conn->in_cap = cap;
	}
	/* one byte stays free: lines are ended with a NUL */
	iov.iov_base = conn->in + conn->in_len;
	iov.iov_len = conn->in_cap - conn->in_len - 1;
	msg.msg_control = control.bytes;
	msg.msg_controllen = sizeof(control.bytes);
	do
		n = recvmsg(conn->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == EAGAIN ? 0 : -1;
	if (!n) {
		errno = 0;
		return -1;
	}
	conn_take_control(conn, &msg);
	conn->in_len += (size_t)n;
	return n;
}

/* Unanswered, by id; or NULL. */
static struct client_request *request_find(struct client_conn *conn, uint64_t id)
{
	struct client_request *req;

	list_foreach(req, &conn->requests, link)
		if (req->id == id)
			return req;
	return NULL;
}

/* The request of a success that nobody but its caller reads, as text: to parse a list of
 * thousands of rooms takes longer than the daemon's answer. NULL: parse it. */
static struct client_request *request_of_text(struct client_conn *conn, const char *line,
					      size_t len)
{
	static const char begin[] = "{\"id\":", ok[] = ",\"ok\":true";
	struct client_request *req;
	char *end;

	if (strncmp(line, begin, sizeof(begin) - 1) != 0)
		return NULL;
	req = request_find(conn, strtoull(line + sizeof(begin) - 1, &end, 10));
	if (!req || req->finish || req->take || strncmp(end, ok, sizeof(ok) - 1) != 0 ||
	    (end[sizeof(ok) - 1] != ',' && end[sizeof(ok) - 1] != '}') ||
	    line[len - 1] != '}')
		return NULL;
	return req;
}

/* One reply. false: it breaks the protocol. */
static bool client_conn_line(struct kvd_client *client, char *line, size_t len)
{
	struct client_request *req = request_of_text(&client->conn, line, len);
	cJSON *json;
	uint64_t id;
	int r = 0;

	if (req) {
		request_end(req, 0, NULL, line, len);
		return true;
	}
	json = cJSON_ParseWithLength(line, len);
	if (cJSON_IsObject(json) && client_get_u64(json, "id", &id))
		req = request_find(&client->conn, id);
	if (!req) {
		/* an error without an id is the daemon's reason for closing */
		if (cJSON_GetObjectItemCaseSensitive(json, "error"))
			client_error_parse(&client->error, json);
		cJSON_Delete(json);
		return false;
	}
	if (!cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(json, "ok"))) {
		client_error_parse(&client->error, json);
		r = -client->error.code;
	}
	request_end(req, r, json, line, len);
	cJSON_Delete(json);
	return true;
}

/* Cut the input at newlines. Returns the number of ended requests; -1: protocol error. */
static int conn_lines(struct kvd_client *client)
{
	struct client_conn *conn = &client->conn;
	size_t at = 0, end = conn->in_scanned;
	int count = 0;
	char *nl;

	while (conn->fd >= 0 && (nl = memchr(conn->in + end, '\n', conn->in_len - end))) {
		*nl = '\0';
		end = (size_t)(nl - conn->in);
		if (!client_conn_line(client, conn->in + at, end - at))
			return -1;
		count++;
		at = ++end;
	}
	if (conn->fd < 0) /* a callback detected the loss of the connection */
		return count;
	memmove(conn->in, conn->in + at, conn->in_len - at);
	conn->in_len -= at;
	conn->in_scanned = conn->in_len;
	if (conn->in_len > CLIENT_REPLY_MAX) {
		client_fail(client, KVD_E_PROTO, "a reply over %u bytes",
			    CLIENT_REPLY_MAX);
		return -1;
	}
	/* hello took its fds while its line was processed */
	for (; conn->in_fd_count; conn->in_fd_count--)
		mem_closep(&conn->in_fds[conn->in_fd_count - 1]);
	return count;
}

/* Read and process the available input. Returns the number of ended requests. */
static int conn_receive(struct kvd_client *client)
{
	struct client_conn *conn = &client->conn;
	char why[sizeof(client->error.message)];
	int count = 0, n;
	ssize_t r = 0;

	for (unsigned int i = 0; i < READS_A_TURN && conn->fd >= 0; i++) {
		client->error.code = 0;
		r = client_conn_read(conn);
		if (r <= 0)
			break;
		n = conn_lines(client);
		if (n < 0) {
			snprintf(why, sizeof(why), "%s",
				 client->error.code ? client->error.message
						    : "a reply without a request");
			client_conn_lost(client, false, why);
			return count;
		}
		count += n;
	}
	if (r < 0)
		client_conn_lost(client, true,
				 errno ? strerror(errno) : "the daemon closed it");
	return count;
}

static struct client_request *request_expired(struct client_conn *conn, uint64_t now)
{
	struct client_request *req;

	list_foreach(req, &conn->requests, link)
		if (req->deadline_ns && now >= req->deadline_ns)
			return req;
	return NULL;
}

static int conn_expire(struct client_conn *conn)
{
	struct client_request *req;
	uint64_t now = clock_ns(), next = 0;
	int count = 0;

	if (!conn->next_deadline_ns || now < conn->next_deadline_ns)
		return 0;
	/* from the front each time: callbacks may change the list */
	for (; (req = request_expired(conn, now)); count++)
		request_expire(req);
	list_foreach(req, &conn->requests, link)
		if (req->deadline_ns && (!next || req->deadline_ns < next))
			next = req->deadline_ns;
	conn->next_deadline_ns = next;
	return count;
}

static int conn_end_ready(struct client_conn *conn)
{
	struct client_request *req;
	struct list ending = LIST_INIT(ending);
	int count = 0;

	while ((req = list_first(&conn->ready, struct client_request, link))) {
		list_remove(&req->link);
		list_push_back(&ending, &req->link);
	}
	while ((req = list_first(&ending, struct client_request, link))) {
		request_end(req, 0, NULL, NULL, 0);
		count++;
	}
	return count;
}

int client_conn_turn(struct kvd_client *client, int timeout_ms)
{
	struct client_conn *conn = &client->conn;
	bool lost = kvd_lost(client);
	int local = conn_end_ready(conn), count = 0;
	struct pollfd p = {.events = POLLIN};

	if (lost)
		client_session_step(client);
	p.fd = conn->fd; /* -1: no fd, only a timeout */
	p.events = kvd_events(client);
	if (conn->fd >= 0 || !client->again.manual)
		poll(&p, 1, local ? 0 : timeout_ms);
	if (conn->fd >= 0) {
		client_conn_flush(conn);
		count = conn_receive(client);
	}
	count += conn_expire(conn);
	client_session_step(client);
	if (lost) /* these were libkvd's own */
		count = 0;
	if (kvd_lost(client) && !local && !count)
		return -KVD_E_LOST;
	return local + count;
}

/* ---- the public part ------------------------------------------------------ */

int kvd_fd(const struct kvd_client *client)
{
	return client->conn.fd;
}

short kvd_events(const struct kvd_client *client)
{
	return list_empty(&client->conn.frames) ? POLLIN : POLLIN | POLLOUT;
}

unsigned int kvd_pending(const struct kvd_client *client)
{
	return client->conn.pending;
}

int kvd_timeout_ms(const struct kvd_client *client)
{
	const struct client_conn *conn = &client->conn;
	uint64_t now, left, due, at = conn->next_deadline_ns;

	if (!list_empty(&conn->ready))
		return 0;
	if (client_session_due(client, &due) && (!at || due < at))
		at = due;
	if (!at)
		return -1;
	now = clock_ns();
	if (now >= at)
		return 0;
	left = (at - now) / 1000000u + 1;
	return left > 3600000 ? 3600000 : (int)left;
}

int kvd_poll(struct kvd_client *client, int timeout_ms)
{
	int r = client_enter(client, true), first;

	if (r)
		return r;
	first = kvd_timeout_ms(client);
	if (first >= 0 && (timeout_ms < 0 || first < timeout_ms))
		timeout_ms = first;
	return client_conn_turn(client, timeout_ms);
}
