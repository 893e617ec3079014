/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Devices and rails.
 *
 * A rail is one port of an adapter with its own address; the connection manager finds the
 * adapter by that address (rdma_bind_addr), and with it the GID: for RoCE the entry of
 * the GID table that is this very address, version 2 where the port has both, because
 * version 1 is not routed. So no GID index is configured anywhere, and `health` reports
 * the chosen one.
 *
 * Which ports: those that verbs_rails names, by device, device:port, interface or
 * address, in its order. Empty: the one that has the address of `listen`; all,
 * when that is a wildcard. Never a loopback address: the kernel would bind that to
 * any adapter.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/config/config.h"

#define BACKLOG 256

void verbs_address_text(const struct sockaddr_storage *address, char *buf, size_t size)
{
	char text[INET6_ADDRSTRLEN] = "?";
	bool v6 = address->ss_family == AF_INET6;
	const void *at =
		v6 ? (const void *)&((const struct sockaddr_in6 *)(const void *)address)
				->sin6_addr
		   : (const void *)&((const struct sockaddr_in *)(const void *)address)
				->sin_addr;

	inet_ntop(address->ss_family, at, text, sizeof(text));
	snprintf(buf, size, v6 ? "[%s]" : "%s", text);
}

/* ---- the description of a port, for operators ---- */

bool verbs_gid_is(const union ibv_gid *gid, const struct sockaddr_storage *address)
{
	static const uint8_t mapped[12] = {[10] = 0xff, [11] = 0xff};

	if (address->ss_family == AF_INET6)
		return !memcmp(
			gid->raw,
			&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr,
			16);
	return !memcmp(gid->raw, mapped, sizeof(mapped)) &&
	       !memcmp(gid->raw + 12,
		       &((const struct sockaddr_in *)(const void *)address)->sin_addr, 4);
}

/* The entry that the connection manager uses: this address, RoCE v2 before v1. */
static int gid_index(const struct verbs_rail *rail, int count, char *type, size_t size)
{
	const struct verbs_lib *lib = rail->device->transport->lib;
	char file[64];
	int found = -1;

	snprintf(type, size, "no GID");
	for (int i = 0; i < count; i++) {
		union ibv_gid gid;

		if (lib->query_gid(rail->device->context, rail->port, i, &gid) != 0 ||
		    !verbs_gid_is(&gid, &rail->address))
			continue;
		found = i;
		snprintf(file, sizeof(file), "ports/%u/gid_attrs/types/%d", rail->port,
			 i);
		verbs_topo_line(lib, rail->device->name, file, type, size);
		if (strstr(type, "v2"))
			break;
	}
	return found;
}

static void verbs_dev_describe(struct verbs_rail *rail)
{
	struct verbs_device *device = rail->device;
	struct ibv_port_attr attr = {0};
	char address[64], type[24], rate[40], file[32];

	device->transport->lib->query_port(device->context, rail->port, &attr);
	rail->down = attr.state != IBV_PORT_ACTIVE;
	rail->gid = gid_index(rail, attr.gid_tbl_len, type, sizeof(type));
	verbs_address_text(&rail->address, address, sizeof(address));
	snprintf(file, sizeof(file), "ports/%u/rate", rail->port);
	verbs_topo_line(device->transport->lib, device->name, file, rate, sizeof(rate));
	rail->node = verbs_topo_node(device->transport->lib, device->name);
	snprintf(rail->text, sizeof(rail->text),
		 "%.20s:%u %.40s gid %d (%.12s) mtu %u %.24s node %d%s", device->name,
		 rail->port, address, rail->gid, type, 128u << attr.active_mtu, rate,
		 rail->node, rail->down ? " DOWN" : "");
}

/* ---- opening ---- */

int verbs_set_nonblocking(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0)
		return err_raise_errno(errno, "verbs: fcntl");
	return 0;
}

static int device_start(struct verbs_device *device)
{
	struct verbs_transport *transport = device->transport;
	const struct verbs_lib *lib = transport->lib;
	struct loop *loop = transport->net.base.env.loop;
	int r;

	if (lib->query_device(device->context, &device->attr) != 0)
		return err_raise_errno(errno, "verbs: %s: query", device->name);
	device->pd = lib->alloc_pd(device->context);
	if (!device->pd)
		return err_raise_errno(errno, "verbs: %s: protection domain",
				       device->name);
	device->channel = lib->create_comp_channel(device->context);
	if (!device->channel)
		return err_raise_errno(errno, "verbs: %s: completion channel",
				       device->name);
	r = verbs_set_nonblocking(device->channel->fd);
	if (r == 0)
		r = verbs_set_nonblocking(device->context->async_fd);
	if (r < 0)
		return err_pass(r);
	loop_fd_init(&device->cq_watch, loop, device->channel->fd, verbs_on_cq);
	loop_fd_init(&device->async_watch, loop, device->context->async_fd,
		     verbs_on_async);
	r = loop_fd_set(&device->cq_watch, LOOP_READ);
	if (r == 0)
		r = loop_fd_set(&device->async_watch, LOOP_READ);
	return err_pass(r);
}

static int device_of(struct verbs_transport *transport, struct ibv_context *context,
		     struct verbs_device **device_p)
{
	struct verbs_device *device;
	uint32_t i;

	for (i = 0; i < transport->device_count; i++) {
		if (transport->devices[i].context == context) {
			*device_p = &transport->devices[i];
			return 0;
		}
	}
	device = &transport->devices[i];
	device->transport = transport;
	device->context = context;
	device->index = i;
	snprintf(device->name, sizeof(device->name), "%s",
		 transport->lib->get_device_name(context->device));
	transport->device_count++;
	*device_p = device;
	return err_pass(device_start(device));
}

/* ---- which ports ---- */

struct candidate {
	const char *interface;
	struct sockaddr_storage address;
};

/* Does one word of verbs_rails, or `listen`, mean this port? */
static bool word_means(const char *word, const struct candidate *candidate,
		       const char *device, unsigned int port)
{
	char name[64], address[64];

	snprintf(name, sizeof(name), "%s:%u", device, port);
	verbs_address_text(&candidate->address, address, sizeof(address));
	return !strcmp(word, device) || !strcmp(word, name) ||
	       !strcmp(word, candidate->interface) || !strcmp(word, address);
}

static bool is_wildcard(const char *host)
{
	return !strcmp(host, "0.0.0.0") || !strcmp(host, "[::]") || !strcmp(host, "*");
}

static bool have_port(const struct verbs_transport *transport,
		      const struct ibv_context *context, uint8_t port)
{
	for (uint32_t i = 0; i < transport->rail_count; i++)
		if (transport->rails[i].device->context == context &&
		    transport->rails[i].port == port)
			return true;
	return false;
}

void verbs_address_port(struct sockaddr_storage *address, uint16_t port)
{
	if (address->ss_family == AF_INET6)
		((struct sockaddr_in6 *)(void *)address)->sin6_port = port;
	else
		((struct sockaddr_in *)(void *)address)->sin_port = port;
}

static int rail_add(struct verbs_transport *transport, struct rdma_cm_id *id,
		    const struct candidate *candidate)
{
	struct verbs_rail *rail = &transport->rails[transport->rail_count];
	int r;

	rail->index = transport->rail_count++;
	rail->listener = id;
	rail->address = candidate->address;
	rail->port = id->port_num;
	id->context = rail;
	r = device_of(transport, id->verbs, &rail->device);
	if (r < 0)
		return err_pass(r);
	if (transport->lib->listen(id, BACKLOG) != 0)
		return err_raise_errno(errno, "verbs: %s: listen", rail->device->name);
	verbs_address_port(&rail->address, transport->lib->get_src_port(id));
	snprintf(rail->name, sizeof(rail->name), "%s:%u", rail->device->name, rail->port);
	verbs_dev_describe(rail);
	log_info("verbs", rail->name, "rail", "is=\"%s\"", rail->text);
	return 0;
}

/* Take the candidate when `word` means it. */
static int try_candidate(struct verbs_transport *transport,
			 const struct candidate *candidate, const char *word)
{
	const struct verbs_lib *lib = transport->lib;
	struct sockaddr_storage address = candidate->address;
	struct rdma_cm_id *id;

	if (transport->rail_count == VERBS_RAILS_MAX)
		return 0;
	if (lib->create_id(transport->cm, &id, NULL, RDMA_PS_TCP) != 0)
		return err_raise_errno(errno, "verbs: rdma_create_id");
	if (lib->bind_addr(id, (struct sockaddr *)&address) == 0 && id->verbs &&
	    !have_port(transport, id->verbs, id->port_num) &&
	    (is_wildcard(word) ||
	     word_means(word, candidate, lib->get_device_name(id->verbs->device),
			id->port_num)))
		return err_pass(rail_add(transport, id, candidate));
	lib->destroy_id(id); /* no adapter behind it, or not wanted */
	return 0;
}

static int try_word(struct verbs_transport *transport, const struct ifaddrs *list,
		    const char *word)
{
	int r = 0;

	for (const struct ifaddrs *i = list; i && r == 0; i = i->ifa_next) {
		struct candidate candidate = {.interface = i->ifa_name};
		int family = i->ifa_addr ? i->ifa_addr->sa_family : AF_UNSPEC;

		if (i->ifa_flags & IFF_LOOPBACK || !(i->ifa_flags & IFF_UP) ||
		    (family != AF_INET && family != AF_INET6))
			continue;
		memcpy(&candidate.address, i->ifa_addr,
		       family == AF_INET ? sizeof(struct sockaddr_in)
					 : sizeof(struct sockaddr_in6));
		r = try_candidate(transport, &candidate, word);
	}
	return err_pass(r);
}

static void listen_host(const struct config *config, char *host, size_t size)
{
	const char *at = config->listen;
	char *colon;

	snprintf(host, size, "%s", strncmp(at, "tcp://", 6) ? at : at + 6);
	colon = strrchr(host, ':');
	if (colon)
		*colon = '\0';
}

int verbs_rails_open(struct verbs_transport *transport)
{
	const struct config *config = transport->net.base.env.config;
	const struct verbs_lib *lib = transport->lib;
	struct ifaddrs *list = NULL;
	char text[CONFIG_ENDPOINT_BYTES], *save = NULL;
	int r = 0;

	if (config->verbs_rails[0])
		snprintf(text, sizeof(text), "%s", config->verbs_rails);
	else
		listen_host(config, text, sizeof(text));
	if (lib->addresses(&list) < 0)
		return err_raise_errno(errno, "getifaddrs");
	for (char *word = strtok_r(text, ", ", &save); word && r == 0;
	     word = strtok_r(NULL, ", ", &save)) {
		uint32_t before = transport->rail_count;

		r = try_word(transport, list, word);
		if (r == 0 && transport->rail_count == before && config->verbs_rails[0])
			r = err_raise(
				ERR_REQUIRE,
				"verbs_rails: '%s' is not an RDMA port with an address "
				"on this host",
				word);
	}
	lib->free_addresses(list);
	if (r == 0 && transport->rail_count == 0)
		r = err_raise(
			ERR_REQUIRE,
			"verbs: no RDMA port has the address of listen = %s: name the "
			"ports in verbs_rails",
			config->listen);
	return err_pass(r);
}

void verbs_rails_close(struct verbs_transport *transport)
{
	const struct verbs_lib *lib = transport->lib;

	for (uint32_t i = 0; i < transport->rail_count; i++)
		if (transport->rails[i].listener)
			lib->destroy_id(transport->rails[i].listener);
	for (uint32_t i = 0; i < transport->device_count; i++) {
		struct verbs_device *device = &transport->devices[i];

		loop_fd_stop(&device->cq_watch);
		loop_fd_stop(&device->async_watch);
		if (device->channel)
			lib->destroy_comp_channel(device->channel);
		if (device->pd)
			lib->dealloc_pd(device->pd);
	}
	transport->rail_count = transport->device_count = 0;
}
