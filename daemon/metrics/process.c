/* SPDX-License-Identifier: Apache-2.0 */
/* The metrics that all exporters provide under the same names. Values that cannot be
 * read are absent. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/metrics/figures.h"

#define NS_PER_S UINT64_C(1000000000)

/* When the system was booted, in seconds since 1970; read once: the file is long. */
static uint64_t boot_time_s(void)
{
	static uint64_t boot_s;
	uint64_t s = __atomic_load_n(&boot_s, __ATOMIC_RELAXED);
	char line[256];
	FILE *file = s ? NULL : fopen("/proc/stat", "re");

	while (file && !s && fgets(line, sizeof(line), file))
		if (strncmp(line, "btime ", 6) == 0)
			s = strtoull(line + 6, NULL, 10);
	if (file)
		fclose(file);
	__atomic_store_n(&boot_s, s, __ATOMIC_RELAXED);
	return s;
}

/* The fields of /proc/self/stat after the name, which may contain any characters. */
enum { UTIME = 11, STIME = 12, THREADS = 17, START = 19, VSIZE = 20, RSS = 21, FIELDS };

static bool stat_read(uint64_t fields[FIELDS])
{
	char text[1024];
	FILE *file = fopen("/proc/self/stat", "re");
	size_t len = file ? fread(text, 1, sizeof(text) - 1, file) : 0;
	char *at;

	if (file)
		fclose(file);
	text[len] = '\0';
	at = strrchr(text, ')');
	if (!at)
		return false;
	at += strspn(at, ") ");
	at++; /* the state, a letter */
	fields[0] = 0;
	for (int i = 1; i < FIELDS; i++)
		fields[i] = strtoull(at, &at, 10);
	return true;
}

static uint64_t fds_open(void)
{
	DIR *dir = opendir("/proc/self/fd");
	uint64_t n = 0;

	if (!dir)
		return METRIC_ABSENT;
	while (readdir(dir))
		n++;
	closedir(dir);
	return n < 3 ? 0 : n - 3; /* ".", ".." and the folder's own */
}

void figures_read_process(struct figures *f)
{
	uint64_t tick_ns = NS_PER_S / (uint64_t)sysconf(_SC_CLK_TCK);
	uint64_t field[FIELDS], boot_s = boot_time_s();
	struct metrics *m = &f->metrics;
	struct rlimit limit;

	for (unsigned int i = METRIC_PROCESS_CPU; i <= METRIC_PROCESS_START; i++)
		metrics_set(m, i, METRIC_ABSENT);
	metrics_set(m, METRIC_PROCESS_FDS, fds_open());
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0)
		metrics_set(m, METRIC_PROCESS_FDS_MAX, limit.rlim_cur);
	if (!stat_read(field))
		return;
	metrics_set(m, METRIC_PROCESS_CPU, (field[UTIME] + field[STIME]) * tick_ns);
	metrics_set(m, METRIC_PROCESS_THREADS, field[THREADS]);
	metrics_set(m, METRIC_PROCESS_VIRTUAL, field[VSIZE]);
	metrics_set(m, METRIC_PROCESS_RESIDENT,
		    field[RSS] * (uint64_t)sysconf(_SC_PAGESIZE));
	if (boot_s)
		metrics_set(m, METRIC_PROCESS_START,
			    boot_s * NS_PER_S + field[START] * tick_ns);
}
