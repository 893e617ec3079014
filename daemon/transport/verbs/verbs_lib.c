/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The libraries, loaded by name. A table instead of linking: a host without RDMA needs
 * neither of them, an older one lacks a function or two, and tests bring their own
 * adapters. Inline functions of verbs.h are called through a function here, so that a
 * test sees every call; for post_send that costs one indirect call a chain, not one a
 * work request.
 */
#include "daemon/transport/verbs/verbs_lib.h"

#include <ifaddrs.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/library.h"
#include "daemon/base/mem.h"

/* ibv_query_port() is a macro over a symbol with an older, shorter struct; the
 * two below it are inline. */
static int (*port_symbol)(struct ibv_context *context, uint8_t port,
			  struct _compat_ibv_port_attr *attr);

static int call_query_port(struct ibv_context *context, uint8_t port,
			   struct ibv_port_attr *attr)
{
	memset(attr, 0, sizeof(*attr));
	return port_symbol(context, port, (struct _compat_ibv_port_attr *)(void *)attr);
}

static int call_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr,
			  struct ibv_send_wr **bad)
{
	return ibv_post_send(qp, wr, bad);
}

static int call_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr,
			  struct ibv_recv_wr **bad)
{
	return ibv_post_recv(qp, wr, bad);
}

static int call_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc)
{
	return ibv_poll_cq(cq, count, wc);
}

static int call_req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	return ibv_req_notify_cq(cq, solicited_only);
}

static int node_of(const void *address)
{
	uintptr_t page = (uintptr_t)address & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
	void *pages[1] = {(void *)page};
	int node = -1;

	/* without a list of nodes it returns the page's node; negative: the error */
	if (syscall(SYS_move_pages, 0, 1UL, pages, NULL, &node, 0) != 0)
		return -1;
	return node < 0 ? -1 : node;
}

static struct verbs_lib loaded = {
	.addresses = getifaddrs,
	.free_addresses = freeifaddrs,
	.node_of = node_of,
	.sysfs = "/sys",
	.query_port = call_query_port,
	.post_send = call_post_send,
	.post_recv = call_post_recv,
	.poll_cq = call_poll_cq,
	.req_notify_cq = call_req_notify_cq,
};

static const struct library_function ibverbs[] = {
	{"ibv_get_device_list", &loaded.get_device_list, false},
	{"ibv_free_device_list", &loaded.free_device_list, false},
	{"ibv_get_device_name", &loaded.get_device_name, false},
	{"ibv_open_device", &loaded.open_device, false},
	{"ibv_close_device", &loaded.close_device, false},
	{"ibv_query_device", &loaded.query_device, false},
	{"ibv_query_port", &port_symbol, false},
	{"ibv_query_gid", &loaded.query_gid, false},
	{"ibv_alloc_pd", &loaded.alloc_pd, false},
	{"ibv_dealloc_pd", &loaded.dealloc_pd, false},
	{"ibv_reg_mr", &loaded.reg_mr, false},
	{"ibv_reg_dmabuf_mr", &loaded.reg_dmabuf_mr, true},
	{"ibv_dereg_mr", &loaded.dereg_mr, false},
	{"ibv_create_comp_channel", &loaded.create_comp_channel, false},
	{"ibv_destroy_comp_channel", &loaded.destroy_comp_channel, false},
	{"ibv_create_cq", &loaded.create_cq, false},
	{"ibv_destroy_cq", &loaded.destroy_cq, false},
	{"ibv_get_cq_event", &loaded.get_cq_event, false},
	{"ibv_ack_cq_events", &loaded.ack_cq_events, false},
	{"ibv_get_async_event", &loaded.get_async_event, false},
	{"ibv_ack_async_event", &loaded.ack_async_event, false},
	{"ibv_create_qp", &loaded.make_qp, false},
	{"ibv_destroy_qp", &loaded.free_qp, false},
	{"ibv_modify_qp", &loaded.modify_qp, false},
};

static const struct library_function rdmacm[] = {
	{"rdma_create_event_channel", &loaded.create_event_channel, false},
	{"rdma_destroy_event_channel", &loaded.destroy_event_channel, false},
	{"rdma_create_id", &loaded.create_id, false},
	{"rdma_destroy_id", &loaded.destroy_id, false},
	{"rdma_bind_addr", &loaded.bind_addr, false},
	{"rdma_resolve_addr", &loaded.resolve_addr, false},
	{"rdma_resolve_route", &loaded.resolve_route, false},
	{"rdma_listen", &loaded.listen, false},
	{"rdma_get_src_port", &loaded.get_src_port, false},
	{"rdma_create_qp", &loaded.create_qp, false},
	{"rdma_destroy_qp", &loaded.destroy_qp, false},
	{"rdma_connect", &loaded.connect, false},
	{"rdma_accept", &loaded.accept, false},
	{"rdma_reject", &loaded.reject, false},
	{"rdma_disconnect", &loaded.disconnect, false},
	{"rdma_get_cm_event", &loaded.get_cm_event, false},
	{"rdma_ack_cm_event", &loaded.ack_cm_event, false},
	{"rdma_notify", &loaded.notify, false},
	{"rdma_set_option", &loaded.set_option, false},
};

static const struct verbs_lib *in_use; /* the tests', or &loaded */

int verbs_lib_load(const struct verbs_lib **lib_p)
{
	int r = 0;

	if (!in_use) {
		r = library_load("libibverbs.so.1", ibverbs, ARRAY_LEN(ibverbs));
		if (r == 0)
			r = library_load("librdmacm.so.1", rdmacm, ARRAY_LEN(rdmacm));
		if (r < 0)
			return err_prefix(r, "verbs");
		in_use = &loaded;
	}
	*lib_p = in_use;
	return 0;
}

void verbs_lib_use(const struct verbs_lib *lib)
{
	in_use = lib;
}
