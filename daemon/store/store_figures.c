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
	*figures_p = store->figures;
	figures_p->ready = store->region != NULL;
	figures_p->memory_bytes = store->memory_bytes;
	figures_p->slab_bytes = arena.slab_bytes;
	figures_p->slabs_free = arena.slabs_free;
	figures_p->chunks = store->chunk_count;
	figures_p->published = store->published;
	figures_p->evicted = arena.evicted;
	figures_p->spaces = store->space_count;
	figures_p->holds = (unsigned int)strmap_count(&store->holds);
	figures_p->moves = store->moves;
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

const struct metric_row store_metrics[] = {STORE_METRICS(METRIC_OWN)};

void store_cells(const void *part, uint64_t *cells)
{
	struct store_figures figures, *f = &figures;

	store_figures(part, f);
	STORE_METRICS(METRIC_CELL)
}
