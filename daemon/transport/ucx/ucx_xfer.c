/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ucx backend's part of a transfer's life cycle (net.h).
 *
 *   WRITE  REQUEST -> on_request, land() -> GO -> DATA … -> DONE
 *   READ   REQUEST -> on_request, land() -> SERVE … -> DONE
 *
 * GO keeps bytes from arriving before their place is known: nothing of a peer is held
 * unsolicited. Slices that arrive after the DONE find no transfer and are dropped. So the
 * destination's DONE guarantees that nothing more can land, and at a READ the source's
 * DONE that nothing more will be sent.
 *
 * A stopped side is quiet when the last piece inside libucp and the copy threads has
 * returned. The requester sends CANCEL at once and waits for the DONE too.
 */
#include "daemon/transport/ucx/ucx_impl.h"

#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

static bool ucx_xfer_invariant(const struct sm *sm, unsigned int from)
{
	const struct ucx_xfer *xfer = container_of(sm, const struct ucx_xfer, net.sm);

	(void)from;
	/* the promise "quiesced" */
	return sm_state(sm) != NET_XFER_OVER ||
	       (xfer->busy == 0 && list_empty(&xfer->pieces));
}

static const struct sm_table xfer_table = {
	.name = "ucx transfer",
	.states = net_xfer_states,
	.count = NET_XFER_STATES,
	.invariant = ucx_xfer_invariant,
};

static struct ucx_xfer *ucx_xfer_of(struct net_xfer *net)
{
	return container_of(net, struct ucx_xfer, net);
}

/* ---- made and unmade ---- */

static void ucx_xfer_free(struct net_xfer *net)
{
	struct ucx_xfer *xfer = ucx_xfer_of(net);

	list_remove(&xfer->source_link);
	spans_fini(&xfer->spans);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++)
		mem_free(xfer->spare[i]);
	ucx_entry_free(xfer->entry);
	mem_free(xfer);
}

static int ucx_xfer_new(struct net_peer *net, struct net_xfer **xfer_p)
{
	struct ucx_peer *peer = container_of(net, struct ucx_peer, net);
	struct ucx_xfer *xfer = mem_zalloc(sizeof(*xfer));

	if (!xfer)
		return err_pass(-ENOMEM);
	xfer->peer = peer;
	list_init(&xfer->source_link);
	list_init(&xfer->pieces);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++) {
		xfer->spare[i] = ucx_send_new(peer);
		if (!xfer->spare[i]) {
			ucx_xfer_free(&xfer->net);
			return err_pass(-ENOMEM);
		}
	}
	*xfer_p = &xfer->net;
	return 0;
}

static int ucx_xfer_take_sides(struct net_xfer *net, const struct xp_sides *sides)
{
	struct ucx_xfer *xfer = ucx_xfer_of(net);
	bool source = net_is_source(net);
	int r = xp_sides_check(sides, source, !source);

	if (r < 0)
		return err_pass(r);
	return err_pass(
		ucx_side_init(&xfer->side, sides->plan, source ? sides->src : sides->dst,
			      source ? sides->src_count : sides->dst_count, source));
}

static void ucx_xfer_drop_sides(struct net_xfer *net)
{
	ucx_side_fini(&ucx_xfer_of(net)->side);
}

/* ---- stop, over, reported ---- */

static void ucx_xfer_speak(struct net_xfer *net)
{
	struct ucx_frame frame = {.type = UCX_CANCEL, .id = net->id};

	if (!net_owes_cancel(net))
		return;
	net->stop_sent = true;
	ucx_send_frame(mem_steal(ucx_xfer_of(net)->spare[1]), &frame, &net->err, NULL,
		       NULL, 0);
}

static void ucx_xfer_halt(struct net_xfer *net)
{
	ucx_source_stop(ucx_xfer_of(net));
	ucx_sink_stop(ucx_xfer_of(net));
}

static bool ucx_xfer_is_over(struct net_xfer *net)
{
	const struct ucx_xfer *xfer = ucx_xfer_of(net);

	if (xfer->busy)
		return false;
	switch (sm_state(&net->sm)) {
	case NET_XFER_STOPPING:
		return !net->ours || !net->asked || net->answered ||
		       !net_peer_live(net->peer);
	case NET_XFER_ASKED:
		return net->ours && net->answered;
	case NET_XFER_MOVING:
		if (net->ours && !net->answered)
			return false;
		return net_is_source(net) ? ucx_source_complete(xfer)
					  : ucx_sink_complete(xfer);
	default:
		return false;
	}
}

static bool ucx_xfer_is_whole(struct net_xfer *net)
{
	const struct ucx_xfer *xfer = ucx_xfer_of(net);

	return net_is_source(net) ? xfer->next_byte == net->bytes
				  : ucx_sink_complete(xfer);
}

static int ucx_xfer_say_done(struct net_xfer *net, const struct err *err)
{
	struct ucx_frame frame = {.type = UCX_DONE, .id = net->id};

	ucx_send_frame(mem_steal(ucx_xfer_of(net)->spare[1]), &frame, err, NULL, NULL, 0);
	return 0;
}

/* ---- ours ---- */

/* It starts. */
static void note_small(const struct ucx_xfer *xfer)
{
	if (!ucx_is_large(xfer))
		xfer->peer->beside_until_ns =
			loop_now_ns(xfer->peer->net.timer.loop) + UCX_BESIDE_NS;
}

static int ucx_xfer_ask(struct net_xfer *net)
{
	struct ucx_xfer *xfer = ucx_xfer_of(net);
	struct ucx_frame frame = {
		.type = UCX_REQUEST,
		.id = net->id,
		.code = net->kind,
		.length = net->bytes,
	};

	note_small(xfer);
	ucx_send_frame(mem_steal(xfer->spare[0]), &frame, NULL, xfer, net->op->header,
		       net->op->header_len);
	return net->kind == XP_READ; /* bytes may arrive at once */
}

static int ucx_xfer_take_go(struct ucx_xfer *xfer)
{
	unsigned int state = sm_state(&xfer->net.sm);

	if (state == NET_XFER_STOPPING && xfer->net.asked)
		return 0; /* our CANCEL crosses it */
	if (xfer->net.kind != XP_WRITE || state != NET_XFER_ASKED || xfer->net.answered ||
	    xfer->net.bytes == 0)
		return net_proto(&xfer->net, "GO");
	sm_move(&xfer->net.sm, NET_XFER_MOVING);
	ucx_source_start(xfer);
	return 0;
}

static int ucx_xfer_take_done(struct ucx_xfer *xfer, const struct ucx_entry *entry)
{
	bool early = net_is_source(&xfer->net) && xfer->next_byte < xfer->net.bytes;
	struct err err;

	if (entry->frame.code == ERR_OK && early &&
	    sm_state(&xfer->net.sm) != NET_XFER_STOPPING)
		return err_raise(ERR_PROTO, "ucx: DONE before the last byte was sent");
	if (entry->frame.code == ERR_OK)
		return err_pass(net_xfer_done(&xfer->net, NULL));
	net_fault_get(entry->frame.code, entry->frame.flags, entry->payload, entry->len,
		      &err);
	return err_pass(net_xfer_done(&xfer->net, &err));
}

static int ucx_xfer_take_answer(struct ucx_peer *peer, const struct ucx_entry *entry)
{
	struct net_xfer *net;
	int r = net_op_find(&peer->net, entry->frame.id, &net);

	if (r < 0)
		return err_pass(r);
	return err_pass(entry->frame.type == UCX_GO
				? ucx_xfer_take_go(ucx_xfer_of(net))
				: ucx_xfer_take_done(ucx_xfer_of(net), entry));
}

/* ---- theirs ---- */

static int ucx_xfer_refuse(struct net_peer *net, uint64_t id, const struct err *err)
{
	struct ucx_frame frame = {.type = UCX_DONE, .id = id};
	struct ucx_send *send = ucx_send_new(container_of(net, struct ucx_peer, net));

	if (!send)
		return err_pass(-ENOMEM);
	ucx_send_frame(send, &frame, err, NULL, NULL, 0);
	return 0;
}

static int ucx_xfer_take_request(struct ucx_peer *peer, struct ucx_entry **entry_p)
{
	struct ucx_entry *entry = *entry_p;
	struct net_xfer *net;
	int r = net_inbound_new(&peer->net, entry->frame.id, entry->frame.code,
				entry->frame.length, entry->starved, &net);

	if (r < 0 || !net)
		return err_pass(r);
	note_small(ucx_xfer_of(net));
	ucx_xfer_of(net)->entry = mem_steal(*entry_p);
	net_request(net, entry->payload, entry->len);
	return 0;
}

static int ucx_xfer_begin(struct net_xfer *net)
{
	struct ucx_frame frame = {.type = UCX_GO, .id = net->id};
	struct ucx_xfer *xfer = ucx_xfer_of(net);

	if (net_is_source(net))
		ucx_source_start(xfer);
	else
		ucx_send_frame(mem_steal(xfer->spare[0]), &frame, NULL, NULL, NULL, 0);
	return 0;
}

static int ucx_xfer_take_cancel(struct ucx_peer *peer, const struct ucx_entry *entry)
{
	struct net_xfer *net;
	struct err err;
	int r = net_inbound_find(&peer->net, entry->frame.id, &net);

	if (r < 0 || !net)
		return err_pass(r);
	net_fault_get(entry->frame.code, entry->frame.flags, entry->payload, entry->len,
		      &err);
	net_xfer_stop(net, &err);
	return 0;
}

const struct net_ops ucx_net_ops = {
	.peer_table = &ucx_peer_table,
	.xfer_table = &xfer_table,
	.key_magic = UINT32_C(0x4b44564b), /* "KVDK" */
	.reg_release = ucx_reg_release,
	.step = ucx_peer_step,
	.peer_free = ucx_peer_free,
	.refuse = ucx_xfer_refuse,
	.xfer_new = ucx_xfer_new,
	.xfer_free = ucx_xfer_free,
	.take_sides = ucx_xfer_take_sides,
	.drop_sides = ucx_xfer_drop_sides,
	.ask = ucx_xfer_ask,
	.begin = ucx_xfer_begin,
	.halt = ucx_xfer_halt,
	.speak = ucx_xfer_speak,
	.is_over = ucx_xfer_is_over,
	.is_whole = ucx_xfer_is_whole,
	.say_done = ucx_xfer_say_done,
};

void ucx_xfer_entry(struct ucx_peer *peer, struct ucx_entry *entry)
{
	int r;

	switch (entry->frame.type) {
	case UCX_REQUEST:
		r = ucx_xfer_take_request(peer, &entry);
		break;
	case UCX_CANCEL:
		r = ucx_xfer_take_cancel(peer, entry);
		break;
	default:
		r = ucx_xfer_take_answer(peer, entry);
	}
	ucx_entry_free(entry);
	if (r < 0)
		net_peer_fail_last(&peer->net);
}
