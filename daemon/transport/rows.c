/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows: the inner loops of the copy threads.
 *
 * Rows of 16 to 256 bytes, which KV caches are made of, have loops with the
 * length built in: a call of memmove a row costs as much as the row.
 *
 * A copy that is larger than the caches pays for each byte three times: the
 * source is read, the destination's line is read to be owned, then written
 * back. Non-temporal stores leave the second out. glibc does that for one large
 * memcpy only, never for many small ones; measured here, on 64 MiB: 1.2 times
 * as fast at 64 KiB a row, 1.3 at 4 KiB, 2 at 1 KiB and below. They need whole
 * lines: a row that begins or ends inside one has ordinary stores there. Copies
 * that fit the caches are better off in them, so the caller decides.
 */
#include "daemon/transport/rows.h"

#include <string.h>

#ifdef __x86_64__
#include <emmintrin.h>
#define HAVE_STREAMING 1
#else
#define HAVE_STREAMING 0
#endif

#define LINE 64u
#define AHEAD 4 /* rows: hardware prefetch does not follow strides over pages */

#define ROWS_OF(bytes)                                                 \
	static void rows_copy_##bytes(const struct rows *r)            \
	{                                                              \
		const uint8_t *src = r->src;                           \
		uint8_t *dst = r->dst;                                 \
                                                                       \
		for (uint64_t n = r->count; n > 0; n--) {              \
			for (unsigned int i = 0; i < (bytes); i += 16) \
				memcpy(dst + i, src + i, 16);          \
			dst += r->dst_stride;                          \
			src += r->src_stride;                          \
		}                                                      \
	}
ROWS_OF(16)
ROWS_OF(32)
ROWS_OF(64)
ROWS_OF(128)
ROWS_OF(256)

static void rows_copy_any(const struct rows *r)
{
	const uint8_t *src = r->src;
	uint8_t *dst = r->dst;

	for (uint64_t n = r->count; n > 0; n--) {
		memmove(dst, src, r->len);
		dst += r->dst_stride;
		src += r->src_stride;
	}
}

#if HAVE_STREAMING
/* dst is aligned to a line, len is a multiple of it. */
static inline void lines_stream(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	for (uint64_t i = 0; i < len; i += LINE) {
		__m128i a = _mm_loadu_si128((const void *)(src + i));
		__m128i b = _mm_loadu_si128((const void *)(src + i + 16));
		__m128i c = _mm_loadu_si128((const void *)(src + i + 32));
		__m128i d = _mm_loadu_si128((const void *)(src + i + 48));

		_mm_stream_si128((void *)(dst + i), a);
		_mm_stream_si128((void *)(dst + i + 16), b);
		_mm_stream_si128((void *)(dst + i + 32), c);
		_mm_stream_si128((void *)(dst + i + 48), d);
	}
}

static void rows_stream_lines(const struct rows *r)
{
	const uint8_t *src = r->src;
	uint8_t *dst = r->dst;

	for (uint64_t n = r->count; n > 0; n--) {
		if (n > AHEAD)
			for (uint64_t i = 0; i < r->len && i < 4 * LINE; i += LINE)
				__builtin_prefetch(src + AHEAD * r->src_stride + i);
		lines_stream(dst, src, r->len);
		dst += r->dst_stride;
		src += r->src_stride;
	}
}

static void rows_stream_any(const struct rows *r)
{
	const uint8_t *src = r->src;
	uint8_t *dst = r->dst;

	for (uint64_t n = r->count; n > 0; n--) {
		uint64_t head = -(uintptr_t)dst % LINE;
		uint64_t body = (r->len - head) / LINE * LINE;

		memmove(dst, src, head);
		lines_stream(dst + head, src + head, body);
		memmove(dst + head + body, src + head + body, r->len - head - body);
		dst += r->dst_stride;
		src += r->src_stride;
	}
}

static bool rows_stream(const struct rows *r)
{
	bool lines = ((uintptr_t)r->dst | (uint64_t)r->dst_stride | r->len) % LINE == 0;

	if (r->len >= LINE && lines)
		rows_stream_lines(r);
	else if (r->len >= 16 * LINE)
		rows_stream_any(r);
	else
		return false;
	return true;
}
#endif

void rows_copy(const struct rows *rows, bool streaming)
{
	struct rows r = *rows;

	if (r.count == 0 || r.len == 0)
		return;
	if ((r.count > 1 && (uint64_t)r.dst_stride == r.len &&
	     (uint64_t)r.src_stride == r.len)) {
		r.len *= r.count;
		r.count = 1;
	}
	if (r.count == 1) { /* strides are not used, and may be anything */
		r.dst_stride = 0;
		r.src_stride = 0;
	}
#if HAVE_STREAMING
	if (streaming && rows_stream(&r))
		return;
#else
	(void)streaming;
#endif
	switch (r.len) {
	case 16:
		rows_copy_16(&r);
		return;
	case 32:
		rows_copy_32(&r);
		return;
	case 64:
		rows_copy_64(&r);
		return;
	case 128:
		rows_copy_128(&r);
		return;
	case 256:
		rows_copy_256(&r);
		return;
	default:
		rows_copy_any(&r);
	}
}

void rows_fence(void)
{
#if HAVE_STREAMING
	_mm_sfence(); /* unlocking a mutex does not order non-temporal stores */
#endif
}
