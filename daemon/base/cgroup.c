/* SPDX-License-Identifier: Apache-2.0 */
/*
 * /proc/self/cgroup has a line for each hierarchy: "0::PATH" of v2, "N:CONTROLLERS:PATH"
 * of v1. A host may have both: then v2 has no memory controller, and the limit is v1's.
 * In a container PATH may be the host's and not be mounted: the mounted tree then starts
 * at the container's own group, which the walk to the top reaches.
 */
#include "daemon/base/cgroup.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#define TEXT_BYTES 8192u
#define PATH_BYTES 4096u
#define NO_LIMIT (UINT64_C(1) << 60) /* v1 writes about 2^63 */

/* The number at the start of a file; UINT64_MAX: it has none ("max"). */
static uint64_t file_number(const char *path)
{
	char text[64] = "";
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	uint64_t number;

	if (fd < 0 || read(fd, text, sizeof(text) - 1) <= 0 || text[0] < '0' ||
	    text[0] > '9')
		return UINT64_MAX;
	number = strtoull(text, NULL, 10);
	return number < NO_LIMIT ? number : UINT64_MAX;
}

/* From the group to the top. */
static uint64_t groups_least(const char *mount, char *group, const char *file)
{
	uint64_t least = UINT64_MAX, here;
	char path[2 * PATH_BYTES], *end;

	for (;;) {
		snprintf(path, sizeof(path), "%s%s/%s", mount, group, file);
		here = file_number(path);
		least = here < least ? here : least;
		end = strrchr(group, '/');
		if (!end)
			return least;
		*end = 0;
	}
}

/* Has the list "cpu,memory" this controller? */
static bool has_memory(char *controllers)
{
	const char *word;

	while ((word = strsep(&controllers, ","))) {
		if (strcmp(word, "memory") == 0)
			return true;
	}
	return false;
}

static uint64_t line_limit(char *line, const char *mounts)
{
	char *controllers = strchr(line, ':');
	char *group = controllers ? strchr(++controllers, ':') : NULL;
	char mount[PATH_BYTES];

	if (!group)
		return UINT64_MAX;
	*group++ = 0;
	if (!*controllers) {
		snprintf(mount, sizeof(mount), "%s", mounts);
		return groups_least(mount, group, "memory.max");
	}
	if (!has_memory(controllers))
		return UINT64_MAX;
	snprintf(mount, sizeof(mount), "%s/memory", mounts);
	return groups_least(mount, group, "memory.limit_in_bytes");
}

uint64_t cgroup_memory_limit_in(const char *self, const char *mounts)
{
	char text[TEXT_BYTES] = "", path[PATH_BYTES], *at = text, *line;
	uint64_t least = UINT64_MAX, here;
	cleanup_close int fd = -1;

	snprintf(path, sizeof(path), "%s/cgroup", self);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0 || read(fd, text, sizeof(text) - 1) <= 0)
		return UINT64_MAX;
	while ((line = strsep(&at, "\n"))) {
		here = line_limit(line, mounts);
		least = here < least ? here : least;
	}
	return least;
}

uint64_t cgroup_memory_limit(void)
{
	return cgroup_memory_limit_in("/proc/self", "/sys/fs/cgroup");
}

uint64_t memory_limit(void)
{
	long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
	uint64_t all = pages > 0 && page > 0 ? (uint64_t)pages * (uint64_t)page : 0;
	uint64_t group = cgroup_memory_limit();

	return all && all < group ? all : group;
}
