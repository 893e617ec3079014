/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How two daemons get their connections.
 *
 *   dialer              dialed side
 *   connect, CONTROL {token}  ------->  pending; the token is this peer's
 *                             <-------  WELCOME {token}, a pass for each stream
 *   connect, STREAM {pass}    ------->  pending; the pass is this stream's
 *                             <-------  STREAM_OK {the pass's other half}
 *
 * Each side has shown the other what only the handshake, which is encrypted and
 * authenticated, can have told it, before a byte of a transfer moves. Passes are
 * random and new each time, so neither can be used again.
 *
 * The control line is tried at all addresses of the peer in turn, until the
 * connect time is over. The dialed side waits for as long as the daemon above
 * wants: a forger must not make it give up. Once the control line is there, the
 * streams have the connect time to follow.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <errno.h>
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
	size_t need, got;
	uint8_t in[TCP_HELLO_BYTES + TCP_STREAMS_MAX * TCP_PASS_BYTES];
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

static void stream_up(struct tcp_stream *stream, int owned_fd)
{
	struct tcp_peer *peer = stream->peer;

	tcp_socket_tune(peer->transport, owned_fd, true);
	stream->fd = owned_fd;
	stream->up = true;
	tcp_io_add(stream);
	if (++peer->streams_up == peer->stream_count)
		tcp_peer_joined(peer);
}

static int tcp_dial_say(int fd, const struct tcp_hello *hello)
{
	uint8_t bytes[TCP_HELLO_BYTES];

	tcp_hello_put(hello, bytes);
	/* the first bytes of a connection: there is room for them */
	if (send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL | MSG_DONTWAIT) !=
	    (ssize_t)sizeof(bytes))
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

static int tcp_dial_welcome(struct tcp_peer *peer)
{
	uint8_t bytes[TCP_HELLO_BYTES + TCP_STREAMS_MAX * TCP_PASS_BYTES];
	struct tcp_hello hello = {.role = TCP_WELCOME,
				  .verify = peer->verify,
				  .streams = peer->stream_count};
	size_t len = TCP_HELLO_BYTES + peer->stream_count * (size_t)TCP_PASS_BYTES;
	struct tcp_chunk *chunk = tcp_chunk_new(len);

	if (!chunk)
		return err_pass(-ENOMEM);
	memcpy(hello.token, peer->net.token_out, XP_TOKEN_BYTES);
	tcp_hello_put(&hello, bytes);
	for (unsigned int i = 0; i < peer->stream_count; i++) {
		struct tcp_stream *stream = &peer->streams[i];

		loop_random(peer->net.timer.loop, stream->pass, TCP_PASS_BYTES);
		memcpy(bytes + TCP_HELLO_BYTES + i * (size_t)TCP_PASS_BYTES, stream->pass,
		       TCP_PASS_BYTES);
	}
	tcp_chunk_raw(peer, chunk, bytes, len);
	tcp_line_flush(peer);
	return 0;
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
	peer->verify =
		transport->verify != TCP_VERIFY_NONE ? transport->verify : hello->verify;
	sm_move(&peer->net.sm, NET_PEER_JOINING);
	peer->join_deadline_ns =
		loop_now_ns(peer->net.timer.loop) + transport->acceptor.wait_ns;
	net_peer_watch(&peer->net, peer->join_deadline_ns);
	r = tcp_line_open(peer, owned_fd);
	if (r == 0)
		r = streams_make(peer, count);
	if (r == 0)
		r = tcp_dial_welcome(peer);
	if (r < 0)
		net_peer_fail_last(&peer->net);
}

void tcp_join_stream(struct tcp_stream *stream, int owned_fd)
{
	struct tcp_hello hello = {.role = TCP_STREAM_OK};

	memcpy(hello.token, stream->pass + XP_TOKEN_BYTES, XP_TOKEN_BYTES);
	if (tcp_dial_say(owned_fd, &hello) < 0) {
		close(owned_fd);
		net_peer_fail_last(&stream->peer->net);
		return;
	}
	stream_up(stream, owned_fd);
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
	dial->need = TCP_HELLO_BYTES;
	dial->fd =
		socket(sa->any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	loop_fd_init(&dial->watch, peer->net.timer.loop, dial->fd, on_dial);
	if (dial->fd < 0 || (connect(dial->fd, &sa->any, tcp_sockaddr_len(sa)) < 0 &&
			     errno != EINPROGRESS)) {
		err_raise(ERR_PEER, "tcp: connect: %s", strerror(errno));
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

void tcp_dial_start(struct tcp_peer *peer)
{
	tcp_sockaddr_text(&peer->address.list[peer->address_at], peer->place,
			  sizeof(peer->place));
	if (dial_new(peer, NULL, &peer->dial) < 0) {
		log_debug("tcp", peer->net.name, "cannot connect", "to=%s why=\"%s\"",
			  peer->place, err_last()->text);
		err_clear();
		peer->address_at = (peer->address_at + 1) % peer->address.count;
		peer->again_ns = loop_clock_ns(peer->net.timer.loop) + AGAIN_NS;
		net_peer_watch(&peer->net, peer->again_ns);
	}
}

void tcp_dial_again(struct tcp_peer *peer)
{
	if (peer->net.dial && !peer->dial &&
	    sm_state(&peer->net.sm) == NET_PEER_OPENING && peer->again_ns &&
	    loop_now_ns(peer->net.timer.loop) >= peer->again_ns) {
		peer->again_ns = 0;
		tcp_dial_start(peer);
	}
}

/* With the recorded error. A control line is tried again elsewhere. */
static void dial_failed(struct tcp_dial *dial)
{
	struct tcp_peer *peer = dial->peer;

	if (dial->stream) {
		net_peer_fail_last(&peer->net);
		dial_free(&dial->stream->dial);
		return;
	}
	log_debug("tcp", peer->net.name, "cannot connect", "to=%s why=\"%s\"",
		  peer->place, err_last()->text);
	err_clear();
	dial_free(&peer->dial);
	peer->address_at = (peer->address_at + 1) % peer->address.count;
	peer->again_ns = loop_now_ns(peer->net.timer.loop) + AGAIN_NS;
	net_peer_watch(&peer->net, peer->again_ns);
}

static int dial_hello(struct tcp_dial *dial)
{
	struct tcp_peer *peer = dial->peer;
	struct tcp_hello hello = {
		.role = dial->stream ? TCP_STREAM : TCP_CONTROL,
		.verify = peer->transport->verify,
		.streams = peer->transport->stream_count,
	};
	socklen_t len = sizeof(int);
	int no = 0;

	if (getsockopt(dial->fd, SOL_SOCKET, SO_ERROR, &no, &len) < 0)
		no = errno;
	if (no)
		return err_raise(ERR_PEER, "tcp: connect: %s", strerror(no));
	dial->connected = true;
	memcpy(hello.token, dial->stream ? dial->stream->pass : peer->net.token_out,
	       XP_TOKEN_BYTES);
	if (tcp_dial_say(dial->fd, &hello) < 0)
		return err_pass(-err_errno(ERR_PEER));
	return err_pass(loop_fd_set(&dial->watch, LOOP_READ));
}

/* The control line's answer, or the beginning of it. */
static int take_welcome(struct tcp_dial *dial)
{
	struct tcp_peer *peer = dial->peer;
	struct tcp_hello hello;
	int r = tcp_hello_get(dial->in, &hello);

	if (r < 0)
		return err_pass(r);
	if (hello.role != TCP_WELCOME ||
	    !tcp_token_equal(hello.token, peer->net.token_in))
		return err_raise(ERR_AUTH, "tcp: %s does not know our token",
				 peer->place);
	if (hello.streams > peer->transport->stream_count ||
	    (hello.verify == TCP_VERIFY_NONE && peer->transport->verify != hello.verify))
		return err_raise(ERR_PROTO, "tcp: %u streams, checksums of kind %u",
				 hello.streams, hello.verify);
	dial->need = TCP_HELLO_BYTES + hello.streams * (size_t)TCP_PASS_BYTES;
	peer->verify = hello.verify;
	return 0;
}

/* The control line is there, and passes for the streams. */
static void dial_streams(struct tcp_peer *peer)
{
	struct tcp_dial *dial = peer->dial;
	unsigned int count =
		(unsigned int)((dial->need - TCP_HELLO_BYTES) / TCP_PASS_BYTES);
	int fd = mem_steal_fd(&dial->fd), r;

	loop_fd_stop(&dial->watch);
	tcp_socket_tune(peer->transport, fd, false);
	sm_move(&peer->net.sm, NET_PEER_JOINING);
	r = tcp_line_open(peer, fd);
	if (r == 0)
		r = streams_make(peer, count);
	for (unsigned int i = 0; r == 0 && i < count; i++) {
		memcpy(peer->streams[i].pass,
		       dial->in + TCP_HELLO_BYTES + i * (size_t)TCP_PASS_BYTES,
		       TCP_PASS_BYTES);
		r = dial_new(peer, &peer->streams[i], &peer->streams[i].dial);
	}
	dial_free(&peer->dial);
	if (r < 0)
		net_peer_fail_last(&peer->net);
}

static int take_stream_ok(struct tcp_dial *dial)
{
	struct tcp_stream *stream = dial->stream;
	struct tcp_hello hello;
	int r = tcp_hello_get(dial->in, &hello), fd;

	if (r < 0)
		return err_pass(r);
	if (hello.role != TCP_STREAM_OK ||
	    !tcp_token_equal(hello.token, stream->pass + XP_TOKEN_BYTES))
		return err_raise(ERR_AUTH, "tcp: a stream to %s has the wrong answer",
				 stream->peer->place);
	fd = mem_steal_fd(&dial->fd);
	dial_free(&stream->dial);
	stream_up(stream, fd);
	return 0;
}

static int dial_read(struct tcp_dial *dial)
{
	ssize_t n = recv(dial->fd, dial->in + dial->got, dial->need - dial->got,
			 MSG_DONTWAIT);
	int r = 0;

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (n <= 0)
		return err_raise(ERR_PEER, "tcp: %s hung up%s%s", dial->peer->place,
				 n < 0 ? ": " : "", n < 0 ? strerror(errno) : "");
	dial->got += (size_t)n;
	if (dial->got == TCP_HELLO_BYTES && dial->stream)
		return err_pass(take_stream_ok(dial));
	if (dial->got == TCP_HELLO_BYTES)
		r = take_welcome(dial);
	if (r == 0 && dial->got == dial->need)
		dial_streams(dial->peer);
	return err_pass(r);
}

static void on_dial(struct loop_fd *watch, int events)
{
	struct tcp_dial *dial = container_of(watch, struct tcp_dial, watch);
	int r;

	(void)events;
	if (!net_peer_live(&dial->peer->net))
		return; /* tcp_dial_stop() is on its way */
	r = dial->connected ? dial_read(dial) : dial_hello(dial);
	if (r < 0)
		dial_failed(dial);
}
