/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Lists are kept as they came: an engine that names a grid by one strided entry
 * pays for one entry here, on the wire and at every resolution; one that names
 * a million rows pays for a million entries once, and for indices afterwards.
 *
 * Every entry must lie in one region as a whole. Which region: the innermost
 * that holds it, so that a sub-range registered on its own wins.
 */
#include "daemon/dlist.h"

#include <assert.h>
#include <errno.h>
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/region.h"
#include "daemon/session.h"

#define INDEX_ALL UINT32_MAX

/* Bytes from the first row's begin to the last row's end. */
static int entry_span(const struct dlist_entry *e, uint32_t i, uint64_t *span_p)
{
	uint64_t span, end;

	if (e->bytes == 0 || e->count == 0)
		return err_raise(ERR_INVAL, "descs[%u]: %s is 0", i,
				 e->bytes ? "count" : "length");
	if (e->count > 1 && e->stride < e->bytes)
		return err_raise(ERR_INVAL, "descs[%u]: stride %llu is below length %llu", i,
				 (unsigned long long)e->stride,
				 (unsigned long long)e->bytes);
	if (__builtin_mul_overflow(e->count - 1, e->count > 1 ? e->stride : 0, &span) ||
	    __builtin_add_overflow(span, e->bytes, &span) ||
	    __builtin_add_overflow(span, e->address, &end))
		return err_raise(ERR_RANGE, "descs[%u]: beyond 2^64", i);
	*span_p = span;
	return 0;
}

static int count_descs(struct dlist *dlist)
{
	for (uint32_t i = 0; i < dlist->entry_count; i++) {
		const struct dlist_entry *e = &dlist->entries[i];
		uint64_t span;
		int r = entry_span(e, i, &span);

		if (r < 0)
			return err_pass(r);
		dlist->first[i] = dlist->descs;
		if (e->count > DLIST_DESCS_MAX || dlist->descs > DLIST_DESCS_MAX - e->count)
			return err_raise(ERR_LIMIT, "descs[%u]: more than %llu descriptors",
					 i, (unsigned long long)DLIST_DESCS_MAX);
		dlist->descs += e->count;
	}
	dlist->first[dlist->entry_count] = dlist->descs;
	return 0;
}

int dlist_new(struct dlist_entry *entries, uint32_t entry_count, uint64_t gid,
	      struct dlist **dlist_p)
{
	struct dlist *dlist = mem_zalloc(sizeof(*dlist));
	int r = -ENOMEM;

	if (!dlist) {
		mem_free(entries);
		return err_pass(r);
	}
	dlist->gid = gid;
	dlist->entries = entries;
	dlist->entry_count = entry_count;
	dlist->first = mem_calloc((size_t)entry_count + 1, sizeof(*dlist->first));
	if (dlist->first)
		r = count_descs(dlist);
	if (r < 0) {
		dlist_free(dlist);
		return err_pass(r);
	}
	*dlist_p = dlist;
	return 0;
}

void dlist_free(struct dlist *dlist)
{
	if (!dlist)
		return;
	if (dlist->places)
		places_unref(dlist->places);
	mem_free(dlist->entries);
	mem_free(dlist->first);
	mem_free(dlist);
}

/* ---- resolution ---- */

struct places *places_ref(struct places *places)
{
	places->refs++;
	return places;
}

void places_unref(struct places *places)
{
	if (--places->refs > 0)
		return;
	for (uint32_t i = 0; places->regions && i < places->buffer_count; i++) {
		if (places->regions[i])
			region_unpin(places->regions[i]);
	}
	if (places->pool)
		handshake_pool_unuse(places->pool);
	mem_free(places->regions);
	mem_free(places->buffers);
	mem_free(places->at);
	mem_free(places);
}

static struct places *places_new(const struct dlist *dlist, uint32_t buffers)
{
	static uint64_t serial; /* loop thread only, as all of this */
	struct places *places = mem_zalloc(sizeof(*places));

	if (!places)
		return NULL;
	places->refs = 1;
	places->serial = ++serial;
	places->at = mem_calloc(dlist->entry_count, sizeof(*places->at));
	places->buffers = mem_calloc(buffers, sizeof(*places->buffers));
	places->regions = mem_calloc(buffers, sizeof(*places->regions));
	if (!places->at || !places->buffers || !places->regions) {
		places_unref(places);
		return NULL;
	}
	return places;
}

/* The buffer number of a region; a new one pins it. */
static int buffer_of(struct places *places, struct region *region, unsigned int transport,
		     uint32_t *buffer_p)
{
	uint32_t i;

	for (i = 0; i < places->buffer_count; i++) {
		if (places->regions[i] == region) {
			*buffer_p = i;
			return 0;
		}
	}
	if (!region->regs[transport])
		return err_raise(ERR_IMPORT, "region %llu (%s) cannot be used with this "
				 "peer's transport", (unsigned long long)region->id,
				 region_kind_name(region->kind));
	region_pin(region);
	places->regions[i] = region;
	places->buffers[i].reg = region->regs[transport];
	places->buffers[i].length = region->length;
	places->buffer_count++;
	*buffer_p = i;
	return 0;
}

static int not_found(const struct dlist_entry *e, uint32_t i, uint64_t span)
{
	return err_raise(ERR_NOTFOUND, "descs[%u]: [%#llx, +%llu) is not registered", i,
			 (unsigned long long)e->address, (unsigned long long)span);
}

static int resolve_local(const struct dlist *dlist, struct session *session,
			 unsigned int transport, struct places *places)
{
	struct region *region = NULL;

	for (uint32_t i = 0; i < dlist->entry_count; i++) {
		const struct dlist_entry *e = &dlist->entries[i];
		uint64_t span = 0;
		int r = entry_span(e, i, &span);

		if (r >= 0)
			region = region_at(session, e->address, span);
		if (r < 0 || !region)
			return r < 0 ? err_pass(r) : not_found(e, i, span);
		r = buffer_of(places, region, transport, &places->at[i].buffer);
		if (r < 0)
			return err_pass(r);
		places->at[i].offset = e->address - region->address;
	}
	return 0;
}

static void set_latest(struct dlist *dlist, struct places *places)
{
	if (dlist->places)
		places_unref(dlist->places);
	dlist->places = places_ref(places);
}

int dlist_resolve_local(struct dlist *dlist, struct session *session, uint64_t version,
			unsigned int transport_index, struct places **places_p)
{
	struct places *places = dlist->places;
	uint32_t regions = (uint32_t)idmap_count(&session->regions);
	int r;

	if (places && places->version == version &&
	    places->transport_index == transport_index) {
		*places_p = places_ref(places);
		return 0;
	}
	places = places_new(dlist, regions);
	if (!places)
		return err_pass(-ENOMEM);
	places->version = version;
	places->transport_index = transport_index;
	r = resolve_local(dlist, session, transport_index, places);
	if (r < 0) {
		places_unref(places);
		return err_pass(r);
	}
	set_latest(dlist, places);
	*places_p = places;
	return 0;
}

static const struct remote_region *region_in(const struct remote_pool *pool,
					     const struct dlist_entry *e, uint64_t span)
{
	const struct remote_region *best = NULL;

	for (uint32_t i = 0; i < pool->region_count; i++) {
		const struct remote_region *r = &pool->regions[i];

		if (r->address && e->address >= r->address && span <= r->length &&
		    e->address - r->address <= r->length - span &&
		    (!best || r->length < best->length))
			best = r;
	}
	return best;
}

static int resolve_remote(const struct dlist *dlist, const struct remote_pool *pool,
			  struct places *places)
{
	const struct remote_region *region = NULL;

	for (uint32_t i = 0; i < dlist->entry_count; i++) {
		const struct dlist_entry *e = &dlist->entries[i];
		uint64_t span = 0;
		int r = entry_span(e, i, &span);

		if (r < 0)
			return err_pass(r);
		/* neighbours mostly share a region */
		if (!region || e->address < region->address ||
		    e->address - region->address > region->length ||
		    span > region->length - (e->address - region->address))
			region = region_in(pool, e, span);
		if (!region)
			return not_found(e, i, span);
		places->at[i].buffer = (uint32_t)(region - pool->regions);
		places->at[i].offset = e->address - region->address;
	}
	return 0;
}

int dlist_resolve_remote(struct dlist *dlist, struct remote_pool *pool,
			 struct places **places_p)
{
	struct places *places = dlist->places;
	int r;

	if (places && places->pool == pool) {
		*places_p = places_ref(places);
		return 0;
	}
	places = places_new(dlist, pool->region_count);
	if (!places)
		return err_pass(-ENOMEM);
	places->pool = pool;
	handshake_pool_use(pool);
	places->buffer_count = pool->region_count;
	for (uint32_t i = 0; i < pool->region_count; i++) {
		places->buffers[i].key = pool->regions[i].key;
		places->buffers[i].length = pool->regions[i].length;
	}
	r = resolve_remote(dlist, pool, places);
	if (r < 0) {
		places_unref(places);
		return err_pass(r);
	}
	set_latest(dlist, places);
	*places_p = places;
	return 0;
}

/* ---- picking ---- */

/* The entry that holds descriptor `i`; `hint` is where the last one was. */
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
		return err_raise(ERR_INVAL, "nothing is picked of the %s list",
				 src->count ? "destination's" : "source's");
	if (src->count != dst->count)
		return err_raise(ERR_INVAL, "%llu descriptors of the source for %llu of the "
				 "destination", (unsigned long long)src->count,
				 (unsigned long long)dst->count);
	return 0;
}

static int check_row(const struct dlist_pick *src, const struct dlist_pick *dst, uint64_t k,
		     uint32_t *s_p, uint32_t *d_p)
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
		return err_raise(ERR_INVAL, "row %llu: %llu bytes of the source for %llu of "
				 "the destination", (unsigned long long)k,
				 (unsigned long long)s->bytes, (unsigned long long)d->bytes);
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
	       struct plan **plan_p)
{
	struct plan_builder *builder = NULL;
	uint32_t s = 0, d = 0;
	int r = check_counts(src, dst);

	if (r >= 0)
		r = plan_builder_new(&builder);
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

static uint64_t runs_of(const struct dlist_pick *pick)
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
	runs = runs_of(pick);
	return 8 + (runs * 2 < pick->count ? runs * 8 : pick->count * 4);
}

void dlist_index_put(struct cursor *out, const struct dlist_pick *pick)
{
	uint64_t runs;

	if (!pick->index) {
		cursor_put_u32(out, INDEX_ALL);
		return;
	}
	runs = runs_of(pick);
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

static int get_runs(struct cursor *in, uint32_t runs, uint64_t count, uint32_t *index)
{
	uint64_t k = 0;

	for (uint32_t i = 0; i < runs; i++) {
		uint64_t first = cursor_get_u32(in), n = cursor_get_u32(in);

		if (in->bad || n == 0 || n > count - k || first + n > UINT32_MAX)
			return err_raise(ERR_PROTO, "index list: run %u does not fit", i);
		while (n--)
			index[k++] = (uint32_t)first++;
	}
	return k == count ? 0 : err_raise(ERR_PROTO, "index list: runs give %llu of %llu",
					  (unsigned long long)k, (unsigned long long)count);
}

int dlist_index_get(struct cursor *in, uint64_t max, uint32_t **index_p, uint64_t *count_p)
{
	uint32_t count = cursor_get_u32(in), runs;
	uint32_t *index;
	int r = 0;

	*index_p = NULL;
	if (count == INDEX_ALL) {
		*count_p = INDEX_ALL;
		return cursor_check(in, "index list");
	}
	runs = cursor_get_u32(in);
	if (in->bad || count > max || cursor_left(in) / (runs ? 8 : 4) < (runs ? runs : count))
		return err_raise(ERR_PROTO, "index list: %u entries, at most %llu", count,
				 (unsigned long long)max);
	index = mem_calloc(count, sizeof(*index));
	if (!index)
		return err_pass(-ENOMEM);
	if (runs)
		r = get_runs(in, runs, count, index);
	for (uint32_t k = 0; !runs && k < count; k++)
		index[k] = cursor_get_u32(in);
	if (r < 0) {
		mem_free(index);
		return err_pass(r);
	}
	*index_p = index;
	*count_p = count;
	return 0;
}
