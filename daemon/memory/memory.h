/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory: engine memory as this daemon can reach it, imported once.
 *
 * Reference-counted from any thread: the region holds one reference, every
 * posted op and every registration with a transport another, so nothing is
 * unmapped under a copy or a DMA. Importing and releasing map, populate and
 * unmap: both may block and belong on helper threads.
 *
 * Kinds differ in permitted access:
 *   sealed  a memfd that cannot shrink, populated: any thread, any library
 *   guarded memory that its owner may truncate (POSIX shm): only copy threads, under the
 *           SIGBUS guard, which kills this memory and nothing else
 *   vm      another process's private memory: only copy threads, by its /proc/PID/mem, in
 *           a helper process (vm.h); lost when the process ends
 *   linear  memory of this daemon itself (bounce buffers, tests)
 *   device  memory of a GPU: the GPU's own copies, by copy threads, and adapters; no
 *           processor. `base` is NULL. Memory registered as a dma-buf has no address here
 *           either: only adapters reach it
 *   file    not memory: bytes of a file that an engine opened, read and written by the
 *           threads of copy_file.h; no transport has it. `base` is NULL
 */
#ifndef KVD_TRANSPORT_MEMORY_H
#define KVD_TRANSPORT_MEMORY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct gpu;
struct gpu_handle;
struct gpu_import;
struct gpu_pin;
struct gpu_device;
struct warden;

enum memory_kind {
	MEMORY_SEALED,
	MEMORY_GUARDED,
	MEMORY_VM,
	MEMORY_LINEAR,
	MEMORY_DEVICE,
	MEMORY_FILE
};

/* Of private memory of another process. */
struct memory_owner {
	struct warden *warden; /* forks the processes that read and write it */
	uid_t uid;	       /* the user charged for hanging processes */
	pid_t pid;	       /* as seen by this daemon; 0: not */
	int pidfd;	       /* -1: none */
};

struct memory {
	enum memory_kind kind;
	uint8_t *base;	    /* the mapping; NULL for vm, device and file */
	uint64_t length;    /* bytes */
	bool writable;	    /* mapped for writing; a peer's memory never is */
	bool write_only;    /* file: opened for writing */
	bool sealed;	    /* a memfd: its file cannot shrink, whatever the kind */
	int fd;		    /* memfd or shm object, -1: cannot be passed on */
	uint64_t fd_offset; /* the offset of `base` in it */
	struct memory_owner owner; /* vm; file: its user only */
	int mem_fd;		   /* vm: the owner's /proc/PID/mem; file: the file */
	uint64_t address;	/* vm: first byte in the owner's address space; device: in
				   this process, as the driver sees it, 0: not mapped;
				   file: the offset of byte 0 */
	struct gpu_pin *pin;	/* of the daemon's own memory: offered to GPUs; NULL */
	struct gpu_import *gpu; /* device: NULL: a dma-buf only */
	int dmabuf_fd;		/* device: the whole of it for adapters, -1: none */
	uint64_t dmabuf_offset; /* of byte 0 in it */
	atomic_bool dead;	/* faulted, or its process has ended: unusable */
	atomic_int refs;
};

/* Mapped here, and nobody can truncate it: any thread may touch it, without a guard. */
static inline bool memory_is_plain(const struct memory *memory)
{
	return memory->kind == MEMORY_SEALED || memory->kind == MEMORY_LINEAR;
}

/* The device whose kernels can read all of it; NULL: host memory, or none. */
struct gpu_device *memory_device(const struct memory *memory);

/*
 * Import. On success *memory_p has one reference. The fd is duplicated, the
 * caller keeps its own. Refusals are ERR_IMPORT with cause and remedy ("memfd
 * carries no F_SEAL_SHRINK and refuses to be sealed: create it with
 * MFD_ALLOW_SEALING"), ERR_RANGE when offset + length is beyond the object.
 * `populate` makes every page present (a hole on a full tmpfs would raise
 * SIGBUS later).
 */
int memory_import_memfd(int fd, uint64_t offset, uint64_t length, bool writable,
			struct memory **memory_p);
/* An already open shm object (from a peer daemon), guarded. */
int memory_import_shm_fd(int fd, uint64_t offset, uint64_t length, bool writable,
			 struct memory **memory_p);
/* The same of memory with holes of up to *fill_p bytes, which are filled and reported. */
int memory_import_sparse(int fd, uint64_t offset, uint64_t length, bool writable,
			 uint64_t *fill_p, struct memory **memory_p);
int memory_import_sparse_shm(int fd, uint64_t offset, uint64_t length, bool writable,
			     uint64_t *fill_p, struct memory **memory_p);
/* By a process's /proc/PID/mem, opened for reading at least; `owner` is copied, its pidfd
 * duplicated. Checks that one byte at each end can be read. */
int memory_import_vm(const struct memory_owner *owner, int mem_fd, uint64_t address,
		     uint64_t length, struct memory **memory_p);
/* [offset, offset + length) of the allocation that the handle names; shared with other
 * ranges of it that `owner` has (import.h). */
int memory_import_device(struct gpu *gpu, uint64_t owner, const struct gpu_handle *handle,
			 uint64_t offset, uint64_t length, bool writable,
			 struct memory **memory_p);
/* A dma-buf of a device's memory, for adapters only. */
int memory_import_dmabuf(int fd, uint64_t offset, uint64_t length,
			 struct memory **memory_p);
/* [offset, offset + length) of a file or block device that a gate let in (gate/vet.h); it
 * may reach past the end. `uid`: the user charged for its threads. ERR_IMPORT: no such
 * file, or an append-only file. */
int memory_import_file(int fd, uint64_t offset, uint64_t length, uid_t uid,
		       struct memory **memory_p);
/* Can copy threads reach it? ERR_IMPORT has the reason. */
int memory_check_copyable(const struct memory *memory);
/* An anonymous memfd of the daemon, sealed, mapped and populated. */
int memory_new_linear(uint64_t length, struct memory **memory_p);
/* Such memory, with pages allocated on use, or with memory_populate(). */
int memory_new_empty(uint64_t length, struct memory **memory_p);
/* Mapped memory with a file. Slow; any thread, also while it is used. */
int memory_populate(struct memory *memory);
/* While it is set, filling memory stops, because the process is ending. */
void memory_hurry(bool hurry);

/* Mapped memory: if it cannot be truncated, GPUs may reach it directly from now on until
 * it is unmapped (pin.h). Where that fails, they need an extra copy. */
void memory_offer(struct memory *memory, struct gpu *gpu);

struct memory *memory_ref(struct memory *memory);
/* The last reference unmaps and closes (may take long: helper thread). */
void memory_unref(struct memory *memory);

/* No access has found that a vm memory's address space has ended, that the memory was
 * truncated, or that its device failed. */
bool memory_owner_alive(struct memory *memory);

/* Install the SIGBUS guard of this process, once, before threads start. */
int memory_guard_install(void);
/* Run fn(arg) so that a SIGBUS inside memory of kind guarded marks it dead and
 * makes this return false; only for copy threads. fn must hold no lock. */
bool memory_guard_run(void (*fn)(void *arg), void *arg, struct memory *a,
		      struct memory *b);

#endif
