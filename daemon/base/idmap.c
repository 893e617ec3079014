/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entries lie in one dense array in the order of insertion; an index of 32-bit numbers,
 * open addressing with linear probing, leads to them. Removal leaves a hole in the array
 * and closes the gap in the index at once (backward shift), so look-ups never wade
 * through tombstones, and a walk over the array is not disturbed.
 *
 * No put takes long, since 10^5 entries cannot be moved in a turn of the loop. The array
 * grows without a copy: from some size on it has a map of its own. When half of it are
 * holes, puts compact it, some entries each: so creating and removing rooms does not grow
 * memory. A larger index takes the entries of the old one over likewise. Until then the
 * old one is searched, too; there, a removed entry leaves REMOVED behind.
 *
 * uthash was the other choice: a handle and six pointers inside each object, also walks
 * in order, but one object can then be in a map once per handle, and its out-of-memory
 * path needs a macro in every including file. Keys are chosen by clients, so the hash is
 * seeded per process.
 */
#include "daemon/base/idmap.h"

#include <assert.h>
#include <errno.h>
#include <string.h>
#include <sys/random.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define CAP_MIN 16u
#define CAP_MAX (UINT32_C(1) << 30)
#define LONG_BYTES (64u << 10)
#define REMOVED UINT32_MAX
#define SMALL_INDEX 1024u /* is replaced at once: 8 us; several maps grow in one turn */
#define SMALL_BYTES (16u << 10) /* of entries: copied when they grow, larger ones not */
#define STEPS 8u /* of either work in a put: it ends long before the next starts */

static uint64_t hash_seed(void)
{
	static uint64_t seed;
	uint64_t fresh, none = 0;

	if (__atomic_load_n(&seed, __ATOMIC_RELAXED) == 0) {
		if (getrandom(&fresh, sizeof(fresh), GRND_NONBLOCK) != sizeof(fresh))
			fresh = (uint64_t)(uintptr_t)&seed; /* at least ASLR */
		fresh |= 1;
		__atomic_compare_exchange_n(&seed, &none, fresh, false, __ATOMIC_RELAXED,
					    __ATOMIC_RELAXED);
	}
	return __atomic_load_n(&seed, __ATOMIC_RELAXED);
}

uint64_t idmap_hash(const void *bytes, size_t len)
{
	return XXH3_64bits_withSeed(bytes, len, hash_seed());
}

static uint32_t hash_of(uint64_t key)
{
	return (uint32_t)idmap_hash(&key, sizeof(key));
}

struct probe {
	uint64_t key;
	const void *bytes; /* NULL in an idmap */
	size_t len;
	uint32_t hash;
};

static bool entry_is(const struct idmap_entry *e, const struct probe *probe)
{
	if (e->key != probe->key || e->len != probe->len)
		return false;
	return !probe->bytes || memcmp(e->bytes, probe->bytes, probe->len) == 0;
}

/* The slot of the probe's entry, or of the gap where its search ended. */
static size_t find_slot(const struct idmap *map, const uint32_t *index, size_t cap,
			const struct probe *probe)
{
	size_t mask = cap - 1, slot = probe->hash & mask;

	while (index[slot] && (index[slot] == REMOVED ||
			       !entry_is(&map->entries[index[slot] - 1], probe)))
		slot = (slot + 1) & mask;
	return slot;
}

static struct idmap_entry *idmap_find(const struct idmap *map, const struct probe *probe)
{
	uint32_t n = 0;

	if (map->index_cap)
		n = map->index[find_slot(map, map->index, map->index_cap, probe)];
	if (!n && map->old)
		n = map->old[find_slot(map, map->old, map->old_cap, probe)];
	return n ? &map->entries[n - 1] : NULL;
}

static void index_add(struct idmap *map, size_t number)
{
	size_t mask = map->index_cap - 1, slot = map->entries[number].hash & mask;

	while (map->index[slot])
		slot = (slot + 1) & mask;
	map->index[slot] = (uint32_t)number + 1;
}

/* ---- growth and compaction, some steps in each put ---- */

/* A large index is mapped: to clear its pages at once takes longer than a turn. */
static uint32_t *index_new(size_t cap)
{
	const size_t bytes = cap * sizeof(uint32_t);

	return bytes < LONG_BYTES ? mem_zalloc(bytes) : mem_map(bytes);
}

static void index_free(uint32_t *index, size_t cap)
{
	const size_t bytes = cap * sizeof(*index);

	if (bytes < LONG_BYTES)
		mem_free(index);
	else
		mem_unmap(index, bytes);
}

static void old_step(struct idmap *map)
{
	for (unsigned int i = 0; i < STEPS && map->old_at < map->old_cap; i++) {
		uint32_t n = map->old[map->old_at++];

		if (n && n != REMOVED)
			index_add(map, n - 1);
	}
	if (map->old && map->old_at == map->old_cap) {
		index_free(mem_steal(map->old), map->old_cap);
		map->old_cap = 0;
	}
}

static void renumber(uint32_t *index, size_t cap, uint32_t hash, size_t from, size_t to)
{
	size_t mask = cap - 1, slot = hash & mask;

	while (index && index[slot] && index[slot] != from + 1)
		slot = (slot + 1) & mask;
	if (index && index[slot])
		index[slot] = (uint32_t)to + 1;
}

/* A hole keeps its key, for idmap_next_above(). */
static void entry_clear(struct idmap_entry *e)
{
	*e = (struct idmap_entry){.key = e->key};
}

static void pack_step(struct idmap *map)
{
	if (map->pack_from == 0 && map->used - map->count <= map->used / 2)
		return;
	for (unsigned int i = 0; i < STEPS && map->pack_from < map->used; i++) {
		size_t from = map->pack_from++, to = map->pack_to;
		struct idmap_entry *e = &map->entries[from];

		if (!e->value)
			continue;
		map->pack_to++;
		if (from == to)
			continue;
		map->entries[to] = *e;
		renumber(map->index, map->index_cap, e->hash, from, to);
		renumber(map->old, map->old_cap, e->hash, from, to);
		entry_clear(e);
	}
	if (map->pack_from == map->used) {
		map->used = map->pack_to;
		map->pack_to = map->pack_from = 0;
	}
}

static int index_grow(struct idmap *map)
{
	size_t cap = map->index_cap ? 2 * map->index_cap : 2 * CAP_MIN;
	uint32_t *index = index_new(cap);

	if (!index)
		return err_pass(-ENOMEM);
	assert(!map->old);
	map->old = map->index;
	map->old_cap = map->index_cap;
	map->old_at = 0;
	map->index = index;
	map->index_cap = cap;
	while (map->old && map->old_cap <= SMALL_INDEX)
		old_step(map);
	return 0;
}

static int entries_grow(struct idmap *map)
{
	size_t bytes = map->cap * sizeof(*map->entries), cap = CAP_MIN;
	struct idmap_entry *entries;

	if (bytes > SMALL_BYTES && bytes < LONG_BYTES)
		bytes = LONG_BYTES;
	if (bytes) /* rounded up: enough for a map */
		cap = (mem_grown(bytes) + sizeof(*entries) - 1) / sizeof(*entries);
	if (cap > CAP_MAX)
		return err_raise(ERR_LIMIT, "map: over %u entries", CAP_MAX);
	entries = mem_regrow(map->entries, cap, sizeof(*entries));
	if (!entries)
		return err_pass(-ENOMEM);
	map->entries = entries;
	map->cap = cap;
	return 0;
}

/* Room for one more entry. */
static int idmap_reserve(struct idmap *map)
{
	int r = 0;

	old_step(map);
	pack_step(map);
	if (map->used == map->cap)
		r = entries_grow(map);
	if (r == 0 && 2 * map->count >= map->index_cap)
		r = index_grow(map);
	if (r < 0 && map->used == 0)
		idmap_fini(map); /* no half of one stays */
	return err_pass(r);
}

static int idmap_do_put(struct idmap *map, const struct probe *probe, void *value)
{
	char *bytes = NULL;
	int r;

	assert(value);
	if (idmap_find(map, probe))
		return err_raise(ERR_EXIST, "map: duplicate key");
	r = idmap_reserve(map);
	if (r < 0)
		return err_pass(r);
	if (probe->bytes) {
		bytes = mem_zalloc(probe->len + 1);
		if (!bytes)
			return err_pass(-ENOMEM);
		memcpy(bytes, probe->bytes, probe->len);
	}
	map->entries[map->used] = (struct idmap_entry){
		.key = probe->key,
		.value = value,
		.bytes = bytes,
		.len = (uint32_t)probe->len,
		.hash = probe->hash,
	};
	index_add(map, map->used);
	map->used++;
	map->count++;
	return 0;
}

/* Close the gap: pull back each later entry of the cluster that may move. */
static void index_close(struct idmap *map, size_t gap)
{
	size_t mask = map->index_cap - 1;

	for (size_t slot = (gap + 1) & mask; map->index[slot]; slot = (slot + 1) & mask) {
		size_t home = map->entries[map->index[slot] - 1].hash & mask;

		if (((slot - home) & mask) >= ((slot - gap) & mask)) {
			map->index[gap] = map->index[slot];
			gap = slot;
		}
	}
	map->index[gap] = 0;
}

static void *idmap_take(struct idmap *map, const struct probe *probe)
{
	struct idmap_entry *e = idmap_find(map, probe);
	size_t slot;
	void *value;

	if (!e)
		return NULL;
	if (map->old) {
		slot = find_slot(map, map->old, map->old_cap, probe);
		if (map->old[slot])
			map->old[slot] = REMOVED;
	}
	slot = find_slot(map, map->index, map->index_cap, probe);
	if (map->index[slot])
		index_close(map, slot);
	value = e->value;
	mem_free(e->bytes);
	entry_clear(e);
	map->count--;
	while (map->used && !map->entries[map->used - 1].value)
		map->used--;
	if (map->pack_from > map->used) /* nothing is left to compact */
		map->pack_to = map->pack_from = 0;
	return value;
}

void idmap_init(struct idmap *map)
{
	*map = (struct idmap){0};
}

void idmap_fini(struct idmap *map)
{
	for (size_t i = 0; i < map->used; i++)
		mem_free(map->entries[i].bytes);
	mem_free(map->entries);
	index_free(map->index, map->index_cap);
	index_free(map->old, map->old_cap);
	idmap_init(map);
}

bool idmap_next(const struct idmap *map, struct idmap_cursor *cursor)
{
	while (cursor->pos < map->used) {
		const struct idmap_entry *e = &map->entries[cursor->pos++];

		if (!e->value)
			continue;
		cursor->key = e->key;
		cursor->bytes = e->bytes;
		cursor->len = e->len;
		cursor->value = e->value;
		return true;
	}
	return false;
}

bool idmap_next_above(const struct idmap *map, uint64_t key, struct idmap_cursor *cursor)
{
	size_t low = 0, high = map->used;

	if (map->pack_to > 0 && map->entries[map->pack_to - 1].key > key)
		high = map->pack_to;
	else
		low = map->pack_from;
	while (low < high) {
		size_t middle = low + (high - low) / 2;

		if (map->entries[middle].key > key)
			high = middle;
		else
			low = middle + 1;
	}
	*cursor = (struct idmap_cursor){.pos = low};
	return idmap_next(map, cursor);
}

int idmap_put(struct idmap *map, uint64_t key, void *value)
{
	return idmap_do_put(map, &(struct probe){.key = key, .hash = hash_of(key)},
			    value);
}

void *idmap_get(const struct idmap *map, uint64_t key)
{
	struct idmap_entry *e =
		idmap_find(map, &(struct probe){.key = key, .hash = hash_of(key)});

	return e ? e->value : NULL;
}

void *idmap_remove(struct idmap *map, uint64_t key)
{
	return idmap_take(map, &(struct probe){.key = key, .hash = hash_of(key)});
}

void *idmap_swap(struct idmap *map, uint64_t key, void *value)
{
	struct idmap_entry *e =
		idmap_find(map, &(struct probe){.key = key, .hash = hash_of(key)});
	void *old = e ? e->value : NULL;

	assert(value);
	if (e)
		e->value = value;
	return old;
}

static struct probe probe_bytes(const void *key, size_t len)
{
	uint64_t hash = idmap_hash(key, len);

	return (struct probe){
		.key = hash, .bytes = key, .len = len, .hash = (uint32_t)hash};
}

void strmap_init(struct strmap *map)
{
	idmap_init(&map->map);
}

void strmap_fini(struct strmap *map)
{
	idmap_fini(&map->map);
}

int strmap_put_bytes(struct strmap *map, const void *key, size_t len, void *value)
{
	struct probe probe;

	assert(key);
	if (len > STRMAP_KEY_MAX)
		return err_raise(ERR_TOOBIG, "map: key of %zu bytes (limit %u)", len,
				 STRMAP_KEY_MAX);
	probe = probe_bytes(key, len);
	return idmap_do_put(&map->map, &probe, value);
}

void *strmap_get_bytes(const struct strmap *map, const void *key, size_t len)
{
	struct probe probe = probe_bytes(key, len);
	struct idmap_entry *e = idmap_find(&map->map, &probe);

	return e ? e->value : NULL;
}

void *strmap_remove_bytes(struct strmap *map, const void *key, size_t len)
{
	struct probe probe = probe_bytes(key, len);

	return idmap_take(&map->map, &probe);
}

int strmap_put(struct strmap *map, const char *key, void *value)
{
	return strmap_put_bytes(map, key, strlen(key), value);
}

void *strmap_get(const struct strmap *map, const char *key)
{
	return strmap_get_bytes(map, key, strlen(key));
}

void *strmap_remove(struct strmap *map, const char *key)
{
	return strmap_remove_bytes(map, key, strlen(key));
}
