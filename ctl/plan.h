/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan: `kvd-ctl plan`, the planner without a daemon.
 *
 *   kvd-ctl plan [--explain] FILE|-  {"src", "dst", "map", "wants"} -> rows
 *
 * The output is one JSON object on standard output, or text with --explain. Exit
 * status: 0 success (also if source and destination have nothing in common); 1 refused
 * (the reason, with the field's name, on standard error, nothing on standard output);
 * 2 invalid usage.
 */
#ifndef KVD_CTL_PLAN_H
#define KVD_CTL_PLAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct plan;
struct plan_request;

#define PLAN_INPUT_MAX (256u << 20) /* bytes of JSON */
#define PLAN_ROWS_MAX (1u << 24)    /* rows in the output */

struct plan_options {
	bool explain;
	uint64_t max_rows; /* 0: PLAN_ROWS_MAX */
};
/* Prints the plan; returns the exit status. "-" is standard input. */
int plan_file(const char *path, const struct plan_options *options);

/* Parses `text` and writes the whole plan or nothing. */
int plan_answer(const char *text, size_t len, const struct plan_options *options,
		FILE *out);

/* --explain, in plan_explain.c. */
void plan_explain(const struct plan_request *req, const struct plan *plan, FILE *out);

#endif
