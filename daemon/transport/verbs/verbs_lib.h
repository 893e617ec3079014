/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs_lib: the functions of libibverbs and librdmacm that the verbs backend calls, in
 * one table, loaded when first needed: a host without them, or without a NIC, starts
 * anyway. Tests install their own table, so posting, accounting and failure are tested
 * without hardware.
 */
#ifndef KVD_TRANSPORT_VERBS_LIB_H
#define KVD_TRANSPORT_VERBS_LIB_H

#include <infiniband/verbs.h>
#include <rdma/rdma_cma.h>

struct ifaddrs;

struct verbs_lib {
	/* the system: interfaces with their addresses, the NUMA node of the page
	 * there (-1: not known), and where sysfs is */
	int (*addresses)(struct ifaddrs **list);
	void (*free_addresses)(struct ifaddrs *list);
	int (*node_of)(const void *address);
	const char *sysfs;
	/* libibverbs */
	struct ibv_device **(*get_device_list)(int *count);
	void (*free_device_list)(struct ibv_device **list);
	const char *(*get_device_name)(struct ibv_device *device);
	struct ibv_context *(*open_device)(struct ibv_device *device);
	int (*close_device)(struct ibv_context *context);
	int (*query_device)(struct ibv_context *context, struct ibv_device_attr *attr);
	int (*query_port)(struct ibv_context *context, uint8_t port,
			  struct ibv_port_attr *attr);
	int (*query_gid)(struct ibv_context *context, uint8_t port, int index,
			 union ibv_gid *gid);
	struct ibv_pd *(*alloc_pd)(struct ibv_context *context);
	int (*dealloc_pd)(struct ibv_pd *pd);
	struct ibv_mr *(*reg_mr)(struct ibv_pd *pd, void *address, size_t length,
				 int access);
	/* optional, NULL where the library is older */
	struct ibv_mr *(*reg_dmabuf_mr)(struct ibv_pd *pd, uint64_t offset, size_t length,
					uint64_t iova, int fd, int access);
	int (*dereg_mr)(struct ibv_mr *mr);
	struct ibv_comp_channel *(*create_comp_channel)(struct ibv_context *context);
	int (*destroy_comp_channel)(struct ibv_comp_channel *channel);
	struct ibv_cq *(*create_cq)(struct ibv_context *context, int cqe, void *owner,
				    struct ibv_comp_channel *channel, int vector);
	int (*destroy_cq)(struct ibv_cq *cq);
	int (*get_cq_event)(struct ibv_comp_channel *channel, struct ibv_cq **cq,
			    void **owner);
	void (*ack_cq_events)(struct ibv_cq *cq, unsigned int count);
	int (*get_async_event)(struct ibv_context *context,
			       struct ibv_async_event *event);
	void (*ack_async_event)(struct ibv_async_event *event);
	/* ibv_create_qp(), ibv_destroy_qp(): of no connection manager */
	struct ibv_qp *(*make_qp)(struct ibv_pd *pd, struct ibv_qp_init_attr *attr);
	int (*free_qp)(struct ibv_qp *qp);
	int (*modify_qp)(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask);
	/* inline in verbs.h: they use the context's own table */
	int (*post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr,
			 struct ibv_send_wr **bad);
	int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr,
			 struct ibv_recv_wr **bad);
	int (*poll_cq)(struct ibv_cq *cq, int count, struct ibv_wc *wc);
	int (*req_notify_cq)(struct ibv_cq *cq, int solicited_only);

	/* librdmacm */
	struct rdma_event_channel *(*create_event_channel)(void);
	void (*destroy_event_channel)(struct rdma_event_channel *channel);
	int (*create_id)(struct rdma_event_channel *channel, struct rdma_cm_id **id,
			 void *context, enum rdma_port_space ps);
	int (*destroy_id)(struct rdma_cm_id *id);
	int (*bind_addr)(struct rdma_cm_id *id, struct sockaddr *address);
	int (*resolve_addr)(struct rdma_cm_id *id, struct sockaddr *source,
			    struct sockaddr *target, int timeout_ms);
	int (*resolve_route)(struct rdma_cm_id *id, int timeout_ms);
	int (*listen)(struct rdma_cm_id *id, int backlog);
	uint16_t (*get_src_port)(struct rdma_cm_id *id); /* network order */
	int (*create_qp)(struct rdma_cm_id *id, struct ibv_pd *pd,
			 struct ibv_qp_init_attr *attr);
	void (*destroy_qp)(struct rdma_cm_id *id);
	int (*connect)(struct rdma_cm_id *id, struct rdma_conn_param *param);
	int (*accept)(struct rdma_cm_id *id, struct rdma_conn_param *param);
	int (*reject)(struct rdma_cm_id *id, const void *data, uint8_t length);
	int (*disconnect)(struct rdma_cm_id *id);
	int (*get_cm_event)(struct rdma_event_channel *channel,
			    struct rdma_cm_event **event);
	int (*ack_cm_event)(struct rdma_cm_event *event);
	int (*notify)(struct rdma_cm_id *id, enum ibv_event_type event);
	int (*set_option)(struct rdma_cm_id *id, int level, int name, void *value,
			  size_t size);
};

/* Loaded once. ERR_REQUIRE names the missing library or function. */
int verbs_lib_load(const struct verbs_lib **lib_p);
/* Tests: use this table from now on; NULL: the real one. */
void verbs_lib_use(const struct verbs_lib *lib);

#endif
