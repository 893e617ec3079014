/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Open addressing with linear probing: an entry has no pointers, a look-up costs one or
 * two cache lines, and a removal leaves no mark, because the entries after it are moved
 * up.
 *
 * A common prompt has many holders. Their entries are adjacent, so at most HOME_SAME_MAX
 * of a chunk are kept, to bound the probe length of others; a query gets a few at random
 * anyway. The whole key determines the place, under the table's seed, because the sender
 * of a note chooses both of its halves.
 *
 * A holder that disconnects may have a million entries. From then on look-ups skip them,
 * and the sweep frees SLICE slots a call until the holder's count is zero. An entry that
 * a removal moves behind the sweep is freed in its next round.
 *
 * The last eighth of the table is for holders of few chunks, and no holder has more than
 * half.
 */
#include "daemon/store/home_table.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/base/share.h"

#define SLICE 512u /* slots */
#define SLOTS_MIN 1024u

struct home_entry {
	uint64_t id;
	uint32_t space_low;
	uint16_t space_high;
	uint16_t holder; /* 0: the slot is free */
};

struct home_holder {
	void *owner;
	uint64_t count;
	uint32_t turn; /* rises with each owner */
	bool live;
};

/* A holder's number: its place, with its use count above it. */
#define PLACE_BITS 13u
#define PLACE_MASK ((1u << PLACE_BITS) - 1)
_Static_assert(HOME_HOLDERS_MAX == PLACE_MASK, "places fit");

struct home_table {
	struct home_entry *entries;
	uint64_t slots, most, used, bytes, seed;
	uint64_t steps;		 /* slots scanned by notes and sweeps */
	uint64_t dead, sweep_at; /* entries of dropped holders */
	unsigned int holders, next;
	struct home_holder holder[HOME_HOLDERS_MAX + 1]; /* 0 is none's */
};

int home_table_new(uint64_t bytes, uint64_t seed, struct home_table **table_p)
{
	struct home_table *table = mem_map(sizeof(*table));

	*table_p = NULL;
	if (!table)
		return err_pass(-ENOMEM);
	table->slots = bytes / sizeof(struct home_entry);
	if (table->slots < SLOTS_MIN)
		table->slots = SLOTS_MIN;
	table->bytes = table->slots * sizeof(struct home_entry);
	table->most = table->slots - table->slots / 4;
	table->seed = seed;
	table->entries = mem_map(table->bytes);
	if (!table->entries) {
		home_table_free(table);
		return err_pass(-ENOMEM);
	}
	*table_p = table;
	return 0;
}

void home_table_free(struct home_table *table)
{
	if (!table)
		return;
	mem_unmap(table->entries, table->bytes);
	mem_unmap(table, sizeof(*table));
}

/* ---- holders ---- */

unsigned int home_holder_new(struct home_table *table, void *owner)
{
	for (unsigned int i = 0; i < HOME_HOLDERS_MAX; i++) {
		unsigned int n = 1 + (table->next + i) % HOME_HOLDERS_MAX;
		struct home_holder *holder = &table->holder[n];

		if (holder->live || holder->count)
			continue;
		holder->owner = owner;
		holder->live = true;
		holder->turn = (holder->turn + 1) & (UINT32_MAX >> PLACE_BITS);
		table->next = n; /* the search continues after it the next time */
		table->holders++;
		return holder->turn << PLACE_BITS | n;
	}
	return 0;
}

static struct home_holder *holder_of(const struct home_table *table, unsigned int holder)
{
	const struct home_holder *h = &table->holder[holder & PLACE_MASK];

	return h->turn == holder >> PLACE_BITS ? (struct home_holder *)h : NULL;
}

void home_holder_drop(struct home_table *table, unsigned int holder)
{
	struct home_holder *h = holder_of(table, holder);

	assert(h && h->live);
	h->live = false;
	h->owner = NULL;
	table->holders--;
	table->dead += h->count;
}

uint64_t home_holder_count(const struct home_table *table, unsigned int holder)
{
	const struct home_holder *h = holder_of(table, holder);

	return h ? h->count : 0;
}

/* ---- entries ---- */

static uint64_t table_slot_of(const struct home_table *table, const struct home_key *key)
{
	const uint64_t words[] = {key->id, key->space};
	uint64_t hash = XXH3_64bits_withSeed(words, sizeof(words), table->seed);

	return (uint64_t)((unsigned __int128)hash * table->slots >> 64);
}

static uint64_t slot_next(const struct home_table *table, uint64_t at)
{
	return at + 1 == table->slots ? 0 : at + 1;
}

static uint64_t slot_distance(const struct home_table *table, uint64_t from, uint64_t to)
{
	return to >= from ? to - from : to + table->slots - from;
}

static bool is_key(const struct home_entry *entry, const struct home_key *key)
{
	return entry->id == key->id && entry->space_low == (uint32_t)key->space &&
	       entry->space_high == (uint16_t)(key->space >> 32);
}

enum home_put home_table_put(struct home_table *table, unsigned int holder,
			     const struct home_key *key)
{
	struct home_holder *h = holder_of(table, holder);
	uint16_t place = (uint16_t)(holder & PLACE_MASK);
	uint64_t at = table_slot_of(table, key);
	struct home_entry *entry;
	unsigned int same = 0;

	assert(h && h->live);
	for (;; at = slot_next(table, at)) {
		entry = &table->entries[at];
		table->steps++;
		if (!entry->holder)
			break;
		if (!is_key(entry, key))
			continue;
		if (entry->holder == place)
			return HOME_PUT;
		same += table->holder[entry->holder].live;
		if (same == HOME_SAME_MAX)
			return HOME_CROWDED;
	}
	if (h->count >= table->most / 2 ||
	    !share_allows(table->most, table->used, h->count))
		return HOME_FULL;
	*entry = (struct home_entry){.id = key->id,
				     .space_low = (uint32_t)key->space,
				     .space_high = (uint16_t)(key->space >> 32),
				     .holder = place};
	h->count++;
	table->used++;
	return HOME_PUT;
}

/* Moves up the entries after it, each at most to its own place. */
static void slot_free(struct home_table *table, uint64_t hole)
{
	struct home_holder *h = &table->holder[table->entries[hole].holder];
	uint64_t at = hole;

	h->count--;
	table->used--;
	table->dead -= !h->live;
	for (;;) {
		const struct home_entry *entry;
		struct home_key key;

		at = slot_next(table, at);
		entry = &table->entries[at];
		table->steps++;
		if (!entry->holder)
			break;
		key = (struct home_key){.id = entry->id,
					.space = (uint64_t)entry->space_high << 32 |
						 entry->space_low};
		if (slot_distance(table, table_slot_of(table, &key), at) <
		    slot_distance(table, hole, at))
			continue;
		table->entries[hole] = *entry;
		hole = at;
	}
	table->entries[hole] = (struct home_entry){.holder = 0};
}

bool home_table_remove(struct home_table *table, unsigned int holder,
		       const struct home_key *key)
{
	const struct home_holder *h = holder_of(table, holder);
	uint64_t at = table_slot_of(table, key);

	assert(h && h->live);
	for (; table->entries[at].holder; at = slot_next(table, at)) {
		table->steps++;
		if (table->entries[at].holder != (holder & PLACE_MASK) ||
		    !is_key(&table->entries[at], key))
			continue;
		slot_free(table, at);
		return true;
	}
	return false;
}

unsigned int home_table_find(const struct home_table *table, const struct home_key *key,
			     uint64_t random, void **owners, unsigned int most)
{
	uint64_t at = table_slot_of(table, key);
	unsigned int seen = 0;

	for (; table->entries[at].holder; at = slot_next(table, at)) {
		const struct home_entry *entry = &table->entries[at];
		const struct home_holder *h = &table->holder[entry->holder];
		unsigned int to = seen;

		if (!h->live || !is_key(entry, key))
			continue;
		seen++;
		if (to >= most) { /* each of them has the same chance */
			random = home_mix(random + seen);
			to = (unsigned int)(random % seen);
		}
		if (to < most)
			owners[to] = h->owner;
	}
	return seen < most ? seen : most;
}

bool home_table_sweep(struct home_table *table)
{
	for (unsigned int i = 0; i < SLICE && table->dead; i++) {
		uint64_t at = table->sweep_at;
		uint16_t holder = table->entries[at].holder;

		if (holder && !table->holder[holder].live)
			slot_free(table, at); /* another may be there now */
		else
			table->sweep_at = slot_next(table, at);
	}
	return table->dead > 0;
}

void home_table_figures(const struct home_table *table, struct home_figures *figures_p)
{
	*figures_p = (struct home_figures){
		.bytes = table->bytes,
		.most = table->most,
		.used = table->used - table->dead,
		.holders = table->holders,
		.steps = table->steps,
	};
}
