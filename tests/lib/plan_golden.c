/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/plan_golden.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

static cJSON *load(const char *file)
{
	const char *folder = getenv("KVD_GOLDEN");
	static char text[1 << 20];
	char path[512];
	cJSON *json;
	size_t n;
	FILE *f;

	snprintf(path, sizeof(path), "%s/%s", folder ? folder : "tests/golden", file);
	f = fopen(path, "r");
	if (!f) {
		print_error("%s: cannot be opened (run from the source root)\n", path);
		fail();
	}
	n = fread(text, 1, sizeof(text), f);
	fclose(f);
	json = cJSON_ParseWithLength(text, n);
	assert_non_null(json);
	return json;
}

void golden_each(const char *file,
		 void (*visit)(const char *id, const cJSON *in, const cJSON *expect))
{
	cJSON *json = load(file);
	const cJSON *it;
	int n = 0;

	cJSON_ArrayForEach(it, golden_at(json, "cases")) {
		visit(golden_at(it, "id")->valuestring, golden_at(it, "in"),
		      golden_at(it, "expect"));
		n++;
	}
	assert_true(n > 0);
	cJSON_Delete(json);
}

const cJSON *golden_at(const cJSON *json, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(json, name);

	if (!item)
		print_error("golden: no member %s\n", name);
	assert_non_null(item);
	return item;
}

static uint64_t number(const cJSON *item)
{
	if (cJSON_IsTrue(item))
		return 1;
	return cJSON_IsNumber(item) ? (uint64_t)item->valuedouble : 0;
}

uint64_t golden_num(const cJSON *json, const char *name)
{
	return number(golden_at(json, name));
}

uint64_t golden_nth(const cJSON *list, int index)
{
	const cJSON *item = cJSON_GetArrayItem(list, index);

	assert_non_null(item);
	return number(item);
}

size_t golden_list(const cJSON *list, uint32_t *out)
{
	const cJSON *it;
	size_t n = 0;

	cJSON_ArrayForEach(it, list) {
		assert_true(n < GOLDEN_LIST_MAX);
		out[n++] = (uint32_t)number(it);
	}
	return n;
}

bool golden_has_error(const cJSON *expect)
{
	return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(expect, "error"));
}

uint32_t golden_u32(const cJSON *json, const char *name)
{
	return (uint32_t)golden_num(json, name);
}

struct layout *golden_checked(struct layout *layout)
{
	must(layout_check(layout));
	return layout;
}
