/* SPDX-License-Identifier: Apache-2.0 */
/* Loads of a daemon's sessions, read by another daemon. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/cluster/load.h"
#include "daemon/cluster/loads.h"
#include "tests/lib/cluster.h"
#include "tests/lib/directory_hub.h"

#define S LOOP_NS_PER_S
#define ENGINES 3u
#define SECONDS 100u

static struct cluster c;
static struct session *engines[ENGINES], *requester;

static int setup(void **state)
{
	(void)state;
	directory_hub_share(2 * S);
	cluster_new(&c, 1, 2);
	directory_hub_share(0);
	cluster_run(&c, S);
	requester = cluster_engine(&c, 0, "requester");
	for (unsigned int i = 0; i < ENGINES; i++) {
		engines[i] = cluster_engine(&c, 1, "engine");
		cluster_ok(&c, engines[i],
			   "{'cmd':'group.publish','group':'g','worker':'w%u'}", i);
	}
	return 0;
}

static int teardown(void **state)
{
	(void)state;
	cluster_free(&c);
	return 0;
}

/* How often each was told: the number of its last load. */
static void told(unsigned int *all_p, unsigned int *least_p)
{
	cJSON *answer = cluster_call(&c, requester,
				     "{'cmd':'group.query','group':'g','loads':true}");
	const cJSON *rank;

	*all_p = 0;
	*least_p = UINT32_MAX;
	cJSON_ArrayForEach(rank, cJSON_GetObjectItemCaseSensitive(answer, "ranks")) {
		const cJSON *load = cJSON_GetObjectItemCaseSensitive(rank, "load");
		const cJSON *seq = cJSON_GetObjectItemCaseSensitive(load, "seq");
		unsigned int times = seq ? (unsigned int)seq->valuedouble : 0;

		*all_p += times;
		if (times < *least_p)
			*least_p = times;
	}
	cJSON_Delete(answer);
}

/* Loads that change each second, of all of them: they share what one would have. */
static void sessions_of_a_daemon_share_one_budget(void **state)
{
	unsigned int all, least;

	(void)state;
	for (unsigned int s = 0; s < SECONDS; s++) {
		for (unsigned int i = 0; i < ENGINES; i++)
			cluster_ok(&c, engines[i],
				   "{'cmd':'session.report','running':%u}",
				   s % 2 ? 1000u : 1u);
		cluster_run(&c, S);
	}
	told(&all, &least);
	assert_in_range(all, SECONDS / 5 - 2, SECONDS / 5 + LOAD_BURST);
	assert_in_range(least, SECONDS / 5 / ENGINES / 2, SECONDS);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test_setup_teardown(sessions_of_a_daemon_share_one_budget,
						setup, teardown),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
