/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A part takes its slot when it is to be written, and other content of its user is
 * evicted from the files then, not before. Queued parts keep their memory, so the queue
 * is bounded; a part that finds it full is not written (it is requested again, or was not
 * worth it). Only durable puts wait.
 *
 * A slab's file is made when the first of its slots is written and removed when the last
 * was freed, in sequence, by a state machine per slab that compares the present file with
 * the arena's wish. "No space left" can occur only when a file is made, because all of
 * its bytes are reserved; then no further slab is taken for a while, and content is
 * replaced within the present ones.
 *
 * A part is durable when this daemon has verified all of it, in a file of which no sync
 * has failed, and a sync that started after that has completed. So a part that the start
 * has found is read first, and after a failed sync a part is written again, in its own
 * slot with the same header, so that only equal bytes may be torn. Data lost by a failed
 * fsync of an earlier daemon, but still in the page cache, cannot be detected.
 *
 * The headers of a dropped chunk are erased after the jobs on its parts, and synced;
 * until then its slots are not freed. An evicted part keeps its header until its slot is
 * written again: if it is dropped after that, the next start may find it, with its own
 * bytes.
 *
 * A job pins its part's chunk, and the memory that the disk's threads use: the end of the
 * store's session unmaps it after the last of them.
 *
 * A fault of the device ends one op; the second one stops all writing until the next
 * start. Reading continues, verified by the sums.
 */
#include "daemon/store/files.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/session/region.h"
#include "daemon/store/files_class.h"
#include "daemon/store/files_impl.h"
#include "daemon/store/store_impl.h"

#define FLYING_BYTES (UINT64_C(32) << 20) /* of writes given to the disk */
#define QUEUED_SHARE 16u		  /* of the memory: the limit of the queue */
#define BLOCK_BYTES (SEAL_HEADER_BYTES + DISK_ALIGN) /* of a job: its header, aligned */
#define FAULTS_MAX 2u
#define TRIES_MAX 3u /* of a durable part, before its put fails */

static bool slab_fits(const struct slab_file *slab);
static void slab_step(struct slab_file *slab);
static void slab_sync(struct slab_file *slab);
static void files_erase(struct files *files, struct store_chunk *chunk);

uint64_t files_slab_bytes(const struct files *files)
{
	return files->bytes / ARENA_SLABS / DISK_ALIGN * DISK_ALIGN;
}

static struct disk_file slab_file_of(uint32_t slab, uint64_t slot_bytes)
{
	return (struct disk_file){.slot_bytes = slot_bytes, .number = slab};
}

uint8_t *files_header_new(void **block_p)
{
	uintptr_t at;

	*block_p = mem_zalloc(BLOCK_BYTES);
	at = ((uintptr_t)*block_p + DISK_ALIGN - 1) / DISK_ALIGN * DISK_ALIGN;
	return *block_p ? (uint8_t *)at : NULL;
}

void files_go_on(struct files *files)
{
	loop_defer(files->store->kvd->loop, &files->go);
}

static void files_readonly(struct files *files, const struct err *why)
{
	files->readonly = true;
	files->why = *why;
	store_wake(files->store); /* they may have waited for it to be open */
}

void files_end_writing(struct files *files, const struct err *why)
{
	if (files->readonly)
		return;
	files_readonly(files, why);
	log_error("store", "files", "writing to chunk_dir has stopped", "why=\"%s\"",
		  why->text);
}

/* Faults other than the device's are only logged. */
void files_note_fault(struct files *files, const struct err *why)
{
	if (why->code == ERR_CANCELED || why->code == ERR_STATE)
		return;
	files->figures.faults += why->code == ERR_IO;
	log_warn("store", "files", why->text, "faults=%llu",
		 (unsigned long long)files->figures.faults);
	if (files->figures.faults >= FAULTS_MAX)
		files_end_writing(files, why);
}

/* ---- jobs ---- */

static void facts_of(const struct store_part *part, const struct class_words *words,
		     struct seal_facts *facts_p)
{
	const struct store_chunk *chunk = part->chunk;

	*facts_p = (struct seal_facts){.first = chunk->first,
				       .part_bytes = part->class->canon->slot_bytes,
				       .tokens = chunk->tokens};
	memcpy(facts_p->class_digest, words->digest, SEAL_DIGEST_BYTES);
	memcpy(facts_p->id, chunk->id, SEAL_ID_BYTES);
}

static struct files_job *job_new(struct files *files, struct store_part *part,
				 enum files_kind kind)
{
	struct class_words *words = class_words_of(files, part->class);
	struct files_job *job = words ? mem_zalloc(sizeof(*job)) : NULL;

	if (!job)
		return NULL;
	job->header = files_header_new(&job->block);
	if (!job->header) {
		mem_free(job);
		return NULL;
	}
	job->files = files;
	job->part = part;
	job->kind = kind;
	job->bytes = part->class->canon->slot_bytes;
	facts_of(part, words, &job->facts);
	if (kind == FILES_WRITE && part->file == PART_UNFILED)
		part->generation = ++files->generation;
	job->facts.generation = part->generation; /* the same bytes in the same place */
	list_init(&job->link);
	part->job = job;
	store_chunk_pin(part->chunk);
	job->memory = files->store->region;
	region_pin(job->memory);
	files->jobs++;
	return job;
}

/* Its chunk stays pinned: chunk_let_go(). */
static void job_free(struct files_job *job)
{
	job->part->job = NULL;
	list_remove(&job->link);
	job->files->jobs--;
	region_unpin(job->memory);
	mem_free(job->block);
	mem_free(job);
}

/* A job of it has ended. If it was dropped meanwhile, its headers are erased now. */
static void chunk_let_go(struct files *files, struct store_chunk *chunk)
{
	if (chunk->gone)
		files_erase(files, chunk);
	store_chunk_unpin(chunk);
	files_go_on(files);
}

static void job_end(struct files_job *job)
{
	struct store_chunk *chunk = job->part->chunk;
	struct files *files = job->files;

	job_free(job);
	chunk_let_go(files, chunk);
}

static struct slab_file *job_slab(const struct files_job *job)
{
	return &job->files->slabs[arena_slab_of(&job->part->place)];
}

/* The op's slot; the part's memory after the header unless only the header is meant. */
static void job_aim(struct files_job *job, enum disk_what what, bool header_only)
{
	const struct store_part *part = job->part;
	uint32_t slab = arena_slab_of(&part->place);

	job->op = (struct disk_op){
		.what = what,
		.file = slab_file_of(slab, job->files->slabs[slab].actual),
		.offset = part->place.index * arena_slab_size(job->files->arena, slab),
		.iov = {{job->header, SEAL_HEADER_BYTES}},
	};
	if (!header_only)
		job->op.iov[1] = (struct iovec){job->files->store->base +
							arena_offset(&part->slot),
						(size_t)job->bytes};
}

/* ---- writing ---- */

/* It gets no slot; a part that has one, and was to be written again, keeps it. */
static void write_fail(struct files_job *job, const struct err *why)
{
	struct files *files = job->files;
	struct store_part *part = job->part;
	struct store_chunk *chunk = part->chunk;
	struct slab_file *slab = job_slab(job);
	bool durable = job->durable;
	bool again = part->file != PART_UNFILED && job->kind == FILES_WRITE;

	if (why)
		files_note_fault(files, why);
	job_free(job);
	part->tries += durable;
	if (again)
		store_part_sure(part, false);
	else
		store_part_unfiled(part);
	if (part->file == PART_UNFILED && part->memory == PART_OUT)
		store_part_free(part);
	chunk_let_go(files, chunk);
	slab_step(slab); /* its file may not be wanted any more */
	if (durable)
		store_wake(files->store);
}

/* Its sync has completed: the part is durable. */
static void job_last(struct files_job *job)
{
	struct store_part *part = job->part;

	if (job->kind == FILES_ERASE) {
		store_part_unfiled(part);
	} else {
		store_part_lasts(part);
		part->tries = 0;
		store_wake(job->files->store);
	}
	job_end(job);
}

/* It is there, and perhaps not for long. */
static void sync_fail(struct files_job *job)
{
	struct store *store = job->files->store;

	if (job->kind == FILES_ERASE) {
		write_fail(job, NULL);
		return;
	}
	job->part->tries++;
	job_end(job);
	store_wake(store);
}

static void jobs_lost(struct list *jobs)
{
	struct files_job *job;

	list_foreach_safe(job, jobs, link)
		sync_fail(job);
}

/* Data written before a failed sync counts as lost, whether this sync covered it or not:
 * no other one will report it. */
static void on_synced(struct disk_op *op)
{
	struct slab_file *slab = container_of(op, struct slab_file, sync);
	struct files_job *job;

	if (op->result >= 0) {
		list_foreach_safe(job, &slab->syncing, link)
			job_last(job);
	} else {
		files_note_fault(slab->files, &op->err);
		slab->syncs_failed++;
		jobs_lost(&slab->syncing);
		jobs_lost(&slab->unsynced);
	}
	slab_sync(slab); /* writes made meanwhile */
	files_go_on(slab->files);
}

static void slab_sync(struct slab_file *slab)
{
	struct list *first;

	if (!list_empty(&slab->syncing) || list_empty(&slab->unsynced))
		return;
	while ((first = list_pop_front(&slab->unsynced)))
		list_push_back(&slab->syncing, first);
	slab->sync = (struct disk_op){
		.what = DISK_SYNC,
		.file = slab_file_of(slab->number, slab->actual),
		.done = on_synced,
	};
	disk_submit(slab->files->disk, &slab->sync);
}

static void on_written(struct disk_op *op)
{
	struct files_job *job = container_of(op, struct files_job, op);
	struct files *files = job->files;

	files->flying_bytes -= job->bytes;
	if (op->result < 0) {
		write_fail(job, &op->err);
		return;
	}
	files->figures.written++;
	files->figures.written_bytes += job->bytes;
	store_part_filed(job->part);
	store_part_sure(job->part, true);
	if (!job->durable) {
		job_end(job);
	} else if (job->syncs_failed != job_slab(job)->syncs_failed) {
		sync_fail(job); /* some of it may have been written before that */
	} else {
		list_push_back(&job_slab(job)->unsynced, &job->link);
		slab_sync(job_slab(job));
	}
	files_go_on(files);
}

/* Does the file match the arena's slab? Not if the slab belongs to another user by now,
 * even with slots of that size: old slots would be taken for this user's. */
static bool slab_fits(const struct slab_file *slab)
{
	const struct arena *arena = slab->files->arena;
	uint64_t wanted = arena_slab_size(arena, slab->number);

	return slab->actual == wanted &&
	       (!wanted || slab->owner == arena_slab_owner(arena, slab->number));
}

/* The disk's thread: the part is pinned, and not written to. */
static void seal_before(struct disk_op *op)
{
	struct files_job *job = container_of(op, struct files_job, op);

	seal_make(job->header, &job->facts, op->iov[1].iov_base);
}

static void write_start(struct files_job *job)
{
	struct slab_file *slab = job_slab(job);

	job->files->flying_bytes += job->bytes;
	if (slab->busy || !slab_fits(slab)) {
		list_push_back(&slab->waiting, &job->link);
		slab_step(slab);
		return;
	}
	job_aim(job, DISK_WRITE, false);
	job->syncs_failed = slab->syncs_failed;
	job->op.before = seal_before;
	job->op.done = on_written;
	disk_submit(job->files->disk, &job->op);
}

/* ---- slab files ---- */

static void on_retry(struct loop_timer *timer)
{
	struct files *files = container_of(timer, struct files, retry);

	arena_limit(files->arena, ARENA_SLABS);
}

/* No further file for a while. */
static void files_full(struct files *files, const struct err *why)
{
	uint32_t used = arena_slabs_used(files->arena);

	log_warn("store", "files", "chunk_dir: no space for another file",
		 "files=%u why=\"%s\"", used, why->text);
	arena_limit(files->arena, used);
	loop_timer_start(&files->retry, FILES_RETRY_NS);
	files_room_out(files);
}

/* Parts that wait for its file are not written. */
static void slab_fail(struct slab_file *slab)
{
	struct files_job *job;

	slab->busy = true; /* nothing is done about it meanwhile */
	while ((job = list_first(&slab->waiting, struct files_job, link))) {
		slab->files->flying_bytes -= job->bytes;
		write_fail(job, NULL);
	}
	slab->busy = false;
}

static void on_slab_made(struct disk_op *op)
{
	struct slab_file *slab = container_of(op, struct slab_file, op);
	struct files *files = slab->files;

	slab->busy = false;
	if (op->result >= 0) {
		slab->actual = op->file.slot_bytes;
		slab->syncs_failed = 0;
		files->full = false;
		slab_step(slab);
		return;
	}
	slab_fail(slab);
	if (op->err.code == ERR_LIMIT)
		files_full(files, &op->err);
	else
		files_note_fault(files, &op->err);
}

/* While the old file exists its number is not reused: the next start could not tell which
 * one is valid. */
static void on_slab_removed(struct disk_op *op)
{
	struct slab_file *slab = container_of(op, struct slab_file, op);

	slab->busy = false;
	if (op->result >= 0 || op->err.code == ERR_NOTFOUND) {
		slab->actual = 0;
		slab_step(slab);
		return;
	}
	files_note_fault(slab->files, &op->err);
	slab_fail(slab);
}

static void slab_change(struct slab_file *slab, uint64_t wanted)
{
	slab->busy = true;
	if (!slab->actual)
		slab->owner = arena_slab_owner(slab->files->arena, slab->number);
	slab->op = (struct disk_op){
		.what = slab->actual ? DISK_REMOVE : DISK_MAKE,
		.file = slab_file_of(slab->number, slab->actual ? slab->actual : wanted),
		.bytes = files_slab_bytes(slab->files),
		.done = slab->actual ? on_slab_removed : on_slab_made,
	};
	disk_submit(slab->files->disk, &slab->op);
}

/* Compares the file with the arena's slab. */
static void slab_step(struct slab_file *slab)
{
	struct files *files = slab->files;
	struct list *first;

	if (slab->busy || !files->scanned)
		return;
	if (files->closed || files->readonly) {
		slab_fail(slab);
		return;
	}
	if (!slab_fits(slab)) {
		slab_change(slab, arena_slab_size(files->arena, slab->number));
		return;
	}
	while ((first = list_pop_front(&slab->waiting))) {
		struct files_job *job = list_entry(first, struct files_job, link);

		files->flying_bytes -= job->bytes;
		write_start(job);
	}
}

/* ---- the queue ---- */

static void unqueue(struct files_job *job)
{
	list_remove(&job->link);
	job->files->queued--;
	job->files->queued_bytes -= BLOCK_BYTES + job->bytes;
}

/* Outcome 1: the description of its class is not written yet. */
static int write_next(struct files *files, struct files_job *job)
{
	const struct class_words *words = class_words_of(files, job->part->class);

	if (words && words->busy)
		return 1;
	unqueue(job);
	if (words && words->there && !files->readonly)
		write_start(job);
	else
		write_fail(job, NULL);
	return 0;
}

static void on_go(struct loop_defer *defer)
{
	struct files *files = container_of(defer, struct files, go);
	struct files_job *job;

	if (files->closed) {
		while ((job = list_first(&files->queue, struct files_job, link))) {
			unqueue(job);
			write_fail(job, NULL);
		}
		return;
	}
	if (!files->scanned) {
		files_scan_go_on(files);
		return;
	}
	while (files->flying_bytes < FLYING_BYTES &&
	       (job = list_first(&files->queue, struct files_job, link))) {
		if (write_next(files, job) > 0)
			break;
	}
	for (uint32_t i = 0; i < ARENA_SLABS; i++)
		slab_step(&files->slabs[i]);
}

static bool may_write(const struct files *files, uint64_t bytes, bool durable)
{
	return files->open && files->scanned && !files->closed && !files->readonly &&
	       (durable || files->queued_bytes + BLOCK_BYTES + bytes <=
				   files->store->memory_bytes / QUEUED_SHARE);
}

/* Makes the part in its slot durable. */
static bool sync_queue(struct files *files, struct store_part *part)
{
	struct files_job *job = job_new(files, part, FILES_WRITE);

	if (!job) {
		err_clear();
		return false;
	}
	job->durable = true;
	list_push_back(&job_slab(job)->unsynced, &job->link);
	slab_sync(job_slab(job));
	return true;
}

/* It has its place, or takes one. */
static int write_queue(struct files *files, struct store_part *part, bool durable)
{
	uint64_t bytes = part->class->canon->slot_bytes;
	struct store_chunk *chunk = part->chunk;
	struct files_job *job = job_new(files, part, FILES_WRITE);
	int r = 0;

	if (!job)
		return err_pass(-ENOMEM);
	if (part->file == PART_UNFILED)
		r = arena_take(chunk->space->tenant->file_owner,
			       SEAL_HEADER_BYTES + bytes, &chunk->file_item,
			       &part->place);
	if (r < 0) {
		job_end(job);
		return err_pass(r);
	}
	job->durable = durable;
	files->queued++;
	files->queued_bytes += BLOCK_BYTES + bytes;
	list_push_back(&files->queue, &job->link);
	files_go_on(files);
	return 0;
}

/* Makes a part in its slot durable. One that the start has found may be torn, so it is
 * read first; after a failed sync it is written again, whichever run wrote it. Both need
 * it in memory. */
static bool last_in_place(struct files *files, struct store_part *part)
{
	const struct slab_file *slab = &files->slabs[arena_slab_of(&part->place)];
	int r;

	if (part->file == PART_LASTS)
		return true;
	if (part->file == PART_SURE && !slab->syncs_failed)
		return sync_queue(files, part);
	r = part->memory == PART_READY ? write_queue(files, part, true)
				       : store_part_load(part);
	if (r < 0)
		err_clear();
	return r >= 0;
}

bool files_write(struct files *files, struct store_part *part, bool durable)
{
	uint64_t bytes = part->class->canon->slot_bytes;
	struct files_job *job = part->job;

	assert(part->memory == PART_READY || part->file != PART_UNFILED);
	if (job) {
		if (job->kind == FILES_WRITE)
			job->durable |= durable;
		return job->kind != FILES_ERASE; /* one that is read: when it is */
	}
	if (!may_write(files, bytes, durable) || part->chunk->gone)
		return false;
	if (durable && part->tries >= TRIES_MAX) {
		part->tries = 0; /* for the next request */
		return false;
	}
	if (part->file != PART_UNFILED)
		return !durable || last_in_place(files, part);
	if (part->memory == PART_READY && write_queue(files, part, durable) >= 0)
		return true;
	err_clear();
	return false;
}

/* ---- reading ---- */

/* The disk's thread: the content must be this very part, complete. */
static void check_after(struct disk_op *op)
{
	struct files_job *job = container_of(op, struct files_job, op);
	struct seal_facts facts;

	if (!seal_read(job->header, &facts) ||
	    memcmp(facts.id, job->facts.id, SEAL_ID_BYTES) != 0 ||
	    memcmp(facts.class_digest, job->facts.class_digest, SEAL_DIGEST_BYTES) != 0 ||
	    facts.first != job->facts.first || facts.tokens != job->facts.tokens ||
	    facts.part_bytes != job->facts.part_bytes ||
	    !seal_is_whole(&facts, op->iov[1].iov_base))
		op->result = err_raise(ERR_PLAN,
				       "a part of a chunk in file %u differs from the "
				       "written one",
				       op->file.number);
}

static void on_loaded(struct disk_op *op)
{
	struct files_job *job = container_of(op, struct files_job, op);
	struct files *files = job->files;
	struct store_part *part = job->part;
	struct store_chunk *chunk = part->chunk;
	bool ok = op->result >= 0;
	/* missing or corrupt; otherwise it could only not be read now */
	bool lost = !ok && (op->err.code == ERR_IO || op->err.code == ERR_PLAN ||
			    op->err.code == ERR_NOTFOUND);

	if (ok) {
		files->figures.read++;
		files->figures.read_bytes += job->bytes;
		store_part_sure(part, true);
	} else {
		files->figures.bad += op->err.code == ERR_PLAN;
		files_note_fault(files, &op->err);
	}
	job_free(job);
	if (lost)
		store_part_unfiled(part);
	store_part_loaded(part, ok);
	chunk_let_go(files, chunk);
}

static int files_load(struct files *files, struct store_part *part)
{
	struct files_job *job;

	if (files->closed || part->job)
		return err_raise(ERR_STATE, "a part of a chunk cannot be read now");
	job = job_new(files, part, FILES_LOAD);
	if (!job)
		return err_pass(-ENOMEM);
	job_aim(job, DISK_READ, false);
	job->op.after = check_after;
	job->op.done = on_loaded;
	disk_submit(files->disk, &job->op);
	return 0;
}

/* ---- erasing ---- */

static void on_erased(struct disk_op *op)
{
	struct files_job *job = container_of(op, struct files_job, op);

	if (op->result < 0) {
		write_fail(job, &op->err);
		return;
	}
	list_push_back(&job_slab(job)->unsynced, &job->link);
	slab_sync(job_slab(job));
}

static void part_erase(struct files *files, struct store_part *part)
{
	struct files_job *job = job_new(files, part, FILES_ERASE);

	if (!job) {
		err_clear(); /* the next start finds it again */
		return;
	}
	job_aim(job, DISK_WRITE, true);
	job->op.done = on_erased;
	disk_submit(files->disk, &job->op);
}

static void files_erase(struct files *files, struct store_chunk *chunk)
{
	struct store_part *part;

	list_foreach(part, &chunk->parts, link) {
		if (part->file != PART_UNFILED && !part->job && !files->closed)
			part_erase(files, part);
	}
}

/* ---- life ---- */

int files_new(struct store *store, uint64_t bytes)
{
	static const struct file_ops ops = {.write = files_write,
					    .load = files_load,
					    .erase = files_erase,
					    .forget = class_words_leave};
	struct files *files = mem_zalloc(sizeof(*files));
	int r;

	if (!files)
		return err_pass(-ENOMEM);
	files->store = store;
	files->bytes = bytes;
	list_init(&files->queue);
	strmap_init(&files->words);
	loop_defer_init(&files->go, on_go);
	loop_timer_init(&files->retry, store->kvd->loop, on_retry);
	files_room_init(files);
	for (uint32_t i = 0; i < ARENA_SLABS; i++) {
		struct slab_file *slab = &files->slabs[i];

		slab->files = files;
		slab->number = i;
		list_init(&slab->waiting);
		list_init(&slab->unsynced);
		list_init(&slab->syncing);
	}
	r = arena_new(bytes, store_on_file_evict, store, &files->arena);
	if (r < 0) {
		mem_free(files);
		return err_pass(r);
	}
	store->files = files;
	store->file_ops = &ops;
	store->file_arena = files->arena;
	return 0;
}

void files_begin(struct files *files, struct disk *disk)
{
	files->disk = disk;
}

static void scan_if(struct files *files)
{
	if (files->open && files->memory && !files->closed && !files->scan &&
	    !files->scanned)
		files_scan_begin(files);
}

void files_on_open(void *arg, struct disk *disk, const struct err *why)
{
	struct files *files = arg;

	(void)disk;
	if (why) {
		files_readonly(files, why);
		log_error("store", "files", "chunk_dir is not used", "why=\"%s\"",
			  why->text);
		return;
	}
	files->open = true;
	files_look(files);
	scan_if(files);
}

void files_on_memory(struct files *files)
{
	if (!files)
		return;
	files->memory = true;
	scan_if(files);
}

void files_close(struct files *files)
{
	if (!files || files->closed)
		return;
	files->closed = true;
	loop_timer_stop(&files->retry);
	loop_timer_stop(&files->look);
	if (files->disk)
		disk_close(files->disk);
	files_go_on(files);
}

bool files_drained(const struct files *files)
{
	return !files || ((!files->disk || disk_drained(files->disk)) && !files->jobs);
}

int files_free(struct files *files)
{
	size_t left;
	int r;

	if (!files)
		return 0;
	r = disk_free(files->disk);
	loop_timer_stop(&files->retry);
	loop_timer_stop(&files->look);
	loop_defer_cancel(&files->go);
	files_scan_free(files->scan);
	left = strmap_count(&files->words);
	assert(r > 0 || left == 0);
	strmap_fini(&files->words);
	arena_free(files->arena);
	mem_free(files);
	return r;
}

bool files_scanning(const struct files *files)
{
	return files && files->scan && !files->scanned && !files->closed;
}

bool files_opening(const struct files *files)
{
	return !files->closed && !files->readonly && !files->scanned;
}

int files_writable(const struct files *files)
{
	if (files->readonly)
		return err_raise(ERR_LIMIT, "writing to chunk_dir has stopped: %s",
				 files->why.text);
	return 0;
}
