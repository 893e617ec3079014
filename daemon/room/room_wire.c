/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/room/room_wire.h"

#include <errno.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"

#define WANT_BYTES 16u
#define HEADER_FIXED 80u /* kind, fields, flags: an upper bound */

size_t wants_wire_bytes(size_t count)
{
	return 4 + WANT_BYTES * count;
}

void wants_put(struct cursor *out, const struct plan_want *wants, size_t count)
{
	cursor_put_u32(out, (uint32_t)count);
	for (size_t i = 0; i < count; i++) {
		cursor_put_u16(out, wants[i].view);
		cursor_put_u16(out, wants[i].field);
		cursor_put_u32(out, wants[i].layer);
		cursor_put_u32(out, wants[i].first_unit);
		cursor_put_u32(out, wants[i].units);
	}
}

int wants_get(struct cursor *in, struct plan_want **wants_p, size_t *count_p)
{
	uint32_t n = cursor_get_count(in, ROOM_WANTS_MAX, WANT_BYTES);
	struct plan_want *wants;
	int r = cursor_check(in, "wants");

	if (r < 0)
		return err_pass(r);
	wants = mem_calloc(n, sizeof(*wants));
	if (!wants)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; i < n; i++) {
		wants[i].view = cursor_get_u16(in);
		wants[i].field = cursor_get_u16(in);
		wants[i].layer = cursor_get_u32(in);
		wants[i].first_unit = cursor_get_u32(in);
		wants[i].units = cursor_get_u32(in);
	}
	*wants_p = wants;
	*count_p = n;
	return 0;
}

static int room_wire_too_large(const struct cursor *out)
{
	if (!out->bad && out->pos <= XP_HEADER_MAX)
		return 0;
	return err_raise(ERR_TOOBIG,
			 "pages: description over %u bytes; send smaller chunks",
			 XP_HEADER_MAX);
}

int chunk_header_make(const struct chunk_header *h, const struct room_maps *maps,
		      uint8_t **buf_p, size_t *len_p)
{
	size_t size = HEADER_FIXED + room_maps_wire_bytes(maps);
	uint8_t *buf = mem_alloc(size);
	struct cursor out;

	if (!buf)
		return err_pass(-ENOMEM);
	cursor_write(&out, buf, size);
	cursor_put_u8(&out, REQUEST_CHUNK);
	cursor_put_u64(&out, h->room);
	cursor_put_u64(&out, h->recv_gen);
	cursor_put_u64(&out, h->send_gen);
	cursor_put_u64(&out, h->src_pool);
	cursor_put_u64(&out, h->dst_pool);
	cursor_put_u64(&out, h->seq);
	cursor_put_u64(&out, h->digest);
	cursor_put_u64(&out, h->bytes);
	cursor_put_u8(&out, h->last);
	room_maps_put(&out, maps);
	if (room_wire_too_large(&out) < 0) {
		mem_free(buf);
		return err_pass(-EMSGSIZE);
	}
	*buf_p = buf;
	*len_p = out.pos;
	return 0;
}

int chunk_header_get(struct cursor *in, struct chunk_header *h)
{
	h->room = cursor_get_u64(in);
	h->recv_gen = cursor_get_u64(in);
	h->send_gen = cursor_get_u64(in);
	h->src_pool = cursor_get_u64(in);
	h->dst_pool = cursor_get_u64(in);
	h->seq = cursor_get_u64(in);
	h->digest = cursor_get_u64(in);
	h->bytes = cursor_get_u64(in);
	h->last = cursor_get_u8(in) != 0;
	return cursor_check(in, "CHUNK");
}

int pull_header_make(const struct pull_header *h, const struct plan_want *wants,
		     size_t want_count, const struct room_maps *src,
		     const struct room_maps *dst, uint8_t **buf_p, size_t *len_p)
{
	size_t size = HEADER_FIXED + wants_wire_bytes(want_count) +
		      room_maps_wire_bytes(src) + room_maps_wire_bytes(dst);
	uint8_t *buf = mem_alloc(size);
	struct cursor out;

	if (!buf)
		return err_pass(-ENOMEM);
	cursor_write(&out, buf, size);
	cursor_put_u8(&out, REQUEST_PULL);
	cursor_put_u64(&out, h->room);
	cursor_put_u64(&out, h->offer_gen);
	cursor_put_u64(&out, h->pull_gen);
	cursor_put_u64(&out, h->src_pool);
	cursor_put_u64(&out, h->dst_pool);
	cursor_put_u64(&out, h->lease_epoch);
	cursor_put_u64(&out, h->digest);
	cursor_put_u64(&out, h->bytes);
	wants_put(&out, wants, want_count);
	room_maps_put(&out, src);
	room_maps_put(&out, dst);
	if (room_wire_too_large(&out) < 0) {
		mem_free(buf);
		return err_pass(-EMSGSIZE);
	}
	*buf_p = buf;
	*len_p = out.pos;
	return 0;
}

int pull_header_get(struct cursor *in, struct pull_header *h)
{
	h->room = cursor_get_u64(in);
	h->offer_gen = cursor_get_u64(in);
	h->pull_gen = cursor_get_u64(in);
	h->src_pool = cursor_get_u64(in);
	h->dst_pool = cursor_get_u64(in);
	h->lease_epoch = cursor_get_u64(in);
	h->digest = cursor_get_u64(in);
	h->bytes = cursor_get_u64(in);
	return cursor_check(in, "PULL");
}
