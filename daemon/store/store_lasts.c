/* SPDX-License-Identifier: Apache-2.0 */
/* A durable put waits until its chunks would outlast a loss of power. */
#include "daemon/base/err.h"
#include "daemon/store/files.h"
#include "daemon/store/store_impl.h"

/* Would what the put's handle needs of this chunk outlast a loss of power? If not, see to
 * it. ERR_LIMIT: it will not. */
static int piece_lasts(struct store_move *move, uint32_t i)
{
	const struct store_chunk *chunk = move->pieces[i].chunk;
	struct store_part *part;
	bool begun = false;

	if (store_cover(move->handle, chunk->lasts))
		return 1;
	list_foreach(part, &chunk->parts, link) {
		if ((part->ready || part->filed) && !part->lasts)
			begun |= files_write(move->store->files, part, true);
		else if (part->slot.slab && !part->ready)
			begun = true; /* another move fills it */
	}
	if (begun || files_opening(move->store->files))
		return 0;
	return err_raise(ERR_LIMIT,
			 "durable: chunk %llu of the prompt is not kept in a "
			 "file: there is no room, or nothing is written any more",
			 (unsigned long long)(move->first + i));
}

int store_move_lasts(struct store_move *move)
{
	int all = 1;

	for (uint32_t i = 0; i < move->count && move->durable; i++) {
		int r = piece_lasts(move, i);

		if (r < 0)
			return err_pass(r);
		all &= r;
	}
	return all;
}
