/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands that show state: status, health, stats, peers, regions, sessions. The
 * commands of rooms are in rooms.c.
 *
 * A list is one request, one function that converts a record to cells, and a table as
 * wide as its widest cells. A member that is absent (in an older or newer daemon)
 * prints as "-" or 0. Amounts are rounded for people; programs use --json.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "daemon/base/mem.h"
#include "lib/kvd.h"

/* ---- values --------------------------------------------------------------------- */

const char *ctl_str(const cJSON *obj, const char *name, const char *absent)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(obj, name);

	return cJSON_IsString(item) ? item->valuestring : absent;
}

double ctl_num(const cJSON *obj, const char *name)
{
	const cJSON *item = cJSON_GetObjectItemCaseSensitive(obj, name);

	if (cJSON_IsString(item))
		return strtod(item->valuestring, NULL);
	return cJSON_IsNumber(item) ? item->valuedouble : 0;
}

const cJSON *ctl_list(const cJSON *obj, const char *name)
{
	return cJSON_GetObjectItemCaseSensitive(obj, name);
}

bool ctl_true(const cJSON *obj, const char *name)
{
	return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(obj, name));
}

int ctl_print_table(struct table *table)
{
	int r = table_print(table, stdout);

	table_free(table);
	return r < 0 ? ctl_failed("out of memory") : CTL_OK;
}

/* "name", or "name.name" of an object in it. */
static const cJSON *member_at(const cJSON *obj, const char *path, size_t len)
{
	char name[32];

	for (size_t n; obj && len; path += n + 1, len -= n + (n < len)) {
		n = strcspn(path, ". :");
		snprintf(name, sizeof(name), "%.*s", (int)n, path);
		obj = cJSON_GetObjectItemCaseSensitive(obj, name);
	}
	return obj;
}

static void value_cell(struct table *table, const cJSON *item, char kind)
{
	const char *text = cJSON_GetStringValue(item);
	double number = text ? strtod(text, NULL) : cJSON_GetNumberValue(item);

	if (cJSON_IsBool(item))
		table_cell(table, cJSON_IsTrue(item) ? "yes" : "no");
	else if (text && kind == '@')
		ctl_endpoint_cell(table, text);
	else if ((text && kind == ' ') || (!text && !cJSON_IsNumber(item)))
		table_cell(table, text);
	else if (kind == 'B')
		table_cell(table, ctl_bytes(number));
	else if (kind == 't')
		table_cell(table, ctl_ms(number));
	else
		table_cellf(table, "%.*f", kind == ' ' ? 0 : kind - '0', number);
}

void ctl_cells(struct table *table, const cJSON *obj, const char *names)
{
	for (; *names; names += strspn(names, " ")) {
		size_t len = strcspn(names, " :");

		value_cell(table, member_at(obj, names, len),
			   names[len] == ':' ? names[len + 1] : ' ');
		names += strcspn(names, " ");
	}
}

void ctl_endpoint_cell(struct table *table, const char *endpoint)
{
	table_cellf(table, "%.*s", (int)strcspn(endpoint, "#"), endpoint);
}

int ctl_print_list(const cJSON *list, const char *heads,
		   void (*row)(struct table *table, const cJSON *record))
{
	struct table *table = table_new(heads);
	const cJSON *record;

	cJSON_ArrayForEach(record, list)
		row(table, record);
	return ctl_print_table(table);
}

int ctl_show(struct ctl *ctl, const char *cmd, cJSON *args,
	     int (*print)(const cJSON *reply))
{
	cJSON *reply;
	int r = ctl_ask(ctl, cmd, args, &reply);

	if (r)
		return r;
	if (ctl->json)
		ctl_print_json(reply);
	else
		r = print(reply);
	cJSON_Delete(reply);
	return r;
}

cJSON *ctl_args_all(void)
{
	cJSON *args = cJSON_CreateObject();

	cJSON_AddTrueToObject(args, "all");
	return args;
}

/* ---- the daemon -------------------------------------------------------------------- */

static void show_put(const char *name, const char *value)
{
	printf("%-12s %s\n", name, value);
}

static int put_health(const cJSON *health)
{
	const cJSON *one;

	show_put("state", ctl_str(health, "state", "?"));
	if (*ctl_str(health, "why", ""))
		show_put("why", ctl_str(health, "why", ""));
	if (ctl_true(health, "insecure"))
		show_put("insecure", "yes: any host that reaches the ports can read and "
				     "write engines' caches");
	if (ctl_num(health, "plain_peers") > 0)
		printf("%-12s %.0f peers on other hosts: data crosses the network "
		       "unencrypted\n",
		       "unencrypted", ctl_num(health, "plain_peers"));
	if (*ctl_str(health, "sandbox_lacks", ""))
		show_put("sandbox", ctl_str(health, "sandbox_lacks", ""));
	if (*ctl_str(health, "attention", ""))
		show_put("attention", ctl_str(health, "attention", ""));
	show_put("uptime", ctl_ms(ctl_num(health, "uptime_ms")));
	printf("%-12s %.0f\n", "sessions", ctl_num(health, "sessions"));
	printf("%-12s %.0f ms in the last second\n", "loop lag",
	       ctl_num(health, "lag_ms"));
	printf("%-12s %s, %s staged\n", "rooms' bytes",
	       ctl_bytes(ctl_num(health, "room_bytes")),
	       ctl_bytes(ctl_num(health, "staged_bytes")));
	printf("%-12s", "transports");
	cJSON_ArrayForEach(one, ctl_list(health, "transports"))
		printf(" %s", ctl_str(one, "name", "?"));
	putchar('\n');
	return CTL_OK;
}

static int put_status(const cJSON *health)
{
	static const char *const names[] = {"daemon", "name", "instance"};

	for (size_t i = 0; i < ARRAY_LEN(names); i++)
		show_put(names[i], ctl_str(health, names[i], "?"));
	printf("%-12s %.0f\n", "pid", ctl_num(health, "pid"));
	show_put("endpoint", *ctl_str(health, "endpoint", "")
				     ? ctl_str(health, "endpoint", "")
				     : "-");
	return put_health(health);
}

int ctl_run_status(struct ctl *ctl)
{
	return ctl_show(ctl, "health", NULL, put_status);
}

int ctl_run_health(struct ctl *ctl)
{
	cJSON *health;
	int r = ctl_ask(ctl, "health", NULL, &health);

	if (r)
		return r;
	if (ctl->json)
		ctl_print_json(health);
	else
		put_health(health);
	r = strcmp(ctl_str(health, "state", ""), "serving") == 0 ||
			    strcmp(ctl_str(health, "state", ""), "degraded") == 0
		    ? CTL_OK
		    : CTL_ERROR;
	cJSON_Delete(health);
	return r;
}

/* The labels of a series, as name=value. */
static void series_row(struct table *table, const cJSON *series)
{
	char labels[512] = " ";
	const cJSON *label;
	size_t n = 1;

	cJSON_ArrayForEach(label, series)
		if (cJSON_IsString(label) && n < sizeof(labels))
			n += (size_t)snprintf(labels + n, sizeof(labels) - n, " %s=%s",
					      label->string, label->valuestring);
	table_cell(table, labels);
	table_cellf(table, "%.12g", ctl_num(series, "value"));
	table_cell(table, "");
}

static void stats_row(struct table *table, const cJSON *m)
{
	const cJSON *series = ctl_list(m, "series"), *one;
	bool labelled = series && series->child && series->child->child &&
			cJSON_IsString(series->child->child);

	table_cell(table, ctl_str(m, "name", NULL));
	table_cellf(table, "%.12g", ctl_num(m, "value"));
	table_cell(table, ctl_str(m, "help", ""));
	if (!labelled)
		return;
	cJSON_ArrayForEach(one, series)
		series_row(table, one);
}

static void put_turns(const cJSON *loop, const char *name, const char *label)
{
	const cJSON *h = ctl_list(loop, name);

	printf("loop %-5s p50 %.0f  p99 %.0f  p99.9 %.0f  max %.0f us, %.0f samples  "
	       "(%s)\n",
	       label, ctl_num(h, "p50"), ctl_num(h, "p99"), ctl_num(h, "p999"),
	       ctl_num(h, "max"), ctl_num(h, "count"), name);
}

static int stats_prometheus(struct ctl *ctl)
{
	cJSON *args = cJSON_CreateObject(), *stats;
	int r;

	if (ctl->json || ctl->all) {
		cJSON_Delete(args);
		return ctl_usage("--prometheus: not with --json or --all");
	}
	ctl->raw = true; /* keep its newlines */
	cJSON_AddStringToObject(args, "format", "prometheus");
	r = ctl_ask(ctl, "stats", args, &stats);
	if (r)
		return r;
	fputs(ctl_str(stats, "text", ""), stdout);
	cJSON_Delete(stats);
	return CTL_OK;
}

static void principal_row(struct table *table, const cJSON *p)
{
	const cJSON *class;

	table_cell(table, ctl_str(p, "name", NULL));
	table_cell(table, "all");
	table_cell(table, "");
	ctl_cells(table, p, "bytes:B refused");
	cJSON_ArrayForEach(class, ctl_list(p, "classes")) {
		table_cell(table, "");
		ctl_cells(table, class, "class objects bytes:B");
		table_cell(table, "");
	}
}

static int print_principals(const cJSON *stats)
{
	int r = ctl_print_list(ctl_list(stats, "principals"),
			       "PRINCIPAL CLASS >OBJECTS >BYTES >REFUSED", principal_row);

	printf("total %s", ctl_bytes(ctl_num(stats, "bytes")));
	printf(" of %s (memory_limit)", ctl_bytes(ctl_num(stats, "limit_bytes")));
	printf("; limit per principal %s\n", ctl_bytes(ctl_num(stats, "share_bytes")));
	return r;
}

static int stats_by(struct ctl *ctl)
{
	cJSON *args;

	if (ctl->prometheus || strcmp(ctl->by, "principal") != 0)
		return ctl_usage("--by: principal, without --prometheus");
	args = cJSON_CreateObject();
	cJSON_AddStringToObject(args, "by", ctl->by);
	return ctl_show(ctl, "stats", args, print_principals);
}

static int print_stats(const cJSON *stats)
{
	const cJSON *loop = ctl_list(stats, "loop");
	int r = ctl_print_list(ctl_list(stats, "metrics"), "NAME >VALUE MEANING",
			       stats_row);

	put_turns(loop, "busy_us", "busy");
	put_turns(loop, "cpu_us", "cpu");
	put_turns(loop, "late_us", "late");
	return r;
}

int ctl_run_stats(struct ctl *ctl)
{
	if (ctl->by)
		return stats_by(ctl);
	if (ctl->prometheus)
		return stats_prometheus(ctl);
	return ctl_show(ctl, "stats", NULL, print_stats);
}

/* ---- the other nouns ------------------------------------------------------------------
 */

void ctl_peer_error_cell(struct table *table, const cJSON *p, const char *absent)
{
	const cJSON *error = ctl_list(p, "last_error");

	if (error)
		table_cellf(table, "%s ago%s: %s: %s", ctl_ms(ctl_num(error, "age_ms")),
			    ctl_true(error, "resolved") ? " (connected since)" : "",
			    ctl_str(error, "code", "?"), ctl_str(error, "message", ""));
	else
		table_cell(table, absent);
}

/* Names the first unusable transport; --json and the doctor show the reason. */
static void transport_cell(struct table *table, const cJSON *p)
{
	const char *passed = ctl_str(p, "passed_over", "");
	const char *crypto = ctl_str(p, "crypto", "none");
	bool plain = strcmp(crypto, "none") == 0;
	char transport[64];

	snprintf(transport, sizeof(transport), "%s%s%s", ctl_str(p, "transport", "-"),
		 plain ? "" : "+", plain ? "" : crypto);
	if (*passed)
		table_cellf(table, "%s (not %.*s)", transport, (int)strcspn(passed, " "),
			    passed);
	else
		table_cell(table, transport);
}

static void peer_row(struct table *table, const cJSON *p)
{
	const char *version = ctl_str(p, "version", "-");

	table_cell(table, ctl_peer_name(p));
	ctl_cells(table, p, "endpoint:@");
	table_cell(table, strncmp(version, "kvd ", 4) ? version : version + 4);
	ctl_cells(table, p, "state since_ms:t");
	transport_cell(table, p);
	table_cellf(table, "%.0f us", ctl_num(p, "rtt_us"));
	ctl_cells(table, p, "bytes_in:B bytes_out:B rooms_ended rooms_failed");
	ctl_peer_error_cell(table, p, "");
}

static int print_peers(const cJSON *reply)
{
	struct table *table = table_new(
		"NAME ENDPOINT VERSION STATE >SINCE TRANSPORT >RTT >IN >OUT >ROOMS "
		">FAILED LAST-ERROR");
	const cJSON *peer;

	cJSON_ArrayForEach(peer, ctl_list(reply, "peers"))
		peer_row(table, peer);
	cJSON_ArrayForEach(peer, ctl_list(reply, "lost"))
		peer_row(table, peer);
	return ctl_print_table(table);
}

int ctl_run_peers(struct ctl *ctl)
{
	return ctl_show(ctl, "peer.list", NULL, print_peers);
}

static void region_row(struct table *table, const cJSON *region)
{
	ctl_cells(table, region, "session region kind bytes:B pins pools");
	table_cell(table, ctl_true(region, "dead") ? "dead" : "live");
	ctl_cells(table, region, "name");
}

static int print_regions(const cJSON *reply)
{
	return ctl_print_list(ctl_list(reply, "regions"),
			      ">SESSION >REGION KIND >BYTES >PINS >POOLS STATE NAME",
			      region_row);
}

int ctl_run_regions(struct ctl *ctl)
{
	return ctl_show(ctl, "region.list", ctl_args_all(), print_regions);
}

const char *ctl_process_state(double pid)
{
	char path[40], text[512];
	const char *at;
	size_t len;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%.0f/stat", pid);
	file = pid > 0 ? fopen(path, "re") : NULL;
	if (!file)
		return "";
	len = fread(text, 1, sizeof(text) - 1, file);
	fclose(file);
	text[len] = '\0';
	at = strrchr(text, ')'); /* the name before it may contain any character */
	if (!at || at[1] != ' ')
		return "";
	return at[2] == 'T' || at[2] == 't' ? "stopped" : at[2] == 'Z' ? "zombie" : "";
}

static void session_row(struct table *table, const cJSON *s)
{
	const char *state = ctl_process_state(ctl_num(s, "pid"));

	ctl_cells(table, s, "session client role pid uid age_ms:t regions pools");
	table_cell(table, ctl_true(s, "ending") ? "ending"
			  : ctl_true(s, "own")	? "this one"
			  : *state		? state
						: "open");
}

static int print_sessions(const cJSON *reply)
{
	return ctl_print_list(ctl_list(reply, "sessions"),
			      ">SESSION CLIENT ROLE >PID >UID >AGE >REGIONS >POOLS STATE",
			      session_row);
}

int ctl_run_sessions(struct ctl *ctl)
{
	return ctl_show(ctl, "session.list", ctl_args_all(), print_sessions);
}
