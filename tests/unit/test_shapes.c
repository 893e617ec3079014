/* SPDX-License-Identifier: Apache-2.0 */
/* What shapes refuse, and what the golden files do not reach. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/plan.h"
#include "tests/lib/shapes.h"
#include "tests/lib/shard.h"
#include "tests/lib/plan_rows.h"

static void units_not_divisible_are_refused(void **state)
{
	static const struct {
		uint32_t total, size, rank;
		bool ok;
		uint32_t first, units;
	} cases[] = {
		{8, 4, 3, true, 6, 2},	{8, 8, 5, true, 5, 1},	{2, 8, 5, true, 1, 1},
		{1, 16, 9, true, 0, 1}, {6, 4, 0, false, 0, 0}, {4, 6, 0, false, 0, 0},
		{8, 3, 0, false, 0, 0}, {0, 1, 0, false, 0, 0}, {8, 0, 0, false, 0, 0},
		{8, 4, 4, false, 0, 0},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		uint32_t first, units;
		int r = shard_units(cases[i].total, cases[i].size, cases[i].rank, &first,
				    &units);

		assert_int_equal(r == 0, cases[i].ok);
		if (r == 0) {
			assert_int_equal(first, cases[i].first);
			assert_int_equal(units, cases[i].units);
		}
	}
}

/* What no engine's rule gives, a layout can still say: 6 heads as 4 and 2, and
 * as 3 and 3. */
static void uneven_intervals_are_planned_all_the_same(void **state)
{
	static const uint32_t firsts[2][2] = {{0, 4}, {0, 3}},
			      counts[2][2] = {{4, 2}, {3, 3}};
	const uint32_t page = 1;
	uint64_t bytes = 0;

	(void)state;
	for (int s = 0; s < 2; s++) {
		for (int d = 0; d < 2; d++) {
			struct layout *side[2];
			struct plan *plan;

			for (int i = 0; i < 2; i++) {
				int rank = i ? d : s;
				struct layout_field f = {.unit_bytes = 8,
							 .unit_stride = 8,
							 .first_unit = firsts[i][rank],
							 .units = counts[i][rank],
							 .total_units = 6};
				struct layout_view *view;
				struct layout_layer *layer;

				f.token_stride = 8ull * f.units;
				f.page_stride = 4 * f.token_stride;
				assert_int_equal(shape_new((uint32_t)rank, &side[i]), 0);
				assert_int_equal(shape_buffer(side[i], 2 * f.page_stride,
							      &f.buffer),
						 0);
				assert_int_equal(shape_view(side[i], "kv", 4, 2, &view),
						 0);
				assert_int_equal(shape_layer(view, 0, &layer), 0);
				assert_int_equal(shape_field(layer, "k", &f), 0);
				assert_int_equal(layout_check(side[i]), 0);
			}
			plan = plan_of(side[0], side[1],
				       &(struct plan_map){.view = "kv",
							  .src_pages = &page,
							  .src_page_count = 1,
							  .dst_pages = &page,
							  .dst_page_count = 1});
			bytes += plan->bytes;
			plan_free(plan);
			layout_free(side[0]);
			layout_free(side[1]);
		}
	}
	assert_int_equal(bytes, 6 * 8 * 4); /* every head of every token once */
}

static void shapes_impossible_are_refused(void **state)
{
	struct shape_sglang_kv kv = {.view = "kv",
				     .page_size = 16,
				     .pages = 8,
				     .layer_count = 2,
				     .kv_heads = 6,
				     .tp = {.size = 4},
				     .head_bytes = 256};
	struct shape_sglang_state st = {.view = "s",
					.slots = 2,
					.layer_count = 1,
					.full_dim = 64,
					.groups = {32, 16},
					.group_count = 2,
					.unit_bytes = 6,
					.tp = {.size = 4}};
	struct shape_vllm_ssm ssm = {.view = "ssm",
				     .kind = SHAPE_VLLM_MAMBA2,
				     .pages = 1,
				     .page_len = 1,
				     .buffers = (const uint32_t[]){0},
				     .layer_count = 1,
				     .conv_dim = 48,
				     .conv_rows = 3,
				     .conv_elem = 2,
				     .temporal = {4, 8, 16},
				     .ssm_elem = 2,
				     .tp = {.size = 1}};
	struct layout *layout;

	(void)state;
	assert_int_equal(shape_new(0, &layout), 0);
	assert_true(shape_sglang_mha(layout, &kv) < 0);
	kv.kv_heads = 8;
	kv.head_bytes = UINT64_MAX / 8;
	assert_true(shape_sglang_mha(layout, &kv) < 0);
	kv.head_bytes = 256;
	kv.view = "";
	assert_true(shape_sglang_mha(layout, &kv) < 0);
	kv.view = "kv";
	kv.layer_ids = (const uint32_t[]){4, 4};
	assert_int_equal(shape_sglang_mha(layout, &kv), 0);
	assert_true(layout_check(layout) < 0); /* one layer twice */
	assert_true(shape_sglang_state(layout, &st) < 0);
	assert_non_null(strstr(err_last()->text, "groups make 48, full_dim is 64"));
	assert_true(shape_vllm_ssm(layout, &ssm) < 0);
	assert_non_null(strstr(err_last()->text, "in a page of 1"));
	ssm.conv_dim = 33;
	assert_true(shape_vllm_ssm(layout, &ssm) < 0);
	ssm.conv_dim = 31;
	assert_true(shape_vllm_ssm(layout, &ssm) < 0);
	layout_free(layout);
}

static void shapes_without_memory_are_errors(void **state)
{
	struct shape_sglang_aux aux = {.view = "aux",
				       .slots = 4,
				       .hidden_size = 64,
				       .hidden_elem_bytes = 2,
				       .top_logprobs = 128,
				       .sampling_mask = 8,
				       .dsa_dim = 3};
	struct layout *layout;
	uint64_t count;

	(void)state;
	mem_fail_at(0);
	assert_int_equal(shape_new(0, &layout), 0);
	assert_int_equal(shape_sglang_aux(layout, &aux), 0);
	assert_int_equal(layout->buffer_count, 14);
	count = mem_count();
	layout_free(layout);
	for (uint64_t n = 1; n <= count; n++) {
		int r;

		mem_fail_at(n);
		r = shape_new(0, &layout);
		if (r == 0)
			r = shape_sglang_aux(layout, &aux);
		mem_fail_at(0);
		assert_true(r < 0);
		assert_int_equal(err_last()->code, ERR_NOMEM);
		layout_free(layout);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(units_not_divisible_are_refused),
		cmocka_unit_test(uneven_intervals_are_planned_all_the_same),
		cmocka_unit_test(shapes_impossible_are_refused),
		cmocka_unit_test(shapes_without_memory_are_errors),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
