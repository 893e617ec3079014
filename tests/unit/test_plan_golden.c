/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What SGLang computed (tests/golden), computed by the planner.
 *
 * No case has code of its own: layouts come from the shapes of the engine's
 * terms, bytes from plan_make(), and both sides are compared as settled rows.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/plan/plan.h"
#include "python/src/shapes.h"
#include "python/src/shard.h"
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
	assert_int_equal(shape_sglang_item_len(&kv, false), item_len);
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

static void assert_range(const cJSON *list, uint32_t first, uint32_t count)
{
	assert_int_equal(cJSON_GetArraySize(list), count);
	for (uint32_t i = 0; i < count; i++)
		assert_int_equal(golden_nth(list, (int)i), first + i);
}

static void sglang_ranks(const char *id, const cJSON *in, const cJSON *expect)
{
	struct shard_sglang ask = {.prefill_tp = golden_u32(in, "p_tp"),
				   .prefill_cp = golden_u32(in, "p_cp"),
				   .prefill_pp = golden_u32(in, "p_pp"),
				   .decode_tp = golden_u32(in, "d_tp"),
				   .decode_pp = golden_u32(in, "d_pp"),
				   .decode_rank = golden_u32(in, "d_rank"),
				   .decode_pp_rank = golden_u32(in, "d_pp_rank"),
				   .mla = golden_num(in, "mla"),
				   .hybrid_mla = golden_num(in, "hybrid_mla"),
				   .all_cp = golden_num(in, "all_cp")};
	struct shard_sglang_ranks got;
	const cJSON *c = golden_at(expect, "connections_in_order")->child;

	(void)id;
	must(shard_sglang_ranks(&ask, &got));
	assert_int_equal(got.tp_first, golden_num(expect, "target_tp_rank"));
	assert_range(golden_at(expect, "target_tp_ranks"), got.tp_first, got.tp_count);
	assert_range(golden_at(expect, "target_cp_ranks"), got.cp_first, got.cp_count);
	assert_range(golden_at(expect, "target_pp_ranks"), got.pp_first, got.pp_count);
	assert_int_equal(got.dst_info, golden_num(expect, "required_dst_info_num"));
	assert_int_equal(got.responses,
			 golden_num(expect, "required_prefill_response_num"));
	for (uint32_t cp = 0; cp < got.cp_count; cp++)
		for (uint32_t tp = 0; tp < got.tp_count; tp++)
			for (uint32_t pp = got.pp_count; pp-- > 0; c = c->next) {
				assert_non_null(c);
				assert_int_equal(golden_num(c, "cp"), got.cp_first + cp);
				assert_int_equal(golden_num(c, "tp"), got.tp_first + tp);
				assert_int_equal(golden_num(c, "pp"), got.pp_first + pp);
				assert_int_equal(golden_num(c, "is_dummy"),
						 got.dummies && tp > 0);
			}
	assert_null(c);
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

static void chunk_sends(const cJSON *in, const cJSON *expect)
{
	struct shard_chunks chunks = {.prompt = golden_num(in, "prompt_len"),
				      .page_size = golden_num(in, "page_size"),
				      .chunk = golden_num(in, "chunked_prefill_size"),
				      .prefix = golden_num(in, "decode_prefix_len")};
	const cJSON *send = golden_at(expect, "sends")->child;
	struct shard_chunk chunk;
	uint64_t pages = 0;

	for (; shard_chunks_next(&chunks, &chunk); send = send->next) {
		assert_non_null(send);
		assert_int_equal(chunk.token_begin,
				 golden_nth(golden_at(send, "token_range"), 0));
		assert_int_equal(chunk.token_end,
				 golden_nth(golden_at(send, "token_range"), 1));
		assert_int_equal(chunk.page_begin,
				 golden_nth(golden_at(send, "index_slice"), 0));
		assert_int_equal(chunk.page_end,
				 golden_nth(golden_at(send, "index_slice"), 1));
		assert_int_equal(chunk.page_end - chunk.page_begin,
				 golden_num(send, "num_pages"));
		assert_int_equal(chunk.last, golden_num(send, "is_last"));
		pages = chunk.page_end;
	}
	assert_null(send);
	assert_int_equal(pages, golden_num(expect, "sender_init_num_pages"));
}

static void grid(const cJSON *in, const cJSON *expect)
{
	uint64_t begin = golden_num(in, "start"), end = golden_num(in, "end");
	const cJSON *s = golden_at(expect, "segments")->child;

	for (; s; s = s->next) {
		uint64_t stop = shard_grid_end(begin, end, golden_num(in, "base"),
					       golden_num(in, "grid_tokens"));

		assert_int_equal(golden_nth(s, 0), begin);
		assert_int_equal(golden_nth(s, 1), stop);
		begin = stop;
	}
	assert_int_equal(begin, end);
}

static void sglang_pages(const char *id, const cJSON *in, const cJSON *expect)
{
	const char *fn = golden_at(in, "fn")->valuestring;

	if (strcmp(fn, "group_runs") == 0)
		page_groups(id, in, expect);
	else if (strcmp(fn, "chunk_sends") == 0)
		chunk_sends(in, expect);
	else if (strcmp(fn, "grid") == 0)
		grid(in, expect);
	else
		fail_msg("case %s: fn %s is not known here", id, fn);
}

static uint64_t optional(const cJSON *in, const char *name)
{
	return cJSON_GetObjectItemCaseSensitive(in, name) ? golden_num(in, name) : 0;
}

static void sglang_dcp(const char *id, const cJSON *in, const cJSON *expect)
{
	uint32_t sp[GOLDEN_LIST_MAX], dp[GOLDEN_LIST_MAX];
	uint32_t src[GOLDEN_LIST_MAX], dst[GOLDEN_LIST_MAX];
	struct shard_dcp dcp = {
		.src_pages = sp,
		.dst_pages = dp,
		.src_page_count = golden_list(golden_at(in, "src_pages"), sp),
		.dst_page_count = golden_list(golden_at(in, "dst_pages"), dp),
		.page_size = golden_u32(in, "page"),
		.size = golden_u32(in, "size"),
		.chunk_page = optional(in, "off"),
		.prefix = optional(in, "prefix"),
		.tokens = optional(in, "ntok"),
	};
	const cJSON *rank;

	cJSON_ArrayForEach(rank, golden_at(expect, "per_rank")) {
		uint32_t want_src[GOLDEN_LIST_MAX], want_dst[GOLDEN_LIST_MAX];
		size_t n = golden_list(golden_at(rank, "src_tokens"), want_src), count;
		struct layout *side = slots_side(128, 16);
		struct plan_rows got = {0}, want = {0};
		struct plan *plan;

		assert_int_equal(golden_list(golden_at(rank, "dst_tokens"), want_dst), n);
		dcp.rank = golden_u32(rank, "dcp_rank");
		must(shard_dcp_tokens(&dcp, src, dst, GOLDEN_LIST_MAX, &count));
		for (size_t i = 0; i < n; i++)
			plan_rows_add(&want, (struct plan_row){.src = 16ull * want_src[i],
							       .dst = 16ull * want_dst[i],
							       .len = 16});
		plan = plan_of(side, side,
			       &(struct plan_map){.view = "kv",
						  .src_pages = src,
						  .src_page_count = count,
						  .dst_pages = dst,
						  .dst_page_count = count});
		plan_rows_of_plan(&got, plan);
		plan_rows_assert_equal(id, &got, &want);
		plan_free(plan);
		layout_free(side);
	}
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
	{"sglang_rank_mapping.json", sglang_ranks},
	{"sglang_pages_and_chunks.json", sglang_pages},
	{"sglang_dcp_plan.json", sglang_dcp},
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
