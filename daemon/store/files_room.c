/* SPDX-License-Identifier: Apache-2.0 */
/*
 * chunk_dir_size is the limit of the files; the file system may have less space. It is
 * queried every FILES_LOOK_NS, on a thread of the disk's, because other programs fill it
 * too. A slab with a file has its space reserved.
 *
 * A hanging device (a frozen file system, NFS or iSCSI without its server) completes no
 * request, and its threads cannot be stopped. Everything else continues without it, and
 * health reports it.
 */
#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/store/files_impl.h"
#include "daemon/store/store_figures.h"
#include "daemon/store/store_impl.h"

/* There is no space for a new file: a MAKE has failed, or this query shows it. A quota
 * shows only in a MAKE. */
static void files_full_look(struct files *files)
{
	uint64_t slab_bytes = files_slab_bytes(files);
	bool wanted = false;

	for (uint32_t i = 0; i < ARENA_SLABS; i++)
		wanted |= !files->slabs[i].actual;
	if (files->full && files->room >= files->full_room + slab_bytes)
		files->full = false;
	if (!files->full && wanted && files->scanned && files->room < slab_bytes) {
		files->full = true;
		files->full_room = 0;
	}
}

static void on_space(struct disk_op *op)
{
	struct files *files = container_of(op, struct files, space);

	files->space_asked = false;
	files->looks++;
	if (op->result >= 0)
		files->room = op->moved;
	else
		files_note_fault(files, &op->err);
	if (op->result >= 0)
		files_full_look(files);
}

/* None of the ops in flight at the last check has ended, nor any other since: the kernel
 * keeps them. */
static void files_stand_look(struct files *files)
{
	struct disk_figures figures;
	uint64_t ended;
	bool flying, stands;

	disk_figures(files->disk, &figures);
	ended = figures.ended - files->looks;
	flying = figures.in_flight > 0; /* `space` too: it had all of the time */
	stands = flying && files->flying_before && ended == files->ended_before;
	if (stands && !files->stands)
		log_error("store", "files", "the disk of chunk_dir does not respond",
			  "requests=%u", figures.in_flight);
	else if (!stands && files->stands)
		log_warn("store", "files", "the disk of chunk_dir responds again", NULL);
	files->stands = stands;
	files->flying_before = flying;
	files->ended_before = ended;
}

void files_look(struct files *files)
{
	if (files->closed)
		return;
	loop_timer_start(&files->look, FILES_LOOK_NS);
	if (files->space_asked)
		return;
	files->space_asked = true;
	files->space = (struct disk_op){.what = DISK_SPACE, .done = on_space};
	disk_submit(files->disk, &files->space);
}

static void files_on_look(struct loop_timer *timer)
{
	struct files *files = container_of(timer, struct files, look);

	files_stand_look(files);
	files_look(files);
}

void files_room_init(struct files *files)
{
	loop_timer_init(&files->look, files->store->kvd->loop, files_on_look);
	files->room = UINT64_MAX;
}

void files_room_out(struct files *files)
{
	files->full = true;
	files->full_room = files->room < UINT64_MAX / 2 ? files->room : 0;
	files_look(files);
}

/* ---- figures ---- */

/* Unowned slabs: those with a file have their space. */
static uint64_t files_free_bytes(const struct files *files, uint64_t slabs_free,
				 uint64_t slab_bytes)
{
	uint64_t made = 0, more;

	for (uint32_t i = 0; i < ARENA_SLABS; i++)
		made += files->slabs[i].actual && !arena_slab_owner(files->arena, i);
	made = made < slabs_free ? made : slabs_free;
	more = (slabs_free - made) * slab_bytes;
	return made * slab_bytes + (more < files->room ? more : files->room);
}

void files_figures(const struct files *files, struct store_files *figures_p)
{
	struct arena_figures arena;

	*figures_p = (struct store_files){0};
	if (!files)
		return;
	arena_figures(files->arena, &arena);
	*figures_p = files->figures;
	figures_p->open = files->open;
	figures_p->scanned = files->scanned;
	figures_p->readonly = files->readonly;
	figures_p->direct = files->open && disk_direct(files->disk);
	figures_p->why = &files->why;
	figures_p->bytes = files->bytes;
	figures_p->free_bytes =
		files_free_bytes(files, arena.slabs_free, arena.slab_bytes);
	figures_p->disk_free_bytes = files->room < UINT64_MAX ? files->room : 0;
	figures_p->full = files->full;
	figures_p->stands = files->stands;
	figures_p->evicted = arena.evicted;
	figures_p->queued = files->queued;
}
