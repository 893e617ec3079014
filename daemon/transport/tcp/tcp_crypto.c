/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether and how a peer's connections are sealed. Both ends state in their hellos what
 * they require, and the stronger requirement applies to all connections of the peering.
 * The loop seals the control line itself, and a stream's I/O thread the stream, in a
 * buffer that it provides while data is in flight.
 *
 * Record numbers are implicit, so a dropped record breaks the next one's tag. An empty
 * frame (BEAT) follows the last frame of a burst for that.
 */
#include <errno.h>
#include <sys/socket.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/transport/tcp/tcp_impl.h"

static const char *const words[] = {"none", "aes128gcm"};

const char *tcp_crypto_word(enum tcp_crypto crypto)
{
	return crypto < TCP_CRYPTO_END ? words[crypto] : "auto";
}

/* ---- requirements, and the result ---- */

static bool place_is_loopback(const union net_place *place)
{
	const struct in6_addr *a = &place->v6.sin6_addr;

	if (place->any.sa_family == AF_INET)
		return ntohl(place->v4.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
	return IN6_IS_ADDR_LOOPBACK(a) ||
	       (IN6_IS_ADDR_V4MAPPED(a) && a->s6_addr[12] == IN_LOOPBACKNET);
}

enum tcp_crypto tcp_crypto_wish(const struct tcp_transport *transport, int fd)
{
	union net_place here = {0}, there = {0};
	socklen_t len = sizeof(here), other = sizeof(there);

	if (transport->crypto != TCP_CRYPTO_END)
		return transport->crypto;
	if (getsockname(fd, &here.any, &len) == 0 &&
	    getpeername(fd, &there.any, &other) == 0 && place_is_loopback(&here) &&
	    place_is_loopback(&there))
		return TCP_CRYPTO_NONE;
	return TCP_CRYPTO_AES128GCM;
}

/* ---- seals ---- */

/* Of sent and of received bytes. */
static int seals_new(const struct tcp_peer *peer, const struct tcp_traffic *traffic,
		     struct tcp_seal **seal_p, struct tcp_seal **open_p)
{
	bool dial = peer->net.dial;
	int r = tcp_seal_new(dial ? &traffic->dialer : &traffic->dialed, peer->net.name,
			     seal_p);

	if (r == 0)
		r = tcp_seal_new(dial ? &traffic->dialed : &traffic->dialer,
				 peer->net.name, open_p);
	return err_pass(r);
}

int tcp_crypto_line(struct tcp_peer *peer)
{
	struct tcp_line *line = &peer->line;
	int r;

	if (peer->crypto == TCP_CRYPTO_NONE)
		return 0;
	line->records = mem_alloc(2 * TCP_RECORD_BYTES);
	if (!line->records)
		return err_pass(-ENOMEM);
	r = seals_new(peer, &peer->keys.line, &line->seal, &line->open);
	if (r < 0)
		return err_pass(r);
	tcp_seal_lend(line->seal, line->records, TCP_RECORD_BYTES);
	tcp_seal_lend(line->open, line->records + TCP_RECORD_BYTES, TCP_RECORD_BYTES);
	return 0;
}

int tcp_crypto_stream(struct tcp_stream *stream, const struct tcp_traffic *traffic)
{
	if (stream->peer->crypto == TCP_CRYPTO_NONE)
		return 0;
	return err_pass(
		seals_new(stream->peer, traffic, &stream->tx.seal, &stream->rx.seal));
}

/* ---- dropped last records ---- */

/* A missing record is detected when the next one arrives: so a BEAT follows a last one.
 * An attacker that drops that, too, and all later ones, has cut the connection: requests
 * have their own timeouts. */
bool tcp_crypto_beat(struct tcp_peer *peer)
{
	struct tcp_head head = {.type = TCP_BEAT};
	bool any = peer->line.said;
	struct tcp_chunk *chunk;

	if (!net_peer_live(&peer->net) || sm_state(&peer->net.sm) != NET_PEER_READY)
		return false;
	if (peer->line.said && (chunk = tcp_chunk_new(0)))
		tcp_line_send(peer, chunk, &head, NULL);
	peer->line.said = false;
	pthread_mutex_lock(&peer->lock);
	for (unsigned int i = 0; i < peer->stream_count; i++) {
		struct tcp_stream *stream = &peer->streams[i];

		any |= stream->said;
		if (!stream->said || !stream->idle)
			continue;
		stream->said = stream->idle = false;
		stream->beat = true;
		tcp_io_kick(stream);
	}
	pthread_mutex_unlock(&peer->lock);
	return any;
}

/* ---- buffers of streams ---- */

bool tcp_half_lend(struct tcp_thread *thread, struct tcp_half *half)
{
	if (half->record)
		return true;
	half->record = tcp_bounce_take(thread);
	if (half->record)
		tcp_seal_lend(half->seal, half->record->bytes, TCP_BOUNCE_BYTES);
	return half->record;
}

void tcp_half_reclaim(struct tcp_thread *thread, struct tcp_half *half)
{
	if (tcp_seal_busy(half->seal))
		return;
	tcp_bounce_give(thread, &half->record);
	tcp_seal_lend(half->seal, NULL, 0);
}
