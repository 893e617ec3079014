/* SPDX-License-Identifier: Apache-2.0 */
/*
 * keep: the memory of chunks, and its contents, survive this process. Both are memfds
 * that systemd stores (FileDescriptorStoreMax=) and passes to the next process. Without
 * it there is no keep: all calls take NULL.
 */
#ifndef KVD_STORE_KEEP_H
#define KVD_STORE_KEEP_H

struct keep;
struct store;

/* *fd_p: the memory, from the previous process or new; the caller's. *keep_p NULL: it is
 * not kept. */
int keep_new(struct store *store, int *fd_p, struct keep **keep_p);
void keep_free(struct keep *keep); /* its records stay */
/* The parts of the previous process; once, before any other call. */
void keep_restore(struct keep *keep);
/* The memory is registered: this process may reuse the restored parts. */
void keep_settled(struct keep *keep);

#endif
