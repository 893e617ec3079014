/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index: chunks by space and id. Ids are hashes, yet chosen by clients: the bucket is
 * a seeded hash of them. The table has a bucket for each chunk that memory and files can
 * hold, or a million, and never grows, so no look-up pays for growth; engines publish at
 * most as many more.
 *
 * A chunk is in the index from the first part on that a move starts to fill, and shows
 * its ready parts. It lives as long as it is pinned or has a part.
 */
#include <assert.h>
#include <errno.h>
#include <string.h>

#include <xxhash.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/store/events.h"
#include "daemon/store/homes.h"
#include "daemon/store/seal.h"
#include "daemon/store/store_impl.h"

#define BUCKETS_MAX (UINT64_C(1) << 20)
#define PUBLISHED_MAX (UINT64_C(1) << 17)
#define AHEAD 8u
#define LINE 64u

int store_index_new(struct store *store)
{
	const struct config *config = store->kvd->config;
	uint64_t most = store->memory_bytes / CANON_GRAIN, n = 1024;

	if (*config->chunk_dir)
		most += config->chunk_dir_bytes / (SEAL_HEADER_BYTES + CANON_GRAIN);
	while (n < BUCKETS_MAX && n < most)
		n *= 2;
	store->buckets = mem_calloc(n, sizeof(struct store_chunk *));
	if (!store->buckets)
		return err_pass(-ENOMEM);
	store->bucket_mask = n - 1;
	store->published_max = n < PUBLISHED_MAX ? (uint32_t)n : PUBLISHED_MAX;
	return 0;
}

static uint64_t chunk_hash(const struct store_space *space,
			   const uint8_t id[STORE_ID_BYTES])
{
	return XXH3_64bits_withSeed(id, STORE_ID_BYTES, space->store->seed + space->id);
}

static struct store_chunk **chunk_bucket(struct store *store, uint64_t hash)
{
	return &store->buckets[hash & store->bucket_mask];
}

static struct store_chunk *chunk_lookup(const struct store_space *space,
					const uint8_t id[STORE_ID_BYTES], uint64_t hash)
{
	struct store_chunk *chunk = *chunk_bucket(space->store, hash);

	while (chunk &&
	       (chunk->space != space || memcmp(chunk->id, id, STORE_ID_BYTES) != 0))
		chunk = chunk->next;
	return chunk;
}

struct store_chunk *store_chunk_find(const struct store_space *space,
				     const uint8_t id[STORE_ID_BYTES], uint64_t first)
{
	struct store_chunk *chunk = chunk_lookup(space, id, chunk_hash(space, id));

	return chunk && chunk->first == first ? chunk : NULL;
}

struct store_chunk *store_chunk_of(const struct store_handle *handle,
				   const struct store_ids *ids, uint32_t i)
{
	return store_chunk_find(handle->space, ids->bytes + i * STORE_ID_BYTES,
				store_ids_place(ids, i));
}

/* Its visible state may have changed. */
static void chunk_look(struct store_chunk *chunk)
{
	struct store_events *events = chunk->space->tenant->events;
	struct homes *homes = chunk->space->store->homes;
	uint64_t published = chunk->space->published;
	uint8_t now = 0, before = chunk->shown;

	if (!chunk->gone)
		now = (uint8_t)((chunk->ready & ~published ? STORE_IN_MEMORY : 0) |
				(chunk->ready & published ? STORE_IN_PAGES : 0) |
				(chunk->filed ? STORE_IN_FILE : 0));
	if (now == before)
		return;
	chunk->shown = now;
	if (events)
		store_events_add(events, chunk, before);
	if (homes && !now != !before)
		homes_tell(homes, chunk, now != 0);
}

static void part_gone(const struct store_part *part)
{
	struct part_observer *observer = part->chunk->space->store->observer;

	if (observer)
		observer->on_gone(observer, part);
}

/* It cannot be found any more, nor by a later start. */
static void chunk_unlink(struct store_chunk *chunk)
{
	struct store_chunk **at = chunk_bucket(chunk->space->store, chunk->item.key);
	const struct store_part *part;

	if (chunk->gone)
		return;
	chunk->gone = true;
	list_foreach(part, &chunk->parts, link) {
		if (part->memory == PART_READY && !part->pages)
			part_gone(part);
	}
	while (*at != chunk)
		at = &(*at)->next;
	*at = chunk->next;
	chunk_look(chunk);
}

static void chunk_free(struct store_chunk *chunk)
{
	struct store_space *space = chunk->space;

	assert(chunk->item.pins == 0 && list_empty(&chunk->parts));
	chunk_unlink(chunk);
	arena_item_fini(&chunk->item);
	arena_item_fini(&chunk->file_item);
	space->store->chunk_count--;
	if (--space->chunks == 0)
		store_tidy(space->store);
	mem_free(chunk);
}

int store_chunk_get(struct store_space *space, const uint8_t id[STORE_ID_BYTES],
		    uint64_t first, uint32_t tokens, struct store_chunk **chunk_p)
{
	uint64_t hash = chunk_hash(space, id);
	struct store_chunk *chunk = chunk_lookup(space, id, hash);

	if (chunk && (chunk->first != first || chunk->tokens != tokens))
		return err_raise(ERR_EXIST,
				 "this id is stored as chunk %llu of its prompt with %u "
				 "tokens, but given as chunk %llu with %u",
				 (unsigned long long)chunk->first, chunk->tokens,
				 (unsigned long long)first, tokens);
	if (!chunk) {
		struct store_chunk **at = chunk_bucket(space->store, hash);

		chunk = mem_zalloc(sizeof(*chunk));
		if (!chunk)
			return err_pass(-ENOMEM);
		arena_item_init(&chunk->item, hash);
		arena_item_init(&chunk->file_item, hash);
		list_init(&chunk->parts);
		memcpy(chunk->id, id, STORE_ID_BYTES);
		chunk->space = space;
		chunk->first = first;
		chunk->tokens = tokens;
		chunk->next = *at;
		*at = chunk;
		space->chunks++;
		space->store->chunk_count++;
	}
	store_chunk_pin(chunk);
	*chunk_p = chunk;
	return 0;
}

void store_chunk_pin(struct store_chunk *chunk)
{
	chunk->space->pinned += chunk->item.pins == 0;
	arena_pin(&chunk->item);
	arena_pin(&chunk->file_item);
}

static void free_parts(struct store_chunk *chunk)
{
	struct store_part *part;

	list_foreach_safe(part, &chunk->parts, link)
		store_part_free(part);
}

void store_chunk_unpin(struct store_chunk *chunk)
{
	arena_unpin(&chunk->item);
	arena_unpin(&chunk->file_item);
	if (chunk->item.pins)
		return;
	chunk->space->pinned--;
	if (chunk->gone)
		free_parts(chunk);
	if (list_empty(&chunk->parts))
		chunk_free(chunk);
}

/* ---- parts ---- */

struct store_part *store_part_find(const struct store_chunk *chunk,
				   const struct store_class *class)
{
	struct store_part *part;

	list_foreach(part, &chunk->parts, link) {
		if (part->class == class)
			return part;
	}
	return NULL;
}

static int part_make(struct store_chunk *chunk, struct store_class *class,
		     enum part_memory memory, struct store_part **part_p)
{
	struct store_part *part = mem_zalloc(sizeof(*part));

	assert(chunk->item.pins && !chunk->gone);
	if (!part)
		return err_pass(-ENOMEM);
	part->chunk = chunk;
	part->class = class;
	part->memory = memory;
	list_push_back(&chunk->parts, &part->link);
	list_push_back(&class->all, &part->class_link);
	class->parts++;
	*part_p = part;
	return 0;
}

int store_part_outside(struct store_chunk *chunk, struct store_class *class,
		       struct store_part **part_p)
{
	return err_pass(part_make(chunk, class, PART_OUT, part_p));
}

int store_part_in_pages(struct store_chunk *chunk, struct store_class *class,
			struct store_pages *pages, struct store_part **part_p)
{
	int r = part_make(chunk, class, PART_FILLING, part_p);

	if (r >= 0)
		(*part_p)->pages = pages;
	return r < 0 ? err_pass(r) : 0;
}

int store_part_try(struct store_chunk *chunk, struct store_class *class,
		   enum part_memory filling, struct store_part **part_p)
{
	struct store_part *part;
	int r = part_make(chunk, class, filling, &part);

	if (r < 0)
		return err_pass(r);
	r = arena_take_some(chunk->space->tenant->owner, class->canon->slot_bytes,
			    &chunk->item, &part->slot);
	if (r != 0) {
		store_part_free(part);
		return r < 0 ? err_pass(r) : r;
	}
	*part_p = part;
	return 0;
}

/* A slot was freed, perhaps the last of its size. */
static void sizes_look(struct store *store, const struct arena *arena)
{
	if (arena_crowded(arena))
		store_tidy(store);
}

static void part_mask(uint64_t *mask, uint64_t bit, bool is)
{
	*mask = is ? *mask | bit : *mask & ~bit;
}

/* The only place where a part's states and its chunk's masks change. */
static void part_set(struct store_part *part, enum part_memory memory,
		     enum part_file file)
{
	struct store_chunk *chunk = part->chunk;
	uint64_t bit = UINT64_C(1) << part->class->index;

	part->memory = (uint8_t)memory;
	part->file = (uint8_t)file;
	part_mask(&chunk->ready, bit, memory == PART_READY);
	part_mask(&chunk->filed, bit, file != PART_UNFILED);
	part_mask(&chunk->lasts, bit, file == PART_LASTS);
	chunk_look(chunk);
}

void store_part_ready(struct store_part *part)
{
	struct part_observer *observer = part->chunk->space->store->observer;

	assert(part->memory != PART_READY && (part->slot.slab || part->pages));
	if (part->pages) {
		store_pages_ready(part);
	} else {
		part->chunk->space->bytes += part->class->canon->slot_bytes;
		if (observer && !part->chunk->gone)
			observer->on_ready(observer, part);
	}
	part_set(part, PART_READY, part->file);
}

/* No bytes of it are in memory. */
static void part_unready(struct store_part *part)
{
	if (part->memory == PART_READY && !part->pages) {
		part_gone(part);
		part->chunk->space->bytes -= part->class->canon->slot_bytes;
	}
	arena_give(&part->slot);
	sizes_look(part->chunk->space->store, part->chunk->space->store->arena);
	part_set(part, PART_OUT, part->file);
}

void store_part_free(struct store_part *part)
{
	assert(!part->job);
	part_unready(part);
	store_part_unfiled(part);
	store_pages_leave(part);
	list_remove(&part->link);
	list_remove(&part->class_link);
	part->class->parts--;
	mem_free(part);
}

void store_part_drop(struct store_part *part)
{
	struct store_chunk *chunk = part->chunk;

	store_chunk_pin(chunk);
	store_part_free(part);
	store_chunk_unpin(chunk);
}

void store_part_leave(struct store_part *part)
{
	if (part->file != PART_UNFILED)
		part_unready(part);
	else
		store_part_free(part);
}

void store_on_evict(void *arg, struct arena_item *item)
{
	struct store_chunk *chunk = container_of(item, struct store_chunk, item);
	struct store_part *part;

	(void)arg;
	list_foreach_safe(part, &chunk->parts, link) {
		if (!part->pages)
			store_part_leave(part);
	}
	if (list_empty(&chunk->parts))
		chunk_free(chunk);
}

/* ---- in files ---- */

void store_part_filed(struct store_part *part)
{
	if (part->file == PART_UNFILED)
		part_set(part, part->memory, PART_FILED);
}

void store_part_sure(struct store_part *part, bool sure)
{
	if (part->file == PART_FILED || part->file == PART_SURE)
		part_set(part, part->memory, sure ? PART_SURE : PART_FILED);
}

void store_part_lasts(struct store_part *part)
{
	assert(part->file >= PART_SURE);
	part_set(part, part->memory, PART_LASTS);
}

void store_part_unfiled(struct store_part *part)
{
	arena_give(&part->place);
	if (part->chunk->space->store->files)
		sizes_look(part->chunk->space->store,
			   part->chunk->space->store->file_arena);
	part_set(part, part->memory, PART_UNFILED);
}

void store_on_file_evict(void *arg, struct arena_item *item)
{
	struct store_chunk *chunk = container_of(item, struct store_chunk, file_item);
	struct store_part *part;

	(void)arg;
	list_foreach_safe(part, &chunk->parts, link) {
		store_part_unfiled(part);
		if (!store_part_placed(part))
			store_part_free(part);
	}
	if (list_empty(&chunk->parts))
		chunk_free(chunk);
}

int store_part_load(struct store_part *part)
{
	struct store_chunk *chunk = part->chunk;
	int r;

	assert(chunk->item.pins && part->file != PART_UNFILED);
	if (part->memory != PART_OUT) /* in memory, or being loaded */
		return 0;
	r = arena_take(chunk->space->tenant->owner, part->class->canon->slot_bytes,
		       &chunk->item, &part->slot);
	if (r < 0)
		return err_pass(r);
	part_set(part, PART_FILLING, part->file);
	r = chunk->space->store->file_ops->load(chunk->space->store->files, part);
	if (r < 0) {
		part_set(part, PART_OUT, part->file);
		arena_give(&part->slot);
	}
	return r < 0 ? err_pass(r) : 0;
}

void store_part_loaded(struct store_part *part, bool whole)
{
	struct store *store = part->chunk->space->store;

	if (whole)
		store_part_ready(part);
	else
		store_part_leave(part);
	store_wake(store);
}

bool store_chunk_load(struct store_chunk *chunk, uint64_t classes)
{
	struct store_part *part;

	list_foreach(part, &chunk->parts, link) {
		if (!(classes >> part->class->index & 1) || part->memory == PART_READY)
			continue;
		if (store_part_load(part) < 0) {
			err_clear(); /* loads in progress serve the next request */
			return false;
		}
	}
	return true;
}

static void chunk_touch(struct store_chunk *chunk)
{
	arena_touch(&chunk->item);
	if (chunk->space->store->files)
		arena_touch(&chunk->file_item);
}

static bool chunk_is_for_files(const struct store_chunk *chunk)
{
	return chunk->space->store->files && (store_chunk_kept(chunk) & ~chunk->filed);
}

static void chunk_file(struct store_chunk *chunk)
{
	const struct store *store = chunk->space->store;
	struct store_part *part;

	list_foreach(part, &chunk->parts, link) {
		if (part->memory == PART_READY && part->file == PART_UNFILED &&
		    !part->pages)
			store->file_ops->write(store->files, part, false);
	}
}

void store_chunk_touch(struct store_chunk *chunk)
{
	chunk_touch(chunk);
	if (chunk_is_for_files(chunk))
		chunk_file(chunk);
}

/* ---- look-ups ---- */

/* A million chunks do not fit in the cache: the buckets and chunks of the next ones are
 * prefetched. */
struct ahead {
	const struct store_space *space;
	const struct store_ids *ids;
	uint64_t hashes[2 * AHEAD]; /* of the next ids, in turn */
};

/* Cache lines that a look-up touches. */
static void chunk_fetch(const struct store_chunk *chunk, bool files)
{
	if (!chunk)
		return;
	__builtin_prefetch(&chunk->item.hits);
	__builtin_prefetch((const char *)&chunk->item.hits + LINE);
	__builtin_prefetch(&chunk->tokens);
	if (files)
		__builtin_prefetch(&chunk->file_item.hits);
}

static void ahead_at(struct ahead *ahead, uint32_t i)
{
	const struct store_space *space = ahead->space;
	uint64_t hash;

	if (i + 2 * AHEAD - 1 < ahead->ids->count) {
		uint32_t to = i + 2 * AHEAD - 1;

		hash = chunk_hash(space, ahead->ids->bytes + to * STORE_ID_BYTES);
		ahead->hashes[to % (2 * AHEAD)] = hash;
		__builtin_prefetch(chunk_bucket(space->store, hash));
	}
	if (i + AHEAD < ahead->ids->count) {
		hash = ahead->hashes[(i + AHEAD) % (2 * AHEAD)];
		chunk_fetch(*chunk_bucket(space->store, hash), space->store->files);
	}
}

static void ahead_begin(struct ahead *ahead, const struct store_space *space,
			const struct store_ids *ids)
{
	*ahead = (struct ahead){.space = space, .ids = ids};
	for (uint32_t i = 0; i < 2 * AHEAD - 1 && i < ids->count; i++) {
		uint64_t hash = chunk_hash(space, ids->bytes + i * STORE_ID_BYTES);

		ahead->hashes[i % (2 * AHEAD)] = hash;
		__builtin_prefetch(chunk_bucket(space->store, hash));
	}
}

struct store_finding {
	struct store_handle *handle;
	const struct store_ids *ids;
	struct store_found found;
	unsigned int covers_left;
	uint32_t unfiled; /* those before it may be worth a file */
};

static struct store_chunk *chunk_for(struct store_finding *finding, struct ahead *ahead,
				     uint32_t i)
{
	struct store_handle *handle = finding->handle;
	const struct store_space *space = handle->space;
	const uint8_t *id = ahead->ids->bytes + i * STORE_ID_BYTES;
	struct store_chunk *chunk;

	ahead_at(ahead, i);
	chunk = chunk_lookup(space, id, ahead->hashes[i % (2 * AHEAD)]);
	if (!chunk || chunk->first != store_ids_place(ahead->ids, i))
		return NULL;
	return store_cover_some(handle, store_chunk_ready(chunk) | chunk->filed,
				&finding->covers_left)
		       ? chunk
		       : NULL;
}

/* False: none serves, or none follows it. */
static bool find_one(struct store_finding *finding, struct ahead *ahead)
{
	const struct store_space *space = finding->handle->space;
	struct store_found *found = &finding->found;
	struct store_chunk *chunk = chunk_for(finding, ahead, found->chunks);

	if (!chunk)
		return false;
	chunk_touch(chunk);
	if (chunk_is_for_files(chunk))
		finding->unfiled = found->chunks + 1;
	found->chunks++;
	found->tokens += chunk->tokens;
	return chunk->tokens == space->tokens;
}

/* The first one written is evicted first. */
static void find_file(struct store_finding *finding)
{
	uint32_t i = --finding->unfiled;
	struct store_chunk *chunk = store_chunk_of(finding->handle, finding->ids, i);

	if (chunk && chunk_is_for_files(chunk))
		chunk_file(chunk);
}

void store_find(struct store_handle *handle, const struct store_ids *ids,
		struct store_found *found_p)
{
	struct store *store = handle->space->store;
	struct store_finding finding = {
		.handle = handle, .ids = ids, .covers_left = STORE_COVERS_NEW};
	struct ahead ahead;

	ahead_begin(&ahead, handle->space, ids);
	/* at most STORE_IDS_MAX */
	while (finding.found.chunks < ids->count && find_one(&finding, &ahead))
		;
	store->figures.found += finding.found.chunks;
	store->figures.missed += ids->count - finding.found.chunks;
	while (finding.unfiled > 0) /* at most STORE_IDS_MAX: those found */
		find_file(&finding);
	*found_p = finding.found;
}

uint32_t store_drop(struct store_handle *handle, const struct store_ids *ids)
{
	const struct store *store = handle->space->store;
	uint32_t dropped = 0;

	for (uint32_t i = 0; i < ids->count; i++) {
		struct store_chunk *chunk = store_chunk_of(handle, ids, i);

		if (!chunk)
			continue;
		dropped++;
		store_chunk_pin(chunk);
		chunk_unlink(chunk);
		if (chunk->filed) /* hide it from later starts */
			store->file_ops->erase(store->files, chunk);
		store_pages_drop(chunk); /* nor its engine, to withdraw it */
		store_chunk_unpin(chunk);
	}
	return dropped;
}

/* Frees everything, even pinned: there are no users left. */
void store_index_free(struct store *store)
{
	for (uint64_t i = 0; store->buckets && i <= store->bucket_mask; i++) {
		while (store->buckets[i]) {
			struct store_chunk *chunk = store->buckets[i];

			free_parts(chunk);
			chunk_free(chunk);
		}
	}
	assert(store->chunk_count == 0);
	mem_free(store->buckets);
}
