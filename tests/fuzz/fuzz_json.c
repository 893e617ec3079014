/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What json_check() lets through, cJSON must take, and must mean the same: the
 * tree printed and checked again is sound, nothing is infinite, no text holds a
 * NUL. Getters read every member of any tree without a fault of their own.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "proto/json.h"
#include "tests/fuzz/lib/fuzz.h"

static void must(bool holds)
{
	if (!holds)
		abort();
}

static void read_member(const cJSON *obj, const char *name)
{
	const cJSON *item = NULL;
	const char *s = NULL;
	uint32_t *pages = NULL;
	size_t count = 0;
	int64_t i = 0;
	uint64_t u = 0;
	bool b = false;

	if (json_get_int(obj, name, true, -100, 100, &i) == 0)
		must(i >= -100 && i <= 100);
	if (json_get_str(obj, name, true, 8, &s) == 0)
		must(strlen(s) <= 8);
	if (json_get_pages(obj, name, 1000, 64, &pages, &count) == 0) {
		must(count <= 64);
		for (size_t at = 0; at < count; at++)
			must(pages[at] < 1000);
		mem_free(pages);
	}
	(void)json_get_u64(obj, name, true, &u);
	(void)json_get_bool(obj, name, true, &b);
	(void)json_get_array(obj, name, true, 16, &item);
	(void)json_get_object(obj, name, true, &item);
}

/* The largest number of the tree, without its sign. */
static double walk(const cJSON *json)
{
	double most = 0;
	const cJSON *it;

	if (cJSON_IsNumber(json)) {
		must(isfinite(json->valuedouble));
		most = fabs(json->valuedouble);
	}
	cJSON_ArrayForEach(it, json) {
		if (cJSON_IsObject(json))
			read_member(json, it->string);
		most = fmax(most, walk(it));
	}
	return most;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	const char *text = (const char *)data;
	cJSON *json = NULL;
	char *printed;

	if (json_parse(text, size, JSON_DEPTH_MAX, &json) < 0) {
		must(err_last()->code == ERR_PROTO);
		return 0;
	}
	must(size > 0 && !memchr(data, 0, size));
	/* cJSON prints 15 digits first and takes them for DBL_MAX, though they
	 * read as infinity: leave the edge out */
	if (walk(json) < 1e308) {
		printed = cJSON_PrintUnformatted(json);
		must(printed &&
		     json_check(printed, strlen(printed), JSON_DEPTH_MAX) == 0);
		cJSON_free(printed);
	}
	cJSON_Delete(json);
	return 0;
}
