/* SPDX-License-Identifier: Apache-2.0 */
/* The commands config and reload: what runs, and what the file says now. */
#include <stdio.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/table.h"

static bool is_true(const cJSON *obj, const char *name)
{
	return cJSON_IsTrue(cJSON_GetObjectItemCaseSensitive(obj, name));
}

static int config_values(struct ctl *ctl)
{
	struct table *table;
	const cJSON *row;
	cJSON *reply;
	int r = ctl_ask(ctl, "config.show", NULL, &reply);

	if (r)
		return r;
	if (ctl->json) {
		ctl_print_json(reply);
	} else if (table_new("OPTION VALUE DEFAULT CHANGE", &table) < 0) {
		r = ctl_failed("out of memory");
	} else {
		cJSON_ArrayForEach(row, ctl_list(reply, "settings")) {
			table_cellf(table, "%s.%s", ctl_str(row, "section", "?"),
				    ctl_str(row, "name", "?"));
			table_cell(table, ctl_str(row, "value", NULL));
			table_cell(table, ctl_str(row, "default", NULL));
			table_cell(table, is_true(row, "reload") ? "reload" : "restart");
		}
		r = table_print(table, stdout) < 0 ? ctl_failed("out of memory") : CTL_OK;
		table_free(table);
	}
	cJSON_Delete(reply);
	return r;
}

bool ctl_keys_differ(const cJSON *reply, char text[CTL_KEYS_MAX])
{
	const cJSON *keys = ctl_list(reply, "keys");
	double added = ctl_num(keys, "added"), removed = ctl_num(keys, "removed"),
	       changed = ctl_num(keys, "changed");

	snprintf(text, CTL_KEYS_MAX, "%s added, %.0f removed, %.0f changed",
		 ctl_count(added, "key"), removed, changed);
	return added || removed || changed;
}

/* What differs, a line each; `taken`: the others were. */
static int print_differing(const cJSON *reply, bool taken)
{
	const cJSON *ended = ctl_list(reply, "ended"), *row;
	const double peerings = ctl_num(ended, "peerings"),
		     sessions = ctl_num(ended, "sessions");
	char keys[CTL_KEYS_MAX];
	bool any = false;

	cJSON_ArrayForEach(row, ctl_list(reply, "options")) {
		bool restart = is_true(row, "restart");

		any = true;
		printf("%s.%s: %s -> %s%s\n", ctl_str(row, "section", "?"),
		       ctl_str(row, "name", "?"), ctl_str(row, "running", ""),
		       ctl_str(row, "file", ""),
		       restart ? " (needs a restart)"
		       : taken ? ""
			       : " (taken by kvd-ctl reload)");
	}
	if (ctl_keys_differ(reply, keys)) {
		any = true;
		printf("peer.curve_allow_file: %s%s\n", keys,
		       taken ? "" : " (taken by kvd-ctl reload)");
	}
	if (peerings || sessions)
		printf("that ends %s and %s\n", ctl_count(peerings, "peering"),
		       ctl_count(sessions, "session"));
	if (!any)
		printf("%s: as it runs\n", *ctl_str(reply, "path", "")
						   ? ctl_str(reply, "path", "")
						   : "built-in defaults");
	return CTL_OK;
}

static int reload_ask(struct ctl *ctl, bool taken)
{
	cJSON *args = cJSON_CreateObject(), *reply;
	int r;

	cJSON_AddBoolToObject(args, "check", !taken);
	r = ctl_ask(ctl, "config.reload", args, &reply);
	if (r)
		return r;
	if (ctl->json)
		ctl_print_json(reply);
	else
		print_differing(reply, taken);
	cJSON_Delete(reply);
	return CTL_OK;
}

int ctl_run_config(struct ctl *ctl)
{
	return ctl->diff ? reload_ask(ctl, false) : config_values(ctl);
}

int ctl_run_reload(struct ctl *ctl)
{
	return reload_ask(ctl, true);
}
