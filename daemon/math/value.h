/* SPDX-License-Identifier: Apache-2.0 */
/*
 * value: numbers in the formats of caches and messages, and as fp32. Rounding is to
 * nearest, ties to even; a NaN stays a NaN. Pure; any thread.
 */
#ifndef KVD_MATH_VALUE_H
#define KVD_MATH_VALUE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__ /* gpu/attend.cu */
#define VALUE_FN static __device__ __forceinline__
#else
#define VALUE_FN static inline
#endif

enum value_type {
	VALUE_BF16, /* the upper half of an fp32 */
	VALUE_FP16, /* IEEE 754 binary16 */
	VALUE_FP32,
	VALUE_E4M3,  /* fp8 of OCP, torch's float8_e4m3fn: up to 448, no infinity */
	VALUE_TYPES, /* their number */
};

VALUE_FN uint32_t value_bytes(enum value_type type)
{
	return type == VALUE_FP32 ? 4 : type == VALUE_E4M3 ? 1 : 2;
}

VALUE_FN float value_of_bits(uint32_t bits)
{
	float f;

	memcpy(&f, &bits, sizeof(f));
	return f;
}

VALUE_FN uint32_t value_bits(float f)
{
	uint32_t bits;

	memcpy(&bits, &f, sizeof(bits));
	return bits;
}

VALUE_FN float value_from_bf16(uint16_t h)
{
	return value_of_bits((uint32_t)h << 16);
}

VALUE_FN uint16_t value_to_bf16(float f)
{
	uint32_t bits = value_bits(f);

	if (f != f)
		return (uint16_t)(bits >> 16 |
				  0x40); /* quiet: cut off, it might be inf */
	return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* The exponent's bias differs by 112; the product also makes subnormals normal. */
VALUE_FN float value_from_fp16(uint16_t h)
{
	uint32_t bits = (uint32_t)(h & 0x7fff) << 13;
	float f = value_of_bits(bits) * 0x1p112f;

	bits = value_bits(f) | ((h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0);
	return value_of_bits(bits | (uint32_t)(h & 0x8000) << 16);
}

VALUE_FN uint16_t value_to_fp16(float f)
{
	uint32_t bits = value_bits(f), sign = bits >> 16 & 0x8000;

	bits &= 0x7fffffff;
	if (bits > 0x7f800000)
		return (uint16_t)(sign | 0x7e00);
	if (bits >= 0x477ff000) /* 65520 and above */
		return (uint16_t)(sign | 0x7c00);
	if (bits < 0x38800000) { /* below 2^-14: added to 0.5, the unit is 2^-24 */
		float shifted = value_of_bits(bits) + 0.5f;

		return (uint16_t)(sign | (value_bits(shifted) - 0x3f000000));
	}
	bits += 0xfff + (bits >> 13 & 1);
	return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}

/* As fp16; the bias differs by 120. */
VALUE_FN float value_from_e4m3(uint8_t h)
{
	float f = value_of_bits((uint32_t)(h & 0x7f) << 20) * 0x1p120f;
	uint32_t nan = (h & 0x7f) == 0x7f ? 0x7fc00000u : 0;

	return value_of_bits(value_bits(f) | nan | (uint32_t)(h & 0x80) << 24);
}

/* What would round to more than 448 is a NaN, as in torch. */
VALUE_FN uint8_t value_to_e4m3(float f)
{
	uint32_t bits = value_bits(f), sign = bits >> 24 & 0x80;

	bits &= 0x7fffffff;
	if (bits > 0x43e80000) /* 464 */
		return (uint8_t)(sign | 0x7f);
	if (bits < 0x3c800000) { /* below 2^-6: added to 2^14, the unit is 2^-9 */
		float shifted = value_of_bits(bits) + 0x1p14f;

		return (uint8_t)(sign | (value_bits(shifted) - 0x46800000));
	}
	bits += 0x7ffff + (bits >> 20 & 1);
	return (uint8_t)(sign | (bits - 0x3c000000) >> 20);
}

/* `count` values to fp32 and back. */
void value_widen(enum value_type type, float *dst, const void *src, size_t count);
/* dst may be src. */
void value_narrow(enum value_type type, void *dst, const float *src, size_t count);

#endif
