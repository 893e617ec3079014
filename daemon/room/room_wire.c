/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/room/room_wire.h"

#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define WANT_BYTES 16u
#define HEADER_FIXED 80u /* kind, fields, flags: an upper bound */

/* clang-format off */
#define WANT(F) F(16, view) F(16, field) F(32, layer) F(32, first_unit) F(32, units)
#define CHUNK(F) \
	F(64, room) F(64, recv_gen) F(64, send_gen) F(64, src_pool) F(64, dst_pool) \
	F(64, seq) F(64, digest) F(64, bytes) F(8, last)
#define PULL(F) \
	F(64, room) F(64, offer_gen) F(64, pull_gen) F(64, src_pool) F(64, dst_pool) \
	F(64, lease_epoch) F(64, digest) F(64, bytes)
/* clang-format on */

size_t wants_wire_bytes(size_t count)
{
	return 4 + WANT_BYTES * count;
}

void wants_put(struct cursor *c, const struct plan_want *wants, size_t count)
{
	cursor_put_u32(c, (uint32_t)count);
	for (size_t i = 0; i < count; i++) {
		const struct plan_want *m = &wants[i];

		WANT(CURSOR_PUT);
	}
}

int wants_get(struct cursor *c, struct plan_want **wants_p, size_t *count_p)
{
	uint32_t n = cursor_get_count(c, ROOM_WANTS_MAX, WANT_BYTES);
	struct plan_want *wants;
	int r = cursor_check(c, "wants");

	if (r < 0)
		return err_pass(r);
	wants = mem_calloc(n, sizeof(*wants));
	if (!wants)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < n; i++) {
		struct plan_want *m = &wants[i];

		WANT(CURSOR_GET);
	}
	*wants_p = wants;
	*count_p = n;
	return 0;
}

/* The caller's is the buffer of `out`, or (negative) it is freed. */
static int header_made(const struct cursor *out, uint8_t **buf_p, size_t *len_p)
{
	if (out->bad || out->pos > XP_HEADER_MAX) {
		mem_free(out->base);
		return err_raise(ERR_TOOBIG,
				 "pages: description over %u bytes; send smaller chunks",
				 XP_HEADER_MAX);
	}
	*buf_p = out->base;
	*len_p = out->pos;
	return 0;
}

int chunk_header_make(const struct chunk_header *m, const struct room_maps *maps,
		      uint8_t **buf_p, size_t *len_p)
{
	size_t size = HEADER_FIXED + room_maps_wire_bytes(maps);
	uint8_t *buf = mem_alloc(size);
	struct cursor out, *c = &out;

	if (!buf)
		return err_pass(-ENOMEM);
	cursor_write(&out, buf, size);
	cursor_put_u8(&out, REQUEST_CHUNK);
	CHUNK(CURSOR_PUT);
	room_maps_put(&out, maps);
	return err_pass(header_made(&out, buf_p, len_p));
}

int chunk_header_get(struct cursor *c, struct chunk_header *m)
{
	CHUNK(CURSOR_GET);
	return cursor_check(c, "CHUNK");
}

int pull_header_make(const struct pull_header *m, const struct plan_want *wants,
		     size_t want_count, const struct room_maps *src,
		     const struct room_maps *dst, uint8_t **buf_p, size_t *len_p)
{
	size_t size = HEADER_FIXED + wants_wire_bytes(want_count) +
		      room_maps_wire_bytes(src) + room_maps_wire_bytes(dst);
	uint8_t *buf = mem_alloc(size);
	struct cursor out, *c = &out;

	if (!buf)
		return err_pass(-ENOMEM);
	cursor_write(&out, buf, size);
	cursor_put_u8(&out, REQUEST_PULL);
	PULL(CURSOR_PUT);
	wants_put(&out, wants, want_count);
	room_maps_put(&out, src);
	room_maps_put(&out, dst);
	return err_pass(header_made(&out, buf_p, len_p));
}

int pull_header_get(struct cursor *c, struct pull_header *m)
{
	PULL(CURSOR_GET);
	return cursor_check(c, "PULL");
}
