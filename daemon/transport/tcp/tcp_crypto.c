/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether and how a peer's connections are sealed. Both ends state in their hellos what
 * they require, and the stronger requirement applies to all connections of the peering.
 * The loop seals the control line itself; a stream is left to the kernel where that has
 * TLS, else its I/O thread seals it in a buffer that it provides while data is in flight.
 *
 * Record numbers are implicit, so a dropped record breaks the next one's tag. An empty
 * frame (BEAT) follows the last frame of a burst for that.
 */
#include <errno.h>
#include <sys/socket.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/transport/tcp/tcp_impl.h"
#include "daemon/transport/tcp/tcp_ktls.h"

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

void tcp_crypto_agree(struct tcp_peer *peer, const struct tcp_hello *dialer,
		      const struct tcp_hello *dialed)
{
	peer->verify = dialed->verify;
	peer->crypto = dialed->crypto;
	peer->kernel = peer->crypto == TCP_CRYPTO_AES128GCM &&
		       (dialer->kernel || dialed->kernel);
}

/* ---- seals ---- */

int tcp_crypto_line(struct tcp_peer *peer)
{
	const struct tcp_traffic *traffic = &peer->keys.line;
	struct tcp_line *line = &peer->line;
	bool dial = peer->net.dial;
	int r;

	if (peer->crypto == TCP_CRYPTO_NONE)
		return 0;
	line->records = mem_alloc(2 * TCP_RECORD_BYTES);
	if (!line->records)
		return err_pass(-ENOMEM);
	r = tcp_seal_new(dial ? &traffic->dialer : &traffic->dialed, true, peer->net.name,
			 &line->seal);
	if (r == 0)
		r = tcp_seal_new(dial ? &traffic->dialed : &traffic->dialer, true,
				 peer->net.name, &line->open);
	if (r < 0)
		return err_pass(r);
	tcp_seal_lend(line->seal, line->records, TCP_RECORD_BYTES);
	tcp_seal_lend(line->open, line->records + TCP_RECORD_BYTES, TCP_RECORD_BYTES);
	return 0;
}

int tcp_crypto_stream(struct tcp_stream *stream, const struct tcp_traffic *traffic)
{
	struct tcp_peer *peer = stream->peer;
	bool dial = peer->net.dial, rekeys = !peer->kernel, kernel;
	const struct tcp_secret *send = dial ? &traffic->dialer : &traffic->dialed;
	const struct tcp_secret *receive = dial ? &traffic->dialed : &traffic->dialer;
	int r = 0;

	if (peer->crypto == TCP_CRYPTO_NONE)
		return 0;
	kernel = peer->kernel && peer->transport->kernel && tcp_ktls_begin(stream->fd);
	if (!kernel || !tcp_ktls_receive(stream->fd, receive))
		r = tcp_seal_new(receive, rekeys, peer->net.name, &stream->rx.seal);
	if (r == 0 && (!kernel || !tcp_ktls_send(stream->fd, send)))
		r = tcp_seal_new(send, rekeys, peer->net.name, &stream->tx.seal);
	return err_pass(r);
}

const char *tcp_crypto_tell(const struct tcp_peer *peer)
{
	if (peer->crypto == TCP_CRYPTO_NONE)
		return NULL;
	for (unsigned int i = 0; i < peer->stream_count; i++)
		if (peer->streams[i].tx.seal || peer->streams[i].rx.seal)
			return tcp_crypto_word(peer->crypto);
	return "aes128gcm-ktls";
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
