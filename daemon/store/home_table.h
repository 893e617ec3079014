/* SPDX-License-Identifier: Apache-2.0 */
/*
 * home_table: the holders of chunks, by key (home_key.h). Soft state of fixed size: an
 * entry without space is refused; a dropped holder's entries are invalid at once, and
 * freed in slices. 16 bytes an entry, a quarter of the table stays free. Pure.
 */
#ifndef KVD_STORE_HOME_TABLE_H
#define KVD_STORE_HOME_TABLE_H

#include <stdbool.h>
#include <stdint.h>

#include "daemon/store/home_key.h"

struct home_table;

#define HOME_HOLDERS_MAX 8191u
#define HOME_SAME_MAX 64u /* holders of one chunk that are kept */

/* Pages are allocated as they are touched. `seed` places the entries, so that peers
 * cannot choose colliding keys. */
int home_table_new(uint64_t bytes, uint64_t seed, struct home_table **table_p);
void home_table_free(struct home_table *table); /* NULL is fine */

/* A holder's number, from 1 on; 0: all are in use. */
unsigned int home_holder_new(struct home_table *table, void *owner);
/* Its entries are invalid. Its place is reused, with another number, once they are swept
 * out. */
void home_holder_drop(struct home_table *table, unsigned int holder);
/* Entries of a holder, or of a dropped one that are not swept out yet. */
uint64_t home_holder_count(const struct home_table *table, unsigned int holder);

enum home_put {
	HOME_PUT,     /* it is stored, perhaps from before */
	HOME_FULL,    /* the holder has its share, or the table is full */
	HOME_CROWDED, /* it has HOME_SAME_MAX other holders */
};
enum home_put home_table_put(struct home_table *table, unsigned int holder,
			     const struct home_key *key);
/* False: not found. */
bool home_table_remove(struct home_table *table, unsigned int holder,
		       const struct home_key *key);
/* Owners of the key's holders, at most so many, chosen by `random`. */
unsigned int home_table_find(const struct home_table *table, const struct home_key *key,
			     uint64_t random, void **owners, unsigned int most);
/* Frees a slice of dropped holders' entries. True: there is more. */
bool home_table_sweep(struct home_table *table);

struct home_figures {
	uint64_t bytes;	     /* of memory, touched or not */
	uint64_t most, used; /* entries */
	unsigned int holders;
	uint64_t steps; /* slots scanned: the cost of its notes and its sweep */
};
void home_table_figures(const struct home_table *table, struct home_figures *figures_p);

#endif
