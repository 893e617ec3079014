/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/hex.h"

#define UUID "01234567-89ab-cdef-fedc-ba9876543210"

static const uint8_t bytes[] = {0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef,
				0xfe, 0xdc, 0xba, 0x98, 0x76, 0x54, 0x32, 0x10};

static void digits_are_lower_case_and_end_with_a_nul(void **state)
{
	char text[HEX_CHARS(sizeof(bytes)) + 2] = "";

	(void)state;
	memset(text, 'x', sizeof(text));
	hex_write(bytes, sizeof(bytes), text);
	assert_string_equal(text, "0123456789abcdeffedcba9876543210");
	assert_int_equal(text[sizeof(text) - 1], 'x');
	hex_write(bytes, 0, text);
	assert_string_equal(text, "");
}

static void digits_of_either_case_are_read(void **state)
{
	uint8_t out[sizeof(bytes)];

	(void)state;
	assert_true(hex_read("0123456789abcdefFEDCBA9876543210", out, sizeof(out)));
	assert_memory_equal(out, bytes, sizeof(bytes));
	assert_true(hex_read("01zz", out, 1)); /* what follows is the caller's */
	for (int c = 0; c < 256; c++)
		assert_int_equal(hex_digit((char)c) >= 0,
				 c && strchr("0123456789abcdefABCDEF", c) != NULL);
}

static void text_short_or_without_digits_is_refused(void **state)
{
	static const char *const bad[] = {"", "0", "012", "0g23", "g123", "01 2", "0x12"};
	uint8_t out[2];

	(void)state;
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
		/* in a block of its own length: nothing behind the NUL is read */
		char *text = strdup(bad[i]);

		assert_false(hex_read(text, out, sizeof(out)));
		free(text);
	}
}

static void uuids_are_written_and_read(void **state)
{
	static const char *const bad[] = {
		"",
		"01234567-89ab-cdef-fedc-ba987654321",
		"01234567-89ab-cdef-fedc-ba98765432100",
		"0123456789abcdeffedcba9876543210",
		"0123456-789ab-cdef-fedc-ba9876543210",
		"01234567-89ab-cdef-fedc-ba987654321g",
		"01234567_89ab-cdef-fedc-ba9876543210",
	};
	char text[UUID_CHARS + 1];
	uint8_t out[UUID_BYTES];

	(void)state;
	uuid_write(bytes, text);
	assert_string_equal(text, UUID);
	assert_true(uuid_read("01234567-89AB-CDEF-fedc-ba9876543210", out));
	assert_memory_equal(out, bytes, sizeof(bytes));
	for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
		assert_false(uuid_read(bad[i], out));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(digits_are_lower_case_and_end_with_a_nul),
		cmocka_unit_test(digits_of_either_case_are_read),
		cmocka_unit_test(text_short_or_without_digits_is_refused),
		cmocka_unit_test(uuids_are_written_and_read),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
