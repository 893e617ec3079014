/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_plan: what a plan costs, in ns a row, beside a plain loop that only
 * writes the same rows out.
 *
 *   slices     8 of 16 heads of 40 layers, K and V, 16-token pages at random
 *              places: 100 000 rows, from page lists to rows
 *   equal      equal layouts, contiguous pages: few runs, whatever the length
 *   tokens     pages of one token at random places: every row a page of its own
 *   crossed    one tensor for all layers, page by page (cross-layer blocks):
 *              the rows of all layers lie between each other
 *   1M pages   the longest page list, out of order: the cost of sorting it
 *   transpose  NHD to HND, 8 heads
 *
 * Figures are CPU time, the best of several rounds, the plan and the loop taking
 * turns, so that both see the same machine. `+rows` is the plan and its rows
 * written out; `loop` only writes as many rows; `ratio` is the one by the other.
 */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/plan/plan.h"

#define ROUNDS 15
#define HEAD 256u /* bytes: head_dim 128 of bf16 */

struct row {
	uint64_t src, dst, len;
	uint32_t src_buffer, dst_buffer;
};

struct bench {
	const char *name;
	uint32_t layers, page_tokens, pages; /* pages used */
	uint32_t src_heads, dst_heads;
	bool shuffled, crossed, src_hnd;
};

static const struct bench benches[] = {
	{"slices", 40, 16, 79, 16, 8, true, false, false},
	{"slices, long", 40, 16, 8192, 16, 8, true, false, false},
	{"equal", 40, 16, 79, 8, 8, false, false, false},
	{"equal, long", 40, 16, 8192, 8, 8, false, false, false},
	{"equal, scattered", 40, 16, 1264, 8, 8, true, false, false},
	{"tokens", 40, 1, 1264, 16, 8, true, false, false},
	{"crossed", 40, 16, 79, 16, 8, true, true, false},
	{"crossed, long", 40, 16, 1264, 16, 8, true, true, false},
	{"crossed, equal", 40, 16, 8192, 8, 8, false, true, false},
	{"one layer, 1M pages", 1, 1, 1u << 20, 16, 8, true, false, false},
	{"transpose", 40, 16, 79, 8, 8, true, false, true},
};

static void field_make(const struct bench *b, struct layout_field *f, uint32_t layer,
		       uint32_t kv, uint32_t heads, bool hnd, uint32_t pool)
{
	uint64_t token = (uint64_t)heads * HEAD, page = token * b->page_tokens;

	snprintf(f->name, sizeof(f->name), "%s", kv ? "v" : "k");
	f->token_stride = hnd ? HEAD : token;
	f->unit_stride = hnd ? (uint64_t)HEAD * b->page_tokens : HEAD;
	f->unit_bytes = HEAD;
	f->units = heads;
	f->total_units = 16;
	if (b->crossed) { /* [page][layer][k or v][token][head] */
		f->page_stride = page * 2 * b->layers;
		f->offset = page * (2 * layer + kv);
	} else {
		f->page_stride = page;
		f->buffer = 2 * layer + kv;
		(void)pool;
	}
}

static struct layout *side_make(const struct bench *b, uint32_t heads, bool hnd,
				uint32_t pool)
{
	struct layout *l = calloc(1, sizeof(*l));
	struct layout_view *v = calloc(1, sizeof(*v));
	uint64_t page = (uint64_t)heads * HEAD * b->page_tokens;

	l->buffer_count = b->crossed ? 1 : 2 * b->layers;
	l->buffers = calloc(l->buffer_count, sizeof(*l->buffers));
	for (uint32_t i = 0; i < l->buffer_count; i++)
		l->buffers[i] = page * pool * (b->crossed ? 2 * b->layers : 1);
	l->view_count = 1;
	l->views = v;
	snprintf(v->name, sizeof(v->name), "kv");
	v->page_tokens = b->page_tokens;
	v->pages = pool;
	v->layer_count = b->layers;
	v->layers = calloc(b->layers, sizeof(*v->layers));
	for (uint32_t i = 0; i < b->layers; i++) {
		v->layers[i].layer = i;
		v->layers[i].field_count = 2;
		v->layers[i].fields = calloc(2, sizeof(struct layout_field));
		for (uint32_t j = 0; j < 2; j++)
			field_make(b, &v->layers[i].fields[j], i, j, heads, hnd, pool);
	}
	if (layout_check(l) < 0) {
		fprintf(stderr, "%s\n", err_last()->text);
		exit(1);
	}
	return l;
}

static uint32_t *pages_make(const struct bench *b, uint32_t pool, uint64_t seed)
{
	uint32_t *p = malloc(pool * sizeof(*p));

	for (uint32_t i = 0; i < pool; i++)
		p[i] = i;
	for (uint32_t i = pool; b->shuffled && i > 1; i--) {
		uint32_t j, t = p[i - 1];

		seed = seed * 6364136223846793005u + 1442695040888963407u;
		j = (uint32_t)((seed >> 33) % i);
		p[i - 1] = p[j];
		p[j] = t;
	}
	return p;
}

/* The plain loop: write the rows of the runs out, and nothing else. */
static __attribute__((noinline)) size_t expand(const struct plan *plan, struct row *rows)
{
	size_t n = 0;

	for (size_t i = 0; i < plan->run_count; i++) {
		const struct plan_run *run = &plan->runs[i];

		for (uint64_t r = 0; r < run->count; r++)
			rows[n++] = (struct row){
				.src = run->src + r * (uint64_t)run->src_stride,
				.dst = run->dst + r * (uint64_t)run->dst_stride,
				.len = run->len,
				.src_buffer = run->src_buffer,
				.dst_buffer = run->dst_buffer};
	}
	return n;
}

static __attribute__((noinline)) void write_rows(struct row *rows, size_t count)
{
	for (size_t i = 0; i < count; i++)
		rows[i] = (struct row){.src = i * 4096,
				       .dst = i * 2048,
				       .len = 2048,
				       .src_buffer = (uint32_t)(i >> 10),
				       .dst_buffer = (uint32_t)(i >> 10)};
}

static void keep(const void *p)
{
	__asm__ volatile("" : : "r"(p) : "memory");
}

static void bench_run(const struct bench *b)
{
	uint32_t pool = b->shuffled ? b->pages * 2 : b->pages;
	struct layout *src = side_make(b, b->src_heads, b->src_hnd, pool);
	struct layout *dst = side_make(b, b->dst_heads, false, pool);
	uint32_t *sp = pages_make(b, pool, 1), *dp = pages_make(b, pool, 2);
	struct plan_map map = {.view = "kv",
			       .src_pages = sp,
			       .src_page_count = b->pages,
			       .dst_pages = dp,
			       .dst_page_count = b->pages};
	struct plan_request req = {.src = src, .dst = dst, .maps = &map, .map_count = 1};
	uint64_t make = UINT64_MAX, out = UINT64_MAX, loop = UINT64_MAX;
	struct plan *plan = NULL;
	struct row *rows = NULL;
	uint64_t count = 0, got;

	for (int i = 0; i < ROUNDS; i++) {
		uint64_t t0, t1, t2, t3;

		plan_free(plan);
		t0 = clock_of(CLOCK_THREAD_CPUTIME_ID);
		if (plan_make(&req, &plan) < 0) {
			fprintf(stderr, "%s: %s\n", b->name, err_last()->text);
			exit(1);
		}
		t1 = clock_of(CLOCK_THREAD_CPUTIME_ID);
		count = plan->rows;
		if (!rows) {
			rows = malloc(count * sizeof(*rows));
			memset(rows, 1, count * sizeof(*rows)); /* touched */
		}
		t2 = clock_of(CLOCK_THREAD_CPUTIME_ID);
		got = expand(plan, rows);
		keep(rows);
		t3 = clock_of(CLOCK_THREAD_CPUTIME_ID);
		assert(got == count);
		make = t1 - t0 < make ? t1 - t0 : make;
		out = t3 - t2 < out ? t3 - t2 : out;
		t2 = clock_of(CLOCK_THREAD_CPUTIME_ID);
		write_rows(rows, count);
		keep(rows);
		t3 = clock_of(CLOCK_THREAD_CPUTIME_ID);
		loop = t3 - t2 < loop ? t3 - t2 : loop;
	}
	printf("%-20s %8llu %8zu %9.2f %9.3f %9.3f %9.3f %8.1f %9.1f\n", b->name,
	       (unsigned long long)count, plan->run_count, (double)make / 1e3,
	       (double)make / (double)count, (double)(make + out) / (double)count,
	       (double)loop / (double)count, (double)(make + out) / (double)loop,
	       (double)plan_memory(plan) / 1024);
	plan_free(plan);
	free(rows);
	free(sp);
	free(dp);
}

int main(void)
{
	printf("%-20s %8s %8s %9s %9s %9s %9s %8s %9s\n", "case", "rows", "runs",
	       "plan us", "ns/row", "+rows", "loop", "ratio", "KiB");
	for (size_t i = 0; i < sizeof(benches) / sizeof(benches[0]); i++)
		bench_run(&benches[i]);
	return 0;
}
