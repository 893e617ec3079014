/* SPDX-License-Identifier: Apache-2.0 */
/*
 * idmap: pointers by 64-bit number; strmap: pointers by string or byte string (the key is
 * copied). Values are never NULL and remain owned by the caller.
 *
 * A walk follows the order of insertion, so a simulation repeats, and survives the
 * removal of any entry. It must not put: that may move entries.
 */
#ifndef KVD_BASE_IDMAP_H
#define KVD_BASE_IDMAP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct idmap_entry {
	uint64_t key; /* strmap: hash of the bytes */
	void *value;  /* NULL = a hole */
	char *bytes;  /* strmap: the key's copy, NUL added */
	uint32_t len;
	uint32_t hash; /* places it in the index */
};

struct idmap {
	struct idmap_entry *entries; /* in order of insertion, with holes */
	size_t used, cap, count;
	uint32_t *index;  /* open addressing: 0 or entry number + 1 */
	size_t index_cap; /* a power of two */
	uint32_t *old;	  /* the smaller index before it: still has some entries alone */
	size_t old_cap, old_at;	   /* its slots below old_at are in `index`, too */
	size_t pack_to, pack_from; /* all between them are holes */
};

struct idmap_cursor {
	size_t pos;
	uint64_t key;	   /* idmap */
	const char *bytes; /* strmap */
	size_t len;
	void *value;
};

void idmap_init(struct idmap *map);
void idmap_fini(struct idmap *map); /* a zeroed map is allowed */
/* ERR_NOMEM; ERR_EXIST when the key is present (the map is unchanged). */
int idmap_put(struct idmap *map, uint64_t key, void *value);
void *idmap_get(const struct idmap *map, uint64_t key); /* NULL: not there */
void *idmap_remove(struct idmap *map, uint64_t key);	/* the value or NULL */
/* Replaces the value of a present key, without allocating; returns the old one. NULL: the
 * key is absent, and nothing is put. */
void *idmap_swap(struct idmap *map, uint64_t key, void *value);
static inline size_t idmap_count(const struct idmap *map)
{
	return map->count;
}
/* Start with a zeroed cursor. */
bool idmap_next(const struct idmap *map, struct idmap_cursor *cursor);
/* The first behind `key` (0: of all) in a map whose keys were put in rising order, for
 * walks over many loop iterations, while the map may change. */
bool idmap_next_above(const struct idmap *map, uint64_t key, struct idmap_cursor *cursor);
#define idmap_foreach(map, cursor) \
	for ((cursor) = (struct idmap_cursor){0}; idmap_next((map), &(cursor));)

struct strmap {
	struct idmap map;
};

#define STRMAP_KEY_MAX 65535u

void strmap_init(struct strmap *map);
void strmap_fini(struct strmap *map);
/* As idmap_put; ERR_TOOBIG over STRMAP_KEY_MAX bytes. */
int strmap_put(struct strmap *map, const char *key, void *value);
void *strmap_get(const struct strmap *map, const char *key);
void *strmap_remove(struct strmap *map, const char *key);
/* The same with keys of any bytes: 16-byte ids, (id, number) pairs. */
int strmap_put_bytes(struct strmap *map, const void *key, size_t len, void *value);
void *strmap_get_bytes(const struct strmap *map, const void *key, size_t len);
void *strmap_remove_bytes(struct strmap *map, const void *key, size_t len);
static inline size_t strmap_count(const struct strmap *map)
{
	return map->map.count;
}
#define strmap_foreach(strmap, cursor) idmap_foreach(&(strmap)->map, cursor)

/* The seeded hash of these maps, for tables with entries embedded in their objects. */
uint64_t idmap_hash(const void *bytes, size_t len);

#endif
