/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_random: what the property test feeds the planner.
 *
 * Both sides describe one model: the same views, layers, fields and units, cut
 * and laid out differently. A side is laid out by one of three means:
 *   tensor   all fields of a view in one tensor, its five dimensions (layer,
 *            field, page, token, unit) nested in a random order, padded at
 *            random: NHD, HND, cross-layer, K/V interleaved per token and
 *            everything between them;
 *   apart    a tensor of three dimensions for each field, in its own buffer or
 *            behind the last one;
 *   chaos    strides at random: rows overlap, interleave and repeat.
 * Sizes are small, so that coincidences (neighbours by chance, partial pages,
 * touching ends) are the rule.
 */
#include "tests/lib/plan_random.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DIM_LAYER, DIM_FIELD, DIM_PAGE, DIM_TOKEN, DIM_UNIT, DIMS };

struct model_field {
	uint64_t unit_bytes;
	uint32_t total;
};

struct model {
	uint32_t views, layers, fields;
	struct model_field field[2][3];
};

uint64_t random_next(uint64_t *state)
{
	uint64_t z = (*state += 0x9e3779b97f4a7c15u);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
	return z ^ (z >> 31);
}

uint32_t random_below(uint64_t *state, uint32_t n)
{
	return (uint32_t)(random_next(state) % n);
}

static uint32_t between(uint64_t *s, uint32_t lo, uint32_t hi)
{
	return lo + random_below(s, hi - lo + 1);
}

static bool chance(uint64_t *s, uint32_t percent)
{
	return random_below(s, 100) < percent;
}

static void *must(void *p)
{
	assert(p);
	return p;
}

static uint32_t buffer_add(struct layout *l, uint64_t len)
{
	l->buffers = must(realloc(l->buffers, (l->buffer_count + 1) * sizeof(uint64_t)));
	l->buffers[l->buffer_count] = len;
	return l->buffer_count++;
}

static void shuffle(uint64_t *s, uint32_t *a, uint32_t n)
{
	for (uint32_t i = n; i > 1; i--) {
		uint32_t j = random_below(s, i), t = a[i - 1];

		a[i - 1] = a[j];
		a[j] = t;
	}
}

/* Fields hold the whole, a part, or (rarely) nothing of their units. */
static void hold_units(uint64_t *s, struct layout_field *f, const struct model_field *m)
{
	uint32_t first = 0, end = m->total;

	if (chance(s, 60)) {
		first = random_below(s, m->total + 1);
		end = between(s, first, m->total);
	}
	f->unit_bytes = m->unit_bytes;
	f->total_units = m->total;
	f->first_unit = first;
	f->units = end - first;
}

/* Nest the dimensions in `order`, innermost first; returns the extent. */
static uint64_t nest_strides(uint64_t *s, const uint32_t *order, uint32_t n,
			     const uint64_t *counts, uint64_t extent, uint64_t *strides)
{
	for (uint32_t i = 0; i < n; i++) {
		strides[order[i]] = extent;
		if (chance(s, 25))
			strides[order[i]] += between(s, 1, 5);
		extent += (counts[order[i]] - 1) * strides[order[i]];
	}
	return extent;
}

static void lay_tensor(uint64_t *s, struct layout *l, struct layout_view *v)
{
	uint32_t order[DIMS] = {DIM_UNIT, DIM_TOKEN, DIM_FIELD, DIM_PAGE, DIM_LAYER};
	uint64_t counts[DIMS] = {1, 1, 1, 1, 1}, strides[DIMS], unit = 1, extent;
	uint32_t buffer;

	if (chance(s, 80))
		shuffle(s, order, DIMS);
	counts[DIM_LAYER] = v->layer_count ? v->layer_count : 1;
	counts[DIM_PAGE] = v->pages;
	counts[DIM_TOKEN] = v->page_tokens;
	for (uint32_t i = 0; i < v->layer_count; i++) {
		for (uint32_t j = 0; j < v->layers[i].field_count; j++) {
			const struct layout_field *f = &v->layers[i].fields[j];

			if (f->units > counts[DIM_UNIT])
				counts[DIM_UNIT] = f->units;
			if (f->unit_bytes > unit)
				unit = f->unit_bytes;
			if (v->layers[i].field_count > counts[DIM_FIELD])
				counts[DIM_FIELD] = v->layers[i].field_count;
		}
	}
	extent = nest_strides(s, order, DIMS, counts, unit, strides);
	buffer = buffer_add(l, extent + random_below(s, 3));
	for (uint32_t i = 0; i < v->layer_count; i++) {
		for (uint32_t j = 0; j < v->layers[i].field_count; j++) {
			struct layout_field *f = &v->layers[i].fields[j];

			f->buffer = buffer;
			f->offset = i * strides[DIM_LAYER] + j * strides[DIM_FIELD];
			f->page_stride = strides[DIM_PAGE];
			f->token_stride = strides[DIM_TOKEN];
			f->unit_stride = strides[DIM_UNIT];
		}
	}
}

static void lay_field(uint64_t *s, struct layout *l, const struct layout_view *v,
		      struct layout_field *f, bool own_buffer)
{
	uint32_t order[3] = {DIM_UNIT, DIM_TOKEN, DIM_PAGE};
	uint64_t counts[DIMS] = {1, 1, v->pages, v->page_tokens, f->units ? f->units : 1};
	uint64_t strides[DIMS], extent, at = 0;

	if (chance(s, 50))
		shuffle(s, order, 3);
	extent = nest_strides(s, order, 3, counts, f->unit_bytes, strides);
	if (own_buffer || l->buffer_count == 0) {
		f->buffer = buffer_add(l, extent + random_below(s, 2));
	} else {
		f->buffer = l->buffer_count - 1;
		at = l->buffers[f->buffer];
		l->buffers[f->buffer] += extent + random_below(s, 2);
	}
	f->offset = at;
	f->page_stride = strides[DIM_PAGE];
	f->token_stride = strides[DIM_TOKEN];
	f->unit_stride = strides[DIM_UNIT];
}

static void lay_chaos(uint64_t *s, struct layout *l, const struct layout_view *v,
		      struct layout_field *f)
{
	uint64_t end;

	f->offset = random_below(s, 40);
	f->page_stride = random_below(s, 40);
	f->token_stride = random_below(s, 30);
	f->unit_stride = random_below(s, 20);
	end = f->offset + (v->pages - 1) * f->page_stride +
	      (v->page_tokens - 1) * f->token_stride +
	      (f->units ? f->units - 1 : 0) * f->unit_stride + f->unit_bytes;
	if (l->buffer_count == 0 || chance(s, 20))
		buffer_add(l, 0);
	f->buffer = random_below(s, l->buffer_count);
	if (l->buffers[f->buffer] < end)
		l->buffers[f->buffer] = end;
}

static void lay_view(uint64_t *s, struct layout *l, struct layout_view *v)
{
	uint32_t how = random_below(s, 100);
	bool own = chance(s, 40);

	if (how < 50) {
		lay_tensor(s, l, v);
		return;
	}
	for (uint32_t i = 0; i < v->layer_count; i++) {
		for (uint32_t j = 0; j < v->layers[i].field_count; j++) {
			if (how < 85)
				lay_field(s, l, v, &v->layers[i].fields[j], own);
			else
				lay_chaos(s, l, v, &v->layers[i].fields[j]);
		}
	}
}

static void make_layer(uint64_t *s, const struct model *m, uint32_t view,
		       struct layout_layer *layer)
{
	uint32_t order[3] = {0, 1, 2};

	shuffle(s, order, m->fields);
	layer->field_count = m->fields;
	layer->fields = must(calloc(m->fields, sizeof(*layer->fields)));
	for (uint32_t j = 0; j < m->fields; j++) {
		snprintf(layer->fields[j].name, LAYOUT_NAME_MAX, "f%u", order[j]);
		hold_units(s, &layer->fields[j], &m->field[view][order[j]]);
	}
}

static struct layout *make_side(uint64_t *s, const struct model *m)
{
	struct layout *l = must(calloc(1, sizeof(*l)));

	l->rank = random_below(s, 8);
	l->view_count = m->views;
	l->views = must(calloc(m->views, sizeof(*l->views)));
	for (uint32_t i = 0; i < m->views; i++) {
		struct layout_view *v = &l->views[i];
		uint32_t skip = chance(s, 25) ? random_below(s, m->layers) : UINT32_MAX;

		snprintf(v->name, LAYOUT_NAME_MAX, "v%u", i);
		v->page_tokens = between(s, 1, 5);
		v->pages = between(s, 1, 7);
		if (chance(s, 25)) {
			v->shard.size = between(s, 2, 4);
			v->shard.rank = random_below(s, v->shard.size);
			v->shard.run = between(s, 1, 4);
		}
		v->layers = must(calloc(m->layers, sizeof(*v->layers)));
		for (uint32_t j = 0; j < m->layers; j++) {
			if (j == skip)
				continue;
			v->layers[v->layer_count].layer = j * 3;
			make_layer(s, m, i, &v->layers[v->layer_count++]);
		}
		lay_view(s, l, v);
	}
	return l;
}

static size_t make_pages(uint64_t *s, const struct layout_view *v, uint32_t *pages,
			 bool repeat)
{
	uint32_t all[RANDOM_PAGES], n = between(s, 1, v->pages);

	for (uint32_t i = 0; i < v->pages; i++)
		all[i] = i;
	if (chance(s, 60))
		shuffle(s, all, v->pages);
	for (uint32_t i = 0; i < n; i++)
		pages[i] = repeat && chance(s, 30) ? random_below(s, v->pages) : all[i];
	return n;
}

/* Some token that a list may begin with. */
static uint64_t make_first(uint64_t *s, const struct layout_view *v)
{
	uint64_t turn = v->shard.size ? (uint64_t)v->shard.size * v->shard.run : 1;

	return chance(s, 30) ? random_below(s, 6) / turn * turn : 0;
}

/* The first token that is the list's own and does not fit into it. */
static uint64_t list_end(const struct layout_view *v, uint64_t first, size_t pages)
{
	uint64_t slots = pages * v->page_tokens, t = first;

	for (;; t++) {
		if (v->shard.size && t / v->shard.run % v->shard.size != v->shard.rank)
			continue;
		if (slots-- == 0)
			return t;
	}
}

static void make_map(struct plan_random *pr, size_t i, uint32_t view)
{
	const struct layout_view *sv = &pr->src->views[view], *dv = &pr->dst->views[view];
	struct plan_map *m = &pr->maps[i];
	uint64_t *s = &pr->state, lo, hi, s_end, d_end;

	m->view = sv->name;
	m->src_pages = pr->pages[0][i];
	m->dst_pages = pr->pages[1][i];
	m->src_page_count = make_pages(s, sv, pr->pages[0][i], chance(s, 10));
	m->dst_page_count = make_pages(s, dv, pr->pages[1][i], chance(s, 3));
	m->src_first_token = make_first(s, sv);
	m->dst_first_token = make_first(s, dv);
	lo = m->src_first_token > m->dst_first_token ? m->src_first_token
						     : m->dst_first_token;
	s_end = list_end(sv, m->src_first_token, m->src_page_count);
	d_end = list_end(dv, m->dst_first_token, m->dst_page_count);
	hi = s_end < d_end ? s_end : d_end;
	if (chance(s, 40) && hi > lo) {
		m->token_begin = lo + random_below(s, (uint32_t)(hi - lo));
		m->token_end = m->token_begin +
			       random_below(s, (uint32_t)(hi - m->token_begin) + 1);
		m->tokens_set = true;
	}
	if (chance(s, 15))
		m->layers = (struct plan_layers){.begin = random_below(s, 4), .end = 7};
}

void plan_random_init(struct plan_random *pr, uint64_t seed)
{
	uint64_t *s = &pr->state;
	struct model m;

	*pr = (struct plan_random){.state = seed};
	random_next(s);
	m.views = between(s, 1, 2);
	m.layers = between(s, 1, 3);
	m.fields = between(s, 1, 3);
	for (uint32_t i = 0; i < 6; i++)
		m.field[i / 3][i % 3] = (struct model_field){
			.unit_bytes = between(s, 1, 6), .total = between(s, 1, 5)};
	pr->src = make_side(s, &m);
	pr->dst = make_side(s, &m);
	pr->req = (struct plan_request){
		.src = pr->src, .dst = pr->dst, .maps = pr->maps, .map_count = m.views};
	for (uint32_t i = 0; i < m.views; i++)
		make_map(pr, i, i);
	if (chance(s, 5)) /* one view's tokens in two maps */
		make_map(pr, pr->req.map_count++, 0);
}

static void side_free(struct layout *l)
{
	for (uint32_t i = 0; i < l->view_count; i++) {
		for (uint32_t j = 0; j < l->views[i].layer_count; j++)
			free(l->views[i].layers[j].fields);
		free(l->views[i].layers);
	}
	free(l->views);
	free(l->buffers);
	free(l);
}

void plan_random_fini(struct plan_random *pr)
{
	side_free(pr->src);
	side_free(pr->dst);
}

void plan_random_reverse(const struct plan_random *pr, struct plan_map *maps,
			 struct plan_request *req_p)
{
	*req_p = pr->req;
	req_p->src = pr->dst;
	req_p->dst = pr->src;
	req_p->maps = maps;
	for (size_t i = 0; i < pr->req.map_count; i++) {
		maps[i] = pr->maps[i];
		maps[i].src_pages = pr->maps[i].dst_pages;
		maps[i].src_page_count = pr->maps[i].dst_page_count;
		maps[i].src_first_token = pr->maps[i].dst_first_token;
		maps[i].dst_pages = pr->maps[i].src_pages;
		maps[i].dst_page_count = pr->maps[i].src_page_count;
		maps[i].dst_first_token = pr->maps[i].src_first_token;
	}
}
