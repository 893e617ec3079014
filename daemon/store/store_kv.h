/* SPDX-License-Identifier: Apache-2.0 */
/*
 * store_kv: KV of chunks that is read in place: a run of the chunks of a hold, of a local
 * session or of another daemon. Copies in the store's memory stay for as long as this
 * object exists, even if the hold ends, or the daemon's peer. Pages that an engine has
 * published may be withdrawn: they are looked up again for each call of a kernel
 * (store_kv_read), and only such a call delays their engine. Loop thread; any thread may
 * read the bytes.
 */
#ifndef KVD_STORE_KV_H
#define KVD_STORE_KV_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "daemon/base/list.h"

struct gpu_device;
struct layout;
struct layout_field;
struct layout_view;
struct pool;
struct region;
struct room_leg;
struct store_chunk;
struct store_class;
struct store_hold;
struct store_pages;

struct store_kv {
	uint64_t tokens;
	/* private */
	uint32_t view;		     /* of the class's */
	uint32_t *pages, page_count; /* of copies; NULL: each call looks them up */
	struct region *region;	     /* pinned: threads other than the loop's read it */
	struct store_class *class;
	struct store_chunk **chunks; /* pinned */
	uint32_t count;
	uint32_t others; /* other references */
};

/* An offer of published pages, or a call that reads them. */
struct store_reading {
	struct list link; /* in class->readings */
	struct store_class *class;
	struct room_leg *leg;	 /* NULL: a call's */
	struct store_pages **of; /* NULL: none */
	uint32_t count;
	atomic_bool left; /* of a call: some were withdrawn, so its result is not valid */
};

/* A run as one call of a kernel reads it. */
struct store_kv_read {
	const struct layout_view *view;
	/* page n of a field lies at store_kv_at() + n * page_stride */
	const uint32_t *pages;
	struct gpu_device *device; /* that has these addresses; NULL: the host */
	/* private */
	struct pool *pool; /* of published pages: in use; NULL: copies */
	const uint8_t *base;
	uint32_t *own;
	struct store_reading reading;
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
/* The same of `have` chunks that another kind of hold has. */
int store_kv_of_chunks(struct store_class *class, struct store_chunk *const *chunks,
		       uint32_t have, uint32_t first, uint32_t count, const char *view,
		       struct store_kv **kv_p);
/* The device that has the bytes; NULL: the host. ERR_NOTFOUND: the engine has exited. */
int store_kv_device(const struct store_kv *kv, struct gpu_device **device_p);
/* The view as it is now; NULL: the chunks' engine has exited. */
const struct layout_view *store_kv_view(const struct store_kv *kv);
/* From here to its end the pages are not their engine's. ERR_NOTFOUND: some have been
 * withdrawn. Loop thread; `kv` stays until the end. */
int store_kv_read_begin(const struct store_kv *kv, struct store_kv_read *read);
/* The address of byte 0 of a field's page 0. Any thread. */
uint64_t store_kv_at(const struct store_kv_read *read, const struct layout_field *f);
/* End the call: an engine waits for its pages. Any thread. */
bool store_kv_read_left(const struct store_kv_read *read);
/* ERR_NOTFOUND: what was read is not valid. Also after a begin that failed. Loop thread.
 */
int store_kv_read_end(struct store_kv_read *read);
/* The same bytes? */
bool store_kv_same(const struct store_kv *a, const struct store_kv *b);
/* Another reference: each is freed. Loop thread. */
struct store_kv *store_kv_ref(struct store_kv *kv);
void store_kv_free(struct store_kv *kv);	    /* NULL is fine */
uint64_t store_kv_bytes(const struct store_kv *kv); /* of itself */

#endif
