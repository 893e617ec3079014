/* SPDX-License-Identifier: Apache-2.0 */
/* What the files of fake_verbs know of each other. */
#ifndef KVD_TESTS_LIB_FAKE_VERBS_IMPL_H
#define KVD_TESTS_LIB_FAKE_VERBS_IMPL_H

#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>

#include "daemon/base/list.h"
#include "tests/lib/fake_verbs.h"

#define FAKE_DEVICES 8u
#define FAKE_MRS 4096u
#define FAKE_SGES 32u
#define FAKE_INLINE 256u
#define FAKE_PRIVATE 64u

struct fake_device {
	struct ibv_device device;
	struct in_addr address;
	char interface[16];
	bool down;
	enum ibv_wc_status fail_next, unconfirm_next, fail_loopback;
	struct list contexts; /* fake_context.link */
};

struct fake_context {
	struct ibv_context context;
	struct fake_device *device;
	struct rdma_event_channel *channel; /* NULL: opened by hand */
	struct list link;
	struct list events; /* fake_async.link */
	struct list qps;    /* fake_qp.context_link */
};

struct fake_async {
	struct list link;
	struct ibv_async_event event;
};

/* a completion channel */
struct fake_completions {
	struct ibv_comp_channel channel;
	struct list cqs; /* fake_cq.event_link: have an event to give */
	atomic_uint refs;
};

struct fake_wc {
	struct ibv_wc wc;
	struct fake_qp *qp;
	unsigned int wrs; /* of a send queue that it gives back */
};

struct fake_cq {
	struct ibv_cq cq;
	struct list event_link;
	bool armed;
	bool of_raw;	      /* of a queue pair without a connection manager */
	struct fake_wc *ring; /* cqe of them */
	unsigned int head, count;
};

struct fake_wr {
	struct ibv_send_wr wr;
	struct ibv_sge sge[FAKE_SGES];
	uint8_t data[FAKE_INLINE];
	bool is_inline;
};

struct fake_recv {
	uint64_t wr_id;
	struct ibv_sge sge;
	bool has_sge;
};

struct fake_qp {
	struct ibv_qp qp;
	struct list context_link, wire_link;
	struct fake_qp *remote;
	struct ibv_qp_cap cap;
	struct fake_wr *sends; /* a ring of cap.max_send_wr */
	unsigned int send_head, send_count, send_used, unsignalled;
	struct fake_recv *recvs;
	unsigned int recv_head, recv_count;
	bool up; /* RTS */
};

struct fake_reg {
	struct ibv_mr mr;
	struct fake_verbs_mr told;
	uint8_t *alias; /* of a GPU's memory; NULL: the address itself is good */
	void *map;
	size_t map_bytes;
	ino_t file;
};

/* a WRITE that is still on the wire */
struct fake_adrift {
	struct list link;
	struct fake_qp *to; /* NULL: dead by now */
	uint64_t address, bytes;
	uint32_t key;
	uint8_t data[];
};

struct fabric {
	bool here;
	pthread_mutex_t lock; /* registration is on helper threads */
	pthread_cond_t go;    /* under it: !reg_wait, !free_wait */
	bool reg_wait;
	atomic_uint strike; /* so many calls to go */
	bool stall_loopback;
	const struct ibv_qp *stalled;
	pthread_t waits_not; /* whose registrations would be a fault */
	unsigned int reg_waiting, free_waiting;
	bool free_wait;
	struct fake_device devices[FAKE_DEVICES];
	unsigned int device_count;
	struct fake_reg mrs[FAKE_MRS];
	struct list late; /* fake_gpu.c's: writes into GPUs that have not landed */
	int (*gpu_file)(uint64_t address, int *fd_p, uint64_t *offset_p);
	unsigned int mr_count;
	struct list wire; /* fake_qp.wire_link: something to run */
	struct list ids;  /* fake_id.link */
	struct fake_verbs_rules rules;
	struct fake_verbs_count count;
	unsigned int contexts, pds, event_channels;
	atomic_uint channels, cqs, qps; /* helpers make some */
	uint16_t next_port;
	uint32_t next_number;
	bool hold, keep_late;
	struct list adrift; /* fake_adrift.link */
	struct loop_timer timer;
	bool slow;
	uint64_t slow_bytes;
	char sysfs[64];
};
extern struct fabric fabric;
extern struct verbs_lib fake_table; /* each file fills its part */

/* A rule of the verbs was broken by who uses them: says so and dies. */
void fake_broken(const char *fmt, ...) __attribute__((format(printf, 1, 2), noreturn));
int fake_eventfd(void);
void fake_raise(int fd); /* readable */
void fake_lower(int fd);

void *fake_make(size_t size);
struct fake_device *fake_device_at(struct ibv_context *context);
bool fake_is_of_qp(enum ibv_event_type type);
void fake_async_qp(struct fake_qp *qp, enum ibv_event_type type);
/* May `length` bytes there be touched with this key? */
bool fake_allowed(const struct fake_qp *qp, uint64_t address, uint64_t length,
		  uint32_t key, bool remote, int access);

/* The next call that makes or uses a queue pair of no connection: does it fail? */
bool fake_strike_raw(void);
/* The registration of a key that fake_allowed() has passed. */
struct fake_reg *fake_reg_of(uint32_t key);

/* fake_verbs_gpu.c */
bool fake_gpu_map(struct fake_reg *reg, int fd, uint64_t offset); /* false: errno */
void fake_gpu_unmap(struct fake_reg *reg);			  /* the lock is held */
/* As that device's adapter does it; what it writes into a GPU lands late. */
void fake_gpu_store(const struct fake_device *device, uint32_t key, uint64_t address,
		    const void *from, uint64_t bytes);
void fake_gpu_load(const struct fake_device *device, uint32_t key, uint64_t address,
		   void *to, uint64_t bytes);

struct fake_context *fake_context_open(struct fake_device *device,
				       struct rdma_event_channel *channel);
int fake_context_close(struct ibv_context *context);
int fake_qp_make(struct ibv_context *context, struct ibv_pd *pd,
		 struct ibv_qp_init_attr *attr, struct ibv_qp **qp_p);
void fake_qp_free(struct ibv_qp *qp);
void fake_qp_error(struct fake_qp *qp); /* state ERR: all comes back as flushed */
void fake_qp_join(struct ibv_qp *a, struct ibv_qp *b);
struct fake_device *fake_device_of(const struct sockaddr *address);

void fake_qp_begin(void);
void fake_cm_begin(void);
void fake_cm_end(void);

#endif
