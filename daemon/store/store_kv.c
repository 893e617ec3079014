/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A run of chunks is read as one if one class holds all of each chunk that the reader
 * needs: then its slots are pages of one pool, and a page number is the address of each.
 * Parts of several ranks are in several classes, each with some heads: a run of each is
 * read. Those in an engine's pages are fetched: attention may read for a long time, and
 * an engine needs its pages back at once.
 */
#include "daemon/store/store_kv.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/session/pool.h"
#include "daemon/session/region.h"
#include "daemon/store/remote_hold.h"
#include "daemon/store/store_impl.h"

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

/* Room for so many chunks of the class. */
static int kv_new(struct store_class *class, uint32_t count, const char *view,
		  struct store_kv **kv_p, uint32_t *index_p)
{
	const struct canon *canon = class->canon;
	const struct layout_view *found = kv_view(canon->layout, view, index_p);
	struct store *store = class->space->store;
	struct store_kv *kv;
	int r = found ? store_ready(store) : -EINVAL;

	if (r < 0)
		return err_pass(r);
	kv = mem_zalloc(sizeof(*kv));
	if (!kv)
		return err_pass(-ENOMEM);
	kv->view = found;
	kv->region = store->region;
	region_pin(kv->region);
	kv->base = store->base;
	kv->page_tokens = found->page_tokens;
	kv->chunks = mem_calloc(count, sizeof(*kv->chunks));
	kv->pages = mem_calloc((size_t)count * canon->views[*index_p].pages,
			       sizeof(*kv->pages));
	if (!kv->chunks || !kv->pages) {
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
static int kv_view_check(const struct store_class *class, uint32_t index)
{
	const struct layout_view *view = &class->canon->layout->views[index];

	if (!token_shard_is_all(&view->shard) ||
	    (uint64_t) class->canon->views[index].pages * view->page_tokens !=
		    class->space->tokens)
		return err_raise(ERR_REQUIRE,
				 "view %s: its pages do not hold all tokens of a chunk",
				 view->name);
	return 0;
}

static int kv_add(struct store_kv *kv, struct store_chunk *chunk, uint32_t view)
{
	const struct canon *canon = kv->class->canon;
	const struct store_part *part = store_part_find(chunk, kv->class);

	if (!part || !part->slot.slab)
		return err_raise(ERR_NOTFOUND, "a chunk of the hold is missing");
	if (kv->tokens % kv->class->space->tokens)
		return err_raise(ERR_REQUIRE,
				 "a chunk of the hold is short, but not the last");
	if (part->memory != PART_READY)
		return err_raise(ERR_BUSY,
				 "a chunk of the hold is being read from a file");
	canon_pages(canon, view, arena_offset(&part->slot), kv->pages + kv->page_count);
	kv->page_count += canon->views[view].pages;
	kv->tokens += chunk->tokens;
	store_chunk_pin(chunk);
	kv->chunks[kv->count++] = chunk;
	return 0;
}

static int kv_make(struct store_class *class, struct store_chunk *const *chunks,
		   uint32_t count, const char *view, struct store_kv **kv_p)
{
	struct store_kv *kv = NULL;
	uint32_t index = 0;
	int r = kv_new(class, count, view, &kv, &index);

	if (r >= 0)
		r = kv_view_check(class, index);
	for (uint32_t i = 0; i < count && r >= 0; i++)
		r = kv_add(kv, chunks[i], index);
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
	for (uint32_t i = first; i < first + count; i++)
		mask &= store_chunk_kept(hold->chunks[i]);
	*classes_p = store_cover(hold->handle, mask);
	if (!*classes_p)
		return err_raise(ERR_REQUIRE,
				 "the chunks are in parts of different "
				 "ranks, or in an engine's pages; use fetch");
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

int store_kv_of_remote_hold(const struct remote *remote, uint64_t ask, uint64_t pool,
			    uint32_t first, uint32_t count, const char *view,
			    struct store_kv **kv_p)
{
	struct store_chunk *const *chunks;
	struct store_class *class;
	uint32_t have;
	int r = remote_hold_chunks(remote, ask, pool, &chunks, &have, &class);

	if (r >= 0 && class->published)
		r = err_raise(ERR_REQUIRE,
			      "pool: the chunks are in an engine's pages; use fetch");
	if (r >= 0)
		r = range_check(first, count, have);
	if (r < 0)
		return err_pass(r);
	return err_pass(kv_make(class, chunks + first, count, view, kv_p));
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
