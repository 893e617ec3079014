/* SPDX-License-Identifier: Apache-2.0 */
/*
 * devices: RDMA ports and GPUs of the machine, and why they are not used. The scan opens
 * adapters and starts the GPU driver, so it runs on a helper. It creates no context and
 * allocates no GPU memory.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/control/commands.h"
#include "daemon/request/commands.h"
#include "daemon/base/context.h"
#include "daemon/session/session.h"
#include "daemon/loop/offload.h"
#include "daemon/transport/transport.h"
#include "daemon/transport/verbs/verbs_look.h"
#include "gpu/gpu.h"

struct looking {
	struct offload_job job;
	struct request *req;
	struct verbs_look rdma;
	struct err gpu;	    /* why no GPU is usable; ERR_OK: GPUs are usable */
	uint32_t gpus_used; /* bit n: device n */
	char kernels[192];
};

/* Both may block while a context is being created. */
static void look_at_gpus(struct looking *looking, struct gpu *gpu)
{
	gpu_module_text(gpu, looking->kernels, sizeof(looking->kernels));
	for (unsigned int i = 0; i < gpu->device_count; i++)
		if (gpu_device_used(&gpu->devices[i]))
			looking->gpus_used |= UINT32_C(1) << i;
}

static void look_work(struct offload_job *job)
{
	struct looking *looking = container_of(job, struct looking, job);
	struct gpu *gpu = looking->req->kvd->gpu;

	verbs_look(&looking->rdma);
	/* starts the driver, which is slow; without a context it uses no GPU memory */
	if (!gpu)
		err_set(&looking->gpu, ERR_REQUIRE, "this daemon does not use GPUs");
	else if (gpu_start(gpu) < 0)
		err_take(&looking->gpu);
	else
		look_at_gpus(looking, gpu);
}

static const struct transport *verbs_of(const struct kvd *kvd)
{
	for (unsigned int i = 0; i < kvd->transport_count; i++)
		if (kvd->transports[i] && !strcmp(kvd->transports[i]->ops->name, "verbs"))
			return kvd->transports[i];
	return NULL;
}

static bool add_gids(cJSON *json, const struct verbs_look_port *port)
{
	cJSON *list = cJSON_AddArrayToObject(json, "gids");

	for (uint32_t i = 0; list && i < port->gid_count; i++) {
		cJSON *gid = cJSON_CreateObject();

		if (!gid || !cJSON_AddItemToArray(list, gid) ||
		    !cJSON_AddNumberToObject(gid, "index", port->gids[i].index) ||
		    !cJSON_AddStringToObject(gid, "gid", port->gids[i].gid) ||
		    !cJSON_AddStringToObject(gid, "type", port->gids[i].type))
			return false;
	}
	return list;
}

static bool add_port(cJSON *list, const struct kvd *kvd,
		     const struct verbs_look_port *port)
{
	cJSON *json = cJSON_CreateObject();
	char use[160];
	bool used = verbs_look_use(port, kvd->config, verbs_of(kvd), use, sizeof(use));

	return json && cJSON_AddItemToArray(list, json) &&
	       cJSON_AddStringToObject(json, "device", port->device) &&
	       cJSON_AddNumberToObject(json, "port", port->port) &&
	       cJSON_AddStringToObject(json, "state", port->state) &&
	       cJSON_AddStringToObject(json, "link", port->link) &&
	       cJSON_AddStringToObject(json, "rate", port->rate) &&
	       cJSON_AddNumberToObject(json, "mtu", port->mtu) &&
	       cJSON_AddNumberToObject(json, "node", port->node) &&
	       cJSON_AddStringToObject(json, "interface", port->interface) &&
	       cJSON_AddStringToObject(json, "address", port->address) &&
	       cJSON_AddBoolToObject(json, "used", used) &&
	       cJSON_AddStringToObject(json, "use", use) && add_gids(json, port);
}

static bool add_rdma(cJSON *result, const struct kvd *kvd, const struct verbs_look *look)
{
	cJSON *list = cJSON_AddArrayToObject(result, "rdma");
	bool filled = list;

	for (uint32_t i = 0; filled && i < look->count; i++)
		filled = add_port(list, kvd, &look->ports[i]);
	return filled && (look->err.code == ERR_OK ||
			  cJSON_AddStringToObject(result, "rdma_error", look->err.text));
}

static bool add_gpu(cJSON *list, const struct gpu_device *device, bool used)
{
	cJSON *json = cJSON_CreateObject();

	return json && cJSON_AddItemToArray(list, json) &&
	       cJSON_AddStringToObject(json, "gpu", device->id) &&
	       cJSON_AddStringToObject(json, "pci", device->pci) &&
	       cJSON_AddStringToObject(json, "name", device->name) &&
	       cJSON_AddNumberToObject(json, "bytes", (double)device->bytes) &&
	       cJSON_AddNumberToObject(json, "compute", device->compute) &&
	       cJSON_AddBoolToObject(json, "allowed", device->allowed) &&
	       cJSON_AddBoolToObject(json, "used", used) &&
	       cJSON_AddBoolToObject(json, "failed", gpu_device_broken(device));
}

/* Features of the driver; for a missing one, the first function that it lacks. */
static bool add_features(cJSON *result, const struct cudrv *drv, const char *kernels)
{
	cJSON *json = cJSON_AddObjectToObject(result, "gpu_features");
	bool filled = json && cJSON_AddNumberToObject(result, "cuda", drv->version);

	for (enum cudrv_group group = 0; filled && group < CUDRV_GROUPS; group++) {
		char text[192] = "yes";

		if (group == CUDRV_KERNELS)
			snprintf(text, sizeof(text), "%s", kernels);
		else if (!drv->has[group])
			snprintf(text, sizeof(text), "no: %s is missing",
				 drv->missing[group]);
		filled = cJSON_AddStringToObject(json, cudrv_group_name(group), text);
	}
	return filled;
}

static bool add_gpus(cJSON *result, struct gpu *gpu, const struct looking *looking)
{
	const struct err *err = &looking->gpu;
	cJSON *list = cJSON_AddArrayToObject(result, "gpus");
	bool filled = list;

	if (err->code != ERR_OK)
		return filled && cJSON_AddStringToObject(result, "gpu_error", err->text);
	for (unsigned int i = 0; filled && i < gpu->device_count; i++)
		filled = add_gpu(list, &gpu->devices[i], looking->gpus_used >> i & 1);
	return filled && add_features(result, &gpu->drv, looking->kernels);
}

static void look_done(struct offload_job *job)
{
	struct looking *looking = container_of(job, struct looking, job);
	struct request *req = looking->req;
	cJSON *result = request_result();

	if (!result ||
	    request_finish(req, result,
			   add_rdma(result, req->kvd, &looking->rdma) &&
				   add_gpus(result, req->kvd->gpu, looking)) < 0)
		request_fail_last(req);
	mem_free(looking);
}

static int devices_run(struct request *req)
{
	struct looking *looking = mem_zalloc(sizeof(*looking));

	if (!looking)
		return err_pass(-ENOMEM);
	looking->req = req;
	looking->job.work = look_work;
	looking->job.done = look_done;
	looking->job.principal = session_principal(req->session);
	offload_submit(req->kvd->offload, &looking->job);
	return 0;
}

const struct command device_commands[] = {
	{"devices",
	 "Show the RDMA ports and GPUs of the machine, and whether they are used", NULL,
	 0, devices_run,
	 "rdma [{device, port, state, link, rate, mtu, node, interface, address, used, "
	 "use (the rail, or why it is not used), gids [{index, gid, type}]}]; "
	 "rdma_error if there is no device or one cannot be opened; gpus [{gpu, pci, "
	 "name, bytes, compute, allowed, used, failed}]; cuda (13000 means 13.0); "
	 "gpu_features {name: yes, or no and why}; gpu_error if there is no driver"},
	{.name = NULL},
};
