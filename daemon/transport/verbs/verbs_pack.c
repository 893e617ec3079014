/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed transfers: the source gathers rows into a buffer of its daemon's, writes that in
 * one request into a slot of the destination's daemon, and that one scatters it by its
 * own checked plan. The plan's rows in order are one stream of bytes, and the two have to
 * agree on nothing else. Two reasons for it:
 *
 *   cheaper  rows that are scattered at both ends and short (unequal tensor
 *	      parallelism). A work request has one stretch of the peer's memory, so each
 *	      of them would cost one; where that is more than copying it twice, it is
 *	      packed, whichever side asked.
 *   staged   memory that the adapter cannot register, at either end: a GPU's without
 *	      GPUDirect, another process's (vm), memory that its owner may truncate
 *	      (guarded). Any transfer of it is packed; copy threads reach it.
 *
 *   WRITE  REQUEST (pack) -> GO (pack, the slots' key) and SLOT … ->
 *	    { write, SLICE } -> scattered, the slot again: SLOT -> … -> MARK -> DONE
 *   READ   REQUEST (pack) -> GO (pack) -> SLOT (the slots' key) … ->
 *	    { write, SLICE } -> scattered, SLOT -> … -> FIN -> DONE
 *
 * So a packed READ is written by its source, too. Reading the source's slots instead
 * would need slots and their reuse in two directions; with this design there is one path,
 * and both fences are those proven for WRITE: only local copy threads touch engine
 * memory, on either side, so a stopped packed transfer is quiesced when their jobs are.
 *
 * Slices use queue pair 0, so a SLICE arrives after its bytes, and the last messages
 * behind the last SLICE. A slot belongs to one transfer from its SLOT to its next, or to
 * the source's last messages (MARK; for a READ DONE, sent when its writes have ended):
 * until then the source's adapter may write it, and nothing else. Slots are the peer's
 * own (their key opens no other peer's bytes); a source's buffers are the daemon's, their
 * keys are never sent.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <errno.h>
#include <inttypes.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/memory/copy.h"
#include "daemon/transport/verbs/verbs_pool.h"

#define SLOTS_EACH 4u /* given to a transfer while others wait */

struct verbs_pack {
	struct verbs_xfer *xfer;
	struct copy_buffer *buffers; /* of this side, as the plan numbers them */
	uint32_t slots;		     /* source: given and empty; destination: given */
	uint64_t next;		     /* source: bytes cut; destination: bytes received */
	uint64_t given;		     /* destination: the capacity of the granted slots */
	struct list cut;	     /* source: slice.link, not posted yet */
	struct list wait_link;
	struct verbs_remote remote; /* source: the peer's slots */
	bool has_remote, key_sent;
};

/* The slices' direction: local ones, which are sent, or the peer's. */
static struct verbs_pool *pool_of(const struct verbs_xfer *xfer)
{
	return net_is_source(&xfer->net) ? xfer->peer->transport->pack_pool
					 : xfer->peer->pack_pool;
}

void verbs_pack_open(struct verbs_transport *transport)
{
	transport->request_ns = transport->net.base.env.config->verbs_request_ns;
	if (!transport->net.base.env.copier)
		return;
	if (verbs_pool_open(transport, &transport->pack_pool) < 0) {
		log_warn("verbs", NULL, "packing and staging are disabled", "why=\"%s\"",
			 err_last()->text);
		err_clear();
	}
}

void verbs_pack_close(struct verbs_transport *transport)
{
	verbs_pool_close(mem_steal(transport->pack_pool));
}

void verbs_pack_peer_free(struct verbs_peer *peer)
{
	verbs_pool_close(mem_steal(peer->pack_pool));
}

/* ---- a transfer's beginning and end ---- */

static int pack_new(struct verbs_xfer *xfer)
{
	struct verbs_pack *pack = mem_zalloc(sizeof(*pack));
	uint32_t count = xfer->local.count;

	if (!pack)
		return err_pass(-ENOMEM);
	pack->buffers = mem_calloc(count, sizeof(*pack->buffers));
	if (!pack->buffers) {
		mem_free(pack);
		return err_pass(-ENOMEM);
	}
	for (uint32_t i = 0; i < count; i++) {
		const struct verbs_place *at = &xfer->local.at[i];

		if (!at->reg)
			continue;
		pack->buffers[i] = (struct copy_buffer){
			.memory = at->reg->net.base.memory,
			.offset = at->offset,
			.length = at->reg->net.base.memory->length - at->offset,
		};
	}
	pack->xfer = xfer;
	list_init(&pack->cut);
	list_init(&pack->wait_link);
	xfer->pack = pack;
	return 0;
}

/* Of a row, at one end: about what a copy thread takes for rows out of cold memory. */
static uint32_t copy_ns(uint32_t row)
{
	return 20 + row / 10;
}

static void way_is(struct verbs_xfer *xfer)
{
	struct xp_way *way = xfer->net.ours ? &xfer->net.op->way : &xfer->net.in.way;
	struct verbs_peer *peer = xfer->peer;

	way->packed = xfer->pack != NULL;
	way->staged = xfer->pack && xfer->must_pack;
	way->row_bytes = pack_request_bytes(xfer->plan, xfer->net.kind == XP_WRITE,
					    peer->transport->sge_max);
	way->copy_ns = copy_ns(way->row_bytes);
	way->request_ns = xfer->net.ours ? peer->transport->request_ns : 0;
}

static int lacks_pool(void)
{
	return err_raise(
		ERR_REQUIRE,
		"verbs: memory that no adapter can register must be staged, and there "
		"are no staging buffers (see the log)");
}

/* Slots for slices to be received, unless already requested. */
static int want_slots(struct verbs_peer *peer)
{
	return peer->pack_pool ? 0 : err_pass(verbs_pool_order(peer));
}

static bool is_cheaper(struct verbs_xfer *xfer)
{
	struct verbs_transport *transport = xfer->peer->transport;
	uint32_t row;

	if (xfer->local.device)
		return false;
	row = pack_request_bytes(xfer->plan, xfer->net.kind == XP_WRITE,
				 transport->sge_max);
	return pack_requests(xfer->net.bytes, row) &&
	       pack_cheaper(transport->request_ns, copy_ns(row));
}

int verbs_pack_choose(struct verbs_xfer *xfer)
{
	struct verbs_transport *transport = xfer->peer->transport;
	bool packs;
	int r = 0;

	xfer->must_pack = xfer->local.staged || xfer->remote.staged;
	if (!transport->pack_pool && xfer->must_pack)
		return lacks_pool();
	if (!transport->pack_pool)
		return 0;
	packs = xfer->must_pack || is_cheaper(xfer);
	if (packs && xfer->net.kind == XP_READ)
		r = want_slots(xfer->peer);
	if (r == 0 && packs)
		r = pack_new(xfer);
	if (r < 0 && xfer->must_pack)
		return err_pass(r);
	if (r < 0)
		err_clear(); /* then row by row */
	way_is(xfer);
	return 0;
}

int verbs_pack_check(struct verbs_xfer *xfer)
{
	if (xfer->local.staged && !xfer->wants_pack)
		return err_raise(
			ERR_IMPORT,
			"verbs: no local adapter can register that memory, and the peer "
			"cannot send it packed");
	if ((xfer->local.staged || xfer->must_pack) && !xfer->peer->transport->pack_pool)
		return lacks_pool();
	xfer->must_pack |= xfer->local.staged;
	return 0;
}

bool verbs_pack_waits(struct verbs_xfer *xfer)
{
	struct verbs_peer *peer = xfer->peer;

	if (!xfer->wants_pack || net_is_source(&xfer->net) || !peer->transport->pack_pool)
		return false;
	if (!peer->transport->request_ns && !xfer->must_pack)
		return false;
	if (want_slots(peer) < 0) {
		err_clear(); /* then row by row, or not at all */
		return false;
	}
	return !peer->pack_pool->ready;
}

bool verbs_pack_accept(struct verbs_xfer *xfer, size_t *len_p, uint8_t *key)
{
	struct verbs_transport *transport = xfer->peer->transport;
	bool source = net_is_source(&xfer->net);
	struct verbs_pool *pool = pool_of(xfer);
	int r = 0;

	if (!xfer->wants_pack || !pool || !pool->ready)
		return false;
	if (!xfer->must_pack && (!transport->request_ns || xfer->local.device))
		return false;
	if (!source)
		r = verbs_key_pack(pool->reg, NULL, key, VERBS_TEXT_MAX, len_p);
	if (r == 0)
		r = pack_new(xfer);
	if (r < 0) {
		err_clear(); /* then row by row, or not at all */
		return false;
	}
	way_is(xfer);
	xfer->pack->key_sent = true;
	if (!source)
		list_push_back(&pool->waiting, &xfer->pack->wait_link);
	return true;
}

/* The peer's slots, as announced by it. */
static int take_key(struct verbs_xfer *xfer, const void *key, size_t len)
{
	struct verbs_remote *remote = &xfer->pack->remote;

	if (verbs_remote_get(key, len, remote) < 0)
		return err_raise(ERR_PROTO, "verbs: %s", err_last()->text);
	if (remote->length != VERBS_POOL_BYTES || remote->pieces != 1 ||
	    remote->rails <= xfer->peer->qps[0].rail->index)
		return err_raise(ERR_PROTO, "verbs: slots of %" PRIu64 " bytes",
				 remote->length);
	xfer->pack->has_remote = true;
	return 0;
}

int verbs_pack_agree(struct verbs_xfer *xfer, bool agreed, const void *key, size_t len)
{
	if (!xfer->pack && agreed)
		return err_raise(ERR_PROTO,
				 "verbs: the peer packs transfer %" PRIu64
				 ", which did not request it",
				 xfer->net.id);
	if (!agreed) {
		verbs_pack_drop(xfer);
		if (xfer->net.op)
			xfer->net.op->way.packed = xfer->net.op->way.staged = false;
		return 0;
	}
	xfer->pack_agreed = true;
	if (net_is_source(&xfer->net))
		return err_pass(take_key(xfer, key, len));
	/* the destination of a READ: its slots are ordered since it was posted */
	if (want_slots(xfer->peer) < 0)
		net_xfer_stop_last(&xfer->net);
	else
		list_push_back(&xfer->peer->pack_pool->waiting, &xfer->pack->wait_link);
	net_peer_kick(&xfer->peer->net);
	return 0;
}

void verbs_pack_no_slots(struct verbs_peer *peer, struct verbs_pool *pool,
			 const struct err *err)
{
	struct verbs_xfer *xfer;
	struct list *link;

	while ((link = list_pop_front(&pool->waiting)))
		net_xfer_stop(&list_entry(link, struct verbs_pack, wait_link)->xfer->net,
			      err);
	while ((xfer = list_first(&peer->unslotted, struct verbs_xfer, grant_link))) {
		list_remove(&xfer->grant_link);
		xfer->wants_pack = false; /* then row by row */
		if (xfer->must_pack)
			net_xfer_stop(&xfer->net, err);
		else
			list_push_back(&peer->ungranted, &xfer->grant_link);
	}
}

/* Its jobs end first, and then it. */
void verbs_pack_stop(struct verbs_xfer *xfer)
{
	struct verbs_transport *transport = xfer->peer->transport;
	struct verbs_pool *pool = pool_of(xfer);

	if (!xfer->pack)
		return;
	list_remove(&xfer->pack->wait_link);
	for (uint32_t i = 0; pool && i < VERBS_SLOTS; i++) {
		struct slice *slice = &pool->slices[i];

		if (slice->xfer != xfer)
			continue;
		if (slice->copying)
			copier_cancel(transport->net.base.env.copier, &slice->job);
		else if (net_is_source(&xfer->net) && !slice->posted)
			verbs_pool_free(pool, slice);
	}
}

void verbs_pack_drop(struct verbs_xfer *xfer)
{
	struct verbs_pack *pack = xfer->pack;
	struct verbs_pool *pool = pool_of(xfer);

	if (!pack)
		return;
	xfer->pack = NULL;
	list_remove(&pack->wait_link);
	for (uint32_t i = 0; pool && i < VERBS_SLOTS; i++)
		if (pool->slices[i].xfer == xfer)
			verbs_pool_free(pool, &pool->slices[i]);
	mem_free(pack->buffers);
	mem_free(pack);
	if (!net_is_source(&xfer->net))
		net_peer_kick(&xfer->peer->net); /* slots for waiting transfers */
}

/* ---- the destination ---- */

/* A slot, as it is, for its next slice. */
static void say_slot(struct verbs_xfer *xfer, uint32_t index)
{
	struct verbs_frame frame = {.type = VERBS_SLOT,
				    .kind = (uint8_t)xfer->net.kind,
				    .id = xfer->net.id,
				    .slot = index};
	struct verbs_pack *pack = xfer->pack;
	struct verbs_out *out = verbs_out_new();
	uint8_t key[VERBS_TEXT_MAX];
	size_t len = 0;
	int r = out ? 0 : -ENOMEM;

	if (r == 0 && !pack->key_sent) /* the first of a READ */
		r = verbs_key_pack(xfer->peer->pack_pool->reg, NULL, key, sizeof(key),
				   &len);
	if (r < 0) {
		mem_free(out);
		net_xfer_stop_last(&xfer->net);
		return;
	}
	pack->key_sent = true;
	pack->slots |= 1u << index;
	pack->given += VERBS_SLOT_BYTES;
	verbs_send_bytes(xfer->peer, out, &frame, key, len);
}

static bool wants_slot(const struct verbs_xfer *xfer, uint32_t most)
{
	return sm_state(&xfer->net.sm) == NET_XFER_MOVING &&
	       xfer->pack->given < xfer->net.bytes &&
	       (uint32_t)__builtin_popcount(xfer->pack->slots) < most;
}

/* Added to the end of the queue, if it can use a slot; it may be queued already. */
static void wait_for_slot(struct verbs_pack *pack, struct verbs_pool *pool)
{
	list_remove(&pack->wait_link);
	if (wants_slot(pack->xfer, SLOTS_EACH))
		list_push_back(&pool->waiting, &pack->wait_link);
}

void verbs_pack_feed(struct verbs_peer *peer)
{
	struct verbs_pool *pool = peer->pack_pool;
	struct list *link;

	/* one each, in turn */
	while (pool && pool->ready && pool->free &&
	       (link = list_pop_front(&pool->waiting))) {
		struct verbs_pack *pack = list_entry(link, struct verbs_pack, wait_link);
		struct slice *slice = &pool->slices[__builtin_ctz(pool->free)];

		if (!pack->xfer->go || !wants_slot(pack->xfer, SLOTS_EACH))
			continue;
		pool->free &= ~(1u << slice->index);
		slice->xfer = pack->xfer;
		say_slot(pack->xfer, slice->index);
		wait_for_slot(pack, pool);
	}
}

static void verbs_pack_on_scattered(struct copy_job *job)
{
	struct slice *slice = container_of(job, struct slice, job);
	struct verbs_xfer *xfer = slice->xfer;
	struct verbs_pool *pool = xfer->peer->pack_pool;

	slice->copying = false;
	xfer->busy--;
	if (job->result < 0) {
		net_xfer_stop(&xfer->net, &job->err);
	} else {
		xfer->done_bytes += slice->length;
		xfer->net.used.staged += slice->length;
		xfer->net.used.descriptors++;
	}
	net_xfer_moved(&xfer->net, xfer->done_bytes, 0);
	if (sm_state(&xfer->net.sm) == NET_XFER_MOVING) {
		if (list_empty(&pool->waiting) && wants_slot(xfer, VERBS_SLOTS)) {
			say_slot(xfer, slice->index);
		} else {
			verbs_pool_free(pool, slice);
			wait_for_slot(xfer->pack, pool);
			net_peer_kick(&xfer->peer->net);
		}
	}
	net_xfer_check(&xfer->net);
}

int verbs_pack_slice(struct verbs_xfer *xfer, const struct verbs_frame *frame)
{
	struct verbs_pack *pack = xfer->pack;
	struct slice *slice;

	if (!pack || net_is_source(&xfer->net) || frame->slot >= VERBS_SLOTS ||
	    !(pack->slots & 1u << frame->slot) || frame->bytes != pack->next ||
	    frame->total == 0 || frame->total > VERBS_SLOT_BYTES ||
	    frame->total > xfer->net.bytes - pack->next)
		return err_raise(ERR_PROTO,
				 "verbs: a slice of transfer %" PRIu64
				 ": %u bytes at %" PRIu64 ", slot %u",
				 xfer->net.id, frame->total, frame->bytes, frame->slot);
	pack->slots &= ~(1u << frame->slot);
	pack->next += frame->total;
	if (sm_state(&xfer->net.sm) != NET_XFER_MOVING)
		return 0; /* no longer wanted */
	slice = &xfer->peer->pack_pool->slices[frame->slot];
	slice->length = frame->total;
	slice->job = (struct copy_job){
		.plan = xfer->plan,
		.begin = frame->bytes,
		.end = frame->bytes + frame->total,
		.src = {.linear = verbs_pool_at(xfer->peer->pack_pool, frame->slot)},
		.dst = {.buffers = pack->buffers, .buffer_count = xfer->local.count},
		.on_done = verbs_pack_on_scattered,
	};
	if (copier_submit(xfer->peer->transport->net.base.env.copier, &slice->job) < 0) {
		net_xfer_stop_last(&xfer->net);
		return 0;
	}
	slice->copying = true;
	xfer->busy++;
	return 0;
}

bool verbs_pack_whole(const struct verbs_xfer *xfer)
{
	return !xfer->pack || xfer->pack->next == xfer->net.bytes;
}

/* ---- the source ---- */

int verbs_pack_slot(struct verbs_xfer *xfer, const struct verbs_frame *frame,
		    const void *payload)
{
	int r = 0;

	if (!(xfer->net.ours ? xfer->pack_agreed : xfer->go) || !xfer->pack ||
	    !net_is_source(&xfer->net) || frame->slot >= VERBS_SLOTS ||
	    xfer->pack->slots & 1u << frame->slot)
		return err_raise(ERR_PROTO, "verbs: slot %u for transfer %" PRIu64,
				 frame->slot, xfer->net.id);
	if (!xfer->pack->has_remote)
		r = take_key(xfer, payload, frame->length);
	if (r < 0)
		return err_pass(r);
	xfer->pack->slots |= 1u << frame->slot;
	net_peer_kick(&xfer->peer->net);
	return 0;
}

static void verbs_pack_on_gathered(struct copy_job *job)
{
	struct slice *slice = container_of(job, struct slice, job);
	struct verbs_xfer *xfer = slice->xfer;

	slice->copying = false;
	slice->packed = true;
	xfer->busy--;
	if (job->result < 0)
		net_xfer_stop(&xfer->net, &job->err);
	else
		xfer->net.used.staged += slice->length;
	if (slice->xfer && sm_state(&xfer->net.sm) != NET_XFER_MOVING)
		verbs_pool_free(xfer->peer->transport->pack_pool, slice);
	net_peer_kick(&xfer->peer->net);
	net_xfer_check(&xfer->net);
}

static bool verbs_pack_cut(struct verbs_xfer *xfer)
{
	struct verbs_transport *transport = xfer->peer->transport;
	struct verbs_pool *pool = transport->pack_pool;
	struct verbs_pack *pack = xfer->pack;
	uint64_t left = xfer->net.bytes - pack->next;
	struct slice *slice;

	if (!left || !pack->slots || !pool->free)
		return false;
	slice = &pool->slices[__builtin_ctz(pool->free)];
	slice->slot = (uint32_t)__builtin_ctz(pack->slots);
	slice->length = left < VERBS_SLOT_BYTES ? left : VERBS_SLOT_BYTES;
	slice->job = (struct copy_job){
		.plan = xfer->plan,
		.begin = pack->next,
		.end = pack->next + slice->length,
		.src = {.buffers = pack->buffers, .buffer_count = xfer->local.count},
		.dst = {.linear = verbs_pool_at(pool, slice->index)},
		.on_done = verbs_pack_on_gathered,
	};
	if (copier_submit(transport->net.base.env.copier, &slice->job) < 0) {
		net_xfer_stop_last(&xfer->net);
		return false;
	}
	slice->copying = true;
	slice->xfer = xfer;
	xfer->busy++;
	pool->free &= ~(1u << slice->index);
	pack->slots &= ~(1u << slice->slot);
	pack->next += slice->length;
	list_push_back(&pack->cut, &slice->link);
	return true;
}

/* Its bytes, followed by the message that announces them. */
static bool verbs_pack_post(struct verbs_xfer *xfer, struct slice *slice)
{
	struct verbs_qp *qp = &xfer->peer->qps[0];
	const struct verbs_pool *pool = xfer->peer->transport->pack_pool;
	const struct verbs_reg *reg = (const struct verbs_reg *)pool->reg;
	const struct verbs_remote *remote = &xfer->pack->remote;
	struct verbs_sent entry = {
		.xfer = xfer, .buffer = -1, .bytes = slice->length, .slice = slice};
	struct verbs_frame frame = {
		.type = VERBS_SLICE,
		.kind = (uint8_t)xfer->net.kind,
		.id = xfer->net.id,
		.slot = slice->slot,
		.bytes = slice->job.begin,
		.total = (uint32_t)slice->length,
	};
	struct ibv_sge sge = {
		.addr = (uint64_t)(uintptr_t)verbs_pool_at(pool, slice->index),
		.length = (uint32_t)slice->length,
		.lkey = reg->mr[qp->rail->device->index][0]->lkey,
	};
	struct ibv_send_wr wr = {
		.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
	struct verbs_out *out = verbs_out_new();

	if (!out) {
		net_xfer_stop_last(&xfer->net);
		return false;
	}
	wr.wr.rdma.remote_addr = remote->address + slice->slot * VERBS_SLOT_BYTES;
	wr.wr.rdma.rkey = remote->rkey[qp->rail->index][0];
	list_remove(&slice->link);
	slice->posted = true;
	xfer->used = 1u;
	xfer->posted_bytes += slice->length;
	xfer->net.used.descriptors++;
	if (verbs_qp_post(qp, &wr, 1, &entry) < 0)
		err_clear(); /* the peer has failed, with its own reason */
	verbs_send(xfer->peer, out, &frame, NULL);
	return true;
}

void verbs_pack_sent(struct slice *slice)
{
	struct verbs_transport *transport = slice->xfer->peer->transport;
	struct net_peer *net;

	verbs_pool_free(transport->pack_pool, slice);
	/* one of them may want it */
	list_foreach(net, &transport->net.peers, link)
		if (!list_empty(&container_of(net, struct verbs_peer, net)->movers))
			net_peer_kick(net);
}

bool verbs_pack_move(struct verbs_xfer *xfer, uint32_t room)
{
	struct verbs_peer *peer = xfer->peer;
	struct slice *first;
	bool moved = false;

	while (sm_state(&xfer->net.sm) == NET_XFER_MOVING && room &&
	       peer->inflight_bytes < peer->window_bytes &&
	       (first = list_first(&xfer->pack->cut, struct slice, link)) &&
	       first->packed && verbs_pack_post(xfer, first)) {
		room--;
		moved = true;
	}
	while (sm_state(&xfer->net.sm) == NET_XFER_MOVING && verbs_pack_cut(xfer))
		moved = true;
	return moved;
}

bool verbs_pack_ended(const struct verbs_xfer *xfer)
{
	return sm_state(&xfer->net.sm) != NET_XFER_MOVING
		       ? list_empty(&xfer->pack->cut)
		       : xfer->posted_bytes == xfer->net.bytes;
}
