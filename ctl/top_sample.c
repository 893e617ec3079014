/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One sample of a daemon: health, stats, peer.list, room.list. Metrics are read in the
 * Prometheus text format, since only that has the buckets for quantiles of the last
 * minute.
 *
 * A lost connection is reopened by ctl_connect() at the next sample. It does not connect
 * to the socket of a stopped daemon, since that would start the daemon.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/top.h"
#include "ctl/display.h"
#include "daemon/base/clock.h"
#include "daemon/base/mem.h"

/* ---- the text for Prometheus: NAME{LABELS} VALUE ---- */

struct figure {
	const char *name, *labels; /* labels: to the end of the line */
	size_t name_len;
	double value;
};

static bool is_named(const struct figure *f, const char *name)
{
	return strlen(name) == f->name_len && memcmp(f->name, name, f->name_len) == 0;
}

/* The value of a label without escapes; "" if absent. */
static const char *label_of(const struct figure *f, const char *name, char value[32])
{
	const char *at = f->labels;
	size_t len = strlen(name);

	*value = '\0';
	for (; (at = strchr(at, '"')); at = strchr(at + 1, '"') + 1) {
		size_t n = strcspn(at + 1, "\"\n");

		if (at[1 + n] != '"')
			break;
		if ((size_t)(at - f->labels) > len && at[-1] == '=' &&
		    memcmp(at - 1 - len, name, len) == 0 &&
		    strchr("{,", at[-2 - (ptrdiff_t)len])) {
			snprintf(value, 32, "%.*s", n < 31 ? (int)n : 31, at + 1);
			break;
		}
	}
	return value;
}

static bool has_label(const struct figure *f, const char *name, const char *wanted)
{
	char value[32];

	return strcmp(label_of(f, name, value), wanted) == 0;
}

static void add_bucket(const struct figure *f, struct top_buckets *b)
{
	char text[32];
	double end = strtod(label_of(f, "le", text), NULL);
	unsigned int i = 0;

	while (i < b->count && b->end[i] != end)
		i++;
	if (i == TOP_BUCKETS)
		return;
	if (i == b->count) {
		b->end[i] = end;
		b->n[i] = 0;
		b->count++;
	}
	b->n[i] += f->value;
}

static void add_state(const struct figure *f, struct top_sample *s)
{
	char name[32];
	unsigned int i = 0;

	label_of(f, "state", name);
	while (i < s->state_count && strcmp(s->states[i].name, name) != 0)
		i++;
	if (i == TOP_STATES)
		return;
	if (i == s->state_count)
		snprintf(s->states[s->state_count++].name, sizeof(s->states[0].name),
			 "%.23s", name);
	s->states[i].count += f->value;
}

static void take_figure(const struct figure *f, struct top_sample *s)
{
	if (is_named(f, "kvd_rooms"))
		add_state(f, s);
	else if (is_named(f, "kvd_rooms_ended_total"))
		*(has_label(f, "result", "success") ? &s->ok : &s->failed) += f->value;
	else if (is_named(f, "kvd_transferred_bytes_total"))
		*(has_label(f, "direction", "in") ? &s->in : &s->out) += f->value;
	else if (is_named(f, "kvd_room_phase_seconds_bucket") &&
		 has_label(f, "phase", "total"))
		add_bucket(f, &s->phase);
	else if (is_named(f, "kvd_loop_late_seconds_bucket"))
		add_bucket(f, &s->late);
	else if (is_named(f, "process_cpu_seconds_total"))
		s->cpu_s = f->value;
	else if (is_named(f, "process_resident_memory_bytes"))
		s->rss = f->value;
}

static void take_text(char *text, struct top_sample *s)
{
	char *line, *rest = text;

	while ((line = strsep(&rest, "\n"))) {
		const char *value = strrchr(line, ' ');
		struct figure f = {.name = line, .name_len = strcspn(line, "{ ")};

		if (*line == '#' || !value)
			continue;
		f.labels = line + f.name_len;
		f.value = strtod(value, NULL);
		take_figure(&f, s);
	}
}

/* ---- one sample ---- */

static void sample_drop_answers(struct top_sample *s)
{
	cJSON_Delete(s->health);
	cJSON_Delete(s->peers);
	cJSON_Delete(s->rooms);
	s->health = s->peers = s->rooms = NULL;
}

static void sample_fini(struct top_sample *s)
{
	sample_drop_answers(s);
	mem_free(s->peers_failed);
	*s = (struct top_sample){0};
}

static int take_stats(struct ctl *ctl, struct top_sample *s)
{
	cJSON *args = cJSON_CreateObject(), *reply;
	cJSON *text;
	bool raw = ctl->raw;
	int r;

	cJSON_AddStringToObject(args, "format", "prometheus");
	ctl->raw = true; /* keep its newlines */
	r = ctl_query(ctl, "stats", args, &reply);
	ctl->raw = raw;
	text = cJSON_GetObjectItemCaseSensitive(reply, "text");
	if (!r && cJSON_IsString(text))
		take_text(text->valuestring, s);
	cJSON_Delete(reply);
	return r;
}

static int take_peers(struct ctl *ctl, struct top_sample *s)
{
	const cJSON *peer, *list;
	int r = ctl_query(ctl, "peer.list", NULL, &s->peers);

	if (r)
		return r;
	list = ctl_list(s->peers, "peers");
	s->peers_failed =
		mem_calloc((size_t)cJSON_GetArraySize(list), sizeof(*s->peers_failed));
	if (!s->peers_failed)
		return CTL_OK; /* FAIL/min stays empty */
	cJSON_ArrayForEach(peer, list) {
		struct top_failed *one = &s->peers_failed[s->peers_failed_count++];
		const char *instance = ctl_str(peer, "instance", "");

		snprintf(one->peer, sizeof(one->peer), "%.95s",
			 *instance ? instance : ctl_str(peer, "endpoint", ""));
		one->rooms = ctl_num(peer, "rooms_failed");
	}
	return CTL_OK;
}

/* Missing permission for rooms is not a failure of the sample. */
static int take_rooms(struct top *top, struct top_sample *s)
{
	struct ctl *ctl = top->ctl;
	cJSON *args = cJSON_CreateObject();
	int r;

	cJSON_AddTrueToObject(args, "all");
	cJSON_AddTrueToObject(args, top->failed ? "failed" : "live");
	cJSON_AddNumberToObject(args, "limit", (double)top->limit);
	r = ctl_query(ctl, "room.list", args, &s->rooms);
	if (r != CTL_ERROR)
		return r;
	snprintf(s->rooms_why, sizeof(s->rooms_why), "%s: %.150s",
		 kvd_code_name(ctl->error.code), ctl->error.message);
	return CTL_OK;
}

static int sample_take(struct top *top, struct top_sample *s)
{
	struct ctl *ctl = top->ctl;
	int r = ctl_query(ctl, "health", NULL, &s->health);

	if (!r)
		r = take_stats(ctl, s);
	if (!r)
		r = take_peers(ctl, s);
	if (!r)
		r = take_rooms(top, s);
	s->at_s = clock_s();
	return r;
}

/* Resets the samples if the daemon was restarted: its counters start at zero. */
static void look_who(struct top *top)
{
	const struct kvd_daemon_info *info = kvd_daemon(top->ctl->client);

	if (strcmp(top->instance, info->instance) == 0)
		return;
	for (unsigned int i = 0; i < TOP_KEPT; i++)
		sample_fini(&top->samples[i]);
	top->count = top->next = 0;
	snprintf(top->instance, sizeof(top->instance), "%s", info->instance);
	snprintf(top->name, sizeof(top->name), "%s", info->name);
	snprintf(top->daemon, sizeof(top->daemon), "%s", info->daemon);
	display_sanitize(top->name);
	display_sanitize(top->daemon);
}

static int look_failed(struct top *top, int r)
{
	const struct kvd_error *error = &top->ctl->error;

	snprintf(top->why, sizeof(top->why), "%s: %s", kvd_code_name(error->code),
		 error->message);
	if (r == CTL_NO_DAEMON)
		ctl_disconnect(top->ctl);
	return r;
}

int top_look(struct top *top)
{
	struct top_sample s = {0};
	int r;

	if (!ctl_connect(top->ctl))
		return look_failed(top, CTL_NO_DAEMON);
	r = sample_take(top, &s);
	if (r) {
		sample_fini(&s);
		return look_failed(top, r);
	}
	*top->why = '\0';
	look_who(top);
	if (top->count > 1) /* rates need only the last two */
		sample_drop_answers(&top->samples[(top->next + TOP_KEPT - 2) % TOP_KEPT]);
	sample_fini(&top->samples[top->next]);
	top->samples[top->next] = s;
	top->next = (top->next + 1) % TOP_KEPT;
	top->count += top->count < TOP_KEPT;
	return CTL_OK;
}

void top_fini(struct top *top)
{
	for (unsigned int i = 0; i < TOP_KEPT; i++)
		sample_fini(&top->samples[i]);
}

/* ---- several samples ---- */

/* The n-th before the last. */
static const struct top_sample *top_ago(const struct top *top, unsigned int n)
{
	return n < top->count ? &top->samples[(top->next + TOP_KEPT - 1 - n) % TOP_KEPT]
			      : NULL;
}

const struct top_sample *top_now(const struct top *top)
{
	return top_ago(top, 0);
}

const struct top_sample *top_before(const struct top *top)
{
	return top_ago(top, 1);
}

const struct top_sample *top_oldest(const struct top *top)
{
	const struct top_sample *now = top_now(top), *one, *oldest = NULL;

	for (unsigned int i = 1; (one = top_ago(top, i)); i++) {
		if (now->at_s - one->at_s > TOP_WINDOW_S)
			break;
		oldest = one;
	}
	return oldest;
}

double top_quantile(double q, const struct top_buckets *a, const struct top_buckets *b)
{
	unsigned int last = b->count - 1;
	double all;

	if (!b->count || (a->count && a->count != b->count))
		return NAN;
	all = b->n[last] - (a->count ? a->n[last] : 0);
	for (unsigned int i = 0; all > 0 && i <= last; i++)
		if (b->n[i] - (a->count ? a->n[i] : 0) >= q * all)
			return b->end[i];
	return NAN;
}
