/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Constants from measured times: exact ones, scattered ones, outliers, sizes that lie on
 * no line, and predictions that stop to hold.
 */
#include "daemon/cost/fit.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

static uint64_t dice = 88172645463325252u;

static double unit(void)
{
	dice ^= dice << 13;
	dice ^= dice >> 7;
	dice ^= dice << 17;
	return (double)(dice >> 11) * 0x1p-53;
}

/* About normal, of variance 1. */
static double normal(void)
{
	double sum = 0;

	for (unsigned int i = 0; i < 12; i++)
		sum += unit();
	return sum - 6;
}

static void assert_close(double a, double b, double part)
{
	if (!(fabs(a - b) <= part * fabs(b)))
		fail_msg("%g is not within %g of %g", a, part, b);
}

static void median_of_odd_and_even_counts(void **state)
{
	double odd[] = {9, 1, 5}, even[] = {4, 1, 3, 100}, median, mad;

	(void)state;
	fit_median(odd, 3, &median, &mad);
	assert_true(median == 5 && mad == 4);
	fit_median(even, 4, &median, &mad);
	assert_true(median == 3.5 && mad == 1.5);
}

static void figure_has_median_scatter_count_and_time(void **state)
{
	double times[FIT_SAMPLES_MAX] = {0};
	struct cost_figure f;

	(void)state;
	f = fit_figure(times, 0, 7);
	assert_int_equal(f.count, 0);
	for (unsigned int i = 0; i < FIT_SAMPLES_MAX; i++)
		times[i] = 100 + 10 * normal();
	f = fit_figure(times, FIT_SAMPLES_MAX, 7);
	assert_close(f.value, 100, 0.06);
	assert_close(1.4826 * f.mad, 10, 0.4);
	assert_close(f.error, 1.2533 * 10 / 8, 0.4);
	assert_int_equal(f.count, FIT_SAMPLES_MAX);
	assert_int_equal(f.at_s, 7);
	for (unsigned int i = 0; i < 5; i++)
		times[i] = 50;
	f = fit_figure(times, 5, 7); /* equal times are no certainty */
	assert_true(f.mad == 0);
	assert_close(f.error, 0.5, 1e-9);
}

static void exact_times_give_exact_constants(void **state)
{
	static const double bytes[] = {0, 2184, 34944, 279552};
	struct fit_line line;
	struct fit fit = {0};

	(void)state;
	for (unsigned int i = 0; i < 4; i++)
		for (unsigned int n = 0; n < 9; n++)
			assert_true(fit_add(&fit, bytes[i], 25 + bytes[i] / 24700));
	assert_int_equal(fit_line(&fit, 3, &line), 0);
	assert_close(line.fixed.value, 25, 1e-9);
	assert_close(line.rate.value, 24700, 1e-6);
	assert_true(line.residual < 1e-9);
	assert_int_equal(line.rate.count, 36);
	assert_int_equal(line.rate.at_s, 3);
	assert_true(line.fixed.error > 0 && line.fixed.error < 0.5);
}

/* The published sweep of row sizes, 1024 rows: what a refit of it finds. */
static void published_sweep_yields_the_missing_turn(void **state)
{
	static const double bytes[] = {900, 2184, 4368, 8736};
	static const double us[] = {62.8, 115.8, 207.7, 389.1};
	struct fit_line line;
	struct fit fit = {0};

	(void)state;
	for (unsigned int i = 0; i < 4; i++)
		fit_add(&fit, 1024 * bytes[i], us[i]);
	assert_int_equal(fit_line(&fit, 0, &line), 0);
	assert_close(line.fixed.value, 25, 0.02);
	assert_close(line.rate.value, 24.6e3, 0.01);
	assert_true(line.residual < 0.01);
}

/* One time in five is ten times too long. */
static void outliers_do_not_move_the_line(void **state)
{
	static const double bytes[] = {0, 17472, 34944, 69888, 279552};
	unsigned int inside = 0;

	(void)state;
	for (unsigned int round = 0; round < 200; round++) {
		struct fit_line line;
		struct fit fit = {0};

		for (unsigned int i = 0; i < 5; i++)
			for (unsigned int n = 0; n < 31; n++) {
				double us = 20 + bytes[i] / 1000 + 0.5 * normal();

				fit_add(&fit, bytes[i], unit() < 0.2 ? 10 * us : us);
			}
		assert_int_equal(fit_line(&fit, 0, &line), 0);
		assert_close(line.fixed.value, 20, 0.08);
		assert_close(line.rate.value, 1000, 0.08);
		inside += fabs(line.fixed.value - 20) < 3 * line.fixed.error;
	}
	assert_true(inside > 180); /* the error says what it says */
}

static void times_on_no_line_have_large_errors(void **state)
{
	static const double bytes[] = {1e3, 1e4, 1e5, 1e6};
	struct fit_line straight, bent;
	struct fit fit = {0};

	(void)state;
	for (unsigned int i = 0; i < 4; i++)
		fit_add(&fit, bytes[i], 10 + bytes[i] / 1e4);
	assert_int_equal(fit_line(&fit, 0, &straight), 0);
	fit = (struct fit){0};
	for (unsigned int i = 0; i < 4; i++)
		fit_add(&fit, bytes[i], 10 + pow(bytes[i], 1.3) / 1e5);
	assert_int_equal(fit_line(&fit, 0, &bent), 0);
	assert_true(bent.residual > 0.1);
	assert_true(bent.rate.error / bent.rate.value >
		    5 * straight.rate.error / straight.rate.value);
}

static void fit_of_few_or_flat_points_is_reported(void **state)
{
	struct fit_line line;
	struct fit fit = {0};

	(void)state;
	assert_int_equal(fit_line(&fit, 0, &line), FIT_FEW);
	fit_add(&fit, 64, 10);
	fit_add(&fit, 64, 11);
	assert_int_equal(fit_line(&fit, 0, &line), FIT_FEW);
	assert_int_equal(line.fixed.count, 0);
	fit_add(&fit, 128, 9);
	assert_int_equal(fit_line(&fit, 0, &line), FIT_FLAT);
	assert_int_equal(line.rate.count, 0);
	assert_close(line.fixed.value, 9.75, 0.1);
}

static void line_with_negative_offset_passes_zero(void **state)
{
	struct fit_line line;
	struct fit fit = {0};

	(void)state;
	fit_add(&fit, 1000, 1);
	fit_add(&fit, 2000, 9);
	assert_int_equal(fit_line(&fit, 0, &line), 0);
	assert_true(line.fixed.value == 0);
	assert_true(line.rate.value > 222 && line.rate.value < 1000);
}

static void time_invalid_is_refused(void **state)
{
	struct fit fit = {0};

	(void)state;
	assert_false(fit_add(&fit, 1, NAN));
	assert_false(fit_add(&fit, NAN, 1));
	assert_false(fit_add(&fit, INFINITY, 1));
	assert_false(fit_add(&fit, 1, -1));
	assert_false(fit_add(&fit, -1, 1));
	assert_int_equal(fit.count, 0);
	for (unsigned int i = 0; i < FIT_SIZES_MAX; i++)
		assert_true(fit_add(&fit, i, 1));
	assert_false(fit_add(&fit, FIT_SIZES_MAX, 1));
	assert_true(fit_add(&fit, 0, 1));
}

static void latest_times_count(void **state)
{
	struct fit_line line;
	struct fit fit = {0};

	(void)state;
	for (unsigned int n = 0; n < 3 * FIT_SAMPLES_MAX; n++) {
		fit_add(&fit, 0, n < FIT_SAMPLES_MAX ? 500 : 5);
		fit_add(&fit, 100, n < FIT_SAMPLES_MAX ? 900 : 15);
	}
	assert_int_equal(fit_line(&fit, 0, &line), 0);
	assert_close(line.fixed.value, 5, 1e-6);
	assert_close(line.rate.value, 10, 1e-6);
	assert_int_equal(line.fixed.count, 2 * FIT_SAMPLES_MAX);
}

/* What took the core from most calls is not in the value, but in its error. */
static void faster_half_counts_and_the_rest_is_its_error(void **state)
{
	const double even[] = {10, 10, 10, 10, 10}, half[] = {30, 10, 32, 11, 12, 31, 33};
	struct cost_figure f;

	(void)state;
	f = fit_faster(even, 5, 7);
	assert_true(f.value == 10 && f.count == 5 && f.at_s == 7 && f.error < 0.2);
	f = fit_faster(half, 7, 7);
	assert_true(f.value == 11.5 && f.count == 7);
	assert_true(f.error >= 30 - 11.5 && f.mad > 1);
	assert_int_equal(fit_faster(half, 0, 7).count, 0);
}

static void live_figure_follows(void **state)
{
	struct cost_figure f = {0};

	(void)state;
	fit_live(&f, 40, 1);
	assert_true(f.value == 40 && f.count == 1 && f.at_s == 1);
	assert_true(f.error == 40);
	fit_live(&f, NAN, 2);
	assert_int_equal(f.count, 1);
	for (unsigned int i = 0; i < 16; i++)
		fit_live(&f, 140, 3);
	assert_close(f.value, 140 - 100 * pow(15.0 / 16, 16), 1e-9);
	for (unsigned int i = 0; i < 1000; i++)
		fit_live(&f, 100 + 10 * normal(), 4);
	assert_close(f.value, 100, 0.08);
	assert_close(f.error, 10 / sqrt(31), 0.4);
	assert_int_equal(f.count, 1017);
}

/* More values than are kept, and times of exactly 0, which have no scatter. */
static void odd_values_give_numbers(void **state)
{
	struct fit fit = {.count = 0};
	struct fit_line line;
	double many[2 * FIT_SAMPLES_MAX];

	(void)state;
	for (unsigned int i = 0; i < 2 * FIT_SAMPLES_MAX; i++)
		many[i] = i < FIT_SAMPLES_MAX ? 5 : 500;
	assert_int_equal(fit_figure(many, 2 * FIT_SAMPLES_MAX, 1).count, FIT_SAMPLES_MAX);
	assert_true(fit_faster(many, 2 * FIT_SAMPLES_MAX, 1).value == 5);
	for (unsigned int i = 0; i < 3; i++)
		assert_true(fit_add(&fit, 0, 0) && fit_add(&fit, 100, 10));
	assert_int_equal(fit_line(&fit, 1, &line), 0);
	assert_close(line.rate.value, 10, 1e-6);
	assert_true(isfinite(line.rate.error) && isfinite(line.fixed.error));
}

/* Of many figures after a few values each, how far they are from the truth. */
static void live_error_accounts_for_few_values(void **state)
{
	static const unsigned int counts[] = {2, 4, 8, 16, 100};

	(void)state;
	for (unsigned int i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
		double off = 0, told = 0;

		for (unsigned int n = 0; n < 2000; n++) {
			struct cost_figure f = {0};

			for (unsigned int k = 0; k < counts[i]; k++)
				fit_live(&f, 100 + 10 * normal(), 1);
			off += (f.value - 100) * (f.value - 100);
			told += f.error * f.error;
		}
		print_message("%u values: off by %.2f, told %.2f\n", counts[i],
			      sqrt(off / 2000), sqrt(told / 2000));
		assert_true(told > 0.8 * off && told < 4 * off);
	}
}

static void drift_is_reported_once_after_a_run(void **state)
{
	struct fit_drift d = {0};

	(void)state;
	for (unsigned int i = 0; i + 1 < FIT_DRIFT_RUN; i++)
		assert_false(fit_drift_add(&d, 140, 100));
	assert_false(fit_drift_add(&d, 120, 100)); /* one that holds begins anew */
	assert_false(fit_drift_add(&d, 140, 0));   /* no prediction, no judgement */
	for (unsigned int i = 0; i + 1 < FIT_DRIFT_RUN; i++)
		assert_false(fit_drift_add(&d, i % 2 ? 140 : 70, 100));
	assert_false(d.stale);
	assert_true(fit_drift_add(&d, 70, 100));
	assert_true(d.stale);
	assert_false(fit_drift_add(&d, 70, 100));
}

static void load_is_part_of_the_error(void **state)
{
	const double us[4] = {100, 100, 100, 100};
	struct cost_figure idle = fit_figure(us, 4, 7), busy = idle, before = idle;

	(void)state;
	fit_loaded(&idle, 400, 400);
	assert_true(idle.error == before.error);
	fit_loaded(&busy, 800, 400); /* others had the core for half of the time */
	assert_true(busy.error > 100 && busy.error < 101);
	assert_true(busy.value == 100);
	before.value = 130;
	fit_anew(&idle, &before);
	assert_true(idle.error > 30 && idle.error < 31);
	fit_anew(&busy, &(struct cost_figure){.value = 5000}); /* it was not measured */
	assert_true(busy.error < 101);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(median_of_odd_and_even_counts),
		cmocka_unit_test(figure_has_median_scatter_count_and_time),
		cmocka_unit_test(exact_times_give_exact_constants),
		cmocka_unit_test(published_sweep_yields_the_missing_turn),
		cmocka_unit_test(outliers_do_not_move_the_line),
		cmocka_unit_test(times_on_no_line_have_large_errors),
		cmocka_unit_test(fit_of_few_or_flat_points_is_reported),
		cmocka_unit_test(line_with_negative_offset_passes_zero),
		cmocka_unit_test(time_invalid_is_refused),
		cmocka_unit_test(latest_times_count),
		cmocka_unit_test(faster_half_counts_and_the_rest_is_its_error),
		cmocka_unit_test(live_figure_follows),
		cmocka_unit_test(odd_values_give_numbers),
		cmocka_unit_test(live_error_accounts_for_few_values),
		cmocka_unit_test(drift_is_reported_once_after_a_run),
		cmocka_unit_test(load_is_part_of_the_error),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
