/* SPDX-License-Identifier: Apache-2.0 */
/*
 * speed: the attention speed of this daemon for a geometry, measured on scratch memory by
 * one of attention_threads, or on a GPU that is in use, and again after SPEED_FRESH_S;
 * peers can request it, too (calibrate.c).
 */
#ifndef KVD_ATTEND_SPEED_H
#define KVD_ATTEND_SPEED_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/attend/form.h"
#include "daemon/base/err.h"
#include "daemon/base/list.h"
#include "daemon/cost/cost.h"

struct attends;
struct speeds;

#define SPEED_FRESH_S 600u    /* then it is measured again, on request */
#define SPEEDS_MAX 32u	      /* geometries, the last requested ones */
#define SPEED_BYTES (8u * 8u) /* of speed_put() */

/* Of a geometry, by the KV's bytes; merged values are fp32. */
struct cost_shape speed_shape(const struct form *form);

/* A requester. on_reported is called once: in speed_ask(), or later. */
struct speed_wait {
	struct list link;
	void (*on_reported)(struct speed_wait *wait, const struct cost_compute *compute,
			    const struct err *why);
};
/* `gpu`: in GPU memory. ERR_REQUIRE: no threads, or no share of GPUs; ERR_RANGE: not
 * measured; ERR_BUSY: too many at a time, or no GPU in use; ERR_NOMEM. */
int speed_ask(struct attends *attends, const struct form *form, bool gpu,
	      struct speed_wait *wait);
/* Could it be measured now? As speed_ask(). */
int speed_check(struct attends *attends, const struct form *form, bool gpu);
/* A request needs no measurement: it exists, or is in progress. */
bool speed_is_known(const struct attends *attends, const struct form *form, bool gpu);
/* KV of one measurement. */
uint32_t speed_tokens(const struct attend_shape *shape, uint64_t token_bytes, bool gpu);
/* Four times of a kernel, and the constants derived from them. */
struct speed_points {
	double rows, many_rows;
	double tokens;	  /* few, and then more of them: */
	double all, part; /* with few rows, and with many */
	struct cost_figure few, few_all, many, many_part;
};
/* token_bytes: of KV; flop: of a row and a token. */
void speed_solve(const struct speed_points *points, double token_bytes, double flop,
		 struct cost_compute *compute);
void speed_forget(struct speed_wait *wait); /* on_reported is not called any more */
void speeds_free(struct speeds *speeds);    /* no measurement runs; NULL is fine */

/* The speed of merging and splicing here: some 100 us of the calling thread. */
int speed_home(struct cost_home *home);

struct cursor;
void speed_put(const struct cost_compute *compute, struct cursor *out);
/* Of the shape. ERR_PROTO. */
int speed_get(struct cursor *in, const struct attend_shape *shape, bool gpu,
	      struct cost_compute *compute);

#endif
