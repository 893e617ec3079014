/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client_adopt: what the files behind kvd_adopt() share: the process's memory
 * map, and the one registry of adopted ranges.
 *
 *   client_maps.c            /proc/self/maps
 *   client_adopt_registry.c  what is adopted, for all copies of libkvd
 *   client_adopt_check.c     may this memory be moved?
 *   client_adopt_fork.c      what a child of fork() has of it
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
	char name[128]; /* cut; empty when there is none */
};

/* Every area that has a byte in [begin, end), in order, until fn gives non-zero,
 * which is the result. -KVD_E_IO when the map cannot be read. */
int maps_each(uint64_t begin, uint64_t end,
	      int (*fn)(void *arg, const struct maps_area *area), void *arg);

/* ---- may it be moved? ----------------------------------------------------- */

/* The whole pages that hold [address, address + bytes), all of which belong to
 * it, or -KVD_E_IMPORT with a text. `vouched`: the caller says that they do. */
int adopt_check(const struct kvd_adopt_args *args, uint64_t *begin_p, uint64_t *end_p);

/* ---- the registry --------------------------------------------------------- */

/* Private to the registry but for the fields that the move reads and writes. */
struct adopt_range {
	uint64_t begin, bytes; /* whole pages */
	uint64_t done;	       /* bytes from `begin` that are moved */
	uint64_t file_begin;   /* where `begin` lies in the memfd */
	uint64_t inode;	       /* of the memfd */
	uint64_t device;       /* … and of its file system */
	int32_t fd;	       /* open as long as the entry is used */
	uint32_t refs;
	uint32_t used;
	uint32_t huge; /* slices of the memfd in huge pages */
};

struct adopt_registry;

/* Lock the registry of this process and forget what is not mapped any more.
 * `make` it when there is none yet. NULL: with this thread's error, or none. */
struct adopt_registry *adopt_registry_lock(bool make);
void adopt_registry_unlock(struct adopt_registry *registry);
/* The range that holds the first byte; NULL: none. */
struct adopt_range *adopt_registry_find(struct adopt_registry *registry, uint64_t begin,
					uint64_t end);
struct adopt_range *adopt_registry_by_inode(struct adopt_registry *registry,
					    uint64_t inode);
/* A new entry with one reference; takes the fd on success. NULL with the error. */
struct adopt_range *adopt_registry_add(struct adopt_registry *registry, int fd,
				       uint64_t begin, uint64_t bytes,
				       uint64_t file_begin);
/* An entry whose memory is mapped nowhere and that nobody refers to: closed. */
void adopt_registry_settle(struct adopt_registry *registry);

/* What is adopted at this moment, for mem_free(); NULL: nothing. Its fds are borrowed. */
struct adopt_range *adopt_registry_note(uint32_t *count_p);

/* From now on children of fork() get private views of what is adopted. */
void adopt_fork_watch(void);

/* For regions: is all of it adopted? *fd_p is the caller's to close. */
bool client_adopted(const void *address, uint64_t bytes, int *fd_p, uint64_t *offset_p);

#endif
