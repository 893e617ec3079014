/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/math/value.h"

/* What is read or written as 16-bit numbers may lie at any address. */
static uint16_t value_get16(const uint8_t *src, size_t i)
{
	uint16_t h;

	memcpy(&h, src + 2 * i, sizeof(h));
	return h;
}

static void value_put16(uint8_t *dst, size_t i, uint16_t h)
{
	memcpy(dst + 2 * i, &h, sizeof(h));
}

void value_widen(enum value_type type, float *dst, const void *src, size_t count)
{
	size_t i;

	if (type == VALUE_BF16)
		for (i = 0; i < count; i++)
			dst[i] = value_from_bf16(value_get16(src, i));
	else if (type == VALUE_FP16)
		for (i = 0; i < count; i++)
			dst[i] = value_from_fp16(value_get16(src, i));
	else
		memcpy(dst, src, count * sizeof(*dst));
}

void value_narrow(enum value_type type, void *dst, const float *src, size_t count)
{
	size_t i;

	if (type == VALUE_BF16)
		for (i = 0; i < count; i++)
			value_put16(dst, i, value_to_bf16(src[i]));
	else if (type == VALUE_FP16)
		for (i = 0; i < count; i++)
			value_put16(dst, i, value_to_fp16(src[i]));
	else
		memcpy(dst, src, count * sizeof(*src));
}
