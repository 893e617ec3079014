/* SPDX-License-Identifier: Apache-2.0 */
/*
 * form: the parameters of an engine's attention that its computation needs: the layout of
 * query rows, keys and values, and the formula of scores.
 */
#ifndef KVD_ATTEND_FORM_H
#define KVD_ATTEND_FORM_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/math/attend.h"

struct cursor;
struct layout;
struct layout_field;
struct layout_view;

#define FORM_ROPE_MAX (2 * ROPE_PAIRS_MAX) /* rotated values of a head */
#define FORM_NAME_MAX 32u

/* Values [first, first + dims) of a query row and a key are pairs that are rotated by the
 * position. */
struct form_rope {
	uint32_t first, dims; /* dims 0: unknown */
	uint8_t pairs;	      /* enum rope_pairs */
	double inv_freq[ROPE_PAIRS_MAX];
};

struct form {
	struct attend_shape shape;
	bool out_bf16;		  /* o of a reply is bf16, not fp32 */
	uint32_t first_head;	  /* of the model's kv heads: the first of these */
	char view[FORM_NAME_MAX]; /* "": the only one */
	char key[FORM_NAME_MAX], value[FORM_NAME_MAX]; /* fields; MLA: key alone */
	/* fields of their fp32 scales, one for a head of a token; "": none; MLA: the
	 * key's is the value's, too */
	char key_scale[FORM_NAME_MAX], value_scale[FORM_NAME_MAX];
	struct form_rope rope;
};

/* ERR_INVAL, ERR_RANGE with the member's name. */
int form_check(const struct form *form);
/* Can these rows be computed together? (Names were resolved before; kernels write fp32.)
 */
bool form_same(const struct form *a, const struct form *b);
uint64_t form_hash(const struct form *form); /* equal for equal forms */
static inline uint64_t form_q_bytes(const struct form *f, uint32_t rows)
{
	return (uint64_t)rows * f->shape.dqk *
	       value_bytes((enum value_type)f->shape.q_type);
}
/* A reply's values: o, then m and l, which are fp32. */
static inline uint64_t form_out_bytes(const struct form *f, uint32_t rows)
{
	enum value_type type = f->out_bf16 ? VALUE_BF16 : VALUE_FP32;

	return (uint64_t)rows * (f->shape.dv * value_bytes(type) + 2 * sizeof(float));
}
void form_out_read(const struct form *form, const uint8_t *told, uint32_t rows, float *o,
		   float *m, float *l);

/* The fields of a layer that a form names: MLA's value is its key. NULL: no scale. */
struct form_fields {
	const struct layout_field *key, *value, *key_scale, *value_scale;
};
/* ERR_NOTFOUND, ERR_LAYOUT. */
int form_fields(const struct form *form, const struct layout_view *view, uint32_t layer,
		struct form_fields *fields_p);

/* The model's kv heads [*begin_p, *end_p) that the layout has for the form's attention in
 * a layer; *end_p 0: none. */
void form_heads(const struct form *form, const struct layout *layout, uint32_t layer,
		uint32_t *begin_p, uint32_t *end_p);

/* To and from ATTEND. */
int form_put(const struct form *form, struct cursor *out);
int form_get(struct cursor *in, struct form *form);
int form_rope_put(const struct form_rope *rope, struct cursor *out);
int form_rope_get(struct cursor *in, struct form_rope *rope);

#endif
