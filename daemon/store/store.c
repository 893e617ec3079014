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

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/cost/live.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/handshake/handshake.h"
#include "daemon/store/disk.h"
#include "daemon/store/events.h"
#include "daemon/store/far.h"
#include "daemon/store/files.h"
#include "daemon/store/home.h"
#include "daemon/store/homes.h"
#include "daemon/store/homes_group.h"
#include "daemon/store/keep.h"
#include "daemon/store/lend.h"
#include "daemon/store/store_impl.h"

/* ---- its memory ---- */

static void on_memory(void *arg, struct region *region, const struct err *err)
{
	struct store *store = arg;

	store->region = region;
	if (region) {
		store->base = region->memory->base;
		keep_settled(store->keep);
		files_on_memory(store->files);
		log_info("store", NULL, "keeps chunks", "bytes=%ju",
			 (uintmax_t)store->memory_bytes);
		return;
	}
	store->failed = *err;
	if (!store->session)
		return; /* it ends, and waited for none */
	log_error("store", NULL, "has no memory for chunks", "bytes=%ju why=\"%s\"",
		  (uintmax_t)store->memory_bytes, err->text);
}

/* The fd is the region's when it is registered. */
static int memory_begin(struct store *store, int *fd)
{
	const struct region_args args = {.kind = REGION_MEMFD,
					 .length = store->memory_bytes,
					 .name = "chunks",
					 .fd = *fd};
	int r = region_register(store->session, &args, on_memory, store);

	if (r >= 0)
		mem_steal_fd(fd);
	return err_pass(r);
}

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
	struct store *store = container_of(defer, struct store, tidy);
	struct store_tenant *tenant;

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

/* A directory that cannot be used is no reason not to serve: health says so. */
static int files_open(struct store *store)
{
	const struct config *config = store->kvd->config;
	struct disk_args args = {.path = config->chunk_dir, .on_open = files_on_open};
	struct disk *disk;
	int r = files_new(store, config->chunk_dir_bytes, &store->files);

	if (r < 0)
		return err_pass(r);
	args.arg = store->files;
	r = disk_open(store->kvd->loop, &args, &disk);
	if (r >= 0)
		files_begin(store->files, disk);
	return err_pass(r);
}

int store_make(struct kvd *kvd, struct store **store_p)
{
	struct store *store = mem_zalloc(sizeof(*store));
	int r;

	*store_p = NULL;
	if (!store)
		return err_pass(-ENOMEM);
	store->kvd = kvd;
	store->memory_bytes = kvd->config->chunk_memory_bytes / CANON_GRAIN * CANON_GRAIN;
	store->seed = loop_random_u64(kvd->loop);
	loop_random(kvd->loop, store->instance, sizeof(store->instance));
	list_init(&store->tenants);
	list_init(&store->spaces);
	list_init(&store->loading);
	list_init(&store->far_legs);
	list_init(&store->hedges);
	lends_init(store);
	store_pins_init(store);
	store_evict_init(store);
	store_pages_init(store);
	strmap_init(&store->holds);
	loop_defer_init(&store->tidy, on_tidy);
	r = arena_new(store->memory_bytes, store_on_evict, store, &store->arena);
	if (r >= 0)
		r = store_index_new(store);
	if (r < 0) {
		store_free(store);
		return err_pass(r);
	}
	*store_p = store;
	return 0;
}

/* Its part is there: its session's end looks for it. */
static int store_begin(struct store *store)
{
	struct kvd *kvd = store->kvd;
	cleanup_close int memory = -1;
	int r;

	r = keep_new(store, &memory, &store->keep);
	if (r >= 0)
		keep_restore(store->keep);
	if (r >= 0 && *kvd->config->chunk_dir)
		r = files_open(store);
	if (r >= 0)
		r = session_new_own(kvd, "chunk store", &store->session);
	if (r >= 0 && kvd->config->chunk_home_bytes)
		r = home_new(store, &store->home);
	if (r >= 0 && store->home &&
	    strcmp(kvd->config->chunk_homes, HOMES_OF_CLUSTER) == 0)
		groups_be_home(groups_of(kvd));
	if (r >= 0)
		r = homes_new(store, &store->homes);
	if (r >= 0)
		r = far_new(store, &store->far);
	if (r >= 0)
		r = live_new(&store->costs);
	return r < 0 ? err_pass(r) : err_pass(memory_begin(store, &memory));
}

void store_free(struct store *store)
{
	if (!store)
		return;
	assert(store->moves == 0);
	store->session = NULL;
	keep_free(mem_steal(store->keep)); /* what it has noted stays noted */
	store_pins_fini(store);
	if (store->buckets)
		store_index_free(store);
	store_evict_fini(store);
	on_tidy(&store->tidy);
	loop_defer_cancel(&store->tidy);
	assert(list_empty(&store->spaces) && list_empty(&store->tenants));
	if (files_free(store->files) > 0)
		store->kvd->abandoned = true;
	far_close(store->far);
	far_free(store->far);
	homes_free(store->homes);
	home_free(store->home);
	lends_fini(store);
	store_pages_fini(store);
	strmap_fini(&store->holds);
	arena_free(store->arena);
	live_free(store->costs);
	mem_free(store);
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

static int store_session_end(struct session *session)
{
	struct store_session *part = store_session(session);
	struct store *store = store_of(session->kvd);
	struct idmap_cursor it;

	if (store && store->session == session) {
		store->session = NULL;
		files_close(store->files); /* its jobs pin the region: no more of them */
		store->region = NULL;
		lends_close(store);
		far_close(store->far);
		homes_close(store->homes);
	}
	idmap_foreach(&part->moves, it)
		store_move_drop(it.value);
	idmap_foreach(&part->holds, it)
		store_hold_close(it.value);
	idmap_foreach(&part->handles, it)
		store_close(it.value);
	return 0;
}

static void store_session_init(struct session *session)
{
	struct store_session *part = store_session(session);

	idmap_init(&part->handles);
	idmap_init(&part->holds);
	idmap_init(&part->moves);
}

static void store_session_gone(struct session *session)
{
	struct store_session *part = store_session(session);

	assert(!idmap_count(&part->moves) && !idmap_count(&part->holds) &&
	       !idmap_count(&part->handles));
	idmap_fini(&part->moves);
	idmap_fini(&part->holds);
	idmap_fini(&part->handles);
}

/* ---- other daemons ---- */

static int store_on_message(struct remote *remote, const struct wire_header *h,
			    struct cursor *body)
{
	struct store *store = store_of(remote->kvd);

	switch (h->type) {
	case WIRE_T_CHUNK_ASK:
	case WIRE_T_CHUNK_LEG:
	case WIRE_T_CHUNK_RELEASE:
		return err_pass(lend_on_message(store, remote, h, body));
	case WIRE_T_CHUNK_NOTE:
	case WIRE_T_CHUNK_SUM:
	case WIRE_T_CHUNK_FIND:
		return err_pass(
			home_on_message(store ? store->home : NULL, remote, h, body));
	case WIRE_T_CHUNK_FOUND:
	case WIRE_T_CHUNK_SUM_ACK:
		return store && store->homes
			       ? err_pass(homes_on_message(store->homes, remote, h, body))
			       : 0;
	default:
		return store ? err_pass(far_on_message(store, remote, h, body)) : 0;
	}
}

static void store_on_up(struct remote *remote)
{
	struct store *store = store_of(remote->kvd);

	if (store && store->homes)
		homes_on_up(store->homes, remote);
}

static void store_on_change(struct remote *remote)
{
	struct store *store = store_of(remote->kvd);

	if (store)
		far_on_change(store->far, remote);
}

static void store_on_down(struct remote *remote, const struct err *why)
{
	struct store *store = store_of(remote->kvd);

	(void)why;
	if (!store)
		return;
	far_on_down(store->far, remote);
	lend_on_down(remote);
	if (store->homes)
		homes_on_down(store->homes, remote);
	if (store->home)
		home_on_down(store->home, remote);
}

/* ---- figures ---- */

void store_figures(const struct store *store, struct store_figures *figures_p)
{
	struct arena_figures arena;

	*figures_p = (struct store_figures){0};
	if (!store)
		return;
	arena_figures(store->arena, &arena);
	*figures_p = (struct store_figures){
		.ready = store->region != NULL,
		.memory_bytes = store->memory_bytes,
		.slab_bytes = arena.slab_bytes,
		.slabs_free = arena.slabs_free,
		.chunks = store->chunk_count,
		.published = store->published,
		.evicted = arena.evicted,
		.spaces_evicted = store->spaces_evicted,
		.found = store->found,
		.missed = store->missed,
		.put_bytes = store->put_bytes,
		.fetched_bytes = store->fetched_bytes,
		.spaces = store->space_count,
		.holds = (unsigned int)strmap_count(&store->holds),
		.moves = store->moves,
	};
	figures_p->far = (struct store_far){.found = store->far_found,
					    .bytes = store->far_bytes,
					    .retries = store->far_retries,
					    .hedges = store->far_hedges,
					    .hedges_won = store->far_hedges_won,
					    .lends = store->lend_count,
					    .lent = lends_open(store)};
	far_count(store->far, &figures_p->far);
	homes_figures(store->homes, &figures_p->homes);
	figures_p->homes.dials = store->far_dials;
	figures_p->homes.dials_refused = store->far_dials_refused;
	home_figures(store->home, &figures_p->home);
	files_figures(store->files, &figures_p->files);
	if (store->files)
		figures_p->files.dir = store->kvd->config->chunk_dir;
}

/* ---- the module ---- */

static int store_module_new(struct kvd *kvd, void **part_p)
{
	struct store *store = NULL;
	int r;

	if (!kvd->config->chunk_memory_bytes)
		return 0;
	r = store_make(kvd, &store);
	*part_p = store; /* its session's end looks for it */
	return r < 0 ? err_pass(r) : err_pass(store_begin(store));
}

static unsigned int store_live_now(const void *part)
{
	return store_live(part);
}

static bool store_module_drained(const void *part, struct err *why_p)
{
	const struct store *store = part;

	if (!files_drained(store->files))
		err_set(why_p, ERR_IO,
			"chunk_dir: its disk does not answer; this process ends when it "
			"does (state D until then): bring it back, or restart the host");
	return store_drained(store);
}

static void store_module_free(void *part)
{
	store_free(part);
}

static void store_remote_init(struct remote *remote)
{
	list_init(&store_remote(remote)->lends);
	idmap_init(&store_remote(remote)->asks);
}

static bool store_remote_idle(const struct remote *remote)
{
	return store_remote(remote)->lend_count == 0;
}

const struct module store_module = {
	.id = MODULE_STORE,
	.owner = WIRE_OWNER_STORE,
	.new = store_module_new,
	.live = store_live_now,
	.drained = store_module_drained,
	.free = store_module_free,
	.session_bytes = sizeof(struct store_session),
	.session_init = store_session_init,
	.session_closing = store_session_closing,
	.session_end = store_session_end,
	.session_gone = store_session_gone,
	.pool_going = store_pool_going,
	.remote_bytes = sizeof(struct store_remote),
	.remote_init = store_remote_init,
	.remote_idle = store_remote_idle,
	.remote_up = store_on_up,
	.remote_change = store_on_change,
	.remote_down = store_on_down,
	.message = store_on_message,
};
