/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fit: medians, and a line through them.
 *
 * The line is weighted least squares: a size whose median is known well counts more. A
 * median of n values that scatter by sigma has the standard error sqrt(pi / 2) * sigma /
 * sqrt(n), and for normal scatter sigma = 1.4826 MAD. Clocks and schedulers add errors
 * that scatter does not show, and identical times (MAD 0) do not mean certainty: no
 * median is trusted better than to one part in a hundred.
 *
 * Errors of intercept and slope are those of the weighted fit; if the medians are farther
 * from the line than their own errors explain, the line is only an approximation there,
 * and both errors grow by that factor (the square root of reduced chi^2).
 *
 * Robust alternatives, as Theil and Sen's slope, were not needed: the medians absorb
 * outliers, and a handful of sizes has few slopes to choose from.
 */
#include "daemon/cost/fit.h"

#include <stdlib.h>
#include <string.h>

#define MAD_TO_SIGMA 1.4826
#define MEDIAN_ERROR 1.2533 /* sqrt(pi / 2) */
#define TRUST 0.01	    /* of a median, at best */

static int fit_by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static double fit_middle(const double *sorted, uint32_t n)
{
	return n % 2 ? sorted[n / 2] : 0.5 * (sorted[n / 2 - 1] + sorted[n / 2]);
}

void fit_median(double *values, uint32_t n, double *median_p, double *mad_p)
{
	double median, distance[FIT_SAMPLES_MAX];

	n = n < FIT_SAMPLES_MAX ? n : FIT_SAMPLES_MAX;
	qsort(values, n, sizeof(*values), fit_by_value);
	median = fit_middle(values, n);
	for (uint32_t i = 0; i < n; i++)
		distance[i] = fabs(values[i] - median);
	qsort(distance, n, sizeof(*distance), fit_by_value);
	*median_p = median;
	*mad_p = fit_middle(distance, n);
}

struct cost_figure fit_figure(const double *values, uint32_t n, uint32_t now_s)
{
	struct cost_figure figure = {.at_s = now_s};
	double sorted[FIT_SAMPLES_MAX];
	double scatter, trust;

	n = n < FIT_SAMPLES_MAX ? n : FIT_SAMPLES_MAX;
	if (!n)
		return figure;
	memcpy(sorted, values, n * sizeof(*values));
	fit_median(sorted, n, &figure.value, &figure.mad);
	figure.count = n;
	scatter = MEDIAN_ERROR * MAD_TO_SIGMA * figure.mad / sqrt(n);
	trust = TRUST * fabs(figure.value);
	figure.error = scatter > trust ? scatter : trust;
	return figure;
}

struct cost_figure fit_faster(const double *values, uint32_t n, uint32_t now_s)
{
	struct cost_figure all = fit_figure(values, n, now_s), half;
	double sorted[FIT_SAMPLES_MAX];

	if (!all.count)
		return all;
	memcpy(sorted, values, all.count * sizeof(*values));
	qsort(sorted, all.count, sizeof(*sorted), fit_by_value);
	half = fit_figure(sorted, (all.count + 1) / 2, now_s);
	half.error = fit_error_of(half.error, all.value - half.value);
	half.mad = all.mad;
	half.count = all.count;
	return half;
}

void fit_loaded(struct cost_figure *figure, double wall_us, double cpu_us)
{
	if (cpu_us > 0 && wall_us > cpu_us)
		figure->error = fit_error_of(figure->error,
					     figure->value * (wall_us / cpu_us - 1));
}

void fit_anew(struct cost_figure *figure, const struct cost_figure *before)
{
	if (figure->count && before->count)
		figure->error =
			fit_error_of(figure->error, figure->value - before->value);
}

static struct fit_size *fit_size_of(struct fit *fit, double amount)
{
	for (uint32_t i = 0; i < fit->count; i++)
		if (fit->sizes[i].amount == amount)
			return &fit->sizes[i];
	if (fit->count == FIT_SIZES_MAX)
		return NULL;
	fit->sizes[fit->count] = (struct fit_size){.amount = amount};
	return &fit->sizes[fit->count++];
}

bool fit_add(struct fit *fit, double amount, double us)
{
	struct fit_size *size;

	if (!isfinite(amount) || !isfinite(us) || amount < 0 || us < 0)
		return false;
	size = fit_size_of(fit, amount);
	if (!size)
		return false;
	size->us[size->taken++ % FIT_SAMPLES_MAX] = us;
	return true;
}

/* Weighted sums over the medians, x: amount, y: µs. */
struct sums {
	double w, x, y, xx, xy;
	struct cost_figure median[FIT_SIZES_MAX];
	uint32_t count; /* of samples */
};

static double fit_weight(const struct cost_figure *median)
{
	/* a time of exactly 0 has an error of 0 */
	double error = median->error > 1e-6 ? median->error : 1e-6;

	return 1 / (error * error);
}

static void fit_sums_make(const struct fit *fit, uint32_t now_s, struct sums *sums)
{
	*sums = (struct sums){0};
	for (uint32_t i = 0; i < fit->count; i++) {
		const struct fit_size *size = &fit->sizes[i];
		uint32_t kept =
			size->taken < FIT_SAMPLES_MAX ? size->taken : FIT_SAMPLES_MAX;
		struct cost_figure m = fit_figure(size->us, kept, now_s);
		double w = fit_weight(&m);

		sums->median[i] = m;
		sums->count += m.count;
		sums->w += w;
		sums->x += w * size->amount;
		sums->y += w * m.value;
		sums->xx += w * size->amount * size->amount;
		sums->xy += w * size->amount * m.value;
	}
}

/* The distance of the medians from the line: chi^2, and the largest part. */
static double fit_misfit(const struct fit *fit, const struct sums *sums, double fixed,
			 double slope, double *residual_p)
{
	double chi2 = 0;

	*residual_p = 0;
	for (uint32_t i = 0; i < fit->count; i++) {
		double line = fixed + slope * fit->sizes[i].amount;
		double off = sums->median[i].value - line;

		chi2 += off * off * fit_weight(&sums->median[i]);
		if (line > 0 && fabs(off) / line > *residual_p)
			*residual_p = fabs(off) / line;
	}
	return chi2;
}

/* The scatter of a line's constants is that of their samples. */
static void fit_figure_fill(struct cost_figure *figure, const struct sums *sums,
			    double value, double error, uint32_t now_s)
{
	figure->value = value;
	figure->error = error;
	figure->mad = error / MAD_TO_SIGMA;
	figure->count = sums->count;
	figure->at_s = now_s;
}

int fit_line(const struct fit *fit, uint32_t now_s, struct fit_line *line)
{
	struct sums s;
	double det, slope, fixed, chi2, grow = 1;
	double slope_error, fixed_error;

	*line = (struct fit_line){0};
	if (fit->count < 2)
		return FIT_FEW;
	fit_sums_make(fit, now_s, &s);
	det = s.w * s.xx - s.x * s.x;
	slope = (s.w * s.xy - s.x * s.y) / det;
	fixed = (s.y - slope * s.x) / s.w;
	if (!(slope > 0) || !isfinite(fixed)) {
		fit_figure_fill(&line->fixed, &s, s.y / s.w, sqrt(1 / s.w), now_s);
		fit_misfit(fit, &s, s.y / s.w, 0, &line->residual);
		return FIT_FLAT;
	}
	if (fixed < 0) { /* a line through the origin: no time is negative */
		fixed = 0;
		slope = s.xy / s.xx;
	}
	chi2 = fit_misfit(fit, &s, fixed, slope, &line->residual);
	if (fit->count > 2 && chi2 > fit->count - 2)
		grow = sqrt(chi2 / (fit->count - 2));
	slope_error = grow * sqrt(s.w / det);
	fixed_error = grow * sqrt(s.xx / det);
	fit_figure_fill(&line->fixed, &s, fixed, fixed_error, now_s);
	fit_figure_fill(&line->rate, &s, 1 / slope, slope_error / (slope * slope), now_s);
	return 0;
}

/* ---- live ---- */

/* The mean's variance, as a part of one value's, is the sum of its weights' squares: 1 of
 * the first value, 1 / (2 * 16 - 1) in the end. Distances have one weight less than
 * values, and the sum of theirs is 1 only in the end. A mean distance of normal scatter
 * is 0.8 sigma. */
static double fit_live_error(const struct cost_figure *figure)
{
	double first = pow(1 - 1 / FIT_LIVE_PART, figure->count - 1);
	double end = 1 / (2 * FIT_LIVE_PART - 1);

	if (figure->count == 1)
		return fabs(figure->value);
	return MEDIAN_ERROR * figure->mad / (1 - first) *
	       sqrt(end + (1 - end) * first * first);
}

void fit_live(struct cost_figure *figure, double value, uint32_t now_s)
{
	if (!isfinite(value))
		return;
	if (!figure->count) {
		*figure = (struct cost_figure){.value = value};
	} else {
		double off = fabs(value - figure->value);

		figure->value += (value - figure->value) / FIT_LIVE_PART;
		figure->mad += (off - figure->mad) / FIT_LIVE_PART;
	}
	if (figure->count < UINT32_MAX)
		figure->count++;
	figure->error = fit_live_error(figure);
	figure->at_s = now_s;
}

bool fit_drift_add(struct fit_drift *drift, double measured_us, double predicted_us)
{
	double ratio = measured_us / predicted_us;

	if (!(predicted_us > 0) || !isfinite(ratio))
		return false;
	if (ratio >= FIT_DRIFT_LOW && ratio <= FIT_DRIFT_HIGH) {
		drift->outside = 0;
		return false;
	}
	if (drift->outside < FIT_DRIFT_RUN)
		drift->outside++;
	if (drift->outside < FIT_DRIFT_RUN || drift->stale)
		return false;
	drift->stale = true;
	return true;
}
