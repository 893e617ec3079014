/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cursor: the one bounded reader and writer of wire bytes, little-endian.
 *
 * A cursor that once ran out of room or of input stays `bad`: getters give 0,
 * putters do nothing, and the caller checks once at the end with
 * cursor_check(). Lengths are read with a cap, so nothing is allocated on a
 * peer's claim alone.
 */
#ifndef KVD_BASE_CURSOR_H
#define KVD_BASE_CURSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct cursor {
	uint8_t *base;	  /* written through only by a cursor_write() cursor */
	size_t pos, size; /* bytes */
	bool bad;
};

void cursor_read(struct cursor *c, const void *base, size_t size);
void cursor_write(struct cursor *c, void *base, size_t size);
static inline size_t cursor_left(const struct cursor *c)
{
	return c->bad ? 0 : c->size - c->pos;
}
/* 0, or ERR_PROTO ("<what>: message too short" / ERR_TOOBIG when writing). */
int cursor_check(const struct cursor *c, const char *what);

uint8_t cursor_get_u8(struct cursor *c);
uint16_t cursor_get_u16(struct cursor *c);
uint32_t cursor_get_u32(struct cursor *c);
uint64_t cursor_get_u64(struct cursor *c);
/* `len` bytes in place, or NULL (then bad). */
const void *cursor_get_bytes(struct cursor *c, size_t len);
/* u16 length + bytes, copied with a NUL; bad when len >= cap or a NUL is inside. */
void cursor_get_str(struct cursor *c, char *dst, size_t cap);
/* u32 length + bytes in place; bad when over cap. */
const void *cursor_get_blob(struct cursor *c, size_t cap, size_t *len_p);
/* A u32 count of records of at least `min_record` bytes: bad when over cap or more than
 * the remaining bytes could hold. */
uint32_t cursor_get_count(struct cursor *c, uint32_t cap, size_t min_record);

void cursor_put_u8(struct cursor *c, uint8_t v);
void cursor_put_u16(struct cursor *c, uint16_t v);
void cursor_put_u32(struct cursor *c, uint32_t v);
void cursor_put_u64(struct cursor *c, uint64_t v);
/* Source and destination may be the same. */
void cursor_put_bytes(struct cursor *c, const void *p, size_t len);
/* Space for `len` bytes that the caller writes in place, or NULL (then bad). */
uint8_t *cursor_put_room(struct cursor *c, size_t len);
void cursor_put_str(struct cursor *c, const char *s); /* bad over 65535 bytes */
void cursor_put_blob(struct cursor *c, const void *p, size_t len);

/* The start of an address, or of a connection's first message: ERR_PROTO ("<name>: not
 * kvd's protocol"), ERR_VERSION. */
void cursor_put_format(struct cursor *c, uint32_t magic, uint16_t version);
int cursor_get_format(struct cursor *c, const char *what, uint32_t magic,
		      uint16_t version);

/* One list of the members of a struct serves both directions, so that their orders cannot
 * differ: #define LIST(F) F(64, room) F(8, last) … Its users name the cursor `c`, and the
 * struct `m`. */
#define CURSOR_PUT(bits, member) cursor_put_u##bits(c, (uint##bits##_t)m->member);
#define CURSOR_GET(bits, member) m->member = cursor_get_u##bits(c);

#endif
