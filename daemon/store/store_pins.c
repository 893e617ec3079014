/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Chunks that a hold pins, of an engine or of another daemon, are unpinned from the last
 * to the first: the first one unpinned is evicted first. Sessions and peers end with all
 * of their holds at once, which may be millions of chunks: they are unpinned some a turn.
 */
#include <stddef.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/store/store_impl.h"

#define STEP 8u /* chunks between checks of the time */

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

static bool pins_step(struct loop_work *work)
{
	struct store *store = container_of(work, struct store, unpinning);
	struct store_pins *pins = list_first(&store->pins, struct store_pins, link);

	for (unsigned int n = 0; n < STEP && pins && pins->count > 0; n++) {
		struct store_chunk *chunk = pins->chunks[--pins->count];

		if (chunk)
			store_chunk_unpin(chunk);
	}
	if (pins && pins->count == 0) {
		list_remove(&pins->link);
		mem_free(pins);
	}
	return !list_empty(&store->pins);
}

void store_pins_end(struct store *store, struct store_chunk **chunks, uint32_t count)
{
	struct store_pins *pins;

	if (!chunks)
		return;
	pins = container_of(chunks, struct store_pins, chunks);
	pins->count = count;
	list_init(&pins->link);
	list_push_back(&store->pins, &pins->link);
	loop_work_start(&store->unpinning);
}

void store_pins_init(struct store *store)
{
	list_init(&store->pins);
	loop_work_init(&store->unpinning, store->kvd->loop, pins_step, NULL);
}

void store_pins_fini(struct store *store)
{
	while (pins_step(&store->unpinning))
		;
	loop_work_stop(&store->unpinning);
}
