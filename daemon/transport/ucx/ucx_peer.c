/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection of the ucx backend: one endpoint to the peer's worker.
 *
 * The dialer makes an endpoint and sends hello repeatedly until it is answered or
 * HELLO_NS have passed. The dialed side waits for a hello with the right token, without a
 * limit: a forger must not make it give up. Only then does it make its endpoint, answer
 * and send its own hello repeatedly: the dialer may be ready by then, and send no more. A
 * side is ready once its hello was answered: then each has proved its token to the other.
 * A hello also carries the largest slice that its sender accepts.
 *
 * libucp pairs the n-th endpoint of one worker to another with the other's n-th one back,
 * even when that is closed. Small messages arrive anyway, but a rendezvous names the
 * receiver's endpoint: it is lost when that is closed, and out of the reach of our close
 * when it is another than ours. So hellos carry the number of their endpoint, each side
 * moves up to the higher one, and only an answer with its own number counts. Faults of an
 * endpoint count from then on. If one fails after the answer that it carried, a side
 * moves up although its peer is ready: a side that receives a number higher than its own
 * follows, and if frames were sent over the old endpoint, which may be lost, the peer is
 * lost.
 *
 * Loss. libucp's error handler, a failed request or a broken rule only mark the peer
 * (net_peer_fail): from then on nothing more is taken in. Its step stops every transfer
 * and closes the endpoint by force, which makes libucp give back every request it holds.
 * Only when none is left and the copy threads have finished are the transfers reported,
 * and after them the loss. If libucp keeps a request, the peer stays and logs that:
 * memory that may be written is never reported as quiesced.
 *
 * While the endpoint works (an orderly close, a peer that broke a rule) this side sends
 * BYE first and gives the wire FLUSH_NS for it: the last answers arrive, and the other
 * side learns why. libucp itself may not report it: over tcp the socket outlives a closed
 * endpoint. Both sides use that time to complete operations in flight, because 1.13 can
 * crash when an endpoint is closed by force in the middle of a message.
 *
 * ucx_peer_step() is the only place that calls up into the daemon.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define HELLO_NS (5 * LOOP_NS_PER_S)
#define HELLO_AGAIN_NS (100 * LOOP_NS_PER_MS)
#define FLUSH_NS (250 * LOOP_NS_PER_MS)
#define NAG_NS (10 * LOOP_NS_PER_S) /* between complaints about a kept request */
#define ENTRIES_A_STEP 64u
#define HELLOS_MAX 64u
#define CLIMB_MAX 64u /* endpoints that a hello may skip */

static bool ucx_peer_invariant(const struct sm *sm, unsigned int from)
{
	const struct ucx_peer *peer = container_of(sm, const struct ucx_peer, net.sm);

	(void)from;
	if (sm_state(sm) == NET_PEER_ENDED)
		return peer->busy == 0 && list_empty(&peer->net.xfers);
	return sm_state(sm) == NET_PEER_OPENING || peer->answer_came ||
	       sm_state(sm) == NET_PEER_ENDING;
}

const struct sm_table ucx_peer_table = {
	.name = "ucx peer",
	.states = net_peer_states,
	.count = NET_PEER_STATES,
	.invariant = ucx_peer_invariant,
};

static struct ucx_peer *ucx_peer_of(struct net_peer *net)
{
	return container_of(net, struct ucx_peer, net);
}

static bool endpoint_failed(const struct ucx_peer *peer)
{
	return peer->ep_number && peer->failed_number == peer->ep_number;
}

/* Its endpoint is no good. */
static void ucx_peer_lose(struct ucx_peer *peer, const char *what, ucs_status_t status)
{
	struct err err;

	if (sm_state(&peer->net.sm) == NET_PEER_OPENING) {
		peer->failed_number = peer->ep_number;
		return;
	}
	err_set(&err, ERR_PEER, "ucx: connection to %s lost: %s%s", peer->net.name, what,
		peer->transport->lib->ucs_status_string(status));
	peer->net.broken = true;
	net_peer_fail(&peer->net, &err);
}

void ucx_peer_break(struct ucx_peer *peer, const char *what, ucs_status_t status)
{
	char text[64];

	snprintf(text, sizeof(text), "%s: ", what);
	ucx_peer_lose(peer, text, status);
}

void ucx_peer_trouble(struct ucx_peer *peer, const struct ucx_trouble *trouble)
{
	struct err err;

	if (!net_peer_live(&peer->net))
		return;
	if (trouble->flood) {
		err_set(&err, ERR_PROTO,
			"ucx: too many messages at once (limit %u, or %u bytes)",
			UCX_UNREAD_MAX, UCX_UNREAD_BYTES);
		net_peer_fail(&peer->net, &err);
	} else if (trouble->no_memory) {
		err_set(&err, ERR_NOMEM, "ucx: no memory for a message");
		err.scope = ERR_SCOPE_PEER;
		net_peer_fail(&peer->net, &err);
	}
	/* a skipped one is ignored */
	if (trouble->number > peer->ep_number)
		peer->failed_number = trouble->number; /* its climb is not done yet */
	else if (trouble->number && trouble->number == peer->ep_number && !peer->climbing)
		ucx_peer_lose(peer, "", trouble->status);
}

/* ---- hello ---- */

static void say_hello(struct ucx_peer *peer, uint16_t flags)
{
	struct ucx_frame frame = {.type = UCX_HELLO,
				  .flags = flags,
				  .id = peer->ep_number,
				  .offset = peer->transport->slice_bytes};
	struct ucx_send *send = ucx_send_new(peer);

	if (send)
		ucx_send_frame(send, &frame, NULL, NULL, NULL, 0);
	else
		net_peer_fail_last(&peer->net);
}

/* Make the endpoint of at least that number, and send hello over it. */
static void climb(struct ucx_peer *peer, uint64_t number, bool ask)
{
	peer->climbing = true;
	peer->asking = ask;
	ucx_line_climb(&peer->line, number);
}

void ucx_peer_climbed(struct ucx_call *call)
{
	struct ucx_line *line = container_of(call, struct ucx_line, climb);
	struct ucx_peer *peer = line->peer;
	uint16_t flags = peer->asking ? UCX_FLAG_ASK : 0;

	ucx_call_back(peer);
	peer->climbing = false;
	if (!net_peer_live(&peer->net))
		return;
	if (call->status != UCS_OK) {
		ucx_fault(peer->transport->lib, "connect", call->status);
		net_peer_fail_last(&peer->net);
		return;
	}
	peer->ep_number = line->number;
	snprintf(peer->net.base.path, sizeof(peer->net.base.path), "%s", line->path);
	peer->rows_max = line->rows_max;
	if (endpoint_failed(peer) && sm_state(&peer->net.sm) != NET_PEER_OPENING) {
		ucx_peer_lose(peer, "", UCS_ERR_CONNECTION_RESET);
		return;
	}
	if (peer->ep_number == peer->hello_number)
		flags |= UCX_FLAG_ANSWER;
	if (flags)
		say_hello(peer, flags);
}

void ucx_peer_hello(struct ucx_peer *peer, const struct ucx_frame *frame)
{
	uint64_t slice = frame->offset, count;

	if (slice < UCX_SLICE_MIN || slice > UCX_SLICE_MAX ||
	    ++peer->hellos > HELLOS_MAX) {
		err_raise(ERR_PROTO, "ucx hello: slices of %" PRIu64 " bytes, number %u",
			  slice, peer->hellos);
		net_peer_fail_last(&peer->net);
		return;
	}
	if (slice < peer->slice_bytes)
		peer->slice_bytes = slice;
	count = atomic_load(&peer->line.pairing->count);
	if (frame->id > count + CLIMB_MAX) {
		err_raise(ERR_PROTO, "ucx hello: endpoint %" PRIu64 " after %" PRIu64,
			  frame->id, count);
		net_peer_fail_last(&peer->net);
		return;
	}
	peer->hello_number = frame->id;
	if ((frame->flags & UCX_FLAG_ANSWER) && peer->ep_number && !peer->climbing &&
	    frame->id == peer->ep_number)
		peer->answer_came = true;
	if (frame->flags & UCX_FLAG_ASK)
		peer->answer_due = true;
	net_peer_kick(&peer->net);
}

/* If the other side's hello arrived over the endpoint that pairs with this side's,
 * answer. Else move up to its number, or past it, and send hello over the new one. */
static void answer_hello(struct ucx_peer *peer)
{
	bool opening = sm_state(&peer->net.sm) == NET_PEER_OPENING && !peer->answer_came;
	bool paired = peer->ep_number == peer->hello_number;
	uint16_t flags = opening ? UCX_FLAG_ASK : 0;

	peer->answer_due = false;
	if (opening)
		net_peer_watch(&peer->net,
			       loop_now_ns(peer->net.timer.loop) + peer->hello_again_ns);
	if (opening && (!peer->ep_number || !paired || endpoint_failed(peer))) {
		climb(peer, peer->hello_number, true);
		return;
	}
	if (!opening && peer->ep_number < peer->hello_number) {
		/* This side was answered, and the other side, which is not ready, has a
		 * new endpoint. Numbers only grow, and the peer becomes ready only with
		 * this side's number: a higher one is not a late message. */
		if (peer->out_seq == 0 && list_empty(&peer->net.xfers)) {
			climb(peer, peer->hello_number, false);
			return;
		}
		err_raise(ERR_PEER, "ucx: %s reconnects", peer->net.name);
		net_peer_fail_last(&peer->net);
		return;
	}
	if (paired)
		flags |= UCX_FLAG_ANSWER;
	if (flags)
		say_hello(peer, flags);
}

/* ---- deadlines ---- */

static void watch_hello(struct ucx_peer *peer, uint64_t now)
{
	struct err err;

	if (sm_state(&peer->net.sm) != NET_PEER_OPENING ||
	    (!peer->net.dial && !peer->ep_number))
		return;
	if (now < peer->hello_deadline_ns || !peer->net.dial) {
		if (!peer->climbing && endpoint_failed(peer))
			climb(peer, 0, true);
		else if (!peer->climbing)
			say_hello(peer, UCX_FLAG_ASK);
		peer->hello_again_ns *= 2;
		net_peer_watch(&peer->net, now + peer->hello_again_ns);
		return;
	}
	err_set(&err, ERR_TIMEOUT,
		"no data connection to UCX's worker of %s (UCX_NET_DEVICES): it did not "
		"answer",
		peer->net.name);
	net_peer_fail(&peer->net, &err);
}

static void nag(struct ucx_peer *peer, uint64_t now)
{
	if (now >= peer->nag_at_ns) {
		log_error("ucx", peer->net.name,
			  "requests of a closed endpoint do not complete",
			  "requests=%u why=\"%s\"", peer->busy, peer->net.err.text);
		peer->nag_at_ns = now + NAG_NS;
	}
	net_peer_watch(&peer->net, peer->nag_at_ns);
}

static void ucx_peer_on_timer(struct loop_timer *timer)
{
	struct ucx_peer *peer = container_of(timer, struct ucx_peer, net.timer);
	uint64_t now = loop_now_ns(timer->loop);

	if (net_peer_live(&peer->net)) {
		watch_hello(peer, now);
		net_peer_watch_fences(&peer->net, now);
	} else if (sm_state(&peer->net.sm) == NET_PEER_FLUSHING) {
		/* the timer may have run for an earlier deadline */
		if (now < peer->net.flush_deadline_ns)
			net_peer_watch(&peer->net, peer->net.flush_deadline_ns);
		net_peer_kick(&peer->net);
	} else if (sm_state(&peer->net.sm) == NET_PEER_ENDING) {
		nag(peer, now);
	}
}

/* ---- the end ---- */

static void ucx_peer_begin_end(struct ucx_peer *peer)
{
	ucx_line_deafen(&peer->line);
	ucx_order_drop(peer);
	net_peer_end(&peer->net);
	ucx_line_end(&peer->line);
	peer->nag_at_ns = loop_now_ns(peer->net.timer.loop) + NAG_NS;
	net_peer_watch(&peer->net, peer->nag_at_ns);
}

void ucx_peer_line_ended(struct ucx_call *call)
{
	ucx_call_back(container_of(call, struct ucx_line, end)->peer);
}

void ucx_peer_flushed(struct ucx_call *call)
{
	struct ucx_peer *peer = container_of(call, struct ucx_line, flush)->peer;

	peer->flushed = true; /* failed or not, nothing more will leave */
	ucx_call_back(peer);
}

static void ucx_peer_begin_flush(struct ucx_peer *peer)
{
	struct ucx_frame frame = {.type = UCX_BYE};
	cleanup_free struct ucx_send *send = ucx_send_new(peer);
	struct err err;

	net_peer_flush(&peer->net, FLUSH_NS, &err);
	if (send && !peer->net.bye_came)
		ucx_send_frame(mem_steal(send), &frame, &err, NULL, NULL, 0);
	ucx_line_flush(&peer->line);
}

void ucx_peer_free(struct net_peer *net)
{
	struct ucx_peer *peer = ucx_peer_of(net);

	net_peer_fini(net);
	assert(list_empty(&peer->entries) && peer->held_bytes == 0 && peer->busy == 0);
	ucx_line_fini(&peer->line);
	mem_free(peer->address);
	mem_free(peer);
}

/* ---- the step ---- */

static void ucx_peer_take_entries(struct ucx_peer *peer)
{
	unsigned int budget = ENTRIES_A_STEP;
	struct ucx_entry *entry;
	struct err err;

	while (net_peer_live(&peer->net) && budget && (entry = ucx_order_next(peer))) {
		budget--;
		if (entry->frame.type != UCX_BYE) {
			ucx_xfer_entry(peer, entry);
			continue;
		}
		net_fault_get(entry->frame.code, entry->frame.flags, entry->payload,
			      entry->len, &err);
		ucx_entry_free(entry);
		peer->net.bye_came = true;
		net_peer_fail(&peer->net, &err);
	}
	if (!budget)
		net_peer_kick(&peer->net);
}

void ucx_peer_step(struct net_peer *net)
{
	struct ucx_peer *peer = ucx_peer_of(net);

	if (peer->answer_due && !peer->climbing && net_peer_live(net))
		answer_hello(peer);
	if (sm_state(&net->sm) == NET_PEER_OPENING && peer->answer_came && !net->failed) {
		sm_move(&net->sm, NET_PEER_READY);
		net_peer_ready(net);
	}
	if (sm_state(&net->sm) == NET_PEER_READY)
		ucx_peer_take_entries(peer);
	if (net->failed && sm_state(&net->sm) == NET_PEER_READY && !net->broken)
		ucx_peer_begin_flush(peer);
	else if (net->failed && sm_state(&net->sm) < NET_PEER_FLUSHING)
		ucx_peer_begin_end(peer);
	net_peer_tell(net);
	if (sm_state(&net->sm) == NET_PEER_READY && net_peer_live(net)) {
		if (ucx_line_reserve(&peer->line) < 0)
			err_clear(); /* at the next step, then */
		net_xfer_pump(net);
		ucx_source_pump(peer);
	}
	if (sm_state(&net->sm) == NET_PEER_FLUSHING &&
	    (net->broken ||
	     (peer->flushed && peer->busy == 0 && list_empty(&net->xfers)) ||
	     loop_now_ns(net->timer.loop) >= net->flush_deadline_ns)) {
		ucx_peer_begin_end(peer);
		net_peer_kick(net);
		return;
	}
	if (sm_state(&net->sm) == NET_PEER_ENDING && peer->busy == 0 &&
	    list_empty(&net->xfers)) {
		loop_timer_stop(&net->timer);
		sm_move(&net->sm, NET_PEER_ENDED);
	}
	net_peer_settle(net);
}

/* ---- open and close ---- */

static void ucx_peer_init(struct ucx_peer *peer, struct ucx_transport *transport,
			  const struct xp_peer_args *args)
{
	net_peer_init(&peer->net, &transport->net, args, ucx_peer_on_timer);
	peer->transport = transport;
	/* the clock, not the turn: opening may have taken a good part of it */
	peer->hello_deadline_ns =
		loop_clock_ns(transport->net.base.env.loop) +
		net_connect_ns(transport->net.base.env.config, HELLO_NS);
	peer->hello_again_ns = HELLO_AGAIN_NS;
	peer->slice_bytes = transport->slice_bytes;
	peer->in_seq = 1;
	list_init(&peer->entries);
	list_init(&peer->sources);
}

static int find_pairing(struct ucx_transport *transport, const void *worker, size_t len,
			struct ucx_pairing **pairing_p)
{
	struct ucx_pairing *pairing = strmap_get_bytes(&transport->pairings, worker, len);
	int r = 0;

	if (!pairing) {
		pairing = mem_zalloc(sizeof(*pairing));
		if (!pairing)
			return err_pass(-ENOMEM);
		r = strmap_put_bytes(&transport->pairings, worker, len, pairing);
	}
	if (r < 0)
		mem_free(pairing);
	*pairing_p = pairing;
	return err_pass(r);
}

static int ucx_peer_take_address(struct ucx_peer *peer, const struct xp_peer_args *args)
{
	struct ucx_pairing *pairing;
	const void *worker;
	size_t worker_len;
	int r = ucx_address_get(args->address, args->address_len, &worker, &worker_len);

	if (r < 0)
		return err_pass(r);
	peer->address = mem_dup(worker, worker_len);
	if (!peer->address)
		return err_pass(-ENOMEM);
	r = find_pairing(peer->transport, worker, worker_len, &pairing);
	if (r == 0)
		ucx_line_init(&peer->line, peer, pairing, peer->address);
	return err_pass(r);
}

int ucx_peer_open(struct transport *base, const struct xp_peer_args *args,
		  struct xp_peer **peer_p)
{
	struct ucx_transport *transport =
		container_of(base, struct ucx_transport, net.base);
	struct ucx_peer *peer;
	int r;

	if (args->self)
		return err_raise(ERR_REQUIRE, "ucx: no connection to this daemon itself");
	peer = mem_zalloc(sizeof(*peer));
	if (!peer)
		return err_pass(-ENOMEM);
	ucx_peer_init(peer, transport, args);
	ucx_pool_fill(&transport->send_pool, transport->net.base.env.offload);
	ucx_pool_fill(&transport->recv_pool, transport->net.base.env.offload);
	r = ucx_peer_take_address(peer, args);
	if (r == 0)
		r = ucx_line_reserve(&peer->line);
	if (r == 0)
		r = ucx_line_listen(&peer->line);
	if (r < 0) {
		ucx_peer_free(&peer->net);
		return err_pass(r);
	}
	list_push_back(&transport->net.peers, &peer->net.link);
	if (peer->net.dial) {
		climb(peer, 0, true);
		net_peer_watch(&peer->net,
			       loop_clock_ns(peer->net.timer.loop) + HELLO_AGAIN_NS);
	}
	*peer_p = (struct xp_peer *)peer;
	return 0;
}

void ucx_peer_close(struct xp_peer *base, void (*on_closed)(void *arg), void *arg)
{
	struct ucx_peer *peer = (struct ucx_peer *)base;

	net_peer_close_ask(&peer->net, on_closed, arg);
	if (sm_state(&peer->net.sm) == NET_PEER_READY && !peer->net.failed)
		ucx_peer_begin_flush(peer);
	else if (sm_state(&peer->net.sm) == NET_PEER_OPENING)
		ucx_peer_begin_end(peer);
}
