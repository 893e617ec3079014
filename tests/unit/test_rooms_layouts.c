/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layouts of two engines that differ, through real rooms: a push and a pull of each, one
 * daemon a rank, and every byte of every rank is checked (tests/lib/handover.h).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "tests/lib/shapes.h"
#include "tests/lib/handover.h"
#include "tests/lib/plan_golden.h"

static const uint32_t some_pages[] = {5, 2, 11, 3, 8, 12, 1, 9};
static const uint32_t other_pages[] = {7, 10, 4, 6, 0, 13, 2, 8};
static const uint32_t slot_3[] = {3}, slot_6[] = {6};

#define PAGES(list, n, first)  \
	{                      \
		list, n, first \
	}
/* A state: one slot on each side. */
#define STATE(view)                                                    \
	{                                                              \
		view, {PAGES(slot_3, 1, 0), PAGES(slot_6, 1, 0)}, 0, 1 \
	}

static int setup(void **state)
{
	struct handover *h = malloc(sizeof(*h));

	handover_new(h);
	*state = h;
	return 0;
}

static int teardown(void **state)
{
	handover_free(*state);
	free(*state);
	return 0;
}

/* ---- attention ---- */

static struct layout *mha(uint32_t rank, struct shape_sglang_kv kv)
{
	const struct shape_sglang_aux aux = {.view = "aux",
					     .slots = 8,
					     .hidden_size = 16,
					     .hidden_elem_bytes = 2,
					     .top_logprobs = 4};
	struct layout *layout;

	kv.view = "kv";
	kv.pages = 14;
	kv.kv_heads = 4;
	kv.head_bytes = 32;
	kv.layer_count = kv.layer_count ? kv.layer_count : 6;
	must(shape_new(rank, &layout));
	must(shape_sglang_mha(layout, &kv));
	must(shape_sglang_aux(layout, &aux));
	return layout;
}

/* Six layers over so many pipeline stages. */
static void add_stages(struct handover *h, enum handover_side side, uint32_t stages)
{
	static const uint32_t ids[] = {0, 1, 2, 3, 4, 5};
	uint32_t each = 6 / stages;

	for (uint32_t s = 0; s < stages; s++)
		handover_rank(h, side,
			      mha(s, (struct shape_sglang_kv){.page_size = 4,
							      .layer_ids = ids + s * each,
							      .layer_count = each,
							      .tp = {.size = 1}}));
}

static const struct handover_view kv_and_aux[] = {
	{"kv", {PAGES(some_pages, 6, 0), PAGES(other_pages, 6, 0)}, 0, 23},
	STATE("aux"),
};

static void stages_to(struct handover *h, uint32_t from, uint32_t to)
{
	add_stages(h, HANDOVER_PREFILL, from);
	add_stages(h, HANDOVER_DECODE, to);
	handover_both(h, &(struct handover_request){kv_and_aux, 2, 8});
}

static void two_stages_to_one(void **state)
{
	stages_to(*state, 2, 1);
}

static void two_stages_to_three(void **state)
{
	stages_to(*state, 2, 3);
}

static void one_stage_to_three(void **state)
{
	stages_to(*state, 1, 3);
}

static void add_page_size(struct handover *h, enum handover_side side, uint32_t page_size,
			  struct shape_tp tp)
{
	handover_rank(
		h, side,
		mha(tp.rank, (struct shape_sglang_kv){.page_size = page_size, .tp = tp}));
}

/* Tokens 20 … 89: the decode side has the first 20 already. */
static void pages_of_16_to_pages_of_32(void **state)
{
	static const struct handover_view views[] = {
		{"kv", {PAGES(some_pages, 6, 0), PAGES(other_pages, 3, 0)}, 20, 90},
		STATE("aux"),
	};

	add_page_size(*state, HANDOVER_PREFILL, 16, (struct shape_tp){1, 0});
	add_page_size(*state, HANDOVER_DECODE, 32, (struct shape_tp){1, 0});
	handover_both(*state, &(struct handover_request){views, 2, 32});
}

/* The same back, with other heads on each side. */
static void pages_of_32_to_pages_of_16_on_two_ranks(void **state)
{
	static const struct handover_view views[] = {
		{"kv", {PAGES(some_pages, 3, 0), PAGES(other_pages, 5, 16)}, 20, 90},
		STATE("aux"),
	};

	add_page_size(*state, HANDOVER_PREFILL, 32, (struct shape_tp){1, 0});
	for (uint32_t r = 0; r < 2; r++)
		add_page_size(*state, HANDOVER_DECODE, 16, (struct shape_tp){2, r});
	handover_both(*state, &(struct handover_request){views, 2, 32});
}

static void add_packing(struct handover *h, enum handover_side side,
			enum shape_vllm_packing packing, struct shape_tp tp)
{
	uint32_t regions[3], block = 2 * 4 / tp.size * 8 * 32;
	struct shape_vllm_attention a = {.view = "kv",
					 .block_size = 8,
					 .blocks = 14,
					 .buffers = regions,
					 .layer_count = ARRAY_LEN(regions),
					 .kv_heads = 4,
					 .head_bytes = 32,
					 .packing = packing,
					 .tp = tp};
	struct layout *layout;

	must(shape_new(tp.rank, &layout));
	for (unsigned int i = 0; i < ARRAY_LEN(regions); i++)
		must(shape_buffer(layout, 14ull * block, &regions[i]));
	must(shape_vllm_attention(layout, &a));
	handover_rank(h, side, layout);
}

static const struct handover_view blocks_of_kv = {
	"kv", {PAGES(some_pages, 5, 0), PAGES(other_pages, 5, 0)}, 0, 37};

static void nhd_to_hnd(void **state)
{
	add_packing(*state, HANDOVER_PREFILL, SHAPE_VLLM_NHD, (struct shape_tp){1, 0});
	add_packing(*state, HANDOVER_DECODE, SHAPE_VLLM_HND, (struct shape_tp){1, 0});
	handover_both(*state, &(struct handover_request){&blocks_of_kv, 1, 16});
}

static void hnd_of_two_ranks_to_nhd_of_one(void **state)
{
	for (uint32_t r = 0; r < 2; r++)
		add_packing(*state, HANDOVER_PREFILL, SHAPE_VLLM_HND,
			    (struct shape_tp){2, r});
	add_packing(*state, HANDOVER_DECODE, SHAPE_VLLM_NHD, (struct shape_tp){1, 0});
	handover_both(*state, &(struct handover_request){&blocks_of_kv, 1, 16});
}

/* ---- state ---- */

/* Three layers of a small model; x takes 32 of the channels. */
static struct shape_vllm_ssm small_ssm(enum shape_vllm_ssm_kind kind, struct shape_tp tp)
{
	struct shape_vllm_ssm s = {.view = "ssm",
				   .kind = kind,
				   .conv_dim = 64,
				   .conv_rows = 3,
				   .conv_elem = 2,
				   .temporal = {4, 8, 16},
				   .ssm_elem = 2,
				   .tp = tp};

	if (kind == SHAPE_VLLM_MAMBA1) {
		s.temporal[0] = 64;
		s.temporal[1] = 4;
		s.temporal[2] = 1;
	}
	return s;
}

static uint64_t state_bytes(const struct shape_vllm_ssm *s)
{
	uint64_t conv = (uint64_t)s->conv_dim * s->conv_rows * s->conv_elem;
	uint64_t ssm =
		(uint64_t)s->temporal[0] * s->temporal[1] * s->temporal[2] * s->ssm_elem;

	return (conv + ssm) / s->tp.size;
}

static void add_states(struct handover *h, enum handover_side side,
		       enum shape_vllm_ssm_kind kind, uint32_t ranks, uint64_t padding)
{
	for (uint32_t r = 0; r < ranks; r++) {
		struct shape_vllm_ssm s = small_ssm(kind, (struct shape_tp){ranks, r});
		struct layout *layout;
		uint32_t regions[3];

		s.pages = 8;
		s.page_len = state_bytes(&s) + padding;
		s.buffers = regions;
		s.layer_count = ARRAY_LEN(regions);
		must(shape_new(r, &layout));
		for (unsigned int i = 0; i < ARRAY_LEN(regions); i++)
			must(shape_buffer(layout, s.pages * s.page_len, &regions[i]));
		must(shape_vllm_ssm(layout, &s));
		handover_rank(h, side, layout);
	}
}

static void states_to(struct handover *h, enum shape_vllm_ssm_kind kind, uint32_t from,
		      uint32_t to)
{
	static const struct handover_view view = STATE("ssm");
	struct shape_vllm_ssm whole = small_ssm(kind, (struct shape_tp){1, 0});

	add_states(h, HANDOVER_PREFILL, kind, from, 40);
	add_states(h, HANDOVER_DECODE, kind, to, 24);
	handover_both(h, &(struct handover_request){&view, 1, 0});
	assert_int_equal(h->moved, 3 * state_bytes(&whole)); /* padding stays */
}

#define STATES(kind, from, to)                                            \
	static void states_of_##kind##_tp##from##_to_tp##to(void **state) \
	{                                                                 \
		states_to(*state, SHAPE_VLLM_##kind, from, to);           \
	}
STATES(MAMBA1, 2, 1)
STATES(MAMBA1, 1, 4)
STATES(MAMBA2, 2, 1)
STATES(MAMBA2, 1, 4)
STATES(MAMBA2, 4, 2)
STATES(GDN, 2, 1)
STATES(GDN, 1, 4)
STATES(GDN, 2, 4)

/* ---- attention and state in one tensor ---- */

/* Three tensors, each of one attention layer and one state layer; a state page takes
 * as many attention blocks as it needs. */
static uint32_t add_hybrid(struct handover *h, enum handover_side side,
			   uint32_t block_size, struct shape_tp tp)
{
	struct shape_vllm_ssm s = small_ssm(SHAPE_VLLM_MAMBA2, tp);
	uint32_t regions[3], block = 2 * 4 / tp.size * block_size * 16;
	uint32_t ratio = (uint32_t)(state_bytes(&s) + block - 1) / block;
	static const uint32_t attention[] = {1, 3, 5}, states[] = {0, 2, 4};
	struct shape_vllm_attention a = {.view = "kv",
					 .block_size = block_size,
					 .blocks = 8 * ratio,
					 .layer_ids = attention,
					 .buffers = regions,
					 .layer_count = ARRAY_LEN(regions),
					 .kv_heads = 4,
					 .head_bytes = 16,
					 .packing = SHAPE_VLLM_PACKED,
					 .tp = tp};
	struct layout *layout;

	s.pages = 8;
	s.page_len = (uint64_t)ratio * block;
	s.layer_ids = states;
	s.buffers = regions;
	s.layer_count = ARRAY_LEN(regions);
	must(shape_new(tp.rank, &layout));
	for (unsigned int i = 0; i < ARRAY_LEN(regions); i++)
		must(shape_buffer(layout, s.pages * s.page_len, &regions[i]));
	must(shape_vllm_attention(layout, &a));
	must(shape_vllm_ssm(layout, &s));
	handover_rank(h, side, layout);
	return ratio;
}

/* Blocks of logical pages 0, 1 and 2, states in 3 and 6: they share no byte. */
static const uint32_t early_blocks[] = {4, 1, 0, 5, 3};
static const struct handover_view hybrid_views[] = {
	{"kv", {PAGES(early_blocks, 5, 0), PAGES(early_blocks, 3, 0)}, 0, 19},
	STATE("ssm"),
};

static void hybrid_views_of_one_buffer_with_other_ratios(void **state)
{
	uint32_t from, to;

	for (uint32_t r = 0; r < 2; r++)
		from = add_hybrid(*state, HANDOVER_PREFILL, 4, (struct shape_tp){2, r});
	to = add_hybrid(*state, HANDOVER_DECODE, 8, (struct shape_tp){1, 0});
	assert_int_equal(from, 3);
	assert_int_equal(to, 2);
	handover_both(*state, &(struct handover_request){hybrid_views, 2, 8});
}

/* ---- Nemotron-3-Nano-30B ---- */

/* 52 layers: 23 of Mamba-2, 6 of attention, 23 without a cache. vLLM puts the former
 * into 5 groups of up to 6, a layer of each group in each of 6 tensors: `*` the
 * attention, 0 … 3 the groups of states (every fourth layer). */
#define NANO "0E1E2*E3E0E1*E2E3E0*E1E2E3*E0E1E2*E3E0E1E2*E3E0E1E2E"
#define NANO_TENSORS 6u
#define NANO_PAGES 6u /* logical: one of attention, four of state, one of others */

static unsigned int nano_layers(char group, uint32_t ids[NANO_TENSORS])
{
	unsigned int n = 0;

	for (uint32_t l = 0; NANO[l]; l++)
		if (NANO[l] == group) {
			assert_true(n < NANO_TENSORS);
			ids[n++] = l;
		}
	return n;
}

/* FP8 keys and values, states of 32 bits. Returns the bytes of a logical page. */
static uint64_t add_nano(struct handover *h, enum handover_side side, struct shape_tp tp)
{
	static const char *const names[] = {"mamba0", "mamba1", "mamba2", "mamba3"};
	const uint32_t heads = 2 / tp.size, block = 2 * heads * 16 * 128;
	uint32_t regions[NANO_TENSORS], ids[NANO_TENSORS];
	struct shape_vllm_ssm s = {.kind = SHAPE_VLLM_MAMBA2,
				   .pages = NANO_PAGES,
				   .layer_ids = ids,
				   .buffers = regions,
				   .conv_dim = 6144,
				   .conv_rows = 3,
				   .conv_elem = 2,
				   .temporal = {64, 64, 128},
				   .ssm_elem = 4,
				   .tp = tp};
	uint32_t ratio = (uint32_t)(state_bytes(&s) + block - 1) / block;
	struct shape_vllm_attention a = {.view = "attention",
					 .block_size = 16,
					 .blocks = NANO_PAGES * ratio,
					 .layer_ids = ids,
					 .buffers = regions,
					 .kv_heads = 2,
					 .head_bytes = 128,
					 .packing = SHAPE_VLLM_PACKED,
					 .tp = tp};
	struct layout *layout;

	assert_int_equal(ratio, 261); /* vllm_mamba_conv_offsets.json */
	assert_int_equal(strlen(NANO), 52);
	s.page_len = (uint64_t)ratio * block;
	must(shape_new(tp.rank, &layout));
	for (unsigned int i = 0; i < NANO_TENSORS; i++)
		must(shape_buffer(layout, NANO_PAGES * s.page_len, &regions[i]));
	a.layer_count = nano_layers('*', ids);
	must(shape_vllm_attention(layout, &a));
	for (unsigned int g = 0; g < 4; g++) {
		s.view = names[g];
		s.layer_count = nano_layers((char)('0' + g), ids);
		must(shape_vllm_ssm(layout, &s));
	}
	handover_rank(h, side, layout);
	return s.page_len;
}

#define NANO_TOKENS \
	999u /* of a prompt of 1000: the last is the decode side's to compute */
#define NANO_BLOCKS 63u

/* Attention in the blocks of logical page 2 there and 4 here, the states in others. */
static void nano_to(struct handover *h, uint32_t ranks)
{
	static const uint32_t src[] = {0, 5, 3, 1}, dst[] = {2, 0, 5, 1};
	uint32_t blocks[2][NANO_BLOCKS];
	struct handover_view views[5] = {
		{"attention",
		 {PAGES(blocks[0], NANO_BLOCKS, 0), PAGES(blocks[1], NANO_BLOCKS, 0)},
		 0,
		 NANO_TOKENS},
		{"mamba0", {PAGES(&src[0], 1, 0), PAGES(&dst[0], 1, 0)}, 0, 1},
		{"mamba1", {PAGES(&src[1], 1, 0), PAGES(&dst[1], 1, 0)}, 0, 1},
		{"mamba2", {PAGES(&src[2], 1, 0), PAGES(&dst[2], 1, 0)}, 0, 1},
		{"mamba3", {PAGES(&src[3], 1, 0), PAGES(&dst[3], 1, 0)}, 0, 1},
	};
	const uint64_t state = 36864 + 2097152, token = 2 * 2 * 128;
	uint64_t naive = 0, moved = 6 * NANO_TOKENS * token + 23 * state;

	for (uint32_t i = 0; i < NANO_BLOCKS; i++) {
		blocks[0][i] = 2 * 261 + i;
		blocks[1][i] = 4 * 261 + (i * 5) % NANO_BLOCKS;
	}
	for (uint32_t r = 0; r < 2; r++)
		add_nano(h, HANDOVER_PREFILL, (struct shape_tp){2, r});
	for (uint32_t r = 0; r < ranks; r++)
		naive += (6 + 23) *
			 add_nano(h, HANDOVER_DECODE, (struct shape_tp){ranks, r});
	handover_both(h, &(struct handover_request){views, 5, 512});
	assert_int_equal(h->moved, moved);
	print_message("Nemotron-3-Nano, %u tokens, TP2 to TP%u: %llu bytes naive (whole "
		      "pages), %llu moved, %llu descriptors\n",
		      NANO_TOKENS, ranks, (unsigned long long)naive,
		      (unsigned long long)moved, (unsigned long long)h->rows);
}

static void nemotron_nano_of_tp2_to_tp2(void **state)
{
	nano_to(*state, 2);
}

static void nemotron_nano_of_tp2_to_tp1(void **state)
{
	nano_to(*state, 1);
}

/* ---- prefix hits ---- */

/* All of the attention is present; data per request is still sent. */
static void full_prefix_hit_moves_the_rest_only(void **state)
{
	static const struct handover_view views[] = {
		{"kv", {PAGES(early_blocks, 5, 0), PAGES(early_blocks, 0, 20)}, 20, 20},
		STATE("ssm"),
	};
	struct shape_vllm_ssm s = small_ssm(SHAPE_VLLM_MAMBA2, (struct shape_tp){1, 0});
	struct handover *h = *state;

	add_hybrid(h, HANDOVER_PREFILL, 4, s.tp);
	add_hybrid(h, HANDOVER_DECODE, 4, s.tp);
	handover_both(h, &(struct handover_request){views, 2, 8});
	assert_int_equal(h->moved, 3 * state_bytes(&s));
}

static void full_prefix_hit_without_state_moves_nothing(void **state)
{
	static const struct handover_view views[] = {
		{"kv", {PAGES(some_pages, 6, 0), PAGES(other_pages, 0, 24)}, 24, 24},
	};
	struct handover *h = *state;

	add_stages(h, HANDOVER_PREFILL, 1);
	add_stages(h, HANDOVER_DECODE, 1);
	handover_both(h, &(struct handover_request){views, 1, 8});
	assert_int_equal(h->moved, 0);
}

/* ---- the check itself ---- */

static void one_byte_more_or_less_is_noticed(void **state)
{
	struct handover *h = *state;
	const struct handover_rank *dst = &h->ranks[HANDOVER_DECODE][0];

	stages_to(h, 1, 1);
	for (uint64_t i = 0; i < dst->bytes; i++) {
		dst->base[i] ^= 1;
		if (i % 997 == 0)
			assert_int_equal(handover_wrong(h, NULL), 1);
		dst->base[i] ^= 1;
	}
	assert_int_equal(handover_wrong(h, NULL), 0);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, setup, teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(one_byte_more_or_less_is_noticed),
		CASE(two_stages_to_one),
		CASE(two_stages_to_three),
		CASE(one_stage_to_three),
		CASE(pages_of_16_to_pages_of_32),
		CASE(pages_of_32_to_pages_of_16_on_two_ranks),
		CASE(nhd_to_hnd),
		CASE(hnd_of_two_ranks_to_nhd_of_one),
		CASE(states_of_MAMBA1_tp2_to_tp1),
		CASE(states_of_MAMBA1_tp1_to_tp4),
		CASE(states_of_MAMBA2_tp2_to_tp1),
		CASE(states_of_MAMBA2_tp1_to_tp4),
		CASE(states_of_MAMBA2_tp4_to_tp2),
		CASE(states_of_GDN_tp2_to_tp1),
		CASE(states_of_GDN_tp1_to_tp4),
		CASE(states_of_GDN_tp2_to_tp4),
		CASE(hybrid_views_of_one_buffer_with_other_ratios),
		CASE(nemotron_nano_of_tp2_to_tp2),
		CASE(nemotron_nano_of_tp2_to_tp1),
		CASE(full_prefix_hit_moves_the_rest_only),
		CASE(full_prefix_hit_without_state_moves_nothing),
	};

	if (getenv("KVD_TEST_ONLY"))
		cmocka_set_test_filter(getenv("KVD_TEST_ONLY"));
	return cmocka_run_group_tests_name("layouts", tests, NULL, NULL);
}
