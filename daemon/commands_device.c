/* SPDX-License-Identifier: Apache-2.0 */
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/commands.h"
#include "daemon/kvd.h"
#include "daemon/offload.h"
#include "daemon/transport/transport.h"
#include "daemon/transport/verbs_look.h"

struct looking {
	struct offload_job job;
	struct request *req;
	struct verbs_look rdma;
};

static void look_work(struct offload_job *job)
{
	verbs_look(&container_of(job, struct looking, job)->rdma);
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

static bool add_port(cJSON *list, const struct kvd *kvd, const struct verbs_look_port *port)
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

static void look_done(struct offload_job *job)
{
	struct looking *looking = container_of(job, struct looking, job);
	struct request *req = looking->req;
	cJSON *result = request_result();

	if (!result ||
	    request_finish(req, result, add_rdma(result, req->kvd, &looking->rdma)) < 0)
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
	offload_submit(req->kvd->offload, &looking->job);
	return 0;
}

const struct command device_commands[] = {
	{"devices", "Show the machine's RDMA ports, and whether they are used", NULL, 0,
	 devices_run,
	 "rdma [{device, port, state, link, rate, mtu, node, interface, address, used, use "
	 "(as which rail, or why not), gids [{index, gid, type}]}]; rdma_error when there is "
	 "none or one does not open"},
	{.name = NULL},
};
