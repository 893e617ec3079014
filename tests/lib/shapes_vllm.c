/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shapes_vllm: vLLM's KV cache regions and state pages.
 *
 * Source: vLLM at commit b8fb56d97, NIXL connector version 5:
 * nixl/base_worker.py (_build_fa_remote: HND, K and V packed in a head, one
 * region a tensor, block_len = 2 * heads * block_size * head bytes),
 * v1/ssm_conv_transfer_utils.py (sub-projections of the conv state, DS layout)
 * and _build_mamba_remote (conv, then temporal state, in one page).
 *
 * A hybrid model keeps attention and state in one tensor: physical blocks of
 * attention, and logical pages of state that use several of them. Both views
 * name the same buffer; page_stride of the one is a multiple of the other's.
 */
#include "daemon/base/err.h"
#include "tests/lib/shapes.h"
#include "tests/lib/shard.h"

static uint32_t layer_id(const uint32_t *ids, uint32_t i)
{
	return ids ? ids[i] : i;
}

/* ---- attention ---- */

/* One head of one token; packed, its V follows its K. */
static void attention_strides(const struct shape_vllm_attention *a,
			      struct layout_field *f)
{
	uint64_t unit = a->head_bytes;

	switch (a->packing) {
	case SHAPE_VLLM_PACKED:
		f->token_stride = 2 * unit;
		f->unit_stride = 2 * unit * a->block_size;
		break;
	case SHAPE_VLLM_HND:
		f->token_stride = unit;
		f->unit_stride = unit * a->block_size;
		break;
	case SHAPE_VLLM_NHD:
	case SHAPE_VLLM_MLA:
		f->token_stride = unit * f->units;
		f->unit_stride = unit;
		break;
	}
	f->unit_bytes = unit;
}

static int attention_field(const struct shape_vllm_attention *a, struct layout_field *f,
			   uint64_t *part_p)
{
	uint64_t part;
	int r = 0;

	*f = (struct layout_field){.units = 1, .total_units = 1};
	if (a->packing != SHAPE_VLLM_MLA) {
		f->total_units = a->kv_heads;
		r = shard_units(a->kv_heads, a->tp.size, a->tp.rank, &f->first_unit,
				&f->units);
	}
	if (r < 0)
		return err_pass(r);
	if (__builtin_mul_overflow(a->head_bytes, 2ull * f->units, &part) ||
	    __builtin_mul_overflow(part, (uint64_t)a->block_size, &part))
		return err_raise(ERR_RANGE, "view %s: head_bytes %llu overflows", a->view,
				 (unsigned long long)a->head_bytes);
	attention_strides(a, f);
	*part_p = f->unit_bytes * f->units * a->block_size;
	return 0;
}

int shape_vllm_attention(struct layout *layout, const struct shape_vllm_attention *a)
{
	bool mla = a->packing == SHAPE_VLLM_MLA;
	struct layout_view *view;
	struct layout_field f;
	uint64_t part = 0;
	int r = attention_field(a, &f, &part);

	if (r < 0)
		return err_pass(r);
	f.page_stride = a->block_len ? a->block_len : part * (mla ? 1 : 2);
	r = shape_view(layout, a->view, a->block_size, a->blocks, &view);
	for (uint32_t i = 0; i < a->layer_count && r == 0; i++) {
		struct layout_layer *layer;

		r = shape_layer(view, layer_id(a->layer_ids, i), &layer);
		if (r < 0)
			break;
		f.buffer = a->buffers[i];
		f.offset = 0;
		r = shape_field(layer, mla ? "latent" : "k", &f);
		f.offset = a->packing == SHAPE_VLLM_PACKED ? f.unit_bytes : part;
		if (r == 0 && !mla)
			r = shape_field(layer, "v", &f);
	}
	return r < 0 ? err_pass(r) : 0;
}

/* The model's sub-projections in order; how many, 0 when the dimensions do not fit (error
 * set). */
static uint32_t conv_dims(const struct shape_vllm_ssm *s, uint32_t dims[3])
{
	uint64_t inner = (uint64_t)s->temporal[0] * s->temporal[1];
	uint64_t rest;

	if (s->kind == SHAPE_VLLM_MAMBA1) {
		dims[0] = s->conv_dim;
		return 1;
	}
	/* x (or v) has the heads' width; the other two share the rest */
	if (inner >= s->conv_dim || (s->conv_dim - inner) % 2 != 0) {
		err_raise(ERR_INVAL, "view %s: conv_dim %u, heads take %llu", s->view,
			  s->conv_dim, (unsigned long long)inner);
		return 0;
	}
	rest = (s->conv_dim - inner) / 2;
	if (s->kind == SHAPE_VLLM_MAMBA2) {
		dims[0] = (uint32_t)inner;
		dims[1] = dims[2] = (uint32_t)rest;
	} else {
		dims[0] = dims[1] = (uint32_t)rest;
		dims[2] = (uint32_t)inner;
	}
	return 3;
}

struct ssm_field {
	const char *name;
	struct layout_field field;
};

/* This rank's fields, consecutive; the temporal state is the last. */
static int ssm_fields(const struct shape_vllm_ssm *s, struct ssm_field *out,
		      uint32_t *count_p, uint64_t *bytes_p)
{
	static const char *const names[][3] = {
		{"x", "", ""}, {"x", "b", "c"}, {"q", "k", "v"}};
	uint32_t dims[3], n = conv_dims(s, dims);
	uint64_t at = 0;

	if (n == 0)
		return -err_errno(err_last()->code);
	for (uint32_t i = 0; i <= n; i++) {
		struct layout_field f = {.offset = at,
					 .page_stride = s->page_len,
					 .token_stride = s->page_len};
		int r;

		if (i < n) {
			f.total_units = dims[i];
			f.unit_bytes = (uint64_t)s->conv_rows * s->conv_elem;
		} else {
			f.total_units = s->temporal[0];
			f.unit_bytes = (uint64_t)s->temporal[1] * s->ssm_elem;
			if (__builtin_mul_overflow(f.unit_bytes, (uint64_t)s->temporal[2],
						   &f.unit_bytes))
				return err_raise(ERR_RANGE, "view %s: temporal overflows",
						 s->view);
		}
		f.unit_stride = f.unit_bytes;
		r = shard_units(f.total_units, s->tp.size, s->tp.rank, &f.first_unit,
				&f.units);
		if (r < 0)
			return err_pass(r);
		if (__builtin_mul_overflow(f.unit_bytes, (uint64_t)f.units, &at) ||
		    __builtin_add_overflow(f.offset, at, &at))
			return err_raise(ERR_RANGE, "view %s: its state overflows",
					 s->view);
		out[i] = (struct ssm_field){.name = i < n ? names[s->kind][i] : "ssm",
					    .field = f};
	}
	*count_p = n + 1;
	*bytes_p = at;
	return 0;
}

int shape_vllm_ssm(struct layout *layout, const struct shape_vllm_ssm *s)
{
	struct ssm_field fields[4];
	struct layout_view *view;
	uint32_t count = 0;
	uint64_t bytes = 0;
	int r = ssm_fields(s, fields, &count, &bytes);

	if (r < 0)
		return err_pass(r);
	if (bytes > s->page_len)
		return err_raise(ERR_RANGE,
				 "view %s: a state of %llu bytes in a page of %llu",
				 s->view, (unsigned long long)bytes,
				 (unsigned long long)s->page_len);
	r = shape_view(layout, s->view, 1, s->pages, &view);
	for (uint32_t i = 0; i < s->layer_count && r == 0; i++) {
		struct layout_layer *layer;

		r = shape_layer(view, layer_id(s->layer_ids, i), &layer);
		for (uint32_t j = 0; j < count && r == 0; j++) {
			fields[j].field.buffer = s->buffers[i];
			r = shape_field(layer, fields[j].name, &fields[j].field);
		}
	}
	return r < 0 ? err_pass(r) : 0;
}
