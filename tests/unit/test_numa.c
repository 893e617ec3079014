/* SPDX-License-Identifier: Apache-2.0 */
/* numa: what the kernel's tree of nodes says, from trees of the test's own. */
#include "daemon/memory/numa.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "tests/lib/tmp.h"

static void numa_lists_and_trees_are_read(void **state)
{
	static const char *const bad[] = {"x", "1-", "3-2", "1,,2", "-1", "99999"};
	char root[64], path[512];
	struct numa *numa = test_calloc(1, sizeof(*numa));
	cpu_set_t cpus;

	(void)state;
	assert_true(numa_list_parse("0-3,8,10-11\n", &cpus));
	assert_int_equal(CPU_COUNT(&cpus), 7);
	assert_true(CPU_ISSET(8, &cpus) && CPU_ISSET(11, &cpus) && !CPU_ISSET(9, &cpus));
	assert_true(numa_list_parse("\n", &cpus));
	assert_int_equal(CPU_COUNT(&cpus), 0);
	for (size_t i = 0; i < ARRAY_LEN(bad); i++)
		assert_false(numa_list_parse(bad[i], &cpus));
	assert_non_null(mkdtemp(tmp_path(root, sizeof(root), "kvd-numa-XXXXXX")));
	CPU_ZERO(&cpus);
	for (int i = 0; i < 6; i++)
		CPU_SET(i, &cpus);
	numa_read(root, &cpus, numa);
	assert_int_equal(numa->count, 0);
	/* node 1 has memory only, node 3's processors are not ours */
	snprintf(path, sizeof(path),
		 "cd '%s' && echo 0-1,3,7 > online && mkdir node0 node1 node3 node7 && "
		 "echo 0-3 > node0/cpulist && echo > node1/cpulist && "
		 "echo 8-9 > node3/cpulist && echo 4-7 > node7/cpulist",
		 root);
	assert_int_equal(system(path), 0);
	numa_read(root, &cpus, numa);
	assert_int_equal(numa->count, 2);
	assert_int_equal(numa->nodes[1].id, 7);
	assert_int_equal(CPU_COUNT(&numa->nodes[1].cpus), 2);
	snprintf(path, sizeof(path), "rm -r '%s'", root);
	assert_int_equal(system(path), 0);
	test_free(numa);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(numa_lists_and_trees_are_read),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
