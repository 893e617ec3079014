/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands cost and calibrate: the costs that a daemon has measured for its peers.
 * Both print the reply of cost.show: constants with their standard errors, which bound
 * the confidence of a decision. A dash means not measured. --json prints the full reply,
 * with counts and ages.
 */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/table.h"

static const cJSON *figure_of(const cJSON *obj, const char *name)
{
	const cJSON *figure = cJSON_GetObjectItemCaseSensitive(obj, name);

	return cJSON_IsObject(figure) ? figure : NULL;
}

/* "10.2±0.1", scaled by a factor; "-" if not measured. */
static void cell_figure(struct table *table, const cJSON *obj, const char *name,
			double by)
{
	const cJSON *figure = figure_of(obj, name);

	if (figure)
		table_cellf(table, "%.2f±%.2f", ctl_num(figure, "value") * by,
			    ctl_num(figure, "error") * by);
	else
		table_cell(table, NULL);
}

static const char *shown_peer(const cJSON *reply, const char *instance)
{
	const cJSON *peer;

	if (strspn(instance, "0") == strlen(instance))
		return "this daemon";
	cJSON_ArrayForEach(peer, ctl_list(reply, "peers")) {
		if (strcmp(ctl_str(peer, "instance", ""), instance) == 0)
			return ctl_str(peer, "endpoint", instance);
	}
	return instance;
}

static int print_links(const cJSON *reply)
{
	const cJSON *peer, *link;
	struct table *table =
		table_new("PEER TRANSPORT >PROBE_US >TURN_US >GB/s >FETCH_US >FETCH_GB/s "
			  ">CONGESTION >WAIT_US >GPU_WAIT_US >REQUESTERS STATE");

	cJSON_ArrayForEach(peer, ctl_list(reply, "peers")) {
		cJSON_ArrayForEach(link, ctl_list(peer, "links")) {
			ctl_endpoint_cell(table, ctl_str(peer, "endpoint", "?"));
			table_cell(table, ctl_str(link, "transport", "?"));
			cell_figure(table, link, "probe_us", 1);
			cell_figure(table, link, "turn_us", 1);
			cell_figure(table, link, "bytes_per_us", 1e-3);
			cell_figure(table, link, "pull_us", 1);
			cell_figure(table, link, "pull_bytes_per_us", 1e-3);
			cell_figure(table, link, "congestion", 1);
			cell_figure(table, peer, "wait_us", 1);
			cell_figure(table, peer, "gpu_wait_us", 1);
			ctl_cells(table, peer, "requesters:1");
			table_cell(table, ctl_true(peer, "stale") ? "stale" : "good");
		}
	}
	return ctl_print_table(table);
}

static int print_speeds(const cJSON *reply)
{
	const cJSON *speed;
	struct table *table = table_new(
		"PEER MEMORY >HEADS >KV_HEADS >DQK >DV >FIXED_US >ROW_US >GB/s >GFLOP/s "
		">MEAS/PRED");

	cJSON_ArrayForEach(speed, ctl_list(reply, "speeds")) {
		ctl_endpoint_cell(table,
				  shown_peer(reply, ctl_str(speed, "instance", "")));
		table_cell(table, ctl_true(speed, "gpu") ? "GPU" : "host");
		ctl_cells(table, speed, "heads kv_heads dqk dv");
		cell_figure(table, speed, "fixed_us", 1);
		cell_figure(table, speed, "row_us", 1);
		cell_figure(table, speed, "bytes_per_us", 1e-3);
		cell_figure(table, speed, "flop_per_us", 1e-3);
		cell_figure(table, speed, "attend", 1);
	}
	return ctl_print_table(table);
}

static void print_home(const cJSON *home)
{
	const cJSON *merge = figure_of(home, "merge_row_us");
	const cJSON *splice = figure_of(home, "splice_token_us");

	if (merge && splice)
		printf("\nthis daemon: merging a row %.2f µs, rotating a token of a "
		       "layer %.2f µs\n",
		       ctl_num(merge, "value"), ctl_num(splice, "value"));
}

static int print_costs(const cJSON *reply)
{
	int r;

	if (!cJSON_GetArraySize(ctl_list(reply, "peers"))) {
		printf("no measurements: run kvd-ctl calibrate PEER, or an engine that "
		       "opens the cost page\n");
		return CTL_OK;
	}
	r = print_links(reply);
	if (!r && cJSON_GetArraySize(ctl_list(reply, "speeds"))) {
		putchar('\n');
		r = print_speeds(reply);
	}
	print_home(cJSON_GetObjectItemCaseSensitive(reply, "home"));
	return r;
}

int ctl_run_cost(struct ctl *ctl)
{
	return ctl_show(ctl, "cost.show", NULL, print_costs);
}

static void echo_row(struct table *table, const cJSON *echo)
{
	ctl_cells(table, echo, "bytes us:1 mad_us:1 count");
}

static int print_echoes(const cJSON *reply)
{
	return ctl_print_list(ctl_list(reply, "echoes"), ">BYTES >US >MAD_US >COUNT",
			      echo_row);
}

int ctl_run_calibrate(struct ctl *ctl)
{
	cJSON *args = cJSON_CreateObject();
	int r;

	cJSON_AddStringToObject(args, "endpoint", ctl->args[0]);
	r = ctl_show(ctl, "cost.calibrate", args, print_echoes);
	if (r || ctl->json)
		return r;
	putchar('\n');
	return ctl_run_cost(ctl);
}
