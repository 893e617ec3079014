/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/attend/kernel.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/attend/compute.h"
#include "daemon/base/mem.h"
#include "daemon/math/attend.h"
#include "daemon/plan/layout.h"
#include "daemon/store/store_kv.h"

#define SCRATCH_ALIGN 64u

struct kernel {
	enum pick_isa isa;
};

int kernel_new(const char *isa, struct kernel **kernel_p)
{
	enum pick_isa picked;
	struct kernel *kernel;

	if (!pick_by_name(isa, &picked))
		return err_raise(ERR_INVAL,
				 "attend_isa: %.15s is none of auto, ref, vector, avx2, "
				 "avx512, amx",
				 isa);
	if (picked != PICK_AUTO && !pick_has(picked))
		return err_raise(ERR_REQUIRE, "attend_isa: this processor has no %s",
				 isa);
	kernel = mem_zalloc(sizeof(*kernel));
	if (!kernel)
		return err_pass(-ENOMEM);
	if (picked == PICK_AUTO) /* what it comes to, where the shape allows */
		for (picked = PICK_ISAS - 1; !pick_has(picked); picked--)
			continue;
	kernel->isa = picked;
	*kernel_p = kernel;
	return 0;
}

void kernel_free(struct kernel *kernel)
{
	mem_free(kernel);
}

const char *kernel_isa(const struct kernel *kernel)
{
	return pick_name(kernel->isa);
}

/* The run ends when nobody waits for any of its rows. */
static bool run_stop(void *arg)
{
	const struct list *items = arg;
	const struct compute_item *item;

	list_foreach(item, items, link) {
		if (!atomic_load(&item->canceled))
			return false;
	}
	return true;
}

static struct attend_field field_of(const struct store_kv *kv,
				    const struct layout_field *f, uint32_t first_head)
{
	return (struct attend_field){.base = kv->base + f->offset +
					     (uint64_t)(first_head - f->first_unit) *
						     f->unit_stride,
				     .page_stride = f->page_stride,
				     .token_stride = f->token_stride,
				     .head_stride = f->unit_stride};
}

static int kv_of(const struct compute_item *item, struct attend_kv *kv)
{
	const struct store_kv *from = item->kv;
	const struct layout_field *key, *value;
	int r = form_fields(&item->form, from->view, item->layer, &key, &value);

	if (r < 0)
		return err_pass(r);
	*kv = (struct attend_kv){.k = field_of(from, key, item->form.first_head),
				 .v = field_of(from, value, item->form.first_head),
				 .pages = from->pages,
				 .page_tokens = from->page_tokens,
				 .tokens = (uint32_t)from->tokens};
	return 0;
}

int kernel_job(const struct kernel *kernel, const struct attend_job *job, uint32_t rows)
{
	const char *fault = attend_job_fault(job);
	size_t bytes = attend_scratch_bytes(job->shape, rows);
	cleanup_free uint8_t *scratch = NULL;
	uintptr_t at;

	if (fault)
		return err_raise(ERR_RANGE, "%s", fault);
	scratch = mem_alloc(bytes + SCRATCH_ALIGN);
	if (!scratch)
		return err_pass(-ENOMEM);
	at = ((uintptr_t)scratch + SCRATCH_ALIGN - 1) / SCRATCH_ALIGN * SCRATCH_ALIGN;
	(void)attend_run(kernel->isa, job, (void *)at);
	return 0;
}

int kernel_run(const struct kernel *kernel, const struct list *items, uint32_t count)
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
				 .stop_arg = (void *)(uintptr_t)items};
	const struct compute_item *item;
	uint32_t rows = 0, n = 0;
	int r = spans ? kv_of(first, &kv) : -ENOMEM;

	if (r < 0)
		return err_pass(r);
	list_foreach(item, items, link) {
		spans[n++] = (struct attend_span){.q = item->q,
						  .o = item->o,
						  .m = item->m,
						  .l = item->l,
						  .rows = item->rows,
						  .end = (uint32_t)item->tokens,
						  .delta = item->delta,
						  .select = item->select,
						  .per_token = item->per_token};
		rows += item->rows;
	}
	assert(n == count);
	return err_pass(kernel_job(kernel, &job, rows));
}
