/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The ucx backend: all networks of UCX, by active messages only.
 *
 * Why active messages: an emulated put or get writes to a raw address out of the message,
 * with no check of key or bounds (UCX 1.13 and later). With active messages every slice
 * is announced, and the receiver answers with a landing address from its own checked
 * plan, or with none. That also makes the fence local: no answer, no byte.
 *
 * One worker, with a thread for its heavy work (ucx_worker.c). Reports of libucp reach
 * the loop by a mailbox, whichever thread called it. They only change state and kick the
 * peer; peers are stepped afterwards, and only there is the daemon above called.
 *
 * A worker listens on every interface of its device without authentication. Hence:
 * loopback only, unless the operator sets insecure = yes; no shared memory transports
 * (they would open a second, unguarded path between daemons of one host, and cma would
 * need ptrace rights); tokens in every message.
 */
#include "daemon/transport/ucx/ucx.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/transport/ucx/ucx_impl.h"

#define PROGRESS_ON_WAKE 64u

int ucx_fault(const struct ucx_lib *lib, const char *what, ucs_status_t status)
{
	return err_raise(ERR_TRANSPORT, "ucx: %s: %s", what,
			 lib->ucs_status_string(status));
}

/* ---- which devices and transports ---- */

struct choice {
	char devices[CONFIG_ENDPOINT_BYTES]; /* UCX_NET_DEVICES */
	char tls[CONFIG_ENDPOINT_BYTES + 64];
	bool loopback; /* every device is */
	bool rdma;     /* every device is an RDMA port */
};

static bool address_matches(const struct sockaddr *a, const char *host)
{
	struct in6_addr v6;
	struct in_addr v4;

	if (!a)
		return false;
	if (a->sa_family == AF_INET && inet_pton(AF_INET, host, &v4) == 1)
		return !memcmp(&((const struct sockaddr_in *)(const void *)a)->sin_addr,
			       &v4, sizeof(v4));
	if (a->sa_family == AF_INET6 && inet_pton(AF_INET6, host, &v6) == 1)
		return !memcmp(&((const struct sockaddr_in6 *)(const void *)a)->sin6_addr,
			       &v6, sizeof(v6));
	return false;
}

static void freeifaddrsp(struct ifaddrs **list)
{
	if (*list)
		freeifaddrs(*list);
}

/* The interface that has the address of `tcp://ADDRESS:PORT`. */
static int device_of_listen(const char *listen, char *device, size_t size)
{
	mem_cleanup(freeifaddrsp) struct ifaddrs *list = NULL;
	cleanup_free char *host = mem_strdup(listen);
	char *begin, *colon;
	struct in_addr v4;

	if (!host)
		return err_pass(-ENOMEM);
	begin = strncmp(host, "tcp://", 6) == 0 ? host + 6 : host;
	colon = strrchr(begin, ':');
	if (colon)
		*colon = '\0';
	if (*begin == '[') {
		begin++;
		begin[strcspn(begin, "]")] = '\0';
	}
	if (getifaddrs(&list) < 0)
		return err_raise_errno(errno, "getifaddrs");
	for (struct ifaddrs *i = list; i; i = i->ifa_next) {
		if (address_matches(i->ifa_addr, begin)) {
			snprintf(device, size, "%s", i->ifa_name);
			return 0;
		}
	}
	/* 127.0.0.2 is on lo without being listed */
	if (inet_pton(AF_INET, begin, &v4) == 1 && ntohl(v4.s_addr) >> 24 == 127) {
		snprintf(device, size, "lo");
		return 0;
	}
	return err_raise(ERR_REQUIRE,
			 "ucx: no interface has the address of listen = %s: set "
			 "UCX_NET_DEVICES",
			 listen);
}

static bool device_is_loopback(const char *device)
{
	mem_cleanup(freeifaddrsp) struct ifaddrs *list = NULL;

	if (getifaddrs(&list) < 0)
		return false;
	for (struct ifaddrs *i = list; i; i = i->ifa_next)
		if (!strcmp(i->ifa_name, device))
			return i->ifa_flags & IFF_LOOPBACK;
	return false;
}

/* "mlx5_0:1" */
static bool is_rdma(const char *device)
{
	char path[CONFIG_ENDPOINT_BYTES + 32];

	if (!*device || strchr(device, '/'))
		return false;
	snprintf(path, sizeof(path), "/sys/class/infiniband/%.*s",
		 (int)strcspn(device, ":"), device);
	return access(path, F_OK) == 0;
}

static void classify(struct choice *choice)
{
	char copy[CONFIG_ENDPOINT_BYTES], *save = NULL;

	choice->loopback = choice->rdma = true;
	snprintf(copy, sizeof(copy), "%s", choice->devices);
	for (char *d = strtok_r(copy, ", ", &save); d; d = strtok_r(NULL, ", ", &save)) {
		choice->loopback &= device_is_loopback(d);
		choice->rdma &= is_rdma(d);
	}
}

/* Transports that bypass the network and must not be offered. */
static const char *const banned[] = {"sm",  "shm",   "mm",   "posix", "sysv",
				     "cma", "xpmem", "knem", "self",  "all"};

static int choose_tls(struct choice *choice, const char *wanted)
{
	static const char exclude[] = "^sm,self";
	char copy[CONFIG_ENDPOINT_BYTES], *save = NULL;

	if (*wanted == '^') {
		snprintf(choice->tls, sizeof(choice->tls), "%s,%s", exclude, wanted + 1);
		return 0;
	}
	if (!*wanted) {
		snprintf(choice->tls, sizeof(choice->tls), "%s",
			 choice->rdma ? "rc,dc,ud" : "tcp");
		return 0;
	}
	snprintf(copy, sizeof(copy), "%s", wanted);
	for (char *t = strtok_r(copy, ", ", &save); t; t = strtok_r(NULL, ", ", &save))
		for (size_t i = 0; i < ARRAY_LEN(banned); i++)
			if (!strcmp(t, banned[i]))
				return err_raise(
					ERR_REQUIRE,
					"UCX_TLS: %s does not cross a network; name tcp, "
					"rc, dc or ud",
					t);
	snprintf(choice->tls, sizeof(choice->tls), "%s", wanted);
	return 0;
}

static int ucx_choose(const struct config *config, struct choice *choice)
{
	const char *devices = getenv("UCX_NET_DEVICES"), *tls = getenv("UCX_TLS");
	int r = 0;

	memset(choice, 0, sizeof(*choice));
	if (devices && *devices)
		snprintf(choice->devices, sizeof(choice->devices), "%s", devices);
	else
		r = device_of_listen(config->listen, choice->devices,
				     sizeof(choice->devices));
	if (r < 0)
		return err_pass(r);
	classify(choice);
	if (!choice->loopback && !config->insecure)
		return err_raise(
			ERR_REQUIRE,
			"ucx: connections are not authenticated and %s is not loopback; "
			"set insecure = yes to allow it",
			choice->devices);
	return err_pass(choose_tls(choice, tls ? tls : ""));
}

/* ---- the library's context ---- */

static int context_new(const struct ucx_lib *lib, const struct choice *choice,
		       ucp_context_h *context_p)
{
	ucp_params_t params = {
		.field_mask = UCP_PARAM_FIELD_FEATURES |
			      UCP_PARAM_FIELD_MT_WORKERS_SHARED | UCP_PARAM_FIELD_NAME,
		.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP,
		.mt_workers_shared = 1, /* ucp_mem_map on helper threads */
		.name = "kvd",
	};
	ucp_config_t *config;
	ucs_status_t status;
	int r;

	status = lib->ucp_config_read(NULL, NULL, &config);
	if (status != UCS_OK)
		return ucx_fault(lib, "read configuration", status);
	status = lib->ucp_config_modify(config, "TLS", choice->tls);
	if (status == UCS_OK)
		status = lib->ucp_config_modify(config, "NET_DEVICES", choice->devices);
	r = status == UCS_OK ? 0 : ucx_fault(lib, "configure", status);
	if (r == 0) {
		status = lib->ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params,
					       config, context_p);
		if (status != UCS_OK)
			r = err_raise(ERR_REQUIRE, "ucx: no use of %s by %s: %s",
				      choice->devices, choice->tls,
				      lib->ucs_status_string(status));
	}
	lib->ucp_config_release(config);
	return err_pass(r);
}

static int ucx_probe(const struct config *config, uint32_t *caps_p)
{
	const struct ucx_lib *lib;
	struct choice choice;
	ucp_context_h context;
	int r;

	r = ucx_choose(config, &choice);
	if (r < 0)
		return err_pass(r);
	r = ucx_lib_load(config->ucx_library, &lib);
	if (r < 0)
		return err_pass(r);
	r = context_new(lib, &choice, &context);
	if (r < 0)
		return err_pass(r);
	lib->ucp_cleanup(context);
	*caps_p = choice.rdma ? XP_CAP_RDMA : 0;
	return 0;
}

/* ---- the loop's side ---- */

static unsigned int ucx_progress(struct transport *base, unsigned int budget)
{
	struct ucx_transport *transport =
		container_of(base, struct ucx_transport, net.base);
	unsigned int done = ucx_worker_progress(&transport->worker, budget);

	net_run(&transport->net);
	ucx_submitted(&transport->worker);
	return done;
}

static void ucx_on_ready(struct loop_fd *watch, int events)
{
	(void)events;
	ucx_progress(&container_of(watch, struct ucx_transport, worker.watch)->net.base,
		     PROGRESS_ON_WAKE);
}

static bool ucx_arm(struct transport *base)
{
	return ucx_worker_arm(
		&container_of(base, struct ucx_transport, net.base)->worker);
}

void ucx_feed_sources(struct ucx_transport *transport)
{
	struct ucx_peer *peer;

	list_foreach(peer, &transport->net.peers, net.link) {
		if (peer->starved) {
			peer->starved = false;
			net_peer_kick(&peer->net);
		}
	}
}

/* ---- open, close ---- */

/*
 * An endpoint to the worker itself keeps its interface in use, so the worker polls the
 * interface itself. Without an endpoint, libucs's thread does that, and with 1.13 an
 * event that it saw may be lost: the first bytes of the first peer lay in the socket, and
 * no thread was woken. The endpoint ends with the worker.
 */
static ucs_status_t stay_awake(struct ucx_transport *transport, const ucp_address_t *own)
{
	ucp_ep_params_t params = {
		.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
		.address = own,
	};
	ucp_ep_h ep;

	return transport->lib->ucp_ep_create(transport->worker.handle, &params, &ep);
}

static int ucx_take_address(struct ucx_transport *transport)
{
	ucp_worker_attr_t attr = {.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS |
						UCP_WORKER_ATTR_FIELD_MAX_AM_HEADER};
	const struct ucx_lib *lib = transport->lib;
	ucs_status_t status = lib->ucp_worker_query(transport->worker.handle, &attr);
	int r;

	if (status != UCS_OK)
		return ucx_fault(lib, "worker address", status);
	r = ucx_address_put(attr.address, attr.address_length,
			    transport->net.base.address,
			    &transport->net.base.address_len);
	if (r == 0)
		status = stay_awake(transport, attr.address);
	lib->ucp_worker_release_address(transport->worker.handle, attr.address);
	if (status != UCS_OK)
		return ucx_fault(lib, "an endpoint to itself", status);
	if (r == 0 && attr.max_am_header < UCX_FRAME_BYTES)
		r = err_raise(ERR_REQUIRE, "ucx: headers of %zu bytes, %u needed",
			      attr.max_am_header, UCX_FRAME_BYTES);
	return err_pass(r);
}

static int ucx_worker_start(struct ucx_transport *transport)
{
	const struct ucx_lib *lib = transport->lib;
	ucp_am_handler_param_t handler = {
		.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
			      UCP_AM_HANDLER_PARAM_FIELD_CB |
			      UCP_AM_HANDLER_PARAM_FIELD_ARG,
		.id = UCX_AM_ID,
		.cb = ucx_line_message,
		.arg = transport,
	};
	ucs_status_t status;
	int r;

	r = ucx_worker_open(&transport->worker, lib, transport->context,
			    transport->net.base.env.loop, ucx_on_ready);
	if (r < 0)
		return err_pass(r);
	status = lib->ucp_worker_set_am_recv_handler(transport->worker.handle, &handler);
	if (status != UCS_OK)
		return ucx_fault(lib, "set the message handler", status);
	return err_pass(ucx_take_address(transport));
}

static uint64_t ucx_clamp(uint64_t value, uint64_t low, uint64_t high)
{
	return value < low ? low : value > high ? high : value;
}

static void ucx_close(struct transport *base)
{
	struct ucx_transport *transport =
		container_of(base, struct ucx_transport, net.base);
	struct idmap_cursor at;

	net_settle(&transport->net);
	net_fini(&transport->net);
	ucx_pool_fini(&transport->send_pool);
	ucx_pool_fini(&transport->recv_pool);
	ucx_worker_close(&transport->worker);
	if (transport->context)
		transport->lib->ucp_cleanup(transport->context);
	strmap_fini(&transport->tokens);
	strmap_foreach(&transport->pairings, at) mem_free(at.value);
	strmap_fini(&transport->pairings);
	mem_free(transport);
}

static int ucx_start(struct ucx_transport *transport)
{
	const struct config *config = transport->net.base.env.config;
	struct choice choice;
	int r;

	r = ucx_choose(config, &choice);
	if (r == 0)
		r = ucx_lib_load(config->ucx_library, &transport->lib);
	if (r == 0)
		r = context_new(transport->lib, &choice, &transport->context);
	if (r == 0)
		r = ucx_worker_start(transport);
	if (r == 0)
		r = ucx_pool_init(&transport->send_pool, transport->lib,
				  transport->context, transport->net.base.env.gpu,
				  transport->slice_bytes, UCX_POOL_BYTES);
	if (r == 0)
		r = ucx_pool_init(&transport->recv_pool, transport->lib,
				  transport->context, transport->net.base.env.gpu,
				  transport->slice_bytes, UCX_POOL_BYTES);
	if (r == 0)
		transport->net.base.caps = choice.rdma ? XP_CAP_RDMA : 0;
	return err_pass(r);
}

static int ucx_open(const struct xp_env *env, const struct xp_callbacks *callbacks,
		    struct transport **transport_p)
{
	struct ucx_transport *transport = mem_zalloc(sizeof(*transport));
	int r;

	if (!transport)
		return err_pass(-ENOMEM);
	net_init(&transport->net, &ucx_net_ops, &ucx_transport, env, callbacks);
	transport->slice_bytes =
		ucx_clamp(env->config->slice_bytes, UCX_SLICE_MIN, UCX_SLICE_MAX);
	transport->window_bytes = ucx_clamp(env->config->max_inflight_bytes,
					    transport->slice_bytes, UINT64_MAX);
	list_init(&transport->hungry);
	strmap_init(&transport->tokens);
	strmap_init(&transport->pairings);
	r = ucx_start(transport);
	if (r < 0) {
		ucx_close(&transport->net.base);
		return err_pass(r);
	}
	*transport_p = &transport->net.base;
	return 0;
}

const struct transport_ops ucx_transport = {
	.name = "ucx",
	.probe = ucx_probe,
	.open = ucx_open,
	.close = ucx_close,
	.arm = ucx_arm,
	.progress = ucx_progress,
	.mem_reg = ucx_mem_reg,
	.mem_dereg = net_mem_dereg,
	.key_pack = net_key_pack,
	.key_unpack = net_key_unpack,
	.key_drop = net_key_drop,
	.peer_open = ucx_peer_open,
	.peer_close = ucx_peer_close,
	.post = net_post,
	.land = net_land,
	.cancel = net_cancel,
	.revoke = net_revoke,
};
