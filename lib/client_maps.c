/* SPDX-License-Identifier: Apache-2.0 */
#include "lib/client_adopt.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "lib/client.h"

/* "7f12-7f34 rw-p 00001000 00:01 1234   /memfd:name (deleted)" */
static bool area_parse(const char *line, struct maps_area *area_p)
{
	char perms[5] = "";
	int name_at = 0;
	size_t len;

	*area_p = (struct maps_area){0};
	if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %*x:%*x %" SCNu64 " %n",
		   &area_p->begin, &area_p->end, perms, &area_p->offset, &area_p->inode,
		   &name_at) < 5 ||
	    strlen(perms) != 4 || name_at == 0)
		return false;
	area_p->readable = perms[0] == 'r';
	area_p->writable = perms[1] == 'w';
	area_p->executable = perms[2] == 'x';
	area_p->shared = perms[3] == 's';
	len = strcspn(line + name_at, "\n");
	if (len >= sizeof(area_p->name))
		len = sizeof(area_p->name) - 1;
	memcpy(area_p->name, line + name_at, len);
	return true;
}

int maps_each(uint64_t begin, uint64_t end,
	      int (*fn)(void *arg, const struct maps_area *area), void *arg)
{
	FILE *maps = fopen("/proc/self/maps", "re");
	char line[512];
	bool whole = true; /* `line` starts at a line of the file */
	int r = 0;

	if (!maps) {
		client_error_set(client_error_thread(), KVD_E_IO,
				 "/proc/self/maps: %s; adopting memory needs it",
				 strerror(errno));
		return -KVD_E_IO;
	}
	while (r == 0 && fgets(line, sizeof(line), maps)) {
		struct maps_area area;
		bool begins = whole;

		whole = strchr(line, '\n') != NULL;
		if (!begins || !area_parse(line, &area) || area.end <= begin)
			continue;
		if (area.begin >= end)
			break;
		r = fn(arg, &area);
	}
	fclose(maps);
	return r;
}
