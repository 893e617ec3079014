/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans become work requests.
 *
 * A work request has one stretch of the peer's memory and up to max_sge local stretches:
 * a WRITE gathers, a READ scatters. Rows are taken in the plan's order; a row that
 * continues the last one at the remote side joins its work request, and if it does so at
 * the local side too, its stretch. Work requests are posted in chains, one doorbell and
 * one signalled completion each; small ones from host memory are inline.
 *
 * The posted amount is bounded by time, not only by max_inflight: a peer's window is the
 * amount that it took in WINDOW_NS lately. An abort waits for posted requests, so this is
 * the fence's usual cost. Movers take turns, a chain each, so a large transfer does not
 * delay a small one. A transfer stays on one queue pair (the one with the least in
 * flight), so that its end needs one mark; one of VERBS_SPREAD_BYTES or more uses all of
 * them. If adapters differ in distance to its memory, the nearest are used
 * (verbs_topo.c).
 *
 * At the end of the plan, or when it stops, a WRITE posts its marks behind its
 * bytes: a frame on queue pair 0, a WRITE_WITH_IMM of nothing on any other.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"

#define WINDOW_NS (200 * LOOP_NS_PER_MS)
#define WINDOW_MIN (1u << 20)
#define RATE_NS (10 * LOOP_NS_PER_MS)
#define RATE_LONG_NS (500 * LOOP_NS_PER_MS)
#define RATE_BYTES (512u << 10)

/* ---- building ---- */

/* of a span, within one registration at both ends */
struct piece {
	uint64_t near_addr, far_addr, length;
	uint32_t lkey, rkey;
};

static uint64_t to_piece_end(uint64_t at, uint8_t shift, uint64_t length)
{
	uint64_t left = (UINT64_C(1) << shift) - (at & ((UINT64_C(1) << shift) - 1));

	return length < left ? length : left;
}

/* The span's first bytes as the adapter of that queue pair names them. */
static inline void verbs_post_resolve(const struct verbs_xfer *xfer,
				      const struct verbs_qp *qp, uint64_t max,
				      struct piece *piece)
{
	const struct plan_span *span = &xfer->span;
	bool write = xfer->net.kind == XP_WRITE;
	const struct verbs_place *near =
		&xfer->local.at[write ? span->src_buffer : span->dst_buffer];
	const struct verbs_place *far =
		&xfer->remote.at[write ? span->dst_buffer : span->src_buffer];
	uint64_t near_at = near->offset + (write ? span->src : span->dst);
	uint64_t far_at = far->offset + (write ? span->dst : span->src);
	uint64_t length = span->len < max ? span->len : max;
	const struct verbs_remote *remote = &far->key->remote;

	length = to_piece_end(near_at, near->reg->shift, length);
	length = to_piece_end(far_at, remote->shift, length);
	piece->length = length;
	piece->near_addr = near->reg->address + near_at;
	piece->far_addr = remote->address + far_at;
	piece->lkey =
		near->reg->mr[qp->rail->device->index][near_at >> near->reg->shift]->lkey;
	piece->rkey = remote->rkey[qp->rail->index][far_at >> remote->shift];
}

/* Adds the piece; false when it belongs into the next work request. */
static inline bool add_piece(struct ibv_send_wr *wr, uint64_t bytes, uint32_t sge_max,
			     const struct piece *piece)
{
	struct ibv_sge *last = &wr->sg_list[wr->num_sge - 1];

	if (wr->num_sge == 0) {
		wr->wr.rdma.remote_addr = piece->far_addr;
		wr->wr.rdma.rkey = piece->rkey;
	} else if (piece->far_addr != wr->wr.rdma.remote_addr + bytes ||
		   piece->rkey != wr->wr.rdma.rkey) {
		return false;
	} else if (piece->near_addr == last->addr + last->length &&
		   piece->lkey == last->lkey) {
		last->length += (uint32_t)piece->length;
		return true;
	}
	if ((uint32_t)wr->num_sge == sge_max)
		return false;
	wr->sg_list[wr->num_sge++] = (struct ibv_sge){
		.addr = piece->near_addr,
		.length = (uint32_t)piece->length,
		.lkey = piece->lkey,
	};
	return true;
}

/* One work request of at most `max` bytes; its bytes, 0 at the end of the plan. */
static uint64_t build_one(struct verbs_xfer *xfer, const struct verbs_qp *qp,
			  struct ibv_send_wr *wr, uint64_t max)
{
	uint64_t bytes = 0;
	struct piece piece;

	while (bytes < max) {
		if (xfer->span.len == 0 &&
		    !plan_walk_next(&xfer->walk, UINT64_MAX, &xfer->span)) {
			xfer->span.len = 0;
			break;
		}
		verbs_post_resolve(xfer, qp, max - bytes, &piece);
		if (!add_piece(wr, bytes, qp->max_sge, &piece))
			break;
		bytes += piece.length;
		xfer->span.len -= piece.length;
		xfer->span.src += piece.length;
		xfer->span.dst += piece.length;
	}
	return bytes;
}

static void build_chain(struct verbs_xfer *xfer, const struct verbs_qp *qp,
			uint32_t count_max, uint64_t bytes_max)
{
	struct verbs_transport *transport = xfer->peer->transport;
	struct verbs_chain *chain = &transport->chain;
	uint64_t wr_max =
		bytes_max < transport->wr_bytes ? bytes_max : transport->wr_bytes;

	chain->count = 0;
	chain->bytes = 0;
	/* the last one may exceed it: a gather that is cut short costs one more */
	while (chain->count < count_max && chain->bytes < bytes_max) {
		struct ibv_send_wr *wr = &chain->wr[chain->count];
		uint64_t bytes;

		wr->next = NULL;
		wr->send_flags = 0;
		wr->num_sge = 0;
		wr->sg_list = chain->sge[chain->count];
		wr->opcode =
			xfer->net.kind == XP_WRITE ? IBV_WR_RDMA_WRITE : IBV_WR_RDMA_READ;
		bytes = build_one(xfer, qp, wr, wr_max);
		if (!bytes)
			return;
		if (xfer->net.kind == XP_WRITE && bytes <= qp->max_inline &&
		    xfer->may_inline)
			wr->send_flags = IBV_SEND_INLINE;
		if (chain->count)
			wr[-1].next = wr;
		chain->count++;
		chain->bytes += bytes;
	}
}

/* ---- where and how much ---- */

/* Room for data; queue pair 0 keeps some for frames. */
static uint32_t room_on(const struct verbs_qp *qp)
{
	uint32_t kept = qp->index == 0 ? VERBS_SEND_BUFFERS : 1;

	if (sm_state(&qp->sm) != VERBS_QP_UP || qp->sq_free <= kept)
		return 0;
	return qp->sq_free - kept;
}

/* Queue pairs on the rails nearest to its memory; all, when none of them is up. */
static uint32_t near_qps(const struct verbs_xfer *xfer)
{
	const struct verbs_peer *peer = xfer->peer;
	const struct plan_run *run = &xfer->plan->runs[0];
	uint32_t place = net_is_source(&xfer->net) ? run->src_buffer : run->dst_buffer;
	uint32_t rails = xfer->local.at[place].reg->near, bits = 0;

	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (sm_state(&peer->qps[i].sm) == VERBS_QP_UP &&
		    rails & 1u << peer->qps[i].rail->index)
			bits |= 1u << i;
	return bits ? bits : UINT32_MAX;
}

static struct verbs_qp *verbs_post_choose(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;
	struct verbs_qp *best = NULL;

	if (xfer->net.bytes < VERBS_SPREAD_BYTES && xfer->used)
		return &peer->qps[xfer->home];
	for (uint32_t i = 0; i < peer->qp_count; i++) {
		struct verbs_qp *qp = &peer->qps[i];

		if (xfer->near & 1u << i && room_on(qp) &&
		    (!best || qp->inflight_bytes < best->inflight_bytes))
			best = qp;
	}
	return best;
}

static void tune_window(struct verbs_peer *peer)
{
	uint64_t now = loop_now_ns(peer->net.timer.loop), took;
	uint64_t most = peer->transport->window_max;
	double window;

	if (!peer->rate_begin_ns || peer->inflight_bytes == 0) {
		peer->rate_begin_ns = now;
		peer->rate_bytes = 0;
		return;
	}
	took = now - peer->rate_begin_ns;
	if (took < RATE_NS || (took < RATE_LONG_NS && peer->rate_bytes < RATE_BYTES))
		return;
	window = (double)peer->rate_bytes * (double)WINDOW_NS / (double)took;
	peer->window_bytes = window > (double)most	   ? most
			     : window < (double)WINDOW_MIN ? WINDOW_MIN
							   : (uint64_t)window;
	if (peer->window_bytes > most)
		peer->window_bytes = most;
	peer->rate_begin_ns = now;
	peer->rate_bytes = 0;
}

/* ---- a mover's turn ---- */

enum turn { TURN_POSTED, TURN_WAITS, TURN_ENDED };

static bool post_imm(struct verbs_xfer *xfer, struct verbs_qp *qp, uint32_t imm)
{
	struct ibv_send_wr wr = {
		.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
		.imm_data = htonl(imm),
	};
	struct verbs_sent entry = {.xfer = xfer, .buffer = -1};

	/* of no bytes: the key and the address are ignored */
	if (sm_state(&qp->sm) != VERBS_QP_UP || qp->sq_free == 0)
		return false;
	if (verbs_qp_post(qp, &wr, 1, &entry) < 0)
		err_clear(); /* the peer has failed, with its own reason */
	return true;
}

/* One on each queue pair that has bytes of it; on the first when none has. */
static enum turn post_marks(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;
	uint32_t due = xfer->used ? xfer->used : 1u;
	struct verbs_mark mark = {
		.slot = (uint16_t)xfer->slot,
		.generation = xfer->generation,
		.count = (uint8_t)__builtin_popcount(due),
		.aborted = xfer->posted_bytes < xfer->net.bytes,
	};
	struct verbs_frame frame = {
		.type = VERBS_MARK, .id = xfer->net.id, .slot = verbs_mark_put(&mark)};

	for (uint32_t i = 1; i < peer->qp_count; i++) {
		if (!(due & ~xfer->marked & 1u << i))
			continue;
		if (!post_imm(xfer, &peer->qps[i], frame.slot))
			return TURN_WAITS;
		xfer->marked |= 1u << i;
	}
	if (due & ~xfer->marked & 1u) {
		verbs_send(peer, mem_steal(xfer->spare[VERBS_SPARE_LAST]), &frame, NULL);
		xfer->marked |= 1u;
	}
	xfer->ended = true;
	return TURN_ENDED;
}

static enum turn move_on(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;
	struct verbs_chain *chain = &peer->transport->chain;
	struct verbs_sent entry = {.xfer = xfer, .buffer = -1};
	uint64_t bytes = peer->window_bytes / 4;
	struct verbs_qp *qp;
	uint32_t room;

	/* open slices must be known before completion is reported */
	if (xfer->again || xfer->used & verbs_rail_open(peer))
		return TURN_WAITS;
	if (xfer->pack) {
		if (verbs_pack_move(xfer, room_on(&peer->qps[0])))
			return TURN_POSTED;
		if (!verbs_pack_ended(xfer))
			return TURN_WAITS;
		return xfer->net.kind == XP_WRITE ? post_marks(xfer) : TURN_ENDED;
	}
	if (sm_state(&xfer->net.sm) != NET_XFER_MOVING ||
	    xfer->posted_bytes == xfer->net.bytes)
		return xfer->net.kind == XP_WRITE ? post_marks(xfer) : TURN_ENDED;
	qp = verbs_post_choose(xfer);
	room = qp ? room_on(qp) : 0;
	if (!room || peer->inflight_bytes >= peer->window_bytes)
		return TURN_WAITS;
	build_chain(xfer, qp, room < VERBS_CHAIN_WRS ? room : VERBS_CHAIN_WRS,
		    bytes < VERBS_CHAIN_BYTES ? bytes : VERBS_CHAIN_BYTES);
	assert(chain->count); /* the plan's rows sum up to its bytes */
	entry.bytes = chain->bytes;
	entry.begin = xfer->posted_bytes;
	xfer->home = qp->index;
	xfer->used |= 1u << qp->index;
	xfer->posted_bytes += chain->bytes;
	xfer->net.used.descriptors += chain->count;
	if (verbs_qp_post(qp, chain->wr, chain->count, &entry) < 0)
		err_clear(); /* the peer has failed, with its own reason */
	return TURN_POSTED;
}

void verbs_move_start(struct verbs_xfer *xfer)
{
	plan_walk_begin(&xfer->walk, xfer->plan);
	xfer->span.len = 0;
	xfer->near = near_qps(xfer);
	/* the processor copies it, without a guard */
	xfer->may_inline = !xfer->local.device && !xfer->local.guarded;
	list_push_back(&xfer->peer->movers, &xfer->mover_link);
	net_peer_kick(&xfer->peer->net);
}

int verbs_move_again(struct verbs_xfer *xfer, uint32_t lost)
{
	struct verbs_out **last = &xfer->spare[VERBS_SPARE_LAST];

	if (xfer->net.kind == XP_WRITE && !*last)
		*last = verbs_out_new(); /* the mark that was sent took it */
	if (!*last)
		return err_pass(-ENOMEM);
	xfer->again = false;
	xfer->used_lost |= xfer->used & lost;
	xfer->used &= ~lost;
	xfer->marked = 0;
	xfer->near = near_qps(xfer);
	if (xfer->rewind < xfer->posted_bytes) {
		xfer->posted_bytes = xfer->done_bytes = xfer->rewind;
		xfer->span.len = 0;
		plan_walk_seek(&xfer->walk, xfer->plan, xfer->rewind);
	}
	xfer->rewind = UINT64_MAX;
	list_remove(&xfer->mover_link);
	list_push_back(&xfer->peer->movers, &xfer->mover_link);
	return 0;
}

void verbs_move_pump(struct verbs_peer *peer)
{
	unsigned int waiting = 0, there = 0;
	struct verbs_xfer *xfer;

	if (list_empty(&peer->movers))
		return;
	tune_window(peer);
	list_foreach(xfer, &peer->movers, mover_link)
		there++;
	/* until each of them in turn can do no more */
	while (waiting < there && net_peer_live(&peer->net)) {
		xfer = list_first(&peer->movers, struct verbs_xfer, mover_link);
		list_remove(&xfer->mover_link);
		switch (move_on(xfer)) {
		case TURN_POSTED:
			waiting = 0;
			list_push_back(&peer->movers, &xfer->mover_link);
			break;
		case TURN_WAITS:
			waiting++;
			list_push_back(&peer->movers, &xfer->mover_link);
			break;
		case TURN_ENDED:
			there--;
			net_xfer_check(&xfer->net);
			break;
		}
	}
}
