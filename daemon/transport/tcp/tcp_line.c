/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The control line: requests, answers, cancels and BYE of a peer, in
 * the order they were sent, on one connection that carries nothing bulky. So none
 * of them ever waits behind a room's bytes, here or in a socket's buffer, and the
 * loop reads and writes it by itself: a request costs no change of threads. The
 * bytes of a small transfer travel inside its frames (tcp_xfer.c).
 *
 * Frames are queued, a chunk each, and written when the turn ends. Frames are read into a
 * small buffer; larger ones are read directly into separate memory, whose size was held
 * against its caps first. A peer that asks and never reads is lost when TCP_OUT_HARD
 * bytes wait for it.
 *
 * Where the peer's connections are sealed (tcp_seal.h), the loop seals and opens the
 * line's records itself: one of 16 KiB takes it some microseconds, less than waking a
 * thread would.
 *
 * Neither direction keeps the loop for longer than its part of a turn: the kernel
 * takes or gives BYTES_A_CALL at once, and frames that are read but not yet taken
 * (`more`) wait for the next turn, before anything else is read.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define IN_BYTES 16384u
#define BYTES_A_TURN (256u << 10)
#define PIECES_A_CALL 16
/* A page of 64 KiB and the headers before it; the kernel brings them to the peer
 * meanwhile.
 */
#define BYTES_A_CALL ((64u << 10) + 4096u)

_Static_assert(IN_BYTES >= TCP_HEAD_BYTES + TCP_TEXT_MAX, "a small frame fits");

void tcp_line_init(struct tcp_line *line)
{
	*line = (struct tcp_line){.fd = -1};
	list_init(&line->out);
}

void tcp_entry_free(struct tcp_entry *entry)
{
	if (!entry)
		return;
	entry->peer->held_bytes -= entry->head.length;
	mem_free_large(entry, entry->head.length);
}

static void tcp_chunk_free(struct tcp_chunk *chunk)
{
	if (!chunk)
		return;
	mem_free_large(chunk->owned, chunk->tail_len);
	mem_free(chunk);
}

void tcp_line_fini(struct tcp_peer *peer)
{
	struct tcp_line *line = &peer->line;
	struct list *link;

	while ((link = list_pop_front(&line->out)))
		tcp_chunk_free(list_entry(link, struct tcp_chunk, link));
	line->unsent = 0;
	if (line->fd >= 0)
		loop_fd_stop(&line->watch);
	mem_closep(&line->fd);
	tcp_seal_free(line->seal);
	tcp_seal_free(line->open);
	line->seal = line->open = NULL;
	mem_free(line->records);
	line->records = NULL;
	tcp_entry_free(line->entry);
	line->entry = NULL;
	net_peer_half(&peer->net, 0);
	mem_free(line->in);
	line->in = NULL;
	line->more = false;
}

static void watch(struct tcp_peer *peer, int events)
{
	struct tcp_line *line = &peer->line;

	if (line->fd < 0 || line->events == events)
		return;
	line->events = events;
	if (loop_fd_set(&line->watch, events) < 0)
		net_peer_fail_last(&peer->net);
}

/* ---- out ---- */

struct tcp_chunk *tcp_chunk_new(size_t size)
{
	struct tcp_chunk *chunk = mem_alloc(sizeof(*chunk) + TCP_HEAD_BYTES + size);

	if (chunk) {
		list_init(&chunk->link);
		chunk->tail = chunk->owned = NULL;
		chunk->tail_len = 0;
	}
	return chunk;
}

static void tcp_line_queue(struct tcp_peer *peer, struct tcp_chunk *owned, size_t len)
{
	struct tcp_line *line = &peer->line;

	if (line->fd < 0 || peer->net.broken) {
		tcp_chunk_free(owned);
		return;
	}
	line->said = true;
	if (peer->crypto != TCP_CRYPTO_NONE)
		tcp_tick_want(peer->transport);
	owned->len = len;
	owned->pos = 0;
	list_push_back(&line->out, &owned->link);
	line->unsent += len + owned->tail_len;
	if (line->unsent > TCP_OUT_HARD) {
		err_raise(ERR_PEER, "tcp: %s does not read: %zu bytes are queued",
			  peer->net.name, line->unsent);
		peer->net.broken = true;
		net_peer_fail_last(&peer->net);
	}
	net_peer_flush_soon(&peer->net);
}

void tcp_line_send(struct tcp_peer *peer, struct tcp_chunk *owned, struct tcp_head *head,
		   const struct err *err)
{
	if (err) {
		head->code = err->code;
		head->flags = net_fault_flags(err);
		head->length = (uint32_t)strnlen(err->text, TCP_TEXT_MAX);
		memcpy(tcp_chunk_payload(owned), err->text, head->length);
	}
	tcp_head_put(head, owned->bytes);
	tcp_line_queue(peer, owned,
		       TCP_HEAD_BYTES + (size_t)head->length - owned->tail_len);
}

static void written(struct tcp_line *line, size_t n)
{
	line->unsent -= n;
	while (n > 0) {
		struct tcp_chunk *chunk = list_first(&line->out, struct tcp_chunk, link);
		size_t left = chunk->len + chunk->tail_len - chunk->pos;
		size_t part = left < n ? left : n;

		chunk->pos += part;
		n -= part;
		if (part == left) {
			list_remove(&chunk->link);
			tcp_chunk_free(chunk);
		}
	}
}

/* The next contiguous bytes of the chunk from `pos` on. */
static struct iovec piece_of(const struct tcp_chunk *chunk, size_t pos)
{
	if (pos < chunk->len)
		return (struct iovec){(uint8_t *)chunk->bytes + pos, chunk->len - pos};
	pos -= chunk->len;
	return (struct iovec){(uint8_t *)(uintptr_t)chunk->tail + pos,
			      chunk->tail_len - pos};
}

static size_t gather(const struct tcp_line *line, struct iovec iov[PIECES_A_CALL])
{
	const struct tcp_chunk *chunk;
	size_t n = 0, bytes = 0;

	list_foreach(chunk, &line->out, link) {
		size_t pos = chunk->pos;

		while (pos < chunk->len + chunk->tail_len) {
			if (n == PIECES_A_CALL || bytes == BYTES_A_CALL)
				return n;
			iov[n] = piece_of(chunk, pos);
			if (iov[n].iov_len > BYTES_A_CALL - bytes)
				iov[n].iov_len = BYTES_A_CALL - bytes;
			bytes += iov[n].iov_len;
			pos += iov[n++].iov_len;
		}
	}
	return n;
}

bool tcp_line_sent(const struct tcp_line *line)
{
	return list_empty(&line->out) && !tcp_seal_busy(line->seal);
}

void tcp_line_flush(struct tcp_peer *peer)
{
	struct tcp_line *line = &peer->line;
	struct iovec iov[PIECES_A_CALL];
	struct msghdr msg;
	ssize_t n = 0;

	while (line->fd >= 0 && !tcp_line_sent(line) && !peer->net.broken) {
		msg = (struct msghdr){.msg_iov = iov, .msg_iovlen = gather(line, iov)};
		n = line->seal ? tcp_seal_sendmsg(line->seal, line->fd, &msg)
			       : sendmsg(line->fd, &msg, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (n < 0 && (errno == EAGAIN || errno == ENOBUFS))
			break;
		if (n >= 0)
			written(line, (size_t)n);
		else if (errno != EINTR)
			tcp_peer_break(peer, "write", errno);
		if (loop_enough(peer->net.timer.loop))
			break; /* the socket calls again */
	}
	watch(peer, (line->events & LOOP_READ) |
			    (tcp_line_sent(line) || peer->net.broken ? 0 : LOOP_WRITE));
}

/* ---- in ---- */

/* `part`: of its payload that is here. */
static int tcp_line_entry_new(struct tcp_peer *peer, const struct tcp_head *head,
			      size_t part, struct tcp_entry **entry_p)
{
	struct tcp_entry *entry;

	if (peer->held_bytes + head->length > TCP_HELD_MAX)
		return err_raise(
			ERR_PROTO,
			"tcp: headers of unfinished requests too large (limit %u bytes)",
			NET_HEADERS_MAX);
	if (part < head->length && net_peer_half(&peer->net, head->length) < 0)
		return err_pass(-ENOMEM);
	entry = mem_alloc(sizeof(*entry) + head->length);
	if (!entry) {
		net_peer_half(&peer->net, 0);
		return err_pass(-ENOMEM);
	}
	*entry = (struct tcp_entry){.peer = peer, .head = *head};
	peer->held_bytes += head->length;
	*entry_p = entry;
	return 0;
}

/* One frame out of the buffer, or its beginning; the bytes used, 0: it needs
 * more of them first. Negative: the peer breaks the protocol. */
static ssize_t tcp_line_take_frame(struct tcp_peer *peer, const uint8_t *bytes,
				   size_t len)
{
	struct tcp_line *line = &peer->line;
	struct tcp_entry *entry = NULL;
	struct tcp_head head;
	size_t part;
	int r;

	if (len < TCP_HEAD_BYTES)
		return 0;
	r = tcp_head_get(bytes, false, &head);
	if (r < 0)
		return err_pass(r);
	bytes += TCP_HEAD_BYTES;
	len -= TCP_HEAD_BYTES;
	part = head.length < len ? head.length : len;
	/* REQUESTs and eager answers keep their payload; the payloads of others are read
	 * where they lie. */
	if (head.type != TCP_REQUEST && !(head.flags & TCP_FLAG_EAGER)) {
		if (part < head.length)
			return 0;
		tcp_xfer_frame(peer, &head, bytes, NULL);
		return (ssize_t)(TCP_HEAD_BYTES + part);
	}
	r = tcp_line_entry_new(peer, &head, part, &entry);
	if (r == -ENOMEM) {
		line->skip = head.length - part;
		tcp_xfer_frame(peer, &head, NULL, NULL);
		return (ssize_t)(TCP_HEAD_BYTES + part);
	}
	if (r < 0)
		return err_pass(r);
	memcpy(entry->payload, bytes, part);
	entry->got = part;
	if (part < head.length)
		line->entry = entry;
	else
		tcp_xfer_frame(peer, &head, entry->payload, entry);
	return (ssize_t)(TCP_HEAD_BYTES + part);
}

static void take_frames(struct tcp_peer *peer)
{
	struct tcp_line *line = &peer->line;
	size_t used = 0;
	ssize_t n = 1;

	line->more = false;
	while (net_peer_live(&peer->net) && !line->entry && !line->skip && n > 0) {
		if (used > 0 && used < line->in_len &&
		    loop_enough(peer->net.timer.loop)) {
			line->more = true;
			net_peer_kick(&peer->net);
			break;
		}
		n = tcp_line_take_frame(peer, line->in + used, line->in_len - used);
		if (n < 0)
			net_peer_fail_last(&peer->net);
		else
			used += (size_t)n;
	}
	if (!line->in)
		return;
	line->in_len -= used;
	memmove(line->in, line->in + used, line->in_len);
}

/* `n` bytes were read by read_some(). */
static void took(struct tcp_peer *peer, size_t n)
{
	struct tcp_line *line = &peer->line;
	struct tcp_entry *entry = line->entry;

	if (entry) {
		size_t left = entry->head.length - entry->got;
		size_t part = n < left ? n : left;

		entry->got += part;
		line->in_len = n - part;
		if (part < left)
			return;
		line->entry = NULL;
		net_peer_half(&peer->net, 0);
		tcp_xfer_frame(peer, &entry->head, entry->payload, entry);
	} else if (line->skip) {
		line->skip -= n;
	} else {
		line->in_len += n;
	}
	take_frames(peer);
}

/* Up to `*room_p` bytes. The end of a long payload and the following bytes take one
 * call. */
static ssize_t read_some(struct tcp_line *line, size_t *room_p)
{
	struct tcp_entry *entry = line->entry;
	struct iovec iov[2] = {{line->in + line->in_len, IN_BYTES - line->in_len}};
	struct msghdr msg = {.msg_iov = iov, .msg_iovlen = 1};

	if (line->skip && line->skip < iov[0].iov_len)
		iov[0].iov_len = line->skip; /* read, and forgotten */
	*room_p = iov[0].iov_len;
	if (entry) {
		size_t left = entry->head.length - entry->got;

		assert(line->in_len == 0);
		iov[1] = iov[0];
		iov[0] = (struct iovec){entry->payload + entry->got,
					left < BYTES_A_CALL ? left : BYTES_A_CALL};
		msg.msg_iovlen = left <= BYTES_A_CALL ? 2 : 1;
		*room_p = iov[0].iov_len + (msg.msg_iovlen == 2 ? iov[1].iov_len : 0);
	}
	return line->open ? tcp_seal_recvmsg(line->open, line->fd, &msg)
			  : recvmsg(line->fd, &msg, MSG_DONTWAIT);
}

static void receive(struct tcp_peer *peer)
{
	struct tcp_line *line = &peer->line;
	size_t budget = BYTES_A_TURN, room;
	ssize_t n;

	if (line->more)
		take_frames(peer);
	while (net_peer_live(&peer->net) && line->fd >= 0 && !line->more) {
		n = read_some(line, &room);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN)
			return;
		if (n < 0 && errno == EBADMSG && line->open) {
			net_peer_fail_last(&peer->net);
			return;
		}
		if (n <= 0) {
			tcp_peer_break(peer, n == 0 ? "it closed the connection" : "read",
				       n == 0 ? 0 : errno);
			return;
		}
		took(peer, (size_t)n);
		if ((size_t)n < room && !tcp_seal_busy(line->open))
			return; /* that was all */
		if ((size_t)n >= budget || loop_enough(peer->net.timer.loop))
			break; /* the socket raises another event, but not for bytes
				* already read */
		budget -= (size_t)n;
	}
	if (net_peer_live(&peer->net) && tcp_seal_busy(line->open)) {
		line->more = true;
		net_peer_kick(&peer->net);
	}
}

void tcp_line_resume(struct tcp_peer *peer)
{
	if (peer->line.more)
		receive(peer);
}

/* After BYE nothing is read but the end; bytes left unread would make
 * the kernel reset the connection under it. */
static void tcp_line_drain(struct tcp_peer *peer)
{
	uint8_t bytes[4096];
	ssize_t n;

	do {
		n = recv(peer->line.fd, bytes, sizeof(bytes), MSG_DONTWAIT);
	} while (n > 0 && !loop_enough(peer->net.timer.loop));
	if (n == 0 || (n < 0 && errno != EAGAIN)) {
		peer->net.broken = true;
		net_peer_kick(&peer->net);
	}
}

static void on_line(struct loop_fd *loop_fd, int events)
{
	struct tcp_peer *peer = container_of(loop_fd, struct tcp_peer, line.watch);

	if (events & LOOP_WRITE)
		net_peer_flush_soon(&peer->net);
	if (!(events & LOOP_READ) || peer->line.fd < 0)
		return;
	if (net_peer_live(&peer->net))
		receive(peer);
	else if (sm_state(&peer->net.sm) == NET_PEER_FLUSHING)
		tcp_line_drain(peer);
	net_peer_kick(&peer->net);
}

int tcp_line_open(struct tcp_peer *peer, int owned_fd)
{
	struct tcp_line *line = &peer->line;

	assert(line->fd < 0);
	loop_fd_init(&line->watch, peer->net.timer.loop, owned_fd, on_line);
	line->fd = owned_fd;
	line->in = mem_zalloc(IN_BYTES);
	return line->in ? err_pass(tcp_crypto_line(peer)) : err_pass(-ENOMEM);
}

void tcp_line_listen(struct tcp_peer *peer)
{
	watch(peer, peer->line.events | LOOP_READ);
}
