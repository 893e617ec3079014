/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The verbs backend: RDMA by reliable connections, driven from the loop.
 *
 * Connections are made by librdmacm, which finds the adapter, the GID and the path by
 * address; bytes move by one-sided WRITE and READ, so the remote daemon takes no part
 * meanwhile; control messages are small frames on the same queue pairs. The libraries are
 * loaded when the backend is probed: a host without them, or without an adapter, starts
 * and reports that.
 *
 * Completions are reported as events on a file descriptor, like everything else of the
 * loop: no core is burnt while nothing moves. Under load an empty queue is polled a
 * little longer before it is armed (verbs_qp.c).
 *
 * RDMA is not encrypted. The handshake's tokens authorize connections (verbs_cm.c);
 * anyone who can read the fabric can read the bytes.
 */
#include "daemon/transport/verbs/verbs.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/transport/verbs/verbs_impl.h"
#include "daemon/transport/verbs/verbs_loopback.h"

#define WR_BYTES (1u << 20)

/* ---- progress ---- */

static unsigned int verbs_progress(struct transport *base, unsigned int budget)
{
	struct verbs_transport *transport =
		container_of(base, struct verbs_transport, net.base);
	struct list *link, batch;
	unsigned int done = 0;

	list_init(&batch);
	while ((link = list_pop_front(&transport->active)))
		list_push_back(&batch, link);
	while ((link = list_pop_front(&batch))) {
		struct verbs_qp *qp = list_entry(link, struct verbs_qp, active_link);

		list_push_back(&transport->active, link);
		if (done < budget)
			done += verbs_qp_poll(qp, budget - done);
	}
	return done;
}

static bool verbs_arm(struct transport *base)
{
	struct verbs_transport *transport =
		container_of(base, struct verbs_transport, net.base);

	/* each queue that was found empty has been armed by its poll; one that remains
	 * must be polled again */
	return !list_empty(&transport->active);
}

/* ---- open and close ---- */

static int verbs_probe(const struct config *config, uint32_t *caps_p)
{
	const struct verbs_lib *lib;
	struct ibv_device **list;
	int count = 0, r = verbs_lib_load(&lib);

	(void)config;
	if (r < 0)
		return err_pass(r);
	list = lib->get_device_list(&count);
	if (list)
		lib->free_device_list(list);
	if (!list || count == 0)
		return err_raise(ERR_REQUIRE, "verbs: no RDMA device on this machine");
	*caps_p = XP_CAP_RDMA;
	return 0;
}

static void verbs_close(struct transport *base)
{
	struct verbs_transport *transport =
		container_of(base, struct verbs_transport, net.base);

	verbs_pack_close(transport);
	net_settle(&transport->net);
	if (transport->lib)
		verbs_loopback_close(transport);
	net_fini(&transport->net);
	verbs_linger_end(transport);
	if (transport->cm)
		loop_fd_stop(&transport->cm_watch);
	if (transport->lib)
		verbs_rails_close(transport);
	if (transport->cm)
		transport->lib->destroy_event_channel(transport->cm);
	strmap_fini(&transport->tokens);
	mem_free(transport);
}

static int open_cm(struct verbs_transport *transport)
{
	int r;

	transport->cm = transport->lib->create_event_channel();
	if (!transport->cm)
		return err_raise(
			ERR_REQUIRE,
			"verbs: no connection manager: %s (is the module rdma_ucm "
			"loaded, and /dev/infiniband/rdma_cm allowed?)",
			strerror(errno));
	loop_fd_init(&transport->cm_watch, transport->net.base.env.loop,
		     transport->cm->fd, verbs_on_cm);
	r = verbs_set_nonblocking(transport->cm->fd);
	return err_pass(r < 0 ? r : loop_fd_set(&transport->cm_watch, LOOP_READ));
}

static int verbs_publish(struct verbs_transport *transport)
{
	struct verbs_address address = {.rails = transport->rail_count,
					.qps = VERBS_RAIL_QPS};
	struct transport *base = &transport->net.base;
	size_t n = 0;

	for (uint32_t i = 0; i < transport->rail_count; i++) {
		address.rail[i] = transport->rails[i].address;
		if (n < sizeof(base->about))
			n += (size_t)snprintf(base->about + n, sizeof(base->about) - n,
					      "%s%s", n ? "; " : "",
					      transport->rails[i].text);
	}
	return err_pass(verbs_address_put(&address, base->address, &base->address_len));
}

static int verbs_start(struct verbs_transport *transport)
{
	int r = verbs_lib_load(&transport->lib);

	if (r == 0)
		r = open_cm(transport);
	if (r == 0)
		r = verbs_rails_open(transport);
	if (r == 0)
		r = verbs_loopback_open(transport);
	if (r == 0)
		r = verbs_publish(transport);
	if (r == 0)
		transport->net.base.caps = XP_CAP_RDMA;
	return err_pass(r);
}

static int verbs_open(const struct xp_env *env, const struct xp_callbacks *callbacks,
		      struct transport **transport_p)
{
	struct verbs_transport *transport = mem_zalloc(sizeof(*transport));
	const struct config *config = env->config;
	int r;

	if (!transport)
		return err_pass(-ENOMEM);
	net_init(&transport->net, &verbs_net_ops, &verbs_transport, env, callbacks);
	transport->window_max = config->max_inflight_bytes;
	transport->tos = (uint8_t)config->verbs_traffic_class;
	transport->ack_timeout = (uint8_t)config->verbs_ack_timeout;
	transport->sge_max = VERBS_SGE_MAX;
	transport->wr_bytes = WR_BYTES;
	list_init(&transport->active);
	list_init(&transport->lingering);
	loop_timer_init(&transport->linger_timer, env->loop, verbs_on_linger);
	strmap_init(&transport->tokens);
	r = verbs_start(transport);
	if (r < 0) {
		verbs_close(&transport->net.base);
		return err_pass(r);
	}
	verbs_pack_open(transport);
	*transport_p = &transport->net.base;
	return 0;
}

const struct transport_ops verbs_transport = {
	.name = "verbs",
	.probe = verbs_probe,
	.open = verbs_open,
	.close = verbs_close,
	.arm = verbs_arm,
	.progress = verbs_progress,
	.mem_reg = verbs_mem_reg,
	.mem_dereg = net_mem_dereg,
	.key_pack = verbs_key_pack,
	.key_unpack = verbs_key_unpack,
	.key_drop = verbs_key_drop,
	.peer_open = verbs_peer_open,
	.peer_close = verbs_peer_close,
	.post = net_post,
	.land = net_land,
	.cancel = net_cancel,
	.revoke = net_revoke,
};
