/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which line does a descriptor belong to? On a stream socket the kernel delivers
 * descriptors with the first bytes of their sendmsg(), but one recvmsg() may also return
 * bytes of earlier messages before those. So the input is peeked first (MSG_PEEK) and
 * then received line by line, never across a newline. If the peek shows descriptors, a
 * gate receives them in its own process and passes on the lines up to them with the
 * allowed descriptors (daemon/gate/gate.h); other lines are read here.
 *
 * Life: OPEN, CLOSING (input is ignored, queued output is flushed, for a limited time),
 * DEAD (the socket is closed; the object is freed when no helper uses its line buffer). A
 * fault found while a command answers marks the connection for close, which follows after
 * the current callback: no command loses its session while it runs.
 *
 * A client that does not read may be stopped while its rooms still move. While half of
 * its queue limit is in use, no new requests are served; only answers to accepted
 * requests can fill the rest, and beyond the limit the client is disconnected.
 *
 * Limits: a line, the queued replies, the open requests and the bytes of their lines, the
 * descriptors of a line; the lines and the time of one turn, so that a client that sends
 * ten thousand commands at once takes turns with all others; and time: an incomplete
 * line, a missing hello and an unread last line end the connection.
 */
#include "daemon/control/conn.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/sm.h"
#include "daemon/request/commands.h"
#include "daemon/config/config.h"
#include "daemon/control/inbox.h"
#include "daemon/base/context.h"
#include "daemon/gate/gate.h"
#include "daemon/loop/loop.h"
#include "daemon/control/outbox.h"
#include "daemon/request/ring.h"
#include "daemon/session/session.h"
#include "proto/json.h"

#define TURN_LINES 64u
#define TURN_BYTES (256u << 10)
#define SHORT_PEEK_BYTES 4096u
#define REQUESTS_OPEN_MAX 1024u
#define FLUSH_NS LOOP_NS_PER_S
#define CLIENT_LEFT "the client closed the connection"

enum conn_state { CONN_OPEN, CONN_CLOSING, CONN_DEAD };
static const struct sm_state conn_states[] = {
	[CONN_OPEN] = {"open", SM_TO(CONN_CLOSING) | SM_TO(CONN_DEAD)},
	[CONN_CLOSING] = {"closing", SM_TO(CONN_DEAD)},
	[CONN_DEAD] = {"dead", 0},
};
static const struct sm_table conn_table = {
	.name = "conn", .states = conn_states, .count = ARRAY_LEN(conn_states)};
enum timeout { TIMEOUT_NONE, TIMEOUT_HELLO, TIMEOUT_LINE, TIMEOUT_CLOSING };

struct conn {
	struct list link;
	struct conn_host *host;	 /* NULL after conns_free() */
	struct session *session; /* NULL once it has ended */
	struct sm sm;		 /* enum conn_state */
	struct err why_close;	 /* code != OK: to be closed after this callback */
	struct loop_fd watch;
	struct loop_defer after; /* close, send, re-arm, or free */
	struct loop_timer timer;
	enum timeout timeout; /* purpose of the running timer */
	struct gate_client gate;

	struct inbox in;
	struct offload_job parse;
	struct request *parsing; /* a helper has its line */

	struct outbox out;
};

static void conn_mark_for_close(struct conn *conn);
static void conn_read(struct conn *conn);

/* ---- end of life ---- */

static void conn_free(struct conn *conn)
{
	loop_defer_cancel(&conn->after);
	list_remove(&conn->link);
	inbox_fini(&conn->in);
	mem_free(conn);
}

static void conn_dead(struct conn *conn)
{
	if (sm_state(&conn->sm) == CONN_DEAD)
		return;
	assert(!conn->session);
	sm_move(&conn->sm, CONN_DEAD);
	loop_timer_stop(&conn->timer);
	loop_fd_stop(&conn->watch);
	if (outbox_flush(&conn->out) < 0)
		err_clear();
	gate_close(&conn->gate, &conn->watch.fd);
	outbox_fini(&conn->out);
	if (!conn->parsing)
		inbox_reset(&conn->in);
	loop_defer(conn->timer.loop, &conn->after);
}

/* The session ends first; it must not close this connection in turn. */
static void session_leave(struct conn *conn, const char *why)
{
	struct session *session = mem_steal(conn->session);

	if (!session)
		return;
	session->conn = NULL;
	conn->watch.served = NULL;
	session_end(session, why);
}

static void conn_timeout_set(struct conn *conn, enum timeout timeout, uint64_t ns)
{
	if (conn->timeout == timeout)
		return;
	conn->timeout = timeout;
	loop_timer_stop(&conn->timer);
	if (timeout != TIMEOUT_NONE)
		loop_timer_start(&conn->timer, ns);
}

/* ---- events to watch ---- */

static bool may_read(const struct conn *conn)
{
	const struct session *session = conn->session;

	return sm_state(&conn->sm) == CONN_OPEN && !conn->parsing &&
	       !gate_receiving(&conn->gate) && conn->why_close.code == ERR_OK &&
	       !ring_gate_shut(ring_of(session)) && !session->walking &&
	       session->requests_open < REQUESTS_OPEN_MAX &&
	       conn->out.bytes <= session->kvd->config->client_queue_bytes / 2 &&
	       (!conn->out.charge.bytes || !account_is_full(session->account)) &&
	       session->requests_bytes < 2 * SESSION_LINE_MAX;
}

static void conn_arm(struct conn *conn)
{
	int events = 0;

	if (sm_state(&conn->sm) == CONN_DEAD)
		return;
	if (may_read(conn))
		events |= LOOP_READ;
	if (!outbox_empty(&conn->out))
		events |= LOOP_WRITE;
	if (sm_state(&conn->sm) == CONN_CLOSING && !events) {
		conn_dead(conn);
		return;
	}
	if (loop_fd_set(&conn->watch, events) < 0)
		conn_mark_for_close(conn);
	if (sm_state(&conn->sm) == CONN_CLOSING)
		return;
	if (!conn->session->greeted)
		conn_timeout_set(conn, TIMEOUT_HELLO, conn->host->timeout_ns);
	else if (conn->in.len && may_read(conn)) /* no timeout while input is suspended */
		conn_timeout_set(conn, TIMEOUT_LINE, conn->host->timeout_ns);
	else
		conn_timeout_set(conn, TIMEOUT_NONE, 0);
}

/* ---- sending ---- */

static void conn_resume(void *arg)
{
	struct conn *conn = arg;

	assert(conn->host);
	loop_defer(conn->timer.loop, &conn->after);
}

static void conn_answer(void *arg, struct text *text, const int *fds,
			unsigned int fd_count)
{
	struct conn *conn = arg;

	assert(text->len > 0);
	if (sm_state(&conn->sm) == CONN_DEAD || conn->why_close.code != ERR_OK) {
		text_fini(text);
		return;
	}
	metrics_add(&conn->host->kvd->metrics, METRIC_CONTROL_OUT_BYTES, text->len);
	if (outbox_send(&conn->out, text, fds, fd_count,
			conn->host->kvd->config->client_queue_bytes) < 0)
		conn_mark_for_close(conn);
	/* replies of this turn are sent together; an answered request allows another
	 * line */
	loop_defer(conn->timer.loop, &conn->after);
}

/* ---- closing with a reason ---- */

/* The first reason counts. */
static void conn_mark_for_close(struct conn *conn)
{
	if (sm_state(&conn->sm) == CONN_DEAD || conn->why_close.code != ERR_OK)
		return;
	err_take(&conn->why_close);
	loop_defer(conn->timer.loop, &conn->after);
}

void conn_end_later(struct conn *conn, const struct err *why)
{
	(void)err_reraise(why);
	conn_mark_for_close(conn);
}

int conn_fd(const struct conn *conn)
{
	return conn->watch.fd;
}

/* Flushes within the timeout. */
static void conn_hangup(void *arg, const struct err *why)
{
	struct conn *conn = arg;
	char space[REPLY_SPACE];
	struct text text = reply_error(why, space);

	assert(why->code != ERR_OK);
	conn->session = NULL;
	conn->out.account = NULL;
	conn->watch.served = NULL;
	if (sm_state(&conn->sm) != CONN_OPEN)
		return;
	sm_move(&conn->sm, CONN_CLOSING);
	if (!conn->parsing)
		inbox_reset(&conn->in);
	/* After the queued replies and over the limit: it is the last line. If this
	 * fails, the close must be enough; queued replies are still tried. */
	(void)outbox_send(&conn->out, &text, NULL, 0, SIZE_MAX);
	if (outbox_flush(&conn->out) < 0)
		outbox_fini(&conn->out);
	err_clear();
	conn_timeout_set(conn, TIMEOUT_CLOSING,
			 conn->host->timeout_ns < FLUSH_NS ? conn->host->timeout_ns
							   : FLUSH_NS);
	conn_arm(conn);
}

/* The daemon ends the connection. */
static void conn_kill(struct conn *conn, const struct err *why)
{
	struct session *session = conn->session;

	if (why->code == ERR_IO) { /* the client closed first: no error line */
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

/* The client has closed its end, perhaps one direction only: it may still read. */
static void conn_eof(struct conn *conn)
{
	session_leave(conn, CLIENT_LEFT);
	if (sm_state(&conn->sm) == CONN_OPEN)
		sm_move(&conn->sm, CONN_CLOSING);
	inbox_reset(&conn->in);
	conn_timeout_set(conn, TIMEOUT_CLOSING, FLUSH_NS);
	conn_arm(conn);
}

static void on_after(struct loop_defer *defer)
{
	struct conn *conn = container_of(defer, struct conn, after);
	struct err why_close;

	if (sm_state(&conn->sm) == CONN_DEAD) {
		if (!conn->parsing)
			conn_free(conn);
		return;
	}
	if (conn->why_close.code != ERR_OK) {
		why_close = conn->why_close;
		conn->why_close.code = ERR_OK;
		if (sm_state(&conn->sm) == CONN_OPEN)
			conn_kill(conn, &why_close);
		else
			conn_dead(conn);
		return;
	}
	if (conn->in.ahead && may_read(conn))
		conn_read(conn);
	if (sm_state(&conn->sm) == CONN_DEAD || !list_empty(&conn->after.link))
		return;
	if (outbox_flush(&conn->out) < 0)
		conn_mark_for_close(conn);
	conn_arm(conn);
}

static void conn_on_timeout(struct loop_timer *timer)
{
	struct conn *conn = container_of(timer, struct conn, timer);
	struct err why;

	if (sm_state(&conn->sm) == CONN_CLOSING) {
		conn_dead(conn);
		return;
	}
	err_set(&why, ERR_TIMEOUT, "%s within %ju ms",
		conn->timeout == TIMEOUT_HELLO ? "no hello" : "no complete line",
		(uintmax_t)(conn->host->timeout_ns / LOOP_NS_PER_MS));
	conn_kill(conn, &why);
}

/* ---- lines ---- */

static void line_parse(struct request *req, const char *text)
{
	struct err err;

	if (json_parse(text, req->bytes, JSON_DEPTH_MAX, &req->line) == 0)
		return;
	err_take(&err);
	err.scope = ERR_SCOPE_OP; /* the connection lives on */
	(void)err_reraise(&err);
}

static void line_dispatch(struct conn *conn, struct request *req, const struct err *fault)
{
	struct err lost = conn->in.fault;

	inbox_reset(&conn->in);
	if (lost.code != ERR_OK)
		fault = &lost;
	if (fault)
		request_fail(req, fault);
	else
		commands_dispatch(req);
}

static void conn_parse_work(struct offload_job *job)
{
	struct conn *conn = container_of(job, struct conn, parse);

	line_parse(conn->parsing, conn->in.line);
	inbox_line_free(&conn->in); /* here, since it is large */
	if (conn->parsing->line)
		json_pack_lists(conn->parsing->line);
	else
		job->result = err_pass(-EPROTO);
}

static void conn_parse_done(struct offload_job *job)
{
	struct conn *conn = container_of(job, struct conn, parse);
	struct request *req = mem_steal(conn->parsing);

	if (sm_state(&conn->sm) == CONN_OPEN) {
		line_dispatch(conn, req, job->result < 0 ? &job->err : NULL);
		if (sm_state(&conn->sm) != CONN_DEAD)
			loop_defer(conn->timer.loop, &conn->after);
		return;
	}
	request_drop(req);
	inbox_reset(&conn->in);
	if (!conn->host)
		conn_free(conn);
	else
		loop_defer(conn->timer.loop, &conn->after);
}

/* A complete line is in the buffer, without its newline. */
static void conn_line(struct conn *conn)
{
	struct request *req =
		request_new(conn->session, conn->in.len, conn->in.fds, conn->in.fd_count);
	char space[REPLY_SPACE];
	struct text refusal;

	if (!req) {
		refusal = reply_error(err_last(), space);
		inbox_reset(&conn->in);
		conn_answer(conn, &refusal, NULL, 0);
		return;
	}
	conn->in.fd_count = 0;
	if (conn->in.len > REQUEST_INLINE_BYTES) {
		conn->parsing = req;
		conn->parse = (struct offload_job){
			.work = conn_parse_work,
			.done = conn_parse_done,
			.principal = session_principal(req->session)};
		offload_submit(req->kvd->offload, &conn->parse);
		return;
	}
	line_parse(req, conn->in.line);
	line_dispatch(conn, req, req->line ? NULL : err_last());
}

/* ---- receiving ---- */

/* Bytes that were seen in the socket. False: the connection ended. */
static bool line_take(struct conn *conn, size_t want)
{
	struct kvd *kvd = conn->host->kvd;
	struct err why;

	if (inbox_take(&conn->in, want, SESSION_LINE_MAX) == 0) {
		metrics_add(&kvd->metrics, METRIC_CONTROL_IN_BYTES, want);
		return true;
	}
	err_take(&why);
	conn_kill(conn, &why);
	return false;
}

/* Process `len` peeked bytes. Returns the number of complete lines. */
static unsigned int conn_consume(struct conn *conn, const uint8_t *seen, size_t len)
{
	unsigned int lines = 0;

	for (size_t pos = 0, want; pos < len && may_read(conn); pos += want) {
		const uint8_t *end = memchr(seen + pos, '\n', len - pos);

		/* wait until the submission ring has passed its earlier entries */
		if (!ring_gate_passed(ring_of(conn->session)))
			break;
		want = end ? (size_t)(end - (seen + pos)) + 1 : len - pos;
		if (!line_take(conn, want))
			break;
		if (!end)
			continue;
		conn->in.len--;
		conn_line(conn);
		if (++lines == TURN_LINES || loop_enough(conn->timer.loop))
			break;
	}
	return lines;
}

/* Data that arrived ahead, else data of the socket. NULL: nothing to process now. */
static const uint8_t *conn_see(struct conn *conn, size_t *len_p)
{
	const uint8_t *ahead = inbox_ahead(&conn->in, len_p);
	uint8_t *peek = conn->host->peek;
	bool with;
	ssize_t n;

	if (ahead)
		return ahead;
	/* long peeks only for long lines: most of their bytes are peeked again */
	n = gate_peek(conn->watch.fd, peek,
		      conn->in.len ? CONN_PEEK_BYTES : SHORT_PEEK_BYTES, &with);
	if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
		return NULL;
	if (n <= 0) {
		conn_eof(conn);
		return NULL;
	}
	if (with) {
		gate_receive(&conn->gate, GATE_LINES, (size_t)n, REQUEST_FDS_MAX);
		return NULL;
	}
	*len_p = (size_t)n;
	return peek;
}

static void conn_read(struct conn *conn)
{
	unsigned int lines = 0;
	size_t bytes = 0, len;

	while (may_read(conn) && lines < TURN_LINES && bytes < TURN_BYTES) {
		const uint8_t *seen = conn_see(conn, &len);

		if (!seen)
			return;
		lines += conn_consume(conn, seen, len);
		bytes += len;
		if (loop_enough(conn->timer.loop))
			break;
	}
	if (conn->in.ahead && may_read(conn))
		loop_defer(conn->timer.loop, &conn->after);
}

static void conn_on_parcel(struct gate_client *client, struct gate_parcel *parcel)
{
	struct conn *conn = container_of(client, struct conn, gate);

	if (sm_state(&conn->sm) != CONN_OPEN)
		return;
	loop_defer(conn->timer.loop, &conn->after); /* reads on */
	if (parcel->fault.code != ERR_OK && parcel->fault.scope == ERR_SCOPE_SESSION)
		conn->why_close = parcel->fault;
	else if (inbox_put(&conn->in, parcel) < 0)
		conn_mark_for_close(conn);
}

static void conn_on_ready(struct loop_fd *watch, int events)
{
	struct conn *conn = container_of(watch, struct conn, watch);

	if ((events & LOOP_WRITE) && outbox_flush(&conn->out) < 0)
		conn_mark_for_close(conn);
	if (events & LOOP_READ)
		conn_read(conn);
	/* replies are waiting for on_after(), which checks again when they are sent */
	if (sm_state(&conn->sm) != CONN_DEAD && list_empty(&conn->after.link))
		conn_arm(conn);
}

/* ---- making and ending all ---- */

static const struct session_conn_ops conn_ops = {
	.answer = conn_answer,
	.resume = conn_resume,
	.hangup = conn_hangup,
};

int conn_new(struct conn_host *host, int fd, const struct session_peer *peer)
{
	struct conn *conn = mem_zalloc(sizeof(*conn));
	int r;

	assert(host->kvd && fd >= 0);
	if (!conn)
		return err_pass(-ENOMEM);
	conn->host = host;
	sm_init(&conn->sm, &conn_table, CONN_OPEN);
	inbox_init(&conn->in, fd);
	outbox_init(&conn->out, fd);
	loop_fd_init(&conn->watch, host->kvd->loop, fd, conn_on_ready);
	loop_timer_init(&conn->timer, host->kvd->loop, conn_on_timeout);
	loop_defer_init(&conn->after, on_after);
	conn->after.rank = LOOP_TO_ENGINE;
	conn->gate.on_parcel = conn_on_parcel;
	r = gate_hold(host->kvd->gates, &conn->gate, fd, peer->uid);
	if (r == 0)
		r = session_new(host->kvd, peer, conn, &conn->session);
	if (r < 0) {
		gate_release(&conn->gate);
		mem_free(conn);
		return err_pass(r);
	}
	conn->session->conn_ops = &conn_ops;
	conn->out.account = conn->session->account;
	conn->watch.served = &conn->session->account->served;
	list_push_back(&host->conns, &conn->link);
	conn_arm(conn);
	return 0;
}

void conns_free(struct conn_host *host)
{
	struct conn *conn;

	list_foreach_safe(conn, &host->conns, link) {
		session_leave(conn, "the daemon is shutting down");
		conn_dead(conn);
		conn->host = NULL;
		if (!conn->parsing) {
			conn_free(conn);
			continue;
		}
		list_remove(&conn->link); /* conn_parse_done() frees it */
		loop_defer_cancel(&conn->after);
	}
}
