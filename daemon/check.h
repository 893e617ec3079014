/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check: checks whether the objects that a configuration names exist. Opens them as the
 * service would, with the rights of this process, and starts nothing.
 */
#ifndef KVD_CHECK_H
#define KVD_CHECK_H

struct config;

/* Errors and warnings are written to stderr, as "file:line: text" and "file:line:
 * warning: text". Returns the number of errors. */
unsigned int check_config(const struct config *config);

/* Continue with the rights of this user: 0, or -1 after printing the cause. */
int check_become(const char *user);

#endif
