/* SPDX-License-Identifier: Apache-2.0 */
/*
 * outbox: replies on their way to one client: sent at once as far as its socket
 * takes them, the rest queued under a cap. Descriptors go with the first byte of
 * the reply that brings them.
 */
#ifndef KVD_OUTBOX_H
#define KVD_OUTBOX_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/base/list.h"

struct outbox {
	int fd; /* the client's socket, not owned */
	struct list waiting;
	size_t bytes; /* of `waiting`, not sent yet */
};

void outbox_init(struct outbox *outbox, int fd);
void outbox_fini(struct outbox *outbox); /* what waits is dropped */
static inline bool outbox_empty(const struct outbox *outbox)
{
	return list_empty(&outbox->waiting);
}
/* Descriptors are duplicated when they must wait. ERR_LIMIT: more than `cap`
 * bytes would wait; ERR_IO: the client has left; ERR_NOMEM. */
int outbox_send(struct outbox *outbox, const char *text, size_t len, const int *fds,
		unsigned int fd_count, size_t cap);
/* The socket takes more: send until it is full. ERR_IO: the client has left. */
int outbox_flush(struct outbox *outbox);

#endif
