/* SPDX-License-Identifier: Apache-2.0 */
/*
 * canon: the slot layout of a chunk store, for the part of a chunk of tokens that one
 * rank's pool holds. A part lies in a slot, one contiguous range of bytes: view after
 * view, page after page, and in a page field after field, in the order and head order of
 * its pool, without gaps. So equal pools move long rows. Pools of other layouts are
 * handled by the planner, because the slots of a memory form a pool themselves: a page
 * may start at each multiple of CANON_GRAIN, and page number n starts at n * CANON_GRAIN.
 *
 * Such pages overlap; the allocator decides which of them are in use at a time. Pure.
 */
#ifndef KVD_PLAN_CANON_H
#define KVD_PLAN_CANON_H

#include <stdint.h>

#include "daemon/plan/layout.h"

#define CANON_GRAIN UINT64_C(4096)
#define CANON_SLOT_MAX (UINT64_C(512) << 20)
#define CANON_MEMORY_MAX (CANON_GRAIN * LAYOUT_PAGES_MAX) /* of slots: 1 TiB */
#define CANON_TOKENS_MIN 16u
#define CANON_TOKENS_MAX 4096u

/* One view, in the order of layout->views. */
struct canon_view {
	uint64_t offset;     /* in a slot */
	uint64_t page_bytes; /* a multiple of the grain */
	uint32_t pages;	     /* of a chunk */
};

struct canon {
	struct layout *layout; /* one buffer: the memory of the slots */
	struct canon_view *views;
	uint64_t slot_bytes;  /* a multiple of the grain */
	uint64_t chunk_bytes; /* of the pool's data in a complete chunk */
};

struct canon_args {
	const struct layout *layout; /* a pool's */
	const char *const *views;    /* of the pool, NULL: all but the aux view */
	uint32_t view_count;
	uint32_t tokens;       /* of a chunk */
	uint32_t rank;	       /* of the pool of slots */
	uint64_t memory_bytes; /* of all slots */
};

/* ERR_NOTFOUND (no such view), ERR_INVAL, ERR_RANGE, ERR_TOOBIG, ERR_NOMEM. */
int canon_make(const struct canon_args *args, struct canon **canon_p);
void canon_free(struct canon *canon); /* NULL is fine */
void canon_freep(struct canon **canon_p);
/* May data of one lie unchanged in slots of the other? */
bool canon_equal(const struct canon *a, const struct canon *b);

/* Set the pages of view `view` for a part whose slot starts at `offset`: .pages of
 * them. */
void canon_pages(const struct canon *canon, uint32_t view, uint64_t offset,
		 uint32_t *pages);

/* The properties that must agree for bytes to have the same meaning, whichever ranks
 * hold them: a line "view field unit_bytes total_units format" for each kind of field,
 * sorted. The caller's (mem_free); NULL + ERR_NOMEM. */
char *canon_identity(const struct canon *canon);

#endif
