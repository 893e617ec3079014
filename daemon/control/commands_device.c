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
#include "proto/out.h"
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

static void look_work(struct offload_job *job)
{
	struct looking *looking = container_of(job, struct looking, job);
	struct gpu *gpu = looking->req->kvd->gpu;

	verbs_look(&looking->rdma);
	/* starts the driver, which is slow; without a context it uses no GPU memory */
	if (!gpu)
		err_set(&looking->gpu, ERR_REQUIRE, "this daemon does not use GPUs");
	else if (gpu_start(gpu) < 0) {
		err_take(&looking->gpu);
	} else {
		/* both may block while a context is being created */
		gpu_module_text(gpu, looking->kernels, sizeof(looking->kernels));
		for (unsigned int i = 0; i < gpu->device_count; i++)
			if (gpu_device_used(&gpu->devices[i]))
				looking->gpus_used |= UINT32_C(1) << i;
	}
}

static const struct transport *verbs_of(const struct kvd *kvd)
{
	for (unsigned int i = 0; i < kvd->transport_count; i++)
		if (kvd->transports[i] && !strcmp(kvd->transports[i]->ops->name, "verbs"))
			return kvd->transports[i];
	return NULL;
}

static void put_port(struct text *out, const struct kvd *kvd,
		     const struct verbs_look_port *port)
{
	char use[160];
	bool used = verbs_look_use(port, kvd->config, verbs_of(kvd), use, sizeof(use));

	out_object(out, NULL);
	out_text(out, "device", port->device);
	out_number(out, "port", port->port);
	out_text(out, "state", port->state);
	out_text(out, "link", port->link);
	out_text(out, "rate", port->rate);
	out_number(out, "mtu", port->mtu);
	out_number(out, "node", port->node);
	out_text(out, "interface", port->interface);
	out_text(out, "address", port->address);
	out_bool(out, "used", used);
	out_text(out, "use", use);
	out_array(out, "gids");
	for (uint32_t i = 0; i < port->gid_count; i++) {
		out_object(out, NULL);
		out_number(out, "index", port->gids[i].index);
		out_text(out, "gid", port->gids[i].gid);
		out_text(out, "type", port->gids[i].type);
		out_close(out, '}');
	}
	out_close(out, ']');
	out_close(out, '}');
}

static void put_rdma(struct text *out, const struct kvd *kvd,
		     const struct verbs_look *look)
{
	out_array(out, "rdma");
	for (uint32_t i = 0; i < look->count; i++)
		put_port(out, kvd, &look->ports[i]);
	out_close(out, ']');
	if (look->err.code != ERR_OK)
		out_text(out, "rdma_error", look->err.text);
}

static void put_gpu(struct text *out, const struct gpu_device *device, bool used)
{
	out_object(out, NULL);
	out_text(out, "gpu", device->id);
	out_text(out, "pci", device->pci);
	out_text(out, "name", device->name);
	out_number(out, "bytes", device->bytes);
	out_number(out, "compute", device->compute);
	out_bool(out, "allowed", device->allowed);
	out_bool(out, "used", used);
	out_bool(out, "failed", gpu_device_broken(device));
	out_close(out, '}');
}

/* Features of the driver; for a missing one, the first function that it lacks. */
static void put_features(struct text *out, const struct cudrv *drv, const char *kernels)
{
	out_number(out, "cuda", drv->version);
	out_object(out, "gpu_features");
	for (enum cudrv_group group = 0; group < CUDRV_GROUPS; group++) {
		char text[192] = "yes";

		if (group == CUDRV_KERNELS)
			snprintf(text, sizeof(text), "%s", kernels);
		else if (!drv->has[group])
			snprintf(text, sizeof(text), "no: %s is missing",
				 drv->missing[group]);
		out_text(out, cudrv_group_name(group), text);
	}
	out_close(out, '}');
}

static void put_gpus(struct text *out, struct gpu *gpu, const struct looking *looking)
{
	bool usable = looking->gpu.code == ERR_OK;

	out_array(out, "gpus");
	for (unsigned int i = 0; usable && i < gpu->device_count; i++)
		put_gpu(out, &gpu->devices[i], looking->gpus_used >> i & 1);
	out_close(out, ']');
	if (usable)
		put_features(out, &gpu->drv, looking->kernels);
	else
		out_text(out, "gpu_error", looking->gpu.text);
}

static void look_done(struct offload_job *job)
{
	struct looking *looking = container_of(job, struct looking, job);
	struct request *req = looking->req;
	struct reply reply;
	struct text *out = reply_begin(&reply, req);

	put_rdma(out, req->kvd, &looking->rdma);
	put_gpus(out, req->kvd->gpu, looking);
	reply_end(&reply);
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
