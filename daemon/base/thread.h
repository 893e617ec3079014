/* SPDX-License-Identifier: Apache-2.0 */
/* thread: a thread that leaves signals to the loop's. Only synchronous faults (SIGBUS,
 * SIGSEGV, SIGILL, SIGFPE) reach it. */
#ifndef KVD_BASE_THREAD_H
#define KVD_BASE_THREAD_H

#include <pthread.h>

/* `name`: at most 15 bytes, as top and gdb show it. */
int thread_start(const char *name, void *(*run)(void *arg), void *arg,
		 pthread_t *thread_p);

#endif
