/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/memory/numa.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/mem.h"

static bool number_parse(const char **at, unsigned long *out_p)
{
	char *end;

	if (**at < '0' || **at > '9')
		return false;
	*out_p = strtoul(*at, &end, 10);
	*at = end;
	return *out_p < CPU_SETSIZE;
}

bool numa_list_parse(const char *text, cpu_set_t *cpus_p)
{
	unsigned long first, last;

	CPU_ZERO(cpus_p);
	while (*text && *text != '\n') {
		if (!number_parse(&text, &first))
			return false;
		last = first;
		if (*text == '-') {
			text++;
			if (!number_parse(&text, &last) || last < first)
				return false;
		}
		for (unsigned long cpu = first; cpu <= last; cpu++)
			CPU_SET(cpu, cpus_p);
		if (*text == ',')
			text++;
		else if (*text && *text != '\n')
			return false;
	}
	return true;
}

static bool list_read(const char *path, cpu_set_t *cpus_p)
{
	cleanup_close int fd = open(path, O_RDONLY | O_CLOEXEC);
	char text[4096];
	ssize_t n = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);

	if (n < 0)
		return false;
	text[n] = '\0';
	return numa_list_parse(text, cpus_p);
}

/* Node numbers have gaps, and a node may have memory only. */
void numa_read(const char *root, const cpu_set_t *allowed, struct numa *numa_p)
{
	char path[256];
	cpu_set_t online, cpus;

	numa_p->count = 0;
	snprintf(path, sizeof(path), "%s/online", root);
	if (!list_read(path, &online))
		return;
	for (int id = 0; id < CPU_SETSIZE && numa_p->count < NUMA_NODES_MAX; id++) {
		if (!CPU_ISSET(id, &online))
			continue;
		snprintf(path, sizeof(path), "%s/node%d/cpulist", root, id);
		if (!list_read(path, &cpus))
			continue;
		CPU_AND(&cpus, &cpus, allowed);
		if (CPU_COUNT(&cpus) == 0)
			continue;
		numa_p->nodes[numa_p->count++] = (struct numa_node){id, cpus};
	}
}

int numa_node_of(const struct numa *numa, const void *address)
{
	int id = -1;

	if (syscall(SYS_get_mempolicy, &id, NULL, 0, address, MPOL_F_NODE | MPOL_F_ADDR) <
	    0)
		return -1;
	for (unsigned int i = 0; i < numa->count; i++)
		if (numa->nodes[i].id == id)
			return (int)i;
	return -1;
}
