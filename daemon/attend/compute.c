/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Items wait in a queue for each principal, in order of arrival, and in a group of those
 * that read the same KV in the same manner. A batch is the first item of one queue and
 * others of its group, up to BATCH_ROWS rows and COMPUTE_WORK; at most as many batches
 * run as there are threads. So rows that arrive while all threads are busy are computed
 * together, without a timer that would delay the first one.
 *
 * The next principal is the one with the least service, in rows x tokens, since its first
 * request (start-time fair queueing: Goyal, Vin, Cheng 1996). `had` of a new one is that
 * of the one served last, so idle time earns no credit; a principal with more than that
 * is remembered while it is idle, or it would be new with each item.
 *
 * A batch that would take twice as long with the wake-up of a thread is computed by the
 * loop itself, one in a part of its turn; its speed is known from earlier batches.
 *
 * A GPU is an engine's: without MPS its kernels wait while one of ours runs. So a batch
 * for it has no more than about COMPUTE_GPU_US of work, by the speed of late: of a larger
 * item it has the first rows, and the item is first in its queue again. After a batch of
 * t the next one waits for t * (100 / share - 1), here and not in its thread, so that
 * answers do not wait, and no pages are in use meanwhile. A timer's delay is made good,
 * up to CREDIT_NS.
 *
 * A canceled item of a batch stays in it: its rows are computed, and not delivered.
 */
#include "daemon/attend/compute.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <time.h>

#include "daemon/attend/kernel.h"
#include "daemon/base/idmap.h"
#include "daemon/base/mem.h"
#include "daemon/loop/offload.h"
#include "daemon/loop/work.h"
#include "daemon/store/store_kv.h"
#include "gpu/attend_run.h"

#define BATCH_ROWS 1024u
#define BATCH_ITEMS 256u
#define BATCH_LOOKS 512u		    /* at items of the group */
#define SMALL_US 20.0			    /* a shorter batch is computed by the loop */
#define RATE_PART 16.0			    /* of a new batch's, in the rate */
#define CALL_MOST_NS (100 * LOOP_NS_PER_MS) /* of a call, that counts for the share */
#define CREDIT_NS (2 * LOOP_NS_PER_MS)

struct compute {
	struct loop *loop;
	struct offload *offload;	     /* NULL: no threads */
	unsigned int threads, busy, telling; /* batches */
	struct gpu_device *device;	     /* NULL: the host */
	unsigned int share;		     /* percent of its time; 0: all */
	uint64_t ready_ns;		     /* no batch starts before */
	struct loop_timer rest;		     /* until then */
	struct list queues;		     /* struct compute_queue.link */
	struct list idle;		     /* … of those with nothing in them */
	struct idmap by_principal, groups;   /* of both; by item_hash() */
	uint64_t had;			     /* of the queue that was served last */
	unsigned int waiting_count;
	struct kernel *kernel;
	struct loop_defer next; /* batches start at the end of a turn */
	uint64_t begun, batches, rows, attend_us;
	double rate; /* products a us, of late; 0: not known */
};

/* Of a principal. */
struct compute_queue {
	struct list link;
	uint64_t principal;
	uint64_t had;	   /* rows x tokens */
	struct list items; /* struct compute_item.link: they wait */
	unsigned int used; /* items that wait or are at work */
	uint64_t asked;	   /* number of the last batch that checked an item of it */
};

/* Waiting items, in order of arrival. (Two kinds of one hash would be in one group:
 * item_joins() distinguishes them.) */
struct compute_group {
	uint64_t hash;
	struct list items; /* struct compute_item.joins */
};

struct batch {
	struct offload_job job;
	struct loop_work tell;
	struct compute *compute;
	uint64_t number;
	struct list items;	   /* once it is computed: undelivered ones */
	struct store_kv_read read; /* of the first one's chunks */
	uint32_t count, rows;
	uint32_t requesters; /* principals */
	uint64_t work;
	double products; /* of the kernel */
	uint64_t began_ns, ended_ns;
};

/* ---- queues ---- */

static void queue_free(struct compute *compute, struct compute_queue *queue)
{
	list_remove(&queue->link);
	idmap_remove(&compute->by_principal, queue->principal);
	mem_free(queue);
}

/* Frees two idle ones, the longest idle first, if that changes nothing: so their number
 * is bounded by those with more service than others. */
static void queues_tidy(struct compute *compute)
{
	for (int i = 0; i < 2; i++) {
		struct compute_queue *queue =
			list_first(&compute->idle, struct compute_queue, link);

		if (!queue)
			return;
		list_remove(&queue->link);
		if (queue->had > compute->had)
			list_push_back(&compute->idle, &queue->link);
		else
			queue_free(compute, queue);
	}
}

static struct compute_queue *queue_of(struct compute *compute, uint64_t principal)
{
	struct compute_queue *queue = idmap_get(&compute->by_principal, principal);

	if (!queue) {
		queue = mem_zalloc(sizeof(*queue));
		if (!queue || idmap_put(&compute->by_principal, principal, queue) < 0) {
			mem_free(queue);
			return NULL;
		}
		queue->principal = principal;
		list_init(&queue->items);
		list_init(&queue->link);
		list_push_back(&compute->idle, &queue->link);
	}
	if (queue->used == 0 && queue->had < compute->had)
		queue->had = compute->had;
	return queue;
}

static void queue_use(struct compute *compute, struct compute_queue *queue)
{
	if (queue->used++ > 0)
		return;
	list_remove(&queue->link);
	list_push_back(&compute->queues, &queue->link);
	queues_tidy(compute);
}

/* Of those with waiting items, the one with the least service; NULL: none. */
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

static uint64_t item_work(const struct compute_item *item, uint32_t rows)
{
	uint64_t tokens = item->select ? item->per_token : item->tokens;

	return rows * (tokens + 1);
}

static double item_products(const struct compute_item *item, uint32_t rows)
{
	return (double)item_work(item, rows) *
	       (item->form.shape.dqk + item->form.shape.dv);
}

/* Products of a batch, about. */
static double batch_most(const struct compute *compute)
{
	return compute->share ? COMPUTE_GPU_US * compute->rate : INFINITY;
}

/* How many of its rows are for one batch: of one query token, at least. */
static uint32_t item_rows(const struct compute *compute, const struct compute_item *item)
{
	uint32_t left = item->rows - item->done, heads = item->form.shape.heads;
	double rows = batch_most(compute) / item_products(item, 1);

	if (rows >= left || heads >= left)
		return left;
	return rows > heads ? (uint32_t)rows / heads * heads : heads;
}

/* Of the members that item_joins() compares. */
static uint64_t item_hash(const struct compute_item *item)
{
	const struct store_kv *kv = item->kv;
	const uint64_t words[] = {(uintptr_t)kv->class,
				  kv->view,
				  kv->count,
				  idmap_hash(kv->chunks, kv->count * sizeof(*kv->chunks)),
				  item->layer,
				  form_hash(&item->form)};

	return idmap_hash(words, sizeof(words));
}

static int item_group(struct compute *compute, struct compute_item *item)
{
	uint64_t hash = item_hash(item);
	struct compute_group *group = idmap_get(&compute->groups, hash);

	if (!group) {
		group = mem_zalloc(sizeof(*group));
		if (!group || idmap_put(&compute->groups, hash, group) < 0) {
			mem_free(group);
			return err_pass(-ENOMEM);
		}
		group->hash = hash;
		list_init(&group->items);
	}
	item->group = group;
	list_push_back(&group->items, &item->joins);
	return 0;
}

static void group_tidy(struct compute *compute, struct compute_group *group)
{
	if (!list_empty(&group->items))
		return;
	idmap_remove(&compute->groups, group->hash);
	mem_free(group);
}

/* It waits no more; the caller calls group_tidy(). */
static void item_unlink(struct compute *compute, struct compute_item *item)
{
	list_remove(&item->link);
	list_remove(&item->joins);
	compute->waiting_count--;
}

static void item_take(struct compute *compute, struct compute_item *item)
{
	item_unlink(compute, item);
	group_tidy(compute, item->group);
}

/* Nothing of it is here any more. */
static void item_leave(struct compute *compute, struct compute_item *item)
{
	if (--item->queue->used == 0) {
		list_remove(&item->queue->link);
		list_push_back(&compute->idle, &item->queue->link);
	}
	item->queue = NULL;
	store_kv_free(item->kv);
	item->kv = NULL;
	item->running = false;
}

/* Its other rows are next. */
static int item_again(struct compute *compute, struct compute_item *item)
{
	int r = item_group(compute, item);

	if (r < 0)
		return err_pass(r);
	item->running = false;
	list_push_front(&item->queue->items, &item->link);
	compute->waiting_count++;
	loop_defer(compute->loop, &compute->next);
	return 0;
}

static void item_end(struct compute *compute, struct compute_item *item,
		     const struct err *why)
{
	item_leave(compute, item);
	item->on_done(item, why);
}

/* Do they read the same bytes in the same manner? */
static bool item_joins(const struct compute_item *a, const struct compute_item *b)
{
	return a->layer == b->layer && store_kv_same(a->kv, b->kv) &&
	       form_same(&a->form, &b->form);
}

/* ---- batches ---- */

/* In its last batch. */
static bool item_is_last(const struct compute_item *item)
{
	return item->done + item->now == item->rows;
}

static void batch_work(struct offload_job *job)
{
	struct batch *batch = container_of(job, struct batch, job);
	struct compute_item *item;

	job->result = kernel_ready(&batch->read, &batch->items);
	batch->began_ns = loop_clock_ns(batch->compute->loop);
	if (job->result >= 0)
		job->result = kernel_run(batch->compute->kernel, &batch->read,
					 &batch->items, batch->count);
	list_foreach(item, &batch->items, link) { /* at most 512: BATCH_ITEMS */
		size_t count = (size_t)item->rows * item->form.shape.dv;

		if (job->result < 0 || !item->form.out_bf16 || !item_is_last(item))
			continue;
		/* in place: a reply's buffer is the kernel's */
		value_narrow(VALUE_BF16, item->o, item->o, count);
		memmove((uint8_t *)item->o + count * value_bytes(VALUE_BF16), item->m,
			2 * item->rows * sizeof(float));
	}
	batch->ended_ns = loop_clock_ns(batch->compute->loop);
	if (job->result < 0)
		err_take(&job->err);
}

static uint32_t us_of(uint64_t ns)
{
	return ns / 1000 < UINT32_MAX ? (uint32_t)(ns / 1000) : UINT32_MAX;
}

/* Rises at once and falls slowly: the loop must never run a long batch itself. */
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

/* Were all of its products computed? A kernel stops when its pages are withdrawn, or all
 * of its rows are canceled. */
static bool batch_is_whole(const struct batch *batch)
{
	const struct compute_item *item;

	list_foreach(item, &batch->items, link) { /* at most 256: BATCH_ITEMS */
		if (!atomic_load(&item->canceled))
			return batch->job.result >= 0;
	}
	return false;
}

/* An item's end sends up to a message of values: as many a turn as there is time for. */
static bool batch_tell(struct loop_work *tell)
{
	struct batch *batch = container_of(tell, struct batch, tell);
	struct compute_item *item = list_first(&batch->items, struct compute_item, link);
	const struct err *why = batch->job.result < 0 ? &batch->job.err : NULL;
	struct err again;

	list_remove(&item->link);
	item->attend_us += us_of(batch->ended_ns - batch->began_ns);
	item->queue_us = us_of(batch->ended_ns - item->queued_ns) - item->attend_us;
	item->together = batch->requesters;
	if (!why && !item_is_last(item) && !atomic_load(&item->canceled)) {
		item->done += item->now;
		if (item_again(batch->compute, item) >= 0)
			return !list_empty(&batch->items);
		err_take(&again);
		why = &again;
	}
	item_end(batch->compute, item, why);
	return !list_empty(&batch->items);
}

static void batch_reported(struct loop_work *tell)
{
	struct batch *batch = container_of(tell, struct batch, tell);

	batch->compute->telling--;
	mem_free(batch);
}

/* After a batch. */
static void compute_uses(struct compute *compute, const struct batch *batch)
{
	uint64_t took = batch->ended_ns - batch->began_ns;
	uint64_t since = batch->began_ns < CREDIT_NS ? 0 : batch->began_ns - CREDIT_NS;

	if (compute->ready_ns < since)
		compute->ready_ns = since;
	/* a call that the engine's own work, or the driver, has held up is not charged in
	 * full: the queue would stand still for minutes */
	if (took > CALL_MOST_NS)
		took = CALL_MOST_NS;
	if (compute->share)
		compute->ready_ns += took * 100 / compute->share;
}

static void batch_done(struct offload_job *job)
{
	struct batch *batch = container_of(job, struct batch, job);
	struct compute *compute = batch->compute;
	int r = store_kv_read_end(&batch->read);

	if (r < 0) { /* also if the call succeeded */
		job->result = r;
		err_take(&job->err);
	}
	if (batch_is_whole(batch))
		batch_rate(compute, batch);
	compute_uses(compute, batch);
	compute->busy--;
	compute->telling++;
	compute->batches += job->result >= 0;
	compute->rows += job->result >= 0 ? batch->rows : 0;
	compute->attend_us += us_of(batch->ended_ns - batch->began_ns);
	loop_defer(compute->loop, &compute->next);
	loop_work_start(&batch->tell);
}

static void batch_take(struct batch *batch, struct compute_item *item)
{
	item_unlink(batch->compute, item);
	list_push_back(&batch->items, &item->link);
	item->running = true;
	item->now = item_rows(batch->compute, item);
	item->queue->had += item_work(item, item->now);
	batch->count++;
	batch->rows += item->now;
	batch->work += item_work(item, item->now);
	batch->products += item_products(item, item->now);
}

static bool batch_has_room(const struct batch *batch, const struct compute_item *item)
{
	uint32_t rows = item->rows - item->done;

	return batch->count < BATCH_ITEMS && batch->rows + rows <= BATCH_ROWS &&
	       batch->work + item_work(item, rows) <= COMPUTE_WORK &&
	       batch->products + item_products(item, rows) <= batch_most(batch->compute);
}

static void batch_fill(struct batch *batch, struct compute_item *first)
{
	struct compute *compute = batch->compute;
	struct compute_group *group = first->group;
	struct compute_item *item;
	unsigned int looks = 0;

	compute->had = first->queue->had;
	batch_take(batch, first);
	first->queue->asked = batch->number;
	batch->requesters = 1;
	list_foreach_safe(item, &group->items, joins) { /* at most 512: BATCH_LOOKS */
		if (++looks > BATCH_LOOKS)
			break;
		if (!item_joins(first, item))
			continue;
		/* even if its rows have to wait for the next call */
		batch->requesters += item->queue->asked != batch->number;
		item->queue->asked = batch->number;
		if (batch_has_room(batch, item))
			batch_take(batch, item);
	}
	group_tidy(compute, group);
}

static void on_rest(struct loop_timer *timer)
{
	struct compute *compute = container_of(timer, struct compute, rest);

	loop_defer(compute->loop, &compute->next);
}

static bool compute_rests(struct compute *compute)
{
	uint64_t now = loop_now_ns(compute->loop);

	if (compute->ready_ns <= loop_clock_ns(compute->loop))
		return false;
	loop_timer_start(&compute->rest,
			 compute->ready_ns > now ? compute->ready_ns - now : 0);
	return true;
}

static int batch_read(struct batch *batch, const struct store_kv *kv)
{
	int r = store_kv_read_begin(kv, &batch->read);

	if (r >= 0 && batch->read.device != batch->compute->device)
		r = err_raise(ERR_NOTFOUND, "the chunks' pages were withdrawn");
	return err_pass(r);
}

static void on_next(struct loop_defer *defer)
{
	struct compute *compute = container_of(defer, struct compute, next);
	struct compute_queue *queue;

	while (compute->busy < compute->threads && (queue = queue_next(compute)) &&
	       !compute_rests(compute)) {
		struct compute_item *first =
			list_first(&queue->items, struct compute_item, link);
		struct batch *batch = mem_zalloc(sizeof(*batch));

		if (!batch) {
			struct err why;

			err_set(&why, ERR_NOMEM, "out of memory for attention");
			item_take(compute, first);
			item_end(compute, first, &why);
			continue;
		}
		batch->compute = compute;
		batch->number = ++compute->begun;
		list_init(&batch->items);
		loop_work_init(&batch->tell, compute->loop, batch_tell, batch_reported);
		batch_fill(batch, first);
		compute->busy++;
		/* a principal of its own: a shared one would get half of the threads at
		 * most */
		batch->job = (struct offload_job){.work = batch_work,
						  .done = batch_done,
						  .principal = offload_peer(batch)};
		batch->job.result = batch_read(batch, first->kv);
		if (batch->job.result < 0) {
			err_take(&batch->job.err);
			batch->began_ns = batch->ended_ns = loop_clock_ns(compute->loop);
			batch_done(&batch->job);
		} else if (!loop_is_virtual(compute->loop) && compute->rate > 0 &&
			   !compute->device && /* its kernel is waited for */
			   batch->products < SMALL_US * compute->rate) {
			batch_work(&batch->job);
			batch_done(&batch->job);
		} else {
			offload_submit(compute->offload, &batch->job);
		}
		if (loop_enough(compute->loop)) {
			loop_defer(compute->loop, &compute->next);
			break;
		}
	}
}

/* ---- public functions ---- */

int compute_new(struct loop *loop, const struct compute_args *args,
		struct compute **compute_p)
{
	struct compute *compute = mem_zalloc(sizeof(*compute));
	int r = compute ? kernel_new(args->isa, &compute->kernel) : -ENOMEM;

	if (r < 0) {
		mem_free(compute);
		return err_pass(r);
	}
	compute->loop = loop;
	compute->offload = args->offload;
	compute->threads = args->threads;
	compute->device = args->device;
	compute->share = args->share;
	list_init(&compute->queues);
	list_init(&compute->idle);
	loop_defer_init(&compute->next, on_next);
	loop_timer_init(&compute->rest, loop, on_rest);
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
	list_foreach_safe(queue, &compute->idle, link)
		queue_free(compute, queue);
	idmap_fini(&compute->by_principal);
	idmap_fini(&compute->groups);
	loop_defer_cancel(&compute->next);
	loop_timer_stop(&compute->rest);
	kernel_free(compute->kernel);
	mem_free(compute);
}

bool compute_idle(const struct compute *compute)
{
	return !compute || (compute->waiting_count == 0 && compute->busy == 0 &&
			    compute->telling == 0);
}

/* Items that the kernel would refuse are refused here: there they would fail all of a
 * batch, with the rows of others. */
static int item_check(const struct compute_item *item)
{
	uint64_t count =
		(uint64_t)(item->rows / item->form.shape.heads) * item->per_token;

	if (item->rows > ATTEND_ROWS_MAX || item->tokens > item->kv->tokens ||
	    item->kv->tokens > UINT32_MAX)
		return err_raise(ERR_RANGE,
				 "rows: %u rows over %llu tokens exceed the limits",
				 item->rows, (unsigned long long)item->tokens);
	if (item_work(item, item->rows) > COMPUTE_WORK_MOST)
		return err_raise(ERR_TOOBIG,
				 "%u rows over %llu tokens: rows x tokens exceed %llu; "
				 "split the tokens into several parts",
				 item->rows,
				 (unsigned long long)(item->select ? item->per_token
								   : item->tokens),
				 (unsigned long long)COMPUTE_WORK_MOST);
	if (item->delta == INT32_MIN || (item->delta && !item->form.rope.dims) ||
	    (item->delta && item->select))
		return err_raise(ERR_INVAL, "delta: %d is out of range", item->delta);
	for (uint64_t i = 0; item->select && i < count; i++) {
		if (item->select[i] >= item->tokens && item->select[i] != ATTEND_NONE)
			return err_raise(ERR_RANGE,
					 "select: token %u is out of range "
					 "(under %llu)",
					 item->select[i],
					 (unsigned long long)item->tokens);
	}
	return 0;
}

int compute_submit(struct compute *compute, struct compute_item *item)
{
	const struct layout_view *view = store_kv_view(item->kv);
	struct form_fields fields;
	int r;

	assert(item->on_done && item->rows > 0);
	if (compute->threads == 0)
		return err_raise(ERR_REQUIRE,
				 "this daemon does not compute attention; set "
				 "attention_threads");
	if (!view)
		return err_raise(ERR_NOTFOUND, "the engine of these chunks has exited");
	r = form_fields(&item->form, view, item->layer, &fields);
	if (r >= 0)
		r = item_check(item);
	if (r < 0)
		return err_pass(r);
	item->compute = compute;
	item->gpu = compute->device != NULL;
	item->done = item->attend_us = 0;
	item->queue = queue_of(compute, item->principal);
	if (!item->queue)
		return err_pass(-ENOMEM);
	r = item_group(compute, item);
	if (r < 0)
		return err_pass(r);
	queue_use(compute, item->queue);
	item->queued_ns = loop_clock_ns(compute->loop);
	atomic_store(&item->canceled, false);
	item->running = false;
	list_push_back(&item->queue->items, &item->link);
	compute->waiting_count++;
	loop_defer(compute->loop, &compute->next);
	return 0;
}

bool compute_cancel(struct compute_item *item)
{
	struct compute *compute = item->compute;

	atomic_store(&item->canceled, true);
	if (item->running)
		return false;
	item_take(compute, item);
	item_leave(compute, item);
	return true;
}

struct kernel *compute_kernel(const struct compute *compute)
{
	return compute->kernel;
}

struct offload *compute_offload(const struct compute *compute)
{
	return compute->offload;
}

void compute_rest(const struct compute *compute, double us)
{
	const double most = CALL_MOST_NS;
	double took = us * 1e3 < most ? us * 1e3 : most;
	double ns = compute->share ? took * (100.0 / compute->share - 1) : 0;
	const struct timespec t = {.tv_sec = (time_t)(ns / 1e9),
				   .tv_nsec = (long)fmod(ns, 1e9)};

	if (ns > 0)
		(void)nanosleep(&t, NULL);
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
