/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/store/store_figures.h"

#include "daemon/base/context.h"
#include "daemon/config/config.h"
#include "daemon/store/far.h"
#include "daemon/store/files.h"
#include "daemon/store/store_impl.h"
#include "daemon/store/store_metrics.h"

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
	figures_p->remote =
		(struct store_remote_figures){.found = store->far_found,
					      .bytes = store->far_bytes,
					      .retries = store->far_retries,
					      .hedges = store->far_hedges,
					      .hedges_won = store->far_hedges_won,
					      .holds_total = store->remote_hold_count,
					      .holds = store->remote_holds};
	far_count(store->far, &figures_p->remote);
	homes_figures(store->homes, &figures_p->homes);
	figures_p->homes.dials = store->far_dials;
	figures_p->homes.dials_refused = store->far_dials_refused;
	home_figures(store->home, &figures_p->home);
	files_figures(store->files, &figures_p->files);
	if (store->files)
		figures_p->files.dir = store->kvd->config->chunk_dir;
}

/* ---- for a scrape ---- */

const struct metric_row store_metrics[] = {
#define STORE_METRIC_ROW(id, type, unit, name, help) \
	METRIC_OWN(STORE_METRIC_##id, type, unit, name, help),
	STORE_METRICS(STORE_METRIC_ROW)
#undef STORE_METRIC_ROW
};

static void homes_cells(const struct store_figures *f, uint64_t *cells)
{
	cells[STORE_METRIC_INDEX_NODES] = f->homes.homes;
	cells[STORE_METRIC_INDEX_NODES_UP] = f->homes.up;
	cells[STORE_METRIC_INDEX_UPDATES_SENT] = f->homes.notes;
	cells[STORE_METRIC_INDEX_RESYNCS] = f->homes.resyncs;
	cells[STORE_METRIC_INDEX_QUERIES] = f->homes.asks;
	cells[STORE_METRIC_INDEX_QUERY_TIMEOUTS] = f->homes.late;
	cells[STORE_METRIC_INDEX_DIALS] = f->homes.dials;
	cells[STORE_METRIC_INDEX_DIALS_REFUSED] = f->homes.dials_refused;
	cells[STORE_METRIC_INDEX_ENTRIES] = f->home.used;
	cells[STORE_METRIC_INDEX_HOLDERS] = f->home.holders;
	cells[STORE_METRIC_INDEX_UPDATES_RECEIVED] = f->home.notes;
	cells[STORE_METRIC_INDEX_UPDATES_REFUSED] = f->home.refused;
	cells[STORE_METRIC_INDEX_ENTRIES_MISSING] = f->home.unknown;
	cells[STORE_METRIC_INDEX_QUERIES_SERVED] = f->home.finds;
	cells[STORE_METRIC_INDEX_RESYNCS_REQUESTED] = f->home.again;
}

void store_cells(const void *part, uint64_t *cells)
{
	struct store_figures f;

	store_figures(part, &f);
	cells[STORE_METRIC_MEMORY] = f.ready ? f.memory_bytes : 0;
	cells[STORE_METRIC_FREE] = f.slabs_free * f.slab_bytes;
	cells[STORE_METRIC_CHUNKS] = f.chunks;
	cells[STORE_METRIC_PUBLISHED] = f.published;
	cells[STORE_METRIC_HOLDS] = f.holds;
	cells[STORE_METRIC_MOVES] = f.moves;
	cells[STORE_METRIC_FOUND] = f.found;
	cells[STORE_METRIC_MISSED] = f.missed;
	cells[STORE_METRIC_EVICTED] = f.evicted;
	cells[STORE_METRIC_SPACES] = f.spaces;
	cells[STORE_METRIC_SPACES_EVICTED] = f.spaces_evicted;
	cells[STORE_METRIC_PUT_BYTES] = f.put_bytes;
	cells[STORE_METRIC_FETCHED_BYTES] = f.fetched_bytes;
	cells[STORE_METRIC_REMOTE_HITS] = f.remote.found;
	cells[STORE_METRIC_REMOTE_BYTES] = f.remote.bytes;
	cells[STORE_METRIC_REMOTE_RETRIES] = f.remote.retries;
	cells[STORE_METRIC_REMOTE_HEDGES] = f.remote.hedges;
	cells[STORE_METRIC_REMOTE_HEDGES_WON] = f.remote.hedges_won;
	cells[STORE_METRIC_REMOTE_SUSPENDED] = f.remote.left_out;
	cells[STORE_METRIC_REMOTE_HOLDS_TOTAL] = f.remote.holds_total;
	cells[STORE_METRIC_REMOTE_HOLDS] = f.remote.holds;
	homes_cells(&f, cells);
	cells[STORE_METRIC_FILE] = f.files.bytes;
	cells[STORE_METRIC_FILE_FREE] = f.files.free_bytes;
	cells[STORE_METRIC_FILE_DISK_FREE] = f.files.disk_free_bytes;
	cells[STORE_METRIC_FILE_STANDS] = f.files.stands;
	cells[STORE_METRIC_FILE_FULL] = f.files.full;
	cells[STORE_METRIC_FILE_WRITTEN] = f.files.written_bytes;
	cells[STORE_METRIC_FILE_READ] = f.files.read_bytes;
	cells[STORE_METRIC_FILE_EVICTED] = f.files.evicted;
	cells[STORE_METRIC_FILE_BAD] = f.files.bad;
	cells[STORE_METRIC_FILE_FAULTS] = f.files.faults;
	cells[STORE_METRIC_FILE_READONLY] = f.files.readonly;
}
