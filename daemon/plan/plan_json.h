/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_json: the planner with JSON on both sides (docs/internals/planner.md): {"src",
 * "dst", "map", "wants"} to rows. For `kvd-ctl plan`. Pure; any thread.
 */
#ifndef KVD_PLAN_PLAN_JSON_H
#define KVD_PLAN_PLAN_JSON_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

struct cJSON;
struct plan;
struct plan_request;

#define PLAN_JSON_WANTS_MAX (1u << 20)

/* Text in place of the JSON answer. */
typedef void plan_json_explain_rows(const struct plan_request *req,
				    const struct plan *plan, FILE *out);

/* Write the whole answer, one JSON object and a newline, or nothing. `explain` NULL:
 * JSON. Other members of `root` are ignored. ERR_LIMIT: more rows. */
int plan_json_rows(const struct cJSON *root, uint64_t max_rows,
		   plan_json_explain_rows *explain, FILE *out);

#endif
