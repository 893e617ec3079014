/* SPDX-License-Identifier: Apache-2.0 */
/* rules: what kvd's main process may call on which kind of object (rules.c's tables). */
#ifndef KVD_TESTS_STILL_RULES_H
#define KVD_TESTS_STILL_RULES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define OWN_MAX 16
#define TEXT_BYTES 512

/* The watched process. */
struct watched {
	pid_t pid;
	int pidfd;
	const char *own[OWN_MAX]; /* directories that are its user's alone */
	unsigned int own_count;
};

struct call {
	int nr;
	pid_t tid;
	uint64_t args[6];
};

/* The calls that are looked at; -1 ends them. */
const int *rules_calls(void);
/* true: it may sleep for as long as a stranger likes; `text` says what was called on
 * what, and why that is wrong. */
bool rules_judge(const struct watched *watched, const struct call *call,
		 char text[TEXT_BYTES]);

#endif
