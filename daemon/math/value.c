/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/math/value.h"

/* Adjacent values in the compiler's vectors: most caches are bf16. */
typedef uint16_t half_lanes __attribute__((vector_size(16)));
typedef uint32_t word_lanes __attribute__((vector_size(32)));
#define LANES 8u

/* 16-bit numbers may be read or written at any address. */
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

static void value_widen_bf16(float *dst, const uint8_t *src, size_t count)
{
	half_lanes half;
	word_lanes word;
	size_t i;

	for (i = 0; i + LANES <= count; i += LANES) {
		memcpy(&half, src + 2 * i, sizeof(half));
		word = __builtin_convertvector(half, word_lanes) << 16;
		memcpy(dst + i, &word, sizeof(word));
	}
	for (; i < count; i++)
		dst[i] = value_from_bf16(value_get16(src, i));
}

/* value_to_bf16() in lanes. */
static void value_narrow_bf16(uint8_t *dst, const float *src, size_t count)
{
	word_lanes word, nan;
	half_lanes half;
	size_t i;

	for (i = 0; i + LANES <= count; i += LANES) {
		memcpy(&word, src + i, sizeof(word));
		nan = (word_lanes)((word & 0x7fffffff) > 0x7f800000);
		word = ((word >> 16 | 0x40) & nan) |
		       ((word + 0x7fff + (word >> 16 & 1)) >> 16 & ~nan);
		half = __builtin_convertvector(word, half_lanes);
		memcpy(dst + 2 * i, &half, sizeof(half));
	}
	for (; i < count; i++)
		value_put16(dst, i, value_to_bf16(src[i]));
}

void value_widen(enum value_type type, float *dst, const void *src, size_t count)
{
	size_t i;

	if (type == VALUE_BF16)
		value_widen_bf16(dst, src, count);
	else if (type == VALUE_FP16)
		for (i = 0; i < count; i++)
			dst[i] = value_from_fp16(value_get16(src, i));
	else if (type == VALUE_E4M3)
		for (i = 0; i < count; i++)
			dst[i] = value_from_e4m3(((const uint8_t *)src)[i]);
	else
		memcpy(dst, src, count * sizeof(*dst));
}

void value_narrow(enum value_type type, void *dst, const float *src, size_t count)
{
	size_t i;

	if (type == VALUE_BF16)
		value_narrow_bf16(dst, src, count);
	else if (type == VALUE_FP16)
		for (i = 0; i < count; i++)
			value_put16(dst, i, value_to_fp16(src[i]));
	else if (type == VALUE_E4M3)
		for (i = 0; i < count; i++)
			((uint8_t *)dst)[i] = value_to_e4m3(src[i]);
	else
		memcpy(dst, src, count * sizeof(*src));
}
