/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run of chunks is read as one if one class holds all of each chunk that the reader
 * needs: then its slots are pages of one pool, and a page number is the address of each.
 * Parts of several ranks are in several classes, each with some heads: a run of each is
 * read. An engine needs its published pages back at once, and rows may wait for a long
 * time: so what waits keeps the chunks' names, and a call of a kernel the pages.
 */
#include "daemon/store/store_kv.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/memory/memory.h"
#include "daemon/session/pool.h"
#include "daemon/session/region.h"
#include "daemon/store/store_impl.h"

#define CALL_CHUNKS_MAX 1024u /* published ones: each call looks them up */

static const struct layout_view *kv_view(const struct layout *layout, const char *name,
					 uint32_t *index_p)
{
	for (uint32_t i = 0; i < layout->view_count; i++) {
		if (name ? strcmp(layout->views[i].name, name) == 0
			 : layout->view_count == 1) {
			*index_p = i;
			return &layout->views[i];
		}
	}
	if (name)
		err_raise(ERR_NOTFOUND, "view: the chunks have no view '%.31s'", name);
	else
		err_raise(ERR_INVAL, "view: the chunks have %u; name one",
			  layout->view_count);
	return NULL;
}

struct store_kv *store_kv_ref(struct store_kv *kv)
{
	kv->others++;
	return kv;
}

void store_kv_free(struct store_kv *kv)
{
	if (!kv)
		return;
	if (kv->others > 0) {
		kv->others--;
		return;
	}
	while (kv->count > 0) /* the end of the chain first */
		store_chunk_unpin(kv->chunks[--kv->count]);
	if (kv->class)
		store_space_let_go(kv->class->space);
	if (kv->region)
		region_unpin(kv->region);
	mem_free(kv->chunks);
	mem_free(kv->pages);
	mem_free(kv);
}

/* What can read all of the pool's memory in place: threads, or one device's kernels. */
static int kv_where(const struct pool *pool, struct gpu_device **device_p)
{
	*device_p = NULL;
	if (!pool)
		return err_raise(ERR_NOTFOUND, "the engine of these chunks has exited");
	for (uint32_t i = 0; i < pool->layout->buffer_count; i++) {
		const struct region *region = pool->buffers[i].region;
		struct gpu_device *device = memory_device(region->memory);

		if (!device && !memory_is_plain(region->memory))
			return err_raise(ERR_REQUIRE,
					 "the chunks are in an engine's pages in %s "
					 "memory, which is not read in place; use fetch",
					 region_kind_name(region->kind));
		if (i > 0 && device != *device_p)
			return err_raise(ERR_REQUIRE, "the chunks are in the memory of "
						      "several devices; use fetch");
		*device_p = device;
	}
	return 0;
}

static uint32_t kv_chunk_pages(const struct store_class *class, uint32_t view)
{
	return class->published ? store_pages_of_view(class, view)
				: class->canon->views[view].pages;
}

/* Room for so many chunks of the class. */
static int kv_new(struct store_class *class, uint32_t count, const char *view,
		  struct store_kv **kv_p)
{
	struct store *store = class->space->store;
	struct gpu_device *device;
	struct store_kv *kv;
	uint32_t index = 0;
	int r = kv_view(class->canon->layout, view, &index) ? 0 : -EINVAL;

	if (r >= 0)
		r = class->published ? kv_where(class->pool, &device)
				     : store_ready(store);
	if (r >= 0 && class->published && count > CALL_CHUNKS_MAX)
		r = err_raise(
			ERR_REQUIRE,
			"%u chunks are in an engine's pages (limit %u in one part); "
			"use several parts, or fetch",
			count, CALL_CHUNKS_MAX);
	if (r < 0)
		return err_pass(r);
	kv = mem_zalloc(sizeof(*kv));
	if (!kv)
		return err_pass(-ENOMEM);
	kv->view = index;
	kv->chunks = mem_calloc(count, sizeof(*kv->chunks));
	if (!class->published) {
		kv->region = store->region;
		region_pin(kv->region);
		kv->pages = mem_calloc((size_t)count * kv_chunk_pages(class, index),
				       sizeof(*kv->pages));
	}
	if (!kv->chunks || (!class->published && !kv->pages)) {
		store_kv_free(kv);
		return err_pass(-ENOMEM);
	}
	kv->class = class;
	class->space->handles++; /* the class stays */
	*kv_p = kv;
	return 0;
}

/* Token t of a chunk is in page t / page_tokens of it: not if a rank holds some tokens
 * alone, nor in views whose pages are states. */
static int kv_view_check(const struct store_kv *kv)
{
	const struct layout_view *view = store_kv_view(kv);

	if (!token_shard_is_all(&view->shard) ||
	    (uint64_t)kv_chunk_pages(kv->class, kv->view) * view->page_tokens !=
		    kv->class->space->tokens)
		return err_raise(ERR_REQUIRE,
				 "view %s: its pages do not hold all tokens of a chunk",
				 view->name);
	return 0;
}

/* With a slot, or published pages that are not withdrawn; else NULL + ERR_NOTFOUND. */
static const struct store_part *kv_part(const struct store_class *class,
					const struct store_chunk *chunk)
{
	const struct store_part *part = store_part_find(chunk, class);

	if (part &&
	    (class->published ? part->memory == PART_READY : part->slot.slab != NULL))
		return part;
	if (class->published)
		store_pages_gone();
	else
		err_raise(ERR_NOTFOUND, "a chunk of the hold is missing");
	return NULL;
}

static int kv_add(struct store_kv *kv, struct store_chunk *chunk)
{
	const struct store_part *part = kv_part(kv->class, chunk);

	if (!part)
		return err_pass(-ENOENT);
	if (kv->tokens % kv->class->space->tokens)
		return err_raise(ERR_REQUIRE,
				 "a chunk of the hold is short, but not the last");
	if (part->memory != PART_READY)
		return err_raise(ERR_BUSY,
				 "a chunk of the hold is being read from a file");
	if (kv->pages)
		canon_pages(kv->class->canon, kv->view, arena_offset(&part->slot),
			    kv->pages + kv->page_count);
	kv->page_count += kv_chunk_pages(kv->class, kv->view);
	kv->tokens += chunk->tokens;
	store_chunk_pin(chunk);
	kv->chunks[kv->count++] = chunk;
	return 0;
}

static int kv_make(struct store_class *class, struct store_chunk *const *chunks,
		   uint32_t count, const char *view, struct store_kv **kv_p)
{
	struct store_kv *kv = NULL;
	int r = kv_new(class, count, view, &kv);

	if (r >= 0)
		r = kv_view_check(kv);
	for (uint32_t i = 0; i < count && r >= 0; i++)
		r = kv_add(kv, chunks[i]);
	if (r < 0) {
		store_kv_free(kv);
		return err_pass(r);
	}
	*kv_p = kv;
	return 0;
}

static int range_check(uint32_t first, uint32_t count, uint32_t have)
{
	if (count == 0 || first > have || count > have - first)
		return err_raise(ERR_RANGE, "chunks [%u, +%u): the hold has %u here",
				 first, count, have);
	return 0;
}

int store_kv_classes(const struct store_hold *hold, uint32_t first, uint32_t count,
		     uint64_t *classes_p)
{
	uint64_t mask = ~UINT64_C(0);
	int r = store_hold_check(hold);

	if (r >= 0)
		r = range_check(first, count, hold->count);
	if (r < 0)
		return err_pass(r);
	for (uint32_t i = first; i < first + count; i++) {
		uint64_t have =
			store_chunk_ready(hold->chunks[i]) | hold->chunks[i]->filed;

		if (!have)
			return store_pages_gone();
		mask &= have;
	}
	*classes_p = store_cover(hold->handle, mask); /* copies, if there are any */
	if (!*classes_p)
		return err_raise(ERR_REQUIRE,
				 "the chunks are in parts of different ranks, or in "
				 "pages of several engines; use fetch");
	return 0;
}

const struct layout *store_kv_layout(const struct store_hold *hold, unsigned int bit)
{
	return hold->handle->space->classes[bit]->canon->layout;
}

int store_kv_of_hold(const struct store_hold *hold, unsigned int bit, uint32_t first,
		     uint32_t count, const char *view, struct store_kv **kv_p)
{
	return err_pass(kv_make(hold->handle->space->classes[bit], hold->chunks + first,
				count, view, kv_p));
}

int store_kv_of_chunks(struct store_class *class, struct store_chunk *const *chunks,
		       uint32_t have, uint32_t first, uint32_t count, const char *view,
		       struct store_kv **kv_p)
{
	int r = range_check(first, count, have);

	if (r < 0)
		return err_pass(r);
	return err_pass(kv_make(class, chunks + first, count, view, kv_p));
}

/* ---- calls ---- */

int store_kv_device(const struct store_kv *kv, struct gpu_device **device_p)
{
	*device_p = NULL;
	return kv->class->published ? err_pass(kv_where(kv->class->pool, device_p)) : 0;
}

const struct layout_view *store_kv_view(const struct store_kv *kv)
{
	if (!kv->class->published)
		return &kv->class->canon->layout->views[kv->view];
	return kv->class->pool ? store_pages_view(kv->class, kv->view) : NULL;
}

/* The class may be another engine's by now, with pages of another size. */
static int read_pages(const struct store_kv *kv, struct store_kv_read *read)
{
	uint32_t count = kv_chunk_pages(kv->class, kv->view);

	read->own = mem_calloc((size_t)kv->count * count, sizeof(*read->own));
	if (!read->own)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < kv->count; i++) { /* at most 1024 */
		const struct store_part *part = kv_part(kv->class, kv->chunks[i]);

		if (!part)
			return err_pass(-ENOENT);
		store_pages_copy(part, kv->view, read->own + i * count);
	}
	read->pages = read->own;
	return 0;
}

int store_kv_read_begin(const struct store_kv *kv, struct store_kv_read *read)
{
	int r;

	*read = (struct store_kv_read){.view = store_kv_view(kv),
				       .pages = kv->pages,
				       .base = kv->class->space->store->base};
	if (!kv->class->published)
		return 0;
	r = kv_where(kv->class->pool, &read->device);
	if (r >= 0)
		r = read_pages(kv, read);
	if (r >= 0)
		r = store_reading_begin(&read->reading, kv->class, kv->chunks, kv->count,
					NULL);
	if (r < 0)
		return err_pass(r);
	read->pool = kv->class->pool;
	pool_use(read->pool); /* its memory stays mapped */
	return 0;
}

uint64_t store_kv_at(const struct store_kv_read *read, const struct layout_field *f)
{
	const struct pool_buffer *buffer;
	const struct memory *memory;

	if (!read->pool)
		return (uintptr_t)read->base + f->offset;
	buffer = &read->pool->buffers[f->buffer];
	memory = buffer->region->memory;
	return (read->device ? memory->address : (uintptr_t)memory->base) +
	       buffer->offset + f->offset;
}

bool store_kv_read_left(const struct store_kv_read *read)
{
	return atomic_load(&read->reading.left);
}

int store_kv_read_end(struct store_kv_read *read)
{
	bool left = store_kv_read_left(read);

	store_reading_end(&read->reading);
	mem_free(mem_steal(read->own));
	if (read->pool)
		pool_unuse(mem_steal(read->pool));
	return left ? store_pages_gone() : 0;
}

bool store_kv_same(const struct store_kv *a, const struct store_kv *b)
{
	return a->class == b->class && a->view == b->view && a->count == b->count &&
	       memcmp(a->chunks, b->chunks, a->count * sizeof(*a->chunks)) == 0;
}

uint64_t store_kv_bytes(const struct store_kv *kv)
{
	return sizeof(*kv) + kv->count * sizeof(*kv->chunks) +
	       kv->page_count * sizeof(*kv->pages);
}
