/* SPDX-License-Identifier: Apache-2.0 */
/* A user of the store stays while it has a space. */
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/store/events.h"
#include "daemon/store/store_impl.h"

/* Users found in files are of earlier runs: no other user is evicted for them. */
static int tenant_room(struct store *store, uint64_t generation)
{
	if (store->tenant_count < ARENA_SLABS ||
	    (generation == STORE_NOW && store_evict_tenant(store)))
		return 0;
	return err_raise(ERR_LIMIT,
			 "chunks: %u users have some in use (limit %u, one share of "
			 "memory each); end the engines of one, or use another "
			 "daemon",
			 store->tenant_count, ARENA_SLABS);
}

int store_tenant_of(struct store *store, struct account *account, uint64_t generation,
		    struct store_tenant **tenant_p)
{
	struct store_tenant *tenant;
	int r = 0;

	list_foreach(tenant, &store->tenants, link) {
		if (tenant->account != account)
			continue;
		if (tenant->left) /* it is active again */
			r = tenant_room(store, generation);
		if (r < 0)
			return err_pass(r);
		store->tenant_count += tenant->left;
		tenant->left = false;
		*tenant_p = tenant;
		return 0;
	}
	r = tenant_room(store, generation);
	if (r < 0)
		return err_pass(r);
	tenant = mem_zalloc(sizeof(*tenant));
	if (!tenant)
		return err_pass(-ENOMEM);
	r = arena_owner_new(store->arena, &tenant->owner);
	if (r >= 0 && store->files)
		r = arena_owner_new(store->file_arena, &tenant->file_owner);
	if (r < 0) {
		arena_owner_free(tenant->owner);
		mem_free(tenant);
		return err_pass(r);
	}
	tenant->store = store;
	tenant->account = account;
	account_ref(tenant->account);
	list_push_back(&store->tenants, &tenant->link);
	store->tenant_count++;
	store_tidy(store); /* unless it gets a space */
	*tenant_p = tenant;
	return 0;
}

void store_tenants_tidy(struct store *store)
{
	struct store_tenant *tenant;

	list_foreach_safe(tenant, &store->tenants, link) {
		if (tenant->spaces || tenant->going)
			continue;
		arena_owner_free(tenant->owner);
		arena_owner_free(tenant->file_owner);
		store->tenant_count -= !tenant->left;
		store_events_free(tenant->events);
		account_unref(tenant->account);
		list_remove(&tenant->link);
		mem_free(tenant);
	}
}
