/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands that show something: status, health, stats, peers, regions, pools,
 * sessions; rooms.c has those of rooms.
 *
 * A list is one request, one function that turns a record into cells, and a table
 * that is as wide as its widest cell. A member that a daemon does not tell (an
 * older or newer one) shows as "-" or 0, never as a crash. Amounts are rounded for
 * people; whoever computes with them takes --json.
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

/* Ask for a list and show its records with `row`. */
static int print_list(struct ctl *ctl, cJSON *reply, const char *member,
		      const char *heads,
		      void (*row)(struct table *table, const cJSON *record))
{
	const cJSON *record;
	struct table *table;

	if (ctl->json) {
		ctl_print_json(reply);
		return CTL_OK;
	}
	if (table_new(heads, &table) < 0)
		return ctl_failed("out of memory");
	cJSON_ArrayForEach(record, ctl_list(reply, member))
		row(table, record);
	return ctl_print_table(table);
}

static int show_list(struct ctl *ctl, const char *cmd, cJSON *args, const char *member,
		     const char *heads,
		     void (*row)(struct table *table, const cJSON *record))
{
	cJSON *reply;
	int r = ctl_ask(ctl, cmd, args, &reply);

	if (r)
		return r;
	r = print_list(ctl, reply, member, heads, row);
	cJSON_Delete(reply);
	return r;
}

static cJSON *args_all(void)
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

static void put_transports(const cJSON *health)
{
	const cJSON *t;

	printf("%-12s", "transports");
	cJSON_ArrayForEach(t, ctl_list(health, "transports"))
		printf(" %s", ctl_str(t, "name", "?"));
	putchar('\n');
}

static void put_health(const cJSON *health)
{
	show_put("state", ctl_str(health, "state", "?"));
	if (*ctl_str(health, "why", ""))
		show_put("why", ctl_str(health, "why", ""));
	if (ctl_true(health, "insecure"))
		show_put("insecure", "yes: whoever reaches the ports can read and write "
				     "engines' caches");
	if (ctl_num(health, "plain_peers") > 0)
		printf("%-12s %.0f peers of other hosts: their bytes cross the network "
		       "in clear\n",
		       "plain", ctl_num(health, "plain_peers"));
	if (*ctl_str(health, "sandbox_lacks", ""))
		show_put("sandbox", ctl_str(health, "sandbox_lacks", ""));
	if (*ctl_str(health, "attention", ""))
		show_put("attention", ctl_str(health, "attention", ""));
	show_put("uptime", ctl_ms(ctl_num(health, "uptime_ms")));
	printf("%-12s %.0f\n", "sessions", ctl_num(health, "sessions"));
	printf("%-12s %.0f ms in the last second\n", "loop lag",
	       ctl_num(health, "lag_ms"));
	printf("%-12s %s, %s by way of a buffer\n", "rooms' bytes",
	       ctl_bytes(ctl_num(health, "room_bytes")),
	       ctl_bytes(ctl_num(health, "staged_bytes")));
	put_transports(health);
}

int ctl_run_status(struct ctl *ctl)
{
	static const char *const names[] = {"daemon", "name", "instance"};
	cJSON *health;
	int r = ctl_ask(ctl, "health", NULL, &health);

	if (r)
		return r;
	if (ctl->json) {
		ctl_print_json(health);
	} else {
		for (size_t i = 0; i < ARRAY_LEN(names); i++)
			show_put(names[i], ctl_str(health, names[i], "?"));
		printf("%-12s %.0f\n", "pid", ctl_num(health, "pid"));
		show_put("endpoint", *ctl_str(health, "endpoint", "")
					     ? ctl_str(health, "endpoint", "")
					     : "-");
		put_health(health);
	}
	cJSON_Delete(health);
	return CTL_OK;
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

/* Its labels, each as name=value. */
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

	printf("loop %-5s p50 %.0f  p99 %.0f  p99.9 %.0f  max %.0f us of %.0f  (%s)\n",
	       label, ctl_num(h, "p50"), ctl_num(h, "p99"), ctl_num(h, "p999"),
	       ctl_num(h, "max"), ctl_num(h, "count"), name);
}

static int stats_prometheus(struct ctl *ctl)
{
	cJSON *args = cJSON_CreateObject(), *stats;
	int r;

	if (ctl->json || ctl->all) {
		cJSON_Delete(args);
		return ctl_usage("--prometheus: neither with --json nor with --all");
	}
	ctl->raw = true; /* it has lines */
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
	table_cell(table, ctl_bytes(ctl_num(p, "bytes")));
	table_cellf(table, "%.0f", ctl_num(p, "refused"));
	cJSON_ArrayForEach(class, ctl_list(p, "classes")) {
		table_cell(table, "");
		table_cell(table, ctl_str(class, "class", NULL));
		table_cellf(table, "%.0f", ctl_num(class, "objects"));
		table_cell(table, ctl_bytes(ctl_num(class, "bytes")));
		table_cell(table, "");
	}
}

static int stats_by(struct ctl *ctl)
{
	cJSON *args, *stats;
	int r;

	if (ctl->prometheus || strcmp(ctl->by, "principal") != 0)
		return ctl_usage("--by: principal, without --prometheus");
	args = cJSON_CreateObject();
	cJSON_AddStringToObject(args, "by", ctl->by);
	r = ctl_ask(ctl, "stats", args, &stats);
	if (r)
		return r;
	r = print_list(ctl, stats, "principals",
		       "PRINCIPAL CLASS >OBJECTS >BYTES >REFUSED", principal_row);
	if (!ctl->json) {
		printf("%s in all", ctl_bytes(ctl_num(stats, "bytes")));
		printf(" of %s (memory)", ctl_bytes(ctl_num(stats, "limit_bytes")));
		printf(", one may have %s\n", ctl_bytes(ctl_num(stats, "share_bytes")));
	}
	cJSON_Delete(stats);
	return r;
}

int ctl_run_stats(struct ctl *ctl)
{
	cJSON *stats;
	int r;

	if (ctl->by)
		return stats_by(ctl);
	if (ctl->prometheus)
		return stats_prometheus(ctl);
	r = ctl_ask(ctl, "stats", NULL, &stats);
	if (r)
		return r;
	r = print_list(ctl, stats, "metrics", "NAME >VALUE MEANING", stats_row);
	if (!ctl->json) {
		put_turns(ctl_list(stats, "loop"), "busy_us", "busy");
		put_turns(ctl_list(stats, "loop"), "cpu_us", "cpu");
		put_turns(ctl_list(stats, "loop"), "late_us", "late");
	}
	cJSON_Delete(stats);
	return r;
}

/* ---- the other nouns ------------------------------------------------------------------
 */

static void endpoint_cell(struct table *table, const cJSON *p)
{
	const char *endpoint = ctl_str(p, "endpoint", "-");

	table_cellf(table, "%.*s", (int)strcspn(endpoint, "#"), endpoint);
}

void ctl_peer_error_cell(struct table *table, const cJSON *p, const char *absent)
{
	const cJSON *error = ctl_list(p, "last_error");

	if (error)
		table_cellf(table, "%s%s ago: %s: %s",
			    ctl_true(error, "resolved") ? "resolved, " : "",
			    ctl_ms(ctl_num(error, "age_ms")), ctl_str(error, "code", "?"),
			    ctl_str(error, "message", ""));
	else
		table_cell(table, absent);
}

/* The first that was passed over is named; --json and the doctor say why. */
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
	endpoint_cell(table, p);
	table_cell(table, strncmp(version, "kvd ", 4) ? version : version + 4);
	table_cell(table, ctl_str(p, "state", NULL));
	table_cell(table, ctl_ms(ctl_num(p, "since_ms")));
	transport_cell(table, p);
	table_cellf(table, "%.0f us", ctl_num(p, "rtt_us"));
	table_cell(table, ctl_bytes(ctl_num(p, "bytes_in")));
	table_cell(table, ctl_bytes(ctl_num(p, "bytes_out")));
	table_cellf(table, "%.0f", ctl_num(p, "rooms_ended"));
	table_cellf(table, "%.0f", ctl_num(p, "rooms_failed"));
	ctl_peer_error_cell(table, p, "");
}

int ctl_run_peers(struct ctl *ctl)
{
	cJSON *reply, *lost;
	int r = ctl_ask(ctl, "peer.list", NULL, &reply);

	if (r)
		return r;
	if (!ctl->json) { /* one table */
		lost = cJSON_DetachItemFromObjectCaseSensitive(reply, "lost");
		while (lost && lost->child)
			cJSON_AddItemToArray(
				cJSON_GetObjectItemCaseSensitive(reply, "peers"),
				cJSON_DetachItemFromArray(lost, 0));
		cJSON_Delete(lost);
	}
	r = print_list(
		ctl, reply, "peers",
		"NAME ENDPOINT VERSION STATE >SINCE TRANSPORT >RTT >IN >OUT >ROOMS "
		">FAILED LAST-ERROR",
		peer_row);
	cJSON_Delete(reply);
	return r;
}

static void region_row(struct table *table, const cJSON *region)
{
	table_cellf(table, "%.0f", ctl_num(region, "session"));
	table_cellf(table, "%.0f", ctl_num(region, "region"));
	table_cell(table, ctl_str(region, "kind", NULL));
	table_cell(table, ctl_bytes(ctl_num(region, "bytes")));
	table_cellf(table, "%.0f", ctl_num(region, "pins"));
	table_cellf(table, "%.0f", ctl_num(region, "pools"));
	table_cell(table, ctl_true(region, "dead") ? "dead" : "live");
	table_cell(table, ctl_str(region, "name", ""));
}

int ctl_run_regions(struct ctl *ctl)
{
	return show_list(ctl, "region.list", args_all(), "regions",
			 ">SESSION >REGION KIND >BYTES >PINS >POOLS STATE NAME",
			 region_row);
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
	at = strrchr(text, ')'); /* the name before it may hold anything */
	if (!at || at[1] != ' ')
		return "";
	return at[2] == 'T' || at[2] == 't' ? "stopped" : at[2] == 'Z' ? "zombie" : "";
}

static void session_row(struct table *table, const cJSON *s)
{
	const char *state = ctl_process_state(ctl_num(s, "pid"));

	table_cellf(table, "%.0f", ctl_num(s, "session"));
	table_cell(table, ctl_str(s, "client", NULL));
	table_cell(table, ctl_str(s, "role", ""));
	table_cellf(table, "%.0f", ctl_num(s, "pid"));
	table_cellf(table, "%.0f", ctl_num(s, "uid"));
	table_cell(table, ctl_ms(ctl_num(s, "age_ms")));
	table_cellf(table, "%.0f", ctl_num(s, "regions"));
	table_cellf(table, "%.0f", ctl_num(s, "pools"));
	table_cell(table, ctl_true(s, "ending") ? "ending"
			  : ctl_true(s, "own")	? "this one"
			  : *state		? state
						: "open");
}

int ctl_run_sessions(struct ctl *ctl)
{
	return show_list(ctl, "session.list", args_all(), "sessions",
			 ">SESSION CLIENT ROLE >PID >UID >AGE >REGIONS >POOLS STATE",
			 session_row);
}
