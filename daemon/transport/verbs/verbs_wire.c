/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Frames, private data, addresses and keys of the verbs backend: little-endian, by the
 * bounded cursor, checked before use. Bytes delivered over a reliable connection need no
 * further checksum; the sender was proven when the connection was made (its token).
 */
#include "daemon/transport/verbs/verbs_wire.h"

#include <string.h>

#include "daemon/base/cursor.h"

#define FRAME_MAGIC UINT32_C(0x5656564b)   /* "KVVV" */
#define HELLO_MAGIC UINT32_C(0x4856564b)   /* "KVVH" */
#define ADDRESS_MAGIC UINT32_C(0x4156564b) /* "KVVA" */
#define KEY_MAGIC UINT32_C(0x4b56564b)	   /* "KVVK" */
#define WIRE_VERSION 1
#define SHIFT_MIN 12u
#define SHIFT_MAX 48u

/* clang-format off */
/* with a spare word between them */
#define FRAME_FIRST(F) F(8, type) F(8, kind) F(8, pack) F(16, flags) F(16, credits)
#define FRAME_LAST(F) \
	F(32, code) F(32, slot) F(32, total) F(64, id) F(64, bytes) F(64, digest) \
	F(32, length)
#define HELLO(F) F(8, qp) F(8, total) F(8, rail)
#define REMOTE(F) \
	F(8, rails) F(8, pieces) F(8, shift) F(64, id) F(64, address) F(64, length)
/* clang-format on */

/* ---- frames ---- */

void verbs_frame_put(const struct verbs_frame *m, uint8_t buf[VERBS_FRAME_BYTES])
{
	struct cursor out, *c = &out;

	cursor_write(c, buf, VERBS_FRAME_BYTES);
	cursor_put_u32(c, FRAME_MAGIC);
	cursor_put_u8(c, WIRE_VERSION);
	FRAME_FIRST(CURSOR_PUT);
	cursor_put_u32(c, 0);
	FRAME_LAST(CURSOR_PUT);
}

int verbs_frame_get(const void *buf, size_t len, struct verbs_frame *frame_p)
{
	struct verbs_frame *m = frame_p;
	struct cursor in, *c = &in;
	uint32_t magic;
	uint8_t version;

	cursor_read(c, buf, len);
	magic = cursor_get_u32(c);
	version = cursor_get_u8(c);
	FRAME_FIRST(CURSOR_GET);
	(void)cursor_get_u32(c);
	FRAME_LAST(CURSOR_GET);
	if (c->bad || magic != FRAME_MAGIC || version != WIRE_VERSION)
		return err_raise(ERR_PROTO,
				 "verbs frame: %zu bytes, magic %08x, version %u", len,
				 magic, version);
	if (m->length != cursor_left(c))
		return err_raise(ERR_PROTO,
				 "verbs frame: %zu bytes of body, %u announced",
				 cursor_left(c), m->length);
	if (m->type == 0 || m->type >= VERBS_TYPE_END)
		return err_raise(ERR_PROTO, "verbs frame: type %u", m->type);
	return 0;
}

/* slot 8, generation 12, count - 1 4, aborted 1 */
uint32_t verbs_mark_put(const struct verbs_mark *mark)
{
	return (uint32_t)mark->slot | (uint32_t)mark->generation << 8 |
	       (uint32_t)(mark->count - 1) << 20 | (uint32_t)mark->aborted << 24;
}

void verbs_mark_get(uint32_t imm, struct verbs_mark *mark_p)
{
	mark_p->slot = imm & (VERBS_GRANTS - 1);
	mark_p->generation = imm >> 8 & (VERBS_GENERATIONS - 1);
	mark_p->count = (uint8_t)((imm >> 20 & (VERBS_QPS_MAX - 1)) + 1);
	mark_p->aborted = imm >> 24 & 1;
}

/* ---- private data ---- */

void verbs_hello_put(const struct verbs_hello *m, uint8_t buf[VERBS_HELLO_BYTES])
{
	struct cursor out, *c = &out;

	memset(buf, 0, VERBS_HELLO_BYTES);
	cursor_write(c, buf, VERBS_HELLO_BYTES);
	cursor_put_format(c, HELLO_MAGIC, WIRE_VERSION);
	HELLO(CURSOR_PUT);
	cursor_put_bytes(c, m->token, sizeof(m->token));
	cursor_put_u16(c, m->depth);
}

/* The connection manager pads private data: it may be longer than kvd's. */
int verbs_hello_get(const void *buf, size_t len, struct verbs_hello *hello_p)
{
	struct verbs_hello *m = hello_p;
	struct cursor in, *c = &in;
	const void *token;
	int r;

	cursor_read(c, buf, len);
	r = cursor_get_format(c, "verbs connect", HELLO_MAGIC, WIRE_VERSION);
	if (r < 0)
		return err_pass(r);
	HELLO(CURSOR_GET);
	token = cursor_get_bytes(c, XP_TOKEN_BYTES);
	m->depth = cursor_get_u16(c);
	r = cursor_check(c, "verbs connect");
	if (r < 0)
		return err_pass(r);
	memcpy(m->token, token, XP_TOKEN_BYTES);
	if (m->total == 0 || m->total > VERBS_QPS_MAX || m->qp >= m->total ||
	    m->rail >= VERBS_RAILS_MAX || m->depth < 8)
		return err_raise(ERR_PROTO,
				 "verbs connect: queue pair %u of %u, rail %u, depth %u",
				 m->qp, m->total, m->rail, m->depth);
	return 0;
}

/* ---- addresses ---- */

int verbs_address_put(const struct verbs_address *address, uint8_t buf[XP_ADDRESS_MAX],
		      size_t *len_p)
{
	struct cursor c;

	cursor_write(&c, buf, XP_ADDRESS_MAX);
	cursor_put_format(&c, ADDRESS_MAGIC, WIRE_VERSION);
	cursor_put_u8(&c, (uint8_t)address->rails);
	cursor_put_u8(&c, (uint8_t)address->qps);
	for (uint32_t i = 0; i < address->rails; i++)
		net_place_put(&c, (const void *)&address->rail[i], true);
	*len_p = c.pos;
	return err_pass(cursor_check(&c, "verbs address"));
}

int verbs_address_get(const void *buf, size_t len, struct verbs_address *address_p)
{
	struct cursor c;
	int r;

	memset(address_p, 0, sizeof(*address_p));
	cursor_read(&c, buf, len);
	r = cursor_get_format(&c, "verbs address", ADDRESS_MAGIC, WIRE_VERSION);
	if (r < 0)
		return err_pass(r);
	address_p->rails = cursor_get_u8(&c);
	address_p->qps = cursor_get_u8(&c);
	if (address_p->rails == 0 || address_p->rails > VERBS_RAILS_MAX ||
	    address_p->qps == 0 || address_p->qps > VERBS_QPS_MAX)
		return err_raise(ERR_PROTO, "verbs address: %u rails, %u queue pairs",
				 address_p->rails, address_p->qps);
	for (uint32_t i = 0; i < address_p->rails && !c.bad; i++)
		net_place_get(&c, true, (void *)&address_p->rail[i]);
	if (c.bad)
		return err_raise(ERR_PROTO, "verbs address: %zu bytes for %u rails", len,
				 address_p->rails);
	return 0;
}

/* ---- keys ---- */

static int verbs_wire_remote_check(const struct verbs_remote *r)
{
	uint64_t pieces;

	if (r->pieces == 0 && r->shift == 0 && r->rails && r->rails <= VERBS_RAILS_MAX &&
	    r->length && r->id)
		return 0; /* staged: its address is unused */
	if (r->rails == 0 || r->rails > VERBS_RAILS_MAX || r->pieces == 0 ||
	    r->pieces > VERBS_PIECES_MAX || r->shift < SHIFT_MIN ||
	    r->shift > SHIFT_MAX || r->length == 0 || r->id == 0)
		return err_raise(ERR_PROTO,
				 "verbs key: %u rails, %u pieces of 2^%u bytes", r->rails,
				 r->pieces, r->shift);
	pieces = ((r->length - 1) >> r->shift) + 1;
	if (pieces != r->pieces || r->address + r->length < r->address)
		return err_raise(ERR_PROTO, "verbs key: %u pieces for %ju bytes",
				 r->pieces, (uintmax_t)r->length);
	return 0;
}

int verbs_remote_put(const struct verbs_remote *m, void *buf, size_t size, size_t *len_p)
{
	struct cursor out, *c = &out;

	cursor_write(c, buf, size);
	cursor_put_u32(c, KEY_MAGIC);
	cursor_put_u8(c, WIRE_VERSION);
	REMOTE(CURSOR_PUT);
	for (uint32_t i = 0; i < m->rails; i++)
		for (uint32_t j = 0; j < m->pieces; j++)
			cursor_put_u32(c, m->rkey[i][j]);
	*len_p = c->pos;
	return err_pass(cursor_check(c, "verbs key"));
}

int verbs_remote_get(const void *buf, size_t len, struct verbs_remote *remote_p)
{
	struct verbs_remote *m = remote_p;
	struct cursor in, *c = &in;
	uint32_t magic;
	uint8_t version;
	int r;

	memset(m, 0, sizeof(*m));
	cursor_read(c, buf, len);
	magic = cursor_get_u32(c);
	version = cursor_get_u8(c);
	REMOTE(CURSOR_GET);
	if (c->bad || magic != KEY_MAGIC || version != WIRE_VERSION)
		return err_raise(ERR_PROTO, "verbs key: malformed");
	r = verbs_wire_remote_check(m);
	if (r < 0)
		return err_pass(r);
	for (uint32_t i = 0; i < m->rails; i++)
		for (uint32_t j = 0; j < m->pieces; j++)
			m->rkey[i][j] = cursor_get_u32(c);
	if (c->bad || cursor_left(c))
		return err_raise(ERR_PROTO, "verbs key: %zu bytes", len);
	return 0;
}
