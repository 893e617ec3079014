/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A kernel's time is a0 + a1 M + D / Bm + FLOP / F: each row is unpacked and its result
 * written, each token's KV read and packed, and one thread does one after the other. Four
 * calls determine the four: few and many rows, with few and with many tokens. The
 * solutions are kept above zero, which scatter of two nearly equal calls could violate.
 *
 * Medians of the faster half of a few calls: a speed is measured seldom, and a
 * disturbance of some calls would be in all prices. Its size is in the error. The memory
 * is scratch that was just written, so of a small geometry it is in a cache, as KV that
 * is attended in each step is. A request for a known geometry is answered at once, so a
 * peer that repeats it costs nothing. When there are too many, the least recently
 * requested one is dropped. One measurement takes some 10 ms of one of attention_threads,
 * of many heads some 100 ms: the more rows, the fewer tokens.
 *
 * A GPU needs more KV, or its cache is measured, and has more arithmetic. Its engine has
 * priority, so the tokens are as many as about COMPUTE_GPU_US allow, found by calls of
 * four times as many, and after each call the thread rests as the share requires. GPUs of
 * a host are taken to be equal: one that is in use is measured.
 */
#include "daemon/attend/speed.h"

#include <errno.h>
#include <math.h>
#include <string.h>

#include "daemon/attend/attend_impl.h"
#include "daemon/attend/devices.h"
#include "daemon/attend/kernel.h"
#include "daemon/base/clock.h"
#include "daemon/base/context.h"
#include "daemon/base/cursor.h"
#include "daemon/base/mem.h"
#include "daemon/cost/fit.h"
#include "daemon/math/attend.h"
#include "daemon/math/merge.h"
#include "gpu/attend_plan.h"
#include "gpu/attend_run.h"

#define KV_BYTES (8u << 20)
#define KV_GPU_BYTES (64u << 20)
#define TOKENS_GPU_LEAST 64u
#define TOKENS_MOST 8192u
#define TOKENS_FEW 16u
#define ROWS_MANY 256u
/* A peer may request it: no rank is larger. */
#define HEADS_MOST 1024u
#define TOKEN_BYTES_MOST (256u << 10)
#define CALL_FLOP 1e9	   /* of the rows of one query token, at most */
#define CALL_GPU_FLOP 1e10 /* the same of a GPU */
#define CALLS 15u
#define SPEND_US 50e3	/* at each of four points, then no more calls */
#define MANY_PART 4u	/* many rows meet this part of the tokens */
#define FEW_PART 8u	/* and few tokens are at most this part */
#define LEAST_PART 0.1	/* the minimum of each of two constants that share a time */
#define SOME_VALUE 0x3c /* for each byte: a small number in all types */

struct speed {
	struct form form;
	bool gpu;
	struct gpu_device *device; /* that is measured; NULL: the host */
	struct compute *by;	   /* its queue's threads measure */
	struct cost_compute compute;
	struct err why;
	bool known;
	uint64_t at_ns; /* its start */
	uint64_t asked; /* the latest request of it: struct speeds.asked */
	struct list waits;
	struct offload_job job;
	struct attends *attends;
};

struct speeds {
	unsigned int count;
	uint64_t asked;
	struct speed *all[SPEEDS_MAX];
};

struct cost_shape speed_shape(const struct form *form)
{
	const struct attend_shape *s = &form->shape;
	uint32_t kv = value_bytes((enum value_type)s->kv_type);

	/* a decision has one size for q and KV: a wider q is the same row */
	return s->kind == ATTEND_MLA
		       ? cost_shape_mla(s->heads, s->dqk, s->dv, kv, sizeof(float))
		       : cost_shape_gqa(s->heads, s->kv_heads, s->dqk, s->dv, kv,
					sizeof(float));
}

/* ---- measuring ---- */

/* All that a call needs, in one block; but a device's KV is memory of its own. */
struct scratch {
	struct compute *by;
	struct gpu_device *device; /* NULL: the host */
	uint64_t kv_at;		   /* of the device; 0: none */
	uint8_t *memory;
	struct attend_kv kv;
	struct attend_span span;
	struct attend_job job;
	uint64_t token_bytes;
	uint32_t tokens, rows;
};

uint32_t speed_tokens(const struct attend_shape *shape, uint64_t token_bytes, bool gpu)
{
	double work = (gpu ? CALL_GPU_FLOP : CALL_FLOP) /
		      (2.0 * (shape->dqk + shape->dv) * shape->heads);
	uint64_t tokens = (gpu ? KV_GPU_BYTES : KV_BYTES) / token_bytes;

	if (!gpu)
		tokens = tokens > TOKENS_MOST ? TOKENS_MOST : tokens;
	tokens = (double)tokens > work ? (uint64_t)work : tokens;
	return tokens < TOKENS_FEW ? TOKENS_FEW : (uint32_t)tokens;
}

/* The KV's memory; the rest of the block starts at *rest_p. A device's has any values. */
static int scratch_memory(struct scratch *s, uint64_t rest, const uint8_t **kv_p,
			  uint8_t **rest_p)
{
	uint64_t kv = s->token_bytes * s->tokens;
	int r = s->device ? gpu_attend_memory(s->device, kv, &s->kv_at) : 0;

	if (r < 0)
		return err_pass(r);
	if (s->device)
		kv = 0;
	s->memory = mem_alloc(kv + rest);
	if (!s->memory)
		return err_pass(-ENOMEM);
	memset(s->memory, SOME_VALUE, kv + rest);
	*kv_p = s->device ? (const uint8_t *)(uintptr_t)s->kv_at : s->memory;
	*rest_p = s->memory + kv;
	return 0;
}

static int scratch_make(struct scratch *s, const struct attend_shape *shape)
{
	uint32_t value = value_bytes((enum value_type)shape->kv_type);
	uint64_t key = (uint64_t)shape->kv_heads * shape->dqk * value, q, o;
	const uint8_t *kv;
	uint8_t *rest;
	int r;

	s->token_bytes = key + (shape->kind == ATTEND_GQA
					? (uint64_t)shape->kv_heads * shape->dv * value
					: 0);
	s->tokens = speed_tokens(shape, s->token_bytes, s->device);
	s->rows = ROWS_MANY / 2 >= shape->heads ? ROWS_MANY / shape->heads * shape->heads
						: 2 * shape->heads;
	q = (uint64_t)s->rows * shape->dqk * value_bytes((enum value_type)shape->q_type);
	o = (uint64_t)s->rows * (shape->dv + 2u) * sizeof(float);
	r = scratch_memory(s, q + o + 3 * 64, &kv, &rest);
	if (r < 0)
		return err_pass(r);
	s->kv = (struct attend_kv){
		.k = {kv, s->token_bytes, s->token_bytes, (uint64_t)shape->dqk * value},
		.v = {kv + key, s->token_bytes, s->token_bytes,
		      (uint64_t)shape->dv * value},
		.page_tokens = 1,
		.tokens = s->tokens};
	s->span.q = rest;
	s->span.o = (float *)(void *)(rest + (q + 63) / 64 * 64);
	s->span.m = s->span.o + (size_t)s->rows * shape->dv;
	s->span.l = s->span.m + s->rows;
	s->job = (struct attend_job){
		.shape = shape, .kv = &s->kv, .spans = &s->span, .span_count = 1};
	return 0;
}

static void scratch_free(struct scratch *s)
{
	if (s->kv_at)
		gpu_attend_memory_free(s->device, s->kv_at);
	mem_free(s->memory);
}

static double cpu_us(void)
{
	return 1e6 * clock_s_of(CLOCK_THREAD_CPUTIME_ID);
}

static int speed_call(struct scratch *s, uint32_t rows, uint32_t tokens, double *us_p)
{
	double begin = clock_us();
	int r;

	s->span.rows = rows;
	s->span.end = tokens;
	r = kernel_job(compute_kernel(s->by), s->device, &s->job, rows);
	*us_p = clock_us() - begin;
	compute_rest(s->by, *us_p);
	return err_pass(r);
}

static int speed_time(struct scratch *s, uint32_t rows, uint32_t tokens,
		      struct cost_figure *figure)
{
	double us[CALLS], first = clock_us(), cpu = cpu_us(), one;
	unsigned int n = 0;

	for (unsigned int i = 0; i <= CALLS; i++) {
		int r = speed_call(s, rows, tokens, &one);

		if (r < 0)
			return err_pass(r);
		if (i > 0) /* the first one warms up */
			us[n++] = one;
		if (n > 0 && clock_us() - first > SPEND_US)
			break;
	}
	*figure = fit_faster(us, n, (uint32_t)clock_s());
	if (!s->device) /* whose thread waits */
		fit_loaded(figure, clock_us() - first, cpu_us() - cpu);
	return 0;
}

/* A device's speed is not known before: fewer tokens, if all would take too long. */
static int speed_limit(struct scratch *s, uint32_t rows)
{
	uint32_t tokens = TOKENS_GPU_LEAST;
	double us = 0;
	int r = 0;

	while (s->device && r >= 0 && tokens < s->tokens) {
		r = speed_call(s, rows, tokens, &us); /* allocates */
		if (r >= 0)
			r = speed_call(s, rows, tokens, &us);
		if (us > COMPUTE_GPU_US / 2)
			s->tokens = tokens;
		else
			tokens = tokens < s->tokens / 4 ? 4 * tokens : s->tokens;
	}
	return err_pass(r);
}

/* `us` for `amount` units, as a rate. */
static struct cost_figure speed_rate(double amount, double us, double error,
				     const struct cost_figure *as)
{
	return (struct cost_figure){.value = amount / us,
				    .mad = amount / us * error / us / 1.4826,
				    .error = amount / us * error / us,
				    .count = as->count,
				    .at_s = as->at_s};
}

/* us of a token: of its KV and of the rows that attend to it. */
static double speed_slope(const struct cost_figure *few, const struct cost_figure *all,
			  double tokens, double *error_p)
{
	double us = fmax(all->value - few->value, LEAST_PART * all->value);

	*error_p = fit_error_of(all->error, few->error) / tokens;
	return us / tokens;
}

void speed_solve(const struct speed_points *p, double token_bytes, double flop,
		 struct cost_compute *compute)
{
	double more = p->many_rows - p->rows, one_error, all_error;
	double one = speed_slope(&p->few, &p->few_all, p->all - p->tokens, &one_error);
	double all =
		speed_slope(&p->many, &p->many_part, p->part - p->tokens, &all_error);
	double product = fmax((all - one) / more, LEAST_PART * all / p->many_rows);
	double product_error = fit_error_of(one_error, all_error) / more;
	double token = fmax(one - product * p->rows, LEAST_PART * one);
	double row = fmax((p->many.value - p->few.value) / more - product * p->tokens, 0);
	double fixed =
		p->few.value - (row + product * p->tokens) * p->rows - token * p->tokens;

	*compute = (struct cost_compute){
		.fixed = p->few,
		.row = p->many,
		.memory = speed_rate(token_bytes, token,
				     fit_error_of(one_error, product_error * p->rows),
				     &p->few_all),
		.flops = speed_rate(flop, product, product_error, &p->many_part)};
	compute->fixed.value = fmax(fixed, LEAST_PART * p->few.value);
	compute->row.value = row;
	compute->row.mad = fit_error_of(p->few.mad, p->many.mad) / more;
	compute->row.error = fit_error_of(p->few.error, p->many.error) / more;
}

/* rows x tokens of a call: a GPU's is as long as an engine can wait. */
static double speed_batch(const struct attend_shape *shape, bool gpu,
			  const struct cost_compute *compute)
{
	return gpu ? COMPUTE_GPU_US * compute->flops.value /
			       (2.0 * (shape->dqk + shape->dv))
		   : (double)COMPUTE_WORK;
}

static int scratch_measure(struct scratch *s, const struct attend_shape *shape,
			   struct cost_compute *compute)
{
	struct speed_points p = {.rows = shape->heads, .many_rows = s->rows};
	uint32_t few, part;
	int r = speed_limit(s, shape->heads);

	few = s->tokens / FEW_PART < TOKENS_FEW ? s->tokens / FEW_PART : TOKENS_FEW;
	part = s->tokens / MANY_PART;
	p.tokens = few;
	p.all = s->tokens;
	p.part = part;
	if (r >= 0)
		r = speed_time(s, shape->heads, few, &p.few);
	if (r >= 0)
		r = speed_time(s, shape->heads, s->tokens, &p.few_all);
	if (r >= 0)
		r = speed_time(s, s->rows, few, &p.many);
	if (r >= 0)
		r = speed_time(s, s->rows, part, &p.many_part);
	if (r < 0)
		return err_pass(r);
	speed_solve(&p, (double)s->token_bytes, 2.0 * (shape->dqk + shape->dv), compute);
	compute->call = speed_batch(shape, s->device, compute);
	return 0;
}

static int speed_measure(struct compute *by, struct gpu_device *device,
			 const struct attend_shape *shape, struct cost_compute *compute)
{
	struct scratch s = {.by = by, .device = device};
	int r = device ? gpu_attend_ready(device, NULL, NULL) : 0;

	if (r >= 0)
		r = scratch_make(&s, shape);
	if (r >= 0)
		r = scratch_measure(&s, shape, compute);
	scratch_free(&s);
	return err_pass(r);
}

/* ---- requesters ---- */

static void speed_work(struct offload_job *job)
{
	struct speed *speed = container_of(job, struct speed, job);

	const struct attend_shape *shape = &speed->form.shape;
	bool used = !speed->device;

	if (!used) {
		job->result = gpu_device_get(speed->device);
		used = job->result >= 0;
	}
	if (used)
		job->result =
			speed_measure(speed->by, speed->device, shape, &speed->compute);
	if (job->result < 0)
		err_take(&job->err);
	if (used && speed->device)
		gpu_device_put(speed->device);
}

static void speed_done(struct offload_job *job)
{
	struct speed *speed = container_of(job, struct speed, job);
	struct list *link;

	speed->attends->under_way--;
	if (job->result < 0)
		speed->why = job->err;
	while ((link = list_pop_front(&speed->waits))) {
		struct speed_wait *wait = list_entry(link, struct speed_wait, link);

		wait->on_reported(wait, &speed->compute,
				  job->result < 0 ? &speed->why : NULL);
	}
	speed->known = true; /* not before: it could be forgotten */
}

static struct speed *speed_find(const struct speeds *speeds, const struct form *form,
				bool gpu)
{
	const struct attend_shape *y = &form->shape;

	for (unsigned int i = 0; i < speeds->count; i++) {
		const struct attend_shape *x = &speeds->all[i]->form.shape;

		if (x->kind == y->kind && x->q_type == y->q_type &&
		    x->kv_type == y->kv_type && x->heads == y->heads &&
		    x->kv_heads == y->kv_heads && x->dqk == y->dqk && x->dv == y->dv &&
		    !x->softcap == !y->softcap && speeds->all[i]->gpu == gpu)
			return speeds->all[i];
	}
	return NULL;
}

/* Or it has failed. */
static bool speed_is_old(const struct attends *attends, const struct speed *speed)
{
	return speed->known && (speed->why.code != ERR_OK ||
				loop_now_ns(attends->kvd->loop) - speed->at_ns >=
					SPEED_FRESH_S * LOOP_NS_PER_S);
}

bool speed_is_known(const struct attends *attends, const struct form *form, bool gpu)
{
	const struct speed *speed =
		attends->speeds ? speed_find(attends->speeds, form, gpu) : NULL;

	return speed && !speed_is_old(attends, speed);
}

/* A place for one more; NULL: all are in use by measurements. */
static struct speed **speed_place(struct speeds *speeds)
{
	struct speed **oldest = NULL;

	if (speeds->count < SPEEDS_MAX)
		return &speeds->all[speeds->count++];
	for (unsigned int i = 0; i < SPEEDS_MAX; i++) {
		if (speeds->all[i]->known &&
		    (!oldest || speeds->all[i]->asked < (*oldest)->asked))
			oldest = &speeds->all[i];
	}
	if (oldest)
		mem_free(*oldest);
	return oldest;
}

static void speed_start(struct attends *attends, struct speed *speed,
			struct gpu_device *device, struct compute *by)
{
	speed->device = device;
	speed->by = by;
	speed->known = false;
	speed->why = (struct err){.code = ERR_OK};
	speed->at_ns = loop_now_ns(attends->kvd->loop);
	attends->under_way++;
	offload_submit(compute_offload(by), &speed->job);
}

static int speed_new(struct attends *attends, const struct form *form, bool gpu,
		     struct speed **speed_p)
{
	struct speed *speed = mem_zalloc(sizeof(*speed)), **place;

	if (!speed)
		return err_pass(-ENOMEM);
	place = speed_place(attends->speeds);
	if (!place) {
		mem_free(speed);
		return err_raise(ERR_BUSY,
				 "%u geometries are being measured; try again "
				 "later",
				 SPEEDS_MAX);
	}
	speed->form = *form;
	speed->gpu = gpu;
	speed->attends = attends;
	list_init(&speed->waits);
	speed->job = (struct offload_job){.work = speed_work, .done = speed_done};
	*place = speed;
	*speed_p = speed;
	return 0;
}

/* The threads that measure it, and the device. */
static int speed_by(struct attends *attends, const struct form *form, bool gpu,
		    struct gpu_device **device_p, struct compute **by_p)
{
	const struct attend_kv none = {.tokens = 0};
	const struct attend_job job = {.shape = &form->shape, .kv = &none};
	int r = 0;

	*device_p = NULL;
	*by_p = attends->compute;
	if (form->shape.heads > HEADS_MOST ||
	    speed_shape(form).token_bytes > TOKEN_BYTES_MOST)
		return err_raise(ERR_RANGE,
				 "%u heads of %u bytes per token: not measured (limits "
				 "%u and %u)",
				 form->shape.heads, speed_shape(form).token_bytes,
				 HEADS_MOST, TOKEN_BYTES_MOST);
	if (gpu)
		r = devices_any(attends, device_p, by_p);
	else if (!attends->offload)
		r = err_raise(ERR_REQUIRE, "this daemon does not compute attention; set "
					   "attention_threads");
	if (r >= 0 && gpu && attend_plan_fault(&job))
		r = err_raise(ERR_RANGE, "%s: not measured", attend_plan_fault(&job));
	return err_pass(r);
}

int speed_check(struct attends *attends, const struct form *form, bool gpu)
{
	struct gpu_device *device;
	struct compute *by;

	return err_pass(speed_by(attends, form, gpu, &device, &by));
}

int speed_ask(struct attends *attends, const struct form *form, bool gpu,
	      struct speed_wait *wait)
{
	struct gpu_device *device;
	struct compute *by;
	struct speed *speed;
	int r;

	if (!attends->speeds)
		attends->speeds = mem_zalloc(sizeof(*attends->speeds));
	if (!attends->speeds)
		return err_pass(-ENOMEM);
	speed = speed_find(attends->speeds, form, gpu);
	if (!speed || speed_is_old(attends, speed)) {
		r = speed_by(attends, form, gpu, &device, &by);
		if (r >= 0 && !speed)
			r = speed_new(attends, form, gpu, &speed);
		if (r < 0)
			return err_pass(r);
		speed_start(attends, speed, device, by);
	}
	speed->asked = ++attends->speeds->asked;
	if (speed->known)
		wait->on_reported(wait, &speed->compute, NULL);
	else
		list_push_back(&speed->waits, &wait->link);
	return 0;
}

void speed_forget(struct speed_wait *wait)
{
	list_remove(&wait->link);
}

void speeds_free(struct speeds *speeds)
{
	if (!speeds)
		return;
	for (unsigned int i = 0; i < speeds->count; i++)
		mem_free(speeds->all[i]);
	mem_free(speeds);
}

/* ---- merge and splice ---- */

#define HOME_ROWS 128u
#define HOME_DIMS 512u
#define HOME_ROPE 64u

static struct cost_figure home_figure(const double *us, double by)
{
	struct cost_figure figure = fit_figure(us, CALLS, (uint32_t)clock_s());

	figure.value /= by;
	figure.mad /= by;
	figure.error /= by;
	return figure;
}

static void home_merge(float *values, struct cost_home *home)
{
	float *m = values + (size_t)2 * HOME_ROWS * HOME_DIMS;
	const struct merge_part parts[2] = {{values, m, m + HOME_ROWS},
					    {values + (size_t)HOME_ROWS * HOME_DIMS,
					     m + 2 * HOME_ROWS, m + 3 * HOME_ROWS}};
	double few[CALLS], many[CALLS];

	for (unsigned int i = 0; i < CALLS; i++) {
		double begin = clock_us(), middle;

		merge_rows(values, m, m + HOME_ROWS, parts, 2, 1, HOME_DIMS);
		middle = clock_us();
		merge_rows(values, m, m + HOME_ROWS, parts, 2, HOME_ROWS, HOME_DIMS);
		few[i] = middle - begin;
		many[i] = clock_us() - middle;
	}
	home->merge = home_figure(few, 1);
	home->merge_row = home_figure(many, HOME_ROWS);
}

static void home_splice(float *values, struct cost_home *home)
{
	double inv_freq[HOME_ROPE / 2], few[CALLS], many[CALLS];
	const struct rope rope = {.dims = HOME_ROPE, .inv_freq = inv_freq};
	const struct splice splice = {.type = VALUE_BF16,
				      .values = HOME_ROPE,
				      .dst_stride = HOME_ROPE * 2,
				      .src_stride = HOME_ROPE * 2};

	for (unsigned int i = 0; i < HOME_ROPE / 2; i++)
		inv_freq[i] = pow(10000, -2.0 * i / HOME_ROPE);
	for (unsigned int i = 0; i < CALLS; i++) {
		double begin = clock_us(), middle;
		struct splice now = splice;
		struct rope_turn turn;

		rope_turn_make(&turn, &rope, 1000);
		middle = clock_us();
		now.turn = &turn;
		splice_rows(&now, values, values, HOME_ROWS);
		few[i] = middle - begin;
		many[i] = clock_us() - middle;
	}
	home->splice = home_figure(few, 1);
	home->splice_token = home_figure(many, HOME_ROWS);
}

int speed_home(struct cost_home *home)
{
	size_t count = (size_t)2 * HOME_ROWS * (HOME_DIMS + 2);
	cleanup_free float *values = mem_alloc(count * sizeof(float));

	if (!values)
		return err_pass(-ENOMEM);
	for (size_t i = 0; i < count; i++)
		values[i] = 1;
	*home = (struct cost_home){.merge = {.count = 0}};
	home_merge(values, home);
	home_splice(values, home);
	return 0;
}

/* ---- to others ---- */

static void figure_put(const struct cost_figure *figure, struct cursor *out)
{
	const double both[2] = {figure->value, figure->error};

	for (unsigned int i = 0; i < 2; i++) {
		uint64_t bits;

		memcpy(&bits, &both[i], sizeof(bits));
		cursor_put_u64(out, bits);
	}
}

static bool figure_get(struct cursor *in, struct cost_figure *figure)
{
	double both[2];

	for (unsigned int i = 0; i < 2; i++) {
		uint64_t bits = cursor_get_u64(in);

		memcpy(&both[i], &bits, sizeof(bits));
		if (!isfinite(both[i]) || both[i] < 0)
			return false;
	}
	*figure = (struct cost_figure){.value = both[0],
				       .error = both[1],
				       .mad = both[1],
				       .count = CALLS,
				       .at_s = (uint32_t)clock_s()};
	return true;
}

void speed_put(const struct cost_compute *compute, struct cursor *out)
{
	figure_put(&compute->fixed, out);
	figure_put(&compute->row, out);
	figure_put(&compute->memory, out);
	figure_put(&compute->flops, out);
}

int speed_get(struct cursor *in, const struct attend_shape *shape, bool gpu,
	      struct cost_compute *compute)
{
	*compute = (struct cost_compute){.call = 0};
	if (!figure_get(in, &compute->fixed) || !figure_get(in, &compute->row) ||
	    !figure_get(in, &compute->memory) || !figure_get(in, &compute->flops) ||
	    !(compute->memory.value > 0) || !(compute->flops.value > 0))
		return err_raise(ERR_PROTO, "speed: must be a number above 0");
	compute->call = speed_batch(shape, gpu, compute);
	return cursor_check(in, "a speed");
}
