/* SPDX-License-Identifier: Apache-2.0 */
/*
 * open_child: the process that opens /proc/PID/mem for the daemon where its sandbox
 * forbids it that (memory/vm.c), and the records between the two. The reply carries the
 * facts that the daemon checks about the process, since /proc may hide them, too.
 */
#ifndef KVD_GATE_OPEN_CHILD_H
#define KVD_GATE_OPEN_CHILD_H

#include <stdint.h>
#include <sys/types.h>

struct open_ask {
	int32_t pid;
	int32_t mode; /* O_RDWR or O_RDONLY */
};

enum { OPEN_MEM, OPEN_STATUS, OPEN_FDS };

/* /proc/PID/mem, and then its status. errno, and none is open; or 0. */
int open_process(pid_t pid, int mode, int fds[OPEN_FDS]);

/* With the descriptors, where error is 0. */
struct open_answer {
	int32_t error; /* errno */
};

void open_child_serve(int socket);

#endif
