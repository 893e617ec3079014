/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage: any stretch of a plan's stream, named as iovecs, packed and unpacked,
 * against the plan's own walk, span by span.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/memory/stage.h"

#define MEMORY (UINT64_C(1) << 20)
#define BUFFERS 2u
#define IOVS 4096u

static struct memory *memory[2 * BUFFERS];
static struct copy_buffer buffers[2 * BUFFERS]; /* sources, then destinations */
static struct copy_hand *hand;
static struct iovec iov[IOVS];

static uint64_t random_below(uint64_t below)
{
	static uint64_t x = 88172645463325252u;

	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return x % below;
}

static int begin(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < 2 * BUFFERS; i++) {
		assert_int_equal(memory_new_linear(MEMORY, &memory[i]), 0);
		buffers[i] = (struct copy_buffer){
			.memory = memory[i], .offset = 64 * i, .length = MEMORY - 64 * i};
		for (uint64_t b = 0; b < MEMORY; b += 8) {
			uint64_t word = random_below(UINT64_MAX);

			memcpy(memory[i]->base + b, &word, 8);
		}
	}
	return copy_hand_new(&hand);
}

static int end(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < 2 * BUFFERS; i++)
		memory_unref(memory[i]);
	copy_hand_free(hand);
	return 0;
}

static struct plan *plan_of(const struct plan_run *runs, size_t count)
{
	struct plan_builder *builder;
	struct plan *plan;

	assert_int_equal(plan_builder_new(&builder), 0);
	for (size_t i = 0; i < count; i++)
		assert_int_equal(plan_builder_add(builder, &runs[i]), 0);
	assert_int_equal(plan_builder_finish(builder, &plan), 0);
	plan_builder_free(builder);
	return plan;
}

/* Rows of all lengths; forwards, backwards, touching, apart, alone. */
static struct plan *plan_random(void)
{
	struct plan_run runs[8];
	size_t count = 1 + random_below(ARRAY_LEN(runs));

	for (size_t i = 0; i < count; i++) {
		uint64_t len = 1 + random_below(random_below(3) ? 300 : 9000);
		uint64_t rows = 1 + random_below(20);
		int64_t stride = (int64_t)(len + random_below(3) * 7);

		runs[i] = (struct plan_run){
			.src = random_below(100000),
			.dst = random_below(100000) + i * 100,
			.len = len,
			.count = rows,
			.src_stride = stride,
			.dst_stride = (int64_t)(len + random_below(2) * 16),
			.src_buffer = (uint32_t)random_below(BUFFERS),
			.dst_buffer = (uint32_t)random_below(BUFFERS),
		};
		if (random_below(4) == 0) {
			runs[i].src += (rows - 1) * (uint64_t)stride;
			runs[i].src_stride = -stride;
		}
	}
	return plan_of(runs, count);
}

static struct stage_side side_of(const struct plan *plan, bool is_src)
{
	return (struct stage_side){.plan = plan,
				   .is_src = is_src,
				   .buffers = is_src ? buffers : buffers + BUFFERS,
				   .count = BUFFERS};
}

/* What the walk says of [from, to), copied out. */
static unsigned int walk_out(const struct stage_side *side, uint64_t from, uint64_t to,
			     uint8_t *out)
{
	const uint8_t *last = NULL;
	struct plan_walk walk;
	struct plan_span span;
	unsigned int rows = 0;

	assert_int_equal(plan_walk_seek(&walk, side->plan, from), 0);
	while (from < to && plan_walk_next(&walk, to - from, &span)) {
		const struct copy_buffer *b =
			&side->buffers[side->is_src ? span.src_buffer : span.dst_buffer];
		const uint8_t *at = b->memory->base + b->offset +
				    (side->is_src ? span.src : span.dst);

		memcpy(out, at, span.len);
		out += span.len;
		from += span.len;
		rows += at != last;
		last = at + span.len;
	}
	return rows;
}

static void stretch(const struct plan *plan, uint64_t *from_p, uint64_t *to_p)
{
	*from_p = random_below(plan->bytes);
	*to_p = *from_p + 1 + random_below(plan->bytes - *from_p);
}

static void iovecs_name_the_stretch(void **state)
{
	uint8_t *want = mem_zalloc(MEMORY), *got = mem_zalloc(MEMORY);
	uint64_t from, to, named;
	unsigned int count, rows, max;

	(void)state;
	for (unsigned int i = 0; i < 3000; i++) {
		struct plan *plan = plan_random();
		struct stage_side side = side_of(plan, i % 2);

		stretch(plan, &from, &to);
		rows = walk_out(&side, from, to, want);
		max = i % 3 ? IOVS : 1 + (unsigned int)random_below(rows);
		named = stage_iov(&side, from, to, iov, max, &count);
		assert_int_equal(count, rows < max ? rows : max);
		assert_true(max < rows || named == to - from);
		for (uint64_t n = 0, at = 0; n < count; at += iov[n++].iov_len)
			memcpy(got + at, iov[n].iov_base, iov[n].iov_len);
		assert_memory_equal(want, got, named);
		assert_true(stage_few_rows(&side, from, to, rows));
		assert_false(rows > 1 && stage_few_rows(&side, from, to, rows - 1));
		plan_free(plan);
	}
	mem_free(want);
	mem_free(got);
}

static void pack_is_the_walk(void **state)
{
	uint8_t *want = mem_zalloc(MEMORY), *got = mem_zalloc(MEMORY);
	uint64_t from, to;

	(void)state;
	for (unsigned int i = 0; i < 2000; i++) {
		struct plan *plan = plan_random();
		struct stage_side side = side_of(plan, true);

		stretch(plan, &from, &to);
		walk_out(&side, from, to, want);
		got[to - from] = 0x7e;
		assert_int_equal(stage_pack(hand, &side, from, to, got), 0);
		assert_memory_equal(want, got, to - from);
		assert_int_equal(got[to - from], 0x7e);
		plan_free(plan);
	}
	mem_free(want);
	mem_free(got);
}

/* Rows apart in the destination, gaps untouched, with and without streaming. */
static void unpack_writes_the_stretch_and_nothing_else(void **state)
{
	static const struct plan_run run = {.dst = 13,
					    .len = 192,
					    .count = 2000,
					    .src_stride = 192,
					    .dst_stride = 256};
	struct plan *plan = plan_of(&run, 1);
	struct stage_side side = side_of(plan, false);
	uint8_t *image = mem_zalloc(MEMORY), *in = mem_zalloc(MEMORY);
	struct copy_buffer *dst = &buffers[BUFFERS];
	uint64_t from, to;

	(void)state;
	for (unsigned int i = 0; i < 300; i++) {
		stretch(plan, &from, &to);
		side.streaming = i % 2;
		memcpy(image, dst->memory->base, MEMORY);
		for (uint64_t b = from; b < to; b++) {
			in[b - from] = (uint8_t)random_below(256);
			image[dst->offset + 13 + b / 192 * 256 + b % 192] = in[b - from];
		}
		assert_int_equal(stage_unpack(hand, &side, from, to, in), 0);
		assert_memory_equal(image, dst->memory->base, MEMORY);
	}
	plan_free(plan);
	mem_free(image);
	mem_free(in);
}

static void memory_of_others_is_not_mapped(void **state)
{
	struct memory foreign = {.kind = MEMORY_VM, .length = MEMORY};
	struct copy_buffer table[2] = {buffers[0], {.length = 0}};
	struct stage_side side = {.buffers = table, .count = 2};

	(void)state;
	assert_true(stage_mapped(&side)); /* a hole is nobody's memory */
	table[1] = (struct copy_buffer){.memory = &foreign, .length = MEMORY};
	assert_false(stage_mapped(&side));
	foreign = (struct memory){
		.kind = MEMORY_GUARDED, .length = MEMORY, .base = memory[0]->base};
	assert_true(stage_mapped(&side));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(iovecs_name_the_stretch),
		cmocka_unit_test(pack_is_the_walk),
		cmocka_unit_test(unpack_writes_the_stretch_and_nothing_else),
		cmocka_unit_test(memory_of_others_is_not_mapped),
	};

	return cmocka_run_group_tests_name("stage", tests, begin, end);
}
