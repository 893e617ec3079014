/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Entries lie in one dense array in the order of insertion; an index of 32-bit numbers,
 * open addressing with linear probing, leads to them. Removal leaves a hole in the array
 * and closes the gap in the index at once (backward shift), so look-ups never wade
 * through tombstones, and a walk over the array is not disturbed. When the array is full
 * it is compacted if at least half of it are holes, else doubled: so creating and
 * removing rooms does not grow memory.
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

/* The index slot of the probe's entry, or of the gap where its search ended. */
static size_t find_slot(const struct idmap *map, const struct probe *probe)
{
	size_t mask = map->index_cap - 1, slot = probe->hash & mask;

	while (map->index[slot] && !entry_is(&map->entries[map->index[slot] - 1], probe))
		slot = (slot + 1) & mask;
	return slot;
}

static struct idmap_entry *idmap_find(const struct idmap *map, const struct probe *probe)
{
	uint32_t n = map->index_cap ? map->index[find_slot(map, probe)] : 0;

	return n ? &map->entries[n - 1] : NULL;
}

static void index_add(struct idmap *map, size_t number)
{
	size_t mask = map->index_cap - 1, slot = map->entries[number].hash & mask;

	while (map->index[slot])
		slot = (slot + 1) & mask;
	map->index[slot] = (uint32_t)number + 1;
}

static void compact(struct idmap *map)
{
	size_t to = 0;

	for (size_t from = 0; from < map->used; from++) {
		if (map->entries[from].value)
			map->entries[to++] = map->entries[from];
	}
	map->used = to;
	memset(map->index, 0, map->index_cap * sizeof(map->index[0]));
	for (size_t i = 0; i < map->used; i++)
		index_add(map, i);
}

/* Room for one more entry. */
static int idmap_reserve(struct idmap *map)
{
	size_t cap = map->cap ? 2 * map->cap : CAP_MIN;
	cleanup_free uint32_t *index = NULL;
	struct idmap_entry *entries;

	if (map->used < map->cap)
		return 0;
	if (map->cap && map->count <= map->cap / 2) {
		compact(map);
		return 0;
	}
	if (cap > CAP_MAX)
		return err_raise(ERR_LIMIT, "map: over %u entries", CAP_MAX);
	index = mem_calloc(2 * cap, sizeof(*index));
	if (!index)
		return err_pass(-ENOMEM);
	entries = mem_regrow(map->entries, cap, sizeof(*entries));
	if (!entries)
		return err_pass(-ENOMEM);
	mem_free(map->index);
	map->entries = entries;
	map->cap = cap;
	map->index = mem_steal(index);
	map->index_cap = 2 * cap;
	compact(map);
	return 0;
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
	struct idmap_entry *e;
	size_t slot;
	void *value;

	if (!map->index_cap)
		return NULL;
	slot = find_slot(map, probe);
	if (!map->index[slot])
		return NULL;
	e = &map->entries[map->index[slot] - 1];
	value = e->value;
	index_close(map, slot);
	mem_free(e->bytes);
	*e = (struct idmap_entry){.key = e->key}; /* for idmap_next_above() */
	map->count--;
	while (map->used && !map->entries[map->used - 1].value)
		map->used--;
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
	mem_free(map->index);
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
