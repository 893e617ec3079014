/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The verbs backend's part of a transfer's life cycle (net.h). The requester moves the
 * bytes: it writes into the responder's memory, or reads from it. The responder's adapter
 * takes part without its daemon.
 *
 *   WRITE  REQUEST -> on_request, land() -> GO -> bytes, MARKs -> DONE
 *   READ   REQUEST -> on_request, land() -> GO -> bytes, FIN -> DONE
 *
 * GO means: my memory is registered and stays so until your last message arrives. It
 * identifies the registrations by a digest, which the mover compares: it never carries an
 * address or a key, those are from REGISTER. So a stale key is found before it is used;
 * its use would cost the connection.
 *
 * Every GO is answered by the mover's last messages, for every outcome of the transfer.
 * For a WRITE that is one mark on each queue pair that has bytes of it, behind them: the
 * NIC's own order makes it the proof that they have landed (each mark carries their
 * number). For a READ it is FIN, sent when no request is outstanding any more. Then the
 * responder knows that its memory is quiesced, and DONE is the last message of all. Marks
 * are immediates (a slot and a generation that GO gave); a slot is given only as long as
 * there is a receive for its mark on every queue pair.
 *
 * The marks of a lost rail are lost: then there is another round of them, of another
 * generation (verbs_rail.c).
 *
 * Adapters' writes to GPU memory are read back then, before the last message is sent or
 * anything is reported, of success and of failure (verbs_loopback.c).
 *
 * Stopping takes the same path: no new request is posted, posted ones end (a bounded
 * amount, verbs_post.c), the last message follows.
 *
 * A packed transfer (verbs_pack.c) is written by its source in either kind; its GO and
 * its last messages are the same.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/transport/verbs/verbs_loopback.h"

static struct verbs_xfer *verbs_xfer_of(struct net_xfer *net)
{
	return container_of(net, struct verbs_xfer, net);
}

static bool verbs_xfer_ended_there(const struct verbs_xfer *xfer)
{
	return xfer->net.kind == XP_READ
		       ? xfer->fin_came
		       : xfer->marks_due &&
				 __builtin_popcount(xfer->marks) == xfer->marks_due;
}

/* ... and nothing of it may be in flight on a dying rail. */
static bool announced_complete(const struct verbs_xfer *xfer)
{
	return verbs_xfer_ended_there(xfer) &&
	       !(xfer->net.kind == XP_WRITE && verbs_rail_dying(xfer->peer));
}

static bool verbs_xfer_invariant(const struct sm *sm, unsigned int from)
{
	const struct verbs_xfer *xfer = container_of(sm, const struct verbs_xfer, net.sm);

	(void)from;
	/* the promise "quiesced" */
	return sm_state(sm) != NET_XFER_OVER ||
	       (xfer->busy == 0 &&
		(xfer->net.ours || !xfer->go || verbs_xfer_ended_there(xfer) ||
		 verbs_peer_quiet(xfer->peer)));
}

static const struct sm_table xfer_table = {
	.name = "verbs transfer",
	.states = net_xfer_states,
	.count = NET_XFER_STATES,
	.invariant = verbs_xfer_invariant,
};

/* ---- made and unmade ---- */

static void slot_free(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;

	if (xfer->net.ours || xfer->slot == VERBS_GRANTS)
		return;
	peer->grants[xfer->slot] = NULL;
	peer->grant_count--;
	xfer->slot = VERBS_GRANTS;
	if (!list_empty(&peer->ungranted))
		net_peer_kick(&peer->net);
}

static void verbs_xfer_free(struct net_xfer *net)
{
	struct verbs_xfer *xfer = verbs_xfer_of(net);

	list_remove(&xfer->mover_link);
	list_remove(&xfer->grant_link);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++)
		mem_free(xfer->spare[i]);
	if (xfer->header)
		xfer->peer->held_bytes -= xfer->header_len;
	mem_free(xfer->header);
	mem_free(xfer);
}

static int verbs_xfer_new(struct net_peer *net, struct net_xfer **xfer_p)
{
	struct verbs_xfer *xfer = mem_zalloc(sizeof(*xfer));

	if (!xfer)
		return err_pass(-ENOMEM);
	xfer->peer = container_of(net, struct verbs_peer, net);
	xfer->rewind = UINT64_MAX;
	xfer->slot = VERBS_GRANTS;
	list_init(&xfer->mover_link);
	list_init(&xfer->grant_link);
	for (size_t i = 0; i < ARRAY_LEN(xfer->spare); i++) {
		xfer->spare[i] = verbs_out_new();
		if (!xfer->spare[i]) {
			verbs_xfer_free(&xfer->net);
			return err_pass(-ENOMEM);
		}
	}
	*xfer_p = &xfer->net;
	return 0;
}

static int verbs_xfer_take_sides(struct net_xfer *net, const struct xp_sides *sides)
{
	struct verbs_xfer *xfer = verbs_xfer_of(net);
	bool source = net_is_source(net);
	int r = xp_sides_check(sides, source || net->ours, !source || net->ours);

	if (r == 0)
		r = verbs_places_init(
			&xfer->local, sides->plan, source ? sides->src : sides->dst,
			source ? sides->src_count : sides->dst_count, source, NULL);
	if (r == 0 && net->ours)
		r = verbs_places_init(&xfer->remote, sides->plan,
				      source ? sides->dst : sides->src,
				      source ? sides->dst_count : sides->src_count,
				      !source, xfer->peer);
	xfer->plan = sides->plan;
	if (r == 0)
		r = net->ours ? verbs_pack_choose(xfer) : verbs_pack_check(xfer);
	if (r == 0)
		r = verbs_flush_plan(xfer);
	if (r == 0 && !net->ours && sides->plan->digest != xfer->digest)
		r = err_raise(ERR_PLAN,
			      "the plan of %" PRIu64 " bytes differs from the peer's",
			      net->bytes);
	return err_pass(r);
}

static void verbs_xfer_drop_sides(struct net_xfer *net)
{
	struct verbs_xfer *xfer = verbs_xfer_of(net);

	verbs_pack_drop(xfer);
	verbs_flush_drop(xfer);
	verbs_places_fini(&xfer->local);
	verbs_places_fini(&xfer->remote);
	slot_free(xfer);
}

static void verbs_xfer_say(struct verbs_xfer *xfer, enum verbs_spare spare,
			   const struct verbs_frame *frame, const struct err *err)
{
	verbs_send(xfer->peer, mem_steal(xfer->spare[spare]), frame, err);
}

/* ---- stop, over, reported ---- */

/* The other side must stop too, unless it sent the stop itself. */
static void say_stop(struct verbs_xfer *xfer)
{
	struct verbs_frame frame = {.id = xfer->net.id,
				    .type = xfer->net.ours ? VERBS_CANCEL : VERBS_REVOKE};

	if (xfer->net.ours
		    ? !net_owes_cancel(&xfer->net)
		    : xfer->net.stop_sent || !xfer->go || verbs_xfer_ended_there(xfer))
		return;
	xfer->net.stop_sent = true;
	verbs_xfer_say(xfer, VERBS_SPARE_STOP, &frame, &xfer->net.err);
}

/* Rails that may have written for it; as the peer's marks state, once they have arrived.
 * One that was lost meanwhile may have writes in flight to the GPU like any other. */
static uint32_t rails_used(const struct verbs_xfer *xfer)
{
	uint32_t qps = xfer->net.ours		      ? xfer->used
		       : verbs_xfer_ended_there(xfer) ? xfer->marks
						      : UINT32_MAX;
	uint32_t rails = xfer->rounds ? xfer->peer->rails_lost : 0;

	qps |= xfer->used_lost;
	for (uint32_t i = 0; i < xfer->peer->qp_count; i++)
		if (qps & 1u << i)
			rails |= 1u << xfer->peer->qps[i].rail->index;
	return rails;
}

/* Nothing more is written for it: adapters' writes to GPUs have landed, too. Reads them
 * back if that was not done yet; the result is then available later. */
static bool is_landed(struct verbs_xfer *xfer)
{
	if (!xfer->flushes || !xfer->go || xfer->pack)
		return true;
	if (!verbs_flush_begun(xfer))
		verbs_flush_begin(xfer, rails_used(xfer));
	return xfer->busy == 0;
}

static bool op_is_over(const struct verbs_xfer *xfer)
{
	switch (sm_state(&xfer->net.sm)) {
	case NET_XFER_STOPPING:
		return !xfer->net.asked || verbs_peer_quiet(xfer->peer) ||
		       (xfer->net.answered &&
			!(xfer->used & verbs_rail_open(xfer->peer)));
	case NET_XFER_ASKED:
	case NET_XFER_MOVING:
		return xfer->net.answered && !(xfer->used & verbs_rail_open(xfer->peer));
	default:
		return false;
	}
}

static bool inbound_is_over(const struct verbs_xfer *xfer)
{
	switch (sm_state(&xfer->net.sm)) {
	case NET_XFER_STOPPING:
		return !xfer->go || announced_complete(xfer) ||
		       verbs_peer_quiet(xfer->peer);
	case NET_XFER_MOVING:
		return xfer->net.bytes == 0 ||
		       (announced_complete(xfer) && !xfer->marks_aborted &&
			verbs_pack_whole(xfer));
	default:
		return false;
	}
}

static bool verbs_xfer_is_over(struct net_xfer *net)
{
	struct verbs_xfer *xfer = verbs_xfer_of(net);

	return !xfer->busy && (net->ours ? op_is_over(xfer) : inbound_is_over(xfer)) &&
	       is_landed(xfer);
}

static bool verbs_xfer_is_whole(struct net_xfer *net)
{
	const struct verbs_xfer *xfer = verbs_xfer_of(net);

	/* a rail was lost with its confirmations, but the answerer has all marks */
	return xfer->done_bytes == net->bytes ||
	       (net->kind == XP_WRITE && xfer->rewind != UINT64_MAX &&
		xfer->posted_bytes == net->bytes);
}

static void verbs_xfer_speak(struct net_xfer *net)
{
	struct verbs_xfer *xfer = verbs_xfer_of(net);
	bool stopping = sm_state(&net->sm) == NET_XFER_STOPPING;
	struct verbs_frame fin = {.type = VERBS_FIN, .id = net->id};

	if (stopping)
		say_stop(xfer);
	if (net->ours && net->kind == XP_READ && xfer->go && !xfer->ended &&
	    xfer->busy == 0 && !(xfer->used & verbs_rail_open(xfer->peer)) &&
	    (stopping || xfer->done_bytes == net->bytes) && is_landed(xfer)) {
		xfer->ended = true;
		verbs_xfer_say(xfer, VERBS_SPARE_LAST, &fin,
			       net->err.code == ERR_OK ? NULL : &net->err);
	}
}

static void verbs_xfer_halt(struct net_xfer *net)
{
	list_remove(&verbs_xfer_of(net)->grant_link);
	verbs_pack_stop(verbs_xfer_of(net));
	net_peer_kick(net->peer); /* a mover's last messages */
}

static int verbs_xfer_say_done(struct net_xfer *net, const struct err *err)
{
	struct verbs_frame frame = {.type = VERBS_DONE, .id = net->id};

	verbs_xfer_say(verbs_xfer_of(net), VERBS_SPARE_LAST, &frame, err);
	return 0;
}

/* ---- ours ---- */

static int verbs_xfer_ask(struct net_xfer *net)
{
	struct verbs_xfer *xfer = verbs_xfer_of(net);
	struct verbs_frame frame = {
		.type = VERBS_REQUEST,
		.id = net->id,
		.kind = (uint8_t)net->kind,
		.pack = !xfer->pack	  ? VERBS_ROWS
			: xfer->must_pack ? VERBS_PACK_MUST
					  : VERBS_PACK,
		.bytes = net->bytes,
		.digest = net->bytes ? xfer->plan->digest : 0,
	};

	verbs_send_request(xfer->peer, mem_steal(xfer->spare[VERBS_SPARE_FIRST]), &frame,
			   xfer);
	return 0;
}

void verbs_xfer_progress(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer;

	list_foreach(xfer, &peer->movers, mover_link) {
		struct verbs_frame frame = {.type = VERBS_PROGRESS,
					    .id = xfer->net.id,
					    .bytes = xfer->done_bytes};
		struct verbs_out *out;

		if (xfer->done_bytes == xfer->announced_bytes || !xfer->net.ours)
			continue;
		out = verbs_out_new();
		if (!out) {
			err_clear(); /* it is only for the timeout of the waiting side */
			return;
		}
		xfer->announced_bytes = xfer->done_bytes;
		verbs_send(peer, out, &frame, NULL);
	}
}

static void check_go(struct verbs_xfer *xfer, const struct verbs_frame *frame)
{
	if (frame->digest !=
	    verbs_places_digest(&xfer->remote, xfer->plan, !net_is_source(&xfer->net)))
		err_raise(ERR_REVOKED,
			  "verbs: the peer re-registered its memory: its old key is "
			  "invalid");
	else if (xfer->must_pack && !xfer->pack)
		err_raise(ERR_REQUIRE,
			  "verbs: the memory must be staged, and the peer has no "
			  "slots for that");
	else
		return;
	net_xfer_stop_last(&xfer->net);
}

static int verbs_xfer_take_go(struct verbs_xfer *xfer, const struct verbs_frame *frame,
			      const uint8_t *payload)
{
	struct sm *sm = &xfer->net.sm;
	struct verbs_mark mark;
	int r;

	if (xfer->go || xfer->net.answered || xfer->net.bytes == 0 ||
	    (sm_state(sm) != NET_XFER_ASKED && sm_state(sm) != NET_XFER_STOPPING))
		return net_proto(&xfer->net, "GO");
	r = verbs_pack_agree(xfer, frame->pack, payload, frame->length);
	if (r < 0)
		return err_pass(r);
	verbs_mark_get(frame->slot, &mark);
	xfer->go = true;
	xfer->slot = mark.slot;
	xfer->generation = mark.generation;
	if (sm_state(sm) == NET_XFER_ASKED) {
		sm_move(sm, NET_XFER_MOVING);
		check_go(xfer, frame);
	}
	/* also a stopping one: its last message is due */
	if (xfer->pack && !net_is_source(&xfer->net))
		net_xfer_check(&xfer->net); /* the source moves; it may stop already */
	else
		verbs_move_start(xfer);
	return 0;
}

static int verbs_xfer_take_done(struct verbs_xfer *xfer, const struct verbs_frame *frame,
				const uint8_t *payload)
{
	struct err err;

	if ((xfer->go && !xfer->ended) ||
	    (frame->code == ERR_OK && xfer->net.bytes && !xfer->go))
		return net_proto(&xfer->net, "DONE");
	if (frame->code == ERR_OK)
		return err_pass(net_xfer_done(&xfer->net, NULL));
	net_fault_get(frame->code, frame->flags, payload, frame->length, &err);
	return err_pass(net_xfer_done(&xfer->net, &err));
}

static void take_revoke(struct verbs_xfer *xfer, const struct verbs_frame *frame,
			const uint8_t *payload)
{
	struct err err;

	net_fault_get(frame->code, frame->flags, payload, frame->length, &err);
	if (sm_state(&xfer->net.sm) < NET_XFER_STOPPING)
		xfer->net.stop_sent = true; /* the revoking side needs no CANCEL */
	net_xfer_stop(&xfer->net, &err);
}

static int take_for_op(struct verbs_peer *peer, const struct verbs_frame *frame,
		       const uint8_t *payload)
{
	struct verbs_xfer *xfer;
	struct net_xfer *net;
	int r = net_op_find(&peer->net, frame->id, &net);

	if (r < 0)
		return err_pass(r);
	xfer = verbs_xfer_of(net);
	switch (frame->type) {
	case VERBS_GO:
		return err_pass(verbs_xfer_take_go(xfer, frame, payload));
	case VERBS_DONE:
		return err_pass(verbs_xfer_take_done(xfer, frame, payload));
	case VERBS_SLOT:
		return err_pass(verbs_pack_slot(xfer, frame, payload));
	case VERBS_SLICE:
		return err_pass(verbs_pack_slice(xfer, frame));
	default:
		take_revoke(xfer, frame, payload);
		return 0;
	}
}

/* ---- theirs ---- */

static int admit_request(struct verbs_peer *peer, const struct verbs_frame *frame)
{
	if (peer->assembling || peer->skip_bytes)
		return err_raise(ERR_PROTO,
				 "verbs: request %" PRIu64
				 " interleaved with another header",
				 frame->id);
	if (frame->total > XP_HEADER_MAX || frame->length > frame->total)
		return err_raise(ERR_PROTO,
				 "verbs: a header of %u bytes, %u of them here",
				 frame->total, frame->length);
	if (peer->held_bytes > NET_HEADERS_MAX)
		return err_raise(ERR_PROTO,
				 "verbs: unfinished requests too large (limit %u bytes)",
				 NET_HEADERS_MAX);
	return 0;
}

static int verbs_xfer_refuse(struct net_peer *net, uint64_t id, const struct err *err)
{
	struct verbs_frame frame = {.type = VERBS_DONE, .id = id};
	struct verbs_out *out = verbs_out_new();

	if (!out)
		return err_pass(-ENOMEM);
	verbs_send(container_of(net, struct verbs_peer, net), out, &frame, err);
	return 0;
}

/* The next bytes of its header; whole, it is a request. */
static void assemble(struct verbs_peer *peer, const struct verbs_frame *frame,
		     const uint8_t *payload)
{
	struct verbs_xfer *xfer = peer->assembling;

	memcpy(xfer->header + xfer->header_have, payload, frame->length);
	xfer->header_have += frame->length;
	if (xfer->header_have < xfer->header_len)
		return;
	peer->assembling = NULL;
	net_request(&xfer->net, xfer->header, xfer->header_len);
}

static int verbs_xfer_take_request(struct verbs_peer *peer,
				   const struct verbs_frame *frame,
				   const uint8_t *payload)
{
	cleanup_free uint8_t *header = NULL;
	struct verbs_xfer *xfer;
	struct net_xfer *net;
	int r = admit_request(peer, frame);

	if (r < 0)
		return err_pass(r);
	header = mem_zalloc((size_t)frame->total + 1);
	r = net_inbound_new(&peer->net, frame->id, frame->kind, frame->bytes, !header,
			    &net);
	if (r < 0)
		return err_pass(r);
	if (!net) {
		peer->skip_bytes = frame->total - frame->length;
		return 0;
	}
	xfer = verbs_xfer_of(net);
	xfer->digest = frame->digest;
	xfer->wants_pack = frame->pack != VERBS_ROWS;
	xfer->must_pack = frame->pack == VERBS_PACK_MUST;
	xfer->header = mem_steal(header);
	xfer->header_len = frame->total;
	peer->held_bytes += frame->total;
	peer->assembling = xfer;
	assemble(peer, frame, payload);
	return 0;
}

static int take_more(struct verbs_peer *peer, const struct verbs_frame *frame,
		     const uint8_t *payload)
{
	struct verbs_xfer *xfer = peer->assembling;

	if (peer->skip_bytes && frame->length <= peer->skip_bytes) {
		peer->skip_bytes -= frame->length;
		return 0;
	}
	if (!xfer || frame->id != xfer->net.id || frame->length == 0 ||
	    frame->length > xfer->header_len - xfer->header_have)
		return err_raise(ERR_PROTO,
				 "verbs: header of request %" PRIu64
				 " exceeds its announced length",
				 frame->id);
	assemble(peer, frame, payload);
	return 0;
}

void verbs_xfer_drop_partial(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer = mem_steal(peer->assembling);

	if (!xfer)
		return;
	idmap_remove(&peer->net.inbounds, xfer->net.id);
	net_xfer_free(&xfer->net);
}

/* ---- answers ---- */

static void say_go(struct verbs_xfer *xfer)
{
	struct verbs_mark mark = {.count = 1, .generation = xfer->generation};
	uint8_t key[VERBS_TEXT_MAX];
	size_t len = 0;
	struct verbs_frame frame = {
		.type = VERBS_GO,
		.id = xfer->net.id,
		.digest = verbs_places_digest(&xfer->local, xfer->plan,
					      net_is_source(&xfer->net)),
	};

	if (xfer->slot < VERBS_GRANTS)
		mark.slot = (uint16_t)xfer->slot;
	frame.slot = verbs_mark_put(&mark);
	frame.pack = verbs_pack_accept(xfer, &len, key) ? VERBS_PACK : VERBS_ROWS;
	xfer->go = true;
	verbs_send_bytes(xfer->peer, mem_steal(xfer->spare[VERBS_SPARE_FIRST]), &frame,
			 key, len);
	if (frame.pack && net_is_source(&xfer->net))
		verbs_move_start(xfer);
	else if (frame.pack)
		verbs_pack_feed(xfer->peer);
}

static void grant_one(struct verbs_peer *peer, struct verbs_xfer *xfer)
{
	uint32_t slot = peer->grant_next;

	while (peer->grants[slot])
		slot = (slot + 1) % VERBS_GRANTS;
	peer->grant_next = (slot + 1) % VERBS_GRANTS;
	peer->grants[slot] = xfer;
	peer->grant_count++;
	xfer->slot = slot;
	xfer->generation = peer->generations[slot];
	peer->generations[slot] = (uint16_t)((xfer->generation + 1) % VERBS_GENERATIONS);
	list_remove(&xfer->grant_link);
	say_go(xfer);
}

void verbs_xfer_grant(struct verbs_peer *peer)
{
	struct verbs_xfer *xfer;

	list_foreach_safe(xfer, &peer->unslotted, grant_link) {
		if (verbs_pack_waits(xfer))
			break; /* all of them wait for the same */
		list_remove(&xfer->grant_link);
		list_push_back(&peer->ungranted, &xfer->grant_link);
	}
	while (peer->grant_count < VERBS_GRANTS &&
	       (xfer = list_first(&peer->ungranted, struct verbs_xfer, grant_link)))
		grant_one(peer, xfer);
}

static int verbs_xfer_begin(struct net_xfer *net)
{
	struct verbs_xfer *xfer = verbs_xfer_of(net);

	if (net_is_source(net)) {
		say_go(xfer);
	} else {
		list_push_back(verbs_pack_waits(xfer) ? &xfer->peer->unslotted
						      : &xfer->peer->ungranted,
			       &xfer->grant_link);
		net_peer_kick(net->peer);
	}
	return 0;
}

const struct net_ops verbs_net_ops = {
	.peer_table = &verbs_peer_table,
	.xfer_table = &xfer_table,
	.reg_release = verbs_reg_release,
	.step = verbs_peer_step,
	.peer_free = verbs_peer_free,
	.refuse = verbs_xfer_refuse,
	.xfer_new = verbs_xfer_new,
	.xfer_free = verbs_xfer_free,
	.take_sides = verbs_xfer_take_sides,
	.drop_sides = verbs_xfer_drop_sides,
	.ask = verbs_xfer_ask,
	.begin = verbs_xfer_begin,
	.halt = verbs_xfer_halt,
	.speak = verbs_xfer_speak,
	.is_over = verbs_xfer_is_over,
	.is_whole = verbs_xfer_is_whole,
	.say_done = verbs_xfer_say_done,
};

/* ---- the mover's messages ---- */

/* Of a round before a rail was lost; this round's mark on that queue pair follows. */
static bool is_stale(const struct verbs_xfer *xfer, const struct verbs_mark *mark,
		     uint32_t bit)
{
	uint32_t age;

	if (!xfer || !xfer->rounds || xfer->marks & bit)
		return false;
	age = (uint32_t)(xfer->generation - mark->generation) % VERBS_GENERATIONS;
	return age >= 1 && age <= xfer->rounds;
}

int verbs_xfer_mark(struct verbs_peer *peer, const struct verbs_qp *qp,
		    const struct verbs_mark *mark)
{
	struct verbs_xfer *xfer = peer->grants[mark->slot];
	uint32_t bit = 1u << qp->index;

	if (!net_peer_live(&peer->net))
		return 0;
	if (is_stale(xfer, mark, bit))
		return 0;
	if (!xfer || xfer->generation != mark->generation || xfer->marks & bit ||
	    mark->count > peer->qp_count ||
	    (xfer->marks_due && xfer->marks_due != mark->count))
		return err_raise(ERR_PROTO,
				 "verbs: a mark for slot %u, generation %u, on "
				 "queue pair %u, of %u",
				 mark->slot, mark->generation, qp->index, mark->count);
	if (!mark->aborted && !verbs_pack_whole(xfer))
		return err_raise(ERR_PROTO,
				 "verbs: transfer %" PRIu64 " ends before its last slice",
				 xfer->net.id);
	xfer->marks |= bit;
	xfer->marks_due = mark->count;
	xfer->marks_aborted |= mark->aborted;
	net_xfer_check(&xfer->net);
	return 0;
}

static int take_fin(struct verbs_xfer *xfer, const struct verbs_frame *frame,
		    const uint8_t *payload)
{
	struct err err;

	/* of a packed one this side is the source: it succeeds when all was written */
	if (xfer->net.kind != XP_READ || !xfer->go || xfer->fin_came ||
	    (frame->code == ERR_OK && xfer->pack && !verbs_pack_ended(xfer)))
		return net_proto(&xfer->net, "FIN");
	xfer->fin_came = true;
	if (frame->code != ERR_OK) {
		net_fault_get(frame->code, frame->flags, payload, frame->length, &err);
		net_xfer_stop(&xfer->net, &err);
	}
	net_xfer_check(&xfer->net);
	return 0;
}

static int take_for_inbound(struct verbs_peer *peer, const struct verbs_frame *frame,
			    const uint8_t *payload)
{
	struct verbs_xfer *xfer;
	struct net_xfer *net;
	struct err err;
	int r = net_inbound_find(&peer->net, frame->id, &net);

	if (r < 0 || !net)
		return err_pass(r); /* none: this side's DONE crosses it */
	xfer = verbs_xfer_of(net);
	if (xfer == peer->assembling)
		return net_proto(net, "message");
	switch (frame->type) {
	case VERBS_FIN:
		return err_pass(take_fin(xfer, frame, payload));
	case VERBS_SLICE:
		return err_pass(verbs_pack_slice(xfer, frame));
	case VERBS_SLOT:
		return err_pass(verbs_pack_slot(xfer, frame, payload));
	case VERBS_PROGRESS:
		if (!xfer->pack && frame->bytes <= xfer->net.bytes)
			net_xfer_moved(net, frame->bytes, 0);
		return 0;
	default:
		net_fault_get(frame->code, frame->flags, payload, frame->length, &err);
		xfer->net.stop_sent = true;
		net_xfer_stop(&xfer->net, &err);
		return 0;
	}
}

int verbs_xfer_frame(struct verbs_peer *peer, const struct verbs_frame *frame,
		     const uint8_t *payload)
{
	struct verbs_mark mark;

	switch (frame->type) {
	case VERBS_REQUEST:
		return err_pass(verbs_xfer_take_request(peer, frame, payload));
	case VERBS_MORE:
		return err_pass(take_more(peer, frame, payload));
	case VERBS_MARK:
		verbs_mark_get(frame->slot, &mark);
		return err_pass(verbs_xfer_mark(peer, &peer->qps[0], &mark));
	case VERBS_GO:
	case VERBS_DONE:
	case VERBS_REVOKE:
		return err_pass(take_for_op(peer, frame, payload));
	case VERBS_SLOT: /* from the destination: it responds to a WRITE, and requests a
			  * READ */
		if (frame->kind == XP_WRITE)
			return err_pass(take_for_op(peer, frame, payload));
		return err_pass(take_for_inbound(peer, frame, payload));
	case VERBS_SLICE:
		if (frame->kind == XP_READ)
			return err_pass(take_for_op(peer, frame, payload));
		return err_pass(take_for_inbound(peer, frame, payload));
	default:
		return err_pass(take_for_inbound(peer, frame, payload));
	}
}
