/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fake_verbs: adapters that are not there. A table for verbs_lib_use() in which
 * queue pairs, registrations, completion channels and the connection manager of one
 * process are kept by the rules of the verbs: keys are checked, queues overflow,
 * receives run out, errors flush. So the verbs backend's posting, accounts and
 * faults are tested on a machine without an RDMA device, and what real adapters do
 * rarely, or only to somebody else's memory, is done on demand.
 *
 * Every event channel (so every transport) opens its own context of a device, as a
 * process of its own would. Posted requests run at once, or as the wire lets them.
 */
#ifndef KVD_TESTS_LIB_FAKE_VERBS_H
#define KVD_TESTS_LIB_FAKE_VERBS_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/loop/loop.h"
#include "daemon/transport/verbs/verbs_lib.h"

struct fake_verbs_rules {
	int max_sge, max_qp_wr, max_cqe, max_rd_atom;
	uint64_t max_mr_bytes;
	uint32_t inline_bytes;
	int memory_node;     /* of all host memory; -1: not known */
	int reg_errno;	     /* every registration fails with it */
	int dmabuf_errno;    /* ... of a dma-buf */
	bool peermem;	     /* a GPU's memory can be registered by its address */
	int post_errno;	     /* the next chain fails at its second request */
	bool farewells_lost; /* nobody hears of a disconnect */
	int connects_left;   /* so many more are heard of; -1: all */
};

/* the last registrations, as they were asked for */
struct fake_verbs_mr {
	char device[16];
	void *address;
	uint64_t length, offset, iova;
	int access, fd; /* fd -1: not a dma-buf */
	bool alive;
};

struct fake_verbs_count {
	uint64_t wrs, doorbells, sges, bytes, reads, writes, imms, inlined;
	uint64_t moves;		/* READs and WRITEs that have bytes */
	unsigned int sges_most; /* of a request */
	unsigned int outstanding_reads_most;
	uint64_t unseen; /* writes into a GPU that had not landed when it was let go */
};

/* Installs the table; devices are added next. No fabric may be there. */
void fake_verbs_begin(void);
/* Takes it out again. Dies of what was left behind or of a broken rule. */
void fake_verbs_end(void);
/* One port; its interface has this IPv4 address. Returns its number. */
unsigned int fake_verbs_device(const char *name, const char *interface,
			       const char *address, int numa_node);
/* A PCI device in the sysfs tree, by its way from a root complex
 * ("pci0000:00/0000:00:01.0/0000:01:00.0"); with a name, the adapter of that name. */
void fake_verbs_bus(const char *name, const char *way, int numa_node);
const char *fake_verbs_sysfs(void);			  /* root of the tree */
void fake_verbs_file(const char *path, const char *text); /* in the tree */
struct fake_verbs_rules *fake_verbs_rules(void);
struct fake_verbs_count *fake_verbs_count(void);
const struct fake_verbs_mr *fake_verbs_mr(unsigned int back); /* 0: the last one */

/*
 * Memory of GPUs. A registration of a dma-buf, or of an address that `file` calls a
 * GPU's, has an alias of the adapter's own. What an adapter writes there lands late: when
 * a READ by the same adapter has looked at that memory, or fake_verbs_land() says so.
 */
void fake_verbs_gpu(int (*file)(uint64_t address, int *fd_p, uint64_t *offset_p));
unsigned int fake_verbs_land(void); /* all of it, now; how many writes that were */

/* Registering memory takes until it is let go; on the thread that says so it is a
 * broken rule. */
void fake_verbs_reg_wait(bool wait);
unsigned int fake_verbs_reg_waiting(void);

/* The wire: by default all that is posted runs at once. */
void fake_verbs_hold(bool hold); /* nothing runs but by fake_verbs_step() */
unsigned int fake_verbs_step(unsigned int wrs); /* run so many; how many did */
void fake_verbs_stall(const struct ibv_qp *qp); /* that one's do not; NULL: all do */
/* From the loop's timer, `bytes` every millisecond. NULL: as before. */
void fake_verbs_slow(struct loop *loop, uint64_t bytes);
unsigned int fake_verbs_outstanding(void); /* requests that were posted and did not run */

/* Faults. */
void fake_verbs_port(unsigned int device, bool up); /* with its asynchronous event */
/* An asynchronous event of each open context; `qp`: of the queue pairs there. */
void fake_verbs_async(unsigned int device, enum ibv_event_type type);
/* The next request of that device's queue pairs fails like that. */
void fake_verbs_fail_next(unsigned int device, enum ibv_wc_status status);
/* ... runs, but its confirmation is lost: so it seems to have failed like that. */
void fake_verbs_unconfirm_next(unsigned int device, enum ibv_wc_status status);
/* The so many-th call that makes or uses a loop-back queue pair fails; 0: none. (Of
 * making others, too: they are there when a test says so.) */
void fake_verbs_strike(unsigned int n);
/* The next request over a loop-back of that device fails like that; none is answered. */
void fake_verbs_fail_loopback(unsigned int device, enum ibv_wc_status status);
void fake_verbs_stall_loopback(bool stall);
/* Destroying one takes until it is let go. */
void fake_verbs_free_wait(bool wait);
unsigned int fake_verbs_free_waiting(void);
unsigned int fake_verbs_qps(unsigned int device); /* that are alive */
/* What a failing queue pair has posted is on the wire all the same: it arrives with
 * fake_verbs_late(), if the queue pair that it was for is alive then. */
void fake_verbs_keep_late(bool keep);
unsigned int fake_verbs_late(void); /* how many WRITEs arrived */
/* Connect to a listener as a stranger with these private data; how it ended.
 * `turn` lets the others work while it waits. */
enum rdma_cm_event_type fake_verbs_knock(unsigned int device, uint16_t port,
					 const void *data, uint8_t len,
					 void (*turn)(void));

#endif
