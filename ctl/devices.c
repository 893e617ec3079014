/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "ctl/ctl.h"
#include "ctl/table.h"

static void port_row(struct table *table, const cJSON *port)
{
	table_cellf(table, "%s:%.0f", ctl_str(port, "device", "?"),
		    ctl_num(port, "port"));
	ctl_cells(table, port, "state rate mtu");
	if (ctl_num(port, "node") < 0)
		table_cell(table, NULL);
	else
		table_cellf(table, "%.0f", ctl_num(port, "node"));
	ctl_cells(table, port, "address used use");
}

static int put_ports(const cJSON *ports)
{
	const cJSON *port, *gid;
	int r;

	if (cJSON_GetArraySize(ports) == 0)
		return CTL_OK;
	r = ctl_print_list(ports, "PORT STATE RATE >MTU >NODE ADDRESS USED AS", port_row);
	cJSON_ArrayForEach(port, ports) {
		cJSON_ArrayForEach(gid, ctl_list(port, "gids"))
			printf("%s:%.0f gid %.0f %s %s\n", ctl_str(port, "device", "?"),
			       ctl_num(port, "port"), ctl_num(gid, "index"),
			       ctl_str(gid, "gid", "?"), ctl_str(gid, "type", "?"));
	}
	return r;
}

static void gpu_row(struct table *table, const cJSON *gpu)
{
	ctl_cells(table, gpu, "gpu pci name");
	table_cellf(table, "%.1f", ctl_num(gpu, "bytes") / (1 << 30));
	ctl_cells(table, gpu, "allowed used");
	table_cell(table, ctl_true(gpu, "failed") ? "failed" : "ok");
}

static int put_gpus(const cJSON *gpus, const cJSON *features)
{
	const cJSON *feature;
	int r;

	if (cJSON_GetArraySize(gpus) == 0)
		return CTL_OK;
	r = ctl_print_list(gpus, "GPU PCI NAME >GIB ALLOWED USED STATE", gpu_row);
	cJSON_ArrayForEach(feature, features)
		printf("feature %s: %s\n", feature->string, feature->valuestring);
	return r;
}

static int put_devices(const cJSON *devices)
{
	int r = put_ports(ctl_list(devices, "rdma"));

	if (ctl_str(devices, "rdma_error", NULL))
		printf("%s\n", ctl_str(devices, "rdma_error", ""));
	if (r == CTL_OK)
		r = put_gpus(ctl_list(devices, "gpus"),
			     ctl_list(devices, "gpu_features"));
	if (ctl_str(devices, "gpu_error", NULL))
		printf("%s\n", ctl_str(devices, "gpu_error", ""));
	return r;
}

int ctl_run_devices(struct ctl *ctl)
{
	return ctl_show(ctl, "devices", NULL, put_devices);
}
