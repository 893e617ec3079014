/* SPDX-License-Identifier: Apache-2.0 */
/* What shapes and rank rules refuse, and what the golden files do not reach. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/plan.h"
#include "python/src/shapes.h"
#include "python/src/shard.h"
#include "tests/lib/plan_rows.h"

static void units_that_do_not_divide_are_refused(void **state)
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

static void ranks_that_do_not_divide_are_refused(void **state)
{
	const struct shard_sglang good = {.prefill_tp = 4,
					  .prefill_cp = 1,
					  .prefill_pp = 2,
					  .decode_tp = 2,
					  .decode_pp = 1};
	struct shard_sglang_ranks out;
	struct shard_sglang bad = good;
	uint32_t ranks[4];
	size_t count;

	(void)state;
	assert_int_equal(shard_sglang_ranks(&good, &out), 0);
	bad.prefill_tp = 3;
	assert_true(shard_sglang_ranks(&bad, &out) < 0);
	bad = good;
	bad.decode_tp = 0;
	assert_true(shard_sglang_ranks(&bad, &out) < 0);
	bad = good;
	bad.prefill_cp = 0;
	assert_true(shard_sglang_ranks(&bad, &out) < 0);
	bad = good;
	bad.decode_pp = 3;
	assert_true(shard_sglang_ranks(&bad, &out) < 0);
	bad = good;
	bad.decode_pp = 2;
	bad.decode_pp_rank = 2;
	assert_true(shard_sglang_ranks(&bad, &out) < 0);
	bad.decode_pp_rank = 1; /* equal stages: one each */
	assert_int_equal(shard_sglang_ranks(&bad, &out), 0);
	assert_int_equal(out.pp_first, 1);
	assert_int_equal(out.pp_count, 1);
	assert_true(shard_vllm_sources(&(struct shard_vllm){.local_tp = 3,
							    .remote_tp = 2,
							    .kv_heads = 6},
				       false, ranks, 4, &count) < 0);
	assert_true(shard_vllm_sources(&(struct shard_vllm){.local_tp = 1,
							    .remote_tp = 8,
							    .kv_heads = 8},
				       false, ranks, 4, &count) < 0);
	assert_int_equal(err_last()->code, ERR_LIMIT);
}

/* golden numbers of the engine report: 10 pages on 4 ranks, 3 on 4, 7 on 2 */
static void pages_on_context_ranks_are_even(void **state)
{
	static const uint64_t bounds[3][5] = {
		{0, 3, 6, 8, 10}, {0, 1, 2, 3, 3}, {0, 4, 7}};
	static const uint64_t pages[] = {10, 3, 7};
	static const uint32_t sizes[] = {4, 4, 2};

	(void)state;
	for (size_t i = 0; i < 3; i++)
		for (uint32_t r = 0; r < sizes[i]; r++) {
			uint64_t begin, end;

			shard_cp_pages(pages[i], sizes[i], r, &begin, &end);
			assert_int_equal(begin, bounds[i][r]);
			assert_int_equal(end, bounds[i][r + 1]);
		}
}

static void chunks_of_a_full_hit_are_one_empty_send(void **state)
{
	struct shard_chunks chunks = {
		.prompt = 640, .page_size = 64, .chunk = 512, .prefix = 640};
	struct shard_chunk chunk;

	(void)state;
	assert_true(shard_chunks_next(&chunks, &chunk));
	assert_true(chunk.last);
	assert_int_equal(chunk.token_begin, 640);
	assert_int_equal(chunk.token_end, 640);
	assert_int_equal(chunk.page_end, 0);
	assert_false(shard_chunks_next(&chunks, &chunk));
}

static void dcp_beyond_its_lists_is_refused(void **state)
{
	const uint32_t src_pages[] = {1, 2}, dst_pages[] = {3};
	uint32_t src[16], dst[16];
	size_t count;
	const struct shard_dcp good = {.src_pages = src_pages,
				       .dst_pages = dst_pages,
				       .src_page_count = 2,
				       .dst_page_count = 1,
				       .page_size = 4,
				       .size = 2};
	struct shard_dcp bad = good;

	(void)state;
	assert_int_equal(shard_dcp_tokens(&good, src, dst, 16, &count), 0);
	assert_int_equal(count, 4);
	assert_true(shard_dcp_tokens(&good, src, dst, 3, &count) < 0);
	bad.tokens = 9;
	assert_true(shard_dcp_tokens(&bad, src, dst, 16, &count) < 0);
	bad = good;
	bad.chunk_page = 1;
	assert_true(shard_dcp_tokens(&bad, src, dst, 16, &count) < 0);
	bad = good;
	bad.prefix = 3;
	assert_true(shard_dcp_tokens(&bad, src, dst, 16, &count) < 0);
	bad = good;
	bad.rank = 2;
	assert_true(shard_dcp_tokens(&bad, src, dst, 16, &count) < 0);
}

static void shapes_that_cannot_be_are_refused(void **state)
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
	assert_int_equal(shape_sglang_item_len(&kv, false), 0);
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
		cmocka_unit_test(units_that_do_not_divide_are_refused),
		cmocka_unit_test(uneven_intervals_are_planned_all_the_same),
		cmocka_unit_test(ranks_that_do_not_divide_are_refused),
		cmocka_unit_test(pages_on_context_ranks_are_even),
		cmocka_unit_test(chunks_of_a_full_hit_are_one_empty_send),
		cmocka_unit_test(dcp_beyond_its_lists_is_refused),
		cmocka_unit_test(shapes_that_cannot_be_are_refused),
		cmocka_unit_test(shapes_without_memory_are_errors),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
