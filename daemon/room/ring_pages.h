/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring_pages: entries of the submission ring that name pages of a pool, with a text of
 * further members: reads and checks them, on a helper if they are long. Loop thread.
 */
#ifndef KVD_RING_PAGES_H
#define KVD_RING_PAGES_H

#include <cjson/cJSON.h>
#include <stdalign.h>
#include <stdbool.h>
#include <stddef.h>

#include "daemon/base/account.h"
#include "daemon/loop/offload.h"
#include "daemon/request/ring_ops.h"
#include "daemon/room/room_map.h"

struct room;
struct ring_pages;

#define RING_PAGES_INLINE 8192u /* bytes of a payload that are read on the loop */

/* Properties of an op. */
struct ring_pages_kind {
	bool selects; /* its views may have a selection */
	bool claims;  /* makes an object in a free slot; else it addresses the room in its
			 slot */
	bool lands;   /* for ops that claim: bytes are written to the pages */
	size_t bytes; /* of own[] */
	/* Any thread: read `text`, which may be NULL; may set own[], aux and lands.
	 * NULL: nothing to read. */
	int (*read)(struct ring_pages *pages);
	/* Everything is read and checked. `room`: for ops that do not claim. Negative:
	 * the op is refused. */
	int (*end)(struct ring_pages *pages, struct room *room);
};

struct ring_pages {
	const struct ring_pages_kind *kind;
	struct ring *ring;
	struct kvd_ring_entry e;
	struct pool *pool; /* in use */
	/* read */
	uint8_t *head; /* bytes before the views; NULL: none */
	size_t head_bytes;
	cJSON *text; /* NULL: none */
	struct room_maps maps;
	bool lands;
	int64_t aux; /* -1: none */

	/* private */
	struct ring_payload payload; /* taken */
	struct charge charge;	     /* while it is read */
	struct offload_job job;
	alignas(max_align_t) uint8_t own[];
};

/* The room of the entry's slot and generation, if it is not closed; NULL: the entry is
 * late. */
struct room *ring_pages_room(const struct ring *ring, const struct kvd_ring_entry *entry);

/* Run a verb; `head_bytes` precede the views. */
int ring_pages_run(struct ring *ring, const struct kvd_ring_entry *entry,
		   struct ring_payload *arena, const struct ring_pages_kind *kind,
		   size_t head_bytes);

#endif
