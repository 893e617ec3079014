/* SPDX-License-Identifier: Apache-2.0 */
/*
 * room_wire: the encoding of wants, and of the headers of CHUNK and PULL requests on the
 * data line.
 */
#ifndef KVD_ROOM_WIRE_H
#define KVD_ROOM_WIRE_H

#include "daemon/base/cursor.h"
#include "daemon/plan/plan.h"
#include "daemon/room/room.h"

#define ROOM_WANTS_MAX (1u << 20)

/* count u32, {u16 view, u16 field, u32 layer, u32 first_unit, u32 units}… */
size_t wants_wire_bytes(size_t count);
void wants_put(struct cursor *out, const struct plan_want *wants, size_t count);
/* Not yet checked against a layout: cover_check_wants(). *wants_p is heap. */
int wants_get(struct cursor *in, struct plan_want **wants_p, size_t *count_p);

struct chunk_header {
	uint64_t room, recv_gen, send_gen, src_pool, dst_pool, seq, digest, bytes;
	bool last;
};
/* Kind byte, fields, the source's maps. *buf_p is heap. */
int chunk_header_make(const struct chunk_header *h, const struct room_maps *maps,
		      uint8_t **buf_p, size_t *len_p);
int chunk_header_get(struct cursor *in, struct chunk_header *h); /* maps follow */

struct pull_header {
	uint64_t room, offer_gen, pull_gen, src_pool, dst_pool, lease_epoch, digest,
		bytes;
};
int pull_header_make(const struct pull_header *h, const struct plan_want *wants,
		     size_t want_count, const struct room_maps *src,
		     const struct room_maps *dst, uint8_t **buf_p, size_t *len_p);
int pull_header_get(struct cursor *in, struct pull_header *h); /* wants, maps follow */

#endif
