/* SPDX-License-Identifier: Apache-2.0 */
/* hook: a program that is run when something has changed: never two at a time, and not
 * longer than its limit. */
#ifndef KVD_CTL_HOOK_H
#define KVD_CTL_HOOK_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct hook {
	const char *program; /* a path, without arguments; no shell reads it */
	uint64_t limit_ns;
	pid_t pid; /* 0: none runs */
	uint64_t ends_ns;
	bool wanted; /* run it (again), when none runs */
	unsigned long failures;
};

/* Sees to the one that runs. */
void hook_watch(struct hook *hook);
/* The same, and starts it if wanted; `environment`: NAME=VALUE, NULL behind the last,
 * beside what this process has. */
void hook_turn(struct hook *hook, char *const environment[]);
/* Waits for the one that runs, until its limit. */
void hook_end(struct hook *hook);

#endif
