/* SPDX-License-Identifier: Apache-2.0 */
/*
 * attend.cu on whatever driver there is, without a daemon: this process has the KV, the
 * plan and the launches. Results are held against daemon/math on the same bytes: its fp64
 * kernel for attention, bit by bit for the merge and the splice. All memory of the KV
 * that is no token's is 0xff, a NaN.
 *
 * The bench's times are of launches one behind the other, so of the device.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "gpu/attend_image.h"
#include "gpu/attend_plan.h"
#include "tests/gpu/works/works.h"

#define PAGE_TOKENS 64u
#define FIRST 5u
#define SPANS 4u
#define LAUNCHES 20

static const struct attend_shape mla = {.kind = ATTEND_MLA,
					.heads = 16,
					.kv_heads = 1,
					.dqk = 576,
					.dv = 512,
					.scale = 1.5f / 24};
static const struct attend_shape gqa128 = {.kind = ATTEND_GQA,
					   .heads = 32,
					   .kv_heads = 8,
					   .dqk = 128,
					   .dv = 128,
					   .scale = 1.5f / 11};
static const struct attend_shape gqa64 = {.kind = ATTEND_GQA,
					  .heads = 8,
					  .kv_heads = 2,
					  .dqk = 64,
					  .dv = 64,
					  .scale = 1.5f / 8};

static uint64_t seed = 1;

static uint64_t draw(uint64_t below)
{
	seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (seed >> 33) % below;
}

static void fill(uint16_t *to, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++)
		to[i] = value_to_bf16((float)draw(1 << 20) / (1 << 18) - 2);
}

/* ---- the module ---- */

static struct cu_module *module;

static void module_open(void)
{
	int major = 0;
	size_t bytes;
	const void *image = attend_image(&bytes);

	if (!cuda.drv.has[CUDRV_KERNELS])
		skip("the driver has no %s", cuda.drv.missing[CUDRV_KERNELS]);
	if (!image && cuda.fake)
		image = "kvd fake kernels\n";
	if (!image)
		skip("gpu-works of a build with nvcc");
	cu(cuda.drv.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
				     cuda.device),
	   "cuDeviceGetAttribute");
	if (major < 8 && !cuda.fake)
		skip("a GPU of compute capability 8.0 or above: this has %d", major);
	cu(cuda.drv.module_load(&module, image), "cuModuleLoadData");
}

static void launch(const char *kernel, uint32_t x, uint32_t y, const void *arg)
{
	void *params[] = {(void *)(uintptr_t)arg};
	struct cu_function *function;

	cu(cuda.drv.module_function(&function, module, kernel), kernel);
	cu(cuda.drv.launch(function, x, y, 1, ATTEND_KERN_THREADS, 1, 1, 0, cuda.stream,
			   params, NULL),
	   kernel);
}

/* In the order of the stream of launches: cuMemcpyHtoD may return before bytes of
 * pageable memory are there, and a stream that does not block waits for none of it. */
static void put(uint64_t at, const void *data, size_t bytes)
{
	cu(cuda.drv.copy(at, (uintptr_t)data, bytes, cuda.stream), "cuMemcpyAsync");
	cuda_sync();
}

static uint64_t upload(const void *data, size_t bytes)
{
	const uint64_t at = cuda_alloc(bytes);

	put(at, data, bytes);
	return at;
}

static void *download(uint64_t at, size_t bytes)
{
	void *data = need(malloc(bytes));

	cuda_sync();
	cu(cuda.to_host(data, at, bytes), "cuMemcpyDtoH");
	return data;
}

/* ---- a chunk and its rows ---- */

struct scene {
	const struct attend_shape *shape;
	struct attend_kv host, device;
	size_t bytes;
	uint8_t *memory;
	uint64_t memory_at, pages_at;
	struct rope rope;
	double inv_freq[64];
	struct attend_span spans[SPANS];
	uint32_t span_count;
};

static uint8_t *token_at(const struct scene *s, bool v, uint32_t token, uint32_t head)
{
	const struct attend_field *f = v ? &s->host.v : &s->host.k;
	const uint32_t at = FIRST + token;

	return (uint8_t *)(uintptr_t)f->base +
	       s->host.pages[at / PAGE_TOKENS] * f->page_stride +
	       at % PAGE_TOKENS * f->token_stride + head * f->head_stride;
}

static void scene_tokens(struct scene *s)
{
	for (uint32_t t = 0; t < s->host.tokens; t++)
		for (uint32_t h = 0; h < s->shape->kv_heads; h++) {
			fill((uint16_t *)(void *)token_at(s, false, t, h), s->shape->dqk);
			if (s->shape->kind == ATTEND_GQA)
				fill((uint16_t *)(void *)token_at(s, true, t, h),
				     s->shape->dv);
		}
}

/* Every other page, in reverse. */
static void scene_make(struct scene *s, const struct attend_shape *shape, uint32_t tokens)
{
	const uint32_t needed = (FIRST + tokens + PAGE_TOKENS - 1) / PAGE_TOKENS;
	const uint64_t row = shape->dqk * 2u * (shape->kind == ATTEND_GQA ? 2 : 1);
	uint32_t *pages = need(calloc(needed, sizeof(*pages)));
	struct attend_field k = {.token_stride = row * shape->kv_heads,
				 .head_stride = row,
				 .page_stride = row * shape->kv_heads * PAGE_TOKENS};

	*s = (struct scene){.shape = shape};
	s->bytes = 2 * needed * k.page_stride;
	s->memory = need(aligned_alloc(64, s->bytes));
	memset(s->memory, 0xff, s->bytes);
	for (uint32_t i = 0; i < needed; i++)
		pages[i] = 2 * (needed - i) - 1;
	k.base = s->memory;
	s->host = (struct attend_kv){.k = k,
				     .v = k,
				     .pages = pages,
				     .page_tokens = PAGE_TOKENS,
				     .first = FIRST,
				     .tokens = tokens};
	s->host.v.base += shape->dqk * 2u;
	scene_tokens(s);
	s->memory_at = upload(s->memory, s->bytes);
	s->pages_at = upload(pages, needed * sizeof(*pages));
	s->device = s->host;
	s->device.k.base = (const uint8_t *)(uintptr_t)s->memory_at;
	s->device.v.base = s->device.k.base + shape->dqk * 2u;
	s->device.pages = (const uint32_t *)(uintptr_t)s->pages_at;
	s->rope.first = shape->kind == ATTEND_MLA ? 512 : 0;
	s->rope.dims = (uint16_t)(shape->dqk - s->rope.first);
	s->rope.inv_freq = s->inv_freq;
	for (uint32_t i = 0; i < s->rope.dims / 2u; i++)
		s->inv_freq[i] = pow(10000, -2.0 * i / s->rope.dims);
}

static struct attend_span *scene_span(struct scene *s, uint32_t rows, uint32_t begin,
				      uint32_t end)
{
	struct attend_span *span = &s->spans[s->span_count++];
	uint16_t *q = need(calloc(rows, s->shape->dqk * 2u));

	fill(q, (uint64_t)rows * s->shape->dqk);
	*span = (struct attend_span){.q = q,
				     .o = need(calloc(rows, s->shape->dv * 4u)),
				     .m = need(calloc(rows, 4)),
				     .l = need(calloc(rows, 4)),
				     .rows = rows,
				     .begin = begin,
				     .end = end};
	return span;
}

static void scene_free(struct scene *s)
{
	for (uint32_t i = 0; i < s->span_count; i++) {
		free((void *)(uintptr_t)s->spans[i].q);
		free(s->spans[i].o);
		free(s->spans[i].m);
		free(s->spans[i].l);
		free((void *)(uintptr_t)s->spans[i].select);
	}
	cu(cuda.mem_free(s->memory_at), "cuMemFree");
	cu(cuda.mem_free(s->pages_at), "cuMemFree");
	free((void *)(uintptr_t)s->host.pages);
	free(s->memory);
}

/* ---- a launch ---- */

struct run {
	struct attend_job job;
	struct attend_plan plan;
	struct attend_plan_bytes bytes;
	uint64_t image_at, planes_at;
	void *scratch;
};

static void run_make(struct run *r, const struct scene *s, uint32_t splits)
{
	void *image;
	const char *fault;

	r->job = (struct attend_job){.shape = s->shape,
				     .kv = &s->device,
				     .rope = &s->rope,
				     .spans = s->spans,
				     .span_count = s->span_count};
	fault = attend_job_fault(&r->job);
	if (!fault)
		fault = attend_plan_fault(&r->job);
	if (fault)
		die("the plan: %s", fault);
	r->bytes = attend_plan_size(&r->job, splits);
	image = need(aligned_alloc(64, r->bytes.image));
	r->scratch = need(aligned_alloc(64, (r->bytes.scratch + 63) / 64 * 64));
	r->image_at = cuda_alloc(r->bytes.image);
	r->planes_at = cuda_alloc(r->bytes.planes);
	cu(cuda.fill(r->planes_at, 0xff, r->bytes.planes, cuda.stream), "cuMemsetD8");
	memset(image, 0, r->bytes.image);
	attend_plan_make(&r->plan, &r->job, splits, image, r->image_at, r->planes_at,
			 r->scratch);
	put(r->image_at, image, r->bytes.image);
	free(image);
}

static void run_launch(const struct run *r)
{
	launch(r->plan.kernel, r->plan.tiles, r->plan.splits, &r->plan.kern);
	if (r->plan.splits > 1)
		launch("kvd_merge", r->plan.rows, 1, &r->plan.merge);
}

static void run_free(struct run *r)
{
	cu(cuda.mem_free(r->image_at), "cuMemFree");
	cu(cuda.mem_free(r->planes_at), "cuMemFree");
	free(r->scratch);
}

/* ---- test ---- */

/* Spans of every kind: all, a part with a delta, chosen tokens, none. */
static void spans_make(struct scene *s)
{
	const uint32_t tokens = s->host.tokens, per = 41, heads = s->shape->heads;
	uint32_t *select = need(calloc(2 * per, sizeof(*select)));

	scene_span(s, 2 * heads + 3, 0, tokens);
	scene_span(s, heads, 3, tokens - 2)->delta = -1234;
	for (uint32_t i = 0; i < 2 * per; i++)
		select[i] = draw(5) ? (uint32_t)draw(tokens) : ATTEND_NONE;
	scene_span(s, 2 * heads, 0, 0)->select = select;
	s->spans[2].per_token = per;
	scene_span(s, 3, 7, 7);
}

static double row_off(const struct scene *s, const struct attend_span *span, uint32_t row,
		      const float *o, float m, float l, double *all)
{
	double off = 0;

	if (!(fabsf(span->m[row] - m) <= 2e-5f) && span->m[row] != m)
		die("m of row %u: %g, not %g", row, (double)span->m[row], (double)m);
	if (!(fabsf(span->l[row] - l) <= 5e-5f * l))
		die("l of row %u: %g, not %g", row, (double)span->l[row], (double)l);
	for (uint32_t d = 0; d < s->shape->dv; d++) {
		const double x = (double)span->o[row * s->shape->dv + d];

		off += (x - (double)o[d]) * (x - (double)o[d]);
		*all += (double)o[d] * (double)o[d];
	}
	return off;
}

/* What the device left in the spans, against fp64 on the CPU. */
static void check_attend(const struct scene *s)
{
	struct attend_span want[SPANS];
	struct attend_job job = {.shape = s->shape,
				 .kv = &s->host,
				 .rope = &s->rope,
				 .spans = want,
				 .span_count = s->span_count};
	double off = 0, all = 0;
	void *scratch;

	for (uint32_t i = 0; i < s->span_count; i++) {
		want[i] = s->spans[i];
		want[i].o = need(calloc(want[i].rows, s->shape->dv * 4u));
		want[i].m = need(calloc(want[i].rows, 4));
		want[i].l = need(calloc(want[i].rows, 4));
	}
	scratch = need(aligned_alloc(
		64, (attend_scratch_bytes(s->shape, ATTEND_ROWS_MAX) + 63) / 64 * 64));
	(void)attend_run(PICK_REF, &job, scratch);
	for (uint32_t i = 0; i < s->span_count; i++)
		for (uint32_t row = 0; row < want[i].rows; row++)
			off += row_off(s, &s->spans[i], row,
				       want[i].o + (size_t)row * s->shape->dv,
				       want[i].m[row], want[i].l[row], &all);
	if (!(sqrt(off / all) <= 2e-3))
		die("o: rms %.1e of fp64's, over 2e-3", sqrt(off / all));
	for (uint32_t i = 0; i < s->span_count; i++) {
		free(want[i].o);
		free(want[i].m);
		free(want[i].l);
	}
	free(scratch);
}

/* The merged plane is what merge_rows() makes of the others. */
static void check_merge(const struct run *r, const uint8_t *planes)
{
	const uint32_t rows = r->plan.rows, dv = r->job.shape->dv;
	const size_t floats = (size_t)rows * (dv + 2u);
	struct merge_part part[MERGE_PARTS_MAX];
	float *want = need(calloc(floats, sizeof(*want)));
	size_t bytes, at = attend_plan_result(&r->plan, &bytes);

	for (uint32_t i = 0; i < r->plan.splits; i++) {
		const float *o = (const float *)(const void *)(planes + i * bytes);

		part[i] = (struct merge_part){o, o + (size_t)rows * dv,
					      o + (size_t)rows * (dv + 1u)};
	}
	merge_rows(want, want + (size_t)rows * dv, want + (size_t)rows * (dv + 1u), part,
		   r->plan.splits, rows, dv);
	if (memcmp(want, planes + at, floats * sizeof(*want)) != 0)
		die("the merge of %u splits has other bits than merge_rows()",
		    r->plan.splits);
	free(want);
}

static void check_splits(struct scene *s, uint32_t splits)
{
	struct run r;
	uint8_t *planes;
	size_t bytes, at;

	run_make(&r, s, splits);
	run_launch(&r);
	planes = download(r.planes_at, r.bytes.planes);
	at = attend_plan_result(&r.plan, &bytes);
	attend_plan_take(&r.plan, planes + at);
	check_attend(s);
	if (splits > 1)
		check_merge(&r, planes);
	free(planes);
	run_free(&r);
}

/* k of all tokens turned in place; behind it the memory is the CPU's, bit by bit. */
static void check_splice(struct scene *s, uint8_t pairs)
{
	struct rope_turn turn;
	struct splice splice = {&turn, VALUE_BF16, s->shape->dqk, 0, 0};
	struct attend_kern_splice arg = {.tokens = s->host.tokens,
					 .heads = s->shape->kv_heads,
					 .values = s->shape->dqk};
	const struct attend_field *k = &s->device.k;
	float table[2 * ROPE_PAIRS_MAX];
	uint8_t *have;

	s->rope.pairs = pairs;
	rope_turn_make(&turn, &s->rope, 4321);
	memcpy(table, turn.cos, turn.dims / 2 * sizeof(float));
	memcpy(table + turn.dims / 2, turn.sin, turn.dims / 2 * sizeof(float));
	arg.src = (struct attend_kern_field){s->memory_at, k->page_stride,
					     k->token_stride, k->head_stride};
	arg.from = (struct attend_kern_pages){s->pages_at, PAGE_TOKENS, FIRST,
					      s->host.tokens, 0};
	arg.dst = arg.src;
	arg.to = arg.from;
	arg.turn = (struct attend_kern_turns){upload(table, sizeof(table)), turn.first,
					      turn.dims, pairs, 0};
	launch("kvd_splice", 7, 1, &arg);
	for (uint32_t t = 0; t < s->host.tokens; t++)
		for (uint32_t h = 0; h < s->shape->kv_heads; h++)
			splice_rows(&splice, token_at(s, false, t, h),
				    token_at(s, false, t, h), 1);
	have = download(s->memory_at, s->bytes);
	if (memcmp(have, s->memory, s->bytes) != 0)
		die("the splice has other bits than splice_rows()");
	free(have);
	cu(cuda.mem_free(arg.turn.at), "cuMemFree");
}

void attend_test(void)
{
	static const struct attend_shape *const shapes[] = {&mla, &gqa128, &gqa64};
	struct scene s;

	module_open();
	for (uint32_t i = 0; i < ARRAY_LEN(shapes); i++) {
		scene_make(&s, shapes[i], cuda.fake ? 60 : 1000);
		spans_make(&s);
		check_splits(&s, 1);
		check_splits(&s, 3);
		check_splits(&s, cuda.fake ? 5 : 64);
		check_splice(&s, ROPE_HALVES);
		check_splice(&s, ROPE_INTERLEAVED);
		scene_free(&s);
	}
	cu(cuda.drv.module_unload(module), "cuModuleUnload");
}

/* ---- bench ---- */

/* Seconds of a run: of many one behind the other. */
static double run_time(const struct run *r)
{
	const int times = cuda.fake ? 1 : LAUNCHES;
	double begin, best = 1e9, s;

	for (int again = 0; again < (cuda.fake ? 1 : 5); again++) {
		cuda_sync();
		begin = clock_s();
		for (int i = 0; i < times; i++)
			run_launch(r);
		cuda_sync();
		s = (clock_s() - begin) / times;
		best = s < best ? s : best;
	}
	return best;
}

static void bench_one(const char *name, const struct attend_shape *shape, uint32_t tokens,
		      uint32_t query_tokens)
{
	static const uint32_t splits[] = {1, 8, 32};
	const uint32_t rows = query_tokens * shape->heads;
	const double kv = 2.0 * tokens * shape->kv_heads *
			  (shape->dqk + (shape->kind == ATTEND_GQA ? shape->dv : 0));
	struct scene s;

	scene_make(&s, shape, tokens);
	scene_span(&s, rows, 0, tokens);
	printf("  %-9s %5u tokens %4u rows:", name, tokens, rows);
	for (uint32_t i = 0; i < ARRAY_LEN(splits); i++) {
		struct run r;
		double took;

		run_make(&r, &s, splits[i]);
		took = run_time(&r);
		printf(" %u splits %.1f us (%.0f GB/s of KV, %.2f TFLOP/s)", splits[i],
		       took * 1e6, kv / took * 1e-9,
		       2e-12 * (shape->dqk + shape->dv) * rows * tokens / took);
		run_free(&r);
	}
	printf("\n");
	scene_free(&s);
}

void attend_bench(void)
{
	const uint32_t n = shrink();

	module_open();
	for (uint32_t tokens = 2048; tokens <= 32768; tokens *= 4) {
		const uint32_t some = tokens / n ? tokens / n : 1;

		if (cuda.fake && tokens > 2048)
			break;
		bench_one("MLA", &mla, some, 1);
		if (!cuda.fake) /* whose fibers take long */
			bench_one("MLA", &mla, some, 8);
		bench_one("GQA 32/8", &gqa128, some, 1);
		if (!cuda.fake)
			bench_one("GQA 32/8", &gqa128, some, 8);
	}
	cu(cuda.drv.module_unload(module), "cuModuleUnload");
}
