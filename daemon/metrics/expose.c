/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The metrics as text: for Prometheus, and as JSON for `stats`. Both walk the table of
 * families, and in each the values of its labels. Series of labels with few values are
 * always present, even at zero, because a rate needs a value before the increase. Series
 * of peers, transports and commands are present for existing ones.
 */
#include <stdio.h>
#include <string.h>

#include "daemon/base/text.h"
#include "daemon/metrics/figures.h"

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

static void put_member(struct text *out, const char *member, enum metric_unit unit,
		       uint64_t value)
{
	text_puts(out, member);
	expose_put_number(out, unit, value);
}

static void put_us(struct text *out, const char *member, uint64_t ns)
{
	char number[32];

	snprintf(number, sizeof(number), "%.3f", (double)ns / 1000);
	text_puts(out, member);
	text_puts(out, number);
}

static void put_turns(struct text *out, const char *member, const struct histogram *h)
{
	text_puts(out, member);
	put_member(out, "{\"count\":", METRIC_NUMBER, h->count);
	put_us(out, ",\"p50\":", histogram_quantile(h, 500, METRIC_FIRST_LOOP_BUSY));
	put_us(out, ",\"p99\":", histogram_quantile(h, 990, METRIC_FIRST_LOOP_BUSY));
	put_us(out, ",\"p999\":", histogram_quantile(h, 999, METRIC_FIRST_LOOP_BUSY));
	put_us(out, ",\"max\":", h->max);
	for (unsigned int i = 0; i < HISTOGRAM_BUCKETS; i++)
		put_member(out, i ? "," : ",\"buckets\":[", METRIC_NUMBER, h->buckets[i]);
	text_puts(out, "]}");
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

static void json_histogram(struct text *out, const struct metric_row *row,
			   const struct histogram *h)
{
	put_member(out, ",\"sum\":", row->unit, h->sum);
	put_member(out, ",\"p50\":", row->unit, histogram_quantile(h, 500, row->first));
	put_member(out, ",\"p99\":", row->unit, histogram_quantile(h, 990, row->first));
	put_member(out, ",\"max\":", row->unit, h->max);
}

struct listing {
	struct text *out;
	const char *sep;
};

static void json_series(const struct figures *f, const struct series *s, void *arg)
{
	struct listing *l = arg;
	uint64_t value = series_value(f, s);

	if (!value)
		return;
	text_puts(l->out, l->sep);
	text_puts(l->out, "{");
	for (unsigned int i = 0; i < 2; i++) {
		const struct metric_label_row *label = &metric_labels[s->row->label[i]];

		for (unsigned int which = 0; which < 2 && label->name[which]; which++) {
			text_json(l->out, label->name[which]);
			text_puts(l->out, ":");
			text_json(l->out,
				  figures_label(f, s->row->label[i], which, s->at[i]));
			text_puts(l->out, ",");
		}
	}
	put_member(l->out, "\"value\":",
		   s->row->type == METRIC_HISTOGRAM ? METRIC_NUMBER : s->row->unit,
		   value);
	if (s->row->type == METRIC_HISTOGRAM)
		json_histogram(l->out, s->row, &f->metrics.histogram[series_cell(s)]);
	text_puts(l->out, "}");
	l->sep = ",";
}

struct families {
	const struct figures *f;
	struct text *out;
	const char *sep;
};

static void json_family(void *arg, const struct figures_family *family)
{
	struct families *all = arg;
	const struct figures *f = all->f;
	const struct metric_row *row = family->row;
	struct text *out = all->out;
	struct listing listing = {out, ",\"series\":["};
	uint64_t sum = 0;

	text_puts(out, all->sep);
	all->sep = ",";
	text_puts(out, "{\"name\":\"");
	text_puts(out, row->name);
	text_puts(out, "\",\"type\":\"");
	text_puts(out, type_names[row->type]);
	if (unit_names[row->unit]) {
		text_puts(out, "\",\"unit\":\"");
		text_puts(out, unit_names[row->unit]);
	}
	each_series(f, family, add_series, &sum);
	put_member(out, "\",\"value\":",
		   row->type == METRIC_HISTOGRAM ? METRIC_NUMBER : row->unit, sum);
	if (row->count[0] * row->count[1] > 1 || row->type == METRIC_HISTOGRAM)
		each_series(f, family, json_series, &listing);
	text_puts(out,
		  *listing.sep == ',' && !listing.sep[1] ? "],\"help\":" : ",\"help\":");
	text_json(out, row->help);
	text_puts(out, "}");
}

void figures_json(const struct figures *f, struct text *out)
{
	const struct histogram *h = f->metrics.histogram;
	struct families all = {f, out, ""};

	put_turns(out, ",\"loop\":{\"busy_us\":", &h[METRIC_LOOP_BUSY]);
	put_turns(out, ",\"cpu_us\":", &h[METRIC_LOOP_CPU]);
	put_turns(out, ",\"late_us\":", &h[METRIC_LOOP_LATE]);
	text_puts(out, "},\"metrics\":[");
	figures_families(f, json_family, &all);
	text_puts(out, "]");
}
