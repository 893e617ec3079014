/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ring_pages: entries of the submission ring that name pages of a pool, with a text of
 * further members: reading and checking them, on a helper where they are many. Loop
 * thread.
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

/* What an op does besides. */
struct ring_pages_kind {
	bool claims;  /* a slot, for what it makes; else it is of the room in its slot */
	bool lands;   /* of what claims: bytes land in the pages */
	size_t bytes; /* of own[] */
	/* Any thread: look at `text`, which may be NULL; may set own[], aux and lands.
	 * NULL: it needs none. */
	int (*read)(struct ring_pages *pages);
	/* Read and checked. `room`: of what does not claim. Negative: it is refused. */
	int (*end)(struct ring_pages *pages, struct room *room);
};

struct ring_pages {
	const struct ring_pages_kind *kind;
	struct ring *ring;
	struct kvd_ring_entry e;
	struct pool *pool; /* in use */
	/* read */
	uint8_t *head; /* what is before the views; NULL: nothing */
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

/* As a verb; `head_bytes` are before the views. */
int ring_pages_run(struct ring *ring, const struct kvd_ring_entry *entry,
		   struct ring_payload *arena, const struct ring_pages_kind *kind,
		   size_t head_bytes);

#endif
