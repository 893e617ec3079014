/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A list of the machine's RDMA ports. A port is used when it is a rail of the open
 * backend; if not, the reason is the first of these: the backend is not open, the port is
 * not active, no interface has an address that is one of its GIDs (so the connection
 * manager, which finds ports by address, can never find it), or the configuration does
 * not name it.
 */
#include "daemon/transport/verbs/verbs_look.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <string.h>

#include "daemon/config/config.h"
#include "daemon/transport/verbs/verbs_impl.h"

static const char *state_text(enum ibv_port_state state)
{
	switch (state) {
	case IBV_PORT_ACTIVE:
		return "active";
	case IBV_PORT_DOWN:
		return "down";
	case IBV_PORT_INIT:
		return "initializing";
	case IBV_PORT_ARMED:
		return "armed";
	default:
		return "unknown";
	}
}

/* The interface with this GID as address; a routed address before a link-local one. */
static void find_address(const struct ifaddrs *list, const union ibv_gid *gid,
			 struct verbs_look_port *port)
{
	for (; list && (!port->address[0] || !strncmp(port->address, "[fe80", 5));
	     list = list->ifa_next) {
		struct sockaddr_storage address = {0};
		int family = list->ifa_addr ? list->ifa_addr->sa_family : AF_UNSPEC;

		if (list->ifa_flags & IFF_LOOPBACK ||
		    (family != AF_INET && family != AF_INET6))
			continue;
		memcpy(&address, list->ifa_addr,
		       family == AF_INET ? sizeof(struct sockaddr_in)
					 : sizeof(struct sockaddr_in6));
		if (!verbs_gid_is(gid, &address))
			continue;
		verbs_address_text(&address, port->address, sizeof(port->address));
		snprintf(port->interface, sizeof(port->interface), "%s", list->ifa_name);
	}
}

static void look_gids(const struct verbs_lib *lib, struct ibv_context *context, int count,
		      const struct ifaddrs *list, struct verbs_look_port *port)
{
	static const union ibv_gid none;

	for (int i = 0; i < count && port->gid_count < VERBS_LOOK_GIDS; i++) {
		struct verbs_look_gid *at = &port->gids[port->gid_count];
		union ibv_gid gid;
		char file[64];

		if (lib->query_gid(context, port->port, i, &gid) != 0 ||
		    !memcmp(&gid, &none, sizeof(gid)))
			continue;
		port->gid_count++;
		at->index = i;
		inet_ntop(AF_INET6, gid.raw, at->gid, sizeof(at->gid));
		snprintf(file, sizeof(file), "ports/%u/gid_attrs/types/%d", port->port,
			 i);
		verbs_topo_line(lib, port->device, file, at->type, sizeof(at->type));
		find_address(list, &gid, port);
	}
}

static void look_port(const struct verbs_lib *lib, struct ibv_context *context,
		      uint8_t number, const struct ifaddrs *list,
		      struct verbs_look_port *port)
{
	struct ibv_port_attr attr = {0};
	char file[32];

	*port = (struct verbs_look_port){.port = number};
	snprintf(port->device, sizeof(port->device), "%s",
		 lib->get_device_name(context->device));
	if (lib->query_port(context, number, &attr) != 0)
		attr.state = IBV_PORT_NOP;
	snprintf(port->state, sizeof(port->state), "%s", state_text(attr.state));
	snprintf(port->link, sizeof(port->link), "%s",
		 attr.link_layer == IBV_LINK_LAYER_ETHERNET	? "Ethernet"
		 : attr.link_layer == IBV_LINK_LAYER_INFINIBAND ? "InfiniBand"
								: "unknown");
	port->mtu = attr.active_mtu ? 128u << attr.active_mtu : 0;
	port->node = verbs_topo_node(lib, port->device);
	snprintf(file, sizeof(file), "ports/%u/rate", number);
	verbs_topo_line(lib, port->device, file, port->rate, sizeof(port->rate));
	look_gids(lib, context, attr.gid_tbl_len, list, port);
}

static void look_device(const struct verbs_lib *lib, struct ibv_device *device,
			const struct ifaddrs *list, struct verbs_look *look)
{
	struct ibv_context *context = lib->open_device(device);
	struct ibv_device_attr attr;

	if (!context || lib->query_device(context, &attr) != 0) {
		err_set(&look->err, ERR_REQUIRE,
			"verbs: %s cannot be opened (is /dev/infiniband/uverbs* "
			"allowed?)",
			lib->get_device_name(device));
		if (context)
			lib->close_device(context);
		return;
	}
	for (uint8_t i = 1; i <= attr.phys_port_cnt && look->count < VERBS_LOOK_PORTS;
	     i++)
		look_port(lib, context, i, list, &look->ports[look->count++]);
	lib->close_device(context);
}

void verbs_look(struct verbs_look *look)
{
	const struct verbs_lib *lib;
	struct ibv_device **devices;
	struct ifaddrs *list = NULL;
	int count = 0;

	*look = (struct verbs_look){0};
	if (verbs_lib_load(&lib) < 0) {
		err_take(&look->err);
		return;
	}
	if (lib->addresses(&list) != 0)
		list = NULL;
	devices = lib->get_device_list(&count);
	for (int i = 0; devices && i < count; i++)
		look_device(lib, devices[i], list, look);
	if (!devices || count == 0)
		err_set(&look->err, ERR_REQUIRE, "verbs: no RDMA device on this machine");
	if (devices)
		lib->free_device_list(devices);
	if (list)
		lib->free_addresses(list);
}

bool verbs_look_use(const struct verbs_look_port *port, const struct config *config,
		    const struct transport *base, char *why, size_t size)
{
	const struct verbs_transport *transport =
		base ? container_of(base, const struct verbs_transport, net.base) : NULL;

	for (uint32_t i = 0; transport && i < transport->rail_count; i++) {
		const struct verbs_rail *rail = &transport->rails[i];

		if (rail->port != port->port ||
		    strcmp(rail->device->name, port->device) != 0)
			continue;
		snprintf(why, size, "rail %u%s", i,
			 rail->device->fatal ? ", but the device was removed"
			 : rail->down	     ? ", but the port is down"
					     : "");
		return true;
	}
	if (strcmp(port->state, "active") != 0)
		snprintf(why, size, "the port is %s", port->state);
	else if (!port->address[0])
		snprintf(why, size,
			 "no interface has an address that is one of its GIDs");
	else if (!transport)
		snprintf(why, size, "the transport verbs is not open");
	else if (config->verbs_rails[0])
		snprintf(why, size, "verbs_rails does not name it");
	else
		snprintf(why, size,
			 "listen = %s is another address, and verbs_rails is empty",
			 config->listen);
	return false;
}
