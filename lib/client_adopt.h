/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client_adopt: shared by the files of kvd_adopt(): the process's memory map, and the
 * registry of adopted ranges.
 *
 *   client_maps.c            /proc/self/maps
 *   client_adopt_registry.c  the adopted ranges, for all copies of libkvd
 *   client_adopt_check.c     checks whether memory may be moved
 *   client_adopt_fork.c      private views for children of fork()
 *   client_adopt.c           the move, and the public functions
 */
#ifndef KVD_PROTO_CLIENT_ADOPT_H
#define KVD_PROTO_CLIENT_ADOPT_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "lib/kvd.h"

#define ADOPT_HUGE_BYTES (UINT64_C(2) << 20)
#define ADOPT_RANGES_MAX 4096u

/* ---- the map of this process --------------------------------------------- */

struct maps_area {
	uint64_t begin, end;
	bool readable, writable, executable, shared;
	uint64_t offset;
	uint64_t inode; /* 0: anonymous */
	char name[128]; /* truncated; empty if there is none */
};

/* Calls fn for every area with a byte in [begin, end), in order, until it returns
 * non-zero, which is the result. -KVD_E_IO when the map cannot be read. */
int maps_each(uint64_t begin, uint64_t end,
	      int (*fn)(void *arg, const struct maps_area *area), void *arg);

/* ---- may it be moved? ----------------------------------------------------- */

/* The whole pages of [address, address + bytes), which must all belong to it; else
 * -KVD_E_IMPORT with a text. `vouched`: the caller guarantees it. */
int adopt_check(const struct kvd_adopt_args *args, uint64_t *begin_p, uint64_t *end_p);

/* ---- the registry --------------------------------------------------------- */

/* Private to the registry, except the fields that the move reads and writes. */
struct adopt_range {
	uint64_t begin, bytes; /* whole pages */
	uint64_t done;	       /* bytes from `begin` that are moved */
	uint64_t file_begin;   /* offset of `begin` in the memfd */
	uint64_t inode;	       /* of the memfd */
	uint64_t device;       /* … and of its file system */
	int32_t fd;	       /* open as long as the entry is used */
	uint32_t used;
	uint32_t huge; /* slices of the memfd in huge pages */
};

struct adopt_registry;

/* Lock the registry of this process and drop ranges that are no longer mapped. `make`:
 * create it if there is none. NULL: with this thread's error, or no registry. */
struct adopt_registry *adopt_registry_lock(bool make);
void adopt_registry_unlock(struct adopt_registry *registry);
/* The range that holds the first byte; NULL: none. */
struct adopt_range *adopt_registry_find(struct adopt_registry *registry, uint64_t begin,
					uint64_t end);
/* A new entry; takes the fd on success. NULL with the error. */
struct adopt_range *adopt_registry_add(struct adopt_registry *registry, int fd,
				       uint64_t begin, uint64_t bytes,
				       uint64_t file_begin);
/* Drop the entries without mapped memory. */
void adopt_registry_settle(struct adopt_registry *registry);

/* The ranges adopted at this moment, for mem_free(); NULL: none. Their fds are
 * borrowed. */
struct adopt_range *adopt_registry_note(uint32_t *count_p);

/* From now on children of fork() get private views of adopted ranges. */
void adopt_fork_watch(void);

/* For regions: is all of it adopted? The caller closes *fd_p. */
bool client_adopted(const void *address, uint64_t bytes, int *fd_p, uint64_t *offset_p);

#endif
