/* SPDX-License-Identifier: Apache-2.0 */
/* gates: the gates of a daemon that lives in a test, with a process of their own. */
#ifndef KVD_TESTS_LIB_GATES_H
#define KVD_TESTS_LIB_GATES_H

struct gates;
struct loop;

void gates_begin(struct loop *loop, struct gates **gates_p);

#endif
