/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Packed writes: rows that are scattered at both ends and short.
 *
 * A work request has one stretch of the peer's memory, so rows that are apart there
 * (unequal tensor parallelism) cost one each. Where that is more than copying them
 * twice, the mover gathers rows into a buffer of its own, writes that in one request
 * into a slot of the peer, and the peer scatters it by its own checked plan. The
 * plan's rows in order are one stream of bytes, which is all that the two have to
 * agree on.
 *
 *   REQUEST (pack) -> GO (pack, the slots' key) and SLOT … ->
 *   { write, SLICE } -> scattered, the slot again: SLOT -> … -> MARK -> DONE
 *
 * Slices go over queue pair 0, so a SLICE comes behind its bytes, and the MARK behind
 * the last SLICE. A slot belongs to one transfer from its SLOT to its next, or to the
 * mover's last words: until then the peer's adapter may write it, and nothing else.
 * Slots are the peer's own (its key opens no other peer's bytes); a mover's buffers
 * are the daemon's, no key of them leaves. The engine's memory is written by our own
 * copy threads alone, so a packed transfer that stops is still when their jobs are.
 *
 * The choice is made for each transfer: a request of this many bytes costs copy_ns to
 * copy, at each end, and request_ns to post and complete. Both are measured: the
 * first when the transport opens, the second by PROBES requests of nothing when the
 * first transfer comes that might be packed (it goes by REQUEST_NS).
 */
#include "daemon/transport/verbs_impl.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config.h"
#include "daemon/transport/copy.h"

#define SLOTS 8u
#define SLOT_BYTES (UINT64_C(256) << 10)
#define POOL_BYTES (SLOTS * SLOT_BYTES)
#define ALL_SLOTS ((1u << SLOTS) - 1)
#define SLOTS_EACH 4u	     /* given to a transfer while others wait */
#define REQUEST_NS 150.0     /* until it is measured: what others publish */
#define PROBES 256u
#define PACK_BYTES_MIN (32u << 10)
#define PACK_REQUESTS_MIN 64u
#define PACK_ROW_MAX (16u << 10)
#define SAMPLE 1024u /* rows of a plan that are looked at */
#define TRIALS 3u

/* A slot at the receiver, or a buffer at the mover, and the copy that it is in. */
struct slice {
	struct copy_job job;
	struct verbs_xfer *xfer; /* NULL: free */
	struct list link;	 /* pack.cut, in the stream's order */
	uint64_t length;
	uint32_t index; /* of this */
	uint32_t slot;	/* mover: the peer's */
	bool copying, packed, posted;
};

struct verbs_pool {
	struct memory *memory;
	struct xp_reg *reg;
	struct slice slices[SLOTS];
	uint32_t free; /* bits */
	struct list waiting; /* verbs_pack.wait_link: receivers without a slot */
};

struct verbs_pack {
	struct verbs_xfer *xfer;
	struct copy_buffer *buffers; /* of our side, as the plan numbers them */
	uint32_t slots;	  /* mover: given and empty; receiver: given */
	uint64_t next;	  /* mover: bytes cut; receiver: bytes that came */
	uint64_t given;	  /* receiver: what the slots given so far can take */
	struct list cut;  /* mover: slice.link, not posted yet */
	struct list wait_link;
	struct verbs_remote remote; /* mover: the peer's slots */
};

/* ---- what it costs ---- */

static uint64_t copy_trial(const struct loop *loop, uint8_t *memory, uint64_t row)
{
	const uint64_t half = POOL_BYTES / 2, count = (UINT64_C(64) << 10) / row;
	uint64_t best = UINT64_MAX;

	for (unsigned int trial = 0; trial < TRIALS; trial++) {
		uint64_t begin = loop_clock_ns(loop), took;

		for (uint64_t i = 0; i < count; i++)
			memcpy(memory + half + i * row, memory + i * row * 3 / 2, row);
		took = loop_clock_ns(loop) - begin;
		best = took < best ? took : best;
	}
	return best / count;
}

/* Of one row, and of each byte in it: short rows and long ones. */
static void copy_learn(struct verbs_transport *transport, uint8_t *memory)
{
	const struct loop *loop = transport->net.base.env.loop;
	double few = (double)copy_trial(loop, memory, 64);
	double many = (double)copy_trial(loop, memory, 4096);

	transport->copy_byte_ns = many > few ? (many - few) / (4096 - 64) : 0;
	transport->copy_row_ns = few - 64 * transport->copy_byte_ns;
	if (transport->copy_row_ns < 1)
		transport->copy_row_ns = 1;
}

static double copy_ns(const struct verbs_transport *transport, uint32_t row)
{
	return transport->copy_row_ns + row * transport->copy_byte_ns;
}

/* Bytes in a work request of that plan, as far as a part of it shows. */
static uint32_t request_bytes(const struct plan *plan, uint32_t sge_max)
{
	uint64_t bytes = 0, count = 0, far_end = 0, near_end = 0;
	uint32_t buffer = UINT32_MAX, sges = 0;
	struct plan_walk walk;
	struct plan_span span;

	plan_walk_begin(&walk, plan);
	for (unsigned int i = 0; i < SAMPLE && plan_walk_next(&walk, UINT64_MAX, &span); i++) {
		bool joins = buffer == span.dst_buffer && far_end == span.dst;

		if (!joins || (near_end != span.src && sges == sge_max)) {
			count++;
			sges = 1;
		} else if (near_end != span.src) {
			sges++;
		}
		buffer = span.dst_buffer;
		far_end = span.dst + span.len;
		near_end = span.src + span.len;
		bytes += span.len;
	}
	return count ? (uint32_t)(bytes / count) : 0;
}

static void probe(struct verbs_peer *peer)
{
	struct verbs_qp *qp = &peer->qps[peer->qp_count - 1];
	struct ibv_send_wr wr[VERBS_CHAIN_WRS] = {{0}};
	struct verbs_sent entry = {.buffer = -1};

	if (peer->probe_begin_ns || sm_state(&qp->sm) != VERBS_QP_UP ||
	    qp->sq_free < PROBES + VERBS_SEND_BUFFERS || qp->sent_count)
		return;
	peer->probe_begin_ns = loop_clock_ns(peer->net.timer.loop);
	for (uint32_t i = 0; i < VERBS_CHAIN_WRS; i++) {
		wr[i].opcode = IBV_WR_RDMA_WRITE; /* of nothing */
		wr[i].next = i + 1 < VERBS_CHAIN_WRS ? &wr[i + 1] : NULL;
	}
	for (uint32_t done = 0; done < PROBES; done += VERBS_CHAIN_WRS) {
		entry.probe = done + VERBS_CHAIN_WRS == PROBES;
		if (verbs_qp_post(qp, wr, VERBS_CHAIN_WRS, &entry) < 0) {
			err_clear(); /* the peer has failed, with its own words */
			return;
		}
	}
}

void verbs_pack_probed(struct verbs_peer *peer)
{
	uint64_t took = loop_clock_ns(peer->net.timer.loop) - peer->probe_begin_ns;

	peer->request_ns = (double)took / PROBES;
	log_info("verbs", peer->net.name, "a work request's cost", "ns=%.0f copy_256_ns=%.0f",
		 peer->request_ns, copy_ns(peer->transport, 256));
}

static double request_ns(struct verbs_peer *peer)
{
	if (peer->transport->request_ns)
		return peer->transport->request_ns;
	if (peer->request_ns == 0)
		probe(peer);
	return peer->request_ns > 0 ? peer->request_ns : REQUEST_NS;
}

/* Memory that our copy threads reach as well as the adapter. */
static bool all_host(const struct verbs_places *places)
{
	for (uint32_t i = 0; i < places->count; i++)
		if (places->at[i].reg &&
		    places->at[i].reg->base.memory->kind == MEMORY_DEVICE)
			return false;
	return true;
}

/* ---- pools ---- */

static void pool_close(struct verbs_pool *pool)
{
	if (!pool)
		return;
	assert(pool->free == ALL_SLOTS);
	if (pool->reg)
		verbs_mem_dereg(pool->reg);
	if (pool->memory)
		memory_unref(pool->memory);
	mem_free(pool);
}

static int pool_open(struct verbs_transport *transport, struct verbs_pool **pool_p)
{
	struct verbs_pool *pool = mem_zalloc(sizeof(*pool));
	int r = pool ? 0 : -ENOMEM;

	if (r < 0)
		return err_pass(r);
	pool->free = ALL_SLOTS;
	list_init(&pool->waiting);
	for (uint32_t i = 0; i < SLOTS; i++) {
		pool->slices[i].index = i;
		list_init(&pool->slices[i].link);
	}
	r = memory_new_linear(POOL_BYTES, &pool->memory);
	if (r == 0)
		r = verbs_mem_reg(&transport->net.base, pool->memory, &pool->reg);
	if (r < 0) {
		pool->reg = NULL;
		pool_close(pool);
		return err_pass(r);
	}
	*pool_p = pool;
	return 0;
}

void verbs_pack_open(struct verbs_transport *transport)
{
	transport->request_ns = transport->net.base.env.config->verbs_request_ns;
	if (!transport->net.base.env.copier || transport->request_ns == 1)
		return;
	if (pool_open(transport, &transport->pack_pool) < 0) {
		log_warn("verbs", NULL, "rows are never packed", "why=\"%s\"",
			 err_last()->text);
		err_clear();
		return;
	}
	copy_learn(transport, transport->pack_pool->memory->base);
}

void verbs_pack_close(struct verbs_transport *transport)
{
	pool_close(mem_steal(transport->pack_pool));
}

void verbs_pack_peer_free(struct verbs_peer *peer)
{
	pool_close(mem_steal(peer->pack_pool));
}

static uint8_t *at_slot(const struct verbs_pool *pool, uint32_t index)
{
	return pool->memory->base + index * SLOT_BYTES;
}

static void slice_free(struct verbs_pool *pool, struct slice *slice)
{
	assert(!slice->copying);
	list_remove(&slice->link);
	slice->xfer = NULL;
	slice->packed = slice->posted = false;
	pool->free |= 1u << slice->index;
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
			.memory = at->reg->base.memory,
			.offset = at->offset,
			.length = at->reg->base.memory->length - at->offset,
		};
	}
	pack->xfer = xfer;
	list_init(&pack->cut);
	list_init(&pack->wait_link);
	xfer->pack = pack;
	return 0;
}

static void way_is(struct verbs_xfer *xfer, struct xp_way *way)
{
	struct verbs_peer *peer = xfer->peer;

	way->packed = xfer->pack != NULL;
	way->copy_ns = (uint32_t)copy_ns(peer->transport, way->row_bytes);
	way->request_ns = xfer->net.ours ? (uint32_t)request_ns(peer) : 0;
}

int verbs_pack_choose(struct verbs_xfer *xfer)
{
	struct verbs_transport *transport = xfer->peer->transport;
	uint32_t row;
	int r = 0;

	if (!xfer->net.bytes || xfer->net.kind != XP_WRITE || !transport->pack_pool)
		return 0;
	row = request_bytes(xfer->plan, transport->sge_max);
	xfer->net.op->way = (struct xp_way){.row_bytes = row};
	if (row <= PACK_ROW_MAX && xfer->net.bytes >= PACK_BYTES_MIN &&
	    xfer->net.bytes / row >= PACK_REQUESTS_MIN && all_host(&xfer->local) &&
	    request_ns(xfer->peer) > 2 * copy_ns(transport, row))
		r = pack_new(xfer);
	way_is(xfer, &xfer->net.op->way);
	return err_pass(r);
}

bool verbs_pack_accept(struct verbs_xfer *xfer, size_t *len_p, uint8_t *key)
{
	struct verbs_peer *peer = xfer->peer;
	struct verbs_transport *transport = peer->transport;
	int r = 0;

	if (!xfer->wants_pack || !transport->pack_pool || !all_host(&xfer->local))
		return false;
	if (!peer->pack_pool)
		r = pool_open(transport, &peer->pack_pool);
	if (r == 0)
		r = verbs_key_pack(peer->pack_pool->reg, NULL, key, VERBS_TEXT_MAX, len_p);
	if (r == 0)
		r = pack_new(xfer);
	if (r < 0) {
		err_clear(); /* then row by row */
		return false;
	}
	xfer->net.in.way.row_bytes = request_bytes(xfer->plan, transport->sge_max);
	way_is(xfer, &xfer->net.in.way);
	list_push_back(&peer->pack_pool->waiting, &xfer->pack->wait_link);
	return true;
}

int verbs_pack_agree(struct verbs_xfer *xfer, bool agreed, const void *key, size_t len)
{
	struct verbs_remote *remote;

	if (!xfer->pack && agreed)
		return err_raise(ERR_PROTO, "verbs: transfer %" PRIu64
				 " is to be packed, which it did not ask for", xfer->net.id);
	if (!agreed) {
		verbs_pack_drop(xfer);
		if (xfer->net.op)
			xfer->net.op->way.packed = false;
		return 0;
	}
	remote = &xfer->pack->remote;
	if (verbs_remote_get(key, len, remote) < 0)
		return err_raise(ERR_PROTO, "verbs: %s", err_last()->text);
	if (remote->length != POOL_BYTES || remote->pieces != 1 ||
	    remote->rails <= xfer->peer->qps[0].rail->index)
		return err_raise(ERR_PROTO, "verbs: slots of %" PRIu64 " bytes",
				 remote->length);
	xfer->pack_agreed = true;
	return 0;
}

/* Its jobs end first, and then it. */
void verbs_pack_stop(struct verbs_xfer *xfer)
{
	struct verbs_transport *transport = xfer->peer->transport;
	struct verbs_pool *pool = xfer->net.ours ? transport->pack_pool : xfer->peer->pack_pool;

	if (!xfer->pack || !pool)
		return;
	list_remove(&xfer->pack->wait_link);
	for (uint32_t i = 0; i < SLOTS; i++) {
		struct slice *slice = &pool->slices[i];

		if (slice->xfer != xfer)
			continue;
		if (slice->copying)
			copier_cancel(transport->net.base.env.copier, &slice->job);
		else if (xfer->net.ours && !slice->posted)
			slice_free(pool, slice);
	}
}

void verbs_pack_drop(struct verbs_xfer *xfer)
{
	struct verbs_pack *pack = xfer->pack;
	struct verbs_pool *pool = xfer->net.ours ? xfer->peer->transport->pack_pool
					   : xfer->peer->pack_pool;

	if (!pack)
		return;
	xfer->pack = NULL;
	list_remove(&pack->wait_link);
	for (uint32_t i = 0; pool && i < SLOTS; i++)
		if (pool->slices[i].xfer == xfer)
			slice_free(pool, &pool->slices[i]);
	mem_free(pack->buffers);
	mem_free(pack);
	if (!xfer->net.ours)
		net_peer_kick(&xfer->peer->net); /* slots for who waits */
}

/* ---- the receiver ---- */

/* A slot, as it is, for its next slice. */
static void say_slot(struct verbs_xfer *xfer, uint32_t index)
{
	struct verbs_frame frame = {.type = VERBS_SLOT, .id = xfer->net.id, .slot = index};
	struct verbs_out *out = verbs_out_new();

	if (!out) {
		net_xfer_stop_last(&xfer->net);
		return;
	}
	xfer->pack->slots |= 1u << index;
	xfer->pack->given += SLOT_BYTES;
	verbs_send(xfer->peer, out, &frame, NULL);
}

static bool wants_slot(const struct verbs_xfer *xfer, uint32_t most)
{
	return sm_state(&xfer->net.sm) == NET_XFER_MOVING &&
	       xfer->pack->given < xfer->net.bytes &&
	       (uint32_t)__builtin_popcount(xfer->pack->slots) < most;
}

/* At the end of the line, if it can use one; it may stand there already. */
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
	while (pool && pool->free && (link = list_pop_front(&pool->waiting))) {
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

static void on_scattered(struct copy_job *job)
{
	struct slice *slice = container_of(job, struct slice, job);
	struct verbs_xfer *xfer = slice->xfer;
	struct verbs_pool *pool = xfer->peer->pack_pool;

	slice->copying = false;
	xfer->busy--;
	if (job->result < 0)
		net_xfer_stop(&xfer->net, &job->err);
	else
		xfer->net.in.moved += slice->length;
	if (sm_state(&xfer->net.sm) == NET_XFER_MOVING) {
		if (list_empty(&pool->waiting) && wants_slot(xfer, SLOTS)) {
			say_slot(xfer, slice->index);
		} else {
			slice_free(pool, slice);
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

	if (!pack || frame->slot >= SLOTS || !(pack->slots & 1u << frame->slot) ||
	    frame->bytes != pack->next || frame->total == 0 || frame->total > SLOT_BYTES ||
	    frame->total > xfer->net.bytes - pack->next)
		return err_raise(ERR_PROTO, "verbs: a slice of transfer %" PRIu64
				 ": %u bytes at %" PRIu64 ", slot %u", xfer->net.id, frame->total,
				 frame->bytes, frame->slot);
	pack->slots &= ~(1u << frame->slot);
	pack->next += frame->total;
	if (sm_state(&xfer->net.sm) != NET_XFER_MOVING)
		return 0; /* nobody wants it any more */
	slice = &xfer->peer->pack_pool->slices[frame->slot];
	slice->length = frame->total;
	slice->job = (struct copy_job){
		.plan = xfer->plan,
		.begin = frame->bytes,
		.end = frame->bytes + frame->total,
		.src = {.linear = at_slot(xfer->peer->pack_pool, frame->slot)},
		.dst = {.buffers = pack->buffers, .buffer_count = xfer->local.count},
		.on_done = on_scattered,
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

/* ---- the mover ---- */

int verbs_pack_slot(struct verbs_xfer *xfer, const struct verbs_frame *frame)
{
	if (!xfer->pack_agreed || !xfer->pack || frame->slot >= SLOTS ||
	    xfer->pack->slots & 1u << frame->slot)
		return err_raise(ERR_PROTO, "verbs: slot %u for transfer %" PRIu64,
				 frame->slot, xfer->net.id);
	xfer->pack->slots |= 1u << frame->slot;
	net_peer_kick(&xfer->peer->net);
	return 0;
}

static void on_gathered(struct copy_job *job)
{
	struct slice *slice = container_of(job, struct slice, job);
	struct verbs_xfer *xfer = slice->xfer;

	slice->copying = false;
	slice->packed = true;
	xfer->busy--;
	if (job->result < 0)
		net_xfer_stop(&xfer->net, &job->err);
	if (slice->xfer && sm_state(&xfer->net.sm) != NET_XFER_MOVING)
		slice_free(xfer->peer->transport->pack_pool, slice);
	net_peer_kick(&xfer->peer->net);
	net_xfer_check(&xfer->net);
}

static bool cut(struct verbs_xfer *xfer)
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
	slice->length = left < SLOT_BYTES ? left : SLOT_BYTES;
	slice->job = (struct copy_job){
		.plan = xfer->plan,
		.begin = pack->next,
		.end = pack->next + slice->length,
		.src = {.buffers = pack->buffers, .buffer_count = xfer->local.count},
		.dst = {.linear = at_slot(pool, slice->index)},
		.on_done = on_gathered,
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

/* Its bytes, and behind them the word that they are there. */
static bool post(struct verbs_xfer *xfer, struct slice *slice)
{
	struct verbs_qp *qp = &xfer->peer->qps[0];
	const struct verbs_pool *pool = xfer->peer->transport->pack_pool;
	const struct verbs_reg *reg = (const struct verbs_reg *)pool->reg;
	const struct verbs_remote *remote = &xfer->pack->remote;
	struct verbs_sent entry = {
		.xfer = xfer, .buffer = -1, .bytes = slice->length, .slice = slice};
	struct verbs_frame frame = {
		.type = VERBS_SLICE,
		.id = xfer->net.id,
		.slot = slice->slot,
		.bytes = slice->job.begin,
		.total = (uint32_t)slice->length,
	};
	struct ibv_sge sge = {
		.addr = (uint64_t)(uintptr_t)at_slot(pool, slice->index),
		.length = (uint32_t)slice->length,
		.lkey = reg->mr[qp->rail->device->index][0]->lkey,
	};
	struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE};
	struct verbs_out *out = verbs_out_new();

	if (!out) {
		net_xfer_stop_last(&xfer->net);
		return false;
	}
	wr.wr.rdma.remote_addr = remote->address + slice->slot * SLOT_BYTES;
	wr.wr.rdma.rkey = remote->rkey[qp->rail->index][0];
	list_remove(&slice->link);
	slice->posted = true;
	xfer->used = 1u;
	xfer->posted_bytes += slice->length;
	xfer->peer->transport->stats.bytes += slice->length;
	if (verbs_qp_post(qp, &wr, 1, &entry) < 0)
		err_clear(); /* the peer has failed, with its own words */
	verbs_send(xfer->peer, out, &frame, NULL);
	return true;
}

void verbs_pack_sent(struct slice *slice)
{
	struct verbs_transport *transport = slice->xfer->peer->transport;
	struct net_peer *net;

	slice_free(transport->pack_pool, slice);
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
	       (first = list_first(&xfer->pack->cut, struct slice, link)) && first->packed &&
	       post(xfer, first)) {
		room--;
		moved = true;
	}
	while (sm_state(&xfer->net.sm) == NET_XFER_MOVING && cut(xfer))
		moved = true;
	return moved;
}

bool verbs_pack_ended(const struct verbs_xfer *xfer)
{
	return sm_state(&xfer->net.sm) != NET_XFER_MOVING ? list_empty(&xfer->pack->cut)
							: xfer->posted_bytes == xfer->net.bytes;
}
