/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Items become spans of one job of daemon/math: the first one determines the KV, the
 * shape and the rope, because all in a batch read the same bytes in the same manner.
 *
 * A call works in scratch memory: one for each thread that ever computed at the same
 * time, kept from call to call. One of MLA has 1.5 MiB, more than malloc takes from its
 * heap (mem.c), so each call would map it, have its pages zeroed and unmap them.
 */
#include "daemon/attend/kernel.h"

#include <assert.h>
#include <errno.h>
#include <pthread.h>

#include "daemon/attend/compute.h"
#include "daemon/base/list.h"
#include "daemon/base/mem.h"
#include "daemon/math/attend.h"
#include "daemon/plan/layout.h"
#include "daemon/store/store_kv.h"
#include "gpu/attend_run.h"

#define SCRATCH_ALIGN 64u

struct kernel_scratch {
	struct list link;
	size_t bytes;
	uint8_t *at; /* aligned */
	uint8_t memory[];
};

struct kernel {
	enum pick_isa isa;
	pthread_mutex_t lock;
	struct list idle; /* struct kernel_scratch.link */
};

int kernel_new(const char *isa, struct kernel **kernel_p)
{
	enum pick_isa picked;
	struct kernel *kernel;

	if (!pick_by_name(isa, &picked))
		return err_raise(
			ERR_INVAL,
			"attention_isa: %.15s is unknown; use auto, ref, vector, avx2, "
			"avx512, avx512_bf16 or amx",
			isa);
	if (picked != PICK_AUTO && !pick_has(picked))
		return err_raise(ERR_REQUIRE,
				 "attention_isa: %s is not supported by this processor "
				 "or kernel",
				 isa);
	kernel = mem_zalloc(sizeof(*kernel));
	if (!kernel)
		return err_pass(-ENOMEM);
	if (picked == PICK_AUTO) /* the result, if the shape allows */
		for (picked = PICK_ISAS - 1; !pick_has(picked); picked--)
			continue;
	kernel->isa = picked;
	pthread_mutex_init(&kernel->lock, NULL);
	list_init(&kernel->idle);
	*kernel_p = kernel;
	return 0;
}

void kernel_free(struct kernel *kernel)
{
	struct list *link;

	if (!kernel)
		return;
	while ((link = list_pop_front(&kernel->idle)))
		mem_free(list_entry(link, struct kernel_scratch, link));
	pthread_mutex_destroy(&kernel->lock);
	mem_free(kernel);
}

const char *kernel_isa(const struct kernel *kernel)
{
	return pick_name(kernel->isa);
}

struct run {
	const struct store_kv_read *read;
	const struct list *items;
};

/* The run ends when an engine waits for the pages, or all of its items are canceled. */
static bool run_stop(void *arg)
{
	const struct run *run = arg;
	const struct compute_item *item;

	if (store_kv_read_left(run->read))
		return true;
	list_foreach(item, run->items, link) {
		if (!atomic_load(&item->canceled))
			return false;
	}
	return true;
}

static struct attend_field kernel_field(const struct store_kv_read *read,
					const struct layout_field *f, uint32_t first_head)
{
	if (!f)
		return (struct attend_field){.base = NULL};
	return (struct attend_field){
		.base = (const uint8_t *)(uintptr_t)store_kv_at(read, f) +
			(uint64_t)(first_head - f->first_unit) * f->unit_stride,
		.page_stride = f->page_stride,
		.token_stride = f->token_stride,
		.head_stride = f->unit_stride};
}

static int kv_of(const struct store_kv_read *read, const struct compute_item *item,
		 struct attend_kv *kv)
{
	const uint32_t first = item->form.first_head;
	struct form_fields fields;
	int r = form_fields(&item->form, read->view, item->layer, &fields);

	if (r < 0)
		return err_pass(r);
	*kv = (struct attend_kv){.k = kernel_field(read, fields.key, first),
				 .v = kernel_field(read, fields.value, first),
				 .k_scale = kernel_field(read, fields.key_scale, first),
				 .v_scale = kernel_field(read, fields.value_scale, first),
				 .pages = read->pages,
				 .page_tokens = read->view->page_tokens,
				 .tokens = (uint32_t)item->kv->tokens};
	return 0;
}

/* The one that was used last, if it is large enough; NULL: no memory. */
static struct kernel_scratch *scratch_take(struct kernel *kernel, size_t bytes)
{
	struct kernel_scratch *scratch = NULL;
	struct list *link;

	pthread_mutex_lock(&kernel->lock);
	link = list_pop_front(&kernel->idle);
	pthread_mutex_unlock(&kernel->lock);
	if (link)
		scratch = list_entry(link, struct kernel_scratch, link);
	if (scratch && scratch->bytes >= bytes)
		return scratch;
	mem_free(scratch);
	scratch = mem_alloc(sizeof(*scratch) + bytes + SCRATCH_ALIGN);
	if (!scratch)
		return NULL;
	list_init(&scratch->link);
	scratch->bytes = bytes;
	scratch->at = (uint8_t *)(((uintptr_t)scratch->memory + SCRATCH_ALIGN - 1) /
				  SCRATCH_ALIGN * SCRATCH_ALIGN);
	return scratch;
}

int kernel_ready(const struct store_kv_read *read, const struct list *items)
{
	struct run run = {.read = read, .items = items};

	return read->device ? err_pass(gpu_attend_ready(read->device, run_stop, &run))
			    : 0;
}

int kernel_job(struct kernel *kernel, struct gpu_device *device,
	       const struct attend_job *job, uint32_t rows)
{
	const char *fault = attend_job_fault(job);
	struct kernel_scratch *scratch;
	int r = 0;

	if (fault)
		return err_raise(ERR_RANGE, "%s", fault);
	scratch = scratch_take(kernel, device ? gpu_attend_scratch(job)
					      : attend_scratch_bytes(job->shape, rows));
	if (!scratch)
		return err_pass(-ENOMEM);
	if (!device)
		(void)attend_run(kernel->isa, job, scratch->at);
	else
		r = gpu_attend_run(device, job, scratch->at);
	pthread_mutex_lock(&kernel->lock);
	list_push_front(&kernel->idle, &scratch->link);
	pthread_mutex_unlock(&kernel->lock);
	return err_pass(r);
}

/* Of its rows, those that are computed now. */
static struct attend_span span_of(const struct compute_item *item)
{
	const struct attend_shape *shape = &item->form.shape;
	uint32_t query = item->done / shape->heads; /* tokens */

	return (struct attend_span){
		.q = (const uint8_t *)item->q + form_q_bytes(&item->form, item->done),
		.o = item->o + (size_t)item->done * shape->dv,
		.m = item->m + item->done,
		.l = item->l + item->done,
		.rows = item->now,
		.end = (uint32_t)item->tokens,
		.delta = item->delta,
		.select = item->select ? item->select + (size_t)query * item->per_token
				       : NULL,
		.per_token = item->per_token};
}

int kernel_run(struct kernel *kernel, const struct store_kv_read *read,
	       const struct list *items, uint32_t count)
{
	cleanup_free struct attend_span *spans = mem_calloc(count, sizeof(*spans));
	const struct compute_item *first = list_first(items, struct compute_item, link);
	const struct form_rope *form_rope = &first->form.rope;
	const struct rope rope = {.first = (uint16_t)form_rope->first,
				  .dims = (uint16_t)form_rope->dims,
				  .pairs = form_rope->pairs,
				  .inv_freq = form_rope->inv_freq};
	struct attend_kv kv;
	struct attend_job job = {.shape = &first->form.shape,
				 .kv = &kv,
				 .rope = form_rope->dims ? &rope : NULL,
				 .spans = spans,
				 .span_count = count,
				 .stop = run_stop,
				 .stop_arg = &(struct run){.read = read, .items = items}};
	const struct compute_item *item;
	uint32_t rows = 0, n = 0;
	int r = spans ? kv_of(read, first, &kv) : -ENOMEM;

	if (r < 0)
		return err_pass(r);
	list_foreach(item, items, link) {
		spans[n++] = span_of(item);
		rows += item->now;
	}
	assert(n == count);
	return err_pass(kernel_job(kernel, read->device, &job, rows));
}
