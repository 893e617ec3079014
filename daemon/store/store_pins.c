/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks that a hold keeps, of an engine or of another daemon, are let go from the last
 * to the first: what is unpinned first leaves first. Sessions and peers end with all of
 * their holds at once, which may be millions of chunks; so a turn lets go of SLICE, the
 * rest waits in a queue. One hold is gone at once where nothing else went in this turn.
 */
#include <assert.h>
#include <stddef.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/store/store_impl.h"

#define SLICE STORE_IDS_MAX /* chunks a turn */

struct store_pins {
	struct list link; /* in store->pins */
	uint32_t count;
	struct store_chunk *chunks[];
};

struct store_chunk **store_pins_new(uint32_t most)
{
	struct store_pins *pins =
		mem_zalloc(sizeof(*pins) + most * sizeof(struct store_chunk *));

	return pins ? pins->chunks : NULL;
}

/* True: all of it. */
static bool pins_slice(struct store *store, struct store_pins *pins)
{
	while (pins->count > 0 && store->unpinned < SLICE) {
		store_chunk_unpin(pins->chunks[--pins->count]);
		store->unpinned++;
	}
	return pins->count == 0;
}

static void on_pins_go(struct loop_defer *defer)
{
	struct store *store = container_of(defer, struct store, pins_go);

	store->unpinned = 0;
	while (!list_empty(&store->pins)) {
		struct store_pins *pins =
			list_first(&store->pins, struct store_pins, link);

		if (!pins_slice(store, pins)) {
			loop_defer(store->kvd->loop, &store->pins_go);
			break;
		}
		list_remove(&pins->link);
		mem_free(pins);
	}
}

void store_pins_end(struct store *store, struct store_chunk **chunks, uint32_t count)
{
	struct store_pins *pins;

	if (!chunks)
		return;
	pins = container_of(chunks, struct store_pins, chunks);
	pins->count = count;
	if (list_empty(&store->pins) && pins_slice(store, pins)) {
		mem_free(pins);
	} else {
		list_init(&pins->link);
		list_push_back(&store->pins, &pins->link);
	}
	if (store->unpinned)
		loop_defer(store->kvd->loop, &store->pins_go);
}

void store_pins_init(struct store *store)
{
	list_init(&store->pins);
	loop_defer_init(&store->pins_go, on_pins_go);
}

void store_pins_fini(struct store *store)
{
	while (!list_empty(&store->pins))
		on_pins_go(&store->pins_go);
	loop_defer_cancel(&store->pins_go);
}
