/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The start: scans the directory. The header of each slot of each slab file is read, some
 * tens at a time, and processed in order; the description of a class when a header names
 * it first. Nothing waits for the scan: until it ends its chunks are misses, and nothing
 * is written.
 *
 * Nothing is trusted beyond its sums: a class file must match its name, and a header must
 * fit the class that it names and the file that contains it; otherwise its slot is free.
 *
 * A freed slot keeps its header until it is written again, and then a torn write may
 * leave the old header before other bytes. So a part may seem to exist twice; the later
 * one counts, because it took its slot when the other one's was freed.
 *
 * With more spaces than the store may have, those with the latest parts stay; slots of
 * the others are free.
 *
 * Files without parts, and descriptions without parts, are removed after the scan, before
 * anything is written: they could be needed again at once. If a description could not be
 * read, nothing is known of its parts, and their files would be taken for empty ones:
 * then nothing is written or removed until the next start. The same applies if slots are
 * of a class that is too large for this daemon, as with a smaller chunk_memory, or slots
 * or their class are of another format: another start may be able to use them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/store/files_class.h"
#include "daemon/store/files_impl.h"
#include "daemon/store/store_impl.h"

#define WINDOW 32u

struct scan_read {
	struct files_scan *scan;
	struct disk_op op;
	uint8_t *header;
	void *block;
	bool done;
};

struct files_scan {
	struct files *files;
	struct disk_op op; /* list, class files, removals */
	struct disk_list list;
	size_t named, slab;		 /* of the list: the next one */
	uint8_t *data;			 /* of a class file: it is being read */
	char reading[DISK_NAME_MAX + 1]; /* its name; "": none is */
	uint64_t generation;		 /* of the slot that wants it */
	struct strmap
		lacks; /* by name of a class file: the error for which it is refused */
	struct err bad, too_big, other_format, no_room;
	uint64_t no_room_generation; /* slots before it have no room */
	/* of the current slab: its slots (0: there is none), to be read, processed */
	uint32_t number, slots, next, seen;
	struct scan_read reads[WINDOW];
	uint64_t parts, refused;
};

static void scan_next_slab(struct files_scan *scan);
static void scan_next_stray(struct files_scan *scan);
static void scan_next_name(struct files_scan *scan);
static void scan_headers(struct files_scan *scan);

void files_scan_free(struct files_scan *scan)
{
	if (!scan)
		return;
	for (unsigned int i = 0; i < WINDOW; i++)
		mem_free(scan->reads[i].block);
	disk_list_fini(&scan->list);
	strmap_fini(&scan->lacks);
	mem_free(scan->data);
	mem_free(scan);
}

static void scan_submit(struct files_scan *scan, const struct disk_op *op)
{
	scan->op = *op;
	disk_submit(scan->files->disk, &scan->op);
}

/* ---- the end ---- */

static void scan_end(struct files_scan *scan)
{
	struct files *files = scan->files;

	log_info("store", "files", "scanned chunk_dir", "parts=%llu refused=%llu",
		 (unsigned long long)scan->parts, (unsigned long long)scan->refused);
	for (uint32_t i = 0; i < ARENA_SLABS; i++)
		files->slabs[i].owner = arena_slab_owner(files->arena, i);
	files->scanned = true;
	files_look(files);
	files->scan = NULL;
	files_scan_free(scan);
	store_tidy(files->store);
	store_wake(files->store);
	files_go_on(files);
}

static void on_removed(struct disk_op *op)
{
	struct files_scan *scan = container_of(op, struct files_scan, op);

	if (op->result < 0)
		files_note_fault(scan->files, &op->err);
	if (!scan->files->closed)
		scan_next_stray(scan); /* the names follow when there is none */
}

/* Slabs of another chunk_dir_size, or duplicates. */
static void scan_next_stray(struct files_scan *scan)
{
	const struct files *files = scan->files;

	while (scan->slab < scan->list.slab_count && !files->readonly) {
		const struct disk_file *file = &scan->list.slabs[scan->slab++].file;

		if (file->number < ARENA_SLABS &&
		    files->slabs[file->number].actual == file->slot_bytes)
			continue;
		scan_submit(scan, &(struct disk_op){.what = DISK_REMOVE,
						    .file = *file,
						    .done = on_removed});
		return;
	}
	scan_next_name(scan);
}

/* Removes descriptions without parts, one after the other. */
static void scan_next_name(struct files_scan *scan)
{
	while (scan->named < scan->list.named_count) {
		const char *name = scan->list.named[scan->named++].name;
		struct class_words *words = strmap_get(&scan->files->words, name);

		if (!class_words_named(name) || scan->files->readonly ||
		    (words && words->class && words->class->parts))
			continue;
		if (words)
			words->there = false; /* written again if it is used */
		scan_submit(scan, &(struct disk_op){.what = DISK_NAMED_REMOVE,
						    .name = name,
						    .done = on_removed});
		return;
	}
	scan_end(scan);
}

/* ---- classes ---- */

static struct err *scan_lack(struct files_scan *scan, const struct err *why)
{
	switch (why->code) {
	case ERR_TOOBIG:
		return &scan->too_big;
	case ERR_LIMIT:
		if (scan->generation > scan->no_room_generation)
			scan->no_room_generation = scan->generation;
		return &scan->no_room;
	case ERR_VERSION:
		return &scan->other_format;
	default:
		return &scan->bad;
	}
}

/* It may be readable at the next start: until then nothing is removed. */
static void class_refused(struct files_scan *scan)
{
	struct err why, *lack;

	err_take(&why);
	lack = scan_lack(scan, &why);
	if (lack->code == ERR_OK)
		*lack = why;
	if (strmap_put(&scan->lacks, scan->reading, lack) < 0)
		err_take(&why);
	if (why.code == ERR_IO || why.code == ERR_NOMEM)
		files_end_writing(scan->files, &why);
	else if (lack != &scan->no_room) /* these were evicted for others */
		log_warn("store", "files", "chunks cannot be used", "why=\"%s\"",
			 why.text);
}

static void on_class_read(struct disk_op *op)
{
	struct files_scan *scan = container_of(op, struct files_scan, op);
	struct store_class *class;
	int r;

	if (scan->files->closed)
		return;
	r = op->result < 0
		    ? err_reraise(&op->err)
		    : class_words_read(scan->files->store, op->name, scan->data,
				       (size_t)op->moved, scan->generation, &class);
	if (r < 0)
		class_refused(scan);
	*scan->reading = '\0';
	scan_headers(scan);
}

static int named_compare(const void *name, const void *named)
{
	return strcmp(name, ((const struct disk_named *)named)->name);
}

/* Is there such a file? Then reads it. */
static bool class_read(struct files_scan *scan, const char *name, uint64_t generation)
{
	const struct disk_list *list = &scan->list;

	if (!list->named_count || !bsearch(name, list->named, list->named_count,
					   sizeof(*list->named), named_compare))
		return false;
	snprintf(scan->reading, sizeof(scan->reading), "%s", name);
	scan->generation = generation;
	scan_submit(scan, &(struct disk_op){.what = DISK_NAMED_READ,
					    .name = scan->reading,
					    .iov = {{scan->data, DISK_NAMED_BYTES_MAX}},
					    .done = on_class_read});
	return true;
}

/* The reason for which the class of a slot of this generation is refused; NULL: none is
 * known. */
static const struct err *class_lack(struct files_scan *scan, const char *name,
				    uint64_t generation)
{
	const struct err *lack = strmap_get(&scan->lacks, name);

	if (lack != &scan->no_room || generation <= scan->no_room_generation)
		return lack;
	strmap_remove(&scan->lacks, name); /* older spaces may be evicted for this one */
	return NULL;
}

/* ---- slots ---- */

/* Gives it this slot, which may replace another one. */
static int part_place(struct files_scan *scan, struct store_part *part,
		      const struct seal_facts *facts, uint32_t index)
{
	struct store_chunk *chunk = part->chunk;
	int r;

	if (part->file != PART_UNFILED)
		store_part_unfiled(part);
	r = arena_place(chunk->space->tenant->file_owner,
			SEAL_HEADER_BYTES + facts->part_bytes, scan->number, index,
			&chunk->file_item, &part->place);
	if (r < 0)
		return err_pass(r);
	part->generation = facts->generation;
	if (part->class->generation < facts->generation)
		part->class->generation = facts->generation;
	store_part_filed(part);
	return 0;
}

/* The part that the header describes, in this slot of this file. Outcome 1: it is being
 * read from another slot: retry then. */
static int scan_place(struct files_scan *scan, struct store_class *class,
		      const struct seal_facts *facts, uint32_t index)
{
	struct store_chunk *chunk;
	struct store_part *part = NULL;
	int r = store_chunk_get(class->space, facts->id, facts->first, facts->tokens,
				&chunk);

	if (r < 0)
		return err_pass(r);
	part = store_part_find(chunk, class);
	if (part && part->file != PART_UNFILED && facts->generation <= part->generation)
		r = err_raise(ERR_EXIST, "duplicate part");
	else if (part && part->job)
		r = 1;
	else if (!part)
		r = store_part_outside(chunk, class, &part);
	if (r == 0)
		r = part_place(scan, part, facts, index);
	if (part && part->file == PART_UNFILED && part->memory == PART_OUT)
		store_part_free(part);
	store_chunk_unpin(chunk);
	return r < 0 ? err_pass(r) : r;
}

static int scan_check(const struct files_scan *scan, const struct store_class *class,
		      const struct seal_facts *facts)
{
	const struct files *files = scan->files;
	uint64_t part_bytes, slot_bytes;

	if (!class)
		return err_raise(ERR_PROTO, "unknown class");
	part_bytes = class->canon->slot_bytes;
	slot_bytes = arena_slot_size(files->arena, SEAL_HEADER_BYTES + part_bytes);
	if (facts->part_bytes != part_bytes ||
	    slot_bytes != files->slabs[scan->number].actual)
		return err_raise(ERR_PROTO, "size differs from its class or its file");
	if (facts->tokens == 0 || facts->tokens > class->space->tokens ||
	    facts->first > UINT32_MAX)
		return err_raise(ERR_PROTO, "no valid position in a prompt");
	return 0;
}

/* There are chunks of a class that is too large for this daemon, or that it cannot read:
 * they are kept. */
static void scan_keep(struct files_scan *scan, const struct err *lack)
{
	struct err why;

	err_set(&why, lack->code,
		"chunk_dir has chunks that this start cannot use; they are kept for a "
		"later one. %s",
		lack->text);
	files_end_writing(scan->files, &why);
}

/* The slot is free, or of another format. */
static void scan_unread(struct files_scan *scan, const uint8_t *header)
{
	struct err *why = &scan->other_format;
	uint32_t version;

	if (!seal_is_other(header, &version))
		return;
	if (why->code == ERR_OK)
		err_set(why, ERR_VERSION,
			"format %u; start the kvd that wrote them, or empty chunk_dir",
			version);
	scan_keep(scan, why);
}

/* The class of the slot; NULL: it has none. Outcome 1: its description is being read. */
static int slot_class(struct files_scan *scan, const struct seal_facts *facts,
		      struct store_class **class_p)
{
	char name[DISK_NAME_MAX + 1];
	const struct class_words *words;
	const struct err *lack;
	uint64_t generation;

	class_words_name(facts->class_digest, name);
	words = strmap_get(&scan->files->words, name);
	*class_p = words ? words->class : NULL;
	if (*class_p)
		return 0;
	generation = facts->generation < STORE_NOW ? facts->generation : STORE_NOW - 1;
	lack = class_lack(scan, name, generation);
	if (lack == &scan->too_big || lack == &scan->other_format)
		scan_keep(scan, lack);
	return !lack && class_read(scan, name, generation);
}

/* Outcome 1: not now. */
static int scan_slot(struct files_scan *scan, const struct scan_read *read,
		     uint32_t index)
{
	struct store_class *class;
	struct seal_facts facts;
	int r;

	if (read->op.result < 0)
		return 0;
	if (!seal_read(read->header, &facts)) {
		scan_unread(scan, read->header);
		return 0;
	}
	if (slot_class(scan, &facts, &class) > 0)
		return 1;
	r = scan_check(scan, class, &facts);
	if (r >= 0)
		r = scan_place(scan, class, &facts, index);
	if (r > 0)
		return 1;
	if (facts.generation > scan->files->generation)
		scan->files->generation = facts.generation;
	if (r < 0) {
		log_debug("store", "files", err_last()->text, "file=%u slot=%u",
			  scan->number, index);
		err_clear();
		scan->refused++;
	} else {
		scan->parts++;
	}
	return 0;
}

static void on_header(struct disk_op *op);

static void read_headers(struct files_scan *scan)
{
	const struct slab_file *slab = &scan->files->slabs[scan->number];

	while (scan->next < scan->slots && scan->next < scan->seen + WINDOW) {
		struct scan_read *read = &scan->reads[scan->next % WINDOW];

		read->done = false;
		read->op = (struct disk_op){
			.what = DISK_READ,
			.file = {.slot_bytes = slab->actual, .number = scan->number},
			.offset = scan->next * slab->actual,
			.iov = {{read->header, SEAL_HEADER_BYTES}},
			.done = on_header,
		};
		scan->next++;
		disk_submit(scan->files->disk, &read->op);
	}
}

/* Headers are processed in order. */
static void scan_headers(struct files_scan *scan)
{
	while (scan->seen < scan->next && !*scan->reading) {
		struct scan_read *read = &scan->reads[scan->seen % WINDOW];

		if (!read->done || scan_slot(scan, read, scan->seen) > 0)
			break;
		read->done = false;
		scan->seen++;
	}
	if (scan->seen < scan->slots) {
		read_headers(scan);
	} else if (scan->slots) {
		scan->slots = 0;
		scan_next_slab(scan);
	}
}

static void on_header(struct disk_op *op)
{
	struct scan_read *read = container_of(op, struct scan_read, op);
	struct files_scan *scan = read->scan;

	read->done = true;
	if (op->result < 0)
		files_note_fault(scan->files, &op->err);
	if (scan->files->closed)
		return; /* freed with the files */
	scan_headers(scan);
}

void files_scan_go_on(struct files *files)
{
	if (files->scan && !files->closed)
		scan_headers(files->scan);
}

static bool slab_is_stray(const struct files *files, const struct disk_slab *found)
{
	const struct disk_file *file = &found->file;
	uint64_t slab_bytes = files_slab_bytes(files);

	return file->number >= ARENA_SLABS || found->bytes != slab_bytes ||
	       file->slot_bytes <= SEAL_HEADER_BYTES || file->slot_bytes % DISK_ALIGN ||
	       file->slot_bytes > slab_bytes || files->slabs[file->number].actual;
}

static void scan_next_slab(struct files_scan *scan)
{
	struct files *files = scan->files;
	const struct disk_slab *found;

	while (scan->slab < scan->list.slab_count &&
	       slab_is_stray(files, &scan->list.slabs[scan->slab]))
		scan->slab++;
	if (scan->slab == scan->list.slab_count) {
		scan->slab = 0;
		scan_next_stray(scan);
		return;
	}
	found = &scan->list.slabs[scan->slab++];
	scan->number = found->file.number;
	files->slabs[scan->number].actual = found->file.slot_bytes;
	scan->slots = (uint32_t)(files_slab_bytes(files) / found->file.slot_bytes);
	scan->next = scan->seen = 0;
	read_headers(scan);
}

static void on_listed(struct disk_op *op)
{
	struct files_scan *scan = container_of(op, struct files_scan, op);
	struct files *files = scan->files;

	if (files->closed)
		return;
	if (op->result < 0) { /* the contents are unknown, so nothing is written */
		files_end_writing(files, &op->err);
		files->scan = NULL;
		files_scan_free(scan);
		store_tidy(files->store);
		return;
	}
	scan_next_slab(scan);
}

void files_scan_begin(struct files *files)
{
	struct files_scan *scan = mem_zalloc(sizeof(*scan));
	struct err why;
	bool ok = scan != NULL;

	for (unsigned int i = 0; ok && i < WINDOW; i++) {
		scan->reads[i].scan = scan;
		scan->reads[i].header = files_header_new(&scan->reads[i].block);
		ok = scan->reads[i].header != NULL;
	}
	if (ok) {
		scan->data = mem_alloc(DISK_NAMED_BYTES_MAX);
		ok = scan->data != NULL;
	}
	if (!ok) {
		err_take(&why);
		files_end_writing(files, &why);
		files_scan_free(scan);
		return;
	}
	scan->files = files;
	strmap_init(&scan->lacks);
	files->scan = scan;
	scan_submit(scan, &(struct disk_op){.what = DISK_LIST,
					    .list = &scan->list,
					    .done = on_listed});
}
