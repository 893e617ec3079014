/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_json: the planner with JSON on both sides (docs/internals/planner.md): {"src",
 * "dst", "map", "wants"} to rows. For `kvd-ctl plan`. Pure; any thread.
 */
#ifndef KVD_PLAN_PLAN_JSON_H
#define KVD_PLAN_PLAN_JSON_H

#include <stdint.h>
#include <stdio.h>

struct cJSON;

#define PLAN_JSON_WANTS_MAX (1u << 20)

/* Write the whole answer, one JSON object and a newline, or nothing. Other members of
 * `root` are ignored. ERR_LIMIT: more rows. */
int plan_json_rows(const struct cJSON *root, uint64_t max_rows, FILE *out);

#endif
