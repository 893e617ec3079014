/* SPDX-License-Identifier: Apache-2.0 */
/* Shared by every part of the store. */
#include "daemon/store/store.h"

#include "daemon/store/store_impl.h"

int store_ready(struct store *store)
{
	if (!store)
		return err_raise(ERR_STATE,
				 "this daemon stores no chunks; set chunk_memory");
	if (store->failed.code != ERR_OK)
		return err_reraise(&store->failed);
	if (!store->session)
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	if (!store->region)
		return err_raise(ERR_BUSY, "chunk_memory is not ready yet");
	return 1;
}

void store_tidy(struct store *store)
{
	loop_defer(store->kvd->loop, &store->tidy);
}

static bool wake_step(struct loop_work *work)
{
	struct store *store = container_of(work, struct store, wake);
	struct store_waiter *waiter =
		list_first(&store->waking, struct store_waiter, link);

	if (waiter) {
		list_remove(&waiter->link);
		waiter->wake(waiter, NULL);
	}
	return !list_empty(&store->waking);
}

void store_wake(struct store *store)
{
	if (list_empty(&store->waiters))
		return;
	list_append(&store->waking, &store->waiters);
	loop_work_defer(&store->wake);
}

void store_wake_init(struct store *store)
{
	list_init(&store->waiters);
	list_init(&store->waking);
	loop_work_init(&store->wake, store->kvd->loop, wake_step, NULL);
}

struct live *store_costs(const struct kvd *kvd)
{
	const struct store *store = store_of(kvd);

	return store ? store->costs : NULL;
}
