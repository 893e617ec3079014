/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The commands cluster and group, and the doctor's check of the directory. Both query the
 * daemon, which queries the directory: they show the directory's contents.
 */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/doctor.h"
#include "ctl/table.h"

#define DAEMONS "kvd.daemons"

static cJSON *args_group(const char *group)
{
	cJSON *args = cJSON_CreateObject();

	cJSON_AddStringToObject(args, "group", group);
	cJSON_AddTrueToObject(args, "loads");
	return args;
}

/* The strings of a list, separated by commas. */
static const char *words_of(const cJSON *list, char *text, size_t size)
{
	const cJSON *word;
	size_t n = 0;

	*text = '\0';
	cJSON_ArrayForEach(word, list) {
		const char *one = cJSON_GetStringValue(word);

		if (one && n < size)
			n += (size_t)snprintf(text + n, size - n, "%s%s", n ? "," : "",
					      one);
	}
	return text;
}

/* ---- cluster ---- */

static void cluster_print_head(const cJSON *reply)
{
	const char *where = ctl_str(reply, "where", "");
	bool up = ctl_true(reply, "up");

	printf("directory %s, %s; %s for %s\n", ctl_str(reply, "kind", "?"),
	       *where ? where : "this daemon alone", up ? "up" : "UNREACHABLE",
	       ctl_ms(ctl_num(reply, "since_ms")));
	if (!up)
		printf("          %s\n", ctl_str(reply, "why", ""));
	printf("lease     %s; trust: %s\n", ctl_ms(ctl_num(reply, "lease_ms")),
	       ctl_str(reply, "trust", "?"));
	printf("published %d entries, %.0f writes; %.0f events read, %.0f entries "
	       "rejected\n",
	       cJSON_GetArraySize(ctl_list(reply, "places")), ctl_num(reply, "puts"),
	       ctl_num(reply, "events"), ctl_num(reply, "refused"));
}

static void daemon_row(struct table *table, const cJSON *rank)
{
	char words[160];

	ctl_cells(table, rank, "name state endpoint:@ version");
	table_cell(table, words_of(ctl_list(rank, "transports"), words, sizeof(words)));
	table_cellf(table, "%d", cJSON_GetArraySize(ctl_list(rank, "pools")));
	table_cell(table, ctl_str(rank, "instance", NULL));
}

int ctl_run_cluster(struct ctl *ctl)
{
	cJSON *reply = NULL, *daemons = NULL;
	int r = ctl_ask(ctl, "cluster.show", NULL, &reply);

	if (r)
		return r;
	/* not an error of this command if the directory is unreachable or empty */
	if (ctl_query(ctl, "group.query", args_group(DAEMONS), &daemons))
		daemons = NULL;
	if (ctl->json) {
		cJSON_AddItemToObject(
			reply, "daemons",
			daemons ? cJSON_DetachItemFromObject(daemons, "ranks")
				: cJSON_CreateArray());
		ctl_print_json(reply);
	} else {
		cluster_print_head(reply);
		r = ctl_print_list(ctl_list(daemons, "ranks"),
				   "DAEMON STATE ENDPOINT VERSION TRANSPORTS >POOLS "
				   "INSTANCE",
				   daemon_row);
	}
	cJSON_Delete(daemons);
	cJSON_Delete(reply);
	return r;
}

/* ---- group ---- */

static void cell_rank(struct table *table, const cJSON *of)
{
	table_cellf(table, "%.0f.%.0f.%.0f.%.0f", ctl_num(of, "tp_rank"),
		    ctl_num(of, "pp_rank"), ctl_num(of, "dp_rank"),
		    ctl_num(of, "cp_rank"));
}

static void rank_row(struct table *table, const cJSON *rank)
{
	table_cell(table, ctl_str(rank, "worker", NULL));
	cell_rank(table, rank);
	ctl_cells(table, rank,
		  "state endpoint:@ pool engine url load.rooms.running "
		  "load.rooms.waiting load.engine.running load.engine.waiting");
}

static int group_print(const cJSON *reply)
{
	if (!ctl_true(reply, "synced"))
		printf("directory unreachable: showing the last known entries\n");
	if (!ctl_true(reply, "complete"))
		printf("not all ranks are registered\n");
	return ctl_print_list(ctl_list(reply, "ranks"),
			      "WORKER RANK STATE ENDPOINT POOL ENGINE URL >ROOMS-RUN "
			      ">ROOMS-WAIT >REQ-RUN >REQ-WAIT",
			      rank_row);
}

static int groups_print(const cJSON *reply)
{
	struct table *table = table_new("GROUP HERE WORKER RANK");
	const cJSON *one;

	cJSON_ArrayForEach(one, ctl_list(reply, "places")) {
		table_cell(table, ctl_str(one, "group", NULL));
		table_cell(table,
			   ctl_true(one, "taken") ? "published" : "refused or pending");
		table_cell(table, ctl_str(one, "worker", ""));
		cell_rank(table, one);
	}
	cJSON_ArrayForEach(one, ctl_list(reply, "watches")) {
		table_cell(table, ctl_str(one, "group", NULL));
		table_cellf(table, "watched: %.0f ranks", ctl_num(one, "entries"));
		table_cell(table, "");
		table_cell(table, "");
	}
	return ctl_print_table(table);
}

int ctl_run_group(struct ctl *ctl)
{
	if (ctl->arg_count)
		return ctl_show(ctl, "group.query", args_group(ctl->args[0]),
				group_print);
	return ctl_show(ctl, "cluster.show", NULL, groups_print);
}

/* ---- doctor ---- */

void doctor_cluster(struct doctor *d)
{
	cJSON *reply = NULL;
	const char *where;
	double refused;

	if (!d->health || ctl_query(d->ctl, "cluster.show", NULL, &reply))
		return;
	where = ctl_str(reply, "where", "");
	refused = ctl_num(reply, "refused");
	if (!ctl_true(reply, "up"))
		doctor_say(d, DOCTOR_WARN,
			   "check that etcd runs, and the options cluster_tls_ca and "
			   "cluster_user_file",
			   "the directory %s has been unreachable for %s: %s", where,
			   ctl_ms(ctl_num(reply, "since_ms")), ctl_str(reply, "why", ""));
	else if (*where)
		doctor_say(d, DOCTOR_OK, "", "the directory %s has been up for %s", where,
			   ctl_ms(ctl_num(reply, "since_ms")));
	if (refused > 0)
		doctor_say(d, DOCTOR_WARN,
			   "check the daemon's log: another program may write there",
			   "%.0f invalid entries in the directory", refused);
	if (*where && strcmp(ctl_str(reply, "trust", ""), "directory") == 0)
		doctor_say(d, DOCTOR_NOTE,
			   "cluster_trust = listed, unless this is intended",
			   "anyone with write access to the directory can admit daemons");
	cJSON_Delete(reply);
}
