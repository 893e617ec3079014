/* SPDX-License-Identifier: Apache-2.0 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "daemon/base/mem.h"
#include "ctl/display.h"

static void text_with_control_characters_is_sanitized(void **state)
{
	static const struct {
		const char *from, *to;
	} cases[] = {
		{"plain words", "plain words"},
		{"größe 你好 🚀", "größe 你好 🚀"},
		{"\033[2J\a\b\r\n\t\177", "?[2J??????"},
		{"a\302\233b\302\205c\302\240d",
		 "a?b?c\302\240d"}, /* C1; no-break space */
		{"\342\200\256rtl\342\201\246x\357\273\277", "?rtl?x?"},
		{"\233\377\300\200", "????"},		     /* no UTF-8, overlong */
		{"\355\240\200", "???"},		     /* a surrogate */
		{"\364\220\200\200\360\237\232", "???????"}, /* too high; cut short */
		{"", ""},
	};
	char text[64];

	(void)state;
	for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		snprintf(text, sizeof(text), "%s", cases[i].from);
		display_sanitize(text);
		assert_string_equal(text, cases[i].to);
	}
}

static void reply_is_sanitized_at_any_depth(void **state)
{
	cJSON *json = cJSON_Parse("{\"a\\u001b\":[{\"b\":\"c\\u0007\"}],\"d\":1}");

	(void)state;
	display_sanitize_json(json);
	assert_string_equal(json->child->string, "a?");
	assert_string_equal(json->child->child->child->valuestring, "c?");
	cJSON_Delete(json);
}

static void json_is_escaped_not_changed(void **state)
{
	char *text = NULL;
	size_t len;
	FILE *out = open_memstream(&text, &len);
	cJSON *json = cJSON_Parse("[\"\\u001b \\u007f \302\233 ü\"]"), *again;

	(void)state;
	display_print_json(json, out);
	fclose(out);
	assert_string_equal(text, "[\"\\u001b \\u007f \\u009b ü\"]\n");
	again = cJSON_Parse(text);
	assert_string_equal(again->child->valuestring, json->child->valuestring);
	cJSON_Delete(again);
	cJSON_Delete(json);
	free(text);
}

static void table_without_memory_is_empty(void **state)
{
	(void)state;
	mem_fail_at(1);
	assert_null(table_new("A >N"));
	mem_fail_at(0);
	table_cell(NULL, "1");
	assert_true(table_print(NULL, stdout) < 0);
	table_free(NULL);
}

static void amounts_are_written_for_people(void **state)
{
	static const struct {
		double ms;
		const char *text;
	} times[] = {
		{0.25, "0.25 ms"},   {9999, "9999 ms"},	     {10000, "10 s"},
		{59999, "59 s"},     {65000, "1:05 min"},    {3599000, "59:59 min"},
		{3900000, "1:05 h"}, {86400000, "1d 00:00"}, {93784000, "1d 02:03"},
	};

	(void)state;
	for (size_t i = 0; i < sizeof(times) / sizeof(*times); i++)
		assert_string_equal(ctl_ms(times[i].ms), times[i].text);
	assert_string_equal(ctl_bytes(10239), "10239 B");
	assert_string_equal(ctl_bytes(10240), "10.0 KiB");
	assert_string_equal(ctl_count(0, "room"), "0 rooms");
	assert_string_equal(ctl_count(1, "room"), "1 room");
	assert_string_equal(ctl_count(2, "room"), "2 rooms");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(text_with_control_characters_is_sanitized),
		cmocka_unit_test(reply_is_sanitized_at_any_depth),
		cmocka_unit_test(json_is_escaped_not_changed),
		cmocka_unit_test(table_without_memory_is_empty),
		cmocka_unit_test(amounts_are_written_for_people),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
