/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Results of vLLM (tests/golden), computed by the planner.
 *
 * No case has its own code: layouts are made from the shapes of the engine's terms, bytes
 * by plan_make(), and both sides are compared as settled rows.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/plan/cover.h"
#include "daemon/plan/plan.h"
#include "tests/lib/shapes.h"
#include "tests/lib/shard.h"
#include "tests/lib/plan_golden.h"
#include "tests/lib/plan_rows.h"

/* ---- vLLM ---- */

struct vllm_geometry {
	uint32_t heads, tp, rank, block_size, blocks;
	uint64_t head_bytes;
	bool mla, state;
};

/* Region 0: attention as "fa"; if asked, region 1: state as "ssm". */
static struct layout *vllm_side(const struct vllm_geometry *g)
{
	struct shape_vllm_attention fa = {
		.view = "fa",
		.block_size = g->block_size,
		.blocks = g->blocks,
		.buffers = (const uint32_t[]){0},
		.layer_count = 1,
		.kv_heads = g->heads,
		.head_bytes = g->head_bytes,
		.packing = g->mla ? SHAPE_VLLM_MLA : SHAPE_VLLM_PACKED,
		.tp = {.size = g->tp, .rank = g->rank},
	};
	struct shape_vllm_ssm ssm = {
		.view = "ssm",
		.kind = SHAPE_VLLM_GDN,
		.pages = g->blocks,
		.page_len = 1 << 20,
		.buffers = (const uint32_t[]){1},
		.layer_count = 1,
		.conv_dim = 1024,
		.conv_rows = 3,
		.conv_elem = 2,
		.temporal = {16, 32, 8},
		.ssm_elem = 2,
		.tp = {.size = g->tp, .rank = g->rank},
	};
	struct layout *layout;
	uint32_t index;

	must(shape_new(g->rank, &layout));
	must(shape_buffer(layout, UINT32_MAX, &index));
	must(shape_vllm_attention(layout, &fa));
	if (g->state) {
		must(shape_buffer(layout, UINT32_MAX, &index));
		must(shape_vllm_ssm(layout, &ssm));
	}
	return golden_checked(layout);
}

/* Sources that the cover gives one view in room 0, ascending. */
static size_t cover_ranks(struct layout *const *sources, uint32_t count,
			  const struct layout *dst, const char *view, uint32_t *ranks)
{
	struct cover_source list[16];
	struct cover *cover;
	size_t n = 0;

	for (uint32_t i = 0; i < count; i++)
		list[i].layout = sources[i];
	must(cover_make(list, count, dst, &view, 1, 0, &cover));
	for (uint32_t i = 0; i < count; i++)
		if (cover->per_source[i].count > 0)
			ranks[n++] = sources[i]->rank;
	cover_free(cover);
	return n;
}

static void assert_list(const char *id, const cJSON *want, const uint32_t *got, size_t n)
{
	if ((size_t)cJSON_GetArraySize(want) != n)
		print_error("case %s: %zu entries\n", id, n);
	assert_int_equal(cJSON_GetArraySize(want), n);
	for (size_t i = 0; i < n; i++)
		assert_int_equal(golden_nth(want, (int)i), got[i]);
}

struct mapping {
	uint32_t local_tp, local_rank, remote_tp, kv_heads;
	bool mla;
};

/* rank_to_attention_slot and rank_offset_factor, from the head intervals. */
static void vllm_slots(const struct mapping *in, const cJSON *expect)
{
	uint32_t first = 0, units = 1;
	const cJSON *slot;

	if (!in->mla)
		must(shard_units(in->kv_heads, in->local_tp, in->local_rank, &first,
				 &units));
	cJSON_ArrayForEach(slot, golden_at(expect, "rank_to_attention_slot")) {
		uint32_t rank = (uint32_t)strtoul(slot->string, NULL, 10);
		uint32_t src_first = 0, src_units = 1;

		if (!in->mla)
			must(shard_units(in->kv_heads, in->remote_tp, rank, &src_first,
					 &src_units));
		assert_int_equal(slot->valuedouble,
				 src_first > first ? (src_first - first) / src_units : 0);
		if (first >= src_first)
			assert_int_equal(golden_num(expect, "rank_offset_factor"),
					 (first - src_first) / units);
	}
}

static void vllm_mapping(const char *id, const cJSON *in, const cJSON *expect)
{
	struct mapping ask = {.local_tp = golden_u32(in, "tp_size"),
			      .local_rank = golden_u32(in, "tp_rank"),
			      .remote_tp = golden_u32(in, "remote_tp_size"),
			      .kv_heads = golden_u32(in, "total_kv_heads"),
			      .mla = golden_num(in, "is_mla")};
	struct vllm_geometry g = {.heads = ask.kv_heads,
				  .block_size = 16,
				  .blocks = 2,
				  .head_bytes = 256,
				  .mla = ask.mla,
				  .state = cJSON_GetArraySize(golden_at(in, "groups")) >
					   1};
	struct layout *sources[16], *dst;
	const cJSON *group, *want = golden_at(expect, "source_ranks_per_group")->child;

	for (g.rank = 0, g.tp = ask.remote_tp; g.rank < g.tp; g.rank++)
		sources[g.rank] = vllm_side(&g);
	g.tp = ask.local_tp;
	g.rank = ask.local_rank;
	dst = vllm_side(&g);
	cJSON_ArrayForEach(group, golden_at(in, "groups")) {
		uint32_t ranks[16];
		size_t n = cover_ranks(sources, ask.remote_tp, dst, group->valuestring,
				       ranks);

		assert_list(id, want, ranks, n);
		want = want->next;
	}
	vllm_slots(&ask, expect);
	for (uint32_t i = 0; i < ask.remote_tp; i++)
		layout_free(sources[i]);
	layout_free(dst);
}

/* Regions of blocks, followed by those of logical pages; a descriptor number is its
 * index in that list, so in a buffer of the same order. */
static struct layout *desc_side(const cJSON *in, size_t groups)
{
	uint32_t n_phys = golden_u32(in, "n_phys"), n_log = golden_u32(in, "n_log");
	uint32_t fa = golden_u32(in, "num_regions"), ssm = golden_u32(in, "ssm_regions");
	struct layout *layout;
	uint32_t index;

	must(shape_new(0, &layout));
	must(shape_buffer(layout, (uint64_t)fa * n_phys + (uint64_t)ssm * n_log, &index));
	for (size_t i = 0; i < groups; i++) {
		const char *kind =
			cJSON_GetArrayItem(golden_at(in, "groups"), (int)i)->valuestring;
		bool state = strcmp(kind, "ssm") == 0;
		char name[24];
		struct layout_view *view;

		snprintf(name, sizeof(name), "g%zu", i);
		must(shape_view(layout, name, 1, state ? n_log : n_phys, &view));
		for (uint32_t r = 0; r < (state ? ssm : fa); r++) {
			struct layout_layer *layer;
			struct layout_field f = {.page_stride = 1,
						 .unit_bytes = 1,
						 .units = 1,
						 .total_units = 1};

			f.offset = state ? (uint64_t)fa * n_phys + (uint64_t)r * n_log
					 : (uint64_t)r * n_phys;
			must(shape_layer(view, r, &layer));
			must(shape_field(layer, "d", &f));
		}
	}
	return golden_checked(layout);
}

static void vllm_descs(const char *id, const cJSON *in, const cJSON *expect)
{
	const cJSON *lists = golden_at(in, "block_ids"), *it;
	size_t groups = (size_t)cJSON_GetArraySize(lists);
	struct layout *side = desc_side(in, groups);
	static uint32_t pages[8][GOLDEN_LIST_MAX];
	struct plan_map maps[8] = {0};
	struct plan_request req = {
		.src = side, .dst = side, .maps = maps, .map_count = groups};
	struct plan_rows got = {0}, want = {0};
	struct plan *plan;
	size_t i = 0;

	cJSON_ArrayForEach(it, lists) {
		maps[i].view = side->views[i].name;
		maps[i].src_pages = maps[i].dst_pages = pages[i];
		maps[i].src_page_count = golden_list(it, pages[i]);
		maps[i].dst_page_count = maps[i].src_page_count;
		i++;
	}
	must(plan_make(&req, &plan));
	plan_rows_of_plan(&got, plan);
	cJSON_ArrayForEach(it, golden_at(expect, "desc_ids"))
		plan_rows_add(&want, (struct plan_row){.src = (uint64_t)it->valuedouble,
						       .dst = (uint64_t)it->valuedouble,
						       .len = 1});
	plan_rows_assert_equal(id, &got, &want);
	plan_free(plan);
	layout_free(side);
}

/* ---- vLLM state ---- */

static struct shape_vllm_ssm ssm_of(const cJSON *in, const char *tp, uint32_t rank)
{
	const char *kind = golden_at(in, "kind")->valuestring;
	const cJSON *t = golden_at(in, "temporal_shape_tp1");
	static const uint32_t region = 0;
	struct shape_vllm_ssm s = {
		.view = "ssm",
		.kind = strcmp(kind, "mamba1") == 0   ? SHAPE_VLLM_MAMBA1
			: strcmp(kind, "mamba2") == 0 ? SHAPE_VLLM_MAMBA2
						      : SHAPE_VLLM_GDN,
		.pages = 1,
		.buffers = &region,
		.layer_count = 1,
		.conv_dim = golden_u32(in, "global_conv_dim"),
		.conv_rows = golden_u32(in, "conv_rows"),
		.conv_elem = golden_u32(in, "conv_elem"),
		.temporal = {1, 1, 1},
		.ssm_elem = golden_u32(in, "ssm_elem"),
		.tp = {.size = golden_u32(in, tp), .rank = rank},
	};

	for (int i = 0; i < cJSON_GetArraySize(t); i++)
		s.temporal[i] = (uint32_t)golden_nth(t, i);
	return s;
}

static struct layout *ssm_side(struct shape_vllm_ssm *s, const cJSON *sizes)
{
	const struct layout_layer *layer;
	const struct layout_field *ssm;
	struct layout *layout;
	uint32_t index;

	s->page_len = golden_nth(sizes, 0) + golden_nth(sizes, 1);
	must(shape_new(s->tp.rank, &layout));
	must(shape_buffer(layout, s->page_len, &index));
	must(shape_vllm_ssm(layout, s));
	layer = &layout->views[0].layers[0];
	ssm = &layer->fields[layer->field_count - 1];
	assert_int_equal(ssm->offset, golden_nth(sizes, 0));
	assert_int_equal(ssm->units * ssm->unit_bytes, golden_nth(sizes, 1));
	return golden_checked(layout);
}

/* Bytes that upstream moves from one producer to one consumer: remote [off, len] to
 * the local one, or to chunk `slice` of `parts` of the local one. */
static void ssm_want(struct plan_rows *want, const cJSON *remote, const cJSON *local,
		     uint32_t slice, uint32_t parts)
{
	uint64_t len = golden_nth(local, 1) / parts;

	assert_int_equal(golden_nth(remote, 1), len);
	plan_rows_add(want, (struct plan_row){.src = golden_nth(remote, 0),
					      .dst = golden_nth(local, 0) + slice * len,
					      .len = len});
}

static void ssm_pair(const char *id, const cJSON *in, const cJSON *expect,
		     const cJSON *rank, uint32_t p, uint32_t slice, uint32_t parts)
{
	struct shape_vllm_ssm ps = ssm_of(in, "P_TP", p);
	struct shape_vllm_ssm ds = ssm_of(in, "D_TP", golden_u32(rank, "d_rank"));
	struct layout *src = ssm_side(&ps, golden_at(expect, "ssm_sizes_P"));
	struct layout *dst = ssm_side(&ds, golden_at(expect, "ssm_sizes_D"));
	const cJSON *remote = golden_at(rank, "remote_conv")->child;
	const cJSON *local = golden_at(expect, "local_conv_D")->child;
	const uint32_t page = 0;
	struct plan_rows got = {0}, want = {0};
	const struct layout_layer *layer = &dst->views[0].layers[0];
	struct plan *plan = plan_of(src, dst,
				    &(struct plan_map){.view = "ssm",
						       .src_pages = &page,
						       .src_page_count = 1,
						       .dst_pages = &page,
						       .dst_page_count = 1});

	assert_int_equal(layer->field_count - 1,
			 cJSON_GetArraySize(golden_at(expect, "local_proj_dims_D")));
	for (int i = 0; local; remote = remote->next, local = local->next, i++) {
		assert_int_equal(layer->fields[i].units,
				 golden_nth(golden_at(expect, "local_proj_dims_D"), i));
		ssm_want(&want, remote, local, slice, parts);
	}
	ssm_want(&want, golden_at(rank, "remote_ssm"), golden_at(expect, "local_ssm_D"),
		 slice, parts);
	plan_rows_of_plan(&got, plan);
	plan_rows_assert_equal(id, &got, &want);
	plan_free(plan);
	layout_free(src);
	layout_free(dst);
}

static void vllm_states(const char *id, const cJSON *in, const cJSON *expect)
{
	uint32_t p_tp = golden_u32(in, "P_TP"), d_tp = golden_u32(in, "D_TP");
	uint32_t parts = p_tp > d_tp ? p_tp / d_tp : 1;
	const cJSON *rank;

	cJSON_ArrayForEach(rank, golden_at(expect, "per_rank")) {
		uint32_t d = golden_u32(rank, "d_rank");
		uint32_t p = p_tp > d_tp ? d * parts : d / (d_tp / p_tp);

		for (uint32_t i = 0; i < parts; i++)
			ssm_pair(id, in, expect, rank, p + i, i, parts);
	}
}

/* ---- vLLM attention regions ---- */

static struct layout *fa_side(const cJSON *in, bool remote, uint32_t rank)
{
	const cJSON *bases = golden_at(in, "remote_bases");
	const cJSON *lens =
		golden_at(in, remote ? "remote_block_len" : "local_block_len");
	const cJSON *replicated = golden_at(in, "region_replicated");
	uint32_t blocks = golden_u32(in, "remote_num_blocks");
	struct layout *layout;

	must(shape_new(rank, &layout));
	for (int i = 0; i < cJSON_GetArraySize(bases); i++) {
		bool mla = golden_num(in, "is_mla") ||
			   (cJSON_IsArray(replicated) && golden_nth(replicated, i));
		uint32_t block_size =
			golden_u32(in, remote ? "remote_block_size" : "local_block_size");
		uint64_t block_len = golden_nth(lens, i);
		struct shape_vllm_attention a = {
			.block_size = block_size,
			.blocks = blocks,
			.layer_count = 1,
			.kv_heads = golden_u32(in, "total_kv_heads"),
			.head_bytes =
				mla ? block_len / block_size
				    : golden_num(in, "head_dim") * golden_num(in, "elem"),
			.packing = mla ? SHAPE_VLLM_MLA : SHAPE_VLLM_PACKED,
			.tp = {.size = golden_u32(in, remote ? "P_TP" : "D_TP"),
			       .rank = rank},
		};
		uint32_t buffer;
		char name[16];

		snprintf(name, sizeof(name), "r%d", i);
		a.view = name;
		must(shape_buffer(layout, block_len * blocks, &buffer));
		a.buffers = &buffer;
		must(shape_vllm_attention(layout, &a));
		/* the shape has the engine's block length */
		assert_int_equal(layout->views[i].layers[0].fields[0].page_stride,
				 block_len);
	}
	return golden_checked(layout);
}

static int by_number(const void *a, const void *b)
{
	const struct plan_row *x = a, *y = b;

	return (x->src > y->src) - (x->src < y->src);
}

/* Rows as pieces of the source only: dst is made equal to src. */
static void source_bytes(struct plan_rows *rows)
{
	for (size_t i = 0; i < rows->count; i++) {
		rows->items[i].dst = rows->items[i].src;
		rows->items[i].dst_buffer = rows->items[i].src_buffer = 0;
	}
	if (rows->count > 1)
		qsort(rows->items, rows->count, sizeof(*rows->items), by_number);
}

static void vllm_regions(const char *id, const cJSON *in, const cJSON *expect)
{
	const cJSON *sources =
		golden_at(golden_at(expect, "mapping"), "all_source_ranks");
	uint32_t blocks = golden_u32(in, "remote_num_blocks"), pages[64];
	struct layout *dst = fa_side(in, false, golden_u32(in, "d_rank"));
	const cJSON *it;

	for (uint32_t i = 0; i < blocks; i++)
		pages[i] = i;
	cJSON_ArrayForEach(it, sources) {
		struct layout *src = fa_side(in, true, (uint32_t)it->valuedouble);
		struct plan_rows got = {0}, want = {0};
		const cJSON *d;

		for (uint32_t i = 0; i < src->view_count; i++) {
			struct plan *plan =
				plan_of(src, dst,
					&(struct plan_map){.view = src->views[i].name,
							   .src_pages = pages,
							   .src_page_count = blocks,
							   .dst_pages = pages,
							   .dst_page_count = blocks});

			plan_rows_of_buffer(
				&got, plan, i,
				golden_nth(golden_at(in, "remote_bases"), (int)i), 0);
			plan_free(plan);
		}
		cJSON_ArrayForEach(d, golden_at(expect, "remote_descs"))
			plan_rows_add(&want, (struct plan_row){.src = golden_nth(d, 0),
							       .len = golden_nth(d, 1)});
		source_bytes(&got);
		source_bytes(&want);
		plan_rows_assert_equal(id, &got, &want);
		layout_free(src);
	}
	layout_free(dst);
}

/* ---- vLLM block lists ---- */

/* One latent of `bytes` a token, pages of page_tokens. */
static struct layout *latent_side(uint32_t page_tokens, uint32_t pages, uint64_t bytes)
{
	struct shape_sglang_kv kv = {.view = "kv",
				     .page_size = page_tokens,
				     .pages = pages,
				     .layer_count = 1,
				     .tp = {.size = 1},
				     .head_bytes = bytes};
	struct layout *layout;

	must(shape_new(0, &layout));
	must(shape_sglang_mla(layout, &kv));
	return golden_checked(layout);
}

/* Do logical pages of `ratio` blocks hold the blocks in `physical`, in order?
 * A plan from the one view of a buffer to the other must move each block onto
 * itself. */
static void assert_same_blocks(const char *id, const uint32_t *logical, size_t logical_n,
			       uint32_t ratio, const uint32_t *physical,
			       size_t physical_n)
{
	const uint32_t block = 4, pages = 4096;
	struct layout *by_page = latent_side(block * ratio, pages / ratio, 1);
	struct layout *by_block = latent_side(block, pages, 1);
	struct plan_rows got = {0}, want = {0};
	struct plan *plan = plan_of(by_page, by_block,
				    &(struct plan_map){.view = "kv",
						       .src_pages = logical,
						       .src_page_count = logical_n,
						       .dst_pages = physical,
						       .dst_page_count = physical_n});

	plan_rows_of_plan(&got, plan);
	for (size_t i = 0; i < physical_n; i++)
		plan_rows_add(&want, (struct plan_row){.src = physical[i] * block,
						       .dst = physical[i] * block,
						       .len = block});
	plan_rows_assert_equal(id, &got, &want);
	plan_free(plan);
	layout_free(by_page);
	layout_free(by_block);
}

static void kernel_blocks(const char *id, const cJSON *in, const cJSON *expect)
{
	const cJSON *group = golden_at(in, "groups")->child;
	const cJSON *list = golden_at(in, "block_ids")->child;
	const cJSON *want = golden_at(expect, "kernel_ids")->child;

	for (; group; group = group->next, list = list->next, want = want->next) {
		bool state = strcmp(group->valuestring, "ssm") == 0;
		uint32_t logical[GOLDEN_LIST_MAX], physical[GOLDEN_LIST_MAX];
		size_t n = golden_list(list, logical), m = golden_list(want, physical);

		assert_same_blocks(id, logical, n, state ? 1 : golden_u32(in, "ratio"),
				   physical, m);
	}
}

/* A prefix hit starts the local list later; ratios cut the longer list short.
 * Both are token ranges here. */
static void trimmed(const char *id, const cJSON *in, const cJSON *expect)
{
	for (int g = 0; g < cJSON_GetArraySize(golden_at(in, "groups")); g++) {
		uint32_t remote[GOLDEN_LIST_MAX], local[GOLDEN_LIST_MAX];
		uint32_t want_r[GOLDEN_LIST_MAX], want_l[GOLDEN_LIST_MAX];
		const cJSON *rl = cJSON_GetArrayItem(golden_at(in, "remote"), g);
		const cJSON *ll = cJSON_GetArrayItem(golden_at(in, "local"), g);
		size_t rn = golden_list(rl, remote), ln = golden_list(ll, local), n;
		bool hit = golden_num(in, "local_ppl") == golden_num(in, "remote_ppl");
		struct layout *side = latent_side(4, 64, 1);
		struct plan_rows got = {0}, want = {0};
		struct plan *plan = plan_of(
			side, side,
			&(struct plan_map){.view = "kv",
					   .src_pages = remote,
					   .src_page_count = rn,
					   .dst_pages = local,
					   .dst_page_count = ln,
					   .dst_first_token =
						   hit && rn > ln ? (rn - ln) * 4 : 0});

		n = golden_list(cJSON_GetArrayItem(golden_at(expect, "remote"), g),
				want_r);
		assert_int_equal(
			golden_list(cJSON_GetArrayItem(golden_at(expect, "local"), g),
				    want_l),
			n);
		for (size_t i = 0; i < n; i++)
			plan_rows_add(&want, (struct plan_row){.src = want_r[i] * 4,
							       .dst = want_l[i] * 4,
							       .len = 4});
		plan_rows_of_plan(&got, plan);
		plan_rows_assert_equal(id, &got, &want);
		plan_free(plan);
		layout_free(side);
	}
}

static void block_ratio(const char *id, const cJSON *in, const cJSON *expect)
{
	uint32_t local[GOLDEN_LIST_MAX], remote[GOLDEN_LIST_MAX], want[GOLDEN_LIST_MAX];
	uint32_t ratio = golden_u32(in, "block_size_ratio");
	size_t ln = golden_list(golden_at(in, "local"), local);
	size_t rn = golden_list(golden_at(in, "remote"), remote);
	size_t n = golden_list(golden_at(expect, "mapped"), want);
	struct layout *src = latent_side(4, 64, 1);
	struct layout *dst = latent_side(4 * ratio, 64, 1);
	struct plan_rows got = {0}, rows = {0};
	struct plan *plan;

	assert_same_blocks(id, local, ln, ratio, want, n);
	n = golden_list(golden_at(expect, "clipped"), want);
	plan = plan_of(src, dst,
		       &(struct plan_map){.view = "kv",
					  .src_pages = remote,
					  .src_page_count = rn,
					  .dst_pages = local,
					  .dst_page_count = ln});
	plan_rows_of_plan(&got, plan);
	for (size_t i = 0; i < n; i++)
		plan_rows_add(&rows, (struct plan_row){.src = remote[i] * 4,
						       .dst = want[i] * 4,
						       .len = 4});
	plan_rows_assert_equal(id, &got, &rows);
	plan_free(plan);
	layout_free(src);
	layout_free(dst);
}

static void vllm_blocks(const char *id, const cJSON *in, const cJSON *expect)
{
	if (cJSON_GetObjectItemCaseSensitive(expect, "kernel_ids"))
		kernel_blocks(id, in, expect);
	else if (cJSON_GetObjectItemCaseSensitive(in, "block_size_ratio"))
		block_ratio(id, in, expect);
	else if (!cJSON_GetObjectItemCaseSensitive(in, "sliding_window"))
		trimmed(id, in, expect); /* else test_vllm_pools.py's */
}

/* ---- vLLM over Mooncake ---- */

/* Blocks of `len` bytes, this rank's share of those of `most` ranks, in units of the
 * shortest block. */
static struct layout *push_side(uint32_t rank, uint32_t tp, uint64_t len, uint64_t unit,
				uint32_t blocks)
{
	struct layout *layout;
	struct layout_view *view;
	struct layout_layer *layer;
	struct layout_field f = {.page_stride = len,
				 .unit_stride = unit,
				 .unit_bytes = unit,
				 .units = (uint32_t)(len / unit),
				 .total_units = (uint32_t)(len / unit) * tp};
	uint32_t index;

	f.first_unit = f.units * rank;
	must(shape_new(rank, &layout));
	must(shape_buffer(layout, len * blocks, &index));
	must(shape_view(layout, "b", 1, blocks, &view));
	must(shape_layer(view, 0, &layer));
	must(shape_field(layer, "kv", &f));
	return golden_checked(layout);
}

static void push_plan(const char *id, const cJSON *in, const cJSON *expect)
{
	bool replicated = golden_num(in, "producer_cache_replicated");
	uint64_t p_len = golden_num(in, "p_block_len"),
		 d_len = golden_num(in, "d_block_len");
	uint64_t unit = p_len < d_len ? p_len : d_len;
	struct layout *src =
		push_side(replicated ? 0 : golden_u32(in, "p_rank"),
			  replicated ? 1 : golden_u32(in, "p_tp"), p_len, unit, 1);
	struct layout *dst =
		push_side(replicated ? 0 : golden_u32(in, "d_rank"),
			  replicated ? 1 : golden_u32(in, "d_tp"), d_len, unit, 1);
	const uint32_t block = 0;
	struct plan_rows got = {0}, want = {0};
	struct plan *plan = plan_of(src, dst,
				    &(struct plan_map){.view = "b",
						       .src_pages = &block,
						       .src_page_count = 1,
						       .dst_pages = &block,
						       .dst_page_count = 1});

	assert_int_equal(plan->rows > 0, golden_num(expect, "send"));
	plan_rows_of_plan(&got, plan);
	plan_rows_add(&want, (struct plan_row){.src = golden_num(expect, "src_off"),
					       .dst = golden_num(expect, "dst_off"),
					       .len = golden_num(expect, "len")});
	plan_rows_assert_equal(id, &got, &want);
	plan_free(plan);
	layout_free(src);
	layout_free(dst);
}

static void push_blocks(const char *id, const cJSON *in, const cJSON *expect)
{
	uint32_t sp[GOLDEN_LIST_MAX], dp[GOLDEN_LIST_MAX];
	size_t n = golden_list(golden_at(in, "src_blocks"), sp);
	size_t m = golden_list(golden_at(in, "dst_blocks"), dp);
	uint64_t len = golden_nth(golden_at(in, "plan"), 3);
	uint64_t at = golden_nth(golden_at(in, "plan"), 1);
	struct layout *src = push_side(0, 2, golden_num(in, "p_block_len"), len, 64);
	struct layout *dst = push_side((uint32_t)(at / len), 4,
				       golden_num(in, "d_block_len"), len, 64);
	struct plan_rows got = {0}, want = {0};
	struct plan *plan = plan_of(src, dst,
				    &(struct plan_map){.view = "b",
						       .src_pages = sp,
						       .src_page_count = n,
						       .dst_pages = dp,
						       .dst_page_count = m});

	plan_rows_of_buffer(&got, plan, 0, golden_num(in, "src_base"),
			    golden_num(in, "dst_base"));
	plan_rows_of_json(&want, golden_at(expect, "sg"));
	plan_rows_assert_equal(id, &got, &want);
	plan_free(plan);
	layout_free(src);
	layout_free(dst);
}

static void vllm_push(const char *id, const cJSON *in, const cJSON *expect)
{
	if (cJSON_GetObjectItemCaseSensitive(expect, "sg"))
		push_blocks(id, in, expect);
	else
		push_plan(id, in, expect);
}

/* ---- files ---- */

static const struct file {
	const char *name;
	void (*visit)(const char *id, const cJSON *in, const cJSON *expect);
} files[] = {
	{"vllm_tp_mapping.json", vllm_mapping},
	{"vllm_desc_ids.json", vllm_descs},
	{"vllm_mamba_conv_offsets.json", vllm_states},
	{"vllm_fa_descriptors.json", vllm_regions},
	{"vllm_block_ids.json", vllm_blocks},
	{"vllm_mooncake_push.json", vllm_push},
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
