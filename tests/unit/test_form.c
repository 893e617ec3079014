/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Forms: what ATTEND has of them is read as it was written, and no shorter; rows are
 * computed together only if each member is equal; and the fields that a form names are
 * found, with scales of fp8, or refused by name.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cjson/cJSON.h>
#include <cmocka.h>

#include "daemon/attend/form.h"
#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout.h"

#define FORM_BYTES 160u /* what senders of ATTEND have for it */

static struct form form_of(enum attend_kind kind)
{
	struct form form = {.shape = {.kind = (uint8_t)kind,
				      .kv_type = VALUE_E4M3,
				      .heads = 2,
				      .kv_heads = 1,
				      .dqk = 32,
				      .dv = 16,
				      .scale = 1},
			    .first_head = 4,
			    .key = "k"};

	if (kind == ATTEND_GQA)
		strcpy(form.value, "v");
	return form;
}

/* K and V of fp8 with their scales, as vLLM has them: heads 4 and 5 of 8. */
static struct layout *layout_of(const char *scale_members)
{
	static const char *const names[] = {"k", "k_scale", "v", "v_scale"};
	static const unsigned int bytes[] = {32, 4, 16, 4}, at[] = {0, 32, 36, 52};
	struct layout *layout = NULL;
	char text[2048] = "{'buffers':[4096],'views':{'kv':{'page_tokens':4,'pages':4,"
			  "'layers':[{'layer':0,'fields':[";
	cJSON *json;

	for (unsigned int i = 0; i < 4; i++)
		snprintf(text + strlen(text), sizeof(text) - strlen(text),
			 "%s{'name':'%s','buffer':0,'offset':%u,'page_stride':448,"
			 "'token_stride':112,'unit_stride':56,'unit_bytes':%u,"
			 "'units':2,'total_units':8,%s}",
			 i ? "," : "", names[i], at[i], bytes[i],
			 i % 2 ? scale_members : "'first_unit':4");
	strcat(text, "]}]}}}");
	for (char *c = text; *c; c++)
		*c = *c == '\'' ? '"' : *c;
	json = cJSON_Parse(text);
	assert_non_null(json);
	if (layout_parse(json, &layout) < 0)
		fail_msg("%s", err_last()->text);
	cJSON_Delete(json);
	return layout;
}

static void form_is_read_as_written(void **state)
{
	struct form form = form_of(ATTEND_GQA), got = form_of(ATTEND_MLA);
	uint8_t bytes[FORM_BYTES];
	struct cursor out, in;

	(void)state;
	memset(form.key, 'k', FORM_NAME_MAX - 1);
	memset(form.value, 'v', FORM_NAME_MAX - 1);
	memset(form.key_scale, 's', FORM_NAME_MAX - 1);
	memset(form.value_scale, 't', FORM_NAME_MAX - 1);
	cursor_write(&out, bytes, sizeof(bytes));
	assert_int_equal(form_put(&form, &out), 0);
	for (size_t len = 0; len <= out.pos; len++) {
		cursor_read(&in, bytes, len);
		assert_int_equal(form_get(&in, &got) == 0, len == out.pos);
	}
	err_clear();
	assert_true(form_same(&form, &got) && form_hash(&form) == form_hash(&got));
	assert_string_equal(got.key_scale, form.key_scale);
	assert_string_equal(got.value_scale, form.value_scale);
	for (size_t at = out.pos - 33; at < out.pos; at += 2 * FORM_NAME_MAX) {
		bytes[at]++; /* a name of 32 bytes */
		cursor_read(&in, bytes, out.pos);
		assert_true(form_get(&in, &got) < 0);
		bytes[at]--;
	}
	err_clear();
}

static void forms_with_other_scales_are_others(void **state)
{
	struct form forms[5];

	(void)state;
	for (unsigned int i = 0; i < 5; i++) {
		forms[i] = form_of(ATTEND_GQA);
		snprintf(forms[i].key_scale, FORM_NAME_MAX, "%s",
			 i == 1	  ? "a"
			 : i == 3 ? "b"
				  : "");
		snprintf(forms[i].value_scale, FORM_NAME_MAX, "%s",
			 i == 2	  ? "a"
			 : i == 4 ? "b"
				  : "");
		for (unsigned int j = 0; j < i; j++) {
			assert_false(form_same(&forms[i], &forms[j]));
			assert_true(form_hash(&forms[i]) != form_hash(&forms[j]));
		}
		assert_true(form_same(&forms[i], &forms[i]));
	}
}

static void scales_need_fp8(void **state)
{
	struct form form = form_of(ATTEND_MLA);

	(void)state;
	strcpy(form.key_scale, "k_scale");
	assert_int_equal(form_check(&form), 0);
	strcpy(form.value_scale, "k_scale");
	assert_true(form_check(&form) < 0);
	assert_non_null(strstr(err_last()->text, "value_scale: mla"));
	form.shape.kind = ATTEND_GQA;
	assert_int_equal(form_check(&form), 0);
	for (uint8_t type = 0; type < VALUE_TYPES; type++) {
		form.shape.kv_type = type;
		assert_int_equal(form_check(&form) == 0, type == VALUE_E4M3);
	}
	form.key_scale[0] = '\0';
	form.shape.kv_type = VALUE_BF16;
	assert_true(form_check(&form) < 0);
	form.value_scale[0] = '\0';
	assert_int_equal(form_check(&form), 0);
	err_clear();
}

static void fields_of_scales_are_found(void **state)
{
	struct layout *layout = layout_of("'first_unit':4,'format':'float32'");
	struct form form = form_of(ATTEND_GQA);
	struct form_fields fields;

	(void)state;
	assert_int_equal(form_fields(&form, layout->views, 0, &fields), 0);
	assert_true(fields.key && fields.value && !fields.key_scale &&
		    !fields.value_scale);
	strcpy(form.value_scale, "v_scale");
	assert_int_equal(form_fields(&form, layout->views, 0, &fields), 0);
	assert_true(!fields.key_scale && fields.value_scale->offset == 52);
	strcpy(form.key_scale, "k_scale");
	assert_int_equal(form_fields(&form, layout->views, 0, &fields), 0);
	assert_true(fields.key_scale->offset == 32 && fields.value->offset == 36);
	form.shape.kind = ATTEND_MLA;
	form.value[0] = form.value_scale[0] = '\0';
	assert_int_equal(form_fields(&form, layout->views, 0, &fields), 0);
	assert_true(fields.value == fields.key &&
		    fields.value_scale == fields.key_scale && fields.key_scale);
	layout_free(layout);
}

static void unfit_field_of_scales_is_refused(void **state)
{
	static const struct {
		const char *members, *name, *why;
	} cases[] = {
		{"'first_unit':4", "other", "no field 'other'"},
		{"'first_unit':4", "k", "32 bytes, but 1 values of this type take 4"},
		{"'first_unit':4,'format':'bf16'", "k_scale", "bf16, which differs from"},
		{"'first_unit':5", "k_scale", "kv heads [4, +1) are not all in"},
		{"'first_unit':0", "k_scale", "kv heads [4, +1) are not all in"},
	};

	(void)state;
	for (unsigned int i = 0; i < 2 * ARRAY_LEN(cases); i++) {
		struct layout *layout = layout_of(cases[i / 2].members);
		struct form form = form_of(ATTEND_GQA);
		struct form_fields fields;

		strcpy(i % 2 ? form.key_scale : form.value_scale, cases[i / 2].name);
		assert_true(form_fields(&form, layout->views, 0, &fields) < 0);
		assert_non_null(strstr(err_last()->text, cases[i / 2].why));
		layout_free(layout);
	}
	err_clear();
}

static void heads_are_those_with_scales(void **state)
{
	struct layout *layout = layout_of("'first_unit':5");
	struct form form = form_of(ATTEND_GQA);
	uint32_t begin, end;

	(void)state;
	form_heads(&form, layout, 0, &begin, &end);
	assert_true(begin == 4 && end == 6);
	strcpy(form.value_scale, "v_scale");
	form_heads(&form, layout, 0, &begin, &end);
	assert_true(begin == 5 && end == 6);
	strcpy(form.key_scale, "none");
	form_heads(&form, layout, 0, &begin, &end);
	assert_true(end == 0);
	layout_free(layout);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(form_is_read_as_written),
		cmocka_unit_test(forms_with_other_scales_are_others),
		cmocka_unit_test(scales_need_fp8),
		cmocka_unit_test(fields_of_scales_are_found),
		cmocka_unit_test(unfit_field_of_scales_is_refused),
		cmocka_unit_test(heads_are_those_with_scales),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
