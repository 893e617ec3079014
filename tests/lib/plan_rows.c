/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/lib/plan_rows.h"

#include <cjson/cJSON.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <cmocka.h>

#include "daemon/base/err.h"

void plan_rows_add(struct plan_rows *rows, struct plan_row row)
{
	rows->items = realloc(rows->items, (rows->count + 1) * sizeof(row));
	assert_non_null(rows->items);
	rows->items[rows->count++] = row;
}

void plan_rows_fini(struct plan_rows *rows)
{
	free(rows->items);
	*rows = (struct plan_rows){0};
}

void plan_rows_of_plan(struct plan_rows *rows, const struct plan *plan)
{
	struct plan_walk walk;
	struct plan_span span;

	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, UINT64_MAX, &span))
		plan_rows_add(rows, (struct plan_row){.src = span.src,
						      .dst = span.dst,
						      .len = span.len,
						      .src_buffer = span.src_buffer,
						      .dst_buffer = span.dst_buffer});
}

void plan_rows_of_buffer(struct plan_rows *rows, const struct plan *plan,
			 uint32_t dst_buffer, uint64_t src_base, uint64_t dst_base)
{
	struct plan_walk walk;
	struct plan_span span;

	plan_walk_begin(&walk, plan);
	while (plan_walk_next(&walk, UINT64_MAX, &span))
		if (span.dst_buffer == dst_buffer)
			plan_rows_add(rows, (struct plan_row){.src = src_base + span.src,
							      .dst = dst_base + span.dst,
							      .len = span.len});
}

void plan_rows_of_json(struct plan_rows *rows, const struct cJSON *json)
{
	const cJSON *it;

	cJSON_ArrayForEach(it, json)
		plan_rows_add(
			rows,
			(struct plan_row){
				.src = (uint64_t)cJSON_GetArrayItem(it, 0)->valuedouble,
				.dst = (uint64_t)cJSON_GetArrayItem(it, 1)->valuedouble,
				.len = (uint64_t)cJSON_GetArrayItem(it, 2)->valuedouble});
}

static int compare(const void *a, const void *b)
{
	const struct plan_row *x = a, *y = b;

	if (x->dst_buffer != y->dst_buffer)
		return x->dst_buffer < y->dst_buffer ? -1 : 1;
	return (x->dst > y->dst) - (x->dst < y->dst);
}

void plan_rows_settle(struct plan_rows *rows)
{
	size_t n = 0;

	if (rows->count > 1)
		qsort(rows->items, rows->count, sizeof(*rows->items), compare);
	for (size_t i = 0; i < rows->count; i++) {
		struct plan_row *a = n ? &rows->items[n - 1] : NULL;
		const struct plan_row b = rows->items[i];

		if (a && a->dst_buffer == b.dst_buffer && a->src_buffer == b.src_buffer &&
		    a->dst + a->len == b.dst && a->src + a->len == b.src)
			a->len += b.len;
		else
			rows->items[n++] = b;
	}
	rows->count = n;
}

bool plan_rows_equal(const struct plan_rows *a, const struct plan_rows *b)
{
	if (a->count != b->count)
		return false;
	for (size_t i = 0; i < a->count; i++) {
		const struct plan_row *x = &a->items[i], *y = &b->items[i];

		if (x->src != y->src || x->dst != y->dst || x->len != y->len ||
		    x->src_buffer != y->src_buffer || x->dst_buffer != y->dst_buffer)
			return false;
	}
	return true;
}

void plan_rows_print(const char *name, const struct plan_rows *rows)
{
	print_error("%s:\n", name);
	for (size_t i = 0; i < rows->count && i < 64; i++)
		print_error("  %u+%llu -> %u+%llu, %llu\n", rows->items[i].src_buffer,
			    (unsigned long long)rows->items[i].src,
			    rows->items[i].dst_buffer,
			    (unsigned long long)rows->items[i].dst,
			    (unsigned long long)rows->items[i].len);
}

void plan_rows_assert_equal(const char *id, struct plan_rows *got, struct plan_rows *want)
{
	plan_rows_settle(got);
	plan_rows_settle(want);
	if (!plan_rows_equal(got, want)) {
		print_error("case %s\n", id);
		plan_rows_print("got", got);
		plan_rows_print("want", want);
		fail();
	}
	plan_rows_fini(got);
	plan_rows_fini(want);
}

struct plan *plan_of(const struct layout *src, const struct layout *dst,
		     const struct plan_map *map)
{
	struct plan_request req = {.src = src, .dst = dst, .maps = map, .map_count = 1};
	struct plan *plan;

	if (plan_make(&req, &plan) < 0) {
		print_error("plan: %s\n", err_last()->text);
		fail();
	}
	return plan;
}
