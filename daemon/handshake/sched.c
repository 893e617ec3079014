/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Each data line has one window, of ops and of bytes. Sessions and their flows take turns
 * in it (sessions by buckets, so that no turn needs memory). The window limits the
 * operations that a lost peer can hold; the turns share it.
 *
 * Turns alone are not enough: a room's chunk is one op, and one of ten gigabytes would
 * hold the window for seconds. So the limit in bytes applies only beyond the first op of
 * a flow: a flow with nothing posted is admitted at once, however full the window is, and
 * the transport takes slices of all posted ops in turn. An op that does not fit waits
 * without blocking later ones, and is admitted at the latest when the previous op of its
 * flow has ended: nothing starves on either side.
 *
 * A session with ten thousand rooms would then get ten thousand slices for each slice of
 * a session with one. Beyond FIRST_MAX posted ops, its posted bytes are therefore limited
 * to a quarter of the window.
 *
 * submit and cancel make no calls: posting and the end of ops that were never posted
 * happen in the loop's next turn.
 */
#include "daemon/handshake/sched.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"

#define FIRST_MAX 64u

static const struct sm_state op_states[] = {
	[SCHED_QUEUED] = {"queued", SM_TO(SCHED_POSTED) | SM_TO(SCHED_DROPPED)},
	[SCHED_POSTED] = {"posted", SM_TO(SCHED_DONE)},
	[SCHED_DROPPED] = {"dropped", SM_TO(SCHED_DONE)},
	[SCHED_DONE] = {"done", 0},
};

static const struct sm_table op_table = {
	.name = "op", .states = op_states, .count = ARRAY_LEN(op_states)};

struct sched {
	struct loop *loop;
	unsigned int max_ops;
	uint64_t max_bytes;
	uint64_t bytes_queued, bytes_posted; /* of all lines */
};

int sched_new(struct loop *loop, unsigned int max_ops, uint64_t max_bytes,
	      struct sched **sched_p)
{
	struct sched *sched = mem_zalloc(sizeof(*sched));

	assert(max_ops > 0 && max_bytes > 0);
	if (!sched)
		return err_pass(-ENOMEM);
	*sched = (struct sched){.loop = loop, .max_ops = max_ops, .max_bytes = max_bytes};
	*sched_p = sched;
	return 0;
}

void sched_free(struct sched *sched)
{
	mem_free(sched);
}

static uint64_t sched_op_bytes(const struct sched_op *op)
{
	return op->xp.sides.plan ? op->xp.sides.plan->bytes : 0;
}

void sched_bytes(const struct sched *sched, uint64_t *queued_p, uint64_t *posted_p)
{
	*queued_p = sched->bytes_queued;
	*posted_p = sched->bytes_posted;
}

static void op_finish(struct sched_op *op)
{
	sm_move(&op->sm, SCHED_DONE);
	op->on_done(op);
}

static void on_finish(struct loop_defer *defer)
{
	op_finish(container_of(defer, struct sched_op, finish));
}

/* A queued op ends without having been posted. */
static void op_drop(struct sched_op *op, const struct err *why)
{
	struct sched_flow *flow = op->flow;

	flow->line->sched->bytes_queued -= sched_op_bytes(op);
	list_remove(&op->link);
	if (list_empty(&flow->queued)) {
		list_remove(&flow->link);
		if (list_empty(&flow->bucket->flows))
			list_remove(&flow->bucket->link);
	}
	op->xp.err = *why;
	op->xp.result = -err_errno(why->code);
	sm_move(&op->sm, SCHED_DROPPED);
	loop_defer(flow->line->sched->loop, &op->finish);
}

static void on_xp_done(struct xp_op *xp)
{
	struct sched_op *op = container_of(xp, struct sched_op, xp);
	struct sched_line *line = op->flow->line;

	assert(line->ops_posted > 0 && op->flow->posted > 0);
	op->flow->posted--;
	op->flow->bucket->posted--;
	op->flow->bucket->bytes -= sched_op_bytes(op);
	line->ops_posted--;
	line->bytes_posted -= sched_op_bytes(op);
	line->sched->bytes_posted -= sched_op_bytes(op);
	loop_defer(line->sched->loop, &line->pump);
	op_finish(op);
}

static bool within(uint64_t max, uint64_t posted, const struct sched_op *op)
{
	return posted < max && sched_op_bytes(op) <= max - posted;
}

/* The first op of a bucket that may be admitted, or NULL. Each skipped one has an op
 * posted, so these are fewer than FIRST_MAX. */
static struct sched_op *bucket_next(const struct sched_line *line,
				    const struct sched_bucket *bucket)
{
	const uint64_t max = line->sched->max_bytes;
	struct sched_flow *flow;

	list_foreach(flow, &bucket->flows, link) {
		struct sched_op *op = list_first(&flow->queued, struct sched_op, link);
		bool room = within(max, line->bytes_posted, op);

		if (bucket->posted >= FIRST_MAX)
			return room && within(max / 4, bucket->bytes, op) ? op : NULL;
		if (room || flow->posted == 0)
			return op;
	}
	return NULL;
}

static struct sched_op *next_op(const struct sched_line *line)
{
	struct sched_bucket *bucket;
	struct sched_op *op;

	if (line->ops_posted >= line->sched->max_ops)
		return NULL;
	list_foreach(bucket, &line->turns, link) {
		op = bucket_next(line, bucket);
		if (op)
			return op;
	}
	return NULL;
}

/* Its turn is over: the next flow is first now. */
static void sched_end_turn(struct sched_flow *flow)
{
	struct sched_bucket *bucket = flow->bucket;

	list_remove(&flow->link);
	if (!list_empty(&flow->queued))
		list_push_back(&bucket->flows, &flow->link);
	list_remove(&bucket->link);
	if (!list_empty(&bucket->flows))
		list_push_back(&flow->line->turns, &bucket->link);
}

static void sched_post(struct sched_line *line, struct sched_op *op)
{
	struct sched_flow *flow = op->flow;
	struct err why;
	int r;

	/* It stays in its queue until the transport has accepted it: post() makes no
	 * callbacks, and a refusal is handled like the cancel of a queued op. */
	op->xp.on_done = on_xp_done;
	r = line->ops->post(line->xp, &op->xp);
	if (r < 0) {
		err_take(&why);
		op_drop(op, &why);
		return;
	}
	list_remove(&op->link);
	sm_move(&op->sm, SCHED_POSTED);
	flow->posted++;
	flow->bucket->posted++;
	flow->bucket->bytes += sched_op_bytes(op);
	line->ops_posted++;
	line->bytes_posted += sched_op_bytes(op);
	line->sched->bytes_queued -= sched_op_bytes(op);
	line->sched->bytes_posted += sched_op_bytes(op);
	sched_end_turn(flow);
	if (op->on_posted)
		op->on_posted(op);
}

static void sched_on_pump(struct loop_defer *defer)
{
	struct sched_line *line = container_of(defer, struct sched_line, pump);
	struct sched_op *op;

	while (line->xp && (op = next_op(line)))
		sched_post(line, op);
}

void sched_line_init(struct sched_line *line, struct sched *sched)
{
	*line = (struct sched_line){.sched = sched};
	list_init(&line->turns);
	for (unsigned int i = 0; i < SCHED_BUCKETS; i++) {
		list_init(&line->buckets[i].link);
		list_init(&line->buckets[i].flows);
	}
	loop_defer_init(&line->pump, sched_on_pump);
}

void sched_line_set(struct sched_line *line, struct xp_peer *xp,
		    const struct transport_ops *ops, const struct err *why)
{
	assert(!xp || (!line->xp && ops));
	line->xp = xp;
	if (xp) {
		line->ops = ops; /* kept: posted ops are canceled through it */
		loop_defer(line->sched->loop, &line->pump);
		return;
	}
	assert(why);
	while (!list_empty(&line->turns)) {
		struct sched_bucket *bucket =
			list_first(&line->turns, struct sched_bucket, link);
		struct sched_flow *flow =
			list_first(&bucket->flows, struct sched_flow, link);

		op_drop(list_first(&flow->queued, struct sched_op, link), why);
	}
}

void sched_line_fini(struct sched_line *line)
{
	assert(list_empty(&line->turns) && line->ops_posted == 0);
	loop_defer_cancel(&line->pump);
}

void sched_flow_init(struct sched_flow *flow, struct sched_line *line, uint64_t session)
{
	assert(line->sched);
	flow->line = line;
	flow->bucket = &line->buckets[session % SCHED_BUCKETS];
	flow->posted = 0;
	list_init(&flow->link);
	list_init(&flow->queued);
}

void sched_submit(struct sched_flow *flow, struct sched_op *op)
{
	struct sched_line *line = flow->line;

	assert(op->on_done);
	assert(line->sched);
	op->flow = flow;
	sm_init(&op->sm, &op_table, SCHED_QUEUED);
	op->xp.result = 0;
	op->xp.moved = 0;
	op->xp.impl = NULL;
	loop_defer_init(&op->finish, on_finish);
	if (list_empty(&flow->bucket->flows))
		list_push_back(&line->turns, &flow->bucket->link);
	if (list_empty(&flow->queued))
		list_push_back(&flow->bucket->flows, &flow->link);
	list_push_back(&flow->queued, &op->link);
	line->sched->bytes_queued += sched_op_bytes(op);
	loop_defer(line->sched->loop, &line->pump);
}

void sched_cancel(struct sched_op *op, const struct err *why)
{
	struct sched_line *line = op->flow->line;

	assert(line->sched && why);
	if (sm_state(&op->sm) == SCHED_QUEUED)
		op_drop(op, why);
	else if (sm_state(&op->sm) == SCHED_POSTED && op->xp.impl)
		line->ops->cancel(&op->xp, why);
}
