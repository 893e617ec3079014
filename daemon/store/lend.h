/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lend: chunks of this daemon that others hold and pull. An ask names a space by its
 * digest and the hold by a number of the asker's; it ends with its lease, with the
 * asker's release, or with the peer.
 */
#ifndef KVD_STORE_LEND_H
#define KVD_STORE_LEND_H

struct cursor;
struct remote;
struct store;
struct wire_header;

/* CHUNK_ASK, CHUNK_LEG, CHUNK_RELEASE. `store` NULL: this daemon keeps no chunks. */
int lend_on_message(struct store *store, struct remote *remote,
		    const struct wire_header *h, struct cursor *body);
void lend_on_down(struct store *store, const struct remote *remote);
void lends_kick(struct store *store); /* a part was loaded, or cannot be */
void lends_close(struct store *store);
unsigned int lends_open(const struct store *store);

#endif
