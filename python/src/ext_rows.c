/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptor rows in the engines' form, a million at a time: one pass, without Python.
 *
 * Engines name every block of every layer. Most of that is regular, and the daemon
 * takes regular rows as one entry (address, bytes, stride, count), so consecutive rows
 * at one distance are merged while they are checked. A run ends with its region: an
 * entry must lie in one. Short runs are kept as single rows, because a list of single
 * entries is indexed without a search.
 *
 * A row without bytes is legal (an engine's empty layer), and is never moved:
 * transfers leave such pairs out, and the daemon never receives one.
 */
#include "python/src/ext.h"

#include <string.h>

#define RUN_MIN 8u /* minimal rows of an entry */

void rows_fini(struct rows *rows)
{
	mem_free(rows->entries);
	mem_free(rows->first);
	memset(rows, 0, sizeof(*rows));
}

/* The bytes from the start of the first row to the end of the last; false: over 2^64. */
static bool entry_span(const struct kvd_desc *d, uint64_t *span_p)
{
	uint64_t span = 0, end;

	if (d->count > 1 && __builtin_mul_overflow(d->count - 1, d->stride, &span))
		return false;
	return !__builtin_add_overflow(span, d->bytes, span_p) &&
	       !__builtin_add_overflow(d->address, *span_p, &end);
}

/* A span that contains all of it; *hint: the last span found. */
static bool spans_hold(const struct span *spans, size_t count, uint64_t address,
		       uint64_t bytes, uint64_t device, size_t *hint)
{
	for (size_t n = 0, i = *hint; n < count; n++, i = i + 1 < count ? i + 1 : 0) {
		const struct span *s = &spans[i];

		if (device == s->device && address >= s->address && bytes <= s->bytes &&
		    address - s->address <= s->bytes - bytes) {
			*hint = i;
			return true;
		}
	}
	return false;
}

static enum rows_fault row_read(const uint64_t *row, unsigned int columns,
				struct kvd_desc *d_p, uint64_t *span_p)
{
	*d_p = (struct kvd_desc){.address = row[0], .bytes = row[1], .count = 1};
	if (columns == 5) {
		d_p->stride = row[3];
		d_p->count = row[4];
		if (d_p->count == 0 || (d_p->count > 1 && d_p->stride < d_p->bytes))
			return ROWS_STRIDE;
		if (d_p->count == 1)
			d_p->stride = 0;
	}
	if (d_p->bytes == 0 && columns == 5)
		return ROWS_EMPTY;
	return entry_span(d_p, span_p) ? ROWS_OK : ROWS_RANGE;
}

/* Number of single rows from `row` on at one distance in the span at *hint. */
static size_t run_of(const uint64_t *row, size_t left, const struct span *span)
{
	uint64_t bytes = row[1], stride;
	size_t n = 1;

	if (left < RUN_MIN || row[3] <= row[0] || bytes == 0)
		return 1;
	stride = row[3] - row[0];
	if (stride < bytes)
		return 1;
	for (; n < left; n++) {
		const uint64_t *at = row + 3 * n;

		if (at[1] != bytes || at[2] != row[2] || at[0] - at[-3] != stride ||
		    at[0] < at[-3] || at[0] - span->address > span->bytes - bytes)
			break;
	}
	return n >= RUN_MIN ? n : 1;
}

static enum rows_fault rows_fill(struct rows *rows, const uint64_t *table, size_t count,
				 unsigned int columns, const struct span *spans,
				 size_t span_count, size_t *at_p)
{
	uint64_t span = 0;
	size_t hint = 0;

	for (size_t i = 0; i < count;) {
		struct kvd_desc *d = &rows->entries[rows->count];
		const uint64_t *row = table + i * columns;
		enum rows_fault fault = row_read(row, columns, d, &span);

		*at_p = i;
		if (fault != ROWS_OK)
			return fault;
		if (!spans_hold(spans, span_count, d->address, span, row[2], &hint))
			return ROWS_RANGE;
		rows->empty += d->bytes == 0;
		if (columns == 3) {
			d->count = run_of(row, count - i, &spans[hint]);
			d->stride = d->count > 1 ? row[3] - row[0] : 0;
		}
		i += columns == 3 ? d->count : 1;
		rows->first[rows->count++] = rows->rows;
		if (d->count > (UINT64_C(1) << 32) - rows->rows)
			return ROWS_STRIDE;
		rows->rows += d->count;
		if (rows->count == 1)
			rows->bytes = d->bytes;
		else if (rows->bytes != d->bytes)
			rows->bytes = 0;
	}
	rows->first[rows->count] = rows->rows;
	return ROWS_OK;
}

enum rows_fault rows_make(struct rows *rows, const uint64_t *table, size_t count,
			  unsigned int columns, const struct span *spans,
			  size_t span_count, size_t *at_p)
{
	enum rows_fault fault = ROWS_NOMEM;
	void *less;

	memset(rows, 0, sizeof(*rows));
	*at_p = 0;
	rows->entries = mem_calloc(count ? count : 1, sizeof(*rows->entries));
	rows->first = mem_calloc(count + 1, sizeof(*rows->first));
	if (rows->entries && rows->first)
		fault = rows_fill(rows, table, count, columns, spans, span_count, at_p);
	if (fault != ROWS_OK) {
		rows_fini(rows);
		return fault;
	}
	less = mem_regrow(rows->entries, rows->count + !rows->count,
			  sizeof(*rows->entries));
	if (less)
		rows->entries = less;
	less = mem_regrow(rows->first, rows->count + 1, sizeof(*rows->first));
	if (less)
		rows->first = less;
	return ROWS_OK;
}

struct kvd_desc *rows_filled(const struct rows *rows)
{
	struct kvd_desc *out = mem_dup(rows->entries, rows->count * sizeof(*out));
	size_t good = 0;

	if (!out)
		return NULL;
	while (out[good].bytes == 0)
		good++;
	for (size_t i = 0; i < rows->count; i++)
		if (out[i].bytes == 0)
			out[i] = (struct kvd_desc){.address = out[good].address,
						   .bytes = out[good].bytes,
						   .count = 1};
	return out;
}

/* ---- index lists --------------------------------------------------------------------
 */

#define INDEX_LOOP(TYPE, NEGATIVE)                                 \
	do {                                                       \
		for (size_t i = 0; i < count; i++, at += stride) { \
			TYPE v;                                    \
			memcpy(&v, at, sizeof(v));                 \
			if ((NEGATIVE) || (uint64_t)v >= limit)    \
				return i;                          \
			out[i] = (uint32_t)v;                      \
		}                                                  \
		return SIZE_MAX;                                   \
	} while (0)

size_t rows_index(uint32_t *out, const void *in, size_t count, ptrdiff_t stride,
		  char kind, unsigned int size, uint64_t limit)
{
	const char *at = in;

	if (limit > UINT64_C(1) << 32)
		limit = UINT64_C(1) << 32;
	switch (kind == 'i' ? size : size + 16) {
	case 1:
		INDEX_LOOP(int8_t, v < 0);
	case 2:
		INDEX_LOOP(int16_t, v < 0);
	case 4:
		INDEX_LOOP(int32_t, v < 0);
	case 8:
		INDEX_LOOP(int64_t, v < 0);
	case 17:
		INDEX_LOOP(uint8_t, false);
	case 18:
		INDEX_LOOP(uint16_t, false);
	case 20:
		INDEX_LOOP(uint32_t, false);
	case 24:
		INDEX_LOOP(uint64_t, false);
	default:
		return 0;
	}
}

static size_t entry_at(const struct rows *rows, uint64_t row, size_t hint)
{
	size_t lo = 0, hi = rows->count;

	if (rows->rows == rows->count)
		return (size_t)row; /* every entry is one row */
	if (row >= rows->first[hint] && row < rows->first[hint + 1])
		return hint;
	while (hi - lo > 1) {
		size_t mid = lo + (hi - lo) / 2;

		if (rows->first[mid] <= row)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

size_t rows_lengths(const struct rows *a, const uint32_t *ai, const struct rows *b,
		    const uint32_t *bi, size_t count, uint64_t *bytes_p)
{
	size_t x = 0, y = 0;
	uint64_t bytes = 0;

	if (a->bytes && a->bytes == b->bytes) {
		*bytes_p = a->bytes * count;
		return SIZE_MAX;
	}
	for (size_t i = 0; i < count; i++) {
		x = entry_at(a, ai ? ai[i] : i, x);
		y = entry_at(b, bi ? bi[i] : i, y);
		if (a->entries[x].bytes != b->entries[y].bytes)
			return i;
		bytes += a->entries[x].bytes;
	}
	*bytes_p = bytes;
	return SIZE_MAX;
}

static uint64_t row_address(const struct rows *rows, uint64_t row, size_t *entry)
{
	*entry = entry_at(rows, row, *entry);
	return rows->entries[*entry].address +
	       (row - rows->first[*entry]) * rows->entries[*entry].stride;
}

size_t rows_merged(const struct rows *a, const uint32_t *ai, const struct rows *b,
		   const uint32_t *bi, size_t count)
{
	uint64_t a_end = 0, b_end = 0;
	size_t x = 0, y = 0, pieces = 0;

	for (size_t i = 0; i < count; i++) {
		uint64_t at = row_address(a, ai ? ai[i] : i, &x);
		uint64_t to = row_address(b, bi ? bi[i] : i, &y);

		pieces += i == 0 || at != a_end || to != b_end;
		a_end = at + a->entries[x].bytes;
		b_end = to + b->entries[y].bytes;
	}
	return pieces;
}

size_t rows_drop_empty(const struct rows *a, uint32_t *ai, uint32_t *bi, size_t count)
{
	size_t left = 0, x = 0;

	for (size_t i = 0; i < count; i++) {
		x = entry_at(a, ai[i], x);
		if (a->entries[x].bytes == 0)
			continue;
		ai[left] = ai[i];
		bi[left++] = bi[i];
	}
	return left;
}
