/* SPDX-License-Identifier: Apache-2.0 */
/* plan_rows: lists of rows that tests compare by the bytes they move. */
#ifndef KVD_TESTS_PLAN_ROWS_H
#define KVD_TESTS_PLAN_ROWS_H

#include "daemon/plan/plan.h"

struct cJSON;

struct plan_row {
	uint64_t src, dst, len;
	uint32_t src_buffer, dst_buffer;
};

struct plan_rows {
	struct plan_row *items;
	size_t count;
};

void plan_rows_add(struct plan_rows *rows, struct plan_row row);
void plan_rows_fini(struct plan_rows *rows);
void plan_rows_of_plan(struct plan_rows *rows, const struct plan *plan);
/* Only those of one destination buffer, moved by two bases. */
void plan_rows_of_buffer(struct plan_rows *rows, const struct plan *plan,
			 uint32_t dst_buffer, uint64_t src_base, uint64_t dst_base);
/* [[src, dst, len], …] */
void plan_rows_of_json(struct plan_rows *rows, const struct cJSON *json);
/* Sort by destination and merge neighbours: equal bytes, equal lists. */
void plan_rows_settle(struct plan_rows *rows);
bool plan_rows_equal(const struct plan_rows *a, const struct plan_rows *b);
void plan_rows_print(const char *name, const struct plan_rows *rows);

/* cmocka: both settled, printed when they differ. */
void plan_rows_assert_equal(const char *id, struct plan_rows *got,
			    struct plan_rows *want);

/* The plan of one map, or a failed test. */
struct plan *plan_of(const struct layout *src, const struct layout *dst,
		     const struct plan_map *map);

#endif
