/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fuzz_plan_json: the text of `kvd-ctl plan`: the strict check, the layouts, the
 * page lists and the plan. A layout that was accepted must survive printing and
 * parsing.
 */
#include <stdio.h>
#include <stdlib.h>

#include "ctl/plan.h"
#include "daemon/plan/layout.h"
#include "proto/json.h"
#include "tests/fuzz/lib/fuzz.h"
#include "tests/fuzz/lib/plan_check.h"

static void round_trip(const cJSON *json)
{
	struct layout *a, *b;
	cJSON *printed;

	if (layout_parse(json, &a) < 0)
		return;
	if (layout_print(a, &printed) < 0 || layout_parse(printed, &b) < 0)
		abort();
	if (layout_check(b) < 0 || layout_compatible(a, b, &layout_from_us) < 0)
		abort();
	layout_check_target(a);
	cJSON_Delete(printed);
	layout_free(a);
	layout_free(b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static FILE *nowhere;
	cJSON *root;

	if (!nowhere)
		nowhere = fopen("/dev/null", "w");
	if (!nowhere)
		abort();
	plan_answer((const char *)data, size, FUZZ_ROWS_MAX, nowhere);
	if (json_parse((const char *)data, size, JSON_DEPTH_MAX, &root) < 0)
		return 0;
	round_trip(cJSON_GetObjectItemCaseSensitive(root, "src"));
	round_trip(cJSON_GetObjectItemCaseSensitive(root, "dst"));
	cJSON_Delete(root);
	return 0;
}
