/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The distance of adapters to memory, from sysfs: for host memory the NUMA node of its
 * first page, for a GPU's the path over the PCI bus. A transfer prefers the rails that
 * are nearest to its own side's memory; the other side's are paired with them by number
 * (verbs_cm.c).
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "gpu/gpu.h"
#include "gpu/import.h"

#define PATH_BYTES 256

void verbs_topo_line(const struct verbs_lib *lib, const char *device, const char *file,
		     char *buf, size_t size)
{
	char path[PATH_BYTES];
	FILE *in;

	snprintf(buf, size, "?");
	snprintf(path, sizeof(path), "%s/class/infiniband/%s/%s", lib->sysfs, device,
		 file);
	in = fopen(path, "re");
	if (!in)
		return;
	if (fgets(buf, (int)size, in))
		buf[strcspn(buf, "\n")] = '\0';
	fclose(in);
}

/* -1: not known. */
static int node_read(const char *path)
{
	FILE *in = fopen(path, "re");
	int node = -1;

	if (in && fscanf(in, "%d", &node) != 1)
		node = -1;
	if (in)
		fclose(in);
	return node < 0 ? -1 : node;
}

int verbs_topo_node(const struct verbs_lib *lib, const char *device)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof(path), "%s/class/infiniband/%s/device/numa_node",
		 lib->sysfs, device);
	return node_read(path);
}

/* ---- the PCI bus ---- */

/* The path from a root complex to a device: "pci0000:3a/0000:3a:00.0/0000:3b:00.0". */
static bool pci_way(const char *link, char way[PATH_MAX])
{
	char full[PATH_MAX];
	const char *at;

	if (!realpath(link, full))
		return false;
	at = strstr(full, "/pci");
	if (!at)
		return false;
	snprintf(way, PATH_MAX, "%s/", at + 1);
	return true;
}

/* Bridges that two paths have in common; the first one is the root complex. */
static unsigned int shared_steps(const char *a, const char *b)
{
	unsigned int steps = 0;

	for (; *a && *a == *b; a++, b++)
		steps += *a == '/';
	return steps;
}

unsigned int verbs_topo_pci(const struct verbs_lib *lib, const char *pci,
			    const char *device)
{
	char path[PATH_BYTES], near[PATH_MAX], far[PATH_MAX];
	unsigned int shared;
	int node;

	snprintf(path, sizeof(path), "%s/bus/pci/devices/%s/numa_node", lib->sysfs, pci);
	node = node_read(path);
	snprintf(path, sizeof(path), "%s/bus/pci/devices/%s", lib->sysfs, pci);
	if (pci_way(path, near)) {
		snprintf(path, sizeof(path), "%s/class/infiniband/%s/device", lib->sysfs,
			 device);
		shared = pci_way(path, far) ? shared_steps(near, far) : 0;
		if (shared) /* a root port has one device; below a switch they meet */
			return shared > 1 ? 0 : 1;
	}
	return node >= 0 && node == verbs_topo_node(lib, device) ? 2 : 3;
}

/* ---- rails ---- */

uint32_t verbs_topo_near(const struct verbs_transport *transport,
			 const struct memory *memory)
{
	/* memory known only as a dma-buf has no location */
	const char *pci = memory->kind == MEMORY_DEVICE && memory->gpu
				  ? memory->gpu->device->pci
				  : NULL;
	unsigned int best = UINT_MAX;
	uint32_t near = 0;
	int node = -1;

	if (transport->rail_count < 2 || (!memory->base && !pci))
		return UINT32_MAX;
	if (!pci)
		node = transport->lib->node_of(memory->base);
	for (uint32_t i = 0; i < transport->rail_count; i++) {
		const struct verbs_rail *rail = &transport->rails[i];
		unsigned int far =
			pci ? verbs_topo_pci(transport->lib, pci, rail->device->name)
			    : node >= 0 && rail->node >= 0 && rail->node != node;

		if (far < best)
			near = 0;
		if (far <= best) {
			best = far;
			near |= 1u << i;
		}
	}
	return near;
}
