/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tmp: where tests put their files. scripts/run-tests.sh gives each run a folder of its
 * own (TMPDIR) and removes it, so that a test which is killed leaves nothing behind.
 */
#ifndef KVD_TESTS_TMP_H
#define KVD_TESTS_TMP_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#define TMP_ROOT_MAX 24u /* a socket's path has 108 bytes, and names follow */

/* `name` in that folder; `path`, for mkdtemp() and mkstemp(). */
static inline char *tmp_path(char *path, size_t size, const char *name)
{
	const char *root = getenv("TMPDIR");

	/* not there: in a root of its own */
	if (!root || !*root || strlen(root) > TMP_ROOT_MAX ||
	    access(root, W_OK | X_OK) < 0)
		root = "/tmp";
	if (snprintf(path, size, "%s/%s", root, name) >= (int)size)
		abort();
	return path;
}

/* A name with that beginning that nobody has, for shm_open() and abstract sockets. A pid
 * is none: pids come again, in each container from 1 on, and /dev/shm may outlive or join
 * them. */
static inline char *tmp_name(char *name, size_t size, const char *prefix)
{
	uint64_t number;

	if (getrandom(&number, sizeof(number), 0) != sizeof(number) ||
	    snprintf(name, size, "%s-%016jx", prefix, (uintmax_t)number) >= (int)size)
		abort();
	return name;
}

#endif
