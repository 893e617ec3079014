/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mailbox: items that other threads pass to the loop. A list under a lock and one wake-up
 * for all its items: items are embedded in their owners, handed over in the order they
 * were put in, some a turn (loop_enough()), and may be put in again from then on.
 */
#ifndef KVD_LOOP_MAILBOX_H
#define KVD_LOOP_MAILBOX_H

#include <pthread.h>
#include <stdbool.h>

#include "daemon/base/list.h"
#include "daemon/loop/loop.h"

struct mailbox {
	struct loop_wake wake;
	struct loop_defer deliver;
	pthread_mutex_t lock;
	struct list items;
	void (*on_item)(struct mailbox *box, struct list *item); /* loop's thread */
};

int mailbox_init(struct mailbox *box, struct loop *loop,
		 void (*on_item)(struct mailbox *box, struct list *item));
/* No more puts; remaining items are dropped. A zeroed one is allowed. */
void mailbox_fini(struct mailbox *box);

/* No effect on an item that is queued already. Any thread: */
void mailbox_put(struct mailbox *box, struct list *item);
/* The same in two steps, for callers with many items: if one returns true, a wake-up is
 * due. */
bool mailbox_add(struct mailbox *box, struct list *item);
void mailbox_wake(struct mailbox *box);
/* The loop's: handed over in this turn, without a wake-up. */
void mailbox_post(struct mailbox *box, struct list *item);
/* Removes the item, because its owner ends. */
void mailbox_forget(struct mailbox *box, struct list *item);
/* Hand over the items, as far as the turn's time allows. Loop's thread. */
void mailbox_deliver(struct mailbox *box);

#endif
