/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep: the memory of chunks, and what lies in it, outlive this process. Both are memfds
 * that systemd holds (FileDescriptorStoreMax=) and gives to the next one. Without it
 * there is no keep: all calls take NULL.
 */
#ifndef KVD_STORE_KEEP_H
#define KVD_STORE_KEEP_H

#include <stdint.h>

struct keep;
struct store;

/* *fd_p: the memory, of the process before or new; the caller's. *keep_p NULL: nobody
 * keeps it. */
int keep_new(struct store *store, int *fd_p, struct keep **keep_p);
void keep_free(struct keep *keep); /* what is noted stays */
/* The parts that the process before had; once, before any other call. */
void keep_restore(struct keep *keep);
/* The memory is there: this process may be trusted with what it was given. */
void keep_settled(struct keep *keep);

#endif
