/* SPDX-License-Identifier: Apache-2.0 */
/* The commands config and reload: the options in effect and those of the file. */
#include <stdio.h>

#include "ctl/ctl.h"
#include "ctl/table.h"

static void setting_row(struct table *table, const cJSON *row)
{
	table_cellf(table, "%s.%s", ctl_str(row, "section", "?"),
		    ctl_str(row, "name", "?"));
	ctl_cells(table, row, "value default");
	table_cell(table, ctl_true(row, "reload") ? "reload" : "restart");
}

static int print_settings(const cJSON *reply)
{
	return ctl_print_list(ctl_list(reply, "settings"), "OPTION VALUE DEFAULT CHANGE",
			      setting_row);
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

/* A line per difference; `taken`: those without a restart have been applied. */
static int print_differing(const cJSON *reply, bool taken)
{
	const cJSON *ended = ctl_list(reply, "ended"), *row;
	const double peerings = ctl_num(ended, "peerings"),
		     sessions = ctl_num(ended, "sessions");
	char keys[CTL_KEYS_MAX];
	bool any = false;

	cJSON_ArrayForEach(row, ctl_list(reply, "options")) {
		bool restart = ctl_true(row, "restart");

		any = true;
		printf("%s.%s: %s -> %s%s\n", ctl_str(row, "section", "?"),
		       ctl_str(row, "name", "?"), ctl_str(row, "running", ""),
		       ctl_str(row, "file", ""),
		       restart ? " (needs a restart)"
		       : taken ? ""
			       : " (applied by kvd-ctl reload)");
	}
	if (ctl_keys_differ(reply, keys)) {
		any = true;
		printf("peer.curve_allow_file: %s%s\n", keys,
		       taken ? "" : " (applied by kvd-ctl reload)");
	}
	if (peerings || sessions)
		printf("this ends %s and %s\n", ctl_count(peerings, "peering"),
		       ctl_count(sessions, "session"));
	if (!any)
		printf("%s: in effect\n", *ctl_str(reply, "path", "")
						  ? ctl_str(reply, "path", "")
						  : "built-in defaults");
	return CTL_OK;
}

static int print_check(const cJSON *reply)
{
	return print_differing(reply, false);
}

static int print_reload(const cJSON *reply)
{
	return print_differing(reply, true);
}

static int reload_ask(struct ctl *ctl, bool taken)
{
	cJSON *args = cJSON_CreateObject();

	cJSON_AddBoolToObject(args, "check", !taken);
	return ctl_show(ctl, "config.reload", args, taken ? print_reload : print_check);
}

int ctl_run_config(struct ctl *ctl)
{
	return ctl->diff ? reload_ask(ctl, false)
			 : ctl_show(ctl, "config.show", NULL, print_settings);
}

int ctl_run_reload(struct ctl *ctl)
{
	return reload_ask(ctl, true);
}
