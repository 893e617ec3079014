/* SPDX-License-Identifier: Apache-2.0 */
/*
 * home: this daemon as one of others' chunk_index. A holder is the peer that a note comes
 * from, and is found at the endpoint of its peering: no message names another. All that
 * is known of it goes with the peering.
 */
#ifndef KVD_STORE_HOME_H
#define KVD_STORE_HOME_H

#include <stdbool.h>
#include <stdint.h>

struct cursor;
struct home;
struct remote;
struct store;
struct wire_chunk_find;
struct wire_chunk_sum;
struct wire_header;

int home_new(struct store *store, struct home **home_p);
void home_free(struct home *home); /* NULL is fine */
/* CHUNK_NOTE, CHUNK_SUM, CHUNK_FIND. home NULL: this daemon keeps no directory, and says
 * so to who asks. */
int home_on_message(struct home *home, struct remote *remote, const struct wire_header *h,
		    struct cursor *body);
/* What a CHUNK_FOUND says of holders, but for the asker itself. ERR_PROTO. */
#define HOME_FOUND_BYTES_MAX 16000u
int home_found(struct home *home, const struct remote *asker,
	       const struct wire_chunk_find *msg, struct cursor *out);
/* The holder has to tell all anew. */
bool home_wants_all(struct home *home, const struct remote *remote,
		    const struct wire_chunk_sum *msg);
void home_on_down(struct home *home, const struct remote *remote);

struct store_home {
	uint64_t bytes, most, used; /* of memory, once it is used; holdings */
	unsigned int holders;
	uint64_t notes, refused; /* those for which there was no room */
	uint64_t unknown;      /* chunks of holders that are not in it for that reason */
	uint64_t finds, again; /* holders that were asked for all anew */
};
void home_figures(const struct home *home, struct store_home *figures_p);

#endif
