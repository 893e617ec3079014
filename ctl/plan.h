/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan: `kvd-ctl plan`, the planner without a daemon.
 *
 *   kvd-ctl plan FILE|-  {"src", "dst", "map", "wants"} -> rows
 *
 * The output is one JSON object on standard output. Exit status: 0 success (also if
 * source and destination have nothing in common); 1 refused (the reason, with the
 * field's name, on standard error, nothing on standard output); 2 invalid usage.
 */
#ifndef KVD_CTL_PLAN_H
#define KVD_CTL_PLAN_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define PLAN_INPUT_MAX (256u << 20) /* bytes of JSON */
#define PLAN_ROWS_MAX (1u << 24)    /* rows in the output */

/* Prints the plan; returns the exit status. "-" is standard input. */
int plan_file(const char *path);

/* Parses `text` and writes the whole plan or nothing. */
int plan_answer(const char *text, size_t len, uint64_t max_rows, FILE *out);

#endif
