/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks are kept in the layout of the rank that wrote them, so a head is found by the
 * model's number of it: one rank's chunks may serve another's queries, if they have its
 * heads. The engine's description of values (their type, the number per head) is compared
 * with the layout, and with the field's format if that is given.
 */
#include "daemon/attend/form.h"

#include <math.h>
#include <string.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/idmap.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout.h"

static int rope_check(const struct form_rope *rope, uint32_t dqk)
{
	if (rope->dims == 0)
		return 0;
	if (rope->dims > FORM_ROPE_MAX || rope->dims % 2)
		return err_raise(ERR_RANGE, "rope.dims: %u must be even and at most %u",
				 rope->dims, FORM_ROPE_MAX);
	if (rope->first > dqk || rope->dims > dqk - rope->first)
		return err_raise(ERR_RANGE, "rope: [%u, +%u) exceeds dqk (%u)",
				 rope->first, rope->dims, dqk);
	if (rope->pairs > ROPE_INTERLEAVED)
		return err_raise(ERR_INVAL, "rope.pairs: unknown value");
	for (uint32_t i = 0; i < rope->dims / 2; i++) {
		if (!isfinite(rope->inv_freq[i]))
			return err_raise(ERR_INVAL, "rope.inv_freq[%u]: must be finite",
					 i);
	}
	return 0;
}

int form_check(const struct form *form)
{
	const char *fault = attend_shape_fault(&form->shape);

	if (fault)
		return err_raise(ERR_INVAL, "%s", fault);
	if ((form->key_scale[0] || form->value_scale[0]) &&
	    form->shape.kv_type != VALUE_E4M3)
		return err_raise(ERR_INVAL, "key_scale, value_scale: need the kv_type "
					    "fp8_e4m3");
	if (form->value_scale[0] && form->shape.kind == ATTEND_MLA)
		return err_raise(ERR_INVAL, "value_scale: mla has key_scale alone");
	return err_pass(rope_check(&form->rope, form->shape.dqk));
}

bool form_same(const struct form *a, const struct form *b)
{
	const struct attend_shape *x = &a->shape, *y = &b->shape;

	return x->kind == y->kind && x->q_type == y->q_type && x->kv_type == y->kv_type &&
	       x->heads == y->heads && x->kv_heads == y->kv_heads && x->dqk == y->dqk &&
	       x->dv == y->dv && x->scale == y->scale && x->softcap == y->softcap &&
	       a->first_head == b->first_head && strcmp(a->key, b->key) == 0 &&
	       strcmp(a->value, b->value) == 0 &&
	       strcmp(a->key_scale, b->key_scale) == 0 &&
	       strcmp(a->value_scale, b->value_scale) == 0 &&
	       a->rope.dims == b->rope.dims && a->rope.first == b->rope.first &&
	       a->rope.pairs == b->rope.pairs &&
	       memcmp(a->rope.inv_freq, b->rope.inv_freq,
		      a->rope.dims / 2 * sizeof(double)) == 0;
}

uint64_t form_hash(const struct form *form)
{
	const struct attend_shape *x = &form->shape;
	const uint64_t words[] = {
		(uint64_t)x->kind,
		(uint64_t)x->q_type,
		(uint64_t)x->kv_type,
		x->heads,
		x->kv_heads,
		x->dqk,
		x->dv,
		idmap_hash(&x->scale, sizeof(x->scale)),
		idmap_hash(&x->softcap, sizeof(x->softcap)),
		form->first_head,
		idmap_hash(form->key, strlen(form->key)),
		idmap_hash(form->value, strlen(form->value)),
		idmap_hash(form->key_scale, strlen(form->key_scale)),
		idmap_hash(form->value_scale, strlen(form->value_scale)),
		form->rope.dims,
		form->rope.first,
		form->rope.pairs,
		idmap_hash(form->rope.inv_freq, form->rope.dims / 2 * sizeof(double)),
	};

	return idmap_hash(words, sizeof(words));
}

void form_out_read(const struct form *form, const uint8_t *told, uint32_t rows, float *o,
		   float *m, float *l)
{
	enum value_type type = form->out_bf16 ? VALUE_BF16 : VALUE_FP32;
	size_t count = (size_t)rows * form->shape.dv;

	value_widen(type, o, told, count);
	told += count * value_bytes(type);
	memcpy(m, told, rows * sizeof(*m));
	memcpy(l, told + rows * sizeof(*m), rows * sizeof(*l));
}

/* ---- fields ---- */

/* Names of a type in layouts: those that engines' adapters write, which are torch's, and
 * the short one. */
static bool format_is(const char *format, enum value_type type)
{
	static const char *const words[VALUE_TYPES][2] = {
		{"bf16", "bfloat16"},
		{"fp16", "float16"},
		{"fp32", "float32"},
		{"fp8_e4m3", "float8_e4m3fn"},
	};

	return strcmp(format, words[type][0]) == 0 || strcmp(format, words[type][1]) == 0;
}

static int field_find(const struct form *form, const struct layout_layer *layer,
		      const char *name, uint32_t values, enum value_type type,
		      const struct layout_field **f_p)
{
	const struct attend_shape *s = &form->shape;
	const struct layout_field *f = layout_field_find(layer, name);
	uint64_t bytes = (uint64_t)values * value_bytes(type);

	if (!f)
		return err_raise(ERR_NOTFOUND, "layer %u: the chunks have no field '%s'",
				 layer->layer, name);
	if (f->unit_bytes != bytes)
		return err_raise(ERR_LAYOUT,
				 "field %s: a head of a token has %llu bytes, but %u "
				 "values of this type take %llu",
				 name, (unsigned long long)f->unit_bytes, values,
				 (unsigned long long)bytes);
	if (f->format[0] && !format_is(f->format, type))
		return err_raise(ERR_LAYOUT,
				 "field %s: its format is %s, which differs "
				 "from %s",
				 name, f->format,
				 type == s->kv_type ? "kv_type" : "fp32");
	if (form->first_head < f->first_unit ||
	    (uint64_t)form->first_head + s->kv_heads > (uint64_t)f->first_unit + f->units)
		return err_raise(ERR_LAYOUT,
				 "field %s: kv heads [%u, +%u) are not all in these "
				 "chunks (they have [%u, +%u))",
				 name, form->first_head, s->kv_heads, f->first_unit,
				 f->units);
	*f_p = f;
	return 0;
}

int form_fields(const struct form *form, const struct layout_view *view, uint32_t layer,
		struct form_fields *fields_p)
{
	const struct layout_layer *found = layout_layer_find(view, layer);
	const struct attend_shape *s = &form->shape;
	const bool mla = s->kind == ATTEND_MLA;
	int r;

	*fields_p = (struct form_fields){.key = NULL};
	if (!found)
		return err_raise(ERR_NOTFOUND, "layer: %u is not in the chunks", layer);
	r = field_find(form, found, form->key, s->dqk, s->kv_type, &fields_p->key);
	if (r >= 0 && !mla)
		r = field_find(form, found, form->value, s->dv, s->kv_type,
			       &fields_p->value);
	if (r >= 0 && form->key_scale[0])
		r = field_find(form, found, form->key_scale, 1, VALUE_FP32,
			       &fields_p->key_scale);
	if (r >= 0 && form->value_scale[0])
		r = field_find(form, found, form->value_scale, 1, VALUE_FP32,
			       &fields_p->value_scale);
	if (mla) {
		fields_p->value = fields_p->key;
		fields_p->value_scale = fields_p->key_scale;
	}
	return err_pass(r);
}

void form_heads(const struct form *form, const struct layout *layout, uint32_t layer,
		uint32_t *begin_p, uint32_t *end_p)
{
	const char *const names[] = {form->key, form->key_scale, form->value_scale,
				     form->shape.kind == ATTEND_MLA ? "" : form->value};
	const struct layout_view *view =
		form->view[0] ? layout_view_find(layout, form->view)
			      : (layout->view_count == 1 ? layout->views : NULL);
	const struct layout_layer *found = view ? layout_layer_find(view, layer) : NULL;

	*begin_p = 0;
	*end_p = found ? UINT32_MAX : 0;
	for (unsigned int i = 0; i < ARRAY_LEN(names) && *end_p; i++) {
		const struct layout_field *f = layout_field_find(found, names[i]);
		uint32_t end = f ? f->first_unit + f->units : 0;

		if (!names[i][0])
			continue;
		if (f && f->first_unit > *begin_p)
			*begin_p = f->first_unit;
		if (end < *end_p)
			*end_p = end;
	}
}

/* ---- the wire ---- */

#define TYPES(F) F(8, shape.kind) F(8, shape.q_type) F(8, shape.kv_type)
#define SIZES(F)           \
	F(16, shape.heads) \
	F(16, shape.kv_heads) F(16, shape.dqk) F(16, shape.dv) F(32, first_head)
#define ROPE(F) F(32, first) F(32, dims) F(8, pairs)

static void put_f32(struct cursor *out, float value)
{
	cursor_put_u32(out, value_bits(value));
}

static float get_f32(struct cursor *in)
{
	return value_of_bits(cursor_get_u32(in));
}

int form_put(const struct form *m, struct cursor *c)
{
	TYPES(CURSOR_PUT);
	cursor_put_u8(c, m->out_bf16);
	SIZES(CURSOR_PUT);
	put_f32(c, m->shape.scale);
	put_f32(c, m->shape.softcap);
	cursor_put_str(c, m->key);
	cursor_put_str(c, m->value);
	cursor_put_str(c, m->key_scale);
	cursor_put_str(c, m->value_scale);
	return cursor_check(c, "a form");
}

int form_get(struct cursor *c, struct form *m)
{
	uint8_t out_bf16;

	TYPES(CURSOR_GET);
	out_bf16 = cursor_get_u8(c);
	if (out_bf16 > 1)
		return err_raise(ERR_PROTO, "a form with output type %u", out_bf16);
	m->out_bf16 = out_bf16;
	SIZES(CURSOR_GET);
	m->shape.scale = get_f32(c);
	m->shape.softcap = get_f32(c);
	cursor_get_str(c, m->key, sizeof(m->key));
	cursor_get_str(c, m->value, sizeof(m->value));
	cursor_get_str(c, m->key_scale, sizeof(m->key_scale));
	cursor_get_str(c, m->value_scale, sizeof(m->value_scale));
	return cursor_check(c, "a form");
}

int form_rope_put(const struct form_rope *m, struct cursor *c)
{
	ROPE(CURSOR_PUT);
	cursor_put_bytes(c, m->inv_freq, m->dims / 2 * sizeof(double));
	return cursor_check(c, "a rope");
}

int form_rope_get(struct cursor *c, struct form_rope *m)
{
	const void *values;

	ROPE(CURSOR_GET);
	if (m->dims > FORM_ROPE_MAX)
		return err_raise(ERR_PROTO, "a rope of %u values", m->dims);
	values = cursor_get_bytes(c, m->dims / 2 * sizeof(double));
	if (values)
		memcpy(m->inv_freq, values, m->dims / 2 * sizeof(double));
	return cursor_check(c, "a rope");
}
