/* SPDX-License-Identifier: Apache-2.0 */
/* The command chunks: the contents of the chunk store, in total and per space. */
#include <stdio.h>

#include "ctl/ctl.h"

static void space_row(struct table *table, const cJSON *space)
{
	ctl_cells(table, space,
		  "tenant model revision scheme tokens chunks bytes:B classes handles");
}

static void chunks_print_remote(const cJSON *remote)
{
	if (ctl_num(remote, "stores") > 0)
		printf("peers     %.0f of %.0f up; %.0f chunks found, %s fetched, %.0f "
		       "retries; %.0f hedged requests, %.0f of them answered first\n",
		       ctl_num(remote, "up"), ctl_num(remote, "stores"),
		       ctl_num(remote, "found"), ctl_bytes(ctl_num(remote, "bytes")),
		       ctl_num(remote, "retries"), ctl_num(remote, "hedges"),
		       ctl_num(remote, "hedges_won"));
	if (ctl_num(remote, "suspended") > 0)
		printf("suspended %.0f slow daemons, temporarily not queried\n",
		       ctl_num(remote, "suspended"));
	if (ctl_num(remote, "holds_total") > 0)
		printf("remote    %.0f holds of other daemons, %.0f in total\n",
		       ctl_num(remote, "holds"), ctl_num(remote, "holds_total"));
}

static void chunks_print_index(const cJSON *nodes, const cJSON *index)
{
	if (nodes) {
		printf("index     %.0f of %.0f nodes up; %.0f updates sent, %.0f "
		       "resyncs; ",
		       ctl_num(nodes, "up"), ctl_num(nodes, "nodes"),
		       ctl_num(nodes, "updates"), ctl_num(nodes, "resyncs"));
		printf("%.0f queries, %.0f timeouts\n", ctl_num(nodes, "queries"),
		       ctl_num(nodes, "timeouts"));
	}
	if (index) {
		printf("indexed   of %.0f daemons: %.0f chunks of at most %.0f; ",
		       ctl_num(index, "holders"), ctl_num(index, "entries"),
		       ctl_num(index, "limit"));
		printf("%.0f not indexed (full); %.0f updates, %.0f queries\n",
		       ctl_num(index, "unknown"), ctl_num(index, "updates"),
		       ctl_num(index, "queries"));
	}
}

static void chunks_print_head(const cJSON *reply)
{
	double memory = ctl_num(reply, "memory_bytes");
	double found = ctl_num(reply, "found"), missed = ctl_num(reply, "missed");

	if (!ctl_true(reply, "ready"))
		printf("memory not allocated yet, or the allocation failed: see the "
		       "log\n");
	printf("memory    %s", ctl_bytes(memory));
	printf(", %s free\n", ctl_bytes(ctl_num(reply, "free_bytes")));
	printf("chunks    %.0f, %.0f evicted; %.0f parts in engines' pages; %u holds, "
	       "%u moves\n",
	       ctl_num(reply, "chunks"), ctl_num(reply, "evicted"),
	       ctl_num(reply, "published"), (unsigned int)ctl_num(reply, "holds"),
	       (unsigned int)ctl_num(reply, "moves"));
	printf("spaces    %.0f, %.0f evicted\n",
	       (double)cJSON_GetArraySize(ctl_list(reply, "spaces")),
	       ctl_num(reply, "spaces_evicted"));
	printf("lookups   %.0f hits, %.0f misses", found, missed);
	if (found + missed > 0)
		printf(": %.1f %%", 100 * found / (found + missed));
	printf("\nbytes     %s put", ctl_bytes(ctl_num(reply, "put_bytes")));
	printf(", %s fetched\n", ctl_bytes(ctl_num(reply, "fetched_bytes")));
	chunks_print_remote(cJSON_GetObjectItemCaseSensitive(reply, "remote"));
	chunks_print_index(cJSON_GetObjectItemCaseSensitive(reply, "index_nodes"),
			   cJSON_GetObjectItemCaseSensitive(reply, "index"));
}

static void chunks_print_files(const cJSON *files)
{
	const char *why = ctl_str(files, "why", "");

	if (!files)
		return;
	printf("files     %s", ctl_bytes(ctl_num(files, "bytes")));
	printf(", %s free, in %s%s\n", ctl_bytes(ctl_num(files, "free_bytes")),
	       ctl_str(files, "dir", "?"), ctl_true(files, "direct") ? ", O_DIRECT" : "");
	printf("          %s written", ctl_bytes(ctl_num(files, "written_bytes")));
	printf(", %s read; %.0f parts evicted, %.0f checksum errors\n",
	       ctl_bytes(ctl_num(files, "read_bytes")), ctl_num(files, "evicted"),
	       ctl_num(files, "bad"));
	if (ctl_true(files, "stands"))
		printf("          the disk does not respond\n");
	if (ctl_true(files, "full"))
		printf("          the disk is full (%s free): no more files are "
		       "created\n",
		       ctl_bytes(ctl_num(files, "disk_free_bytes")));
	if (!ctl_true(files, "scanned"))
		printf("          contents not scanned yet\n");
	if (*why)
		printf("          %s: %s\n",
		       ctl_true(files, "open") ? "writing has stopped" : "not used", why);
}

static int chunks_print(const cJSON *reply)
{
	chunks_print_head(reply);
	chunks_print_files(cJSON_GetObjectItemCaseSensitive(reply, "files"));
	return ctl_print_list(
		ctl_list(reply, "spaces"),
		"TENANT MODEL REVISION SCHEME >TOKENS >CHUNKS >BYTES >LAYOUTS >USERS",
		space_row);
}

int ctl_run_chunks(struct ctl *ctl)
{
	return ctl_show(ctl, "chunk.list", ctl_args_all(), chunks_print);
}
