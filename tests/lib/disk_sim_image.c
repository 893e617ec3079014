/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A sector has `now`, which is read, and `medium`. `dirty`: a SYNC will bring `now`
 * there. Before a dirty sector is overwritten it is tossed whether what was there has
 * reached the medium, so that after a loss of power any version since the last SYNC may
 * come back. After a SYNC with a fault nothing is dirty, as in Linux: a later one does
 * not bring to the medium what that one lost.
 */
#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "tests/lib/disk_sim_impl.h"

#define BLOCK 512u

struct sim_sector {
	uint8_t now[SECTOR], medium[SECTOR];
	bool dirty;
};

uint64_t sim_random(struct disk_sim *sim)
{
	sim->random ^= sim->random << 13;
	sim->random ^= sim->random >> 7;
	sim->random ^= sim->random << 17;
	return sim->random * UINT64_C(0x2545f4914f6cdd1d) >> 11;
}

bool sim_toss(struct disk_sim *sim)
{
	return sim_random(sim) & 1;
}

uint64_t sim_delay(struct disk_sim *sim)
{
	return sim->least_ns + sim_random(sim) % (sim->most_ns - sim->least_ns + 1);
}

bool sim_strikes(struct disk_sim *sim, enum disk_sim_trouble trouble, enum disk_what what)
{
	bool struck = false;

	for (unsigned int i = 0; i < sim->fault_count; i++) {
		struct disk_sim_fault *fault = &sim->faults[i];

		if (fault->trouble != trouble || fault->what != what)
			continue;
		if (fault->skip) {
			fault->skip--;
		} else if (fault->count != UINT64_MAX) { /* not over */
			if (fault->one_in <= 1 || sim_random(sim) % fault->one_in == 0)
				struck = true;
			if (fault->count && --fault->count == 0)
				fault->count = UINT64_MAX;
		}
	}
	sim->struck += struck;
	return struck;
}

/* ---- sectors ---- */

/* What of a dirty sector has reached the medium by itself. */
static void sector_settle(struct disk_sim *sim, struct sim_sector *sector)
{
	size_t bytes = SECTOR;

	switch (sim_random(sim) % 3) {
	case 0: /* nothing */
		return;
	case 1:
		bytes = BLOCK * (1 + sim_random(sim) % (SECTOR / BLOCK - 1));
		break;
	}
	memcpy(sector->medium, sector->now, bytes);
}

int sector_write(struct disk_sim *sim, struct sim_file *file, uint64_t number,
		 const uint8_t *bytes)
{
	struct sim_sector *sector = idmap_get(&file->sectors, number);

	if (!sector) {
		sector = mem_zalloc(sizeof(*sector));
		if (!sector)
			return -ENOMEM;
		if (idmap_put(&file->sectors, number, sector) < 0) {
			mem_free(sector);
			return -ENOMEM;
		}
	}
	if (sector->dirty && sim_toss(sim))
		sector_settle(sim, sector);
	memcpy(sector->now, bytes, SECTOR);
	sector->dirty = true;
	return 0;
}

void sector_read(const struct sim_file *file, uint64_t number, uint8_t *bytes)
{
	const struct sim_sector *sector = idmap_get(&file->sectors, number);

	if (sector)
		memcpy(bytes, sector->now, SECTOR);
	else
		memset(bytes, 0, SECTOR);
}

void file_flush(struct sim_file *file)
{
	struct idmap_cursor cursor;

	idmap_foreach(&file->sectors, cursor) {
		struct sim_sector *sector = cursor.value;

		if (sector->dirty)
			memcpy(sector->medium, sector->now, SECTOR);
		sector->dirty = false;
	}
}

void file_settle(struct disk_sim *sim, struct sim_file *file, bool crash)
{
	struct idmap_cursor cursor;

	idmap_foreach(&file->sectors, cursor) {
		struct sim_sector *sector = cursor.value;

		if (sector->dirty)
			sector_settle(sim, sector);
		sector->dirty = false;
		if (crash)
			memcpy(sector->now, sector->medium, SECTOR);
	}
}

/* ---- files ---- */

struct sim_file *file_find(struct disk_sim *sim, const struct disk_op *op)
{
	char name[DISK_FILE_NAME_BYTES];
	struct sim_file *file;

	disk_file_name(op, name);
	list_foreach(file, &sim->files, link) {
		if (!file->gone && strcmp(file->name, name) == 0)
			return file;
	}
	return NULL;
}

void file_let(struct disk_sim *sim, struct sim_file *file)
{
	struct idmap_cursor cursor;

	if (--file->refs)
		return;
	sim->used -= file->bytes;
	list_remove(&file->link);
	idmap_foreach(&file->sectors, cursor)
		mem_free(cursor.value);
	idmap_fini(&file->sectors);
	mem_free(file->content);
	mem_free(file);
}

static int file_new(struct disk_sim *sim, const struct disk_op *op,
		    struct sim_file **file_p)
{
	struct sim_file *file = mem_zalloc(sizeof(*file));

	if (!file)
		return -ENOMEM;
	disk_file_name(op, file->name);
	if (op->what == DISK_MAKE)
		file->file = op->file;
	else
		snprintf(file->named, sizeof(file->named), "%s", op->name);
	idmap_init(&file->sectors);
	file->refs = 1;
	list_push_back(&sim->files, &file->link);
	*file_p = file;
	return 0;
}

static void file_remove(struct disk_sim *sim, struct sim_file *file)
{
	file->gone = true;
	file_let(sim, file);
}

/* ---- ops ---- */

static int image_make(struct disk_sim *sim, const struct disk_op *op)
{
	struct sim_file *file;
	int r;

	if (file_find(sim, op))
		return -EEXIST;
	if (op->bytes > sim->capacity - sim->used)
		return -ENOSPC;
	r = file_new(sim, op, &file);
	if (r < 0)
		return r;
	file->bytes = op->bytes;
	sim->used += op->bytes;
	return 0;
}

static int image_remove(struct disk_sim *sim, const struct disk_op *op)
{
	struct sim_file *file = file_find(sim, op);

	if (!file)
		return -ENOENT;
	file_remove(sim, file);
	return 0;
}

static int image_named_write(struct disk_sim *sim, struct disk_op *op)
{
	struct sim_file *old = file_find(sim, op), *file;
	uint64_t bytes = op->iov[0].iov_len;
	int r;

	if (bytes > sim->capacity - sim->used)
		return -ENOSPC;
	r = file_new(sim, op, &file);
	if (r < 0)
		return r;
	if (bytes)
		file->content = mem_dup(op->iov[0].iov_base, bytes);
	if (bytes && !file->content) {
		file_remove(sim, file);
		return -ENOMEM;
	}
	file->bytes = bytes;
	sim->used += bytes;
	if (old)
		file_remove(sim, old);
	op->moved = bytes;
	return 0;
}

static int image_named_read(struct disk_sim *sim, struct disk_op *op)
{
	const struct sim_file *file = file_find(sim, op);

	if (!file)
		return -ENOENT;
	if (file->bytes > op->iov[0].iov_len)
		return err_raise(ERR_TOOBIG, "%s has %ju bytes", file->name,
				 (uintmax_t)file->bytes);
	if (file->bytes)
		memcpy(op->iov[0].iov_base, file->content, file->bytes);
	op->moved = file->bytes;
	return 0;
}

static int image_list(struct disk_sim *sim, const struct disk_op *op)
{
	struct disk_list *list = op->list;
	const struct sim_file *file;
	size_t count = 0;

	list_foreach(file, &sim->files, link)
		count++;
	list->slabs = mem_calloc(count, sizeof(*list->slabs));
	list->named = mem_calloc(count, sizeof(*list->named));
	if (!list->slabs || !list->named) {
		disk_list_fini(list);
		return -ENOMEM;
	}
	list_foreach(file, &sim->files, link) {
		if (file->gone)
			continue;
		if (file->file.slot_bytes) {
			list->slabs[list->slab_count++] =
				(struct disk_slab){file->file, file->bytes};
			continue;
		}
		list->named[list->named_count].bytes = file->bytes;
		snprintf(list->named[list->named_count++].name, DISK_NAME_MAX + 1, "%s",
			 file->named);
	}
	disk_list_sort(list);
	return 0;
}

int image_do(struct disk_sim *sim, struct disk_op *op)
{
	switch (op->what) {
	case DISK_LIST:
		return image_list(sim, op);
	case DISK_SPACE:
		op->moved = sim->capacity - sim->used;
		return 0;
	case DISK_MAKE:
		return image_make(sim, op);
	case DISK_REMOVE:
	case DISK_NAMED_REMOVE:
		return image_remove(sim, op);
	case DISK_NAMED_WRITE:
		return image_named_write(sim, op);
	case DISK_NAMED_READ:
		return image_named_read(sim, op);
	case DISK_SYNC:
	case DISK_READ:
	case DISK_WRITE:
	case DISK_WHATS:
		break;
	}
	return -EINVAL;
}

/* ---- life ---- */

int disk_sim_new(uint64_t seed, uint64_t capacity, struct disk_sim **sim_p)
{
	struct disk_sim *sim = mem_zalloc(sizeof(*sim));

	if (!sim)
		return err_pass(-ENOMEM);
	sim->random = seed * 2 + UINT64_C(0x9e3779b97f4a7c15);
	if (!sim->random)
		sim->random = 1;
	sim->capacity = capacity;
	list_init(&sim->files);
	disk_sim_delays(sim, 20000, 2 * LOOP_NS_PER_MS);
	*sim_p = sim;
	return 0;
}

void disk_sim_free(struct disk_sim *sim)
{
	struct sim_file *file;

	if (!sim)
		return;
	assert(!sim->disk);
	while ((file = list_first(&sim->files, struct sim_file, link))) {
		file->refs = 1; /* what hung may have held it */
		file_let(sim, file);
	}
	mem_free(sim);
}

void disk_sim_delays(struct disk_sim *sim, uint64_t least_ns, uint64_t most_ns)
{
	assert(least_ns <= most_ns);
	sim->least_ns = least_ns;
	sim->most_ns = most_ns;
}

void disk_sim_fault(struct disk_sim *sim, const struct disk_sim_fault *fault)
{
	assert(sim->fault_count < FAULTS_MAX);
	sim->faults[sim->fault_count++] = *fault;
}

void disk_sim_heal(struct disk_sim *sim)
{
	sim->fault_count = 0;
}

uint64_t disk_sim_struck(const struct disk_sim *sim)
{
	return sim->struck;
}
