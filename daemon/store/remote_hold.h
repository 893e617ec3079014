/* SPDX-License-Identifier: Apache-2.0 */
/*
 * remote_hold: remote holds, that is, chunks of this daemon that others hold and pull. A
 * query names a space by its digest and the hold by the requester's number; the hold ends
 * with its lease, with the requester's release, or with the peer.
 */
#ifndef KVD_STORE_REMOTE_HOLD_H
#define KVD_STORE_REMOTE_HOLD_H

#include <stdint.h>

struct cursor;
struct remote;
struct store;
struct store_kv;
struct wire_header;

/* CHUNK_LOOKUP, CHUNK_OFFER, CHUNK_RELEASE. `store` NULL: this daemon stores no chunks.
 */
int remote_hold_on_message(struct store *store, struct remote *remote,
			   const struct wire_header *h, struct cursor *body);
void remote_holds_on_down(struct remote *remote);
/* As store_kv_of_hold(), of the remote's hold `ask`; `pool`: one that was reported to it.
 * ERR_NOTFOUND, too: it was not. */
int remote_hold_kv(const struct remote *remote, uint64_t ask, uint64_t pool,
		   uint32_t first, uint32_t count, const char *view,
		   struct store_kv **kv_p);
void remote_holds_close(struct store *store);

#endif
