/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd-ctl doctor: the table of checks and the output of one line. A check never stops
 * the others: if it lacks a permission or the daemon, it reports that or prints nothing.
 */
#include "ctl/doctor.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "ctl/display.h"
#include "daemon/base/mem.h"

static const struct {
	const char *name;
	void (*run)(struct doctor *d);
} checks[] = {
	{"daemon", doctor_daemon}, /* first: the others use its replies */
	{"version", doctor_version},
	{"config", doctor_config},
	{"listen", doctor_listen},
	{"keys", doctor_keys},
	{"transports", doctor_transports},
	{"limits", doctor_limits},
	{"rights", doctor_rights},
	{"namespaces", doctor_namespaces},
	{"kernel", doctor_kernel},
	{"huge-pages", doctor_huge_pages},
	{"shm", doctor_shm},
	{"userfaultfd", doctor_userfaultfd},
	{"sockets", doctor_sockets},
	{"network", doctor_network},
	{"rdma", doctor_rdma},
	{"gpu", doctor_gpu},
	{"peers", doctor_peers},
	{"chunks", doctor_chunks},
	{"cluster", doctor_cluster},
	{"loop", doctor_loop},
	{"rooms", doctor_rooms},
	{"failures", doctor_failures},
};

static const char *const results[] = {"ok", "warn", "FAIL", "note"};

void doctor_say(struct doctor *d, enum doctor_result result, const char *remedy,
		const char *fmt, ...)
{
	char fact[600];
	va_list ap;
	cJSON *line;

	va_start(ap, fmt);
	vsnprintf(fact, sizeof(fact), fmt, ap);
	va_end(ap);
	if (result != DOCTOR_NOTE && result > d->worst)
		d->worst = result;
	if (d->ctl->json) {
		line = cJSON_CreateObject();
		cJSON_AddStringToObject(line, "result", results[result]);
		cJSON_AddStringToObject(line, "check", d->check);
		cJSON_AddStringToObject(line, "fact", fact);
		cJSON_AddStringToObject(line, "remedy", remedy ? remedy : "");
		cJSON_AddItemToArray(d->lines, line);
		return;
	}
	display_sanitize(fact); /* it may contain text of files and other programs */
	printf("%-4s  %-11s  %s%s%s\n", results[result], d->check, fact,
	       remedy && *remedy ? " -> " : "", remedy ? remedy : "");
	fflush(stdout);
}

/* ---- inputs of the checks ---- */

const char *doctor_setting(const struct doctor *d, const char *name)
{
	const cJSON *one;

	cJSON_ArrayForEach(one, ctl_list(d->settings, "settings"))
		if (strcmp(ctl_str(one, "name", ""), name) == 0)
			return ctl_str(one, "value", "");
	return "";
}

bool doctor_has_transport(const struct doctor *d, const char *name)
{
	const cJSON *one;

	cJSON_ArrayForEach(one, ctl_list(d->health, "transports"))
		if (strcmp(ctl_str(one, "name", ""), name) == 0)
			return true;
	return false;
}

static void path_make(const struct doctor *d, char *path, size_t size, const char *fmt,
		      va_list ap)
{
	char below[300];

	vsnprintf(below, sizeof(below), fmt, ap);
	snprintf(path, size, "%s%s", d->root, below);
}

bool doctor_read(const struct doctor *d, char *text, size_t size, const char *fmt, ...)
{
	char path[800];
	va_list ap;
	FILE *file;
	size_t len;

	va_start(ap, fmt);
	path_make(d, path, sizeof(path), fmt, ap);
	va_end(ap);
	*text = '\0';
	file = fopen(path, "re");
	if (!file)
		return false;
	len = fread(text, 1, size - 1, file);
	fclose(file);
	while (len && text[len - 1] == '\n')
		len--;
	text[len] = '\0';
	return true;
}

static int has_no_dot(const struct dirent *entry)
{
	return entry->d_name[0] != '.';
}

int doctor_list(const struct doctor *d, struct dirent ***names_p, const char *fmt, ...)
{
	char path[800];
	va_list ap;
	int count;

	va_start(ap, fmt);
	path_make(d, path, sizeof(path), fmt, ap);
	va_end(ap);
	*names_p = NULL;
	count = scandir(path, names_p, has_no_dot, versionsort);
	return count < 0 ? 0 : count;
}

bool doctor_exists(const struct doctor *d, const char *fmt, ...)
{
	char path[800];
	va_list ap;

	va_start(ap, fmt);
	path_make(d, path, sizeof(path), fmt, ap);
	va_end(ap);
	return access(path, F_OK) == 0;
}

/* ---- the command ---- */

int ctl_run_doctor(struct ctl *ctl)
{
	struct doctor d = {.ctl = ctl, .root = ctl->root ? ctl->root : "", .uid = -1};
	double stuck_ms;

	if (*d.root && (*d.root != '/' || strlen(d.root) > 400))
		return ctl_usage("--root: an absolute path of up to 400 bytes");
	if (ctl->stuck && !ctl_duration(ctl->stuck, &stuck_ms))
		return ctl_usage("--stuck: a duration like 30s or 10m, not '%s'",
				 ctl->stuck);
	if (ctl->json)
		d.lines = cJSON_CreateArray();
	for (size_t i = 0; i < ARRAY_LEN(checks); i++) {
		d.check = checks[i].name;
		checks[i].run(&d);
	}
	if (ctl->json) {
		cJSON *json = cJSON_CreateObject();

		cJSON_AddStringToObject(json, "result", results[d.worst]);
		cJSON_AddItemToObject(json, "checks", d.lines);
		display_print_json(json, stdout);
		cJSON_Delete(json);
	}
	cJSON_Delete(d.health);
	cJSON_Delete(d.settings);
	cJSON_Delete(d.devices);
	cJSON_Delete(d.sessions);
	cJSON_Delete(d.regions);
	cJSON_Delete(d.stats);
	return (int)d.worst; /* 0, 1, 2 */
}
