/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The metrics as text: for Prometheus, and as JSON for `stats`. Both walk the table of
 * families, and in each the values of its labels. Series of labels with few values are
 * always present, even at zero, because a rate needs a value before the increase. Series
 * of peers, transports and commands are present for existing ones.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/metrics/figures.h"
#include "proto/out.h"

#define NS_PER_S UINT64_C(1000000000)
#define NUMBER_MAX 40u

static const char *const type_names[] = {"counter", "gauge", "histogram"};
static const char *const unit_names[] = {NULL, "bytes", "seconds"};

/* One series: a family and a value of each of its labels. */
struct series {
	const struct metric_row *row;
	const uint64_t *cells;
	unsigned int at[2];
};

static unsigned int series_cell(const struct series *s)
{
	return s->row->cell + s->at[0] * s->row->count[1] + s->at[1];
}

/* Seconds have as many digits as necessary. */
static size_t number_print(char digits[NUMBER_MAX], enum metric_unit unit, uint64_t value)
{
	size_t len;

	if (unit != METRIC_SECONDS || value % NS_PER_S == 0)
		return (size_t)snprintf(
			digits, NUMBER_MAX, "%ju",
			(uintmax_t)(unit == METRIC_SECONDS ? value / NS_PER_S : value));
	len = (size_t)snprintf(digits, NUMBER_MAX, "%ju.%09u",
			       (uintmax_t)(value / NS_PER_S),
			       (unsigned int)(value % NS_PER_S));
	while (digits[len - 1] == '0')
		len--;
	digits[len] = '\0';
	return len;
}

static void expose_put_number(struct text *out, enum metric_unit unit, uint64_t value)
{
	char digits[NUMBER_MAX];

	text_put(out, digits, number_print(digits, unit, value));
}

/* Calls `each` for every existing series of the family. */
static void each_series(const struct figures *f, const struct figures_family *family,
			void (*each)(const struct figures *f, const struct series *s,
				     void *arg),
			void *arg)
{
	const struct metric_row *row = family->row;
	struct series s = {.row = row, .cells = family->cells};

	for (s.at[0] = 0; s.at[0] < row->count[0]; s.at[0]++) {
		if (!figures_label(f, row->label[0], 0, s.at[0]))
			continue;
		for (s.at[1] = 0; s.at[1] < row->count[1]; s.at[1]++) {
			if (!figures_label(f, row->label[1], 0, s.at[1]))
				continue;
			if (row->type == METRIC_HISTOGRAM ||
			    s.cells[series_cell(&s)] != METRIC_ABSENT)
				each(f, &s, arg);
		}
	}
}

/* ---- Prometheus ---- */

struct exposition {
	const struct figures *f;
	struct text *out;
};

static void put_name(struct text *out, const struct metric_row *row)
{
	if (strncmp(row->name, "process_", 8) != 0)
		text_puts(out, "kvd_");
	text_puts(out, row->name);
}

/* Label values and help: a backslash before \ " and a newline. */
static void put_escaped(struct text *out, const char *s)
{
	for (size_t plain; *s; s += plain) {
		plain = strcspn(s, "\\\"\n");
		text_put(out, s, plain);
		s += plain;
		plain = *s ? 1 : 0;
		if (*s)
			text_puts(out, *s == '\\' ? "\\\\" : *s == '"' ? "\\\"" : "\\n");
	}
}

static void put_label(struct text *out, const char **sep, const char *name,
		      const char *value)
{
	text_puts(out, *sep);
	text_puts(out, name);
	text_puts(out, "=\"");
	put_escaped(out, value);
	text_puts(out, "\"");
	*sep = ",";
}

static void put_labels(struct text *out, const struct figures *f, const struct series *s,
		       const char *le)
{
	const char *sep = "{";

	for (unsigned int i = 0; i < 2; i++) {
		const struct metric_label_row *label = &metric_labels[s->row->label[i]];

		for (unsigned int which = 0; which < 2 && label->name[which]; which++)
			put_label(out, &sep, label->name[which],
				  figures_label(f, s->row->label[i], which, s->at[i]));
	}
	if (le)
		put_label(out, &sep, "le", le);
	text_puts(out, *sep == '{' ? " " : "} ");
}

static const char *bucket_end(const struct metric_row *row, unsigned int bucket,
			      char digits[NUMBER_MAX])
{
	uint64_t end = histogram_end(bucket, row->first);
	size_t len;

	if (end == UINT64_MAX)
		return "+Inf";
	len = number_print(digits, row->unit, end);
	if (!strchr(digits, '.'))
		snprintf(digits + len, NUMBER_MAX - len, ".0");
	return digits;
}

static void expose_histogram(const struct figures *f, const struct series *s,
			     struct text *out)
{
	const struct histogram *h = &f->metrics.histogram[series_cell(s)];
	uint64_t seen = 0;
	char digits[NUMBER_MAX];

	for (unsigned int i = 0; i < HISTOGRAM_BUCKETS; i++) {
		seen += h->buckets[i];
		put_name(out, s->row);
		text_puts(out, "_bucket");
		put_labels(out, f, s, bucket_end(s->row, i, digits));
		text_u64(out, seen);
		text_puts(out, "\n");
	}
	put_name(out, s->row);
	text_puts(out, "_sum");
	put_labels(out, f, s, NULL);
	expose_put_number(out, s->row->unit, h->sum);
	text_puts(out, "\n");
	put_name(out, s->row);
	text_puts(out, "_count");
	put_labels(out, f, s, NULL);
	text_u64(out, seen);
	text_puts(out, "\n");
}

static void expose_series(const struct figures *f, const struct series *s, void *arg)
{
	struct exposition *e = arg;

	if (s->row->type == METRIC_HISTOGRAM) {
		expose_histogram(f, s, e->out);
		return;
	}
	put_name(e->out, s->row);
	put_labels(e->out, f, s, NULL);
	expose_put_number(e->out, s->row->unit, s->cells[series_cell(s)]);
	text_puts(e->out, "\n");
}

static void expose_put_head(struct exposition *e, const char *what,
			    const struct metric_row *row, const char *words)
{
	text_puts(e->out, what);
	put_name(e->out, row);
	text_puts(e->out, " ");
	put_escaped(e->out, words);
	text_puts(e->out, "\n");
}

static void expose_family(void *arg, const struct figures_family *family)
{
	const struct metric_row *row = family->row;
	struct exposition *e = arg;

	expose_put_head(e, "# HELP ", row, row->help);
	expose_put_head(e, "# TYPE ", row, type_names[row->type]);
	each_series(e->f, family, expose_series, e);
}

void figures_expose(const struct figures *f, struct text *out)
{
	struct exposition e = {f, out};

	figures_families(f, expose_family, &e);
}

/* ---- JSON ---- */

static void out_value(struct text *out, const char *name, enum metric_unit unit,
		      uint64_t value)
{
	if (unit == METRIC_SECONDS)
		out_double(out, name, (double)value / (double)NS_PER_S);
	else
		out_number(out, name, value);
}

static void out_buckets(struct text *out, const struct histogram *h)
{
	out_array(out, "buckets");
	for (unsigned int i = 0; i < HISTOGRAM_BUCKETS; i++)
		out_number(out, NULL, h->buckets[i]);
	out_close(out, ']');
}

static void out_turns(struct text *out, const char *name, const struct histogram *h)
{
	const uint64_t first = METRIC_FIRST_LOOP_BUSY;

	out_object(out, name);
	out_number(out, "count", h->count);
	out_double(out, "p50", (double)histogram_quantile(h, 500, first) / 1e3);
	out_double(out, "p99", (double)histogram_quantile(h, 990, first) / 1e3);
	out_double(out, "p999", (double)histogram_quantile(h, 999, first) / 1e3);
	out_double(out, "max", (double)h->max / 1e3);
	out_buckets(out, h);
	out_close(out, '}');
}

static uint64_t series_value(const struct figures *f, const struct series *s)
{
	return s->row->type == METRIC_HISTOGRAM
		       ? f->metrics.histogram[series_cell(s)].count
		       : s->cells[series_cell(s)];
}

static void add_series(const struct figures *f, const struct series *s, void *arg)
{
	*(uint64_t *)arg += series_value(f, s);
}

/* Of a histogram the value is a count. */
static enum metric_unit value_unit(const struct metric_row *row)
{
	return row->type == METRIC_HISTOGRAM ? METRIC_NUMBER : row->unit;
}

static void json_series(const struct figures *f, const struct series *s, void *arg)
{
	const struct metric_row *row = s->row;
	const struct histogram *h = &f->metrics.histogram[series_cell(s)];
	uint64_t value = series_value(f, s);
	struct text *out = arg;

	if (!value)
		return;
	out_object(out, NULL);
	for (unsigned int i = 0; i < 2; i++) {
		const struct metric_label_row *label = &metric_labels[row->label[i]];

		for (unsigned int which = 0; which < 2 && label->name[which]; which++)
			out_text(out, label->name[which],
				 figures_label(f, row->label[i], which, s->at[i]));
	}
	out_value(out, "value", value_unit(row), value);
	if (row->type == METRIC_HISTOGRAM) {
		out_value(out, "sum", row->unit, h->sum);
		out_value(out, "p50", row->unit, histogram_quantile(h, 500, row->first));
		out_value(out, "p99", row->unit, histogram_quantile(h, 990, row->first));
		out_value(out, "max", row->unit, h->max);
		out_value(out, "first", row->unit, row->first);
		out_buckets(out, h);
	}
	out_close(out, '}');
}

static void json_family(void *arg, const struct figures_family *family)
{
	const struct exposition *e = arg;
	const struct metric_row *row = family->row;
	struct text *out = e->out;
	uint64_t sum = 0;

	out_object(out, NULL);
	out_text(out, "name", row->name);
	out_text(out, "type", type_names[row->type]);
	out_text(out, "unit", unit_names[row->unit]);
	each_series(e->f, family, add_series, &sum);
	out_value(out, "value", value_unit(row), sum);
	if (row->count[0] * row->count[1] > 1 || row->type == METRIC_HISTOGRAM) {
		out_array(out, "series");
		each_series(e->f, family, json_series, out);
		out_close(out, ']');
	}
	out_text(out, "help", row->help);
	out_close(out, '}');
}

void figures_json(const struct figures *f, struct text *out)
{
	const struct histogram *h = f->metrics.histogram;
	struct exposition e = {f, out};

	out_object(out, "loop");
	out_turns(out, "busy_us", &h[METRIC_LOOP_BUSY]);
	out_turns(out, "cpu_us", &h[METRIC_LOOP_CPU]);
	out_turns(out, "late_us", &h[METRIC_LOOP_LATE]);
	out_close(out, '}');
	out_array(out, "metrics");
	figures_families(f, json_family, &e);
	out_close(out, ']');
}
