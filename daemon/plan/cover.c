/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cover: assigns units to sources.
 *
 * For one field of one layer, each source holds intervals of units. Their ends, inside
 * the destination's own interval, cut it into cells; each cell is held by the same
 * sources throughout. Sources are visited in order of rank and take every free cell they
 * hold, which is "the lowest rank wins" without comparing sources with each other. A
 * `next free cell` forest makes that linear: n sources cost O(n log n) per field, for any
 * intervals.
 *
 * A field of one unit (MLA latent, MQA) that several sources hold is distributed instead:
 * holder number room % holders, in order of rank, takes it. So rooms load the replicas
 * evenly, and every layer of a room is read from the same rank.
 *
 * Sources of a view hold all tokens, or shards of one size and run. Each shard that
 * shares a token with the destination's is a cover of its own, of the sources that hold
 * it: their wants name the same units, and their shards the tokens.
 */
#include "daemon/plan/cover.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/plan/layout_private.h"
#include "daemon/plan/plan_private.h"

struct source {
	size_t index; /* in the caller's list */
	const struct layout *layout;
	const struct layout_view *view; /* the current destination view */
	size_t want_cap;
};

struct holder {
	size_t source; /* in rank order */
	uint32_t first;
	uint64_t end;
};

struct cover_work {
	struct source *sources; /* by rank */
	size_t source_count;
	struct holder *holders;
	size_t holder_count;
	uint64_t *cuts; /* cell i is [cuts[i], cuts[i + 1]) */
	size_t cut_count;
	size_t *next_free; /* forest over cells; a root is free */
	uint64_t room;
	struct token_shard shard; /* of the current sources */
	const struct layout *dst;
	struct cover *cover;
	/* the next step: of views[view], its source, or the layer of its shard */
	const struct layout_view **views;
	size_t view_count, view, source;
	uint32_t layer;
	const struct source *first; /* that has the view */
};

void cover_free(struct cover *cover)
{
	if (!cover)
		return;
	for (size_t i = 0; cover->per_source && i < cover->source_count; i++)
		mem_free(cover->per_source[i].wants);
	mem_free(cover->per_source);
	mem_free(cover);
}

void cover_freep(struct cover **cover_p)
{
	cover_free(*cover_p);
}

static int want_add(struct cover_work *w, size_t source, const struct plan_want *want)
{
	struct source *s = &w->sources[source];
	__auto_type per = &w->cover->per_source[s->index];
	struct plan_want *last = per->count ? &per->wants[per->count - 1] : NULL;

	if (last && last->view == want->view && last->layer == want->layer &&
	    last->field == want->field &&
	    (uint64_t)last->first_unit + last->units == want->first_unit) {
		last->units += want->units;
		return 0;
	}
	if (per->count == s->want_cap) {
		size_t cap = s->want_cap ? s->want_cap * 2 : 16;
		void *wants = mem_regrow(per->wants, cap, sizeof(*per->wants));

		if (!wants)
			return -err_errno(ERR_NOMEM);
		per->wants = wants;
		s->want_cap = cap;
	}
	per->wants[per->count++] = *want;
	return 0;
}

/* ---- one field ---- */

/* Sources of one rank that hold the same units would send them twice. Holders are in
 * order of rank, and of first unit within a rank. */
static int check_same_rank(const struct cover_work *w, const char *view, uint32_t layer,
			   const char *field)
{
	uint64_t end = 0;

	for (size_t i = 1; i < w->holder_count; i++) {
		const struct holder *a = &w->holders[i - 1], *b = &w->holders[i];
		uint32_t rank = w->sources[b->source].layout->rank;

		if (w->sources[a->source].layout->rank != rank) {
			end = 0;
			continue;
		}
		if (a->end > end)
			end = a->end;
		if (b->first < end)
			return err_raise(ERR_DUP,
					 "view %s layer %u field %s: two sources of rank "
					 "%u hold unit %u",
					 view, layer, field, rank, b->first);
	}
	return 0;
}

static int holder_compare(const struct cover_work *w, const struct holder *a,
			  const struct holder *b)
{
	uint32_t x = w->sources[a->source].layout->rank;
	uint32_t y = w->sources[b->source].layout->rank;

	if (x != y)
		return x < y ? -1 : 1;
	return (a->first > b->first) - (a->first < b->first);
}

static int holder_order(const void *a, const void *b, void *arg)
{
	return holder_compare(arg, a, b);
}

/* Find the sources that hold units of the destination's interval. */
static void find_holders(struct cover_work *w, uint32_t layer,
			 const struct layout_field *dst)
{
	uint64_t dst_end = (uint64_t)dst->first_unit + dst->units;
	bool in_order = true;

	w->holder_count = 0;
	for (size_t i = 0; i < w->source_count; i++) {
		const struct layout_view *view = w->sources[i].view;
		const struct layout_layer *l =
			view ? layout_layer_find(view, layer) : NULL;
		const struct layout_field *f = l ? layout_field_find(l, dst->name) : NULL;
		struct holder h;

		if (!f || f->units == 0 || view->shard.rank != w->shard.rank)
			continue;
		h = (struct holder){.source = i,
				    .first = f->first_unit,
				    .end = (uint64_t)f->first_unit + f->units};
		if (h.end <= dst->first_unit || h.first >= dst_end)
			continue;
		if (w->holder_count > 0 &&
		    holder_compare(w, &w->holders[w->holder_count - 1], &h) > 0)
			in_order = false;
		w->holders[w->holder_count++] = h;
	}
	if (!in_order)
		qsort_r(w->holders, w->holder_count, sizeof(*w->holders), holder_order,
			w);
}

static int u64_compare(const void *a, const void *b)
{
	uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

	return (x > y) - (x < y);
}

static void make_cells(struct cover_work *w, uint64_t first, uint64_t end)
{
	size_t n = 0, m = 0;

	w->cuts[n++] = first;
	w->cuts[n++] = end;
	for (size_t i = 0; i < w->holder_count; i++) {
		if (w->holders[i].first > first)
			w->cuts[n++] = w->holders[i].first;
		if (w->holders[i].end < end)
			w->cuts[n++] = w->holders[i].end;
	}
	qsort(w->cuts, n, sizeof(*w->cuts), u64_compare);
	for (size_t i = 0; i < n; i++)
		if (m == 0 || w->cuts[m - 1] != w->cuts[i])
			w->cuts[m++] = w->cuts[i];
	w->cut_count = m;
	for (size_t i = 0; i < m; i++)
		w->next_free[i] = i;
}

static size_t free_cell(struct cover_work *w, size_t cell)
{
	size_t root = cell;

	while (w->next_free[root] != root)
		root = w->next_free[root];
	while (w->next_free[cell] != root) {
		size_t next = w->next_free[cell];

		w->next_free[cell] = root;
		cell = next;
	}
	return root;
}

static size_t cell_of(const struct cover_work *w, uint64_t unit)
{
	size_t lo = 0, hi = w->cut_count;

	while (lo < hi) {
		size_t mid = lo + (hi - lo) / 2;

		if (w->cuts[mid] < unit)
			lo = mid + 1;
		else
			hi = mid;
	}
	return lo;
}

/* The last cut is the end of the last cell and means "none free". */
static int take_cells(struct cover_work *w, const struct holder *h, struct plan_want want)
{
	size_t none = w->cut_count - 1;
	size_t cell = free_cell(w, cell_of(w, h->first));

	while (cell < none && w->cuts[cell] < h->end) {
		int r;

		want.first_unit = (uint32_t)w->cuts[cell];
		want.units = (uint32_t)(w->cuts[cell + 1] - w->cuts[cell]);
		r = want_add(w, h->source, &want);
		if (r < 0)
			return err_pass(r);
		w->next_free[cell] = cell + 1;
		cell = free_cell(w, cell);
	}
	return 0;
}

static int raise_uncovered(const struct cover_work *w, const struct layout_view *view,
			   uint32_t layer, const char *field, size_t cell)
{
	char shard[48] = "";

	if (!token_shard_is_all(&w->shard))
		snprintf(shard, sizeof(shard), " of token shard %u of %u", w->shard.rank,
			 w->shard.size);
	return err_raise(ERR_COVER,
			 "view %s layer %u field %s units [%llu,%llu)%s: no source holds "
			 "them",
			 view->name, layer, field, (unsigned long long)w->cuts[cell],
			 (unsigned long long)w->cuts[cell + 1], shard);
}

static int cover_field(struct cover_work *w, const struct layout_view *view,
		       uint32_t layer, uint16_t index, const struct layout_field *dst)
{
	struct plan_want want = {
		.view = (uint16_t)(view - w->dst->views), .field = index, .layer = layer};
	size_t cell;
	int r;

	if (dst->units == 0)
		return 0;
	find_holders(w, layer, dst);
	r = check_same_rank(w, view->name, layer, dst->name);
	if (r < 0)
		return err_pass(r);
	make_cells(w, dst->first_unit, (uint64_t)dst->first_unit + dst->units);
	if (dst->total_units == 1 && w->holder_count > 1)
		return take_cells(w, &w->holders[w->room % w->holder_count], want);
	for (size_t i = 0; i < w->holder_count; i++) {
		r = take_cells(w, &w->holders[i], want);
		if (r < 0)
			return err_pass(r);
	}
	cell = free_cell(w, 0);
	if (cell < w->cut_count - 1)
		return raise_uncovered(w, view, layer, dst->name, cell);
	return 0;
}

/* ---- all of it ---- */

/* The view that a source has of this one, and its division of the tokens. */
static int find_view(struct cover_work *w, const struct layout_view *view,
		     struct source *source)
{
	const struct layout *src = source->layout;
	const struct token_shard *shard;
	int r;

	source->view = layout_view_find(src, view->name);
	if (!source->view)
		return 0;
	r = layout_view_compatible(view, source->view, &layout_from_destination);
	if (r < 0)
		return err_prefix(r, "destination and source of rank %u", src->rank);
	shard = &source->view->shard;
	if (!w->first) {
		w->first = source;
		w->shard = *shard;
		w->shard.rank = 0;
	}
	if (w->shard.size != shard->size || w->shard.run != shard->run)
		return err_raise(ERR_LAYOUT,
				 "view %s: sources of rank %u and %u divide the "
				 "tokens differently: shard.size %u and %u, run "
				 "%u and %u",
				 view->name, w->first->layout->rank, src->rank,
				 w->shard.size, shard->size, w->shard.run, shard->run);
	return 0;
}

static int cover_layer(struct cover_work *w, const struct layout_view *view,
		       const struct layout_layer *layer)
{
	for (uint32_t j = 0; j < layer->field_count; j++) {
		int r = cover_field(w, view, layer->layer, (uint16_t)j,
				    &layer->fields[j]);

		if (r < 0)
			return err_pass(r);
	}
	return 0;
}

static void next_shard(struct cover_work *w)
{
	w->layer = 0;
	if (++w->shard.rank < w->shard.size)
		return;
	w->view++;
	w->source = 0;
	w->first = NULL;
	w->shard = (struct token_shard){0};
}

int cover_step(struct cover_work *w)
{
	const struct layout_view *view = w->views[w->view];
	int r = 0;

	if (w->view == w->view_count)
		return 0;
	if (w->source < w->source_count)
		r = find_view(w, view, &w->sources[w->source++]);
	else if (w->layer < view->layer_count &&
		 token_shard_meet(&w->shard, &view->shard))
		r = cover_layer(w, view, &view->layers[w->layer++]);
	else
		next_shard(w);
	return r < 0 ? err_pass(r) : 1;
}

static int by_rank(const void *a, const void *b)
{
	const struct source *x = a, *y = b;

	if (x->layout->rank != y->layout->rank)
		return x->layout->rank < y->layout->rank ? -1 : 1;
	return (x->index > y->index) - (x->index < y->index);
}

static int find_dst_views(struct cover_work *w, const char *const *views, size_t count)
{
	w->views = mem_calloc(count + 1, sizeof(*w->views));
	if (!w->views)
		return err_pass(-ENOMEM);
	for (size_t i = 0; i < count; i++) {
		w->views[i] =
			views ? layout_view_find(w->dst, views[i]) : &w->dst->views[i];
		if (!w->views[i])
			return err_raise(ERR_INVAL, "views[%zu]: unknown view %.40s", i,
					 views[i]);
		for (size_t j = 0; j < i; j++)
			if (w->views[j] == w->views[i])
				return err_raise(ERR_INVAL, "views[%zu]: view %s twice",
						 i, views[i]);
	}
	w->view_count = count;
	return 0;
}

static int work_init(struct cover_work *w, const struct cover_source *sources,
		     size_t count)
{
	w->source_count = count;
	w->cover = mem_zalloc(sizeof(*w->cover));
	w->sources = mem_calloc(count, sizeof(*w->sources));
	w->holders = mem_calloc(count, sizeof(*w->holders));
	w->cuts = mem_calloc(2 * count + 2, sizeof(*w->cuts));
	w->next_free = mem_calloc(2 * count + 2, sizeof(*w->next_free));
	if (!w->cover || !w->sources || !w->holders || !w->cuts || !w->next_free)
		return -err_errno(ERR_NOMEM);
	w->cover->per_source = mem_calloc(count, sizeof(*w->cover->per_source));
	if (!w->cover->per_source)
		return -err_errno(ERR_NOMEM);
	w->cover->source_count = count;
	for (size_t i = 0; i < count; i++)
		w->sources[i] = (struct source){.index = i, .layout = sources[i].layout};
	qsort(w->sources, count, sizeof(*w->sources), by_rank);
	return 0;
}

void cover_end(struct cover_work *w)
{
	if (!w)
		return;
	cover_free(w->cover);
	mem_free(w->sources);
	mem_free(w->holders);
	mem_free(w->cuts);
	mem_free(w->next_free);
	mem_free(w->views);
	mem_free(w);
}

int cover_begin(const struct cover_source *sources, size_t source_count,
		const struct layout *dst, const char *const *views, size_t view_count,
		uint64_t room, struct cover_work **work_p)
{
	struct cover_work *w;
	int r;

	*work_p = NULL;
	if (view_count > LAYOUT_VIEWS_MAX)
		return err_raise(ERR_LIMIT, "views: %zu, the limit is %u", view_count,
				 LAYOUT_VIEWS_MAX);
	w = mem_zalloc(sizeof(*w));
	if (!w)
		return err_pass(-ENOMEM);
	w->room = room;
	w->dst = dst;
	r = work_init(w, sources, source_count);
	if (r == 0)
		r = find_dst_views(w, views, views ? view_count : dst->view_count);
	if (r < 0)
		cover_end(w);
	else
		*work_p = w;
	return r < 0 ? err_pass(r) : 0;
}

const struct cover *cover_of(const struct cover_work *w)
{
	return w->cover;
}

int cover_make(const struct cover_source *sources, size_t source_count,
	       const struct layout *dst, const char *const *views, size_t view_count,
	       uint64_t room, struct cover **cover_p)
{
	struct cover_work *w;
	int r = cover_begin(sources, source_count, dst, views, view_count, room, &w);

	*cover_p = NULL;
	while (r >= 0 && (r = cover_step(w)) > 0)
		;
	if (r == 0)
		*cover_p = mem_steal(w->cover);
	cover_end(w);
	return r < 0 ? err_pass(r) : 0;
}

/* ---- the sender's check ---- */

static int check_want(const struct layout *src, const struct layout *dst,
		      const struct plan_want *want)
{
	const struct layout_view *dv, *sv;
	const struct layout_layer *dl, *sl;
	const struct layout_field *df, *sf;
	uint64_t end = (uint64_t)want->first_unit + want->units;
	int r;

	if (want->view >= dst->view_count)
		return err_raise(ERR_RANGE, "want: view number %u, there are %u",
				 want->view, dst->view_count);
	dv = &dst->views[want->view];
	sv = layout_view_find(src, dv->name);
	dl = layout_layer_find(dv, want->layer);
	sl = sv ? layout_layer_find(sv, want->layer) : NULL;
	if (!dl || !sl)
		return err_raise(ERR_RANGE, "want: view %s layer %u: not in the %s",
				 dv->name, want->layer, dl ? "source" : "destination");
	if (want->field >= dl->field_count)
		return err_raise(ERR_RANGE,
				 "want: view %s layer %u field number %u, there are %u",
				 dv->name, want->layer, want->field, dl->field_count);
	df = &dl->fields[want->field];
	r = layout_layer_compatible(dv->name, dl, sl, &layout_from_destination);
	if (r < 0)
		return err_pass(r);
	sf = layout_field_find(sl, df->name);
	if (want->units == 0)
		return err_raise(ERR_RANGE, "want: view %s layer %u field %s: no units",
				 dv->name, want->layer, df->name);
	if (want->first_unit < df->first_unit ||
	    end > (uint64_t)df->first_unit + df->units ||
	    want->first_unit < sf->first_unit ||
	    end > (uint64_t)sf->first_unit + sf->units)
		return err_raise(ERR_RANGE,
				 "want: view %s layer %u field %s units [%u,%llu): the "
				 "source holds [%u,%llu), the destination [%u,%llu)",
				 dv->name, want->layer, df->name, want->first_unit,
				 (unsigned long long)end, sf->first_unit,
				 (unsigned long long)sf->first_unit + sf->units,
				 df->first_unit,
				 (unsigned long long)df->first_unit + df->units);
	return 0;
}

int cover_check_wants(const struct layout *src, const struct layout *dst,
		      const struct plan_want *wants, size_t want_count)
{
	struct plan_want *sorted cleanup_free = NULL;
	bool ascending = true; /* as cover_make() makes them */

	for (size_t i = 0; i < want_count; i++) {
		int r = check_want(src, dst, &wants[i]);

		if (r < 0)
			return err_pass(r);
		ascending = ascending &&
			    (i == 0 || plan_want_compare(&wants[i - 1], &wants[i]) <= 0);
	}
	if (!ascending) {
		sorted = mem_dup(wants, want_count * sizeof(*wants));
		if (!sorted)
			return -err_errno(ERR_NOMEM);
		qsort(sorted, want_count, sizeof(*sorted), plan_want_compare);
		wants = sorted;
	}
	for (size_t i = 1; i < want_count; i++) {
		const struct plan_want *a = &wants[i - 1], *b = &wants[i];

		if (a->view == b->view && a->layer == b->layer && a->field == b->field &&
		    (uint64_t)a->first_unit + a->units > b->first_unit)
			return err_raise(
				ERR_DUP,
				"want: view %s layer %u field number %u: unit %u twice",
				dst->views[b->view].name, b->layer, b->field,
				b->first_unit);
	}
	return 0;
}
