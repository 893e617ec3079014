/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check: does a configuration name what is there? Opens what the service would
 * open, with the rights that this process has, and starts nothing.
 */
#ifndef KVD_CHECK_H
#define KVD_CHECK_H

struct config;

/* Errors and warnings go to stderr, as "file:line: words" and "file:line: warning:
 * words". Returns the number of errors. */
unsigned int check_config(const struct config *config);

/* Go on with the rights of this user: 0, or -1 after telling why not. */
int check_become(const char *user);

#endif
