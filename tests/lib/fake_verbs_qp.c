/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The queues of fake_verbs: queue pairs, completions, and what requests do.
 *
 * A queue pair's requests run one at a time, in order, each whole. Between queue
 * pairs they take turns, so nothing can be read from the order in which two of them
 * finish. A request that fails puts its queue pair into state ERR: what is behind it
 * and what is in the receive queue is flushed, as an adapter does it; the other end
 * of a remote access error hears of it by an asynchronous event. A WRITE that is flushed
 * may be on the wire already (fake_verbs_keep_late): it arrives unless the queue pair
 * that it is for has died.
 *
 * What a user of the verbs must never do ends the test: a queue that overruns, a
 * request with more segments than its queue pair takes, a receive too short for its
 * message.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/lib/fake_verbs.h"
#include "tests/lib/fake_verbs_impl.h"

#define TICK_NS LOOP_NS_PER_MS

/* ---- completions ---- */

static bool step(uint64_t *bytes_p);

static struct ibv_comp_channel *create_comp_channel(struct ibv_context *context)
{
	struct fake_completions *channel;

	if (fake_strike_raw())
		return NULL;
	channel = fake_make(sizeof(*channel));
	channel->channel.context = context;
	channel->channel.fd = fake_eventfd();
	list_init(&channel->cqs);
	fabric.channels++;
	return &channel->channel;
}

static int destroy_comp_channel(struct ibv_comp_channel *base)
{
	struct fake_completions *channel = (struct fake_completions *)base;

	if (channel->refs)
		fake_broken("a completion channel goes before its queues");
	close(base->fd);
	free(channel);
	fabric.channels--;
	return 0;
}

static struct ibv_cq *create_cq(struct ibv_context *context, int cqe, void *owner,
				struct ibv_comp_channel *channel, int vector)
{
	struct fake_cq *cq;

	(void)vector;
	if (fake_strike_raw())
		return NULL;
	cq = fake_make(sizeof(*cq));
	if (cqe > fabric.rules.max_cqe)
		fake_broken("a completion queue of %d", cqe);
	cq->cq = (struct ibv_cq){
		.context = context, .channel = channel, .cq_context = owner, .cqe = cqe};
	cq->ring = fake_make(sizeof(*cq->ring) * (size_t)cqe);
	list_init(&cq->event_link);
	((struct fake_completions *)channel)->refs++;
	fabric.cqs++;
	return &cq->cq;
}

static int destroy_cq(struct ibv_cq *base)
{
	struct fake_cq *cq = (struct fake_cq *)base;

	((struct fake_completions *)base->channel)->refs--;
	list_remove(&cq->event_link);
	free(cq->ring);
	free(cq);
	fabric.cqs--;
	return 0;
}

static int get_cq_event(struct ibv_comp_channel *base, struct ibv_cq **cq_p,
			void **owner_p)
{
	struct fake_completions *channel = (struct fake_completions *)base;
	struct list *link = list_pop_front(&channel->cqs);

	if (!link) {
		fake_lower(base->fd);
		errno = EAGAIN;
		return -1;
	}
	*cq_p = &list_entry(link, struct fake_cq, event_link)->cq;
	*owner_p = (*cq_p)->cq_context;
	return 0;
}

static void ack_cq_events(struct ibv_cq *cq, unsigned int count)
{
	(void)cq;
	(void)count;
}

static int req_notify_cq(struct ibv_cq *base, int solicited_only)
{
	(void)solicited_only;
	if (((struct fake_cq *)base)->of_raw && fake_strike_raw())
		return ENOMEM;
	((struct fake_cq *)base)->armed = true; /* what is there already gives none */
	return 0;
}

static int poll_cq(struct ibv_cq *base, int count, struct ibv_wc *wc)
{
	struct fake_cq *cq = (struct fake_cq *)base;
	int n = 0;

	for (; n < count && cq->count; n++) {
		struct fake_wc *at = &cq->ring[cq->head];

		wc[n] = at->wc;
		if (at->qp)
			at->qp->send_used -= at->wrs;
		cq->head = (cq->head + 1) % (unsigned int)cq->cq.cqe;
		cq->count--;
	}
	return n;
}

static void complete(struct fake_qp *qp, struct ibv_cq *base, const struct ibv_wc *wc,
		     unsigned int wrs)
{
	struct fake_cq *cq = (struct fake_cq *)base;
	struct fake_completions *channel = (struct fake_completions *)cq->cq.channel;

	if (cq->count == (unsigned int)cq->cq.cqe)
		fake_broken("a completion queue overruns");
	cq->ring[(cq->head + cq->count++) % (unsigned int)cq->cq.cqe] =
		(struct fake_wc){.wc = *wc, .qp = qp, .wrs = wrs};
	if (!cq->armed)
		return;
	cq->armed = false;
	if (list_empty(&cq->event_link))
		list_push_back(&channel->cqs, &cq->event_link);
	fake_raise(channel->channel.fd);
}

/* ---- the wire's memory ---- */

static uint64_t wr_bytes(const struct fake_wr *at)
{
	uint64_t bytes = 0;

	for (int i = 0; i < at->wr.num_sge; i++)
		bytes += at->sge[i].length;
	return bytes;
}

static void gather(const struct fake_device *device, const struct fake_wr *at,
		   uint8_t *to)
{
	const uint8_t *inline_at = at->data;

	for (int i = 0; i < at->wr.num_sge; i++) {
		if (at->is_inline)
			memcpy(to, inline_at, at->sge[i].length);
		else
			fake_gpu_load(device, at->sge[i].lkey, at->sge[i].addr, to,
				      at->sge[i].length);
		to += at->sge[i].length;
		inline_at += at->sge[i].length;
	}
}

/* Nothing of it arrives there any more. */
static void late_lose(const struct fake_qp *to)
{
	struct fake_adrift *late;

	list_foreach(late, &fabric.adrift, link)
		if (late->to == to)
			late->to = NULL;
}

static void late_keep(const struct fake_qp *qp, const struct fake_wr *at)
{
	uint64_t bytes = wr_bytes(at);
	struct fake_adrift *late;

	if (!fabric.keep_late || !qp->remote || !bytes ||
	    at->wr.opcode != IBV_WR_RDMA_WRITE)
		return;
	late = fake_make(sizeof(*late) + bytes);
	*late = (struct fake_adrift){
		.to = qp->remote,
		.address = at->wr.wr.rdma.remote_addr,
		.key = at->wr.wr.rdma.rkey,
		.bytes = bytes,
	};
	gather(fake_device_at(qp->qp.context), at, late->data);
	list_push_back(&fabric.adrift, &late->link);
}

unsigned int fake_verbs_late(void)
{
	struct list *link;
	unsigned int n = 0;

	while ((link = list_pop_front(&fabric.adrift))) {
		struct fake_adrift *late = list_entry(link, struct fake_adrift, link);

		if (late->to && late->to->up &&
		    fake_allowed(late->to, late->address, late->bytes, late->key, true,
				 IBV_ACCESS_REMOTE_WRITE)) {
			memcpy((void *)(uintptr_t)late->address, late->data, late->bytes);
			n++;
		}
		free(late);
	}
	return n;
}

void fake_verbs_keep_late(bool keep)
{
	fabric.keep_late = keep;
}

/* ---- queue pairs ---- */

void fake_verbs_strike(unsigned int n)
{
	atomic_store(&fabric.strike, n);
}

bool fake_strike_raw(void)
{
	unsigned int left = atomic_load(&fabric.strike);

	if (!left)
		return false;
	atomic_store(&fabric.strike, left - 1);
	errno = ENOMEM;
	return left == 1;
}

void fake_verbs_fail_loopback(unsigned int device, enum ibv_wc_status status)
{
	fabric.devices[device].fail_loopback = status;
}

void fake_verbs_stall_loopback(bool stall)
{
	uint64_t bytes;

	fabric.stall_loopback = stall;
	while (!fabric.hold && !fabric.slow && step(&bytes))
		continue;
}

static struct ibv_qp *make_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp *qp;

	if (fake_strike_raw() || fake_qp_make(pd->context, pd, attr, &qp) != 0)
		return NULL;
	qp->state = IBV_QPS_RESET;
	((struct fake_cq *)attr->send_cq)->of_raw = true;
	return qp;
}

void fake_verbs_free_wait(bool wait)
{
	pthread_mutex_lock(&fabric.lock);
	fabric.free_wait = wait;
	pthread_cond_broadcast(&fabric.go);
	pthread_mutex_unlock(&fabric.lock);
}

unsigned int fake_verbs_free_waiting(void)
{
	unsigned int n;

	pthread_mutex_lock(&fabric.lock);
	n = fabric.free_waiting;
	pthread_mutex_unlock(&fabric.lock);
	return n;
}

static int free_qp(struct ibv_qp *qp)
{
	pthread_mutex_lock(&fabric.lock);
	fabric.free_waiting++;
	while (fabric.free_wait)
		pthread_cond_wait(&fabric.go, &fabric.lock);
	fabric.free_waiting--;
	pthread_mutex_unlock(&fabric.lock);
	fake_qp_free(qp);
	return 0;
}

static enum ibv_qp_state before(enum ibv_qp_state state)
{
	return state == IBV_QPS_INIT  ? IBV_QPS_RESET
	       : state == IBV_QPS_RTR ? IBV_QPS_INIT
				      : IBV_QPS_RTR;
}

/* The steps to itself, each with all that it takes. */
static int step_raw(struct fake_qp *qp, const struct ibv_qp_attr *attr, int mask)
{
	struct fake_device *device = fake_device_at(qp->qp.context);

	if (fake_strike_raw())
		return ENOMEM;
	if (qp->qp.state != before(attr->qp_state))
		fake_broken("modify_qp from state %d to %d", (int)qp->qp.state,
			    (int)attr->qp_state);
	if (attr->qp_state == IBV_QPS_INIT && mask != (IBV_QP_STATE | IBV_QP_PKEY_INDEX |
						       IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
		return EINVAL;
	if (attr->qp_state == IBV_QPS_INIT &&
	    !(attr->qp_access_flags & IBV_ACCESS_REMOTE_READ))
		fake_broken("a queue pair that may not be read");
	if (attr->qp_state == IBV_QPS_RTR) {
		if (mask !=
		    (IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
		     IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
			return EINVAL;
		if (attr->dest_qp_num != qp->qp.qp_num || !attr->ah_attr.is_global ||
		    memcmp(attr->ah_attr.grh.dgid.raw + 12, &device->address, 4) != 0 ||
		    attr->ah_attr.grh.sgid_index != 1) /* RoCE v2 */
			fake_broken("a loop-back to somewhere else");
		qp->remote = qp;
	}
	qp->up = attr->qp_state == IBV_QPS_RTS;
	qp->qp.state = attr->qp_state;
	return 0;
}

int fake_qp_make(struct ibv_context *base, struct ibv_pd *pd,
		 struct ibv_qp_init_attr *attr, struct ibv_qp **qp_p)
{
	struct fake_context *context = (struct fake_context *)base;
	const struct fake_verbs_rules *rules = &fabric.rules;
	struct fake_qp *qp;

	if ((int)attr->cap.max_send_wr > rules->max_qp_wr ||
	    (int)attr->cap.max_recv_wr > rules->max_qp_wr ||
	    (int)attr->cap.max_send_sge > rules->max_sge ||
	    attr->cap.max_inline_data > rules->inline_bytes) {
		errno = EINVAL;
		return -1;
	}
	qp = fake_make(sizeof(*qp));
	qp->qp = (struct ibv_qp){
		.context = base,
		.qp_context = attr->qp_context,
		.pd = pd,
		.send_cq = attr->send_cq,
		.recv_cq = attr->recv_cq,
		.qp_num = ++fabric.next_number,
		.state = IBV_QPS_INIT,
		.qp_type = attr->qp_type,
	};
	qp->cap = attr->cap;
	qp->sends = fake_make(sizeof(*qp->sends) * attr->cap.max_send_wr);
	qp->recvs = fake_make(sizeof(*qp->recvs) * attr->cap.max_recv_wr);
	list_init(&qp->wire_link);
	pthread_mutex_lock(&fabric.lock);
	list_push_back(&context->qps, &qp->context_link);
	pthread_mutex_unlock(&fabric.lock);
	fabric.qps++;
	*qp_p = &qp->qp;
	return 0;
}

/* Its completions vanish with it; events of it that were not taken, too. */
void fake_qp_free(struct ibv_qp *base)
{
	struct fake_qp *qp = (struct fake_qp *)base;
	struct fake_context *context = (struct fake_context *)base->context;
	struct fake_cq *cq = (struct fake_cq *)base->send_cq;
	struct fake_async *async;

	list_foreach_safe(async, &context->events, link) {
		if (!fake_is_of_qp(async->event.event_type) ||
		    async->event.element.qp != base)
			continue;
		list_remove(&async->link);
		free(async);
	}
	for (unsigned int i = 0; i < cq->count; i++)
		cq->ring[(cq->head + i) % (unsigned int)cq->cq.cqe].qp = NULL;
	late_lose(qp);
	if (qp->remote)
		qp->remote->remote = NULL;
	list_remove(&qp->wire_link);
	pthread_mutex_lock(&fabric.lock);
	list_remove(&qp->context_link);
	pthread_mutex_unlock(&fabric.lock);
	free(qp->sends);
	free(qp->recvs);
	free(qp);
	fabric.qps--;
}

void fake_qp_join(struct ibv_qp *a, struct ibv_qp *b)
{
	struct fake_qp *left = (struct fake_qp *)a, *right = (struct fake_qp *)b;

	left->remote = right;
	right->remote = left;
	left->up = right->up = true;
	a->state = b->state = IBV_QPS_RTS;
}

static void flush_recvs(struct fake_qp *qp)
{
	while (qp->recv_count) {
		struct fake_recv *recv = &qp->recvs[qp->recv_head];
		struct ibv_wc wc = {.wr_id = recv->wr_id, .status = IBV_WC_WR_FLUSH_ERR};

		qp->recv_head = (qp->recv_head + 1) % qp->cap.max_recv_wr;
		qp->recv_count--;
		complete(NULL, qp->qp.recv_cq, &wc, 0);
	}
}

static void send_end(struct fake_qp *qp, enum ibv_wc_status status, uint32_t bytes)
{
	struct fake_wr *at = &qp->sends[qp->send_head];
	struct ibv_wc wc = {
		.wr_id = at->wr.wr_id,
		.status = status,
		.byte_len = bytes,
		.qp_num = qp->qp.qp_num,
		.opcode = at->wr.opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ
			  : at->wr.opcode == IBV_WR_SEND    ? IBV_WC_SEND
							    : IBV_WC_RDMA_WRITE,
	};

	qp->send_head = (qp->send_head + 1) % qp->cap.max_send_wr;
	qp->send_count--;
	qp->unsignalled++;
	if (status == IBV_WC_SUCCESS && !(at->wr.send_flags & IBV_SEND_SIGNALED))
		return;
	complete(qp, qp->qp.send_cq, &wc, qp->unsignalled);
	qp->unsignalled = 0;
}

void fake_qp_error(struct fake_qp *qp)
{
	if (qp->qp.state == IBV_QPS_ERR)
		return;
	qp->qp.state = IBV_QPS_ERR;
	qp->up = false;
	late_lose(qp);
	for (unsigned int i = 0; i < qp->send_count; i++)
		late_keep(qp, &qp->sends[(qp->send_head + i) % qp->cap.max_send_wr]);
	while (qp->send_count)
		send_end(qp, IBV_WC_WR_FLUSH_ERR, 0);
	flush_recvs(qp);
	list_remove(&qp->wire_link);
}

static int modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	if (attr->qp_state == IBV_QPS_INIT || attr->qp_state == IBV_QPS_RTR ||
	    attr->qp_state == IBV_QPS_RTS)
		return step_raw((struct fake_qp *)qp, attr, mask);
	if (mask != IBV_QP_STATE || attr->qp_state != IBV_QPS_ERR)
		fake_broken("modify_qp to state %d", (int)attr->qp_state);
	fake_qp_error((struct fake_qp *)qp);
	return 0;
}

/* ---- what requests do ---- */

static bool sges_allowed(const struct fake_qp *qp, const struct fake_wr *at, int access)
{
	for (int i = 0; i < at->wr.num_sge && !at->is_inline; i++)
		if (!fake_allowed(qp, at->sge[i].addr, at->sge[i].length, at->sge[i].lkey,
				  false, access))
			return false;
	return true;
}

static void scatter(const struct fake_device *device, const struct fake_wr *at,
		    const uint8_t *from)
{
	for (int i = 0; i < at->wr.num_sge; i++) {
		fake_gpu_store(device, at->sge[i].lkey, at->sge[i].addr, from,
			       at->sge[i].length);
		from += at->sge[i].length;
	}
}

/* Takes a receive of the other side and completes it; false: there is none. */
static bool receive(struct fake_qp *from, const struct fake_wr *at, uint64_t bytes)
{
	struct fake_qp *to = from->remote;
	bool is_send = at->wr.opcode == IBV_WR_SEND;
	struct fake_recv recv;
	struct ibv_wc wc = {
		.opcode = is_send ? IBV_WC_RECV : IBV_WC_RECV_RDMA_WITH_IMM,
		.byte_len = (uint32_t)bytes,
		.imm_data = at->wr.imm_data,
		.wc_flags = is_send ? 0 : IBV_WC_WITH_IMM,
		.qp_num = to->qp.qp_num,
	};

	if (!to->recv_count)
		return false;
	recv = to->recvs[to->recv_head];
	to->recv_head = (to->recv_head + 1) % to->cap.max_recv_wr;
	to->recv_count--;
	wc.wr_id = recv.wr_id;
	if (is_send && (!recv.has_sge || recv.sge.length < bytes))
		fake_broken("a message of %llu bytes into a receive of %u",
			    (unsigned long long)bytes,
			    recv.has_sge ? recv.sge.length : 0);
	if (is_send)
		gather(fake_device_at(from->qp.context), at,
		       (uint8_t *)(uintptr_t)recv.sge.addr);
	complete(NULL, to->qp.recv_cq, &wc, 0);
	return true;
}

static enum ibv_wc_status one_sided(struct fake_qp *qp, struct fake_wr *at,
				    uint64_t bytes)
{
	const struct fake_device *near = fake_device_at(qp->qp.context);
	const struct fake_device *far = fake_device_at(qp->remote->qp.context);
	bool read = at->wr.opcode == IBV_WR_RDMA_READ;
	uint32_t rkey = at->wr.wr.rdma.rkey;
	uint64_t there = at->wr.wr.rdma.remote_addr;
	uint8_t *bounce;

	if (!sges_allowed(qp, at, read ? IBV_ACCESS_LOCAL_WRITE : 0))
		return IBV_WC_LOC_PROT_ERR;
	if (bytes &&
	    !fake_allowed(qp->remote, there, bytes, rkey, true,
			  read ? IBV_ACCESS_REMOTE_READ : IBV_ACCESS_REMOTE_WRITE)) {
		fake_async_qp(qp->remote, IBV_EVENT_QP_ACCESS_ERR);
		fake_qp_error(qp->remote);
		return IBV_WC_REM_ACCESS_ERR;
	}
	bounce = bytes ? fake_make(bytes) : NULL;
	if (bytes && read) {
		fake_gpu_load(far, rkey, there, bounce, bytes);
		scatter(near, at, bounce);
	} else if (bytes) {
		gather(near, at, bounce);
		fake_gpu_store(far, rkey, there, bounce, bytes);
	}
	free(bounce);
	fabric.count.bytes += bytes;
	if (at->wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM && !receive(qp, at, bytes))
		return IBV_WC_RNR_RETRY_EXC_ERR;
	return IBV_WC_SUCCESS;
}

static enum ibv_wc_status run(struct fake_qp *qp, struct fake_wr *at, uint64_t bytes)
{
	struct fake_device *device = fake_device_at(qp->qp.context);
	enum ibv_wc_status status = device->fail_next;

	if (qp->remote == qp && status == IBV_WC_SUCCESS) {
		status = device->fail_loopback;
		device->fail_loopback = IBV_WC_SUCCESS;
	}
	device->fail_next = IBV_WC_SUCCESS;
	if (status != IBV_WC_SUCCESS)
		return status;
	if (!qp->remote || !qp->remote->up || device->down ||
	    fake_device_at(qp->remote->qp.context)->down)
		return IBV_WC_RETRY_EXC_ERR;
	if (at->wr.opcode != IBV_WR_SEND)
		status = one_sided(qp, at, bytes);
	else if (!sges_allowed(qp, at, 0))
		status = IBV_WC_LOC_PROT_ERR;
	else if (!receive(qp, at, bytes))
		status = IBV_WC_RNR_RETRY_EXC_ERR;
	if (device->unconfirm_next != IBV_WC_SUCCESS && status == IBV_WC_SUCCESS)
		status = device->unconfirm_next;
	device->unconfirm_next = IBV_WC_SUCCESS;
	return status;
}

static struct fake_qp *whose_turn(void)
{
	struct fake_qp *qp;

	list_foreach(qp, &fabric.wire, wire_link)
		if (&qp->qp != fabric.stalled &&
		    (qp->remote != qp || !fabric.stall_loopback))
			return qp;
	return NULL;
}

/* One request of whose turn it is; its bytes in *bytes_p. */
static bool step(uint64_t *bytes_p)
{
	struct fake_qp *qp = whose_turn();
	enum ibv_wc_status status;
	struct fake_wr *at;

	if (!qp)
		return false;
	list_remove(&qp->wire_link);
	at = &qp->sends[qp->send_head];
	*bytes_p = wr_bytes(at);
	status = run(qp, at, *bytes_p);
	if (status == IBV_WC_RETRY_EXC_ERR)
		late_keep(qp, at);
	send_end(qp, status, (uint32_t)*bytes_p);
	if (status != IBV_WC_SUCCESS)
		fake_qp_error(qp);
	else if (qp->send_count)
		list_push_back(&fabric.wire, &qp->wire_link);
	return true;
}

/* ---- posting ---- */

static void copy_in(struct fake_qp *qp, const struct ibv_send_wr *wr)
{
	struct fake_wr *at =
		&qp->sends[(qp->send_head + qp->send_count) % qp->cap.max_send_wr];
	uint8_t *to = at->data;

	at->wr = *wr;
	at->is_inline = wr->send_flags & IBV_SEND_INLINE;
	if (wr->num_sge)
		memcpy(at->sge, wr->sg_list, sizeof(*at->sge) * (size_t)wr->num_sge);
	if (at->is_inline && wr_bytes(at) > qp->cap.max_inline_data)
		fake_broken("inline data of %llu bytes",
			    (unsigned long long)wr_bytes(at));
	for (int i = 0; i < wr->num_sge && at->is_inline; i++) {
		memcpy(to, (const void *)(uintptr_t)at->sge[i].addr, at->sge[i].length);
		to += at->sge[i].length;
	}
	qp->send_count++;
	qp->send_used++;
}

static void count_wr(const struct ibv_send_wr *wr)
{
	struct fake_verbs_count *count = &fabric.count;

	count->wrs++;
	count->sges += (uint64_t)wr->num_sge;
	count->reads += wr->opcode == IBV_WR_RDMA_READ;
	/* not those without bytes, which ask whether the peer lives */
	count->writes += wr->num_sge && wr->opcode == IBV_WR_RDMA_WRITE;
	count->imms += wr->opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
	count->moves += wr->num_sge && wr->opcode != IBV_WR_SEND;
	count->inlined += (wr->send_flags & IBV_SEND_INLINE) != 0;
	if ((unsigned int)wr->num_sge > count->sges_most)
		count->sges_most = (unsigned int)wr->num_sge;
}

static int post_send(struct ibv_qp *base, struct ibv_send_wr *wr,
		     struct ibv_send_wr **bad)
{
	struct fake_qp *qp = (struct fake_qp *)base;
	unsigned int posted = 0;
	uint64_t bytes;

	fabric.count.doorbells++;
	*bad = wr;
	if (qp->remote == qp && fake_strike_raw())
		return ENOMEM;
	for (; wr; wr = wr->next, posted++) {
		*bad = wr;
		if (posted && fabric.rules.post_errno) {
			fabric.rules.post_errno = 0;
			return ENOMEM;
		}
		if (qp->send_used == qp->cap.max_send_wr)
			fake_broken("a send queue overruns");
		if ((unsigned int)wr->num_sge > qp->cap.max_send_sge)
			fake_broken("%d segments", wr->num_sge);
		if (qp->qp.state == IBV_QPS_INIT)
			return EINVAL;
		copy_in(qp, wr);
		count_wr(wr);
		if (qp->qp.state == IBV_QPS_ERR)
			send_end(qp, IBV_WC_WR_FLUSH_ERR, 0);
	}
	if (qp->send_count && list_empty(&qp->wire_link))
		list_push_back(&fabric.wire, &qp->wire_link);
	while (!fabric.hold && !fabric.slow && step(&bytes))
		continue;
	return 0;
}

static int post_recv(struct ibv_qp *base, struct ibv_recv_wr *wr,
		     struct ibv_recv_wr **bad)
{
	struct fake_qp *qp = (struct fake_qp *)base;
	struct fake_recv *at =
		&qp->recvs[(qp->recv_head + qp->recv_count) % qp->cap.max_recv_wr];

	*bad = wr;
	if (qp->recv_count == qp->cap.max_recv_wr)
		fake_broken("a receive queue overruns");
	*at = (struct fake_recv){.wr_id = wr->wr_id, .has_sge = wr->num_sge == 1};
	if (at->has_sge) {
		at->sge = wr->sg_list[0];
		if (!fake_allowed(qp, at->sge.addr, at->sge.length, at->sge.lkey, false,
				  IBV_ACCESS_LOCAL_WRITE))
			fake_broken("a receive outside registered memory");
	}
	qp->recv_count++;
	if (qp->qp.state == IBV_QPS_ERR)
		flush_recvs(qp);
	return 0;
}

/* ---- the wire ---- */

void fake_verbs_hold(bool hold)
{
	uint64_t bytes;

	fabric.hold = hold;
	while (!fabric.hold && !fabric.slow && step(&bytes))
		continue;
}

void fake_verbs_stall(const struct ibv_qp *qp)
{
	fabric.stalled = qp;
}

unsigned int fake_verbs_step(unsigned int wrs)
{
	unsigned int done = 0;
	uint64_t bytes;

	while (done < wrs && step(&bytes))
		done++;
	return done;
}

static void on_tick(struct loop_timer *timer)
{
	uint64_t left = fabric.slow_bytes, bytes;

	/* small ones are not free */
	while (!fabric.hold && left && step(&bytes))
		left -= bytes + 256 < left ? bytes + 256 : left;
	loop_timer_start(timer, TICK_NS);
}

void fake_verbs_slow(struct loop *loop, uint64_t bytes)
{
	if (fabric.slow)
		loop_timer_stop(&fabric.timer);
	fabric.slow = loop != NULL;
	fabric.slow_bytes = bytes;
	if (!loop) {
		fake_verbs_hold(fabric.hold);
		return;
	}
	loop_timer_init(&fabric.timer, loop, on_tick);
	on_tick(&fabric.timer);
}

unsigned int fake_verbs_outstanding(void)
{
	struct fake_qp *qp;
	unsigned int n = 0;

	list_foreach(qp, &fabric.wire, wire_link)
		n += qp->send_count;
	return n;
}

void fake_qp_begin(void)
{
	struct verbs_lib *lib = &fake_table;

	lib->create_comp_channel = create_comp_channel;
	lib->destroy_comp_channel = destroy_comp_channel;
	lib->create_cq = create_cq;
	lib->destroy_cq = destroy_cq;
	lib->get_cq_event = get_cq_event;
	lib->ack_cq_events = ack_cq_events;
	lib->make_qp = make_qp;
	lib->free_qp = free_qp;
	lib->modify_qp = modify_qp;
	lib->post_send = post_send;
	lib->post_recv = post_recv;
	lib->poll_cq = poll_cq;
	lib->req_notify_cq = req_notify_cq;
}
