/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The command ls, and the instances of a run directory: its *.sock files.
 *
 * NAME.lock exists while a daemon of that name runs (and after a kill, until the next
 * start). A socket without it is held by the service manager for a stopped daemon. A
 * connection would start the daemon, which a query must not do. Only the presence of the
 * file matters; the PID in it may belong to another PID namespace.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "ctl/ctl.h"
#include "lib/kvd.h"

#define INSTANCES_MAX 256
#define LOOK_MS 1000 /* limit for a daemon that does not respond */

const char *ctl_run_dir(void)
{
	const char *dir = getenv("KVD_RUN_DIR");

	return dir && *dir ? dir : "/run/kvd";
}

static int is_socket_name(const struct dirent *entry)
{
	size_t len = strlen(entry->d_name);

	return len > 5 && strcmp(entry->d_name + len - 5, ".sock") == 0;
}

int ctl_instances(struct dirent ***names_p)
{
	return scandir(ctl_run_dir(), names_p, is_socket_name, alphasort);
}

void ctl_instances_free(struct dirent **names, int count)
{
	while (count > 0)
		free(names[--count]);
	free(names);
}

bool ctl_instance_runs(const char *socket)
{
	char lock[300];
	size_t len = strlen(socket);

	if (len < 5 || len >= sizeof(lock) || strcmp(socket + len - 5, ".sock") != 0)
		return true;
	snprintf(lock, sizeof(lock), "%.*s.lock", (int)(len - 5), socket);
	return access(lock, F_OK) == 0 || errno != ENOENT;
}

/* ---- ls ---- */

void ctl_instance_look(const char *socket, struct ctl_seen *seen)
{
	const struct kvd_options o = {
		.client = "kvd-ctl", .timeout_ms = LOOK_MS, .socket = socket};
	const struct kvd_daemon_info *info;
	struct kvd_client *client = NULL;
	cJSON *reply;

	if (!ctl_instance_runs(socket)) {
		snprintf(seen->state, sizeof(seen->state), "stopped");
		return;
	}
	if (kvd_open(&o, &client)) {
		snprintf(seen->state, sizeof(seen->state), "%s",
			 kvd_code_name(kvd_last_error(NULL)->code));
		return;
	}
	info = kvd_daemon(client);
	seen->pid = info->pid;
	snprintf(seen->version, sizeof(seen->version), "%s", info->daemon);
	snprintf(seen->endpoint, sizeof(seen->endpoint), "%s", info->endpoint);
	if (ctl_command(client, "health", NULL, 0, &reply) == 0)
		snprintf(seen->state, sizeof(seen->state), "%s",
			 ctl_str(reply, "state", "?"));
	cJSON_Delete(reply);
	kvd_close(client);
}

static void ls_row(struct table *table, const cJSON *instance)
{
	ctl_cells(table, instance, "name state pid daemon endpoint");
}

static void ls_add(cJSON *list, const struct ctl_seen *seen)
{
	cJSON *json = cJSON_CreateObject();

	cJSON_AddStringToObject(json, "name", seen->name);
	cJSON_AddStringToObject(json, "state", seen->state);
	if (seen->pid)
		cJSON_AddNumberToObject(json, "pid", seen->pid);
	cJSON_AddStringToObject(json, "daemon", seen->version);
	cJSON_AddStringToObject(json, "endpoint", seen->endpoint);
	cJSON_AddItemToArray(list, json);
}

static int ls_print(struct ctl *ctl, struct dirent **names, int count)
{
	cJSON *reply = cJSON_CreateObject(),
	      *list = cJSON_AddArrayToObject(reply, "instances");
	char path[512];
	int r = CTL_OK;

	for (int i = 0; i < count && i < INSTANCES_MAX; i++) {
		struct ctl_seen seen = {.name = names[i]->d_name};

		snprintf(path, sizeof(path), "%s/%s", ctl_run_dir(), names[i]->d_name);
		names[i]->d_name[strlen(names[i]->d_name) - 5] = '\0';
		ctl_instance_look(path, &seen);
		ls_add(list, &seen);
	}
	if (ctl->json)
		ctl_print_json(reply);
	else
		r = ctl_print_list(list, "NAME STATE >PID VERSION ENDPOINT", ls_row);
	cJSON_Delete(reply);
	return r;
}

int ctl_run_ls(struct ctl *ctl)
{
	struct dirent **names = NULL;
	int count = ctl_instances(&names), r;

	if (count < 0)
		return ctl_failed("%s: %s", ctl_run_dir(), strerror(errno));
	r = ls_print(ctl, names, count);
	ctl_instances_free(names, count);
	return r;
}
