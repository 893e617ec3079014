/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store: an engine's memory, and a way to look at it and to write it without asking
 * the end that has imported it: a memfd or shm object by pread(), a process's private
 * memory by process_vm_readv(). So it can be read while a transfer runs, after an end
 * was killed, and when it was cut. Lives in the driver; for an end on another machine
 * in the keeper there.
 */
#ifndef TESTS_CONFORM_STORE_H
#define TESTS_CONFORM_STORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "daemon/memory/memory.h"

struct store {
	enum memory_kind kind;
	uint64_t length;
	int fd;	     /* -1: none (vm), or not there yet (linear: the end makes it) */
	pid_t owner; /* vm */
	int owner_sock;
	uint64_t address;
};

/* Of kind SEALED, GUARDED, VM or LINEAR. 0 or -errno. */
int store_init(struct store *store, enum memory_kind kind, uint64_t length);
void store_fini(struct store *store); /* closes the fd, ends the owner; idempotent */
/* False, with errno: the memory is gone. */
bool store_read(const struct store *store, uint64_t offset, void *buf, size_t len);
bool store_write(struct store *store, uint64_t offset, const void *buf, size_t len);
bool store_cut(struct store *store, uint64_t length); /* ftruncate */
void store_owner_kill(struct store *store);
/* The process of a vm memory's owner. */
int owner_main(int sock, uint64_t length);

#endif
