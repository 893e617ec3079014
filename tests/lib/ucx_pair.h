/* SPDX-License-Identifier: Apache-2.0 */
/* ucx_pair: transport_pair over ucx, also with one half in a process of its own. */
#ifndef KVD_TESTS_LIB_UCX_PAIR_H
#define KVD_TESTS_LIB_UCX_PAIR_H

#include "daemon/transport/ucx/ucx_impl.h"
#include "tests/lib/transport_pair.h"

/* Half of a pair in a process of its own, "writer" or "reader": connected to
 * `n`, it posts one 64 MiB WRITE or READ and lives until killed. */
pid_t up_child_start(const char *how, struct up_node *n);

/* main() of every program: the tests; then, where another libucp is found
 * (KVD_TEST_UCX_OTHER=…/libucp.so.0, or PyPI's libucx), the same with that one
 * in a process of its own. */
int up_run_tests(const char *name, const struct CMUnitTest *tests, size_t count);

#endif
