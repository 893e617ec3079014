/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results of SGLang (tests/golden), computed by the planner.
 *
 * No case has its own code: layouts are made from the shapes of the engine's terms, bytes
 * by plan_make(), and both sides are compared as settled rows.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/plan/plan.h"
#include "tests/lib/shapes.h"
#include "tests/lib/plan_golden.h"
#include "tests/lib/plan_rows.h"

static uint32_t max_of(const uint32_t *v, size_t n)
{
	uint32_t m = 0;

	for (size_t i = 0; i < n; i++)
		m = v[i] > m ? v[i] : m;
	return m;
}

/* ---- SGLang ---- */

static struct layout *sglang_side(const cJSON *in, const char *tp, uint32_t rank,
				  uint32_t pages, uint64_t item_len)
{
	struct shape_sglang_kv kv = {
		.view = "kv",
		.page_size = golden_u32(in, "page_size"),
		.pages = pages,
		.layer_count = 1,
		.kv_heads = golden_u32(in, "total_kv_heads"),
		.tp = {.size = golden_u32(in, tp), .rank = rank},
		.head_bytes = golden_num(in, "head_dim") * golden_num(in, "elem_bytes"),
	};
	struct layout *layout;

	must(shape_new(rank, &layout));
	must(shape_sglang_mha(layout, &kv));
	assert_int_equal(layout->views[0].layers[0].fields[0].page_stride, item_len);
	return golden_checked(layout);
}

static void sglang_slices(const char *id, const cJSON *in, const cJSON *expect)
{
	uint32_t sp[GOLDEN_LIST_MAX], dp[GOLDEN_LIST_MAX];
	size_t sn = golden_list(golden_at(in, "src_pages"), sp);
	size_t dn = golden_list(golden_at(in, "dst_pages"), dp);
	const cJSON *pair;

	cJSON_ArrayForEach(pair, golden_at(expect, "pairs")) {
		struct layout *src =
			sglang_side(in, "prefill_attn_tp", golden_u32(pair, "p_rank"),
				    max_of(sp, sn) + 1, golden_num(pair, "src_item_len"));
		struct layout *dst =
			sglang_side(in, "decode_attn_tp", golden_u32(pair, "d_rank"),
				    max_of(dp, dn) + 1, golden_num(pair, "dst_item_len"));
		struct plan_map map = {.view = "kv",
				       .src_pages = sp,
				       .src_page_count = sn,
				       .dst_pages = dp,
				       .dst_page_count = dn};
		struct plan *plan = plan_of(src, dst, &map);

		for (uint32_t buffer = 0; buffer < 2; buffer++) { /* K, V */
			struct plan_rows got = {0}, want = {0};

			plan_rows_of_buffer(&got, plan, buffer,
					    golden_num(in, "src_base"),
					    golden_num(in, "dst_base"));
			plan_rows_of_json(&want, golden_at(pair, "sg_one_buffer"));
			plan_rows_assert_equal(id, &got, &want);
		}
		plan_free(plan);
		layout_free(src);
		layout_free(dst);
	}
}

static struct layout *state_side(const cJSON *in, const char *tp, uint32_t rank)
{
	struct shape_sglang_state state = {
		.view = "state",
		.slots = 3,
		.layer_count = 1,
		.full_dim = golden_u32(in, "full_dim"),
		.unit_bytes = golden_num(in, "bytes_per_dim"),
		.outer = golden_u32(in, "outer_count"),
		.tp = {.size = golden_u32(in, tp), .rank = rank},
	};
	uint32_t groups[GOLDEN_LIST_MAX];
	struct layout *layout;

	state.group_count =
		(uint32_t)golden_list(golden_at(in, "conv_shard_groups"), groups);
	for (uint32_t i = 0; i < state.group_count; i++)
		state.groups[i] = groups[i];
	must(shape_new(rank, &layout));
	must(shape_sglang_state(layout, &state));
	return golden_checked(layout);
}

static void sglang_states(const char *id, const cJSON *in, const cJSON *expect)
{
	const uint32_t slot = 2;
	const cJSON *pair;

	cJSON_ArrayForEach(pair, golden_at(expect, "pairs")) {
		struct layout *src =
			state_side(in, "prefill_attn_tp", golden_u32(pair, "p_rank"));
		struct layout *dst =
			state_side(in, "decode_attn_tp", golden_u32(pair, "d_rank"));
		uint64_t src_item = golden_num(in, "src_item_len");
		uint64_t dst_item = golden_num(in, "dst_item_len");
		struct plan_map map = {.view = "state",
				       .src_pages = &slot,
				       .src_page_count = 1,
				       .dst_pages = &slot,
				       .dst_page_count = 1};
		struct plan *plan = plan_of(src, dst, &map);
		struct plan_rows got = {0}, want = {0};

		assert_int_equal(src->buffers[0], 3 * src_item);
		assert_int_equal(dst->buffers[0], 3 * dst_item);
		plan_rows_of_buffer(&got, plan, 0, -2 * src_item, -2 * dst_item);
		plan_rows_of_json(&want, golden_at(pair, "blocks"));
		plan_rows_assert_equal(id, &got, &want);
		plan_free(plan);
		layout_free(src);
		layout_free(dst);
	}
}

/* One buffer of one-token pages of `bytes`. */
static struct layout *slots_side(uint32_t pages, uint64_t bytes)
{
	struct shape_sglang_kv kv = {.view = "kv",
				     .page_size = 1,
				     .pages = pages,
				     .layer_count = 1,
				     .tp = {.size = 1},
				     .head_bytes = bytes};
	struct layout *layout;

	must(shape_new(0, &layout));
	must(shape_sglang_mla(layout, &kv));
	return golden_checked(layout);
}

static void page_groups(const char *id, const cJSON *in, const cJSON *expect)
{
	uint32_t sp[GOLDEN_LIST_MAX], dp[GOLDEN_LIST_MAX];
	size_t sn = golden_list(golden_at(in, "src"), sp);
	size_t dn = golden_list(golden_at(in, "dst"), dp);
	struct layout *side = slots_side(64, 8);
	struct plan_map map = {.view = "kv",
			       .src_pages = sp,
			       .src_page_count = sn,
			       .dst_pages = dp,
			       .dst_page_count = dn};
	struct plan_request req = {
		.src = side, .dst = side, .maps = &map, .map_count = 1};
	struct plan_rows got = {0}, want = {0};
	struct plan *plan;

	if (golden_has_error(expect)) {
		/* lists of two lengths: refused when the range is given */
		map.token_end = sn;
		assert_true(plan_make(&req, &plan) < 0);
		assert_int_equal(err_last()->code, ERR_RANGE);
	} else {
		const cJSON *s = golden_at(expect, "src_groups")->child;
		const cJSON *d = golden_at(expect, "dst_groups")->child;

		for (; s; s = s->next, d = d->next)
			plan_rows_add(
				&want,
				(struct plan_row){
					.src = 8 * golden_nth(s, 0),
					.dst = 8 * golden_nth(d, 0),
					.len = 8ull * (uint64_t)cJSON_GetArraySize(s)});
		plan = plan_of(side, side, &map);
		plan_rows_of_plan(&got, plan);
		plan_rows_assert_equal(id, &got, &want);
		plan_free(plan);
	}
	layout_free(side);
}

static void sglang_pages(const char *id, const cJSON *in, const cJSON *expect)
{
	if (strcmp(golden_at(in, "fn")->valuestring, "group_runs") == 0)
		page_groups(id, in, expect);
}

static void sglang_metadata(const char *id, const cJSON *in, const cJSON *expect)
{
	struct shape_sglang_aux aux = {
		.view = "aux",
		.slots = golden_u32(in, "slots"),
		.hidden_size = golden_u32(in, "hidden_size"),
		.hidden_elem_bytes = golden_u32(in, "hidden_elem_bytes"),
		.top_logprobs = golden_u32(in, "max_top_logprobs"),
		.sampling_mask = golden_u32(in, "sampling_mask_max"),
		.dsa_dim = golden_u32(in, "dsa_dim")};
	const uint32_t slots[2] = {1, 3};
	struct layout *side;
	const struct layout_layer *layer;
	const cJSON *b = golden_at(expect, "buffers")->child;
	struct plan *plan;

	(void)id;
	must(shape_new(0, &side));
	must(shape_sglang_aux(side, &aux));
	layer = &golden_checked(side)->views[0].layers[0];
	assert_int_equal(side->buffer_count, golden_num(expect, "num_buffers"));
	for (uint32_t i = 0; i < layer->field_count; i++, b = b->next) {
		assert_string_equal(layer->fields[i].name,
				    golden_at(b, "name")->valuestring);
		assert_int_equal(layer->fields[i].unit_bytes, golden_num(b, "item_len"));
		assert_int_equal(side->buffers[layer->fields[i].buffer],
				 golden_num(b, "data_len"));
	}
	assert_null(b);
	plan = plan_of(side, side,
		       &(struct plan_map){.view = "aux",
					  .src_pages = &slots[0],
					  .src_page_count = 1,
					  .dst_pages = &slots[1],
					  .dst_page_count = 1});
	assert_int_equal(plan->bytes, golden_num(expect, "bytes_per_request"));
	plan_free(plan);
	layout_free(side);
}

/* ---- files ---- */

static const struct file {
	const char *name;
	void (*visit)(const char *id, const cJSON *in, const cJSON *expect);
} files[] = {
	{"sglang_hetero_tp_slices.json", sglang_slices},
	{"sglang_mamba_state_slices.json", sglang_states},
	{"sglang_pages_and_chunks.json", sglang_pages},
	{"sglang_metadata_buffers.json", sglang_metadata},
};

static void golden_file_matches(void **state)
{
	const struct file *file = *state;

	golden_each(file->name, file->visit);
}

int main(void)
{
	struct CMUnitTest tests[ARRAY_LEN(files)];

	for (size_t i = 0; i < ARRAY_LEN(files); i++)
		tests[i] = (struct CMUnitTest){.name = files[i].name,
					       .test_func = golden_file_matches,
					       .initial_state = (void *)&files[i]};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
