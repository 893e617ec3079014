/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Reading back.
 *
 * A completion, and a message behind the bytes, show that an adapter has sent its writes
 * towards memory. For host memory that is enough: the completion follows them on the same
 * path. Writes to a GPU take another path, through other bridges; a kernel that starts
 * now might not see them, and, as bad, they might land after the transfer was reported as
 * failed and its pages were reused. A read request does not overtake earlier writes on
 * its path (PCIe), so when the requested byte has arrived, they have landed. The same
 * adapter must send it; the driver's own promise (the attribute of GPUDirect ordering)
 * does not hold where there are several paths, see docs/internals/gpu-order.md.
 *
 * So each transfer that an adapter wrote into GPU memory for, good or not, ends with one
 * READ of a byte of each region and over each rail that carried it, after its last byte
 * and before its last message. The queue pair is connected to itself, so no other host is
 * involved; the READ lands in host memory that is never read.
 *
 * A helper makes the queue pair when first needed. One READ that fails costs its
 * transfer, and the queue pair: later READs are posted again over the next one. A READ
 * not done by its deadline (the fence's time) fails, too: if posted, only after the queue
 * pair has been destroyed, because until then it is in flight.
 */
#include "daemon/transport/verbs/verbs_loopback.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/sm.h"
#include "daemon/transport/verbs/verbs_impl.h"

#define DEPTH 64u
#define RD_ATOMIC_MAX 16
#define SINK_BYTES 64u
#define HOPS 64u

enum loopback_state {
	LOOPBACK_IDLE,	 /* no queue pair */
	LOOPBACK_MAKING, /* a helper is at it */
	LOOPBACK_UP,
	LOOPBACK_ENDING, /* a helper destroys it; posted READs are in flight */
	LOOPBACK_STATES,
};

static const struct sm_state states[LOOPBACK_STATES] = {
	[LOOPBACK_IDLE] = {"idle", SM_TO(LOOPBACK_MAKING)},
	[LOOPBACK_MAKING] = {"making", SM_TO(LOOPBACK_UP) | SM_TO(LOOPBACK_IDLE)},
	[LOOPBACK_UP] = {"up", SM_TO(LOOPBACK_ENDING)},
	[LOOPBACK_ENDING] = {"ending", SM_TO(LOOPBACK_IDLE)},
};

/* one READ */
struct verbs_flush {
	struct list link; /* loopback->waiting or ->posted */
	struct verbs_flushes *of;
	const struct verbs_reg *reg;
	uint64_t at; /* a byte of it */
	uint64_t deadline_ns;
};

struct verbs_flushes {
	struct verbs_xfer *xfer;
	uint32_t regs;	/* of GPUs; flush[i] of them is the model for each rail */
	uint32_t count; /* room for */
	bool begun;
	uint8_t round; /* of marks, in which it started */
	struct verbs_flush flush[];
};

struct verbs_loopback {
	struct verbs_transport *transport; /* NULL: closed under a job's `done` */
	struct verbs_rail *rail;
	struct sm sm;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct loop_fd watch; /* of the channel, while it is up */
	struct loop_timer timer;
	struct loop_defer pump;
	struct list waiting, posted; /* verbs_flush.link, in order */
	uint32_t posted_count;
	struct offload_job job;
	struct err why; /* ENDING: of all posted READs; ERR_OK: they are posted again */
	uint8_t sink[SINK_BYTES];
};

static bool loopback_invariant(const struct sm *sm, unsigned int from)
{
	const struct verbs_loopback *lb =
		container_of(sm, const struct verbs_loopback, sm);

	(void)from;
	return sm_state(sm) != LOOPBACK_IDLE || (!lb->qp && list_empty(&lb->posted));
}

static const struct sm_table table = {
	.name = "verbs loop-back",
	.states = states,
	.count = LOOPBACK_STATES,
	.invariant = loopback_invariant,
};

/* ---- the queue pair, on a helper ---- */

static void verbs_loopback_unmake(struct verbs_loopback *lb)
{
	const struct verbs_lib *lib = lb->transport->lib;

	if (lb->qp)
		lib->free_qp(lb->qp);
	if (lb->cq)
		lib->destroy_cq(lb->cq);
	if (lb->mr)
		lib->dereg_mr(lb->mr);
	if (lb->channel)
		lib->destroy_comp_channel(lb->channel);
	lb->qp = NULL;
	lb->cq = NULL;
	lb->mr = NULL;
	lb->channel = NULL;
}

static int verbs_loopback_failed(const struct verbs_loopback *lb, const char *what,
				 int no)
{
	return err_raise(ERR_IO, "verbs: %s: a loop-back queue pair: %s: %s",
			 lb->rail->name, what, strerror(no));
}

static int verbs_loopback_make_queues(struct verbs_loopback *lb)
{
	const struct verbs_lib *lib = lb->transport->lib;
	struct verbs_device *device = lb->rail->device;
	struct ibv_qp_init_attr init = {
		.qp_context = NULL, /* no peer's: verbs_event.c */
		.qp_type = IBV_QPT_RC,
		.cap = {.max_send_wr = DEPTH,
			.max_recv_wr = 1,
			.max_send_sge = 1,
			.max_recv_sge = 1},
		.sq_sig_all = 1,
	};
	int r;

	lb->channel = lib->create_comp_channel(device->context);
	if (!lb->channel)
		return verbs_loopback_failed(lb, "completion channel", errno);
	r = verbs_set_nonblocking(lb->channel->fd);
	if (r < 0)
		return err_pass(r);
	lb->mr = lib->reg_mr(device->pd, lb->sink, sizeof(lb->sink),
			     IBV_ACCESS_LOCAL_WRITE);
	if (!lb->mr)
		return verbs_loopback_failed(lb, "memory", errno);
	lb->cq = lib->create_cq(device->context, (int)DEPTH, lb, lb->channel, 0);
	if (!lb->cq)
		return verbs_loopback_failed(lb, "completion queue", errno);
	init.send_cq = init.recv_cq = lb->cq;
	lb->qp = lib->make_qp(device->pd, &init);
	return lb->qp ? 0 : verbs_loopback_failed(lb, "queue pair", errno);
}

/* To its own port: by GID where the link is Ethernet, else by LID. */
static int own_path(struct verbs_loopback *lb, struct ibv_qp_attr *attr)
{
	const struct verbs_lib *lib = lb->transport->lib;
	const struct verbs_rail *rail = lb->rail;
	struct ibv_port_attr port = {0};
	int no = lib->query_port(rail->device->context, rail->port, &port);

	if (no)
		return verbs_loopback_failed(lb, "port", no);
	attr->path_mtu = port.active_mtu;
	attr->ah_attr = (struct ibv_ah_attr){.dlid = port.lid, .port_num = rail->port};
	if (port.link_layer != IBV_LINK_LAYER_ETHERNET)
		return 0;
	attr->ah_attr.is_global = 1;
	attr->ah_attr.grh.hop_limit = HOPS;
	attr->ah_attr.grh.traffic_class = lb->transport->tos;
	attr->ah_attr.grh.sgid_index = (uint8_t)(rail->gid < 0 ? 0 : rail->gid);
	no = lib->query_gid(rail->device->context, rail->port,
			    attr->ah_attr.grh.sgid_index, &attr->ah_attr.grh.dgid);
	return no ? verbs_loopback_failed(lb, "GID", errno) : 0;
}

static int connect_self(struct verbs_loopback *lb)
{
	const struct verbs_lib *lib = lb->transport->lib;
	int most = lb->rail->device->attr.max_qp_rd_atom;
	uint8_t rd = (uint8_t)(most <= 0	      ? 1
			       : most < RD_ATOMIC_MAX ? most
						      : RD_ATOMIC_MAX);
	struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT,
				   .port_num = lb->rail->port,
				   .qp_access_flags = IBV_ACCESS_REMOTE_READ};
	struct ibv_qp_attr rtr = {.qp_state = IBV_QPS_RTR,
				  .dest_qp_num = lb->qp->qp_num,
				  .max_dest_rd_atomic = rd,
				  .min_rnr_timer = 12};
	struct ibv_qp_attr rts = {.qp_state = IBV_QPS_RTS,
				  .timeout = lb->transport->ack_timeout,
				  .retry_cnt = VERBS_RETRIES,
				  .max_rd_atomic = rd};
	int no, r = own_path(lb, &rtr);

	if (r < 0)
		return err_pass(r);
	no = lib->modify_qp(lb->qp, &init,
			    IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
				    IBV_QP_ACCESS_FLAGS);
	if (!no)
		no = lib->modify_qp(lb->qp, &rtr,
				    IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					    IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					    IBV_QP_MAX_DEST_RD_ATOMIC |
					    IBV_QP_MIN_RNR_TIMER);
	if (!no)
		no = lib->modify_qp(lb->qp, &rts,
				    IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
					    IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
					    IBV_QP_MAX_QP_RD_ATOMIC);
	if (no)
		return verbs_loopback_failed(lb, "connect", no > 0 ? no : errno);
	no = lib->req_notify_cq(lb->cq, 0);
	return no ? verbs_loopback_failed(lb, "arm", no > 0 ? no : errno) : 0;
}

static void make_work(struct offload_job *job)
{
	struct verbs_loopback *lb = container_of(job, struct verbs_loopback, job);
	struct verbs_transport *transport = lb->transport;

	job->result = verbs_loopback_make_queues(lb);
	if (job->result == 0)
		job->result = connect_self(lb);
	if (job->result < 0) {
		err_take(&job->err);
		verbs_loopback_unmake(lb);
	}
	atomic_fetch_sub(&transport->net.releasing, 1); /* it may close now */
}

static void unmake_work(struct offload_job *job)
{
	struct verbs_loopback *lb = container_of(job, struct verbs_loopback, job);
	struct verbs_transport *transport = lb->transport;

	verbs_loopback_unmake(lb);
	atomic_fetch_sub(&transport->net.releasing, 1);
}

/* ---- its READs ---- */

static uint64_t now_ns(const struct verbs_loopback *lb)
{
	return loop_now_ns(lb->transport->net.base.env.loop);
}

static void kick(struct verbs_loopback *lb)
{
	loop_defer(lb->transport->net.base.env.loop, &lb->pump);
}

static void verbs_loopback_settle(struct verbs_flush *flush, const struct err *err)
{
	struct verbs_xfer *xfer = flush->of->xfer;

	list_remove(&flush->link);
	if (err)
		net_xfer_stop(&xfer->net, err);
	xfer->busy--;
	net_xfer_check(&xfer->net);
}

static void fail_list(struct list *list, const struct err *err)
{
	struct list *link;

	while ((link = list_pop_front(list)))
		verbs_loopback_settle(list_entry(link, struct verbs_flush, link), err);
}

static void verbs_loopback_submit(struct verbs_loopback *lb,
				  void (*work)(struct offload_job *job),
				  void (*done)(struct offload_job *job))
{
	lb->job = (struct offload_job){.work = work, .done = done};
	atomic_fetch_add(&lb->transport->net.releasing, 1);
	offload_submit(lb->transport->net.base.env.offload, &lb->job);
}

static void watch_next(struct verbs_loopback *lb)
{
	const struct verbs_flush *flush =
		list_first(&lb->posted, struct verbs_flush, link);
	uint64_t now = now_ns(lb);

	if (!flush || sm_state(&lb->sm) == LOOPBACK_ENDING)
		flush = list_first(&lb->waiting, struct verbs_flush, link);
	if (flush)
		loop_timer_start(&lb->timer,
				 flush->deadline_ns > now ? flush->deadline_ns - now : 1);
}

/* Unanswered READs are posted again, in their order, if allowed. */
static void unmake_done(struct offload_job *job)
{
	struct verbs_loopback *lb = container_of(job, struct verbs_loopback, job);
	struct list unanswered, *link;
	struct err why = lb->why;

	if (!lb->transport) {
		mem_free(lb);
		return;
	}
	list_init(&unanswered);
	while ((link = list_pop_front(&lb->posted)))
		list_push_back(&unanswered, link);
	lb->posted_count = 0;
	sm_move(&lb->sm, LOOPBACK_IDLE);
	if (why.code != ERR_OK)
		fail_list(&unanswered, &why);
	while ((link = list_pop_front(&lb->waiting)))
		list_push_back(&unanswered, link);
	while ((link = list_pop_front(&unanswered)))
		list_push_back(&lb->waiting, link);
	watch_next(lb);
	kick(lb);
}

/* `why`: posted READs fail with it; NULL: they are posted again. */
static void verbs_loopback_end(struct verbs_loopback *lb, const struct err *why)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};

	if (sm_state(&lb->sm) != LOOPBACK_UP)
		return;
	lb->why = why ? *why : (struct err){.code = ERR_OK};
	sm_move(&lb->sm, LOOPBACK_ENDING);
	loop_fd_stop(&lb->watch);
	lb->transport->lib->modify_qp(lb->qp, &attr, IBV_QP_STATE);
	verbs_loopback_submit(lb, unmake_work, unmake_done);
}

static void read_err(const struct verbs_loopback *lb, const char *text, struct err *err_p)
{
	err_set(err_p, ERR_IO,
		"verbs: %s: reading back a write to GPU memory: %s; the write may not be "
		"visible to the GPU",
		lb->rail->name, text);
}

static void on_completion(struct verbs_loopback *lb, const struct ibv_wc *wc)
{
	struct verbs_flush *flush = list_first(&lb->posted, struct verbs_flush, link);
	struct err err;

	assert(flush && lb->posted_count);
	if (sm_state(&lb->sm) != LOOPBACK_UP)
		return; /* our own doing */
	lb->posted_count--;
	if (wc->status == IBV_WC_SUCCESS) {
		verbs_loopback_settle(flush, NULL);
		return;
	}
	read_err(lb, verbs_wc_text(wc->status), &err);
	verbs_loopback_settle(flush, &err);
	verbs_loopback_end(lb, NULL);
}

static void verbs_loopback_drain(struct verbs_loopback *lb)
{
	struct ibv_wc wc[DEPTH];
	int n;

	while (sm_state(&lb->sm) == LOOPBACK_UP &&
	       (n = lb->transport->lib->poll_cq(lb->cq, (int)DEPTH, wc)) > 0)
		for (int i = 0; i < n; i++)
			on_completion(lb, &wc[i]);
}

static void verbs_loopback_on_event(struct loop_fd *watch, int events)
{
	struct verbs_loopback *lb = container_of(watch, struct verbs_loopback, watch);
	const struct verbs_lib *lib = lb->transport->lib;
	struct ibv_cq *cq;
	struct err err;
	void *owner;

	(void)events;
	while (lib->get_cq_event(lb->channel, &cq, &owner) == 0)
		lib->ack_cq_events(cq, 1);
	if (lib->req_notify_cq(lb->cq, 0) != 0) { /* before the poll that finds all */
		read_err(lb, "its completions no longer raise events", &err);
		verbs_loopback_end(lb, &err);
		return;
	}
	verbs_loopback_drain(lb);
	kick(lb);
}

static bool verbs_loopback_post(struct verbs_loopback *lb, struct verbs_flush *flush)
{
	const struct verbs_reg *reg = flush->reg;
	struct ibv_mr *mr = reg->mr[lb->rail->device->index][flush->at >> reg->shift];
	struct ibv_sge sge = {
		.addr = (uint64_t)(uintptr_t)lb->sink, .length = 1, .lkey = lb->mr->lkey};
	struct ibv_send_wr wr = {.sg_list = &sge,
				 .num_sge = 1,
				 .opcode = IBV_WR_RDMA_READ,
				 .send_flags = IBV_SEND_SIGNALED},
			   *bad = NULL;
	struct err err;
	int no;

	wr.wr.rdma.remote_addr = reg->address + flush->at;
	wr.wr.rdma.rkey = mr->rkey;
	list_remove(&flush->link);
	list_push_back(&lb->posted, &flush->link);
	lb->posted_count++;
	no = lb->transport->lib->post_send(lb->qp, &wr, &bad);
	if (no) {
		read_err(lb, strerror(no), &err);
		verbs_loopback_end(lb, &err);
	}
	return no == 0;
}

static void make_done(struct offload_job *job)
{
	struct verbs_loopback *lb = container_of(job, struct verbs_loopback, job);
	int r = job->result;

	if (!lb->transport) {
		mem_free(lb);
		return;
	}
	if (r < 0) {
		sm_move(&lb->sm, LOOPBACK_IDLE);
		fail_list(&lb->waiting, &job->err);
		return;
	}
	sm_move(&lb->sm, LOOPBACK_UP);
	loop_fd_init(&lb->watch, lb->transport->net.base.env.loop, lb->channel->fd,
		     verbs_loopback_on_event);
	if (loop_fd_set(&lb->watch, LOOP_READ) < 0) {
		err_take(&job->err);
		fail_list(&lb->waiting, &job->err);
		verbs_loopback_end(lb, NULL);
		return;
	}
	log_info("verbs", lb->rail->name, "reads back", "qp=%u", lb->qp->qp_num);
	kick(lb);
}

static void verbs_loopback_on_pump(struct loop_defer *defer)
{
	struct verbs_loopback *lb = container_of(defer, struct verbs_loopback, pump);
	struct verbs_flush *flush;
	struct err err;

	if (list_empty(&lb->waiting))
		return;
	if (lb->rail->device->fatal) {
		read_err(lb, "the device was removed", &err);
		fail_list(&lb->waiting, &err);
	} else if (sm_state(&lb->sm) == LOOPBACK_IDLE) {
		sm_move(&lb->sm, LOOPBACK_MAKING);
		verbs_loopback_submit(lb, make_work, make_done);
	}
	while (sm_state(&lb->sm) == LOOPBACK_UP && lb->posted_count < DEPTH &&
	       (flush = list_first(&lb->waiting, struct verbs_flush, link)) &&
	       verbs_loopback_post(lb, flush))
		continue;
}

static void verbs_loopback_on_timer(struct loop_timer *timer)
{
	struct verbs_loopback *lb = container_of(timer, struct verbs_loopback, timer);
	struct verbs_flush *flush = list_first(&lb->posted, struct verbs_flush, link);
	uint64_t now = now_ns(lb);
	struct err err;

	read_err(lb, "timed out", &err);
	if (flush && flush->deadline_ns <= now)
		verbs_loopback_end(lb, &err);
	while ((flush = list_first(&lb->waiting, struct verbs_flush, link)) &&
	       flush->deadline_ns <= now)
		verbs_loopback_settle(flush, &err);
	watch_next(lb);
}

/* ---- a transfer's ---- */

static bool wants_flush(const struct verbs_reg *reg)
{
	return reg && reg->pieces && reg->net.base.memory->kind == MEMORY_DEVICE;
}

static struct verbs_flush *flush_of(struct verbs_flushes *all,
				    const struct verbs_reg *reg)
{
	for (uint32_t i = 0; i < all->regs; i++)
		if (all->flush[i].reg == reg)
			return &all->flush[i];
	return NULL;
}

/* The last byte that the plan writes there is as good as any. */
static void note_run(struct verbs_flushes *all, const struct verbs_place *at,
		     const struct plan_run *run)
{
	struct verbs_flush *flush = flush_of(all, at->reg);

	if (!flush) {
		flush = &all->flush[all->regs++];
		flush->reg = at->reg;
	}
	flush->at = at->offset + run->dst + run->len - 1;
}

int verbs_flush_plan(struct verbs_xfer *xfer)
{
	const struct verbs_places *places = &xfer->local;
	struct verbs_flushes *all;
	uint32_t last = UINT32_MAX, count = 0;

	if (net_is_source(&xfer->net) || !places->device)
		return 0;
	for (uint32_t i = 0; i < places->count; i++)
		count += wants_flush(places->at[i].reg);
	count *= xfer->peer->transport->rail_count;
	if (!count)
		return 0;
	all = mem_zalloc(sizeof(*all) + count * sizeof(all->flush[0]));
	if (!all)
		return err_pass(-ENOMEM);
	all->xfer = xfer;
	all->count = count;
	for (size_t i = 0; i < xfer->plan->run_count; i++) {
		const struct plan_run *run = &xfer->plan->runs[i];

		if (run->dst_buffer == last ||
		    !wants_flush(places->at[run->dst_buffer].reg))
			continue;
		last = run->dst_buffer;
		note_run(all, &places->at[last], run);
	}
	xfer->flushes = all;
	return 0;
}

bool verbs_flush_begun(const struct verbs_xfer *xfer)
{
	const struct verbs_flushes *all = xfer->flushes;

	/* a rail was lost since: there may have been more bytes */
	return !all || (all->begun && all->round == xfer->rounds);
}

static void begin_on(struct verbs_flushes *all, struct verbs_rail *rail, uint32_t first)
{
	struct verbs_loopback *lb = rail->loopback;
	struct verbs_transport *transport = lb->transport;

	for (uint32_t i = 0; i < all->regs; i++) {
		struct verbs_flush *flush = &all->flush[first + i];

		flush->of = all;
		flush->reg = all->flush[i].reg;
		flush->at = all->flush[i].at;
		flush->deadline_ns = now_ns(lb) + transport->net.fence_ns;
		list_init(&flush->link);
		list_push_back(&lb->waiting, &flush->link);
		all->xfer->busy++;
	}
	kick(lb);
	if (!loop_timer_running(&lb->timer))
		watch_next(lb);
}

void verbs_flush_begin(struct verbs_xfer *xfer, uint32_t rails)
{
	struct verbs_transport *transport = xfer->peer->transport;
	struct verbs_flushes *all = xfer->flushes;
	uint32_t first = 0;

	assert(!verbs_flush_begun(xfer));
	all->begun = true;
	all->round = xfer->rounds;
	for (uint32_t i = 0; i < transport->rail_count; i++) {
		if (!(rails & 1u << i))
			continue;
		begin_on(all, &transport->rails[i], first);
		first += all->regs;
	}
}

void verbs_flush_drop(struct verbs_xfer *xfer)
{
	mem_free(xfer->flushes);
	xfer->flushes = NULL;
}

/* ---- open and close ---- */

int verbs_loopback_open(struct verbs_transport *transport)
{
	struct loop *loop = transport->net.base.env.loop;

	for (uint32_t i = 0; i < transport->rail_count; i++) {
		struct verbs_loopback *lb = mem_zalloc(sizeof(*lb));

		if (!lb)
			return err_pass(-ENOMEM);
		lb->transport = transport;
		lb->rail = &transport->rails[i];
		list_init(&lb->waiting);
		list_init(&lb->posted);
		sm_init(&lb->sm, &table, LOOPBACK_IDLE);
		loop_timer_init(&lb->timer, loop, verbs_loopback_on_timer);
		loop_defer_init(&lb->pump, verbs_loopback_on_pump);
		transport->rails[i].loopback = lb;
	}
	return 0;
}

void verbs_loopback_close(struct verbs_transport *transport)
{
	for (uint32_t i = 0; i < transport->rail_count; i++) {
		struct verbs_loopback *lb = mem_steal(transport->rails[i].loopback);

		if (!lb)
			continue;
		assert(list_empty(&lb->waiting) && list_empty(&lb->posted));
		loop_timer_stop(&lb->timer);
		loop_defer_cancel(&lb->pump);
		if (sm_state(&lb->sm) == LOOPBACK_UP)
			loop_fd_stop(&lb->watch);
		verbs_loopback_unmake(lb);
		lb->transport = NULL;
		if (!lb->job.submitted)
			mem_free(lb);
	}
}
