/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fit: constants of the cost model from measured times. Pure: the caller measures, and
 * says when.
 *
 * A time on a shared machine is its true value plus now and then something large, so
 * nothing here is a mean: of the times of one size the median counts, and how far they
 * lie from it (MAD). Through the medians of several sizes goes a straight line.
 */
#ifndef KVD_COST_FIT_H
#define KVD_COST_FIT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/cost/cost.h"

/* Two independent errors together. No value is near what a square overflows, and hypot()
 * would make programs ask for glibc 2.35. */
static inline double fit_error_of(double a, double b)
{
	return sqrt(a * a + b * b);
}

#define FIT_SIZES_MAX 8u
#define FIT_SAMPLES_MAX 64u /* of a size: the latest */

enum {
	FIT_FEW = 1,  /* of fewer than two sizes */
	FIT_FLAT = 2, /* no more time for more: only the intercept can be told */
};

/* Times by size: of echoes, pulls, attention. Zeroed is empty. */
struct fit {
	struct fit_size {
		double amount;	/* bytes, rows, FLOP */
		uint32_t taken; /* in all; the latest FIT_SAMPLES_MAX are kept */
		double us[FIT_SAMPLES_MAX];
	} sizes[FIT_SIZES_MAX];
	uint32_t count;
};

/* us = fixed + amount / rate. */
struct fit_line {
	struct cost_figure fixed, rate;
	double residual; /* the largest distance of a median from the line, as a part of
			    it */
};

/* False: not a time or an amount, or too many sizes; nothing is kept of it. */
bool fit_add(struct fit *fit, double amount, double us);
/* 0 or an outcome. FIT_FLAT: `rate` is not known (count 0), `fixed` is. */
int fit_line(const struct fit *fit, uint32_t now_s, struct fit_line *line);

/* Sorts the values. `n` > 0. */
void fit_median(double *values, uint32_t n, double *median_p, double *mad_p);
/* Of the first `n` values, at most FIT_SAMPLES_MAX; the error is the median's own. */
struct cost_figure fit_figure(const double *values, uint32_t n, uint32_t now_s);
/* The median of the faster half, of what is measured seldom and had company meanwhile.
 * How far that is from the median of all is part of its error: perhaps it always has. */
struct cost_figure fit_faster(const double *values, uint32_t n, uint32_t now_s);

/* The machine had other work meanwhile: of `wall_us` the thread had the core for `cpu_us`
 * alone. A time under that load is longer by as much, and that is part of the error. */
void fit_loaded(struct cost_figure *figure, double wall_us, double cpu_us);
/* Measured anew: how far that is from what it was before is part of the error. */
void fit_anew(struct cost_figure *figure, const struct cost_figure *before);

/* ---- what goes on being measured ---- */

#define FIT_LIVE_PART 16.0 /* a new value moves a live figure by this part of the way */
#define FIT_DRIFT_LOW 0.75 /* measured by predicted: between these it predicts */
#define FIT_DRIFT_HIGH 1.33
#define FIT_DRIFT_RUN 64u /* so many in a row outside: it does not any more */

/* An exponentially weighted mean and mean distance; the first value is taken as it is,
 * and for its error, too: one value tells no scatter. */
void fit_live(struct cost_figure *figure, double value, uint32_t now_s);

/* Do predictions still hold? Zeroed: none was compared. */
struct fit_drift {
	uint32_t outside; /* in a row */
	bool stale;
};
/* After each operation. True: stale from now on, measure anew (told once). */
bool fit_drift_add(struct fit_drift *drift, double measured_us, double predicted_us);

#endif
