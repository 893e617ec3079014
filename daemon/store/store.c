/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store has a session of its own, for it owns what engines own: a region (its memory,
 * one sealed memfd), pools and rooms. So they are charged, listed and ended like anybody
 * else's, and nothing that moves bytes knows of chunks.
 *
 * What an engine has of the store ends with its session; chunks do not. They are their
 * user's: the tenant of a session is the principal of its account.
 */
#include "daemon/store/store.h"

#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/session/session.h"
#include "daemon/store/events.h"
#include "daemon/store/files.h"
#include "daemon/store/store_impl.h"

int store_ready(struct store *store)
{
	if (!store)
		return err_raise(ERR_STATE,
				 "this daemon keeps no chunks: set chunk_memory");
	if (store->failed.code != ERR_OK)
		return err_reraise(&store->failed);
	if (!store->session)
		return err_raise(ERR_DRAIN, "the daemon is stopping");
	if (!store->region)
		return err_raise(ERR_BUSY, "the memory for chunks is being made");
	return 1;
}

/* ---- life ---- */

static void on_tidy(struct loop_defer *defer)
{
	store_tidy_now(container_of(defer, struct store, tidy));
}

void store_tidy_init(struct store *store)
{
	loop_defer_init(&store->tidy, on_tidy);
}

void store_tidy_now(struct store *store)
{
	struct store_tenant *tenant;

	loop_defer_cancel(&store->tidy);
	if (files_scanning(store->files)) /* it names classes that have no part yet */
		return;
	store_spaces_tidy(store);
	arena_tidy(store->arena);
	if (store->files)
		arena_tidy(files_arena(store->files));
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

void store_tidy(struct store *store)
{
	loop_defer(store->kvd->loop, &store->tidy);
}

unsigned int store_live(const struct store *store)
{
	return store ? store->moves_live : 0;
}

bool store_drained(const struct store *store)
{
	return !store || (files_drained(store->files) && store->lends == 0);
}

bool store_disk_stands(const struct store *store)
{
	struct store_files figures;

	files_figures(store ? store->files : NULL, &figures);
	return figures.stands;
}

struct live *store_costs(const struct kvd *kvd)
{
	const struct store *store = store_of(kvd);

	return store ? store->costs : NULL;
}

/* ---- tenants, sessions ---- */

/* Those in files are of users who were here before: nobody leaves for them. */
static int tenant_room(struct store *store, uint64_t generation)
{
	if (store->tenant_count < ARENA_SLABS ||
	    (generation == STORE_NOW && store_evict_tenant(store)))
		return 0;
	return err_raise(ERR_LIMIT,
			 "chunks: %u users have some in use (limit %u, one share of "
			 "memory each); end the engines of one, or give the next one "
			 "another daemon",
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
		if (tenant->left) /* it comes back */
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
		r = arena_owner_new(files_arena(store->files), &tenant->file_owner);
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
	store_tidy(store); /* unless a space comes of it */
	*tenant_p = tenant;
	return 0;
}
