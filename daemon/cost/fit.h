/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fit: constants of the cost model from measured times. Pure: the caller measures, and
 * passes the clock.
 *
 * A time on a shared machine is its true value plus an occasional large delay, so nothing
 * here is a mean: of the times of one size the median counts, and their distances from it
 * (MAD). A straight line is fitted through the medians of several sizes.
 */
#ifndef KVD_COST_FIT_H
#define KVD_COST_FIT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/cost/cost.h"

/* Combines two independent errors. No value is near the overflow of a square, and hypot()
 * would make programs need glibc 2.35. */
static inline double fit_error_of(double a, double b)
{
	return sqrt(a * a + b * b);
}

#define FIT_SIZES_MAX 8u
#define FIT_SAMPLES_MAX 64u /* of a size: the latest */

enum {
	FIT_FEW = 1,  /* of fewer than two sizes */
	FIT_FLAT = 2, /* no more time for more: only the intercept is known */
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
	double residual; /* the largest distance of a median from the line, as a fraction
			    of it */
};

/* False: not a time or an amount, or too many sizes; it is not recorded. */
bool fit_add(struct fit *fit, double amount, double us);
/* 0 or an outcome. FIT_FLAT: `rate` is not known (count 0), `fixed` is. */
int fit_line(const struct fit *fit, uint32_t now_s, struct fit_line *line);

/* Sorts the values. `n` > 0. */
void fit_median(double *values, uint32_t n, double *median_p, double *mad_p);
/* Of the first `n` values, at most FIT_SAMPLES_MAX; the error is the median's own. */
struct cost_figure fit_figure(const double *values, uint32_t n, uint32_t now_s);
/* The median of the faster half, for rare measurements under load. Its distance from the
 * median of all is part of its error: perhaps the load is permanent. */
struct cost_figure fit_faster(const double *values, uint32_t n, uint32_t now_s);

/* The machine had other load meanwhile: of `wall_us` the thread had the core for `cpu_us`
 * alone. A time under that load is longer by as much, and that is part of the error. */
void fit_loaded(struct cost_figure *figure, double wall_us, double cpu_us);
/* Measured again: the distance from the earlier value is part of the error. */
void fit_anew(struct cost_figure *figure, const struct cost_figure *before);

/* ---- continuous measurements ---- */

#define FIT_LIVE_PART 16.0 /* the weight of a new value is 1 / this */
#define FIT_DRIFT_LOW 0.75 /* measured by predicted: the range of a good prediction */
#define FIT_DRIFT_HIGH 1.33
#define FIT_DRIFT_RUN 64u /* so many in a row outside: it no longer predicts */

/* An exponentially weighted mean and mean distance; the first value is taken as it is,
 * and for its error, too: one value has no scatter. */
void fit_live(struct cost_figure *figure, double value, uint32_t now_s);

/* Do predictions hold? Zeroed: none was compared. */
struct fit_drift {
	uint32_t outside; /* in a row */
	bool stale;
};
/* After each operation. True: stale from now on, measure again (returned once). */
bool fit_drift_add(struct fit_drift *drift, double measured_us, double predicted_us);

#endif
