/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A queue pair: its two queues, its completions, its death.
 *
 * Accounts are exact, so neither a send queue nor a completion queue can overflow. Each
 * queue pair has its own completion queue, with room for every work request of both its
 * queues (after an error each of them completes by itself). Work requests are posted in
 * chains under one doorbell of which the last is signalled; `sent` holds one entry for a
 * chain, in order, and a work request's wr_id names its entry. A good completion frees
 * the whole chain's space; after an error, when the adapter reports unsignalled requests
 * too, each frees one.
 *
 * Completions are reported by event: an empty queue is armed, polled once more, and left
 * alone until its event arrives. Under load arming is delayed: an empty queue is polled
 * again for some microseconds (spin_ns), a time that grows when that finds completions
 * and shrinks when it does not, down to nothing.
 *
 * Death: ERR, then every posted request completes as flushed and is counted; after the
 * last one, the queue pair is destroyed. Only that proves that no packet in flight can
 * write local memory: a peer's flushed requests prove nothing about packets on the wire.
 * Requests not flushed after REAP_NS (a dead adapter) are given up: destroying stops the
 * adapter anyway.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define WR_LAST (UINT64_C(1) << 32)
#define WR_RECV (UINT64_C(1) << 33)
#define WR_NUMBER UINT32_MAX
#define POLL_BATCH 16
#define REAP_NS LOOP_NS_PER_S
#define SPIN_MIN_NS UINT64_C(1000)
#define SPIN_MAX_NS UINT64_C(20000)

static const struct sm_state qp_states[] = {
	[VERBS_QP_IDLE] = {"idle", SM_TO(VERBS_QP_CONNECTING) | SM_TO(VERBS_QP_DEAD)},
	[VERBS_QP_CONNECTING] = {"connecting", SM_TO(VERBS_QP_UP) | SM_TO(VERBS_QP_IDLE) |
						       SM_TO(VERBS_QP_DYING) |
						       SM_TO(VERBS_QP_DEAD)},
	[VERBS_QP_UP] = {"up", SM_TO(VERBS_QP_DYING)},
	[VERBS_QP_DYING] = {"dying", SM_TO(VERBS_QP_DEAD)},
	[VERBS_QP_DEAD] = {"dead", 0},
};

static bool qp_invariant(const struct sm *sm, unsigned int from)
{
	const struct verbs_qp *qp = container_of(sm, const struct verbs_qp, sm);

	(void)from;
	/* a dead one has nothing accounted */
	return sm_state(sm) != VERBS_QP_DEAD ||
	       (!qp->qp && qp->sent_count == 0 && qp->inflight_bytes == 0);
}

static const struct sm_table qp_table = {
	.name = "verbs queue pair",
	.states = qp_states,
	.count = ARRAY_LEN(qp_states),
	.invariant = qp_invariant,
};

static const struct verbs_lib *verbs_qp_lib_of(const struct verbs_qp *qp)
{
	return qp->peer->transport->lib;
}

/* ---- making ---- */

void verbs_qp_init(struct verbs_qp *qp, struct verbs_peer *peer, uint32_t index)
{
	qp->peer = peer;
	qp->index = index;
	list_init(&qp->active_link);
	sm_init(&qp->sm, &qp_table, VERBS_QP_IDLE);
}

static uint32_t at_most(uint32_t wanted, int limit)
{
	return limit > 0 && wanted > (uint32_t)limit ? (uint32_t)limit : wanted;
}

static int verbs_qp_recv(struct verbs_qp *qp, uint32_t buffer)
{
	struct verbs_peer *peer = qp->peer;
	struct ibv_sge sge = {
		.addr = (uint64_t)(uintptr_t)(peer->buffers +
					      (size_t)buffer * VERBS_MSG_BYTES),
		.length = VERBS_MSG_BYTES,
		.lkey = peer->buffer_mr ? peer->buffer_mr->lkey : 0,
	};
	struct ibv_recv_wr wr = {.wr_id = WR_RECV | buffer}, *bad = NULL;
	int no;

	if (qp->index == 0) {
		wr.sg_list = &sge;
		wr.num_sge = 1;
	}
	no = verbs_qp_lib_of(qp)->post_recv(qp->qp, &wr, &bad);
	if (no)
		return err_raise(ERR_TRANSPORT, "verbs: %s: post a receive: %s",
				 qp->rail->name, strerror(no));
	qp->rq_posted++;
	return 0;
}

static int verbs_qp_make_queues(struct verbs_qp *qp)
{
	const struct verbs_lib *lib = verbs_qp_lib_of(qp);
	struct verbs_device *device = qp->rail->device;
	struct ibv_qp_init_attr init = {
		.qp_context = qp,
		.qp_type = IBV_QPT_RC,
		.cap.max_recv_wr = qp->rq_depth,
		.cap.max_recv_sge = 1,
		.cap.max_send_sge = qp->max_sge,
		.cap.max_send_wr = qp->sq_depth,
		.cap.max_inline_data = VERBS_INLINE_MAX,
	};

	qp->cq = lib->create_cq(device->context, (int)(qp->sq_depth + qp->rq_depth), qp,
				device->channel, 0);
	if (!qp->cq)
		return err_raise_errno(errno, "verbs: %s: completion queue",
				       device->name);
	init.send_cq = init.recv_cq = qp->cq;
	if (lib->create_qp(qp->id, device->pd, &init) != 0) {
		init.cap.max_inline_data = 0; /* the least that every adapter can */
		if (lib->create_qp(qp->id, device->pd, &init) != 0)
			return err_raise_errno(errno, "verbs: %s: queue pair",
					       device->name);
	}
	qp->qp = qp->id->qp;
	qp->max_inline = init.cap.max_inline_data;
	return 0;
}

/* For frames; or for a mark of each slot, and for as many again for each rail that may be
 * lost (verbs_rail.c), up to the adapter's limit. */
static uint32_t receives(const struct verbs_qp *qp)
{
	const struct ibv_device_attr *attr = &qp->rail->device->attr;
	uint32_t rounds = qp->peer->transport->rail_count;

	if (qp->index == 0)
		return at_most(VERBS_DEPTH, attr->max_qp_wr);
	while (rounds > 1 &&
	       (at_most(rounds * VERBS_GRANTS, attr->max_qp_wr) < rounds * VERBS_GRANTS ||
		at_most(rounds * VERBS_GRANTS + VERBS_SQ_DEPTH, attr->max_cqe) <
			rounds * VERBS_GRANTS + VERBS_SQ_DEPTH))
		rounds--;
	return at_most(rounds * VERBS_GRANTS, attr->max_qp_wr);
}

int verbs_qp_make(struct verbs_qp *qp)
{
	const struct ibv_device_attr *attr = &qp->rail->device->attr;
	int r;

	qp->rq_depth = receives(qp);
	qp->sq_depth = at_most(VERBS_SQ_DEPTH, attr->max_qp_wr);
	qp->max_sge = at_most(qp->peer->transport->sge_max, attr->max_sge);
	if (attr->max_cqe > 0 && qp->sq_depth + qp->rq_depth > (uint32_t)attr->max_cqe)
		qp->sq_depth = (uint32_t)attr->max_cqe - qp->rq_depth;
	if (qp->rq_depth < (qp->index ? VERBS_GRANTS : VERBS_DEPTH) ||
	    qp->sq_depth < 2 * VERBS_SEND_BUFFERS)
		return err_raise(
			ERR_REQUIRE,
			"verbs: %s: send and receive queues of %u and %u requests are "
			"too short",
			qp->rail->name, qp->sq_depth, qp->rq_depth);
	qp->sq_free = qp->sq_depth;
	qp->sent = mem_calloc(qp->sq_depth, sizeof(*qp->sent));
	if (!qp->sent)
		return err_pass(-ENOMEM);
	r = qp->index == 0 ? verbs_peer_buffers(qp->peer, qp->rail->device) : 0;
	if (r == 0)
		r = verbs_qp_make_queues(qp);
	while (r == 0 && qp->rq_posted < qp->rq_depth) /* marks' have no buffer */
		r = verbs_qp_recv(qp, qp->rq_posted);
	if (r == 0 && verbs_qp_lib_of(qp)->req_notify_cq(qp->cq, 0) != 0)
		r = err_raise_errno(errno, "verbs: %s: arm", qp->rail->name);
	qp->armed = true;
	return err_pass(r);
}

void verbs_qp_up(struct verbs_qp *qp)
{
	sm_move(&qp->sm, VERBS_QP_UP);
	qp->peer->qps_up++;
}

/* ---- unmaking ---- */

static void destroy(struct verbs_qp *qp)
{
	const struct verbs_lib *lib = verbs_qp_lib_of(qp);

	list_remove(&qp->active_link);
	if (qp->qp)
		lib->destroy_qp(qp->id);
	qp->qp = NULL;
	if (qp->cq)
		lib->destroy_cq(qp->cq);
	qp->cq = NULL;
	if (qp->id && sm_state(&qp->sm) == VERBS_QP_DYING)
		verbs_linger(qp->peer->transport, qp->id);
	else if (qp->id)
		lib->destroy_id(qp->id);
	qp->id = NULL;
	qp->rq_posted = 0;
}

/* For requests that will not complete. */
static void verbs_qp_give_back(struct verbs_qp *qp, struct verbs_sent *entry, bool good)
{
	struct verbs_peer *peer = qp->peer;
	struct verbs_xfer *xfer = entry->xfer;

	qp->sq_free += entry->wrs;
	entry->wrs = 0;
	if (entry->buffer >= 0)
		peer->send_free |= 1u << entry->buffer;
	if (!xfer)
		return;
	if (entry->slice)
		verbs_pack_sent(entry->slice);
	qp->inflight_bytes -= entry->bytes;
	peer->inflight_bytes -= entry->bytes;
	if (good) {
		xfer->done_bytes += entry->bytes;
		peer->rate_bytes += entry->bytes;
		net_xfer_moved(&xfer->net, xfer->done_bytes, 0);
	} else if (entry->bytes && entry->begin < xfer->rewind) {
		xfer->rewind = entry->begin;
	}
	xfer->busy--;
	net_xfer_check(&xfer->net);
}

static void pop_sent(struct verbs_qp *qp, bool good)
{
	struct verbs_sent *entry = &qp->sent[qp->sent_head];

	qp->sent_head = (qp->sent_head + 1) % qp->sq_depth;
	qp->sent_count--;
	verbs_qp_give_back(qp, entry, good);
}

static void forget_sent(struct verbs_qp *qp)
{
	while (qp->sent_count)
		pop_sent(qp, false);
	mem_free(qp->sent);
	qp->sent = NULL;
}

void verbs_qp_reset(struct verbs_qp *qp)
{
	destroy(qp);
	forget_sent(qp);
	sm_move(&qp->sm, VERBS_QP_IDLE);
}

void verbs_qp_kill(struct verbs_qp *qp)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

	switch (sm_state(&qp->sm)) {
	case VERBS_QP_CONNECTING:
	case VERBS_QP_UP:
		break;
	case VERBS_QP_IDLE:
		sm_move(&qp->sm, VERBS_QP_DEAD);
		return;
	default:
		return;
	}
	sm_move(&qp->sm, VERBS_QP_DYING);
	qp->die_deadline_ns = loop_now_ns(qp->peer->net.timer.loop) + REAP_NS;
	if (!qp->qp) { /* no queues yet: nothing to wait for */
		verbs_qp_reap(qp);
		return;
	}
	verbs_qp_lib_of(qp)->disconnect(
		qp->id); /* notifies the other side; a failure is harmless */
	verbs_qp_lib_of(qp)->modify_qp(qp->qp, &attr, IBV_QP_STATE);
	verbs_qp_activate(qp);
	net_peer_watch(&qp->peer->net, qp->die_deadline_ns);
}

void verbs_qp_reap(struct verbs_qp *qp)
{
	if (sm_state(&qp->sm) != VERBS_QP_DYING)
		return;
	if (qp->sent_count || qp->rq_posted)
		log_debug("verbs", qp->peer->net.name, "destroyed unflushed",
			  "qp=%u wrs=%u recvs=%u", qp->index, qp->sq_depth - qp->sq_free,
			  qp->rq_posted);
	destroy(qp);
	forget_sent(qp);
	sm_move(&qp->sm, VERBS_QP_DEAD);
	net_peer_kick(&qp->peer->net);
}

/* ---- posting ---- */

static void broken(struct verbs_qp *qp, const char *what, int no)
{
	struct err err;

	err_set(&err, ERR_TRANSPORT, "verbs: %s to %s, queue pair %u: %s: %s",
		qp->rail->name, qp->peer->net.name, qp->index, what, strerror(no));
	net_peer_fail(&qp->peer->net, &err);
}

int verbs_qp_post(struct verbs_qp *qp, struct ibv_send_wr *first, uint32_t count,
		  const struct verbs_sent *entry)
{
	uint32_t number = (qp->sent_head + qp->sent_count) % qp->sq_depth;
	struct ibv_send_wr *bad = NULL, *wr = first;
	int no;

	assert(count && count <= qp->sq_free && qp->sent_count < qp->sq_depth);
	for (; wr->next; wr = wr->next)
		wr->wr_id = number;
	wr->wr_id = number | WR_LAST;
	wr->send_flags |= IBV_SEND_SIGNALED;
	no = verbs_qp_lib_of(qp)->post_send(qp->qp, first, &bad);
	if (no) {
		/* part of the chain may be posted, but not its signalled end: the account
		 * of the whole chain stays until the queue pair ends, which accepts no
		 * other request */
		broken(qp, "post", no);
		verbs_qp_kill(qp);
		if (bad == first)
			return err_raise(ERR_TRANSPORT, "verbs: post: %s", strerror(no));
	}
	qp->sent[number] = *entry;
	qp->sent[number].wrs = count;
	qp->sent_count++;
	qp->sq_free -= count;
	if (entry->xfer) {
		entry->xfer->busy++;
		qp->inflight_bytes += entry->bytes;
		qp->peer->inflight_bytes += entry->bytes;
	}
	return 0;
}

void verbs_qp_knock(struct verbs_qp *qp)
{
	struct ibv_send_wr wr = {.opcode = IBV_WR_RDMA_WRITE};
	struct verbs_sent entry = {.buffer = -1};

	if (sm_state(&qp->sm) == VERBS_QP_UP && qp->sent_count == 0 &&
	    verbs_qp_post(qp, &wr, 1, &entry) < 0)
		err_clear(); /* the peer has failed, with its own reason */
}

/* ---- completions ---- */

static void on_failed(struct verbs_qp *qp, const struct ibv_wc *wc)
{
	struct err err;

	if (sm_state(&qp->sm) == VERBS_QP_DYING)
		return; /* our own doing */
	if (verbs_wc_err(qp, wc, &err))
		verbs_rail_fail(qp, &err);
	else
		net_peer_fail(&qp->peer->net, &err);
}

static void verbs_qp_on_sent(struct verbs_qp *qp, const struct ibv_wc *wc)
{
	uint32_t number = (uint32_t)(wc->wr_id & WR_NUMBER);
	struct verbs_sent *entry;

	assert(qp->sent_count && number < qp->sq_depth);
	if (wc->status != IBV_WC_SUCCESS)
		on_failed(qp, wc);
	if (wc->wr_id & WR_LAST) {
		assert(number == qp->sent_head);
		pop_sent(qp, wc->status == IBV_WC_SUCCESS);
		return;
	}
	/* not signalled, so it failed: those before it in its chain are over too,
	 * and are given back with the last one */
	entry = &qp->sent[number];
	assert(entry->wrs > 1);
	entry->wrs--;
	qp->sq_free++;
}

/* Back in the queue before its credit, or its slot, is given. */
static void verbs_qp_again(struct verbs_qp *qp, uint32_t buffer)
{
	if (verbs_qp_recv(qp, buffer) < 0)
		net_peer_fail_last(&qp->peer->net);
}

static void on_received(struct verbs_qp *qp, const struct ibv_wc *wc)
{
	uint32_t buffer = (uint32_t)(wc->wr_id & WR_NUMBER);
	struct verbs_peer *peer = qp->peer;
	struct verbs_mark mark;

	qp->rq_posted--;
	if (wc->status != IBV_WC_SUCCESS) {
		on_failed(qp, wc);
		return;
	}
	if (sm_state(&qp->sm) == VERBS_QP_DYING)
		return; /* a mark received before a rail was lost is received again */
	if (qp->index == 0 && wc->opcode == IBV_WC_RECV) {
		verbs_frame_in(peer, buffer, wc->byte_len);
		verbs_qp_again(qp, buffer);
		return;
	}
	verbs_qp_again(qp, buffer);
	if (qp->index == 0 || wc->opcode != IBV_WC_RECV_RDMA_WITH_IMM) {
		err_raise(ERR_PROTO, "verbs: a message of kind %d on queue pair %u",
			  (int)wc->opcode, qp->index);
		net_peer_fail_last(&peer->net);
		return;
	}
	verbs_mark_get(ntohl(wc->imm_data), &mark);
	if (verbs_xfer_mark(peer, qp, &mark) < 0)
		net_peer_fail_last(&peer->net);
}

void verbs_qp_activate(struct verbs_qp *qp)
{
	list_remove(&qp->active_link);
	list_push_back(&qp->peer->transport->active, &qp->active_link);
}

static bool flushed(const struct verbs_qp *qp)
{
	return sm_state(&qp->sm) == VERBS_QP_DYING && qp->sent_count == 0 &&
	       qp->rq_posted == 0;
}

static unsigned int verbs_qp_drain(struct verbs_qp *qp, unsigned int budget)
{
	struct verbs_transport *transport = qp->peer->transport;
	struct ibv_wc wc[POLL_BATCH];
	unsigned int done = 0;

	while (done < budget) {
		int n = transport->lib->poll_cq(qp->cq, POLL_BATCH, wc);

		if (n <= 0)
			break;
		for (int i = 0; i < n; i++) {
			if (wc[i].wr_id & WR_RECV)
				on_received(qp, &wc[i]);
			else
				verbs_qp_on_sent(qp, &wc[i]);
		}
		done += (unsigned int)n;
		if (n < POLL_BATCH)
			break;
	}
	return done;
}

/* An empty queue found something while it was watched without an event, or not. */
static void spin_learn(struct verbs_transport *transport, bool found)
{
	if (found)
		transport->spin_ns =
			transport->spin_ns ? transport->spin_ns * 2 : SPIN_MIN_NS;
	else
		transport->spin_ns =
			transport->spin_ns > SPIN_MIN_NS ? transport->spin_ns / 2 : 0;
	if (transport->spin_ns > SPIN_MAX_NS)
		transport->spin_ns = SPIN_MAX_NS;
}

/* Empty: arm it, poll once more, wait for its event. */
static unsigned int sleep_or_work(struct verbs_qp *qp, unsigned int budget)
{
	struct verbs_transport *transport = qp->peer->transport;
	unsigned int done = 0;

	if (!qp->armed) {
		if (loop_clock_ns(transport->net.base.env.loop) <
		    transport->spin_until_ns) {
			qp->spinning = true;
			return 0; /* stays active */
		}
		if (transport->lib->req_notify_cq(qp->cq, 0) != 0) {
			broken(qp, "arm", errno);
			return 0;
		}
		qp->armed = true;
		done = verbs_qp_drain(qp, budget);
		if (qp->spinning || done)
			spin_learn(transport, !qp->spinning);
		qp->spinning = false;
	}
	if (!done)
		list_remove(&qp->active_link);
	return done;
}

unsigned int verbs_qp_poll(struct verbs_qp *qp, unsigned int budget)
{
	struct verbs_transport *transport = qp->peer->transport;
	bool lives =
		sm_state(&qp->sm) == VERBS_QP_UP || sm_state(&qp->sm) == VERBS_QP_DYING;
	unsigned int done;

	if (!lives) { /* it is polled again when it is up */
		list_remove(&qp->active_link);
		return 0;
	}
	done = verbs_qp_drain(qp, budget);
	if (done && qp->spinning) {
		spin_learn(transport, true);
		qp->spinning = false;
	}
	if (!done && !flushed(qp))
		done = sleep_or_work(qp, budget);
	if (done) {
		transport->spin_until_ns =
			loop_clock_ns(transport->net.base.env.loop) + transport->spin_ns;
		net_peer_kick(&qp->peer->net);
	}
	if (flushed(qp))
		verbs_qp_reap(qp);
	return done;
}

void verbs_on_cq(struct loop_fd *watch, int events)
{
	struct verbs_device *device = container_of(watch, struct verbs_device, cq_watch);
	const struct verbs_lib *lib = device->transport->lib;
	struct ibv_cq *cq;
	void *owner;

	(void)events;
	while (lib->get_cq_event(device->channel, &cq, &owner) == 0) {
		struct verbs_qp *qp = owner;

		lib->ack_cq_events(cq, 1);
		qp->armed = false;
		verbs_qp_activate(qp);
	}
}
