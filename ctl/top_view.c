/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The view of several samples of a daemon: a model, from which both tables and JSON are
 * rendered. Values that the samples do not determine yet are NAN and print as "-".
 */
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/table.h"
#include "ctl/top.h"
#include "ctl/display.h"
#include "daemon/base/err.h"
#include "daemon/base/idmap.h"
#include "daemon/base/mem.h"

#define WAITS_COLUMN 4u /* the column of rooms that may be truncated */

/* ---- the model ---- */

static double top_rate(const struct top_sample *a, const struct top_sample *b, double was,
		       double is)
{
	if (!a || b->at_s <= a->at_s)
		return NAN;
	return is > was ? (is - was) / (b->at_s - a->at_s) : 0;
}

static const cJSON *peer_of_sample(const struct top_sample *s, const cJSON *peer)
{
	const char *instance = ctl_str(peer, "instance", ""), *endpoint;
	const cJSON *one;

	endpoint = ctl_str(peer, "endpoint", "");
	cJSON_ArrayForEach(one, ctl_list(s ? s->peers : NULL, "peers")) {
		if (strcmp(ctl_str(one, "instance", ""), instance) == 0 &&
		    strcmp(ctl_str(one, "endpoint", ""), endpoint) == 0)
			return one;
	}
	return NULL;
}

static double failed_a_minute(const struct top_sample *a, const struct top_sample *b,
			      const cJSON *peer)
{
	const char *key = ctl_str(peer, "instance", "");
	double is = ctl_num(peer, "rooms_failed"), was = is;
	bool found = false;

	if (!*key)
		key = ctl_str(peer, "endpoint", "");
	for (size_t i = 0; a && i < a->peers_failed_count; i++) {
		if (strncmp(a->peers_failed[i].peer, key, 95) != 0)
			continue;
		was = a->peers_failed[i].rooms;
		found = true;
	}
	return found ? 60 * top_rate(a, b, was, is)
	       : a   ? 60 * top_rate(a, b, 0, is)
		     : NAN;
}

static bool room_has_peer(const cJSON *room, const cJSON *peer)
{
	const char *instance = ctl_str(peer, "instance", "");
	const cJSON *one;

	cJSON_ArrayForEach(one, ctl_list(room, "peers")) {
		if (strcmp(ctl_str(one, "instance", ""), instance) == 0 &&
		    strcmp(ctl_str(one, "endpoint", ""), ctl_str(peer, "endpoint", "")) ==
			    0)
			return true;
	}
	return false;
}

static void view_peer(const struct top *top, const cJSON *peer, struct top_peer *p)
{
	const struct top_sample *now = top_now(top), *before = top_before(top);
	const cJSON *was = peer_of_sample(before, peer), *room;

	*p = (struct top_peer){.json = peer, .state = ctl_str(peer, "state", "?")};
	snprintf(p->name, sizeof(p->name), "%.79s", ctl_peer_name(peer));
	p->in = was ? top_rate(before, now, ctl_num(was, "bytes_in"),
			       ctl_num(peer, "bytes_in"))
		    : NAN;
	p->out = was ? top_rate(before, now, ctl_num(was, "bytes_out"),
				ctl_num(peer, "bytes_out"))
		     : NAN;
	p->inflight = ctl_num(peer, "inflight_bytes");
	p->failed = failed_a_minute(top_oldest(top), now, peer);
	if (!now->rooms) {
		p->rooms = NAN;
		return;
	}
	cJSON_ArrayForEach(room, ctl_list(now->rooms, "rooms"))
		p->rooms += room_has_peer(room, peer);
}

/* Generations are unique; an unopened room has none (0). */
static uint64_t generation_of(const cJSON *room)
{
	return strtoull(ctl_str(room, "generation", "0"), NULL, 10);
}

/* Out of memory: that room has no rate. */
static void rooms_index(const struct top_sample *s, struct idmap *map)
{
	cJSON *room;

	cJSON_ArrayForEach(room, ctl_list(s ? s->rooms : NULL, "rooms")) {
		if (generation_of(room) && idmap_put(map, generation_of(room), room) < 0)
			err_clear();
	}
}

static void view_room(const struct top *top, const struct idmap *were, const cJSON *room,
		      struct top_room *r)
{
	const cJSON *was = idmap_get(were, generation_of(room));

	*r = (struct top_room){.json = room, .rate = NAN};
	r->age_ms = ctl_list(room, "timings_ms")
			    ? ctl_num(ctl_list(room, "timings_ms"), "total")
			    : ctl_num(ctl_list(room, "waits_for"), "since_ms");
	if (was)
		r->rate = top_rate(top_before(top), top_now(top), ctl_num(was, "bytes"),
				   ctl_num(room, "bytes"));
}

static int is_older(const void *a, const void *b)
{
	double x = ((const struct top_room *)a)->age_ms;
	double y = ((const struct top_room *)b)->age_ms;

	return (x < y) - (x > y);
}

static void view_rates(const struct top *top, struct top_view *v)
{
	const struct top_sample *b = top_now(top), *a = top_before(top),
				*old = top_oldest(top);

	v->ok = a ? top_rate(a, b, a->ok, b->ok) : NAN;
	v->failed = a ? top_rate(a, b, a->failed, b->failed) : NAN;
	v->in = a ? top_rate(a, b, a->in, b->in) : NAN;
	v->out = a ? top_rate(a, b, a->out, b->out) : NAN;
	v->cpu = a ? top_rate(a, b, a->cpu_s, b->cpu_s) : NAN;
	v->p50_s = old ? top_quantile(.5, &old->phase, &b->phase) : NAN;
	v->p99_s = old ? top_quantile(.99, &old->phase, &b->phase) : NAN;
	v->late_s = old ? top_quantile(.99, &old->late, &b->late) : NAN;
}

static size_t records(const cJSON *answer, const char *member)
{
	return (size_t)cJSON_GetArraySize(ctl_list(answer, member));
}

int top_view_make(const struct top *top, struct top_view *v)
{
	static const char *const members[] = {"peers", "lost"};
	const struct top_sample *now = top_now(top);
	struct idmap were;
	const cJSON *one;

	*v = (struct top_view){0};
	v->peers = mem_calloc(records(now->peers, "peers") + records(now->peers, "lost"),
			      sizeof(*v->peers));
	v->rooms = mem_calloc(records(now->rooms, "rooms"), sizeof(*v->rooms));
	if (!v->peers || !v->rooms) {
		top_view_free(v);
		return -ENOMEM;
	}
	view_rates(top, v);
	for (unsigned int i = 0; i < ARRAY_LEN(members); i++) {
		cJSON_ArrayForEach(one, ctl_list(now->peers, members[i]))
			view_peer(top, one, &v->peers[v->peer_count++]);
	}
	idmap_init(&were);
	rooms_index(top_before(top), &were);
	cJSON_ArrayForEach(one, ctl_list(now->rooms, "rooms"))
		view_room(top, &were, one, &v->rooms[v->room_count++]);
	idmap_fini(&were);
	qsort(v->rooms, v->room_count, sizeof(*v->rooms), is_older);
	v->rooms_cut = records(now->rooms, "rooms") >= top->limit;
	return 0;
}

void top_view_free(struct top_view *v)
{
	mem_free(v->peers);
	mem_free(v->rooms);
	*v = (struct top_view){0};
}

/* ---- text ---- */

static const char *seconds(double s)
{
	return isnan(s) ? "-" : isinf(s) ? "over 4 s" : ctl_ms(s * 1000);
}

/* "12.3 MiB/s" */
static void rate_cell(struct table *table, double rate)
{
	if (isnan(rate))
		table_cell(table, NULL);
	else
		table_cellf(table, "%s/s", ctl_bytes(rate));
}

static void count_cell(struct table *table, double count)
{
	if (isnan(count))
		table_cell(table, NULL);
	else
		table_cellf(table, count < 100 ? "%.3g" : "%.0f", count);
}

/* Items that are not split, on as many lines as needed. */
struct flow {
	FILE *out;
	size_t columns, at;
};

__attribute__((format(printf, 2, 3))) static void flow_put(struct flow *flow,
							   const char *fmt, ...)
{
	char text[400];
	va_list ap;
	size_t width;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	width = display_width(text);
	if (flow->at && flow->columns && flow->at + 3 + width > flow->columns) {
		fputc('\n', flow->out);
		flow->at = 0;
	}
	fprintf(flow->out, "%s%s", flow->at ? "   " : "", text);
	flow->at += (flow->at ? 3 : 0) + width;
}

static void flow_rate(struct flow *flow, const char *name, double rate)
{
	if (isnan(rate))
		flow_put(flow, "%s -", name);
	else
		flow_put(flow, "%s %.2f GB/s", name, rate / 1e9);
}

static void flow_rooms(struct flow *flow, const struct top_sample *now)
{
	char states[200] = "";
	double all = 0;
	size_t n = 0;

	for (unsigned int i = 0; i < now->state_count; i++) {
		all += now->states[i].count;
		if (now->states[i].count > 0 && n < sizeof(states) - 48)
			n += (size_t)snprintf(states + n, sizeof(states) - n, "%s%.0f %s",
					      n ? ", " : ": ", now->states[i].count,
					      now->states[i].name);
	}
	flow_put(flow, "rooms %.0f%s", all, states);
}

static void flow_count(struct flow *flow, const char *name, double rate)
{
	if (isnan(rate))
		flow_put(flow, "%s -", name);
	else
		flow_put(flow, rate < 100 ? "%s %.3g/s" : "%s %.0f/s", name, rate);
}

char *top_head_text(const struct top *top, const struct top_view *v, unsigned int columns)
{
	const struct top_sample *now = top_now(top);
	char *text = NULL;
	size_t len;
	struct flow flow = {.out = open_memstream(&text, &len), .columns = columns};

	if (!flow.out)
		return NULL;
	flow_put(&flow, "%s", top->name);
	flow_put(&flow, "%s", top->daemon);
	flow_put(&flow, "%s", ctl_str(now->health, "state", "?"));
	flow_put(&flow, "up %s", ctl_ms(ctl_num(now->health, "uptime_ms")));
	if (*ctl_str(now->health, "why", ""))
		flow_put(&flow, "%.300s", ctl_str(now->health, "why", ""));
	flow_rooms(&flow, now);
	flow_count(&flow, "ok", v->ok);
	flow_count(&flow, "failed", v->failed);
	flow_rate(&flow, "in", v->in);
	flow_rate(&flow, "out", v->out);
	flow_put(&flow, "room p50 %s p99 %s", seconds(v->p50_s), seconds(v->p99_s));
	flow_put(&flow, "timer delay p99 %s", seconds(v->late_s));
	if (!isnan(v->cpu))
		flow_put(&flow, "cpu %.0f %%", 100 * v->cpu);
	flow_put(&flow, "rss %s", ctl_bytes(now->rss));
	fputc('\n', flow.out);
	fclose(flow.out);
	return text;
}

static void peer_cells(struct table *table, const struct top_peer *p, bool rooms_cut)
{
	bool up = strcmp(p->state, "up") == 0;

	table_cell(table, p->name);
	table_cell(table, p->state);
	table_cell(table, ctl_str(p->json, "transport", ""));
	table_cellf(table, up ? "%.0f us" : "-", ctl_num(p->json, "rtt_us"));
	rate_cell(table, p->in);
	rate_cell(table, p->out);
	table_cell(table, ctl_bytes(p->inflight));
	if (rooms_cut && p->rooms > 0)
		table_cellf(table, "%.0f+", p->rooms);
	else
		count_cell(table, p->rooms);
	count_cell(table, p->failed);
	ctl_peer_error_cell(table, p->json, up ? "" : ctl_str(p->json, "why", ""));
}

static char *table_text(struct table *table)
{
	char *text = NULL;
	size_t len;
	FILE *out = open_memstream(&text, &len);

	if (out) {
		table_print(table, out);
		fclose(out);
	}
	table_free(table);
	return text;
}

char *top_peers_text(const struct top_view *v)
{
	struct table *table =
		table_new("NAME STATE VIA >RTT >IN >OUT >INFLIGHT >ROOMS >FAIL/min "
			  "LAST_ERROR");

	for (size_t i = 0; i < v->peer_count; i++)
		peer_cells(table, &v->peers[i], v->rooms_cut);
	return table_text(table);
}

static void room_cells(struct table *table, const struct top_room *r)
{
	const cJSON *error = ctl_list(r->json, "error"),
		    *peers = ctl_list(r->json, "peers");
	int count = cJSON_GetArraySize(peers);

	ctl_cells(table, r->json, "room role state_name");
	table_cell(table, ctl_ms(r->age_ms));
	if (error)
		table_cellf(table, "%s: %s", ctl_str(error, "code", "?"),
			    ctl_str(error, "message", ""));
	else
		table_cell(table, ctl_str(ctl_list(r->json, "waits_for"), "what", ""));
	table_cellf(table, "%s/%s", ctl_bytes(ctl_num(r->json, "bytes")),
		    ctl_bytes(ctl_num(r->json, "expected_bytes")));
	if (isnan(r->rate))
		table_cell(table, NULL);
	else
		table_cellf(table, "%.2f", r->rate / 1e9);
	if (count > 1)
		table_cellf(table, "%s and %d more", ctl_peer_name(peers->child),
			    count - 1);
	else
		table_cell(table, count ? ctl_peer_name(peers->child) : "");
	table_cell(table, ctl_str(r->json, "engine", ""));
}

char *top_rooms_text(const struct top_view *v, unsigned int columns)
{
	struct table *table = table_new("ROOM ROLE STATE >AGE WAITS_FOR >BYTES/EXPECTED "
					">GB/s PEER ENGINE");

	for (size_t i = 0; i < v->room_count; i++)
		room_cells(table, &v->rooms[i]);
	if (columns)
		table_fit(table, WAITS_COLUMN, columns);
	return table_text(table);
}

/* ---- JSON ---- */

/* Unknown values are null. */
static void top_put_number(cJSON *json, const char *name, double value)
{
	if (isfinite(value))
		cJSON_AddNumberToObject(json, name, value);
	else
		cJSON_AddNullToObject(json, name);
}

static cJSON *peer_json(const struct top_peer *p)
{
	const cJSON *error = ctl_list(p->json, "last_error");
	cJSON *json = cJSON_CreateObject();

	cJSON_AddStringToObject(json, "name", p->name);
	cJSON_AddStringToObject(json, "instance", ctl_str(p->json, "instance", ""));
	cJSON_AddStringToObject(json, "state", p->state);
	cJSON_AddStringToObject(json, "transport", ctl_str(p->json, "transport", ""));
	top_put_number(json, "rtt_us", ctl_num(p->json, "rtt_us"));
	top_put_number(json, "in_bytes_per_s", p->in);
	top_put_number(json, "out_bytes_per_s", p->out);
	top_put_number(json, "inflight_bytes", p->inflight);
	top_put_number(json, "rooms", p->rooms);
	top_put_number(json, "failed_per_min", p->failed);
	if (error)
		cJSON_AddItemToObject(json, "last_error", cJSON_Duplicate(error, true));
	return json;
}

static cJSON *room_json(const struct top_room *r)
{
	static const char *const kept[] = {"room",	"role",	 "state_name",
					   "waits_for", "bytes", "expected_bytes",
					   "engine",	"error"};
	const cJSON *peers = ctl_list(r->json, "peers");
	cJSON *json = cJSON_CreateObject();

	for (unsigned int i = 0; i < ARRAY_LEN(kept); i++)
		if (ctl_list(r->json, kept[i]))
			cJSON_AddItemToObject(
				json, kept[i],
				cJSON_Duplicate(ctl_list(r->json, kept[i]), true));
	top_put_number(json, "age_ms", r->age_ms);
	top_put_number(json, "bytes_per_s", r->rate);
	if (peers && peers->child)
		cJSON_AddStringToObject(json, "peer", ctl_peer_name(peers->child));
	return json;
}

cJSON *top_view_json(const struct top *top, const struct top_view *v)
{
	const struct top_sample *now = top_now(top);
	cJSON *json = cJSON_CreateObject(), *list;

	cJSON_AddStringToObject(json, "name", top->name);
	cJSON_AddStringToObject(json, "daemon", top->daemon);
	cJSON_AddStringToObject(json, "state", ctl_str(now->health, "state", "?"));
	top_put_number(json, "uptime_ms", ctl_num(now->health, "uptime_ms"));
	list = cJSON_AddObjectToObject(json, "rooms_by_state");
	for (unsigned int i = 0; i < now->state_count; i++)
		top_put_number(list, now->states[i].name, now->states[i].count);
	top_put_number(json, "ok_per_s", v->ok);
	top_put_number(json, "failed_per_s", v->failed);
	top_put_number(json, "in_bytes_per_s", v->in);
	top_put_number(json, "out_bytes_per_s", v->out);
	top_put_number(json, "room_p50_ms", 1000 * v->p50_s);
	top_put_number(json, "room_p99_ms", 1000 * v->p99_s);
	top_put_number(json, "loop_late_p99_ms", 1000 * v->late_s);
	top_put_number(json, "cpus", v->cpu);
	top_put_number(json, "resident_bytes", now->rss);
	list = cJSON_AddArrayToObject(json, "peers");
	for (size_t i = 0; i < v->peer_count; i++)
		cJSON_AddItemToArray(list, peer_json(&v->peers[i]));
	cJSON_AddBoolToObject(json, "rooms_cut", v->rooms_cut);
	list = cJSON_AddArrayToObject(json, "rooms");
	for (size_t i = 0; i < v->room_count; i++)
		cJSON_AddItemToArray(list, room_json(&v->rooms[i]));
	return json;
}
