/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/loop/mailbox.h"

#include <assert.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define ITEMS_A_LOOK 8u /* at the clock */

static void mailbox_on_wake(struct loop_wake *wake)
{
	mailbox_deliver(container_of(wake, struct mailbox, wake));
}

static void mailbox_on_deliver(struct loop_defer *defer)
{
	mailbox_deliver(container_of(defer, struct mailbox, deliver));
}

int mailbox_init(struct mailbox *box, struct loop *loop,
		 void (*on_item)(struct mailbox *box, struct list *item))
{
	int r;

	assert(on_item);
	*box = (struct mailbox){0};
	r = loop_wake_init(&box->wake, loop, mailbox_on_wake);
	if (r < 0)
		return err_pass(r);
	loop_defer_init(&box->deliver, mailbox_on_deliver);
	pthread_mutex_init(&box->lock, NULL);
	list_init(&box->items);
	box->on_item = on_item;
	return 0;
}

void mailbox_fini(struct mailbox *box)
{
	if (!box->on_item)
		return;
	loop_wake_fini(&box->wake);
	loop_defer_cancel(&box->deliver);
	while (list_pop_front(&box->items))
		;
	pthread_mutex_destroy(&box->lock);
	box->on_item = NULL;
}

/* Was the box empty? Only then a wake-up is due: the loop takes items, under the same
 * lock, until it finds none. An item that is in the box already stays where it is. */
bool mailbox_add(struct mailbox *box, struct list *item)
{
	bool first;

	assert(box->on_item);
	pthread_mutex_lock(&box->lock);
	first = list_empty(&box->items);
	if (list_empty(item))
		list_push_back(&box->items, item);
	pthread_mutex_unlock(&box->lock);
	return first;
}

void mailbox_put(struct mailbox *box, struct list *item)
{
	if (mailbox_add(box, item))
		mailbox_wake(box);
}

void mailbox_wake(struct mailbox *box)
{
	loop_wake(&box->wake);
}

void mailbox_post(struct mailbox *box, struct list *item)
{
	(void)mailbox_add(box, item);
	loop_defer(box->wake.watch.loop, &box->deliver);
}

void mailbox_forget(struct mailbox *box, struct list *item)
{
	assert(box->on_item);
	pthread_mutex_lock(&box->lock);
	list_remove(item);
	pthread_mutex_unlock(&box->lock);
}

void mailbox_deliver(struct mailbox *box)
{
	struct list *item;

	for (unsigned int n = 1;; n++) {
		pthread_mutex_lock(&box->lock);
		item = list_pop_front(&box->items);
		pthread_mutex_unlock(&box->lock);
		if (!item)
			return;
		/* without the lock: it may put the item in again, or free it */
		box->on_item(box, item);
		if (n % ITEMS_A_LOOK == 0 && loop_enough(box->wake.watch.loop)) {
			/* a put into one that is not empty wakes nothing */
			loop_defer(box->wake.watch.loop, &box->deliver);
			return;
		}
	}
}
