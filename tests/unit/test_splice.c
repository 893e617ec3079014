/* SPDX-License-Identifier: Apache-2.0 */
/* Turned rope values against fp64, both orders of pairs, far and back; and what does not
 * turn. And values of 16 bits, all of them.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/math/splice.h"
#include "tests/lib/attend_case.h"

#define VALUES 96u
#define FIRST 24u
#define DIMS 64u
#define ROWS 5u

static double frequencies[DIMS / 2];

static struct rope rope_of(enum rope_pairs pairs)
{
	uint32_t i;

	for (i = 0; i < DIMS / 2; i++)
		frequencies[i] = pow(10000, -2.0 * i / DIMS);
	return (struct rope){.first = FIRST,
			     .dims = DIMS,
			     .pairs = (uint8_t)pairs,
			     .inv_freq = frequencies};
}

/* fp64, with the angle in long double. */
static void turned(enum rope_pairs pairs, const double *x, double *y, int64_t delta)
{
	uint32_t i;

	memcpy(y, x, VALUES * sizeof(*y));
	for (i = 0; i < DIMS / 2; i++) {
		uint32_t a = FIRST + (pairs == ROPE_HALVES ? i : 2 * i);
		uint32_t b = pairs == ROPE_HALVES ? a + DIMS / 2 : a + 1;
		long double angle = (long double)delta * (long double)frequencies[i];
		double c = (double)cosl(angle), s = (double)sinl(angle);

		y[a] = x[a] * c - x[b] * s;
		y[b] = x[b] * c + x[a] * s;
	}
}

static void turn_equals_fp64(void **state)
{
	static const int64_t deltas[] = {1, -1, 77, -4096, 131072, 1000000, INT32_MIN};
	/* of a value, or of this one if it is larger */
	static const double allowed[VALUE_TYPES] = {0x1p-8, 0x1p-11, 1e-6, 0x1p-4};
	static const double least[VALUE_TYPES] = {0x1p-8, 0x1p-8, 1, 0x1p-6};
	uint8_t src[ROWS * VALUES * 4], dst[ROWS * VALUES * 4];
	double x[VALUES], y[VALUES], worst[VALUE_TYPES] = {0}, size;
	uint32_t type, d, pairs, r, i;
	struct rope_turn turn;
	uint64_t seed = 3;

	(void)state;
	for (i = 0; i < 7 * 2 * VALUE_TYPES; i++) {
		struct rope rope = rope_of((enum rope_pairs)(pairs = i % 2));
		struct splice splice = {&turn, VALUE_BF16, VALUES, 0, 0};

		type = i / 2 % VALUE_TYPES;
		splice.type = (enum value_type)type;
		splice.dst_stride = splice.src_stride = VALUES * value_bytes(splice.type);
		for (d = 0; d < ROWS * VALUES; d++)
			case_put(splice.type, src, d, case_normal(&seed));
		rope_turn_make(&turn, &rope, deltas[i / 2 / VALUE_TYPES]);
		splice_rows(&splice, dst, src, ROWS);
		for (r = 0; r < ROWS; r++) {
			for (d = 0; d < VALUES; d++)
				x[d] = case_value(splice.type, src, r * VALUES + d);
			turned(rope.pairs, x, y, turn.delta);
			for (d = 0; d < VALUES; d++) {
				double got = case_value(splice.type, dst, r * VALUES + d);

				if (d < FIRST || d >= FIRST + DIMS)
					assert_true(got == x[d]);
				size = fmax(fabs(y[d]), least[type]);
				worst[type] = fmax(worst[type], fabs(got - y[d]) / size);
			}
		}
	}
	for (type = 0; type < VALUE_TYPES; type++) {
		print_message("type %u: %.1e\n", type, worst[type]);
		assert_true(worst[type] <= allowed[type] * 1.01);
	}
}

/* Whatever the bytes are; strides apart, and in place. */
static void delta_of_zero_copies(void **state)
{
	uint8_t src[ROWS * 200], dst[ROWS * 300];
	struct rope rope = rope_of(ROPE_HALVES);
	struct rope_turn turn;
	struct splice splice = {&turn, VALUE_BF16, VALUES, 300, 200};
	uint64_t seed = 4;
	uint32_t i;

	(void)state;
	for (i = 0; i < sizeof(src); i++)
		src[i] = (uint8_t)case_random(&seed, 256);
	memset(dst, 0x77, sizeof(dst));
	rope_turn_make(&turn, &rope, 0);
	splice_rows(&splice, dst, src, ROWS);
	for (i = 0; i < ROWS; i++)
		assert_memory_equal(dst + 300 * i, src + 200 * i, 2 * VALUES);
	for (i = 2 * VALUES; i < 300; i++)
		assert_int_equal(dst[i], 0x77);
}

static void splice_in_place_is_the_same(void **state)
{
	uint8_t src[ROWS * VALUES * 2], dst[ROWS * VALUES * 2];
	struct rope rope = rope_of(ROPE_INTERLEAVED);
	struct rope_turn turn;
	struct splice splice = {&turn, VALUE_BF16, VALUES, 2 * VALUES, 2 * VALUES};
	uint64_t seed = 5;
	uint32_t i;

	(void)state;
	for (i = 0; i < ROWS * VALUES; i++)
		case_put(VALUE_BF16, src, i, case_normal(&seed));
	rope_turn_make(&turn, &rope, 100);
	splice_rows(&splice, dst, src, ROWS);
	splice_rows(&splice, src, src, ROWS);
	assert_memory_equal(src, dst, sizeof(src));
}

/* Why the source is canonical: there and back is two roundings, not none. */
static void turning_the_turned_rounds_twice(void **state)
{
	uint8_t src[VALUES * 2], there[VALUES * 2], back[VALUES * 2];
	struct rope rope = rope_of(ROPE_HALVES);
	struct rope_turn turn;
	struct splice splice = {&turn, VALUE_BF16, VALUES, 0, 0};
	uint64_t seed = 6;
	uint32_t i, differ = 0;

	(void)state;
	for (i = 0; i < VALUES; i++)
		case_put(VALUE_BF16, src, i, case_normal(&seed));
	rope_turn_make(&turn, &rope, 12345);
	splice_rows(&splice, there, src, 1);
	rope_turn_make(&turn, &rope, -12345);
	splice_rows(&splice, back, there, 1);
	for (i = 0; i < VALUES; i++) {
		double a = case_value(VALUE_BF16, src, i),
		       b = case_value(VALUE_BF16, back, i);

		differ += a != b;
		assert_true(fabs(a - b) <= 0.05);
	}
	print_message("%u of %u values differ after a turn there and back\n", differ,
		      DIMS);
	assert_true(differ > 0);
}

/* YaRN's and others' factor: longer keys stay as long. */
static void turn_keeps_lengths(void **state)
{
	struct rope rope = rope_of(ROPE_INTERLEAVED);
	const float mscale = 1.3688879f; /* 0.1 ln 40 + 1 */
	float plain[VALUES], longer[VALUES];
	struct rope_turn turn;
	uint64_t seed = 7;
	uint32_t i;

	(void)state;
	for (i = 0; i < VALUES; i++) {
		plain[i] = (float)case_normal(&seed);
		longer[i] = mscale * plain[i];
	}
	rope_turn_make(&turn, &rope, 4321);
	rope_turn_apply(&turn, plain);
	rope_turn_apply(&turn, longer);
	for (i = 0; i < VALUES; i++)
		assert_true(fabsf(longer[i] - mscale * plain[i]) <= 1e-6f);
}

static void every_half_survives_fp32(void **state)
{
	uint32_t h;

	(void)state;
	for (h = 0; h <= UINT16_MAX; h++) {
		float b = value_from_bf16((uint16_t)h), f = value_from_fp16((uint16_t)h);

		if (b == b)
			assert_int_equal(value_to_bf16(b), h);
		else
			assert_true(isnan(value_from_bf16(value_to_bf16(b))));
		if (f == f)
			assert_int_equal(value_to_fp16(f), h);
		else
			assert_true(isnan(value_from_fp16(value_to_fp16(f))));
	}
	for (h = 0; h <= UINT8_MAX; h++) {
		float e = value_from_e4m3((uint8_t)h);

		assert_int_equal(isnan(e), (h & 0x7f) == 0x7f);
		assert_int_equal(value_to_e4m3(e), h);
		if ((h & 0x7f) == 0x7f)
			continue;
		/* by the format: sign, exponent, three bits */
		assert_true(e == ldexpf((h & 0x78 ? 8 : 0) + (float)(h & 7),
					(h & 0x78 ? (int)(h >> 3 & 15) : 1) - 10) *
					 (h & 0x80 ? -1 : 1));
		assert_int_equal(signbit(e) != 0, h >> 7);
	}
	assert_true(value_from_e4m3(0x38) == 1 && value_from_e4m3(0xfe) == -448);
	assert_true(value_from_fp16(0x3c00) == 1 && value_from_fp16(0xc400) == -4);
	assert_true(value_from_fp16(0x7bff) == 65504 && value_from_fp16(1) == 0x1p-24f);
	assert_true(isinf(value_from_fp16(0xfc00)) && isnan(value_from_fp16(0x7c01)));
}

/* Between two neighbours to the nearer, halfway to the even one. */
static void rounding_is_to_nearest_even(void **state)
{
	uint32_t h;

	(void)state;
	for (h = 0; h < 0x7c00; h++) {
		float low = value_from_fp16((uint16_t)h);
		float high = h == 0x7bff ? 65536 : value_from_fp16((uint16_t)(h + 1));
		float half = low + (high - low) / 2;
		uint16_t even = (uint16_t)(h + (h & 1));

		assert_int_equal(value_to_fp16(half), even);
		assert_int_equal(value_to_fp16(nextafterf(half, 0)), h);
		assert_int_equal(value_to_fp16(-nextafterf(half, INFINITY)),
				 0x8000 | (h + 1));
	}
	for (h = 0; h < 0x7f; h++) {
		float low = value_from_e4m3((uint8_t)h);
		float high = h == 0x7e ? 480 : value_from_e4m3((uint8_t)(h + 1));
		float half = low + (high - low) / 2;

		assert_int_equal(value_to_e4m3(half), h + (h & 1));
		assert_int_equal(value_to_e4m3(nextafterf(half, 0)), h);
		assert_int_equal(value_to_e4m3(-nextafterf(half, INFINITY)),
				 0x80 | (h + 1));
	}
	assert_int_equal(value_to_e4m3(-INFINITY), 0xff);
	assert_int_equal(value_to_e4m3(1e30f), 0x7f);
	for (h = 0; h < 0x7f80; h++) {
		uint32_t half = h << 16 | 0x8000;

		assert_int_equal(value_to_bf16(value_of_bits(half)), h + (h & 1));
		assert_int_equal(value_to_bf16(value_of_bits(half - 1)), h);
		assert_int_equal(value_to_bf16(value_of_bits(half + 1)), h + 1);
	}
	assert_int_equal(value_to_fp16(INFINITY), 0x7c00);
	assert_int_equal(value_to_bf16(-INFINITY), 0xff80);
	assert_true(isnan(value_from_bf16(value_to_bf16(value_of_bits(0x7f800001)))));
}

static float one_of(enum value_type type, float x)
{
	switch (type) {
	case VALUE_BF16:
		return value_from_bf16(value_to_bf16(x));
	case VALUE_FP16:
		return value_from_fp16(value_to_fp16(x));
	case VALUE_E4M3:
		return value_from_e4m3(value_to_e4m3(x));
	default:
		return x;
	}
}

/* Many at a time as one by one, at any address. */
static void many_values_are_as_one(void **state)
{
	static const uint32_t special[] = {0x7f800000, 0x7f800001, 0xffc00000,
					   0xff7fffff, 0x80000000, 1,
					   0x3f7fffff, 0x3f808000};
	uint8_t wide[4 * 101 + 1], narrow[2 * 101 + 1];
	uint64_t seed = 8;
	uint32_t type, i, round;
	float x[101], back[101];

	(void)state;
	for (round = 0; round < 300; round++)
		for (type = 0; type < VALUE_TYPES; type++) {
			uint8_t *at = (type == VALUE_FP32 ? wide : narrow) + round % 2;

			for (i = 0; i < 101; i++)
				x[i] = value_of_bits(
					case_random(&seed, 8)
						? (uint32_t)case_random(&seed, 1ull << 32)
						: special[case_random(&seed, 8)]);
			value_narrow((enum value_type)type, at, x, 101);
			value_widen((enum value_type)type, back, at, 101);
			for (i = 0; i < 101; i++) {
				float one = one_of((enum value_type)type, x[i]);

				assert_int_equal(value_bits(back[i]), value_bits(one));
			}
		}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(turn_equals_fp64),
		cmocka_unit_test(delta_of_zero_copies),
		cmocka_unit_test(splice_in_place_is_the_same),
		cmocka_unit_test(turning_the_turned_rounds_twice),
		cmocka_unit_test(turn_keeps_lengths),
		cmocka_unit_test(every_half_survives_fp32),
		cmocka_unit_test(rounding_is_to_nearest_even),
		cmocka_unit_test(many_values_are_as_one),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
