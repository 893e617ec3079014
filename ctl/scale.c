/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command scale: how many workers are wanted, once or again and again, to a terminal,
 * to a program, to a file of metrics.
 *
 * A daemon that does not answer is asked again at the next look, and what was wanted
 * stays so: whoever starts workers by these numbers must not stop any because a daemon
 * was restarted. The file is replaced whole, so a collector never reads half of one.
 */
#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/sides.h"
#include "ctl/hook.h"
#include "ctl/table.h"
#include "ctl/words.h"
#include "daemon/base/clock.h"
#include "daemon/base/mem.h"

#define INTERVAL_MIN_MS 1000
#define HOOK_LIMIT_MS 60000
#define ENVIRONMENT 8u

static const char *const scale_sides[KVD_PICK_SIDES] = {"prefill", "decode"};

struct scale {
	struct ctl *ctl;
	struct sides sides;
	struct kvd_scale_options options;
	struct kvd_scale_state state;
	struct kvd_scale_sample sample;
	struct kvd_scale_wanted wanted;
	unsigned int before[KVD_PICK_SIDES];
	struct hook hook;
	char environment[ENVIRONMENT][PATH_MAX];
	unsigned long steps, lost;
};

/* ---- the command line ---- */

/* MIN:MAX */
static int scale_take_range(const char *name, const char *text, unsigned int *min_p,
			    unsigned int *max_p)
{
	char *end = NULL;
	unsigned long min, max;

	if (!text)
		return CTL_OK;
	min = *text >= '0' && *text <= '9' ? strtoul(text, &end, 10) : 0;
	if (min && *end == ':' && end[1] >= '0' && end[1] <= '9') {
		max = strtoul(end + 1, &end, 10);
		if (!*end && max >= min && max <= KVD_PICK_WORKERS_MAX) {
			*min_p = (unsigned int)min;
			*max_p = (unsigned int)max;
			return CTL_OK;
		}
	}
	return ctl_usage("scale: --%s: MIN:MAX of 1 to %d, not '%s'", name,
			 KVD_PICK_WORKERS_MAX, text);
}

static int scale_take_time(const char *name, const char *text, double *seconds_p)
{
	double ms;

	if (!text)
		return CTL_OK;
	if (!ctl_duration(text, &ms) || ms < 1 || ms > 86400e3)
		return ctl_usage("scale: --%s: a time of at most 24h like 60s, not '%s'",
				 name, text);
	*seconds_p = ms / 1000;
	return CTL_OK;
}

static int scale_take_options(struct scale *s, const struct ctl *ctl)
{
	struct kvd_scale_options *o = &s->options;
	const struct {
		const char *name, *text;
		double *seconds_p;
	} times[] = {
		{"within", ctl->scale.within, &o->wait_s},
		{"start", ctl->scale.start, &o->start_s},
		{"up", ctl->scale.up, &o->up_s},
		{"down", ctl->scale.down, &o->down_s},
	};
	double limit_s = HOOK_LIMIT_MS / 1e3;
	int r = scale_take_range("prefill", ctl->scale.prefill, &o->min[0], &o->max[0]);

	if (!r)
		r = scale_take_range("decode", ctl->scale.decode, &o->min[1], &o->max[1]);
	for (size_t i = 0; i < ARRAY_LEN(times) && !r; i++)
		r = scale_take_time(times[i].name, times[i].text, times[i].seconds_p);
	if (!r)
		r = scale_take_time("hook-limit", ctl->scale.hook_limit, &limit_s);
	o->prefill_busy = (double)ctl->scale.busy / 100;
	o->decode_full = (double)ctl->scale.full / 100;
	s->hook.program = ctl->scale.hook;
	s->hook.limit_ns = (uint64_t)(limit_s * 1e9);
	if (!r && s->hook.program && access(s->hook.program, X_OK) != 0)
		r = ctl_usage("scale: --hook: %s: %s", s->hook.program, strerror(errno));
	return r;
}

/* ---- what is told ---- */

static void scale_print_json(const struct scale *s)
{
	cJSON *reply = cJSON_CreateObject();

	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		const struct kvd_scale_side *seen = &s->sample.side[side];
		cJSON *json = cJSON_AddObjectToObject(reply, scale_sides[side]);

		cJSON_AddStringToObject(json, "group", s->sides.name[side]);
		cJSON_AddNumberToObject(json, "wanted", s->wanted.workers[side]);
		cJSON_AddNumberToObject(json, "workers", seen->workers);
		cJSON_AddBoolToObject(json, "known", s->wanted.known[side]);
		cJSON_AddNumberToObject(json, "need", s->wanted.need[side]);
		cJSON_AddNumberToObject(json, "speed", seen->speed);
		cJSON_AddNumberToObject(json, "served", seen->served);
		cJSON_AddNumberToObject(json, "waiting", seen->waiting);
	}
	cJSON_AddBoolToObject(reply, "changed", s->wanted.changed);
	words_print_json(reply, true, stdout);
	cJSON_Delete(reply);
}

static void scale_print_text(const struct scale *s)
{
	static const char *const of_one[] = {"tokens/s", "KV tokens"};
	struct table *table;

	if (table_new("GROUP >WANTED >WORKERS >NEED >OF_ONE >IN_USE >WAITING UNIT",
		      &table))
		return;
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		const struct kvd_scale_side *seen = &s->sample.side[side];

		table_cell(table, s->sides.name[side]);
		table_cellf(table, "%u", s->wanted.workers[side]);
		table_cellf(table, "%u", seen->workers);
		if (s->wanted.known[side]) {
			table_cellf(table, "%.2f", s->wanted.need[side]);
			table_cellf(table, "%.0f", seen->speed);
		} else {
			table_cell(table, NULL);
			table_cell(table, NULL);
		}
		table_cellf(table, "%.0f", seen->served);
		table_cellf(table, "%.0f", seen->waiting);
		table_cell(table, of_one[side]);
	}
	ctl_print_table(table);
}

/* ---- metrics ---- */

static void metric_label(FILE *out, const char *group)
{
	fputs("{group=\"", out);
	for (; *group; group++) {
		if (*group == '\\' || *group == '"')
			fputc('\\', out);
		if (*group == '\n')
			fputs("\\n", out);
		else
			fputc(*group, out);
	}
	fputs("\"}", out);
}

static void metric_family(FILE *out, const struct scale *s, const char *name,
			  const char *help,
			  double (*value)(const struct scale *, unsigned int))
{
	fprintf(out, "# HELP %s %s\n# TYPE %s gauge\n", name, help, name);
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		fputs(name, out);
		metric_label(out, s->sides.name[side]);
		fprintf(out, " %.9g\n", value(s, side));
	}
}

static double metric_wanted(const struct scale *s, unsigned int side)
{
	return s->wanted.workers[side];
}

static double metric_workers(const struct scale *s, unsigned int side)
{
	return s->sample.side[side].workers;
}

static double metric_need(const struct scale *s, unsigned int side)
{
	return s->wanted.need[side];
}

static double metric_known(const struct scale *s, unsigned int side)
{
	return s->wanted.known[side];
}

static void scale_put_metrics(const struct scale *s, FILE *out)
{
	metric_family(out, s, "kvd_scale_wanted", "Workers that the load asks for.",
		      metric_wanted);
	metric_family(out, s, "kvd_scale_workers", "Workers that serve.", metric_workers);
	metric_family(out, s, "kvd_scale_need",
		      "The same as wanted, not rounded, not held.", metric_need);
	metric_family(out, s, "kvd_scale_known",
		      "0: loads say too little, and wanted is what it was.",
		      metric_known);
	fprintf(out,
		"# HELP kvd_scale_hook_failures_total Runs of the hook that failed.\n"
		"# TYPE kvd_scale_hook_failures_total counter\n"
		"kvd_scale_hook_failures_total %lu\n"
		"# HELP kvd_scale_lost_total Looks at which the daemon did not answer.\n"
		"# TYPE kvd_scale_lost_total counter\nkvd_scale_lost_total %lu\n",
		s->hook.failures, s->lost);
}

static int scale_write_metrics(const struct scale *s, const char *path)
{
	char *aside = mem_printf("%s.%d.tmp", path, (int)getpid());
	FILE *out = aside ? fopen(aside, "we") : NULL;
	int r = CTL_OK;

	if (out)
		scale_put_metrics(s, out);
	if (!out || fclose(out) == EOF || rename(aside, path) != 0) {
		r = ctl_failed("%s: %s", path, strerror(errno));
		if (out)
			unlink(aside);
	}
	mem_free(aside);
	return r;
}

/* ---- steps ---- */

static char *const *scale_environment(struct scale *s)
{
	static char *list[ENVIRONMENT + 1];
	unsigned int n = 0;

	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++) {
		const char *name = side ? "DECODE" : "PREFILL";

		snprintf(s->environment[n++], PATH_MAX, "KVD_SCALE_%s=%u", name,
			 s->wanted.workers[side]);
		snprintf(s->environment[n++], PATH_MAX, "KVD_SCALE_%s_BEFORE=%u", name,
			 s->before[side]);
		snprintf(s->environment[n++], PATH_MAX, "KVD_SCALE_%s_WORKERS=%u", name,
			 s->sample.side[side].workers);
		snprintf(s->environment[n++], PATH_MAX, "KVD_SCALE_%s_GROUP=%s", name,
			 s->sides.name[side]);
	}
	for (unsigned int i = 0; i < n; i++)
		list[i] = s->environment[i];
	return list;
}

static int scale_step(struct scale *s, bool again)
{
	struct ctl *ctl = s->ctl;
	int r = sides_look(&s->sides, again);

	if (r == SIDES_END)
		return r;
	if (r && (!again || s->sides.from))
		return r;
	if (r) {
		fprintf(stderr, "kvd-ctl: %s: %s\n", kvd_code_name(ctl->error.code),
			ctl->error.message);
		ctl_disconnect(ctl);
		s->lost++;
	}
	kvd_scale_measure(s->sides.picker, s->sides.now_ns, &s->sample);
	for (unsigned int side = 0; r && side < KVD_PICK_SIDES; side++)
		s->sample.side[side].speed = 0; /* nothing is known */
	r = kvd_scale_step(&s->state, &s->options, &s->sample, s->sides.now_ns,
			   &s->wanted);
	if (r)
		return ctl_usage("scale: an option is beyond its limits");
	if (s->wanted.changed)
		s->hook.wanted = true;
	if (ctl->json)
		scale_print_json(s);
	else if (s->wanted.changed)
		scale_print_text(s);
	fflush(stdout);
	hook_turn(&s->hook, scale_environment(s));
	for (unsigned int side = 0; side < KVD_PICK_SIDES; side++)
		s->before[side] = s->wanted.workers[side];
	s->steps++;
	return ctl->scale.metrics ? scale_write_metrics(s, ctl->scale.metrics) : CTL_OK;
}

/* Until the next look; a hook that runs is seen to. */
static void scale_wait(struct scale *s, double interval_ms)
{
	uint64_t until = clock_ns() + (uint64_t)(interval_ms * 1e6), now;

	while ((now = clock_ns()) < until) {
		double left = (double)(until - now) / 1e6 + 1;

		poll(NULL, 0, (int)(s->hook.pid && left > 100 ? 100 : left));
		hook_watch(&s->hook);
	}
}

static int scale_run(struct scale *s, struct ctl *ctl, double interval_ms)
{
	bool again = ctl->interval != NULL;
	int r;

	r = sides_open(&s->sides, ctl, "scale");
	while (!r) {
		r = scale_step(s, again);
		if (r || (ctl->count && s->steps == ctl->count) ||
		    (!again && !s->sides.from))
			break;
		if (!s->sides.from)
			scale_wait(s, interval_ms);
	}
	if (r == SIDES_END)
		r = s->steps ? CTL_OK : ctl_failed("%s: no line", ctl->from);
	/* what changed while it ran, or failed: once more */
	hook_end(&s->hook);
	hook_turn(&s->hook, scale_environment(s));
	hook_end(&s->hook);
	sides_close(&s->sides);
	return r;
}

int ctl_run_scale(struct ctl *ctl)
{
	double interval_ms = 0;
	struct scale *s;
	int r;

	if (ctl->interval && (!ctl_duration(ctl->interval, &interval_ms) ||
			      interval_ms < INTERVAL_MIN_MS || interval_ms > 3600e3))
		return ctl_usage("scale: --interval: a time of 1s to 1h, not '%s'",
				 ctl->interval);
	s = mem_zalloc(sizeof(*s));
	if (!s)
		return ctl_failed("out of memory");
	s->ctl = ctl;
	r = scale_take_options(s, ctl);
	if (!r)
		r = scale_run(s, ctl, interval_ms);
	mem_free(s);
	return r;
}
