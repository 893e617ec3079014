/* SPDX-License-Identifier: Apache-2.0 */
/* kvd-ctl keys: the daemon's public key, its allow-list and refused peers. */
#include <stdio.h>

#include "ctl/ctl.h"
#include "ctl/table.h"
#include "daemon/base/mem.h"

static void allowed_row(struct table *table, const cJSON *one)
{
	ctl_cells(table, one, "name key");
}

static void refused_row(struct table *table, const cJSON *one)
{
	ctl_cells(table, one, "address count");
	table_cellf(table, "%.0f s ago", ctl_num(one, "last_ms") / 1000);
	ctl_cells(table, one, "key why");
}

static int print_keys(const cJSON *keys)
{
	static const struct {
		const char *member, *heads;
		void (*row)(struct table *table, const cJSON *record);
	} lists[] = {
		{"allowed", "ALLOWED KEY", allowed_row},
		{"beside", "SAME-USER KEY", allowed_row},
		{"refused", "REFUSED >COUNT >LAST KEY REASON", refused_row},
	};
	const char *own = ctl_str(keys, "public_key", "");
	int r = CTL_OK;

	printf("own key: %s\n", *own ? own : "none (insecure = yes)");
	if (*own)
		printf("line for the curve_allow_file of peers:\n%s\n",
		       ctl_str(keys, "line", ""));
	for (size_t i = 0; r == CTL_OK && i < ARRAY_LEN(lists); i++) {
		const cJSON *list = ctl_list(keys, lists[i].member);

		if (cJSON_GetArraySize(list) == 0)
			continue;
		putchar('\n');
		r = ctl_print_list(list, lists[i].heads, lists[i].row);
	}
	return r;
}

int ctl_run_keys(struct ctl *ctl)
{
	return ctl_show(ctl, "keys", NULL, print_keys);
}
