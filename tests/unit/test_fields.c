/* SPDX-License-Identifier: Apache-2.0 */
/* fields: what a table of them puts into a struct, and what it refuses. */
#include "proto/fields.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

enum { BEFORE = 0xa5 };

struct args {
	uint8_t before;
	const char *name;
	int64_t wide;
	uint32_t narrow;
	int at, choice;
	uint64_t number;
	bool flag;
	const cJSON *list, *object;
	struct {
		int64_t deep[2];
	} in;
	uint8_t after;
};

static const char *const choices[] = {"one", "two", "three", NULL};

static const struct field fields[] = {
	F_STR("name", args, name, OPTIONAL, 4, ""),
	F_INT("wide", args, wide, DEFAULT(-1), -5, INT64_C(1) << 40, ""),
	F_INT("narrow", args, narrow, DEFAULT(7), 1, UINT32_MAX, ""),
	F_FD("at", args, at, ""),
	F_CHOICE("choice", args, choice, DEFAULT(-1), choices, ""),
	F_U64("number", args, number, DEFAULT(-1), ""),
	F_BOOL("flag", args, flag, ""),
	F_ARRAY("list", args, list, OPTIONAL, 2, ""),
	F_OBJECT("object", args, object, OPTIONAL, ""),
	F_ID("deep", args, in.deep[1], OPTIONAL, ""),
	F_END,
};

static cJSON *parse(const char *text)
{
	cJSON *json;

	assert_int_equal(json_parse(text, strlen(text), 8, &json), 0);
	return json;
}

static void fields_given_fill_their_members_only(void **state)
{
	cJSON *json =
		parse("{\"name\":\"abcd\",\"wide\":1099511627776,\"narrow\":4294967295,"
		      "\"at\":3,\"choice\":\"three\","
		      "\"number\":\"18446744073709551614\",\"flag\":true,"
		      "\"list\":[1,2],\"object\":{},\"deep\":9007199254740991,"
		      "\"other\":null}");
	struct args args;

	(void)state;
	memset(&args, BEFORE, sizeof(args));
	assert_int_equal(fields_read(fields, json, &args), 0);
	assert_string_equal(args.name, "abcd");
	assert_true(args.wide == INT64_C(1) << 40);
	assert_int_equal(args.narrow, UINT32_MAX);
	assert_int_equal(args.at, 3);
	assert_int_equal(args.choice, 2);
	assert_true(args.number == UINT64_MAX - 1);
	assert_true(args.flag);
	assert_ptr_equal(args.list, cJSON_GetObjectItem(json, "list"));
	assert_ptr_equal(args.object, cJSON_GetObjectItem(json, "object"));
	assert_true(args.in.deep[1] == JSON_INT_MAX);
	/* what no field is bound to stays as it was */
	assert_int_equal(args.before, BEFORE);
	assert_int_equal(args.after, BEFORE);
	assert_int_equal(args.in.deep[0] & 0xff, BEFORE);
	cJSON_Delete(json);
}

static void fields_absent_leave_their_default(void **state)
{
	struct args args;

	(void)state;
	memset(&args, BEFORE, sizeof(args));
	assert_int_equal(fields_read(fields, NULL, &args), 0);
	assert_null(args.name);
	assert_true(args.wide == -1);
	assert_int_equal(args.narrow, 7);
	assert_int_equal(args.at, -1);
	assert_int_equal(args.choice, -1);
	assert_true(args.number == UINT64_MAX);
	assert_false(args.flag);
	assert_null(args.list);
	assert_null(args.object);
	assert_true(args.in.deep[1] == 0);
}

static void fields_wrong_are_refused_by_name(void **state)
{
	static const struct {
		const char *text;
		int r;
		const char *fault;
	} wrong[] = {
		{"{\"name\":\"abcde\"}", -ERANGE, "name: 5 bytes, limit 4"},
		{"{\"narrow\":0}", -ERANGE, "narrow: 0 is not in 1 … 4294967295"},
		{"{\"at\":-1}", -ERANGE, "at: -1"},
		{"{\"choice\":\"four\"}", -EINVAL,
		 "choice: 'four' is not one, two or three"},
		{"{\"choice\":3}", -EINVAL, "choice: a string was expected"},
		{"{\"list\":[1,2,3]}", -ERANGE, "list: 3 entries, limit 2"},
		{"{\"deep\":-1}", -ERANGE, "deep: -1"},
		{"{\"Name\":\"a\"}", -EINVAL, "Name: unknown member"},
	};
	struct args args;

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(wrong); i++) {
		cJSON *json = parse(wrong[i].text);
		int r = fields_read_all(fields, json, &args);

		if (r != wrong[i].r || !strstr(err_last()->text, wrong[i].fault))
			fail_msg("%s: %d %s", wrong[i].text, r, err_last()->text);
		cJSON_Delete(json);
	}
}

static void field_required_is_missing_by_name(void **state)
{
	static const char *const two[] = {"read", "write", NULL};
	static const struct field must[] = {
		F_U64("number", args, number, REQUIRED, ""),
		F_CHOICE("choice", args, choice, REQUIRED, two, ""),
		F_END,
	};
	cJSON *json = parse("{\"number\":5}");
	struct args args;

	(void)state;
	assert_int_equal(fields_read(must, NULL, &args), -EINVAL);
	assert_string_equal(err_last()->text, "number: missing");
	assert_int_equal(fields_read(must, json, &args), -EINVAL);
	assert_string_equal(err_last()->text, "choice: missing");
	cJSON_AddStringToObject(json, "choice", "seventeen letters");
	assert_int_equal(fields_read(must, json, &args), -EINVAL);
	assert_string_equal(err_last()->text,
			    "choice: 'seventeen letter' is not read or write");
	cJSON_Delete(json);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(fields_given_fill_their_members_only),
		cmocka_unit_test(fields_absent_leave_their_default),
		cmocka_unit_test(fields_wrong_are_refused_by_name),
		cmocka_unit_test(field_required_is_missing_by_name),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
