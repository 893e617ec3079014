/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>

#include <cjson/cJSON.h>
#include <cmocka.h>

#include "daemon/base/mem.h"

static void numbers_are_decimal(void **state)
{
	static const uint64_t numbers[] = {0, 7, 10, 99, 4294967295u, UINT64_MAX};
	struct text text = {0};
	char want[32];

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(numbers); i++) {
		text_u64(&text, numbers[i]);
		snprintf(want, sizeof(want), "%ju", (uintmax_t)numbers[i]);
		assert_string_equal(text.data, want);
		text_fini(&text);
	}
}

static void text_grows_and_ends_with_a_nul(void **state)
{
	struct text text = {0};

	(void)state;
	for (unsigned int i = 0; i < 100000; i++)
		text_put(&text, i % 2 ? "ab" : "c", i % 2 ? 2 : 1);
	assert_false(text.failed);
	assert_int_equal(text.len, 150000);
	assert_int_equal(strlen(text.data), 150000);
	for (size_t i = 0; i < text.len; i++)
		assert_int_equal(text.data[i], "cab"[i % 3]);
	text_fini(&text);
}

static void text_without_memory_keeps_the_failure(void **state)
{
	struct text text = {0};

	(void)state;
	mem_fail_at(1);
	text_puts(&text, "lost");
	mem_fail_at(0);
	assert_true(text.failed);
	text_puts(&text, "lost, too");
	assert_null(text.data);
	text_fini(&text);
	assert_false(text.failed);
}

static void text_is_escaped_as_json(void **state)
{
	struct text text = {0};
	char words[300] = "";
	cJSON *parsed;

	(void)state;
	for (size_t i = 0; i < 255; i++)
		words[i] = (char)(i < 127 ? i + 1 : 'a');
	text_json(&text, words);
	parsed = cJSON_Parse(text.data);
	assert_string_equal(cJSON_GetStringValue(parsed), words);
	for (size_t i = 0; i < text.len; i++)
		assert_true(text.data[i] >= ' ');
	cJSON_Delete(parsed);
	text_fini(&text);
	text_json(&text, "");
	assert_string_equal(text.data, "\"\"");
	text_fini(&text);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(numbers_are_decimal),
		cmocka_unit_test(text_grows_and_ends_with_a_nul),
		cmocka_unit_test(text_is_escaped_as_json),
		cmocka_unit_test(text_without_memory_keeps_the_failure),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
