/* SPDX-License-Identifier: Apache-2.0 */
/*
 * wire: everything here is generated from the table of proto/wire_table.h, so each
 * message has a matching encoder and decoder.
 *
 * A decoder reads the fields it knows and skips newer ones. Its errors name the message
 * and the field, which an operator with two versions in one cluster needs. Texts are made
 * printable: invalid UTF-8 and control characters become '?'. They are not refused,
 * because a text cut within a character must not cost a peer, and not kept, because texts
 * are written to logs and JSON.
 *
 * The header and the known parts of HELLO, WELCOME and BYE never change in any version,
 * so that two daemons without a common version can report it to each other. The header's
 * version is checked only for the other messages; those three carry ranges. The checksum
 * detects broken memory and broken senders; CURVE protects against attackers.
 */
#include "proto/wire.h"

#include <assert.h>
#include <string.h>

#define XXH_INLINE_ALL /* libkvd links this file too and needs libc only */
#include <xxhash.h>

#include "daemon/base/err.h"

#define CHECKSUM_AT 64u
#define RESERVED_BYTES 20u
#define BODY_MAX (WIRE_FRAME_MAX - WIRE_HEADER_BYTES)

/* ---- text ---- */

/* Length of the well-formed, printable UTF-8 sequence at p, 0 when none. */
static size_t utf8_len(const uint8_t *p, size_t left)
{
	uint8_t lo = 0x80, hi = 0xbf; /* range of the second byte */
	size_t n = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;

	if (p[0] < 0x20 || p[0] == 0x7f || (p[0] >= 0x80 && p[0] < 0xc2) || p[0] > 0xf4 ||
	    n > left)
		return 0;
	if (n == 1)
		return 1;
	if (p[0] == 0xc2)
		lo = 0xa0; /* U+0080 … U+009F are control characters */
	else if (p[0] == 0xe0)
		lo = 0xa0;
	else if (p[0] == 0xed)
		hi = 0x9f; /* surrogates */
	else if (p[0] == 0xf0)
		lo = 0x90;
	else if (p[0] == 0xf4)
		hi = 0x8f;
	if (p[1] < lo || p[1] > hi)
		return 0;
	for (size_t i = 2; i < n; i++) {
		if (p[i] < 0x80 || p[i] > 0xbf)
			return 0;
	}
	return n;
}

void wire_text_clean(char *text)
{
	size_t len = strlen(text), n;

	for (size_t i = 0; i < len; i += n ? n : 1) {
		n = utf8_len((const uint8_t *)text + i, len - i);
		if (!n)
			text[i] = '?';
	}
}

static void get_text(struct cursor *in, char *dst)
{
	cursor_get_str(in, dst, WIRE_STR_MAX);
	wire_text_clean(dst);
}

static void put_text(struct cursor *out, const char *src)
{
	if (memchr(src, 0, WIRE_STR_MAX))
		cursor_put_str(out, src);
	else
		out->bad = true;
}

/* ---- bodies ---- */

#define PUT_u8(f) cursor_put_u8(out, m->f)
#define PUT_u16(f) cursor_put_u16(out, m->f)
#define PUT_u32(f) cursor_put_u32(out, m->f)
#define PUT_u64(f) cursor_put_u64(out, m->f)
#define PUT_id(f) cursor_put_bytes(out, m->f, sizeof(m->f))
#define PUT_str(f) put_text(out, m->f)
#define PUT_blob(f) cursor_put_blob(out, m->f.data, m->f.len)
#define PUT(type, f)   \
	PUT_##type(f); \
	if (out->bad)  \
		return put_failed(name, #f, out);

#define GET_u8(f) m->f = cursor_get_u8(in)
#define GET_u16(f) m->f = cursor_get_u16(in)
#define GET_u32(f) m->f = cursor_get_u32(in)
#define GET_u64(f) m->f = cursor_get_u64(in)
#define GET_id(f) get_id(in, m->f)
#define GET_str(f) get_text(in, m->f)
#define GET_blob(f) m->f.data = cursor_get_blob(in, cap, &m->f.len)
#define GET(type, f)                                                                   \
	GET_##type(f);                                                                 \
	if (in->bad)                                                                   \
		return err_raise(ERR_PROTO,                                            \
				 "%s: field %s (%s) exceeds its cap or the message's " \
				 "%zu bytes",                                          \
				 name, #f, #type, in->size);

static int put_failed(const char *name, const char *field, const struct cursor *out)
{
	return err_raise(ERR_TOOBIG, "%s: field %s does not fit into %zu bytes", name,
			 field, out->size);
}

static void get_id(struct cursor *in, uint8_t id[16])
{
	const void *p = cursor_get_bytes(in, 16);

	if (p)
		memcpy(id, p, 16);
}

static int put_checked(const char *name, const struct cursor *out, size_t start,
		       size_t cap)
{
	if (out->pos - start <= cap)
		return 0;
	return err_raise(ERR_TOOBIG, "%s: body of %zu bytes; at most %zu", name,
			 out->pos - start, cap);
}

#define WIRE_CODEC(num, NAME, low, owner, body_cap, text)                        \
	int wire_##low##_put(struct cursor *out, const struct wire_##low *m)     \
	{                                                                        \
		static const char name[] = #NAME;                                \
		const size_t start = out->pos;                                   \
                                                                                 \
		WIRE_##NAME(PUT) return put_checked(name, out, start, body_cap); \
	}                                                                        \
	int wire_##low##_get(struct cursor *in, struct wire_##low *m)            \
	{                                                                        \
		static const char name[] = #NAME;                                \
		static const size_t cap = body_cap;                              \
                                                                                 \
		(void)cap; /* only blobs need it */                              \
		memset(m, 0, sizeof(*m));                                        \
		WIRE_##NAME(GET) return 0;                                       \
	}
WIRE_MESSAGES(WIRE_CODEC)

bool wire_shows_secret(unsigned int type, const void *body, size_t len)
{
	static const uint8_t none[16];
	/* it is the last field; of ABORT the last but one */
	size_t at_end = sizeof(none) + (type == WIRE_T_ABORT ? sizeof(uint64_t) : 0);

	return (type == WIRE_T_ATTACH || type == WIRE_T_TRANSFER_INFO ||
		type == WIRE_T_OFFER_QUERY || type == WIRE_T_ABORT) &&
	       len >= at_end &&
	       memcmp((const uint8_t *)body + len - at_end, none, sizeof(none)) != 0;
}

/* ---- the table ---- */

struct row {
	const char *name;
	uint32_t cap;
	enum wire_owner owner;
};

static const struct row rows[WIRE_T_END] = {
#define WIRE_ROW(num, NAME, name_, owner, cap_, text) \
	[num] = {#NAME, cap_, WIRE_OWNER_##owner},
	WIRE_MESSAGES(WIRE_ROW)
#undef WIRE_ROW
};

#define WIRE_CAP_FITS(num, NAME, name, owner, cap, text) \
	_Static_assert((cap) <= BODY_MAX, #NAME " fits into a frame");
WIRE_MESSAGES(WIRE_CAP_FITS)

static const struct row *wire_row_of(unsigned int type)
{
	return type < WIRE_T_END && rows[type].name ? &rows[type] : NULL;
}

const char *wire_type_name(unsigned int type)
{
	const struct row *row = wire_row_of(type);

	return row ? row->name : "?";
}

size_t wire_body_cap(unsigned int type)
{
	const struct row *row = wire_row_of(type);

	return row ? row->cap : 0;
}

enum wire_owner wire_owner(unsigned int type)
{
	const struct row *row = wire_row_of(type);

	return row ? row->owner : WIRE_OWNER_NONE;
}

/* ---- frames ---- */

static uint32_t frame_checksum(const uint8_t *frame, size_t len, uint32_t flags)
{
	static const uint8_t zero[4];
	XXH3_state_t state;

	if ((flags & WIRE_FLAG_ROWS) && len > WIRE_HEADER_BYTES + WIRE_SUMMED)
		len = WIRE_HEADER_BYTES + WIRE_SUMMED;
	XXH3_INITSTATE(&state);
	XXH3_64bits_reset(&state);
	XXH3_64bits_update(&state, frame, CHECKSUM_AT);
	XXH3_64bits_update(&state, zero, sizeof(zero));
	XXH3_64bits_update(&state, frame + CHECKSUM_AT + sizeof(zero),
			   len - CHECKSUM_AT - sizeof(zero));
	return (uint32_t)XXH3_64bits_digest(&state);
}

void wire_frame_put(uint8_t *frame, const struct wire_header *h, const void *body)
{
	static const uint8_t zero[RESERVED_BYTES];
	struct cursor c;

	assert(h->body_len <= BODY_MAX);
	cursor_write(&c, frame, WIRE_HEADER_BYTES + h->body_len);
	cursor_put_u32(&c, WIRE_MAGIC);
	cursor_put_u16(&c, h->version);
	cursor_put_u16(&c, h->type);
	cursor_put_u32(&c, h->flags);
	cursor_put_bytes(&c, h->sender, sizeof(h->sender));
	cursor_put_bytes(&c, h->target, sizeof(h->target));
	cursor_put_u64(&c, h->epoch);
	cursor_put_u64(&c, h->sequence);
	cursor_put_u32(&c, h->body_len);
	cursor_put_u32(&c, 0); /* position of the checksum */
	cursor_put_u64(&c, h->from_epoch);
	cursor_put_bytes(&c, zero, sizeof(zero));
	assert(!c.bad && c.pos == WIRE_HEADER_BYTES);
	if (body != frame + WIRE_HEADER_BYTES)
		cursor_put_bytes(&c, body, h->body_len);
	cursor_write(&c, frame + CHECKSUM_AT, sizeof(uint32_t));
	cursor_put_u32(&c,
		       frame_checksum(frame, WIRE_HEADER_BYTES + h->body_len, h->flags));
}

static int frame_judge(const struct wire_header *h, size_t len)
{
	static const uint8_t nobody[sizeof(h->sender)]; /* target of a HELLO */
	const struct row *row = wire_row_of(h->type);

	if (h->body_len != len - WIRE_HEADER_BYTES)
		return err_raise(ERR_PROTO,
				 "frame: body length %u in a frame of %zu bytes",
				 h->body_len, len);
	if (!row)
		return err_raise(ERR_PROTO, "frame: unknown message type %u", h->type);
	if (h->body_len > row->cap)
		return err_raise(ERR_PROTO, "%s: body of %u bytes; at most %u", row->name,
				 h->body_len, row->cap);
	if (h->version < 1 ||
	    (h->type != WIRE_T_HELLO && h->type != WIRE_T_WELCOME &&
	     h->type != WIRE_T_BYE &&
	     (h->version < WIRE_VERSION_MIN || h->version > WIRE_VERSION_MAX)))
		return err_raise(ERR_VERSION,
				 "%s: version %u, this daemon speaks %u to %u", row->name,
				 h->version, WIRE_VERSION_MIN, WIRE_VERSION_MAX);
	if (memcmp(h->sender, nobody, sizeof(nobody)) == 0)
		return err_raise(ERR_PROTO, "%s: no sender instance", row->name);
	return 0;
}

int wire_frame_get(const uint8_t *frame, size_t len, struct wire_header *h_p,
		   struct cursor *body_p)
{
	struct cursor c;
	uint32_t magic, checksum;
	uint8_t rest = 0;
	int r;

	if (len < WIRE_HEADER_BYTES || len > WIRE_FRAME_MAX)
		return err_raise(ERR_PROTO, "frame: %zu bytes, must be %u to %u", len,
				 WIRE_HEADER_BYTES, WIRE_FRAME_MAX);
	cursor_read(&c, frame, len);
	magic = cursor_get_u32(&c);
	h_p->version = cursor_get_u16(&c);
	h_p->type = cursor_get_u16(&c);
	h_p->flags = cursor_get_u32(&c);
	get_id(&c, h_p->sender);
	get_id(&c, h_p->target);
	h_p->epoch = cursor_get_u64(&c);
	h_p->sequence = cursor_get_u64(&c);
	h_p->body_len = cursor_get_u32(&c);
	checksum = cursor_get_u32(&c);
	h_p->from_epoch = cursor_get_u64(&c);
	for (unsigned int i = 0; i < RESERVED_BYTES; i++)
		rest |= cursor_get_u8(&c);
	if (magic != WIRE_MAGIC)
		return err_raise(ERR_PROTO, "frame: magic number %08x is not kvd's",
				 magic);
	if (checksum != frame_checksum(frame, len, h_p->flags))
		return err_raise(ERR_PROTO, "frame: wrong checksum");
	if (rest)
		return err_raise(ERR_PROTO, "frame: reserved bytes are not zero");
	r = frame_judge(h_p, len);
	if (r < 0)
		return err_pass(r);
	cursor_read(body_p, frame + WIRE_HEADER_BYTES, h_p->body_len);
	return 0;
}
