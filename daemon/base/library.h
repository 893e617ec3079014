/* SPDX-License-Identifier: Apache-2.0 */
/*
 * library: functions of a library that is loaded by name when needed, so that a host
 * without it can run the daemon. Once loaded it stays: its threads and handlers at exit
 * would outlive it. Any thread.
 */
#ifndef KVD_BASE_LIBRARY_H
#define KVD_BASE_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

struct library_function {
	const char *name;
	void *fn_p; /* of the pointer that receives it */
	bool optional;
};

/* ERR_REQUIRE names the missing library or function. */
int library_load(const char *path, const struct library_function *functions,
		 size_t count);

#endif
