/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The receiving half of a stream.
 *
 * A frame's head names a transfer and a stretch of its stream; this side's own plan gives
 * its address. The bytes are received straight into the planned rows, or, where rows are
 * short, into a bounce buffer and scattered from there by this thread once the trailer
 * has arrived. Trailer and next head are part of the same call, so a frame costs one
 * where the network keeps up.
 *
 * Bytes count only after a good trailer. Bytes without a flow, or whose flow was closed
 * in the middle, are discarded by the kernel (MSG_TRUNC), and the stream continues. A
 * head or trailer that cannot be right costs the peer.
 *
 * Where the stream is sealed (tcp_seal.h), records are read into a buffer and opened from
 * there into the bounce buffer, so a frame is copied to its rows when all of it was found
 * authentic. To open records into the rows would save that copy, one out of the core's
 * cache; but then unauthenticated bytes would be in an engine's memory until the room has
 * failed, and an engine could change a record under its tag.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/err.h"

#define CALLS_A_TURN 8u

enum outcome { CAME, WAITING, BROKEN };

static int broke(const struct tcp_stream *stream, ssize_t n, int no)
{
	return err_raise(ERR_PEER, "tcp: a stream of %s %s%s", stream->peer->net.name,
			 n == 0 ? "ended" : "broke: ", n == 0 ? "" : strerror(no));
}

/* The meaning of a call that returned nothing. */
static enum outcome nothing_came(struct tcp_stream *stream, ssize_t n, int no)
{
	if (n < 0 && no == EINTR)
		return CAME;
	stream->can_read = false;
	if (n < 0 && no == EAGAIN)
		return WAITING;
	broke(stream, n, no);
	tcp_stream_fail(stream);
	return BROKEN;
}

/* ---- a frame starts ---- */

static int tcp_rx_begin_frame(struct tcp_stream *stream)
{
	struct tcp_peer *peer = stream->peer;
	struct tcp_half *rx = &stream->rx;
	uint64_t begin, end;
	bool held = false, ok = true;
	int r = tcp_head_get(rx->head_bytes, true, &rx->head);

	if (r < 0)
		return err_pass(r);
	if (rx->head.type == TCP_BEAT) {
		rx->got = 0;
		return 0;
	}
	begin = rx->head.at;
	end = begin + rx->head.length;
	pthread_mutex_lock(&peer->lock);
	r = tcp_flow_admit(peer, rx);
	if (r == 0)
		held = tcp_half_hold(rx, false);
	pthread_mutex_unlock(&peer->lock);
	if (r < 0)
		return err_pass(r);
	if (held) {
		rx->direct = !rx->seal && rx->flow->direct &&
			     stage_few_rows(&rx->flow->side, begin, end, TCP_ROWS_MAX);
		if (!rx->direct)
			rx->bounce = tcp_bounce_take(stream->thread);
		ok = rx->direct || rx->bounce;
		pthread_mutex_lock(&peer->lock);
		if (!ok)
			tcp_flow_fault(rx->flow);
		(void)tcp_half_release(rx, false);
		pthread_mutex_unlock(&peer->lock);
	}
	rx->active = true;
	rx->got = 0;
	return 0;
}

static enum outcome pull_head(struct tcp_stream *stream)
{
	struct tcp_half *rx = &stream->rx;
	ssize_t n = recv(stream->fd, rx->head_bytes + rx->got, TCP_HEAD_BYTES - rx->got,
			 MSG_DONTWAIT);

	if (n <= 0)
		return nothing_came(stream, n, errno);
	rx->got += (size_t)n;
	return CAME;
}

/* ---- it ends ---- */

/* The flow is held. */
static int tcp_rx_place(struct tcp_stream *stream)
{
	struct tcp_half *rx = &stream->rx;
	uint64_t begin = rx->head.at, end = begin + rx->head.length;

	if (rx->bounce)
		return err_pass(stage_unpack(stream->thread->hand, &rx->flow->side, begin,
					     end, rx->bounce->bytes));
	if (tcp_flow_dead(rx->flow))
		return err_raise(ERR_FAULT, "the memory was truncated by its owner");
	return 0;
}

static int tcp_rx_end_frame(struct tcp_stream *stream)
{
	struct tcp_peer *peer = stream->peer;
	struct tcp_half *rx = &stream->rx;
	bool good, held = false;
	int r = tcp_trailer_get(rx->trailer_bytes, &good);

	if (r < 0)
		return err_pass(r);
	if (good) {
		pthread_mutex_lock(&peer->lock);
		held = tcp_half_hold(rx, false);
		pthread_mutex_unlock(&peer->lock);
	}
	if (held)
		r = tcp_rx_place(stream);
	pthread_mutex_lock(&peer->lock);
	if (held && r < 0)
		tcp_flow_fault(rx->flow);
	if (held && tcp_half_release(rx, false))
		tcp_flow_moved(rx->flow, rx);
	tcp_half_leave(rx);
	pthread_mutex_unlock(&peer->lock);
	tcp_bounce_give(stream->thread, &rx->bounce);
	rx->active = false;
	return 0;
}

/* ---- in between ---- */

/* Payload, trailer and the next head, as far as available. */
static ssize_t tcp_rx_take(struct tcp_stream *stream)
{
	struct tcp_half *rx = &stream->rx;
	struct iovec *iov = stream->thread->iov;
	uint64_t pos = rx->pos, length = rx->head.length;
	struct msghdr msg = {.msg_iov = iov};
	unsigned int count = 0;

	if (pos < length && rx->bounce) {
		iov[count++] = (struct iovec){rx->bounce->bytes + pos, length - pos};
		pos = length;
	} else if (pos < length) {
		pos += stage_iov(&rx->flow->side, rx->head.at + pos, rx->head.at + length,
				 iov, TCP_ROWS_MAX, &count);
		if (rx->pos == 0)
			rx->named = count;
	}
	if (pos >= length) {
		iov[count++] = (struct iovec){rx->trailer_bytes + (pos - length),
					      TCP_TRAILER_BYTES - (pos - length)};
		iov[count++] = (struct iovec){rx->head_bytes, TCP_HEAD_BYTES};
	}
	msg.msg_iovlen = count;
	return recvmsg(stream->fd, &msg, MSG_DONTWAIT);
}

/* `n` bytes after pos arrived; those past the trailer are the next head's. */
static void advance(struct tcp_half *rx, size_t n)
{
	uint64_t end = (uint64_t)rx->head.length + TCP_TRAILER_BYTES;

	rx->pos += n;
	if (rx->pos > end) {
		rx->got = rx->pos - end;
		rx->pos = end;
	}
}

static enum outcome tcp_rx_pull(struct tcp_stream *stream)
{
	struct tcp_peer *peer = stream->peer;
	struct tcp_half *rx = &stream->rx;
	bool held, fault;
	ssize_t n;
	int no;

	pthread_mutex_lock(&peer->lock);
	held = tcp_half_hold(rx, false);
	pthread_mutex_unlock(&peer->lock);
	n = rx->over && rx->pos < rx->head.length
		    ? recv(stream->fd, NULL, rx->head.length - rx->pos,
			   MSG_TRUNC | MSG_DONTWAIT)
		    : tcp_rx_take(stream);
	no = errno;
	fault = held && n < 0 && no == EFAULT;
	if (n > 0)
		advance(rx, (size_t)n);
	if (held) {
		pthread_mutex_lock(&peer->lock);
		if (fault) {
			err_raise(ERR_FAULT, "the memory was truncated by its owner");
			tcp_flow_fault(rx->flow);
		}
		(void)tcp_half_release(rx, false);
		pthread_mutex_unlock(&peer->lock);
	}
	if (fault)
		return CAME;
	return n > 0 ? CAME : nothing_came(stream, n, no);
}

/* ---- sealed ---- */

/* The opened part of a head, a payload or a trailer. */
static int tcp_rx_use(struct tcp_stream *stream)
{
	struct tcp_half *rx = &stream->rx;
	struct tcp_seal *seal = rx->seal;
	uint64_t length = rx->head.length;
	uint64_t left = !rx->active	   ? TCP_HEAD_BYTES - rx->got
			: rx->pos < length ? length - rx->pos
					   : length + TCP_TRAILER_BYTES - rx->pos;
	size_t n = left < seal->plain_len ? left : seal->plain_len;
	uint8_t *to = !rx->active	  ? rx->head_bytes + rx->got
		      : rx->pos >= length ? rx->trailer_bytes + (rx->pos - length)
		      : rx->bounce	  ? rx->bounce->bytes + rx->pos
					  : NULL;
	int r = 0;

	if (to && to != seal->plain)
		memcpy(to, seal->plain, n);
	tcp_seal_taken(seal, n);
	if (rx->active)
		rx->pos += n;
	else
		rx->got += n;
	if (rx->active && rx->pos == length + TCP_TRAILER_BYTES)
		r = tcp_rx_end_frame(stream);
	else if (!rx->active && rx->got == TCP_HEAD_BYTES)
		r = tcp_rx_begin_frame(stream);
	return err_pass(r);
}

/* The next record, to where its bytes are wanted, if that is known. */
static int tcp_rx_unseal(struct tcp_half *rx)
{
	bool known = rx->active && rx->bounce && rx->pos < rx->head.length;

	/* bytes of the next frame are not: they have another destination */
	return tcp_seal_open(rx->seal, known ? rx->bounce->bytes + rx->pos : NULL,
			     known ? rx->head.length - rx->pos + TCP_TRAILER_BYTES + 1 +
					     TCP_RECORD_TAG
				   : 0);
}

/* One read, and all records that are whole then. */
static int tcp_rx_open(struct tcp_stream *stream, enum outcome *outcome_p)
{
	struct tcp_half *rx = &stream->rx;
	ssize_t n;
	int r;

	if (!tcp_half_lend(stream->thread, rx))
		return err_pass(-ENOMEM);
	n = tcp_seal_fill(rx->seal, stream->fd);
	*outcome_p = n > 0 ? CAME : nothing_came(stream, n, errno);
	while ((r = tcp_rx_unseal(rx)) > 0)
		while (rx->seal->plain_len > 0) {
			r = tcp_rx_use(stream);
			if (r < 0)
				return err_pass(r);
		}
	tcp_half_reclaim(stream->thread, rx);
	return err_pass(r);
}

bool tcp_rx_work(struct tcp_stream *stream)
{
	struct tcp_half *rx = &stream->rx;
	int r = 0;

	for (unsigned int calls = CALLS_A_TURN; calls > 0 && r == 0; calls--) {
		enum outcome outcome = CAME;

		if (rx->seal)
			r = tcp_rx_open(stream, &outcome);
		else
			outcome = rx->active ? tcp_rx_pull(stream) : pull_head(stream);
		if (outcome != CAME && r == 0)
			return false;
		if (rx->seal)
			continue;
		if (rx->active &&
		    rx->pos == (uint64_t)rx->head.length + TCP_TRAILER_BYTES)
			r = tcp_rx_end_frame(stream);
		if (r == 0 && !rx->active && rx->got == TCP_HEAD_BYTES)
			r = tcp_rx_begin_frame(stream);
	}
	if (r == 0)
		return true;
	tcp_stream_fail(stream);
	return false;
}
