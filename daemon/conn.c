/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which line did a descriptor come with? On a stream socket the kernel hands
 * descriptors over with the first bytes of the sendmsg() that carried them, but
 * one recvmsg() may also return bytes of earlier messages before those. So lines
 * are looked at first (MSG_PEEK, without room for descriptors) and then received
 * one by one, never across a newline: what arrives with the bytes of a line
 * belongs to that line.
 *
 * Life: OPEN, CLOSING (nothing is read any more, what is queued is flushed, for
 * a bounded time), DEAD (the socket is closed; the object goes when no helper
 * uses its line buffer). A fault found while a command answers dooms the
 * connection but is carried out after the current callback: no command finds
 * its session ended in the middle of its work.
 *
 * Bounds: a line, the replies that wait, the requests that are open and the
 * bytes of their lines, the descriptors of a line; the lines and bytes of one
 * turn, so that a client that sends ten thousand commands at once is served in
 * turn with all others; and time: a line half sent, a hello not said and last
 * words not read end the connection.
 */
#include "daemon/conn.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/commands.h"
#include "daemon/config.h"
#include "daemon/control.h"
#include "daemon/kvd.h"
#include "daemon/loop.h"
#include "daemon/session.h"
#include "proto/json.h"

#define TURN_LINES 64u
#define TURN_BYTES (256u << 10)
#define REQUESTS_OPEN_MAX 1024u
#define LINE_KEEP_BYTES (16u << 10) /* an idle connection keeps no more */
#define LAST_WORDS_NS LOOP_NS_PER_S
#define CLIENT_LEFT "the client closed the connection"
#define SCM_FDS_MAX 253u /* the kernel's own limit for one message */

enum conn_state { CONN_OPEN, CONN_CLOSING, CONN_DEAD };
enum patience { PATIENCE_NONE, PATIENCE_HELLO, PATIENCE_LINE, PATIENCE_CLOSING };

struct out { /* a reply, or the rest of one, that waits for the client */
	struct list link;
	size_t len, sent;
	int fds[REQUEST_FDS_MAX];
	unsigned int fd_count;
	char text[];
};

struct conn {
	struct list link;
	struct conn_host *host;	 /* NULL after conns_free() */
	struct session *session; /* NULL once it has ended */
	enum conn_state state;
	struct err doom; /* code != OK: to be closed after this callback */
	struct loop_fd watch;
	struct loop_defer after; /* carry out the doom, re-arm, or free */
	struct loop_timer timer;
	enum patience patience; /* what the timer runs for */

	char *line;
	size_t line_len, line_cap;
	int fds[REQUEST_FDS_MAX]; /* that came with the line so far */
	unsigned int fd_count;
	struct err fds_fault; /* surplus, or lost for want of descriptors */

	struct offload_job parse;
	struct request *parsing; /* its line is with a helper */

	struct list out;
	size_t out_bytes;
};

static void conn_doom(struct conn *conn, enum err_code code, const char *text);

/* ---- end of life ---- */

static void out_free(struct out *out)
{
	list_remove(&out->link);
	for (unsigned int i = 0; i < out->fd_count; i++)
		mem_closep(&out->fds[i]);
	mem_free(out);
}

static void line_reset(struct conn *conn)
{
	for (unsigned int i = 0; i < conn->fd_count; i++)
		mem_closep(&conn->fds[i]);
	conn->fd_count = 0;
	conn->fds_fault.code = ERR_OK;
	conn->line_len = 0;
	if (conn->line_cap > LINE_KEEP_BYTES) {
		mem_free(mem_steal(conn->line));
		conn->line_cap = 0;
	}
}

static void conn_free(struct conn *conn)
{
	loop_defer_cancel(&conn->after);
	list_remove(&conn->link);
	mem_free(conn->line);
	mem_free(conn);
}

static void conn_dead(struct conn *conn)
{
	struct out *out;

	if (conn->state == CONN_DEAD)
		return;
	assert(!conn->session);
	conn->state = CONN_DEAD;
	loop_timer_stop(&conn->timer);
	loop_fd_stop(&conn->watch);
	mem_closep(&conn->watch.fd);
	list_foreach_safe (out, &conn->out, link)
		out_free(out);
	if (!conn->parsing)
		line_reset(conn);
	loop_defer(conn->timer.loop, &conn->after);
}

/* The session goes first; it must not try to hang up on us. */
static void session_leave(struct conn *conn, const char *why)
{
	struct session *session = mem_steal(conn->session);

	if (!session)
		return;
	session->conn = NULL;
	session_end(session, why);
}

static void patience_set(struct conn *conn, enum patience patience, uint64_t ns)
{
	if (conn->patience == patience)
		return;
	conn->patience = patience;
	loop_timer_stop(&conn->timer);
	if (patience == PATIENCE_NONE || loop_timer_start(&conn->timer, ns) == 0)
		return;
	if (conn->state == CONN_CLOSING)
		conn_dead(conn); /* without a timer there is no waiting */
	else
		conn_doom(conn, ERR_NOMEM, "no memory for a timer");
}

/* ---- what the loop shall watch ---- */

static bool may_read(const struct conn *conn)
{
	const struct session *session = conn->session;

	return conn->state == CONN_OPEN && !conn->parsing && conn->doom.code == ERR_OK &&
	       session->requests_open < REQUESTS_OPEN_MAX &&
	       session->requests_bytes < 2 * session->kvd->config->line_bytes;
}

static void conn_arm(struct conn *conn)
{
	int events = 0;

	if (conn->state == CONN_DEAD)
		return;
	if (may_read(conn))
		events |= LOOP_READ;
	if (!list_empty(&conn->out))
		events |= LOOP_WRITE;
	if (conn->state == CONN_CLOSING && !events) {
		conn_dead(conn);
		return;
	}
	if (loop_fd_set(&conn->watch, events) < 0 && conn->doom.code == ERR_OK)
		conn_doom(conn, ERR_NOMEM, "no memory for a watch");
	if (conn->state == CONN_CLOSING)
		return;
	if (!conn->session->greeted)
		patience_set(conn, PATIENCE_HELLO, conn->host->patience_ns);
	else if (conn->line_len && !conn->parsing)
		patience_set(conn, PATIENCE_LINE, conn->host->patience_ns);
	else
		patience_set(conn, PATIENCE_NONE, 0);
}

/* ---- sending ---- */

/* Bytes sent, 0 when the socket is full, negative errno. */
static ssize_t send_some(int fd, const char *text, size_t len, const int *fds,
			 unsigned int fd_count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * REQUEST_FDS_MAX)];
	} control = {.bytes = {0}};
	struct iovec iov = {.iov_base = (void *)(uintptr_t)text, .iov_len = len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	ssize_t n;

	if (fd_count) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(sizeof(int) * fd_count);
		CMSG_FIRSTHDR(&msg)->cmsg_level = SOL_SOCKET;
		CMSG_FIRSTHDR(&msg)->cmsg_type = SCM_RIGHTS;
		CMSG_FIRSTHDR(&msg)->cmsg_len = CMSG_LEN(sizeof(int) * fd_count);
		memcpy(CMSG_DATA(CMSG_FIRSTHDR(&msg)), fds, sizeof(int) * fd_count);
	}
	do
		n = sendmsg(fd, &msg, MSG_DONTWAIT | MSG_NOSIGNAL);
	while (n < 0 && errno == EINTR);
	if (n < 0)
		return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -errno;
	return n;
}

static struct out *out_new(const char *text, size_t len, const int *fds,
			   unsigned int fd_count)
{
	struct out *out = mem_zalloc(sizeof(*out) + len);

	if (!out)
		return NULL;
	list_init(&out->link);
	memcpy(out->text, text, len);
	out->len = len;
	for (unsigned int i = 0; i < fd_count; i++) {
		out->fds[i] = fcntl(fds[i], F_DUPFD_CLOEXEC, 3);
		if (out->fds[i] < 0) {
			err_raise_errno(errno, "duplicating a reply's descriptor");
			out_free(out);
			return NULL;
		}
		out->fd_count++;
	}
	return out;
}

static void conn_queue(struct conn *conn, const char *text, size_t len, const int *fds,
		       unsigned int fd_count)
{
	uint64_t cap = conn->host->kvd->config->client_queue_bytes;
	struct out *out;

	if (conn->out_bytes + len > cap) {
		conn_doom(conn, ERR_LIMIT,
			  "the client does not read its replies (client_queue)");
		return;
	}
	out = out_new(text, len, fds, fd_count);
	if (!out) {
		conn_doom(conn, err_last()->code, "a reply could not be queued");
		return;
	}
	list_push_back(&conn->out, &out->link);
	conn->out_bytes += len;
	conn_arm(conn);
}

void conn_send(struct conn *conn, const char *text, size_t len, const int *fds,
	       unsigned int fd_count)
{
	ssize_t n = 0;

	if (conn->state == CONN_DEAD || conn->doom.code != ERR_OK)
		return;
	metrics_add(&conn->host->kvd->metrics, METRIC_CONTROL_OUT_BYTES, len);
	if (list_empty(&conn->out))
		n = send_some(conn->watch.fd, text, len, fds, fd_count);
	if (n < 0)
		conn_doom(conn, ERR_IO, CLIENT_LEFT);
	else if (n == 0)
		conn_queue(conn, text, len, fds, fd_count);
	else if ((size_t)n < len) /* the descriptors went with the first byte */
		conn_queue(conn, text + n, len - (size_t)n, NULL, 0);
	/* an answered request may make room for the next line */
	loop_defer(conn->timer.loop, &conn->after);
}

static void conn_flush(struct conn *conn)
{
	struct out *out;

	list_foreach_safe (out, &conn->out, link) {
		ssize_t n = send_some(conn->watch.fd, out->text + out->sent,
				      out->len - out->sent, out->fds,
				      out->sent ? 0 : out->fd_count);

		if (n < 0)
			conn_doom(conn, ERR_IO, CLIENT_LEFT);
		if (n <= 0)
			return;
		out->sent += (size_t)n;
		conn->out_bytes -= (size_t)n;
		if (out->sent < out->len)
			return;
		out_free(out);
	}
}

/* ---- closing with a reason ---- */

/* The first reason is the one that counts. */
static void conn_doom(struct conn *conn, enum err_code code, const char *text)
{
	if (conn->state == CONN_DEAD || conn->doom.code != ERR_OK)
		return;
	err_set(&conn->doom, code, "%s", text);
	loop_defer(conn->timer.loop, &conn->after);
}

void conn_hangup(struct conn *conn, const struct err *why)
{
	char text[REPLY_ERROR_MAX];
	size_t len;

	conn->session = NULL;
	if (conn->state != CONN_OPEN)
		return;
	conn->state = CONN_CLOSING;
	if (!conn->parsing)
		line_reset(conn);
	len = reply_error_text(NULL, why, text);
	/* behind what is queued, and over the cap: it is the last line */
	if (list_empty(&conn->out) &&
	    send_some(conn->watch.fd, text, len, NULL, 0) == (ssize_t)len) {
		conn_dead(conn);
		return;
	}
	struct out *out = out_new(text, len, NULL, 0);

	if (out) {
		list_push_back(&conn->out, &out->link);
		conn->out_bytes += len;
	}
	patience_set(conn, PATIENCE_CLOSING,
		     conn->host->patience_ns < LAST_WORDS_NS ? conn->host->patience_ns
							     : LAST_WORDS_NS);
	conn_arm(conn);
}

/* The daemon ends the connection. */
static void conn_kill(struct conn *conn, const struct err *why)
{
	struct session *session = conn->session;

	if (why->code == ERR_IO) { /* the client was first; nobody is to be told */
		session_leave(conn, why->text);
		conn_dead(conn);
		return;
	}
	if (session) {
		metrics_add(&conn->host->kvd->metrics, METRIC_SESSIONS_KILLED, 1);
		log_warn("control", session->client, "connection closed",
			 "session=%ju pid=%d why=\"%s\"", (uintmax_t)session->id,
			 (int)session->pid, why->text);
	}
	session_leave(conn, why->text);
	conn_hangup(conn, why);
}

/* The client has ended it, perhaps one direction only: it may still read. */
static void conn_eof(struct conn *conn)
{
	session_leave(conn, CLIENT_LEFT);
	conn->state = CONN_CLOSING;
	line_reset(conn);
	patience_set(conn, PATIENCE_CLOSING, LAST_WORDS_NS);
	conn_arm(conn);
}

static void on_after(struct loop_defer *defer)
{
	struct conn *conn = container_of(defer, struct conn, after);
	struct err doom;

	if (conn->state == CONN_DEAD) {
		if (!conn->parsing)
			conn_free(conn);
		return;
	}
	if (conn->doom.code != ERR_OK) {
		doom = conn->doom;
		conn->doom.code = ERR_OK;
		if (conn->state == CONN_OPEN)
			conn_kill(conn, &doom);
		else
			conn_dead(conn);
		return;
	}
	conn_arm(conn);
}

static void on_patience(struct loop_timer *timer)
{
	struct conn *conn = container_of(timer, struct conn, timer);
	struct err why;

	if (conn->state == CONN_CLOSING) {
		conn_dead(conn);
		return;
	}
	err_set(&why, ERR_TIMEOUT, "%s within %ju ms",
		conn->patience == PATIENCE_HELLO ? "no hello" : "a line was not finished",
		(uintmax_t)(conn->host->patience_ns / LOOP_NS_PER_MS));
	conn_kill(conn, &why);
}

/* ---- lines ---- */

static void line_parse(struct request *req, const char *text)
{
	struct err err;

	if (json_parse(text, req->bytes, JSON_DEPTH_MAX, &req->args) == 0)
		return;
	err_take(&err);
	err.scope = ERR_SCOPE_OP; /* the connection lives on */
	(void)err_reraise(&err);
}

static void line_dispatch(struct conn *conn, struct request *req, const struct err *fault)
{
	struct err surplus = conn->fds_fault;

	line_reset(conn);
	if (surplus.code != ERR_OK)
		fault = &surplus;
	if (fault)
		request_fail(req, fault);
	else
		commands_dispatch(req);
}

static void parse_work(struct offload_job *job)
{
	struct conn *conn = container_of(job, struct conn, parse);

	line_parse(conn->parsing, conn->line);
	if (!conn->parsing->args)
		job->result = err_pass(-EPROTO);
}

static void parse_done(struct offload_job *job)
{
	struct conn *conn = container_of(job, struct conn, parse);
	struct request *req = mem_steal(conn->parsing);

	if (conn->state == CONN_OPEN) {
		line_dispatch(conn, req, job->result < 0 ? &job->err : NULL);
		if (conn->state != CONN_DEAD)
			loop_defer(conn->timer.loop, &conn->after);
		return;
	}
	request_drop(req);
	line_reset(conn);
	if (!conn->host)
		conn_free(conn);
	else
		loop_defer(conn->timer.loop, &conn->after);
}

static void line_refuse(struct conn *conn)
{
	char text[REPLY_ERROR_MAX];
	size_t len = reply_error_text(NULL, err_last(), text);

	line_reset(conn);
	conn_send(conn, text, len, NULL, 0);
}

/* A whole line lies in the buffer, without its newline. */
static void conn_line(struct conn *conn)
{
	struct request *req =
		request_new(conn->session, conn->line_len, conn->fds, conn->fd_count);

	if (!req) {
		line_refuse(conn);
		return;
	}
	conn->fd_count = 0;
	if (conn->line_len > CONTROL_INLINE_BYTES) {
		conn->parsing = req;
		conn->parse =
			(struct offload_job){.work = parse_work, .done = parse_done};
		offload_submit(req->kvd->offload, &conn->parse);
		return;
	}
	line_parse(req, conn->line);
	line_dispatch(conn, req, req->args ? NULL : err_last());
}

/* ---- receiving ---- */

static void fds_keep(struct conn *conn, const struct cmsghdr *c)
{
	size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);

	for (size_t i = 0; i < count; i++) {
		int fd;

		memcpy(&fd, CMSG_DATA(c) + i * sizeof(fd), sizeof(fd));
		if (conn->fd_count < REQUEST_FDS_MAX) {
			conn->fds[conn->fd_count++] = fd;
			continue;
		}
		close(fd);
		err_set(&conn->fds_fault, ERR_LIMIT,
			"more than %u descriptors with one line", REQUEST_FDS_MAX);
	}
}

/* Up to `want` bytes into the line buffer, which has the room. */
static ssize_t receive_some(struct conn *conn, size_t want)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(sizeof(int) * SCM_FDS_MAX)];
	} control;
	struct iovec iov = {.iov_base = conn->line + conn->line_len, .iov_len = want};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = control.bytes,
			     .msg_controllen = sizeof(control.bytes)};
	ssize_t n;

	do
		n = recvmsg(conn->watch.fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	if (n <= 0)
		return -1;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
			fds_keep(conn, c);
	}
	if (msg.msg_flags & MSG_CTRUNC) /* the buffer holds all: we ran out of them */
		err_set(&conn->fds_fault, ERR_LIMIT,
			"descriptors of this line were lost: kvd has no more");
	return n;
}

static int line_reserve(struct conn *conn, size_t want)
{
	uint64_t cap = conn->session->kvd->config->line_bytes;
	size_t need = conn->line_len + want, size = conn->line_cap ? conn->line_cap : 512;
	char *line;

	if (need > cap + 1) /* one for the newline */
		return err_raise(ERR_TOOBIG, "a line over %ju bytes", (uintmax_t)cap);
	if (need <= conn->line_cap)
		return 0;
	while (size < need)
		size *= 2;
	line = mem_regrow(conn->line, size, 1);
	if (!line)
		return err_pass(-ENOMEM);
	conn->line = line;
	conn->line_cap = size;
	return 0;
}

/* Receive exactly `want` bytes that were seen to be there. False: it ended. */
static bool line_take(struct conn *conn, size_t want)
{
	struct err why;

	if (line_reserve(conn, want) < 0) {
		err_take(&why);
		conn_kill(conn, &why);
		return false;
	}
	metrics_add(&conn->host->kvd->metrics, METRIC_CONTROL_IN_BYTES, want);
	while (want) {
		ssize_t n = receive_some(conn, want);

		if (n < 0) {
			conn_eof(conn);
			return false;
		}
		conn->line_len += (size_t)n;
		want -= (size_t)n;
	}
	return true;
}

/* Go through `len` bytes seen in the peek buffer. Lines done. */
static unsigned int conn_consume(struct conn *conn, size_t len)
{
	const uint8_t *seen = conn->host->peek;
	unsigned int lines = 0;

	for (size_t pos = 0, want; pos < len && may_read(conn); pos += want) {
		const uint8_t *end = memchr(seen + pos, '\n', len - pos);

		want = end ? (size_t)(end - (seen + pos)) + 1 : len - pos;
		if (!line_take(conn, want))
			break;
		if (!end)
			continue;
		conn->line_len--;
		conn_line(conn);
		if (++lines == TURN_LINES)
			break;
	}
	return lines;
}

static void conn_read(struct conn *conn)
{
	unsigned int lines = 0;
	size_t bytes = 0;

	while (may_read(conn) && lines < TURN_LINES && bytes < TURN_BYTES) {
		ssize_t n = recv(conn->watch.fd, conn->host->peek, CONN_PEEK_BYTES,
				 MSG_PEEK | MSG_DONTWAIT);

		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
			break;
		if (n <= 0) {
			conn_eof(conn);
			return;
		}
		lines += conn_consume(conn, (size_t)n);
		bytes += (size_t)n;
	}
}

static void on_ready(struct loop_fd *watch, int events)
{
	struct conn *conn = container_of(watch, struct conn, watch);

	if (events & LOOP_WRITE)
		conn_flush(conn);
	if (events & LOOP_READ)
		conn_read(conn);
	if (conn->state != CONN_DEAD)
		conn_arm(conn);
}

/* ---- making and ending all ---- */

int conn_new(struct conn_host *host, int fd, const struct session_peer *peer)
{
	struct conn *conn = mem_zalloc(sizeof(*conn));
	int r;

	if (!conn)
		return err_pass(-ENOMEM);
	conn->host = host;
	list_init(&conn->out);
	loop_fd_init(&conn->watch, host->kvd->loop, fd, on_ready);
	loop_timer_init(&conn->timer, host->kvd->loop, on_patience);
	loop_defer_init(&conn->after, on_after);
	r = session_new(host->kvd, peer, conn, &conn->session);
	if (r < 0) {
		mem_free(conn);
		return err_pass(r);
	}
	list_push_back(&host->conns, &conn->link);
	conn_arm(conn);
	return 0;
}

void conns_free(struct conn_host *host)
{
	struct conn *conn;

	list_foreach_safe (conn, &host->conns, link) {
		session_leave(conn, "the daemon shuts down");
		conn_dead(conn);
		conn->host = NULL;
		if (!conn->parsing) {
			conn_free(conn);
			continue;
		}
		list_remove(&conn->link); /* parse_done() frees it */
		loop_defer_cancel(&conn->after);
	}
}
