/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Checks of interfaces, adapters and GPUs. They read sysfs and procfs, so that they work
 * without a daemon; the daemon's own report of its devices is checked in addition.
 */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "ctl/doctor.h"

#define GIDS_LOOKED 16

/* ---- the interface of an address ---- */

/* "tcp://10.0.0.2:7400" to "10.0.0.2", "tcp://[fe80::1]:7400" to "fe80::1"; else "". */
static void host_of(const char *endpoint, char host[64])
{
	const char *at = strncmp(endpoint, "tcp://", 6) ? endpoint : endpoint + 6,
		   *end = strrchr(at, ':');

	*host = '\0';
	if (!end || end == at || end - at > 63)
		return;
	if (*at == '[' && end[-1] == ']') {
		at++;
		end--;
	}
	snprintf(host, 64, "%.*s", (int)(end - at), at);
}

/* The daemon's network namespace, to which its addresses belong. */
struct net {
	char dir[32]; /* in procfs */
	bool ours;    /* the same as ours: sysfs shows its interfaces */
};

/* Files of different network namespaces have different inodes. False: the daemon's
 * namespace is not readable, and *net is ours. */
static bool net_find(const struct doctor *d, struct net *net)
{
	char path[500];
	struct stat one, other;

	snprintf(net->dir, sizeof(net->dir), "/proc/%d/net", d->pid);
	snprintf(path, sizeof(path), "%s%s/dev", d->root, net->dir);
	if (d->pid && stat(path, &one) == 0) {
		snprintf(path, sizeof(path), "%s/proc/net/dev", d->root);
		net->ours = stat(path, &other) == 0 && one.st_ino == other.st_ino;
		return true;
	}
	*net = (struct net){"/proc/net", true};
	return false;
}

/* The interface whose subnet contains the address. */
static bool interface_of_v4(const struct doctor *d, const struct net *net,
			    const char *host, char name[32])
{
	char table[16384], *rest = table, *line;
	unsigned int best = 0;
	struct in_addr address;

	*name = '\0';
	if (inet_pton(AF_INET, host, &address) != 1 ||
	    !doctor_read(d, table, sizeof(table), "%s/route", net->dir))
		return false;
	while ((line = strsep(&rest, "\n"))) {
		unsigned int to, via, mask;
		char one[32];

		if (sscanf(line, "%31s %x %x %*x %*d %*d %*d %x", one, &to, &via,
			   &mask) != 4 ||
		    via || !mask || (address.s_addr & mask) != to ||
		    ntohl(mask) < ntohl(best))
			continue;
		best = mask;
		snprintf(name, 32, "%s", one);
	}
	return *name;
}

static bool interface_of_v6(const struct doctor *d, const struct net *net,
			    const char *host, char name[32])
{
	char table[16384], wanted[33], one[33], *rest = table, *line;
	struct in6_addr address;

	*name = '\0';
	if (inet_pton(AF_INET6, host, &address) != 1 ||
	    !doctor_read(d, table, sizeof(table), "%s/if_inet6", net->dir))
		return false;
	for (unsigned int i = 0; i < 16; i++)
		snprintf(wanted + 2 * i, 3, "%02x", address.s6_addr[i]);
	while ((line = strsep(&rest, "\n")))
		if (sscanf(line, "%32s %*x %*x %*x %*x %31s", one, name) == 2 &&
		    strcmp(one, wanted) == 0)
			return true;
	*name = '\0';
	return false;
}

/* A local /32 address without a subnet, as clouds and pods often have it. */
static bool is_own_v4(const struct doctor *d, const struct net *net, const char *host)
{
	static char tries[1u << 18];
	char leaf[80], *at = tries, *next, *local;

	snprintf(leaf, sizeof(leaf), "|-- %s\n", host);
	if (!doctor_read(d, tries, sizeof(tries), "%s/fib_trie", net->dir))
		return false;
	while ((at = strstr(at, leaf))) {
		at += strlen(leaf);
		next = strstr(at, "-- ");
		local = strstr(at, "/32 host LOCAL");
		if (local && (!next || local < next))
			return true;
	}
	return false;
}

static unsigned int mtu_of(const struct doctor *d, const char *name)
{
	char text[32];

	return doctor_read(d, text, sizeof(text), "/sys/class/net/%s/mtu", name)
		       ? (unsigned int)strtoul(text, NULL, 10)
		       : 0;
}

static void check_interface(struct doctor *d, const struct net *net, const char *name,
			    const char *host)
{
	char state[32], speed[32], remedy[100];

	if (!net->ours) {
		doctor_say(d, DOCTOR_OK, "",
			   "%s has %s, in the daemon's own network namespace: link state "
			   "not checked",
			   name, host);
		return;
	}
	if (!doctor_read(d, state, sizeof(state), "/sys/class/net/%s/operstate", name))
		return;
	doctor_read(d, speed, sizeof(speed), "/sys/class/net/%s/speed", name);
	snprintf(remedy, sizeof(remedy), "ip link set %s up; check cable and switch",
		 name);
	if (strcmp(state, "up") != 0 && strcmp(state, "unknown") != 0)
		doctor_say(d, DOCTOR_FAIL, remedy, "%s, which has %s, is %s", name, host,
			   state);
	else
		doctor_say(d, DOCTOR_OK, "", "%s is %s, MTU %u%s%s%s, has %s", name,
			   state, mtu_of(d, name), *speed && *speed != '-' ? ", " : "",
			   *speed && *speed != '-' ? speed : "",
			   *speed && *speed != '-' ? " Mb/s" : "", host);
}

static void check_address(struct doctor *d, const char *option, const char *host)
{
	struct net net = {.ours = true};
	char name[32];

	if (!*host || strcmp(host, "*") == 0 || strcmp(host, "0.0.0.0") == 0 ||
	    strcmp(host, "::") == 0 || strncmp(host, "127.", 4) == 0 ||
	    strcmp(host, "::1") == 0)
		return;
	if (!net_find(d, &net))
		doctor_say(
			d, DOCTOR_WARN,
			"run this where /proc/PID of the daemon is readable",
			"the daemon's network namespace is not readable: %s is checked "
			"in that of kvd-ctl",
			host);
	if (interface_of_v4(d, &net, host, name) || interface_of_v6(d, &net, host, name))
		check_interface(d, &net, name, host);
	else if (is_own_v4(d, &net, host))
		doctor_say(d, DOCTOR_OK, "", "%s is an address of this host", host);
	else
		doctor_say(d, DOCTOR_FAIL, "check ip address; the next start would fail",
			   "no interface has a subnet with %s (%s)", host, option);
}

void doctor_network(struct doctor *d)
{
	char control[64], data[64];

	host_of(doctor_setting(d, "listen"), control);
	host_of(doctor_setting(d, "tcp_listen"), data);
	check_address(d, "listen", control);
	if (strcmp(control, data) != 0)
		check_address(d, "tcp_listen", data);
}

/* ---- RDMA ---- */

struct rails {
	unsigned int ports, active;
	unsigned int mtu; /* of the first active RoCE port */
	char first[48];	  /* its name */
};

/* Counts the GIDs that are set; *v2_p: one is RoCE v2. */
static unsigned int gids_of(const struct doctor *d, const char *dir, bool *v2_p)
{
	char gid[64], type[32];
	unsigned int count = 0;

	*v2_p = false;
	for (unsigned int i = 0; i < GIDS_LOOKED; i++) {
		if (!doctor_read(d, gid, sizeof(gid), "%s/gids/%u", dir, i) ||
		    strspn(gid, "0:") == strlen(gid))
			continue;
		count++;
		doctor_read(d, type, sizeof(type), "%s/gid_attrs/types/%u", dir, i);
		*v2_p = *v2_p || strcmp(type, "RoCE v2") == 0;
	}
	return count;
}

static void check_roce(struct doctor *d, const char *dir, const char *name,
		       struct rails *rails)
{
	char net[32] = "";
	unsigned int mtu, gids;
	bool v2;

	doctor_read(d, net, sizeof(net), "%s/gid_attrs/ndevs/0", dir);
	gids = gids_of(d, dir, &v2);
	mtu = *net ? mtu_of(d, net) : 0;
	if (!gids)
		doctor_say(d, DOCTOR_FAIL, "ip address add ADDRESS dev INTERFACE",
			   "%s has no GID: its interface %s has no address", name, net);
	else if (!v2)
		doctor_say(d, DOCTOR_WARN, "set the adapter's RoCE mode to v2",
			   "%s has GIDs of RoCE v1 only, which is not routable", name);
	if (rails->mtu && mtu && rails->mtu != mtu)
		doctor_say(d, DOCTOR_WARN,
			   "use the same MTU on all rails, switches and hosts",
			   "%s has MTU %u, %s has %u", name, mtu, rails->first,
			   rails->mtu);
	if (!rails->mtu && mtu) {
		rails->mtu = mtu;
		snprintf(rails->first, sizeof(rails->first), "%s", name);
	}
}

static void check_port(struct doctor *d, const char *device, const char *port,
		       struct rails *rails)
{
	char dir[200], name[48], state[64], rate[64], layer[32];

	snprintf(dir, sizeof(dir), "/sys/class/infiniband/%.60s/ports/%.8s", device,
		 port);
	snprintf(name, sizeof(name), "%.36s:%.8s", device, port);
	if (!doctor_read(d, state, sizeof(state), "%s/state", dir))
		return;
	rails->ports++;
	doctor_read(d, rate, sizeof(rate), "%s/rate", dir);
	doctor_read(d, layer, sizeof(layer), "%s/link_layer", dir);
	if (!strstr(state, "ACTIVE")) {
		doctor_say(d, DOCTOR_WARN,
			   "check cable and switch; ip link set INTERFACE up",
			   "%s is not active: %s", name, state);
		return;
	}
	rails->active++;
	doctor_say(d, DOCTOR_OK, "", "%s is active, %s, %s", name, layer, rate);
	if (strcmp(layer, "Ethernet") == 0)
		check_roce(d, dir, name, rails);
}

/* Reports why the daemon does not use an active port. */
static void check_use(struct doctor *d)
{
	const cJSON *port;

	cJSON_ArrayForEach(port, ctl_list(d->devices, "rdma")) {
		if (strcmp(ctl_str(port, "state", ""), "active") == 0 &&
		    !ctl_true(port, "used"))
			doctor_say(d, DOCTOR_WARN,
				   "check the options verbs_rails, listen and transports",
				   "the daemon does not use %s:%.0f: %s",
				   ctl_str(port, "device", "?"), ctl_num(port, "port"),
				   ctl_str(port, "use", "?"));
	}
}

void doctor_rdma(struct doctor *d)
{
	const char *require = doctor_setting(d, "require");
	bool wanted = strstr(require, "rdma") || strstr(require, "verbs");
	struct dirent **devices, **ports;
	struct rails rails = {0};
	int count = doctor_list(d, &devices, "/sys/class/infiniband"), n;

	for (int i = 0; i < count; i++) {
		n = doctor_list(d, &ports, "/sys/class/infiniband/%.60s/ports",
				devices[i]->d_name);
		for (int j = 0; j < n; j++)
			check_port(d, devices[i]->d_name, ports[j]->d_name, &rails);
		ctl_instances_free(ports, n);
	}
	ctl_instances_free(devices, count);
	if (rails.ports && !rails.active)
		doctor_say(d, DOCTOR_FAIL,
			   "check cable and switch; ip link set INTERFACE up",
			   "no port is active");
	if (!rails.ports)
		doctor_say(
			d, wanted ? DOCTOR_FAIL : DOCTOR_OK,
			wanted ? "install an adapter and its driver, or change `require`"
			       : "",
			"no adapter%s%s", wanted ? "; require: " : "",
			wanted ? require : "");
	check_use(d);
}

/* ---- GPUs ---- */

/* A GPU with MIG instances; "" if none. */
static void mig_of(const struct doctor *d, char name[64])
{
	const char *dir = "/proc/driver/nvidia/capabilities";
	struct dirent **gpus, **parts;
	int count = doctor_list(d, &gpus, "%s", dir), n;

	*name = '\0';
	for (int i = 0; i < count; i++) {
		n = doctor_list(d, &parts, "%s/%.60s/mig", dir, gpus[i]->d_name);
		for (int j = 0; j < n; j++)
			if (strncmp(parts[j]->d_name, "gi", 2) == 0)
				snprintf(name, 64, "%.63s", gpus[i]->d_name);
		ctl_instances_free(parts, n);
	}
	ctl_instances_free(gpus, count);
}

static bool has_adapter(const struct doctor *d)
{
	struct dirent **names;
	int count = doctor_list(d, &names, "/sys/class/infiniband");

	ctl_instances_free(names, count);
	return count > 0;
}

static void check_gpus_of_daemon(struct doctor *d)
{
	const cJSON *gpu;

	cJSON_ArrayForEach(gpu, ctl_list(d->devices, "gpus"))
		if (ctl_true(gpu, "failed"))
			doctor_say(d, DOCTOR_FAIL,
				   "check nvidia-smi and dmesg, then restart",
				   "%s (%s) has failed", ctl_str(gpu, "gpu", "?"),
				   ctl_str(gpu, "name", "?"));
	if (*ctl_str(d->devices, "gpu_error", ""))
		doctor_say(d, DOCTOR_WARN, "check the options `gpus` and `cuda_library`",
			   "the daemon uses no GPU: %s",
			   ctl_str(d->devices, "gpu_error", ""));
}

void doctor_gpu(struct doctor *d)
{
	char version[512], mig[64];
	const char *number;
	bool open;

	if (!doctor_read(d, version, sizeof(version), "/proc/driver/nvidia/version")) {
		doctor_say(d, DOCTOR_OK, "", "no NVIDIA driver");
		return;
	}
	version[strcspn(version, "\n")] = '\0';
	open = strstr(version, "Open Kernel Module");
	number = strstr(version, "  ");
	doctor_say(d, DOCTOR_OK, "", "NVIDIA driver%s", number ? number + 1 : "");
	if (!doctor_exists(d, "/dev/nvidiactl"))
		doctor_say(d, DOCTOR_FAIL,
			   "start the container with --gpus or the device plugin",
			   "/dev/nvidiactl is missing: no GPU can be opened here");
	mig_of(d, mig);
	if (*mig)
		doctor_say(d, DOCTOR_WARN, "nvidia-smi -mig 0, if MIG is not needed",
			   "%s has MIG enabled: its memory cannot be shared between "
			   "processes",
			   mig);
	if (has_adapter(d) && !open && !doctor_exists(d, "/sys/module/nvidia_peermem"))
		doctor_say(
			d, DOCTOR_WARN,
			"modprobe nvidia-peermem, or use the open kernel modules "
			"(dma-buf)",
			"adapters cannot reach GPU memory: transfers are staged through "
			"host memory");
	check_gpus_of_daemon(d);
}
