/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists are kept as given: an engine that names a grid by one strided entry pays for one
 * entry here, on the wire and at every resolution; one that names a million rows pays for
 * a million entries once, and for indices afterwards. The location of the rows:
 * daemon/xfer/search.c.
 */
#include "daemon/xfer/dlist.h"

#include <assert.h>
#include <errno.h>

#include "daemon/base/mem.h"
#include "daemon/session/region.h"
#include "daemon/xfer/search.h"

#define INDEX_ALL UINT32_MAX
#define GRID_MIN 8u /* rows: below, a binary search does not pay off */

/* Bytes from the start of the first row to the end of the last. */
int dlist_entry_span(const struct dlist_entry *e, uint32_t i, uint64_t *span_p)
{
	uint64_t span, end;

	if (e->bytes == 0 || e->count == 0)
		return err_raise(ERR_INVAL, "descs[%u]: %s is 0", i,
				 e->bytes ? "count" : "length");
	if (e->count > 1 && e->stride < e->bytes)
		return err_raise(ERR_INVAL, "descs[%u]: stride %llu is below length %llu",
				 i, (unsigned long long)e->stride,
				 (unsigned long long)e->bytes);
	if (__builtin_mul_overflow(e->count - 1, e->count > 1 ? e->stride : 0, &span) ||
	    __builtin_add_overflow(span, e->bytes, &span) ||
	    __builtin_add_overflow(span, e->address, &end))
		return err_raise(ERR_RANGE, "descs[%u]: beyond 2^64", i);
	*span_p = span;
	return 0;
}

int dlist_begin(uint32_t entry_count, uint64_t gid, struct dlist **dlist_p)
{
	struct dlist *dlist = mem_zalloc(sizeof(*dlist));

	if (!dlist)
		return err_pass(-ENOMEM);
	dlist->gid = gid;
	dlist->entry_count = entry_count;
	dlist->entries = mem_calloc(entry_count, sizeof(*dlist->entries));
	dlist->first = mem_calloc((size_t)entry_count + 1, sizeof(*dlist->first));
	if (!dlist->entries || !dlist->first) {
		dlist_free(dlist);
		return err_pass(-ENOMEM);
	}
	*dlist_p = dlist;
	return 0;
}

int dlist_put(struct dlist *dlist, uint32_t i, const struct dlist_entry *e)
{
	uint64_t span;
	int r = dlist_entry_span(e, i, &span);

	assert(i < dlist->entry_count);
	if (r < 0)
		return err_pass(r);
	if (e->count > DLIST_DESCS_MAX || dlist->descs > DLIST_DESCS_MAX - e->count)
		return err_raise(ERR_LIMIT, "descs[%u]: more than %llu descriptors", i,
				 (unsigned long long)DLIST_DESCS_MAX);
	dlist->entries[i] = *e;
	dlist->first[i] = dlist->descs;
	dlist->descs += e->count;
	dlist->first[i + 1] = dlist->descs;
	return 0;
}

int dlist_new(struct dlist_entry *entries, uint32_t entry_count, uint64_t gid,
	      struct dlist **dlist_p)
{
	struct dlist *dlist = NULL;
	int r = dlist_begin(entry_count, gid, &dlist);

	for (uint32_t i = 0; r >= 0 && i < entry_count; i++)
		r = dlist_put(dlist, i, &entries[i]);
	mem_free(entries);
	if (r < 0) {
		dlist_free(dlist);
		return err_pass(r);
	}
	*dlist_p = dlist;
	return 0;
}

/* Number of rows from the first on that form one grid. */
static uint32_t grid_rows(const struct dlist_entry *e, uint32_t count, uint64_t *stride_p)
{
	uint64_t stride;
	uint32_t n = 2;

	if (count < GRID_MIN || e[0].count != 1 || e[1].address < e[0].address)
		return 1;
	stride = e[1].address - e[0].address;
	if (stride < e[0].bytes || stride == 0)
		return 1;
	while (n < count && e[n].count == 1 && e[n].bytes == e[0].bytes &&
	       e[n].address - e[n - 1].address == stride)
		n++;
	if (e[1].count != 1 || e[1].bytes != e[0].bytes || n < GRID_MIN)
		return 1;
	*stride_p = stride;
	return n;
}

uint32_t dlist_squeeze(struct dlist_entry *entries, uint32_t entry_count)
{
	uint32_t out = 0;

	for (uint32_t i = 0, n; i < entry_count; i += n) {
		struct dlist_entry e = entries[i];

		n = grid_rows(&entries[i], entry_count - i, &e.stride);
		e.count = n > 1 ? n : e.count;
		entries[out++] = e;
	}
	return out;
}

bool dlist_of_files(const struct dlist *dlist)
{
	return dlist->entries[0].address >= REGION_FILE_ADDRESS;
}

void dlist_free(struct dlist *dlist)
{
	if (!dlist)
		return;
	if (dlist->places)
		places_unref(dlist->places);
	mem_free_large(dlist->entries, dlist->entry_count * sizeof(*dlist->entries));
	mem_free_large(dlist->first, dlist->entry_count * sizeof(*dlist->first));
	mem_free(dlist);
}

/* ---- picking ---- */

/* The entry that holds descriptor `i`; `hint` is the previous result. */
static uint32_t entry_at(const struct dlist *dlist, uint64_t i, uint32_t hint)
{
	uint32_t lo = 0, hi = dlist->entry_count;

	if (dlist->descs == dlist->entry_count)
		return (uint32_t)i; /* every entry is one row */
	if (i >= dlist->first[hint] && i < dlist->first[hint + 1])
		return hint;
	while (hi - lo > 1) {
		uint32_t mid = lo + (hi - lo) / 2;

		if (dlist->first[mid] <= i)
			lo = mid;
		else
			hi = mid;
	}
	return lo;
}

static uint64_t pick_at(const struct dlist_pick *pick, uint64_t k)
{
	return pick->index ? pick->index[k] : k;
}

static int check_counts(const struct dlist_pick *src, const struct dlist_pick *dst)
{
	if (src->count == 0 || dst->count == 0)
		return err_raise(ERR_INVAL, "no descriptor of the %s list is selected",
				 src->count ? "destination's" : "source's");
	if (src->count != dst->count)
		return err_raise(ERR_INVAL,
				 "%llu descriptors of the source for %llu of the "
				 "destination",
				 (unsigned long long)src->count,
				 (unsigned long long)dst->count);
	return 0;
}

static int check_row(const struct dlist_pick *src, const struct dlist_pick *dst,
		     uint64_t k, uint32_t *s_p, uint32_t *d_p)
{
	uint64_t si = pick_at(src, k), di = pick_at(dst, k);
	const struct dlist_entry *s, *d;

	if (si >= src->dlist->descs || di >= dst->dlist->descs)
		return err_raise(ERR_RANGE, "index %llu is outside the list's %llu",
				 (unsigned long long)(si >= src->dlist->descs ? si : di),
				 (unsigned long long)(si >= src->dlist->descs
							      ? src->dlist->descs
							      : dst->dlist->descs));
	*s_p = entry_at(src->dlist, si, *s_p);
	*d_p = entry_at(dst->dlist, di, *d_p);
	s = &src->dlist->entries[*s_p];
	d = &dst->dlist->entries[*d_p];
	if (s->bytes != d->bytes)
		return err_raise(ERR_INVAL,
				 "row %llu: %llu bytes of the source for %llu of "
				 "the destination",
				 (unsigned long long)k, (unsigned long long)s->bytes,
				 (unsigned long long)d->bytes);
	return 0;
}

int dlist_check_picks(const struct dlist_pick *src, const struct dlist_pick *dst)
{
	uint32_t s = 0, d = 0;
	int r = check_counts(src, dst);

	for (uint64_t k = 0; r >= 0 && k < src->count; k++)
		r = check_row(src, dst, k, &s, &d);
	return r;
}

static uint64_t row_offset(const struct dlist_pick *pick, uint64_t k, uint32_t entry)
{
	const struct dlist *dlist = pick->dlist;

	return pick->places->at[entry].offset +
	       (pick_at(pick, k) - dlist->first[entry]) * dlist->entries[entry].stride;
}

int dlist_plan(const struct dlist_pick *src, const struct dlist_pick *dst,
	       uint64_t max_bytes, struct plan **plan_p)
{
	struct plan_builder *builder = NULL;
	uint32_t s = 0, d = 0;
	int r = check_counts(src, dst);

	if (r >= 0)
		r = plan_builder_new(&builder);
	if (r >= 0)
		plan_builder_limit(builder, max_bytes);
	for (uint64_t k = 0; r >= 0 && k < src->count; k++) {
		struct plan_run run = {.count = 1};

		r = check_row(src, dst, k, &s, &d);
		if (r < 0)
			break;
		run.len = src->dlist->entries[s].bytes;
		run.src = row_offset(src, k, s);
		run.dst = row_offset(dst, k, d);
		run.src_buffer = src->places->at[s].buffer;
		run.dst_buffer = dst->places->at[d].buffer;
		r = plan_builder_add(builder, &run);
	}
	if (r >= 0)
		r = plan_builder_finish(builder, plan_p);
	plan_builder_free(builder);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- index lists on the wire ---- */

static uint64_t run_from(const struct dlist_pick *pick, uint64_t k)
{
	uint64_t n = 1;

	while (k + n < pick->count && pick->index[k + n] == pick->index[k] + n)
		n++;
	return n;
}

static uint64_t dlist_runs_of(const struct dlist_pick *pick)
{
	uint64_t runs = 0;

	for (uint64_t k = 0; k < pick->count; k += run_from(pick, k))
		runs++;
	return runs;
}

size_t dlist_index_bytes(const struct dlist_pick *pick)
{
	uint64_t runs;

	if (!pick->index)
		return 4;
	runs = dlist_runs_of(pick);
	return 8 + (runs * 2 < pick->count ? runs * 8 : pick->count * 4);
}

void dlist_index_put(struct cursor *out, const struct dlist_pick *pick)
{
	uint64_t runs;

	if (!pick->index) {
		cursor_put_u32(out, INDEX_ALL);
		return;
	}
	runs = dlist_runs_of(pick);
	cursor_put_u32(out, (uint32_t)pick->count);
	if (runs * 2 >= pick->count) {
		cursor_put_u32(out, 0);
		for (uint64_t k = 0; k < pick->count; k++)
			cursor_put_u32(out, pick->index[k]);
		return;
	}
	cursor_put_u32(out, (uint32_t)runs);
	for (uint64_t k = 0, n; k < pick->count; k += n) {
		n = run_from(pick, k);
		cursor_put_u32(out, pick->index[k]);
		cursor_put_u32(out, (uint32_t)n);
	}
}

/* A run of millions costs eight bytes to send: do the runs yield the declared number? */
static int check_runs(struct cursor in, uint32_t runs, uint64_t count)
{
	uint64_t k = 0;

	for (uint32_t i = 0; i < runs; i++) {
		uint64_t first = cursor_get_u32(&in), n = cursor_get_u32(&in);

		if (in.bad || n == 0 || n > count - k || first + n > UINT32_MAX)
			return err_raise(ERR_PROTO, "index list: run %u does not fit", i);
		k += n;
	}
	return k == count ? 0
			  : err_raise(ERR_PROTO,
				      "index list: runs yield %llu of %llu indices",
				      (unsigned long long)k, (unsigned long long)count);
}

static void get_runs(struct cursor *in, uint32_t runs, uint32_t *index)
{
	for (uint32_t i = 0; i < runs; i++) {
		uint32_t first = cursor_get_u32(in), n = cursor_get_u32(in);

		while (n--)
			*index++ = first++;
	}
}

int dlist_index_skip(struct cursor *in, const uint8_t **raw_p, size_t *len_p,
		     uint64_t *rows_p)
{
	struct cursor look = *in;
	uint32_t count = cursor_get_u32(&look), runs = 0;

	*len_p = 4;
	if (count != INDEX_ALL) {
		runs = cursor_get_u32(&look);
		*rows_p = count;
		*len_p = 8 + (runs ? (size_t)runs * 8 : (size_t)count * 4);
	}
	*raw_p = cursor_get_bytes(in, *len_p);
	return cursor_check(in, "index list");
}

int dlist_index_get(struct cursor *in, uint64_t max, uint32_t **index_p,
		    uint64_t *count_p)
{
	uint32_t count = cursor_get_u32(in), runs;
	uint32_t *index;
	int r;

	*index_p = NULL;
	if (count == INDEX_ALL) {
		*count_p = INDEX_ALL;
		return cursor_check(in, "index list");
	}
	runs = cursor_get_u32(in);
	if (in->bad || count > max ||
	    cursor_left(in) / (runs ? 8 : 4) < (runs ? runs : count))
		return err_raise(ERR_PROTO, "index list: %u entries, at most %llu", count,
				 (unsigned long long)max);
	r = runs ? check_runs(*in, runs, count) : 0;
	if (r < 0)
		return err_pass(r);
	index = mem_calloc(count, sizeof(*index));
	if (!index)
		return err_pass(-ENOMEM);
	get_runs(in, runs, index);
	for (uint32_t k = 0; !runs && k < count; k++)
		index[k] = cursor_get_u32(in);
	*index_p = index;
	*count_p = count;
	return 0;
}
