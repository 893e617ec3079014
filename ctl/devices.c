/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>

#include "ctl/ctl.h"
#include "ctl/table.h"

static void port_row(struct table *table, const cJSON *port)
{
	table_cellf(table, "%s:%.0f", ctl_str(port, "device", "?"),
		    ctl_num(port, "port"));
	table_cell(table, ctl_str(port, "state", NULL));
	table_cell(table, ctl_str(port, "rate", NULL));
	table_cellf(table, "%.0f", ctl_num(port, "mtu"));
	if (ctl_num(port, "node") < 0)
		table_cell(table, NULL);
	else
		table_cellf(table, "%.0f", ctl_num(port, "node"));
	table_cell(table,
		   *ctl_str(port, "address", "") ? ctl_str(port, "address", "") : NULL);
	table_cell(table, cJSON_IsTrue(ctl_list(port, "used")) ? "yes" : "no");
	table_cell(table, ctl_str(port, "use", NULL));
}

static int put_ports(const cJSON *ports)
{
	const cJSON *port, *gid;
	struct table *table;

	if (cJSON_GetArraySize(ports) == 0)
		return CTL_OK;
	if (table_new("PORT STATE RATE >MTU >NODE ADDRESS USED AS", &table) < 0)
		return CTL_ERROR;
	cJSON_ArrayForEach(port, ports)
		port_row(table, port);
	table_print(table, stdout);
	table_free(table);
	cJSON_ArrayForEach(port, ports) {
		cJSON_ArrayForEach(gid, ctl_list(port, "gids"))
			printf("%s:%.0f gid %.0f %s %s\n", ctl_str(port, "device", "?"),
			       ctl_num(port, "port"), ctl_num(gid, "index"),
			       ctl_str(gid, "gid", "?"), ctl_str(gid, "type", "?"));
	}
	return CTL_OK;
}

static int put_gpus(const cJSON *gpus, const cJSON *features)
{
	const cJSON *gpu, *feature;
	struct table *table;

	if (cJSON_GetArraySize(gpus) == 0)
		return CTL_OK;
	if (table_new("GPU PCI NAME >GIB ALLOWED USED STATE", &table) < 0)
		return CTL_ERROR;
	cJSON_ArrayForEach(gpu, gpus) {
		table_cell(table, ctl_str(gpu, "gpu", NULL));
		table_cell(table, ctl_str(gpu, "pci", NULL));
		table_cell(table, ctl_str(gpu, "name", NULL));
		table_cellf(table, "%.1f", ctl_num(gpu, "bytes") / (1 << 30));
		table_cell(table, cJSON_IsTrue(ctl_list(gpu, "allowed")) ? "yes" : "no");
		table_cell(table, cJSON_IsTrue(ctl_list(gpu, "used")) ? "yes" : "no");
		table_cell(table,
			   cJSON_IsTrue(ctl_list(gpu, "failed")) ? "failed" : "ok");
	}
	table_print(table, stdout);
	table_free(table);
	cJSON_ArrayForEach(feature, features)
		printf("feature %s: %s\n", feature->string, feature->valuestring);
	return CTL_OK;
}

int ctl_run_devices(struct ctl *ctl)
{
	cJSON *devices;
	int r = ctl_ask(ctl, "devices", NULL, &devices);

	if (r)
		return r;
	if (ctl->json) {
		ctl_print_json(devices);
	} else {
		r = put_ports(ctl_list(devices, "rdma"));
		if (ctl_str(devices, "rdma_error", NULL))
			printf("%s\n", ctl_str(devices, "rdma_error", ""));
		if (r == CTL_OK)
			r = put_gpus(ctl_list(devices, "gpus"),
				     ctl_list(devices, "gpu_features"));
		if (ctl_str(devices, "gpu_error", NULL))
			printf("%s\n", ctl_str(devices, "gpu_error", ""));
	}
	cJSON_Delete(devices);
	return r;
}
