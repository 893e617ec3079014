/* SPDX-License-Identifier: Apache-2.0 */
/*
 * search: locates the rows of a descriptor list in the memory that its session exports at
 * that moment: its own regions, or those that a remote daemon registered for it.
 *
 * The result (struct places) is immutable and reference-counted. It keeps its regions in
 * use, so helper threads can make plans from it. A list keeps its latest result. A search
 * takes 20-100 ns per entry, so a helper searches long lists: begin (records and holds
 * the current exports), run (any thread), end.
 */
#ifndef KVD_SEARCH_H
#define KVD_SEARCH_H

#include <stdint.h>

#include "daemon/xfer/dlist.h"

struct remote_pool;
struct search;
struct session;

#define SEARCH_INLINE 2048u /* entries searched on the loop */
/* Instead of a transport: files, which no transport supports. */
#define SEARCH_FILES UINT32_MAX

struct places {
	int refs;
	uint64_t serial; /* unique number of this resolution */
	struct search_place {
		uint32_t buffer;
		uint64_t offset; /* of the entry's first row in the buffer */
	} * at;			 /* one an entry */
	uint32_t count;
	uint32_t buffer_count;
	struct xp_buffer *buffers;
	struct region **regions;  /* pinned, as buffers; NULL for a remote list */
	struct remote_pool *pool; /* in use; NULL for a local list */
	uint64_t version;	  /* of the session's regions at its creation */
	unsigned int transport_index;
};

void places_unref(struct places *places); /* loop thread, as all but search_run() */

/* A result that is still valid, with one more reference; or NULL. */
struct places *search_known_local(const struct dlist *dlist,
				  const struct session *session,
				  unsigned int transport_index);

int search_begin_local(struct session *session, unsigned int transport_index,
		       struct search **search_p);
/* pool: of a session, ready. */
int search_begin_remote(struct remote_pool *pool, struct search **search_p);
/* ERR_NOTFOUND names the entry that no region contains completely. Any thread. */
int search_run(struct search *search, const struct dlist *dlist);
/* The result; NULL before a successful run. Valid until search_end(). */
const struct places *search_found(const struct search *search);
/* The list keeps the result, and *places_p has a reference. ERR_REVOKED: one of its
 * regions has been unregistered meanwhile. Frees the search. */
int search_end(struct search *search, struct dlist *dlist, struct places **places_p);
void search_free(struct search *search); /* without a result; NULL is fine */

/* One list of a transfer, and its places. */
struct located {
	struct dlist *dlist;
	struct places *places; /* a reference; NULL until it is known */
	struct search *search; /* the running search */
};
/* A known result, or a search; for a long list the search is only started. */
int locate_local(struct located *at, struct session *session,
		 unsigned int transport_index);
int locate_remote(struct located *at, struct remote_pool *pool);
int locate_run(struct located *at); /* run the started search: any thread */
int locate_end(struct located *at); /* finish it */
const struct places *locate_found(const struct located *at); /* NULL: nothing yet */
void locate_drop(struct located *at);

#endif
