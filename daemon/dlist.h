/* SPDX-License-Identifier: Apache-2.0 */
/*
 * dlist: a prepared descriptor list: stretches of one session's memory by the
 * engine's addresses. Rows may overlap and repeat. A regular grid is one entry
 * (address, bytes, stride, count); descriptor i of the list is counted through
 * the entries in order.
 *
 * A list is resolved against what its session exports at that moment: its own
 * regions, or the regions that a remote daemon registered for it. A resolution
 * (struct places) is immutable, reference-counted and keeps what it names in
 * use, so plans can be made from it on helper threads.
 */
#ifndef KVD_DLIST_H
#define KVD_DLIST_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/base/cursor.h"
#include "daemon/handshake.h"
#include "daemon/plan/plan.h"
#include "daemon/transport/transport.h"

struct session;

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
	uint64_t gid; /* names it between daemons; random */
	struct dlist_entry *entries;
	uint64_t *first; /* index of each entry's first descriptor; entry_count + 1 */
	uint32_t entry_count;
	uint64_t descs;
	struct places *places; /* the latest resolution or NULL */
};

struct places {
	int refs;
	uint64_t serial; /* of this resolution; no other has it */
	struct place {
		uint32_t buffer;
		uint64_t offset; /* of the entry's first row in the buffer */
	} *at; /* one an entry */
	uint32_t buffer_count;
	struct xp_buffer *buffers;
	struct region **regions; /* pinned, as buffers; NULL for a remote list */
	struct remote_pool *pool; /* in use; NULL for a local list */
	uint64_t version;	 /* of the session's regions when it was made */
	unsigned int transport_index;
};

/* Takes `entries` (heap). ERR_INVAL / ERR_RANGE / ERR_LIMIT name the entry:
 * bytes 0, count 0, stride below bytes, wrap-around. */
int dlist_new(struct dlist_entry *entries, uint32_t entry_count, uint64_t gid,
	      struct dlist **dlist_p);
void dlist_free(struct dlist *dlist); /* NULL is fine */

/* Resolve against the session's own regions, for one transport. ERR_NOTFOUND
 * names the entry that no region holds. The result has one reference more. */
int dlist_resolve_local(struct dlist *dlist, struct session *session, uint64_t version,
			unsigned int transport_index, struct places **places_p);
/* Against a remote session's regions (is_session pool, ready). */
int dlist_resolve_remote(struct dlist *dlist, struct remote_pool *pool,
			 struct places **places_p);
struct places *places_ref(struct places *places);
void places_unref(struct places *places); /* loop thread */

/* Which descriptors: all in order (index NULL), or by number. */
struct dlist_pick {
	const struct dlist *dlist;
	const struct places *places;
	const uint32_t *index;
	uint64_t count;
};
/* Row k goes from src's k-th to dst's k-th descriptor. ERR_INVAL: counts or
 * lengths differ, nothing picked; ERR_RANGE: an index outside the list. Any
 * thread. */
int dlist_plan(const struct dlist_pick *src, const struct dlist_pick *dst,
	       struct plan **plan_p);
/* Only the checks of dlist_plan(), without places. */
int dlist_check_picks(const struct dlist_pick *src, const struct dlist_pick *dst);

/* Index lists on the wire: u32 count, u32 runs, {u32 first, u32 count}… when
 * that is shorter, else u32 count, u32 0, u32…; all = count 0xffffffff. */
size_t dlist_index_bytes(const struct dlist_pick *pick);
void dlist_index_put(struct cursor *out, const struct dlist_pick *pick);
/* *index_p is heap or NULL (all); at most max entries. */
int dlist_index_get(struct cursor *in, uint64_t max, uint32_t **index_p,
		    uint64_t *count_p);

#endif
