/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One sample of a daemon: health, stats, peer.list, room.list.
 *
 * A lost connection is reopened by ctl_connect() at the next sample. It does not connect
 * to the socket of a stopped daemon, since that would start the daemon.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "ctl/top.h"
#include "ctl/display.h"
#include "daemon/base/clock.h"
#include "daemon/base/mem.h"

/* ---- metrics ---- */

static void add_buckets(const cJSON *histogram, struct top_buckets *b)
{
	const cJSON *n;
	unsigned int i = 0;

	b->first = ctl_num(histogram, "first");
	cJSON_ArrayForEach(n, ctl_list(histogram, "buckets"))
		if (i < TOP_BUCKETS)
			b->n[i++] += cJSON_GetNumberValue(n);
}

static void add_state(const cJSON *series, struct top_sample *s)
{
	const char *name = ctl_str(series, "state", "?");
	unsigned int i = 0;

	while (i < s->state_count && strcmp(s->states[i].name, name) != 0)
		i++;
	if (i == TOP_STATES)
		return;
	if (i == s->state_count)
		snprintf(s->states[s->state_count++].name, sizeof(s->states[0].name),
			 "%.23s", name);
	s->states[i].count += ctl_num(series, "value");
}

static void take_series(const char *metric, const cJSON *series, struct top_sample *s)
{
	double value = ctl_num(series, "value");

	if (strcmp(metric, "rooms") == 0)
		add_state(series, s);
	else if (strcmp(metric, "rooms_ended_total") == 0)
		*(strcmp(ctl_str(series, "result", ""), "success") ? &s->failed
								   : &s->ok) += value;
	else if (strcmp(metric, "transferred_bytes_total") == 0)
		*(strcmp(ctl_str(series, "direction", ""), "in") ? &s->out : &s->in) +=
			value;
	else if (strcmp(metric, "room_phase_seconds") == 0 &&
		 strcmp(ctl_str(series, "phase", ""), "total") == 0)
		add_buckets(series, &s->phase);
	else if (strcmp(metric, "loop_late_seconds") == 0)
		add_buckets(series, &s->late);
}

static void take_metric(const cJSON *metric, struct top_sample *s)
{
	const char *name = ctl_str(metric, "name", "");
	const cJSON *series;

	if (strcmp(name, "process_cpu_seconds_total") == 0)
		s->cpu_s = ctl_num(metric, "value");
	else if (strcmp(name, "process_resident_memory_bytes") == 0)
		s->rss = ctl_num(metric, "value");
	cJSON_ArrayForEach(series, ctl_list(metric, "series"))
		take_series(name, series, s);
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
	const cJSON *metric;
	cJSON *stats;
	int r = ctl_query(ctl, "stats", NULL, &stats);

	cJSON_ArrayForEach(metric, ctl_list(stats, "metrics"))
		take_metric(metric, s);
	cJSON_Delete(stats);
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
	cJSON_AddTrueToObject(args, "live");
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
	double all = 0, seen = 0;

	for (unsigned int i = 0; i < TOP_BUCKETS; i++)
		all += b->n[i] - a->n[i];
	for (int i = 0; all > 0 && i < (int)TOP_BUCKETS; i++) {
		seen += b->n[i] - a->n[i];
		if (seen >= q * all)
			return i + 1 < (int)TOP_BUCKETS ? ldexp(b->first, i) : INFINITY;
	}
	return NAN;
}
