/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Every access goes through take(), the one place that compares with the end, and
 * compares the remaining length, never a sum that could wrap. Integers are copied, so
 * alignment does not matter, and byte-swapped on big-endian hosts. After the first fault
 * a cursor gives zeros: a decoder can read a whole message without a test per field and
 * check once at the end.
 */
#include "daemon/base/cursor.h"

#include <endian.h>
#include <string.h>

#include "daemon/base/err.h"

void cursor_read(struct cursor *c, const void *base, size_t size)
{
	/* getters never write through base */
	*c = (struct cursor){.base = (uint8_t *)(uintptr_t)base, .size = size};
}

void cursor_write(struct cursor *c, void *base, size_t size)
{
	*c = (struct cursor){.base = base, .size = size};
}

int cursor_check(const struct cursor *c, const char *what)
{
	if (!c->bad)
		return 0;
	return err_raise(ERR_PROTO,
			 "%s: a field exceeds its limit or the end, at byte %zu", what,
			 c->size);
}

/* Inlined with their constant, get_le() and put_le() are one load or store. */
#define INLINE static inline __attribute__((always_inline))

INLINE uint8_t *take(struct cursor *c, size_t len)
{
	uint8_t *p;

	if (c->bad || c->size - c->pos < len) {
		c->bad = true;
		return NULL;
	}
	p = c->base + c->pos;
	c->pos += len;
	return p;
}

INLINE uint64_t get_le(struct cursor *c, size_t bytes)
{
	const uint8_t *p = take(c, bytes);
	uint64_t v = 0;

	if (!p)
		return 0;
	memcpy(&v, p, bytes); /* the low bytes, wherever the host has them */
	return le64toh(v);
}

INLINE void put_le(struct cursor *c, uint64_t v, size_t bytes)
{
	uint8_t *p = take(c, bytes);

	if (!p)
		return;
	v = htole64(v);
	memcpy(p, &v, bytes);
}

uint8_t cursor_get_u8(struct cursor *c)
{
	return (uint8_t)get_le(c, 1);
}

uint16_t cursor_get_u16(struct cursor *c)
{
	return (uint16_t)get_le(c, 2);
}

uint32_t cursor_get_u32(struct cursor *c)
{
	return (uint32_t)get_le(c, 4);
}

uint64_t cursor_get_u64(struct cursor *c)
{
	return get_le(c, 8);
}

const void *cursor_get_bytes(struct cursor *c, size_t len)
{
	return take(c, len);
}

void cursor_get_str(struct cursor *c, char *dst, size_t cap)
{
	size_t len = cursor_get_u16(c);
	const uint8_t *p = NULL;

	dst[0] = '\0';
	if (len < cap)
		p = take(c, len);
	if (!p || memchr(p, 0, len)) {
		c->bad = true;
		return;
	}
	memcpy(dst, p, len);
	dst[len] = '\0';
}

const void *cursor_get_blob(struct cursor *c, size_t cap, size_t *len_p)
{
	size_t len = cursor_get_u32(c);
	const void *p = NULL;

	if (len <= cap)
		p = take(c, len);
	if (!p)
		c->bad = true;
	*len_p = p ? len : 0;
	return p;
}

uint32_t cursor_get_count(struct cursor *c, uint32_t cap, size_t min_record)
{
	uint32_t n = cursor_get_u32(c);

	if (n > cap || (min_record && n > cursor_left(c) / min_record)) {
		c->bad = true;
		return 0;
	}
	return n;
}

void cursor_put_u8(struct cursor *c, uint8_t v)
{
	put_le(c, v, 1);
}

void cursor_put_u16(struct cursor *c, uint16_t v)
{
	put_le(c, v, 2);
}

void cursor_put_u32(struct cursor *c, uint32_t v)
{
	put_le(c, v, 4);
}

void cursor_put_u64(struct cursor *c, uint64_t v)
{
	put_le(c, v, 8);
}

void cursor_put_bytes(struct cursor *c, const void *p, size_t len)
{
	uint8_t *dst = take(c, len);

	if (dst && len && dst != p) /* it may lie there already */
		memcpy(dst, p, len);
}

uint8_t *cursor_put_room(struct cursor *c, size_t len)
{
	return take(c, len);
}

void cursor_put_str(struct cursor *c, const char *s)
{
	size_t len = strlen(s);

	if (len > UINT16_MAX) {
		c->bad = true;
		return;
	}
	cursor_put_u16(c, (uint16_t)len);
	cursor_put_bytes(c, s, len);
}

void cursor_put_blob(struct cursor *c, const void *p, size_t len)
{
	if (len > UINT32_MAX) {
		c->bad = true;
		return;
	}
	cursor_put_u32(c, (uint32_t)len);
	cursor_put_bytes(c, p, len);
}

void cursor_put_format(struct cursor *c, uint32_t magic, uint16_t version)
{
	cursor_put_u32(c, magic);
	cursor_put_u16(c, version);
}

int cursor_get_format(struct cursor *c, const char *what, uint32_t magic,
		      uint16_t version)
{
	uint32_t their_magic = cursor_get_u32(c);
	uint16_t theirs = cursor_get_u16(c);

	if (c->bad || their_magic != magic)
		return err_raise(ERR_PROTO, "%s: not kvd's protocol", what);
	if (theirs != version)
		return err_raise(ERR_VERSION,
				 "%s: the peer's version %u, this daemon's %u", what,
				 theirs, version);
	return 0;
}
