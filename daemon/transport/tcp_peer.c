/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection of the tcp backend: one control line and some streams to the
 * peer's data port. They live and die together: a peer that loses one of them
 * has lost bytes or answers nobody can name, so all of it is lost.
 *
 * Loss. A broken line or stream, a broken rule, a fence that is late only mark
 * the peer (tcp_peer_fail): from then on nothing more is taken in. Its step stops
 * every transfer; each is still as soon as no I/O thread holds its memory. When
 * the threads have let go of the streams as well, the transfers are reported, and
 * after them the loss.
 *
 * While the control line still works (a close in peace, a peer that broke a rule)
 * we say goodbye first and give the wire FLUSH_NS for it: the last answers arrive,
 * and the other side learns why.
 *
 * A connection whose other end is gone without a word is found by the kernel:
 * bytes without acknowledgement, or keep-alives without answer, for longer than
 * the transport's patience end it. The handshake's pings are usually faster.
 *
 * tcp_peer_step() is where done and lost callbacks are called from; requests are
 * handed up as their frames are read.
 */
#include "daemon/transport/tcp_impl.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define FLUSH_NS (250 * LOOP_NS_PER_MS)

static const struct sm_state peer_states[] = {
	[TCP_PEER_OPENING] = {"opening", SM_TO(TCP_PEER_JOINING) | SM_TO(TCP_PEER_ENDING)},
	[TCP_PEER_JOINING] = {"joining", SM_TO(TCP_PEER_READY) | SM_TO(TCP_PEER_ENDING)},
	[TCP_PEER_READY] = {"ready", SM_TO(TCP_PEER_FLUSHING) | SM_TO(TCP_PEER_ENDING)},
	[TCP_PEER_FLUSHING] = {"flushing", SM_TO(TCP_PEER_ENDING)},
	[TCP_PEER_ENDING] = {"ending", SM_TO(TCP_PEER_ENDED)},
	[TCP_PEER_ENDED] = {"ended", 0},
};

static bool peer_invariant(const struct sm *sm, unsigned int from)
{
	const struct tcp_peer *peer = container_of(sm, const struct tcp_peer, sm);

	(void)from;
	if (sm_state(sm) == TCP_PEER_ENDED)
		return peer->line.fd < 0 && list_empty(&peer->xfers);
	return sm_state(sm) != TCP_PEER_READY || peer->streams_up == peer->stream_count;
}

static const struct sm_table peer_table = {
	.name = "tcp peer",
	.states = peer_states,
	.count = ARRAY_LEN(peer_states),
	.invariant = peer_invariant,
};

void tcp_peer_kick(struct tcp_peer *peer)
{
	struct tcp_transport *transport = peer->transport;

	if (list_empty(&peer->ready_link))
		list_push_back(&transport->ready, &peer->ready_link);
	loop_defer(transport->base.env.loop, &transport->run);
}

void tcp_peer_fail(struct tcp_peer *peer, const struct err *err)
{
	if (!peer->failed) {
		peer->failed = true;
		peer->err = *err;
	}
	tcp_peer_kick(peer);
}

void tcp_peer_fail_last(struct tcp_peer *peer)
{
	struct err err;

	err_take(&err);
	err.scope = ERR_SCOPE_PEER;
	tcp_peer_fail(peer, &err);
}

void tcp_peer_break(struct tcp_peer *peer, const char *what, int no)
{
	struct err err;

	err_set(&err, ERR_PEER, "tcp: connection to %s lost: %s%s%s", peer->name, what,
		no ? ": " : "", no ? strerror(no) : "");
	peer->broken = true;
	tcp_peer_fail(peer, &err);
}

/* ---- deadlines ---- */

void tcp_peer_watch(struct tcp_peer *peer, uint64_t deadline_ns)
{
	uint64_t now = loop_now_ns(peer->timer.loop);

	if (loop_timer_running(&peer->timer) && peer->timer.at_ns <= deadline_ns)
		return;
	if (loop_timer_start(&peer->timer, deadline_ns > now ? deadline_ns - now : 0) < 0)
		tcp_peer_fail_last(peer); /* no fence without its clock */
}

static void watch_join(struct tcp_peer *peer, uint64_t now)
{
	struct err err;

	if (sm_state(&peer->sm) >= TCP_PEER_READY || !peer->join_deadline_ns)
		return;
	tcp_dial_again(peer);
	if (now < peer->join_deadline_ns) {
		tcp_peer_watch(peer, peer->join_deadline_ns);
		return;
	}
	if (sm_state(&peer->sm) == TCP_PEER_OPENING)
		err_set(&err, ERR_TIMEOUT, "tcp: %s at %s did not answer with the right token",
			peer->name, peer->place);
	else
		err_set(&err, ERR_TIMEOUT, "tcp: %u of %u streams with %s were made",
			peer->streams_up, peer->stream_count, peer->name);
	tcp_peer_fail(peer, &err);
}

static void watch_transfers(struct tcp_peer *peer, uint64_t now)
{
	uint64_t next = UINT64_MAX;
	struct tcp_xfer *xfer;
	struct err err;

	list_foreach(xfer, &peer->xfers, link) {
		if (sm_state(&xfer->sm) != TCP_XFER_STOPPING || xfer->finishing)
			continue;
		if (xfer->deadline_ns <= now) {
			err_set(&err, ERR_FENCE,
				"tcp: a stopped transfer with %s was not still after %" PRIu64
				" ms",
				peer->name, peer->transport->fence_ns / LOOP_NS_PER_MS);
			peer->broken = true; /* it does not listen */
			tcp_peer_fail(peer, &err);
			return;
		}
		if (xfer->deadline_ns < next)
			next = xfer->deadline_ns;
	}
	if (next != UINT64_MAX)
		tcp_peer_watch(peer, next);
}

static void on_timer(struct loop_timer *timer)
{
	struct tcp_peer *peer = container_of(timer, struct tcp_peer, timer);
	uint64_t now = loop_now_ns(timer->loop);

	if (tcp_peer_live(peer)) {
		watch_join(peer, now);
		watch_transfers(peer, now);
	} else {
		tcp_peer_kick(peer);
	}
}

/* ---- the end ---- */

/* Closed in peace, unless it failed before. */
static void set_closed(struct tcp_peer *peer)
{
	if (!peer->failed)
		err_set(&peer->err, ERR_PEER, "tcp: connection to %s closed", peer->name);
	peer->failed = true;
	peer->base.ready = false;
}

static void stop_transfers(struct tcp_peer *peer)
{
	struct tcp_xfer *xfer;

	list_foreach_safe(xfer, &peer->xfers, link)
		tcp_xfer_stop(xfer, &peer->err);
	/* what stopped before waits for no answer any more */
	list_foreach_safe(xfer, &peer->xfers, link)
		tcp_xfer_check(xfer);
}

static void begin_end(struct tcp_peer *peer)
{
	set_closed(peer);
	sm_move(&peer->sm, TCP_PEER_ENDING);
	if (!peer->close_asked)
		log_debug("tcp", peer->name, "peer lost", "why=\"%s\"", peer->err.text);
	tcp_dial_stop(peer);
	tcp_line_fini(peer);
	stop_transfers(peer);
	for (unsigned int i = 0; i < peer->stream_count; i++)
		if (peer->streams[i].fd >= 0)
			tcp_io_remove(&peer->streams[i]);
	loop_timer_stop(&peer->timer);
}

static void begin_flush(struct tcp_peer *peer)
{
	struct tcp_head head = {.type = TCP_BYE};
	struct tcp_chunk *chunk = tcp_chunk_new(TCP_TEXT_MAX);
	struct err err;

	err_set(&err, ERR_PEER, "tcp: the remote daemon closed the connection%s%s",
		peer->failed ? ": " : "", peer->failed ? peer->err.text : "");
	set_closed(peer);
	sm_move(&peer->sm, TCP_PEER_FLUSHING);
	stop_transfers(peer);
	if (chunk && !peer->deaf)
		tcp_line_send(peer, chunk, &head, &err);
	else
		mem_free(chunk);
	peer->flush_deadline_ns = loop_now_ns(peer->timer.loop) + FLUSH_NS;
	tcp_peer_watch(peer, peer->flush_deadline_ns);
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

static void peer_free(struct tcp_peer *peer)
{
	struct tcp_transport *transport = peer->transport;

	loop_timer_stop(&peer->timer);
	list_remove(&peer->ready_link);
	list_remove(&peer->flush_link);
	list_remove(&peer->link);
	pthread_mutex_lock(&transport->news_lock);
	list_remove(&peer->news_link);
	pthread_mutex_unlock(&transport->news_lock);
	tcp_line_fini(peer);
	for (unsigned int i = 0; i < peer->stream_count; i++)
		mem_closep(&peer->streams[i].fd);
	mem_free(peer->streams);
	assert(peer->held_bytes == 0 && list_empty(&peer->flow_news));
	idmap_fini(&peer->ops);
	idmap_fini(&peer->inbounds);
	idmap_fini(&peer->sinks[0]);
	idmap_fini(&peer->sinks[1]);
	pthread_mutex_destroy(&peer->lock);
	mem_free(peer);
}

/* The farewell is out: then our half of the line is closed, and the other side
 * closes the rest when it has read it. */
static void flush_step(struct tcp_peer *peer)
{
	struct tcp_line *line = &peer->line;

	tcp_line_flush(peer);
	if (list_empty(&line->out) && !peer->shut && line->fd >= 0) {
		peer->shut = true;
		(void)shutdown(line->fd, SHUT_WR);
	}
	if (peer->broken || (peer->deaf && list_empty(&line->out)) ||
	    loop_now_ns(peer->timer.loop) >= peer->flush_deadline_ns)
		begin_end(peer);
	else /* the timer may have fired for an earlier deadline */
		tcp_peer_watch(peer, peer->flush_deadline_ns);
}

/* May free the peer. */
static void settle(struct tcp_peer *peer)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;
	void (*on_closed)(void *arg) = peer->on_closed;
	void *arg = peer->on_closed_arg;

	if (sm_state(&peer->sm) == TCP_PEER_FLUSHING)
		flush_step(peer);
	if (sm_state(&peer->sm) == TCP_PEER_ENDING && streams_gone(peer)) {
		tcp_xfers_drop(peer);
		if (list_empty(&peer->xfers))
			sm_move(&peer->sm, TCP_PEER_ENDED);
	}
	if (sm_state(&peer->sm) != TCP_PEER_ENDED)
		return;
	if (peer->close_asked) {
		peer_free(peer);
		on_closed(arg);
	} else if (!peer->told) {
		peer->told = true;
		up->on_peer_lost(up->owner, (struct xp_peer *)peer, &peer->err);
	}
}

/* ---- the step ---- */

static void take_news(struct tcp_peer *peer)
{
	struct tcp_flow_view view;
	struct tcp_flow *flow;
	struct err io_err;

	while ((flow = tcp_flow_news(peer))) {
		struct tcp_xfer *xfer = container_of(flow, struct tcp_xfer, flow);

		tcp_flow_look(flow, &view);
		if (view.err.code != ERR_OK)
			tcp_xfer_stop(xfer, &view.err);
		tcp_xfer_check(xfer);
	}
	pthread_mutex_lock(&peer->lock);
	io_err = peer->io_err;
	pthread_mutex_unlock(&peer->lock);
	if (io_err.code == ERR_OK || peer->failed)
		return;
	io_err.scope = ERR_SCOPE_PEER;
	tcp_peer_fail(peer, &io_err);
}

static void become_ready(struct tcp_peer *peer)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;

	peer->base.ready = true;
	log_debug("tcp", peer->name, "peer ready", "path=\"%s\"", peer->base.path);
	up->on_peer_ready(up->owner, (struct xp_peer *)peer);
}

void tcp_peer_joined(struct tcp_peer *peer)
{
	snprintf(peer->base.path, sizeof(peer->base.path), "tcp %.36s, %u stream%s",
		 peer->place, peer->stream_count, peer->stream_count == 1 ? "" : "s");
	sm_move(&peer->sm, TCP_PEER_READY);
	peer->join_deadline_ns = 0;
	tcp_line_listen(peer);
	tcp_peer_kick(peer);
}

/* Behind what the done callbacks have deferred: an engine sees its bytes some
 * microseconds earlier, and the peer's daemon, which they were no news for, wakes
 * when nobody here waits for a core. */
static void flush_soon(struct tcp_peer *peer)
{
	struct tcp_transport *transport = peer->transport;

	if (list_empty(&peer->flush_link))
		list_push_back(&transport->unflushed, &peer->flush_link);
	loop_defer(transport->base.env.loop, &transport->flush);
}

void tcp_peer_step(struct tcp_peer *peer)
{
	bool told;
	struct list *link;

	if (sm_state(&peer->sm) == TCP_PEER_READY && !peer->base.ready && !peer->failed)
		become_ready(peer);
	take_news(peer);
	if (peer->failed && sm_state(&peer->sm) == TCP_PEER_READY && !peer->broken)
		begin_flush(peer);
	else if (peer->failed && sm_state(&peer->sm) < TCP_PEER_FLUSHING)
		begin_end(peer);
	told = !list_empty(&peer->finished);
	while ((link = list_pop_front(&peer->finished))) {
		tcp_xfer_tell(list_entry(link, struct tcp_xfer, queue_link));
		if (loop_enough(peer->timer.loop))
			break;
	}
	if (tcp_peer_live(peer))
		tcp_line_resume(peer);
	if (tcp_peer_live(peer))
		tcp_xfer_pump(peer);
	if (!list_empty(&peer->finished))
		tcp_peer_kick(peer);
	if (told)
		flush_soon(peer);
	else
		tcp_line_flush(peer);
	settle(peer);
}

/* ---- open and close ---- */

static void peer_init(struct tcp_peer *peer, struct tcp_transport *transport,
		      const struct xp_peer_args *args)
{
	peer->base.transport = &transport->base;
	peer->base.owner = args->owner;
	peer->transport = transport;
	memcpy(peer->token_in, args->token_in, sizeof(peer->token_in));
	memcpy(peer->token_out, args->token_out, sizeof(peer->token_out));
	for (int i = 0; i < 8; i++)
		snprintf(peer->name + 2 * i, 3, "%02x", args->instance[i]);
	peer->dials = args->dial;
	peer->next_id = 1;
	tcp_line_init(&peer->line);
	list_init(&peer->link);
	list_init(&peer->ready_link);
	list_init(&peer->flush_link);
	list_init(&peer->news_link);
	list_init(&peer->xfers);
	list_init(&peer->queued);
	list_init(&peer->finished);
	list_init(&peer->sources);
	list_init(&peer->flow_news);
	idmap_init(&peer->ops);
	idmap_init(&peer->inbounds);
	idmap_init(&peer->sinks[0]);
	idmap_init(&peer->sinks[1]);
	pthread_mutex_init(&peer->lock, NULL);
	loop_timer_init(&peer->timer, transport->base.env.loop, on_timer);
	sm_init(&peer->sm, &peer_table, TCP_PEER_OPENING);
}

int tcp_peer_open(struct transport *base, const struct xp_peer_args *args,
		  struct xp_peer **peer_p)
{
	struct tcp_transport *transport = container_of(base, struct tcp_transport, base);
	struct tcp_peer *peer;
	int r;

	if (args->self)
		return err_raise(ERR_REQUIRE, "tcp: no connection to this daemon itself");
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	peer_init(peer, transport, args);
	r = tcp_address_get(args->address, args->address_len, &peer->address);
	if (r < 0) {
		peer_free(peer);
		return err_pass(r);
	}
	list_push_back(&transport->peers, &peer->link);
	if (peer->dials) {
		/* the clock, not the turn: opening may have taken a good part of it */
		peer->join_deadline_ns = loop_clock_ns(peer->timer.loop) +
					 transport->connect_ns;
		tcp_peer_watch(peer, peer->join_deadline_ns);
		tcp_dial_start(peer);
	} else {
		tcp_guests_meet(peer);
	}
	*peer_p = (struct xp_peer *)peer;
	return 0;
}

void tcp_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg)
{
	struct tcp_peer *peer = (struct tcp_peer *)base;

	assert(!peer->close_asked);
	peer->close_asked = true;
	peer->on_closed = on_closed;
	peer->on_closed_arg = arg;
	if (sm_state(&peer->sm) == TCP_PEER_READY && !peer->failed)
		begin_flush(peer);
	else if (sm_state(&peer->sm) < TCP_PEER_READY)
		begin_end(peer);
	tcp_peer_kick(peer);
}
