/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlist: a prepared descriptor list: ranges of one session's memory by the engine's
 * addresses. Rows may overlap and repeat. A regular grid is one entry (address, bytes,
 * stride, count); descriptor i of the list is counted through the entries in order.
 *
 * The location of its rows is looked up on use (daemon/xfer/search.h).
 */
#ifndef KVD_DLIST_H
#define KVD_DLIST_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/base/cursor.h"
#include "daemon/plan/plan.h"

#define DLIST_ENTRIES_MAX (1u << 22)
#define DLIST_DESCS_MAX (UINT64_C(1) << 26)
#define DLIST_ENTRY_BYTES 32u /* on the wire and in a memfd */

struct dlist_entry {
	uint64_t address, bytes; /* of the first row */
	uint64_t stride;	 /* from row to row; at least `bytes` unless count 1 */
	uint64_t count;
};

struct places;

struct dlist {
	uint64_t gid; /* its name between daemons; random */
	struct dlist_entry *entries;
	uint64_t *first; /* index of each entry's first descriptor; entry_count + 1 */
	uint32_t entry_count;
	uint64_t descs;
	struct places *places; /* the latest resolution or NULL */
};

/* Takes `entries` (heap). ERR_INVAL / ERR_RANGE / ERR_LIMIT name the entry:
 * bytes 0, count 0, stride below bytes, wrap-around. */
int dlist_new(struct dlist_entry *entries, uint32_t entry_count, uint64_t gid,
	      struct dlist **dlist_p);
/* Replace rows that form a regular grid by one entry each, in place; returns the
 * number of entries. Descriptors keep their numbers. Any thread. */
uint32_t dlist_squeeze(struct dlist_entry *entries, uint32_t entry_count);
/* The same entry by entry, in order; complete when all were put. Any thread. */
int dlist_begin(uint32_t entry_count, uint64_t gid, struct dlist **dlist_p);
int dlist_put(struct dlist *dlist, uint32_t i, const struct dlist_entry *e);
void dlist_free(struct dlist *dlist); /* NULL is fine; loop thread */
/* Is it a list of files? By its first entry: no list has both. */
bool dlist_of_files(const struct dlist *dlist);
/* Bytes from the start of the first row to the end of the last; `i` is for the error
 * text. */
int dlist_entry_span(const struct dlist_entry *e, uint32_t i, uint64_t *span_p);

/* Selected descriptors: all in order (index NULL), or by number. */
struct dlist_pick {
	const struct dlist *dlist;
	const struct places *places;
	const uint32_t *index;
	uint64_t count;
};
/* Row k is copied from src's k-th to dst's k-th descriptor. ERR_INVAL: counts or
 * lengths differ, nothing selected; ERR_RANGE: an index outside the list; ERR_LIMIT: a
 * plan of more bytes. Any thread. */
int dlist_plan(const struct dlist_pick *src, const struct dlist_pick *dst,
	       uint64_t max_bytes, struct plan **plan_p);
/* Only the checks of dlist_plan(), without places. */
int dlist_check_picks(const struct dlist_pick *src, const struct dlist_pick *dst);

/* Index lists on the wire: u32 count, u32 runs, {u32 first, u32 count}… when
 * that is shorter, else u32 count, u32 0, u32…; all = count 0xffffffff. */
size_t dlist_index_bytes(const struct dlist_pick *pick);
void dlist_index_put(struct cursor *out, const struct dlist_pick *pick);
/* Find an index list and skip it, without checking its contents. *rows_p: its declared
 * number of rows, unchanged when it is "all". */
int dlist_index_skip(struct cursor *in, const uint8_t **raw_p, size_t *len_p,
		     uint64_t *rows_p);
/* *index_p is heap or NULL (all); at most max entries. */
int dlist_index_get(struct cursor *in, uint64_t max, uint32_t **index_p,
		    uint64_t *count_p);

#endif
