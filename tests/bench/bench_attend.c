/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_attend [TOKENS]: the attention kernels on one core, beside the limit of memory.
 *
 * For DeepSeek's MLA shape (576 values a token, of which 512 are v) and a GQA shape (head
 * of 128, 8 heads of K and V for 32 of q), bf16: microseconds of one call, for each
 * kernel that this machine runs and numbers of rows. A line is
 *
 *   SHAPE KERNEL ROWS BEST MEDIAN
 *
 * and the kernel "memory" is the time in which the same bytes of K and V are read once,
 * by loads of 64 bytes. "slice" is the longest time between two questions whether to
 * stop, of the most rows that the kernel was tried with. Bytes are warm: a chunk's layer
 * lies in L3 or L2 after the first call. "cold" is the widest kernel on another layer
 * each time, of 256 MiB. "peak-KERNEL" of the shape "core" is the arithmetic alone, in
 * GFLOP/s: products of registers, with no load beside them. Then the merge of two
 * partials, and a splice by its bytes.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/math/attend.h"
#include "daemon/math/merge.h"

#define COLD_BYTES (UINT64_C(256) << 20)
#define ROWS_MOST 1024u
#define SPEND_NS 300000000.0 /* on one figure, if it has so many repetitions */
#define REPEATS_MOST 400u

static const uint32_t row_counts[] = {1, 16, 64, 256, 1024};

struct bench {
	struct attend_shape shape;
	struct attend_kv kv;
	struct attend_span span;
	struct attend_job job;
	uint64_t layer_bytes;
	uint8_t *memory; /* COLD_BYTES of layers */
	void *scratch;
	double best, median; /* of the last figure, us */
};

static double now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
	return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *get(size_t bytes)
{
	void *p = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);

	if (!p)
		exit(1);
	memset(p, 0, bytes);
	return p;
}

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

/* Repeats a work until enough was spent on it. */
static void measure(struct bench *bench, void (*work)(struct bench *bench, uint32_t i))
{
	double times[REPEATS_MOST], begin, spent = 0;
	uint32_t n;

	work(bench, 0);
	for (n = 0; n < REPEATS_MOST && (n < 5 || spent < SPEND_NS); n++) {
		begin = now_ns();
		work(bench, n);
		times[n] = now_ns() - begin;
		spent += times[n];
	}
	qsort(times, n, sizeof(times[0]), by_value);
	bench->best = times[0] / 1e3;
	bench->median = times[n / 2] / 1e3;
}

static enum pick_isa isa;

static void attend_warm(struct bench *bench, uint32_t i)
{
	(void)i;
	if (attend_run(isa, &bench->job, bench->scratch) != ATTEND_DONE)
		exit(1);
}

static struct {
	double last, longest;
} slice;

static bool on_stop(void *arg)
{
	double now = now_ns();

	(void)arg;
	slice.longest =
		now - slice.last > slice.longest ? now - slice.last : slice.longest;
	slice.last = now;
	return false;
}

/* The shortest of the longest of some calls: caches and interrupts lengthen others. */
static void tell_slice(const char *name, struct bench *bench)
{
	double best = 1e18;
	int i;

	bench->job.stop = on_stop;
	for (i = 0; i < 5; i++) {
		slice.longest = 0;
		slice.last = now_ns();
		attend_warm(bench, 0);
		on_stop(NULL);
		best = slice.longest < best ? slice.longest : best;
	}
	bench->job.stop = NULL;
	printf("%s slice-%s %u %.1f %.1f\n", name, pick_name(isa), bench->span.rows,
	       best / 1e3, best / 1e3);
}

static void attend_cold(struct bench *bench, uint32_t i)
{
	uint64_t layers = COLD_BYTES / bench->layer_bytes;
	struct attend_kv kv = bench->kv;

	bench->kv.k.base += i % layers * bench->layer_bytes;
	bench->kv.v.base += i % layers * bench->layer_bytes;
	attend_warm(bench, i);
	bench->kv = kv;
}

typedef uint64_t line __attribute__((vector_size(64)));

static void read_layer(struct bench *bench, uint32_t i)
{
	const line *p = (const line *)(const void *)bench->memory, *end;
	line a = {0}, b = {0}, c = {0}, d = {0};
	volatile uint64_t sink;

	(void)i;
	end = p + bench->layer_bytes / sizeof(line) / 4 * 4;
	for (; p < end; p += 4) {
		a ^= p[0];
		b ^= p[1];
		c ^= p[2];
		d ^= p[3];
	}
	a ^= b ^ c ^ d;
	sink = a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
	(void)sink;
}

static void fill(uint16_t *values, size_t count)
{
	uint64_t seed = 1;
	size_t i;

	for (i = 0; i < count; i++) {
		seed = seed * UINT64_C(6364136223846793005) + 1442695040888963407u;
		values[i] = value_to_bf16((float)(seed >> 40) / 0x1p24f - 0.5f);
	}
}

/* ---- the limit of arithmetic ---- */

#define PEAK_TURNS 20000u
#define PEAK_SUMS 16u /* independent: more than a product's latency */

#if defined(__x86_64__)
#include <immintrin.h>

static volatile float peak_sink;

__attribute__((target("avx512f"))) static double peak_avx512(void)
{
	__m512 sum[PEAK_SUMS], x = _mm512_set1_ps(peak_sink);
	uint32_t i, j;

	for (j = 0; j < PEAK_SUMS; j++)
		sum[j] = x;
	for (i = 0; i < PEAK_TURNS; i++)
#pragma GCC unroll 16
		for (j = 0; j < PEAK_SUMS; j++)
			sum[j] = _mm512_fmadd_ps(x, x, sum[j]);
	for (j = 1; j < PEAK_SUMS; j++)
		sum[0] = _mm512_add_ps(sum[0], sum[j]);
	peak_sink = _mm512_cvtss_f32(sum[0]);
	return 2.0 * 16 * PEAK_SUMS * PEAK_TURNS;
}

__attribute__((target("avx512f,avx512bf16"))) static double peak_bf16(void)
{
	__m512 sum[PEAK_SUMS];
	__m512i x = _mm512_set1_epi32((int)peak_sink);
	uint32_t i, j;

	for (j = 0; j < PEAK_SUMS; j++)
		sum[j] = _mm512_castsi512_ps(x);
	for (i = 0; i < PEAK_TURNS; i++)
#pragma GCC unroll 16
		for (j = 0; j < PEAK_SUMS; j++)
			sum[j] = _mm512_dpbf16_ps(sum[j], (__m512bh)x, (__m512bh)x);
	for (j = 1; j < PEAK_SUMS; j++)
		sum[0] = _mm512_add_ps(sum[0], sum[j]);
	peak_sink = _mm512_cvtss_f32(sum[0]);
	return 2.0 * 32 * PEAK_SUMS * PEAK_TURNS;
}

__attribute__((target("amx-tile,amx-bf16"))) static double peak_amx(void)
{
	struct {
		uint8_t palette, start, reserved[14];
		uint16_t columns[16];
		uint8_t rows[16];
	} config = {.palette = 1};
	uint32_t i;

	for (i = 0; i < 8; i++) {
		config.columns[i] = 64;
		config.rows[i] = 16;
	}
	_tile_loadconfig(&config); /* all tiles are 0 */
	for (i = 0; i < PEAK_TURNS; i++) {
		_tile_dpbf16ps(0, 4, 6);
		_tile_dpbf16ps(1, 5, 6);
		_tile_dpbf16ps(2, 4, 7);
		_tile_dpbf16ps(3, 5, 7);
	}
	_tile_release();
	return 2.0 * 16 * 16 * 32 * 4 * PEAK_TURNS;
}

static double (*const peaks[PICK_ISAS])(void) = {
	[PICK_AVX512] = peak_avx512,
	[PICK_BF16] = peak_bf16,
	[PICK_AMX] = peak_amx,
};
#else
static double (*const peaks[PICK_ISAS])(void) = {NULL};
#endif

static double peak_flops;

static void peak_work(struct bench *bench, uint32_t i)
{
	(void)bench;
	(void)i;
	peak_flops = peaks[isa]();
}

static void bench_peaks(struct bench *bench)
{
	for (isa = PICK_REF; isa < PICK_ISAS; isa++) {
		if (!peaks[isa] || !pick_has(isa))
			continue;
		measure(bench, peak_work);
		printf("core peak-%s 0 %.1f %.1f\n", pick_name(isa),
		       peak_flops / bench->best / 1e3, peak_flops / bench->median / 1e3);
	}
}

/* The slow ones are not tried with all. */
static uint32_t rows_most(enum pick_isa of)
{
	return of == PICK_REF ? 16 : of == PICK_VECTOR ? 256 : ROWS_MOST;
}

static void bench_shape(const char *name, struct bench *bench, uint32_t tokens)
{
	const struct attend_shape *shape = &bench->shape;
	uint64_t token_bytes = 2u * shape->dqk * shape->kv_heads;
	uint32_t i;

	bench->layer_bytes = token_bytes * tokens * (shape->kind == ATTEND_MLA ? 1 : 2);
	bench->kv = (struct attend_kv){
		.k = {bench->memory, token_bytes * 16, token_bytes, 2u * shape->dqk},
		.v = {bench->memory + token_bytes * tokens, token_bytes * 16, token_bytes,
		      2u * shape->dv},
		.page_tokens = 16,
		.tokens = tokens,
	};
	bench->span.end = tokens;
	bench->job = (struct attend_job){
		.shape = shape, .kv = &bench->kv, .spans = &bench->span, .span_count = 1};
	bench->scratch = get(attend_scratch_bytes(shape, ROWS_MOST));
	measure(bench, read_layer);
	printf("%s memory 0 %.1f %.1f\n", name, bench->best, bench->median);
	for (i = 0; i < sizeof(row_counts) / sizeof(row_counts[0]); i++) {
		if (shape->kind == ATTEND_GQA && row_counts[i] < 16)
			continue; /* a row of one head reads an eighth */
		bench->span.rows = row_counts[i];
		if (shape->kind == ATTEND_GQA && row_counts[i] < shape->heads)
			bench->span.rows = shape->heads;
		for (isa = PICK_REF; isa < PICK_ISAS; isa++) {
			if (!pick_has(isa) || row_counts[i] > rows_most(isa))
				continue;
			measure(bench, attend_warm);
			printf("%s %s %u %.1f %.1f\n", name, pick_name(isa),
			       bench->span.rows, bench->best, bench->median);
			if (row_counts[i] == rows_most(isa))
				tell_slice(name, bench);
		}
		isa = PICK_AUTO;
		measure(bench, attend_cold);
		printf("%s cold %u %.1f %.1f\n", name, bench->span.rows, bench->best,
		       bench->median);
		fflush(stdout);
	}
	free(bench->scratch);
}

static float *merged[3];

static void merge_two(struct bench *bench, uint32_t i)
{
	struct merge_part parts[2] = {{bench->span.o, bench->span.m, bench->span.l},
				      {bench->span.o, bench->span.m, bench->span.l}};

	(void)i;
	merge_rows(merged[0], merged[1], merged[2], parts, 2, bench->span.rows, 512);
}

static struct rope_turn turn;

static void splice_layer(struct bench *bench, uint32_t i)
{
	struct splice splice = {&turn, VALUE_BF16, 576, 1152, 1152};

	(void)i;
	splice_rows(&splice, bench->memory + COLD_BYTES / 2, bench->memory,
		    bench->kv.tokens);
}

int main(int argc, char **argv)
{
	uint32_t tokens = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 2048, i;
	static double frequencies[32];
	struct rope rope = {512, 64, ROPE_INTERLEAVED, frequencies};
	struct bench bench = {0};

	if (!tokens || tokens > 32768)
		return 2;
	bench.memory = get(COLD_BYTES);
	fill((uint16_t *)(void *)bench.memory, COLD_BYTES / 2);
	bench.span.q = bench.memory + COLD_BYTES / 2;
	bench.span.o = get(ROWS_MOST * 512 * 4);
	bench.span.m = get(ROWS_MOST * 4);
	bench.span.l = get(ROWS_MOST * 4);
	bench_peaks(&bench);
	bench.shape = (struct attend_shape){ATTEND_GQA, VALUE_BF16, VALUE_BF16, 32, 8,
					    128,	128,	    0.088f,	0};
	bench_shape("gqa", &bench, tokens);
	bench.shape = (struct attend_shape){ATTEND_MLA, VALUE_BF16, VALUE_BF16, 16, 1,
					    576,	512,	    0.072f,	0};
	bench_shape("mla", &bench, tokens);
	for (i = 0; i < 3; i++)
		merged[i] = get(ROWS_MOST * 512 * 4);
	for (i = 16; i <= 1024; i *= 8) {
		bench.span.rows = i;
		measure(&bench, merge_two);
		printf("mla merge %u %.1f %.1f\n", i, bench.best, bench.median);
	}
	for (i = 0; i < 32; i++)
		frequencies[i] = 1.0 / (1 + i);
	rope_turn_make(&turn, &rope, 12345);
	measure(&bench, splice_layer);
	printf("mla splice 0 %.1f %.1f\n", bench.best, bench.median);
	return 0;
}
