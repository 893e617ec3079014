/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The kernels' arithmetic, on the CPU that runs every lane of it, against a loop
 * over bytes; the lists that a lane makes of rows; and the image that nvcc made.
 */
#include "tests/gpu/kernels_ref.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "gpu/gpu.h"
#include "gpu/kernels_image.h"
#include "gpu/lane.h"
#include "gpu/list.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"
#include "tests/gpu/module_wait.h"

#define AREA (UINT64_C(256) << 10)
#define FAKE(symbol) ((__typeof__(symbol) *)gpu_fake_symbol(#symbol))

static uint64_t seed;

static uint64_t draw(uint64_t below)
{
	seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
	return (seed >> 33) % below;
}

/* ---- rows ---- */

/* Distances that keep rows apart in the destination, or any in the source. */
static struct kern_rows rows_draw(const uint8_t *dst, const uint8_t *src, uint64_t dst_at)
{
	static const uint32_t lens[] = {1,   2,	  3,   7,    8,	   15,	16,  17,
					31,  32,  33,  63,   64,   100, 128, 255,
					256, 257, 512, 1000, 1024, 4096};
	uint32_t len = lens[draw(ARRAY_LEN(lens))], count, outer;
	struct kern_rows r = {.len = len};
	uint64_t gap = draw(2) ? 0 : draw(40);

	count = (uint32_t)(1 + draw(9));
	outer = (uint32_t)(1 + draw(4));
	if (draw(2)) /* tokens inside, heads outside */
		r.dst_stride = (int64_t)(len + gap), r.dst_outer = r.dst_stride * count;
	else /* the other way round */
		r.dst_outer = (int64_t)(len + gap), r.dst_stride = r.dst_outer * outer;
	r.count = count;
	r.outer = outer;
	r.dst = (uintptr_t)dst + dst_at;
	r.src_stride = (int64_t)draw(1000) - 500;
	r.src_outer = (int64_t)draw(6000) - 3000;
	r.src = (uintptr_t)src + AREA / 2 + draw(64);
	return r;
}

static void rows_naive(const struct kern_rows *r)
{
	for (uint32_t o = 0; o < r->outer; o++)
		for (uint32_t c = 0; c < r->count; c++)
			for (uint32_t i = 0; i < r->len; i++)
				((uint8_t *)(uintptr_t)r->dst)[o * r->dst_outer +
							       c * r->dst_stride + i] =
					((const uint8_t *)(uintptr_t)
						 r->src)[o * r->src_outer +
							 c * r->src_stride + i];
}

static uint64_t rows_end(const struct kern_rows *r)
{
	return r->len + (uint64_t)r->dst_stride * (r->count - 1) +
	       (uint64_t)r->dst_outer * (r->outer - 1);
}

static uint8_t *area_new(void)
{
	void *area = NULL;

	assert_int_equal(posix_memalign(&area, 64, AREA), 0);
	return area;
}

static void rows_of_any_form_are_exact(void **state)
{
	uint8_t *src = area_new(), *dst = area_new(), *want = area_new();

	(void)state;
	for (uint64_t i = 0; i < AREA; i++)
		src[i] = (uint8_t)draw(256);
	for (seed = 1; seed < 4000;) {
		uint64_t was = seed, at = draw(64);
		struct kern_rows list[6];
		uint32_t count = 0;

		memset(dst, 0xee, AREA);
		memset(want, 0xee, AREA);
		while (count < ARRAY_LEN(list)) {
			struct kern_rows r = rows_draw(dst, src, at), n = r;

			if (at + rows_end(&r) > AREA)
				break;
			n.dst = (uintptr_t)want + at;
			rows_naive(&n);
			at += rows_end(&r) + draw(20);
			list[count++] = r;
		}
		assert_true(kernels_ref_rows(list, NULL, count, NULL));
		if (memcmp(dst, want, AREA) != 0)
			fail_msg("seed %llu", (unsigned long long)was);
		seed = was + 1;
	}
	free(src);
	free(dst);
	free(want);
}

/* Every pair of alignments, every length up to three vectors: one row, all lanes. */
static void row_of_any_alignment_is_exact(void **state)
{
	uint8_t src[160] __attribute__((aligned(16))),
		dst[160] __attribute__((aligned(16))), want[160];

	(void)state;
	for (uint32_t i = 0; i < sizeof(src); i++)
		src[i] = (uint8_t)(i + 1);
	for (uint32_t a = 0; a < 16; a++) {
		for (uint32_t b = 0; b < 16; b++) {
			for (uint32_t len = 0; len < 100; len++) {
				const struct kern_rows row = {.dst = (uintptr_t)dst + a,
							      .src = (uintptr_t)src + b,
							      .len = len,
							      .count = 1,
							      .outer = 1};

				memset(dst, 0xee, sizeof(dst));
				memset(want, 0xee, sizeof(want));
				memcpy(want + a, src + b, len);
				assert_true(kernels_ref_rows(&row, NULL, 1, NULL));
				assert_memory_equal(dst, want, sizeof(dst));
			}
		}
	}
}

/* Rows with places: of any length and alignment, and of those that go four at a time. */
static void rows_with_places_are_exact(void **state)
{
	static const uint32_t lens[] = {1,   15,  16,  17,  48,	 64,  100,
					256, 272, 512, 513, 528, 4096};
	uint8_t *src = area_new(), *dst = area_new(), *want = area_new();

	(void)state;
	seed = 77;
	for (uint64_t i = 0; i < AREA; i++)
		src[i] = (uint8_t)draw(256);
	for (unsigned int round = 0; round < 1000; round++) {
		const uint32_t len = lens[draw(ARRAY_LEN(lens))];
		const uint64_t grain = draw(2) ? 16 : 1;
		struct kern_place places[3 + KERN_PLACES_MAX];
		struct kern_rows entry = {.dst = 3,
					  .len = len,
					  .count = (uint32_t)(1 + draw(KERN_PLACES_MAX)),
					  .outer = 1,
					  .flags = KERN_ROWS_PLACES};

		if (grain == 16 && len % 16 == 0)
			entry.flags |= KERN_ROWS_ALIGNED;
		memset(places, 0, sizeof(places)); /* that are not its own */
		memset(dst, 0xee, AREA);
		memset(want, 0xee, AREA);
		for (uint64_t i = 0, at = draw(10) * grain; i < entry.count; i++) {
			uint64_t from = draw((AREA - len) / grain) * grain;

			places[3 + i] = (struct kern_place){(uintptr_t)dst + at,
							    (uintptr_t)src + from};
			memcpy(want + at, src + from, len);
			at += (len + draw(50) + grain - 1) / grain * grain;
		}
		assert_true(kernels_ref_rows(&entry, places, 1, NULL));
		assert_memory_equal(dst, want, AREA);
	}
	free(src);
	free(dst);
	free(want);
}

static void *nowhere(void *arg, uint64_t address, uint64_t bytes, bool writing)
{
	(void)bytes;
	return writing ? arg : address ? NULL : arg;
}

static void row_missing_is_reported(void **state)
{
	uint8_t byte = 0;
	const struct kernels_reach reach = {.at = nowhere, .arg = &byte};
	const struct kern_rows row = {.src = 4096, .len = 1, .count = 1, .outer = 1};

	(void)state;
	assert_false(kernels_ref_rows(&row, NULL, 1, &reach));
}

/* A page of tokens by heads becomes one of heads by tokens, in one entry. */
static void heads_and_tokens_change_places(void **state)
{
	enum { TOKENS = 16, HEADS = 8, BYTES = 256 };
	static uint8_t nhd[TOKENS][HEADS][BYTES], hnd[HEADS][TOKENS][BYTES];
	const struct kern_rows page = {.dst = (uintptr_t)hnd,
				       .src = (uintptr_t)nhd,
				       .len = BYTES,
				       .count = TOKENS,
				       .outer = HEADS,
				       .dst_stride = BYTES,
				       .src_stride = HEADS * BYTES,
				       .dst_outer = TOKENS * BYTES,
				       .src_outer = BYTES};

	(void)state;
	for (unsigned int t = 0; t < TOKENS; t++)
		for (unsigned int h = 0; h < HEADS; h++)
			for (unsigned int i = 0; i < BYTES; i++)
				nhd[t][h][i] = (uint8_t)(t * 31 + h * 7 + i);
	assert_true(kernels_ref_rows(&page, NULL, 1, NULL));
	for (unsigned int t = 0; t < TOKENS; t++)
		for (unsigned int h = 0; h < HEADS; h++)
			assert_memory_equal(nhd[t][h], hnd[h][t], BYTES);
}

/* ---- a lane's lists ---- */

struct bench {
	struct gpu *gpu;
	struct gpu_device *device;
	struct gpu_lane *lane;
	uint8_t *src, *dst; /* pinned */
};

static int start(void **state)
{
	struct bench *b = mem_zalloc(sizeof(*b));
	char path[256];

	assert_non_null(b);
	assert_int_equal(gpu_new(gpu_fake_path("", path), "auto", &b->gpu), 0);
	assert_int_equal(gpu_tune(b->gpu, gpu_fake_kernels(), 32768, 1), 0);
	assert_int_equal(gpu_start(b->gpu), 0);
	b->device = &b->gpu->devices[0];
	assert_int_equal(gpu_device_get(b->device), 0);
	assert_int_equal(gpu_enter(b->device), 0);
	assert_int_equal(gpu_lane_take(b->device, &b->lane), 0);
	assert_int_equal(b->gpu->drv.host_alloc((void **)&b->src, AREA, 0), 0);
	assert_int_equal(b->gpu->drv.host_alloc((void **)&b->dst, AREA, 0), 0);
	assert_true(gpu_module_wait(b->device));
	FAKE(fake_cuda_fail)(NULL, 0, 0);
	*state = b;
	return 0;
}

static int stop(void **state)
{
	struct bench *b = *state;

	gpu_lane_give(b->lane);
	b->gpu->drv.host_free(b->src);
	b->gpu->drv.host_free(b->dst);
	gpu_leave(b->device);
	gpu_device_put(b->device);
	gpu_free(b->gpu);
	assert_int_equal(FAKE(fake_cuda_live)(), 0);
	mem_free(b);
	return 0;
}

static void lane_flush(struct bench *b)
{
	uint64_t mark;

	assert_int_equal(gpu_lane_mark(b->lane, &mark), 0);
	assert_int_equal(gpu_lane_wait(b->lane, mark), 0);
}

/* Many forms of rows, in both sets of lists: with kernels, and what they leave. */
static void lane_moves_short_rows_by_kernel(void **state)
{
	struct bench *b = *state;
	uint8_t *want = area_new();

	for (uint64_t i = 0; i < AREA; i++)
		b->src[i] = (uint8_t)draw(256);
	memset(b->dst, 0xee, AREA);
	memset(want, 0xee, AREA);
	for (uint64_t at = 0, n = 0; at < AREA - 40000; n++) {
		struct gpu_rows rows = {.dst = (uintptr_t)b->dst + at,
					.src = (uintptr_t)b->src + draw(AREA / 2),
					.len = n % 7 ? 1 + draw(600) : 33000 - draw(500),
					.count = n % 7 ? 1 + draw(30) : 1};

		rows.dst_stride = (int64_t)(rows.len + draw(3));
		rows.src_stride = (int64_t)draw(64);
		if ((uint64_t)rows.dst_stride * rows.count > AREA - at)
			break;
		for (uint64_t i = 0; i < rows.count; i++)
			memcpy(want + at + i * (uint64_t)rows.dst_stride,
			       (const uint8_t *)(uintptr_t)rows.src +
				       i * (uint64_t)rows.src_stride,
			       rows.len);
		at += (uint64_t)rows.dst_stride * rows.count;
		assert_int_equal(gpu_lane_copy(b->lane, &rows), 0);
		if (n % 20 == 19)
			lane_flush(b);
	}
	lane_flush(b);
	assert_memory_equal(b->dst, want, AREA);
	assert_true(FAKE(fake_cuda_calls)("cuLaunchKernel") > 1);
	assert_true(FAKE(fake_cuda_calls)("cuMemcpyAsync") +
			    FAKE(fake_cuda_calls)("cuMemcpyBatchAsync_v2") >
		    0); /* rows over 32 KiB */
	free(want);
}

/* More entries than a list holds: the engines have the rest. */
static void list_full_leaves_the_rest(void **state)
{
	enum { ROWS = 30000 };
	struct bench *b = *state;

	for (uint64_t i = 0; i < AREA; i++)
		b->src[i] = (uint8_t)draw(256);
	for (uint64_t i = 0; i < ROWS; i++) { /* no two alike: no entry holds three */
		struct gpu_rows row = {.dst = (uintptr_t)b->dst + 8 * i,
				       .src = (uintptr_t)b->src + 8 * (i * 7919 % ROWS),
				       .len = 1 + (i & 1),
				       .count = 1};

		assert_int_equal(gpu_lane_copy(b->lane, &row), 0);
	}
	lane_flush(b);
	for (uint64_t i = 0; i < ROWS; i++)
		assert_memory_equal(b->dst + 8 * i, b->src + 8 * (i * 7919 % ROWS),
				    1 + (i & 1));
	assert_int_equal(FAKE(fake_cuda_calls)("cuLaunchKernel"), 1);
	assert_true(FAKE(fake_cuda_calls)("cuMemcpyBatchAsync_v2") > 30);
}

/* Rows that a third stretch would need a list for, while two are under way. */
static void list_under_way_is_not_touched(void **state)
{
	struct bench *b = *state;
	struct gpu_rows row = {.dst = (uintptr_t)b->dst,
			       .src = (uintptr_t)b->src,
			       .len = 100,
			       .count = 50,
			       .dst_stride = 200,
			       .src_stride = 101};
	uint64_t marks[3];

	for (unsigned int i = 0; i < 3; i++) {
		assert_int_equal(gpu_lane_copy(b->lane, &row), 0);
		assert_int_equal(gpu_lane_mark(b->lane, &marks[i]), 0);
	}
	assert_int_equal(FAKE(fake_cuda_calls)("cuLaunchKernel"), 2);
	for (unsigned int i = 0; i < 3; i++)
		assert_int_equal(gpu_lane_wait(b->lane, marks[i]), 0);
	assert_int_equal(gpu_lane_copy(b->lane, &row), 0);
	lane_flush(b);
	assert_int_equal(FAKE(fake_cuda_calls)("cuLaunchKernel"), 3);
}

/* Places by the thousand, more than a list takes, between rows of other forms; in both
 * sets of lists, and with a launch that is refused in the end. */
static void lane_moves_rows_with_places(void **state)
{
	enum { LEN = 16, ROWS = 9000 };
	struct bench *b = *state;
	uint64_t mark;

	for (uint64_t i = 0; i < AREA; i++)
		b->src[i] = (uint8_t)draw(256);
	for (unsigned int round = 0; round < 4; round++) {
		struct gpu_rows row = {.dst = (uintptr_t)b->dst + ROWS * LEN + 5,
				       .src = (uintptr_t)b->src + 1,
				       .len = 333,
				       .count = 1};
		uint64_t done = 0;

		memset(b->dst, 0xee, AREA);
		FAKE(fake_cuda_fail)(NULL, 0, 0);
		if (round == 3)
			FAKE(fake_cuda_fail)("cuLaunchKernel", 1, CU_ERROR_UNKNOWN);
		while (done < ROWS) {
			uint32_t room = 0, n = 0;
			struct kern_place *places =
				gpu_lane_places(b->lane, LEN, false, &room);

			assert_non_null(places);
			for (uint64_t i = done; n < room && n < 1000 && i < ROWS;
			     i++, n++)
				places[n] = (struct kern_place){
					(uintptr_t)b->dst + i * LEN,
					(uintptr_t)b->src + i * 7919 % ROWS * LEN};
			gpu_lane_placed(b->lane, LEN, n,
					(uintptr_t)b->dst | (uintptr_t)b->src);
			done += n;
			assert_int_equal(gpu_lane_copy(b->lane, &row), 0);
		}
		assert_int_equal(gpu_lane_mark(b->lane, &mark), 0);
		assert_int_equal(gpu_lane_wait(b->lane, mark), 0);
		for (uint64_t i = 0; i < ROWS; i++)
			assert_memory_equal(b->dst + i * LEN,
					    b->src + i * 7919 % ROWS * LEN, LEN);
		assert_memory_equal(b->dst + ROWS * LEN + 5, b->src + 1, 333);
		assert_int_equal(b->dst[ROWS * LEN + 4], 0xee);
		assert_int_equal(FAKE(fake_cuda_calls)("cuLaunchKernel"), 1);
	}
	assert_false(gpu_module_ready(b->device)); /* given up for this context */
}

/* A list takes so many places and no more, whatever their rows' length. */
static void list_has_room_for_so_many_places(void **state)
{
	static const uint64_t lens[] = {1, 256, 512, 600, 4096, 5000, 8192};
	void *memory = mem_zalloc(GPU_LIST_BYTES);
	struct gpu_list list;

	(void)state;
	assert_non_null(memory);
	for (size_t i = 0; i < ARRAY_LEN(lens); i++) {
		const uint64_t len = lens[i];
		uint32_t room = 1, all = 0;

		gpu_list_begin(&list, memory);
		assert_true(gpu_list_empty(&list));
		for (;;) {
			struct kern_place *places = gpu_list_places(&list, len, &room);

			if (room == 0)
				break;
			room = room > 999 ? 999 : room;
			for (uint32_t n = 0; n < room; n++)
				places[n].dst = all + n;
			gpu_list_placed(&list, len, room, 0);
			all += room;
		}
		assert_true(all >= 9000 && all <= GPU_LIST_PLACES);
		assert_true(gpu_list_end(&list) <= GPU_LIST_ENTRIES);
		for (uint32_t n = 0; n < all; n++)
			assert_int_equal(list.places[n].dst, n);
	}
	assert_null(gpu_list_places(&list, 8193, &(uint32_t){0}));
	mem_free(memory);
}

/* A mark behind a stretch without rows launches nothing: not what was before, again. */
static void list_is_launched_once(void **state)
{
	struct bench *b = *state;
	struct gpu_rows row = {.dst = (uintptr_t)b->dst,
			       .src = (uintptr_t)b->src,
			       .len = 100,
			       .count = 1};

	assert_int_equal(gpu_lane_copy(b->lane, &row), 0);
	for (unsigned int i = 0; i < 5; i++)
		lane_flush(b);
	assert_int_equal(FAKE(fake_cuda_calls)("cuLaunchKernel"), 1);
}

static void image_of_nvcc_holds_code_and_ptx(void **state)
{
	size_t bytes = 0;
	const void *image = kernels_image(&bytes);
	const char *text = kernels_image_text();

	(void)state;
	if (!image) {
		assert_null(text);
		print_message("skipped: a build with nvcc\n");
		skip();
	}
	assert_non_null(strstr(text, "sm_"));
	assert_non_null(strstr(text, "compute_"));
	assert_non_null(memmem(image, bytes, ".text.kvd_rows", 15)); /* code … */
	assert_non_null(memmem(image, bytes, ".visible .entry kvd_rows", 24)); /* … PTX */
}

#define BENCH(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(rows_of_any_form_are_exact),
		cmocka_unit_test(row_of_any_alignment_is_exact),
		cmocka_unit_test(rows_with_places_are_exact),
		cmocka_unit_test(row_missing_is_reported),
		cmocka_unit_test(heads_and_tokens_change_places),
		cmocka_unit_test(image_of_nvcc_holds_code_and_ptx),
		BENCH(lane_moves_short_rows_by_kernel),
		BENCH(lane_moves_rows_with_places),
		cmocka_unit_test(list_has_room_for_so_many_places),
		BENCH(list_full_leaves_the_rest),
		BENCH(list_under_way_is_not_touched),
		BENCH(list_is_launched_once),
	};

	log_threshold = -1;
	return cmocka_run_group_tests(tests, NULL, NULL);
}
