/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A transfer's life, on the side that asks (an op) and on the side that answers
 * (an inbound).
 *
 *   WRITE  REQUEST -> on_request, land() -> GO -> DATA … -> DONE
 *   READ   REQUEST -> on_request, land() -> SERVE … -> DONE
 *
 * GO keeps bytes from arriving before their place is known. Bytes of a transfer
 * that is no larger than TCP_EAGER_MAX, from memory that the loop may read, are
 * in the REQUEST or the DONE instead, and are placed when both sides have agreed.
 *
 * Every request that left is answered by exactly one DONE, and with it the id is
 * dead on both sides; ids are never used again, so bytes that come later are
 * nobody's. Stopping (cancel, revoke, refusal, a fault, a lost peer) takes one
 * path: the flow is closed, and when no thread holds it the side is quiet.
 *
 * That is enough for the written engine, which needs nothing of the peer. For the
 * engine that is read it is enough when some of its bytes can never count over
 * there: they were not sent, or in a void frame. Only a WRITE that was sent whole
 * has to wait for the DONE, because the peer may have counted it. An op that ends
 * before its answer is told at once; what is left waits for the DONE alone.
 *
 * Done callbacks are only called from tcp_peer_step(): a transfer that is over
 * waits in peer->finished.
 */
#include "daemon/transport/tcp_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static const struct sm_state xfer_states[] = {
	[TCP_XFER_QUEUED] = {"queued", SM_TO(TCP_XFER_ASKED) | SM_TO(TCP_XFER_STOPPING)},
	[TCP_XFER_ASKED] = {"asked", SM_TO(TCP_XFER_MOVING) | SM_TO(TCP_XFER_STOPPING) |
					     SM_TO(TCP_XFER_OVER)},
	[TCP_XFER_MOVING] = {"moving", SM_TO(TCP_XFER_STOPPING) | SM_TO(TCP_XFER_OVER)},
	[TCP_XFER_STOPPING] = {"stopping", SM_TO(TCP_XFER_OVER)},
	[TCP_XFER_OVER] = {"over", 0},
};

static const struct sm_table xfer_table = {
	.name = "tcp transfer",
	.states = xfer_states,
	.count = ARRAY_LEN(xfer_states),
};

static bool is_source(const struct tcp_xfer *xfer)
{
	return xfer->ours == (xfer->kind == XP_WRITE);
}

/* ---- made and unmade ---- */

static void xfer_free(struct tcp_xfer *xfer)
{
	if (!xfer)
		return;
	list_remove(&xfer->link);
	list_remove(&xfer->queue_link);
	tcp_flow_fini(&xfer->flow);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++)
		mem_free(xfer->spare[i]);
	tcp_entry_free(xfer->entry);
	mem_free(xfer);
}

static void xfer_freep(struct tcp_xfer **xfer)
{
	xfer_free(*xfer);
}

static int xfer_new(struct tcp_peer *peer, enum xp_kind kind, struct tcp_xfer **xfer_p)
{
	mem_cleanup(xfer_freep) struct tcp_xfer *xfer = mem_zalloc(sizeof(*xfer));

	if (!xfer)
		return err_pass(-ENOMEM);
	xfer->peer = peer;
	xfer->kind = kind;
	list_init(&xfer->link);
	list_init(&xfer->queue_link);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++) {
		xfer->spare[i] = tcp_chunk_new(TCP_TEXT_MAX);
		if (!xfer->spare[i])
			return err_pass(-ENOMEM);
	}
	*xfer_p = mem_steal(xfer);
	return 0;
}

static int take_sides(struct tcp_xfer *xfer, const struct xp_sides *sides)
{
	bool source = is_source(xfer);
	int r;

	if (!xfer->bytes)
		return 0;
	r = xp_sides_check(sides, source, !source);
	if (r == 0)
		r = tcp_flow_init(&xfer->flow, xfer->peer, sides->plan,
				  source ? sides->src : sides->dst,
				  source ? sides->src_count : sides->dst_count, source);
	xfer->flow.id = xfer->id;
	xfer->flow.ours = xfer->ours;
	return err_pass(r);
}

/* May the loop itself read and write its memory? */
static bool at_hand(const struct tcp_xfer *xfer)
{
	return stage_mapped(&xfer->flow.side) && !xfer->flow.guarded;
}

static int open_flow(struct tcp_xfer *xfer)
{
	int r = is_source(xfer) ? tcp_flow_send(&xfer->flow) :
				  tcp_flow_receive(&xfer->flow);

	if (r < 0)
		return err_pass(r);
	xfer->flows = true;
	tcp_tick_want(xfer->peer->transport);
	return 0;
}

/* ---- where it stands ---- */

static struct tcp_flow_view look(struct tcp_xfer *xfer)
{
	struct tcp_flow_view view = {.still = true};

	if (xfer->flows)
		tcp_flow_look(&xfer->flow, &view);
	else if (xfer->bytes == 0 || xfer->placed || (xfer->eager && is_source(xfer)))
		view.moved = view.next = xfer->bytes;
	view.still &= !xfer->copying;
	return view;
}

void tcp_xfer_progress(struct tcp_xfer *xfer)
{
	uint64_t moved = xfer->flows ? look(xfer).moved : 0;

	if (!xfer->flows)
		return;
	if (xfer->op)
		xfer->op->moved = moved;
	else if (!xfer->ours)
		xfer->in.moved = moved;
}

/* Can a WRITE that is being stopped not succeed at the other side any more? */
static bool cannot_count(const struct tcp_xfer *xfer, const struct tcp_flow_view *view)
{
	return xfer->bytes > 0 && !xfer->eager && (!xfer->flows || view->spoiled);
}

static bool is_over(const struct tcp_xfer *xfer, const struct tcp_flow_view *view)
{
	switch (sm_state(&xfer->sm)) {
	case TCP_XFER_STOPPING:
		return view->still &&
		       (!xfer->ours || !xfer->asked || xfer->answered ||
			xfer->kind == XP_READ || !tcp_peer_live(xfer->peer) ||
			cannot_count(xfer, view));
	case TCP_XFER_ASKED:
		return xfer->ours && xfer->answered;
	case TCP_XFER_MOVING:
		return view->still && view->moved == xfer->bytes &&
		       (!xfer->ours || xfer->answered);
	default:
		return false;
	}
}

/* ---- stop, over, told ---- */

static void send_cancel(struct tcp_xfer *xfer)
{
	struct tcp_head head = {.type = TCP_CANCEL, .id = xfer->id};

	xfer->cancel_sent = true;
	tcp_line_send(xfer->peer, mem_steal(xfer->spare[1]), &head, &xfer->err);
}

void tcp_xfer_check(struct tcp_xfer *xfer)
{
	struct tcp_flow_view view;

	if (xfer->finishing)
		return;
	if (sm_state(&xfer->sm) == TCP_XFER_STOPPING && xfer->ours && xfer->asked &&
	    !xfer->answered && !xfer->cancel_sent && tcp_peer_live(xfer->peer))
		send_cancel(xfer);
	view = look(xfer);
	if (!is_over(xfer, &view))
		return;
	tcp_xfer_progress(xfer);
	xfer->finishing = true;
	list_push_back(&xfer->peer->finished, &xfer->queue_link);
	tcp_peer_kick(xfer->peer);
}

void tcp_xfer_stop(struct tcp_xfer *xfer, const struct err *err)
{
	struct tcp_peer *peer = xfer->peer;

	if (xfer->finishing || sm_state(&xfer->sm) >= TCP_XFER_STOPPING)
		return;
	xfer->err = *err;
	if (xfer->err.code == ERR_OK)
		err_set(&xfer->err, ERR_CANCELED, "canceled");
	list_remove(&xfer->queue_link);
	sm_move(&xfer->sm, TCP_XFER_STOPPING);
	xfer->deadline_ns = loop_now_ns(peer->timer.loop) + peer->transport->fence_ns;
	if (tcp_peer_live(peer))
		tcp_peer_watch(peer, xfer->deadline_ns);
	if (xfer->flows)
		tcp_flow_stop(&xfer->flow);
	if (xfer->copying)
		copier_cancel(peer->transport->base.env.copier, &xfer->job);
	tcp_xfer_check(xfer);
}

static void stop_last(struct tcp_xfer *xfer)
{
	struct err err;

	err_take(&err);
	tcp_xfer_stop(xfer, &err);
}

/* The request's place in the peer's limits is free again. */
static void unask(struct tcp_xfer *xfer)
{
	xfer->peer->asked--;
	xfer->peer->asked_bytes -= xfer->asked_len;
	idmap_remove(&xfer->peer->ops, xfer->id);
}

static void tell_op(struct tcp_xfer *xfer)
{
	struct tcp_flow_view view = look(xfer);
	struct xp_op *op = xfer->op;

	/* A WRITE that was canceled too late has succeeded, and says so. */
	if (xfer->answered && xfer->verdict.code == ERR_OK && view.moved == xfer->bytes) {
		op->result = 0;
		op->err = (struct err){0};
		op->moved = xfer->bytes;
	} else {
		op->err = xfer->err;
		op->result = -err_errno(xfer->err.code);
	}
	op->impl = NULL;
	xfer->op = NULL;
	if (xfer->asked && !xfer->answered && tcp_peer_live(xfer->peer)) {
		xfer->told = true;
		xfer->flows = false;
		tcp_flow_fini(&xfer->flow);
		list_push_back(&xfer->peer->xfers, &xfer->link);
	} else {
		if (xfer->asked && !xfer->answered)
			unask(xfer);
		else if (!xfer->asked)
			idmap_remove(&xfer->peer->ops, xfer->id);
		xfer_free(xfer);
	}
	op->on_done(op);
}

/* The answer to a small READ is its bytes. */
static int send_served(struct tcp_xfer *xfer)
{
	struct tcp_peer *peer = xfer->peer;
	struct tcp_head head = {.type = TCP_DONE,
				.id = xfer->id,
				.flags = TCP_FLAG_EAGER,
				.length = (uint32_t)xfer->bytes};
	struct tcp_chunk *chunk = tcp_chunk_new(xfer->bytes);
	int r;

	if (!chunk)
		return err_pass(-ENOMEM);
	r = stage_pack(peer->transport->hand, &xfer->flow.side, 0, xfer->bytes,
		       tcp_chunk_payload(chunk));
	if (r < 0) {
		mem_free(chunk);
		return err_pass(r);
	}
	head.sum = tcp_sum(peer->verify,
			   &(struct iovec){tcp_chunk_payload(chunk), xfer->bytes}, 1);
	tcp_line_send(peer, chunk, &head, NULL);
	return 0;
}

static void tell_inbound(struct tcp_xfer *xfer, bool ok)
{
	const struct xp_callbacks *up = &xfer->peer->transport->base.callbacks;
	struct tcp_head head = {.type = TCP_DONE, .id = xfer->id};
	bool serve = ok && xfer->eager && is_source(xfer);
	struct err err = xfer->err;

	idmap_remove(&xfer->peer->inbounds, xfer->id);
	if (serve && tcp_peer_live(xfer->peer) && send_served(xfer) < 0) {
		err_take(&err);
		serve = ok = false;
	}
	if (!serve && tcp_peer_live(xfer->peer))
		tcp_line_send(xfer->peer, mem_steal(xfer->spare[1]), &head,
			      ok ? NULL : &err);
	if (ok)
		xfer->in.moved = xfer->bytes;
	tcp_flow_fini(&xfer->flow);
	up->on_inbound_done(up->owner, &xfer->in, ok ? NULL : &err);
	xfer_free(xfer);
}

void tcp_xfer_tell(struct tcp_xfer *xfer)
{
	bool ok = sm_state(&xfer->sm) != TCP_XFER_STOPPING;

	sm_move(&xfer->sm, TCP_XFER_OVER);
	list_remove(&xfer->link);
	if (xfer->ours)
		tell_op(xfer);
	else
		tell_inbound(xfer, ok);
}

void tcp_xfers_drop(struct tcp_peer *peer)
{
	struct tcp_xfer *xfer;

	list_foreach_safe(xfer, &peer->xfers, link) {
		if (!xfer->told)
			continue;
		unask(xfer);
		xfer_free(xfer);
	}
}

/* ---- bytes that came in a request or an answer ---- */

static void on_placed(struct copy_job *job)
{
	struct tcp_xfer *xfer = container_of(job, struct tcp_xfer, job);

	xfer->copying = false;
	if (job->result < 0)
		tcp_xfer_stop(xfer, &job->err);
	else
		xfer->placed = true;
	tcp_xfer_check(xfer);
}

static int place(struct tcp_xfer *xfer, uint64_t sum)
{
	const struct tcp_entry *entry = xfer->entry;
	struct tcp_transport *transport = xfer->peer->transport;
	uint8_t *bytes = xfer->entry->payload + (entry->head.length - xfer->bytes);
	int r;

	if (tcp_sum(xfer->peer->verify, &(struct iovec){bytes, xfer->bytes}, 1) !=
	    (xfer->peer->verify == TCP_VERIFY_NONE ? 0 : sum))
		return err_raise(ERR_TRANSPORT,
				 "tcp: the checksum of %" PRIu64
				 " bytes is not the sender's",
				 xfer->bytes);
	if (at_hand(xfer)) {
		r = stage_unpack(transport->hand, &xfer->flow.side, 0, xfer->bytes, bytes);
		xfer->placed = r == 0;
		return err_pass(r);
	}
	xfer->job.plan = xfer->flow.side.plan;
	xfer->job.begin = 0;
	xfer->job.end = xfer->bytes;
	xfer->job.src = (struct copy_end){.linear = bytes};
	xfer->job.dst = (struct copy_end){.buffers = xfer->flow.side.buffers,
					  .buffer_count = xfer->flow.side.count};
	xfer->job.on_done = on_placed;
	r = copier_submit(transport->base.env.copier, &xfer->job);
	xfer->copying = r == 0;
	return err_pass(r);
}

/* ---- ours ---- */

static int post_check(struct tcp_peer *peer, const struct xp_op *op)
{
	if (!tcp_peer_live(peer) || !peer->base.ready)
		return err_raise(ERR_PEER, "tcp: no connection to %s", peer->name);
	if (op->kind != XP_WRITE && op->kind != XP_READ)
		return err_raise(ERR_INVAL, "tcp: ops are WRITE or READ");
	if (op->header_len > XP_HEADER_MAX)
		return err_raise(ERR_TOOBIG, "header: %zu bytes, at most %u",
				 op->header_len, XP_HEADER_MAX);
	return 0;
}

int tcp_post(struct xp_peer *base, struct xp_op *op)
{
	struct tcp_peer *peer = (struct tcp_peer *)base;
	mem_cleanup(xfer_freep) struct tcp_xfer *xfer = NULL;
	int r;

	r = post_check(peer, op);
	if (r == 0)
		r = xfer_new(peer, op->kind, &xfer);
	if (r < 0)
		return err_pass(r);
	xfer->op = op;
	xfer->ours = true;
	xfer->bytes = op->sides.plan ? op->sides.plan->bytes : 0;
	xfer->id = peer->next_id;
	r = take_sides(xfer, &op->sides);
	if (r == 0)
		r = idmap_put(&peer->ops, xfer->id, xfer);
	if (r < 0)
		return err_pass(r);
	peer->next_id++;
	xfer->eager = op->kind == XP_WRITE && xfer->bytes > 0 &&
		      xfer->bytes <= TCP_EAGER_MAX && at_hand(xfer);
	sm_init(&xfer->sm, &xfer_table, TCP_XFER_QUEUED);
	list_push_back(&peer->xfers, &xfer->link);
	list_push_back(&peer->queued, &xfer->queue_link);
	op->moved = 0;
	op->impl = mem_steal(xfer);
	tcp_peer_kick(peer);
	return 0;
}

static size_t request_len(const struct tcp_xfer *xfer)
{
	return xfer->op->header_len + (xfer->eager ? xfer->bytes : 0);
}

/* The request with all that travels in it. */
static int request_make(struct tcp_xfer *xfer, struct tcp_head *head,
			struct tcp_chunk **chunk_p)
{
	const struct xp_op *op = xfer->op;
	struct tcp_peer *peer = xfer->peer;
	cleanup_free struct tcp_chunk *chunk = tcp_chunk_new(request_len(xfer));
	uint8_t *bytes;
	int r = 0;

	if (!chunk)
		return err_pass(-ENOMEM);
	bytes = tcp_chunk_payload(chunk) + op->header_len;
	if (op->header_len > 0)
		memcpy(tcp_chunk_payload(chunk), op->header, op->header_len);
	if (xfer->eager) {
		head->flags = TCP_FLAG_EAGER;
		r = stage_pack(peer->transport->hand, &xfer->flow.side, 0, xfer->bytes,
			       bytes);
		head->sum = tcp_sum(peer->verify, &(struct iovec){bytes, xfer->bytes}, 1);
	}
	if (r == 0 && xfer->kind == XP_READ && xfer->bytes > 0) {
		pthread_mutex_lock(&peer->lock);
		peer->sink_high[1] = xfer->id;
		pthread_mutex_unlock(&peer->lock);
		r = open_flow(xfer);
	}
	if (r < 0)
		return err_pass(r);
	*chunk_p = mem_steal(chunk);
	return 0;
}

static void ask(struct tcp_xfer *xfer)
{
	struct tcp_peer *peer = xfer->peer;
	struct tcp_head head = {
		.type = TCP_REQUEST,
		.id = xfer->id,
		.at = xfer->bytes,
		.code = xfer->kind,
		.length = (uint32_t)request_len(xfer),
	};
	struct tcp_chunk *chunk = NULL;

	list_remove(&xfer->queue_link);
	if (request_make(xfer, &head, &chunk) < 0) {
		stop_last(xfer);
		return;
	}
	xfer->asked = true;
	xfer->asked_len = head.length;
	peer->asked++;
	peer->asked_bytes += head.length;
	sm_move(&xfer->sm, TCP_XFER_ASKED);
	if (xfer->kind == XP_READ || xfer->eager)
		sm_move(&xfer->sm, TCP_XFER_MOVING); /* bytes may come, or are gone */
	tcp_line_send(peer, chunk, &head, NULL);
}

void tcp_xfer_pump(struct tcp_peer *peer)
{
	struct tcp_xfer *xfer;

	while ((xfer = list_first(&peer->queued, struct tcp_xfer, queue_link)) &&
	       peer->asked < XP_INBOUND_MAX && peer->line.unsent < TCP_OUT_SOFT &&
	       (peer->asked_bytes == 0 ||
		peer->asked_bytes + request_len(xfer) <= TCP_HEADERS_MAX)) {
		ask(xfer);
		if (loop_enough(peer->timer.loop)) {
			tcp_peer_kick(peer);
			return;
		}
	}
}

void tcp_cancel(struct xp_op *op, const struct err *why)
{
	if (op->impl)
		tcp_xfer_stop(op->impl, why);
}

static int take_go(struct tcp_xfer *xfer)
{
	unsigned int state = sm_state(&xfer->sm);

	if ((state == TCP_XFER_STOPPING || xfer->told) && xfer->asked)
		return 0; /* our CANCEL crosses it */
	if (xfer->kind != XP_WRITE || state != TCP_XFER_ASKED || xfer->answered ||
	    xfer->bytes == 0)
		return err_raise(ERR_PROTO, "tcp: GO for transfer %" PRIu64 " (%s)",
				 xfer->id, sm_name(&xfer->sm));
	sm_move(&xfer->sm, TCP_XFER_MOVING);
	return err_pass(open_flow(xfer));
}

/* A small READ's bytes came with the answer; the streams have none of it. */
static int take_served(struct tcp_xfer *xfer, const struct tcp_head *head,
		       struct tcp_entry *entry)
{
	struct tcp_flow_view view = look(xfer);

	if (xfer->kind != XP_READ || head->length != xfer->bytes || view.came > 0)
		return err_raise(ERR_PROTO, "tcp: %u bytes answer transfer %" PRIu64,
				 head->length, xfer->id);
	if (xfer->flows)
		tcp_flow_stop(&xfer->flow);
	xfer->flows = false;
	xfer->entry = entry;
	if (place(xfer, head->sum) < 0)
		stop_last(xfer);
	return 0;
}

static int take_done(struct tcp_xfer *xfer, const struct tcp_head *head,
		     const uint8_t *payload, struct tcp_entry **entry)
{
	bool stopping = sm_state(&xfer->sm) == TCP_XFER_STOPPING;
	int r = 0;

	if (!xfer->asked || xfer->answered)
		return err_raise(ERR_PROTO, "tcp: DONE for transfer %" PRIu64 " (%s)",
				 xfer->id, sm_name(&xfer->sm));
	unask(xfer);
	if (xfer->told) {
		xfer_free(xfer);
		return 0;
	}
	xfer->answered = true;
	if (head->code != ERR_OK) {
		tcp_head_get_err(head, payload, head->length, &xfer->verdict);
		tcp_xfer_stop(xfer, &xfer->verdict);
	} else if (!stopping && !xfer->finishing && (head->flags & TCP_FLAG_EAGER)) {
		r = *entry ? take_served(xfer, head, *entry) : 0;
		if (r == 0 && *entry)
			*entry = NULL;
		else if (r == 0)
			stop_last(xfer); /* no memory for it */
	} else if (!stopping && is_source(xfer) && look(xfer).next < xfer->bytes) {
		return err_raise(ERR_PROTO, "tcp: DONE before the last byte was sent");
	}
	tcp_xfer_check(xfer);
	return err_pass(r);
}

static int take_answer(struct tcp_peer *peer, const struct tcp_head *head,
		       const uint8_t *payload, struct tcp_entry **entry)
{
	struct tcp_xfer *xfer = idmap_get(&peer->ops, head->id);

	if (!xfer)
		return err_raise(ERR_PROTO, "tcp: an answer to transfer %" PRIu64
				 " that is not there", head->id);
	return err_pass(head->type == TCP_GO ? take_go(xfer) :
					       take_done(xfer, head, payload, entry));
}

/* ---- theirs ---- */

static int admit_request(struct tcp_peer *peer, const struct tcp_head *head)
{
	if (head->id <= peer->inbound_high)
		return err_raise(ERR_PROTO, "tcp: request %" PRIu64 " after %" PRIu64,
				 head->id, peer->inbound_high);
	if (head->code != XP_WRITE && head->code != XP_READ)
		return err_raise(ERR_PROTO, "tcp: request of kind %u", head->code);
	if (head->code != XP_WRITE && (head->flags & TCP_FLAG_EAGER))
		return err_raise(ERR_PROTO, "tcp: a READ that brings bytes");
	if (idmap_count(&peer->inbounds) >= XP_INBOUND_MAX)
		return err_raise(ERR_PROTO, "tcp: over %u unfinished requests",
				 XP_INBOUND_MAX);
	return 0;
}

/* No memory for it: that costs the request, not the peer, if words still fit. */
static void refuse(struct tcp_peer *peer, uint64_t id)
{
	struct tcp_head head = {.type = TCP_DONE, .id = id};
	struct tcp_chunk *chunk;
	struct err err;

	err_take(&err);
	if (err.code == ERR_OK)
		err_set(&err, ERR_NOMEM, "tcp: no memory for a request");
	chunk = tcp_chunk_new(TCP_TEXT_MAX);
	if (chunk)
		tcp_line_send(peer, chunk, &head, &err);
	else
		tcp_peer_fail_last(peer);
}

static int take_request(struct tcp_peer *peer, const struct tcp_head *head,
			struct tcp_entry **entry)
{
	const struct xp_callbacks *up = &peer->transport->base.callbacks;
	mem_cleanup(xfer_freep) struct tcp_xfer *xfer = NULL;
	struct xp_inbound *in;
	int r = admit_request(peer, head);

	if (r < 0)
		return err_pass(r);
	peer->inbound_high = head->id;
	pthread_mutex_lock(&peer->lock);
	peer->sink_high[0] = head->id;
	pthread_mutex_unlock(&peer->lock);
	if (!*entry || xfer_new(peer, (enum xp_kind)head->code, &xfer) < 0 ||
	    idmap_put(&peer->inbounds, head->id, xfer) < 0) {
		refuse(peer, head->id);
		return 0;
	}
	xfer->id = head->id;
	xfer->bytes = head->at;
	xfer->eager = head->flags & TCP_FLAG_EAGER;
	sm_init(&xfer->sm, &xfer_table, TCP_XFER_ASKED);
	list_push_back(&peer->xfers, &xfer->link);
	in = &xfer->in;
	*in = (struct xp_inbound){
		.peer = (struct xp_peer *)peer,
		.kind = xfer->kind,
		.header = (*entry)->payload,
		.header_len = head->length - (xfer->eager ? xfer->bytes : 0),
		.bytes = xfer->bytes,
	};
	xfer->entry = mem_steal(*entry);
	xfer = NULL;
	up->on_request(up->owner, in);
	return 0;
}

/* Its plan is there: bytes may come, or go. */
static int begin(struct tcp_xfer *xfer)
{
	struct tcp_head head = {.type = TCP_GO, .id = xfer->id};
	int r;

	if (xfer->bytes == 0)
		return 0;
	if (xfer->eager)
		return err_pass(place(xfer, xfer->entry->head.sum));
	if (is_source(xfer) && xfer->bytes <= TCP_EAGER_MAX && at_hand(xfer)) {
		xfer->eager = true; /* they go with the answer */
		return 0;
	}
	r = open_flow(xfer);
	if (r == 0 && !is_source(xfer))
		tcp_line_send(xfer->peer, mem_steal(xfer->spare[0]), &head, NULL);
	return err_pass(r);
}

void tcp_land(struct xp_inbound *in, const struct xp_sides *sides, const struct err *err)
{
	struct tcp_xfer *xfer = container_of(in, struct tcp_xfer, in);
	uint64_t bytes = sides && sides->plan ? sides->plan->bytes : 0;
	int r = 0;

	if (sm_state(&xfer->sm) != TCP_XFER_ASKED)
		return; /* stopped meanwhile: its end is on the way */
	if (err) {
		tcp_xfer_stop(xfer, err);
		return;
	}
	if (bytes != xfer->bytes)
		r = err_raise(ERR_PLAN, "plan of %" PRIu64 " bytes here, %" PRIu64 " there",
			      bytes, xfer->bytes);
	if (r == 0)
		r = take_sides(xfer, sides);
	if (r == 0) {
		sm_move(&xfer->sm, TCP_XFER_MOVING);
		r = begin(xfer);
	}
	if (r < 0)
		stop_last(xfer);
	tcp_xfer_check(xfer);
}

void tcp_revoke(struct xp_inbound *in, const struct err *why)
{
	tcp_xfer_stop(container_of(in, struct tcp_xfer, in), why);
}

static int take_cancel(struct tcp_peer *peer, const struct tcp_head *head,
		       const uint8_t *payload)
{
	struct tcp_xfer *xfer = idmap_get(&peer->inbounds, head->id);
	struct err err;

	if (head->id > peer->inbound_high)
		return err_raise(ERR_PROTO, "tcp: CANCEL of transfer %" PRIu64
				 " that was never asked", head->id);
	if (!xfer)
		return 0; /* our DONE crosses it */
	tcp_head_get_err(head, payload, head->length, &err);
	tcp_xfer_stop(xfer, &err);
	return 0;
}

static void take_bye(struct tcp_peer *peer, const struct tcp_head *head,
		     const uint8_t *payload)
{
	struct err err;

	tcp_head_get_err(head, payload, head->length, &err);
	if (err.code == ERR_OK)
		err_set(&err, ERR_PEER, "tcp: the remote daemon closed the connection");
	peer->deaf = true;
	tcp_peer_fail(peer, &err);
}

void tcp_xfer_frame(struct tcp_peer *peer, const struct tcp_head *head,
		    const uint8_t *payload, struct tcp_entry *owned)
{
	int r = 0;

	switch (head->type) {
	case TCP_REQUEST:
		r = take_request(peer, head, &owned);
		break;
	case TCP_CANCEL:
		r = take_cancel(peer, head, payload);
		break;
	case TCP_BYE:
		take_bye(peer, head, payload);
		break;
	default:
		r = take_answer(peer, head, payload, &owned);
	}
	tcp_entry_free(owned);
	if (r < 0)
		tcp_peer_fail_last(peer);
}
