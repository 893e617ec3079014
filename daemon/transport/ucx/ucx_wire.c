/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/transport/ucx/ucx_wire.h"

#include <string.h>
#include <xxhash.h>

#include "daemon/base/cursor.h"

#define FRAME_MAGIC UINT32_C(0x5544564b)   /* "KVDU" */
#define ADDRESS_MAGIC UINT32_C(0x4144564b) /* "KVDA" */
#define WIRE_VERSION 1
#define CHECK_BYTES 8u
#define FRAME(F) F(64, seq) F(64, id) F(64, offset) F(64, length) F(32, code)

static uint64_t checksum(const void *buf)
{
	return XXH3_64bits(buf, UCX_FRAME_BYTES - CHECK_BYTES);
}

void ucx_frame_put(const struct ucx_frame *m, uint8_t buf[UCX_FRAME_BYTES])
{
	struct cursor out, *c = &out;

	cursor_write(c, buf, UCX_FRAME_BYTES);
	cursor_put_u32(c, FRAME_MAGIC);
	cursor_put_u8(c, WIRE_VERSION);
	cursor_put_u8(c, m->type);
	cursor_put_u16(c, m->flags);
	cursor_put_bytes(c, m->token, sizeof(m->token));
	FRAME(CURSOR_PUT);
	cursor_put_u32(c, 0); /* spare */
	cursor_put_u64(c, checksum(buf));
}

int ucx_frame_get(const void *buf, size_t len, struct ucx_frame *frame_p)
{
	struct ucx_frame *m = frame_p;
	struct cursor in, *c = &in;
	uint32_t magic;
	uint8_t version;

	if (len < UCX_FRAME_BYTES)
		return err_raise(ERR_PROTO, "ucx frame: %zu bytes, %u expected", len,
				 UCX_FRAME_BYTES);
	cursor_read(c, buf, UCX_FRAME_BYTES);
	magic = cursor_get_u32(c);
	version = cursor_get_u8(c);
	m->type = cursor_get_u8(c);
	m->flags = cursor_get_u16(c);
	memcpy(m->token, cursor_get_bytes(c, sizeof(m->token)), sizeof(m->token));
	FRAME(CURSOR_GET);
	(void)cursor_get_u32(c);
	if (magic != FRAME_MAGIC || version != WIRE_VERSION)
		return err_raise(ERR_PROTO, "ucx frame: magic %08x version %u", magic,
				 version);
	if (cursor_get_u64(c) != checksum(buf))
		return err_raise(ERR_PROTO, "ucx frame: checksum mismatch");
	if (m->type == 0 || m->type >= UCX_TYPE_END)
		return err_raise(ERR_PROTO, "ucx frame: type %u", m->type);
	return 0;
}

int ucx_address_put(const void *worker, size_t len, uint8_t buf[XP_ADDRESS_MAX],
		    size_t *len_p)
{
	struct cursor c;

	if (len > XP_ADDRESS_MAX - UCX_ADDRESS_HEADER)
		return err_raise(ERR_LIMIT, "ucx worker address: %zu bytes (limit %u)",
				 len, XP_ADDRESS_MAX - UCX_ADDRESS_HEADER);
	cursor_write(&c, buf, XP_ADDRESS_MAX);
	cursor_put_format(&c, ADDRESS_MAGIC, WIRE_VERSION);
	cursor_put_u16(&c, (uint16_t)len);
	cursor_put_bytes(&c, worker, len);
	*len_p = c.pos;
	return err_pass(cursor_check(&c, "ucx address"));
}

int ucx_address_get(const void *buf, size_t len, const void **worker_p,
		    size_t *worker_len_p)
{
	struct cursor c;
	size_t worker_len;
	int r;

	cursor_read(&c, buf, len);
	r = cursor_get_format(&c, "ucx address", ADDRESS_MAGIC, WIRE_VERSION);
	if (r < 0)
		return err_pass(r);
	worker_len = cursor_get_u16(&c);
	if (worker_len == 0 || worker_len != cursor_left(&c))
		return err_raise(ERR_PROTO, "ucx address: %zu bytes, %zu announced",
				 cursor_left(&c), worker_len);
	*worker_p = cursor_get_bytes(&c, worker_len);
	*worker_len_p = worker_len;
	return 0;
}
