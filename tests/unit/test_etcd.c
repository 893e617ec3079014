/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of directories, with a real etcd; test_etcd_faults has what goes wrong. */
#include "daemon/cluster/etcd.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "tests/lib/directory_tests.h"
#include "tests/lib/etcd_rig.h"

static int contract_new(void **state)
{
	*state = &etcd_rig_new(4)->rig;
	return 0;
}

static int contract_free(void **state)
{
	etcd_rig_free(container_of((struct directory_rig *)*state, struct etcd_rig, rig));
	return 0;
}

int main(void)
{
	const struct CMUnitTest tests[] = {DIRECTORY_TESTS(contract_new, contract_free)};

	return cmocka_run_group_tests_name("etcd", tests, etcd_rig_begin, etcd_rig_end);
}
