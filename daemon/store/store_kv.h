/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store_kv: KV of chunks that is read in place: a run of the chunks of a hold, of a local
 * session or of another daemon. It stays for as long as this object exists, even if the
 * hold ends, or the daemon's peer. Loop thread; any thread may read the bytes.
 */
#ifndef KVD_STORE_KV_H
#define KVD_STORE_KV_H

#include <stdbool.h>
#include <stdint.h>

struct layout;
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
	struct region *region; /* pinned: threads other than the loop's read it */
	struct store_class *class;
	struct store_chunk **chunks; /* pinned */
	uint32_t count;
	uint32_t others; /* other references */
};

/* The classes that together hold chunks [first, first + count) of those that the hold has
 * here, as bits: several, if they are parts of several ranks. ERR_LEASE, ERR_RANGE,
 * ERR_REQUIRE. */
int store_kv_classes(const struct store_hold *hold, uint32_t first, uint32_t count,
		     uint64_t *classes_p);
const struct layout *store_kv_layout(const struct store_hold *hold, unsigned int bit);
/* What one of these classes has of them. `view` NULL: the only one. ERR_REQUIRE: only
 * some tokens; ERR_BUSY: they are being loaded from a file. */
int store_kv_of_hold(const struct store_hold *hold, unsigned int bit, uint32_t first,
		     uint32_t count, const char *view, struct store_kv **kv_p);
/* The same of the remote's hold `ask`; `pool`: one that was reported to it. */
int store_kv_of_remote_hold(const struct remote *remote, uint64_t ask, uint64_t pool,
			    uint32_t first, uint32_t count, const char *view,
			    struct store_kv **kv_p);
/* The same bytes? */
bool store_kv_same(const struct store_kv *a, const struct store_kv *b);
/* Another reference: each is freed. Loop thread. */
struct store_kv *store_kv_ref(struct store_kv *kv);
void store_kv_free(struct store_kv *kv);	    /* NULL is fine */
uint64_t store_kv_bytes(const struct store_kv *kv); /* of itself */

#endif
