/* SPDX-License-Identifier: Apache-2.0 */
/*
 * region: a range of engine memory, imported once and registered with every transport in
 * use. Pools, posted ops and exports pin it; it closes at zero pins, never under DMA.
 */
#ifndef KVD_REGION_H
#define KVD_REGION_H

#include <stdint.h>

#include "daemon/base/context.h"
#include "daemon/base/err.h"
#include "daemon/base/sm.h"
#include "daemon/transport/transport.h"

struct session;

enum region_kind {
	REGION_MEMFD,
	REGION_SHM,
	REGION_VM,
	REGION_CUDA_IPC,
	REGION_CUDA_VMM,
	REGION_DMABUF,
	REGION_FILE,
	REGION_KINDS,
};
enum region_state { REGION_IMPORTING, REGION_READY, REGION_CLOSING };

extern const struct sm_table region_table; /* of region.sm */

/* Files have no address and are numbered from here on; memory is below. */
#define REGION_FILE_ADDRESS (UINT64_C(1) << 62)

struct region {
	uint64_t id;
	struct session *session;
	enum region_kind kind;
	struct sm sm; /* enum region_state */
	char name[64];
	uint64_t address; /* the engine's address of byte 0; 0 = not given */
	uint64_t length;
	struct memory *memory;
	/* index = the transport's place in kvd->transports; NULL = not usable there */
	struct xp_reg *regs[TRANSPORTS_MAX];
	unsigned int pins;	 /* pools and ops */
	unsigned int pools;	 /* from pools, each counted once */
	uint64_t pool_mark;	 /* pool.c's */
	uint32_t listed;	 /* its place in the list that is being written */
	unsigned int registered; /* number of region.register calls with this id */
	void *impl;
};

struct region_args {
	enum region_kind kind;
	/* memfd, cuda_vmm, dmabuf, file: taken when region_register() returns 0 */
	int fd;
	const char *shm_name; /* shm; NULL: the object that `fd` refers to */
	uint64_t offset;      /* of byte 0 in the object, allocation, file; not vm */
	const char *device;   /* cuda_*: UUID or PCI id */
	const void *ipc;      /* cuda_ipc: CU_IPC_BYTES, of the allocation's base */
	uint64_t allocation;  /* cuda_vmm: bytes of the whole allocation */
	uint64_t length;
	uint64_t address; /* vm, file: required */
	const char *name; /* may be NULL */
};

/*
 * Import on a helper and register with every transport that supports memory of this kind.
 * on_done: a READY region, or NULL and the fault; exactly once, after a return of 0
 * (possibly inside the call, when it is registered already). The same memory again gives
 * the same region and is counted. If the session ended meanwhile the fault is
 * ERR_SESSION.
 */
int region_register(struct session *session, const struct region_args *args,
		    void (*on_done)(void *arg, struct region *region,
				    const struct err *err),
		    void *arg);
/* Undo one registration. ERR_BUSY while a pool uses the region. The last one closes
 * it; on_done when the memory is not accessed any more. */
int region_unregister(struct region *region, void (*on_done)(void *arg), void *arg);
/* The session ends: close all of its regions; each drains by itself. */
void regions_close(struct session *session);

struct region *region_find(struct session *session,
			   uint64_t id); /* READY; or NULL + ERR_NOTFOUND */
void region_pin(struct region *region);
void region_unpin(struct region *region);
const char *region_kind_name(enum region_kind kind);

#endif
