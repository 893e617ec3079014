/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The sending half of a stream.
 *
 * A frame is a head, bytes of one transfer and a trailer, given to the kernel in one call
 * where the socket takes it. Rows that are long enough are sent in place from the
 * engine's memory; short ones, and memory that is another process's, are packed into a
 * bounce buffer first, in this thread, so that the kernel finds them in its cache.
 *
 * Each call is made with the flow held. When the flow was closed in between, in the
 * middle of its bytes, the rest of the frame is padded with zeros and the trailer marks
 * it void: the stream continues with the next frame.
 *
 * Where the stream is sealed (tcp_seal.h), the call is tcp_seal's: it encrypts the bytes
 * into records, after which their memory is free, and sends these. A frame is over when
 * the socket has its last record.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/err.h"

#define FRAMES_A_TURN 4u
#define NOTHING_BYTES (64u << 10)

static const uint8_t nothing[NOTHING_BYTES];

enum outcome { SENT, WAITING, BROKEN };

static uint64_t frame_bytes(const struct tcp_half *tx)
{
	if (tx->head.type == TCP_BEAT)
		return TCP_HEAD_BYTES;
	return TCP_HEAD_BYTES + (uint64_t)tx->head.length + TCP_TRAILER_BYTES;
}

/* ---- the next frame ---- */

static unsigned int name_payload(const struct tcp_half *tx, struct iovec *iov,
				 uint64_t *named_p)
{
	uint64_t done = tx->pos - TCP_HEAD_BYTES, left = tx->head.length - done;
	unsigned int count = 0;

	if (tx->over) {
		*named_p = left < NOTHING_BYTES ? left : NOTHING_BYTES;
		iov[0] = (struct iovec){(void *)(uintptr_t)nothing, *named_p};
		return 1;
	}
	if (tx->bounce) {
		*named_p = left;
		iov[0] = (struct iovec){tx->bounce->bytes + done, left};
		return 1;
	}
	*named_p = stage_iov(&tx->flow->side, tx->head.at + done,
			     tx->head.at + tx->head.length, iov, TCP_ROWS_MAX, &count);
	return count;
}

/* From tx->pos on. */
static unsigned int name_frame(struct tcp_half *tx, struct iovec *iov)
{
	uint64_t pos = tx->pos, named, end = TCP_HEAD_BYTES + (uint64_t)tx->head.length;
	unsigned int count = 0;

	if (pos < TCP_HEAD_BYTES) {
		iov[count++] = (struct iovec){tx->head_bytes + pos, TCP_HEAD_BYTES - pos};
		pos = TCP_HEAD_BYTES;
	}
	if (pos < end) {
		const uint64_t was = tx->pos;

		unsigned int rows;

		tx->pos = pos;
		rows = name_payload(tx, iov + count, &named);
		if (pos == TCP_HEAD_BYTES)
			tx->named = rows;
		count += rows;
		tx->pos = was;
		pos += named;
	}
	if (pos >= end && tx->head.type != TCP_BEAT)
		iov[count++] = (struct iovec){tx->trailer_bytes + (pos - end),
					      TCP_TRAILER_BYTES - (pos - end)};
	return count;
}

/* ---- a frame starts ---- */

/* Runs with the flow held: how its bytes will be sent. */
static int begin_payload(struct tcp_stream *stream)
{
	struct tcp_half *tx = &stream->tx;
	struct tcp_thread *thread = stream->thread;
	const struct tcp_flow *flow = tx->flow;
	uint64_t begin = tx->head.at, end = begin + tx->head.length;
	int r;

	if (!flow->direct || !stage_few_rows(&flow->side, begin, end, TCP_ROWS_MAX)) {
		tx->bounce = tcp_bounce_take(thread);
		if (!tx->bounce)
			return err_pass(-ENOMEM);
		r = stage_pack(thread->hand, &flow->side, begin, end, tx->bounce->bytes);
		if (r < 0)
			return err_pass(r);
	}
	tcp_head_put(&tx->head, tx->head_bytes);
	tcp_trailer_put(true, tx->trailer_bytes);
	return 0;
}

/* False: there is nothing to send. */
static bool tcp_tx_begin_frame(struct tcp_stream *stream)
{
	struct tcp_peer *peer = stream->peer;
	struct tcp_half *tx = &stream->tx;
	bool any, beat;
	int r;

	pthread_mutex_lock(&peer->lock);
	any = !stream->closing && tcp_flow_claim(peer, tx) > 0;
	beat = !stream->closing && !any && stream->beat;
	stream->idle = !any && !beat;
	stream->beat = false;
	stream->said |= any;
	if (any)
		(void)tcp_half_hold(tx, true); /* open: it was among the sources */
	pthread_mutex_unlock(&peer->lock);
	tx->active = any || beat;
	if (beat) {
		tx->head = (struct tcp_head){.type = TCP_BEAT};
		tx->pos = 0;
		tx->over = false;
		tcp_head_put(&tx->head, tx->head_bytes);
		return true;
	}
	if (!any)
		return false;
	r = begin_payload(stream);
	pthread_mutex_lock(&peer->lock);
	if (r < 0)
		tcp_flow_fault(tx->flow);
	(void)tcp_half_release(tx, true);
	pthread_mutex_unlock(&peer->lock);
	return true;
}

/* ---- a frame continues ---- */

/* The lock is held. */
static void tcp_tx_end_frame(struct tcp_stream *stream)
{
	struct tcp_half *tx = &stream->tx;

	if (tx->flow)
		tcp_flow_moved(tx->flow, tx);
	tcp_half_leave(tx);
	tx->active = false;
	tcp_bounce_give(stream->thread, &tx->bounce);
}

static ssize_t tcp_tx_send(struct tcp_stream *stream, struct msghdr *msg)
{
	struct tcp_half *tx = &stream->tx;
	ssize_t n;
	int no;

	if (!tx->seal)
		return sendmsg(stream->fd, msg, MSG_NOSIGNAL | MSG_DONTWAIT);
	if (!tcp_half_lend(stream->thread, tx)) {
		err_clear();
		errno = ENOMEM;
		return -1;
	}
	n = tcp_seal_sendmsg(tx->seal, stream->fd, msg);
	no = errno;
	tcp_half_reclaim(stream->thread, tx);
	errno = no;
	return n;
}

static enum outcome tcp_tx_push(struct tcp_stream *stream)
{
	struct tcp_peer *peer = stream->peer;
	struct tcp_half *tx = &stream->tx;
	struct msghdr msg = {.msg_iov = stream->thread->iov};
	enum outcome outcome = SENT;
	bool held, dead = false;
	ssize_t n = 0;
	int no = 0;

	pthread_mutex_lock(&peer->lock);
	held = tcp_half_hold(tx, true);
	pthread_mutex_unlock(&peer->lock);
	if (tx->over) { /* it lost its flow; before its head was out it has no head */
		if (tx->pos == 0)
			tcp_head_put(&tx->head, tx->head_bytes);
		tcp_trailer_put(false, tx->trailer_bytes);
	}
	if (held && !tx->bounce)
		dead = tcp_flow_dead(tx->flow);
	if (!dead) {
		msg.msg_iovlen = name_frame(tx, msg.msg_iov);
		n = tcp_tx_send(stream, &msg);
		no = errno;
	}
	if (n > 0)
		tx->pos += (uint64_t)n;
	pthread_mutex_lock(&peer->lock);
	if (held && (dead || (n < 0 && no == EFAULT))) {
		err_raise(ERR_FAULT, "the memory was truncated by its owner");
		tcp_flow_fault(tx->flow);
		n = 0;
	}
	if (held)
		(void)tcp_half_release(tx, true);
	if (n >= 0 && tx->pos == frame_bytes(tx) && !tcp_seal_busy(tx->seal))
		tcp_tx_end_frame(stream);
	pthread_mutex_unlock(&peer->lock);
	if (n < 0 && (no == EAGAIN || no == ENOBUFS || no == EINTR)) {
		stream->can_write = no == EINTR;
		outcome = WAITING;
	} else if (n < 0) {
		err_raise(ERR_PEER, "tcp: a stream to %s broke: %s", peer->net.name,
			  strerror(no));
		tcp_stream_fail(stream);
		outcome = BROKEN;
	}
	return outcome;
}

bool tcp_tx_work(struct tcp_stream *stream)
{
	struct tcp_half *tx = &stream->tx;

	for (unsigned int frames = FRAMES_A_TURN; frames > 0;) {
		if (!tx->active && !tcp_tx_begin_frame(stream))
			return false;
		if (tcp_tx_push(stream) != SENT)
			return stream->can_write;
		frames -= !tx->active;
	}
	return true;
}
