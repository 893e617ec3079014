/* SPDX-License-Identifier: Apache-2.0 */
/* A durable put waits until its chunks would survive a loss of power. */
#include "daemon/base/err.h"
#include "daemon/store/files.h"
#include "daemon/store/store_impl.h"

enum { ENTRY_NOT_YET, ENTRY_LASTS, ENTRY_NOT_ASKED };

/* Are the handle's parts of this chunk durable? If not, starts that. ENTRY_NOT_ASKED:
 * decided in another turn. ERR_LIMIT: it cannot be. */
static int entry_lasts(struct store_move *move, uint32_t i, unsigned int *covers_left)
{
	struct store_entry *entry = &move->entries[i];
	const struct store_chunk *chunk = entry->chunk;
	struct store_part *part;
	bool begun = false;
	int r;

	if (!entry->lasts)
		entry->lasts = store_cover_some(move->handle, chunk->lasts, covers_left);
	if (entry->lasts)
		return ENTRY_LASTS;
	list_foreach(part, &chunk->parts, link) {
		if (part->pages)
			continue; /* an engine's: it does not last */
		if ((part->memory == PART_READY || part->file != PART_UNFILED) &&
		    part->file != PART_LASTS)
			begun |= files_write(move->store->files, part, true);
		else if (part->memory == PART_FILLING || part->memory == PART_HEDGING)
			begun = true; /* another move fills it */
	}
	if (begun || files_opening(move->store->files))
		return ENTRY_NOT_YET;
	if (*covers_left == 0)
		return ENTRY_NOT_ASKED;
	r = files_writable(move->store->files);
	if (r == 0)
		r = err_raise(ERR_LIMIT, "chunk_dir has no room; raise chunk_dir_size or "
					 "free space on its file system");
	return err_prefix(r, "durable: chunk %llu of the prompt",
			  (unsigned long long)move->first + i);
}

/* A turn computes as many new covers as a call may, and the next one continues after
 * them. */
int store_move_lasts(struct store_move *move)
{
	unsigned int left = STORE_COVERS_NEW;
	uint32_t from = move->asked;
	bool all = true, again = false;

	for (uint32_t n = 0; n < move->count && move->durable; n++) {
		uint32_t i = (from + n) % move->count;
		unsigned int before = left;
		int r = entry_lasts(move, i, &left);

		if (r < 0)
			return err_pass(r);
		if (before && !left)
			move->asked = i + 1;
		all &= r == ENTRY_LASTS;
		again |= r == ENTRY_NOT_ASKED;
	}
	if (again)
		store_move_kick(move);
	return all;
}
