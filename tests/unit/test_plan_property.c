/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The planner against an oracle that works byte by byte, over random pairs of
 * layouts. KVD_PROPERTY_PAIRS sets their number, KVD_PROPERTY_SEED the first
 * seed; a failure prints the seed, and that seed with 1 pair shows it again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cmocka.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/plan/cover.h"
#include "tests/lib/plan_oracle.h"
#include "tests/lib/plan_random.h"

#define PAIRS_DEFAULT 10000

static uint64_t env_number(const char *name, uint64_t otherwise)
{
	const char *s = getenv(name);

	return s && *s ? strtoull(s, NULL, 0) : otherwise;
}

#define check(ok, seed, ...)                                                    \
	do {                                                                    \
		if (!(ok)) {                                                    \
			print_error("seed %llu: ", (unsigned long long)(seed)); \
			print_error(__VA_ARGS__);                               \
			print_error("\n");                                      \
			fail();                                                 \
		}                                                               \
	} while (0)

static void plan_of_random_pairs_moves_exactly_the_bytes(void **state)
{
	uint64_t pairs = env_number("KVD_PROPERTY_PAIRS", PAIRS_DEFAULT);
	uint64_t first = env_number("KVD_PROPERTY_SEED", 1);
	uint64_t planned = 0, refused = 0, rows = 0, fewest = 0;

	(void)state;
	for (uint64_t seed = first; seed < first + pairs; seed++) {
		struct plan_random pr;
		struct plan_oracle oracle;
		struct plan *plan;
		int r;

		plan_random_init(&pr, seed);
		r = layout_check(pr.src);
		check(r == 0, seed, "src: %s", err_last()->text);
		r = layout_check(pr.dst);
		check(r == 0, seed, "dst: %s", err_last()->text);
		plan_oracle_init(&oracle, &pr.req);
		r = plan_make(&pr.req, &plan);
		if (oracle.twice) {
			check(r < 0 && err_last()->code == ERR_DUP, seed,
			      "bytes reached twice were not refused (%d)", r);
			refused++;
		} else {
			const char *fault;

			check(r == 0, seed, "refused: %s", err_last()->text);
			fault = plan_oracle_check(&oracle, plan);
			check(!fault, seed, "%s: %llu rows, the fewest are %llu", fault,
			      (unsigned long long)plan->rows,
			      (unsigned long long)oracle.rows);
			planned++;
			rows += plan->rows;
			fewest += oracle.rows;
		}
		plan_free(plan);
		plan_oracle_fini(&oracle);
		plan_random_fini(&pr);
	}
	print_message("%llu pairs planned, %llu refused as reached twice, %llu rows, "
		      "fewest %llu\n",
		      (unsigned long long)planned, (unsigned long long)refused,
		      (unsigned long long)rows, (unsigned long long)fewest);
	assert_true(pairs < 100 || planned > pairs / 4);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(plan_of_random_pairs_moves_exactly_the_bytes),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
