/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The tcp backend's part of a transfer's life cycle (net.h).
 *
 *   WRITE  REQUEST -> on_request, land() -> GO -> DATA … -> DONE
 *   READ   REQUEST -> on_request, land() -> SERVE … -> DONE
 *
 * GO keeps bytes from arriving before their place is known. Bytes of a transfer
 * that is no larger than TCP_EAGER_MAX, from memory that the loop may read, are
 * in the REQUEST or the DONE instead, and are placed when both sides have agreed.
 *
 * A stopped transfer's flow is closed, and when no thread holds it the side is quiet.
 * That is enough for the written engine, which needs nothing of the peer. For the engine
 * that is read it is enough when some of its bytes can never count at the peer: they were
 * not sent, or in a void frame. Only a WRITE that was sent whole has to wait for the
 * DONE, because the peer may have counted it.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define TAIL_MIN_BYTES (16u << 10) /* a shorter header is copied into its request */

static const struct sm_table xfer_table = {
	.name = "tcp transfer",
	.states = net_xfer_states,
	.count = NET_XFER_STATES,
};

static struct tcp_xfer *tcp_xfer_of(struct net_xfer *net)
{
	return container_of(net, struct tcp_xfer, net);
}

/* ---- made and unmade ---- */

static void tcp_xfer_free(struct net_xfer *net)
{
	struct tcp_xfer *xfer = tcp_xfer_of(net);

	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++)
		mem_free(xfer->spare[i]);
	tcp_entry_free(xfer->entry);
	mem_free(xfer);
}

static int tcp_xfer_new(struct net_peer *peer, struct net_xfer **xfer_p)
{
	struct tcp_xfer *xfer = mem_zalloc(sizeof(*xfer));

	if (!xfer)
		return err_pass(-ENOMEM);
	xfer->peer = container_of(peer, struct tcp_peer, net);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++) {
		xfer->spare[i] = tcp_chunk_new(TCP_TEXT_MAX);
		if (!xfer->spare[i]) {
			tcp_xfer_free(&xfer->net);
			return err_pass(-ENOMEM);
		}
	}
	*xfer_p = &xfer->net;
	return 0;
}

/* May the loop itself read and write its memory? */
static bool at_hand(const struct tcp_xfer *xfer)
{
	return stage_mapped(&xfer->flow.side) && !xfer->flow.guarded;
}

static int tcp_xfer_take_sides(struct net_xfer *net, const struct xp_sides *sides)
{
	struct tcp_xfer *xfer = tcp_xfer_of(net);
	bool source = net_is_source(net);
	int r = xp_sides_check(sides, source, !source);

	if (r == 0)
		r = tcp_flow_init(&xfer->flow, xfer->peer, sides->plan,
				  source ? sides->src : sides->dst,
				  source ? sides->src_count : sides->dst_count, source);
	if (r < 0)
		return err_pass(r);
	xfer->flow.id = net->id;
	xfer->flow.ours = net->ours;
	if (net->ours)
		xfer->eager = net->kind == XP_WRITE && net->bytes <= TCP_EAGER_MAX &&
			      at_hand(xfer);
	return 0;
}

static void tcp_xfer_drop_sides(struct net_xfer *net)
{
	struct tcp_xfer *xfer = tcp_xfer_of(net);

	xfer->flows = false;
	tcp_flow_fini(&xfer->flow);
}

static int open_flow(struct tcp_xfer *xfer)
{
	int r = net_is_source(&xfer->net) ? tcp_flow_send(&xfer->flow)
					  : tcp_flow_receive(&xfer->flow);

	if (r < 0)
		return err_pass(r);
	xfer->flows = true;
	tcp_tick_want(xfer->peer->transport);
	return 0;
}

/* ---- state ---- */

static struct tcp_flow_view tcp_xfer_look(struct tcp_xfer *xfer)
{
	struct tcp_flow_view view = {.quiesced = true};

	if (xfer->flows)
		tcp_flow_look(&xfer->flow, &view);
	else if (xfer->net.bytes == 0 || xfer->placed ||
		 (xfer->eager && net_is_source(&xfer->net)))
		view.moved = view.next = xfer->net.bytes;
	if (!xfer->flows && view.moved > 0) /* copied into, or out of, a frame */
		view.used = (struct xp_used){.staged = view.moved, .descriptors = 1};
	view.quiesced &= !xfer->copying;
	return view;
}

void tcp_xfer_progress(struct tcp_xfer *xfer)
{
	struct tcp_flow_view view;

	if (!xfer->flows)
		return;
	view = tcp_xfer_look(xfer);
	net_xfer_moved(&xfer->net, view.moved, view.first_ns);
}

static bool tcp_xfer_is_over(struct net_xfer *net)
{
	struct tcp_xfer *xfer = tcp_xfer_of(net);
	struct tcp_flow_view view = tcp_xfer_look(xfer);

	if (xfer->flows)
		net_xfer_moved(net, view.moved, view.first_ns);
	net->used = view.used;
	switch (sm_state(&net->sm)) {
	case NET_XFER_STOPPING:
		return view.quiesced &&
		       (!net->ours || !net->asked || net->answered ||
			net->kind == XP_READ || !net_peer_live(net->peer) ||
			/* stopped, it cannot succeed at the other side any more */
			(net->bytes > 0 && !xfer->eager &&
			 (!xfer->flows || view.spoiled)));
	case NET_XFER_ASKED:
		return net->ours && net->answered;
	case NET_XFER_MOVING:
		return view.quiesced && view.moved == net->bytes &&
		       (!net->ours || net->answered);
	default:
		return false;
	}
}

static bool tcp_xfer_is_whole(struct net_xfer *net)
{
	return tcp_xfer_look(tcp_xfer_of(net)).moved == net->bytes;
}

/* ---- stop, over, reported ---- */

static void tcp_xfer_speak(struct net_xfer *net)
{
	struct tcp_head head = {.type = TCP_CANCEL, .id = net->id};
	struct tcp_xfer *xfer = tcp_xfer_of(net);

	if (!net_owes_cancel(net))
		return;
	net->stop_sent = true;
	tcp_line_send(xfer->peer, mem_steal(xfer->spare[1]), &head, &net->err);
}

static void tcp_xfer_halt(struct net_xfer *net)
{
	struct tcp_xfer *xfer = tcp_xfer_of(net);

	if (xfer->flows)
		tcp_flow_stop(&xfer->flow);
	if (xfer->copying)
		copier_cancel(net->peer->transport->base.env.copier, &xfer->job);
}

/* The answer to a small READ is its bytes. */
static int send_served(struct tcp_xfer *xfer)
{
	struct tcp_peer *peer = xfer->peer;
	struct tcp_head head = {.type = TCP_DONE,
				.id = xfer->net.id,
				.flags = TCP_FLAG_EAGER,
				.length = (uint32_t)xfer->net.bytes};
	struct tcp_chunk *chunk = tcp_chunk_new(xfer->net.bytes);
	int r;

	if (!chunk)
		return err_pass(-ENOMEM);
	r = stage_pack(peer->transport->hand, &xfer->flow.side, 0, xfer->net.bytes,
		       tcp_chunk_payload(chunk));
	if (r < 0) {
		mem_free(chunk);
		return err_pass(r);
	}
	tcp_line_send(peer, chunk, &head, NULL);
	return 0;
}

static int tcp_xfer_say_done(struct net_xfer *net, const struct err *err)
{
	struct tcp_head head = {.type = TCP_DONE, .id = net->id};
	struct tcp_xfer *xfer = tcp_xfer_of(net);

	if (!err && xfer->eager && net_is_source(net))
		return err_pass(send_served(xfer));
	tcp_line_send(xfer->peer, mem_steal(xfer->spare[1]), &head, err);
	return 0;
}

/* ---- bytes carried by a request or an answer ---- */

static void on_placed(struct copy_job *job)
{
	struct tcp_xfer *xfer = container_of(job, struct tcp_xfer, job);

	xfer->copying = false;
	if (job->result < 0)
		net_xfer_stop(&xfer->net, &job->err);
	else
		xfer->placed = true;
	net_xfer_check(&xfer->net);
}

static int tcp_xfer_place(struct tcp_xfer *xfer)
{
	const struct tcp_entry *entry = xfer->entry;
	struct tcp_transport *transport = xfer->peer->transport;
	uint8_t *bytes = xfer->entry->payload + (entry->head.length - xfer->net.bytes);
	int r;

	if (at_hand(xfer)) {
		r = stage_unpack(transport->hand, &xfer->flow.side, 0, xfer->net.bytes,
				 bytes);
		xfer->placed = r == 0;
		return err_pass(r);
	}
	xfer->job.plan = xfer->flow.side.plan;
	xfer->job.begin = 0;
	xfer->job.end = xfer->net.bytes;
	xfer->job.src = (struct copy_end){.linear = bytes};
	xfer->job.dst = (struct copy_end){.buffers = xfer->flow.side.buffers,
					  .buffer_count = xfer->flow.side.count};
	xfer->job.on_done = on_placed;
	r = copier_submit(transport->net.base.env.copier, &xfer->job);
	xfer->copying = r == 0;
	return err_pass(r);
}

/* ---- ours ---- */

static size_t tcp_xfer_request_bytes(const struct net_xfer *net)
{
	const struct tcp_xfer *xfer = container_of(net, const struct tcp_xfer, net);

	return net->op->header_len + (xfer->eager ? net->bytes : 0);
}

static bool tcp_xfer_may_ask(const struct net_xfer *net)
{
	return container_of(net, const struct tcp_xfer, net)->peer->line.unsent <
	       TCP_OUT_SOFT;
}

/* The request with all that travels in it. */
static int request_make(struct tcp_xfer *xfer, struct tcp_head *head,
			struct tcp_chunk **chunk_p)
{
	struct xp_op *op = xfer->net.op;
	struct tcp_peer *peer = xfer->peer;
	/* a long header is sent in place */
	const bool tail = op->owned && !xfer->eager && op->header_len > TAIL_MIN_BYTES;
	cleanup_free struct tcp_chunk *chunk =
		tcp_chunk_new(tail ? 0 : tcp_xfer_request_bytes(&xfer->net));
	uint8_t *bytes;
	int r = 0;

	if (!chunk)
		return err_pass(-ENOMEM);
	bytes = tcp_chunk_payload(chunk) + op->header_len;
	if (op->header_len > 0 && !tail)
		memcpy(tcp_chunk_payload(chunk), op->header, op->header_len);
	if (xfer->eager) {
		head->flags = TCP_FLAG_EAGER;
		r = stage_pack(peer->transport->hand, &xfer->flow.side, 0,
			       xfer->net.bytes, bytes);
	}
	if (r == 0 && xfer->net.kind == XP_READ && xfer->net.bytes > 0) {
		pthread_mutex_lock(&peer->lock);
		peer->sink_high[1] = xfer->net.id;
		pthread_mutex_unlock(&peer->lock);
		r = open_flow(xfer);
	}
	if (r < 0)
		return err_pass(r);
	if (tail) {
		chunk->tail = op->header;
		chunk->owned = mem_steal(op->owned);
		chunk->tail_len = op->header_len;
	}
	*chunk_p = mem_steal(chunk);
	return 0;
}

static int tcp_xfer_ask(struct net_xfer *net)
{
	struct tcp_xfer *xfer = tcp_xfer_of(net);
	struct tcp_head head = {
		.type = TCP_REQUEST,
		.id = net->id,
		.at = net->bytes,
		.code = net->kind,
		.length = (uint32_t)tcp_xfer_request_bytes(net),
	};
	struct tcp_chunk *chunk = NULL;
	int r = request_make(xfer, &head, &chunk);

	if (r < 0)
		return err_pass(r);
	tcp_line_send(xfer->peer, chunk, &head, NULL);
	return net->kind == XP_READ || xfer->eager; /* bytes may arrive, or were sent */
}

static int tcp_xfer_take_go(struct tcp_xfer *xfer)
{
	unsigned int state = sm_state(&xfer->net.sm);

	if ((state == NET_XFER_STOPPING || xfer->net.told) && xfer->net.asked)
		return 0; /* our CANCEL crosses it */
	if (xfer->net.kind != XP_WRITE || state != NET_XFER_ASKED || xfer->net.answered ||
	    xfer->net.bytes == 0)
		return net_proto(&xfer->net, "GO");
	sm_move(&xfer->net.sm, NET_XFER_MOVING);
	return err_pass(open_flow(xfer));
}

/* A small READ's bytes arrived with the answer; the streams have none of it. */
static int take_served(struct tcp_xfer *xfer, const struct tcp_head *head,
		       struct tcp_entry *entry)
{
	struct tcp_flow_view view = tcp_xfer_look(xfer);

	if (xfer->net.kind != XP_READ || head->length != xfer->net.bytes || view.came > 0)
		return err_raise(ERR_PROTO, "tcp: %u bytes answer transfer %" PRIu64,
				 head->length, xfer->net.id);
	if (xfer->flows)
		tcp_flow_stop(&xfer->flow);
	xfer->flows = false;
	xfer->entry = entry;
	if (tcp_xfer_place(xfer) < 0)
		net_xfer_stop_last(&xfer->net);
	return 0;
}

static int tcp_xfer_take_done(struct tcp_xfer *xfer, const struct tcp_head *head,
			      const uint8_t *payload, struct tcp_entry **entry)
{
	bool moving = sm_state(&xfer->net.sm) < NET_XFER_STOPPING && !xfer->net.finishing;
	struct err err;
	int r;

	if (head->code != ERR_OK) {
		net_fault_get(head->code, head->flags, payload, head->length, &err);
		return err_pass(net_xfer_done(&xfer->net, &err));
	}
	if (moving && net_is_source(&xfer->net) &&
	    tcp_xfer_look(xfer).next < xfer->net.bytes)
		return err_raise(ERR_PROTO, "tcp: DONE before the last byte was sent");
	r = net_xfer_done(&xfer->net, NULL);
	if (r < 0 || !moving || !(head->flags & TCP_FLAG_EAGER))
		return err_pass(r);
	if (*entry)
		r = take_served(xfer, head, *entry);
	else
		net_xfer_stop_last(&xfer->net); /* no memory for it */
	if (r == 0)
		*entry = NULL;
	net_xfer_check(&xfer->net);
	return err_pass(r);
}

static int tcp_xfer_take_answer(struct tcp_peer *peer, const struct tcp_head *head,
				const uint8_t *payload, struct tcp_entry **entry)
{
	struct net_xfer *net;
	int r = net_op_find(&peer->net, head->id, &net);

	if (r < 0)
		return err_pass(r);
	return err_pass(head->type == TCP_GO ? tcp_xfer_take_go(tcp_xfer_of(net))
					     : tcp_xfer_take_done(tcp_xfer_of(net), head,
								  payload, entry));
}

/* ---- theirs ---- */

static int tcp_xfer_refuse(struct net_peer *net, uint64_t id, const struct err *err)
{
	struct tcp_head head = {.type = TCP_DONE, .id = id};
	struct tcp_chunk *chunk = tcp_chunk_new(TCP_TEXT_MAX);

	if (!chunk)
		return err_pass(-ENOMEM);
	tcp_line_send(container_of(net, struct tcp_peer, net), chunk, &head, err);
	return 0;
}

static int tcp_xfer_take_request(struct tcp_peer *peer, const struct tcp_head *head,
				 struct tcp_entry **entry)
{
	struct net_xfer *net;
	struct tcp_xfer *xfer;
	int r;

	if (head->code != XP_WRITE && (head->flags & TCP_FLAG_EAGER))
		return err_raise(ERR_PROTO, "tcp: a READ that carries bytes");
	r = net_inbound_new(&peer->net, head->id, head->code, head->at, !*entry, &net);
	if (r < 0)
		return err_pass(r);
	pthread_mutex_lock(&peer->lock);
	peer->sink_high[0] = head->id;
	pthread_mutex_unlock(&peer->lock);
	if (!net)
		return 0;
	xfer = tcp_xfer_of(net);
	xfer->eager = head->flags & TCP_FLAG_EAGER;
	xfer->entry = mem_steal(*entry);
	net_request(net, xfer->entry->payload,
		    head->length - (xfer->eager ? net->bytes : 0));
	return 0;
}

/* Its plan is known: bytes may arrive, or be sent. */
static int tcp_xfer_begin(struct net_xfer *net)
{
	struct tcp_head head = {.type = TCP_GO, .id = net->id};
	struct tcp_xfer *xfer = tcp_xfer_of(net);
	int r;

	if (xfer->eager)
		return err_pass(tcp_xfer_place(xfer));
	if (net_is_source(net) && net->bytes <= TCP_EAGER_MAX && at_hand(xfer)) {
		xfer->eager = true; /* they are sent with the answer */
		return 0;
	}
	r = open_flow(xfer);
	if (r == 0 && !net_is_source(net))
		tcp_line_send(xfer->peer, mem_steal(xfer->spare[0]), &head, NULL);
	return err_pass(r);
}

const struct net_ops tcp_net_ops = {
	.peer_table = &tcp_peer_table,
	.xfer_table = &xfer_table,
	.key_magic = UINT32_C(0x4b54564b), /* "KVTK" */
	.step = tcp_peer_step,
	.flush = tcp_peer_flush,
	.peer_free = tcp_peer_free,
	.refuse = tcp_xfer_refuse,
	.may_ask = tcp_xfer_may_ask,
	.xfer_new = tcp_xfer_new,
	.xfer_free = tcp_xfer_free,
	.take_sides = tcp_xfer_take_sides,
	.drop_sides = tcp_xfer_drop_sides,
	.request_bytes = tcp_xfer_request_bytes,
	.ask = tcp_xfer_ask,
	.begin = tcp_xfer_begin,
	.halt = tcp_xfer_halt,
	.speak = tcp_xfer_speak,
	.is_over = tcp_xfer_is_over,
	.is_whole = tcp_xfer_is_whole,
	.say_done = tcp_xfer_say_done,
};

/* ---- frames ---- */

static int tcp_xfer_take_cancel(struct tcp_peer *peer, const struct tcp_head *head,
				const uint8_t *payload)
{
	struct net_xfer *net;
	struct err err;
	int r = net_inbound_find(&peer->net, head->id, &net);

	if (r < 0 || !net)
		return err_pass(r);
	net_fault_get(head->code, head->flags, payload, head->length, &err);
	net_xfer_stop(net, &err);
	return 0;
}

static void take_bye(struct tcp_peer *peer, const struct tcp_head *head,
		     const uint8_t *payload)
{
	struct err err;

	net_fault_get(head->code, head->flags, payload, head->length, &err);
	if (err.code == ERR_OK)
		err_set(&err, ERR_PEER, "tcp: the remote daemon closed the connection");
	peer->net.bye_came = true;
	net_peer_fail(&peer->net, &err);
}

void tcp_xfer_frame(struct tcp_peer *peer, const struct tcp_head *head,
		    const uint8_t *payload, struct tcp_entry *owned)
{
	int r = 0;

	switch (head->type) {
	case TCP_REQUEST:
		r = tcp_xfer_take_request(peer, head, &owned);
		break;
	case TCP_CANCEL:
		r = tcp_xfer_take_cancel(peer, head, payload);
		break;
	case TCP_BYE:
		take_bye(peer, head, payload);
		break;
	case TCP_BEAT:
		break;
	default:
		r = tcp_xfer_take_answer(peer, head, payload, &owned);
	}
	tcp_entry_free(owned);
	if (r < 0)
		net_peer_fail_last(&peer->net);
}
