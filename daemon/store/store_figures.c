/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/context.h"
#include "daemon/config/config.h"
#include "daemon/store/far.h"
#include "daemon/store/files.h"
#include "daemon/store/home.h"
#include "daemon/store/homes.h"
#include "daemon/store/lend.h"
#include "daemon/store/store_impl.h"

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
