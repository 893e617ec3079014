/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Items wait in a queue for each principal, in the order in which they came. A batch is
 * the first item of one queue and all others, of all queues, that read the same KV, up to
 * BATCH_ROWS rows and COMPUTE_WORK; there are as many batches at work as threads. So rows
 * that come while all threads are busy are computed together, without a timer that would
 * make the first one wait.
 *
 * Whose item is first: of who has had least, in rows x tokens, since it began to ask
 * (start-time fair queueing: Goyal, Vin, Cheng 1996). `had` of one who begins is that of
 * the one who was served last, so nobody saves up; and one that had more than that is
 * remembered while it is idle, or it would be new with each item.
 *
 * A batch that waking a thread would make twice as long is computed by the loop itself,
 * one a part of its turn; how fast that is, is known from the batches before.
 *
 * A canceled item of a batch is left to its batch: its rows are in the kernel's call, and
 * are not told.
 */
#include "daemon/attend/compute.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/attend/kernel.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/loop/work.h"
#include "daemon/store/store_kv.h"

#define BATCH_ROWS 1024u
#define BATCH_ITEMS 256u
#define SMALL_US 20.0  /* a batch that takes no longer is computed by the loop */
#define RATE_PART 16.0 /* of a new batch's, in the rate */

struct compute {
	struct loop *loop;
	struct offload *offload;	     /* NULL: no threads */
	unsigned int threads, busy, telling; /* batches */
	struct list queues;		     /* struct compute_queue.link */
	uint64_t had;			     /* of the queue that was served last */
	unsigned int waiting_count;
	struct kernel *kernel;
	struct loop_defer next; /* batches begin at the end of a turn */
	uint64_t batches, rows, attend_us;
	double rate; /* products a us, of late; 0: not known */
};

/* Of a principal. */
struct compute_queue {
	struct list link;
	uint64_t principal;
	uint64_t had;	   /* rows x tokens */
	struct list items; /* struct compute_item.link: they wait */
	unsigned int used; /* items that wait or are at work */
};

struct batch {
	struct offload_job job;
	struct loop_work tell;
	struct compute *compute;
	struct list items; /* once it is computed: that were not told */
	uint32_t count, rows;
	uint32_t askers; /* principals */
	uint64_t work;
	double products; /* of the kernel */
	uint64_t began_ns, ended_ns;
};

/* ---- queues ---- */

static void queue_free(struct compute_queue *queue)
{
	list_remove(&queue->link);
	mem_free(queue);
}

/* It is forgotten where that changes nothing. */
static bool queue_tidy(const struct compute *compute, struct compute_queue *queue)
{
	if (queue->used > 0 || queue->had > compute->had)
		return false;
	queue_free(queue);
	return true;
}

static struct compute_queue *queue_of(struct compute *compute, uint64_t principal)
{
	struct compute_queue *queue, *found = NULL;

	list_foreach_safe(queue, &compute->queues, link) {
		if (queue->principal == principal)
			found = queue;
		else
			(void)queue_tidy(compute, queue);
	}
	if (!found) {
		found = mem_zalloc(sizeof(*found));
		if (!found)
			return NULL;
		found->principal = principal;
		list_init(&found->items);
		list_push_back(&compute->queues, &found->link);
	}
	if (found->used == 0 && found->had < compute->had)
		found->had = compute->had;
	return found;
}

/* Of those in which items wait, who had least; NULL: none. */
static struct compute_queue *queue_next(struct compute *compute)
{
	struct compute_queue *queue, *least = NULL;

	list_foreach(queue, &compute->queues, link) {
		if (!list_empty(&queue->items) && (!least || queue->had < least->had))
			least = queue;
	}
	return least;
}

/* ---- items ---- */

static uint64_t item_work(const struct compute_item *item)
{
	uint64_t tokens = item->select ? item->per_token : item->tokens;

	return item->rows * (tokens + 1);
}

/* It waits no more. */
static void item_take(struct compute *compute, struct compute_item *item)
{
	list_remove(&item->link);
	compute->waiting_count--;
}

/* Nothing of it is here any more. */
static void item_leave(struct compute_item *item)
{
	item->queue->used--;
	item->queue = NULL;
	store_kv_free(item->kv);
	item->kv = NULL;
	item->running = false;
}

static void item_end(struct compute_item *item, const struct err *why)
{
	item_leave(item);
	item->on_done(item, why);
}

/* Do they read the same bytes in the same way? */
static bool item_joins(const struct compute_item *a, const struct compute_item *b)
{
	return a->layer == b->layer && store_kv_same(a->kv, b->kv) &&
	       form_same(&a->form, &b->form);
}

/* ---- batches ---- */

static void batch_work(struct offload_job *job)
{
	struct batch *batch = container_of(job, struct batch, job);

	batch->began_ns = loop_clock_ns(batch->compute->loop);
	job->result = kernel_run(batch->compute->kernel, &batch->items, batch->count);
	batch->ended_ns = loop_clock_ns(batch->compute->loop);
	if (job->result < 0)
		err_take(&job->err);
}

static uint32_t us_of(uint64_t ns)
{
	return ns / 1000 < UINT32_MAX ? (uint32_t)(ns / 1000) : UINT32_MAX;
}

/* Slow at once, fast by and by: the loop must not find itself with a long one. */
static void batch_rate(struct compute *compute, const struct batch *batch)
{
	double us = (double)(batch->ended_ns - batch->began_ns) / 1e3, rate;

	if (!(us > 0))
		return;
	rate = batch->products / us;
	if (compute->rate > 0 && rate > compute->rate)
		rate = compute->rate + (rate - compute->rate) / RATE_PART;
	compute->rate = rate;
}

static bool batch_is_small(const struct compute *compute, const struct batch *batch)
{
	return !loop_is_virtual(compute->loop) && compute->rate > 0 &&
	       batch->products < SMALL_US * compute->rate;
}

/* An item's end sends up to a message of values: as many a turn as it has time for. */
static bool batch_tell(struct loop_work *tell)
{
	struct batch *batch = container_of(tell, struct batch, tell);
	struct compute_item *item = list_first(&batch->items, struct compute_item, link);

	list_remove(&item->link);
	item->queue_us = us_of(batch->began_ns - item->queued_ns);
	item->attend_us = us_of(batch->ended_ns - batch->began_ns);
	item->together = batch->askers;
	item_end(item, batch->job.result < 0 ? &batch->job.err : NULL);
	return !list_empty(&batch->items);
}

static void batch_told(struct loop_work *tell)
{
	struct batch *batch = container_of(tell, struct batch, tell);

	batch->compute->telling--;
	mem_free(batch);
}

static void batch_done(struct offload_job *job)
{
	struct batch *batch = container_of(job, struct batch, job);
	struct compute *compute = batch->compute;

	batch_rate(compute, batch);
	compute->busy--;
	compute->telling++;
	compute->batches++;
	compute->rows += batch->rows;
	compute->attend_us += us_of(batch->ended_ns - batch->began_ns);
	loop_defer(compute->loop, &compute->next);
	loop_work_start(&batch->tell);
}

static void batch_take(struct batch *batch, struct compute_item *item)
{
	item_take(batch->compute, item);
	list_push_back(&batch->items, &item->link);
	item->running = true;
	item->queue->had += item_work(item);
	batch->count++;
	batch->rows += item->rows;
	batch->work += item_work(item);
	batch->products +=
		(double)item_work(item) * (item->form.shape.dqk + item->form.shape.dv);
}

static bool batch_has_room(const struct batch *batch, const struct compute_item *item)
{
	return batch->count < BATCH_ITEMS && batch->rows + item->rows <= BATCH_ROWS &&
	       batch->work + item_work(item) <= COMPUTE_WORK;
}

static void batch_fill(struct batch *batch, struct compute_item *first)
{
	struct compute *compute = batch->compute;
	struct compute_queue *queue;
	struct compute_item *item;

	compute->had = first->queue->had;
	batch_take(batch, first);
	batch->askers = 1;
	list_foreach(queue, &compute->queues, link) {
		bool asks = false;

		list_foreach_safe(item, &queue->items, link) {
			if (!item_joins(first, item))
				continue;
			asks = true; /* also if its rows have to wait for the next call */
			if (batch_has_room(batch, item))
				batch_take(batch, item);
		}
		batch->askers += asks && queue != first->queue;
	}
}

static void on_next(struct loop_defer *defer)
{
	struct compute *compute = container_of(defer, struct compute, next);
	struct compute_queue *queue;

	while (compute->busy < compute->threads && (queue = queue_next(compute))) {
		struct compute_item *first =
			list_first(&queue->items, struct compute_item, link);
		struct batch *batch = mem_zalloc(sizeof(*batch));

		if (!batch) {
			struct err why;

			err_set(&why, ERR_NOMEM, "no memory to attend");
			item_take(compute, first);
			item_end(first, &why);
			continue;
		}
		batch->compute = compute;
		list_init(&batch->items);
		loop_work_init(&batch->tell, compute->loop, batch_tell, batch_told);
		batch_fill(batch, first);
		compute->busy++;
		/* a principal of its own: of one it would be half of the threads at most
		 */
		batch->job = (struct offload_job){.work = batch_work,
						  .done = batch_done,
						  .principal = offload_peer(batch)};
		if (batch_is_small(compute, batch)) {
			batch_work(&batch->job);
			batch_done(&batch->job);
			if (loop_enough(compute->loop))
				break; /* batch_done() has deferred this again */
			continue;
		}
		offload_submit(compute->offload, &batch->job);
	}
}

/* ---- what others call ---- */

int compute_new(struct loop *loop, struct offload *offload, unsigned int threads,
		const char *isa, struct compute **compute_p)
{
	struct compute *compute = mem_zalloc(sizeof(*compute));
	int r = compute ? kernel_new(isa, &compute->kernel) : -ENOMEM;

	if (r < 0) {
		mem_free(compute);
		return err_pass(r);
	}
	compute->loop = loop;
	compute->offload = offload;
	compute->threads = threads;
	list_init(&compute->queues);
	loop_defer_init(&compute->next, on_next);
	*compute_p = compute;
	return 0;
}

void compute_free(struct compute *compute)
{
	struct compute_queue *queue;

	if (!compute)
		return;
	assert(compute->waiting_count == 0 && compute->busy == 0 &&
	       compute->telling == 0);
	list_foreach_safe(queue, &compute->queues, link)
		queue_free(queue);
	loop_defer_cancel(&compute->next);
	kernel_free(compute->kernel);
	mem_free(compute);
}

bool compute_idle(const struct compute *compute)
{
	return !compute || (compute->waiting_count == 0 && compute->busy == 0 &&
			    compute->telling == 0);
}

/* What the kernel would refuse is refused here: there it would fail all of a batch, whose
 * other rows are of others. */
static int item_check(const struct compute_item *item)
{
	uint64_t count =
		(uint64_t)(item->rows / item->form.shape.heads) * item->per_token;

	if (item->rows > ATTEND_ROWS_MAX || item->tokens > item->kv->tokens ||
	    item->kv->tokens > UINT32_MAX)
		return err_raise(ERR_RANGE, "rows: %u of %llu tokens", item->rows,
				 (unsigned long long)item->tokens);
	if (item_work(item) > COMPUTE_WORK_MOST)
		return err_raise(ERR_TOOBIG,
				 "%u rows that attend to %llu tokens: rows x tokens are "
				 "at most %llu; make several parts of the tokens",
				 item->rows,
				 (unsigned long long)(item->select ? item->per_token
								   : item->tokens),
				 (unsigned long long)COMPUTE_WORK_MOST);
	if (item->delta == INT32_MIN || (item->delta && !item->form.rope.dims) ||
	    (item->delta && item->select))
		return err_raise(ERR_INVAL, "delta: %d", item->delta);
	for (uint64_t i = 0; item->select && i < count; i++) {
		if (item->select[i] >= item->tokens && item->select[i] != ATTEND_NONE)
			return err_raise(ERR_RANGE, "select: token %u of %llu",
					 item->select[i],
					 (unsigned long long)item->tokens);
	}
	return 0;
}

int compute_submit(struct compute *compute, struct compute_item *item)
{
	const struct layout_field *key, *value;
	int r;

	assert(item->on_done && item->rows > 0);
	if (compute->threads == 0)
		return err_raise(ERR_REQUIRE,
				 "this daemon does not attend: set attend_threads");
	r = form_fields(&item->form, item->kv->view, item->layer, &key, &value);
	if (r >= 0)
		r = item_check(item);
	if (r < 0)
		return err_pass(r);
	item->queue = queue_of(compute, item->principal);
	if (!item->queue)
		return err_pass(-ENOMEM);
	item->queue->used++;
	item->queued_ns = loop_clock_ns(compute->loop);
	atomic_store(&item->canceled, false);
	item->running = false;
	list_push_back(&item->queue->items, &item->link);
	compute->waiting_count++;
	loop_defer(compute->loop, &compute->next);
	return 0;
}

bool compute_cancel(struct compute *compute, struct compute_item *item)
{
	atomic_store(&item->canceled, true);
	if (item->running)
		return false;
	item_take(compute, item);
	item_leave(item);
	return true;
}

struct kernel *compute_kernel(const struct compute *compute)
{
	return compute->kernel;
}

void compute_figures(const struct compute *compute, struct compute_figures *figures_p)
{
	*figures_p = (struct compute_figures){.batches = compute->batches,
					      .rows = compute->rows,
					      .attend_us = compute->attend_us,
					      .threads = compute->threads,
					      .waiting = compute->waiting_count,
					      .isa = kernel_isa(compute->kernel)};
}
