/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection of the tcp backend: one control line and some streams to the peer's data
 * port. They share one lifetime: a peer that loses one of them has lost unknown bytes or
 * answers, so all of it is lost.
 *
 * Loss. A broken line or stream, a broken rule, a fence that is late only mark the peer
 * (net_peer_fail): from then on nothing more is taken in. Its step stops every transfer;
 * each is quiesced as soon as no I/O thread holds its memory. When the threads have
 * released the streams as well, the transfers are reported, and after them the loss.
 *
 * While the control line works (an orderly close, a peer that broke a rule) this side
 * sends BYE first and gives the wire FLUSH_NS for it: the last answers arrive, and the
 * other side learns why.
 *
 * A connection whose other end vanished without a BYE is found by the kernel: bytes
 * without acknowledgement, or keep-alives without answer, for longer than the transport's
 * timeout end it. The handshake's pings are usually faster.
 *
 * tcp_peer_step() is where done and lost callbacks are called from; requests are
 * handed up as their frames are read.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define FLUSH_NS (250 * LOOP_NS_PER_MS)

static bool tcp_peer_invariant(const struct sm *sm, unsigned int from)
{
	const struct tcp_peer *peer = container_of(sm, const struct tcp_peer, net.sm);

	(void)from;
	if (sm_state(sm) == NET_PEER_ENDED)
		return peer->line.fd < 0 && list_empty(&peer->net.xfers);
	return sm_state(sm) != NET_PEER_READY || peer->streams_up == peer->stream_count;
}

const struct sm_table tcp_peer_table = {
	.name = "tcp peer",
	.states = net_peer_states,
	.count = NET_PEER_STATES,
	.invariant = tcp_peer_invariant,
};

static struct tcp_peer *tcp_peer_of(struct net_peer *net)
{
	return container_of(net, struct tcp_peer, net);
}

void tcp_peer_break(struct tcp_peer *peer, const char *what, int no)
{
	struct err err;

	err_set(&err, ERR_PEER, "tcp: connection to %s lost: %s%s%s", peer->net.name,
		what, no ? ": " : "", no ? strerror(no) : "");
	peer->net.broken = true;
	net_peer_fail(&peer->net, &err);
}

/* ---- deadlines ---- */

static void watch_join(struct tcp_peer *peer, uint64_t now)
{
	struct err err;

	if (sm_state(&peer->net.sm) >= NET_PEER_READY || !peer->join_deadline_ns)
		return;
	if (now < peer->join_deadline_ns) {
		tcp_dial_look(peer, now);
		net_peer_watch(&peer->net, peer->join_deadline_ns);
		return;
	}
	if (sm_state(&peer->net.sm) == NET_PEER_OPENING)
		tcp_dial_why(peer, &err);
	else
		err_set(&err, ERR_TIMEOUT,
			"no data connection %s %s%s: %u of %u streams connected",
			peer->net.dial ? "to" : "from", peer->place,
			peer->net.dial ? " (tcp_listen)" : "", peer->streams_up,
			peer->stream_count);
	net_peer_fail(&peer->net, &err);
}

static void tcp_peer_on_timer(struct loop_timer *timer)
{
	struct tcp_peer *peer = container_of(timer, struct tcp_peer, net.timer);
	uint64_t now = loop_now_ns(timer->loop);

	if (net_peer_live(&peer->net)) {
		watch_join(peer, now);
		if (net_peer_watch_fences(&peer->net, now))
			peer->net.broken = true; /* it does not listen */
	} else {
		net_peer_kick(&peer->net);
	}
}

/* ---- the end ---- */

static void tcp_peer_begin_end(struct tcp_peer *peer)
{
	tcp_dial_stop(peer);
	tcp_line_fini(peer);
	net_peer_end(&peer->net);
	for (unsigned int i = 0; i < peer->stream_count; i++)
		if (peer->streams[i].fd >= 0)
			tcp_io_remove(&peer->streams[i]);
}

static void tcp_peer_begin_flush(struct tcp_peer *peer)
{
	struct tcp_head head = {.type = TCP_BYE};
	struct tcp_chunk *chunk = tcp_chunk_new(TCP_TEXT_MAX);
	struct err err;

	net_peer_flush(&peer->net, FLUSH_NS, &err);
	if (chunk && !peer->net.bye_came)
		tcp_line_send(peer, chunk, &head, &err);
	else
		mem_free(chunk);
}

static bool streams_gone(struct tcp_peer *peer)
{
	bool gone = true;

	pthread_mutex_lock(&peer->lock);
	for (unsigned int i = 0; i < peer->stream_count; i++)
		gone &= peer->streams[i].fd < 0 || peer->streams[i].gone;
	pthread_mutex_unlock(&peer->lock);
	return gone;
}

void tcp_peer_free(struct net_peer *net)
{
	struct tcp_peer *peer = tcp_peer_of(net);

	net_peer_fini(net);
	mailbox_forget(&peer->transport->events, &peer->event_link);
	tcp_line_fini(peer);
	for (unsigned int i = 0; i < peer->stream_count; i++) {
		mem_closep(&peer->streams[i].fd);
		tcp_seal_free(peer->streams[i].tx.seal);
		tcp_seal_free(peer->streams[i].rx.seal);
	}
	mem_free(peer->streams);
	tcp_keys_wipe(&peer->keys);
	assert(peer->held_bytes == 0 && list_empty(&peer->flow_events));
	idmap_fini(&peer->sinks[0]);
	idmap_fini(&peer->sinks[1]);
	pthread_mutex_destroy(&peer->lock);
	mem_free(peer);
}

/* BYE was sent: then this side's half of the line is closed, and the other side closes
 * the rest when it has read BYE. */
static void flush_step(struct tcp_peer *peer)
{
	struct tcp_line *line = &peer->line;

	tcp_line_flush(peer);
	if (tcp_line_sent(line) && !peer->shut && line->fd >= 0) {
		peer->shut = true;
		(void)shutdown(line->fd, SHUT_WR);
	}
	if (peer->net.broken || (peer->net.bye_came && tcp_line_sent(line)) ||
	    loop_now_ns(peer->net.timer.loop) >= peer->net.flush_deadline_ns)
		tcp_peer_begin_end(peer);
	else /* the timer may have fired for an earlier deadline */
		net_peer_watch(&peer->net, peer->net.flush_deadline_ns);
}

/* ---- the step ---- */

void tcp_peer_flush(struct net_peer *net)
{
	tcp_line_flush(tcp_peer_of(net));
}

static void tcp_peer_take_events(struct tcp_peer *peer)
{
	struct tcp_flow_view view;
	struct tcp_flow *flow;
	struct err io_err;

	while ((flow = tcp_flow_next_event(peer))) {
		struct tcp_xfer *xfer = container_of(flow, struct tcp_xfer, flow);

		tcp_flow_look(flow, &view);
		if (view.err.code != ERR_OK)
			net_xfer_stop(&xfer->net, &view.err);
		net_xfer_check(&xfer->net);
	}
	pthread_mutex_lock(&peer->lock);
	io_err = peer->io_err;
	pthread_mutex_unlock(&peer->lock);
	if (io_err.code == ERR_OK || peer->net.failed)
		return;
	io_err.scope = ERR_SCOPE_PEER;
	net_peer_fail(&peer->net, &io_err);
}

void tcp_peer_joined(struct tcp_peer *peer)
{
	snprintf(peer->net.base.path, sizeof(peer->net.base.path),
		 "tcp %.36s, %u stream%s", peer->place, peer->stream_count,
		 peer->stream_count == 1 ? "" : "s");
	sm_move(&peer->net.sm, NET_PEER_READY);
	peer->join_deadline_ns = 0;
	peer->net.base.encrypts = peer->crypto == TCP_CRYPTO_AES128GCM;
	if (peer->net.base.encrypts)
		peer->net.base.crypto = tcp_crypto_word(peer->crypto);
	tcp_keys_wipe(&peer->keys); /* all connections have theirs */
	tcp_line_listen(peer);
	net_peer_kick(&peer->net);
}

void tcp_peer_step(struct net_peer *net)
{
	struct tcp_peer *peer = tcp_peer_of(net);

	if (sm_state(&net->sm) == NET_PEER_READY && !net->base.ready && !net->failed)
		net_peer_ready(net);
	tcp_peer_take_events(peer);
	if (net->failed && sm_state(&net->sm) == NET_PEER_READY && !net->broken)
		tcp_peer_begin_flush(peer);
	else if (net->failed && sm_state(&net->sm) < NET_PEER_FLUSHING)
		tcp_peer_begin_end(peer);
	net_peer_tell(net);
	if (net_peer_live(net))
		tcp_line_resume(peer);
	if (net_peer_live(net))
		net_xfer_pump(net);
	if (!peer->line.more)
		net_peer_stepped(net);
	if (sm_state(&net->sm) == NET_PEER_FLUSHING)
		flush_step(peer);
	if (sm_state(&net->sm) == NET_PEER_ENDING && streams_gone(peer)) {
		net_xfers_drop(net);
		if (list_empty(&net->xfers))
			sm_move(&net->sm, NET_PEER_ENDED);
	}
	net_peer_settle(net);
}

/* ---- open and close ---- */

static void tcp_peer_init(struct tcp_peer *peer, struct tcp_transport *transport,
			  const struct xp_peer_args *args)
{
	net_peer_init(&peer->net, &transport->net, args, tcp_peer_on_timer);
	peer->transport = transport;
	tcp_line_init(&peer->line);
	list_init(&peer->event_link);
	list_init(&peer->sources);
	list_init(&peer->flow_events);
	idmap_init(&peer->sinks[0]);
	idmap_init(&peer->sinks[1]);
	pthread_mutex_init(&peer->lock, NULL);
}

int tcp_peer_open(struct transport *base, const struct xp_peer_args *args,
		  struct xp_peer **peer_p)
{
	struct tcp_transport *transport =
		container_of(base, struct tcp_transport, net.base);
	struct tcp_peer *peer;
	int r;

	if (args->self)
		return err_raise(ERR_REQUIRE, "tcp: no connection to this daemon itself");
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	tcp_peer_init(peer, transport, args);
	r = tcp_address_get(args->address, args->address_len, &peer->address);
	if (r == 0)
		r = tcp_keys_begin(&peer->keys,
				   args->dial ? args->token_out : args->token_in,
				   args->dial ? args->token_in : args->token_out);
	if (r < 0) {
		tcp_peer_free(&peer->net);
		return err_pass(r);
	}
	list_push_back(&transport->net.peers, &peer->net.link);
	if (peer->net.dial) {
		/* the clock, not the turn: opening may have taken a good part of it */
		peer->join_deadline_ns =
			loop_clock_ns(peer->net.timer.loop) + transport->acceptor.wait_ns;
		net_peer_watch(&peer->net, peer->join_deadline_ns);
		tcp_dial_start(peer);
	} else {
		tcp_accept_match(peer);
	}
	*peer_p = (struct xp_peer *)peer;
	return 0;
}

void tcp_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg)
{
	struct tcp_peer *peer = (struct tcp_peer *)base;

	net_peer_close_ask(&peer->net, on_closed, arg);
	if (sm_state(&peer->net.sm) == NET_PEER_READY && !peer->net.failed)
		tcp_peer_begin_flush(peer);
	else if (sm_state(&peer->net.sm) < NET_PEER_READY)
		tcp_peer_begin_end(peer);
}
