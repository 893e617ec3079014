/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open_child: the process that opens /proc/PID/mem for the daemon where its sandbox
 * forbids it that (memory/vm.c), and the records between the two.
 */
#ifndef KVD_GATE_OPEN_CHILD_H
#define KVD_GATE_OPEN_CHILD_H

#include <stdint.h>

struct open_ask {
	int32_t pid;
	int32_t mode; /* O_RDWR or O_RDONLY */
};

/* With the descriptor, where error is 0. */
struct open_answer {
	int32_t error; /* errno */
};

void open_child_serve(int socket);

#endif
