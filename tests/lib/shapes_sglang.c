/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shapes_sglang: SGLang's pools in the terms of KVArgs.
 *
 * Source: SGLang at commit a4ffb996d. KVArgs and the pointer order:
 * disaggregation/base/conn.py and mem_cache/memory_pool.py (all K layers, then
 * all V layers; [slot][head][dim]; item_len = page_size * bytes of a token).
 * Head slices: disaggregation/common and mooncake/conn.py send_kvcache_slice.
 * State blocks: disaggregation/utils.py (conv_shard_groups, outer counts).
 * Aux buffers: disaggregation/utils.py MetadataBuffers.
 *
 * MLA: K and V are one latent, equal on every rank, so it is one unit that all
 * ranks hold; the shard selection then spreads rooms over the ranks, where SGLang
 * always uses the first and treats the others as dummies.
 */
#include <stdio.h>

#include "daemon/base/err.h"
#include "tests/lib/shapes.h"
#include "tests/lib/shard.h"

static uint32_t layer_id(const uint32_t *ids, uint32_t i)
{
	return ids ? ids[i] : i;
}

/* Token-major rows of `units` units; `field` has its units set. */
static void rows_shape(struct layout_field *field, uint32_t page_size,
		       uint64_t unit_bytes)
{
	field->unit_bytes = unit_bytes;
	field->unit_stride = unit_bytes;
	field->token_stride = unit_bytes * field->units;
	field->page_stride = field->token_stride * page_size;
}

/* One layer's field in a separate buffer. */
static int add_layer_buffer(struct layout *layout, struct layout_layer *layer,
			    const char *name, uint32_t pages, struct layout_field *field)
{
	uint64_t len;
	int r;

	if (__builtin_mul_overflow(field->page_stride, (uint64_t)pages, &len))
		return err_raise(ERR_RANGE, "field %s: %llu bytes x %u pages overflows",
				 name, (unsigned long long)field->page_stride, pages);
	r = shape_buffer(layout, len, &field->buffer);
	if (r == 0)
		r = shape_field(layer, name, field);
	return r < 0 ? err_pass(r) : 0;
}

static int kv_field(const struct shape_sglang_kv *kv, bool mla, struct layout_field *f)
{
	uint64_t token;
	int r = 0;

	*f = (struct layout_field){.units = 1, .total_units = 1};
	if (!mla) {
		f->total_units = kv->kv_heads;
		r = shard_units(kv->kv_heads, kv->tp.size, kv->tp.rank, &f->first_unit,
				&f->units);
	}
	if (r < 0)
		return err_pass(r);
	if (__builtin_mul_overflow(kv->head_bytes, (uint64_t)f->units, &token) ||
	    __builtin_mul_overflow(token, (uint64_t)kv->page_size, &token))
		return err_raise(ERR_RANGE, "view %s: head_bytes %llu overflows",
				 kv->view, (unsigned long long)kv->head_bytes);
	rows_shape(f, kv->page_size, kv->head_bytes);
	return 0;
}

/* K of all layers, then V of all layers: the second pass finds its layers. */
static int add_kv(struct layout *layout, const struct shape_sglang_kv *kv, bool mla)
{
	static const char *const names[] = {"k", "v"};
	struct layout_view *view;
	struct layout_field field;
	int r = kv_field(kv, mla, &field);

	if (r == 0)
		r = shape_view(layout, kv->view, kv->page_size, kv->pages, &view);
	for (uint32_t i = 0; i < kv->layer_count && r == 0; i++) {
		struct layout_layer *layer;

		r = shape_layer(view, layer_id(kv->layer_ids, i), &layer);
		if (r == 0)
			r = add_layer_buffer(layout, layer, mla ? "latent" : names[0],
					     kv->pages, &field);
	}
	for (uint32_t i = 0; i < kv->layer_count && r == 0 && !mla; i++)
		r = add_layer_buffer(layout, &view->layers[i], names[1], kv->pages,
				     &field);
	return r < 0 ? err_pass(r) : 0;
}

int shape_sglang_mha(struct layout *layout, const struct shape_sglang_kv *kv)
{
	return add_kv(layout, kv, false);
}

int shape_sglang_mla(struct layout *layout, const struct shape_sglang_kv *kv)
{
	return add_kv(layout, kv, true);
}

/* ---- state ---- */

/* The groups, or the whole dimension as the only one. */
static int state_groups(const struct shape_sglang_state *s, uint32_t *dims,
			uint32_t *count_p)
{
	uint64_t sum = 0;

	if (s->group_count > SHAPE_GROUPS_MAX)
		return err_raise(ERR_LIMIT, "view %s: %u groups, the limit is %u",
				 s->view, s->group_count, SHAPE_GROUPS_MAX);
	*count_p = s->group_count ? s->group_count : 1;
	if (s->group_count == 0) {
		dims[0] = s->full_dim;
		return 0;
	}
	for (uint32_t i = 0; i < s->group_count; i++) {
		dims[i] = s->groups[i];
		sum += dims[i];
	}
	if (sum != s->full_dim)
		return err_raise(ERR_INVAL, "view %s: groups make %llu, full_dim is %u",
				 s->view, (unsigned long long)sum, s->full_dim);
	return 0;
}

/* All fields of one layer, consecutive; returns the item length. */
static int state_fields(const struct shape_sglang_state *s, uint32_t buffer,
			struct layout_layer *layer, uint64_t *item_p)
{
	uint32_t dims[SHAPE_GROUPS_MAX], count = 0;
	uint32_t outer = s->outer ? s->outer : 1;
	uint64_t at = 0;
	int r = state_groups(s, dims, &count);

	if (r < 0)
		return err_pass(r);
	for (uint32_t o = 0; o < outer; o++) {
		for (uint32_t g = 0; g < count; g++) {
			struct layout_field f = {.buffer = buffer,
						 .offset = at,
						 .unit_stride = s->unit_bytes,
						 .unit_bytes = s->unit_bytes,
						 .total_units = dims[g]};
			char name[LAYOUT_NAME_MAX];
			uint64_t len;

			r = shard_units(dims[g], s->tp.size, s->tp.rank, &f.first_unit,
					&f.units);
			if (r < 0)
				return err_pass(r);
			if (__builtin_mul_overflow(s->unit_bytes, (uint64_t)f.units,
						   &len) ||
			    __builtin_add_overflow(at, len, &at))
				return err_raise(ERR_RANGE,
						 "view %s: unit_bytes overflows",
						 s->view);
			snprintf(name, sizeof(name), "s%u.%u", o, g);
			r = shape_field(layer, name, &f);
			if (r < 0)
				return err_pass(r);
		}
	}
	*item_p = at;
	return 0;
}

int shape_sglang_state(struct layout *layout, const struct shape_sglang_state *s)
{
	struct layout_view *view;
	int r = shape_view(layout, s->view, 1, s->slots, &view);

	for (uint32_t i = 0; i < s->layer_count && r == 0; i++) {
		struct layout_layer *layer;
		uint32_t buffer;
		uint64_t item = 0, len;

		r = shape_buffer(layout, 0, &buffer);
		if (r == 0)
			r = shape_layer(view, layer_id(s->layer_ids, i), &layer);
		if (r == 0)
			r = state_fields(s, buffer, layer, &item);
		if (r < 0)
			break;
		if (__builtin_mul_overflow(item, (uint64_t)s->slots, &len))
			return err_raise(ERR_RANGE, "view %s: %u slots overflow", s->view,
					 s->slots);
		layout->buffers[buffer] = len;
		for (uint32_t j = 0; j < layer->field_count; j++)
			layer->fields[j].page_stride = layer->fields[j].token_stride =
				item;
	}
	return r < 0 ? err_pass(r) : 0;
}

/* ---- aux ---- */

#define LINE 64u /* upstream pads small tensors to a cache line */
#define TOPK_INDEX 128u

int shape_sglang_aux(struct layout *layout, const struct shape_sglang_aux *aux)
{
	const uint64_t top = 4ull * aux->top_logprobs;
	const uint64_t mask = aux->sampling_mask;
	const struct {
		const char *name;
		uint64_t item_len; /* 0 = absent */
	} items[] = {
		{"output_ids", LINE},
		{"cached_tokens", LINE},
		{"output_token_logprobs_val", LINE},
		{"output_token_logprobs_idx", LINE},
		{"output_top_logprobs_val", top},
		{"output_top_logprobs_idx", top},
		{"output_sampling_mask_len", mask ? LINE : 0},
		{"output_sampling_mask_idx", 4 * mask},
		{"output_sampling_logprobs", mask ? LINE : 0},
		{"output_topk_p", LINE},
		{"output_topk_index", TOPK_INDEX},
		{"output_hidden_states",
		 (uint64_t)aux->hidden_size * aux->hidden_elem_bytes},
		{"output_dsa_topk_indices", 4ull * aux->dsa_dim},
		{"bootstrap_room", LINE},
	};
	struct layout_view *view;
	struct layout_layer *layer;
	int r = shape_view(layout, aux->view, 1, aux->slots, &view);

	if (r == 0)
		r = shape_layer(view, 0, &layer);
	for (size_t i = 0; i < sizeof(items) / sizeof(items[0]) && r == 0; i++) {
		struct layout_field f = {.units = 1, .total_units = 1};

		if (items[i].item_len == 0)
			continue;
		rows_shape(&f, 1, items[i].item_len);
		r = add_layer_buffer(layout, layer, items[i].name, aux->slots, &f);
	}
	return r < 0 ? err_pass(r) : 0;
}
