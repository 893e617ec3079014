/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames: all messages over queue pair 0, in order.
 *
 * A frame takes one receive at the other side, and the sender knows how many are posted
 * there: credits. A used receive is posted again first, then announced with the next
 * frame, or by a separate one when half the queue is due. The last credit is reserved for
 * that one, so two sides that have used up all others can send credits to each other. So
 * "receiver not ready" never happens between two correct daemons.
 *
 * A request's header may be long (XP_HEADER_MAX): it follows its REQUEST in pieces,
 * MORE, with nothing of another request in between; it counts when it is whole.
 *
 * The memory that a peer can make this daemon hold is bounded: by XP_INBOUND_MAX
 * unfinished requests, by NET_HEADERS_MAX bytes of their headers (the sender keeps to
 * both), and by the credits for the rest.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <assert.h>
#include <string.h>

#include "daemon/base/mem.h"

#define PAYLOAD_MAX (VERBS_MSG_BYTES - VERBS_FRAME_BYTES)

/* ---- out ---- */

struct verbs_out *verbs_out_new(void)
{
	struct verbs_out *out = mem_zalloc(sizeof(*out));

	if (out)
		list_init(&out->link);
	return out;
}

static void verbs_frame_queue(struct verbs_peer *peer, struct verbs_out *out)
{
	list_push_back(&peer->out, &out->link);
	net_peer_kick(&peer->net);
}

void verbs_send(struct verbs_peer *peer, struct verbs_out *out,
		const struct verbs_frame *frame, const struct err *err)
{
	out->frame = *frame;
	if (err) {
		out->frame.code = err->code;
		out->frame.flags = net_fault_flags(err);
		out->left = strnlen(err->text, sizeof(out->text));
		memcpy(out->text, err->text, out->left);
		out->payload = (const uint8_t *)out->text;
	}
	verbs_frame_queue(peer, out);
}

void verbs_send_bytes(struct verbs_peer *peer, struct verbs_out *out,
		      const struct verbs_frame *frame, const void *bytes, size_t len)
{
	assert(len <= sizeof(out->text));
	out->frame = *frame;
	memcpy(out->text, bytes, len);
	out->left = len;
	out->payload = (const uint8_t *)out->text;
	verbs_frame_queue(peer, out);
}

void verbs_send_request(struct verbs_peer *peer, struct verbs_out *out,
			const struct verbs_frame *frame, struct verbs_xfer *xfer)
{
	out->frame = *frame;
	out->frame.total = (uint32_t)xfer->net.op->header_len;
	out->payload = xfer->net.op->header;
	out->left = xfer->net.op->header_len;
	out->xfer = xfer;
	xfer->busy++;
	verbs_frame_queue(peer, out);
}

static void out_done(struct verbs_out *out)
{
	struct verbs_xfer *xfer = out->xfer;

	list_remove(&out->link);
	mem_free(out);
	if (xfer) {
		xfer->busy--;
		net_xfer_check(&xfer->net);
	}
}

/* One message of it. Returns false when it cannot be posted. */
static bool post_message(struct verbs_peer *peer, struct verbs_out *out)
{
	struct verbs_qp *qp = &peer->qps[0];
	int buffer = __builtin_ctz(peer->send_free);
	uint8_t *at = peer->buffers +
		      (size_t)(VERBS_DEPTH + (unsigned)buffer) * VERBS_MSG_BYTES;
	size_t len = out->left < PAYLOAD_MAX ? out->left : PAYLOAD_MAX;
	struct ibv_sge sge = {
		.addr = (uint64_t)(uintptr_t)at,
		.length = (uint32_t)(VERBS_FRAME_BYTES + len),
		.lkey = peer->buffer_mr->lkey,
	};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND};
	struct verbs_sent entry = {.buffer = buffer};

	out->frame.length = (uint32_t)len;
	out->frame.credits = (uint16_t)peer->credits_due;
	verbs_frame_put(&out->frame, at);
	if (len)
		memcpy(at + VERBS_FRAME_BYTES, out->payload, len);
	if (sge.length <= qp->max_inline)
		wr.send_flags = IBV_SEND_INLINE;
	if (verbs_qp_post(qp, &wr, 1, &entry) < 0) {
		err_clear(); /* the peer has failed, with its own reason */
		return false;
	}
	peer->send_free &= ~(1u << buffer);
	peer->credits_due = 0;
	peer->credits--;
	out->payload += len;
	out->left -= len;
	out->frame.type = VERBS_MORE; /* if there is more */
	return true;
}

void verbs_frame_pump(struct verbs_peer *peer)
{
	struct verbs_out credit = {.frame = {.type = VERBS_CREDIT}}, *out;

	/* the last credit, and this much of the send queue, are for frames alone */
	while ((out = list_first(&peer->out, struct verbs_out, link)) &&
	       peer->credits > 1 && peer->send_free && peer->qps[0].sq_free &&
	       sm_state(&peer->qps[0].sm) == VERBS_QP_UP) {
		bool bye = out->frame.type == VERBS_BYE;

		if (!post_message(peer, out))
			return;
		if (out->left)
			continue;
		peer->bye_out |= bye;
		out_done(out);
	}
	if (sm_state(&peer->qps[0].sm) == VERBS_QP_UP &&
	    peer->credits_due >= VERBS_DEPTH / 2 && peer->credits && peer->send_free &&
	    peer->qps[0].sq_free)
		post_message(peer, &credit);
}

void verbs_frames_drop(struct verbs_peer *peer)
{
	struct verbs_out *out;

	while ((out = list_first(&peer->out, struct verbs_out, link)))
		out_done(out);
}

/* ---- in ---- */

static int take_credits(struct verbs_peer *peer, const struct verbs_frame *frame)
{
	if (frame->credits > peer->peer_depth ||
	    peer->credits + frame->credits > peer->peer_depth)
		return err_raise(ERR_PROTO, "verbs frame: %u credits, with %u of %u left",
				 frame->credits, peer->credits, peer->peer_depth);
	if (frame->credits)
		net_peer_kick(&peer->net);
	peer->credits += frame->credits;
	return 0;
}

static int verbs_frame_take(struct verbs_peer *peer, const uint8_t *at, uint32_t len)
{
	const uint8_t *payload = at + VERBS_FRAME_BYTES;
	struct verbs_frame frame;
	struct err err;
	int r = verbs_frame_get(at, len, &frame);

	if (r == 0)
		r = take_credits(peer, &frame);
	if (r < 0)
		return err_pass(r);
	switch (frame.type) {
	case VERBS_CREDIT:
		return 0;
	case VERBS_BYE:
		net_fault_get(frame.code, frame.flags, payload, frame.length, &err);
		verbs_peer_bye(peer, &err);
		return 0;
	case VERBS_RAIL:
		return err_pass(verbs_rail_reported(peer, &frame));
	default:
		return err_pass(verbs_xfer_frame(peer, &frame, payload));
	}
}

void verbs_frame_in(struct verbs_peer *peer, uint32_t buffer, uint32_t len)
{
	const uint8_t *at = peer->buffers + (size_t)buffer * VERBS_MSG_BYTES;

	peer->credits_due++;
	if (!net_peer_live(&peer->net) || peer->net.bye_came)
		return;
	if (verbs_frame_take(peer, at, len) < 0)
		net_peer_fail_last(&peer->net);
}
