/* SPDX-License-Identifier: Apache-2.0 */
/* kvd-ctl keys: the daemon's public key, its allow-list, and who was refused. */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/table.h"

static int keys_table(const cJSON *list, const char *heads,
		      void (*row)(struct table *table, const cJSON *record))
{
	const cJSON *record;
	struct table *table;
	int r;

	if (table_new(heads, &table) < 0)
		return ctl_failed("out of memory");
	cJSON_ArrayForEach(record, list)
		row(table, record);
	r = table_print(table, stdout);
	table_free(table);
	return r < 0 ? ctl_failed("out of memory") : CTL_OK;
}

static void allowed_row(struct table *table, const cJSON *one)
{
	table_cell(table, ctl_str(one, "name", NULL));
	table_cell(table, ctl_str(one, "key", NULL));
}

static void refused_row(struct table *table, const cJSON *one)
{
	table_cell(table, ctl_str(one, "address", NULL));
	table_cellf(table, "%.0f", ctl_num(one, "count"));
	table_cellf(table, "%.0f s ago", ctl_num(one, "last_ms") / 1000);
	table_cell(table, ctl_str(one, "key", "-"));
	table_cell(table, ctl_str(one, "why", ""));
}

static int print_keys(const cJSON *keys)
{
	const char *own = ctl_str(keys, "public_key", "");
	int r = CTL_OK;

	printf("own key: %s\n", *own ? own : "none (insecure = yes)");
	if (*own)
		printf("its line for others' curve_allow_file:\n%s\n",
		       ctl_str(keys, "line", ""));
	if (cJSON_GetArraySize(ctl_list(keys, "allowed")) > 0) {
		putchar('\n');
		r = keys_table(ctl_list(keys, "allowed"), "ALLOWED KEY", allowed_row);
	}
	if (r == CTL_OK && cJSON_GetArraySize(ctl_list(keys, "beside")) > 0) {
		putchar('\n');
		r = keys_table(ctl_list(keys, "beside"), "BESIDE KEY", allowed_row);
	}
	if (r == CTL_OK && cJSON_GetArraySize(ctl_list(keys, "refused")) > 0) {
		putchar('\n');
		r = keys_table(ctl_list(keys, "refused"), "REFUSED >COUNT >LAST KEY WHY",
			       refused_row);
	}
	return r;
}

int ctl_run_keys(struct ctl *ctl)
{
	cJSON *keys;
	int r = ctl_ask(ctl, "keys", NULL, &keys);

	if (r)
		return r;
	if (ctl->json)
		ctl_print_json(keys);
	else
		r = print_keys(keys);
	cJSON_Delete(keys);
	return r;
}
