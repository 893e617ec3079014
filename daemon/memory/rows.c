/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows: the inner loops of the copy threads.
 *
 * Rows of 16 to 256 bytes, which KV caches are made of, have loops with the
 * length built in: a call of memmove a row costs as much as the row.
 *
 * A copy that is larger than the caches pays for each byte three times: the source is
 * read, the destination's line is read to be owned, then written back. Non-temporal
 * stores leave the second out. glibc does that for one large memcpy only, never for many
 * small ones. They need whole lines: a row that starts or ends inside one has ordinary
 * stores there. Copies that fit the caches are better off in them, so the caller decides.
 *
 * One core has then one stream of misses to wait for, and, at the first line of each
 * page, a page walk that prefetch does not do for it. So four rows (or four pages of one
 * long row) are copied in parallel, a line of each in turn. A longer row waits for the
 * next one: while it is copied, the walks for the other's first pages proceed. Rows that
 * lie in many buffers in turn, as those of a page with a buffer a field, exceed the
 * processor's cache of the page table's upper levels. Stores of 64 bytes (AVX-512) are no
 * faster than of 32. Figures: docs/runs.
 *
 * Copying scattered short rows of cold memory is a matter of latency: a row of 256 bytes
 * is four misses, and out-of-order execution ends in the search for the next row. So a
 * row is copied ROWS_LATE rows after its lines were prefetched.
 */
#include "daemon/memory/rows.h"

#include <string.h>

#ifdef __x86_64__
#include <immintrin.h>
#define HAVE_STREAMING 1
#else
#define HAVE_STREAMING 0
#endif

#define LINE 64u
#define PAGE 4096u
#define LANE_ROW_MIN 1024u /* shorter ones are not worth the turns */
#define WALKS 8u	   /* pages of the next row that are walked for */
#define SHORT_ROW 64u	   /* many of these in a run are better off in a plain loop */

#define ROWS_OF(bytes)                                                 \
	static void rows_copy_##bytes(const struct rows *r)            \
	{                                                              \
		const uint8_t *src = r->src;                           \
		uint8_t *dst = r->dst;                                 \
                                                                       \
		for (uint64_t n = r->count; n > 0; n--) {              \
			for (unsigned int i = 0; i < (bytes); i += 16) \
				memmove(dst + i, src + i, 16);         \
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
/* The following is compiled twice, for 16 and for 32 bytes a store. */
static inline void line_sse2(uint8_t *dst, const uint8_t *src)
{
	__m128i a = _mm_loadu_si128((const void *)src);
	__m128i b = _mm_loadu_si128((const void *)(src + 16));
	__m128i c = _mm_loadu_si128((const void *)(src + 32));
	__m128i d = _mm_loadu_si128((const void *)(src + 48));

	_mm_stream_si128((void *)dst, a);
	_mm_stream_si128((void *)(dst + 16), b);
	_mm_stream_si128((void *)(dst + 32), c);
	_mm_stream_si128((void *)(dst + 48), d);
}

#define AVX2 __attribute__((target("avx2")))
AVX2 static inline void line_avx2(uint8_t *dst, const uint8_t *src)
{
	__m256i a = _mm256_loadu_si256((const void *)src);
	__m256i b = _mm256_loadu_si256((const void *)(src + 32));

	_mm256_stream_si256((void *)dst, a);
	_mm256_stream_si256((void *)(dst + 32), b);
}

/* In all of them dst and dst_stride are aligned to a line and len is a multiple
 * of it. lanes_*: four full lanes. */
#define STREAMING_OF(isa, target)                                                    \
	target static void lanes_##isa(const struct rows_lanes *l)                   \
	{                                                                            \
		uint8_t *d0 = l->dst[0], *d1 = l->dst[1], *d2 = l->dst[2],           \
			*d3 = l->dst[3];                                             \
		const uint8_t *s0 = l->src[0], *s1 = l->src[1], *s2 = l->src[2],     \
			      *s3 = l->src[3];                                       \
                                                                                     \
		for (uint64_t i = 0; i < l->len; i += LINE) {                        \
			line_##isa(d0 + i, s0 + i);                                  \
			line_##isa(d1 + i, s1 + i);                                  \
			line_##isa(d2 + i, s2 + i);                                  \
			line_##isa(d3 + i, s3 + i);                                  \
		}                                                                    \
	}                                                                            \
                                                                                     \
	target static void row_##isa(uint8_t *dst, const uint8_t *src, uint64_t len) \
	{                                                                            \
		for (uint64_t i = 0; i < len; i += LINE)                             \
			line_##isa(dst + i, src + i);                                \
	}
STREAMING_OF(sse2, )
STREAMING_OF(avx2, AVX2)

static bool baseline; /* set by tests, before there are threads */

static inline bool have_avx2(void)
{
	return !baseline && __builtin_cpu_supports("avx2");
}

static void lanes_stream(const struct rows_lanes *lanes)
{
	if (have_avx2())
		lanes_avx2(lanes);
	else
		lanes_sse2(lanes);
}

static void row_stream_lines(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	if (have_avx2())
		row_avx2(dst, src, len);
	else
		row_sse2(dst, src, len);
}

/* A row of whole lines, four pages of it at a time. */
static void row_stream_long(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	struct rows_lanes lanes = {.len = PAGE};

	for (; len >= ROWS_LANES * PAGE; len -= ROWS_LANES * PAGE)
		for (unsigned int i = 0; i < ROWS_LANES; i++) {
			lanes.dst[i] = dst;
			lanes.src[i] = src;
			dst += PAGE;
			src += PAGE;
			if (i == ROWS_LANES - 1)
				lanes_stream(&lanes);
		}
	row_stream_lines(dst, src, len);
}

/* Lines where they are whole, ordinary stores at both ends. */
static void rows_stream_ragged(const struct rows *r)
{
	const uint8_t *src = r->src;
	uint8_t *dst = r->dst;

	for (uint64_t n = r->count; n > 0; n--) {
		uint64_t head = -(uintptr_t)dst % LINE;
		uint64_t body = (r->len - head) / LINE * LINE;

		memmove(dst, src, head);
		row_stream_long(dst + head, src + head, body);
		memmove(dst + head + body, src + head + body, r->len - head - body);
		dst += r->dst_stride;
		src += r->src_stride;
	}
}

static void rows_stream_lanes(const struct rows *r, struct rows_lanes *lanes)
{
	const uint8_t *src = r->src;
	uint8_t *dst = r->dst;

	if (lanes->len != r->len)
		rows_end(lanes);
	lanes->len = r->len;
	for (uint64_t n = r->count; n > 0; n--) {
		lanes->dst[lanes->count] = dst;
		lanes->src[lanes->count++] = src;
		if (lanes->count == ROWS_LANES) {
			lanes_stream(lanes);
			lanes->count = 0;
		}
		dst += r->dst_stride;
		src += r->src_stride;
	}
}

/* Page walks of a long row's source: one starts with each prefetch, so that they are done
 * when the row is copied. */
static void rows_walk(const struct rows *r)
{
	uint64_t len = r->len < WALKS * PAGE ? r->len : WALKS * PAGE;

	for (uint64_t i = 0; i < len; i += PAGE)
		__builtin_prefetch((const uint8_t *)r->src + i);
}

/* One call later. */
static void rows_stream_late(const struct rows *r, struct rows_lanes *lanes)
{
	rows_walk(r);
	if (lanes->next.count)
		rows_stream_ragged(&lanes->next);
	lanes->next = *r;
}

static void rows_stream(const struct rows *r, bool lines, struct rows_lanes *lanes)
{
	if (!lines || r->len >= ROWS_LANES * PAGE)
		rows_stream_late(r, lanes);
	else
		rows_stream_lanes(r, lanes);
}
#else
static void row_stream_lines(uint8_t *dst, const uint8_t *src, uint64_t len)
{
	memmove(dst, src, len);
}
#endif

/* A row whose lines have been fetched, or none: of no bytes. With the length built in: a
 * call costs as much as the row. */
static inline void late_copy(const struct rows_lanes *lanes, const struct rows_late *late)
{
	if (lanes->streaming && ((uintptr_t)late->dst | late->len) % LINE == 0)
		row_stream_lines(late->dst, late->src, late->len);
	else if (late->len == 256)
		memmove(late->dst, late->src, 256);
	else if (late->len == 128)
		memmove(late->dst, late->src, 128);
	else if (late->len)
		memmove(late->dst, late->src, late->len);
}

static void rows_fetch(const struct rows *r, struct rows_lanes *lanes)
{
	const uint8_t *src = r->src;
	uint8_t *dst = r->dst;

	for (uint64_t n = r->count; n > 0; n--) {
		struct rows_late *late = &lanes->late[lanes->turn++ % ROWS_LATE];

		for (uint64_t i = 0; i < r->len; i += LINE)
			__builtin_prefetch(src + i);
		late_copy(lanes, late);
		*late = (struct rows_late){dst, src, r->len};
		dst += r->dst_stride;
		src += r->src_stride;
	}
}

/* Rows that follow each other on both sides are one. */
static struct rows rows_merged(const struct rows *rows)
{
	struct rows r = *rows;

	if (r.count > 1 && (uint64_t)r.dst_stride == r.len &&
	    (uint64_t)r.src_stride == r.len) {
		r.len *= r.count;
		r.count = 1;
	}
	if (r.count == 1) { /* strides are not used, and may be anything */
		r.dst_stride = 0;
		r.src_stride = 0;
	}
	return r;
}

static void rows_store(const struct rows *r)
{
	switch (r->len) {
	case 16:
		rows_copy_16(r);
		return;
	case 32:
		rows_copy_32(r);
		return;
	case 64:
		rows_copy_64(r);
		return;
	case 128:
		rows_copy_128(r);
		return;
	case 256:
		rows_copy_256(r);
		return;
	default:
		rows_copy_any(r);
	}
}

void rows_put(const struct rows *rows, struct rows_lanes *lanes)
{
	struct rows r = rows_merged(rows);
	bool lines = lanes->streaming &&
		     ((uintptr_t)r.dst | (uint64_t)r.dst_stride | r.len) % LINE == 0;

	if (r.count == 0 || r.len == 0)
		return;
	if (r.len < LANE_ROW_MIN && (lines || r.len > SHORT_ROW || r.count <= ROWS_LATE))
		rows_fetch(&r, lanes);
#if HAVE_STREAMING
	else if (r.len >= LANE_ROW_MIN && lanes->streaming)
		rows_stream(&r, lines, lanes);
#endif
	else
		rows_store(&r);
}

void rows_end(struct rows_lanes *lanes)
{
#if HAVE_STREAMING
	for (unsigned int i = 0; i < lanes->count; i++)
		row_stream_lines(lanes->dst[i], lanes->src[i], lanes->len);
	if (lanes->next.count)
		rows_stream_ragged(&lanes->next);
#endif
	lanes->count = 0;
	lanes->next.count = 0;
	for (unsigned int i = 0; i < ROWS_LATE; i++) {
		late_copy(lanes, &lanes->late[i]);
		lanes->late[i].len = 0;
	}
}

void rows_copy(const struct rows *rows)
{
	struct rows r = rows_merged(rows);

	if (r.count > 0 && r.len > 0)
		rows_store(&r);
}

void rows_fence(void)
{
#if HAVE_STREAMING
	_mm_sfence(); /* unlocking a mutex does not order non-temporal stores */
#endif
}

void rows_use_baseline(bool on)
{
#if HAVE_STREAMING
	baseline = on;
#else
	(void)on;
#endif
}
