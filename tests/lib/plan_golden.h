/* SPDX-License-Identifier: Apache-2.0 */
/* plan_golden: the files of tests/golden and short ways into their JSON. */
#ifndef KVD_TESTS_PLAN_GOLDEN_H
#define KVD_TESTS_PLAN_GOLDEN_H

#include <cjson/cJSON.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "daemon/base/err.h"
#include "daemon/plan/layout.h"

#define GOLDEN_LIST_MAX 1024u

/* `visit` once per case; at least one case must be there. KVD_GOLDEN names the
 * folder; the default is tests/golden of the working directory. */
void golden_each(const char *file,
		 void (*visit)(const char *id, const cJSON *in, const cJSON *expect));

/* A member that must be there. */
const cJSON *golden_at(const cJSON *json, const char *name);
/* A number; null and false are 0, true is 1. */
uint64_t golden_num(const cJSON *json, const char *name);
uint64_t golden_nth(const cJSON *list, int index);
/* A list of numbers. */
size_t golden_list(const cJSON *list, uint32_t *out);
uint32_t golden_u32(const cJSON *json, const char *name);
bool golden_has_error(const cJSON *expect);

/* A call of the planner that may not fail. */
#define must(r)                                                        \
	do {                                                           \
		if ((r) < 0) {                                         \
			print_error("%s: %s\n", #r, err_last()->text); \
			fail();                                        \
		}                                                      \
	} while (0)

/* The layout, once it has passed layout_check(). */
struct layout *golden_checked(struct layout *layout);

#endif
