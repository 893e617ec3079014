/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The strict door: what RFC 8259 allows passes and means the same in the tree;
 * everything else is refused with the byte offset. Getters name the member.
 */
#include <errno.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/hex.h"
#include "daemon/base/mem.h"
#include "proto/json.h"

#define cleanup_json mem_cleanup(json_freep)

struct sample {
	const char *text;
	const char *fault; /* part of the message */
};

static int check(const char *text)
{
	return json_check(text, strlen(text), JSON_DEPTH_MAX);
}

static cJSON *parse(const char *text)
{
	cJSON *json = NULL;

	if (json_parse(text, strlen(text), JSON_DEPTH_MAX, &json) < 0)
		fail_msg("%s: %s", text, err_last()->text);
	return json;
}

static void text_sound_accepted(void **state)
{
	static const char *const sound[] = {
		"{}",
		"[]",
		" [ ] ",
		"0",
		"-0",
		"-1.5e-7",
		"1E+2",
		"0.0001",
		"true",
		"null",
		"\"\"",
		"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"",
		"\"\\ud83d\\ude00\"",
		"\"\xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80\"",
		"\"\xed\x9f\xbf\"",
		"\"\xf4\x8f\xbf\xbf\"",
		"\"\x7f\"",
		"[1,[2,{\"a\":[]}]]",
		"{\"a\":1,\"A\":2,\"\":3}",
		"{\"a\":{\"a\":1},\"b\":{\"a\":1}}",
		"\t{\r\n \"a\" : [ true , false ] }\n",
		"1.7976931348623157e308",
		"1e-999",
		"0e999",
		"179769313486231570000000000000000e276",
		"0.00017976931348623157e312",
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(sound); i++) {
		cJSON *json = parse(sound[i]);

		if (cJSON_IsNumber(json))
			assert_true(isfinite(json->valuedouble));
		cJSON_Delete(json);
	}
}

static void text_unsound_refused(void **state)
{
	static const struct sample unsound[] = {
		{"", "byte 0: a value was expected"},
		{"  ", "byte 2: a value was expected"},
		{"{", "a string was expected"},
		{"{\"a\"", "':' was expected"},
		{"{\"a\":", "a value was expected"},
		{"{\"a\":1", "',' or '}'"},
		{"{\"a\":1,}", "byte 7: a string was expected"},
		{"{a:1}", "a string was expected"},
		{"{'a':1}", "a string was expected"},
		{"[1", "',' or ']'"},
		{"[1,]", "byte 3: a value was expected"},
		{"[1}", "',' or ']'"},
		{"{\"a\":1]", "',' or '}'"},
		{"]", "a value was expected"},
		{"{} {}", "byte 3: bytes after the value"},
		{"{}x", "bytes after the value"},
		{"tru", "a value was expected"},
		{"nulL", "a value was expected"},
		{"truefalse", "bytes after the value"},
		{"NaN", "a value was expected"},
		{"Infinity", "a value was expected"},
		{"+1", "a value was expected"},
		{"-", "a value was expected"},
		{"01", "leading zero"},
		{"-012", "leading zero"},
		{"1.", "a digit was expected"},
		{".5", "a value was expected"},
		{"1e", "a digit was expected"},
		{"1e+", "a digit was expected"},
		{"0x10", "bytes after the value"},
		{"1e309", "range of a double"},
		{"1e999", "range of a double"},
		{"-1e999", "range of a double"},
		{"1e99999999999999999999", "range of a double"},
		{"1.7976931348623159e308", "range of a double"},
		{"17976931348623159e292", "range of a double"},
		{"0.0001e313", "range of a double"},
		{"1111111111111111111111111111111111111111111111111111111111111111",
		 "number longer than 63"},
		{"\"", "unterminated string"},
		{"\"\\", "bad escape"},
		{"\"\\\"", "unterminated string"},
		{"\"\\x\"", "bad escape"},
		{"\"\\u12\"", "bad escape"},
		{"\"\\u12g4\"", "bad escape"},
		{"\"\\u0000\"", "control character"},
		{"\"\\ud800\"", "bad escape"},
		{"\"\\udc00\"", "bad escape"},
		{"\"\\ud800\\u0041\"", "bad escape"},
		{"\"\\ud800\\n12345\"", "bad escape"},
		{"\"a\nb\"", "byte 2: control character"},
		{"\"\x01\"", "control character"},
		{"\"\x80\"", "bad UTF-8"},
		{"\"\xc0\xaf\"", "bad UTF-8"},
		{"\"\xc1\xbf\"", "bad UTF-8"},
		{"\"\xc3\"", "bad UTF-8"},
		{"\"\xe0\x80\xaf\"", "bad UTF-8"},
		{"\"\xe2\x82\"", "bad UTF-8"},
		{"\"\xed\xa0\x80\"", "bad UTF-8"},
		{"\"\xf0\x80\x80\xaf\"", "bad UTF-8"},
		{"\"\xf4\x90\x80\x80\"", "bad UTF-8"},
		{"\"\xf8\x88\x80\x80\x80\"", "bad UTF-8"},
		{"\"\xff\"", "bad UTF-8"},
		{"\"\xe2\x82", "bad UTF-8"},
		{"\xef\xbb\xbf{}", "byte 0: a value was expected"},
		{"{\"a\":1,\"a\":2}", "byte 8: duplicate key"},
		{"{\"a\":1,\"b\":2,\"\\u0061\":3}", "duplicate key"},
		{"{\"\xc3\xa9\":1,\"\\u00e9\":3}", "duplicate key"},
		{"{\"\":1,\"\":2}", "duplicate key"},
		{"[{\"x\":{\"y\":1,\"z\":1,\"y\":1}}]", "duplicate key"},
		{"{\"x\":{\"x\":1},\"x\":1}", "duplicate key"},
		{"/* c */ 1", "a value was expected"},
	};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(unsound); i++) {
		int r = check(unsound[i].text);

		if (r >= 0 || err_last()->code != ERR_PROTO ||
		    !strstr(err_last()->text, unsound[i].fault))
			fail_msg("%s: %d %s, wanted %s", unsound[i].text, r,
				 err_last()->text, unsound[i].fault);
	}
}

static void text_with_nul_refused(void **state)
{
	static const char inside[] = "\"a\0b\"", after[] = "{}\0";

	(void)state;
	assert_int_equal(json_check(inside, sizeof(inside) - 1, 4), -EPROTO);
	assert_non_null(strstr(err_last()->text, "control character"));
	assert_int_equal(json_check(after, sizeof(after) - 1, 4), -EPROTO);
}

/* Every prefix of a sound text is unsound, and none is read past its end. */
static void text_cut_anywhere_refused(void **state)
{
	static const char text[] = "{\"a\":[1.5e+3,\"\\ud83d\\ude00\xe2\x82\xac\",true,"
				   "null],\"b\":{\"c\":[[]]}}";

	(void)state;
	for (size_t len = 0; len < sizeof(text) - 1; len++) {
		char *exact = mem_dup(text, len); /* the sanitizer guards its end */

		assert_int_equal(json_check(exact, len, 8), -EPROTO);
		mem_free(exact);
	}
	assert_int_equal(check(text), 0);
}

static void nesting_beyond_limit_refused(void **state)
{
	char bomb[100001];

	(void)state;
	memset(bomb, '[', sizeof(bomb) - 1);
	bomb[sizeof(bomb) - 1] = '\0';
	assert_int_equal(check(bomb), -EPROTO);
	assert_string_equal(err_last()->text, "byte 32: nested too deep");
	memset(bomb + JSON_DEPTH_MAX, ']', JSON_DEPTH_MAX);
	assert_int_equal(json_check(bomb, 2 * JSON_DEPTH_MAX, JSON_DEPTH_MAX), 0);
	assert_int_equal(json_check("[[1]]", 5, 1), -EPROTO);
	assert_int_equal(json_check("[[1]]", 5, 2), 0);
	assert_int_equal(json_check("[[],[],[]]", 10, 2), 0);
}

/* More keys than the inline stack holds; only one pair is equal. */
static void keys_many_checked(void **state)
{
	enum { KEYS = 5000 };
	char *text = mem_zalloc(KEYS * 12 + 32), *p = text;

	(void)state;
	*p++ = '{';
	for (int i = 0; i < KEYS; i++)
		p += sprintf(p, "%s\"k%d\":%d", i ? "," : "", i, i % 10);
	memcpy(p, "}", 2);
	assert_int_equal(check(text), 0);
	strcpy(p, ",\"k77\":1}");
	assert_int_equal(check(text), -EPROTO);
	assert_non_null(strstr(err_last()->text, "duplicate key"));
	for (uint64_t n = 1; n <= 8; n++) {
		mem_fail_at(n);
		assert_true(check(text) < 0);
		assert_int_equal(err_last()->code,
				 mem_count() >= n ? ERR_NOMEM : ERR_PROTO);
	}
	mem_fail_at(0);
	mem_free(text);
}

static void integer_getter_checks_type_and_range(void **state)
{
	cleanup_json cJSON *o = parse(
		"{\"i\":7,\"neg\":-3,\"frac\":1.5,\"big\":9007199254740992,\"huge\":"
		"1e308,"
		"\"top\":9007199254740991,\"s\":\"7\",\"n\":null,\"I\":8,\"whole\":2.0}");
	int64_t v = 42;

	(void)state;
	assert_int_equal(json_get_int(o, "absent", false, 0, 9, &v), 0);
	assert_int_equal(v, 42);
	assert_int_equal(json_get_int(o, "absent", true, 0, 9, &v), -EINVAL);
	assert_string_equal(err_last()->text, "absent: missing");
	assert_int_equal(json_get_int(o, "i", true, 0, 9, &v), 0);
	assert_int_equal(v, 7);
	assert_int_equal(json_get_int(o, "I", true, 0, 9, &v), 0);
	assert_int_equal(v, 8);
	assert_int_equal(json_get_int(o, "whole", true, 0, 9, &v), 0);
	assert_int_equal(v, 2);
	assert_int_equal(json_get_int(o, "neg", true, 0, 9, &v), -ERANGE);
	assert_string_equal(err_last()->text, "neg: -3 is not in 0 … 9");
	assert_int_equal(json_get_int(o, "top", true, 0, JSON_INT_MAX, &v), 0);
	assert_int_equal(v, JSON_INT_MAX);
	for (const char *const *name =
		     (const char *const[]){"frac", "big", "huge", "s", "n", NULL};
	     *name; name++)
		assert_int_equal(json_get_int(o, *name, true, INT64_MIN, INT64_MAX, &v),
				 -EINVAL);
}

static void u64_getter_takes_decimal_strings(void **state)
{
	static const char *const wrong[] = {"",
					    "-1",
					    "+1",
					    " 1",
					    "1 ",
					    "01",
					    "0x1",
					    "1e3",
					    "18446744073709551616",
					    "99999999999999999999999"};
	cleanup_json cJSON *o =
		parse("{\"s\":\"18446744073709551615\",\"n\":12,\"neg\":-1,"
		      "\"frac\":0.5,\"b\":true,\"x\":\"1x\"}");
	uint64_t v = 5;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(wrong); i++)
		assert_false(json_parse_u64(wrong[i], &v));
	assert_true(json_parse_u64("0", &v));
	assert_int_equal(v, 0);
	assert_int_equal(json_get_u64(o, "s", true, &v), 0);
	assert_true(v == UINT64_MAX);
	assert_int_equal(json_get_u64(o, "n", true, &v), 0);
	assert_int_equal(v, 12);
	assert_int_equal(json_get_u64(o, "absent", false, &v), 0);
	assert_int_equal(v, 12);
	assert_int_equal(json_get_u64(o, "neg", true, &v), -EINVAL);
	assert_int_equal(json_get_u64(o, "frac", true, &v), -EINVAL);
	assert_int_equal(json_get_u64(o, "b", true, &v), -EINVAL);
	assert_int_equal(json_get_u64(o, "x", true, &v), -EINVAL);
	assert_string_equal(err_last()->text,
			    "x: a decimal string below 2^64 was expected");
}

static void typed_getters_refuse_other_types(void **state)
{
	cleanup_json cJSON *o = parse(
		"{\"b\":false,\"s\":\"abc\",\"a\":[1,2,3],\"o\":{\"x\":1},\"n\":0}");
	const cJSON *item = NULL;
	const char *s = NULL;
	bool b = true;

	(void)state;
	assert_int_equal(json_get_bool(o, "b", true, &b), 0);
	assert_false(b);
	assert_int_equal(json_get_bool(o, "n", true, &b), -EINVAL);
	assert_int_equal(json_get_bool(o, "s", true, &b), -EINVAL);
	assert_int_equal(json_get_str(o, "s", true, 3, &s), 0);
	assert_string_equal(s, "abc");
	assert_int_equal(json_get_str(o, "s", true, 2, &s), -ERANGE);
	assert_string_equal(err_last()->text, "s: 3 bytes, limit 2");
	assert_int_equal(json_get_str(o, "n", true, 9, &s), -EINVAL);
	assert_int_equal(json_get_array(o, "a", true, 3, &item), 0);
	assert_int_equal(cJSON_GetArraySize(item), 3);
	assert_int_equal(json_get_array(o, "a", true, 2, &item), -ERANGE);
	assert_int_equal(json_get_array(o, "o", true, 9, &item), -EINVAL);
	assert_int_equal(json_get_object(o, "o", true, &item), 0);
	assert_int_equal(json_get_object(o, "a", true, &item), -EINVAL);
	assert_int_equal(json_get_object(o, "none", true, &item), -EINVAL);
	assert_int_equal(json_get_object(o, "none", false, &item), 0);
}

static void expect_pages(const char *text, const uint32_t *wanted, size_t wanted_count)
{
	cleanup_json cJSON *o = parse(text);
	uint32_t *pages = NULL;
	size_t count = 99;

	assert_int_equal(json_get_pages(o, "p", 100, 8, &pages, &count), 0);
	assert_int_equal(count, wanted_count);
	assert_memory_equal(pages, wanted, wanted_count * sizeof(*wanted));
	mem_free(pages);
}

static void pages_lists_and_runs_read(void **state)
{
	(void)state;
	expect_pages("{\"p\":[3,4,9]}", (uint32_t[]){3, 4, 9}, 3);
	expect_pages("{\"p\":[[3,2],[9,1]]}", (uint32_t[]){3, 4, 9}, 3);
	expect_pages("{\"p\":[]}", (uint32_t[]){0}, 0);
	expect_pages("{\"p\":[99,99,0]}", (uint32_t[]){99, 99, 0}, 3);
	expect_pages("{\"p\":[[92,8]]}", (uint32_t[]){92, 93, 94, 95, 96, 97, 98, 99}, 8);
}

static void pages_wrong_refused(void **state)
{
	static const struct {
		const char *text;
		int r;
		const char *fault;
	} wrong[] = {
		{"{\"p\":3}", -EINVAL, "p: an array"},
		{"{}", -EINVAL, "p: missing"},
		{"{\"p\":[1,[2,1]]}", -EINVAL, "p[1]: a page number (no run)"},
		{"{\"p\":[[2,1],1]}", -EINVAL, "p[1]: a run"},
		{"{\"p\":[[2]]}", -EINVAL, "p[0]: a run"},
		{"{\"p\":[[]]}", -EINVAL, "p[0]: a run"},
		{"{\"p\":[[1,1,1]]}", -EINVAL, "p[0]: a run"},
		{"{\"p\":[[1,0]]}", -EINVAL, "a count of 1"},
		{"{\"p\":[[1,-1]]}", -EINVAL, "a count of 1"},
		{"{\"p\":[[1,1.5]]}", -EINVAL, "a count of 1"},
		{"{\"p\":[-1]}", -EINVAL, "p[0]: a page number"},
		{"{\"p\":[0,1.5]}", -EINVAL, "p[1]: a page number"},
		{"{\"p\":[1e308]}", -EINVAL, "p[0]: a page number"},
		{"{\"p\":[\"1\"]}", -EINVAL, "p[0]: a page number"},
		{"{\"p\":[null]}", -EINVAL, "p[0]: a page number"},
		{"{\"p\":[100]}", -ERANGE, "p[0]: page 100 is not below"},
		{"{\"p\":[[99,2]]}", -ERANGE, "p[0]: page 100 is not below"},
		{"{\"p\":[[0,9007199254740991]]}", -ERANGE, "is not below"},
		{"{\"p\":[[9007199254740991,9007199254740991]]}", -ERANGE,
		 "is not below"},
		{"{\"p\":[[0,5],[0,4]]}", -ERANGE, "more than 8 pages"},
		{"{\"p\":[1,2,3,4,5,6,7,8,9]}", -ERANGE, "9 entries, limit 8"},
	};
	uint32_t *pages = NULL;
	size_t count = 0;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
		cleanup_json cJSON *o = parse(wrong[i].text);
		int r = json_get_pages(o, "p", 100, 8, &pages, &count);

		if (r != wrong[i].r || !strstr(err_last()->text, wrong[i].fault))
			fail_msg("%s: %d %s", wrong[i].text, r, err_last()->text);
		assert_null(pages);
	}
}

static void pages_without_memory_refused(void **state)
{
	cleanup_json cJSON *o = parse("{\"p\":[[0,8]]}");
	uint32_t *pages = NULL;
	size_t count = 0;

	(void)state;
	mem_fail_at(1);
	assert_int_equal(json_get_pages(o, "p", 100, 8, &pages, &count), -ENOMEM);
	mem_fail_at(0);
	assert_null(pages);
}

static void members_unknown_refused(void **state)
{
	static const char *const names[] = {"a", "b", NULL};
	cleanup_json cJSON *o = parse("{\"a\":1,\"b\":2}");
	cleanup_json cJSON *more = parse("{\"a\":1,\"B\":2}");

	(void)state;
	assert_int_equal(json_only(o, names), 0);
	assert_int_equal(json_only(more, names), -EINVAL);
	assert_string_equal(err_last()->text, "B: unknown member");
}

static void text_sanitized_is_utf8(void **state)
{
	char cut[] = "caf\xc3\xa9 \xe2\x82", raw[] = "a\nb\x80\xff\x7f";

	(void)state;
	json_sanitize(cut);
	assert_string_equal(cut, "caf\xc3\xa9 ??");
	json_sanitize(raw);
	assert_string_equal(raw, "a?b???");
}

/* {"views":{"kv":{"pages":[…]}}} with n entries. */
static cJSON *long_lists(unsigned int n, bool runs, const char *last)
{
	char *text = mem_zalloc(64 * (size_t)n + 128), *at = text;
	cJSON *tree;

	at += sprintf(at, "{\"views\":{\"kv\":{\"pages\":[");
	for (unsigned int i = 0; i < n; i++)
		at += runs ? sprintf(at, "[%u,%u],", i * 7 % 1000, 1 + i % 3)
			   : sprintf(at, "%u,", i * 7 % 1000);
	sprintf(at, "%s]}}}", last);
	tree = cJSON_Parse(text);
	assert_non_null(tree);
	mem_free(text);
	return tree;
}

static const cJSON *kv_of(const cJSON *tree)
{
	return cJSON_GetObjectItem(cJSON_GetObjectItem(tree, "views"), "kv");
}

static void pages_packed_are_the_same(void **state)
{
	(void)state;
	for (int runs = 0; runs < 2; runs++) {
		cJSON *plain = long_lists(3000, runs, runs ? "[5,2]" : "5");
		cJSON *packed = long_lists(3000, runs, runs ? "[5,2]" : "5");
		uint32_t *a, *b;
		size_t n, m;

		json_pack_lists(packed);
		assert_int_equal(
			json_get_pages(kv_of(plain), "pages", 1002, 6010, &a, &n), 0);
		assert_int_equal(
			json_get_pages(kv_of(packed), "pages", 999, 6010, &b, &m),
			-ERANGE);
		assert_int_equal(
			json_get_pages(kv_of(packed), "pages", 1002, n - 1, &b, &m),
			-ERANGE);
		mem_fail_at(1); /* nothing is copied */
		assert_int_equal(
			json_get_pages(kv_of(packed), "pages", 1002, 6010, &b, &m), 0);
		mem_fail_at(0);
		assert_int_equal(n, m);
		assert_memory_equal(a, b, n * sizeof(*a));
		mem_free(b);
		assert_int_equal(
			json_get_pages(kv_of(packed), "pages", 1002, 6010, &b, &m),
			-EINVAL); /* it is the first caller's */
		mem_free(a);
		cJSON_Delete(plain);
		cJSON_Delete(packed);
	}
}

/* As of the sources of a pull: many short lists are as long as one. */
static void pages_of_sources_are_packed(void **state)
{
	cJSON *tree =
		cJSON_Parse("{\"remote\":[{\"views\":{\"kv\":{\"pages\":[[3,2],[9,1]]}}},"
			    "{\"views\":7},8,{\"views\":{\"kv\":{\"pages\":[5]},"
			    "\"aux\":9}}]}");
	const cJSON *kv[2], *remote = cJSON_GetObjectItem(tree, "remote");
	size_t before = json_bytes(tree), n;
	uint32_t *pages;

	(void)state;
	for (int i = 0; i < 2; i++)
		kv[i] = kv_of(cJSON_GetArrayItem(remote, 3 * i));
	json_pack_lists(tree);
	assert_int_equal(before - json_bytes(tree),
			 7 * (sizeof(cJSON) + 16) - 4 * sizeof(*pages));
	mem_fail_at(1); /* nothing is copied */
	assert_int_equal(json_get_pages(kv[0], "pages", 10, 10, &pages, &n), 0);
	mem_fail_at(0);
	assert_int_equal(n, 3);
	assert_memory_equal(pages, ((uint32_t[]){3, 4, 9}), 3 * sizeof(*pages));
	mem_free(pages);
	cJSON_Delete(tree);
}

/* Runs expand: a short line names no more pages than one list may have. */
static void pages_of_a_line_are_bounded(void **state)
{
	char text[4096] = "{\"remote\":[";
	size_t at = strlen(text);
	cJSON *tree;

	(void)state;
	for (unsigned int i = 0; i < 40; i++)
		at += (size_t)snprintf(text + at, sizeof(text) - at,
				       "%s{\"views\":{\"a\":{\"pages\":[[0,%u]]}}}",
				       i ? "," : "", 300000);
	snprintf(text + at, sizeof(text) - at, "]}");
	tree = cJSON_Parse(text);
	assert_non_null(tree);
	json_pack_lists(tree);
	assert_in_range(json_bytes(tree), 3 * 300000 * sizeof(uint32_t),
			(1u << 20) * sizeof(uint32_t) + 65536);
	cJSON_Delete(tree);
}

static void pages_packed_wrong_are_left_for_their_command(void **state)
{
	static const char *const last[] = {"-1",	 "\"x\"", "1.5",
					   "4294967295", "[1,2]", "null"};
	uint32_t *pages;
	size_t n;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(last); i++) {
		cJSON *tree = long_lists(3000, false, last[i]);

		json_pack_lists(tree);
		assert_true(cJSON_IsArray(cJSON_GetObjectItem(kv_of(tree), "pages")));
		assert_true(json_get_pages(kv_of(tree), "pages", 1000, 6000, &pages, &n) <
			    0);
		cJSON_Delete(tree);
	}
}

/* n entries: the page of entry i is i, but that of entry `at` is `page`. */
static cJSON *distinct_but(unsigned int n, unsigned int at, unsigned int page)
{
	cJSON *tree = cJSON_CreateObject(),
	      *views = cJSON_AddObjectToObject(tree, "views");
	cJSON *list =
		cJSON_AddArrayToObject(cJSON_AddObjectToObject(views, "kv"), "pages");

	for (unsigned int i = 0; i < n; i++)
		cJSON_AddItemToArray(list, cJSON_CreateNumber(i == at ? page : i));
	return tree;
}

/* With and without a bitmap, from a helper and on demand. */
static void pages_repeated_are_found_where_they_are(void **state)
{
	static const unsigned int counts[] = {0, 1, 2, 32, 33, 300};

	(void)state;
	for (size_t c = 0; c < ARRAY_LEN(counts); c++) {
		const unsigned int n = counts[c];

		for (unsigned int at = 0; at <= n; at++) {
			/* the page of the entry before it, and one that no other has */
			for (unsigned int again = 0; again < 2; again++) {
				unsigned int page = again && at ? at - 1 : n;
				cJSON *tree = distinct_but(n, at, page);
				size_t repeat = page < n && at < n ? at : n, found = 7;
				uint32_t *pages;
				size_t count;

				json_pack_lists(tree);
				assert_int_equal(json_packed_repeat(kv_of(tree), "pages"),
						 n == 300 ? repeat : 0);
				assert_int_equal(json_get_pages(kv_of(tree), "pages", 999,
								300, &pages, &count),
						 0);
				assert_int_equal(json_pages_repeat(pages, count, &found),
						 0);
				assert_int_equal(found, repeat);
				mem_free(pages);
				cJSON_Delete(tree);
			}
		}
	}
}

/* A page number of 2^32 - 2 would need half a GiB to search. */
static void pages_of_a_huge_number_are_not_searched_early(void **state)
{
	cJSON *tree = distinct_but(300, 7, 1u << 26);

	(void)state;
	json_pack_lists(tree);
	assert_int_equal(json_packed_repeat(kv_of(tree), "pages"), 0);
	assert_int_equal(json_packed_repeat(kv_of(tree), "none"), 0);
	cJSON_Delete(tree);
}

static cJSON *ids_of(size_t count, size_t wrong)
{
	cJSON *tree = cJSON_CreateObject(), *ids = cJSON_AddArrayToObject(tree, "ids");
	char text[HEX_CHARS(JSON_ID_BYTES) + 1];

	for (size_t i = 0; i < count; i++) {
		snprintf(text, sizeof(text), "%064zx", i * 0x10001);
		if (i == wrong)
			text[63] = 'g';
		cJSON_AddItemToArray(ids, cJSON_CreateString(text));
	}
	return tree;
}

static const cJSON *ids_in(const cJSON *tree)
{
	const cJSON *ids = NULL;

	assert_int_equal(json_get_array(tree, "ids", true, 300, &ids), 0);
	return ids;
}

static void ids_packed_are_the_same(void **state)
{
	cJSON *plain = ids_of(300, SIZE_MAX), *packed = ids_of(300, SIZE_MAX);
	const cJSON *none = NULL;
	uint8_t *a, *b;
	uint32_t n, m;

	(void)state;
	json_pack_lists(packed);
	assert_null(ids_in(packed)->child);
	assert_int_equal(json_get_array(packed, "ids", true, 299, &none), -ERANGE);
	assert_int_equal(json_ids(ids_in(plain), "ids", &a, &n), 0);
	mem_fail_at(1); /* nothing is copied */
	assert_int_equal(json_ids(ids_in(packed), "ids", &b, &m), 0);
	mem_fail_at(0);
	assert_int_equal(n, 300);
	assert_int_equal(m, 300);
	assert_memory_equal(a, b, (size_t)n * JSON_ID_BYTES);
	assert_int_equal(json_get_array(packed, "ids", true, 300, &none), -EINVAL);
	mem_free(a);
	mem_free(b);
	cJSON_Delete(plain);
	cJSON_Delete(packed);
}

static void ids_packed_wrong_are_left_for_their_command(void **state)
{
	cJSON *tree = ids_of(300, 299);
	uint8_t *ids;
	uint32_t n;

	(void)state;
	json_pack_lists(tree);
	assert_true(cJSON_IsArray(cJSON_GetObjectItem(tree, "ids")));
	assert_int_equal(json_ids(ids_in(tree), "ids", &ids, &n), -EINVAL);
	assert_string_equal(err_last()->text, "ids[299]: not an id; give 64 hex digits");
	cJSON_Delete(tree);
}

/* A helper counts the lists of a long line, the loop only reads the number. */
static void list_counted_is_as_long_as_before(void **state)
{
	static const char text[] = "{\"rooms\":[1,2,3],\"none\":[],\"x\":7}";
	const cJSON *list = NULL;
	cJSON *tree;

	(void)state;
	assert_int_equal(json_parse(text, strlen(text), JSON_DEPTH_MAX, &tree), 0);
	for (int packed = 0; packed < 2; packed++) {
		assert_int_equal(json_get_array(tree, "rooms", true, 3, &list), 0);
		assert_int_equal(json_get_array(tree, "rooms", true, 2, &list), -ERANGE);
		assert_string_equal(err_last()->text, "rooms: 3 entries, limit 2");
		assert_int_equal(json_get_array(tree, "none", true, 0, &list), 0);
		assert_int_equal(json_get_array(tree, "x", true, 3, &list), -EINVAL);
		json_pack_lists(tree);
	}
	assert_int_equal(cJSON_GetObjectItem(tree, "rooms")->valueint, 3);
	assert_int_equal(cJSON_GetArraySize(cJSON_GetObjectItem(tree, "rooms")), 3);
	cJSON_Delete(tree);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(text_sound_accepted),
		cmocka_unit_test(text_unsound_refused),
		cmocka_unit_test(text_with_nul_refused),
		cmocka_unit_test(text_cut_anywhere_refused),
		cmocka_unit_test(nesting_beyond_limit_refused),
		cmocka_unit_test(keys_many_checked),
		cmocka_unit_test(integer_getter_checks_type_and_range),
		cmocka_unit_test(u64_getter_takes_decimal_strings),
		cmocka_unit_test(typed_getters_refuse_other_types),
		cmocka_unit_test(pages_lists_and_runs_read),
		cmocka_unit_test(pages_wrong_refused),
		cmocka_unit_test(pages_without_memory_refused),
		cmocka_unit_test(pages_packed_are_the_same),
		cmocka_unit_test(pages_of_sources_are_packed),
		cmocka_unit_test(pages_of_a_line_are_bounded),
		cmocka_unit_test(pages_packed_wrong_are_left_for_their_command),
		cmocka_unit_test(pages_repeated_are_found_where_they_are),
		cmocka_unit_test(pages_of_a_huge_number_are_not_searched_early),
		cmocka_unit_test(ids_packed_are_the_same),
		cmocka_unit_test(ids_packed_wrong_are_left_for_their_command),
		cmocka_unit_test(members_unknown_refused),
		cmocka_unit_test(text_sanitized_is_utf8),
		cmocka_unit_test(list_counted_is_as_long_as_before),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
