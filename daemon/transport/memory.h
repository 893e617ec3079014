/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory: engine memory as this daemon can reach it, imported once.
 *
 * Reference-counted from any thread: the region holds one reference, every
 * posted op and every registration with a transport another, so nothing is
 * unmapped under a copy or a DMA. Importing and releasing map, populate and
 * unmap: both may block and belong on helper threads.
 *
 * Kinds differ in who may touch them:
 *   sealed  a memfd that cannot shrink, populated: any thread, any library
 *   guarded memory that its owner may cut (POSIX shm): only copy threads, under
 *           the SIGBUS guard, which kills this memory and nothing else
 *   vm      another process's private memory: only copy threads, by
 *           process_vm_readv/writev; gone when the process is
 *   linear  memory of this daemon itself (bounce buffers, tests)
 */
#ifndef KVD_TRANSPORT_MEMORY_H
#define KVD_TRANSPORT_MEMORY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/base/err.h"

enum memory_kind { MEMORY_SEALED, MEMORY_GUARDED, MEMORY_VM, MEMORY_LINEAR };

struct memory {
	enum memory_kind kind;
	uint8_t *base;	  /* our mapping; NULL for vm */
	uint64_t length;  /* bytes */
	bool writable;	  /* mapped for writing; a peer's memory never is */
	int fd;		  /* memfd or shm object, -1: cannot be passed on */
	uint64_t fd_offset; /* where `base` begins in it */
	pid_t pid;	  /* vm: owner, from SO_PEERCRED */
	int statm_fd;	  /* vm: /proc/<pid>/statm, opened at import; -1 */
	uint64_t address; /* vm: first byte in the owner's address space */
	atomic_bool dead; /* faulted, or its process is gone: no use any more */
	atomic_int refs;
};

/*
 * Import. On success *memory_p has one reference. The fd is duplicated, the
 * caller keeps his. Refusals are ERR_IMPORT with cause and remedy ("memfd
 * carries no F_SEAL_SHRINK and refuses to be sealed: create it with
 * MFD_ALLOW_SEALING"), ERR_RANGE when offset + length is beyond the object.
 * `populate` makes every page present (a hole on a full tmpfs would raise
 * SIGBUS later).
 */
int memory_import_memfd(int fd, uint64_t offset, uint64_t length, bool writable,
			struct memory **memory_p);
int memory_import_shm(const char *posix_name, uint64_t offset, uint64_t length,
		      bool writable, struct memory **memory_p);
/* An already open shm object (from a peer daemon), guarded. */
int memory_import_shm_fd(int fd, uint64_t offset, uint64_t length, bool writable,
			 struct memory **memory_p);
/* Checks that the process lives and that one byte at each end can be read. */
int memory_import_vm(pid_t pid, uint64_t address, uint64_t length,
		     struct memory **memory_p);
/* An anonymous memfd of our own, sealed, mapped and populated. */
int memory_new_linear(uint64_t length, struct memory **memory_p);

struct memory *memory_ref(struct memory *memory);
/* The last reference unmaps and closes (may take long: helper thread). */
void memory_unref(struct memory *memory);

/* A vm memory's process still has its address space (statm reads non-zero). */
bool memory_owner_alive(struct memory *memory);

/* Install the SIGBUS guard of this process, once, before threads start. */
int memory_guard_install(void);
/* Run fn(arg) so that a SIGBUS inside memory of kind guarded marks it dead and
 * makes this return false; only for copy threads. fn must hold no lock. */
bool memory_guard_run(void (*fn)(void *arg), void *arg, struct memory *a,
		      struct memory *b);

#endif
