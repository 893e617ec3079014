/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The store as a module: its start and end, the data of sessions and peers, and the
 * dispatch of messages within this folder. The rest of the folder uses nothing of this.
 *
 * The store has a session of its own, because it owns what engines own: a region (its
 * memory, one sealed memfd), pools and rooms. So they are charged, listed and ended like
 * those of any session, and the code that moves bytes does not know of chunks.
 *
 * An engine's objects in the store end with its session; chunks do not. They are their
 * user's: the tenant of a session is the principal of its account.
 */
#include <assert.h>
#include <errno.h>
#include <openssl/sha.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/cost/live.h"
#include "daemon/handshake/handshake.h"
#include "daemon/session/region.h"
#include "daemon/session/session.h"
#include "daemon/store/commands_chunk.h"
#include "daemon/store/disk.h"
#include "daemon/store/far.h"
#include "daemon/store/files.h"
#include "daemon/store/home.h"
#include "daemon/store/homes.h"
#include "daemon/store/homes_group.h"
#include "daemon/store/keep.h"
#include "daemon/store/remote_hold.h"
#include "daemon/store/ring_chunk.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"
#include "daemon/store/store_metrics.h"

/* ---- its memory ---- */

static void on_memory(void *arg, struct region *region, const struct err *err)
{
	struct store *store = arg;

	store->region = region;
	if (region) {
		store->base = region->memory->base;
		keep_settled(store->keep);
		files_on_memory(store->files);
		log_info("store", NULL, "stores chunks", "bytes=%ju",
			 (uintmax_t)store->memory_bytes);
		return;
	}
	store->failed = *err;
	if (!store->session)
		return; /* it ends, and waited for none */
	log_error("store", NULL, "could not register chunk_memory",
		  "bytes=%ju why=\"%s\"", (uintmax_t)store->memory_bytes, err->text);
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

/* ---- life ---- */

/* The daemon runs without an unusable directory: health reports it. */
static int files_open(struct store *store)
{
	const struct config *config = store->kvd->config;
	struct disk_args args = {.path = config->chunk_dir, .on_open = files_on_open};
	struct disk *disk;
	int r = files_new(store, config->chunk_dir_bytes);

	if (r < 0)
		return err_pass(r);
	args.arg = store->files;
	r = disk_open(store->kvd->loop, &args, &disk);
	if (r >= 0)
		files_begin(store->files, disk);
	return err_pass(r);
}

/* Removes unused objects. */
static void tidy(struct store *store)
{
	loop_defer_cancel(&store->tidy);
	if (files_scanning(store->files)) /* it names classes that have no part yet */
		return;
	store_spaces_tidy(store);
	arena_tidy(store->arena);
	if (store->files)
		arena_tidy(store->file_arena);
	store_tenants_tidy(store);
}

static void on_tidy(struct loop_defer *defer)
{
	tidy(container_of(defer, struct store, tidy));
}

int store_make(struct kvd *kvd, struct store **store_p)
{
	struct store *store = mem_zalloc(sizeof(*store));
	uint8_t sum[SHA256_DIGEST_LENGTH];
	int r;

	*store_p = NULL;
	if (!store)
		return err_pass(-ENOMEM);
	/* The first digest of a process initializes libcrypto, which takes a millisecond:
	 * before the loop runs, and not in the first space.open. */
	(void)SHA256(sum, 0, sum);
	store->kvd = kvd;
	store->memory_bytes = kvd->config->chunk_memory_bytes / CANON_GRAIN * CANON_GRAIN;
	store->seed = loop_random_u64(kvd->loop);
	loop_random(kvd->loop, store->instance, sizeof(store->instance));
	list_init(&store->tenants);
	list_init(&store->spaces);
	list_init(&store->hedges);
	store_wake_init(store);
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

/* Its part exists: the session's end looks it up. */
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
	if (r >= 0 && kvd->config->chunk_index_bytes)
		r = home_new(store, &store->home);
	if (r >= 0 && store->home && kvd->names &&
	    strcmp(kvd->config->chunk_index, HOMES_OF_CLUSTER) == 0)
		kvd->names->be_home(kvd);
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
	keep_free(mem_steal(store->keep)); /* its records stay */
	store_pins_fini(store);
	if (store->buckets)
		store_index_free(store);
	store_evict_fini(store);
	tidy(store);
	assert(list_empty(&store->spaces) && list_empty(&store->tenants));
	if (files_free(store->files) > 0)
		store->kvd->abandoned = true;
	far_close(store->far);
	far_free(store->far);
	homes_free(store->homes);
	home_free(store->home);
	assert(store->figures.remote.holds == 0);
	loop_work_stop(&store->wake);
	store_pages_fini(store);
	strmap_fini(&store->holds);
	idmap_fini(&store->far_rooms);
	arena_free(store->arena);
	live_free(store->costs);
	mem_free(store);
}

/* ---- sessions ---- */

static int store_session_end(struct session *session)
{
	struct store_session *part = store_session(session);
	struct store *store = store_of(session->kvd);
	struct idmap_cursor it;

	if (store && store->session == session) {
		store->session = NULL;
		files_close(store->files); /* its jobs pin the region: no more of them */
		store->region = NULL;
		remote_holds_close(store);
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
	case WIRE_T_CHUNK_LOOKUP:
	case WIRE_T_CHUNK_OFFER:
	case WIRE_T_CHUNK_RELEASE:
		return err_pass(remote_hold_on_message(store, remote, h, body));
	case WIRE_T_INDEX_UPDATE:
	case WIRE_T_INDEX_DIGEST:
	case WIRE_T_INDEX_QUERY:
		return err_pass(
			home_on_message(store ? store->home : NULL, remote, h, body));
	case WIRE_T_INDEX_REPLY:
	case WIRE_T_INDEX_DIGEST_ACK:
		return store && store->homes
			       ? err_pass(homes_on_message(store->homes, remote, h, body))
			       : 0;
	case WIRE_T_CHUNK_LOOKUP_ACK:
		return store ? err_pass(far_on_lookup_ack(store, remote, body)) : 0;
	default: /* WIRE_T_CHUNK_OFFER_NAK */
		return store ? err_pass(store_leg_on_nak(store, remote, body)) : 0;
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
	remote_holds_on_down(remote);
	if (store->homes)
		homes_on_down(store->homes, remote);
	if (store->home)
		home_on_down(store->home, remote);
}

/* ---- the module ---- */

bool store_drained(const struct store *store)
{
	return !store ||
	       (files_drained(store->files) && store->figures.remote.holds == 0);
}

static int store_module_new(struct kvd *kvd, void **part_p)
{
	struct store *store = NULL;
	int r;

	if (!kvd->config->chunk_memory_bytes)
		return 0;
	r = store_make(kvd, &store);
	*part_p = store; /* the session's end looks it up */
	return r < 0 ? err_pass(r) : err_pass(store_begin(store));
}

static bool store_health(const void *part, struct err *why_p)
{
	const struct store *store = part;
	struct store_files figures;

	files_figures(store->files, &figures);
	if (!figures.stands)
		return true;
	err_set(why_p, ERR_IO, "chunk_dir: its disk does not respond");
	return false;
}

static unsigned int store_live_now(const void *part)
{
	const struct store *store = part;

	return store->moves_live; /* that have not ended */
}

static bool store_module_drained(const void *part, struct err *why_p)
{
	const struct store *store = part;

	if (!files_drained(store->files))
		err_set(why_p, ERR_IO,
			"chunk_dir: its disk does not respond; this process ends when "
			"it does (state D until then). Repair it, or restart the host");
	return store_drained(store);
}

static void store_module_free(void *part)
{
	store_free(part);
}

static void store_remote_init(struct remote *remote)
{
	list_init(&store_remote(remote)->holds);
	idmap_init(&store_remote(remote)->asks);
}

static bool store_remote_idle(const struct remote *remote)
{
	return store_remote(remote)->hold_count == 0;
}

static const struct command *const store_tables[] = {chunk_commands, chunk_event_commands,
						     chunk_pages_commands, NULL};

const struct module store_module = {
	.id = MODULE_STORE,
	.name = "store",
	.feature = PEER_FEATURE_CHUNKS,
	.owner = WIRE_OWNER_STORE,
	.commands = store_tables,
	.verbs = store_verbs,
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
	.pool_readings = store_pool_readings,
	.ring_has = store_has,
	.ring_cancel = store_ring_cancel,
	.ring_release = store_ring_release,
	.remote_bytes = sizeof(struct store_remote),
	.remote_init = store_remote_init,
	.remote_idle = store_remote_idle,
	.remote_up = store_on_up,
	.remote_change = store_on_change,
	.remote_down = store_on_down,
	.message = store_on_message,
	.metrics = store_metrics,
	.metric_count = 0 STORE_METRICS(METRIC_ROW),
	.figures = store_cells,
	.health = store_health,
};
