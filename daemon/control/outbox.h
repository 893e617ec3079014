/* SPDX-License-Identifier: Apache-2.0 */
/*
 * outbox: replies to one client. outbox_flush() sends the replies of one turn together.
 * Data that the socket does not accept is queued, up to a limit. Descriptors are sent
 * with the first byte of their reply.
 */
#ifndef KVD_OUTBOX_H
#define KVD_OUTBOX_H

#include <stdbool.h>
#include <stddef.h>

#include "daemon/base/account.h"
#include "daemon/base/list.h"
#include "daemon/base/text.h"

#define OUTBOX_BATCH_BYTES 2048u

struct outbox {
	int fd; /* the client's socket, not owned */
	struct list waiting;
	struct account *account; /* charged for the replies, not held; NULL: no account */
	struct charge charge;	 /* for the contents of `waiting` */
	size_t bytes;		 /* not sent yet */
	size_t batched;		 /* bytes of `batch`; 0 while any are in `waiting` */
	char batch[OUTBOX_BATCH_BYTES];
};

void outbox_init(struct outbox *outbox, int fd);
void outbox_fini(struct outbox *outbox); /* drops queued replies */
static inline bool outbox_empty(const struct outbox *outbox)
{
	return outbox->batched == 0 && list_empty(&outbox->waiting);
}
/* Takes `text`, also on failure. Call outbox_flush() when the replies of the turn are
 * complete. Descriptors of queued replies are duplicated. ERR_LIMIT: more than `cap`
 * bytes would be queued; ERR_IO: the client disconnected; ERR_NOMEM. */
int outbox_send(struct outbox *outbox, struct text *text, const int *fds,
		unsigned int fd_count, size_t cap);
/* Send until the socket is full, or the time of a turn is used up: call again while it
 * is not empty. ERR_IO: the client disconnected. */
int outbox_flush(struct outbox *outbox);

#endif
