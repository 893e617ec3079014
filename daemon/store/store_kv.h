/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store_kv: KV of chunks that is read where it lies: a run of the chunks of a hold, of a
 * session here or of another daemon. It stays for as long as this does, whatever becomes
 * of the hold, and of the daemon. Loop thread; the bytes may be read by any.
 */
#ifndef KVD_STORE_KV_H
#define KVD_STORE_KV_H

#include <stdbool.h>
#include <stdint.h>

struct layout_view;
struct region;
struct remote;
struct store_chunk;
struct store_class;
struct store_hold;

struct store_kv {
	const struct layout_view *view; /* its fields: a page n lies at n * page_stride */
	const uint8_t *base;		/* of page 0 */
	uint32_t *pages;
	uint32_t page_count, page_tokens;
	uint64_t tokens;
	/* private */
	struct region *region; /* pinned: others than the loop read in it */
	struct store_class *class;
	struct store_chunk **chunks; /* pinned */
	uint32_t count;
	uint32_t others; /* who have it, too */
};

/* Chunks [first, first + count) of those that the hold has here. `view` NULL: the one
 * that there is. ERR_LEASE; ERR_RANGE; ERR_REQUIRE: parts of several ranks, or of a rank
 * that holds some tokens alone, which nobody can read as one; ERR_BUSY: they are on their
 * way from a file. */
int store_kv_of_hold(const struct store_hold *hold, uint32_t first, uint32_t count,
		     const char *view, struct store_kv **kv_p);
/* The same of the hold that the remote calls `ask`; `pool`: one that it was told of. */
int store_kv_of_lend(const struct remote *remote, uint64_t ask, uint64_t pool,
		     uint32_t first, uint32_t count, const char *view,
		     struct store_kv **kv_p);
/* The same bytes? */
bool store_kv_same(const struct store_kv *a, const struct store_kv *b);
/* Somebody else has it, too: each frees it. Loop thread. */
struct store_kv *store_kv_ref(struct store_kv *kv);
void store_kv_free(struct store_kv *kv);	    /* NULL is fine */
uint64_t store_kv_bytes(const struct store_kv *kv); /* of itself */

#endif
