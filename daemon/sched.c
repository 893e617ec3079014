/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One window a data line, of ops and of bytes, and flows that take turns in it.
 * The window keeps small what a lost peer can hold of us; the turns share it.
 *
 * Turns alone do not: a room's chunk is one op, and one of ten gigabytes would hold
 * the window for seconds. So the bytes bound only what a flow has beyond its first
 * op: a flow with nothing posted goes at once, however full the window is, and the
 * transport takes slices of all posted ops in turn. An op that does not fit waits
 * without holding those behind it, and goes at the latest when the one of its own
 * flow before it has ended: nothing starves on either side.
 *
 * Nothing is called from inside submit or cancel: posting and the end of ops that
 * were never posted happen in the loop's next turn.
 */
#include "daemon/sched.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"

struct sched {
	struct loop *loop;
	unsigned int max_ops;
	uint64_t max_bytes;
};

int sched_new(struct loop *loop, unsigned int max_ops, uint64_t max_bytes,
	      struct sched **sched_p)
{
	struct sched *sched = mem_zalloc(sizeof(*sched));

	if (!sched)
		return err_pass(-ENOMEM);
	*sched = (struct sched){loop, max_ops, max_bytes};
	*sched_p = sched;
	return 0;
}

void sched_free(struct sched *sched)
{
	mem_free(sched);
}

static uint64_t op_bytes(const struct sched_op *op)
{
	return op->xp.sides.plan ? op->xp.sides.plan->bytes : 0;
}

static void op_finish(struct sched_op *op)
{
	op->done = true;
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

	list_remove(&op->link);
	if (list_empty(&flow->queued))
		list_remove(&flow->link);
	op->xp.err = *why;
	op->xp.result = -err_errno(why->code);
	op->posted = true; /* no longer cancelable */
	loop_defer(flow->line->sched->loop, &op->finish);
}

static void on_xp_done(struct xp_op *xp)
{
	struct sched_op *op = container_of(xp, struct sched_op, xp);
	struct sched_line *line = op->flow->line;

	assert(line->ops_posted > 0 && op->flow->posted > 0);
	op->flow->posted--;
	line->ops_posted--;
	line->bytes_posted -= op_bytes(op);
	loop_defer(line->sched->loop, &line->pump);
	op_finish(op);
}

static bool fits(const struct sched_line *line, const struct sched_op *op)
{
	const struct sched *s = line->sched;

	return op->flow->posted == 0 ||
	       (line->bytes_posted < s->max_bytes &&
		op_bytes(op) <= s->max_bytes - line->bytes_posted);
}

/* The first in turn that may go, or NULL. Whoever is passed over has an op posted,
 * so these are fewer than max_ops. */
static struct sched_op *next_op(const struct sched_line *line)
{
	struct sched_flow *flow;

	if (line->ops_posted >= line->sched->max_ops)
		return NULL;
	list_foreach(flow, &line->flows, link) {
		struct sched_op *op = list_first(&flow->queued, struct sched_op, link);

		if (fits(line, op))
			return op;
	}
	return NULL;
}

static void post(struct sched_line *line, struct sched_op *op)
{
	struct sched_flow *flow = op->flow;
	struct err why;
	int r;

	op->xp.on_done = on_xp_done;
	r = line->ops->post(line->xp, &op->xp);
	if (r < 0) {
		err_take(&why);
		op_drop(op, &why);
		return;
	}
	list_remove(&op->link);
	op->posted = true;
	flow->posted++;
	line->ops_posted++;
	line->bytes_posted += op_bytes(op);
	list_remove(&flow->link);
	if (!list_empty(&flow->queued))
		list_push_back(&line->flows, &flow->link);
}

static void on_pump(struct loop_defer *defer)
{
	struct sched_line *line = container_of(defer, struct sched_line, pump);
	struct sched_op *op;

	while (line->xp && (op = next_op(line)))
		post(line, op);
}

void sched_line_init(struct sched_line *line, struct sched *sched)
{
	*line = (struct sched_line){.sched = sched};
	list_init(&line->flows);
	loop_defer_init(&line->pump, on_pump);
}

void sched_line_set(struct sched_line *line, struct xp_peer *xp,
		    const struct transport_ops *ops, const struct err *why)
{
	line->xp = xp;
	if (xp) {
		line->ops = ops; /* stays: posted ops are still canceled through it */
		loop_defer(line->sched->loop, &line->pump);
		return;
	}
	assert(why);
	while (!list_empty(&line->flows)) {
		struct sched_flow *flow =
			list_first(&line->flows, struct sched_flow, link);

		op_drop(list_first(&flow->queued, struct sched_op, link), why);
	}
}

void sched_line_fini(struct sched_line *line)
{
	assert(list_empty(&line->flows) && line->ops_posted == 0);
	loop_defer_cancel(&line->pump);
}

void sched_flow_init(struct sched_flow *flow, struct sched_line *line)
{
	flow->line = line;
	flow->posted = 0;
	list_init(&flow->link);
	list_init(&flow->queued);
}

void sched_submit(struct sched_flow *flow, struct sched_op *op)
{
	struct sched_line *line = flow->line;

	op->flow = flow;
	op->posted = false;
	op->done = false;
	op->xp.result = 0;
	op->xp.moved = 0;
	op->xp.impl = NULL;
	loop_defer_init(&op->finish, on_finish);
	if (list_empty(&flow->queued))
		list_push_back(&line->flows, &flow->link);
	list_push_back(&flow->queued, &op->link);
	loop_defer(line->sched->loop, &line->pump);
}

void sched_cancel(struct sched_op *op, const struct err *why)
{
	struct sched_line *line = op->flow->line;

	if (op->done)
		return;
	if (!op->posted)
		op_drop(op, why);
	else if (op->xp.impl)
		line->ops->cancel(&op->xp, why);
}
