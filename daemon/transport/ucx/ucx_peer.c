/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A connection of the ucx backend: one endpoint to the peer's worker.
 *
 * Who dials makes an endpoint and says hello, again and again until it is
 * answered or HELLO_NS are over. Who is dialled waits for a hello with the right
 * token, however long: a forger must not make it give up. Only then it makes its
 * endpoint, answers and asks in turn, again and again: who dialled may be ready by
 * then, and ask no more. A side is ready once its hello was
 * answered: then each has proved its token to the other. A hello also tells the
 * largest slice that its sender takes.
 *
 * libucp pairs the n-th endpoint of one worker to another with the other's n-th
 * one back, even when that is closed. Small messages arrive all the same, but a
 * rendezvous names the receiver's endpoint: it is lost when that is closed, and
 * out of the reach of our close when it is another than ours. So hellos carry
 * the number of their endpoint, each side goes up to the higher one, and only an
 * answer with our own number counts. Faults of an endpoint count from then on. One
 * that fails behind the answer that it carried makes a side go up whose peer is
 * ready already: who is asked by a higher number than its own follows, and where
 * something was sent by the old endpoint, which may be lost, the peer is.
 *
 * Loss. libucp's error handler, a failed request or a broken rule only mark the
 * peer (net_peer_fail): from then on nothing more is taken in. Its step stops
 * every transfer and closes the endpoint by force, which makes libucp give back
 * every request it still holds. Only when none is left and the
 * copy threads have let go are the transfers reported, and after them the loss.
 * If libucp keeps a request, the peer stays and says so in the log: memory that
 * may still be written is never called still.
 *
 * While the endpoint still works (a close in peace, a peer that broke a rule) we
 * say goodbye first and give the wire FLUSH_NS for it: the last answers arrive,
 * and the other side learns why. libucp itself may not tell it: over tcp the
 * socket outlives a closed endpoint. Both sides use that time to let what is
 * under way end, because 1.13 can crash when an endpoint is closed by force in
 * the middle of a message.
 *
 * ucx_peer_step() is the only place that calls up into the daemon.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define HELLO_NS (5 * LOOP_NS_PER_S)
#define HELLO_AGAIN_NS (100 * LOOP_NS_PER_MS)
#define FLUSH_NS (250 * LOOP_NS_PER_MS)
#define NAG_NS (10 * LOOP_NS_PER_S) /* between complaints about a kept request */
#define NUDGE_NS LOOP_NS_PER_MS
#define NUDGE_MAX_NS (100 * LOOP_NS_PER_MS)
#define ENTRIES_A_STEP 64u
#define HELLOS_MAX 64u
#define CLIMB_MAX 64u /* endpoints a hello may make us pass over */

static bool peer_invariant(const struct sm *sm, unsigned int from)
{
	const struct ucx_peer *peer = container_of(sm, const struct ucx_peer, net.sm);

	(void)from;
	if (sm_state(sm) == NET_PEER_ENDED)
		return !peer->ep && peer->busy == 0 && list_empty(&peer->net.xfers);
	return sm_state(sm) == NET_PEER_OPENING || peer->answer_came ||
	       sm_state(sm) == NET_PEER_ENDING;
}

const struct sm_table ucx_peer_table = {
	.name = "ucx peer",
	.states = net_peer_states,
	.count = NET_PEER_STATES,
	.invariant = peer_invariant,
};

static struct ucx_peer *ucx_peer_of(struct net_peer *net)
{
	return container_of(net, struct ucx_peer, net);
}

void ucx_peer_break(struct ucx_peer *peer, const char *what, ucs_status_t status)
{
	struct err err;

	if (sm_state(&peer->net.sm) == NET_PEER_OPENING) {
		peer->ep_failed = true;
		return;
	}
	err_set(&err, ERR_PEER, "ucx: connection to %s lost: %s: %s", peer->net.name,
		what, peer->transport->lib->ucs_status_string(status));
	peer->net.broken = true;
	net_peer_fail(&peer->net, &err);
}

static void on_endpoint_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
	struct ucx_peer *peer = arg;
	struct err err;

	if (ep != peer->ep)
		return; /* one that a hello went by in vain */
	if (sm_state(&peer->net.sm) == NET_PEER_OPENING) {
		peer->ep_failed = true;
		return;
	}
	err_set(&err, ERR_PEER, "ucx: connection to %s lost: %s", peer->net.name,
		peer->transport->lib->ucs_status_string(status));
	peer->net.broken = true;
	net_peer_fail(&peer->net, &err);
}

/* ---- the endpoint ---- */

static void on_endpoint_closed(void *request, ucs_status_t status, void *user_data)
{
	struct ucx_peer *peer = user_data;

	(void)status; /* it is gone either way */
	peer->transport->lib->ucp_request_free(request);
	peer->busy--;
	net_peer_kick(&peer->net);
}

static void close_endpoint(struct ucx_peer *peer)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA |
				UCP_OP_ATTR_FIELD_FLAGS,
		.flags = UCP_EP_CLOSE_FLAG_FORCE,
		.cb.send = on_endpoint_closed,
		.user_data = peer,
	};
	ucp_ep_h ep = peer->ep;

	peer->ep = NULL;
	if (ep && ucx_started(peer->transport->lib->ucp_ep_close_nbx(ep, &param)) > 0)
		peer->busy++;
}

static int connect_endpoint(struct ucx_peer *peer)
{
	ucp_ep_params_t params = {
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS |
			      UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
			      UCP_EP_PARAM_FIELD_ERR_HANDLER,
		.err_mode = UCP_ERR_HANDLING_MODE_PEER,
		.err_handler = {.cb = on_endpoint_error, .arg = peer},
	};
	const void *worker;
	size_t worker_len;
	ucs_status_t status;
	int r;

	r = ucx_address_get(peer->address, peer->address_len, &worker, &worker_len);
	if (r < 0)
		return err_pass(r);
	params.address = worker;
	status = peer->transport->lib->ucp_ep_create(peer->transport->worker, &params,
						     &peer->ep);
	if (status != UCS_OK)
		return ucx_fault(peer->transport->lib, "connect", status);
	peer->ep_number = ++peer->pairing->count;
	peer->ep_failed = false;
	return 0;
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

/* Make the endpoint of at least that number; those passed over are closed. */
static int climb(struct ucx_peer *peer, uint64_t number)
{
	int r;

	do {
		close_endpoint(peer);
		r = connect_endpoint(peer);
	} while (r == 0 && peer->ep_number < number);
	return err_pass(r);
}

void ucx_peer_hello(struct ucx_peer *peer, const struct ucx_frame *frame)
{
	uint64_t slice = frame->offset;

	if (slice < UCX_SLICE_MIN || slice > UCX_SLICE_MAX ||
	    ++peer->hellos > HELLOS_MAX) {
		err_raise(ERR_PROTO, "ucx hello: slices of %" PRIu64 " bytes, number %u",
			  slice, peer->hellos);
		net_peer_fail_last(&peer->net);
		return;
	}
	if (slice < peer->slice_bytes)
		peer->slice_bytes = slice;
	if (frame->id > peer->pairing->count + CLIMB_MAX) {
		err_raise(ERR_PROTO, "ucx hello: endpoint %" PRIu64 " after %" PRIu64,
			  frame->id, peer->pairing->count);
		net_peer_fail_last(&peer->net);
		return;
	}
	peer->hello_number = frame->id;
	if ((frame->flags & UCX_FLAG_ANSWER) && peer->ep && frame->id == peer->ep_number)
		peer->answer_came = true;
	if (frame->flags & UCX_FLAG_ASK)
		peer->answer_due = true;
	net_peer_kick(&peer->net);
}

/* libucp 1.13 tells an endpoint's lanes only in print:
 *   "#    lane[0]:  0:tcp/lo.0 md[0]  -> md[0]/tcp/sysdev[255] am am_bw#0 …" */
static bool lane_of_line(const char *line, char *lane, size_t size)
{
	char transport[16], device[24];
	const char *at = strstr(line, "lane[");
	char *dot;

	at = at ? strstr(at, "]:") : NULL;
	if (!at || sscanf(at, "]: %*d:%15[^/ ]/%23[^ ]", transport, device) != 2)
		return false;
	dot = strrchr(device, '.');
	if (dot)
		*dot = '\0';
	snprintf(lane, size, "%s %s", transport, device);
	return true;
}

static void find_path(struct ucx_peer *peer)
{
	char *text = NULL, *save = NULL, lane[48], *path = peer->net.base.path;
	size_t size = 0, used;
	FILE *out = open_memstream(&text, &size);

	snprintf(path, sizeof(peer->net.base.path), "ucx");
	if (!out)
		return;
	peer->transport->lib->ucp_ep_print_info(peer->ep, out);
	fclose(out);
	for (char *line = strtok_r(text, "\n", &save); line;
	     line = strtok_r(NULL, "\n", &save)) {
		if (!lane_of_line(line, lane, sizeof(lane)) || strstr(path, lane))
			continue;
		used = strcmp(path, "ucx") ? strlen(path) : 0;
		snprintf(path + used, sizeof(peer->net.base.path) - used, "%s%s",
			 used ? ", " : "", lane);
	}
	free(text); /* open_memstream's own */
}

/* We were answered, and the other side, which is not ready, has a new endpoint. Numbers
 * only grow, and it is ready with ours alone: a higher one is no late word of his. */
static int follow(struct ucx_peer *peer)
{
	if (peer->out_seq > 0 || !list_empty(&peer->net.xfers))
		return err_raise(ERR_PEER, "ucx: %s connects anew", peer->net.name);
	return err_pass(climb(peer, peer->hello_number));
}

/* The other side's hello came by the endpoint that pairs with ours: then answer.
 * Else go up to its number, or past it, and ask by the new one. */
static void answer_hello(struct ucx_peer *peer)
{
	bool opening = sm_state(&peer->net.sm) == NET_PEER_OPENING && !peer->answer_came;
	uint16_t flags = opening ? UCX_FLAG_ASK : 0;

	peer->answer_due = false;
	if (!opening && peer->ep_number < peer->hello_number && follow(peer) < 0) {
		net_peer_fail_last(&peer->net);
		return;
	}
	if (opening &&
	    (!peer->ep || peer->ep_failed || peer->ep_number != peer->hello_number) &&
	    climb(peer, peer->hello_number) < 0) {
		net_peer_fail_last(&peer->net);
		return;
	}
	if (peer->ep_number == peer->hello_number)
		flags |= UCX_FLAG_ANSWER;
	if (flags)
		say_hello(peer, flags);
	if (opening)
		net_peer_watch(&peer->net,
			       loop_now_ns(peer->net.timer.loop) + peer->hello_again_ns);
}

/* ---- deadlines ---- */

static void watch_hello(struct ucx_peer *peer, uint64_t now)
{
	struct err err;

	if (sm_state(&peer->net.sm) != NET_PEER_OPENING || (!peer->net.dial && !peer->ep))
		return;
	if (now < peer->hello_deadline_ns || !peer->net.dial) {
		if (peer->ep_failed && climb(peer, 0) < 0) {
			net_peer_fail_last(&peer->net);
			return;
		}
		say_hello(peer, UCX_FLAG_ASK);
		peer->hello_again_ns *= 2;
		net_peer_watch(&peer->net, now + peer->hello_again_ns);
		return;
	}
	err_set(&err, ERR_TIMEOUT,
		"ucx: %s did not answer our hello with the right token", peer->net.name);
	net_peer_fail(&peer->net, &err);
}

/* libucp ends an endpoint in callbacks of its progress that neither its event
 * fd nor its arm tell of: it has to be called. May free the peer. */
static void nudge(struct ucx_peer *peer, uint64_t now)
{
	struct transport *base = &peer->transport->net.base;

	if (now >= peer->nag_at_ns) {
		log_error("ucx", peer->net.name,
			  "a closed endpoint's requests do not end",
			  "requests=%u why=\"%s\"", peer->busy, peer->net.err.text);
		peer->nag_at_ns = now + NAG_NS;
	}
	if (peer->nudge_ns < NUDGE_MAX_NS)
		peer->nudge_ns *= 2;
	net_peer_watch(&peer->net, now + peer->nudge_ns);
	base->ops->progress(base, ENTRIES_A_STEP);
}

static void on_timer(struct loop_timer *timer)
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
		nudge(peer, now);
	}
}

/* ---- the end ---- */

static void begin_end(struct ucx_peer *peer)
{
	uint64_t now = loop_now_ns(peer->net.timer.loop);

	strmap_remove_bytes(&peer->transport->tokens, peer->net.token_in,
			    sizeof(peer->net.token_in));
	ucx_order_drop(peer);
	net_peer_end(&peer->net);
	close_endpoint(peer);
	peer->nudge_ns = NUDGE_NS;
	peer->nag_at_ns = now + NAG_NS;
	net_peer_watch(&peer->net, now + NUDGE_NS);
}

static void on_flushed(void *request, ucs_status_t status, void *user_data)
{
	struct ucx_peer *peer = user_data;

	(void)status; /* failed or not, nothing more will leave */
	peer->transport->lib->ucp_request_free(request);
	peer->busy--;
	peer->flushed = true;
	net_peer_kick(&peer->net);
}

static void begin_flush(struct ucx_peer *peer)
{
	ucp_request_param_t param = {
		.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA,
		.cb.send = on_flushed,
		.user_data = peer,
	};
	struct ucx_frame frame = {.type = UCX_BYE};
	cleanup_free struct ucx_send *send = ucx_send_new(peer);
	struct err err;

	net_peer_flush(&peer->net, FLUSH_NS, &err);
	if (send && !peer->net.deaf)
		ucx_send_frame(mem_steal(send), &frame, &err, NULL, NULL, 0);
	if (ucx_started(peer->transport->lib->ucp_ep_flush_nbx(peer->ep, &param)) > 0)
		peer->busy++;
	else
		peer->flushed = true;
}

void ucx_peer_free(struct net_peer *net)
{
	struct ucx_peer *peer = ucx_peer_of(net);

	net_peer_fini(net);
	assert(list_empty(&peer->entries) && peer->held_bytes == 0);
	mem_free(peer->reserve);
	mem_free(peer->address);
	mem_free(peer);
}

static bool is_flushed(const struct ucx_peer *peer)
{
	return peer->net.broken ||
	       (peer->flushed && peer->busy == 0 && list_empty(&peer->net.xfers)) ||
	       loop_now_ns(peer->net.timer.loop) >= peer->net.flush_deadline_ns;
}

/* ---- the step ---- */

static void take_entries(struct ucx_peer *peer)
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
		ucx_frame_get_err(&entry->frame, entry->payload, entry->len, &err);
		ucx_entry_free(entry);
		peer->net.deaf = true;
		net_peer_fail(&peer->net, &err);
	}
	if (!budget)
		net_peer_kick(&peer->net);
}

void ucx_peer_step(struct net_peer *net)
{
	struct ucx_peer *peer = ucx_peer_of(net);

	if (peer->answer_due && net_peer_live(net))
		answer_hello(peer);
	if (sm_state(&net->sm) == NET_PEER_OPENING && peer->answer_came && !net->failed) {
		find_path(peer);
		sm_move(&net->sm, NET_PEER_READY);
		net_peer_ready(net);
	}
	if (sm_state(&net->sm) == NET_PEER_READY)
		take_entries(peer);
	if (net->failed && sm_state(&net->sm) == NET_PEER_READY && !net->broken)
		begin_flush(peer);
	else if (net->failed && sm_state(&net->sm) < NET_PEER_FLUSHING)
		begin_end(peer);
	net_peer_tell(net);
	if (sm_state(&net->sm) == NET_PEER_READY && net_peer_live(net)) {
		if (ucx_order_reserve(peer) < 0)
			err_clear(); /* at the next step, then */
		net_xfer_pump(net);
		ucx_source_pump(peer);
	}
	if (sm_state(&net->sm) == NET_PEER_FLUSHING && is_flushed(peer)) {
		begin_end(peer);
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

static void peer_init(struct ucx_peer *peer, struct ucx_transport *transport,
		      const struct xp_peer_args *args)
{
	net_peer_init(&peer->net, &transport->net, args, on_timer);
	peer->transport = transport;
	/* the clock, not the turn: opening may have taken a good part of it */
	peer->hello_deadline_ns = loop_clock_ns(transport->net.base.env.loop) + HELLO_NS;
	peer->hello_again_ns = HELLO_AGAIN_NS;
	peer->slice_bytes = transport->slice_bytes;
	peer->in_seq = 1;
	list_init(&peer->entries);
	list_init(&peer->sources);
}

static int take_address(struct ucx_peer *peer, const struct xp_peer_args *args)
{
	struct strmap *pairings = &peer->transport->pairings;
	const void *worker;
	size_t worker_len;
	int r = ucx_address_get(args->address, args->address_len, &worker, &worker_len);

	if (r < 0)
		return err_pass(r);
	peer->address_len = args->address_len;
	peer->address = mem_dup(args->address, args->address_len);
	if (!peer->address)
		return err_pass(-ENOMEM);
	peer->pairing = strmap_get_bytes(pairings, worker, worker_len);
	if (peer->pairing)
		return 0;
	peer->pairing = mem_zalloc(sizeof(*peer->pairing));
	if (!peer->pairing)
		return err_pass(-ENOMEM);
	r = strmap_put_bytes(pairings, worker, worker_len, peer->pairing);
	if (r < 0)
		mem_free(peer->pairing);
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
	peer_init(peer, transport, args);
	r = take_address(peer, args);
	if (r == 0)
		r = ucx_order_reserve(peer);
	if (r == 0)
		r = strmap_put_bytes(&transport->tokens, peer->net.token_in,
				     sizeof(peer->net.token_in), peer);
	if (r == 0 && peer->net.dial) {
		r = connect_endpoint(peer);
		if (r < 0)
			strmap_remove_bytes(&transport->tokens, peer->net.token_in,
					    sizeof(peer->net.token_in));
	}
	if (r < 0) {
		ucx_peer_free(&peer->net);
		return err_pass(r);
	}
	list_push_back(&transport->net.peers, &peer->net.link);
	if (peer->net.dial) {
		say_hello(peer, UCX_FLAG_ASK);
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
		begin_flush(peer);
	else if (sm_state(&peer->net.sm) == NET_PEER_OPENING)
		begin_end(peer);
}
