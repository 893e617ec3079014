/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How two daemons get their connections.
 *
 *   dialer              dialed side
 *   connect, CONTROL          ------->  pending; it names this peer, and proves it
 *                             <-------  WELCOME
 *   connect, STREAM {number}  ------->  pending; it names the session, and proves it
 *                             <-------  STREAM_OK
 *
 * Each side has proven to the other that it knows a secret from the handshake, which is
 * encrypted and authenticated, before a byte of a transfer moves (tcp_keys.h). Every
 * hello has fresh random bytes, so none can be replayed.
 *
 * The hellos also agree on the protection of the following bytes: the stronger of both
 * sides' requirements. The proofs cover both requirements, so no attacker in between can
 * weaken them.
 *
 * The control line is tried at all addresses of the peer in turn, each for its part of
 * the connect time, because one may drop packets silently. The dialed side waits until
 * the daemon above gives up: a forger must not shorten that. Once the control line is up,
 * the streams have the connect time to follow.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define AGAIN_NS (100 * LOOP_NS_PER_MS)

struct tcp_dial {
	struct tcp_peer *peer;
	struct tcp_stream *stream; /* NULL: the control line */
	int fd;
	struct loop_fd watch;
	bool connected;
	size_t got;
	uint8_t said[TCP_HELLO_BYTES], in[TCP_HELLO_BYTES];
	struct tcp_hello wish;
};

static void dial_free(struct tcp_dial **dial)
{
	if (!*dial)
		return;
	loop_fd_stop(&(*dial)->watch);
	mem_closep(&(*dial)->fd);
	mem_free(*dial);
	*dial = NULL;
}

void tcp_dial_stop(struct tcp_peer *peer)
{
	dial_free(&peer->dial);
	for (unsigned int i = 0; i < peer->stream_count; i++)
		dial_free(&peer->streams[i].dial);
}

/* Why the current attempt cannot succeed; negative. */
static int dial_timed_out(const struct tcp_dial *dial)
{
	return err_raise(ERR_TIMEOUT, "%s",
			 dial->connected ? "wrong proof in its answer" : "timed out");
}

void tcp_dial_why(const struct tcp_peer *peer, struct err *why_p)
{
	const char *words = peer->refused;

	if (peer->dial && !*words) {
		dial_timed_out(peer->dial);
		words = err_last()->text;
	}
	err_set(why_p, ERR_TIMEOUT, "no data connection to %s%s (tcp_listen): %s",
		peer->place, peer->address.count > 1 ? ", the last of several" : "",
		words);
	err_clear();
}

/* ---- streams, on either side ---- */

static int streams_make(struct tcp_peer *peer, unsigned int count)
{
	peer->streams = mem_calloc(count, sizeof(*peer->streams));
	if (!peer->streams)
		return err_pass(-ENOMEM);
	peer->stream_count = count;
	for (unsigned int i = 0; i < count; i++) {
		struct tcp_stream *stream = &peer->streams[i];

		stream->peer = peer;
		stream->index = i;
		stream->fd = -1;
		list_init(&stream->kick_link);
		list_init(&stream->busy_link);
	}
	return 0;
}

static int stream_up(struct tcp_stream *stream, int owned_fd,
		     const struct tcp_traffic *traffic)
{
	struct tcp_peer *peer = stream->peer;
	int r;

	tcp_socket_tune(peer->transport, owned_fd, true);
	stream->fd = owned_fd;
	r = tcp_crypto_stream(stream, traffic);
	if (r < 0) {
		mem_closep(&stream->fd);
		stream->fd = -1;
		return err_pass(r);
	}
	stream->up = true;
	tcp_io_add(stream);
	if (++peer->streams_up == peer->stream_count)
		tcp_peer_joined(peer);
	return 0;
}

static int tcp_dial_say(int fd, const uint8_t bytes[TCP_HELLO_BYTES])
{
	/* the first bytes of a connection: the buffer has room for them */
	if (send(fd, bytes, TCP_HELLO_BYTES, MSG_NOSIGNAL | MSG_DONTWAIT) !=
	    (ssize_t)TCP_HELLO_BYTES)
		return err_raise(ERR_PEER, "tcp: hello: %s", strerror(errno));
	return 0;
}

/* ---- the dialed side ---- */

static void place_of(int fd, struct tcp_peer *peer)
{
	union net_place sa;
	socklen_t len = sizeof(sa);

	memset(&sa, 0, sizeof(sa));
	if (getpeername(fd, &sa.any, &len) == 0)
		tcp_sockaddr_text(&sa, peer->place, sizeof(peer->place));
}

static int tcp_dial_welcome(struct tcp_peer *peer, int fd,
			    const struct tcp_hello *control, unsigned int streams)
{
	struct tcp_transport *transport = peer->transport;
	enum tcp_crypto wish = tcp_crypto_wish(transport, fd);
	struct tcp_hello hello = {.role = TCP_WELCOME,
				  .crypto =
					  control->crypto > wish ? control->crypto : wish,
				  .streams = (uint16_t)streams};
	uint8_t bytes[TCP_HELLO_BYTES];
	int r;

	loop_random(peer->net.timer.loop, hello.nonce, sizeof(hello.nonce));
	r = tcp_keys_welcome(&peer->keys, &hello, bytes);
	if (r == 0)
		r = tcp_dial_say(fd, bytes);
	if (r == 0)
		peer->crypto = hello.crypto;
	return err_pass(r);
}

void tcp_join_control(struct tcp_peer *peer, int owned_fd, const struct tcp_hello *hello)
{
	struct tcp_transport *transport = peer->transport;
	unsigned int count = hello->streams < transport->stream_count
				     ? hello->streams
				     : transport->stream_count;
	int r;

	place_of(owned_fd, peer);
	tcp_socket_tune(transport, owned_fd, false);
	sm_move(&peer->net.sm, NET_PEER_JOINING);
	peer->join_deadline_ns =
		loop_now_ns(peer->net.timer.loop) + transport->acceptor.wait_ns;
	net_peer_watch(&peer->net, peer->join_deadline_ns);
	r = streams_make(peer, count);
	if (r == 0)
		r = tcp_dial_welcome(peer, owned_fd, hello, count);
	if (r == 0)
		r = tcp_line_open(peer, owned_fd);
	else
		close(owned_fd);
	if (r < 0)
		net_peer_fail_last(&peer->net);
}

static int stream_answer(struct tcp_stream *stream, int fd,
			 const uint8_t asked[TCP_HELLO_BYTES],
			 struct tcp_traffic *traffic_p)
{
	struct tcp_hello hello = {.role = TCP_STREAM_OK,
				  .number = (uint16_t)stream->index};
	uint8_t bytes[TCP_HELLO_BYTES];
	int r;

	loop_random(stream->peer->net.timer.loop, hello.nonce, sizeof(hello.nonce));
	r = tcp_keys_stream_ok(&stream->peer->keys, asked, &hello, bytes, traffic_p);
	if (r == 0)
		r = tcp_dial_say(fd, bytes);
	return err_pass(r);
}

void tcp_join_stream(struct tcp_stream *stream, int owned_fd,
		     const uint8_t asked[TCP_HELLO_BYTES])
{
	struct tcp_traffic traffic;
	int r = stream_answer(stream, owned_fd, asked, &traffic);

	if (r < 0)
		close(owned_fd);
	else
		r = stream_up(stream, owned_fd, &traffic);
	tcp_traffic_wipe(&traffic);
	if (r < 0)
		net_peer_fail_last(&stream->peer->net);
}

/* ---- the dialer ---- */

static void on_dial(struct loop_fd *watch, int events);

static int dial_new(struct tcp_peer *peer, struct tcp_stream *stream,
		    struct tcp_dial **dial_p)
{
	const union net_place *sa = &peer->address.list[peer->address_at];
	struct tcp_dial *dial = mem_zalloc(sizeof(*dial));

	if (!dial)
		return err_pass(-ENOMEM);
	dial->peer = peer;
	dial->stream = stream;
	dial->fd =
		socket(sa->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	loop_fd_init(&dial->watch, peer->net.timer.loop, dial->fd, on_dial);
	if (dial->fd < 0 || (connect(dial->fd, &sa->any, tcp_sockaddr_len(sa)) < 0 &&
			     errno != EINPROGRESS)) {
		err_raise(ERR_PEER, "%s", strerror(errno));
		dial_free(&dial);
		return -err_errno(ERR_PEER);
	}
	if (loop_fd_set(&dial->watch, LOOP_WRITE) < 0) {
		dial_free(&dial);
		return err_pass(-ENOMEM);
	}
	*dial_p = dial;
	return 0;
}

/* With the recorded error: try the next address, a little later. */
static void dial_elsewhere(struct tcp_peer *peer)
{
	log_debug("tcp", peer->net.name, "cannot connect", "to=%s why=\"%s\"",
		  peer->place, err_last()->text);
	snprintf(peer->refused, sizeof(peer->refused), "%.159s", err_last()->text);
	err_clear();
	dial_free(&peer->dial);
	peer->address_at = (peer->address_at + 1) % peer->address.count;
	peer->again_ns = loop_clock_ns(peer->net.timer.loop) + AGAIN_NS;
	net_peer_watch(&peer->net, peer->again_ns);
}

void tcp_dial_start(struct tcp_peer *peer)
{
	uint64_t part_ns = peer->transport->acceptor.wait_ns / peer->address.count;

	peer->again_ns = 0;
	tcp_sockaddr_text(&peer->address.list[peer->address_at], peer->place,
			  sizeof(peer->place));
	if (dial_new(peer, NULL, &peer->dial) < 0) {
		dial_elsewhere(peer);
		return;
	}
	peer->dial_until_ns = loop_clock_ns(peer->net.timer.loop) + part_ns;
	net_peer_watch(&peer->net, peer->dial_until_ns);
}

void tcp_dial_look(struct tcp_peer *peer, uint64_t now)
{
	if (!peer->net.dial || sm_state(&peer->net.sm) != NET_PEER_OPENING)
		return;
	if (peer->dial && now >= peer->dial_until_ns) {
		dial_timed_out(peer->dial);
		dial_elsewhere(peer);
	} else if (!peer->dial && peer->again_ns && now >= peer->again_ns) {
		tcp_dial_start(peer);
	} else {
		net_peer_watch(&peer->net,
			       peer->dial ? peer->dial_until_ns : peer->again_ns);
	}
}

/* With the recorded error. A control line is tried again elsewhere. */
static void dial_failed(struct tcp_dial *dial)
{
	struct tcp_peer *peer = dial->peer;

	if (!dial->stream) {
		dial_elsewhere(peer);
		return;
	}
	err_prefix(-1, "no data connection to %s (tcp_listen)", peer->place);
	net_peer_fail_last(&peer->net);
	dial_free(&dial->stream->dial);
}

static int dial_hello(struct tcp_dial *dial)
{
	struct tcp_peer *peer = dial->peer;
	struct tcp_hello *hello = &dial->wish;
	socklen_t len = sizeof(int);
	int no = 0, r;

	if (getsockopt(dial->fd, SOL_SOCKET, SO_ERROR, &no, &len) < 0)
		no = errno;
	if (no)
		return err_raise(ERR_PEER, "%s",
				 no == ETIMEDOUT ? "timed out" : strerror(no));
	dial->connected = true;
	*hello = (struct tcp_hello){
		.role = dial->stream ? TCP_STREAM : TCP_CONTROL,
		.crypto = tcp_crypto_wish(peer->transport, dial->fd),
		.streams = (uint16_t)peer->transport->stream_count,
		.number = dial->stream ? (uint16_t)dial->stream->index : 0,
	};
	loop_random(peer->net.timer.loop, hello->nonce, sizeof(hello->nonce));
	r = dial->stream ? tcp_keys_stream(&peer->keys, hello, dial->said)
			 : tcp_keys_control(&peer->keys, hello, dial->said);
	if (r == 0)
		r = tcp_dial_say(dial->fd, dial->said);
	return err_pass(r < 0 ? r : loop_fd_set(&dial->watch, LOOP_READ));
}

/* Nothing in it is believed before its proof. */
static int welcome_get(const struct tcp_dial *dial, struct tcp_hello *hello_p)
{
	struct tcp_peer *peer = dial->peer;
	int r = tcp_hello_get(dial->in, hello_p);

	if (r < 0)
		return err_pass(r);
	r = tcp_keys_take_welcome(&peer->keys, dial->in);
	if (r < 0)
		return err_pass(r);
	if (hello_p->role != TCP_WELCOME ||
	    hello_p->streams > peer->transport->stream_count)
		return err_raise(ERR_PROTO, "tcp: answer of role %u with %u streams",
				 hello_p->role, hello_p->streams);
	if (hello_p->crypto < dial->wish.crypto)
		return err_raise(ERR_AUTH,
				 "it answers with tcp_crypto %s; this daemon requires %s",
				 tcp_crypto_word(hello_p->crypto),
				 tcp_crypto_word(dial->wish.crypto));
	return 0;
}

/* The control line is up: connect its streams. */
static int take_welcome(struct tcp_dial *dial)
{
	struct tcp_peer *peer = dial->peer;
	struct tcp_hello hello;
	int r = welcome_get(dial, &hello), fd;

	if (r < 0)
		return err_pass(r);
	fd = mem_steal_fd(&dial->fd);
	loop_fd_stop(&dial->watch);
	tcp_socket_tune(peer->transport, fd, false);
	peer->crypto = hello.crypto;
	sm_move(&peer->net.sm, NET_PEER_JOINING);
	r = tcp_line_open(peer, fd);
	if (r == 0)
		r = streams_make(peer, hello.streams);
	for (unsigned int i = 0; r == 0 && i < hello.streams; i++)
		r = dial_new(peer, &peer->streams[i], &peer->streams[i].dial);
	dial_free(&peer->dial);
	if (r < 0)
		net_peer_fail_last(&peer->net);
	return 0;
}

static int take_stream_ok(struct tcp_dial *dial)
{
	struct tcp_stream *stream = dial->stream;
	struct tcp_traffic traffic;
	struct tcp_hello hello;
	int r = tcp_hello_get(dial->in, &hello), fd;

	if (r == 0)
		r = tcp_keys_take_stream_ok(&stream->peer->keys, dial->said, dial->in,
					    &traffic);
	if (r == 0 && hello.role != TCP_STREAM_OK)
		r = err_raise(ERR_PROTO, "wrong answer on a stream");
	if (r == 0) {
		fd = mem_steal_fd(&dial->fd);
		dial_free(&stream->dial);
		if (stream_up(stream, fd, &traffic) < 0)
			net_peer_fail_last(&stream->peer->net);
	}
	tcp_traffic_wipe(&traffic);
	return err_pass(r);
}

static int dial_read(struct tcp_dial *dial)
{
	ssize_t n = recv(dial->fd, dial->in + dial->got, TCP_HELLO_BYTES - dial->got,
			 MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n <= 0)
		return err_raise(ERR_PEER, "it closed the connection%s%s",
				 n < 0 ? ": " : "", n < 0 ? strerror(errno) : "");
	dial->got += (size_t)n;
	if (dial->got < TCP_HELLO_BYTES)
		return 0;
	return err_pass(dial->stream ? take_stream_ok(dial) : take_welcome(dial));
}

static void on_dial(struct loop_fd *watch, int events)
{
	struct tcp_dial *dial = container_of(watch, struct tcp_dial, watch);
	int r;

	(void)events;
	if (!net_peer_live(&dial->peer->net))
		return; /* tcp_dial_stop() is pending */
	r = dial->connected ? dial_read(dial) : dial_hello(dial);
	if (r < 0)
		dial_failed(dial);
}
