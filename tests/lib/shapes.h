/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shapes: layouts from an engine's own terms.
 *
 * Tests of the planner compare plans with numbers of the engines' own code. These
 * functions turn the engines' page sizes, item lengths, head counts and tensor-parallel
 * ranks into fields (docs/internals/layouts.md). A layout is started with shape_new(),
 * filled by any of the others, and must pass layout_check() before it is used.
 *
 * Sources: SGLang at commit a4ffb996d, vLLM at commit b8fb56d97 (NIXL connector
 * version 5).
 */
#ifndef KVD_TESTS_LIB_SHAPES_H
#define KVD_TESTS_LIB_SHAPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/plan/layout.h"

/* ---- any engine ---- */

int shape_new(uint32_t rank, struct layout **layout_p);
/* Pointers into the layout are valid until the next call of the same kind. */
int shape_buffer(struct layout *layout, uint64_t len, uint32_t *index_p);
int shape_view(struct layout *layout, const char *name, uint32_t page_tokens,
	       uint32_t pages, struct layout_view **view_p);
/* Layers in ascending order. */
int shape_layer(struct layout_view *view, uint32_t layer, struct layout_layer **layer_p);
int shape_field(struct layout_layer *layer, const char *name,
		const struct layout_field *field);

/* This rank's index among those that share the heads. */
struct shape_tp {
	uint32_t size, rank;
};

/* ---- SGLang: KVArgs (A pointer list is all K layers, then all V layers; one
 * entry a layer for MLA.) ---- */

struct shape_sglang_kv {
	const char *view;
	uint32_t page_size, pages;
	const uint32_t *layer_ids; /* kv_layer_ids, ascending; NULL = 0, 1, … */
	uint32_t layer_count;
	uint32_t kv_heads; /* of the model; MLA: ignored */
	struct shape_tp tp;
	/* MHA: head_dim * element size. MLA: (kv_lora_rank + rope) * element
	 * size, the latent of one token. */
	uint64_t head_bytes;
};
/* Slot rows [slot][head][dim] (NHD); adds 2 * layer_count buffers, K first. */
int shape_sglang_mha(struct layout *layout, const struct shape_sglang_kv *kv);
/* One latent that every rank holds; adds layer_count buffers. Also for the page
 * indexed states swa and c128, in a separate view. A page of dsa's
 * index is not a row of tokens: it is a state with one slot per page. */
int shape_sglang_mla(struct layout *layout, const struct shape_sglang_kv *kv);

/*
 * A state tensor with one slot per request (mamba): conv or temporal. With `groups`
 * (conv_shard_groups: q | k | v) each group is sharded separately and is a separate
 * field; without, the whole dimension is one. `outer` rows of the whole
 * (Kimi: K - 1) are fields too. unit_bytes: bytes of one index of the sharded
 * dimension. Adds layer_count buffers of slots * item length.
 */
#define SHAPE_GROUPS_MAX 8u
struct shape_sglang_state {
	const char *view;
	uint32_t slots;
	const uint32_t *layer_ids;
	uint32_t layer_count;
	uint32_t full_dim;
	uint32_t groups[SHAPE_GROUPS_MAX];
	uint32_t group_count;
	uint64_t unit_bytes;
	uint32_t outer; /* 0 is 1 */
	struct shape_tp tp;
};
int shape_sglang_state(struct layout *layout, const struct shape_sglang_state *state);

/* MetadataBuffers, in the order of aux_data_ptrs. */
struct shape_sglang_aux {
	const char *view;
	uint32_t slots;
	uint32_t hidden_size, hidden_elem_bytes;
	uint32_t top_logprobs;	/* max_top_logprobs, 128 upstream */
	uint32_t sampling_mask; /* SAMPLING_MASK_MAX_TOKENS, 0 = off */
	uint32_t dsa_dim;	/* 0 = off */
};
/* One field per buffer. */
int shape_sglang_aux(struct layout *layout, const struct shape_sglang_aux *aux);

/* ---- vLLM: regions of blocks ---- */

enum shape_vllm_packing {
	SHAPE_VLLM_PACKED, /* v5: [block][head][token][K dim | V dim] */
	SHAPE_VLLM_HND,	   /* [K or V][head][token][dim] in a block */
	SHAPE_VLLM_NHD,	   /* [K or V][token][head][dim] in a block */
	SHAPE_VLLM_MLA,	   /* [token][latent]: one unit */
};

struct shape_vllm_attention {
	const char *view;
	uint32_t block_size, blocks; /* physical (kernel) blocks */
	const uint32_t *layer_ids;
	const uint32_t *buffers; /* per layer: a region, by shape_buffer() */
	uint32_t layer_count;
	uint64_t block_len; /* bytes from block to block; 0 = without padding */
	uint32_t kv_heads;
	uint64_t head_bytes; /* head_dim * element size; MLA: the latent */
	enum shape_vllm_packing packing;
	struct shape_tp tp;
};
int shape_vllm_attention(struct layout *layout, const struct shape_vllm_attention *a);

enum shape_vllm_ssm_kind {
	SHAPE_VLLM_MAMBA1, /* conv: x */
	SHAPE_VLLM_MAMBA2, /* conv: x, B, C */
	SHAPE_VLLM_GDN,	   /* conv: q, k, v */
};

/*
 * Conv state (DS layout: [channel][row], sub-projections one after another),
 * then the temporal state, in one page per request. A logical page is `page_len`
 * bytes, which is a number of physical blocks of a shared tensor: the padding
 * after the state belongs to no field.
 */
struct shape_vllm_ssm {
	const char *view;
	enum shape_vllm_ssm_kind kind;
	uint32_t pages; /* logical */
	uint64_t page_len;
	const uint32_t *layer_ids;
	const uint32_t *buffers;
	uint32_t layer_count;
	uint32_t conv_dim, conv_rows, conv_elem; /* of the model, TP 1 */
	uint32_t temporal[3]; /* of the model: {heads, head dim, state} or {dim, state, 1}
			       */
	uint32_t ssm_elem;
	struct shape_tp tp;
};
int shape_vllm_ssm(struct layout *layout, const struct shape_vllm_ssm *ssm);

#endif
