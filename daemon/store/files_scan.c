/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The start: what is in the directory. First the files that say what classes are, then
 * the header of each slot of each slab file, some tens of reads at a time, looked at in
 * order. Nobody waits for it: until it is over all of this is a miss, and nothing is
 * written.
 *
 * Nothing that is read is believed beyond its sums: a class file is what its name says,
 * a header fits the class that it names and the file that it lies in, or its slot is
 * free.
 */
#include <assert.h>
#include <errno.h>
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
	bool flying, done;
};

struct files_scan {
	struct files *files;
	struct disk_op op; /* list, class files, removals */
	struct disk_list list;
	size_t named, slab;    /* of the list: the next one */
	uint8_t *data;	       /* of a class file */
	struct strmap classes; /* by digest */
	/* of the slab under way */
	uint32_t number, slots, next, seen; /* slots: to be read, to be looked at */
	struct scan_read reads[WINDOW];
	uint64_t parts, refused;
};

static void scan_next_class(struct files_scan *scan);
static void scan_next_slab(struct files_scan *scan);

void files_scan_free(struct files_scan *scan)
{
	if (!scan)
		return;
	for (unsigned int i = 0; i < WINDOW; i++)
		mem_free(scan->reads[i].block);
	disk_list_fini(&scan->list);
	strmap_fini(&scan->classes);
	mem_free(scan->data);
	mem_free(scan);
}

static void scan_submit(struct files_scan *scan, const struct disk_op *op)
{
	scan->op = *op;
	disk_submit(scan->files->disk, &scan->op);
}

/* ---- the end ---- */

/* It is known what there is: from here on it is written. */
static void scan_over(struct files_scan *scan)
{
	struct files *files = scan->files;

	log_info("store", "files", "knows what chunk_dir holds",
		 "parts=%llu refused=%llu", (unsigned long long)scan->parts,
		 (unsigned long long)scan->refused);
	files->scan = NULL;
	files->scanned = true;
	files_scan_free(scan);
	store_tidy(files->store);
	files_go_on(files);
}

/* Descriptions of what no part is of any more go one behind the other; before the first
 * write, which may be one of them again. */
static void on_name_removed(struct disk_op *op)
{
	struct files_scan *scan = container_of(op, struct files_scan, op);

	scan->named++;
	if (scan->files->closed)
		return;
	for (; scan->named < scan->list.named_count; scan->named++) {
		const char *name = scan->list.named[scan->named].name;
		const struct store_class *class = strmap_get(&scan->classes, name);

		if (class_words_named(name) && !class) {
			scan_submit(scan, &(struct disk_op){.what = DISK_NAMED_REMOVE,
							    .name = name,
							    .done = on_name_removed});
			return;
		}
	}
	scan_over(scan);
}

/* Classes without a part are forgotten, and their files with them. */
static void forget_classes(struct files_scan *scan)
{
	struct idmap_cursor it;

	strmap_foreach(&scan->classes, it)
	{
		struct store_class *class = it.value;

		if (class->parts)
			continue;
		strmap_remove(&scan->classes, class->words->name);
		class->words->there = false; /* written again if it is used */
	}
}

static void scan_end(struct files_scan *scan)
{
	forget_classes(scan);
	scan->named = SIZE_MAX; /* begins with 0 */
	on_name_removed(&scan->op);
}

/* ---- slots ---- */

/* The part that the header tells of, in this slot of this file. */
static int scan_place(struct files_scan *scan, struct store_class *class,
		      const struct seal_facts *facts, uint32_t index)
{
	struct store_space *space = class->space;
	struct store_chunk *chunk;
	struct store_part *part = NULL;
	int r = store_chunk_get(space, facts->id, facts->first, facts->tokens, &chunk);

	if (r < 0)
		return err_pass(r);
	if (store_part_find(chunk, class))
		r = err_raise(ERR_EXIST, "a part is there twice");
	if (r >= 0)
		r = store_part_outside(chunk, class, &part);
	if (r >= 0)
		r = arena_place(space->tenant->file_owner,
				SEAL_HEADER_BYTES + facts->part_bytes, scan->number,
				index, &chunk->file_item, &part->place);
	if (r >= 0)
		store_part_filed(part);
	else if (part)
		store_part_free(part);
	store_chunk_unpin(chunk);
	return r < 0 ? err_pass(r) : 0;
}

static struct store_class *scan_class(const struct files_scan *scan,
				      const struct seal_facts *facts)
{
	struct idmap_cursor it;

	strmap_foreach(&scan->classes, it)
	{
		struct store_class *class = it.value;

		if (memcmp(class->words->digest, facts->class_digest,
			   SEAL_DIGEST_BYTES) == 0)
			return class;
	}
	return NULL;
}

static void scan_slot(struct files_scan *scan, const struct scan_read *read,
		      uint32_t index)
{
	struct seal_facts facts;
	struct store_class *class;

	if (read->op.result < 0 || !seal_read(read->header, &facts))
		return;
	class = scan_class(scan, &facts);
	if (!class || facts.part_bytes != class->canon->slot_bytes || facts.tokens == 0 ||
	    facts.tokens > class->space->tokens || facts.first > UINT32_MAX ||
	    scan_place(scan, class, &facts, index) < 0) {
		log_debug("store", "files",
			  class ? err_last()->text : "of no known class",
			  "file=%u slot=%u", scan->number, index);
		err_clear();
		scan->refused++;
		return;
	}
	scan->parts++;
}

static void on_header(struct disk_op *op);

static void read_headers(struct files_scan *scan)
{
	const struct slab_file *slab = &scan->files->slabs[scan->number];

	while (scan->next < scan->slots && scan->next < scan->seen + WINDOW) {
		struct scan_read *read = &scan->reads[scan->next % WINDOW];

		read->flying = true;
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

static bool scan_flying(const struct files_scan *scan)
{
	for (unsigned int i = 0; i < WINDOW; i++) {
		if (scan->reads[i].flying)
			return true;
	}
	return false;
}

static void on_header(struct disk_op *op)
{
	struct scan_read *read = container_of(op, struct scan_read, op);
	struct files_scan *scan = read->scan;

	read->flying = false;
	read->done = true;
	if (op->result < 0)
		files_note_fault(scan->files, &op->err);
	if (scan->files->closed)
		return; /* freed with the files */
	while (scan->seen < scan->next && scan->reads[scan->seen % WINDOW].done) {
		scan_slot(scan, &scan->reads[scan->seen % WINDOW], scan->seen);
		scan->reads[scan->seen % WINDOW].done = false;
		scan->seen++;
	}
	read_headers(scan);
	if (scan->seen == scan->slots && !scan_flying(scan))
		scan_next_slab(scan);
}

static void on_stray_removed(struct disk_op *op)
{
	struct files_scan *scan = container_of(op, struct files_scan, op);

	if (op->result < 0)
		files_note_fault(scan->files, &op->err);
	if (!scan->files->closed)
		scan_next_slab(scan);
}

static void scan_next_slab(struct files_scan *scan)
{
	struct files *files = scan->files;
	uint64_t slab_bytes = files_slab_bytes(files);
	const struct disk_slab *found;

	if (scan->slab == scan->list.slab_count) {
		scan_end(scan);
		return;
	}
	found = &scan->list.slabs[scan->slab++];
	scan->number = found->file.number;
	if (scan->number >= ARENA_SLABS || found->bytes != slab_bytes ||
	    found->file.slot_bytes <= SEAL_HEADER_BYTES ||
	    found->file.slot_bytes % DISK_ALIGN || found->file.slot_bytes > slab_bytes ||
	    files->slabs[scan->number].actual) { /* of another chunk_dir_size */
		scan_submit(scan, &(struct disk_op){.what = DISK_REMOVE,
						    .file = found->file,
						    .done = on_stray_removed});
		return;
	}
	files->slabs[scan->number].actual = found->file.slot_bytes;
	scan->slots = (uint32_t)(slab_bytes / found->file.slot_bytes);
	scan->next = scan->seen = 0;
	read_headers(scan);
}

/* ---- classes ---- */

static void on_class_read(struct disk_op *op)
{
	struct files_scan *scan = container_of(op, struct files_scan, op);
	struct store_class *class;
	int r = op->result;

	if (scan->files->closed)
		return;
	if (r < 0)
		files_note_fault(scan->files, &op->err);
	else
		r = class_words_read(scan->files->store, op->name, scan->data,
				     (size_t)op->moved, &class);
	if (r >= 0) {
		r = strmap_put(&scan->classes, op->name, class);
		class->words->there = r >= 0; /* else it is removed */
	}
	if (r < 0 && op->result >= 0) {
		log_warn("store", "files", "chunks that it cannot use", "why=\"%s\"",
			 err_last()->text);
		err_clear();
	}
	scan_next_class(scan);
}

static void scan_next_class(struct files_scan *scan)
{
	while (scan->named < scan->list.named_count) {
		const struct disk_named *named = &scan->list.named[scan->named++];

		if (!class_words_named(named->name))
			continue;
		scan_submit(scan,
			    &(struct disk_op){.what = DISK_NAMED_READ,
					      .name = named->name,
					      .iov = {{scan->data, DISK_NAMED_BYTES_MAX}},
					      .done = on_class_read});
		return;
	}
	scan_next_slab(scan);
}

static void on_listed(struct disk_op *op)
{
	struct files_scan *scan = container_of(op, struct files_scan, op);

	if (scan->files->closed)
		return;
	if (op->result < 0) {
		files_note_fault(scan->files, &op->err);
		scan->files->readonly = true;
		scan->files->why = op->err;
		return;
	}
	scan_next_class(scan);
}

void files_scan_begin(struct files *files)
{
	struct files_scan *scan = mem_zalloc(sizeof(*scan));
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
		files->readonly = true;
		err_take(&files->why);
		files_scan_free(scan);
		return;
	}
	scan->files = files;
	strmap_init(&scan->classes);
	files->scan = scan;
	scan_submit(scan, &(struct disk_op){.what = DISK_LIST,
					    .list = &scan->list,
					    .done = on_listed});
}
