/* SPDX-License-Identifier: Apache-2.0 */
/*
 * home: this daemon as an index node of others. A holder is the peer that sent a note, at
 * the endpoint of its peering: no message names another. Everything known of it is
 * removed with the peering.
 */
#ifndef KVD_STORE_HOME_H
#define KVD_STORE_HOME_H

#include <stdbool.h>
#include <stdint.h>

struct cursor;
struct home;
struct remote;
struct store;
struct wire_index_query;
struct wire_index_digest;
struct wire_header;

int home_new(struct store *store, struct home **home_p);
void home_free(struct home *home); /* NULL is fine */
/* INDEX_UPDATE, INDEX_DIGEST, INDEX_QUERY. home NULL: this daemon keeps no index, and
 * replies so. */
int home_on_message(struct home *home, struct remote *remote, const struct wire_header *h,
		    struct cursor *body);
/* The holders in an INDEX_REPLY, except the requester itself. ERR_PROTO. */
#define HOME_FOUND_BYTES_MAX 16000u
int home_found(struct home *home, const struct remote *requester,
	       const struct wire_index_query *msg, struct cursor *out);
/* The holder must resend everything. */
bool home_wants_all(struct home *home, const struct remote *remote,
		    const struct wire_index_digest *msg);
void home_on_down(struct home *home, const struct remote *remote);

struct store_home {
	uint64_t bytes, most, used; /* of memory, once it is used; entries */
	unsigned int holders;
	uint64_t notes, refused; /* no space for these */
	uint64_t unknown;	 /* chunks of holders that are missing for that reason */
	uint64_t finds, again;	 /* full resynchronizations requested */
};
void home_figures(const struct home *home, struct store_home *figures_p);

#endif
