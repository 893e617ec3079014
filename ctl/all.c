/* SPDX-License-Identifier: Apache-2.0 */
/* --all: runs a command for each instance in the run directory, each with its own
 * connection. Text is headed by the instance's name; JSON is one object keyed by name. */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "ctl/ctl.h"
#include "ctl/display.h"

static int all_run(struct ctl *one, const struct ctl_command *command)
{
	int r = command->run(one);

	ctl_disconnect(one);
	return r == CTL_NO_DAEMON && one->version_differs ? CTL_VERSION : r;
}

/* The command's output as JSON, or its error if it printed nothing. */
static int all_json(struct ctl *one, const struct ctl_command *command, cJSON **out_p)
{
	FILE *shown = stdout;
	char *text = NULL;
	size_t len;
	cJSON *error;
	int r;

	stdout = open_memstream(&text, &len); /* assignable in glibc */
	if (!stdout) {
		stdout = shown;
		return ctl_failed("out of memory");
	}
	r = all_run(one, command);
	fclose(stdout);
	stdout = shown;
	*out_p = text ? cJSON_Parse(text) : NULL;
	free(text);
	if (*out_p)
		return r;
	*out_p = cJSON_CreateObject();
	error = cJSON_AddObjectToObject(*out_p, "error");
	cJSON_AddStringToObject(error, "code", kvd_code_name(one->error.code));
	cJSON_AddStringToObject(error, "message", one->error.message);
	return r;
}

static int all_each(struct ctl *ctl, const struct ctl_command *command,
		    struct dirent **names, int count, cJSON *all)
{
	int worst = CTL_OK, r;

	for (int i = 0; i < count; i++) {
		char *name = names[i]->d_name;
		struct ctl one = *ctl;
		cJSON *json = NULL;

		name[strlen(name) - 5] = '\0'; /* .sock */
		one.name = name;
		if (ctl->json) {
			r = all_json(&one, command, &json);
			cJSON_AddItemToObject(all, name, json);
		} else {
			printf("%s%s:\n", i ? "\n" : "", name);
			fflush(stdout);
			r = all_run(&one, command);
			fflush(stdout);
		}
		worst = r > worst ? r : worst;
	}
	return worst;
}

int ctl_run_all(struct ctl *ctl, const struct ctl_command *command)
{
	struct dirent **names = NULL;
	cJSON *all;
	int count, r;

	if (ctl->socket || ctl->name)
		return ctl_usage("--all: not with --socket or --name");
	count = ctl_instances(&names);
	if (count < 0)
		return ctl_failed("%s: %s", ctl_run_dir(), strerror(errno));
	if (count == 0) {
		ctl_failed("no instance in %s", ctl_run_dir());
		return CTL_NO_DAEMON;
	}
	all = cJSON_CreateObject();
	r = all_each(ctl, command, names, count, all);
	if (ctl->json)
		display_print_json(all, stdout);
	cJSON_Delete(all);
	ctl_instances_free(names, count);
	return r;
}
